/* Values: making and reading them; see value.h. Lists and maps are filled by value_items.c. */
#include "rpc/value_internal.h"

#include "base/fail.h"
#include "base/text.h"
#include "rpc/block_cache.h"
#include "rpc/rpc_registry.h"
#include "tensor/tensor_internal.h"

#include <tandem/rpc.h>

#include <stdlib.h>
#include <string.h>

/* ---- References ------------------------------------------------------------------------------ */

td_value *td__value_create(td_value_kind kind, size_t more)
{
    td_value *value = NULL;
    bool in_block = more <= TD__BLOCK - sizeof *value;
    if (in_block)
        value = td__rpc_block_alloc(TD__BLOCK);
    else if (more < SIZE_MAX - sizeof *value)
        value = malloc(sizeof *value + more);
    if (!value) {
        td__fail_nomem("value");
        return NULL;
    }
    /* Not by memset(): compilers make calloc() of malloc() and memset(), and glibc's calloc() before 2.41 does not use
     * the thread's cache of freed blocks, so that free() finds it full: twice the slow way for every value. */
    *value = (td_value){.owners = 1,
                        .kind = kind,
                        .in_block = in_block,
                        .items = NULL}; /* with the largest member of the union */
    return value;
}

/* nil, false and true: they belong to no scope, and are never freed. */
static td_value constants[] = {{.kind = TD_VALUE_NIL},
                               {.kind = TD_VALUE_BOOL, .boolean = false},
                               {.kind = TD_VALUE_BOOL, .boolean = true}};

static bool is_constant(const td_value *value)
{
    return value >= constants && value < constants + sizeof constants / sizeof constants[0];
}

td_value *td_value_retain(td_value *value)
{
    if (value && !is_constant(value))
        atomic_fetch_add_explicit(&value->owners, 1, memory_order_relaxed);
    return value;
}

static void destroy(td_value *value)
{
    switch (value->kind) {
    case TD_VALUE_LIST:
    case TD_VALUE_MAP:
        td__value_free_items(value);
        break;
    case TD_VALUE_TENSOR:
        td_tensor_release(value->tensor);
        break;
    case TD_VALUE_MODULE:
        td_module_destroy(value->module);
        break;
    case TD_VALUE_RREF:
        td_rref_release(value->rref);
        break;
    case TD_VALUE_FUTURE:
        td_future_release(value->future);
        break;
    case TD_VALUE_OBJECT:
        td__class_destroy_object(value->object_class, value->object);
        td__class_release(value->object_class);
        break;
    default:
        break;
    }
    if (value->in_block)
        td__rpc_block_free(value, TD__BLOCK);
    else
        free(value);
}

/* Lists are nested at most TD_VALUE_MAX_DEPTH deep, so the recursion is bounded. */
void td_value_release(td_value *value)
{
    if (value && !is_constant(value) && td__drop_owner(&value->owners))
        destroy(value);
}

static void release_value(void *value)
{
    td_value_release(value);
}

td_value *td__value_adopt(td_value *value)
{
    return is_constant(value) ? value : td__scope_adopt(value, release_value);
}

td_value *td_value_return(td_value *value)
{
    return is_constant(value) ? value : td__scope_return(td_value_retain(value), release_value);
}

td_value *td_value_same(td_value *value)
{
    return value;
}

/* ---- Making ---------------------------------------------------------------------------------- */

td_value *td_value_nil(void)
{
    return &constants[0];
}

td_value *td_value_from_bool(bool boolean)
{
    return &constants[boolean ? 2 : 1];
}

td_value *td_value_from_unsigned(uint64_t integer)
{
    if (integer <= INT64_MAX)
        return td_value_from_int((int64_t)integer);
    td_fail(TD_ERR_INVALID, "td_value_from_unsigned: %llu is above 2^63 - 1, the largest integer",
            (unsigned long long)integer);
    return NULL;
}

td_value *td_value_from_int(int64_t integer)
{
    td_value *value = td__value_create(TD_VALUE_INT, 0);
    if (value)
        value->integer = integer;
    return td__value_adopt(value);
}

td_value *td_value_from_float(double number)
{
    td_value *value = td__value_create(TD_VALUE_FLOAT, 0);
    if (value)
        value->number = number;
    return td__value_adopt(value);
}

