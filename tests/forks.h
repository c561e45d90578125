/* Forks of a test: child processes that run a function of the test, and what they need for a rendezvous.
 *
 * A fork is killed with the process that started it. One that ends badly (a failed check, another
 * exit code than 0, a signal that fork_kill() has not sent) fails the test as soon as the latter
 * waits for any fork. */
#ifndef TANDEM_TESTS_FORKS_H
#define TANDEM_TESTS_FORKS_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

/** Starts a fork that runs fn(arg) and exits. */
pid_t fork_start(void (*fn)(void *arg), void *arg);

/** Waits until it has ended. */
void fork_join(pid_t pid);

/** Whether it has ended. */
bool fork_has_ended(pid_t pid);

/** Ends it with `signal`, and waits for its end. */
void fork_kill(pid_t pid, int signal);

/** Runs fn(rank, arg) for the ranks 0 to count-1, a fork each, and waits until all have ended. */
void fork_ranks(int count, void (*fn)(int rank, void *arg), void *arg);

/** Zeroed memory that this process and the forks it makes from now on share. */
void *fork_shared(size_t size);

/** A TCP port that the system gives to no other socket while this process or a fork of it lives. A
 *  server that sets SO_REUSEADDR can listen there, in several processes one after another. */
int reserve_port(void);

/** Sets environment variables from a list of "NAME=value" that ends with NULL; "NAME=" removes. */
void set_variables(const char *const *list);

#define VARIABLES(...) set_variables((const char *const[]){__VA_ARGS__, NULL})

/** Sets one to a number. */
void set_number(const char *name, int number);

#endif
