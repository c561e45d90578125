/* A module as a value, and back. The modules of the tree are a flat list, parents before their children, so that the
 * depth of a module does not count towards that of values; tensors have numbers, so that shared ones stay shared:
 *
 *     {"tensors": [[tensor, whether it requires grad], …],
 *      "modules": [{"kind": "Linear", "name": "fc", "parent": 0, "training": true, "options": {"p": 0.5},
 *                   "parameters": [["weight", number of the tensor], …],
 *                   "buffers": [["running_mean", number of the tensor, whether it is saved], …],
 *                   "remote": of a remote module, its reference and what is known of it}, …]}
 *
 * The first module is the root; its name is "" and its parent -1. A received value may be anything: every entry is
 * checked here, and options and parts by the kind (load_options in nn.h). */
#include "base/fail.h"
#include "nn/module.h"
#include "rpc/codec.h"
#include "rpc/rpc_agent.h"

#include <stdlib.h>
#include <string.h>

/* Of one tree. Names of parts are compared with each other in a module, so that their number is limited. */
enum { MAX_DEPTH = 64, MAX_MODULES = 65536, MAX_PARTS = 8192, MAX_OPTIONS = 256 };

/* ---- To a value --------------------------------------------------------------------------------- */

struct packing {
    td_tensor **tensors; /* not retained: the module holds them */
    int count, capacity;
    td_value *modules; /* a list */
};

/* Appends an item to a list, which both belong to the scope. */
static td_status append(td_value *list, td_value *item)
{
    if (!list || !item)
        return td__error_status() ? td__error_status() : TD_ERR_NOMEM;
    if (td__value_append(list, NULL, td_value_retain(item)))
        return TD_OK;
    td_value_release(item);
    return td__error_status();
}

/* The number of a tensor, which may be a new one; -1 without memory. */
static int number_of(struct packing *packing, td_tensor *tensor)
{
    for (int i = 0; i < packing->count; i++)
        if (packing->tensors[i] == tensor)
            return i;
    if (packing->count == packing->capacity) {
        int capacity = packing->capacity ? packing->capacity * 2 : 16;
        td_tensor **tensors = realloc(packing->tensors, (size_t)capacity * sizeof *tensors);
        if (!tensors) {
            td__fail_nomem("rpc");
            return -1;
        }
        packing->tensors = tensors;
        packing->capacity = capacity;
    }
    packing->tensors[packing->count] = tensor;
    return packing->count++;
}

static td_value *pack_entries(struct packing *packing, const struct td__module_tensors *entries)
{
    td_value *list = td__value_adopt(td__value_new_list(entries->count));
    for (int i = 0; list && i < entries->count; i++) {
        const struct td__module_tensor *entry = &entries->at[i];
        int number = number_of(packing, entry->tensor);
        td_value *item = number < 0 ? NULL : td_value_from_text(entry->name);
        if (item)
            item = entry->is_buffer ? TD_ARGS(item, number, entry->saved) : TD_ARGS(item, number);
        if (append(list, item))
            return NULL;
    }
    return list;
}

static td_value *pack_options(const td_module *module)
{
    td_state *options = td__module_save_options(module);
    td_value *map = options ? td_value_map() : NULL;
    for (int i = 0; map && i < td_state_count(options); i++) {
        const char *name = td_state_name(options, i);
        const td_tensor *tensor = td_state_tensor(options, i);
        bool is_integer = tensor->layout.dtype == TD_I64;
        int64_t integer = 0;
        double number = 0;
        td_status status = TD_OK;
        if (tensor->layout.ndim || (!is_integer && tensor->layout.dtype != TD_F64))
            status = td_fail(TD_ERR_INVALID,
                             "save_options of a %s has added \"%s\", which is not a number",
                             module->ops->name, name);
        else if (is_integer)
            status = td_state_get_integer(options, name, &integer);
        else
            status = td_state_get_number(options, name, &number);
        map = status ? NULL
                     : td_value_set(map, name,
                                    is_integer ? td_value_from_int(integer)
                                               : td_value_from_float(number));
    }
    td_state_destroy(options);
    return map;
}

