/* Waiting for keys, and many threads at one store.
 *
 * A test that starts a waiter cannot know that it sleeps already. Where it says give_time_to_wait(),
 * it makes that likely; what is checked holds either way. */
#include "store_conformance.h"

#include "runner.h"

#include "base/clock.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#define MS ((int64_t)1000000)

static void give_time_to_wait(void)
{
    td__sleep_ns(10 * MS);
}

/* A thread that waits for keys, and for one key also fetches its value. */
struct waiter {
    td_store *store;
    const char *const *keys;
    int count;
    int64_t timeout_ms;
    pthread_t thread;
    atomic_bool done;
    td_status status;
    td_bytes value;
};

static void *run_waiter(void *arg)
{
    struct waiter *waiter = arg;
    if (waiter->count == 1)
        waiter->status = td_store_get(waiter->store, waiter->keys[0], waiter->timeout_ms,
                                      &waiter->value);
    else
        waiter->status = td_store_wait(waiter->store, waiter->keys, waiter->count,
                                       waiter->timeout_ms);
    atomic_store(&waiter->done, true);
    return NULL;
}

static void start_waiter(struct waiter *waiter, td_store *store, const char *const *keys, int count)
{
    *waiter = (struct waiter){.store = store, .keys = keys, .count = count, .timeout_ms = 60000};
    CHECK_EQ(pthread_create(&waiter->thread, NULL, run_waiter, waiter), 0);
}

/* The waiter returns with that value, soon after now. */
static void expect_woken(struct waiter *waiter, const char *text)
{
    int64_t start = td__now_ns();
    CHECK_SOON(atomic_load(&waiter->done));
    pthread_join(waiter->thread, NULL);
    CHECK_EQ(waiter->status, TD_OK);
    CHECK_PROMPT(start);
    if (text)
        CHECK_STR(waiter->value.data, text);
    td_bytes_free(&waiter->value);
}

/* ---- What wakes a waiter --------------------------------------------------------------------- */

static void get_waits_for_set(td_store *a, td_store *b)
{
    const char *key = "awaited";
    struct waiter same, other;
    start_waiter(&same, a, &key, 1);
    start_waiter(&other, b, &key, 1);
    give_time_to_wait();
    store_set_text(b, "another", "x"); /* completes no wait */
    store_settle(b);
    CHECK(!atomic_load(&same.done) && !atomic_load(&other.done));
    store_set_text(a, key, "here");
    expect_woken(&same, "here");
    expect_woken(&other, "here");
}

static void every_change_wakes(td_store *a, td_store *b)
{
    const char *keys[] = {"set", "add", "append", "compare", "multi"};
    struct waiter waiters[5];
    td_bytes value = {0};
    for (int i = 0; i < 5; i++)
        start_waiter(&waiters[i], b, &keys[i], 1);
    give_time_to_wait();
    store_set_text(a, "set", "1");
    expect_woken(&waiters[0], "1");
    CHECK_OK(td_store_add(a, "add", 2, NULL));
    expect_woken(&waiters[1], "2");
    CHECK_OK(td_store_append(a, "append", "3", 1));
    expect_woken(&waiters[2], "3");
    CHECK_OK(td_store_compare_set(a, "compare", "no", 2, "x", 1, &value));
    td_bytes_free(&value);
    store_settle(b);
    CHECK(!atomic_load(&waiters[3].done)); /* nothing was changed */
    CHECK_OK(td_store_compare_set(a, "compare", "", 0, "4", 1, &value));
    td_bytes_free(&value);
    expect_woken(&waiters[3], "4");
    CHECK_OK(td_store_multi_set(a, &keys[4], &(td_bytes){"5", 1}, 1));
    expect_woken(&waiters[4], "5");
}

static void waits_for_all_in_reverse(td_store *a, td_store *b)
{
    enum { COUNT = 40 };
    char names[COUNT][16];
    const char *keys[COUNT];
    for (int i = 0; i < COUNT; i++) {
        snprintf(names[i], sizeof names[i], "k%d", i);
        keys[i] = names[i];
    }
    struct waiter waiter;
    start_waiter(&waiter, b, keys, COUNT);
    for (int i = COUNT - 1; i > 0; i--)
        store_set_text(a, keys[i], "x");
    store_settle(a);
    give_time_to_wait();
    CHECK(!atomic_load(&waiter.done));
    store_set_text(a, keys[0], "x");
    expect_woken(&waiter, NULL);
}

