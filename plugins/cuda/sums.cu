/* Kernels: sums of floats along rows and columns of a matrix, where groups of neighbours can be loaded at once: gradients
 * of biases, norms, losses. All other reductions are in reductions.cu.
 *
 *     columns   a warp has 32 groups of columns, the warps of a block every 8th row of a slice; the sums of slices are
 *               added by a second kernel
 *     rows      a warp or a block has a row, or a slice of it
 *
 * How a matrix is cut depends on its shape alone, and so do the bits of the result. Long chains of additions are cut, so
 * that the error does not grow with the number of terms. */
#include "cuda/each_element.h"
#include "cuda/sums_args.h"

enum { SUMS_CHAIN = 64, SUMS_WARPS = SUMS_THREADS / WARP };

template <typename T> __device__ inline typename compute<T>::type term_of(const T &x, bool squares)
{
    typename compute<T>::type value = load(x);
    return squares ? value * value : value;
}

/* ---- Columns ------------------------------------------------------------------------------------------------------ */

/* Adds every `step`-th row from `begin` on, below `end`, for the columns of one group. */
template <typename T, int N, typename C>
__device__ inline void add_rows(C (&total)[N], const sums_args &args, int64_t column, int64_t begin, int64_t end,
                                int step)
{
    for (int64_t start = begin; start < end; start += SUMS_CHAIN * step) {
        int64_t stop = start + SUMS_CHAIN * step < end ? start + SUMS_CHAIN * step : end;
        C part[N];
#pragma unroll
        for (int k = 0; k < N; k++)
            part[k] = 0;
#pragma unroll 4
        for (int64_t row = start; row < stop; row += step) {
            T group[N];
            read_group(group, args.x, row * args.pitch + column, false);
#pragma unroll
            for (int k = 0; k < N; k++)
                part[k] += term_of(group[k], args.squares);
        }
#pragma unroll
        for (int k = 0; k < N; k++)
            total[k] += part[k];
    }
}

template <typename T> __device__ inline void sum_columns(const sums_args &args)
{
    typedef typename compute<T>::type C;
    constexpr int N = CUDA_WIDTH(sizeof(T));
    __shared__ C sums[SUMS_WARPS][N][WARP];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int64_t tiles = (args.columns + WARP * N - 1) / (WARP * N);
    int64_t slice = blockIdx.x / tiles, first = blockIdx.x % tiles * WARP * N, column = first + lane * N;
    int64_t begin = slice * args.each, end = begin + args.each < args.rows ? begin + args.each : args.rows;
    C total[N];
#pragma unroll
    for (int k = 0; k < N; k++)
        total[k] = 0;
    if (column < args.columns)
        add_rows<T>(total, args, column, begin + warp, end, SUMS_WARPS);
#pragma unroll
    for (int k = 0; k < N; k++)
        sums[warp][k][lane] = total[k];
    __syncthreads();
    for (int i = threadIdx.x; i < WARP * N && first + i < args.columns; i += SUMS_THREADS) {
        C sum = 0;
        for (int w = 0; w < SUMS_WARPS; w++)
            sum += sums[w][i % N][i / N];
        ((C *)args.partials)[slice * args.columns + first + i] = sum;
    }
}

/* ---- The result ----------------------------------------------------------------------------------------------------- */

template <typename C> __device__ inline void write_sum(const sums_args &args, int64_t i, C value)
{
    if (args.divisor != 1)
        value /= (C)args.divisor;
    int64_t at = i * args.out_stride;
    switch (args.out_dtype) {
    case CUDA_F32:
        ((float *)args.out)[at] = (float)value;
        break;
    case CUDA_F64:
        ((double *)args.out)[at] = (double)value;
        break;
    case CUDA_F16:
        ((f16 *)args.out)[at] = store<f16>((float)value);
        break;
    default:
        ((bf16 *)args.out)[at] = store<bf16>((float)value);
    }
}

/* ---- Rows ---------------------------------------------------------------------------------------------------------- */

