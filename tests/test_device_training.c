/* Training on the toy accelerator: backward passes, DataParallel, model parallelism, DDP and checkpoints have the bits of
 * the host, and a step that fails leaves everything as it was. */
#include "runner.h"
#include "toy_device.h"

#include <tandem/tandem.h>

#include <math.h>

enum { STEPS = 5, BATCH = 12, WIDTH = 10, CLASSES = 4 };

static td_device *toy(int index)
{
    CHECK_OK(toy_register());
    toy_set_delay(20);
    return td_device_get(index ? "toy:1" : "toy:0");
}

static td_device *host(void)
{
    return td_device_get("cpu");
}

static td_module *make_net(void)
{
    td_manual_seed(3);
    return td_sequential(td_conv2d(1, 3, 3), td_batch_norm2d(3), td_relu(), td_max_pool2d(2),
                         td_flatten(), td_linear(3 * 4 * 4, WIDTH), td_gelu(), td_layer_norm(WIDTH),
                         td_linear(WIDTH, CLASSES), NULL);
}

static void make_batch(int step, td_device *device, td_tensor **x, td_tensor **y)
{
    td_manual_seed((uint64_t)(100 + step));
    *x = td_tensor_to(td_randn(TD_SHAPE(BATCH, 1, 10, 10), TD_F32, host()), device);
    *y = td_tensor_to(td_randint(0, CLASSES, TD_SHAPE(BATCH), TD_I64, host()), device);
}

static double train(td_module *model, td_optimizer *optimizer, td_device *device, int from,
                    int steps)
{
    double last = 0;
    for (int step = from; step < from + steps; step++) {
        TD_SCOPE;
        td_tensor *x, *y;
        make_batch(step, device, &x, &y);
        CHECK_OK(td_optimizer_zero_grad(optimizer));
        td_tensor *loss = td_cross_entropy(td_forward(model, x), y);
        CHECK(loss != NULL);
        CHECK_OK(td_backward(loss));
        CHECK_OK(td_clip_grad_norm_(model, 1, NULL, NULL));
        CHECK_OK(td_optimizer_step(optimizer));
        last = td_item(loss);
    }
    return last;
}

static void check_same_state(td_module *a, td_module *b)
{
    td_state *x = td_module_state(a), *y = td_module_state(b);
    CHECK(x && y);
    CHECK_EQ(td_state_count(x), td_state_count(y));
    for (int i = 0; i < td_state_count(x); i++) {
        TD_SCOPE;
        td_tensor *u = td_tensor_to(td_detach(td_state_tensor(x, i)), host());
        td_tensor *v = td_tensor_to(td_detach(td_state_tensor(y, i)), host());
        CHECK_EQ(td_tensor_nbytes(u), td_tensor_nbytes(v));
        CHECK_MEM(td_tensor_data(u), td_tensor_data(v), td_tensor_nbytes(u));
    }
    td_state_destroy(x);
    td_state_destroy(y);
}

TEST(training_has_the_bits_of_the_host)
{
    td_device *device = toy(0);
    td_module *here = make_net(), *there = make_net();
    CHECK_OK(td_module_to(there, device));
    td_optimizer *a = td_adam(here, NULL), *b = td_adam(there, NULL);
    for (int step = 0; step < STEPS; step++) {
        double x = train(here, a, host(), step, 1), y = train(there, b, device, step, 1);
        CHECK(x == y);
    }
    check_same_state(here, there);
    td_optimizer_destroy(a);
    td_optimizer_destroy(b);
    td_module_destroy(here);
    td_module_destroy(there);
}

/* Only td_item() waits: a step is enqueued as a whole. */
TEST(a_step_does_not_wait)
{
    td_device *device = toy(0);
    td_module *net = make_net();
    CHECK_OK(td_module_to(net, device));
    td_optimizer *sgd = td_sgd(net, &(td_sgd_options){.lr = 0.1, .momentum = 0.9});
    int64_t before = td_device_waits(device);
    train(net, sgd, device, 0, 3);
    CHECK_EQ(td_device_waits(device), before + 3);
    td_optimizer_destroy(sgd);
    td_module_destroy(net);
}

TEST(backward_on_another_stream)
{
    td_device *device = toy(0);
    td_module *net = make_net(), *plain = make_net();
    CHECK_OK(td_module_to(net, device));
    CHECK_OK(td_module_to(plain, device));
    td_optimizer *a = td_sgd(net, &(td_sgd_options){.lr = 0.1}),
                 *b = td_sgd(plain, &(td_sgd_options){.lr = 0.1});
    td_stream *side = td_stream_create(device, 0);
    CHECK_OK(td_stream_wait_stream(side, td_current_stream(device)));
    {
        TD_STREAM_SCOPE(side);
        train(net, a, device, 0, STEPS);
    }
    train(plain, b, device, 0, STEPS);
    CHECK_OK(td_device_synchronize(device));
    check_same_state(net, plain);
    td_stream_release(side);
    td_optimizer_destroy(a);
    td_optimizer_destroy(b);
    td_module_destroy(net);
    td_module_destroy(plain);
}

