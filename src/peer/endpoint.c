/* The endpoint of a rank: opening, closing, and connecting to other ranks; see endpoint.h.
 * endpoint_accept.c has the accepting side.
 *
 * Locks: endpoint->lock protects the lists of arrivals, link handlers, shared descriptors and watchers;
 * map_lock protects the views of other ranks' arenas, and is never held together with it. */
#include "peer/endpoint_internal.h"

#include "base/fail.h"
#include "base/thread.h"
#include "os/heartbeat.h"
#include "os/socket.h"
#include "os/tls.h"
#include "os/trust.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    CONNECT_MS = 250, /* for one attempt to connect */
    DRAIN_MS = 2000,
    REFUSALS = 4, /* attempts that may be refused */
    REFUSED_NS = 50000000,
};

/* ---- Opening and closing --------------------------------------------------------------------- */

static void free_endpoint(struct td__endpoint *endpoint)
{
    pthread_cond_destroy(&endpoint->arrived);
    pthread_mutex_destroy(&endpoint->map_lock);
    pthread_mutex_destroy(&endpoint->answer_lock);
    pthread_mutex_destroy(&endpoint->lock);
    free(endpoint->peers);
    free(endpoint);
}

td_status td__endpoint_open(int rank, int size, const char *host, bool shared,
                            struct td__endpoint **endpoint_out)
{
    struct td__endpoint *endpoint = calloc(1, sizeof *endpoint);
    if (endpoint)
        endpoint->peers = calloc((size_t)size, sizeof *endpoint->peers);
    if (!endpoint || !endpoint->peers) {
        free(endpoint);
        return td__fail_nomem("endpoint");
    }
    endpoint->rank = rank;
    endpoint->size = size;
    endpoint->shared = shared;
    struct td__card *own = &endpoint->own;
    for (int r = 0; r < size; r++)
        endpoint->peers[r].process = endpoint->peers[r].lifeline = -1;
    td__card_fill_in(own, host);
    pthread_mutex_init(&endpoint->lock, NULL);
    pthread_mutex_init(&endpoint->map_lock, NULL);
    pthread_mutex_init(&endpoint->answer_lock, NULL);
    td__cond_init(&endpoint->arrived);

    td_status status = td__heartbeat_read();
    if (!status)
        status = td__secret_load(NULL, &endpoint->secret);
    if (!status && size == 1)
        status = td__secret_alone(&endpoint->secret);
    else if (!status &&
             td__host_is_loopback(host)) /* the identity tells the jobs of a user apart */
        status = td__secret_bind(&endpoint->secret, "links");
    if (!status)
        status = td__random(own->identity, sizeof own->identity);
    if (!status)
        status = td__endpoint_open_listener(endpoint, host);
    if (status) {
        free_endpoint(endpoint);
        return status;
    }
    *endpoint_out = endpoint;
    return TD_OK;
}

void td__endpoint_close(struct td__endpoint *endpoint)
{
    td__failure_detector_stop(endpoint);
    td__endpoint_close_listener(endpoint);
    td__endpoint_leave(endpoint);
    td__arrivals_forget(endpoint, 0, true);
    td__shared_fds_forget(endpoint, 0, true);
    for (int r = 0; r < endpoint->size; r++)
        if (endpoint->peers[r].viewed)
            td__arena_view_close(&endpoint->peers[r].view);
    free_endpoint(endpoint);
    td__tls_drain(td__deadline_in_ms(DRAIN_MS));
}

void td__endpoint_forget(struct td__endpoint *endpoint, uint64_t group)
{
    pthread_mutex_lock(&endpoint->lock);
    td__arrivals_forget(endpoint, group, false);
    td__shared_fds_forget(endpoint, group, false);
    pthread_mutex_unlock(&endpoint->lock);
}

/* ---- Connecting ------------------------------------------------------------------------------ */

int td__endpoint_probe(const struct td__endpoint *endpoint, int rank, bool locally,
                       td__deadline deadline)
{
    const struct td__card *peer = &endpoint->peers[rank];
    struct td__address_list list;
    bool retry;
    if (td__resolve(locally ? peer->local : peer->address, locally ? 0 : peer->port, deadline,
                    &list, &retry))
        return EHOSTUNREACH;
    int fd = td__connect_to(&list.at[0], deadline);
    if (fd < 0)
        return -fd;
    close(fd);
    return 0;
}

bool td__is_refused(int error)
{
    return error == ECONNREFUSED || error == ENOENT || error == ECONNRESET;
}

/* A rank publishes its card when its listener is open, so an address at which nothing listens stays so:
 * TD_ERR_PEER at once. A rank that is stopped, or whose host is silent, does not answer either. Whether
 * it is lost is for the failure detector to decide; until then the connection is only late. */
