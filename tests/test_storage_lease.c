/* Memory of tensors that is lent: a write by any function moves the tensors to a copy, and the lease keeps what
 * was lent. */
#include "runner.h"

#include "tensor/tensor_internal.h"

#include <tandem/tandem.h>

#include <pthread.h>
#include <string.h>

#define SHAPE(...) TD_SHAPE(__VA_ARGS__)

static struct td__lease *lend(td_tensor *tensor)
{
    struct td__lease *lease;
    CHECK_OK(td__storage_lend(tensor->storage, &lease));
    return lease;
}

static float lent(const struct td__lease *lease)
{
    return *(const float *)td__lease_data(lease);
}

static float first(const td_tensor *tensor)
{
    return *(const float *)td_tensor_data(tensor);
}

TEST(a_write_moves_the_tensor_and_its_views)
{
    TD_SCOPE;
    td_tensor *x = td_full(SHAPE(2, 3), 5, TD_F32, NULL), *row = td_narrow(x, 0, 1, 1);
    td_tensor *flat = td_reshape(x, SHAPE(6));
    const void *before = td_tensor_data(x);
    struct td__lease *lease = lend(x);
    CHECK(td__lease_data(lease) == before);
    CHECK(td_tensor_data(x) == before); /* reading moves nothing */
    CHECK_OK(td_fill_(row, 7));
    CHECK(td_tensor_data(x) != before && td_tensor_data(flat) == td_tensor_data(x));
    CHECK_EQ(first(x), 5);
    CHECK_EQ(first(row), 7);
    CHECK_EQ(((const float *)td_tensor_data(flat))[5], 7);
    for (int i = 0; i < 6; i++)
        CHECK_EQ(((const float *)td__lease_data(lease))[i], 5);
    const void *moved = td_tensor_data(x);
    CHECK_OK(td_fill_(x, 8)); /* no longer lent */
    CHECK(td_tensor_data(x) == moved);
    CHECK_EQ(lent(lease), 5);
    td__lease_return(lease);
    CHECK_EQ(first(x), 8);
}

TEST(memory_that_was_returned_stays_with_its_tensor)
{
    TD_SCOPE;
    td_tensor *x = td_full(SHAPE(4), 5, TD_F32, NULL);
    const void *before = td_tensor_data(x);
    struct td__lease *one = lend(x), *two = lend(x);
    td__lease_return(one);
    CHECK(td__storage_is_lent(x->storage));
    td__lease_return(two);
    CHECK(!td__storage_is_lent(x->storage));
    CHECK_OK(td_fill_(x, 6));
    CHECK(td_tensor_data(x) == before);
}

static void count_free(void *data, void *arg)
{
    free(data);
    ++*(int *)arg;
}

static td_tensor *blob(int *freed)
{
    float *data = malloc(2 * sizeof *data);
    data[0] = data[1] = 1;
    return td_from_blob(data, SHAPE(2), NULL, TD_F32, NULL, count_free, freed);
}

