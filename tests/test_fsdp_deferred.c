/* Deferred initialisation of sharded models: the bits of the whole model, in the memory of a shard and one parameter. */
#include "runner.h"
#include "toy_device.h"

#include <tandem/tandem.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { ROWS = 6, IN = 24, WIDE = 65, CLASSES = 7, TOKENS = 40 };

/* ---- A model ----------------------------------------------------------------------------------------------- */

/* A module of the program: draws of several kinds, changes in place, f64, a buffer that is not saved. */
static td_tensor *own_forward(td_module *self, td_tensor *const *inputs, int count)
{
    (void)count;
    td_tensor *x = td_matmul(inputs[0], td_param(self, 0));
    x = td_add(x, td_to_dtype(td_param(self, 1), TD_F32));
    return td_mul(x, td_buffer(self, 0));
}

static const td_module_ops own_ops = {.name = "Own", .forward = own_forward};

static td_module *own(void)
{
    TD_SCOPE;
    td_module *self = td_module_create(&own_ops);
    td_tensor *weight = td_module_new_parameter(self, "weight", TD_SHAPE(WIDE, WIDE), TD_F32);
    td_tensor *shift = td_module_new_parameter(self, "shift", TD_SHAPE(WIDE), TD_F64);
    CHECK_OK(td_init_trunc_normal(weight, 0, 0.05, -0.1, 0.1));
    {
        TD_NO_GRAD;
        CHECK_OK(td_init_normal(shift, 0, 1));
        CHECK_OK(td_mul_scalar_(shift, 0.01));
        CHECK_OK(td_tensor_copy(td_select(weight, 1, 3), td_rand(TD_SHAPE(WIDE), TD_F32, NULL)));
    }
    CHECK_OK(td_module_add_buffer(self, "factor", td_rand(TD_SHAPE(WIDE), TD_F32, NULL), false));
    return td_module_finish(self);
}

static td_tensor *net_forward(td_module *self, td_tensor *const *inputs, int count)
{
    (void)count;
    td_tensor *x = inputs[0];
    for (int i = 0; i < td_child_count(self); i++)
        x = td_forward(td_child(self, i), x);
    return x;
}

static const td_module_ops net_ops = {.name = "Net", .forward = net_forward};

/* "last.weight" is the weight of "first.0", a frozen module, and one that is ignored. */
static td_module *make_net(td_device *device, uint64_t seed)
{
    td_manual_seed(seed);
    TD_DEVICE_SCOPE(device);
    td_module *net = td_module_create(&net_ops);
    td_module_add_child(net, "first", td_sequential(td_linear(WIDE, IN), td_tanh(), NULL));
    td_module_add_child(net, "norm", td_batch_norm1d(IN));
    td_module_add_child(net, "up", td_linear(IN, WIDE));
    td_module_add_child(net, "own", own());
    td_module_add_child(net, "frozen", td_linear(WIDE, WIDE));
    td_module_add_child(net, "ignored", td_linear(WIDE, WIDE));
    td_module_add_child(net, "last",
                        td_linear_with(WIDE, IN, &(td_linear_options){.no_bias = true}));
    CHECK_OK(td_module_set_tensor(net, "last.weight", td_module_parameter(net, "first.0.weight")));
    CHECK_OK(td_module_requires_grad_(td_module_find(net, "frozen"), false));
    return td_module_finish(net);
}

static td_tensor *input(int step)
{
    td_generator *generator = td_generator_create((uint64_t)(step * 16 + td_get_rank(NULL)), NULL);
    td_tensor *x = td_empty(TD_SHAPE(ROWS, WIDE), TD_F32, NULL);
    CHECK_OK(td_normal_(x, 0, 1, generator));
    td_generator_destroy(generator);
    return x;
}

