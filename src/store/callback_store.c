/* The store made of callbacks (td_store_create()), and what stands in for callbacks that are NULL.
 *
 *     set of many keys        set() of each
 *     add, append             get(), then compare_set() until no other process came in between
 *     wait, get of many keys  get() of each; where one had to be waited for, check() of all at the end, since
 *                             the first ones may have been deleted by then
 *     check                   get() of each with TD_NOW
 *
 * A callback may return TD_ERR_TIMEOUT before its time is over, and with `serial` it never waits: await() calls
 * it again. What fails on the way of a call that succeeds does not become the thread's last error. */
#include "base/fail.h"
#include "base/option_rules.h"
#include "base/thread.h"
#include "store/kv.h"
#include "store/store_ops.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    FIRST_PAUSE_NS = 250000,
    LONGEST_PAUSE_NS = 10000000,
};

struct callback_store {
    td_store head;
    td_store_ops call;
    void *self;
    pthread_mutex_t turn; /* held during a callback where they are serial */
};

/* ---- One callback ---------------------------------------------------------------------------- */

/* A callback under way. */
struct callback {
    struct callback_store *own;
    const char *name;
    const char *key; /* for error texts; NULL: of none */
    uint64_t failures;
};

static struct callback begin(struct callback_store *own, const char *name, const char *key)
{
    if (own->call.serial)
        pthread_mutex_lock(&own->turn);
    return (struct callback){own, name, key, td__error_count()};
}

/* Returns the status of a callback; a failure without a sentence gets one. */
static td_status end(const struct callback *callback, td_status status)
{
    struct callback_store *own = callback->own;
    if (own->call.serial)
        pthread_mutex_unlock(&own->turn);
    bool known = status >= TD_OK && status <= TD_ERR_ABORTED;
    if (!status || (known && td__error_count() != callback->failures))
        return status;
    if (status == TD_ERR_TIMEOUT && callback->key)
        return td__fail_missing_key(own->call.name,
                                    (struct td__span){callback->key, strlen(callback->key)});
    char what[320];
    snprintf(what, sizeof what, callback->key ? "%s() of \"%.256s\"" : "%s()", callback->name,
             callback->key);
    if (!known)
        return td_fail(TD_ERR_INVALID, "%s store: %s returned %d, which is not a td_status",
                       own->call.name, what, (int)status);
    return td_fail(status, "%s store: %s failed with %s, and gave no reason by td_fail()",
                   own->call.name, what, td_status_name(status));
}

static td_status fail_no_value(const struct callback_store *own, const char *name, const char *key)
{
    return td_fail(TD_ERR_INVALID, "%s store: %s() of \"%.256s\" returned TD_OK, but no value",
                   own->call.name, name, key);
}

static void free_values(td_bytes *values, size_t count)
{
    for (size_t i = 0; values && i < count; i++)
        td_bytes_free(&values[i]);
}

/* ---- Keys as C strings ----------------------------------------------------------------------- */

/* The keys of a call, in one allocation: the pointers, then the texts. */
static td_status make_names(const struct td__span *keys, size_t count, const char ***names_out)
{
    size_t bytes = 0;
    for (size_t i = 0; i < count; i++)
        bytes += keys[i].size + 1;
    const char **names = malloc(count * sizeof *names + bytes);
    if (!names)
        return td__fail_nomem("store");
    char *at = (char *)(names + count);
    for (size_t i = 0; i < count; i++) {
        names[i] = at;
        memcpy(at, keys[i].data, keys[i].size);
        at[keys[i].size] = '\0';
        at += keys[i].size + 1;
    }
    *names_out = names;
    return TD_OK;
}

struct name {
    char text[TD_STORE_MAX_KEY + 1];
};

static struct name name_of(struct td__span key)
{
    struct name name;
    memcpy(name.text, key.data, key.size);
    name.text[key.size] = '\0';
    return name;
}

/* ---- Waiting --------------------------------------------------------------------------------- */

/* What is waited for, by one callback: get(), multi_get(), or wait() where `values` is NULL. */
struct request {
    const char *const *names;
    size_t count;
    td_bytes *values;
};

static int64_t ms_left(td__deadline deadline)
{
    int64_t left = deadline - td__now_ns();
    return deadline == TD__NEVER ? INT64_MAX : left > 0 ? (left + 999999) / 1000000 : TD_NOW;
}

