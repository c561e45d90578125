/* This node's server of the store; see node_store.h.
 *
 * To promote a server takes no time, and is done at once. To attach one, and to set a key, may have to wait for the network:
 * that is done by a thread, which gets the latest thing that is wanted, and tries again until that succeeds. */
#include "launch/node_store.h"

#include "base/auth.h"
#include "base/clock.h"
#include "base/fail.h"
#include "base/thread.h"
#include "launch/node_internal.h"
#include "os/address.h"
#include "os/socket.h"
#include "store/store_ops.h"
#include "store/tcp_replica.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>

enum {
    ATTACH_MS = 1500,
    AGAIN_MS = 250,
    PATIENCE_MS = 1500, /* after the loss of the primary, until it is tried again: most often another one follows */
    LINGER_MS = 5000,
};

/* What is to be done by the thread. */
struct errand {
    uint64_t term;                    /* the server is to be a standby in that term … */
    char address[TD__REPLICA_ADDRESS]; /* … of the primary there; "": nothing */
    struct td__buffer coordinator;    /* what is to be published, if anything */
};

struct td__node_store {
    struct td__node *node;
    struct td__tcp_server *server;
    bool separate; /* it is not that of node->store */
    uint32_t number;
    struct td__store_copy told;
    bool listens_at_endpoint;

    pthread_t thread;
    bool started;
    pthread_mutex_t lock; /* protects the rest */
    pthread_cond_t changed;
    bool stopping, news, lost;
    struct errand wanted;
};

bool td__store_is_replicated(const struct td__run_options *options)
{
    return options->nnodes > 1 &&
           (options->min_nodes < options->nnodes || td__others_go_on(options));
}

/* ---- The thread ------------------------------------------------------------------------------ */

/* Called on the server's thread. */
static void on_change(void *arg)
{
    struct td__node_store *store = arg;
    struct td__tcp_replica_state state;
    td__tcp_replica_state(store->server, &state); /* set before the server knows this function */
    pthread_mutex_lock(&store->lock);
    if (state.primary_lost && !store->lost)
        store->news = true;
    store->lost = state.primary_lost;
    pthread_cond_signal(&store->changed);
    pthread_mutex_unlock(&store->lock);
    eventfd_write(store->node->wake, 1);
}

/* True where the server is the standby that it is to be. */
static bool attach(struct td__node_store *store, const struct errand *errand)
{
    struct td__tcp_replica_state state;
    td__tcp_replica_state(store->server, &state);
    if (state.role == TD__REPLICA_STANDBY && state.copy_term == errand->term && state.whole &&
        !state.primary_lost)
        return true;
    if (state.role == TD__REPLICA_PRIMARY && state.term >= errand->term)
        return true; /* a later roster wants that */
    if (state.role == TD__REPLICA_PRIMARY)
        td__tcp_replica_depose(store->server, errand->term);
    return !td__tcp_replica_attach(store->server, errand->address, NULL,
                                   td__deadline_in_ms(ATTACH_MS));
}

/* The client of node->store may have given up meanwhile: then another one is opened. */
static bool publish(struct td__node_store *store, const struct td__buffer *coordinator)
{
    struct td__node *node = store->node;
    const char *key = TD__COORDINATOR_KEY;
    bool done;
    if (!td_store_set(node->store, key, coordinator->data, coordinator->size) &&
        !td_store_check(node->store, &key, 1, &done))
        return true;
    struct td__tcp_replica_state state;
    const char *addresses[TD__REPLICA_MOST];
    int count = 0;
    td__tcp_replica_state(store->server, &state);
    for (int i = 0; i < state.members.count; i++)
        if (*state.members.at[i].address)
            addresses[count++] = state.members.at[i].address;
    td_tcp_store_options options = {.timeout_ms = ATTACH_MS};
    td_store *again;
    if (!count || !store->separate || td__tcp_store_open_any(addresses, count, &options, &again))
        return false;
    td_store_close(node->store);
    node->store = again;
    return false;
}

static bool run_errand(struct td__node_store *store, struct errand *errand)
{
    bool done = !*errand->address || attach(store, errand);
    return (!errand->coordinator.size || publish(store, &errand->coordinator)) && done;
}

