/* The other workers: who they are, links to them, and how all leave.
 *
 * In the store, EPOCH counts how often this rank has become a worker:
 *
 *     epoch/RANK              the count
 *     card/EPOCH/RANK         the worker's name, and the card of its endpoint
 *     idle/EPOCH/ROUND/RANK   how many calls the worker had made and served when it had no work left
 *     kept/EPOCH/RANK         it has seen that no worker has work left, and borrows nothing any more */
#include "base/fail.h"
#include "os/socket.h"
#include "peer/wait_event.h"
#include "rpc/rpc_agent.h"
#include "rpc/grad_context.h"
#include "rpc/lease.h"
#include "rpc/rref.h"
#include "store/store_ops.h"

#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    LINKS = 1, /* the group of the agent's links at the endpoint */
    HANDSHAKE_MS = 10000,
    FIND_OUT_MS = 900,
    CHECK_MS = 100,
    KEY = 96,
};

/* ---- Joining --------------------------------------------------------------------------------- */

static void put_card(struct td__rpc_agent *agent, struct td__buffer *card)
{
    td__buffer_put_string(card, agent->name, strlen(agent->name));
    td__endpoint_card(agent->endpoint, card);
}

static td_status add_worker(struct td__rpc_agent *agent, int rank, const td_bytes *bytes,
                            td_bytes *card)
{
    struct td__reader reader = td__reader_of(bytes->data, bytes->size);
    struct td__span name = td__reader_string(&reader, TD_RPC_MAX_NAME);
    struct td__rpc_worker *worker = calloc(1, sizeof *worker);
    if (!worker)
        return td__fail_nomem("rpc");
    if (reader.failed || !name.size) {
        free(worker);
        return td_fail(TD_ERR_MISMATCH, "td_init_rpc: the card of rank %d is not valid", rank);
    }
    memcpy(worker->name, name.data, name.size);
    worker->rank = rank;
    worker->last = &worker->first;
    worker->by_name.key = worker->name;
    worker->by_name.key_size = name.size;
    agent->workers[rank] = worker;
    *card = (td_bytes){.data = (char *)reader.at, .size = (size_t)(reader.end - reader.at)};
    struct td__map_node *same = td__map_find(&agent->names, worker->name, name.size);
    if (same)
        return td_fail(TD_ERR_MISMATCH,
                       "td_init_rpc: ranks %d and %d both have the name \"%s\"; names are unique",
                       TD__CONTAINER(same, struct td__rpc_worker, by_name)->rank, rank,
                       worker->name);
    return td__map_insert(&agent->names, &worker->by_name) ? TD_OK : td__fail_nomem("rpc");
}

static void name_missing(struct td__rpc_agent *agent, int64_t epoch)
{
    char missing[256] = "", key[KEY];
    size_t length = 0;
    int count = 0;
    for (int r = 0; r < agent->size && length < sizeof missing - 16; r++) {
        const char *at = key;
        bool there = true;
        snprintf(key, sizeof key, "card/%" PRId64 "/%d", epoch, r);
        if (td_store_check(agent->store, &at, 1, &there) || there)
            continue;
        length += (size_t)snprintf(missing + length, sizeof missing - length, "%s%d",
                                   length ? ", " : "", r);
        count++;
    }
    if (count)
        td_fail(TD_ERR_TIMEOUT,
                "td_init_rpc: rank%s %s %s not joined: %s ended, or %s not called td_init_rpc()",
                count > 1 ? "s" : "", missing, count > 1 ? "have" : "has",
                count > 1 ? "they have" : "it has", count > 1 ? "have" : "has");
}

