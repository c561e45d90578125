/* Shrinking a group: the survivors agree on the ranks that are left.
 *
 * The lowest rank that is present is the leader. The others query it repeatedly for the outcome, which shows the
 * leader that they have joined. When all present ranks have joined, the leader decides, and the others get
 * the outcome with their next query.
 *
 *     leader      queries all: follow me; do you have an outcome?       (once)
 *     others      have joined; what is the outcome?                     (until there is one)
 *
 * When the leader dies, the next rank becomes the leader, and must keep an outcome that a survivor already has.
 * Hence the leader's own query: a rank answers with its outcome, if any, and from then on ignores outcomes of
 * earlier leaders, even one that is in transit. A leader decides only when all present ranks have answered. The
 * endpoint's thread answers queries, also while the program does not call td_group_shrink(), or has returned from
 * it.
 *
 * A query also aborts the group, so that threads that wait in it return, and the rank can join.
 *
 * Exclusions (peer/exclusion.c) that not all ranks know spread with the agreement: a rank first tells another one those
 * that it knows, so that a query does not abort the group without the reason; and an answer has those of the rank that
 * answers. A rank that was excluded itself fails. The call returns only when the processes of excluded ranks that share
 * memory with this one have ended.
 *
 * The state of an agreement stays until the root ends; the root's lock guards it. */
#include "base/fail.h"
#include "base/text.h"
#include "fault/peer_query.h"
#include "group/root.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    QUERY_MS = 500,
    LOSS_MS = 250,
    FIRST_PAUSE_NS = 500000,
    LAST_PAUSE_NS = 20000000,
    FOLLOW = 1, /* in the lower half of a query's value; the upper one is the attempt */
};

enum { ABSENT, ENTERED, DECIDED };

struct agreement {
    struct td__attachment attachment;
    uint64_t key; /* of the group */
    uint32_t attempt;
    int size;
    bool entered; /* this rank has joined */
    int follows;  /* the last leader, a rank in the group; -1: none yet */
    bool decided;
    bool *joined; /* ranks that have queried this one for the outcome */
    bool *left;   /* the outcome: the ranks that are left */
};

static void free_agreement(struct td__attachment *attachment)
{
    struct agreement *agreement = TD__CONTAINER(attachment, struct agreement, attachment);
    free(agreement->joined);
    free(agreement->left);
    free(agreement);
}

static const struct td__attachment_ops agreement_ops = {.free = free_agreement};

/* With the lock held. Creates the agreement if there is none and the group exists; NULL if it does not. */
static struct agreement *find(struct td__root *root, uint64_t key, uint32_t attempt)
{
    struct agreement *agreement = NULL;
    for (struct td__attachment *at = root->attachments; at; at = at->next) {
        agreement = TD__CONTAINER(at, struct agreement, attachment);
        if (at->ops == &agreement_ops && agreement->key == key && agreement->attempt == attempt)
            return agreement;
    }
    const td_group *group = td__root_find(root, key);
    if (!group || !(agreement = calloc(1, sizeof *agreement)))
        return NULL;
    *agreement = (struct agreement){
        .attachment.ops = &agreement_ops,
        .key = key,
        .attempt = attempt,
        .size = group->size,
        .follows = -1,
        .joined = calloc((size_t)group->size, sizeof *agreement->joined),
        .left = calloc((size_t)group->size, sizeof *agreement->left),
    };
    if (!agreement->joined || !agreement->left) {
        free_agreement(&agreement->attachment);
        return NULL;
    }
    td__root_attach(root, &agreement->attachment);
    return agreement;
}

/* ---- Answering ------------------------------------------------------------------------------- */

static void put_state(const struct agreement *agreement, struct td__buffer *answer)
{
    if (!agreement || !agreement->decided) {
        td__buffer_put_u8(answer, agreement && agreement->entered ? ENTERED : ABSENT);
        return;
    }
    td__buffer_put_u8(answer, DECIDED);
    for (int i = 0; i < agreement->size; i++)
        td__buffer_put_u8(answer, agreement->left[i]);
}

