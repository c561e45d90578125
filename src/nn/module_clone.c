/* Modules with other tensors: clones, and modules that move to another device or dtype.
 *
 * Both first make a list of pairs, each tensor and its replacement, so that a shared tensor has one
 * replacement. The module is not changed until all replacements exist. */
#include "nn/module.h"

#include "base/fail.h"

#include <stdlib.h>
#include <string.h>

struct pair {
    td_tensor *from; /* not retained */
    td_tensor *to;   /* retained */
};

struct pairs {
    struct pair *at;
    size_t count, capacity;
    td_tensor_map map;
    void *arg;
};

static void free_pairs(struct pairs *pairs)
{
    for (size_t i = 0; i < pairs->count; i++)
        td_tensor_release(pairs->at[i].to);
    free(pairs->at);
}

static td_tensor *successor(const struct pairs *pairs, const td_tensor *tensor)
{
    for (size_t i = 0; i < pairs->count; i++)
        if (pairs->at[i].from == tensor)
            return pairs->at[i].to;
    return NULL;
}

/* Makes the replacement of an entry's tensor, unless there is one. */
static td_status pair_tensor(const char *name, struct td__module_tensor *entry, void *arg)
{
    (void)name;
    struct pairs *pairs = arg;
    if (successor(pairs, entry->tensor))
        return TD_OK;
    if (pairs->count == pairs->capacity) {
        size_t capacity = pairs->capacity ? pairs->capacity * 2 : 16;
        struct pair *at = realloc(pairs->at, capacity * sizeof at[0]);
        if (!at)
            return td__fail_nomem("td_module_clone");
        pairs->at = at;
        pairs->capacity = capacity;
    }
    td_tensor *to = NULL;
    {
        TD_SCOPE;
        to = td_tensor_retain(pairs->map(entry->tensor, pairs->arg));
    }
    if (!to)
        return TD_ERR_NOMEM;
    pairs->at[pairs->count++] = (struct pair){.from = entry->tensor, .to = to};
    return TD_OK;
}

static td_status make_pairs(struct pairs *pairs, td_module *module)
{
    return td__module_visit(module, pair_tensor, pairs);
}

/* ---- Clones ------------------------------------------------------------------------------------- */

static td_status clone_tensors(td_module *clone, const struct td__module_tensors *entries,
                               const struct pairs *pairs)
{
    for (int i = 0; i < entries->count; i++) {
        const struct td__module_tensor *entry = &entries->at[i];
        td_tensor *tensor = successor(pairs, entry->tensor);
        /* td_module_add_parameter() makes it require grad: restore what it was. */
        bool requires_grad = td_tensor_requires_grad(tensor);
        if (entry->is_buffer)
            TD_TRY(td_module_add_buffer(clone, entry->name, tensor, entry->saved));
        else
            TD_TRY(td_module_add_parameter(clone, entry->name, tensor));
        if (!entry->is_buffer && !requires_grad)
            TD_TRY(td_tensor_set_requires_grad(tensor, false));
    }
    return TD_OK;
}

static td_module *clone(const td_module *module, const struct pairs *pairs)
{
    if (module->ops->free_data && !module->ops->clone_data) {
        td_fail(TD_ERR_UNSUPPORTED,
                "td_module_clone: a %s has free_data but no clone_data, and cannot be cloned",
                module->ops->name);
        return NULL;
    }
    td_module *copy = td_module_create(module->ops);
    if (!copy)
        return NULL;
    copy->training = module->training;
    if (module->ops->data_size)
        memcpy(copy->data, module->data, module->ops->data_size);
    if (module->ops->clone_data && module->ops->clone_data(copy->data, module->data)) {
        memset(copy->data, 0, module->ops->data_size);
        free(copy->data); /* without free_data: the pointers in it belong to the other module */
        free(copy);
        return NULL;
    }
    td_status status = clone_tensors(copy, &module->parameters, pairs);
    if (!status)
        status = clone_tensors(copy, &module->buffers, pairs);
    for (int i = 0; i < module->child_count && !status; i++)
        status = td_module_add_child(copy, module->children[i].name,
                                     clone(module->children[i].module, pairs));
    if (!status)
        return copy;
    td_module_destroy(copy);
    return NULL;
}

