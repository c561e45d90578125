/* --on-failure replace, shrink: a worker that fails does not end the others.
 *
 *     a worker ends badly --> one line; its process group is killed --> restarts left? start it again
 *     the last one ends   --> report on those that failed for good, where all were, the exit code
 *
 * A worker is started again between two turns of the event loop, since the handles of its predecessor
 * have to be closed first. A replacement that dies soon is started again later each time, and given up when
 * that does not help: then the fault is in the program or on this host.
 *
 * The exit code. The end of a job begins with the first worker that ends with exit code 0. The job has
 * outlived the workers that failed before that, not those that fail after it. So 0 is for a job in which a
 * worker ended with exit code 0 and none failed after that. */
#include "base/clock.h"
#include "base/fail.h"
#include "base/text.h"
#include "launch/agent.h"

#include <signal.h>
#include <stdio.h>
#include <sys/wait.h>

enum { NAMED = 8 };       /* failures that are reported in full at the end */
enum { SHORT_LIVES = 8 }; /* in a row, and a worker is given up */

#define SHORT_LIFE_NS INT64_C(10000000000)
#define SHORT_LIFE_JOINED_NS INT64_C(1000000000) /* of a member of the world */
#define FIRST_PAUSE_NS INT64_C(100000000)
#define LONGEST_PAUSE_NS INT64_C(5000000000)

/* Workers that run, or are about to. */
static int count_left(const struct td__agent *agent)
{
    int left = td__attempt_running(agent);
    for (int i = 0; i < agent->attempt.count; i++)
        left += agent->attempt.workers[i].spare < 0 && agent->attempt.workers[i].restart_wanted;
    return left;
}

/* ---- Starting again -------------------------------------------------------------------------- */

/* How long a worker waits that has died so often in a row soon after its start. */
static int64_t pause_ns(int short_lives)
{
    int64_t pause = FIRST_PAUSE_NS;
    for (int i = 1; i < short_lives && pause < LONGEST_PAUSE_NS; i++)
        pause *= 2;
    return !short_lives ? 0 : pause < LONGEST_PAUSE_NS ? pause : LONGEST_PAUSE_NS;
}

static enum td__flight_phase phase_of(const struct td__agent *agent, const struct td__worker *worker)
{
    const struct td__attempt *attempt = &agent->attempt;
    return attempt->book.map ? td__flight_log_at(attempt->book.map, worker->slot)->phase
                             : TD__FLIGHT_ABSENT;
}

bool td__agent_died_soon(const struct td__agent *agent, const struct td__worker *worker)
{
    bool joined = phase_of(agent, worker) >= TD__FLIGHT_JOINED;
    return worker->ended_ns - worker->started_ns < (joined ? SHORT_LIFE_JOINED_NS : SHORT_LIFE_NS);
}

bool td__agent_plan_life(struct td__worker *worker, bool soon)
{
    worker->short_lives = soon ? worker->short_lives + 1 : 0;
    if (worker->short_lives >= SHORT_LIVES)
        return false;
    worker->restart_wanted = true;
    worker->restart_ns = worker->ended_ns + pause_ns(worker->short_lives);
    return true;
}

/* Decides whether a worker is started again, and says that, or why not. */
static void plan_restart(const struct td__agent *agent, struct td__worker *worker, char *text,
                         size_t room)
{
    int most = agent->options->on_failure == TD__REPLACE && !agent->draining
                   ? agent->options->max_restarts
                   : 0;
    bool soon = worker->restarts && td__agent_died_soon(agent, worker);
    const struct td__worker *spare = td__spares_find(agent);
    if (worker->restarts >= most) {
        snprintf(text, room, "%s", most ? "it has no restarts left; " : "");
    } else if (!td__agent_plan_life(worker, soon)) {
        snprintf(text, room, "it has died soon after its start %d times in a row; ",
                 SHORT_LIVES);
    } else {
        int64_t pause = worker->restart_ns - worker->ended_ns;
        char later[32] = "", what[64] = "starting it again";
        if (pause)
            snprintf(later, sizeof later, " in %.1f s", (double)pause / 1e9);
        if (spare)
            snprintf(what, sizeof what, "spare %d (pid %d) takes its place", spare->spare,
                     (int)spare->pid);
        snprintf(text, room, "%s%s (restart %d of %d)", what, later, worker->restarts + 1, most);
    }
}

/* Whether a process that was to replace another one has found nobody to join: the others have ended meanwhile, but not before
 * the other one died. */
