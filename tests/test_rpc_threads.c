/* Remote calls at once: many in flight, many threads, few threads to serve them, timeouts and cancellation. */
#include "rpc_world.h"

#include "base/clock.h"

#include <pthread.h>
#include <stdio.h>

enum { FAR_MS = 120000 }; /* a timeout that no test waits for */

ALL_WAYS(hundred_in_flight, .ranks = 4)
{
    enum { COUNT = 100, ROUNDS = 5 };
    rpc_begin(NULL);
    for (int round = 0; round < ROUNDS; round++) {
        TD_SCOPE;
        td_future *answers[COUNT];
        for (int i = 0; i < COUNT; i++)
            CHECK((answers[i] = td_rpc_async(rpc_name(i % 4), "add", TD_ARGS(i, round), NULL)));
        for (int i = COUNT; i-- > 0;)
            CHECK_EQ(rpc_value_int(td_future_wait(answers[i], 0)), i + round);
    }
    rpc_end();
}

/* More than the rings and the buffers of sockets hold, in both directions at once. */
ALL_WAYS(large_in_flight, .ranks = 4)
{
    enum { COUNT = 24, BYTES = 300000 };
    rpc_begin(NULL);
    {
        TD_SCOPE;
        td_future *answers[COUNT];
        char *memory = calloc(BYTES, 1);
        for (int i = 0; i < COUNT; i++) {
            memory[0] = memory[BYTES - 1] = (char)i;
            td_value *bytes = td_value_from_bytes(memory, BYTES);
            CHECK((answers[i] = td_rpc_async(rpc_name(i % 4), "echo", TD_ARGS(bytes), NULL)));
        }
        for (int i = 0; i < COUNT; i++) {
            size_t size;
            td_value *value = td_future_wait(answers[i], 0);
            if (!value)
                FAIL("call %d: %s", i, td_last_error());
            const char *bytes = td_value_bytes(value, &size);
            CHECK_EQ(size, BYTES);
            CHECK(bytes[0] == i && bytes[BYTES - 1] == i && bytes[BYTES / 2] == 0);
        }
        free(memory);
    }
    rpc_end();
}

static void *call_often(void *arg)
{
    TD_SCOPE;
    int first = *(int *)arg;
    for (int i = 0; i < 200; i++)
        CHECK_EQ(rpc_int(rpc_name((first + i) % 4), "add", TD_ARGS(first, i)), first + i);
    return NULL;
}

