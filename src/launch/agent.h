/* The agent's state, shared by agent.c (the course of a job), agent_events.c (what can happen
 * meanwhile), attempt.c and environment.c (one start of all workers), agent_outlive.c (what it makes
 * of failures that the others outlive) and agent_postmortem.c. */
#ifndef TD_LAUNCH_AGENT_H
#define TD_LAUNCH_AGENT_H

#include "launch/hosts.h"
#include "launch/supervisor.h"
#include "launch/spares.h"
#include "launch/worker.h"
#include "os/flight.h"
#include "os/orders.h"

/* Why the workers are ended, the graver reasons last. After the first two there may be
 * another attempt. */
enum td__reason {
    TD__REASON_NONE,
    TD__REASON_CHANGED, /* nodes come or go; another attempt follows */
    TD__REASON_FAILED,  /* a worker did, here or on another node */
    TD__REASON_OVER,    /* the job cannot go on: a launcher has ended, a worker cannot start, … */
    TD__REASON_CLOSED,  /* the reader of the output has closed it */
    TD__REASON_SIGNALLED, /* a signal to end */
};

/* All workers of this node, from one start to the end of the last of them. */
struct td__attempt {
    int number;   /* from 0: how many starts there were before … */
    int restarts; /* … because a worker had failed */
    struct td__worker *workers; /* and spares, in any order; `slot` is the place of each */
    int count;                  /* of both; 0 when there is no attempt */
    struct td__flight_book
        book; /* of their last operations; its `map` is NULL where there is none */
};

struct td__agent {
    const struct td__agent_job *job;
    const struct td__run_options *options;
    const struct td__agent_start *start;

    uv_loop_t loop;
    uv_async_t wake;                /* another thread has something: the node, or the console */
    uv_poll_t signal_pipe, control; /* the latter where another host has started this launcher */
    uv_signal_t signals[NSIG];      /* as many as are handled, and SIGCHLD */
    uv_timer_t shutdown, verdict;
    uv_timer_t replacement; /* for the next worker that is to be started again */

    struct td__console console;
    bool console_failed[2]; /* was noticed */
    struct td__node *node;
    bool ready, all_gone;  /* events of the node: the next attempt may start; the job has ended */
    bool between_attempts; /* its events are about the next attempt, and wait for it */
    struct td__node_world world; /* of that attempt */
    char where[32];              /* " on node 1", "" for a job of one node */

    /* The same in all attempts: td__attempt_prepare(). */
    struct td__logs logs;      /* where output is kept, where some is */
    struct td__cpus *cpus;     /* one for each worker; NULL: they may run anywhere */
    struct td__orders *orders; /* what the workers may look at; NULL where there is none … */
    int orders_fd;             /* … or -1 */
    int drain_listener, drain_client; /* of tdrun drain; -1: none */
    uv_poll_t drain_poll;
    bool draining;            /* this node leaves the job */
    struct td__adoption *adoptions; /* ranks of other nodes that spares here are to have … */
    int adopted, adopting;          /* … the first of them have them */
    bool spares_wait;         /* one of them has come to where it waits for a rank */
    bool spares_given_up;     /* the program has no use for them */
    struct rlimit file_limit; /* of the workers; it is higher here */
    int null;                 /* a descriptor of /dev/null */

    struct td__attempt attempt;

    bool postmortem_reported; /* in this attempt */
    enum td__reason reason;
    int code;       /* the exit code that goes with the reason */
    bool killed;    /* the workers were, or their time is over … */
    bool abandoned; /* … and even that has not ended them */
    bool finishing; /* all workers have ended; only output is left to be written … */
    bool unread;    /* … which is not read; that was reported … */
    bool hurry;     /* … and there is no time to wait for it */
};

/** Makes the event loop, and watches the signal pipe and signals. */
td_status td__agent_open_loop(struct td__agent *agent);

/** Makes the loop look at the events of other threads. For any thread; `agent` is a td__agent. */
void td__agent_wake(void *agent);

/** Ends the workers for a reason, unless there is a graver one already: `signal` first, SIGKILL when
 *  the time is over. `code` is the exit code that goes with it. */
void td__agent_begin_stop(struct td__agent *agent, enum td__reason reason, int code, int signal);

/** Prints the postmortem, once an attempt, and with `keep` writes --postmortem-file; called before the
 *  workers are signalled to end. `first` is the worker that failed first, or NULL. */
void td__agent_report_postmortem(struct td__agent *agent, const struct td__worker *first,
                                 bool keep);