void td__shrink_answer(struct td__root *root, int rank, uint64_t key, uint64_t value,
                       struct td__buffer *answer)
{
    pthread_mutex_lock(&root->lock);
    struct agreement *agreement = find(root, key, (uint32_t)(value >> 32));
    td_group *group = td__root_find(root, key);
    int index = group ? td__group_index(group, rank) : -1;
    if (index >= 0)
        td__abort_here(group, rank, TD__ABORT_SHRINK); /* threads that wait in it return */
    if (agreement && index >= 0) {
        if ((uint32_t)value != FOLLOW)
            agreement->joined[index] = true;
        else if (index > agreement->follows)
            agreement->follows = index;
    }
    put_state(agreement, answer);
    pthread_mutex_unlock(&root->lock);
    td__endpoint_put_exclusions(root->endpoint, answer);
}

/* ---- Taking part ----------------------------------------------------------------------------- */

struct attempt {
    td_group *group;
    struct agreement *agreement;
    bool leads;     /* all present ranks follow this one */
    unsigned *told; /* by index: the number of exclusions that it was told */
};

static bool is_present(const struct attempt *attempt, int index)
{
    return td__endpoint_presence(attempt->group->root->endpoint, attempt->group->ranks[index]) ==
           TD__PRESENT;
}

static int find_leader(const struct attempt *attempt)
{
    int index = 0;
    while (index != attempt->group->rank && !is_present(attempt, index))
        index++;
    return index;
}

/* Stores the outcome of `leader`, unless this rank follows a later one. */
static void take_outcome(struct attempt *attempt, int leader, struct td__reader *reader)
{
    struct agreement *agreement = attempt->agreement;
    pthread_mutex_lock(&attempt->group->root->lock);
    bool wanted = !agreement->decided && leader >= agreement->follows;
    for (int i = 0; i < agreement->size; i++) {
        bool left = td__reader_u8(reader) != 0;
        if (wanted)
            agreement->left[i] = left;
    }
    agreement->decided = agreement->decided || (wanted && !reader->failed);
    pthread_mutex_unlock(&attempt->group->root->lock);
}

static void tell_exclusions(struct attempt *attempt, int index)
{
    struct td__endpoint *endpoint = attempt->group->root->endpoint;
    unsigned known = td__endpoint_exclusions(endpoint);
    if (attempt->told[index] != known &&
        td__endpoint_tell_exclusions(endpoint, attempt->group->ranks[index],
                                     td__deadline_in_ms(QUERY_MS)))
        attempt->told[index] = known;
}

/* Queries one member, and stores its outcome if it has one. False if it does not answer. */
static bool query(struct attempt *attempt, int index, uint32_t what, int leader)
{
    struct td__buffer answer = {0};
    tell_exclusions(attempt, index);
    bool answered = !td__endpoint_query(
        attempt->group->root->endpoint, attempt->group->ranks[index], TD__TOPIC_SHRINK,
        attempt->group->key, (uint64_t)attempt->agreement->attempt << 32 | what,
        td__deadline_in_ms(QUERY_MS), &answer);
    if (answered) {
        struct td__reader reader = td__reader_of(answer.data, answer.size);
        if (td__reader_u8(&reader) == DECIDED)
            take_outcome(attempt, leader, &reader);
        td__endpoint_take_exclusions(attempt->group->root->endpoint, &reader);
    }
    td__buffer_free(&answer);
    return answered;
}

/* A rank that still waits in a call of the group is to return with the name of the lost one, which a query does not carry; the
 * rank that has told this one may not have told that one yet. */
static void tell_loss(struct attempt *attempt, int index)
{
    td_group *group = attempt->group;
    uint64_t why = td__abort_shrink(group);
    pthread_mutex_lock(&group->root->lock);
    bool joined = attempt->agreement->joined[index];
    pthread_mutex_unlock(&group->root->lock);
    if (!joined && why != TD__ABORT_SHRINK)
        td__endpoint_notify(group->root->endpoint, group->ranks[index], TD__TOPIC_ABORT, group->key,
                            why, td__deadline_in_ms(QUERY_MS));
}

static void become_leader(struct attempt *attempt)
{
    td_group *group = attempt->group;
    bool all = true;
    pthread_mutex_lock(&attempt->group->root->lock);
    if (attempt->agreement->follows < group->rank)
        attempt->agreement->follows = group->rank;
    pthread_mutex_unlock(&attempt->group->root->lock);
    for (int i = 0; i < group->size; i++) {
        if (i == group->rank || !is_present(attempt, i))
            continue;
        tell_exclusions(attempt, i); /* the reason of a loss, so it comes first */
        tell_loss(attempt, i);
        all &= query(attempt, i, FOLLOW, group->rank);
    }
    attempt->leads = all;
}

