/* The builders of schedules. Each lays down the order of a rank's passes; add_pass() puts the messages around them.
 *
 *     GPipe, 1F1B    first w forward passes, then a forward and a backward pass in turns, then the backward passes that
 *                    are left; GPipe has w = m, 1F1B w = p - 1 - rank, and `ahead` more
 *     interleaved    the same over the passes of all v chunks, in Megatron's order: groups of p micro-batches, each
 *                    through all chunks, with w = 2 (p - 1 - rank) + (v - 1) p
 *
 * In 1F1B two neighbours go round a circle without slack: a forward pass of rank r, one of r + 1, a backward pass of
 * r + 1, one of r, and so on. So each message, and each pass that takes longer than usual, delays all ranks. Forward passes
 * ahead of the order fill the time in which rank r waits for its first gradient, p - 1 - r backward passes, and break the
 * circle: the results of rank r are then there before rank r + 1 needs them.
 *
 * Megatron's order needs a multiple of p micro-batches. For other numbers the schedule is that of the next multiple
 * without the passes of the micro-batches that are not there: leaving out whole micro-batches adds no dependency, so
 * what could run before can run now. */
#include "parallel/pipeline_schedule.h"

#include "base/fail.h"

#include <stdlib.h>

const char *td__pipeline_kind_name(td_pipeline_schedule kind)
{
    switch (kind) {
    case TD_PIPELINE_DEFAULT:
        return "default";
    case TD_PIPELINE_GPIPE:
        return "GPipe";
    case TD_PIPELINE_1F1B:
        return "1F1B";
    case TD_PIPELINE_INTERLEAVED:
        return "interleaved";
    }
    return NULL;
}

td_status td__pipeline_plan_check(const char *call, struct td__pipeline_plan *plan)
{
    enum { MOST = 1 << 20 }; /* keeps every product of the sizes in range */
    if (!td__pipeline_kind_name(plan->kind))
        return td_fail(TD_ERR_INVALID, "%s: %d is not a schedule (see td_pipeline_schedule)", call,
                       (int)plan->kind);
    if (plan->ranks < 1 || plan->chunks < 1 || plan->micro_batches < 1)
        return td_fail(TD_ERR_INVALID,
                       "%s: %d ranks, %d modules a rank, %d micro-batches; each must be at least 1",
                       call, plan->ranks, plan->chunks, plan->micro_batches);
    if ((int64_t)plan->ranks * plan->chunks > MOST || plan->micro_batches > MOST ||
        (int64_t)plan->chunks * plan->micro_batches > MOST)
        return td_fail(TD_ERR_INVALID,
                       "%s: %d ranks, %d modules a rank, %d micro-batches; a pipeline has at most "
                       "%d stages, and a rank %d passes",
                       call, plan->ranks, plan->chunks, plan->micro_batches, MOST, MOST);
    if (plan->kind == TD_PIPELINE_DEFAULT)
        plan->kind = plan->chunks == 1 ? TD_PIPELINE_1F1B : TD_PIPELINE_INTERLEAVED;
    if (plan->chunks > 1 && plan->kind != TD_PIPELINE_INTERLEAVED)
        return td_fail(TD_ERR_INVALID,
                       "%s: the schedule %s takes one module a rank, not %d; use "
                       "TD_PIPELINE_INTERLEAVED",
                       call, td__pipeline_kind_name(plan->kind), plan->chunks);
    if (plan->ahead < 0 || (plan->ahead > 0 && plan->kind != TD_PIPELINE_1F1B))
        return td_fail(
            TD_ERR_INVALID,
            "%s: %d forward passes ahead with the schedule %s; it is a number from 0 on, "
            "and for 1F1B alone",
            call, plan->ahead, td__pipeline_kind_name(plan->kind));
    return TD_OK;
}

/* ---- Lists ------------------------------------------------------------------------------------ */

static void add(struct td__actions *actions, struct td__action action)
{
    if (actions->count == actions->capacity && !actions->failed) {
        int capacity = actions->capacity ? 2 * actions->capacity : 64;
        struct td__action *list = realloc(actions->list, (size_t)capacity * sizeof *actions->list);
        actions->failed = !list;
        if (list) {
            actions->list = list;
            actions->capacity = capacity;
        }
    }
    if (!actions->failed)
        actions->list[actions->count++] = action;
}