static td_status exchange_cards(struct td__rpc_agent *agent, td_bytes *values)
{
    int64_t epoch;
    char key[KEY];
    struct td__buffer card = {0};
    snprintf(key, sizeof key, "epoch/%d", agent->rank);
    TD_TRY(td_store_add(agent->store, key, 1, &epoch));
    agent->epoch = epoch;
    snprintf(key, sizeof key, "card/%" PRId64 "/%d", epoch, agent->rank);
    put_card(agent, &card);
    td_status status = card.failed ? td__fail_nomem("rpc")
                                   : td_store_set(agent->store, key, card.data, card.size);
    td__buffer_free(&card);
    if (status)
        return status;
    char(*keys)[KEY] = calloc((size_t)agent->size, sizeof *keys);
    const char **list = calloc((size_t)agent->size, sizeof *list);
    for (int r = 0; keys && list && r < agent->size; r++) {
        snprintf(keys[r], KEY, "card/%" PRId64 "/%d", epoch, r);
        list[r] = keys[r];
    }
    status = keys && list ? td_store_multi_get(agent->store, list, agent->size, 0, values)
                          : td__fail_nomem("rpc");
    if (status == TD_ERR_TIMEOUT)
        name_missing(agent, epoch);
    free(keys);
    free(list);
    return status;
}

static td_status add_all(struct td__rpc_agent *agent, const td_bytes *values)
{
    td_status status = TD_OK;
    int near = 0;
    td_bytes *cards = calloc((size_t)agent->size, sizeof *cards);
    if (!cards)
        return td__fail_nomem("rpc");
    for (int r = 0; r < agent->size && !status; r++)
        status = add_worker(agent, r, &values[r], &cards[r]);
    if (!status)
        status = td__endpoint_connect_all(agent->endpoint, cards);
    free(cards);
    for (int r = 0; !status && r < agent->size; r++)
        near += td__worker_is_near(agent, r);
    agent->oversubscribed = !status && td__crowd(near) > 0;
    return status;
}

/* On any thread, with the lock of the endpoint held. */
static void on_presence(void *arg)
{
    struct td__rpc_agent *agent = arg;
    atomic_store(&agent->presence_changed, true);
    td__io_wake(agent);
}

static void on_link(void *arg, int rank, int fd);

td_status td__workers_join(struct td__rpc_agent *agent)
{
    char host[64];
    const char *transport = getenv("TANDEM_TRANSPORT");
    agent->workers = calloc((size_t)agent->size, sizeof *agent->workers);
    td_bytes *values = calloc((size_t)agent->size, sizeof *values);
    if (!agent->workers || !values) {
        free(values);
        return td__fail_nomem("rpc");
    }
    td__own_address(agent->store, host);
    td_status status = td__endpoint_open(agent->rank, agent->size, host,
                                         !transport || strcmp(transport, "tcp") != 0,
                                         &agent->endpoint);
    if (!status)
        status = exchange_cards(agent, values);
    if (!status)
        status = add_all(agent, values);
    for (int r = 0; r < agent->size; r++)
        td_bytes_free(&values[r]);
    free(values);
    if (status || agent->size == 1)
        return status;
    agent->waiter = (struct td__endpoint_waiter){.wake = on_presence, .arg = agent};
    TD_TRY(td__endpoint_start_detector(agent->endpoint, &(td__detector_fns){0}, NULL));
    td__endpoint_add_waiter(agent->endpoint, &agent->waiter);
    return TD_OK;
}

void td__workers_listen(struct td__rpc_agent *agent)
{
    if (agent->size > 1)
        td__endpoint_listen(agent->endpoint, LINKS, TD__CHANNEL_RPC, on_link, agent);
}

void td__workers_close(struct td__rpc_agent *agent)
{
    if (!agent->waiter.wake)
        return;
    td__endpoint_listen(agent->endpoint, LINKS, TD__CHANNEL_RPC, NULL, NULL);
    td__endpoint_remove_waiter(agent->endpoint, &agent->waiter);
}

void td__workers_free(struct td__rpc_agent *agent)
{
    for (int r = 0; agent->workers && r < agent->size; r++) {
        struct td__rpc_worker *worker = agent->workers[r];
        if (!worker)
            continue;
        for (struct td__message *message = worker->first, *next; message; message = next) {
            next = message->next;
            td__message_free(message);
        }
        if (worker->link)
            td__link_release(worker->link);
        free(worker->early);
        free(worker);
    }
    td__map_free(&agent->names);
    free(agent->workers);
}