template <typename T> __device__ inline void sum_rows(const sums_args &args)
{
    typedef typename compute<T>::type C;
    constexpr int N = CUDA_WIDTH(sizeof(T));
    int member = threadIdx.x % args.threads, at_once = blockDim.x / args.threads;
    int64_t job = (int64_t)blockIdx.x * at_once + threadIdx.x / args.threads;
    bool there = job < args.rows * args.slices;
    int64_t row = job / args.slices, slice = job % args.slices, groups = args.columns / N;
    int64_t begin = slice * args.each, end = begin + args.each < groups ? begin + args.each : groups;
    const T *x = (const T *)args.x + row * args.pitch;
    C total = 0;
    for (int64_t start = begin + member; start < end && there; start += (int64_t)SUMS_CHAIN * args.threads) {
        int64_t stop = start + (int64_t)SUMS_CHAIN * args.threads;
        stop = stop < end ? stop : end;
        C part[N], sum = 0;
#pragma unroll
        for (int k = 0; k < N; k++)
            part[k] = 0;
#pragma unroll 4
        for (int64_t i = start; i < stop; i += args.threads) {
            T group[N];
            read_group(group, x, i * N, false);
#pragma unroll
            for (int k = 0; k < N; k++)
                part[k] += term_of(group[k], args.squares);
        }
#pragma unroll
        for (int k = 0; k < N; k++)
            sum += part[k];
        total += sum;
    }
    if (there && slice == args.slices - 1 && groups * N + member < args.columns) /* after the last group */
        total += term_of(x[groups * N + member], args.squares);
    total = args.threads == WARP ? reduce_warp(total, plus_op()) : reduce_block(total, C(0), plus_op());
    if (there && !member && args.partials)
        ((C *)args.partials)[job] = total;
    else if (there && !member)
        write_sum(args, row, total);
}

/* ---- The sums of slices ---------------------------------------------------------------------------------------------- */

/* A block has 32 columns, and its 32 warps every 32nd slice. */
template <typename C> __device__ inline void sum_columns_finish(const sums_args &args)
{
    enum { WARPS = SUMS_FINISH_THREADS / WARP };
    __shared__ C sums[WARPS][WARP];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int64_t column = (int64_t)blockIdx.x * WARP + lane;
    C sum = 0;
#pragma unroll 4
    for (int64_t slice = warp; slice < args.slices; slice += WARPS)
        sum += column < args.columns ? ((const C *)args.partials)[slice * args.columns + column] : C(0);
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp || column >= args.columns)
        return;
    C total = 0;
    for (int w = 0; w < WARPS; w++)
        total += sums[w][lane];
    write_sum(args, column, total);
}

/* A warp or a block has a row of slices. */
template <typename C> __device__ inline void sum_rows_finish(const sums_args &args)
{
    int member = threadIdx.x % args.threads, at_once = blockDim.x / args.threads;
    int64_t row = (int64_t)blockIdx.x * at_once + threadIdx.x / args.threads;
    C total = 0;
    for (int64_t i = member; i < args.slices && row < args.rows; i += args.threads)
        total += ((const C *)args.partials)[row * args.slices + i];
    total = args.threads == WARP ? reduce_warp(total, plus_op()) : reduce_block(total, C(0), plus_op());
    if (row < args.rows && !member)
        write_sum(args, row, total);
}

#define SUM_KERNELS(name, T)                                                                       \
    TD_KERNEL_SYNC(sum_columns_##name, struct sums_args)                                           \
    {                                                                                              \
        sum_columns<T>(args);                                                                      \
    }                                                                                              \
    TD_KERNEL_SYNC(sum_rows_##name, struct sums_args)                                              \
    {                                                                                              \
        sum_rows<T>(args);                                                                         \
    }
EACH_FLOAT(SUM_KERNELS)

#define FINISH_KERNELS(name, C)                                                                    \
    TD_KERNEL_SYNC(sum_columns_finish_##name, struct sums_args)                                    \
    {                                                                                              \
        sum_columns_finish<C>(args);                                                               \
    }                                                                                              \
    TD_KERNEL_SYNC(sum_rows_finish_##name, struct sums_args)                                       \
    {                                                                                              \
        sum_rows_finish<C>(args);                                                                  \
    }
FINISH_KERNELS(f32, float)
FINISH_KERNELS(f64, double)
