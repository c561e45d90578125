/* One operation of a rank, and its result.
 *
 * A job is an operation under way: its buffers, and its works where it is asynchronous. Every rank makes
 * every call of its groups, broken or not: on a broken one a collective must fail at once, and messages
 * between two that live still go through.
 *
 * Works are waited for when too many are under way, in the order in which they were started, and at the
 * end. */
#include "chaos.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_WORKS = 2 * MAX_RANKS, MOST_JOBS = 5 };

#define SECOND ((int64_t)1000000000)

struct job {
    struct operation operation;
    const struct members *members;
    int lane;
    int self; /* this rank in the group */
    size_t input_bytes, output_bytes;
    char *input, *output; /* the same where it is in place */
    bool input_shared, output_shared;
    td_work *works[MOST_WORKS];
    int partners[MOST_WORKS]; /* ranks of the world, for messages; -1: any */
    int work_count;
    bool receives[MOST_WORKS];
    int64_t start_ns;
};

/* ---- Judging a failure ----------------------------------------------------------------------- */

/* Whether the sentence speaks of "rank N", or has it in a list: "ranks 1, N have". */
static bool names_rank(const char *text, int rank)
{
    for (const char *at = text; (at = strstr(at, "rank"));) {
        at += 4;
        at += *at == 's';
        while (*at == ' ' || *at == ',') {
            char *end;
            long number = strtol(at + 1, &end, 10);
            if (end == at + 1)
                break;
            if (number == rank)
                return true;
            at = end;
        }
    }
    return false;
}

/* How long after the victim was struck, or the call began, everybody must be out of it. */
static int64_t limit_ns(const struct plan *plan)
{
    int64_t limit = plan->way == WAY_SHM ? 4 * SECOND : 6 * SECOND;
    if (plan->fault == FAULT_CUT)
        limit = 12 * SECOND;
    if (plan->fault == FAULT_STOP)
        limit += plan->short_ms * 1000000;
    return limit * slowness();
}

static void note_detection(struct rank *rank, int64_t took)
{
    int at = atomic_fetch_add(&rank->report->detections, 1);
    if (at < MAX_DETECTIONS)
        rank->report->detection_ns[at] = took;
}

/* Somebody has begun to shrink the group, by which it is given up. */
static bool is_shrunk(const struct rank *rank, int group)
{
    int before = group == REST ? rank->attempt + 1 : 0;
    return (group == 0 || group == REST) && atomic_load(&rank->page->attempts) > before;
}

/* The second victim may be quicker than some ranks are to notice the first. */
static bool is_second(const struct rank *rank, const struct members *members, td_status status,
                      const char *message)
{
    int second = rank->plan->second;
    return second >= 0 && status == TD_ERR_PEER && atomic_load(&rank->page->second_ns) &&
           plan_has(members, second) && names_rank(message, second);
}

/* What is wrong with the failure; NULL: nothing. */
static const char *misjudged(struct rank *rank, const struct job *job, td_status status,
                             const char *message)
{
    static const td_status expected[FAULTS] = {
        TD_ERR_PEER, TD_ERR_PEER, TD_ERR_PEER, TD_OK, TD_ERR_TIMEOUT, TD_ERR_PEER, TD_ERR_PEER,
        TD_ERR_ABORTED};
    const struct plan *plan = rank->plan;
    bool cut_off = rank->fault == FAULT_CUT && rank->rank == rank->victim;
    if ((status == TD_ERR_ABORTED && is_shrunk(rank, job->operation.group)) ||
        is_second(rank, job->members, status, message))
        return NULL;
    if (rank->fault == FAULT_PAUSE)
        return "nobody has died";
    if (!atomic_load(rank->fault_ns))
        return "nothing had happened yet";
    if (!plan_has(job->members, rank->victim))
        return "the victim is not in the group";
    if (rank->fault == FAULT_ABORT && job->operation.group != plan->given_up)
        return "it is not the group that was given up";
    if (cut_off)
        return NULL;
    if (rank->fault == FAULT_EARLY && status == TD_ERR_PEER) {
        for (int r = 0; r < plan->size; r++) /* one that could not begin is as good as dead */
            if (atomic_load(&rank->page->ranks[r].end_of_init) && names_rank(message, r))
                return NULL;
    }
    if (status != expected[rank->fault])
        return "another status was due";
    if (!names_rank(message, rank->victim))
        return "the victim is not named";
    if (rank->fault == FAULT_LEAVE && !strstr(message, "left"))
        return "it does not say that the victim has left";
    return NULL;
}

