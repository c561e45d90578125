/* Models that are not of one kind: several dtypes, several devices, parameters that are used twice, a
 * graph that changes, and two models on different groups. */
#include "runner.h"

#include <tandem/tandem.h>

#include <math.h>
#include <stdio.h>
#include <string.h>

#define SHAPE(...) TD_SHAPE(__VA_ARGS__)

static void add_parameter(td_module *module, const char *name, double value, td_dtype dtype,
                          const char *device)
{
    td_tensor *tensor = td_full(SHAPE(4), value, dtype, NULL);
    if (device) {
        td_tensor *there = td_tensor_to(tensor, td_device_get(device));
        td_tensor_release(tensor);
        tensor = there;
    }
    CHECK_OK(td_module_add_parameter(module, name, tensor));
    td_tensor_release(tensor);
}

static double grad_of(td_module *model, const char *name)
{
    td_tensor *grad = td_tensor_grad(td_module_parameter(model, name));
    CHECK(grad != NULL);
    double value = 0;
    {
        TD_SCOPE;
        value = td_item(td_select(td_to_dtype(td_tensor_to(grad, td_device_get("cpu")), TD_F64), 0, 2));
    }
    return value;
}

static void pass(td_module *model, double x)
{
    {
        TD_SCOPE;
        td_tensor *y = td_forward(model, td_full(SHAPE(4), x, TD_F32, NULL));
        CHECK(y != NULL);
        CHECK_OK(td_backward(td_sum(y)));
    }
}

/* ---- Dtypes ------------------------------------------------------------------------------------------------ */

/* y = x a b c, where a is f32, b f64 and c bf16. */
static td_tensor *mixed_forward(td_module *module, td_tensor *const *inputs, int count)
{
    (void)count;
    td_tensor *y = td_mul(inputs[0], td_param(module, 0));
    y = td_mul(td_to_dtype(y, TD_F64), td_param(module, 1));
    return td_mul(td_to_dtype(y, TD_BF16), td_param(module, 2));
}

static const td_module_ops mixed_ops = {.name = "Mixed", .forward = mixed_forward};

static void mixed(double cap)
{
    CHECK_OK(td_init_process_group(NULL));
    int rank = td_get_rank(NULL), size = td_get_world_size(NULL);
    td_module *module = td_module_create(&mixed_ops);
    add_parameter(module, "a", 2, TD_F32, NULL);
    add_parameter(module, "b", 4, TD_F64, NULL);
    add_parameter(module, "c", 8, TD_BF16, NULL);
    td_module *model = td_ddp(td_module_finish(module), &(td_ddp_options){.bucket_cap_mb = cap});
    CHECK(model != NULL);
    double mean = (size + 1) / 2.0;
    for (int step = 0; step < 3; step++) {
        CHECK_OK(td_module_zero_grad(model));
        pass(model, rank + 1);
        CHECK(grad_of(model, "module.a") == 32 * mean);
        CHECK(grad_of(model, "module.b") == 16 * mean);
        CHECK(grad_of(model, "module.c") == 8 * mean);
    }
    td_ddp_stats stats;
    CHECK_OK(td_ddp_get_stats(model, &stats));
    CHECK_EQ(stats.buckets, 3);
    td_module_destroy(model);
    CHECK_OK(td_destroy_process_group());
}

RANKS(dtypes_have_their_own_buckets, .ranks = 2)
{
    mixed(0);
}

RANKS(dtypes_on_three_ranks, .ranks = 3)
{
    mixed(1e-6);
}

/* ---- Devices ----------------------------------------------------------------------------------------------- */

/* y = (x a on cpu:0) b on cpu:1. */
static td_tensor *spread_forward(td_module *module, td_tensor *const *inputs, int count)
{
    (void)count;
    td_tensor *y = td_mul(td_tensor_to(inputs[0], td_device_get("cpu:0")), td_param(module, 0));
    return td_tensor_to(td_mul(td_tensor_to(y, td_device_get("cpu:1")), td_param(module, 1)), td_device_get("cpu"));
}

static const td_module_ops spread_ops = {.name = "Spread", .forward = spread_forward};

static void spread(td_ddp_options options)
{
    CHECK_OK(td_init_process_group(NULL));
    int rank = td_get_rank(NULL), size = td_get_world_size(NULL);
    td_module *module = td_module_create(&spread_ops);
    add_parameter(module, "a", 2 + rank, TD_F32, "cpu:0");
    add_parameter(module, "b", 3 + rank, TD_F32, "cpu:1");
    td_module *model = td_ddp(td_module_finish(module), &options);
    CHECK(model != NULL);
    double mean = (size + 1) / 2.0;
    for (int step = 0; step < 3; step++) {
        CHECK_OK(td_module_zero_grad(model));
        pass(model, rank + 1);
        CHECK(grad_of(model, "module.a") == 3 * mean);
        CHECK(grad_of(model, "module.b") == 2 * mean);
        CHECK_STR(td_device_name(td_tensor_device(td_tensor_grad(td_module_parameter(model, "module.b")))),
                  "cpu:1");
    }
    td_ddp_stats stats;
    CHECK_OK(td_ddp_get_stats(model, &stats));
    CHECK_EQ(stats.buckets, 2);
    td_module_destroy(model);
    CHECK_OK(td_destroy_process_group());
}

