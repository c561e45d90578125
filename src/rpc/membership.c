/* Joining and leaving the world of workers, through the store.
 *
 * A world of a fixed size: each worker has a rank, publishes itself, and waits for all others (store/address_exchange.h).
 * All leave together. EPOCH counts how often this rank has become a worker:
 *
 *     idle/EPOCH/ROUND/RANK   how many calls the worker had made and served when it had no work left
 *     kept/EPOCH/RANK         it has seen that no worker has work left, and borrows nothing any more
 *     left/EPOCH/RANK         it has ended in order
 *
 * A dynamic world: a worker takes the next rank, publishes itself, and then its name, which others look up. It leaves
 * when it has no work of its own:
 *
 *     ranks                   how many ranks have been taken
 *     worker/RANK             the worker's name, and the card of its endpoint
 *     name/NAME               its rank
 *
 *     kind                    "fixed" or "dynamic": the first worker decides */
#include "base/fail.h"
#include "base/number.h"
#include "os/tls.h"
#include "rpc/lease.h"
#include "rpc/rpc_agent.h"
#include "store/address_exchange.h"
#include "store/store_ops.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    FIRST_CHECK_MS = 100, /* how often a worker that leaves checks on the others … */
    LAST_CHECK_MS = 1000, /* … and later */
    FIND_OUT_MS = 1000,
    KEY = TD_RPC_MAX_NAME + 32,
};

#define WORLD "workers" /* the name of the exchange of addresses */

/* What a worker publishes: its name, and the card of its endpoint. */
static td_status put_card(struct td__rpc_agent *agent, struct td__buffer *card)
{
    td__buffer_put_string(card, agent->name, strlen(agent->name));
    td__endpoint_card(agent->endpoint, card);
    return card->failed ? td__fail_nomem("rpc") : TD_OK;
}

static td_status check_kind(struct td__rpc_agent *agent)
{
    const char *kind = agent->dynamic ? "dynamic" : "fixed";
    td_bytes first = {0};
    TD_TRY(td_store_compare_set(agent->store, "kind", "", 0, kind, strlen(kind), &first));
    bool same = first.size == strlen(kind) && !memcmp(first.data, kind, first.size);
    td_status status = same ? TD_OK
                            : td_fail(TD_ERR_MISMATCH,
                                      "td_init_rpc: this worker has td_rpc_options.dynamic %s, and "
                                      "those that have joined before it have not",
                                      agent->dynamic ? "set" : "unset");
    td_bytes_free(&first);
    return status;
}

/* ---- A fixed world --------------------------------------------------------------------------- */

static void rank_key(const char *what, int64_t epoch, int rank, char key[KEY])
{
    snprintf(key, KEY, "%s/%" PRId64 "/%d", what, epoch, rank);
}

/* A former worker of this rank has not left, as far as the store knows. If it is there, two processes have the same
 * rank; if not, it was killed. It is added to the endpoint as one more rank. */
static td_status check_former(struct td__rpc_agent *agent, const td_bytes *published)
{
    struct td__reader reader = td__reader_of(published->data, published->size);
    td__reader_string(&reader, TD_RPC_MAX_NAME);
    td_bytes card = {.data = (char *)reader.at, .size = (size_t)(reader.end - reader.at)};
    int fd;
    if (reader.failed || td__endpoint_add_rank(agent->endpoint, agent->limit, &card) ||
        td__endpoint_connect_briefly(agent->endpoint, agent->limit, TD__LINKS, TD__CHANNEL_RPC,
                                     td__deadline_in_ms(FIND_OUT_MS), &fd))
        return TD_OK;
    td__sock_close(fd);
    char described[160];
    snprintf(described, sizeof described, "%s",
             strchr(td__endpoint_describe(agent->endpoint, agent->limit), '('));
    return td_fail(TD_ERR_MISMATCH,
                   "td_init_rpc: another process %s is rank %d of this store as well, and has not "
                   "left",
                   described, agent->rank);
}

