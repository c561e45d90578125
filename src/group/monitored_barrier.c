/* The barrier that names who is missing.
 *
 *     others   «here»  -->  rank 0: waits for all, until the deadline
 *     others  <--  verdict: all came, or who did not
 *
 * It is made of messages with tags of its own, so that the order of the group's collectives is not
 * touched when it fails. A rank that comes late to one barrier must not be taken for having come to the
 * next: each «here» carries the barrier's number, and old ones are passed over. */
#include "base/fail.h"
#include "group/process_group.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { GRACE_MS = 10000 };

struct verdict {
    uint64_t number;
    uint32_t late; /* 0, TD_ERR_TIMEOUT, or TD_ERR_PEER where the first one missing is gone */
    char text[436];
};

struct arrival {
    td_work *work;
    uint64_t number;
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

/* True when `rank` has come to this barrier, or a later one, by the deadline. */
static bool await_rank(td_group *group, struct arrival *arrival, int rank, uint64_t number,
                       td__deadline deadline)
{
    while (arrival->work) {
        td_status status = td_work_wait(arrival->work, left_ms(deadline) + GRACE_MS);
        td_work_release(arrival->work);
        arrival->work = NULL;
        if (status)
            return false;
        if (arrival->number >= number)
            return true;
        if (start(group, TD_OP_RECV, &arrival->number, sizeof arrival->number, rank, TD__TAG_HERE,
                  left_ms(deadline), &arrival->work))
            return false;
    }
    return false;
}

static void add_missing(char *list, size_t room, int rank, const char *farewell, bool all)
{
    size_t length = strlen(list);
    if (length && (!all || length > room - 100))
        return;
    length += (size_t)snprintf(list + length, room - length, "%s%d", length ? ", " : "", rank);
    if (farewell)
        snprintf(list + length, room - length, " (it %s)", farewell);
}

static td_status ask_everyone(td_group *group, uint64_t number, int64_t timeout_ms, bool all)
{
    td__deadline deadline = td__deadline_in_ms(timeout_ms);
    struct arrival *arrivals = calloc((size_t)group->size, sizeof *arrivals);
    bool *came = calloc((size_t)group->size, sizeof *came);
    struct verdict verdict = {.number = number};
    char missing[300] = "";
    if (!arrivals || !came) {
        free(arrivals);
        free(came);
        return td__fail_nomem("monitored_barrier");
    }
    for (int r = 1; r < group->size; r++)
        if (start(group, TD_OP_RECV, &arrivals[r].number, sizeof arrivals[r].number, r,
                  TD__TAG_HERE, timeout_ms, &arrivals[r].work))
            arrivals[r].work = NULL;
    for (int r = 1; r < group->size; r++) {
        came[r] = await_rank(group, &arrivals[r], r, number, deadline);
        if (came[r])
            continue;
        struct td__endpoint *endpoint = group->root->endpoint;
        const char *farewell = td__endpoint_farewell(endpoint, group->ranks[r]);
        add_missing(missing, sizeof missing, group->ranks[r], farewell, all);
        if (!verdict.late)
            verdict.late = farewell ? TD_ERR_PEER : TD_ERR_TIMEOUT;
    }
    if (verdict.late)
        snprintf(verdict.text, sizeof verdict.text,
                 "monitored_barrier on group \"%.100s\": rank %.240s did not come within %lld ms",
                 group->name, missing, (long long)timeout_ms);
    for (int r = 1; r < group->size; r++)
        if (came[r])
            start(group, TD_OP_SEND, &verdict, sizeof verdict, r, TD__TAG_VERDICT, GRACE_MS, NULL);
    free(arrivals);
    free(came);
    return verdict.late ? td__fail((td_status)verdict.late, "%s", verdict.text) : TD_OK;
}

static td_status report(td_group *group, uint64_t number, int64_t timeout_ms)
{
    struct verdict verdict = {0};
    td__deadline deadline = td__deadline_in_ms(timeout_ms + GRACE_MS);
    TD_TRY(start(group, TD_OP_SEND, &number, sizeof number, 0, TD__TAG_HERE, timeout_ms, NULL));
    while (verdict.number < number) {
        td_status status = start(group, TD_OP_RECV, &verdict, sizeof verdict, 0, TD__TAG_VERDICT,
                                 left_ms(deadline), NULL);
        if (status)
            return td__fail(status, "monitored_barrier on group \"%s\": rank %d did not answer: %s",
                            group->name, group->ranks[0], td_last_error());
    }
    verdict.text[sizeof verdict.text - 1] = 0;
    if (!verdict.late)
        return TD_OK;
    return td__fail(verdict.late == TD_ERR_PEER ? TD_ERR_PEER : TD_ERR_TIMEOUT, "%s", verdict.text);
}

td_status td_group_monitored_barrier(td_group *group, int64_t timeout_ms, bool all)
{
    group = td__group_enter(group, "monitored_barrier");
    if (!group)
        return TD_ERR_STATE;
    if (timeout_ms < 0)
        return td__fail(TD_ERR_INVALID, "monitored_barrier: the timeout is %lld ms",
                        (long long)timeout_ms);
    if (!timeout_ms)
        timeout_ms = td__call_timeout(group);
    uint64_t number = ++group->monitored;
    if (group->size == 1)
        return TD_OK;
    uint64_t entry = td__record_monitored_barrier(group, number);
    td_status status = group->rank ? report(group, number, timeout_ms)
                                   : ask_everyone(group, number, timeout_ms, all);
    td__record_message_end(group, entry, status);
    return status;
}
