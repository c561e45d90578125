/* td_spawn() by exec: how a fresh start of the program comes to the function, and what it gets. */
#include "runner.h"

#include "base/thread.h"

#include <tandem/launch.h>

#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define HOSTS TD_TEST_BUILD_DIR "/tests/spawn_host_"
#define PLUGINS TD_TEST_BUILD_DIR "/tests/spawn_plugin_"

static td_status spawn_text(td_spawn_fn fn, const char *text)
{
    td_spawn_options options = {.method = TD_SPAWN_EXEC, .arg_size = strlen(text) + 1};
    return td_spawn(fn, (void *)text, 2, &options);
}

/* ---- Programs ---------------------------------------------------------------------------------- */

static int count_of(const char *text, const char *part)
{
    int count = 0;
    for (; (text = strstr(text, part)); text += strlen(part))
        count++;
    return count;
}

/* Copies a file into the test's directory. */
static void copy_file(const char *from, const char *name, char path[400])
{
    snprintf(path, 400, "%s/%s", td_test_temp_dir(), name);
    struct td_test_child child = td_test_exec((const char *[]){"cp", from, path, NULL});
    CHECK_EQ(child.status, 0);
    free(child.output);
}

static char *host_prints(const char *host, const char *what, int code)
{
    struct td_test_child child = td_test_exec((const char *[]){host, what, "a word", NULL});
    if (!WIFEXITED(child.status) || WEXITSTATUS(child.status) != code)
        FAIL("%s %s: wait status %d: %s", host, what, child.status, child.output);
    return child.output;
}

/* Global variables are fresh, and main() is run by the first process only. */
static void expect_pair(const char *output, const char *what, int times)
{
    char line[200];
    for (int rank = 0; rank < 2; rank++) {
        snprintf(line, sizeof line,
                 "rank %d of 2: a word; 3 arguments, %s; changed 1; variable not set\n", rank,
                 what);
        if (count_of(output, line) != times)
            FAIL("\"%s\" is not in \"%s\" %d times", line, output, times);
    }
    CHECK_EQ(count_of(output, "main of process"), 1);
}

static void host_starts_pairs(const char *host)
{
    char *output = host_prints(host, "plain", 0);
    expect_pair(output, "plain", 1);
    free(output);
    output = host_prints(host, "twice", 0);
    expect_pair(output, "twice", 2);
    free(output);
}

static void host_is_removed(const char *host)
{
    char path[400];
    copy_file(host, "host", path);
    char *output = host_prints(path, "removed", 0);
    expect_pair(output, "removed", 1);
    free(output);
    CHECK(access(path, F_OK) != 0);
}

TEST(a_program_with_the_shared_library)
{
    host_starts_pairs(HOSTS "shared");
    host_is_removed(HOSTS "shared");
}

TEST(a_program_with_a_static_library)
{
    host_starts_pairs(HOSTS "static");
    host_is_removed(HOSTS "static");
}

TEST(a_program_at_a_fixed_address)
{
    host_starts_pairs(HOSTS "fixed");
    host_is_removed(HOSTS "fixed");
}

/* A variable that does not come from the parent is not followed. */
TEST(a_variable_of_another_origin_is_ignored)
{
    int pair[2];
    char number[16];
    for (int i = 0; i < 3; i++) {
        /* No number, a descriptor that is no socket, and a socket of a process that is not the parent's. */
        CHECK_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair), 0);
        snprintf(number, sizeof number, "%d", pair[0]);
        setenv("TANDEM_SPAWN", i == 0 ? "x" : i == 1 ? "0" : number, 1);
        struct td_test_child child = td_test_exec(
            (const char *[]){"sh", "-c", HOSTS "shared plain 'a word'; exit $?", NULL});
        CHECK_EQ(child.status, 0);
        expect_pair(child.output, "plain", 1);
        free(child.output);
        close(pair[0]);
        close(pair[1]);
    }
}

/* ---- main() without td_spawn_main() -------------------------------------------------------------- */

