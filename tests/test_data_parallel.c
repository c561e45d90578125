/* DataParallel: the same results and gradients as the module alone, wherever the module is. */
#include "runner.h"

#include <tandem/tandem.h>

#include <string.h>

#define DEVICES                                                                                    \
    ((td_device *[]){td_device_get("cpu:0"), td_device_get("cpu:1"), td_device_get("cpu:2")})

static td_module *make_net(void)
{
    td_manual_seed(5);
    return td_sequential(td_linear(4, 6), td_tanh(), td_linear(6, 2), NULL);
}

static td_tensor *numbers(int64_t rows, int64_t width)
{
    return td_randn((int64_t[]){rows, width}, 2, TD_F32, NULL);
}

static td_tensor *at_home(td_tensor *tensor)
{
    return td_tensor_to(tensor, td_device_get("cpu"));
}

/* Both have the same parameters; so they must have the same gradients. */
static void check_gradients(td_module *alone, td_module *model, const char *device)
{
    td_state *a = td_module_parameters(alone), *b = td_module_parameters(model);
    CHECK_EQ(td_state_count(a), td_state_count(b));
    for (int i = 0; i < td_state_count(a); i++) {
        td_tensor *grad = td_tensor_grad(td_state_tensor(b, i));
        CHECK(grad != NULL);
        CHECK_STR(td_device_name(td_tensor_device(grad)), device);
        CHECK(td_allclose(at_home(grad), td_tensor_grad(td_state_tensor(a, i)), 1e-4, 1e-6));
    }
    td_state_destroy(a);
    td_state_destroy(b);
}

/* Forward and backward of `rows` samples, against the module alone. */
static void check_same(td_module *model, int64_t rows, const char *output, const char *gradients)
{
    td_module *alone = make_net();
    td_manual_seed(6);
    CHECK_OK(td_module_zero_grad(model));
    {
        TD_SCOPE;
        td_tensor *x = numbers(rows, 4), *expected = td_forward(alone, x);
        td_tensor *result = td_forward(model, x);
        CHECK(result != NULL);
        CHECK_STR(td_device_name(td_tensor_device(result)), output);
        CHECK(td_allclose(at_home(result), expected, 1e-5, 1e-6));
        CHECK_OK(td_backward(td_sum(td_square(expected))));
        CHECK_OK(td_backward(td_sum(td_square(result))));
        check_gradients(alone, model, gradients);
    }
    td_module_destroy(alone);
}

TEST(several_devices_give_the_same_gradients)
{
    td_module *net = make_net();
    CHECK_OK(td_module_to(net, td_device_get("cpu:0")));
    td_module *model = td_data_parallel(
        net, &(td_data_parallel_options){
                 .device_ids = DEVICES, .device_count = 3, .output_device = td_device_get("cpu")});
    CHECK(model != NULL);
    check_same(model, 30, "cpu", "cpu:0");
    td_module_destroy(model);
}

TEST(a_fresh_module_stays_where_it_is)
{
    td_module *model = td_data_parallel(make_net(), NULL);
    CHECK(model != NULL);
    check_same(model, 30, "cpu", "cpu");
    td_module_destroy(model);
    model = td_data_parallel(make_net(), &(td_data_parallel_options){.device_count = 3});
    check_same(model, 8, "cpu", "cpu");
    td_module_destroy(model);
    model = td_data_parallel(make_net(),
                             &(td_data_parallel_options){.device_ids = DEVICES, .device_count = 2});
    check_same(model, 8, "cpu:0", "cpu"); /* as in PyTorch: the first of device_ids */
    td_module_destroy(model);
}

TEST(a_module_that_is_moved_later)
{
    td_module *model = td_data_parallel(make_net(), &(td_data_parallel_options){.device_count = 3});
    check_same(model, 9, "cpu", "cpu");
    CHECK_OK(td_module_to(model, td_device_get("cpu:0")));
    check_same(model, 9, "cpu:0", "cpu:0");
    CHECK_OK(td_module_to(model, td_device_get("cpu:7"))); /* none of those that it runs on */
    check_same(model, 9, "cpu:7", "cpu:7");
    td_module_destroy(model);
}

TEST(batches_of_any_size)
{
    td_module *model = td_data_parallel(make_net(), &(td_data_parallel_options){.device_count = 3});
    for (int64_t rows = 0; rows < 8; rows++)
        check_same(model, rows, "cpu", "cpu");
    td_module_destroy(model);
}

/* ---- Several inputs --------------------------------------------------------------------------------- */

