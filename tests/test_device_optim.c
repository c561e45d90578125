/* Optimizers and clipping on an accelerator: the bits of the host's, all or nothing, and without waiting. */
#include "runner.h"
#include "toy_device.h"

#include <tandem/kernels.h>
#include <tandem/ops.h>
#include <tandem/optim.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

static td_device *toy(int index)
{
    CHECK_OK(toy_register());
    toy_set_delay(20);
    return td_device_get(index ? "toy:1" : "toy:0");
}

static td_device *cpu(void)
{
    return td_device_get("cpu");
}

/* A copy in host memory, in a scope. */
static td_tensor *read(td_tensor *tensor)
{
    td_tensor *copy = td_contiguous(td_tensor_to(td_detach(tensor), cpu()));
    CHECK(copy);
    return copy;
}

static void check_same(td_tensor *a, td_tensor *b)
{
    {
        TD_SCOPE;
        td_tensor *x = read(a), *y = read(b);
        CHECK_EQ(td_tensor_nbytes(x), td_tensor_nbytes(y));
        CHECK_MEM(td_tensor_data(x), td_tensor_data(y), td_tensor_nbytes(x));
    }
}

/* A reference to a new leaf. */
static td_tensor *leaf(td_tensor *values, td_device *device, bool transposed)
{
    td_tensor *tensor = NULL;
    {
        TD_SCOPE;
        td_tensor *there = td_clone(td_tensor_to(td_detach(values), device));
        tensor = td_tensor_retain(td_detach(transposed ? td_transpose(there, 0, 1) : there));
    }
    CHECK(tensor);
    CHECK_OK(td_tensor_set_requires_grad(tensor, true));
    return tensor;
}

static void set_grad(td_tensor *parameter, td_tensor *values, bool transposed)
{
    {
        TD_SCOPE;
        td_tensor *grad = td_clone(td_tensor_to(values, td_tensor_device(parameter)));
        CHECK_OK(td_tensor_set_grad(parameter, transposed ? td_transpose(grad, 0, 1) : grad));
    }
}

/* ---- The same bits ------------------------------------------------------------------------------ */

struct options {
    int kind; /* 0 SGD, 1 Adam, 2 AdamW */
    td_sgd_options sgd;
    td_adam_options adam;
};

static const struct options all_options[] = {
    {.sgd = {.lr = 0.1}},
    {.sgd = {.lr = 0.1, .weight_decay = 0.03, .maximize = true}},
    {.sgd = {.lr = 0.1, .momentum = 0.9, .dampening = 0.3, .weight_decay = 0.01}},
    {.sgd = {.lr = 0.1, .momentum = 0.9, .nesterov = true}},
    {.kind = 1, .adam = {.lr = 0.02}},
    {.kind = 1,
     .adam = {.lr = 0.02, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-5, .weight_decay = 0.1}},
    {.kind = 1, .adam = {.lr = 0.02, .amsgrad = true, .maximize = true}},
    {.kind = 2, .adam = {.lr = 0.02, .weight_decay = 0.3, .amsgrad = true}},
    {.kind = 2, .adam = {.lr = 0.02}},
};

static td_optimizer *make(const struct options *options, td_tensor **parameters, int count)
{
    td_optimizer *optimizer = options->kind == 0   ? td_sgd_of(parameters, count, &options->sgd)
                              : options->kind == 1 ? td_adam_of(parameters, count, &options->adam)
                                                   : td_adamw_of(parameters, count, &options->adam);
    CHECK(optimizer);
    return optimizer;
}

static void check_same_state(td_optimizer *a, td_optimizer *b)
{
    td_state *x = td_optimizer_state(a), *y = td_optimizer_state(b);
    CHECK_EQ(td_state_count(x), td_state_count(y));
    for (int i = 0; i < td_state_count(x); i++) {
        CHECK_STR(td_state_name(x, i), td_state_name(y, i));
        check_same(td_state_tensor(x, i), td_state_tensor(y, i));
    }
    td_state_destroy(x);
    td_state_destroy(y);
}

