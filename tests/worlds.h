/* What the tests of worlds have in common: a process that meets the others and uses the store. */
#ifndef TANDEM_TESTS_WORLDS_H
#define TANDEM_TESTS_WORLDS_H

#include <tandem/rendezvous.h>

/** Where the processes of a test meet: rank and world size come from the options. */
struct place {
    char url[600];
};

/** A port of 127.0.0.1 that is this test's own. */
struct place place_tcp(void);

/** A file in the test's directory. */
struct place place_file(void);

/** Meets the others there. */
td_status meet_at(const struct place *place, int rank, int world_size, int64_t timeout_ms,
                  td_world *world);

/** Checks that `world` is a fresh one of that rank and size, and that its ranks reach each other
 *  through its store: each sets its key and reads those of all. */
void use_world(const td_world *world, int rank, int world_size);

/** Returns when all ranks have left use_world(). */
void await_all(const td_world *world);

/** Whether `key` is there. */
bool world_has(const td_world *world, const char *key);

#endif
