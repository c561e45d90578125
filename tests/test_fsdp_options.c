/* Options of td_fsdp(), and what works with it unchanged: optimizers of all kinds with several groups, policies, names that
 * are wrong, ignored parameters with several names, half precision in both formats, memory of gathered units. */
#include "runner.h"

#include <tandem/tandem.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 3, WIDE = 71, LAYERS = 6 };

static td_module *make_net(void)
{
    td_manual_seed(29);
    return td_sequential(td_linear(WIDE, WIDE), td_relu(), td_linear(WIDE, WIDE),
                         td_layer_norm(WIDE), td_linear(WIDE, WIDE), td_relu(), td_linear(WIDE, 5),
                         NULL);
}

static td_tensor *input(int step)
{
    td_generator *generator = td_generator_create((uint64_t)(step * 64 + td_get_rank(NULL)), NULL);
    td_tensor *x = td_empty(TD_SHAPE(ROWS, WIDE), TD_F32, NULL);
    CHECK_OK(td_normal_(x, 0, 1, generator));
    td_generator_destroy(generator);
    return x;
}

static void pass(td_module *model, int step, double scale)
{
    td_tensor *y = td_forward(model, input(step));
    CHECK(y);
    y = td_to_dtype(y, TD_F32);
    CHECK_OK(td_backward(td_mul_scalar(td_mean(td_mul(y, y)), scale)));
}

/* The greatest difference of two sharded models of the same options, or -1 where the bits are the same. */
static double apart(td_module *a, td_module *b)
{
    double most = -1;
    td_state *x = td_module_parameters(a), *y = td_module_parameters(b);
    CHECK(td_state_count(x) == td_state_count(y));
    for (int i = 0; i < td_state_count(x); i++) {
        const float *p = td_tensor_data(td_state_tensor(x, i));
        const float *q = td_tensor_data(td_state_tensor(y, i));
        CHECK_EQ(td_tensor_nbytes(td_state_tensor(x, i)), td_tensor_nbytes(td_state_tensor(y, i)));
        for (int64_t e = 0; e < td_tensor_numel(td_state_tensor(x, i)); e++) {
            CHECK(isfinite(p[e]) && isfinite(q[e]));
            if (memcmp(&p[e], &q[e], sizeof p[e]))
                most = fmax(most, fabs((double)p[e] - (double)q[e]));
        }
    }
    td_state_destroy(x);
    td_state_destroy(y);
    return most;
}

/* ---- Optimizers ------------------------------------------------------------------------------------------------- */

/* Weights decay, biases do not, and have another learning rate. */
static td_optimizer *make_optimizer(td_module *model, int kind)
{
    td_tensor *lists[2][32];
    int counts[2] = {0};
    td_state *state = td_module_parameters(model);
    for (int i = 0; i < td_state_count(state); i++) {
        bool is_bias = strstr(td_state_name(state, i), "bias") != NULL;
        lists[is_bias][counts[is_bias]++] = td_state_tensor(state, i);
    }
    static const td_sgd_options sgd = {
        .lr = 0.02, .momentum = 0.9, .weight_decay = 0.05, .nesterov = true};
    static const td_adam_options adam = {.lr = 0.003, .weight_decay = 0.1, .amsgrad = true};
    static const td_adam_options climbing = {.lr = 1e-4, .maximize = true};
    td_optimizer *optimizer = kind == 0   ? td_sgd_of(lists[0], counts[0], &sgd)
                              : kind == 1 ? td_adam_of(lists[0], counts[0], &adam)
                              : kind == 2 ? td_adamw_of(lists[0], counts[0], &adam)
                                          : td_adam_of(lists[0], counts[0], &climbing);
    CHECK(optimizer);
    td_parameter_group bias = {.lr = 0.01};
    CHECK_OK(td_optimizer_add_group(optimizer, lists[1], counts[1], &bias));
    td_state_destroy(state);
    return optimizer;
}

