/* One start of all workers of this node; see agent.h. */
#include "launch/agent.h"
#include "launch/drain.h"

#include "base/clock.h"
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

/* Whose settings a worker's output has: a spare has those of a local rank, too. */
static int model_of(const struct td__agent *agent, const struct td__worker *worker)
{
    return (worker->spare < 0 ? worker->local_rank : worker->spare) % agent->options->nproc;
}

/* How a stream of a worker is shown: depends on the options, and on whether the console is a terminal. */
static enum td__stream_style style_of(const struct td__agent *agent,
                                      const struct td__worker *worker, int which)
{
    const struct td__run_options *options = agent->options;
    int bit = which == TD__OUT ? TD__STREAM_STDOUT : TD__STREAM_STDERR;
    int model = model_of(agent, worker);
    bool to_file_only = (options->redirect[model] & bit) && !(options->tee[model] & bit);
    if (!options->shown[model] || to_file_only)
        return TD__STYLE_HIDDEN;
    if (!agent->console.to[which]->terminal || options->hosts.count || options->served_host)
        return TD__STYLE_LINES;
    return options->nproc + options->spares == 1 ? TD__STYLE_RAW : TD__STYLE_SCREEN;
}

static void set_prefix(struct td__stream *stream, const struct td__agent *agent,
                       const struct td__worker *worker, bool teed)
{
    static const int colours[] = {36, 33, 32, 35, 34, 96, 93, 92, 95, 94};
    bool spare = worker->spare >= 0;
    int colour = colours[(size_t)(spare ? worker->spare : worker->rank) %
                         (sizeof colours / sizeof *colours)];
    char name[32];
    snprintf(name, sizeof name, spare ? "spare %d" : "%d", spare ? worker->spare : worker->rank);
    stream->prefix[0] = '\0'; /* the lines of a host have theirs */
    if (worker->host)
        return;
    if (agent->options->served_host)
        snprintf(stream->prefix, sizeof stream->prefix, "[%s:%s] ", agent->options->served_host,
                 name);
    else if (stream->style == TD__STYLE_SCREEN && agent->console.colour)
        snprintf(stream->prefix, sizeof stream->prefix, "\033[%dm[%s]\033[0m ", colour, name);
    else if (stream->style == TD__STYLE_SCREEN)
        snprintf(stream->prefix, sizeof stream->prefix, "[%s] ", name);
    else if (stream->style == TD__STYLE_LINES && teed && spare)
        snprintf(stream->prefix, sizeof stream->prefix, "[%s]:", name);
    else if (stream->style == TD__STYLE_LINES && teed)
        snprintf(stream->prefix, sizeof stream->prefix, "[%.255s%d]:", agent->options->role,
                 worker->local_rank);
}

static void on_control(void *arg, const char *line, size_t size)
{
    td__hosts_take_control(arg, line, size);
}

static const int stream_bits[] = {TD__STREAM_STDOUT, TD__STREAM_STDERR};

static td_status open_log(struct td__agent *agent, const struct td__worker *worker, int which,
                          struct td__log_file *log)
{
    static const char *const names[] = {"stdout", "stderr"};
    int model = model_of(agent, worker), number = agent->attempt.number + worker->restarts;
    char owner[32];
    if (!((agent->options->redirect[model] | agent->options->tee[model]) & stream_bits[which]))
        return TD_OK;
    snprintf(owner, sizeof owner, worker->spare < 0 ? "%d" : "spare_%d",
             worker->spare < 0 ? worker->local_rank : worker->spare);
    return td__log_file_open(log, &agent->logs, number, owner, names[which]);
}

static td_status prepare_streams(struct td__agent *agent, struct td__worker *worker)
{
    for (int which = TD__OUT; which <= TD__ERR; which++) {
        struct td__stream *stream = &worker->streams[which];
        bool teed = agent->options->tee[model_of(agent, worker)] & stream_bits[which];
        stream->style = style_of(agent, worker, which);
        set_prefix(stream, agent, worker, teed);
        if (worker->host && which == TD__ERR) {
            stream->on_control = on_control;
            stream->control_arg = worker;
            stream->muted =
                true; /* what ssh says before tdrun does is for the sentence on a failure */
        }
        TD_TRY(open_log(agent, worker, which, &stream->log));
    }
    return TD_OK;
}

