/* How a launcher finds the job, and joins it; see node_internal.h.
 */
#include "launch/node_internal.h"
#include "launch/node_store.h"

#include "base/fail.h"
#include "base/host.h"
#include "base/text.h"
#include "os/address.h"
#include "os/auth_listener.h"
#include "os/socket.h"
#include "os/trust.h"
#include "store/store_ops.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PURPOSE "launcher"

enum { LISTEN_MS = 10000, AGAIN_NS = 50000000 };

static void introduce_self(struct td__node *node, int wanted_rank)
{
    const struct td__run_options *options = node->options;
    struct td__introduction *own = &node->introduction;
    *own = (struct td__introduction){
        .nnodes = options->nnodes,
        .min_nodes = options->min_nodes,
        .max_restarts = options->max_restarts,
        .on_failure = options->on_failure,
        .wanted_rank = wanted_rank,
        .round_gone = -1,
        .node = {.id = -1,
                 .node_rank = -1,
                 .nproc = options->nproc,
                 .spares = options->spares,
                 .pid = (int)getpid(),
                 .port = node->port},
    };
    snprintf(own->run_id, sizeof own->run_id, "%s", options->run_id);
    snprintf(own->version, sizeof own->version, "%s", td__job_version);
    snprintf(own->node.host, sizeof own->node.host, "%s", td__this_host(options));
    snprintf(own->node.role, sizeof own->node.role, "%s", options->role);
    if (options->local_addr && !td__host_is_loopback(options->host))
        snprintf(own->node.address, sizeof own->node.address, "%s", options->local_addr);
    memcpy(own->node.identity, node->identity, sizeof own->node.identity);
}

static void on_accepted(void *arg, int fd, bool local, const uint8_t *request)
{
    (void)local;
    (void)request;
    struct td__node *node = arg;
    struct td__node_peer *peer = calloc(1, sizeof *peer);
    if (!peer) {
        close(fd);
        return;
    }
    peer->id = -1;
    td__node_link_open(&peer->link, fd);
    TAILQ_INSERT_TAIL(&node->peers, peer, entry);
}

/* Where this launcher listens. The one that hosts the store is reached at the endpoint, as the store is. */
static void find_host(struct td__node *node, bool at_endpoint, char *host, size_t room)
{
    snprintf(host, room, "%s", node->options->host);
    if (!at_endpoint && !td__host_is_loopback(host) && !td__store_address(node->store, host, room))
        snprintf(host, room, "0.0.0.0");
}

static td_status open_listener(struct td__node *node, const char *host)
{
    int tcp_fd;
    TD_TRY(td__secret_load(NULL, &node->secret));
    TD_TRY(td__random(node->identity, sizeof node->identity));
    struct td__secret bound = node->secret;
    TD_TRY(td__listen_trusted(host, 0, PURPOSE, &bound, td__deadline_in_ms(LISTEN_MS), &tcp_fd,
                              &node->port));
    struct td__auth_listener_options options = {
        .secret = &bound, .purpose = PURPOSE, .fn = on_accepted, .arg = node};
    memcpy(options.identity, node->identity, TD__IDENTITY_SIZE);
    return td__auth_listener_open(tcp_fd, -1, &options, &node->listener);
}

td_status td__node_connect(struct td__node *node, const struct td__roster_node *to,
                           int64_t timeout_ms, int *fd)
{
    const char *host = to->address[0] ? to->address : node->options->host;
    return td__connect_trusted(host, to->port, PURPOSE, to->identity, &node->secret,
                               td__deadline_in_ms(timeout_ms), fd);
}

void td__node_introduce(struct td__node *node)
{
    struct td__buffer body = {0};
    td__node_store_look(node, &node->introduction.copy);
    td__introduction_put(&body, &node->introduction);
    if (node->introduction.node.id >= 0)
        td__roster_put(&body, &node->roster);
    td__node_link_send(&node->up, TD__MESSAGE_JOIN, body.data, body.size);
    td__buffer_free(&body);
}

/* Where the coordinator is, for those that have the store. */
void td__node_put_coordinator(const struct td__node *node, struct td__buffer *value)
{
    const char *address = node->introduction.node.address;
    if (!address[0])
        address = node->options->host;
    td__buffer_put_u32(value, (uint32_t)node->port);
    td__buffer_put(value, node->identity, sizeof node->identity);
    td__buffer_put_string(value, address, strlen(address));
}

static td_status publish_coordinator(struct td__node *node)
{
    struct td__buffer value = {0};
    td__node_put_coordinator(node, &value);
    td_status status = value.failed ? td__fail_nomem("launcher")
                                    : td_store_set(node->store, TD__COORDINATOR_KEY, value.data,
                                                   value.size);
    td__buffer_free(&value);
    return status;
}

static td_status find_coordinator(struct td__node *node, int64_t timeout_ms,
                                  struct td__roster_node *coordinator)
{
    td_bytes value;
    *coordinator = (struct td__roster_node){0};
    TD_TRY(td_store_get(node->store, TD__COORDINATOR_KEY, timeout_ms, &value));
    struct td__reader reader = td__reader_of(value.data, value.size);
    coordinator->port = (int)td__reader_u32(&reader);
    for (size_t i = 0; i < sizeof coordinator->identity; i++)
        coordinator->identity[i] = td__reader_u8(&reader);
    struct td__span address = td__reader_string(&reader, 255);
    if (address.size < sizeof coordinator->address) /* otherwise it is the endpoint */
        snprintf(coordinator->address, sizeof coordinator->address, "%.*s", (int)address.size,
                 address.data);
    bool whole = td__reader_done(&reader);
    td_bytes_free(&value);
    return whole ? TD_OK
                 : td_fail(TD_ERR_MISMATCH,
                           "node 0 has another version of tdrun: install the same on all nodes");
}

td_status td__node_join(struct td__node *node)
{
    const struct td__run_options *options = node->options;
    struct td__roster_node coordinator;
    char host[256];
    int fd, rank;
    td_status status;
    int64_t join_ms = (int64_t)(options->join_timeout_s * 1000);
    TD_TRY(td__job_store_open(options, node->given_secret, &rank, &node->store));
    if (options->nnodes > 1) {
        find_host(node, rank == 0, host, sizeof host);
        TD_TRY(open_listener(node, host));
    }
    introduce_self(node, options->node_rank);
    node->roster.store_port = td_tcp_store_port(node->store);
    node->roster.store_term = 1;
    if (options->nnodes > 1 && strlen(options->host) < sizeof node->roster.store_address)
        td__text_add(node->roster.store_address, sizeof node->roster.store_address, "%s",
                     options->host);
    if (td__store_is_replicated(options))
        TD_TRY(td__node_store_open(node, rank == 0, host));
    if (rank == 0) {
        if (options->nnodes > 1)
            TD_TRY(publish_coordinator(node));
        return td__lead_begin(node);
    }
    td__deadline deadline = td__deadline_in_ms(join_ms > 0 ? join_ms : 1);
    for (;;) {
        TD_TRY(find_coordinator(node, join_ms > 0 ? join_ms : 1, &coordinator));
        status = td__node_connect(node, &coordinator, join_ms > 0 ? join_ms : 1, &fd);
        bool moves = status == TD_ERR_PEER && td__store_is_replicated(options);
        if (!moves || td__deadline_passed(deadline))
            break;
        td__sleep_ns(AGAIN_NS); /* it has ended, and another launcher takes over */
    }
    TD_TRY(status);
    td__node_link_open(&node->up, fd);
    td__node_introduce(node);
    return TD_OK;
}
