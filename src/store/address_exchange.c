/* The ranks of a world exchange their addresses through a store; see address_exchange.h.
 *
 * Each rank sets its card (host and addresses) and gets the cards of all ranks in one request. A store may be used for
 * several exchanges; each rank counts its own, so all ranks agree on the number, the epoch.
 *
 * If a rank ended before it had set its card, the others would wait for it until the timeout. So each rank first adds
 * its process to a roster (peer_watch.h), to that of the rendezvous if there was one. A rank that has waited for
 * a while checks the processes of its own machine, and sets `ended` for the ranks of other machines:
 *
 *     epoch/NAME/RANK          how many exchanges the rank has taken part in
 *     card/NAME/EPOCH/RANK     the cards
 *     joined/NAME/EPOCH        the roster, if there was no rendezvous
 *     ended/NAME/EPOCH         the first failure that a rank has found */
#include "store/address_exchange.h"

#include "base/fail.h"
#include "base/text.h"
#include "store/peer_watch.h"
#include "store/store_ops.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct exchange {
    struct td__address_exchange *world;
    const char **keys; /* of the cards */
    char joined[TD__EXCHANGE_KEY], ended[TD__EXCHANGE_KEY];
    struct td__peer_watch peers;
    bool complete; /* the roster that is watched has all ranks */
};

void td__card_key(const char *name, int64_t epoch, int rank, char key[TD__EXCHANGE_KEY])
{
    snprintf(key, TD__EXCHANGE_KEY, "\1card/%.80s/%lld/%d", name, (long long)epoch, rank);
}

void td__epoch_key(const char *name, int rank, char key[TD__EXCHANGE_KEY])
{
    snprintf(key, TD__EXCHANGE_KEY, "\1epoch/%.80s/%d", name, rank);
}

static void epoch_wide_key(const char *what, const char *name, int64_t epoch,
                           char key[TD__EXCHANGE_KEY])
{
    snprintf(key, TD__EXCHANGE_KEY, "\1%s/%.80s/%lld", what, name, (long long)epoch);
}

/* ---- Watching the ranks that have joined ------------------------------------------------------ */

/* Watches the processes of the roster of the rendezvous, which has all ranks. Only if this process is in it, and has
 * not rejoined: otherwise ranks that have ended may be about to rejoin as well. If not, reads the roster of this epoch
 * again each time. */
static void watch_roster(struct exchange *exchange)
{
    const struct td__address_exchange *world = exchange->world;
    td_store *store = world->given;
    td_bytes list = {0};
    char key[TD__ROSTER_KEY];
    bool found = false;
    if (exchange->complete)
        return;
    td__roster_key(td__prefix_store_base(&store), key);
    if (!td__store_look_up(store, key, &list, &found) && found) {
        exchange->complete = td__peer_watch_has_self(&exchange->peers, list.data);
        if (exchange->complete)
            td__peer_watch_watch(&exchange->peers, list.data);
        td_bytes_free(&list);
    }
    if (!exchange->complete && !td__rejoins() &&
        !td__store_look_up(world->store, exchange->joined, &list, &found) && found) {
        td__peer_watch_watch(&exchange->peers, list.data);
        td_bytes_free(&list);
    }
}

/* A rank has ended: sets `ended`, for the ranks on other machines. The first text is kept: ranks that end later may
 * have ended because of it. */
static td_status fail_ended(const struct exchange *exchange, const char *ended)
{
    const struct td__address_exchange *world = exchange->world;
    td_bytes first = {0};
    char text[512];
    int length = snprintf(text, sizeof text, "%s \"%.100s\": %s before all ranks had joined",
                          world->kind, world->name, ended);
    td_status status = td_store_compare_set(world->store, exchange->ended, "", 0, text,
                                            (size_t)length, &first);
    status = td_fail(TD_ERR_PEER, "%s", status ? text : first.data);
    td_bytes_free(&first);
    return status;
}