static void run_path(const struct options *options, td_dtype dtype, bool transposed)
{
    td_tensor *host[2], *there[2];
    for (int i = 0; i < 2; i++) {
        TD_SCOPE;
        td_tensor *values = td_randn(TD_SHAPE(7, 5 + i), dtype, cpu());
        host[i] = leaf(values, cpu(), transposed);
        there[i] = leaf(values, toy(0), transposed);
    }
    td_optimizer *a = make(options, host, 2), *b = make(options, there, 2);
    for (int step = 0; step < 3; step++) {
        for (int i = 0; i < 2; i++) {
            TD_SCOPE;
            td_tensor *grad = td_randn(TD_SHAPE(7, 5 + i), dtype, cpu());
            set_grad(host[i], grad, transposed);
            set_grad(there[i], grad, transposed);
        }
        CHECK_OK(td_optimizer_step(a));
        int64_t waits = td_device_waits(toy(0));
        CHECK_OK(td_optimizer_step(b));
        CHECK_EQ(td_device_waits(toy(0)), waits);
    }
    for (int i = 0; i < 2; i++)
        check_same(host[i], there[i]);
    check_same_state(a, b);
    td_optimizer_destroy(a);
    td_optimizer_destroy(b);
    for (int i = 0; i < 2; i++) {
        td_tensor_release(host[i]);
        td_tensor_release(there[i]);
    }
}

TEST(steps_have_the_bits_of_the_host)
{
    td_manual_seed(1);
    static const td_dtype dtypes[] = {TD_F32, TD_F64, TD_F16, TD_BF16};
    for (size_t i = 0; i < sizeof all_options / sizeof all_options[0]; i++)
        for (int d = 0; d < 4; d++)
            run_path(&all_options[i], dtypes[d], (i + (size_t)d) % 3 == 0);
}

TEST(one_kernel_for_all_parameters)
{
    td_tensor *parameters[5];
    for (int i = 0; i < 5; i++) {
        TD_SCOPE;
        td_tensor *values = td_randn(TD_SHAPE(4), TD_F32, cpu());
        parameters[i] = leaf(values, toy(0), false);
        set_grad(parameters[i], values, false);
    }
    td_optimizer *adam = td_adam_of(parameters, 5, NULL);
    CHECK_OK(td_optimizer_step(adam));
    CHECK_OK(td_device_synchronize(toy(0)));
    CHECK_EQ(toy_kernel_runs("adam"), 1);
    td_optimizer_destroy(adam);
    for (int i = 0; i < 5; i++)
        td_tensor_release(parameters[i]);
}

/* ---- States and missing kernels ------------------------------------------------------------------- */

TEST(a_state_of_the_host_is_loaded_to_the_device)
{
    TD_SCOPE;
    td_tensor *values = td_randn(TD_SHAPE(3, 4), TD_F32, cpu());
    td_tensor *grad = td_randn(TD_SHAPE(3, 4), TD_F32, cpu());
    td_tensor *host = leaf(values, cpu(), false);
    set_grad(host, grad, false);
    td_optimizer *a = td_adam_of(&host, 1, NULL);
    CHECK_OK(td_optimizer_step(a));
    td_tensor *there = leaf(host, toy(0), false);
    set_grad(there, grad, false);
    td_optimizer *b = td_adam_of(&there, 1, NULL);
    td_state *state = td_optimizer_state(a);
    CHECK_OK(td_optimizer_load_state(b, state));
    CHECK_OK(td_optimizer_step(a));
    CHECK_OK(td_optimizer_step(b));
    check_same(host, there);
    check_same_state(a, b);
    td_state *back = td_optimizer_state(b);
    CHECK_OK(td_optimizer_load_state(a, back));
    check_same_state(a, b);
    td_state_destroy(back);
    td_state_destroy(state);
    td_optimizer_destroy(a);
    td_optimizer_destroy(b);
    td_tensor_release(host);
    td_tensor_release(there);
}

