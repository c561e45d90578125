/* Kernels: pooling. A thread computes one pixel, or some neighbours: of the output forward, of the input backward, so that no
 * two threads add to one pixel and the order of each sum is fixed. Numbers that the host knows are divided by with
 * multiplications. */
#include "cuda/each_element.h"
#include "cuda/pooling_args.h"

/* Input indices from `start` on, below `end`, every `step`-th. */
struct range {
    int start, end, step, divisor;
};

/* The input range of output index i of a dimension. */
__device__ inline range window_of(const pool_args &args, int dim, int i)
{
    int size = args.in[dim];
    range found;
    if (args.adaptive) {
        found.step = 1;
        found.start = (int)divide((uint32_t)(i * size), args.by_out[dim]);
        found.end = (int)divide((uint32_t)((i + 1) * size + args.out[dim] - 1), args.by_out[dim]);
        found.divisor = found.end - found.start;
        return found;
    }
    found.step = args.dilation[dim];
    found.start = i * args.stride[dim] - args.padding[dim];
    found.end = found.start + (args.kernel[dim] - 1) * found.step + 1;
    int limit = size + args.padding[dim]; /* the padding counts, but not what is beyond it */
    found.divisor = (found.end < limit ? found.end : limit) - found.start;
    if (found.start < 0)
        found.start = found.step == 1 ? 0 : found.start + (-found.start + found.step - 1) / found.step * found.step;
    if (found.end > size)
        found.end = size;
    if (!args.count_include_pad)
        found.divisor = found.end - found.start;
    return found;
}

/* The outputs from `start` to `end` - 1 whose windows can have input indices from i to i + more. */
__device__ inline range outputs_of(const pool_args &args, int dim, int i, int more)
{
    range found = {0, 0, 1, 0};
    if (args.adaptive) {
        found.start = (int)divide((uint32_t)(i * args.out[dim]), args.by_in[dim]);
        found.end = (int)divide((uint32_t)((i + more + 1) * args.out[dim] + args.in[dim] - 1), args.by_in[dim]);
    } else {
        int last = i + more + args.padding[dim];
        int first = i + args.padding[dim] - (args.kernel[dim] - 1) * args.dilation[dim];
        found.start = first > 0 ? (int)divide((uint32_t)(first + args.stride[dim] - 1), args.by_stride[dim]) : 0;
        found.end = (int)divide((uint32_t)last, args.by_stride[dim]) + 1;
    }
    if (found.end > args.out[dim])
        found.end = args.out[dim];
    return found;
}

/* Where output i is. */
struct place {
    int plane, row, column;
};

__device__ inline place place_of(const pool_args &args, int i)
{
    uint32_t row, column, rows = divide((uint32_t)i, args.by_out[1], column);
    uint32_t plane = divide(rows, args.by_out[0], row);
    return place{(int)plane, (int)row, (int)column};
}

/* ---- Maxima ------------------------------------------------------------------------------------------------------------ */

template <typename C> struct greatest_of {
    C value;
    int where;
    __device__ void take(C other, int at)
    {
        if (where < 0 || other > value || (other != other && value == value)) {
            value = other;
            where = at;
        }
    }
};

/* Of a window of K x K neighbours. */
template <typename T, int K, typename C>
__device__ inline void search_square(const pool_args &args, const T *x, place at, greatest_of<C> &found)
{
    int top = at.row * args.stride[0] - args.padding[0], left = at.column * args.stride[1] - args.padding[1];
#pragma unroll
    for (int dy = 0; dy < K; dy++)
#pragma unroll
        for (int dx = 0; dx < K; dx++) {
            int y = top + dy, c = left + dx;
            if ((unsigned)y < (unsigned)args.in[0] && (unsigned)c < (unsigned)args.in[1])
                found.take(load(x[y * args.in[1] + c]), y * args.in[1] + c);
        }
}

template <typename T, int K> __device__ void find_max(const pool_args &args)
{
    typedef typename compute<T>::type C;
    for (int64_t i = first_element(); i < args.count; i += element_step()) {
        place at = place_of(args, (int)i);
        const T *x = (const T *)args.from + (int64_t)at.plane * args.in[0] * args.in[1];
        greatest_of<C> found = {-(C)INFINITY, -1};
        if constexpr (K > 0) {
            search_square<T, K>(args, x, at, found);
        } else {
            range rows = window_of(args, 0, at.row), columns = window_of(args, 1, at.column);
            for (int y = rows.start; y < rows.end; y += rows.step)
                for (int c = columns.start; c < columns.end; c += columns.step)
                    found.take(load(x[y * args.in[1] + c]), y * args.in[1] + c);
        }
        ((T *)args.to)[i] = store<T>(found.value);
        if (args.indices)
            args.indices[i] = found.where;
    }
}

/* The gradients of N neighbours of a row: those of the outputs, among the ones whose windows reach them, that have one of them as
 * their maximum. */
