/* Messages to ranks on other hosts: a link for each direction, opened by the sender on first use.
 *
 *     sender                            receiver
 *     EAGER (up to 64 KiB), or
 *     REQUEST          ──────────>      keeps it until there is a recv
 *                      <──────────      GO (or DROP: the buffer is too small)
 *     DATA             ──────────>      straight into the buffer
 *
 * Answers come back on the link of the request. Links are non-blocking and in one epoll; the thread that
 * makes progress reads and writes them, under the lock, at most a MiB of one link at a time. Opening
 * one can take long, and happens without the lock.
 *
 * A rank that leaves sends BYE on each link, so that the end of the link is not taken for the end of the
 * process. A rank whose link ends is gone; what it sent on the other link before is read first. */
#include "p2p/p2p_link.h"

#include "base/fail.h"
#include "os/tls.h"

#include <errno.h>
#include <linux/sockios.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

enum { BUDGET = 1024 * 1024, EVENTS = 16, EXPLAIN_MS = 800 };

/* ---- Links ----------------------------------------------------------------------------------- */

td_status td__p2p_tcp_begin(struct td__p2p *p2p)
{
    if (p2p->epoll >= 0)
        return TD_OK;
    int epoll = epoll_create1(EPOLL_CLOEXEC);
    int event = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    struct epoll_event interest = {.events = EPOLLIN, .data.ptr = NULL};
    if (epoll < 0 || event < 0 || epoll_ctl(epoll, EPOLL_CTL_ADD, event, &interest)) {
        td_status status = td_fail(TD_ERR_SYSTEM, "group \"%s\": cannot wait for links: %s",
                                   p2p->name, td__errno_text(errno));
        if (epoll >= 0)
            close(epoll);
        if (event >= 0)
            close(event);
        return status;
    }
    p2p->epoll = epoll;
    p2p->event = event;
    return TD_OK;
}

static struct td__p2p_link *add_link(struct td__p2p *p2p, int rank, int fd, bool incoming)
{
    struct td__p2p_link *link = calloc(1, sizeof *link);
    struct epoll_event interest = {.events = EPOLLIN, .data.ptr = link};
    if (!link || td__p2p_tcp_begin(p2p) || epoll_ctl(p2p->epoll, EPOLL_CTL_ADD, fd, &interest)) {
        free(link);
        return NULL;
    }
    link->fd = fd;
    link->peer = rank;
    link->incoming = incoming;
    TAILQ_INIT(&link->own);
    link->queue = incoming ? &link->own : &p2p->peers[rank].queue;
    p2p->peers[rank].links[incoming] = link;
    p2p->links++;
    return link;
}

/* A link of an aborted group stays open, and is not read: to the other side, which may not know of the abort
 * yet, its end would mean that this process has ended. */
void td__p2p_tcp_close(struct td__p2p *p2p, struct td__p2p_link *link)
{
    if (link->closed)
        return;
    link->closed = true;
    bool keep_open = p2p->aborted && !p2p->stopping;
    if (keep_open) {
        epoll_ctl(p2p->epoll, EPOLL_CTL_DEL, link->fd, NULL);
    } else {
        td__sock_close(link->fd);
        link->fd = -1;
    }
    p2p->links--;
    p2p->peers[link->peer].links[link->incoming] = NULL;
    if (link->post)
        link->post->link = NULL;
    while (!TAILQ_EMPTY(&link->own))
        td__post_finish(p2p, TAILQ_FIRST(&link->own), TD_OK);
    free(link->arrival);
    link->post = NULL;
    link->arrival = NULL;
    struct td__p2p_link **list = keep_open ? &p2p->kept_open : &p2p->closed;
    link->next = *list;
    *list = link;
}

static void free_links(struct td__p2p_link **list)
{
    while (*list) {
        struct td__p2p_link *link = *list;
        *list = link->next;
        if (link->fd >= 0)
            td__sock_close(link->fd);
        free(link);
    }
}

void td__p2p_tcp_accept(void *arg, int world_rank, int fd)
{
    struct td__p2p *p2p = arg;
    pthread_mutex_lock(&p2p->lock);
    int rank = 0;
    while (rank < p2p->options.size && p2p->world_ranks[rank] != world_rank)
        rank++;
    struct td__peer *peer = rank < p2p->options.size ? &p2p->peers[rank] : NULL;
    if (!peer || peer->gone || peer->links[1] || !add_link(p2p, rank, fd, true))
        td__sock_close(fd);
    td__p2p_wake(p2p);
    pthread_mutex_unlock(&p2p->lock);
}

