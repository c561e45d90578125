/* Data parallelism on the toy accelerator: DataParallel over all devices of a kind, communication hooks, gradient scaling,
 * SyncBatchNorm, steps that fail on one rank, divided states of optimizers and steps in the backward pass. */
#include "runner.h"
#include "toy_device.h"

#include <tandem/tandem.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { STEPS = 4, BATCH = 12, WIDTH = 16, CLASSES = 4 };

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
    return td_sequential(td_linear(WIDTH, 24), td_tanh(), td_linear(24, CLASSES), NULL);
}

static td_tensor *make_input(int seed)
{
    td_manual_seed((uint64_t)seed);
    return td_randn(TD_SHAPE(BATCH, WIDTH), TD_F32, host());
}

static td_tensor *here(td_tensor *tensor)
{
    return td_contiguous(td_tensor_to(td_detach(tensor), host()));
}

/* ---- DataParallel ----------------------------------------------------------------------------------- */

static void check_runs(td_module *model, td_device *device, bool first, bool second)
{
    TD_SCOPE;
    int64_t before[] = {toy_counts(0).kernels, toy_counts(1).kernels};
    td_tensor *y = td_forward(model, make_input(1));
    if (!y)
        FAIL("%s", td_last_error());
    CHECK(td_tensor_device(y) == device);
    td_module *alone = make_net();
    CHECK(td_allclose(here(y), td_forward(alone, make_input(1)), 1e-5, 1e-6));
    td_module_destroy(alone);
    CHECK_EQ(toy_counts(0).kernels > before[0], first);
    CHECK_EQ(toy_counts(1).kernels > before[1], second);
}

/* The devices follow the module, also when it moves later. */
TEST(data_parallel_runs_on_all_devices_of_the_kind)
{
    td_device *device = toy(0);
    td_module *model = td_data_parallel(make_net(), NULL);
    CHECK(model != NULL);
    check_runs(model, host(), false, false);
    CHECK_OK(td_module_to(model, device));
    check_runs(model, device, true, true);
    CHECK_OK(td_module_to(model, toy(1)));
    check_runs(model, toy(1), true, true);
    td_module *copy = td_module_clone(model);
    CHECK(copy != NULL);
    check_runs(copy, toy(1), true, true);
    td_module_destroy(copy);
    CHECK_OK(td_module_to(model, host()));
    CHECK_OK(td_device_synchronize(toy(0)));
    CHECK_OK(td_device_synchronize(toy(1)));
    check_runs(model, host(), false, false);
    td_module_destroy(model);
}

TEST(data_parallel_takes_so_many_devices)
{
    td_device *device = toy(0);
    td_module *net = make_net();
    CHECK_OK(td_module_to(net, device));
    td_module *model = td_data_parallel(net, &(td_data_parallel_options){.device_count = 1});
    check_runs(model, device, true, false);
    td_module_destroy(model);

    net = make_net();
    CHECK_OK(td_module_to(net, device));
    CHECK(!td_data_parallel(net, &(td_data_parallel_options){.device_count = 3}));
    CHECK_CONTAINS(td_last_error(),
                   "device_count is 3, and there are 2 devices of the module's kind \"toy\"");
    model = td_data_parallel(make_net(), &(td_data_parallel_options){.device_count = 3});
    CHECK(model != NULL);
    CHECK_OK(td_module_to(model, device));
    TD_SCOPE;
    CHECK(!td_forward(model, make_input(1)));
    CHECK_CONTAINS(td_last_error(), "there are 2 devices of the module's kind \"toy\"");
    td_module_destroy(model);
}

static void check_same_gradients(td_module *a, td_module *b, double rtol, double atol)
{
    td_state *x = td_module_parameters(a), *y = td_module_parameters(b);
    CHECK_EQ(td_state_count(x), td_state_count(y));
    for (int i = 0; i < td_state_count(x); i++) {
        TD_SCOPE;
        td_tensor *u = here(td_tensor_grad(td_state_tensor(x, i)));
        td_tensor *v = here(td_tensor_grad(td_state_tensor(y, i)));
        CHECK(u && v);
        if (!td_allclose(u, v, rtol, atol))
            FAIL("the gradients of %s differ", td_state_name(x, i));
    }
    td_state_destroy(x);
    td_state_destroy(y);
}

