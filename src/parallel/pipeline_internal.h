/* The internals of a pipeline.
 *
 *     pipeline.c            the public calls: creating, a step, statistics
 *     pipeline_run.c        runs the actions of this rank's list: the passes, and when messages are started
 *     pipeline_messages.c   tensors between two stages, and the layouts of these
 *     pipeline_agree.c      what all ranks exchange at the beginning and at the end of a step
 *     pipeline_trace.c      when the passes of the last step ran, on all ranks
 *
 * A pipeline has two groups of its own. Tensors go over `messages`. Where a rank fails, it aborts that group, which ends
 * the waiting of all others, and they meet at the end of the step in a collective on `control`, which gives them the text
 * of the rank that failed. Then `messages` is replaced. A rank that dies breaks `control`, too, which names it. */
#ifndef TD_PARALLEL_PIPELINE_INTERNAL_H
#define TD_PARALLEL_PIPELINE_INTERNAL_H

#include "parallel/ddp.h"
#include "parallel/pipeline_schedule.h"

enum { TD__TENSOR_NAME = 48 };

/* What a receiver has to know of a tensor. */
struct td__tensor_spec {
    td_dtype dtype;
    bool requires_grad;
    int ndim;
    int64_t shape[TD_MAX_DIMS];
    char name[TD__TENSOR_NAME]; /* "": without one */
};

/* The results of a stage for micro-batches of one size, as both sides know them. The sender of the first one of a step
 * sends them ahead; of all later ones it checks that they are the same. */
struct td__list_layout {
    bool known;
    int count;
    struct td__tensor_spec specs[TD_TENSOR_LIST_MAX];
    td_bytes encoded; /* the message, while it is sent */
};

/* Micro-batches have two sizes at most: the first samples % micro_batches ones are larger by one sample. */
enum { TD__LAYOUTS = 2 };

/* A message that is being received: one work for each tensor. */
struct td__receipt {
    bool posted;
    int count;
    td_work *works[TD_TENSOR_LIST_MAX];
};

/* A micro-batch in a stage, from its inputs to the end of its backward pass. All tensors are retained. */
struct td__slot {
    td_tensor_list inputs;    /* leaves; of the first stage: parts of the batch */
    td_tensor_list outputs;   /* not of the last stage, which has … */
    td_tensor *loss;          /* … this, scaled */
    td_tensor_list gradients; /* of the outputs that require grad, in their order */
    struct td__receipt input_receipt, gradient_receipt;
};

/* A stage of this rank. */
struct td__stage {
    td_module *module;
    int number;
    td_device *device;   /* of its first parameter or buffer in this step; NULL: has none */
    struct td__ddp *ddp; /* NULL: the module is not one of td_ddp() */
    bool ddp_sync;       /* what the program has set */
    struct td__list_layout in[TD__LAYOUTS], out[TD__LAYOUTS];
    struct td__slot *slots; /* of each micro-batch */
};

/* A send that has begun. */
struct td__sending {
    td_work *work;
    int tag;
    int micro_batch;
};

/* What a step needs, zeroed at its beginning. */
struct td__pipeline_step {
    const char *call; /* for errors */
    bool training;
    int64_t samples;
    const td_tensor_list *inputs, *targets;
    double loss;
    int64_t started_ns, busy_ns;
    int stored;
    int passes; /* that have run */
};

/* A rank's part of an exchange between all of them: its status, and four numbers. */
struct td__pipeline_record {
    int64_t status;
    int64_t numbers[4];
};

/* When a pass has run, since the start of the step on this rank. */
struct td__pass_time {
    int64_t start_ns, end_ns;
};

struct td_pipeline {
    struct td__pipeline_plan plan;
    int rank;
    td_module *module;        /* parent of the modules of the stages */
    struct td__stage *stages; /* of this rank: plan.chunks */
    struct td__actions training, forward_only;
    td_pipeline_loss_fn loss;
    void *loss_arg;
    bool sum_loss;
    td_group *control, *messages; /* NULL with one rank */
    struct td__pipeline_record
        *records; /* of each rank; allocated before, so that a step cannot fail without them */

    struct td__pipeline_step step;
    struct td__sending *sendings;
    int sending_count, sending_capacity;
    td_pipeline_stats stats;
    struct td__pass_time *times; /* of the passes of a training step, in the order of its list */
    bool traced;                 /* … which succeeded */
};

/** The passes of a rank in a training step. */
static inline int td__pass_count(const struct td__pipeline_plan *plan)
{
    return 2 * plan->chunks * plan->micro_batches;
}

/* ---- Lists and micro-batches -------------------------------------------------------------------- */

/** Releases the tensors of a list, and empties it. */
void td__list_release(td_tensor_list *list);

/** The samples of a micro-batch, and those before it. */
int64_t td__micro_batch_size(const td_pipeline *pipeline, int micro_batch);
int64_t td__micro_batch_offset(const td_pipeline *pipeline, int micro_batch);

static inline int td__stage_count(const td_pipeline *pipeline)
{
    return pipeline->plan.ranks * pipeline->plan.chunks;
}

static inline struct td__stage *td__stage_of(td_pipeline *pipeline, int stage)
{
    return &pipeline->stages[stage / pipeline->plan.ranks];
}

/* ---- pipeline_run.c ----------------------------------------------------------------------------- */

/** Runs the list of the step. */
td_status td__pipeline_run(td_pipeline *pipeline);

/** Ends a step, also a failed one: releases all tensors and works. */
void td__pipeline_clear(td_pipeline *pipeline);

/* ---- pipeline_messages.c ------------------------------------------------------------------------ */

/** Starts a send, after the pass before it. */
td_status td__pipeline_send(td_pipeline *pipeline, const struct td__action *action);

/** Starts a receive if its layout is known, and else does nothing. */
td_status td__pipeline_post(td_pipeline *pipeline, const struct td__action *action, bool *posted);

/** Waits for a receive: its tensors are then in the slot. Learns its layout first where it has to. */
td_status td__pipeline_receive(td_pipeline *pipeline, const struct td__action *action);

/** Waits for all sends. */
td_status td__pipeline_flush(td_pipeline *pipeline);

/** Makes the inputs of a stage from the results of the stage before it, on the same rank. */
td_status td__pipeline_hand_on(td_pipeline *pipeline, int stage, int micro_batch);

/** Makes the gradients of the stage before a stage from those of its inputs, likewise. */
td_status td__pipeline_hand_back(td_pipeline *pipeline, int stage, int micro_batch);

/* ---- pipeline_agree.c --------------------------------------------------------------------------- */

/** Makes the two groups. Collective on `group`. */
td_status td__pipeline_make_groups(td_pipeline *pipeline, td_group *group);

/** All ranks compare the settings of the pipeline; `status` is whether this rank has failed before, with its text as
 *  the last error. The same status on all ranks. */
td_status td__pipeline_compare(td_pipeline *pipeline, td_status status);

/** The first rank announces the step: all get the number of samples. A rank that fails here goes on to
 *  td__pipeline_end(). */
td_status td__pipeline_begin(td_pipeline *pipeline, td_status status);

/** All ranks exchange how the step went: the same status on all of them, with the text of the rank that failed. On
 *  success the loss and the statistics are set. */
td_status td__pipeline_end(td_pipeline *pipeline, td_status status);

#endif