static _Atomic int calls, rows_seen;

/* a * scale + b * weight, where all are on one device; weight [width] goes whole to each. */
static td_tensor *blend(td_module *module, td_tensor *const *inputs, int count)
{
    CHECK_EQ(count, 4);
    for (int i = 1; i < count; i++)
        CHECK_STR(td_device_name(td_tensor_device(inputs[i])),
                  td_device_name(td_tensor_device(inputs[0])));
    CHECK_STR(td_device_name(td_tensor_device(td_param(module, 0))),
              td_device_name(td_tensor_device(inputs[0])));
    CHECK_EQ(td_tensor_size(inputs[0], 0), td_tensor_size(inputs[1], 0));
    calls++;
    rows_seen += (int)td_tensor_size(inputs[0], 0);
    td_tensor *scaled = td_mul(td_mul(inputs[0], inputs[2]), td_param(module, 0));
    return td_add(scaled, td_mul(inputs[1], inputs[3]));
}

static const td_module_ops blend_ops = {.name = "Blend", .forward = blend};

static td_module *make_blend(void)
{
    td_module *module = td_module_create(&blend_ops);
    td_tensor *factor = td_full((int64_t[]){1}, 1, 2, TD_F32, NULL);
    td_module_add_parameter(module, "factor", factor);
    td_tensor_release(factor);
    return td_module_finish(module);
}

TEST(every_input_is_divided)
{
    td_module *alone = make_blend();
    td_module *model = td_data_parallel(make_blend(),
                                        &(td_data_parallel_options){.device_count = 3});
    CHECK(model != NULL);
    for (int64_t rows = 1; rows < 9; rows++) {
        TD_SCOPE;
        td_tensor *inputs[] = {numbers(rows, 5), numbers(rows, 5),
                               td_full(NULL, 0, 3, TD_F32, NULL),
                               td_randn((int64_t[]){1, 5}, 2, TD_F32, NULL)};
        if (rows % 2)
            inputs[1] = td_tensor_to(inputs[1], td_device_get("cpu:5"));
        td_tensor_set_requires_grad(inputs[0], true);
        calls = rows_seen = 0;
        td_tensor *result = td_forward_with(model, inputs, 4);
        CHECK(result != NULL);
        CHECK_EQ(calls, rows < 3 ? rows : (rows + (rows + 2) / 3 - 1) / ((rows + 2) / 3));
        CHECK_EQ(rows_seen, rows);
        CHECK_OK(td_backward(td_sum(result)));
        td_tensor *grad = td_clone(td_tensor_grad(inputs[0]));
        CHECK_OK(td_tensor_set_grad(inputs[0], NULL));
        inputs[1] = at_home(inputs[1]);
        td_tensor *expected = td_forward_with(alone, inputs, 4);
        CHECK(td_allclose(result, expected, 1e-6, 1e-6));
        CHECK_OK(td_backward(td_sum(expected)));
        CHECK(td_allclose(grad, td_tensor_grad(inputs[0]), 1e-6, 1e-6));
    }
    {
        TD_SCOPE;
        check_gradients(alone, model, "cpu");
    }
    td_module_destroy(model);
    td_module_destroy(alone);
}

TEST(inputs_without_a_batch_go_whole)
{
    td_module *model = td_data_parallel(make_blend(),
                                        &(td_data_parallel_options){.device_count = 2});
    {
        TD_SCOPE;
        /* The weight [5] has a first dimension, but another size than the batch. */
        td_tensor *inputs[] = {numbers(6, 5), numbers(6, 5), td_full(NULL, 0, 3, TD_F32, NULL),
                               td_randn((int64_t[]){5}, 1, TD_F32, NULL)};
        calls = 0;
        td_tensor *result = td_forward_with(model, inputs, 4);
        CHECK(result != NULL);
        CHECK_EQ(calls, 2);
        CHECK_EQ(td_tensor_size(result, 0), 6);
    }
    td_module_destroy(model);
}

static td_tensor *transposed(td_module *module, td_tensor *const *inputs, int count)
{
    (void)module, (void)count;
    calls++;
    CHECK_EQ(td_tensor_size(inputs[0], 0), 4);
    return td_square(inputs[0]);
}

static const td_module_ops transposed_ops = {.name = "Transposed", .forward = transposed};

