/* Admitting newcomers: the members of a group and the processes that ask make a new world.
 *
 *     first member     finds the newcomers on the list in the store, gives each a rank, waits for their cards; those that
 *                      do not answer are removed from the list, and the others get ranks again
 *     members          all learn how many there are; with none, that was all
 *     members          gather their new cards; the first one puts the cards of all into the store for the newcomers, and
 *                      broadcasts them to the members (new_world.h)
 *     all              a barrier in the new world
 *     members          decide in the old group whether that was passed by all of them
 *     all              a broadcast in the new world: it stands. Newcomers that do not get it ask again
 *
 * If a newcomer dies before the barrier, the members stay in the old group, and look at the list again. If a member dies,
 * they must not disagree on whether the new world stands. So they decide in two steps:
 *
 *     all_reduce of the votes      fails, or a vote is against it: ABORTED
 *                                  all are for it: AGREED
 *     barrier                      passed: COMMITTED, which is only possible if all are AGREED
 *                                  failed: queries the others; if one is ABORTED, none is COMMITTED: ABORTED; if all that
 *                                  are present are AGREED or COMMITTED: COMMITTED
 *
 * The endpoint answers these queries as long as the root of the old group lasts. */
#include "base/auth.h"
#include "base/fail.h"
#include "fault/peer_query.h"
#include "recovery/new_world.h"
#include "recovery/newcomers.h"
#include "store/peer_watch.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    ANSWER_MS = 2000,  /* for the cards of newcomers */
    CONFIRM_MS = 5000, /* for the barrier in the new world */
    GRACE_MS = 10000,  /* more time for other members */
    QUERY_MS = 500,
    ATTEMPTS = 3,
    AGAIN_NS = 20000000, /* until newcomers ask again */
    FIRST_PAUSE_NS = 500000,
    LAST_PAUSE_NS = 20000000,
};

static const char *const what = "td_group_admit";

/* ---- Deciding -------------------------------------------------------------------------------- */

enum { NONE, VOTING, ABORTED, AGREED, COMMITTED };

struct decision { /* the last one of a group */
    struct td__attachment attachment;
    uint64_t key;
    uint64_t number;
    int state;
};

static void free_decision(struct td__attachment *attachment)
{
    free(TD__CONTAINER(attachment, struct decision, attachment));
}

static const struct td__attachment_ops decision_ops = {.free = free_decision};

/* With the root's lock. */
static struct decision *find_decision(struct td__root *root, uint64_t key)
{
    for (struct td__attachment *at = root->attachments; at; at = at->next) {
        struct decision *decision = TD__CONTAINER(at, struct decision, attachment);
        if (at->ops == &decision_ops && decision->key == key)
            return decision;
    }
    return NULL;
}

void td__admit_answer(struct td__root *root, int rank, uint64_t key, uint64_t value,
                      struct td__buffer *answer)
{
    (void)rank;
    pthread_mutex_lock(&root->lock);
    const struct decision *decision = find_decision(root, key);
    int state = decision && decision->number == value ? decision->state : NONE;
    pthread_mutex_unlock(&root->lock);
    td__buffer_put_u8(answer, (uint8_t)state);
}

static void set_state(td_group *group, int state)
{
    pthread_mutex_lock(&group->root->lock);
    struct decision *decision = find_decision(group->root, group->key);
    decision->state = state;
    pthread_mutex_unlock(&group->root->lock);
}

static td_status begin_decision(td_group *group, uint64_t *number)
{
    struct td__root *root = group->root;
    pthread_mutex_lock(&root->lock);
    struct decision *decision = find_decision(root, group->key);
    if (!decision && (decision = calloc(1, sizeof *decision))) {
        decision->attachment.ops = &decision_ops;
        decision->key = group->key;
        td__root_attach(root, &decision->attachment);
    }
    if (decision) {
        *number = ++decision->number;
        decision->state = VOTING;
    }
    pthread_mutex_unlock(&root->lock);
    return decision ? TD_OK : td__fail_nomem(what);
}

/* The state of a member; COMMITTED or AGREED are as good. A member that has ended does not count. */
static int ask(td_group *group, int index, uint64_t number)
{
    struct td__endpoint *endpoint = group->root->endpoint;
    int rank = group->ranks[index], state = VOTING;
    struct td__buffer answer = {0};
    if (td__endpoint_presence(endpoint, rank) != TD__PRESENT)
        return AGREED;
    if (!td__endpoint_query(endpoint, rank, TD__TOPIC_ADMIT, group->key, number,
                            td__deadline_in_ms(QUERY_MS), &answer)) {
        struct td__reader reader = td__reader_of(answer.data, answer.size);
        int known = td__reader_u8(&reader);
        if (td__reader_done(&reader) && known != NONE)
            state = known;
    }
    td__buffer_free(&answer);
    return state;
}

