/* Invalid arguments: each call refuses them with a sentence, starts nothing, and leaves the group intact. Also
 * calls without a world, outside of a group, and in a child of fork(). */
#include "runner.h"

#include <tandem/group.h>

#include <string.h>
#include <sys/wait.h>

static float in[64], out[64];

#define REFUSES(call, part) CHECK_FAILS(call, TD_ERR_INVALID, part)

static void refuse_pointers(void)
{
    size_t counts[2] = {1, 1};
    REFUSES(td_group_broadcast(NULL, 4, TD_F32, 0, NULL, NULL), "NULL");
    REFUSES(td_group_all_reduce(out, NULL, 4, TD_F32, TD_SUM, NULL, NULL),
            "all_reduce: the input is NULL, and should have 4 elements");
    REFUSES(td_group_all_reduce(NULL, in, 4, TD_F32, TD_SUM, NULL, NULL), "the output is NULL");
    REFUSES(td_group_reduce(out, NULL, 4, TD_F32, 0, TD_SUM, NULL, NULL), "the input is NULL");
    REFUSES(td_group_reduce(NULL, in, 4, TD_F32, 0, TD_SUM, NULL, NULL), "the output is NULL");
    REFUSES(td_group_scatter(out, NULL, 4, TD_F32, 0, NULL, NULL), "should have 8 elements");
    REFUSES(td_group_scatter(NULL, in, 4, TD_F32, 0, NULL, NULL), "the output is NULL");
    REFUSES(td_group_gather(out, NULL, 4, TD_F32, 0, NULL, NULL), "the input is NULL");
    REFUSES(td_group_gather(NULL, in, 4, TD_F32, 0, NULL, NULL), "should have 8 elements");
    REFUSES(td_group_all_gather(out, NULL, 4, TD_F32, NULL, NULL), "the input is NULL");
    REFUSES(td_group_all_gather(NULL, in, 4, TD_F32, NULL, NULL), "the output is NULL");
    REFUSES(td_group_reduce_scatter(out, NULL, 4, TD_F32, TD_SUM, NULL, NULL), "NULL");
    REFUSES(td_group_reduce_scatter(NULL, in, 4, TD_F32, TD_SUM, NULL, NULL), "NULL");
    REFUSES(td_group_all_to_all(out, NULL, 4, TD_F32, NULL, NULL), "the input is NULL");
    REFUSES(td_group_all_to_all(NULL, in, 4, TD_F32, NULL, NULL), "the output is NULL");
    REFUSES(td_group_all_to_all_v(out, NULL, counts, counts, TD_F32, NULL, NULL), "NULL");
    REFUSES(td_group_all_to_all_v(NULL, in, counts, counts, TD_F32, NULL, NULL), "NULL");
    REFUSES(td_group_all_to_all_v(out, in, counts, NULL, TD_F32, NULL, NULL), "input counts");
    REFUSES(td_group_all_to_all_v(out, in, NULL, counts, TD_F32, NULL, NULL), "output counts");
    REFUSES(td_group_send(NULL, 4, TD_F32, 1, 0, NULL, NULL), "NULL");
    REFUSES(td_group_recv(NULL, 4, TD_F32, 1, 0, NULL, NULL), "NULL");

    char *odd = (char *)in + 1;
    REFUSES(td_group_broadcast(odd, 4, TD_F32, 0, NULL, NULL), "is not aligned to its f32");
    REFUSES(td_group_all_reduce(out, odd, 4, TD_F32, TD_SUM, NULL, NULL), "the input");
    REFUSES(td_group_all_reduce(odd + 64, in, 4, TD_I16, TD_SUM, NULL, NULL), "is not aligned");
    REFUSES(td_group_all_gather(out, (char *)in + 4, 2, TD_F64, NULL, NULL), "is not aligned");
    REFUSES(td_group_all_to_all((char *)out + 4, in, 2, TD_COMPLEX128, NULL, NULL), "aligned");
}

static void refuse_overlaps(void)
{
    size_t counts[2] = {2, 2};
    REFUSES(td_group_all_reduce(in + 1, in, 4, TD_F32, TD_SUM, NULL, NULL), "overlap");
    REFUSES(td_group_all_reduce(in, in + 3, 4, TD_F32, TD_SUM, NULL, NULL), "overlap");
    REFUSES(td_group_reduce(in, in + 3, 4, TD_F32, 0, TD_SUM, NULL, NULL), "overlap");
    REFUSES(td_group_all_gather(in, in + 4, 4, TD_F32, NULL, NULL), "overlap"); /* rank 1's part */
    REFUSES(td_group_all_gather(in, in + 1, 4, TD_F32, NULL, NULL), "overlap");
    REFUSES(td_group_gather(in, in + 4, 4, TD_F32, 0, NULL, NULL), "overlap");
    REFUSES(td_group_scatter(in + 4, in, 4, TD_F32, 0, NULL, NULL), "overlap");
    REFUSES(td_group_reduce_scatter(in + 4, in, 4, TD_F32, TD_SUM, NULL, NULL), "overlap");
    REFUSES(td_group_all_to_all(in + 4, in, 4, TD_F32, NULL, NULL), "overlap");
    REFUSES(td_group_all_to_all_v(in, in, counts, counts, TD_F32, NULL, NULL), "overlap");
}