TEST(a_missing_kernel_is_named_or_computed_on_the_host)
{
    TD_SCOPE;
    td_tensor *values = td_randn(TD_SHAPE(3, 4), TD_F32, cpu());
    td_tensor *there = leaf(values, toy(0), false), *host = leaf(values, cpu(), false);
    set_grad(there, values, false);
    set_grad(host, values, false);
    td_optimizer *a = td_adam_of(&host, 1, NULL), *b = td_adam_of(&there, 1, NULL);
    toy_set_missing("adam", true);
    setenv("TANDEM_FALLBACK", "cpu", 1); /* too late for a device that is open */
    CHECK_FAILS(td_optimizer_step(b), TD_ERR_UNSUPPORTED, "toy:0");
    CHECK_CONTAINS(td_last_error(), "adam");
    check_same(there, values);
    td_optimizer_destroy(b);
    td_tensor_release(there);
    there = leaf(values, toy(1), false);
    set_grad(there, values, false);
    b = td_adam_of(&there, 1, NULL);
    unsetenv("TANDEM_FALLBACK"); /* and this, too: toy:1 was opened with it */
    CHECK_OK(td_optimizer_step(b));
    toy_set_missing("adam", false);
    CHECK_OK(td_optimizer_step(a));
    check_same(there, host);
    check_same_state(a, b);
    td_optimizer_destroy(a);
    td_optimizer_destroy(b);
    td_tensor_release(host);
    td_tensor_release(there);
}

/* ---- All or nothing --------------------------------------------------------------------------------- */

enum { SEVERAL = 4 };

/* Parameters on both devices, one of them with other strides, and on the host; and a copy of all that a step changes. */
struct several {
    td_tensor *parameters[SEVERAL];
    td_optimizer *optimizer;
    td_tensor *before[SEVERAL];
    td_state *state;
};

static void keep(struct several *s)
{
    for (int i = 0; i < SEVERAL; i++) {
        td_tensor_release(s->before[i]);
        TD_SCOPE;
        s->before[i] = td_tensor_retain(td_clone(read(s->parameters[i])));
    }
    td_state_destroy(s->state);
    td_state *state = td_optimizer_state(s->optimizer);
    s->state = td_state_clone(state);
    td_state_destroy(state);
    CHECK(s->state);
}

static void check_unchanged(struct several *s)
{
    for (int i = 0; i < SEVERAL; i++)
        check_same(s->parameters[i], s->before[i]);
    td_state *state = td_optimizer_state(s->optimizer);
    CHECK_EQ(td_state_count(state), td_state_count(s->state));
    for (int i = 0; i < td_state_count(state); i++)
        check_same(td_state_tensor(state, i), td_state_tensor(s->state, i));
    td_state_destroy(state);
}

static struct several make_several(bool one_device, bool transposed)
{
    struct several s = {0};
    for (int i = 0; i < SEVERAL; i++) {
        TD_SCOPE;
        td_device *device = i == 3 ? cpu() : toy(!one_device && i == 2);
        td_tensor *values = td_randn(TD_SHAPE(6, 6), TD_F32, cpu());
        s.parameters[i] = leaf(values, device, transposed && i == 1);
        set_grad(s.parameters[i], values, transposed && i == 1);
    }
    s.optimizer = td_adam_of(s.parameters, SEVERAL, &(td_adam_options){.amsgrad = true});
    CHECK(s.optimizer);
    return s;
}

static void end_several(struct several *s)
{
    td_optimizer_destroy(s->optimizer);
    td_state_destroy(s->state);
    for (int i = 0; i < SEVERAL; i++) {
        td_tensor_release(s->parameters[i]);
        td_tensor_release(s->before[i]);
    }
}

/* Lets the kernel, or copy, number 1, 2, … of a step fail, until the step succeeds. */
static int fail_each(struct several *s, int device, void (*fail)(int, int, enum toy_when))
{
    for (int after = 1;; after++) {
        keep(s);
        fail(device, after, TOY_AT_LAUNCH);
        td_status status = td_optimizer_step(s->optimizer);
        fail(device, 0, TOY_AT_LAUNCH);
        if (!status)
            return after - 1;
        CHECK_CONTAINS(td_last_error(), "td_adam");
        check_unchanged(s);
        CHECK(after < 200);
    }
}

TEST(a_failed_kernel_leaves_everything_as_it_was, .deadline_s = 60)
{
    for (int one_device = 0; one_device < 2; one_device++) {
        struct several s = make_several(one_device, true);
        for (int step = 0; step < 2;
             step++) /* with new buffers, and with those of the first step */
            for (int device = 0; device < 2 - one_device; device++) {
                CHECK(fail_each(&s, device, toy_fail_kernel) >= 1);
                fail_each(&s, device, toy_fail_copy);
            }
        end_several(&s);
    }
}

