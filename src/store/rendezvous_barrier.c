/* The meeting; see rendezvous_barrier.h. In the store, below one prefix a round:
 *
 *     attempt        the number of the attempt; the rest is below it. Only when the time of one was
 *                    over with ranks missing is there another
 *     came           the list of those who have come (roster.h), by which a death is noticed
 *     size           the world size, and who said so first
 *     rank/<r>       who claimed rank r; one process only, by compare_set
 *     arrived        how many ranks have come
 *     outcome        set once, by compare_set: "ok" by the last to arrive, or "<status> <message>"
 *                    by the first who finds that it cannot succeed
 *
 * All wait for `outcome`, so that the first failure's reason reaches everybody at once. */
#include "store/rendezvous_barrier.h"

#include "base/auth.h"
#include "base/fail.h"
#include "base/host.h"
#include "base/number.h"
#include "os/process.h"
#include "store/peer_watch.h"
#include "store/roster.h"
#include "store/store_ops.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    NAMED_RANKS = 16,
    REASON_MS = 5000,
    PAUSE_MS = 50, /* until those who have come are looked after; then twice as long each time … */
    LAST_PAUSE_MS = 400,   /* … up to this, and … */
    PAUSE_PER_RANK_MS = 4, /* … more, where the store has many to serve */
};

struct meeting {
    const td_world *world;
    const char *place;
    td_store *store; /* with the round's prefix */
    char me[160];    /* "process 123 on host", and a number that no other process has */
    size_t shown;    /* how much of `me` is for people */
};

static td_status identify(struct meeting *meeting)
{
    uint64_t number;
    TD_TRY(td__random(&number, sizeof number));
    int length = snprintf(meeting->me, sizeof meeting->me, "process %ld on %s", (long)getpid(),
                          td__host_name());
    meeting->shown = (size_t)length;
    snprintf(meeting->me + length, sizeof meeting->me - (size_t)length, "#%016" PRIx64, number);
    return TD_OK;
}

/* Reads an outcome: what it says becomes this rank's result. */
static td_status read_outcome(const td_bytes *outcome)
{
    if (!strcmp(outcome->data, "ok"))
        return TD_OK;
    char *message;
    long status = strtol(outcome->data, &message, 10);
    if (status <= TD_OK || status > TD_ERR_ABORTED || *message != ' ')
        return td_fail(TD_ERR_PEER, "rendezvous: the outcome \"%.100s\" makes no sense",
                       outcome->data);
    return td_fail((td_status)status, "%s", message + 1);
}

/* Offers an outcome; the first one stands, and is returned. */
static td_status settle(struct meeting *meeting, const char *offer)
{
    td_bytes outcome;
    TD_TRY(td_store_compare_set(meeting->store, "outcome", "", 0, offer, strlen(offer), &outcome));
    td_status status = read_outcome(&outcome);
    td_bytes_free(&outcome);
    return status;
}

/* Tells all the others about the failure that this thread has just set. If the meeting had already
 * succeeded without this process, the failure is its own alone. */
static td_status settle_failure(struct meeting *meeting, td_status failure)
{
    struct td__error error;
    char offer[sizeof error.text + 16];
    td__error_save(&error);
    snprintf(offer, sizeof offer, "%d %s", (int)failure, error.text);
    settle(meeting, offer);
    return td__error_restore(&error);
}

/* Puts `mine` at `key` unless somebody was there before: then *theirs is what they put. */
static td_status claim(struct meeting *meeting, const char *key, const char *mine, td_bytes *theirs)
{
    TD_TRY(td_store_compare_set(meeting->store, key, "", 0, mine, strlen(mine), theirs));
    if (!strcmp(theirs->data, mine))
        td_bytes_free(theirs);
    return TD_OK;
}

