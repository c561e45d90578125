/* The test runner: a test is a function, and runs in one process or in several.
 *
 *     TEST(adds_up)
 *     {
 *         CHECK_EQ(1 + 1, 2);
 *     }
 *
 *     RANKS(all_arrive, .ranks = 4, .deadline_s = 10)
 *     {
 *         … td_test_rank(), td_test_size(), td_test_barrier() …
 *     }
 *
 * A test binary without arguments runs all its tests one after another; with names or patterns
 * ("tcp*") those; with --list it lists them. Each process of a test is the same binary, started
 * again. It ends well when its function returns, badly when a check fails, when it exits with
 * another code than 0, or when a signal ends it. When one rank has failed, the others get two
 * seconds to end. What is left at the deadline is killed, processes that a rank has left behind
 * too, and the latter count as a failure.
 *
 * The ranks of RANKS have RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT,
 * TANDEM_SECRET and TANDEM_AGENT_STORE in their environment, as a launcher would set them, and find
 * a fresh TCP store at the address that these name. Other variables of Tandem are removed, HOME is an empty
 * directory of the test's own; what
 * TD_TEST_SET says, as in TD_TEST_SET="TANDEM_TLS=1 TANDEM_TRANSPORT=tcp", is set for all tests. TD_TEST_SKIP="name
 * name" leaves tests out.
 *
 * With --long as the first argument, tests that ask td_test_is_long() do more, and have 30 times as long.
 *
 * With --device NAME as the first arguments, that device is the current one when a test begins, and its failures fail the
 * test. host_data.h reads elements on any device; a test that is about the host's own memory says so in `.host_only`,
 * and is skipped there. */
#ifndef TANDEM_TESTS_RUNNER_H
#define TANDEM_TESTS_RUNNER_H

#include <tandem/base.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

/* ---- Declaring ------------------------------------------------------------------------------- */

struct td_test {
    const char *name;
    void (*run)(void);
    const void *arg;   /* for td_test_arg() */
    int ranks;         /* 0: one process, without a store */
    double deadline_s; /* 0: 20; five times as long under a sanitizer */
    uint64_t may_die;  /* bit r: rank r may end in any way, as long as no check has failed there */
    bool hidden;       /* runs only when it is called by its name */
    const char *host_only; /* why it is skipped with --device; NULL: it is not */
    struct td_test *next;  /* the runner's */
};

/** Adds a test, which stays the caller's; from a constructor. */
void td_test_register(struct td_test *test);

#define TEST(id, ...) TD_TEST_DEFINE(id, __VA_ARGS__)
#define RANKS(id, ...) TD_TEST_DEFINE(id, __VA_ARGS__)

#define TD_TEST_DEFINE(id, ...)                                                                    \
    static void test_##id(void);                                                                   \
    static struct td_test td_test_##id = {.name = #id, .run = test_##id, __VA_ARGS__};             \
    __attribute__((constructor)) static void register_##id(void)                                   \
    {                                                                                              \
        td_test_register(&td_test_##id);                                                           \
    }                                                                                              \
    static void test_##id(void)

/* ---- Inside a test --------------------------------------------------------------------------- */

int td_test_rank(void);
int td_test_size(void);

/** The test's `arg`. */
const void *td_test_arg(void);

/** A directory for this run of the test, the same one for all its ranks; removed afterwards. */
const char *td_test_temp_dir(void);

/** How many entries a directory has. */
int td_test_count_files(const char *directory);

/** Ends this rank; the test counts as skipped unless another rank fails. */
_Noreturn void td_test_skip(const char *format, ...) __attribute__((format(printf, 1, 2)));

/** Sends `signal` to `rank`; SIGSTOP: and waits until it has stopped. */
void td_test_kill(int rank, int signal);

/** Waits until all ranks of the test are here. Needs no store. */
void td_test_barrier(void);

/** Whether the device of the tests is the host: there was no --device, or one of the host's. */
bool td_test_on_host(void);

/** 1, or 5 where a sanitizer slows everything down. */
int td_test_slowness(void);

/** Whether --long was given. */
bool td_test_is_long(void);

/** How a child process has ended. */
struct td_test_child {
    int status;   /* of waitpid() */
    char *output; /* standard output and error, ended by a NUL; for free() */
};

/** Runs fn(arg) in a fork of this process, until it returns (then its exit code is 0), or exits. */
struct td_test_child td_test_fork(void (*fn)(void *), void *arg);

/** The file of this program, to start it again. Async-signal-safe. (QEMU shows the right file behind
 *  /proc/self/exe, but cannot execute it by that name.) */
const char *td_test_program(void);

/** Runs a program, found as execvp() does; `argv` ends with a NULL. */
struct td_test_child td_test_exec(const char *const *argv);

/* ---- Checks ----------------------------------------------------------------------------------
 *
 * The first check that fails ends its process. Checks may be used in any thread, and in a fork. */

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition))                                                                          \
            td_test_fail(__FILE__, __LINE__, "CHECK(%s) does not hold", #condition);               \
    } while (0)

/** Integers. */
#define CHECK_EQ(a, b) td_test_check_eq(__FILE__, __LINE__, #a, #b, (long long)(a), (long long)(b))

/** C strings. */
#define CHECK_STR(a, b) td_test_check_str(__FILE__, __LINE__, #a, (a), (b))

/** `text` contains `part`. */
#define CHECK_CONTAINS(text, part) td_test_check_contains(__FILE__, __LINE__, #text, (text), (part))

/** Two times `size` bytes. */
#define CHECK_MEM(a, b, size) td_test_check_mem(__FILE__, __LINE__, #a, #b, (a), (b), (size))

/** A call that returns TD_OK. */
#define CHECK_OK(call) td_test_check_ok(__FILE__, __LINE__, #call, (call))

/** A call that returns `status`, and whose message contains `part`. */
#define CHECK_FAILS(call, status, part)                                                            \
    td_test_check_fails(__FILE__, __LINE__, #call, (call), (status), (part))

/** Waits until another thread or process makes the condition true; fails after half a minute. */
#define CHECK_SOON(condition)                                                                      \
    do {                                                                                           \
        for (int td_left = 30000 * td_test_slowness(); !(condition); td_left--)                    \
            td_test_pause(__FILE__, __LINE__, #condition, td_left);                                \
    } while (0)

/** `since` (of td__now_ns()) is not long ago: what ran since then did not wait for a timeout. Its limit of
 *  20 seconds does not measure speed, and holds on a busy machine; the timeout that would have been waited
 *  for must be a minute or more. */
#define CHECK_PROMPT(since) td_test_check_prompt(__FILE__, __LINE__, (since))

/** Fails with this message. */
#define FAIL(...) td_test_fail(__FILE__, __LINE__, __VA_ARGS__)

_Noreturn void td_test_fail(const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
void td_test_check_eq(const char *file, int line, const char *a_text, const char *b_text,
                      long long a, long long b);
void td_test_check_str(const char *file, int line, const char *text, const char *a, const char *b);
void td_test_check_contains(const char *file, int line, const char *what, const char *text,
                            const char *part);
void td_test_check_prompt(const char *file, int line, int64_t since_ns);
void td_test_check_mem(const char *file, int line, const char *a_text, const char *b_text,
                       const void *a, const void *b, size_t size);
void td_test_check_ok(const char *file, int line, const char *call, td_status status);
void td_test_check_fails(const char *file, int line, const char *call, td_status status,
                         td_status expected, const char *part);
void td_test_pause(const char *file, int line, const char *condition, int left);

#endif
