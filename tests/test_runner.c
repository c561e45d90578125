/* The runner tests itself: hidden tests that fail in every way, run by a second runner, whose output and
 * leftovers are checked. */
#include "runner.h"

#include "base/clock.h"

#include <tandem/store.h>

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

/* ---- The victims ----------------------------------------------------------------------------- */

/* Where a victim writes what its test wants to know of it. */
#define NOTES "RUNNER_TEST_NOTES"

static void note(const char *name, const char *text)
{
    char path[512], temporary[520];
    snprintf(path, sizeof path, "%s/%s", getenv(NOTES), name);
    snprintf(temporary, sizeof temporary, "%s.new", path);
    FILE *file = fopen(temporary, "w");
    CHECK(file != NULL);
    fputs(text, file);
    fclose(file);
    CHECK_EQ(rename(temporary, path), 0); /* it appears with its text */
}

static bool has_note(const char *name)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s", getenv(NOTES), name);
    return access(path, F_OK) == 0;
}

static void note_pid(const char *name)
{
    char text[16];
    snprintf(text, sizeof text, "%d", (int)getpid());
    note(name, text);
}

/* A process that neither the group nor the death of the rank reaches. */
static void start_daemon(void)
{
    pid_t pid = fork();
    if (pid == 0) {
        setsid();
        if (fork() == 0) {
            prctl(PR_SET_NAME, "stubborn");
            signal(SIGTERM, SIG_IGN);
            note_pid("daemon");
            for (;;)
                pause();
        }
        _exit(0);
    }
    waitpid(pid, NULL, 0);
    CHECK_SOON(has_note("daemon"));
}

TEST(victim_passes, .hidden = true)
{
    printf("this is not shown\n");
    note("directory", td_test_temp_dir());
    char path[512];
    snprintf(path, sizeof path, "%s/file", td_test_temp_dir());
    close(open(path, O_WRONLY | O_CREAT, 0600));
    CHECK_EQ(access(path, F_OK), 0);
}

TEST(victim_fails, .hidden = true)
{
    printf("said before\n");
    fprintf(stderr, "on standard error\n");
    CHECK_EQ(6 * 7, 41 + 0);
    printf("never said\n");
}

TEST(victim_fails_str, .hidden = true)
{
    CHECK_STR("one", "two");
}

TEST(victim_fails_ok, .hidden = true)
{
    td_store *store;
    CHECK_OK(td_prefix_store_open(NULL, NULL, &store));
}

TEST(victim_fails_fails, .hidden = true)
{
    td_store *store;
    CHECK_FAILS(td_prefix_store_open(NULL, NULL, &store), TD_ERR_INVALID, "a purple prefix");
}

TEST(victim_fails_contains, .hidden = true)
{
    CHECK_CONTAINS("a long sentence", "short");
}

TEST(victim_exits, .hidden = true)
{
    exit(3);
}

TEST(victim_skips, .hidden = true)
{
    td_test_skip("there is no %s here", "unicorn");
}

TEST(victim_hangs, .hidden = true, .deadline_s = 0.3)
{
    note("directory", td_test_temp_dir());
    printf("waiting for godot\n");
    start_daemon();
    note_pid("hangs");
    for (;;)
        pause();
}

TEST(victim_hangs_long, .hidden = true, .deadline_s = 60)
{
    note("directory", td_test_temp_dir());
    start_daemon();
    note_pid("hangs");
    for (;;)
        pause();
}

TEST(victim_hangs_alone, .hidden = true, .deadline_s = 60)
{
    note_pid("hangs");
    for (;;)
        pause();
}

TEST(victim_leaks, .hidden = true)
{
    start_daemon();
}

TEST(victim_floods, .hidden = true)
{
    for (int i = 0; i < 50000; i++)
        printf("line %d\n", i);
    exit(1);
}

RANKS(victim_rank_dies, .ranks = 3, .hidden = true)
{
    if (td_test_rank() == 2)
        raise(SIGUSR1);
}

RANKS(victim_rank_fails, .ranks = 3, .hidden = true)
{
    if (td_test_rank() == 1) {
        printf("rank one prints\n");
        CHECK(td_test_rank() == 0);
    }
    for (;;)
        pause();
}

RANKS(victim_ranks_kill, .ranks = 3, .may_die = 1 << 2, .hidden = true)
{
    td_test_barrier();
    if (td_test_rank() == 0)
        td_test_kill(2, SIGKILL);
    if (td_test_rank() == 2)
        for (;;)
            pause();
}

RANKS(victim_wrong_rank_dies, .ranks = 2, .may_die = 1 << 0, .hidden = true)
{
    if (td_test_rank() == 1)
        raise(SIGUSR2);
}

/* ---- Their tests ----------------------------------------------------------------------------- */

static struct td_test_child run_victim(const char *name)
{
    setenv(NOTES, td_test_temp_dir(), 1);
    const char *const argv[] = {td_test_program(), name, NULL};
    return td_test_exec(argv);
}

