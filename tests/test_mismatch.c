/* Ranks that make different calls, every pair of calls and in every kind of world: all get TD_ERR_MISMATCH long
 * before the timeout, and with both calls. */
#include "runner.h"
#include "ways.h"

#include <tandem/backend.h>
#include <tandem/dist.h>
#include <tandem/group.h>

#include <stdio.h>
#include <string.h>

enum { KINDS = TD_OP_BARRIER + 2, UNEVEN = KINDS - 1, MOST = 8 };

static const char *name_of(int kind)
{
    return td_op_kind_name(kind == UNEVEN ? TD_OP_ALL_TO_ALL : (td_op_kind)kind);
}

static td_status start(td_group *group, int kind, float *data, float *other, size_t count,
                       td_work **work)
{
    size_t parts[MOST];
    for (int i = 0; i < MOST; i++)
        parts[i] = count;
    switch (kind) {
    case TD_OP_BROADCAST:
        return td_group_broadcast(data, count, TD_F32, 0, group, work);
    case TD_OP_REDUCE:
        return td_group_reduce(other, data, count, TD_F32, 0, TD_SUM, group, work);
    case TD_OP_ALL_REDUCE:
        return td_group_all_reduce(other, data, count, TD_F32, TD_SUM, group, work);
    case TD_OP_SCATTER:
        return td_group_scatter(other, data, count, TD_F32, 0, group, work);
    case TD_OP_GATHER:
        return td_group_gather(other, data, count, TD_F32, 0, group, work);
    case TD_OP_ALL_GATHER:
        return td_group_all_gather(other, data, count, TD_F32, group, work);
    case TD_OP_REDUCE_SCATTER:
        return td_group_reduce_scatter(other, data, count, TD_F32, TD_SUM, group, work);
    case TD_OP_ALL_TO_ALL:
        return td_group_all_to_all(other, data, count, TD_F32, group, work);
    case TD_OP_BARRIER:
        return td_group_barrier(group, work);
    default:
        return td_group_all_to_all_v(other, data, parts, parts, TD_F32, group, work);
    }
}

/* A rank whose part needed no other rank gets the error in a later call. */
static void check_mismatch(td_group *group, td_work *work, int kind, int odd_kind)
{
    td_status status = td_work_wait(work, 0);
    for (int i = 0; i < 3 && !status; i++)
        status = td_group_barrier(group, NULL);
    if (status != TD_ERR_MISMATCH)
        FAIL("%s against %s: %s (%s)", name_of(kind), name_of(odd_kind), td_status_name(status),
             status ? td_last_error() : "");
    CHECK_CONTAINS(td_last_error(), "called");
    td_work_release(work);
}

/* One kind against all others, each pair in a group of its own and all of them at once. `odd` are those
 * ranks that make the other call. */
static void run_row(int kind, unsigned odd, size_t count)
{
    bool is_odd = odd >> td_test_rank() & 1;
    size_t bytes = (size_t)td_test_size() * (count + 1) * sizeof(float);
    float *data = td_alloc(KINDS * bytes), *other = td_alloc(KINDS * bytes);
    td_group *groups[KINDS];
    td_work *works[KINDS];
    memset(data, 0, KINDS * bytes);
    for (int k = 0; k < KINDS; k++)
        CHECK_OK(td_new_group(NULL, 0, &(td_group_options){.timeout_ms = 30000}, &groups[k]));
    td_test_barrier();
    for (int k = 0; k < KINDS; k++) {
        size_t at = (size_t)k * bytes / sizeof(float);
        CHECK_OK(start(groups[k], is_odd ? k : kind, data + at, other + at, count, &works[k]));
    }
    for (int k = 0; k < KINDS; k++) {
        if (k != kind) {
            check_mismatch(groups[k], works[k], kind, k);
            continue;
        }
        CHECK_OK(td_work_wait(works[k], 0));
        CHECK_OK(td_group_barrier(groups[k], NULL));
        td_work_release(works[k]);
    }
    CHECK_OK(td_group_barrier(NULL, NULL)); /* as good as before */
    for (int k = 0; k < KINDS; k++)
        td_group_destroy(groups[k]);
    td_free(data);
    td_free(other);
}

static void run_pairs(const char *hosts, unsigned odd, size_t count)
{
    open_world(&(struct way){NULL, hosts}, 0);
    for (int kind = 0; kind < KINDS; kind++)
        run_row(kind, odd, count);
    CHECK_OK(td_destroy_process_group());
}

#define PAIRS(name, count_of_ranks, hosts, odd, count)                                             \
    RANKS(name, .ranks = count_of_ranks, .deadline_s = 60)                                         \
    {                                                                                              \
        run_pairs(hosts, odd, count);                                                              \
    }

