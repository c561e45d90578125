/* The agent of this process: beginning, messages, end. */
#include "rpc/rpc_agent.h"

#include "base/fail.h"
#include "base/option_rules.h"
#include "base/text.h"
#include "os/socket.h"
#include "rpc/grad_context.h"
#include "rpc/lease.h"
#include "rpc/rref.h"
#include "store/store_ops.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    DEFAULT_THREADS = 16,
    MAX_THREADS = 4096,
    LONG_CHAIN = 400,
    NOTICE_MS = 1000,
    LEAST_MESSAGE = 1024
};
#define DEFAULT_MAX_MESSAGE ((size_t)64 << 20)

/* ---- The process's agent ---------------------------------------------------------------------- */

static pthread_mutex_t life =
    PTHREAD_MUTEX_INITIALIZER; /* held by td_init_rpc() and td_rpc_shutdown() */
static _Atomic(struct td__rpc_agent *) current;
static atomic_int inside; /* threads that use the agent */

/* In the child of a fork, the agent of the parent is forgotten, and its threads, which were inside or held the lock. */
static void forget_parent(void)
{
    struct td__rpc_agent *agent = atomic_load(&current);
    if (!agent || agent->generation == td__fork_generation())
        return;
    pthread_mutex_init(&life, NULL);
    atomic_store(&inside, 0);
    atomic_store(&current, NULL);
}

struct td__rpc_agent *td__agent_hold(void)
{
    atomic_fetch_add(&inside, 1);
    struct td__rpc_agent *agent = atomic_load(&current);
    if (agent && agent->generation == td__fork_generation())
        return agent;
    atomic_fetch_sub(&inside, 1);
    return NULL;
}

struct td__rpc_agent *td__agent_enter(const char *call)
{
    struct td__rpc_agent *agent = td__agent_hold();
    if (!agent)
        td_fail(TD_ERR_STATE, "%s: this process is no worker: td_init_rpc() makes it one", call);
    return agent;
}

void td__agent_leave(struct td__rpc_agent *agent)
{
    if (agent)
        atomic_fetch_sub(&inside, 1);
}

/* ---- Messages -------------------------------------------------------------------------------- */

/* A message to this worker itself. */
static void loop_back(struct td__rpc_agent *agent, struct td__message *message)
{
    struct td__message_header header;
    struct td__incoming *incoming = NULL;
    td__message_header_read(td__message_head(message), &header);
    incoming = td__incoming_create(agent, agent->rank, &header, agent->max_message);
    message->written = TD__HEADER_SIZE - message->skip;
    while (incoming) {
        size_t want, have;
        void *to = td__incoming_next(incoming, &want);
        const void *from = td__message_next(message, &have);
        if (!want)
            break;
        size_t size = want < have ? want : have;
        if (to)
            memcpy(to, from, size);
        td__incoming_advance(incoming, size);
        message->written += size;
    }
    td__message_free(message);
    if (incoming)
        td__agent_receive(NULL, incoming);
    if (header.kind == TD__MESSAGE_REQUEST)
        td__io_wake(agent);
}

void td__agent_fail_unsent(struct td__rpc_agent *agent, int rank, struct td__message *message,
                           td_status status, const char *text)
{
    struct td__message_header header;
    td__message_header_read(td__message_head(message), &header);
    td__message_free(message);
    if (header.kind == TD__MESSAGE_REQUEST)
        td__call_fail(agent, rank, header.id, status, text);
}

td_status td__agent_send(struct td__rpc_agent *agent, int rank, struct td__message *message)
{
    if (rank == agent->rank) {
        loop_back(agent, message);
        return TD_OK;
    }
    pthread_mutex_lock(&agent->lock);
    struct td__rpc_worker *worker = td__worker(agent, rank);
    bool gone = worker->gone, connect = false;
    struct td__rpc_link *link = gone ? NULL : worker->link;
    if (link) {
        td__link_retain(link);
    } else if (!gone) {
        *worker->last = message;
        worker->last = &message->next;
        connect = !worker->connecting;
        worker->connecting = true;
    }
    pthread_mutex_unlock(&agent->lock);
    if (link) {
        td_status status = td__link_send(link, message);
        td__link_release(link);
        return status; /* the end of the link fails the call */
    }
    if (gone) {
        char text[512];
        snprintf(text, sizeof text, "worker \"%s\" %s", worker->name, worker->why);
        td__agent_fail_unsent(agent, rank, message, TD_ERR_PEER, text);
        return TD_ERR_PEER;
    }
    if (connect)
        td__workers_connect(agent, rank);
    return TD_OK;
}

