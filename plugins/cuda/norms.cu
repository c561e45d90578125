/* Kernels: softmax and layer norm. */
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
    PLAIN(layer_norm_finish, name, T, layer_norm_args)

NORM_KERNELS(f32, float)
NORM_KERNELS(f64, double)
NORM_KERNELS(f16, f16)
NORM_KERNELS(bf16, bf16)
