/* Values: making and reading them; see value.h. */
#include "rpc/value_internal.h"

#include "base/fail.h"
#include "base/text.h"
#include "rpc/rpc_registry.h"
#include "tensor/tensor_internal.h"

#include <tandem/rpc.h>

#include <stdlib.h>
#include <string.h>

/* ---- References ------------------------------------------------------------------------------ */

td_value *td__value_create(td_value_kind kind, size_t more)
{
    td_value *value = malloc(sizeof *value + more);
    if (!value) {
        td__fail_nomem("value");
        return NULL;
    }
    memset(value, 0, sizeof *value);
    atomic_store_explicit(&value->owners, 1, memory_order_relaxed);
    value->kind = kind;
    return value;
}

td_value *td_value_retain(td_value *value)
{
    if (value)
        atomic_fetch_add_explicit(&value->owners, 1, memory_order_relaxed);
    return value;
}

static void destroy(td_value *value)
{
    switch (value->kind) {
    case TD_VALUE_LIST:
    case TD_VALUE_MAP:
        for (int64_t i = 0; i < value->count; i++) {
            td_value_release(value->items[i]);
            if (value->keys)
                free(value->keys[i]);
        }
        free(value->keys);
        if (value->items != value->few)
            free(value->items);
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
    free(value);
}

/* Lists are nested at most TD_VALUE_MAX_DEPTH deep, so the recursion is bounded. */
void td_value_release(td_value *value)
{
    if (value && atomic_fetch_sub_explicit(&value->owners, 1, memory_order_acq_rel) == 1)
        destroy(value);
}

static void release_value(void *value)
{
    td_value_release(value);
}

td_value *td__value_adopt(td_value *value)
{
    return td__scope_adopt(value, release_value);
}

td_value *td_value_return(td_value *value)
{
    return td__scope_return(td_value_retain(value), release_value);
}

td_value *td_value_same(td_value *value)
{
    return value;
}

/* ---- Making ---------------------------------------------------------------------------------- */

td_value *td_value_nil(void)
{
    return td__value_adopt(td__value_create(TD_VALUE_NIL, 0));
}

td_value *td_value_from_bool(bool boolean)
{
    td_value *value = td__value_create(TD_VALUE_BOOL, 0);
    if (value)
        value->boolean = boolean;
    return td__value_adopt(value);
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
    td_value *value = td__value_create(kind, size + 1);
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
    if (!td__is_utf8(text, strlen(text))) {
        td_fail(TD_ERR_INVALID, "td_value_from_text: the text is not UTF-8; send it as bytes");
        return NULL;
    }
    return td__value_adopt(td__value_new_bytes(TD_VALUE_TEXT, text, strlen(text)));
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

/* ---- Lists and maps -------------------------------------------------------------------------- */

td_value *td__value_new_list(int64_t count)
{
    td_value *value = td__value_create(TD_VALUE_LIST, 0);
    if (!value)
        return NULL;
    value->items = count <= TD__VALUE_FEW ? value->few
                                          : malloc(sizeof *value->items * (size_t)count);
    if (!value->items) {
        free(value);
        td__fail_nomem("value");
        return NULL;
    }
    value->capacity = count;
    return value;
}

static int depth_of(const td_value *value)
{
    return value->kind == TD_VALUE_LIST || value->kind == TD_VALUE_MAP ? value->depth : 0;
}

/* Whether `value` may become an element of `parent`, whose depth grows by that. */
static bool nest(td_value *parent, const td_value *value)
{
    int depth = depth_of(value) + 1;
    if (depth > TD_VALUE_MAX_DEPTH) {
        td_fail(TD_ERR_INVALID, "lists and maps are nested deeper than %d", TD_VALUE_MAX_DEPTH);
        return false;
    }
    if (depth > parent->depth)
        parent->depth = depth;
    return true;
}

td_value *td_value_list(td_value *const *values, int64_t count)
{
    if (count < 0 || (count && !values)) {
        td_fail(TD_ERR_INVALID, "td_value_list: %s",
                count < 0 ? "the count is negative" : "the values are NULL");
        return NULL;
    }
    for (int64_t i = 0; i < count; i++)
        if (!values[i])
            return td__null(__func__);
    td_value *list = td__value_new_list(count);
    for (int64_t i = 0; list && i < count; i++) {
        if (!nest(list, values[i])) {
            td_value_release(list);
            return NULL;
        }
        list->items[list->count++] = td_value_retain(values[i]);
    }
    return td__value_adopt(list);
}

bool td__value_append(td_value *parent, char *key, td_value *item)
{
    bool grown = parent->count < parent->capacity;
    if (!grown) {
        int64_t capacity = parent->capacity ? 2 * parent->capacity : 8;
        td_value **items = realloc(parent->items, sizeof *items * (size_t)capacity);
        parent->items = items ? items : parent->items;
        char **keys = items && parent->kind == TD_VALUE_MAP
                          ? realloc(parent->keys, sizeof *keys * (size_t)capacity)
                          : NULL;
        parent->keys = keys ? keys : parent->keys;
        grown = items && (keys || parent->kind != TD_VALUE_MAP);
        if (grown)
            parent->capacity = capacity;
        else
            td__fail_nomem("value");
    }
    if (!grown || !nest(parent, item))
        return false;
    if (parent->keys)
        parent->keys[parent->count] = key;
    parent->items[parent->count++] = item;
    return true;
}

td_value *td_value_map(void)
{
    return td__value_adopt(td__value_create(TD_VALUE_MAP, 0));
}

static int64_t find_key(const td_value *map, const char *key)
{
    int64_t i = 0;
    while (i < map->count && strcmp(map->keys[i], key) != 0)
        i++;
    return i;
}

td_value *td_value_set(td_value *map, const char *key, td_value *value)
{
    if (!map || !key || !value)
        return td__null(__func__);
    if (map->kind != TD_VALUE_MAP || !td__is_utf8(key, strlen(key))) {
        td_fail(TD_ERR_INVALID, "td_value_set: %s",
                map->kind == TD_VALUE_MAP ? "the key is not UTF-8" : "the value is not a map");
        return NULL;
    }
    int64_t index = find_key(map, key);
    if (index < map->count) {
        if (!nest(map, value))
            return NULL;
        td_value_release(map->items[index]);
        map->items[index] = td_value_retain(value);
        return map;
    }
    char *copy = strdup(key);
    if (!copy) {
        td__fail_nomem("value");
        return NULL;
    }
    if (!td__value_append(map, copy, value)) {
        free(copy);
        return NULL;
    }
    td_value_retain(value);
    return map;
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
    if (!value) {
        td__fail_null(call);
        return false;
    }
    if (value->kind == kind)
        return true;
    td_fail(TD_ERR_INVALID, "%s: the value is of kind %s, not %s", call,
            td_value_kind_name(value->kind), td_value_kind_name(kind));
    return false;
}

td_status td_value_bool(const td_value *value, bool *result)
{
    if (!is(value, TD_VALUE_BOOL, __func__))
        return TD_ERR_INVALID;
    *result = value->boolean;
    return TD_OK;
}

td_status td_value_int(const td_value *value, int64_t *result)
{
    if (!is(value, TD_VALUE_INT, __func__))
        return TD_ERR_INVALID;
    *result = value->integer;
    return TD_OK;
}

td_status td_value_float(const td_value *value, double *result)
{
    if (value && value->kind == TD_VALUE_INT) {
        *result = (double)value->integer;
        return TD_OK;
    }
    if (!is(value, TD_VALUE_FLOAT, __func__))
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
    if (!is(value, TD_VALUE_BYTES, __func__))
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
    return value && (value->kind == TD_VALUE_LIST || value->kind == TD_VALUE_MAP) ? value->count
                                                                                  : 0;
}

td_value *td_value_at(const td_value *value, int64_t index)
{
    if (index >= 0 && index < td_value_count(value))
        return value->items[index];
    if (value)
        td_fail(TD_ERR_INVALID, "td_value_at: there is no element %lld of %lld", (long long)index,
                (long long)td_value_count(value));
    return NULL;
}

const char *td_value_key(const td_value *value, int64_t index)
{
    if (!is(value, TD_VALUE_MAP, __func__))
        return NULL;
    if (index >= 0 && index < value->count)
        return value->keys[index];
    td_fail(TD_ERR_INVALID, "td_value_key: there is no element %lld of %lld", (long long)index,
            (long long)value->count);
    return NULL;
}

td_value *td_value_get(const td_value *map, const char *key)
{
    if (!key || td_value_kind_of(map) != TD_VALUE_MAP)
        return NULL;
    int64_t index = find_key(map, key);
    return index < map->count ? map->items[index] : NULL;
}
