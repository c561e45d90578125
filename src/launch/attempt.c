/* One start of all workers of this node; see attempt.h. */
#include "launch/attempt.h"

#include "base/clock.h"
#include "base/fail.h"
#include "launch/worker.h"
#include "launch/supervisor.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { SWEEP_MS = 10000 };

/* How a stream of a worker is shown: depends on the options, and on whether the console is a terminal. */
static enum td__stream_style style_of(const struct td__attempt_setup *setup, int local_rank,
                                      int which)
{
    const struct td__run_options *options = setup->options;
    int bit = which == TD__OUT ? TD__STREAM_STDOUT : TD__STREAM_STDERR;
    bool to_file_only = (options->redirect[local_rank] & bit) && !(options->tee[local_rank] & bit);
    if (!options->shown[local_rank] || to_file_only)
        return TD__STYLE_HIDDEN;
    if (!setup->console->to[which]->terminal)
        return TD__STYLE_LINES;
    return options->nproc == 1 ? TD__STYLE_RAW : TD__STYLE_SCREEN;
}

static void set_prefix(struct td__stream *stream, const struct td__attempt_setup *setup,
                       const struct td__worker *worker, bool teed)
{
    static const int colours[] = {36, 33, 32, 35, 34, 96, 93, 92, 95, 94};
    int colour = colours[(size_t)worker->rank % (sizeof colours / sizeof *colours)];
    if (stream->style == TD__STYLE_SCREEN && setup->console->colour)
        snprintf(stream->prefix, sizeof stream->prefix, "\033[%dm[%d]\033[0m ", colour,
                 worker->rank);
    else if (stream->style == TD__STYLE_SCREEN)
        snprintf(stream->prefix, sizeof stream->prefix, "[%d] ", worker->rank);
    else if (stream->style == TD__STYLE_LINES && teed)
        snprintf(stream->prefix, sizeof stream->prefix, "[%.255s%d]:", setup->options->role,
                 worker->local_rank);
}

static td_status prepare_stream(struct td__worker *worker, const struct td__attempt_setup *setup,
                                int which, int attempt)
{
    struct td__stream *stream = &worker->streams[which];
    int bit = which == TD__OUT ? TD__STREAM_STDOUT : TD__STREAM_STDERR;
    bool teed = setup->options->tee[worker->local_rank] & bit;
    bool kept = teed || (setup->options->redirect[worker->local_rank] & bit);
    set_prefix(stream, setup, worker, teed);
    if (!kept)
        return TD_OK;
    return td__log_file_open(&stream->log, &setup->logs, attempt, worker->local_rank,
                             which == TD__OUT ? "stdout" : "stderr");
}

static struct td__worker make_worker(const struct td__attempt_setup *setup, int local_rank)
{
    struct td__worker worker = {
        .local_rank = local_rank,
        .rank = setup->world->rank + local_rank,
        .pidfd = -1,
        .on_end = setup->on_worker_end,
        .data = setup->data,
    };
    for (int which = TD__OUT; which <= TD__ERR; which++)
        worker.streams[which] = (struct td__stream){
            .channel = {.read_end = -1, .write_end = -1},
            .console = setup->console,
            .which = which,
            .style = style_of(setup, local_rank, which),
            .log = {.fd = -1},
            .on_log_error = setup->on_log_error,
            .data = setup->data,
        };
    return worker;
}

static td_status start_worker(struct td__attempt *attempt, struct td__worker *worker,
                              int *exec_error)
{
    const struct td__attempt_setup *setup = attempt->setup;
    int local_rank = worker->local_rank;
    char flight[64] = "";
    if (attempt->book.map)
        td__flight_book_place(&attempt->book, getpid(), local_rank, flight, sizeof flight);
    struct td__environment_start start = {local_rank, attempt->number, worker->restarts, flight};
    char **envp = td__environment_make(setup->options, setup->secret, setup->world, &start);
    if (!envp)
        return td__fail_nomem("worker");
    /* A terminal's keys go to tdrun; of another input the first worker gets all. */
    int input = local_rank == 0 && !isatty(STDIN_FILENO) ? STDIN_FILENO : setup->null;
    td_status status = td__worker_start(worker, &setup->worker, envp, input,
                                        setup->cpus ? &setup->cpus[local_rank] : NULL, exec_error);
    free(envp);
    if (!status && attempt->book.map)
        td__flight_book_started(&attempt->book, local_rank, worker->rank, worker->pid);
    return status;
}

/* Without it the workers run as well; only the postmortem is missing. */
static void open_book(struct td__attempt *attempt)
{
    const struct td__run_options *options = attempt->setup->options;
    struct td__flight_job job = {
        .pid = getppid(), /* the supervisor */
        .slots = options->nproc,
        .nnodes = options->nnodes,
        .node_rank = attempt->setup->world->node_rank,
        .world_size = attempt->setup->world->size,
        .attempt = attempt->number,
        .max_restarts = options->max_restarts,
        .run_id = options->run_id,
        .command = options->program,
    };
    if (td__flight_book_open(&job, &attempt->book))
        td__console_say(attempt->setup->console, "tdrun: %s; it does without\n", td_last_error());
}

void td__attempt_note_ends(struct td__attempt *attempt)
{
    char how[TD__FLIGHT_ENDING], what[64];
    for (int i = 0; i < attempt->count && attempt->book.map; i++) {
        struct td__worker *worker = &attempt->workers[i];
        if (worker->running || !worker->pid || worker->end_noted)
            continue;
        td__describe_status(worker->status, what, sizeof what);
        snprintf(how, sizeof how, "%s%s", WIFSIGNALED(worker->status) ? "killed by " : "", what);
        td__flight_book_ended(&attempt->book, worker->local_rank, worker->status, how);
        worker->end_noted = true;
    }
}

