/* Stream sockets; see socket.h. */
#include "os/socket.h"

#include "base/auth.h"
#include "base/fail.h"
#include "base/number.h"
#include "base/thread.h"

#include <errno.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { BACKLOG = 4096 };

static int open_stream(const struct td__address *address)
{
    int family = address->any.sa_family;
    td__fork_hold();
    int fd = socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    int error = errno, on = 1;
    td__fork_exclude(fd);
    td__fork_release();
    if (fd < 0)
        return -error;
    if (family != AF_UNIX)
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    return fd;
}

int td__accept(int listener)
{
    td__fork_hold();
    int fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC), error = errno;
    td__fork_exclude(fd);
    td__fork_release();
    errno = error;
    return fd;
}

int td__socket_pair(int ends[2])
{
    td__fork_hold();
    int error = socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) ? errno
                                                                                         : 0;
    for (int i = 0; i < 2 && !error; i++)
        td__fork_exclude(ends[i]);
    td__fork_release();
    return error;
}

int td__wait_fd(int fd, short events, td__deadline deadline)
{
    for (;;) {
        struct pollfd poll_fd = {.fd = fd, .events = events};
        int ready = poll(&poll_fd, 1, td__deadline_poll_ms(deadline));
        if (ready > 0)
            return 0;
        if (ready < 0 && errno != EINTR)
            return errno;
        if (td__deadline_passed(deadline))
            return ETIMEDOUT;
    }
}

int td__connect_to(const struct td__address *address, td__deadline deadline)
{
    int fd = open_stream(address);
    if (fd < 0)
        return fd;
    int error = connect(fd, &address->any, address->size) ? errno : 0;
    if (error == EINPROGRESS || error == EINTR) {
        socklen_t size = sizeof error;
        error = td__wait_fd(fd, POLLOUT, deadline);
        if (!error && getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size))
            error = errno;
    }
    if (!error && address->any.sa_family != AF_UNIX) {
        /* A connection to a free port of one's own host can connect to itself. */
        struct td__address ours, theirs;
        td__local_address(fd, &ours);
        td__remote_address(fd, &theirs);
        if (ours.size == theirs.size && !memcmp(&ours.any, &theirs.any, ours.size))
            error = ECONNREFUSED;
    }
    if (error) {
        close(fd);
        return -error;
    }
    return fd;
}

int td__listen_on(const struct td__address *address)
{
    int fd = open_stream(address);
    if (fd < 0)
        return fd;
    int on = 1, off = 0;
    if (address->any.sa_family != AF_UNIX)
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (address->any.sa_family == AF_INET6)
        setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    if (bind(fd, &address->any, address->size) || listen(fd, BACKLOG)) {
        int error = errno;
        close(fd);
        return -error;
    }
    return fd;
}

/* After a call that failed: 0 where it is to be made again, when `fd` is ready for `events`; or an errno. */
static int await_retry(int fd, short events, td__deadline deadline)
{
    if (errno == EINTR)
        return 0;
    return errno == EAGAIN ? td__wait_fd(fd, events, deadline) : errno;
}

int td__send_all(int fd, const void *data, size_t size, td__deadline deadline)
{
    for (const char *at = data; size;) {
        ssize_t sent = send(fd, at, size, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent >= 0) {
            at += sent;
            size -= (size_t)sent;
            continue;
        }
        int error = await_retry(fd, POLLOUT, deadline);
        if (error)
            return error;
    }
    return 0;
}

int td__recv_all(int fd, void *data, size_t size, td__deadline deadline)
{
    for (char *at = data; size;) {
        ssize_t got = recv(fd, at, size, MSG_DONTWAIT);
        if (got > 0) {
            at += got;
            size -= (size_t)got;
            continue;
        }
        int error = got == 0 ? ENODATA : await_retry(fd, POLLIN, deadline);
        if (error)
            return error;
    }
    return 0;
}

/* ---- Addresses ------------------------------------------------------------------------------- */

/* The name of an end that stands for a TCP connection: abstract, with the address itself in it, and
 * something random, since names are unique. */
struct stand_in {
    char zero;
    char mark[7];
    uint8_t random[8];
    struct sockaddr_in6 address; /* or a sockaddr_in */
};

static const char mark[] = "tandem=";

static void resolve_stand_in(struct td__address *address)
{
    struct stand_in name;
    size_t start = offsetof(struct sockaddr_un, sun_path);
    if (address->any.sa_family != AF_UNIX || address->size != start + sizeof name)
        return;
    memcpy(&name, address->local.sun_path, sizeof name);
    if (name.zero || memcmp(name.mark, mark, sizeof name.mark) != 0)
        return;
    memset(address, 0, sizeof *address);
    address->v6 = name.address;
    address->size = address->any.sa_family == AF_INET ? sizeof address->v4 : sizeof address->v6;
}

static void give_name(int end, const struct td__address *stands_for)
{
    struct stand_in name = {0};
    struct td__address own = {.local = {.sun_family = AF_UNIX}};
    if (stands_for->any.sa_family == AF_UNIX || td__random(name.random, sizeof name.random))
        return;
    memcpy(name.mark, mark, sizeof name.mark);
    memcpy(&name.address, &stands_for->any, stands_for->size);
    memcpy(own.local.sun_path, &name, sizeof name);
    own.size = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + sizeof name);
    (void)!bind(end, &own.any, own.size);
}

void td__name_pair(int wire, int end, int other)
{
    struct td__address here, there;
    td__local_address(wire, &here);
    td__remote_address(wire, &there);
    give_name(end, &here);
    give_name(other, &there);
}

