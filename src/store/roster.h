/* The roster: each rank adds a line about its process before it waits for the others, so that the ranks on
 * its machine can watch it meanwhile (peer_watch.h). */
#ifndef TD_STORE_ROSTER_H
#define TD_STORE_ROSTER_H

#include "os/process.h"

#include <tandem/store.h>

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

#endif
