/* The barrier that names the ranks that are missing.
 *
 *     others   arrival  -->  rank 0: waits for all, until the deadline
 *     others  <--  verdict: all have joined, or which ranks have not
 *
 * It uses messages with tags of its own, so that the order of the group's collectives is not
 * affected when it fails. A rank that is late for one barrier must not count as having joined the
 * next: each arrival carries the barrier's number, and old ones are discarded.
 *
 * A rank that has waited for a moment queries those it waits for, and again after twice as long:
 *
 *     the peer is in a collective that this rank has not called yet, and has not joined this barrier
 *                                      the calls differ: the group is aborted, on all ranks
 *     rank 0 has ended this barrier without the arrival of this rank
 *                                      this rank is too late, and no verdict will come
 *     rank 0 has not begun this barrier JOIN_MS after this rank's deadline
 *                                      rank 0 is the missing one
 *
 * Where rank 0 has begun it, or does not answer, the others wait for the verdict until GRACE_MS after their
 * deadline.
 *
 * A rank that times out withdraws, so that rank 0 does not count it as having joined: it sends rank 0 the barrier's
 * number in a query. Rank 0's endpoint answers under the root's lock, under which rank 0 settles the verdict:
 *
 *     not settled yet                  the rank fails, and the verdict will name it
 *     settled                          the verdict is on its way, and the rank takes it
 *
 * A rank 0 that was stopped cannot answer. So each arrival says how long its rank waits, and rank 0 queries the ranks
 * that may have timed out by then: before the verdict, which names those that have, and again after a verdict of TD_OK,
 * since rank 0 can be stopped in between. A rank that gets no answer looks for the verdict once more after it has said
 * that it is in doubt. So either it finds the verdict, or rank 0 finds that it has given up, and does not return TD_OK. */
#include "base/fail.h"
#include "base/option_rules.h"
#include "base/text.h"
#include "fault/peer_query.h"
#include "group/process_group.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    JOIN_MS = 2000, /* more time for rank 0 to join, since ranks do not join at the same moment … */
    GRACE_MS = 10000, /* … and to send the verdict */
    FIRST_PAUSE_MS = 100,
    LAST_PAUSE_MS = 5000,
    QUERIED = 32,       /* ranks at one time, at most */
    DESCRIBED = 8,      /* ranks whose progress is in the error text, at most … */
    DESCRIBE_MS = 1000, /* … and the time to query them */
    LOOK_MS = 100,      /* for a verdict that has been sent already */
    PAUSE_NS = 2000000,
};

struct verdict {
    uint64_t number;
    uint32_t
        status; /* 0, TD_ERR_TIMEOUT, or TD_ERR_PEER where one of the missing ranks has ended or left */
    uint32_t missing; /* entries of `ranks` */
    char text[1008];
    int32_t ranks[]; /* of the world; room for all of the group */
};

enum sort { JOINED, LATE, GONE, WITHDRAWN };

/* What a rank sends that has joined. */
struct announcement {
    uint64_t number;
    int64_t
        sent_ns; /* the time of day: clocks of several hosts need not agree, so it is only a hint … */
    int64_t patience_ms; /* … that after this time the rank may have timed out */
};

struct arrival {
    td_work *work;
    struct announcement announcement;
    td_status status; /* TD_ERR_PEER: this rank sends nothing more */
    enum sort sort;   /* at the end */
};

/* One barrier, as this rank sees it. */
struct barrier {
    td_group *group;
    uint64_t number;
    uint64_t sequence; /* of the last collective before it */
    int64_t timeout_ms;
    td__deadline deadline;
    td__deadline end;        /* of waiting for the verdict */
    td__deadline next_query; /* of the ranks that this rank waits for */
    int64_t pause_ms;        /* until the query after that */
    bool now;                /* TD_NOW: does not wait for ranks that have not joined */
    bool all;
    bool settled; /* rank 0 has said that the verdict is on its way */
    struct verdict *verdict;
    struct arrival *arrivals; /* rank 0's */
};

static size_t verdict_size(const td_group *group)
{
    return sizeof(struct verdict) + (size_t)group->size * sizeof(int32_t);
}

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

/* ---- Querying the others ---------------------------------------------------------------------- */

