/* What can happen while the agent waits: signals, the end of a worker, news from other nodes, output
 * that cannot be written. Every reason to end goes through td__agent_begin_stop(): it keeps the graver
 * reason, signals the workers, and starts a timer after which they are killed. */
#include "launch/agent.h"
#include "launch/drain.h"

#include "base/clock.h"
#include "base/fail.h"
#include "os/loop.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum {
    KILL_MS = 10000,   /* from SIGKILL until a worker counts as stuck */
    VERDICT_MS = 1000, /* for the cause of a failure to arrive */
};

/* ---- Ending ---------------------------------------------------------------------------------- */

static void on_shutdown_timeout(uv_timer_t *timer);

static void kill_workers(struct td__agent *agent)
{
    agent->killed = true;
    td__attempt_signal(agent, SIGKILL);
    uv_timer_start(&agent->shutdown, on_shutdown_timeout, KILL_MS, 0);
}

static void on_shutdown_timeout(uv_timer_t *timer)
{
    struct td__agent *agent = timer->data;
    int running = td__attempt_running(agent);
    if (agent->killed) {
        agent->abandoned = true; /* stuck in the kernel: nothing helps */
        return;
    }
    if (running)
        td__console_say(&agent->console, "%d worker%s did not end within %g s; killed", running,
                        running == 1 ? "" : "s", agent->options->shutdown_timeout_s);
    kill_workers(agent);
}

void td__agent_begin_stop(struct td__agent *agent, enum td__reason reason, int code, int signal)
{
    if (reason <= agent->reason)
        return;
    agent->reason = reason;
    agent->code = code;
    td__attempt_signal(agent, signal);
    uint64_t patience_ms = (uint64_t)(agent->options->shutdown_timeout_s * 1000);
    uv_update_time(&agent->loop); /* timers count from the loop's time, which may be old */
    if (!agent->killed && !uv_is_active((uv_handle_t *)&agent->shutdown))
        uv_timer_start(&agent->shutdown, on_shutdown_timeout, patience_ms, 0);
}

/* The supervisor has ended: no process may stay. */
static _Noreturn void die_with_front(void)
{
    td__reap_tree();
    _exit(128 + SIGKILL);
}

/* Reports to the other nodes that this one does not go on, and why. */
static void tell_others(struct td__agent *agent, int code, const char *why)
{
    char text[512];
    if (!agent->node)
        return;
    snprintf(text, sizeof text, "the launcher on %s (process %d) %s", td__this_host(agent->options),
             (int)getpid(), why);
    td__node_end_job(agent->node, code, text);
}

static void on_signal(struct td__agent *agent, int signal, bool from_front)
{
    char why[64];
    if (td__signal_is_passed_on(signal, &agent->options->signals)) {
        td__attempt_signal(agent, signal);
        return;
    }
    if (agent->finishing) {
        agent->hurry = true;
        agent->code = 128 + signal;
        agent->reason = TD__REASON_SIGNALLED;
        return;
    }
    if (agent->reason == TD__REASON_SIGNALLED) {
        /* A second Ctrl-C kills at once. Other signals may come twice for one reason: a terminal that
         * is closed sends SIGHUP, and the shell in it does so too. */
        if (signal == SIGINT && from_front)
            kill_workers(agent);
        return;
    }
    if (!agent->reason)
        td__agent_report_postmortem(agent, NULL, true);
    snprintf(why, sizeof why, "was ended by %s", td__signal_name(signal));
    tell_others(agent, 128 + signal, why);
    td__agent_begin_stop(agent, TD__REASON_SIGNALLED, 128 + signal, signal);
}

static void on_own_signal(uv_signal_t *handle, int signal)
{
    if (signal == SIGCHLD)
        td__attempt_reap(handle->data);
    else
        on_signal(handle->data, signal, false);
}

