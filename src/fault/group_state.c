/* How a group has failed, and what belongs to a root; see group_state.h. */
#include "fault/group_state.h"

#include "base/fail.h"

#include <stdlib.h>
#include <string.h>

/* With the group's lock. */
static void set_failure(struct td__failure *failure, td_status status, const char *reason)
{
    if (!failure || atomic_load(&failure->status))
        return;
    failure->reason = strdup(reason);
    atomic_store(&failure->status, (int)status);
}

void td__group_break(td_group *group, td_status status)
{
    struct td__error error;
    td__error_save(&error);
    char *reason = strdup(td__error_text());
    pthread_mutex_lock(&group->lock);
    bool first = !atomic_load(&group->broken);
    if (first) {
        set_failure(group->failure, status, td__error_text());
        group->reason = reason;
        reason = NULL;
        atomic_store(&group->broken, (int)status);
    }
    pthread_mutex_unlock(&group->lock);
    free(reason);
    for (struct td__part *part = td__next_part(group, NULL); part && first;
         part = td__next_part(group, part))
        if (part->watched && part->ops->abort)
            part->ops->abort(part->self);
    td__error_restore(&error);
}

void td__failure_release(struct td__failure *failure)
{
    if (!failure || atomic_fetch_sub(&failure->owners, 1) != 1)
        return;
    free(failure->reason);
    free(failure);
}

td_status td__failure_check(const struct td__failure *failure)
{
    int status = failure ? atomic_load_explicit(&failure->status, memory_order_acquire) : TD_OK;
    return status ? td_fail((td_status)status, "%s", failure->reason ? failure->reason : "")
                  : TD_OK;
}

static td_status find_lost(const td_group *group)
{
    struct td__endpoint *endpoint = group->root->endpoint;
    for (int i = 0; i < group->size; i++) {
        enum td__presence presence = td__endpoint_presence(endpoint, group->ranks[i]);
        if (presence == TD__ENDED || presence == TD__CUT_OFF)
            return td_fail(TD_ERR_PEER, "group \"%s\": %s %s", group->name,
                           td__endpoint_describe(endpoint, group->ranks[i]),
                           td__endpoint_exit_reason(endpoint, group->ranks[i]));
    }
    return TD_OK;
}

/* The group's backend of host memory, or one of devices, which has made group->failure. */
static bool is_watched(td_group *group)
{
    pthread_mutex_lock(&group->lock);
    bool watched = group->failure || group->host.watched;
    pthread_mutex_unlock(&group->lock);
    return watched;
}

void td__break_lost_groups(struct td__root *root)
{
    td_group *group;
    if (!td__endpoint_losses(root->endpoint))
        return;
    pthread_mutex_lock(&root->lock);
    LIST_FOREACH (group, &root->groups, link) {
        if (group->rank < 0 || atomic_load(&group->broken))
            continue;
        if (is_watched(group) && find_lost(group))
            td__group_break(group, TD_ERR_PEER);
    }
    pthread_mutex_unlock(&root->lock);
}

td_status td__group_state(const td_group *group)
{
    int status = atomic_load_explicit(&group->broken, memory_order_acquire);
    return status ? td_fail((td_status)status, "%s", group->reason ? group->reason : "") : TD_OK;
}

int td__group_index(const td_group *group, int rank)
{
    if (rank >= 0 && rank < group->size && group->ranks[rank] == rank)
        return rank;
    for (int i = 0; i < group->size; i++)
        if (group->ranks[i] == rank)
            return i;
    return -1;
}

td_group *td__root_find(struct td__root *root, uint64_t key)
{
    td_group *group;
    LIST_FOREACH (group, &root->groups, link)
        if (group->key == key && group->rank >= 0)
            break;
    return group;
}

struct td__attachment *td__root_attachment(struct td__root *root,
                                           const struct td__attachment_ops *ops)
{
    struct td__attachment *attachment = root->attachments;
    while (attachment && attachment->ops != ops)
        attachment = attachment->next;
    return attachment;
}

void td__root_attach(struct td__root *root, struct td__attachment *attachment)
{
    attachment->next = root->attachments;
    root->attachments = attachment;
}

void td__root_leave(struct td__root *root)
{
    pthread_mutex_lock(&root->lock); /* the endpoint's thread may attach one, before the first */
    struct td__attachment *at = root->attachments;
    pthread_mutex_unlock(&root->lock);
    for (; at; at = at->next)
        if (at->ops->leave)
            at->ops->leave(at, root);
}

void td__root_detach(struct td__root *root)
{
    while (root->attachments) {
        struct td__attachment *attachment = root->attachments;
        root->attachments = attachment->next;
        attachment->ops->free(attachment);
    }
}
