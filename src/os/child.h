/* Child processes that cannot outlive their parent. */
#ifndef TD_OS_CHILD_H
#define TD_OS_CHILD_H

#include <signal.h>
#include <stddef.h>
#include <sys/resource.h>
#include <sys/types.h>

/* What a child is and how it starts. NULL for the parts that stay as they are in the parent. */
struct td__child_spec {
    const char *path; /* the file to execute; not looked up */
    char *const *argv;
    char *const *envp;
    int standard[3];                 /* become its standard input, output and error */
    const sigset_t *mask;            /* its signal mask */
    const sigset_t *default_signals; /* signals that it gets back with their default action */
    const struct rlimit *file_limit; /* its RLIMIT_NOFILE */
    const void *cpus;                /* the CPUs it may run on, as sched_setaffinity() takes them */
    size_t cpus_size;
    int exit_pipe; /* -1, or a descriptor that it keeps open, under a high number: the system closes
                    high ones first, so its other end notices the child's end before any process
                    that is connected to the child */
};

/**
 * Starts a child in a process group of its own, whose number is the child's pid. It is killed when
 * the calling thread ends. A file without a known format is given to /bin/sh, as execvp() does.
 *
 * Returns when the program is running: 0; or an errno, and *step says in a word what went wrong
 * ("execve", "fork", …). Nothing is left running then.
 */
int td__child_start(const struct td__child_spec *spec, pid_t *pid, const char **step);

/** Makes the calling process die with `signal` when its parent, which had the pid `parent`, dies.
 *  0, or an errno: ESRCH when the parent is gone already. For the child's side of a fork(). */
int td__die_with_parent(pid_t parent, int signal);

#endif