static void describe(const struct job *job, char text[200])
{
    const struct operation *operation = &job->operation;
    snprintf(text, 200, "lane %d, operation %d, %s%s of %zu %s (%s), group %d, root %d, peer %d",
             job->lane, operation->index, operation->async ? "asynchronous " : "",
             kind_name(operation->kind), operation->count, td_dtype_name(operation->dtype),
             td_reduce_op_name(operation->op), operation->group, operation->root, operation->peer);
}

/* A call has failed: it must be because of the victim, say so, and not have taken too long. */
static void judge_failure(struct rank *rank, const struct job *job, td_status status,
                          const char *message, int64_t since)
{
    char what[200];
    int64_t now = td__now_ns(), fault = atomic_load(rank->fault_ns);
    const char *wrong = misjudged(rank, job, status, message);
    int64_t took = now - (since > fault ? since : fault);
    describe(job, what);
    if (wrong)
        complain(rank, "%s: %s: %s: %s", what, wrong, td_status_name(status), message);
    else if (took > limit_ns(rank->plan))
        complain(rank, "%s: it took %.2f s to notice: %s", what, (double)took / 1e9, message);
    note_detection(rank, took);
}

/* After a collective on a broken group: the same again, and at once. */
static void judge_collective(struct rank *rank, const struct job *job, td_status status,
                             int64_t since)
{
    char what[200], message[1024];
    int group = job->operation.group;
    describe(job, what);
    if (!status && rank->broken[group] && job->operation.index > rank->broken_at[group]) {
        complain(rank, "%s: it went well on a broken group", what);
        return;
    }
    if (!status)
        return;
    snprintf(message, sizeof message, "%s", td_last_error());
    if (!rank->broken[group]) {
        rank->broken_with[group] = status;
        rank->broken_at[group] = job->operation.index;
        rank->broken[group] = true;
        judge_failure(rank, job, status, message, since);
    } else if (status != rank->broken_with[group] &&
               !(status == TD_ERR_ABORTED && is_shrunk(rank, group))) {
        complain(rank, "%s: it was %s before: %s: %s", what,
                 td_status_name(rank->broken_with[group]), td_status_name(status), message);
    } else if (!job->operation.async && td__now_ns() - since > 2 * SECOND * slowness()) {
        complain(rank, "%s: the group was broken, but it took %.2f s", what,
                 (double)(td__now_ns() - since) / 1e9);
    }
}

/* ---- Buffers --------------------------------------------------------------------------------- */

/* How many elements of input and output this rank has. */
static void measure(const struct job *job, size_t *input, size_t *output)
{
    const struct operation *operation = &job->operation;
    size_t count = operation->count, all = count * (size_t)job->members->size;
    bool root = job->self == operation->root;
    *input = *output = count;
    switch (operation->kind) {
    case KIND_SCATTER:
        *input = root ? all : 0;
        break;
    case KIND_GATHER:
        *output = root ? all : 0;
        break;
    case KIND_ALL_GATHER:
        *output = all;
        break;
    case KIND_REDUCE_SCATTER:
        *input = all;
        break;
    case KIND_ALL_TO_ALL:
        *input = *output = all;
        break;
    case KIND_UNEVEN:
        *input = *output = 0;
        for (int m = 0; m < job->members->size; m++) {
            *input += uneven_count(operation, job->self, m);
            *output += uneven_count(operation, m, job->self);
        }
        break;
    case KIND_BARRIER:
        *input = *output = 0;
        break;
    case KIND_PAIR:
        *input = root ? count : 0;
        *output = job->self == operation->peer ? count : 0;
        break;
    case KIND_FAN_IN:
        *input = root ? 0 : count;
        *output = root ? all : 0;
        break;
    default:
        break;
    }
}

static bool is_in_place(const struct job *job)
{
    enum kind kind = job->operation.kind;
    return kind == KIND_BROADCAST ||
           (job->operation.in_place &&
            (kind == KIND_ALL_REDUCE || kind == KIND_ALL_TO_ALL ||
             (kind == KIND_REDUCE && job->self == job->operation.root)));
}

/* Memory of the library's, or of malloc(): each rank as it likes. */
static char *get_memory(size_t bytes, bool shared)
{
    char *memory = shared ? td_alloc(bytes ? bytes : 1) : malloc(bytes ? bytes : 1);
    if (!memory)
        abort();
    return memory;
}

static void put_back(char *memory, bool shared)
{
    if (shared)
        td_free(memory);
    else
        free(memory);
}