/* This member is AGREED, and does not know whether another one is COMMITTED or ABORTED. */
static int resolve(td_group *group, uint64_t number)
{
    td__deadline deadline = td__deadline_in_ms(GRACE_MS);
    int64_t pause = FIRST_PAUSE_NS;
    for (;;) {
        int least = COMMITTED;
        for (int i = 0; i < group->size && least != ABORTED; i++) {
            int state = i == group->rank ? AGREED : ask(group, i, number);
            if (state == COMMITTED)
                return COMMITTED;
            if (state == ABORTED || (state == VOTING && least != ABORTED))
                least = state;
        }
        if (least == ABORTED)
            return ABORTED;
        if (least != VOTING)
            return COMMITTED;
        if (!td__pause_longer(&pause, LAST_PAUSE_NS, deadline))
            return ABORTED;
    }
}

/* Whether the new world stands: the same on all members. `vote`: whether this one has passed the barrier in it. TD_OK
 *  with *stands, or TD_ERR_PEER if a member was lost and it does not stand. */
static td_status decide(td_group *group, bool vote, bool *stands)
{
    int32_t votes = vote;
    uint64_t number = 0;
    TD_TRY(begin_decision(group, &number));
    td_status status = td_group_all_reduce(&votes, &votes, 1, TD_I32, TD_MIN, group, NULL);
    int state = !status && votes ? AGREED : ABORTED;
    set_state(group, state);
    if (state == AGREED) {
        struct td__error error;
        td__error_save(&error);
        state = td_group_barrier(group, NULL) ? resolve(group, number) : COMMITTED;
        set_state(group, state);
        if (state == COMMITTED)
            td__error_undo(&error);
        else
            status = td_fail(TD_ERR_PEER, "%s on group \"%s\": a member was lost meanwhile: %s",
                             what, group->name, td__error_text());
    }
    *stands = state == COMMITTED;
    return *stands ? TD_OK : status;
}

/* ---- The first member: newcomers ------------------------------------------------------------- */

struct admission {
    struct td__new_world world;
    td_group *group;
    struct td__root *old;
    td__deadline deadline;
    uint64_t round;
    struct td__newcomer *list; /* the first member's */
    td_bytes *cards;           /* theirs, where this round has them */
    int count;
};

static void forget_cards(struct admission *admission)
{
    for (int i = 0; admission->cards && i < admission->count; i++)
        td_bytes_free(&admission->cards[i]);
    free(admission->cards);
    admission->cards = NULL;
}

static td_status check_waiting(void *arg)
{
    const struct admission *admission = arg;
    const td_group *group = admission->group;
    struct td__endpoint *endpoint = admission->old->endpoint;
    for (int i = 0; i < group->size; i++) {
        const char *exit_reason = td__endpoint_exit_reason(endpoint, group->ranks[i]);
        if (exit_reason)
            return td_fail(TD_ERR_PEER, "%s on group \"%s\": %s %s", what, group->name,
                           td__endpoint_describe(endpoint, group->ranks[i]), exit_reason);
    }
    for (int i = 0; i < admission->count; i++)
        if (td__newcomer_has_ended(&admission->list[i]))
            return td_fail(TD_ERR_TIMEOUT, "%s: a newcomer has ended", what);
    return td__group_state(group);
}

/* Sends each newcomer its message: a rank, or that the cards are there. */
static td_status send_mail(const struct admission *admission, bool commit)
{
    const struct td__root *old = admission->old;
    int count = admission->count, members = admission->group->size;
    const char *backend = old->backend ? old->backend : "";
    const char *more = old->backend_options ? old->backend_options : "";
    struct td__newcomer_mail mail = {.commit = commit,
                                     .round = admission->round,
                                     .size = members + count,
                                     .newcomers = count,
                                     .named = old->named,
                                     .backend = {backend, strlen(backend)},
                                     .backend_options = {more, strlen(more)}};
    td_status status = TD_OK;
    for (int i = 0; i < count && !status; i++) {
        struct td__buffer bytes = {0};
        char key[TD__NEWCOMER_KEY];
        mail.rank = members + i;
        td__newcomer_mail_put(&mail, &bytes);
        td__newcomer_mail_key(old->name, admission->list[i].id, key);
        status = bytes.failed ? td__fail_nomem(what)
                              : td_store_set(old->store, key, bytes.data, bytes.size);
        td__buffer_free(&bytes);
    }
    return status;
}

