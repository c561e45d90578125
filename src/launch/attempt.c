/* One start of all workers of this node; see agent.h. */
#include "launch/agent.h"
#include "launch/drain.h"

#include "base/fail.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* ---- What all attempts have in common -------------------------------------------------------- */

/* A worker takes three descriptors here; the workers themselves keep the limit they would have. */
static void raise_file_limit(struct td__agent *agent)
{
    if (getrlimit(RLIMIT_NOFILE, &agent->file_limit))
        return;
    struct rlimit raised = {.rlim_cur = agent->file_limit.rlim_max,
                            .rlim_max = agent->file_limit.rlim_max};
    setrlimit(RLIMIT_NOFILE, &raised);
}

static td_status plan_cpus(struct td__agent *agent)
{
    const struct td__run_options *options = agent->options;
    struct td__cpus allowed;
    if (options->numa == TD__NUMA_NONE)
        return TD_OK;
    TD_TRY(td__cpus_allowed(&allowed));
    agent->cpus = calloc((size_t)options->nproc, sizeof *agent->cpus);
    if (!agent->cpus)
        return td__fail_nomem("binding to CPUs");
    return td__numa_plan("/sys/devices/system", options->numa, options->nproc, &allowed,
                         agent->cpus);
}

static td_status plan_logs(struct td__agent *agent)
{
    const struct td__run_options *options = agent->options;
    bool any = false;
    for (int i = 0; i < options->nproc; i++)
        any = any || options->redirect[i] || options->tee[i];
    if (!any)
        return TD_OK;
    int node = options->nnodes > 1 ? agent->world.node_id : -1; /* it never changes */
    TD_TRY(td__logs_open(&agent->logs, options->log_dir, options->run_id, node));
    if (agent->logs.fresh[0])
        td__console_say(&agent->console, "the workers' output is kept in %s",
                        agent->logs.directory);
    return TD_OK;
}

td_status td__attempt_prepare(struct td__agent *agent)
{
    agent->null = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (agent->null < 0)
        return td_fail(TD_ERR_SYSTEM, "cannot open /dev/null: %s", td__errno_text(errno));
    raise_file_limit(agent);
    if (!agent->options->hosts.count) {
        TD_TRY(td__orders_open(&agent->orders, &agent->orders_fd));
        td__drain_listen(agent);
    }
    TD_TRY(plan_cpus(agent));
    return plan_logs(agent);
}

/* ---- Starting -------------------------------------------------------------------------------- */

/* How a stream of a worker is shown: depends on the options, and on whether the console is a terminal. */
static enum td__stream_style style_of(const struct td__agent *agent, int local_rank, int which)
{
    const struct td__run_options *options = agent->options;
    int bit = which == TD__OUT ? TD__STREAM_STDOUT : TD__STREAM_STDERR;
    bool to_file_only = (options->redirect[local_rank] & bit) && !(options->tee[local_rank] & bit);
    if (!options->shown[local_rank] || to_file_only)
        return TD__STYLE_HIDDEN;
    if (!agent->console.to[which]->terminal || options->hosts.count || options->served_host)
        return TD__STYLE_LINES;
    return options->nproc == 1 ? TD__STYLE_RAW : TD__STYLE_SCREEN;
}

static void set_prefix(struct td__stream *stream, const struct td__agent *agent,
                       const struct td__worker *worker, bool teed)
{
    static const int colours[] = {36, 33, 32, 35, 34, 96, 93, 92, 95, 94};
    int colour = colours[(size_t)worker->rank % (sizeof colours / sizeof *colours)];
    if (worker->host)
        stream->prefix[0] = '\0'; /* its lines have theirs */
    else if (agent->options->served_host)
        snprintf(stream->prefix, sizeof stream->prefix, "[%s:%d] ", agent->options->served_host,
                 worker->rank);
    else if (stream->style == TD__STYLE_SCREEN && agent->console.colour)
        snprintf(stream->prefix, sizeof stream->prefix, "\033[%dm[%d]\033[0m ", colour,
                 worker->rank);
    else if (stream->style == TD__STYLE_SCREEN)
        snprintf(stream->prefix, sizeof stream->prefix, "[%d] ", worker->rank);
    else if (stream->style == TD__STYLE_LINES && teed)
        snprintf(stream->prefix, sizeof stream->prefix, "[%.255s%d]:", agent->options->role,
                 worker->local_rank);
}

static void on_control(void *arg, const char *line, size_t size)
{
    td__hosts_take_control(arg, line, size);
}

