/* Messages to ranks on other hosts: a link for each direction, opened by the sender on first use.
 *
 *     sender                            receiver
 *     EAGER (up to 64 KiB), or
 *     REQUEST          ──────────>      keeps it until there is a recv
 *                      <──────────      GO (or DROP: the buffer is too small)
 *     DATA             ──────────>      straight into the buffer
 *
 * Answers come back on the link of the request. Links are non-blocking and in one epoll; whoever
 * makes progress reads and writes them, under the lock, at most a MiB of one link at a time. Opening
 * one can take long: that happens without the lock.
 *
 * Whoever leaves says BYE on each link, so that its end is not taken for a death. A link that ends is
 * the end of its rank here; what had come on the other link before is read first. */
#include "group/messages_link.h"

#include "base/fail.h"

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

enum { BUDGET = 1024 * 1024, EVENTS = 16, DOUBT_MS = 800 };

/* ---- Links ----------------------------------------------------------------------------------- */

td_status td__tcp_begin(struct td__messages *messages)
{
    if (messages->epoll >= 0)
        return TD_OK;
    int epoll = epoll_create1(EPOLL_CLOEXEC);
    int event = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    struct epoll_event interest = {.events = EPOLLIN, .data.ptr = NULL};
    if (epoll < 0 || event < 0 || epoll_ctl(epoll, EPOLL_CTL_ADD, event, &interest)) {
        td_status status = td__fail(TD_ERR_SYSTEM, "group \"%s\": cannot wait for links: %s",
                                    messages->name, td__errno_text(errno));
        if (epoll >= 0)
            close(epoll);
        if (event >= 0)
            close(event);
        return status;
    }
    messages->epoll = epoll;
    messages->event = event;
    return TD_OK;
}

static struct td__link *add_link(struct td__messages *messages, int rank, int fd, bool incoming)
{
    struct td__link *link = calloc(1, sizeof *link);
    struct epoll_event interest = {.events = EPOLLIN, .data.ptr = link};
    if (!link || td__tcp_begin(messages) ||
        epoll_ctl(messages->epoll, EPOLL_CTL_ADD, fd, &interest)) {
        free(link);
        return NULL;
    }
    link->fd = fd;
    link->peer = rank;
    link->incoming = incoming;
    link->queue = incoming ? &link->own : &messages->peers[rank].queue;
    messages->peers[rank].links[incoming] = link;
    messages->links++;
    return link;
}

/* An aborted group's link stays open, but nobody looks at it: its end would look like a death to the
 * other side, which may not know of the abort yet. */
void td__tcp_close(struct td__messages *messages, struct td__link *link)
{
    if (link->closed)
        return;
    link->closed = true;
    if (messages->aborted && !messages->stopping)
        epoll_ctl(messages->epoll, EPOLL_CTL_DEL, link->fd, NULL);
    else
        close(link->fd);
    messages->links--;
    messages->peers[link->peer].links[link->incoming] = NULL;
    if (link->post)
        link->post->link = NULL;
    while (link->own.first)
        td__post_finish(messages, link->own.first, TD_OK);
    free(link->arrival);
    link->post = NULL;
    link->arrival = NULL;
    struct td__link **list = messages->aborted && !messages->stopping ? &messages->muted
                                                                      : &messages->closed;
    link->next = *list;
    *list = link;
}

static void free_closed(struct td__messages *messages)
{
    while (messages->closed) {
        struct td__link *link = messages->closed;
        messages->closed = link->next;
        free(link);
    }
}

void td__tcp_accept(void *arg, int world_rank, int fd)
{
    struct td__messages *messages = arg;
    pthread_mutex_lock(&messages->lock);
    int rank = 0;
    while (rank < messages->options.size && messages->world_ranks[rank] != world_rank)
        rank++;
    struct td__peer *peer = rank < messages->options.size ? &messages->peers[rank] : NULL;
    if (!peer || peer->gone || peer->links[1] || !add_link(messages, rank, fd, true))
        close(fd);
    td__messages_nudge(messages);
    pthread_mutex_unlock(&messages->lock);
}