TEST(a_failed_copy_of_a_step_on_the_host_leaves_everything_as_it_was, .deadline_s = 60)
{
    setenv("TANDEM_FALLBACK", "cpu", 1);
    for (int one_device = 0; one_device < 2; one_device++) {
        /* Without other strides on one device, no other copies are made than those of the fallback. */
        struct several s = make_several(one_device, !one_device);
        toy_set_missing("adam", true);
        for (int step = 0; step < 2; step++)
            for (int device = 0; device < 2 - one_device; device++) /* to the host and back */
                CHECK(fail_each(&s, device, toy_fail_copy) >= 2);
        toy_set_missing("adam", false);
        end_several(&s);
    }
}

TEST(without_memory_nothing_is_changed)
{
    toy_set_memory(8 << 20);
    TD_SCOPE;
    td_tensor *values = td_randn(TD_SHAPE(1 << 18), TD_F32, cpu());
    td_tensor *parameter = leaf(values, toy(0), false);
    set_grad(parameter, values, false);
    td_optimizer *adam = td_adam_of(&parameter, 1, NULL);
    td_tensor *hogs[64];
    int count = 0;
    while (count < 64 && (hogs[count] = td_empty(TD_SHAPE(1 << 16), TD_F32, toy(0))))
        count++;
    CHECK(count > 0 && count < 64);
    CHECK_FAILS(td_optimizer_step(adam), TD_ERR_NOMEM, "td_adam");
    check_same(parameter, values);
    td_state *state = td_optimizer_state(adam);
    CHECK(!td_state_get(state, "state.0.step") && !td_state_get(state, "state.0.exp_avg"));
    td_state_destroy(state);
    td_optimizer_destroy(adam);
    td_tensor_release(parameter);
}

/* ---- Clipping ----------------------------------------------------------------------------------------- */

enum { GRADS = 3 };

static void make_grads(td_tensor **parameters, td_device *device, td_device *last, td_dtype dtype)
{
    td_generator *generator = td_generator_create(4, cpu());
    for (int i = 0; i < GRADS; i++) {
        TD_SCOPE;
        td_tensor *values = td_empty(TD_SHAPE(5, 7 + i), dtype, cpu());
        CHECK_OK(td_normal_(values, 0, 1, generator));
        parameters[i] = leaf(values, i == GRADS - 1 ? last : device, i == 1);
        set_grad(parameters[i], values, i == 1);
    }
    td_generator_destroy(generator);
}

static void end_grads(td_tensor **parameters)
{
    for (int i = 0; i < GRADS; i++)
        td_tensor_release(parameters[i]);
}

TEST(clipping_has_the_bits_of_the_host_and_does_not_wait)
{
    static const td_dtype dtypes[] = {TD_F32, TD_F64, TD_BF16};
    static const double types[] = {2, 1, INFINITY, 3}, limits[] = {0.7, 1e6};
    for (int n = 0; n < 3 * 4 * 2; n++) {
        td_tensor *host[GRADS], *there[GRADS];
        make_grads(host, cpu(), cpu(), dtypes[n % 3]);
        make_grads(there, toy(0), toy(0), dtypes[n % 3]);
        td_clip_options options = {.norm_type = types[n / 3 % 4]};
        double limit = limits[n / 12];
        double expected = 0, norm = 0;
        CHECK_OK(td_clip_grad_norm_of_(host, GRADS, limit, &options, &expected));
        int64_t waits = td_device_waits(toy(0));
        CHECK_OK(td_clip_grad_norm_of_(there, GRADS, limit, &options, NULL));
        CHECK_EQ(td_device_waits(toy(0)), waits);
        for (int i = 0; i < GRADS; i++)
            check_same(td_tensor_grad(there[i]), td_tensor_grad(host[i]));
        end_grads(there);

        make_grads(there, toy(0), toy(0), dtypes[n % 3]);
        waits = td_device_waits(toy(0));
        CHECK_OK(td_clip_grad_norm_of_(there, GRADS, limit, &options, &norm));
        CHECK_EQ(td_device_waits(toy(0)), waits + 1);
        CHECK(norm == expected);
        for (int i = 0; i < GRADS; i++)
            check_same(td_tensor_grad(there[i]), td_tensor_grad(host[i]));
        end_grads(there);
        end_grads(host);
    }
}

