/* Slices with td_fsdp(): the weights of every strategy, on any number of ranks, have the bits of td_ddp() with slices. */
#include "runner.h"
#include "toy_backend.h"
#include "toy_device.h"
#include "ways.h"

#include <tandem/tandem.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SLICES = 8, EACH = 3, IN = 17, WIDE = 45, OUT = 6, STEPS = 4 };

/* ---- Data, and the model ----------------------------------------------------------------------------------------- */

static float number(unsigned *state)
{
    *state = *state * 1664525u + 1013904223u;
    return (float)(*state >> 8) / (float)(1 << 24) - 0.5f;
}

static td_tensor *data(int64_t step, int slice)
{
    td_tensor *tensor = td_empty(TD_SHAPE(EACH, IN), TD_F32, NULL);
    unsigned state = (unsigned)(step * 1009 + slice * 31 + 5);
    float *x = td_tensor_data(tensor);
    for (int i = 0; i < EACH * IN; i++)
        x[i] = number(&state);
    return tensor;
}

struct kind {
    bool norm, dropout, half, adam, checkpoint;
    double clip;
    const char *backend; /* of the group that trains */
    const char *device;
    const char *unused; /* a module that no pass uses */
};

static td_tensor *run_child(td_module *module, td_tensor *const *inputs, int count)
{
    (void)count;
    return td_forward(td_child(module, 0), inputs[0]);
}

static const td_module_ops first_ops = {.name = "First", .forward = run_child};

/* The second child is in no pass. */
static td_module *first_of_two(void)
{
    td_module *module = td_module_create(&first_ops);
    td_module_add_child(module, "used", td_linear(WIDE, WIDE));
    td_module_add_child(module, "never", td_linear(WIDE, WIDE));
    return td_module_finish(module);
}

static td_module *make_net(const struct kind *kind)
{
    td_manual_seed(23);
    td_module *net = td_sequential(
        td_linear(IN, WIDE), td_relu(), kind->norm ? td_batch_norm1d(WIDE) : td_layer_norm(WIDE),
        td_dropout(kind->dropout ? 0.3 : 0), kind->unused ? first_of_two() : td_linear(WIDE, WIDE),
        td_relu(), td_linear(WIDE, OUT), NULL);
    if (kind->half)
        CHECK_OK(td_module_to_dtype(net, TD_BF16));
    if (kind->device)
        CHECK_OK(td_module_to(net, td_device_get(kind->device)));
    return net;
}

/* ---- Training --------------------------------------------------------------------------------------------------- */

static td_tensor *forward(td_tensor *const *inputs, int count, void *model)
{
    (void)count;
    return td_forward(model, inputs[0]);
}

static void pass(td_module *model, const struct kind *kind, int64_t step, int slice)
{
    TD_SCOPE;
    td_tensor *x = data(step, slice);
    if (kind->device)
        x = td_tensor_to(x, td_device_get(kind->device));
    if (kind->half)
        x = td_to_dtype(x, TD_BF16);
    td_tensor *y = kind->checkpoint ? td_checkpoint(forward, model, (td_tensor *[]){x}, 1)
                                    : td_forward(model, x);
    CHECK(y != NULL);
    y = td_to_dtype(y, TD_F32);
    CHECK_OK(td_backward(td_mean(td_mul(y, y))));
}

static td_optimizer *make_optimizer(td_module *model, const struct kind *kind)
{
    return kind->adam ? td_adam(model, &(td_adam_options){.lr = 0.01})
                      : td_sgd(model, &(td_sgd_options){.lr = 0.5, .momentum = 0.9});
}

static void train(td_module *model, const struct kind *kind)
{
    td_optimizer *optimizer = make_optimizer(model, kind);
    for (int64_t step = 0; step < STEPS; step++) {
        td_slices slices = td_slices_begin(model, step);
        int computed = 0;
        while (td_slices_next(&slices)) {
            CHECK(slices.slice == slices.first + computed++ * slices.stride);
            CHECK(slices.total == SLICES && slices.slice < SLICES);
            pass(model, kind, step, slices.slice);
        }
        CHECK_OK(td_slices_status(&slices));
        CHECK(computed == slices.count);
        if (kind->clip > 0)
            CHECK_OK(td_clip_grad_norm_(model, kind->clip, NULL, NULL));
        CHECK_OK(td_optimizer_step(optimizer));
    }
    td_optimizer_destroy(optimizer);
}

static uint64_t add_state(uint64_t hash, td_state *state)
{
    CHECK(state != NULL);
    for (int i = 0; i < td_state_count(state); i++) {
        TD_SCOPE;
        td_tensor *tensor = td_tensor_to(td_contiguous(td_state_tensor(state, i)),
                                         td_device_get("cpu"));
        const unsigned char *bytes = td_tensor_data(tensor);
        for (size_t b = 0; b < td_tensor_nbytes(tensor); b++)
            hash = (hash ^ bytes[b]) * UINT64_C(1099511628211);
    }
    td_state_destroy(state);
    return hash;
}

