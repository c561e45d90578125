/* How fast a device runs the operators of a GPT-2 step that wait for memory, in GB/s of what they must read and write.
 *
 *     bench_gpu_ops [--device cuda:0] [--rows 16384] [--width 768] [--repeat 50] [--only TEXT]
 *
 * Times are of many calls in a row, so that the host's part is hidden where the device is slower; backward passes include
 * the forward pass before them, and the sum of the gradient with that of the leaf, and so do their bytes. */
#include "measure.h"

#include <tandem/amp.h>
#include <tandem/nn.h>
#include <tandem/ops.h>
#include <tandem/optim.h>

#include <time.h>

static struct {
    td_device *device;
    const char *only;
    int64_t rows, width;
    int repeat;
} bench = {.rows = 16384, .width = 768, .repeat = 50};

/* Operands, each on the device. */
static struct {
    td_tensor *x, *h, *weight, *bias; /* f32, bf16, parameters */
    td_tensor *wide, *wide_half;      /* [rows, 4 width] */
    td_tensor *grad, *grad_half, *grad_wide;
    td_tensor *parameter;
    td_optimizer *adamw;
} on;

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

/* Runs it, and prints the rate for `bytes` a run. */
static void measure(const char *name, double bytes, void (*run)(void))
{
    if (bench.only && !strstr(name, bench.only))
        return;
    for (int i = 0; i < 3; i++)
        run();
    bench_check(td_device_synchronize(bench.device));
    double start = now();
    for (int i = 0; i < bench.repeat; i++)
        run();
    bench_check(td_device_synchronize(bench.device));
    double seconds = (now() - start) / bench.repeat;
    printf("%-44s %9.1f us %9.0f GB/s\n", name, 1e6 * seconds, bytes / seconds / 1e9);
    fflush(stdout);
}

static void done(td_tensor *y)
{
    if (!y)
        bench_die("%s", td_last_error());
}

static void back(td_tensor *y, td_tensor *grad)
{
    done(y);
    bench_check(td_backward_from(&y, &grad, 1, NULL));
}

#define CASE(name, ...)                                                                            \
    static void name(void)                                                                         \
    {                                                                                              \
        TD_SCOPE;                                                                                  \
        __VA_ARGS__                                                                                \
    }
#define BF16_SCOPE                                                                                 \
    TD_AUTOCAST(td_device_kind(bench.device), &(td_autocast_options){.dtype = TD_BF16})
#define NORM(x, residual)                                                                          \
    td_add_layer_norm(x, residual, TD_SHAPE(bench.width), on.weight, on.bias, 1e-5, NULL)

CASE(copy, done(td_clone(on.x));)
CASE(norm_forward, TD_NO_GRAD;
     done(td_f_layer_norm(on.x, TD_SHAPE(bench.width), on.weight, on.bias, 1e-5));)
CASE(norm_both,
     back(td_f_layer_norm(on.x, TD_SHAPE(bench.width), on.weight, on.bias, 1e-5), on.grad);)
CASE(norm_half_forward, TD_NO_GRAD; BF16_SCOPE; done(NORM(on.x, NULL));)
CASE(
    norm_half_both, td_tensor *y; {
        BF16_SCOPE;
        y = NORM(on.x, NULL);
    } back(y, on.grad_half);)
CASE(add_norm_forward, TD_NO_GRAD; BF16_SCOPE; done(NORM(on.x, on.h));)
CASE(
    add_norm_both, td_tensor *y; {
        BF16_SCOPE;
        y = NORM(on.x, on.h);
    } back(y, on.grad_half);)
CASE(softmax_forward, TD_NO_GRAD; done(td_f_softmax(on.x, 1));)
CASE(add_mixed, TD_NO_GRAD; BF16_SCOPE; done(td_add(on.x, on.h));)
CASE(gelu_forward, TD_NO_GRAD; done(td_f_gelu_tanh(on.wide_half));)
CASE(gelu_both, back(td_f_gelu_tanh(on.wide_half), on.grad_wide);)
CASE(narrow, TD_NO_GRAD; done(td_to_dtype(on.x, TD_BF16));)
CASE(widen, TD_NO_GRAD; done(td_to_dtype(on.h, TD_F32));)
CASE(column_sums, TD_NO_GRAD; done(td_sum_dims(on.wide, TD_DIMS(0), false));)
CASE(column_sums_half, TD_NO_GRAD; done(td_sum_dims(on.wide_half, TD_DIMS(0), false));)
CASE(whole_sum, TD_NO_GRAD; done(td_sum(on.wide));)
CASE(whole_sum_half, TD_NO_GRAD; done(td_sum(on.wide_half));)
CASE(adamw_step, bench_check(td_optimizer_step(on.adamw));)
CASE(clip, bench_check(td_clip_grad_norm_of_(&on.parameter, 1, 1e30, NULL, NULL));)

