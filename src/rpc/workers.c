/* The other workers: their names and ranks, and the links to them. membership.c has how they join and leave.
 *
 * A worker is known by its rank, which is never used again for another one. In a world of a fixed size all are known from
 * the start. In a dynamic one, a worker is known from the first message to it or from it, or the first reference to its
 * values; its name and the card of its endpoint are in the store, and are looked up when they are needed first: then the
 * worker is resolved. */
#include "base/fail.h"
#include "os/socket.h"
#include "os/tls.h"
#include "peer/wait_event.h"
#include "rpc/rpc_agent.h"
#include "rpc/grad_context.h"
#include "rpc/lease.h"
#include "rpc/rref.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    HANDSHAKE_MS = 10000,
    STEP_MS = 300,
    FIND_OUT_MS = 900,
    CHECK_MS = 100,
};

/* ---- Workers --------------------------------------------------------------------------------- */

struct td__rpc_worker *td__worker_get(struct td__rpc_agent *agent, int rank)
{
    struct td__rpc_worker *worker = td__worker(agent, rank);
    if (worker)
        return worker;
    struct td__rpc_worker *added = calloc(1, sizeof *added);
    if (!added) {
        td__fail_nomem("rpc");
        return NULL;
    }
    added->rank = rank;
    added->last = &added->first;
    snprintf(added->label, sizeof added->label, "rank %d", rank);
    pthread_mutex_lock(&agent->lock);
    worker = td__worker(agent, rank);
    if (!worker) {
        worker = added;
        atomic_store_explicit(&agent->workers[rank], worker, memory_order_release);
        if (rank >= atomic_load(&agent->known))
            atomic_store_explicit(&agent->known, rank + 1, memory_order_release);
    }
    pthread_mutex_unlock(&agent->lock);
    if (worker != added)
        free(added);
    return worker;
}

/* The latest worker of a name has it. */
static td_status add_name(struct td__rpc_agent *agent, struct td__rpc_worker *worker)
{
    struct td__map_node *node = td__map_find(&agent->names, worker->name, worker->by_name.key_size);
    struct td__rpc_worker *other = node ? TD__CONTAINER(node, struct td__rpc_worker, by_name)
                                        : NULL;
    if (other && !agent->dynamic)
        return td_fail(TD_ERR_MISMATCH,
                       "td_init_rpc: ranks %d and %d both have the name \"%s\"; names are unique",
                       other->rank < worker->rank ? other->rank : worker->rank,
                       other->rank < worker->rank ? worker->rank : other->rank, worker->name);
    if (other && other->rank > worker->rank)
        return TD_OK;
    if (other)
        td__map_remove(&agent->names, &other->by_name);
    return td__map_insert(&agent->names, &worker->by_name) ? TD_OK : td__fail_nomem("rpc");
}

td_status td__worker_introduce(struct td__rpc_agent *agent, int rank, const td_bytes *published)
{
    struct td__reader reader = td__reader_of(published->data, published->size);
    struct td__span name = td__reader_string(&reader, TD_RPC_MAX_NAME);
    struct td__rpc_worker *worker = td__worker_get(agent, rank);
    if (!worker)
        return TD_ERR_NOMEM;
    if (reader.failed || !name.size)
        return td_fail(TD_ERR_MISMATCH, "td_init_rpc: the card of rank %d is not valid", rank);
    td_bytes card = {.data = (char *)reader.at, .size = (size_t)(reader.end - reader.at)};
    TD_TRY(td__endpoint_add_rank(agent->endpoint, rank, &card));
    td_status status = TD_OK;
    pthread_mutex_lock(&agent->lock);
    if (!atomic_load(&worker->resolved)) {
        memcpy(worker->name, name.data, name.size);
        worker->by_name.key = worker->name;
        worker->by_name.key_size = name.size;
        atomic_store_explicit(&worker->resolved, true, memory_order_release);
        agent->near += rank == agent->rank || td__worker_is_near(agent, rank);
        atomic_store(&agent->oversubscribed, !agent->pinned && td__crowd(agent->near) > 0);
        status = add_name(agent, worker);
    }
    pthread_mutex_unlock(&agent->lock);
    return status;
}