TEST(without_td_spawn_main_nothing_is_started)
{
    char *output = host_prints(HOSTS "shared", "without", 3);
    CHECK_CONTAINS(
        output, "process 1: TD_ERR_STATE: td_spawn: to start processes by exec, main() must begin "
                "with td_spawn_main()");
    CHECK_EQ(count_of(output, "process"), 3);
    free(output);
}

/* It does not start processes without end. */
TEST(a_process_that_comes_to_td_spawn_again)
{
    char *output = host_prints(HOSTS "shared", "again", 3);
    CHECK_CONTAINS(
        output, "process 2: TD_ERR_STATE: td_spawn: this process was started by td_spawn() itself");
    CHECK_CONTAINS(output, "exited with code 3 before it called td_spawn_main()");
    free(output);
}

TEST(a_process_that_does_nothing_has_failed)
{
    char *output = host_prints(HOSTS "shared", "nothing", 3);
    CHECK_CONTAINS(
        output,
        "exited with code 0 before it called td_spawn_main(), which must come first in main()");
    CHECK_EQ(count_of(output, "main of process"), 1);
    free(output);
}

/* ---- The function and its argument ---------------------------------------------------------------- */

static td_spawn_fn load_plugin(const char *path)
{
    void *library = dlopen(path, RTLD_NOW);
    if (!library)
        FAIL("%s", dlerror());
    td_spawn_fn fn = (td_spawn_fn)dlsym(library, "plugin_work");
    CHECK(fn != NULL);
    return fn;
}

TEST(a_function_of_a_shared_object)
{
    char path[400];
    copy_file(PLUGINS "1.so", "plugin.so", path);
    CHECK_EQ(chdir(td_test_temp_dir()), 0);
    td_spawn_fn fn = load_plugin("./plugin.so");
    CHECK_OK(spawn_text(fn, "build 1"));
    CHECK_FAILS(spawn_text(fn, "build 2"), TD_ERR_UNSUPPORTED, "failed: TD_ERR_UNSUPPORTED");

    char newer[400];
    copy_file(PLUGINS "2.so", "newer.so", newer);
    CHECK_EQ(rename(newer, path), 0);
    CHECK_FAILS(spawn_text(fn, "build 1"), TD_ERR_STATE,
                "/plugin.so is another build than in the process that called td_spawn()");
    CHECK_EQ(unlink(path), 0);
    CHECK_FAILS(spawn_text(fn, "build 1"), TD_ERR_STATE,
                "the shared object of the function cannot be loaded: ");
}

TEST(a_function_that_was_made_at_run_time)
{
    void *code = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(code != MAP_FAILED);
    CHECK_FAILS(spawn_text((td_spawn_fn)(uintptr_t)code, "x"), TD_ERR_INVALID,
                "td_spawn: the function was made at run time");
}

enum { LARGE = 3 << 20 };

static td_status change_argument(int rank, void *arg)
{
    unsigned char *bytes = arg;
    for (int i = 0; i < LARGE; i++)
        if (bytes[i] != i % 251)
            return td_fail(TD_ERR_MISMATCH, "byte %d is %d", i, bytes[i]);
    memset(bytes, 200 + rank, LARGE);
    return (uintptr_t)bytes % 64 ? TD_ERR_STATE : TD_OK;
}

/* With both methods it is a copy, also of memory that forks share. */
TEST(an_argument_is_copied)
{
    unsigned char *bytes = mmap(NULL, LARGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1,
                                0);
    CHECK(bytes != MAP_FAILED);
    for (int i = 0; i < LARGE; i++)
        bytes[i] = (unsigned char)(i % 251);
    td_spawn_options options = {.arg_size = LARGE, .method = TD_SPAWN_EXEC};
    CHECK_OK(td_spawn(change_argument, bytes, 2, &options));
    options.method = TD_SPAWN_FORK;
    CHECK_OK(td_spawn(change_argument, bytes, 2, &options));
    for (int i = 0; i < LARGE; i++)
        CHECK_EQ(bytes[i], i % 251);
}

