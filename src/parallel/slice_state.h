/* What a pass over a slice changes beside gradients, of a module whose steps go over logical slices:
 *
 *     random numbers     each slice begins with generators that are seeded for it
 *     buffers            each slice begins with those of the step; those after slice 0 stay
 *
 * So neither depends on which rank computes a slice, or after which other one. */
#ifndef TD_PARALLEL_SLICE_STATE_H
#define TD_PARALLEL_SLICE_STATE_H

#include "nn/module.h"
#include "tensor/tensor_internal.h"

#include <tandem/dist.h>

struct td__saved_generator {
    td_generator *generator; /* NULL: the host's */
    void *state;
    size_t size;
};

struct td__slice_state {
    uint64_t seed;                          /* the same on all ranks */
    struct td__saved_generator *generators; /* as they were before the step */
    int generator_count;
    td_tensor *const *buffers; /* the module's */
    int buffer_count;
    td_tensor **before, **after; /* copies of the buffers: before the step, and after slice 0 */
    bool has_before, has_after;
};

/** For a module with these buffers, which outlive it. All ranks get rank 0's seed. Collective. */
td_status td__slice_state_make(struct td__slice_state *state, td_tensor *const *buffers, int count,
                               td_group *group);
void td__slice_state_free(struct td__slice_state *state);

/** At the beginning of a step: saves the generators of all devices that have one. */
td_status td__slice_state_begin(struct td__slice_state *state);
/** At the beginning of a slice. */
void td__slice_state_seed(const struct td__slice_state *state, int64_t step, int slice);
/** Before the first forward pass of the step in training, when the buffers are those of the step. */
td_status td__slice_state_save_buffers(struct td__slice_state *state);
/** After the passes of a slice. */
td_status td__slice_state_end_slice(struct td__slice_state *state, int slice);
/** After the last slice of this rank: the generators are as before the step, the buffers as after slice 0, if this rank has
 *  computed it. */
td_status td__slice_state_end(struct td__slice_state *state);
/** Instead of that, for a step that was left early: only the generators. */
td_status td__slice_state_restore(struct td__slice_state *state);

/** Copies the buffers to `copies`, or `back`; makes the copies that are NULL. */
td_status td__slice_state_copy(struct td__slice_state *state, td_tensor **copies, bool back);

#endif