/* On any thread, with the lock of the endpoint held. */
static void on_presence(void *arg)
{
    struct td__rpc_agent *agent = arg;
    atomic_store(&agent->presence_changed, true);
    td__io_wake(agent);
}

td_status td__workers_open(struct td__rpc_agent *agent, const char *host, bool shared)
{
    agent->workers = calloc((size_t)agent->limit, sizeof *agent->workers);
    if (!agent->workers)
        return td__fail_nomem("rpc");
    return td__endpoint_open(agent->rank, agent->limit == 1 ? 1 : 0, host, shared,
                             &agent->endpoint);
}

td_status td__workers_watch(struct td__rpc_agent *agent)
{
    if (agent->limit == 1)
        return TD_OK;
    TD_TRY(td__endpoint_start_detector(agent->endpoint, &(td__detector_fns){0}, NULL));
    agent->waiter = (struct td__endpoint_waiter){.wake = on_presence, .arg = agent};
    td__endpoint_add_waiter(agent->endpoint, &agent->waiter);
    return TD_OK;
}

static void on_link(void *arg, int rank, int fd);

void td__workers_listen(struct td__rpc_agent *agent)
{
    if (agent->limit > 1)
        td__endpoint_listen(agent->endpoint, TD__LINKS, TD__CHANNEL_RPC, on_link, agent);
}

void td__workers_close(struct td__rpc_agent *agent)
{
    if (!agent->waiter.wake)
        return;
    td__endpoint_listen(agent->endpoint, TD__LINKS, TD__CHANNEL_RPC, NULL, NULL);
    td__endpoint_remove_waiter(agent->endpoint, &agent->waiter);
}

void td__workers_free(struct td__rpc_agent *agent)
{
    struct td__rpc_worker *worker;
    TD__WORKER_FOREACH (worker, r, agent) {
        td__messages_free(worker->first);
        if (worker->link)
            td__link_release(worker->link);
        free(worker->early);
        free(worker);
    }
    td__map_free(&agent->names);
    free(agent->workers);
}

/* ---- Names ----------------------------------------------------------------------------------- */

/* The worker that has the name, or had it last; NULL if none is known. With the lock held, unless the world is fixed: all
 * names are there before its workers are used. */
static struct td__rpc_worker *find_name(struct td__rpc_agent *agent, const char *name)
{
    struct td__map_node *node = td__map_find(&agent->names, name, strlen(name));
    return node ? TD__CONTAINER(node, struct td__rpc_worker, by_name) : NULL;
}

static int fail_name(const char *name)
{
    td_fail(TD_ERR_INVALID, "there is no worker \"%.*s\"", TD_RPC_MAX_NAME, name);
    return -1;
}

/* In a dynamic world: a worker that has gone may have a successor of the same name. */
static int dynamic_rank(struct td__rpc_agent *agent, const char *name)
{
    pthread_mutex_lock(&agent->lock);
    struct td__rpc_worker *worker = find_name(agent, name);
    bool gone = worker && worker->gone;
    pthread_mutex_unlock(&agent->lock);
    if (worker && !gone)
        return worker->rank;
    int rank = -1;
    if (strlen(name) <= TD_RPC_MAX_NAME && td__membership_find_name(agent, name, &rank))
        return -1;
    if (rank >= 0 && !td__worker_resolve(agent, rank))
        return rank;
    return worker ? worker->rank /* the call says how it ended */ : fail_name(name);
}

int td__worker_rank(struct td__rpc_agent *agent, const char *name)
{
    if (!name) {
        td__fail_null("rpc");
        return -1;
    }
    if (agent->dynamic)
        return dynamic_rank(agent, name);
    struct td__rpc_worker *worker = find_name(agent, name);
    return worker ? worker->rank : fail_name(name);
}

