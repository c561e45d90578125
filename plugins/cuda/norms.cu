/* Kernels: softmax, layer norm and batch norm. */
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

/* Over the threads of a row: a warp, or the block. The result is in all of them. */
template <typename T, typename Op> __device__ inline T reduce_row(T x, T none, int group, Op op)
{
    return group == WARP ? reduce_warp(x, op) : reduce_block(x, none, op);
}

/* ---- Softmax ----------------------------------------------------------------------------------------------------- */

/* The greatest element, and the sum of exp(x - greatest). */
template <typename C> struct exponentials {
    C greatest, sum;
};

template <typename C> struct join_exponentials {
    __device__ exponentials<C> operator()(exponentials<C> a, exponentials<C> b) const
    {
        C greatest = a.greatest > b.greatest || a.greatest != a.greatest ? a.greatest : b.greatest;
        C left = a.greatest == greatest ? a.sum : a.sum * exp(a.greatest - greatest);
        C right = b.greatest == greatest ? b.sum : b.sum * exp(b.greatest - greatest);
        return exponentials<C>{greatest, left + right};
    }
};

template <typename T> __device__ void softmax(const softmax_args &args)
{
    typedef typename compute<T>::type C;
    exponentials<C> none = {-(C)INFINITY, 0};
    int groups = blockDim.x / args.group, member = threadIdx.x % args.group;
    for (int64_t base = (int64_t)blockIdx.x * groups; base < args.outer; base += (int64_t)gridDim.x * groups) {
        int64_t row = base + threadIdx.x / args.group;
        bool there = row < args.outer;
        const T *x = (const T *)args.x + row * args.size;
        T *out = (T *)args.out + row * args.size;
        exponentials<C> mine = none;
        for (int64_t i = member; i < args.size && there; i += args.group) {
            C value = load(x[i]);
            if (value > mine.greatest || value != value) {
                mine.sum = mine.sum * exp(mine.greatest - value) + 1;
                mine.greatest = value;
            } else if (value > -(C)INFINITY) {
                mine.sum += exp(value - mine.greatest);
            }
        }
        mine = reduce_row(mine, none, args.group, join_exponentials<C>());
        C logarithm = log(mine.sum), factor = 1 / mine.sum;
        for (int64_t i = member; i < args.size && there; i += args.group) {
            C value = load(x[i]) - mine.greatest;
            out[i] = store<T>(args.logarithm ? value - logarithm : exp(value) * factor);
        }
    }
}

template <typename T> __device__ void softmax_columns(const softmax_args &args)
{
    typedef typename compute<T>::type C;
    for (int64_t i = first_element(); i < args.outer * args.inner; i += element_step()) {
        int64_t at = i / args.inner * args.size * args.inner + i % args.inner, end = at + args.size * args.inner;
        const T *x = (const T *)args.x;
        T *out = (T *)args.out;
        C greatest = -(C)INFINITY, sum = 0;
        for (int64_t k = at; k < end; k += args.inner) {
            C value = load(x[k]);
            greatest = value > greatest || value != value ? value : greatest;
        }
        for (int64_t k = at; k < end; k += args.inner)
            sum += exp(load(x[k]) - greatest);
        C logarithm = log(sum), factor = 1 / sum;
        for (int64_t k = at; k < end; k += args.inner) {
            C value = load(x[k]) - greatest;
            out[k] = store<T>(args.logarithm ? value - logarithm : exp(value) * factor);
        }
    }
}

/* grad_x = y (grad_y - sum(grad_y y)); of the logarithm: grad_y - exp(y) sum(grad_y). */
template <typename C> __device__ inline C softmax_term(C grad, C y, int logarithm)
{
    return logarithm ? grad : grad * y;
}
template <typename C> __device__ inline C softmax_result(C grad, C y, C sum, int logarithm)
{
    return logarithm ? grad - exp(y) * sum : y * (grad - sum);
}

