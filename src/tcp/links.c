/* Links; see links.h. This file opens them and keeps watch on them; goodbyes are in link_close.c. */
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
    LOOK_MS = 50,   /* of waiting for a link, before the peer is watched */
    LEFT_MS = 50,   /* for the link of a peer that has left to arrive */
    ASIDE_MS = 500, /* until one that has not connected is told on the side */
    FEW_MS = 50,    /* of sleep without a descriptor to be woken by */
    BATCH = 16,
    SIDE_WAIT_MS = 2000, /* for the connection on the side */
    PARTING_MS = 2000,   /* for what was sent to arrive */
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

/* Whether all that was sent has reached the other side, or never will. What has come is thrown away: a
 * socket that is closed with something unread makes the kernel drop what is still on its way. */
static bool has_arrived(int fd)
{
    char away[4096];
    struct tcp_info info = {0};
    socklen_t size = sizeof info;
    int queued = 0;
    while (recv(fd, away, sizeof away, MSG_DONTWAIT) > 0)
        ;
    /* On a unix socket there is no way between the two sides. */
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) || info.tcpi_state == TCP_CLOSE)
        return true;
    return ioctl(fd, SIOCOUTQ, &queued) || queued <= 1; /* the end counts as one */
}

/* Closes `*fd`, at once or when all has arrived; false where that must be waited for. */
static bool close_link(int *fd, bool at_once)
{
    if (*fd < 0)
        return true;
    shutdown(*fd, SHUT_WR);
    if (!has_arrived(*fd) && !at_once)
        return false;
    close(*fd);
    *fd = -1;
    return true;
}

/* All of them together, since two that part from each other each wait for the other to read. */
static void part(struct td__links *links)
{
    td__deadline end = td__deadline_in_ms(PARTING_MS);
    for (bool parted = false; !parted;) {
        bool late = td__deadline_passed(end);
        parted = true;
        for (int i = 0; i < links->size; i++) {
            const struct td__tcp_link *link = &links->at[i];
            if (link->fd < 0 && link->side < 0)
                continue;
            /* Who is gone will not read it, and who does not answer is waited for once. */
            bool at_once =
                (links->source->exit_reason && links->source->exit_reason(links->arg, i)) ||
                (links->source->is_deaf && links->source->is_deaf(links->arg, i, late)) || late;
            parted &= close_link(&links->at[i].fd, at_once);
            parted &= close_link(&links->at[i].side, at_once);
        }
        if (!parted)
            td__sleep_ns(1000000);
    }
}

