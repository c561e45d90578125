/* Stream sockets; see socket.h. */
#include "os/socket.h"

#include "os/tls.h"

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
    td__tls_forget(fd);
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
    td__tls_forget(fd);
    errno = error;
    return fd;
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
        ssize_t sent = td__sock_send(fd, at, size, MSG_NOSIGNAL | MSG_DONTWAIT);
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
        ssize_t got = td__sock_recv(fd, at, size, MSG_DONTWAIT);
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

static void find_address(int fd, int (*get)(int, struct sockaddr *, socklen_t *),
                         struct td__address *address)
{
    memset(address, 0, sizeof *address);
    address->size = sizeof address->local;
    if (get(fd, &address->any, &address->size))
        address->size = 0;
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

enum { DEFAULT_MS = 10000, LEAST_MS = 100, MOST_MS = 3600000, NEAR_US = 5000 };

static atomic_int limit_ms = DEFAULT_MS;

/* "10", "0.5": seconds, with three decimals at most. */
static bool parse_seconds(const char *text, int *ms)
{
    const char *point = strchr(text, '.');
    size_t whole = point ? (size_t)(point - text) : strlen(text), decimals = 0;
    int64_t seconds, value;
    if (!td__parse_i64(text, whole, &seconds) || seconds < 0 || seconds > MOST_MS / 1000)
        return false;
    value = seconds * 1000;
    for (int unit = 100; point && point[1 + decimals]; unit /= 10, decimals++) {
        char digit = point[1 + decimals];
        if (digit < '0' || digit > '9' || decimals == 3)
            return false;
        value += (digit - '0') * unit;
    }
    *ms = (int)value;
    return value >= LEAST_MS && value <= MOST_MS && (!point || decimals);
}

td_status td__heartbeat_read(void)
{
    const char *text = getenv("TANDEM_HEARTBEAT");
    int ms = DEFAULT_MS;
    if (text && *text && !parse_seconds(text, &ms))
        return td_fail(TD_ERR_INVALID,
                       "TANDEM_HEARTBEAT is \"%s\"; it is a number of seconds, 0.1 to %d", text,
                       MOST_MS / 1000);
    atomic_store(&limit_ms, ms);
    return TD_OK;
}

int64_t td__heartbeat_ms(void)
{
    return atomic_load_explicit(&limit_ms, memory_order_relaxed);
}

/* The host is in the same network, or in the same region, as far as the handshake shows. */
static bool is_near(int fd)
{
    struct tcp_info info;
    socklen_t size = sizeof info;
    return !getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) && info.tcpi_rtt &&
           info.tcpi_rtt <= NEAR_US;
}

/* BBR, a default on many machines, paces: it spreads what is sent over time, by timers. That makes the best of long lossy
 * ways; where the other host is near it halves the speed of exchanges, which come in bursts and wait for each other. Reno,
 * which everybody may choose, begins faster than CUBIC. */
static void stop_pacing(int fd)
{
    char used[16] = "";
    socklen_t size = sizeof used;
    if (!getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, used, &size) && !strncmp(used, "bbr", 3))
        setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "reno", 4);
}

void td__tune_tcp(int fd)
{
    /* The first question after half the time; then as many as fit into the rest. */
    int heartbeat = (int)((td__heartbeat_ms() + 999) / 1000);
    int on = 1, idle = (heartbeat + 1) / 2;
    int interval = heartbeat >= 8 ? heartbeat / 8 : 1;
    int count = (heartbeat - idle) / interval > 1 ? (heartbeat - idle) / interval : 1;
    if (setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on))
        return; /* no TCP */
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof interval);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof count);
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);

    struct td__address peer;
    td__remote_address(fd, &peer);
    if (td__address_is_local(&peer) || is_near(fd))
        stop_pacing(fd);
}

bool td__cut_off(int fd)
{
    struct tcp_info info;
    socklen_t size = sizeof info;
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size))
        return false;
    /* Sent again, and no answer since. Questions about a window that is shut do not count: they become
     * rarer than the heartbeat where a healthy peer just does not read. Those of keepalive before something was sent do. */
    return info.tcpi_retransmits && (info.tcpi_unacked || !info.tcpi_probes) &&
           (int64_t)info.tcpi_last_ack_recv >= td__heartbeat_ms();
}

bool td__awaits_acknowledgement(int fd)
{
    struct tcp_info info;
    socklen_t size = sizeof info;
    return !getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) && info.tcpi_unacked;
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
    td__tls_forget(received);
    *passed = received;
    return 0;
}