static td_status expect_no_argument(int rank, void *arg)
{
    return rank >= 0 && !arg ? TD_OK : TD_ERR_STATE;
}

TEST(an_argument_that_is_null)
{
    CHECK_OK(td_spawn(expect_no_argument, NULL, 2, &(td_spawn_options){.method = TD_SPAWN_EXEC}));
}

/* ---- What others see ------------------------------------------------------------------------------ */

static bool file_has(const char *path, const char *text)
{
    static char content[1 << 20];
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    CHECK(fd >= 0);
    ssize_t got, size = 0;
    while ((got = read(fd, content + size, sizeof content - (size_t)size)) > 0)
        size += got;
    close(fd);
    return memmem(content, (size_t)size, text, strlen(text)) != NULL;
}

static td_status look_for_secrets(int rank, void *arg)
{
    const char *secret = getenv("TANDEM_SECRET");
    (void)rank;
    CHECK(secret && strlen(secret) == 64);
    CHECK(file_has("/proc/self/environ", "TANDEM_SPAWN=")); /* it is the right file */
    CHECK(!file_has("/proc/self/environ", secret));
    CHECK(!file_has("/proc/self/environ", arg));
    CHECK(!file_has("/proc/self/cmdline", secret));
    CHECK(!file_has("/proc/self/cmdline", arg));
    return TD_OK;
}

TEST(neither_secret_nor_argument_is_seen_outside)
{
    CHECK_OK(spawn_text(look_for_secrets, "an argument of td_spawn()"));
}

/* Descriptors that are not for programs that are started do not get there. */
static td_status count_descriptors(int rank, void *arg)
{
    int count = 0, most;
    (void)rank;
    for (int fd = 3; fd < 1024; fd++)
        count += fcntl(fd, F_GETFD) >= 0;
    memcpy(&most, arg, sizeof most);
    return count <= most ? TD_OK : td_fail(TD_ERR_STATE, "%d descriptors, at most %d", count, most);
}

TEST(a_process_has_its_own_descriptors_only)
{
    int most = 1; /* the link; the argument was closed */
    for (int fd = 3; fd < 1024; fd++) {
        int flags = fcntl(fd, F_GETFD);
        most += flags >= 0 && !(flags & FD_CLOEXEC);
    }
    td_spawn_options options = {.method = TD_SPAWN_EXEC, .arg_size = sizeof most};
    CHECK_OK(td_spawn(count_descriptors, &most, 8, &options));
}

/* ---- When a fork would not work --------------------------------------------------------------------- */

static int global;

static td_status expect_global(int rank, void *arg)
{
    int expected;
    (void)rank;
    memcpy(&expected, arg, sizeof expected);
    return global == expected ? TD_OK : td_fail(TD_ERR_STATE, "global is %d", global);
}

TEST(automatic_forks_until_a_fork_would_not_work)
{
    int expected = 1;
    td_spawn_options options = {.arg_size = sizeof expected};
    global = 1;
    CHECK_OK(td_spawn(expect_global, &expected, 2, &options));
    CHECK_OK(td_spawn(expect_global, &expected, 2, NULL)); /* the pointer itself */

    td__fork_breaks("cuda:0 was used in this process");
    td__fork_breaks("another reason");
    expected = 0;
    CHECK_OK(td_spawn(expect_global, &expected, 2, &options));
    CHECK_FAILS(
        td_spawn(expect_global, &expected, 2, NULL), TD_ERR_INVALID,
        "td_spawn: a process that is started by exec (forks would not work: cuda:0 was used in this process) "
        "cannot use the pointer arg");
    options.method = TD_SPAWN_FORK;
    CHECK_FAILS(
        td_spawn(expect_global, &expected, 2, &options), TD_ERR_STATE,
        "td_spawn: forks of this process would not work: cuda:0 was used in this process; use TD_SPAWN_AUTO "
        "or TD_SPAWN_EXEC");
}
