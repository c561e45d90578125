/* The calls on tensors over the native backend: the suite with 1 to 5 ranks, and what is refused.
 */
#include "dist_suite.h"
#include "runner.h"

#include <tandem/ops.h>

#include <tandem/dist.h>
#include <tandem/group.h>

#include <string.h>

static const struct variant plain = {PLAIN, false, 3, 5}, turned = {TURNED, true, 3, 5};

static void run_suite(const char *backend)
{
    CHECK_OK(td_init_process_group(&(td_init_options){.backend = backend}));
    dist_suite_run();
    CHECK_OK(td_destroy_process_group());
}

RANKS(suite_with_1_rank, .ranks = 1)
{
    run_suite(NULL);
}

RANKS(suite_with_2_ranks, .ranks = 2, .deadline_s = 60)
{
    run_suite(NULL);
}

RANKS(suite_with_3_ranks, .ranks = 3, .deadline_s = 60)
{
    run_suite(NULL);
}

RANKS(suite_with_5_ranks, .ranks = 5, .deadline_s = 60)
{
    run_suite(NULL);
}

RANKS(suite_without_shared_memory, .ranks = 3, .deadline_s = 60)
{
    run_suite("tcp");
}

/* ---- Groups ---------------------------------------------------------------------------------- */

/* Roots are ranks of the world; ranks that are not in the group are an error. */
RANKS(a_group_of_some, .ranks = 4)
{
    CHECK_OK(td_init_process_group(NULL));
    int rank = td_get_rank(NULL);
    td_group *group;
    CHECK_OK(td_new_group((int[]){3, 1}, 2, NULL, &group));
    td_tensor *t = make_tensor(&plain, 3, 5, 1000 * rank);
    td_tensor **list = make_tensors(&plain, 2, -1, 0);
    if (rank == 1 || rank == 3) {
        CHECK_OK(td_broadcast(t, 3, group, NULL));
        check_tensor(t, 3000, 1);
        td_tensor *own = make_tensor(&turned, 3, 5, 10 * rank);
        CHECK_OK(td_gather(own, rank == 1 ? list : NULL, 2, 1, group, NULL));
        check_tensor(list[0], rank == 1 ? 30 : -1, 1);
        check_tensor(list[1], rank == 1 ? 10 : -1, 1);
        CHECK_FAILS(td_broadcast(t, 0, group, NULL), TD_ERR_INVALID, "0");
        td_tensor_release(own);
    } else {
        CHECK_FAILS(td_all_reduce(t, TD_SUM, group, NULL), TD_ERR_STATE, "not");
        CHECK_FAILS(td_all_gather(list, 2, t, group, NULL), TD_ERR_STATE, "not");
        CHECK_FAILS(td_barrier(group, NULL), TD_ERR_STATE, "not");
        td_bytes bytes;
        CHECK_FAILS(td_scatter_object_list(&bytes, NULL, 0, 3, group), TD_ERR_STATE, "not");
        CHECK_FAILS(td_send(t, 3, 0, group), TD_ERR_STATE, "not");
    }
    td_tensor_release(t);
    release_tensors(list, 2);
    td_group_destroy(group);
    CHECK_OK(td_destroy_process_group());
}

TEST(without_a_world)
{
    td_tensor *t = make_tensor(&plain, 3, 5, 0);
    CHECK_FAILS(td_all_reduce(t, TD_SUM, NULL, NULL), TD_ERR_STATE, "td_init_process_group");
    CHECK_FAILS(td_send(t, 0, 0, NULL), TD_ERR_STATE, "td_init_process_group");
    CHECK_FAILS(td_all_reduce_coalesced(&t, 1, TD_SUM, NULL, NULL), TD_ERR_STATE,
                "td_init_process_group");
    td_tensor_release(t);
}

/* ---- Refusals -------------------------------------------------------------------------------- */

