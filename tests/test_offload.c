/* Shards in host memory and in files have the bits that they have on the device: on the toy accelerator, whose memory the
 * host cannot touch and whose streams run late, and on the host. */
#include "offload_training.h"
#include "runner.h"
#include "toy_device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static td_device *toy(void)
{
    CHECK_OK(toy_register());
    toy_set_delay(3);
    return td_device_get("toy:0");
}

/* ---- Same bits ------------------------------------------------------------------------------------------------- */

/* What limits leave in each tier. */
static void check_places(const td_fsdp_offload *tiers, const td_fsdp_stats *stats, bool on_host)
{
    int64_t all = stats->shard_elements;
    int64_t elsewhere = stats->host_elements + stats->file_elements;
    CHECK(tiers->host_bytes == 1 ? stats->file_elements > 0 : true);
    CHECK(tiers->directory || stats->file_elements == 0);
    CHECK(tiers->device_bytes == 0 && !on_host ? elsewhere == all : true);
    CHECK(tiers->device_bytes > 0 && !on_host ? elsewhere > 0 && elsewhere < all : true);
    CHECK(on_host || (stats->offload_bytes > 0 && stats->offload_convert_ns > 0 &&
                      stats->offload_step_ns > 0));
    CHECK(stats->whole_bytes == 0);
}

static void check_same(const struct offload_job *job, const td_fsdp_options *options,
                       const struct offload_result *expected, const td_fsdp_offload *tiers)
{
    td_fsdp_options offloaded = *options;
    offloaded.offload = *tiers;
    struct offload_result result = offload_train(job, &offloaded);
    CHECK(result.bytes == expected->bytes);
    CHECK(result.norm == expected->norm);
    for (int i = 0; i < OFFLOAD_STEPS; i++)
        CHECK(result.losses[i] == expected->losses[i]);
    CHECK(!memcmp(result.bits, expected->bits, result.bytes));
    check_places(tiers, &result.stats, !strcmp(td_device_kind(job->device), "cpu"));
    free(result.bits);
}

/* The model needs 16 x 30,000 bytes over all ranks. */
static void same_in_all_tiers(const struct offload_job *job, const td_fsdp_options *options)
{
    bool on_host = !strcmp(td_device_kind(job->device), "cpu");
    size_t some = 250000 / (size_t)(options->strategy == TD_NO_SHARD ? 1 : td_get_world_size(NULL));
    const char *directory = td_test_temp_dir();
    const td_fsdp_offload tiers[] = {
        {.enabled = true},
        {.enabled = true, .host_bytes = 1, .directory = directory},
        {.enabled = true, .device_bytes = some, .host_bytes = some / 2, .directory = directory},
    };
    struct offload_result expected = offload_train(job, options);
    for (size_t i = 0; i < sizeof tiers / sizeof *tiers; i++)
        if (!on_host || tiers[i].directory)
            check_same(job, options, &expected, &tiers[i]);
    free(expected.bits);
    CHECK_EQ(td_test_count_files(directory), 0);
}

static const struct offload_job jobs[] = {
    {.parts = 2, .no_sync = true, .in_backward = true, .groups = true},
    {.parts = 2, .clip = 0.05, .groups = true},
    {.parts = 2, .no_sync = true, .scales = true, .clip = 0.05},
    {.parts = 1, .in_backward = true},
};

/* The first `count` of the jobs. */
static void some_jobs(td_device *device, td_fsdp_options options, int count)
{
    for (int i = 0; i < count; i++) {
        struct offload_job job = jobs[i];
        job.device = device;
        same_in_all_tiers(&job, &options);
    }
}

static void all_strategies(td_device *device, int count)
{
    CHECK_OK(td_init_process_group(NULL));
    static const td_fsdp_strategy strategies[] = {TD_FULL_SHARD, TD_SHARD_GRAD_OP, TD_NO_SHARD};
    for (int s = 0; s < 3; s++)
        some_jobs(device, (td_fsdp_options){.strategy = strategies[s], .min_parameters = 400},
                  s == 0 ? count : s);
    CHECK_OK(td_destroy_process_group());
}

/* Parameters in bf16 on the device, in f32 where they are stepped. */
static void mixed(td_device *device, td_dtype reduce, int count)
{
    CHECK_OK(td_init_process_group(NULL));
    some_jobs(device,
              (td_fsdp_options){.min_parameters = 400,
                                .mixed_precision = true,
                                .param_dtype = TD_BF16,
                                .reduce_dtype = reduce},
              count);
    CHECK_OK(td_destroy_process_group());
}

