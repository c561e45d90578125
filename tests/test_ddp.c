/* DistributedDataParallel and the reducer: the gradients of several ranks against those of one
 * process with the whole batch, what is unused, what is refused, and that all ranks have the same
 * bits. */
#include "runner.h"

#include <tandem/tandem.h>

#include <math.h>
#include <stdio.h>
#include <string.h>

#define SHAPE(...) TD_SHAPE(__VA_ARGS__)

enum { BATCH = 24, WIDTH = 12, CLASSES = 5 };

static td_module *make_net(int seed)
{
    td_manual_seed((uint64_t)seed);
    return td_sequential(td_linear(WIDTH, 33), td_tanh(), td_linear(33, 17), td_relu(),
                         td_linear(17, CLASSES), NULL);
}

/* The batch of a step, the same on every rank, and this rank's part of it. */
static void make_batch(int step, int rank, int size, td_tensor **x, td_tensor **y)
{
    td_generator *generator = td_generator_create((uint64_t)(1000 + step), NULL);
    td_tensor *all = td_empty(SHAPE(BATCH, WIDTH), TD_F32, NULL),
              *labels = td_empty(SHAPE(BATCH), TD_I64, NULL);
    CHECK_OK(td_normal_(all, 0, 1, generator));
    CHECK_OK(td_random_range_(labels, 0, CLASSES, generator));
    td_generator_destroy(generator);
    *x = td_narrow(all, 0, rank * BATCH / size, BATCH / size);
    *y = td_narrow(labels, 0, rank * BATCH / size, BATCH / size);
}

static double train(td_module *model, td_optimizer *sgd, int step, int rank, int size)
{
    double loss_value = 0;
    {
        TD_SCOPE;
        td_tensor *x, *y;
        make_batch(step, rank, size, &x, &y);
        CHECK_OK(td_optimizer_zero_grad(sgd));
        td_tensor *loss = td_cross_entropy(td_forward(model, x), td_contiguous(y));
        CHECK_OK(td_backward(loss));
        CHECK_OK(td_optimizer_step(sgd));
        loss_value = td_item(loss);
    }
    return loss_value;
}

/* All ranks hold the same bits. */
static void check_same_bits(td_module *model)
{
    td_state *parameters = td_module_parameters(model);
    for (int i = 0; i < td_state_count(parameters); i++) {
        td_tensor *mine = td_state_tensor(parameters, i);
        td_tensor *theirs = td_clone(mine);
        CHECK_OK(td_broadcast(theirs, 0, NULL, NULL));
        CHECK(!memcmp(td_tensor_data(mine), td_tensor_data(theirs), td_tensor_nbytes(mine)));
        td_tensor_release(theirs);
    }
    td_state_destroy(parameters);
}

static void follow_one_process(const td_ddp_options *options, double tolerance)
{
    CHECK_OK(td_init_process_group(NULL));
    int rank = td_get_rank(NULL), size = td_get_world_size(NULL);
    td_module *alone = make_net(1);
    td_module *model = td_ddp(make_net(1 + rank), options);
    CHECK(model != NULL);
    td_optimizer *alone_sgd = td_sgd(alone, &(td_sgd_options){.lr = 0.2, .momentum = 0.9});
    td_optimizer *sgd = td_sgd(model, &(td_sgd_options){.lr = 0.2, .momentum = 0.9});
    for (int step = 0; step < 200; step++) {
        double expected = train(alone, alone_sgd, step, 0, 1);
        double loss = train(model, sgd, step, rank, size);
        CHECK_OK(td_group_all_reduce(&loss, &loss, 1, TD_F64, TD_AVG, NULL, NULL));
        if (fabs(loss - expected) > tolerance * fabs(expected)) {
            printf("step %d: %.9g instead of %.9g\n", step, loss, expected);
            CHECK(false);
        }
        if (step % 20 == 0)
            check_same_bits(model);
    }
    check_same_bits(model);
    td_ddp_stats stats;
    CHECK_OK(td_ddp_get_stats(model, &stats));
    CHECK_EQ(stats.passes, 200);
    CHECK(stats.rebuilt || (options && options->find_unused_parameters));
    td_optimizer_destroy(sgd);
    td_optimizer_destroy(alone_sgd);
    td_module_destroy(model);
    td_module_destroy(alone);
    CHECK_OK(td_destroy_process_group());
}

