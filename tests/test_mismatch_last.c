/* Calls that differ and are the last ones: a rank whose part needs no other rank returns at once, and gets the
 * difference when it destroys the group. All ranks get it, in their call or then. */
#include "runner.h"
#include "ways.h"

#include "base/clock.h"

#include <tandem/backend.h>
#include <tandem/dist.h>
#include <tandem/group.h>

#include <stdlib.h>
#include <string.h>

enum { MOST = 8, COUNTS = 2 };

static const size_t counts[COUNTS] = {4, 50000};

struct last_call {
    const char *name;
    td_op_kind kind;
    int root;
    bool more; /* one element more */
    td_dtype dtype;
    td_reduce_op op;
};

static const struct last_call calls[] = {
    {"broadcast from 0", TD_OP_BROADCAST, 0, false, TD_F32, TD_SUM},
    {"broadcast from 1", TD_OP_BROADCAST, 1, false, TD_F32, TD_SUM},
    {"longer broadcast from 0", TD_OP_BROADCAST, 0, true, TD_F32, TD_SUM},
    {"reduce to 0", TD_OP_REDUCE, 0, false, TD_F32, TD_SUM},
    {"reduce to 1", TD_OP_REDUCE, 1, false, TD_F32, TD_SUM},
    {"maximum to 0", TD_OP_REDUCE, 0, false, TD_F32, TD_MAX},
    {"scatter from 0", TD_OP_SCATTER, 0, false, TD_F32, TD_SUM},
    {"scatter from 1", TD_OP_SCATTER, 1, false, TD_F32, TD_SUM},
    {"gather to 0", TD_OP_GATHER, 0, false, TD_F32, TD_SUM},
    {"gather to 1", TD_OP_GATHER, 1, false, TD_F32, TD_SUM},
    {"longer gather to 0", TD_OP_GATHER, 0, true, TD_F32, TD_SUM},
    {"gather of integers to 0", TD_OP_GATHER, 0, false, TD_I32, TD_SUM},
};

enum { CALLS = sizeof calls / sizeof *calls };

static td_status make_call(td_group *group, const struct last_call *call, char *data, char *other,
                           size_t count, td_work **work)
{
    count += call->more;
    switch (call->kind) {
    case TD_OP_BROADCAST:
        return td_group_broadcast(data, count, call->dtype, call->root, group, work);
    case TD_OP_REDUCE:
        return td_group_reduce(other, data, count, call->dtype, call->root, call->op, group, work);
    case TD_OP_SCATTER:
        return td_group_scatter(other, data, count, call->dtype, call->root, group, work);
    default:
        return td_group_gather(other, data, count, call->dtype, call->root, group, work);
    }
}

/* Rank 1 makes another call than the others, in a group of its own for each pair. */
static void run_pair(const struct last_call *most, const struct last_call *odd, size_t count,
                     bool async)
{
    size_t bytes = (size_t)td_test_size() * (count + 1) * sizeof(float);
    char *data = calloc(1, bytes), *other = calloc(1, bytes);
    td_group *group;
    td_work *work = NULL;
    CHECK_OK(td_new_group(NULL, 0, &(td_group_options){.timeout_ms = 30000}, &group));
    td_status status = make_call(group, td_test_rank() == 1 ? odd : most, data, other, count,
                                 async ? &work : NULL);
    if (work) {
        status = td_work_wait(work, 0);
        td_work_release(work);
    }
    td_status destroyed = status ? TD_OK : td_group_destroy(group);
    if ((status ? status : destroyed) != TD_ERR_MISMATCH)
        FAIL("%s against %s, %zu elements: %s, then %s (%s)", most->name, odd->name, count,
             td_status_name(status), td_status_name(destroyed), td_last_error());
    CHECK_CONTAINS(td_last_error(), "called");
    if (status)
        CHECK_OK(td_group_destroy(group)); /* it has got the error */
    free(data);
    free(other);
}

static void run_pairs(const struct way *way, size_t count, bool async)
{
    open_world(way, 0);
    for (int most = 0; most < CALLS; most++)
        for (int odd = 0; odd < CALLS; odd++)
            if (most != odd)
                run_pair(&calls[most], &calls[odd], count, async);
    CHECK_OK(td_group_barrier(NULL, NULL)); /* as good as before */
    CHECK_OK(td_destroy_process_group());
}

RANKS(pairs_shm, .ranks = 3)
{
    run_pairs(&shm, counts[0], false);
}

RANKS(pairs_shm_large, .ranks = 3)
{
    run_pairs(&shm, counts[1], true);
}

RANKS(pairs_tcp, .ranks = 3, .deadline_s = 60)
{
    run_pairs(&tcp, counts[0], false);
}

RANKS(pairs_hosts, .ranks = 4, .deadline_s = 60)
{
    run_pairs(&mixed, counts[0], true);
}

/* ---- The world, and all that ends with it ------------------------------------------------------ */