static td_status look_for_former(struct td__rpc_agent *agent)
{
    char key[TD__EXCHANGE_KEY];
    td_bytes bytes = {0};
    int64_t epoch = 0;
    bool found;
    td__epoch_key(WORLD, agent->rank, key);
    TD_TRY(td__store_look_up(agent->store, key, &bytes, &found));
    if (found)
        td__parse_i64(bytes.data, bytes.size, &epoch);
    td_bytes_free(&bytes);
    if (epoch < 1)
        return TD_OK;
    const char *at = key;
    rank_key("left", epoch, agent->rank, key);
    TD_TRY(td_store_check(agent->store, &at, 1, &found));
    td__card_key(WORLD, epoch, agent->rank, key);
    if (found || td_store_get(agent->store, key, FIND_OUT_MS, &bytes))
        return TD_OK;
    td_status status = check_former(agent, &bytes);
    td_bytes_free(&bytes);
    return status;
}

static td_status join_fixed(struct td__rpc_agent *agent, td_store *given,
                            const struct td__buffer *card)
{
    struct td__address_exchange exchange = {
        .store = agent->store,
        .given = given,
        .name = WORLD,
        .kind = "rpc",
        .calls = "td_init_rpc()",
        .rank = agent->rank,
        .size = agent->limit,
        .timeout_ms = td_store_timeout(agent->store),
    };
    td_bytes *published = calloc((size_t)agent->limit, sizeof *published);
    if (!published)
        return td__fail_nomem("rpc");
    td_status status = look_for_former(agent);
    if (!status)
        status = td__exchange_addresses(&exchange, card->data, card->size, published);
    agent->epoch = exchange.epoch;
    for (int r = 0; r < agent->limit; r++) {
        if (!status)
            status = td__worker_introduce(agent, r, &published[r]);
        td_bytes_free(&published[r]);
    }
    free(published);
    return status;
}

/* Whether a worker does not take part in another round: it has gone, or has seen that all are done. */
static bool is_done(struct td__rpc_agent *agent, int rank)
{
    char key[KEY];
    const char *at = key;
    bool kept = false;
    rank_key("kept", agent->epoch, rank, key);
    return rank != agent->rank && (td__endpoint_presence(agent->endpoint, rank) != TD__PRESENT ||
                                   (!td_store_check(agent->store, &at, 1, &kept) && kept));
}

/* Waits for the key of a worker, unless that is done: *bytes is empty then. */
static td_status await_worker(struct td__rpc_agent *agent, const char *key, int rank,
                              td__deadline deadline, td_bytes *bytes)
{
    int64_t pause = FIRST_CHECK_MS;
    td_status status;
    while ((status = td_store_get(agent->store, key, pause, bytes)) == TD_ERR_TIMEOUT) {
        if (rank != agent->rank)
            td__endpoint_watch(agent->endpoint, rank);
        if (is_done(agent, rank))
            return TD_OK;
        if (td__deadline_passed(deadline))
            return td_fail(TD_ERR_TIMEOUT,
                           "td_rpc_shutdown: worker \"%s\" still has work, or has not called it",
                           td__worker_name_of(agent, rank));
        int left = td__deadline_poll_ms(deadline);
        pause = 2 * pause < LAST_CHECK_MS ? 2 * pause : LAST_CHECK_MS;
        pause = left > 0 && left < pause ? left : pause;
    }
    return status;
}

/* Publishes `value` as the key PHASE/RANK, and waits for the keys of all others that are not done: the sum of all. */
static td_status pass_phase(struct td__rpc_agent *agent, const char *phase, uint64_t value,
                            td__deadline deadline, uint64_t *sum)
{
    char key[KEY], text[32];
    int length = snprintf(text, sizeof text, "%" PRIu64, value);
    snprintf(key, sizeof key, "%s/%d", phase, agent->rank);
    TD_TRY(td_store_set(agent->store, key, text, (size_t)length));
    *sum = 0;
    for (int r = 0; r < agent->limit; r++) {
        td_bytes bytes = {0};
        snprintf(key, sizeof key, "%s/%d", phase, r);
        TD_TRY(await_worker(agent, key, r, deadline, &bytes));
        *sum += bytes.data ? strtoull(bytes.data, NULL, 10) : 0;
        td_bytes_free(&bytes);
    }
    return TD_OK;
}

