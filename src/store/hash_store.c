/* The store inside one process: the map under a lock, and one condition variable for all waits. */
#include "base/fail.h"
#include "base/thread.h"
#include "store/kv.h"
#include "store/store_ops.h"

#include <stdlib.h>

struct hash_store {
    td_store head;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct td__kv kv;
};

static struct hash_store *lock(td_store *store)
{
    struct hash_store *hash = (struct hash_store *)store;
    pthread_mutex_lock(&hash->lock);
    return hash;
}

static td_status unlock(struct hash_store *hash, td_status status, bool changed)
{
    if (changed)
        pthread_cond_broadcast(&hash->changed);
    pthread_mutex_unlock(&hash->lock);
    return status;
}

static td_status hash_set(td_store *store, const struct td__span *keys,
                          const struct td__span *values, size_t count, td__deadline deadline)
{
    (void)deadline;
    struct hash_store *hash = lock(store);
    td_status status = TD_OK;
    for (size_t i = 0; !status && i < count; i++)
        status = td__kv_set(&hash->kv, keys[i], values[i]);
    return unlock(hash, status, true);
}

static td_status hash_append(td_store *store, struct td__span key, struct td__span value,
                             td__deadline deadline)
{
    (void)deadline;
    struct hash_store *hash = lock(store);
    return unlock(hash, td__kv_append(&hash->kv, key, value), true);
}

static td_status hash_get(td_store *store, const struct td__span *keys, size_t count,
                          td__deadline deadline, td_bytes *values)
{
    struct hash_store *hash = lock(store);
    td_status status = TD_OK;
    long missing = 0;
    while ((missing = td__kv_first_missing(&hash->kv, keys, count, (size_t)missing)) >= 0) {
        if (td__cond_wait(&hash->changed, &hash->lock, deadline))
            continue;
        missing = td__kv_first_missing(&hash->kv, keys, count, (size_t)missing);
        if (missing >= 0)
            status = td__fail_missing_key("hash", keys[missing]);
        break;
    }
    if (!status && values)
        status = td__kv_copy(&hash->kv, keys, count, values);
    return unlock(hash, status, false);
}

static td_status hash_check(td_store *store, const struct td__span *keys, size_t count,
                            td__deadline deadline, bool *all_exist)
{
    (void)deadline;
    struct hash_store *hash = lock(store);
    *all_exist = td__kv_first_missing(&hash->kv, keys, count, 0) < 0;
    return unlock(hash, TD_OK, false);
}

static td_status hash_add(td_store *store, struct td__span key, int64_t amount,
                          td__deadline deadline, int64_t *result)
{
    (void)deadline;
    struct hash_store *hash = lock(store);
    return unlock(hash, td__kv_add(&hash->kv, key, amount, result), true);
}

static td_status hash_compare_set(td_store *store, struct td__span key, struct td__span expected,
                                  struct td__span desired, td__deadline deadline, td_bytes *value)
{
    (void)deadline;
    struct hash_store *hash = lock(store);
    struct td__span result;
    bool changed;
    td_status status = td__kv_compare_set(&hash->kv, key, expected, desired, &result, &changed);
    if (!status)
        status = td_bytes_copy(result.data, result.size, value);
    return unlock(hash, status, true);
}

static td_status hash_delete(td_store *store, struct td__span key, td__deadline deadline,
                             bool *deleted)
{
    (void)deadline;
    struct hash_store *hash = lock(store);
    *deleted = td__kv_delete(&hash->kv, key);
    return unlock(hash, TD_OK, false);
}

static td_status hash_num_keys(td_store *store, struct td__span prefix, td__deadline deadline,
                               int64_t *count)
{
    (void)deadline;
    struct hash_store *hash = lock(store);
    *count = td__kv_count(&hash->kv, prefix);
    return unlock(hash, TD_OK, false);
}

static td_status hash_close(td_store *store)
{
    struct hash_store *hash = (struct hash_store *)store;
    td__kv_free(&hash->kv);
    pthread_cond_destroy(&hash->changed);
    pthread_mutex_destroy(&hash->lock);
    free(hash);
    return TD_OK;
}

static const struct td__store_ops hash_store_ops = {
    .kind = "hash",
    .set = hash_set,
    .append = hash_append,
    .get = hash_get,
    .check = hash_check,
    .add = hash_add,
    .compare_set = hash_compare_set,
    .delete_key = hash_delete,
    .num_keys = hash_num_keys,
    .close = hash_close,
};

td_status td_hash_store_open(td_store **store)
{
    if (!store)
        return td_fail(TD_ERR_INVALID, "td_hash_store_open: the output is NULL");
    struct hash_store *hash = calloc(1, sizeof *hash);
    if (!hash)
        return td__fail_nomem("hash store");
    td__store_init(&hash->head, &hash_store_ops, 0);
    pthread_mutex_init(&hash->lock, NULL);
    td__cond_init(&hash->changed);
    *store = &hash->head;
    return TD_OK;
}
