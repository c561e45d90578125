/* The outcome of a round: how its ranks have ended, what they report, and what they have left behind. */
#include "chaos_host.h"

#include "base/fail.h"

#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { LEFT_S = 3, TAIL = 1500 };

void host_report(struct host *host, const char *format, ...)
{
    char *text = host->outcome->text;
    size_t used = strlen(text), room = sizeof host->outcome->text - used;
    va_list args;
    host->outcome->failed = true;
    va_start(args, format);
    int more = vsnprintf(text + used, room, format, args);
    va_end(args);
    if (more > 0 && (size_t)more + 1 < room)
        strcat(text, "\n");
}

static bool ended_as_planned(const struct plan *plan, int rank, int status)
{
    static const int signals[] = {
        [END_KILL] = SIGKILL, [END_SEGV] = SIGSEGV, [END_ABORT] = SIGABRT};
    bool lives = plan->fault == FAULT_PAUSE || plan->fault == FAULT_LEAVE ||
                 plan->fault == FAULT_CUT || plan->fault == FAULT_ABORT;
    if (rank != plan->second && (rank != plan->victim || lives))
        return status == 0;
    if (rank == plan->victim && plan->fault == FAULT_STOP)
        return WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
    if (plan->end == END_EXIT || plan->end == END_SILENT)
        return WIFEXITED(status) && WEXITSTATUS(status) == (plan->end == END_EXIT ? 3 : 0);
    if (slowness() > 1 && plan->end != END_KILL)
        return true; /* a sanitizer ends it its own way */
    return WIFSIGNALED(status) && WTERMSIG(status) == signals[plan->end];
}

static void show_output(struct host *host, int rank)
{
    char text[TAIL + 1];
    off_t size = lseek(host->ranks[rank].output, 0, SEEK_END);
    off_t from = size > TAIL ? size - TAIL : 0;
    ssize_t got = pread(host->ranks[rank].output, text, TAIL, from);
    if (got <= 0)
        return;
    text[got] = 0;
    host_report(host, "    its output: %s", text);
}

/* All ranks that live to the end agree on the ranks that were left after each attempt. */
static void compare_rests(struct host *host)
{
    const struct plan *plan = host->plan;
    for (int attempt = 0; attempt < 3; attempt++) {
        unsigned first = 0;
        for (int r = 0; r < plan->size; r++) {
            unsigned mask = atomic_load(&host->page->ranks[r].left[attempt]);
            bool counts = plan->after && r != plan->victim && r != plan->second;
            if (counts && mask && first && mask != first)
                host_report(host, "after attempt %d ranks %x are left for some, %x for rank %d",
                            attempt, first, mask, r);
            first = counts && !first ? mask : first;
        }
    }
}

void host_judge(struct host *host)
{
    const struct plan *plan = host->plan;
    struct outcome *outcome = host->outcome;
    outcome->injected = atomic_load(&host->page->fault_ns) != 0;
    if (!outcome->injected)
        host_report(host, "the fault was not injected");
    if (host->again && !ended_as_planned(plan, plan->victim, host->first.status))
        host_report(host, "rank %d ended first with status %x", plan->victim, host->first.status);
    if (plan->after == AFTER_GROW && !host->again)
        host_report(host, "the victim was not started again");
    compare_rests(host);
    for (int r = 0; r < plan->size; r++) {
        const struct child *child = &host->ranks[r];
        struct report *said = &host->page->ranks[r];
        bool planned = host->again && r == plan->victim ? child->status == 0
                                                        : ended_as_planned(plan, r, child->status);
        if (said->complaint[0])
            host_report(host, "rank %d: %s", r, said->complaint);
        if (!planned && WIFSIGNALED(child->status))
            host_report(host, "rank %d ended by %s", r, td__signal_name(WTERMSIG(child->status)));
        else if (!planned)
            host_report(host, "rank %d ended with code %d", r, WEXITSTATUS(child->status));
        if (said->complaint[0] || !planned)
            show_output(host, r);
        outcome->operations += atomic_load(&said->operations);
        if (atomic_load(&said->destroy_ns) > outcome->leaving_ns)
            outcome->leaving_ns = atomic_load(&said->destroy_ns);
        int found = atomic_load(&said->detections);
        for (int i = 0; i < found && i < MAX_DETECTIONS && r != plan->victim; i++)
            outcome->detection_ns[outcome->detections++] = said->detection_ns[i];
    }
}

/* Processes that a rank has left are ours, since this process is a subreaper. */
void host_await_orphans(struct host *host)
{
    td__deadline end = td__deadline_in_ms(LEFT_S * 1000);
    for (pid_t pid; (pid = waitpid(-1, NULL, WNOHANG)) >= 0 || errno != ECHILD;) {
        if (pid == 0 && td__deadline_passed(end)) {
            host_report(host, "a process of a rank is left");
            return;
        }
        if (pid == 0)
            td__sleep_ns(2000000);
    }
}

void host_check_left(struct host *host)
{
    char left[1000] = "";
    pid_t pids[MAX_RANKS];
    const struct plan *plan = host->plan;
    for (int r = 0; r < plan->size; r++)
        pids[r] = host->ranks[r].pid;
    /* The last process that leaves in order removes the file of a store. */
    bool last_died = plan->fault == FAULT_LATE || plan->fault == FAULT_STOP;
    td__deadline end = td__deadline_in_ms(LEFT_S * 1000);
    do {
        *left = 0;
        left_check(pids, plan->size, last_died ? NULL : host->directory, left, sizeof left);
        if (*left)
            td__sleep_ns(20000000);
    } while (*left && !td__deadline_passed(end));
    if (*left)
        host_report(host, "left behind: %s", left);
}
