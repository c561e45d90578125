/* Failing groups: ranks that are missing, that call something else, that pass invalid arguments. The error names
 * the rank, all ranks get it, and refused calls have changed nothing. */
#include "guarded_memory.h"
#include "runner.h"
#include "ways.h"

#include "base/clock.h"

#include <tandem/group.h>

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>

/* The group fails from now on, at once and with the same sentence. */
static void check_broken(td_group *group, td_status status)
{
    char message[1024];
    float x[2] = {0};
    snprintf(message, sizeof message, "%s", td_last_error());
    int64_t before = td__now_ns();
    CHECK_FAILS(td_group_barrier(group, NULL), status, message);
    CHECK_FAILS(td_group_all_reduce(x, x, 2, TD_F32, TD_SUM, group, NULL), status, message);
    td_work *work;
    td_status later = td_group_broadcast(x, 2, TD_F32, td_get_global_rank(group, 0), group, &work);
    if (!later) {
        later = td_work_wait(work, 0);
        td_work_release(work);
    }
    CHECK_FAILS(later, status, message);
    CHECK_PROMPT(before);
}

/* ---- Missing ranks --------------------------------------------------------------------------- */

static void miss_rank_2(size_t count, const char *transport, const char *hosts)
{
    open_world(&(struct way){transport, hosts}, 0);
    float *data = td_alloc(count * sizeof *data);
    memset(data, 0, count * sizeof *data);
    CHECK_OK(td_group_all_reduce(data, data, count, TD_F32, TD_SUM, NULL, NULL));
    CHECK_OK(td_group_set_timeout(NULL, 300));
    if (td_test_rank() != 2) {
        td_status status = td_group_all_reduce(data, data, count, TD_F32, TD_SUM, NULL, NULL);
        CHECK_FAILS(status, TD_ERR_TIMEOUT, "all_reduce #2 on group \"world\"");
        CHECK_CONTAINS(td_last_error(), "rank 2");
        check_broken(NULL, TD_ERR_TIMEOUT);
        td_test_barrier();
    } else {
        td_test_barrier();
        td_status status = td_group_all_reduce(data, data, count, TD_F32, TD_SUM, NULL, NULL);
        /* Perhaps all that it needs had been sent before the others gave up. */
        for (int i = 0; i < 2 && !status; i++)
            status = td_group_barrier(NULL, NULL);
        if (status != TD_ERR_TIMEOUT && status != TD_ERR_PEER)
            FAIL("%s: %s", td_status_name(status), td_last_error());
        check_broken(NULL, status);
    }
    td_free(data);
    CHECK_OK(td_destroy_process_group());
}

RANKS(missing_in_a_small_call, .ranks = 3)
{
    miss_rank_2(1, NULL, NULL);
}

RANKS(missing_in_a_large_call, .ranks = 3)
{
    miss_rank_2(100000, NULL, NULL);
}

RANKS(missing_over_tcp, .ranks = 3)
{
    miss_rank_2(1000, "tcp", NULL);
}

RANKS(missing_on_another_host, .ranks = 4)
{
    miss_rank_2(10000, NULL, "0011");
}

RANKS(missing_at_the_start, .ranks = 3)
{
    if (td_test_rank() != 1) {
        CHECK_FAILS(td_init_process_group(&(td_init_options){.timeout_ms = 300}), TD_ERR_TIMEOUT,
                    "rank 1");
        CHECK(!td_is_initialized());
    }
    td_test_barrier();
}

/* The first rank of a group has its memory; it never makes the group. */
RANKS(missing_at_a_first_call, .ranks = 3)
{
    td_group *group;
    CHECK_OK(td_init_process_group(NULL));
    if (td_test_rank()) {
        CHECK_OK(td_new_group(NULL, 0, &(td_group_options){.timeout_ms = 300}, &group));
        CHECK_FAILS(td_group_barrier(group, NULL), TD_ERR_TIMEOUT, "rank 0");
        check_broken(group, TD_ERR_TIMEOUT);
    }
    CHECK_OK(td_group_barrier(NULL, NULL)); /* other groups are as good as before */
    CHECK_OK(td_destroy_process_group());
}

