/* td_zero_optimizer(): the same bits as the plain optimizer on every rank, for any number of ranks and any optimizer;
 * its state in memory, saved and loaded; what is refused. */
#include "runner.h"

#include "base/fail.h"
#include "optim/optimizer.h"

#include <tandem/tandem.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SHAPE(...) TD_SHAPE(__VA_ARGS__)

enum { BATCH = 12, WIDTH = 40, CLASSES = 5, STEPS = 50 };

static td_module *make_net(void)
{
    td_manual_seed(7);
    return td_sequential(td_linear(WIDTH, 129), td_tanh(), td_linear(129, 70), td_relu(),
                         td_linear(70, CLASSES), NULL);
}

/* ---- Optimizers ------------------------------------------------------------------------------------------ */

typedef td_optimizer *(*maker)(td_tensor *const *parameters, int count, void *arg);

static td_optimizer *make_sgd(td_tensor *const *parameters, int count, void *arg)
{
    (void)arg;
    return td_sgd_of(parameters, count, &(td_sgd_options){.lr = 0.05});
}

static td_optimizer *make_momentum(td_tensor *const *parameters, int count, void *arg)
{
    (void)arg;
    return td_sgd_of(
        parameters, count,
        &(td_sgd_options){.lr = 0.05, .momentum = 0.9, .nesterov = true, .weight_decay = 1e-3});
}

static td_optimizer *make_adam(td_tensor *const *parameters, int count, void *arg)
{
    (void)arg;
    return td_adam_of(parameters, count, &(td_adam_options){.lr = 1e-2, .amsgrad = true});
}

/* Two groups, of which the second has another learning rate. */
static td_optimizer *make_adamw(td_tensor *const *parameters, int count, void *arg)
{
    (void)arg;
    td_optimizer *optimizer = td_adamw_of(parameters, count - 2, &(td_adam_options){.lr = 1e-2});
    CHECK_OK(td_optimizer_add_group(optimizer, parameters + count - 2, 2,
                                    &(td_parameter_group){.lr = 3e-3}));
    return optimizer;
}

static td_optimizer *make_plain(td_module *module, maker make)
{
    td_state *parameters = td_module_parameters(module);
    td_tensor *list[32];
    int count = td_state_count(parameters);
    for (int i = 0; i < count; i++)
        list[i] = td_state_tensor(parameters, i);
    td_state_destroy(parameters);
    return make(list, count, NULL);
}

/* ---- Training -------------------------------------------------------------------------------------------- */

static td_tensor *loss_of(td_module *model, int step)
{
    int rank = td_get_rank(NULL);
    td_generator *generator = td_generator_create((uint64_t)(100 * step + rank), NULL);
    td_tensor *x = td_empty(SHAPE(BATCH, WIDTH), TD_F32, NULL);
    td_tensor *y = td_empty(SHAPE(BATCH), TD_I64, NULL);
    CHECK_OK(td_normal_(x, 0, 1, generator));
    CHECK_OK(td_random_range_(y, 0, CLASSES, generator));
    td_generator_destroy(generator);
    return td_cross_entropy(td_forward(model, x), y);
}

static double train(td_module *model, td_optimizer *optimizer, td_schedule *schedule, int step,
                    double max_norm)
{
    TD_SCOPE;
    double norm = 0;
    CHECK_OK(td_optimizer_zero_grad(optimizer));
    CHECK_OK(td_backward(loss_of(model, step)));
    if (max_norm > 0)
        CHECK_OK(td_clip_grad_norm_(model, max_norm, NULL, &norm));
    CHECK_OK(td_optimizer_step(optimizer));
    if (schedule)
        CHECK_OK(td_schedule_step(schedule));
    return norm;
}

static void check_same(td_module *a, td_module *b)
{
    td_state *mine = td_module_parameters(a), *others = td_module_parameters(b);
    CHECK_EQ(td_state_count(mine), td_state_count(others));
    for (int i = 0; i < td_state_count(mine); i++) {
        td_tensor *one = td_state_tensor(mine, i), *other = td_state_tensor(others, i);
        CHECK(!memcmp(td_tensor_data(one), td_tensor_data(other), td_tensor_nbytes(one)));
    }
    td_state_destroy(mine);
    td_state_destroy(others);
}

