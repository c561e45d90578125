/* The endpoint of a rank: opening, closing, and connecting to other ranks; see endpoint.h.
 * endpoint_accept.c has the accepting side.
 *
 * endpoint->lock protects the lists of arrivals, link handlers, shared descriptors and watchers, and the
 * presences. */
#include "peer/endpoint_internal.h"

#include "base/fail.h"
#include "base/thread.h"
#include "os/socket.h"
#include "os/tls.h"
#include "os/trust.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

enum {
    CONNECT_MS = 250, /* for one attempt to connect */
    REFUSALS = 4,     /* attempts that may be refused, or end without a reply */
    REFUSED_NS = 50000000,
};

/* ---- Opening and closing --------------------------------------------------------------------- */

static void free_endpoint(struct td__endpoint *endpoint)
{
    pthread_cond_destroy(&endpoint->arrived);
    pthread_mutex_destroy(&endpoint->answer_lock);
    pthread_mutex_destroy(&endpoint->pulse_lock);
    pthread_mutex_destroy(&endpoint->lock);
    td__cards_free(endpoint);
    free(endpoint);
}

static void join_domain(struct td__endpoint *endpoint)
{
    const struct td__domain *domain = endpoint->domain;
    struct td__card *own = &endpoint->own;
    own->port = domain->port;
    own->tls = domain->secret.tls;
    memcpy(own->identity, domain->identity, sizeof own->identity);
    memcpy(own->local, domain->local, sizeof own->local);
    td__domain_add(endpoint->domain, endpoint);
}

td_status td__endpoint_open(int rank, int size, const char *host, bool shared,
                            struct td__endpoint **endpoint_out)
{
    struct td__secret secret;
    struct td__endpoint *endpoint = calloc(1, sizeof *endpoint);
    int capacity = size ? size : TD__MAX_RANKS;
    if (endpoint)
        endpoint->peers = calloc((size_t)capacity, sizeof *endpoint->peers);
    if (!endpoint || !endpoint->peers) {
        free(endpoint);
        return td__fail_nomem("endpoint");
    }
    endpoint->rank = rank;
    endpoint->grows = !size;
    endpoint->capacity = capacity;
    atomic_init(&endpoint->size, size);
    endpoint->shared = shared;
    td__card_fill_in(&endpoint->own, host);
    pthread_mutex_init(&endpoint->lock, NULL);
    pthread_mutex_init(&endpoint->answer_lock, NULL);
    pthread_mutex_init(&endpoint->pulse_lock, NULL);
    td__cond_init(&endpoint->arrived);
    TAILQ_INIT(&endpoint->arrivals);

    td_status status = td__heartbeat_read();
    if (!status && size == 1)
        status = td__secret_load(NULL, &secret); /* only to check the environment */
    else if (!status)
        status = td__domain_open(host, &endpoint->domain);
    if (status) {
        free_endpoint(endpoint);
        return status;
    }
    if (endpoint->domain)
        join_domain(endpoint);
    *endpoint_out = endpoint;
    return TD_OK;
}

void td__endpoint_close(struct td__endpoint *endpoint)
{
    struct td__domain *domain = endpoint->domain;
    if (domain) {
        td__failure_detector_close(endpoint);
        td__domain_keep_exclusions(domain, endpoint);
        td__domain_remove(domain, endpoint);
        td__endpoint_leave(endpoint);
        td__views_close(endpoint);
    }
    td__arrivals_forget(endpoint, 0, true);
    td__shared_fds_forget(endpoint, 0, true);
    if (domain)
        td__domain_close(domain);
    free_endpoint(endpoint);
}

void td__endpoint_forget(struct td__endpoint *endpoint, uint64_t group)
{
    pthread_mutex_lock(&endpoint->lock);
    td__arrivals_forget(endpoint, group, false);
    td__shared_fds_forget(endpoint, group, false);
    pthread_mutex_unlock(&endpoint->lock);
}

/* ---- Connecting ------------------------------------------------------------------------------ */

/* A rank of this host is reached by its unix socket. */
static const char *address_of(const struct td__endpoint *endpoint, int rank, int *port)
{
    const struct td__card *peer = td__peer(endpoint, rank);
    bool near = peer->host == td__peer(endpoint, endpoint->rank)->host;
    *port = near ? 0 : peer->port;
    return near ? peer->local : peer->address;
}

