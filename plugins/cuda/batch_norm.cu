/* Kernels: batch norm, of x [images, channels, pixels].
 *
 * Two launches, and x is read once in each: a block has a chunk of a channel; the first launch makes partial sums of it,
 * and in the second one each block joins those of its channel, in the same order each time, and computes its chunk. The second
 * launch goes from the last chunk to the first, for the last ones that the first launch has read are still in the L2 cache. */
#include "cuda/batch_norm_args.h"
#include "cuda/channels.h"

enum { F32, F64, F16, BF16 }; /* as td_dtype has them */

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

/* out = x * factor + shift, with `near`, which is exact in the dtype of the computation, subtracted first. */
template <typename T, int N> __device__ void normalise_chunk(const batch_norm_args &args, int64_t job)
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
    }
    double scale = args.weight.data ? read(args.weight, channel) * rstd : rstd;
    C near = (C)mean, factor = (C)scale;
    C shift = (C)((args.bias.data ? read(args.bias, channel) : 0) - (mean - (double)near) * scale);
    for_chunk(space, channel, chunk, [&](const int64_t(&at)[CHANNEL_LOADS], int loads) {
        T x[CHANNEL_LOADS][N];
#pragma unroll
        for (int k = 0; k < CHANNEL_LOADS; k++)
            if (k < loads)
                read_group(x[k], args.x, at[k], false);
#pragma unroll
        for (int k = 0; k < CHANNEL_LOADS; k++)
            if (k < loads) {
                for (int e = 0; e < N; e++)
                    x[k][e] = store<T>((load(x[k][e]) - near) * factor + shift);
                write_group(args.out, at[k], x[k]);
            }
    });
}

/* ---- Backward ------------------------------------------------------------------------------------------------------- */

/* The sums over a chunk of grad_y, and of grad_y (x - mean). */
template <typename T, int N> __device__ void chunk_sums(const batch_norm_args &args, int64_t job)
{
    typedef typename compute<T>::type C;
    const channel_space &space = args.space;
    int64_t channel = job / space.chunks, chunk = job % space.chunks;
    C mean = ((const C *)args.mean)[channel], sum = 0, product = 0;
    for_chunk(space, channel, chunk, [&](const int64_t(&at)[CHANNEL_LOADS], int loads) {
        T x[CHANNEL_LOADS][N], grad[CHANNEL_LOADS][N];
#pragma unroll
        for (int k = 0; k < CHANNEL_LOADS; k++)
            if (k < loads) {
                read_group(x[k], args.x, at[k], false);
                read_group(grad[k], args.grad_y, at[k], false);
            }
#pragma unroll
        for (int k = 0; k < CHANNEL_LOADS; k++)
            for (int e = 0; e < N && k < loads; e++) {
                sum += load(grad[k][e]);
                product += load(grad[k][e]) * (load(x[k][e]) - mean);
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
template <typename T, int N> __device__ void chunk_gradient(const batch_norm_args &args, int64_t job)
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
    C mean = ((const C *)args.mean)[channel], factor = (C)scale;
    C shift = args.training ? (C)(sums.first / count * scale) : C(0);
    C slope = args.training ? (C)(sums.second / count * rstd * rstd * scale) : C(0);
    for_chunk(space, channel, chunk, [&](const int64_t(&at)[CHANNEL_LOADS], int loads) {
        T x[CHANNEL_LOADS][N], grad[CHANNEL_LOADS][N];
#pragma unroll
        for (int k = 0; k < CHANNEL_LOADS; k++)
            if (k < loads) {
                read_group(grad[k], args.grad_y, at[k], false);
                if (args.training)
                    read_group(x[k], args.x, at[k], false);
            }
#pragma unroll
        for (int k = 0; k < CHANNEL_LOADS; k++)
            if (k < loads) {
                for (int e = 0; e < N; e++) {
                    C value = load(grad[k][e]) * factor - shift;
                    if (args.training)
                        value -= (load(x[k][e]) - mean) * slope;
                    grad[k][e] = store<T>(value);
                }
                write_group(args.out, at[k], grad[k]);
            }
    });
}

/* ---- Kernels ---------------------------------------------------------------------------------------------------------- */

#define BATCH_KERNEL(kernel, name, T, is_second)                                                   \
    TD_KERNEL_SYNC(batch_norm_##kernel##_##name, struct batch_norm_args)                           \
    {                                                                                              \
        int64_t jobs = args.space.channels * args.space.chunks;                                    \
        with_width<16 / sizeof(T)>(args.space, [&](auto n) {                                       \
            for (int64_t i = blockIdx.x; i < jobs; i += gridDim.x)                                 \
                kernel<T, n.value>(args, is_second ? jobs - 1 - i : i);                            \
        });                                                                                        \
    }
#define BATCH_KERNELS(name, T)                                                                     \
    BATCH_KERNEL(chunk_statistics, name, T, false)                                                 \
    BATCH_KERNEL(normalise_chunk, name, T, true)                                                   \
    BATCH_KERNEL(chunk_sums, name, T, false)                                                       \
    BATCH_KERNEL(chunk_gradient, name, T, true)

BATCH_KERNELS(f32, float)
BATCH_KERNELS(f64, double)
BATCH_KERNELS(f16, f16)
BATCH_KERNELS(bf16, bf16)
