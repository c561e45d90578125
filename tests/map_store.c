/* Stores made of callbacks; see map_store.h. */
#include "map_store.h"

#include "runner.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

enum { BUCKETS = 16384 };

struct map_entry {
    struct map_entry *next;
    char *key;
    td_bytes value;
};

struct shared_map {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int references;
    atomic_int inside; /* callbacks that run */
    struct map_entry *buckets[BUCKETS];
};

struct shared_map *shared_map_make(void)
{
    struct shared_map *map = calloc(1, sizeof *map);
    pthread_condattr_t monotonic;
    CHECK(map != NULL);
    pthread_mutex_init(&map->lock, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&map->changed, &monotonic);
    map->references = 1;
    return map;
}

static void free_entry(struct map_entry *entry)
{
    td_bytes_free(&entry->value);
    free(entry->key);
    free(entry);
}

void shared_map_release(struct shared_map *map)
{
    pthread_mutex_lock(&map->lock);
    int left = --map->references;
    pthread_mutex_unlock(&map->lock);
    if (left)
        return;
    for (int i = 0; i < BUCKETS; i++)
        for (struct map_entry *entry = map->buckets[i], *next; entry; entry = next) {
            next = entry->next;
            free_entry(entry);
        }
    pthread_cond_destroy(&map->changed);
    pthread_mutex_destroy(&map->lock);
    free(map);
}

/* ---- The map, under its lock ----------------------------------------------------------------- */

static struct map_entry **find(struct shared_map *map, const char *key)
{
    uint32_t hash = 2166136261u;
    for (const char *at = key; *at; at++)
        hash = (hash ^ (uint8_t)*at) * 16777619u;
    struct map_entry **link = &map->buckets[hash % BUCKETS];
    while (*link && strcmp((*link)->key, key) != 0)
        link = &(*link)->next;
    return link;
}

static td_status put(struct shared_map *map, const char *key, const void *value, size_t size)
{
    struct map_entry **link = find(map, key);
    td_bytes copy;
    td_status status = td_bytes_copy(value, size, &copy);
    if (status)
        return status;
    if (!*link) {
        *link = calloc(1, sizeof **link);
        (*link)->key = strdup(key);
    }
    td_bytes_free(&(*link)->value);
    (*link)->value = copy;
    pthread_cond_broadcast(&map->changed);
    return TD_OK;
}

static td_status give(const struct map_entry *entry, td_bytes *value)
{
    return td_bytes_copy(entry->value.data, entry->value.size, value);
}

/* The first key that is missing, NULL where none is. */
static const char *first_missing(struct shared_map *map, const char *const *keys, int count)
{
    for (int i = 0; i < count; i++)
        if (!*find(map, keys[i]))
            return keys[i];
    return NULL;
}

/* Waits until all keys exist; NULL, or one that does not. */
static const char *await(struct shared_map *map, const char *const *keys, int count,
                         int64_t timeout_ms)
{
    struct timespec end;
    const char *missing;
    CHECK(timeout_ms > 0 || timeout_ms == TD_NOW); /* 0 is resolved by the library */
    clock_gettime(CLOCK_MONOTONIC, &end);
    if (timeout_ms > 86400000)
        timeout_ms = 86400000;
    int64_t ns = end.tv_nsec + (timeout_ms > 0 ? timeout_ms : 0) * 1000000;
    end.tv_sec += ns / 1000000000;
    end.tv_nsec = ns % 1000000000;
    while ((missing = first_missing(map, keys, count)) && timeout_ms != TD_NOW)
        if (pthread_cond_timedwait(&map->changed, &map->lock, &end))
            return first_missing(map, keys, count);
    return missing;
}

static struct shared_map *enter(void *self)
{
    struct shared_map *map = self;
    pthread_mutex_lock(&map->lock);
    return map;
}

static td_status leave(struct shared_map *map, td_status status)
{
    pthread_mutex_unlock(&map->lock);
    return status;
}

/* ---- The callbacks --------------------------------------------------------------------------- */

static td_status map_set(void *self, const char *key, const void *value, size_t size)
{
    struct shared_map *map = enter(self);
    return leave(map, put(map, key, value, size));
}

static td_status map_get(void *self, const char *key, int64_t timeout_ms, td_bytes *value)
{
    struct shared_map *map = enter(self);
    if (await(map, &key, 1, timeout_ms))
        return leave(map, TD_ERR_TIMEOUT); /* the library names the key */
    return leave(map, give(*find(map, key), value));
}

