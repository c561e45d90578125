/* --keep-going: a worker that fails does not end the others.
 *
 *     a worker ends badly --> one line; its process group is killed --> restarts left? start it again
 *     the last one ends   --> report on those that failed for good, where all were, the exit code
 *
 * A worker is started again between two turns of the event loop, since the handles of its predecessor
 * have to be closed first.
 *
 * The exit code. The end of a job begins with the first worker that ends with exit code 0. The job has
 * outlived the workers that failed before that, not those that fail after it. So 0 is for a job in which a
 * worker ended with exit code 0 and none failed after that. */
#include "base/fail.h"
#include "launch/agent.h"

#include <signal.h>
#include <stdio.h>
#include <sys/wait.h>

enum { NAMED = 8 }; /* failures that are reported in full at the end */

/* Workers that run, or are about to. */
static int count_left(const struct td__agent *agent)
{
    int left = td__attempt_running(agent);
    for (int i = 0; i < agent->attempt.count; i++)
        left += agent->attempt.workers[i].restart_wanted;
    return left;
}

void td__agent_outlive(struct td__agent *agent, struct td__worker *worker)
{
    char how[64], place[1024], next[64];
    int most = agent->options->max_restarts, left = count_left(agent);
    td__attempt_note_ends(agent);
    if (agent->reason || !td__worker_has_failed(worker))
        return;
    kill(-worker->pid, SIGKILL); /* a process that a wrapper left behind would still be this rank */
    worker->restart_wanted = worker->restarts < most;
    if (worker->restart_wanted)
        snprintf(next, sizeof next, "starting it again (restart %d of %d)", worker->restarts + 1,
                 most);
    else if (left)
        snprintf(next, sizeof next, "%d worker%s on", left, left == 1 ? " goes" : "s go");
    else
        snprintf(next, sizeof next, "no worker is left");
    td__describe_status(worker->status, how, sizeof how);
    td__agent_describe_place(agent, worker, place, sizeof place);
    td__console_say(&agent->console, "rank %d (pid %d%s) %s %s%s; %s", worker->rank,
                    (int)worker->pid, agent->where,
                    WIFSIGNALED(worker->status) ? "was killed by" : "failed with", how, place,
                    next);
}

static struct td__worker *find_to_restart(struct td__agent *agent)
{
    for (int i = 0; i < agent->attempt.count; i++)
        if (agent->attempt.workers[i].restart_wanted)
            return &agent->attempt.workers[i];
    return NULL;
}

void td__agent_restart_workers(struct td__agent *agent)
{
    struct td__worker *worker;
    while (!agent->reason && (worker = find_to_restart(agent))) {
        worker->restart_wanted = false;
        if (td__attempt_restart(agent, worker))
            td__console_say(&agent->console, "%s; the others go on without it", td__error_text());
    }
}

/* ---- The end --------------------------------------------------------------------------------- */

static bool ended_well(const struct td__worker *worker)
{
    return worker->pid && !worker->running && worker->status == 0;
}

/* The next one that failed after `last`, in the order in which they did; NULL for none. */
static struct td__worker *next_failure(const struct td__attempt *attempt,
                                       const struct td__worker *last)
{
    return td__attempt_earliest(attempt, td__worker_has_failed, last);
}

static void report(struct td__agent *agent, const struct td__worker *first)
{
    const struct td__attempt *attempt = &agent->attempt;
    char sentence[512];
    int failures = 0, well = 0;
    for (int i = 0; i < attempt->count; i++)
        well += ended_well(&attempt->workers[i]);
    td__console_say(&agent->console, "%d of %d workers ended with exit code 0", well,
                    attempt->count);
    for (const struct td__worker *worker = first; worker; worker = next_failure(attempt, worker)) {
        if (failures++ >= NAMED)
            continue;
        td__describe_failure(worker, agent->where, sentence, sizeof sentence);
        td__report_failure(&agent->console, worker, sentence);
    }
    if (failures > NAMED)
        td__console_say(&agent->console, "and %d more failed", failures - NAMED);
}

void td__agent_close_kept_attempt(struct td__agent *agent)
{
    const struct td__attempt *attempt = &agent->attempt;
    const struct td__worker *first = next_failure(attempt, NULL);
    const struct td__worker *end = td__attempt_earliest(attempt, ended_well, NULL);
    if (agent->reason || !first)
        return;
    report(agent, first);
    td__agent_report_postmortem(agent, first, false);
    for (const struct td__worker *worker = first; worker; worker = next_failure(attempt, worker))
        if (!end || worker->exiting_ns >= end->exiting_ns)
            agent->reason = TD__REASON_FAILED;
    agent->code = 1;
}
