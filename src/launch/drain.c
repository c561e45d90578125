/* tdrun drain, and the agent's side of it; see drain.h. */
#include "launch/drain.h"

#include "base/fail.h"
#include "launch/agent.h"
#include "launch/flags.h"
#include "launch/jobs.h"
#include "os/address.h"
#include "os/socket.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { EXIT_TROUBLE = 1, EXIT_USAGE = 2, REQUEST_MS = 200, ANSWER_MS = 10000, NAME_ROOM = 256 };

static bool address_of(pid_t tdrun, struct td__address *address)
{
    struct td__address_list list;
    char name[64];
    bool retry;
    snprintf(name, sizeof name, "unix:@tandem-drain-%d", (int)tdrun);
    if (td__resolve(name, 0, TD__NEVER, &list, &retry) || !list.count)
        return false;
    *address = list.at[0];
    return true;
}

/* ---- The agent ------------------------------------------------------------------------------- */

/* A request is one small message, sent at once. */
static void on_request(uv_poll_t *poll, int status, int events)
{
    (void)status;
    (void)events;
    struct td__agent *agent = poll->data;
    char name[NAME_ROOM] = "";
    int fd = td__accept(agent->drain_listener);
    if (fd < 0)
        return;
    if (!td__peer_is_us(fd) || agent->drain_client >= 0 || !agent->attempt.count ||
        td__recv_all(fd, name, sizeof name, td__deadline_in_ms(REQUEST_MS))) {
        close(fd);
        return;
    }
    name[sizeof name - 1] = '\0';
    agent->drain_client = fd;
    td__node_drain(agent->node, name);
}

void td__drain_listen(struct td__agent *agent)
{
    struct td__address address;
    agent->drain_listener = agent->drain_client = -1;
    if (!address_of(getppid(), &address))
        return;
    int fd = td__listen_on(&address);
    if (fd < 0 || uv_poll_init(&agent->loop, &agent->drain_poll, fd)) {
        if (fd >= 0)
            close(fd);
        return;
    }
    agent->drain_listener = fd;
    agent->drain_poll.data = agent;
    uv_poll_start(&agent->drain_poll, UV_READABLE, on_request);
}

void td__drain_answer(struct td__agent *agent, int code, const char *text)
{
    char answer[TD__ERROR_TEXT + 2];
    if (agent->drain_client < 0)
        return;
    int size = snprintf(answer, sizeof answer, "%c%s", code ? '-' : '+', text);
    td__send_all(agent->drain_client, answer, (size_t)size, td__deadline_in_ms(REQUEST_MS));
    close(agent->drain_client);
    agent->drain_client = -1;
}

void td__drain_close(struct td__agent *agent)
{
    if (agent->drain_client >= 0)
        close(agent->drain_client);
    if (agent->drain_listener < 0)
        return;
    uv_close((uv_handle_t *)&agent->drain_poll, NULL);
    close(agent->drain_listener);
    agent->drain_listener = -1;
}

/* ---- The command ----------------------------------------------------------------------------- */

static const struct td__flag drain_flags[] = {
    {"help", 'h', NULL, "print this", td__flag_set_bool, 0, 0, 0},
};
static const struct td__flag_table drain_table = {drain_flags, 1, NULL};

/* Asks one job; false where it does not answer. */
static bool ask(pid_t tdrun, const char *name, char answer[TD__ERROR_TEXT])
{
    struct td__address address;
    char request[NAME_ROOM] = "";
    if (!address_of(tdrun, &address))
        return false;
    td__deadline deadline = td__deadline_in_ms(ANSWER_MS);
    int fd = td__connect_to(&address, deadline);
    if (fd < 0)
        return false;
    snprintf(request, sizeof request, "%s", name);
    size_t size = 0;
    if (td__peer_is_us(fd) && !td__send_all(fd, request, sizeof request, deadline))
        while (size + 1 < TD__ERROR_TEXT && !td__recv_all(fd, answer + size, 1, deadline))
            size++;
    answer[size] = '\0';
    close(fd);
    return size > 0;
}

/* Asks all jobs of this machine, and says what they answer. */
static int ask_all(const char *name)
{
    struct td__job *jobs;
    int count, code = EXIT_TROUBLE, asked = 0;
    char answer[TD__ERROR_TEXT];
    if (td__jobs_find(false, &jobs, &count)) {
        fprintf(stderr, "tdrun drain: %s\n", td__error_text());
        return EXIT_TROUBLE;
    }
    for (int i = 0; i < count; i++) {
        if (!ask(jobs[i].info.pid, name, answer))
            continue;
        asked++;
        fprintf(answer[0] == '+' ? stdout : stderr, "tdrun drain: job %d: %s\n", jobs[i].info.pid,
                answer + 1);
        if (answer[0] == '+')
            code = 0;
    }
    if (!asked)
        fprintf(stderr, "tdrun drain: no job of this user that runs on this machine answers\n");
    free(jobs);
    return code;
}

int td__drain_run(int argc, char **argv)
{
    bool help = false;
    int rest;
    if (td__flags_parse(&drain_table, argc, argv, &help, &rest)) {
        fprintf(stderr, "tdrun drain: %s\n", td__error_text());
        return EXIT_USAGE;
    }
    if (help) {
        puts(
            "usage: tdrun drain HOST|NODE\n\n"
            "Asks the jobs on this machine to move their workers away from a host, or from the node of\n"
            "that number, before maintenance. That node's tdrun then ends with exit code 0.\n");
        td__flags_print(&drain_table, stdout);
        return 0;
    }
    if (argc - rest != 1) {
        fprintf(stderr, "tdrun drain: which node is to be drained? tdrun drain HOST|NODE\n");
        return EXIT_USAGE;
    }
    return ask_all(argv[rest]);
}
