/* The ranks of a root meet, through its store.
 *
 * Each rank puts its card there and reads everybody's, in one request. A store may see several meetings; each
 * rank counts its own, and so all agree on the number.
 *
 * One that dies before its card is there would be waited for until the time is over. So each rank also says
 * first of all which process it is (store/roster.h), at the rendezvous already where there was one, and who
 * has waited for a while looks after those of its own machine:
 *
 *     card/NAME/MEETING/RANK     the cards
 *     came/NAME/MEETING          the list of those who have come, where there was no rendezvous
 *     ended/NAME/MEETING         what somebody saw of one that has ended, for those on other machines */
#include "group/root.h"

#include "base/fail.h"
#include "store/peer_watch.h"
#include "store/rendezvous_barrier.h"
#include "store/roster.h"
#include "store/store_ops.h"

#include <stdio.h>
#include <stdlib.h>

enum { PAUSE_MS = 30, LAST_PAUSE_MS = 300, PAUSE_PER_RANK_MS = 4, LAST_LOOK_MS = 50 };

struct exchange {
    struct td__root *root;
    int64_t meeting;
    const char **keys; /* of the cards */
    td__deadline deadline;
    char came[TD__ROOT_KEY], ended[TD__ROOT_KEY];
    struct td__peer_watch peers;
    bool complete; /* nobody else will sign in */
};

/* ---- Looking after those who have come ------------------------------------------------------- */

/* All of a rendezvous have signed before it was over. Its list says nothing to a process that was not at it,
 * or that came back later: those who are dead may be about to come back as well. */
static void find_peers(struct exchange *exchange)
{
    struct td__root *root = exchange->root;
    td_store *store = root->given;
    td_bytes list = {0};
    char key[TD__ROSTER_KEY];
    if (exchange->complete)
        return;
    td__roster_key(td__prefix_store_base(&store), key);
    if (td__peer_watch_look_up(store, key, &list)) {
        exchange->complete = td__peer_watch_has_self(&exchange->peers, list.data);
        if (exchange->complete)
            td__peer_watch_watch(&exchange->peers, list.data);
        td_bytes_free(&list);
    }
    if (!exchange->complete && !td__rejoins() &&
        td__peer_watch_look_up(root->store, exchange->came, &list)) {
        td__peer_watch_watch(&exchange->peers, list.data);
        td_bytes_free(&list);
    }
}

/* The others are told, since some may be on other machines. What is said first stands: who has heard of one
 * end may have ended since, and is not to be taken for the cause. */
static td_status fail_ended(const struct exchange *exchange, const char *who)
{
    const struct td__root *root = exchange->root;
    td_bytes first = {0};
    char text[512];
    int length = snprintf(text, sizeof text, "group \"%.100s\": %s before all ranks had met",
                          root->name, who);
    bool told = !td_store_compare_set(root->store, exchange->ended, "", 0, text, (size_t)length,
                                      &first);
    td_status status = td_fail(TD_ERR_PEER, "%s", told ? first.data : text);
    td_bytes_free(&first);
    return status;
}

static td_status watch_peers(struct exchange *exchange)
{
    td_bytes told = {0};
    char who[TD__WATCHED_TEXT];
    find_peers(exchange);
    if (td__peer_watch_find_ended(&exchange->peers, who) >= 0)
        return fail_ended(exchange, who);
    if (!td__peer_watch_look_up(exchange->root->store, exchange->ended, &told))
        return TD_OK;
    td_status status = td_fail(TD_ERR_PEER, "%s", told.data);
    td_bytes_free(&told);
    return status;
}

/* ---- The cards ------------------------------------------------------------------------------- */

/* Who has not come to the meeting, instead of a key that nobody knows. */
static td_status name_missing(const struct exchange *exchange)
{
    struct td__root *root = exchange->root;
    char missing[256] = "";
    struct td__error error;
    size_t length = 0;
    int count = 0;
    td__error_save(&error);
    for (int r = 0; r < root->size && length < sizeof missing - 16; r++) {
        bool there = true;
        if (!td_store_check(root->store, &exchange->keys[r], 1, &there) && !there) {
            length += (size_t)snprintf(missing + length, sizeof missing - length, "%s%d",
                                       length ? ", " : "", r);
            count++;
        }
    }
    if (!count)
        return td__error_restore(&error);
    return td_fail(TD_ERR_TIMEOUT,
                   "group \"%s\": rank%s %s %s not joined within %lld ms: %s ended, or %s not "
                   "called td_init_process_group() or td_group_open()",
                   root->name, count > 1 ? "s" : "", missing, count > 1 ? "have" : "has",
                   (long long)root->timeout_ms, count > 1 ? "they have" : "it has",
                   count > 1 ? "have" : "has");
}

