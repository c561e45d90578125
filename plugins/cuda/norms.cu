/* Kernels: batch norm. */
#include "cuda/device_code.h"
#include "cuda/norms_args.h"

enum { F32, F64, F16, BF16 }; /* as td_dtype has them */

template <typename C> __device__ inline C read(const norm_vector &vector, int64_t i)
{
    switch (vector.dtype) {
    case F32:
        return (C)((const float *)vector.data)[i];
    case F64:
        return (C)((const double *)vector.data)[i];
    case F16:
        return (C)load(((const f16 *)vector.data)[i]);
    default:
        return (C)load(((const bf16 *)vector.data)[i]);
    }
}

template <typename C> __device__ inline void write(const norm_vector &vector, int64_t i, C value)
{
    switch (vector.dtype) {
    case F32:
        ((float *)vector.data)[i] = (float)value;
        break;
    case F64:
        ((double *)vector.data)[i] = (double)value;
        break;
    case F16:
        ((f16 *)vector.data)[i] = store<f16>((float)value);
        break;
    default:
        ((bf16 *)vector.data)[i] = store<bf16>((float)value);
    }
}

/* ---- Batch norm ------------------------------------------------------------------------------------------------------- */

/* Element i of a channel. */
__device__ inline int64_t channel_offset(const batch_norm_args &args, int64_t channel, int64_t i)
{
    return (i / args.pixels * args.channels + channel) * args.pixels + i % args.pixels;
}

/* The mean of a chunk of a channel, and the sum of the squares of what differs from it. */
template <typename T> __device__ void batch_norm_chunk(const batch_norm_args &args)
{
    typedef typename compute<T>::type C;
    const T *x = (const T *)args.x;
    for (int64_t job = blockIdx.x; job < args.channels * args.chunks; job += gridDim.x) {
        int64_t channel = job / args.chunks, begin = job % args.chunks * args.each;
        int64_t whole = args.images * args.pixels, end = begin + args.each < whole ? begin + args.each : whole;
        C sum = 0, rest = 0, squares = 0;
        for (int64_t i = begin + threadIdx.x; i < end; i += blockDim.x)
            sum += load(x[channel_offset(args, channel, i)]);
        C mean = reduce_block(sum, C(0), plus_op()) / (C)(end - begin);
        for (int64_t i = begin + threadIdx.x; i < end; i += blockDim.x) {
            C value = load(x[channel_offset(args, channel, i)]) - mean;
            rest += value;
            squares += value * value;
        }
        double error = (double)reduce_block(rest, C(0), plus_op());
        double total = (double)reduce_block(squares, C(0), plus_op()), count = (double)(end - begin);
        if (!threadIdx.x) {
            args.partials[job * 2] = (double)mean + error / count;
            args.partials[job * 2 + 1] = total - error * (error / count);
        }
    }
}

/* Joins the chunks of each channel, in order, and moves the running statistics. */
template <typename T> __device__ void batch_norm_statistics(const batch_norm_args &args)
{
    typedef typename compute<T>::type C;
    for (int64_t channel = first_element(); channel < args.channels; channel += element_step()) {
        double mean = 0, squares = 0, rstd = 0;
        int64_t whole = args.images * args.pixels;
        if (args.training) {
            double count = 0;
            for (int64_t k = 0; k < args.chunks; k++) {
                const double *part = args.partials + (channel * args.chunks + k) * 2;
                int64_t end = (k + 1) * args.each < whole ? (k + 1) * args.each : whole;
                double more = (double)(end - k * args.each), delta = part[0] - mean, all = count + more;
                mean += delta * (more / all);
                squares += part[1] + delta * delta * (count * more / all);
                count = all;
            }
            if (whole) {
                rstd = 1 / sqrt((squares > 0 || squares != squares ? squares : 0) / count + args.eps);
                if (args.running_mean.data)
                    write(args.running_mean, channel,
                          args.momentum * mean + (1 - args.momentum) * read<double>(args.running_mean, channel));
                if (args.running_var.data)
                    write(args.running_var, channel,
                          args.momentum * (squares / (count - 1)) +
                              (1 - args.momentum) * read<double>(args.running_var, channel));
            }
            if (args.mean)
                ((C *)args.mean)[channel] = (C)mean;
            if (args.rstd)
                ((C *)args.rstd)[channel] = (C)rstd;
        } else {
            mean = read<double>(args.running_mean, channel);
            rstd = 1 / sqrt(read<double>(args.running_var, channel) + args.eps);
        }
        double factor = args.weight.data ? read<double>(args.weight, channel) * rstd : rstd;
        double near = (double)(C)mean; /* what is subtracted is exact in the dtype of the computation */
        double *factors = args.factors + channel * 4;
        factors[0] = near;
        factors[1] = factor;
        factors[2] = (args.bias.data ? read<double>(args.bias, channel) : 0) - (mean - near) * factor;
    }
}

