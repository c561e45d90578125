/* Spares; see spares.h. */
#include "launch/spares.h"

#include "base/clock.h"
#include "base/fail.h"
#include "base/text.h"
#include "launch/agent.h"
#include "store/spare.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

struct td__adoption {
    int rank;
    char what[400];
};

static bool are_wanted(const struct td__agent *agent)
{
    return !agent->reason && !agent->draining && !agent->spares_given_up &&
           !td__attempt_ends(&agent->attempt);
}

/* ---- The connection -------------------------------------------------------------------------- */

static void stop_watching(struct td__worker *spare)
{
    if (spare->link >= 0)
        uv_poll_stop(&spare->link_poll);
}

static void on_link(uv_poll_t *poll, int status, int events)
{
    (void)events;
    struct td__worker *spare = poll->data;
    struct td__agent *agent = spare->data;
    char said;
    ssize_t got = status < 0 ? 0 : recv(spare->link, &said, 1, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (got <= 0) {
        stop_watching(spare); /* its end is noticed otherwise */
    } else if (said == TD__SPARE_WAITS) {
        agent->spares_wait = true;
        if (spare->spare < 0)
            return; /* it has got a rank on its way */
        spare->waits = true;
        td__attempt_note_spare(agent, spare);
    }
}

td_status td__spare_open_link(struct td__worker *spare)
{
    int ends[2]; /* of which a child gets one, so that forks are not kept from it */
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends))
        return td_fail(TD_ERR_SYSTEM, "cannot make a socket for a spare: %s",
                       td__errno_text(errno));
    spare->link = ends[0];
    spare->far_end = ends[1];
    return TD_OK;
}

void td__spare_watch_link(struct td__agent *agent, struct td__worker *spare, bool started)
{
    close(spare->far_end);
    spare->far_end = -1;
    if (!started || uv_poll_init(&agent->loop, &spare->link_poll, spare->link)) {
        close(spare->link); /* a spare that is running ends, then */
        spare->link = -1;
        return;
    }
    spare->link_poll.data = spare;
    uv_poll_start(&spare->link_poll, UV_READABLE, on_link);
}

void td__spare_hang_up(struct td__worker *worker)
{
    if (worker->link < 0)
        return;
    uv_close((uv_handle_t *)&worker->link_poll, NULL);
    close(worker->link);
    worker->link = -1;
}

/* ---- Giving a rank --------------------------------------------------------------------------- */

/* One that waits; else one that is on its way there, where another one has shown that this program does wait. That is sooner
 * there than a process that is started now. */
struct td__worker *td__spares_find(const struct td__agent *agent)
{
    struct td__worker *found = NULL;
    for (int i = 0; i < agent->attempt.count; i++) {
        struct td__worker *spare = &agent->attempt.workers[i];
        if (spare->spare < 0 || !spare->running || spare->link < 0 ||
            !(spare->waits || agent->spares_wait))
            continue;
        bool sooner = found &&
                      (spare->waits > found->waits ||
                       (spare->waits == found->waits && spare->started_ns < found->started_ns));
        if (!found || sooner)
            found = spare;
    }
    return found;
}

/* The socket holds it; a spare that has ended meanwhile does not take it. */
static bool send_rank(const struct td__agent *agent, const struct td__worker *spare,
                      const struct td__worker *worker)
{
    struct td__buffer message = {0}, variables = {0};
    struct td__worker next = *worker;
    next.slot = spare->slot;
    next.restarts++;
    td__environment_put(agent, &next, &variables);
    uint32_t size = (uint32_t)variables.size;
    td__buffer_put(&message, &size, sizeof size);
    td__buffer_put(&message, variables.data, variables.size);
    bool sent = !message.failed && !variables.failed &&
                send(spare->link, message.data, message.size, MSG_NOSIGNAL | MSG_DONTWAIT) ==
                    (ssize_t)message.size;
    if (variables.data)
        memset(variables.data, 0, variables.size); /* the secret is in it */
    if (message.data)
        memset(message.data, 0, message.size);
    td__buffer_free(&variables);
    td__buffer_free(&message);
    return sent;
}

/* What it has written so far is not the rank's. */
static void settle(struct td__worker *spare)
{
    td__stream_settle(&spare->streams[TD__OUT]);
    td__stream_settle(&spare->streams[TD__ERR]);
}

