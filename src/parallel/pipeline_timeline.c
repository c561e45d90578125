/* The times of a schedule's passes, and the drawing of them. */
#include "parallel/pipeline_schedule.h"

#include "base/buffer.h"
#include "base/fail.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* For each pass of a schedule, how long it takes, and when it has ended (-1: not yet). */
struct clock {
    const struct td__pipeline_plan *plan;
    int64_t *durations, *ends;
};

static size_t cells_of(const struct td__pipeline_plan *plan)
{
    return (size_t)plan->ranks * (size_t)plan->chunks * (size_t)plan->micro_batches;
}

/* The place of a pass in the arrays of a clock. */
static size_t cell(const struct td__pipeline_plan *plan, bool backward, int stage, int micro_batch)
{
    return (backward ? cells_of(plan) : 0) + (size_t)stage * (size_t)plan->micro_batches +
           (size_t)micro_batch;
}

/* When what a pass needs is there; -1: not known yet. */
static int64_t ready(const struct clock *clock, const struct td__action *pass)
{
    const struct td__pipeline_plan *plan = clock->plan;
    int stage = pass->stage, last = plan->ranks * plan->chunks - 1;
    if (pass->kind == TD__FORWARD)
        return stage ? clock->ends[cell(plan, false, stage - 1, pass->micro_batch)] : 0;
    int64_t forward = clock->ends[cell(plan, false, stage, pass->micro_batch)];
    if (stage == last || forward < 0)
        return forward;
    return clock->ends[cell(plan, true, stage + 1, pass->micro_batch)];
}

/* Runs the list of a rank as far as it gets; `at` and `now` are its place and its time. */
static bool run_rank(struct clock *clock, const struct td__actions *actions, int *at, int64_t *now,
                     int64_t *start)
{
    bool progress = false;
    for (; *at < actions->count; (*at)++) {
        const struct td__action *action = &actions->list[*at];
        if (!td__is_pass(action))
            continue;
        int64_t when = ready(clock, action);
        size_t pass = cell(clock->plan, action->kind == TD__BACKWARD, action->stage,
                           action->micro_batch);
        if (when < 0)
            break;
        start[*at] = when > *now ? when : *now;
        *now = start[*at] + clock->durations[pass];
        clock->ends[pass] = *now;
        progress = true;
    }
    return progress;
}

static bool run_all(struct clock *clock, const struct td__actions *ranks, int *at, int64_t *now,
                    struct td__timeline *timeline)
{
    for (bool progress = true; progress;) {
        progress = false;
        for (int r = 0; r < timeline->ranks; r++)
            progress |= run_rank(clock, &ranks[r], &at[r], &now[r], timeline->start[r]);
    }
    for (int r = 0; r < timeline->ranks; r++) {
        if (at[r] < ranks[r].count)
            return false;
        timeline->total = now[r] > timeline->total ? now[r] : timeline->total;
    }
    return true;
}

/* `durations` has all passes, in the order of cell(). */
static bool make(const struct td__pipeline_plan *plan, const struct td__actions *ranks,
                 int64_t *durations, struct td__timeline *timeline)
{
    size_t p = (size_t)plan->ranks, passes = (plan->forward_only ? 1 : 2) * cells_of(plan);
    *timeline = (struct td__timeline){.ranks = plan->ranks, .start = calloc(p, sizeof(int64_t *))};
    struct clock clock = {plan, durations, malloc(2 * cells_of(plan) * sizeof(int64_t))};
    int64_t *now = calloc(p, sizeof *now);
    int *at = calloc(p, sizeof *at);
    bool good = durations && timeline->start && clock.ends && now && at;
    for (size_t r = 0; good && r < p; r++)
        good = (timeline->start[r] = calloc((size_t)ranks[r].count + 1, sizeof(int64_t)));
    for (size_t i = 0; good && i < passes; i++)
        timeline->busy += durations[i];
    if (good) {
        memset(clock.ends, -1, 2 * cells_of(plan) * sizeof(int64_t));
        good = run_all(&clock, ranks, at, now, timeline);
    }
    free(clock.ends);
    free(now);
    free(at);
    return good;
}

bool td__timeline_make(const struct td__pipeline_plan *plan, const struct td__actions *ranks,
                       int64_t forward, int64_t backward, struct td__timeline *timeline)
{
    size_t cells = cells_of(plan);
    int64_t *durations = malloc(2 * cells * sizeof *durations);
    for (size_t i = 0; durations && i < 2 * cells; i++)
        durations[i] = i < cells ? forward : backward;
    bool good = make(plan, ranks, durations, timeline);
    free(durations);
    return good;
}