static void take_signal(struct td__agent *agent, int fd)
{
    uint8_t signal;
    ssize_t got = read(fd, &signal, 1);
    if (got < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (got != 1)
        die_with_front();
    if (signal == SIGTSTP || signal == SIGCONT)
        td__attempt_signal(agent, signal);
    else
        on_signal(agent, signal, true);
}

static void on_signal_pipe(uv_poll_t *poll, int status, int events)
{
    (void)status;
    (void)events;
    struct td__agent *agent = poll->data;
    take_signal(agent, agent->start->signal_pipe);
}

/* The tdrun that has started this one says the same by standard input. */
static void on_control(uv_poll_t *poll, int status, int events)
{
    (void)status;
    (void)events;
    take_signal(poll->data, STDIN_FILENO);
}

/* ---- Workers --------------------------------------------------------------------------------- */

/* `worker` was the first to fail in this attempt, on this node. */
static void on_failure(struct td__agent *agent, struct td__worker *worker)
{
    char sentence[512];
    struct td__attempt *attempt = &agent->attempt;
    if (worker->host) {
        td__hosts_describe(worker, agent->options, sentence, sizeof sentence);
        td__console_say(&agent->console, "%s", sentence);
        td__agent_begin_stop(agent, TD__REASON_FAILED,
                             worker->status ? td__exit_code(worker->status) : 1, SIGTERM);
        return;
    }
    td__describe_failure(worker, agent->where, sentence, sizeof sentence);
    td__node_failed(agent->node, attempt->number, td__exit_code(worker->status), sentence);
    td__report_failure(&agent->console, worker, sentence);
    for (int i = 0; i < attempt->count; i++) /* before they are signalled */
        td__worker_reap(&attempt->workers[i]);
    td__report_others(&agent->console, attempt->workers, attempt->count, worker);
    td__agent_report_postmortem(agent, worker, true);
    td__agent_begin_stop(agent, TD__REASON_FAILED, td__exit_code(worker->status), SIGTERM);
}

static void on_verdict_timeout(uv_timer_t *timer)
{
    struct td__agent *agent = timer->data;
    struct td__worker *first = td__attempt_earliest(&agent->attempt, td__worker_has_failed, NULL);
    if (first && !agent->reason)
        on_failure(agent, first);
    td__attempt_reap(agent);
}

/* It has failed, or is about to end and its status is not known yet. */
static bool may_have_failed(const struct td__worker *worker)
{
    return td__worker_has_failed(worker) || (worker->running && !worker->signalled &&
                                             worker->exiting_ns && td__worker_is_dying(worker));
}

/* A failure may be the consequence of another one that has not been noticed yet: waits for that. */
static void look_for_failure(struct td__agent *agent)
{
    if (agent->reason || !td__attempt_earliest(&agent->attempt, td__worker_has_failed, NULL))
        return;
    struct td__worker *first = td__attempt_earliest(&agent->attempt, may_have_failed, NULL);
    if (!first->running)
        on_failure(agent, first);
    else if (!uv_is_active((uv_handle_t *)&agent->verdict))
        uv_timer_start(&agent->verdict, on_verdict_timeout, VERDICT_MS, 0);
}

void td__agent_on_worker_end(struct td__worker *worker)
{
    struct td__agent *agent = worker->data;
    if (!td__worker_reap(worker))
        return;
    td__stream_settle(&worker->streams[TD__OUT]);
    td__stream_settle(&worker->streams[TD__ERR]);
    if (worker->spare >= 0)
        td__spare_ended(agent, worker);
    else if (td__others_go_on(agent->options))
        td__agent_outlive(agent, worker);
    else
        look_for_failure(agent);
    td__attempt_reap(agent);
}

/* ---- Events of other threads ----------------------------------------------------------------- */

/* What another node has reported: the tdrun that has started both says it once. */
static void say_of_others(struct td__agent *agent, const struct td__node_event *event)
{
    struct td__buffer line = {0};
    if (!agent->options->served_host || event->own) {
        td__console_say(&agent->console, "%s", event->text);
        return;
    }
    td__buffer_put(&line, "\1note ", 6);
    td__buffer_put(&line, event->text, strlen(event->text));
    td__buffer_put(&line, "\n", 1);
    td__console_write(&agent->console, TD__ERR, NULL, line.data, line.size);
    td__buffer_free(&line);
}

/* tdrun drain: this node is to leave. Where all workers start again, without those here, they are ended; otherwise they
 * leave by themselves, when they see the order. */
static void leave_job(struct td__agent *agent)
{
    if (agent->draining || agent->reason)
        return;
    agent->draining = true;
    td__console_say(&agent->console, "this node leaves the job, as tdrun drain wants");
    if (td__others_go_on(agent->options))
        td__orders_leave(agent->orders);
    else
        td__node_depart(agent->node);
}

static void on_node_event(struct td__agent *agent, const struct td__node_event *event)
{
    switch (event->kind) {
    case TD__NODE_ROUND:
        agent->ready = agent->between_attempts = true;
        agent->world = event->world;
        break;
    case TD__NODE_STORE:
        agent->world.port = event->world.port;
        memcpy(agent->world.address, event->world.address, sizeof agent->world.address);
        memcpy(agent->world.standbys, event->world.standbys, sizeof agent->world.standbys);
        break;
    case TD__NODE_ANSWER:
        td__drain_answer(agent, event->code, event->text);
        break;
    case TD__NODE_ADOPT:
        td__spares_adopt(agent, event->code, event->text);
        break;
    case TD__NODE_DRAIN:
        leave_job(agent);
        break;
    case TD__NODE_ALL_GONE:
        if (agent->reason == TD__REASON_CHANGED) /* this node has left */
            agent->reason = TD__REASON_NONE;
        agent->all_gone = agent->between_attempts = true;
        break;
    case TD__NODE_LOST:
        td__console_say(&agent->console, "%s%s", event->text,
                        event->code ? "; its workers are lost with it" : "");
        break;
    case TD__NODE_CHANGED:
        if (agent->reason < TD__REASON_CHANGED)
            td__console_say(&agent->console, "%s; all workers are ended, to start again",
                            event->text);
        td__agent_begin_stop(agent, TD__REASON_CHANGED, 1, SIGTERM);
        break;
    case TD__NODE_FAILED:
    case TD__NODE_OVER:
        if (agent->reason < TD__REASON_OVER)
            say_of_others(agent, event);
        if (!agent->reason)
            td__agent_report_postmortem(agent, NULL, true);
        td__agent_begin_stop(agent,
                             event->kind == TD__NODE_OVER ? TD__REASON_OVER : TD__REASON_FAILED,
                             event->code, SIGTERM);
        if (agent->reason == TD__REASON_FAILED)
            agent->code = event->code; /* it was before a failure here */
        break;
    }
}

/* A reader that closes the output ends the job, as SIGPIPE would. Other errors are reported. */
void td__agent_check_console(struct td__agent *agent)
{
    static const char *const names[] = {"output", "error"};
    for (int i = 0; i < 2; i++) {
        int error = td__console_error(&agent->console, i);
        if (!error || agent->console_failed[i])
            continue;
        agent->console_failed[i] = agent->console.output_lost = true;
        if (error == EPIPE) {
            tell_others(agent, 128 + SIGPIPE, "has lost the reader of its output");
            td__agent_begin_stop(agent, TD__REASON_CLOSED, 128 + SIGPIPE, SIGTERM);
        } else {
            td__console_say(&agent->console, "cannot write to standard %s: %s; the rest is lost",
                            names[i], td__errno_text(error));
        }
    }
}

static void on_wake(uv_async_t *wake)
{
    struct td__agent *agent = wake->data;
    struct td__node_event event;
    while (agent->node && !agent->between_attempts && td__node_next(agent->node, &event))
        on_node_event(agent, &event);
    td__agent_check_console(agent);
    td__attempt_resume_output(agent);
}

void td__agent_wake(void *arg)
{
    struct td__agent *agent = arg;
    uv_async_send(&agent->wake);
}

/* ---- Setting up ------------------------------------------------------------------------------ */

static void open_signals(struct td__agent *agent)
{
    sigset_t waited = agent->start->signals;
    uv_signal_t *handle = agent->signals;
    sigaddset(&waited, SIGCHLD);
    sigdelset(&waited, SIGTSTP); /* the supervisor handles it */
    for (int number = 1; number < NSIG; number++) {
        if (sigismember(&waited, number) != 1)
            continue;
        uv_signal_init(&agent->loop, handle);
        handle->data = agent;
        uv_signal_start(handle++, on_own_signal, number);
    }
    sigprocmask(SIG_UNBLOCK, &waited, NULL);
}

td_status td__agent_open_loop(struct td__agent *agent)
{
    int error = td__uv_loop_init(&agent->loop);
    if (!error)
        error = uv_async_init(&agent->loop, &agent->wake, on_wake);
    if (!error)
        error = uv_poll_init(&agent->loop, &agent->signal_pipe, agent->start->signal_pipe);
    if (error)
        return td_fail(TD_ERR_SYSTEM, "cannot make an event loop: %s", td__errno_text(-error));
    if (agent->options->served_host && !uv_poll_init(&agent->loop, &agent->control, STDIN_FILENO)) {
        agent->control.data = agent;
        uv_poll_start(&agent->control, UV_READABLE | UV_DISCONNECT, on_control);
    }
    uv_timer_init(&agent->loop, &agent->shutdown);
    uv_timer_init(&agent->loop, &agent->verdict);
    uv_timer_init(&agent->loop, &agent->replacement);
    agent->wake.data = agent->signal_pipe.data = agent;
    agent->shutdown.data = agent->verdict.data = agent;
    uv_poll_start(&agent->signal_pipe, UV_READABLE | UV_DISCONNECT, on_signal_pipe);
    open_signals(agent);
    return TD_OK;
}