RANKS(timeouts_of_a_call, .ranks = 2)
{
    td_group *group;
    CHECK_OK(td_init_process_group(NULL));
    CHECK_OK(td_new_group(NULL, 0, NULL, &group));
    if (td_test_rank() == 0) {
        CHECK_OK(td_set_call_timeout(100));
        int64_t before = td__now_ns();
        CHECK_FAILS(td_group_barrier(group, NULL), TD_ERR_TIMEOUT, "rank 1 has not called it");
        CHECK(td__now_ns() - before >= 90000000);
        CHECK_OK(td_set_call_timeout(0));
    }
    CHECK_OK(td_group_barrier(NULL, NULL));
    CHECK_OK(td_destroy_process_group());
}

RANKS(a_rank_that_dies, .ranks = 3, .may_die = 1 << 2)
{
    CHECK_OK(td_init_process_group(NULL));
    CHECK_OK(td_group_barrier(NULL, NULL));
    td_test_barrier(); /* all have returned from it */
    if (td_test_rank() == 2)
        raise(SIGKILL);
    CHECK_OK(td_group_set_timeout(NULL, 2000));
    float x = 1;
    td_status status = td_group_all_reduce(&x, &x, 1, TD_F32, TD_SUM, NULL, NULL);
    CHECK(status == TD_ERR_PEER || status == TD_ERR_TIMEOUT);
    CHECK_CONTAINS(td_last_error(), "rank 2");
    check_broken(NULL, status);
    CHECK_OK(td_destroy_process_group()); /* does not wait for the dead rank */
}

RANKS(a_rank_that_dies_tcp, .ranks = 3, .may_die = 1 << 2)
{
    open_world(&tcp, 0);
    CHECK_OK(td_group_barrier(NULL, NULL));
    td_test_barrier(); /* all have returned from it */
    if (td_test_rank() == 2)
        raise(SIGKILL);
    float x = 1;
    int64_t before = td__now_ns();
    td_status status = td_group_all_reduce(&x, &x, 1, TD_F32, TD_SUM, NULL, NULL);
    CHECK_FAILS(status, TD_ERR_PEER, "rank 2");
    CHECK_PROMPT(before);
    check_broken(NULL, status);
    CHECK_OK(td_destroy_process_group());
}

RANKS(a_rank_that_dies_on_another_host, .ranks = 4, .may_die = 1 << 3)
{
    open_world(&(struct way){NULL, "0011"}, 0);
    CHECK_OK(td_group_barrier(NULL, NULL));
    td_test_barrier(); /* all have returned from it */
    if (td_test_rank() == 3)
        raise(SIGKILL);
    float x = 1;
    int64_t before = td__now_ns();
    td_status status = td_group_all_reduce(&x, &x, 1, TD_F32, TD_SUM, NULL, NULL);
    CHECK_FAILS(status, TD_ERR_PEER, "rank 3");
    CHECK_PROMPT(before);
    check_broken(NULL, status);
    CHECK_OK(td_destroy_process_group());
}

/* It is alive, but has left. */
static void leave_and_stay(const char *transport, const char *hosts)
{
    open_world(&(struct way){transport, hosts}, 0);
    CHECK_OK(td_group_barrier(NULL, NULL));
    if (td_test_rank() == 2) {
        CHECK_OK(td_destroy_process_group());
        td_test_barrier();
        return;
    }
    float x = 1;
    int64_t before = td__now_ns();
    CHECK_OK(td_group_set_timeout(NULL, 60000));
    td_status status = td_group_all_reduce(&x, &x, 1, TD_F32, TD_SUM, NULL, NULL);
    CHECK_FAILS(status, TD_ERR_PEER, "rank 2");
    CHECK_PROMPT(before);
    td_test_barrier();
    CHECK_OK(td_destroy_process_group());
}