TEST(along_another_dimension)
{
    for (int dim = -1; dim < 2; dim += 2) {
        td_module *model = td_data_parallel(
            td_module_finish(td_module_create(&transposed_ops)),
            &(td_data_parallel_options){.device_count = 2, .dim = dim});
        {
            TD_SCOPE;
            td_tensor *x = numbers(4, 6);
            calls = 0;
            CHECK(td_equal(td_forward(model, x), td_square(x)));
            CHECK_EQ(calls, 2);
        }
        td_module_destroy(model);
    }
}

/* ---- Results and buffers ---------------------------------------------------------------------------- */

static td_tensor *loss(td_module *module, td_tensor *const *inputs, int count)
{
    (void)module;
    CHECK_EQ(count, 2);
    return td_mse_loss(inputs[0], inputs[1]);
}

static const td_module_ops loss_ops = {.name = "Loss", .forward = loss};

TEST(losses_become_a_vector)
{
    for (int devices = 1; devices < 3; devices++) {
        td_module *model = td_data_parallel(
            td_module_finish(td_module_create(&loss_ops)),
            &(td_data_parallel_options){.device_ids = DEVICES,
                                        .device_count = devices,
                                        .output_device = td_device_get("cpu:2")});
        {
            TD_SCOPE;
            td_tensor *inputs[] = {numbers(6, 3), numbers(6, 3)};
            td_tensor *result = td_forward_with(model, inputs, 2);
            CHECK(result != NULL);
            CHECK_STR(td_device_name(td_tensor_device(result)), "cpu:2");
            CHECK_EQ(td_tensor_ndim(result), devices - 1);
            CHECK(td_allclose(at_home(td_mean(result)), td_mse_loss(inputs[0], inputs[1]), 1e-5,
                              1e-6));
        }
        td_module_destroy(model);
    }
}

/* The running statistics are those of the first device's part, wherever the module itself is. */
TEST(running_statistics_move)
{
    static const char *const places[] = {"cpu", "cpu:0", "cpu:5"};
    for (size_t i = 0; i < 3; i++) {
        td_module *model = td_data_parallel(td_batch_norm1d(3),
                                            &(td_data_parallel_options){.device_count = 2});
        td_module *alone = td_batch_norm1d(3);
        CHECK_OK(td_module_to(model, td_device_get(places[i])));
        {
            TD_SCOPE;
            td_tensor *x = numbers(8, 3);
            CHECK(td_forward(model, x) != NULL);
            CHECK(td_forward(alone, td_narrow(x, 0, 0, 4)) != NULL);
            td_tensor *mean = td_module_buffer(model, "module.running_mean");
            CHECK_STR(td_device_name(td_tensor_device(mean)), places[i]);
            CHECK(td_allclose(at_home(mean), td_module_buffer(alone, "running_mean"), 1e-6, 1e-7));
            CHECK_EQ(td_item(td_module_buffer(model, "module.num_batches_tracked")), 1);
        }
        td_module_destroy(model);
        td_module_destroy(alone);
    }
}

/* ---- What is refused -------------------------------------------------------------------------------- */

static void check_refused(const td_data_parallel_options *options, const char *part)
{
    CHECK(td_data_parallel(make_net(), options) == NULL);
    CHECK_EQ(td_last_status(), TD_ERR_INVALID);
    CHECK_CONTAINS(td_last_error(), part);
}

TEST(refused)
{
    check_refused(&(td_data_parallel_options){.device_ids = DEVICES}, "the number of device_ids");
    check_refused(&(td_data_parallel_options){.device_count = -1}, "device_count is -1");
    check_refused(&(td_data_parallel_options){.device_count = 1000},
                  "device_count is 1000, and there are 64 devices of the module's kind \"cpu\"");
    check_refused(&(td_data_parallel_options){.output_device = td_device_get("gpu")}, "\"gpu\"");
    check_refused(&(td_data_parallel_options){.device_ids = (td_device *[]){td_device_get("cpu:0"),
                                                                            td_device_get("cpu:x")},
                                              .device_count = 2},
                  "\"cpu:x\"");
    CHECK(td_data_parallel(NULL, NULL) == NULL);
}

TEST(a_failure_inside_is_reported)
{
    td_module *model = td_data_parallel(make_net(), NULL);
    {
        TD_SCOPE;
        CHECK(td_forward(model, numbers(4, 3)) == NULL);
        CHECK_EQ(td_last_status(), TD_ERR_INVALID);
        CHECK_CONTAINS(td_last_error(), "3");
        CHECK_STR(td_device_name(td_tensor_device(td_forward(model, numbers(4, 4)))), "cpu");
    }
    td_module_destroy(model);
}
