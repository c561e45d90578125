/* Kernels: batch norm, of x [images, channels, pixels], and relu(batch_norm(x) + residual).
 *
 * Two launches, and x is read once in each: a block has a chunk of a channel; the first launch makes partial sums of it,
 * and in the second one each block joins those of its channel, in the same order each time, and computes its chunk. The second
 * launch goes from the last chunk to the first, for the last ones that the first launch has read are still in the L2 cache. */
#include "cuda/batch_norm_args.h"
#include "cuda/channels.h"

enum { F32, F64, F16, BF16 }; /* as td_dtype has them */

/* What follows the norm: nothing, relu(y), or relu(y + residual). */
enum { PLAIN, RELU, ADD_RELU };

__device__ inline double read(const channel_vector &vector, int64_t i)
{
    switch (vector.dtype) {
    case F32:
        return (double)((const float *)vector.data)[i];
    case F64:
        return ((const double *)vector.data)[i];
    case F16:
        return (double)load(((const f16 *)vector.data)[i]);
    default:
        return (double)load(((const bf16 *)vector.data)[i]);
    }
}

__device__ inline void write(const channel_vector &vector, int64_t i, double value)
{
    switch (vector.dtype) {
    case F32:
        ((float *)vector.data)[i] = (float)value;
        break;
    case F64:
        ((double *)vector.data)[i] = value;
        break;
    case F16:
        ((f16 *)vector.data)[i] = store<f16>((float)value);
        break;
    default:
        ((bf16 *)vector.data)[i] = store<bf16>((float)value);
    }
}

struct pair {
    double first, second;
};

struct add_pairs {
    __device__ pair operator()(pair a, pair b) const
    {
        return pair{a.first + b.first, a.second + b.second};
    }
};

/* How many elements a chunk has. */
__device__ inline int64_t size_of(const channel_space &space, int64_t chunk)
{
    int64_t begin = chunk * space.each, end = begin + space.each < space.groups ? begin + space.each : space.groups;
    return (end - begin) * space.width;
}

/* ---- Forward ------------------------------------------------------------------------------------------------------- */

/* The mean of a chunk, and the sum of the squares of what differs from it: from sums over x less a mean that is near, that of
 * some elements, so that little cancels. */
template <typename T, int N> __device__ void chunk_statistics(const batch_norm_args &args, int64_t job)
{
    typedef typename compute<T>::type C;
    const channel_space &space = args.space;
    int64_t channel = job / space.chunks, chunk = job % space.chunks, count = size_of(space, chunk);
    int64_t some = count / N < (int64_t)blockDim.x ? count / N : (int64_t)blockDim.x;
    C first = 0;
    if (threadIdx.x < some)
        first = load(((const T *)args.x)[channel_offset(space, channel, chunk * space.each + threadIdx.x)]);
    C near = reduce_block(first, C(0), plus_op()) / (C)some;
    C sum = 0, squares = 0;
    for_chunk(space, channel, chunk, [&](const int64_t(&at)[CHANNEL_LOADS], int loads) {
        T x[CHANNEL_LOADS][N];
#pragma unroll
        for (int k = 0; k < CHANNEL_LOADS; k++)
            if (k < loads)
                read_group(x[k], args.x, at[k], false);
#pragma unroll
        for (int k = 0; k < CHANNEL_LOADS; k++)
            for (int e = 0; e < N && k < loads; e++) {
                C value = load(x[k][e]) - near;
                sum += value;
                squares += value * value;
            }
    });
    pair total = reduce_block(pair{(double)sum, (double)squares}, pair{0, 0}, add_pairs());
    if (!threadIdx.x) {
        args.partials[job * 2] = (double)near + total.first / (double)count;
        args.partials[job * 2 + 1] = total.second - total.first * (total.first / (double)count);
    }
}