static void train(td_module *model, int kind)
{
    td_optimizer *optimizer = make_optimizer(model, kind);
    td_schedule *cosine = td_cosine_schedule(optimizer, 8, 0);
    for (int step = 0; step < 8; step++) {
        TD_SCOPE;
        CHECK_OK(td_optimizer_zero_grad(optimizer));
        pass(model, step, 1);
        CHECK_OK(td_clip_grad_norm_(model, 0.3, NULL, NULL));
        CHECK_OK(td_optimizer_step(optimizer));
        CHECK_OK(td_schedule_step(cosine));
    }
    td_schedule_destroy(cosine);
    td_optimizer_destroy(optimizer);
}

static void same_as_ddp(td_module *ddp, td_module *fsdp)
{
    CHECK_OK(td_fsdp_gather_begin(fsdp, false));
    td_state *a = td_module_parameters(ddp), *b = td_module_parameters(fsdp);
    for (int i = 0; i < td_state_count(b); i++)
        CHECK_MEM(td_tensor_data(td_state_tensor(a, i)), td_tensor_data(td_state_tensor(b, i)),
                  td_tensor_nbytes(td_state_tensor(a, i)));
    td_state_destroy(a);
    td_state_destroy(b);
    CHECK_OK(td_fsdp_gather_end(fsdp));
}

RANKS(optimizers_with_groups, .ranks = 3)
{
    CHECK_OK(td_init_process_group(NULL));
    for (int kind = 0; kind < 4; kind++) {
        td_module *ddp = td_ddp(make_net(), NULL);
        train(ddp, kind);
        for (int shared = 0; shared < 2; shared++) {
            td_module *fsdp = td_fsdp(
                make_net(), &(td_fsdp_options){.min_parameters = 100, .no_shared_memory = !shared});
            train(fsdp, kind);
            same_as_ddp(ddp, fsdp);
            td_module_destroy(fsdp);
        }
        td_module_destroy(ddp);
    }
    CHECK_OK(td_destroy_process_group());
}

/* ---- Which modules are units ------------------------------------------------------------------------------------ */

static bool is_chosen(td_module *module, const char *name, void *arg)
{
    (void)module;
    ++*(int *)arg;
    return !strcmp(name, "0") || !strcmp(name, "4");
}

static int units(const td_fsdp_options *options)
{
    td_module *model = td_fsdp(make_net(), options);
    td_fsdp_stats stats;
    CHECK_OK(td_fsdp_get_stats(model, &stats));
    td_module_destroy(model);
    return stats.units;
}

RANKS(policies, .ranks = 2)
{
    static const char *const kinds[] = {"LayerNorm", "Linear"};
    static const char *const ignored[] = {"4"};
    int asked = 0;
    CHECK_OK(td_init_process_group(NULL));
    CHECK_EQ(units(&(td_fsdp_options){.kinds = kinds, .kind_count = 1}), 2);
    CHECK_EQ(units(&(td_fsdp_options){.kinds = kinds, .kind_count = 2}), 6);
    CHECK_EQ(units(&(td_fsdp_options){.min_parameters = WIDE * WIDE}), 4);
    CHECK_EQ(units(&(td_fsdp_options){.is_unit = is_chosen, .arg = &asked}), 3);
    CHECK_EQ(asked, 7);
    CHECK_EQ(units(&(td_fsdp_options){
                 .min_parameters = WIDE * WIDE, .ignore = ignored, .ignore_count = 1}),
             3);
    CHECK_OK(td_destroy_process_group());
}

/* ---- Names ------------------------------------------------------------------------------------------------------- */

RANKS(names_that_are_wrong, .ranks = 2)
{
    static const char *const names[] = {"4", "4.wieght"}, *const kept[] = {"0", "1"};
    CHECK_OK(td_init_process_group(NULL));
    CHECK(!td_fsdp(make_net(),
                   &(td_fsdp_options){.min_parameters = 100, .ignore = names, .ignore_count = 2}));
    CHECK_EQ(td_last_status(), TD_ERR_INVALID);
    CHECK_CONTAINS(td_last_error(), "\"4.wieght\"");
    CHECK(!td_fsdp(make_net(),
                   &(td_fsdp_options){.min_parameters = 100, .keep = kept, .keep_count = 2}));
    CHECK_EQ(td_last_status(), TD_ERR_INVALID);
    CHECK_CONTAINS(td_last_error(), "\"1\"");
    td_module *model = td_fsdp(
        make_net(), &(td_fsdp_options){.min_parameters = 100, .keep = kept, .keep_count = 1});
    CHECK(model);
    td_module_destroy(model);
    CHECK_OK(td_destroy_process_group());
}

