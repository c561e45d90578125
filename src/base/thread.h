/* Threads and forks: condition variables on the monotonic clock, threads that block all signals, a fork
 * generation, what makes forks fail, and descriptors that a forked child must not keep. */
#ifndef TD_BASE_THREAD_H
#define TD_BASE_THREAD_H

#include "base/clock.h"

#include <pthread.h>

/** Initialises a condition variable that td__cond_wait() can wait on. */
void td__cond_init(pthread_cond_t *cond);

/** Waits until the condition is signalled or the deadline has passed: false in the latter case. */
bool td__cond_wait(pthread_cond_t *cond, pthread_mutex_t *mutex, td__deadline deadline);

/** Starts a thread with all signals blocked except faults (SIGSEGV, …). Threads of the library never read the
 *  environment, not even for the log: the program may change it at any time, and getenv() takes no lock.
 *  Returns 0 or an errno. */
int td__thread_start(pthread_t *thread, const char *name, void *(*run)(void *), void *arg);

/** The number of forks between the first process and this one. An object that does not survive a fork (a
 *  connection, a thread) stores it at creation, and fails when it has changed. */
unsigned td__fork_generation(void);

/** Called by a component once a fork of this process would not work from now on, as with a device whose driver does
 *  not survive it: td_spawn() then starts its processes by exec. `why` is a clause for an error text ("cuda:0 was used
 *  in this process"), which is copied; the first one stays. From any thread. */
void td__fork_breaks(const char *why);

/** What the first td__fork_breaks() gave, in this process or in one that it is a fork of; NULL: forks work. */
const char *td__fork_obstacle(void);

/* ---- Descriptors that a forked child must not keep (fork.c) --------------------------------------
 *
 * The peer of a connection detects the end of a process when the last copy of its socket is closed. A forked
 * child, such as the worker of a data loader, has a copy of each, so that peers would not detect the parent's
 * death while the child lives; a listening socket would accept connections that no process serves, and a file
 * lock would stay. So the child replaces its copies by unconnected sockets before fork() returns, which keeps
 * the numbers in use until they are closed. exec() closes all of them anyway (O_CLOEXEC). */

/** Block fork() while a descriptor is created and excluded. Nothing in between may block. */
void td__fork_hold(void);
void td__fork_release(void);

/** Makes forked children replace `fd` until it is closed; close() needs no other call. Called between
 *  td__fork_hold() and td__fork_release(). A negative `fd` does nothing. */
void td__fork_exclude(int fd);

#endif
