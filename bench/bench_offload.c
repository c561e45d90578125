/* Trains a transformer of a given number of parameters with td_fsdp() and exact f32 Adam, its shards in the memory of the
 * device, of the host and in files, and prints what a step takes, what of it is hidden, and how full each tier is.
 *
 *     bench_offload [--parameters 15B] [--device cuda] [--device-gb N] [--host-gb N] [--directory DIR]
 *                   [--batch N] [--context N] [--vocabulary N] [--steps N] [--lr N]
 *                   [--f32] [--after-backward] [--no-offload] [--no-prefetch] [--digest]
 *
 * Passes compute in bf16 (--f32: in f32); the optimizer steps in the backward pass (--after-backward: after it). Limits
 * count 12 bytes a parameter, or 16 after backward; the device needs room for activations and two units beside them. All
 * steps train on one batch, so that the loss falls. --digest prints a hash of this rank's shards at the end: the same with
 * tiers as with --no-offload. tdrun starts it on several ranks. 15 billion parameters on one GPU of
 * 139 GiB with 128 GiB of host memory:
 *
 *     bench_offload --parameters 15B --device cuda --device-gb 80 --host-gb 105 --batch 4 --steps 5 */
#include "../examples/gpt2.h"
#include "measure.h"

#include <math.h>
#include <time.h>

struct settings {
    double parameters, device_gb, host_gb, lr;
    int batch, context, vocabulary, steps;
    const char *device, *directory;
    bool f32, after_backward, no_offload, no_prefetch, digest;
};

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

/* ---- The command line --------------------------------------------------------------------------------------------- */

static double read_real(const char *option, const char *text)
{
    char *end;
    double value = text ? strtod(text, &end) : 0;
    if (!text || end == text || !(value >= 0))
        bench_die("%s needs a number", option);
    double scale = *end == 'B' ? 1e9 : *end == 'M' ? 1e6 : *end == 'K' ? 1e3 : 1;
    if (end[scale > 1])
        bench_die("%s: \"%s\" is not a number", option, text);
    return value * scale;
}

static bool read_flag(struct settings *s, const char *name)
{
    const struct {
        const char *name;
        bool *flag;
    } flags[] = {{"--f32", &s->f32},
                 {"--after-backward", &s->after_backward},
                 {"--no-offload", &s->no_offload},
                 {"--no-prefetch", &s->no_prefetch},
                 {"--digest", &s->digest}};
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++)
        if (!strcmp(name, flags[i].name))
            return *flags[i].flag = true;
    return false;
}

static void read_value(struct settings *s, const char *name, const char *text)
{
    if (!strcmp(name, "--parameters"))
        s->parameters = read_real(name, text);
    else if (!strcmp(name, "--device-gb"))
        s->device_gb = read_real(name, text);
    else if (!strcmp(name, "--host-gb"))
        s->host_gb = read_real(name, text);
    else if (!strcmp(name, "--lr"))
        s->lr = read_real(name, text);
    else if (!strcmp(name, "--batch"))
        s->batch = bench_number(name, text, 1);
    else if (!strcmp(name, "--context"))
        s->context = bench_number(name, text, 1);
    else if (!strcmp(name, "--vocabulary"))
        s->vocabulary = bench_number(name, text, 2);
    else if (!strcmp(name, "--steps"))
        s->steps = bench_number(name, text, 2);
    else if (!strcmp(name, "--device") && text)
        s->device = text;
    else if (!strcmp(name, "--directory") && text)
        s->directory = text;
    else
        bench_die("%s: no such option; see the head of bench_offload.c", name);
}

static struct settings read_settings(int argc, char **argv)
{
    struct settings s = {.parameters = 20e6,
                         .lr = 1e-4,
                         .batch = 2,
                         .context = 1024,
                         .vocabulary = 50257,
                         .steps = 5,
                         .device = "cpu"};
    for (int i = 1; i < argc; i++)
        if (!read_flag(&s, argv[i])) {
            read_value(&s, argv[i], i + 1 < argc ? argv[i + 1] : NULL);
            i++;
        }
    return s;
}

/* ---- The model ---------------------------------------------------------------------------------------------------- */

/* A width of 128 for each layer, and heads of 64. */
static struct gpt2_config choose_config(const struct settings *s)
{
    int64_t width = (int64_t)(cbrt(s->parameters * 128 / 12) / 64) * 64;
    width = width < 64 ? 64 : width;
    double rest = s->parameters - (double)(width * (s->vocabulary + s->context));
    int64_t layers = (int64_t)(rest / (12.0 * (double)(width * width)) + 0.5);
    return (struct gpt2_config){.layers = layers < 1 ? 1 : layers,
                                .heads = width / 64,
                                .width = width,
                                .context = s->context,
                                .vocabulary = s->vocabulary};
}