/* A key that was set and deleted must not count: all must exist at one moment. */
static void deleted_again_does_not_count(td_store *a, td_store *b)
{
    const char *keys[] = {"one", "two"};
    struct waiter waiter;
    start_waiter(&waiter, b, keys, 2);
    give_time_to_wait();
    store_set_text(a, "one", "x");
    store_settle(a);
    give_time_to_wait();
    CHECK_OK(td_store_delete_key(a, "one", NULL));
    store_set_text(a, "two", "x");
    store_settle(a);
    give_time_to_wait();
    CHECK(!atomic_load(&waiter.done));
    store_set_text(a, "one", "x");
    expect_woken(&waiter, NULL);
}

static void many_wait_for_one_key(td_store *a, td_store *b)
{
    enum { COUNT = 16 };
    const char *key = "start";
    struct waiter waiters[COUNT];
    for (int i = 0; i < COUNT; i++)
        start_waiter(&waiters[i], i % 2 ? a : b, &key, 1);
    give_time_to_wait();
    store_set_text(a, key, "go");
    for (int i = 0; i < COUNT; i++)
        expect_woken(&waiters[i], "go");
}

/* Large values go to waiters while the same handle sends more of them: neither direction may wait for the other
 * for ever. What a waiter gets is one of the values, not a mixture. */
static void large_values_to_many(td_store *a, td_store *b)
{
    enum { COUNT = 4, SIZE = 8 << 20 };
    const char *key = "large";
    char *data = malloc(SIZE);
    struct waiter waiters[COUNT];
    for (int i = 0; i < COUNT; i++)
        start_waiter(&waiters[i], i % 2 ? a : b, &key, 1);
    give_time_to_wait();
    for (int mark = 1; mark <= 4; mark++) {
        memset(data, mark, SIZE);
        CHECK_OK(td_store_set(a, key, data, SIZE));
    }
    for (int i = 0; i < COUNT; i++) {
        CHECK_SOON(atomic_load(&waiters[i].done));
        pthread_join(waiters[i].thread, NULL);
        CHECK_EQ(waiters[i].status, TD_OK);
        CHECK_EQ(waiters[i].value.size, SIZE);
        const char *got = waiters[i].value.data;
        CHECK(got[0] >= 1 && got[0] <= 4);
        CHECK(!memcmp(got, got + 1, SIZE - 1));
        td_bytes_free(&waiters[i].value);
    }
    store_settle(a);
    store_expect(b, key, data, SIZE);
    free(data);
}

static void waiting_does_not_block_others(td_store *a, td_store *b)
{
    const char *keys[] = {"late", "later"};
    struct waiter first, second;
    start_waiter(&first, a, &keys[0], 1);
    start_waiter(&second, a, &keys[1], 1);
    give_time_to_wait();
    for (int i = 0; i < 200; i++) { /* the same handle */
        store_set_text(a, "k", "v");
        store_expect_text(a, "k", "v");
        CHECK_OK(td_store_add(a, "n", 1, NULL));
    }
    store_expect_text(b, "n", "200");
    td_bytes value = {0};
    CHECK_FAILS(td_store_get(a, "never", 20, &value), TD_ERR_TIMEOUT, "never");
    CHECK(!atomic_load(&first.done) && !atomic_load(&second.done));
    store_set_text(a, "later", "2");
    expect_woken(&second, "2");
    store_set_text(b, "late", "1");
    expect_woken(&first, "1");
}

/* Waiters with little time beside one with much: each keeps its own deadline. */
static void each_waiter_has_its_own_deadline(td_store *a, td_store *b)
{
    const char *keys[] = {"comes", "never", "never either"};
    struct waiter waiting, timed[2];
    start_waiter(&waiting, a, &keys[0], 1);
    give_time_to_wait();
    for (int i = 0; i < 2; i++) {
        timed[i] = (struct waiter){
            .store = a, .keys = &keys[1 + i], .count = 1, .timeout_ms = 30 + 30 * i};
        CHECK_EQ(pthread_create(&timed[i].thread, NULL, run_waiter, &timed[i]), 0);
    }
    for (int i = 0; i < 2; i++) {
        CHECK_SOON(atomic_load(&timed[i].done));
        pthread_join(timed[i].thread, NULL);
        CHECK_EQ(timed[i].status, TD_ERR_TIMEOUT);
    }
    CHECK(!atomic_load(&waiting.done));
    store_set_text(b, "comes", "x");
    expect_woken(&waiting, "x");
}

static void never_means_never(td_store *a, td_store *b)
{
    const char *key = "k";
    struct waiter waiter = {.store = a, .keys = &key, .count = 1, .timeout_ms = INT64_MAX};
    CHECK_EQ(pthread_create(&waiter.thread, NULL, run_waiter, &waiter), 0);
    give_time_to_wait();
    CHECK(!atomic_load(&waiter.done));
    store_set_text(b, key, "v");
    expect_woken(&waiter, "v");
}

