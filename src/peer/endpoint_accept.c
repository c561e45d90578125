/* The accepting side of an endpoint: the requests of other ranks; see endpoint.h.
 *
 * A request is one block of TD__REQUEST_SIZE bytes: its kind, the rank that sends it, the group, the channel, and the
 * number of the endpoint, by which its domain (domain.h) finds it. A request that cannot be served yet (a link of a
 * group that this rank has not created, a shared descriptor that is not offered) is kept as an arrival until it can.
 * The lists of arrivals and of link handlers are short, and searched from the front; endpoint->lock protects them. */
#include "peer/endpoint_internal.h"

#include "base/fail.h"
#include "base/thread.h"

#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

struct td__endpoint_arrival { /* a connection whose request is not served yet */
    struct td__endpoint_arrival *next;
    struct td__request request;
    int fd;
};

struct td__link_handler { /* gets the links of one channel of a group */
    struct td__link_handler *next;
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
    if (what < TD__WANT_LINK || what > TD__WANT_WAKE || rank >= (uint32_t)size)
        return false;
    *request = (struct td__request){
        .what = (enum td__want)what,
        .rank = (int)rank,
        .group = td__load_u32(bytes + 8) | (uint64_t)td__load_u32(bytes + 12) << 32,
        .channel = td__load_u32(bytes + 16),
        .value = td__load_u32(bytes + 20) | (uint64_t)td__load_u32(bytes + 24) << 32,
    };
    return what != TD__WANT_LOSS_REPORT ||
           (request->group < (uint64_t)size && request->channel > TD__PRESENT &&
            request->channel <= TD__CUT_OFF);
}

static struct td__link_handler **find_handler(struct td__endpoint *endpoint, uint64_t group,
                                              uint32_t channel)
{
    struct td__link_handler **at = &endpoint->link_handlers;
    while (*at && ((*at)->group != group || (*at)->channel != channel))
        at = &(*at)->next;
    return at;
}

static void add_arrival(struct td__endpoint *endpoint, const struct td__request *request, int fd)
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
    td__waiters_wake(endpoint);
}

bool td__reply(int fd, char reply)
{
    return send(fd, &reply, 1, MSG_DONTWAIT | MSG_NOSIGNAL) == 1;
}

static void take_link(struct td__endpoint *endpoint, const struct td__request *request, int fd)
{
    struct td__link_handler *handler = *find_handler(endpoint, request->group, request->channel);
    if (!handler)
        add_arrival(endpoint, request, fd);
    else if (handler->fn)
        handler->fn(handler->arg, request->rank, fd);
    else
        close(fd);
}

void td__endpoint_take_request(struct td__endpoint *endpoint, int fd, bool local,
                               const uint8_t bytes[TD__REQUEST_SIZE])
{
    struct td__request request;
    bool valid = td__request_read(bytes, endpoint->size, &request);
    bool carries_fd = valid &&
                      (request.what == TD__WANT_SHARED_FD || request.what == TD__WANT_HAND_OVER);
    if (!valid || (carries_fd && !local)) {
        close(fd);
        return;
    }
    switch (request.what) {
    case TD__WANT_LINK:
    case TD__WANT_SHARED_FD:
        if (!td__reply(fd, TD__REPLY_ACCEPTED)) {
            close(fd);
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
    default:
        td__endpoint_serve(endpoint, &request, fd);
    }
}

/* ---- Links ----------------------------------------------------------------------------------- */

int td__endpoint_take_arrival(struct td__endpoint *endpoint, enum td__want what, int rank,
                              uint64_t group, uint32_t channel)
{
    struct td__endpoint_arrival **at = &endpoint->arrivals;
    for (; *at; at = &(*at)->next) {
        struct td__endpoint_arrival *arrival = *at;
        const struct td__request *request = &arrival->request;
        if (request->what == what && request->group == group && request->channel == channel &&
            (rank < 0 || request->rank == rank)) {
            int fd = arrival->fd;
            *at = arrival->next;
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
    *fd_out = fd;
    return TD_OK;
}

void td__endpoint_listen(struct td__endpoint *endpoint, uint64_t group,
                         enum td__link_channel channel, td__link_fn fn, void *arg)
{
    struct td__link_handler *added = calloc(1, sizeof *added);
    pthread_mutex_lock(&endpoint->lock);
    struct td__link_handler **handler = find_handler(endpoint, group, channel);
    if (*handler) {
        (*handler)->fn = fn;
        (*handler)->arg = arg;
    } else if (added) {
        *added = (struct td__link_handler){
            .group = group, .channel = channel, .fn = fn, .arg = arg};
        *handler = added;
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

void td__arrivals_forget(struct td__endpoint *endpoint, uint64_t group, bool all)
{
    for (struct td__endpoint_arrival **at = &endpoint->arrivals, *arrival; (arrival = *at);) {
        if (arrival->request.group != group && !all) {
            at = &arrival->next;
            continue;
        }
        *at = arrival->next;
        close(arrival->fd);
        free(arrival);
    }
    for (struct td__link_handler **at = &endpoint->link_handlers, *handler; (handler = *at);) {
        if (handler->group != group && !all) {
            at = &handler->next;
            continue;
        }
        *at = handler->next;
        free(handler);
    }
}
