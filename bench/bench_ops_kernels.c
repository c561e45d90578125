/* Rows of matrix products, convolutions and pooling: the kernels by themselves, forward and one row for
 * each gradient. */
#include "bench_ops.h"

#include "tensor/tensor_internal.h"

#define KERNELS (&td__cpu_kernels)

/* ---- Linear layers ---------------------------------------------------------------------------- */

static void call_linear(const struct ops_row *row)
{
    bench_check(KERNELS->linear(row->out, row->a, row->b, row->c));
}

static void call_matmul(const struct ops_row *row)
{
    bench_check(KERNELS->matmul(row->out, row->a, row->b, 1, false));
}

static void call_accumulate(const struct ops_row *row)
{
    bench_check(KERNELS->matmul(row->out, row->a, row->b, 1, true));
}

static void bench_linear(const char *what, int64_t n, int64_t in, int64_t out)
{
    {
        TD_SCOPE;
        td_tensor *x = bench_filled(SHAPE(n, in)), *w = bench_filled(SHAPE(out, in)),
                  *y = bench_filled(SHAPE(n, out));
        td_tensor *bias = bench_filled(SHAPE(out)), *grad_w = bench_filled(SHAPE(out, in));
        ops_row(&(struct ops_row){what, "forward", y, x, w, bias, .call = call_linear});
        ops_row(&(struct ops_row){what, "grad_input", x, y, w, .call = call_matmul});
        ops_row(&(struct ops_row){what, "grad_weight", grad_w, td_transpose(y, 0, 1), x,
                                  .call = call_accumulate});
    }
}

static void bench_batch(const char *what, td_dtype dtype, int64_t batch, int64_t m, int64_t k,
                        int64_t n)
{
    {
        TD_SCOPE;
        td_tensor *a = bench_made(td_to_dtype(bench_filled(SHAPE(batch, m, k)), dtype));
        td_tensor *b = bench_made(td_to_dtype(bench_filled(SHAPE(batch, k, n)), dtype));
        td_tensor *c = bench_made(td_to_dtype(bench_filled(SHAPE(batch, m, n)), dtype));
        ops_row(&(struct ops_row){what, "forward", c, a, b, .call = call_matmul});
        ops_row(
            &(struct ops_row){what, "grad_a", a, c, td_transpose(b, 1, 2), .call = call_matmul});
        ops_row(
            &(struct ops_row){what, "grad_b", b, td_transpose(a, 1, 2), c, .call = call_matmul});
    }
}

/* ---- Convolutions and pooling ----------------------------------------------------------------- */

static void call_conv(const struct ops_row *row)
{
    bench_check(KERNELS->conv2d(row->out, row->a, row->b, row->c, &row->window));
}

static void call_conv_input(const struct ops_row *row)
{
    bench_check(KERNELS->conv2d_grad_input(row->out, row->a, row->b, &row->window));
}

static void call_conv_weight(const struct ops_row *row)
{
    bench_check(KERNELS->conv2d_grad_weight(row->out, row->c, row->a, row->b, &row->window, false));
}

/* `groups` are 1, or as many as there are channels. */
static void bench_conv(const char *what, const int64_t x_shape[4], int64_t groups, int64_t out,
                       int64_t kernel, int64_t stride, int64_t padding, int64_t dilation)
{
    {
        TD_SCOPE;
        td_window w = {{kernel, kernel},
                               {stride, stride},
                               {padding, padding},
                               {dilation, dilation},
                               .groups = groups};
        int64_t reach = dilation * (kernel - 1) + 1;
        int64_t height = (x_shape[2] + 2 * padding - reach) / stride + 1;
        int64_t width = (x_shape[3] + 2 * padding - reach) / stride + 1;
        td_tensor *x = bench_filled(x_shape, 4),
                  *y = bench_filled(SHAPE(x_shape[0], out, height, width));
        td_tensor *weight = bench_filled(SHAPE(out, x_shape[1] / groups, kernel, kernel)),
                  *bias = bench_filled(SHAPE(out));
        ops_row(&(struct ops_row){what, "forward", y, x, weight, bias, w, .call = call_conv});
        ops_row(
            &(struct ops_row){what, "grad_input", x, y, weight, NULL, w, .call = call_conv_input});
        ops_row(&(struct ops_row){what, "grad_weight", weight, y, x, bias, w,
                                  .call = call_conv_weight});
    }
}

