/* The barrier of a rendezvous; see rendezvous_schemes.h. In the store, below one prefix an epoch:
 *
 *     attempt        the number of the attempt; all other keys are below it. There is a second attempt
 *                    only when the first one timed out with ranks missing
 *     roster         the processes that have joined (peer_watch.h), by which the others notice a death
 *     size           the world size and the version of Tandem, and the process that set it first
 *     rank/<r>       the process that claimed rank r; one only, by compare_set
 *     joined         how many ranks have joined
 *     outcome        set once, by compare_set: "ok" by the last rank to join, or "<status> <message>"
 *                    by the first one to find that the rendezvous cannot succeed
 *
 * All ranks wait for `outcome`, so that the reason of the first failure reaches all of them at once. */
#include "store/rendezvous_schemes.h"

#include "base/auth.h"
#include "base/fail.h"
#include "base/host.h"
#include "base/number.h"
#include "base/text.h"
#include "os/process.h"
#include "store/peer_watch.h"
#include "store/store_ops.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    NAMED_RANKS = 16,
    REASON_MS = 5000,
};

struct barrier {
    const td_world *world;
    const char *address; /* for messages */
    td_store *store;     /* with the prefix of the epoch and the attempt */
    char me[160];        /* "process 123 on host#" and a number that no other process has */
    size_t shown;        /* bytes of `me` for messages */
    struct td__peer_watch peers;
};

static td_status identify(struct barrier *barrier)
{
    uint64_t number;
    TD_TRY(td__random(&number, sizeof number));
    int length = snprintf(barrier->me, sizeof barrier->me, "process %ld on %s", (long)getpid(),
                          td__host_name());
    barrier->shown = (size_t)length;
    snprintf(barrier->me + length, sizeof barrier->me - (size_t)length, "#%016" PRIx64, number);
    return TD_OK;
}

/* Turns an outcome into this rank's result. */
static td_status read_outcome(const td_bytes *outcome)
{
    if (!strcmp(outcome->data, "ok"))
        return TD_OK;
    char *message;
    long status = strtol(outcome->data, &message, 10);
    if (status <= TD_OK || status > TD_ERR_ABORTED || *message != ' ')
        return td_fail(TD_ERR_PEER, "rendezvous: the outcome \"%.100s\" in the store is malformed",
                       outcome->data);
    return td_fail((td_status)status, "%s", message + 1);
}

/* Offers an outcome; returns the first one that any rank offered. */
static td_status settle(struct barrier *barrier, const char *offer)
{
    td_bytes outcome;
    TD_TRY(td_store_compare_set(barrier->store, "outcome", "", 0, offer, strlen(offer), &outcome));
    td_status status = read_outcome(&outcome);
    td_bytes_free(&outcome);
    return status;
}

/* Offers the last error as outcome. */
static td_status settle_error(struct barrier *barrier)
{
    char offer[TD__ERROR_TEXT + 16];
    snprintf(offer, sizeof offer, "%d %s", (int)td__error_status(), td__error_text());
    return settle(barrier, offer);
}

/* The same, and returns that error. If the rendezvous had succeeded already without this process, only this
 * process fails. */
static td_status settle_failure(struct barrier *barrier)
{
    struct td__error error;
    td__error_save(&error);
    settle_error(barrier);
    return td__error_restore(&error);
}

/* Sets `key` to `mine` unless it has a value already: then *theirs is that value. */
static td_status claim(struct barrier *barrier, const char *key, const char *mine, td_bytes *theirs)
{
    TD_TRY(td_store_compare_set(barrier->store, key, "", 0, mine, strlen(mine), theirs));
    if (!strcmp(theirs->data, mine))
        td_bytes_free(theirs);
    return TD_OK;
}