RANKS(a_model_on_two_devices, .ranks = 2)
{
    spread((td_ddp_options){0});
}

RANKS(a_model_on_two_devices_with_a_hook, .ranks = 3)
{
    spread((td_ddp_options){.hook = td_hook_bf16(), .find_unused_parameters = true});
}

/* ---- Shared parameters, and a graph that changes ------------------------------------------------------------ */

/* y = x a a (+ x b where it is switched on), a shared by two names. */
struct shared_data {
    bool use;
};

static td_tensor *shared_forward(td_module *module, td_tensor *const *inputs, int count)
{
    (void)count;
    td_tensor *y = td_mul(td_mul(inputs[0], td_param(module, 0)), td_param(module, 1));
    if (((struct shared_data *)td_module_data(module))->use)
        y = td_add(y, td_mul(inputs[0], td_param(module, 2)));
    return y;
}

static const td_module_ops shared_ops = {
    .name = "Shared", .data_size = sizeof(struct shared_data), .forward = shared_forward};

static td_module *make_shared(td_module **inside, const td_ddp_options *options)
{
    td_module *module = td_module_create(&shared_ops);
    *inside = module;
    ((struct shared_data *)td_module_data(module))->use = true;
    add_parameter(module, "a", 3, TD_F32, NULL);
    CHECK_OK(td_module_add_parameter(module, "again", td_param(module, 0)));
    add_parameter(module, "b", 1, TD_F32, NULL);
    td_module *model = td_ddp(td_module_finish(module), options);
    CHECK(model != NULL);
    return model;
}

RANKS(a_parameter_used_twice_counts_once, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    int rank = td_get_rank(NULL);
    td_module *inside, *model = make_shared(&inside, NULL);
    for (int step = 0; step < 3; step++) {
        CHECK_OK(td_module_zero_grad(model));
        pass(model, 2 * rank);
        CHECK(grad_of(model, "module.a") == 6); /* 2 x a, where x is 1 on average */
        CHECK(td_module_parameter(model, "module.again") == td_module_parameter(model, "module.a"));
        CHECK(grad_of(model, "module.b") == 1);
    }
    td_module_destroy(model);
    CHECK_OK(td_destroy_process_group());
}

RANKS(a_graph_that_changes_is_reported, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    td_module *inside, *model = make_shared(&inside, NULL);
    pass(model, 1);
    pass(model, 1);
    ((struct shared_data *)td_module_data(inside))->use = false;
    {
        TD_SCOPE;
        CHECK_FAILS(td_backward(td_sum(td_forward(model, td_full(SHAPE(4), 1, TD_F32, NULL)))),
                    TD_ERR_STATE, "\"b\"");
    }
    /* Used again, it goes on. */
    ((struct shared_data *)td_module_data(inside))->use = true;
    CHECK_OK(td_module_zero_grad(model));
    pass(model, td_get_rank(NULL));
    CHECK(grad_of(model, "module.b") == 0.5);
    td_module_destroy(model);

    model = make_shared(&inside, &(td_ddp_options){.find_unused_parameters = true});
    for (int step = 0; step < 4; step++) {
        ((struct shared_data *)td_module_data(inside))->use = step % 2 == td_get_rank(NULL);
        CHECK_OK(td_module_zero_grad(model));
        pass(model, 4);
        CHECK(grad_of(model, "module.a") == 24);
        CHECK(grad_of(model, "module.b") == 2);
    }
    td_module_destroy(model);
    CHECK_OK(td_destroy_process_group());
}

/* ---- Two models ---------------------------------------------------------------------------------------------- */

RANKS(two_models_on_two_groups, .ranks = 4)
{
    CHECK_OK(td_init_process_group(NULL));
    int rank = td_get_rank(NULL);
    td_group *pair;
    CHECK_OK(td_new_subgroups(2, NULL, &pair));
    td_module *inside, *inner, *world = make_shared(&inside, NULL);
    td_module *half = make_shared(&inner, &(td_ddp_options){.group = pair});
    for (int step = 0; step < 3; step++) {
        CHECK_OK(td_module_zero_grad(world));
        CHECK_OK(td_module_zero_grad(half));
        /* One loss of both: the passes are one. */
        {
            TD_SCOPE;
            td_tensor *x = td_full(SHAPE(4), rank, TD_F32, NULL);
            td_tensor *a = td_forward(world, x), *b = td_forward(half, x);
            CHECK_OK(td_backward(td_sum(td_add(a, b))));
        }
        CHECK(grad_of(world, "module.b") == 1.5);
        CHECK(grad_of(half, "module.b") == (rank < 2 ? 0.5 : 2.5));
        CHECK(grad_of(half, "module.a") == (rank < 2 ? 3 : 15));
    }
    td_module_destroy(half);
    td_module_destroy(world);
    td_group_destroy(pair);
    CHECK_OK(td_destroy_process_group());
}