/* What takes a place of the attempt at the start: first the workers, then the spares. */
static struct td__worker find_place(const struct td__agent *agent, int slot)
{
    int nproc = agent->options->nproc;
    return slot < nproc ? (struct td__worker){.slot = slot,
                                              .spare = -1,
                                              .local_rank = slot,
                                              .rank = agent->world.rank + slot}
                        : (struct td__worker){
                              .slot = slot, .spare = slot - nproc, .local_rank = -1, .rank = -1};
}

/* A worker, or a spare, that can be started, at the place of another one, or of none. */
static struct td__worker make_worker(struct td__agent *agent, const struct td__worker *place,
                                     int restarts)
{
    struct td__worker worker = {
        .slot = place->slot,
        .spare = place->spare,
        .local_rank = place->local_rank,
        .rank = place->rank,
        .restarts = restarts,
        .short_lives = place->short_lives,
        .in_time = place->in_time,
        .exit_pipe = -1,
        .control = -1,
        .link = -1,
        .far_end = -1,
        .host = agent->options->hosts.count ? &agent->options->hosts.at[place->slot] : NULL,
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
            .log = {.fd = -1},
        };
    return worker;
}

/* NULL: any. */
static const struct td__cpus *cpus_of(const struct td__agent *agent,
                                      const struct td__worker *worker)
{
    bool planned = agent->cpus && worker->spare < 0 && worker->local_rank < agent->options->nproc;
    return planned ? &agent->cpus[worker->local_rank] : NULL;
}

static int book_rank(const struct td__worker *worker)
{
    return worker->spare < 0 ? worker->rank : -1 - worker->spare;
}

static td_status start_worker(struct td__agent *agent, struct td__worker *worker, int *exec_error)
{
    int local_rank = worker->local_rank;
    struct td__attempt *attempt = &agent->attempt;
    *exec_error = 0;
    if (worker->host)
        return td__hosts_start(agent, worker, exec_error);
    if (worker->spare >= 0)
        TD_TRY(td__spare_open_link(worker));
    char **envp = td__environment_make(agent, worker);
    if (!envp) {
        if (worker->spare >= 0)
            td__spare_watch_link(agent, worker, false);
        return td__fail_nomem("worker");
    }
    struct td__child_spec spec = {
        .path = agent->job->program->path,
        .argv = td__worker_program_arguments(agent->job->program, local_rank),
        .envp = envp,
        /* A terminal's keys go to tdrun; of another input the first worker gets all. */
        .standard = {local_rank == 0 && !isatty(STDIN_FILENO) && !agent->options->served_host
                         ? STDIN_FILENO
                         : agent->null},
        .keep = {agent->orders_fd, worker->far_end},
        .mask = &agent->start->mask,
        .default_signals = &agent->start->ignored,
        .file_limit = agent->file_limit.rlim_max ? &agent->file_limit : NULL,
        .cpus = cpus_of(agent, worker),
        .cpus_size = sizeof(struct td__cpus),
    };
    td_status status = td__worker_start(worker, &agent->loop, &spec, exec_error);
    free(envp);
    if (worker->spare >= 0)
        td__spare_watch_link(agent, worker, !status);
    if (!status && attempt->book.map)
        td__flight_book_started(&attempt->book, worker->slot, book_rank(worker), worker->pid);
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
        .slots = options->nproc + options->spares,
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

void td__attempt_note_spare(struct td__agent *agent, const struct td__worker *spare)
{
    if (agent->attempt.book.map)
        td__flight_log_at(agent->attempt.book.map, spare->slot)->waits = 1;
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
        td__flight_book_ended(&attempt->book, worker->slot, worker->status, how);
        worker->end_noted = true;
    }
}