td_status td__attempt_start(struct td__attempt *attempt, const struct td__attempt_setup *setup,
                            int number, int *exec_error)
{
    int count = setup->options->nproc;
    *exec_error = 0;
    *attempt = (struct td__attempt){.setup = setup, .number = number};
    attempt->workers = calloc((size_t)count, sizeof *attempt->workers);
    if (!attempt->workers)
        return td__fail_nomem("workers");
    for (; attempt->count < count; attempt->count++)
        attempt->workers[attempt->count] = make_worker(setup, attempt->count);
    open_book(attempt);
    for (int i = 0; i < count; i++) {
        TD_TRY(prepare_stream(&attempt->workers[i], setup, TD__OUT, number));
        TD_TRY(prepare_stream(&attempt->workers[i], setup, TD__ERR, number));
    }
    for (int i = 0; i < count; i++)
        TD_TRY(start_worker(attempt, &attempt->workers[i], exec_error));
    return TD_OK;
}

/* No process writes to the page of a worker that has ended; a reader checks all that it reads. */
static void clear_page(struct td__attempt *attempt, int slot)
{
    if (attempt->book.map)
        memset((void *)td__flight_log_at(attempt->book.map, slot), 0,
               sizeof(struct td__flight_bytes));
}

void td__attempt_retire(struct td__attempt *attempt, struct td__worker *worker)
{
    td__worker_close(worker);
    uv_run(attempt->setup->worker.loop, UV_RUN_NOWAIT); /* closes the handles */
    td__tail_free(&worker->streams[TD__OUT].tail);
    td__tail_free(&worker->streams[TD__ERR].tail);
}

td_status td__attempt_restart(struct td__attempt *attempt, struct td__worker *worker)
{
    int exec_error;
    const struct td__attempt_setup *setup = attempt->setup;
    struct td__worker before = *worker;
    *worker = make_worker(setup, before.local_rank);
    worker->restarts = before.restarts + 1;
    td_status status = prepare_stream(worker, setup, TD__OUT, attempt->number + worker->restarts);
    if (!status)
        status = prepare_stream(worker, setup, TD__ERR, attempt->number + worker->restarts);
    if (!status) {
        clear_page(attempt, worker->local_rank);
        status = start_worker(attempt, worker, &exec_error);
    }
    if (status) {
        worker->pid = before.pid;
        worker->status = before.status;
        worker->started_ns = before.started_ns;
        worker->ended_ns = before.ended_ns;
        worker->exiting_ns = before.exiting_ns;
    }
    return status;
}

void td__attempt_signal(struct td__attempt *attempt, int signal)
{
    for (int i = 0; i < attempt->count; i++)
        td__worker_signal(&attempt->workers[i], signal);
}

static struct td__worker *find(struct td__attempt *attempt, pid_t pid)
{
    for (int i = 0; i < attempt->count; i++)
        if (attempt->workers[i].running && attempt->workers[i].pid == pid)
            return &attempt->workers[i];
    return NULL;
}

void td__attempt_reap(struct td__attempt *attempt)
{
    for (;;) {
        siginfo_t child = {0};
        if (waitid(P_ALL, 0, &child, WEXITED | WNOHANG | WNOWAIT) || !child.si_pid)
            return;
        struct td__worker *worker = find(attempt, child.si_pid);
        if (worker && worker->pidfd >= 0)
            return; /* there may be more behind it; they are looked for when it was reaped */
        if (worker)
            worker->on_end(worker);
        else
            waitpid(child.si_pid, NULL, WNOHANG);
    }
}

struct td__worker *td__attempt_first_failure(struct td__attempt *attempt, bool or_dying)
{
    struct td__worker *first = NULL;
    for (int i = 0; i < attempt->count; i++) {
        struct td__worker *worker = &attempt->workers[i];
        if (!worker->exiting_ns || worker->signalled ||
            (first && worker->exiting_ns > first->exiting_ns))
            continue;
        if (worker->running ? or_dying && td__worker_is_dying(worker) : worker->status != 0)
            first = worker;
    }
    return first;
}

int td__attempt_running(const struct td__attempt *attempt)
{
    int running = 0;
    for (int i = 0; i < attempt->count; i++)
        running += attempt->workers[i].running;
    return running;
}

bool td__attempt_lingers(const struct td__attempt *attempt)
{
    for (int i = 0; i < attempt->count; i++)
        if (td__worker_lingers(&attempt->workers[i]))
            return true;
    return false;
}

void td__attempt_resume_output(struct td__attempt *attempt)
{
    for (int i = 0; i < attempt->count; i++) {
        td__stream_resume(&attempt->workers[i].streams[TD__OUT]);
        td__stream_resume(&attempt->workers[i].streams[TD__ERR]);
    }
}

void td__attempt_finish(struct td__attempt *attempt)
{
    uv_loop_t *loop = attempt->setup->worker.loop;
    int left = td__reap_tree(td__deadline_in_ms(SWEEP_MS));
    if (left)
        td__console_say(attempt->setup->console,
                        "tdrun: %d processes that the workers started cannot be ended; see ps\n",
                        left);
    for (int i = 0; i < attempt->count; i++)
        td__worker_close(&attempt->workers[i]);
    int count = attempt->count;
    attempt->count = 0;
    uv_run(loop, UV_RUN_NOWAIT); /* closes the handles */
    for (int i = 0; i < count; i++) {
        td__tail_free(&attempt->workers[i].streams[TD__OUT].tail);
        td__tail_free(&attempt->workers[i].streams[TD__ERR].tail);
    }
    td__flight_book_close(&attempt->book);
    free(attempt->workers);
    attempt->workers = NULL;
}
