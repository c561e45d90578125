/* The internals of a DistributedDataParallel module; see ddp.c. */
#ifndef TD_PARALLEL_DDP_H
#define TD_PARALLEL_DDP_H

#include "autograd/graph.h"
#include "parallel/buckets.h"

#include <stdatomic.h>

struct td__ddp_parameter {
    struct td__ddp *ddp;
    int number;
    td_tensor *tensor; /* retained */
    char *name;
    uint64_t hook;
    struct td__in_backward *stepper; /* of td_optimizer_in_backward(); NULL: it is not stepped */
    int step_index;                  /* its number in the optimizer of the stepper */
    bool unused;                     /* in this pass, on this rank */
    td_tensor *before;               /* its gradient before the pass, if it is unused */
};

struct td__ddp {
    td_module *wrapper; /* what td_ddp() has returned */
    td_group *group;
    td_ddp_options options;
    td_device *device; /* of the inputs; NULL: they stay */
    td_device *output; /* of the outputs; NULL: they stay */
    struct td__ddp_parameter *parameters;
    int count;
    td_tensor **buffers; /* retained */
    int buffer_count;

    struct td__buckets buckets;
    size_t bucket_bytes;
    bool sync;            /* passes are synchronised: td_ddp_set_sync() */
    bool expecting;       /* a synchronised forward has run, and its backward pass has not ended */
    int stepped_count;    /* parameters with a stepper */
    atomic_bool stepping; /* a thread makes the steps of reduced buckets */
    atomic_bool ending;   /* a worker has requested the callback at the end of the pass */
    struct td__ddp *next; /* in the list of all (ddp_context.c) */
    pthread_mutex_t
        forward_lock; /* one forward at a time makes its collectives: several workers may call a module */
    pthread_mutex_t
        lock; /* guards `expecting`, and what follows up to `place`; never held while waiting */
    bool recorded_locally; /* the last forward that recorded a graph was not synchronised */
    uint64_t context; /* of distributed autograd, in which the last synchronised forward ran; 0:
                              none */
    bool unsettled;   /* a pass of a context has failed, and its calls may not be complete */
    const struct td__grad_place
        *place;   /* of the gradients of the pass that runs; NULL: the leaves */
    bool rebuild; /* the first synchronised pass is over: rebuild the buckets before the next */
    bool buffers_changed; /* a training forward has changed them since they were broadcast */
    int32_t
        *agreement; /* the maximum of all ranks at the end of a pass: 1 + a rank that has failed, or
                           0; then `used` */
    td_work *agreeing; /* the call for it, of a failed pass */
    int32_t *used;     /* for find_unused_parameters: which parameters any rank has used */
    bool first_static_pass_done;
    bool *static_unused; /* static_graph: what the first pass did not use */

    int source;                    /* the rank of the group whose buffers and order of gradients are
                                  broadcast */
    struct td__ddp_slices *slices; /* NULL: none (ddp_slices.c) */
    struct td__ddp_join *join;     /* NULL outside of td_ddp_join_begin() and td_ddp_join_end() */
};

/** Whether td_ddp() made the module. */
bool td__is_ddp(const td_module *module);
/** The internals of a module of td_ddp(); NULL, with the last error set, for another. */
struct td__ddp *td__ddp_of(const td_module *module, const char *call);

/** Before a synchronised forward: broadcasts the buffers and, in grad mode, rebuilds the buckets
 *  if that is due and begins a pass. Collective. */
td_status td__ddp_prepare(struct td__ddp *ddp, bool records);
/** Broadcasts the parameters and buffers of the rank `source`. Collective. */
td_status td__ddp_synchronise(struct td__ddp *ddp);
/** Broadcasts tensors of the rank `source`. Collective. */
td_status td__ddp_broadcast(struct td__ddp *ddp, td_tensor *const *tensors, int count);

/** Uneven inputs (ddp_join.c): before each forward the ranks exchange what they do next. */
td_status td__ddp_join_round(struct td__ddp *ddp, bool records);

/* Unused parameters (ddp_unused.c). */

/** After forward: traverses the graph from the outputs, and marks the parameters that it does not
 *  contain as ready. */
td_status td__ddp_mark_unused(struct td__ddp *ddp, const td_tensor_list *outputs);
/** After the reduction: restores the gradients of parameters that no rank has used. */
td_status td__ddp_restore_unused(struct td__ddp *ddp);

/** Fails with the names of the parameters that were not ready. */
td_status td__ddp_fail_missing(const struct td__ddp *ddp);

/* Contexts of distributed autograd (ddp_context.c). */

