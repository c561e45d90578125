/* Networks of namespaces.
 *
 *     rank 0 ─ eth0 ════ plug0 ┐
 *     rank 1 ─ eth0 ════ plug1 ┼ bridge ── the host, with the store
 *     rank 2 ─ eth0 ════ plug2 ┘
 *
 * Each host of a round is a network namespace without a name: it ends with the last process in it and
 * the last descriptor of it. The host's namespace is one of its own, too, so that all sockets in it are
 * those of the rounds. */
#include "chaos.h"
#include "network_space.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static bool own, bridged;

/* Runs ip(8), in the namespace `space` where that is not -1. */
static bool run_ip(int space, const char *format, ...) __attribute__((format(printf, 2, 3)));

static bool run_ip(int space, const char *format, ...)
{
    char command[256] = "ip ", *words[32];
    int count = 0, status;
    va_list args;
    va_start(args, format);
    vsnprintf(command + 3, sizeof command - 3, format, args);
    va_end(args);
    for (char *word = strtok(command, " "); word && count < 31; word = strtok(NULL, " "))
        words[count++] = word;
    words[count] = NULL;
    pid_t pid = fork();
    if (pid == 0) {
        int nothing = open("/dev/null", O_RDWR);
        dup2(nothing, STDOUT_FILENO);
        dup2(nothing, STDERR_FILENO);
        if (space < 0 || !setns(space, CLONE_NEWNET))
            execvp(words[0], words);
        _exit(127);
    }
    return pid > 0 && waitpid(pid, &status, 0) == pid && WIFEXITED(status) && !WEXITSTATUS(status);
}

bool network_begin(const char **why)
{
    if (!run_ip(-1, "-V")) { /* before anything is changed: without it there is no loopback there */
        *why = "the program ip is not there";
        return false;
    }
    if (!network_space_enter()) {
        *why = "there are no network namespaces here";
        return false;
    }
    if (!run_ip(-1, "link set lo up")) {
        *why = "the program ip cannot be used";
        return false;
    }
    own = true;
    bridged = run_ip(-1, "link add bridge type bridge") &&
              run_ip(-1, "addr add " NETWORK_HOST "/24 dev bridge") &&
              run_ip(-1, "link set bridge up");
    if (!bridged)
        *why = "there are no bridges here";
    return bridged;
}

bool network_is_own(void)
{
    return own;
}

/* A process that is in a namespace of its own until it is killed; -1 where there is none. */
static pid_t start_holder(void)
{
    int fds[2];
    char byte = 0;
    if (pipe2(fds, O_CLOEXEC))
        return -1;
    pid_t pid = fork();
    if (pid == 0) {
        if (unshare(CLONE_NEWNET) || write(fds[1], "x", 1) != 1)
            _exit(1);
        for (;;)
            pause();
    }
    close(fds[1]);
    if (pid > 0 && read(fds[0], &byte, 1) != 1) {
        waitpid(pid, NULL, 0);
        pid = -1;
    }
    close(fds[0]);
    return pid;
}

int network_add(int index)
{
    char path[64];
    pid_t pid = start_holder();
    if (pid < 0)
        return -1;
    snprintf(path, sizeof path, "/proc/%d/ns/net", (int)pid);
    int space = open(path, O_RDONLY | O_CLOEXEC);
    bool well = space >= 0 &&
                run_ip(-1, "link add plug%d type veth peer name eth0 netns %d", index, (int)pid) &&
                run_ip(-1, "link set plug%d master bridge up", index) &&
                run_ip(space, "link set lo up") &&
                run_ip(space, "addr add 10.98.0.%d/24 dev eth0", index + 1) &&
                run_ip(space, "link set eth0 up");
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    if (!well && space >= 0) {
        close(space);
        space = -1;
    }
    return space;
}

bool network_cut(int index)
{
    return run_ip(-1, "link set plug%d down", index);
}

void network_clear(int hosts)
{
    for (int i = 0; i < hosts; i++)
        run_ip(-1, "link del plug%d", i);
}