/* The mean of a channel, and the sum of the squares of what differs from it. Each warp finds them for itself. */
__device__ inline pair join_statistics(const batch_norm_args &args, int64_t channel)
{
    const channel_space &space = args.space;
    const double *partials = args.partials + channel * space.chunks * 2;
    int lane = threadIdx.x % WARP;
    double count = (double)(space.images * space.pixels), mean = 0, squares = 0;
    for (int64_t k = lane; k < space.chunks; k += WARP)
        mean += partials[2 * k] * (double)size_of(space, k);
    mean = reduce_warp(mean, plus_op()) / count;
    for (int64_t k = lane; k < space.chunks; k += WARP) {
        double delta = partials[2 * k] - mean;
        squares += partials[2 * k + 1] + delta * delta * (double)size_of(space, k);
    }
    squares = reduce_warp(squares, plus_op());
    return pair{mean, squares > 0 || squares != squares ? squares : 0};
}

/* Writes the statistics of a channel, and moves the running ones. */
template <typename C>
__device__ void keep_statistics(const batch_norm_args &args, int64_t channel, pair found, double rstd)
{
    double count = (double)(args.space.images * args.space.pixels), momentum = args.momentum;
    if (args.running_mean.data && args.sums)
        write(args.running_mean, channel, momentum * found.first + (1 - momentum) * read(args.running_mean, channel));
    if (args.running_var.data && args.sums)
        write(args.running_var, channel,
              momentum * (found.second / (count - 1)) + (1 - momentum) * read(args.running_var, channel));
    if (args.mean)
        ((C *)args.mean)[channel] = (C)found.first;
    if (args.rstd)
        ((C *)args.rstd)[channel] = (C)rstd;
}

/* x * factor + shift, with `near`, which is exact in the dtype of the computation, subtracted first. */
template <typename T, typename C> __device__ inline T normalised(T x, C near, C factor, C shift)
{
    return store<T>((load(x) - near) * factor + shift);
}

/* NaN stays. */
template <typename T> __device__ inline T relu_of(T y)
{
    return load(y) < 0 ? store<T>(0) : y;
}

template <typename T, int N, int then> __device__ void normalise_chunk(const batch_norm_args &args, int64_t job)
{
    typedef typename compute<T>::type C;
    const channel_space &space = args.space;
    int64_t channel = job / space.chunks, chunk = job % space.chunks;
    double mean, rstd;
    if (args.training) {
        pair found = args.sums ? join_statistics(args, channel) : pair{0, 0};
        mean = found.first;
        rstd = args.sums ? 1 / sqrt(found.second / (double)(space.images * space.pixels) + args.eps) : 0;
        if (!chunk && !threadIdx.x)
            keep_statistics<C>(args, channel, found, rstd);
    } else {
        mean = read(args.running_mean, channel);
        rstd = 1 / sqrt(read(args.running_var, channel) + args.eps);
        if (then != PLAIN && !chunk && !threadIdx.x)
            keep_statistics<C>(args, channel, pair{mean, 0}, rstd);
    }
    double scale = args.weight.data ? read(args.weight, channel) * rstd : rstd;
    C near = (C)mean, factor = (C)scale;
    C shift = (C)((args.bias.data ? read(args.bias, channel) : 0) - (mean - (double)near) * scale);
    if (then != PLAIN && args.factor && !chunk && !threadIdx.x) {
        ((C *)args.factor)[channel] = factor;
        ((C *)args.shift)[channel] = shift;
    }
    for_chunk(space, channel, chunk, [&](const int64_t(&at)[CHANNEL_LOADS], int loads) {
        T x[CHANNEL_LOADS][N], more[CHANNEL_LOADS][N];
#pragma unroll
        for (int k = 0; k < CHANNEL_LOADS; k++)
            if (k < loads) {
                read_group(x[k], args.x, at[k], false);
                if (then == ADD_RELU)
                    read_group(more[k], args.residual, at[k], false);
            }
#pragma unroll
        for (int k = 0; k < CHANNEL_LOADS; k++)
            if (k < loads) {
                for (int e = 0; e < N; e++) {
                    x[k][e] = normalised(x[k][e], near, factor, shift);
                    if (then == ADD_RELU)
                        x[k][e] = store<T>(load(x[k][e]) + load(more[k][e]));
                    if (then != PLAIN)
                        x[k][e] = relu_of(x[k][e]);
                }
                write_group(args.out, at[k], x[k]);
            }
    });
}