static td_status agree_on_size(struct meeting *meeting)
{
    char mine[200];
    td_bytes theirs = {0};
    snprintf(mine, sizeof mine, "%d %s", meeting->world->world_size, meeting->me);
    TD_TRY(claim(meeting, "size", mine, &theirs));
    int size = theirs.data ? atoi(theirs.data) : meeting->world->world_size;
    td_status status = TD_OK;
    if (size != meeting->world->world_size) {
        const char *who = strchr(theirs.data, ' ');
        status = td_fail(TD_ERR_MISMATCH,
                         "rendezvous at %s:%.*s has a world size of %d, %.*s (rank %d) one of %d; "
                         "all must have the same",
                         meeting->place, (int)strcspn(who ? who : "", "#"), who ? who : "", size,
                         (int)meeting->shown, meeting->me, meeting->world->rank,
                         meeting->world->world_size);
        status = settle_failure(meeting, status);
    }
    td_bytes_free(&theirs);
    return status;
}

bool td__rejoins(void)
{
    const char *said = getenv("TANDEM_REJOIN");
    return said && !strcmp(said, "1");
}

/* Whether who claimed the rank before has ended. On this host that can be seen; of another one the
 * launcher must know. */
static bool is_seen_to_have_ended(const char *who)
{
    char host[128];
    int pid;
    if (sscanf(who, "process %d on %127[^#]", &pid, host) != 2 ||
        strcmp(host, td__host_name()) != 0)
        return false;
    char state = td__process_state(pid);
    return !state || state == 'Z' || state == 'X';
}

static bool has_ended(const char *who)
{
    return td__rejoins() || is_seen_to_have_ended(who);
}

/* The rank was claimed before, the meeting went well, and the former process is no more: this one takes
 * its place, and the others will let it in again (td_group_grow()). */
static td_status take_place(struct meeting *meeting, const char *key, const td_bytes *theirs,
                            bool *taken)
{
    const char *outcome_key = "outcome";
    td_bytes outcome = {0}, now = {0};
    bool settled;
    *taken = false;
    if (!has_ended(theirs->data))
        return TD_OK;
    TD_TRY(td_store_check(meeting->store, &outcome_key, 1, &settled));
    if (!settled)
        return TD_OK;
    TD_TRY(td_store_get(meeting->store, outcome_key, 0, &outcome));
    bool well = !strcmp(outcome.data, "ok");
    td_bytes_free(&outcome);
    if (!well)
        return TD_OK;
    TD_TRY(td_store_compare_set(meeting->store, key, theirs->data, theirs->size, meeting->me,
                                strlen(meeting->me), &now));
    *taken = !strcmp(now.data, meeting->me);
    td_bytes_free(&now);
    return TD_OK;
}

/* *again: as the successor of a process that had this rank in a meeting that is over. */
static td_status claim_rank(struct meeting *meeting, bool *again)
{
    char key[32];
    td_bytes theirs = {0};
    int rank = meeting->world->rank;
    snprintf(key, sizeof key, "rank/%d", rank);
    TD_TRY(claim(meeting, key, meeting->me, &theirs));
    if (!theirs.data)
        return TD_OK;
    td_status taking = take_place(meeting, key, &theirs, again);
    if (taking || *again) {
        td_bytes_free(&theirs);
        return taking;
    }
    if (is_seen_to_have_ended(theirs.data)) { /* as those who wait would have found out, too */
        td_status ended = td_fail(
            TD_ERR_PEER, "rendezvous at %s: rank %d (%.*s) has ended before all ranks had come",
            meeting->place, rank, (int)strcspn(theirs.data, "#"), theirs.data);
        td_bytes_free(&theirs);
        return settle_failure(meeting, ended);
    }
    td_status status = td_fail(
        TD_ERR_MISMATCH,
        "rendezvous at %s: %.*s and %.*s both are rank %d; each process needs a rank of its "
        "own, and each job a place of its own",
        meeting->place, (int)strcspn(theirs.data, "#"), theirs.data, (int)meeting->shown,
        meeting->me, rank);
    td_bytes_free(&theirs);
    return settle_failure(meeting, status);
}

