/* The prefix store: the same calls on another store, with longer keys. */
#include "base/fail.h"
#include "store/store_ops.h"

#include <stdlib.h>
#include <string.h>

struct prefix_store {
    td_store head;
    td_store *base;
    size_t prefix_size;
    char prefix[]; /* with its '/' */
};

/* The keys of a call with the prefix before each, in one allocation: the spans, then the bytes. */
static td_status prefixed(const struct prefix_store *store, const struct td__span *keys,
                          size_t count, struct td__span **longer_out)
{
    size_t bytes = 0;
    for (size_t i = 0; i < count; i++) {
        bytes += store->prefix_size + keys[i].size;
        if (store->prefix_size + keys[i].size > TD_STORE_MAX_KEY)
            return td_fail(TD_ERR_INVALID,
                           "prefix store \"%.32s…\": with its prefix the key \"%.*s…\" is longer "
                           "than %d bytes",
                           store->prefix, (int)(keys[i].size < 32 ? keys[i].size : 32),
                           keys[i].data, TD_STORE_MAX_KEY);
    }
    struct td__span *longer = malloc(count * sizeof *longer + bytes);
    if (!longer)
        return td__fail_nomem("prefix store");
    char *at = (char *)(longer + count);
    for (size_t i = 0; i < count; i++) {
        longer[i] = (struct td__span){at, store->prefix_size + keys[i].size};
        memcpy(at, store->prefix, store->prefix_size);
        memcpy(at + store->prefix_size, keys[i].data, keys[i].size);
        at += longer[i].size;
    }
    *longer_out = longer;
    return TD_OK;
}

/* Runs `call`, which may use `base` and `longer`, with the keys prefixed. */
#define WITH_PREFIX(store, keys, count, call)                                                      \
    do {                                                                                           \
        struct prefix_store *self = (struct prefix_store *)(store);                                \
        td_store *base = self->base;                                                               \
        struct td__span *longer;                                                                   \
        TD_TRY(prefixed(self, keys, count, &longer));                                              \
        td_status status = base->ops->call;                                                        \
        free(longer);                                                                              \
        return status;                                                                             \
    } while (0)

static td_status prefix_set(td_store *store, const struct td__span *keys,
                            const struct td__span *values, size_t count, td__deadline deadline)
{
    WITH_PREFIX(store, keys, count, set(base, longer, values, count, deadline));
}

static td_status prefix_append(td_store *store, struct td__span key, struct td__span value,
                               td__deadline deadline)
{
    WITH_PREFIX(store, &key, 1, append(base, *longer, value, deadline));
}

static td_status prefix_get(td_store *store, const struct td__span *keys, size_t count,
                            td__deadline deadline, td_bytes *values)
{
    WITH_PREFIX(store, keys, count, get(base, longer, count, deadline, values));
}

static td_status prefix_check(td_store *store, const struct td__span *keys, size_t count,
                              td__deadline deadline, bool *all_exist)
{
    WITH_PREFIX(store, keys, count, check(base, longer, count, deadline, all_exist));
}

static td_status prefix_add(td_store *store, struct td__span key, int64_t amount,
                            td__deadline deadline, int64_t *result)
{
    WITH_PREFIX(store, &key, 1, add(base, *longer, amount, deadline, result));
}

static td_status prefix_compare_set(td_store *store, struct td__span key, struct td__span expected,
                                    struct td__span desired, td__deadline deadline, td_bytes *value)
{
    WITH_PREFIX(store, &key, 1, compare_set(base, *longer, expected, desired, deadline, value));
}

static td_status prefix_delete(td_store *store, struct td__span key, td__deadline deadline,
                               bool *deleted)
{
    WITH_PREFIX(store, &key, 1, delete_key(base, *longer, deadline, deleted));
}

static td_status prefix_num_keys(td_store *store, struct td__span prefix, td__deadline deadline,
                                 int64_t *count)
{
    WITH_PREFIX(store, &prefix, 1, num_keys(base, *longer, deadline, count));
}

static void prefix_address(td_store *store, char *text, size_t room)
{
    if (!td__store_address(((struct prefix_store *)store)->base, text, room) && room)
        text[0] = 0;
}

static td_status prefix_close(td_store *store)
{
    struct prefix_store *self = (struct prefix_store *)store;
    td_status status = td_store_close(self->base);
    free(self);
    return status;
}

static const struct td__store_ops prefix_store_ops = {
    .kind = "prefix",
    .set = prefix_set,
    .append = prefix_append,
    .get = prefix_get,
    .check = prefix_check,
    .add = prefix_add,
    .compare_set = prefix_compare_set,
    .delete_key = prefix_delete,
    .num_keys = prefix_num_keys,
    .address = prefix_address,
    .close = prefix_close,
};

const char *td__prefix_store_base(td_store **store)
{
    const struct prefix_store *self = (const struct prefix_store *)*store;
    if ((*store)->ops != &prefix_store_ops)
        return "";
    *store = self->base;
    return self->prefix;
}

td_status td_prefix_store_open(const char *prefix, td_store *base, td_store **store)
{
    if (!prefix || !base || !store)
        return td_fail(TD_ERR_INVALID, "td_prefix_store_open: the %s is NULL",
                       !prefix ? "prefix"
                       : !base ? "base store"
                               : "output");
    size_t size = strlen(prefix);
    if (size >= TD_STORE_MAX_KEY)
        return td_fail(TD_ERR_INVALID,
                       "td_prefix_store_open: a prefix of %zu bytes leaves no room "
                       "for keys of at most %d",
                       size, TD_STORE_MAX_KEY);
    struct prefix_store *self = calloc(1, sizeof *self + size + 2);
    if (!self)
        return td__fail_nomem("prefix store");
    td__store_init(&self->head, &prefix_store_ops, td_store_timeout(base));
    memcpy(self->prefix, prefix, size);
    self->prefix[size] = '/';
    self->prefix_size = size + 1;
    self->base = base;
    atomic_fetch_add(&base->references, 1);
    *store = &self->head;
    return TD_OK;
}