/* The replicas run in the dtype of the caller's scope, on workers. */
TEST(data_parallel_under_autocast)
{
    td_device *device = toy(0);
    td_module *alone = make_net(), *model = td_data_parallel(make_net(), NULL);
    CHECK_OK(td_module_to(model, device));
    for (int step = 0; step < STEPS; step++) {
        TD_SCOPE;
        td_tensor *x = make_input(step), *y, *z;
        {
            TD_AUTOCAST("cpu", &(td_autocast_options){.dtype = TD_F16});
            TD_AUTOCAST("toy", NULL);
            y = td_forward(alone, x);
            z = td_forward(model, x);
            CHECK_EQ(td_tensor_dtype(y), TD_F16);
            CHECK_EQ(td_tensor_dtype(z), TD_F16);
        }
        CHECK(td_allclose(td_to_dtype(y, TD_F32), td_to_dtype(here(z), TD_F32), 1e-2, 1e-3));
        CHECK_OK(td_backward(td_mean(td_square(td_to_dtype(y, TD_F32)))));
        CHECK_OK(td_backward(td_mean(td_square(td_to_dtype(z, TD_F32)))));
        CHECK_EQ(td_tensor_dtype(td_tensor_grad(td_module_parameter(model, "module.0.weight"))),
                 TD_F32);
        check_same_gradients(alone, model, 1e-2, 1e-3);
        CHECK_EQ(td_tensor_dtype(td_forward(model, x)), TD_F32);
    }
    td_module_destroy(alone);
    td_module_destroy(model);
}

/* The workers enqueue on the streams of the caller: on others they would read what was not written yet. */
TEST(data_parallel_on_other_streams)
{
    td_device *devices[] = {toy(0), toy(1)};
    td_module *alone = make_net(), *model = td_data_parallel(make_net(), NULL);
    CHECK_OK(td_module_to(model, devices[0]));
    td_stream *streams[] = {td_stream_create(devices[0], 0), td_stream_create(devices[1], 0)};
    for (int i = 0; i < 2; i++)
        CHECK_OK(td_device_synchronize(devices[i]));
    toy_set_delay(1000);
    for (int step = 0; step < STEPS; step++) {
        TD_SCOPE;
        TD_STREAM_SCOPE(streams[0]);
        TD_STREAM_SCOPE(streams[1]);
        td_tensor *x = make_input(step);
        td_tensor *y = td_forward(alone, x), *z = td_forward(model, td_tensor_to(x, devices[0]));
        CHECK(td_allclose(y, here(z), 1e-5, 1e-6));
        CHECK_OK(td_backward(td_sum(td_square(y))));
        CHECK_OK(td_backward(td_sum(td_square(z))));
        check_same_gradients(alone, model, 1e-4, 1e-5);
    }
    td_stream_release(streams[0]);
    td_stream_release(streams[1]);
    td_module_destroy(alone);
    td_module_destroy(model);
}

/* ---- Communication hooks ------------------------------------------------------------------------------- */

static void step_once(td_module *model, td_optimizer *optimizer, td_device *device, int seed,
                      double scale)
{
    TD_SCOPE;
    td_tensor *x = td_tensor_to(make_input(seed), device);
    CHECK_OK(td_optimizer_zero_grad(optimizer));
    CHECK_OK(td_backward(td_mul_scalar(td_mean(td_square(td_forward(model, x))), scale)));
    CHECK_OK(td_optimizer_step(optimizer));
}

static td_module *wrap(td_device *device, td_comm_hook hook)
{
    td_module *net = make_net();
    CHECK_OK(td_module_to(net, device));
    td_module *model = td_ddp(net, &(td_ddp_options){.hook = hook, .bucket_cap_mb = 0.001});
    if (!model)
        FAIL("%s", td_last_error());
    return model;
}

static void check_same_parameters(td_module *a, td_module *b, bool bits)
{
    td_state *x = td_module_state(a), *y = td_module_state(b);
    for (int i = 0; i < td_state_count(x); i++) {
        TD_SCOPE;
        td_tensor *u = here(td_state_tensor(x, i)), *v = here(td_state_tensor(y, i));
        if (bits)
            CHECK_MEM(td_tensor_data(u), td_tensor_data(v), td_tensor_nbytes(u));
        else
            CHECK(td_allclose(u, v, 1e-4, 1e-5));
    }
    td_state_destroy(x);
    td_state_destroy(y);
}

