/* td_spawn(): what its processes find, what their failures look like to the parent, and that none
 * of them is left. */
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
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define SECOND ((int64_t)1000000000)

/* What the processes report to the test, in shared memory. */
struct notes {
    atomic_int started, ended;
    atomic_bool go;
    pid_t pids[64];
    int number;
    char text[32];
};

static struct notes *make_notes(void)
{
    return fork_shared(sizeof(struct notes));
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

struct job {
    struct notes *notes;
    int size;
    const char *text;
};

static td_status meet_and_leave(int rank, void *arg)
{
    const struct job *job = arg;
    td_world world;
    CHECK_STR(job->text, "handed over");
    arrive(job->notes, rank);
    if (td_rendezvous(NULL, NULL, &world))
        return TD_ERR_STATE;
    CHECK_EQ(world.local_rank, rank);
    CHECK_EQ(world.local_world_size, job->size);
    use_world(&world, rank, job->size);
    td_status status = td_world_close(&world);
    atomic_fetch_add(&job->notes->ended, 1);
    return status;
}

static void expect_success(int count)
{
    char text[] = "handed over";
    struct job job = {.notes = make_notes(), .size = count, .text = text};
    CHECK_OK(td_spawn(meet_and_leave, &job, count, NULL));
    CHECK_EQ(atomic_load(&job.notes->ended), count);
    CHECK(job.notes->pids[0] != getpid());
    expect_all_gone(job.notes);
    CHECK(waitpid(-1, NULL, WNOHANG) < 0 && errno == ECHILD);
}

TEST(one_process)
{
    expect_success(1);
}

TEST(two_processes)
{
    expect_success(2);
    expect_success(2); /* and again */
}

TEST(eight_processes)
{
    expect_success(8);
}

TEST(sixty_four_processes)
{
    expect_success(64);
}

struct expected {
    int size;
    const char *secret; /* NULL: a fresh one */
};

static td_status read_environment(int rank, void *arg)
{
    char number[16], where[64];
    const struct expected *expected = arg;
    int size = expected->size;
    snprintf(number, sizeof number, "%d", rank);
    CHECK_STR(getenv("RANK"), number);
    CHECK_STR(getenv("LOCAL_RANK"), number);
    snprintf(number, sizeof number, "%d", size);
    CHECK_STR(getenv("WORLD_SIZE"), number);
    CHECK_STR(getenv("LOCAL_WORLD_SIZE"), number);
    CHECK_STR(getenv("GROUP_RANK"), "0");
    CHECK_STR(getenv("MASTER_ADDR"), "127.0.0.1");
    if (expected->secret)
        CHECK_STR(getenv("TANDEM_SECRET"), expected->secret);
    else
        CHECK_EQ(strlen(getenv("TANDEM_SECRET")), 64);
    snprintf(where, sizeof where, "127.0.0.1:%s", getenv("MASTER_PORT"));
    CHECK_STR(getenv("TANDEM_AGENT_STORE"), where);
    CHECK(getenv("TORCHELASTIC_RESTART_COUNT") == NULL);
    CHECK_STR(getenv("MINE"), "kept");
    return TD_OK;
}

TEST(the_environment_is_a_launchers)
{
    struct expected expected = {.size = 3};
    /* What is there of another job does not get in the way. */
    VARIABLES("RANK=9", "WORLD_SIZE=99", "MASTER_PORT=1", "MINE=kept",
              "TORCHELASTIC_RESTART_COUNT=7", "SLURM_PROCID=4", "SLURM_NTASKS=5");
    CHECK_OK(td_spawn(read_environment, &expected, expected.size, NULL));
    CHECK_STR(getenv("RANK"), "9");
    CHECK(getenv("TANDEM_SECRET") == NULL);
}

/* Opens the store that td_spawn() hosts with the user's secret, which is not looked up in the environment. */
static td_status read_and_join(int rank, void *arg)
{
    const struct expected *expected = arg;
    td_world world;
    td_store *store;
    td_tcp_store_options options = {.secret = expected->secret};
    CHECK_OK(td_rendezvous(NULL, NULL, &world));
    CHECK_OK(td_tcp_store_open("127.0.0.1", atoi(getenv("MASTER_PORT")), &options, &store));
    CHECK_OK(td_store_close(store));
    CHECK_OK(td_world_close(&world));
    return getenv("TANDEM_SECRET_FILE") ? TD_OK : read_environment(rank, arg);
}

TEST(the_secret_of_the_user_stays)
{
    struct expected expected = {.size = 2, .secret = "the user's own"};
    VARIABLES("TANDEM_SECRET=the user's own", "MINE=kept");
    CHECK_OK(td_spawn(read_and_join, &expected, expected.size, NULL));

    char path[300];
    snprintf(path, sizeof path, "%s/secret", td_test_temp_dir());
    FILE *file = fopen(path, "w");
    CHECK(file && fputs(expected.secret, file) >= 0 && !fclose(file) && !chmod(path, 0600));
    VARIABLES("TANDEM_SECRET=");
    setenv("TANDEM_SECRET_FILE", path, 1);
    CHECK_OK(td_spawn(read_and_join, &expected, expected.size, NULL));
}

static td_status spawn_inside(int rank, void *arg)
{
    struct job job = {.notes = arg, .size = 2, .text = "handed over"};
    td_world world;
    if (td_rendezvous(NULL, NULL, &world))
        return TD_ERR_STATE;
    use_world(&world, rank, 2);
    if (rank == 1) {
        td_status status = td_spawn(meet_and_leave, &job, 2, NULL);
        if (status)
            return status;
    }
    return td_world_close(&world);
}

TEST(a_spawned_process_may_spawn)
{
    struct notes *notes = make_notes();
    CHECK_OK(td_spawn(spawn_inside, notes, 2, NULL));
    CHECK_EQ(atomic_load(&notes->ended), 2);
}

/* ---- Failure --------------------------------------------------------------------------------- */

/* Waits for all to be there, so that none is ended before it began. */
static void wait_for_all(struct notes *notes, int rank, int count)
{
    arrive(notes, rank);
    CHECK_SOON(atomic_load(&notes->started) == count);
}

static _Noreturn void sleep_on(void)
{
    for (;;)
        pause();
}

static td_status fail_with_message(int rank, void *arg)
{
    wait_for_all(arg, rank, 3);
    if (rank == 1)
        return td_store_set_timeout(NULL, 1);
    sleep_on();
}

static td_status fail_without_message(int rank, void *arg)
{
    wait_for_all(arg, rank, 3);
    if (rank == 2)
        return TD_ERR_UNSUPPORTED;
    sleep_on();
}

static td_status fail_by_exit(int rank, void *arg)
{
    wait_for_all(arg, rank, 3);
    if (rank == 0)
        _exit(42);
    sleep_on();
}

static td_status fail_by_signal(int rank, void *arg)
{
    wait_for_all(arg, rank, 3);
    if (rank == 2)
        kill(getpid(), SIGKILL);
    sleep_on();
}

static td_status fail_by_abort(int rank, void *arg)
{
    wait_for_all(arg, rank, 3);
    if (rank == 1) {
        signal(SIGABRT, SIG_DFL);
        raise(SIGABRT);
    }
    sleep_on();
}

/* The job of three fails, and the error names the rank. */
static void expect_failure(td_spawn_fn fn, int rank, td_status status, const char *what)
{
    struct notes *notes = make_notes();
    char message[300];
    int64_t start = td__now_ns();
    CHECK_EQ(td_spawn(fn, notes, 3, NULL), status);
    CHECK_PROMPT(start); /* the others end by SIGTERM */
    snprintf(message, sizeof message, "rank %d (process %d) %s", rank, (int)notes->pids[rank],
             what);
    CHECK_STR(td_last_error(), message);
    expect_all_gone(notes);
}

TEST(the_first_failure_is_reported)
{
    expect_failure(fail_with_message, 1, TD_ERR_INVALID,
                   "failed: td_store_set_timeout: the store is NULL");
    expect_failure(fail_by_exit, 0, TD_ERR_PEER, "exited with code 42");
    expect_failure(fail_by_signal, 2, TD_ERR_PEER, "was killed by SIGKILL");
}

TEST(a_status_without_a_message_is_named)
{
    expect_failure(fail_without_message, 2, TD_ERR_UNSUPPORTED, "failed: TD_ERR_UNSUPPORTED");
}

TEST(a_crash_is_named)
{
    CHECK_FAILS(td_spawn(fail_by_abort, make_notes(), 3, NULL), TD_ERR_PEER,
                ") was killed by SIGABRT");
}

/* The parent's last error is from before; it is not the child's. */
TEST(a_message_of_the_parent_is_not_the_childs)
{
    CHECK_FAILS(td_spawn(NULL, NULL, 1, NULL), TD_ERR_INVALID, "the function is NULL");
    CHECK_EQ(td_spawn(fail_without_message, make_notes(), 3, NULL), TD_ERR_UNSUPPORTED);
    CHECK_CONTAINS(td_last_error(), " failed: TD_ERR_UNSUPPORTED");
}

static td_status fail_with_peer(int rank, void *arg)
{
    struct notes *notes = arg;
    wait_for_all(notes, rank, 2);
    if (rank == 0) {
        CHECK_SOON(atomic_load(&notes->go));
        _exit(3);
    }
    atomic_store(&notes->go, true);
    return TD_ERR_PEER;
}

/* Both end at about the same time: whatever is seen first, it is one of the two. */
TEST(one_failure_is_chosen_when_two_fail)
{
    CHECK_EQ(td_spawn(fail_with_peer, make_notes(), 2, NULL), TD_ERR_PEER);
    CHECK(strstr(td_last_error(), "exited with code 3") || strstr(td_last_error(), "TD_ERR_PEER"));
}

static td_status ignore_termination(int rank, void *arg)
{
    signal(SIGTERM, SIG_IGN);
    wait_for_all(arg, rank, 3);
    if (rank == 1)
        _exit(7);
    sleep_on();
}

TEST(processes_that_ignore_sigterm_are_killed)
{
    struct notes *notes = make_notes();
    int64_t start = td__now_ns();
    CHECK_FAILS(
        td_spawn(ignore_termination, notes, 3, &(td_spawn_options){.shutdown_timeout_ms = 300}),
        TD_ERR_PEER, "exited with code 7");
    int64_t took = td__now_ns() - start;
    CHECK(took > SECOND / 4);
    CHECK_PROMPT(start);
    expect_all_gone(notes);
}

static td_status stop_oneself(int rank, void *arg)
{
    wait_for_all(arg, rank, 2);
    if (rank == 1) {
        raise(SIGSTOP);
        sleep_on();
    }
    /* The stop is complete when the state is T. */
    struct notes *notes = arg;
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

TEST(a_stopped_process_gets_sigterm)
{
    struct notes *notes = make_notes();
    int64_t start = td__now_ns();
    CHECK_FAILS(td_spawn(stop_oneself, notes, 2, NULL), TD_ERR_PEER, "exited with code 5");
    CHECK_PROMPT(start);
    expect_all_gone(notes);
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

TEST(a_long_message_is_cut)
{
    CHECK_FAILS(td_spawn(long_message, NULL, 1, NULL), TD_ERR_STATE, ") failed: xxxxxxxx");
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
    CHECK(context == NULL);
    CHECK_FAILS(td_spawn_join(NULL, 0), TD_ERR_INVALID, "td_spawn_join: the context is NULL");
    CHECK_EQ(td_spawn_pid(NULL, 0), -1);
}

/* A child that dies before it has read its task: the parent must not die of a broken pipe. */
static atomic_bool doomed;

static void die_young(void)
{
    if (atomic_load(&doomed))
        _exit(9);
}

TEST(children_that_die_at_once_are_reported)
{
    pthread_atfork(NULL, NULL, die_young);
    atomic_store(&doomed, true);
    for (int i = 0; i < 10; i++) {
        td_status status = td_spawn(long_message, NULL, 2, NULL);
        CHECK(status == TD_ERR_PEER || status == TD_ERR_SYSTEM);
    }
    atomic_store(&doomed, false);
    CHECK(waitpid(-1, NULL, WNOHANG) < 0 && errno == ECHILD);
}

/* A program that ignores SIGCHLD has the kernel bury its children: how they ended is lost, but that
 * they have ended is not. */
TEST(a_program_may_ignore_sigchld, .deadline_s = 5)
{
    struct job job = {.notes = make_notes(), .size = 2, .text = "handed over"};
    signal(SIGCHLD, SIG_IGN);
    td_spawn(meet_and_leave, &job, 2, NULL);
    CHECK_EQ(atomic_load(&job.notes->ended), 2);
}

/* ---- Joining later --------------------------------------------------------------------------- */

static td_status wait_for_go(int rank, void *arg)
{
    struct notes *notes = arg;
    arrive(notes, rank);
    while (!atomic_load(&notes->go))
        td__sleep_ns(1000000);
    atomic_fetch_add(&notes->ended, 1);
    return TD_OK;
}

TEST(joining_may_wait)
{
    struct notes *notes = make_notes();
    td_spawn_context *context;
    CHECK_OK(td_spawn(wait_for_go, notes, 3, &(td_spawn_options){.context = &context}));
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
        int64_t start = td__now_ns();
        CHECK_FAILS(td_spawn_join(context, 50), TD_ERR_TIMEOUT,
                    "td_spawn_join: 3 of 3 processes are still running");
        CHECK(td__now_ns() - start >= SECOND / 25);
    }
    CHECK_EQ(td_spawn_pid(context, 0), notes->pids[0]);
    atomic_store(&notes->go, true);
    CHECK_OK(td_spawn_join(context, 0));
    CHECK_EQ(atomic_load(&notes->ended), 3);
    expect_all_gone(notes);
}

static td_status meet_late(int rank, void *arg)
{
    struct notes *notes = arg;
    arrive(notes, rank);
    while (!atomic_load(&notes->go))
        td__sleep_ns(1000000);
    td_world world;
    if (td_rendezvous(NULL, NULL, &world))
        return TD_ERR_STATE;
    use_world(&world, rank, 2);
    return td_world_close(&world);
}

TEST(the_store_is_there_before_td_spawn_join)
{
    struct notes *notes = make_notes();
    td_spawn_context *context;
    CHECK_OK(td_spawn(meet_late, notes, 2, &(td_spawn_options){.context = &context}));
    CHECK_FAILS(td_spawn_join(context, 1), TD_ERR_TIMEOUT, "2 of 2 processes are still running");
    atomic_store(&notes->go, true);
    CHECK_OK(td_spawn_join(context, 20000 * td_test_slowness()));
}

TEST(a_failure_is_seen_by_a_later_join)
{
    struct notes *notes = make_notes();
    td_spawn_context *context;
    td_spawn_options options = {.context = &context, .shutdown_timeout_ms = 20000};
    CHECK_OK(td_spawn(ignore_termination, notes, 3, &options));
    CHECK_SOON(atomic_load(&notes->started) == 3);
    /* The others ignore SIGTERM, so there is something left to wait for. */
    CHECK_SOON(td_spawn_join(context, 20) == TD_ERR_TIMEOUT &&
               strstr(td_last_error(), "2 of 3 processes are still running"));
    kill(td_spawn_pid(context, 0), SIGKILL);
    kill(td_spawn_pid(context, 2), SIGKILL);
    CHECK_FAILS(td_spawn_join(context, 0), TD_ERR_PEER, ") exited with code 7");
    expect_all_gone(notes);
}

TEST(two_jobs_beside_each_other)
{
    struct notes *notes[2] = {make_notes(), make_notes()};
    td_spawn_context *contexts[2];
    for (int i = 0; i < 2; i++)
        CHECK_OK(td_spawn(meet_late, notes[i], 2, &(td_spawn_options){.context = &contexts[i]}));
    for (int i = 0; i < 2; i++)
        atomic_store(&notes[i]->go, true);
    CHECK_OK(td_spawn_join(contexts[0], 0));
    CHECK_OK(td_spawn_join(contexts[1], 0));
}

/* The thread that has started the job ends before the job does: the job goes with it. */
static void *start_job(void *arg)
{
    static td_spawn_context *context;
    CHECK_OK(td_spawn(wait_for_go, arg, 2, &(td_spawn_options){.context = &context}));
    return context;
}

TEST(a_job_ends_with_the_thread_that_started_it)
{
    struct notes *notes = make_notes();
    pthread_t thread;
    void *context;
    CHECK_EQ(pthread_create(&thread, NULL, start_job, notes), 0);
    CHECK_EQ(pthread_join(thread, &context), 0);
    CHECK_FAILS(td_spawn_join(context, 0), TD_ERR_PEER, "was killed by SIGKILL");
}

/* ---- No process is left ---------------------------------------------------------------------- */

static td_status stay(int rank, void *arg)
{
    signal(SIGTERM, SIG_IGN);
    signal(SIGHUP, SIG_IGN);
    arrive(arg, rank);
    sleep_on();
}

static void start_and_stay(void *arg)
{
    td_spawn(stay, arg, 4, NULL);
}

TEST(none_outlives_a_killed_parent)
{
    struct notes *notes = make_notes();
    CHECK_EQ(prctl(PR_SET_CHILD_SUBREAPER, 1),
             0); /* orphans are reparented to and reaped by this process */
    pid_t parent = fork_start(start_and_stay, notes);
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

/* ---- What a fork shares, and what not -------------------------------------------------------- */

static td_status print_something(int rank, void *arg)
{
    (void)arg;
    printf("<%d>", rank); /* in the buffer until the process ends */
    return TD_OK;
}

static void print_and_spawn(void *arg)
{
    (void)arg;
    printf("[before]");
    if (td_spawn(print_something, NULL, 3, NULL))
        printf("%s", td_last_error());
    printf("[after]");
}

TEST(buffered_output_is_written_once)
{
    /* Into a pipe: the buffer is not flushed at line ends there. */
    setvbuf(stdout, NULL, _IOFBF, 4096);
    struct td_test_child child = td_test_fork(print_and_spawn, NULL);
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

TEST(no_descriptor_is_left_open)
{
    struct notes *notes = make_notes();
    CHECK_EQ(td_spawn(fail_by_exit, notes, 3, NULL), TD_ERR_PEER);
    int before = count_descriptors();
    for (int i = 0; i < 3; i++) {
        struct notes *fresh = make_notes();
        CHECK_EQ(td_spawn(fail_by_exit, fresh, 3, NULL), TD_ERR_PEER);
    }
    CHECK_EQ(count_descriptors(), before);
}
