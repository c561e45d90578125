/* Trains a perceptron with DistributedDataParallel on a device, and shows how much of the reductions the backward pass
 * hides: the device's own times, by events, as a line of JSON and as a picture.
 *
 *     bench_gpu_ddp [--device cuda] [--ranks N] [--layers N] [--width N] [--batch N] [--steps N] [--bucket-mb N]
 *                   [--timeline FILE.svg]
 *
 * "cuda" gives each rank a device of its own; with "cuda:0" all share that one, and each gets an NCCL_HOSTID, without
 * which NCCL refuses it. Of the steps after the warm-up the median one is shown, by its time, of rank 0.
 *
 * A bucket is full where the compute stream has its last gradient: an event there. Its reduction ends where a stream that
 * only waits for it gets on: an event there. Both are in streams that run anyway, so the step is the one without them. */
#include "ddp_timeline.h"
#include "measure.h"

#include <tandem/tandem.h>

#include <time.h>

enum { WARM_UP = 5, MOST_STEPS = 1000, MOST_LAYERS = 100 };

struct settings {
    char device[32], timeline[512];
    int ranks, layers, width, batch, steps, bucket_mb;
};

/* The events of a step. */
struct recorder {
    td_device *device;
    td_stream *watch; /* waits for reductions */
    td_event *start, *backward, *backward_end, *step_end;
    td_event *ready[TIMELINE_BUCKETS], *reduced[TIMELINE_BUCKETS];
    td_work *works[TIMELINE_BUCKETS];
    bool watched[TIMELINE_BUCKETS]; /* since it was started */
    size_t bytes[TIMELINE_BUCKETS];
    int started, finished;
};

/* ---- Recording ------------------------------------------------------------------------------------------ */

static td_event *timed_event(td_device *device)
{
    td_event *event = td_event_create(device, &(td_event_options){.timing = true});
    if (!event)
        bench_die("%s", td_last_error());
    return event;
}

static void open_recorder(struct recorder *recorder, td_device *device)
{
    recorder->device = device;
    recorder->watch = td_stream_create(device, 0);
    td_event **single[] = {&recorder->start, &recorder->backward, &recorder->backward_end,
                           &recorder->step_end};
    for (int i = 0; i < 4; i++)
        *single[i] = timed_event(device);
    for (int i = 0; i < TIMELINE_BUCKETS; i++) {
        recorder->ready[i] = timed_event(device);
        recorder->reduced[i] = timed_event(device);
    }
}

static void close_recorder(struct recorder *recorder)
{
    td_event *single[] = {recorder->start, recorder->backward, recorder->backward_end,
                          recorder->step_end};
    for (int i = 0; i < 4; i++)
        td_event_destroy(single[i]);
    for (int i = 0; i < TIMELINE_BUCKETS; i++) {
        td_event_destroy(recorder->ready[i]);
        td_event_destroy(recorder->reduced[i]);
    }
    td_stream_release(recorder->watch);
}

static void watch_end(struct recorder *recorder, int at)
{
    TD_STREAM_SCOPE(recorder->watch);
    bench_check(td_work_wait(recorder->works[at], 0));
    bench_check(td_event_record(recorder->reduced[at], recorder->watch));
}

/* The hooks of td_ddp() are the average that it has without them, and the events. */
static td_status start_bucket(td_bucket *bucket, void *arg)
{
    struct recorder *recorder = arg;
    int at = recorder->started++;
    if (at >= TIMELINE_BUCKETS)
        return td_fail(TD_ERR_INVALID, "there are more than %d buckets; use a larger --bucket-mb",
                       TIMELINE_BUCKETS);
    td_tensor *buffer = td_bucket_buffer(bucket);
    recorder->bytes[at] = td_tensor_nbytes(buffer);
    bench_check(td_event_record(recorder->ready[at], NULL));
    bench_check(td_all_reduce(buffer, TD_AVG, td_bucket_group(bucket), &recorder->works[at]));
    recorder->watched[at] = td_work_test(recorder->works[at]);
    if (recorder->watched[at])
        watch_end(recorder, at);
    return TD_OK;
}

