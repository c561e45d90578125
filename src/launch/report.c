/* The report on failures; see worker.h. */
#include "launch/worker.h"

#include "base/fail.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>

int td__exit_code(int status)
{
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

void td__describe_status(int status, char *text, size_t room)
{
    if (!WIFSIGNALED(status))
        snprintf(text, room, "exit code %d", WEXITSTATUS(status));
    else
        snprintf(text, room, "%s%s", td__signal_name(WTERMSIG(status)),
                 WCOREDUMP(status) ? " (core dumped)" : "");
}

void td__describe_failure(const struct td__worker *worker, const char *where, char *text,
                          size_t room)
{
    char how[64];
    int status = worker->status;
    td__describe_status(status, how, sizeof how);
    snprintf(text, room, "rank %d (local rank %d%s, pid %d) %s %s after %.3f s%s", worker->rank,
             worker->local_rank, where, (int)worker->pid,
             WIFSIGNALED(status) ? "was killed by" : "failed with", how,
             (double)(worker->ended_ns - worker->started_ns) / 1e9,
             WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL
                 ? " (the kernel sends it when memory runs out: see dmesg)"
                 : "");
}

void td__report_failure(struct td__console *console, const struct td__worker *worker,
                        const char *sentence)
{
    static const char *const names[] = {"stdout", "stderr"};
    struct td__buffer lines = {0};
    int which = TD__ERR;
    bool any = td__tail_print(&worker->streams[which].tail, "    | ", &lines);
    if (!any) {
        which = TD__OUT;
        any = td__tail_print(&worker->streams[which].tail, "    | ", &lines);
    }
    if (!any)
        td__console_say(console, "tdrun: %s; it wrote nothing\n", sentence);
    else
        td__console_say(console, "tdrun: %s; the last lines on its %s:\n", sentence, names[which]);
    td__console_write(console, TD__ERR, NULL, lines.data, lines.size);
    td__buffer_free(&lines);
}

void td__report_others(struct td__console *console, const struct td__worker *workers, int count,
                       const struct td__worker *first)
{
    enum { NAMED = 8 };
    char list[NAMED * 64] = "", how[64];
    size_t used = 0;
    int others = 0;
    for (int i = 0; i < count; i++) {
        const struct td__worker *worker = &workers[i];
        bool failed = worker->pid && !worker->running && !worker->signalled && worker->status != 0;
        if (worker == first || !failed || others++ >= NAMED)
            continue;
        td__describe_status(worker->status, how, sizeof how);
        used += (size_t)snprintf(list + used, sizeof list - used, "%srank %d (%s)",
                                 used ? ", " : "", worker->rank, how);
    }
    if (others > NAMED)
        td__console_say(console, "tdrun: failed right after it: %s and %d more\n", list,
                        others - NAMED);
    else if (others)
        td__console_say(console, "tdrun: failed right after it: %s\n", list);
}
