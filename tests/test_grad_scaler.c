/* Gradient scaling: the rule by which the scale changes, the stages of an iteration, states, and all ranks of DDP. */
#include "runner.h"

#include <tandem/tandem.h>

#include <math.h>
#include <stdio.h>
#include <string.h>

/* A leaf, which belongs to the caller. */
static td_tensor *parameter(const float *values, td_dtype dtype)
{
    td_tensor *p;
    {
        TD_SCOPE;
        p = td_tensor_retain(td_to_dtype(td_from_array(values, TD_SHAPE(4), TD_F32, NULL), dtype));
    }
    CHECK_OK(td_tensor_set_requires_grad(p, true));
    return p;
}

static void set_grad(td_tensor *p, const float *values)
{
    TD_SCOPE;
    td_tensor *grad = td_to_dtype(td_from_array(values, TD_SHAPE(4), TD_F32, NULL),
                                  td_tensor_dtype(p));
    CHECK_OK(td_tensor_set_grad(p, grad));
}

static float element(td_tensor *x, int64_t i)
{
    float value;
    {
        TD_SCOPE;
        value = (float)td_item(td_select(td_to_dtype(td_detach(x), TD_F64), 0, i));
    }
    return value;
}

/* ---- The scale -------------------------------------------------------------------------------------- */

TEST(the_defaults_are_those_of_pytorch)
{
    td_grad_scaler *scaler = td_grad_scaler_create(NULL);
    td_state *state = td_grad_scaler_state(scaler);
    double factor;
    int64_t steps;
    CHECK(td_grad_scaler_get_scale(scaler) == 65536);
    CHECK_OK(td_state_get_number(state, "growth_factor", &factor));
    CHECK(factor == 2);
    CHECK_OK(td_state_get_number(state, "backoff_factor", &factor));
    CHECK(factor == 0.5);
    CHECK_OK(td_state_get_integer(state, "growth_interval", &steps));
    CHECK_EQ(steps, 2000);
    CHECK_OK(td_state_get_integer(state, "growth_tracker", &steps));
    CHECK_EQ(steps, 0);
    td_state_destroy(state);
    td_grad_scaler_destroy(scaler);
    td_grad_scaler_destroy(NULL);
}

/* PyTorch's rule in three lines, with the scale as an f32 number. */
struct model {
    float scale;
    int good;
};

static void follow(struct model *model, bool found_inf, double growth, double backoff, int interval)
{
    if (found_inf)
        *model = (struct model){(float)(model->scale * backoff), 0};
    else if (++model->good == interval)
        *model = (struct model){(float)(model->scale * growth), 0};
}

TEST(the_scale_follows_the_rule)
{
    const td_grad_scaler_options options = {
        .init_scale = 1000, .growth_factor = 1.7, .backoff_factor = 0.3, .growth_interval = 3};
    td_grad_scaler *scaler = td_grad_scaler_create(&options);
    td_tensor *p = parameter((float[]){1, 2, 3, 4}, TD_F32);
    td_optimizer *sgd = td_sgd_of(&p, 1, &(td_sgd_options){.lr = 0.125});
    struct model model = {1000, 0};
    float expected = 2;
    unsigned random = 1;
    for (int step = 0; step < 60; step++) {
        random = random * 1103515245 + 12345;
        int kind = (int)(random >> 16) % 8; /* 0: infinity, 1: NaN */
        bool bad = kind < 2, stepped;
        float g = kind == 0 ? -INFINITY : kind == 1 ? NAN : 0.5f;
        float inverse = (float)(1 / (double)model.scale);
        set_grad(p, (float[]){0, g, 1, 1});
        CHECK_OK(td_grad_scaler_step(scaler, sgd, &stepped));
        CHECK_EQ(stepped, !bad);
        expected = bad ? expected : expected - 0.125f * (0.5f * inverse);
        CHECK(element(p, 1) == expected);
        CHECK_OK(td_grad_scaler_update(scaler, 0));
        follow(&model, bad, 1.7, 0.3, 3);
        CHECK(td_grad_scaler_get_scale(scaler) == model.scale);
    }
    td_optimizer_destroy(sgd);
    td_tensor_release(p);
    td_grad_scaler_destroy(scaler);
}

