/* Works: several callbacks, timeouts, TD_NOW; the sequence number of a group. */
#include "runner.h"

#include "base/clock.h"

#include <tandem/dist.h>
#include <tandem/group.h>

#include <pthread.h>
#include <stdatomic.h>

/* ---- Callbacks ------------------------------------------------------------------------------- */

enum { CALLBACKS = 20 };

struct order {
    atomic_int next; /* place in `calls` */
    int calls[2 * CALLBACKS];
};

struct callback {
    struct order *order;
    int number;
    td_status status;
};

static void note(td_work *work, td_status status, void *arg)
{
    struct callback *callback = arg;
    CHECK(td_work_test(work));
    callback->status = status;
    int next = atomic_load(&callback->order->next); /* they are called one after another */
    callback->order->calls[next] = callback->number;
    atomic_store(&callback->order->next, next + 1);
}

static void check_order(const struct order *order, int count)
{
    CHECK_EQ(atomic_load(&order->next), count);
    for (int i = 0; i < count; i++)
        CHECK_EQ(order->calls[i], i);
}

/* All in the order in which they were added, before and after the work is complete. */
static void add_callbacks(td_work *work)
{
    struct order order = {0};
    struct callback callbacks[2 * CALLBACKS];
    for (int i = 0; i < 2 * CALLBACKS; i++) {
        callbacks[i] = (struct callback){&order, i, TD_ERR_NOMEM};
        if (i == CALLBACKS) {
            CHECK_EQ(atomic_load(&order.next), 0); /* the other rank has not called yet */
            td_test_barrier();
            CHECK_OK(td_work_wait(work, 0));
        }
        CHECK_OK(td_work_on_complete(work, note, &callbacks[i]));
        if (i >= CALLBACKS)
            CHECK_EQ(atomic_load(&order.next), i + 1); /* it was called at once */
    }
    check_order(&order, 2 * CALLBACKS);
    for (int i = 0; i < 2 * CALLBACKS; i++)
        CHECK_OK(callbacks[i].status);
    td_work_release(work);
}

RANKS(several_callbacks_on_one_work, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    for (int round = 0; round < 50; round++) {
        td_work *work;
        int x = td_test_rank(), sum = -1;
        if (td_test_rank() == 0) {
            td_test_barrier();
            CHECK_OK(td_group_all_reduce(&sum, &x, 1, TD_I32, TD_SUM, NULL, NULL));
        } else {
            CHECK_OK(td_group_all_reduce(&sum, &x, 1, TD_I32, TD_SUM, NULL, &work));
            add_callbacks(work);
        }
        CHECK_EQ(sum, 1);
    }
    CHECK_OK(td_destroy_process_group());
}

/* Each thread's own are called in its order, and each of them once. */
enum { THREADS = 4 };

struct adder {
    pthread_t thread;
    td_work *work;
    struct order order;
    struct callback callbacks[CALLBACKS];
};

static void *add_some(void *arg)
{
    struct adder *adder = arg;
    for (int i = 0; i < CALLBACKS; i++) {
        adder->callbacks[i] = (struct callback){&adder->order, i, TD_ERR_NOMEM};
        CHECK_OK(td_work_on_complete(adder->work, note, &adder->callbacks[i]));
    }
    return NULL;
}

RANKS(callbacks_from_several_threads, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    for (int round = 0; round < 30; round++) {
        td_work *work;
        if (td_test_rank() == 0) {
            CHECK_OK(td_group_barrier(NULL, NULL));
            continue;
        }
        struct adder adders[THREADS] = {0};
        CHECK_OK(td_group_barrier(NULL, &work));
        for (int t = 0; t < THREADS; t++) {
            adders[t].work = work;
            CHECK_EQ(pthread_create(&adders[t].thread, NULL, add_some, &adders[t]), 0);
        }
        CHECK_OK(td_work_wait(work, 0));
        for (int t = 0; t < THREADS; t++)
            pthread_join(adders[t].thread, NULL);
        for (int t = 0; t < THREADS; t++)
            CHECK_SOON(atomic_load(&adders[t].order.next) == CALLBACKS);
        for (int t = 0; t < THREADS; t++)
            check_order(&adders[t].order, CALLBACKS);
        td_work_release(work);
    }
    CHECK_OK(td_destroy_process_group());
}

/* One that adds another to the same work, and one that releases the work. */
static void add_from_callback(td_work *work, td_status status, void *arg)
{
    struct callback *callback = arg;
    note(work, status, callback);
    CHECK_OK(td_work_on_complete(work, note, callback + 1));
}

static void release_work(td_work *work, td_status status, void *arg)
{
    note(work, status, arg);
    td_work_release(work);
}

TEST(callbacks_that_add_and_release)
{
    struct order order = {0};
    struct callback callbacks[3] = {{&order, 0, TD_OK}, {&order, 1, TD_OK}, {&order, 2, TD_OK}};
    td_work *work;
    CHECK_OK(td_init_process_group(NULL));
    CHECK_OK(td_group_barrier(NULL, &work));
    CHECK_OK(td_work_on_complete(work, add_from_callback, &callbacks[0]));
    CHECK_OK(td_work_wait(work, 0)); /* perhaps before the callbacks */
    CHECK_SOON(atomic_load(&order.next) == 2);
    CHECK_OK(td_work_on_complete(work, release_work, &callbacks[2]));
    check_order(&order, 3);
    CHECK_OK(td_destroy_process_group());
}