/* Removes the newcomers from the list, of this call and of the store, that have ended or have not set a card. */
static td_status drop_silent(struct admission *admission, bool asked)
{
    const struct td__root *old = admission->old;
    struct td__newcomer *gone = malloc(sizeof *gone * (size_t)(admission->count + 1));
    char key[TD__NEWCOMER_KEY];
    int dropped = 0, kept = 0;
    td_status status = gone ? TD_OK : td__fail_nomem(what);
    for (int i = 0; i < admission->count && !status; i++) {
        const struct td__newcomer *newcomer = &admission->list[i];
        bool there = !td__newcomer_has_ended(newcomer);
        if (there && asked) {
            td__newcomer_card_key(old->name, admission->round, newcomer->id, key);
            const char *keys[] = {key};
            status = td_store_check(old->store, keys, 1, &there);
        }
        if (there) {
            admission->list[kept++] = *newcomer;
            continue;
        }
        gone[dropped++] = *newcomer;
        td__newcomer_mail_key(old->name, newcomer->id, key);
        if (!status)
            status = td_store_delete_key(old->store, key, NULL);
    }
    if (!status && dropped)
        status = td__newcomers_remove(old->store, old->name, gone, dropped);
    if (!status)
        admission->count = kept;
    free(gone);
    return status;
}

static td_status await_cards(struct admission *admission)
{
    int count = admission->count;
    char(*names)[TD__NEWCOMER_KEY] = calloc((size_t)count, TD__NEWCOMER_KEY);
    const char **keys = calloc((size_t)count, sizeof *keys);
    admission->cards = calloc((size_t)count, sizeof *admission->cards);
    struct td__watched_wait wait = {
        .ranks = admission->group->size,
        .deadline = td__deadline_earlier(admission->deadline, td__deadline_in_ms(ANSWER_MS)),
        .check = check_waiting,
        .arg = admission};
    td_status status = names && keys && admission->cards ? TD_OK : td__fail_nomem(what);
    for (int i = 0; i < count && !status; i++) {
        td__newcomer_card_key(admission->old->name, admission->round, admission->list[i].id,
                              names[i]);
        keys[i] = names[i];
    }
    if (!status)
        status = td__peer_watch_get(admission->old->store, keys, count, &wait, admission->cards);
    free(keys);
    free(names);
    if (status) {
        free(admission->cards); /* none is set */
        admission->cards = NULL;
    }
    return status;
}

/* Gives the newcomers on the list ranks, until all that are left have set their cards. */
static td_status find_newcomers(struct admission *admission)
{
    const struct td__root *old = admission->old;
    struct td__error error;
    td__error_save(&error);
    TD_TRY(td__newcomers_read(old->store, old->name, &admission->list, &admission->count));
    TD_TRY(drop_silent(admission, false));
    while (admission->count) {
        TD_TRY(td__random(&admission->round, sizeof admission->round));
        TD_TRY(send_mail(admission, false));
        td_status status = await_cards(admission);
        if (status != TD_ERR_TIMEOUT)
            return status;
        td__error_undo(&error);
        TD_TRY(drop_silent(admission, true));
    }
    return TD_OK;
}

/* The cards of all, one after another, each with its size before it. */
static td_status commit(struct admission *admission)
{
    const struct td__root *old = admission->old;
    struct td__buffer all = {0};
    char key[TD__NEWCOMER_KEY];
    td__newcomer_cards_key(old->name, admission->round, key);
    for (int r = 0; r < admission->world.size; r++)
        td__buffer_put_string(&all, admission->world.cards[r].bytes,
                              admission->world.cards[r].size);
    td_status status = all.failed ? td__fail_nomem(what)
                                  : td_store_set(old->store, key, all.data, all.size);
    td__buffer_free(&all);
    if (!status)
        status = send_mail(admission, true);
    return status ? status
                  : td__newcomers_remove(old->store, old->name, admission->list, admission->count);
}

/* ---- All members ----------------------------------------------------------------------------- */

/* How many newcomers there are, found by the first member. */
static td_status announce(struct admission *admission)
{
    td_group *group = admission->group;
    struct {
        int32_t status, count;
        char why[504];
    } head = {0};
    if (group->rank == 0) {
        head.status = (int32_t)find_newcomers(admission);
        head.count = admission->count;
        if (head.status)
            snprintf(head.why, sizeof head.why, "%s", td__error_text());
    }
    TD_TRY(td_group_broadcast(&head, sizeof head, TD_U8, group->ranks[0], group, NULL));
    head.why[sizeof head.why - 1] = 0;
    admission->count = head.count;
    return head.status ? td_fail((td_status)head.status, "%s", head.why) : TD_OK;
}

