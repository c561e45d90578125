/* Slices: weights have the same bits on any number of ranks. */
#include "runner.h"
#include "toy_backend.h"
#include "toy_device.h"
#include "ways.h"

#include "collective/tree.h"
#include "parallel/slices.h"

#include <tandem/tandem.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SHAPE(...) TD_SHAPE(__VA_ARGS__)

/* ---- The plan ---------------------------------------------------------------------------------------------- */

/* The sum as a text, such as ((0+1)+2), along the tree of ranks. */
static void ranks_text(int low, int count, char *text, size_t room)
{
    char left[2048], right[2048];
    if (count == 1) {
        snprintf(text, room, "%d", low);
        return;
    }
    int half = 1;
    while (2 * half < count)
        half *= 2;
    ranks_text(low, half, left, sizeof left);
    ranks_text(low + half, count - half, right, sizeof right);
    CHECK((size_t)snprintf(text, room, "(%s+%s)", left, right) < room);
}

/* … along that of slices; a rank with several parts appears several times. */
static void slices_text(int first, int count, int total, int size, char *text, size_t room)
{
    char left[2048], right[2048];
    for (int r = 0; r < size; r++) {
        struct td__slice_range range = td__slices_of(total, size, r), parts[TD__MAX_PARTS];
        int n = td__slice_parts(range, parts);
        for (int k = 0; k < n; k++)
            if (parts[k].first == first && parts[k].count == count) {
                snprintf(text, room, "%d", r);
                return;
            }
    }
    CHECK(count > 1);
    slices_text(first, count / 2, total, size, left, sizeof left);
    slices_text(first + count / 2, count / 2, total, size, right, sizeof right);
    CHECK((size_t)snprintf(text, room, "(%s+%s)", left, right) < room);
}

TEST(plans)
{
    int equal = 0, other = 0;
    for (int total = 1; total <= 64; total *= 2)
        for (int size = 1; size <= total; size++) {
            int next = 0;
            for (int r = 0; r < size; r++) {
                struct td__slice_range range = td__slices_of(total, size, r), parts[TD__MAX_PARTS];
                CHECK(range.first == next && range.count >= total / size);
                CHECK(range.count <= (total + size - 1) / size);
                int n = td__slice_parts(range, parts);
                for (int k = 0; k < n; k++) {
                    CHECK(parts[k].first == next && parts[k].first % parts[k].count == 0);
                    CHECK((parts[k].count & (parts[k].count - 1)) == 0);
                    next += parts[k].count;
                }
                CHECK(next == range.first + range.count);
            }
            CHECK(next == total);
            char ranks[2048], slices[2048];
            ranks_text(0, size, ranks, sizeof ranks);
            slices_text(0, total, total, size, slices, sizeof slices);
            CHECK(td__slices_are_ranks(total, size) == !strcmp(ranks, slices));
            *(strcmp(ranks, slices) ? &other : &equal) += 1;
        }
    CHECK(equal > 30 && other > 30);
    CHECK(td__slices_are_ranks(8, 4) && td__slices_are_ranks(4, 3) && !td__slices_are_ranks(8, 3));
}

/* ---- Data ---------------------------------------------------------------------------------------------------- */

enum { SLICES = 8, EACH = 3, IN = 17, WIDE = 45, OUT = 6, STEPS = 7 };

static float number(unsigned *state)
{
    *state = *state * 1664525u + 1013904223u;
    return (float)(*state >> 8) / (float)(1 << 24) - 0.5f;
}

static td_tensor *data(int64_t step, int slice, td_device *device)
{
    td_tensor *tensor = td_empty(SHAPE(EACH, IN), TD_F32, NULL);
    unsigned state = (unsigned)(step * 1009 + slice * 31 + 5);
    float *x = td_tensor_data(tensor);
    for (int i = 0; i < EACH * IN; i++)
        x[i] = number(&state);
    return device ? td_tensor_to(tensor, device) : tensor;
}

