/* Measures the bubble of pipelines: the part of a step in which the ranks do not compute.
 *
 *     bench_pipeline [--ranks N] [--micro-batches N] [--schedule NAME] [--chunks N] [--width N] [--steps N]
 *                    [--ahead N] [--table] [--draw]
 *
 * NAME is gpipe, 1f1b or interleaved. All stages are the same: square layers with tanh in between. A rank computes with
 * one thread. Of the steps the medians count: the bubble beside the theoretical one, and the time of a step beside that of
 * the busy time and the theoretical bubble. The busy time is measured, so that ranks that slow each other down (shared
 * caches, shared processors) do not count as a bubble.
 *
 * The formula is for passes of equal duration. So the bubble that the measured durations imply is printed, too, which is
 * that of the critical path of the trace; the rest is the cost of messages and waiting. How much passes vary, and the step
 * with the least time, show what the machine adds. --draw draws that step. */
#include "measure.h"

#include <tandem/tandem.h>

#include <math.h>
#include <string.h>
#include <sys/resource.h>

enum { WARM_UP = 3, LAYERS = 4, SAMPLES = 64 };

struct settings {
    int ranks, micro_batches, chunks, width, steps, ahead;
    td_pipeline_schedule schedule;
    const char *name;
    bool table, draw;
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
                               .ahead = settings->ahead,
                               .loss = mean_loss});
    if (!pipeline)
        bench_die("%s", td_last_error());
    return pipeline;
}

/* What is known of a step. Bubbles and shares are parts of 1, times nanoseconds. */
enum figure {
    TOTAL,
    BUSY,           /* the mean of the ranks */
    BUBBLE,         /* measured */
    NEEDED,         /* the bubble that the passes' own times imply */
    FORWARD,        /* the mean duration of a pass … */
    BACKWARD,       /* … */
    FORWARD_SPREAD, /* … and its standard deviation over the mean */
    BACKWARD_SPREAD,
    MESSAGE, /* from the end of a pass to the start of one that waits for it on another rank: the median */
    BETWEEN, /* from the end of a pass to the start of the next one of the rank, if that waits for nothing else */
    FAULTS,  /* page faults of all ranks */
    FIGURES
};

struct steps {
    double (*at)[FIGURES];
    int count;
    int best; /* the step with the least total */
    td_bytes drawing;
};

/* ---- The passes of a step ------------------------------------------------------------------------ */

/* The mean duration of the passes of one direction, and its coefficient of variation. */
static void describe_passes(const td_pipeline_trace *trace, bool backward, double *mean,
                            double *spread)
{
    double sum = 0, squares = 0, count = trace->count / 2;
    for (int i = 0; i < trace->count; i++)
        if (trace->passes[i].backward == backward)
            sum += (double)(trace->passes[i].end_ns - trace->passes[i].start_ns);
    *mean = sum / count;
    for (int i = 0; i < trace->count; i++)
        if (trace->passes[i].backward == backward) {
            double off = (double)(trace->passes[i].end_ns - trace->passes[i].start_ns) - *mean;
            squares += off * off;
        }
    *spread = sqrt(squares / count) / *mean;
}

/* The pass of another rank whose results a pass needs; NULL: none. */
static const td_pipeline_pass *needed_by(const td_pipeline_trace *trace,
                                         const td_pipeline_pass *pass)
{
    int stage = pass->stage + (pass->backward ? 1 : -1);
    for (int i = 0; i < trace->count; i++) {
        const td_pipeline_pass *other = &trace->passes[i];
        if (other->stage == stage && other->micro_batch == pass->micro_batch &&
            other->backward == pass->backward && other->rank != pass->rank)
            return other;
    }
    return NULL;
}

static double median_of(int64_t *numbers, int count)
{
    if (!count)
        return 0;
    bench_sort(numbers, (size_t)count);
    return (double)bench_at(numbers, (size_t)count, 0.5);
}