static void receive_reply(struct td__rpc_agent *agent, struct td__incoming *incoming)
{
    struct td__reader body = td__incoming_body(incoming);
    uint64_t id = incoming->header.id;
    const char *name = td__worker_name_of(agent, incoming->from);
    char text[TD__ERROR_TEXT];
    if (incoming->status || incoming->header.kind == TD__MESSAGE_REPLY) {
        td_value *value = incoming->status || td__incoming_own(incoming) ||
                                  td__context_receive(incoming)
                              ? NULL
                              : td__incoming_value(incoming, body.at, (size_t)(body.end - body.at));
        if (value) {
            td__call_complete(agent, incoming->from, id, value);
            return;
        }
        td_status status = incoming->status ? incoming->status : td__error_status();
        snprintf(text, sizeof text, "the answer of worker \"%s\" cannot be used: %.1024s", name,
                 incoming->status ? incoming->text : td__error_text());
        td__call_fail(agent, incoming->from, id, status, text);
        return;
    }
    td_status status = (td_status)td__reader_u32(&body);
    struct td__span why = td__reader_string(&body, TD__ERROR_TEXT);
    if (body.failed || status <= TD_OK || status > TD_ERR_ABORTED)
        status = TD_ERR_INVALID;
    /* Of calls in calls in calls, the last workers are named, and the text stays whole. */
    bool names = why.size > LONG_CHAIN && !strncmp(why.data, "worker \"", 8);
    snprintf(text, sizeof text, "%s%s%s%.*s", names ? "" : "worker \"", names ? "" : name,
             names ? "" : "\": ", (int)why.size, why.data ? why.data : "");
    td__call_fail(agent, incoming->from, id, status, text);
}

static void receive_returns(struct td__rpc_agent *agent, const struct td__incoming *incoming)
{
    struct td__reader body = td__incoming_body(incoming);
    while (body.at < body.end && !body.failed)
        td__rpc_lease_end(agent, incoming->from, td__reader_u64(&body));
}

void td__agent_receive(struct td__rpc_link *link, struct td__incoming *incoming)
{
    struct td__rpc_agent *agent = incoming->agent;
    if (link && incoming->header.kind != TD__MESSAGE_REQUEST)
        td__serve_arrived(link);
    switch (incoming->header.kind) {
    case TD__MESSAGE_REQUEST:
        td__serve(agent, link, incoming);
        return;
    case TD__MESSAGE_REPLY:
    case TD__MESSAGE_ERROR:
        receive_reply(agent, incoming);
        break;
    case TD__MESSAGE_CANCEL:
        td__serve_cancel(agent, incoming->from, incoming->header.id);
        break;
    case TD__MESSAGE_RETURN:
        if (!incoming->status)
            receive_returns(agent, incoming);
        break;
    case TD__MESSAGE_LEAVE:
        if (link)
            link->leaving = true;
        break;
    case TD__MESSAGE_ACK:
        if (link)
            td__link_acked(link, incoming->header.id);
        break;
    }
    td__incoming_free(incoming);
}

/* ---- Beginning ------------------------------------------------------------------------------- */

/* How workers reach each other. */
static const struct rpc_backend {
    const char *name;
    bool shared; /* through shared memory on one host */
} backends[] = {{"native", true}, {"tcp", false}};

enum { BACKENDS = sizeof backends / sizeof *backends };

/* By name; NULL: the one that TANDEM_TRANSPORT says, as for process groups. */
static const struct rpc_backend *find_backend(const char *name)
{
    const char *transport = getenv("TANDEM_TRANSPORT");
    if (!name)
        name = transport && !strcmp(transport, "tcp") ? "tcp" : "native";
    for (int i = 0; i < BACKENDS; i++)
        if (!strcmp(backends[i].name, name))
            return &backends[i];
    return NULL;
}