/* The same steps on both devices. */
static void check_hook(td_comm_hook host_hook, td_comm_hook toy_hook)
{
    td_device *device = toy(0);
    td_module *on_host = wrap(host(), host_hook), *on_toy = wrap(device, toy_hook);
    td_optimizer *a = td_sgd(on_host, &(td_sgd_options){.lr = 0.1}),
                 *b = td_sgd(on_toy, &(td_sgd_options){.lr = 0.1});
    for (int step = 0; step < STEPS; step++) {
        step_once(on_host, a, host(), step * 2 + td_test_rank(), 1);
        step_once(on_toy, b, device, step * 2 + td_test_rank(), 1);
    }
    check_same_parameters(on_host, on_toy, false);
    td_ddp_stats host_stats, toy_stats;
    CHECK_OK(td_ddp_get_stats(on_host, &host_stats));
    CHECK_OK(td_ddp_get_stats(on_toy, &toy_stats));
    CHECK_EQ(host_stats.bytes, toy_stats.bytes);
    td_optimizer_destroy(a);
    td_optimizer_destroy(b);
    td_module_destroy(on_host);
    td_module_destroy(on_toy);
}

RANKS(half_precision_hooks, .ranks = 2, .deadline_s = 60)
{
    CHECK_OK(td_init_process_group(NULL));
    check_hook(td_hook_fp16(), td_hook_fp16());
    check_hook(td_hook_bf16(), td_hook_bf16());
    check_hook(td_hook_all_reduce(), td_hook_all_reduce());
    CHECK_OK(td_destroy_process_group());
}

static void check_powersgd(const td_powersgd_options *options)
{
    td_powersgd *a = td_powersgd_create(options), *b = td_powersgd_create(options);
    int64_t norms = toy_kernel_runs("norm");
    check_hook(td_powersgd_hook(a), td_powersgd_hook(b));
    CHECK(toy_kernel_runs("norm") > norms); /* it was compressed there */
    td_powersgd_destroy(a);
    td_powersgd_destroy(b);
}

RANKS(powersgd_compresses_on_an_accelerator, .ranks = 2, .deadline_s = 60)
{
    CHECK_OK(td_init_process_group(NULL));
    toy(0);
    check_powersgd(&(td_powersgd_options){.start_step = 1});
    check_powersgd(&(td_powersgd_options){.start_step = -1, .rank = 3, .min_compression_rate = 1});
    check_powersgd(
        &(td_powersgd_options){.start_step = -1, .no_warm_start = true, .no_error_feedback = true});
    CHECK_OK(td_destroy_process_group());
}

/* Only the staged calls wait for the device, each once: those of P, of Q and of the vectors. */
RANKS(powersgd_does_not_wait, .ranks = 1)
{
    CHECK_OK(td_init_process_group(NULL));
    td_device *device = toy(0);
    td_powersgd *powersgd = td_powersgd_create(&(td_powersgd_options){
        .start_step = -1, .no_warm_start = true, .rank = 3, .min_compression_rate = 1});
    td_module *net = make_net();
    CHECK_OK(td_module_to(net, device));
    td_module *model = td_ddp(net, &(td_ddp_options){.hook = td_powersgd_hook(powersgd)});
    for (int step = 0; step < STEPS; step++) {
        TD_SCOPE;
        td_tensor *x = td_tensor_to(make_input(step), device);
        int64_t before = td_device_waits(device);
        CHECK_OK(td_backward(td_mean(td_square(td_forward(model, x)))));
        CHECK(td_device_waits(device) <= before + 3);
    }
    td_module_destroy(model);
    td_powersgd_destroy(powersgd);
    CHECK_OK(td_destroy_process_group());
}

/* An infinite gradient of one rank is seen by all, and does not come back with the error of later passes. */
RANKS(powersgd_forgets_an_infinite_gradient, .ranks = 2, .deadline_s = 60)
{
    CHECK_OK(td_init_process_group(NULL));
    td_device *devices[] = {host(), toy(0)};
    for (int d = 0; d < 2; d++) {
        td_powersgd *powersgd = td_powersgd_create(&(td_powersgd_options){.start_step = -1});
        td_module *model = wrap(devices[d], td_powersgd_hook(powersgd));
        for (int step = 0; step < STEPS; step++) {
            TD_SCOPE;
            td_tensor *x = td_tensor_to(make_input(step), devices[d]);
            double scale = step == 1 && td_test_rank() == 1 ? INFINITY : 1, norm;
            CHECK_OK(td_module_zero_grad(model));
            CHECK_OK(td_backward(td_mul_scalar(td_mean(td_square(td_forward(model, x))), scale)));
            CHECK_OK(td_clip_grad_norm_(model, 1e9, NULL, &norm));
            CHECK_EQ(isfinite(norm) != 0, step != 1);
        }
        td_module_destroy(model);
        td_powersgd_destroy(powersgd);
    }
    CHECK_OK(td_destroy_process_group());
}

/* ---- Gradient scaling ------------------------------------------------------------------------------------ */

