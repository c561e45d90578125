/* Pipeline-parallel training: the layers of a model are cut into stages, each rank of a group has one of them (or
 * several), and a batch passes through the ranks in micro-batches.
 *
 *     td_module *stage = rank == 0 ? first_half() : second_half();
 *     td_pipeline *pipeline = td_pipeline_create(&stage, 1, &(td_pipeline_options){
 *         .micro_batches = 8, .loss = mean_loss});
 *     td_optimizer *sgd = td_sgd(td_pipeline_module(pipeline), &(td_sgd_options){.lr = 0.1});
 *     for each batch:
 *         td_optimizer_zero_grad(sgd);
 *         td_pipeline_step(pipeline, x, y, &loss);        x on the first rank, y on the last
 *         td_optimizer_step(sgd);
 *
 * Stages. With p ranks and v modules on each, stage s is module s / p of rank s % p: rank 0 has the stages 0, p,
 * 2 p … The results of a stage are the inputs of the next one, names included; they may be several
 * (td_forward_list()), of any dtypes. Gradients go back for those that require grad; since these are leaves there, a
 * stage must not change its inputs in place. A stage may be on any device: it gets its inputs on that of its first
 * parameter or buffer, or on the current device if it has none.
 *
 * Gradients. A step accumulates in the parameters' gradients what one process would have accumulated that runs
 * forward and backward of the micro-batches one after another, bit for bit and with every schedule. As long as the
 * loss is a mean over the samples, that is the gradient of the whole batch, up to rounding.
 *
 * Data parallelism beside it: wrap each stage in td_ddp() with the group of the ranks that have the same stage in
 * other pipelines. The pipeline then averages gradients once a step, with the last micro-batch. docs/pipeline.md has
 * the schedules as drawings, and an example.
 *
 * Failures. A step fails on all ranks of the group. A failure of one rank (its module, its loss function, its
 * arguments) is returned by all of them with the rank's text; the pipeline can be used again, and the gradients are
 * those of an incomplete step. After the death of a rank all others get TD_ERR_PEER, which names it.
 *
 * Threads. A pipeline is used by one thread at a time, and its modules only between its calls. */
#ifndef TANDEM_PIPELINE_H
#define TANDEM_PIPELINE_H

#include <tandem/group.h>
#include <tandem/nn.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct td_pipeline td_pipeline;

/** The order of forward and backward passes on each rank. With p ranks, v modules a rank and m micro-batches: */
typedef enum td_pipeline_schedule {
    TD_PIPELINE_DEFAULT, /* TD_PIPELINE_1F1B for one module a rank, TD_PIPELINE_INTERLEAVED for several */
    TD_PIPELINE_GPIPE, /* all forward passes, then all backward passes: m stored micro-batches */
    TD_PIPELINE_1F1B,  /* a backward pass as soon as possible: rank r stores min(p - r, m), or with
                          td_pipeline_options.ahead a little more */
    TD_PIPELINE_INTERLEAVED, /* 1F1B over v modules a rank, in Megatron's order: a smaller bubble, more messages */
} td_pipeline_schedule;

/** The loss of a micro-batch, a tensor of one element, from the results of the last stage and this micro-batch's part
 *  of the targets. Called on the last rank, in a scope of its own. NULL is a failure. */
typedef td_tensor *(*td_pipeline_loss_fn)(const td_tensor_list *outputs,
                                          const td_tensor_list *targets, void *arg);

typedef struct td_pipeline_options {
    td_pipeline_schedule schedule;
    int micro_batches;        /* 0: as many as the group has ranks */
    td_pipeline_loss_fn loss; /* needed on the last rank, for td_pipeline_step() */
    void *loss_arg;
    bool
        sum_loss; /* the loss is a sum over the samples: add the losses instead of averaging them */
    td_group *group; /* rank r of it has the stages r, p + r, …; NULL: the world */
    int ahead; /* 1F1B: how many more forward passes rank r, but the last, runs before its first backward pass, p - r - 1
                  at most. It stores as many micro-batches more, and neither messages nor passes of unequal duration
                  make the ranks wait for each other with every micro-batch. See docs/pipeline.md. */
    void *reserved[4];
} td_pipeline_options;

/**
 * Makes a pipeline of `count` modules on each rank of the group, the stages of this rank in order. It owns them.
 *
 * Collective. Every rank passes the same count, schedule, micro_batches, ahead and sum_loss: a difference is
 * TD_ERR_MISMATCH and names both ranks. The messages and collectives of the pipeline run on groups of its own, so that other calls on
 * `group` may be made at any time between its calls. Without a world, or in a group of one rank, all stages are here.
 *
 * NULL on failure; the modules are then destroyed, too.
 */
TD_API td_pipeline *td_pipeline_create(td_module *const *stages, int count,
                                       const td_pipeline_options *options);

/** One module that has the stages of this rank as children, each named by the number of its stage: for optimizers,
 *  states and train or eval mode. It belongs to the pipeline. */
TD_API td_module *td_pipeline_module(td_pipeline *pipeline);

/** Frees it and its modules. Not collective. NULL is fine. */
TD_API void td_pipeline_destroy(td_pipeline *pipeline);