td_status td__attempt_start(struct td__agent *agent, int *exec_error)
{
    struct td__attempt *attempt = &agent->attempt;
    int count = agent->options->nproc + agent->options->spares;
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
    for (; attempt->count < count; attempt->count++) {
        struct td__worker place = find_place(agent, attempt->count);
        attempt->workers[attempt->count] = make_worker(agent, &place, 0);
    }
    open_book(agent);
    for (int i = 0; i < count; i++)
        TD_TRY(prepare_streams(agent, &attempt->workers[i]));
    for (int i = 0; i < count; i++) {
        struct td__worker *worker = &attempt->workers[i];
        td_status status = start_worker(agent, worker, exec_error);
        if (status && worker->spare < 0)
            return status;
        if (status)
            td__spare_not_started(agent, worker); /* the workers run */
    }
    *exec_error = 0;
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
    *worker = make_worker(agent, &before, before.restarts + 1);
    td_status status = prepare_streams(agent, worker);
    if (!status) {
        clear_page(&agent->attempt, worker->slot);
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

/* Output from now on is that of the rank. */
static void rename_streams(struct td__agent *agent, struct td__worker *worker)
{
    for (int which = TD__OUT; which <= TD__ERR; which++) {
        struct td__log_file log = {.fd = -1};
        struct td__stream *stream = &worker->streams[which];
        bool teed = agent->options->tee[model_of(agent, worker)] & stream_bits[which];
        if (open_log(agent, worker, which, &log))
            td__console_say(&agent->console, "%s; its output is not kept", td__error_text());
        td__stream_rename(stream, style_of(agent, worker, which), &log);
        set_prefix(stream, agent, worker, teed);
    }
}

void td__attempt_promote(struct td__agent *agent, struct td__worker *spare, int rank,
                         int local_rank)
{
    struct td__attempt *attempt = &agent->attempt;
    spare->spare = -1;
    spare->rank = rank;
    spare->local_rank = local_rank;
    spare->restarts = 1;
    spare->short_lives = 0;
    spare->in_time = true;
    spare->started_ns = td__now_ns();
    rename_streams(agent, spare);
    const struct td__cpus *cpus = cpus_of(agent, spare);
    if (cpus)
        td__cpus_bind(spare->pid, cpus);
    if (!attempt->book.map)
        return;
    td__flight_log_at(attempt->book.map, spare->slot)->waits = 0;
    td__flight_book_started(&attempt->book, spare->slot, spare->rank, spare->pid);
}

void td__attempt_swap(struct td__agent *agent, struct td__worker *spare, struct td__worker *worker)
{
    struct td__worker before = *spare;
    td__attempt_promote(agent, spare, worker->rank, worker->local_rank);
    spare->restarts = worker->restarts + 1;
    spare->short_lives = worker->short_lives;
    spare->in_time = worker->in_time;
    worker->spare = before.spare;
    worker->rank = worker->local_rank = -1;
    worker->restarts = before.restarts;
    worker->short_lives = before.short_lives;
    worker->restart_wanted = true;
    worker->restart_ns = spare->started_ns;
}

/* ---- While the workers run ------------------------------------------------------------------- */

void td__attempt_signal(struct td__agent *agent, int signal)
{
    bool to_end = signal != SIGTSTP && signal != SIGCONT &&
                  !td__signal_is_passed_on(signal, &agent->options->signals);
    for (int i = 0; i < agent->attempt.count; i++) {
        struct td__worker *worker = &agent->attempt.workers[i];
        if (worker->spare < 0 || to_end || signal == SIGTSTP || signal == SIGCONT)
            td__worker_signal(worker, signal, to_end);
    }
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

bool td__attempt_ends(const struct td__attempt *attempt)
{
    for (int i = 0; i < attempt->count; i++)
        if (td__worker_ended_well(&attempt->workers[i]))
            return true;
    return false;
}

int td__attempt_running(const struct td__agent *agent)
{
    int running = 0;
    for (int i = 0; i < agent->attempt.count; i++)
        running += agent->attempt.workers[i].running && agent->attempt.workers[i].spare < 0;
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
