/* Links; see links.h. This file opens, watches and checks them; link_close.c has the failure notices. */
#include "tcp/links.h"

#include "base/fail.h"
#include "base/wait.h"
#include "os/socket.h"
#include "os/tls.h"

#include <errno.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    CHECK_MS = 50,      /* the wait for a link, before the peer is watched */
    LEFT_MS = 50,       /* the wait for the link of a peer that has left */
    SIDE_LINK_MS = 500, /* the wait for a link, before the peer is notified by a side link */
    POLL_MS = 50,       /* the longest sleep without an eventfd */
    BATCH = 16,
    SIDE_CONNECT_MS = 2000,
    CLOSE_MS = 2000, /* the wait until sent data has arrived */
};

bool td__links_init(struct td__links *links, const struct td__link_source *source, void *arg,
                    int size, int index)
{
    *links = (struct td__links){
        .source = source, .arg = arg, .size = size, .index = index, .wake_set = -1, .wake = -1};
    links->at = calloc((size_t)size, sizeof *links->at);
    for (int i = 0; links->at && i < size; i++)
        links->at[i].fd = links->at[i].side = -1;
    return links->at;
}

/* Whether all sent data has reached the other side, or never will. Discards received data: if a socket is closed
 * with unread data, the kernel drops the data that it has not sent yet. */
static bool has_arrived(int fd)
{
    char discarded[4096];
    struct tcp_info info = {0};
    socklen_t size = sizeof info;
    int queued = 0;
    while (td__sock_recv(fd, discarded, sizeof discarded, MSG_DONTWAIT) > 0)
        ;
    /* What is sent on a unix socket has arrived. */
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) || info.tcpi_state == TCP_CLOSE)
        return true;
    return ioctl(fd, SIOCOUTQ, &queued) || queued <= 1; /* the FIN counts as one */
}

/* Closes `*fd`, at once or if all sent data has arrived; false if it has not. */
static bool close_link(int *fd, bool at_once)
{
    if (*fd < 0)
        return true;
    td__sock_shutdown(*fd, SHUT_WR);
    if (!has_arrived(*fd) && !at_once)
        return false;
    td__sock_close(*fd);
    *fd = -1;
    return true;
}

/* Closes all links together, since two members that close a link each wait for the other one to read. */
static void close_links(struct td__links *links)
{
    td__deadline end = td__deadline_in_ms(CLOSE_MS);
    for (bool closed = false; !closed;) {
        bool late = td__deadline_passed(end);
        closed = true;
        for (int i = 0; i < links->size; i++) {
            const struct td__tcp_link *link = &links->at[i];
            if (link->fd < 0 && link->side < 0)
                continue;
            /* Does not wait for a peer that has ended, and only once for one that does not receive. */
            bool at_once = td__links_exit_reason(links, i, false) ||
                           (links->source->is_unresponsive &&
                            links->source->is_unresponsive(links->arg, i, late)) ||
                           late;
            closed &= close_link(&links->at[i].fd, at_once);
            closed &= close_link(&links->at[i].side, at_once);
        }
        if (!closed)
            td__sleep_ns(1000000);
    }
}

void td__links_free(struct td__links *links)
{
    if (!links->at)
        return;
    links->source->listen(links->arg, NULL, NULL);
    close_links(links);
    free(links->at);
    if (links->wake_set >= 0)
        close(links->wake_set);
    if (links->wake >= 0)
        close(links->wake);
}

/* ---- Sleeping -------------------------------------------------------------------------------- */

static void watch_fd(struct td__links *links, int fd, uint32_t events)
{
    struct epoll_event event = {.events = events, .data.fd = fd};
    if (fd >= 0 && epoll_ctl(links->wake_set, EPOLL_CTL_MOD, fd, &event) && errno == ENOENT)
        epoll_ctl(links->wake_set, EPOLL_CTL_ADD, fd, &event);
}