static bool comes_too_late(const struct td__agent *agent, const struct td__worker *worker)
{
    return worker->restarts && worker->in_time && WIFEXITED(worker->status) &&
           td__attempt_ends(&agent->attempt) && phase_of(agent, worker) == TD__FLIGHT_JOINING;
}

void td__agent_outlive(struct td__agent *agent, struct td__worker *worker)
{
    char how[64], place[1024], next[160];
    int left = count_left(agent);
    td__attempt_note_ends(agent);
    if (agent->reason || !td__worker_has_failed(worker))
        return;
    kill(-worker->pid, SIGKILL); /* a process that a wrapper left behind would still be this rank */
    if (worker->host) {
        td__hosts_describe(worker, agent->options, place, sizeof place);
        td__console_say(&agent->console, "%s; the others go on", place);
        return;
    }
    if (comes_too_late(agent, worker)) {
        worker->late = true;
        td__console_say(&agent->console,
                        "rank %d (pid %d%s) came too late: the others have ended; it is not started "
                        "again",
                        worker->rank, (int)worker->pid, agent->where);
        return;
    }
    worker->in_time = !td__attempt_ends(&agent->attempt);
    plan_restart(agent, worker, next, sizeof next);
    if (!worker->restart_wanted && left)
        td__text_add(next, sizeof next, "%d worker%s on", left, left == 1 ? " goes" : "s go");
    else if (!worker->restart_wanted)
        td__text_add(next, sizeof next, "no worker is left");
    td__describe_status(worker->status, how, sizeof how);
    td__agent_describe_place(agent, worker, place, sizeof place);
    td__console_say(&agent->console, "rank %d (pid %d%s) %s %s%s; %s", worker->rank,
                    (int)worker->pid, agent->where,
                    WIFSIGNALED(worker->status) ? "was killed by" : "failed with", how, place,
                    next);
}

/* The worker that is to be started again next; NULL for none. */
static struct td__worker *next_to_restart(const struct td__agent *agent)
{
    struct td__worker *next = NULL;
    for (int i = 0; i < agent->attempt.count; i++) {
        struct td__worker *worker = &agent->attempt.workers[i];
        if (worker->restart_wanted && (!next || worker->restart_ns < next->restart_ns))
            next = worker;
    }
    return next;
}

bool td__agent_awaits_restart(const struct td__agent *agent)
{
    for (int i = 0; i < agent->attempt.count; i++)
        if (agent->attempt.workers[i].restart_wanted && agent->attempt.workers[i].spare < 0)
            return true;
    return false;
}

static void on_replacement(uv_timer_t *timer)
{
    (void)timer; /* that the loop returns is enough */
}

void td__agent_restart_workers(struct td__agent *agent)
{
    struct td__worker *worker;
    td__spares_give_adopted(agent);
    while (!agent->reason && (worker = next_to_restart(agent))) {
        int64_t wait_ns = worker->restart_ns - td__now_ns();
        if (wait_ns > 0) {
            uv_update_time(&agent->loop);
            uv_timer_start(&agent->replacement, on_replacement, (uint64_t)(wait_ns / 1000000) + 1,
                           0);
            return;
        }
        worker->restart_wanted = false;
        if (worker->spare >= 0 ? td__attempt_ends(&agent->attempt) : td__spares_give(agent, worker))
            continue;
        if (!td__attempt_restart(agent, worker))
            continue;
        if (worker->spare >= 0)
            td__spare_not_started(agent, worker);
        else
            td__console_say(&agent->console, "%s; the others go on without it", td__error_text());
    }
}

/* ---- The end --------------------------------------------------------------------------------- */

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
    int failures = 0, well = 0, count = 0;
    for (int i = 0; i < attempt->count; i++) {
        well += td__worker_ended_well(&attempt->workers[i]);
        count += attempt->workers[i].spare < 0;
    }
    td__console_say(&agent->console, "%d of %d workers ended with exit code 0", well, count);
    for (const struct td__worker *worker = first; worker; worker = next_failure(attempt, worker)) {
        if (failures++ >= NAMED)
            continue;
        if (worker->host)
            continue; /* it was said when it ended, and there */
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
    const struct td__worker *end = td__attempt_earliest(attempt, td__worker_ended_well, NULL);
    if (agent->reason || !first)
        return;
    report(agent, first);
    td__agent_report_postmortem(agent, first, false);
    for (const struct td__worker *worker = first; worker; worker = next_failure(attempt, worker))
        if (!end || worker->exiting_ns >= end->exiting_ns)
            agent->reason = TD__REASON_FAILED;
    agent->code = 1;
}
