/* The ranks of a root meet, through its store.
 *
 * Each rank puts its card there and reads everybody's, in one request. A store may see several meetings; each
 * rank counts its own, and so all agree on the number.
 *
 * One that dies before its card is there would be waited for until the time is over. So each rank also says
 * first of all which process it is (store/sign_in.h), at the rendezvous already where there was one, and who
 * has waited for a while looks after those of its own machine:
 *
 *     card/NAME/MEETING/RANK     the cards
 *     came/NAME/MEETING          the list of those who have come, where there was no rendezvous
 *     ended/NAME/MEETING         what somebody saw of one that has ended, for those on other machines */
#include "group/attendance.h"

#include "base/fail.h"
#include "store/guests.h"
#include "store/meet.h"
#include "store/sign_in.h"
#include "store/store_ops.h"

#include <stdio.h>
#include <stdlib.h>

enum { PAUSE_MS = 30, LAST_PAUSE_MS = 300, PAUSE_PER_RANK_MS = 4, LAST_LOOK_MS = 50 };

struct attendance {
    struct td__root *root;
    int64_t meeting;
    const char **keys; /* of the cards */
    td__deadline deadline;
    char came[TD__ROOT_KEY], ended[TD__ROOT_KEY];
    struct td__guests guests;
    bool complete; /* nobody else will sign in */
};

/* ---- Looking after those who have come ------------------------------------------------------- */

/* All of a rendezvous have signed before it was over. Its list says nothing to a process that was not at it,
 * or that came back later: those who are dead may be about to come back as well. */
static void find_guests(struct attendance *attendance)
{
    struct td__root *root = attendance->root;
    td_store *store = root->given;
    td_bytes list = {0};
    char key[TD__SIGN_IN_ROOM];
    if (attendance->complete)
        return;
    td__sign_in_key(td__prefix_store_base(&store), key);
    if (td__guests_look_up(store, key, &list)) {
        attendance->complete = td__guests_has_self(&attendance->guests, list.data);
        if (attendance->complete)
            td__guests_watch(&attendance->guests, list.data);
        td_bytes_free(&list);
    }
    if (!attendance->complete && !td__rejoins() &&
        td__guests_look_up(root->store, attendance->came, &list)) {
        td__guests_watch(&attendance->guests, list.data);
        td_bytes_free(&list);
    }
}

/* The others are told, since some may be on other machines. What is said first stands: who has heard of one
 * end may have ended since, and is not to be taken for the cause. */
static td_status fail_ended(const struct attendance *attendance, const char *who)
{
    const struct td__root *root = attendance->root;
    td_bytes first = {0};
    char text[512];
    int length = snprintf(text, sizeof text, "group \"%.100s\": %s before all ranks had met",
                          root->name, who);
    bool told = !td_store_compare_set(root->store, attendance->ended, "", 0, text, (size_t)length,
                                      &first);
    td_status status = td__fail(TD_ERR_PEER, "%s", told ? first.data : text);
    td_bytes_free(&first);
    return status;
}

static td_status look_after_guests(struct attendance *attendance)
{
    td_bytes told = {0};
    char who[TD__GUEST_TEXT];
    find_guests(attendance);
    if (td__guests_find_ended(&attendance->guests, who) >= 0)
        return fail_ended(attendance, who);
    if (!td__guests_look_up(attendance->root->store, attendance->ended, &told))
        return TD_OK;
    td_status status = td__fail(TD_ERR_PEER, "%s", told.data);
    td_bytes_free(&told);
    return status;
}

/* ---- The cards ------------------------------------------------------------------------------- */

/* Who has not come to the meeting, instead of a key that nobody knows. */
static td_status name_missing(const struct attendance *attendance)
{
    struct td__root *root = attendance->root;
    char missing[256] = "", why[512];
    size_t length = 0;
    int count = 0;
    snprintf(why, sizeof why, "%s", td_last_error());
    for (int r = 0; r < root->size && length < sizeof missing - 16; r++) {
        bool there = true;
        if (!td_store_check(root->store, &attendance->keys[r], 1, &there) && !there) {
            length += (size_t)snprintf(missing + length, sizeof missing - length, "%s%d",
                                       length ? ", " : "", r);
            count++;
        }
    }
    if (!count)
        return td__fail(TD_ERR_TIMEOUT, "%s", why);
    return td__fail(TD_ERR_TIMEOUT,
                    "group \"%s\": rank%s %s %s not joined within %lld ms: %s ended, or %s not "
                    "called td_init_process_group() or td_group_open()",
                    root->name, count > 1 ? "s" : "", missing, count > 1 ? "have" : "has",
                    (long long)root->timeout_ms, count > 1 ? "they have" : "it has",
                    count > 1 ? "have" : "has");
}

