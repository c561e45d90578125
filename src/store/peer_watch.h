/* The processes of other ranks on this machine, watched while this rank waits for them: one that ends
 * before all have joined would be waited for until the timeout.
 *
 * The roster, a value in the store, says which processes these are: each rank adds a line about its own before
 * it waits for the others. */
#ifndef TD_STORE_PEER_WATCH_H
#define TD_STORE_PEER_WATCH_H

#include "base/clock.h"
#include "os/process.h"

#include <tandem/store.h>

/* ---- The roster ------------------------------------------------------------------------------ */

enum { TD__ROSTER_KEY = 160 };

struct td__roster_entry {
    int rank;
    bool rejoined; /* it took over the rank of one that has ended */
    struct td__process_id process;
};

/** The key of the roster of the rendezvous that made the part of the store below `prefix`. */
void td__roster_key(const char *prefix, char key[TD__ROSTER_KEY]);

/** Adds this process to the roster at `key`; does nothing where the process has no identity (no /proc). */
td_status td__roster_add(td_store *store, const char *key, int rank, bool rejoined);

/** Reads the next line of the roster that `*at` points into; false at its end. Malformed lines are
 *  skipped. */
bool td__roster_next(const char **at, struct td__roster_entry *entry);

/** TANDEM_REJOIN=1: this process takes over the rank of one that has ended. */
bool td__rejoins(void);

/* ---- Watching -------------------------------------------------------------------------------- */

struct td__watched_peer;

/** All zero but for rank and size: no process is known yet. */
struct td__peer_watch {
    int rank; /* this process's own */
    int size;
    struct td__watched_peer *list;
};

/** Whether this process is in the roster `list`, and has not rejoined later. */
bool td__peer_watch_has_self(const struct td__peer_watch *peers, const char *list);

/** Watches the processes of the roster `list`; may be called again with a longer one. */
void td__peer_watch_watch(struct td__peer_watch *peers, const char *list);

enum { TD__WATCHED_TEXT = 320 };

/** A rank that has ended, and "rank 3 (on node7, pid 4711) was killed by SIGKILL"; -1 where there is none. */
int td__peer_watch_find_ended(struct td__peer_watch *peers, char text[TD__WATCHED_TEXT]);

void td__peer_watch_free(struct td__peer_watch *peers);

/** How td__peer_watch_get() waits. */
struct td__watched_wait {
    int ranks; /* that wait with this one */
    td__deadline deadline;

    /** Called between two looks at the store. A failure ends the wait, unless all keys exist by then. */
    td_status (*check)(void *arg);
    void *arg;
};

/** Waits until all keys exist, as td_store_multi_get() does, and checks the other ranks meanwhile.
 *  TD_ERR_TIMEOUT when the deadline has passed, or the status of wait->check(). */
td_status td__peer_watch_get(td_store *store, const char *const *keys, int count,
                             const struct td__watched_wait *wait, td_bytes *values);

#endif
