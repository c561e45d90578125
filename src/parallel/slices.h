/* Sums over logical slices of a batch, whose bits do not depend on how many ranks there are.
 *
 *     level 3               0..7                  a batch of 8 slices, on three ranks
 *     level 2       0..3            4..7
 *     level 1    0..1   2..3    4..5   6..7
 *                0  1   2 | 3   4  5 | 6  7
 *                 rank 0  |  rank 1  |  rank 2
 *
 * The number of slices is a power of two. Each rank computes neighbouring slices, and adds up those nodes of the binary
 * tree over all slices that it has whole, its parts: 0..1 and 2, 3 and 4..5, 6..7. The sum of all parts then goes along the
 * same tree. If each rank has one part, and the tree over the ranks is that of collective/tree.h, it is an all_reduce;
 * otherwise each rank gets its chunk of all parts (all_to_all), adds them, and the chunks are gathered. */
#ifndef TD_PARALLEL_SLICES_H
#define TD_PARALLEL_SLICES_H

#include "base/slice_range.h"
#include "tensor/tensor_internal.h"

#include <tandem/dist.h>

enum { TD__MAX_SLICES = 1 << 20, TD__MAX_PARTS = 44 };

/* ---- Who computes what (slice_plan.c) ------------------------------------------------------------------ */

/** TD_ERR_INVALID unless `total` is a power of two from `size` on; the sentence begins with `call`. */
td_status td__slices_check(const char *call, int total, int size);

/** The nodes that a range has whole, in order; returns how many. */
int td__slice_parts(struct td__slice_range range, struct td__slice_range parts[TD__MAX_PARTS]);

/** Whether the sum of one part of each rank along the tree of collective/tree.h is that along the tree of slices. */
bool td__slices_are_ranks(int total, int size);

/** Whether the group's backend adds up what the ranks have along the tree of collective/tree.h, where that is a node of the
 *  tree of slices: a built-in one, with the ranks of a host together. */
bool td__slices_backend_has_tree(const td_group *group);

/* ---- The sum of one buffer (slice_sums.c) ---------------------------------------------------------------- */

/* The parts of this rank so far, and what their sum over all ranks needs. */
struct td__slice_sums {
    td_group *group;
    int total, size, rank;
    int next;  /* the slice that is added next */
    int count; /* of parts */
    struct td__slice_range parts[TD__MAX_PARTS];
    td_tensor *sums[TD__MAX_PARTS]; /* f32 for f16 and bf16 */
    td_tensor *spare[TD__MAX_PARTS];
    int spare_count;
    bool reduces; /* the works below are those of an all_reduce */
    td_work *works[TD__MAX_PARTS];
    int work_count;
    td_tensor *received
        [TD__MAX_PARTS]; /* of each round of all_to_all: the chunks of the ranks that have such a part */
};

/** Before the first slice of a step. */
td_status td__slice_sums_begin(struct td__slice_sums *sums, int total, td_group *group);
/** Adds the slice that `buffer` has, whose memory may then be another one, with any elements. */
td_status td__slice_sums_add(struct td__slice_sums *sums, td_tensor *buffer);
/** After the last slice of this rank: starts the sum. Collective. */
td_status td__slice_sums_start(struct td__slice_sums *sums, td_tensor *buffer);
/** Waits for it; `buffer` gets the sum of all slices, divided by their number. Collective; sums of several buffers are
 *  finished in the order in which they were started. */
td_status td__slice_sums_finish(struct td__slice_sums *sums, td_tensor *buffer);
/** Forgets a sum that has failed: waits for its calls, which the failure of the group has ended or ends. */
void td__slice_sums_drop(struct td__slice_sums *sums);
void td__slice_sums_free(struct td__slice_sums *sums);

#endif
