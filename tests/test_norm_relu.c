/* Batch norm, a sum and a ReLU as one call: with the results, gradients and running statistics of the three one by one. */
#include "host_data.h"
#include "runner.h"

#include "tensor/fallback.h"

#include <tandem/tandem.h>

#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

enum { CHANNELS = 3, GRADS = 4 };

/* What a run leaves: the result, the statistics, and the gradients of x, residual, weight and bias (NULL where not needed). */
struct results {
    td_tensor *y, *mean, *var, *grads[GRADS];
};

static td_tensor *copy_of(td_tensor *tensor)
{
    return tensor ? td_clone(td_detach(tensor)) : NULL;
}

static struct results run(td_module *norm, td_tensor *x, td_tensor *residual, bool one_by_one)
{
    td_tensor *leaves[GRADS] = {x, residual, td_param(norm, 0), td_param(norm, 1)};
    struct results results = {0};
    td_module *own = td_module_clone(norm);
    CHECK(own);
    leaves[2] = td_param(own, 0), leaves[3] = td_param(own, 1);
    for (int i = 0; i < 2; i++)
        if (leaves[i])
            td_tensor_set_grad(leaves[i], NULL);
    for (int times = 0; times < 2; times++) { /* the second pass adds to the gradients */
        td_tensor *y;
        if (one_by_one) {
            y = td_forward(own, x);
            y = td_f_relu(residual ? td_add(y, residual) : y);
        } else {
            y = td_forward_add_relu(own, x, residual);
        }
        CHECK(y);
        results.y = y;
        if (td_tensor_requires_grad(y))
            CHECK(!td_backward(td_sum(td_mul(y, td_detach(td_add_scalar(y, -0.25))))));
    }
    results.mean = copy_of(td_buffer(own, 0));
    results.var = copy_of(td_buffer(own, 1));
    for (int i = 0; i < GRADS; i++)
        results.grads[i] = leaves[i] ? copy_of(td_tensor_grad(leaves[i])) : NULL;
    td_module_destroy(own);
    return results;
}

static bool same(td_tensor *a, td_tensor *b, double tolerance)
{
    if (!a || !b)
        return a == b;
    return td_tensor_dtype(a) == td_tensor_dtype(b) &&
           (tolerance > 0 ? td_allclose(a, b, tolerance, tolerance) : td_equal(a, b));
}

static void compare(td_module *norm, td_tensor *x, td_tensor *residual, double tolerance)
{
    TD_SCOPE;
    struct results expected = run(norm, x, residual, true), got = run(norm, x, residual, false);
    CHECK(same(got.y, expected.y, tolerance));
    CHECK(same(got.mean, expected.mean, tolerance));
    CHECK(same(got.var, expected.var, tolerance));
    for (int i = 0; i < GRADS; i++)
        CHECK(same(got.grads[i], expected.grads[i], tolerance));
}

static td_module *make_norm(bool training)
{
    td_manual_seed(3);
    td_module *norm = td_batch_norm2d(CHANNELS);
    CHECK(norm);
    for (int i = 0; i < 3; i++) {
        td_tensor *into = i < 2 ? td_detach(td_param(norm, i)) : td_buffer(norm, 0);
        td_tensor *values = td_add_scalar(td_randn(TD_SHAPE(CHANNELS), TD_F32, NULL), i == 0);
        CHECK(!td_tensor_copy(into, values));
    }
    td_module_train(norm, training);
    CHECK(!td_module_to(norm, td_current_device()));
    return norm;
}

static td_tensor *make_input(const int64_t shape[4], bool requires_grad)
{
    td_tensor *x = host_randn(shape, 4, TD_F32);
    td_tensor_set_requires_grad(x, requires_grad);
    return x;
}

/* Training has the same bits; in evaluation the gradients are those of statistics that were rounded otherwise. */
TEST(norm_relu_is_that_of_its_parts)
{
    static const int64_t shapes[][4] = {
        {4, CHANNELS, 5, 7}, {2, CHANNELS, 4, 4}, {9, CHANNELS, 1, 1}, {3, CHANNELS, 40, 40}};
    for (unsigned mode = 0; mode < 4 * 4; mode++) {
        TD_SCOPE;
        bool training = mode & 1, has_residual = mode & 2;
        td_module *norm = make_norm(training);
        td_tensor *x = make_input(shapes[mode / 4], true);
        td_tensor *residual = has_residual ? make_input(shapes[mode / 4], true) : NULL;
        compare(norm, x, residual, training ? 0 : 1e-5);
        td_module_destroy(norm);
    }
}