static td_status fail_backend(const char *name)
{
    char known[64] = "";
    for (int i = 0; i < BACKENDS; i++)
        td__text_add(known, sizeof known, "%s%s", i ? ", " : "", backends[i].name);
    return td_fail(TD_ERR_INVALID, "td_init_rpc: there is no backend \"%.100s\"; there are: %s",
                   name, known);
}

static td_status check_options(const char *name, const td_rpc_options *options)
{
    if (!name || !*name || strlen(name) > TD_RPC_MAX_NAME)
        return td_fail(TD_ERR_INVALID, "td_init_rpc: a name has 1 to %d characters",
                       TD_RPC_MAX_NAME);
    for (const char *c = name; *c; c++)
        if (!strchr("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-.:/", *c))
            return td_fail(TD_ERR_INVALID,
                           "td_init_rpc: the name \"%s\" has a '%c'; it can have letters, digits, "
                           "'_', '-', '.', ':' and '/'",
                           name, *c);
    TD_TRY(td__check_reserved("td_init_rpc", options->reserved));
    if (options->max_message && options->max_message < LEAST_MESSAGE)
        return td_fail(
            TD_ERR_INVALID,
            "td_init_rpc: max_message is %zu bytes; it is at least %d, for the library's own "
            "messages",
            options->max_message, LEAST_MESSAGE);
    if (options->timeout_ms < 0 || options->threads < 0 || options->threads > MAX_THREADS)
        return td_fail(TD_ERR_INVALID, "td_init_rpc: %s is negative or too large",
                       options->timeout_ms < 0 ? "timeout_ms" : "threads");
    if (options->dynamic && (options->rank || options->world_size))
        return td_fail(TD_ERR_INVALID,
                       "td_init_rpc: a dynamic worker gets its rank, and there is no world size; "
                       "leave both 0");
    if (!find_backend(options->backend))
        return fail_backend(options->backend);
    if (options->store && options->init_method)
        return td_fail(TD_ERR_INVALID, "td_init_rpc: both a store and an init method are given");
    return TD_OK;
}

static void destroy(struct td__rpc_agent *agent)
{
    td__workers_close(agent);
    td__serve_lost(agent, -1);
    td__contexts_lost(agent, -1); /* a thread may wait for the gradients of a backward pass */
    td__io_stop(agent);
    td__serve_close(agent);
    if (agent->endpoint)
        td__endpoint_stop_detector(agent->endpoint);
    td__io_close(agent);
    td__rpc_keep_borrowed();
    td__contexts_lost(agent, -1);
    td__rrefs_close(agent);
    td__workers_free(agent);
    td__rpc_leases_close(agent);
    if (agent->endpoint)
        td__endpoint_close(agent->endpoint);
    td_store_close(agent->store);
    td_world_close(&agent->world);
    for (uint32_t i = 0; i < agent->pending_capacity; i += 256)
        free(agent->pending[i / 256]);
    free(agent->pending);
    pthread_mutex_destroy(&agent->lock);
    pthread_mutex_destroy(&agent->run_lock);
    pthread_mutex_destroy(&agent->calls_lock);
    pthread_mutex_destroy(&agent->lease_lock);
    pthread_mutex_destroy(&agent->rref_lock);
    pthread_mutex_destroy(&agent->context_lock);
    td__devices_close(agent);
    pthread_mutex_destroy(&agent->device_lock);
    free(agent);
}