template <typename T> __device__ void softmax_grad(const softmax_args &args)
{
    typedef typename compute<T>::type C;
    int groups = blockDim.x / args.group, member = threadIdx.x % args.group;
    for (int64_t base = (int64_t)blockIdx.x * groups; base < args.outer; base += (int64_t)gridDim.x * groups) {
        int64_t row = base + threadIdx.x / args.group, start = row * args.size;
        bool there = row < args.outer;
        const T *y = (const T *)args.x + start, *grad_y = (const T *)args.grad_y + start;
        T *out = (T *)args.out + start;
        C sum = 0;
        for (int64_t i = member; i < args.size && there; i += args.group)
            sum += softmax_term(load(grad_y[i]), load(y[i]), args.logarithm);
        sum = reduce_row(sum, C(0), args.group, plus_op());
        for (int64_t i = member; i < args.size && there; i += args.group)
            out[i] = store<T>(softmax_result(load(grad_y[i]), load(y[i]), sum, args.logarithm));
    }
}

template <typename T> __device__ void softmax_grad_columns(const softmax_args &args)
{
    typedef typename compute<T>::type C;
    const T *y = (const T *)args.x, *grad_y = (const T *)args.grad_y;
    T *out = (T *)args.out;
    for (int64_t i = first_element(); i < args.outer * args.inner; i += element_step()) {
        int64_t at = i / args.inner * args.size * args.inner + i % args.inner, end = at + args.size * args.inner;
        C sum = 0;
        for (int64_t k = at; k < end; k += args.inner)
            sum += softmax_term(load(grad_y[k]), load(y[k]), args.logarithm);
        for (int64_t k = at; k < end; k += args.inner)
            out[k] = store<T>(softmax_result(load(grad_y[k]), load(y[k]), sum, args.logarithm));
    }
}

/* ---- Layer norm ------------------------------------------------------------------------------------------------------ */

template <typename T> __device__ void layer_norm(const layer_norm_args &args)
{
    typedef typename compute<T>::type C;
    int groups = blockDim.x / args.group, member = threadIdx.x % args.group;
    for (int64_t base = (int64_t)blockIdx.x * groups; base < args.rows; base += (int64_t)gridDim.x * groups) {
        int64_t row = base + threadIdx.x / args.group;
        bool there = row < args.rows;
        const T *x = (const T *)args.x + row * args.size;
        T *out = (T *)args.out + row * args.size;
        C sum = 0, rest = 0, squares = 0;
        for (int64_t i = member; i < args.size && there; i += args.group)
            sum += load(x[i]);
        C mean = reduce_row(sum, C(0), args.group, plus_op()) / (C)args.size;
        for (int64_t i = member; i < args.size && there; i += args.group) {
            C value = load(x[i]) - mean;
            rest += value;
            squares += value * value;
        }
        rest = reduce_row(rest, C(0), args.group, plus_op()) / (C)args.size; /* the mean's rounding error */
        squares = reduce_row(squares, C(0), args.group, plus_op()) / (C)args.size - rest * rest;
        C rstd = 1 / sqrt((squares > 0 || squares != squares ? squares : C(0)) + (C)args.eps);
        if (there && !member) {
            if (args.mean)
                ((C *)args.mean)[row] = mean + rest;
            if (args.rstd)
                ((C *)args.rstd)[row] = rstd;
        }
        for (int64_t i = member; i < args.size && there; i += args.group) {
            C value = (load(x[i]) - mean - rest) * rstd;
            if (args.weight.data)
                value *= read<C>(args.weight, i);
            if (args.bias.data)
                value += read<C>(args.bias, i);
            out[i] = store<T>(value);
        }
    }
}