static td_status map_compare_set(void *self, const char *key, const void *expected,
                                 size_t expected_size, const void *desired, size_t desired_size,
                                 td_bytes *value, bool *stored)
{
    struct shared_map *map = enter(self);
    const struct map_entry *entry = *find(map, key);
    *stored = entry ? entry->value.size == expected_size &&
                          !memcmp(entry->value.data, expected, expected_size)
                    : expected_size == 0;
    td_status status = TD_OK;
    if (*stored)
        status = put(map, key, desired, desired_size);
    else if (entry)
        status = give(entry, value);
    return leave(map, status);
}

static td_status map_delete(void *self, const char *key, bool *deleted)
{
    struct shared_map *map = enter(self);
    struct map_entry **link = find(map, key), *entry = *link;
    *deleted = entry != NULL;
    if (entry) {
        *link = entry->next;
        free_entry(entry);
    }
    return leave(map, TD_OK);
}

static td_status map_add(void *self, const char *key, int64_t amount, int64_t *result)
{
    struct shared_map *map = enter(self);
    const struct map_entry *entry = *find(map, key);
    char text[24], *end = text;
    int64_t number = 0;
    if (entry) {
        const char *digits = entry->value.data + (*entry->value.data == '-');
        number = strtoll(entry->value.data, &end, 10);
        if (*digits < '0' || *digits > '9' || end != entry->value.data + entry->value.size ||
            (entry->value.size > 18 && (snprintf(text, sizeof text, "%" PRId64, number),
                                        strcmp(text, entry->value.data) != 0)))
            return leave(map, td_fail(TD_ERR_INVALID, "map: \"%s\" of \"%s\" is not a number",
                                      entry->value.data, key));
    }
    if (__builtin_add_overflow(number, amount, &number))
        return leave(map, td_fail(TD_ERR_INVALID, "map: the sum at \"%s\" does not fit", key));
    *result = number;
    snprintf(text, sizeof text, "%" PRId64, number);
    return leave(map, put(map, key, text, strlen(text)));
}

static td_status map_append(void *self, const char *key, const void *value, size_t size)
{
    struct shared_map *map = enter(self);
    struct map_entry *entry = *find(map, key);
    if (!entry)
        return leave(map, put(map, key, value, size));
    char *longer = realloc(entry->value.data, entry->value.size + size + 1);
    CHECK(longer != NULL);
    memcpy(longer + entry->value.size, value, size);
    entry->value = (td_bytes){longer, entry->value.size + size};
    longer[entry->value.size] = '\0';
    return leave(map, TD_OK);
}

static td_status map_check(void *self, const char *const *keys, int count, bool *all_exist)
{
    struct shared_map *map = enter(self);
    *all_exist = !first_missing(map, keys, count);
    return leave(map, TD_OK);
}

static td_status map_wait(void *self, const char *const *keys, int count, int64_t timeout_ms)
{
    struct shared_map *map = enter(self);
    const char *missing = await(map, keys, count, timeout_ms);
    return leave(map, missing ? td_fail(TD_ERR_TIMEOUT, "map: no \"%s\"", missing) : TD_OK);
}

static td_status map_multi_get(void *self, const char *const *keys, int count, int64_t timeout_ms,
                               td_bytes *values)
{
    struct shared_map *map = enter(self);
    const char *missing = await(map, keys, count, timeout_ms);
    td_status status = missing ? td_fail(TD_ERR_TIMEOUT, "map: no \"%s\"", missing) : TD_OK;
    for (int i = 0; i < count && !status; i++)
        status = give(*find(map, keys[i]), &values[i]);
    return leave(map, status);
}

static td_status map_multi_set(void *self, const char *const *keys, const td_bytes *values,
                               int count)
{
    struct shared_map *map = enter(self);
    td_status status = TD_OK;
    for (int i = 0; i < count && !status; i++)
        status = put(map, keys[i], values[i].data, values[i].size);
    return leave(map, status);
}

static td_status map_num_keys(void *self, const char *prefix, int64_t *count)
{
    struct shared_map *map = enter(self);
    *count = 0;
    for (int i = 0; i < BUCKETS; i++)
        for (const struct map_entry *entry = map->buckets[i]; entry; entry = entry->next)
            *count += !strncmp(entry->key, prefix, strlen(prefix));
    return leave(map, TD_OK);
}