static struct td__rpc_agent *create(const char *name, const td_rpc_options *options)
{
    struct td__rpc_agent *agent = calloc(1, sizeof *agent);
    if (!agent) {
        td__fail_nomem("rpc");
        return NULL;
    }
    snprintf(agent->name, sizeof agent->name, "%s", name);
    agent->generation = td__fork_generation();
    agent->timeout_ms = options->timeout_ms ? options->timeout_ms : TD_RPC_DEFAULT_TIMEOUT_MS;
    agent->threads = options->threads ? options->threads : DEFAULT_THREADS;
    agent->max_message = options->max_message ? options->max_message : DEFAULT_MAX_MESSAGE;
    agent->control_fd = agent->epoll = agent->sockets = agent->event = agent->timer =
        agent->deadline_timer = -1;
    agent->first_free = UINT32_MAX;
    agent->next_deadline = TD__NEVER;
    pthread_mutex_init(&agent->lock, NULL);
    pthread_mutex_init(&agent->run_lock, NULL);
    pthread_mutex_init(&agent->calls_lock, NULL);
    pthread_mutex_init(&agent->lease_lock, NULL);
    pthread_mutex_init(&agent->rref_lock, NULL);
    pthread_mutex_init(&agent->context_lock, NULL);
    pthread_mutex_init(&agent->device_lock, NULL);
    static atomic_ullong serials;
    agent->serial = atomic_fetch_add(&serials, 1) + 1;
    return agent;
}

/* Opens the store, and finds rank and size; *given is the whole store. */
static td_status open_store(struct td__rpc_agent *agent, const td_rpc_options *options,
                            td_store **given)
{
    *given = options->store;
    agent->dynamic = options->dynamic;
    agent->limit = TD__MAX_RANKS;
    if (options->dynamic && !options->store) {
        TD_TRY(td_rendezvous_store(options->init_method, 0, &agent->world.store));
        *given = agent->world.store;
    } else if (!options->store) {
        td_rendezvous_options rendezvous = {.rank = options->rank,
                                            .world_size = options->world_size};
        TD_TRY(td_rendezvous(options->init_method, &rendezvous, &agent->world));
        *given = agent->world.store;
        agent->rank = agent->world.rank;
        agent->limit = agent->world.world_size;
    } else if (!options->dynamic) {
        agent->rank = options->rank;
        agent->limit = options->world_size;
    }
    if (!agent->dynamic && (agent->limit < 1 || agent->limit >= TD__MAX_RANKS || agent->rank < 0 ||
                            agent->rank >= agent->limit))
        return td_fail(TD_ERR_INVALID, "td_init_rpc: rank %d of %d: ranks are 0 to world_size - 1",
                       options->rank, options->world_size);
    return td_prefix_store_open("\1rpc", *given, &agent->store);
}

static td_status join(struct td__rpc_agent *agent, const td_rpc_options *options)
{
    char host[64];
    td_store *given;
    TD_TRY(open_store(agent, options, &given));
    td__own_address(given, host);
    TD_TRY(td__io_open(agent));
    return td__membership_join(agent, given, host, find_backend(options->backend)->shared);
}

td_status td_init_rpc(const char *name, const td_rpc_options *options)
{
    td_rpc_options none = {0};
    options = options ? options : &none;
    TD_TRY(check_options(name, options));
    forget_parent();
    pthread_mutex_lock(&life);
    struct td__rpc_agent *there = td__agent_hold(), *agent = NULL;
    td_status status = TD_OK;
    td__agent_leave(there);
    if (there)
        status = td_fail(TD_ERR_STATE, "td_init_rpc: this process is the worker \"%s\" already",
                         there->name);
    else if (!(agent = create(name, options)))
        status = TD_ERR_NOMEM;
    if (!status)
        status = td__device_maps_copy(agent, options->device_maps);
    if (!status)
        status = td__rref_register();
    if (!status)
        status = td__heartbeat_read();
    if (!status)
        status = join(agent, options);
    if (status && agent) {
        struct td__error error;
        td__error_save(&error);
        td__membership_withdraw(agent);
        destroy(agent);
        td__error_restore(&error);
    } else if (!status) {
        atomic_store(&current, agent);
        td__workers_listen(agent);
    }
    pthread_mutex_unlock(&life);
    return status;
}

/* ---- End ------------------------------------------------------------------------------------- */

/* Whether this worker has no calls that are not complete. */
static bool is_idle(struct td__rpc_agent *agent)
{
    pthread_mutex_lock(&agent->calls_lock);
    bool idle = agent->pending_count == 0;
    pthread_mutex_unlock(&agent->calls_lock);
    pthread_mutex_lock(&agent->run_lock);
    idle = idle && !agent->active && !agent->continuations;
    pthread_mutex_unlock(&agent->run_lock);
    return idle;
}