/* ---- Backward ------------------------------------------------------------------------------------------------------- */

/* By which numbers a channel was normalised; 0 where there is no ReLU, which is all that needs them again. */
template <typename C> struct line {
    C near, factor, shift;
};

template <typename C, int then> __device__ inline line<C> line_of(const batch_norm_args &args, int64_t channel)
{
    C near = ((const C *)args.mean)[channel];
    if (then != RELU)
        return line<C>{near, 0, 0};
    return line<C>{near, ((const C *)args.factor)[channel], ((const C *)args.shift)[channel]};
}

/* The gradient before the ReLU of relu(batch_norm(x)): the result is computed again, which costs less than reading it. */
template <typename T, typename C> __device__ inline T before_relu(T grad, T x, const line<C> &by)
{
    return load(normalised(x, by.near, by.factor, by.shift)) <= 0 ? store<T>(0) : grad;
}

/* The sums over a chunk of grad_y, and of grad_y (x - mean), where grad_y is that before the ReLU. With a residual, whose
 * gradient that is, it is written, and chunk_gradient() reads it instead of grad_y. */
template <typename T, int N, int then> __device__ void chunk_sums(const batch_norm_args &args, int64_t job)
{
    typedef typename compute<T>::type C;
    const channel_space &space = args.space;
    int64_t channel = job / space.chunks, chunk = job % space.chunks;
    line<C> by = line_of<C, then>(args, channel);
    C sum = 0, product = 0;
    for_chunk(space, channel, chunk, [&](const int64_t(&at)[CHANNEL_LOADS], int loads) {
        T x[CHANNEL_LOADS][N], grad[CHANNEL_LOADS][N], result[CHANNEL_LOADS][N];
#pragma unroll
        for (int k = 0; k < CHANNEL_LOADS; k++)
            if (k < loads) {
                read_group(x[k], args.x, at[k], false);
                read_group(grad[k], args.grad_y, at[k], false);
                if (then == ADD_RELU)
                    read_group(result[k], args.result, at[k], false);
            }
#pragma unroll
        for (int k = 0; k < CHANNEL_LOADS; k++) {
            for (int e = 0; e < N && k < loads; e++) {
                if (then == RELU)
                    grad[k][e] = before_relu(grad[k][e], x[k][e], by);
                if (then == ADD_RELU && load(result[k][e]) <= 0)
                    grad[k][e] = store<T>(0);
                sum += load(grad[k][e]);
                product += load(grad[k][e]) * (load(x[k][e]) - by.near);
            }
            if (then == ADD_RELU && k < loads)
                write_group(args.grad_residual, at[k], grad[k]);
        }
    });
    pair total = reduce_block(pair{(double)sum, (double)product}, pair{0, 0}, add_pairs());
    if (!threadIdx.x) {
        args.partials[job * 2] = total.first;
        args.partials[job * 2 + 1] = total.second;
    }
}

__device__ inline pair join_sums(const batch_norm_args &args, int64_t channel)
{
    const double *partials = args.partials + channel * args.space.chunks * 2;
    pair sums = {0, 0};
    for (int64_t k = threadIdx.x % WARP; k < args.space.chunks && args.sums; k += WARP)
        sums = pair{sums.first + partials[2 * k], sums.second + partials[2 * k + 1]};
    return reduce_warp(sums, add_pairs());
}

