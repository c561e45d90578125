/* Fully sharded training has the bits of DDP: strategies, units, accumulation, clipping, both transports. */
#include "runner.h"

#include "base/arena.h"

#include <tandem/tandem.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define SHAPE(...) TD_SHAPE(__VA_ARGS__)

enum { IN = 37, WIDE = 150, OUT = 5, BATCH = 6 };

/* ---- Models ------------------------------------------------------------------------------------------------ */

/* A block that is called twice in a pass. */
static td_tensor *twice_forward(td_module *module, td_tensor *const *inputs, int count)
{
    (void)count;
    td_tensor *x = td_f_tanh(td_forward(td_child(module, 0), inputs[0]));
    return td_f_tanh(td_forward(td_child(module, 0), x));
}

static const td_module_ops twice_ops = {.name = "Twice", .forward = twice_forward};

static td_module *twice(void)
{
    td_module *module = td_module_create(&twice_ops);
    td_module_add_child(module, "inner", td_linear(WIDE, WIDE));
    return td_module_finish(module);
}

static td_module *make_net(void)
{
    td_manual_seed(17);
    return td_sequential(td_linear(IN, WIDE), td_layer_norm(WIDE), td_relu(), twice(),
                         td_sequential(td_linear(WIDE, WIDE), td_relu(), td_linear(WIDE, 3), NULL),
                         td_linear(3, OUT), NULL);
}

static td_tensor *data(int step, int rank, int part)
{
    float *x = malloc(sizeof *x * BATCH * IN);
    unsigned state = (unsigned)(step * 1009 + rank * 31 + part * 7 + 5);
    for (int i = 0; i < BATCH * IN; i++) {
        state = state * 1664525u + 1013904223u;
        x[i] = (float)(state >> 8) / (float)(1 << 24) - 0.5f;
    }
    td_tensor *tensor = td_empty(SHAPE(BATCH, IN), TD_F32, NULL);
    memcpy(td_tensor_data(tensor), x, sizeof *x * BATCH * IN);
    free(x);
    return tensor;
}

/* ---- Training ---------------------------------------------------------------------------------------------- */

struct job {
    int steps;
    int parts; /* passes of a step; only the last is reduced with `no_sync` */
    bool no_sync;
    double clip;
    bool adam;
    bool in_backward; /* of the sharded model */
};

static double train(td_module *model, td_optimizer *optimizer, const struct job *job)
{
    double norm = 0;
    for (int step = 0; step < job->steps; step++) {
        if (!job->in_backward)
            CHECK_OK(td_optimizer_zero_grad(optimizer));
        for (int part = 0; part < job->parts; part++) {
            TD_SCOPE;
            bool silent = job->no_sync && part + 1 < job->parts;
            td_no_sync scope = {0};
            if (silent)
                scope = td_no_sync_begin(model);
            td_tensor *y = td_forward(model, data(step, td_get_rank(NULL), part));
            CHECK(y != NULL);
            CHECK_OK(td_backward(td_mean(td_mul(y, y))));
            if (silent)
                td_no_sync_end(&scope);
        }
        if (job->clip > 0)
            CHECK_OK(td_clip_grad_norm_(model, job->clip, NULL, &norm));
        if (!job->in_backward)
            CHECK_OK(td_optimizer_step(optimizer));
    }
    return norm;
}

static td_optimizer *make_optimizer(td_module *model, const struct job *job)
{
    return job->adam ? td_adam(model, &(td_adam_options){.lr = 0.01})
                     : td_sgd(model, &(td_sgd_options){.lr = 0.1, .momentum = 0.9});
}