RANKS(toy_1, .ranks = 1, .deadline_s = 120)
{
    all_strategies(toy(), 4);
}

RANKS(toy_2, .ranks = 2, .deadline_s = 120)
{
    all_strategies(toy(), 3);
}

RANKS(toy_3, .ranks = 3, .deadline_s = 120)
{
    CHECK_OK(td_init_process_group(NULL));
    some_jobs(toy(), (td_fsdp_options){.min_parameters = 400}, 2);
    CHECK_OK(td_destroy_process_group());
}

RANKS(toy_mixed_1, .ranks = 1, .deadline_s = 120)
{
    mixed(toy(), TD_BF16, 4);
    mixed(toy(), TD_F32, 2);
}

RANKS(toy_mixed_2, .ranks = 2, .deadline_s = 120)
{
    mixed(toy(), TD_F32, 3);
}

RANKS(host_1, .ranks = 1, .deadline_s = 60)
{
    all_strategies(td_device_get("cpu"), 4);
}

RANKS(host_2, .ranks = 2, .deadline_s = 60)
{
    all_strategies(td_device_get("cpu"), 4);
}

RANKS(host_mixed_3, .ranks = 3, .deadline_s = 60)
{
    mixed(td_device_get("cpu"), TD_F32, 4);
}

/* One rank of each host has all, in the dtype of passes that is not that of the shards. */
RANKS(norm_of_replicas_in_mixed_precision, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    td_fsdp_options options = {.strategy = TD_NO_SHARD,
                               .min_parameters = 400,
                               .mixed_precision = true,
                               .param_dtype = TD_BF16,
                               .reduce_dtype = TD_F32};
    const struct offload_job job = {.device = td_device_get("cpu"), .parts = 1, .clip = 0.05};
    struct offload_result one = offload_train(&job, &options);
    options.strategy = TD_FULL_SHARD;
    struct offload_result other = offload_train(&job, &options);
    CHECK(one.norm == other.norm && one.losses[2] == other.losses[2]);
    free(one.bits);
    free(other.bits);
    CHECK_OK(td_destroy_process_group());
}

RANKS(toy_hybrid, .ranks = 4, .deadline_s = 120)
{
    CHECK_OK(td_init_process_group(NULL));
    const td_fsdp_options options = {
        .strategy = TD_HYBRID_SHARD, .shard_size = 2, .min_parameters = 400};
    same_in_all_tiers(&(struct offload_job){.device = toy(), .parts = 2, .clip = 0.05}, &options);
    same_in_all_tiers(&(struct offload_job){.device = toy(), .parts = 1, .in_backward = true},
                      &options);
    CHECK_OK(td_destroy_process_group());
}

RANKS(no_prefetch, .ranks = 2, .deadline_s = 60)
{
    CHECK_OK(td_init_process_group(NULL));
    same_in_all_tiers(&(struct offload_job){.device = toy(), .parts = 1},
                      &(td_fsdp_options){.min_parameters = 400, .no_prefetch = true});
    CHECK_OK(td_destroy_process_group());
}

/* ---- Units by hand ----------------------------------------------------------------------------------------------- */

/* A module that was sharded and has run becomes a unit of another one. */
RANKS(inner_units_of_a_call_before, .ranks = 2, .deadline_s = 60)
{
    CHECK_OK(td_init_process_group(NULL));
    td_device *device = toy();
    const struct offload_job job = {.device = device, .parts = 1};
    struct offload_result results[2];
    for (int offloads = 0; offloads < 2; offloads++) {
        td_fsdp_options options = {.offload.enabled = offloads};
        td_module *inner = td_fsdp(offload_net(device), &options);
        td_optimizer *adam = offload_optimizer(inner, &job);
        struct offload_result *result = &results[offloads];
        CHECK_OK(offload_step(inner, adam, NULL, &job, 0, &result->losses[0], NULL));
        td_module *outer = td_fsdp(td_sequential(inner, td_tanh(), NULL), &options);
        if (!outer)
            FAIL("%s", td_last_error());
        for (int step = 0; step < 2; step++)
            CHECK_OK(offload_step(outer, adam, NULL, &job, step, &result->losses[step], NULL));
        result->bits = offload_bits(outer, adam, &result->bytes);
        td_optimizer_destroy(adam);
        td_module_destroy(outer);
    }
    CHECK(results[0].bytes == results[1].bytes);
    CHECK(!memcmp(results[0].bits, results[1].bits, results[0].bytes));
    CHECK(results[0].losses[1] == results[1].losses[1]);
    free(results[0].bits);
    free(results[1].bits);
    CHECK_OK(td_destroy_process_group());
}

