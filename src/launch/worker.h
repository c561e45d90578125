/* One worker process: starting it, noticing its end, and ending it. */
#ifndef TD_LAUNCH_WORKER_H
#define TD_LAUNCH_WORKER_H

#include "launch/numa.h"
#include "launch/stream.h"
#include "launch/options.h"
#include "os/process.h"

struct td__worker {
    int slot;  /* its place in the attempt, and in the book of the flight recorder */
    int spare; /* -1: it has a rank; else its number among the spares (spares.h) */
    int rank;
    int local_rank;
    struct td__stream streams[2]; /* TD__OUT and TD__ERR */

    pid_t pid;           /* also the number of its process group; 0 before it was started */
    bool running;        /* started, and not reaped yet */
    bool signalled;      /* it was sent a signal to end, while it was running */
    int status;          /* of waitpid(), once it has ended */
    int restarts;        /* how often it was started again by itself … */
    int short_lives;     /* … how often in a row it had died soon after that … */
    bool in_time;        /* no other one had ended with exit code 0 before … */
    bool late;           /* … as it had when it was started again, and asked the others to admit it: no failure */
    bool restart_wanted; /* … and it is to be started again … */
    int64_t restart_ns;  /* … not before that time */
    int64_t started_ns, ended_ns;
    bool end_noted;     /* in the book of the flight recorder */
    int64_t exiting_ns; /* when it began to end; 0 as long as that is not known */

    int exit_pipe; /* hangs up when the worker begins to end; -1 where there is none */
    uv_poll_t exit_pipe_poll;

    /* It was started as a spare; otherwise -1. */
    int link;    /* to the process … */
    int far_end; /* … which has this end, under the same number */
    bool waits;  /* for a rank */
    uv_poll_t link_poll;

    /* The launcher of another host (hosts.h); otherwise NULL and -1. */
    const struct td__host *host;
    int control;          /* its control pipe */
    bool greeted, parted; /* it has said that it has begun, and that it ends in order … */
    char refusal[1024];   /* … or why it cannot begin */
    char note[1024];      /* why it ends, when that is because of another host */

    int pidfd; /* -1 where the system has none */
    uv_poll_t poll;
    void (*on_end)(struct td__worker *worker); /* called when pidfd says that it can be reaped */
    void *data;                                /* the owner's */
};

/**
 * Starts a worker. Its streams are set up but for what td__stream_start() does; `spec` but for the
 * descriptors of its output and the exit pipe.
 *
 * TD_ERR_SYSTEM: the sentence says why; *exec_error is an errno of execve(), or 0 when it was
 * something else.
 */
td_status td__worker_start(struct td__worker *worker, uv_loop_t *loop, struct td__child_spec *spec,
                           int *exec_error);

/** Reaps the worker when it has ended; true when that was so, or has been before. */
bool td__worker_reap(struct td__worker *worker);

/** Sends a signal to a running worker and all of its process group; `to_end`: it is meant to end. */
void td__worker_signal(struct td__worker *worker, int signal, bool to_end);

/** True when the worker, not reaped yet, has begun to end. */
bool td__worker_is_dying(const struct td__worker *worker);

/** Closes what it has open. The handles are closed once the loop has run again. */
void td__worker_close(struct td__worker *worker);

/* ---- Reports on workers that failed ---------------------------------------------------------- */

/** True when the worker, which is no spare, was reaped, and has ended with exit code 0. */
bool td__worker_ended_well(const struct td__worker *worker);

/** True when the worker, which is no spare, was reaped, and has failed without being signalled. */
bool td__worker_has_failed(const struct td__worker *worker);

/** The exit code of tdrun for a status of waitpid(): the code, or 128 plus the signal's number. */
int td__exit_code(int status);

/** "exit code 3", "SIGSEGV (core dumped)". */
void td__describe_status(int status, char *text, size_t room);

/** One sentence on how a worker ended: "rank 1 (local rank 1, pid 77) failed with exit code 3 after
 *  0.42 s". `where` goes into the brackets, as " on node 1"; "" for nothing. */
void td__describe_failure(const struct td__worker *worker, const char *where, char *text,
                          size_t room);

/** Says how a worker failed, with the last lines that it wrote. `sentence` is that of above. */
void td__report_failure(struct td__console *console, const struct td__worker *worker,
                        const char *sentence);

/** Says which others had failed by themselves when `first` did, where there are any. */
void td__report_others(struct td__console *console, const struct td__worker *workers, int count,
                       const struct td__worker *first);

#endif