static td_status attempt(struct callback_store *own, const struct request *request,
                         int64_t timeout_ms)
{
    const td_store_ops *call = &own->call;
    const char *const *names = request->names;
    int count = (int)request->count;
    if (!request->values) {
        struct callback wait = begin(own, "wait", *names);
        return end(&wait, call->wait(own->self, names, count, timeout_ms));
    }
    memset(request->values, 0, request->count * sizeof *request->values);
    if (count > 1) {
        struct callback get = begin(own, "multi_get", *names);
        return end(&get, call->multi_get(own->self, names, count, timeout_ms, request->values));
    }
    struct callback get = begin(own, "get", *names);
    return end(&get, call->get(own->self, *names, timeout_ms, request->values));
}

static td_status await(struct callback_store *own, const struct request *request,
                       td__deadline deadline)
{
    td_status status;
    int64_t pause = FIRST_PAUSE_NS;
    do {
        status = attempt(own, request, own->call.serial ? TD_NOW : ms_left(deadline));
        for (size_t i = 0; !status && request->values && i < request->count; i++)
            if (!request->values[i].data)
                status = fail_no_value(own, request->count > 1 ? "multi_get" : "get",
                                       request->names[i]);
        if (status)
            free_values(request->values, request->count);
    } while (status == TD_ERR_TIMEOUT && td__pause_longer(&pause, LONGEST_PAUSE_NS, deadline));
    return status;
}

/* *value, or *there false. */
static td_status look_up(struct callback_store *own, const char *name, td_bytes *value, bool *there)
{
    struct td__error before;
    td__error_save(&before);
    td_status status = await(own, &(struct request){&name, 1, value}, TD__LOOK_ONCE);
    *there = !status;
    if (status != TD_ERR_TIMEOUT)
        return status;
    td__error_undo(&before);
    return TD_OK;
}

static td_status check_names(struct callback_store *own, const char *const *names, size_t count,
                             bool *all_exist)
{
    if (own->call.check) {
        struct callback check = begin(own, "check", *names);
        return end(&check, own->call.check(own->self, names, (int)count, all_exist));
    }
    *all_exist = true;
    for (size_t i = 0; i < count && *all_exist; i++) {
        td_bytes value;
        TD_TRY(look_up(own, names[i], &value, all_exist));
        td_bytes_free(&value);
    }
    return TD_OK;
}

/* One pass over the keys; *waited: one was not there at first. On failure no value is left. */
static td_status get_each(struct callback_store *own, const char *const *names, size_t count,
                          td__deadline deadline, td_bytes *values, bool *waited)
{
    *waited = false;
    for (size_t i = 0; i < count; i++) {
        td_bytes value;
        bool there;
        td_status status = look_up(own, names[i], &value, &there);
        if (!status && !there) {
            *waited = true;
            status = await(own, &(struct request){&names[i], 1, &value}, deadline);
        }
        if (status) {
            free_values(values, i);
            return status;
        }
        if (values)
            values[i] = value;
        else
            td_bytes_free(&value);
    }
    return TD_OK;
}

static td_status one_by_one(struct callback_store *own, const char *const *names, size_t count,
                            td__deadline deadline, td_bytes *values)
{
    for (;;) {
        bool waited, all_exist = true;
        TD_TRY(get_each(own, names, count, deadline, values, &waited));
        td_status status = waited && count > 1 ? check_names(own, names, count, &all_exist) : TD_OK;
        if (!status && all_exist)
            return TD_OK;
        free_values(values, count);
        TD_TRY(status);
    }
}

static td_status get_names(struct callback_store *own, const char *const *names, size_t count,
                           td__deadline deadline, td_bytes *values)
{
    bool at_once = values ? count == 1 || own->call.multi_get : own->call.wait != NULL;
    return at_once ? await(own, &(struct request){names, count, values}, deadline)
                   : one_by_one(own, names, count, deadline, values);
}

/* ---- The slots ------------------------------------------------------------------------------- */

static td_status callback_get(td_store *store, const struct td__span *keys, size_t count,
                              td__deadline deadline, td_bytes *values)
{
    const char **names;
    struct td__error before;
    uint64_t failures = td__error_count();
    td_bytes *own_values = values ? calloc(count, sizeof *own_values) : NULL;
    if (values && !own_values)
        return td__fail_nomem("store");
    td__error_save(&before);
    td_status status = make_names(keys, count, &names);
    if (!status) {
        status = get_names((struct callback_store *)store, names, count, deadline, own_values);
        free(names);
    }
    if (!status && values)
        memcpy(values, own_values, count * sizeof *values);
    if (!status && td__error_count() != failures)
        td__error_undo(&before);
    free(own_values);
    return status;
}

static td_status callback_check(td_store *store, const struct td__span *keys, size_t count,
                                td__deadline deadline, bool *all_exist)
{
    (void)deadline;
    const char **names;
    bool result = false;
    TD_TRY(make_names(keys, count, &names));
    td_status status = check_names((struct callback_store *)store, names, count, &result);
    free(names);
    if (!status)
        *all_exist = result;
    return status;
}

