/* The public calls on stores: each checks what it was given, and hands it to the kind of store. */
#include "store/store_ops.h"

#include "base/fail.h"
#include "base/option_rules.h"

#include <stdlib.h>
#include <string.h>

enum { FEW_KEYS = 16 }; /* as many spans as fit on the stack */

void td__store_init(td_store *store, const struct td__store_ops *ops, int64_t timeout_ms)
{
    store->ops = ops;
    atomic_init(&store->references, 1);
    atomic_init(&store->timeout_ms, timeout_ms > 0 ? timeout_ms : TD_STORE_DEFAULT_TIMEOUT_MS);
}

td_status td__fail_missing_key(const char *kind, struct td__span key)
{
    return td_fail(TD_ERR_TIMEOUT, "%s store: key \"%.*s\" was not set in time", kind,
                   (int)(key.size < 256 ? key.size : 256), key.data);
}

static td_status check_store(const td_store *store, const char *call)
{
    return store ? TD_OK : td_fail(TD_ERR_INVALID, "%s: the store is NULL", call);
}

static td_status check_key(const td_store *store, const char *call, const char *key,
                           struct td__span *span)
{
    TD_TRY(check_store(store, call));
    if (!key)
        return td_fail(TD_ERR_INVALID, "%s: the key is NULL", call);
    size_t size = strnlen(key, TD_STORE_MAX_KEY + 1);
    if (size > TD_STORE_MAX_KEY)
        return td_fail(TD_ERR_INVALID, "%s: the key \"%.32s…\" is longer than %d bytes", call, key,
                       TD_STORE_MAX_KEY);
    *span = (struct td__span){key, size};
    return TD_OK;
}

static td_status check_value(const char *call, const char *key, const void *value, size_t size,
                             struct td__span *span)
{
    if (!value && size)
        return td_fail(TD_ERR_INVALID, "%s of \"%s\": the value is NULL, its size %zu", call, key,
                       size);
    if (size > TD_STORE_MAX_VALUE)
        return td_fail(TD_ERR_INVALID, "%s of \"%s\": %zu bytes are more than the %zu of a value",
                       call, key, size, TD_STORE_MAX_VALUE);
    *span = (struct td__span){value ? value : "", size};
    return TD_OK;
}

/* The deadline of a call on `store` that was given `timeout_ms`. */
static td_status deadline_of(const td_store *store, const char *call, int64_t timeout_ms,
                             td__deadline *deadline)
{
    TD_TRY(td__check_timeout(call, timeout_ms));
    *deadline = timeout_ms == TD_NOW
                    ? TD__LOOK_ONCE
                    : td__deadline_in_ms(timeout_ms ? timeout_ms : td_store_timeout(store));
    return TD_OK;
}

static td__deadline own_deadline(const td_store *store)
{
    return td__deadline_in_ms(td_store_timeout(store));
}

td__deadline td__store_answer_deadline(const td_store *store, td__deadline deadline)
{
    return deadline == TD__LOOK_ONCE ? own_deadline(store) : deadline;
}

/* The keys of a call, as spans; on the stack when they are few. */
struct key_list {
    struct td__span few[FEW_KEYS];
    struct td__span *spans;
};

static void free_keys(struct key_list *list)
{
    if (list->spans != list->few)
        free(list->spans);
}

static td_status check_keys(const td_store *store, const char *call, const char *const *keys,
                            int count, struct key_list *list)
{
    TD_TRY(check_store(store, call));
    if (count < 0 || count > TD_STORE_MAX_KEYS)
        return td_fail(TD_ERR_INVALID, "%s: %d keys; one call takes 0 to %d", call, count,
                       TD_STORE_MAX_KEYS);
    if (!keys && count)
        return td_fail(TD_ERR_INVALID, "%s: the list of keys is NULL", call);
    list->spans = count <= FEW_KEYS ? list->few : malloc((size_t)count * sizeof *list->spans);
    if (!list->spans)
        return td__fail_nomem(call);
    for (int i = 0; i < count; i++) {
        td_status status = check_key(store, call, keys[i], &list->spans[i]);
        if (status) {
            free_keys(list);
            return status;
        }
    }
    return TD_OK;
}

td_status td_store_close(td_store *store)
{
    if (!store || atomic_fetch_sub(&store->references, 1) > 1)
        return TD_OK;
    return store->ops->close(store);
}

td_status td_store_set_timeout(td_store *store, int64_t timeout_ms)
{
    TD_TRY(check_store(store, "td_store_set_timeout"));
    TD_TRY(td__check_kept_timeout("td_store_set_timeout", "the timeout", timeout_ms));
    atomic_store(&store->timeout_ms, timeout_ms ? timeout_ms : TD_STORE_DEFAULT_TIMEOUT_MS);
    return TD_OK;
}

int64_t td_store_timeout(const td_store *store)
{
    return store ? atomic_load(&store->timeout_ms) : 0;
}

td_status td_store_set(td_store *store, const char *key, const void *value, size_t size)
{
    struct td__span k, v;
    TD_TRY(check_key(store, "td_store_set", key, &k));
    TD_TRY(check_value("td_store_set", key, value, size, &v));
    return store->ops->set(store, &k, &v, 1, own_deadline(store));
}

