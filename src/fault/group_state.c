/* How a group has failed, and what belongs to a root; see group_state.h. */
#include "fault/group_state.h"

#include "base/fail.h"

#include <stdlib.h>
#include <string.h>

void td__group_break(td_group *group, td_status status)
{
    char *reason = strdup(td_last_error());
    pthread_mutex_lock(&group->lock);
    if (!atomic_load(&group->broken)) {
        group->reason = reason;
        reason = NULL;
        atomic_store(&group->broken, (int)status);
    }
    pthread_mutex_unlock(&group->lock);
    free(reason);
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
    for (struct td__attachment *at = root->attachments; at; at = at->next)
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
