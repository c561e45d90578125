/* The small parts of base/: status and last error, buffers, map, numbers, clock, threads. */
#include "runner.h"

#include "base/buffer.h"
#include "base/clock.h"
#include "base/fail.h"
#include "base/map.h"
#include "base/number.h"
#include "base/thread.h"
#include "base/version.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define MS ((int64_t)1000000)
#define COUNT_OF(array) (sizeof(array) / sizeof *(array))

/* ---- Status and last error ------------------------------------------------------------------- */

TEST(last_error_is_kept_in_full)
{
    struct td__error error;
    char longest[TD__ERROR_TEXT];
    memset(longest, 'x', sizeof longest);
    longest[sizeof longest - 1] = 0;
    CHECK_EQ(td_fail(TD_ERR_PEER, "%s", longest), TD_ERR_PEER);
    td__error_save(&error);
    td_fail(TD_ERR_INVALID, "another one");
    CHECK_EQ(td__error_restore(&error), TD_ERR_PEER);
    CHECK_STR(td_last_error(), longest);
    CHECK_EQ(td_last_status(), TD_ERR_PEER);
}

TEST(status_names)
{
    static const struct {
        td_status status;
        const char *name;
    } names[] = {
        {TD_OK, "TD_OK"},
        {TD_ERR_INVALID, "TD_ERR_INVALID"},
        {TD_ERR_NOMEM, "TD_ERR_NOMEM"},
        {TD_ERR_SYSTEM, "TD_ERR_SYSTEM"},
        {TD_ERR_TIMEOUT, "TD_ERR_TIMEOUT"},
        {TD_ERR_PEER, "TD_ERR_PEER"},
        {TD_ERR_AUTH, "TD_ERR_AUTH"},
        {TD_ERR_MISMATCH, "TD_ERR_MISMATCH"},
        {TD_ERR_STATE, "TD_ERR_STATE"},
        {TD_ERR_UNSUPPORTED, "TD_ERR_UNSUPPORTED"},
        {(td_status)(TD_ERR_ABORTED + 1), "TD_ERR_UNKNOWN"},
        {(td_status)-1, "TD_ERR_UNKNOWN"},
    };
    for (size_t i = 0; i < COUNT_OF(names); i++)
        CHECK_STR(td_status_name(names[i].status), names[i].name);
    CHECK_EQ(TD_OK, 0);
}

TEST(versions_fit)
{
    char version[32];
    snprintf(version, sizeof version, "%d.%d.%d", TD_VERSION_MAJOR, TD_VERSION_MINOR,
             TD_VERSION_PATCH);
    CHECK_STR(td_version(), version);
    CHECK_EQ(TD_VERSION, TD_VERSION_MAJOR * 10000 + TD_VERSION_MINOR * 100 + TD_VERSION_PATCH);
    CHECK_EQ(TD_CHECK_VERSION(), TD_OK);

    static const struct {
        struct td__version library, headers;
        td_status status;
    } pairs[] = {
        {{0, 3, 1}, {0, 3, 1}, TD_OK},
        {{0, 3, 1}, {0, 3, 0}, TD_OK},
        {{0, 3, 1}, {0, 3, 2}, TD_ERR_UNSUPPORTED}, /* older than the headers */
        {{0, 3, 1}, {0, 2, 0}, TD_ERR_UNSUPPORTED}, /* another 0.MINOR: newer, … */
        {{0, 3, 1}, {0, 4, 0}, TD_ERR_UNSUPPORTED}, /* … and older */
        {{1, 0, 0}, {0, 3, 1}, TD_ERR_UNSUPPORTED},
        {{1, 2, 1}, {1, 2, 0}, TD_OK},
        {{1, 2, 1}, {1, 1, 9}, TD_OK}, /* from 1.0 on a newer minor version fits */
        {{1, 2, 1}, {1, 3, 0}, TD_ERR_UNSUPPORTED},
        {{1, 2, 1}, {2, 0, 0}, TD_ERR_UNSUPPORTED},
        {{0, 3, 1}, {0, 3, -1}, TD_ERR_INVALID},
    };
    for (size_t i = 0; i < COUNT_OF(pairs); i++)
        CHECK_EQ(td__check_version(pairs[i].library, pairs[i].headers), pairs[i].status);

    CHECK_EQ(td_check_version(TD_VERSION_MAJOR, TD_VERSION_MINOR + 1, 7), TD_ERR_UNSUPPORTED);
    CHECK_CONTAINS(td_last_error(), td_version());
    snprintf(version, sizeof version, "%d.%d.%d", TD_VERSION_MAJOR, TD_VERSION_MINOR + 1, 7);
    CHECK_CONTAINS(td_last_error(), version);
}

