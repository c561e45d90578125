/* One worker process: starting it, noticing its end, and ending it. */
#ifndef TD_LAUNCH_WORKER_H
#define TD_LAUNCH_WORKER_H

#include "launch/numa.h"
#include "launch/worker_program.h"
#include "launch/stream.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/types.h>

struct td__worker {
    int rank;
    int local_rank;
    struct td__stream streams[2]; /* TD__OUT and TD__ERR */

    pid_t pid;    /* also the number of its process group; 0 before it was started */
    bool running; /* started, and not reaped yet */
    bool told;    /* it was sent a signal to end, while it was running */
    int status;   /* of waitpid(), once it has ended */
    int restarts; /* how often it was started again by itself … */
    bool again;   /* … and it is to be now */
    int64_t started_ns, ended_ns;
    bool end_noted;    /* in the book of the flight recorder */
    int64_t parted_ns; /* when it began to end; 0 as long as that is not known */

    int exit_pipe; /* hangs up when the worker begins to end … */
    uv_poll_t exit_pipe_poll;
    bool exit_pipe_watched; /* … where there is one */

    int pidfd; /* -1 where the system has none */
    uv_poll_t poll;
    void (*on_end)(struct td__worker *worker); /* called when pidfd says that it can be reaped */
    void *data;                                /* the owner's */
};

/** What all workers have in common. */
struct td__worker_setup {
    uv_loop_t *loop;
    const struct td__worker_program *program;
    const sigset_t *mask; /* as in os/child.h … */
    const sigset_t *default_signals;
    const struct rlimit *file_limit;
};

/**
 * Starts a worker. Its streams are set up but for what td__stream_start() does; `envp` is its
 * environment, `input` its standard input, `cpus` NULL or where it may run.
 *
 * TD_ERR_SYSTEM: the sentence says why; *exec_error is an errno of execve(), or 0 when it was
 * something else.
 */
td_status td__worker_start(struct td__worker *worker, const struct td__worker_setup *setup,
                           char *const *envp, int input, const struct td__cpus *cpus,
                           int *exec_error);

/** Reaps the worker when it has ended; true when that was so, or has been before. */
bool td__worker_reap(struct td__worker *worker);

/** Sends a signal to a running worker and all of its process group. */
void td__worker_signal(struct td__worker *worker, int signal);

/** True when the worker, not reaped yet, is past the point of no return. */
bool td__worker_is_dying(const struct td__worker *worker);

/** True while the worker, or another process of its group that was told to end with it, is there. */
bool td__worker_lingers(const struct td__worker *worker);

/** Closes what it has open. The handles are closed once the loop has run again. */
void td__worker_close(struct td__worker *worker);

#endif
