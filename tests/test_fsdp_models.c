/* What models do in td_fsdp() has the bits that it has in td_ddp(): shared, frozen and unused parameters, checkpointing,
 * evaluation between steps, two passes through one graph, autocast and gradient scaling, batch norm, f64, no elements. */
#include "runner.h"

#include <tandem/tandem.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 5, WIDE = 67, OUT = 9, TOKENS = 50 };

/* ---- Data -------------------------------------------------------------------------------------------------- */

static td_tensor *numbers(int step, td_dtype dtype)
{
    td_generator *generator = td_generator_create((uint64_t)(step * 64 + td_get_rank(NULL)), NULL);
    td_tensor *x = td_empty(TD_SHAPE(ROWS, WIDE), dtype, NULL);
    CHECK_OK(td_normal_(x, 0, 1, generator));
    td_generator_destroy(generator);
    return x;
}

static td_tensor *tokens(int step)
{
    td_generator *generator = td_generator_create((uint64_t)(step * 64 + td_get_rank(NULL)), NULL);
    td_tensor *x = td_empty(TD_SHAPE(ROWS), TD_I64, NULL);
    CHECK_OK(td_random_range_(x, 0, TOKENS, generator));
    td_generator_destroy(generator);
    return x;
}

/* ---- Scenes ------------------------------------------------------------------------------------------------ */

struct scene {
    const char *name;
    td_module *(*make)(void);
    /** One step, up to the gradients, of a model of td_ddp() or td_fsdp(). */
    void (*pass)(td_module *model, int step);
    td_ddp_options ddp;
    const char *const *ignore; /* of td_fsdp() */
    int ignore_count;
    bool sgd; /* without momentum */
    bool no_clip;
    void (*ddp_pass)(td_module *model, int step); /* NULL: `pass` */
};

static void square_pass(td_module *model, int step)
{
    td_tensor *y = td_forward(model, numbers(step, TD_F32));
    if (!y)
        fprintf(stderr, "%s\n", td_last_error());
    CHECK(y);
    CHECK_OK(td_backward(td_mean(td_mul(y, y))));
}

static void train(const struct scene *scene, td_module *model, int steps)
{
    td_optimizer *optimizer = scene->sgd ? td_sgd(model, &(td_sgd_options){.lr = 0.05})
                                         : td_adam(model, &(td_adam_options){.lr = 0.01});
    CHECK(optimizer);
    for (int step = 0; step < steps; step++) {
        TD_SCOPE;
        CHECK_OK(td_optimizer_zero_grad(optimizer));
        if (scene->ddp_pass && !td_is_fsdp(model))
            scene->ddp_pass(model, step);
        else
            scene->pass(model, step);
        if (!scene->no_clip)
            CHECK_OK(td_clip_grad_norm_(model, 0.5, NULL, NULL));
        CHECK_OK(td_optimizer_step(optimizer));
    }
    td_optimizer_destroy(optimizer);
}

static void compare(const struct scene *scene, td_module *ddp, td_module *fsdp)
{
    CHECK_OK(td_fsdp_gather_begin(fsdp, false));
    for (int buffers = 0; buffers < 2; buffers++) {
        td_state *a = buffers ? td_module_buffers(ddp) : td_module_parameters(ddp);
        td_state *b = buffers ? td_module_buffers(fsdp) : td_module_parameters(fsdp);
        CHECK(td_state_count(a) == td_state_count(b));
        for (int i = 0; i < td_state_count(b); i++) {
            td_tensor *x = td_state_tensor(a, i), *y = td_state_tensor(b, i);
            size_t bytes = td_tensor_nbytes(x);
            CHECK_STR(td_state_name(a, i) + strlen("module."), td_state_name(b, i));
            CHECK(bytes == td_tensor_nbytes(y));
            if (bytes && memcmp(td_tensor_data(x), td_tensor_data(y), bytes)) {
                fprintf(stderr, "%s: %s has other bits\n", scene->name, td_state_name(b, i));
                CHECK(!"the same bits");
            }
        }
        td_state_destroy(a);
        td_state_destroy(b);
    }
    CHECK_OK(td_fsdp_gather_end(fsdp));
}