void td__links_free(struct td__links *links)
{
    if (!links->at)
        return;
    links->source->listen(links->arg, NULL, NULL);
    part(links);
    free(links->at);
    free(links->goodbye);
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

/* False where it was there already. */
static bool make_wake_set(struct td__links *links)
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
    make_wake_set(links);
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
    if (make_wake_set(links)) { /* a wake before this had no effect */
        *woken = true;
        return 0;
    }
    bool wakeable = links->wake_set >= 0;
    polled[count] = (struct pollfd){.fd = links->wake_set, .events = POLLIN};
    if (!wakeable) {
        deadline = td__deadline_earlier(deadline, td__deadline_in_ms(FEW_MS));
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

/* Both ends are on this machine where they have the same address. */
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

static td_status fail_unconnected(struct td__links *links, int peer,
                                  const struct td__operation *operation)
{
    char whom[320];
    snprintf(whom, sizeof whom, "%s, which has not connected; has it made the same call?",
             links->source->describe(links->arg, peer));
    return td__links_fail_timeout(links, operation, whom);
}

/* Looks for the reason why `peer` does not connect; its link may be there afterwards. A link that it opened
 * before it left may still be in the handshake, on the endpoint's thread. */
static td_status look_for_peer(struct td__links *links, int peer,
                               const struct td__operation *operation,
                               const struct td__call_header *header, int64_t *left_since,
                               td__deadline *next)
{
    int64_t now = td__now_ns();
    const char *exit_reason = td__links_exit_reason(links, peer);
    if (exit_reason && !*left_since)
        *left_since = now;
    td__deadline left_end = *left_since + LEFT_MS * (int64_t)1000000;
    if (exit_reason && now < left_end)
        *next = td__deadline_earlier(*next, left_end);
    TD_TRY(td__links_look_around(links, operation, header, next));
    return links->at[peer].fd < 0 && exit_reason && now >= left_end
               ? td__links_fail_end(links, peer, operation, header, 0)
               : TD_OK;
}

static td_status accept_link(struct td__links *links, int peer,
                             const struct td__operation *operation,
                             const struct td__call_header *header)
{
    struct td__tcp_link *link = &links->at[peer];
    int64_t left_since = 0;
    td__deadline tell_at = td__deadline_in_ms(ASIDE_MS), next = td__deadline_in_ms(LOOK_MS);
    while (link->fd < 0) {
        struct pollfd none[1];
        bool woken = false;
        td_status status = links->source->accept(links->arg, peer, &link->fd);
        if (!status)
            count_neighbour(links, peer);
        if (status != TD_ERR_TIMEOUT)
            return status;
        if (td__deadline_passed(operation->deadline))
            return fail_unconnected(links, peer, operation);
        td__links_sleep(links, none, 0, td__deadline_earlier(operation->deadline, next), &woken);
        if (td__deadline_passed(tell_at)) {
            td__links_tell(links, peer, header, true);
            tell_at = TD__NEVER;
        }
        if (!woken && !td__deadline_passed(next))
            continue;
        if (!woken)
            td__links_watch(links);
        next = td__deadline_earlier(tell_at, td__now_ns() + TD__LONGEST_SLEEP_NS);
        TD_TRY(look_for_peer(links, peer, operation, header, &left_since, &next));
    }
    return TD_OK;
}

td_status td__links_open(struct td__links *links, int peer, const struct td__operation *operation,
                         const struct td__call_header *header)
{
    if (links->index < peer)
        return accept_link(links, peer, operation, header);
    td_status status = links->source->connect(links->arg, peer, operation->deadline,
                                              &links->at[peer].fd);
    if (status)
        td_fail(status, "%s: %s", td__operation_describe(operation), td_last_error());
    if (status == TD_ERR_PEER)
        status = td__links_find_cause(links, peer, operation, header);
    if (status == TD_ERR_TIMEOUT && links->explain)
        links->explain(links->outside_arg, operation);
    if (status)
        return status;
    count_neighbour(links, peer);
    return TD_OK;
}

/* ---- Waiting for long ------------------------------------------------------------------------ */

/* Others are told the same sentence, so it says who has waited, and where everybody was then. */
td_status td__links_fail_timeout(struct td__links *links, const struct td__operation *operation,
                                 const char *whom)
{
    char me[256];
    snprintf(me, sizeof me, "%s", links->source->describe(links->arg, links->index));
    td_fail(TD_ERR_TIMEOUT, "%s: %s timed out waiting for %s", td__operation_describe(operation),
            me, whom);
    if (links->explain)
        links->explain(links->outside_arg, operation);
    return TD_ERR_TIMEOUT;
}

/* A notice goes out at once and whole, or not at all: those who do not read have other troubles. */
void td__links_tell(struct td__links *links, int peer, const struct td__call_header *header,
                    bool aside)
{
    struct td__tcp_link *link = &links->at[peer];
    struct td__call_header notice = *header;
    uint8_t bytes[TD__HEADER_BYTES];
    if (link->told == header->turn || link->sending)
        return;
    if (link->fd < 0 && link->side < 0 && aside &&
        links->source->approach(links->arg, peer, td__deadline_in_ms(SIDE_WAIT_MS), &link->side))
        return;
    struct pollfd room = {.fd = link->fd >= 0 ? link->fd : link->side, .events = POLLOUT};
    notice.type = TD__HEADER_CALL;
    notice.payload = 0;
    td__header_write(&notice, bytes);
    if (poll(&room, 1, 0) == 1 && room.revents == POLLOUT &&
        send(room.fd, bytes, sizeof bytes, MSG_DONTWAIT | MSG_NOSIGNAL) > 0)
        link->told = header->turn;
}

const char *td__links_exit_reason(const struct td__links *links, int peer)
{
    if (!links->source->exit_reason)
        return NULL;
    links->source->watch(links->arg, peer);
    return links->source->exit_reason(links->arg, peer);
}

/* Takes the links that others have opened, and that this rank has not come to need yet. */
static void take_links(struct td__links *links)
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

/* What stands at the front of a link. */
enum sight {
    NOTHING, /* or less than a header */
    HEADER,
    NOISE,
    END,
};

static enum sight peek(int fd, struct td__call_header *header)
{
    uint8_t bytes[TD__HEADER_BYTES];
    ssize_t peeked;
    do
        peeked = recv(fd, bytes, sizeof bytes, MSG_PEEK | MSG_DONTWAIT);
    while (peeked < 0 && errno == EINTR);
    if (peeked < 0)
        return errno == EAGAIN || errno == EWOULDBLOCK ? NOTHING : END;
    if (peeked == 0)
        return END;
    if (peeked < TD__HEADER_BYTES)
        return NOTHING;
    return td__header_read(bytes, header) ? HEADER : NOISE;
}

static void skip_header(int fd)
{
    uint8_t bytes[TD__HEADER_BYTES];
    ssize_t taken = recv(fd, bytes, sizeof bytes, MSG_DONTWAIT);
    (void)taken;
}

/* Takes notices and goodbyes; leaves data, which may belong to a later round, and what is ahead. A
 * link that has ended is nobody's failure as long as nothing is due from it; but a rank that shuts the
 * side link on which it was told that it is waited for will not come. */
static td_status look_at_front(struct td__links *links, int peer, int fd,
                               const struct td__operation *operation,
                               const struct td__call_header *mine)
{
    struct td__call_header theirs;
    enum sight sight = peek(fd, &theirs);
    if (sight == NOISE)
        return td__links_fail_noise(links, peer, operation);
    if (sight == END && fd == links->at[peer].side && peer > links->index) {
        int error = td__tls_complaint(fd) ? EBADMSG : 0;
        close(fd);
        links->at[peer].side = -1;
        return td__links_fail_end(links, peer, operation, mine, error);
    }
    if (sight != HEADER)
        return TD_OK;
    if (theirs.type != TD__HEADER_GOODBYE && theirs.turn > mine->turn)
        return TD_OK;
    if (theirs.type == TD__HEADER_DATA && td__header_same_call(&theirs, mine))
        return TD_OK;
    skip_header(fd);
    return td__links_judge(links, peer, fd, operation, mine, &theirs, "", 0);
}

td_status td__links_look_around(struct td__links *links, const struct td__operation *operation,
                                const struct td__call_header *header, td__deadline *next)
{
    if (links->outside)
        TD_TRY(links->outside(links->outside_arg, operation, next));
    take_links(links);
    for (int i = 0; i < links->size; i++) {
        struct td__tcp_link *link = &links->at[i];
        if (link->fd >= 0 && !link->receiving)
            TD_TRY(look_at_front(links, i, link->fd, operation, header));
        if (link->side >= 0)
            TD_TRY(look_at_front(links, i, link->side, operation, header));
    }
    return TD_OK;
}

td_status td__links_hear(struct td__links *links, const struct td__operation *operation)
{
    struct td__call_header theirs;
    take_links(links);
    for (int i = 0; i < links->size; i++) {
        int fds[2] = {links->at[i].receiving ? -1 : links->at[i].fd, links->at[i].side};
        for (int k = 0; k < 2; k++) {
            if (fds[k] < 0 || peek(fds[k], &theirs) != HEADER || theirs.type != TD__HEADER_GOODBYE)
                continue;
            skip_header(fds[k]);
            return td__links_judge(links, i, fds[k], operation, &theirs, &theirs, "", 0);
        }
    }
    return TD_OK;
}

td_status td__links_look_at(struct td__links *links, int peer,
                            const struct td__operation *operation,
                            const struct td__call_header *mine)
{
    struct td__call_header theirs;
    switch (peek(links->at[peer].fd, &theirs)) {
    case NOISE:
        return td__links_fail_noise(links, peer, operation);
    case END:
        return td__links_fail_end(links, peer, operation, mine, 0);
    case HEADER:
        skip_header(links->at[peer].fd);
        return td__links_judge(links, peer, links->at[peer].fd, operation, mine, &theirs, "", 0);
    default:
        return TD_OK;
    }
}