int td__endpoint_probe(const struct td__endpoint *endpoint, int rank, td__deadline deadline)
{
    struct td__address_list list;
    bool retry;
    int port;
    const char *address = address_of(endpoint, rank, &port);
    if (td__resolve(address, port, deadline, &list, &retry))
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

/* A stopped rank does not reply; only the failure detector decides whether it is lost. */
td_status td__endpoint_await_reply(struct td__endpoint *endpoint, int rank, int fd,
                                   td__deadline deadline, bool *ended)
{
    char reply = 0;
    int error;
    *ended = false;
    while ((error = td__wait_fd(fd, POLLIN,
                                td__deadline_earlier(deadline, td__deadline_in_ms(CONNECT_MS)))) ==
               ETIMEDOUT &&
           !td__deadline_passed(deadline)) {
        td__endpoint_watch(endpoint, rank);
        const char *exit_reason = td__endpoint_exit_reason(endpoint, rank);
        if (exit_reason)
            return td_fail(TD_ERR_PEER, "it %s", exit_reason);
    }
    if (!error)
        error = td__recv_all(fd, &reply, 1, deadline);
    if (error == ETIMEDOUT)
        return td_fail(TD_ERR_TIMEOUT, "it does not reply to a request");
    *ended = error;
    if (error)
        return td_fail(TD_ERR_PEER, "it closed the connection: %s", td__errno_text(error));
    if (reply == TD__REPLY_ACCEPTED)
        return TD_OK;
    if (reply == TD__REPLY_EXCLUDED)
        return td__exclusion_read_refusal(endpoint, fd, deadline);
    td__presence_settle(endpoint, rank, TD__LEFT, 0);
    return td_fail(TD_ERR_PEER, "it has left");
}

/* Connects and sends the request. *retry: the connection has ended without a reply, so the request was not served.
 * If the process ends during the handshake, that is TD_ERR_AUTH, as if it had refused the secret. */
static td_status try_request(struct td__endpoint *endpoint, int rank,
                             const struct td__request *request, td__deadline deadline, bool *retry,
                             int *fd_out)
{
    const struct td__card *peer = td__peer(endpoint, rank);
    uint8_t bytes[TD__REQUEST_SIZE];
    bool ended = false;
    int fd, port;
    const char *address = address_of(endpoint, rank, &port);
    td_status status = td__connect_trusted(
        address, port, "link", peer->identity, &endpoint->domain->secret,
        td__deadline_earlier(deadline, td__deadline_in_ms(CONNECT_MS)), &fd);
    *retry = status == TD_ERR_TIMEOUT || status == TD_ERR_AUTH;
    if (status)
        return status;
    atomic_store(&td__peer(endpoint, rank)->reached, true);
    td__request_write(request, peer->number, bytes);
    int error = td__send_all(fd, bytes, sizeof bytes, deadline);
    if (!error && request->text)
        error = td__send_all(fd, request->text, (size_t)request->value, deadline);
    if (error == ETIMEDOUT)
        status = td_fail(TD_ERR_TIMEOUT, "it does not receive");
    else if (error)
        status = td_fail(TD_ERR_PEER, "it closed the connection: %s", td__errno_text(error));
    else if (request->what != TD__WANT_LOSS_REPORT && request->what != TD__WANT_HAND_OVER &&
             request->what != TD__WANT_WAKE)
        status = td__endpoint_await_reply(endpoint, rank, fd, deadline, &ended);
    *retry = ended || (error && error != ETIMEDOUT);
    if (status)
        td__sock_close(fd);
    else
        *fd_out = fd;
    return status;
}

/* A rank publishes its card when its listener is open. So if nothing listens at its address, nothing ever will:
 * TD_ERR_PEER at once. If a rank is stopped, or its host is cut off, it does not answer either, and only the failure
 * detector decides whether it is lost; until then this retries. */
static td_status send_request(struct td__endpoint *endpoint, int rank,
                              const struct td__request *request, td__deadline deadline, int *fd)
{
    struct td__error error;
    int refusals = 0;
    bool retry;
    if (td__endpoint_presence(endpoint, rank) == TD__ENDED && request->what != TD__WANT_EXCLUSION)
        return td_fail(TD_ERR_PEER, "it %s", td__endpoint_exit_reason(endpoint, rank));
    for (;;) {
        td_status status = try_request(endpoint, rank, request, deadline, &retry, fd);
        if (!status || !retry)
            return status;
        td__error_save(&error);
        td__endpoint_watch(endpoint, rank);
        const char *exit_reason = td__endpoint_exit_reason(endpoint, rank);
        if (exit_reason)
            return td_fail(TD_ERR_PEER, "it %s", exit_reason);
        /* The listening socket of a process that has ended may stay open for a moment. */
        td__deadline end = td__deadline_earlier(deadline, td__now_ns()) + CONNECT_MS * 1000000;
        if (td__is_refused(td__endpoint_probe(endpoint, rank, end)))
            return td_fail(TD_ERR_PEER, "nothing listens at its address any more");
        if ((status != TD_ERR_TIMEOUT && ++refusals == REFUSALS) || td__deadline_passed(deadline))
            return td__error_restore(&error);
        if (status != TD_ERR_TIMEOUT)
            td__sleep_ns(REFUSED_NS);
    }
}

td_status td__endpoint_reach(struct td__endpoint *endpoint, int rank, struct td__request request,
                             td__deadline deadline, int *fd)
{
    request.rank = endpoint->rank;
    td_status status = endpoint->domain
                           ? send_request(endpoint, rank, &request, deadline, fd)
                           : td_fail(TD_ERR_PEER, "a world of one rank has no listener");
    return status ? td_fail(status, "%s cannot be reached%s: %s",
                            td__endpoint_describe(endpoint, rank),
                            status == TD_ERR_TIMEOUT ? ", it may be stopped" : "", td__error_text())
                  : TD_OK;
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

td_status td__endpoint_connect_briefly(struct td__endpoint *endpoint, int rank, uint64_t group,
                                       enum td__link_channel channel, td__deadline deadline,
                                       int *fd)
{
    struct td__request request = {.what = TD__WANT_LINK, .group = group, .channel = channel};
    return td__endpoint_reach(endpoint, rank, request, deadline, fd);
}

td_status td__endpoint_connect(struct td__endpoint *endpoint, int rank, uint64_t group,
                               enum td__link_channel channel, td__deadline deadline, int *fd)
{
    td_status status = td__endpoint_connect_briefly(endpoint, rank, group, channel, deadline, fd);
    return td__endpoint_explain(endpoint, rank, status, deadline);
}

bool td__endpoint_is_unresponsive(struct td__endpoint *endpoint, int rank, bool note)
{
    struct td__card *peer = td__peer(endpoint, rank);
    if (note)
        atomic_store(&peer->unresponsive, true);
    return atomic_load(&peer->unresponsive);
}

/* ---- Waiters ---------------------------------------------------------------------------------
 *
 * An event wakes every waiter: waiters are few, and events are rare. */

void td__endpoint_add_waiter(struct td__endpoint *endpoint, struct td__endpoint_waiter *waiter)
{
    pthread_mutex_lock(&endpoint->lock);
    LIST_INSERT_HEAD(&endpoint->waiters, waiter, link);
    pthread_mutex_unlock(&endpoint->lock);
}

void td__endpoint_remove_waiter(struct td__endpoint *endpoint, struct td__endpoint_waiter *waiter)
{
    if (!waiter->wake)
        return;
    pthread_mutex_lock(&endpoint->lock);
    LIST_REMOVE(waiter, link);
    pthread_mutex_unlock(&endpoint->lock);
}

void td__waiters_wake(struct td__endpoint *endpoint)
{
    struct td__endpoint_waiter *waiter;
    pthread_cond_broadcast(&endpoint->arrived);
    LIST_FOREACH (waiter, &endpoint->waiters, link)
        waiter->wake(waiter->arg);
}

void td__endpoint_wake_waiters(struct td__endpoint *endpoint)
{
    pthread_mutex_lock(&endpoint->lock);
    td__waiters_wake(endpoint);
    pthread_mutex_unlock(&endpoint->lock);
}

void td__endpoint_wake_rank(struct td__endpoint *endpoint, int rank, td__deadline deadline)
{
    struct td__request request = {.what = TD__WANT_WAKE};
    int fd;
    if (!td__endpoint_reach(endpoint, rank, request, deadline, &fd))
        td__sock_close(fd);
}

/* The listener's thread polls the epoll set (domain.c). Any thread can add to it without waking that thread;
 * EPOLLONESHOT makes a descriptor wake the waiters once. */
void td__endpoint_wake_on(struct td__endpoint *endpoint, int fd)
{
    struct epoll_event event = {.events = EPOLLIN | EPOLLONESHOT, .data.u32 = endpoint->own.number};
    int set = endpoint->domain->wake_set;
    if (epoll_ctl(set, EPOLL_CTL_MOD, fd, &event) && errno == ENOENT)
        epoll_ctl(set, EPOLL_CTL_ADD, fd, &event);
}