/* The calls that it has made and served. */
static uint64_t activity_of(struct td__rpc_agent *agent)
{
    return atomic_load(&agent->begun) + atomic_load(&agent->served);
}

/* Waits until this worker is idle at a moment at which it had made and served *calls calls. */
static td_status become_idle(struct td__rpc_agent *agent,
                             bool (*await_idle)(struct td__rpc_agent *agent, td__deadline deadline),
                             td__deadline deadline, uint64_t *calls)
{
    do {
        *calls = activity_of(agent);
        if (!await_idle(agent, deadline))
            return td_fail(TD_ERR_TIMEOUT, "td_rpc_shutdown: this worker still has calls that are "
                                           "not complete");
    } while (activity_of(agent) != *calls);
    return TD_OK;
}

/* All have left their work behind when each had none in two rounds, and no call was made in between: then there was a
 * moment between the rounds at which none was under way. No function runs from then on, and borrowed tensors get
 * memory of their own, before any worker frees what it has lent. */
static td_status leave_together(struct td__rpc_agent *agent,
                                bool (*await_idle)(struct td__rpc_agent *agent,
                                                   td__deadline deadline),
                                td__deadline deadline)
{
    char phase[KEY];
    uint64_t own, before, activity = UINT64_MAX;
    int round = 0;
    do {
        before = activity;
        TD_TRY(become_idle(agent, await_idle, deadline, &own));
        snprintf(phase, sizeof phase, "idle/%" PRId64 "/%d", agent->epoch, round++);
        TD_TRY(pass_phase(agent, phase, own, deadline, &activity));
    } while (activity != before);
    td__rpc_keep_borrowed();
    snprintf(phase, sizeof phase, "kept/%" PRId64, agent->epoch);
    return pass_phase(agent, phase, 0, deadline, &activity);
}

/* ---- A dynamic world ------------------------------------------------------------------------- */

static void worker_key(int rank, char key[KEY])
{
    snprintf(key, KEY, "worker/%d", rank);
}

static void name_key(const char *name, char key[KEY])
{
    snprintf(key, KEY, "name/%.*s", TD_RPC_MAX_NAME, name);
}

/* The rank in a value of the store; -1 if it is none. */
static int rank_of(const td_bytes *bytes)
{
    int64_t rank = -1;
    bool valid = td__parse_i64(bytes->data, bytes->size, &rank);
    return valid && rank >= 0 && rank < TD__MAX_RANKS ? (int)rank : -1;
}

td_status td__membership_find_name(struct td__rpc_agent *agent, const char *name, int *rank)
{
    char key[KEY];
    td_bytes bytes = {0};
    bool found;
    name_key(name, key);
    TD_TRY(td__store_look_up(agent->store, key, &bytes, &found));
    *rank = found ? rank_of(&bytes) : -1;
    td_bytes_free(&bytes);
    return TD_OK;
}

td_status td__membership_introduce(struct td__rpc_agent *agent, int rank)
{
    char key[KEY];
    td_bytes bytes = {0};
    bool found = false;
    worker_key(rank, key);
    TD_TRY(td__store_look_up(agent->store, key, &bytes, &found));
    td_status status = found ? td__worker_introduce(agent, rank, &bytes)
                             : td_fail(TD_ERR_PEER, "the worker of rank %d has left", rank);
    td_bytes_free(&bytes);
    return status;
}

/* Whether the worker that has this worker's name is there. */
static bool is_there(struct td__rpc_agent *agent, int rank)
{
    if (td__worker_resolve(agent, rank))
        return td__error_status() != TD_ERR_PEER;
    return !td__endpoint_find_out(agent->endpoint, rank, td__deadline_in_ms(FIND_OUT_MS));
}

static td_status fail_taken(struct td__rpc_agent *agent, int rank)
{
    bool known = td__endpoint_knows(agent->endpoint, rank);
    return td_fail(
        TD_ERR_MISMATCH, "td_init_rpc: the worker \"%s\" is there already%s%s; names are unique",
        agent->name, known ? ": " : "", known ? td__endpoint_describe(agent->endpoint, rank) : "");
}