td_status td_store_append(td_store *store, const char *key, const void *value, size_t size)
{
    struct td__span k, v;
    TD_TRY(check_key(store, "td_store_append", key, &k));
    TD_TRY(check_value("td_store_append", key, value, size, &v));
    return store->ops->append(store, k, v, own_deadline(store));
}

td_status td_store_get(td_store *store, const char *key, int64_t timeout_ms, td_bytes *value)
{
    struct td__span k;
    td__deadline deadline = 0;
    TD_TRY(check_key(store, "td_store_get", key, &k));
    TD_TRY(deadline_of(store, "td_store_get", timeout_ms, &deadline));
    if (!value)
        return td_fail(TD_ERR_INVALID, "td_store_get of \"%s\": the output is NULL", key);
    return store->ops->get(store, &k, 1, deadline, value);
}

td_status td_store_add(td_store *store, const char *key, int64_t amount, int64_t *result)
{
    struct td__span k;
    int64_t ignored;
    TD_TRY(check_key(store, "td_store_add", key, &k));
    return store->ops->add(store, k, amount, own_deadline(store), result ? result : &ignored);
}

td_status td_store_compare_set(td_store *store, const char *key, const void *expected,
                               size_t expected_size, const void *desired, size_t desired_size,
                               td_bytes *value)
{
    struct td__span k, e, d;
    TD_TRY(check_key(store, "td_store_compare_set", key, &k));
    TD_TRY(check_value("td_store_compare_set", key, expected, expected_size, &e));
    TD_TRY(check_value("td_store_compare_set", key, desired, desired_size, &d));
    if (!value)
        return td_fail(TD_ERR_INVALID, "td_store_compare_set of \"%s\": the output is NULL", key);
    return store->ops->compare_set(store, k, e, d, own_deadline(store), value);
}

td_status td_store_delete_key(td_store *store, const char *key, bool *deleted)
{
    struct td__span k;
    bool ignored;
    TD_TRY(check_key(store, "td_store_delete_key", key, &k));
    return store->ops->delete_key(store, k, own_deadline(store), deleted ? deleted : &ignored);
}

/* Waits for all keys, and gets their values where these are wanted. */
static td_status get_keys(td_store *store, const char *call, const char *const *keys, int count,
                          int64_t timeout_ms, bool wanted, td_bytes *values)
{
    struct key_list list;
    td__deadline deadline = 0;
    TD_TRY(check_keys(store, call, keys, count, &list));
    td_status status = deadline_of(store, call, timeout_ms, &deadline);
    if (!status && count && wanted && !values)
        status = td_fail(TD_ERR_INVALID, "%s: the output is NULL", call);
    else if (!status && count)
        status = store->ops->get(store, list.spans, (size_t)count, deadline, values);
    free_keys(&list);
    return status;
}

td_status td_store_wait(td_store *store, const char *const *keys, int count, int64_t timeout_ms)
{
    return get_keys(store, "td_store_wait", keys, count, timeout_ms, false, NULL);
}

td_status td_store_multi_get(td_store *store, const char *const *keys, int count,
                             int64_t timeout_ms, td_bytes *values)
{
    return get_keys(store, "td_store_multi_get", keys, count, timeout_ms, true, values);
}

td_status td_store_check(td_store *store, const char *const *keys, int count, bool *all_exist)
{
    struct key_list list;
    TD_TRY(check_keys(store, "td_store_check", keys, count, &list));
    td_status status = TD_OK;
    if (!all_exist)
        status = td_fail(TD_ERR_INVALID, "td_store_check: the output is NULL");
    else if (!count)
        *all_exist = true;
    else
        status = store->ops->check(store, list.spans, (size_t)count, own_deadline(store),
                                   all_exist);
    free_keys(&list);
    return status;
}

td_status td_store_multi_set(td_store *store, const char *const *keys, const td_bytes *values,
                             int count)
{
    struct key_list list;
    TD_TRY(check_keys(store, "td_store_multi_set", keys, count, &list));
    td_status status = TD_OK;
    struct td__span *spans = count ? malloc((size_t)count * sizeof *spans) : NULL;
    if (count && !values)
        status = td_fail(TD_ERR_INVALID, "td_store_multi_set: the list of values is NULL");
    else if (count && !spans)
        status = td__fail_nomem("td_store_multi_set");
    for (int i = 0; !status && i < count; i++)
        status = check_value("td_store_multi_set", keys[i], values[i].data, values[i].size,
                             &spans[i]);
    if (!status && count)
        status = store->ops->set(store, list.spans, spans, (size_t)count, own_deadline(store));
    free(spans);
    free_keys(&list);
    return status;
}

td_status td_store_num_keys(td_store *store, int64_t *count)
{
    TD_TRY(check_store(store, "td_store_num_keys"));
    if (!count)
        return td_fail(TD_ERR_INVALID, "td_store_num_keys: the output is NULL");
    return store->ops->num_keys(store, (struct td__span){"", 0}, own_deadline(store), count);
}

td_status td__store_look_up(td_store *store, const char *key, td_bytes *value, bool *found)
{
    struct td__error before;
    td__error_save(&before);
    td_status status = td_store_get(store, key, TD_NOW, value);
    *found = !status;
    if (status != TD_ERR_TIMEOUT)
        return status;
    td__error_undo(&before);
    return TD_OK;
}

bool td__store_address(td_store *store, char *text, size_t room)
{
    if (!store->ops->address)
        return false;
    store->ops->address(store, text, room);
    return text[0] != 0;
}