static void train(td_module *model, int steps)
{
    td_optimizer *adam = td_adam(model, &(td_adam_options){.lr = 0.01});
    td_device *device = td_tensor_device(td_module_buffer(model, "norm.running_mean"));
    for (int step = 0; step < steps; step++) {
        TD_SCOPE;
        CHECK_OK(td_optimizer_zero_grad(adam));
        td_tensor *y = td_forward(model, td_tensor_to(input(step), device));
        if (!y)
            fprintf(stderr, "%s\n", td_last_error());
        CHECK(y);
        CHECK_OK(td_backward(td_mean(td_mul(y, y))));
        CHECK_OK(td_clip_grad_norm_(model, 0.5, NULL, NULL));
        CHECK_OK(td_optimizer_step(adam));
    }
    td_optimizer_destroy(adam);
}

/* The same bits in the shards, and in what is whole. */
static void check_same(td_state *a, td_state *b)
{
    CHECK(a && b && td_state_count(a) == td_state_count(b));
    for (int i = 0; i < td_state_count(a); i++) {
        TD_SCOPE;
        TD_NO_GRAD;
        td_tensor *x = td_tensor_to(td_detach(td_state_tensor(a, i)), td_device_get("cpu"));
        td_tensor *y = td_tensor_to(td_detach(td_state_tensor(b, i)), td_device_get("cpu"));
        CHECK_STR(td_state_name(a, i), td_state_name(b, i));
        CHECK(x && y && td_tensor_dtype(x) == td_tensor_dtype(y));
        CHECK(td_tensor_nbytes(x) == td_tensor_nbytes(y));
        if (td_tensor_nbytes(x) &&
            memcmp(td_tensor_data(x), td_tensor_data(y), td_tensor_nbytes(x)))
            fprintf(stderr, "%s has other bits\n", td_state_name(a, i));
        CHECK(!td_tensor_nbytes(x) ||
              !memcmp(td_tensor_data(x), td_tensor_data(y), td_tensor_nbytes(x)));
    }
    td_state_destroy(a);
    td_state_destroy(b);
}

static void check_same_modules(td_module *a, td_module *b)
{
    check_same(td_module_parameters(a), td_module_parameters(b));
    check_same(td_module_buffers(a), td_module_buffers(b));
}

static void check_next_number(float expected)
{
    TD_SCOPE;
    CHECK((float)td_item(td_rand(TD_SHAPE(1), TD_F32, NULL)) == expected);
}

static float next_number(void)
{
    float number;
    {
        TD_SCOPE;
        number = (float)td_item(td_rand(TD_SHAPE(1), TD_F32, NULL));
    }
    return number;
}

static const char *const ignored[] = {"ignored"};
static const td_fsdp_options ways[] = {
    {.min_parameters = 400},
    {.min_parameters = 400, .no_shared_memory = true},
    {.min_parameters = 400, .strategy = TD_SHARD_GRAD_OP, .ignore = ignored, .ignore_count = 1},
    {.min_parameters = 400, .strategy = TD_NO_SHARD},
    {.strategy = TD_FULL_SHARD,
     .mixed_precision = true,
     .param_dtype = TD_BF16,
     .reduce_dtype = TD_F32},
};
enum { WAYS = sizeof ways / sizeof *ways };

static void every_way(void)
{
    CHECK_OK(td_init_process_group(NULL));
    for (int way = 0; way < WAYS; way++) {
        td_fsdp_options options = ways[way];
        if (td_get_world_size(NULL) == 4 && way == 3)
            options = (td_fsdp_options){
                .strategy = TD_HYBRID_SHARD, .shard_size = 2, .min_parameters = 400};
        td_module *whole = make_net(td_device_get("cpu"), 7);
        float number = next_number();
        whole = td_fsdp(whole, &options);
        /* Rank 0's seed is that of all; ignored parameters are each rank's own. */
        bool own_seed = !options.ignore_count && td_get_rank(NULL) > 0;
        td_module *deferred = make_net(td_device_get("meta"), own_seed ? 99 : 7);
        if (!own_seed)
            check_next_number(number);
        CHECK(td_tensor_is_meta(td_module_parameter(deferred, "up.weight")));
        deferred = td_fsdp(deferred, &options);
        if (!deferred)
            fprintf(stderr, "%s\n", td_last_error());
        CHECK(whole && deferred);
        check_same(td_module_parameters(whole), td_module_parameters(deferred));
        bool mixed = options.mixed_precision; /* the model's f64 parameters are not for it */
        if (!mixed) {
            train(whole, 3);
            train(deferred, 3);
            check_same_modules(whole, deferred);
        }
        td_module_destroy(whole);
        td_module_destroy(deferred);
    }
    CHECK_OK(td_destroy_process_group());
}

