/* The bits of td_fsdp() are those of td_ddp(), and close to those of one process with the whole batch: every strategy, with
 * clipping and accumulation, over shared memory, TCP and two hosts. 12 steps; with --long 200. */
#include "runner.h"

#include <tandem/tandem.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { IN = 37, WIDE = 130, OUT = 5, ROWS = 4 };

static int steps(void)
{
    return td_test_is_long() ? 200 : 12;
}

/* ---- The model, and its data ------------------------------------------------------------------------------------ */

/* Called twice in a pass. */
static td_tensor *twice_forward(td_module *module, td_tensor *const *inputs, int count)
{
    (void)count;
    td_tensor *x = td_f_tanh(td_forward(td_child(module, 0), inputs[0]));
    return td_f_tanh(td_forward(td_child(module, 0), x));
}

static const td_module_ops twice_ops = {.name = "Twice", .forward = twice_forward};

static td_module *make_net(void)
{
    td_manual_seed(17);
    td_module *twice = td_module_create(&twice_ops);
    td_module_add_child(twice, "inner", td_linear(WIDE, WIDE));
    return td_sequential(td_linear(IN, WIDE), td_layer_norm(WIDE), td_relu(),
                         td_module_finish(twice),
                         td_sequential(td_linear(WIDE, WIDE), td_relu(), td_linear(WIDE, 3), NULL),
                         td_linear(3, OUT), NULL);
}

/* The rows of the ranks from `first` on. */
static td_tensor *data(int step, int part, int first, int ranks)
{
    td_tensor *x = td_empty(TD_SHAPE((int64_t)ranks * ROWS, IN), TD_F32, NULL);
    for (int r = 0; r < ranks; r++) {
        td_generator *generator = td_generator_create(
            (uint64_t)((step * 8 + part) * 64 + first + r), NULL);
        CHECK_OK(td_normal_(td_narrow(x, 0, (int64_t)r * ROWS, ROWS), 0, 1, generator));
        td_generator_destroy(generator);
    }
    return x;
}

/* ---- Training --------------------------------------------------------------------------------------------------- */

struct job {
    int parts;
    bool silent; /* only the last part is reduced */
    bool adam;
    bool alone; /* one process with the batch of all ranks */
};

static td_optimizer *make_optimizer(td_module *model, const struct job *job)
{
    return job->adam ? td_adam(model, &(td_adam_options){.lr = 0.003})
                     : td_sgd(model, &(td_sgd_options){.lr = 0.05, .momentum = 0.9});
}

static void train(td_module *model, const struct job *job)
{
    int rank = job->alone ? 0 : td_get_rank(NULL);
    int ranks = job->alone ? td_get_world_size(NULL) : 1;
    td_optimizer *optimizer = make_optimizer(model, job);
    for (int step = 0; step < steps(); step++) {
        CHECK_OK(td_optimizer_zero_grad(optimizer));
        for (int part = 0; part < job->parts; part++) {
            TD_SCOPE;
            td_no_sync scope = {0};
            if (job->silent && part + 1 < job->parts)
                scope = td_no_sync_begin(model);
            td_tensor *y = td_forward(model, data(step, part, rank, ranks));
            CHECK(y);
            td_tensor *target = td_f_tanh(td_narrow(data(step, part, rank, ranks), 1, 0, OUT));
            y = td_sub(y, target);
            CHECK_OK(td_backward(td_mean(td_mul(y, y))));
            td_no_sync_end(&scope);
        }
        CHECK_OK(td_clip_grad_norm_(model, 0.25, NULL, NULL));
        CHECK_OK(td_optimizer_step(optimizer));
    }
    td_optimizer_destroy(optimizer);
}

/* The greatest difference of the parameters; -1: the bits are the same. */
static double difference(td_module *other, td_module *fsdp)
{
    double most = -1;
    CHECK_OK(td_fsdp_gather_begin(fsdp, false));
    td_state *a = td_module_parameters(other), *b = td_module_parameters(fsdp);
    CHECK(td_state_count(a) == td_state_count(b));
    for (int i = 0; i < td_state_count(b); i++) {
        const float *x = td_tensor_data(td_state_tensor(a, i));
        const float *y = td_tensor_data(td_state_tensor(b, i));
        int64_t count = td_tensor_numel(td_state_tensor(b, i));
        CHECK(count == td_tensor_numel(td_state_tensor(a, i)));
        for (int64_t e = 0; e < count; e++) {
            CHECK(isfinite(x[e]) && isfinite(y[e]));
            if (memcmp(&x[e], &y[e], 4))
                most = fmax(most, fabs((double)x[e] - (double)y[e]));
        }
    }
    td_state_destroy(a);
    td_state_destroy(b);
    CHECK_OK(td_fsdp_gather_end(fsdp));
    return most;
}

static const td_fsdp_options ways[] = {
    {.min_parameters = 400},
    {.min_parameters = 400, .no_shared_memory = true},
    {.min_parameters = 400, .strategy = TD_SHARD_GRAD_OP},
    {.min_parameters = 400, .strategy = TD_SHARD_GRAD_OP, .no_shared_memory = true},
    {.min_parameters = 400, .strategy = TD_NO_SHARD},
};