/* False if the rank does not answer, or is in a collective instead, in which case this aborts the group. */
static bool check_rank(const struct barrier *barrier, int index,
                       struct td__barrier_progress *progress)
{
    td_group *group = barrier->group;
    struct td__endpoint *endpoint = group->root->endpoint;
    if (td__endpoint_presence(endpoint, group->ranks[index]) != TD__PRESENT ||
        td__endpoint_is_stopped(endpoint, group->ranks[index]) ||
        !td__barrier_query(group, index, 0, progress))
        return false;
    if (progress->sequence <= barrier->sequence || progress->begun >= barrier->number)
        return true;
    td__abort_own(group, td__abort_mixed(group->ranks[index], progress->kind, progress->sequence),
                  true);
    return false;
}

static td__deadline after_deadline(const struct barrier *barrier, int64_t more_ms)
{
    return barrier->deadline < TD__NEVER - more_ms * 1000000 ? barrier->deadline + more_ms * 1000000
                                                             : TD__NEVER;
}

/* One of the queries is at the time by which rank 0 must have joined. */
static void plan_query(struct barrier *barrier)
{
    td__deadline join = after_deadline(barrier, JOIN_MS);
    barrier->next_query = td__deadline_in_ms(barrier->pause_ms);
    if (!td__deadline_passed(join))
        barrier->next_query = td__deadline_earlier(barrier->next_query, join);
    barrier->pause_ms = barrier->pause_ms * 2 < LAST_PAUSE_MS ? barrier->pause_ms * 2
                                                              : LAST_PAUSE_MS;
}

/* ---- Rank 0 ---------------------------------------------------------------------------------- */

static bool has_joined(const struct barrier *barrier, int index)
{
    const td_group *group = barrier->group;
    return index == group->rank ||
           atomic_load(&group->monitored_arrivals[index]) >= barrier->number;
}

static void check_missing(struct barrier *barrier)
{
    td_group *group = barrier->group;
    struct td__barrier_progress progress;
    int queried = 0;
    for (int r = 1; r < group->size && queried < QUERIED && !atomic_load(&group->aborted); r++)
        if (barrier->arrivals[r].work && !td_work_test(barrier->arrivals[r].work)) {
            check_rank(barrier, r, &progress);
            queried++;
        }
    plan_query(barrier);
}

static td_status wait_for(struct barrier *barrier, td_work *work)
{
    while (!td__work_wait_until(work, td__deadline_earlier(barrier->next_query, barrier->end))) {
        if (td__deadline_passed(barrier->end))
            return TD_ERR_TIMEOUT;
        check_missing(barrier);
    }
    return td_work_status(work);
}

static void receive_arrival(struct barrier *barrier, int rank)
{
    struct arrival *arrival = &barrier->arrivals[rank];
    if (has_joined(barrier, rank)) /* its arrival came while this rank was in an earlier barrier */
        return;
    arrival->status = start(barrier->group, TD_OP_RECV, &arrival->announcement,
                            sizeof arrival->announcement, rank, TD__TAG_ARRIVAL,
                            left_ms(barrier->deadline), &arrival->work);
    if (arrival->status)
        arrival->work = NULL;
}

/* Returns when `rank` has joined this barrier or a later one, or will not in time. */
static void await_rank(struct barrier *barrier, int rank)
{
    td_group *group = barrier->group;
    struct arrival *arrival = &barrier->arrivals[rank];
    while (arrival->work) {
        arrival->status = wait_for(barrier, arrival->work);
        td_work_release(arrival->work);
        arrival->work = NULL;
        if (!arrival->status && arrival->announcement.number >= barrier->number)
            atomic_store(&group->monitored_arrivals[rank], arrival->announcement.number);
        else if (!arrival->status)
            receive_arrival(barrier, rank);
    }
}

/* Also uses the status of the arrival: a connection may end before the exit reason is known. */
static enum sort find_sort(const struct barrier *barrier, int index)
{
    const td_group *group = barrier->group;
    if (has_joined(barrier, index))
        return JOINED;
    return barrier->arrivals[index].status == TD_ERR_PEER ||
                   td__endpoint_exit_reason(group->root->endpoint, group->ranks[index])
               ? GONE
               : LATE;
}

/* A rank that is in a later barrier, or has timed out while this one was stopped, so that it could not withdraw. One
 * that is in doubt is queried until it is not: it gives up, or has found the verdict. */
