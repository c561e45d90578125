/* Measures calls on memory of a device that go by way of the host, in pieces (TD__STAGED_PIECE in src/staging/staging.h).
 *
 *     bench_staging [--device NAME] [--mib N] [--repeats N]
 *
 * Two ranks: an all_reduce and a message on memory of the device, beside the same call on host memory. The default is the
 * toy accelerator of the tests, which copies as fast as the host and runs each stream in a thread:
 *
 *     TANDEM_PLUGIN_PATH=build/release/tests/plugins/toy TANDEM_TOY_DELAY_US=0 TANDEM_TOY_MEMORY=400000000 bench_staging */
#include "measure.h"

#include <tandem/tandem.h>

#include <time.h>

struct settings {
    char device[32];
    int bytes, repeats;
};

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

static td_status call(td_tensor *x, bool message)
{
    if (!message)
        return td_all_reduce(x, TD_SUM, NULL, NULL);
    return td_get_rank(NULL) ? td_recv(x, 0, 0, NULL, NULL) : td_send(x, 1, 0, NULL);
}

/* The median in nanoseconds; of rank 1, which receives the message. */
static int64_t measure(td_device *device, const struct settings *settings, bool message)
{
    int64_t *times = calloc((size_t)settings->repeats, sizeof *times);
    td_tensor *x = td_zeros(TD_SHAPE(settings->bytes / 4), TD_F32, device);
    if (!times || !x)
        bench_die("%s", td_last_error());
    for (int i = -2; i < settings->repeats; i++) {
        bench_check(td_device_synchronize(device));
        bench_check(td_barrier(NULL, NULL));
        int64_t start = now_ns();
        bench_check(call(x, message));
        bench_check(td_device_synchronize(device));
        if (i >= 0)
            times[i] = now_ns() - start;
    }
    bench_sort(times, (size_t)settings->repeats);
    int64_t median = bench_at(times, (size_t)settings->repeats, 0.5);
    td_tensor_release(x);
    free(times);
    return median;
}

static td_status run(int rank, void *arg)
{
    const struct settings *settings = arg;
    bench_check(td_init_process_group(NULL));
    td_device *host = td_device_get("cpu"), *device = td_device_get(settings->device);
    for (int message = 0; message < 2; message++) {
        double on_host = (double)measure(host, settings, message) / 1e6;
        double on_device = (double)measure(device, settings, message) / 1e6;
        if (rank == 1)
            printf("%-10s %4d MiB: host %8.3f ms, %s %8.3f ms\n",
                   message ? "message" : "all_reduce", settings->bytes >> 20, on_host,
                   settings->device, on_device);
    }
    return td_destroy_process_group();
}

int main(int argc, char **argv)
{
    struct settings settings = {.device = "toy:0", .bytes = 64 << 20, .repeats = 11};
    for (int i = 1; i < argc; i += 2) {
        if (!strcmp(argv[i], "--device") && argv[i + 1])
            snprintf(settings.device, sizeof settings.device, "%s", argv[i + 1]);
        else if (!strcmp(argv[i], "--mib"))
            settings.bytes = bench_number(argv[i], argv[i + 1], 1) << 20;
        else if (!strcmp(argv[i], "--repeats"))
            settings.repeats = bench_number(argv[i], argv[i + 1], 1);
        else
            bench_die("there is no option %s", argv[i]);
    }
    bench_check(td_spawn(run, &settings, 2, NULL));
    return 0;
}