TEST(clipping_over_several_devices)
{
    td_device *lasts[] = {toy(1), cpu()};
    for (int n = 0; n < 2; n++) {
        td_tensor *host[GRADS], *there[GRADS];
        make_grads(host, cpu(), cpu(), TD_F64);
        make_grads(there, toy(0), lasts[n], TD_F64);
        double expected, norm;
        CHECK_OK(td_clip_grad_norm_of_(host, GRADS, 0.7, NULL, &expected));
        int64_t waits = td_device_waits(toy(0)) + td_device_waits(toy(1));
        CHECK_OK(td_clip_grad_norm_of_(there, GRADS, 0.7, NULL, NULL));
        /* Only what the host itself scales needs the factor there. */
        CHECK_EQ(td_device_waits(toy(0)) + td_device_waits(toy(1)), waits + n);
        for (int i = 0; i < GRADS; i++)
            check_same(td_tensor_grad(there[i]), td_tensor_grad(host[i]));
        CHECK_OK(td_clip_grad_norm_of_(there, GRADS, 1e9, NULL, &norm));
        CHECK(fabs(norm - 0.7) < 1e-5);
        end_grads(there);
        end_grads(host);
    }
}

TEST(clipping_what_is_not_finite_on_a_device)
{
    td_tensor *there[GRADS];
    make_grads(there, toy(0), toy(0), TD_F32);
    td_clip_options options = {.error_if_nonfinite = true};
    CHECK_OK(td_clip_grad_value_of_(there, GRADS, 0.25));
    {
        TD_SCOPE;
        float most = 0;
        td_tensor *grad = read(td_tensor_grad(there[0]));
        for (int64_t i = 0; i < td_tensor_numel(grad); i++)
            most = fmaxf(most, fabsf(((float *)td_tensor_data(grad))[i]));
        CHECK(most == 0.25f);
        CHECK_OK(td_fill_(td_tensor_grad(there[1]), (double)INFINITY));
        CHECK_FAILS(td_clip_grad_norm_of_(there, GRADS, 1, &options, NULL), TD_ERR_INVALID, "inf");
        check_same(td_tensor_grad(there[0]), grad);
        CHECK_OK(td_clip_grad_norm_of_(there, GRADS, 1, NULL, NULL));
        CHECK(((float *)td_tensor_data(read(td_tensor_grad(there[0]))))[0] == 0);
        CHECK(isnan(((float *)td_tensor_data(read(td_tensor_grad(there[1]))))[0]));
    }
    end_grads(there);
}

/* ---- Gradient scaling ----------------------------------------------------------------------------------- */

static float unscaled(td_dtype dtype, double value, double factor, bool transposed)
{
    float result = 0;
    {
        TD_SCOPE;
        td_tensor *x = td_full(TD_SHAPE(3, 5), value, dtype, cpu());
        td_tensor *list[] = {td_full(TD_SHAPE(2), 1, TD_F32, cpu()),
                             transposed ? td_transpose(x, 0, 1) : x};
        td_tensor *found = td_zeros(TD_SHAPE(1), TD_F32, cpu());
        CHECK_OK(td_host_kernels()->unscale(list, 2, factor, found));
        CHECK(((float *)td_tensor_data(list[0]))[1] == (float)factor);
        result = *(float *)td_tensor_data(found);
    }
    return result;
}

TEST(unscaling_finds_what_is_not_finite)
{
    static const td_dtype dtypes[] = {TD_F32, TD_F64, TD_F16, TD_BF16};
    for (int d = 0; d < 4; d++)
        for (int transposed = 0; transposed < 2; transposed++) {
            CHECK(unscaled(dtypes[d], 2, 0.5, transposed) == 0);
            CHECK(unscaled(dtypes[d], (double)INFINITY, 0.5, transposed) == 1);
            CHECK(unscaled(dtypes[d], -(double)INFINITY, 0.5, transposed) == 1);
            CHECK(unscaled(dtypes[d], (double)NAN, 0.5, transposed) == 1);
        }
    CHECK(unscaled(TD_F16, 32768, 2, false) == 1); /* the product is infinite in f16 only */
    CHECK(unscaled(TD_F16, 32752, 2, false) == 0); /* 65504, the greatest */
    CHECK(unscaled(TD_F32, 32768, 2, false) == 0);
    CHECK(unscaled(TD_F32, 3e38, 2, false) == 1);
    CHECK(unscaled(TD_F64, 3e38, 2, false) == 0);
}