bool td__is_utf8(const char *text, size_t size)
{
    const char *end = text + size;
    while (text < end) {
        size_t length = td__utf8_length(text, end);
        if (!length || !*text)
            return false;
        text += length;
    }
    return true;
}

td_value *td__value_new_bytes(td_value_kind kind, const void *data, size_t size)
{
    td_value *value = td__value_create(kind, size < SIZE_MAX ? size + 1 : size);
    if (!value)
        return NULL;
    value->size = size;
    if (size)
        memcpy(value + 1, data, size);
    ((char *)(value + 1))[size] = 0;
    return value;
}

td_value *td_value_from_text(const char *text)
{
    if (!text)
        return td__null(__func__);
    size_t size = strlen(text);
    if (!td__is_utf8(text, size)) {
        td_fail(TD_ERR_INVALID, "td_value_from_text: the text is not UTF-8; send it as bytes");
        return NULL;
    }
    return td__value_adopt(td__value_new_bytes(TD_VALUE_TEXT, text, size));
}

td_value *td_value_from_bytes(const void *data, size_t size)
{
    if (!data && size)
        return td__null(__func__);
    return td__value_adopt(td__value_new_bytes(TD_VALUE_BYTES, data, size));
}

td_value *td_value_from_tensor(td_tensor *tensor)
{
    td_value *value = tensor ? td__value_create(TD_VALUE_TENSOR, 0) : td__null(__func__);
    if (value)
        value->tensor = td_tensor_retain(tensor);
    return td__value_adopt(value);
}

td_value *td_value_from_module(td_module *module)
{
    td_value *value = module ? td__value_create(TD_VALUE_MODULE, 0) : td__null(__func__);
    if (value)
        value->module = module;
    else
        td_module_destroy(module);
    return td__value_adopt(value);
}

td_value *td_value_from_rref(td_rref *rref)
{
    td_value *value = rref ? td__value_create(TD_VALUE_RREF, 0) : td__null(__func__);
    if (value)
        value->rref = td_rref_retain(rref);
    return td__value_adopt(value);
}

td_value *td_value_from_future(td_future *future)
{
    td_value *value = future ? td__value_create(TD_VALUE_FUTURE, 0) : td__null(__func__);
    if (value)
        value->future = td_future_retain(future);
    return td__value_adopt(value);
}

td_value *td_value_from_object(const char *class_name, void *object)
{
    if (!class_name || !object)
        return td__null(__func__);
    struct td__rpc_class_entry *entry = td__class_find(class_name);
    if (!entry) {
        td_fail(TD_ERR_INVALID,
                "td_value_from_object: there is no class \"%s\"; td_rpc_register_class() adds one",
                class_name);
        return NULL; /* nothing knows how to free the object */
    }
    return td__value_adopt(td__value_new_object(entry, object));
}

td_value *td__value_new_object(struct td__rpc_class_entry *entry, void *object)
{
    td_value *value = td__value_create(TD_VALUE_OBJECT, 0);
    if (!value) {
        td__class_destroy_object(entry, object);
        td__class_release(entry);
        return NULL;
    }
    value->object_class = entry;
    value->object = object;
    return value;
}

/* ---- Reading --------------------------------------------------------------------------------- */

td_value_kind td_value_kind_of(const td_value *value)
{
    return value ? value->kind : TD_VALUE_NIL;
}

const char *td_value_kind_name(td_value_kind kind)
{
    static const char *const names[] = {
        [TD_VALUE_NIL] = "nil",       [TD_VALUE_BOOL] = "bool", [TD_VALUE_INT] = "int",
        [TD_VALUE_FLOAT] = "float",   [TD_VALUE_TEXT] = "text", [TD_VALUE_BYTES] = "bytes",
        [TD_VALUE_LIST] = "list",     [TD_VALUE_MAP] = "map",   [TD_VALUE_TENSOR] = "tensor",
        [TD_VALUE_MODULE] = "module", [TD_VALUE_RREF] = "rref", [TD_VALUE_FUTURE] = "future",
        [TD_VALUE_OBJECT] = "object",
    };
    return (size_t)kind < sizeof names / sizeof names[0] ? names[kind] : "unknown";
}

