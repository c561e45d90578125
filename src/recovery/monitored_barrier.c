/* The barrier that names who is missing.
 *
 *     others   «here»  -->  rank 0: waits for all, until the deadline
 *     others  <--  verdict: all came, or who did not
 *
 * It is made of messages with tags of its own, so that the order of the group's collectives is not
 * touched when it fails. A rank that comes late to one barrier must not be taken for having come to the
 * next: each «here» carries the barrier's number, and old ones are passed over.
 *
 * Who has waited for a moment asks those it waits for how far they are, and again after twice as long:
 *
 *     it stands in a collective that this rank has not called yet, and has not come to this barrier
 *                                      the calls differ: the group is given up, everywhere
 *     rank 0 has ended this barrier without having heard of this rank
 *                                      this rank is too late, and no verdict will come */
#include "base/fail.h"
#include "group/process_group.h"
#include "recovery/topics.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    GRACE_MS = 10000,
    FIRST_LOOK_MS = 100,
    LAST_LOOK_MS = 5000,
    ASK_MS = 250,
    ASKED = 32,     /* ranks at most, in one look … */
    TOLD = 8,       /* … and those of whom the message says what they do … */
    TELL_MS = 1000, /* … which may take this long */
};

struct verdict {
    uint64_t number;
    uint32_t late; /* 0, TD_ERR_TIMEOUT, or TD_ERR_PEER where one of the missing is gone */
    char text[1012];
};

enum sort { COME, LATE, GONE };

struct arrival {
    td_work *work;
    uint64_t number;
    td_status status; /* TD_ERR_PEER: nothing more comes from this rank */
    enum sort sort;   /* at the end */
};

/* One barrier, as this rank sees it. */
struct barrier {
    td_group *group;
    uint64_t number;
    uint64_t sequence; /* of the last collective before it */
    int64_t timeout_ms;
    td__deadline deadline;
    td__deadline look; /* when to ask the others */
    int64_t pause_ms;  /* until the look after that */
    bool all;
    struct arrival *arrivals; /* rank 0's */
};

static td_status start(td_group *group, td_op_kind kind, void *data, size_t size, int rank, int tag,
                       int64_t timeout_ms, td_work **work)
{
    td_call call = {
        .kind = kind,
        .input = kind == TD_OP_SEND ? data : NULL,
        .output = kind == TD_OP_RECV ? data : NULL,
        .count = size,
        .dtype = TD_U8,
        .root = -1,
        .peer = rank,
        .tag = tag,
        .timeout_ms = timeout_ms,
    };
    return td__group_post(group, &call, work);
}

static int64_t left_ms(td__deadline deadline)
{
    int64_t left = (deadline - td__now_ns() + 999999) / 1000000;
    return left > 0 ? left : 1;
}

/* ---- Asking how far somebody is -------------------------------------------------------------- */

struct progress {
    uint64_t sequence; /* of the collective that it stands in; 0: in none … */
    td_op_kind kind;   /* … and of which kind that is */
    uint64_t begun;    /* monitored barriers */
    uint64_t over;     /* … that have ended there */
    uint64_t heard;    /* … the last one that it has seen this rank come to */
};

void td__barrier_answer(struct td__root *root, int rank, uint64_t key, uint64_t value,
                        struct td__buffer *answer)
{
    (void)value;
    struct progress own = {0};
    /* First of all: who stands there without having come to a barrier had not come to it then. */
    if (!td__recorder_stands_in(root, key, &own.sequence, &own.kind))
        own.sequence = 0;
    pthread_mutex_lock(&root->lock);
    td_group *group = td__root_find(root, key);
    for (int i = 0; group && group->monitored_arrivals && i < group->size; i++)
        if (group->ranks[i] == rank)
            own.heard = atomic_load(&group->monitored_arrivals[i]);
    if (group) {
        own.begun = atomic_load(&group->monitored);
        own.over = atomic_load(&group->monitored_over);
    }
    pthread_mutex_unlock(&root->lock);
    td__buffer_put_u64(answer, own.sequence);
    td__buffer_put_u32(answer, own.kind);
    td__buffer_put_u64(answer, own.begun);
    td__buffer_put_u64(answer, own.over);
    td__buffer_put_u64(answer, own.heard);
}