/* Nothing of this starts anything: the ranks are in step afterwards. */
static void refuse_tensors(td_tensor *t, td_tensor *other, td_tensor *floats)
{
    td_tensor *list[3] = {t, t, NULL}, *mixed[2] = {t, floats}, *uneven[2] = {t, t};
    int64_t bad_sum[] = {1, 1}, negative[] = {4, -1};
    uneven[td_get_rank(NULL)] = other;
    CHECK_FAILS(td_all_reduce(NULL, TD_SUM, NULL, NULL), TD_ERR_INVALID,
                "all_reduce: tensor is NULL");
    CHECK_FAILS(
        td_all_reduce(td_matmul(t, td_reshape(t, (int64_t[]){1, 2, 3}, 3)), TD_SUM, NULL, NULL),
        TD_ERR_INVALID, "all_reduce: tensor is NULL; the last failure before: td_reshape: ");
    CHECK_FAILS(td_all_reduce(floats, TD_BAND, NULL, NULL), TD_ERR_INVALID, "f32");
    CHECK_FAILS(td_broadcast(t, 2, NULL, NULL), TD_ERR_INVALID, "2");
    CHECK_FAILS(td_all_gather(list, 3, t, NULL, NULL), TD_ERR_INVALID,
                "tensors has 3 tensors, but must have 2");
    CHECK_FAILS(td_all_gather(NULL, 2, t, NULL, NULL), TD_ERR_INVALID, "tensors is NULL");
    CHECK_FAILS(td_all_gather(list + 1, 2, t, NULL, NULL), TD_ERR_INVALID, "tensors[1] is NULL");
    CHECK_FAILS(td_all_gather(mixed, 2, t, NULL, NULL), TD_ERR_INVALID,
                "tensors[1] has elements of f32, but tensor has i32");
    CHECK_FAILS(td_reduce_scatter(t, uneven, 2, TD_SUM, NULL, NULL), TD_ERR_INVALID,
                "the part of this rank, has 20 elements, but output has 15");
    CHECK_FAILS(td_all_gather(uneven, 2, t, NULL, NULL), TD_ERR_INVALID,
                "the part of this rank, has 20 elements, but tensor has 15");
    CHECK_FAILS(
        td_all_gather_into_tensor(other, t, NULL, NULL), TD_ERR_INVALID,
        "output has 20 elements and input has 15; with 2 ranks, the first must have 2 times");
    CHECK_FAILS(td_all_gather_into_tensor(t, floats, NULL, NULL), TD_ERR_INVALID,
                "output has dtype i32, but input has f32");
    CHECK_FAILS(td_reduce_scatter_tensor(t, t, TD_SUM, NULL, NULL), TD_ERR_INVALID, "2 times");
    CHECK_FAILS(td_all_to_all(list, 2, list, 1, NULL, NULL), TD_ERR_INVALID,
                "input_list has 1 tensors, but must have 2");
    CHECK_FAILS(td_all_to_all(mixed, 2, list, 2, NULL, NULL), TD_ERR_INVALID,
                "output_list[1] has dtype f32");
    CHECK_FAILS(td_all_to_all_single(t, t, NULL, NULL, NULL, NULL), TD_ERR_INVALID,
                "no multiple of the 2 ranks");
    CHECK_FAILS(td_all_to_all_single(t, t, bad_sum, bad_sum, NULL, NULL), TD_ERR_INVALID,
                "add up to 2, but its dimension 0 has size 3");
    CHECK_FAILS(td_all_to_all_single(t, t, negative, NULL, NULL, NULL), TD_ERR_INVALID,
                "no multiple");
    CHECK_FAILS(td_all_to_all_single(other, other, NULL, negative, NULL, NULL), TD_ERR_INVALID,
                "split size 1 of input is -1");
}