/* Whether a value is of a kind; else the last error is set. */
static bool is(const td_value *value, td_value_kind kind, const char *call)
{
    if (value && value->kind == kind)
        return true;
    if (!value)
        td__fail_null(call);
    else
        td_fail(TD_ERR_INVALID, "%s: the value is of kind %s, not %s", call,
                td_value_kind_name(value->kind), td_value_kind_name(kind));
    return false;
}

/* The same for a reading function with a result. */
static bool readable(const td_value *value, td_value_kind kind, const void *result,
                     const char *call)
{
    if (result)
        return is(value, kind, call);
    td__fail_null(call);
    return false;
}

td_status td_value_bool(const td_value *value, bool *result)
{
    if (!readable(value, TD_VALUE_BOOL, result, __func__))
        return TD_ERR_INVALID;
    *result = value->boolean;
    return TD_OK;
}

td_status td_value_int(const td_value *value, int64_t *result)
{
    if (!readable(value, TD_VALUE_INT, result, __func__))
        return TD_ERR_INVALID;
    *result = value->integer;
    return TD_OK;
}

td_status td_value_float(const td_value *value, double *result)
{
    if (value && result && value->kind == TD_VALUE_INT) {
        *result = (double)value->integer;
        return TD_OK;
    }
    if (!readable(value, TD_VALUE_FLOAT, result, __func__))
        return TD_ERR_INVALID;
    *result = value->number;
    return TD_OK;
}

const char *td_value_text(const td_value *value)
{
    return is(value, TD_VALUE_TEXT, __func__) ? (const char *)(value + 1) : NULL;
}

const void *td_value_bytes(const td_value *value, size_t *size)
{
    if (!readable(value, TD_VALUE_BYTES, size, __func__))
        return NULL;
    *size = value->size;
    return value + 1;
}

td_tensor *td_value_tensor(const td_value *value)
{
    return is(value, TD_VALUE_TENSOR, __func__) ? value->tensor : NULL;
}

td_module *td_value_module(const td_value *value)
{
    return is(value, TD_VALUE_MODULE, __func__) ? value->module : NULL;
}

td_rref *td_value_rref(const td_value *value)
{
    return is(value, TD_VALUE_RREF, __func__) ? value->rref : NULL;
}

td_future *td_value_future(const td_value *value)
{
    return is(value, TD_VALUE_FUTURE, __func__) ? value->future : NULL;
}

void *td_value_object(const td_value *value, const char *class_name)
{
    if (!is(value, TD_VALUE_OBJECT, __func__))
        return NULL;
    if (!class_name || !strcmp(td__class_name(value->object_class), class_name))
        return value->object;
    td_fail(TD_ERR_INVALID, "td_value_object: the value is a %s, not a %s",
            td__class_name(value->object_class), class_name);
    return NULL;
}

int64_t td_value_count(const td_value *value)
{
    bool holds = value && (value->kind == TD_VALUE_LIST || value->kind == TD_VALUE_MAP);
    return holds ? value->count : 0;
}

/* Whether `value` has an element `index`; else the last error is set. */
static bool has_element(const td_value *value, int64_t index, const char *call)
{
    if (index >= 0 && index < value->count)
        return true;
    td_fail(TD_ERR_INVALID, "%s: there is no element %lld of %lld", call, (long long)index,
            (long long)value->count);
    return false;
}

td_value *td_value_at(const td_value *value, int64_t index)
{
    bool is_map = td_value_kind_of(value) == TD_VALUE_MAP;
    if (!is_map && !is(value, TD_VALUE_LIST, __func__))
        return NULL;
    return has_element(value, index, __func__) ? value->items[index] : NULL;
}

const char *td_value_key(const td_value *value, int64_t index)
{
    if (!is(value, TD_VALUE_MAP, __func__))
        return NULL;
    return has_element(value, index, __func__) ? value->keys[index] : NULL;
}

td_value *td_value_get(const td_value *map, const char *key)
{
    if (!key)
        return td__null(__func__);
    if (!is(map, TD_VALUE_MAP, __func__))
        return NULL;
    int64_t index = td__value_find(map, key);
    return index >= 0 ? map->items[index] : NULL;
}
