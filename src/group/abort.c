/* Giving a group up; see abort.h and td_group_abort().
 *
 * The alarm is a status that is set once, under the group's lock, and read without it. Whoever waits sees
 * it: ranks of this host at once, since the memory they share is marked as well, and those on links and
 * in messages at their next look, 50 ms later at most. Other ranks are told one by one; one that has not
 * made the group yet remembers its number. */
#include "group/abort.h"

#include "base/fail.h"
#include "group/inquiry.h"
#include "group/root.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TELL_MS = 1000 };

struct td__given_up { /* a group that is not made here yet */
    struct td__given_up *next;
    uint64_t key;
    int rank;
};

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
    return status ? td__fail((td_status)status, "%s", group->reason ? group->reason : "") : TD_OK;
}

void td__abort_here(td_group *group, int rank)
{
    td__fail(TD_ERR_ABORTED, "group \"%s\" was aborted by %s", group->name,
             td__endpoint_describe(group->root->endpoint, rank));
    td__group_break(group, TD_ERR_ABORTED);
    if (group->ops && group->ops->abort)
        group->ops->abort(group->self);
}

void td__abort_hear(struct td__root *root, uint64_t key, int rank)
{
    pthread_mutex_lock(&root->lock);
    td_group *group = td__root_find(root, key);
    if (group) {
        td__abort_here(group, rank);
    } else {
        struct td__given_up *given_up = malloc(sizeof *given_up);
        if (given_up) {
            *given_up = (struct td__given_up){.next = root->given_up, .key = key, .rank = rank};
            root->given_up = given_up;
        }
    }
    pthread_mutex_unlock(&root->lock);
}

void td__abort_recall(td_group *group)
{
    for (struct td__given_up *at = group->root->given_up; at; at = at->next)
        if (at->key == group->key)
            td__abort_here(group, at->rank);
}

void td__abort_forget(struct td__root *root)
{
    while (root->given_up) {
        struct td__given_up *next = root->given_up->next;
        free(root->given_up);
        root->given_up = next;
    }
}

/* A successful call leaves the last error as it was. */
td_status td__abort_quietly(td_group *group)
{
    char message[1024];
    snprintf(message, sizeof message, "%s", td_last_error());
    td__abort_here(group, group->root->rank);
    return td__fail(TD_OK, "%s", message);
}

td_status td_group_abort(td_group *group)
{
    group = td__group_enter(group, "td_group_abort");
    if (!group)
        return TD_ERR_STATE;
    struct td__endpoint *endpoint = group->root->endpoint;
    char message[1024];
    snprintf(message, sizeof message, "%s", td_last_error());
    td__abort_here(group, group->root->rank);
    for (int i = 0; i < group->size; i++)
        if (i != group->rank && td__endpoint_presence(endpoint, group->ranks[i]) == TD__PRESENT) {
            struct td__buffer answer = {0};
            td__endpoint_ask(endpoint, group->ranks[i], TD__TOPIC_ABORT, group->key, 0,
                             td__deadline_in_ms(TELL_MS), &answer);
            td__buffer_free(&answer);
        }
    td__fail(TD_OK, "%s", message);
    return TD_OK;
}
