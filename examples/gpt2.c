/* Trains GPT-2, from scratch or from Hugging Face's weights, in one process or in several, and writes text with it:
 *
 *     gpt2 --data /usr/share/common-licenses/GPL-3
 *     gpt2 --data train.bin --from model.safetensors --device cuda --bf16 --batch 16
 *     tdrun --standalone --nproc-per-node=8 gpt2 --data train.bin --size 124M --device cuda --bf16 --batch 64
 *     tdrun --standalone --nproc-per-node=8 gpt2 --data train.bin --size 1.5B --device cuda --bf16 --fsdp
 *
 * gpt2 --help lists the options, docs/gpt2.md explains them. The model is in gpt2_model.c. */
#include "gpt2.h"
#include "loss_curve.h"
#include "memory_curve.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>

struct run {
    struct gpt2_settings settings;
    struct gpt2_config config;
    td_device *device;
    bool bytes; /* tokens are bytes */
    int ranks, rank;

    td_module *gpt2;
    td_module *model; /* gpt2, sharded or not, or the module of td_ddp() around it */
    td_optimizer *optimizer;
    td_schedule *schedule;
    td_sampler *sampler;
    td_loader *loader;
    int64_t step, epoch;
    double lr; /* of the last step */

    td_tensor *tokens, *targets; /* batches of a step */
    td_tensor *loss;             /* of the last step */
    td_graph *graph;             /* what a step does on the device; NULL: not captured */
    td_tensor *
        recent; /* losses since the last line of progress, on the device: reading one would wait for it */
    int64_t recent_count;
    float *losses; /* of all steps from `first_step` on, up to the last line of progress */
    int64_t first_step, losses_count;

    struct memory_curve *memory; /* of this step; NULL: it is not drawn */

    double flops_per_token;
    double peak;               /* FLOP/s of all devices; 0: not known yet */
    double line_time, seconds; /* time of the last line; duration of all steps but the first */
    int64_t timed_steps;       /* steps in these seconds */
};

static int fail(const char *what)
{
    fprintf(stderr, "gpt2: %s: %s\n", what, td_last_error());
    return 1;
}

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static bool on_host(const struct run *run)
{
    return !strcmp(td_device_kind(run->device), "cpu");
}

/* ---- A step ------------------------------------------------------------------------------------------ */

/* Copies the batches of the next step to the device: always into the same tensors, as a graph needs it. Copies from
 * pinned memory run while the host goes on. */
static td_status load_batches(struct run *run)
{
    const int64_t shape[] = {run->settings.accumulate, run->settings.batch, run->config.context};
    for (int64_t i = 0; i < run->settings.accumulate; i++) {
        TD_SCOPE;
        td_batch batch;
        while (!td_loader_next(run->loader, &batch)) {
            if (td_loader_status(run->loader))
                return td_loader_status(run->loader);
            td_sampler_set_epoch(run->sampler, ++run->epoch);
        }
        if (!run->tokens) {
            td_dtype dtype = td_tensor_dtype(batch.input);
            run->tokens = td_tensor_retain(td_empty(shape, 3, dtype, run->device));
            run->targets = td_tensor_retain(td_empty(shape, 3, dtype, run->device));
        }
        if (td_tensor_copy_async(td_select(run->tokens, 0, i), batch.input) ||
            td_tensor_copy_async(td_select(run->targets, 0, i), batch.target))
            return td_last_status();
    }
    return TD_OK;
}

static td_tensor *loss_of(struct run *run, td_tensor *tokens, td_tensor *targets)
{
    TD_AUTOCAST(td_device_kind(run->device),
                &(td_autocast_options){.dtype = TD_BF16, .disabled = !run->settings.bf16});
    td_tensor *loss = td_forward_with(run->model, TD_TENSORS(tokens, targets));
    return td_div_scalar(loss, (double)run->settings.accumulate);
}

/* The gradients of batch i. With td_ddp() and td_fsdp(), those of the last batch of a step are averaged over the ranks, with the sums
 * of those before. */
static td_status add_gradients(struct run *run, int64_t i)
{
    TD_SCOPE;
    bool last = i == run->settings.accumulate - 1;
    if (run->settings.fsdp)
        td_fsdp_set_sync(run->model, last);
    else if (run->model != run->gpt2)
        td_ddp_set_sync(run->model, last);
    memory_curve_mark(run->memory, MEMORY_FORWARD);
    td_tensor *loss = loss_of(run, td_select(run->tokens, 0, i), td_select(run->targets, 0, i));
    memory_curve_mark(run->memory, MEMORY_BACKWARD);
    td_status status = td_backward(loss);
    return status ? status : td_add_(run->loss, td_detach(loss));
}

