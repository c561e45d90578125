/* Sockets made of memory; see memory_socket.h.
 *
 * A descriptor of ours is a number that the system never gives. One set of interests serves for all epoll
 * descriptors: a target has one at a time. */
#include "memory_socket.h"

#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { FIRST = 1 << 24, SOCKETS = 16, EPOLL = FIRST + SOCKETS, EVENT, PARTS = 8 };

static struct {
    bool open;
    bool ended;
    struct {
        const uint8_t *data;
        size_t size;
    } parts[PARTS];
    size_t at, total;
    size_t piece;
    bool watched;
    struct epoll_event interest;
} sockets[SOCKETS];

static uint64_t event_count;
static bool event_watched;
static struct epoll_event event_interest;

/* The number of a socket; -1: it is the system's. */
static int number_of(int fd)
{
    int number = fd - FIRST;
    return number >= 0 && number < SOCKETS && sockets[number].open ? number : -1;
}

int memory_socket(const uint8_t *data, size_t size, size_t piece)
{
    int number = 0;
    while (number < SOCKETS && sockets[number].open)
        number++;
    if (number == SOCKETS)
        return -1;
    memset(&sockets[number], 0, sizeof sockets[number]);
    sockets[number].open = true;
    sockets[number].piece = piece;
    memory_socket_more(FIRST + number, data, size);
    return FIRST + number;
}

void memory_socket_more(int fd, const uint8_t *data, size_t size)
{
    int number = number_of(fd), part = 0;
    if (number < 0 || !size)
        return;
    if (sockets[number].at == sockets[number].total) { /* all was read */
        memset(sockets[number].parts, 0, sizeof sockets[number].parts);
        sockets[number].at = sockets[number].total = 0;
    }
    while (part < PARTS && sockets[number].parts[part].size)
        part++;
    if (part == PARTS)
        return;
    sockets[number].parts[part].data = data;
    sockets[number].parts[part].size = size;
    sockets[number].total += size;
}

void memory_socket_end(int fd)
{
    int number = number_of(fd);
    if (number >= 0)
        sockets[number].ended = true;
}

int memory_socket_reset(void)
{
    int open = 0;
    for (int i = 0; i < SOCKETS; i++)
        open += sockets[i].open;
    memset(sockets, 0, sizeof sockets);
    event_count = 0;
    event_watched = false;
    return open;
}

/* ---- Receiving and sending ------------------------------------------------------------------- */

static size_t copy_out(int number, size_t at, char *to, size_t size)
{
    size_t done = 0, from = 0;
    for (int part = 0; part < PARTS && done < size; part++) {
        size_t length = sockets[number].parts[part].size;
        if (at < from + length) {
            size_t here = from + length - at < size - done ? from + length - at : size - done;
            memcpy(to + done, sockets[number].parts[part].data + (at - from), here);
            done += here;
            at += here;
        }
        from += length;
    }
    return done;
}

static ssize_t take(int number, char *to, size_t size, size_t *left, bool peek)
{
    size_t there = sockets[number].total - sockets[number].at;
    if (size > *left)
        size = *left;
    size_t got = copy_out(number, sockets[number].at, to, size < there ? size : there);
    *left -= got;
    if (!peek)
        sockets[number].at += got;
    return (ssize_t)got;
}

static ssize_t nothing_there(int number)
{
    if (sockets[number].ended)
        return 0;
    errno = EAGAIN;
    return -1;
}

ssize_t recv(int fd, void *data, size_t size, int flags)
{
    int number = number_of(fd);
    if (number < 0)
        return syscall(SYS_recvfrom, fd, data, size, flags, NULL, NULL);
    size_t left = sockets[number].piece ? sockets[number].piece : SIZE_MAX;
    if (sockets[number].at == sockets[number].total)
        return nothing_there(number);
    return take(number, data, size, &left, flags & MSG_PEEK);
}

ssize_t recvmsg(int fd, struct msghdr *message, int flags)
{
    int number = number_of(fd);
    if (number < 0)
        return syscall(SYS_recvmsg, fd, message, flags);
    size_t left = sockets[number].piece ? sockets[number].piece : SIZE_MAX;
    ssize_t total = 0;
    if (sockets[number].at == sockets[number].total)
        return nothing_there(number);
    for (size_t i = 0; i < message->msg_iovlen; i++)
        total += take(number, message->msg_iov[i].iov_base, message->msg_iov[i].iov_len, &left,
                      flags & MSG_PEEK);
    return total;
}

ssize_t send(int fd, const void *data, size_t size, int flags)
{
    return number_of(fd) >= 0 ? (ssize_t)size : syscall(SYS_sendto, fd, data, size, flags, NULL, 0);
}

ssize_t sendmsg(int fd, const struct msghdr *message, int flags)
{
    ssize_t total = 0;
    if (number_of(fd) < 0)
        return syscall(SYS_sendmsg, fd, message, flags);
    for (size_t i = 0; i < message->msg_iovlen; i++)
        total += (ssize_t)message->msg_iov[i].iov_len;
    return total;
}

/* ---- Waiting --------------------------------------------------------------------------------- */

static bool is_readable(int number)
{
    return sockets[number].at < sockets[number].total || sockets[number].ended;
}