static void call_pool(const struct ops_row *row)
{
    bench_check(KERNELS->max_pool2d(row->out, row->b, row->a, &row->window));
}

static void call_pool_grad(const struct ops_row *row)
{
    bench_check(KERNELS->max_pool2d_grad(row->out, row->a, row->b, &row->window));
}

static void bench_pool(const char *what, int64_t n, int64_t c, int64_t size)
{
    {
        TD_SCOPE;
        td_window w = {{2, 2}, {2, 2}, {0, 0}, {1, 1}, .groups = 1};
        td_tensor *x = bench_filled(SHAPE(n, c, size, size)),
                  *y = bench_filled(SHAPE(n, c, size / 2, size / 2));
        td_tensor *indices = td_zeros(SHAPE(n, c, size / 2, size / 2), TD_I32, NULL);
        ops_row(&(struct ops_row){what, "forward", y, x, indices, NULL, w, .call = call_pool});
        ops_row(
            &(struct ops_row){what, "grad_input", x, y, indices, NULL, w, .call = call_pool_grad});
    }
}

#define ROW(what, call)                                                                            \
    do {                                                                                           \
        if (bench_is_wanted(what))                                                                 \
            call;                                                                                  \
    } while (0)
#define LINEAR(n, in, out)                                                                         \
    ROW("linear_" #n "_" #in "_" #out, bench_linear("linear_" #n "_" #in "_" #out, n, in, out))
#define CONV(name, out, kernel, stride, padding, dilation, ...)                                    \
    ROW(name, bench_conv(name, (const int64_t[]){__VA_ARGS__}, 1, out, kernel, stride, padding,    \
                         dilation))
#define DEPTHWISE(name, channels, kernel, stride, size)                                            \
    ROW(name, bench_conv(name, (const int64_t[]){8, channels, size, size}, channels, channels,     \
                         kernel, stride, kernel / 2, 1))

void bench_kernels(void)
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
    ROW("batch_32_128_64_128", bench_batch("batch_32_128_64_128", TD_F32, 32, 128, 64, 128));
    ROW("batch_bf16", bench_batch("batch_bf16", TD_BF16, 32, 128, 64, 128));
    ROW("square_512", bench_batch("square_512", TD_F32, 1, 512, 512, 512));
    CONV("conv_1_10_k5", 10, 5, 1, 0, 1, 64, 1, 28, 28);
    CONV("conv_10_20_k5", 20, 5, 1, 0, 1, 64, 10, 12, 12);
    CONV("conv_64_64_k3", 64, 3, 1, 1, 1, 8, 64, 32, 32);
    CONV("conv_64_64_k3_d2", 64, 3, 1, 2, 2, 8, 64, 32, 32);
    CONV("conv_64_128_k3_s2", 128, 3, 2, 1, 1, 8, 64, 32, 32);
    CONV("conv_64_256_k1", 256, 1, 1, 0, 1, 8, 64, 32, 32);
    DEPTHWISE("depthwise_64_k3", 64, 3, 1, 32);
    DEPTHWISE("depthwise_64_k3_s2", 64, 3, 2, 32);
    DEPTHWISE("depthwise_64_k5", 64, 5, 1, 32);
    DEPTHWISE("depthwise_96_k5", 96, 5, 1, 14);
    ROW("max_pool_24", bench_pool("max_pool_24", 64, 10, 24));
    ROW("max_pool_56", bench_pool("max_pool_56", 16, 64, 56));
    ROW("max_pool_8", bench_pool("max_pool_8", 64, 20, 8));
}