/* Whether all parameters have the same bits, those of DDP being "module.<name>". */
static void compare(td_module *ddp, td_module *fsdp, double tolerance)
{
    CHECK_OK(td_fsdp_gather_begin(fsdp, false));
    td_state *a = td_module_parameters(ddp), *b = td_module_parameters(fsdp);
    CHECK(td_state_count(a) == td_state_count(b));
    for (int i = 0; i < td_state_count(b); i++) {
        const td_tensor *x = td_state_tensor(a, i), *y = td_state_tensor(b, i);
        CHECK(!strcmp(td_state_name(a, i) + strlen("module."), td_state_name(b, i)));
        CHECK(td_tensor_numel(x) == td_tensor_numel(y));
        const float *p = td_tensor_data(td_state_tensor(a, i));
        const float *q = td_tensor_data(td_state_tensor(b, i));
        for (int64_t e = 0; e < td_tensor_numel(x); e++)
            if (tolerance > 0 ? !(fabs((double)p[e] - (double)q[e]) <= tolerance)
                              : memcmp(&p[e], &q[e], 4)) {
                fprintf(stderr, "%s: element %lld is %.9g, DDP has %.9g\n", td_state_name(b, i),
                        (long long)e, (double)q[e], (double)p[e]);
                CHECK(!"the same");
            }
    }
    td_state_destroy(a);
    td_state_destroy(b);
    CHECK_OK(td_fsdp_gather_end(fsdp));
}

static void same_as_ddp(const struct job *job, const td_fsdp_options *options, double tolerance)
{
    td_module *ddp = td_ddp(make_net(), NULL);
    td_module *fsdp = td_fsdp(make_net(), options);
    CHECK(ddp && fsdp);
    td_optimizer *a = make_optimizer(ddp, job), *b = make_optimizer(fsdp, job);
    double norm = train(ddp, a, job), other = train(fsdp, b, job);
    CHECK(tolerance > 0 ? fabs(norm - other) < 1e-5 : norm == other);
    compare(ddp, fsdp, tolerance);
    td_optimizer_destroy(a);
    td_optimizer_destroy(b);
    td_module_destroy(ddp);
    td_module_destroy(fsdp);
}

static void all_strategies(void)
{
    CHECK_OK(td_init_process_group(NULL));
    static const td_fsdp_strategy strategies[] = {TD_FULL_SHARD, TD_SHARD_GRAD_OP, TD_NO_SHARD};
    static const char *const kinds[] = {"Linear"};
    for (int s = 0; s < 3; s++) {
        td_fsdp_options options = {.strategy = strategies[s], .min_parameters = 400};
        same_as_ddp(&(struct job){.steps = 12, .parts = 1, .clip = 0.05, .adam = true}, &options,
                    0);
        options.no_shared_memory = true;
        same_as_ddp(&(struct job){.steps = 5, .parts = 2, .clip = 0.05}, &options, 0);
        same_as_ddp(&(struct job){.steps = 5, .parts = 3, .no_sync = true, .clip = 0.05}, &options,
                    0);
        options = (td_fsdp_options){.strategy = strategies[s], .kinds = kinds, .kind_count = 1};
        same_as_ddp(&(struct job){.steps = 5, .parts = 2, .adam = true}, &options, 0);
        options.no_prefetch = options.no_shared_memory = true;
        same_as_ddp(&(struct job){.steps = 4, .parts = 2, .no_sync = true}, &options, 0);
    }
    CHECK_OK(td_destroy_process_group());
}

RANKS(bits_of_1, .ranks = 1)
{
    all_strategies();
}

RANKS(bits_of_2, .ranks = 2)
{
    all_strategies();
}

RANKS(bits_of_3, .ranks = 3)
{
    all_strategies();
}

RANKS(bits_of_4, .ranks = 4)
{
    all_strategies();
}

RANKS(bits_of_8, .ranks = 8)
{
    CHECK_OK(td_init_process_group(NULL));
    same_as_ddp(&(struct job){.steps = 5, .parts = 2, .clip = 0.05, .adam = true},
                &(td_fsdp_options){.min_parameters = 400}, 0);
    CHECK_OK(td_destroy_process_group());
}

RANKS(bits_over_tcp, .ranks = 3)
{
    setenv("TANDEM_TRANSPORT", "tcp", 1);
    all_strategies();
}

RANKS(hybrid, .ranks = 4)
{
    CHECK_OK(td_init_process_group(NULL));
    for (int shared = 0; shared < 2; shared++)
        same_as_ddp(&(struct job){.steps = 5, .parts = 2, .clip = 0.05},
                    &(td_fsdp_options){.strategy = TD_HYBRID_SHARD,
                                       .shard_size = 2,
                                       .min_parameters = 400,
                                       .no_shared_memory = shared},
                    1e-6);
    CHECK_OK(td_destroy_process_group());
}

/* ---- Units by hand ------------------------------------------------------------------------------------------- */

