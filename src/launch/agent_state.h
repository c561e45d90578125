/* The agent's state, shared by agent.c (the course of a job), agent_events.c (what can happen
 * meanwhile), agent_keep.c (what it makes of failures with --keep-going) and agent_postmortem.c. */
#ifndef TD_LAUNCH_AGENT_STATE_H
#define TD_LAUNCH_AGENT_STATE_H

#include "launch/supervisor.h"
#include "launch/attempt.h"

enum { TD__AGENT_SIGNALS = 64 };

/* Why the workers are ended, the graver reasons last. Only after a failure there may be another
 * attempt. */
enum td__reason {
    TD__REASON_NONE,
    TD__REASON_FAILED, /* a worker did, here or on another node */
    TD__REASON_OVER,   /* the job cannot go on: a launcher has ended, a worker cannot start, … */
    TD__REASON_CLOSED, /* nobody reads the output any more */
    TD__REASON_SIGNALLED, /* a signal to end */
};

struct td__agent {
    const struct td__agent_job *job;
    const struct td__run_options *options;
    const struct td__agent_start *start;

    uv_loop_t loop;
    uv_async_t wake; /* another thread has something: the node, or the console */
    uv_poll_t signal_pipe;
    uv_signal_t child_ended, signals[TD__AGENT_SIGNALS];
    int signal_count;
    uv_timer_t shutdown, verdict;

    struct td__console console;
    bool console_failed[2]; /* was noticed */
    struct td__node *node;
    bool ready, all_gone;  /* events of the node */
    bool between_attempts; /* its events are about the next attempt, and wait for it */
    struct td__attempt_setup setup;
    struct td__attempt attempt;

    bool postmortem_reported; /* in this attempt */
    enum td__reason reason;
    int code;         /* the exit code that goes with the reason */
    bool killed;      /* the workers were, or their time is over … */
    bool abandoned;   /* … and even that has not ended them */
    bool output_lost; /* something could not be written where the user wanted it */
    bool finishing;   /* all workers have ended; only output is left to be written … */
    bool unread;      /* … which nobody reads; that was said … */
    bool hurry;       /* … and there is no time to wait for it */
};

/** Makes the event loop, and watches the signal pipe and signals. */
td_status td__agent_open_loop(struct td__agent *agent);

/** Makes the loop look at the events of other threads. For any thread; `agent` is a td__agent. */
void td__agent_wake(void *agent);

/** Ends the workers for a reason, unless there is a graver one already: `signal` first, SIGKILL when
 *  the time is over. `code` is the exit code that goes with it. */
void td__agent_begin_stop(struct td__agent *agent, enum td__reason reason, int code, int signal);

/** Prints the postmortem, once an attempt; called before the workers are signalled to end. `first` is the
 *  worker that failed first, or NULL. */
void td__agent_report_postmortem(struct td__agent *agent, const struct td__worker *first);

/** Shows the same without writing --postmortem-file. */
void td__agent_show_postmortem(struct td__agent *agent, const struct td__worker *first);

/** Where a worker that has just failed was, for the end of a sentence: " during all_reduce #17 …", or ""
 *  where that is not known. Writes --postmortem-file. */
void td__agent_describe_place(struct td__agent *agent, const struct td__worker *worker, char *text,
                              size_t room);

/** --keep-going: a worker has ended, and the others go on. */
void td__agent_outlive(struct td__agent *agent, struct td__worker *worker);

/** --keep-going: starts the workers again that are to be restarted. Not from the event loop. */
void td__agent_restart_workers(struct td__agent *agent);

/** --keep-going: all workers have ended. Reports on those that failed, and finds the exit code. */
void td__agent_close_kept_attempt(struct td__agent *agent);

/** Notices what could not be written to the console. */
void td__agent_check_console(struct td__agent *agent);

/** For the setup of the attempts. */
void td__agent_on_worker_end(struct td__worker *worker);
void td__agent_on_log_error(struct td__stream *stream);

#endif