ALL_WAYS(several_threads, .ranks = 4)
{
    enum { THREADS = 6 };
    pthread_t threads[THREADS];
    int firsts[THREADS];
    rpc_begin(&(td_rpc_options){.threads = 3});
    for (int i = 0; i < THREADS; i++) {
        firsts[i] = i;
        CHECK_EQ(pthread_create(&threads[i], NULL, call_often, &firsts[i]), 0);
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    rpc_end();
}

/* All call all at once, several times, so that every two workers have a link. */
#if TD_TEST_SLOWNESS > 1
enum { MANY = 16 };
#else
enum { MANY = 64 };
#endif

RANKS(many_workers, .ranks = MANY, .deadline_s = 60)
{
    enum { ROUNDS = 5 };
    rpc_begin(NULL);
    for (int round = 0; round < ROUNDS; round++) {
        TD_SCOPE;
        td_future *answers[MANY];
        for (int r = 0; r < MANY; r++)
            CHECK((answers[r] = td_rpc_async(rpc_name(r), "add", TD_ARGS(r, round), NULL)));
        for (int r = 0; r < MANY; r++)
            CHECK_EQ(rpc_value_int(td_future_wait(answers[r], 0)), r + round);
    }
    rpc_end();
}

/* All call each other, with one thread each: a function that waits leaves its thread to others. */
ALL_WAYS(callbacks_with_one_thread, .ranks = 4)
{
    TD_SCOPE;
    rpc_begin(&(td_rpc_options){.threads = 1});
    td_value *to = TD_ARGS("w0", "w1", "w2", "w0", "w3");
    td_future *answers[8];
    for (int i = 0; i < 8; i++)
        CHECK((answers[i] = td_rpc_async(rpc_name(i % 4), "bounce", TD_ARGS(to, 12), NULL)));
    for (int i = 0; i < 8; i++)
        CHECK_EQ(rpc_value_int(td_future_wait(answers[i], 0)), 12);
    rpc_end();
}

/* ---- Slow functions --------------------------------------------------------------------------- */

ALL_WAYS(slow_functions_block_no_others, .ranks = 4)
{
    TD_SCOPE;
    rpc_begin(&(td_rpc_options){.threads = 3});
    const char *to = rpc_name(!td_test_rank());
    if (td_test_rank() < 2) {
        td_rpc_call_options far = {.timeout_ms = FAR_MS};
        int64_t since = td__now_ns();
        td_future *held[2] = {td_rpc_async(to, "hold", TD_NO_ARGS, &far),
                              td_rpc_async(to, "hold", TD_NO_ARGS, &far)};
        CHECK_SOON(rpc_int(to, "held", TD_NO_ARGS) == 2);
        for (int i = 0; i < 20; i++)
            CHECK_EQ(rpc_int(to, "add", TD_ARGS(i)), i + 10);
        for (int i = 0; i < 2; i++)
            td_future_cancel(held[i]);
        CHECK_PROMPT(since);
        CHECK_SOON(rpc_int(to, "cancelled", TD_NO_ARGS) == 2);
    }
    rpc_end();
}

/* Those that have no thread wait for one. A call to oneself, too. */
ALL_WAYS(more_slow_functions_than_threads, .ranks = 4)
{
    TD_SCOPE;
    rpc_begin(&(td_rpc_options){.threads = 2});
    td_future *answers[8];
    for (int i = 0; i < 8; i++)
        CHECK((answers[i] = td_rpc_async(rpc_name((td_test_rank() + i) % 4), "pause", TD_ARGS(5),
                                         NULL)));
    for (int i = 0; i < 8; i++)
        CHECK_EQ(rpc_value_int(td_future_wait(answers[i], 0)), 5);
    rpc_end();
}

/* The only thread is busy: a call to oneself, and a first call to another worker, must not need it. */
RANKS(the_only_thread_is_busy, .ranks = 2)
{
    TD_SCOPE;
    rpc_begin(&(td_rpc_options){.threads = 1});
    if (td_test_rank() == 0) {
        td_future *held = td_rpc_async("w0", "hold", TD_NO_ARGS, NULL);
        CHECK_SOON(atomic_load(&rpc_held) == 1);
        td_future *own = td_rpc_async("w0", "add", TD_ARGS(1), NULL);
        CHECK_EQ(rpc_int("w1", "add", TD_ARGS(1)), 11);
        CHECK(!td_future_test(own));
        td_future_cancel(held);
        CHECK_EQ(rpc_value_int(td_future_wait(own, 0)), 11);
    }
    rpc_end();
}

static td_value *wait_for_gate(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call, (void)args, (void)count;
    td_future *gate = td_rpc_async(td_rpc_call_from(call), "gate", TD_NO_ARGS, NULL);
    return gate ? td_future_wait(gate, 0) : NULL;
}

/* A function waits, and what it waits for is behind it in the queue of the only thread. */
RANKS(waiting_frees_the_thread, .ranks = 1)
{
    TD_SCOPE;
    CHECK_OK(td_rpc_register("wait_for_gate()", wait_for_gate, NULL));
    rpc_begin(&(td_rpc_options){.threads = 1});
    for (int i = 0; i < 20; i++) {
        td_future *waits = td_rpc_async("w0", "wait_for_gate", TD_NO_ARGS, NULL);
        int64_t opened = 0;
        while (!opened)
            opened = rpc_int("w0", "open_gate", TD_NO_ARGS);
        td_value *open = td_future_wait(waits, 0);
        CHECK(open);
        CHECK_STR(td_value_text(open), "open");
    }
    rpc_end();
}

/* ---- Timeouts -------------------------------------------------------------------------------- */

static void check_times_out(const char *to, const char *function, int64_t timeout_ms)
{
    char part[80];
    int64_t since = td__now_ns();
    snprintf(part, sizeof part, "%s() on worker \"%s\" has not answered within %d ms", function, to,
             (int)timeout_ms);
    rpc_check_fails(to, function, TD_NO_ARGS, &(td_rpc_call_options){.timeout_ms = timeout_ms},
                    TD_ERR_TIMEOUT, part);
    int64_t took = td__now_ns() - since;
    if (took < timeout_ms * 1000000)
        FAIL("a timeout of %d ms after %d ms", (int)timeout_ms, (int)(took / 1000000));
    CHECK_PROMPT(since);
}

ALL_WAYS(timeouts, .ranks = 4)
{
    TD_SCOPE;
    rpc_begin(&(td_rpc_options){.timeout_ms = FAR_MS});
    const char *to = rpc_name((td_test_rank() + 2) % 4);
    td_future *far = td_rpc_async(to, "gate", TD_NO_ARGS, NULL);
    check_times_out(to, "hold", 50); /* earlier than the one that is armed */
    check_times_out(to, "gate", 20);
    CHECK_EQ(rpc_int(rpc_name(td_test_rank()), "add", TD_ARGS(1)), 11);
    check_times_out(rpc_name(td_test_rank()), "hold", 20);

    td_future *near[3];
    for (int i = 0; i < 3; i++) /* no thread waits for them */
        near[i] = td_rpc_async(to, "gate", TD_NO_ARGS,
                               &(td_rpc_call_options){.timeout_ms = 60 - 20 * i});
    for (int i = 0; i < 3; i++)
        CHECK_SOON(td_future_test(near[i]));
    rpc_check_failed(near[1], TD_ERR_TIMEOUT, "within 40 ms");
    CHECK(!td_future_test(far));
    td_future_cancel(far);
    rpc_check_failed(far, TD_ERR_ABORTED, "cancelled");
    /* The functions of calls that nobody waits for have been cancelled. */
    CHECK_SOON(atomic_load(&rpc_cancelled) == atomic_load(&rpc_held));
    rpc_end();
}

static atomic_bool stop_traffic;

static void *make_traffic(void *arg)
{
    TD_SCOPE;
    while (!atomic_load(&stop_traffic))
        rpc_int(arg, "add", TD_ARGS(1));
    return NULL;
}

/* A timeout of td_future_wait() counts also while other answers arrive. */
RANKS(timeouts_with_traffic, .ranks = 2)
{
    TD_SCOPE;
    rpc_begin(NULL);
    char *to = td_test_rank() ? "w0" : "w1";
    pthread_t threads[2];
    for (int i = 0; i < 2; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, make_traffic, to), 0);
    int64_t since = td__now_ns();
    td_future *held = td_rpc_async(to, "hold", TD_NO_ARGS,
                                   &(td_rpc_call_options){.timeout_ms = FAR_MS});
    for (int i = 0; i < 3; i++) {
        CHECK(!td_future_wait(held, 10));
        CHECK_EQ(td_last_status(), TD_ERR_TIMEOUT);
    }
    CHECK_PROMPT(since);
    check_times_out(to, "hold", 30);
    td_future_cancel(held);
    atomic_store(&stop_traffic, true);
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    rpc_end();
}

/* Many calls that expire at once, between some that do not. */
RANKS(many_expire, .ranks = 2)
{
    enum { COUNT = 1000 };
    TD_SCOPE;
    rpc_begin(&(td_rpc_options){.timeout_ms = FAR_MS});
    const char *to = rpc_name(!td_test_rank());
    td_future *held[COUNT];
    for (int i = 0; i < COUNT; i++)
        CHECK((held[i] = td_rpc_async(
                   to, i % 10 ? "later" : "add", TD_ARGS(i % 10 ? 500 : i),
                   &(td_rpc_call_options){.timeout_ms = i % 10 ? 1 + i % 7 : FAR_MS})));
    for (int i = 0; i < COUNT; i++)
        if (i % 10)
            rpc_check_failed(held[i], TD_ERR_TIMEOUT, "later() on worker");
        else
            CHECK_EQ(rpc_value_int(td_future_wait(held[i], 0)), i + 10);
    rpc_end();
}