static bool await_idle(struct td__rpc_agent *agent, td__deadline deadline)
{
    for (int64_t pause = 10000; !is_idle(agent); pause = pause < 5000000 ? 2 * pause : pause) {
        if (td__deadline_passed(deadline))
            return false;
        td__sleep_ns(pause);
    }
    return true;
}

/* The first rank from `rank` on whose worker has died; -1: none. */
static int find_dead(struct td__rpc_agent *agent, int rank)
{
    for (; td__worker_from(agent, &rank); rank++) {
        bool known = td__endpoint_knows(agent->endpoint, rank);
        enum td__presence presence = known ? td__endpoint_presence(agent->endpoint, rank)
                                           : TD__PRESENT;
        if (presence == TD__ENDED || presence == TD__CUT_OFF)
            return rank;
    }
    return -1;
}

/* A graceful shutdown has ended: names the workers that have died. Without the store, workers cannot agree on the end;
 * one that has died may have hosted it. */
static td_status name_dead(struct td__rpc_agent *agent, td_status status)
{
    struct td__error error;
    td__error_save(&error);
    if (status == TD_ERR_PEER)
        td__endpoint_await_loss(agent->endpoint, 0, td__deadline_in_ms(NOTICE_MS));
    int dead = agent->dynamic ? -1 : find_dead(agent, 0);
    if (status == TD_ERR_PEER && dead >= 0)
        return td_fail(status, "td_rpc_shutdown: worker \"%s\" %s: %s",
                       td__worker_name_of(agent, dead),
                       td__endpoint_exit_reason(agent->endpoint, dead), error.text);
    for (; !status && dead >= 0; dead = find_dead(agent, dead + 1))
        td_log(TD_LOG_WARN, "td_rpc_shutdown: without worker \"%s\", which %s",
               td__worker_name_of(agent, dead), td__endpoint_exit_reason(agent->endpoint, dead));
    return status ? td__error_restore(&error) : TD_OK;
}

td_status td_rpc_shutdown(const td_rpc_shutdown_options *options)
{
    td_rpc_shutdown_options none = {0};
    options = options ? options : &none;
    TD_TRY(td__check_reserved(__func__, options->reserved));
    if (options->timeout_ms < 0)
        return td_fail(TD_ERR_INVALID, "td_rpc_shutdown: a timeout of %lld ms",
                       (long long)options->timeout_ms);
    if (td__current_call)
        return td_fail(TD_ERR_STATE, "td_rpc_shutdown: called by a function that serves a call");
    forget_parent();
    pthread_mutex_lock(&life);
    struct td__rpc_agent *agent = td__agent_enter(__func__);
    if (!agent) {
        pthread_mutex_unlock(&life);
        return TD_ERR_STATE;
    }
    td_status status = TD_OK;
    td__deadline deadline = options->timeout_ms ? td__deadline_in_ms(options->timeout_ms)
                                                : TD__NEVER;
    atomic_store(&agent->finishing, !options->now);
    if (!options->now)
        status = name_dead(agent, td__membership_leave(agent, await_idle, deadline));
    agent->orderly = !options->now && !status && !agent->dynamic;
    struct td__error error;
    td__error_save(&error);
    pthread_mutex_lock(&agent->calls_lock);
    agent->closed = true;
    pthread_mutex_unlock(&agent->calls_lock);
    td__calls_fail_all(agent, -1, UINT_MAX, TD_ERR_ABORTED, "this worker was shut down");
    td__rrefs_abort(agent);
    td__rpc_keep_borrowed();
    atomic_store(&agent->leaving, true);
    td__membership_withdraw(agent);
    td__workers_say_goodbye(agent);
    atomic_store(&current, NULL);
    td__agent_leave(agent);
    atomic_store(&agent->aborting, true);
    while (atomic_load(&inside) > 0) {
        td__futures_abort_waits(agent);
        td__serve_lost(agent, -1); /* a thread that waits for a call may serve one meanwhile */
        td__sleep_ns(100000);
    }
    destroy(agent);
    pthread_mutex_unlock(&life);
    return status ? td__error_restore(&error) : TD_OK;
}
