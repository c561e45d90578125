/* The agent; see supervisor.h.
 *
 *     join the other nodes --> attempt: start, watch, stop, reap --> wait for the other nodes
 *                                ^                                            |
 *                                +---- after a failure, while restarts are left
 *
 * Each step is a wait in run_until(): the event loop runs, and each event (agent_events.c) is output of
 * the workers, or a reason to end. */
#include "launch/agent.h"
#include "launch/drain.h"

#include "base/fail.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { FLUSH_MS = 2000 }; /* for output that is not read, after a signal; otherwise the minimum */

static void run_until(struct td__agent *agent, bool (*done)(struct td__agent *agent))
{
    while (!done(agent)) {
        uv_run(&agent->loop, UV_RUN_ONCE);
        td__agent_restart_workers(agent);
    }
}

/* This node cannot take part: ends the job everywhere. The last error says why. */
static void give_up(struct td__agent *agent, int code)
{
    td__console_say(&agent->console, "%s", td__error_text());
    if (agent->node)
        td__node_end_job(agent->node, code, td__error_text());
    td__agent_begin_stop(agent, TD__REASON_OVER, code, SIGTERM);
}

static bool joined(struct td__agent *agent)
{
    return agent->ready || agent->reason;
}

/* Processes in the group of a worker that was signalled to end get time to finish; those of a worker that
 * ended by itself get none. */
static bool workers_ended(struct td__agent *agent)
{
    if (agent->reason && !agent->killed)
        return !td__attempt_lingers(agent);
    return agent->abandoned ||
           (!td__attempt_running(agent) && (agent->reason || !td__agent_awaits_restart(agent)));
}

/* The coordinator of the nodes has decided what follows. */
static bool others_ended(struct td__agent *agent)
{
    return agent->ready || agent->all_gone || agent->reason > TD__REASON_FAILED;
}

static bool all_written(struct td__agent *agent)
{
    return agent->hurry || (!td__console_backlog(&agent->console, TD__ERR) &&
                            (agent->unread || !td__console_backlog(&agent->console, TD__OUT)));
}

static void begin_round(struct td__agent *agent)
{
    agent->reason = TD__REASON_NONE;
    agent->ready = agent->between_attempts = agent->killed = agent->postmortem_reported = false;
    uv_timer_stop(&agent->shutdown);
    uv_timer_stop(&agent->verdict);
    uv_timer_stop(&agent->replacement);
    td__agent_wake(agent); /* there may be events of this attempt already */
}

static void run_attempt(struct td__agent *agent)
{
    int exec_error, code = 1;
    begin_round(agent);
    if (td__attempt_start(agent, &exec_error)) {
        if (exec_error)
            td__worker_program_refused(agent->job->program->argv[0], exec_error, &code);
        give_up(agent, code);
    }
    int number = agent->attempt.number;
    run_until(agent, workers_ended);
    if (td__others_go_on(agent->options))
        td__agent_close_kept_attempt(agent);
    td__attempt_finish(agent);
    td__node_gone(agent->node, number);
    if (agent->draining && td__others_go_on(agent->options))
        td__node_depart(agent->node);
    run_until(agent, others_ended);
}

static void run_attempts(struct td__agent *agent)
{
    int max_restarts = agent->options->max_restarts;
    for (;;) {
        int restarts = agent->world.restarts;
        run_attempt(agent);
        if (!agent->ready || agent->reason > TD__REASON_FAILED)
            return;
        if (agent->world.restarts > restarts)
            td__console_say(&agent->console, "starting all workers again (restart %d of %d)",
                            agent->world.restarts, max_restarts);
        else
            td__console_say(&agent->console, "starting all workers again, on %d node%s",
                            agent->world.nodes, agent->world.nodes == 1 ? "" : "s");
    }
}

static void on_flush_timeout(uv_timer_t *timer)
{
    struct td__agent *agent = timer->data;
    if (agent->unread || td__console_backlog(&agent->console, TD__ERR)) {
        agent->hurry = true; /* this is not read either */
        return;
    }
    agent->unread = true;
    td__console_say(&agent->console, "standard output is not read; up to %zu bytes of it are lost",
                    td__console_backlog(&agent->console, TD__OUT));
    uv_timer_start(timer, on_flush_timeout, FLUSH_MS, 0);
}

/* A job that has failed, or was signalled to end, does not wait for ever for a reader that has stopped. One
 * that succeeded does: its output is its result. */
static void limit_writing(struct td__agent *agent)
{
    uint64_t patience_ms = (uint64_t)(agent->options->shutdown_timeout_s * 1000);
    if (agent->reason == TD__REASON_SIGNALLED || patience_ms < FLUSH_MS)
        patience_ms = FLUSH_MS;
    if (agent->reason)
        uv_timer_start(&agent->shutdown, on_flush_timeout, patience_ms, 0);
}

static void close_handle(uv_handle_t *handle, void *arg)
{
    (void)arg;
    if (!uv_is_closing(handle))
        uv_close(handle, NULL);
}

/* Leaves the job and closes everything; returns the exit code. */
static int finish(struct td__agent *agent)
{
    bool left_well = !agent->node || td__node_close(agent->node);
    agent->node = NULL;
    agent->finishing = true;
    uv_timer_stop(&agent->shutdown);
    uv_update_time(&agent->loop); /* closing may have received some */
    limit_writing(agent);
    run_until(agent, all_written);
    td__agent_check_console(agent);
    int code = agent->reason ? agent->code : agent->console.output_lost;
    if (!left_well || agent->hurry || agent->unread)
        _exit(code);
    td__console_close(&agent->console);
    td__drain_close(agent);
    td__orders_close(agent->orders, agent->orders_fd);
    uv_walk(&agent->loop, close_handle, NULL);
    uv_run(&agent->loop, UV_RUN_DEFAULT);
    uv_loop_close(&agent->loop);
    if (agent->null > 0)
        close(agent->null);
    free(agent->cpus);
    free(agent->adoptions);
    free(agent);
    return code;
}

int td__agent_run(const struct td__agent_start *start, const struct td__agent_job *job)
{
    struct td__agent *agent = calloc(1, sizeof *agent);
    if (!agent)
        return 1;
    agent->job = job;
    agent->options = job->options;
    agent->start = start;
    agent->orders_fd = agent->drain_listener = agent->drain_client = -1;
    if (td__agent_open_loop(agent)) {
        fprintf(stderr, "tdrun: %s\n", td__error_text());
        free(agent);
        return 1;
    }
    td__console_open(&agent->console, td__agent_wake, agent);
    if (agent->options->served_host)
        snprintf(agent->console.name, sizeof agent->console.name, "tdrun on %s",
                 agent->options->served_host);
    if (td__node_start(agent->options, agent->job->secret, td__agent_wake, agent, &agent->node)) {
        give_up(agent, 1);
        return finish(agent);
    }
    run_until(agent, joined);
    if (!agent->reason && td__attempt_prepare(agent))
        give_up(agent, 1);
    if (!agent->reason)
        run_attempts(agent);
    return finish(agent);
}