static td_status connect_world(struct admission *admission, td_group **result)
{
    td_group *group = admission->group;
    struct td__new_world *world = &admission->world;
    td_status status = TD_OK;
    TD_TRY(td__new_world_prepare(world, admission->old, group->size + admission->count));
    world->fresh->admitted = true;
    if (group->rank == 0) {
        for (int i = 0; i < admission->count && !status; i++)
            if (!td__world_card_set(&world->cards[group->size + i], admission->cards[i].data,
                                    admission->cards[i].size))
                status = td_fail(TD_ERR_MISMATCH,
                                 "%s: the card of a newcomer is too long; all processes must run "
                                 "the same version of Tandem",
                                 what);
        if (!status)
            status = commit(admission);
    }
    TD_TRY(td__new_world_spread(world, status));
    int64_t before = td__swap_call_timeout(CONFIRM_MS);
    status = td__new_world_begin(world, result);
    if (!status && (status = td_group_barrier(*result, NULL)))
        td__root_discard(*result);
    td__swap_call_timeout(before);
    if (status)
        *result = NULL;
    return TD_OK;
}

/* *again: newcomers have failed, not members. */
static td_status admit_once(struct admission *admission, td_group **result, bool *again)
{
    td_group *group = admission->group;
    bool stands = false;
    uint8_t go = 1;
    *result = NULL;
    TD_TRY(announce(admission));
    if (!admission->count)
        return TD_OK;
    TD_TRY(connect_world(admission, result));
    bool connected = *result;
    struct td__error error;
    td__error_save(&error);
    td_status status = decide(group, connected, &stands);
    if (!stands) {
        if (connected)
            td__root_discard(*result);
        *result = NULL;
        *again = !status;
        if (status)
            return status;
        return connected ? td_fail(TD_ERR_PEER,
                                   "%s on group \"%s\": another member has not reached a newcomer",
                                   what, group->name)
                         : td__error_restore(&error);
    }
    /* For the newcomers: a loss now is one in the new world, where the next call finds it. */
    td__error_save(&error);
    int64_t before = td__swap_call_timeout(CONFIRM_MS);
    if (td_group_broadcast(&go, 1, TD_U8, 0, *result, NULL))
        td__error_undo(&error);
    td__swap_call_timeout(before);
    return TD_OK;
}

static void end_attempt(struct admission *admission)
{
    td__new_world_free(&admission->world);
    if (admission->group->rank == 0)
        forget_cards(admission);
    free(admission->list);
}

static td_status admit(td_group *group, int64_t timeout_ms, td_group **grown)
{
    int *places = malloc(sizeof *places * (size_t)group->size);
    td_group *result = NULL;
    td_status status = places ? TD_OK : td__fail_nomem(what);
    bool again = places;
    td__deadline deadline = td__deadline_in_ms(timeout_ms);
    int64_t limit = timeout_ms < INT64_MAX - GRACE_MS ? timeout_ms + GRACE_MS : INT64_MAX;
    int64_t before = td__swap_call_timeout(limit);
    for (int i = 0; places && i < group->size; i++)
        places[i] = i;
    for (int attempt = 0; attempt < ATTEMPTS && again; attempt++) {
        struct admission admission = {
            .world = {.what = what, .group = group, .places = places},
            .group = group,
            .old = group->root,
            .deadline = deadline,
        };
        if (attempt)
            td__sleep_ns(AGAIN_NS);
        again = false;
        status = admit_once(&admission, &result, &again);
        end_attempt(&admission);
    }
    td__swap_call_timeout(before);
    free(places);
    if (status)
        return status;
    if (result) {
        result->handed_out = true;
        td__world_outgrow(group->root, result);
    }
    *grown = result;
    return TD_OK;
}

td_status td_group_admit(td_group *group, const td_group_options *options, td_group **grown)
{
    td_group_options none = {0};
    options = options ? options : &none;
    group = td__group_enter(group, what);
    if (!group)
        return TD_ERR_STATE;
    if (!grown)
        return td_fail(TD_ERR_INVALID, "%s: the result is NULL", what);
    TD_TRY(td__check_group_options(what, options, group->root));
    TD_TRY(td__endpoint_check_excluded(group->root->endpoint, what));
    td__group_use(group);
    td_status status = admit(
        group, options->timeout_ms ? options->timeout_ms : td__call_timeout(group), grown);
    td__group_unuse(group);
    return status;
}

td_status td_group_waiting(td_group *group, int *count)
{
    struct td__newcomer *list;
    int found;
    group = td__group_enter(group, "td_group_waiting");
    if (!group)
        return TD_ERR_STATE;
    if (!count)
        return td_fail(TD_ERR_INVALID, "td_group_waiting: the result is NULL");
    td__group_use(group);
    td_status status = td__newcomers_read(group->root->store, group->root->name, &list, &found);
    if (!status) {
        free(list);
        *count = found;
    }
    td__group_unuse(group);
    return status;
}