static bool has_given_up(const struct barrier *barrier, int index)
{
    const struct announcement *sent = &barrier->arrivals[index].announcement;
    struct td__barrier_progress progress;
    if (sent->number > barrier->number)
        return true;
    if ((td__wall_ns() - sent->sent_ns) / 1000000 < sent->patience_ms)
        return false;
    while (td__barrier_query(barrier->group, index, 0, &progress)) {
        bool has_verdict = progress.arrived >= barrier->number;
        if (has_verdict || progress.over >= barrier->number)
            return !has_verdict;
        if (progress.doubt < barrier->number)
            return false;
        td__sleep_ns(PAUSE_NS);
    }
    return false;
}

static void find_withdrawn(struct barrier *barrier)
{
    for (int r = 1; r < barrier->group->size; r++)
        if (barrier->arrivals[r].sort == JOINED && has_given_up(barrier, r))
            barrier->arrivals[r].sort = WITHDRAWN;
}

static void note_withdrawal(void *arg, int index)
{
    struct barrier *barrier = arg;
    if (barrier->arrivals[index].sort != GONE)
        barrier->arrivals[index].sort = WITHDRAWN;
}

/* Finds the sort of each rank. From then on no rank can withdraw. */
static void settle(struct barrier *barrier)
{
    td_group *group = barrier->group;
    for (int r = 1; r < group->size; r++)
        barrier->arrivals[r].sort = find_sort(barrier, r);
    find_withdrawn(barrier);
    td__barrier_settle(group, barrier->number, note_withdrawal, barrier);
}

static int count_sort(const struct barrier *barrier, enum sort sort)
{
    int count = 0;
    for (int r = 0; r < barrier->group->size; r++)
        count += barrier->arrivals[r].sort == sort;
    return count;
}

/* Adds a part of the text, unless there is no room for it. */
static void add(struct verdict *verdict, const char *part)
{
    size_t length = strlen(verdict->text);
    if (length + strlen("; ") + strlen(part) < sizeof verdict->text)
        td__text_add(verdict->text, sizeof verdict->text, "%s%s",
                     verdict->text[length - 2] == ':' ? "" : "; ", part);
}

/* "ranks 1, 2 have joined", of those of one sort; or the first one only. */
static void add_ranks(const struct barrier *barrier, enum sort sort, bool all, const char *what)
{
    const td_group *group = barrier->group;
    char list[160] = "", part[280];
    int count = 0;
    for (int r = 0; r < group->size && (all || !count); r++) {
        if (barrier->arrivals[r].sort != sort)
            continue;
        if (strlen(list) < sizeof list - 32)
            td__text_add(list, sizeof list, "%s%d", count ? ", " : "", group->ranks[r]);
        else if (list[strlen(list) - 1] != '.')
            td__text_add(list, sizeof list, ", ...");
        count++;
    }
    snprintf(part, sizeof part, "rank%s %s %s %s", count > 1 ? "s" : "", list,
             count > 1 ? "have" : "has", what);
    add(barrier->verdict, part);
}

/* How the ranks that are gone have ended: "rank 2 (on node7, pid 4711) was killed by SIGKILL". */
static void describe_gone(const struct barrier *barrier)
{
    const td_group *group = barrier->group;
    struct td__endpoint *endpoint = group->root->endpoint;
    char part[320];
    int described = 0;
    for (int r = 1; r < group->size && described < (barrier->all ? DESCRIBED : 1); r++) {
        if (barrier->arrivals[r].sort != GONE)
            continue;
        const char *exit_reason = td__endpoint_find_out(endpoint, group->ranks[r], TD__NEVER);
        snprintf(part, sizeof part, "%s %s", td__endpoint_describe(endpoint, group->ranks[r]),
                 exit_reason ? exit_reason : "has closed its connection");
        add(barrier->verdict, part);
        described++;
    }
}

/* The progress of late ranks. */
static void describe_late(const struct barrier *barrier)
{
    char what[TD__PROGRESS_TEXT];
    td__deadline end = td__deadline_in_ms(DESCRIBE_MS);
    int described = 0;
    for (int r = 1; r < barrier->group->size && described < (barrier->all ? DESCRIBED : 1); r++) {
        if (barrier->arrivals[r].sort != LATE || td__deadline_passed(end))
            continue;
        td__describe_progress(barrier->group, 0, r, what);
        add(barrier->verdict, what);
        described++;
    }
}

