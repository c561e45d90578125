/* Meeting: each rank says through the store that it is there, and goes on when all are. */
#ifndef TD_STORE_RENDEZVOUS_BARRIER_H
#define TD_STORE_RENDEZVOUS_BARRIER_H

#include "base/clock.h"

#include <tandem/rendezvous.h>

/**
 * Waits until all ranks of `world` have arrived. `place` names the meeting in messages, `round`
 * tells apart several meetings through one store.
 *
 * When it fails, every rank that waits fails with the same message: two processes that claim one
 * rank or disagree on the world size (TD_ERR_MISMATCH), or ranks that did not come in time
 * (TD_ERR_TIMEOUT, with their numbers).
 *
 * *again: this process is the successor of one that was at this meeting, which is over.
 */
td_status td__rendezvous_barrier(const td_world *world, const char *place, const char *round,
                                 td__deadline deadline, bool *again);

/** TANDEM_REJOIN=1: this process takes the place of one that had its rank. */
bool td__rejoins(void);

#endif
