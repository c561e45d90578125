/* The agent; see agent.h.
 *
 *     meet the other nodes ──> round: start, watch, stop, sweep ──> wait for the other nodes
 *                                └───────── after a failure, while restarts are left ────┘
 *
 * Each arrow is a wait in run_until(): the event loop runs, and what it brings either goes to the
 * workers' output, or is a reason to end. Every reason goes through begin_stop(): the graver one
 * stays, the workers are told, and a timer makes sure that they go. */
#include "launch/agent.h"

#include "base/clock.h"
#include "base/fail.h"
#include "launch/node.h"
#include "launch/notice.h"
#include "launch/program.h"
#include "launch/report.h"
#include "launch/round.h"
#include "launch/sweep.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { SWEEP_MS = 10000, KILL_MS = 10000, VERDICT_MS = 1000, MAX_SIGNALS = 64 };

/* Why the workers are ended, the graver reasons last. After FAILED there may be another round. */
enum reason { NONE, FAILED, OVER, CLOSED, SIGNALLED };

struct agent {
    const struct td__agent_job *job;
    const struct td__run_options *options;
    const struct td__agent_start *start;

    uv_loop_t loop;
    uv_async_t wake; /* another thread has something: the node, or the console */
    uv_poll_t lifeline;
    uv_signal_t child_ended, signals[MAX_SIGNALS];
    int signal_count;
    uv_timer_t shutdown, verdict;

    struct td__console console;
    bool console_failed[2]; /* was noticed */
    struct td__node *node;
    bool ready, all_gone; /* what the node has told */
    struct td__round_setup setup;
    struct td__round round;

    enum reason reason;
    int code;         /* the exit code that goes with the reason */
    bool killed;      /* the workers were, or their time is over … */
    bool abandoned;   /* … and even that has not ended them */
    bool output_lost; /* something could not be written where the user wanted it */
    bool finishing;   /* all workers have ended; only output is left to be written … */
    bool hurry;       /* … and a signal says not to wait for that */
};

/* ---- Ending ---------------------------------------------------------------------------------- */

static void on_shutdown_timeout(uv_timer_t *timer);

static void kill_workers(struct agent *agent)
{
    agent->killed = true;
    td__round_signal(&agent->round, SIGKILL);
    uv_timer_start(&agent->shutdown, on_shutdown_timeout, KILL_MS, 0);
}

static void on_shutdown_timeout(uv_timer_t *timer)
{
    struct agent *agent = timer->data;
    int running = td__round_running(&agent->round);
    if (agent->killed) {
        agent->abandoned = true; /* stuck in the kernel: nothing helps */
        return;
    }
    if (running)
        td__console_say(&agent->console, "tdrun: %d worker%s did not end within %g s; killed\n",
                        running, running == 1 ? "" : "s", agent->options->shutdown_timeout_s);
    kill_workers(agent);
}

/* Ends the workers for `reason`, with `signal` first. */
static void begin_stop(struct agent *agent, enum reason reason, int code, int signal)
{
    if (reason <= agent->reason)
        return;
    agent->reason = reason;
    agent->code = code;
    td__round_signal(&agent->round, signal);
    uint64_t patience_ms = (uint64_t)(agent->options->shutdown_timeout_s * 1000);
    if (!agent->killed && !uv_is_active((uv_handle_t *)&agent->shutdown))
        uv_timer_start(&agent->shutdown, on_shutdown_timeout, patience_ms, 0);
}

/* The front is gone, and the user with it: nothing may stay. */
static _Noreturn void die_with_front(void)
{
    td__sweep(td__deadline_in_ms(SWEEP_MS));
    _exit(128 + SIGKILL);
}

/* Tells the other nodes that this one does not go on, and why. */
static void tell_others(struct agent *agent, int code, const char *why)
{
    char text[512];
    if (!agent->node)
        return;
    snprintf(text, sizeof text, "the launcher on %s (process %d) %s", td__this_host(agent->options),
             (int)getpid(), why);
    td__node_end_job(agent->node, code, text);
}