TEST(leases_are_returned_in_any_order)
{
    static const int orders[][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2},
                                    {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
    for (int i = 0; i < 6; i++) {
        int freed = 0, left = 2; /* the blob, and its leases */
        td_tensor *x = blob(&freed);
        struct td__lease *leases[3] = {lend(x), lend(x)};
        CHECK_OK(td_add_scalar_(x, 1));
        leases[2] = lend(x); /* of the copy */
        CHECK_OK(td_add_scalar_(x, 1));
        for (int k = 0; k < 3; k++) {
            bool of_blob = orders[i][k] != 2;
            CHECK_EQ(lent(leases[orders[i][k]]), of_blob ? 1 : 2);
            td__lease_return(leases[orders[i][k]]);
            left -= of_blob;
            CHECK_EQ(freed, left == 0);
        }
        CHECK_EQ(first(x), 3);
        td_tensor_release(x);
        CHECK_EQ(freed, 1);
    }
}

TEST(a_lease_outlives_the_tensor)
{
    int freed = 0;
    td_tensor *x = blob(&freed);
    struct td__lease *one = lend(x), *two = lend(x);
    td_tensor_release(x);
    td__lease_return(one);
    CHECK_EQ(freed, 0);
    CHECK_EQ(lent(two), 1);
    td__lease_return(two);
    CHECK_EQ(freed, 1);
}

TEST(memory_of_the_program_is_not_lent)
{
    TD_SCOPE;
    float data[2] = {1, 2};
    struct td__lease *lease;
    td_tensor *x = td_from_blob(data, SHAPE(2), NULL, TD_F32, NULL, NULL, NULL);
    CHECK_FAILS(td__storage_lend(x->storage, &lease), TD_ERR_INVALID, "cannot be lent");
    td_tensor *empty = td_empty(SHAPE(0), TD_F32, NULL);
    lease = lend(empty);
    CHECK_OK(td_fill_(empty, 1));
    td__lease_return(lease);
}

/* ---- Every function that writes -------------------------------------------------------------------- */

/* Lends x, runs `write`, and checks that only x has changed. */
#define CHECK_MOVES(x, write)                                                                      \
    do {                                                                                           \
        float check_before = first(x);                                                             \
        struct td__lease *check_lease = lend(x);                                                   \
        CHECK_OK(write);                                                                           \
        CHECK(td_tensor_data(x) != td__lease_data(check_lease));                                   \
        CHECK_EQ(lent(check_lease) * 1000, check_before * 1000);                                   \
        CHECK(first(x) != check_before);                                                           \
        td__lease_return(check_lease);                                                             \
    } while (0)

TEST(in_place_operators_and_copies_leave_what_is_lent)
{
    TD_SCOPE;
    td_tensor *x = td_full(SHAPE(4), 2, TD_F32, NULL), *b = td_full(SHAPE(4), 3, TD_F32, NULL);
    CHECK_MOVES(x, td_fill_(x, 1));
    CHECK_MOVES(x, td_zero_(x));
    CHECK_MOVES(x, td_add_(x, b));
    CHECK_MOVES(x, td_sub_(x, td_full(SHAPE(4), 1, TD_F32, NULL)));
    CHECK_MOVES(x, td_mul_(x, b));
    CHECK_MOVES(x, td_div_(x, b));
    CHECK_MOVES(x, td_add_scaled_(x, b, -4));
    CHECK_MOVES(x, td_f_relu_(x));
    CHECK_MOVES(x, td_add_scalar_(x, 9));
    CHECK_MOVES(x, td_mul_scalar_(x, 9));
    CHECK_MOVES(x, td_clamp_(x, 0, 1));
    CHECK_MOVES(x, td_tensor_copy(x, b));
    CHECK_MOVES(x, td_add_(x, x));
    CHECK_MOVES(x, td_uniform_(x, 0, 1, NULL));
    CHECK_MOVES(x, td_normal_(x, 0, 1, NULL));
    {
        TD_NO_GRAD;
        CHECK_MOVES(x, td_fill_(x, 100));
    }
    td_tensor *wide = td_arange(0, 8, 1, TD_F32, NULL);
    CHECK_MOVES(wide, td_tensor_copy(td_narrow(wide, 0, 0, 7), td_narrow(wide, 0, 1, 7)));
    CHECK_EQ(((const float *)td_tensor_data(wide))[6], 7);
}

TEST(gradients_and_optimizers_leave_what_is_lent)
{
    TD_SCOPE;
    td_tensor *w = td_full(SHAPE(3, 3), 2, TD_F32, NULL), *x = td_full(SHAPE(2, 3), 1, TD_F32, NULL);
    CHECK_OK(td_tensor_set_requires_grad(w, true));
    CHECK_OK(td_backward(td_sum(td_matmul(x, w))));
    CHECK_MOVES(td_tensor_grad(w), td_backward(td_sum(td_matmul(x, w)))); /* written directly */
    CHECK_MOVES(td_tensor_grad(w), td_backward(td_sum(td_mul_scalar(w, 5))));
    CHECK_MOVES(td_tensor_grad(w), td_clip_grad_norm_of_(&w, 1, 1, NULL, NULL));
    CHECK_MOVES(td_tensor_grad(w), td_clip_grad_value_of_(&w, 1, 0.01));

    td_tensor *grad = td_tensor_retain(td_tensor_grad(w));
    struct td__lease *lease = lend(grad);
    float before = first(grad);
    CHECK_OK(td_tensor_zero_grad(w));
    CHECK_EQ(first(td_tensor_grad(w)), 0);
    CHECK(lent(lease) == before);
    td__lease_return(lease);
    td_tensor_release(grad);

    lease = lend(td_tensor_grad(w)); /* kept as it is until the next pass overwrites it */
    CHECK_OK(td_tensor_zero_grad(w));
    CHECK_OK(td_backward(td_sum(td_mul_scalar(w, 5))));
    CHECK_EQ(lent(lease), 0);
    td__lease_return(lease);

    td_optimizer *optimizer = td_sgd_of(&w, 1, &(td_sgd_options){.lr = 0.1});
    CHECK(optimizer != NULL);
    CHECK_MOVES(w, td_optimizer_step(optimizer));
    lease = lend(td_tensor_grad(w)); /* only read */
    CHECK_OK(td_optimizer_step(optimizer));
    CHECK(td__lease_data(lease) == td_tensor_data(td_tensor_grad(w)));
    td__lease_return(lease);
    td_optimizer_destroy(optimizer);
}

RANKS(collectives_leave_what_is_lent, .ranks = 2)
{
    TD_SCOPE;
    CHECK_OK(td_init_process_group(NULL));
    td_tensor *x = td_full(SHAPE(4), td_test_rank() + 1, TD_F32, NULL), *all = td_zeros(SHAPE(8), TD_F32, NULL);
    CHECK_MOVES(x, td_all_reduce(x, TD_SUM, NULL, NULL));
    CHECK_EQ(first(x), 3);
    CHECK_MOVES(all, td_all_gather_into_tensor(all, x, NULL, NULL));
    struct td__lease *lease = lend(x); /* only read */
    CHECK_OK(td_all_gather_into_tensor(all, x, NULL, NULL));
    CHECK(td__lease_data(lease) == td_tensor_data(x));
    td__lease_return(lease);
    CHECK_OK(td_destroy_process_group());
}

RANKS(buckets_of_ddp_leave_what_is_lent, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    td_module *model = td_ddp(td_linear(3, 2), NULL);
    CHECK(model != NULL);
    td_tensor *weight = td_param(td_child(model, 0), 0);
    for (int i = 0; i < 3; i++) {
        TD_SCOPE;
        struct td__lease *lease = i ? lend(td_tensor_grad(weight)) : NULL; /* a view of a bucket */
        float before = lease ? lent(lease) : 0;
        CHECK_OK(td_backward(td_sum(td_forward(model, td_full(SHAPE(4, 3), 1, TD_F32, NULL)))));
        CHECK_EQ(first(td_tensor_grad(weight)), 4 * (i + 1));
        if (lease) {
            CHECK_EQ(lent(lease), before);
            td__lease_return(lease);
        }
    }
    td_module_destroy(model);
    CHECK_OK(td_destroy_process_group());
}

TEST(running_statistics_leave_what_is_lent)
{
    TD_SCOPE;
    td_tensor *statistics = td_full(SHAPE(2, 3), 1, TD_F32, NULL); /* both in one storage */
    td_tensor *mean = td_select(statistics, 0, 0), *var = td_select(statistics, 0, 1);
    td_tensor *x = td_reshape(td_arange(0, 12, 1, TD_F32, NULL), SHAPE(4, 3));
    CHECK_MOVES(mean, td_batch_norm(x, mean, var, NULL, NULL, true, 0.1, 1e-5) ? TD_OK
                                                                               : td_last_status());
    CHECK(first(var) != 1);
    struct td__lease *lease = lend(mean); /* only read */
    CHECK(td_batch_norm(x, mean, var, NULL, NULL, false, 0.1, 1e-5) != NULL);
    CHECK(td__lease_data(lease) == td_tensor_data(mean));
    td__lease_return(lease);
}

/* ---- Threads ----------------------------------------------------------------------------------------- */

static void *return_lease(void *arg)
{
    td__lease_return(arg);
    return NULL;
}

TEST(a_lease_may_be_returned_while_the_tensor_is_written)
{
    TD_SCOPE;
    td_tensor *x = td_full(SHAPE(1024), 0, TD_F32, NULL);
    for (int i = 1; i <= 200; i++) {
        pthread_t threads[2];
        for (int k = 0; k < 2; k++)
            CHECK_EQ(pthread_create(&threads[k], NULL, return_lease, lend(x)), 0);
        CHECK_OK(td_add_scalar_(x, 1));
        for (int k = 0; k < 2; k++)
            pthread_join(threads[k], NULL);
        CHECK_EQ(first(x), i);
    }
}
