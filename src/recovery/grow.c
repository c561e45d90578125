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
#include "group/root.h"
#include "store/store_ops.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    CARD = 1020,
    PAUSE_NS = 20000000,
    GRACE_MS = 10000, /* more time for the status of the first member */
};

struct card {
    uint32_t size;
    char bytes[CARD];
};

struct growth {
    td_group *group;
    struct td__root *old, *fresh;
    struct card *cards; /* of all ranks; size 0: not known yet */
    int64_t *epochs;    /* of the newcomers; 0: not one */
    int64_t timeout_ms;
    td__deadline deadline;
};

static bool set_card(struct card *card, const void *bytes, size_t size)
{
    if (size > CARD)
        return false;
    memcpy(card->bytes, bytes, size);
    card->size = (uint32_t)size;
    return true;
}

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
        if (!status && found && !same && set_card(&growth->cards[rank], card.data, card.size))
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
            TD_TRY(td_store_set(old->store, key, growth->cards[r].bytes, growth->cards[r].size));
        }
    }
    return TD_OK;
}

/* ---- All members ----------------------------------------------------------------------------- */

/* The new cards of all ranks: first the members gather theirs, then the first member broadcasts those of the
 * newcomers. If it fails it still broadcasts a status, so that no member waits for it. It answers the newcomers
 * before the members: if it dies in between, the members fail in this group, where its death is noticed, and can
 * try again. In the other order they would wait in the new group for newcomers that have no answer. */
static td_status exchange(struct growth *growth)
{
    td_group *group = growth->group;
    struct td__buffer own = {0};
    struct card card = {0}, *all = malloc(sizeof *all * (size_t)group->size);
    int32_t status = all ? TD_OK : td__fail_nomem("td_group_grow");
    td__endpoint_card(growth->fresh->endpoint, &own);
    if (!status && (own.failed || !set_card(&card, own.data, own.size)))
        status = td__fail_nomem("td_group_grow");
    td__buffer_free(&own);
    if (!status)
        status = td_group_all_gather(all, &card, sizeof card, TD_U8, group, NULL);
    for (int i = 0; i < group->size && !status; i++)
        growth->cards[group->ranks[i]] = all[i];
    free(all);
    if (status)
        return (td_status)status;

    struct {
        int32_t status;
        char why[508];
    } verdict = {0};
    if (group->rank == 0) {
        verdict.status = (int32_t)await_newcomers(growth);
        if (!verdict.status)
            verdict.status = (int32_t)answer_newcomers(growth);
        if (verdict.status)
            snprintf(verdict.why, sizeof verdict.why, "%s", td__error_text());
    }
    TD_TRY(td_group_broadcast(&verdict, sizeof verdict, TD_U8, group->ranks[0], group, NULL));
    verdict.why[sizeof verdict.why - 1] = 0;
    if (verdict.status)
        return td_fail((td_status)verdict.status, "%s", verdict.why);
    return td_group_broadcast(growth->cards, sizeof *growth->cards * (size_t)growth->old->size,
                              TD_U8, group->ranks[0], group, NULL);
}

static td_status connect_all(struct growth *growth)
{
    struct td__root *fresh = growth->fresh;
    for (int r = 0; r < fresh->size; r++) {
        const struct card *card = &growth->cards[r];
        char *bytes = malloc(card->size + 1);
        if (!bytes || card->size > CARD) {
            free(bytes);
            return td__fail_nomem("td_group_grow");
        }
        memcpy(bytes, card->bytes, card->size);
        bytes[card->size] = 0;
        fresh->cards[r] = (td_bytes){bytes, card->size};
    }
    return td__endpoint_connect_all(fresh->endpoint, fresh->cards);
}

static td_status grow(td_group *group, const td_group_options *options, td_group **grown)
{
    struct td__root *old = group->root;
    size_t size = (size_t)old->size;
    struct growth growth = {
        .group = group,
        .old = old,
        .cards = calloc(size, sizeof *growth.cards),
        .epochs = calloc(size, sizeof *growth.epochs),
        .timeout_ms = options->timeout_ms ? options->timeout_ms : td__call_timeout(group),
    };
    td_group_options same = {.name = old->named ? old->name : NULL,
                             .backend = old->backend,
                             .backend_options = old->backend_options,
                             .timeout_ms = old->timeout_ms};
    td_group *result;
    growth.deadline = td__deadline_in_ms(growth.timeout_ms);
    td_status status = growth.cards && growth.epochs ? TD_OK : td__fail_nomem("td_group_grow");
    if (!status)
        status = td__root_make(old->given, old->rank, old->size, &same, &growth.fresh);
    if (!status) {
        growth.fresh->world = old->world;
        growth.fresh->grown = true;
        int64_t limit = growth.timeout_ms < INT64_MAX - GRACE_MS ? growth.timeout_ms + GRACE_MS
                                                                 : INT64_MAX;
        int64_t before = td__swap_call_timeout(limit);
        status = exchange(&growth);
        td__swap_call_timeout(before);
        if (!status)
            status = connect_all(&growth);
        if (status)
            td__root_free(growth.fresh, status);
        else
            status = td__root_begin(growth.fresh, &result);
    }
    free(growth.cards);
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
    td__group_use(group);
    td_status status = grow(group, options, grown);
    td__group_unuse(group);
    return status;
}