RANKS(a_rank_that_leaves, .ranks = 3)
{
    leave_and_stay(NULL, NULL);
}

RANKS(a_rank_that_leaves_tcp, .ranks = 3)
{
    leave_and_stay("tcp", NULL);
}

RANKS(a_rank_that_leaves_another_host, .ranks = 4)
{
    leave_and_stay(NULL, "0011");
}

/* One of them uses no shared memory. */
RANKS(different_transports, .ranks = 3)
{
    if (td_test_rank() == 1)
        setenv("TANDEM_TRANSPORT", "tcp", 1);
    td_status status = td_init_process_group(&(td_init_options){.timeout_ms = 5000});
    if (status) {
        CHECK_FAILS(status, TD_ERR_MISMATCH, "TANDEM_TRANSPORT");
        return;
    }
    int64_t one = 1, sum = 0;
    CHECK_OK(td_group_all_reduce(&sum, &one, 1, TD_I64, TD_SUM, NULL, NULL));
    CHECK_EQ(sum, 3);
    CHECK_OK(td_destroy_process_group());
}

/* ---- Ranks that call something else ---------------------------------------------------------- */

static float data[200000], other[200000];

enum wrong { COUNT, SIZE, DTYPE, OP, KIND, ROOT, ORDER, BARRIER, GIVERS, WRONGS };

/* One call of all ranks but the last, and another of the last. */
static td_status make_call(td_group *group, enum wrong wrong, bool odd)
{
    size_t count = 100;
    switch (wrong) {
    case COUNT:
        return td_group_all_reduce(other, data, odd ? 101 : count, TD_F32, TD_SUM, group, NULL);
    case SIZE:
        return td_group_all_gather(other, data, odd ? 20000 : count, TD_F32, group, NULL);
    case DTYPE:
        return td_group_all_reduce(other, data, count, odd ? TD_I32 : TD_F32, TD_SUM, group, NULL);
    case OP:
        return td_group_all_reduce(other, data, count, TD_F32, odd ? TD_MAX : TD_SUM, group, NULL);
    case KIND:
        return odd ? td_group_all_gather(other, data, count, TD_F32, group, NULL)
                   : td_group_all_reduce(other, data, count, TD_F32, TD_SUM, group, NULL);
    case ROOT:
        return td_group_broadcast(data, count, TD_F32, odd ? 1 : 0, group, NULL);
    case ORDER: {
        td_status status = odd ? td_group_broadcast(data, count, TD_F32, 0, group, NULL)
                               : td_group_all_reduce(other, data, count, TD_F32, TD_SUM, group,
                                                     NULL);
        if (status)
            return status;
        return odd ? td_group_all_reduce(other, data, count, TD_F32, TD_SUM, group, NULL)
                   : td_group_broadcast(data, count, TD_F32, 0, group, NULL);
    }
    case BARRIER:
        return odd ? td_group_barrier(group, NULL)
                   : td_group_reduce(other, data, count, TD_F32, 0, TD_SUM, group, NULL);
    default: /* both only give: neither has to wait for the other */
        return td_group_broadcast(data, 8, TD_F32, td_get_rank(NULL), group, NULL);
    }
}

static const char *const parts[WRONGS][2] = {
    [COUNT] = {"100", "101"},
    [SIZE] = {"100", "20000"},
    [DTYPE] = {"f32", "i32"},
    [OP] = {"sum", "max"},
    [KIND] = {"all_reduce", "all_gather"},
    [ROOT] = {"root 0", "root 1"},
    [ORDER] = {"all_reduce", "broadcast"},
    [BARRIER] = {"barrier", "called"},
    [GIVERS] = {"broadcast", "root "},
};

