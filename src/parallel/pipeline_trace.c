/* The trace of a step: each rank has recorded when its passes ran, and td_pipeline_get_trace() gathers that. */
#include "parallel/pipeline_internal.h"

#include "base/buffer.h"
#include "base/fail.h"

#include <tandem/dist.h>

#include <stdlib.h>
#include <string.h>

/* ---- Gathering ---------------------------------------------------------------------------------- */

/* What a rank sends: the start of its step by its own clock, and its passes. */
struct part {
    int64_t started_ns;
    struct td__pass_time times[];
};

static size_t part_size(const td_pipeline *pipeline)
{
    return sizeof(struct part) +
           (size_t)td__pass_count(&pipeline->plan) * sizeof(struct td__pass_time);
}

/* The parts of all ranks, one behind another. */
static td_status gather(const td_pipeline *pipeline, char *parts)
{
    size_t size = part_size(pipeline);
    struct part *mine = calloc(1, size);
    if (!mine)
        return td__fail_nomem("td_pipeline_get_trace");
    mine->started_ns = pipeline->step.started_ns;
    memcpy(mine->times, pipeline->times, size - sizeof *mine);
    td_status status = TD_OK;
    if (pipeline->control)
        status = td_group_all_gather(parts, mine, size / sizeof(int64_t), TD_I64, pipeline->control,
                                     NULL);
    else
        memcpy(parts, mine, size);
    free(mine);
    return status;
}

/* Processes of one host have one monotonic clock. */
static bool have_one_clock(const td_pipeline *pipeline)
{
    return pipeline->control && td_get_local_size() == td_get_world_size(NULL);
}

static void add_passes(const struct td__actions *actions, int rank, const struct part *part,
                       int64_t offset, td_pipeline_trace *trace)
{
    const struct td__pass_time *time = part->times;
    for (int at = 0; at < actions->count; at++) {
        const struct td__action *action = &actions->list[at];
        if (!td__is_pass(action))
            continue;
        trace->passes[trace->count++] = (td_pipeline_pass){
            .rank = rank,
            .stage = action->stage,
            .micro_batch = action->micro_batch,
            .backward = action->kind == TD__BACKWARD,
            .start_ns = time->start_ns + offset,
            .end_ns = time->end_ns + offset,
        };
        time++;
    }
}

/* From the parts of all ranks and the lists of their actions. False: no memory. */
static bool make_trace(const td_pipeline *pipeline, const char *parts,
                       const struct td__actions *lists, td_pipeline_trace *trace)
{
    const struct part *first = (const void *)parts;
    const struct td__pipeline_plan *plan = &pipeline->plan;
    for (int r = 0; r < plan->ranks; r++) {
        const struct part *part = (const void *)(parts + (size_t)r * part_size(pipeline));
        add_passes(&lists[r], r, part,
                   have_one_clock(pipeline) ? part->started_ns - first->started_ns : 0, trace);
    }
    struct td__timeline timeline;
    bool good = td__timeline_measured(plan, lists, trace->passes, trace->count, &timeline);
    trace->busy_ns = timeline.busy;
    trace->needed_ns = timeline.total;
    td__timeline_free(&timeline);
    return good;
}

td_status td_pipeline_get_trace(td_pipeline *pipeline, td_pipeline_trace *trace)
{
    if (!pipeline || !trace)
        return td__fail_null(__func__);
    *trace = (td_pipeline_trace){0};
    if (!pipeline->traced)
        return td_fail(TD_ERR_STATE, "td_pipeline_get_trace: %s",
                       pipeline->stats.steps ? "the last td_pipeline_step() failed"
                                             : "there was no td_pipeline_step() yet");
    const struct td__pipeline_plan *plan = &pipeline->plan;
    size_t ranks = (size_t)plan->ranks;
    char *parts = malloc(ranks * part_size(pipeline));
    struct td__actions *lists = td__actions_build_all(plan);
    td_pipeline_trace made = {
        .passes = malloc(ranks * (size_t)td__pass_count(plan) * sizeof *made.passes),
        .ranks = plan->ranks,
        .chunks = plan->chunks,
        .micro_batches = plan->micro_batches,
        .total_ns = pipeline->stats.total_ns};
    td_status status = parts && lists && made.passes ? TD_OK : td__fail_nomem(__func__);
    if (!status)
        status = gather(pipeline, parts);
    if (!status && !make_trace(pipeline, parts, lists, &made))
        status = td__fail_nomem(__func__);
    td__actions_free_all(lists, plan->ranks);
    free(parts);
    if (status)
        td_pipeline_trace_free(&made);
    else
        *trace = made;
    return status;
}

void td_pipeline_trace_free(td_pipeline_trace *trace)
{
    if (!trace)
        return;
    free(trace->passes);
    *trace = (td_pipeline_trace){0};
}

/* ---- The drawing -------------------------------------------------------------------------------- */

static int64_t last_end(const td_pipeline_trace *trace)
{
    int64_t end = 1;
    for (int i = 0; i < trace->count; i++)
        end = trace->passes[i].end_ns > end ? trace->passes[i].end_ns : end;
    return end;
}

static int column_of(int64_t time, int64_t end, int columns)
{
    int column = (int)((double)time / (double)end * columns + 0.5);
    return column < 0 ? 0 : column > columns ? columns : column;
}

/* Writes a pass over its part of the line. */
static void draw_pass(const td_pipeline_trace *trace, const td_pipeline_pass *pass, int64_t end,
                      char *line, int columns)
{
    struct td__pipeline_plan plan = {.ranks = trace->ranks, .chunks = trace->chunks};
    char label[TD__PASS_LABEL];
    int length = td__pass_label(&plan, pass->backward, pass->stage, pass->micro_batch, label);
    int from = column_of(pass->start_ns, end, columns), to = column_of(pass->end_ns, end, columns);
    for (int at = from; at < to; at++)
        line[at] = at - from < length ? label[at - from] : '-';
}

td_bytes td_pipeline_trace_text(const td_pipeline_trace *trace, int columns)
{
    td_bytes bytes = {0};
    struct td__buffer text = {0};
    if (!trace) {
        td__fail_null(__func__);
        return bytes;
    }
    if (columns < 1) {
        td_fail(TD_ERR_INVALID, "td_pipeline_trace_text: %d columns; it needs at least 1", columns);
        return bytes;
    }
    char *line = malloc((size_t)columns);
    int64_t end = last_end(trace);
    for (int rank = 0; line && rank < trace->ranks; rank++) {
        memset(line, '.', (size_t)columns);
        for (int i = 0; i < trace->count; i++)
            if (trace->passes[i].rank == rank)
                draw_pass(trace, &trace->passes[i], end, line, columns);
        td__rank_label(trace->ranks, rank, &text);
        td__buffer_put(&text, line, (size_t)columns);
        td__buffer_put(&text, "\n", 1);
    }
    if (!line || text.failed)
        td__fail_nomem(__func__);
    else
        td_bytes_copy(text.data, text.size, &bytes);
    free(line);
    td__buffer_free(&text);
    return bytes;
}