TEST(an_infinite_scale_is_not_reached)
{
    td_grad_scaler *scaler = td_grad_scaler_create(
        &(td_grad_scaler_options){.init_scale = 3e38, .growth_interval = 1});
    td_tensor *p = parameter((float[]){1, 2, 3, 4}, TD_F32);
    td_optimizer *sgd = td_sgd_of(&p, 1, &(td_sgd_options){.lr = 0.1});
    set_grad(p, (float[]){1, 1, 1, 1});
    CHECK_OK(td_grad_scaler_step(scaler, sgd, NULL));
    CHECK_OK(td_grad_scaler_update(scaler, 0));
    CHECK(td_grad_scaler_get_scale(scaler) == (double)3e38f);
    CHECK_OK(td_grad_scaler_update(scaler, 512));
    CHECK(td_grad_scaler_get_scale(scaler) == 512);
    CHECK_FAILS(td_grad_scaler_update(scaler, -1), TD_ERR_INVALID, "scale is -1");
    CHECK_FAILS(td_grad_scaler_update(scaler, 1e39), TD_ERR_INVALID, "finite in f32");
    td_optimizer_destroy(sgd);
    td_tensor_release(p);
    td_grad_scaler_destroy(scaler);
}

/* ---- Gradients -------------------------------------------------------------------------------------- */

TEST(gradients_of_all_dtypes_are_unscaled)
{
    static const td_dtype dtypes[] = {TD_F32, TD_F16, TD_BF16, TD_F64};
    td_grad_scaler *scaler = td_grad_scaler_create(&(td_grad_scaler_options){.init_scale = 256});
    for (int i = 0; i < 4; i++) {
        td_tensor *p = parameter((float[]){1, 1, 1, 1}, dtypes[i]),
                  *unused = parameter((float[4]){0}, TD_F32);
        td_optimizer *sgd = td_sgd_of(TD_TENSORS(p, unused), &(td_sgd_options){.lr = 1});
        bool stepped;
        set_grad(p, (float[]){256, -128, 64, 0});
        CHECK_OK(td_grad_scaler_unscale(scaler, sgd));
        CHECK_EQ(td_tensor_dtype(td_tensor_grad(p)), dtypes[i]);
        CHECK(element(td_tensor_grad(p), 0) == 1 && element(td_tensor_grad(p), 1) == -0.5f);
        CHECK_OK(td_grad_scaler_step(scaler, sgd, &stepped)); /* does not divide again */
        CHECK(stepped && element(p, 0) == 0 && element(p, 1) == 1.5f && element(p, 2) == 0.75f);
        CHECK_OK(td_grad_scaler_update(scaler, 256));
        set_grad(p, (float[]){1, 1, 1, INFINITY});
        CHECK_OK(td_grad_scaler_step(scaler, sgd, &stepped));
        CHECK(!stepped && element(p, 0) == 0);
        CHECK_OK(td_grad_scaler_update(scaler, 0));
        CHECK(td_grad_scaler_get_scale(scaler) == 128);
        CHECK_OK(td_grad_scaler_update(scaler, 256));
        td_optimizer_destroy(sgd);
        td_tensor_release(p);
        td_tensor_release(unused);
    }
    td_grad_scaler_destroy(scaler);
}