static td_status connect_peer(struct td__endpoint *endpoint, int rank, bool locally,
                              td__deadline deadline, int *fd)
{
    const struct td__card *peer = &endpoint->peers[rank];
    struct td__error error;
    int refusals = 0;
    if (td__endpoint_presence(endpoint, rank) == TD__ENDED)
        return td_fail(TD_ERR_PEER, "it %s", td__endpoint_exit_reason(endpoint, rank));
    for (;;) {
        td__deadline end = td__deadline_earlier(deadline, td__deadline_in_ms(CONNECT_MS));
        td_status status = td__connect_trusted(locally ? peer->local : peer->address,
                                               locally ? 0 : peer->port, "link", peer->identity,
                                               &endpoint->secret, end, fd);
        /* A rank that dies during the handshake looks as if it had refused the secret, and its listening
         * socket may stay open for a moment. */
        if (status != TD_ERR_TIMEOUT && status != TD_ERR_AUTH)
            return status;
        td__error_save(&error);
        td__endpoint_watch(endpoint, rank);
        const char *exit_reason = td__endpoint_exit_reason(endpoint, rank);
        if (exit_reason)
            return td_fail(TD_ERR_PEER, "it %s", exit_reason);
        if (td__is_refused(td__endpoint_probe(endpoint, rank, locally, end + CONNECT_MS * 1000000)))
            return td_fail(TD_ERR_PEER, "nothing listens at its address any more");
        if ((status == TD_ERR_AUTH && ++refusals == REFUSALS) || td__deadline_passed(deadline))
            return td__error_restore(&error);
        if (status == TD_ERR_AUTH)
            td__sleep_ns(REFUSED_NS);
    }
}

static void put_request(const struct td__request *request, uint8_t bytes[TD__REQUEST_SIZE])
{
    memset(bytes, 0, TD__REQUEST_SIZE);
    td__store_u32(bytes, request->what);
    td__store_u32(bytes + 4, (uint32_t)request->rank);
    td__store_u32(bytes + 8, (uint32_t)request->group);
    td__store_u32(bytes + 12, (uint32_t)(request->group >> 32));
    td__store_u32(bytes + 16, request->channel);
    td__store_u32(bytes + 20, (uint32_t)request->value);
    td__store_u32(bytes + 24, (uint32_t)(request->value >> 32));
}

td_status td__endpoint_reach(struct td__endpoint *endpoint, int rank, bool locally,
                             const struct td__request *request, td__deadline deadline, int *fd_out)
{
    uint8_t bytes[TD__REQUEST_SIZE];
    int fd;
    td_status status = connect_peer(endpoint, rank, locally, deadline, &fd);
    if (status)
        return td_fail(status, "%s cannot be reached%s: %s", td__endpoint_describe(endpoint, rank),
                       status == TD_ERR_TIMEOUT ? ", it may be stopped" : "", td_last_error());
    put_request(request, bytes);
    int error = td__send_all(fd, bytes, sizeof bytes, deadline);
    if (error) {
        close(fd);
        return td_fail(error == ETIMEDOUT ? TD_ERR_TIMEOUT : TD_ERR_PEER,
                       "%s closed the connection: %s", td__endpoint_describe(endpoint, rank),
                       td__errno_text(error));
    }
    *fd_out = fd;
    return TD_OK;
}

td_status td__endpoint_explain(struct td__endpoint *endpoint, int rank, td_status status,
                               td__deadline deadline)
{
    struct td__error error;
    if (status != TD_ERR_PEER)
        return status;
    td__error_save(&error);
    const char *exit_reason = td__endpoint_find_out(endpoint, rank, deadline);
    return exit_reason
               ? td_fail(TD_ERR_PEER, "%s %s", td__endpoint_describe(endpoint, rank), exit_reason)
               : td__error_restore(&error);
}

bool td__endpoint_is_near(const struct td__endpoint *endpoint, int rank)
{
    return endpoint->peers[rank].host == endpoint->peers[endpoint->rank].host;
}

td_status td__endpoint_connect_briefly(struct td__endpoint *endpoint, int rank, uint64_t group,
                                       enum td__link_channel channel, td__deadline deadline,
                                       int *fd)
{
    struct td__request request = {
        .what = TD__WANT_LINK, .rank = endpoint->rank, .group = group, .channel = channel};
    return td__endpoint_reach(endpoint, rank, td__endpoint_is_near(endpoint, rank), &request,
                              deadline, fd);
}

td_status td__endpoint_connect(struct td__endpoint *endpoint, int rank, uint64_t group,
                               enum td__link_channel channel, td__deadline deadline, int *fd)
{
    td_status status = td__endpoint_connect_briefly(endpoint, rank, group, channel, deadline, fd);
    return td__endpoint_explain(endpoint, rank, status, deadline);
}

bool td__endpoint_is_deaf(struct td__endpoint *endpoint, int rank, bool note)
{
    struct td__card *peer = &endpoint->peers[rank];
    if (note)
        atomic_store(&peer->deaf, true);
    return atomic_load(&peer->deaf);
}