RANKS(units_by_hand, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    const struct job job = {.steps = 5, .parts = 1, .clip = 0.05};
    td_module *ddp = td_ddp(make_net(), NULL);
    td_manual_seed(17);
    td_module *first = td_linear(IN, WIDE), *norm = td_layer_norm(WIDE), *second = twice();
    td_module *third = td_sequential(td_linear(WIDE, WIDE), td_relu(), td_linear(WIDE, 3), NULL);
    td_module *last = td_linear(3, OUT);
    second = td_fsdp(second, NULL);
    third = td_fsdp(third, &(td_fsdp_options){.strategy = TD_SHARD_GRAD_OP, .min_parameters = 1});
    td_module *fsdp = td_fsdp(td_sequential(first, norm, td_relu(), second, third, last, NULL),
                              NULL);
    CHECK(fsdp != NULL);
    td_fsdp_stats stats;
    CHECK_OK(td_fsdp_get_stats(fsdp, &stats));
    CHECK(stats.units == 5 && td_is_fsdp(fsdp) && !td_is_fsdp(td_child(fsdp, 3)));
    td_optimizer *a = make_optimizer(ddp, &job), *b = make_optimizer(fsdp, &job);
    CHECK(train(ddp, a, &job) == train(fsdp, b, &job));
    compare(ddp, fsdp, 0);
    td_optimizer_destroy(a);
    td_optimizer_destroy(b);
    td_module_destroy(ddp);
    td_module_destroy(fsdp);
    CHECK_OK(td_destroy_process_group());
}

/* ---- Steps in the backward pass -------------------------------------------------------------------------------- */

static void steps_in_backward(bool adam)
{
    CHECK_OK(td_init_process_group(NULL));
    static const td_fsdp_options ways[] = {
        {.min_parameters = 400},
        {.min_parameters = 400, .no_shared_memory = true},
        {.min_parameters = 400, .no_shared_memory = true, .strategy = TD_SHARD_GRAD_OP},
        {.min_parameters = 400, .strategy = TD_NO_SHARD},
    };
    const struct job whole = {.steps = 6, .parts = 2, .no_sync = true, .adam = adam};
    struct job sharded = whole;
    sharded.in_backward = true;
    td_module *ddp = td_ddp(make_net(), NULL);
    td_optimizer *a = make_optimizer(ddp, &whole);
    train(ddp, a, &whole);
    for (size_t way = 0; way < sizeof ways / sizeof *ways; way++) {
        td_module *fsdp = td_fsdp(make_net(), &ways[way]);
        td_optimizer *b = make_optimizer(fsdp, &sharded);
        CHECK_OK(td_optimizer_in_backward(fsdp, b));
        train(fsdp, b, &sharded);
        td_tensor *weight = td_module_parameter(fsdp, "0.weight");
        CHECK(td_tensor_grad(weight) == NULL);
        compare(ddp, fsdp, 0);
        if (way % 2) { /* either may go first */
            td_module_destroy(fsdp);
            td_optimizer_destroy(b);
        } else {
            td_optimizer_destroy(b);
            td_module_destroy(fsdp);
        }
    }
    td_optimizer_destroy(a);
    td_module_destroy(ddp);
    CHECK_OK(td_destroy_process_group());
}

RANKS(steps_in_backward_of_1, .ranks = 1)
{
    steps_in_backward(true);
}

RANKS(steps_in_backward_of_2, .ranks = 2)
{
    steps_in_backward(true);
}

RANKS(steps_in_backward_of_4, .ranks = 4)
{
    steps_in_backward(false);
}

/* ---- What shards are ----------------------------------------------------------------------------------------- */

RANKS(parameters_are_shards, .ranks = 3)
{
    CHECK_OK(td_init_process_group(NULL));
    td_module *model = td_fsdp(make_net(), &(td_fsdp_options){.min_parameters = 400});
    int64_t mine = 0, whole = 0;
    td_state *state = td_module_parameters(model);
    for (int i = 0; i < td_state_count(state); i++) {
        const td_shard *shard = td_tensor_shard(td_state_tensor(state, i));
        CHECK(shard != NULL && td_tensor_ndim(td_state_tensor(state, i)) == 1);
        int64_t numel = 1;
        for (int d = 0; d < shard->ndim; d++)
            numel *= shard->shape[d];
        whole += numel;
        mine += td_tensor_numel(td_state_tensor(state, i));
    }
    td_state_destroy(state);
    int64_t sum = mine;
    CHECK_OK(td_group_all_reduce(&sum, &sum, 1, TD_I64, TD_SUM, NULL, NULL));
    CHECK(sum == whole);
    CHECK(mine < whole / 2);
    td_fsdp_stats stats;
    CHECK_OK(td_fsdp_get_stats(model, &stats));
    CHECK(stats.parameters == whole && stats.shared_memory);
    td_module_destroy(model);
    CHECK_OK(td_destroy_process_group());
}

