/* Running operations.
 *
 * Every rank makes every call of its groups, broken or not: on a broken one a collective must fail at
 * once, and messages between two live ranks still arrive.
 *
 * Works are waited for when too many are under way, in the order in which they were started, and after
 * each operation that is not asynchronous. */
#include "chaos_job.h"

#include <stdlib.h>

enum { MOST_JOBS = 5, MOST_LATE = 12 };

static void check_result(struct rank *rank, struct job *job)
{
    char what[200];
    job_describe(job, what);
    if (!job_result_is_right(job))
        rank_report(rank, "%s: it returned TD_OK, but the result is wrong", what);
    else if (!job_input_is_whole(job))
        rank_report(rank, "%s: it returned TD_OK, but the input has changed", what);
    else
        atomic_fetch_add(&rank->report->operations, 1);
}

/* ---- Collectives ----------------------------------------------------------------------------- */

static td_status call_uneven(struct job *job, td_group *group, td_work **work)
{
    size_t in[MAX_RANKS], out[MAX_RANKS];
    for (int m = 0; m < job->members->size; m++) {
        in[m] = uneven_count(&job->operation, job->self, m);
        out[m] = uneven_count(&job->operation, m, job->self);
    }
    return td_group_all_to_all_v(job->output, job->input, out, in, job->operation.dtype, group,
                                 work);
}

static td_status call(struct job *job, td_group *group, td_work **work)
{
    const struct operation *o = &job->operation;
    int root = job->members->ranks[o->root];
    switch (o->kind) {
    case KIND_BROADCAST:
        return td_group_broadcast(job->output, o->count, o->dtype, root, group, work);
    case KIND_REDUCE:
        return td_group_reduce(job->output, job->input, o->count, o->dtype, root, o->op, group,
                               work);
    case KIND_ALL_REDUCE:
        return td_group_all_reduce(job->output, job->input, o->count, o->dtype, o->op, group, work);
    case KIND_SCATTER:
        return td_group_scatter(job->output, job->input, o->count, o->dtype, root, group, work);
    case KIND_GATHER:
        return td_group_gather(job->output, job->input, o->count, o->dtype, root, group, work);
    case KIND_ALL_GATHER:
        return td_group_all_gather(job->output, job->input, o->count, o->dtype, group, work);
    case KIND_REDUCE_SCATTER:
        return td_group_reduce_scatter(job->output, job->input, o->count, o->dtype, o->op, group,
                                       work);
    case KIND_ALL_TO_ALL:
        return td_group_all_to_all(job->output, job->input, o->count, o->dtype, group, work);
    case KIND_UNEVEN:
        return call_uneven(job, group, work);
    default:
        return td_group_barrier(group, work);
    }
}

/* ---- Messages -------------------------------------------------------------------------------- */

static td_status post(struct job *job, td_group *group, bool receives, char *data, int partner)
{
    const struct operation *o = &job->operation;
    int at = job->work_count, tag = o->index + 1;
    job->partners[at] = partner;
    job->receives[at] = receives;
    td_status status = receives ? td_group_recv(data, o->count, o->dtype, partner, tag, group,
                                                &job->works[at])
                                : td_group_send(data, o->count, o->dtype, partner, tag, group,
                                                &job->works[at]);
    if (!status)
        job->work_count++;
    return status;
}

static td_status post_all(struct job *job, td_group *group)
{
    const struct operation *o = &job->operation;
    const struct members *members = job->members;
    size_t part = o->count * td_dtype_size(o->dtype);
    int next = members->ranks[(job->self + 1) % members->size];
    int last = members->ranks[(job->self + members->size - 1) % members->size];
    td_status status = TD_OK, other = TD_OK;
    switch (o->kind) {
    case KIND_RING:
        status = post(job, group, true, job->output, last);
        other = post(job, group, false, job->input, next);
        break;
    case KIND_FAN_IN:
        if (job->self != o->root)
            status = post(job, group, false, job->input, members->ranks[o->root]);
        for (int m = 1; m < members->size && job->self == o->root; m++)
            status = post(job, group, true, job->output + (size_t)m * part, TD_ANY_SOURCE);
        break;
    default:
        if (job->self == o->root)
            status = post(job, group, false, job->input, members->ranks[o->peer]);
        else if (job->self == o->peer)
            status = post(job, group, true, job->output, members->ranks[o->root]);
    }
    return status ? status : other;
}