/* One that claimed its rank, and ended before it was counted. How many are named: one at most. */
static int name_ended(struct meeting *meeting, char *text, size_t room)
{
    for (int rank = 0; rank < meeting->world->world_size; rank++) {
        char key[32];
        td_bytes who;
        snprintf(key, sizeof key, "rank/%d", rank);
        if (td_store_get(meeting->store, key, 1000, &who))
            return 0;
        bool ended = is_seen_to_have_ended(who.data);
        if (ended)
            snprintf(text, room, "%d (%.*s, which has ended)", rank, (int)strcspn(who.data, "#"),
                     who.data);
        td_bytes_free(&who);
        if (ended)
            return 1;
    }
    return 0;
}

/* The time is over: says who is missing. */
static td_status fail_incomplete(struct meeting *meeting)
{
    char missing[256] = "";
    size_t length = 0;
    int named = 0, size = meeting->world->world_size, rank;
    int64_t arrived = 0;
    TD_TRY(td_store_add(meeting->store, "arrived", 0, &arrived));
    for (rank = 0; rank < size && named < NAMED_RANKS; rank++) {
        char key[32];
        const char *keys[] = {key};
        bool there;
        snprintf(key, sizeof key, "rank/%d", rank);
        TD_TRY(td_store_check(meeting->store, keys, 1, &there));
        if (there)
            continue;
        length += (size_t)snprintf(missing + length, sizeof missing - length, "%s%d",
                                   named ? ", " : "", rank);
        named++;
    }
    if (!named)
        named = name_ended(meeting, missing, sizeof missing);
    td_status status = td_fail(TD_ERR_TIMEOUT,
                               "rendezvous at %s: the time is over and %" PRId64
                               " of %d ranks have come; missing: "
                               "%s%s%s",
                               meeting->place, arrived, size,
                               named > 1 ? "ranks "
                               : named   ? "rank "
                                         : "one that had claimed its rank, and may have ended",
                               missing, rank < size ? ", …" : "");
    char offer[1100];
    snprintf(offer, sizeof offer, "%d %s", (int)status, td_last_error());
    return settle(meeting, offer); /* unless the last one came this very moment */
}

/* One that has come and ended is as good as missing, and will not come any more. *over: so it is, and what is
 * returned is the outcome. */
static td_status watch_peers(struct meeting *meeting, struct td__peer_watch *peers, bool *over)
{
    td_bytes list = {0};
    char who[TD__WATCHED_TEXT], offer[1100];
    if (td__peer_watch_look_up(meeting->store, "came", &list))
        td__peer_watch_watch(peers, list.data);
    td_bytes_free(&list);
    *over = td__peer_watch_find_ended(peers, who) >= 0;
    if (!*over)
        return TD_OK;
    snprintf(offer, sizeof offer, "%d rendezvous at %s: %s before all ranks had come", TD_ERR_PEER,
             meeting->place, who);
    return settle(meeting, offer); /* which has been settled, where that one was done already */
}

static td_status await_outcome_with(struct meeting *meeting, struct td__peer_watch *peers,
                                    td__deadline deadline)
{
    int more = PAUSE_PER_RANK_MS * peers->size, pause = PAUSE_MS + more;
    td_bytes outcome;
    bool over;
    for (;;) {
        int left = td__deadline_poll_ms(deadline);
        td_status status = td_store_get(meeting->store, "outcome",
                                        left < 1       ? 1
                                        : left < pause ? left
                                                       : pause,
                                        &outcome);
        if (!status) {
            status = read_outcome(&outcome);
            td_bytes_free(&outcome);
            return status;
        }
        if (status != TD_ERR_TIMEOUT)
            return status;
        if (td__deadline_passed(deadline))
            return fail_incomplete(meeting);
        status = watch_peers(meeting, peers, &over);
        if (over)
            return status;
        pause = pause * 2 < LAST_PAUSE_MS + more ? pause * 2 : LAST_PAUSE_MS + more;
    }
}