static td_status finish_bucket(td_bucket *bucket, void *arg)
{
    struct recorder *recorder = arg;
    (void)bucket;
    int at = recorder->finished++;
    if (at == 0)
        bench_check(td_event_record(recorder->backward_end, NULL));
    if (!recorder->watched
             [at]) /* a backend that calls by the host: waiting before would have stopped the pass */
        watch_end(recorder, at);
    td_status status = td_work_wait(recorder->works[at], 0);
    td_work_release(recorder->works[at]);
    recorder->works[at] = NULL;
    return status;
}

static double between(td_event *start, td_event *end)
{
    double ms = 0;
    bench_check(td_event_elapsed_ms(start, end, &ms));
    return ms;
}

static struct ddp_timeline read_times(const struct recorder *recorder)
{
    struct ddp_timeline timeline = {
        .backward = between(recorder->start, recorder->backward),
        .backward_end = between(recorder->start, recorder->backward_end),
        .step_end = between(recorder->start, recorder->step_end),
        .buckets = recorder->started,
    };
    for (int i = 0; i < recorder->started; i++) {
        timeline.ready[i] = between(recorder->start, recorder->ready[i]);
        timeline.end[i] = between(recorder->start, recorder->reduced[i]);
        timeline.bytes[i] = recorder->bytes[i];
    }
    return timeline;
}

/* ---- Training --------------------------------------------------------------------------------------------- */

static td_module *perceptron(const struct settings *settings)
{
    td_module *modules[2 * MOST_LAYERS + 1];
    int count = 0;
    for (int i = 0; i < settings->layers; i++) {
        modules[count++] = td_linear(settings->width, settings->width);
        modules[count++] = td_relu();
    }
    modules[count++] = td_linear(settings->width, 10);
    return td_sequential_of(modules, count);
}

/* The host waits for the device only behind it. */
static struct ddp_timeline step(td_module *model, td_optimizer *optimizer, td_tensor *input,
                                td_tensor *target, struct recorder *recorder)
{
    TD_SCOPE;
    recorder->started = recorder->finished = 0;
    bench_check(td_optimizer_zero_grad(optimizer));
    bench_check(td_barrier(NULL, NULL));
    bench_check(td_event_record(recorder->start, NULL));
    td_tensor *loss = td_cross_entropy(td_forward(model, input), target);
    bench_check(td_event_record(recorder->backward, NULL));
    bench_check(td_backward(loss));
    bench_check(td_optimizer_step(optimizer));
    bench_check(td_event_record(recorder->step_end, NULL));
    bench_check(td_device_synchronize(recorder->device));
    return read_times(recorder);
}

static int by_time(const void *a, const void *b)
{
    double x = ((const struct ddp_timeline *)a)->step_end;
    double y = ((const struct ddp_timeline *)b)->step_end;
    return (x > y) - (x < y);
}

static void print_result(const struct settings *settings, const struct ddp_timeline *median)
{
    double all = ddp_timeline_reduction(median), hidden = ddp_timeline_hidden(median);
    char title[160];
    snprintf(title, sizeof title, "%d layers of %d, batch %d, %d ranks on %s: a step takes %.2f ms",
             settings->layers, settings->width, settings->batch, settings->ranks, settings->device,
             median->step_end);
    printf(
        "{\"device\": \"%s\", \"ranks\": %d, \"buckets\": %d, \"step_ms\": %.3f, \"backward_ms\": "
        "%.3f, \"reduction_ms\": %.3f, \"hidden_ms\": %.3f, \"hidden\": %.3f}\n",
        settings->device, settings->ranks, median->buckets, median->step_end,
        median->backward_end - median->backward, all, hidden, all > 0 ? hidden / all : 0);
    for (int i = 0; i < median->buckets; i++)
        printf("  bucket %2d %8.2f MiB  full at %8.3f ms  reduced %8.3f to %8.3f ms\n", i,
               (double)median->bytes[i] / 1048576, median->ready[i], ddp_timeline_start(median, i),
               median->end[i]);
    if (settings->timeline[0] && ddp_timeline_draw(median, title, settings->timeline))
        bench_die("%s: %s", settings->timeline, strerror(errno));
    fflush(stdout);
}

