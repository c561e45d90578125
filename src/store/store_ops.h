/* What a kind of store provides. store.c checks the arguments of the public calls and turns them
 * into these; a slot may rely on keys and values being within their limits.
 *
 * Every slot may be called by several threads at once. Every slot that fails sets the last error. */
#ifndef TD_STORE_OPS_H
#define TD_STORE_OPS_H

#include "base/buffer.h"
#include "base/clock.h"

#include <tandem/store.h>

#include <stdatomic.h>

/* Keys that begin with this byte are Tandem's own: num_keys does not count them. */
#define TD__INTERNAL_KEY "\1"

/* The deadline of a get with TD_NOW. */
#define TD__LOOK_ONCE ((td__deadline)0)

struct td__store_ops {
    const char *kind; /* "tcp", for messages */

    /** Sets all `count` keys in one step, or none. May return before it is done where a later call
     *  on the store reports the failure. */
    td_status (*set)(td_store *store, const struct td__span *keys, const struct td__span *values,
                     size_t count, td__deadline deadline);

    /** Appends, in one step; the same freedom as set. */
    td_status (*append)(td_store *store, struct td__span key, struct td__span value,
                        td__deadline deadline);

    /** Blocks until all keys exist at one moment, and stores their values at that moment into
     *  values[], unless that is NULL. On TD_ERR_TIMEOUT the message names a missing key. The deadline
     *  TD__LOOK_ONCE (TD_NOW) bounds the wait for the keys only: the store itself then gets its own timeout
     *  to answer. */
    td_status (*get)(td_store *store, const struct td__span *keys, size_t count,
                     td__deadline deadline, td_bytes *values);

    /** Whether all keys exist. Does not block for them. */
    td_status (*check)(td_store *store, const struct td__span *keys, size_t count,
                       td__deadline deadline, bool *all_exist);

    /** The rules of these are in store.h; each is one step for all users of the store. */
    td_status (*add)(td_store *store, struct td__span key, int64_t amount, td__deadline deadline,
                     int64_t *result);
    td_status (*compare_set)(td_store *store, struct td__span key, struct td__span expected,
                             struct td__span desired, td__deadline deadline, td_bytes *value);
    td_status (*delete_key)(td_store *store, struct td__span key, td__deadline deadline,
                            bool *deleted);

    /** Counts the keys that begin with `prefix`, without Tandem's own when it is empty. */
    td_status (*num_keys)(td_store *store, struct td__span prefix, td__deadline deadline,
                          int64_t *count);

    /** The address of this host on the way to the server, as text; NULL where there is no server. */
    void (*address)(td_store *store, char *text, size_t room);

    /** Frees the store, also when it fails. Called once, when no reference is left. */
    td_status (*close)(td_store *store);
};

/* The head of every kind of store. */
struct td_store {
    const struct td__store_ops *ops;
    atomic_int references;
    _Atomic int64_t timeout_ms;
};

/** Fills in the head: one reference. */
void td__store_init(td_store *store, const struct td__store_ops *ops, int64_t timeout_ms);

/** The deadline of a request to the store itself in a call with `deadline`. */
td__deadline td__store_answer_deadline(const td_store *store, td__deadline deadline);

/** Gets the value of a key that may not exist; *found says. Does not wait for it. */
td_status td__store_look_up(td_store *store, const char *key, td_bytes *value, bool *found);

/** The address of this host that the store's server sees, "127.0.0.1" where it is on this host; false
 *  where the store has no server. */
bool td__store_address(td_store *store, char *text, size_t room);

/** The address of the interface with the default route; nothing is sent. False if there is none. */
bool td__route_address(char *text, size_t room);

/** The address at which other processes of the job reach this one (own_address.c). */
void td__own_address(td_store *store, char text[64]);

/** The prefix of a prefix store with its '/', and its base instead of *store; "" for another kind. */
const char *td__prefix_store_base(td_store **store);

/** Has the server set `key` to `value` when this client's connection ends without
 *  td_store_close(): when its process dies, or its host is cut off. The latest will counts. */
td_status td__tcp_store_set_will(td_store *store, const char *key, const void *value, size_t size);

/** Changes how long closing waits for the other clients, where the server runs in this process;
 *  other kinds of store are left alone. */
void td__tcp_store_set_linger(td_store *store, int64_t linger_ms);

/** TD_ERR_TIMEOUT: "<kind> store: key "k" was not set in time". */
td_status td__fail_missing_key(const char *kind, struct td__span key);

#endif