/* Which ranks are gone, have not joined, have withdrawn, have joined, and what the late ones do. */
static void describe(const struct barrier *barrier)
{
    bool gone = count_sort(barrier, GONE) > 0;
    bool late = count_sort(barrier, LATE) > 0 && (barrier->all || !gone);
    bool withdrawn = count_sort(barrier, WITHDRAWN) > 0 && (barrier->all || !(gone || late));
    char what[64];
    snprintf(barrier->verdict->text, sizeof barrier->verdict->text,
             "monitored_barrier #%llu on group \"%.100s\": ", (unsigned long long)barrier->number,
             barrier->group->name);
    if (gone)
        describe_gone(barrier);
    if (late) {
        snprintf(what, sizeof what, "not joined within %lld ms", (long long)barrier->timeout_ms);
        add_ranks(barrier, LATE, barrier->all, what);
    }
    if (withdrawn) {
        snprintf(what, sizeof what, "timed out before rank %d answered", barrier->group->ranks[0]);
        add_ranks(barrier, WITHDRAWN, barrier->all, what);
    }
    add_ranks(barrier, JOINED, true, "joined");
    if (late)
        describe_late(barrier);
}

/* Fills in the verdict: the missing ranks, or only the first one; and the text. */
static void decide(struct barrier *barrier)
{
    const td_group *group = barrier->group;
    struct verdict *verdict = barrier->verdict;
    enum sort first = count_sort(barrier, GONE)   ? GONE
                      : count_sort(barrier, LATE) ? LATE
                                                  : WITHDRAWN;
    if (!count_sort(barrier, first))
        return;
    verdict->status = first == GONE ? TD_ERR_PEER : TD_ERR_TIMEOUT;
    for (int r = 1; r < group->size && (barrier->all || !verdict->missing); r++) {
        enum sort sort = barrier->arrivals[r].sort;
        if (barrier->all ? sort != JOINED : sort == first)
            verdict->ranks[verdict->missing++] = group->ranks[r];
    }
    describe(barrier);
}

static td_status collect(struct barrier *barrier)
{
    td_group *group = barrier->group;
    struct verdict *verdict = barrier->verdict;
    verdict->number = barrier->number;
    for (int r = 1; r < group->size; r++)
        receive_arrival(barrier, r);
    for (int r = 1; r < group->size; r++)
        await_rank(barrier, r);
    if (atomic_load(&group->aborted))
        return td__group_state(group);
    settle(barrier);
    decide(barrier);
    /* Also where has_given_up(): a rank that was about to may have found the outcome settled, and wait for it. */
    for (int r = 1; r < group->size; r++)
        if (has_joined(barrier, r))
            start(group, TD_OP_SEND, verdict,
                  sizeof *verdict + verdict->missing * sizeof *verdict->ranks, r, TD__TAG_VERDICT,
                  GRACE_MS, NULL);
    if (!verdict->status) {
        find_withdrawn(barrier);
        decide(barrier);
    }
    return verdict->status ? td_fail((td_status)verdict->status, "%s", verdict->text) : TD_OK;
}

/* ---- The others ------------------------------------------------------------------------------ */

static td_status receive(struct barrier *barrier, int64_t limit_ms)
{
    td_work *work;
    TD_TRY(start(barrier->group, TD_OP_RECV, barrier->verdict, verdict_size(barrier->group), 0,
                 TD__TAG_VERDICT, limit_ms, &work));
    td_status status = td_work_wait(work, limit_ms + GRACE_MS);
    td_work_release(work);
    return status;
}

/* This rank gives up. False where rank 0 has settled a verdict for it, or the verdict is here. */
static bool withdraw(struct barrier *barrier)
{
    td_group *group = barrier->group;
    struct td__barrier_progress progress;
    atomic_store(&group->monitored_doubt, barrier->number);
    if (td__barrier_query(group, 0, barrier->number, &progress))
        return progress.over < barrier->number || progress.arrived < barrier->number;
    while (barrier->verdict->number < barrier->number)
        if (receive(barrier, LOOK_MS))
            return true;
    return false;
}

static void set_missing(struct barrier *barrier, int rank)
{
    barrier->verdict->missing = 1;
    barrier->verdict->ranks[0] = rank;
}

/* "has not joined", "has not answered". */
static td_status fail_without_collector(struct barrier *barrier, const char *what,
                                        int64_t waited_ms)
{
    td_group *group = barrier->group;
    set_missing(barrier, group->ranks[0]);
    return td__explain_delay(
        group, 0, 0,
        td_fail(
            TD_ERR_TIMEOUT,
            "monitored_barrier #%llu on group \"%s\": rank %d, which collects the others, has not "
            "%s within %lld ms",
            (unsigned long long)barrier->number, group->name, group->ranks[0], what,
            (long long)waited_ms));
}