static td_tensor *fresh(int64_t rows, int64_t width, td_dtype dtype, bool requires_grad)
{
    td_tensor *y = td_randn(TD_SHAPE(rows, width), dtype, bench.device);
    done(y);
    bench_check(td_tensor_set_requires_grad(y, requires_grad));
    return y;
}

static void set_up(int64_t parameters)
{
    int64_t rows = bench.rows, width = bench.width;
    td_manual_seed(1);
    on.x = fresh(rows, width, TD_F32, true);
    on.h = fresh(rows, width, TD_BF16, true);
    on.weight = td_ones(TD_SHAPE(width), TD_F32, bench.device);
    on.bias = td_zeros(TD_SHAPE(width), TD_F32, bench.device);
    bench_check(td_tensor_set_requires_grad(on.weight, true));
    bench_check(td_tensor_set_requires_grad(on.bias, true));
    on.wide = fresh(rows, 4 * width, TD_F32, false);
    on.wide_half = fresh(rows, 4 * width, TD_BF16, true);
    on.grad = fresh(rows, width, TD_F32, false);
    on.grad_half = fresh(rows, width, TD_BF16, false);
    on.grad_wide = fresh(rows, 4 * width, TD_BF16, false);
    on.parameter = fresh(parameters / 1024, 1024, TD_F32, true);
    td_tensor *loss = td_sum(on.parameter);
    bench_check(td_backward(loss));
    on.adamw = td_adamw_of(&on.parameter, 1, NULL);
    if (!on.adamw)
        bench_die("%s", td_last_error());
}

static void measure_all(int64_t parameters)
{
    double n = (double)(bench.rows * bench.width), wide = 4 * n, all = (double)parameters;
    measure("copy f32", 8 * n, copy);
    measure("layer_norm f32", 8 * n, norm_forward);
    measure("layer_norm f32, forward and backward", 8 * n + 24 * n, norm_both);
    measure("layer_norm f32 to bf16", 6 * n, norm_half_forward);
    measure("layer_norm f32 to bf16, forward and backward", 6 * n + 22 * n, norm_half_both);
    measure("add_layer_norm f32 + bf16 to bf16", 12 * n, add_norm_forward);
    measure("add_layer_norm, forward and backward", 12 * n + 30 * n, add_norm_both);
    measure("softmax f32", 8 * n, softmax_forward);
    measure("add f32 + bf16", 10 * n, add_mixed);
    measure("gelu_tanh bf16", 4 * wide, gelu_forward);
    measure("gelu_tanh bf16, forward and backward", 4 * wide + 12 * wide, gelu_both);
    measure("cast f32 to bf16", 6 * n, narrow);
    measure("cast bf16 to f32", 6 * n, widen);
    measure("column sums f32", 4 * wide, column_sums);
    measure("column sums bf16", 2 * wide, column_sums_half);
    measure("whole sum f32", 4 * wide, whole_sum);
    measure("whole sum bf16", 2 * wide, whole_sum_half);
    measure("adamw f32", 28 * all, adamw_step);
    measure("norm and scale (clip_grad_norm) f32", 12 * all, clip);
}

int main(int argc, char **argv)
{
    const char *device = "cuda:0";
    int64_t parameters = 124 << 20;
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (strcmp(argv[i], "--device") == 0 && value)
            device = value;
        else if (strcmp(argv[i], "--rows") == 0)
            bench.rows = bench_number(argv[i], value, 1);
        else if (strcmp(argv[i], "--width") == 0)
            bench.width = bench_number(argv[i], value, 1);
        else if (strcmp(argv[i], "--repeat") == 0)
            bench.repeat = bench_number(argv[i], value, 1);
        else if (strcmp(argv[i], "--only") == 0 && value)
            bench.only = value;
        else
            bench_die("unknown option %s; see bench/README.md", argv[i]);
        i++;
    }
    bench.device = td_device_get(device);
    if (!bench.device)
        bench_die("%s", td_last_error());
    if (bench.rows < 1024)
        parameters = 1 << 20; /* a trial, not a measurement */
    TD_SCOPE;
    set_up(parameters);
    measure_all(parameters);
    td_optimizer_destroy(on.adamw);
    return 0;
}