static td_module *made(const struct scene *scene)
{
    td_manual_seed(23);
    td_module *module = scene->make();
    CHECK(module);
    return module;
}

static const td_fsdp_options ways[] = {
    {.min_parameters = 300},
    {.min_parameters = 300, .no_shared_memory = true},
    {.min_parameters = 300, .strategy = TD_SHARD_GRAD_OP},
    {.min_parameters = 300, .strategy = TD_SHARD_GRAD_OP, .no_shared_memory = true},
    {.strategy = TD_FULL_SHARD},
    {.min_parameters = 300, .strategy = TD_NO_SHARD},
};

static void play(const struct scene *scene)
{
    CHECK_OK(td_init_process_group(NULL));
    td_module *ddp = td_ddp(made(scene), &scene->ddp);
    CHECK(ddp);
    train(scene, ddp, 4);
    for (size_t way = 0; way < sizeof ways / sizeof *ways; way++) {
        td_fsdp_options options = ways[way];
        options.ignore = scene->ignore;
        options.ignore_count = scene->ignore_count;
        td_module *fsdp = td_fsdp(made(scene), &options);
        if (!fsdp)
            fprintf(stderr, "%s\n", td_last_error());
        CHECK(fsdp);
        train(scene, fsdp, 4);
        compare(scene, ddp, fsdp);
        td_fsdp_stats stats;
        CHECK_OK(td_fsdp_get_stats(fsdp, &stats));
        CHECK(stats.whole_bytes == 0);
        td_module_destroy(fsdp);
    }
    td_module_destroy(ddp);
    CHECK_OK(td_destroy_process_group());
}