/* ---- Names ----------------------------------------------------------------------------------- */

int td__worker_rank(struct td__rpc_agent *agent, const char *name)
{
    if (!name) {
        td__fail_null("rpc");
        return -1;
    }
    struct td__map_node *node = td__map_find(&agent->names, name, strlen(name));
    if (node)
        return TD__CONTAINER(node, struct td__rpc_worker, by_name)->rank;
    td_fail(TD_ERR_INVALID, "there is no worker \"%s\"", name);
    return -1;
}

const char *td__worker_name_of(struct td__rpc_agent *agent, int rank)
{
    return agent->workers[rank]->name;
}

bool td__worker_is_near(struct td__rpc_agent *agent, int rank)
{
    return td__endpoint_host(agent->endpoint, rank) ==
           td__endpoint_host(agent->endpoint, agent->rank);
}

td_status td_worker_find(const char *name, td_worker_info *info)
{
    if (!info)
        return td__fail_null(__func__);
    struct td__rpc_agent *agent = td__agent_enter(__func__);
    if (!agent)
        return TD_ERR_STATE;
    int rank = name ? td__worker_rank(agent, name) : agent->rank;
    if (rank >= 0) {
        *info = (td_worker_info){.rank = rank};
        snprintf(info->name, sizeof info->name, "%s", td__worker_name_of(agent, rank));
    }
    td__agent_leave(agent);
    return rank >= 0 ? TD_OK : TD_ERR_INVALID;
}

const char *td_worker_name(int rank)
{
    struct td__rpc_agent *agent = td__agent_enter(__func__);
    if (!agent)
        return NULL;
    const char *name = rank >= 0 && rank < agent->size ? td__worker_name_of(agent, rank) : NULL;
    if (!name)
        td_fail(TD_ERR_INVALID, "td_worker_name: there is no rank %d; there are %d workers", rank,
                agent->size);
    td__agent_leave(agent);
    return name;
}

/* ---- Links ----------------------------------------------------------------------------------- */

/* The messages that wait for a link. With the lock held. */
static struct td__message *take_waiting(struct td__rpc_worker *worker)
{
    struct td__message *message = worker->first;
    worker->first = NULL;
    worker->last = &worker->first;
    worker->connecting = false;
    return message;
}

/* A worker has ended or left: fails all that waits for it. */
static void lose(struct td__rpc_agent *agent, int rank, const char *why)
{
    struct td__rpc_worker *worker = agent->workers[rank];
    char text[300];
    pthread_mutex_lock(&agent->lock);
    struct td__message *message = take_waiting(worker), *next;
    if (!worker->gone)
        snprintf(worker->why, sizeof worker->why, "%s", why);
    worker->gone = true;
    pthread_mutex_unlock(&agent->lock);
    for (; message; message = next) {
        next = message->next;
        td__message_free(message);
    }
    snprintf(text, sizeof text, "it %s", why);
    td__calls_fail_all(agent, rank, UINT_MAX, TD_ERR_PEER, text);
    td__serve_lost(agent, rank);
    td__rpc_leases_end(agent, rank);
    td__rrefs_lost(agent, rank);
    td__contexts_lost(agent, rank);
}

/* No link to a worker could be opened: the messages that wait for it are not sent. */
static void fail_waiting(struct td__rpc_agent *agent, int rank, const char *why)
{
    pthread_mutex_lock(&agent->lock);
    struct td__message *message = take_waiting(agent->workers[rank]), *next;
    pthread_mutex_unlock(&agent->lock);
    for (; message; message = next) {
        char text[512];
        next = message->next;
        snprintf(text, sizeof text, "worker \"%s\" cannot be reached: %.200s",
                 td__worker_name_of(agent, rank), why);
        td__agent_fail_unsent(agent, rank, message, TD_ERR_PEER, text);
    }
}