/* ---- Failures --------------------------------------------------------------------------------------- */

/* The first kernel, allocation or copy of a step that fails, then the second, and so on until a step succeeds: each
 * time parameters and state are as before. */
static void check_failures(void (*request)(int after), int stride)
{
    td_device *device = toy(0);
    toy_set_delay(0);
    td_module *net = make_net(), *same = make_net();
    CHECK_OK(td_module_to(net, device));
    CHECK_OK(td_module_to(same, device));
    td_optimizer *adam = td_adam(net, NULL), *other = td_adam(same, NULL);
    train(net, adam, device, 0, 1);
    train(same, other, device, 0, 1);
    bool done = false;
    int failures = 0;
    for (int after = 1; !done; after += stride) {
        td_status status = TD_OK;
        {
            TD_SCOPE;
            td_tensor *x, *y;
            make_batch(1, device, &x, &y);
            td_module_eval(net); /* running statistics are no parameters */
            CHECK_OK(td_optimizer_zero_grad(adam));
            CHECK_OK(td_device_synchronize(device));
            CHECK_OK(td_device_empty_cache(device));
            request(after);
            td_tensor *loss = td_cross_entropy(td_forward(net, x), y);
            status = loss ? td_backward(loss) : TD_ERR_STATE;
            if (!status)
                status = td_optimizer_step(adam);
            if (!status)
                status = td_device_synchronize(device);
            request(0);
            if (status)
                CHECK(*td_last_error());
            toy_clear_failure(0);
        }
        done = !status;
        failures += !done;
        if (!done)
            check_same_state(net, same);
    }
    CHECK(failures > 5);
    td_optimizer_destroy(adam);
    td_optimizer_destroy(other);
    td_module_destroy(net);
    td_module_destroy(same);
}

static void fail_at_launch(int after)
{
    toy_fail_kernel(0, after, TOY_AT_LAUNCH);
}

static void fail_later(int after)
{
    toy_fail_kernel(0, after, TOY_LATER);
}

static void fail_alloc(int after)
{
    toy_fail_alloc(0, after);
}

TEST(a_kernel_that_fails_leaves_the_parameters, .deadline_s = 60)
{
    check_failures(fail_at_launch, 3);
}

TEST(a_kernel_that_fails_later_leaves_the_parameters, .deadline_s = 60)
{
    check_failures(fail_later, 3);
}

/* An allocation that fails is tried again after the cache was emptied, so that a single failure does no harm. */
TEST(an_allocation_that_fails_is_tried_again)
{
    td_device *device = toy(0);
    TD_SCOPE;
    fail_alloc(1);
    td_tensor *x = td_zeros(TD_SHAPE(100), TD_F32, device);
    CHECK(x != NULL);
    CHECK_EQ(td_item(td_sum(x)), 0);
}

/* ---- Several devices ----------------------------------------------------------------------------------- */

TEST(data_parallel_over_two_accelerators)
{
    td_device *devices[] = {toy(0), toy(1)};
    td_manual_seed(3);
    td_module *alone = td_sequential(td_linear(WIDTH, 20), td_tanh(), td_linear(20, CLASSES), NULL);
    td_module *net = td_module_clone(alone);
    CHECK_OK(td_module_to(net, devices[0]));
    td_module *model = td_data_parallel(
        net, &(td_data_parallel_options){.device_ids = devices, .device_count = 2});
    CHECK(model != NULL);
    td_optimizer *a = td_sgd(alone, &(td_sgd_options){.lr = 0.1}),
                 *b = td_sgd(model, &(td_sgd_options){.lr = 0.1});
    for (int step = 0; step < STEPS; step++) {
        TD_SCOPE;
        td_tensor *x = td_randn(TD_SHAPE(BATCH, WIDTH), TD_F32, host());
        td_tensor *y = td_randint(0, CLASSES, TD_SHAPE(BATCH), TD_I64, host());
        CHECK_OK(td_optimizer_zero_grad(a));
        CHECK_OK(td_optimizer_zero_grad(b));
        td_tensor *loss = td_cross_entropy(td_forward(alone, x), y);
        td_tensor *output = td_forward(model, td_tensor_to(x, devices[0]));
        CHECK(output && td_tensor_device(output) == devices[0]);
        td_tensor *loss_there = td_cross_entropy(output, td_tensor_to(y, devices[0]));
        CHECK_OK(td_backward(loss));
        CHECK_OK(td_backward(loss_there));
        CHECK_OK(td_optimizer_step(a));
        CHECK_OK(td_optimizer_step(b));
        CHECK(fabs(td_item(loss) - td_item(loss_there)) < 1e-5);
    }
    CHECK(toy_counts(1).kernels > 0);
    td_optimizer_destroy(a);
    td_optimizer_destroy(b);
    td_module_destroy(alone);
    td_module_destroy(model);
}

