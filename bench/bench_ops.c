/* Measures operators and optimizers, as bench/peers/torch_ops.py does with PyTorch.
 *
 * A row is an operation with its sizes, and a pass: forward, or a gradient. Each is called in samples of
 * about a millisecond; the row has the median and the minimum time of a call. With one thread it is CPU
 * time, which other programs disturb less. */
#include "bench_ops.h"

#include <time.h>

enum { MOST_SAMPLES = 4096 };

static int row_ms = 100, threads = 1;
static bool table;
static const char *wanted; /* only rows whose name contains it */

static const char usage[] =
    "Usage: bench_ops [--table] [--ms MS] [--threads N] [WHAT]\n"
    "\n"
    "Times operators and the steps of optimizers, each for MS milliseconds (100), on N threads (1),\n"
    "and prints a line of JSON for each. With WHAT only those whose name contains it.\n";

static double now_us(void)
{
    struct timespec now;
    clock_gettime(threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec / 1e3;
}

static double time_calls(const struct ops_row *row, int calls)
{
    double start = now_us();
    for (int i = 0; i < calls; i++)
        row->call(row);
    return now_us() - start;
}

void ops_row(const struct ops_row *row)
{
    static int64_t samples[MOST_SAMPLES]; /* in nanoseconds */
    row->call(row);
    double once = time_calls(row, 2) / 2;
    int calls = once > 1000 ? 1 : (int)(1000 / once) + 1;
    size_t count = 0;
    for (double end = now_us() + row_ms * 1e3;
         count < 3 || (count < MOST_SAMPLES && now_us() < end);)
        samples[count++] = (int64_t)(time_calls(row, calls) / calls * 1e3);
    bench_sort(samples, count);
    double median = (double)bench_at(samples, count, 0.5) / 1e3;
    double least = (double)bench_at(samples, count, 0) / 1e3;
    if (table)
        printf("%-24s %-12s %10.1f %10.1f\n", row->what, row->pass, median, least);
    else
        printf("{\"peer\": \"tandem\", \"what\": \"%s\", \"pass\": \"%s\", \"threads\": %d, "
               "\"median_us\": %.2f, \"least_us\": %.2f}\n",
               row->what, row->pass, threads, median, least);
    fflush(stdout);
}

bool bench_is_wanted(const char *what)
{
    return !wanted || strstr(what, wanted);
}

td_tensor *bench_made(td_tensor *tensor)
{
    if (!tensor)
        bench_die("%s", td_last_error());
    return tensor;
}

td_tensor *bench_filled(const int64_t *shape, int ndim)
{
    td_tensor *tensor = bench_made(td_empty(shape, ndim, TD_F32, NULL));
    float *data = td_tensor_data(tensor);
    uint32_t state = 1;
    for (int64_t i = 0; i < td_tensor_numel(tensor); i++) {
        state = state * 1664525 + 1013904223;
        data[i] = (float)(state >> 8) / 0x1p23f - 1;
    }
    return tensor;
}

int main(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        const char *option = argv[i];
        if (!strcmp(option, "--help") || !strcmp(option, "-h")) {
            fputs(usage, stdout);
            return 0;
        } else if (!strcmp(option, "--table")) {
            table = true;
        } else if (!strcmp(option, "--ms")) {
            row_ms = bench_number(option, argv[++i], 1);
        } else if (!strcmp(option, "--threads")) {
            threads = bench_number(option, argv[++i], 1);
        } else if (*option != '-') {
            wanted = option;
        } else {
            fputs(usage, stderr);
            return 2;
        }
    }
    bench_check(td_set_num_threads(threads));
    if (table)
        printf("%-24s %-12s %10s %10s\n", "", "", "median us", "least us");
    bench_kernels();
    bench_public();
    return 0;
}