/* It has half a message. */
static void give_up(struct td__worker *spare)
{
    kill(-spare->pid, SIGKILL);
    td__spare_hang_up(spare);
}

bool td__spares_give(struct td__agent *agent, struct td__worker *worker)
{
    struct td__worker *spare;
    while ((spare = td__spares_find(agent))) {
        settle(spare);
        if (send_rank(agent, spare, worker)) {
            td__attempt_swap(agent, spare, worker);
            return true;
        }
        give_up(spare);
    }
    return false;
}

/* ---- Ranks of other nodes --------------------------------------------------------------------- */

void td__spares_adopt(struct td__agent *agent, int rank, const char *what)
{
    size_t size = ((size_t)agent->adopting + 1) * sizeof *agent->adoptions;
    struct td__adoption *adoptions = realloc(agent->adoptions, size);
    if (!adoptions)
        abort(); /* the supervisor cleans up */
    agent->adoptions = adoptions;
    struct td__adoption *adoption = &adoptions[agent->adopting++];
    adoption->rank = rank;
    snprintf(adoption->what, sizeof adoption->what, "%s", what);
}

void td__spares_give_adopted(struct td__agent *agent)
{
    struct td__worker *spare;
    while (agent->adopted < agent->adopting && are_wanted(agent) &&
           (spare = td__spares_find(agent))) {
        const struct td__adoption *adoption = &agent->adoptions[agent->adopted];
        struct td__worker place = {.spare = -1,
                                   .rank = adoption->rank,
                                   .local_rank = agent->options->nproc + agent->adopted};
        int number = spare->spare;
        settle(spare);
        if (!send_rank(agent, spare, &place)) {
            give_up(spare);
            continue;
        }
        td__attempt_promote(agent, spare, place.rank, place.local_rank);
        agent->adopted++;
        td__console_say(&agent->console, "spare %d (pid %d%s) takes %s", number, (int)spare->pid,
                        agent->where, adoption->what);
    }
}

/* ---- Deaths ---------------------------------------------------------------------------------- */

/* Has it started again, later each time that it dies soon; or not any more. Says so after `text`. */
static void plan(struct td__agent *agent, struct td__worker *spare, bool soon, const char *text)
{
    char next[200];
    if (!td__agent_plan_life(spare, soon)) {
        snprintf(next, sizeof next,
                 "that was the %dth time in a row soon after its start, and it is not started any "
                 "more%s",
                 spare->short_lives,
                 spare->waits ? "" : "; does the program call td_init_process_group()?");
    } else {
        double pause = (double)(spare->restart_ns - spare->ended_ns) / 1e9;
        snprintf(next, sizeof next,
                 pause > 0 ? "starting another one in %.1f s" : "starting another one", pause);
    }
    td__console_say(&agent->console, "%s; %s", text, next);
}

void td__spare_ended(struct td__agent *agent, struct td__worker *spare)
{
    char how[64], text[400];
    bool killed = WIFSIGNALED(spare->status);
    td__attempt_note_ends(agent);
    kill(-spare->pid, SIGKILL); /* what a wrapper has left behind */
    if (!are_wanted(agent) || spare->signalled)
        return;
    if (!spare->waits && !agent->spares_wait && spare->status == 0) {
        agent->spares_given_up = true;
        td__console_say(
            &agent->console,
            "spare %d (pid %d%s) has run to its end without waiting for a rank: the program "
            "does not call td_init_process_group(), so that --spares has no use for it; "
            "no spare is started any more",
            spare->spare, (int)spare->pid, agent->where);
        return;
    }
    td__describe_status(spare->status, how, sizeof how);
    snprintf(text, sizeof text, "spare %d (pid %d%s) %s %s", spare->spare, (int)spare->pid,
             agent->where, killed ? "was killed by" : "ended with", how);
    plan(agent, spare, td__agent_died_soon(agent, spare), text);
}

void td__spare_not_started(struct td__agent *agent, struct td__worker *spare)
{
    char text[TD__ERROR_TEXT];
    snprintf(text, sizeof text, "spare %d: %s", spare->spare, td__error_text());
    spare->ended_ns = td__now_ns();
    if (are_wanted(agent))
        plan(agent, spare, true, text);
}