RANKS(bytes_that_move, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    for (int shared = 0; shared < 2; shared++) {
        td_module *model = td_fsdp(
            td_sequential(td_linear(IN, WIDE), td_relu(), td_linear(WIDE, WIDE),
                          td_linear(WIDE, OUT), NULL),
            &(td_fsdp_options){.min_parameters = 100, .no_shared_memory = !shared});
        td_optimizer *sgd = td_sgd(model, &(td_sgd_options){.lr = 0.1});
        train(model, sgd, &(struct job){.steps = 4, .parts = 1});
        td_fsdp_stats stats;
        CHECK_OK(td_fsdp_get_stats(model, &stats));
        CHECK(stats.passes == 4 && stats.whole_bytes == 0);
        int64_t half = 4 * stats.parameters * 4 / 2; /* bytes of all steps: (N - 1) / N of them */
        CHECK(llabs(stats.reduced_bytes - half) < half / 10);
        CHECK(shared ? stats.gathered_bytes == 0 : stats.gathered_bytes == 2 * stats.reduced_bytes);
        td_optimizer_destroy(sgd);
        td_module_destroy(model);
    }
    CHECK_OK(td_destroy_process_group());
}

/* Bytes of pages that tensors of this process have, or had. */
static size_t pages(void)
{
    struct stat info;
    CHECK(!fstat(td__arena_fd(td__arena_default()), &info));
    return (size_t)info.st_blocks * 512;
}

static void step_of_ones(td_module *model, td_optimizer *sgd, int64_t width)
{
    TD_SCOPE;
    CHECK_OK(td_optimizer_zero_grad(sgd));
    td_tensor *y = td_forward(model, td_ones(SHAPE(2, width), TD_F32, NULL));
    CHECK_OK(td_backward(td_mean(td_mul(y, y))));
    CHECK_OK(td_optimizer_step(sgd));
}

/* Units of 4 MiB: two have whole gradients at a time, and what the whole model had before does not stay. */
RANKS(pages_of_a_rank, .ranks = 4)
{
    enum { SIDE = 1024, UNITS = 8 };
    CHECK_OK(td_init_process_group(NULL));
    td_manual_seed(3);
    td_module *net = td_sequential(td_linear(SIDE, SIDE), NULL);
    for (int i = 1; i < UNITS; i++) {
        char name[16];
        snprintf(name, sizeof name, "%d", i);
        CHECK_OK(td_module_add_child(net, name, td_linear(SIDE, SIDE)));
    }
    const size_t unit = 4 * (SIDE * SIDE + SIDE);
    CHECK(pages() >= UNITS * unit);
    td_module *model = td_fsdp(net, &(td_fsdp_options){.min_parameters = SIDE});
    td_optimizer *sgd = td_sgd(model, &(td_sgd_options){.lr = 0.1, .momentum = 0.9});
    for (int step = 0; step < 3; step++)
        step_of_ones(model, sgd, SIDE);
    td_memory_stats memory;
    CHECK_OK(td_device_reset_peak(td_device_get("cpu")));
    step_of_ones(model, sgd, SIDE);
    CHECK_OK(td_device_memory_stats(td_device_get("cpu"), &memory));
    td_fsdp_stats stats;
    CHECK_OK(td_fsdp_get_stats(model, &stats));
    CHECK(stats.shared_memory && stats.whole_bytes_peak <= 2 * unit);
    CHECK((size_t)memory.allocated_peak <= 4 * unit + 2 * unit + ((size_t)1 << 20));
    CHECK(pages() <= (size_t)memory.allocated_peak + unit / 2);
    td_optimizer_destroy(sgd);
    td_module_destroy(model);
    CHECK_OK(td_destroy_process_group());
}