static td_status prepare_streams(struct td__agent *agent, struct td__worker *worker)
{
    static const char *const names[] = {"stdout", "stderr"};
    static const int bits[] = {TD__STREAM_STDOUT, TD__STREAM_STDERR};
    for (int which = TD__OUT; which <= TD__ERR; which++) {
        struct td__stream *stream = &worker->streams[which];
        bool teed = agent->options->tee[worker->local_rank] & bits[which];
        set_prefix(stream, agent, worker, teed);
        if (worker->host && which == TD__ERR) {
            stream->on_control = on_control;
            stream->control_arg = worker;
            stream->muted =
                true; /* what ssh says before tdrun does is for the sentence on a failure */
        }
        if (teed || (agent->options->redirect[worker->local_rank] & bits[which]))
            TD_TRY(td__log_file_open(&stream->log, &agent->logs,
                                     agent->attempt.number + worker->restarts, worker->local_rank,
                                     names[which]));
    }
    return TD_OK;
}

static struct td__worker make_worker(struct td__agent *agent, int local_rank, int restarts)
{
    struct td__worker worker = {
        .local_rank = local_rank,
        .rank = agent->world.rank + local_rank,
        .restarts = restarts,
        .exit_pipe = -1,
        .control = -1,
        .host = agent->options->hosts.count ? &agent->options->hosts.at[local_rank] : NULL,
        .pidfd = -1,
        .on_end = td__agent_on_worker_end,
        .data = agent,
    };
    for (int which = TD__OUT; which <= TD__ERR; which++)
        worker.streams[which] = (struct td__stream){
            .read_end = -1,
            .write_end = -1,
            .console = &agent->console,
            .which = which,
            .style = style_of(agent, local_rank, which),
            .log = {.fd = -1},
        };
    return worker;
}

static td_status start_worker(struct td__agent *agent, struct td__worker *worker, int *exec_error)
{
    int local_rank = worker->local_rank;
    struct td__attempt *attempt = &agent->attempt;
    if (worker->host)
        return td__hosts_start(agent, worker, exec_error);
    char **envp = td__environment_make(agent, worker);
    if (!envp)
        return td__fail_nomem("worker");
    struct td__child_spec spec = {
        .path = agent->job->program->path,
        .argv = td__worker_program_arguments(agent->job->program, local_rank),
        .envp = envp,
        /* A terminal's keys go to tdrun; of another input the first worker gets all. */
        .standard = {local_rank == 0 && !isatty(STDIN_FILENO) && !agent->options->served_host
                         ? STDIN_FILENO
                         : agent->null},
        .keep = {agent->orders_fd, -1},
        .mask = &agent->start->mask,
        .default_signals = &agent->start->ignored,
        .file_limit = agent->file_limit.rlim_max ? &agent->file_limit : NULL,
        .cpus = agent->cpus ? agent->cpus[local_rank].bits : NULL,
        .cpus_size = sizeof agent->cpus->bits,
    };
    td_status status = td__worker_start(worker, &agent->loop, &spec, exec_error);
    free(envp);
    if (!status && attempt->book.map)
        td__flight_book_started(&attempt->book, local_rank, worker->rank, worker->pid);
    return status;
}

/* Without it the workers run as well; only the postmortem is missing. */
static void open_book(struct td__agent *agent)
{
    const struct td__run_options *options = agent->options;
    if (options->hosts.count)
        return; /* each host has its own */
    struct td__flight_job job = {
        .pid = getppid(), /* the supervisor */
        .slots = options->nproc,
        .nnodes = agent->world.nodes,
        .node_rank = agent->world.node_rank,
        .world_size = agent->world.size,
        .attempt = agent->attempt.restarts,
        .max_restarts = options->max_restarts,
        .run_id = options->run_id,
        .command = options->program,
    };
    if (td__flight_book_open(&job, &agent->attempt.book))
        td__console_say(&agent->console, "%s; it does without", td__error_text());
}