static void *run(void *arg)
{
    struct td__node_store *store = arg;
    bool again = false;
    pthread_mutex_lock(&store->lock);
    while (!store->stopping) {
        if (!store->news && !again) {
            td__cond_wait(&store->changed, &store->lock, TD__NEVER);
            continue;
        }
        if (store->lost || again) { /* unless something else is wanted meanwhile */
            td__deadline pause = td__deadline_in_ms(store->lost ? PATIENCE_MS : AGAIN_MS);
            store->news = false;
            while (!store->news && !store->stopping &&
                   td__cond_wait(&store->changed, &store->lock, pause))
                ;
            if (store->stopping)
                break;
        }
        struct errand errand = store->wanted;
        errand.coordinator = (struct td__buffer){0};
        td__buffer_put(&errand.coordinator, store->wanted.coordinator.data,
                       store->wanted.coordinator.size);
        store->news = store->lost = false;
        pthread_mutex_unlock(&store->lock);
        again = !run_errand(store, &errand);
        td__buffer_free(&errand.coordinator);
        pthread_mutex_lock(&store->lock);
    }
    pthread_mutex_unlock(&store->lock);
    return NULL;
}

static td_status start_thread(struct td__node_store *store)
{
    store->stopping = false;
    int error = td__thread_start(&store->thread, "td-standby", run, store);
    store->started = !error;
    return error ? td_fail(TD_ERR_SYSTEM, "cannot start a thread: %s", td__errno_text(error))
                 : TD_OK;
}

static void stop_thread(struct td__node_store *store)
{
    if (!store->started)
        return;
    pthread_mutex_lock(&store->lock);
    store->stopping = true;
    pthread_cond_signal(&store->changed);
    pthread_mutex_unlock(&store->lock);
    pthread_join(store->thread, NULL);
    store->started = false;
}

/* ---- Opening and closing --------------------------------------------------------------------- */

/* The address at which the others reach what listens here. */
static const char *own_host(const struct td__node *node, const char *host)
{
    const char *own = node->introduction.node.address;
    return own[0] ? own : strcmp(host, "0.0.0.0") ? host : node->options->host;
}

/* Opens a server that is nobody's standby yet: at an endpoint of the command line that is here and free, or at any port. */
static td_status open_server(struct td__node_store *store, const char *host)
{
    const struct td__run_options *options = store->node->options;
    struct td__tcp_replica_options replica = {0};
    char address[TD__REPLICA_ADDRESS];
    td_status status = TD_ERR_SYSTEM;
    do
        TD_TRY(td__random(&store->number, sizeof store->number));
    while (!store->number); /* that of the first one */
    replica.number = store->number;
    for (int i = 1; i < options->endpoint_count && status; i++) {
        replica.host = options->endpoints[i].host;
        replica.port = options->endpoints[i].port;
        if (td__host_is_here(replica.host, td__deadline_in_ms(ATTACH_MS)))
            status = td__tcp_replica_open(&replica, &store->server);
    }
    if (status) {
        replica.host = host;
        replica.port = 0;
        TD_TRY(td__tcp_replica_open(&replica, &store->server));
    }
    td__endpoint_text(own_host(store->node, replica.host), td__tcp_replica_port(store->server),
                      address, sizeof address);
    return td__tcp_replica_name(store->server, store->number, address, on_change, store);
}

/* The one that node->store hosts. */
static td_status name_first(struct td__node_store *store)
{
    char address[TD__REPLICA_ADDRESS];
    store->server = td__tcp_store_server(store->node->store);
    td__endpoint_text(store->node->options->host, td__tcp_replica_port(store->server), address,
                      sizeof address);
    return td__tcp_replica_name(store->server, 0, address, on_change, store);
}

static void introduce(struct td__node_store *store)
{
    struct td__introduction *own = &store->node->introduction;
    own->node.store_number = store->number;
    own->node.store_port = td__tcp_replica_port(store->server);
    td__node_store_look(store->node, &own->copy);
}

td_status td__node_store_open(struct td__node *node, bool first, const char *host)
{
    struct td__node_store *store = calloc(1, sizeof *store);
    if (!store)
        return td__fail_nomem("launcher");
    store->node = node;
    store->separate = !first;
    pthread_mutex_init(&store->lock, NULL);
    td__cond_init(&store->changed);
    node->keeper = store;
    TD_TRY(first ? name_first(store) : open_server(store, host));
    introduce(store);
    return start_thread(store);
}

/* The other kind was closed with node->store. */
static void close_server(struct td__node_store *store)
{
    struct td__tcp_replica_state state;
    if (!store->server || !store->separate)
        return;
    td__tcp_replica_state(store->server, &state);
    bool serves = state.role == TD__REPLICA_PRIMARY && !store->node->leaves;
    td__tcp_replica_close(store->server, serves ? td__deadline_in_ms(LINGER_MS) : 0);
    store->server = NULL;
}