/* Infinite elements anywhere in a gradient that several threads share, and in one that is not contiguous. */
TEST(one_infinite_element_is_found)
{
    TD_SCOPE;
    td_grad_scaler *scaler = td_grad_scaler_create(NULL);
    td_tensor *p = td_zeros(TD_SHAPE(100, 1000), TD_F32, NULL);
    td_optimizer *sgd = td_sgd_of(&p, 1, &(td_sgd_options){.lr = 1});
    for (int i = 0; i < 6; i++) {
        td_tensor *grad = td_ones(TD_SHAPE(1000, 100), TD_F32, NULL);
        bool stepped, bad = i % 2;
        if (bad)
            CHECK_OK(td_fill_(td_narrow(td_f_flatten(grad, 0, -1), 0, i * 19999, 1),
                              i == 3 ? NAN : INFINITY));
        CHECK_OK(td_tensor_set_grad(p, i < 3 ? td_reshape(grad, TD_SHAPE(100, 1000))
                                             : td_transpose(grad, 0, 1)));
        CHECK_OK(td_grad_scaler_step(scaler, sgd, &stepped));
        CHECK_EQ(stepped, !bad);
        CHECK_OK(td_grad_scaler_update(scaler, 0));
    }
    td_optimizer_destroy(sgd);
    td_grad_scaler_destroy(scaler);
}

/* ---- Stages ----------------------------------------------------------------------------------------- */

TEST(stages_are_checked)
{
    td_grad_scaler *scaler = td_grad_scaler_create(NULL);
    td_tensor *p = parameter((float[]){1, 1, 1, 1}, TD_F32);
    td_optimizer *sgd = td_sgd_of(&p, 1, &(td_sgd_options){.lr = 1});
    set_grad(p, (float[]){1, 1, 1, 1});
    CHECK_FAILS(td_grad_scaler_update(scaler, 0), TD_ERR_STATE, "no gradients were checked");
    CHECK_OK(td_grad_scaler_unscale(scaler, sgd));
    CHECK_FAILS(td_grad_scaler_unscale(scaler, sgd), TD_ERR_STATE,
                "already, by td_grad_scaler_unscale()");
    CHECK_OK(td_grad_scaler_step(scaler, sgd, NULL));
    CHECK_FAILS(td_grad_scaler_step(scaler, sgd, NULL), TD_ERR_STATE, "already");
    CHECK_FAILS(td_grad_scaler_unscale(scaler, sgd), TD_ERR_STATE, "by td_grad_scaler_step()");
    CHECK_OK(td_grad_scaler_update(scaler, 0));
    CHECK_OK(td_grad_scaler_unscale(scaler, sgd));
    CHECK_FAILS(td_grad_scaler_unscale(NULL, sgd), TD_ERR_INVALID, "td_grad_scaler_unscale");
    CHECK_FAILS(td_grad_scaler_step(scaler, NULL, NULL), TD_ERR_INVALID, "td_grad_scaler_step");
    CHECK(isnan(td_grad_scaler_get_scale(NULL)));
    td_optimizer_destroy(sgd);
    td_tensor_release(p);
    td_grad_scaler_destroy(scaler);
}

/* Two optimizers: one skips its step, the other makes its own, and the scale is reduced. */
TEST(several_optimizers_share_a_scaler)
{
    td_grad_scaler *scaler = td_grad_scaler_create(&(td_grad_scaler_options){.init_scale = 2});
    td_tensor *p = parameter((float[]){1, 1, 1, 1}, TD_F32);
    td_tensor *q = parameter((float[]){1, 1, 1, 1}, TD_F32);
    td_optimizer *a = td_sgd_of(&p, 1, &(td_sgd_options){.lr = 1});
    td_optimizer *b = td_sgd_of(&q, 1, &(td_sgd_options){.lr = 1});
    bool a_stepped, b_stepped;
    set_grad(p, (float[]){2, 2, INFINITY, 2});
    set_grad(q, (float[]){1, 1, 1, 1});
    CHECK_OK(td_grad_scaler_step(scaler, a, &a_stepped));
    CHECK_OK(td_grad_scaler_step(scaler, b, &b_stepped));
    CHECK(!a_stepped && b_stepped);
    CHECK(element(p, 0) == 1 && element(q, 0) == 0.5f);
    CHECK_OK(td_grad_scaler_update(scaler, 0));
    CHECK(td_grad_scaler_get_scale(scaler) == 1);
    td_optimizer_destroy(a);
    td_optimizer_destroy(b);
    td_tensor_release(p);
    td_tensor_release(q);
    td_grad_scaler_destroy(scaler);
}