static void check_message(struct rank *rank, struct job *job, int work)
{
    const struct operation *o = &job->operation;
    size_t bytes = o->count * td_dtype_size(o->dtype);
    char what[200], *data = job->output;
    if (!job->receives[work])
        return;
    int source = td_work_source(job->works[work]), expected = job->partners[work];
    size_t received = td_work_received(job->works[work]);
    if (o->kind == KIND_FAN_IN)
        data += (size_t)(work + 1) * bytes;
    job_describe(job, what);
    if ((expected != TD_ANY_SOURCE && source != expected) || !plan_has(job->members, source))
        rank_report(rank, "%s: a message came from rank %d", what, source);
    else if (received != bytes)
        rank_report(rank, "%s: %zu bytes came from rank %d", what, received, source);
    else if (!pattern_is(data, o, o->count, source, 0))
        rank_report(rank, "%s: what came from rank %d is wrong", what, source);
}

/* ---- Running --------------------------------------------------------------------------------- */

static void finish(struct rank *rank, struct job *job)
{
    bool messages = job->operation.kind >= KIND_PAIR, well = true;
    for (int i = 0; i < job->work_count; i++) {
        int64_t since = td__now_ns();
        td_status status;
        do /* the buffers are the library's until then */
            status = td_work_wait(job->works[i], 0);
        while (!td_work_test(job->works[i]));
        status = td_work_status(job->works[i]);
        well = well && !status;
        job->failed = job->failed || status;
        if (status && messages)
            judge_message(rank, job, job->partners[i], status, since);
        else if (!messages)
            judge_collective(rank, job, status, since);
        else
            check_message(rank, job, i);
    }
    if (well && job->work_count)
        check_result(rank, job);
}

static void start(struct rank *rank, struct job *job)
{
    td_group *group = rank->groups[job->operation.group];
    int64_t since = td__now_ns();
    if (job->operation.kind >= KIND_PAIR) {
        td_status status = post_all(job, group);
        job->failed = status;
        if (status)
            judge_message(rank, job, TD_ANY_SOURCE, status, since);
        return;
    }
    if (job->operation.async) {
        td_status status = call(job, group, &job->works[0]);
        job->failed = status;
        if (status)
            judge_collective(rank, job, status, since);
        else
            job->work_count = 1;
        return;
    }
    td_status status = call(job, group, NULL);
    job->failed = status;
    judge_collective(rank, job, status, since);
    if (!status)
        check_result(rank, job);
}

static void show_place(struct rank *rank, int lane, const struct operation *operation)
{
    struct report *report = rank->report;
    atomic_store(&report->kind[lane], (int)operation->kind);
    atomic_store(&report->group[lane], operation->group);
    atomic_store(&report->since[lane], td__now_ns());
    atomic_store(&report->at[lane], operation->index);
}

static bool make_job(struct rank *rank, int lane, const struct operation *operation,
                     struct job *job)
{
    const struct members *members = operation->group == REST ? &rank->rest
                                                             : &rank->plan->group[operation->group];
    if (!plan_has(members, rank->rank))
        return false;
    *job = (struct job){.operation = *operation, .members = members, .lane = lane};
    while (members->ranks[job->self] != rank->rank)
        job->self++;
    job_prepare(job);
    return true;
}