static td_device *device_of(const struct settings *settings, int rank)
{
    char name[64];
    bool shared = strchr(settings->device, ':') != NULL;
    snprintf(name, sizeof name, "%d", rank);
    if (shared) {
        setenv("NCCL_HOSTID", name, 0);
        setenv("NCCL_SOCKET_IFNAME", "lo", 0);
    }
    snprintf(name, sizeof name, shared ? "%s" : "%s:%d", settings->device, rank);
    td_device *device = td_device_get(name);
    if (!device || td_set_device(device))
        bench_die("%s", td_last_error());
    return device;
}

static td_status run(int rank, void *arg)
{
    const struct settings *settings = arg;
    static struct ddp_timeline steps[MOST_STEPS];
    struct recorder recorder = {0};
    td_device *device = device_of(settings, rank);
    bench_check(td_init_process_group(NULL));
    open_recorder(&recorder, device);
    td_manual_seed(1);
    td_comm_hook hook = {
        .name = "timed", .start = start_bucket, .finish = finish_bucket, .arg = &recorder};
    td_module *model = td_ddp(perceptron(settings), &(td_ddp_options){
                                                        .hook = hook,
                                                        .bucket_cap_mb = settings->bucket_mb,
                                                    });
    td_optimizer *optimizer = model ? td_sgd(model, &(td_sgd_options){.lr = 0.01}) : NULL;
    td_tensor *input = td_randn(TD_SHAPE(settings->batch, settings->width), TD_F32, device);
    td_tensor *target = td_randint(0, 10, TD_SHAPE(settings->batch), TD_I64, device);
    if (!optimizer || !input || !target)
        bench_die("%s", td_last_error());
    for (int i = 0; i < WARM_UP; i++)
        step(model, optimizer, input, target, &recorder);
    for (int i = 0; i < settings->steps; i++)
        steps[i] = step(model, optimizer, input, target, &recorder);
    qsort(steps, (size_t)settings->steps, sizeof *steps, by_time);
    if (rank == 0)
        print_result(settings, &steps[settings->steps / 2]);
    td_tensor_release(input);
    td_tensor_release(target);
    td_optimizer_destroy(optimizer);
    td_module_destroy(model);
    td_status status = td_destroy_process_group();
    close_recorder(&recorder);
    return status;
}

static struct settings read_settings(int argc, char **argv)
{
    struct settings settings = {.device = "cuda",
                                .ranks = 2,
                                .layers = 8,
                                .width = 2048,
                                .batch = 1024,
                                .steps = 20,
                                .bucket_mb = 25};
    struct {
        const char *name;
        int *number;
    } numbers[] = {{"--ranks", &settings.ranks}, {"--layers", &settings.layers},
                   {"--width", &settings.width}, {"--batch", &settings.batch},
                   {"--steps", &settings.steps}, {"--bucket-mb", &settings.bucket_mb}};
    for (int i = 1; i < argc; i += 2) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        int found = 0;
        for (size_t n = 0; n < sizeof numbers / sizeof *numbers; n++)
            if (!strcmp(argv[i], numbers[n].name) && ++found)
                *numbers[n].number = bench_number(argv[i], value, 1);
        if (!strcmp(argv[i], "--device") && value && ++found)
            snprintf(settings.device, sizeof settings.device, "%s", value);
        if (!strcmp(argv[i], "--timeline") && value && ++found)
            snprintf(settings.timeline, sizeof settings.timeline, "%s", value);
        if (!found)
            bench_die("usage: bench_gpu_ddp [--device NAME] [--ranks N] [--layers N] [--width N] "
                      "[--batch N] [--steps N] [--bucket-mb N] [--timeline FILE.svg]");
    }
    if (settings.steps > MOST_STEPS || settings.layers > MOST_LAYERS)
        bench_die("--steps is at most %d, and --layers %d", MOST_STEPS, MOST_LAYERS);
    return settings;
}

int main(int argc, char **argv)
{
    td_spawn_main();
    struct settings settings = read_settings(argc, argv);
    bench_check(
        td_spawn(run, &settings, settings.ranks, &(td_spawn_options){.arg_size = sizeof settings}));
}