bool td__tcp_connect(struct td__messages *messages)
{
    int rank = 0;
    while (rank < messages->options.size && messages->peers[rank].connecting != 1)
        rank++;
    if (rank == messages->options.size)
        return false;
    struct td__peer *peer = &messages->peers[rank];
    peer->connecting = 2;
    messages->connects_wanted--;
    td__deadline deadline = peer->queue.first ? peer->queue.first->deadline : 0;
    int fd;
    pthread_mutex_unlock(&messages->lock);
    td_status status = td__endpoint_connect(messages->options.endpoint, messages->world_ranks[rank],
                                            messages->options.key, TD__CHANNEL_MESSAGES, deadline,
                                            &fd);
    pthread_mutex_lock(&messages->lock);
    peer->connecting = 0;
    if (!status && (peer->gone || !add_link(messages, rank, fd, false))) {
        close(fd);
        if (!peer->gone)
            td__peer_gone(messages, rank, "cannot be waited for: no memory or no descriptors");
    } else if (status && status != TD_ERR_TIMEOUT) {
        char farewell[600];
        snprintf(farewell, sizeof farewell, "cannot be reached (%.500s)", td_last_error());
        td__peer_gone(messages, rank, farewell);
    }
    td__peer_flush(messages, rank); /* asks again where it took too long for one, but not for all */
    return true;
}

/* ---- Writing --------------------------------------------------------------------------------- */

static void want_room(struct td__messages *messages, struct td__link *link, bool want)
{
    if (link->wants_room == want)
        return;
    struct epoll_event interest = {.events = EPOLLIN | (want ? EPOLLOUT : 0), .data.ptr = link};
    if (!epoll_ctl(messages->epoll, EPOLL_CTL_MOD, link->fd, &interest))
        link->wants_room = want;
}

static ssize_t send_part(struct td__link *link, const char *payload, size_t size)
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
        sent = sendmsg(link->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    } while (sent < 0 && errno == EINTR);
    return sent;
}

static void written(struct td__messages *messages, struct td__post *post, bool requested)
{
    if (!requested) {
        td__post_finish(messages, post, TD_OK);
        return;
    }
    td__post_remove(post);
    td__post_append(&messages->announced, post);
}

/* Writes a post, which is the first in the link's queue. False when it has to wait, or cannot. */
static bool write_first(struct td__messages *messages, struct td__link *link, struct td__post *post)
{
    bool request = post->kind == TD__MESSAGE_EAGER && post->size > TD__WIRE_EAGER;
    bool payload = (post->kind == TD__MESSAGE_EAGER && !request) || post->kind == TD__MESSAGE_DATA;
    size_t size = payload ? post->size : 0;
    if (!link->written) {
        if (request)
            post->id = ++messages->ids;
        td__wire_header(link->header, request ? TD__MESSAGE_REQUEST : post->kind, post->tag,
                        post->size, post->id);
    }
    for (size_t total = 0; link->written < TD__WIRE_HEADER + size;) {
        ssize_t sent = total < BUDGET ? send_part(link, post->data, size) : -1;
        if (total >= BUDGET || (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))) {
            want_room(messages, link, true);
            return false;
        }
        if (sent < 0)
            return false; /* epoll tells of the end as well, and reading whether it was a farewell */
        total += (size_t)sent;
        link->written += (size_t)sent;
    }
    link->written = 0;
    written(messages, post, request);
    return true;
}

bool td__tcp_write(struct td__messages *messages, int rank, struct td__post *post)
{
    struct td__peer *peer = &messages->peers[rank];
    if (peer->links[0])
        return !peer->links[0]->wants_room && write_first(messages, peer->links[0], post);
    if (!peer->connecting) {
        peer->connecting = 1;
        messages->connects_wanted++;
    }
    return false;
}

void td__tcp_flush(struct td__messages *messages, struct td__link *link)
{
    while (!link->closed && link->queue->first && !link->wants_room)
        if (!write_first(messages, link, link->queue->first))
            break;
}

/* ---- Looking --------------------------------------------------------------------------------- */

/* The end of a link without a goodbye. The other process has died, or has given the group up: a moment later
 * it is known which. */
