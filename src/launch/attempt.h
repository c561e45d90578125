/* An attempt: all workers of this node, from one start to the end of the last of them. */
#ifndef TD_LAUNCH_ATTEMPT_H
#define TD_LAUNCH_ATTEMPT_H

#include "launch/node.h"
#include "launch/worker.h"
#include "os/flight.h"

#include <sys/resource.h>

/** What is the same in all attempts. */
struct td__attempt_setup {
    /* Set by the caller. */
    const struct td__run_options *options;
    const struct td__job_secret *secret;
    const struct td__node_world *world;
    struct td__console *console;
    struct td__worker_setup worker;                   /* but for the limit of files */
    void (*on_worker_end)(struct td__worker *worker); /* it can be reaped */
    void (*on_log_error)(struct td__stream *stream);
    void *data; /* of the workers and streams */

    /* Made by td__attempt_setup_open(). */
    struct td__logs logs;     /* where output is kept, where some is */
    struct td__cpus *cpus;    /* one for each worker; NULL: they may run anywhere */
    struct rlimit file_limit; /* as it was before it was raised */
    int null;                 /* a descriptor of /dev/null */
};

/** Prepares what the workers need: log directories, CPUs, descriptors. Says on the console where
 *  output is kept when the user did not choose. */
td_status td__attempt_setup_open(struct td__attempt_setup *setup);

void td__attempt_setup_close(struct td__attempt_setup *setup);

struct td__attempt {
    const struct td__attempt_setup *setup;
    int number; /* from 0: how many starts there were before */
    struct td__worker *workers;
    int count; /* of workers; 0 when there is no attempt */
    struct td__flight_book
        book; /* of their last operations; its `map` is NULL where there is none */
};

/** Starts all workers. When one cannot be started, the others are running: end them. *exec_error as
 *  td__worker_start() has it. */
td_status td__attempt_start(struct td__attempt *attempt, const struct td__attempt_setup *setup,
                            int number, int *exec_error);

/** Closes all that a worker which has ended had open, before it is started again. Runs the event loop for a
 *  moment, so it must not be called from it. */
void td__attempt_retire(struct td__attempt *attempt, struct td__worker *worker);

/** Starts a retired worker again, alone and with its rank: a new number for the log files, an empty page in
 *  the book. When it fails, the worker has ended as before. */
td_status td__attempt_restart(struct td__attempt *attempt, struct td__worker *worker);

/** Sends a signal to all workers that are running. */
void td__attempt_signal(struct td__attempt *attempt, int signal);

/** Reaps processes that were adopted. The end of a worker is noticed by its pidfd, so that
 *  the order is right; where there is no pidfd it is noticed here. */
void td__attempt_reap(struct td__attempt *attempt);

/**
 * The worker that failed first: among those that have failed without being signalled, and, with
 * `or_dying`, those that are about to end, whose status is not known yet. NULL when there is none.
 */
struct td__worker *td__attempt_first_failure(struct td__attempt *attempt, bool or_dying);

/** How many workers are running. */
int td__attempt_running(const struct td__attempt *attempt);

/** True while a worker, or a process that was signalled with it, runs. */
bool td__attempt_lingers(const struct td__attempt *attempt);

/** Puts the ends of workers that were reaped into the book. */
void td__attempt_note_ends(struct td__attempt *attempt);

/** Goes on with output that had to wait for the console. */
void td__attempt_resume_output(struct td__attempt *attempt);

/** Kills whatever descends from this process, passes on the last output, and frees the attempt. */
void td__attempt_finish(struct td__attempt *attempt);

/* ---- The environment of a worker ------------------------------------------------------------- */

/** One start of a worker. */
struct td__environment_start {
    int local_rank;
    int attempt;        /* of all workers, from 0 */
    int restarts;       /* of this one alone, within the attempt */
    const char *flight; /* TANDEM_FLIGHT for its log (os/flight.h), or "" */
};

/** The environment of a worker, ended by NULL, in one piece of memory for free(); NULL without
 *  memory. */
char **td__environment_make(const struct td__run_options *options,
                            const struct td__job_secret *secret, const struct td__node_world *world,
                            const struct td__environment_start *start);

#endif
