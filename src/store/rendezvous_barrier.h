/* The barrier of a rendezvous: each rank joins it through the store, and goes on when all have joined. */
#ifndef TD_STORE_RENDEZVOUS_BARRIER_H
#define TD_STORE_RENDEZVOUS_BARRIER_H

#include "base/clock.h"

#include <tandem/rendezvous.h>

/**
 * Waits until all ranks of `world` have joined. `address` names the rendezvous in messages, `epoch` tells
 * several of them through one store apart.
 *
 * When it fails, every rank that waits fails with the same message: two processes that claim one rank or
 * disagree on the world size (TD_ERR_MISMATCH), a process that has ended (TD_ERR_PEER), or ranks that did
 * not join in time (TD_ERR_TIMEOUT, with their numbers).
 *
 * *rejoined: this process is the successor of one of this rendezvous, which has succeeded already.
 */
td_status td__rendezvous_barrier(const td_world *world, const char *address, const char *epoch,
                                 td__deadline deadline, bool *rejoined);

/** TANDEM_REJOIN=1: this process takes over the rank of one that has ended. */
bool td__rejoins(void);

#endif