RANKS(writes, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    td_module *model = td_fsdp(make_net(), &(td_fsdp_options){.min_parameters = 400});
    td_tensor *weight = td_module_parameter(model, "0.weight");
    for (int write = 0; write < 2; write++) {
        CHECK_OK(td_fsdp_gather_begin(model, write));
        CHECK(td_tensor_ndim(weight) == 2 && td_tensor_numel(weight) == IN * WIDE);
        {
            TD_NO_GRAD;
            CHECK_OK(td_fill_(weight, write ? 7 : 9));
        }
        CHECK_FAILS(td_fsdp_gather_begin(model, false), TD_ERR_STATE, "already");
        CHECK_OK(td_fsdp_gather_end(model));
        CHECK(td_tensor_ndim(weight) == 1 && td_tensor_numel(weight) < IN * WIDE);
    }
    CHECK_FAILS(td_fsdp_gather_end(model), TD_ERR_STATE, "not called");
    const float *mine = td_tensor_data(weight);
    for (int64_t i = 0; i < td_tensor_numel(weight); i++)
        CHECK(mine[i] == 7);
    {
        TD_SCOPE;
        CHECK(td_sum(weight) == NULL);
        CHECK(strstr(td_last_error(), "\"0.weight\"") != NULL);
    }
    td_module_destroy(model);
    CHECK_OK(td_destroy_process_group());
}

/* ---- Trouble ----------------------------------------------------------------------------------------------- */

/* Skips its second child where its flag says so. */
static td_tensor *skip_forward(td_module *module, td_tensor *const *inputs, int count)
{
    (void)count;
    td_tensor *x = td_forward(td_child(module, 0), inputs[0]);
    if (!*(bool *)td_module_data(module))
        x = td_forward(td_child(module, 1), x);
    return td_forward(td_child(module, 2), x);
}

static const td_module_ops skip_ops = {
    .name = "Skip", .data_size = sizeof(bool), .forward = skip_forward};

static void skip(bool shared)
{
    CHECK_OK(td_init_process_group(NULL));
    td_manual_seed(3);
    td_module *net = td_module_create(&skip_ops);
    td_module_add_child(net, "a", td_linear(IN, IN));
    td_module_add_child(net, "b", td_linear(IN, IN));
    td_module_add_child(net, "c", td_linear(IN, IN));
    *(bool *)td_module_data(net) = td_get_rank(NULL) == 1;
    td_module *model = td_fsdp(
        td_module_finish(net),
        &(td_fsdp_options){.min_parameters = 100, .no_shared_memory = !shared});
    CHECK(model != NULL);
    {
        TD_SCOPE;
        td_tensor *y = td_forward(model, data(0, 0, 0));
        td_status status = y ? td_backward(td_sum(y)) : td_last_status();
        CHECK(status != TD_OK);
        CHECK(strstr(td_last_error(), "\"b\"") || strstr(td_last_error(), "\"c\""));
        CHECK(strstr(td_last_error(), "rank") != NULL);
    }
    td_module_destroy(model);
    td_destroy_process_group();
}

RANKS(a_unit_that_one_rank_skips, .ranks = 2)
{
    skip(true);
}

RANKS(a_unit_that_one_rank_skips_private, .ranks = 2)
{
    skip(false);
}

RANKS(bad_arguments, .ranks = 2)
{
    CHECK(td_fsdp(NULL, NULL) == NULL);
    CHECK(td_fsdp(td_linear(2, 2), NULL) == NULL); /* no group */
    CHECK_OK(td_init_process_group(NULL));
    CHECK(td_fsdp(td_linear(2, 2), &(td_fsdp_options){.strategy = 9}) == NULL);
    CHECK(td_last_status() == TD_ERR_INVALID);
    CHECK(td_fsdp(td_linear(2, 2),
                  &(td_fsdp_options){.strategy = TD_HYBRID_SHARD, .shard_size = 3}) == NULL);
    CHECK(strstr(td_last_error(), "shard_size") != NULL);
    CHECK(td_fsdp(td_linear(2, 2 + td_get_rank(NULL)), NULL) == NULL);
    CHECK(td_last_status() == TD_ERR_MISMATCH && strstr(td_last_error(), "weight"));
    CHECK(!td_fsdp_set_sync(NULL, true) && !td_is_fsdp(NULL));
    CHECK_FAILS(td_fsdp_get_stats(NULL, NULL), TD_ERR_INVALID, "NULL");
    CHECK_OK(td_destroy_process_group());
}

