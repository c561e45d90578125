/* Futures: of calls, and of the program's own. */
#include "rpc_world.h"

#include "base/clock.h"

#include <pthread.h>

/* ---- Of the program's own --------------------------------------------------------------------- */

TEST(set_and_fail)
{
    TD_SCOPE;
    td_future *future = td_future_create();
    CHECK(!td_future_test(future));
    CHECK(!td_future_wait(future, 1));
    CHECK_EQ(td_last_status(), TD_ERR_TIMEOUT);
    CHECK(!td_future_wait(future, TD_NOW));
    CHECK_EQ(td_last_status(), TD_ERR_TIMEOUT);
    CHECK_OK(td_future_set(future, td_value_of(5)));
    CHECK(td_future_test(future));
    CHECK_EQ(rpc_value_int(td_future_wait(future, 0)), 5);
    CHECK_EQ(rpc_value_int(td_future_wait(future, TD_NOW)), 5);
    CHECK_FAILS(td_future_set(future, td_value_nil()), TD_ERR_STATE, "complete");
    CHECK_FAILS(td_future_fail(future, TD_ERR_PEER, "x"), TD_ERR_STATE, "complete");
    td_future_cancel(future);
    CHECK_EQ(rpc_value_int(td_future_wait(future, 0)), 5);

    td_future *failed = td_future_create();
    CHECK_FAILS(td_future_fail(failed, TD_OK, "x"), TD_ERR_INVALID, "TD_OK");
    CHECK_OK(td_future_fail(failed, TD_ERR_MISMATCH, "no match"));
    rpc_check_failed(failed, TD_ERR_MISMATCH, "no match");

    td_future *cancelled = td_future_create();
    td_future_cancel(cancelled);
    rpc_check_failed(cancelled, TD_ERR_ABORTED, "cancelled");

    CHECK_FAILS(td_future_set(NULL, td_value_nil()), TD_ERR_INVALID, "NULL");
    CHECK_FAILS(td_future_set(cancelled, NULL), TD_ERR_INVALID, "NULL");
    CHECK(!td_future_wait(NULL, 0) && !td_future_then(NULL, NULL, NULL));
    CHECK(!td_future_wait(cancelled, -5));
    CHECK_EQ(td_last_status(), TD_ERR_INVALID);
    td_future_cancel(NULL);
    td_future_release(NULL);
}

static td_value *twice(td_future *done, void *arg)
{
    td_value *value = td_future_wait(done, 0);
    ++*(int *)arg;
    return value ? td_value_of(2 * rpc_value_int(value)) : NULL;
}

static td_value *replace_failure(td_future *done, void *arg)
{
    (void)arg;
    CHECK(!td_future_wait(done, 0));
    return td_value_of(td_last_error());
}

static td_value *to_future(td_future *done, void *arg)
{
    (void)done;
    return td_value_from_future(arg);
}

static td_value *nothing(td_future *done, void *arg)
{
    (void)done, (void)arg;
    return NULL;
}

TEST(then)
{
    TD_SCOPE;
    int calls = 0;
    td_future *first = td_future_create();
    td_future *second = td_future_then(first, twice, &calls);
    td_future *third = td_future_then(second, twice, &calls);
    CHECK_EQ(calls, 0);
    CHECK_OK(td_future_set(first, td_value_of(3)));
    CHECK_EQ(calls, 2);
    CHECK_EQ(rpc_value_int(td_future_wait(third, 0)), 12);
    CHECK_EQ(rpc_value_int(td_future_wait(td_future_then(first, twice, &calls), 0)), 6);

    td_future *failed = td_future_create();
    td_future *after = td_future_then(failed, twice, &calls);
    td_future *mended = td_future_then(after, replace_failure, NULL);
    CHECK_OK(td_future_fail(failed, TD_ERR_PEER, "lost"));
    rpc_check_failed(after, TD_ERR_PEER, "lost");
    CHECK_STR(td_value_text(td_future_wait(mended, 0)), "lost");
    rpc_check_failed(td_future_then(first, nothing, NULL), TD_ERR_INVALID, "without an error");

    td_future *inner = td_future_create();
    td_future *outer = td_future_then(first, to_future, inner);
    CHECK(!td_future_test(outer));
    CHECK_OK(td_future_set(inner, td_value_of(8)));
    CHECK_EQ(rpc_value_int(td_future_wait(outer, 0)), 8);
}

/* A future that nobody can complete any more fails its continuations; and neither keeps the other. */
TEST(released_before_it_is_complete)
{
    TD_SCOPE;
    int calls = 0;
    td_future *kept = NULL;
    {
        TD_SCOPE;
        kept = td_future_retain(td_future_then(td_future_create(), twice, &calls));
        td_future_then(td_future_then(td_future_create(), twice, &calls), twice, &calls);
    }
    CHECK_EQ(calls, 3);
    rpc_check_failed(kept, TD_ERR_ABORTED, "released");
    td_future_cancel(kept);
    td_future_release(kept);
}

