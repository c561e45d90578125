/* td_spawn(): processes of a job from inside a program, the parent's side; spawn.h has a picture.
 *
 * The children are started before the store's thread exists, so that forks inherit neither it nor its sockets. They
 * wait for the orders, which have the store's port. A child is killed with the thread that started it
 * (PR_SET_PDEATHSIG), which does not return from td_spawn() before that is set. */
#include "launch/spawn.h"

#include "base/auth.h"
#include "base/clock.h"
#include "base/fail.h"
#include "base/file_limit.h"
#include "base/option_rules.h"
#include "base/text.h"
#include "base/thread.h"
#include "launch/postmortem.h"
#include "os/process.h"

#include <tandem/store.h>

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
    MAX_PROCESSES = 65536,
    SHUTDOWN_MS = 30000,
    TIES_MS = 5000,
};

struct child {
    pid_t pid;
    bool running;
    bool arrived; /* it is in td__spawn_run() */
    int pidfd;    /* -1 where the kernel has none */
    int link;     /* the parent's end */
};

struct td_spawn_context {
    int count;
    int running;
    bool by_exec;
    struct child *children;
    struct pollfd *polls; /* room for one a child */
    td_store *store;
    struct td__flight_book book; /* of the last operations; its `map` is NULL where there is none */
    int64_t shutdown_ms;
    struct td__error failure; /* the first one; TD_OK: none yet */
    bool failure_is_echo;     /* it follows from the failure of another rank */
    bool stopping;
    td__deadline kill_at;
};

/* Appends to the error on how `rank` ended in which operation that was, where it is known. */
static void add_operation(td_spawn_context *context, int rank, int wait_status)
{
    struct td__postmortem postmortem;
    char *text = context->failure.text;
    size_t used = strlen(text);
    if (!context->book.map)
        return;
    td__flight_book_ended(&context->book, rank, wait_status, "");
    if (td__postmortem_of_book(&context->book, rank, &postmortem))
        return;
    const struct td__postmortem_rank *ended = td__postmortem_rank_of(&postmortem, rank);
    if (ended && ended->page->phase != TD__FLIGHT_ABSENT)
        td__postmortem_where(ended, text + used, sizeof context->failure.text - used);
    td__postmortem_free(&postmortem);
}

static void describe_end(td_spawn_context *context, int rank, int wait_status)
{
    long pid = (long)context->children[rank].pid;
    struct td__error *failure = &context->failure;
    char how[256];
    failure->status = TD_ERR_PEER;
    td__wait_status_text(wait_status, how, sizeof how);
    if (wait_status == TD__STATUS_UNKNOWN)
        snprintf(how, sizeof how,
                 "ended before its function returned; how is not known, since this "
                 "program ignores SIGCHLD");
    else if (WIFSIGNALED(wait_status) && WCOREDUMP(wait_status))
        td__text_add(how, sizeof how, " (core dumped)");
    if (!context->children[rank].arrived)
        td__text_add(how, sizeof how, " before %s",
                     context->by_exec ? "it called td_spawn_main(), which must come first in main()"
                                      : "its function was called");
    snprintf(failure->text, sizeof failure->text, "rank %d (process %ld) %s", rank, pid, how);
    add_operation(context, rank, wait_status);
}

/* Whether the child has sent a report before it ended. */
static bool read_report(struct child *child, struct td__error *report)
{
    ssize_t got;
    while ((got = recv(child->link, report, sizeof *report, MSG_DONTWAIT)) == 1)
        child->arrived = true;
    ssize_t length = got - (ssize_t)offsetof(struct td__error, text);
    if (length <= 0)
        return false;
    report->text[length - 1] = '\0';
    return true;
}

/* The first failure counts; but a rank that reports TD_ERR_PEER suffered from the failure of another, and a
 * rank that ended by itself at the same moment replaces it. */
static void note_end(td_spawn_context *context, int rank, int wait_status)
{
    struct td__error report;
    bool reported = read_report(&context->children[rank], &report);
    bool fine = (wait_status == 0 && context->children[rank].arrived) ||
                (wait_status == TD__STATUS_UNKNOWN && reported && !report.status);
    bool echo = reported && report.status == TD_ERR_PEER;
    if (fine || (context->failure.status && (!context->failure_is_echo || echo)))
        return;
    context->failure_is_echo = echo;
    if (!reported || !report.status) {
        describe_end(context, rank, wait_status);
        return;
    }
    td_fail(report.status, "rank %d (process %ld) failed: %s", rank,
            (long)context->children[rank].pid, report.text);
    td__error_save(&context->failure);
}

