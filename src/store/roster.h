/* The list of those who have come: each rank of a meeting adds a line about its process, before it waits for
 * the others, so that those on its machine can look after it meanwhile. */
#ifndef TD_STORE_ROSTER_H
#define TD_STORE_ROSTER_H

#include "os/process.h"

#include <tandem/store.h>

enum { TD__ROSTER_KEY = 160 };

struct td__roster_entry {
    int rank;
    bool again; /* it took the place of one that had its rank */
    struct td__process_id process;
};

/** Where a store has the list of the rendezvous from which the part of it below `prefix` comes. */
void td__roster_key(const char *prefix, char key[TD__ROSTER_KEY]);

/** Adds this process to the list at `key`; nothing where it cannot be told from others. */
td_status td__roster_add(td_store *store, const char *key, int rank, bool again);

/** Takes the next line of a list, which `*at` points into; false at its end. What makes no sense is passed
 *  over. */
bool td__roster_next(const char **at, struct td__roster_entry *entry);

#endif
