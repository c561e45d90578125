/* SIGXFSZ held back; see file_limit.h. The signal goes to the thread that has written, so that blocking it
 * there is enough, whatever other threads do. */
#include "base/file_limit.h"

#include <errno.h>
#include <pthread.h>
#include <stddef.h>
#include <time.h>

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

void td__file_limit_enter(struct td__file_limit *limit)
{
    int kept = errno;
    sigset_t set = the_signal();
    pthread_sigmask(SIG_BLOCK, &set, &limit->before);
    limit->pending = is_pending();
    errno = kept;
}

void td__file_limit_leave(struct td__file_limit *limit)
{
    int kept = errno;
    sigset_t set = the_signal();
    struct timespec now = {0};
    if (!limit->pending && is_pending())
        while (sigtimedwait(&set, NULL, &now) < 0 && errno == EINTR)
            ;
    pthread_sigmask(SIG_SETMASK, &limit->before, NULL);
    errno = kept;
}