static void do_nothing(int signal_number)
{
    (void)signal_number;
}

static void signals_do_not_wake(td_store *a, td_store *b)
{
    struct sigaction action = {.sa_handler = do_nothing}; /* without SA_RESTART */
    sigaction(SIGUSR1, &action, NULL);
    const char *key = "k";
    struct waiter waiter;
    start_waiter(&waiter, a, &key, 1);
    for (int i = 0; i < 30; i++) {
        pthread_kill(waiter.thread, SIGUSR1);
        td__sleep_ns(MS);
    }
    CHECK(!atomic_load(&waiter.done));
    store_set_text(b, key, "v");
    expect_woken(&waiter, "v");
}

/* ---- Many threads ---------------------------------------------------------------------------- */

enum { THREADS = 8, ADDS = 200 };

struct worker {
    td_store *store;
    int index;
    pthread_t thread;
    void (*run)(struct worker *);
    atomic_char *seen; /* for add: which sums have been returned */
};

static void *run_worker(void *arg)
{
    struct worker *worker = arg;
    worker->run(worker);
    return NULL;
}

/* Runs `run` in THREADS threads, with handles of their own where there can be some. */
static void run_workers(td_store *store, bool own_handles, void (*run)(struct worker *))
{
    const struct store_factory *factory = store_factory_of_test();
    static atomic_char seen[THREADS * ADDS + 1];
    struct worker workers[THREADS];
    own_handles = own_handles && factory->open_again;
    for (int i = 0; i < THREADS; i++) {
        workers[i] = (struct worker){.store = own_handles ? factory->open_again() : store,
                                     .index = i,
                                     .run = run,
                                     .seen = seen};
        CHECK_EQ(pthread_create(&workers[i].thread, NULL, run_worker, &workers[i]), 0);
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(workers[i].thread, NULL);
        if (own_handles)
            CHECK_OK(td_store_close(workers[i].store));
    }
}

static void add_many(struct worker *worker)
{
    for (int i = 0; i < ADDS; i++) {
        int64_t sum = 0;
        CHECK_OK(td_store_add(worker->store, "sum", 1, &sum));
        CHECK(sum >= 1 && sum <= THREADS * ADDS);
        CHECK_EQ(atomic_fetch_add(&worker->seen[sum], 1), 0); /* each sum is returned once */
    }
}

static void threads_add_on_one_handle(td_store *a, td_store *b)
{
    run_workers(a, false, add_many);
    store_expect_text(b, "sum", "1600");
}

static void threads_add_on_many_handles(td_store *a, td_store *b)
{
    (void)b;
    run_workers(a, true, add_many);
    store_expect_text(a, "sum", "1600");
}

static void increment_by_compare_set(struct worker *worker)
{
    for (int i = 0; i < 25;) {
        char now[24] = "", next[24];
        td_bytes value = {0};
        CHECK_OK(td_store_compare_set(worker->store, "lock", "", 0, "0", 1, &value));
        snprintf(now, sizeof now, "%s", value.data);
        td_bytes_free(&value);
        snprintf(next, sizeof next, "%d", atoi(now) + 1);
        char mine[48];
        snprintf(mine, sizeof mine, "%s by %d", next, worker->index);
        CHECK_OK(td_store_compare_set(worker->store, "lock", now, strlen(now), mine, strlen(mine),
                                      &value));
        i += !strcmp(value.data, mine);
        td_bytes_free(&value);
    }
}

static void threads_compare_and_set(td_store *a, td_store *b)
{
    run_workers(a, true, increment_by_compare_set);
    td_bytes value = {0};
    CHECK_OK(td_store_get(b, "lock", 10000, &value));
    CHECK_EQ(atoi(value.data), THREADS * 25);
    td_bytes_free(&value);
}

static void append_records(struct worker *worker)
{
    for (int i = 0; i < 50; i++) {
        char record[32];
        snprintf(record, sizeof record, "<%02d:%04d>", worker->index, i);
        CHECK_OK(td_store_append(worker->store, "log", record, strlen(record)));
    }
    store_settle(worker->store);
}

static void threads_append(td_store *a, td_store *b)
{
    run_workers(a, true, append_records);
    td_bytes value = {0};
    int next[THREADS] = {0};
    CHECK_OK(td_store_get(b, "log", 10000, &value));
    CHECK_EQ(value.size, THREADS * 50 * 9);
    for (size_t at = 0; at < value.size; at += 9) { /* whole, and in order a writer */
        int index, number;
        CHECK_EQ(sscanf(value.data + at, "<%2d:%4d>", &index, &number), 2);
        CHECK(index >= 0 && index < THREADS);
        CHECK_EQ(number, next[index]++);
    }
    td_bytes_free(&value);
}