static void check_same_states(const td_state *a, const td_state *b)
{
    CHECK_EQ(td_state_count(a), td_state_count(b));
    for (int i = 0; i < td_state_count(a); i++) {
        CHECK(!strcmp(td_state_name(a, i), td_state_name(b, i)));
        td_tensor *one = td_state_tensor(a, i), *other = td_state_tensor(b, i);
        CHECK_EQ(td_tensor_nbytes(one), td_tensor_nbytes(other));
        CHECK(!memcmp(td_tensor_data(one), td_tensor_data(other), td_tensor_nbytes(one)));
    }
}

static size_t state_bytes(td_optimizer *optimizer)
{
    td_state *state = td_optimizer_state(optimizer);
    size_t bytes = 0;
    for (int i = 0; i < td_state_count(state); i++)
        if (td_tensor_ndim(td_state_tensor(state, i)) > 0)
            bytes += td_tensor_nbytes(td_state_tensor(state, i));
    td_state_destroy(state);
    return bytes;
}

static void follow_plain(maker make)
{
    td_module *expected = td_ddp(make_net(), NULL), *model = td_ddp(make_net(), NULL);
    td_optimizer *plain = make_plain(expected, make);
    td_optimizer *zero = td_zero_optimizer(model, make, NULL, NULL);
    CHECK(zero);
    td_schedule *plain_rates = td_exponential_schedule(plain, 0.97);
    td_schedule *rates = td_exponential_schedule(zero, 0.97);
    for (int step = 0; step < STEPS; step++) {
        double norm = train(expected, plain, plain_rates, step, 0.5);
        CHECK_EQ(train(model, zero, rates, step, 0.5), norm);
    }
    check_same(model, expected);
    size_t whole = state_bytes(plain), mine = state_bytes(zero);
    int size = td_get_world_size(NULL);
    CHECK(mine <= whole / (size_t)size + 3 * 2 * 4 * 1024);
    td_state *state = td_zero_whole_state(zero), *plain_state = td_optimizer_state(plain);
    check_same_states(state, plain_state);

    /* A plain optimizer goes on from the whole state, and a divided one from that of a plain one. */
    td_module *again = td_ddp(make_net(), NULL);
    td_optimizer *other = td_zero_optimizer(again, make, NULL, NULL);
    td_state *parameters = td_module_state(expected);
    CHECK_OK(td_module_load_state(again, parameters, true));
    CHECK_OK(td_optimizer_load_state(other, plain_state));
    CHECK_OK(td_optimizer_load_state(plain, state));
    td_state *shards = td_optimizer_state(zero);
    CHECK_OK(td_optimizer_load_state(zero, shards));
    td_state_destroy(shards);
    for (int step = 0; step < 3; step++) {
        train(expected, plain, NULL, step, 0);
        train(model, zero, NULL, step, 0);
        train(again, other, NULL, step, 0);
    }
    check_same(model, expected);
    check_same(again, expected);
    td_state_destroy(parameters);
    td_state_destroy(state);
    td_state_destroy(plain_state);
    td_schedule_destroy(plain_rates);
    td_schedule_destroy(rates);
    td_optimizer_destroy(plain);
    td_optimizer_destroy(zero);
    td_optimizer_destroy(other);
    td_module_destroy(expected);
    td_module_destroy(model);
    td_module_destroy(again);
}

