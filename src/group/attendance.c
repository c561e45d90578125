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
#include "base/host.h"
#include "os/ending.h"
#include "store/meet.h"
#include "store/sign_in.h"
#include "store/store_ops.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    PAUSE_MS = 30,
    LAST_PAUSE_MS = 300,
    PAUSE_PER_RANK_MS = 4,
    ANSWER_MS = 2000,
    LAST_LOOK_MS = 50
};

/* The process of another rank, as far as it can be watched. */
struct guest {
    int pid;
    int fd; /* -1: not watched */
    bool ended;
};

struct attendance {
    struct td__root *root;
    int64_t meeting;
    const char **keys; /* of the cards */
    td__deadline deadline;
    char came[TD__ROOT_KEY], ended[TD__ROOT_KEY];
    struct guest *guests; /* NULL: nobody has been looked after yet */
    bool complete;        /* nobody else will sign in */
};

/* ---- Looking after those who have come ------------------------------------------------------- */

static void watch(struct attendance *attendance, const struct td__signature *signature)
{
    struct guest *guest = &attendance->guests[signature->rank];
    if (guest->pid == signature->mark.pid)
        return;
    if (guest->fd >= 0)
        close(guest->fd);
    guest->pid = signature->mark.pid;
    guest->fd = td__process_mark_open(&signature->mark, &guest->ended);
}

/* Watches those of the list that are on this machine; a later line about a rank is about its successor.
 * Whether this rank is in it, and came as its first process. */
static bool read_list(struct attendance *attendance, const char *list, bool watches)
{
    struct td__process_mark own;
    struct td__signature signature;
    bool present = false;
    if (!td__process_mark((int)getpid(), &own))
        return false;
    while (td__next_signature(&list, &signature)) {
        bool self = signature.rank == attendance->root->rank;
        if (self)
            present = td__process_mark_equal(&signature.mark, &own) && !signature.again;
        else if (watches && signature.rank >= 0 && signature.rank < attendance->root->size &&
                 signature.mark.space == own.space && signature.mark.pid != own.pid)
            watch(attendance, &signature);
    }
    return present;
}

static bool look_up(td_store *store, const char *key, td_bytes *value)
{
    bool there = false;
    return !td_store_check(store, &key, 1, &there) && there &&
           !td_store_get(store, key, ANSWER_MS, value);
}

/* All of a rendezvous have signed before it was over. Its list says nothing to a process that was not at it,
 * or that came back later: those who are dead may be about to come back as well. */
static void find_guests(struct attendance *attendance)
{
    struct td__root *root = attendance->root;
    td_bytes list = {0};
    if (!attendance->guests) {
        attendance->guests = calloc((size_t)root->size, sizeof *attendance->guests);
        for (int r = 0; attendance->guests && r < root->size; r++)
            attendance->guests[r].fd = -1;
    }
    if (!attendance->guests || attendance->complete)
        return;
    td_store *store = root->given;
    char key[TD__SIGN_IN_ROOM];
    td__sign_in_key(td__prefix_store_base(&store), key);
    if (look_up(store, key, &list)) {
        attendance->complete = read_list(attendance, list.data, false);
        if (attendance->complete)
            read_list(attendance, list.data, true);
        td_bytes_free(&list);
    }
    if (!attendance->complete && !td__rejoins() && look_up(root->store, attendance->came, &list)) {
        read_list(attendance, list.data, true);
        td_bytes_free(&list);
    }
}

static void forget_guests(struct attendance *attendance)
{
    for (int r = 0; attendance->guests && r < attendance->root->size; r++)
        if (attendance->guests[r].fd >= 0)
            close(attendance->guests[r].fd);
    free(attendance->guests);
}

static bool has_ended(struct guest *guest)
{
    struct pollfd end = {.fd = guest->fd, .events = POLLIN};
    if (guest->fd >= 0 && poll(&end, 1, 0) == 1)
        guest->ended = true;
    return guest->ended;
}

/* The others are told, since some may be on other machines. What is said first stands: who has heard of one
 * end may have ended since, and is not to be taken for the cause. */
static td_status fail_ended(struct attendance *attendance, int rank)
{
    const struct td__root *root = attendance->root;
    const struct guest *guest = &attendance->guests[rank];
    char how[96], text[512];
    /* One that had ended before it was looked for: its number may be another's by now. */
    int ending = guest->fd >= 0 ? td__ending_of(guest->pid, guest->fd) : TD__ENDING_UNKNOWN;
    td__ending_text(ending, how, sizeof how);
    int length = snprintf(text, sizeof text,
                          "group \"%.100s\": rank %d (on %s, pid %d) %s before all ranks had met",
                          root->name, rank, td__host_name(), guest->pid, how);
    td_bytes first = {0};
    bool told = !td_store_compare_set(root->store, attendance->ended, "", 0, text, (size_t)length,
                                      &first);
    td_status status = td__fail(TD_ERR_PEER, "%s", told ? first.data : text);
    td_bytes_free(&first);
    return status;
}

static td_status look_after_guests(struct attendance *attendance)
{
    td_bytes text = {0};
    find_guests(attendance);
    for (int r = 0; attendance->guests && r < attendance->root->size; r++)
        if (has_ended(&attendance->guests[r]))
            return fail_ended(attendance, r);
    if (!look_up(attendance->root->store, attendance->ended, &text))
        return TD_OK;
    td_status status = td__fail(TD_ERR_PEER, "%s", text.data);
    td_bytes_free(&text);
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
                    "group \"%s\": rank%s %s %s not come within %lld ms; %s ended, or hung?",
                    root->name, count > 1 ? "s" : "", missing, count > 1 ? "have" : "has",
                    (long long)root->timeout_ms, count > 1 ? "have they" : "has it");
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
    };
    td_status status = names && attendance.keys ? attend(&attendance, names)
                                                : td__fail_nomem("group");
    forget_guests(&attendance);
    free(attendance.keys);
    free(names);
    return status;
}