td_status td__worker_resolve(struct td__rpc_agent *agent, int rank)
{
    struct td__rpc_worker *worker = td__worker_get(agent, rank);
    if (!worker)
        return TD_ERR_NOMEM;
    return atomic_load_explicit(&worker->resolved, memory_order_acquire)
               ? TD_OK
               : td__membership_introduce(agent, rank);
}

const char *td__worker_name_of(struct td__rpc_agent *agent, int rank)
{
    const struct td__rpc_worker *worker = td__worker(agent, rank);
    return atomic_load_explicit(&worker->resolved, memory_order_acquire) ? worker->name
                                                                         : worker->label;
}

bool td__worker_is_near(struct td__rpc_agent *agent, int rank)
{
    const struct td__rpc_worker *worker = td__worker(agent, rank);
    return atomic_load_explicit(&worker->resolved, memory_order_acquire) &&
           td__endpoint_host(agent->endpoint, rank) ==
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
    td_status status = rank >= 0 ? TD_OK : td__error_status();
    if (rank >= 0) {
        *info = (td_worker_info){.rank = rank};
        snprintf(info->name, sizeof info->name, "%s", td__worker_name_of(agent, rank));
    }
    td__agent_leave(agent);
    return status;
}

const char *td_worker_name(int rank)
{
    struct td__rpc_agent *agent = td__agent_enter(__func__);
    if (!agent)
        return NULL;
    const char *name = NULL;
    if (rank < 0 || rank >= agent->limit)
        td_fail(TD_ERR_INVALID, "td_worker_name: there is no rank %d; there are %s%d workers", rank,
                agent->dynamic ? "at most " : "", agent->limit);
    else if (!td__worker_resolve(agent, rank))
        name = td__worker_name_of(agent, rank);
    td__agent_leave(agent);
    return name;
}

/* ---- Links ----------------------------------------------------------------------------------- */

/* With the lock held. Calls read both with calls_lock. */
static void set_link(struct td__rpc_agent *agent, struct td__rpc_worker *worker,
                     struct td__rpc_link *link, bool gone)
{
    pthread_mutex_lock(&agent->calls_lock);
    worker->link = link;
    worker->gone = gone;
    pthread_mutex_unlock(&agent->calls_lock);
}

/* The messages that wait for a link. With the lock held. */
static struct td__message *take_waiting(struct td__rpc_worker *worker)
{
    struct td__message *message = worker->first;
    worker->first = NULL;
    worker->last = &worker->first;
    worker->connecting = false;
    return message;
}

/* Ends all links to a worker that has gone. The sockets of one that is cut off do not end by themselves for long, and
 * meanwhile the link would keep the messages that were not acknowledged, and their tensors. With the lock held. */
static void end_links(struct td__rpc_agent *agent, int rank)
{
    for (uint64_t i = 0; i < agent->id_count; i++)
        if (agent->by_id[i] && agent->by_id[i]->rank == rank)
            atomic_store(&agent->by_id[i]->dead, true);
    td__io_wake(agent);
}

/* A worker has ended or left: fails all that waits for it. */
static void lose(struct td__rpc_agent *agent, int rank, const char *why)
{
    struct td__rpc_worker *worker = td__worker(agent, rank);
    char text[300];
    pthread_mutex_lock(&agent->lock);
    struct td__message *message = take_waiting(worker);
    if (!worker->gone)
        snprintf(worker->why, sizeof worker->why, "%s", why);
    set_link(agent, worker, worker->link, true);
    end_links(agent, rank);
    pthread_mutex_unlock(&agent->lock);
    td__messages_free(message);
    snprintf(text, sizeof text, "it %s", why);
    td__calls_fail_all(agent, rank, UINT_MAX, TD_ERR_PEER, text);
    td__serve_lost(agent, rank);
    td__rpc_leases_end(agent, rank);
    td__rrefs_lost(agent, rank);
    td__contexts_lost(agent, rank);
    td__rpc_unmap(agent, rank);
}

