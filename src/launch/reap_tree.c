/* Ending all descendants; see supervisor.h.
 *
 * A process that daemonises itself (setsid, double fork) leaves its process group and its parent,
 * but not its ancestors: as subreaper we become its parent. So "no child is left" is the same as "no
 * descendant is left", and waitpid() says so at no cost. The walk through /proc is only for finding
 * the processes to kill. It may miss a process that is being forked; then there is another pass. */
#include "launch/supervisor.h"

#include "base/clock.h"
#include "os/process.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
    SWEEP_MS = 10000,
    PAUSE_NS = 5000000, /* between two passes, unless a child ends first */
};

struct process {
    pid_t pid;
    pid_t parent;
    bool ours;
};

struct process_list {
    struct process *at;
    size_t count, room;
};

void td__reap_tree_prepare(void)
{
    prctl(PR_SET_CHILD_SUBREAPER, 1);
}

static bool add_process(struct process_list *list, pid_t pid, pid_t parent)
{
    if (list->count == list->room) {
        size_t room = list->room ? 2 * list->room : 256;
        struct process *at = realloc(list->at, room * sizeof *at);
        if (!at)
            return false;
        list->at = at;
        list->room = room;
    }
    list->at[list->count++] = (struct process){.pid = pid, .parent = parent};
    return true;
}

static void read_processes(struct process_list *list)
{
    DIR *proc = opendir("/proc");
    if (!proc)
        return;
    for (struct dirent *entry; (entry = readdir(proc));) {
        struct td__process_stat stat;
        pid_t pid = isdigit((unsigned char)entry->d_name[0]) ? atoi(entry->d_name) : 0;
        if (!pid || !td__process_stat(pid, &stat) || stat.state == 'Z')
            continue;
        if (stat.parent > 0 && !add_process(list, pid, stat.parent))
            break; /* short of memory: the rest in the next pass */
    }
    closedir(proc);
}

static int by_pid(const void *a, const void *b)
{
    pid_t left = ((const struct process *)a)->pid, right = ((const struct process *)b)->pid;
    return (left > right) - (left < right);
}

static bool is_ours(const struct process_list *list, pid_t pid)
{
    if (pid == getpid())
        return true;
    const struct process wanted = {.pid = pid};
    const struct process *found = bsearch(&wanted, list->at, list->count, sizeof wanted, by_pid);
    return found && found->ours;
}

/* Marks the descendants, generation by generation, and returns how many there are. */
static int mark_descendants(struct process_list *list)
{
    int count = 0;
    if (list->count)
        qsort(list->at, list->count, sizeof *list->at, by_pid);
    for (bool more = true; more;) {
        more = false;
        for (size_t i = 0; i < list->count; i++) {
            struct process *process = &list->at[i];
            if (!process->ours && is_ours(list, process->parent)) {
                process->ours = more = true;
                count++;
            }
        }
    }
    return count;
}

static int kill_descendants(void)
{
    struct process_list list = {0};
    read_processes(&list);
    int count = mark_descendants(&list);
    for (size_t i = 0; i < list.count; i++)
        if (list.at[i].ours)
            kill(list.at[i].pid, SIGKILL);
    free(list.at);
    return count;
}

/* True when there is no child any more, dead or alive. */
static bool reap_all(void)
{
    pid_t pid;
    do
        pid = waitpid(-1, NULL, WNOHANG);
    while (pid > 0 || (pid < 0 && errno == EINTR));
    return pid < 0;
}

int td__reap_tree(void)
{
    td__deadline deadline = td__deadline_in_ms(SWEEP_MS);
    sigset_t child, before;
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    pthread_sigmask(SIG_BLOCK, &child, &before);
    int left = 0;
    while (!reap_all()) {
        int found = kill_descendants();
        if (td__deadline_passed(deadline)) {
            left = found;
            break;
        }
        struct timespec pause = td__timespec(PAUSE_NS);
        sigtimedwait(&child, NULL, &pause);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return left;
}