RANKS(bits_of_1, .ranks = 1)
{
    every_way();
}

RANKS(bits_of_2, .ranks = 2)
{
    every_way();
}

RANKS(bits_of_3, .ranks = 3)
{
    every_way();
}

RANKS(bits_of_4, .ranks = 4)
{
    every_way();
}

RANKS(bits_over_tcp, .ranks = 3)
{
    setenv("TANDEM_TRANSPORT", "tcp", 1);
    every_way();
}

/* ---- Some ranks have memory -------------------------------------------------------------------------------- */

static void some_ranks(int with_memory)
{
    CHECK_OK(td_init_process_group(NULL));
    int rank = td_get_rank(NULL);
    for (int way = 0; way < WAYS; way++) {
        if (ways[way].ignore_count)
            continue;
        td_module *whole = td_fsdp(make_net(td_device_get("cpu"), 7), &ways[way]);
        td_device *device = td_device_get(rank == with_memory ? "cpu" : "meta");
        td_module *other = td_fsdp(make_net(device, rank ? 55 : 7), &ways[way]);
        CHECK(whole && other);
        check_same(td_module_parameters(whole), td_module_parameters(other));
        td_module_destroy(whole);
        td_module_destroy(other);
    }
    CHECK_OK(td_destroy_process_group());
}

RANKS(rank_0_has_memory, .ranks = 3)
{
    some_ranks(0);
}

RANKS(another_rank_has_memory, .ranks = 3)
{
    some_ranks(2);
}

/* ---- On an accelerator --------------------------------------------------------------------------------------- */

RANKS(on_an_accelerator, .ranks = 2)
{
    CHECK_OK(toy_register());
    toy_set_delay(0);
    td_device *toy = td_device_get("toy:0");
    CHECK_OK(td_init_process_group(NULL));
    for (int moved = 0; moved < 2; moved++) {
        /* Drawn there, or on the host and then moved. */
        td_device *first = moved ? td_device_get("cpu") : toy;
        td_module *whole = make_net(first, 7);
        CHECK_OK(td_module_to(whole, toy));
        td_module *deferred = make_net(td_device_meta(first), 7);
        CHECK_OK(td_module_to(deferred, td_device_meta(toy)));
        whole = td_fsdp(whole, &ways[0]);
        deferred = td_fsdp(deferred, &ways[0]);
        CHECK(whole && deferred);
        CHECK(td_tensor_device(td_module_parameter(deferred, "up.weight")) == toy);
        check_same(td_module_parameters(whole), td_module_parameters(deferred));
        train(whole, 2);
        train(deferred, 2);
        check_same_modules(whole, deferred);
        td_module_destroy(whole);
        td_module_destroy(deferred);
    }
    CHECK_OK(td_destroy_process_group());
}

/* ---- Units by hand ------------------------------------------------------------------------------------------- */

RANKS(units_by_hand, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    td_module *models[2];
    for (int deferred = 0; deferred < 2; deferred++) {
        td_manual_seed(3);
        TD_DEVICE_SCOPE(td_device_get(deferred ? "meta" : "cpu"));
        td_module *a = td_linear(IN, WIDE), *b = td_linear(WIDE, WIDE),
                  *c = td_linear(WIDE, CLASSES);
        b = td_fsdp(b, NULL);
        c = td_fsdp(c, &(td_fsdp_options){.strategy = TD_SHARD_GRAD_OP});
        models[deferred] = td_fsdp(td_sequential(a, b, c, NULL), NULL);
        CHECK(models[deferred]);
    }
    check_same_modules(models[0], models[1]);
    td_module_destroy(models[0]);
    td_module_destroy(models[1]);
    CHECK_OK(td_destroy_process_group());
}