static td_status get_cards(const struct attendance *attendance, int64_t limit_ms)
{
    struct td__root *root = attendance->root;
    int left = td__deadline_poll_ms(attendance->deadline);
    return td_store_multi_get(root->store, attendance->keys, (size_t)root->size,
                              left < 1          ? 1
                              : left < limit_ms ? left
                                                : limit_ms,
                              root->cards);
}

/* One that met all others, and has ended since, is no reason to fail: then the cards are there. */
static td_status await_cards(struct attendance *attendance)
{
    int64_t more = (int64_t)PAUSE_PER_RANK_MS * attendance->root->size, pause = PAUSE_MS + more;
    char why[512];
    for (;;) {
        td_status status = get_cards(attendance, pause);
        if (status != TD_ERR_TIMEOUT)
            return status;
        if (td__deadline_passed(attendance->deadline))
            return name_missing(attendance);
        status = look_after_guests(attendance);
        if (status) {
            snprintf(why, sizeof why, "%s", td_last_error());
            return get_cards(attendance, LAST_LOOK_MS) ? td__fail(status, "%s", why) : TD_OK;
        }
        pause = pause * 2 < LAST_PAUSE_MS + more ? pause * 2 : LAST_PAUSE_MS + more;
    }
}

static td_status give_card(const struct attendance *attendance)
{
    struct td__root *root = attendance->root;
    struct td__buffer card = {0};
    td__endpoint_card(root->endpoint, &card);
    td_status status = card.failed ? td__fail_nomem("group")
                                   : td_store_set(root->store, attendance->keys[root->rank],
                                                  card.data, card.size);
    td__buffer_free(&card);
    return status;
}

/* Everyone has come to this meeting, so nobody needs the last one. */
static void tidy_up(const struct attendance *attendance)
{
    struct td__root *root = attendance->root;
    char key[TD__ROOT_KEY];
    if (attendance->meeting == 1)
        return;
    td__card_key(root->name, attendance->meeting - 1, root->rank, key);
    td_store_delete_key(root->store, key, NULL);
    if (root->rank)
        return;
    snprintf(key, sizeof key, "\1came/%.80s/%lld", root->name, (long long)attendance->meeting - 1);
    td_store_delete_key(root->store, key, NULL);
}

static td_status attend(struct attendance *attendance, char (*names)[TD__ROOT_KEY])
{
    struct td__root *root = attendance->root;
    char key[TD__ROOT_KEY];
    td__meeting_key(root->name, root->rank, key);
    TD_TRY(td_store_add(root->store, key, 1, &attendance->meeting));
    for (int r = 0; r < root->size; r++) {
        td__card_key(root->name, attendance->meeting, r, names[r]);
        attendance->keys[r] = names[r];
    }
    snprintf(attendance->came, TD__ROOT_KEY, "\1came/%.80s/%lld", root->name,
             (long long)attendance->meeting);
    snprintf(attendance->ended, TD__ROOT_KEY, "\1ended/%.80s/%lld", root->name,
             (long long)attendance->meeting);
    TD_TRY(td__sign_in(root->store, attendance->came, root->rank, false));
    TD_TRY(give_card(attendance));
    TD_TRY(await_cards(attendance));
    TD_TRY(td__endpoint_meet(root->endpoint, root->cards));
    tidy_up(attendance);
    return TD_OK;
}

td_status td__attend(struct td__root *root)
{
    size_t size = (size_t)root->size;
    char(*names)[TD__ROOT_KEY] = calloc(size, TD__ROOT_KEY);
    struct attendance attendance = {
        .root = root,
        .keys = calloc(size, sizeof *attendance.keys),
        .deadline = td__deadline_in_ms(root->timeout_ms),
        .guests = {.rank = root->rank, .size = root->size},
    };
    td_status status = names && attendance.keys ? attend(&attendance, names)
                                                : td__fail_nomem("group");
    td__guests_free(&attendance.guests);
    free(attendance.keys);
    free(names);
    return status;
}