/* "8/0.1.0 process 12 on a#…": the processes of one job have the same version of the library. */
static td_status agree_on_version(struct barrier *barrier, const char *theirs)
{
    size_t size = strcspn(theirs, " "), digits = strcspn(theirs, "/ ");
    const char *version = theirs[digits] == '/' ? theirs + digits + 1 : "an older version";
    int length = theirs[digits] == '/' ? (int)(size - digits - 1) : (int)strlen(version);
    const char *process = theirs + size + (theirs[size] == ' ');
    if ((size_t)length == strlen(td__job_version) &&
        !strncmp(version, td__job_version, (size_t)length))
        return TD_OK;
    td_fail(
        TD_ERR_MISMATCH,
        "rendezvous at %s: %.*s has Tandem %.*s, %.*s (rank %d) has %s: all ranks need the same "
        "version; install it on all hosts",
        barrier->address, (int)strcspn(process, "#"), process, length < 64 ? length : 64, version,
        (int)barrier->shown, barrier->me, barrier->world->rank, td__job_version);
    return settle_failure(barrier);
}

static td_status agree_on_size(struct barrier *barrier)
{
    char mine[264];
    td_bytes theirs = {0};
    snprintf(mine, sizeof mine, "%d/%s %s", barrier->world->world_size, td__job_version,
             barrier->me);
    TD_TRY(claim(barrier, "size", mine, &theirs));
    int size = theirs.data ? atoi(theirs.data) : barrier->world->world_size;
    td_status status = theirs.data ? agree_on_version(barrier, theirs.data) : TD_OK;
    if (!status && size != barrier->world->world_size) {
        const char *process = strchr(theirs.data, ' ');
        td_fail(TD_ERR_MISMATCH,
                "rendezvous at %s:%.*s has a world size of %d, %.*s (rank %d) one of %d; "
                "all must have the same",
                barrier->address, (int)strcspn(process ? process : "", "#"), process ? process : "",
                size, (int)barrier->shown, barrier->me, barrier->world->rank,
                barrier->world->world_size);
        status = settle_failure(barrier);
    }
    td_bytes_free(&theirs);
    return status;
}

/* Whether `process`, the value of a rank/<r>, has ended. That can be seen on this host only; for a
 * process of another host the launcher says so (TANDEM_REJOIN). */
static bool is_seen_to_have_ended(const char *process)
{
    char host[128];
    int pid;
    if (sscanf(process, "process %d on %127[^#]", &pid, host) != 2 ||
        strcmp(host, td__host_name()) != 0)
        return false;
    char state = td__process_state(pid);
    return !state || state == 'Z' || state == 'X';
}

static bool has_ended(const char *process)
{
    return td__rejoins() || is_seen_to_have_ended(process);
}

/* The rank was claimed before, the rendezvous succeeded, and the process that had the rank has ended: this
 * one takes the rank over, and the others admit it with td_group_grow(). */
static td_status take_over_rank(struct barrier *barrier, const char *key, const td_bytes *theirs,
                                bool *taken)
{
    td_bytes outcome = {0}, now = {0};
    bool settled;
    *taken = false;
    if (!has_ended(theirs->data))
        return TD_OK;
    TD_TRY(td__store_look_up(barrier->store, "outcome", &outcome, &settled));
    bool succeeded = settled && !strcmp(outcome.data, "ok");
    td_bytes_free(&outcome);
    if (!succeeded)
        return TD_OK;
    TD_TRY(td_store_compare_set(barrier->store, key, theirs->data, theirs->size, barrier->me,
                                strlen(barrier->me), &now));
    *taken = !strcmp(now.data, barrier->me);
    td_bytes_free(&now);
    return TD_OK;
}