TEST(options_out_of_range_are_refused)
{
    static const td_grad_scaler_options wrong[] = {
        {.init_scale = -1},    {.init_scale = 1e39},    {.growth_factor = 1},
        {.growth_factor = -2}, {.backoff_factor = 1},   {.backoff_factor = TD_ZERO},
        {.init_scale = NAN},   {.growth_interval = -1}, {.reserved = {(void *)wrong}},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        CHECK(!td_grad_scaler_create(&wrong[i]));
        CHECK_CONTAINS(td_last_error(), "td_grad_scaler_create");
    }
}

/* ---- The loss --------------------------------------------------------------------------------------- */

TEST(losses_of_halves_become_f32)
{
    TD_SCOPE;
    td_grad_scaler *scaler = td_grad_scaler_create(&(td_grad_scaler_options){.init_scale = 60000});
    td_tensor *w = parameter((float[]){1, 2, 3, 4}, TD_F16);
    td_tensor *scaled = td_grad_scaler_scale(scaler, td_mean(w));
    CHECK_EQ(td_tensor_dtype(scaled), TD_F32);
    CHECK(td_item(scaled) == 60000 * 2.5);
    CHECK_OK(td_backward(scaled));
    CHECK(element(td_tensor_grad(w), 0) == 15000);
    CHECK(!td_grad_scaler_scale(scaler, NULL));
    td_grad_scaler_destroy(scaler);
    td_tensor_release(w);
}

/* What is 0 in f16 without a scale is found with one, and the scale falls until the gradients are finite. */
TEST(small_gradients_survive_f16)
{
    for (int scaling = 0; scaling < 2; scaling++) {
        TD_SCOPE;
        td_manual_seed(2);
        td_module *net = td_linear(8, 1);
        td_optimizer *sgd = td_sgd(net, &(td_sgd_options){.lr = 1e9});
        td_grad_scaler *scaler = td_grad_scaler_create(
            &(td_grad_scaler_options){.init_scale = 1e14, .disabled = !scaling});
        td_tensor *x = td_full(TD_SHAPE(4, 8), 1e-4, TD_F32, NULL), *weight = td_param(net, 0);
        td_tensor *before = td_clone(td_detach(weight));
        int skipped = 0;
        for (bool stepped = false; !stepped && skipped < 40; skipped += !stepped) {
            TD_SCOPE;
            td_tensor *loss;
            CHECK_OK(td_optimizer_zero_grad(sgd));
            {
                TD_AUTOCAST(td_device_kind(NULL), &(td_autocast_options){.dtype = TD_F16});
                loss = td_mul_scalar(td_sum(td_to_dtype(td_forward(net, x), TD_F32)), 1e-8);
            }
            CHECK_OK(td_backward(td_grad_scaler_scale(scaler, loss)));
            CHECK_OK(td_grad_scaler_step(scaler, sgd, &stepped));
            CHECK_OK(td_grad_scaler_update(scaler, 0));
        }
        CHECK_EQ(skipped > 0, scaling);
        CHECK_EQ(td_equal(td_detach(weight), before), !scaling);
        if (scaling) /* 4 rows of 1e-4 * 1e-8 */
            CHECK(fabs(element(td_reshape(td_tensor_grad(weight), TD_SHAPE(8)), 0) / 4e-12 - 1) <
                  0.01);
        td_grad_scaler_destroy(scaler);
        td_optimizer_destroy(sgd);
        td_module_destroy(net);
    }
}

/* ---- States ----------------------------------------------------------------------------------------- */