/* No link to a worker could be opened: the messages that wait for it are not sent. */
static void fail_waiting(struct td__rpc_agent *agent, int rank, const char *why)
{
    pthread_mutex_lock(&agent->lock);
    struct td__message *message = take_waiting(td__worker(agent, rank)), *next;
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
                       struct td__rpc_link *suspended, void (*task)(struct td_rpc_call *task))
{
    struct td_rpc_call *call = atomic_load(&agent->stopping) ? NULL : calloc(1, sizeof *call);
    if (!call)
        return false;
    call->agent = agent;
    call->from = rank;
    call->fd = fd;
    call->links = links;
    call->suspended = suspended;
    call->task = task;
    td__io_run(agent, call);
    td__io_wake(agent);
    return true;
}

/* In steps, since the agent may end meanwhile. */
td_status td__worker_connect(struct td__rpc_agent *agent, int rank, td__deadline deadline, int *fd)
{
    td_status status;
    do {
        td__deadline step = td__deadline_earlier(deadline, td__deadline_in_ms(STEP_MS));
        if (atomic_load(&agent->stopping))
            return td_fail(TD_ERR_ABORTED, "this worker was shut down");
        status = td__endpoint_connect(agent->endpoint, rank, TD__LINKS, TD__CHANNEL_RPC, step, fd);
    } while (status == TD_ERR_TIMEOUT && !td__deadline_passed(deadline));
    return status;
}

static void run_connect(struct td_rpc_call *task)
{
    struct td__rpc_agent *agent = task->agent;
    td__deadline deadline = td__deadline_in_ms(HANDSHAKE_MS);
    int fd, rank = task->from;
    const char *reason = NULL;
    struct td__error error;
    td_status status;
    do {
        status = td__worker_resolve(agent, rank);
        if (!status)
            status = td__worker_connect(agent, rank, deadline, &fd);
        if (!status)
            status = td__link_open(agent, rank, fd, deadline);
        td__error_save(&error);
        if (status && td__endpoint_knows(agent->endpoint, rank))
            reason = td__endpoint_find_out(agent->endpoint, rank, td__deadline_in_ms(FIND_OUT_MS));
        else if (status == TD_ERR_PEER)
            reason = "has left";
    } while (status == TD_ERR_PEER && !reason && !td__deadline_passed(deadline));
    if (reason)
        lose(agent, rank, reason);
    else if (status == TD_ERR_TIMEOUT) /* stopped or busy: the calls have timeouts of their own */
        td__workers_connect(agent, rank);
    else if (status)
        fail_waiting(agent, rank, error.text);
    free(task);
}

void td__workers_connect(struct td__rpc_agent *agent, int rank)
{
    if (!start_task(agent, rank, -1, 0, NULL, run_connect))
        fail_waiting(agent, rank, "out of memory");
}

static void run_accept(struct td_rpc_call *task)
{
    td_status status = td__worker_resolve(task->agent, task->from);
    if (status)
        td__sock_close(task->fd);
    else
        status = td__link_accept(task->agent, task->from, task->fd,
                                 td__deadline_in_ms(HANDSHAKE_MS));
    if (status)
        td_log(TD_LOG_DEBUG, "rpc: a link of the worker of rank %d was not opened: %s", task->from,
               td__error_text());
    free(task);
}

static void on_link(void *arg, int rank, int fd)
{
    if (!start_task(arg, rank, fd, 0, NULL, run_accept))
        td__sock_close(fd);
}