/* A text of all elements of the state, which are compared bit by bit. */
static uint64_t digest(td_state *state)
{
    uint64_t hash = UINT64_C(1469598103934665603);
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

/* ---- Training on some of the ranks ----------------------------------------------------------------------------- */

struct kind {
    bool norm, dropout, half, gaps;
    double clip;
    const char *backend; /* of the group that trains */
    const char *device;
};

static int current_slice;

/* Even slices use child 0, odd ones child 1, and none child 2. */
static td_tensor *gaps_forward(td_module *module, td_tensor *const *inputs, int count)
{
    (void)count;
    return td_forward(td_child(module, current_slice % 2), inputs[0]);
}

static const td_module_ops gaps_ops = {.name = "Gaps", .forward = gaps_forward};

static td_module *gaps(void)
{
    td_module *module = td_module_create(&gaps_ops);
    td_module_add_child(module, "even", td_linear(WIDE, WIDE));
    td_module_add_child(module, "odd", td_linear(WIDE, WIDE));
    td_module_add_child(module, "never", td_linear(WIDE, WIDE));
    return td_module_finish(module);
}

static td_module *make_net(const struct kind *kind)
{
    td_manual_seed(23);
    td_module *net = td_sequential(
        td_linear(IN, WIDE), td_relu(), kind->norm ? td_batch_norm1d(WIDE) : td_layer_norm(WIDE),
        td_dropout(kind->dropout ? 0.3 : 0), kind->gaps ? gaps() : td_linear(WIDE, WIDE), td_relu(),
        td_linear(WIDE, OUT), NULL);
    if (kind->half)
        CHECK_OK(td_module_to_dtype(net, TD_BF16));
    if (kind->device)
        CHECK_OK(td_module_to(net, td_device_get(kind->device)));
    return net;
}

static void pass(td_module *model, const struct kind *kind, int64_t step, int slice)
{
    TD_SCOPE;
    td_device *device = kind->device ? td_device_get(kind->device) : NULL;
    current_slice = slice;
    td_tensor *x = data(step, slice, device);
    td_tensor *y = td_forward(model, kind->half ? td_to_dtype(x, TD_BF16) : x);
    CHECK(y != NULL);
    CHECK_OK(td_backward(td_mean(td_mul(y, y))));
}

/* The state after some steps in slices, from step `from` on. */
static uint64_t train(td_module *model, const struct kind *kind, int64_t from, int64_t to)
{
    td_optimizer *sgd = td_sgd(model, &(td_sgd_options){.lr = 0.5, .momentum = 0.9});
    CHECK(sgd != NULL);
    for (int64_t step = from; step < to; step++) {
        td_slices slices = td_slices_begin(model, step);
        int computed = 0;
        while (td_slices_next(&slices)) {
            CHECK(slices.slice == slices.first + computed++ && slices.total == SLICES);
            pass(model, kind, step, slices.slice);
        }
        CHECK_OK(td_slices_status(&slices));
        CHECK(computed == slices.count);
        if (kind->clip > 0)
            CHECK_OK(td_clip_grad_norm_(model, kind->clip, NULL, NULL));
        CHECK_OK(td_optimizer_step(sgd));
    }
    td_optimizer_destroy(sgd);
    return digest(td_module_parameters(model));
}

static td_module *make_model(const struct kind *kind, td_group *group)
{
    td_ddp_options options = {.slices = SLICES,
                              .group = group,
                              .bucket_cap_mb = 0.005,
                              .find_unused_parameters = kind->gaps};
    td_module *model = td_ddp(make_net(kind), &options);
    CHECK(model != NULL);
    return model;
}

/* Rank 0's state after training on ranks 0 … size - 1; 0 on other ranks. */
static uint64_t train_on(int size, const struct kind *kind, uint64_t *buffers)
{
    int ranks[16];
    td_group *group = NULL;
    for (int r = 0; r < size; r++)
        ranks[r] = r;
    CHECK_OK(td_new_group(ranks, size, &(td_group_options){.backend = kind->backend}, &group));
    uint64_t result = 0;
    if (td_test_rank() < size) {
        td_module *model = make_model(kind, group);
        result = train(model, kind, 0, STEPS);
        *buffers = digest(td_module_buffers(model));
        td_module_destroy(model);
    }
    CHECK_OK(td_group_destroy(group));
    return result;
}

static void same_on_all_sizes(const struct kind *kind)
{
    static const int sizes[] = {1, 2, 3, 5, 8, 4, 7};
    uint64_t first = 0, first_buffers = 0;
    for (int i = 0; i < 7; i++) {
        if (sizes[i] > td_test_size())
            continue;
        uint64_t buffers = 0, result = train_on(sizes[i], kind, &buffers);
        uint64_t rank_0[2] = {result, buffers};
        CHECK_OK(td_group_broadcast(rank_0, 2, TD_U64, 0, NULL, NULL));
        if (td_test_rank() < sizes[i])
            CHECK(result == rank_0[0]);
        if (!first) {
            first = rank_0[0];
            first_buffers = rank_0[1];
        }
        if (rank_0[0] != first || rank_0[1] != first_buffers)
            fprintf(stderr, "%d ranks have other bits than one\n", sizes[i]);
        CHECK(rank_0[0] == first && rank_0[1] == first_buffers);
    }
}

static void all_kinds(void)
{
    same_on_all_sizes(&(struct kind){.dropout = true});
    same_on_all_sizes(&(struct kind){.norm = true, .dropout = true, .clip = 0.01});
    same_on_all_sizes(&(struct kind){.half = true});
    same_on_all_sizes(&(struct kind){.gaps = true});
}

RANKS(same_bits_of_8, .ranks = 8, .deadline_s = 60)
{
    CHECK_OK(td_init_process_group(NULL));
    all_kinds();
    CHECK_OK(td_destroy_process_group());
}

RANKS(same_bits_of_3, .ranks = 3)
{
    CHECK_OK(td_init_process_group(NULL));
    all_kinds();
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
    toy_set_delay(10);
    CHECK_OK(td_init_process_group(NULL));
    same_on_all_sizes(&(struct kind){.norm = true, .dropout = true, .device = "toy:0"});
    same_on_all_sizes(&(struct kind){.half = true, .clip = 0.01, .device = "toy:1"});
    CHECK_OK(td_destroy_process_group());
}

RANKS(same_bits_over_tcp, .ranks = 5, .deadline_s = 60)
{
    open_world(&tcp, 0);
    same_on_all_sizes(&(struct kind){.norm = true, .dropout = true, .clip = 0.01});
    same_on_all_sizes(&(struct kind){.half = true});
    CHECK_OK(td_destroy_process_group());
}

RANKS(same_bits_on_hosts, .ranks = 8, .deadline_s = 60)
{
    open_world(&(struct way){.hosts = "abbbccaa"}, 0);
    same_on_all_sizes(&(struct kind){.norm = true, .dropout = true, .clip = 0.01});
    CHECK_OK(td_destroy_process_group());
}

RANKS(same_bits_on_even_hosts, .ranks = 8, .deadline_s = 60)
{
    open_world(&(struct way){.hosts = "aabbccdd"}, 0);
    same_on_all_sizes(&(struct kind){.norm = true});
    CHECK_OK(td_destroy_process_group());
}

RANKS(same_bits_on_two_hosts, .ranks = 8, .deadline_s = 60)
{
    open_world(&(struct way){.hosts = "aaaabbbb"}, 0);
    same_on_all_sizes(&(struct kind){.half = true});
    CHECK_OK(td_destroy_process_group());
}

/* Random numbers do not depend on the rank's own seed, nor on what it has drawn before; and those of the program do not
 * depend on slices. */
RANKS(random_numbers, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    const struct kind kind = {.dropout = true};
    uint64_t results[2];
    for (int round = 0; round < 2; round++) {
        TD_SCOPE;
        td_module *model = make_model(&kind, NULL);
        td_manual_seed(100 + (uint64_t)td_test_rank() + 7 * (uint64_t)round);
        td_tensor *before = td_rand(SHAPE(3 + round), TD_F32, NULL);
        results[round] = train(model, &kind, 0, STEPS);
        float next = td_item(td_rand(SHAPE(1), TD_F32, NULL));
        td_manual_seed(100 + (uint64_t)td_test_rank() + 7 * (uint64_t)round);
        td_tensor *again = td_rand(SHAPE(3 + round), TD_F32, NULL);
        CHECK(before && again && next == (float)td_item(td_rand(SHAPE(1), TD_F32, NULL)));
        td_module_destroy(model);
    }
    CHECK(results[0] == results[1]);
    CHECK_OK(td_destroy_process_group());
}

/* Other steps draw other numbers, and a step can be made by itself. */
RANKS(steps_by_number, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    const struct kind kind = {.dropout = true};
    uint64_t results[3];
    for (int i = 0; i < 3; i++) {
        td_module *model = make_model(&kind, NULL);
        results[i] = train(model, &kind, i == 1 ? 5 : 4, i == 1 ? 6 : 5);
        td_module_destroy(model);
    }
    CHECK(results[0] == results[2] && results[0] != results[1]);
    CHECK_OK(td_destroy_process_group());
}

/* ---- td_reducer ------------------------------------------------------------------------------------------------ */

enum { COUNT = 1031 };

static void reduce_on(int size, float *result)
{
    int ranks[8] = {0, 1, 2, 3, 4, 5, 6, 7}, first, count;
    float mine[COUNT];
    td_group *group = NULL;
    CHECK_OK(td_new_group(ranks, size, NULL, &group));
    if (td_test_rank() < size) {
        td_reducer_buffer buffers[] = {{.count = 3, .dtype = TD_F64},
                                       {.data = mine, .count = COUNT, .dtype = TD_F32}};
        td_reducer *reducer = td_reducer_create(
            buffers, 2, &(td_reducer_options){.group = group, .slices = SLICES});
        CHECK(reducer != NULL);
        CHECK_OK(td_slice_range(SLICES, group, &first, &count));
        for (int step = 0; step < 3; step++)
            for (int slice = first; slice < first + count; slice++) {
                unsigned state = (unsigned)(step * 100 + slice);
                for (int i = 0; i < COUNT; i++)
                    mine[i] = number(&state);
                for (int i = 0; i < 3; i++)
                    ((double *)td_reducer_data(reducer, 0))[i] = slice + i;
                CHECK_OK(td_reducer_ready(reducer, 1));
                CHECK_OK(td_reducer_ready(reducer, 0));
                CHECK_OK(td_reducer_wait(reducer));
            }
        for (int i = 0; i < 3; i++)
            CHECK(((double *)td_reducer_data(reducer, 0))[i] == 3.5 + i);
        memcpy(result, mine, sizeof mine);
        td_reducer_destroy(reducer);
    }
    CHECK_OK(td_group_destroy(group));
}

RANKS(reducer, .ranks = 8)
{
    float first[COUNT], other[COUNT];
    CHECK_OK(td_init_process_group(NULL));
    memset(first, 0, sizeof first);
    reduce_on(1, first);
    CHECK_OK(td_group_broadcast(first, COUNT, TD_F32, 0, NULL, NULL));
    for (int size = 2; size <= 8; size++) {
        reduce_on(size, other);
        if (td_test_rank() < size)
            CHECK(!memcmp(first, other, sizeof first));
    }
    CHECK_OK(td_destroy_process_group());
}

/* ---- Samplers ---------------------------------------------------------------------------------------------------- */

/* The samples of each slice, in the order of (batch, slice), from the shares of all ranks. */
static void list_samples(td_dataset *dataset, int size, bool drop_last, bool apart, int64_t *all,
                         int64_t *length)
{
    *length = 0;
    for (int r = 0; r < size; r++) {
        td_sampler *sampler = td_distributed_sampler(dataset,
                                                     &(td_sampler_options){.seed = 3,
                                                                           .num_replicas = size,
                                                                           .rank = r,
                                                                           .drop_last = drop_last,
                                                                           .slices = SLICES,
                                                                           .slices_apart = apart,
                                                                           .slice_size = EACH});
        CHECK(sampler != NULL);
        int first = (int)((int64_t)SLICES * r / size);
        int count = (int)((int64_t)SLICES * (r + 1) / size) - first;
        if (apart)
            count = (SLICES - r + size - 1) / size;
        int64_t index;
        for (int64_t i = 0; td_sampler_next(sampler, &index); i++) {
            int64_t batch = i / (count * EACH), in = i % (count * EACH);
            int64_t slice = apart ? r + in / EACH * size : first + in / EACH;
            all[(batch * SLICES + slice) * EACH + in % EACH] = index;
            *length += 1;
        }
        td_sampler_release(sampler);
    }
}

TEST(samplers)
{
    enum { SIZE = 100, MOST = 5 * SLICES * EACH };
    TD_SCOPE;
    td_tensor *x = td_zeros(SHAPE(SIZE, 1), TD_F32, NULL);
    td_dataset *dataset = td_tensor_dataset(x, td_zeros(SHAPE(SIZE), TD_I64, NULL));
    int64_t first[MOST], other[MOST], length, expected;
    for (int drop = 0; drop < 2; drop++) {
        list_samples(dataset, 1, drop, false, first, &expected);
        CHECK(expected == (drop ? 4 : 5) * SLICES * EACH);
        bool seen[SIZE] = {false};
        for (int i = 0; i < 4 * SLICES * EACH; i++) {
            CHECK(first[i] >= 0 && first[i] < SIZE && !seen[first[i]]);
            seen[first[i]] = true;
        }
        for (int i = SIZE; i < expected; i++)
            CHECK(first[i] == first[i - SIZE]); /* padding repeats the epoch */
        for (int size = 2; size < 2 * SLICES; size++) {
            list_samples(dataset, 1 + size / 2, drop, size % 2, other, &length);
            CHECK(length == expected && !memcmp(first, other, (size_t)length * sizeof *first));
        }
    }
    CHECK(!td_distributed_sampler(
        dataset,
        &(td_sampler_options){.num_replicas = 3, .rank = 1, .slices = 6, .slice_size = 2}));
    CHECK_CONTAINS(td_last_error(), "power of two");
    CHECK(!td_distributed_sampler(
        dataset, &(td_sampler_options){.num_replicas = 3, .rank = 1, .slices = 8}));
    CHECK_CONTAINS(td_last_error(), "0 samples");
    td_dataset_release(dataset);
}

/* ---- Errors ------------------------------------------------------------------------------------------------------- */

RANKS(errors, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    const struct kind kind = {.norm = true};
    int first, count;
    CHECK_FAILS(td_slice_range(6, NULL, &first, &count), TD_ERR_INVALID, "power of two");
    CHECK_FAILS(td_slice_range(1, NULL, &first, &count), TD_ERR_INVALID, "too few for 2 ranks");
    CHECK(!td_ddp(make_net(&kind), &(td_ddp_options){.slices = 3}));
    CHECK_CONTAINS(td_last_error(), "power of two");
    CHECK(!td_ddp(make_net(&kind), &(td_ddp_options){.slices = 4, .hook = td_hook_bf16()}));
    CHECK_CONTAINS(td_last_error(), "without a communication hook");

    td_module *plain = td_ddp(make_net(&kind), NULL);
    td_slices step = td_slices_begin(plain, 0);
    CHECK(!td_slices_next(&step) && td_slices_status(&step) == TD_ERR_INVALID);
    td_module_destroy(plain);

    td_module *model = make_model(&kind, NULL);
    CHECK_FAILS(td_ddp_set_hook(model, td_hook_bf16()), TD_ERR_INVALID, "without a communication");
    {
        TD_SCOPE;
        CHECK(!td_forward(model, data(0, 0, NULL)));
        CHECK_CONTAINS(td_last_error(), "begins with td_slices_begin()");
        step = td_slices_begin(model, 0);
        CHECK(td_slices_next(&step));
        CHECK(!td_slices_next(&step) && td_slices_status(&step) == TD_ERR_STATE);
        CHECK_CONTAINS(td_last_error(), "had no backward pass");
        step = td_slices_begin(model, 0);
        CHECK(td_slices_next(&step));
        TD_NO_SYNC(model);
        CHECK(!td_forward(model, data(0, 0, NULL)));
        CHECK_CONTAINS(td_last_error(), "without sync");
    }
    /* What was left early does no harm, and evaluation between steps is as ever. */
    uint64_t result = train(model, &kind, 0, 2);
    td_module_train(model, false);
    {
        TD_SCOPE;
        TD_NO_GRAD;
        CHECK(td_forward(model, data(0, 0, NULL)) != NULL);
    }
    td_module_train(model, true);
    td_module_destroy(model);
    model = make_model(&kind, NULL);
    CHECK(train(model, &kind, 0, 2) == result);
    td_optimizer *sgd = td_sgd(model, &(td_sgd_options){.lr = 0.1});
    CHECK_OK(td_optimizer_in_backward(model, sgd));
    step = td_slices_begin(model, 2);
    CHECK(!td_slices_next(&step) && td_slices_status(&step) == TD_ERR_UNSUPPORTED);
    td_optimizer_destroy(sgd);
    td_module_destroy(model);
    CHECK_OK(td_destroy_process_group());
}