static void check_mismatches(void)
{
    int rank = td_get_rank(NULL), last = td_get_world_size(NULL) - 1;
    for (int wrong = 0; wrong < WRONGS; wrong++) {
        td_group *group;
        char what[64];
        snprintf(what, sizeof what, "mismatch %d", wrong);
        CHECK_OK(
            td_new_group(NULL, 0, &(td_group_options){.timeout_ms = 60000, .name = what}, &group));
        int64_t before = td__now_ns();
        td_status status = make_call(group, (enum wrong)wrong, rank == last);
        /* A rank whose part needed no other rank gets the error in its next call. */
        for (int i = 0; i < 2 && !status; i++)
            status = td_group_barrier(group, NULL);
        if (status != TD_ERR_MISMATCH)
            FAIL("%s: %s (%s)", what, td_status_name(status), status ? td_last_error() : "");
        CHECK_CONTAINS(td_last_error(), parts[wrong][0]);
        CHECK_CONTAINS(td_last_error(), parts[wrong][1]);
        CHECK_PROMPT(before);
        check_broken(group, TD_ERR_MISMATCH);
        CHECK_OK(td_group_barrier(NULL, NULL)); /* other groups are as good as before */
        td_group_destroy(group);
    }
}

RANKS(different_calls, .ranks = 2)
{
    open_world(&shm, 0);
    check_mismatches();
    CHECK_OK(td_destroy_process_group());
}

RANKS(different_calls_of_four, .ranks = 4)
{
    open_world(&shm, 0);
    check_mismatches();
    CHECK_OK(td_destroy_process_group());
}

RANKS(different_calls_over_tcp, .ranks = 3, .deadline_s = 60)
{
    open_world(&tcp, 0);
    check_mismatches();
    CHECK_OK(td_destroy_process_group());
}

RANKS(different_calls_on_hosts, .ranks = 4, .deadline_s = 60)
{
    open_world(&(struct way){NULL, "0011"}, 0);
    check_mismatches();
    CHECK_OK(td_destroy_process_group());
}

RANKS(uneven_counts_that_do_not_fit, .ranks = 3)
{
    size_t in[3] = {1, 2, 3}, out[3];
    int rank = td_test_rank();
    open_world(&shm, 0);
    for (int i = 0; i < 3; i++)
        out[i] = (size_t)rank + 1;
    CHECK_OK(td_group_all_to_all_v(other, data, out, in, TD_F32, NULL, NULL));
    if (rank == 2)
        out[0] = 5;
    td_status status = td_group_all_to_all_v(other, data, out, in, TD_F32, NULL, NULL);
    status = status ? status : td_group_barrier(NULL, NULL);
    CHECK_FAILS(status, TD_ERR_MISMATCH, "rank 0 sends 3 elements to rank 2, which expects 5");
    CHECK_OK(td_destroy_process_group());
}

/* More data than the buffer holds: no rank may write a byte behind the buffer. */
RANKS(uneven_counts_that_are_too_large, .ranks = 4)
{
    enum { MANY = 50000, FEW = 10 };
    size_t in[4], out[4];
    int rank = td_test_rank();
    open_world(&shm, 0);
    float *input = td_alloc(4 * MANY * sizeof *input);
    for (int i = 0; i < 4 * MANY; i++)
        input[i] = 1;
    for (int i = 0; i < 4; i++)
        in[i] = out[i] = MANY;
    if (rank == 3)
        out[1] = FEW;
    size_t room = rank == 3 ? 3 * MANY + FEW : 4 * MANY;
    struct guarded output = guarded_make(room * sizeof(float), 0, true);
    td_status status = td_group_all_to_all_v(output.data, input, out, in, TD_F32, NULL, NULL);
    td__sleep_ns(50000000); /* for other ranks that may still write */
    CHECK(guarded_is_whole(&output));
    status = status ? status : td_group_barrier(NULL, NULL);
    CHECK_FAILS(status, TD_ERR_MISMATCH, "rank 1 sends 50000 elements to rank 3, which expects 10");
    CHECK_OK(td_destroy_process_group());
    guarded_free(&output);
    td_free(input);
}