static void signal_all(td_spawn_context *context, int number)
{
    for (int rank = 0; rank < context->count; rank++)
        if (context->children[rank].running)
            kill(context->children[rank].pid, number);
}

static void stop_others(td_spawn_context *context)
{
    if (context->stopping)
        return;
    context->stopping = true;
    context->kill_at = td__deadline_in_ms(context->shutdown_ms);
    signal_all(context, SIGTERM);
    signal_all(context, SIGCONT); /* so that a stopped one gets it, too */
}

/* Whether a child has ended, and how. A program that ignores SIGCHLD never learns how. */
static bool has_ended(const struct child *child, int *wait_status)
{
    pid_t pid = waitpid(child->pid, wait_status, WNOHANG);
    if (pid == child->pid)
        return true;
    *wait_status = TD__STATUS_UNKNOWN;
    return pid < 0 && errno == ECHILD && kill(child->pid, 0);
}

static void reap(td_spawn_context *context)
{
    for (int rank = 0; rank < context->count; rank++) {
        struct child *child = &context->children[rank];
        int status;
        if (!child->running || !has_ended(child, &status))
            continue;
        child->running = false;
        context->running--;
        if (!context->stopping)
            note_end(context, rank, status);
    }
    if (context->failure.status)
        stop_others(context);
}

/* Sleeps until a child has ended or the deadline has passed. SIGCHLD may be the program's own, so
 * this watches the children's pidfds; where the kernel has none, it looks again after a moment. */
static void wait_for_end(td_spawn_context *context, td__deadline deadline)
{
    nfds_t count = 0;
    for (int rank = 0; rank < context->count; rank++) {
        struct child *child = &context->children[rank];
        if (child->running && child->pidfd >= 0)
            context->polls[count++] = (struct pollfd){.fd = child->pidfd, .events = POLLIN};
    }
    if (count < (nfds_t)context->running)
        deadline = td__deadline_earlier(deadline, td__deadline_in_ms(5));
    poll(context->polls, count, td__deadline_poll_ms(deadline));
}

static void free_context(td_spawn_context *context)
{
    for (int rank = 0; rank < context->count; rank++) {
        struct child *child = &context->children[rank];
        if (child->link >= 0)
            close(child->link);
        if (child->pidfd >= 0)
            close(child->pidfd);
    }
    td_store_close(context->store);
    td__flight_book_close(&context->book);
    free(context->children);
    free(context->polls);
    free(context);
}

td_status td_spawn_join(td_spawn_context *context, int64_t timeout_ms)
{
    if (!context)
        return td_fail(TD_ERR_INVALID, "td_spawn_join: the context is NULL");
    TD_TRY(td__check_timeout("td_spawn_join", timeout_ms));
    td__deadline deadline = timeout_ms == TD_NOW ? 0
                            : timeout_ms         ? td__deadline_in_ms(timeout_ms)
                                                 : TD__NEVER;
    for (reap(context); context->running; reap(context)) {
        if (context->stopping && td__deadline_passed(context->kill_at)) {
            signal_all(context, SIGKILL);
            context->kill_at = TD__NEVER;
        }
        if (td__deadline_passed(deadline))
            return td_fail(TD_ERR_TIMEOUT, "td_spawn_join: %d of %d processes are still running",
                           context->running, context->count);
        wait_for_end(context, context->stopping ? td__deadline_earlier(deadline, context->kill_at)
                                                : deadline);
    }
    td_status status = context->failure.status ? td__error_restore(&context->failure) : TD_OK;
    free_context(context);
    return status;
}

/* In the child: what the parent has open for itself is closed. */
static _Noreturn void run_fork(td_spawn_context *context, int rank, const int link[2], pid_t parent,
                               td_spawn_fn fn, void *arg)
{
    td__flight_book_close(&context->book); /* found again by its name when it is needed */
    close(link[0]);
    for (int other = 0; other < rank; other++) {
        close(context->children[other].link);
        close(context->children[other].pidfd);
    }
    td__spawn_run(link[1], parent, fn, arg);
}