/* The medians of the two kinds of gaps before a pass. */
static void describe_gaps(const td_pipeline_trace *trace, double *message, double *between)
{
    int64_t *gaps[2] = {malloc((size_t)trace->count * sizeof(int64_t)),
                        malloc((size_t)trace->count * sizeof(int64_t))};
    int counts[2] = {0};
    if (!gaps[0] || !gaps[1])
        bench_die("out of memory");
    for (int i = 1; i < trace->count; i++) {
        const td_pipeline_pass *pass = &trace->passes[i], *before = pass - 1;
        const td_pipeline_pass *other = needed_by(trace, pass);
        if (before->rank != pass->rank)
            before = NULL; /* the first pass of a rank */
        bool waits = other && (!before || other->end_ns > before->end_ns);
        if (waits || before)
            gaps[!waits][counts[!waits]++] = pass->start_ns - (waits ? other : before)->end_ns;
    }
    *message = median_of(gaps[0], counts[0]);
    *between = median_of(gaps[1], counts[1]);
    free(gaps[0]);
    free(gaps[1]);
}

static double page_faults(void)
{
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (double)(usage.ru_minflt + usage.ru_majflt);
}

static void describe_step(td_pipeline *pipeline, double faults, double figures[FIGURES],
                          td_bytes *drawing)
{
    td_pipeline_trace trace;
    bench_check(td_pipeline_get_trace(pipeline, &trace));
    bench_check(td_group_all_reduce(&faults, &faults, 1, TD_F64, TD_SUM, NULL, NULL));
    double busy = (double)trace.busy_ns / trace.ranks;
    figures[TOTAL] = (double)trace.total_ns;
    figures[BUSY] = busy;
    figures[BUBBLE] = 1 - busy / (double)trace.total_ns;
    figures[NEEDED] = 1 - busy / (double)trace.needed_ns;
    figures[FAULTS] = faults;
    describe_passes(&trace, false, &figures[FORWARD], &figures[FORWARD_SPREAD]);
    describe_passes(&trace, true, &figures[BACKWARD], &figures[BACKWARD_SPREAD]);
    describe_gaps(&trace, &figures[MESSAGE], &figures[BETWEEN]);
    *drawing = td_pipeline_trace_text(&trace, 160);
    td_pipeline_trace_free(&trace);
}

static void measure(const struct settings *settings, td_pipeline *pipeline, struct steps *steps)
{
    TD_SCOPE;
    int64_t samples = (int64_t)SAMPLES * settings->micro_batches;
    td_tensor *x = td_randn(TD_SHAPE(samples, settings->width), TD_F32, NULL);
    td_tensor *y = td_zeros(TD_SHAPE(samples), TD_F32, NULL);
    for (int s = -WARM_UP; s < settings->steps; s++) {
        bench_check(td_module_zero_grad(td_pipeline_module(pipeline)));
        bench_check(td_barrier(NULL, NULL));
        double faults = page_faults();
        bench_check(td_pipeline_step(pipeline, x, y, NULL));
        faults = page_faults() - faults;
        if (s < 0)
            continue;
        td_bytes drawing;
        describe_step(pipeline, faults, steps->at[s], &drawing);
        if (s == 0 || steps->at[s][TOTAL] < steps->at[steps->best][TOTAL]) {
            td_bytes_free(&steps->drawing);
            steps->drawing = drawing;
            steps->best = s;
        } else {
            td_bytes_free(&drawing);
        }
    }
}

/* ---- Results ------------------------------------------------------------------------------------- */

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(const struct steps *steps, enum figure figure)
{
    double *numbers = malloc((size_t)steps->count * sizeof *numbers);
    if (!numbers)
        bench_die("out of memory");
    for (int s = 0; s < steps->count; s++)
        numbers[s] = steps->at[s][figure];
    qsort(numbers, (size_t)steps->count, sizeof *numbers, compare_doubles);
    double found = numbers[(steps->count - 1) / 2];
    free(numbers);
    return found;
}

static double percent(double bubble, double theory)
{
    return theory > 0 ? 100 * (bubble / theory - 1) : 0;
}

