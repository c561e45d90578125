/* A worker process; see worker.h.
 *
 * Which worker ended first? The loop delivers the events of descriptors in the order in which they
 * happened, so a pidfd for each worker gives the order of their ends, which waitpid() does not. That is not
 * enough: a worker that dies closes its connections some time before it has ended, and one that fails
 * because of this may end first (on a busy machine in every second case). So each worker also
 * holds a pipe that is closed before its connections are: the order of those is the order of causes. */
#include "launch/worker.h"

#include "base/clock.h"
#include "base/fail.h"
#include "base/text.h"
#include "launch/hosts.h"
#include "launch/spares.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static void on_pidfd(uv_poll_t *poll, int status, int events)
{
    (void)status;
    (void)events;
    struct td__worker *worker = poll->data;
    worker->on_end(worker);
}

static void on_exit_pipe(uv_poll_t *poll, int status, int events)
{
    (void)status;
    (void)events;
    struct td__worker *worker = poll->data;
    worker->exiting_ns = td__now_ns();
    uv_poll_stop(poll);
}

/* Makes the exit pipe; returns the worker's end of it, or -1: the worker can do without. */
static int open_exit_pipe(struct td__worker *worker, uv_loop_t *loop)
{
    int ends[2];
    if (pipe2(ends, O_CLOEXEC))
        return -1;
    if (uv_poll_init(loop, &worker->exit_pipe_poll, ends[0])) {
        close(ends[0]);
        close(ends[1]);
        return -1;
    }
    worker->exit_pipe = ends[0];
    worker->exit_pipe_poll.data = worker;
    return ends[1];
}

static void watch_end(struct td__worker *worker, uv_loop_t *loop)
{
    worker->pidfd = td__process_watch(worker->pid, NULL);
    if (worker->pidfd < 0)
        return; /* an old kernel, or a container that forbids it: SIGCHLD has to do */
    if (uv_poll_init(loop, &worker->poll, worker->pidfd)) {
        close(worker->pidfd);
        worker->pidfd = -1;
        return;
    }
    worker->poll.data = worker;
    uv_poll_start(&worker->poll, UV_READABLE, on_pidfd);
}

td_status td__worker_start(struct td__worker *worker, uv_loop_t *loop, struct td__child_spec *spec,
                           int *exec_error)
{
    struct td__stream *out = &worker->streams[TD__OUT], *err = &worker->streams[TD__ERR];
    *exec_error = 0;
    TD_TRY(td__stream_start(out, loop));
    td_status status = td__stream_start(err, loop);
    if (status) {
        close(out->write_end);
        return status;
    }
    const char *step;
    spec->standard[STDOUT_FILENO] = out->write_end;
    spec->standard[STDERR_FILENO] = err->write_end;
    spec->exit_pipe = open_exit_pipe(worker, loop);
    int error = td__child_start(spec, &worker->pid, &step);
    close(out->write_end);
    close(err->write_end);
    if (spec->exit_pipe >= 0)
        close(spec->exit_pipe);
    if (error) {
        *exec_error = strcmp(step, "execve") ? 0 : error;
        return td_fail(TD_ERR_SYSTEM, "worker %d cannot be started: %s: %s", worker->rank, step,
                       td__errno_text(error));
    }
    worker->running = true;
    worker->started_ns = td__now_ns();
    if (worker->exit_pipe >= 0)
        uv_poll_start(&worker->exit_pipe_poll, UV_READABLE | UV_DISCONNECT, on_exit_pipe);
    watch_end(worker, loop);
    return TD_OK;
}

bool td__worker_reap(struct td__worker *worker)
{
    if (!worker->running)
        return true;
    pid_t pid;
    do
        pid = waitpid(worker->pid, &worker->status, WNOHANG);
    while (pid < 0 && errno == EINTR);
    if (pid == 0)
        return false;
    worker->running = false;
    worker->ended_ns = td__now_ns();
    if (!worker->exiting_ns)
        worker->exiting_ns = worker->ended_ns; /* a child of its own still holds the pipe */
    if (worker->pidfd >= 0)
        uv_poll_stop(&worker->poll);
    return true;
}

void td__worker_signal(struct td__worker *worker, int signal, bool to_end)
{
    if (!worker->running)
        return;
    if (worker->host && signal != SIGKILL) {
        td__hosts_signal(worker, signal);
        worker->signalled = worker->signalled || to_end;
        return;
    }
    if (worker->host)
        td__hosts_hang_up(worker);
    if (worker->spare >= 0 && to_end)
        signal = SIGKILL; /* it has done nothing yet, and may sleep */
    kill(-worker->pid, signal);
    if (!to_end)
        return;
    worker->signalled = true;
    kill(-worker->pid, SIGCONT); /* a stopped one would not get it */
}

bool td__worker_is_dying(const struct td__worker *worker)
{
    struct td__process_stat stat;
    return td__process_stat(worker->pid, &stat) && (stat.state == 'Z' || stat.exiting);
}

void td__worker_close(struct td__worker *worker)
{
    td__hosts_hang_up(worker);
    td__spare_hang_up(worker);
    td__stream_finish(&worker->streams[TD__OUT]);
    td__stream_finish(&worker->streams[TD__ERR]);
    if (worker->pidfd >= 0) {
        uv_fs_t request;
        uv_close((uv_handle_t *)&worker->poll, NULL);
        /* By libuv, as its own descriptors: ThreadSanitizer does not know where a pidfd comes from,
         * and would mistake it for an earlier one of the store's with the same number. */
        uv_fs_close(NULL, &request, worker->pidfd, NULL);
    }
    if (worker->exit_pipe >= 0) {
        uv_close((uv_handle_t *)&worker->exit_pipe_poll, NULL);
        close(worker->exit_pipe);
    }
    worker->pidfd = worker->exit_pipe = -1;
}

/* ---- Reports on workers that failed ---------------------------------------------------------- */

bool td__worker_ended_well(const struct td__worker *worker)
{
    return worker->spare < 0 && worker->pid && !worker->running && worker->status == 0;
}

bool td__worker_has_failed(const struct td__worker *worker)
{
    bool unsaid = worker->host && !worker->parted; /* whatever ssh made of that */
    return worker->spare < 0 && worker->pid && !worker->running && !worker->signalled &&
           !worker->late && (worker->status != 0 || unsaid);
}

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
        td__console_say(console, "%s; it wrote nothing", sentence);
    else
        td__console_say(console, "%s; the last lines on its %s:", sentence, names[which]);
    td__console_write(console, TD__ERR, NULL, lines.data, lines.size);
    td__buffer_free(&lines);
}

void td__report_others(struct td__console *console, const struct td__worker *workers, int count,
                       const struct td__worker *first)
{
    enum { NAMED = 8 };
    char list[NAMED * 64] = "", how[64];
    int others = 0;
    for (int i = 0; i < count; i++) {
        const struct td__worker *worker = &workers[i];
        if (worker == first || !td__worker_has_failed(worker) || others++ >= NAMED)
            continue;
        td__describe_status(worker->status, how, sizeof how);
        td__text_add(list, sizeof list, "%srank %d (%s)", *list ? ", " : "", worker->rank, how);
    }
    if (others > NAMED)
        td__console_say(console, "failed right after it: %s and %d more", list, others - NAMED);
    else if (others)
        td__console_say(console, "failed right after it: %s", list);
}
