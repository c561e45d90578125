/* Memory and time of fully sharded training of a GPT-2, beside DDP; under tdrun.
 *
 *     bench_fsdp memory STRATEGY [OPTION…]    the most memory of a rank in a step: PSS, and bytes of tensors
 *     bench_fsdp time STRATEGY [OPTION…]      DDP and STRATEGY in turns of a step, in the same processes
 *     bench_fsdp bytes STRATEGY [OPTION…]     one step, and what td_fsdp_get_stats() says of it
 *
 * STRATEGY is plain (no wrapper), ddp, full_shard, shard_grad_op, no_shard or hybrid_shard. Options: --layers, --width,
 * --heads, --context, --vocabulary, --batch, --steps, each with a number; --no-shared-memory; for time also --device NAME,
 * --bf16 (autocast), and --beside STRATEGY instead of DDP. Rank 0 prints a line of JSON. scripts/bench-fsdp runs it;
 * bench/README.md says how it is measured. What td_fsdp() costs one rank on a GPU, beside no wrapper:
 *
 *     bench_fsdp time full_shard --beside plain --device cuda --bf16 --layers 12 --width 768 --heads 12 --context 1024 \
 *                --vocabulary 50304 --batch 16 --steps 41 */
#include "../examples/gpt2.h"
#include "measure.h"

#include <sys/resource.h>
#include <time.h>

enum { WARM_UP = 3 };

static struct {
    const char *what, *strategy, *beside, *device;
    struct gpt2_config config;
    int batch, steps;
    bool no_shared_memory, bf16;
} settings = {.beside = "ddp",
              .device = "cpu",
              .config = {.layers = 4, .heads = 4, .width = 128, .context = 64, .vocabulary = 256},
              .batch = 2,
              .steps = 3};

static int rank, ranks;

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