/* What a step does on the device. */
static td_status update(void *arg)
{
    struct run *run = arg;
    td_status status = td_optimizer_zero_grad(run->optimizer);
    if (!status)
        status = td_zero_(run->loss);
    for (int64_t i = 0; !status && i < run->settings.accumulate; i++)
        status = add_gradients(run, i);
    memory_curve_mark(run->memory, MEMORY_STEP);
    if (!status && run->settings.clip > 0)
        status = td_clip_grad_norm_(run->gpt2, run->settings.clip, NULL, NULL);
    return status ? status : td_optimizer_step(run->optimizer);
}

/* With --graph the first step, which sets up what the others use, is not captured, and the others are one graph. */
static td_status run_update(struct run *run)
{
    if (run->graph)
        return td_graph_launch(run->graph);
    if (!run->settings.graph || run->step + 1 == run->first_step)
        return update(run);
    td_status status = run->ranks > 1
                           ? td_fail(TD_ERR_UNSUPPORTED, "with several processes there is none")
                           : td_graph_capture(run->device, update, run, &run->graph);
    if (status != TD_ERR_UNSUPPORTED)
        return status;
    if (run->rank == 0)
        printf("--graph is ignored: %s\n", td_last_error());
    run->settings.graph = false;
    return update(run);
}

/* A step whose memory is drawn. */
static td_status draw_update(struct run *run)
{
    const struct gpt2_settings *settings = &run->settings;
    char name[64];
    const char *strategy = settings->strategy ? settings->strategy : "full_shard";
    snprintf(name, sizeof name, "%s%s",
             settings->fsdp   ? strategy
             : run->ranks > 1 ? "ddp"
                              : "one_process",
             settings->no_shared_memory ? "-gathers" : "");
    run->memory = memory_curve_begin(run->gpt2, run->optimizer, run->device);
    if (!run->memory)
        return td_last_status();
    td_status status = update(run);
    td_status drawn = memory_curve_end(run->memory, settings->out, name);
    run->memory = NULL;
    return status ? status : drawn;
}

static td_status train_step(struct run *run)
{
    TD_SCOPE;
    td_status status = load_batches(run);
    run->lr = td_optimizer_lr(run->optimizer);
    bool draws = run->settings.memory && run->step + 1 == run->settings.memory;
    if (!status)
        status = draws ? draw_update(run) : run_update(run);
    if (!status)
        status = td_tensor_copy(td_select(run->recent, 0, run->recent_count), run->loss);
    if (!status)
        status = td_schedule_step(run->schedule);
    run->recent_count++;
    run->step++;
    return status;
}

/* ---- Progress ---------------------------------------------------------------------------------------- */

static double tokens_a_second(const struct run *run, int64_t steps, double seconds)
{
    const struct gpt2_settings *settings = &run->settings;
    return (double)(steps * settings->batch * settings->accumulate * run->config.context *
                    run->ranks) /
           seconds;
}

static double share_of_peak(const struct run *run, double rate)
{
    return 100 * rate * run->flops_per_token / run->peak;
}

static void print_progress(struct run *run, int64_t steps)
{
    double time = now(), rate = tokens_a_second(run, steps, time - run->line_time);
    printf("step %5lld/%lld  loss %.6f  lr %.2e  %6.0f tokens/s  %7.1f ms a step",
           (long long)run->step, (long long)run->settings.steps,
           (double)run->losses[run->losses_count - 1], run->lr, rate,
           1e3 * (time - run->line_time) / (double)steps);
    if (run->peak > 0)
        printf("  %4.1f %% of peak", share_of_peak(run, rate));
    printf("\n");
    fflush(stdout);
}

/* Reads the losses since the last line, their means over all ranks, and prints one. The first step also sets up what
 * the others use: it is not counted, and the peak is measured behind it. */
static td_status report(struct run *run)
{
    int64_t count = run->recent_count;
    {
        TD_SCOPE;
        td_tensor *recent = td_tensor_to(td_clone(run->recent), td_device_get("cpu"));
        if (!recent || (run->ranks > 1 && td_all_reduce(recent, TD_AVG, NULL, NULL)))
            return td_last_status();
        memcpy(run->losses + run->losses_count, td_tensor_data(recent),
               (size_t)count * sizeof *run->losses);
    }
    run->losses_count += count;
    run->recent_count = 0;
    if (run->rank == 0)
        print_progress(run, count);
    if (run->losses_count > 1) {
        run->seconds += now() - run->line_time;
        run->timed_steps += count;
    }
    if (run->peak == 0)
        run->peak = run->ranks * gpt2_measure_peak(run->device, run->settings.bf16);
    run->line_time = now();
    return run->peak > 0 ? TD_OK : td_last_status();
}

