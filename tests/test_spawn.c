/* td_spawn(): what its processes find, what their failures look like to the parent, and that none
 * of them is left; with both start methods. What only exec does is in test_spawn_exec.c. */
#include "forks.h"
#include "runner.h"
#include "worlds.h"

#include "base/clock.h"

#include <tandem/launch.h>

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define SECOND ((int64_t)1000000000)

/* A test that runs with both start methods. */
#define BOTH(id, ...)                                                                              \
    static void id(td_spawn_method method);                                                        \
    TEST(id##_by_fork, __VA_ARGS__)                                                                \
    {                                                                                              \
        id(TD_SPAWN_FORK);                                                                         \
    }                                                                                              \
    TEST(id##_by_exec, __VA_ARGS__)                                                                \
    {                                                                                              \
        id(TD_SPAWN_EXEC);                                                                         \
    }                                                                                              \
    static void id(td_spawn_method method)

/* What the processes report to the test, in memory that all of them have. */
struct notes {
    atomic_int started, ended;
    atomic_bool go;
    pid_t pids[64];
};

/* What they get: the file that has the notes, and what to expect. */
struct job {
    char path[300];
    td_spawn_method method;
    int size;
    char text[32];
};

static struct notes *map_notes(const struct job *job)
{
    int fd = open(job->path, O_RDWR | O_CLOEXEC);
    CHECK(fd >= 0);
    void *memory = mmap(NULL, sizeof(struct notes), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(memory != MAP_FAILED);
    close(fd);
    return memory;
}

static struct job make_job(td_spawn_method method, int size)
{
    static int count;
    struct job job = {.method = method, .size = size};
    snprintf(job.path, sizeof job.path, "%s/notes-%d-%d", td_test_temp_dir(), (int)getpid(),
             count++);
    int fd = open(job.path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    CHECK(fd >= 0 && !ftruncate(fd, sizeof(struct notes)));
    close(fd);
    return job;
}

static td_status spawn_with(td_spawn_fn fn, struct job *job, td_spawn_options options)
{
    options.method = job->method;
    options.arg_size = sizeof *job;
    return td_spawn(fn, job, job->size, &options);
}

static td_status spawn(td_spawn_fn fn, struct job *job)
{
    return spawn_with(fn, job, (td_spawn_options){0});
}

/* Starts a job that is joined later. */
static td_spawn_context *start(td_spawn_fn fn, struct job *job)
{
    td_spawn_context *context;
    CHECK_OK(spawn_with(fn, job, (td_spawn_options){.context = &context}));
    return context;
}

static void arrive(struct notes *notes, int rank)
{
    notes->pids[rank] = getpid();
    atomic_fetch_add(&notes->started, 1);
}

static bool is_gone(pid_t pid)
{
    return kill(pid, 0) && errno == ESRCH;
}

static void expect_all_gone(const struct notes *notes)
{
    for (int rank = 0; rank < 64; rank++)
        CHECK(!notes->pids[rank] || is_gone(notes->pids[rank]));
}

/* ---- Success --------------------------------------------------------------------------------- */

static td_status meet_and_leave(int rank, void *arg)
{
    const struct job *job = arg;
    struct notes *notes = map_notes(job);
    td_world world;
    CHECK_STR(job->text, "handed over");
    arrive(notes, rank);
    if (td_rendezvous(NULL, NULL, &world))
        return TD_ERR_STATE;
    CHECK_EQ(world.local_rank, rank);
    CHECK_EQ(world.local_world_size, job->size);
    use_world(&world, rank, job->size);
    td_status status = td_world_close(&world);
    atomic_fetch_add(&notes->ended, 1);
    return status;
}

static void expect_success(td_spawn_method method, int count)
{
    struct job job = make_job(method, count);
    struct notes *notes = map_notes(&job);
    strcpy(job.text, "handed over");
    CHECK_OK(spawn(meet_and_leave, &job));
    CHECK_EQ(atomic_load(&notes->ended), count);
    CHECK(notes->pids[0] != getpid());
    expect_all_gone(notes);
    CHECK(waitpid(-1, NULL, WNOHANG) < 0 && errno == ECHILD);
}

BOTH(one_process)
{
    expect_success(method, 1);
}

BOTH(two_processes)
{
    expect_success(method, 2);
    expect_success(method, 2); /* and again */
}

BOTH(eight_processes)
{
    expect_success(method, 8);
}

BOTH(sixty_four_processes)
{
    expect_success(method, 64);
}

/* The text is the secret; "": a fresh one. */
static td_status read_environment(int rank, void *arg)
{
    char number[16], where[64];
    const struct job *job = arg;
    snprintf(number, sizeof number, "%d", rank);
    CHECK_STR(getenv("RANK"), number);
    CHECK_STR(getenv("LOCAL_RANK"), number);
    snprintf(number, sizeof number, "%d", job->size);
    CHECK_STR(getenv("WORLD_SIZE"), number);
    CHECK_STR(getenv("LOCAL_WORLD_SIZE"), number);
    CHECK_STR(getenv("GROUP_RANK"), "0");
    CHECK_STR(getenv("MASTER_ADDR"), "127.0.0.1");
    if (*job->text)
        CHECK_STR(getenv("TANDEM_SECRET"), job->text);
    else
        CHECK_EQ(strlen(getenv("TANDEM_SECRET")), 64);
    snprintf(where, sizeof where, "127.0.0.1:%s", getenv("MASTER_PORT"));
    CHECK_STR(getenv("TANDEM_AGENT_STORE"), where);
    CHECK(getenv("TORCHELASTIC_RESTART_COUNT") == NULL);
    CHECK_STR(getenv("MINE"), "kept");
    return TD_OK;
}

BOTH(the_environment_is_a_launchers)
{
    struct job job = make_job(method, 3);
    /* What is there of another job does not get in the way. */
    VARIABLES("RANK=9", "WORLD_SIZE=99", "MASTER_PORT=1", "MINE=kept",
              "TORCHELASTIC_RESTART_COUNT=7", "SLURM_PROCID=4", "SLURM_NTASKS=5");
    CHECK_OK(spawn(read_environment, &job));
    CHECK_STR(getenv("RANK"), "9");
    CHECK(getenv("TANDEM_SECRET") == NULL);
}

/* Opens the store that td_spawn() hosts with the user's secret, which is not looked up in the environment. */
static td_status read_and_join(int rank, void *arg)
{
    const struct job *job = arg;
    td_world world;
    td_store *store;
    td_tcp_store_options options = {.secret = job->text};
    CHECK_OK(td_rendezvous(NULL, NULL, &world));
    CHECK_OK(td_tcp_store_open("127.0.0.1", atoi(getenv("MASTER_PORT")), &options, &store));
    CHECK_OK(td_store_close(store));
    CHECK_OK(td_world_close(&world));
    return getenv("TANDEM_SECRET_FILE") ? TD_OK : read_environment(rank, arg);
}

BOTH(the_secret_of_the_user_stays)
{
    struct job job = make_job(method, 2);
    strcpy(job.text, "the user's own");
    VARIABLES("TANDEM_SECRET=the user's own", "MINE=kept");
    CHECK_OK(spawn(read_and_join, &job));

    char path[300];
    snprintf(path, sizeof path, "%s/secret", td_test_temp_dir());
    FILE *file = fopen(path, "w");
    CHECK(file && fputs(job.text, file) >= 0 && !fclose(file) && !chmod(path, 0600));
    VARIABLES("TANDEM_SECRET=");
    setenv("TANDEM_SECRET_FILE", path, 1);
    CHECK_OK(spawn(read_and_join, &job));
}

static td_status spawn_inside(int rank, void *arg)
{
    struct job inner = *(const struct job *)arg;
    td_world world;
    if (td_rendezvous(NULL, NULL, &world))
        return TD_ERR_STATE;
    use_world(&world, rank, 2);
    if (rank == 1) {
        td_status status = spawn(meet_and_leave, &inner);
        if (status)
            return status;
    }
    return td_world_close(&world);
}

BOTH(a_spawned_process_may_spawn)
{
    struct job job = make_job(method, 2);
    strcpy(job.text, "handed over");
    CHECK_OK(spawn(spawn_inside, &job));
    CHECK_EQ(atomic_load(&map_notes(&job)->ended), 2);
}

/* ---- Failure --------------------------------------------------------------------------------- */

/* Waits for all to be there, so that none is ended before it began. */
static struct notes *wait_for_all(const struct job *job, int rank)
{
    struct notes *notes = map_notes(job);
    arrive(notes, rank);
    CHECK_SOON(atomic_load(&notes->started) == job->size);
    return notes;
}

static _Noreturn void sleep_on(void)
{
    for (;;)
        pause();
}

static td_status fail_with_message(int rank, void *arg)
{
    wait_for_all(arg, rank);
    if (rank == 1)
        return td_store_set_timeout(NULL, 1);
    sleep_on();
}

static td_status fail_without_message(int rank, void *arg)
{
    wait_for_all(arg, rank);
    if (rank == 2)
        return TD_ERR_UNSUPPORTED;
    sleep_on();
}

static td_status fail_by_exit(int rank, void *arg)
{
    wait_for_all(arg, rank);
    if (rank == 0)
        _exit(42);
    sleep_on();
}

static td_status fail_by_signal(int rank, void *arg)
{
    wait_for_all(arg, rank);
    if (rank == 2)
        kill(getpid(), SIGKILL);
    sleep_on();
}

static td_status fail_by_abort(int rank, void *arg)
{
    wait_for_all(arg, rank);
    if (rank == 1) {
        signal(SIGABRT, SIG_DFL);
        raise(SIGABRT);
    }
    sleep_on();
}

/* The job of three fails, and the error names the rank. */
static void expect_failure(td_spawn_method method, td_spawn_fn fn, int rank, td_status status,
                           const char *what)
{
    struct job job = make_job(method, 3);
    struct notes *notes = map_notes(&job);
    char message[300];
    int64_t start = td__now_ns();
    CHECK_EQ(spawn(fn, &job), status);
    CHECK_PROMPT(start); /* the others end by SIGTERM */
    snprintf(message, sizeof message, "rank %d (process %d) %s", rank, (int)notes->pids[rank],
             what);
    CHECK_STR(td_last_error(), message);
    expect_all_gone(notes);
}

BOTH(the_first_failure_is_reported)
{
    expect_failure(method, fail_with_message, 1, TD_ERR_INVALID,
                   "failed: td_store_set_timeout: the store is NULL");
    expect_failure(method, fail_by_exit, 0, TD_ERR_PEER, "exited with code 42");
    expect_failure(method, fail_by_signal, 2, TD_ERR_PEER, "was killed by SIGKILL");
}

BOTH(a_status_without_a_message_is_named)
{
    expect_failure(method, fail_without_message, 2, TD_ERR_UNSUPPORTED,
                   "failed: TD_ERR_UNSUPPORTED");
}

BOTH(a_crash_is_named)
{
    struct job job = make_job(method, 3);
    CHECK_FAILS(spawn(fail_by_abort, &job), TD_ERR_PEER, ") was killed by SIGABRT");
}

/* The parent's last error is from before; it is not the child's. */
BOTH(a_message_of_the_parent_is_not_the_childs)
{
    struct job job = make_job(method, 3);
    CHECK_FAILS(td_spawn(NULL, NULL, 1, NULL), TD_ERR_INVALID, "the function is NULL");
    CHECK_EQ(spawn(fail_without_message, &job), TD_ERR_UNSUPPORTED);
    CHECK_CONTAINS(td_last_error(), " failed: TD_ERR_UNSUPPORTED");
}

static td_status fail_with_peer(int rank, void *arg)
{
    struct notes *notes = wait_for_all(arg, rank);
    if (rank == 0) {
        CHECK_SOON(atomic_load(&notes->go));
        _exit(3);
    }
    atomic_store(&notes->go, true);
    return TD_ERR_PEER;
}

/* Both end at about the same time: whatever is seen first, it is one of the two. */
BOTH(one_failure_is_chosen_when_two_fail)
{
    struct job job = make_job(method, 2);
    CHECK_EQ(spawn(fail_with_peer, &job), TD_ERR_PEER);
    CHECK(strstr(td_last_error(), "exited with code 3") || strstr(td_last_error(), "TD_ERR_PEER"));
}

static td_status ignore_termination(int rank, void *arg)
{
    signal(SIGTERM, SIG_IGN);
    wait_for_all(arg, rank);
    if (rank == 1)
        _exit(7);
    sleep_on();
}

BOTH(processes_that_ignore_sigterm_are_killed)
{
    struct job job = make_job(method, 3);
    int64_t begin = td__now_ns();
    td_spawn_options options = {.shutdown_timeout_ms = 300};
    CHECK_FAILS(spawn_with(ignore_termination, &job, options), TD_ERR_PEER, "exited with code 7");
    CHECK(td__now_ns() - begin > SECOND / 4);
    CHECK_PROMPT(begin);
    expect_all_gone(map_notes(&job));
}

static td_status stop_oneself(int rank, void *arg)
{
    const struct notes *notes = wait_for_all(arg, rank);
    if (rank == 1) {
        raise(SIGSTOP);
        sleep_on();
    }
    /* The stop is complete when the state is T. */
    char path[64], state = '?';
    snprintf(path, sizeof path, "/proc/%d/stat", (int)notes->pids[1]);
    for (int i = 0; i < 10000 && state != 'T'; i++) {
        FILE *file = fopen(path, "re");
        if (file && fscanf(file, "%*d (%*[^)]) %c", &state) != 1)
            state = '?';
        if (file)
            fclose(file);
        td__sleep_ns(1000000);
    }
    _exit(5);
}

BOTH(a_stopped_process_gets_sigterm)
{
    struct job job = make_job(method, 2);
    int64_t begin = td__now_ns();
    CHECK_FAILS(spawn(stop_oneself, &job), TD_ERR_PEER, "exited with code 5");
    CHECK_PROMPT(begin);
    expect_all_gone(map_notes(&job));
}

static td_status long_message(int rank, void *arg)
{
    (void)rank;
    (void)arg;
    char text[5000];
    memset(text, 'x', sizeof text - 1);
    text[sizeof text - 1] = '\0';
    return td_fail(TD_ERR_STATE, "%s", text);
}

BOTH(a_long_message_is_cut)
{
    struct job job = make_job(method, 1);
    CHECK_FAILS(spawn(long_message, &job), TD_ERR_STATE, ") failed: xxxxxxxx");
    CHECK(strlen(td_last_error()) < 2200);
}

TEST(arguments_are_checked)
{
    td_spawn_context *context = NULL;
    CHECK_FAILS(td_spawn(NULL, NULL, 1, NULL), TD_ERR_INVALID, "td_spawn: the function is NULL");
    CHECK_FAILS(td_spawn(long_message, NULL, 0, NULL), TD_ERR_INVALID,
                "td_spawn: 0 processes; it must be 1 to 65536");
    CHECK_FAILS(td_spawn(long_message, NULL, -3, NULL), TD_ERR_INVALID, "td_spawn: -3 processes");
    CHECK_FAILS(td_spawn(long_message, NULL, 65537, NULL), TD_ERR_INVALID, "65537 processes");
    CHECK_FAILS(td_spawn(long_message, NULL, 1,
                         &(td_spawn_options){.shutdown_timeout_ms = -1, .context = &context}),
                TD_ERR_INVALID, "td_spawn: shutdown_timeout_ms is -1 ms");
    CHECK_FAILS(td_spawn(long_message, NULL, 1,
                         &(td_spawn_options){.reserved = {[1] = &context}, .context = &context}),
                TD_ERR_INVALID, "td_spawn: reserved[1]");
    CHECK_FAILS(
        td_spawn(long_message, NULL, 1, &(td_spawn_options){.method = 3, .context = &context}),
        TD_ERR_INVALID, "td_spawn: method 3 is not a td_spawn_method");
    CHECK_FAILS(td_spawn(long_message, NULL, 1, &(td_spawn_options){.arg_size = 8}), TD_ERR_INVALID,
                "td_spawn: arg_size is 8, but arg is NULL");
    CHECK_FAILS(td_spawn(long_message, &context, 1, &(td_spawn_options){.method = TD_SPAWN_EXEC}),
                TD_ERR_INVALID, "cannot use the pointer arg; with arg_size, it gets a copy");
    CHECK(context == NULL);
    CHECK_FAILS(td_spawn_join(NULL, 0), TD_ERR_INVALID, "td_spawn_join: the context is NULL");
    CHECK_EQ(td_spawn_pid(NULL, 0), -1);
}

/* A child that dies before it has read its orders: the parent must not die of a broken pipe. */
static atomic_bool doomed;

static void die_young(void)
{
    if (atomic_load(&doomed))
        _exit(9);
}

__attribute__((constructor)) static void die_at_the_start(void)
{
    if (getenv("TEST_DIE_YOUNG"))
        _exit(9);
}

BOTH(children_that_die_at_once_are_reported)
{
    struct job job = make_job(method, 2);
    pthread_atfork(NULL, NULL, die_young);
    atomic_store(&doomed, true);
    setenv("TEST_DIE_YOUNG", "1", 1);
    for (int i = 0; i < 10; i++)
        CHECK_FAILS(spawn(long_message, &job), TD_ERR_PEER, "exited with code 9 before ");
    atomic_store(&doomed, false);
    CHECK(waitpid(-1, NULL, WNOHANG) < 0 && errno == ECHILD);
}

/* A program that ignores SIGCHLD has the kernel bury its children: how they ended is lost, but that
 * they have ended is not. */
BOTH(a_program_may_ignore_sigchld, .deadline_s = 5)
{
    struct job job = make_job(method, 2);
    strcpy(job.text, "handed over");
    signal(SIGCHLD, SIG_IGN);
    CHECK_OK(spawn(meet_and_leave, &job));
    CHECK_EQ(atomic_load(&map_notes(&job)->ended), 2);
}

/* ---- Joining later --------------------------------------------------------------------------- */

static td_status wait_for_go(int rank, void *arg)
{
    struct notes *notes = map_notes(arg);
    arrive(notes, rank);
    while (!atomic_load(&notes->go))
        td__sleep_ns(1000000);
    atomic_fetch_add(&notes->ended, 1);
    return TD_OK;
}

BOTH(joining_may_wait)
{
    struct job job = make_job(method, 3);
    struct notes *notes = map_notes(&job);
    td_spawn_context *context = start(wait_for_go, &job);
    CHECK_SOON(atomic_load(&notes->started) == 3);
    for (int rank = 0; rank < 3; rank++)
        CHECK_EQ(td_spawn_pid(context, rank), notes->pids[rank]);
    CHECK_EQ(td_spawn_pid(context, 3), -1);
    CHECK_EQ(td_spawn_pid(context, -1), -1);
    CHECK_FAILS(td_spawn_join(context, -2), TD_ERR_INVALID,
                "td_spawn_join: the timeout is -2 ms; it must not be negative");
    CHECK_FAILS(td_spawn_join(context, TD_NOW), TD_ERR_TIMEOUT,
                "td_spawn_join: 3 of 3 processes are still running");
    for (int i = 0; i < 3; i++) {
        int64_t begin = td__now_ns();
        CHECK_FAILS(td_spawn_join(context, 50), TD_ERR_TIMEOUT,
                    "td_spawn_join: 3 of 3 processes are still running");
        CHECK(td__now_ns() - begin >= SECOND / 25);
    }
    CHECK_EQ(td_spawn_pid(context, 0), notes->pids[0]);
    atomic_store(&notes->go, true);
    CHECK_OK(td_spawn_join(context, 0));
    CHECK_EQ(atomic_load(&notes->ended), 3);
    expect_all_gone(notes);
}

static td_status meet_late(int rank, void *arg)
{
    struct notes *notes = map_notes(arg);
    arrive(notes, rank);
    while (!atomic_load(&notes->go))
        td__sleep_ns(1000000);
    td_world world;
    if (td_rendezvous(NULL, NULL, &world))
        return TD_ERR_STATE;
    use_world(&world, rank, 2);
    return td_world_close(&world);
}

BOTH(the_store_is_there_before_td_spawn_join)
{
    struct job job = make_job(method, 2);
    td_spawn_context *context = start(meet_late, &job);
    CHECK_FAILS(td_spawn_join(context, 1), TD_ERR_TIMEOUT, "2 of 2 processes are still running");
    atomic_store(&map_notes(&job)->go, true);
    CHECK_OK(td_spawn_join(context, 20000 * td_test_slowness()));
}

BOTH(a_failure_is_seen_by_a_later_join)
{
    struct job job = make_job(method, 3);
    struct notes *notes = map_notes(&job);
    td_spawn_context *context;
    td_spawn_options options = {.context = &context, .shutdown_timeout_ms = 20000};
    CHECK_OK(spawn_with(ignore_termination, &job, options));
    CHECK_SOON(atomic_load(&notes->started) == 3);
    /* The others ignore SIGTERM, so there is something left to wait for. */
    CHECK_SOON(td_spawn_join(context, 20) == TD_ERR_TIMEOUT &&
               strstr(td_last_error(), "2 of 3 processes are still running"));
    kill(td_spawn_pid(context, 0), SIGKILL);
    kill(td_spawn_pid(context, 2), SIGKILL);
    CHECK_FAILS(td_spawn_join(context, 0), TD_ERR_PEER, ") exited with code 7");
    expect_all_gone(notes);
}

BOTH(two_jobs_beside_each_other)
{
    struct job jobs[2] = {make_job(method, 2), make_job(method, 2)};
    td_spawn_context *contexts[2];
    for (int i = 0; i < 2; i++)
        contexts[i] = start(meet_late, &jobs[i]);
    for (int i = 0; i < 2; i++)
        atomic_store(&map_notes(&jobs[i])->go, true);
    CHECK_OK(td_spawn_join(contexts[0], 0));
    CHECK_OK(td_spawn_join(contexts[1], 0));
}

/* The thread that has started the job ends before the job does: the job goes with it. */
static void *start_job(void *arg)
{
    return start(wait_for_go, arg);
}

BOTH(a_job_ends_with_the_thread_that_started_it)
{
    struct job job = make_job(method, 2);
    pthread_t thread;
    void *context;
    CHECK_EQ(pthread_create(&thread, NULL, start_job, &job), 0);
    CHECK_EQ(pthread_join(thread, &context), 0);
    CHECK_FAILS(td_spawn_join(context, 0), TD_ERR_PEER, "was killed by SIGKILL");
}

/* ---- No process is left ---------------------------------------------------------------------- */

static td_status stay(int rank, void *arg)
{
    signal(SIGTERM, SIG_IGN);
    signal(SIGHUP, SIG_IGN);
    arrive(map_notes(arg), rank);
    sleep_on();
}

static void start_and_stay(void *arg)
{
    spawn(stay, arg);
}

BOTH(none_outlives_a_killed_parent)
{
    struct job job = make_job(method, 4);
    const struct notes *notes = map_notes(&job);
    CHECK_EQ(prctl(PR_SET_CHILD_SUBREAPER, 1),
             0); /* orphans are reparented to and reaped by this process */
    pid_t parent = fork_start(start_and_stay, &job);
    CHECK_SOON(atomic_load(&notes->started) == 4);
    fork_kill(parent, SIGKILL);
    for (int rank = 0; rank < 4; rank++) {
        int status = 0;
        CHECK_SOON(waitpid(notes->pids[rank], &status, WNOHANG) == notes->pids[rank]);
        CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
        CHECK(is_gone(notes->pids[rank]));
    }
    CHECK(waitpid(-1, NULL, WNOHANG) < 0 && errno == ECHILD);
}

/* A terminal sends SIGINT to the process group that is in the foreground: all are in one. */
static volatile sig_atomic_t interrupted;

static void note_interrupt(int number)
{
    (void)number;
    interrupted = 1;
}

static td_status interrupt_group(int rank, void *arg)
{
    signal(SIGINT, rank == 0 ? SIG_IGN : SIG_DFL);
    wait_for_all(arg, rank);
    if (rank == 0)
        kill(0, SIGINT);
    sleep_on();
}

BOTH(an_interrupt_of_the_process_group_reaches_all)
{
    struct job job = make_job(method, 3);
    signal(SIGINT, note_interrupt);
    CHECK_FAILS(spawn(interrupt_group, &job), TD_ERR_PEER, "was killed by SIGINT");
    CHECK(interrupted);
    expect_all_gone(map_notes(&job));
}

/* ---- Output, descriptors, and what a fork shares -------------------------------------------------------- */

static td_status print_something(int rank, void *arg)
{
    (void)arg;
    printf("<%d>", rank); /* in the buffer until the process ends */
    return TD_OK;
}

static void print_and_spawn(void *arg)
{
    printf("[before]");
    if (spawn(print_something, arg))
        printf("%s", td_last_error());
    printf("[after]");
}

BOTH(buffered_output_is_written_once)
{
    struct job job = make_job(method, 3);
    /* Into a pipe: the buffer is not flushed at line ends there. */
    setvbuf(stdout, NULL, _IOFBF, 4096);
    struct td_test_child child = td_test_fork(print_and_spawn, &job);
    CHECK_EQ(child.status, 0);
    CHECK_EQ(strlen(child.output), strlen("[before]<0><1><2>[after]"));
    CHECK(!strncmp(child.output, "[before]", 8));
    CHECK_CONTAINS(child.output, "<0>");
    CHECK_CONTAINS(child.output, "<1>");
    CHECK_CONTAINS(child.output, "<2>");
    CHECK_CONTAINS(child.output, "[after]");
    free(child.output);
}

enum { SHARED_SIZE = 3 << 20 };

static td_status change_memory(int rank, void *arg)
{
    unsigned char *memory = arg;
    for (int i = 0; i < SHARED_SIZE; i++)
        CHECK_EQ(memory[i], i % 251);
    memset(memory, 200 + rank, SHARED_SIZE);

    /* What it allocates itself is its own, and does not overlap what it has inherited. */
    unsigned char *own = td_alloc(SHARED_SIZE);
    CHECK(own != NULL);
    memset(own, rank, SHARED_SIZE);
    td_world world;
    if (td_rendezvous(NULL, NULL, &world))
        return TD_ERR_STATE;
    use_world(&world, rank, 3); /* by now all have written */
    for (int i = 0; i < SHARED_SIZE; i++) {
        CHECK_EQ(memory[i], 200 + rank);
        CHECK_EQ(own[i], rank);
    }
    td_free(own);
    td_free(memory);
    return td_world_close(&world);
}

TEST(shareable_memory_is_a_copy_in_the_children)
{
    unsigned char *memory = td_alloc(SHARED_SIZE);
    CHECK(memory != NULL);
    for (int i = 0; i < SHARED_SIZE; i++)
        memory[i] = (unsigned char)(i % 251);
    CHECK_OK(td_spawn(change_memory, memory, 3, NULL));
    for (int i = 0; i < SHARED_SIZE; i++)
        CHECK_EQ(memory[i], i % 251);
    td_free(memory);
}

/* A store that the parent has open is not the child's to use. */
static td_status use_inherited(int rank, void *arg)
{
    (void)rank;
    CHECK_FAILS(td_store_set(arg, "key", "x", 1), TD_ERR_STATE, "was opened before fork()");
    return td_store_close(arg); /* the parent's stays open */
}

TEST(a_store_of_the_parent_survives_the_children)
{
    td_store *store;
    int64_t sum;
    CHECK_OK(
        td_tcp_store_open("127.0.0.1", 0, &(td_tcp_store_options){.host_server = true}, &store));
    CHECK_OK(td_spawn(use_inherited, store, 2, NULL));
    CHECK_OK(td_store_add(store, "key", 4, &sum));
    CHECK_EQ(sum, 4);
    CHECK_OK(td_store_close(store));
}

static int count_descriptors(void)
{
    int count = 0;
    for (int fd = 0; fd < 1024; fd++)
        count += fcntl(fd, F_GETFD) >= 0;
    return count;
}

BOTH(no_descriptor_is_left_open)
{
    struct job job = make_job(method, 3);
    CHECK_EQ(spawn(fail_by_exit, &job), TD_ERR_PEER);
    int before = count_descriptors();
    for (int i = 0; i < 3; i++) {
        job = make_job(method, 3);
        CHECK_EQ(spawn(fail_by_exit, &job), TD_ERR_PEER);
    }
    CHECK_EQ(count_descriptors(), before);
}