RANKS(one_rank_follows, .ranks = 1)
{
    follow_one_process(NULL, 1e-4);
}

RANKS(two_ranks_follow_one, .ranks = 2, .deadline_s = 60)
{
    follow_one_process(NULL, 1e-4);
}

RANKS(three_ranks_follow_one, .ranks = 3, .deadline_s = 60)
{
    follow_one_process(NULL, 1e-4);
}

RANKS(four_ranks_with_small_buckets_follow_one, .ranks = 4, .deadline_s = 60)
{
    follow_one_process(&(td_ddp_options){.bucket_cap_mb = 0.0005}, 1e-4);
}

RANKS(eight_ranks_follow_one, .ranks = 8, .deadline_s = 120)
{
    follow_one_process(NULL, 1e-4);
}

RANKS(looking_for_unused_changes_nothing, .ranks = 2, .deadline_s = 60)
{
    follow_one_process(&(td_ddp_options){.find_unused_parameters = true}, 1e-4);
}

RANKS(a_static_graph_changes_nothing, .ranks = 2, .deadline_s = 60)
{
    follow_one_process(&(td_ddp_options){.static_graph = true}, 1e-4);
}

RANKS(half_precision_follows_roughly, .ranks = 2, .deadline_s = 60)
{
    follow_one_process(&(td_ddp_options){.hook = td_hook_fp16()}, 0.05);
}

/* ---- Verification --------------------------------------------------------------------------------- */

RANKS(different_models_fail_on_all_ranks, .ranks = 3)
{
    CHECK_OK(td_init_process_group(NULL));
    int rank = td_get_rank(NULL);
    td_module *net = td_sequential(td_linear(4, 4), td_linear(4, rank == 2 ? 3 : 2), NULL);
    CHECK(td_ddp(net, NULL) == NULL);
    CHECK_CONTAINS(td_last_error(), "rank 0 and rank 2");
    CHECK_CONTAINS(td_last_error(), "1.weight");
    CHECK_CONTAINS(td_last_error(), "[3, 4]");
    net = rank == 1 ? td_sequential(td_linear(4, 4), NULL)
                    : td_sequential(td_linear(4, 4), td_linear(4, 2), NULL);
    CHECK(td_ddp(net, NULL) == NULL);
    CHECK_CONTAINS(td_last_error(), "rank 0 has 4 parameters, rank 1 has 2");
    CHECK_OK(td_destroy_process_group());
}

TEST(without_a_group_it_is_refused)
{
    CHECK(td_ddp(td_linear(2, 2), NULL) == NULL);
    CHECK_CONTAINS(td_last_error(), "td_init_process_group");
    CHECK(td_ddp(NULL, NULL) == NULL);
}

/* ---- Accumulation, unused parameters ------------------------------------------------------------------ */

/* y = x w0 + (use ? x w1 : 0), as a module of its own. */
struct fork_data {
    bool use;
};

static td_tensor *fork_forward(td_module *module, td_tensor *const *inputs, int count)
{
    (void)count;
    td_tensor *y = td_mul(inputs[0], td_param(module, 0));
    if (((struct fork_data *)td_module_data(module))->use)
        y = td_add(y, td_mul(inputs[0], td_param(module, 1)));
    return y;
}

static const td_module_ops fork_ops = {
    .name = "Fork", .data_size = sizeof(struct fork_data), .forward = fork_forward};

static td_module *make_fork(bool use)
{
    td_module *module = td_module_create(&fork_ops);
    ((struct fork_data *)td_module_data(module))->use = use;
    td_tensor *w = td_full(SHAPE(3), 1, TD_F32, NULL), *v = td_full(SHAPE(3), 1, TD_F32, NULL);
    td_module_add_parameter(module, "w", w);
    td_module_add_parameter(module, "v", v);
    td_tensor_release(w);
    td_tensor_release(v);
    return td_module_finish(module);
}

static void pass(td_module *model, double x)
{
    {
        TD_SCOPE;
        CHECK_OK(td_backward(td_sum(td_forward(model, td_full(SHAPE(3), x, TD_F32, NULL)))));
    }
}

static float grad_of(td_module *model, const char *name)
{
    td_tensor *grad = td_tensor_grad(td_module_parameter(model, name));
    return grad ? *(float *)td_tensor_data(grad) : -1;
}

