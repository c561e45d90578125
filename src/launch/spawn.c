/* td_spawn(): processes of a job from inside a program.
 *
 *     parent: fork nprocs children, then host the store, send the children its port, watch them
 *     child:  wait for the port, set the environment, run fn, report a failure, exit
 *
 * The children are forked before the store's thread exists, so that they inherit neither it nor its
 * sockets. They get the port through `orders`, whose end means the parent's death; each sends the status
 * and message of its end through `report`. A child is killed with the thread that started it
 * (PR_SET_PDEATHSIG), which does not return from td_spawn() before that is set. */
#include "base/auth.h"
#include "base/clock.h"
#include "base/fail.h"
#include "base/option_rules.h"
#include "base/text.h"
#include "launch/postmortem.h"
#include "os/process.h"

#include <tandem/launch.h>
#include <tandem/store.h>

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
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
    int pidfd;  /* -1 where the kernel has none */
    int report; /* the read end */
};

struct td_spawn_context {
    int count;
    int running;
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

/* ---- The child ------------------------------------------------------------------------------- */

static void set_number(const char *name, int number)
{
    char text[16];
    snprintf(text, sizeof text, "%d", number);
    setenv(name, text, 1);
}

static void set_environment(int rank, int count, int port, const char *secret, const char *flight)
{
    char endpoint[32];
    setenv(TD__FLIGHT_VARIABLE, flight, 1);
    set_number("RANK", rank);
    set_number("LOCAL_RANK", rank);
    set_number("GROUP_RANK", 0);
    set_number("WORLD_SIZE", count);
    set_number("LOCAL_WORLD_SIZE", count);
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    set_number("MASTER_PORT", port);
    snprintf(endpoint, sizeof endpoint, "127.0.0.1:%d", port);
    setenv("TANDEM_AGENT_STORE", endpoint, 1);
    if (*secret)
        setenv("TANDEM_SECRET", secret, 1);
    unsetenv("TORCHELASTIC_RESTART_COUNT");
}

static _Noreturn void run_child(td_spawn_fn fn, void *arg, int rank, int count, const char *secret,
                                const char *flight, int orders, int report_fd, pid_t parent)
{
    int port;
    if (td__die_with_parent(parent, SIGKILL))
        _exit(1);
    send(orders, "", 1, MSG_NOSIGNAL);
    ssize_t got;
    while ((got = recv(orders, &port, sizeof port, 0)) < 0 && errno == EINTR)
        ;
    close(orders);
    if (got != sizeof port)
        _exit(1); /* the parent could not start the job */
    set_environment(rank, count, port, secret, flight);

    td_fail(TD_OK, "%s", ""); /* the last error of the parent */
    td_status status = fn(rank, arg);
    struct td__error report;
    td__error_save(&report);
    report.status = status;
    if (!*report.text)
        snprintf(report.text, sizeof report.text, "%s", td_status_name(status));
    ssize_t ignored = send(report_fd, &report, sizeof report, MSG_NOSIGNAL);
    (void)ignored; /* the exit code is left */
    fflush(NULL);
    _exit(status ? 1 : 0);
}

/* ---- The parent ------------------------------------------------------------------------------ */

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
    char how[128];
    failure->status = TD_ERR_PEER;
    td__wait_status_text(wait_status, how, sizeof how);
    if (wait_status == TD__STATUS_UNKNOWN)
        snprintf(how, sizeof how,
                 "ended before its function returned; how is not known, since this "
                 "program ignores SIGCHLD");
    else if (WIFSIGNALED(wait_status) && WCOREDUMP(wait_status))
        td__text_add(how, sizeof how, " (core dumped)");
    snprintf(failure->text, sizeof failure->text, "rank %d (process %ld) %s", rank, pid, how);
    add_operation(context, rank, wait_status);
}

/* The first failure counts; but a rank that reports TD_ERR_PEER suffered from the failure of another, and a
 * rank that ended by itself at the same moment replaces it. */
static void note_end(td_spawn_context *context, int rank, int wait_status)
{
    struct td__error report;
    ssize_t got = recv(context->children[rank].report, &report, sizeof report, MSG_DONTWAIT);
    bool reported = got == (ssize_t)sizeof report;
    bool fine = wait_status == 0 ||
                (wait_status == TD__STATUS_UNKNOWN && reported && !report.status);
    bool echo = reported && report.status == TD_ERR_PEER;
    if (fine || (context->failure.status && (!context->failure_is_echo || echo)))
        return;
    context->failure_is_echo = echo;
    if (!reported || !report.status) {
        describe_end(context, rank, wait_status);
        return;
    }
    report.text[sizeof report.text - 1] = '\0';
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
        if (child->report >= 0)
            close(child->report);
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

/* A pair of sockets: they keep messages apart, and raise no SIGPIPE. The first end receives. */
static td_status make_pipe(int ends[2])
{
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends))
        return td_fail(TD_ERR_SYSTEM, "td_spawn: socketpair: %s", td__errno_text(errno));
    return TD_OK;
}

