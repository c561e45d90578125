/* The names that a pickle may use (unpickle.h), and what calls of them make. */
#include "base/fail.h"
#include "checkpoint/pickle_machine.h"

#include <stdio.h>
#include <string.h>

/* ---- Names ------------------------------------------------------------------------------------------------ */

static const struct {
    const char *name;
    td_dtype dtype;
} storages[] = {
    {"torch.FloatStorage", TD_F32},
    {"torch.DoubleStorage", TD_F64},
    {"torch.HalfStorage", TD_F16},
    {"torch.BFloat16Storage", TD_BF16},
    {"torch.CharStorage", TD_I8},
    {"torch.ByteStorage", TD_U8},
    {"torch.ShortStorage", TD_I16},
    {"torch.IntStorage", TD_I32},
    {"torch.LongStorage", TD_I64},
    {"torch.BoolStorage", TD_BOOL},
    {"torch.ComplexFloatStorage", TD_COMPLEX64},
    {"torch.ComplexDoubleStorage", TD_COMPLEX128},
};

static bool find_storage_class(const char *name, td_dtype *dtype)
{
    for (size_t i = 0; i < sizeof storages / sizeof storages[0]; i++)
        if (!strcmp(storages[i].name, name)) {
            *dtype = storages[i].dtype;
            return true;
        }
    return false;
}

static bool is_untyped_storage(const char *name)
{
    return !strcmp(name, "torch.storage.UntypedStorage") || !strcmp(name, "torch.UntypedStorage");
}

static bool is_dtype(const char *name, td_dtype *dtype)
{
    return !strncmp(name, "torch.", 6) && td_dtype_parse(name, dtype);
}

typedef td_status (*call_function)(struct td__pickle_machine *machine,
                                   struct td__pickle_value *args, struct td__pickle_value **result);

static td_status make_dict(struct td__pickle_machine *machine, struct td__pickle_value *args,
                           struct td__pickle_value **result);
static td_status make_tensor(struct td__pickle_machine *machine, struct td__pickle_value *args,
                             struct td__pickle_value **result);
static td_status take_first(struct td__pickle_machine *machine, struct td__pickle_value *args,
                            struct td__pickle_value **result);
static td_status make_device(struct td__pickle_machine *machine, struct td__pickle_value *args,
                             struct td__pickle_value **result);

static const struct {
    const char *name;
    call_function call;
} functions[] = {
    {"collections.OrderedDict", make_dict},
    {"torch._utils._rebuild_tensor", make_tensor},
    {"torch._utils._rebuild_tensor_v2", make_tensor},
    {"torch._utils._rebuild_tensor_v3", make_tensor},
    {"torch._utils._rebuild_parameter", take_first},
    {"torch._utils._rebuild_parameter_with_state", take_first},
    {"torch.Size", take_first},
    {"torch.device", make_device},
};

static call_function find_function(const char *name)
{
    for (size_t i = 0; i < sizeof functions / sizeof functions[0]; i++)
        if (!strcmp(functions[i].name, name))
            return functions[i].call;
    return NULL;
}

bool td__pickle_knows(const char *name)
{
    td_dtype dtype;
    return find_function(name) || find_storage_class(name, &dtype) || is_untyped_storage(name) ||
           is_dtype(name, &dtype);
}

td_status td__pickle_call(struct td__pickle_machine *machine, const char *name,
                          struct td__pickle_value *args, struct td__pickle_value **result)
{
    call_function call = find_function(name);
    return call ? call(machine, args, result)
                : td__pickle_damaged(machine, "what is called is no function");
}

/* ---- Arguments ---------------------------------------------------------------------------------------------- */

/* Argument `index`; NULL if it is missing or of another kind. */
static struct td__pickle_value *arg_of(const struct td__pickle_value *args, size_t index,
                                       enum td__pickle_kind kind)
{
    if (index >= args->as.list.count || args->as.list.items[index]->kind != kind)
        return NULL;
    return args->as.list.items[index];
}

/* A tuple of at most TD_MAX_DIMS numbers, none negative; returns how many, or -1. */
static int read_sizes(const struct td__pickle_value *tuple, int64_t *sizes)
{
    if (!tuple || tuple->as.list.count > TD_MAX_DIMS)
        return -1;
    for (size_t i = 0; i < tuple->as.list.count; i++) {
        const struct td__pickle_value *size = arg_of(tuple, i, TD__PICKLE_INT);
        if (!size || size->as.number < 0)
            return -1;
        sizes[i] = size->as.number;
    }
    return (int)tuple->as.list.count;
}

/* ---- Calls ---------------------------------------------------------------------------------------------------- */

/* OrderedDict(), or OrderedDict([(key, value), …]). */
static td_status make_dict(struct td__pickle_machine *machine, struct td__pickle_value *args,
                           struct td__pickle_value **result)
{
    struct td__pickle_value *dict = td__pickle_new(machine, TD__PICKLE_DICT);
    const struct td__pickle_value *pairs = arg_of(args, 0, TD__PICKLE_LIST);
    if (!dict)
        return TD_ERR_NOMEM;
    if (args->as.list.count > 1 || (args->as.list.count && !pairs))
        return td__pickle_damaged(machine, "an OrderedDict has other arguments than a list");
    for (size_t i = 0; pairs && i < pairs->as.list.count; i++) {
        const struct td__pickle_value *pair = arg_of(pairs, i, TD__PICKLE_LIST);
        if (!pair || pair->as.list.count != 2)
            return td__pickle_damaged(machine, "an OrderedDict is made of what are no pairs");
        TD_TRY(td__pickle_append(machine, dict, pair->as.list.items[0]));
        TD_TRY(td__pickle_append(machine, dict, pair->as.list.items[1]));
    }
    *result = dict;
    return TD_OK;
}