static bool is_block(td_module *module, const char *name, void *arg)
{
    (void)module, (void)arg;
    return !strncmp(name, "h.", 2) && !strchr(name + 2, '.');
}

static td_module *make_model(const struct settings *s, const struct gpt2_config *config)
{
    /* Without memory: td_fsdp() computes the initial values of one parameter after another. */
    TD_DEVICE_SCOPE(td_device_meta(td_device_get(s->device)));
    td_module *net = gpt2_create(config);
    td_fsdp_options options = {.is_unit = is_block,
                               .mixed_precision = !s->f32,
                               .param_dtype = TD_BF16,
                               .reduce_dtype = td_get_world_size(NULL) > 1 ? TD_F32 : TD_BF16,
                               .no_prefetch = s->no_prefetch,
                               .offload = {.enabled = !s->no_offload,
                                           .device_bytes = (size_t)(s->device_gb * 1e9),
                                           .host_bytes = (size_t)(s->host_gb * 1e9),
                                           .directory = s->directory,
                                           .element_bytes = s->after_backward ? 16 : 12}};
    td_module *model = td_fsdp(net, &options);
    if (!model)
        bench_die("%s", td_last_error());
    return model;
}

/* The same numbers in all steps; other ones on each rank. */
static td_tensor *make_tokens(const struct settings *s, int shift)
{
    td_tensor *host = td_empty(TD_SHAPE(s->batch, s->context), TD_I64, td_device_get("cpu"));
    int64_t *tokens = td_tensor_data(host);
    unsigned state = 12345u + (unsigned)td_get_rank(NULL);
    for (int64_t b = 0; b < s->batch; b++)
        for (int64_t i = 0; i < s->context + shift; i++) {
            state = state * 1664525u + 1013904223u;
            if (i >= shift)
                tokens[b * s->context + i - shift] = (state >> 8) % (unsigned)s->vocabulary;
        }
    td_tensor *there = td_tensor_to(host, td_device_get(s->device));
    if (!there)
        bench_die("%s", td_last_error());
    return there;
}

static double run_step(td_module *model, td_optimizer *adam, const struct settings *s)
{
    TD_SCOPE;
    if (s->after_backward)
        bench_check(td_optimizer_zero_grad(adam));
    td_tensor *logits = td_to_dtype(td_forward(model, make_tokens(s, 0)), TD_F32);
    td_tensor *loss = td_cross_entropy(td_f_flatten(logits, 0, 1),
                                       td_f_flatten(make_tokens(s, 1), 0, 1));
    if (!loss)
        bench_die("%s", td_last_error());
    bench_check(td_backward(loss));
    if (s->after_backward)
        bench_check(td_optimizer_step(adam));
    double value = td_item(loss);
    bench_check(td_device_synchronize(td_device_get(s->device)));
    return value;
}

/* ---- What it took --------------------------------------------------------------------------------------------------- */

/* Resident memory of this process in GB: of the program and the host's tier, and of files. */
struct resident {
    double host, file;
};

static void read_resident(struct resident *peak)
{
    FILE *file = fopen("/proc/self/status", "r");
    char line[200];
    double kib, host = 0, mapped = 0;
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "RssAnon: %lf", &kib) == 1 || sscanf(line, "RssShmem: %lf", &kib) == 1)
            host += kib * 1024e-9;
        else if (sscanf(line, "RssFile: %lf", &kib) == 1)
            mapped = kib * 1024e-9;
    if (file)
        fclose(file);
    peak->host = host > peak->host ? host : peak->host;
    peak->file = mapped > peak->file ? mapped : peak->file;
}

static double hidden(int64_t all, int64_t seen)
{
    return all > 0 && seen < all ? 100 * (double)(all - seen) / (double)all : 0;
}

static void print_times(const td_fsdp_stats *first, const td_fsdp_stats *last, int steps)
{
#define EACH(member) ((double)(last->member - first->member) / steps)
#define MORE(member) (last->member - first->member)
    printf(
        "transfers      %8.3f GB a step, %.3f s; the device waited %.3f s for them: %.0f %% hidden\n",
        EACH(offload_bytes) / 1e9, EACH(offload_copy_ns) / 1e9, EACH(offload_stall_ns) / 1e9,
        hidden(MORE(offload_copy_ns), MORE(offload_stall_ns)));
    printf(
        "host threads   %8.3f s a step convert, %.3f s add up and step; the program waited %.3f s: "
        "at least %.0f %% hidden\n",
        EACH(offload_convert_ns) / 1e9, EACH(offload_step_ns) / 1e9, EACH(offload_wait_ns) / 1e9,
        hidden(MORE(offload_convert_ns) + MORE(offload_step_ns), MORE(offload_wait_ns)));
    printf("ranks          %8.3f s a step of waiting for gathers and reductions\n",
           EACH(wait_ns) / 1e9);
#undef EACH
#undef MORE
}