/* A message to or from rank 0 has failed; with TD_ERR_TIMEOUT rank 0 has not done `what` within `waited_ms`. */
static td_status fail_alone(struct barrier *barrier, td_status status, const char *what,
                            int64_t waited_ms)
{
    td_group *group = barrier->group;
    struct td__endpoint *endpoint = group->root->endpoint;
    struct td__error error;
    td__error_save(&error);
    if (atomic_load(&group->aborted))
        return td__group_state(group);
    const char *exit_reason = status == TD_ERR_PEER
                                  ? td__endpoint_find_out(endpoint, group->ranks[0], TD__NEVER)
                                  : td__endpoint_exit_reason(endpoint, group->ranks[0]);
    if (exit_reason || status == TD_ERR_TIMEOUT || status == TD_ERR_PEER)
        set_missing(barrier, group->ranks[0]);
    if (exit_reason)
        return td_fail(TD_ERR_PEER, "monitored_barrier #%llu on group \"%s\": %s %s",
                       (unsigned long long)barrier->number, group->name,
                       td__endpoint_describe(endpoint, group->ranks[0]), exit_reason);
    withdraw(barrier);
    if (status == TD_ERR_TIMEOUT)
        return fail_without_collector(barrier, what, waited_ms);
    return td_fail(status, "monitored_barrier #%llu on group \"%s\": rank %d did not answer: %s",
                   (unsigned long long)barrier->number, group->name, group->ranks[0], error.text);
}

static td_status fail_late(struct barrier *barrier)
{
    const td_group *group = barrier->group;
    set_missing(barrier, group->ranks[group->rank]);
    return td_fail(TD_ERR_TIMEOUT,
                   "monitored_barrier #%llu on group \"%s\": rank %d has joined too late: rank %d "
                   "had stopped waiting for it",
                   (unsigned long long)barrier->number, group->name, group->ranks[group->rank],
                   group->ranks[0]);
}

/* No verdict yet: whether one can still come. `status` is how the last receive has ended. */
static td_status reconsider(struct barrier *barrier, td_status status)
{
    struct td__barrier_progress progress;
    bool ended = status != TD_ERR_TIMEOUT || atomic_load(&barrier->group->aborted);
    if (ended || td__deadline_passed(barrier->end)) {
        if (ended || barrier->settled || withdraw(barrier))
            return fail_alone(barrier, status, "answered", barrier->timeout_ms + GRACE_MS);
        barrier->settled = true;
        barrier->end = td__deadline_in_ms(GRACE_MS);
    }
    bool due = td__deadline_passed(after_deadline(barrier, JOIN_MS));
    if (check_rank(barrier, 0, &progress)) {
        if (progress.over >= barrier->number && progress.arrived < barrier->number)
            return fail_late(barrier);
        if (due && progress.begun < barrier->number && withdraw(barrier))
            return fail_without_collector(barrier, "joined", barrier->timeout_ms + JOIN_MS);
    }
    plan_query(barrier);
    return TD_OK;
}

static td_status await_verdict(struct barrier *barrier)
{
    while (barrier->verdict->number < barrier->number) {
        td__deadline next = td__deadline_earlier(barrier->next_query, barrier->end);
        td_status status = receive(barrier, left_ms(next));
        if (status)
            TD_TRY(reconsider(barrier, status));
    }
    atomic_store(&barrier->group->monitored_arrivals[0], barrier->number);
    return TD_OK;
}

/* With TD_NOW: TD_OK if rank 0 has joined the barrier. */
static td_status check_collector(struct barrier *barrier)
{
    const td_group *group = barrier->group;
    struct td__barrier_progress progress;
    if (check_rank(barrier, 0, &progress) && progress.begun >= barrier->number)
        return TD_OK;
    if (atomic_load(&group->aborted))
        return td__group_state(group);
    if (!withdraw(barrier))
        return TD_OK;
    const char *exit_reason = td__endpoint_exit_reason(group->root->endpoint, group->ranks[0]);
    set_missing(barrier, group->ranks[0]);
    return td_fail(
        exit_reason ? TD_ERR_PEER : TD_ERR_TIMEOUT,
        "monitored_barrier #%llu on group \"%s\": rank %d, which collects the others, %s",
        (unsigned long long)barrier->number, group->name, group->ranks[0],
        exit_reason ? exit_reason : "has not joined yet");
}

