/* Waking the threads that wait for other ranks; see endpoint.h.
 *
 *     a rank ends, leaves, is cut off     td__presence_settle()
 *     another rank connects               endpoint_accept.c
 *     a group is aborted                  td__endpoint_wake_waiters()
 *     another rank requests it            td__endpoint_wake_rank()
 *     a watched descriptor is ready       td__endpoint_wake_on(), below
 *
 * Each of these calls wake() of every waiter: waiters are few, and the events are rare. A waiter that does not sleep
 * pays nothing; one that sleeps checks whether the event concerns it.
 *
 * The watched descriptors are in an epoll set of the domain, which its listener's thread polls (domain.c). Any thread
 * can add to it without waking that thread; EPOLLONESHOT makes a descriptor wake the waiters once. */
#include "peer/endpoint_internal.h"

#include <errno.h>
#include <sys/epoll.h>
#include <unistd.h>

void td__endpoint_add_waiter(struct td__endpoint *endpoint, struct td__endpoint_waiter *waiter)
{
    pthread_mutex_lock(&endpoint->lock);
    waiter->next = endpoint->waiters;
    endpoint->waiters = waiter;
    pthread_mutex_unlock(&endpoint->lock);
}

void td__endpoint_remove_waiter(struct td__endpoint *endpoint, struct td__endpoint_waiter *waiter)
{
    pthread_mutex_lock(&endpoint->lock);
    struct td__endpoint_waiter **at = &endpoint->waiters;
    while (*at && *at != waiter)
        at = &(*at)->next;
    if (*at)
        *at = waiter->next;
    pthread_mutex_unlock(&endpoint->lock);
}

void td__waiters_wake(struct td__endpoint *endpoint)
{
    pthread_cond_broadcast(&endpoint->arrived);
    for (const struct td__endpoint_waiter *waiter = endpoint->waiters; waiter;
         waiter = waiter->next)
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
    struct td__request request = {.what = TD__WANT_WAKE, .rank = endpoint->rank};
    int fd;
    if (!td__endpoint_reach(endpoint, rank, td__endpoint_is_near(endpoint, rank), &request,
                            deadline, &fd))
        close(fd);
}

/* ---- Descriptors ----------------------------------------------------------------------------- */

void td__endpoint_wake_on(struct td__endpoint *endpoint, int fd)
{
    struct epoll_event event = {.events = EPOLLIN | EPOLLONESHOT, .data.u32 = endpoint->own.number};
    int set = endpoint->domain->wake_set;
    if (epoll_ctl(set, EPOLL_CTL_MOD, fd, &event) && errno == ENOENT)
        epoll_ctl(set, EPOLL_CTL_ADD, fd, &event);
}