TEST(a_state_is_resumed)
{
    td_tensor *p = parameter((float[]){1, 1, 1, 1}, TD_F32);
    td_optimizer *sgd = td_sgd_of(&p, 1, &(td_sgd_options){.lr = 1});
    td_grad_scaler *scaler = td_grad_scaler_create(
        &(td_grad_scaler_options){.init_scale = 8, .growth_interval = 3, .growth_factor = 4});
    td_grad_scaler *other = td_grad_scaler_create(NULL);
    set_grad(p, (float[]){0, 0, 0, 0});
    for (int i = 0; i < 2; i++) {
        CHECK_OK(td_grad_scaler_step(scaler, sgd, NULL));
        CHECK_OK(td_grad_scaler_update(scaler, 0));
    }
    td_state *state = td_grad_scaler_state(scaler), *empty = td_state_create();
    CHECK_FAILS(td_grad_scaler_load_state(other, empty), TD_ERR_INVALID, "scale");
    CHECK(td_grad_scaler_get_scale(other) == 65536);
    CHECK_OK(td_grad_scaler_load_state(other, state));
    CHECK(td_grad_scaler_get_scale(other) == 8);
    CHECK_OK(td_grad_scaler_step(other, sgd, NULL));
    CHECK_OK(td_grad_scaler_update(other, 0)); /* the third one */
    CHECK(td_grad_scaler_get_scale(other) == 32);
    td_state_destroy(state);
    state = td_state_create();
    CHECK_OK(td_state_add_number(state, "scale", -1));
    CHECK_OK(td_state_add_number(state, "growth_factor", 2));
    CHECK_OK(td_state_add_number(state, "backoff_factor", 0.5));
    CHECK_OK(td_state_add_integer(state, "growth_interval", 2));
    CHECK_OK(td_state_add_integer(state, "growth_tracker", 0));
    CHECK_FAILS(td_grad_scaler_load_state(other, state), TD_ERR_INVALID, "scale is -1");
    CHECK(td_grad_scaler_get_scale(other) == 32);
    CHECK_FAILS(td_grad_scaler_load_state(other, NULL), TD_ERR_INVALID, "NULL");
    td_state_destroy(state);
    td_state_destroy(empty);
    td_grad_scaler_destroy(scaler);
    td_grad_scaler_destroy(other);
    td_optimizer_destroy(sgd);
    td_tensor_release(p);
}

TEST(checkpoints_have_the_scaler)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/checkpoint", td_test_temp_dir());
    td_grad_scaler *scaler = td_grad_scaler_create(&(td_grad_scaler_options){.init_scale = 32});
    td_training training = {.scaler = scaler, .step = 3};
    CHECK_OK(td_training_save(path, &training, NULL));
    CHECK_OK(td_grad_scaler_update(scaler, 64));
    training.step = 0;
    CHECK_OK(td_training_load(path, &training, NULL));
    CHECK_EQ(training.step, 3);
    CHECK(td_grad_scaler_get_scale(scaler) == 32);

    td_module *net = td_linear(2, 2), *other = td_linear(2, 3);
    CHECK_OK(td_training_save(path, &(td_training){.model = net}, NULL));
    CHECK_FAILS(td_training_load(path, &training, NULL), TD_ERR_INVALID, "without its scaler");
    training.model = net;
    CHECK_OK(td_training_save(path, &training, NULL));
    CHECK_OK(td_grad_scaler_update(scaler, 64));
    training.model = other;
    CHECK_FAILS(td_training_load(path, &training, NULL), TD_ERR_INVALID, "weight");
    CHECK(td_grad_scaler_get_scale(scaler) == 64);
    td_module_destroy(net);
    td_module_destroy(other);
    td_grad_scaler_destroy(scaler);
}

