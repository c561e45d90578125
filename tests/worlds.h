/* Helpers of the tests of rendezvous: a process that joins a world and uses the store. */
#ifndef TANDEM_TESTS_WORLDS_H
#define TANDEM_TESTS_WORLDS_H

#include <tandem/rendezvous.h>

/** The URL of a rendezvous; rank and world size come from the options. */
struct init_url {
    char url[600];
};

/** A reserved port of 127.0.0.1. */
struct init_url tcp_init_url(void);

/** A file in the test's directory. */
struct init_url file_init_url(void);

/** td_rendezvous() at that URL. */
td_status rendezvous_at(const struct init_url *init, int rank, int world_size, int64_t timeout_ms,
                        td_world *world);

/** Checks that `world` is a fresh one of that rank and size, and that its ranks reach each other
 *  through its store: each sets its key and reads those of all. */
void use_world(const td_world *world, int rank, int world_size);

/** Returns when all ranks have left use_world(). */
void await_all(const td_world *world);

/** Whether `key` is there. */
bool world_has(const td_world *world, const char *key);

#endif
