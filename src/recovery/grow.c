/* Growing a group: restarted ranks rejoin.
 *
 * A rank that rejoins exchanges addresses as at the start: it counts its exchanges (the epoch) in the store, sets its
 * card under that number, and waits for the cards of all others under the same number. The members of the group create
 * new endpoints, and all_gather their cards. The first member waits for the cards of the newcomers, sets all
 * cards under the keys that the newcomers wait for, and broadcasts the cards of the newcomers to the members.
 * Then all ranks have all cards, and continue as at the start.
 *
 *     newcomer       epoch += 1;  card[epoch][me] = mine;  waits for card[epoch][all]
 *     first member   waits for a new card of each missing rank; card[its epoch][all] = …; broadcasts them
 *                    to the other members
 */
#include "base/fail.h"
#include "recovery/new_world.h"
#include "store/store_ops.h"

#include <stdlib.h>
#include <string.h>

enum {
    PAUSE_NS = 20000000,
    GRACE_MS = 10000, /* more time for the status of the first member */
};

struct growth {
    struct td__new_world world;
    td_group *group;
    struct td__root *old;
    int64_t *epochs; /* of the newcomers; 0: not one */
    int64_t timeout_ms;
    td__deadline deadline;
};

/* ---- The first member: newcomers ------------------------------------------------------------- */

/* Looks for a card that differs from that of the rank that has ended. */
static td_status find_card(struct growth *growth, int rank)
{
    struct td__root *old = growth->old;
    char key[TD__ROOT_KEY];
    td_bytes count = {0}, card = {0};
    bool found;
    td__epoch_key(old->name, rank, key);
    td_status status = td__store_look_up(old->store, key, &count, &found);
    int64_t epoch = !status && found ? strtoll(count.data, NULL, 10) : 0;
    if (epoch > 0) {
        td__card_key(old->name, epoch, rank, key);
        status = td__store_look_up(old->store, key, &card, &found);
        const td_bytes *dead = &old->cards[rank];
        bool same = found && card.size == dead->size && !memcmp(card.data, dead->data, card.size);
        if (!status && found && !same &&
            td__world_card_set(&growth->world.cards[rank], card.data, card.size))
            growth->epochs[rank] = epoch;
    }
    td_bytes_free(&card);
    td_bytes_free(&count);
    return status;
}

/* Fails if a member has ended: the other members wait for this rank in a collective, which fails, too. */
static td_status check_members(const struct growth *growth)
{
    const td_group *group = growth->group;
    struct td__endpoint *endpoint = growth->old->endpoint;
    for (int i = 0; i < group->size; i++) {
        const char *exit_reason = td__endpoint_exit_reason(endpoint, group->ranks[i]);
        if (exit_reason)
            return td_fail(TD_ERR_PEER, "td_group_grow on group \"%s\": %s %s", group->name,
                           td__endpoint_describe(endpoint, group->ranks[i]), exit_reason);
    }
    return td__group_state(group);
}

static td_status await_newcomers(struct growth *growth)
{
    for (int r = 0; r < growth->old->size; r++) {
        while (td__group_index(growth->group, r) < 0 && !growth->epochs[r]) {
            TD_TRY(find_card(growth, r));
            if (growth->epochs[r])
                break;
            if (td__deadline_passed(growth->deadline))
                return td_fail(TD_ERR_TIMEOUT,
                               "td_group_grow on group \"%s\": rank %d has not rejoined within "
                               "%lld ms",
                               growth->group->name, r, (long long)growth->timeout_ms);
            TD_TRY(check_members(growth));
            td__sleep_ns(PAUSE_NS);
        }
    }
    return TD_OK;
}

/* Raises the count of every rank to that of the newcomers, so that a later exchange does not find the cards of
 * this one. */
static td_status raise_counts(const struct growth *growth)
{
    struct td__root *old = growth->old;
    char key[TD__ROOT_KEY];
    int64_t most = 0, count;
    for (int r = 0; r < old->size; r++)
        most = growth->epochs[r] > most ? growth->epochs[r] : most;
    for (int r = 0; r < old->size; r++) {
        td__epoch_key(old->name, r, key);
        TD_TRY(td_store_add(old->store, key, 0, &count));
        if (count < most)
            TD_TRY(td_store_add(old->store, key, most - count, &count));
    }
    return TD_OK;
}

static td_status answer_newcomers(const struct growth *growth)
{
    struct td__root *old = growth->old;
    char key[TD__ROOT_KEY];
    TD_TRY(raise_counts(growth));
    for (int to = 0; to < old->size; to++) {
        if (!growth->epochs[to])
            continue;
        td__grown_key(old->name, growth->epochs[to], to, key);
        TD_TRY(td_store_set(old->store, key, "1", 1));
        for (int r = 0; r < old->size; r++) {
            if (r == to)
                continue;
            td__card_key(old->name, growth->epochs[to], r, key);
            TD_TRY(td_store_set(old->store, key, growth->world.cards[r].bytes,
                                growth->world.cards[r].size));
        }
    }
    return TD_OK;
}

/* ---- All members ----------------------------------------------------------------------------- */

/* The first member answers the newcomers before the members: if it dies in between, the members fail in this group, where
 * its death is noticed, and can try again. In the other order they would wait in the new group for newcomers that have
 * no answer. If it fails it still broadcasts a status, so that no member waits for it. */
static td_status exchange(struct growth *growth)
{
    td_status status = TD_OK;
    TD_TRY(td__new_world_prepare(&growth->world, growth->old, growth->old->size));
    if (growth->group->rank == 0) {
        status = await_newcomers(growth);
        if (!status)
            status = answer_newcomers(growth);
    }
    return td__new_world_spread(&growth->world, status);
}

static td_status grow(td_group *group, const td_group_options *options, td_group **grown)
{
    struct td__root *old = group->root;
    struct growth growth = {
        .world = {.what = "td_group_grow", .group = group, .places = group->ranks},
        .group = group,
        .old = old,
        .epochs = calloc((size_t)old->size, sizeof *growth.epochs),
        .timeout_ms = options->timeout_ms ? options->timeout_ms : td__call_timeout(group),
    };
    td_group *result;
    if (!growth.epochs)
        return td__fail_nomem("td_group_grow");
    growth.deadline = td__deadline_in_ms(growth.timeout_ms);
    int64_t limit = growth.timeout_ms < INT64_MAX - GRACE_MS ? growth.timeout_ms + GRACE_MS
                                                             : INT64_MAX;
    int64_t before = td__swap_call_timeout(limit);
    td_status status = exchange(&growth);
    td__swap_call_timeout(before);
    if (!status)
        status = td__new_world_begin(&growth.world, &result);
    td__new_world_free(&growth.world);
    free(growth.epochs);
    if (status)
        return status;
    result->handed_out = true;
    td__world_outgrow(old, result);
    *grown = result;
    return TD_OK;
}

td_status td_group_grow(td_group *group, const td_group_options *options, td_group **grown)
{
    td_group_options none = {0};
    options = options ? options : &none;
    group = td__group_enter(group, "td_group_grow");
    if (!group)
        return TD_ERR_STATE;
    if (!grown)
        return td_fail(TD_ERR_INVALID, "td_group_grow: the result is NULL");
    TD_TRY(td__check_group_options("td_group_grow", options, group->root));
    if (group->root->admitted)
        return td_fail(
            TD_ERR_STATE,
            "td_group_grow on group \"%s\": its world was made by td_group_admit(), which "
            "gives ranks out; call that to take in more processes",
            group->name);
    td__group_use(group);
    td_status status = grow(group, options, grown);
    td__group_unuse(group);
    return status;
}