/* Work of the agent's own, on one of its threads. */
static bool start_task(struct td__rpc_agent *agent, int rank, int fd, unsigned links,
                       void (*task)(struct td_rpc_call *task))
{
    struct td_rpc_call *call = atomic_load(&agent->stopping) ? NULL : calloc(1, sizeof *call);
    if (!call)
        return false;
    call->agent = agent;
    call->from = rank;
    call->fd = fd;
    call->links = links;
    call->task = task;
    td__io_run(agent, call);
    td__io_wake(agent);
    return true;
}

static void run_connect(struct td_rpc_call *task)
{
    struct td__rpc_agent *agent = task->agent;
    td__deadline deadline = td__deadline_in_ms(HANDSHAKE_MS);
    int fd, rank = task->from;
    td_status status = td__endpoint_connect(agent->endpoint, rank, LINKS, TD__CHANNEL_RPC, deadline,
                                            &fd);
    if (!status)
        status = td__link_open(agent, rank, fd, deadline);
    if (status) {
        struct td__error error;
        td__error_save(&error);
        const char *reason = td__endpoint_find_out(agent->endpoint, rank,
                                                   td__deadline_in_ms(FIND_OUT_MS));
        if (reason)
            lose(agent, rank, reason);
        else
            fail_waiting(agent, rank, error.text);
    }
    free(task);
}

void td__workers_connect(struct td__rpc_agent *agent, int rank)
{
    if (!start_task(agent, rank, -1, 0, run_connect))
        fail_waiting(agent, rank, "out of memory");
}

static void run_accept(struct td_rpc_call *task)
{
    if (td__link_accept(task->agent, task->from, task->fd, td__deadline_in_ms(HANDSHAKE_MS)))
        td_log(TD_LOG_DEBUG, "rpc: a link of worker \"%s\" was not opened: %s",
               td__worker_name_of(task->agent, task->from), td__error_text());
    free(task);
}

static void on_link(void *arg, int rank, int fd)
{
    if (!start_task(arg, rank, fd, 0, run_accept))
        close(fd);
}

void td__workers_add_link(struct td__rpc_link *link)
{
    struct td__rpc_agent *agent = link->agent;
    struct td__rpc_worker *worker = agent->workers[link->rank];
    td__endpoint_watch(agent->endpoint, link->rank);
    if (link->local)
        td__rpc_map(agent, link->rank);
    pthread_mutex_lock(&agent->lock);
    if (!worker->link) {
        worker->link = link;
        td__link_retain(link);
    }
    td__link_retain(worker->link);
    struct td__rpc_link *use = worker->link;
    struct td__message *message = take_waiting(worker), *next;
    pthread_mutex_unlock(&agent->lock);
    for (; message; message = next) {
        next = message->next;
        message->next = NULL;
        td__link_send(use, message);
    }
    td__link_release(use);
}

#define CLOSED "it has closed the connection"

/* A link has ended: because its worker has, or only the link. */
static void run_lost(struct td_rpc_call *task)
{
    struct td__rpc_agent *agent = task->agent;
    const char *reason = td__endpoint_find_out(agent->endpoint, task->from,
                                               td__deadline_in_ms(FIND_OUT_MS));
    if (reason)
        lose(agent, task->from, reason);
    else if (task->links != UINT_MAX)
        td__calls_fail_all(agent, task->from, task->links, TD_ERR_PEER, CLOSED);
    free(task);
}

void td__agent_link_ended(struct td__rpc_link *link)
{
    struct td__rpc_agent *agent = link->agent;
    struct td__rpc_worker *worker = agent->workers[link->rank];
    pthread_mutex_lock(&agent->lock);
    bool used = worker->link == link;
    unsigned links = used ? atomic_fetch_add(&worker->ended, 1) : UINT_MAX;
    if (used)
        worker->link = NULL;
    pthread_mutex_unlock(&agent->lock);
    pthread_mutex_lock(&link->write_lock);
    link->closed = true;
    pthread_mutex_unlock(&link->write_lock);
    td__serve_link_ended(agent, link);
    if (!atomic_load(&agent->leaving)) {
        if (link->leaving)
            lose(agent, link->rank, "has left");
        else if (!start_task(agent, link->rank, -1, links, run_lost) && used)
            td__calls_fail_all(agent, link->rank, links, TD_ERR_PEER, CLOSED);
    }
    if (used)
        td__link_release(link);
    td__link_release(link);
}