PAIRS(pairs_one_is_alone, 3, "010", 1 << 1, 4)
PAIRS(pairs_one_is_alone_large, 3, "010", 1 << 1, 50000)
PAIRS(pairs_one_of_two_differs, 3, "001", 1 << 0, 4)
PAIRS(pairs_whole_hosts_differ, 4, "0011", 1 << 2 | 1 << 3, 4)
PAIRS(pairs_whole_hosts_differ_large, 4, "0101", 1 << 1 | 1 << 3, 50000)
PAIRS(pairs_on_three_hosts, 5, "00112", 1 << 3, 4)
PAIRS(pairs_on_three_hosts_large, 5, "01201", 1 << 2, 50000)

/* ---- Calls that look the same ----------------------------------------------------------------- */

static void add(void *acc, const void *other, size_t count, td_dtype dtype, void *arg)
{
    (void)dtype;
    (void)arg;
    for (size_t i = 0; i < count; i++)
        ((float *)acc)[i] += ((const float *)other)[i];
}

static void multiply(void *acc, const void *other, size_t count, td_dtype dtype, void *arg)
{
    (void)dtype;
    (void)arg;
    for (size_t i = 0; i < count; i++)
        ((float *)acc)[i] *= ((const float *)other)[i];
}

enum alike { OPERATIONS, LISTS, LISTS_OF_ALL, SPLIT, ALIKE };

static td_status call_operation(td_group *group, bool odd)
{
    static td_reduce_op sum, product, scaled;
    float x = 1;
    if (!sum) {
        CHECK_OK(td_reduce_op_create(add, NULL, &sum));
        /* These each rank may make as it likes. */
        if (odd)
            CHECK_OK(td_reduce_op_create_premul_sum(2, &scaled));
        CHECK_OK(td_reduce_op_create(multiply, NULL, &product));
    }
    CHECK_OK(td_group_all_reduce(&x, &x, 1, TD_F32, product, NULL, NULL));
    return td_group_all_reduce(&x, &x, 1, TD_F32, odd ? product : sum, group, NULL);
}

static td_status call_list(td_group *group, bool odd, bool of_all)
{
    td_status status = TD_OK;
    {
        TD_SCOPE;
        td_tensor *own[2], *all[2 * MOST];
        int size = td_get_world_size(group);
        for (int i = 0; i < 2 * (size + 1); i++) {
            int64_t count = (i % 2 == 0) == odd ? 2 : 4;
            td_tensor *tensor = td_zeros(&count, 1, TD_F32, NULL);
            i < 2 ? (own[i] = tensor) : (all[i - 2] = tensor);
        }
        status = of_all ? td_all_gather_coalesced(all, 2 * size, own, 2, group, NULL)
                        : td_all_reduce_coalesced(own, 2, TD_SUM, group, NULL);
    }
    return status;
}

static td_status call_alike(td_group *group, enum alike alike, bool odd)
{
    int32_t own[2] = {0, 0}, all[2 * MOST];
    td_group *part;
    switch (alike) {
    case OPERATIONS:
        return call_operation(group, odd);
    case LISTS:
    case LISTS_OF_ALL:
        return call_list(group, odd, alike == LISTS_OF_ALL);
    default:
        return odd ? td_group_all_gather(all, own, 2, TD_I32, group, NULL)
                   : td_group_split(group, 0, 0, NULL, &part);
    }
}

static void check_alike(const char *transport, const char *hosts)
{
    static const char *const says[ALIKE][2] = {
        [OPERATIONS] = {"operation no. 1", "operation no. 2"},
        [LISTS] = {"all_reduce", "checksum of their sizes"},
        [LISTS_OF_ALL] = {"all_gather", "checksum of their sizes"},
        [SPLIT] = {"2 i32", "for td_group_split()"},
    };
    open_world(&(struct way){transport, hosts}, 0);
    for (int alike = 0; alike < ALIKE; alike++) {
        td_group *group;
        CHECK_OK(td_new_group(NULL, 0, &(td_group_options){.timeout_ms = 5000}, &group));
        td_status status = call_alike(group, (enum alike)alike, td_test_rank() == 1);
        for (int i = 0; i < 2 && !status; i++)
            status = td_group_barrier(group, NULL);
        CHECK_FAILS(status, TD_ERR_MISMATCH, says[alike][0]);
        CHECK_CONTAINS(td_last_error(), says[alike][1]);
        CHECK_OK(td_group_barrier(NULL, NULL));
        td_group_destroy(group);
    }
    CHECK_OK(td_destroy_process_group());
}

RANKS(calls_that_look_the_same, .ranks = 3)
{
    check_alike(NULL, NULL);
}

RANKS(calls_that_look_the_same_tcp, .ranks = 3)
{
    check_alike("tcp", NULL);
}

RANKS(calls_that_look_the_same_on_hosts, .ranks = 4)
{
    check_alike(NULL, "0011");
}