static void print_memory(const struct settings *s, const td_fsdp_stats *stats,
                         const struct resident *peak)
{
    td_memory_stats memory = {0};
    double each = s->after_backward ? 16e-9 : 12e-9;
    bench_check(td_device_memory_stats(td_device_get(s->device), &memory));
    int64_t here = stats->shard_elements - stats->host_elements - stats->file_elements;
    int64_t on_host = stats->host_elements;
    if (!strcmp(td_device_kind(td_device_get(s->device)), "cpu")) {
        on_host = here;
        here = 0;
    }
    printf("device tier    %8.3f GB of shards; peak %.3f GB with passes\n", each * (double)here,
           (double)memory.allocated_peak / 1e9);
    printf("host tier      %8.3f GB of shards; peak %.3f GB with the program; %.3f GB are pinned\n",
           each * (double)on_host, peak->host, (double)memory.pinned / 1e9);
    printf("file tier      %8.3f GB of shards; peak %.3f GB of files in memory\n",
           each * (double)stats->file_elements, peak->file);
}

/* FNV-1a of the shards of this rank, 8 bytes at a time, wherever they are. */
static void print_digest(td_module *model)
{
    uint64_t digest = 14695981039346656037u;
    td_state *state = td_module_state(model);
    for (int i = 0; i < td_state_count(state); i++) {
        TD_SCOPE;
        td_tensor *host = td_tensor_to(td_state_tensor(state, i), td_device_get("cpu"));
        const unsigned char *bytes = td_tensor_data(host);
        size_t size = td_tensor_nbytes(host);
        for (size_t at = 0; at < size; at += 8) {
            uint64_t word = 0;
            memcpy(&word, bytes + at, size - at < 8 ? size - at : 8);
            digest = (digest ^ word) * 1099511628211u;
        }
    }
    td_state_destroy(state);
    printf("digest of the shards of rank %d: %016llx\n", td_get_rank(NULL),
           (unsigned long long)digest);
}

static void train(const struct settings *s)
{
    struct gpt2_config config = choose_config(s);
    double start = now();
    td_module *model = make_model(s, &config);
    td_optimizer *adam = td_adam(model, &(td_adam_options){.lr = s->lr});
    if (!adam)
        bench_die("%s", td_last_error());
    if (!s->after_backward)
        bench_check(td_optimizer_in_backward(model, adam));
    td_fsdp_stats first, last;
    bench_check(td_fsdp_get_stats(model, &last));
    bool prints = td_get_rank(NULL) == 0;
    if (prints)
        printf("%.3f billion parameters: %lld layers of width %lld, in %d units; made in %.1f s\n",
               (double)last.parameters / 1e9, (long long)config.layers, (long long)config.width,
               last.units, now() - start);
    struct resident peak = {0};
    double sum = 0;
    for (int step = 0; step < s->steps; step++) {
        double begin = now();
        double loss = run_step(model, adam, s);
        double took = now() - begin;
        sum += step ? took : 0; /* the first one makes the optimizer's state, and loads kernels */
        read_resident(&peak);
        if (step == 0)
            bench_check(td_fsdp_get_stats(model, &first));
        if (prints)
            printf("step %-3d loss %.9g  %8.3f s\n", step, loss, took);
        fflush(stdout);
    }
    bench_check(td_fsdp_get_stats(model, &last));
    if (prints) {
        double tokens = (double)s->batch * s->context * td_get_world_size(NULL);
        printf("a step         %8.3f s without the first one; %.0f tokens a second\n",
               sum / (s->steps - 1), tokens * (s->steps - 1) / sum);
        print_times(&first, &last, s->steps - 1);
        print_memory(s, &last, &peak);
    }
    if (s->digest)
        print_digest(model);
    td_optimizer_destroy(adam);
    td_module_destroy(model);
}

int main(int argc, char **argv)
{
    struct settings settings = read_settings(argc, argv);
    bench_check(td_init_process_group(NULL));
    td_manual_seed(1);
    train(&settings);
    bench_check(td_destroy_process_group());
    return 0;
}