static td_status set_one(struct callback_store *own, struct td__span key, struct td__span value)
{
    struct name name = name_of(key);
    struct callback set = begin(own, "set", name.text);
    return end(&set, own->call.set(own->self, name.text, value.data, value.size));
}

static td_status set_many(struct callback_store *own, const struct td__span *keys,
                          const struct td__span *values, size_t count)
{
    const char **names;
    td_bytes *bytes = malloc(count * sizeof *bytes);
    if (!bytes)
        return td__fail_nomem("store");
    for (size_t i = 0; i < count; i++)
        bytes[i] = (td_bytes){(char *)values[i].data, values[i].size};
    td_status status = make_names(keys, count, &names);
    if (!status) {
        struct callback set = begin(own, "multi_set", *names);
        status = end(&set, own->call.multi_set(own->self, names, bytes, (int)count));
        free(names);
    }
    free(bytes);
    return status;
}

static td_status callback_set(td_store *store, const struct td__span *keys,
                              const struct td__span *values, size_t count, td__deadline deadline)
{
    (void)deadline;
    struct callback_store *own = (struct callback_store *)store;
    if (count > 1 && own->call.multi_set)
        return set_many(own, keys, values, count);
    for (size_t i = 0; i < count; i++)
        TD_TRY(set_one(own, keys[i], values[i]));
    return TD_OK;
}

/* *now: what is there where it was not stored; empty where the key is absent. */
static td_status swap(struct callback_store *own, const char *name, struct td__span expected,
                      struct td__span desired, td_bytes *now, bool *stored)
{
    *now = (td_bytes){0};
    *stored = false;
    struct callback swap = begin(own, "compare_set", name);
    td_status status = end(&swap,
                           own->call.compare_set(own->self, name, expected.data, expected.size,
                                                 desired.data, desired.size, now, stored));
    if (status || *stored)
        td_bytes_free(now);
    return status;
}

static td_status callback_compare_set(td_store *store, struct td__span key,
                                      struct td__span expected, struct td__span desired,
                                      td__deadline deadline, td_bytes *value)
{
    (void)deadline;
    struct name name = name_of(key);
    td_bytes now;
    bool stored;
    TD_TRY(swap((struct callback_store *)store, name.text, expected, desired, &now, &stored));
    struct td__span seen = stored ? desired : expected;
    if (!now.data)
        return td_bytes_copy(seen.data, seen.size, value);
    *value = now;
    return TD_OK;
}

/* What a change makes of the value `old` (data NULL: there is none): *fresh, which is freed. */
struct change {
    struct td__span key;
    td_status (*apply)(const struct change *change, struct td__span old, td_bytes *fresh);
    int64_t amount, *sum;     /* of an add */
    struct td__span appended; /* of an append */
};

static td_status apply_add(const struct change *change, struct td__span old, td_bytes *fresh)
{
    char text[TD__NUMBER_TEXT];
    int length = td__kv_sum(change->key, old, change->amount, change->sum, text);
    return length < 0 ? TD_ERR_INVALID : td_bytes_copy(text, (size_t)length, fresh);
}

static td_status apply_append(const struct change *change, struct td__span old, td_bytes *fresh)
{
    struct td__span more = change->appended;
    TD_TRY(td__kv_check_append(change->key, old.size, more.size));
    char *joined = malloc(old.size + more.size + 1);
    if (!joined)
        return td__fail_nomem("store");
    if (old.size)
        memcpy(joined, old.data, old.size);
    memcpy(joined + old.size, more.data, more.size);
    *fresh = (td_bytes){joined, old.size + more.size};
    return TD_OK;
}

/* Changes a value by compare_set(), again while others change it in between. */
static td_status change_value(struct callback_store *own, const struct change *change,
                              td__deadline deadline)
{
    struct name name = name_of(change->key);
    for (bool stored = false; !stored;) {
        td_bytes old, fresh = {0}, now = {0};
        bool there;
        TD_TRY(look_up(own, name.text, &old, &there));
        struct td__span old_span = {old.data, old.size};
        td_status status = change->apply(change, old_span, &fresh);
        if (!status)
            status = swap(own, name.text, there ? old_span : (struct td__span){"", 0},
                          (struct td__span){fresh.data, fresh.size}, &now, &stored);
        td_bytes_free(&old);
        td_bytes_free(&fresh);
        td_bytes_free(&now);
        TD_TRY(status);
        if (!stored && td__deadline_passed(deadline))
            return td_fail(
                TD_ERR_TIMEOUT,
                "%s store: other processes changed \"%.256s\" between get() and compare_set() "
                "until the time was over",
                own->call.name, name.text);
    }
    return TD_OK;
}

