/* td_optimizer_in_backward(): the same bits as backward and step, gradients that are freed on the way, and what is
 * refused. */
#include "runner.h"

#include "optim/optimizer.h"

#include <tandem/tandem.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SHAPE(...) TD_SHAPE(__VA_ARGS__)

enum { BATCH = 12, WIDTH = 20, CLASSES = 5, STEPS = 20, LAYERS = 4 };

/* ---- A network whose first layer is used twice, and whose last one may be unused ----------------------------- */

static td_tensor *net_forward(td_module *net, td_tensor *const *inputs, int count)
{
    (void)count;
    td_tensor *x = inputs[0];
    x = td_f_tanh(td_forward(td_child(net, 0), x));
    x = td_f_relu(td_forward(td_child(net, 0), x));
    x = td_f_relu(td_forward(td_child(net, 1), x));
    td_tensor *y = td_forward(td_child(net, 2), x);
    bool *extra = td_module_data(net);
    return *extra ? td_add(y, td_forward(td_child(net, 3), x)) : y;
}

static const td_module_ops net_ops = {
    .name = "Net", .data_size = sizeof(bool), .forward = net_forward};

static td_module *make_net(void)
{
    td_manual_seed(5);
    td_module *net = td_module_create(&net_ops);
    *(bool *)td_module_data(net) = true;
    td_module_add_child(net, "twice", td_linear(WIDTH, WIDTH));
    td_module_add_child(net, "wide", td_linear(WIDTH, 300));
    td_module_add_child(net, "out", td_linear(300, CLASSES));
    td_module_add_child(net, "extra", td_linear(300, CLASSES));
    return td_module_finish(net);
}

static void use_extra(td_module *net, bool extra)
{
    td_module *inner = td_module_find(net, "module");
    *(bool *)td_module_data(inner ? inner : net) = extra;
}

static td_tensor *loss_of(td_module *model, int step)
{
    int rank = td_get_rank(NULL);
    td_generator *generator = td_generator_create((uint64_t)(100 * step + rank + 1), NULL);
    td_tensor *x = td_empty(SHAPE(BATCH, WIDTH), TD_F32, NULL);
    td_tensor *y = td_empty(SHAPE(BATCH), TD_I64, NULL);
    CHECK_OK(td_normal_(x, 0, 1, generator));
    CHECK_OK(td_random_range_(y, 0, CLASSES, generator));
    td_generator_destroy(generator);
    return td_cross_entropy(td_forward(model, x), y);
}

/* Two groups with different rates. */
static td_optimizer *make_adam(td_module *model)
{
    td_state *parameters = td_module_parameters(model);
    td_tensor *list[2 * LAYERS];
    CHECK_EQ(td_state_count(parameters), 2 * LAYERS);
    for (int i = 0; i < 2 * LAYERS; i++)
        list[i] = td_state_tensor(parameters, i);
    td_optimizer *adam = td_adamw_of(list, 5, &(td_adam_options){.lr = 1e-2});
    CHECK_OK(td_optimizer_add_group(adam, list + 5, 3, &(td_parameter_group){.lr = 3e-3}));
    td_state_destroy(parameters);
    return adam;
}

static void check_same(td_module *a, td_module *b)
{
    td_state *mine = td_module_parameters(a), *others = td_module_parameters(b);
    for (int i = 0; i < td_state_count(mine); i++) {
        td_tensor *one = td_state_tensor(mine, i), *other = td_state_tensor(others, i);
        if (memcmp(td_tensor_data(one), td_tensor_data(other), td_tensor_nbytes(one))) {
            printf("%s differs\n", td_state_name(mine, i));
            CHECK(false);
        }
    }
    td_state_destroy(mine);
    td_state_destroy(others);
}

static void check_same_states(td_optimizer *a, td_optimizer *b)
{
    td_state *one = td_optimizer_state(a), *other = td_optimizer_state(b);
    CHECK_EQ(td_state_count(one), td_state_count(other));
    for (int i = 0; i < td_state_count(one); i++) {
        CHECK(!strcmp(td_state_name(one, i), td_state_name(other, i)));
        CHECK(!memcmp(td_tensor_data(td_state_tensor(one, i)),
                      td_tensor_data(td_state_tensor(other, i)),
                      td_tensor_nbytes(td_state_tensor(one, i))));
    }
    td_state_destroy(one);
    td_state_destroy(other);
}