static bool ask(const td_group *group, int index, struct progress *progress)
{
    struct td__buffer answer = {0};
    bool known = false;
    if (!td__endpoint_ask(group->root->endpoint, group->ranks[index], TD__TOPIC_BARRIER, group->key,
                          0, td__deadline_in_ms(ASK_MS), &answer)) {
        struct td__reader reader = td__reader_of(answer.data, answer.size);
        progress->sequence = td__reader_u64(&reader);
        progress->kind = (td_op_kind)td__reader_u32(&reader);
        progress->begun = td__reader_u64(&reader);
        progress->over = td__reader_u64(&reader);
        progress->heard = td__reader_u64(&reader);
        known = td__reader_done(&reader);
    }
    td__buffer_free(&answer);
    return known;
}

/* False where it does not answer, or where it turned out that it has called something else: then the group
 * is given up. */
static bool look_at(const struct barrier *barrier, int index, struct progress *progress)
{
    td_group *group = barrier->group;
    struct td__endpoint *endpoint = group->root->endpoint;
    if (td__endpoint_presence(endpoint, group->ranks[index]) != TD__PRESENT ||
        td__endpoint_is_stopped(endpoint, group->ranks[index]) || !ask(group, index, progress))
        return false;
    if (progress->sequence <= barrier->sequence || progress->begun >= barrier->number)
        return true;
    td__abort_own(
        group, td__given_up_mixed(group->ranks[index], progress->kind, progress->sequence), true);
    return false;
}

static void plan_look(struct barrier *barrier)
{
    barrier->look = td__deadline_in_ms(barrier->pause_ms);
    barrier->pause_ms = barrier->pause_ms * 2 < LAST_LOOK_MS ? barrier->pause_ms * 2 : LAST_LOOK_MS;
}

/* ---- Rank 0 ---------------------------------------------------------------------------------- */

static bool has_come(const struct barrier *barrier, int index)
{
    const td_group *group = barrier->group;
    return index == group->rank ||
           atomic_load(&group->monitored_arrivals[index]) >= barrier->number;
}

static void look_around(struct barrier *barrier)
{
    td_group *group = barrier->group;
    struct progress progress;
    int asked = 0;
    for (int r = 1; r < group->size && asked < ASKED && !atomic_load(&group->given_up); r++)
        if (barrier->arrivals[r].work && !td_work_test(barrier->arrivals[r].work)) {
            look_at(barrier, r, &progress);
            asked++;
        }
    plan_look(barrier);
}

static td_status wait_for(struct barrier *barrier, td_work *work)
{
    td__deadline end = barrier->deadline + GRACE_MS * (int64_t)1000000;
    while (!td__work_wait_until(work, td__deadline_earlier(barrier->look, end))) {
        if (td__deadline_passed(end))
            return TD_ERR_TIMEOUT;
        look_around(barrier);
    }
    return td_work_status(work);
}

static void receive_arrival(struct barrier *barrier, int rank)
{
    struct arrival *arrival = &barrier->arrivals[rank];
    arrival->status = start(barrier->group, TD_OP_RECV, &arrival->number, sizeof arrival->number,
                            rank, TD__TAG_HERE, left_ms(barrier->deadline), &arrival->work);
    if (arrival->status)
        arrival->work = NULL;
}

/* Returns when `rank` has come to this barrier or a later one, or will not in time. */
static void await_rank(struct barrier *barrier, int rank)
{
    td_group *group = barrier->group;
    struct arrival *arrival = &barrier->arrivals[rank];
    while (arrival->work) {
        arrival->status = wait_for(barrier, arrival->work);
        td_work_release(arrival->work);
        arrival->work = NULL;
        if (!arrival->status && arrival->number >= barrier->number)
            atomic_store(&group->monitored_arrivals[rank], arrival->number);
        else if (!arrival->status)
            receive_arrival(barrier, rank);
    }
}

