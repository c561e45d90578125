/* Kernels: softmax. Rows that fit stay in registers (norm_rows.h); others, and columns, are read more than once. */
#include "cuda/norm_rows.h"
#include "cuda/softmax_args.h"

/* NaN is the greatest. */
struct row_greatest {
    template <typename C> __device__ C operator()(C a, C b) const
    {
        return a > b || a != a ? a : b;
    }
};

/* grad_x = y (grad_y - sum(grad_y y)); of the logarithm: grad_y - exp(y) sum(grad_y). */
template <typename C> __device__ inline C softmax_term(C grad, C y, int logarithm)
{
    return logarithm ? grad : grad * y;
}
template <typename C> __device__ inline C softmax_result(C grad, C y, C sum, int logarithm)
{
    return logarithm ? grad - exp(y) * sum : y * (grad - sum);
}

/* ---- Rows in registers ------------------------------------------------------------------------------------------- */

template <int V>
__device__ inline void softmax_in_registers(const softmax_args &args, int64_t row, const row_share &share)
{
    float x[V][ROW_WIDTH], greatest = -INFINITY, sum = 0;
    load_row(x, args.x, row * args.size, share);
#pragma unroll
    for (int v = 0; v < V; v++)
        for (int k = 0; k < ROW_WIDTH && share.has(v); k++)
            greatest = row_greatest()(greatest, x[v][k]);
    greatest = reduce_row(greatest, -INFINITY, share.threads, row_greatest());
    float logarithm = 0, factor = 1;
#pragma unroll
    for (int v = 0; v < V; v++)
#pragma unroll
        for (int k = 0; k < ROW_WIDTH; k++) {
            float value = x[v][k] - greatest, power = expf(value);
            x[v][k] = args.logarithm ? value : power;
            sum += share.has(v) ? power : 0;
        }
    sum = reduce_row(sum, 0.0f, share.threads, plus_op());
    if (args.logarithm)
        logarithm = logf(sum);
    else
        factor = 1 / sum;
#pragma unroll
    for (int v = 0; v < V; v++)
#pragma unroll
        for (int k = 0; k < ROW_WIDTH; k++)
            x[v][k] = args.logarithm ? x[v][k] - logarithm : x[v][k] * factor;
    store_row(args.out, row * args.size, x, share);
}

template <int V>
__device__ inline void softmax_grad_in_registers(const softmax_args &args, int64_t row, const row_share &share)
{
    float y[V][ROW_WIDTH], grad[V][ROW_WIDTH], sum = 0;
    load_row(y, args.x, row * args.size, share);
    load_row(grad, args.grad_y, row * args.size, share);
#pragma unroll
    for (int v = 0; v < V; v++)
#pragma unroll
        for (int k = 0; k < ROW_WIDTH; k++)
            sum += softmax_term(grad[v][k], y[v][k], args.logarithm);
    sum = reduce_row(sum, 0.0f, share.threads, plus_op());
#pragma unroll
    for (int v = 0; v < V; v++)
#pragma unroll
        for (int k = 0; k < ROW_WIDTH; k++)
            grad[v][k] = softmax_result(grad[v][k], y[v][k], sum, args.logarithm);
    store_row(args.out, row * args.size, grad, share);
}