/* Of whole parameters and, as rank 0 has them, buffers. */
static uint64_t digest(td_module *model, int rank)
{
    uint64_t hash = UINT64_C(1469598103934665603);
    if (td_is_fsdp(model))
        CHECK_OK(td_fsdp_gather_begin(model, false));
    hash = add_state(hash, td_module_parameters(model));
    if (td_is_fsdp(model))
        CHECK_OK(td_fsdp_gather_end(model));
    return rank == 0 ? add_state(hash, td_module_buffers(model)) : hash;
}

/* What rank 0 has after training on ranks 0 … size - 1, on all of them; `options` NULL: with td_ddp(). */
static uint64_t train_on(int size, const struct kind *kind, const td_fsdp_options *options)
{
    int ranks[16];
    td_group *group = NULL;
    for (int r = 0; r < size; r++)
        ranks[r] = r;
    CHECK_OK(td_new_group(ranks, size, &(td_group_options){.backend = kind->backend}, &group));
    uint64_t result = 0;
    if (td_test_rank() < size) {
        td_fsdp_options sharded = options ? *options : (td_fsdp_options){0};
        sharded.group = group;
        sharded.slices = SLICES;
        td_ddp_options whole = {
            .group = group, .slices = SLICES, .find_unused_parameters = kind->unused};
        td_module *model = options ? td_fsdp(make_net(kind), &sharded)
                                   : td_ddp(make_net(kind), &whole);
        CHECK(model != NULL);
        train(model, kind);
        result = digest(model, td_test_rank());
        td_module_destroy(model);
    }
    CHECK_OK(td_group_destroy(group));
    CHECK_OK(td_group_broadcast(&result, 1, TD_U64, 0, NULL, NULL));
    return result;
}

static const td_fsdp_options ways[] = {
    {.min_parameters = 400},
    {.min_parameters = 400, .no_shared_memory = true},
    {.min_parameters = 400, .strategy = TD_SHARD_GRAD_OP, .no_shared_memory = true},
    {.min_parameters = 400, .strategy = TD_NO_SHARD},
    {.min_parameters = 400, .strategy = TD_HYBRID_SHARD, .shard_size = 2},
};

static void same_on_all_sizes(const struct kind *kind)
{
    static const int sizes[] = {1, 2, 3, 4, 5, 8};
    uint64_t expected = train_on(1, kind, NULL);
    for (int i = 0; i < 6; i++)
        for (size_t way = 0; way < sizeof ways / sizeof *ways && sizes[i] <= td_test_size();
             way++) {
            if (ways[way].shard_size && sizes[i] % ways[way].shard_size)
                continue;
            uint64_t result = train_on(sizes[i], kind, &ways[way]);
            if (result != expected)
                fprintf(stderr, "way %d on %d ranks has other bits than td_ddp()\n", (int)way,
                        sizes[i]);
            CHECK(result == expected);
        }
}

RANKS(same_bits_of_8, .ranks = 8, .deadline_s = 60)
{
    CHECK_OK(td_init_process_group(NULL));
    same_on_all_sizes(&(struct kind){.norm = true, .dropout = true, .clip = 0.01});
    CHECK_OK(td_destroy_process_group());
}

RANKS(same_bits_of_3, .ranks = 3, .deadline_s = 60)
{
    CHECK_OK(td_init_process_group(NULL));
    same_on_all_sizes(&(struct kind){.dropout = true, .adam = true});
    same_on_all_sizes(&(struct kind){.half = true, .norm = true});
    same_on_all_sizes(&(struct kind){.checkpoint = true, .dropout = true, .clip = 0.01});
    same_on_all_sizes(&(struct kind){.unused = "4.never", .dropout = true});
    CHECK_OK(td_destroy_process_group());
}

RANKS(same_bits_over_tcp, .ranks = 5, .deadline_s = 60)
{
    open_world(&tcp, 0);
    same_on_all_sizes(&(struct kind){.norm = true, .dropout = true, .clip = 0.01});
    CHECK_OK(td_destroy_process_group());
}

RANKS(same_bits_on_hosts, .ranks = 5, .deadline_s = 60)
{
    open_world(&(struct way){.hosts = "abbba"}, 0);
    same_on_all_sizes(&(struct kind){.norm = true, .clip = 0.01});
    CHECK_OK(td_destroy_process_group());
}

RANKS(same_bits_on_two_hosts, .ranks = 8, .deadline_s = 60)
{
    open_world(&(struct way){.hosts = "aaaabbbb"}, 0);
    same_on_all_sizes(&(struct kind){.half = true});
    same_on_all_sizes(&(struct kind){.adam = true});
    CHECK_OK(td_destroy_process_group());
}