static td_status check_limits(const td_module *module, int depth, int64_t modules)
{
    if (depth <= MAX_DEPTH && modules < MAX_MODULES && module->parameters.count <= MAX_PARTS &&
        module->buffers.count <= MAX_PARTS && module->child_count <= MAX_PARTS)
        return TD_OK;
    return td_fail(TD_ERR_INVALID,
                   "the module is too large to be sent: there may be %d modules, nested %d deep, "
                   "and %d parameters, buffers or children in one",
                   MAX_MODULES, MAX_DEPTH, MAX_PARTS);
}

static td_status pack(struct packing *packing, const td_module *module, const char *name,
                      int64_t parent, int depth)
{
    int64_t index = packing->modules->count;
    TD_TRY(check_limits(module, depth, index));
    td_value *map = td_value_map();
    map = td_value_set(map, "kind", td_value_from_text(module->ops->name));
    map = td_value_set(map, "name", td_value_from_text(name));
    map = td_value_set(map, "parent", td_value_from_int(parent));
    map = td_value_set(map, "training", td_value_from_bool(module->training));
    map = td_value_set(map, "options", map ? pack_options(module) : NULL);
    map = td_value_set(map, "parameters", map ? pack_entries(packing, &module->parameters) : NULL);
    map = td_value_set(map, "buffers", map ? pack_entries(packing, &module->buffers) : NULL);
    td_value *remote = map ? td__remote_module_pack(module) : NULL;
    if (remote)
        map = td_value_set(map, "remote", remote);
    TD_TRY(append(packing->modules, map));
    for (int i = 0; i < module->child_count; i++)
        TD_TRY(
            pack(packing, module->children[i].module, module->children[i].name, index, depth + 1));
    return TD_OK;
}

/* Tensors without a graph: a parameter is sent as its elements, and is no part of a computation over several workers. */
static td_value *pack_tensors(const struct packing *packing)
{
    td_value *list = td__value_adopt(td__value_new_list(packing->count));
    for (int i = 0; list && i < packing->count; i++) {
        td_tensor *alias = td__alias(packing->tensors[i]);
        td_value *tensor = alias ? td_value_from_tensor(alias) : NULL;
        td_tensor_release(alias);
        bool requires_grad = td_tensor_requires_grad(packing->tensors[i]);
        if (append(list, tensor ? TD_ARGS(tensor, requires_grad) : NULL))
            return NULL;
    }
    return list;
}

td_value *td__module_pack(td_module *module)
{
    if (!module)
        return td__null(__func__);
    struct packing packing = {.modules = td__value_adopt(td__value_new_list(1))};
    td_value *packed = NULL;
    if (packing.modules && !pack(&packing, module, "", -1, 1)) {
        packed = td_value_set(td_value_map(), "tensors", pack_tensors(&packing));
        packed = td_value_set(packed, "modules", packing.modules);
    }
    free(packing.tensors);
    return packed;
}

/* ---- From a value ------------------------------------------------------------------------------- */

struct unpacking {
    td_tensor **tensors; /* retained */
    bool *requires_grad;
    int tensor_count;
    td_module **modules; /* the first owns the others */
    int *depths;
    int count; /* of the modules that were made */
};

static void *invalid(const char *what)
{
    td_fail(TD_ERR_INVALID, "a received module is not valid: %s", what);
    return NULL;
}

static bool is(const td_value *value, td_value_kind kind)
{
    return value && value->kind == kind;
}

static const char *text_of(const td_value *value)
{
    return is(value, TD_VALUE_TEXT) ? (const char *)(value + 1) : NULL;
}

static td_status fail_invalid(const char *what)
{
    invalid(what);
    return TD_ERR_INVALID;
}