/* Whole warps have a row or none, and whole blocks where the row is the block's. */
#define ROW_KERNEL(function, V)                                                                    \
    TD_KERNEL_SYNC(function##_##V, struct softmax_args)                                            \
    {                                                                                              \
        row_share share = share_of(args.threads, args.size);                                       \
        int64_t each = blockDim.x / args.threads;                                                  \
        for (int64_t row = blockIdx.x * each + threadIdx.x / args.threads; row < args.outer;       \
             row += gridDim.x * each)                                                              \
            function##_in_registers<V>(args, row, share);                                          \
    }
#define ROW_KERNELS(V) ROW_KERNEL(softmax, V) ROW_KERNEL(softmax_grad, V)
ROW_KERNELS(2)
ROW_KERNELS(4)
ROW_KERNELS(6)
ROW_KERNELS(8)

/* ---- Any rows ------------------------------------------------------------------------------------------------------- */

/* The greatest element, and the sum of exp(x - greatest). */
template <typename C> struct exponentials {
    C greatest, sum;
};

template <typename C> struct join_exponentials {
    __device__ exponentials<C> operator()(exponentials<C> a, exponentials<C> b) const
    {
        C greatest = row_greatest()(a.greatest, b.greatest);
        C left = a.greatest == greatest ? a.sum : a.sum * exp(a.greatest - greatest);
        C right = b.greatest == greatest ? b.sum : b.sum * exp(b.greatest - greatest);
        return exponentials<C>{greatest, left + right};
    }
};

template <typename T> __device__ void softmax_any(const softmax_args &args)
{
    typedef typename compute<T>::type C;
    exponentials<C> none = {-(C)INFINITY, 0};
    int groups = blockDim.x / args.threads, member = threadIdx.x % args.threads;
    for (int64_t base = (int64_t)blockIdx.x * groups; base < args.outer; base += (int64_t)gridDim.x * groups) {
        int64_t row = base + threadIdx.x / args.threads;
        bool there = row < args.outer;
        const T *x = (const T *)args.x.data + row * args.size;
        T *out = (T *)args.out.data + row * args.size;
        exponentials<C> mine = none;
        for (int64_t i = member; i < args.size && there; i += args.threads) {
            C value = load(x[i]);
            if (value > mine.greatest || value != value) {
                mine.sum = mine.sum * exp(mine.greatest - value) + 1;
                mine.greatest = value;
            } else if (value > -(C)INFINITY) {
                mine.sum += exp(value - mine.greatest);
            }
        }
        mine = reduce_row(mine, none, args.threads, join_exponentials<C>());
        C logarithm = log(mine.sum), factor = 1 / mine.sum;
        for (int64_t i = member; i < args.size && there; i += args.threads) {
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
        const T *x = (const T *)args.x.data;
        T *out = (T *)args.out.data;
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

template <typename T> __device__ void softmax_grad_any(const softmax_args &args)
{
    typedef typename compute<T>::type C;
    int groups = blockDim.x / args.threads, member = threadIdx.x % args.threads;
    for (int64_t base = (int64_t)blockIdx.x * groups; base < args.outer; base += (int64_t)gridDim.x * groups) {
        int64_t row = base + threadIdx.x / args.threads, start = row * args.size;
        bool there = row < args.outer;
        const T *y = (const T *)args.x.data + start, *grad_y = (const T *)args.grad_y.data + start;
        T *out = (T *)args.out.data + start;
        C sum = 0;
        for (int64_t i = member; i < args.size && there; i += args.threads)
            sum += softmax_term(load(grad_y[i]), load(y[i]), args.logarithm);
        sum = reduce_row(sum, C(0), args.threads, plus_op());
        for (int64_t i = member; i < args.size && there; i += args.threads)
            out[i] = store<T>(softmax_result(load(grad_y[i]), load(y[i]), sum, args.logarithm));
    }
}

template <typename T> __device__ void softmax_grad_columns(const softmax_args &args)
{
    typedef typename compute<T>::type C;
    const T *y = (const T *)args.x.data, *grad_y = (const T *)args.grad_y.data;
    T *out = (T *)args.out.data;
    for (int64_t i = first_element(); i < args.outer * args.inner; i += element_step()) {
        int64_t at = i / args.inner * args.size * args.inner + i % args.inner, end = at + args.size * args.inner;
        C sum = 0;
        for (int64_t k = at; k < end; k += args.inner)
            sum += softmax_term(load(grad_y[k]), load(y[k]), args.logarithm);
        for (int64_t k = at; k < end; k += args.inner)
            out[k] = store<T>(softmax_result(load(grad_y[k]), load(y[k]), sum, args.logarithm));
    }
}

#define ANY_KERNELS(name, T)                                                                       \
    TD_KERNEL_SYNC(softmax_any_##name, struct softmax_args)                                        \
    {                                                                                              \
        softmax_any<T>(args);                                                                      \
    }                                                                                              \
    TD_KERNEL_SYNC(softmax_grad_any_##name, struct softmax_args)                                   \
    {                                                                                              \
        softmax_grad_any<T>(args);                                                                 \
    }                                                                                              \
    TD_KERNEL(softmax_columns_##name, struct softmax_args)                                         \
    {                                                                                              \
        softmax_columns<T>(args);                                                                  \
    }                                                                                              \
    TD_KERNEL(softmax_grad_columns_##name, struct softmax_args)                                    \
    {                                                                                              \
        softmax_grad_columns<T>(args);                                                             \
    }
EACH_FLOAT(ANY_KERNELS)