/* *rejoined: as the successor of a process that had this rank in a rendezvous that has succeeded. */
static td_status claim_rank(struct barrier *barrier, bool *rejoined)
{
    char key[32];
    td_bytes theirs = {0};
    int rank = barrier->world->rank;
    snprintf(key, sizeof key, "rank/%d", rank);
    TD_TRY(claim(barrier, key, barrier->me, &theirs));
    if (!theirs.data)
        return TD_OK;
    td_status taking = take_over_rank(barrier, key, &theirs, rejoined);
    if (taking || *rejoined) {
        td_bytes_free(&theirs);
        return taking;
    }
    if (is_seen_to_have_ended(theirs.data)) /* the ranks that wait find this out as well */
        td_fail(TD_ERR_PEER,
                "rendezvous at %s: rank %d (%.*s) has ended before all ranks had joined",
                barrier->address, rank, (int)strcspn(theirs.data, "#"), theirs.data);
    else
        td_fail(
            TD_ERR_MISMATCH,
            "rendezvous at %s: %.*s and %.*s both are rank %d; each process needs a rank of its "
            "own, and each job an address of its own",
            barrier->address, (int)strcspn(theirs.data, "#"), theirs.data, (int)barrier->shown,
            barrier->me, rank);
    td_bytes_free(&theirs);
    return settle_failure(barrier);
}

/* Names a process that claimed its rank and ended before it joined. Returns how many are named, one at
 * most. */
static int name_ended(struct barrier *barrier, char *text, size_t room)
{
    for (int rank = 0; rank < barrier->world->world_size; rank++) {
        char key[32];
        td_bytes process;
        bool found;
        snprintf(key, sizeof key, "rank/%d", rank);
        if (td__store_look_up(barrier->store, key, &process, &found) || !found)
            return 0;
        bool ended = is_seen_to_have_ended(process.data);
        if (ended)
            snprintf(text, room, "%d (%.*s, which has ended)", rank,
                     (int)strcspn(process.data, "#"), process.data);
        td_bytes_free(&process);
        if (ended)
            return 1;
    }
    return 0;
}

/* The deadline has passed: says which ranks are missing. */
static td_status fail_incomplete(struct barrier *barrier)
{
    char missing[256] = "";
    int named = 0, size = barrier->world->world_size, rank;
    int64_t joined = 0;
    TD_TRY(td_store_add(barrier->store, "joined", 0, &joined));
    for (rank = 0; rank < size && named < NAMED_RANKS; rank++) {
        char key[32];
        const char *keys[] = {key};
        bool there;
        snprintf(key, sizeof key, "rank/%d", rank);
        TD_TRY(td_store_check(barrier->store, keys, 1, &there));
        if (there)
            continue;
        td__text_add(missing, sizeof missing, "%s%d", named++ ? ", " : "", rank);
    }
    if (!named)
        named = name_ended(barrier, missing, sizeof missing);
    td_fail(TD_ERR_TIMEOUT,
            "rendezvous at %s: timed out: %" PRId64 " of %d ranks have joined; missing: "
            "%s%s%s",
            barrier->address, joined, size,
            named > 1 ? "ranks "
            : named   ? "rank "
                      : "one that had claimed its rank, and may have ended",
            missing, rank < size ? ", …" : "");
    return settle_error(barrier); /* "ok" where the last rank has joined just now */
}

/* A rank that has joined and ended since will not answer any more: that is the outcome, unless there is one
 * already. */
static td_status check_peers(void *arg)
{
    struct barrier *barrier = arg;
    td_bytes list = {0};
    bool found;
    char process[TD__WATCHED_TEXT], offer[TD__WATCHED_TEXT + 640];
    if (!td__store_look_up(barrier->store, "roster", &list, &found) && found)
        td__peer_watch_watch(&barrier->peers, list.data);
    td_bytes_free(&list);
    if (td__peer_watch_find_ended(&barrier->peers, process) < 0)
        return TD_OK;
    snprintf(offer, sizeof offer, "%d rendezvous at %s: %s before all ranks had joined",
             TD_ERR_PEER, barrier->address, process);
    return settle(barrier, offer); /* "ok" where that rank was the last one to join */
}

