/* Threads; see thread.h. */
#include "base/thread.h"

#include "base/host.h"

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>

static unsigned fork_generation;
static _Atomic(const char *) fork_obstacle;

static void count_fork(void)
{
    fork_generation++; /* only the forking thread exists in the child */
}

__attribute__((constructor)) static void watch_forks(void)
{
    pthread_atfork(NULL, NULL, count_fork);
}

unsigned td__fork_generation(void)
{
    return fork_generation;
}

void td__fork_breaks(const char *why)
{
    static char text[96];
    static atomic_flag taken = ATOMIC_FLAG_INIT;
    if (atomic_flag_test_and_set(&taken))
        return;
    snprintf(text, sizeof text, "%s", why);
    atomic_store(&fork_obstacle, text);
}

const char *td__fork_obstacle(void)
{
    return atomic_load(&fork_obstacle);
}

void td__cond_init(pthread_cond_t *cond)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(cond, &attributes);
    pthread_condattr_destroy(&attributes);
}

bool td__cond_wait(pthread_cond_t *cond, pthread_mutex_t *mutex, td__deadline deadline)
{
    if (deadline == TD__NEVER)
        return pthread_cond_wait(cond, mutex) == 0;
    struct timespec until = td__timespec(deadline);
    return pthread_cond_timedwait(cond, mutex, &until) != ETIMEDOUT;
}

int td__thread_start(pthread_t *thread, const char *name, void *(*run)(void *), void *arg)
{
    /* Not blocked: for a blocked fault the kernel ends the process without calling the handler with which a
     * program or a sanitizer reports it. */
    static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS};
    sigset_t all, before;
    td__host_name(); /* the log reads the environment here, not in a thread of the library */
    sigfillset(&all);
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++)
        sigdelset(&all, faults[i]);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(thread, NULL, run, arg);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!error)
        pthread_setname_np(*thread, name);
    return error;
}