/* A worker that was killed has left its name behind: the next one takes it over. */
static td_status take_name(struct td__rpc_agent *agent)
{
    char key[KEY], own[16], before[16] = "";
    snprintf(own, sizeof own, "%d", agent->rank);
    name_key(agent->name, key);
    for (;;) {
        td_bytes now = {0};
        char former[KEY];
        TD_TRY(td_store_compare_set(agent->store, key, before, strlen(before), own, strlen(own),
                                    &now));
        int rank = rank_of(&now);
        bool absent = *before && now.size == strlen(before) && !memcmp(now.data, before, now.size);
        td_bytes_free(&now);
        if (rank == agent->rank)
            return TD_OK;
        if (rank < 0)
            return td_fail(TD_ERR_MISMATCH, "td_init_rpc: the key %s of the store has no rank",
                           key);
        *before = 0;
        if (absent)
            continue;
        if (is_there(agent, rank))
            return fail_taken(agent, rank);
        worker_key(rank, former);
        td_store_delete_key(agent->store, former, NULL);
        snprintf(before, sizeof before, "%d", rank);
    }
}

static td_status take_rank(struct td__rpc_agent *agent)
{
    int64_t count;
    TD_TRY(td_store_add(agent->store, "ranks", 1, &count));
    if (count > TD__MAX_RANKS)
        return td_fail(TD_ERR_STATE,
                       "td_init_rpc: %d workers have joined this store, and no more can; use "
                       "another one",
                       TD__MAX_RANKS);
    agent->rank = (int)count - 1;
    return TD_OK;
}

static td_status join_dynamic(struct td__rpc_agent *agent, const struct td__buffer *card)
{
    char key[KEY];
    worker_key(agent->rank, key);
    TD_TRY(td_store_set(agent->store, key, card->data, card->size));
    return take_name(agent);
}

/* The name may have been taken over, if this worker seemed to have ended. */
static void withdraw_dynamic(struct td__rpc_agent *agent)
{
    char key[KEY];
    int rank;
    name_key(agent->name, key);
    if (!td__membership_find_name(agent, agent->name, &rank) && rank == agent->rank)
        td_store_delete_key(agent->store, key, NULL);
    worker_key(agent->rank, key);
    td_store_delete_key(agent->store, key, NULL);
}

/* ---- Both ------------------------------------------------------------------------------------ */

td_status td__membership_join(struct td__rpc_agent *agent, td_store *given, const char *host,
                              bool shared)
{
    struct td__buffer card = {0};
    TD_TRY(check_kind(agent));
    if (agent->dynamic)
        TD_TRY(take_rank(agent));
    TD_TRY(td__workers_open(agent, host, shared));
    td_status status = put_card(agent, &card);
    if (!status)
        status = td__worker_introduce(agent, agent->rank,
                                      &(td_bytes){.data = (char *)card.data, .size = card.size});
    if (!status && !agent->dynamic)
        status = join_fixed(agent, given, &card);
    if (!status)
        status = td__workers_watch(agent);
    if (!status && agent->dynamic)
        status = join_dynamic(agent, &card);
    td__buffer_free(&card);
    return status;
}

td_status td__membership_leave(struct td__rpc_agent *agent,
                               bool (*await_idle)(struct td__rpc_agent *agent,
                                                  td__deadline deadline),
                               td__deadline deadline)
{
    uint64_t calls;
    return agent->dynamic ? become_idle(agent, await_idle, deadline, &calls)
                          : leave_together(agent, await_idle, deadline);
}

void td__membership_withdraw(struct td__rpc_agent *agent)
{
    char key[KEY];
    if (!agent->endpoint)
        return;
    if (agent->dynamic) {
        withdraw_dynamic(agent);
    } else if (agent->epoch) {
        rank_key("left", agent->epoch, agent->rank, key);
        td_store_set(agent->store, key, "", 0);
    }
}
