/* Key-value stores: how the processes of a job find each other, and share small values.
 *
 * The simple way: td_rendezvous() (rendezvous.h) returns a store that all ranks share. The explicit
 * way is to open one here:
 *
 *     hash    inside this process, between its threads
 *     file    a file that all processes can reach, on a shared file system too
 *     tcp     a server in one process, clients in the others
 *     prefix  a view of another store in which every key begins with a prefix
 *     own     a store of the program's own, made of callbacks: td_store_create()
 *
 * Keys are C strings of at most TD_STORE_MAX_KEY bytes; values are bytes, at most
 * TD_STORE_MAX_VALUE.
 *
 * Threads: every function may be called from any thread, also on one store at once; a thread that waits for a
 * key does not keep the others from using the store. Only td_store_close() must not run while
 * another call uses the same store.
 *
 * Timeouts are those of base.h: 0 is the store's own (td_store_set_timeout(), 300 s by default), TD_NOW looks
 * and does not wait for a key. A call without a timeout argument does not wait for a key either; how long a
 * server may take to answer is bounded by the store's own timeout in all of them. */
#ifndef TANDEM_STORE_H
#define TANDEM_STORE_H

#include <tandem/base.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TD_STORE_MAX_KEY 4096
#define TD_STORE_MAX_VALUE ((size_t)256 << 20)
#define TD_STORE_MAX_KEYS 65536 /* keys in one call of multi_get, multi_set, wait or check */
#define TD_STORE_DEFAULT_TIMEOUT_MS 300000

typedef struct td_store td_store;

/* ---- Opening and closing --------------------------------------------------------------------- */

/** Opens an empty store inside this process. */
TD_API td_status td_hash_store_open(td_store **store);

/**
 * Opens the store that lives in the file `path`, and makes the file where it is not there. All
 * processes that have it open share its keys; the last one to close it removes the file. A file
 * that was left by an earlier job (no process has it open) is emptied first, so a process that is alone
 * and closes the store loses its keys. Works where the file system has fcntl locks, NFS included.
 */
TD_API td_status td_file_store_open(const char *path, td_store **store);

typedef struct td_tcp_store_options {
    bool host_server;   /* run the server here, and be its first client */
    int64_t timeout_ms; /* for connecting, and the store's own timeout from then on; 0: 300 s */
    int64_t
        linger_ms; /* host_server: how long closing waits for the other clients; 0: not at all */
    const char
        *secret; /* the job's secret; NULL: TANDEM_SECRET or TANDEM_SECRET_FILE, or the user's */
    void *reserved[4];
} td_tcp_store_options;

/**
 * Connects to the store server at `host`:`port`, and with options->host_server starts it first, in
 * a thread of this process. Port 0 there takes a free one: td_tcp_store_port(). `host` is a name or
 * an address of IPv4 or IPv6, or "unix:/path" or "unix:@name" (an abstract socket) with port 0. A
 * server listens on loopback only when `host` is a loopback address, otherwise on every address.
 *
 * Both sides prove the job's secret to each other before anything else is said. Without a secret
 * only loopback and unix sockets are allowed, and the user's own secret stands in for it, a file below HOME
 * that is made on first use (docs/security.md); unless TANDEM_INSECURE=1 is set.
 *
 * A client tries again until the time is over where the server is not there yet.
 *
 * td_store_set(), multi_set() and append() of this store do not wait for the server's answer. One
 * that was lost is reported by the next call on the store, td_store_close() at the latest.
 *
 * Errors: TD_ERR_INVALID, TD_ERR_AUTH, TD_ERR_TIMEOUT (the message lists each address tried),
 * TD_ERR_SYSTEM (the port is taken, …).
 */
TD_API td_status td_tcp_store_open(const char *host, int port, const td_tcp_store_options *options,
                                   td_store **store);

/** The port that a TCP store talks to; 0 for one over a unix socket, -1 for another kind of store. */
TD_API int td_tcp_store_port(const td_store *store);

/** Opens a view of `base` in which key k stands for `prefix`/k. `base` is kept open by it, and may
 *  be closed by its owner before. */
TD_API td_status td_prefix_store_open(const char *prefix, td_store *base, td_store **store);

