/* The rules of a key-value store over a map in memory, without locks and without waiting: the hash
 * store, the TCP server and the file store's picture of its file all stand on this. */
#ifndef TD_STORE_KV_H
#define TD_STORE_KV_H

#include "base/buffer.h"
#include "base/map.h"

#include <tandem/base.h>

/* A value. Counted, so that the server can still be sending one that was replaced. */
struct td__blob {
    int references;
    size_t size;
    size_t capacity;
    char data[];
};

struct td__kv {
    struct td__map map;
};

void td__kv_free(struct td__kv *kv);

/** The value of `key`, or NULL. Not retained. */
struct td__blob *td__kv_find(const struct td__kv *kv, struct td__span key);

void td__blob_release(struct td__blob *blob);

/* These fail without memory, and as store.h says; a failure changes nothing. */
td_status td__kv_set(struct td__kv *kv, struct td__span key, struct td__span value);
td_status td__kv_append(struct td__kv *kv, struct td__span key, struct td__span value);
td_status td__kv_add(struct td__kv *kv, struct td__span key, int64_t amount, int64_t *result);

enum { TD__NUMBER_TEXT = 24 };

/** What an add of `amount` to the value `old` (data NULL: the key is absent) leaves: *sum, and its text.
 *  Returns the length of the text, or -1 where it is TD_ERR_INVALID, which is the last error then. */
int td__kv_sum(struct td__span key, struct td__span old, int64_t amount, int64_t *sum,
               char text[TD__NUMBER_TEXT]);

/** TD_ERR_INVALID where a value of `size` bytes cannot grow by `more`. */
td_status td__kv_check_append(struct td__span key, size_t size, size_t more);

/** *result is what the caller gets to see: it points into the store or to what was passed in, until
 *  the next change. *changed says whether `desired` was stored. */
td_status td__kv_compare_set(struct td__kv *kv, struct td__span key, struct td__span expected,
                             struct td__span desired, struct td__span *result, bool *changed);

bool td__kv_delete(struct td__kv *kv, struct td__span key);

/** Counts the keys below `prefix`; Tandem's own do not count when it is empty. */
int64_t td__kv_count(const struct td__kv *kv, struct td__span prefix);

/** Copies the values of `count` keys, all of which exist, into values[]; none on failure. */
td_status td__kv_copy(const struct td__kv *kv, const struct td__span *keys, size_t count,
                      td_bytes *values);

/** The first of `count` keys, from index `first` on and round, that is missing; -1 when none is. */
long td__kv_first_missing(const struct td__kv *kv, const struct td__span *keys, size_t count,
                          size_t first);

#endif
