/* Measures the bubble of pipelines: the part of a step in which the ranks do not compute.
 *
 *     bench_pipeline [--work matrix|clock] [--ranks N] [--micro-batches N] [--schedule NAME] [--chunks N] [--ahead N]
 *                    [--width N] [--samples N] [--layers N] [--pass-us N] [--steps N] [--pin A,B,…] [--table] [--draw]
 *
 * NAME is gpipe, 1f1b or interleaved. All stages are the same (pipeline_stages.h):
 *
 *     matrix    products of matrices, of one thread. What the passes take, and how much they differ, is the machine's
 *     clock     a pass spins for a given time. The stages are equal by construction, whatever the machine does beside
 *               them, so that what exceeds the formula is the cost of the schedule and of the messages
 *
 * --pin pins the thread of rank i that computes to the i-th processor; threads that carry messages run anywhere. They are
 * there after the first step, so it is pinned then.
 *
 * Of the steps the medians count: the bubble beside the theoretical one, and the time of a step beside that of
 * the busy time and the theoretical bubble. The busy time is measured, so that ranks that slow each other down (shared
 * caches, shared processors) do not count as a bubble. The share of the machine's time that its host has given to other guests
 * meanwhile (steal time) is printed beside that.
 *
 * The formula is for passes of equal duration. So the bubble that the measured durations imply is printed, too, which is
 * that of the critical path of the trace; the rest is the cost of messages and waiting. How much passes vary, and the step
 * with the least time, show what the machine adds. --draw draws that step. */
#include "measure.h"
#include "pipeline_stages.h"

#include <math.h>
#include <sched.h>
#include <string.h>
#include <sys/resource.h>

enum { WARM_UP = 3 };

static const double target = 1.1; /* times the theoretical bubble */

struct settings {
    int ranks, micro_batches, chunks, ahead;
    int width, samples,
        layers;  /* of --work matrix; the messages of both kinds have samples * width elements */
    int pass_us; /* of --work clock */
    int steps;
    td_pipeline_schedule schedule;
    const char *name;
    const char *pin; /* NULL: not pinned */
    bool by_clock;
    bool table, draw;
};

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
        stages[c] = settings->by_clock ? bench_clock_stage(settings->width, settings->pass_us)
                                       : bench_matrix_stage(settings->width, settings->layers);
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
    int best;     /* the step with the least total */
    double steal; /* of the machine's time, a part of 1 */
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

/* The thread of `rank` gets the processor at its place of the list. */
static void pin_thread(const char *list, int rank)
{
    cpu_set_t set;
    for (int i = 0; i < rank && list; i++)
        list = (list = strchr(list, ',')) ? list + 1 : NULL;
    if (!list)
        bench_die("--pin has no processor for rank %d", rank);
    CPU_ZERO(&set);
    CPU_SET(atoi(list), &set);
    if (sched_setaffinity(0, sizeof set, &set))
        bench_die("processor %d: %s", atoi(list), strerror(errno));
}

/* The machine's time since it was started, in ticks: what its host has given to other guests, and all. */
static void read_steal(double *steal, double *all)
{
    double fields[8] = {0};
    FILE *file = fopen("/proc/stat", "r");
    if (file && fscanf(file, "cpu %lf %lf %lf %lf %lf %lf %lf %lf", &fields[0], &fields[1],
                       &fields[2], &fields[3], &fields[4], &fields[5], &fields[6], &fields[7]) != 8)
        fields[7] = 0;
    if (file)
        fclose(file);
    *all = 0;
    for (int i = 0; i < 8; i++)
        *all += fields[i];
    *steal = fields[7];
}