static void find_address(int fd, int (*get)(int, struct sockaddr *, socklen_t *),
                         struct td__address *address)
{
    memset(address, 0, sizeof *address);
    address->size = sizeof address->local;
    if (get(fd, &address->any, &address->size))
        address->size = 0;
    resolve_stand_in(address);
}

bool td__host_is_here(const char *host, td__deadline deadline)
{
    struct td__address_list list;
    bool retry, here = false;
    if (td__resolve(host, 0, deadline, &list, &retry))
        return false;
    for (int i = 0; i < list.count && !here; i++) {
        int fd = socket(list.at[i].any.sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
        here = fd >= 0 && !bind(fd, &list.at[i].any, list.at[i].size);
        if (fd >= 0)
            close(fd);
    }
    return here;
}

void td__local_address(int fd, struct td__address *address)
{
    find_address(fd, getsockname, address);
}

void td__remote_address(int fd, struct td__address *address)
{
    find_address(fd, getpeername, address);
}

/* ---- Peers that are cut off ------------------------------------------------------------------ */

enum { DEFAULT_S = 10, LEAST_S = 1, MOST_S = 3600 };

static atomic_int limit_s = DEFAULT_S;

td_status td__heartbeat_read(void)
{
    const char *text = getenv("TANDEM_HEARTBEAT");
    int seconds = DEFAULT_S;
    if (text && *text && !td__parse_int(text, LEAST_S, MOST_S, &seconds))
        return td_fail(TD_ERR_INVALID,
                       "TANDEM_HEARTBEAT is \"%s\"; it is a number of seconds, %d to %d", text,
                       LEAST_S, MOST_S);
    atomic_store(&limit_s, seconds);
    return TD_OK;
}

int64_t td__heartbeat_ms(void)
{
    return (int64_t)atomic_load_explicit(&limit_s, memory_order_relaxed) * 1000;
}

void td__tune_tcp(int fd)
{
    /* The first question after half the time; then as many as fit into the rest. */
    int heartbeat = (int)(td__heartbeat_ms() / 1000);
    int on = 1, idle = (heartbeat + 1) / 2;
    int interval = heartbeat >= 8 ? heartbeat / 8 : 1;
    int count = (heartbeat - idle) / interval > 1 ? (heartbeat - idle) / interval : 1;
    if (setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on))
        return; /* no TCP */
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof interval);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof count);
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);

    /* BBR, a common default, paces: on loopback that halves the speed, and nothing is won. */
    struct td__address peer;
    td__remote_address(fd, &peer);
    if (td__address_is_local(&peer))
        setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "reno", 4);
}

bool td__cut_off(int fd)
{
    struct tcp_info info;
    socklen_t size = sizeof info;
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size))
        return false;
    /* Sent again, and no answer since. Questions about a window that is shut do not count: they become
     * rarer than the heartbeat where a healthy peer just does not read. */
    return info.tcpi_retransmits && !info.tcpi_probes &&
           (int64_t)info.tcpi_last_ack_recv >= td__heartbeat_ms();
}

/* ---- Descriptors along unix sockets ---------------------------------------------------------- */

bool td__peer_is_us(int fd)
{
    struct ucred credentials;
    socklen_t size = sizeof credentials;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &size))
        return false;
    return credentials.uid == geteuid() || credentials.uid == 0;
}

/* Room for one descriptor, aligned as the kernel wants it. */
union control {
    struct cmsghdr header;
    char room[CMSG_SPACE(sizeof(int))];
};

int td__send_fd(int fd, int passed, const void *data, size_t size, td__deadline deadline)
{
    union control control = {0};
    struct iovec part = {(void *)data, size};
    struct msghdr message = {.msg_iov = &part,
                             .msg_iovlen = 1,
                             .msg_control = &control,
                             .msg_controllen = sizeof control.room};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof passed);
    memcpy(CMSG_DATA(header), &passed, sizeof passed);
    ssize_t sent;
    while ((sent = sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT)) < 0) {
        int error = await_retry(fd, POLLOUT, deadline);
        if (error)
            return error;
    }
    /* The descriptor went with the first bytes. */
    return td__send_all(fd, (const char *)data + sent, size - (size_t)sent, deadline);
}

/* The descriptor that came along; -1 when there was none. More than one (the room for one has room
 * for two, because of alignment) is a mistake of the sender: all are closed. */
static int take_fd(struct msghdr *message)
{
    struct cmsghdr *header = CMSG_FIRSTHDR(message);
    if (!header || header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS)
        return -1;
    int received[sizeof(union control) / sizeof(int)];
    size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof *received;
    memcpy(received, CMSG_DATA(header), count * sizeof *received);
    if (count == 1)
        return received[0];
    for (size_t i = 0; i < count; i++)
        close(received[i]);
    return -1;
}

int td__recv_fd(int fd, int *passed, void *data, size_t size, td__deadline deadline)
{
    union control control = {0};
    struct iovec part = {data, size};
    struct msghdr message = {.msg_iov = &part,
                             .msg_iovlen = 1,
                             .msg_control = &control,
                             .msg_controllen = sizeof control.room};
    ssize_t got;
    while ((got = recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC)) < 0) {
        int error = await_retry(fd, POLLIN, deadline);
        if (error)
            return error;
    }
    int received = take_fd(&message);
    if (received < 0 && message.msg_flags & MSG_CTRUNC && !CMSG_FIRSTHDR(&message))
        return EMFILE; /* it was sent, but this process may have no more */
    if (received < 0)
        return got == 0 ? ENODATA : EPROTO;
    int error = td__recv_all(fd, (char *)data + got, size - (size_t)got, deadline);
    if (error) {
        close(received);
        return error;
    }
    *passed = received;
    return 0;
}