static void *fail_elsewhere(void *arg)
{
    CHECK_STR(td_last_error(), "");
    td_fail(TD_ERR_PEER, "of thread %d", *(int *)arg);
    char mine[32];
    snprintf(mine, sizeof mine, "of thread %d", *(int *)arg);
    for (int i = 0; i < 100; i++) {
        CHECK_STR(td_last_error(), mine);
        sched_yield();
    }
    return NULL;
}

TEST(last_error_is_the_threads_own)
{
    CHECK_STR(td_last_error(), "");
    CHECK_EQ(td_last_status(), TD_OK);
    CHECK_EQ(td_fail(TD_ERR_STATE, "number %d", 7), TD_ERR_STATE);
    CHECK_STR(td_last_error(), "number 7");
    pthread_t threads[4];
    int numbers[4] = {0, 1, 2, 3};
    for (int i = 0; i < 4; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, fail_elsewhere, &numbers[i]), 0);
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    CHECK_STR(td_last_error(), "number 7");
    CHECK_EQ(td_last_status(), TD_ERR_STATE);
}

TEST(last_error_stays_after_a_success)
{
    td_fail(TD_ERR_INVALID, "kept");
    void *memory = td_alloc(100);
    CHECK(memory != NULL);
    td_free(memory);
    td_log(TD_LOG_DEBUG, "not shown");
    CHECK_STR(td_last_error(), "kept");
}

TEST(last_error_grows_by_a_context)
{
    td_fail(TD_ERR_SYSTEM, "the cause");
    CHECK_EQ(td_fail(TD_ERR_SYSTEM, "the context: %s", td_last_error()), TD_ERR_SYSTEM);
    CHECK_STR(td_last_error(), "the context: the cause");
    CHECK_EQ(td__fail_nomem("a thing"), TD_ERR_NOMEM);
    CHECK_STR(td_last_error(), "a thing: out of memory");

    char *text = malloc(10000);
    memset(text, 'x', 9999);
    text[9999] = '\0';
    td_fail(TD_ERR_SYSTEM, "%s", text); /* cut, and marked as cut */
    size_t length = strlen(td_last_error());
    CHECK(length > 1000 && length < 9999);
    CHECK_STR(td_last_error() + length - 3, "...");
    free(text);
}

static td_status pass_on(td_status status, int *reached)
{
    TD_TRY(status);
    *reached = 1;
    return TD_OK;
}

TEST(errors_in_words)
{
    int reached = 0;
    CHECK_EQ(pass_on(TD_ERR_AUTH, &reached), TD_ERR_AUTH);
    CHECK_EQ(reached, 0);
    CHECK_EQ(pass_on(TD_OK, &reached), TD_OK);
    CHECK_EQ(reached, 1);
    CHECK_STR(td__errno_text(ENOENT), "No such file or directory");
    CHECK(td__errno_text(123456)[0] != '\0');
    CHECK_STR(td__signal_name(SIGSEGV), "SIGSEGV");
    CHECK_STR(td__signal_name(SIGKILL), "SIGKILL");
    CHECK_STR(td__signal_name(77), "signal 77");
    CHECK_STR(td__signal_name(0), "signal 0");
}

/* ---- Buffer and reader ----------------------------------------------------------------------- */