/* False if it exists already, or cannot be created. */
static bool create_wake_set(struct td__links *links)
{
    if (links->wake_set >= 0)
        return false;
    int wake_set = epoll_create1(EPOLL_CLOEXEC), wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (wake_set < 0 || wake < 0) {
        if (wake_set >= 0)
            close(wake_set);
        if (wake >= 0)
            close(wake);
        return false;
    }
    links->wake_set = wake_set;
    watch_fd(links, wake, EPOLLIN);
    atomic_store(&links->wake, wake);
    return true;
}

void td__links_wake(struct td__links *links)
{
    uint64_t one = 1;
    int fd = atomic_load(&links->wake);
    ssize_t written = fd >= 0 ? write(fd, &one, sizeof one) : 0;
    (void)written;
}

int td__links_watch(struct td__links *links)
{
    create_wake_set(links);
    for (int i = 0; i < links->size && links->wake_set >= 0; i++) {
        watch_fd(links, links->at[i].fd, EPOLLIN | EPOLLONESHOT);
        watch_fd(links, links->at[i].side, EPOLLIN | EPOLLONESHOT);
    }
    return links->wake_set;
}

static void drain(struct td__links *links)
{
    struct epoll_event events[BATCH];
    uint64_t count;
    while (epoll_wait(links->wake_set, events, BATCH, 0) == BATCH)
        ;
    ssize_t got = read(links->wake, &count, sizeof count);
    (void)got;
}

int td__links_sleep(struct td__links *links, struct pollfd *polled, uint32_t count,
                    td__deadline deadline, bool *woken)
{
    if (create_wake_set(links)) { /* a wake before this had no effect */
        *woken = true;
        return 0;
    }
    bool wakeable = links->wake_set >= 0;
    polled[count] = (struct pollfd){.fd = links->wake_set, .events = POLLIN};
    if (!wakeable) {
        deadline = td__deadline_earlier(deadline, td__deadline_in_ms(POLL_MS));
        *woken = true;
    }
    int ready = poll(polled, count + 1, td__deadline_poll_ms(deadline));
    if (ready > 0 && wakeable && polled[count].revents) {
        drain(links);
        *woken = true;
        ready--;
    }
    return ready;
}

/* ---- Opening --------------------------------------------------------------------------------- */

static void explain_timeout(const struct td__links *links, const struct td__operation *operation)
{
    if (links->callbacks.explain)
        links->callbacks.explain(links->callbacks.arg, operation);
}

/* Both ends are on this machine if they have the same address. */
static void count_neighbour(struct td__links *links, int peer)
{
    struct td__address here, there;
    td__local_address(links->at[peer].fd, &here);
    td__remote_address(links->at[peer].fd, &there);
    if (here.any.sa_family == AF_INET)
        links->neighbours += here.v4.sin_addr.s_addr == there.v4.sin_addr.s_addr;
    else
        links->neighbours += here.any.sa_family == AF_UNIX ||
                             !memcmp(&here.v6.sin6_addr, &there.v6.sin6_addr,
                                     sizeof here.v6.sin6_addr);
}

/* Fails if there is a reason why `peer` does not connect; its link may be open afterwards. A link that it opened
 * before it left may still be in the handshake, on the endpoint's thread. */
static td_status check_unconnected(const struct td__link_call *call, int peer,
                                   td__deadline *left_end, td__deadline *next)
{
    int64_t now = td__now_ns();
    bool left = td__links_exit_reason(call->links, peer, true);
    if (left && !*left_end)
        *left_end = now + LEFT_MS * (int64_t)1000000;
    if (left && now < *left_end)
        *next = td__deadline_earlier(*next, *left_end);
    TD_TRY(td__links_check_all(call, next));
    return left && now >= *left_end && call->links->at[peer].fd < 0
               ? td__links_fail_end(call, peer, 0)
               : TD_OK;
}