/* More ranks than elements, and a model without parameters. */
RANKS(small_models, .ranks = 4)
{
    CHECK_OK(td_init_process_group(NULL));
    for (int shared = 0; shared < 2; shared++) {
        td_fsdp_options options = {.no_shared_memory = !shared, .min_parameters = 1};
        td_module *model = td_fsdp(td_sequential(td_linear(1, 1), td_relu(), td_linear(1, 2), NULL),
                                   &options);
        CHECK(model != NULL);
        td_optimizer *adam = td_adam(model, NULL);
        for (int step = 0; step < 3; step++) {
            TD_SCOPE;
            CHECK_OK(td_optimizer_zero_grad(adam));
            CHECK_OK(td_backward(td_sum(td_forward(model, td_full(SHAPE(3, 1), 1, TD_F32, NULL)))));
            CHECK_OK(td_clip_grad_norm_(model, 1, NULL, NULL));
            CHECK_OK(td_optimizer_step(adam));
        }
        td_optimizer_destroy(adam);
        td_module_destroy(model);
        model = td_fsdp(td_sequential(td_relu(), td_relu(), NULL), &options);
        CHECK(model != NULL);
        {
            TD_SCOPE;
            CHECK(td_forward(model, td_full(SHAPE(3, 1), 1, TD_F32, NULL)) != NULL);
        }
        td_module_destroy(model);
    }
    CHECK_OK(td_destroy_process_group());
}

/* ---- Mixed precision ------------------------------------------------------------------------------------------ */

RANKS(mixed_precision, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    const struct job job = {.steps = 30, .parts = 2, .adam = true};
    td_module *ddp = td_ddp(make_net(), NULL);
    td_optimizer *a = make_optimizer(ddp, &job);
    train(ddp, a, &job);
    td_module *kept = NULL;
    td_optimizer *last = NULL;
    for (int way = 0; way < 4; way++) {
        td_fsdp_options options = {.min_parameters = 400,
                                   .mixed_precision = true,
                                   .param_dtype = TD_BF16,
                                   .reduce_dtype = way == 3 ? TD_BF16 : TD_F32,
                                   .strategy = way == 2 ? TD_SHARD_GRAD_OP : TD_FULL_SHARD,
                                   .no_shared_memory = way == 1};
        td_module *model = td_fsdp(make_net(), &options);
        td_optimizer *b = make_optimizer(model, &job);
        train(model, b, &job);
        CHECK(td_tensor_dtype(td_module_parameter(model, "0.weight")) == TD_F32);
        compare(ddp, model, 0.2); /* about the same training */
        if (kept && way < 3) {    /* the same bits in all of these */
            td_tensor *x = td_module_parameter(kept, "0.weight");
            td_tensor *y = td_module_parameter(model, "0.weight");
            CHECK(td_tensor_numel(x) == td_tensor_numel(y));
            CHECK(!memcmp(td_tensor_data(x), td_tensor_data(y), 4 * (size_t)td_tensor_numel(x)));
        }
        td_optimizer_destroy(last);
        td_module_destroy(kept);
        kept = model;
        last = b;
    }
    td_optimizer_destroy(last);
    td_module_destroy(kept);
    td_optimizer_destroy(a);
    td_module_destroy(ddp);
    CHECK_OK(td_destroy_process_group());
}

RANKS(evaluation, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    td_module *plain = make_net();
    for (int shared = 0; shared < 2; shared++) {
        td_module *model = td_fsdp(
            make_net(), &(td_fsdp_options){.min_parameters = 400, .no_shared_memory = !shared});
        for (int i = 0; i < 3; i++) {
            TD_SCOPE;
            TD_NO_GRAD;
            td_tensor *x = data(i, 0, 0), *a = td_forward(plain, x), *b = td_forward(model, x);
            CHECK(a && b && !memcmp(td_tensor_data(a), td_tensor_data(b), 4 * BATCH * OUT));
        }
        td_fsdp_stats stats;
        CHECK_OK(td_fsdp_get_stats(model, &stats));
        CHECK(stats.whole_bytes == 0);
        td_module_destroy(model);
    }
    td_module_destroy(plain);
    CHECK_OK(td_destroy_process_group());
}