static td_status callback_add(td_store *store, struct td__span key, int64_t amount,
                              td__deadline deadline, int64_t *result)
{
    struct callback_store *own = (struct callback_store *)store;
    int64_t sum = 0;
    td_status status;
    if (own->call.add) {
        struct name name = name_of(key);
        struct callback add = begin(own, "add", name.text);
        status = end(&add, own->call.add(own->self, name.text, amount, &sum));
    } else {
        struct change change = {.key = key, .apply = apply_add, .amount = amount, .sum = &sum};
        status = change_value(own, &change, deadline);
    }
    if (!status)
        *result = sum;
    return status;
}

static td_status callback_append(td_store *store, struct td__span key, struct td__span value,
                                 td__deadline deadline)
{
    struct callback_store *own = (struct callback_store *)store;
    if (own->call.append) {
        struct name name = name_of(key);
        struct callback append = begin(own, "append", name.text);
        return end(&append, own->call.append(own->self, name.text, value.data, value.size));
    }
    struct change change = {.key = key, .apply = apply_append, .appended = value};
    return change_value(own, &change, deadline);
}

static td_status callback_delete(td_store *store, struct td__span key, td__deadline deadline,
                                 bool *deleted)
{
    (void)deadline;
    struct callback_store *own = (struct callback_store *)store;
    struct name name = name_of(key);
    bool was_there = false;
    struct callback delete = begin(own, "delete_key", name.text);
    TD_TRY(end(&delete, own->call.delete_key(own->self, name.text, &was_there)));
    *deleted = was_there;
    return TD_OK;
}

static td_status count_keys(struct callback_store *own, const char *prefix, int64_t *count)
{
    *count = 0;
    struct callback num_keys = begin(own, "num_keys", prefix);
    return end(&num_keys, own->call.num_keys(own->self, prefix, count));
}

static td_status callback_num_keys(td_store *store, struct td__span prefix, td__deadline deadline,
                                   int64_t *count)
{
    (void)deadline;
    struct callback_store *own = (struct callback_store *)store;
    struct name name = name_of(prefix);
    int64_t all, internal = 0;
    if (!own->call.num_keys)
        return td_fail(TD_ERR_UNSUPPORTED,
                       "td_store_num_keys: the %s store has no callback num_keys()",
                       own->call.name);
    TD_TRY(count_keys(own, name.text, &all));
    if (!prefix.size)
        TD_TRY(count_keys(own, TD__INTERNAL_KEY, &internal));
    *count = all - internal;
    return TD_OK;
}

static void callback_address(td_store *store, char *text, size_t room)
{
    struct callback_store *own = (struct callback_store *)store;
    text[0] = '\0';
    if (!own->call.address)
        return;
    struct callback address = begin(own, "address", NULL);
    own->call.address(own->self, text, room);
    end(&address, TD_OK);
}

static td_status callback_close(td_store *store)
{
    struct callback_store *own = (struct callback_store *)store;
    td_status status = TD_OK;
    if (own->call.close) {
        struct callback close = begin(own, "close", NULL);
        status = end(&close, own->call.close(own->self));
    }
    pthread_mutex_destroy(&own->turn);
    free(own);
    return status;
}

static const struct td__store_ops callback_store_ops = {
    .kind = "callback",
    .set = callback_set,
    .append = callback_append,
    .get = callback_get,
    .check = callback_check,
    .add = callback_add,
    .compare_set = callback_compare_set,
    .delete_key = callback_delete,
    .num_keys = callback_num_keys,
    .address = callback_address,
    .close = callback_close,
};

td_status td_store_create(const td_store_ops *ops, void *self, td_store **store)
{
    if (!ops || !store)
        return td_fail(TD_ERR_INVALID, "td_store_create: the %s is NULL", ops ? "output" : "table");
    const char *missing = !ops->set           ? "set"
                          : !ops->get         ? "get"
                          : !ops->compare_set ? "compare_set"
                          : !ops->delete_key  ? "delete_key"
                                              : NULL;
    if (missing)
        return td_fail(
            TD_ERR_INVALID,
            "td_store_create: the callback %s() is NULL; set(), get(), compare_set() and "
            "delete_key() are required",
            missing);
    TD_TRY(td__check_reserved("td_store_create", ops->reserved));
    struct callback_store *own = calloc(1, sizeof *own);
    if (!own)
        return td__fail_nomem("td_store_create");
    td__store_init(&own->head, &callback_store_ops, 0);
    own->call = *ops;
    own->call.name = ops->name ? ops->name : "own";
    own->self = self;
    pthread_mutex_init(&own->turn, NULL);
    *store = &own->head;
    return TD_OK;
}