/* The gradients of one rank overflow: all ranks have the average, which is not finite, and skip the step. */
RANKS(an_overflow_of_one_rank_skips_the_step_of_all, .ranks = 2, .deadline_s = 60)
{
    CHECK_OK(td_init_process_group(NULL));
    td_device *device = toy(0);
    td_module *model = wrap(device, (td_comm_hook){0});
    td_optimizer *adam = td_adam(model, NULL);
    td_grad_scaler *scaler = td_grad_scaler_create(&(td_grad_scaler_options){.init_scale = 1024});
    double scale = 1024;
    for (int step = 0; step < STEPS; step++) {
        TD_SCOPE;
        bool overflow = step == 1, stepped;
        td_module *before = td_module_clone(td_module_find(model, "module"));
        td_tensor *x = td_tensor_to(make_input(step * 2 + td_test_rank()), device), *loss;
        CHECK_OK(td_optimizer_zero_grad(adam));
        {
            TD_AUTOCAST("toy", NULL);
            loss = td_mean(td_square(td_to_dtype(td_forward(model, x), TD_F32)));
        }
        if (overflow && td_test_rank() == 1)
            loss = td_mul_scalar(loss, INFINITY);
        CHECK_OK(td_backward(td_grad_scaler_scale(scaler, loss)));
        CHECK_OK(td_grad_scaler_step(scaler, adam, &stepped));
        CHECK_OK(td_grad_scaler_update(scaler, 0));
        CHECK_EQ(stepped, !overflow);
        scale *= overflow ? 0.5 : 1;
        CHECK(td_grad_scaler_get_scale(scaler) == scale);
        if (overflow)
            check_same_parameters(before, td_module_find(model, "module"), true);
        td_module_destroy(before);
    }
    {
        TD_SCOPE;
        td_tensor *mine = here(td_module_parameter(model, "module.0.weight")),
                  *theirs = td_clone(mine);
        CHECK_OK(td_broadcast(theirs, 0, NULL, NULL));
        CHECK_MEM(td_tensor_data(mine), td_tensor_data(theirs), td_tensor_nbytes(mine));
    }
    td_grad_scaler_destroy(scaler);
    td_optimizer_destroy(adam);
    td_module_destroy(model);
    CHECK_OK(td_destroy_process_group());
}

/* ---- Failures ---------------------------------------------------------------------------------------------- */

/* A kernel of rank 0 fails in the backward pass. Rank 0 gets its error, rank 1 an error of the group, and neither
 * changes a parameter. */
static void check_failed_kernel(enum toy_when when)
{
    CHECK_OK(td_init_process_group(&(td_init_options){.timeout_ms = 2000}));
    td_device *device = toy(0);
    td_module *model = wrap(device, (td_comm_hook){0});
    td_optimizer *sgd = td_sgd(model, &(td_sgd_options){.lr = 0.1});
    step_once(model, sgd, device, td_test_rank(), 1);
    td_module *before = td_module_clone(td_module_find(model, "module"));
    CHECK_OK(td_device_synchronize(device));
    {
        TD_SCOPE;
        td_tensor *x = td_tensor_to(make_input(5 + td_test_rank()), device);
        CHECK_OK(td_optimizer_zero_grad(sgd));
        td_tensor *loss = td_mean(td_square(td_forward(model, x)));
        CHECK_OK(td_device_synchronize(device));
        if (td_test_rank() == 0)
            toy_fail_kernel(0, 4, when);
        td_status status = td_backward(loss);
        if (!status) /* gradients of an accelerator may fail later */
            status = td_optimizer_step(sgd);
        if (!status)
            status = td_device_synchronize(device);
        CHECK(status != TD_OK);
        CHECK_CONTAINS(td_last_error(), td_test_rank() ? "rank 0 (on " : "toy:0: ");
        CHECK_EQ(status, td_test_rank() ? TD_ERR_PEER : TD_ERR_SYSTEM);
        toy_clear_failure(0);
    }
    check_same_parameters(before, td_module_find(model, "module"), true);
    td_module_destroy(before);
    td_optimizer_destroy(sgd);
    td_module_destroy(model);
    td_destroy_process_group();
}

RANKS(a_kernel_that_fails_at_launch, .ranks = 2, .deadline_s = 60)
{
    check_failed_kernel(TOY_AT_LAUNCH);
}

RANKS(a_kernel_that_fails_later, .ranks = 2, .deadline_s = 60)
{
    check_failed_kernel(TOY_LATER);
}

/* ---- SyncBatchNorm ------------------------------------------------------------------------------------------- */