/* A backend whose order of sums is not known, and an accelerator on which everything comes late. */
RANKS(same_bits_on_backend, .ranks = 4, .deadline_s = 60)
{
    CHECK_OK(toy_backend_register());
    CHECK_OK(td_init_process_group(NULL));
    same_on_all_sizes(&(struct kind){.norm = true, .clip = 0.01, .backend = "toy"});
    CHECK_OK(td_destroy_process_group());
    toy_backend_unregister();
}

RANKS(same_bits_on_device, .ranks = 3, .deadline_s = 60)
{
    CHECK_OK(toy_register());
    toy_set_delay(1);
    CHECK_OK(td_init_process_group(NULL));
    same_on_all_sizes(&(struct kind){.norm = true, .dropout = true, .device = "toy:0"});
    CHECK_OK(td_destroy_process_group());
}

/* ---- Other places and dtypes ---------------------------------------------------------------------------------------- */

/* The ranks of a host have the shards, and several hosts the same ones. */
RANKS(hybrid_on_hosts, .ranks = 6, .deadline_s = 60)
{
    open_world(&(struct way){.hosts = "aabbcc"}, 0);
    const struct kind kind = {.norm = true, .dropout = true};
    uint64_t expected = train_on(1, &kind, NULL);
    for (int shared = 0; shared < 2; shared++)
        CHECK(train_on(6, &kind,
                       &(td_fsdp_options){.min_parameters = 400,
                                          .strategy = TD_HYBRID_SHARD,
                                          .no_shared_memory = !shared}) == expected);
    CHECK_OK(td_destroy_process_group());
}

/* Halves are not those of td_ddp(), but the same on any number of ranks. */
RANKS(mixed_precision, .ranks = 4, .deadline_s = 60)
{
    CHECK_OK(td_init_process_group(NULL));
    const struct kind kind = {.dropout = true, .clip = 0.01};
    static const td_dtype reduce[] = {TD_F32, TD_BF16};
    uint64_t results[2];
    for (int d = 0; d < 2; d++) {
        for (int size = 1; size <= 4; size++)
            for (size_t way = 0; way < sizeof ways / sizeof *ways; way++) {
                td_fsdp_options options = ways[way];
                options.mixed_precision = true;
                options.param_dtype = TD_BF16;
                options.reduce_dtype = reduce[d];
                if (options.shard_size && size % options.shard_size)
                    continue;
                uint64_t result = train_on(size, &kind, &options);
                if (size == 1 && way == 0)
                    results[d] = result;
                CHECK(result == results[d]);
            }
    }
    CHECK(results[0] == results[1]); /* halves are added up in f32 */
    CHECK(results[0] != train_on(1, &kind, NULL));
    CHECK_OK(td_destroy_process_group());
}

RANKS(offload, .ranks = 3, .deadline_s = 60)
{
    CHECK_OK(toy_register());
    toy_set_delay(3);
    CHECK_OK(td_init_process_group(NULL));
    struct kind kind = {.adam = true, .clip = 0.01};
    td_fsdp_options options = {.min_parameters = 400,
                               .offload = {.enabled = true, .host_bytes = 1, .directory = "."}};
    CHECK(train_on(3, &kind, &options) == train_on(1, &kind, NULL));
    kind.device = "toy:0";
    uint64_t expected = train_on(1, &kind, NULL);
    CHECK(train_on(3, &kind, &options) == expected);
    options.offload = (td_fsdp_offload){.enabled = true};
    CHECK(train_on(3, &kind, &options) == expected);
    CHECK(train_on(1, &kind, &options) == expected);
    CHECK_OK(td_destroy_process_group());
}

/* ---- Memory ----------------------------------------------------------------------------------------------------------- */

/* Between the passes of a step, a rank has shards of sums, and no whole gradients. */
RANKS(memory, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    const struct kind kind = {0};
    for (int shared = 0; shared < 2; shared++) {
        td_module *model = td_fsdp(make_net(&kind), &(td_fsdp_options){.min_parameters = 400,
                                                                       .no_shared_memory = !shared,
                                                                       .slices = SLICES});
        td_slices slices = td_slices_begin(model, 0);
        while (td_slices_next(&slices)) {
            pass(model, &kind, 0, slices.slice);
            td_fsdp_stats stats;
            CHECK_OK(td_fsdp_get_stats(model, &stats));
            CHECK(stats.whole_bytes == 0);
            td_state *state = td_module_parameters(model);
            for (int i = 0; i < td_state_count(state); i++) {
                td_tensor *shard = td_state_tensor(state, i), *grad = td_tensor_grad(shard);
                bool last = slices.slice + slices.stride >= SLICES;
                CHECK(last ? grad && td_tensor_numel(grad) == td_tensor_numel(shard) : !grad);
            }
            td_state_destroy(state);
        }
        CHECK_OK(td_slices_status(&slices));
        td_module_destroy(model);
    }
    CHECK_OK(td_destroy_process_group());
}