/* If the others took this rank for dead and follow a later leader, that one has the outcome. */
static void lead(struct attempt *attempt)
{
    struct agreement *agreement = attempt->agreement;
    int own = attempt->group->rank;
    bool all = true;
    pthread_mutex_lock(&attempt->group->root->lock);
    int follows = agreement->follows;
    for (int i = 0; i < agreement->size && follows == own; i++) {
        agreement->left[i] = i == own || is_present(attempt, i);
        all &= !agreement->left[i] || i == own || agreement->joined[i];
    }
    agreement->decided = all && follows == own;
    pthread_mutex_unlock(&attempt->group->root->lock);
    if (follows > own)
        query(attempt, follows, 0, follows);
}

static bool has_outcome(const struct attempt *attempt)
{
    pthread_mutex_lock(&attempt->group->root->lock);
    bool decided = attempt->agreement->decided;
    pthread_mutex_unlock(&attempt->group->root->lock);
    return decided;
}

static td_status fail_late(const struct attempt *attempt, int leader, int64_t timeout_ms)
{
    const td_group *group = attempt->group;
    char missing[256] = "";
    int count = 0;
    pthread_mutex_lock(&attempt->group->root->lock);
    for (int i = 0; i < group->size && strlen(missing) < sizeof missing - 16; i++)
        if (leader == group->rank && i != leader && is_present(attempt, i) &&
            !attempt->agreement->joined[i])
            td__text_add(missing, sizeof missing, "%s%d", count++ ? ", " : "", group->ranks[i]);
    pthread_mutex_unlock(&attempt->group->root->lock);
    if (!count)
        return td_fail(TD_ERR_TIMEOUT,
                       "td_group_shrink on group \"%s\": rank %d, which counts the survivors, has "
                       "not finished within %lld ms: it, or another rank that is alive, has not "
                       "called td_group_shrink()",
                       group->name, group->ranks[leader], (long long)timeout_ms);
    return td_fail(TD_ERR_TIMEOUT,
                   "td_group_shrink on group \"%s\": rank%s %s %s alive, but %s not called "
                   "td_group_shrink() within %lld ms",
                   group->name, count > 1 ? "s" : "", missing, count > 1 ? "are" : "is",
                   count > 1 ? "have" : "has", (long long)timeout_ms);
}

/* The agreement needs an answer to the exclusions of this rank: it may be the one that is excluded. */
static td_status agree(struct attempt *attempt, td__deadline deadline, int64_t timeout_ms)
{
    td_group *group = attempt->group;
    struct td__endpoint *endpoint = group->root->endpoint;
    int64_t pause = FIRST_PAUSE_NS;
    for (int i = 0; i < group->size; i++)
        td__endpoint_watch(endpoint, group->ranks[i]);
    for (;;) {
        for (int i = 0; i < group->size; i++)
            td__endpoint_look(endpoint, group->ranks[i]);
        int leader = find_leader(attempt);
        bool excluding = td__endpoint_is_excluding(endpoint);
        if (leader != group->rank)
            query(attempt, leader, 0, leader);
        else if (!attempt->leads)
            become_leader(attempt);
        else if (!excluding)
            lead(attempt);
        TD_TRY(td__endpoint_check_excluded(endpoint, "td_group_shrink"));
        if (!excluding && has_outcome(attempt))
            return td__endpoint_fence(endpoint, deadline);
        if (!td__pause_longer(&pause, LAST_PAUSE_NS, deadline))
            return fail_late(attempt, leader, timeout_ms);
    }
}

/* ---- The new group --------------------------------------------------------------------------- */

/* "world shrink 1". A name that the caller has given need not be unique, so a hash is appended to it. */
static void make_name(const td_group *group, uint32_t attempt, char name[160])
{
    char hash[32] = "";
    if (group->named)
        snprintf(hash, sizeof hash, "#%06llx%s", (unsigned long long)(group->key & 0xffffff),
                 group->root->tag);
    snprintf(name, 160, "%.100s shrink %u%s", group->name, attempt + 1, hash);
}

