/* Calls of backends with submit(), after they were started.
 *
 * Such a backend completes the work of a call on a device when the call is enqueued. What happens later is known only to
 * the backend, on a thread of its own: td_backend_fail() breaks the group then, and td_backend_compare() finds out whether
 * a call that does not end was made by the other ranks, too. The calls are compared as those of ranks on several hosts
 * are: by queries, from a history (fault/call_history.h). Where the native backend keeps one, it is shared. */
#include "base/fail.h"
#include "fault/call_history.h"
#include "group/process_group.h"

#include <stdlib.h>

#define PAUSE_NS 5000000

td_status td__submits_begin(td_group *group)
{
    if (!group->failure) {
        struct td__failure *failure = calloc(1, sizeof *failure);
        if (!failure)
            return td__fail_nomem("group");
        atomic_store(&failure->owners, 1);
        pthread_mutex_lock(&group->lock);
        group->failure = failure;
        pthread_mutex_unlock(&group->lock);
    }
    if (group->history || group->size == 1)
        return TD_OK;
    struct td__call_history *history = td__call_history_create();
    if (!history)
        return td__fail_nomem("group");
    pthread_mutex_lock(&group->root->lock); /* which other ranks' queries hold */
    group->history = history;
    group->owns_history = true;
    pthread_mutex_unlock(&group->root->lock);
    return TD_OK;
}

void td__submits_end(td_group *group)
{
    if (group->owns_history)
        td__call_history_retire(group->history, group);
    group->owns_history = false;
    td__failure_release(group->failure);
    group->failure = NULL;
}

static struct td__operation any_call(const td_group *group, uint64_t sequence,
                                     td__deadline deadline)
{
    return (struct td__operation){.call.kind = TD_OP_BARRIER,
                                  .call.root = -1,
                                  .call.sequence = sequence,
                                  .called_root = -1,
                                  .deadline = deadline,
                                  .group = group->name};
}

void td__submit_note(td_group *group, struct td__operation *operation)
{
    operation->called_root = operation->call.root;
    operation->group = group->name;
    operation->parts = group->size;
    operation->past = 0;
    if (group->history)
        td__call_history_submit(group->history, operation);
}

static bool has_company(const td_group *group)
{
    bool others = false;
    for (int i = 0; i < group->size; i++)
        others = others ||
                 (i != group->rank &&
                  td__endpoint_presence(group->root->endpoint, group->ranks[i]) == TD__PRESENT);
    return others;
}

/* After a difference it stays until the others have left, or the deadline: they find it by queries to this rank. */
td_status td__submits_verify(td_group *group, td__deadline deadline)
{
    if (!group->owns_history || atomic_load(&group->broken))
        return TD_OK;
    struct td__operation last = any_call(group, group->sequence, deadline);
    td_status status = td__call_history_verify(group->history, group, &last);
    if (status != TD_ERR_MISMATCH)
        return TD_OK;
    td__group_break(group, status);
    while (has_company(group) && !td__deadline_passed(deadline))
        td__sleep_ns(PAUSE_NS);
    return status;
}

static td_group *group_of(const td_backend_context *context)
{
    return TD__CONTAINER(context, struct td__part, context)->group;
}

void td_backend_fail(const td_backend_context *context, td_status status)
{
    td__group_break(group_of(context), status);
}

td_status td_backend_compare(const td_backend_context *context, uint64_t sequence, int rank)
{
    td_group *group = group_of(context);
    struct td__operation call = any_call(group, sequence, TD__NEVER);
    if (!group->history || rank == group->rank)
        return TD_OK;
    return td__call_history_compare(group->history, group, group->ranks[rank], &call);
}
