/* A process of this machine, seen from another one that need not be its parent: which one it is, whether
 * it still runs, and how it ended. All functions may be called from any thread. */
#ifndef TD_OS_PROCESS_H
#define TD_OS_PROCESS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/types.h>

/** What /proc/PID/stat says. */
struct td__process_stat {
    char state; /* 'R', 'S', 'T' (stopped), 'Z', … */
    int parent;
    bool exiting;     /* it has begun to end */
    uint64_t started; /* ticks since the boot */
    int exit_code;    /* a wait status, while it is a zombie */
};

/** False where there is no such process, or no /proc. */
bool td__process_stat(int pid, struct td__process_stat *stat);

/** The state alone; 0 where it is not known. */
char td__process_state(int pid);

/** A process, told apart from another one that gets its pid later. */
struct td__process_id {
    uint64_t space; /* the boot of the machine, and the namespace of the pid */
    int pid;
    uint64_t started; /* ticks since the boot */
};

/** Finds the identity of the process that has `pid` now; false where there is none, or no /proc. */
bool td__process_identify(int pid, struct td__process_id *id);

bool td__process_id_equal(const struct td__process_id *a, const struct td__process_id *b);

/** This process's user as the parent of its user namespace counts users: two containers may both have a user 0 or 1000
 *  that are not the same one. */
uint32_t td__user_outside(void);

/** A number that differs from boot to boot of this machine. */
uint64_t td__boot_number(void);

/** The boot's name as the kernel gives it; false, and "", where it gives none. */
bool td__boot_name(char name[64]);

/** Opens a pidfd (close-on-exec) of the process `pid`, for poll(): it is readable from the process's end
 *  on. -1 where it has ended, or the system has no pidfds: *ended, which may be NULL, says which. */
int td__process_watch(int pid, bool *ended);

/** The same for the process `id`, which is in the caller's `space`. */
int td__process_watch_id(const struct td__process_id *id, bool *ended);

/** Ends the process of `pidfd` by SIGKILL, also if it is stopped. 0, or an errno; ESRCH if it has ended. */
int td__process_kill(int pidfd);

/** Waits up to `timeout_ms` for the process of `pidfd` to end; false where it has not, or `pidfd` is -1. */
bool td__process_has_ended(int pidfd, int timeout_ms);

enum { TD__STATUS_UNKNOWN = -1 };

/** The wait status of a process that has ended. It comes from /proc as long as its parent has not waited
 *  for it, and from the kernel afterwards (Linux 6.15 and later). `pidfd` was opened while the process
 *  ran. TD__STATUS_UNKNOWN where neither has it, or `pidfd` is -1. */
int td__process_wait_status(int pid, int pidfd);

/** "was killed by SIGKILL", "exited with code 3", "has ended" for TD__STATUS_UNKNOWN. */
void td__wait_status_text(int wait_status, char *text, size_t room);

/* Child processes that cannot outlive their parent. */

/* How a child starts. NULL members are inherited from the parent. */
struct td__child_spec {
    const char *path; /* the file to execute; not looked up */
    char *const *argv;
    char *const *envp;
    int standard[3];      /* become its standard input, output and error; -1: the parent's stays */
    int keep[2];          /* descriptors that stay open; -1: none */
    bool parents_group;   /* stay in the parent's process group */
    const sigset_t *mask; /* its signal mask */
    const sigset_t *default_signals; /* signals that it gets back with their default action */
    const struct rlimit *file_limit; /* its RLIMIT_NOFILE */
    const void *cpus;                /* the CPUs it may run on, as sched_setaffinity() takes them */
    size_t cpus_size;
    int exit_pipe; /* -1, or a descriptor that it keeps open, under a high number: the system closes
                    high ones first, so its other end notices the child's end before any process
                    that is connected to the child */
};

/**
 * Starts a child in a process group of its own, whose number is the child's pid, unless the specification says
 * otherwise. It is killed when the calling thread ends. A file without a known format is given to /bin/sh, as execvp() does.
 *
 * Returns when the program is running: 0; or an errno, and *step says in a word what went wrong
 * ("execve", "vfork", …). Nothing is left running then.
 */
int td__child_start(const struct td__child_spec *spec, pid_t *pid, const char **step);

/** Makes the calling process die with `signal` when its parent, which had the pid `parent`, dies.
 *  0, or an errno: ESRCH when the parent is gone already. For the child's side of a fork(). */
int td__die_with_parent(pid_t parent, int signal);

#endif