/**
 * Runs forward and backward of one batch, and accumulates the gradients of all stages.
 *
 * Collective. `input` is used on the first rank of the group and `target` on the last; the others pass NULL. Both are
 * cut along dimension 0 into micro-batches, as even as possible, the first ones being larger; there must be at least
 * one sample for each. *loss (unless NULL) is the loss of the whole batch on every rank: the mean over its samples, or
 * with sum_loss the sum.
 *
 * The call returns when all ranks have run all of their passes. Afterwards the caller steps the optimizer.
 *
 * Errors, on all ranks: those of the modules and of the loss function, with the text of the rank that failed;
 * TD_ERR_MISMATCH if a stage's results have another number, shape or dtype than those of an earlier micro-batch of the
 * same size (the text names the ranks on both sides), or if ranks make different calls; TD_ERR_INVALID for missing
 * inputs and fewer samples than micro-batches; TD_ERR_PEER, TD_ERR_TIMEOUT.
 */
TD_API td_status td_pipeline_step(td_pipeline *pipeline, td_tensor *input, td_tensor *target,
                                  double *loss);

/** The same with several inputs and targets. The first of each list has the samples; others of the same size along
 *  dimension 0 are cut as well, and the rest goes to each micro-batch as it is. */
TD_API td_status td_pipeline_step_list(td_pipeline *pipeline, const td_tensor_list *inputs,
                                       const td_tensor_list *targets, double *loss);

/**
 * Runs forward of one batch with grad mode off. *output on the last rank is the results of all micro-batches,
 * concatenated along dimension 0; NULL on the others. Collective, and errors, as td_pipeline_step(). The modules stay in
 * the mode that they have: td_module_eval(td_pipeline_module(pipeline)) before.
 */
TD_API td_status td_pipeline_forward(td_pipeline *pipeline, td_tensor *input, td_tensor **output);

/** The same with several inputs and results; `results` is empty but on the last rank. */
TD_API td_status td_pipeline_forward_list(td_pipeline *pipeline, const td_tensor_list *inputs,
                                          td_tensor_list *results);

typedef struct td_pipeline_stats {
    int64_t steps;    /* of td_pipeline_step() that succeeded */
    int64_t busy_ns;  /* of the last one: computing on this rank … */
    int64_t total_ns; /* … and from the first rank's start to the end of the slowest rank */
    double bubble;    /* of the last one, over all ranks: 1 - busy / total */
    double theory;    /* (p - 1) / (v m + p - 1), if all stages take the same time */
    int peak_stored;  /* the most micro-batches that this rank has stored at once for backward */
} td_pipeline_stats;

/** Statistics of the steps so far. */
TD_API td_status td_pipeline_get_stats(const td_pipeline *pipeline, td_pipeline_stats *stats);

/** A pass of a step. */
typedef struct td_pipeline_pass {
    int rank, stage, micro_batch;
    bool backward;
    int64_t start_ns, end_ns; /* since the first rank's start; see td_pipeline_get_trace() */
} td_pipeline_pass;

/** When the passes of a step ran. With the stages' own times it separates what a schedule costs from what messages and
 *  waiting add to it:
 *
 *      (p - 1) / (v m + p - 1)                          the bubble of equal passes
 *      1 - busy_ns / (needed_ns * ranks)                that of these passes, if messages took no time
 *      1 - busy_ns / (total_ns * ranks)                 the measured one: td_pipeline_stats.bubble */
typedef struct td_pipeline_trace {
    td_pipeline_pass *passes; /* of rank 0 in their order, then those of rank 1, … */
    int count;                /* 2 v m of each rank */
    int ranks, chunks, micro_batches;
    int64_t busy_ns;  /* of all ranks together */
    int64_t total_ns; /* as in td_pipeline_stats */
    int64_t
        needed_ns; /* the critical path: what the schedule takes with passes of these durations, if each starts as
                          soon as the pass before it and what it depends on have ended */
} td_pipeline_trace;

/**
 * The trace of the last td_pipeline_step(), on every rank. Recording it costs nothing, since the busy time is measured in
 * any case.
 *
 * Collective. The times of ranks on several hosts, which have no common clock, are those since the rank's own start: when
 * it got the first rank's announcement of the step. The caller frees it. TD_ERR_STATE if there was no step, or the last
 * one failed.
 */
TD_API td_status td_pipeline_get_trace(td_pipeline *pipeline, td_pipeline_trace *trace);

/** Frees what a trace owns. NULL is fine. */
TD_API void td_pipeline_trace_free(td_pipeline_trace *trace);

/**
 * A trace as a drawing to scale: a line of `columns` characters for each rank.
 *
 *     rank 0  F0--F1--........B0------F2--B1------....B2------
 *     rank 1  ....F0--B0------F1--B1------F2--B2------........
 *
 * Names of passes that are too short for theirs are cut off. Empty without memory, or for less than one column.
 */
TD_API td_bytes td_pipeline_trace_text(const td_pipeline_trace *trace, int columns);

/**
 * A schedule as a drawing: a line for each rank, a column for each time step, in which a stage runs one forward (F) or
 * backward pass (B) of a micro-batch. With several modules a rank the module follows behind a dot.
 *
 *     rank 0  F0 F1 .  B0 F2 B1 .  B2
 *     rank 1  .  F0 B0 F1 B1 F2 B2 .
 *
 * Empty for sizes that a schedule cannot have (1F1B and GPipe take 1 chunk), and without memory; td_last_error() says
 * which.
 */
TD_API td_bytes td_pipeline_text(td_pipeline_schedule schedule, int ranks, int chunks,
                                 int micro_batches);

#ifdef __cplusplus
}
#endif

#endif
