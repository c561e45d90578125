/* The schedule of a pipeline: for each rank one list of actions, built by a pure function of (kind, ranks, chunks,
 * micro-batches). The executor (pipeline_run.c) runs the list of its rank, td__pipeline_check() verifies all of them,
 * and td__timeline_make() assigns times to them, for the bubble and the drawing.
 *
 * With p ranks and v chunks (modules of a rank) there are p v stages; stage s is chunk s / p of rank s % p.
 *
 *     RECV_FORWARD   the inputs of stage s, from the rank of stage s - 1
 *     FORWARD        of stage s
 *     SEND_FORWARD   the results of stage s, to the rank of stage s + 1
 *     RECV_BACKWARD  the gradients of these results, from the rank of stage s + 1
 *     BACKWARD       of stage s
 *     SEND_BACKWARD  the gradients of the inputs, to the rank of stage s - 1
 *
 * all of micro-batch i. Between two stages of the same rank (p = 1) there are no messages. A receive stands before the
 * pass that needs it, a send behind the pass that made it. Two stages have one queue of messages in each direction. */
#ifndef TD_PARALLEL_PIPELINE_SCHEDULE_H
#define TD_PARALLEL_PIPELINE_SCHEDULE_H

#include "base/buffer.h"

#include <tandem/pipeline.h>

enum td__action_kind {
    TD__RECV_FORWARD,
    TD__FORWARD,
    TD__SEND_FORWARD,
    TD__RECV_BACKWARD,
    TD__BACKWARD,
    TD__SEND_BACKWARD,
};

struct td__action {
    enum td__action_kind kind;
    int stage;
    int micro_batch;
    int peer; /* of a send or receive: the other rank of the group */
};

/* What a schedule depends on. */
struct td__pipeline_plan {
    td_pipeline_schedule kind; /* not TD_PIPELINE_DEFAULT */
    int ranks;
    int chunks; /* 1, but for TD_PIPELINE_INTERLEAVED */
    int micro_batches;
    int ahead;         /* td_pipeline_options.ahead */
    bool forward_only; /* the forward passes alone, for evaluation */
};

/* The actions of one rank. */
struct td__actions {
    struct td__action *list;
    int count;
    int capacity;
    bool failed; /* out of memory: builders need no checks */
};

static inline bool td__is_pass(const struct td__action *action)
{
    return action->kind == TD__FORWARD || action->kind == TD__BACKWARD;
}

/** "1f1b". */
const char *td__pipeline_kind_name(td_pipeline_schedule kind);

/** TD_ERR_INVALID for sizes that the kind of schedule cannot have; replaces TD_PIPELINE_DEFAULT. */
td_status td__pipeline_plan_check(const char *call, struct td__pipeline_plan *plan);

/** Builds the list of `rank`; false if out of memory. The caller frees it in any case. */
bool td__actions_build(const struct td__pipeline_plan *plan, int rank, struct td__actions *actions);
void td__actions_free(struct td__actions *actions);

/** The most micro-batches that a rank has to store between forward and backward, over all its chunks. */
int td__pipeline_stored_bound(const struct td__pipeline_plan *plan, int rank);

/**
 * Verifies the lists of all ranks, by running them in one process. A receive waits for its message, and a send waits
 * until the one before it in the same queue was received; an executor whose sends wait less, and that starts its
 * receives earlier, makes at least the same progress. Checked is that
 *   - each stage runs one forward pass and one backward pass of each micro-batch, in the order of the micro-batches,
 *     and on its own rank;
 *   - no pass runs before its inputs, or gradients, are there;
 *   - sends and receives match in their order, and none is left;
 *   - no rank waits for ever;
 *   - no rank stores more than td__pipeline_stored_bound() micro-batches.
 * On failure `why` gets the reason.
 */
bool td__pipeline_check(const struct td__pipeline_plan *plan, const struct td__actions *ranks,
                        char *why, size_t room);

/* When each pass runs, where messages take no time. */
struct td__timeline {
    int ranks;
    int64_t total;
    int64_t busy;    /* of all ranks together */
    int64_t **start; /* of each rank, for each of its actions; passes only */
};

/** `forward` and `backward` are the times of a pass of one chunk. False if out of memory, or if the lists cannot be
 *  run. The caller frees it in any case. */
bool td__timeline_make(const struct td__pipeline_plan *plan, const struct td__actions *ranks,
                       int64_t forward, int64_t backward, struct td__timeline *timeline);
void td__timeline_free(struct td__timeline *timeline);

/** The same with the durations of passes that were measured: all of the schedule. */
bool td__timeline_measured(const struct td__pipeline_plan *plan, const struct td__actions *ranks,
                           const td_pipeline_pass *passes, int count,
                           struct td__timeline *timeline);

enum { TD__PASS_LABEL = 40 };

/** "F3", or with several chunks "F3.1"; returns its length. */
int td__pass_label(const struct td__pipeline_plan *plan, bool backward, int stage, int micro_batch,
                   char label[TD__PASS_LABEL]);

/** Puts "rank 3  ", as wide for all ranks. */
void td__rank_label(int ranks, int rank, struct td__buffer *text);

/** (p - 1) / (v m + p - 1). */
double td__pipeline_theory(const struct td__pipeline_plan *plan);

/** The lists of all ranks; NULL if out of memory. */
struct td__actions *td__actions_build_all(const struct td__pipeline_plan *plan);
void td__actions_free_all(struct td__actions *ranks, int count);

#endif