TEST(cancelling_a_continuation)
{
    TD_SCOPE;
    int calls = 0;
    td_future *first = td_future_create();
    td_future *third = td_future_then(td_future_then(first, twice, &calls), twice, &calls);
    td_future_cancel(third);
    rpc_check_failed(first, TD_ERR_ABORTED, "cancelled");
    rpc_check_failed(third, TD_ERR_ABORTED, "cancelled");
}

TEST(all)
{
    TD_SCOPE;
    CHECK_EQ(td_value_count(td_future_wait(td_future_all(NULL, 0), 0)), 0);
    td_future *futures[3] = {td_future_create(), td_future_create(), td_future_create()};
    td_future *all = td_future_all(futures, 3);
    for (int i = 2; i >= 0; i--) {
        CHECK(!td_future_test(all));
        CHECK_OK(td_future_set(futures[i], td_value_of(i)));
    }
    td_value *list = td_future_wait(all, 0);
    CHECK_EQ(td_value_count(list), 3);
    for (int i = 0; i < 3; i++)
        CHECK_EQ(rpc_value_int(td_value_at(list, i)), i);

    td_future *others[2] = {td_future_create(), td_future_create()};
    td_future *failed = td_future_all(others, 2);
    CHECK_OK(td_future_fail(others[1], TD_ERR_PEER, "lost"));
    rpc_check_failed(failed, TD_ERR_PEER, "lost");
    CHECK_OK(td_future_set(others[0], td_value_nil()));
    CHECK(!td_future_all((td_future *[]){NULL}, 1));
}

/* Threads that complete, cancel, wait, continue and release one future at once: exactly one completes it. */
enum { RACERS = 4, RACES = 300 };
static td_future *raced[RACES];
static atomic_int completions, continued;
static pthread_barrier_t start;

static td_value *count_continued(td_future *done, void *arg)
{
    (void)arg;
    atomic_fetch_add(&continued, 1);
    return td_future_wait(done, 0);
}

static void *race(void *arg)
{
    int number = *(int *)arg;
    for (int i = 0; i < RACES; i++) {
        TD_SCOPE;
        td_future *future = td_future_retain(raced[i]);
        pthread_barrier_wait(&start);
        td_future *then = td_future_then(future, count_continued, NULL);
        CHECK(then);
        if (number == 0)
            td_future_cancel(then);
        else if (number == 1)
            completions += !td_future_set(future, td_value_of(1));
        else if (number == 2)
            completions += !td_future_fail(future, TD_ERR_PEER, "x");
        else
            td_future_wait(then, 0);
        td_future_release(future);
        pthread_barrier_wait(&start);
        CHECK(td_future_test(future) && td_future_test(then));
    }
    return NULL;
}

TEST(races)
{
    TD_SCOPE;
    pthread_t threads[RACERS];
    int numbers[RACERS];
    pthread_barrier_init(&start, NULL, RACERS);
    for (int i = 0; i < RACES; i++)
        raced[i] = td_future_create();
    for (int i = 0; i < RACERS; i++) {
        numbers[i] = i;
        CHECK_EQ(pthread_create(&threads[i], NULL, race, &numbers[i]), 0);
    }
    for (int i = 0; i < RACERS; i++)
        pthread_join(threads[i], NULL);
    CHECK(completions <= RACES);
    CHECK_EQ(continued, RACES * RACERS);
    pthread_barrier_destroy(&start);
}

/* ---- Of calls -------------------------------------------------------------------------------- */

ALL_WAYS(of_calls, .ranks = 4)
{
    TD_SCOPE;
    rpc_begin(NULL);
    const char *to = rpc_name((td_test_rank() + 2) % 4);
    int calls = 0;
    td_future *sums[3];
    for (int i = 0; i < 3; i++)
        sums[i] = td_rpc_async(to, "add", TD_ARGS(i), NULL);
    td_future *doubled = td_future_then(sums[0], twice, &calls);
    td_value *list = td_future_wait(td_future_all(sums, 3), 0);
    CHECK_EQ(td_value_count(list), 3);
    CHECK_EQ(rpc_value_int(td_value_at(list, 2)), 12);
    CHECK_EQ(rpc_value_int(td_future_wait(doubled, 0)), 20);

    CHECK_EQ(rpc_int(to, "later", TD_ARGS(5)), 5);
    td_future *gates[4];
    for (int i = 0; i < 4; i++)
        CHECK((gates[i] = td_rpc_async(to, "gate", TD_NO_ARGS, NULL)));
    int opened = 0;
    while (opened < 4)
        opened += (int)rpc_int(to, "open_gate", TD_NO_ARGS);
    for (int i = 0; i < 4; i++) {
        td_value *value = td_future_wait(gates[i], 0);
        CHECK(value);
        CHECK_STR(td_value_text(value), "open");
    }
    rpc_end();
}