/* ---- Timeouts -------------------------------------------------------------------------------- */

RANKS(waiting_without_waiting, .ranks = 2)
{
    int value = 0, other = 1 - td_test_rank();
    td_work *works[3] = {NULL};
    CHECK_OK(td_init_process_group(NULL));
    if (td_test_rank() == 0) {
        CHECK_OK(td_group_recv(&value, 1, TD_I32, 1, 1, NULL, &works[0]));
        CHECK_OK(td_group_barrier(NULL, &works[2]));
        int64_t before = td__now_ns();
        for (int i = 0; i < 20; i++) {
            CHECK_FAILS(td_work_wait(works[0], TD_NOW), TD_ERR_TIMEOUT,
                        "recv on group \"world\" is not complete yet");
            CHECK_FAILS(td_work_wait(works[2], TD_NOW), TD_ERR_TIMEOUT, "barrier on group");
            CHECK_FAILS(td_work_wait_all(works, 3, TD_NOW), TD_ERR_TIMEOUT, "recv");
        }
        CHECK_PROMPT(before);
        CHECK_FAILS(td_work_wait(works[0], -2), TD_ERR_INVALID, "-2 ms");
        CHECK_FAILS(td_work_wait_all(works, 3, -2), TD_ERR_INVALID, "-2 ms");
        CHECK_FAILS(td_work_wait_all(NULL, 0, -2), TD_ERR_INVALID, "-2 ms");
        td_test_barrier();
        CHECK_OK(td_work_wait_all(works, 3, 0));
        CHECK_OK(td_work_wait_all(works, 3, TD_NOW));
        CHECK_EQ(value, 7);
    } else {
        value = 7;
        td_test_barrier();
        CHECK_OK(td_group_send(&value, 1, TD_I32, other, 1, NULL, NULL));
        CHECK_OK(td_group_barrier(NULL, NULL));
    }
    for (int i = 0; i < 3; i++)
        td_work_release(works[i]);
    CHECK_OK(td_destroy_process_group());
}

/* Sums of times do not overflow: UndefinedBehaviorSanitizer would say so. */
RANKS(the_longest_timeouts, .ranks = 2)
{
    td_work *work;
    int value = 0, other = 1 - td_test_rank();
    CHECK_OK(td_init_process_group(&(td_init_options){.timeout_ms = INT64_MAX}));
    CHECK_OK(td_group_barrier(NULL, &work));
    CHECK_OK(td_work_wait(work, INT64_MAX));
    CHECK_OK(td_work_wait_all(&work, 1, INT64_MAX));
    td_work_release(work);
    CHECK_OK(td_group_recv(&value, 1, TD_I32, other, 0, NULL, &work));
    CHECK_OK(td_group_send(&other, 1, TD_I32, other, 0, NULL, NULL));
    CHECK_OK(td_work_wait(work, INT64_MAX));
    td_work_release(work);
    CHECK_OK(td_set_call_timeout(INT64_MAX));
    CHECK_OK(td_group_monitored_barrier(NULL, INT64_MAX, true, NULL, NULL));
    CHECK_OK(td_group_barrier(NULL, NULL));
    CHECK_OK(td_destroy_process_group());
}

/* ---- Sequence numbers ------------------------------------------------------------------------ */

RANKS(the_sequence_of_a_group, .ranks = 2)
{
    td_group *group;
    td_work *work;
    int x = 0, other = 1 - td_test_rank();
    CHECK_EQ(td_group_sequence(NULL), 0);
    CHECK_OK(td_init_process_group(NULL));
    CHECK_OK(td_new_group(NULL, 0, NULL, &group));
    CHECK_EQ(td_group_sequence(group), 0);
    CHECK_OK(td_group_barrier(group, NULL));
    CHECK_EQ(td_group_sequence(group), 1);
    CHECK_OK(td_group_broadcast(&x, 1, TD_I32, 0, group, &work));
    CHECK_EQ(td_group_sequence(group), 2);
    CHECK_OK(td_work_wait(work, 0));
    td_work_release(work);
    CHECK_FAILS(td_group_broadcast(&x, 1, TD_I32, 9, group, NULL), TD_ERR_INVALID, "9");
    CHECK_OK(td_group_monitored_barrier(group, 0, true, NULL, NULL));
    CHECK_OK(td_group_send(&x, 1, TD_I32, other, 0, group, NULL));
    CHECK_OK(td_group_recv(&x, 1, TD_I32, other, 0, group, NULL));
    CHECK_EQ(td_group_sequence(group), 2);
    uint64_t mine = td_group_sequence(group) + 1, both[2];
    CHECK_OK(td_group_all_gather(both, &mine, 1, TD_U64, group, NULL));
    CHECK_EQ(both[0], both[1]);
    CHECK_EQ(td_group_sequence(group), both[0]);
    CHECK_EQ(td_group_sequence(NULL), 0);
    CHECK_OK(td_destroy_process_group());
    CHECK_EQ(td_group_sequence(group), 3);
    CHECK_OK(td_group_destroy(group));
}
