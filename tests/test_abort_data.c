/* A group that is aborted in the middle of its calls: a call that returns TD_OK has the right result, and the
 * memory of one that failed is its owner's again at once. */
#include "runner.h"
#include "thread_sanitizer.h"
#include "ways.h"

#include "base/clock.h"

#include <tandem/group.h>

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

enum { ROUNDS = 60, COUNT = 100000, CALLS = 50 };

struct moment {
    td_group *group;
    int64_t delay_ns;
};

static void *give_up(void *arg)
{
    const struct moment *moment = arg;
    td__sleep_ns(moment->delay_ns);
    CHECK_OK(td_group_abort(moment->group));
    return NULL;
}

static void fill(float *data, float value)
{
    for (int i = 0; i < COUNT; i++)
        data[i] = value;
}

static void check(const float *data, float value, int round, int call, const char *when)
{
    for (int i = 0; i < COUNT; i++)
        if (data[i] != value)
            FAIL("round %d, call %d, %s: element %d is %g, not %g", round, call, when, i,
                 (double)data[i], (double)value);
}

/* Calls until the group is aborted. What failed is overwritten at once: others must not see that, nor write there
 * any more. */
static void call_on(td_group *group, float *in, float *out, int round)
{
    int size = td_test_size(), last = 0;
    td_status status = TD_OK;
    for (int call = 0; call < CALLS && !status; call++) {
        fill(in, (float)(call + 1));
        status = td_group_all_reduce(out, in, COUNT, TD_F32, TD_SUM, group, NULL);
        if (!status)
            check(out, (float)((call + 1) * size), round, call, "returned TD_OK");
        last = call;
    }
    if (status)
        CHECK_FAILS(status, TD_ERR_ABORTED, "was aborted by rank 0");
    fill(in, -1);
    fill(out, -1);
    td_test_barrier();
    check(in, -1, round, last, "its input after the failure");
    check(out, -1, round, last, "its output after the failure");
}

static void abort_calls(const struct way *way, bool shareable, bool in_place)
{
    open_world(way, 0);
    size_t bytes = COUNT * sizeof(float);
    float *in = shareable ? td_alloc(bytes) : malloc(bytes);
    float *out = in_place ? in : shareable ? td_alloc(bytes) : malloc(bytes);
    for (int round = 0; round < ROUNDS; round++) {
        td_group *group;
        CHECK_OK(td_new_group(NULL, 0, NULL, &group));
        struct moment moment = {group, 100000 + round * 37000};
        pthread_t thread;
        CHECK_OK(td_group_barrier(group, NULL));
        td_test_barrier(); /* no rank is still in it when it is aborted */
        if (td_test_rank() == 0)
            CHECK(!pthread_create(&thread, NULL, give_up, &moment));
        call_on(group, in, out, round);
        if (td_test_rank() == 0)
            pthread_join(thread, NULL);
        td_test_barrier();
        td_group_destroy(group);
    }
    if (shareable) {
        td_free(in);
        if (!in_place)
            td_free(out);
    } else {
        free(in);
        if (!in_place)
            free(out);
    }
    CHECK_OK(td_destroy_process_group());
}

RANKS(shareable, .ranks = 2)
{
    abort_calls(&shm, true, false);
}

RANKS(shareable_in_place, .ranks = 3)
{
    abort_calls(&shm, true, true);
}

RANKS(not_shareable, .ranks = 2)
{
    abort_calls(&shm, false, false);
}

RANKS(not_shareable_in_place, .ranks = 3)
{
    abort_calls(&shm, false, true);
}

RANKS(over_tcp, .ranks = 2)
{
    abort_calls(&tcp, false, false);
}

RANKS(on_hosts, .ranks = 3)
{
    abort_calls(&mixed, false, false);
}

/* ---- Memory that the library copies to -------------------------------------------------------- */

enum { COPIED = 4 << 20, COPY_ROUNDS = UNDER_TSAN ? 2 : 6, CHECK_NS = 20000000 };

struct copied_call {
    td_group *group;
    float *data;
    float *expected; /* where td_alloc() allocates as much while no call is under way */
    atomic_bool over;
};

/* Rank 0's thread, while the library writes to `data`. */
__attribute__((no_sanitize_thread)) static bool is_written(const volatile float *data)
{
    return *data != 1;
}

/* Aborts the group while rank 0 writes the result: first to its own buffer, then to the copy of rank 1. */
static void *abort_while_it_writes(void *arg)
{
    struct copied_call *call = arg;
    while (!is_written(call->data) && !atomic_load(&call->over))
        continue;
    CHECK_OK(td_group_abort(call->group));
    return NULL;
}

/* Allocates the memory of the copy as soon as it is free: rank 0 must not write to it any more. */
static void *reuse_the_copy(void *arg)
{
    struct copied_call *call = arg;
    size_t bytes = COPIED * sizeof(float);
    float *memory = td_alloc(bytes);
    while (memory && memory != call->expected && !atomic_load(&call->over)) {
        td_free(memory);
        memory = td_alloc(bytes);
    }
    CHECK(memory);
    volatile float *last = &memory[COPIED - 1];
    *last = -1;
    int64_t end = td__now_ns() + CHECK_NS;
    do
        if (*last != -1)
            FAIL("rank 0 wrote %g to memory that was freed", (double)*last);
    while (td__now_ns() < end);
    td_free(memory);
    return NULL;
}

/* Rank 1's memory is not shareable, so that the library passes rank 0 a copy. It must not be freed before rank 0 knows
 * of the failure. */
RANKS(copies_on_hosts, .ranks = 3)
{
    open_world(&mixed, 0);
    size_t bytes = COPIED * sizeof(float);
    int rank = td_test_rank();
    struct copied_call call = {.data = rank ? malloc(bytes) : td_alloc(bytes)};
    for (int round = 0; round < COPY_ROUNDS; round++) {
        pthread_t thread;
        CHECK_OK(td_new_group(NULL, 0, NULL, &call.group));
        CHECK_OK(td_group_barrier(call.group, NULL));
        for (int i = 0; i < COPIED; i++)
            call.data[i] = 1;
        call.expected = td_alloc(bytes);
        td_free(call.expected);
        atomic_store(&call.over, false);
        td_test_barrier();
        if (rank < 2)
            CHECK(!pthread_create(&thread, NULL, rank ? reuse_the_copy : abort_while_it_writes,
                                  &call));
        td_status status = td_group_all_reduce(call.data, call.data, COPIED, TD_F32, TD_SUM,
                                               call.group, NULL);
        atomic_store(&call.over, true);
        if (rank < 2)
            pthread_join(thread, NULL);
        if (status)
            CHECK_FAILS(status, TD_ERR_ABORTED, "was aborted by rank 0");
        td_test_barrier();
        td_group_destroy(call.group);
    }
    if (rank)
        free(call.data);
    else
        td_free(call.data);
    CHECK_OK(td_destroy_process_group());
}