TEST(buffer_and_reader)
{
    struct td__buffer buffer = {0};
    td__buffer_put_u8(&buffer, 0xab);
    td__buffer_put_u32(&buffer, 0x01020304);
    td__buffer_put_u64(&buffer, 0x1122334455667788);
    td__buffer_put_string(&buffer, "text", 4);
    td__buffer_put_string(&buffer, NULL, 0);
    td__buffer_put(&buffer, "raw", 3);
    static const uint8_t wire[] = {0xab, 4,    3,    2, 1, 0x88, 0x77, 0x66, 0x55, 0x44,
                                   0x33, 0x22, 0x11, 4, 0, 0,    0,    't',  'e',  'x',
                                   't',  0,    0,    0, 0, 'r',  'a',  'w'};
    CHECK_EQ(buffer.size, sizeof wire);
    CHECK_MEM(buffer.data, wire, sizeof wire);
    CHECK(!buffer.failed);

    struct td__reader reader = td__reader_of(buffer.data, buffer.size);
    CHECK_EQ(td__reader_u8(&reader), 0xab);
    CHECK_EQ(td__reader_u32(&reader), 0x01020304);
    CHECK_EQ(td__reader_u64(&reader), 0x1122334455667788);
    struct td__span text = td__reader_string(&reader, 4);
    CHECK_EQ(text.size, 4);
    CHECK_MEM(text.data, "text", 4);
    CHECK(text.data == (char *)buffer.data + 17); /* in place */
    CHECK_EQ(td__reader_string(&reader, 0).size, 0);
    CHECK(!td__reader_done(&reader)); /* three bytes are left */
    for (int i = 0; i < 3; i++)
        CHECK_EQ(td__reader_u8(&reader), "raw"[i]);
    CHECK(td__reader_done(&reader));
    CHECK_EQ(td__reader_u8(&reader), 0);
    CHECK(reader.failed && !td__reader_done(&reader));

    td__buffer_consume(&buffer, 13);
    CHECK_EQ(buffer.size, sizeof wire - 13);
    CHECK_MEM(buffer.data, wire + 13, sizeof wire - 13);
    td__buffer_consume(&buffer, 0);
    td__buffer_consume(&buffer, buffer.size);
    CHECK_EQ(buffer.size, 0);
    td__buffer_put_u8(&buffer, 9);
    CHECK_EQ(buffer.data[0], 9);
    td__buffer_free(&buffer);
    CHECK(!buffer.data && !buffer.size && !buffer.capacity);
}

TEST(buffer_grows)
{
    struct td__buffer buffer = {0};
    for (uint32_t i = 0; i < 100000; i++)
        td__buffer_put_u32(&buffer, i);
    CHECK_EQ(buffer.size, 400000);
    struct td__reader reader = td__reader_of(buffer.data, buffer.size);
    for (uint32_t i = 0; i < 100000; i++)
        CHECK_EQ(td__reader_u32(&reader), i);
    CHECK(td__reader_done(&reader));
    CHECK(td__buffer_reserve(&buffer, 12345));
    CHECK(buffer.capacity - buffer.size >= 12345);
    CHECK_EQ(buffer.size, 400000);

    CHECK(!td__buffer_reserve(&buffer, SIZE_MAX)); /* fails without asking anyone */
    CHECK(buffer.failed);
    td__buffer_put_u8(&buffer, 1); /* the failure sticks */
    CHECK_EQ(buffer.size, 400000);
    CHECK(!td__buffer_reserve(&buffer, 1));
    td__buffer_free(&buffer);
    CHECK(!buffer.failed);
}

/* Every way to cut a message short fails, yields zeros, and reads nothing behind the end: the
 * message lies in memory of exactly its size, where a sanitizer sees every step. */
