/* Aborting a group; see group_state.h and td_group_abort().
 *
 * An abort is a status that is set once, under the group's lock, and read without it. Waiting threads check it:
 * the shared memory of this host is marked, too, and sleeping threads are woken (td__endpoint_wake_waiters()).
 * Other ranks are notified one by one; a rank that has not created the group yet keeps the notification
 * (td__early_abort). */
#include "base/fail.h"
#include "base/text.h"
#include "fault/peer_query.h"

#include <stdio.h>
#include <stdlib.h>

enum { NOTIFY_MS = 1000 };

struct td__early_abort { /* of a group that this rank has not created yet */
    struct td__early_abort *next;
    uint64_t key;
    int rank;
    uint64_t why;
};

/* ---- The reason ------------------------------------------------------------------------------- */

enum { NAMED = 3 }; /* lost ranks in a text, at most */

/* The number, from the lowest bit on: the reason (4 bits); with MIXED the kind of the collective (4), the rank in
 * it (24), its sequence number (32); with SHRINK the presence of a lost rank (4), the rank (24) and its wait
 * status (32), or 0; with BACKENDS the other rank (24), behind 4 bits that are 0. */
uint64_t td__abort_mixed(int rank, td_op_kind kind, uint64_t sequence)
{
    return TD__ABORT_MIXED | (uint64_t)kind << 4 | ((uint64_t)rank & 0xffffff) << 8 |
           sequence << 32;
}

uint64_t td__abort_shrink(const td_group *group)
{
    const struct td__endpoint *endpoint = group->root->endpoint;
    for (int i = 0; i < group->size; i++) {
        int rank = group->ranks[i];
        enum td__presence presence = td__endpoint_presence(endpoint, rank);
        if (presence != TD__PRESENT)
            return TD__ABORT_SHRINK | (uint64_t)presence << 4 | ((uint64_t)rank & 0xffffff) << 8 |
                   (uint64_t)(uint32_t)td__endpoint_wait_status(endpoint, rank) << 32;
    }
    return TD__ABORT_SHRINK;
}

uint64_t td__abort_backends(int rank)
{
    return TD__ABORT_BACKENDS | ((uint64_t)rank & 0xffffff) << 8;
}

/* The rank that shrinks the group may have noticed the loss before this one. */
static void learn_loss(struct td__endpoint *endpoint, uint64_t why)
{
    if ((why & 15) == TD__ABORT_SHRINK)
        td__endpoint_learn(endpoint, why >> 8 & 0xffffff, why >> 4 & 15,
                           (int)(uint32_t)(why >> 32));
}

static td_status explain_shrink(const td_group *group, int rank)
{
    struct td__endpoint *endpoint = group->root->endpoint;
    int named = 0;
    char lost[1280] = "";
    for (int i = 0; i < group->size && named < NAMED; i++)
        if (td__endpoint_presence(endpoint, group->ranks[i]) != TD__PRESENT) {
            td__text_add(lost, sizeof lost, "%.120s %.240s; ",
                         td__endpoint_describe(endpoint, group->ranks[i]),
                         td__endpoint_exit_reason(endpoint, group->ranks[i]));
            named++;
        }
    return td_fail(TD_ERR_PEER, "group \"%s\": %srank %d has called td_group_shrink()", group->name,
                   lost, rank);
}

/* Sets the last error for the notification of `rank`. `why` is from another process: any value is valid. */
static td_status explain(const td_group *group, int rank, uint64_t why)
{
    if ((why & 15) == TD__ABORT_MIXED)
        return td_fail(TD_ERR_MISMATCH,
                       "call #%llu on group \"%s\": rank %d called monitored_barrier, rank %d "
                       "called %s; every rank must make the same calls in the same order",
                       (unsigned long long)(why >> 32), group->name, rank,
                       (int)(why >> 8 & 0xffffff), td_op_kind_name((td_op_kind)(why >> 4 & 15)));
    if ((why & 15) == TD__ABORT_SHRINK)
        return explain_shrink(group, rank);
    if ((why & 15) == TD__ABORT_BACKENDS)
        return td_fail(
            TD_ERR_MISMATCH,
            "group \"%s\": rank %d and rank %d have different backends for memory of the "
            "same kind of devices; the error of rank %d has both, and the reason",
            group->name, rank, (int)(why >> 8 & 0xffffff), rank);
    return td_fail(TD_ERR_ABORTED, "group \"%s\" was aborted by %s", group->name,
                   td__endpoint_describe(group->root->endpoint, rank));
}