TEST(a_model_over_two_accelerators)
{
    td_device *first = toy(0), *second = toy(1);
    td_manual_seed(4);
    td_module *one = td_linear(WIDTH, 20), *two = td_linear(20, CLASSES);
    td_module *one_there = td_module_clone(one), *two_there = td_module_clone(two);
    CHECK_OK(td_module_to(one_there, first));
    CHECK_OK(td_module_to(two_there, second));
    for (int step = 0; step < STEPS; step++) {
        TD_SCOPE;
        td_tensor *x = td_randn(TD_SHAPE(BATCH, WIDTH), TD_F32, host());
        td_tensor *y = td_sum(td_square(td_forward(two, td_f_relu(td_forward(one, x)))));
        td_tensor *middle = td_f_relu(td_forward(one_there, td_tensor_to(x, first)));
        td_tensor *y_there = td_sum(td_square(td_forward(two_there, td_tensor_to(middle, second))));
        CHECK_OK(td_backward(y));
        CHECK_OK(td_backward(y_there));
        CHECK_EQ(td_item(y), td_item(y_there));
        td_tensor *grad = td_tensor_grad(td_module_parameter(one, "weight"));
        td_tensor *grad_there = td_tensor_grad(td_module_parameter(one_there, "weight"));
        CHECK(td_equal(grad, td_tensor_to(grad_there, host())));
    }
    td_module_destroy(one);
    td_module_destroy(two);
    td_module_destroy(one_there);
    td_module_destroy(two_there);
}

/* ---- DDP -------------------------------------------------------------------------------------------------- */

/* Each rank trains on an accelerator of its own; the same on the host has the same bits. */
RANKS(ddp_has_the_bits_of_the_host, .ranks = 3, .deadline_s = 60)
{
    CHECK_OK(td_init_process_group(NULL));
    td_device *device = toy(0);
    td_module *net = make_net();
    CHECK_OK(td_module_to(net, device));
    td_module *there = td_ddp(
        net, &(td_ddp_options){.device_ids = &device, .device_count = 1, .bucket_cap_mb = 0.001});
    td_module *here = td_ddp(make_net(), &(td_ddp_options){.bucket_cap_mb = 0.001});
    CHECK(here && there);
    td_optimizer *a = td_adam(here, NULL), *b = td_adam(there, NULL);
    for (int step = 0; step < STEPS; step++) {
        int batch = step * 3 + td_test_rank();
        train(here, a, host(), batch, 1);
        train(there, b, device, batch, 1);
    }
    check_same_state(here, there);
    td_optimizer_destroy(a);
    td_optimizer_destroy(b);
    td_module_destroy(here);
    td_module_destroy(there);
    CHECK_OK(td_destroy_process_group());
}

RANKS(ddp_over_two_accelerators_with_sync_batch_norm, .ranks = 2, .deadline_s = 60)
{
    CHECK_OK(td_init_process_group(NULL));
    td_device *first = toy(0), *second = toy(1);
    td_manual_seed(8);
    td_module *one = td_sequential(td_linear(WIDTH, 16), td_sync_batch_norm(16, NULL, NULL), NULL);
    td_module *two = td_linear(16, CLASSES);
    td_module *plain = td_ddp(
        td_sequential(td_module_clone(one), td_relu(), td_module_clone(two), NULL), NULL);
    CHECK_OK(td_module_to(one, first));
    CHECK_OK(td_module_to(two, second));
    td_module *bottom = td_ddp(one, NULL),
              *top = td_ddp(two, &(td_ddp_options){.hook = td_hook_bf16()});
    CHECK(plain && bottom && top);
    for (int step = 0; step < STEPS; step++) {
        TD_SCOPE;
        td_manual_seed((uint64_t)(step * 10 + td_test_rank()));
        td_tensor *x = td_randn(TD_SHAPE(BATCH, WIDTH), TD_F32, host());
        td_tensor *y = td_forward(plain, x);
        td_tensor *middle = td_f_relu(td_forward(bottom, td_tensor_to(x, first)));
        td_tensor *y_there = td_forward(top, td_tensor_to(middle, second));
        CHECK(y && y_there);
        CHECK(td_allclose(y, td_tensor_to(y_there, host()), 1e-5, 1e-6));
        CHECK_OK(td_backward(td_sum(td_square(y))));
        CHECK_OK(td_backward(td_sum(td_square(y_there))));
        td_tensor *grad = td_tensor_grad(td_module_parameter(plain, "module.0.0.weight"));
        td_tensor *grad_there = td_tensor_grad(td_module_parameter(bottom, "module.0.weight"));
        CHECK(td_allclose(grad, td_tensor_to(grad_there, host()), 1e-4, 1e-5));
        grad = td_tensor_grad(td_module_parameter(plain, "module.2.weight"));
        grad_there = td_tensor_grad(td_module_parameter(top, "module.weight"));
        CHECK(td_allclose(grad, td_tensor_to(grad_there, host()), 0.02, 0.1)); /* bf16 */
        CHECK_OK(td_module_zero_grad(plain));
        CHECK_OK(td_module_zero_grad(bottom));
        CHECK_OK(td_module_zero_grad(top));
    }
    td_module_destroy(plain);
    td_module_destroy(bottom);
    td_module_destroy(top);
    CHECK_OK(td_destroy_process_group());
}
