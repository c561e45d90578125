/* The builders of all algorithms: each adds its steps to a schedule. Each algorithm, or family of algorithms, has
 * a file. Phases that several algorithms share are declared here, too. */
#ifndef TD_COLLECTIVE_BUILDERS_H
#define TD_COLLECTIVE_BUILDERS_H

#include "collective/schedule.h"

#define TD__BUILDER(name) void name(const struct td__plan *plan, struct td__schedule *schedule)

TD__BUILDER(td__allreduce_ring);
TD__BUILDER(td__allreduce_doubling);
TD__BUILDER(td__allreduce_halving);
TD__BUILDER(td__broadcast_tree);
TD__BUILDER(td__broadcast_direct);
TD__BUILDER(td__broadcast_chain);
TD__BUILDER(td__broadcast_scatter);
TD__BUILDER(td__reduce_tree);
TD__BUILDER(td__reduce_halving);
TD__BUILDER(td__scatter_tree);
TD__BUILDER(td__scatter_direct);
TD__BUILDER(td__gather_tree);
TD__BUILDER(td__gather_direct);
TD__BUILDER(td__allgather_ring);
TD__BUILDER(td__allgather_doubling);
TD__BUILDER(td__allgather_bruck);
TD__BUILDER(td__reduce_scatter_ring);
TD__BUILDER(td__reduce_scatter_halving);
TD__BUILDER(td__reduce_scatter_pairwise);
TD__BUILDER(td__alltoall_pairwise);
TD__BUILDER(td__alltoall_bruck);
TD__BUILDER(td__alltoall_direct);
TD__BUILDER(td__barrier_dissemination);

/** The reduce phase of halving.c on the `blocks` blocks of `buffer`: afterwards each of the first
 *  2^floor(log2(size)) ranks has one interval of them, reduced over all ranks. */
void td__halving_reduce(const struct td__plan *plan, struct td__schedule *schedule,
                        enum td__schedule_buffer buffer, int32_t blocks);

/** The gather phase: every rank gets all intervals. */
void td__halving_gather(const struct td__plan *plan, struct td__schedule *schedule,
                        enum td__schedule_buffer buffer, int32_t blocks);

/** The first block of interval `interval`, with `blocks` blocks cut into `intervals`. */
int32_t td__interval_start(int32_t interval, int32_t intervals, int32_t blocks);

#endif