static size_t grad_bytes(td_module *model)
{
    td_state *parameters = td_module_parameters(model);
    size_t bytes = 0;
    for (int i = 0; i < td_state_count(parameters); i++)
        bytes += td_tensor_nbytes(td_tensor_grad(td_state_tensor(parameters, i)));
    td_state_destroy(parameters);
    return bytes;
}

/* ---- Bits ------------------------------------------------------------------------------------------------ */

struct way {
    td_ddp_options ddp;
    bool plain;      /* without td_ddp() */
    bool accumulate; /* two passes without sync before each with it */
    bool drop_extra; /* every third pass does not use the last layer, or one rank does not */
};

static td_module *wrap(const struct way *way)
{
    return way->plain ? make_net() : td_ddp(make_net(), &way->ddp);
}

static void run_pass(td_module *model, const struct way *way, int step)
{
    TD_SCOPE;
    if (way->drop_extra)
        use_extra(model, !(step % 3 == 1 || (step % 3 == 2 && td_get_rank(NULL) == 0)));
    for (int i = 0; i < 2 && way->accumulate; i++) {
        TD_NO_SYNC(model);
        CHECK_OK(td_backward(loss_of(model, 1000 + 2 * step + i)));
        CHECK(grad_bytes(model) > 0);
    }
    CHECK_OK(td_backward(loss_of(model, step)));
}

static void follow(const struct way *way)
{
    td_module *expected = wrap(way), *model = wrap(way);
    td_optimizer *plain = make_adam(expected), *early = make_adam(model);
    CHECK_OK(td_optimizer_in_backward(model, early));
    td_schedule *plain_rates = td_cosine_schedule(plain, STEPS, 0);
    td_schedule *rates = td_cosine_schedule(early, STEPS, 0);
    for (int step = 0; step < STEPS; step++) {
        run_pass(expected, way, step);
        CHECK_OK(td_optimizer_step(plain));
        td_state *parameters = td_module_parameters(expected);
        for (int i = 0; i < 2 * LAYERS; i++) /* without a gradient, and not with one of 0 */
            CHECK_OK(td_tensor_set_grad(td_state_tensor(parameters, i), NULL));
        td_state_destroy(parameters);
        run_pass(model, way, step);
        CHECK_EQ(grad_bytes(model), 0);
        if (step % 2) /* which changes nothing */
            CHECK_OK(td_optimizer_step(early));
        CHECK_OK(td_optimizer_zero_grad(early));
        CHECK_OK(td_schedule_step(plain_rates));
        CHECK_OK(td_schedule_step(rates));
    }
    check_same(model, expected);
    check_same_states(early, plain);
    td_schedule_destroy(plain_rates);
    td_schedule_destroy(rates);
    td_optimizer_destroy(plain);
    td_module_destroy(expected);
    if (way->accumulate) {
        td_module_destroy(model);
        td_optimizer_destroy(early);
        return;
    }
    /* Without the optimizer everything is as before. */
    td_optimizer_destroy(early);
    run_pass(model, &(struct way){0}, 0);
    CHECK(grad_bytes(model) > 0);
    td_module_destroy(model);
}

TEST(a_module_has_the_bits)
{
    follow(&(struct way){.plain = true});
    follow(&(struct way){.plain = true, .drop_extra = true});
}

static void follow_all(void)
{
    CHECK_OK(td_init_process_group(NULL));
    follow(&(struct way){0});
    follow(&(struct way){.ddp.bucket_cap_mb = 0.0005});
    follow(&(struct way){.ddp.bucket_cap_mb = 0.0005, .accumulate = true});
    follow(&(struct way){.ddp = {.bucket_cap_mb = 0.0005, .find_unused_parameters = true},
                         .drop_extra = true});
    follow(&(struct way){.ddp = {.bucket_cap_mb = 0.0005, .static_graph = true}});
    follow(&(struct way){.ddp = {.bucket_cap_mb = 0.0005, .hook = td_hook_bf16()}});
    follow(&(struct way){.ddp = {.ignore = (const char *[]){"wide.weight"}, .ignore_count = 1}});
    CHECK_OK(td_destroy_process_group());
}

