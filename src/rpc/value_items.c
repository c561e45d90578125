/* Lists and maps: their elements, and the keys of a map. */
#include "base/fail.h"
#include "base/map.h"
#include "rpc/value_internal.h"

#include <stdlib.h>
#include <string.h>

static td_value **inline_items(td_value *list)
{
    return (td_value **)(list + 1);
}

void td__value_free_items(td_value *value)
{
    for (int64_t i = 0; i < value->count; i++) {
        td_value_release(value->items[i]);
        if (value->keys)
            free(value->keys[i]);
    }
    if (value->keys) {
        free(value->keys);
        free(value->index);
    }
    if (value->items != inline_items(value))
        free(value->items);
}

td_value *td__value_new_list(int64_t count)
{
    td_value *list = td__value_create(TD_VALUE_LIST, sizeof *list->items * (size_t)count);
    if (!list)
        return NULL;
    list->items = inline_items(list);
    list->capacity = count;
    list->depth = 1;
    return list;
}

/* Whether `item` may become an element of `parent`, whose depth grows by that. */
static bool nest(td_value *parent, td_value *item)
{
    if (item->kind != TD_VALUE_LIST && item->kind != TD_VALUE_MAP)
        return true;
    if (item->depth >= TD_VALUE_MAX_DEPTH) {
        td_fail(TD_ERR_INVALID, "lists and maps are nested deeper than %d", TD_VALUE_MAX_DEPTH);
        return false;
    }
    if (item->depth >= parent->depth)
        parent->depth = item->depth + 1;
    atomic_store_explicit(&item->held, true, memory_order_relaxed);
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

/* Looking for a key. A map of more than FEW_KEYS has a hash table with open addressing: of 2 * capacity entries, each
 * 0 or the number of an element plus 1. Its address is the seed of the hash. */

enum { FEW_KEYS = 16 };

static uint32_t *find_entry(const td_value *map, const char *key)
{
    uint64_t hash = td__hash(TD__HASH_START ^ (uintptr_t)map->index, key, strlen(key));
    uint64_t mask = 2 * (uint64_t)map->capacity - 1;
    hash ^= hash >> 32;
    while (map->index[hash & mask] && strcmp(map->keys[map->index[hash & mask] - 1], key) != 0)
        hash++;
    return &map->index[hash & mask];
}

int64_t td__value_find(const td_value *map, const char *key)
{
    if (map->index)
        return (int64_t)*find_entry(map, key) - 1;
    for (int64_t i = 0; i < map->count; i++)
        if (!strcmp(map->keys[i], key))
            return i;
    return -1;
}

static bool grow_index(td_value *map)
{
    uint32_t *index = NULL;
    if (map->capacity > FEW_KEYS && map->capacity <= UINT32_MAX)
        index = calloc(2 * (size_t)map->capacity, sizeof *index);
    if (!index)
        return map->capacity <= FEW_KEYS;
    free(map->index);
    map->index = index;
    for (int64_t i = 0; i < map->count; i++)
        *find_entry(map, map->keys[i]) = (uint32_t)i + 1;
    return true;
}

static bool grow_items(td_value *parent, int64_t capacity)
{
    bool inlined = parent->items == inline_items(parent);
    td_value **items = realloc(inlined ? NULL : parent->items, sizeof *items * (size_t)capacity);
    if (!items)
        return false;
    if (inlined && parent->count)
        memcpy(items, parent->items, sizeof *items * (size_t)parent->count);
    parent->items = items;
    return true;
}

/* Room for one more element. */
static bool grow(td_value *parent)
{
    int64_t before = parent->capacity, capacity = before ? 2 * before : 8;
    if (!grow_items(parent, capacity))
        return false;
    if (parent->kind == TD_VALUE_MAP) {
        char **keys = realloc(parent->keys, sizeof *keys * (size_t)capacity);
        if (!keys)
            return false;
        parent->keys = keys;
    }
    parent->capacity = capacity;
    if (parent->kind == TD_VALUE_LIST || grow_index(parent))
        return true;
    parent->capacity = before; /* which the index was made for */
    return false;
}

bool td__value_append(td_value *parent, char *key, td_value *item)
{
    if (parent->count == parent->capacity && !grow(parent)) {
        td__fail_nomem("value");
        return false;
    }
    if (!nest(parent, item))
        return false;
    if (parent->index)
        *find_entry(parent, key) = (uint32_t)parent->count + 1;
    if (parent->keys)
        parent->keys[parent->count] = key;
    parent->items[parent->count++] = item;
    return true;
}

td_value *td__value_new_map(void)
{
    td_value *map = td__value_create(TD_VALUE_MAP, 0);
    if (map)
        map->depth = 1;
    return map;
}

td_value *td_value_map(void)
{
    return td__value_adopt(td__value_new_map());
}

/* Why an element of a map cannot be set; NULL if it can. A map that is an element does not change: it could become
 * an element of itself, and the depth of what holds it would be wrong. */
static const char *refusal(td_value *map, const char *key, const td_value *value)
{
    if (map->kind != TD_VALUE_MAP)
        return "the value is not a map";
    if (map == value)
        return "a map cannot be an element of itself";
    if (atomic_load_explicit(&map->held, memory_order_relaxed))
        return "the map is an element of another value, and cannot change any more; fill it first";
    return td__is_utf8(key, strlen(key)) ? NULL : "the key is not UTF-8";
}

td_value *td_value_set(td_value *map, const char *key, td_value *value)
{
    if (!map || !key || !value)
        return td__null(__func__);
    const char *why = refusal(map, key, value);
    if (why) {
        td_fail(TD_ERR_INVALID, "td_value_set: %s", why);
        return NULL;
    }
    int64_t index = td__value_find(map, key);
    if (index >= 0) {
        if (!nest(map, value))
            return NULL;
        td_value_retain(value); /* first: it may be the one that is there */
        td_value_release(map->items[index]);
        map->items[index] = value;
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
