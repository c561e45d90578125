/* Traversal of a module and its children: tensors by name, and operations on all of them. */
#include "nn/module.h"

#include "base/buffer.h"
#include "base/fail.h"

#include <string.h>

/* ---- Names -------------------------------------------------------------------------------------- */

struct walk {
    struct td__buffer path; /* of the current module, with a dot at the end */
    td__visit_tensor visit;
    void *arg;
};

/* Appends `name` and `end`, with a NUL that does not count. */
static td_status extend(struct td__buffer *path, const char *name, const char *end)
{
    td__buffer_put(path, name, strlen(name));
    td__buffer_put(path, end, strlen(end));
    td__buffer_put_u8(path, 0);
    if (path->failed)
        return td__fail_nomem("td_module");
    path->size--;
    return TD_OK;
}

static td_status visit_tensors(struct walk *walk, struct td__module_tensors *entries)
{
    size_t before = walk->path.size;
    td_status status = TD_OK;
    for (int i = 0; i < entries->count && !status; i++) {
        status = extend(&walk->path, entries->at[i].name, "");
        if (!status)
            status = walk->visit((const char *)walk->path.data, &entries->at[i], walk->arg);
        walk->path.size = before;
    }
    return status;
}

static td_status visit_module(struct walk *walk, td_module *module)
{
    if (module->ops->refuse_tensors)
        TD_TRY(module->ops->refuse_tensors(module));
    TD_TRY(visit_tensors(walk, &module->parameters));
    TD_TRY(visit_tensors(walk, &module->buffers));
    size_t before = walk->path.size;
    for (int i = 0; i < module->child_count; i++) {
        TD_TRY(extend(&walk->path, module->children[i].name, "."));
        TD_TRY(visit_module(walk, module->children[i].module));
        walk->path.size = before;
    }
    return TD_OK;
}

td_status td__module_visit(td_module *module, td__visit_tensor visit, void *arg)
{
    struct walk walk = {.visit = visit, .arg = arg};
    td_status status = visit_module(&walk, module);
    td__buffer_free(&walk.path);
    return status;
}

/* The module that the first `size` bytes of a name denote. */
static td_module *descend(td_module *module, const char *name, size_t size)
{
    while (module && size) {
        const char *dot = memchr(name, '.', size);
        size_t length = dot ? (size_t)(dot - name) : size;
        td_module *found = NULL;
        for (int i = 0; i < module->child_count && !found; i++) {
            const char *child = module->children[i].name;
            if (strlen(child) == length && memcmp(child, name, length) == 0)
                found = module->children[i].module;
        }
        module = found;
        size -= dot ? length + 1 : length;
        name += dot ? length + 1 : length;
        if (dot && size == 0)
            return NULL; /* a dot at the end */
    }
    return module;
}

td_module *td_module_find(td_module *module, const char *name)
{
    if (!module)
        return td__null(__func__);
    td_module *found = name ? descend(module, name, strlen(name)) : NULL;
    if (!found)
        td_fail(TD_ERR_INVALID, "td_module_find: the %s has no module \"%s\"", module->ops->name,
                name ? name : "(NULL)");
    return found;
}

static struct td__module_tensor *tensor_in(struct td__module_tensors *entries, const char *name)
{
    for (int i = 0; i < entries->count; i++)
        if (strcmp(entries->at[i].name, name) == 0)
            return &entries->at[i];
    return NULL;
}

/* The entry of a name among the parameters, the buffers, or both. */
static struct td__module_tensor *find_tensor(td_module *module, const char *call, const char *name,
                                             bool parameters, bool buffers)
{
    const char *last = name ? strrchr(name, '.') : NULL;
    td_module *owner = name ? descend(module, name, last ? (size_t)(last - name) : 0) : NULL;
    struct td__module_tensor *entry = NULL;
    if (owner && parameters)
        entry = tensor_in(&owner->parameters, last ? last + 1 : name);
    if (owner && !entry && buffers)
        entry = tensor_in(&owner->buffers, last ? last + 1 : name);
    if (!entry)
        td_fail(TD_ERR_INVALID, "%s: the %s has no %s \"%s\"", call, module->ops->name,
                parameters ? (buffers ? "parameter or buffer" : "parameter") : "buffer",
                name ? name : "(NULL)");
    return entry;
}