static void print_summary(const struct run *run)
{
    td_memory_stats memory = {0};
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    td_device_memory_stats(run->device, &memory);
    double peak = on_host(run) ? (double)usage.ru_maxrss * 1024 : (double)memory.reserved_peak;
    printf("\n  processes            %10d\n", run->ranks);
    if (run->timed_steps) {
        double rate = tokens_a_second(run, run->timed_steps, run->seconds);
        printf("  tokens a second      %10.0f\n", rate);
        printf("  share of the peak    %10.1f %%, of %.4g TFLOP/s%s\n", share_of_peak(run, rate),
               run->peak / 1e12, run->settings.peak ? "" : " (measured with a product)");
    }
    printf("  peak memory          %10.1f MiB of %s\n", peak / 1048576,
           on_host(run) ? "the process" : td_device_name(run->device));
    if (run->settings.out && run->losses_count)
        printf("  loss curve           %s/loss.svg\n", run->settings.out);
    if (run->settings.memory >= run->first_step && run->settings.memory <= run->step)
        printf("  memory over a step   %s/memory.svg\n", run->settings.out);
    printf("\n");
}

/* ---- Training ---------------------------------------------------------------------------------------- */

static td_status checkpoint(struct run *run, bool load)
{
    char directory[4096];
    snprintf(directory, sizeof directory, "%s/checkpoints", run->settings.out);
    td_training training = {.model = run->gpt2,
                            .optimizer = run->optimizer,
                            .schedule = run->schedule,
                            .sampler = run->sampler,
                            .step = run->step,
                            .epoch = run->epoch,
                            .any_size = run->settings.fsdp};
    if (!load && run->settings.fsdp)
        return td_training_save_sharded_numbered(directory, &training, 2, NULL, NULL);
    if (!load)
        return td_training_save_numbered(directory, &training, 2, NULL);
    bool found;
    td_status status = td_training_load_latest(directory, &training, NULL, &found);
    run->step = training.step;
    run->epoch = training.epoch;
    if (!status && run->rank == 0)
        printf("%s at step %lld\n", found ? "goes on" : "begins", (long long)run->step);
    return status;
}

static td_status train(struct run *run)
{
    const struct gpt2_settings *settings = &run->settings;
    td_status status = settings->resume ? checkpoint(run, true) : TD_OK;
    run->first_step = run->step + 1;
    run->line_time = now();
    while (!status && run->step < settings->steps) {
        status = train_step(run);
        bool last = run->step == settings->steps;
        if (!status &&
            (run->step == run->first_step || run->step % settings->log_every == 0 || last))
            status = report(run);
        if (!status && settings->save_every && (run->step % settings->save_every == 0 || last))
            status = checkpoint(run, false);
    }
    return status;
}

/* What rank 0 does with the trained model. */
static int finish(struct run *run)
{
    const struct gpt2_settings *settings = &run->settings;
    if (run->losses_count)
        print_summary(run);
    if (settings->out && run->losses_count &&
        loss_curve_write(settings->out, "GPT-2: loss", run->losses, run->losses_count,
                         run->first_step))
        return 1;
    if (settings->save && gpt2_save_weights(settings->save, run->gpt2))
        return fail("saving the weights");
    td_module_eval(run->gpt2);
    if (settings->generate &&
        gpt2_generate(run->gpt2, &run->config, settings, run->device, run->bytes))
        return fail("writing text");
    return 0;
}

/* ---- Setting up -------------------------------------------------------------------------------------- */

static bool ends_with_bin(const char *path)
{
    size_t length = strlen(path);
    return length >= 4 && !strcmp(path + length - 4, ".bin");
}

