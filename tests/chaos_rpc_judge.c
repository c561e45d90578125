/* Whether a remote call may fail as it did: because of the victim, which takes part in it and is named, with the right
 * status, and in time; or because that was the purpose of the call. */
#include "chaos_rpc.h"

#include <stdio.h>
#include <string.h>

#define MS ((int64_t)1000000)

enum { LATE_MS = 3000 };

static bool names_worker(const char *text, int rank)
{
    char quoted[16];
    snprintf(quoted, sizeof quoted, "\"%s\"", worker_name(rank));
    return strstr(text, quoted) != NULL;
}

static bool names_one_of(const char *text, unsigned workers)
{
    for (int r = 0; r < MAX_RANKS; r++)
        if (workers >> r & 1 && names_worker(text, r))
            return true;
    return false;
}

/* The call was to fail so. */
static bool is_purpose(const struct remote_call *call, td_status status, const char *text)
{
    return (call->kind == CALL_CANCELLED && status == TD_ERR_ABORTED) ||
           (call->kind == CALL_REFUSED && status == TD_ERR_MISMATCH &&
            strstr(text, "refused on purpose"));
}

/* What is wrong with a timeout; NULL: nothing. Any call with a short timeout may be too late on a busy machine. */
static const char *misjudged_timeout(const struct rank *rank, const struct remote_call *call,
                                     const char *text, int64_t took)
{
    if (!call->timeout_ms)
        return "its timeout was long";
    if (!names_one_of(text, call->through | 1u << rank->rank))
        return "the worker is not named";
    if (took > (call->timeout_ms + (int64_t)LATE_MS * slowness()) * MS)
        return "the timeout came late";
    return NULL;
}

static bool could_not_start(const struct rank *rank, const struct remote_call *call,
                            const char *text)
{
    for (int r = 0; r < rank->plan->size; r++)
        if (call->through >> r & 1 && atomic_load(&rank->page->ranks[r].end_of_init) &&
            names_worker(text, r))
            return true;
    return false;
}

/* What is wrong with the loss of a worker. */
static const char *misjudged_loss(const struct rank *rank, const struct remote_call *call,
                                  td_status status, const char *text)
{
    bool cut_off = rank->fault == FAULT_CUT && rank->rank == rank->victim;
    if (rank->fault == FAULT_PAUSE || rank->fault == FAULT_STOP)
        return "no worker has died";
    if (!atomic_load(rank->fault_ns))
        return "nothing had happened yet";
    /* A function of a worker that leaves may fail first: its own calls are aborted or refused. */
    bool aborted = rank->fault == FAULT_LEAVE && strstr(text, "shut down") &&
                   (status == TD_ERR_ABORTED || status == TD_ERR_STATE);
    if (status != TD_ERR_PEER && !aborted)
        return "another status was due";
    if (rank->fault == FAULT_EARLY && could_not_start(rank, call, text))
        return NULL;
    if (cut_off)
        return names_one_of(text, call->through) ? NULL : "no worker of the call is named";
    if (!(call->through >> rank->victim & 1))
        return "the victim takes no part in it";
    return names_worker(text, rank->victim) ? NULL : "the victim is not named";
}

void judge_call(struct rank *rank, const struct remote_call *call, int64_t since)
{
    td_status status = td_last_status();
    const char *text = td_last_error();
    int64_t now = td__now_ns(), fault = atomic_load(rank->fault_ns);
    int64_t noticed = now - (since > fault ? since : fault);
    if (is_purpose(call, status, text))
        return;
    const char *wrong = status == TD_ERR_TIMEOUT ? misjudged_timeout(rank, call, text, now - since)
                                                 : misjudged_loss(rank, call, status, text);
    if (!wrong && status == TD_ERR_PEER && noticed > rank_limit_ns(rank->plan))
        wrong = "it was noticed too late";
    if (wrong)
        rank_report(rank,
                    "lane %d, call %d, %s%s to w%d, w%d, %lld elements, after %.2f s: %s: %s: %s",
                    call->lane, call->index, call->async ? "asynchronous " : "",
                    call_name((int)call->kind), call->to, call->third, (long long)call->count,
                    (double)(now - since) / 1e9, wrong, td_status_name(status), text);
    if (fault && status == TD_ERR_PEER)
        rank_noticed(rank, noticed);
}