/* Returns its output, for free(). */
static char *expect_failure(const char *name, const char *const *parts)
{
    struct td_test_child child = run_victim(name);
    CHECK(WIFEXITED(child.status));
    CHECK_EQ(WEXITSTATUS(child.status), 1);
    char line[128];
    snprintf(line, sizeof line, "FAIL %s (", name);
    CHECK_CONTAINS(child.output, line);
    CHECK_CONTAINS(child.output, "\n1 tests, 1 failed\n");
    for (; *parts; parts++)
        CHECK_CONTAINS(child.output, *parts);
    return child.output;
}

#define EXPECT_FAILURE(name, ...)                                                                  \
    free(expect_failure(name, (const char *const[]){__VA_ARGS__, NULL}))

static void read_note(const char *name, char *text, size_t room)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s", td_test_temp_dir(), name);
    FILE *file = fopen(path, "r");
    if (!file)
        FAIL("there is no note \"%s\"", name);
    size_t size = fread(text, 1, room - 1, file);
    text[size] = '\0';
    fclose(file);
}

/* The process that left the note has ended. Its pid may have been reused by now, but hardly within this test. */
static bool is_gone(const char *name)
{
    char text[32];
    read_note(name, text, sizeof text);
    return kill(atoi(text), 0) && errno == ESRCH;
}

static bool directory_is_gone(void)
{
    char path[512];
    read_note("directory", path, sizeof path);
    return access(path, F_OK) && errno == ENOENT;
}

TEST(a_pass_is_one_line)
{
    struct td_test_child child = run_victim("victim_passes");
    CHECK_EQ(child.status, 0);
    CHECK(!strncmp(child.output, "ok   victim_passes (", 20));
    CHECK_CONTAINS(child.output, " s)\n1 tests, 0 failed\n");
    CHECK(!strstr(child.output, "this is not shown"));
    CHECK(directory_is_gone());
    free(child.output);
}

TEST(a_failed_check_has_place_values_and_output)
{
    const char *const parts[] = {
        "exit code 1 after 0.", "test_runner.c:",        "CHECK_EQ(6 * 7, 41 + 0): 42 is not 41",
        "| said before\n",      "| on standard error\n", NULL};
    char *output = expect_failure("victim_fails", parts);
    CHECK(!strstr(output, "never said"));
    free(output);
}

TEST(each_check_says_what_it_saw)
{
    EXPECT_FAILURE("victim_fails_str", "\"one\" is not \"two\"");
    EXPECT_FAILURE("victim_fails_ok", "TD_ERR_INVALID", "the prefix is NULL");
    EXPECT_FAILURE("victim_fails_fails", "\"a purple prefix\" is not in the message",
                   "the prefix is NULL");
    EXPECT_FAILURE("victim_fails_contains", "\"short\" is not in \"a long sentence\"");
}

TEST(an_exit_code_is_a_failure)
{
    EXPECT_FAILURE("victim_exits", "exit code 3 after ");
}

TEST(a_skip_prints_its_reason)
{
    struct td_test_child child = run_victim("victim_skips");
    CHECK_EQ(child.status, 0);
    CHECK_CONTAINS(child.output, "skip victim_skips: there is no unicorn here\n");
    CHECK_CONTAINS(child.output, "1 tests, 0 failed, 1 skipped\n");
    free(child.output);
}

TEST(a_hanging_test_is_killed_at_its_deadline)
{
    int64_t start = td__now_ns();
    EXPECT_FAILURE("victim_hangs", "still running at its deadline, killed after ",
                   "| waiting for godot\n", "left behind, and killed: ", "(stubborn)");
    CHECK(td__now_ns() - start < td_test_slowness() * (int64_t)10000000000);
    CHECK(is_gone("hangs"));
    CHECK(is_gone("daemon"));
    CHECK(directory_is_gone());
}

TEST(a_leaked_process_is_killed_and_named)
{
    EXPECT_FAILURE("victim_leaks", "left behind, and killed: pid ", "(stubborn)");
    CHECK(is_gone("daemon"));
}

TEST(a_flood_of_output_keeps_its_end)
{
    struct td_test_child child = run_victim("victim_floods");
    CHECK_EQ(WEXITSTATUS(child.status), 1);
    CHECK_CONTAINS(child.output, "only the end of its output was kept");
    CHECK_CONTAINS(child.output, "| line 49999\n");
    CHECK(strlen(child.output) < 300000);
    free(child.output);
}

TEST(a_rank_killed_by_a_signal_is_named)
{
    EXPECT_FAILURE("victim_rank_dies", "rank 2 of 3: ended by SIGUSR1 after ");
}

TEST(ranks_are_ended_after_the_first_failure)
{
    const char *const parts[] = {"rank 1 of 3: exit code 1",    "CHECK(td_test_rank() == 0)",
                                 "| rank one prints\n",         "rank 0 of 3: still running ",
                                 "rank 2 of 3: still running ", NULL};
    char *output = expect_failure("victim_rank_fails", parts);
    CHECK(strstr(output, "rank 1 of 3") <
          strstr(output, "rank 0 of 3")); /* the rank that failed, first */
    free(output);
}

