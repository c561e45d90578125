/* Steps of td_fsdp() over logical slices of the batch (slices.h).
 *
 *     round        0        1        2          8 slices on three ranks; a step makes ceil(8 / 3) passes on each
 *     rank 0    slice 0  slice 3  slice 6
 *     rank 1    slice 1  slice 4  slice 7
 *     rank 2    slice 2  slice 5  (shadow)
 *
 * Slices are dealt out in rounds, not in runs of neighbours as those of td_ddp(): the slices of a round are neighbours in the
 * tree. After each pass a unit's gradients are exchanged, and each rank adds the pieces of its own chunk, in the order of their
 * slices, as a binary counter adds ones: what is complete is one sum for each bit of the number of slices so far. So a rank
 * keeps log2(slices) shards of gradients at most. With runs of neighbours it would keep such sums for every rank, since nothing
 * of one rank's run can be added to another's before both are complete: as much as whole copies of the gradients.
 *
 * A chunk is a shard; where several ranks have the same shard (TD_NO_SHARD, TD_HYBRID_SHARD), each of them adds a part of it, and
 * the parts are gathered after the last round.
 *
 * Gathers and reductions are collective, so that a rank without a slice in the last round shadows the others' pass: it repeats
 * what its own last pass did, gathers, frees and reduces, without computing, and sends no gradients. So all passes of a step
 * must run the same units in the same order. */
#ifndef TD_PARALLEL_FSDP_SLICES_H
#define TD_PARALLEL_FSDP_SLICES_H

#include "parallel/fsdp_internal.h"
#include "parallel/slice_state.h"
#include "parallel/slices.h"

/* What a pass has done that a shadow repeats. */
enum td__fsdp_event_kind {
    TD__FSDP_FORWARD_PRE,
    TD__FSDP_FORWARD,
    TD__FSDP_BACKWARD_PRE,
    TD__FSDP_REDUCE
};

struct td__fsdp_event {
    enum td__fsdp_event_kind kind;
    int unit, flat;
    bool records; /* in grad mode */
};

struct td__fsdp_slices {
    int total, computing; /* slices of a step, and how many ranks, the first ones, compute them */
    bool are_ranks; /* a slice for each rank, whose tree the backend's reductions have: no sums */
    bool reduces;   /* the backend sums up a round */
    bool active;    /* between td_slices_begin() and the end of the step */
    bool
        entered; /* the first forward pass of the step has begun: parameters and buffers are known */
    bool passed;  /* the slice has had its backward pass */
    bool shadows; /* a pass of others is shadowed */
    int64_t step;
    int round; /* -1: none yet */
    struct td__fsdp_event *events;
    int event_count, event_capacity;
    struct td__slice_state state;
};

/** How many of the ranks compute in a round. */
static inline int td__fsdp_round_size(const struct td__fsdp_slices *slices, int round)
{
    int left = slices->total - round * slices->computing;
    return left < slices->computing ? left : slices->computing;
}

/** Whether gradients are summed up over rounds. */
static inline bool td__fsdp_sums(const struct td__fsdp *fsdp)
{
    return fsdp->slices && !fsdp->slices->are_ranks;
}

static inline bool td__fsdp_shadows(const struct td__fsdp *fsdp)
{
    return fsdp->slices && fsdp->slices->shadows;
}

/* ---- Steps (fsdp_slices.c) ------------------------------------------------------------------------ */

/** Those of the option; nothing for 0. Collective. */
td_status td__fsdp_slices_make(struct td__fsdp *fsdp, int total);
void td__fsdp_slices_free(struct td__fsdp *fsdp);
/** Deals slices out anew, after td__fsdp_remake(); all ranks get the seed of rank `root`. Collective. */
td_status td__fsdp_slices_remake(struct td__fsdp *fsdp, int root);

/** At the begin of the outermost forward pass: TD_ERR_STATE unless it is of a slice. *first: the ranks have not met in this
 *  step yet. */
td_status td__fsdp_slices_enter(struct td__fsdp *fsdp, bool *first);
/** After that, when the buffers are those of the step. */
td_status td__fsdp_slices_entered(struct td__fsdp *fsdp);
/** Before the first unit of a backward pass. */
td_status td__fsdp_slices_backward(const struct td__fsdp *fsdp);
void td__fsdp_slices_passed(struct td__fsdp *fsdp);
/** For the shadow of a pass. */
td_status td__fsdp_record(struct td__fsdp *fsdp, enum td__fsdp_event_kind kind, int unit, int flat);

/* ---- Sums of a flat (fsdp_sums.c) -------------------------------------------------------------------- */

/** Whether the backend sums up the gradients of a round along the tree of slices; the same on all ranks. */
bool td__fsdp_can_reduce(const struct td__fsdp *fsdp);
/** Which rank of the group has which shard, and which part of it in sums. Collective. */
td_status td__fsdp_find_places(struct td__fsdp_ranks *ranks);

/** Starts to exchange the whole gradients of a pass, in `from` with the dtype of the reduction. */
td_status td__flat_sums_start(struct td__fsdp_flat *flat, struct td__storage *from);
/** When they are exchanged, unless `status` is an error: adds them. After the last round *complete: flat->reduced is the
 *  average over the slices, or that is in the gradients of a flat that is whole. Collective then. */
td_status td__flat_sums_add(struct td__fsdp_flat *flat, td_status status, bool *complete);
/** Forgets the sums so far, and frees their memory. */
void td__flat_sums_drop(struct td__fsdp_flat *flat);
void td__flat_sums_free(struct td__fsdp_flat *flat);

#endif
