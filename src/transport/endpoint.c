/* A rank's place among the others; see endpoint.h.
 *
 * A request is one fixed block: what is wanted, who asks, for which group and channel. What comes before
 * its counterpart here (a link to a group that is not made yet, a paper that is not laid out
 * yet) waits in a list; the lists are short, and searched from the front.
 *
 * Locks: endpoint->lock guards the three lists; map_lock guards the views of other ranks'
 * arenas, and is never held together with it. */
#include "transport/endpoint_inside.h"

#include "base/fail.h"
#include "base/thread.h"
#include "os/socket.h"
#include "os/tls.h"
#include "os/trust.h"
#include "transport/lookout.h"

#include <errno.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    LOCAL_LIMIT_MS = 5000,
    REMOTE_LIMIT_MS = 15000,
    LOOK_MS = 50,
    KNOCK_MS = 250,
    PARTING_MS = 2000
};
enum { REFUSALS = 4, REFUSED_NS = 50000000 };

#define ARENA_PAPER ((uint64_t)0)
#define NOW_OR_NEVER ((uint64_t)1) /* the value of a wish for a paper that does not wait for it */

struct td__arrival { /* a link, or a wish for a paper */
    struct td__arrival *next;
    struct td__request request;
    int fd;
};

struct td__listener {
    struct td__listener *next;
    uint64_t group;
    enum td__channel channel;
    td__link_fn fn;
    void *arg;
};