static td_status get_cards(const struct exchange *exchange, int64_t limit_ms)
{
    struct td__root *root = exchange->root;
    int left = td__deadline_poll_ms(exchange->deadline);
    return td_store_multi_get(root->store, exchange->keys, root->size,
                              left < 1          ? 1
                              : left < limit_ms ? left
                                                : limit_ms,
                              root->cards);
}

/* One that met all others, and has ended since, is no reason to fail: then the cards are there. */
static td_status await_cards(struct exchange *exchange)
{
    int64_t more = (int64_t)PAUSE_PER_RANK_MS * exchange->root->size, pause = PAUSE_MS + more;
    struct td__error error;
    for (;;) {
        td_status status = get_cards(exchange, pause);
        if (status != TD_ERR_TIMEOUT)
            return status;
        if (td__deadline_passed(exchange->deadline))
            return name_missing(exchange);
        status = watch_peers(exchange);
        if (status) {
            td__error_save(&error);
            return get_cards(exchange, LAST_LOOK_MS) ? td__error_restore(&error) : TD_OK;
        }
        pause = pause * 2 < LAST_PAUSE_MS + more ? pause * 2 : LAST_PAUSE_MS + more;
    }
}

static td_status give_card(const struct exchange *exchange)
{
    struct td__root *root = exchange->root;
    struct td__buffer card = {0};
    td__endpoint_card(root->endpoint, &card);
    td_status status = card.failed ? td__fail_nomem("group")
                                   : td_store_set(root->store, exchange->keys[root->rank],
                                                  card.data, card.size);
    td__buffer_free(&card);
    return status;
}

/* Everyone has come to this meeting, so nobody needs the last one. */
static void tidy_up(const struct exchange *exchange)
{
    struct td__root *root = exchange->root;
    char key[TD__ROOT_KEY];
    if (exchange->meeting == 1)
        return;
    td__card_key(root->name, exchange->meeting - 1, root->rank, key);
    td_store_delete_key(root->store, key, NULL);
    if (root->rank)
        return;
    snprintf(key, sizeof key, "\1came/%.80s/%lld", root->name, (long long)exchange->meeting - 1);
    td_store_delete_key(root->store, key, NULL);
}

static td_status attend(struct exchange *exchange, char (*names)[TD__ROOT_KEY])
{
    struct td__root *root = exchange->root;
    char key[TD__ROOT_KEY];
    td__epoch_key(root->name, root->rank, key);
    TD_TRY(td_store_add(root->store, key, 1, &exchange->meeting));
    for (int r = 0; r < root->size; r++) {
        td__card_key(root->name, exchange->meeting, r, names[r]);
        exchange->keys[r] = names[r];
    }
    snprintf(exchange->came, TD__ROOT_KEY, "\1came/%.80s/%lld", root->name,
             (long long)exchange->meeting);
    snprintf(exchange->ended, TD__ROOT_KEY, "\1ended/%.80s/%lld", root->name,
             (long long)exchange->meeting);
    TD_TRY(td__roster_add(root->store, exchange->came, root->rank, false));
    TD_TRY(give_card(exchange));
    TD_TRY(await_cards(exchange));
    TD_TRY(td__endpoint_connect_all(root->endpoint, root->cards));
    tidy_up(exchange);
    return TD_OK;
}

td_status td__attend(struct td__root *root)
{
    size_t size = (size_t)root->size;
    char(*names)[TD__ROOT_KEY] = calloc(size, TD__ROOT_KEY);
    struct exchange exchange = {
        .root = root,
        .keys = calloc(size, sizeof *exchange.keys),
        .deadline = td__deadline_in_ms(root->timeout_ms),
        .peers = {.rank = root->rank, .size = root->size},
    };
    td_status status = names && exchange.keys ? attend(&exchange, names) : td__fail_nomem("group");
    td__peer_watch_free(&exchange.peers);
    free(exchange.keys);
    free(names);
    return status;
}
