/* The accepting side of an endpoint: the requests of other ranks; see endpoint.h.
 *
 * A request is one block of TD__REQUEST_SIZE bytes: its kind, the rank that sends it, the group, the channel, and the
 * number of the endpoint, by which its domain (domain.h) finds it. A request that cannot be served yet (a link of a
 * group that this rank has not created, a shared descriptor that is not offered) is kept as an arrival until it can.
 * The lists of arrivals and of link handlers are short, and searched from the front; endpoint->lock protects them. */
#include "peer/endpoint_internal.h"

#include "base/fail.h"
#include "base/thread.h"
#include "os/tls.h"

#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

struct td__endpoint_arrival { /* a connection whose request is not served yet */
    TAILQ_ENTRY(td__endpoint_arrival) link;
    struct td__request request;
    int fd;
};

struct td__link_handler { /* gets the links of one channel of a group */
    LIST_ENTRY(td__link_handler) link;
    uint64_t group;
    enum td__link_channel channel;
    td__link_fn fn; /* NULL: the links are closed */
    void *arg;
};

/* ---- Requests -------------------------------------------------------------------------------- */

void td__request_write(const struct td__request *request, uint32_t number,
                       uint8_t bytes[TD__REQUEST_SIZE])
{
    td__store_u32(bytes, request->what);
    td__store_u32(bytes + 4, (uint32_t)request->rank);
    td__store_u32(bytes + 8, (uint32_t)request->group);
    td__store_u32(bytes + 12, (uint32_t)(request->group >> 32));
    td__store_u32(bytes + 16, request->channel);
    td__store_u32(bytes + 20, (uint32_t)request->value);
    td__store_u32(bytes + 24, (uint32_t)(request->value >> 32));
    td__store_u32(bytes + 28, number);
}

uint32_t td__request_number(const uint8_t bytes[TD__REQUEST_SIZE])
{
    return td__load_u32(bytes + 28);
}

bool td__request_read(const uint8_t bytes[TD__REQUEST_SIZE], int size, struct td__request *request)
{
    uint32_t what = td__load_u32(bytes), rank = td__load_u32(bytes + 4);
    if (what < TD__WANT_LINK || what > TD__WANT_EXCLUSION || rank >= (uint32_t)size)
        return false;
    *request = (struct td__request){
        .what = (enum td__want)what,
        .rank = (int)rank,
        .group = td__load_u32(bytes + 8) | (uint64_t)td__load_u32(bytes + 12) << 32,
        .channel = td__load_u32(bytes + 16),
        .value = td__load_u32(bytes + 20) | (uint64_t)td__load_u32(bytes + 24) << 32,
    };
    if (what == TD__WANT_EXCLUSION)
        return request->group < (uint64_t)size && request->channel < (uint32_t)size &&
               request->value < TD__EXCLUSION_TEXT;
    return what != TD__WANT_LOSS_REPORT ||
           (request->group < (uint64_t)size && request->channel > TD__PRESENT &&
            request->channel <= TD__CUT_OFF);
}

static struct td__link_handler *find_handler(struct td__endpoint *endpoint, uint64_t group,
                                             uint32_t channel)
{
    struct td__link_handler *handler;
    LIST_FOREACH (handler, &endpoint->link_handlers, link)
        if (handler->group == group && handler->channel == channel)
            break;
    return handler;
}

static void add_arrival(struct td__endpoint *endpoint, const struct td__request *request, int fd)
{
    struct td__endpoint_arrival *arrival = malloc(sizeof *arrival);
    if (!arrival) {
        td__sock_close(fd);
        return;
    }
    *arrival = (struct td__endpoint_arrival){.request = *request, .fd = fd};
    TAILQ_INSERT_TAIL(&endpoint->arrivals, arrival, link);
    td__waiters_wake(endpoint);
}

bool td__reply(int fd, char reply)
{
    return td__sock_send(fd, &reply, 1, MSG_DONTWAIT | MSG_NOSIGNAL) == 1;
}

static void deliver(td__link_fn fn, void *arg, int rank, int fd)
{
    if (fn)
        fn(arg, rank, fd);
    else
        td__sock_close(fd);
}

static void take_link(struct td__endpoint *endpoint, const struct td__request *request, int fd)
{
    struct td__link_handler *handler = find_handler(endpoint, request->group, request->channel);
    if (handler)
        deliver(handler->fn, handler->arg, request->rank, fd);
    else
        add_arrival(endpoint, request, fd);
}

