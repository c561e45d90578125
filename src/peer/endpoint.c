/* A rank's place among the others; see endpoint.h.
 *
 * A request is one fixed block: what is wanted, who asks, for which group and channel. What comes before
 * its counterpart here (a link to a group that is not made yet, a shared_fd that is not laid out
 * yet) waits in a list; the lists are short, and searched from the front.
 *
 * Locks: endpoint->lock guards the three lists; map_lock guards the views of other ranks'
 * arenas, and is never held together with it. */
#include "peer/endpoint_internal.h"

#include "base/fail.h"
#include "base/thread.h"
#include "os/heartbeat.h"
#include "os/socket.h"
#include "os/tls.h"
#include "os/trust.h"
#include "peer/failure_detector.h"

#include <errno.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { KNOCK_MS = 250, PARTING_MS = 2000 };
enum { REFUSALS = 4, REFUSED_NS = 50000000 };

struct td__endpoint_arrival { /* a link, or a wish for a shared_fd */
    struct td__endpoint_arrival *next;
    struct td__request request;
    int fd;
};

struct td__listener {
    struct td__listener *next;
    uint64_t group;
    enum td__link_channel channel;
    td__link_fn fn;
    void *arg;
};

/* ---- Being asked ----------------------------------------------------------------------------- */

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

bool td__request_read(const uint8_t bytes[TD__REQUEST_SIZE], int size, struct td__request *request)
{
    uint32_t what = td__load_u32(bytes), rank = td__load_u32(bytes + 4);
    if (what < TD__WANT_LINK || what > TD__WANT_HAND_OVER || rank >= (uint32_t)size)
        return false;
    *request = (struct td__request){
        .what = (enum td__want)what,
        .rank = (int)rank,
        .group = td__load_u32(bytes + 8) | (uint64_t)td__load_u32(bytes + 12) << 32,
        .channel = td__load_u32(bytes + 16),
        .value = td__load_u32(bytes + 20) | (uint64_t)td__load_u32(bytes + 24) << 32,
    };
    return what != TD__WANT_NEWS ||
           (request->group < (uint64_t)size && request->channel > TD__PRESENT &&
            request->channel <= TD__CUT_OFF);
}

static struct td__listener **find_listener(struct td__endpoint *endpoint, uint64_t group,
                                           uint32_t channel)
{
    struct td__listener **link = &endpoint->listeners;
    while (*link && ((*link)->group != group || (*link)->channel != channel))
        link = &(*link)->next;
    return link;
}

/* What cannot be served yet waits for its counterpart. */
static void keep(struct td__endpoint *endpoint, const struct td__request *request, int fd)
{
    struct td__endpoint_arrival **end = &endpoint->arrivals;
    struct td__endpoint_arrival *arrival = malloc(sizeof *arrival);
    if (!arrival) {
        close(fd);
        return;
    }
    *arrival = (struct td__endpoint_arrival){.request = *request, .fd = fd};
    while (*end)
        end = &(*end)->next;
    *end = arrival;
    pthread_cond_broadcast(&endpoint->arrived);
}

static void on_accepted(void *arg, int fd, bool local, const uint8_t bytes[TD__REQUEST_SIZE])
{
    struct td__endpoint *endpoint = arg;
    struct td__request request;
    if (!td__request_read(bytes, endpoint->size, &request) ||
        ((request.what == TD__WANT_SHARED_FD || request.what == TD__WANT_HAND_OVER) && !local)) {
        close(fd);
        return;
    }
    if (request.what == TD__WANT_HAND_OVER) {
        td__shared_fd_take_over(endpoint, &request, fd);
        return;
    }
    if (request.what != TD__WANT_LINK && request.what != TD__WANT_SHARED_FD) {
        td__endpoint_serve(endpoint, &request, fd);
        return;
    }
    pthread_mutex_lock(&endpoint->lock);
    struct td__listener *listener = *find_listener(endpoint, request.group, request.channel);
    if (request.what == TD__WANT_LINK && listener && listener->fn)
        listener->fn(listener->arg, request.rank, fd);
    else if (request.what == TD__WANT_LINK && listener)
        close(fd);
    else if (request.what != TD__WANT_SHARED_FD || !td__shared_fd_hand_out(endpoint, &request, fd))
        keep(endpoint, &request, fd);
    pthread_mutex_unlock(&endpoint->lock);
}

/* ---- Life ------------------------------------------------------------------------------------ */