/* The tensors, each as one of its own over the received memory: a graph, and other uses of the same tensor, are no
 * part of the module. */
static td_status unpack_tensors(struct unpacking *unpacking, const td_value *list)
{
    if (!is(list, TD_VALUE_LIST) || list->count > TD__MAX_TENSORS)
        return fail_invalid("\"tensors\" is not a list, or too long");
    size_t count = (size_t)list->count + 1; /* not 0 */
    unpacking->tensors = calloc(count, sizeof *unpacking->tensors);
    unpacking->requires_grad = calloc(count, sizeof *unpacking->requires_grad);
    if (!unpacking->tensors || !unpacking->requires_grad)
        return td__fail_nomem("rpc");
    for (int64_t i = 0; i < list->count; i++) {
        const td_value *pair = list->items[i];
        if (!is(pair, TD_VALUE_LIST) || pair->count != 2 || !is(pair->items[0], TD_VALUE_TENSOR) ||
            !is(pair->items[1], TD_VALUE_BOOL))
            return fail_invalid("a tensor is not [tensor, bool]");
        td_tensor *tensor = td__alias(pair->items[0]->tensor);
        if (!tensor)
            return TD_ERR_NOMEM;
        unpacking->tensors[i] = tensor;
        unpacking->requires_grad[i] = pair->items[1]->boolean;
        unpacking->tensor_count++;
    }
    return TD_OK;
}

static td_status unpack_entries(struct unpacking *unpacking, td_module *module,
                                const td_value *list, bool buffers)
{
    if (!is(list, TD_VALUE_LIST) || list->count > MAX_PARTS)
        return fail_invalid("its parameters or buffers are not a list, or too many");
    for (int64_t i = 0; i < list->count; i++) {
        const td_value *item = list->items[i];
        int64_t size = buffers ? 3 : 2;
        if (!is(item, TD_VALUE_LIST) || item->count != size || !is(item->items[0], TD_VALUE_TEXT) ||
            !is(item->items[1], TD_VALUE_INT) || (buffers && !is(item->items[2], TD_VALUE_BOOL)))
            return fail_invalid(
                "a parameter is not [text, int], or a buffer not [text, int, bool]");
        int64_t number = item->items[1]->integer;
        if (number < 0 || number >= unpacking->tensor_count)
            return fail_invalid("a parameter or buffer has the number of no tensor");
        td_tensor *tensor = unpacking->tensors[number];
        const char *name = text_of(item->items[0]);
        TD_TRY(buffers ? td_module_add_buffer(module, name, tensor, item->items[2]->boolean)
                       : td_module_add_parameter(module, name, tensor));
    }
    return TD_OK;
}

/* A module without parts as a child of its parent. */
static td_module *unpack_kind(struct unpacking *unpacking, const td_value *map)
{
    const char *kind = text_of(td_value_get(map, "kind"));
    const char *name = text_of(td_value_get(map, "name"));
    const td_value *parent = td_value_get(map, "parent"), *training = td_value_get(map, "training");
    int index = unpacking->count;
    if (!kind || !name || !is(parent, TD_VALUE_INT) || !is(training, TD_VALUE_BOOL))
        return invalid("one of \"kind\", \"name\", \"parent\" and \"training\" is missing, or of "
                       "another type");
    if (index == 0 ? parent->integer != -1 || name[0]
                   : parent->integer < 0 || parent->integer >= index)
        return invalid("a parent does not come before its children");
    int depth = index ? unpacking->depths[parent->integer] + 1 : 1;
    td_module *above = index ? unpacking->modules[parent->integer] : NULL;
    if (depth > MAX_DEPTH || (above && above->child_count >= MAX_PARTS))
        return invalid("it is nested too deep, or has too many children");
    const td_module_ops *ops = td__module_kind(kind);
    td_module *module = ops ? td_module_create(ops) : NULL;
    if (!module)
        return NULL;
    module->training = training->boolean;
    if (above && td_module_add_child(above, name, module)) /* which has destroyed it */
        return NULL;
    unpacking->modules[index] = module;
    unpacking->depths[index] = depth;
    unpacking->count++;
    return module;
}