/**
 * Closes a store; NULL is fine. `store` is gone afterwards, whatever is returned. No other thread
 * may be inside a call on it. A TCP client first makes sure that the server has all that was set.
 *
 * Errors: TD_ERR_PEER, TD_ERR_TIMEOUT (something that was set may be lost; the message says what).
 */
TD_API td_status td_store_close(td_store *store);

/** Sets the store's own timeout; 0 is the default again, TD_STORE_DEFAULT_TIMEOUT_MS. TD_NOW is
 *  TD_ERR_INVALID. A prefix store has a timeout of its own, which begins as that of its base. */
TD_API td_status td_store_set_timeout(td_store *store, int64_t timeout_ms);

/** The store's own timeout. */
TD_API int64_t td_store_timeout(const td_store *store);

/* ---- One key --------------------------------------------------------------------------------- */

/** Sets `key` to `size` bytes of `value`, over what was there. */
TD_API td_status td_store_set(td_store *store, const char *key, const void *value, size_t size);

/** Waits until `key` exists and returns its value, to be freed with td_bytes_free(). */
TD_API td_status td_store_get(td_store *store, const char *key, int64_t timeout_ms,
                              td_bytes *value);

/** Adds `amount` to the decimal number at `key` (an absent one counts as 0) and stores the sum,
 *  which *result receives where it is not NULL. TD_ERR_INVALID: not a number, or out of range. */
TD_API td_status td_store_add(td_store *store, const char *key, int64_t amount, int64_t *result);

/**
 * Compares and swaps, in one step for all processes. `value` receives:
 *     key present and equal to `expected`    the new value: `desired` was stored
 *     key present and different              the value that is there
 *     key absent, `expected` empty           the new value: `desired` was stored
 *     key absent otherwise                   `expected`
 */
TD_API td_status td_store_compare_set(td_store *store, const char *key, const void *expected,
                                      size_t expected_size, const void *desired,
                                      size_t desired_size, td_bytes *value);

/** Appends to the value of `key`; an absent one counts as empty. */
TD_API td_status td_store_append(td_store *store, const char *key, const void *value, size_t size);

/** Removes `key`. *deleted, where not NULL, says whether it was there. */
TD_API td_status td_store_delete_key(td_store *store, const char *key, bool *deleted);

/* ---- Many keys ------------------------------------------------------------------------------- */

/** Waits until all `count` keys exist. TD_ERR_TIMEOUT names one that was missing. */
TD_API td_status td_store_wait(td_store *store, const char *const *keys, int count,
                               int64_t timeout_ms);

/** Says at once whether all `count` keys exist. */
TD_API td_status td_store_check(td_store *store, const char *const *keys, int count,
                                bool *all_exist);

/** Waits until all `count` keys exist and returns their values, as they were at one moment, into
 *  values[0 … count-1]; each is freed with td_bytes_free(). */
TD_API td_status td_store_multi_get(td_store *store, const char *const *keys, int count,
                                    int64_t timeout_ms, td_bytes *values);

/** Sets `count` keys, in one step. Twice the same key: the later value stays. */
TD_API td_status td_store_multi_set(td_store *store, const char *const *keys,
                                    const td_bytes *values, int count);

/** Counts the keys of the users: what Tandem itself keeps in the store does not count. A prefix
 *  store counts the keys below its prefix. */
TD_API td_status td_store_num_keys(td_store *store, int64_t *count);

/* ---- A store of one's own --------------------------------------------------------------------
 *
 * A framework that has a store already (PyTorch's c10d::Store, etcd, a database) hands it over as a table of
 * callbacks; groups, td_rendezvous(), prefix stores and everything else that takes a td_store then use it.
 * docs/stores.md has an example.
 *
 * A callback returns TD_OK, or what td_fail() returned: that status and that sentence reach the caller.
 * Arguments are checked before. Keys are what store.h says, and are handed over as they are: any bytes but
 * NUL, the empty key included. Tandem's own keys begin with the byte 1, which may also follow a '/' in them
 * ("\1tandem/\1card/…"), and have at most 512 bytes, a prefix of the user's not counted; a store that cannot
 * have such keys encodes them. Timeouts are 1 and above, or TD_NOW, never 0. Byte strings are returned by
 * td_bytes_copy().
 *
 * Threads: callbacks are called from several threads at once. One that waits for a key must not keep the
 * others out: in one process a thread may wait for what another one is about to set. A store that cannot do
 * that sets `serial`. After fork() the child calls the same callbacks with the same `self`. */