/* ---- Checkpoints --------------------------------------------------------------------------------------------- */

RANKS(a_checkpoint_into_shards, .ranks = 3)
{
    CHECK_OK(td_init_process_group(NULL));
    char path[64];
    snprintf(path, sizeof path, "/tmp/td_fsdp_deferred_%d", (int)getppid());
    td_module *whole = td_fsdp(make_net(td_device_get("cpu"), 7), &ways[0]);
    train(whole, 2);
    td_state *state = td_module_state(whole);
    CHECK_OK(td_save_sharded(path, state, NULL, 0, NULL, NULL));
    td_state_destroy(state);
    td_fsdp_options options = {.min_parameters = 400, .no_shared_memory = true, .no_init = true};
    td_module *deferred = td_fsdp(make_net(td_device_get("meta"), 7), &options);
    CHECK(deferred);
    td_tensor *weight = td_module_parameter(deferred, "up.weight"); /* not initialised: zeros */
    for (int64_t i = 0; i < td_tensor_numel(weight); i++)
        CHECK(((const float *)td_tensor_data(weight))[i] == 0);
    state = td_module_state(deferred);
    CHECK_OK(td_load_sharded(path, state, NULL));
    td_state_destroy(state);
    check_same(td_module_parameters(whole), td_module_parameters(deferred));
    td_module_destroy(whole);
    td_module_destroy(deferred);
    CHECK_OK(td_barrier(NULL, NULL));
    char command[96];
    snprintf(command, sizeof command, "rm -r %s", path);
    if (td_get_rank(NULL) == 0)
        CHECK(system(command) == 0);
    CHECK_OK(td_destroy_process_group());
}

/* A file of the whole model, with a checksum and from elsewhere; each rank its part. Also into DDP's kind of shards. */
RANKS(a_file_into_shards, .ranks = 3)
{
    CHECK_OK(td_init_process_group(NULL));
    char path[64];
    snprintf(path, sizeof path, "/tmp/td_fsdp_file_%d", (int)getppid());
    td_module *whole = td_fsdp(make_net(td_device_get("cpu"), 7), &ways[0]);
    train(whole, 2);
    td_state *state = td_module_state(whole), *full = NULL;
    CHECK_OK(td_save_full(path, state, NULL));
    CHECK_OK(td_gather_state(state, NULL, &full));
    td_state_destroy(state);
    CHECK_OK(td_barrier(NULL, NULL));
    for (int foreign = 0; foreign < 2; foreign++) {
        if (foreign &&
            td_get_rank(NULL) == 0) { /* without its checksum: as another library writes it */
            FILE *file = fopen(path, "r+b");
            uint64_t length;
            CHECK(file && fread(&length, 1, 8, file) == 8);
            char *text = calloc((size_t)length + 1, 1);
            CHECK(text && fread(text, 1, (size_t)length, file) == length);
            char *notes = strstr(text, "\"tandem.");
            for (; notes; notes = strstr(notes, "\"tandem."))
                memcpy(notes, "\"another", 8);
            CHECK(!fseek(file, 8, SEEK_SET) && fwrite(text, 1, (size_t)length, file) == length);
            CHECK(!fclose(file));
            free(text);
        }
        CHECK_OK(td_barrier(NULL, NULL));
        td_fsdp_options options = {.min_parameters = 400, .no_init = true};
        td_module *deferred = td_fsdp(make_net(td_device_get("meta"), 7), &options);
        CHECK_OK(td_load_module(path, deferred, NULL));
        check_same(td_module_parameters(whole), td_module_parameters(deferred));
        train(deferred, 1); /* it is seen by the other ranks */
        td_module_destroy(deferred);
    }
    /* A whole state, on rank 0 only: the others have shards of the same. */
    if (td_get_rank(NULL) == 0) {
        td_module *plain = make_net(td_device_get("meta"), 7);
        CHECK_OK(td_module_load_state(plain, full, true));
        td_module_destroy(plain);
        CHECK_OK(td_module_load_state(whole, full, true));
        td_module *other = td_linear(3, 3);
        CHECK_FAILS(td_load_module(path, other, NULL), TD_ERR_INVALID, "unexpected");
        td_module_destroy(other);
    }
    td_state_destroy(full);
    td_module_destroy(whole);
    td_module *wrong = td_fsdp(td_linear(WIDE, IN + 1), NULL);
    state = td_state_create();
    TD_SCOPE;
    CHECK_OK(td_state_add(state, "weight", td_zeros(TD_SHAPE(IN, WIDE), TD_F32, NULL)));
    CHECK_FAILS(td_module_load_state(wrong, state, false), TD_ERR_INVALID,
                "weight ([24, 65], not [25, 65])");
    td_state_destroy(state);
    td_module_destroy(wrong);
    if (td_get_rank(NULL) == 0)
        CHECK(!unlink(path));
    CHECK_OK(td_destroy_process_group());
}