static void fill_input(struct job *job)
{
    const struct operation *operation = &job->operation;
    const struct members *members = job->members;
    size_t element = td_dtype_size(operation->dtype), at = 0;
    int rank = members->ranks[job->self];
    bool whole = operation->kind == KIND_SCATTER || operation->kind == KIND_REDUCE_SCATTER ||
                 operation->kind == KIND_ALL_TO_ALL || operation->kind == KIND_UNEVEN;
    if (operation->kind == KIND_BROADCAST && job->self != operation->root) {
        pattern_poison(job->input, job->input_bytes);
        return;
    }
    if (!whole) {
        pattern_fill(job->input, operation, job->input_bytes / element, rank, 0);
        return;
    }
    for (int m = 0; m < members->size && at < job->input_bytes; m++) {
        size_t count = operation->kind == KIND_UNEVEN ? uneven_count(operation, job->self, m)
                                                      : operation->count;
        pattern_fill(job->input + at, operation, count, rank, m);
        at += count * element;
    }
}

static void prepare(struct job *job)
{
    size_t input, output, element = td_dtype_size(job->operation.dtype);
    uint64_t choice = mix(job->operation.key, (uint64_t)job->members->ranks[job->self]) >> 7;
    measure(job, &input, &output);
    job->input_bytes = input * element;
    job->output_bytes = output * element;
    job->input_shared = choice & 1;
    job->output_shared = choice & 2;
    job->input = get_memory(job->input_bytes, job->input_shared);
    fill_input(job);
    if (is_in_place(job)) {
        job->output = job->input;
        return;
    }
    job->output = get_memory(job->output_bytes, job->output_shared);
    pattern_poison(job->output, job->output_bytes);
}

static void clean_up(struct job *job)
{
    for (int i = 0; i < job->work_count; i++)
        td_work_release(job->works[i]);
    if (job->output != job->input)
        put_back(job->output, job->output_shared);
    put_back(job->input, job->input_shared);
}

/* ---- Results --------------------------------------------------------------------------------- */

static bool parts_are_right(const struct job *job)
{
    const struct operation *operation = &job->operation;
    size_t element = td_dtype_size(operation->dtype), at = 0;
    bool exchange = operation->kind == KIND_ALL_TO_ALL || operation->kind == KIND_UNEVEN;
    for (int m = 0; m < job->members->size && at < job->output_bytes; m++) {
        size_t count = operation->kind == KIND_UNEVEN ? uneven_count(operation, m, job->self)
                                                      : operation->count;
        if (!pattern_is(job->output + at, operation, count, job->members->ranks[m],
                        exchange ? job->self : 0))
            return false;
        at += count * element;
    }
    return true;
}

static bool result_is_right(const struct job *job)
{
    const struct operation *operation = &job->operation;
    const struct members *members = job->members;
    size_t count = operation->count;
    int root = members->ranks[operation->root];
    switch (operation->kind) {
    case KIND_BROADCAST:
        return pattern_is(job->output, operation, count, root, 0);
    case KIND_REDUCE:
        if (job->self != operation->root)
            return pattern_is_poison(job->output, job->output_bytes);
        return pattern_is_reduced(job->output, operation, count, members, 0);
    case KIND_ALL_REDUCE:
        return pattern_is_reduced(job->output, operation, count, members, 0);
    case KIND_SCATTER:
        return pattern_is(job->output, operation, count, root, job->self);
    case KIND_REDUCE_SCATTER:
        return pattern_is_reduced(job->output, operation, count, members, job->self);
    case KIND_GATHER:
    case KIND_ALL_GATHER:
    case KIND_ALL_TO_ALL:
    case KIND_UNEVEN:
        return parts_are_right(job);
    default:
        return true;
    }
}

/* Not where it was in place, of course. */
static bool input_is_whole(struct job *job)
{
    if (job->output == job->input || !job->input_bytes)
        return true;
    struct job again = *job;
    again.input = malloc(job->input_bytes);
    if (!again.input)
        return true;
    fill_input(&again);
    bool whole = !memcmp(again.input, job->input, job->input_bytes);
    free(again.input);
    return whole;
}

static void check_result(struct rank *rank, struct job *job)
{
    char what[200];
    describe(job, what);
    if (!result_is_right(job))
        complain(rank, "%s: it went well, but the result is wrong", what);
    else if (!input_is_whole(job))
        complain(rank, "%s: it went well, but the input has changed", what);
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
    return td_group_all_to_all_v(group, job->input, in, job->output, out, job->operation.dtype,
                                 work);
}