/* A weight of two modules stays whole if one of its names is ignored, whichever comes first. */
RANKS(ignored_under_one_of_its_names, .ranks = 2)
{
    static const char *const names[] = {"0.weight", "4.weight", "0", "4"};
    CHECK_OK(td_init_process_group(NULL));
    for (int way = 0; way < 4; way++) {
        TD_SCOPE;
        td_module *net = make_net();
        CHECK_OK(td_module_set_tensor(net, "4.weight", td_module_parameter(net, "0.weight")));
        td_module *model = td_fsdp(
            net,
            &(td_fsdp_options){.min_parameters = 100, .ignore = &names[way], .ignore_count = 1});
        CHECK(model);
        td_tensor *weight = td_module_parameter(model, "0.weight");
        CHECK(weight == td_module_parameter(model, "4.weight"));
        CHECK(!td_tensor_shard(weight) && td_tensor_ndim(weight) == 2);
        CHECK(td_tensor_shard(td_module_parameter(model, "2.weight")));
        CHECK(!td_tensor_shard(td_module_parameter(model, "0.bias")) == (way == 2));
        pass(model, 0, 1);
        CHECK(td_tensor_grad(weight) && td_tensor_ndim(td_tensor_grad(weight)) == 2);
        td_module_destroy(model);
    }
    CHECK_OK(td_destroy_process_group());
}

/* ---- Half precision ---------------------------------------------------------------------------------------------- */

static td_module *trained(td_fsdp_options options, td_dtype dtype, td_dtype reduce)
{
    options.min_parameters = 100;
    options.mixed_precision = true;
    options.param_dtype = dtype;
    options.reduce_dtype = reduce;
    td_module *model = td_fsdp(make_net(), &options);
    CHECK(model);
    td_optimizer *adam = td_adam(model, NULL);
    td_grad_scaler *scaler = td_grad_scaler_create(&(td_grad_scaler_options){.init_scale = 256});
    for (int step = 0; step < 10; step++) {
        TD_SCOPE;
        bool stepped;
        CHECK_OK(td_optimizer_zero_grad(adam));
        for (int part = 0; part < 2; part++) {
            td_no_sync scope = {0};
            if (step % 2 && !part)
                scope = td_no_sync_begin(model);
            pass(model, 2 * step + part, td_grad_scaler_get_scale(scaler));
            td_no_sync_end(&scope);
        }
        CHECK_OK(td_grad_scaler_unscale(scaler, adam));
        CHECK_OK(td_clip_grad_norm_(model, 0.3, NULL, NULL));
        CHECK_OK(td_grad_scaler_step(scaler, adam, &stepped));
        CHECK(stepped);
        CHECK_OK(td_grad_scaler_update(scaler, 0));
    }
    td_grad_scaler_destroy(scaler);
    td_optimizer_destroy(adam);
    return model;
}

/* Both runs have the same bits, whichever way the data took, and those of f32 are close. */
static void halves(td_dtype dtype, td_dtype reduce)
{
    CHECK_OK(td_init_process_group(NULL));
    td_module *first = trained((td_fsdp_options){0}, dtype, reduce);
    td_module *single = trained((td_fsdp_options){0}, TD_F32, TD_F32);
    double distance = apart(first, single);
    if (distance <= 0 || distance >= 0.02)
        fprintf(stderr, "f32 is %g apart\n", distance);
    CHECK(distance > 0 && distance < 0.02);
    td_module_destroy(single);
    static const td_fsdp_options ways[] = {{0},
                                           {.no_shared_memory = true},
                                           {.strategy = TD_SHARD_GRAD_OP, .no_shared_memory = true},
                                           {.no_prefetch = true, .no_shared_memory = true}};
    for (size_t way = 0; way < sizeof ways / sizeof *ways; way++) {
        td_module *again = trained(ways[way], dtype, reduce);
        CHECK(apart(first, again) < 0);
        td_module_destroy(again);
    }
    td_module_destroy(first);
    CHECK_OK(td_destroy_process_group());
}

