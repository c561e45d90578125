/* SIGXFSZ blocked; see file_limit.h. The kernel sends the signal to the thread that writes, so that blocking it
 * there is enough. */
#include "base/file_limit.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <sys/resource.h>
#include <unistd.h>

struct held {
    bool held;    /* there is a limit, and the signal is blocked */
    bool pending; /* since before the call */
    sigset_t before;
};

static sigset_t the_signal(void)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGXFSZ);
    return set;
}

static bool is_pending(void)
{
    sigset_t pending;
    return !sigpending(&pending) && sigismember(&pending, SIGXFSZ) == 1;
}

static struct held hold_signal(void)
{
    struct rlimit limit;
    struct held held = {.held = !getrlimit(RLIMIT_FSIZE, &limit) &&
                                limit.rlim_cur != RLIM_INFINITY};
    if (held.held) {
        sigset_t set = the_signal();
        pthread_sigmask(SIG_BLOCK, &set, &held.before);
        held.pending = is_pending();
    }
    return held;
}

/* Discards a signal that became pending since; keeps errno. */
static void release_signal(const struct held *held)
{
    int kept = errno;
    sigset_t set = the_signal();
    struct timespec now = {0};
    if (held->held && !held->pending && is_pending())
        while (sigtimedwait(&set, NULL, &now) < 0 && errno == EINTR)
            ;
    if (held->held)
        pthread_sigmask(SIG_SETMASK, &held->before, NULL);
    errno = kept;
}

ssize_t td__file_write(int fd, const void *data, size_t size)
{
    struct held held = hold_signal();
    ssize_t written = write(fd, data, size);
    release_signal(&held);
    return written;
}

int td__file_write_all(int fd, const void *data, size_t size)
{
    for (const char *at = data; size;) {
        ssize_t written = td__file_write(fd, at, size);
        if (written >= 0) {
            at += written;
            size -= (size_t)written;
        } else if (errno == EAGAIN) {
            struct pollfd writable = {.fd = fd, .events = POLLOUT};
            poll(&writable, 1, -1);
        } else if (errno != EINTR) {
            return errno;
        }
    }
    return 0;
}

ssize_t td__file_pwrite(int fd, const void *data, size_t size, off_t at)
{
    struct held held = hold_signal();
    ssize_t written = pwrite(fd, data, size, at);
    release_signal(&held);
    return written;
}

int td__file_truncate(int fd, off_t size)
{
    struct held held = hold_signal();
    int result = ftruncate(fd, size);
    release_signal(&held);
    return result;
}

int td__file_allocate(int fd, off_t size)
{
    struct held held = hold_signal();
    int error = posix_fallocate(fd, 0, size);
    release_signal(&held);
    return error;
}