static void refuse_lists(td_tensor *t, td_tensor *floats)
{
    int rank = td_get_rank(NULL);
    td_tensor *list[3] = {t, t, t}, *mixed[2] = {t, floats};
    td_work *work = NULL;
    CHECK_FAILS(td_gather(t, list, 3, rank, NULL, NULL), TD_ERR_INVALID,
                "gather_list has 3 tensors, but must have 2");
    CHECK_FAILS(td_gather(t, NULL, 2, rank, NULL, NULL), TD_ERR_INVALID, "gather_list is NULL");
    CHECK_FAILS(td_scatter(t, list, 2, 1 - rank, NULL, NULL), TD_ERR_INVALID, "others pass NULL");
    CHECK_FAILS(td_scatter_recv(t, rank, NULL), TD_ERR_INVALID, "td_scatter_send()");
    CHECK_FAILS(td_gather_send(t, rank, NULL), TD_ERR_INVALID, "td_gather_recv()");
    CHECK_FAILS(td_send(t, rank, 0, NULL), TD_ERR_INVALID, "cannot send to itself");
    CHECK_FAILS(td_recv(t, rank, 0, NULL, NULL), TD_ERR_INVALID, "cannot receive from itself");
    CHECK_FAILS(td_send(t, 7, 0, NULL), TD_ERR_INVALID, "rank 7");
    CHECK_FAILS(td_send(t, 1 - rank, -1, NULL), TD_ERR_INVALID, "tag -1 is negative");
    CHECK_FAILS(td_isend(t, 1 - rank, 0, NULL, NULL), TD_ERR_INVALID, "work is NULL");
    td_p2p_op ops[2] = {{.kind = TD_P2P_ISEND, .tensor = t, .peer = 1 - rank},
                        {.kind = TD_P2P_IRECV, .tensor = t, .peer = rank}};
    CHECK_FAILS(td_batch_isend_irecv(ops, 2, &work), TD_ERR_INVALID, "ops[1]: recv");
    CHECK_FAILS(td_batch_isend_irecv(ops, 0, &work), TD_ERR_INVALID, "empty");
    ops[0].reserved[3] = t;
    CHECK_FAILS(td_batch_isend_irecv(ops, 1, &work), TD_ERR_INVALID, "reserved[3]");
    CHECK_FAILS(td_all_reduce_coalesced(list, 0, TD_SUM, NULL, NULL), TD_ERR_INVALID, "is empty");
    CHECK_FAILS(td_all_reduce_coalesced(mixed, 2, TD_BOR, NULL, &work), TD_ERR_INVALID, "f32");
    CHECK_FAILS(td_all_gather_coalesced(list, 3, list, 2, NULL, NULL), TD_ERR_INVALID,
                "outputs has 3 tensors, but must have 4");
    td_bytes bytes[3] = {{NULL, 0}, {NULL, 3}, {NULL, 0}};
    CHECK_FAILS(td_all_gather_object(bytes, 3, bytes[0], NULL), TD_ERR_INVALID,
                "objects has 3 entries, but must have 2");
    CHECK_FAILS(td_broadcast_object_list(bytes, 2, rank, NULL), TD_ERR_INVALID,
                "objects[1] has 3 bytes, but its data is NULL");
    CHECK_FAILS(td_gather_object(bytes[0], bytes, 2, 1 - rank, NULL), TD_ERR_INVALID,
                "others pass NULL");
    CHECK(!work);
}

RANKS(wrong_arguments_start_nothing, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    td_tensor *t = make_tensor(&plain, 3, 5, 0), *other = make_tensor(&plain, 4, 5, 0);
    td_tensor *floats = td_zeros((int64_t[]){3, 5}, 2, TD_F32, NULL);
    int32_t one = 0;
    td_tensor *wide = td_from_blob(&one, (int64_t[]){3}, 1, (int64_t[]){0}, TD_I32, NULL, NULL, NULL);
    refuse_tensors(t, other, floats);
    refuse_lists(t, floats);
    CHECK_FAILS(td_all_reduce(wide, TD_SUM, NULL, NULL), TD_ERR_INVALID, "share memory");
    CHECK_OK(td_broadcast(t, 0, NULL, NULL));
    for (int i = 0; i < 4; i++)
        td_tensor_release((td_tensor *[]){t, other, floats, wide}[i]);
    CHECK_OK(td_destroy_process_group());
}

