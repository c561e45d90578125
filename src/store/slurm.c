/* Slurm's variables, nodes and secret; see slurm.h.
 *
 * A batch script has most of the variables that tasks have, SLURM_PROCID=0 too, but not SLURM_STEP_ID: only srun starts
 * a task. The components of a heterogeneous step get variables of the whole step, so nothing here asks for them. */
#include "store/slurm.h"

#include "base/auth.h"
#include "base/clock.h"
#include "base/fail.h"
#include "os/address.h"
#include "os/process.h"
#include "store/rendezvous_schemes.h"

#include <ctype.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
    DEFAULT_PORT = 29500,
    PORT_BASE = 15000,
    PORT_RANGE = 15000,
    LOOKUP_MS = 3000,
    SCONTROL_MS = 10000,
};

extern char **environ;

/* ---- The step -------------------------------------------------------------------------------- */

/* The number for node `index` in "3(x2),1", which stands for 3, 3, 1; 0 where there is none. */
static int number_of_node(const char *list, int index)
{
    for (const char *at = list; *at;) {
        char *end;
        long number = strtol(at, &end, 10), times = 1;
        if (end == at || number < 0 || number > INT_MAX)
            return 0;
        if (!strncmp(end, "(x", 2))
            times = strtol(end + 2, &end, 10);
        if (times < 1)
            return 0;
        if (index < times)
            return (int)number;
        index -= (int)times;
        at = end + strspn(end, "),");
    }
    return 0;
}

td_status td__slurm_step_read(struct td__slurm_step *step, bool *inside)
{
    bool found;
    *step = (struct td__slurm_step){.node = -1, .task = -1};
    *inside = false;
    if (!td__env("SLURM_STEP_ID"))
        return TD_OK;
    TD_TRY(td__env_number("SLURM_STEP_NUM_NODES", 1, &step->nodes, &found));
    TD_TRY(td__env_number("SLURM_STEP_NUM_TASKS", 1, &step->tasks, &found));
    TD_TRY(td__env_number("SLURM_NODEID", 0, &step->node, &found));
    TD_TRY(td__env_number("SLURM_PROCID", 0, &step->task, &found));
    TD_TRY(td__env_number("SLURM_LOCALID", 0, &step->local_task, &found));
    TD_TRY(td__env_number("SLURM_CPUS_PER_TASK", 1, &step->cpus, &found));
    *inside = step->nodes > 0 && step->tasks > 0 && step->task >= 0 && step->node >= 0 &&
              step->node < step->nodes;
    const char *per_node = td__env("SLURM_STEP_TASKS_PER_NODE");
    step->tasks_here = per_node && *inside ? number_of_node(per_node, step->node) : 0;
    if (!step->tasks_here)
        step->tasks_here = step->nodes > 0 ? (step->tasks + step->nodes - 1) / step->nodes : 1;
    return TD_OK;
}

td_status td__slurm_nodes(char first[256], int64_t *nodes)
{
    static const char *const names[] = {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST",
                                        "SLURM_NODELIST"};
    *nodes = 0;
    first[0] = '\0';
    for (int i = 0; i < 3; i++)
        if (td__env(names[i]))
            return td__hostlist_first(td__env(names[i]), first, nodes);
    return TD_OK;
}

int td__slurm_port(void)
{
    const char *job = td__env("SLURM_JOB_ID"), *step = td__env("SLURM_STEP_ID");
    if (!job)
        return DEFAULT_PORT;
    return PORT_BASE +
           (int)((strtoull(job, NULL, 10) * 31 + (step ? strtoull(step, NULL, 10) : 0)) %
                 PORT_RANGE);
}

/* ---- Nodes ----------------------------------------------------------------------------------- */

/* Whether the name leads to another address than this host's own loopback, as it does on Debian. */
static bool can_be_looked_up(const char *name)
{
    struct td__address_list list;
    struct td__error before;
    bool retry;
    td__error_save(&before);
    td_status status = td__resolve(name, DEFAULT_PORT, td__deadline_in_ms(LOOKUP_MS), &list,
                                   &retry);
    if (status)
        td__error_undo(&before);
    for (int i = 0; !status && i < list.count; i++)
        if (!td__address_is_local(&list.at[i]))
            return true;
    return false;
}