static td_status call(struct job *job, td_group *group, td_work **work)
{
    const struct operation *o = &job->operation;
    int root = job->members->ranks[o->root];
    switch (o->kind) {
    case KIND_BROADCAST:
        return td_group_broadcast(group, job->output, o->count, o->dtype, root, work);
    case KIND_REDUCE:
        return td_group_reduce(group, job->input, job->output, o->count, o->dtype, o->op, root,
                               work);
    case KIND_ALL_REDUCE:
        return td_group_all_reduce(group, job->input, job->output, o->count, o->dtype, o->op,
                                   work);
    case KIND_SCATTER:
        return td_group_scatter(group, job->input, job->output, o->count, o->dtype, root, work);
    case KIND_GATHER:
        return td_group_gather(group, job->input, job->output, o->count, o->dtype, root, work);
    case KIND_ALL_GATHER:
        return td_group_all_gather(group, job->input, job->output, o->count, o->dtype, work);
    case KIND_REDUCE_SCATTER:
        return td_group_reduce_scatter(group, job->input, job->output, o->count, o->dtype, o->op,
                                       work);
    case KIND_ALL_TO_ALL:
        return td_group_all_to_all(group, job->input, job->output, o->count, o->dtype, work);
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
    td_status status = receives ? td_group_recv(group, data, o->count, o->dtype, partner, tag,
                                                &job->works[at])
                                : td_group_send(group, data, o->count, o->dtype, partner, tag,
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

/* A message that failed: it must have been one from or to the victim. */
static void judge_message(struct rank *rank, const struct job *job, int partner, td_status status,
                          int64_t since)
{
    char message[1024], what[200];
    snprintf(message, sizeof message, "%s", td_last_error());
    bool with_victim = partner == rank->victim || partner == TD_ANY_SOURCE ||
                       rank->rank == rank->victim || rank->fault == FAULT_ABORT ||
                       (status == TD_ERR_ABORTED && is_shrunk(rank, job->operation.group)) ||
                       (partner == rank->plan->second && atomic_load(&rank->page->second_ns));
    describe(job, what);
    if (!with_victim && rank->fault != FAULT_EARLY)
        complain(rank, "%s: a message from or to rank %d, which is alive: %s: %s", what, partner,
                 td_status_name(status), message);
    else
        judge_failure(rank, job, status, message, since);
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
    describe(job, what);
    if ((expected != TD_ANY_SOURCE && source != expected) || !plan_has(job->members, source))
        complain(rank, "%s: a message came from rank %d", what, source);
    else if (received != bytes)
        complain(rank, "%s: %zu bytes came from rank %d", what, received, source);
    else if (!pattern_is(data, o, o->count, source, 0))
        complain(rank, "%s: what came from rank %d is wrong", what, source);
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
        if (status && messages)
            judge_message(rank, job, job->partners[i], status, since);
        else if (!messages)
            judge_collective(rank, job, status, since);
        else
            check_message(rank, job, i);
    }
    if (well && job->work_count)
        check_result(rank, job);
    clean_up(job);
}

static void start(struct rank *rank, struct job *job)
{
    td_group *group = rank->groups[job->operation.group];
    int64_t since = td__now_ns();
    if (job->operation.kind >= KIND_PAIR) {
        td_status status = post_all(job, group);
        if (status)
            judge_message(rank, job, TD_ANY_SOURCE, status, since);
        return;
    }
    if (job->operation.async) {
        td_status status = call(job, group, &job->works[0]);
        if (status)
            judge_collective(rank, job, status, since);
        else
            job->work_count = 1;
        return;
    }
    td_status status = call(job, group, NULL);
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
    const struct members *members = operation->group == REST
                                        ? &rank->rest
                                        : &rank->plan->group[operation->group];
    if (!plan_has(members, rank->rank))
        return false;
    *job = (struct job){.operation = *operation, .members = members, .lane = lane};
    while (members->ranks[job->self] != rank->rank)
        job->self++;
    prepare(job);
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
        complain(rank, "group %d is as good as before, though the victim is in it", group);
    finish(rank, &job);
}

void run_last(struct rank *rank, int lane)
{
    const struct plan *plan = rank->plan;
    int own = plan->groups - 1;
    for (int g = lane ? own : 0; g < (lane ? own + 1 : own); g++) {
        bool lost = plan->fault != FAULT_PAUSE && plan->fault != FAULT_LATE &&
                    (plan->fault != FAULT_ABORT || g == plan->given_up) &&
                    (plan->fault != FAULT_CUT || rank->rank != plan->victim);
        run_final(rank, lane, g, plan->count[lane] + g, lost);
    }
}

/* Operations that have been started, the oldest first. */
struct line {
    struct job jobs[MOST_JOBS];
    int first, used;
};

static void finish_first(struct rank *rank, struct line *line)
{
    finish(rank, &line->jobs[line->first]);
    line->first = (line->first + 1) % MOST_JOBS;
    line->used--;
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
    while (line.used)
        finish_first(rank, &line);
}

void run_rest(struct rank *rank, int attempt, int count, bool last)
{
    struct line line = {.used = 0};
    for (int i = 0; i < count; i++) {
        struct operation operation;
        plan_rest_operation(rank->plan, &rank->rest, attempt, i, &operation);
        run_one(rank, 0, &operation, &line);
    }
    while (line.used)
        finish_first(rank, &line);
    if (last)
        run_final(rank, 0, REST, count, rank->fault != FAULT_PAUSE);
}