/* grad_x = (grad_y - sum / n) factor - (x - mean) product / n rstd^2 factor; what is in brackets only while training. */
template <typename T, int N, int then> __device__ void chunk_gradient(const batch_norm_args &args, int64_t job)
{
    typedef typename compute<T>::type C;
    const channel_space &space = args.space;
    int64_t channel = job / space.chunks, chunk = job % space.chunks;
    pair sums = join_sums(args, channel);
    double rstd = (double)((const C *)args.rstd)[channel], count = (double)(space.images * space.pixels);
    double scale = args.weight.data ? rstd * read(args.weight, channel) : rstd;
    if (!chunk && !threadIdx.x) {
        if (args.grad_weight.data)
            write(args.grad_weight, channel, sums.second * rstd);
        if (args.grad_bias.data)
            write(args.grad_bias, channel, sums.first);
    }
    if (!args.out)
        return;
    const void *grad_y = args.grad_residual ? args.grad_residual : args.grad_y;
    line<C> by = line_of<C, then>(args, channel);
    C factor = (C)scale;
    C shift = args.training ? (C)(sums.first / count * scale) : C(0);
    C slope = args.training ? (C)(sums.second / count * rstd * rstd * scale) : C(0);
    for_chunk(space, channel, chunk, [&](const int64_t(&at)[CHANNEL_LOADS], int loads) {
        T x[CHANNEL_LOADS][N], grad[CHANNEL_LOADS][N];
#pragma unroll
        for (int k = 0; k < CHANNEL_LOADS; k++)
            if (k < loads) {
                read_group(grad[k], grad_y, at[k], false);
                if (args.training || then == RELU)
                    read_group(x[k], args.x, at[k], false);
            }
#pragma unroll
        for (int k = 0; k < CHANNEL_LOADS; k++)
            if (k < loads) {
                for (int e = 0; e < N; e++) {
                    if (then == RELU)
                        grad[k][e] = before_relu(grad[k][e], x[k][e], by);
                    C value = load(grad[k][e]) * factor - shift;
                    if (args.training)
                        value -= (load(x[k][e]) - by.near) * slope;
                    grad[k][e] = store<T>(value);
                }
                write_group(args.out, at[k], grad[k]);
            }
    });
}

/* ---- Kernels ---------------------------------------------------------------------------------------------------------- */

#define BATCH_KERNEL(kernel, name, T, job, ...)                                                    \
    TD_KERNEL_SYNC(batch_norm_##kernel##_##name, struct batch_norm_args)                           \
    {                                                                                              \
        int64_t jobs = args.space.channels * args.space.chunks;                                    \
        with_width<16 / sizeof(T)>(args.space, [&](auto n) {                                       \
            for (int64_t i = blockIdx.x; i < jobs; i += gridDim.x)                                 \
                __VA_ARGS__(args, job);                                                            \
        });                                                                                        \
    }
#define FIRST(kernel, name, T, ...) BATCH_KERNEL(kernel, name, T, i, __VA_ARGS__)
#define SECOND(kernel, name, T, ...) BATCH_KERNEL(kernel, name, T, jobs - 1 - i, __VA_ARGS__)
#define BATCH_KERNELS(name, T)                                                                     \
    FIRST(statistics, name, T, chunk_statistics<T, n.value>)                                       \
    SECOND(normalise, name, T, normalise_chunk<T, n.value, PLAIN>)                                 \
    SECOND(normalise_relu, name, T, normalise_chunk<T, n.value, RELU>)                             \
    SECOND(normalise_add_relu, name, T, normalise_chunk<T, n.value, ADD_RELU>)                     \
    FIRST(sums, name, T, chunk_sums<T, n.value, PLAIN>)                                            \
    FIRST(sums_relu, name, T, chunk_sums<T, n.value, RELU>)                                        \
    FIRST(sums_add_relu, name, T, chunk_sums<T, n.value, ADD_RELU>)                                \
    SECOND(gradient, name, T, chunk_gradient<T, n.value, PLAIN>)                                   \
    SECOND(gradient_relu, name, T, chunk_gradient<T, n.value, RELU>)

BATCH_KERNELS(f32, float)
BATCH_KERNELS(f64, double)
BATCH_KERNELS(f16, f16)
BATCH_KERNELS(bf16, bf16)
