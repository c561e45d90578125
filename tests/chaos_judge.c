/* Whether a failure is as it should be: because of the victim, which is named, with the right status, and
 * soon enough. On a group that is broken every call fails in the same way, and at once. */
#include "chaos_job.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SECOND ((int64_t)1000000000)

bool names_rank(const char *text, int rank)
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

int64_t rank_limit_ns(const struct plan *plan)
{
    int64_t limit = plan->way == WAY_SHM ? 4 * SECOND : 6 * SECOND;
    if (plan->fault == FAULT_CUT)
        limit = 12 * SECOND;
    if (plan->fault == FAULT_STOP)
        limit += plan->short_ms * 1000000;
    return limit * slowness();
}

void rank_noticed(struct rank *rank, int64_t took)
{
    int at = atomic_fetch_add(&rank->report->detections, 1);
    if (at < MAX_DETECTIONS)
        rank->report->detection_ns[at] = took;
}

/* A rank has begun to shrink the group, which aborts it. */
static bool is_shrunk(const struct rank *rank, int group)
{
    int before = group == REST ? rank->attempt + 1 : 0;
    return (group == 0 || group == REST) && atomic_load(&rank->page->attempts) > before;
}

/* It is because of that that the call has failed. */
static bool is_woken(const struct rank *rank, int group, td_status status, const char *message)
{
    return status == TD_ERR_PEER && strstr(message, " has called td_group_shrink()") &&
           is_shrunk(rank, group);
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
    static const td_status expected[FAULTS] = {TD_ERR_PEER, TD_ERR_PEER,    TD_ERR_PEER,
                                               TD_OK,       TD_ERR_TIMEOUT, TD_ERR_PEER,
                                               TD_ERR_PEER, TD_ERR_ABORTED};
    const struct plan *plan = rank->plan;
    bool cut_off = rank->fault == FAULT_CUT && rank->rank == rank->victim;
    if (is_woken(rank, job->operation.group, status, message) ||
        is_second(rank, job->members, status, message))
        return NULL;
    if (rank->fault == FAULT_PAUSE)
        return "no rank has died";
    if (!atomic_load(rank->fault_ns))
        return "nothing had happened yet";
    if (rank->fault == FAULT_EARLY && status == TD_ERR_PEER) {
        for (int r = 0; r < plan->size; r++) /* one that could not start counts as dead */
            if (atomic_load(&rank->page->ranks[r].end_of_init) && names_rank(message, r))
                return NULL;
    }
    if (!plan_has(job->members, rank->victim))
        return "the victim is not in the group";
    if (rank->fault == FAULT_ABORT && job->operation.group != plan->aborted_group)
        return "it is not the group that was aborted";
    if (cut_off)
        return NULL;
    if (status != expected[rank->fault])
        return "another status was due";
    if (!names_rank(message, rank->victim))
        return "the victim is not named";
    if (rank->fault == FAULT_LEAVE && !strstr(message, "left"))
        return "it does not say that the victim has left";
    return NULL;
}

void job_describe(const struct job *job, char text[200])
{
    const struct operation *operation = &job->operation;
    snprintf(text, 200, "lane %d, operation %d, %s%s of %zu %s (%s), group %d, root %d, peer %d",
             job->lane, operation->index, operation->async ? "asynchronous " : "",
             kind_name(operation->kind), operation->count, td_dtype_name(operation->dtype),
             td_reduce_op_name(operation->op), operation->group, operation->root, operation->peer);
}

/* A call has failed: the error must name the victim as the cause, and come in time. */
static void judge_failure(struct rank *rank, const struct job *job, td_status status,
                          const char *message, int64_t since)
{
    char what[200];
    int64_t now = td__now_ns(), fault = atomic_load(rank->fault_ns);
    const char *wrong = misjudged(rank, job, status, message);
    int64_t took = now - (since > fault ? since : fault);
    job_describe(job, what);
    if (wrong)
        rank_report(rank, "%s: %s: %s: %s", what, wrong, td_status_name(status), message);
    else if (took > rank_limit_ns(rank->plan))
        rank_report(rank, "%s: it was noticed after %.2f s: %s", what, (double)took / 1e9, message);
    rank_noticed(rank, took);
}

/* After a collective on a broken group: the same again, and at once. */
void judge_collective(struct rank *rank, const struct job *job, td_status status, int64_t since)
{
    char what[200], message[1024];
    int group = job->operation.group;
    job_describe(job, what);
    if (!status && rank->broken[group] && job->operation.index > rank->broken_at[group]) {
        rank_report(rank, "%s: it returned TD_OK on a broken group", what);
        return;
    }
    if (!status)
        return;
    snprintf(message, sizeof message, "%s", td_last_error());
    /* An asynchronous call that was made before may be waited for later. */
    if (!rank->broken[group] || job->operation.index < rank->broken_at[group]) {
        rank->broken_with[group] = status;
        rank->broken_at[group] = job->operation.index;
        rank->broken[group] = true;
        judge_failure(rank, job, status, message, since);
    } else if (status != rank->broken_with[group] && !is_woken(rank, group, status, message)) {
        rank_report(rank, "%s: it was %s before: %s: %s", what,
                    td_status_name(rank->broken_with[group]), td_status_name(status), message);
    } else if (!job->operation.async && td__now_ns() - since > 2 * SECOND * slowness()) {
        rank_report(rank, "%s: the group was broken, but it took %.2f s", what,
                    (double)(td__now_ns() - since) / 1e9);
    }
}

/* A message that failed: it must have been one from or to the victim. */
void judge_message(struct rank *rank, const struct job *job, int partner, td_status status,
                   int64_t since)
{
    char message[1024], what[200];
    snprintf(message, sizeof message, "%s", td_last_error());
    bool woken = is_woken(rank, job->operation.group, status, message);
    bool with_victim = partner == rank->victim || partner == TD_ANY_SOURCE ||
                       rank->rank == rank->victim || rank->fault == FAULT_ABORT || woken ||
                       (partner == rank->plan->second && atomic_load(&rank->page->second_ns));
    /* The victim may have had the memory that the messages of the others go through. */
    with_victim = with_victim || names_rank(message, rank->victim);
    job_describe(job, what);
    /* A rank that waits for a stopped rank until the timeout is late by as much for all others, which wait for
     * the same time: which of them times out first is chance, and the other side sees that. */
    bool late = rank->fault == FAULT_STOP &&
                (status == TD_ERR_TIMEOUT || strstr(message, "cancelled the message"));
    if (!with_victim && late)
        return;
    if (!with_victim && rank->fault != FAULT_EARLY)
        rank_report(rank, "%s: a message from or to rank %d, which is alive: %s: %s", what, partner,
                    td_status_name(status), message);
    else
        judge_failure(rank, job, status, message, since);
}