/* ---- Aborting --------------------------------------------------------------------------------- */

/* With the last error. */
static void abort_parts(td_group *group, td_status status)
{
    td__group_break(group, status);
    atomic_store(&group->aborted, true);
    for (struct td__part *part = td__next_part(group, NULL); part;
         part = td__next_part(group, part))
        if (part->ops->abort)
            part->ops->abort(part->self);
}

void td__abort_here(td_group *group, int rank, uint64_t why)
{
    abort_parts(group, explain(group, rank, why));
}

/* TD_OK if neither this rank nor another member was excluded. */
static td_status explain_exclusion(const td_group *group)
{
    struct td__endpoint *endpoint = group->root->endpoint;
    char what[160];
    snprintf(what, sizeof what, "group \"%.120s\"", group->name);
    TD_TRY(td__endpoint_check_excluded(endpoint, what));
    for (int i = 0; i < group->size; i++)
        if (td__endpoint_is_excluded(endpoint, group->ranks[i]) &&
            td__endpoint_presence(endpoint, group->ranks[i]) != TD__PRESENT)
            return td_fail(TD_ERR_PEER, "%s: %s %s", what,
                           td__endpoint_describe(endpoint, group->ranks[i]),
                           td__endpoint_exit_reason(endpoint, group->ranks[i]));
    return TD_OK;
}

void td__abort_excluded(struct td__root *root)
{
    struct td__error error;
    td_group *group;
    td__error_save(&error);
    pthread_mutex_lock(&root->lock);
    LIST_FOREACH (group, &root->groups, link) {
        td_status status = group->rank >= 0 && !atomic_load(&group->aborted)
                               ? explain_exclusion(group)
                               : TD_OK;
        if (status)
            abort_parts(group, status);
    }
    pthread_mutex_unlock(&root->lock);
    td__error_restore(&error);
}

void td__abort_receive(struct td__root *root, int rank, uint64_t key, uint64_t why,
                       struct td__buffer *answer)
{
    (void)answer;
    learn_loss(root->endpoint, why);
    pthread_mutex_lock(&root->lock);
    td_group *group = td__root_find(root, key);
    if (group) {
        td__abort_here(group, rank, why);
    } else {
        struct td__early_abort *early = malloc(sizeof *early);
        if (early) {
            *early = (struct td__early_abort){
                .next = root->aborts, .key = key, .rank = rank, .why = why};
            root->aborts = early;
        }
    }
    pthread_mutex_unlock(&root->lock);
}

void td__abort_early(td_group *group)
{
    for (struct td__early_abort *at = group->root->aborts; at; at = at->next)
        if (at->key == group->key)
            td__abort_here(group, at->rank, at->why);
}

void td__abort_forget(struct td__root *root)
{
    while (root->aborts) {
        struct td__early_abort *next = root->aborts->next;
        free(root->aborts);
        root->aborts = next;
    }
}

/* A successful call leaves the last error as it was. */
void td__abort_own(td_group *group, uint64_t why, bool notify)
{
    struct td__endpoint *endpoint = group->root->endpoint;
    struct td__error error;
    td__error_save(&error);
    td__abort_here(group, group->root->rank, why);
    for (int i = 0; notify && i < group->size; i++)
        if (i != group->rank && td__endpoint_presence(endpoint, group->ranks[i]) == TD__PRESENT)
            td__endpoint_notify(endpoint, group->ranks[i], TD__TOPIC_ABORT, group->key, why,
                                td__deadline_in_ms(NOTIFY_MS));
    td__error_restore(&error);
}