/* One more call on a group; `lost`: it must be broken by then. */
static void run_final(struct rank *rank, int lane, int group, int index, bool lost)
{
    struct operation last = {.key = mix(rank->plan->seed, (uint64_t)group),
                             .index = index,
                             .kind = KIND_ALL_REDUCE,
                             .group = group,
                             .count = 1000};
    struct job job;
    if (!make_job(rank, lane, &last, &job))
        return;
    show_place(rank, lane, &last);
    start(rank, &job);
    if (lost && plan_has(job.members, rank->victim) && !rank->broken[group])
        rank_report(rank, "group %d is as good as before, though the victim is in it", group);
    finish(rank, &job);
    job_clean_up(&job);
}

void run_last(struct rank *rank, int lane)
{
    const struct plan *plan = rank->plan;
    int own = plan->groups - 1;
    for (int g = lane ? own : 0; g < (lane ? own + 1 : own); g++) {
        bool lost = plan->fault != FAULT_PAUSE && plan->fault != FAULT_LATE &&
                    (plan->fault != FAULT_ABORT || g == plan->aborted_group) &&
                    (plan->fault != FAULT_CUT || rank->rank != plan->victim);
        if (plan->fault == FAULT_ABORT && lost)
            rank_await_abort(rank); /* another thread aborts the group */
        run_final(rank, lane, g, plan->count[lane] + g, lost);
    }
}

/* Operations that have been started, the oldest first; and some that have failed, whose memory is looked at
 * later: it must not be written to by ranks that are still busy with the call. */
struct line {
    struct job jobs[MOST_JOBS];
    int first, used;
    struct job late[MOST_LATE];
    int late_first, late_used;
};

static void look_back(struct rank *rank, struct line *line)
{
    char what[200];
    struct job *job = &line->late[line->late_first];
    job_describe(job, what);
    if (!job_is_marked(job))
        rank_report(rank, "%s: its memory was written to after it had failed", what);
    job_clean_up(job);
    line->late_first = (line->late_first + 1) % MOST_LATE;
    line->late_used--;
}

static void dispose(struct rank *rank, struct line *line, struct job *job)
{
    if (!job->failed) {
        job_clean_up(job);
        return;
    }
    if (line->late_used == MOST_LATE)
        look_back(rank, line);
    job_mark(job);
    line->late[(line->late_first + line->late_used++) % MOST_LATE] = *job;
}

static void finish_first(struct rank *rank, struct line *line)
{
    struct job *job = &line->jobs[line->first];
    finish(rank, job);
    dispose(rank, line, job);
    line->first = (line->first + 1) % MOST_JOBS;
    line->used--;
}

static void end_line(struct rank *rank, struct line *line)
{
    while (line->used)
        finish_first(rank, line);
    while (line->late_used)
        look_back(rank, line);
}

static void run_one(struct rank *rank, int lane, const struct operation *operation,
                    struct line *line)
{
    struct job *job = &line->jobs[(line->first + line->used) % MOST_JOBS];
    if (!make_job(rank, lane, operation, job))
        return;
    show_place(rank, lane, operation);
    start(rank, job);
    line->used++;
    while (line->used && (line->used == MOST_JOBS || !operation->async))
        finish_first(rank, line);
}

void run_lane(struct rank *rank, int lane, int count)
{
    struct line line = {.used = 0};
    for (int i = 0; i < count; i++) {
        struct operation operation;
        plan_operation(rank->plan, lane, i, &operation);
        rank_at(rank, lane, i);
        run_one(rank, lane, &operation, &line);
    }
    end_line(rank, &line);
}

void run_rest(struct rank *rank, int attempt, int count, bool last)
{
    struct line line = {.used = 0};
    for (int i = 0; i < count; i++) {
        struct operation operation;
        plan_rest_operation(rank->plan, &rank->rest, attempt, i, &operation);
        run_one(rank, 0, &operation, &line);
    }
    end_line(rank, &line);
    if (last)
        run_final(rank, 0, REST, count, rank->fault != FAULT_PAUSE);
}