static void on_signal(struct agent *agent, int signal, bool from_front)
{
    char why[64];
    if (agent->finishing) {
        agent->hurry = true;
        agent->code = 128 + signal;
        agent->reason = SIGNALLED;
        return;
    }
    if (agent->reason == SIGNALLED) {
        /* Ctrl-C again is impatience. Other signals may come twice for one reason: a terminal that
         * is closed sends SIGHUP, and the shell in it does so too. */
        if (signal == SIGINT && from_front)
            kill_workers(agent);
        return;
    }
    snprintf(why, sizeof why, "was ended by %s", td__signal_name(signal));
    tell_others(agent, 128 + signal, why);
    begin_stop(agent, SIGNALLED, 128 + signal, signal);
}

static void on_own_signal(uv_signal_t *handle, int signal)
{
    on_signal(handle->data, signal, false);
}

static void on_lifeline(uv_poll_t *poll, int status, int events)
{
    (void)status;
    (void)events;
    struct agent *agent = poll->data;
    uint8_t signal;
    ssize_t got = read(agent->start->lifeline, &signal, 1);
    if (got < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (got != 1)
        die_with_front();
    if (signal == SIGTSTP || signal == SIGCONT)
        td__round_signal(&agent->round, signal);
    else
        on_signal(agent, signal, true);
}

/* ---- Workers --------------------------------------------------------------------------------- */

/* `worker` was the first to fail in this round, on this node. */
static void on_failure(struct agent *agent, struct td__worker *worker)
{
    char where[32] = "", sentence[512];
    struct td__round *round = &agent->round;
    const struct td__node_world *world = td__node_world(agent->node);
    if (agent->options->nnodes > 1)
        snprintf(where, sizeof where, " on node %d", world->node_rank);
    td__describe_failure(worker, where, sentence, sizeof sentence);
    td__node_failed(agent->node, round->number, td__exit_code(worker->status), sentence);
    td__report_failure(&agent->console, worker, sentence);
    for (int i = 0; i < round->count; i++)
        td__worker_reap(&round->workers[i]); /* those that failed as well, before they are told */
    td__report_others(&agent->console, round->workers, round->count, worker);
    begin_stop(agent, FAILED, td__exit_code(worker->status), SIGTERM);
}

static void on_verdict_timeout(uv_timer_t *timer)
{
    struct agent *agent = timer->data;
    struct td__worker *first = td__round_first_failure(&agent->round, false);
    if (first && !agent->reason)
        on_failure(agent, first);
}

/* A failure may be the consequence of another one that is still on its way: waits for that. */
static void look_for_failure(struct agent *agent)
{
    struct td__worker *first = td__round_first_failure(&agent->round, false);
    if (!first || agent->reason)
        return;
    first = td__round_first_failure(&agent->round, true);
    if (!first->running)
        on_failure(agent, first);
    else if (!uv_is_active((uv_handle_t *)&agent->verdict))
        uv_timer_start(&agent->verdict, on_verdict_timeout, VERDICT_MS, 0);
}

static void on_worker_end(struct td__worker *worker)
{
    struct agent *agent = worker->data;
    if (!td__worker_reap(worker))
        return;
    td__stream_drain(&worker->streams[TD__OUT]);
    td__stream_drain(&worker->streams[TD__ERR]);
    look_for_failure(agent);
    td__round_reap(&agent->round);
}

static void on_child_ended(uv_signal_t *handle, int signal)
{
    (void)signal;
    struct agent *agent = handle->data;
    td__round_reap(&agent->round);
}

static void on_log_error(struct td__stream *stream)
{
    struct agent *agent = stream->data;
    agent->output_lost = true;
    td__console_say(&agent->console, "tdrun: cannot write %s: %s; the rest is not kept there\n",
                    stream->log.path, td__errno_text(stream->log.error));
}

/* ---- News from other threads ----------------------------------------------------------------- */

static void on_node_event(struct agent *agent, const struct td__node_event *event)
{
    switch (event->kind) {
    case TD__NODE_READY:
        agent->ready = true;
        break;
    case TD__NODE_ALL_GONE:
        agent->all_gone = true;
        break;
    case TD__NODE_FAILED:
        if (agent->reason <= FAILED) {
            td__console_say(&agent->console, "tdrun: %s\n", event->text);
            begin_stop(agent, FAILED, event->code, SIGTERM);
            agent->code = event->code; /* it was before a failure here */
        }
        break;
    case TD__NODE_OVER:
        if (agent->reason < OVER)
            td__console_say(&agent->console, "tdrun: %s\n", event->text);
        begin_stop(agent, OVER, event->code, SIGTERM);
        break;
    }
}

/* Somebody who does not want more output ends the job, as SIGPIPE would. Other errors are said. */
static void check_console(struct agent *agent)
{
    static const char *const names[] = {"output", "error"};
    for (int i = 0; i < 2; i++) {
        int error = td__sink_error(&agent->console.outlets[i].sink);
        if (!error || agent->console_failed[i])
            continue;
        agent->console_failed[i] = agent->output_lost = true;
        if (error == EPIPE) {
            tell_others(agent, 128 + SIGPIPE, "has nobody any more who reads its output");
            begin_stop(agent, CLOSED, 128 + SIGPIPE, SIGTERM);
        } else {
            td__console_say(&agent->console,
                            "tdrun: cannot write to standard %s: %s; the rest is lost\n", names[i],
                            td__errno_text(error));
        }
    }
}

static void on_wake(uv_async_t *wake)
{
    struct agent *agent = wake->data;
    struct td__node_event event;
    /* What comes after the end of a round belongs to the next one. */
    while (agent->node && !agent->all_gone && td__node_next(agent->node, &event))
        on_node_event(agent, &event);
    check_console(agent);
    td__round_resume_output(&agent->round);
}

/* For other threads. */
static void notify(void *arg)
{
    struct agent *agent = arg;
    uv_async_send(&agent->wake);
}

/* ---- Setting up ------------------------------------------------------------------------------ */

static void open_signals(struct agent *agent)
{
    sigset_t waited = agent->start->signals;
    uv_signal_init(&agent->loop, &agent->child_ended);
    agent->child_ended.data = agent;
    uv_signal_start(&agent->child_ended, on_child_ended, SIGCHLD);
    sigaddset(&waited, SIGCHLD);
    sigdelset(&waited, SIGTSTP); /* the front's business */
    for (int number = 1; number < NSIG && agent->signal_count < MAX_SIGNALS; number++) {
        uv_signal_t *handle = &agent->signals[agent->signal_count];
        if (number == SIGCHLD || sigismember(&waited, number) != 1)
            continue;
        uv_signal_init(&agent->loop, handle);
        handle->data = agent;
        uv_signal_start(handle, on_own_signal, number);
        agent->signal_count++;
    }
    sigprocmask(SIG_UNBLOCK, &waited, NULL);
}

static td_status open_loop(struct agent *agent)
{
    int error = uv_loop_init(&agent->loop);
    if (!error)
        error = uv_async_init(&agent->loop, &agent->wake, on_wake);
    if (!error)
        error = uv_poll_init(&agent->loop, &agent->lifeline, agent->start->lifeline);
    if (error)
        return td__fail(TD_ERR_SYSTEM, "cannot make an event loop: %s", uv_strerror(error));
    uv_timer_init(&agent->loop, &agent->shutdown);
    uv_timer_init(&agent->loop, &agent->verdict);
    agent->wake.data = agent->lifeline.data = agent;
    agent->shutdown.data = agent->verdict.data = agent;
    uv_poll_start(&agent->lifeline, UV_READABLE | UV_DISCONNECT, on_lifeline);
    open_signals(agent);
    return TD_OK;
}

/* Once the place in the world is known. */
static td_status prepare_rounds(struct agent *agent)
{
    agent->setup = (struct td__round_setup){
        .options = agent->options,
        .secret = agent->job->secret,
        .world = td__node_world(agent->node),
        .console = &agent->console,
        .worker = {.loop = &agent->loop,
                   .path = agent->job->path,
                   .argv = agent->options->program,
                   .mask = &agent->start->mask,
                   .default_signals = &agent->start->ignored},
        .on_worker_end = on_worker_end,
        .on_log_error = on_log_error,
        .data = agent,
    };
    return td__round_setup_open(&agent->setup);
}

/* ---- The course of a job ---------------------------------------------------------------------- */

static void run_until(struct agent *agent, bool (*done)(struct agent *agent))
{
    while (!done(agent))
        uv_run(&agent->loop, UV_RUN_ONCE);
}

/* This node cannot take part: ends the job everywhere. The last error says why. */
static void give_up(struct agent *agent, int code)
{
    td__console_say(&agent->console, "tdrun: %s\n", td_last_error());
    if (agent->node)
        td__node_end_job(agent->node, code, td_last_error());
    begin_stop(agent, OVER, code, SIGTERM);
}

static bool met(struct agent *agent)
{
    return agent->ready || agent->reason;
}

/* Workers that were told to end may have left others of their group to finish something; those of
 * a worker that ended by itself get no time. */
static bool workers_ended(struct agent *agent)
{
    if (agent->reason && !agent->killed)
        return !td__round_lingers(&agent->round);
    return agent->abandoned || !td__round_running(&agent->round);
}

static bool others_ended(struct agent *agent)
{
    return agent->all_gone || agent->reason > FAILED;
}

static bool all_written(struct agent *agent)
{
    return agent->hurry || td__console_is_idle(&agent->console);
}

static void run_round(struct agent *agent, int number)
{
    int exec_error, code = 1;
    agent->reason = NONE;
    agent->all_gone = agent->killed = false;
    uv_async_send(&agent->wake); /* there may be news for this round already */
    if (td__round_start(&agent->round, &agent->setup, number, &exec_error)) {
        if (exec_error)
            td__program_refused(agent->options->program[0], exec_error, &code);
        give_up(agent, code);
    }
    run_until(agent, workers_ended);
    uv_timer_stop(&agent->shutdown);
    uv_timer_stop(&agent->verdict);
    td__round_finish(&agent->round);
    td__node_gone(agent->node, number);
    run_until(agent, others_ended);
}

static void run_rounds(struct agent *agent)
{
    int max_restarts = agent->options->max_restarts;
    for (int number = 0; agent->reason == NONE || agent->reason == FAILED; number++) {
        run_round(agent, number);
        if (agent->reason != FAILED || number == max_restarts)
            return;
        td__console_say(&agent->console, "tdrun: starting all workers again (restart %d of %d)\n",
                        number + 1, max_restarts);
    }
}

static void close_handle(uv_handle_t *handle, void *arg)
{
    (void)arg;
    if (!uv_is_closing(handle))
        uv_close(handle, NULL);
}

/* Takes leave of everybody; returns the exit code. */
static int finish(struct agent *agent)
{
    bool left_well = !agent->node || td__node_close(agent->node);
    agent->node = NULL;
    agent->finishing = true;
    run_until(agent, all_written);
    check_console(agent);
    int code = agent->reason ? agent->code : agent->output_lost;
    if (!left_well || agent->hurry)
        _exit(code);
    td__console_close(&agent->console);
    uv_walk(&agent->loop, close_handle, NULL);
    uv_run(&agent->loop, UV_RUN_DEFAULT);
    uv_loop_close(&agent->loop);
    td__round_setup_close(&agent->setup);
    free(agent);
    return code;
}

int td__agent_run(const struct td__agent_start *start, void *arg)
{
    struct agent *agent = calloc(1, sizeof *agent);
    if (!agent)
        return 1;
    agent->job = arg;
    agent->options = agent->job->options;
    agent->start = start;
    if (open_loop(agent)) {
        fprintf(stderr, "tdrun: %s\n", td_last_error());
        free(agent);
        return 1;
    }
    td__console_open(&agent->console, notify, agent);
    if (td__node_start(agent->options, agent->job->secret, notify, agent, &agent->node)) {
        give_up(agent, 1);
        return finish(agent);
    }
    run_until(agent, met);
    if (!agent->reason && prepare_rounds(agent))
        give_up(agent, 1);
    if (!agent->reason)
        run_rounds(agent);
    return finish(agent);
}