/* The end of a connection is seen before what it means is known. */
static enum sort find_sort(const struct barrier *barrier, int index)
{
    const td_group *group = barrier->group;
    if (has_come(barrier, index))
        return COME;
    return barrier->arrivals[index].status == TD_ERR_PEER ||
                   td__endpoint_exit_reason(group->root->endpoint, group->ranks[index])
               ? GONE
               : LATE;
}

static int count_sort(const struct barrier *barrier, enum sort sort)
{
    int count = 0;
    for (int r = 0; r < barrier->group->size; r++)
        count += barrier->arrivals[r].sort == sort;
    return count;
}

/* "ranks 1, 2 have", of those of one sort; the first one only, where no more are wanted. */
static void list_ranks(const struct barrier *barrier, enum sort sort, bool all, char *text,
                       size_t room)
{
    const td_group *group = barrier->group;
    char list[160] = "";
    size_t length = 0;
    int count = 0;
    for (int r = 0; r < group->size && (all || !count); r++) {
        if (barrier->arrivals[r].sort != sort)
            continue;
        if (length < sizeof list - 32)
            length += (size_t)snprintf(list + length, sizeof list - length, "%s%d",
                                       count ? ", " : "", group->ranks[r]);
        else if (list[length - 1] != '.')
            length += (size_t)snprintf(list + length, sizeof list - length, ", ...");
        count++;
    }
    snprintf(text, room, "rank%s %s %s", count > 1 ? "s" : "", list, count > 1 ? "have" : "has");
}

static void add(struct verdict *verdict, const char *separator, const char *part)
{
    size_t length = strlen(verdict->text);
    if (length + strlen(separator) + strlen(part) < sizeof verdict->text)
        snprintf(verdict->text + length, sizeof verdict->text - length, "%s%s", separator, part);
}

/* How those ended that are gone: "rank 2 (on node7, pid 4711) was killed by SIGKILL". */
static void describe_gone(const struct barrier *barrier, struct verdict *verdict)
{
    const td_group *group = barrier->group;
    struct td__endpoint *endpoint = group->root->endpoint;
    char part[320];
    int told = 0;
    for (int r = 1; r < group->size && told < (barrier->all ? TOLD : 1); r++) {
        if (barrier->arrivals[r].sort != GONE)
            continue;
        const char *exit_reason = td__endpoint_find_out(endpoint, group->ranks[r], TD__NEVER);
        snprintf(part, sizeof part, "%s %s", td__endpoint_describe(endpoint, group->ranks[r]),
                 exit_reason ? exit_reason : "has closed its connection");
        add(verdict, told++ ? "; " : "", part);
    }
}

/* What those do who are late. */
static void describe_late(const struct barrier *barrier, struct verdict *verdict)
{
    char what[TD__PROGRESS_TEXT];
    td__deadline end = td__deadline_in_ms(TELL_MS);
    int told = 0;
    for (int r = 1; r < barrier->group->size && told < (barrier->all ? TOLD : 1); r++) {
        if (barrier->arrivals[r].sort != LATE || td__deadline_passed(end))
            continue;
        td__describe_progress(barrier->group, 0, r, what);
        add(verdict, "; ", what);
        told++;
    }
}