/* Without one of ours it is the system's; with one it never waits. */
int poll(struct pollfd *fds, nfds_t count, int timeout)
{
    int ready = 0;
    bool ours = false;
    for (nfds_t i = 0; i < count; i++)
        ours |= number_of(fds[i].fd) >= 0;
    if (!ours) { /* ppoll(), since not every processor's Linux has poll() */
        struct timespec limit = {timeout / 1000, timeout % 1000 * 1000000L};
        return (int)syscall(SYS_ppoll, fds, count, timeout < 0 ? NULL : &limit, NULL, 0);
    }
    for (nfds_t i = 0; i < count; i++) {
        int number = number_of(fds[i].fd);
        fds[i].revents = 0;
        if (number < 0)
            continue;
        fds[i].revents = (short)((POLLOUT | (is_readable(number) ? POLLIN : 0) |
                                  (sockets[number].ended ? POLLRDHUP : 0)) &
                                 fds[i].events);
        ready += fds[i].revents != 0;
    }
    return ready;
}

int epoll_create1(int flags)
{
    (void)flags;
    return EPOLL;
}

int eventfd(unsigned count, int flags)
{
    (void)flags;
    event_count = count;
    return EVENT;
}

int epoll_ctl(int epoll, int op, int fd, struct epoll_event *event)
{
    int number = number_of(fd);
    (void)epoll;
    if (fd == EVENT) {
        event_watched = op != EPOLL_CTL_DEL;
        if (event)
            event_interest = *event;
        return 0;
    }
    if (number < 0) {
        errno = EBADF;
        return -1;
    }
    sockets[number].watched = op != EPOLL_CTL_DEL;
    if (event)
        sockets[number].interest = *event;
    return 0;
}

int epoll_wait(int epoll, struct epoll_event *events, int most, int timeout)
{
    int count = 0;
    (void)epoll;
    (void)timeout;
    if (event_watched && event_count && count < most)
        events[count++] = (struct epoll_event){.events = EPOLLIN, .data = event_interest.data};
    for (int i = 0; i < SOCKETS && count < most; i++) {
        if (!sockets[i].open || !sockets[i].watched)
            continue;
        uint32_t found = (is_readable(i) ? EPOLLIN : 0) | EPOLLOUT;
        found &= sockets[i].interest.events;
        if (found)
            events[count++] = (struct epoll_event){.events = found,
                                                   .data = sockets[i].interest.data};
    }
    return count;
}

int epoll_pwait2(int epoll, struct epoll_event *events, int most, const struct timespec *timeout,
                 const sigset_t *mask)
{
    (void)mask;
    int count = epoll_wait(epoll, events, most, 0);
    if (!count && timeout)
        nanosleep(timeout, NULL);
    return count;
}

ssize_t read(int fd, void *data, size_t size)
{
    if (fd != EVENT)
        return syscall(SYS_read, fd, data, size);
    memcpy(data, &event_count, sizeof event_count);
    event_count = 0;
    return sizeof event_count;
}

ssize_t write(int fd, const void *data, size_t size)
{
    if (fd != EVENT)
        return syscall(SYS_write, fd, data, size);
    event_count++;
    return (ssize_t)size;
}

/* ---- The clock ------------------------------------------------------------------------------- */

enum { LOOK_NS = 100000, SECOND = 1000000000 };

static bool clock_is_ours;
static int64_t clock_ns = SECOND;

void memory_clock(bool on)
{
    clock_is_ours = on;
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    if (!clock_is_ours)
        return (int)syscall(SYS_clock_gettime, clock, now);
    clock_ns += LOOK_NS;
    *now = (struct timespec){.tv_sec = clock_ns / SECOND, .tv_nsec = clock_ns % SECOND};
    return 0;
}

int nanosleep(const struct timespec *time, struct timespec *left)
{
    if (!clock_is_ours)
        return (int)syscall(SYS_nanosleep, time, left);
    clock_ns += (int64_t)time->tv_sec * SECOND + time->tv_nsec;
    return 0;
}

/* ---- The rest -------------------------------------------------------------------------------- */

int close(int fd)
{
    int number = number_of(fd);
    if (number >= 0)
        sockets[number].open = false;
    else if (fd != EPOLL && fd != EVENT)
        return (int)syscall(SYS_close, fd);
    return 0;
}

int shutdown(int fd, int how)
{
    return number_of(fd) >= 0 ? 0 : (int)syscall(SYS_shutdown, fd, how);
}

int getsockopt(int fd, int level, int name, void *value, socklen_t *size)
{
    if (number_of(fd) < 0)
        return (int)syscall(SYS_getsockopt, fd, level, name, value, size);
    errno = EOPNOTSUPP;
    return -1;
}

int setsockopt(int fd, int level, int name, const void *value, socklen_t size)
{
    return number_of(fd) >= 0 ? 0 : (int)syscall(SYS_setsockopt, fd, level, name, value, size);
}

static int unix_name(struct sockaddr *address, socklen_t *size)
{
    address->sa_family = AF_UNIX;
    *size = sizeof address->sa_family;
    return 0;
}

int getsockname(int fd, struct sockaddr *address, socklen_t *size)
{
    return number_of(fd) >= 0 ? unix_name(address, size)
                              : (int)syscall(SYS_getsockname, fd, address, size);
}

int getpeername(int fd, struct sockaddr *address, socklen_t *size)
{
    return number_of(fd) >= 0 ? unix_name(address, size)
                              : (int)syscall(SYS_getpeername, fd, address, size);
}

int ioctl(int fd, unsigned long request, ...)
{
    va_list args;
    va_start(args, request);
    void *value = va_arg(args, void *);
    va_end(args);
    if (number_of(fd) < 0)
        return (int)syscall(SYS_ioctl, fd, request, value);
    *(int *)value = 0; /* nothing is on its way */
    return 0;
}