void td__endpoint_take_request(struct td__endpoint *endpoint, int fd, bool local,
                               const uint8_t bytes[TD__REQUEST_SIZE])
{
    struct td__request request;
    bool valid = td__request_read(bytes, endpoint->capacity, &request);
    bool carries_fd = valid &&
                      (request.what == TD__WANT_SHARED_FD || request.what == TD__WANT_HAND_OVER);
    if (!valid || (carries_fd && !local)) {
        td__sock_close(fd);
        return;
    }
    const struct td__exclusion *exclusion = td__exclusion_of(endpoint, request.rank);
    if (exclusion) {
        td__exclusion_refuse(exclusion, fd);
        return;
    }
    switch (request.what) {
    case TD__WANT_LINK:
    case TD__WANT_SHARED_FD:
        if (!td__reply(fd, TD__REPLY_ACCEPTED)) {
            td__sock_close(fd);
            return;
        }
        pthread_mutex_lock(&endpoint->lock);
        if (request.what == TD__WANT_LINK)
            take_link(endpoint, &request, fd);
        else if (!td__shared_fd_hand_out(endpoint, &request, fd))
            add_arrival(endpoint, &request, fd);
        pthread_mutex_unlock(&endpoint->lock);
        return;
    case TD__WANT_HAND_OVER:
        td__shared_fd_take_over(endpoint, &request, fd);
        return;
    case TD__WANT_ANSWER:
        td__endpoint_answer_query(endpoint, &request, fd);
        return;
    case TD__WANT_LIFELINE:
        td__endpoint_keep_watcher(endpoint, request.rank, fd);
        return;
    case TD__WANT_EXCLUSION:
        td__exclusion_receive(endpoint, &request, fd);
        return;
    case TD__WANT_WAKE:
        td__endpoint_wake_waiters(endpoint);
        break;
    case TD__WANT_LOSS_REPORT:
        td__endpoint_learn(endpoint, request.group, request.channel, (int)(uint32_t)request.value);
        break;
    }
    td__sock_close(fd);
}

/* ---- Links ----------------------------------------------------------------------------------- */

static int remove_arrival(struct td__endpoint *endpoint, struct td__endpoint_arrival *arrival)
{
    int fd = arrival->fd;
    TAILQ_REMOVE(&endpoint->arrivals, arrival, link);
    free(arrival);
    return fd;
}

int td__take_arrival(struct td__endpoint *endpoint, enum td__want what, int rank, uint64_t group,
                     uint32_t channel, int *from)
{
    struct td__endpoint_arrival *arrival;
    TAILQ_FOREACH (arrival, &endpoint->arrivals, link) {
        const struct td__request *request = &arrival->request;
        if (request->what == what && request->group == group && request->channel == channel &&
            (rank < 0 || request->rank == rank)) {
            *from = request->rank;
            return remove_arrival(endpoint, arrival);
        }
    }
    return -1;
}

td_status td__endpoint_accept(struct td__endpoint *endpoint, int rank, uint64_t group,
                              enum td__link_channel channel, td__deadline deadline, int *fd_out)
{
    int fd, from;
    bool in_time = true;
    pthread_mutex_lock(&endpoint->lock);
    while ((fd = td__take_arrival(endpoint, TD__WANT_LINK, rank, group, channel, &from)) < 0 &&
           in_time)
        in_time = td__cond_wait(&endpoint->arrived, &endpoint->lock, deadline);
    pthread_mutex_unlock(&endpoint->lock);
    if (fd < 0)
        return td_fail(TD_ERR_TIMEOUT, "%s has not connected in time",
                       td__endpoint_describe(endpoint, rank));
    *fd_out = fd;
    return TD_OK;
}

void td__endpoint_listen(struct td__endpoint *endpoint, uint64_t group,
                         enum td__link_channel channel, td__link_fn fn, void *arg)
{
    int fd, from;
    pthread_mutex_lock(&endpoint->lock);
    struct td__link_handler *handler = find_handler(endpoint, group, channel);
    if (!handler && (handler = calloc(1, sizeof *handler)))
        LIST_INSERT_HEAD(&endpoint->link_handlers, handler, link);
    if (handler) {
        handler->group = group;
        handler->channel = channel;
        handler->fn = fn;
        handler->arg = arg;
    }
    while ((fd = td__take_arrival(endpoint, TD__WANT_LINK, -1, group, channel, &from)) >= 0)
        deliver(fn, arg, from, fd);
    pthread_mutex_unlock(&endpoint->lock);
}

void td__arrivals_forget(struct td__endpoint *endpoint, uint64_t group, bool all)
{
    struct td__endpoint_arrival *arrival, *next_arrival;
    for (arrival = TAILQ_FIRST(&endpoint->arrivals); arrival; arrival = next_arrival) {
        next_arrival = TAILQ_NEXT(arrival, link);
        if (all || arrival->request.group == group)
            td__sock_close(remove_arrival(endpoint, arrival));
    }
    struct td__link_handler *handler, *next;
    for (handler = LIST_FIRST(&endpoint->link_handlers); handler; handler = next) {
        next = LIST_NEXT(handler, link);
        if (all || handler->group == group) {
            LIST_REMOVE(handler, link);
            free(handler);
        }
    }
}