td_module *td_module_clone_with(const td_module *module, td_tensor_map map, void *arg)
{
    if (!module)
        return td__null(__func__);
    if (!map) {
        td_fail(TD_ERR_INVALID, "td_module_clone_with: the function is NULL");
        return NULL;
    }
    struct pairs pairs = {.map = map, .arg = arg};
    td_module *copy = NULL;
    if (!make_pairs(&pairs, (td_module *)module))
        copy = clone(module, &pairs);
    free_pairs(&pairs);
    return copy;
}

static td_tensor *copy_tensor(td_tensor *tensor, void *arg)
{
    (void)arg;
    td_tensor *copy = NULL;
    {
        TD_NO_GRAD;
        copy = td_clone(tensor);
    }
    if (copy && td_tensor_set_requires_grad(copy, td_tensor_requires_grad(tensor)))
        return NULL;
    return copy;
}

td_module *td_module_clone(const td_module *module)
{
    return td_module_clone_with(module, copy_tensor, NULL);
}

/* ---- Other devices and dtypes ------------------------------------------------------------------- */

struct place {
    td_device *device; /* NULL: convert instead */
    td_dtype dtype;
};

static td_tensor *moved(td_tensor *tensor, const struct place *place)
{
    if (place->device)
        return td_tensor_to(tensor, place->device);
    td_dtype dtype = td_tensor_dtype(tensor);
    bool is_float = dtype == TD_F32 || dtype == TD_F64 || dtype == TD_F16 || dtype == TD_BF16;
    return is_float ? td_to_dtype(tensor, place->dtype) : td_detach(tensor);
}

static td_tensor *move_tensor(td_tensor *tensor, void *arg)
{
    td_tensor *to = NULL;
    {
        TD_NO_GRAD;
        to = moved(td_detach(tensor), arg);
    }
    if (!to || !td_tensor_requires_grad(tensor))
        return to;
    td_tensor *grad = td_tensor_is_leaf(tensor) ? td_tensor_grad(tensor) : NULL;
    td_tensor *grad_there = NULL;
    {
        TD_NO_GRAD;
        grad_there = moved(grad, arg);
    }
    if ((grad && !grad_there) || td_tensor_set_requires_grad(to, true) ||
        (grad && td_tensor_set_grad(to, grad_there)))
        return NULL;
    return to;
}

static bool is_there(const td_tensor *from, const td_tensor *to)
{
    return from->storage == to->storage;
}

static td_status replace_tensor(const char *name, struct td__module_tensor *entry, void *pairs)
{
    (void)name;
    td_tensor *to = successor(pairs, entry->tensor);
    if (!is_there(entry->tensor, to)) {
        td_tensor_retain(to);
        td_tensor_release(entry->tensor); /* pairs are found by address */
        entry->tensor = to;
    }
    return TD_OK;
}

static td_status move(td_module *module, struct place *place)
{
    struct pairs pairs = {.map = move_tensor, .arg = place};
    td_status status = make_pairs(&pairs, module);
    if (!status)
        status = td__module_visit(module, replace_tensor, &pairs);
    free_pairs(&pairs);
    return status;
}

td_status td_module_to(td_module *module, td_device *device)
{
    if (!module)
        return td__fail_null(__func__);
    device = td__use_device("td_module_to", device);
    if (!device)
        return td__error_status();
    return move(module, &(struct place){.device = device});
}

td_status td_module_to_dtype(td_module *module, td_dtype dtype)
{
    if (!module)
        return td__fail_null(__func__);
    if (dtype != TD_F32 && dtype != TD_F64 && dtype != TD_F16 && dtype != TD_BF16)
        return td_fail(
            TD_ERR_INVALID,
            "td_module_to_dtype: %s is no floating-point dtype; parameters must be of one",
            td_dtype_name(dtype));
    return move(module, &(struct place){.dtype = dtype});
}