TEST(a_disabled_scaler_does_nothing)
{
    TD_SCOPE;
    td_grad_scaler *scaler = td_grad_scaler_create(&(td_grad_scaler_options){.disabled = true});
    td_tensor *p = parameter((float[]){1, 1, 1, 1}, TD_F32), *loss = td_sum(p);
    td_optimizer *sgd = td_sgd_of(&p, 1, &(td_sgd_options){.lr = 1});
    td_state *state = td_grad_scaler_state(scaler);
    bool stepped = false;
    CHECK(td_grad_scaler_scale(scaler, loss) == loss);
    CHECK(td_grad_scaler_get_scale(scaler) == 1);
    CHECK_EQ(td_state_count(state), 0);
    CHECK_OK(td_grad_scaler_load_state(scaler, state));
    set_grad(p, (float[]){1, INFINITY, 1, 1});
    CHECK_OK(td_grad_scaler_unscale(scaler, sgd));
    CHECK_OK(td_grad_scaler_step(scaler, sgd, &stepped));
    CHECK_OK(td_grad_scaler_update(scaler, 0));
    CHECK(stepped && element(p, 0) == 0 && isinf(element(p, 1)));
    td_state_destroy(state);
    td_optimizer_destroy(sgd);
    td_grad_scaler_destroy(scaler);
    td_tensor_release(p);
}

/* ---- DDP -------------------------------------------------------------------------------------------- */

/* Rank 1 has an infinite gradient in some steps: all ranks skip these, and stay equal. */
RANKS(all_ranks_skip_the_same_steps, .ranks = 3, .deadline_s = 60)
{
    CHECK_OK(td_init_process_group(NULL));
    int rank = td_get_rank(NULL);
    td_manual_seed(8);
    td_module *ddp = td_ddp(td_sequential(td_linear(4, 4), td_tanh(), td_linear(4, 1), NULL), NULL);
    td_optimizer *sgd = td_sgd(ddp, &(td_sgd_options){.lr = 0.1});
    td_grad_scaler *scaler = td_grad_scaler_create(
        &(td_grad_scaler_options){.init_scale = 1024, .growth_interval = 2});
    td_manual_seed(30 + (uint64_t)rank);
    for (int step = 0; step < 9; step++) {
        TD_SCOPE;
        bool stepped, bad = step % 3 == 1;
        CHECK_OK(td_optimizer_zero_grad(sgd));
        td_tensor *x = td_randn(TD_SHAPE(5, 4), TD_F32, NULL), *loss;
        {
            TD_AUTOCAST(td_device_kind(NULL), &(td_autocast_options){.dtype = TD_F16});
            loss = td_mean(td_to_dtype(td_forward(ddp, x), TD_F32));
        }
        loss = bad && rank == 1 ? td_mul_scalar(loss, INFINITY) : loss;
        CHECK_OK(td_backward(td_grad_scaler_scale(scaler, loss)));
        CHECK_OK(td_grad_scaler_step(scaler, sgd, &stepped));
        CHECK_EQ(stepped, !bad);
        CHECK_OK(td_grad_scaler_update(scaler, 0));
    }
    td_tensor *mine = td_from_array((double[]){td_grad_scaler_get_scale(scaler)}, TD_SHAPE(1),
                                    TD_F64, NULL);
    td_tensor *of_0 = td_clone(mine);
    CHECK_OK(td_broadcast(of_0, 0, NULL, NULL));
    CHECK(td_equal(mine, of_0));
    td_tensor_release(mine);
    td_tensor_release(of_0);
    td_state *parameters = td_module_parameters(ddp);
    for (int i = 0; i < td_state_count(parameters); i++) {
        TD_SCOPE;
        td_tensor *weight = td_detach(td_state_tensor(parameters, i)), *there = td_clone(weight);
        CHECK_OK(td_broadcast(there, 0, NULL, NULL));
        CHECK(td_equal(weight, there));
    }
    td_state_destroy(parameters);
    td_grad_scaler_destroy(scaler);
    td_optimizer_destroy(sgd);
    td_module_destroy(ddp);
    CHECK_OK(td_destroy_process_group());
}