/* Of this process and its threads, in seconds. */
static double processor_time(void)
{
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
           (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1e-6;
}

/* ---- Memory of the process -------------------------------------------------------------------------------- */

/* Its share of all pages: those that n processes map count as an n-th. */
static double pss(void)
{
    char line[256];
    double bytes = 0;
    FILE *file = fopen("/proc/self/smaps_rollup", "r");
    if (!file)
        bench_die("/proc/self/smaps_rollup: %s", strerror(errno));
    for (long kib; fgets(line, sizeof line, file);)
        if (sscanf(line, "Pss: %ld", &kib) == 1)
            bytes = (double)kib * 1024;
    fclose(file);
    return bytes;
}

struct peak {
    double pss;
    bool counts;
};

static void look(struct peak *peak)
{
    double bytes = peak->counts ? pss() : 0;
    if (bytes > peak->pss)
        peak->pss = bytes;
}

static td_status forward_pre(td_module *module, td_tensor_list *inputs, void *peak)
{
    (void)module, (void)inputs;
    look(peak);
    return TD_OK;
}

static td_status forward(td_module *module, const td_tensor_list *inputs, td_tensor_list *results,
                         void *peak)
{
    (void)module, (void)inputs, (void)results;
    look(peak);
    return TD_OK;
}

static td_status backward_pre(td_module *module, td_tensor_list *grads, void *peak)
{
    (void)module, (void)grads;
    look(peak);
    return TD_OK;
}

static td_status backward(td_module *module, td_tensor_list *grad_inputs,
                          const td_tensor_list *grad_results, void *peak)
{
    (void)module, (void)grad_inputs, (void)grad_results;
    look(peak);
    return TD_OK;
}

/* Of the whole and of the blocks: to look takes longer than a small module, and pages that were used in a block mostly stay. */
static td_status watch(td_module *module, void *peak)
{
    return td_module_add_hooks(module,
                               &(td_module_hooks){.forward_pre = forward_pre,
                                                  .forward = forward,
                                                  .backward_pre = backward_pre,
                                                  .backward = backward,
                                                  .arg = peak},
                               NULL);
}

/* ---- Training ------------------------------------------------------------------------------------------------ */

struct training {
    td_module *gpt2, *model;
    td_optimizer *adam;
    double sizes[3]; /* parameters of all, of the embeddings and the last norm, of a block */
};

static td_module *wrap(td_module *gpt2, const char *strategy)
{
    static const char *const kinds[] = {"Block"}, *const names[] = {"full_shard", "shard_grad_op",
                                                                    "no_shard", "hybrid_shard"};
    if (!strcmp(strategy, "plain"))
        return gpt2;
    if (!strcmp(strategy, "ddp"))
        return td_ddp(gpt2, NULL);
    for (int s = 0; s < 4; s++)
        if (!strcmp(strategy, names[s]))
            return td_fsdp(gpt2, &(td_fsdp_options){.strategy = (td_fsdp_strategy)s,
                                                    .kinds = kinds,
                                                    .kind_count = 1,
                                                    .no_shared_memory = settings.no_shared_memory});
    bench_die("there is no strategy %s", strategy);
}

static void make(struct training *training, const char *strategy)
{
    td_manual_seed(1);
    TD_DEVICE_SCOPE(td_device_get(settings.device));
    training->gpt2 = gpt2_create(&settings.config);
    if (!training->gpt2)
        bench_die("%s", td_last_error());
    training->sizes[0] = (double)td_module_parameter_count(training->gpt2);
    training->sizes[2] = (double)td_module_parameter_count(
        td_child(td_child(training->gpt2, 3), 0));
    training->sizes[1] = training->sizes[0] - (double)settings.config.layers * training->sizes[2];
    training->model = wrap(training->gpt2, strategy);
    training->adam = training->model ? td_adam(training->model, NULL) : NULL;
    if (!training->adam)
        bench_die("%s", td_last_error());
}

static void end(struct training *training)
{
    td_optimizer_destroy(training->adam);
    td_module_destroy(training->model);
}

static void step(struct training *training, td_tensor *text)
{
    TD_SCOPE;
    int64_t length = settings.config.context;
    td_tensor *input = td_narrow(text, 1, 0, length), *target = td_narrow(text, 1, 1, length);
    td_tensor *loss = NULL;
    bench_check(td_optimizer_zero_grad(training->adam));
    {
        TD_AUTOCAST(td_device_kind(td_device_get(settings.device)),
                    &(td_autocast_options){.dtype = TD_BF16, .disabled = !settings.bf16});
        loss = td_forward_with(training->model, TD_TENSORS(input, target));
    }
    bench_check(td_backward(loss));
    bench_check(td_optimizer_step(training->adam));
}

static td_tensor *make_text(void)
{
    td_manual_seed((uint64_t)rank);
    td_tensor *text = td_randint(0, settings.config.vocabulary,
                                 TD_SHAPE(settings.batch, settings.config.context + 1), TD_I64,
                                 NULL);
    return td_tensor_retain(td_tensor_to(text, td_device_get(settings.device)));
}

/* ---- What is measured ---------------------------------------------------------------------------------------- */

static double most(double value)
{
    bench_check(td_group_all_reduce(&value, &value, 1, TD_F64, TD_MAX, NULL, NULL));
    return value;
}

static double mean(double value)
{
    bench_check(td_group_all_reduce(&value, &value, 1, TD_F64, TD_SUM, NULL, NULL));
    return value / ranks;
}

static void print_start(const struct training *training)
{
    printf("{\"peer\": \"tandem\", \"what\": \"%s\", \"strategy\": \"%s\", \"ranks\": %d, "
           "\"shared\": %s, \"parameters\": %.0f, \"root\": %.0f, \"block\": %.0f",
           settings.what, settings.strategy, ranks, settings.no_shared_memory ? "false" : "true",
           training->sizes[0], training->sizes[1], training->sizes[2]);
}

/* The first steps make what the others use, and DDP then its buckets anew; the most of the others is measured. */
static void measure_memory(void)
{
    struct training training;
    struct peak peak = {0};
    td_memory_stats before, after;
    td_device *host = td_device_get("cpu");
    td_tensor *text = make_text();
    double base = pss(); /* libraries, and what the world has */
    bench_check(td_device_memory_stats(host, &before));
    make(&training, settings.strategy);
    for (int s = 0; s < WARM_UP; s++)
        step(&training, text);
    td_module *blocks = td_child(training.gpt2, 3);
    bench_check(watch(training.gpt2, &peak));
    for (int b = 0; b < td_child_count(blocks); b++)
        bench_check(watch(td_child(blocks, b), &peak));
    bench_check(td_barrier(NULL, NULL));
    double rest = pss();
    bench_check(td_device_reset_peak(host));
    peak.counts = true;
    for (int s = 0; s < settings.steps; s++) {
        step(&training, text);
        look(&peak);
    }
    bench_check(td_device_memory_stats(host, &after));
    bench_check(td_barrier(NULL, NULL));
    td_fsdp_stats stats = {0};
    if (td_is_fsdp(training.model))
        bench_check(td_fsdp_get_stats(training.model, &stats));
    double figures[] = {most(peak.pss),
                        most(base),
                        most(rest),
                        most(peak.pss - base),
                        most((double)(after.allocated_peak - before.allocated)),
                        most((double)(after.allocated - before.allocated)),
                        most((double)stats.whole_bytes_peak),
                        mean(peak.pss - base)};
    if (rank == 0) {
        print_start(&training);
        printf(", \"pss_peak\": %.0f, \"pss_base\": %.0f, \"pss_rest\": %.0f, "
               "\"pss_grown\": %.0f, \"tensors_peak\": %.0f, \"tensors_rest\": %.0f, "
               "\"whole_peak\": %.0f, \"pss_grown_mean\": %.0f}\n",
               figures[0], figures[1], figures[2], figures[3], figures[4], figures[5], figures[6],
               figures[7]);
    }
    td_tensor_release(text);
    end(&training);
}

static double time_step(struct training *training, td_tensor *text, double *busy)
{
    bench_check(td_barrier(NULL, NULL));
    double begin = now(), start = processor_time();
    step(training, text);
    bench_check(td_device_synchronize(td_device_get(settings.device)));
    *busy = processor_time() - start; /* before the others are waited for */
    bench_check(td_barrier(NULL, NULL));
    return now() - begin;
}

static double median(double *values, int count)
{
    for (int i = 1; i < count; i++)
        for (int k = i; k > 0 && values[k] < values[k - 1]; k--) {
            double value = values[k];
            values[k] = values[k - 1];
            values[k - 1] = value;
        }
    return count % 2 ? values[count / 2] : (values[count / 2] + values[count / 2 - 1]) / 2;
}

/* One step of each in turns, the first one alternating. */
static void measure_time(void)
{
    struct training both[2];
    td_tensor *text = make_text();
    int steps = settings.steps;
    double *values = calloc(5 * (size_t)steps, sizeof *values);
    if (!values)
        bench_die("out of memory");
    bench_check(td_set_num_threads(1));
    make(&both[0], settings.beside);
    make(&both[1], settings.strategy);
    for (int s = 0; s < WARM_UP; s++)
        for (int i = 0; i < 2; i++)
            step(&both[i], text);
    for (int s = 0; s < steps; s++) {
        for (int i = 0; i < 2; i++) {
            int which = (i + s) % 2;
            values[which * steps + s] = time_step(&both[which], text,
                                                  &values[(2 + which) * steps + s]);
        }
        values[4 * steps + s] = values[steps + s] / values[s];
    }
    double busy[2] = {0, 0};
    for (int i = 0; i < 2; i++) {
        busy[i] = median(values + (2 + i) * steps, steps);
        bench_check(td_group_all_reduce(&busy[i], &busy[i], 1, TD_F64, TD_SUM, NULL, NULL));
    }
    if (rank == 0) {
        double ratio = median(values + 4 * steps, steps);
        double other = median(values, steps), sharded = median(values + steps, steps);
        print_start(&both[0]);
        printf(", \"beside\": \"%s\", \"beside_ms\": %.3f, \"ms\": %.3f, \"of_medians\": %.4f, "
               "\"ratio\": %.4f, \"beside_cpu_ms\": %.3f, \"cpu_ms\": %.3f, \"cpu_ratio\": %.4f}\n",
               settings.beside, 1e3 * other, 1e3 * sharded, sharded / other, ratio, 1e3 * busy[0],
               1e3 * busy[1], busy[1] / busy[0]);
    }
    free(values);
    td_tensor_release(text);
    end(&both[0]);
    end(&both[1]);
}

/* Calls with one step and with two differ by those of a step. */
static void count_bytes(void)
{
    struct training training;
    td_fsdp_stats stats = {0};
    td_tensor *text = make_text();
    make(&training, settings.strategy);
    for (int s = 0; s < settings.steps; s++)
        step(&training, text);
    if (td_is_fsdp(training.model))
        bench_check(td_fsdp_get_stats(training.model, &stats));
    double gathered = (double)stats.gathered_bytes, reduced = (double)stats.reduced_bytes;
    bench_check(td_group_all_reduce(&gathered, &gathered, 1, TD_F64, TD_SUM, NULL, NULL));
    bench_check(td_group_all_reduce(&reduced, &reduced, 1, TD_F64, TD_SUM, NULL, NULL));
    if (rank == 0) {
        print_start(&training);
        printf(", \"steps\": %d, \"gathered\": %.0f, \"reduced\": %.0f}\n", settings.steps,
               gathered, reduced);
    }
    td_tensor_release(text);
    end(&training);
}

/* ---- The command line ---------------------------------------------------------------------------------------- */

static void read_options(int argc, char **argv)
{
    const struct {
        const char *name;
        int64_t *value;
    } numbers[] = {{"--layers", &settings.config.layers},
                   {"--width", &settings.config.width},
                   {"--heads", &settings.config.heads},
                   {"--context", &settings.config.context},
                   {"--vocabulary", &settings.config.vocabulary}};
    for (int i = 3; i < argc; i++) {
        bool known = true;
        if (!strcmp(argv[i], "--no-shared-memory"))
            settings.no_shared_memory = true;
        else if (!strcmp(argv[i], "--bf16"))
            settings.bf16 = true;
        else if (!strcmp(argv[i], "--device") && argv[i + 1])
            settings.device = argv[++i];
        else if (!strcmp(argv[i], "--beside") && argv[i + 1])
            settings.beside = argv[++i];
        else if (!strcmp(argv[i], "--batch"))
            settings.batch = bench_number(argv[i], argv[i + 1], 1), i++;
        else if (!strcmp(argv[i], "--steps"))
            settings.steps = bench_number(argv[i], argv[i + 1], 1), i++;
        else
            known = false;
        for (size_t n = 0; n < sizeof numbers / sizeof numbers[0] && !known; n++)
            if (!strcmp(argv[i], numbers[n].name)) {
                *numbers[n].value = bench_number(argv[i], argv[i + 1], 1);
                i++;
                known = true;
            }
        if (!known)
            bench_die("there is no option %s", argv[i]);
    }
}

int main(int argc, char **argv)
{
    if (argc < 3)
        bench_die(
            "usage: bench_fsdp memory|time|bytes STRATEGY [OPTION…]; see the top of its source");
    settings.what = argv[1];
    settings.strategy = argv[2];
    read_options(argc, argv);
    if (!td_device_get(settings.device))
        bench_die("%s", td_last_error());
    bench_check(td_init_process_group(NULL));
    rank = td_get_rank(NULL);
    ranks = td_get_world_size(NULL);
    if (!strcmp(settings.what, "memory"))
        measure_memory();
    else if (!strcmp(settings.what, "time"))
        measure_time();
    else if (!strcmp(settings.what, "bytes"))
        count_bytes();
    else
        bench_die("%s is not memory, time or bytes", settings.what);
    bench_check(td_destroy_process_group());
    return 0;
}