static void print_table(const struct settings *settings, const struct steps *steps, double theory)
{
    const double *best = steps->at[steps->best];
    double bubble = median(steps, BUBBLE), needed = median(steps, NEEDED);
    printf(
        "%-11s p %d, v %d, m %2d, ahead %d, width %d: bubble %.4f, in theory %.4f (%+.1f %%); a step takes "
        "%.2f ms, %.3f times the ideal\n",
        settings->name, settings->ranks, settings->chunks, settings->micro_batches, settings->ahead,
        settings->width, bubble, theory, percent(bubble, theory), median(steps, TOTAL) / 1e6,
        median(steps, TOTAL) * (1 - theory) / median(steps, BUSY));
    printf("    the passes alone imply %.4f (%+.1f %%); messages and waiting add %.4f\n", needed,
           percent(needed, theory), bubble - needed);
    printf("    best step: bubble %.4f (%+.1f %%), passes alone %.4f (%+.1f %%), %.2f ms\n",
           best[BUBBLE], percent(best[BUBBLE], theory), best[NEEDED], percent(best[NEEDED], theory),
           best[TOTAL] / 1e6);
    printf("    passes: F %.3f ms, varies by %.1f %%; B %.3f ms, %.1f %%; %.1f us after a message, "
           "%.1f us between passes; %.0f page faults a step\n",
           median(steps, FORWARD) / 1e6, 100 * median(steps, FORWARD_SPREAD),
           median(steps, BACKWARD) / 1e6, 100 * median(steps, BACKWARD_SPREAD),
           median(steps, MESSAGE) / 1e3, median(steps, BETWEEN) / 1e3, median(steps, FAULTS));
    if (settings->draw)
        printf("%.*s", (int)steps->drawing.size, steps->drawing.data);
}

static void print_json(const struct settings *settings, const struct steps *steps, double theory)
{
    const double *best = steps->at[steps->best];
    printf("{\"peer\": \"tandem\", \"what\": \"%s\", \"ranks\": %d, \"chunks\": %d, \"ahead\": %d, "
           "\"micro_batches\": %d, \"bubble\": %.5f, \"theory\": %.5f, \"passes_alone\": %.5f, "
           "\"best_bubble\": %.5f, \"best_ms\": %.3f, \"step_ms\": %.3f, \"times_ideal\": %.4f, "
           "\"forward_ms\": %.4f, \"forward_spread\": %.4f, \"backward_ms\": %.4f, "
           "\"backward_spread\": %.4f, \"message_us\": %.2f, \"between_us\": %.2f, "
           "\"page_faults\": %.0f}\n",
           settings->name, settings->ranks, settings->chunks, settings->ahead,
           settings->micro_batches, median(steps, BUBBLE), theory, median(steps, NEEDED),
           best[BUBBLE], best[TOTAL] / 1e6, median(steps, TOTAL) / 1e6,
           median(steps, TOTAL) * (1 - theory) / median(steps, BUSY), median(steps, FORWARD) / 1e6,
           median(steps, FORWARD_SPREAD), median(steps, BACKWARD) / 1e6,
           median(steps, BACKWARD_SPREAD), median(steps, MESSAGE) / 1e3,
           median(steps, BETWEEN) / 1e3, median(steps, FAULTS));
}

static td_status run(int rank, void *arg)
{
    const struct settings *settings = arg;
    bench_check(td_set_num_threads(1));
    bench_check(td_init_process_group(NULL));
    td_manual_seed(1);
    td_pipeline *pipeline = make_pipeline(settings);
    struct steps steps = {.at = malloc((size_t)settings->steps * sizeof *steps.at),
                          .count = settings->steps};
    if (!steps.at)
        bench_die("out of memory");
    measure(settings, pipeline, &steps);
    td_pipeline_stats stats;
    bench_check(td_pipeline_get_stats(pipeline, &stats));
    if (rank == 0) {
        (settings->table ? print_table : print_json)(settings, &steps, stats.theory);
        fflush(stdout);
    }
    free(steps.at);
    td_bytes_free(&steps.drawing);
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
                      : strcmp(argv[i], "--ahead") == 0         ? &settings.ahead
                                                                : NULL;
        if (number)
            *number = bench_number(argv[i++], value, number == &settings.ahead ? 0 : 1);
        else if (strcmp(argv[i], "--schedule") == 0 && value)
            settings.name = argv[++i];
        else if (strcmp(argv[i], "--table") == 0)
            settings.table = true;
        else if (strcmp(argv[i], "--draw") == 0)
            settings.table = settings.draw = true;
        else
            bench_die("usage: bench_pipeline [--ranks N] [--micro-batches N] [--schedule NAME] "
                      "[--chunks N] [--width N] [--steps N] [--ahead N] [--table] [--draw]");
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
