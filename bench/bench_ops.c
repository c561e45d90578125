/* The kernels of products and pooling, one thread: what bench/peers/torch_ops.py measures with
 * PyTorch.
 *
 * A row is a kernel with its sizes, and a pass: forward, or one of the gradients. Each is called for
 * a while, in samples of about a millisecond; the row has the median and the least time of a call.
 * On one thread it is the processor's time that counts, which other programs disturb less. */
#include "measure.h"

#include "tensor/kernels.h"
#include <tandem/ops.h>

#include <time.h>

#define SHAPE(...) (const int64_t[]){__VA_ARGS__}, (int)(sizeof((int64_t[]){__VA_ARGS__}) / 8)
#define KERNELS (&td__cpu_kernels)

enum { MOST_SAMPLES = 4096 };

static int row_ms = 200;
static bool table, one_thread;
static const char *wanted; /* only rows whose name contains it */

static const char usage[] =
    "Usage: bench_ops [--table] [--ms MS] [--threads N] [WHAT]\n"
    "\n"
    "Times matrix products, convolutions and pooling, each for MS milliseconds (200), on N threads\n"
    "(1), and prints a line of JSON for each. With WHAT only those whose name contains it.\n";

/* One row: its tensors, and what is timed with them. */
struct row {
    const char *what, *pass;
    td_tensor *out, *a, *b, *c;
    struct td__window window;
    void (*call)(const struct row *row);
};