/* Whether all elements are inside of the storage. Strides are not negative. */
static bool fits(const struct td__pickle_tensor *tensor)
{
    int64_t last = tensor->offset, count = tensor->storage->count;
    if (!tensor->storage->is_typed)
        count /= (int64_t)td_dtype_size(tensor->dtype);
    for (int d = 0; d < tensor->ndim; d++)
        if (tensor->shape[d] == 0)
            return true;
    for (int d = 0; d < tensor->ndim; d++) {
        int64_t span;
        if (__builtin_mul_overflow(tensor->shape[d] - 1, tensor->strides[d], &span) ||
            __builtin_add_overflow(last, span, &last))
            return false;
    }
    return last < count;
}

/* A shape may have more elements than its storage, by strides of 0: these are no elements to be saved, and could need any
 * memory. */
static bool repeats(const struct td__pickle_tensor *tensor)
{
    int64_t count = 1;
    for (int d = 0; d < tensor->ndim; d++)
        if (__builtin_mul_overflow(count, tensor->shape[d], &count))
            return true;
    return count / 64 > tensor->storage->count;
}

/* (storage, offset, size, stride, requires_grad, hooks, …), of which the third version has a dtype as the seventh. */
static td_status make_tensor(struct td__pickle_machine *machine, struct td__pickle_value *args,
                             struct td__pickle_value **result)
{
    const struct td__pickle_value *storage = arg_of(args, 0, TD__PICKLE_STORAGE);
    const struct td__pickle_value *offset = arg_of(args, 1, TD__PICKLE_INT);
    const struct td__pickle_value *dtype = arg_of(args, 6, TD__PICKLE_GLOBAL);
    if (!storage || !offset || offset->as.number < 0)
        return td__pickle_damaged(machine, "a tensor lacks its storage");
    struct td__pickle_tensor tensor = {.storage = &storage->as.storage,
                                       .dtype = storage->as.storage.dtype,
                                       .offset = offset->as.number};
    bool has_dtype = storage->as.storage.is_typed;
    if (dtype)
        has_dtype = is_dtype(dtype->as.text, &tensor.dtype);
    tensor.ndim = read_sizes(arg_of(args, 2, TD__PICKLE_LIST), tensor.shape);
    int strides = read_sizes(arg_of(args, 3, TD__PICKLE_LIST), tensor.strides);
    if (tensor.ndim < 0 || strides != tensor.ndim || !has_dtype)
        return td__pickle_damaged(machine,
                                  "a tensor has no valid shape, strides or dtype, or too many "
                                  "dimensions");
    if (!fits(&tensor) || repeats(&tensor))
        return td__pickle_damaged(machine, "a tensor has more elements than its storage");
    *result = td__pickle_new(machine, TD__PICKLE_TENSOR);
    if (!*result)
        return TD_ERR_NOMEM;
    (*result)->as.tensor = tensor;
    return TD_OK;
}

/* A parameter is its tensor, and a torch.Size its tuple. */
static td_status take_first(struct td__pickle_machine *machine, struct td__pickle_value *args,
                            struct td__pickle_value **result)
{
    if (!args->as.list.count)
        return td__pickle_damaged(machine, "a call lacks its arguments");
    *result = args->as.list.items[0];
    return TD_OK;
}

/* torch.device("cuda"), torch.device("cuda", 1): a text. */
static td_status make_device(struct td__pickle_machine *machine, struct td__pickle_value *args,
                             struct td__pickle_value **result)
{
    const struct td__pickle_value *kind = arg_of(args, 0, TD__PICKLE_STRING);
    const struct td__pickle_value *index = arg_of(args, 1, TD__PICKLE_INT);
    char name[64];
    if (!kind)
        return td__pickle_damaged(machine, "a device has no name");
    if (index)
        snprintf(name, sizeof name, "%.32s:%lld", kind->as.text, (long long)index->as.number);
    else
        snprintf(name, sizeof name, "%.60s", kind->as.text);
    struct td__pickle_value *text = td__pickle_new(machine, TD__PICKLE_STRING);
    if (!text || !(text->as.text = strdup(name)))
        return td__fail_nomem(machine->path);
    *result = text;
    return TD_OK;
}

/* ("storage", class, key, location, number of elements) */
td_status td__pickle_find_storage(struct td__pickle_machine *machine,
                                  const struct td__pickle_value *id,
                                  struct td__pickle_value **storage)
{
    const struct td__pickle_value *kind = NULL, *class_name = NULL, *key = NULL, *location = NULL,
                                  *count = NULL;
    if (id->kind == TD__PICKLE_LIST && id->as.list.count >= 5) {
        kind = arg_of(id, 0, TD__PICKLE_STRING);
        class_name = arg_of(id, 1, TD__PICKLE_GLOBAL);
        key = arg_of(id, 2, TD__PICKLE_STRING);
        location = arg_of(id, 3, TD__PICKLE_STRING);
        count = arg_of(id, 4, TD__PICKLE_INT);
    }
    if (!kind || strcmp(kind->as.text, "storage") != 0 || !class_name || !key || !location ||
        !count || count->as.number < 0)
        return td__pickle_damaged(machine, "a reference to a storage is none");
    struct td__pickle_storage found = {
        .key = key->as.text, .location = location->as.text, .count = count->as.number};
    found.is_typed = find_storage_class(class_name->as.text, &found.dtype);
    if (!found.is_typed && !is_untyped_storage(class_name->as.text))
        return td__pickle_damaged(machine, "a storage is of a class that is none of storages");
    *storage = td__pickle_new(machine, TD__PICKLE_STORAGE);
    if (!*storage)
        return TD_ERR_NOMEM;
    (*storage)->as.storage = found;
    return TD_OK;
}