/* Forks one child; it waits for its orders. */
static td_status start_child(td_spawn_context *context, int rank, td_spawn_fn fn, void *arg,
                             const char *secret, const int orders[2])
{
    struct child *child = &context->children[rank];
    int report[2];
    TD_TRY(make_pipe(report));
    pid_t parent = getpid();
    char flight[64] = "";
    if (context->book.map)
        td__flight_book_place(&context->book, parent, rank, flight, sizeof flight);
    pid_t pid = fork();
    if (pid == 0) {
        td__flight_book_close(&context->book); /* found again by its name when it is needed */
        close(orders[1]);
        close(report[0]);
        for (int other = 0; other < rank; other++) {
            close(context->children[other].report);
            close(context->children[other].pidfd);
        }
        run_child(fn, arg, rank, context->count, secret, flight, orders[0], report[1], parent);
    }
    close(report[1]);
    if (pid < 0) {
        close(report[0]);
        return td_fail(TD_ERR_SYSTEM, "td_spawn: rank %d could not be started: fork: %s", rank,
                       td__errno_text(errno));
    }
    *child = (struct child){.pid = pid, .running = true, .report = report[0]};
    child->pidfd = td__process_watch(pid, NULL);
    if (context->book.map)
        td__flight_book_started(&context->book, rank, rank, pid);
    context->running++;
    return TD_OK;
}

/* Waits until each child is tied to this thread: one that the thread did not wait for could miss its
 * end. A child that was killed before that does not hold up the others for long. */
static void await_ties(const td_spawn_context *context, int orders)
{
    td__deadline deadline = td__deadline_in_ms(TIES_MS);
    for (int tied = 0; tied < context->count;) {
        struct pollfd poll_fd = {.fd = orders, .events = POLLIN};
        char word;
        int ready = poll(&poll_fd, 1, td__deadline_poll_ms(deadline));
        if (ready < 0 && errno == EINTR)
            continue;
        if (ready <= 0 || recv(orders, &word, 1, 0) <= 0)
            return;
        tied++;
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

/* All children, then the store, then its port to the children. */
static td_status start_all(td_spawn_context *context, td_spawn_fn fn, void *arg)
{
    char secret[65];
    int orders[2];
    TD_TRY(find_secret(secret));
    TD_TRY(make_pipe(orders));
    struct td__flight_job job = {
        .pid = getpid(), .slots = context->count, .nnodes = 1, .world_size = context->count};
    if (td__flight_book_open(&job, &context->book))
        td_log(TD_LOG_INFO, "td_spawn: %s; it does without", td_last_error());
    fflush(NULL); /* or every child would write what is buffered once more */
    td_status status = TD_OK;
    for (int rank = 0; !status && rank < context->count; rank++)
        status = start_child(context, rank, fn, arg, secret, orders);
    close(orders[0]);
    if (!status)
        status = td_tcp_store_open(
            "127.0.0.1", 0,
            &(td_tcp_store_options){.host_server = true, .secret = *secret ? secret : NULL},
            &context->store);
    if (!status)
        await_ties(context, orders[1]);
    int port = status ? 0 : td_tcp_store_port(context->store);
    for (int rank = 0; !status && rank < context->count; rank++)
        send(orders[1], &port, sizeof port, MSG_NOSIGNAL);
    close(orders[1]); /* without their orders the children end by themselves */
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
        context->children[rank] = (struct child){.report = -1, .pidfd = -1};
    return context;
}

td_status td_spawn(td_spawn_fn fn, void *arg, int nprocs, const td_spawn_options *options)
{
    static const td_spawn_options defaults = {0};
    if (!options)
        options = &defaults;
    if (!fn)
        return td_fail(TD_ERR_INVALID, "td_spawn: the function is NULL");
    if (nprocs < 1 || nprocs > MAX_PROCESSES)
        return td_fail(TD_ERR_INVALID, "td_spawn: %d processes; it must be 1 to %d", nprocs,
                       MAX_PROCESSES);
    TD_TRY(td__check_kept_timeout("td_spawn", "shutdown_timeout_ms", options->shutdown_timeout_ms));
    TD_TRY(td__check_reserved("td_spawn", options->reserved));
    td_spawn_context *context = make_context(nprocs, options);
    if (!context)
        return td__fail_nomem("td_spawn");

    td_status status = start_all(context, fn, arg);
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