static td_status await_outcome(struct barrier *barrier, td__deadline deadline)
{
    struct td__watched_wait wait = {.ranks = barrier->world->world_size,
                                    .deadline = deadline,
                                    .check = check_peers,
                                    .arg = barrier};
    const char *key = "outcome";
    td_bytes outcome;
    td_status status = td__peer_watch_get(barrier->store, &key, 1, &wait, &outcome);
    if (status)
        return status == TD_ERR_TIMEOUT ? fail_incomplete(barrier) : status;
    status = read_outcome(&outcome);
    td_bytes_free(&outcome);
    return status;
}

/* True when the attempt below barrier->store failed because ranks were missing, or because a process had
 * ended. A process that joins the latter for the first time fails with its outcome. */
static td_status ended_incomplete(struct barrier *barrier, bool *ended)
{
    td_bytes outcome;
    TD_TRY(td__store_look_up(barrier->store, "outcome", &outcome, ended));
    if (!*ended)
        return TD_OK;
    long status = strtol(outcome.data, NULL, 10);
    td_bytes_free(&outcome);
    *ended = status == TD_ERR_TIMEOUT;
    if (status != TD_ERR_PEER)
        return TD_OK;
    char rank[32];
    const char *key = rank;
    snprintf(rank, sizeof rank, "rank/%d", barrier->world->rank);
    return td_store_check(barrier->store, &key, 1, ended);
}

/* Opens the part of the store for the present attempt, or begins the next one. */
static td_status open_attempt(struct barrier *barrier, td_store *epoch)
{
    char now[24] = "", next[24];
    for (int64_t attempt = 0;; attempt++) {
        td_bytes value;
        bool over;
        int length = snprintf(next, sizeof next, "%" PRId64, attempt);
        TD_TRY(
            td_store_compare_set(epoch, "attempt", now, strlen(now), next, (size_t)length, &value));
        bool known = td__parse_i64(value.data, value.size,
                                   &attempt); /* another rank may have begun a later one */
        td_bytes_free(&value);
        if (!known)
            return td_fail(TD_ERR_PEER, "rendezvous at %s: the number of its attempt is malformed",
                           barrier->address);
        snprintf(now, sizeof now, "%" PRId64, attempt);
        TD_TRY(td_prefix_store_open(now, epoch, &barrier->store));
        td_status status = ended_incomplete(barrier, &over);
        if (!status && !over)
            return TD_OK;
        td_store_close(barrier->store);
        TD_TRY(status);
    }
}

/* Opens the part of the store for this epoch. However short the timeout of a rank is, the store itself gets
 * REASON_MS to answer, and to say which ranks are missing. */
static td_status open_epoch(const td_world *world, const char *epoch, td_store **store)
{
    char prefix[128];
    snprintf(prefix, sizeof prefix, TD__INTERNAL_KEY "rendezvous/%s", epoch);
    TD_TRY(td_prefix_store_open(prefix, world->store, store));
    if (td_store_timeout(*store) < REASON_MS)
        td_store_set_timeout(*store, REASON_MS);
    return TD_OK;
}

td_status td__rendezvous_barrier(const td_world *world, const char *address, const char *epoch,
                                 td__deadline deadline, bool *rejoined)
{
    struct barrier barrier = {
        .world = world,
        .address = address,
        .peers = {.rank = world->rank, .size = world->world_size},
    };
    td_store *store;
    TD_TRY(identify(&barrier));
    TD_TRY(open_epoch(world, epoch, &store));
    td_status status = open_attempt(&barrier, store);
    td_store_close(store); /* the attempt's store keeps it open */
    TD_TRY(status);

    int64_t joined = 0;
    *rejoined = false;
    status = td__roster_add(barrier.store, "roster", world->rank, false);
    if (!status)
        status = agree_on_size(&barrier);
    if (!status)
        status = claim_rank(&barrier, rejoined);
    if (!status && !*rejoined)
        status = td_store_add(barrier.store, "joined", 1, &joined);
    if (!status && !*rejoined)
        status = joined == world->world_size ? settle(&barrier, "ok")
                                             : await_outcome(&barrier, deadline);
    td_store_close(barrier.store);
    td__peer_watch_free(&barrier.peers);
    return status;
}
