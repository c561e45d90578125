/* Measures the bubble of pipelines: the part of a step in which the ranks do not compute.
 *
 *     bench_pipeline [--ranks N] [--micro-batches N] [--schedule NAME] [--chunks N] [--width N] [--steps N] [--table]
 *
 * NAME is gpipe, 1f1b or interleaved. All stages are the same: square layers with tanh in between. A rank computes with
 * one thread. Of the steps the median bubble counts, beside the theoretical one, and the median time of a step beside
 * that of the busy time and the theoretical bubble. The busy time is measured, so that ranks that slow each other down
 * (shared caches, shared processors) do not count as a bubble. */
#include "measure.h"

#include <tandem/tandem.h>

#include <string.h>

enum { WARM_UP = 3, LAYERS = 4, SAMPLES = 64 };

struct settings {
    int ranks, micro_batches, chunks, width, steps;
    td_pipeline_schedule schedule;
    const char *name;
    bool table;
};

/* Adds a parameter to its input, so that the first stage, too, computes the gradient of what its first layer gets. */
static td_tensor *shift_forward(td_module *module, td_tensor *const *inputs, int count)
{
    (void)count;
    return td_add(inputs[0], td_param(module, 0));
}

static const td_module_ops shift_ops = {.name = "Shift", .forward = shift_forward};

static td_module *make_stage(int width)
{
    td_module *layers[1 + 2 * LAYERS], *shift = td_module_create(&shift_ops);
    td_init_constant(td_module_new_parameter(shift, "shift", TD_SHAPE(width), TD_F32), 0);
    layers[0] = td_module_finish(shift);
    for (int i = 0; i < LAYERS; i++) {
        layers[1 + 2 * i] = td_linear(width, width);
        layers[2 + 2 * i] = td_tanh();
    }
    return td_sequential_of(layers, 1 + 2 * LAYERS);
}

/* Costs next to nothing, since only the last rank computes it. */
static td_tensor *mean_loss(const td_tensor_list *outputs, const td_tensor_list *targets, void *arg)
{
    (void)targets;
    (void)arg;
    return td_mean(outputs->at[0]);
}

static td_pipeline *make_pipeline(const struct settings *settings)
{
    td_module *stages[16];
    for (int c = 0; c < settings->chunks; c++)
        stages[c] = make_stage(settings->width);
    td_pipeline *pipeline = td_pipeline_create(
        stages, settings->chunks,
        &(td_pipeline_options){.schedule = settings->schedule,
                               .micro_batches = settings->micro_batches,
                               .loss = mean_loss});
    if (!pipeline)
        bench_die("%s", td_last_error());
    return pipeline;
}

/* Bubbles in millionths, times in nanoseconds: for bench_sort(). */
struct figures {
    int64_t *bubbles, *totals, *busy;
};

static void measure(const struct settings *settings, td_pipeline *pipeline, struct figures *figures)
{
    TD_SCOPE;
    int64_t samples = (int64_t)SAMPLES * settings->micro_batches;
    td_tensor *x = td_randn(TD_SHAPE(samples, settings->width), TD_F32);
    td_tensor *y = td_zeros(TD_SHAPE(samples), TD_F32);
    for (int s = -WARM_UP; s < settings->steps; s++) {
        td_pipeline_stats stats;
        bench_check(td_module_zero_grad(td_pipeline_module(pipeline)));
        bench_check(td_barrier(NULL, NULL));
        bench_check(td_pipeline_step(pipeline, x, y, NULL));
        bench_check(td_pipeline_get_stats(pipeline, &stats));
        if (s < 0)
            continue;
        figures->bubbles[s] = (int64_t)(stats.bubble * 1e6);
        figures->totals[s] = stats.total_ns;
        figures->busy[s] = (int64_t)((1 - stats.bubble) * (double)stats.total_ns);
    }
}

static int64_t median(int64_t *numbers, int count)
{
    bench_sort(numbers, (size_t)count);
    return bench_at(numbers, (size_t)count, 0.5);
}