template <typename T, int N> __device__ void max_grad(const pool_args &args)
{
    typedef typename compute<T>::type C;
    for (int64_t i = first_element(); i < args.count; i += element_step()) {
        uint32_t y, group, rows = divide((uint32_t)i, args.by_row, group), plane = divide(rows, args.by_in[0], y);
        int x = (int)group * N, here = (int)y * args.in[1] + x;
        int64_t base = (int64_t)plane * args.out[0] * args.out[1];
        range down = outputs_of(args, 0, (int)y, 0), across = outputs_of(args, 1, x, N - 1);
        C sums[N];
        for (int e = 0; e < N; e++)
            sums[e] = 0;
        for (int r = down.start; r < down.end; r++)
            for (int c = across.start; c < across.end; c++) {
                int64_t at = base + r * args.out[1] + c;
                int index = args.indices[at] - here;
                if ((unsigned)index < (unsigned)N) {
                    C grad = load(((const T *)args.from)[at]);
#pragma unroll
                    for (int e = 0; e < N; e++)
                        if (index == e)
                            sums[e] += grad;
                }
            }
        T grads[N];
        for (int e = 0; e < N; e++)
            grads[e] = store<T>(sums[e]);
        write_group(args.to, i * N, grads);
    }
}

/* ---- Averages ------------------------------------------------------------------------------------------------------------- */

template <typename T> __device__ void average(const pool_args &args)
{
    typedef typename compute<T>::type C;
    for (int64_t i = first_element(); i < args.count; i += element_step()) {
        place at = place_of(args, (int)i);
        const T *x = (const T *)args.from + (int64_t)at.plane * args.in[0] * args.in[1];
        range rows = window_of(args, 0, at.row), columns = window_of(args, 1, at.column);
        C sum = 0;
        for (int y = rows.start; y < rows.end; y++)
            for (int c = columns.start; c < columns.end; c++)
                sum += load(x[y * args.in[1] + c]);
        bool empty = rows.start >= rows.end || columns.start >= columns.end;
        ((T *)args.to)[i] = store<T>(empty ? C(0) : sum / ((C)rows.divisor * (C)columns.divisor));
    }
}

/* Of large windows: a warp for each output. */
template <typename T> __device__ void average_large(const pool_args &args)
{
    typedef typename compute<T>::type C;
    int lane = threadIdx.x % WARP;
    for (int64_t i = first_element() / WARP; i < args.count; i += element_step() / WARP) {
        place at = place_of(args, (int)i);
        const T *x = (const T *)args.from + (int64_t)at.plane * args.in[0] * args.in[1];
        range rows = window_of(args, 0, at.row), columns = window_of(args, 1, at.column);
        int height = rows.end - rows.start, width = columns.end - columns.start;
        C sum = 0;
        /* Rows that follow one another are one run. */
        int run = width == args.in[1] ? height * width : width, runs = width == args.in[1] ? 1 : height;
        for (int r = 0; r < runs; r++)
            for (int c = lane; c < run; c += WARP)
                sum += load(x[(rows.start + r) * args.in[1] + columns.start + c]);
        sum = reduce_warp(sum, plus_op());
        if (!lane)
            ((T *)args.to)[i] =
                store<T>(height <= 0 || width <= 0 ? C(0) : sum / ((C)rows.divisor * (C)columns.divisor));
    }
}

template <typename T> __device__ void average_grad(const pool_args &args)
{
    typedef typename compute<T>::type C;
    for (int64_t i = first_element(); i < args.count; i += element_step()) {
        uint32_t y, x, lines = divide((uint32_t)i, args.by_in[1], x), plane = divide(lines, args.by_in[0], y);
        const T *grad_y = (const T *)args.from + (int64_t)plane * args.out[0] * args.out[1];
        range rows = outputs_of(args, 0, (int)y, 0), columns = outputs_of(args, 1, (int)x, 0);
        C sum = 0;
        for (int r = rows.start; r < rows.end; r++) {
            C height = (C)window_of(args, 0, r).divisor;
            for (int c = columns.start; c < columns.end; c++)
                sum += load(grad_y[r * args.out[1] + c]) / (height * (C)window_of(args, 1, c).divisor);
        }
        ((T *)args.to)[i] = store<T>(sum);
    }
}

/* ---- Kernels ----------------------------------------------------------------------------------------------------------------- */

#define POOL_KERNEL(kernel, name, ...)                                                             \
    TD_KERNEL(kernel##_##name, struct pool_args)                                                   \
    {                                                                                              \
        __VA_ARGS__(args);                                                                         \
    }
#define POOL_KERNELS(name, T)                                                                      \
    POOL_KERNEL(pool_max, name, find_max<T, 0>)                                                    \
    POOL_KERNEL(pool_max_2, name, find_max<T, 2>)                                                  \
    POOL_KERNEL(pool_max_3, name, find_max<T, 3>)                                                  \
    POOL_KERNEL(pool_max_grad, name, max_grad<T, 1>)                                               \
    POOL_KERNEL(pool_max_grad_group, name, max_grad<T, sizeof(T) == 8 ? POOL_GROUP_F64 : POOL_GROUP>) \
    POOL_KERNEL(pool_average, name, average<T>)                                                    \
    POOL_KERNEL(pool_average_grad, name, average_grad<T>)                                          \
    TD_KERNEL_SYNC(pool_average_large_##name, struct pool_args)                                    \
    {                                                                                              \
        average_large<T>(args);                                                                    \
    }

POOL_KERNELS(f32, float)
POOL_KERNELS(f64, double)
POOL_KERNELS(f16, f16)
POOL_KERNELS(bf16, bf16)