/** Adds a module to the list of all, and removes it. */
void td__ddp_list(struct td__ddp *ddp);
void td__ddp_unlist(struct td__ddp *ddp);
/** Before a synchronised forward that records: makes it one of this thread's context. TD_ERR_STATE while a pass of a
 *  context runs. */
td_status td__ddp_enter_context(struct td__ddp *ddp);
/** Whether the gradient that has been accumulated in `place` is to be reduced; a failure if it cannot be. */
td_status td__ddp_enter_place(struct td__ddp_parameter *parameter,
                              const struct td__grad_place *place, bool *reduce);
/** TD_ERR_TIMEOUT after the deadline of a pass: a collective would break the group with it. */
td_status td__ddp_check_deadline(const struct td__ddp *ddp);
/** Before collectives of a pass: none of them outlasts its deadline. Returns what
 *  td__swap_call_timeout() takes afterwards. */
int64_t td__ddp_limit_calls(const struct td__ddp *ddp);
/** At the end of a pass, before waiting for the buckets: the ranks agree on the used parameters, and in a
 *  context on whether the pass has succeeded on all of them. */
td_status td__ddp_agree(struct td__ddp *ddp);
/** After the reduction: puts the averages into the place of the pass. */
td_status td__ddp_deliver(struct td__ddp *ddp);
/** A pass of a context has failed here: starts the calls for which other ranks wait, and tells them. */
void td__ddp_abandon(struct td__ddp *ddp);
/** Completes what a failed pass has left. Collective. */
td_status td__ddp_settle(struct td__ddp *ddp);

/* Steps of optimizers in the backward pass (ddp_step.c). */

/** Makes the stepper step a parameter, number `index` of its optimizer, or (NULL) nobody. */
void td__ddp_set_stepper(struct td__ddp *ddp, int number, struct td__in_backward *stepper,
                         int index);
/** In a pass: steps the parameters of buckets that are reduced meanwhile. Does not wait. */
td_status td__ddp_step_reduced(struct td__ddp *ddp);
/** At the end of a pass, instead of td__buckets_finish() and td__ddp_restore_unused(). */
td_status td__ddp_finish_with_steps(struct td__ddp *ddp);

/* Rebuilding buckets (ddp_rebuild.c). */

/** Collective. */
td_status td__ddp_rebuild(struct td__ddp *ddp);
/** After a synchronised pass, also one that was only shadowed: decides whether to rebuild before
 * the next. */
void td__ddp_plan_rebuild(struct td__ddp *ddp);

/* Slices (ddp_slices.c). */

/** Those of the options; nothing without them. Collective. */
td_status td__ddp_slices_make(struct td__ddp *ddp);
void td__ddp_slices_free(struct td__ddp *ddp);
/** Before a forward pass that records: TD_ERR_STATE unless it is of a slice. *first: it is the first one of a step, or there
 *  are none. */
td_status td__ddp_slices_prepare(struct td__ddp *ddp, bool *first);
/** After that, when the buffers are those of the step. */
td_status td__ddp_slices_begin_pass(struct td__ddp *ddp);
/** At the end of a backward pass. */
void td__ddp_slices_end_pass(struct td__ddp *ddp);
/** Whether a step has begun: the buffers are not broadcast until its end. */
bool td__ddp_slices_in_step(const struct td__ddp *ddp);

/* Steps that other ranks repeat when one has failed (ddp_repeat.c): a step changes no buffers until td__ddp_commit(), and
 * the group may be another one for the next. */

/** From now on; random numbers depend on `seed`. The module was made with slices and no_broadcast_buffers; buckets stay in
 *  their first order. */
void td__ddp_hold(struct td__ddp *ddp, uint64_t seed);
/** After the slices: all ranks get the buffers that rank 0 has for after the step. Collective. */
td_status td__ddp_share_buffers(struct td__ddp *ddp);
/** The buffers for after the step, of which the list has room for buffer_count; returns their number, 0 where the step
 *  changes none. They stay the module's. */
int td__ddp_held_buffers(struct td__ddp *ddp, td_tensor **buffers);
/** On a rank that has computed nothing: memory for them, which the caller fills in. */
td_status td__ddp_receive_buffers(struct td__ddp *ddp);
/** Sets the buffers to those for after the step. */
td_status td__ddp_commit(struct td__ddp *ddp);
/** Waits for the calls of a step that has failed, and sets buffers and generators to what they were before it. */
td_status td__ddp_undo(struct td__ddp *ddp);
/** Another group, and another number of slices, from the next step on. No call of the former is under way. */
void td__ddp_rebind(struct td__ddp *ddp, td_group *group, int slices);

#endif
