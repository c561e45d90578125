/* Those who have come to a meeting, as far as they are on this machine: they are looked after until all have
 * met, since one that ends before would be waited for in vain. */
#ifndef TD_STORE_PEER_WATCH_H
#define TD_STORE_PEER_WATCH_H

#include <tandem/store.h>

#include <stdbool.h>

struct td__watched_peer;

/** All zero but for the first two: nobody is known yet. */
struct td__peer_watch {
    int rank; /* this process's own */
    int size;
    struct td__watched_peer *list;
};

/** A value that may not be there; false where it is not. */
bool td__peer_watch_look_up(td_store *store, const char *key, td_bytes *value);

/** Whether this process is in a list of td__roster_add(), and did not come back to the meeting later. */
bool td__peer_watch_has_self(const struct td__peer_watch *peers, const char *list);

/** Begins to watch those of the list; may be called again with a longer one. */
void td__peer_watch_watch(struct td__peer_watch *peers, const char *list);

enum { TD__WATCHED_TEXT = 320 };

/** A rank that has ended, and "rank 3 (on node7, pid 4711) was killed by SIGKILL"; -1 where there is none. */
int td__peer_watch_find_ended(struct td__peer_watch *peers, char text[TD__WATCHED_TEXT]);

void td__peer_watch_free(struct td__peer_watch *peers);

#endif