RANKS(sums_without_synchronisation_are_averaged_later, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    int rank = td_get_rank(NULL);
    td_module *model = td_ddp(make_fork(true), NULL);
    {
        TD_NO_SYNC(model);
        pass(model, rank + 1);
    }
    CHECK_EQ(grad_of(model, "module.w"), rank + 1);
    pass(model, 10 * (rank + 1));
    CHECK_EQ(grad_of(model, "module.w") * 10, 165); /* the mean of 11 and 22 */
    CHECK_EQ(grad_of(model, "module.v") * 10, 165);
    pass(model, 0);
    CHECK_EQ(grad_of(model, "module.w") * 10, 165);
    td_module_destroy(model);
    CHECK_OK(td_destroy_process_group());
}

RANKS(an_unused_parameter_is_named, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    td_module *model = td_ddp(make_fork(false), NULL);
    {
        TD_SCOPE;
        CHECK_FAILS(td_backward(td_sum(td_forward(model, td_full(SHAPE(3), 1, TD_F32, NULL)))),
                    TD_ERR_STATE, "\"v\"");
    }
    CHECK_CONTAINS(td_last_error(), "find_unused_parameters");
    td_module_destroy(model);
    CHECK_OK(td_destroy_process_group());
}

RANKS(unused_parameters_are_found, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    int rank = td_get_rank(NULL);
    td_ddp_options options = {.find_unused_parameters = true};
    /* Unused on rank 1 only: the average counts it as 0. */
    td_module *model = td_ddp(make_fork(rank == 0), &options);
    for (int turn = 1; turn < 4; turn++) {
        pass(model, 8);
        CHECK_EQ(grad_of(model, "module.w"), 8 * turn);
        CHECK_EQ(grad_of(model, "module.v"), rank == 0 || turn == 1 ? 4 * turn : 4 * turn);
        break; /* what is added up afterwards differs by rank, as in PyTorch */
    }
    td_module_destroy(model);

    /* Unused everywhere: it keeps what it has. */
    model = td_ddp(make_fork(false), &options);
    pass(model, 8);
    CHECK_EQ(grad_of(model, "module.v"), -1);
    {
        TD_SCOPE;
        CHECK_OK(td_tensor_set_grad(td_module_parameter(model, "module.v"),
                                    td_full(SHAPE(3), 5, TD_F32, NULL)));
    }
    pass(model, 8);
    CHECK_EQ(grad_of(model, "module.v"), 5);
    CHECK_EQ(grad_of(model, "module.w"), 16);
    td_module_destroy(model);
    CHECK_OK(td_destroy_process_group());
}

RANKS(parameters_can_be_left_alone, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    int rank = td_get_rank(NULL);
    td_module *model = td_ddp(
        make_fork(true), &(td_ddp_options){.ignore = (const char *[]){"v"}, .ignore_count = 1});
    pass(model, 2 * rank);
    CHECK_EQ(grad_of(model, "module.w"), 1);
    CHECK_EQ(grad_of(model, "module.v"), 2 * rank);
    td_module_destroy(model);
    CHECK_OK(td_destroy_process_group());
}

RANKS(buffers_follow_the_first_rank, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    int rank = td_get_rank(NULL);
    td_module *model = td_ddp(td_sequential(td_batch_norm1d(3), NULL), NULL);
    float means[2];
    for (int step = 0; step < 3; step++) {
        TD_SCOPE;
        td_tensor *x = td_full(SHAPE(4, 3), rank + 1, TD_F32, NULL);
        CHECK_OK(td_backward(td_sum(td_forward(model, x))));
    }
    td_module_eval(model);
    {
        TD_SCOPE;
        TD_NO_GRAD;
        CHECK(td_forward(model, td_full(SHAPE(4, 3), 1, TD_F32, NULL)) != NULL);
    }
    float mean = *(float *)td_tensor_data(td_module_buffer(model, "module.0.running_mean"));
    CHECK_OK(td_group_all_gather(means, &mean, 1, TD_F32, NULL, NULL));
    CHECK(means[0] == means[1]);
    CHECK(fabs(means[0] - 0.271) < 1e-5); /* of ones: 1 - 0.9^3 */
    td_module_destroy(model);
    CHECK_OK(td_destroy_process_group());
}

/* ---- The reducer ------------------------------------------------------------------------------------------ */