static td_status accept_link(const struct td__link_call *call, int peer)
{
    struct td__links *links = call->links;
    struct td__tcp_link *link = &links->at[peer];
    td__deadline end = call->operation->deadline, left_end = 0;
    td__deadline notify_at = td__deadline_in_ms(SIDE_LINK_MS), next = td__deadline_in_ms(CHECK_MS);
    while (link->fd < 0) {
        struct pollfd none[1];
        bool woken = false;
        td_status status = links->source->accept(links->arg, peer, &link->fd);
        if (!status)
            count_neighbour(links, peer);
        if (status != TD_ERR_TIMEOUT)
            return status;
        if (td__deadline_passed(end)) {
            char ranks[320];
            snprintf(ranks, sizeof ranks, "%s, which has not connected; has it made the same call?",
                     links->source->describe(links->arg, peer));
            return td__links_fail_timeout(links, call->operation, ranks);
        }
        td__links_sleep(links, none, 0, td__deadline_earlier(end, next), &woken);
        if (td__deadline_passed(notify_at)) {
            td__links_notify(call, peer, true);
            notify_at = TD__NEVER;
        }
        if (!woken && !td__deadline_passed(next))
            continue;
        if (!woken)
            td__links_watch(links);
        next = td__deadline_earlier(notify_at, td__now_ns() + TD__LONGEST_SLEEP_NS);
        TD_TRY(check_unconnected(call, peer, &left_end, &next));
    }
    return TD_OK;
}

td_status td__links_open(const struct td__link_call *call, int peer)
{
    struct td__links *links = call->links;
    if (links->index < peer)
        return accept_link(call, peer);
    td_status status = links->source->connect(links->arg, peer, false, call->operation->deadline,
                                              &links->at[peer].fd);
    if (!status)
        count_neighbour(links, peer);
    else
        td_fail(status, "%s: %s", td__operation_describe(call->operation), td__error_text());
    if (status == TD_ERR_PEER)
        status = td__links_find_cause(call, peer);
    if (status == TD_ERR_TIMEOUT)
        explain_timeout(links, call->operation);
    return status;
}

/* ---- Long waits ------------------------------------------------------------------------------ */

td_status td__links_fail_timeout(struct td__links *links, const struct td__operation *operation,
                                 const char *ranks)
{
    /* The other members report the same text, so it names the rank that has waited, and the progress of all. */
    td_fail(TD_ERR_TIMEOUT, "%s: %s timed out waiting for %s", td__operation_describe(operation),
            links->source->describe(links->arg, links->index), ranks);
    explain_timeout(links, operation);
    return TD_ERR_TIMEOUT;
}

/* A notice is sent at once and completely, or not at all: a peer whose buffer is full gets none. */
void td__links_notify(const struct td__link_call *call, int peer, bool side_link)
{
    const struct td__links *links = call->links;
    struct td__tcp_link *link = &links->at[peer];
    struct td__call_header notice = call->header;
    uint8_t bytes[TD__HEADER_BYTES];
    if (link->notified_turn == notice.turn || link->sending)
        return;
    if (link->fd < 0 && link->side < 0 && side_link &&
        links->source->connect(links->arg, peer, true, td__deadline_in_ms(SIDE_CONNECT_MS),
                               &link->side))
        return;
    struct pollfd out = {.fd = link->fd >= 0 ? link->fd : link->side, .events = POLLOUT};
    notice.type = TD__HEADER_CALL;
    notice.payload = 0;
    td__header_write(&notice, bytes);
    if (poll(&out, 1, 0) == 1 && out.revents == POLLOUT &&
        td__sock_send(out.fd, bytes, sizeof bytes, MSG_DONTWAIT | MSG_NOSIGNAL) > 0)
        link->notified_turn = notice.turn;
}

const char *td__links_exit_reason(const struct td__links *links, int peer, bool watch)
{
    return links->source->exit_reason ? links->source->exit_reason(links->arg, peer, watch) : NULL;
}

/* Accepts the links that other members have opened, and that this rank does not need yet. */
static void accept_pending(struct td__links *links)
{
    for (int i = 0; i < links->size; i++) {
        struct td__tcp_link *link = &links->at[i];
        int *fd = i > links->index && link->fd < 0 ? &link->fd : &link->side;
        if (i == links->index || *fd >= 0)
            continue;
        if (links->source->accept(links->arg, i, fd))
            *fd = -1;
        else if (fd == &link->fd)
            count_neighbour(links, i);
    }
}