static void print_row(const struct settings *settings, struct figures *figures, double theory)
{
    double bubble = (double)median(figures->bubbles, settings->steps) / 1e6;
    double total = (double)median(figures->totals, settings->steps);
    double ideal = (double)median(figures->busy, settings->steps) / (1 - theory);
    if (settings->table) {
        printf(
            "%-12s p %d, v %d, m %2d: bubble %.4f, in theory %.4f (%+.1f %%); a step takes %.2f ms, "
            "%.3f times the ideal\n",
            settings->name, settings->ranks, settings->chunks, settings->micro_batches, bubble,
            theory, theory > 0 ? 100 * (bubble / theory - 1) : 0, total / 1e6, total / ideal);
        return;
    }
    printf(
        "{\"peer\": \"tandem\", \"what\": \"%s\", \"ranks\": %d, \"chunks\": %d, \"micro_batches\": %d, "
        "\"bubble\": %.5f, \"theory\": %.5f, \"step_ms\": %.3f, \"times_ideal\": %.4f}\n",
        settings->name, settings->ranks, settings->chunks, settings->micro_batches, bubble, theory,
        total / 1e6, total / ideal);
}

static td_status run(int rank, void *arg)
{
    const struct settings *settings = arg;
    bench_check(td_set_num_threads(1));
    bench_check(td_init_process_group(NULL));
    td_manual_seed(1);
    td_pipeline *pipeline = make_pipeline(settings);
    struct figures figures = {malloc((size_t)settings->steps * sizeof(int64_t)),
                              malloc((size_t)settings->steps * sizeof(int64_t)),
                              malloc((size_t)settings->steps * sizeof(int64_t))};
    if (!figures.bubbles || !figures.totals || !figures.busy)
        bench_die("out of memory");
    measure(settings, pipeline, &figures);
    td_pipeline_stats stats;
    bench_check(td_pipeline_get_stats(pipeline, &stats));
    if (rank == 0) {
        print_row(settings, &figures, stats.theory);
        fflush(stdout);
    }
    free(figures.bubbles);
    free(figures.totals);
    free(figures.busy);
    td_pipeline_destroy(pipeline);
    return td_destroy_process_group();
}

static td_pipeline_schedule schedule_of(const char *name)
{
    const char *const names[] = {"", "gpipe", "1f1b", "interleaved"};
    for (int i = 1; name && i < 4; i++)
        if (strcmp(name, names[i]) == 0)
            return (td_pipeline_schedule)i;
    bench_die("--schedule is gpipe, 1f1b or interleaved");
    return TD_PIPELINE_DEFAULT;
}

static struct settings read_settings(int argc, char **argv)
{
    struct settings settings = {
        .ranks = 2, .micro_batches = 8, .chunks = 1, .width = 512, .steps = 20, .name = "1f1b"};
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        int *number = strcmp(argv[i], "--ranks") == 0           ? &settings.ranks
                      : strcmp(argv[i], "--micro-batches") == 0 ? &settings.micro_batches
                      : strcmp(argv[i], "--chunks") == 0        ? &settings.chunks
                      : strcmp(argv[i], "--width") == 0         ? &settings.width
                      : strcmp(argv[i], "--steps") == 0         ? &settings.steps
                                                                : NULL;
        if (number)
            *number = bench_number(argv[i++], value, 1);
        else if (strcmp(argv[i], "--schedule") == 0 && value)
            settings.name = argv[++i];
        else if (strcmp(argv[i], "--table") == 0)
            settings.table = true;
        else
            bench_die("usage: bench_pipeline [--ranks N] [--micro-batches N] [--schedule NAME] "
                      "[--chunks N] [--width N] [--steps N] [--table]");
    }
    settings.schedule = schedule_of(settings.name);
    if (settings.chunks > 16)
        bench_die("--chunks is 16 at most");
    return settings;
}

int main(int argc, char **argv)
{
    struct settings settings = read_settings(argc, argv);
    bench_check(td_spawn(run, &settings, settings.ranks, NULL));
}