bool td__p2p_tcp_connect(struct td__p2p *p2p)
{
    int rank = 0;
    while (rank < p2p->options.size && p2p->peers[rank].connecting != 1)
        rank++;
    if (rank == p2p->options.size)
        return false;
    struct td__peer *peer = &p2p->peers[rank];
    peer->connecting = 2;
    p2p->connects_wanted--;
    const struct td__post *first = TAILQ_FIRST(&peer->queue);
    td__deadline deadline = first ? first->deadline : 0;
    int fd;
    pthread_mutex_unlock(&p2p->lock);
    td_status status = td__endpoint_connect(p2p->options.endpoint, p2p->world_ranks[rank],
                                            p2p->options.key, TD__CHANNEL_MESSAGES, deadline, &fd);
    pthread_mutex_lock(&p2p->lock);
    peer->connecting = 0;
    if (!status && (peer->gone || !add_link(p2p, rank, fd, false))) {
        td__sock_close(fd);
        if (!peer->gone)
            td__peer_gone(p2p, rank, "cannot be connected: no memory or no descriptors");
    } else if (status && status != TD_ERR_TIMEOUT) {
        char exit_reason[600];
        snprintf(exit_reason, sizeof exit_reason, "cannot be reached (%.500s)", td__error_text());
        td__peer_gone(p2p, rank, exit_reason);
    }
    td__peer_flush(p2p, rank); /* tries again if it took too long for one post, but not for all */
    return true;
}

/* ---- Writing --------------------------------------------------------------------------------- */

static void want_room(struct td__p2p *p2p, struct td__p2p_link *link, bool want)
{
    if (link->wants_room == want)
        return;
    struct epoll_event interest = {.events = EPOLLIN | (want ? EPOLLOUT : 0), .data.ptr = link};
    if (!epoll_ctl(p2p->epoll, EPOLL_CTL_MOD, link->fd, &interest))
        link->wants_room = want;
}

static ssize_t send_part(struct td__p2p_link *link, const char *payload, size_t size)
{
    struct iovec parts[2];
    size_t count = 0, payload_from = 0;
    if (link->written < TD__WIRE_HEADER)
        parts[count++] = (struct iovec){link->header + link->written,
                                        TD__WIRE_HEADER - link->written};
    else
        payload_from = link->written - TD__WIRE_HEADER;
    if (size > payload_from)
        parts[count++] = (struct iovec){(char *)payload + payload_from, size - payload_from};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = count};
    ssize_t sent;
    do {
        sent = td__sock_sendmsg(link->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    } while (sent < 0 && errno == EINTR);
    return sent;
}

/* Writes a post, which is the first in the link's queue. False when it has to wait, or cannot. */
static bool write_first(struct td__p2p *p2p, struct td__p2p_link *link, struct td__post *post)
{
    bool request = post->kind == TD__FRAME_EAGER && post->size > TD__WIRE_EAGER;
    bool payload = (post->kind == TD__FRAME_EAGER && !request) || post->kind == TD__FRAME_DATA;
    size_t size = payload ? td__post_ready(post) : 0;
    if (!link->written) {
        if (request)
            post->id = ++p2p->ids;
        td__wire_header(link->header, request ? TD__FRAME_REQUEST : post->kind, post->tag,
                        post->size, post->id);
    }
    for (size_t total = 0; link->written < TD__WIRE_HEADER + size;) {
        ssize_t sent = total < BUDGET ? send_part(link, post->data, size) : -1;
        if (total >= BUDGET || (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))) {
            want_room(p2p, link, true);
            return false;
        }
        if (sent < 0)
            return false; /* epoll reports the end, and reading finds the reason */
        total += (size_t)sent;
        link->written += (size_t)sent;
    }
    if (payload && size < post->size)
        return false; /* td__p2p_supply() goes on */
    link->written = 0;
    if (request)
        td__post_move(post, &p2p->announced);
    else
        td__post_finish(p2p, post, TD_OK);
    return true;
}

bool td__p2p_tcp_write(struct td__p2p *p2p, int rank, struct td__post *post)
{
    struct td__peer *peer = &p2p->peers[rank];
    if (peer->links[0])
        return !peer->links[0]->wants_room && write_first(p2p, peer->links[0], post);
    if (!peer->connecting) {
        peer->connecting = 1;
        p2p->connects_wanted++;
    }
    return false;
}

void td__p2p_tcp_flush(struct td__p2p *p2p, struct td__p2p_link *link)
{
    while (!link->closed && !TAILQ_EMPTY(link->queue) && !link->wants_room)
        if (!write_first(p2p, link, TAILQ_FIRST(link->queue)))
            break;
}