/* Who is gone, who has not come, who has, and what those do who have not. */
static void describe(const struct barrier *barrier, struct verdict *verdict)
{
    bool gone = count_sort(barrier, GONE) > 0;
    bool late = count_sort(barrier, LATE) > 0 && (barrier->all || !gone);
    char list[200], part[280];
    snprintf(verdict->text, sizeof verdict->text,
             "monitored_barrier #%llu on group \"%.100s\": ", (unsigned long long)barrier->number,
             barrier->group->name);
    if (gone)
        describe_gone(barrier, verdict);
    if (late) {
        list_ranks(barrier, LATE, barrier->all, list, sizeof list);
        snprintf(part, sizeof part, "%s not come within %lld ms", list,
                 (long long)barrier->timeout_ms);
        add(verdict, gone ? "; " : "", part);
    }
    list_ranks(barrier, COME, true, list, sizeof list);
    snprintf(part, sizeof part, "%s come", list);
    add(verdict, "; ", part);
    if (late)
        describe_late(barrier, verdict);
}

static td_status collect(struct barrier *barrier)
{
    td_group *group = barrier->group;
    struct verdict verdict = {.number = barrier->number};
    for (int r = 1; r < group->size; r++)
        receive_arrival(barrier, r);
    for (int r = 1; r < group->size; r++)
        await_rank(barrier, r);
    if (atomic_load(&group->given_up))
        return td__group_state(group);
    for (int r = 1; r < group->size; r++)
        barrier->arrivals[r].sort = find_sort(barrier, r);
    if (count_sort(barrier, COME) < group->size)
        verdict.late = count_sort(barrier, GONE) ? TD_ERR_PEER : TD_ERR_TIMEOUT;
    if (verdict.late)
        describe(barrier, &verdict);
    for (int r = 1; r < group->size; r++)
        if (has_come(barrier, r))
            start(group, TD_OP_SEND, &verdict, sizeof verdict, r, TD__TAG_VERDICT, GRACE_MS, NULL);
    return verdict.late ? td_fail((td_status)verdict.late, "%s", verdict.text) : TD_OK;
}

static td_status ask_everyone(struct barrier *barrier)
{
    td_group *group = barrier->group;
    barrier->arrivals = calloc((size_t)group->size, sizeof *barrier->arrivals);
    if (!barrier->arrivals)
        return td__fail_nomem("monitored_barrier");
    td_status status = collect(barrier);
    atomic_store(&group->monitored_over, barrier->number);
    free(barrier->arrivals);
    return status;
}

/* ---- The others ------------------------------------------------------------------------------ */

/* A message to or from rank 0 has failed. */
static td_status fail_alone(const struct barrier *barrier, td_status status)
{
    td_group *group = barrier->group;
    struct td__endpoint *endpoint = group->root->endpoint;
    struct td__error error;
    td__error_save(&error);
    if (atomic_load(&group->given_up))
        return td__group_state(group);
    const char *exit_reason = status == TD_ERR_PEER
                                  ? td__endpoint_find_out(endpoint, group->ranks[0], TD__NEVER)
                                  : td__endpoint_exit_reason(endpoint, group->ranks[0]);
    if (exit_reason)
        return td_fail(TD_ERR_PEER, "monitored_barrier #%llu on group \"%s\": %s %s",
                       (unsigned long long)barrier->number, group->name,
                       td__endpoint_describe(endpoint, group->ranks[0]), exit_reason);
    if (status == TD_ERR_TIMEOUT)
        return td__explain_delay(
            group, 0, 0,
            td_fail(status,
                    "monitored_barrier #%llu on group \"%s\": rank %d, which collects the others, "
                    "has not answered within %lld ms",
                    (unsigned long long)barrier->number, group->name, group->ranks[0],
                    (long long)barrier->timeout_ms + GRACE_MS));
    return td_fail(status, "monitored_barrier #%llu on group \"%s\": rank %d did not answer: %s",
                   (unsigned long long)barrier->number, group->name, group->ranks[0], error.text);
}

static td_status fail_late(const struct barrier *barrier)
{
    const td_group *group = barrier->group;
    return td_fail(TD_ERR_TIMEOUT,
                   "monitored_barrier #%llu on group \"%s\": rank %d has come too late: rank %d "
                   "had stopped waiting for it",
                   (unsigned long long)barrier->number, group->name, group->ranks[group->rank],
                   group->ranks[0]);
}