/* ---- Memory -------------------------------------------------------------------------------------------------- */

static int64_t peak_kib(void)
{
    char line[128];
    int64_t kib = -1;
    FILE *file = fopen("/proc/self/status", "r");
    CHECK(file);
    while (fgets(line, sizeof line, file))
        if (!strncmp(line, "VmHWM:", 6))
            kib = atoll(line + 6);
    fclose(file);
    CHECK(kib > 0);
    return kib;
}

/* 24 parameters of 6 MiB: a rank has 48 MiB of them, and needs little more. Sanitizers need much more. */
static void memory(bool shared)
{
    enum { LAYERS = 24, SIDE = 1254, MIB = 1024 };
    CHECK_OK(td_init_process_group(NULL));
    int64_t before = peak_kib();
    td_module *layers[LAYERS];
    {
        TD_DEVICE_SCOPE(td_device_get("meta"));
        for (int i = 0; i < LAYERS; i++)
            layers[i] = td_linear_with(SIDE, SIDE, &(td_linear_options){.no_bias = true});
    }
    td_module *net = td_sequential_of(layers, LAYERS);
    CHECK(net);
    int64_t made = peak_kib();
    td_module *model = td_fsdp(
        net, &(td_fsdp_options){.min_parameters = 1000, .no_shared_memory = !shared});
    CHECK(model);
    int64_t after = peak_kib();
    if (td_test_slowness() == 1) {
        CHECK(made - before < 2 * MIB);
        CHECK(after - before < (48 + 6 + 6) * MIB);
    }
    td_module_destroy(model);
    CHECK_OK(td_destroy_process_group());
}

RANKS(memory_of_a_rank, .ranks = 3)
{
    memory(false);
}

RANKS(shared_memory_of_a_rank, .ranks = 3)
{
    memory(true);
}

/* ---- Errors -------------------------------------------------------------------------------------------------- */

RANKS(errors, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    td_module *net = make_net(td_device_get("meta"), 7);
    CHECK(td_ddp(net, NULL) == NULL);
    CHECK(td_last_status() == TD_ERR_STATE);
    CHECK_CONTAINS(td_last_error(), "\"first.0.weight\"");
    CHECK_CONTAINS(td_last_error(), "td_module_materialize()");
    TD_SCOPE;
    CHECK_FAILS(
        td_all_reduce(td_zeros(TD_SHAPE(3), TD_F32, td_device_get("meta")), TD_SUM, NULL, NULL),
        TD_ERR_STATE, "td_module_materialize()");
    /* Another shape on one rank. */
    td_module *model;
    {
        TD_DEVICE_SCOPE(td_device_get("meta"));
        model = td_fsdp(td_linear(4, 4 + td_get_rank(NULL)), NULL);
    }
    CHECK(!model && td_last_status() == TD_ERR_MISMATCH);
    /* Values that were dropped. */
    net = td_linear(4, 4);
    CHECK_OK(td_module_to(net, td_device_get("meta")));
    CHECK(td_fsdp(net, NULL) == NULL);
    CHECK_CONTAINS(td_last_error(), "initial values of the parameter");
    CHECK_CONTAINS(td_last_error(), "dropped its values");
    CHECK_OK(td_destroy_process_group());
}