void td__tcp_lose(struct td__messages *messages, struct td__link *link, const char *farewell)
{
    struct td__peer *peer = &messages->peers[link->peer];
    struct td__link *other = peer->links[1];
    int rank = link->peer, world_rank = messages->world_ranks[rank];
    const char *ignored;
    bool bye = link->bye;
    if (other && other != link)
        while (td__wire_read(messages, other, &ignored) == TD__WIRE_MORE)
            ;
    if (!bye && !peer->doubt && peer->links[link->incoming] == link &&
        td__endpoint_presence(messages->options.endpoint, world_rank) == TD__PRESENT) {
        peer->doubt = farewell;
        peer->doubt_end = td__deadline_in_ms(DOUBT_MS);
        messages->doubts = true;
        td__endpoint_watch(messages->options.endpoint, world_rank);
        td__tcp_close(messages, link);
        return;
    }
    td__peer_lost(messages, rank, bye, farewell);
}

static void look_at_link(struct td__messages *messages, struct td__link *link, uint32_t events)
{
    const char *farewell;
    if (events & (EPOLLIN | EPOLLHUP | EPOLLERR) &&
        td__wire_read(messages, link, &farewell) == TD__WIRE_ENDED) {
        td__tcp_lose(messages, link, farewell);
        return;
    }
    if (events & EPOLLOUT && !link->closed) {
        want_room(messages, link, false);
        td__tcp_flush(messages, link);
    }
}

bool td__tcp_look(struct td__messages *messages)
{
    struct epoll_event events[EVENTS];
    int count = epoll_wait(messages->epoll, events, EVENTS, 0);
    for (int i = 0; i < count; i++) {
        struct td__link *link = events[i].data.ptr;
        uint64_t ignored;
        if (!link)
            (void)!read(messages->event, &ignored, sizeof ignored);
        else if (!link->closed)
            look_at_link(messages, link, events[i].events);
    }
    free_closed(messages);
    return count > 0;
}

void td__tcp_sleep(struct td__messages *messages, int64_t ns)
{
    struct epoll_event event;
    struct timespec timeout = td__timespec(ns);
    epoll_pwait2(messages->epoll, &event, 1, &timeout, NULL);
}

void td__tcp_nudge(struct td__messages *messages)
{
    uint64_t one = 1;
    (void)!write(messages->event, &one, sizeof one);
}

/* ---- Leaving --------------------------------------------------------------------------------- */

static void say_bye(struct td__link *link)
{
    uint8_t header[TD__WIRE_HEADER];
    td__wire_header(header, TD__MESSAGE_BYE, 0, 0, 0);
    if (!link->written)
        (void)!send(link->fd, header, sizeof header, MSG_NOSIGNAL | MSG_DONTWAIT);
}

/* Closing a socket with unread bytes resets it; what the other side has got by then it can still
 * read. Where that has closed it before us, nobody will. */
static void wait_until_got(struct td__link *link, td__deadline deadline)
{
    struct pollfd ended = {.fd = link->fd, .events = POLLRDHUP};
    int unsent;
    while (!ioctl(link->fd, SIOCOUTQ, &unsent) && unsent > 0 && poll(&ended, 1, 0) == 0 &&
           !td__deadline_passed(deadline))
        td__sleep_ns(100000);
}

void td__tcp_leave(struct td__messages *messages, td__deadline deadline)
{
    for (int i = 0; i < messages->options.size && messages->links; i++)
        if (messages->peers[i].links[0])
            say_bye(messages->peers[i].links[0]);
    for (int way = 0; way < 2; way++)
        for (int i = 0; i < messages->options.size && messages->links; i++) {
            struct td__link *link = messages->peers[i].links[way];
            if (!link)
                continue;
            if (way)
                say_bye(link);
            if (!td__endpoint_farewell(messages->options.endpoint, messages->world_ranks[i]))
                wait_until_got(link, deadline);
            td__tcp_close(messages, link);
        }
    free_closed(messages);
    while (messages->muted) {
        struct td__link *link = messages->muted;
        messages->muted = link->next;
        close(link->fd);
        free(link);
    }
    if (messages->epoll >= 0) {
        close(messages->epoll);
        close(messages->event);
    }
}