/* ---- Scopes, states and checkpoints -------------------------------------------------------------------------------- */

static td_module *make_offloaded(td_device *device, td_fsdp_options options)
{
    td_module *model = td_fsdp(offload_net(device), &options);
    if (!model)
        FAIL("%s", td_last_error());
    return model;
}

static const td_fsdp_offload *three_tiers(void)
{
    static td_fsdp_offload tiers;
    tiers = (td_fsdp_offload){.enabled = true,
                              .device_bytes = 60000,
                              .host_bytes = 60000,
                              .directory = td_test_temp_dir()};
    return &tiers;
}

RANKS(gathered_for_a_change, .ranks = 2, .deadline_s = 60)
{
    CHECK_OK(td_init_process_group(NULL));
    td_device *device = toy();
    const struct offload_job job = {.device = device, .parts = 1};
    struct offload_result results[2] = {0};
    for (int offloads = 0; offloads < 2; offloads++) {
        td_fsdp_options options = {.min_parameters = 400};
        if (offloads)
            options.offload = *three_tiers();
        td_module *model = make_offloaded(device, options);
        td_optimizer *adam = offload_optimizer(model, &job);
        for (int step = 0; step < 3; step++) {
            TD_SCOPE;
            CHECK_OK(
                offload_step(model, adam, NULL, &job, step, &results[offloads].losses[step], NULL));
            CHECK_OK(td_fsdp_gather_begin(model, true));
            td_tensor *weight = td_module_parameter(model, "3.2.weight");
            CHECK_EQ(td_tensor_ndim(weight), 2);
            CHECK(td_tensor_device(weight) == device);
            CHECK_OK(td_tensor_copy(td_detach(weight), td_mul_scalar(td_detach(weight), 0.5)));
            CHECK_OK(td_fsdp_gather_end(model));
        }
        results[offloads].bits = offload_bits(model, adam, &results[offloads].bytes);
        td_optimizer_destroy(adam);
        td_module_destroy(model);
    }
    CHECK(results[0].bytes == results[1].bytes);
    CHECK(!memcmp(results[0].bits, results[1].bits, results[0].bytes));
    free(results[0].bits);
    free(results[1].bits);
    CHECK_OK(td_destroy_process_group());
}

/* Passes without gradients gather, too, and free what they have gathered. */
RANKS(passes_without_gradients, .ranks = 2, .deadline_s = 60)
{
    CHECK_OK(td_init_process_group(NULL));
    td_device *device = toy();
    float results[2][30];
    for (int offloads = 0; offloads < 2; offloads++) {
        td_fsdp_options options = {.min_parameters = 400};
        if (offloads)
            options.offload = *three_tiers();
        td_module *model = make_offloaded(device, options);
        for (int pass = 0; pass < 3; pass++) {
            TD_SCOPE;
            TD_NO_GRAD;
            td_tensor *x = td_ones(TD_SHAPE(6, 24), TD_F32, td_device_get("cpu"));
            td_tensor *y = td_forward(model, td_tensor_to(x, device));
            y = td_contiguous(td_tensor_to(y, td_device_get("cpu")));
            CHECK(y != NULL && td_tensor_nbytes(y) == sizeof results[0]);
            memcpy(results[offloads], td_tensor_data(y), sizeof results[0]);
        }
        td_fsdp_stats stats;
        CHECK_OK(td_fsdp_get_stats(model, &stats));
        CHECK(stats.whole_bytes == 0);
        td_module_destroy(model);
    }
    CHECK(!memcmp(results[0], results[1], sizeof results[0]));
    CHECK_OK(td_destroy_process_group());
}

