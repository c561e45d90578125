/* What ranks query of each other in a monitored barrier, and the ranks that have withdrawn from one; see
 * recovery/monitored_barrier.c. */
#include "fault/peer_query.h"

#include <stdlib.h>

enum { ASK_MS = 250 };

/* A rank of the root has timed out in this barrier, and in those before that rank 0 has not settled. The root's lock
 * guards the list. */
struct td__withdrawal {
    struct td__withdrawal *next;
    uint64_t key, number;
    int rank;
};

static struct td__withdrawal **find_withdrawal(struct td__root *root, uint64_t key, int rank)
{
    struct td__withdrawal **at = &root->withdrawals;
    while (*at && ((*at)->key != key || (*at)->rank != rank))
        at = &(*at)->next;
    return at;
}

static void note_withdrawal(struct td__root *root, uint64_t key, int rank, uint64_t number)
{
    struct td__withdrawal **at = find_withdrawal(root, key, rank);
    if (!*at && (*at = malloc(sizeof **at)))
        **at = (struct td__withdrawal){.key = key, .rank = rank};
    if (*at && (*at)->number < number)
        (*at)->number = number;
}

/* One that holds for later barriers, too, stays. */
static bool end_withdrawal(struct td__root *root, uint64_t key, int rank, uint64_t number)
{
    struct td__withdrawal **at = find_withdrawal(root, key, rank), *withdrawal = *at;
    bool withdrawn = withdrawal && withdrawal->number >= number;
    if (withdrawal && withdrawal->number <= number) {
        *at = withdrawal->next;
        free(withdrawal);
    }
    return withdrawn;
}

void td__barrier_settle(td_group *group, uint64_t number, void (*fn)(void *arg, int index),
                        void *arg)
{
    pthread_mutex_lock(&group->root->lock);
    for (int i = 0; group->root->withdrawals && i < group->size; i++)
        if (end_withdrawal(group->root, group->key, group->ranks[i], number))
            fn(arg, i);
    atomic_store(&group->monitored_over, number);
    pthread_mutex_unlock(&group->root->lock);
}

void td__barrier_forget(struct td__root *root)
{
    while (root->withdrawals) {
        struct td__withdrawal *next = root->withdrawals->next;
        free(root->withdrawals);
        root->withdrawals = next;
    }
}

/* ---- Queries --------------------------------------------------------------------------------- */

/* With a value `rank` withdraws from the barrier of that number. The group may not have been made here yet. */
void td__barrier_answer(struct td__root *root, int rank, uint64_t key, uint64_t value,
                        struct td__buffer *answer)
{
    struct td__flight_last last;
    /* First of all: a rank that is in a collective and has not joined the barrier had not joined it before. */
    td__recorder_last(root, key, &last);
    struct td__barrier_progress own = {.sequence = last.blocking, .kind = last.kind};
    pthread_mutex_lock(&root->lock);
    td_group *group = td__root_find(root, key);
    if (group) {
        own.begun = atomic_load(&group->monitored);
        own.over = atomic_load(
            &group->monitored_over); /* before the arrivals, which are set first */
        own.doubt = atomic_load(&group->monitored_doubt);
    }
    int index = group && group->monitored_arrivals ? td__group_index(group, rank) : -1;
    if (index >= 0)
        own.arrived = atomic_load(&group->monitored_arrivals[index]);
    if (own.over < value)
        note_withdrawal(root, key, rank, value);
    pthread_mutex_unlock(&root->lock);
    td__buffer_put_u64(answer, own.sequence);
    td__buffer_put_u32(answer, own.kind);
    td__buffer_put_u64(answer, own.begun);
    td__buffer_put_u64(answer, own.over);
    td__buffer_put_u64(answer, own.doubt);
    td__buffer_put_u64(answer, own.arrived);
}

bool td__barrier_query(const td_group *group, int index, uint64_t withdraw,
                       struct td__barrier_progress *progress)
{
    struct td__buffer answer = {0};
    bool known = false;
    if (!td__endpoint_query(group->root->endpoint, group->ranks[index], TD__TOPIC_BARRIER,
                            group->key, withdraw, td__deadline_in_ms(ASK_MS), &answer)) {
        struct td__reader reader = td__reader_of(answer.data, answer.size);
        progress->sequence = td__reader_u64(&reader);
        progress->kind = (td_op_kind)td__reader_u32(&reader);
        progress->begun = td__reader_u64(&reader);
        progress->over = td__reader_u64(&reader);
        progress->doubt = td__reader_u64(&reader);
        progress->arrived = td__reader_u64(&reader);
        known = td__reader_done(&reader);
    }
    td__buffer_free(&answer);
    return known;
}