typedef struct td_store_ops {
    /** The kind of store, for messages, such as "etcd". NULL: "own". The text must stay. */
    const char *name;

    /** At most one callback runs at a time, and none waits: get(), wait() and multi_get() are called with TD_NOW
     *  only, again and again, with pauses that grow from 0.25 to 10 ms. For a client that locks itself up while
     *  it waits, or knows no threads. */
    bool serial;

    /* ---- Required ---- */

    /** Sets `key`, over what was there. */
    td_status (*set)(void *self, const char *key, const void *value, size_t size);

    /** Waits until `key` exists and returns its value. TD_ERR_TIMEOUT, with or without td_fail(), where it does
     *  not exist. It may give up before its time is over: it is then called again, after a pause as above. */
    td_status (*get)(void *self, const char *key, int64_t timeout_ms, td_bytes *value);

    /** In one step for all processes: stores `desired` where the value is equal to `expected`, or the key is
     *  absent and `expected` empty. *stored, false before, says whether it did. Otherwise *value is what is there,
     *  and stays empty where the key is absent. A store that learns no more than the value afterwards says that it has
     *  stored when that is `desired`, and must have add() then: see there. */
    td_status (*compare_set)(void *self, const char *key, const void *expected,
                             size_t expected_size, const void *desired, size_t desired_size,
                             td_bytes *value, bool *stored);

    /** Removes `key`. *deleted says whether it was there. */
    td_status (*delete_key)(void *self, const char *key, bool *deleted);

    /* ---- Optional: NULL does what is said here, by the callbacks above ---- */

    /** td_store_add(). NULL: get() and compare_set(), again until no other process came in between. That needs
     *  a *stored that is exact: two processes that both add 1 to "4" must not both be told that they stored
     *  "5". */
    td_status (*add)(void *self, const char *key, int64_t amount, int64_t *result);

    /** td_store_append(). NULL: as for add(). Without an exact *stored, one of two equal texts that are appended
     *  at once is lost. */
    td_status (*append)(void *self, const char *key, const void *value, size_t size);

    /** td_store_check(). NULL: get() of each key with TD_NOW. */
    td_status (*check)(void *self, const char *const *keys, int count, bool *all_exist);

    /** td_store_wait(); the same freedom as get(). NULL: get() of each key, and check() at the end. A key that
     *  was deleted and set again meanwhile counts as there all the time. */
    td_status (*wait)(void *self, const char *const *keys, int count, int64_t timeout_ms);

    /** td_store_multi_get(); the same freedom as get(). NULL: as for wait(), and the values are not those of one
     *  moment. */
    td_status (*multi_get)(void *self, const char *const *keys, int count, int64_t timeout_ms,
                           td_bytes *values);

    /** td_store_multi_set(). NULL: set() of each key, in order: not in one step, and a failure leaves those
     *  before it set. */
    td_status (*multi_set)(void *self, const char *const *keys, const td_bytes *values, int count);

    /** Counts all keys that begin with `prefix`, Tandem's own included. NULL: td_store_num_keys() is
     *  TD_ERR_UNSUPPORTED; Tandem itself does not need it. */
    td_status (*num_keys)(void *self, const char *prefix, int64_t *count);

    /** Writes the address at which ranks on other hosts reach this host: that of the interface that leads to
     *  the store's server. NULL, or "": a group takes 127.0.0.1, or with a secret (docs/security.md) the address
     *  of the default route. */
    void (*address)(void *self, char *text, size_t room);

    /** The last reference to the store is closed: frees `self`, also when it fails. NULL: nothing to do. */
    td_status (*close)(void *self);

    void *reserved[4];
} td_store_ops;

/**
 * Makes a store of callbacks; each gets `self`. `ops` is copied. The store's own timeout is the default.
 * td_store_close() calls close() when nothing else uses the store; when this call fails, close() is not
 * called.
 *
 * Errors: TD_ERR_INVALID (a required callback is NULL, a reserved member is set), TD_ERR_NOMEM.
 */
TD_API td_status td_store_create(const td_store_ops *ops, void *self, td_store **store);

#ifdef __cplusplus
}
#endif

#endif