TEST(reader_stays_inside)
{
    static const uint8_t message[] = {7,    1,    2, 3, 4, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16,
                                      0x17, 0x18, 5, 0, 0, 0,    'h',  'e',  'l',  'l',  'o'};
    for (size_t size = 0; size < sizeof message; size++) {
        uint8_t *copy = malloc(size ? size : 1);
        memcpy(copy, message, size);
        struct td__reader reader = td__reader_of(copy, size);
        if (size < 1)
            CHECK_EQ(td__reader_u8(&reader), 0);
        else
            CHECK_EQ(td__reader_u8(&reader), 7);
        uint32_t u32 = td__reader_u32(&reader);
        CHECK_EQ(u32, size < 5 ? 0 : 0x04030201);
        uint64_t u64 = td__reader_u64(&reader);
        CHECK_EQ(u64, size < 13 ? 0 : 0x1817161514131211);
        struct td__span text = td__reader_string(&reader, 100);
        CHECK_EQ(text.size, 0);
        CHECK(text.data != NULL);
        CHECK(reader.failed);
        CHECK(!td__reader_done(&reader));
        CHECK_EQ(td__reader_u8(&reader), 0); /* even where a byte is left */
        free(copy);
    }
}

TEST(reader_limits_strings)
{
    static const uint8_t huge[] = {0xff, 0xff, 0xff, 0xff, 'x', 'y'};
    static const uint8_t five[] = {5, 0, 0, 0, 'h', 'e', 'l', 'l', 'o'};
    struct td__reader reader = td__reader_of(huge, sizeof huge);
    CHECK_EQ(td__reader_string(&reader, SIZE_MAX).size, 0);
    CHECK(reader.failed);
    reader = td__reader_of(five, sizeof five);
    CHECK_EQ(td__reader_string(&reader, 4).size, 0); /* all there, but longer than allowed */
    CHECK(reader.failed);
    reader = td__reader_of(five, sizeof five);
    CHECK_EQ(td__reader_string(&reader, 5).size, 5);
    CHECK(td__reader_done(&reader));

    uint8_t bytes[4];
    td__store_u32(bytes, 0xdeadbeef);
    CHECK_EQ(bytes[0], 0xef);
    CHECK_EQ(bytes[3], 0xde);
    CHECK_EQ(td__load_u32(bytes), 0xdeadbeef);
}

/* ---- Map ------------------------------------------------------------------------------------- */

enum { MAP_KEYS = 3000 };

struct item {
    struct td__map_node node;
    char key[24];
    bool there;
    int visits;
};

