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
#include "launch/numa.h"
#include "os/process.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
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
    worker->exit_pipe_watched = true;
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

td_status td__worker_start(struct td__worker *worker, const struct td__worker_setup *setup,
                           char *const *envp, int input, const struct td__cpus *cpus,
                           int *exec_error)
{
    *exec_error = 0;
    worker->pidfd = -1;
    TD_TRY(td__stream_start(&worker->streams[TD__OUT], setup->loop));
    td_status status = td__stream_start(&worker->streams[TD__ERR], setup->loop);
    if (status) {
        close(worker->streams[TD__OUT].channel.write_end);
        return status;
    }
    char **argv = td__worker_program_arguments(setup->program, worker->local_rank);
    if (!argv) {
        close(worker->streams[TD__OUT].channel.write_end);
        close(worker->streams[TD__ERR].channel.write_end);
        return td__fail_nomem("worker");
    }
    int exit_pipe = open_exit_pipe(worker, setup->loop);
    int outputs[] = {worker->streams[TD__OUT].channel.write_end,
                     worker->streams[TD__ERR].channel.write_end};
    struct td__child_spec spec = {
        .path = setup->program->path,
        .argv = argv,
        .envp = envp,
        .standard = {input, outputs[TD__OUT], outputs[TD__ERR]},
        .mask = setup->mask,
        .default_signals = setup->default_signals,
        .file_limit = setup->file_limit,
        .cpus = cpus ? cpus->bits : NULL,
        .cpus_size = cpus ? sizeof cpus->bits : 0,
        .exit_pipe = exit_pipe,
    };
    const char *step;
    int error = td__child_start(&spec, &worker->pid, &step);
    free(argv);
    close(outputs[TD__OUT]);
    close(outputs[TD__ERR]);
    if (exit_pipe >= 0)
        close(exit_pipe);
    if (error) {
        *exec_error = strcmp(step, "execve") ? 0 : error;
        return td_fail(TD_ERR_SYSTEM, "worker %d cannot be started: %s: %s", worker->rank, step,
                       td__errno_text(error));
    }
    worker->running = true;
    worker->started_ns = td__now_ns();
    if (worker->exit_pipe_watched)
        uv_poll_start(&worker->exit_pipe_poll, UV_READABLE | UV_DISCONNECT, on_exit_pipe);
    watch_end(worker, setup->loop);
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

void td__worker_signal(struct td__worker *worker, int signal)
{
    if (!worker->running)
        return;
    kill(-worker->pid, signal);
    if (signal == SIGTSTP || signal == SIGCONT)
        return;
    worker->signalled = true;
    kill(-worker->pid, SIGCONT); /* a stopped one would not get it */
}

bool td__worker_is_dying(const struct td__worker *worker)
{
    struct td__process_stat stat;
    return td__process_stat(worker->pid, &stat) && (stat.state == 'Z' || stat.exiting);
}

bool td__worker_lingers(const struct td__worker *worker)
{
    return worker->running || (worker->signalled && !kill(-worker->pid, 0));
}

void td__worker_close(struct td__worker *worker)
{
    td__stream_finish(&worker->streams[TD__OUT]);
    td__stream_finish(&worker->streams[TD__ERR]);
    if (worker->pidfd >= 0) {
        uv_fs_t request;
        uv_close((uv_handle_t *)&worker->poll, NULL);
        /* By libuv, as its own descriptors: ThreadSanitizer does not know where a pidfd comes from,
         * and would mistake it for an earlier one of the store's with the same number. */
        uv_fs_close(NULL, &request, worker->pidfd, NULL);
    }
    if (worker->exit_pipe_watched) {
        uv_close((uv_handle_t *)&worker->exit_pipe_poll, NULL);
        close(worker->exit_pipe);
    }
    worker->pidfd = worker->exit_pipe = -1;
    worker->exit_pipe_watched = false;
}
