/* Verifies schedules; see pipeline_schedule.h. The trial runs the lists of all ranks in turns, each as far as it gets,
 * until none makes progress. */
#include "parallel/pipeline_schedule.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

enum { EMPTY = -1 };

/* What is known of a stage and a micro-batch. */
struct pass_state {
    bool has_input, has_gradient, forward, backward;
};

/* A stage, and the messages to it that were sent and not received: one in each direction at most. */
struct stage_state {
    int next_forward, next_backward; /* micro-batches */
    int inputs, gradients;           /* micro-batches, or EMPTY */
};

struct pipeline_trial {
    const struct td__pipeline_plan *plan;
    const struct td__actions *ranks;
    int stages;
    int *at;                   /* of each rank */
    int *stored;               /* of each rank: micro-batches */
    struct stage_state *stage; /* of each stage */
    struct pass_state *passes; /* [stage][micro-batch] */
    char *why;
    size_t room;
};

enum outcome { WRONG, WAITS, RUNS };

__attribute__((format(printf, 2, 3))) static enum outcome fail(struct pipeline_trial *trial,
                                                               const char *format, ...)
{
    int used = snprintf(trial->why, trial->room, "%s, %d ranks, %d chunks, %d micro-batches: ",
                        td__pipeline_kind_name(trial->plan->kind), trial->plan->ranks,
                        trial->plan->chunks, trial->plan->micro_batches);
    va_list list;
    va_start(list, format);
    if (used >= 0 && (size_t)used < trial->room)
        vsnprintf(trial->why + used, trial->room - (size_t)used, format, list);
    va_end(list);
    return WRONG;
}

static struct pass_state *state_of(const struct pipeline_trial *trial, int stage, int micro_batch)
{
    return &trial->passes[(size_t)stage * (size_t)trial->plan->micro_batches + (size_t)micro_batch];
}

/* The stage on the other side of a message. */
static int other_stage(const struct td__action *action)
{
    bool next = action->kind == TD__SEND_FORWARD || action->kind == TD__RECV_BACKWARD;
    return action->stage + (next ? 1 : -1);
}

static bool check_ranges(struct pipeline_trial *trial, int rank)
{
    for (int i = 0; i < trial->ranks[rank].count; i++) {
        const struct td__action *action = &trial->ranks[rank].list[i];
        bool good = action->stage >= 0 && action->stage < trial->stages &&
                    action->stage % trial->plan->ranks == rank && action->micro_batch >= 0 &&
                    action->micro_batch < trial->plan->micro_batches;
        if (good && !td__is_pass(action)) {
            int other = other_stage(action);
            good = other >= 0 && other < trial->stages && action->peer != rank &&
                   action->peer == other % trial->plan->ranks;
        }
        if (!good) {
            fail(trial, "rank %d, action %d is out of range", rank, i);
            return false;
        }
    }
    return true;
}

/* ---- Actions ---------------------------------------------------------------------------------- */

static enum outcome run_forward(struct pipeline_trial *trial, int rank,
                                const struct td__action *action)
{
    struct pass_state *state = state_of(trial, action->stage, action->micro_batch);
    bool has_input = action->stage == 0 || state->has_input;
    if (action->stage > 0 && trial->plan->ranks == 1)
        has_input = state_of(trial, action->stage - 1, action->micro_batch)->forward;
    if (!has_input)
        return fail(trial, "stage %d runs forward of micro-batch %d without its input",
                    action->stage, action->micro_batch);
    if (action->micro_batch != trial->stage[action->stage].next_forward++)
        return fail(trial, "stage %d runs forward of micro-batch %d out of order", action->stage,
                    action->micro_batch);
    state->forward = true;
    int bound = td__pipeline_stored_bound(trial->plan, rank);
    if (!trial->plan->forward_only && ++trial->stored[rank] > bound)
        return fail(trial, "rank %d stores %d micro-batches, more than %d", rank,
                    trial->stored[rank], bound);
    return RUNS;
}

static enum outcome run_backward(struct pipeline_trial *trial, int rank,
                                 const struct td__action *action)
{
    struct pass_state *state = state_of(trial, action->stage, action->micro_batch);
    bool is_last = action->stage == trial->stages - 1;
    bool has_gradient = is_last || state->has_gradient;
    if (!is_last && trial->plan->ranks == 1)
        has_gradient = state_of(trial, action->stage + 1, action->micro_batch)->backward;
    if (!state->forward || !has_gradient)
        return fail(trial, "stage %d runs backward of micro-batch %d without its %s", action->stage,
                    action->micro_batch, state->forward ? "gradient" : "forward");
    if (action->micro_batch != trial->stage[action->stage].next_backward++)
        return fail(trial, "stage %d runs backward of micro-batch %d out of order", action->stage,
                    action->micro_batch);
    state->backward = true;
    trial->stored[rank]--;
    return RUNS;
}