/* A module that was moved has other tensors, whose gradients would not be averaged. */
RANKS(a_module_that_was_moved_is_refused, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    td_module *model = td_ddp(make_net(1), NULL);
    CHECK(model != NULL);
    {
        TD_SCOPE;
        td_tensor *x, *y;
        make_batch(0, 0, 1, &x, &y);
        CHECK_OK(td_module_to(model, td_device_get("cpu"))); /* it is there already */
        CHECK(td_forward(model, x) != NULL);
        CHECK_OK(td_module_to(td_child(td_child(model, 0), td_child_count(td_child(model, 0)) - 1),
                              td_device_get("cpu:1")));
        CHECK(td_forward(model, x) == NULL);
        CHECK_EQ(td_last_status(), TD_ERR_STATE);
        CHECK_CONTAINS(td_last_error(), "before td_ddp()");
    }
    td_module_destroy(model);
    CHECK_OK(td_destroy_process_group());
}

/* DDP(model, device_ids=[rank]) of PyTorch: inputs come from anywhere. */
RANKS(inputs_are_moved_to_the_device, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    char device[] = "cpu:0";
    device[4] = (char)('0' + td_test_rank());
    td_module *net = make_net(1);
    CHECK_OK(td_module_to(net, td_device_get(device)));
    CHECK(td_ddp(td_linear(1, 1), &(td_ddp_options){.output_device = td_device_get("tape")}) ==
          NULL);
    CHECK_CONTAINS(td_last_error(), "tape");
    td_module *model = td_ddp(
        net,
        &(td_ddp_options){.device_ids = (td_device *[]){td_device_get(device)}, .device_count = 1});
    CHECK(model != NULL);
    strcpy(device, "gone");
    {
        TD_SCOPE;
        td_tensor *x, *y;
        make_batch(0, 0, 1, &x, &y);
        td_tensor *output = td_forward(model, x);
        CHECK(output != NULL);
        CHECK_EQ(td_device_index(td_tensor_device(output)), td_test_rank());
        CHECK_OK(td_backward(td_sum(output)));
    }
    td_module_destroy(model);
    CHECK_OK(td_destroy_process_group());
}

RANKS(a_reducer_averages_plain_memory, .ranks = 3)
{
    CHECK_OK(td_init_process_group(NULL));
    int rank = td_get_rank(NULL);
    float own[1000];
    double other[7];
    td_reducer_buffer buffers[] = {{.data = own, .count = 1000, .dtype = TD_F32},
                                   {.count = 300000, .dtype = TD_F32},
                                   {.data = other, .count = 7, .dtype = TD_F64}};
    td_reducer *reducer = td_reducer_create(buffers, 3,
                                            &(td_reducer_options){.bucket_bytes = 4096});
    CHECK(reducer != NULL);
    float *inside = td_reducer_data(reducer, 1);
    CHECK(td_reducer_data(reducer, 0) == own);
    for (int step = 0; step < 5; step++) {
        for (int i = 0; i < 1000; i++)
            own[i] = (float)(rank + i);
        for (int i = 0; i < 300000; i++)
            inside[i] = (float)(rank * step);
        for (int i = 0; i < 7; i++)
            other[i] = rank;
        CHECK_OK(td_reducer_ready(reducer, 2));
        CHECK_FAILS(td_reducer_ready(reducer, 2), TD_ERR_STATE, "ready already");
        CHECK_FAILS(td_reducer_wait(reducer), TD_ERR_STATE, "0, 1");
        CHECK_OK(td_reducer_ready(reducer, rank % 2 ? 0 : 1)); /* any order */
        CHECK_OK(td_reducer_ready(reducer, rank % 2 ? 1 : 0));
        CHECK_OK(td_reducer_wait(reducer));
        for (int i = 0; i < 1000; i++)
            CHECK(own[i] == (float)(1 + i));
        CHECK(inside[0] == (float)step && inside[299999] == (float)step);
        CHECK(other[6] == 1);
    }
    CHECK_FAILS(td_reducer_ready(reducer, 3), TD_ERR_INVALID, "0 to 2");
    td_reducer_destroy(reducer);
    buffers[1].count += (size_t)rank;
    CHECK(td_reducer_create(buffers, 3, NULL) == NULL);
    CHECK_CONTAINS(td_last_error(), "rank 0 and rank 1");
    CHECK_OK(td_destroy_process_group());
}