/* Starts one child; it waits for its orders. */
static td_status start_child(td_spawn_context *context, int rank, td_spawn_fn fn, void *arg,
                             struct td__own_program *program, int arg_fd)
{
    struct child *child = &context->children[rank];
    const char *step = "fork";
    /* Sockets keep messages apart, and raise no SIGPIPE. */
    int link[2], error = 0;
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, link))
        return td_fail(TD_ERR_SYSTEM, "td_spawn: socketpair: %s", td__errno_text(errno));
    pid_t pid, parent = getpid();
    if (context->by_exec) {
        error = td__own_program_start(program, link[1], arg_fd, &pid, &step);
    } else {
        pid = fork();
        if (pid == 0)
            run_fork(context, rank, link, parent, fn, arg);
        error = pid < 0 ? errno : 0;
    }
    close(link[1]);
    if (error) {
        close(link[0]);
        return td_fail(TD_ERR_SYSTEM, "td_spawn: rank %d could not be started: %s: %s", rank, step,
                       td__errno_text(error));
    }
    *child = (struct child){.pid = pid, .running = true, .link = link[0]};
    child->pidfd = td__process_watch(pid, NULL);
    if (context->book.map)
        td__flight_book_started(&context->book, rank, rank, pid);
    context->running++;
    return TD_OK;
}

/* Waits until each fork is tied to this thread: one that the thread did not wait for could miss its end. A child that
 * hangs before that does not hold up the others for long. One that was started by exec has been tied before that. */
static void await_ties(td_spawn_context *context)
{
    td__deadline deadline = td__deadline_in_ms(TIES_MS);
    for (int rank = 0; rank < context->count && !context->by_exec; rank++) {
        struct child *child = &context->children[rank];
        struct pollfd poll_fd = {.fd = child->link, .events = POLLIN};
        char word;
        while (poll(&poll_fd, 1, td__deadline_poll_ms(deadline)) < 0 && errno == EINTR)
            ;
        child->arrived = recv(child->link, &word, 1, MSG_DONTWAIT) == 1;
    }
}

/* The user's secret stays the job's, and "" says so; otherwise the job gets one of its own. */
static td_status find_secret(char secret[65])
{
    struct td__secret given;
    secret[0] = '\0';
    TD_TRY(td__secret_load(NULL, &given));
    return given.given ? TD_OK : td__secret_make(secret);
}

/* A copy of the argument, in a file in memory that the children map. */
static td_status copy_argument(const void *arg, size_t size, int *fd)
{
    *fd = memfd_create("tandem-argument", MFD_CLOEXEC);
    int error = *fd < 0 ? errno : td__file_write_all(*fd, arg, size);
    if (!error)
        return TD_OK;
    if (*fd >= 0)
        close(*fd);
    return td_fail(TD_ERR_SYSTEM, "td_spawn: cannot copy the %zu bytes of arg: %s", size,
                   td__errno_text(error));
}

/* All children, then the store, then the orders. */
static td_status start_job(td_spawn_context *context, td_spawn_fn fn, void *arg,
                           struct td__own_program *program, struct td__spawn_orders *orders)
{
    td_status status = TD_OK;
    fflush(NULL); /* or every fork would write what is buffered once more */
    for (int rank = 0; !status && rank < context->count; rank++)
        status = start_child(context, rank, fn, arg, program, orders->arg_fd);
    TD_TRY(status);
    TD_TRY(td_tcp_store_open(
        "127.0.0.1", 0,
        &(td_tcp_store_options){.host_server = true,
                                .secret = *orders->secret ? orders->secret : NULL},
        &context->store));
    await_ties(context);
    orders->port = td_tcp_store_port(context->store);
    for (orders->rank = 0; orders->rank < context->count; orders->rank++) {
        if (context->book.map)
            td__flight_book_place(&context->book, getpid(), orders->rank, orders->flight,
                                  sizeof orders->flight);
        /* A child that has ended does not get them: that is noticed as any other end. */
        send(context->children[orders->rank].link, orders, sizeof *orders, MSG_NOSIGNAL);
    }
    return TD_OK;
}

/* Without it the job runs as well; only the last operations are missing in errors. */
static void open_book(td_spawn_context *context)
{
    struct td__flight_job job = {
        .pid = getpid(), .slots = context->count, .nnodes = 1, .world_size = context->count};
    if (td__flight_book_open(&job, &context->book))
        td_log(TD_LOG_INFO, "td_spawn: %s; it does without", td__error_text());
}

static td_status start_all(td_spawn_context *context, td_spawn_fn fn, void *arg, size_t arg_size)
{
    struct td__spawn_orders orders = {.library = td__library_fingerprint(),
                                      .count = context->count,
                                      .arg_fd = -1,
                                      .arg_size = arg_size};
    struct td__own_program program = {0};
    TD_TRY(find_secret(orders.secret));
    open_book(context);
    if (context->by_exec) {
        TD_TRY(td__spawn_locate(fn, &orders.function));
        TD_TRY(td__own_program_read(&program));
    }
    td_status status = arg_size ? copy_argument(arg, arg_size, &orders.arg_fd) : TD_OK;
    if (!status)
        status = start_job(context, fn, arg, &program, &orders);
    if (orders.arg_fd >= 0)
        close(orders.arg_fd);
    td__own_program_free(&program);
    return status;
}