static void one_job(const struct job *job)
{
    td_module *ddp = td_ddp(make_net(), NULL), *alone = make_net();
    train(ddp, job);
    struct job whole = *job;
    whole.alone = true;
    whole.silent = false;
    train(alone, &whole);
    for (size_t way = 0; way < sizeof ways / sizeof *ways; way++) {
        td_module *fsdp = td_fsdp(make_net(), &ways[way]);
        CHECK(fsdp);
        train(fsdp, job);
        double apart = difference(ddp, fsdp);
        if (apart >= 0)
            fprintf(stderr, "way %d differs from DDP by %g\n", (int)way, apart);
        CHECK(apart < 0);
        apart = difference(alone, fsdp);
        if (apart > 1e-4)
            fprintf(stderr, "way %d differs from one process by %g\n", (int)way, apart);
        CHECK(apart <= 1e-4);
        td_module_destroy(fsdp);
    }
    td_module_destroy(ddp);
    td_module_destroy(alone);
}

static void same_bits(bool tcp)
{
    if (tcp)
        setenv("TANDEM_TRANSPORT", "tcp", 1);
    CHECK_OK(td_init_process_group(NULL));
    one_job(&(struct job){.parts = 2});
    if (td_get_world_size(NULL) < 8 || td_test_is_long()) {
        one_job(&(struct job){.parts = 2, .silent = true});
        one_job(&(struct job){.parts = 1, .adam = true});
    }
    CHECK_OK(td_destroy_process_group());
}

#define BITS(count)                                                                                \
    RANKS(shm_of_##count, .ranks = count, .deadline_s = 60)                                        \
    {                                                                                              \
        same_bits(false);                                                                          \
    }                                                                                              \
    RANKS(tcp_of_##count, .ranks = count, .deadline_s = 60)                                        \
    {                                                                                              \
        same_bits(true);                                                                           \
    }

BITS(1)
BITS(2)
BITS(3)
BITS(4)
BITS(8)

/* ---- Halves ------------------------------------------------------------------------------------------------------ */

/* The same bits again, over shared memory and without it. */
static void halves(td_dtype reduce)
{
    CHECK_OK(td_init_process_group(NULL));
    td_module *first = NULL;
    for (int run = 0; run < 4; run++) {
        td_fsdp_options options = ways[run % 4];
        options.mixed_precision = true;
        options.param_dtype = TD_BF16;
        options.reduce_dtype = reduce;
        td_module *model = td_fsdp(make_net(), &options);
        td_optimizer *adam = make_optimizer(model, &(struct job){.adam = true});
        for (int step = 0; step < steps(); step++) {
            TD_SCOPE;
            CHECK_OK(td_optimizer_zero_grad(adam));
            td_tensor *y = td_forward(model, data(step, 0, td_get_rank(NULL), 1));
            y = td_to_dtype(y, TD_F32);
            CHECK_OK(td_backward(td_mean(td_mul(y, y))));
            CHECK_OK(td_optimizer_step(adam));
        }
        td_optimizer_destroy(adam);
        td_state *state = td_module_parameters(model);
        for (int i = 0; first && i < td_state_count(state); i++) {
            td_tensor *x = td_state_tensor(state, i);
            td_tensor *y = td_module_parameter(first, td_state_name(state, i));
            CHECK(td_tensor_dtype(x) == TD_F32 && td_tensor_nbytes(x) == td_tensor_nbytes(y));
            CHECK(!td_tensor_numel(x) ||
                  !memcmp(td_tensor_data(x), td_tensor_data(y), td_tensor_nbytes(x)));
        }
        td_state_destroy(state);
        if (first)
            td_module_destroy(model);
        else
            first = model;
    }
    td_module_destroy(first);
    CHECK_OK(td_destroy_process_group());
}

RANKS(bf16_again, .ranks = 3, .deadline_s = 60)
{
    halves(TD_F32);
}

RANKS(bf16_reduced_again, .ranks = 2, .deadline_s = 60)
{
    halves(TD_BF16);
}

/* ---- Two hosts --------------------------------------------------------------------------------------------------- */

static void two_hosts(td_fsdp_strategy strategy)
{
    const char *rank = getenv("RANK");
    setenv("TANDEM_HOST_ID", rank && atoi(rank) < 2 ? "one host" : "another", 1);
    CHECK_OK(td_init_process_group(NULL));
    const struct job job = {.parts = 2};
    td_module *ddp = td_ddp(make_net(), NULL);
    train(ddp, &job);
    for (int shared = 0; shared < 2; shared++) {
        td_fsdp_options options = {
            .strategy = strategy, .min_parameters = 400, .no_shared_memory = !shared};
        td_module *fsdp = td_fsdp(make_net(), &options);
        CHECK(fsdp);
        train(fsdp, &job);
        double apart = difference(ddp, fsdp);
        if (apart > 1e-6)
            fprintf(stderr, "it differs from DDP by %g\n", apart);
        CHECK(strategy == TD_HYBRID_SHARD ? apart <= 1e-6 : apart < 0);
        td_module_destroy(fsdp);
    }
    td_module_destroy(ddp);
    CHECK_OK(td_destroy_process_group());
}

RANKS(hybrid_on_two_hosts, .ranks = 4, .deadline_s = 60)
{
    two_hosts(TD_HYBRID_SHARD);
}

RANKS(full_shard_on_two_hosts, .ranks = 4, .deadline_s = 60)
{
    two_hosts(TD_FULL_SHARD);
}