void td__node_store_close(struct td__node *node)
{
    struct td__node_store *store = node->keeper;
    if (!store)
        return;
    stop_thread(store);
    if (node->store && node->leaves)
        td__tcp_store_set_linger(node->store, 0); /* the store has moved */
    if (node->store) /* first: a server waits for its clients; and this may end the server */
        td_store_close(node->store);
    node->store = NULL;
    close_server(store);
    td__buffer_free(&store->wanted.coordinator);
    pthread_cond_destroy(&store->changed);
    pthread_mutex_destroy(&store->lock);
    free(store);
    node->keeper = NULL;
}

/* ---- What the roster says -------------------------------------------------------------------- */

/* New nodes look for the job at the endpoint: where that is an address of this host, this server has it from now on, unless
 * another program was faster. */
static void listen_at_endpoint(struct td__node_store *store)
{
    const struct td__run_options *options = store->node->options;
    if (store->listens_at_endpoint || !store->separate ||
        td__tcp_replica_port(store->server) == options->port ||
        !td__host_is_here(options->host, td__deadline_in_ms(ATTACH_MS)))
        return;
    store->listens_at_endpoint = !td__tcp_replica_listen(store->server, options->host,
                                                         options->port, NULL);
}

static void lead(struct td__node_store *store, uint64_t term)
{
    struct td__tcp_replica_state state;
    td__tcp_replica_state(store->server, &state);
    if ((state.role != TD__REPLICA_PRIMARY || state.term < term) &&
        td__tcp_replica_promote(store->server, term))
        td_log(TD_LOG_WARN, "tdrun: %s", td__error_text());
    listen_at_endpoint(store);
}

static void keep_those_of(struct td__node_store *store, const struct td__roster *roster)
{
    uint32_t *numbers = calloc((size_t)roster->count, sizeof *numbers);
    if (!numbers)
        abort();
    for (int i = 0; i < roster->count; i++)
        numbers[i] = roster->at[i].store_number;
    td__tcp_replica_keep(store->server, numbers, roster->count);
    free(numbers);
}

void td__node_store_follow(struct td__node *node)
{
    struct td__node_store *store = node->keeper;
    const struct td__roster *roster = &node->roster;
    struct errand wanted = {.term = roster->store_term};
    if (!store || !roster->count)
        return;
    const struct td__roster_node *own = td__roster_find(roster, node->introduction.node.id);
    if (own && roster->store_number == store->number) {
        lead(store, roster->store_term);
        keep_those_of(store, roster);
    } else if (own && td__roster_is_standby(roster, own)) {
        td__endpoint_text(roster->store_address[0] ? roster->store_address : node->options->host,
                          roster->store_port, wanted.address, sizeof wanted.address);
    }
    if (node->lead)
        td__node_put_coordinator(node, &wanted.coordinator);
    pthread_mutex_lock(&store->lock);
    td__buffer_free(&store->wanted.coordinator);
    store->wanted = wanted;
    store->news = true;
    store->lost = false;
    pthread_cond_signal(&store->changed);
    pthread_mutex_unlock(&store->lock);
}

bool td__node_store_look(struct td__node *node, struct td__store_copy *copy)
{
    struct td__node_store *store = node->keeper;
    struct td__tcp_replica_state state;
    if (!store)
        return false;
    td__tcp_replica_state(store->server, &state);
    *copy = (struct td__store_copy){.number = store->number,
                                    .primary = state.role == TD__REPLICA_PRIMARY,
                                    .whole = state.whole,
                                    .term = state.term,
                                    .copy_term = state.copy_term,
                                    .copy_version = state.copy_version};
    bool same = copy->primary == store->told.primary && copy->whole == store->told.whole &&
                copy->term == store->told.term && copy->copy_term == store->told.copy_term &&
                copy->copy_version == store->told.copy_version;
    store->told = *copy;
    return !same;
}

td_status td__node_store_renew(struct td__node *node)
{
    struct td__node_store *store = node->keeper;
    struct td__roster *roster = &node->roster;
    char address[TD__REPLICA_ADDRESS];
    const char *addresses[] = {address};
    td_tcp_store_options options = {.timeout_ms = LINGER_MS};
    const char *host = node->introduction.node.address;
    if (!host[0])
        host = node->options->host;
    stop_thread(store);
    td_store_close(node->store); /* its server is gone */
    node->store = NULL;
    close_server(store);
    store->separate = true;
    store->listens_at_endpoint = false;
    TD_TRY(open_server(store, host));
    TD_TRY(td__tcp_replica_promote(store->server, roster->store_term + 1));
    introduce(store);
    td__endpoint_text(host, td__tcp_replica_port(store->server), address, sizeof address);
    TD_TRY(td__tcp_store_open_any(addresses, 1, &options, &node->store));
    return start_thread(store);
}