/* ---- Errors ----------------------------------------------------------------------------------------------------------- */

/* Runs its first child, and in slices of its choice the second one. */
static int other_slice;

static td_tensor *choose_child(td_module *module, td_tensor *const *inputs, int count)
{
    (void)count;
    return td_forward(td_child(module, other_slice), inputs[0]);
}

static const td_module_ops choice_ops = {.name = "Choice", .forward = choose_child};

/* Rank 1 shadows a pass with other units than those of its own last one. */
RANKS(other_units, .ranks = 3)
{
    CHECK_OK(td_init_process_group(NULL));
    td_manual_seed(3);
    td_module *choice = td_module_create(&choice_ops);
    td_module_add_child(choice, "a", td_linear(IN, IN));
    td_module_add_child(choice, "b", td_linear(IN, IN));
    td_module *model = td_fsdp(td_module_finish(choice),
                               &(td_fsdp_options){.min_parameters = 10, .slices = 4});
    CHECK(model != NULL);
    td_slices slices = td_slices_begin(model, 0);
    td_status failed = TD_OK;
    while (td_slices_next(&slices)) {
        TD_SCOPE;
        other_slice = slices.slice == 3;
        td_tensor *y = td_forward(model, data(0, slices.slice));
        failed = y ? td_backward(td_mean(td_mul(y, y))) : TD_ERR_STATE;
        if (failed)
            break;
    }
    if (!failed)
        failed = td_slices_status(&slices);
    CHECK(failed == TD_ERR_MISMATCH);
    CHECK_CONTAINS(td_last_error(), "whose first parameter is");
    td_module_destroy(model);
    CHECK_OK(td_destroy_process_group());
}

RANKS(errors, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    const struct kind kind = {.norm = true};
    CHECK(!td_fsdp(make_net(&kind), &(td_fsdp_options){.slices = 3}));
    CHECK_CONTAINS(td_last_error(), "power of two");
    CHECK(!td_fsdp(make_net(&kind), &(td_fsdp_options){.slices = 1}));
    CHECK_CONTAINS(td_last_error(), "too few for 2 ranks");

    td_module *plain = td_fsdp(make_net(&kind), &ways[0]);
    td_slices step = td_slices_begin(plain, 0);
    CHECK(!td_slices_next(&step) && td_slices_status(&step) == TD_ERR_INVALID);
    CHECK_CONTAINS(td_last_error(), "`slices` of td_fsdp()");
    td_module_destroy(plain);

    td_fsdp_options options = ways[1];
    options.slices = SLICES;
    td_module *model = td_fsdp(make_net(&kind), &options);
    {
        TD_SCOPE;
        CHECK(!td_forward(model, data(0, 0)));
        CHECK_CONTAINS(td_last_error(), "begins with td_slices_begin()");
        step = td_slices_begin(model, 0);
        CHECK(td_slices_next(&step));
        CHECK(!td_slices_next(&step) && td_slices_status(&step) == TD_ERR_STATE);
        CHECK_CONTAINS(td_last_error(), "had no backward pass");
        step = td_slices_begin(model, 0);
        CHECK(td_slices_next(&step));
        TD_NO_SYNC(model);
        CHECK(!td_forward(model, data(0, 0)));
        CHECK_CONTAINS(td_last_error(), "without sync");
    }
    step = td_slices_begin(model, 0);
    CHECK(td_slices_next(&step));
    pass(model, &kind, 0, 0);
    {
        TD_SCOPE;
        td_tensor *y = td_forward(model, data(0, 0));
        CHECK(y != NULL && td_backward(td_mean(y)) == TD_ERR_STATE);
        CHECK_CONTAINS(td_last_error(), "has had its backward pass already");
    }
    /* What was left early does no harm, and evaluation between steps is as ever. */
    train(model, &kind);
    uint64_t result = digest(model, 1);
    td_module_train(model, false);
    {
        TD_SCOPE;
        TD_NO_GRAD;
        CHECK(td_forward(model, data(0, 0)) != NULL);
    }
    td_module_train(model, true);
    td_optimizer *sgd = td_sgd(model, &(td_sgd_options){.lr = 0.1});
    CHECK_OK(td_optimizer_in_backward(model, sgd));
    step = td_slices_begin(model, 2);
    CHECK(!td_slices_next(&step) && td_slices_status(&step) == TD_ERR_UNSUPPORTED);
    td_optimizer_destroy(sgd);
    td_module_destroy(model);

    model = td_fsdp(make_net(&kind), &options);
    train(model, &kind);
    CHECK(digest(model, 1) == result);
    td_module_destroy(model);
    CHECK_OK(td_destroy_process_group());
}
