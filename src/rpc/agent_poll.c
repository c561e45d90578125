/* Reading and writing all links of an agent, on the thread that leads (io.c). */
#include "rpc/rpc_agent.h"

#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/socket.h>

enum { EVENTS = 16 };

static void forget(struct td__rpc_agent *agent, struct td__rpc_link *link)
{
    if (!link->local)
        atomic_fetch_sub(&agent->socket_links, 1);
    epoll_ctl(link->local ? agent->epoll : agent->sockets, EPOLL_CTL_DEL, link->fd, NULL);
    pthread_mutex_lock(&agent->lock);
    agent->by_id[link->id] = NULL;
    pthread_mutex_unlock(&agent->lock);
    td__agent_link_ended(link);
}

bool td__io_add_links(struct td__rpc_agent *agent)
{
    struct td__rpc_link *link = atomic_exchange(&agent->new_links, NULL), *next;
    bool added = link;
    for (; link; link = next) {
        next = link->next;
        if (agent->link_count == agent->link_capacity) {
            int capacity = agent->link_capacity ? 2 * agent->link_capacity : 16;
            struct td__rpc_link **links = realloc(agent->links, sizeof *links * (size_t)capacity);
            if (!links) {
                forget(agent, link);
                continue;
            }
            agent->links = links;
            agent->link_capacity = capacity;
        }
        agent->links[agent->link_count++] = link;
    }
    return added;
}

/* The socket of a link has ended, its worker perhaps not: nothing is read until it has another one. False if there will
 * be none. */
static bool suspend(struct td__rpc_agent *agent, struct td__rpc_link *link)
{
    epoll_ctl(link->local ? agent->epoll : agent->sockets, EPOLL_CTL_DEL, link->fd, NULL);
    shutdown(link->fd, SHUT_RDWR);
    pthread_mutex_lock(&link->write_lock);
    link->stopped = true;
    pthread_mutex_unlock(&link->write_lock);
    atomic_store(&link->suspended, true);
    return td__workers_resume(link);
}

static bool poll_sockets(struct td__rpc_agent *agent)
{
    struct epoll_event events[EVENTS];
    int count = epoll_wait(agent->sockets, events, EVENTS, 0);
    for (int i = 0; i < count; i++) {
        pthread_mutex_lock(&agent->lock);
        struct td__rpc_link *link = agent->by_id[events[i].data.u64];
        pthread_mutex_unlock(&agent->lock);
        if (link && events[i].events & EPOLLOUT)
            td__link_flush(link);
        if (link && events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR))
            atomic_store(&link->hup, true); /* there may be something to read */
    }
    return count > 0;
}

bool td__io_poll_links(struct td__rpc_agent *agent)
{
    bool found = false, outer = td__io_must_not_wait;
    td__io_must_not_wait = true;
    if (atomic_load_explicit(&agent->new_links, memory_order_relaxed))
        found = td__io_add_links(agent);
    if (atomic_load_explicit(&agent->socket_links, memory_order_relaxed))
        found |= poll_sockets(agent);
    for (int i = 0; i < agent->link_count; i++) {
        struct td__rpc_link *link = agent->links[i];
        bool suspended = atomic_load_explicit(&link->suspended, memory_order_acquire);
        if (atomic_load_explicit(&link->dead, memory_order_relaxed)) {
            if (!suspended)
                td__link_read(link); /* what has come before its worker was lost */
            agent->links[i--] = agent->links[--agent->link_count];
            forget(agent, link);
            found = true;
            continue;
        }
        if (suspended)
            continue;
        bool hup = atomic_load_explicit(&link->hup, memory_order_relaxed);
        if (hup)
            atomic_store(&link->hup, false);
        if (hup || (link->local && td__byte_ring_has_bytes(&link->rings.in)))
            found |= td__link_read(link);
        if (link->local && (atomic_load_explicit(&link->blocked, memory_order_relaxed) ||
                            atomic_load_explicit(&link->held_back, memory_order_relaxed)))
            found |= td__link_flush(link);
        if (hup && link->local)
            link->broken = true; /* after its last bytes */
        if (link->ended || (link->broken && !suspend(agent, link))) {
            agent->links[i--] = agent->links[--agent->link_count];
            forget(agent, link);
            found = true;
        }
    }
    if (atomic_load_explicit(&agent->presence_changed, memory_order_relaxed) &&
        atomic_exchange(&agent->presence_changed, false))
        td__workers_check(agent);
    td__io_must_not_wait = outer;
    return found;
}

bool td__io_has_news(struct td__rpc_agent *agent)
{
    for (int i = 0; i < agent->link_count; i++) {
        struct td__rpc_link *link = agent->links[i];
        if (atomic_load(&link->dead))
            return true;
        if (atomic_load(&link->suspended))
            continue;
        if (atomic_load(&link->hup))
            return true;
        if (link->local && (td__byte_ring_has_bytes(&link->rings.in) || td__link_has_room(link)))
            return true;
    }
    return atomic_load(&agent->new_links) || atomic_load(&agent->presence_changed);
}