static td_status check_peers(void *arg)
{
    struct exchange *exchange = arg;
    td_bytes text = {0};
    char ended[TD__WATCHED_TEXT];
    bool found;
    watch_roster(exchange);
    if (td__peer_watch_find_ended(&exchange->peers, ended) >= 0)
        return fail_ended(exchange, ended);
    if (td__store_look_up(exchange->world->store, exchange->ended, &text, &found) || !found)
        return TD_OK; /* a store that fails is reported by the wait itself */
    td_status status = td_fail(TD_ERR_PEER, "%s", text.data);
    td_bytes_free(&text);
    return status;
}

/* ---- The cards ------------------------------------------------------------------------------- */

/* TD_ERR_TIMEOUT with the ranks that have not set their cards, instead of a key. */
static td_status name_missing(const struct exchange *exchange)
{
    const struct td__address_exchange *world = exchange->world;
    char missing[256] = "";
    struct td__error error;
    int count = 0;
    td__error_save(&error);
    for (int r = 0; r < world->size && strlen(missing) < sizeof missing - 16; r++) {
        bool there = true;
        if (!td_store_check(world->store, &exchange->keys[r], 1, &there) && !there)
            td__text_add(missing, sizeof missing, "%s%d", count++ ? ", " : "", r);
    }
    if (!count)
        return td__error_restore(&error);
    const char *have = count > 1 ? "have" : "has";
    return td_fail(TD_ERR_TIMEOUT,
                   "%s \"%s\": rank%s %s %s not joined within %lld ms: %s %s ended, or %s not "
                   "called %s",
                   world->kind, world->name, count > 1 ? "s" : "", missing, have,
                   (long long)world->timeout_ms, count > 1 ? "they" : "it", have, have,
                   world->calls);
}

static td_status await_cards(struct exchange *exchange, td_bytes *cards)
{
    const struct td__address_exchange *world = exchange->world;
    struct td__watched_wait wait = {.ranks = world->size,
                                    .deadline = td__deadline_in_ms(world->timeout_ms),
                                    .check = check_peers,
                                    .arg = exchange};
    td_status status = td__peer_watch_get(world->store, exchange->keys, world->size, &wait, cards);
    return status == TD_ERR_TIMEOUT ? name_missing(exchange) : status;
}

/* All ranks have set their cards of this epoch, so no rank needs the keys of the last one any more. */
static void delete_last_epoch(const struct td__address_exchange *world)
{
    char key[TD__EXCHANGE_KEY];
    if (world->epoch == 1)
        return;
    td__card_key(world->name, world->epoch - 1, world->rank, key);
    td_store_delete_key(world->store, key, NULL);
    if (world->rank)
        return;
    epoch_wide_key("joined", world->name, world->epoch - 1, key);
    td_store_delete_key(world->store, key, NULL);
}

static td_status run(struct exchange *exchange, char (*names)[TD__EXCHANGE_KEY], const void *card,
                     size_t card_size, td_bytes *cards)
{
    struct td__address_exchange *world = exchange->world;
    char key[TD__EXCHANGE_KEY];
    td__epoch_key(world->name, world->rank, key);
    TD_TRY(td_store_add(world->store, key, 1, &world->epoch));
    for (int r = 0; r < world->size; r++) {
        td__card_key(world->name, world->epoch, r, names[r]);
        exchange->keys[r] = names[r];
    }
    epoch_wide_key("joined", world->name, world->epoch, exchange->joined);
    epoch_wide_key("ended", world->name, world->epoch, exchange->ended);
    TD_TRY(td__roster_add(world->store, exchange->joined, world->rank, false));
    TD_TRY(td_store_set(world->store, exchange->keys[world->rank], card, card_size));
    TD_TRY(await_cards(exchange, cards));
    delete_last_epoch(world);
    return TD_OK;
}

td_status td__exchange_addresses(struct td__address_exchange *world, const void *card,
                                 size_t card_size, td_bytes *cards)
{
    size_t size = (size_t)world->size;
    char(*names)[TD__EXCHANGE_KEY] = calloc(size, TD__EXCHANGE_KEY);
    struct exchange exchange = {
        .world = world,
        .keys = calloc(size, sizeof *exchange.keys),
        .peers = {.rank = world->rank, .size = world->size},
    };
    td_status status = names && exchange.keys ? run(&exchange, names, card, card_size, cards)
                                              : td__fail_nomem(world->kind);
    td__peer_watch_free(&exchange.peers);
    free(exchange.keys);
    free(names);
    return status;
}