static void map_address(void *self, char *text, size_t room)
{
    (void)self;
    snprintf(text, room, "127.0.0.1");
}

static td_status map_close(void *self)
{
    shared_map_release(self);
    return TD_OK;
}

const td_store_ops map_full_ops = {
    .name = "map",
    .set = map_set,
    .get = map_get,
    .compare_set = map_compare_set,
    .delete_key = map_delete,
    .add = map_add,
    .append = map_append,
    .check = map_check,
    .wait = map_wait,
    .multi_get = map_multi_get,
    .multi_set = map_multi_set,
    .num_keys = map_num_keys,
    .address = map_address,
    .close = map_close,
};

const td_store_ops map_minimal_ops = {
    .set = map_set,
    .get = map_get,
    .compare_set = map_compare_set,
    .delete_key = map_delete,
    .close = map_close,
};

/* ---- One at a time --------------------------------------------------------------------------- */

static void *begin(void *self)
{
    CHECK_EQ(atomic_fetch_add(&((struct shared_map *)self)->inside, 1), 0);
    return self;
}

static td_status end(void *self, td_status status)
{
    atomic_fetch_sub(&((struct shared_map *)self)->inside, 1);
    return status;
}

static td_status serial_set(void *self, const char *key, const void *value, size_t size)
{
    return end(self, map_set(begin(self), key, value, size));
}

static td_status serial_get(void *self, const char *key, int64_t timeout_ms, td_bytes *value)
{
    CHECK_EQ(timeout_ms, TD_NOW);
    return end(self, map_get(begin(self), key, timeout_ms, value));
}

static td_status serial_compare_set(void *self, const char *key, const void *expected,
                                    size_t expected_size, const void *desired, size_t desired_size,
                                    td_bytes *value, bool *stored)
{
    return end(self, map_compare_set(begin(self), key, expected, expected_size, desired,
                                     desired_size, value, stored));
}

static td_status serial_delete(void *self, const char *key, bool *deleted)
{
    return end(self, map_delete(begin(self), key, deleted));
}

const td_store_ops map_serial_ops = {
    .name = "serial map",
    .serial = true,
    .set = serial_set,
    .get = serial_get,
    .compare_set = serial_compare_set,
    .delete_key = serial_delete,
    .close = map_close,
};

static td_status impatient_get(void *self, const char *key, int64_t timeout_ms, td_bytes *value)
{
    (void)timeout_ms;
    return map_get(self, key, TD_NOW, value);
}

const td_store_ops map_impatient_ops = {
    .name = "impatient map",
    .set = map_set,
    .get = impatient_get,
    .compare_set = map_compare_set,
    .delete_key = map_delete,
    .close = map_close,
};

td_store *map_store_open(const td_store_ops *ops, struct shared_map *map)
{
    td_store *store = NULL;
    pthread_mutex_lock(&map->lock);
    map->references++;
    pthread_mutex_unlock(&map->lock);
    CHECK_OK(td_store_create(ops, map, &store));
    return store;
}

/* ---- Passing on ------------------------------------------------------------------------------ */

static td_status forward_set(void *self, const char *key, const void *value, size_t size)
{
    return td_store_set(self, key, value, size);
}

static td_status forward_get(void *self, const char *key, int64_t timeout_ms, td_bytes *value)
{
    return td_store_get(self, key, timeout_ms, value);
}

static td_status forward_compare_set(void *self, const char *key, const void *expected,
                                     size_t expected_size, const void *desired, size_t desired_size,
                                     td_bytes *value, bool *stored)
{
    td_status status = td_store_compare_set(self, key, expected, expected_size, desired,
                                            desired_size, value);
    *stored = !status && value->size == desired_size && !memcmp(value->data, desired, desired_size);
    return status;
}

static td_status forward_delete(void *self, const char *key, bool *deleted)
{
    return td_store_delete_key(self, key, deleted);
}

static td_status forward_add(void *self, const char *key, int64_t amount, int64_t *result)
{
    return td_store_add(self, key, amount, result);
}

static td_status forward_close(void *self)
{
    return td_store_close(self);
}

const td_store_ops forwarding_ops = {
    .name = "forwarding",
    .set = forward_set,
    .get = forward_get,
    .compare_set = forward_compare_set,
    .delete_key = forward_delete,
    .add = forward_add,
    .close = forward_close,
};