/* The answers of brief functions are published together. They do not wait for one that was brief before, and blocks. */
ALL_WAYS(answers_before_a_function_that_blocks, .ranks = 4)
{
    enum { ROUNDS = 20, CALLS = 30 };
    rpc_begin(NULL);
    const char *to = rpc_name((td_test_rank() + 1) % 4);
    for (int round = 0; round < ROUNDS; round++) {
        TD_SCOPE;
        td_future *sums[CALLS];
        for (int i = 0; i < CALLS; i++)
            CHECK(td_future_wait(td_rpc_async(to, "block", TD_ARGS(0), NULL), 0));
        for (int i = 0; i < CALLS; i++)
            sums[i] = td_rpc_async(to, "add", TD_ARGS(i), NULL);
        td_future *blocker = td_rpc_async(to, "block", TD_ARGS(1), NULL);
        for (int i = 0; i < CALLS; i++)
            CHECK_EQ(rpc_value_int(td_future_wait(sums[i], 0)), i + 10);
        int64_t unblocked = 0;
        while (!unblocked)
            unblocked = rpc_int(to, "unblock", TD_NO_ARGS);
        CHECK(td_future_wait(blocker, 0));
    }
    rpc_end();
}

/* Cancelling reaches a function that runs, one that answers later, and the call behind a continuation. */
ALL_WAYS(cancellation, .ranks = 4)
{
    TD_SCOPE;
    rpc_begin(&(td_rpc_options){.timeout_ms = 120000});
    int64_t since = td__now_ns();
    const char *to = rpc_name((td_test_rank() + 2) % 4);
    int calls = 0;
    td_future *held = td_rpc_async(to, "hold", TD_NO_ARGS, NULL);
    td_future *then = td_future_then(td_rpc_async(to, "hold", TD_NO_ARGS, NULL), twice, &calls);
    CHECK_SOON(rpc_int(to, "held", TD_NO_ARGS) == 2);
    td_future_cancel(held);
    rpc_check_failed(held, TD_ERR_ABORTED, "cancelled");
    td_future_cancel(then);
    rpc_check_failed(then, TD_ERR_ABORTED, "cancelled");
    CHECK_SOON(rpc_int(to, "cancelled", TD_NO_ARGS) == 2);
    td_future *gate = td_rpc_async(to, "gate", TD_NO_ARGS, NULL);
    td_future_cancel(gate);
    rpc_check_failed(gate, TD_ERR_ABORTED, "cancelled");
    rpc_end(); /* which waits for calls that are served */
    CHECK_PROMPT(since);
}

/* ---- Continuations that wait -------------------------------------------------------------------- */

static td_value *call_again(td_future *done, void *to)
{
    td_value *value = td_future_wait(done, 0);
    return value ? td_rpc_sync(to, "add", TD_ARGS(value), NULL) : NULL;
}

static td_value *wait_for(td_future *done, void *other)
{
    (void)done;
    return td_future_wait(other, 0);
}

/* They may make calls, and wait for each other, without a timeout. */
ALL_WAYS(continuations_that_wait, .ranks = 4)
{
    TD_SCOPE;
    rpc_begin(&(td_rpc_options){.timeout_ms = 120000, .threads = 1});
    int64_t since = td__now_ns();
    char *to = (char *)rpc_name((td_test_rank() + 2) % 4);
    for (int i = 0; i < 20; i++) {
        TD_SCOPE;
        td_future *chain = td_rpc_async(to, "add", TD_ARGS(0), NULL);
        for (int j = 0; j < 4; j++)
            chain = td_future_then(chain, call_again, to);
        td_future *pause = td_rpc_async(to, "pause", TD_ARGS(1), NULL);
        td_future *waits = td_future_then(td_rpc_async(to, "add", TD_ARGS(1), NULL), wait_for,
                                          td_future_then(pause, call_again, to));
        CHECK_EQ(rpc_value_int(td_future_wait(chain, 0)), 50);
        CHECK_EQ(rpc_value_int(td_future_wait(waits, 0)), 11);
    }
    CHECK_PROMPT(since);
    rpc_end();
}

/* One that the program never waits for is complete before all leave, with the calls that it makes. */
RANKS(continuations_at_the_shutdown, .ranks = 2)
{
    TD_SCOPE;
    rpc_begin(NULL);
    char *to = (char *)rpc_name(1 - td_test_rank());
    td_future *then[10];
    for (int i = 0; i < 10; i++)
        then[i] = td_future_then(td_rpc_async(to, "pause", TD_ARGS(10), NULL), call_again, to);
    rpc_end();
    for (int i = 0; i < 10; i++)
        CHECK_EQ(rpc_value_int(td_future_wait(then[i], TD_NOW)), 20);
}