void td__attempt_note_ends(struct td__agent *agent)
{
    struct td__attempt *attempt = &agent->attempt;
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

td_status td__attempt_start(struct td__agent *agent, int *exec_error)
{
    struct td__attempt *attempt = &agent->attempt;
    int count = agent->options->nproc;
    *exec_error = 0;
    *attempt = (struct td__attempt){.number = agent->world.round,
                                    .restarts = agent->world.restarts};
    if (agent->options->nnodes > 1)
        snprintf(agent->where, sizeof agent->where, " on node %d", agent->world.node_rank);
    if (agent->options->served_host)
        snprintf(agent->where, sizeof agent->where, " on host %s", agent->options->served_host);
    attempt->workers = calloc((size_t)count, sizeof *attempt->workers);
    if (!attempt->workers)
        return td__fail_nomem("workers");
    for (; attempt->count < count; attempt->count++)
        attempt->workers[attempt->count] = make_worker(agent, attempt->count, 0);
    open_book(agent);
    for (int i = 0; i < count; i++)
        TD_TRY(prepare_streams(agent, &attempt->workers[i]));
    for (int i = 0; i < count; i++)
        TD_TRY(start_worker(agent, &attempt->workers[i], exec_error));
    return TD_OK;
}

/* ---- Starting a worker again ----------------------------------------------------------------- */

/* No process writes to the page of a worker that has ended; a reader checks all that it reads. */
static void clear_page(struct td__attempt *attempt, int slot)
{
    if (attempt->book.map)
        memset((void *)td__flight_log_at(attempt->book.map, slot), 0,
               sizeof(struct td__flight_bytes));
}

td_status td__attempt_restart(struct td__agent *agent, struct td__worker *worker)
{
    int exec_error;
    td__worker_close(worker);
    uv_run(&agent->loop, UV_RUN_NOWAIT); /* closes the handles */
    if (agent->reason)
        return TD_OK;
    struct td__worker before = *worker;
    *worker = make_worker(agent, before.local_rank, before.restarts + 1);
    worker->short_lives = before.short_lives;
    td_status status = prepare_streams(agent, worker);
    if (!status) {
        clear_page(&agent->attempt, worker->local_rank);
        status = start_worker(agent, worker, &exec_error);
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

/* ---- While the workers run ------------------------------------------------------------------- */

void td__attempt_signal(struct td__agent *agent, int signal)
{
    bool to_end = signal != SIGTSTP && signal != SIGCONT &&
                  !td__signal_is_passed_on(signal, &agent->options->signals);
    for (int i = 0; i < agent->attempt.count; i++)
        td__worker_signal(&agent->attempt.workers[i], signal, to_end);
}

static struct td__worker *find(struct td__attempt *attempt, pid_t pid)
{
    for (int i = 0; i < attempt->count; i++)
        if (attempt->workers[i].running && attempt->workers[i].pid == pid)
            return &attempt->workers[i];
    return NULL;
}

void td__attempt_reap(struct td__agent *agent)
{
    for (;;) {
        siginfo_t child = {0};
        if (waitid(P_ALL, 0, &child, WEXITED | WNOHANG | WNOWAIT) || !child.si_pid)
            return;
        struct td__worker *worker = find(&agent->attempt, child.si_pid);
        if (worker && worker->pidfd >= 0)
            return; /* there may be more behind it; they are looked for when it was reaped */
        if (worker)
            worker->on_end(worker);
        else
            waitpid(child.si_pid, NULL, WNOHANG);
    }
}

struct td__worker *td__attempt_earliest(const struct td__attempt *attempt,
                                        bool (*fits)(const struct td__worker *worker),
                                        const struct td__worker *last)
{
    struct td__worker *first = NULL;
    for (int i = 0; i < attempt->count; i++) {
        struct td__worker *worker = &attempt->workers[i];
        bool after = !last || worker->exiting_ns > last->exiting_ns ||
                     (worker->exiting_ns == last->exiting_ns && worker > last);
        if (after && (!first || worker->exiting_ns < first->exiting_ns) && fits(worker))
            first = worker;
    }
    return first;
}

int td__attempt_running(const struct td__agent *agent)
{
    int running = 0;
    for (int i = 0; i < agent->attempt.count; i++)
        running += agent->attempt.workers[i].running;
    return running;
}

bool td__attempt_lingers(const struct td__agent *agent)
{
    for (int i = 0; i < agent->attempt.count; i++) {
        const struct td__worker *worker = &agent->attempt.workers[i];
        if (worker->running || (worker->signalled && !kill(-worker->pid, 0)))
            return true;
    }
    return false;
}

void td__attempt_resume_output(struct td__agent *agent)
{
    for (int i = 0; i < agent->attempt.count; i++) {
        td__stream_resume(&agent->attempt.workers[i].streams[TD__OUT]);
        td__stream_resume(&agent->attempt.workers[i].streams[TD__ERR]);
    }
}

void td__attempt_finish(struct td__agent *agent)
{
    struct td__attempt *attempt = &agent->attempt;
    int left = td__reap_tree();
    if (left)
        td__console_say(&agent->console,
                        "%d processes that the workers started cannot be ended; see ps", left);
    for (int i = 0; i < attempt->count; i++)
        td__worker_close(&attempt->workers[i]);
    attempt->count = 0;
    uv_run(&agent->loop, UV_RUN_NOWAIT); /* closes the handles */
    td__flight_book_close(&attempt->book);
    free(attempt->workers);
    attempt->workers = NULL;
}