/* Saved from tiers, loaded without them, and the other way round; training goes on with the same bits. */
RANKS(sharded_checkpoints, .ranks = 2, .deadline_s = 60)
{
    CHECK_OK(td_init_process_group(NULL));
    td_device *device = toy();
    const struct offload_job job = {.device = device, .parts = 1, .clip = 0.05};
    td_fsdp_options options = {.min_parameters = 400}, tiers = options;
    tiers.offload = *three_tiers();
    char directory[300];
    snprintf(directory, sizeof directory, "%s/saved", td_test_temp_dir());
    for (int way = 0; way < 2; way++) {
        td_module *from = make_offloaded(device, way ? options : tiers);
        td_module *to = make_offloaded(device, way ? tiers : options);
        td_optimizer *a = offload_optimizer(from, &job), *b = offload_optimizer(to, &job);
        float loss[2];
        double norm[2];
        CHECK_OK(offload_step(from, a, NULL, &job, 0, &loss[0], &norm[0]));
        td_training saved = {.model = from, .optimizer = a}, loaded = {.model = to, .optimizer = b};
        CHECK_OK(td_training_save_sharded(directory, &saved, NULL, NULL));
        CHECK_OK(td_training_load_sharded(directory, &loaded, NULL));
        for (int step = 1; step < 3; step++) {
            CHECK_OK(offload_step(from, a, NULL, &job, step, &loss[0], &norm[0]));
            CHECK_OK(offload_step(to, b, NULL, &job, step, &loss[1], &norm[1]));
            CHECK(loss[0] == loss[1] && norm[0] == norm[1]);
        }
        size_t bytes[2];
        void *bits[] = {offload_bits(from, a, &bytes[0]), offload_bits(to, b, &bytes[1])};
        CHECK(bytes[0] == bytes[1] && !memcmp(bits[0], bits[1], bytes[0]));
        free(bits[0]);
        free(bits[1]);
        td_optimizer_destroy(a);
        td_optimizer_destroy(b);
        td_module_destroy(from);
        td_module_destroy(to);
    }
    CHECK_OK(td_destroy_process_group());
}

/* ---- Staging ------------------------------------------------------------------------------------------------------- */

static int64_t pinned_after_training(int layers)
{
    td_device *device = toy();
    CHECK_OK(td_init_process_group(NULL));
    td_module *net = td_sequential(td_linear(64, 64), NULL);
    for (int i = 1; i < layers; i++)
        net = td_sequential(net, td_linear(64, 64), NULL);
    CHECK_OK(td_module_to(net, device));
    td_fsdp_options options = {.min_parameters = 4000,
                               .mixed_precision = true,
                               .param_dtype = TD_BF16,
                               .reduce_dtype = TD_F32,
                               .offload.enabled = true};
    td_module *model = td_fsdp(net, &options);
    if (!model)
        FAIL("%s", td_last_error());
    td_optimizer *adam = td_adam(model, NULL);
    CHECK_OK(td_optimizer_in_backward(model, adam));
    for (int step = 0; step < 3; step++) {
        TD_SCOPE;
        td_tensor *x = td_tensor_to(td_ones(TD_SHAPE(4, 64), TD_F32, td_device_get("cpu")), device);
        CHECK_OK(td_backward(td_mean(td_to_dtype(td_forward(model, x), TD_F32))));
    }
    td_optimizer_destroy(adam);
    td_module_destroy(model);
    CHECK_OK(td_destroy_process_group());
    return toy_pinned_bytes();
}

/* A unit has 4160 parameters: 8 KiB in bf16, and 16.25 KiB in f32, which take 16 KiB and 32 KiB. */
RANKS(staging_does_not_grow_with_the_model, .ranks = 1, .deadline_s = 60)
{
    CHECK(pinned_after_training(40) <= 3 * (16 << 10) + 4 * (32 << 10) + (64 << 10));
}

/* Host memory that is freed by the last pass is as much as there was. */
RANKS(device_keeps_nothing_of_offloaded_shards, .ranks = 1, .deadline_s = 60)
{
    td_device *device = toy();
    CHECK_OK(td_init_process_group(NULL));
    td_module *model = make_offloaded(
        device, (td_fsdp_options){.min_parameters = 400, .offload.enabled = true});
    const struct offload_job job = {.device = device, .parts = 1};
    td_optimizer *adam = offload_optimizer(model, &job);
    float loss;
    for (int step = 0; step < 2; step++)
        CHECK_OK(offload_step(model, adam, NULL, &job, step, &loss, NULL));
    td_memory_stats stats;
    CHECK_OK(td_device_memory_stats(device, &stats));
    CHECK(stats.allocated < 8192);
    td_optimizer_destroy(adam);
    td_module_destroy(model);
    CHECK_OK(td_destroy_process_group());
}