/* The sizes of the model: those of the weights, of --size, or small ones, changed by the options of their names. */
static td_status choose_config(struct run *run, const td_state *weights)
{
    const struct gpt2_settings *settings = &run->settings;
    struct gpt2_config *config = &run->config;
    if (settings->tokens)
        run->bytes = !strcmp(settings->tokens, "bytes");
    else
        run->bytes = settings->data && !ends_with_bin(settings->data);
    if (weights) {
        td_status status = gpt2_config_of(weights, config);
        if (status)
            return status;
        run->bytes |= !settings->data && config->vocabulary == 256;
    } else {
        *config = settings->size ? *gpt2_size(settings->size)
                                 : (struct gpt2_config){4, 4, 128, 128, 50257, 0};
        config->vocabulary = run->bytes ? 256 : config->vocabulary;
    }
    config->layers = settings->layers ? settings->layers : config->layers;
    config->heads = settings->heads ? settings->heads : config->heads;
    config->width = settings->width ? settings->width : config->width;
    config->context = settings->context ? settings->context : config->context;
    config->vocabulary = settings->vocabulary ? settings->vocabulary : config->vocabulary;
    config->dropout = settings->dropout;
    return TD_OK;
}

/* Each block is a unit of td_fsdp(); the embeddings, which the head uses, too, are the rest. */
static td_module *distribute(const struct run *run)
{
    static const char *const kinds[] = {"Block"};
    const struct gpt2_settings *settings = &run->settings;
    int strategy = settings->strategy ? gpt2_strategy(settings->strategy) : TD_FULL_SHARD;
    if (settings->fsdp)
        return td_fsdp(run->gpt2,
                       &(td_fsdp_options){.strategy = (td_fsdp_strategy)strategy,
                                          .kinds = kinds,
                                          .kind_count = 1,
                                          .no_shared_memory = settings->no_shared_memory});
    return run->ranks > 1 ? td_ddp(run->gpt2, NULL) : run->gpt2;
}

static td_status set_up_model(struct run *run)
{
    const char *from = run->settings.from;
    td_state *weights = from ? gpt2_read_weights(from) : NULL;
    td_status status = from && !weights ? td_last_status() : choose_config(run, weights);
    td_manual_seed((uint64_t)run->settings.seed);
    if (!status) {
        TD_DEVICE_SCOPE(run->device);
        run->gpt2 = gpt2_create(&run->config);
        status = run->gpt2 ? TD_OK : td_last_status();
    }
    if (!status && weights)
        status = td_module_load_state(run->gpt2, weights, true);
    td_state_destroy(weights);
    if (status)
        return status;
    int64_t parameters = td_module_parameter_count(run->gpt2);
    run->flops_per_token = gpt2_flops_per_token(run->gpt2, &run->config);
    run->model = distribute(run);
    td_manual_seed((uint64_t)(run->settings.seed + run->rank)); /* dropout differs by rank */
    if (!run->model) {
        run->gpt2 = NULL; /* it was destroyed */
        return td_last_status();
    }
    if (run->rank == 0)
        printf(
            "GPT-2 of %lld layers, %lld heads, width %lld, context %lld, %lld tokens: %.1f M parameters, on %d × %s, %s\n",
            (long long)run->config.layers, (long long)run->config.heads,
            (long long)run->config.width, (long long)run->config.context,
            (long long)run->config.vocabulary, (double)parameters / 1e6, run->ranks,
            td_device_name(run->device), run->settings.bf16 ? "bf16" : "f32");
    return TD_OK;
}

/* Text, or a file of tokens; llm.c writes 256 numbers of 32 bits before them, of which the first is known. */
static td_dataset *open_data(const struct run *run)
{
    const char *path = run->settings.data, *tokens = run->settings.tokens;
    if (run->bytes)
        return td_text_dataset(path, run->config.context);
    uint32_t magic = 0;
    FILE *file = fopen(path, "rb");
    if (file && fread(&magic, sizeof magic, 1, file) != 1)
        magic = 0; /* td_token_dataset() says what is wrong with the file */
    if (file)
        fclose(file);
    bool wide = tokens ? !strcmp(tokens, "u32") : magic == 20240801;
    return td_token_dataset(path, run->config.context,
                            &(td_token_options){.bytes = wide ? 4 : 2,
                                                .offset = magic == 20240520 || magic == 20240801
                                                              ? 256 * (int64_t)sizeof magic
                                                              : 0});
}

static td_status set_up_data(struct run *run)
{
    td_dataset *data = open_data(run);
    run->sampler = td_distributed_sampler(
        data, &(td_sampler_options){.drop_last = true,
                                    .seed = (uint64_t)run->settings.seed,
                                    .num_replicas = run->ranks,
                                    .rank = run->rank});
    run->loader = td_loader_create(
        data, &(td_loader_options){.batch_size = run->settings.batch,
                                   .sampler = run->sampler,
                                   .drop_last = true,
                                   .workers = 1,
                                   .pin_memory = on_host(run) ? NULL : run->device});
    int64_t sequences = td_dataset_size(data);
    td_dataset_release(data);
    if (run->loader && !td_loader_batches(run->loader))
        return td_fail(
            TD_ERR_INVALID,
            "%s has %lld sequences of %lld tokens; a batch needs %lld for each of %d processes",
            run->settings.data, (long long)sequences, (long long)run->config.context,
            (long long)run->settings.batch, run->ranks);
    return run->loader ? TD_OK : td_last_status();
}