void td__workers_add_link(struct td__rpc_link *link)
{
    struct td__rpc_agent *agent = link->agent;
    struct td__rpc_worker *worker = td__worker(agent, link->rank);
    td__endpoint_watch(agent->endpoint, link->rank);
    if (link->local)
        td__rpc_map(agent, link->rank);
    pthread_mutex_lock(&agent->lock);
    if (!worker->link)
        set_link(agent, worker, td__link_retain(link), worker->gone);
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

/* Until the link has another socket, or its worker has gone, or does not know the link. */
static void run_resume(struct td_rpc_call *task)
{
    struct td__rpc_agent *agent = task->agent;
    struct td__rpc_link *link = task->suspended;
    for (bool resumed = false; !resumed && atomic_load(&link->suspended);) {
        const char *reason = NULL;
        bool left = atomic_load(&agent->stopping) || atomic_load(&agent->leaving);
        td_status status = left ? TD_ERR_STATE
                                : td__link_resume(link, td__deadline_in_ms(HANDSHAKE_MS));
        if (status && status != TD_ERR_STATE)
            reason = td__endpoint_find_out(agent->endpoint, task->from,
                                           td__deadline_in_ms(CHECK_MS));
        if (reason)
            lose(agent, task->from, reason);
        resumed = !status && link->opener;
        if (status == TD_ERR_STATE || reason) {
            atomic_store(&link->dead, true);
            td__io_wake(agent);
            break;
        }
    }
    td__link_release(link);
    free(task);
}

bool td__workers_resume(struct td__rpc_link *link)
{
    struct td__rpc_agent *agent = link->agent;
    pthread_mutex_lock(&agent->lock);
    bool gone = td__worker(agent, link->rank)->gone;
    pthread_mutex_unlock(&agent->lock);
    if (gone || atomic_load(&agent->leaving))
        return false;
    td__link_retain(link);
    if (start_task(agent, link->rank, -1, 0, link, run_resume))
        return true;
    td__link_release(link);
    return false;
}

void td__agent_link_ended(struct td__rpc_link *link)
{
    struct td__rpc_agent *agent = link->agent;
    struct td__rpc_worker *worker = td__worker(agent, link->rank);
    pthread_mutex_lock(&agent->lock);
    bool used = worker->link == link;
    unsigned links = used ? atomic_fetch_add(&worker->ended, 1) : UINT_MAX;
    if (used)
        set_link(agent, worker, NULL, worker->gone);
    pthread_mutex_unlock(&agent->lock);
    struct td__message *message, *next;
    if (td__link_close(link, &message))
        links = UINT_MAX; /* no call is lost */
    for (; message; message = next) {
        next = message->next;
        message->next = NULL;
        td__agent_send(agent, link->rank, message);
    }
    td__serve_link_ended(agent, link);
    if (!atomic_load(&agent->leaving)) {
        if (link->leaving)
            lose(agent, link->rank, "has left");
        else if (!start_task(agent, link->rank, -1, links, NULL, run_lost) && used)
            td__calls_fail_all(agent, link->rank, links, TD_ERR_PEER, CLOSED);
    }
    if (used)
        td__link_release(link);
    td__link_release(link);
}

/* The failure detector knows of a worker that has ended or left, or that is cut off. */
void td__workers_check(struct td__rpc_agent *agent)
{
    struct td__rpc_worker *worker;
    TD__WORKER_FOREACH (worker, r, agent) {
        if (r == agent->rank || !atomic_load_explicit(&worker->resolved, memory_order_acquire))
            continue;
        const char *reason = td__endpoint_exit_reason(agent->endpoint, r);
        pthread_mutex_lock(&agent->lock);
        bool known = worker->gone;
        pthread_mutex_unlock(&agent->lock);
        if (reason && !known)
            lose(agent, r, reason);
    }
}

void td__workers_say_goodbye(struct td__rpc_agent *agent)
{
    struct td__rpc_worker *worker;
    TD__WORKER_FOREACH (worker, r, agent) {
        struct td__message_header header = {.kind = TD__MESSAGE_LEAVE};
        pthread_mutex_lock(&agent->lock);
        struct td__rpc_link *link = worker->link;
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