/* Batches of different sizes, one of them empty. */
RANKS(sync_batch_norm_has_the_numbers_of_the_host, .ranks = 3, .deadline_s = 60)
{
    CHECK_OK(td_init_process_group(NULL));
    td_device *device = toy(0);
    td_module *on_host = td_sync_batch_norm(5, NULL, NULL), *on_toy = td_module_clone(on_host);
    CHECK_OK(td_module_to(on_toy, device));
    for (int step = 0; step < STEPS; step++) {
        TD_SCOPE;
        int64_t batch = (td_test_rank() + step) % 3 * 4;
        td_manual_seed((uint64_t)(step * 3 + td_test_rank()));
        td_tensor *x = td_randn(TD_SHAPE(batch, 5, 2, 3), TD_F32, host());
        td_tensor *there = td_tensor_to(x, device);
        CHECK_OK(td_tensor_set_requires_grad(x, true));
        CHECK_OK(td_tensor_set_requires_grad(there, true));
        td_tensor *y = td_forward(on_host, x), *z = td_forward(on_toy, there);
        CHECK(y && z);
        CHECK_OK(td_backward(td_sum(td_mul(y, td_square(y)))));
        CHECK_OK(td_backward(td_sum(td_mul(z, td_square(z)))));
        CHECK(td_allclose(y, here(z), 1e-5, 1e-5));
        CHECK(td_allclose(td_tensor_grad(x), here(td_tensor_grad(there)), 1e-3, 1e-4));
        check_same_gradients(on_host, on_toy, 1e-3, 1e-4);
        check_same_parameters(on_host, on_toy, false); /* with the running statistics */
    }
    td_module_eval(on_host);
    td_module_eval(on_toy);
    TD_SCOPE;
    td_tensor *x = td_randn(TD_SHAPE(4, 5), TD_F32, host());
    CHECK(td_allclose(td_forward(on_host, x), here(td_forward(on_toy, td_tensor_to(x, device))),
                      1e-5, 1e-5));
    td_module_destroy(on_host);
    td_module_destroy(on_toy);
    CHECK_OK(td_destroy_process_group());
}

/* ---- Divided state, and steps in backward --------------------------------------------------------------- */

static td_optimizer *make_adam_of(td_tensor *const *parameters, int count, void *arg)
{
    (void)arg;
    return td_adam_of(parameters, count, &(td_adam_options){.lr = 0.01});
}

static void train_adam(td_module *model, td_optimizer *adam, int step)
{
    TD_SCOPE;
    td_device *device = toy(0);
    td_tensor *x = td_tensor_to(make_input(10 * step + td_get_rank(NULL)), device);
    CHECK_OK(td_optimizer_zero_grad(adam));
    CHECK_OK(td_backward(td_mean(td_square(td_forward(model, x)))));
    CHECK_OK(td_optimizer_step(adam));
}

static td_module *make_on_toy(void)
{
    td_module *net = make_net();
    CHECK_OK(td_module_to(net, toy(0)));
    net = td_ddp(net, &(td_ddp_options){.bucket_cap_mb = 0.0005});
    CHECK(net != NULL);
    return net;
}

RANKS(zero_and_steps_in_backward_have_the_bits, .ranks = 2, .deadline_s = 60)
{
    toy(0);
    CHECK_OK(td_init_process_group(NULL));
    td_module *models[] = {make_on_toy(), make_on_toy(), make_on_toy()};
    td_optimizer *adams[] = {td_adam(models[0], &(td_adam_options){.lr = 0.01}),
                             td_zero_optimizer(models[1], make_adam_of, NULL, NULL),
                             td_adam(models[2], &(td_adam_options){.lr = 0.01})};
    CHECK(adams[1] != NULL);
    CHECK_OK(td_optimizer_in_backward(models[2], adams[2]));
    for (int step = 0; step < STEPS; step++)
        for (int i = 0; i < 3; i++)
            train_adam(models[i], adams[i], step);
    td_state *expected = td_module_parameters(models[0]);
    for (int i = 1; i < 3; i++) {
        TD_SCOPE;
        td_state *parameters = td_module_parameters(models[i]);
        for (int k = 0; k < td_state_count(expected); k++) {
            td_tensor *one = here(td_state_tensor(expected, k));
            td_tensor *other = here(td_state_tensor(parameters, k));
            CHECK(!memcmp(td_tensor_data(one), td_tensor_data(other), td_tensor_nbytes(one)));
        }
        td_state_destroy(parameters);
    }
    td_state_destroy(expected);
    td_state *whole = td_zero_whole_state(adams[1]);
    CHECK_OK(td_optimizer_load_state(adams[0], whole));
    td_state_destroy(whole);
    for (int i = 0; i < 3; i++) {
        td_optimizer_destroy(adams[i]);
        td_module_destroy(models[i]);
    }
    CHECK_OK(td_destroy_process_group());
}