static double now_us(void)
{
    struct timespec now;
    clock_gettime(one_thread ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec / 1e3;
}

static double time_calls(const struct row *row, int calls)
{
    double start = now_us();
    for (int i = 0; i < calls; i++)
        row->call(row);
    return now_us() - start;
}

static void measure(const struct row *row)
{
    static int64_t samples[MOST_SAMPLES]; /* in nanoseconds */
    row->call(row);
    double once = time_calls(row, 2) / 2;
    int calls = once > 1000 ? 1 : (int)(1000 / once) + 1;
    size_t count = 0;
    for (double end = now_us() + row_ms * 1e3; count < MOST_SAMPLES && now_us() < end;)
        samples[count++] = (int64_t)(time_calls(row, calls) / calls * 1e3);
    bench_sort(samples, count);
    double median = (double)bench_at(samples, count, 0.5) / 1e3;
    double least = (double)bench_at(samples, count, 0) / 1e3;
    if (table)
        printf("%-24s %-12s %10.1f %10.1f\n", row->what, row->pass, median, least);
    else
        printf("{\"peer\": \"tandem\", \"what\": \"%s\", \"pass\": \"%s\", \"median_us\": %.2f, "
               "\"least_us\": %.2f}\n",
               row->what, row->pass, median, least);
    fflush(stdout);
}

/* A tensor of numbers between -1 and 1. */
static td_tensor *filled(const int64_t *shape, int ndim)
{
    td_tensor *tensor = td_empty(shape, ndim, TD_F32);
    if (!tensor)
        bench_die("%s", td_last_error());
    float *data = td_tensor_data(tensor);
    uint32_t state = 1;
    for (int64_t i = 0; i < td_tensor_numel(tensor); i++) {
        state = state * 1664525 + 1013904223;
        data[i] = (float)(state >> 8) / 0x1p23f - 1;
    }
    return tensor;
}

/* ---- Linear layers ---------------------------------------------------------------------------- */

static void call_linear(const struct row *row)
{
    bench_check(KERNELS->linear(row->out, row->a, row->b, row->c));
}

static void call_matmul(const struct row *row)
{
    bench_check(KERNELS->matmul(row->out, row->a, row->b, 1, false));
}

static void call_accumulate(const struct row *row)
{
    bench_check(KERNELS->matmul(row->out, row->a, row->b, 1, true));
}

static void bench_linear(const char *what, int64_t n, int64_t in, int64_t out)
{
    TD_SCOPE
    {
        td_tensor *x = filled(SHAPE(n, in)), *w = filled(SHAPE(out, in)),
                  *y = filled(SHAPE(n, out));
        td_tensor *bias = filled(SHAPE(out)), *grad_w = filled(SHAPE(out, in));
        measure(&(struct row){what, "forward", y, x, w, bias, .call = call_linear});
        measure(&(struct row){what, "grad_input", x, y, w, .call = call_matmul});
        measure(&(struct row){what, "grad_weight", grad_w, td_transpose(y, 0, 1), x,
                              .call = call_accumulate});
    }
}

static void bench_batch(const char *what, int64_t batch, int64_t m, int64_t k, int64_t n)
{
    TD_SCOPE
    {
        td_tensor *a = filled(SHAPE(batch, m, k)), *b = filled(SHAPE(batch, k, n));
        td_tensor *c = filled(SHAPE(batch, m, n));
        measure(&(struct row){what, "forward", c, a, b, .call = call_matmul});
        measure(&(struct row){what, "grad_a", a, c, td_transpose(b, 1, 2), .call = call_matmul});
        measure(&(struct row){what, "grad_b", b, td_transpose(a, 1, 2), c, .call = call_matmul});
    }
}

/* ---- Convolutions and pooling ----------------------------------------------------------------- */

static void call_conv(const struct row *row)
{
    bench_check(KERNELS->conv2d(row->out, row->a, row->b, row->c, &row->window));
}

static void call_conv_input(const struct row *row)
{
    bench_check(KERNELS->conv2d_grad_input(row->out, row->a, row->b, &row->window));
}

static void call_conv_weight(const struct row *row)
{
    bench_check(KERNELS->conv2d_grad_weight(row->out, row->c, row->a, row->b, &row->window, false));
}

static void bench_conv(const char *what, const int64_t x_shape[4], int64_t out, int64_t kernel,
                       int64_t stride, int64_t padding)
{
    TD_SCOPE
    {
        struct td__window w = {
            {kernel, kernel}, {stride, stride}, {padding, padding}, {1, 1}, .groups = 1};
        int64_t height = (x_shape[2] + 2 * padding - kernel) / stride + 1;
        int64_t width = (x_shape[3] + 2 * padding - kernel) / stride + 1;
        td_tensor *x = filled(x_shape, 4), *y = filled(SHAPE(x_shape[0], out, height, width));
        td_tensor *weight = filled(SHAPE(out, x_shape[1], kernel, kernel)),
                  *bias = filled(SHAPE(out));
        measure(&(struct row){what, "forward", y, x, weight, bias, w, call_conv});
        measure(&(struct row){what, "grad_input", x, y, weight, NULL, w, call_conv_input});
        measure(&(struct row){what, "grad_weight", weight, y, x, bias, w, call_conv_weight});
    }
}

static void call_pool(const struct row *row)
{
    bench_check(KERNELS->max_pool2d(row->out, row->b, row->a, &row->window));
}

static void call_pool_grad(const struct row *row)
{
    bench_check(KERNELS->max_pool2d_grad(row->out, row->a, row->b));
}

static void bench_pool(const char *what, int64_t n, int64_t c, int64_t size)
{
    TD_SCOPE
    {
        struct td__window w = {{2, 2}, {2, 2}, {0, 0}, {1, 1}, .groups = 1};
        td_tensor *x = filled(SHAPE(n, c, size, size)),
                  *y = filled(SHAPE(n, c, size / 2, size / 2));
        td_tensor *indices = td_zeros(SHAPE(n, c, size / 2, size / 2), TD_I32);
        measure(&(struct row){what, "forward", y, x, indices, NULL, w, call_pool});
        measure(&(struct row){what, "grad_input", x, y, indices, NULL, w, call_pool_grad});
    }
}

static bool is_wanted(const char *what)
{
    return !wanted || strstr(what, wanted);
}

#define ROW(what, call)                                                                            \
    do {                                                                                           \
        if (is_wanted(what))                                                                       \
            call;                                                                                  \
    } while (0)
#define LINEAR(n, in, out)                                                                         \
    ROW("linear_" #n "_" #in "_" #out, bench_linear("linear_" #n "_" #in "_" #out, n, in, out))
#define CONV(name, out, kernel, stride, padding, ...)                                              \
    ROW(name, bench_conv(name, (const int64_t[]){__VA_ARGS__}, out, kernel, stride, padding))

static void run_all(void)
{
    LINEAR(64, 784, 1024);
    LINEAR(64, 1024, 1024);
    LINEAR(64, 1024, 10);
    LINEAR(64, 320, 50);
    LINEAR(64, 50, 10);
    LINEAR(1, 1024, 1024);
    LINEAR(1024, 256, 768);
    LINEAR(1024, 256, 256);
    LINEAR(1024, 256, 1024);
    LINEAR(1024, 1024, 256);
    ROW("batch_32_128_64_128", bench_batch("batch_32_128_64_128", 32, 128, 64, 128));
    ROW("square_512", bench_batch("square_512", 1, 512, 512, 512));
    CONV("conv_1_10_k5", 10, 5, 1, 0, 64, 1, 28, 28);
    CONV("conv_10_20_k5", 20, 5, 1, 0, 64, 10, 12, 12);
    CONV("conv_64_64_k3", 64, 3, 1, 1, 8, 64, 32, 32);
    CONV("conv_64_128_k3_s2", 128, 3, 2, 1, 8, 64, 32, 32);
    CONV("conv_64_256_k1", 256, 1, 1, 0, 8, 64, 32, 32);
    ROW("max_pool_24", bench_pool("max_pool_24", 64, 10, 24));
    ROW("max_pool_8", bench_pool("max_pool_8", 64, 20, 8));
}

int main(int argc, char **argv)
{
    int threads = 1;
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
    one_thread = threads == 1;
    if (table)
        printf("%-24s %-12s %10s %10s\n", "", "", "median us", "least us");
    run_all();
    return 0;
}