static enum outcome run_send(struct pipeline_trial *trial, int rank,
                             const struct td__action *action)
{
    bool forward = action->kind == TD__SEND_FORWARD;
    const struct pass_state *state = state_of(trial, action->stage, action->micro_batch);
    struct stage_state *to = &trial->stage[other_stage(action)];
    int *message = forward ? &to->inputs : &to->gradients;
    if (!(forward ? state->forward : state->backward))
        return fail(trial, "rank %d sends micro-batch %d of stage %d before its pass", rank,
                    action->micro_batch, action->stage);
    if (*message != EMPTY)
        return WAITS;
    *message = action->micro_batch;
    return RUNS;
}

static enum outcome run_recv(struct pipeline_trial *trial, int rank,
                             const struct td__action *action)
{
    bool forward = action->kind == TD__RECV_FORWARD;
    struct pass_state *state = state_of(trial, action->stage, action->micro_batch);
    struct stage_state *stage = &trial->stage[action->stage];
    int *message = forward ? &stage->inputs : &stage->gradients;
    if (*message == EMPTY)
        return WAITS;
    if (*message != action->micro_batch)
        return fail(trial, "rank %d sends micro-batch %d to stage %d, rank %d expects %d",
                    action->peer, *message, action->stage, rank, action->micro_batch);
    *(forward ? &state->has_input : &state->has_gradient) = true;
    *message = EMPTY;
    return RUNS;
}

static enum outcome run_action(struct pipeline_trial *trial, int rank,
                               const struct td__action *action)
{
    switch (action->kind) {
    case TD__FORWARD:
        return run_forward(trial, rank, action);
    case TD__BACKWARD:
        return run_backward(trial, rank, action);
    case TD__SEND_FORWARD:
    case TD__SEND_BACKWARD:
        return run_send(trial, rank, action);
    case TD__RECV_FORWARD:
    case TD__RECV_BACKWARD:
        return run_recv(trial, rank, action);
    }
    return fail(trial, "rank %d has an unknown action", rank);
}

/* ---- The trial -------------------------------------------------------------------------------- */

static bool run_lists(struct pipeline_trial *trial)
{
    for (bool progress = true; progress;) {
        progress = false;
        for (int rank = 0; rank < trial->plan->ranks; rank++)
            while (trial->at[rank] < trial->ranks[rank].count) {
                const struct td__action *action = &trial->ranks[rank].list[trial->at[rank]];
                enum outcome outcome = run_action(trial, rank, action);
                if (outcome == WRONG)
                    return false;
                if (outcome == WAITS)
                    break;
                trial->at[rank]++;
                progress = true;
            }
    }
    return true;
}

static bool check_end(struct pipeline_trial *trial)
{
    int m = trial->plan->micro_batches, backward = trial->plan->forward_only ? 0 : m;
    for (int rank = 0; rank < trial->plan->ranks; rank++)
        if (trial->at[rank] < trial->ranks[rank].count)
            return fail(trial, "rank %d waits for ever at action %d", rank, trial->at[rank]);
    for (int s = 0; s < trial->stages; s++) {
        const struct stage_state *stage = &trial->stage[s];
        if (stage->next_forward != m || stage->next_backward != backward)
            return fail(trial, "stage %d ran %d forward and %d backward passes", s,
                        stage->next_forward, stage->next_backward);
        if (stage->inputs != EMPTY || stage->gradients != EMPTY)
            return fail(trial, "a message to stage %d is not received", s);
    }
    return true;
}

bool td__pipeline_check(const struct td__pipeline_plan *plan, const struct td__actions *ranks,
                        char *why, size_t room)
{
    struct pipeline_trial trial = {.plan = plan,
                                   .ranks = ranks,
                                   .stages = plan->ranks * plan->chunks,
                                   .why = why,
                                   .room = room};
    trial.at = calloc((size_t)plan->ranks, sizeof *trial.at);
    trial.stored = calloc((size_t)plan->ranks, sizeof *trial.stored);
    trial.stage = calloc((size_t)trial.stages, sizeof *trial.stage);
    trial.passes = calloc((size_t)trial.stages * (size_t)plan->micro_batches, sizeof *trial.passes);
    bool right = trial.at && trial.stored && trial.stage && trial.passes;
    if (!right)
        fail(&trial, "out of memory");
    for (int s = 0; right && s < trial.stages; s++)
        trial.stage[s].inputs = trial.stage[s].gradients = EMPTY;
    for (int rank = 0; right && rank < plan->ranks; rank++)
        right = check_ranges(&trial, rank);
    right = right && run_lists(&trial) && check_end(&trial);
    free(trial.at);
    free(trial.stored);
    free(trial.stage);
    free(trial.passes);
    return right;
}