/* On 1 to 4 ranks, in RANKS(<name>_of_1) … */
#define SCENE(name, ...)                                                                           \
    static const struct scene name##_scene = {#name, __VA_ARGS__};                                 \
    RANKS(name##_of_1, .ranks = 1)                                                                 \
    {                                                                                              \
        play(&name##_scene);                                                                       \
    }                                                                                              \
    RANKS(name##_of_2, .ranks = 2)                                                                 \
    {                                                                                              \
        play(&name##_scene);                                                                       \
    }                                                                                              \
    RANKS(name##_of_4, .ranks = 4)                                                                 \
    {                                                                                              \
        play(&name##_scene);                                                                       \
    }                                                                                              \
    RANKS(name##_of_3_over_tcp, .ranks = 3)                                                        \
    {                                                                                              \
        setenv("TANDEM_TRANSPORT", "tcp", 1);                                                      \
        play(&name##_scene);                                                                       \
    }

/* ---- Shared parameters --------------------------------------------------------------------------------------- */

static td_module *make_tied(void)
{
    td_module *net = td_sequential(td_embedding(TOKENS, WIDE), td_linear(WIDE, WIDE), td_relu(),
                                   td_linear(WIDE, WIDE), td_layer_norm(WIDE),
                                   td_linear(WIDE, TOKENS), NULL);
    CHECK_OK(td_module_set_tensor(net, "5.weight", td_module_parameter(net, "0.weight")));
    CHECK_OK(td_module_set_tensor(net, "3.bias", td_module_parameter(net, "1.bias")));
    return net;
}

static void token_pass(td_module *model, int step)
{
    td_tensor *y = td_forward(model, tokens(step));
    CHECK(y);
    CHECK_OK(td_backward(td_nll_loss(td_f_log_softmax(y, 1), tokens(step + 1))));
}

SCENE(shared_parameters, .make = make_tied, .pass = token_pass)

/* ---- Frozen parameters --------------------------------------------------------------------------------------- */

static td_module *make_frozen(void)
{
    td_module *net = td_sequential(td_linear(WIDE, WIDE), td_linear(WIDE, WIDE), td_relu(),
                                   td_linear(WIDE, WIDE), td_layer_norm(WIDE), td_linear(WIDE, OUT),
                                   NULL);
    CHECK_OK(td_module_requires_grad_(td_child(net, 0), false)); /* the first; one in the middle */
    CHECK_OK(td_module_requires_grad_(td_child(net, 3), false));
    CHECK_OK(td_tensor_set_requires_grad(td_module_parameter(net, "5.weight"), false));
    CHECK_OK(td_tensor_set_requires_grad(td_module_parameter(net, "4.bias"), false));
    return net;
}

SCENE(frozen_parameters, .make = make_frozen, .pass = square_pass)

/* ---- Unused parameters --------------------------------------------------------------------------------------- */

static td_tensor *branch_forward(td_module *self, td_tensor *const *inputs, int count)
{
    (void)count;
    int *calls = td_module_data(self);
    td_tensor *x = td_forward(td_child(self, 0), inputs[0]);
    x = td_forward(td_child(self, ++*calls % 2 ? 1 : 2), x);
    return td_mul(td_forward(td_child(self, 3), x), td_param(self, 1));
}

static const td_module_ops branch_ops = {
    .name = "Branch", .data_size = sizeof(int), .forward = branch_forward};

/* One branch in each pass; a parameter in a unit that is used otherwise. */
static td_module *make_branches(void)
{
    td_module *net = td_module_create(&branch_ops);
    CHECK_OK(td_init_constant(td_module_new_parameter(net, "never", TD_SHAPE(3), TD_F32), 1));
    CHECK_OK(td_init_constant(td_module_new_parameter(net, "scale", TD_SHAPE(OUT), TD_F32), 1));
    td_module_add_child(net, "first", td_linear(WIDE, WIDE));
    td_module_add_child(net, "odd", td_linear(WIDE, WIDE));
    td_module_add_child(net, "even", td_linear(WIDE, WIDE));
    td_module_add_child(net, "last", td_linear(WIDE, OUT));
    return td_module_finish(net);
}

SCENE(unused_parameters, .make = make_branches, .pass = square_pass,
      .ddp = {.find_unused_parameters = true}, .sgd = true)

/* ---- Checkpointing ------------------------------------------------------------------------------------------- */

static td_tensor *segment(td_tensor *const *inputs, int count, void *arg)
{
    (void)count;
    td_module *self = arg;
    td_tensor *x = td_f_relu(td_forward(td_child(self, 0), inputs[0]));
    x = td_f_dropout(x, 0.25, td_module_is_training(self));
    return td_forward(td_child(self, 1), td_mul(x, td_param(self, 0)));
}

static td_tensor *block_forward(td_module *self, td_tensor *const *inputs, int count)
{
    (void)count;
    return td_checkpoint(segment, self, inputs, 1);
}

static const td_module_ops block_ops = {.name = "Block", .forward = block_forward};

static td_module *block(void)
{
    td_module *self = td_module_create(&block_ops);
    CHECK_OK(td_init_constant(td_module_new_parameter(self, "scale", TD_SHAPE(WIDE), TD_F32), 0.5));
    td_module_add_child(self, "up", td_linear(WIDE, WIDE));
    td_module_add_child(self, "down", td_linear(WIDE, WIDE));
    return td_module_finish(self);
}

static td_module *make_checkpointed(void)
{
    return td_sequential(td_linear(WIDE, WIDE), block(), block(), td_linear(WIDE, OUT), NULL);
}

static void random_pass(td_module *model, int step)
{
    td_manual_seed((uint64_t)step); /* the same dropout in both models */
    square_pass(model, step);
}

SCENE(checkpointing, .make = make_checkpointed, .pass = random_pass)

/* A program's function around several units. */
static td_tensor *run_blocks(td_tensor *const *inputs, int count, void *arg)
{
    (void)count;
    return td_forward(td_child(arg, 1), td_forward(td_child(arg, 0), inputs[0]));
}

static td_tensor *outer_forward(td_module *self, td_tensor *const *inputs, int count)
{
    (void)count;
    td_tensor *x = td_checkpoint(run_blocks, self, inputs, 1);
    return td_forward(td_child(self, 2), x);
}

static const td_module_ops outer_ops = {.name = "Outer", .forward = outer_forward};

static td_module *make_outer(void)
{
    td_module *self = td_module_create(&outer_ops);
    td_module_add_child(self, "a", td_linear(WIDE, WIDE));
    td_module_add_child(self, "b", block());
    td_module_add_child(self, "c", td_linear(WIDE, OUT));
    return td_module_finish(self);
}

SCENE(checkpointed_units, .make = make_outer, .pass = random_pass)

/* The whole model. */
static td_tensor *run_model(td_tensor *const *inputs, int count, void *model)
{
    (void)count;
    return td_forward(model, inputs[0]);
}

static void checkpointed_pass(td_module *model, int step)
{
    td_tensor *x = numbers(step, TD_F32);
    td_tensor *y = td_checkpoint(run_model, model, &x, 1);
    CHECK(y);
    CHECK_OK(td_backward(td_mean(td_mul(y, y))));
}

SCENE(checkpointed_model, .make = make_outer, .pass = checkpointed_pass, .ddp_pass = square_pass)

/* ---- Other passes between ------------------------------------------------------------------------------------ */

static td_module *make_plain(void)
{
    return td_sequential(td_linear(WIDE, WIDE), td_relu(), td_linear(WIDE, WIDE),
                         td_layer_norm(WIDE), td_linear(WIDE, OUT), NULL);
}

static void varied_pass(td_module *model, int step)
{
    {
        TD_NO_GRAD;
        td_module_eval(model);
        CHECK(td_forward(model, numbers(step + 50, TD_F32)));
        td_module_train(model, true);
    }
    td_tensor *dropped = td_forward(model,
                                    numbers(step + 60, TD_F32)); /* without a backward pass */
    CHECK(dropped);
    square_pass(model, step);
    {
        TD_NO_GRAD;
        CHECK(td_forward(model, numbers(step + 70, TD_F32)));
    }
}

SCENE(passes_of_several_kinds, .make = make_plain, .pass = varied_pass)

static void two_losses_pass(td_module *model, int step)
{
    td_tensor *x = td_forward(model, numbers(step, TD_F32));
    td_tensor *y = td_forward(model, numbers(step + 9, TD_F32));
    CHECK(x && y); /* two forward passes, one backward pass */
    CHECK_OK(td_backward(td_add(td_mean(td_mul(x, x)), td_sum(y))));
}

SCENE(two_forward_passes, .make = make_plain, .pass = two_losses_pass)

static void retained_pass(td_module *model, int step)
{
    td_tensor *y = td_forward(model, numbers(step, TD_F32));
    CHECK(y);
    td_tensor *a = td_mean(td_mul(y, y)), *b = td_sum(td_f_tanh(y));
    CHECK_OK(td_backward_from(&a, NULL, 1, &(td_backward_options){.retain_graph = true}));
    CHECK_OK(td_backward(b));
}

/* td_ddp() reduces in the first one only. */
static void repeated_pass(td_module *model, int step)
{
    for (int i = 0; i < 2; i++) {
        td_tensor *y = td_forward(model, numbers(step, TD_F32));
        CHECK(y);
        CHECK_OK(td_backward(i ? td_sum(td_f_tanh(y)) : td_mean(td_mul(y, y))));
    }
}

SCENE(two_backward_passes, .make = make_plain, .pass = retained_pass, .ddp_pass = repeated_pass)

/* ---- Dtypes -------------------------------------------------------------------------------------------------- */

static td_module *make_f64(void)
{
    td_module *net = make_plain();
    CHECK_OK(td_module_to_dtype(net, TD_F64));
    return net;
}

static void f64_pass(td_module *model, int step)
{
    td_tensor *y = td_forward(model, numbers(step, TD_F64));
    CHECK(y);
    CHECK_OK(td_backward(td_mean(td_mul(y, y))));
}

SCENE(modules_of_f64, .make = make_f64, .pass = f64_pass)

static void autocast_pass(td_module *model, int step)
{
    td_tensor *loss;
    {
        TD_AUTOCAST("cpu", &(td_autocast_options){.dtype = TD_BF16});
        td_tensor *y = td_forward(model, numbers(step, TD_F32));
        CHECK(y);
        y = td_to_dtype(y, TD_F32);
        loss = td_mean(td_mul(y, y));
    }
    CHECK_OK(td_backward(loss));
}

SCENE(autocast, .make = make_plain, .pass = autocast_pass)

/* ---- Batch norm ---------------------------------------------------------------------------------------------- */

static td_module *make_norms(void)
{
    return td_sequential(td_linear(WIDE, WIDE), td_batch_norm1d(WIDE), td_relu(),
                         td_linear(WIDE, OUT), td_batch_norm1d(OUT), NULL);
}

static td_module *make_synced(void)
{
    return td_convert_sync_batch_norm(make_norms(), NULL);
}

SCENE(batch_norm, .make = make_norms, .pass = square_pass)
SCENE(sync_batch_norm, .make = make_synced, .pass = square_pass)

/* ---- Ignored modules ----------------------------------------------------------------------------------------- */

static const char *const ddp_ignored[] = {"2.weight", "2.bias", "4.bias"};
static const char *const fsdp_ignored[] = {"2", "4.bias"};

SCENE(ignored, .make = make_plain, .pass = square_pass,
      .ddp = {.ignore = ddp_ignored, .ignore_count = 3}, .no_clip = true, .ignore = fsdp_ignored,
      .ignore_count = 2)

/* ---- Few elements -------------------------------------------------------------------------------------------- */

static td_tensor *empty_forward(td_module *self, td_tensor *const *inputs, int count)
{
    (void)count;
    td_tensor *x = td_forward(td_child(self, 0), inputs[0]);
    td_tensor *none = td_forward(td_child(self, 1), x); /* [ROWS, 0] */
    x = td_add(x, td_forward(td_child(self, 2), none));
    return td_forward(td_child(self, 3), x);
}

static const td_module_ops empty_ops = {.name = "Empty", .forward = empty_forward};

static td_module *make_empty(void)
{
    td_module *self = td_module_create(&empty_ops);
    td_module_add_child(self, "first", td_linear(WIDE, 1)); /* of one row */
    td_module_add_child(self, "down", td_linear(1, 0));
    td_module_add_child(self, "up", td_linear(0, 1));
    td_module_add_child(self, "last", td_linear(1, 2));
    return td_module_finish(self);
}

SCENE(few_elements, .make = make_empty, .pass = square_pass)

/* ---- Gradient scaling ---------------------------------------------------------------------------------------- */

/* Gradients of one rank are infinite in some steps: all ranks skip these. */
static void scaled(const struct scene *scene, td_module *model, double *scale, int *skipped)
{
    td_optimizer *adam = td_adam(model, &(td_adam_options){.lr = 0.01});
    td_grad_scaler *scaler = td_grad_scaler_create(
        &(td_grad_scaler_options){.init_scale = 1024, .growth_interval = 2});
    *skipped = 0;
    for (int step = 0; step < 8; step++) {
        TD_SCOPE;
        bool stepped;
        CHECK_OK(td_optimizer_zero_grad(adam));
        td_tensor *x = numbers(step, TD_F32), *y = td_forward(model, x);
        td_tensor *loss = td_mean(td_mul(y, y));
        if (step % 3 == 1 && td_get_rank(NULL) == td_get_world_size(NULL) - 1)
            loss = td_mul_scalar(loss, 1e38);
        CHECK_OK(td_backward(td_grad_scaler_scale(scaler, loss)));
        if (step % 2) {
            CHECK_OK(td_grad_scaler_unscale(scaler, adam));
            CHECK_OK(td_clip_grad_norm_(model, 0.5, NULL, NULL));
        }
        CHECK_OK(td_grad_scaler_step(scaler, adam, &stepped));
        CHECK_OK(td_grad_scaler_update(scaler, 0));
        *skipped += !stepped;
    }
    *scale = td_grad_scaler_get_scale(scaler);
    td_grad_scaler_destroy(scaler);
    td_optimizer_destroy(adam);
    (void)scene;
}

static void grad_scaler(void)
{
    static const struct scene scene = {.name = "grad_scaler", .make = make_plain};
    CHECK_OK(td_init_process_group(NULL));
    double scale, other;
    int skipped, others;
    td_module *ddp = td_ddp(made(&scene), NULL);
    scaled(&scene, ddp, &scale, &skipped);
    CHECK(skipped == 3);
    for (size_t way = 0; way < sizeof ways / sizeof *ways; way++) {
        td_module *fsdp = td_fsdp(made(&scene), &ways[way]);
        scaled(&scene, fsdp, &other, &others);
        CHECK(scale == other && skipped == others);
        compare(&scene, ddp, fsdp);
        td_module_destroy(fsdp);
    }
    td_module_destroy(ddp);
    CHECK_OK(td_destroy_process_group());
}

RANKS(grad_scaler_of_1, .ranks = 1)
{
    grad_scaler();
}

RANKS(grad_scaler_of_3, .ranks = 3)
{
    grad_scaler();
}

/* One shard only gets infinite: its rank alone sees it. */
RANKS(one_shard_is_infinite, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    td_module *model = td_fsdp(td_linear(WIDE, WIDE), NULL);
    td_optimizer *sgd = td_sgd(model, &(td_sgd_options){.lr = 0.1});
    for (int unscale = 0; unscale < 2; unscale++) {
        TD_SCOPE;
        bool stepped = true;
        td_grad_scaler *scaler = td_grad_scaler_create(NULL);
        td_tensor *weight = td_module_parameter(model, "weight");
        td_tensor *grad = td_ones(TD_SHAPE(td_tensor_numel(weight)), TD_F32, NULL);
        if (td_get_rank(NULL) == 1)
            CHECK_OK(td_fill_(grad, INFINITY));
        CHECK_OK(td_tensor_set_grad(weight, grad));
        if (unscale)
            CHECK_OK(td_grad_scaler_unscale(scaler, sgd));
        else
            CHECK_OK(td_grad_scaler_step(scaler, sgd, &stepped));
        CHECK_OK(td_grad_scaler_update(scaler, 0));
        CHECK(unscale || !stepped);
        CHECK(td_grad_scaler_get_scale(scaler) == 32768);
        td_grad_scaler_destroy(scaler);
    }
    td_optimizer_destroy(sgd);
    td_module_destroy(model);
    CHECK_OK(td_destroy_process_group());
}

/* ---- Two models ---------------------------------------------------------------------------------------------- */

RANKS(two_models, .ranks = 3)
{
    static const struct scene scene = {.name = "two_models", .make = make_plain};
    CHECK_OK(td_init_process_group(NULL));
    for (size_t way = 0; way < sizeof ways / sizeof *ways; way++) {
        td_module *a[2] = {td_ddp(made(&scene), NULL), td_ddp(made(&scene), NULL)};
        td_module *b[2] = {td_fsdp(made(&scene), &ways[way]), td_fsdp(made(&scene), &ways[way])};
        for (int kind = 0; kind < 2; kind++) {
            td_module **models = kind ? b : a;
            td_optimizer *optimizers[2];
            for (int m = 0; m < 2; m++)
                optimizers[m] = td_sgd(models[m], &(td_sgd_options){.lr = 0.1});
            for (int step = 0; step < 4; step++) {
                TD_SCOPE;
                td_tensor *x = td_forward(models[0], numbers(step, TD_F32));
                td_tensor *y = td_forward(models[1], numbers(step + 7, TD_F32));
                CHECK_OK(td_backward(td_mean(td_mul(td_sub(x, y), x)))); /* one pass through both */
                for (int m = 0; m < 2; m++) {
                    CHECK_OK(td_optimizer_step(optimizers[m]));
                    CHECK_OK(td_optimizer_zero_grad(optimizers[m]));
                }
            }
            for (int m = 0; m < 2; m++)
                td_optimizer_destroy(optimizers[m]);
        }
        for (int m = 0; m < 2; m++) {
            compare(&scene, a[m], b[m]);
            td_module_destroy(a[m]);
            td_module_destroy(b[m]);
        }
    }
    CHECK_OK(td_destroy_process_group());
}