/* Rises to --lr in --warmup steps, and falls to --min-lr along a half cosine. */
static double lr_factor(int64_t step, void *arg)
{
    const struct gpt2_settings *settings = arg;
    if (step < settings->warmup)
        return (double)(step + 1) / (double)settings->warmup;
    double length = (double)(settings->steps - settings->warmup);
    double part = length > 0 ? fmin(1, (double)(step - settings->warmup) / length) : 1;
    double least = settings->min_lr / settings->lr;
    return least + (1 - least) * (1 + cos(acos(-1) * part)) / 2;
}

static td_status set_up_optimizer(struct run *run)
{
    struct gpt2_settings *settings = &run->settings;
    run->optimizer = gpt2_adamw(run->gpt2, settings->lr, settings->weight_decay);
    run->schedule = run->optimizer ? td_lambda_schedule(run->optimizer, lr_factor, settings) : NULL;
    run->losses = calloc((size_t)settings->steps + 1, sizeof *run->losses);
    run->recent = td_zeros(TD_SHAPE(settings->log_every), TD_F32, run->device);
    run->loss = td_zeros(NULL, 0, TD_F32, run->device);
    return run->schedule && run->losses && run->recent && run->loss ? TD_OK : TD_ERR_NOMEM;
}

/* The process group under a launcher, and the device: its processes on a host use cuda:0, cuda:1 … */
static td_status set_up_processes(struct run *run)
{
    const char *name = run->settings.device;
    run->ranks = 1;
    if (getenv("WORLD_SIZE") || run->settings.fsdp) {
        td_status status = td_init_process_group(NULL);
        if (status)
            return status;
        run->ranks = td_get_world_size(NULL);
        run->rank = td_get_rank(NULL);
    }
    run->device = td_device_get(name);
    char own[64];
    snprintf(own, sizeof own, "%s:%d", name, td_get_local_rank());
    if (run->ranks > 1 && !on_host(run) && !strchr(name, ':'))
        run->device = td_device_get(own);
    return td_set_device(run->device) || td_set_device(td_device_get("cpu")) ? td_last_status()
                                                                             : TD_OK;
}

static bool check_settings(struct run *run)
{
    const struct gpt2_settings *settings = &run->settings;
    if (settings->peak && !(run->peak = gpt2_known_peak(settings->peak, settings->bf16)))
        fprintf(stderr,
                "gpt2: --peak %s: a number of TFLOP/s, or a100, h100, h200 or b200 was expected\n",
                settings->peak);
    else if (settings->out && mkdir(settings->out, 0777) && errno != EEXIST)
        fprintf(stderr, "gpt2: %s: %s\n", settings->out, strerror(errno));
    else
        return true;
    return false;
}

static int run_all(struct run *run)
{
    bool trains = run->settings.data && run->settings.steps;
    if (set_up_processes(run))
        return fail("starting");
    run->peak *= run->ranks;
    if (set_up_model(run))
        return fail("the model");
    if (trains && set_up_data(run))
        return fail("the data");
    if (trains && set_up_optimizer(run))
        return fail("the optimizer");
    if (trains && train(run))
        return fail("training");
    bool gathers = run->settings.fsdp && (run->settings.save || run->settings.generate);
    if (gathers && td_fsdp_gather_begin(run->model, false))
        return fail("gathering the weights");
    int code = run->rank == 0 ? finish(run) : 0;
    if (gathers && td_fsdp_gather_end(run->model))
        return fail("the end");
    return code;
}

int main(int argc, char **argv)
{
    struct run run = {0};
    int code;
    if (!gpt2_read_settings(argc, argv, &run.settings, &code))
        return code;
    if (!check_settings(&run))
        return 2;
    code = run_all(&run);
    td_graph_destroy(run.graph);
    td_tensor_release(run.tokens);
    td_tensor_release(run.targets);
    td_tensor_release(run.loss);
    td_tensor_release(run.recent);
    td_schedule_destroy(run.schedule);
    td_optimizer_destroy(run.optimizer);
    td_loader_destroy(run.loader);
    td_sampler_release(run.sampler);
    td_module_destroy(run.model);
    free(run.losses);
    if (td_is_initialized())
        td_destroy_process_group();
    return code;
}
