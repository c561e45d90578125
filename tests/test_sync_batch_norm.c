/* Batch norm over all ranks against batch norm of one process with the whole batch. */
#include "runner.h"

#include <tandem/tandem.h>

#include <math.h>
#include <stdio.h>
#include <string.h>

#define SHAPE(...) TD_SHAPE(__VA_ARGS__)

enum { CHANNELS = 3, PLANE = 5 };

static td_tensor *random_tensor(int seed, int64_t n, double mean)
{
    td_generator *generator = td_generator_create((uint64_t)seed, NULL);
    td_tensor *x = td_empty(SHAPE(n, CHANNELS, PLANE, 2), TD_F32, NULL);
    CHECK_OK(td_normal_(x, mean, 2, generator));
    td_generator_destroy(generator);
    return x;
}

static bool close_to(td_tensor *a, td_tensor *b, const char *what)
{
    if (a && b && td_allclose(a, b, 1e-5, 1e-5))
        return true;
    printf("%s differs\n", what);
    return false;
}

/* How many of the batch's pictures rank r has: uneven, and none for the last of more than two. */
static int64_t pictures(int rank, int size)
{
    return size > 2 && rank == size - 1 ? 0 : 2 + 3 * rank;
}

static void compare(const td_batch_norm_options *options)
{
    CHECK_OK(td_init_process_group(NULL));
    int rank = td_get_rank(NULL), size = td_get_world_size(NULL);
    int64_t total = 0, start = 0, mine = pictures(rank, size);
    for (int r = 0; r < size; r++) {
        start += r < rank ? pictures(r, size) : 0;
        total += pictures(r, size);
    }
    td_module *whole = td_batch_norm2d_with(CHANNELS, options);
    td_module *part = td_convert_sync_batch_norm(td_batch_norm2d_with(CHANNELS, options), NULL);
    CHECK(part != NULL);
    for (int step = 0; step < 3; step++) {
        TD_SCOPE;
        td_tensor *x = random_tensor(step, total, 10), *g = random_tensor(50 + step, total, 1);
        td_tensor *x_mine = td_clone(td_narrow(x, 0, start, mine));
        td_tensor *g_mine = td_clone(td_narrow(g, 0, start, mine));
        CHECK_OK(td_tensor_set_requires_grad(x, true));
        CHECK_OK(td_tensor_set_requires_grad(x_mine, true));
        CHECK_OK(td_module_zero_grad(whole));
        CHECK_OK(td_module_zero_grad(part));
        td_tensor *y = td_forward(whole, x), *y_mine = td_forward(part, x_mine);
        CHECK(close_to(td_narrow(y, 0, start, mine), y_mine, "the result"));
        CHECK_OK(td_backward(td_sum(td_mul(y, g))));
        CHECK_OK(td_backward(td_sum(td_mul(y_mine, g_mine))));
        CHECK(close_to(td_narrow(td_tensor_grad(x), 0, start, mine), td_tensor_grad(x_mine),
                       "the gradient of x"));
        for (int i = 0; i < 2 && td_param(part, i); i++) {
            td_tensor *sum = td_clone(td_tensor_grad(td_param(part, i)));
            CHECK_OK(td_all_reduce(sum, TD_SUM, NULL, NULL));
            td_tensor *expected = td_tensor_grad(td_param(whole, i));
            CHECK(td_allclose(sum, expected, 1e-5, 1e-4));
        }
    }
    for (int i = 0; i < 2 && td_buffer(part, i); i++)
        CHECK(close_to(td_buffer(part, i), td_buffer(whole, i), "a running statistic"));
    if (td_buffer(part, 2))
        CHECK_EQ(td_item(td_buffer(part, 2)), 3);
    td_module_eval(whole);
    td_module_eval(part);
    {
        TD_SCOPE;
        td_tensor *x = random_tensor(9, 4, 10);
        CHECK(close_to(td_forward(whole, x), td_forward(part, x), "the result in eval mode"));
    }
    td_module_destroy(whole);
    td_module_destroy(part);
    CHECK_OK(td_destroy_process_group());
}

RANKS(one_rank_is_batch_norm, .ranks = 1)
{
    compare(NULL);
}

RANKS(two_ranks_are_as_one, .ranks = 2)
{
    compare(NULL);
}

RANKS(three_ranks_one_without_pictures, .ranks = 3)
{
    compare(NULL);
}

RANKS(four_ranks_with_means_of_all_batches, .ranks = 4)
{
    compare(&(td_batch_norm_options){.cumulative = true, .eps = 1e-3});
}

RANKS(without_weight_and_bias, .ranks = 2)
{
    compare(&(td_batch_norm_options){.no_affine = true, .momentum = 0.3});
}

/* In eval mode the statistics are those of all ranks too; here all ranks have the same pictures. */
RANKS(without_running_statistics, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    td_batch_norm_options options = {.no_running_stats = true};
    td_module *alone = td_batch_norm2d_with(CHANNELS, &options);
    td_module *part = td_sync_batch_norm(CHANNELS, &options, NULL);
    td_module_eval(alone);
    td_module_eval(part);
    {
        TD_SCOPE;
        td_tensor *x = random_tensor(9, 4, 10);
        CHECK(close_to(td_forward(alone, x), td_forward(part, x), "the result"));
    }
    td_module_destroy(alone);
    td_module_destroy(part);
    CHECK_OK(td_destroy_process_group());
}