static td_status make_rest(const struct attempt *attempt, const td_group_options *options,
                           td_group **rest)
{
    td_group *group = attempt->group;
    int count = 0, *ranks = malloc(sizeof *ranks * (size_t)group->size);
    td_group_options own = *options;
    char name[160], key[64];
    if (!ranks)
        return td__fail_nomem("td_group_shrink");
    for (int i = 0; i < group->size; i++)
        if (attempt->agreement->left[i])
            ranks[count++] = group->ranks[i];
    make_name(group, attempt->agreement->attempt, name);
    snprintf(key, sizeof key, "%016llx/%u", (unsigned long long)group->key,
             attempt->agreement->attempt);
    own.name = options->name ? options->name : name;
    own.backend = options->backend ? options->backend : group->chosen;
    own.backend_options = options->backend_options ? options->backend_options
                                                   : group->host.context.options;
    own.timeout_ms = options->timeout_ms ? options->timeout_ms : group->timeout_ms;
    td_status status = TD_OK;
    if (!attempt->agreement->left[group->rank])
        status = td_fail(TD_ERR_PEER,
                         "td_group_shrink on group \"%s\": the other ranks took rank %d for dead "
                         "and continued without it",
                         group->name, group->ranks[group->rank]);
    if (!status)
        status = td__group_add(group->root, ranks, count, key, &own, rest);
    if (!status)
        (*rest)->named = options->name != NULL;
    free(ranks);
    return status;
}

/* The reason of this rank, for the others. If it has its error from another one, its failure detector may not have noticed the
 * loss yet. */
static uint64_t find_reason(const td_group *group)
{
    struct td__endpoint *endpoint = group->root->endpoint;
    td__deadline deadline = td__deadline_in_ms(LOSS_MS);
    bool in_time = atomic_load(&group->broken) == TD_ERR_PEER && !atomic_load(&group->aborted);
    for (;;) {
        unsigned known = td__endpoint_losses(endpoint);
        uint64_t why = td__abort_shrink(group);
        if (why != TD__ABORT_SHRINK || !in_time)
            return why;
        in_time = td__endpoint_await_loss(endpoint, known, deadline);
    }
}

/* The other threads of this rank return from their calls in the group, and those of the other ranks. Each gets to know the
 * exclusions first: they are the reason of a loss. */
static td_status enter(struct attempt *attempt)
{
    td_group *group = attempt->group;
    bool notify = !atomic_load(&group->aborted);
    td__abort_excluded(group->root);
    for (int i = 0; notify && i < group->size; i++)
        if (i != group->rank && is_present(attempt, i))
            tell_exclusions(attempt, i);
    td__abort_own(group, find_reason(group), notify);
    pthread_mutex_lock(&group->root->lock);
    attempt->agreement = find(group->root, group->key, group->shrunk);
    if (attempt->agreement)
        attempt->agreement->entered = true;
    pthread_mutex_unlock(&group->root->lock);
    return attempt->agreement ? TD_OK : td__fail_nomem("td_group_shrink");
}

static td_status shrink(td_group *group, const td_group_options *options, td_group **survivors)
{
    struct attempt attempt = {.group = group};
    int64_t timeout_ms = options->timeout_ms ? options->timeout_ms : td__call_timeout(group);
    td__deadline deadline = td__deadline_in_ms(timeout_ms);
    TD_TRY(td__endpoint_check_excluded(group->root->endpoint, "td_group_shrink"));
    attempt.told = calloc((size_t)group->size, sizeof *attempt.told);
    td_status status = attempt.told ? enter(&attempt) : td__fail_nomem("td_group_shrink");
    if (!status)
        status = agree(&attempt, deadline, timeout_ms);
    free(attempt.told);
    TD_TRY(status);
    TD_TRY(make_rest(&attempt, options, survivors));
    group->shrunk++;
    return TD_OK;
}

td_status td_group_shrink(td_group *group, const td_group_options *options, td_group **survivors)
{
    td_group_options none = {0};
    options = options ? options : &none;
    group = td__group_enter(group, "td_group_shrink");
    if (!group)
        return TD_ERR_STATE;
    if (!survivors)
        return td_fail(TD_ERR_INVALID, "td_group_shrink: the result is NULL");
    TD_TRY(td__check_group_options("td_group_shrink", options, group->root));
    td__group_use(group);
    td_status status = shrink(group, options, survivors);
    td__group_unuse(group);
    return status;
}
