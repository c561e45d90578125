/* Threads and forks: condition variables on the monotonic clock, threads that block all signals, a fork
 * generation, and descriptors that a forked child must not keep. */
#ifndef TD_BASE_THREAD_H
#define TD_BASE_THREAD_H

#include "base/clock.h"

#include <pthread.h>

/** Initialises a condition variable that td__cond_wait() can wait on. */
void td__cond_init(pthread_cond_t *cond);

/** Waits until the condition is signalled or the deadline has passed: false in the latter case. */
bool td__cond_wait(pthread_cond_t *cond, pthread_mutex_t *mutex, td__deadline deadline);

/** Starts a thread with all signals blocked but those of faults (SIGSEGV, …). Threads of the library do not
 *  read the environment, not even for the log: the program may change it at any time, and getenv() takes no
 *  lock. Returns 0 or an errno. */
int td__thread_start(pthread_t *thread, const char *name, void *(*run)(void *), void *arg);

/** The number of forks between the first process and this one. An object that does not survive a fork
 *  (a connection, a thread) stores it when it is created, and fails once it has changed. */
unsigned td__fork_generation(void);

/* ---- Descriptors that a forked child must not keep (fork.c) --------------------------------------
 *
 * The peer of a connection notices the end of a process when the last copy of its socket is closed. A forked
 * child, such as the worker of a data loader, has a copy of each, so the death of its parent would go
 * unnoticed as long as the child lives; a listening socket would accept connections that no one serves, and a
 * file lock would stay. So the child replaces its copies by unconnected sockets before fork() returns, which
 * keeps the numbers in use until they are closed. exec() closes all of them anyway (O_CLOEXEC). */

/** Hold off fork() while a descriptor is created and excluded. Nothing in between may block. */
void td__fork_hold(void);
void td__fork_release(void);

/** Forked children replace `fd` until it is closed, which need not be reported. Between td__fork_hold() and
 *  td__fork_release(). A negative `fd` does nothing. */
void td__fork_exclude(int fd);

#endif