static void refuse_numbers(void)
{
    size_t counts[2] = {1, 1}, huge[2] = {1, SIZE_MAX / 2}, two[2] = {2, 1};
    td_reduce_op op = (td_reduce_op)12345;
    REFUSES(td_group_broadcast(in, 4, (td_dtype)99, 0, NULL, NULL),
            "99 is not a dtype (see td_dtype)");
    REFUSES(td_group_all_gather(out, in, 4, (td_dtype)-1, NULL, NULL),
            "-1 is not a dtype (see td_dtype)");
    REFUSES(td_group_broadcast(in, SIZE_MAX / 2, TD_F32, 0, NULL, NULL), "than memory can hold");
    REFUSES(td_group_all_gather(out, in, SIZE_MAX / 8, TD_F32, NULL, NULL), "than memory");
    REFUSES(td_group_all_to_all_v(out, in, counts, huge, TD_F32, NULL, NULL), "than memory");
    REFUSES(td_group_all_to_all_v(out, in, counts, two, TD_F32, NULL, NULL), "to itself");
    REFUSES(td_group_broadcast(in, 4, TD_F32, 2, NULL, NULL),
            "broadcast: root 2 is out of range; ranks are 0 to 1");
    REFUSES(td_group_broadcast(in, 4, TD_F32, -1, NULL, NULL), "root -1");
    REFUSES(td_group_reduce(out, in, 4, TD_F32, 2, TD_SUM, NULL, NULL), "reduce: root 2");
    REFUSES(td_group_scatter(out, in, 4, TD_F32, 2, NULL, NULL), "scatter: root 2");
    REFUSES(td_group_gather(out, in, 4, TD_F32, 77, NULL, NULL), "gather: root 77");
    REFUSES(td_group_all_reduce(out, in, 4, TD_F32, TD_BXOR, NULL, NULL), "f32");
    REFUSES(td_group_all_reduce(out, in, 4, TD_I32, TD_AVG, NULL, NULL), "i32");
    REFUSES(td_group_all_reduce(out, in, 4, TD_COMPLEX64, TD_MAX, NULL, NULL), "complex64");
    REFUSES(td_group_reduce(out, in, 4, TD_BOOL, 0, TD_PREMUL_SUM, NULL, NULL), "bool");
    REFUSES(td_group_all_reduce(out, in, 4, TD_F32, op, NULL, NULL), "12345");
    REFUSES(td_group_reduce_scatter(out, in, 4, TD_F32, (td_reduce_op)-7, NULL, NULL), "-7");
    REFUSES(td_group_send(in, 4, TD_F32, 0, 0, NULL, NULL), "this rank itself");
    REFUSES(td_group_send(in, 4, TD_F32, 5, 0, NULL, NULL), "5 is out of range");
    REFUSES(td_group_send(in, 4, TD_F32, 1, -1, NULL, NULL), "tag");
    REFUSES(td_group_recv(in, 4, TD_F32, 1, -2, NULL, NULL), "tag");

    CHECK_OK(td_reduce_op_create_premul_sum(2, &op));
    td_reduce_op_destroy(op);
    td_reduce_op_destroy(op);     /* again does nothing */
    td_reduce_op_destroy(TD_SUM); /* nor to groups without this rank */
    REFUSES(td_group_all_reduce(out, in, 4, TD_F32, op, NULL, NULL),
            "is not a reduction (see td_reduce_op");
    REFUSES(td_reduce_op_create(NULL, NULL, &op), "NULL");
    REFUSES(td_reduce_op_create_premul_sum(2, NULL), "NULL");
}

/* Rank 0 alone: if any of this started something, the two would be out of step. */
RANKS(wrong_arguments, .ranks = 2)
{
    float one = 1, sum = 0;
    td_work *work = (td_work *)&work, *unchanged = work;
    CHECK_OK(td_init_process_group(NULL));
    for (int round = 0; round < 2; round++) {
        if (td_test_rank() == 0) {
            refuse_pointers();
            refuse_overlaps();
            refuse_numbers();
            REFUSES(td_group_all_reduce(NULL, in, 4, TD_F32, TD_SUM, NULL, &work), "NULL");
            CHECK(work == unchanged);
        }
        CHECK_OK(td_group_all_reduce(&sum, &one, 1, TD_F32, TD_SUM, NULL, NULL));
        CHECK_EQ(sum, 2);
    }
    CHECK_OK(td_destroy_process_group());
}