TEST(a_rank_that_may_die_may)
{
    struct td_test_child child = run_victim("victim_ranks_kill");
    if (child.status)
        FAIL("%s", child.output);
    CHECK_CONTAINS(child.output, "ok   victim_ranks_kill (");
    free(child.output);
    EXPECT_FAILURE("victim_wrong_rank_dies", "rank 1 of 2: ended by SIGUSR2");
}

/* Sends a signal to a runner while its test hangs. Returns what became of the runner. */
static int interrupt_runner(const char *victim, int signal_number)
{
    setenv(NOTES, td_test_temp_dir(), 1);
    setenv("TMPDIR", td_test_temp_dir(), 1);
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        execl(td_test_program(), "test_runner", victim, (char *)NULL);
        _exit(127);
    }
    CHECK_SOON(has_note("hangs"));
    kill(pid, signal_number);
    int status;
    CHECK_EQ(waitpid(pid, &status, 0), pid);
    CHECK(WIFSIGNALED(status));
    return WTERMSIG(status);
}

TEST(an_interrupt_leaves_nothing)
{
    CHECK_EQ(interrupt_runner("victim_hangs_long", SIGINT), SIGINT);
    CHECK(is_gone("hangs"));
    CHECK(is_gone("daemon"));
    CHECK(directory_is_gone());
}

TEST(a_termination_leaves_nothing)
{
    CHECK_EQ(interrupt_runner("victim_hangs_long", SIGTERM), SIGTERM);
    CHECK(is_gone("hangs"));
    CHECK(is_gone("daemon"));
    CHECK(directory_is_gone());
}

TEST(no_rank_outlives_a_killed_runner)
{
    CHECK_EQ(interrupt_runner("victim_hangs_alone", SIGKILL), SIGKILL);
    CHECK_SOON(is_gone("hangs"));
}

TEST(names_and_patterns_choose)
{
    struct td_test_child child = td_test_exec(
        (const char *const[]){td_test_program(), "--list", NULL});
    CHECK_EQ(child.status, 0);
    CHECK_CONTAINS(child.output, "names_and_patterns_choose\n");
    CHECK(!strstr(child.output, "victim"));
    free(child.output);

    setenv(NOTES, td_test_temp_dir(), 1);
    child = td_test_exec((const char *const[]){td_test_program(), "a_pass*", "victim_skips", NULL});
    CHECK_EQ(child.status, 0);
    CHECK_CONTAINS(child.output, "ok   a_pass_is_one_line");
    CHECK_CONTAINS(child.output, "\n2 tests, 0 failed, 1 skipped\n");
    free(child.output);

    child = td_test_exec((const char *const[]){td_test_program(), "victim_*", NULL});
    CHECK_EQ(WEXITSTATUS(child.status), 2); /* a pattern does not choose hidden ones */
    free(child.output);
    child = td_test_exec((const char *const[]){td_test_program(), "--wrong", NULL});
    CHECK_EQ(WEXITSTATUS(child.status), 2);
    CHECK_CONTAINS(child.output, "usage: ");
    free(child.output);
}

/* ---- What ranks find ------------------------------------------------------------------------- */

RANKS(ranks_have_a_launchers_environment, .ranks = 4)
{
    char number[16], where[64];
    CHECK_EQ(td_test_size(), 4);
    snprintf(number, sizeof number, "%d", td_test_rank());
    CHECK_STR(getenv("RANK"), number);
    CHECK_STR(getenv("LOCAL_RANK"), number);
    CHECK_STR(getenv("WORLD_SIZE"), "4");
    CHECK_STR(getenv("LOCAL_WORLD_SIZE"), "4");
    CHECK_STR(getenv("MASTER_ADDR"), "127.0.0.1");
    CHECK_EQ(strlen(getenv("TANDEM_SECRET")), 64);
    snprintf(where, sizeof where, "127.0.0.1:%s", getenv("MASTER_PORT"));
    CHECK_STR(getenv("TANDEM_AGENT_STORE"), where);

    td_store *store;
    int64_t sum;
    CHECK_OK(td_tcp_store_open("127.0.0.1", atoi(getenv("MASTER_PORT")), NULL, &store));
    CHECK_OK(td_store_num_keys(store, &sum));
    CHECK_EQ(sum, 0); /* it is fresh */
    td_test_barrier();
    CHECK_OK(td_store_add(store, "ranks", 1, NULL));
    td_test_barrier();
    CHECK_OK(td_store_add(store, "ranks", 0, &sum));
    CHECK_EQ(sum, 4);
    CHECK_OK(td_store_close(store));
}

TEST(one_process_has_none_of_it)
{
    CHECK_EQ(td_test_size(), 1);
    CHECK_EQ(td_test_rank(), 0);
    static const char *const names[] = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "TANDEM_SECRET"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        CHECK(getenv(names[i]) == NULL);
}
