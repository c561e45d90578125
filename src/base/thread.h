/* What the library needs of threads beyond pthreads itself: condition variables that wait by the
 * monotonic clock, and a way to notice that the process is a fork. */
#ifndef TD_BASE_THREAD_H
#define TD_BASE_THREAD_H

#include "base/clock.h"

#include <pthread.h>

/** Initialises a condition variable that td__cond_wait() can wait on. */
void td__cond_init(pthread_cond_t *cond);

/** Waits until the condition is signalled or the deadline has passed: false in the latter case. */
bool td__cond_wait(pthread_cond_t *cond, pthread_mutex_t *mutex, td__deadline deadline);

/** Starts a thread with all signals blocked, so that they reach the program's own threads; only those of a
 *  fault (SIGSEGV, …) come to whoever has caused it. A thread of the library does not read the environment, not
 *  even for the log: the program may change it at any time, and getenv() knows no lock. Returns 0 or an errno. */
int td__thread_start(pthread_t *thread, const char *name, void *(*run)(void *), void *arg);

/** Counts the forks between the first process and this one. An object that a fork cannot share
 *  (a connection, a thread) remembers it when it is made, and refuses when it has changed. */
unsigned td__fork_generation(void);

#endif