RANKS(roots_outside_of_the_group, .ranks = 3)
{
    td_group *group;
    CHECK_OK(td_init_process_group(NULL));
    CHECK_OK(td_new_group((int[]){2, 0}, 2, NULL, &group));
    if (td_test_rank() != 1) {
        REFUSES(td_group_broadcast(in, 1, TD_F32, 1, group, NULL),
                "broadcast: root 1 is not in group \"2,0\"");
        REFUSES(td_group_send(in, 1, TD_F32, 1, 0, group, NULL), "1 is not in group");
        CHECK_OK(td_group_broadcast(in, 1, TD_F32, 2, group, NULL));
    } else {
        td_work *work = NULL;
        CHECK_FAILS(td_group_broadcast(in, 1, TD_F32, 0, group, &work), TD_ERR_STATE,
                    "broadcast: rank 1 is not in group \"2,0\"");
        CHECK_FAILS(td_group_all_reduce(out, in, 1, TD_F32, TD_SUM, group, NULL), TD_ERR_STATE,
                    "not in group");
        CHECK_FAILS(td_group_send(in, 1, TD_F32, 0, 0, group, NULL), TD_ERR_STATE, "not in group");
        CHECK_FAILS(td_group_split(group, 0, 0, NULL, &group), TD_ERR_STATE, "not in group");
        CHECK(!work);
    }
    CHECK_OK(td_destroy_process_group());
}

TEST(without_a_world)
{
    td_group *group;
    CHECK_FAILS(td_group_broadcast(in, 1, TD_F32, 0, NULL, NULL), TD_ERR_STATE,
                "broadcast: there is no world yet; call td_init_process_group() first");
    CHECK_FAILS(td_group_barrier(NULL, NULL), TD_ERR_STATE, "no world");
    CHECK_FAILS(td_group_send(in, 1, TD_F32, 0, 0, NULL, NULL), TD_ERR_STATE, "no world");
    CHECK_FAILS(td_new_group(NULL, 0, NULL, &group), TD_ERR_STATE, "no world");
    CHECK_FAILS(td_new_subgroups(1, NULL, &group), TD_ERR_STATE, "no world");
    CHECK_FAILS(td_group_split(NULL, 0, 0, NULL, &group), TD_ERR_STATE, "no world");
    CHECK_FAILS(td_group_set_timeout(NULL, 5), TD_ERR_STATE, "no world");
    CHECK_FAILS(td_get_process_group_ranks(NULL, &(int){0}), TD_ERR_STATE, "no world");
    CHECK_EQ(td_get_group_rank(NULL, 0), -1);
    CHECK_EQ(td_get_global_rank(NULL, 0), -1);
    td_group_destroy(NULL);
}

/* The group belongs to the parent; the child may make a world of its own. */
static void use_inherited(void *arg)
{
    td_group *group = arg;
    CHECK_FAILS(td_group_barrier(NULL, NULL), TD_ERR_STATE, "fork()");
    CHECK_FAILS(td_group_barrier(group, NULL), TD_ERR_STATE, "fork()");
    CHECK_FAILS(td_group_send(in, 1, TD_F32, 1, 0, group, NULL), TD_ERR_STATE, "fork()");
    CHECK_FAILS(td_new_group(NULL, 0, NULL, &group), TD_ERR_STATE, "fork()");
    td_group_destroy(arg);
#ifdef __SANITIZE_THREAD__
    return; /* which allows no thread after a fork() */
#endif
    unsetenv("RANK");
    unsetenv("WORLD_SIZE");
    unsetenv("MASTER_ADDR");
    unsetenv("MASTER_PORT");
    unsetenv("TANDEM_AGENT_STORE");
    CHECK_OK(td_init_process_group(NULL));
    CHECK_EQ(td_get_world_size(NULL), 1);
    CHECK_OK(td_group_barrier(NULL, NULL));
    CHECK_OK(td_destroy_process_group());
}

static void leave_inherited(void *arg)
{
    (void)arg;
    CHECK_OK(td_destroy_process_group());
    CHECK(!td_is_initialized());
}

RANKS(after_fork, .ranks = 2)
{
    td_group *group;
    td_work *work;
    CHECK_OK(td_init_process_group(NULL));
    CHECK_OK(td_new_group(NULL, 0, NULL, &group));
    CHECK_OK(td_group_barrier(group, &work)); /* with a worker, which the child does not have */
    CHECK_OK(td_work_wait(work, 0));
    td_work_release(work);
    for (int i = 0; i < 2; i++) {
        struct td_test_child child = td_test_fork(i ? leave_inherited : use_inherited, group);
        if (!WIFEXITED(child.status) || WEXITSTATUS(child.status))
            FAIL("the child ended with %d: %s", child.status, child.output);
        free(child.output);
        CHECK_OK(td_group_barrier(group, NULL));
        CHECK_OK(td_group_barrier(NULL, NULL));
    }
    CHECK_OK(td_destroy_process_group());
}