bool td__timeline_measured(const struct td__pipeline_plan *plan, const struct td__actions *ranks,
                           const td_pipeline_pass *passes, int count, struct td__timeline *timeline)
{
    int64_t *durations = calloc(2 * cells_of(plan), sizeof *durations);
    for (int i = 0; durations && i < count; i++)
        durations[cell(plan, passes[i].backward, passes[i].stage, passes[i].micro_batch)] =
            passes[i].end_ns - passes[i].start_ns;
    bool good = make(plan, ranks, durations, timeline);
    free(durations);
    return good;
}

void td__timeline_free(struct td__timeline *timeline)
{
    for (int r = 0; timeline->start && r < timeline->ranks; r++)
        free(timeline->start[r]);
    free(timeline->start);
    *timeline = (struct td__timeline){0};
}

/* ---- The drawing ------------------------------------------------------------------------------ */

enum { LABEL = TD__PASS_LABEL };

int td__pass_label(const struct td__pipeline_plan *plan, bool backward, int stage, int micro_batch,
                   char label[TD__PASS_LABEL])
{
    char kind = backward ? 'B' : 'F';
    return plan->chunks == 1
               ? snprintf(label, LABEL, "%c%d", kind, micro_batch)
               : snprintf(label, LABEL, "%c%d.%d", kind, micro_batch, stage / plan->ranks);
}

void td__rank_label(int ranks, int rank, struct td__buffer *text)
{
    char name[LABEL];
    int digits = snprintf(NULL, 0, "%d", ranks - 1);
    int length = snprintf(name, sizeof name, "rank %*d  ", digits, rank);
    td__buffer_put(text, name, (size_t)length);
}

/* That of a pass; "." for a step without one. */
static void write_label(const struct td__pipeline_plan *plan, const struct td__action *pass,
                        char label[LABEL])
{
    if (pass)
        td__pass_label(plan, pass->kind == TD__BACKWARD, pass->stage, pass->micro_batch, label);
    else
        snprintf(label, LABEL, ".");
}

static void draw_rank(const struct td__pipeline_plan *plan, const struct td__actions *actions,
                      const struct td__timeline *timeline, int rank, struct td__buffer *text)
{
    char label[LABEL];
    write_label(plan,
                &(struct td__action){.micro_batch = plan->micro_batches - 1,
                                     .stage = plan->ranks * plan->chunks - 1},
                label);
    int width = (int)strlen(label), at = 0;
    for (int64_t now = 0; now < timeline->total; now++) {
        while (at < actions->count && !td__is_pass(&actions->list[at]))
            at++;
        bool runs = at < actions->count && timeline->start[rank][at] == now;
        write_label(plan, runs ? &actions->list[at] : NULL, label);
        at += runs;
        bool is_last = now == timeline->total - 1;
        char cell[LABEL + 2];
        int length = snprintf(cell, sizeof cell, "%s%-*s", now ? " " : "", is_last ? 0 : width,
                              label);
        td__buffer_put(text, cell, (size_t)length);
    }
    td__buffer_put(text, "\n", 1);
}

td_bytes td_pipeline_text(td_pipeline_schedule schedule, int ranks, int chunks, int micro_batches)
{
    struct td__pipeline_plan plan = {
        .kind = schedule, .ranks = ranks, .chunks = chunks, .micro_batches = micro_batches};
    if (td__pipeline_plan_check(__func__, &plan))
        return (td_bytes){0};
    struct td__actions *lists = td__actions_build_all(&plan);
    struct td__timeline timeline = {0};
    struct td__buffer text = {0};
    bool good = lists && td__timeline_make(&plan, lists, 1, 1, &timeline);
    for (int rank = 0; good && rank < ranks; rank++) {
        td__rank_label(ranks, rank, &text);
        draw_rank(&plan, &lists[rank], &timeline, rank, &text);
    }
    td_bytes bytes = {0};
    if (!good || text.failed)
        td__fail_nomem(__func__);
    else
        td_bytes_copy(text.data, text.size, &bytes);
    td__buffer_free(&text);
    td__timeline_free(&timeline);
    td__actions_free_all(lists, ranks);
    return bytes;
}
