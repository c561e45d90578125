/* The rules of a key-value store; see kv.h. */
#include "store/kv.h"

#include "base/fail.h"
#include "base/number.h"
#include "store/store_ops.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct entry {
    struct td__map_node node;
    struct td__blob *value;
    char key[];
};

static struct td__blob *blob_create(struct td__span value, size_t capacity)
{
    struct td__blob *blob = malloc(sizeof *blob + capacity);
    if (!blob)
        return NULL;
    *blob = (struct td__blob){.references = 1, .size = value.size, .capacity = capacity};
    memcpy(blob->data, value.data, value.size);
    return blob;
}

void td__blob_release(struct td__blob *blob)
{
    if (blob && --blob->references == 0)
        free(blob);
}

static struct entry *find(const struct td__kv *kv, struct td__span key)
{
    struct td__map_node *node = td__map_find(&kv->map, key.data, key.size);
    return node ? TD__CONTAINER(node, struct entry, node) : NULL;
}

struct td__blob *td__kv_find(const struct td__kv *kv, struct td__span key)
{
    struct entry *entry = find(kv, key);
    return entry ? entry->value : NULL;
}

/* Puts `blob` (whose reference it takes) at `key`. */
static td_status put(struct td__kv *kv, struct td__span key, struct td__blob *blob)
{
    if (!blob)
        return td__fail_nomem("store");
    struct entry *entry = find(kv, key);
    if (entry) {
        td__blob_release(entry->value);
        entry->value = blob;
        return TD_OK;
    }
    entry = malloc(sizeof *entry + key.size);
    if (entry) {
        memcpy(entry->key, key.data, key.size);
        entry->node = (struct td__map_node){.key = entry->key, .key_size = key.size};
        entry->value = blob;
        if (td__map_insert(&kv->map, &entry->node))
            return TD_OK;
        free(entry);
    }
    td__blob_release(blob);
    return td__fail_nomem("store");
}

void td__kv_free(struct td__kv *kv)
{
    for (struct td__map_node *node = td__map_next(&kv->map, NULL), *next; node; node = next) {
        next = td__map_next(&kv->map, node);
        struct entry *entry = TD__CONTAINER(node, struct entry, node);
        td__blob_release(entry->value);
        free(entry);
    }
    td__map_free(&kv->map);
}

td_status td__kv_set(struct td__kv *kv, struct td__span key, struct td__span value)
{
    struct td__blob *old = td__kv_find(kv, key);
    if (old && old->references == 1 && value.size <= old->capacity &&
        old->capacity <= value.size * 2 + 64) {
        memmove(old->data, value.data, value.size);
        old->size = value.size;
        return TD_OK;
    }
    return put(kv, key, blob_create(value, value.size));
}

td_status td__kv_check_append(struct td__span key, size_t size, size_t more)
{
    if (more <= TD_STORE_MAX_VALUE - size)
        return TD_OK;
    return td_fail(TD_ERR_INVALID,
                   "append to \"%.*s\": %zu bytes and %zu more exceed the %zu of a value",
                   (int)key.size, key.data, size, more, TD_STORE_MAX_VALUE);
}

td_status td__kv_append(struct td__kv *kv, struct td__span key, struct td__span value)
{
    struct td__blob *old = td__kv_find(kv, key);
    if (!old)
        return td__kv_set(kv, key, value);
    TD_TRY(td__kv_check_append(key, old->size, value.size));
    size_t size = old->size + value.size;
    if (old->references > 1 || size > old->capacity) {
        struct td__blob *larger = blob_create((struct td__span){old->data, old->size}, size * 2);
        TD_TRY(put(kv, key, larger));
        old = larger;
    }
    memcpy(old->data + old->size, value.data, value.size);
    old->size = size;
    return TD_OK;
}

int td__kv_sum(struct td__span key, struct td__span old, int64_t amount, int64_t *sum,
               char text[TD__NUMBER_TEXT])
{
    int64_t number = 0;
    if (old.data && !td__parse_i64(old.data, old.size, &number)) {
        td_fail(TD_ERR_INVALID, "add to \"%.*s\": its value \"%.*s\" is not a number",
                (int)key.size, key.data, (int)(old.size < 40 ? old.size : 40), old.data);
        return -1;
    }
    if (__builtin_add_overflow(number, amount, sum)) {
        td_fail(TD_ERR_INVALID, "add of %" PRId64 " to \"%.*s\": the sum does not fit 64 bits",
                amount, (int)key.size, key.data);
        return -1;
    }
    return snprintf(text, TD__NUMBER_TEXT, "%" PRId64, *sum);
}

td_status td__kv_add(struct td__kv *kv, struct td__span key, int64_t amount, int64_t *result)
{
    int64_t sum;
    char text[TD__NUMBER_TEXT];
    struct td__blob *old = td__kv_find(kv, key);
    struct td__span value = old ? (struct td__span){old->data, old->size} : (struct td__span){0};
    int length = td__kv_sum(key, value, amount, &sum, text);
    if (length < 0)
        return TD_ERR_INVALID;
    TD_TRY(td__kv_set(kv, key, (struct td__span){text, (size_t)length}));
    *result = sum;
    return TD_OK;
}

td_status td__kv_compare_set(struct td__kv *kv, struct td__span key, struct td__span expected,
                             struct td__span desired, struct td__span *result, bool *changed)
{
    struct td__blob *now = td__kv_find(kv, key);
    bool equal = now ? now->size == expected.size && !memcmp(now->data, expected.data, now->size)
                     : expected.size == 0;
    *changed = false;
    if (equal) {
        TD_TRY(td__kv_set(kv, key, desired));
        *changed = true;
        *result = desired;
    } else if (now) {
        *result = (struct td__span){now->data, now->size};
    } else {
        *result = expected;
    }
    return TD_OK;
}

bool td__kv_delete(struct td__kv *kv, struct td__span key)
{
    struct entry *entry = find(kv, key);
    if (!entry)
        return false;
    td__map_remove(&kv->map, &entry->node);
    td__blob_release(entry->value);
    free(entry);
    return true;
}

int64_t td__kv_count(const struct td__kv *kv, struct td__span prefix)
{
    int64_t count = 0;
    for (struct td__map_node *node = td__map_next(&kv->map, NULL); node;
         node = td__map_next(&kv->map, node)) {
        if (prefix.size)
            count += node->key_size >= prefix.size && !memcmp(node->key, prefix.data, prefix.size);
        else
            count += !node->key_size || node->key[0] != TD__INTERNAL_KEY[0];
    }
    return count;
}

td_status td__kv_copy(const struct td__kv *kv, const struct td__span *keys, size_t count,
                      td_bytes *values)
{
    for (size_t i = 0; i < count; i++) {
        struct td__blob *blob = td__kv_find(kv, keys[i]);
        td_status status = td_bytes_copy(blob->data, blob->size, &values[i]);
        if (status) {
            while (i--)
                td_bytes_free(&values[i]);
            return status;
        }
    }
    return TD_OK;
}

long td__kv_first_missing(const struct td__kv *kv, const struct td__span *keys, size_t count,
                          size_t first)
{
    for (size_t i = 0; i < count; i++) {
        size_t at = first + i < count ? first + i : first + i - count;
        if (!td__kv_find(kv, keys[at]))
            return (long)at;
    }
    return -1;
}