/* A unix socket in the abstract name space, under a name that nobody can guess. */
static td_status listen_locally(char name[TD__CARD_TEXT], int *fd)
{
    struct td__address_list list;
    uint8_t random[8];
    bool retry;
    TD_TRY(td__random(random, sizeof random));
    int length = snprintf(name, TD__CARD_TEXT, "unix:@tandem-link-%d-", (int)getpid());
    for (size_t i = 0; i < sizeof random; i++)
        length += snprintf(name + length, TD__CARD_TEXT - (size_t)length, "%02x", random[i]);
    TD_TRY(td__resolve(name, 0, TD__NEVER, &list, &retry));
    *fd = td__listen_on(&list.at[0]);
    if (*fd < 0)
        return td_fail(TD_ERR_SYSTEM, "cannot listen at %s: %s", name, td__errno_text(-*fd));
    return TD_OK;
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

    int tcp_fd = -1, local_fd = -1;
    td_status status = td__heartbeat_read();
    if (!status)
        status = td__secret_load(NULL, &endpoint->secret);
    if (!status && size == 1)
        status = td__secret_alone(&endpoint->secret);
    else if (!status && td__host_is_loopback(host)) /* whom is meant, the identity tells */
        status = td__secret_place(&endpoint->secret, "links");
    if (!status)
        status = td__random(own->identity, sizeof own->identity);
    if (!status)
        status = td__listen_trusted(host, 0, "link", &endpoint->secret, td__deadline_in_ms(10000),
                                    &tcp_fd, &own->port);
    if (!status)
        status = listen_locally(own->local, &local_fd);
    if (status) {
        if (tcp_fd >= 0)
            close(tcp_fd);
        goto free_endpoint;
    }
    status = td__endpoint_listener_open(tcp_fd, local_fd, &endpoint->secret, own->identity,
                                        on_accepted, endpoint, &endpoint->listener);
    if (status)
        goto free_endpoint;
    *endpoint_out = endpoint;
    return TD_OK;

free_endpoint:
    pthread_cond_destroy(&endpoint->arrived);
    pthread_mutex_destroy(&endpoint->map_lock);
    pthread_mutex_destroy(&endpoint->answer_lock);
    pthread_mutex_destroy(&endpoint->lock);
    free(endpoint->peers);
    free(endpoint);
    return status;
}

void td__endpoint_close(struct td__endpoint *endpoint)
{
    td__failure_detector_stop(endpoint);
    td__endpoint_listener_close(endpoint->listener);
    td__endpoint_part(endpoint);
    for (struct td__endpoint_arrival *arrival = endpoint->arrivals, *next; arrival;
         arrival = next) {
        next = arrival->next;
        close(arrival->fd);
        free(arrival);
    }
    for (struct td__listener *listener = endpoint->listeners, *next; listener; listener = next) {
        next = listener->next;
        free(listener);
    }
    td__shared_fds_forget(endpoint, 0, true);
    for (int r = 0; r < endpoint->size; r++)
        if (endpoint->peers[r].viewed)
            td__arena_view_close(&endpoint->peers[r].view);
    pthread_cond_destroy(&endpoint->arrived);
    pthread_mutex_destroy(&endpoint->map_lock);
    pthread_mutex_destroy(&endpoint->answer_lock);
    pthread_mutex_destroy(&endpoint->lock);
    free(endpoint->peers);
    free(endpoint);
    td__tls_drain(td__deadline_in_ms(PARTING_MS));
}

/* ---- Links ----------------------------------------------------------------------------------- */

/* BBR, a common default, paces: on loopback that halves the speed, and there is nothing to pace for. */
static void tune(int fd)
{
    struct td__address peer;
    int on = 1;
    td__remote_address(fd, &peer);
    if (peer.any.sa_family == AF_UNIX)
        return;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    if (td__address_is_local(&peer))
        setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "reno", 4);
}

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

/* A rank hands out its card when its listener is open, so where nobody is there any more, nobody will be. One
 * that is stopped, or whose host is silent, does not answer either: whether it is lost is the failure
 * detector's to find out, and until then it is only late. */