struct builder {
    const struct td__pipeline_plan *plan;
    int rank;
    struct td__actions *actions;
};

/* A message between `stage` and the stage beside it, unless both are on this rank. */
static void add_message(const struct builder *builder, enum td__action_kind kind, int stage,
                        int micro_batch, int other_stage)
{
    int ranks = builder->plan->ranks, peer = (other_stage + ranks) % ranks;
    if (other_stage >= 0 && other_stage < ranks * builder->plan->chunks && peer != builder->rank)
        add(builder->actions, (struct td__action){kind, stage, micro_batch, peer});
}

static void add_pass(const struct builder *builder, bool forward, int chunk, int micro_batch)
{
    if (micro_batch >= builder->plan->micro_batches || (builder->plan->forward_only && !forward))
        return;
    int stage = chunk * builder->plan->ranks + builder->rank;
    int from = forward ? stage - 1 : stage + 1, to = forward ? stage + 1 : stage - 1;
    add_message(builder, forward ? TD__RECV_FORWARD : TD__RECV_BACKWARD, stage, micro_batch, from);
    add(builder->actions, (struct td__action){forward ? TD__FORWARD : TD__BACKWARD, stage,
                                              micro_batch, builder->rank});
    add_message(builder, forward ? TD__SEND_FORWARD : TD__SEND_BACKWARD, stage, micro_batch, to);
}

/* ---- Orders ----------------------------------------------------------------------------------- */

/* Forward (or backward) pass number k of a rank. */
static void add_numbered(const struct builder *builder, bool forward, int k)
{
    int ranks = builder->plan->ranks, chunks = builder->plan->chunks;
    int group = k / (ranks * chunks), inside = k % (ranks * chunks), chunk = inside / ranks;
    add_pass(builder, forward, forward ? chunk : chunks - 1 - chunk,
             group * ranks + inside % ranks);
}

/* The forward passes before the first backward pass, less the one that every schedule has there. */
static int warm_up(const struct td__pipeline_plan *plan, int rank)
{
    int after = plan->ranks - 1 - rank;
    if (plan->kind == TD_PIPELINE_GPIPE)
        return plan->micro_batches;
    if (plan->chunks == 1)
        return after + (plan->ahead < after ? plan->ahead : after);
    return 2 * after + (plan->chunks - 1) * plan->ranks;
}

/* Passes of a rank, with those of the micro-batches that fill up the last group. */
static int passes(const struct td__pipeline_plan *plan)
{
    return (plan->micro_batches + plan->ranks - 1) / plan->ranks * plan->ranks * plan->chunks;
}

bool td__actions_build(const struct td__pipeline_plan *plan, int rank, struct td__actions *actions)
{
    *actions = (struct td__actions){0};
    struct builder builder = {.plan = plan, .rank = rank, .actions = actions};
    int total = passes(plan), warm = warm_up(plan, rank);
    for (int k = 0; k < total + warm; k++) {
        if (k < total)
            add_numbered(&builder, true, k);
        if (k >= warm)
            add_numbered(&builder, false, k - warm);
    }
    return !actions->failed;
}

void td__actions_free(struct td__actions *actions)
{
    free(actions->list);
    *actions = (struct td__actions){0};
}

struct td__actions *td__actions_build_all(const struct td__pipeline_plan *plan)
{
    struct td__actions *ranks = calloc((size_t)plan->ranks, sizeof *ranks);
    bool made = ranks;
    for (int rank = 0; made && rank < plan->ranks; rank++)
        made = td__actions_build(plan, rank, &ranks[rank]);
    if (made)
        return ranks;
    td__actions_free_all(ranks, plan->ranks);
    return NULL;
}

void td__actions_free_all(struct td__actions *ranks, int count)
{
    for (int rank = 0; ranks && rank < count; rank++)
        td__actions_free(&ranks[rank]);
    free(ranks);
}

int td__pipeline_stored_bound(const struct td__pipeline_plan *plan, int rank)
{
    int all = plan->chunks * plan->micro_batches, bound = warm_up(plan, rank) + 1;
    if (plan->forward_only)
        return 0;
    return plan->kind == TD_PIPELINE_GPIPE || bound > all ? all : bound;
}

double td__pipeline_theory(const struct td__pipeline_plan *plan)
{
    double idle = plan->ranks - 1, work = (double)plan->chunks * plan->micro_batches;
    return idle / (work + idle);
}