TEST(conversion_keeps_tensors_and_names)
{
    td_module *net = td_sequential(td_conv2d(1, CHANNELS, 3), td_batch_norm2d(CHANNELS),
                                   td_sequential(td_relu(), td_batch_norm2d(CHANNELS), NULL), NULL);
    td_tensor *weight = td_module_parameter(net, "2.1.weight");
    td_tensor *mean = td_module_buffer(net, "1.running_mean");
    CHECK_OK(td_tensor_set_requires_grad(weight, false));
    td_module_eval(td_module_find(net, "1"));
    td_state *before = td_module_state(net);
    net = td_convert_sync_batch_norm(net, NULL);
    CHECK(net != NULL);
    td_state *after = td_module_state(net);
    CHECK_EQ(td_state_count(before), td_state_count(after));
    for (int i = 0; i < td_state_count(before); i++)
        CHECK_STR(td_state_name(after, i), td_state_name(before, i));
    CHECK(td_module_parameter(net, "2.1.weight") == weight);
    CHECK(td_module_buffer(net, "1.running_mean") == mean);
    CHECK(!td_tensor_requires_grad(weight));
    CHECK(!td_module_is_training(td_module_find(net, "1")));
    CHECK(td_module_is_training(td_module_find(net, "2.1")));
    td_bytes text = td_module_text(net);
    CHECK_CONTAINS((const char *)text.data, "SyncBatchNorm(3, eps=1e-05, momentum=0.1");
    td_bytes_free(&text);
    td_state_destroy(before);
    td_state_destroy(after);
    td_module_destroy(net);
    CHECK(td_convert_sync_batch_norm(NULL, NULL) == NULL);
}

TEST(what_does_not_fit_is_named)
{
    td_module *norm = td_sync_batch_norm(CHANNELS, NULL, NULL);
    {
        TD_SCOPE;
        CHECK(td_forward(norm, td_zeros(SHAPE(4, 2), TD_F32, NULL)) == NULL);
        CHECK_CONTAINS(td_last_error(), "[4, 2]");
        CHECK(td_forward(norm, td_zeros(SHAPE(4, CHANNELS), TD_F16, NULL)) == NULL);
        CHECK_CONTAINS(td_last_error(), "f16");
        CHECK(td_forward(norm, td_zeros(SHAPE(4, CHANNELS), TD_F64, NULL)) == NULL);
        CHECK(td_forward(norm, td_zeros(SHAPE(1, CHANNELS), TD_F32, NULL)) == NULL);
        CHECK_CONTAINS(td_last_error(), "1 values a channel");
    }
    td_module_destroy(norm);
    CHECK(td_sync_batch_norm(-1, NULL, NULL) == NULL);
}

/* A network with two of them under DDP follows one process with the whole batch. */
static td_module *make_net(void)
{
    td_manual_seed(4);
    return td_sequential(td_conv2d(CHANNELS, 4, 2), td_batch_norm2d(4), td_relu(), td_flatten(),
                         td_linear(16, 6), td_batch_norm1d(6), td_linear(6, 2), NULL);
}

static void step_of(td_module *model, td_optimizer *sgd, int step, int rank, int size)
{
    {
        TD_SCOPE;
        td_tensor *x = random_tensor(step, 12, 0);
        x = td_narrow(x, 0, rank * 12 / size, 12 / size);
        CHECK_OK(td_optimizer_zero_grad(sgd));
        CHECK_OK(td_backward(td_mean(td_square(td_add_scalar(td_forward(model, x), -1)))));
        CHECK_OK(td_optimizer_step(sgd));
    }
}

static void follow(void)
{
    CHECK_OK(td_init_process_group(NULL));
    int rank = td_get_rank(NULL), size = td_get_world_size(NULL);
    td_module *alone = make_net();
    td_module *model = td_ddp(td_convert_sync_batch_norm(make_net(), NULL), NULL);
    CHECK(model != NULL);
    td_optimizer *alone_sgd = td_sgd(alone, &(td_sgd_options){.lr = 0.05});
    td_optimizer *sgd = td_sgd(model, &(td_sgd_options){.lr = 0.05});
    for (int step = 0; step < 20; step++) {
        step_of(alone, alone_sgd, step, 0, 1);
        step_of(model, sgd, step, rank, size);
    }
    td_state *a = td_module_state(alone), *b = td_module_state(td_module_find(model, "module"));
    for (int i = 0; i < td_state_count(a); i++)
        CHECK(td_tensor_dtype(td_state_tensor(a, i)) != TD_F32 ||
              td_allclose(td_state_tensor(a, i), td_state_tensor(b, i), 1e-3, 1e-4));
    td_state_destroy(a);
    td_state_destroy(b);
    td_optimizer_destroy(sgd);
    td_optimizer_destroy(alone_sgd);
    td_module_destroy(model);
    td_module_destroy(alone);
    CHECK_OK(td_destroy_process_group());
}

RANKS(ddp_on_two_follows_one, .ranks = 2)
{
    follow();
}

RANKS(ddp_on_three_follows_one, .ranks = 3)
{
    follow();
}