/* ---- Memory ---------------------------------------------------------------------------------- */

static void count_frees(void *data, void *arg)
{
    CHECK(data);
    ++*(int *)arg;
}

/* A tensor that its owner has released stays until the work is complete, and no longer. */
RANKS(tensors_are_kept_until_the_work_is_complete, .ranks = 3)
{
    CHECK_OK(td_init_process_group(NULL));
    for (int turn = 0; turn < 2; turn++) {
        int32_t data[20];
        int frees = 0;
        for (int i = 0; i < 20; i++)
            data[i] = td_get_rank(NULL) + i;
        td_tensor *t = td_from_blob(data, (int64_t[]){4, 5}, 2, NULL, TD_I32, NULL, count_frees, &frees);
        td_tensor *view = turn ? td_transpose(t, 0, 1) : td_tensor_retain(t);
        td_work *work;
        CHECK_OK(td_all_reduce(view, TD_SUM, NULL, &work));
        td_tensor_release(t);
        td_tensor_release(view);
        CHECK_OK(td_work_wait(work, 0));
        CHECK_EQ(frees, 1);
        td_work_release(work);
        for (int i = 0; i < 20; i++)
            CHECK_EQ(data[i], 3 + 3 * i);
    }
    CHECK_OK(td_destroy_process_group());
}

/* Memory that is not aligned to its elements is packed. */
RANKS(memory_that_is_not_aligned, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    char memory[10 * 8 + 1];
    double value = td_get_rank(NULL) + 1;
    for (int i = 0; i < 10; i++)
        memcpy(memory + 1 + i * 8, &value, 8);
    td_tensor *t = td_from_blob(memory + 1, (int64_t[]){10}, 1, NULL, TD_F64, NULL, NULL, NULL);
    CHECK_OK(td_all_reduce(t, TD_SUM, NULL, NULL));
    for (int i = 0; i < 10; i++) {
        memcpy(&value, memory + 1 + i * 8, 8);
        CHECK(value == 3);
    }
    td_tensor_release(t);
    CHECK_OK(td_destroy_process_group());
}

static void count_calls(td_work *work, td_status status, void *arg)
{
    CHECK(td_work_test(work));
    CHECK_EQ(status, TD_OK);
    ++*(_Atomic int *)arg;
}

/* A user's function is called after unpacking. */
RANKS(several_works_at_once, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    enum { COUNT = 20 };
    _Atomic int calls = 0;
    td_tensor *tensors[COUNT];
    td_work *works[COUNT];
    for (int i = 0; i < COUNT; i++) {
        tensors[i] = make_tensor(i % 2 ? &turned : &plain, 3, 5, i);
        CHECK_OK(td_all_reduce(tensors[i], TD_SUM, NULL, &works[i]));
        CHECK_OK(td_work_on_complete(works[i], count_calls, &calls));
    }
    CHECK_OK(td_work_wait_all(works, COUNT, 0));
    CHECK_SOON(calls == COUNT);
    for (int i = 0; i < COUNT; i++) {
        check_tensor(tensors[i], 2 * i, 2);
        td_work_release(works[i]);
        td_tensor_release(tensors[i]);
    }
    CHECK_OK(td_destroy_process_group());
}

/* Data that did not arrive are not unpacked, and the tensor is released. */
RANKS(a_failed_work_leaves_the_tensor_alone, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    td_test_barrier();
    if (td_get_rank(NULL) == 0) {
        td_tensor *t = make_tensor(&turned, 3, 5, 7);
        td_work *work;
        CHECK_OK(td_set_call_timeout(300));
        CHECK_OK(td_all_reduce(t, TD_SUM, NULL, &work));
        CHECK_SOON(td_work_test(work));
        CHECK_FAILS(td_work_wait(work, 0), TD_ERR_TIMEOUT, "all_reduce");
        check_tensor(t, 7, 1);
        td_work_release(work);
        td_tensor_release(t);
    }
    td_test_barrier();
    CHECK_OK(td_destroy_process_group());
}