RANKS(one_rank_has_the_bits, .ranks = 1)
{
    follow_all();
}

RANKS(two_ranks_have_the_bits, .ranks = 2, .deadline_s = 60)
{
    follow_all();
}

RANKS(three_ranks_have_the_bits_over_tcp, .ranks = 3, .deadline_s = 60)
{
    setenv("TANDEM_TRANSPORT", "tcp", 1);
    follow_all();
}

RANKS(four_ranks_have_the_bits, .ranks = 4, .deadline_s = 60)
{
    follow_all();
}

RANKS(uneven_inputs_have_the_bits, .ranks = 3, .deadline_s = 60)
{
    CHECK_OK(td_init_process_group(NULL));
    td_module *models[2];
    for (int i = 0; i < 2; i++) {
        models[i] = td_ddp(make_net(), &(td_ddp_options){.bucket_cap_mb = 0.0005});
        td_optimizer *sgd = td_sgd(models[i], &(td_sgd_options){.lr = 0.1});
        if (i)
            CHECK_OK(td_optimizer_in_backward(models[i], sgd));
        CHECK_OK(td_ddp_join_begin(models[i], NULL));
        for (int step = 0; step < 2 + 2 * td_get_rank(NULL); step++) {
            TD_SCOPE;
            CHECK_OK(td_backward(loss_of(models[i], step)));
            CHECK_OK(td_optimizer_step(sgd));
            CHECK_OK(td_optimizer_zero_grad(sgd));
        }
        CHECK_OK(td_ddp_join_end(models[i]));
        td_optimizer_destroy(sgd);
    }
    check_same(models[0], models[1]);
    td_module_destroy(models[0]);
    td_module_destroy(models[1]);
    CHECK_OK(td_destroy_process_group());
}

/* ---- Memory ---------------------------------------------------------------------------------------------- */

struct peak {
    td_module *model;
    size_t bytes;
};

static td_status measure(td_tensor *tensor, void *arg)
{
    (void)tensor;
    struct peak *peak = arg;
    size_t bytes = grad_bytes(peak->model);
    peak->bytes = bytes > peak->bytes ? bytes : peak->bytes;
    return TD_OK;
}

static size_t peak_of(bool early)
{
    enum { DEEP = 12 };
    td_module *model = td_sequential(td_linear(64, 64), NULL);
    for (int i = 1; i < DEEP; i++)
        model = td_sequential(model, td_tanh(), td_linear(64, 64), NULL);
    struct peak peak = {.model = model};
    td_state *parameters = td_module_parameters(model);
    CHECK_EQ(td_state_count(parameters), 2 * DEEP);
    for (int i = 0; i < 2 * DEEP; i++)
        CHECK_OK(
            td_tensor_add_accumulated_hook(td_state_tensor(parameters, i), measure, &peak, NULL));
    td_optimizer *sgd = td_sgd(model, &(td_sgd_options){.lr = 0.1});
    if (early)
        CHECK_OK(td_optimizer_in_backward(model, sgd));
    for (int step = 0; step < 2; step++) {
        TD_SCOPE;
        CHECK_OK(td_backward(td_sum(td_forward(model, td_ones(SHAPE(8, 64), TD_F32, NULL)))));
        CHECK_OK(td_optimizer_step(sgd));
    }
    td_state_destroy(parameters);
    td_optimizer_destroy(sgd);
    td_module_destroy(model);
    return peak.bytes;
}

TEST(gradients_of_one_layer_are_in_memory)
{
    size_t layer = (64 * 64 + 64) * sizeof(float);
    CHECK_EQ(peak_of(false), 12 * layer);
    CHECK(peak_of(true) <= 2 * layer);
}

/* ---- Failures -------------------------------------------------------------------------------------------- */

static td_status fail_to_run(const td_optimizer *optimizer, const struct td__parameter_step *steps,
                             int count)
{
    (void)optimizer, (void)steps, (void)count;
    return TD_ERR_NOMEM;
}

