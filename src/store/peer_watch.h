/* The processes of other ranks on this machine, watched while this rank waits for them: one that ends
 * before all have joined would be waited for until the timeout. */
#ifndef TD_STORE_PEER_WATCH_H
#define TD_STORE_PEER_WATCH_H

#include "base/clock.h"

#include <tandem/store.h>

#include <stdbool.h>

struct td__watched_peer;

/** All zero but for rank and size: no process is known yet. */
struct td__peer_watch {
    int rank; /* this process's own */
    int size;
    struct td__watched_peer *list;
};

/** Gets a value that may not exist; false where it does not. */
bool td__peer_watch_look_up(td_store *store, const char *key, td_bytes *value);

/** Whether this process is in the roster `list` (roster.h), and has not rejoined later. */
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

    /** Called between two looks at the store. *over ends the wait with the status that it returns. */
    td_status (*check)(void *arg, bool *over);
    void *arg;
};

/** Waits until all keys exist, as td_store_multi_get() does, and checks the other ranks meanwhile.
 *  TD_ERR_TIMEOUT when the deadline has passed. With *over true the status is that of wait->check(), which
 *  may be TD_OK, and `values` is not filled in. */
td_status td__peer_watch_get(td_store *store, const char *const *keys, int count,
                             const struct td__watched_wait *wait, td_bytes *values, bool *over);

#endif