static td_status unpack_module(struct unpacking *unpacking, const td_value *map)
{
    enum { ENTRIES = 7 };
    const td_value *remote = is(map, TD_VALUE_MAP) ? td_value_get(map, "remote") : NULL;
    if (!is(map, TD_VALUE_MAP) || map->count != ENTRIES + (remote != NULL))
        return fail_invalid("one of \"modules\" is not a map, or has other entries");
    td_module *module = unpack_kind(unpacking, map);
    if (!module)
        return td__error_status();
    if (remote)
        TD_TRY(td__remote_module_unpack(module, remote));
    TD_TRY(unpack_entries(unpacking, module, td_value_get(map, "parameters"), false));
    return unpack_entries(unpacking, module, td_value_get(map, "buffers"), true);
}

static td_status add_option(td_state *options, const char *name, const td_value *value)
{
    if (is(value, TD_VALUE_INT))
        return td_state_add_integer(options, name, value->integer);
    if (is(value, TD_VALUE_FLOAT))
        return td_state_add_number(options, name, value->number);
    return fail_invalid("an option is not a number");
}

static td_status unpack_options(td_module *module, const td_value *map)
{
    if (!is(map, TD_VALUE_MAP) || map->count > MAX_OPTIONS)
        return fail_invalid("its options are not a map, or too many");
    td_state *options = td_state_create();
    td_status status = options ? TD_OK : TD_ERR_NOMEM;
    for (int64_t i = 0; i < map->count && !status; i++)
        status = add_option(options, map->keys[i], map->items[i]);
    if (!status)
        status = td__module_load_options(module, options);
    td_state_destroy(options);
    return status;
}

static td_status unpack_all(struct unpacking *unpacking, const td_value *packed)
{
    if (!is(packed, TD_VALUE_MAP) || packed->count != 2)
        return fail_invalid("it is not a map of \"tensors\" and \"modules\"");
    TD_TRY(unpack_tensors(unpacking, td_value_get(packed, "tensors")));
    const td_value *list = td_value_get(packed, "modules");
    if (!is(list, TD_VALUE_LIST) || list->count < 1 || list->count > MAX_MODULES)
        return fail_invalid("\"modules\" is not a list, empty, or too long");
    unpacking->modules = calloc((size_t)list->count, sizeof *unpacking->modules);
    unpacking->depths = calloc((size_t)list->count, sizeof *unpacking->depths);
    if (!unpacking->modules || !unpacking->depths)
        return td__fail_nomem("rpc");
    for (int64_t i = 0; i < list->count; i++)
        TD_TRY(unpack_module(unpacking, list->items[i]));
    for (int i = 0; i < unpacking->tensor_count; i++) /* parameters require grad so far */
        TD_TRY(td_tensor_set_requires_grad(unpacking->tensors[i], unpacking->requires_grad[i]));
    for (int64_t i = list->count - 1; i >= 0; i--) /* children first: a kind may look at them */
        TD_TRY(unpack_options(unpacking->modules[i], td_value_get(list->items[i], "options")));
    return TD_OK;
}

td_module *td__module_unpack(const td_value *packed)
{
    TD_SCOPE;
    struct unpacking unpacking = {0};
    td_status status = unpack_all(&unpacking, packed);
    td_module *module = unpacking.count ? unpacking.modules[0] : NULL;
    if (status) {
        td_module_destroy(module);
        module = NULL;
    }
    for (int i = 0; i < unpacking.tensor_count; i++)
        td_tensor_release(unpacking.tensors[i]);
    free(unpacking.tensors);
    free(unpacking.requires_grad);
    free(unpacking.modules);
    free(unpacking.depths);
    return module;
}