RANKS(f16, .ranks = 2)
{
    halves(TD_F16, TD_F16);
}

RANKS(f16_reduced_in_f32, .ranks = 3)
{
    halves(TD_F16, TD_F32);
}

RANKS(bf16_reduced_in_f32, .ranks = 4)
{
    halves(TD_BF16, TD_F32);
}

/* ---- Gradients that are dropped ---------------------------------------------------------------------------------- */

/* Gradients that were zeroed after a pass without communication do not come back. */
static void zeroed_between(td_fsdp_options options)
{
    td_module *models[2];
    options.min_parameters = 100;
    for (int way = 0; way < 2; way++) {
        TD_SCOPE;
        models[way] = td_fsdp(make_net(), &options);
        CHECK(models[way]);
        td_optimizer *sgd = td_sgd(models[way], &(td_sgd_options){.lr = 1});
        if (way == 1) {
            pass(models[way], 7, 1);
            td_no_sync scope = td_no_sync_begin(models[way]);
            pass(models[way], 8, 1);
            td_no_sync_end(&scope);
            CHECK_FAILS(td_clip_grad_norm_(models[way], 1, NULL, NULL), TD_ERR_STATE, "td_no_sync");
            CHECK_FAILS(td_optimizer_step(sgd), TD_ERR_STATE, "td_no_sync");
            CHECK_OK(td_optimizer_zero_grad(sgd));
        }
        pass(models[way], 3, 1);
        CHECK_OK(td_optimizer_step(sgd));
        td_optimizer_destroy(sgd);
    }
    CHECK(apart(models[0], models[1]) < 0);
    td_module_destroy(models[0]);
    td_module_destroy(models[1]);
}

RANKS(zeroed_between_passes, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    for (int shared = 0; shared < 2; shared++) {
        zeroed_between((td_fsdp_options){.no_shared_memory = !shared});
        zeroed_between((td_fsdp_options){.no_shared_memory = !shared,
                                         .mixed_precision = true,
                                         .param_dtype = TD_BF16,
                                         .reduce_dtype = TD_F32});
    }
    CHECK_OK(td_destroy_process_group());
}

/* ---- Memory of gathered units ------------------------------------------------------------------------------------ */

/* Units of the same size: with messages two are gathered at a time, and one has gradients. */
RANKS(gathered_units, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    for (int way = 0; way < 3; way++) {
        td_manual_seed(5);
        td_module *net = td_sequential(td_linear(WIDE, WIDE), NULL);
        for (int i = 1; i < LAYERS; i++) {
            char name[16];
            snprintf(name, sizeof name, "%d", i);
            CHECK_OK(td_module_add_child(net, name, td_linear(WIDE, WIDE)));
        }
        td_module *model = td_fsdp(
            net, &(td_fsdp_options){.min_parameters = 100,
                                    .no_shared_memory = way > 0,
                                    .strategy = way == 2 ? TD_SHARD_GRAD_OP : TD_FULL_SHARD});
        for (int step = 0; step < 3; step++) {
            TD_SCOPE;
            pass(model, step, 1);
        }
        td_fsdp_stats stats;
        CHECK_OK(td_fsdp_get_stats(model, &stats));
        const size_t unit = 4 * (WIDE * WIDE + WIDE) + 2 * 64; /* with padding */
        CHECK(stats.whole_bytes == 0 && stats.whole_bytes_peak >= unit);
        CHECK(stats.whole_bytes_peak <= (way == 0 ? 2 : way == 1 ? 3 : LAYERS + 2) * unit);
        CHECK(way < 2 || stats.whole_bytes_peak > 3 * unit); /* all of them stay */
        td_module_destroy(model);
    }
    CHECK_OK(td_destroy_process_group());
}