td_tensor *td_module_parameter(td_module *module, const char *name)
{
    if (!module)
        return td__null(__func__);
    struct td__module_tensor *entry = find_tensor(module, "td_module_parameter", name, true, false);
    return entry ? entry->tensor : NULL;
}

td_tensor *td_module_buffer(td_module *module, const char *name)
{
    if (!module)
        return td__null(__func__);
    struct td__module_tensor *entry = find_tensor(module, "td_module_buffer", name, false, true);
    return entry ? entry->tensor : NULL;
}

td_status td_module_set_tensor(td_module *module, const char *name, td_tensor *tensor)
{
    if (!module || !tensor)
        return td__fail_null(__func__);
    struct td__module_tensor *entry = find_tensor(module, "td_module_set_tensor", name, true, true);
    if (!entry)
        return TD_ERR_INVALID;
    td_tensor *former = entry->tensor;
    entry->tensor = td_tensor_retain(tensor);
    td_tensor_release(former);
    return TD_OK;
}

/* ---- Lists -------------------------------------------------------------------------------------- */

struct listing {
    td_state *state;
    bool buffers;
};

static td_status list_tensor(const char *name, struct td__module_tensor *entry, void *arg)
{
    struct listing *listing = arg;
    if (entry->is_buffer != listing->buffers)
        return TD_OK;
    for (int i = 0; i < td_state_count(listing->state); i++)
        if (td_state_tensor(listing->state, i) == entry->tensor)
            return TD_OK;
    return td_state_add(listing->state, name, entry->tensor);
}

static td_state *list(td_module *module, bool buffers)
{
    struct listing listing = {.state = module ? td_state_create() : NULL, .buffers = buffers};
    if (listing.state && td__module_visit(module, list_tensor, &listing)) {
        td_state_destroy(listing.state);
        return NULL;
    }
    return listing.state;
}

td_state *td_module_parameters(td_module *module)
{
    return list(module, false);
}

td_state *td_module_buffers(td_module *module)
{
    return list(module, true);
}

int64_t td_module_parameter_count(td_module *module)
{
    td_state *parameters = td_module_parameters(module);
    int64_t count = 0;
    for (int i = 0; i < td_state_count(parameters); i++)
        count += td_tensor_numel(td_state_tensor(parameters, i));
    td_state_destroy(parameters);
    return count;
}

/* ---- Operations on all -------------------------------------------------------------------------- */

td_status td_module_zero_grad(td_module *module)
{
    if (!module)
        return td__fail_null(__func__);
    for (int i = 0; i < module->parameters.count; i++)
        TD_TRY(td_tensor_zero_grad(module->parameters.at[i].tensor));
    for (int i = 0; i < module->child_count; i++)
        TD_TRY(td_module_zero_grad(module->children[i].module));
    return TD_OK;
}

td_status td_module_requires_grad_(td_module *module, bool requires_grad)
{
    if (!module)
        return td__fail_null(__func__);
    if (module->ops->refuse_tensors)
        TD_TRY(module->ops->refuse_tensors(module));
    for (int i = 0; i < module->parameters.count; i++)
        TD_TRY(td_tensor_set_requires_grad(module->parameters.at[i].tensor, requires_grad));
    for (int i = 0; i < module->child_count; i++)
        TD_TRY(td_module_requires_grad_(module->children[i].module, requires_grad));
    return TD_OK;
}

void td_module_train(td_module *module, bool training)
{
    if (!module)
        return;
    module->training = training;
    if (module->ops->train)
        module->ops->train(module);
    for (int i = 0; i < module->child_count; i++)
        td_module_train(module->children[i].module, training);
}

void td_module_eval(td_module *module)
{
    td_module_train(module, false);
}

bool td_module_is_training(const td_module *module)
{
    return module && module->training;
}

td_status td_module_apply(td_module *module, td_module_fn fn, void *arg)
{
    if (!module)
        return td__fail_null(__func__);
    for (int i = 0; i < module->child_count; i++)
        TD_TRY(td_module_apply(module->children[i].module, fn, arg));
    return fn(module, arg);
}