static void destroy_after_roots(const struct way *way, bool in_subgroup)
{
    int value = td_test_rank();
    td_group *group = NULL;
    open_world(way, 0);
    if (in_subgroup)
        CHECK_OK(td_group_split(NULL, 0, 0, NULL, &group));
    td_status status = TD_OK;
    for (int i = 0; i < 6 && !status; i++)
        status = td_group_broadcast(&value, 1, TD_I32, i == 5 && td_test_rank() == 1, group, NULL);
    CHECK_FAILS(status ? status : td_destroy_process_group(), TD_ERR_MISMATCH, "root 1");
    CHECK_CONTAINS(td_last_error(), "root 0");
    if (status)
        CHECK_OK(td_destroy_process_group());
    CHECK(!td_is_initialized());
}

RANKS(world_shm, .ranks = 4)
{
    destroy_after_roots(&shm, false);
}

RANKS(world_tcp, .ranks = 3)
{
    destroy_after_roots(&tcp, false);
}

RANKS(world_hosts, .ranks = 4)
{
    destroy_after_roots(&mixed, false);
}

RANKS(subgroup_shm, .ranks = 3)
{
    destroy_after_roots(&shm, true);
}

RANKS(subgroup_tcp, .ranks = 3)
{
    destroy_after_roots(&tcp, true);
}

/* ---- Uneven parts ------------------------------------------------------------------------------ */

/* Rank 0 sends one element more to rank 1 than that one expects. */
static void run_uneven(const struct way *way)
{
    int rank = td_test_rank(), size = td_test_size();
    float data[4 * MOST] = {0}, other[4 * MOST];
    size_t inputs[MOST], outputs[MOST];
    td_group *group;
    open_world(way, 0);
    for (int i = 0; i < size; i++)
        inputs[i] = outputs[i] = 2;
    if (rank == 0)
        inputs[1]++;
    CHECK_OK(td_new_group(NULL, 0, &(td_group_options){.timeout_ms = 30000}, &group));
    td_status status = td_group_all_to_all_v(other, data, outputs, inputs, TD_F32, group, NULL);
    if (!status)
        status = td_group_destroy(group);
    CHECK_FAILS(status, TD_ERR_MISMATCH, "expects");
    CHECK_OK(td_group_barrier(NULL, NULL));
    CHECK_OK(td_destroy_process_group());
}

RANKS(uneven_shm, .ranks = 3)
{
    run_uneven(&shm);
}

RANKS(uneven_tcp, .ranks = 3)
{
    run_uneven(&tcp);
}

RANKS(uneven_hosts, .ranks = 4)
{
    run_uneven(&mixed);
}

/* ---- Lists of tensors -------------------------------------------------------------------------- */

static void run_lists(const struct way *way)
{
    td_group *group;
    open_world(way, 0);
    CHECK_OK(td_new_group(NULL, 0, &(td_group_options){.timeout_ms = 30000}, &group));
    {
        TD_SCOPE;
        int64_t two = 2, four = 4;
        bool odd = td_test_rank() == 1;
        td_tensor *list[2] = {td_zeros(odd ? &two : &four, 1, TD_F32, NULL),
                              td_zeros(odd ? &four : &two, 1, TD_F32, NULL)};
        td_status status = td_broadcast_coalesced(list, 2, 0, group, NULL);
        if (!status)
            status = td_group_destroy(group);
        CHECK_FAILS(status, TD_ERR_MISMATCH, "checksum of their sizes");
    }
    CHECK_OK(td_destroy_process_group());
}

RANKS(lists_shm, .ranks = 3)
{
    run_lists(&shm);
}

RANKS(lists_tcp, .ranks = 3)
{
    run_lists(&tcp);
}

/* ---- Leaving does not wait for other ranks ----------------------------------------------------- */

enum { LATE_MS = 3500, SOON_MS = 3000 };

static void destroy_soon(void)
{
    int64_t start = td__now_ns();
    CHECK_OK(td_destroy_process_group());
    int64_t took = (td__now_ns() - start) / 1000000;
    if (took > SOON_MS)
        FAIL("leaving has taken %lld ms", (long long)took);
}

/* Rank 0 sends and leaves; the others receive much later, or leave much later. */
static void leave_early(const struct way *way, bool called)
{
    int value = td_test_rank() ? 0 : 7;
    open_world(way, 0);
    CHECK_OK(td_group_barrier(NULL, NULL));
    if (td_test_rank() && !called)
        td__sleep_ns(LATE_MS * (int64_t)1000000);
    CHECK_OK(td_group_broadcast(&value, 1, TD_I32, 0, NULL, NULL));
    CHECK_EQ(value, 7);
    if (td_test_rank() && called)
        td__sleep_ns(LATE_MS * (int64_t)1000000);
    destroy_soon();
}

RANKS(root_leaves_early_shm, .ranks = 3)
{
    leave_early(&shm, false);
}

RANKS(root_leaves_early_tcp, .ranks = 3)
{
    leave_early(&tcp, false);
}

RANKS(others_leave_late_hosts, .ranks = 4)
{
    leave_early(&mixed, true);
}