static void follow_all(void)
{
    CHECK_OK(td_init_process_group(NULL));
    follow_plain(make_sgd);
    follow_plain(make_momentum);
    follow_plain(make_adam);
    follow_plain(make_adamw);
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

RANKS(three_ranks_have_the_bits, .ranks = 3, .deadline_s = 60)
{
    follow_all();
}

RANKS(four_ranks_have_the_bits_over_tcp, .ranks = 4, .deadline_s = 60)
{
    setenv("TANDEM_TRANSPORT", "tcp", 1);
    CHECK_OK(td_init_process_group(NULL));
    follow_plain(make_adamw);
    CHECK_OK(td_destroy_process_group());
}

/* ---- Parts ----------------------------------------------------------------------------------------------- */

static td_optimizer *make_some(td_tensor *const *parameters, int count, void *arg)
{
    td_tensor ***shares = arg;
    *shares = malloc((size_t)count * sizeof **shares);
    for (int i = 0; i < count; i++)
        (*shares)[i] = td_tensor_retain(parameters[i]);
    return td_adam_of(parameters, count - 1, NULL);
}

RANKS(shares_are_balanced_and_marked, .ranks = 4)
{
    CHECK_OK(td_init_process_group(NULL));
    td_module *net = td_sequential(td_linear(1024, 40), td_linear(3, 2), td_linear(100, 100), NULL);
    td_tensor **shares;
    td_optimizer *zero = td_zero_optimizer(net, make_some, &shares, NULL);
    CHECK(zero);
    td_state *parameters = td_module_parameters(net);
    int64_t total = 0, elements = 0;
    for (int i = 0; i < td_state_count(parameters); i++) {
        const td_shard *shard = td_tensor_shard(shares[i]);
        td_tensor *whole = td_state_tensor(parameters, i);
        CHECK(shard);
        CHECK_EQ(shard->ndim, td_tensor_ndim(whole));
        CHECK_EQ(shard->shape[0], td_tensor_size(whole, 0));
        int64_t mine = td_tensor_numel(shares[i]), sum = mine;
        CHECK(!mine || shard->offset % 1024 == 0);
        CHECK(!mine ||
              td_tensor_data(shares[i]) == (char *)td_tensor_data(whole) + 4 * shard->offset);
        CHECK_OK(td_group_all_reduce(&sum, &sum, 1, TD_I64, TD_SUM, NULL, NULL));
        CHECK_EQ(sum, td_tensor_numel(whole));
        total += sum;
        elements += mine;
    }
    CHECK(llabs(elements - total / 4) <= 1024);

    /* The norm of the shares' gradients is that of the whole ones. */
    for (int i = 0; i < td_state_count(parameters); i++) {
        TD_SCOPE;
        td_tensor *whole = td_state_tensor(parameters, i);
        td_manual_seed((uint64_t)i);
        td_tensor *grad = td_randn(td_tensor_shape(whole), td_tensor_ndim(whole), TD_F32, NULL);
        CHECK_OK(td_tensor_set_grad(whole, grad));
        td_tensor *flat = td_reshape(grad, SHAPE(td_tensor_numel(whole)));
        CHECK_OK(
            td_tensor_set_grad(shares[i], td_narrow(flat, 0, td_tensor_shard(shares[i])->offset,
                                                    td_tensor_numel(shares[i]))));
    }
    double norm, expected;
    int count = td_state_count(parameters) - 1; /* the last one is not in the optimizer */
    CHECK(td_clip_grad_norm_of_(shares, count + 1, 1e9, NULL, &norm) == TD_ERR_STATE);
    CHECK_OK(td_clip_grad_norm_of_(shares, count, 1e9, NULL, &norm));
    CHECK_OK(td_tensor_set_grad(td_state_tensor(parameters, count), NULL));
    CHECK_OK(td_clip_grad_norm_(net, 1e9, NULL, &expected));
    CHECK_EQ(norm, expected);
    CHECK_OK(td_destroy_process_group());
    td_optimizer_destroy(zero);
    CHECK(td_clip_grad_norm_of_(shares, 1, 1, NULL, NULL) == TD_ERR_STATE);
    for (int i = 0; i < td_state_count(parameters); i++)
        td_tensor_release(shares[i]);
    free(shares);
    td_state_destroy(parameters);
    td_module_destroy(net);
}

RANKS(groups_are_added_whole, .ranks = 3)
{
    CHECK_OK(td_init_process_group(NULL));
    td_tensor *tensors[2][2];
    td_optimizer *optimizers[2];
    for (int i = 0; i < 2; i++) {
        td_module *empty = td_relu();
        td_manual_seed(3);
        optimizers[i] = i ? td_zero_optimizer(empty, make_adam, NULL, NULL)
                          : make_adam(NULL, 0, NULL);
        CHECK(optimizers[i]);
        td_module_destroy(empty);
        tensors[i][0] = td_randn(SHAPE(70, 90), TD_F32, NULL);
        tensors[i][1] = td_randn(SHAPE(1, 1), TD_F64, NULL);
        for (int k = 0; k < 2; k++)
            CHECK_OK(td_tensor_set_requires_grad(tensors[i][k], true));
        CHECK_OK(
            td_optimizer_add_group(optimizers[i], tensors[i], 2, &(td_parameter_group){.lr = 0.1}));
        CHECK(td_optimizer_add_group(optimizers[i], tensors[i], 1, NULL) == TD_ERR_INVALID);
        for (int step = 0; step < 4; step++) {
            TD_SCOPE;
            CHECK_OK(td_backward(td_sum(td_mul(tensors[i][0], tensors[i][0]))));
            if (step) /* without a gradient at first */
                CHECK_OK(td_backward(td_sum(td_exp(tensors[i][1]))));
            CHECK_OK(td_optimizer_step(optimizers[i]));
            CHECK_OK(td_optimizer_zero_grad(optimizers[i]));
        }
    }
    for (int k = 0; k < 2; k++)
        CHECK(!memcmp(td_tensor_data(tensors[0][k]), td_tensor_data(tensors[1][k]),
                      td_tensor_nbytes(tensors[0][k])));
    for (int i = 0; i < 2; i++) {
        td_optimizer_destroy(optimizers[i]);
        td_tensor_release(tensors[i][0]);
        td_tensor_release(tensors[i][1]);
    }
    CHECK_OK(td_destroy_process_group());
}

/* More than a buffer: the parameters are gathered in several rounds. */
RANKS(large_parameters_are_gathered_in_rounds, .ranks = 3, .deadline_s = 60)
{
    CHECK_OK(td_init_process_group(NULL));
    td_module *models[2];
    for (int i = 0; i < 2; i++) {
        td_manual_seed(9);
        models[i] = td_sequential(td_linear(100, 3), td_linear(3001, 2003), td_linear(7, 5), NULL);
        td_optimizer *sgd = i ? td_zero_optimizer(models[i], make_momentum, NULL, NULL)
                              : make_plain(models[i], make_momentum);
        td_state *parameters = td_module_parameters(models[i]);
        for (int k = 0; k < td_state_count(parameters); k++) {
            TD_SCOPE;
            td_tensor *parameter = td_state_tensor(parameters, k);
            CHECK_OK(td_tensor_set_grad(parameter, td_clone(td_detach(parameter))));
        }
        CHECK_OK(td_optimizer_step(sgd));
        td_state_destroy(parameters);
        td_optimizer_destroy(sgd);
    }
    check_same(models[0], models[1]);
    td_module_destroy(models[0]);
    td_module_destroy(models[1]);
    CHECK_OK(td_destroy_process_group());
}

/* A share of one rank overflows: all skip the step. */
RANKS(a_scaler_skips_on_all_ranks, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    td_module *model = td_ddp(make_net(), NULL);
    td_module *expected = td_ddp(make_net(), NULL);
    td_optimizer *optimizers[2] = {td_zero_optimizer(model, make_adamw, NULL, NULL),
                                   make_plain(expected, make_adamw)};
    td_module *models[2] = {model, expected};
    for (int i = 0; i < 2; i++) {
        td_grad_scaler *scaler = td_grad_scaler_create(NULL);
        for (int step = 0; step < 6; step++) {
            TD_SCOPE;
            bool stepped;
            td_state *parameters = td_module_parameters(models[i]);
            CHECK_OK(td_optimizer_zero_grad(optimizers[i]));
            CHECK_OK(td_backward(td_grad_scaler_scale(scaler, loss_of(models[i], step))));
            if (step == 2)
                CHECK_OK(td_fill_(td_tensor_grad(td_state_tensor(parameters, 5)), INFINITY));
            CHECK_OK(td_grad_scaler_unscale(scaler, optimizers[i]));
            CHECK_OK(td_clip_grad_norm_(models[i], 0.1, NULL, NULL));
            CHECK_OK(td_grad_scaler_step(scaler, optimizers[i], &stepped));
            CHECK_EQ(stepped, step != 2);
            CHECK_OK(td_grad_scaler_update(scaler, 0));
            td_state_destroy(parameters);
        }
        td_grad_scaler_destroy(scaler);
    }
    check_same(model, expected);
    for (int i = 0; i < 2; i++) {
        td_optimizer_destroy(optimizers[i]);
        td_module_destroy(models[i]);
    }
    CHECK_OK(td_destroy_process_group());
}

/* ---- Failures -------------------------------------------------------------------------------------------- */

static td_optimizer *make_on_one(td_tensor *const *parameters, int count, void *arg)
{
    (void)arg;
    return td_get_rank(NULL) == 1 ? td_sgd_of(parameters, count, NULL)
                                  : make_sgd(parameters, count, NULL);
}

static td_optimizer *make_of_others(td_tensor *const *parameters, int count, void *arg)
{
    (void)parameters, (void)count;
    return make_plain(arg, make_sgd);
}

RANKS(failures_name_rank_and_parameter, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    int rank = td_get_rank(NULL);
    td_module *model = td_ddp(make_net(), NULL);
    CHECK(!td_zero_optimizer(NULL, make_sgd, NULL, NULL));
    CHECK(!td_zero_optimizer(model, make_on_one, NULL, NULL));
    CHECK(strstr(td_last_error(), rank == 1 ? "learning rate" : "has failed on rank 1"));
    CHECK(!td_zero_optimizer(model, make_of_others, model, NULL));
    CHECK(strstr(td_last_error(), "none of those"));
    td_module *different = td_linear(3, rank + 1);
    CHECK(!td_zero_optimizer(different, make_sgd, NULL, NULL));
    CHECK(strstr(td_last_error(), "weight"));
    td_module_destroy(different);

    td_optimizer *zero = td_zero_optimizer(model, make_adam, NULL, NULL);
    td_module *before = make_net();
    td_state *parameters = td_module_parameters(model);
    {
        TD_SCOPE;
        CHECK_OK(td_backward(loss_of(model, 0)));
        td_tensor *weight = td_state_tensor(parameters, 2);
        td_tensor *grad = td_tensor_retain(td_tensor_grad(weight));
        if (rank == 1)
            CHECK_OK(td_tensor_set_grad(weight, NULL));
        CHECK(td_optimizer_step(zero) == TD_ERR_MISMATCH);
        CHECK(strstr(td_last_error(), "\"module.2.weight\" has a gradient on rank 0, and none on "
                                      "rank 1"));
        CHECK_OK(td_tensor_set_grad(weight, grad));
        td_tensor_release(grad);
    }
    check_same(td_module_find(model, "module"), before);
    CHECK_OK(td_optimizer_step(zero));
    CHECK(!td_zero_whole_state(NULL));
    CHECK(td_training_save("checkpoint", &(td_training){.optimizer = zero}, NULL) ==
          TD_ERR_INVALID);
    CHECK(strstr(td_last_error(), "is a shard"));
    CHECK(strstr(td_last_error(), "td_training_save_sharded()"));
    td_state_destroy(parameters);
    td_module_destroy(before);
    td_optimizer_destroy(zero);
    td_module_destroy(model);
    CHECK_OK(td_destroy_process_group());
}

static td_status fail_to_begin(td_optimizer *optimizer)
{
    (void)optimizer;
    return td_fail(TD_ERR_NOMEM, "this rank is out of memory");
}

static td_status fail_to_run(const td_optimizer *optimizer, const struct td__parameter_step *steps,
                             int count)
{
    (void)optimizer, (void)steps, (void)count;
    return td_fail(TD_ERR_NOMEM, "this rank is out of memory");
}

RANKS(a_step_that_fails_on_one_rank_is_made_on_none, .ranks = 3)
{
    CHECK_OK(td_init_process_group(NULL));
    TD_SCOPE;
    int rank = td_get_rank(NULL);
    td_module *model = td_ddp(make_net(), NULL), *before = make_net();
    td_optimizer *zero = td_zero_optimizer(model, make_adam, NULL, NULL);
    CHECK_OK(td_backward(loss_of(model, 0)));
    const struct td__optimizer_hooks *hooks = zero->hooks;
    struct td__optimizer_hooks failing = *hooks;
    failing.begin_step = fail_to_begin;
    if (rank == 1)
        zero->hooks = &failing;
    CHECK_EQ(td_optimizer_step(zero), rank == 1 ? TD_ERR_NOMEM : TD_ERR_ABORTED);
    CHECK(strstr(td_last_error(), rank == 1 ? "this rank is out of memory" : "failed on rank 1"));
    check_same(td_module_find(model, "module"), before);
    zero->hooks = hooks;
    CHECK_OK(td_optimizer_step(zero));

    /* After the agreement nobody waits for a rank that fails. */
    const struct td__optimizer_kind *kind = zero->kind;
    struct td__optimizer_kind broken = *kind;
    broken.run = fail_to_run;
    if (rank == 1)
        zero->kind = &broken;
    CHECK(td_optimizer_step(zero) != TD_OK);
    zero->kind = kind;
    td_optimizer_destroy(zero);
    td_module_destroy(model);
    td_module_destroy(before);
    td_destroy_process_group();
}
