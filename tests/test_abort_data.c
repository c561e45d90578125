/* A group that is aborted in the middle of its calls: a call that returns TD_OK has the right result, and the
 * memory of one that failed is its owner's again at once. */
#include "runner.h"
#include "ways.h"

#include "base/clock.h"

#include <tandem/group.h>

#include <pthread.h>
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