/* The failure detector knows of a worker that has ended or left, or that is cut off. */
void td__workers_check(struct td__rpc_agent *agent)
{
    for (int r = 0; r < agent->size; r++) {
        struct td__rpc_worker *worker = agent->workers[r];
        const char *reason = r == agent->rank ? NULL : td__endpoint_exit_reason(agent->endpoint, r);
        pthread_mutex_lock(&agent->lock);
        bool known = worker->gone;
        pthread_mutex_unlock(&agent->lock);
        if (reason && !known)
            lose(agent, r, reason);
    }
}

/* ---- Leaving --------------------------------------------------------------------------------- */

/* Whether a worker does not take part in another round: it has gone, or has seen that all are done. */
static bool is_done(struct td__rpc_agent *agent, int rank)
{
    char key[KEY];
    const char *at = key;
    bool kept = false;
    snprintf(key, sizeof key, "kept/%" PRId64 "/%d", agent->epoch, rank);
    return rank != agent->rank && (td__endpoint_presence(agent->endpoint, rank) != TD__PRESENT ||
                                   (!td_store_check(agent->store, &at, 1, &kept) && kept));
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
    for (int r = 0; r < agent->size; r++) {
        td_bytes bytes = {0};
        td_status status;
        snprintf(key, sizeof key, "%s/%d", phase, r);
        while ((status = td_store_get(agent->store, key, CHECK_MS, &bytes)) == TD_ERR_TIMEOUT) {
            if (is_done(agent, r))
                break;
            if (td__deadline_passed(deadline))
                return td_fail(
                    TD_ERR_TIMEOUT,
                    "td_rpc_shutdown: worker \"%s\" still has work, or has not called it",
                    td__worker_name_of(agent, r));
        }
        if (status && status != TD_ERR_TIMEOUT)
            return status;
        if (!status)
            *sum += strtoull(bytes.data, NULL, 10);
        td_bytes_free(&bytes);
    }
    return TD_OK;
}

/* All have left their work behind when each had none in two rounds, and no call was made in between: then there was a
 * moment between the rounds at which none was under way. No function runs from then on, and borrowed tensors get
 * memory of their own, before any worker frees what it has lent. */
td_status td__workers_leave(struct td__rpc_agent *agent,
                            bool (*await_idle)(struct td__rpc_agent *agent, td__deadline deadline),
                            td__deadline deadline)
{
    char phase[KEY / 2];
    uint64_t own, before, activity = UINT64_MAX;
    int round = 0;
    do {
        before = activity;
        do { /* until it was idle at a moment at which it had made and served `own` calls */
            own = atomic_load(&agent->activity);
            if (!await_idle(agent, deadline))
                return td_fail(TD_ERR_TIMEOUT, "td_rpc_shutdown: this worker still has calls that "
                                               "are not complete");
        } while (atomic_load(&agent->activity) != own);
        snprintf(phase, sizeof phase, "idle/%" PRId64 "/%d", agent->epoch, round++);
        TD_TRY(pass_phase(agent, phase, own, deadline, &activity));
    } while (activity != before);
    td__rpc_keep_borrowed();
    snprintf(phase, sizeof phase, "kept/%" PRId64, agent->epoch);
    return pass_phase(agent, phase, 0, deadline, &activity);
}

void td__workers_say_goodbye(struct td__rpc_agent *agent)
{
    for (int r = 0; r < agent->size; r++) {
        struct td__message_header header = {.kind = TD__MESSAGE_LEAVE};
        pthread_mutex_lock(&agent->lock);
        struct td__rpc_link *link = agent->workers[r]->link;
        if (link)
            td__link_retain(link);
        pthread_mutex_unlock(&agent->lock);
        struct td__message *message = link ? td__message_create(agent, r, false) : NULL;
        if (message && !td__message_seal(message, &header, SIZE_MAX))
            td__link_send(link, message);
        else
            td__message_free(message);
        if (link)
            td__link_release(link);
    }
}