/* Waits for a verdict until the next look. */
static td_status receive(struct barrier *barrier, struct verdict *verdict)
{
    td_work *work;
    int64_t limit = left_ms(td__deadline_earlier(barrier->look, barrier->deadline));
    TD_TRY(start(barrier->group, TD_OP_RECV, verdict, sizeof *verdict, 0, TD__TAG_VERDICT, limit,
                 &work));
    td_status status = td_work_wait(work, limit + GRACE_MS);
    td_work_release(work);
    return status;
}

static td_status await_verdict(struct barrier *barrier, struct verdict *verdict)
{
    struct progress progress;
    while (verdict->number < barrier->number) {
        td_status status = receive(barrier, verdict);
        if (status && (status != TD_ERR_TIMEOUT || td__deadline_passed(barrier->deadline) ||
                       atomic_load(&barrier->group->given_up)))
            return fail_alone(barrier, status);
        if (!status)
            continue;
        if (look_at(barrier, 0, &progress) && progress.over >= barrier->number &&
            progress.heard < barrier->number)
            return fail_late(barrier);
        plan_look(barrier);
    }
    return TD_OK;
}

static td_status report(struct barrier *barrier)
{
    struct verdict verdict = {0};
    td_status status = start(barrier->group, TD_OP_SEND, &barrier->number, sizeof barrier->number,
                             0, TD__TAG_HERE, barrier->timeout_ms, NULL);
    if (status)
        return fail_alone(barrier, status);
    barrier->deadline = td__deadline_in_ms(barrier->timeout_ms + GRACE_MS);
    TD_TRY(await_verdict(barrier, &verdict));
    verdict.text[sizeof verdict.text - 1] = 0;
    if (!verdict.late)
        return TD_OK;
    return td_fail(verdict.late == TD_ERR_PEER ? TD_ERR_PEER : TD_ERR_TIMEOUT, "%s", verdict.text);
}

/* ---- The call -------------------------------------------------------------------------------- */

/* Rank 0 keeps who came to which; who asks for it holds the root's lock. */
static td_status keep_arrivals(td_group *group)
{
    if (group->rank || group->monitored_arrivals)
        return TD_OK;
    _Atomic uint64_t *arrivals = calloc((size_t)group->size, sizeof *arrivals);
    if (!arrivals)
        return td__fail_nomem("monitored_barrier");
    pthread_mutex_lock(&group->root->lock);
    group->monitored_arrivals = arrivals;
    pthread_mutex_unlock(&group->root->lock);
    return TD_OK;
}

static td_status run(td_group *group, int64_t timeout_ms, bool all)
{
    TD_TRY(keep_arrivals(group));
    struct barrier barrier = {
        .group = group,
        .number = atomic_fetch_add(&group->monitored, 1) + 1,
        .sequence = group->sequence,
        .timeout_ms = timeout_ms ? timeout_ms : td__call_timeout(group),
        .pause_ms = FIRST_LOOK_MS,
        .all = all,
    };
    if (group->size == 1)
        return TD_OK;
    barrier.deadline = td__deadline_in_ms(barrier.timeout_ms);
    plan_look(&barrier);
    uint64_t entry = td__record_monitored_barrier(group, barrier.number);
    td_status status = td__group_state(group);
    if (!status)
        status = group->rank ? report(&barrier) : ask_everyone(&barrier);
    td__record_message_end(group, entry, status);
    return status;
}

td_status td_group_monitored_barrier(td_group *group, int64_t timeout_ms, bool all)
{
    group = td__group_enter(group, "monitored_barrier");
    if (!group)
        return TD_ERR_STATE;
    if (timeout_ms < 0)
        return td_fail(TD_ERR_INVALID, "monitored_barrier: the timeout is %lld ms",
                       (long long)timeout_ms);
    td__group_use(group);
    td_status status = run(group, timeout_ms, all);
    td__group_unuse(group);
    return status;
}