template <typename T> __device__ void layer_norm_grad(const layer_norm_args &args)
{
    typedef typename compute<T>::type C;
    int groups = blockDim.x / args.group, member = threadIdx.x % args.group;
    for (int64_t base = (int64_t)blockIdx.x * groups; base < args.rows; base += (int64_t)gridDim.x * groups) {
        int64_t row = base + threadIdx.x / args.group;
        bool there = row < args.rows;
        const T *x = (const T *)args.x + row * args.size, *grad_y = (const T *)args.grad_y + row * args.size;
        T *out = (T *)args.out + row * args.size;
        C mean = there ? ((const C *)args.mean)[row] : C(0), rstd = there ? ((const C *)args.rstd)[row] : C(0);
        C sum = 0, product = 0;
        for (int64_t i = member; i < args.size && there; i += args.group) {
            C grad = load(grad_y[i]) * (args.weight.data ? read<C>(args.weight, i) : C(1));
            sum += grad;
            product += grad * (load(x[i]) - mean) * rstd;
        }
        sum = reduce_row(sum, C(0), args.group, plus_op()) / (C)args.size;
        product = reduce_row(product, C(0), args.group, plus_op()) / (C)args.size;
        for (int64_t i = member; i < args.size && there; i += args.group) {
            C grad = load(grad_y[i]) * (args.weight.data ? read<C>(args.weight, i) : C(1));
            out[i] = store<T>(rstd * (grad - sum - (load(x[i]) - mean) * rstd * product));
        }
    }
}

/* The gradients of weight and bias over a slice of rows: a block has 32 columns, and its 8 warps every 8th row. */
template <typename T> __device__ void layer_norm_columns(const layer_norm_args &args)
{
    typedef typename compute<T>::type C;
    __shared__ C sums[2][NORM_THREADS / NORM_COLUMNS][NORM_COLUMNS];
    int lane = threadIdx.x % NORM_COLUMNS, warp = threadIdx.x / NORM_COLUMNS, warps = NORM_THREADS / NORM_COLUMNS;
    int64_t columns = (args.size + NORM_COLUMNS - 1) / NORM_COLUMNS;
    for (int64_t job = blockIdx.x; job < columns * args.slices; job += gridDim.x) {
        int64_t slice = job / columns, column = job % columns * NORM_COLUMNS + lane;
        int64_t end = (slice + 1) * args.each < args.rows ? (slice + 1) * args.each : args.rows;
        C weight = 0, bias = 0;
        for (int64_t row = slice * args.each + warp; row < end && column < args.size; row += warps) {
            C grad = load(((const T *)args.grad_y)[row * args.size + column]);
            C z = (load(((const T *)args.x)[row * args.size + column]) - ((const C *)args.mean)[row]) *
                  ((const C *)args.rstd)[row];
            weight += grad * z;
            bias += grad;
        }
        __syncthreads(); /* the sums of the job before have been read */
        sums[0][warp][lane] = weight;
        sums[1][warp][lane] = bias;
        __syncthreads();
        if (warp < 2 && column < args.size) {
            C total = 0;
            for (int w = 0; w < warps; w++)
                total += sums[warp][w][lane];
            ((C *)args.partials)[(slice * 2 + warp) * args.size + column] = total;
        }
    }
}

template <typename T> __device__ void layer_norm_finish(const layer_norm_args &args)
{
    typedef typename compute<T>::type C;
    for (int64_t i = first_element(); i < args.size; i += element_step()) {
        C weight = 0, bias = 0;
        for (int64_t slice = 0; slice < args.slices; slice++) {
            weight += ((const C *)args.partials)[slice * 2 * args.size + i];
            bias += ((const C *)args.partials)[(slice * 2 + 1) * args.size + i];
        }
        if (args.grad_weight.data)
            write(args.grad_weight, i, weight);
        if (args.grad_bias.data)
            write(args.grad_bias, i, bias);
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
    SYNC(softmax, name, T, softmax_args)                                                           \
    SYNC(softmax_grad, name, T, softmax_args)                                                      \
    PLAIN(softmax_columns, name, T, softmax_args)                                                  \
    PLAIN(softmax_grad_columns, name, T, softmax_args)                                             \
    SYNC(layer_norm, name, T, layer_norm_args)                                                     \
    SYNC(layer_norm_grad, name, T, layer_norm_args)                                                \
    SYNC(layer_norm_columns, name, T, layer_norm_args)                                             \
    PLAIN(layer_norm_finish, name, T, layer_norm_args)                                             \
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
