/* Those who have come to a meeting, as far as they are on this machine: they are looked after until all have
 * met, since one that ends before would be waited for in vain. */
#ifndef TD_STORE_GUESTS_H
#define TD_STORE_GUESTS_H

#include <tandem/store.h>

#include <stdbool.h>

struct td__guest;

/** All zero but for the first two: nobody is known yet. */
struct td__guests {
    int rank; /* this process's own */
    int size;
    struct td__guest *list;
};

/** A value that may not be there; false where it is not. */
bool td__guests_look_up(td_store *store, const char *key, td_bytes *value);

/** Whether this process is in a list of td__sign_in(), and did not come back to the meeting later. */
bool td__guests_has_self(const struct td__guests *guests, const char *list);

/** Begins to watch those of the list; may be called again with a longer one. */
void td__guests_watch(struct td__guests *guests, const char *list);

enum { TD__GUEST_TEXT = 320 };

/** A rank that has ended, and "rank 3 (on node7, pid 4711) was killed by SIGKILL"; -1 where there is none. */
int td__guests_find_ended(struct td__guests *guests, char text[TD__GUEST_TEXT]);

void td__guests_free(struct td__guests *guests);

#endif