static td_status await_outcome(struct meeting *meeting, td__deadline deadline)
{
    struct td__peer_watch peers = {.rank = meeting->world->rank,
                                   .size = meeting->world->world_size};
    td_status status = await_outcome_with(meeting, &peers, deadline);
    td__peer_watch_free(&peers);
    return status;
}

/* True when the attempt below meeting->store ended because ranks were missing, or one had ended. Who comes
 * to the latter for the first time is to hear of it. */
static td_status ended_incomplete(struct meeting *meeting, bool *ended)
{
    const char *key = "outcome";
    td_bytes outcome;
    TD_TRY(td_store_check(meeting->store, &key, 1, ended));
    if (!*ended)
        return TD_OK;
    TD_TRY(td_store_get(meeting->store, key, 0, &outcome));
    long status = strtol(outcome.data, NULL, 10);
    td_bytes_free(&outcome);
    *ended = status == TD_ERR_TIMEOUT;
    if (status != TD_ERR_PEER)
        return TD_OK;
    char rank[32];
    snprintf(rank, sizeof rank, "rank/%d", meeting->world->rank);
    key = rank;
    return td_store_check(meeting->store, &key, 1, ended);
}

/* Opens the part of the store that the present attempt uses, or begins the next one. */
static td_status open_attempt(struct meeting *meeting, td_store *round)
{
    char now[24] = "", next[24];
    for (int64_t attempt = 0;; attempt++) {
        td_bytes value;
        bool over;
        int length = snprintf(next, sizeof next, "%" PRId64, attempt);
        TD_TRY(
            td_store_compare_set(round, "attempt", now, strlen(now), next, (size_t)length, &value));
        bool known = td__parse_i64(value.data, value.size, &attempt); /* another may be ahead */
        td_bytes_free(&value);
        if (!known)
            return td_fail(TD_ERR_PEER, "rendezvous at %s: its number makes no sense",
                           meeting->place);
        snprintf(now, sizeof now, "%" PRId64, attempt);
        TD_TRY(td_prefix_store_open(now, round, &meeting->store));
        td_status status = ended_incomplete(meeting, &over);
        if (!status && !over)
            return TD_OK;
        td_store_close(meeting->store);
        TD_TRY(status);
    }
}

/* The part of the store for this meeting. A rank may be ready to wait for the others only for a
 * moment; the store itself gets REASON_MS all the same to answer, and to say who is missing. */
static td_status open_round(const td_world *world, const char *round, td_store **store)
{
    char prefix[128];
    snprintf(prefix, sizeof prefix, TD__INTERNAL_KEY "meet/%s", round);
    TD_TRY(td_prefix_store_open(prefix, world->store, store));
    if (td_store_timeout(*store) < REASON_MS)
        td_store_set_timeout(*store, REASON_MS);
    return TD_OK;
}

td_status td__rendezvous_barrier(const td_world *world, const char *place, const char *round,
                                 td__deadline deadline, bool *again)
{
    struct meeting meeting = {.world = world, .place = place};
    td_store *store;
    TD_TRY(identify(&meeting));
    TD_TRY(open_round(world, round, &store));
    td_status status = open_attempt(&meeting, store);
    td_store_close(store); /* kept open by the attempt's */
    TD_TRY(status);

    int64_t arrived = 0;
    *again = false;
    status = td__roster_add(meeting.store, "came", world->rank, false);
    if (!status)
        status = agree_on_size(&meeting);
    if (!status)
        status = claim_rank(&meeting, again);
    if (!status && !*again)
        status = td_store_add(meeting.store, "arrived", 1, &arrived);
    if (!status && !*again)
        status = arrived == world->world_size ? settle(&meeting, "ok")
                                              : await_outcome(&meeting, deadline);
    td_store_close(meeting.store);
    return status;
}