TEST(a_failing_step_fails_the_pass)
{
    TD_SCOPE;
    td_module *model = make_net();
    td_optimizer *sgd = td_sgd(model, &(td_sgd_options){.lr = 0.1});
    CHECK_OK(td_optimizer_in_backward(model, sgd));
    const struct td__optimizer_kind *kind = sgd->kind;
    struct td__optimizer_kind failing = *kind;
    failing.run = fail_to_run;
    sgd->kind = &failing;
    CHECK(td_backward(loss_of(model, 0)) == TD_ERR_NOMEM);
    CHECK(strstr(td_last_error(), "the step of parameter \"out.") ||
          strstr(td_last_error(), "the step of parameter \"extra."));
    sgd->kind = kind;
    CHECK_OK(td_backward(loss_of(model, 0)));
    CHECK_EQ(grad_bytes(model), 0);
    td_optimizer_destroy(sgd);
    td_module_destroy(model);
}

static td_tensor *segment(td_tensor *const *inputs, int count, void *arg)
{
    (void)count;
    return td_f_tanh(td_forward(arg, inputs[0]));
}

TEST(weights_that_are_used_after_their_step_fail_the_pass)
{
    TD_SCOPE;
    td_module *model = td_linear(4, 4);
    td_optimizer *sgd = td_sgd(model, &(td_sgd_options){.lr = 0.1});
    CHECK_OK(td_optimizer_in_backward(model, sgd));
    td_tensor *weight = td_param(model, 0), *x = td_ones(SHAPE(2, 4), TD_F32, NULL);
    CHECK_OK(td_tensor_set_requires_grad(x, true));

    /* The step comes between two uses. */
    td_tensor *y = td_sum(td_matmul(td_matmul(x, td_detach(weight)), weight));
    CHECK(td_backward(y) == TD_ERR_STATE);

    /* One checkpointed segment is fine, two are not. */
    CHECK_OK(td_backward(td_sum(td_checkpoint(segment, model, &x, 1))));
    CHECK(!td_tensor_grad(weight));
    y = td_checkpoint(segment, model, &x, 1);
    y = td_checkpoint(segment, model, &y, 1);
    CHECK(td_backward(td_sum(y)) == TD_ERR_STATE);
    CHECK(strstr(td_last_error(), "got a second gradient"));
    CHECK_OK(td_backward(td_sum(td_forward(model, x))));
    CHECK(!td_tensor_grad(weight));
    td_module_destroy(model);
    td_optimizer_destroy(sgd);
}

RANKS(what_is_refused, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    TD_SCOPE;
    td_module *model = td_ddp(make_net(), NULL), *other = td_linear(2, 2);
    td_optimizer *sgd = td_sgd(model, &(td_sgd_options){.lr = 0.1});
    td_optimizer *second = td_sgd(model, &(td_sgd_options){.lr = 0.1});
    CHECK(td_optimizer_in_backward(NULL, sgd) == TD_ERR_INVALID);
    CHECK(td_optimizer_in_backward(other, sgd) == TD_ERR_INVALID);
    CHECK(strstr(td_last_error(), "is none of the module"));
    CHECK_OK(td_optimizer_in_backward(model, sgd));
    CHECK(td_optimizer_in_backward(model, sgd) == TD_ERR_STATE);
    CHECK(td_optimizer_in_backward(model, second) == TD_ERR_STATE);
    CHECK(strstr(td_last_error(), "stepped by another optimizer"));
    CHECK(td_optimizer_add_group(sgd, NULL, 0, NULL) == TD_ERR_STATE);
    td_grad_scaler *scaler = td_grad_scaler_create(NULL);
    CHECK_OK(td_backward(td_grad_scaler_scale(scaler, loss_of(model, 0))));
    CHECK(td_grad_scaler_step(scaler, sgd, NULL) == TD_ERR_STATE);
    td_grad_scaler_destroy(scaler);
    td_optimizer_destroy(sgd);
    CHECK_OK(td_optimizer_in_backward(model, second));
    CHECK_OK(td_backward(loss_of(model, 0)));
    CHECK_EQ(grad_bytes(model), 0);
    td_module_destroy(model);
    td_optimizer_destroy(second);
    td_module_destroy(other);
    CHECK_OK(td_destroy_process_group());
}