/* Whichever of x, the residual and the parameters need gradients. */
TEST(norm_relu_of_frozen_operands)
{
    static const int64_t shape[] = {4, CHANNELS, 4, 3};
    for (unsigned frozen = 0; frozen < 1u << GRADS; frozen++)
        for (int training = 0; training < 2; training++) {
            TD_SCOPE;
            td_module *norm = make_norm(training);
            for (int i = 0; i < 2; i++)
                td_tensor_set_requires_grad(td_param(norm, i), !(frozen >> i & 1));
            td_tensor *x = make_input(shape, !(frozen >> 2 & 1));
            td_tensor *residual = make_input(shape, !(frozen >> 3 & 1));
            compare(norm, x, residual, training ? 0 : 1e-5);
            compare(norm, x, NULL, training ? 0 : 1e-5);
            td_module_destroy(norm);
        }
}

TEST(norm_relu_without_affine_or_running_statistics)
{
    TD_SCOPE;
    static const int64_t shape[] = {4, CHANNELS, 4, 3};
    td_module *norm = td_batch_norm2d_with(
        CHANNELS, &(td_batch_norm_options){.no_affine = true, .no_running_stats = true});
    CHECK(norm && !td_module_to(norm, td_current_device()));
    for (int training = 0; training < 2; training++) {
        td_module_train(norm, training);
        td_tensor *x = make_input(shape, true), *residual = make_input(shape, true);
        td_tensor *y = td_forward_add_relu(norm, x, residual);
        CHECK(y && td_equal(y, td_f_relu(td_add(td_forward(norm, x), residual))));
        CHECK(!td_backward(td_sum(y)));
    }
    td_module_destroy(norm);
}

/* NaN stays NaN, and its gradient passes, as in td_f_relu(). */
TEST(norm_relu_keeps_nan)
{
    TD_SCOPE;
    td_module *norm = make_norm(false);
    td_tensor *x = host_randn(TD_SHAPE(1, CHANNELS, 2, 2), TD_F32);
    CHECK(!td_tensor_copy(td_narrow(x, 3, 0, 1),
                          td_full(TD_SHAPE(1, CHANNELS, 2, 1), NAN, TD_F32, NULL)));
    td_tensor_set_requires_grad(x, true);
    td_tensor *y = td_forward_add_relu(norm, x, NULL);
    CHECK(isnan(td_item(td_select(td_select(td_select(td_select(y, 0, 0), 0, 1), 0, 1), 0, 0))));
    CHECK(!td_backward(td_sum(y)));
    td_tensor *grad = td_select(
        td_select(td_select(td_select(td_tensor_grad(x), 0, 0), 0, 1), 0, 1), 0, 0);
    CHECK(td_item(grad) != 0);
    td_module_destroy(norm);
}

static atomic_int fused_calls;

static void count_fused(const char *slot, td_status status)
{
    if (!status && !strncmp(slot, "batch_norm_relu", strlen("batch_norm_relu")))
        atomic_fetch_add(&fused_calls, 1);
}

static td_status count_hook(td_module *module, td_tensor_list *inputs, void *arg)
{
    (void)module, (void)inputs;
    ++*(int *)arg;
    return TD_OK;
}

/* Returns how many calls of the fused kernels a forward and a backward pass of a Sequential make. */
static int fused_in(td_module *net, td_tensor *x)
{
    atomic_store(&fused_calls, 0);
    td__watch_kernels(count_fused);
    td_tensor *y = td_forward(net, x);
    CHECK(y && !td_backward(td_sum(y)));
    td__watch_kernels(NULL);
    return atomic_load(&fused_calls);
}

TEST(norm_relu_runs_as_one_in_a_sequential)
{
    TD_SCOPE;
    td_manual_seed(4);
    td_module *net = td_sequential(td_conv2d(2, CHANNELS, 3), td_batch_norm2d(CHANNELS), td_relu(),
                                   td_batch_norm2d(CHANNELS), td_gelu(), td_flatten(),
                                   td_batch_norm1d(CHANNELS * 16), td_relu(), NULL);
    CHECK(net && !td_module_to(net, td_current_device()));
    td_tensor *x = host_randn(TD_SHAPE(4, 2, 6, 6), TD_F32);
    bool has_kernels = strncmp(td_device_name(td_current_device()), "cuda", 4) == 0;
    CHECK_EQ(fused_in(net, x), has_kernels ? 4 : 0);

    td_module *twin = td_module_clone(net);
    td_tensor *y = x;
    for (int i = 0; i < 8; i++)
        y = td_forward(td_child(twin, i), y);
    CHECK(td_equal(td_forward(net, x), y));
    CHECK(td_equal(td_buffer(td_child(net, 1), 1), td_buffer(td_child(twin, 1), 1)));
    td_module_destroy(twin);
    td_module_destroy(net);
}