static void pairs(struct worker *worker)
{
    const char *keys[] = {"x", "between", "y"};
    for (int i = 0; i < 100; i++) {
        if (worker->index % 2) {
            char text[16];
            int size = snprintf(text, sizeof text, "%d.%d", worker->index, i);
            td_bytes values[] = {{text, (size_t)size}, {"", 0}, {text, (size_t)size}};
            CHECK_OK(td_store_multi_set(worker->store, keys, values, 3));
        } else {
            td_bytes got[3] = {{0}};
            CHECK_OK(td_store_multi_get(worker->store, keys, 3, 60000, got));
            CHECK_STR(got[0].data, got[2].data); /* set in one step, seen at one moment */
            for (int k = 0; k < 3; k++)
                td_bytes_free(&got[k]);
        }
    }
}

static void many_keys_in_one_step(td_store *a, td_store *b)
{
    (void)b;
    if (store_factory_of_test()->minimal)
        td_test_skip("a %s store sets keys one by one", store_factory_of_test()->name);
    run_workers(a, true, pairs);
}

/* Each thread waits for its neighbour's key, round after round, all on one handle. */
static void pass_on(struct worker *worker)
{
    for (int round = 0; round < 20; round++) {
        char mine[32], from[32];
        snprintf(mine, sizeof mine, "%d/%d", round, worker->index);
        snprintf(from, sizeof from, "%d/%d", round, (worker->index + THREADS - 1) % THREADS);
        if (worker->index != 0) { /* rank 0 starts the round */
            td_bytes value = {0};
            CHECK_OK(td_store_get(worker->store, from, 60000, &value));
            CHECK_STR(value.data, from);
            td_bytes_free(&value);
        }
        store_set_text(worker->store, mine, mine);
        if (worker->index == 0)
            store_expect_text(worker->store, from, from);
    }
}

static void threads_in_a_ring(td_store *a, td_store *b)
{
    (void)b;
    run_workers(a, false, pass_on);
}

static void handles_in_a_ring(td_store *a, td_store *b)
{
    (void)b;
    run_workers(a, true, pass_on);
}

/* Two sides answer each other: every wait ends promptly, or the sum of them shows. */
static void *answer(void *arg)
{
    td_store *store = arg;
    for (int i = 0; i < 50; i++) {
        char key[32];
        snprintf(key, sizeof key, "ping %d", i);
        store_expect_text(store, key, "");
        snprintf(key, sizeof key, "pong %d", i);
        CHECK_OK(td_store_set(store, key, "", 0));
    }
    return NULL;
}

static void waiters_wake_promptly(td_store *a, td_store *b)
{
    pthread_t thread;
    CHECK_EQ(pthread_create(&thread, NULL, answer, b), 0);
    int64_t start = td__now_ns();
    for (int i = 0; i < 50; i++) {
        char key[32];
        snprintf(key, sizeof key, "ping %d", i);
        CHECK_OK(td_store_set(a, key, "", 0));
        snprintf(key, sizeof key, "pong %d", i);
        store_expect_text(a, key, "");
    }
    pthread_join(thread, NULL);
    CHECK_PROMPT(start);
}

const struct store_case store_thread_cases[] = {
    {"get_waits_for_set", get_waits_for_set, 0},
    {"every_change_wakes", every_change_wakes, 0},
    {"waits_for_all_in_reverse", waits_for_all_in_reverse, 0},
    {"deleted_again_does_not_count", deleted_again_does_not_count, 0},
    {"many_wait_for_one_key", many_wait_for_one_key, 0},
    {"large_values_to_many", large_values_to_many, 0},
    {"waiting_does_not_block_others", waiting_does_not_block_others, 0},
    {"each_waiter_has_its_own_deadline", each_waiter_has_its_own_deadline, 0},
    {"never_means_never", never_means_never, 0},
    {"signals_do_not_wake", signals_do_not_wake, 0},
    {"threads_add_on_one_handle", threads_add_on_one_handle, 0},
    {"threads_add_on_many_handles", threads_add_on_many_handles, 0},
    {"threads_compare_and_set", threads_compare_and_set, 0},
    {"threads_append", threads_append, 0},
    {"many_keys_in_one_step", many_keys_in_one_step, 0},
    {"threads_in_a_ring", threads_in_a_ring, 0},
    {"handles_in_a_ring", handles_in_a_ring, 0},
    {"waiters_wake_promptly", waiters_wake_promptly, 0},
    {NULL, NULL, 0},
};