/* From "n1:10.0.0.1:host1,n2:10.0.0.2:host2", which nodes of clouds have. */
static bool find_alias(const char *node, char address[256])
{
    size_t length = strlen(node);
    const char *at = td__env("SLURM_NODE_ALIASES");
    while (at && *at) {
        size_t size = strcspn(at, ",");
        if (size > length + 1 && !strncmp(at, node, length) && at[length] == ':') {
            const char *begin = at + length + 1;
            bool bracketed = *begin == '['; /* an IPv6 address */
            size_t end = bracketed ? strcspn(++begin, "],") : strcspn(begin, ":,");
            snprintf(address, 256, "%.*s", (int)(end < 255 ? end : 255), begin);
            return end > 0;
        }
        at += size + (at[size] == ',');
    }
    return false;
}

/* Runs `scontrol show node NODE` and keeps the first bytes of what it prints; false when it fails. */
static bool ask_scontrol(const char *node, char *text, size_t room)
{
    char *argv[] = {"scontrol", "--oneliner", "show", "node", (char *)node, NULL};
    int ends[2];
    pid_t pid;
    posix_spawn_file_actions_t actions;
    if (pipe2(ends, O_CLOEXEC))
        return false;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_adddup2(&actions, ends[1], 1);
    posix_spawn_file_actions_addopen(&actions, 2, "/dev/null", O_WRONLY, 0);
    int error = posix_spawnp(&pid, argv[0], &actions, NULL, argv, environ);
    posix_spawn_file_actions_destroy(&actions);
    close(ends[1]);
    size_t size = 0;
    td__deadline deadline = td__deadline_in_ms(SCONTROL_MS);
    struct pollfd wait = {.fd = ends[0], .events = POLLIN};
    while (!error && size + 1 < room && poll(&wait, 1, td__deadline_poll_ms(deadline)) > 0) {
        ssize_t got = read(ends[0], text + size, room - 1 - size);
        if (got <= 0)
            break;
        size += (size_t)got;
    }
    close(ends[0]);
    text[size] = '\0';
    if (error)
        return false;
    if (td__deadline_passed(deadline))
        kill(pid, SIGKILL);
    waitpid(pid, NULL,
            0); /* its output counts: a program that reaps all children takes its status */
    return size > 0;
}

static bool find_node_address(const char *node, char address[256])
{
    char text[4096];
    if (node[0] == '-' || !ask_scontrol(node, text, sizeof text))
        return false;
    const char *at = strstr(text, "NodeAddr=");
    if (!at)
        return false;
    at += strlen("NodeAddr=");
    snprintf(address, 256, "%.*s", (int)strcspn(at, " \n"), at);
    return address[0] != '\0';
}

void td__slurm_node_address(const char *node, char address[256])
{
    snprintf(address, 256, "%s", node);
    if (find_alias(node, address) || can_be_looked_up(node))
        return;
    if (!find_node_address(node, address))
        snprintf(address, 256, "%s", node); /* connecting to it says that it is not known */
}

/* ---- The secret ------------------------------------------------------------------------------ */

td_status td__slurm_adopt_secret(char text[65])
{
    struct td__secret secret;
    char context[512], made[65];
    const char *job = td__env("SLURM_JOB_ID"), *cluster = td__env("SLURM_CLUSTER_NAME");
    const char *restarts = td__env("SLURM_RESTART_COUNT");
    if (text)
        text[0] = '\0';
    TD_TRY(td__secret_load(NULL, &secret));
    if (!job || secret.given || secret.insecure)
        return TD_OK;
    snprintf(context, sizeof context, "slurm, cluster %.200s, job %.64s, run %.32s",
             cluster ? cluster : "", job, restarts ? restarts : "0");
    TD_TRY(td__secret_of_job(context, made));
    if (text)
        memcpy(text, made, sizeof made);
    return td__secret_adopt(made, "it is made from the user's secret in the home directory, which "
                                  "must be the same file on all nodes; where it is not, put export "
                                  "TANDEM_SECRET=$(openssl rand -hex 32) into the batch script");
}