static td_status connect_peer(struct td__endpoint *endpoint, int rank, bool locally,
                              td__deadline deadline, int *fd)
{
    const struct td__card *peer = &endpoint->peers[rank];
    struct td__error error;
    int refusals = 0;
    if (td__endpoint_presence(endpoint, rank) == TD__ENDED)
        return td_fail(TD_ERR_PEER, "it %s", td__endpoint_exit_reason(endpoint, rank));
    for (;;) {
        td__deadline end = td__deadline_earlier(deadline, td__deadline_in_ms(KNOCK_MS));
        td_status status = td__connect_trusted(locally ? peer->local : peer->address,
                                               locally ? 0 : peer->port, "link", peer->identity,
                                               &endpoint->secret, end, fd);
        /* One that dies in the middle of the handshake looks as if it had refused the secret, and its
         * listener may stand open a moment longer. */
        if (status != TD_ERR_TIMEOUT && status != TD_ERR_AUTH)
            return status;
        td__error_save(&error);
        td__endpoint_watch(endpoint, rank);
        const char *exit_reason = td__endpoint_exit_reason(endpoint, rank);
        if (exit_reason)
            return td_fail(TD_ERR_PEER, "it %s", exit_reason);
        if (td__is_refused(td__endpoint_probe(endpoint, rank, locally, end + KNOCK_MS * 1000000)))
            return td_fail(TD_ERR_PEER, "nothing listens at its address any more");
        if ((status == TD_ERR_AUTH && ++refusals == REFUSALS) || td__deadline_passed(deadline))
            return td__error_restore(&error);
        if (status == TD_ERR_AUTH)
            td__sleep_ns(REFUSED_NS);
    }
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
    tune(fd);
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

int td__endpoint_take_arrival(struct td__endpoint *endpoint, enum td__want what, int rank,
                              uint64_t group, uint32_t channel)
{
    struct td__endpoint_arrival **link = &endpoint->arrivals;
    for (; *link; link = &(*link)->next) {
        struct td__endpoint_arrival *arrival = *link;
        const struct td__request *request = &arrival->request;
        if (request->what == what && request->group == group && request->channel == channel &&
            (rank < 0 || request->rank == rank)) {
            int fd = arrival->fd;
            *link = arrival->next;
            free(arrival);
            return fd;
        }
    }
    return -1;
}

td_status td__endpoint_accept(struct td__endpoint *endpoint, int rank, uint64_t group,
                              enum td__link_channel channel, td__deadline deadline, int *fd_out)
{
    int fd;
    bool in_time = true;
    pthread_mutex_lock(&endpoint->lock);
    while ((fd = td__endpoint_take_arrival(endpoint, TD__WANT_LINK, rank, group, channel)) < 0 &&
           in_time)
        in_time = td__cond_wait(&endpoint->arrived, &endpoint->lock, deadline);
    pthread_mutex_unlock(&endpoint->lock);
    if (fd < 0)
        return td_fail(TD_ERR_TIMEOUT, "%s has not connected in time",
                       td__endpoint_describe(endpoint, rank));
    tune(fd);
    *fd_out = fd;
    return TD_OK;
}

void td__endpoint_listen(struct td__endpoint *endpoint, uint64_t group,
                         enum td__link_channel channel, td__link_fn fn, void *arg)
{
    struct td__listener *added = calloc(1, sizeof *added);
    pthread_mutex_lock(&endpoint->lock);
    struct td__listener **link = find_listener(endpoint, group, channel);
    if (*link) {
        (*link)->fn = fn;
        (*link)->arg = arg;
    } else if (added) {
        *added = (struct td__listener){.group = group, .channel = channel, .fn = fn, .arg = arg};
        *link = added;
        added = NULL;
    }
    for (struct td__endpoint_arrival **at = &endpoint->arrivals, *arrival; (arrival = *at);) {
        const struct td__request *request = &arrival->request;
        if (request->what != TD__WANT_LINK || request->group != group ||
            request->channel != channel) {
            at = &arrival->next;
            continue;
        }
        *at = arrival->next;
        if (fn)
            fn(arg, request->rank, arrival->fd);
        else
            close(arrival->fd);
        free(arrival);
    }
    pthread_mutex_unlock(&endpoint->lock);
    free(added);
}

void td__endpoint_forget(struct td__endpoint *endpoint, uint64_t group)
{
    pthread_mutex_lock(&endpoint->lock);
    for (struct td__endpoint_arrival **at = &endpoint->arrivals, *arrival; (arrival = *at);) {
        if (arrival->request.group != group) {
            at = &arrival->next;
            continue;
        }
        *at = arrival->next;
        close(arrival->fd);
        free(arrival);
    }
    for (struct td__listener **at = &endpoint->listeners, *listener; (listener = *at);) {
        if (listener->group != group) {
            at = &listener->next;
            continue;
        }
        *at = listener->next;
        free(listener);
    }
    td__shared_fds_forget(endpoint, group, false);
    pthread_mutex_unlock(&endpoint->lock);
}

bool td__endpoint_is_deaf(struct td__endpoint *endpoint, int rank, bool note)
{
    struct td__card *peer = &endpoint->peers[rank];
    if (note)
        atomic_store(&peer->deaf, true);
    return atomic_load(&peer->deaf);
}