static td_status report(struct barrier *barrier)
{
    struct verdict *verdict = barrier->verdict;
    struct announcement announcement = {
        .number = barrier->number, .sent_ns = td__wall_ns(), .patience_ms = barrier->timeout_ms};
    int64_t limit = barrier->now ? GRACE_MS : barrier->timeout_ms;
    td_status status = start(barrier->group, TD_OP_SEND, &announcement, sizeof announcement, 0,
                             TD__TAG_ARRIVAL, limit, NULL);
    if (status)
        return fail_alone(barrier, status, "joined", limit);
    if (barrier->now)
        TD_TRY(check_collector(barrier));
    TD_TRY(await_verdict(barrier));
    verdict->text[sizeof verdict->text - 1] = 0;
    if (!verdict->status)
        return TD_OK;
    return td_fail(verdict->status == TD_ERR_PEER ? TD_ERR_PEER : TD_ERR_TIMEOUT, "%s",
                   verdict->text);
}

/* ---- The call -------------------------------------------------------------------------------- */

/* Queries read the arrivals with the root's lock. */
static td_status keep_arrivals(td_group *group)
{
    if (group->monitored_arrivals)
        return TD_OK;
    _Atomic uint64_t *arrivals = calloc((size_t)group->size, sizeof *arrivals);
    if (!arrivals)
        return td__fail_nomem("monitored_barrier");
    pthread_mutex_lock(&group->root->lock);
    group->monitored_arrivals = arrivals;
    pthread_mutex_unlock(&group->root->lock);
    return TD_OK;
}

static td_status run(struct barrier *barrier)
{
    td_group *group = barrier->group;
    barrier->deadline = td__deadline_in_ms(barrier->timeout_ms);
    barrier->end = after_deadline(barrier, GRACE_MS);
    plan_query(barrier);
    uint64_t entry = td__record_monitored_barrier(group, barrier->number);
    td_status status = td__group_state(group);
    if (!status) {
        status = group->rank ? report(barrier) : collect(barrier);
        atomic_store(&group->monitored_over, barrier->number);
    }
    td__record_message_end(group, entry, status);
    return status;
}

/* verdict->missing is from another process: limits it to the size of the group. */
static void copy_missing(const struct barrier *barrier, int *missing, int *missing_count)
{
    const struct verdict *verdict = barrier->verdict;
    int count = verdict->missing < (uint32_t)barrier->group->size ? (int)verdict->missing
                                                                  : barrier->group->size;
    for (int i = 0; missing && i < count; i++)
        missing[i] = verdict->ranks[i];
    if (missing_count)
        *missing_count = count;
}

static td_status enter_barrier(td_group *group, int64_t timeout_ms, bool all, int *missing,
                               int *missing_count)
{
    TD_TRY(keep_arrivals(group));
    struct barrier barrier = {
        .group = group,
        .number = atomic_fetch_add(&group->monitored, 1) + 1,
        .sequence = td_group_sequence(group),
        .timeout_ms = timeout_ms == TD_NOW ? 0
                      : timeout_ms         ? timeout_ms
                                           : td__call_timeout(group),
        .pause_ms = FIRST_PAUSE_MS,
        .now = timeout_ms == TD_NOW,
        .all = all,
    };
    if (group->size == 1)
        return TD_OK;
    barrier.verdict = calloc(1, verdict_size(group));
    barrier.arrivals = calloc(group->rank ? 1 : (size_t)group->size, sizeof *barrier.arrivals);
    bool allocated = barrier.verdict && barrier.arrivals;
    td_status status = allocated ? run(&barrier) : td__fail_nomem("monitored_barrier");
    if (status == TD_ERR_TIMEOUT || status == TD_ERR_PEER)
        copy_missing(&barrier, missing, missing_count);
    free(barrier.arrivals);
    free(barrier.verdict);
    return status;
}

td_status td_group_monitored_barrier(td_group *group, int64_t timeout_ms, bool wait_all_ranks,
                                     int *missing, int *missing_count)
{
    if (missing_count)
        *missing_count = 0;
    group = td__group_enter(group, "monitored_barrier");
    if (!group)
        return TD_ERR_STATE;
    TD_TRY(td__check_timeout("monitored_barrier", timeout_ms));
    td__group_use(group);
    td_status status = enter_barrier(group, timeout_ms, wait_all_ranks, missing, missing_count);
    td__group_unuse(group);
    return status;
}