/* ---- Events --------------------------------------------------------------------------------- */

/* The end of a link. Without a BYE the other process has ended, or has aborted the group: the failure detector, or
 * the abort, reports which a moment later. */
void td__p2p_tcp_lose(struct td__p2p *p2p, struct td__p2p_link *link, const char *exit_reason)
{
    struct td__peer *peer = &p2p->peers[link->peer];
    struct td__p2p_link *other = peer->links[1];
    int rank = link->peer;
    const char *ignored;
    bool bye = link->bye;
    if (other && other != link)
        while (td__wire_read(p2p, other, &ignored) == TD__WIRE_MORE)
            ;
    if (!bye && !peer->unexplained && peer->links[link->incoming] == link &&
        td__p2p_presence(p2p, rank) == TD__PRESENT) {
        peer->unexplained = exit_reason;
        peer->explain_by = td__deadline_in_ms(EXPLAIN_MS);
        p2p->unexplained = p2p->alerted = true;
        td__endpoint_watch(p2p->options.endpoint, p2p->world_ranks[rank]);
        td__p2p_tcp_close(p2p, link);
        return;
    }
    td__peer_lost(p2p, rank, bye, exit_reason);
}

static void look_at_link(struct td__p2p *p2p, struct td__p2p_link *link, uint32_t events)
{
    const char *exit_reason;
    if (events & (EPOLLIN | EPOLLHUP | EPOLLERR) &&
        td__wire_read(p2p, link, &exit_reason) == TD__WIRE_ENDED) {
        td__p2p_tcp_lose(p2p, link, exit_reason);
        return;
    }
    if (events & EPOLLOUT && !link->closed) {
        want_room(p2p, link, false);
        td__p2p_tcp_flush(p2p, link);
    }
}

bool td__p2p_tcp_look(struct td__p2p *p2p)
{
    struct epoll_event events[EVENTS];
    int count = epoll_wait(p2p->epoll, events, EVENTS, 0);
    for (int i = 0; i < count; i++) {
        struct td__p2p_link *link = events[i].data.ptr;
        uint64_t ignored;
        if (!link)
            (void)!read(p2p->event, &ignored, sizeof ignored);
        else if (!link->closed)
            look_at_link(p2p, link, events[i].events);
    }
    free_links(&p2p->closed);
    return count > 0;
}

void td__p2p_tcp_sleep(struct td__p2p *p2p, int64_t ns)
{
    struct epoll_event event;
    struct timespec timeout = td__timespec(ns);
    epoll_pwait2(p2p->epoll, &event, 1, &timeout, NULL);
}

void td__p2p_tcp_wake(struct td__p2p *p2p)
{
    uint64_t one = 1;
    (void)!write(p2p->event, &one, sizeof one);
}

/* ---- Leaving --------------------------------------------------------------------------------- */

static void say_bye(struct td__p2p_link *link)
{
    uint8_t header[TD__WIRE_HEADER];
    td__wire_header(header, TD__FRAME_BYE, 0, 0, 0);
    if (!link->written)
        (void)!td__sock_send(link->fd, header, sizeof header, MSG_NOSIGNAL | MSG_DONTWAIT);
}

/* Closing a socket with unread bytes resets it; what the other side has received by then it can still read.
 * Where the other side has closed it already, nothing is waited for. */
static void wait_until_received(struct td__p2p_link *link, td__deadline deadline)
{
    struct pollfd ended = {.fd = link->fd, .events = POLLRDHUP};
    int unsent;
    while (!ioctl(link->fd, SIOCOUTQ, &unsent) && unsent > 0 && poll(&ended, 1, 0) == 0 &&
           !td__deadline_passed(deadline))
        td__sleep_ns(100000);
}

void td__p2p_tcp_leave(struct td__p2p *p2p, td__deadline deadline)
{
    int sides = 2 * p2p->options.size;
    for (int i = 0; i < sides && p2p->links; i++)
        if (p2p->peers[i / 2].links[i % 2])
            say_bye(p2p->peers[i / 2].links[i % 2]);
    for (int i = 0; i < sides && p2p->links; i++) {
        struct td__p2p_link *link = p2p->peers[i / 2].links[i % 2];
        if (!link)
            continue;
        if (!td__p2p_exit_reason(p2p, i / 2))
            wait_until_received(link, deadline);
        td__p2p_tcp_close(p2p, link);
    }
    free_links(&p2p->closed);
    free_links(&p2p->kept_open);
    if (p2p->epoll >= 0) {
        close(p2p->epoll);
        close(p2p->event);
    }
}
