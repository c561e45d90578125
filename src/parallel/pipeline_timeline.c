/* The times of a schedule's passes, and the drawing of them. */
#include "parallel/pipeline_schedule.h"

#include "base/buffer.h"
#include "base/fail.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* When the passes of each stage and micro-batch have ended; -1: not yet. */
struct ends {
    const struct td__pipeline_plan *plan;
    int64_t *forward, *backward;
};

static int64_t *end_of(const struct ends *ends, enum td__action_kind kind, int stage,
                       int micro_batch)
{
    return &(kind == TD__FORWARD
                 ? ends->forward
                 : ends->backward)[(size_t)stage * (size_t)ends->plan->micro_batches +
                                   (size_t)micro_batch];
}

/* When what a pass needs is there; -1: not known yet. */
static int64_t ready(const struct ends *ends, const struct td__action *pass)
{
    int last = ends->plan->ranks * ends->plan->chunks - 1;
    if (pass->kind == TD__FORWARD)
        return pass->stage ? *end_of(ends, TD__FORWARD, pass->stage - 1, pass->micro_batch) : 0;
    int64_t forward = *end_of(ends, TD__FORWARD, pass->stage, pass->micro_batch);
    if (pass->stage == last || forward < 0)
        return forward;
    return *end_of(ends, TD__BACKWARD, pass->stage + 1, pass->micro_batch);
}

/* Runs the list of a rank as far as it gets; `at` and `now` are its place and its time. */
static bool run_rank(const struct ends *ends, const struct td__actions *actions,
                     const int64_t times[2], int *at, int64_t *now, int64_t *start)
{
    bool progress = false;
    for (; *at < actions->count; (*at)++) {
        const struct td__action *action = &actions->list[*at];
        if (!td__is_pass(action))
            continue;
        int64_t when = ready(ends, action);
        if (when < 0)
            break;
        start[*at] = when > *now ? when : *now;
        *now = start[*at] + times[action->kind == TD__BACKWARD];
        *end_of(ends, action->kind, action->stage, action->micro_batch) = *now;
        progress = true;
    }
    return progress;
}

static bool run_all(const struct ends *ends, const struct td__actions *ranks,
                    const int64_t times[2], int *at, int64_t *now, struct td__timeline *timeline)
{
    for (bool progress = true; progress;) {
        progress = false;
        for (int r = 0; r < timeline->ranks; r++)
            progress |= run_rank(ends, &ranks[r], times, &at[r], &now[r], timeline->start[r]);
    }
    for (int r = 0; r < timeline->ranks; r++) {
        if (at[r] < ranks[r].count)
            return false;
        timeline->total = now[r] > timeline->total ? now[r] : timeline->total;
    }
    return true;
}

bool td__timeline_make(const struct td__pipeline_plan *plan, const struct td__actions *ranks,
                       int64_t forward, int64_t backward, struct td__timeline *timeline)
{
    size_t p = (size_t)plan->ranks;
    size_t cells = p * (size_t)plan->chunks * (size_t)plan->micro_batches;
    int64_t times[2] = {forward, backward};
    *timeline = (struct td__timeline){.ranks = plan->ranks, .start = calloc(p, sizeof(int64_t *))};
    timeline->busy = (int64_t)plan->chunks * plan->micro_batches *
                     (forward + (plan->forward_only ? 0 : backward));
    struct ends ends = {plan, malloc(cells * sizeof(int64_t)), malloc(cells * sizeof(int64_t))};
    int64_t *now = calloc(p, sizeof *now);
    int *at = calloc(p, sizeof *at);
    bool good = timeline->start && ends.forward && ends.backward && now && at;
    for (size_t r = 0; good && r < p; r++)
        good = (timeline->start[r] = calloc((size_t)ranks[r].count + 1, sizeof(int64_t)));
    if (good) {
        memset(ends.forward, -1, cells * sizeof(int64_t));
        memset(ends.backward, -1, cells * sizeof(int64_t));
        good = run_all(&ends, ranks, times, at, now, timeline);
    }
    free(ends.forward);
    free(ends.backward);
    free(now);
    free(at);
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

enum { LABEL = 40 };

/* "F3", or with several chunks "F3.1"; "." for a step without a pass. */
static void write_label(const struct td__pipeline_plan *plan, const struct td__action *pass,
                        char label[LABEL])
{
    if (!pass)
        snprintf(label, LABEL, ".");
    else if (plan->chunks == 1)
        snprintf(label, LABEL, "%c%d", pass->kind == TD__FORWARD ? 'F' : 'B', pass->micro_batch);
    else
        snprintf(label, LABEL, "%c%d.%d", pass->kind == TD__FORWARD ? 'F' : 'B', pass->micro_batch,
                 pass->stage / plan->ranks);
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
        int length = snprintf(cell, sizeof cell, " %-*s", is_last ? 0 : width, label);
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
        char name[LABEL];
        int digits = snprintf(NULL, 0, "%d", ranks - 1);
        int length = snprintf(name, sizeof name, "rank %*d ", digits, rank);
        td__buffer_put(&text, name, (size_t)length);
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