static void measure(const struct settings *settings, td_pipeline *pipeline, struct steps *steps)
{
    TD_SCOPE;
    int64_t samples = (int64_t)settings->samples * settings->micro_batches;
    double stolen[2], all[2];
    td_tensor *x = td_randn(TD_SHAPE(samples, settings->width), TD_F32, NULL);
    td_tensor *y = td_zeros(TD_SHAPE(samples), TD_F32, NULL);
    for (int s = -WARM_UP; s < settings->steps; s++) {
        bench_check(td_module_zero_grad(td_pipeline_module(pipeline)));
        bench_check(td_barrier(NULL, NULL));
        double faults = page_faults();
        bench_check(td_pipeline_step(pipeline, x, y, NULL));
        faults = page_faults() - faults;
        if (s == -WARM_UP && settings->pin)
            pin_thread(settings->pin, td_get_rank(NULL));
        if (s < 0)
            continue;
        if (s == 0)
            read_steal(&stolen[0], &all[0]);
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
    read_steal(&stolen[1], &all[1]);
    steps->steal = all[1] > all[0] ? (stolen[1] - stolen[0]) / (all[1] - all[0]) : 0;
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

static const char *work_of(const struct settings *settings)
{
    return settings->by_clock ? "clock" : "matrix";
}

static void print_table(const struct settings *settings, const struct steps *steps, double theory)
{
    const double *best = steps->at[steps->best];
    double bubble = median(steps, BUBBLE), needed = median(steps, NEEDED);
    printf(
        "%-11s p %d, v %d, m %2d, ahead %d, %s: bubble %.4f, in theory %.4f (%+.1f %%, within 10 %%: %s); a step "
        "takes %.2f ms, %.3f times the ideal\n",
        settings->name, settings->ranks, settings->chunks, settings->micro_batches, settings->ahead,
        work_of(settings), bubble, theory, percent(bubble, theory),
        bubble <= target * theory ? "yes" : "no", median(steps, TOTAL) / 1e6,
        median(steps, TOTAL) * (1 - theory) / median(steps, BUSY));
    printf("    the passes alone imply %.4f (%+.1f %%); messages and waiting add %.4f\n", needed,
           percent(needed, theory), bubble - needed);
    printf("    best step: bubble %.4f (%+.1f %%), passes alone %.4f (%+.1f %%), %.2f ms\n",
           best[BUBBLE], percent(best[BUBBLE], theory), best[NEEDED], percent(best[NEEDED], theory),
           best[TOTAL] / 1e6);
    printf("    passes: F %.3f ms, varies by %.1f %%; B %.3f ms, %.1f %%; %.1f us after a message, "
           "%.1f us between passes; %.0f page faults a step; steal time %.1f %%\n",
           median(steps, FORWARD) / 1e6, 100 * median(steps, FORWARD_SPREAD),
           median(steps, BACKWARD) / 1e6, 100 * median(steps, BACKWARD_SPREAD),
           median(steps, MESSAGE) / 1e3, median(steps, BETWEEN) / 1e3, median(steps, FAULTS),
           100 * steps->steal);
    if (settings->draw)
        printf("%.*s", (int)steps->drawing.size, steps->drawing.data);
}

static void print_json(const struct settings *settings, const struct steps *steps, double theory)
{
    const double *best = steps->at[steps->best];
    printf(
        "{\"peer\": \"tandem\", \"what\": \"%s\", \"work\": \"%s\", \"ranks\": %d, \"chunks\": %d, \"ahead\": %d, "
        "\"micro_batches\": %d, \"bubble\": %.5f, \"theory\": %.5f, \"passes_alone\": %.5f, "
        "\"best_bubble\": %.5f, \"best_ms\": %.3f, \"step_ms\": %.3f, \"times_ideal\": %.4f, "
        "\"forward_ms\": %.4f, \"forward_spread\": %.4f, \"backward_ms\": %.4f, "
        "\"backward_spread\": %.4f, \"message_us\": %.2f, \"between_us\": %.2f, "
        "\"page_faults\": %.0f, \"steal\": %.4f, \"within\": %d}\n",
        settings->name, work_of(settings), settings->ranks, settings->chunks, settings->ahead,
        settings->micro_batches, median(steps, BUBBLE), theory, median(steps, NEEDED), best[BUBBLE],
        best[TOTAL] / 1e6, median(steps, TOTAL) / 1e6,
        median(steps, TOTAL) * (1 - theory) / median(steps, BUSY), median(steps, FORWARD) / 1e6,
        median(steps, FORWARD_SPREAD), median(steps, BACKWARD) / 1e6,
        median(steps, BACKWARD_SPREAD), median(steps, MESSAGE) / 1e3, median(steps, BETWEEN) / 1e3,
        median(steps, FAULTS), steps->steal, median(steps, BUBBLE) <= target * theory);
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

static const char usage[] =
    "usage: bench_pipeline [--work matrix|clock] [--ranks N] [--micro-batches N] [--schedule NAME]\n"
    "                      [--chunks N] [--ahead N] [--width N] [--samples N] [--layers N]\n"
    "                      [--pass-us N] [--steps N] [--pin A,B,…] [--table] [--draw]";

static int *number_of(struct settings *settings, const char *option)
{
    const struct {
        const char *option;
        int *number;
    } all[] = {
        {"--ranks", &settings->ranks},     {"--micro-batches", &settings->micro_batches},
        {"--chunks", &settings->chunks},   {"--ahead", &settings->ahead},
        {"--width", &settings->width},     {"--samples", &settings->samples},
        {"--layers", &settings->layers},   {"--steps", &settings->steps},
        {"--pass-us", &settings->pass_us},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (strcmp(option, all[i].option) == 0)
            return all[i].number;
    return NULL;
}

static struct settings read_settings(int argc, char **argv)
{
    struct settings settings = {.ranks = 2,
                                .micro_batches = 8,
                                .chunks = 1,
                                .width = 256,
                                .samples = 256,
                                .layers = 24,
                                .pass_us = 5000,
                                .steps = 20,
                                .name = "1f1b"};
    const char *work = "matrix";
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        int *number = number_of(&settings, argv[i]);
        if (number)
            *number = bench_number(argv[i++], value, number == &settings.ahead ? 0 : 1);
        else if (strcmp(argv[i], "--schedule") == 0 && value)
            settings.name = argv[++i];
        else if (strcmp(argv[i], "--work") == 0 && value)
            work = argv[++i];
        else if (strcmp(argv[i], "--pin") == 0 && value)
            settings.pin = argv[++i];
        else if (strcmp(argv[i], "--table") == 0)
            settings.table = true;
        else if (strcmp(argv[i], "--draw") == 0)
            settings.table = settings.draw = true;
        else
            bench_die("%s", usage);
    }
    settings.schedule = schedule_of(settings.name);
    settings.by_clock = strcmp(work, "clock") == 0;
    if (!settings.by_clock && strcmp(work, "matrix") != 0)
        bench_die("--work is matrix or clock");
    if (settings.chunks > 16)
        bench_die("--chunks is 16 at most");
    return settings;
}

int main(int argc, char **argv)
{
    struct settings settings = read_settings(argc, argv);
    bench_check(td_spawn(run, &settings, settings.ranks, NULL));
}