TEST(norm_relu_with_hooks_runs_them)
{
    int count = 0;
    const td_module_hooks hooks = {.forward_pre = count_hook, .arg = &count};
    for (int hooked = 1; hooked <= 2; hooked++) {
        TD_SCOPE;
        td_module *net = td_sequential(td_conv2d(2, CHANNELS, 3), td_batch_norm2d(CHANNELS),
                                       td_relu(), NULL);
        CHECK(net && !td_module_to(net, td_current_device()));
        CHECK(!td_module_add_hooks(td_child(net, hooked), &hooks, NULL));
        CHECK_EQ(fused_in(net, host_randn(TD_SHAPE(4, 2, 6, 6), TD_F32)), 0);
        CHECK_EQ(count, hooked);
        if (hooked == 1)
            CHECK(td_forward_add_relu(td_child(net, 1),
                                      host_randn(TD_SHAPE(2, CHANNELS, 4, 4), TD_F32), NULL));
        count = hooked;
        td_module_destroy(net);
    }
}

/* Any module may come before the sum and the ReLU. */
TEST(forward_add_relu_of_another_module)
{
    TD_SCOPE;
    td_module *linear = td_linear(4, 4);
    CHECK(linear && !td_module_to(linear, td_current_device()));
    td_tensor *x = host_randn(TD_SHAPE(3, 4), TD_F32);
    CHECK(td_equal(td_forward_add_relu(linear, x, x), td_f_relu(td_add(td_forward(linear, x), x))));
    CHECK(!td_forward_add_relu(NULL, x, NULL));
    CHECK(!td_forward_add_relu(linear, NULL, NULL));
    td_module_destroy(linear);
}

/* Halves are normalised as they are: the casts of autocast round once more than that. */
TEST(norm_relu_under_autocast)
{
    char kind[64];
    snprintf(kind, sizeof kind, "%s", td_device_name(td_current_device()));
    *strchrnul(kind, ':') = 0;
    for (int training = 0; training < 2; training++) {
        TD_SCOPE;
        static const int64_t shape[] = {4, CHANNELS, 6, 8};
        td_module *norm = make_norm(training);
        td_tensor *x = td_detach(td_to_dtype(make_input(shape, false), TD_BF16));
        td_tensor *residual = td_detach(td_to_dtype(make_input(shape, false), TD_BF16));
        td_tensor_set_requires_grad(x, true);
        td_tensor_set_requires_grad(residual, true);
        {
            TD_AUTOCAST(kind, &(td_autocast_options){.dtype = TD_BF16});
            compare(norm, x, residual, 5e-2);
            compare(norm, x, NULL, 5e-2);
        }
        CHECK(!td_forward_add_relu(norm, x,
                                   residual)); /* without autocast the dtypes must be the same */
        td_module_destroy(norm);
    }
}

TEST(norm_relu_refuses_what_its_parts_refuse)
{
    TD_SCOPE;
    td_module *norm = make_norm(true);
    CHECK(!td_forward_add_relu(norm, host_randn(TD_SHAPE(2, CHANNELS + 1, 4, 4), TD_F32), NULL));
    CHECK(strstr(td_last_error(), "BatchNorm2d"));
    CHECK(!td_forward_add_relu(norm, host_randn(TD_SHAPE(2, CHANNELS, 4), TD_F32), NULL));
    CHECK(!td_forward_add_relu(norm, host_randn(TD_SHAPE(1, CHANNELS, 1, 1), TD_F32), NULL));
    CHECK(strstr(td_last_error(), "td_batch_norm"));
    td_tensor *x = host_randn(TD_SHAPE(2, CHANNELS, 4, 4), TD_F32);
    CHECK(!td_forward_add_relu(norm, x, host_randn(TD_SHAPE(3, CHANNELS, 4, 4), TD_F32)));
    CHECK(strstr(td_last_error(), "td_add"));
    td_module_destroy(norm);
}