template <typename T> __device__ void batch_norm_apply(const batch_norm_args &args)
{
    typedef typename compute<T>::type C;
    int64_t count = args.images * args.channels * args.pixels;
    for (int64_t i = first_element(); i < count; i += element_step()) {
        const double *factors = args.factors + i / args.pixels % args.channels * 4;
        ((T *)args.out)[i] =
            store<T>((load(((const T *)args.x)[i]) - (C)factors[0]) * (C)factors[1] + (C)factors[2]);
    }
}

/* The sums over a chunk of grad_y, and of grad_y (x - mean). */
template <typename T> __device__ void batch_norm_grad_chunk(const batch_norm_args &args)
{
    typedef typename compute<T>::type C;
    for (int64_t job = blockIdx.x; job < args.channels * args.chunks; job += gridDim.x) {
        int64_t channel = job / args.chunks, begin = job % args.chunks * args.each;
        int64_t whole = args.images * args.pixels, end = begin + args.each < whole ? begin + args.each : whole;
        C mean = ((const C *)args.mean)[channel], sum = 0, product = 0;
        for (int64_t i = begin + threadIdx.x; i < end; i += blockDim.x) {
            int64_t at = channel_offset(args, channel, i);
            C grad = load(((const T *)args.grad_y)[at]);
            sum += grad;
            product += grad * (load(((const T *)args.x)[at]) - mean);
        }
        sum = reduce_block(sum, C(0), plus_op());
        product = reduce_block(product, C(0), plus_op());
        if (!threadIdx.x) {
            args.partials[job * 2] = (double)sum;
            args.partials[job * 2 + 1] = (double)product;
        }
    }
}

template <typename T> __device__ void batch_norm_grad_statistics(const batch_norm_args &args)
{
    typedef typename compute<T>::type C;
    double count = (double)(args.images * args.pixels);
    for (int64_t channel = first_element(); channel < args.channels; channel += element_step()) {
        double sum = 0, product = 0, rstd = (double)((const C *)args.rstd)[channel];
        for (int64_t k = 0; k < args.chunks; k++) {
            sum += args.partials[(channel * args.chunks + k) * 2];
            product += args.partials[(channel * args.chunks + k) * 2 + 1];
        }
        double factor = args.weight.data ? rstd * read<double>(args.weight, channel) : rstd;
        if (args.grad_weight.data)
            write(args.grad_weight, channel, product * rstd);
        if (args.grad_bias.data)
            write(args.grad_bias, channel, sum);
        double *factors = args.factors + channel * 4;
        factors[0] = (double)((const C *)args.mean)[channel];
        factors[1] = factor;
        factors[2] = args.training ? sum / count * factor : 0;
        factors[3] = args.training ? product / count * rstd * rstd * factor : 0;
    }
}

template <typename T> __device__ void batch_norm_grad_apply(const batch_norm_args &args)
{
    typedef typename compute<T>::type C;
    int64_t count = args.images * args.channels * args.pixels;
    for (int64_t i = first_element(); i < count; i += element_step()) {
        const double *factors = args.factors + i / args.pixels % args.channels * 4;
        C value = load(((const T *)args.grad_y)[i]) * (C)factors[1] - (C)factors[2];
        if (args.training)
            value -= (load(((const T *)args.x)[i]) - (C)factors[0]) * (C)factors[3];
        ((T *)args.out)[i] = store<T>(value);
    }
}

/* ---- Kernels ---------------------------------------------------------------------------------------------------------- */

#define PLAIN(kernel, name, T, type)                                                               \
    TD_KERNEL(kernel##_##name, struct type)                                                        \
    {                                                                                              \
        kernel<T>(args);                                                                           \
    }
#define SYNC(kernel, name, T, type)                                                                \
    TD_KERNEL_SYNC(kernel##_##name, struct type)                                                   \
    {                                                                                              \
        kernel<T>(args);                                                                           \
    }
#define NORM_KERNELS(name, T)                                                                      \
    SYNC(batch_norm_chunk, name, T, batch_norm_args)                                               \
    PLAIN(batch_norm_statistics, name, T, batch_norm_args)                                         \
    PLAIN(batch_norm_apply, name, T, batch_norm_args)                                              \
    SYNC(batch_norm_grad_chunk, name, T, batch_norm_args)                                          \
    PLAIN(batch_norm_grad_statistics, name, T, batch_norm_args)                                    \
    PLAIN(batch_norm_grad_apply, name, T, batch_norm_args)

NORM_KERNELS(f32, float)
NORM_KERNELS(f64, double)
NORM_KERNELS(f16, f16)
NORM_KERNELS(bf16, bf16)