/* The first bytes in the receive buffer of a link. */
enum front {
    EMPTY, /* or less than a header */
    HEADER,
    INVALID,
    CLOSED,
};

static enum front peek(int fd, struct td__call_header *header)
{
    uint8_t bytes[TD__HEADER_BYTES];
    ssize_t peeked;
    do
        peeked = td__sock_recv(fd, bytes, sizeof bytes, MSG_PEEK | MSG_DONTWAIT);
    while (peeked < 0 && errno == EINTR);
    if (peeked < 0)
        return errno == EAGAIN || errno == EWOULDBLOCK ? EMPTY : CLOSED;
    if (peeked == 0)
        return CLOSED;
    if (peeked < TD__HEADER_BYTES)
        return EMPTY;
    return td__header_read(bytes, header) ? HEADER : INVALID;
}

/* Receives the header `theirs`, which peek() has found, and checks it. */
static td_status take_header(const struct td__link_call *call, int peer, int fd,
                             const struct td__call_header *theirs)
{
    uint8_t bytes[TD__HEADER_BYTES];
    ssize_t taken = td__sock_recv(fd, bytes, sizeof bytes, MSG_DONTWAIT);
    (void)taken;
    return td__links_check_header(call, peer, fd, theirs, "", 0);
}

/* Receives notices; leaves data, which may belong to a later round, and headers of a later turn. A closed link is
 * no failure as long as nothing is expected from it. But a peer that closes the side link on which it was notified
 * will not connect. */
static td_status check_front(const struct td__link_call *call, int peer, int fd, bool failures_only)
{
    struct td__tcp_link *link = &call->links->at[peer];
    struct td__call_header theirs;
    enum front front = fd < 0 ? EMPTY : peek(fd, &theirs);
    if (front == HEADER && theirs.type == TD__HEADER_FAILURE)
        return take_header(call, peer, fd, &theirs);
    if (front == EMPTY || failures_only)
        return TD_OK;
    if (front == INVALID)
        return td__links_fail_invalid(call, peer);
    if (front == HEADER)
        return theirs.turn > call->header.turn || (theirs.type == TD__HEADER_DATA &&
                                                   td__header_same_call(&theirs, &call->header))
                   ? TD_OK
                   : take_header(call, peer, fd, &theirs);
    if (fd != link->side || peer < call->links->index)
        return TD_OK;
    int error = td__tls_complaint(fd) ? EBADMSG : 0;
    td__sock_close(fd);
    link->side = -1;
    return td__links_fail_end(call, peer, error);
}

static td_status check_fronts(const struct td__link_call *call, bool failures_only)
{
    struct td__links *links = call->links;
    accept_pending(links);
    for (int i = 0; i < links->size; i++) {
        struct td__tcp_link *link = &links->at[i];
        TD_TRY(check_front(call, i, link->receiving ? -1 : link->fd, failures_only));
        TD_TRY(check_front(call, i, link->side, failures_only));
    }
    return TD_OK;
}

td_status td__links_check_all(const struct td__link_call *call, td__deadline *next)
{
    const struct td__comm_callbacks *callbacks = &call->links->callbacks;
    if (callbacks->check)
        TD_TRY(callbacks->check(callbacks->arg, call->operation, next));
    return check_fronts(call, false);
}

td_status td__links_check_failures(struct td__links *links, const struct td__operation *operation)
{
    return check_fronts(&(struct td__link_call){.links = links, .operation = operation}, true);
}

td_status td__links_check_peer(const struct td__link_call *call, int peer)
{
    struct td__call_header theirs;
    int fd = call->links->at[peer].fd;
    switch (peek(fd, &theirs)) {
    case INVALID:
        return td__links_fail_invalid(call, peer);
    case CLOSED:
        return td__links_fail_end(call, peer, 0);
    case HEADER:
        return take_header(call, peer, fd, &theirs);
    default:
        return TD_OK;
    }
}