struct td__paper {
    struct td__paper *next;
    uint64_t group;
    int fd;
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
    if (what < TD__WANT_LINK || what > TD__WANT_NEWS || rank >= (uint32_t)size)
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

/* The descriptor goes, and the connection with it. */
static void hand_out(int connection, int fd)
{
    td__send_fd(connection, fd, "p", 1, td__deadline_in_ms(1000));
    close(connection);
}

static bool hand_out_if_there(struct td__endpoint *endpoint, uint64_t group, int connection)
{
    if (group == ARENA_PAPER) {
        struct td__arena *arena = td__arena_default();
        if (arena)
            hand_out(connection, td__arena_fd(arena));
        else
            close(connection);
        return true;
    }
    for (struct td__paper *paper = endpoint->papers; paper; paper = paper->next)
        if (paper->group == group) {
            hand_out(connection, paper->fd);
            return true;
        }
    return false;
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
    struct td__arrival **end = &endpoint->arrivals;
    struct td__arrival *arrival = malloc(sizeof *arrival);
    if (!arrival) {
        close(fd);
        return;
    }
    *arrival = (struct td__arrival){.request = *request, .fd = fd};
    while (*end)
        end = &(*end)->next;
    *end = arrival;
    pthread_cond_broadcast(&endpoint->arrived);
}

static void on_guest(void *arg, int fd, bool local, const uint8_t bytes[TD__REQUEST_SIZE])
{
    struct td__endpoint *endpoint = arg;
    struct td__request request;
    if (!td__request_read(bytes, endpoint->size, &request) ||
        (request.what == TD__WANT_PAPER && !local)) {
        close(fd);
        return;
    }
    if (request.what != TD__WANT_LINK && request.what != TD__WANT_PAPER) {
        td__endpoint_serve(endpoint, &request, fd);
        return;
    }
    pthread_mutex_lock(&endpoint->lock);
    struct td__listener *listener = *find_listener(endpoint, request.group, request.channel);
    if (request.what == TD__WANT_LINK && listener && listener->fn)
        listener->fn(listener->arg, request.rank, fd);
    else if (request.what == TD__WANT_LINK && listener)
        close(fd);
    else if (request.what == TD__WANT_PAPER && hand_out_if_there(endpoint, request.group, fd))
        ;
    else if (request.what == TD__WANT_PAPER && request.value == NOW_OR_NEVER)
        close(fd);
    else
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
        return td__fail(TD_ERR_SYSTEM, "cannot listen at %s: %s", name, td__errno_text(-*fd));
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
    td_status status = td__secret_load(NULL, &endpoint->secret);
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
    status = td__reception_open(tcp_fd, local_fd, &endpoint->secret, own->identity, on_guest,
                                endpoint, &endpoint->reception);
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
    td__lookout_stop(endpoint);
    td__reception_close(endpoint->reception);
    td__endpoint_part(endpoint);
    for (struct td__arrival *arrival = endpoint->arrivals, *next; arrival; arrival = next) {
        next = arrival->next;
        close(arrival->fd);
        free(arrival);
    }
    for (struct td__listener *listener = endpoint->listeners, *next; listener; listener = next) {
        next = listener->next;
        free(listener);
    }
    for (struct td__paper *paper = endpoint->papers, *next; paper; paper = next) {
        next = paper->next;
        free(paper);
    }
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

/* A rank hands out its card when its door is open, so where nobody is there any more, nobody will be. */
static td_status knock(struct td__endpoint *endpoint, int rank, bool locally, td__deadline deadline,
                       int *fd)
{
    const struct td__card *peer = &endpoint->peers[rank];
    char why[512];
    int refusals = 0;
    if (td__endpoint_presence(endpoint, rank) == TD__ENDED)
        return td__fail(TD_ERR_PEER, "it %s", td__endpoint_farewell(endpoint, rank));
    for (;;) {
        td__deadline end = td__deadline_earlier(deadline, td__deadline_in_ms(KNOCK_MS));
        td_status status = td__connect_trusted(locally ? peer->local : peer->address,
                                               locally ? 0 : peer->port, "link", peer->identity,
                                               &endpoint->secret, end, fd);
        /* One that dies in the middle of the handshake looks as if it had refused the secret, and its
         * door may stand open a moment longer. */
        if (status != TD_ERR_TIMEOUT && status != TD_ERR_AUTH)
            return status;
        snprintf(why, sizeof why, "%s", td_last_error());
        const char *farewell = td__endpoint_farewell(endpoint, rank);
        if (farewell)
            return td__fail(TD_ERR_PEER, "it %s", farewell);
        if (td__is_refused(td__endpoint_probe(endpoint, rank, locally, end + KNOCK_MS * 1000000)))
            return td__fail(TD_ERR_PEER, "nobody is there any more");
        if ((status == TD_ERR_AUTH && ++refusals == REFUSALS) || td__deadline_passed(deadline))
            return td__fail(status, "%s", why);
        if (status == TD_ERR_AUTH)
            td__sleep_ns(REFUSED_NS);
    }
}

td_status td__endpoint_reach(struct td__endpoint *endpoint, int rank, bool locally,
                             const struct td__request *request, td__deadline deadline, int *fd_out)
{
    td__deadline limit = td__deadline_in_ms(locally ? LOCAL_LIMIT_MS : REMOTE_LIMIT_MS);
    bool ours = deadline < limit; /* the caller's time may be the one that runs out */
    uint8_t bytes[TD__REQUEST_SIZE];
    int fd;
    td_status status = knock(endpoint, rank, locally, td__deadline_earlier(limit, deadline), &fd);
    const char *farewell = status == TD_ERR_PEER ? td__lookout_find_out(endpoint, rank) : NULL;
    if (farewell)
        return td__fail(TD_ERR_PEER, "%s %s", td__endpoint_describe(endpoint, rank), farewell);
    if (status)
        return td__fail(status == TD_ERR_TIMEOUT && !ours ? TD_ERR_PEER : status,
                        "%s cannot be reached%s: %s", td__endpoint_describe(endpoint, rank),
                        status == TD_ERR_AUTH ? "" : ", it may have ended", td_last_error());
    tune(fd);
    put_request(request, bytes);
    int error = td__send_all(fd, bytes, sizeof bytes, deadline);
    if (error) {
        close(fd);
        return td__fail(error == ETIMEDOUT ? TD_ERR_TIMEOUT : TD_ERR_PEER,
                        "%s closed the connection: %s", td__endpoint_describe(endpoint, rank),
                        td__errno_text(error));
    }
    *fd_out = fd;
    return TD_OK;
}

bool td__endpoint_is_near(const struct td__endpoint *endpoint, int rank)
{
    return endpoint->peers[rank].host == endpoint->peers[endpoint->rank].host;
}

td_status td__endpoint_connect(struct td__endpoint *endpoint, int rank, uint64_t group,
                               enum td__channel channel, td__deadline deadline, int *fd)
{
    struct td__request request = {
        .what = TD__WANT_LINK, .rank = endpoint->rank, .group = group, .channel = channel};
    return td__endpoint_reach(endpoint, rank, td__endpoint_is_near(endpoint, rank), &request,
                              deadline, fd);
}

static int take_arrival(struct td__endpoint *endpoint, enum td__want what, int rank, uint64_t group,
                        uint32_t channel)
{
    struct td__arrival **link = &endpoint->arrivals;
    for (; *link; link = &(*link)->next) {
        struct td__arrival *arrival = *link;
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
                              enum td__channel channel, td__deadline deadline, int *fd_out)
{
    int fd;
    bool in_time = true;
    pthread_mutex_lock(&endpoint->lock);
    while ((fd = take_arrival(endpoint, TD__WANT_LINK, rank, group, channel)) < 0 && in_time)
        in_time = td__cond_wait(&endpoint->arrived, &endpoint->lock, deadline);
    pthread_mutex_unlock(&endpoint->lock);
    if (fd < 0)
        return td__fail(TD_ERR_TIMEOUT, "%s has not connected in time",
                        td__endpoint_describe(endpoint, rank));
    tune(fd);
    *fd_out = fd;
    return TD_OK;
}

void td__endpoint_listen(struct td__endpoint *endpoint, uint64_t group, enum td__channel channel,
                         td__link_fn fn, void *arg)
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
    for (struct td__arrival **at = &endpoint->arrivals, *arrival; (arrival = *at);) {
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
    for (struct td__arrival **at = &endpoint->arrivals, *arrival; (arrival = *at);) {
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
    for (struct td__paper **at = &endpoint->papers, *paper; (paper = *at);) {
        if (paper->group != group) {
            at = &paper->next;
            continue;
        }
        *at = paper->next;
        free(paper);
    }
    pthread_mutex_unlock(&endpoint->lock);
}

/* ---- Shared memory --------------------------------------------------------------------------- */

td_status td__endpoint_offer(struct td__endpoint *endpoint, uint64_t group, int fd)
{
    struct td__paper *paper = malloc(sizeof *paper);
    if (!paper)
        return td__fail_nomem("endpoint");
    pthread_mutex_lock(&endpoint->lock);
    *paper = (struct td__paper){.next = endpoint->papers, .group = group, .fd = fd};
    endpoint->papers = paper;
    int waiting;
    while ((waiting = take_arrival(endpoint, TD__WANT_PAPER, -1, group, 0)) >= 0)
        hand_out(waiting, fd);
    pthread_mutex_unlock(&endpoint->lock);
    return TD_OK;
}

/* Looks from time to time whether it still makes sense. */
static int wait_for_paper(int connection, td__deadline deadline, const atomic_bool *given_up)
{
    int error = ETIMEDOUT;
    while (error == ETIMEDOUT && !td__deadline_passed(deadline)) {
        if (given_up && atomic_load(given_up))
            return ECANCELED;
        error = td__wait_fd(connection, POLLIN,
                            td__deadline_earlier(deadline, td__deadline_in_ms(LOOK_MS)));
    }
    return error;
}

bool td__endpoint_is_deaf(struct td__endpoint *endpoint, int rank, bool note)
{
    struct td__card *peer = &endpoint->peers[rank];
    if (note)
        atomic_store(&peer->deaf, true);
    return atomic_load(&peer->deaf);
}

static td_status fetch(struct td__endpoint *endpoint, int rank, const struct td__request *request,
                       td__deadline deadline, const atomic_bool *given_up, int *fd_out)
{
    char byte;
    int connection, fd;
    TD_TRY(td__endpoint_reach(endpoint, rank, true, request, deadline, &connection));
    int error = wait_for_paper(connection, deadline, given_up);
    if (!error)
        error = td__recv_fd(connection, &fd, &byte, 1, deadline);
    close(connection);
    if (error == ECANCELED)
        return td__fail(TD_ERR_ABORTED, "waiting for %s was given up",
                        td__endpoint_describe(endpoint, rank));
    if (error)
        return td__fail(error == ETIMEDOUT ? TD_ERR_TIMEOUT : TD_ERR_PEER,
                        "%s did not share its memory: %s", td__endpoint_describe(endpoint, rank),
                        error == ENODATA ? "it has left" : td__errno_text(error));
    *fd_out = fd;
    return TD_OK;
}

td_status td__endpoint_fetch(struct td__endpoint *endpoint, int rank, uint64_t group,
                             td__deadline deadline, const atomic_bool *given_up, int *fd)
{
    struct td__request request = {.what = TD__WANT_PAPER, .rank = endpoint->rank, .group = group};
    return fetch(endpoint, rank, &request, deadline, given_up, fd);
}

td_status td__endpoint_fetch_now(struct td__endpoint *endpoint, int rank, uint64_t group,
                                 td__deadline deadline, int *fd)
{
    struct td__request request = {
        .what = TD__WANT_PAPER, .rank = endpoint->rank, .group = group, .value = NOW_OR_NEVER};
    return fetch(endpoint, rank, &request, deadline, NULL, fd);
}

td_status td__endpoint_map(struct td__endpoint *endpoint, int rank, size_t offset, size_t size,
                           td__deadline deadline, void **address)
{
    struct td__card *peer = &endpoint->peers[rank];
    pthread_mutex_lock(&endpoint->map_lock);
    if (!peer->viewed) {
        int fd;
        pthread_mutex_unlock(&endpoint->map_lock);
        TD_TRY(td__endpoint_fetch(endpoint, rank, ARENA_PAPER, deadline, NULL, &fd));
        pthread_mutex_lock(&endpoint->map_lock);
        if (peer->viewed) {
            close(fd); /* another thread was first */
        } else if (td__arena_view_open(fd, &peer->view)) {
            pthread_mutex_unlock(&endpoint->map_lock);
            close(fd);
            return TD_ERR_PEER;
        }
        peer->viewed = true;
    }
    void *found = td__arena_view_at(&peer->view, offset, size);
    pthread_mutex_unlock(&endpoint->map_lock);
    if (!found)
        return td__fail(TD_ERR_PEER, "%s speaks of memory that it does not have",
                        td__endpoint_describe(endpoint, rank));
    *address = found;
    return TD_OK;
}
