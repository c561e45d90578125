/* A new world of members and newcomers; see new_world.h. */
#include "recovery/new_world.h"

#include "base/fail.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool td__world_card_set(struct td__world_card *card, const void *bytes, size_t size)
{
    if (size > TD__NEW_WORLD_CARD)
        return false;
    memcpy(card->bytes, bytes, size);
    card->size = (uint32_t)size;
    return true;
}

static td_status open_root(struct td__new_world *world, const struct td__root *old, int size,
                           struct td__world_card *card)
{
    struct td__buffer own = {0};
    td_group_options same = {.name = old->named ? old->name : NULL,
                             .backend = old->backend,
                             .backend_options = old->backend_options,
                             .timeout_ms = old->timeout_ms};
    world->size = size;
    world->cards = calloc((size_t)size, sizeof *world->cards);
    if (!world->cards)
        return td__fail_nomem(world->what);
    TD_TRY(
        td__root_make(old->given, world->places[world->group->rank], size, &same, &world->fresh));
    world->fresh->world = old->world;
    world->fresh->grown = true;
    td__endpoint_card(world->fresh->endpoint, &own);
    bool good = !own.failed && td__world_card_set(card, own.data, own.size);
    td__buffer_free(&own);
    return good ? TD_OK : td__fail_nomem(world->what);
}

/* A member that has no card takes part, too, so that the others need not wait for it. */
td_status td__new_world_prepare(struct td__new_world *world, const struct td__root *old, int size)
{
    const td_group *group = world->group;
    struct td__world_card card = {0}, *all = malloc(sizeof *all * (size_t)group->size);
    struct td__error error;
    td_status status = all ? open_root(world, old, size, &card) : td__fail_nomem(world->what);
    td__error_save(&error);
    if (!all)
        return status;
    td_status gathered = td_group_all_gather(all, &card, sizeof card, TD_U8, (td_group *)group,
                                             NULL);
    if (status)
        status = td__error_restore(&error);
    else
        status = gathered;
    for (int i = 0; i < group->size && !status; i++) {
        if (!all[i].size || all[i].size > TD__NEW_WORLD_CARD)
            status = td_fail(TD_ERR_PEER,
                             "%s on group \"%s\": rank %d has failed; its error says why",
                             world->what, group->name, group->ranks[i]);
        world->cards[world->places[i]] = all[i];
    }
    free(all);
    return status;
}

td_status td__new_world_spread(struct td__new_world *world, td_status status)
{
    td_group *group = world->group;
    struct {
        int32_t status;
        char why[508];
    } verdict = {.status = (int32_t)status};
    if (group->rank == 0 && status)
        snprintf(verdict.why, sizeof verdict.why, "%s", td__error_text());
    TD_TRY(td_group_broadcast(&verdict, sizeof verdict, TD_U8, group->ranks[0], group, NULL));
    verdict.why[sizeof verdict.why - 1] = 0;
    if (verdict.status)
        return td_fail((td_status)verdict.status, "%s", verdict.why);
    return td_group_broadcast(world->cards, sizeof *world->cards * (size_t)world->size, TD_U8,
                              group->ranks[0], group, NULL);
}

static td_status pass_cards(struct td__root *fresh, const struct td__world_card *cards)
{
    for (int r = 0; r < fresh->size; r++) {
        const struct td__world_card *card = &cards[r];
        char *bytes = card->size <= TD__NEW_WORLD_CARD ? malloc(card->size + 1) : NULL;
        if (!bytes)
            return td__fail_nomem("group");
        memcpy(bytes, card->bytes, card->size);
        bytes[card->size] = 0;
        fresh->cards[r] = (td_bytes){bytes, card->size};
    }
    return td__endpoint_connect_all(fresh->endpoint, fresh->cards);
}

td_status td__new_world_connect(struct td__root *fresh, const struct td__world_card *cards,
                                td_group **group)
{
    td_status status = pass_cards(fresh, cards);
    if (!status)
        return td__root_begin(fresh, group);
    td__root_free(fresh, status);
    return status;
}

td_status td__new_world_begin(struct td__new_world *world, td_group **group)
{
    struct td__root *fresh = world->fresh;
    world->fresh = NULL;
    return td__new_world_connect(fresh, world->cards, group);
}

void td__new_world_free(struct td__new_world *world)
{
    struct td__error error;
    td__error_save(&error);
    if (world->fresh)
        td__root_free(world->fresh, TD_ERR_PEER);
    free(world->cards);
    td__error_restore(&error);
}