static uint32_t next_random(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

static void check_iteration(const struct td__map *map, struct item *items, size_t present)
{
    size_t visited = 0;
    for (struct td__map_node *node = td__map_next(map, NULL); node;
         node = td__map_next(map, node)) {
        struct item *item = TD__CONTAINER(node, struct item, node);
        CHECK(item >= items && item < items + MAP_KEYS && item->there);
        item->visits++;
        visited++;
    }
    CHECK_EQ(visited, present);
    for (size_t i = 0; i < MAP_KEYS; i++) {
        CHECK_EQ(items[i].visits, items[i].there);
        items[i].visits = 0;
    }
}

TEST(map_against_a_model)
{
    static struct item items[MAP_KEYS];
    struct td__map map = {0};
    uint32_t state = 42;
    size_t present = 0;
    CHECK(td__map_find(&map, "x", 1) == NULL);
    CHECK(td__map_next(&map, NULL) == NULL);
    for (size_t i = 0; i < MAP_KEYS; i++) { /* keys with NULs inside, of several lengths */
        int length = snprintf(items[i].key, sizeof items[i].key, "%zu%ckey", i, (char)(i % 3));
        items[i].node.key = items[i].key;
        items[i].node.key_size = i ? (size_t)length : 0; /* one of them is empty */
    }
    for (int step = 0; step < 20000; step++) {
        struct item *item = &items[next_random(&state) % MAP_KEYS];
        struct td__map_node *found = td__map_find(&map, item->key, item->node.key_size);
        CHECK(found == (item->there ? &item->node : NULL));
        if (item->there) {
            td__map_remove(&map, &item->node);
            present--;
        } else {
            CHECK(td__map_insert(&map, &item->node));
            present++;
        }
        item->there = !item->there;
        CHECK_EQ(map.size, present);
        if (step % 1000 == 0)
            check_iteration(&map, items, present);
    }
    check_iteration(&map, items, present);

    for (struct td__map_node *node = td__map_next(&map, NULL), *next; node; node = next) {
        next = td__map_next(&map, node);
        td__map_remove(&map, node); /* allowed once its successor is known */
        present--;
    }
    CHECK_EQ(present, 0);
    CHECK_EQ(map.size, 0);
    td__map_free(&map);
    CHECK(td__map_find(&map, "x", 1) == NULL);
}

/* ---- Numbers --------------------------------------------------------------------------------- */

TEST(numbers)
{
    static const struct {
        const char *text;
        bool ok;
        int64_t value;
    } cases[] = {
        {"0", true, 0},
        {"-0", true, 0},
        {"42", true, 42},
        {"-42", true, -42},
        {"007", true, 7},
        {"9223372036854775807", true, INT64_MAX},
        {"-9223372036854775808", true, INT64_MIN},
        {"0000000000000000000000000000001", true, 1},
        {"9223372036854775808", false, 0},
        {"-9223372036854775809", false, 0},
        {"99999999999999999999", false, 0},
        {"", false, 0},
        {"-", false, 0},
        {"+1", false, 0},
        {" 1", false, 0},
        {"1 ", false, 0},
        {"1\n", false, 0},
        {"--1", false, 0},
        {"1-", false, 0},
        {"0x1", false, 0},
        {"1.0", false, 0},
        {"1e1", false, 0},
        {"one", false, 0},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        int64_t value = 77;
        CHECK_EQ(td__parse_i64(cases[i].text, strlen(cases[i].text), &value), cases[i].ok);
        CHECK_EQ(value, cases[i].ok ? cases[i].value : 77); /* untouched when it fails */
    }
    int64_t value = 77;
    CHECK(td__parse_i64("12345", 3, &value)); /* not a C string: as long as it says */
    CHECK_EQ(value, 123);
    CHECK(!td__parse_i64("1\0", 2, &value));

    int small = 77;
    CHECK(td__parse_int("5", 0, 10, &small) && small == 5);
    CHECK(td__parse_int("0", 0, 10, &small) && small == 0);
    CHECK(td__parse_int("10", 0, 10, &small) && small == 10);
    CHECK(td__parse_int("-3", -3, -3, &small) && small == -3);
    CHECK(!td__parse_int("11", 0, 10, &small) && small == -3);
    CHECK(!td__parse_int("-1", 0, 10, &small));
    CHECK(!td__parse_int("4294967296", 0, 10, &small)); /* 2^32: must not wrap to 0 */
    CHECK(!td__parse_int("", 0, 10, &small));
    CHECK(!td__parse_int("ten", 0, 10, &small));
    CHECK_EQ(small, -3);
}

/* ---- Clock and threads ----------------------------------------------------------------------- */

TEST(deadlines)
{
    int64_t before = td__now_ns();
    td__deadline soon = td__deadline_in_ms(50);
    CHECK(soon >= before + 50 * MS && soon <= td__now_ns() + 50 * MS);
    CHECK(!td__deadline_passed(td__deadline_in_ms(1000000)));
    CHECK(td__deadline_passed(td__deadline_in_ms(0)));
    CHECK(td__deadline_passed(td__deadline_in_ms(-5)));
    CHECK(td__deadline_passed(0));
    CHECK(!td__deadline_passed(TD__NEVER));
    CHECK(td__deadline_in_ms(INT64_MAX) == TD__NEVER);
    CHECK(td__deadline_in_ms(INT64_MAX / 1000000) == TD__NEVER);
    CHECK(td__deadline_earlier(3, TD__NEVER) == 3);
    CHECK(td__deadline_earlier(5, 4) == 4);

    CHECK_EQ(td__deadline_poll_ms(TD__NEVER), -1);
    CHECK_EQ(td__deadline_poll_ms(0), 0);
    CHECK_EQ(td__deadline_poll_ms(td__now_ns() - 1), 0);
    int ms = td__deadline_poll_ms(td__deadline_in_ms(100000));
    CHECK(ms > 90000 && ms <= 100000);
    CHECK_EQ(td__deadline_poll_ms(td__now_ns() + (int64_t)INT_MAX * MS * 2), INT_MAX);
    for (int i = 0; i < 1000; i++) { /* rounded up: never 0 before its time */
        td__deadline tiny = td__now_ns() + 300000;
        int left = td__deadline_poll_ms(tiny);
        CHECK(left == 1 || td__deadline_passed(tiny));
    }
    struct timespec time = td__timespec(1500000001);
    CHECK_EQ(time.tv_sec, 1);
    CHECK_EQ(time.tv_nsec, 500000001);
    before = td__now_ns();
    td__sleep_ns(5 * MS);
    CHECK(td__now_ns() - before >= 5 * MS);
}

struct meeting {
    pthread_mutex_t lock;
    pthread_cond_t cond;
    bool here;
    sigset_t mask;
    char name[16];
    unsigned generation;
};

static void *come(void *arg)
{
    struct meeting *meeting = arg;
    pthread_mutex_lock(&meeting->lock);
    meeting->here = true;
    pthread_sigmask(SIG_SETMASK, NULL, &meeting->mask);
    pthread_getname_np(pthread_self(), meeting->name, sizeof meeting->name);
    pthread_cond_signal(&meeting->cond);
    pthread_mutex_unlock(&meeting->lock);
    return NULL;
}

TEST(conditions_and_threads)
{
    struct meeting meeting = {.lock = PTHREAD_MUTEX_INITIALIZER};
    td__cond_init(&meeting.cond);
    pthread_mutex_lock(&meeting.lock);
    td__deadline soon = td__deadline_in_ms(30);
    while (td__cond_wait(&meeting.cond, &meeting.lock, soon))
        ;
    CHECK(td__deadline_passed(soon));
    CHECK(!td__cond_wait(&meeting.cond, &meeting.lock, 0)); /* long ago */

    pthread_t thread;
    CHECK_EQ(td__thread_start(&thread, "td-come", come, &meeting), 0);
    td__deadline late = td__deadline_in_ms(60000);
    while (!meeting.here)
        CHECK(td__cond_wait(&meeting.cond, &meeting.lock, late));
    pthread_mutex_unlock(&meeting.lock);
    pthread_join(thread, NULL);
    CHECK(sigismember(&meeting.mask, SIGINT) && sigismember(&meeting.mask, SIGTERM) &&
          sigismember(&meeting.mask, SIGUSR1)); /* signals go to the program's own threads */
    CHECK(!sigismember(&meeting.mask, SIGSEGV) && !sigismember(&meeting.mask, SIGBUS) &&
          !sigismember(&meeting.mask,
                       SIGFPE)); /* but for those of a fault, or no handler would see it */
    sigset_t mine;
    pthread_sigmask(SIG_SETMASK, NULL, &mine);
    CHECK(!sigismember(&mine, SIGTERM)); /* and this one still gets them */

    meeting.here = false; /* a wait without a deadline */
    CHECK_EQ(td__thread_start(&thread, "td-come", come, &meeting), 0);
    pthread_mutex_lock(&meeting.lock);
    while (!meeting.here)
        CHECK(td__cond_wait(&meeting.cond, &meeting.lock, TD__NEVER));
    pthread_mutex_unlock(&meeting.lock);
    pthread_join(thread, NULL);
    pthread_cond_destroy(&meeting.cond);
}

static void fork_twice(void *arg)
{
    unsigned parent = *(unsigned *)arg;
    CHECK_EQ(td__fork_generation(), parent + 1);
    pid_t pid = fork();
    if (pid == 0) {
        CHECK_EQ(td__fork_generation(), parent + 2);
        _exit(0);
    }
    int status;
    CHECK_EQ(waitpid(pid, &status, 0), pid);
    CHECK_EQ(status, 0);
    CHECK_EQ(td__fork_generation(), parent + 1);
}

TEST(forks_are_counted)
{
    unsigned generation = td__fork_generation();
    struct td_test_child child = td_test_fork(fork_twice, &generation);
    CHECK_EQ(child.status, 0);
    free(child.output);
    CHECK_EQ(td__fork_generation(), generation);
}