static td_spawn_context *make_context(int count, const td_spawn_options *options)
{
    td_spawn_context *context = calloc(1, sizeof *context);
    if (!context)
        return NULL;
    context->children = calloc((size_t)count, sizeof *context->children);
    context->polls = calloc((size_t)count, sizeof *context->polls);
    if (!context->children || !context->polls) {
        free_context(context);
        return NULL;
    }
    context->count = count;
    context->shutdown_ms = options->shutdown_timeout_ms ? options->shutdown_timeout_ms
                                                        : SHUTDOWN_MS;
    for (int rank = 0; rank < count; rank++)
        context->children[rank] = (struct child){.link = -1, .pidfd = -1};
    return context;
}

/* By fork, unless a component of the library, or the options, say otherwise. */
static td_status choose_method(const void *arg, const td_spawn_options *options, bool *by_exec)
{
    const char *obstacle = td__fork_obstacle();
    char why[256] = "";
    if ((unsigned)options->method > TD_SPAWN_EXEC)
        return td_fail(TD_ERR_INVALID, "td_spawn: method %d is not a td_spawn_method",
                       (int)options->method);
    if (options->method == TD_SPAWN_FORK && obstacle)
        return td_fail(
            TD_ERR_STATE,
            "td_spawn: forks of this process would not work: %s; use TD_SPAWN_AUTO or TD_SPAWN_EXEC, or "
            "call td_spawn() before that",
            obstacle);
    *by_exec = options->method == TD_SPAWN_EXEC || obstacle;
    if (!*by_exec)
        return TD_OK;
    if (options->method == TD_SPAWN_AUTO)
        snprintf(why, sizeof why, " (forks would not work: %s)", obstacle);
    if (getauxval(AT_SECURE))
        return td_fail(
            TD_ERR_UNSUPPORTED,
            "td_spawn: a set-user-ID or set-group-ID program cannot start processes by exec%s",
            why);
    if (!td__spawn_main_called())
        return td_fail(
            TD_ERR_STATE,
            "td_spawn: to start processes by exec%s, main() must begin with td_spawn_main()", why);
    if (arg && !options->arg_size)
        return td_fail(
            TD_ERR_INVALID,
            "td_spawn: a process that is started by exec%s cannot use the pointer arg; with arg_size, "
            "it gets a copy of that many bytes",
            why);
    return TD_OK;
}

static td_status check_call(td_spawn_fn fn, const void *arg, int nprocs,
                            const td_spawn_options *options)
{
    if (!fn)
        return td_fail(TD_ERR_INVALID, "td_spawn: the function is NULL");
    if (nprocs < 1 || nprocs > MAX_PROCESSES)
        return td_fail(TD_ERR_INVALID, "td_spawn: %d processes; it must be 1 to %d", nprocs,
                       MAX_PROCESSES);
    if (options->arg_size && !arg)
        return td_fail(TD_ERR_INVALID, "td_spawn: arg_size is %zu, but arg is NULL",
                       options->arg_size);
    TD_TRY(td__check_kept_timeout("td_spawn", "shutdown_timeout_ms", options->shutdown_timeout_ms));
    TD_TRY(td__check_reserved("td_spawn", options->reserved));
    /* It would start processes that come here, too, without end. */
    if (td__spawn_is_pending())
        return td_fail(
            TD_ERR_STATE,
            "td_spawn: this process was started by td_spawn() itself, and main() must begin with "
            "td_spawn_main()");
    return TD_OK;
}

td_status td_spawn(td_spawn_fn fn, void *arg, int nprocs, const td_spawn_options *options)
{
    static const td_spawn_options defaults = {0};
    bool by_exec;
    if (!options)
        options = &defaults;
    TD_TRY(check_call(fn, arg, nprocs, options));
    TD_TRY(choose_method(arg, options, &by_exec));
    td_spawn_context *context = make_context(nprocs, options);
    if (!context)
        return td__fail_nomem("td_spawn");
    context->by_exec = by_exec;

    td_status status = start_all(context, fn, arg, options->arg_size);
    if (status) {
        td__error_save(&context->failure);
        context->stopping = true;
        context->kill_at = TD__NEVER;
        signal_all(context, SIGKILL);
        return td_spawn_join(context, 0);
    }
    if (options->context) {
        *options->context = context;
        return TD_OK;
    }
    return td_spawn_join(context, 0);
}

pid_t td_spawn_pid(const td_spawn_context *context, int rank)
{
    if (!context || rank < 0 || rank >= context->count)
        return -1;
    return context->children[rank].pid;
}