/** Where a worker that has just failed was, for the end of a sentence: " during all_reduce #17 …", or ""
 *  where that is not known. Writes --postmortem-file. */
void td__agent_describe_place(struct td__agent *agent, const struct td__worker *worker, char *text,
                              size_t room);

/** A worker has ended, and the others go on. */
void td__agent_outlive(struct td__agent *agent, struct td__worker *worker);

/** Starts the workers again whose time has come. Not from the event loop. */
void td__agent_restart_workers(struct td__agent *agent);

/** Has a worker that has ended started again after a pause, which is longer each time that it dies `soon` after its start; false
 *  where it has done so too often in a row. */
bool td__agent_plan_life(struct td__worker *worker, bool soon);

/** Whether it has: before it was a member of the world, or a moment after that. */
bool td__agent_died_soon(const struct td__agent *agent, const struct td__worker *worker);

/** Whether a worker, which is no spare, is to be started again, now or later. */
bool td__agent_awaits_restart(const struct td__agent *agent);

/** The others went on after failures, and all workers have ended now. Reports on those that failed, and finds the exit code. */
void td__agent_close_kept_attempt(struct td__agent *agent);

/** Notices what could not be written to the console. */
void td__agent_check_console(struct td__agent *agent);

/** For the workers, whose `data` is the agent. */
void td__agent_on_worker_end(struct td__worker *worker);

/* ---- Attempts -------------------------------------------------------------------------------- */

/** Once the ranks of this node are known: prepares log directories, CPUs, descriptors. Says on the
 *  console where output is kept when the user did not choose. */
td_status td__attempt_prepare(struct td__agent *agent);

/** Starts all workers. When one cannot be started, the others are running: end them. *exec_error as
 *  td__worker_start() has it. */
td_status td__attempt_start(struct td__agent *agent, int *exec_error);

/** Starts the launcher of a host, which is worker->local_rank of the list (hosts_start.c). */
td_status td__hosts_start(struct td__agent *agent, struct td__worker *worker, int *exec_error);

/** Starts a worker, or a spare, that has ended again, alone and with its rank: a new number for the log files, an empty
 *  page in the book. Closes first what it had open, and runs the event loop for that, so it must not be called from
 *  it; when the loop finds a reason to end, nothing is started. When it fails, the worker has ended as before. */
td_status td__attempt_restart(struct td__agent *agent, struct td__worker *worker);

/** A spare that has got its variables: is from now on the worker with this rank, for good. */
void td__attempt_promote(struct td__agent *agent, struct td__worker *spare, int rank,
                         int local_rank);

/** A spare that has got its variables: has from now on the rank of `worker`, which is to be a spare in its place. */
void td__attempt_swap(struct td__agent *agent, struct td__worker *spare, struct td__worker *worker);

/** Whether a worker has ended with exit code 0: the end of the job has begun. */
bool td__attempt_ends(const struct td__attempt *attempt);

/** Sends a signal to all workers that are running. */
void td__attempt_signal(struct td__agent *agent, int signal);

/** Reaps processes that were adopted. The end of a worker is noticed by its pidfd, so that
 *  the order is right; where there is no pidfd it is noticed here. */
void td__attempt_reap(struct td__agent *agent);

/** The worker that began to end first among those for which `fits` is true, after `last` where that is not
 *  NULL. NULL when there is none. */
struct td__worker *td__attempt_earliest(const struct td__attempt *attempt,
                                        bool (*fits)(const struct td__worker *worker),
                                        const struct td__worker *last);

/** How many workers are running, without spares. */
int td__attempt_running(const struct td__agent *agent);

/** True while a worker, or a process that was signalled with it, runs. */
bool td__attempt_lingers(const struct td__agent *agent);

/** A spare waits for a rank: puts that into the book. */
void td__attempt_note_spare(struct td__agent *agent, const struct td__worker *spare);

/** Puts the ends of workers that were reaped into the book. */
void td__attempt_note_ends(struct td__agent *agent);

/** Goes on with output that had to wait for the console. */
void td__attempt_resume_output(struct td__agent *agent);

/** Kills whatever descends from this process, passes on the last output, and frees the attempt. */
void td__attempt_finish(struct td__agent *agent);

/** The environment of a worker, ended by NULL, in one piece of memory for free(); NULL without
 *  memory. */
char **td__environment_make(const struct td__agent *agent, const struct td__worker *worker);

/** What of it is its own, for a spare that becomes this worker: "NAME=value", each ended by a 0. */
void td__environment_put(const struct td__agent *agent, const struct td__worker *worker,
                         struct td__buffer *variables);

#endif
