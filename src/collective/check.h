/* Proves a schedule by carrying it out on symbols, all ranks in one process. */
#ifndef TD_COLLECTIVE_CHECK_H
#define TD_COLLECTIVE_CHECK_H

#include "collective/schedule.h"

/**
 * Carries out `algorithm` for `size` (at most 64) ranks and checks that
 *   - every rank ends with exactly what the operation promises, and INPUT is as it was;
 *   - each value is reduced exactly once, and where the algorithm is ordered along the tree;
 *   - nothing is read before it is written, and no step of a round touches what another one writes;
 *   - it ends also when a send waits until its receive is there;
 *   - with parts of different sizes, each block is only ever put where its size is expected;
 *   - no rank sends more blocks than the algorithm's bound.
 * On failure `why` says what went wrong, where.
 */
bool td__schedule_check(const struct td__algorithm *algorithm, int32_t size, int32_t root,
                        char *why, size_t room);

#endif
