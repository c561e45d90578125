/* For CUDA sources: a row of floats in the registers of the threads that share it, so that it is read once.
 *
 *     threads of the row     0    1    2  …   0    1    2  …
 *     groups of 4 floats   [0] [1] [2]  …  [n] [n+1] [n+2] …       thread m has the groups m, m + n, m + 2 n, …
 *
 * A warp reads neighbouring groups at once: 16 bytes a thread of f32, 8 of halves. The threads of a row are a warp, and
 * the block has several rows; or they are the whole block. The dtype is looked at once a row, which costs nothing beside
 * the memory, and saves a kernel for each mixture of dtypes. */
#ifndef CUDA_NORM_ROWS_H
#define CUDA_NORM_ROWS_H

#include "cuda/each_element.h"
#include "cuda/norms_args.h"

/* ---- Vectors of any float dtype, an element at a time ------------------------------------------------------------ */

template <typename C> __device__ inline C read_number(const norm_vector &vector, int64_t i)
{
    switch (vector.dtype) {
    case CUDA_F32:
        return (C)((const float *)vector.data)[i];
    case CUDA_F64:
        return (C)((const double *)vector.data)[i];
    case CUDA_F16:
        return (C)load(((const f16 *)vector.data)[i]);
    default:
        return (C)load(((const bf16 *)vector.data)[i]);
    }
}

template <typename C> __device__ inline void write_number(const norm_vector &vector, int64_t i, C value)
{
    switch (vector.dtype) {
    case CUDA_F32:
        ((float *)vector.data)[i] = (float)value;
        break;
    case CUDA_F64:
        ((double *)vector.data)[i] = (double)value;
        break;
    case CUDA_F16:
        ((f16 *)vector.data)[i] = store<f16>((float)value);
        break;
    default:
        ((bf16 *)vector.data)[i] = store<bf16>((float)value);
    }
}

/* ---- Rows in registers ---------------------------------------------------------------------------------------------- */

/* Which groups this thread has. */
struct row_share {
    int member, threads, groups; /* of the row */

    __device__ bool has(int v) const
    {
        return member + v * threads < groups;
    }
    __device__ int64_t element(int v) const
    {
        return (int64_t)(member + v * threads) * ROW_WIDTH;
    }
};

__device__ inline row_share share_of(int threads, int64_t size)
{
    return row_share{(int)(threadIdx.x % threads), threads, (int)(size / ROW_WIDTH)};
}

/* All loads stand before the first conversion, so that all are under way at once. Missing groups are 0. */
template <typename T, int V>
__device__ inline void load_groups(float (&to)[V][ROW_WIDTH], const void *data, int64_t start, const row_share &share)
{
    T raw[V][ROW_WIDTH];
#pragma unroll
    for (int v = 0; v < V; v++) {
        if (share.has(v)) {
            read_group(raw[v], data, start + share.element(v), false);
        } else {
#pragma unroll
            for (int k = 0; k < ROW_WIDTH; k++)
                raw[v][k] = store<T>(0.0f);
        }
    }
#pragma unroll
    for (int v = 0; v < V; v++)
#pragma unroll
        for (int k = 0; k < ROW_WIDTH; k++)
            to[v][k] = load(raw[v][k]);
}

template <typename T, int V>
__device__ inline void store_groups(void *data, int64_t start, const float (&from)[V][ROW_WIDTH],
                                    const row_share &share)
{
#pragma unroll
    for (int v = 0; v < V; v++) {
        T raw[ROW_WIDTH];
#pragma unroll
        for (int k = 0; k < ROW_WIDTH; k++)
            raw[k] = store<T>(from[v][k]);
        if (share.has(v))
            write_group(data, start + share.element(v), raw);
    }
}

/* The row that begins at element `start`. */
template <int V>
__device__ inline void load_row(float (&to)[V][ROW_WIDTH], const norm_vector &from, int64_t start,
                                const row_share &share)
{
    if (from.dtype == CUDA_F32)
        load_groups<float>(to, from.data, start, share);
    else if (from.dtype == CUDA_F16)
        load_groups<f16>(to, from.data, start, share);
    else
        load_groups<bf16>(to, from.data, start, share);
}

template <int V>
__device__ inline void store_row(const norm_vector &to, int64_t start, const float (&from)[V][ROW_WIDTH],
                                 const row_share &share)
{
    if (to.dtype == CUDA_F32)
        store_groups<float>(to.data, start, from, share);
    else if (to.dtype == CUDA_F16)
        store_groups<f16>(to.data, start, from, share);
    else
        store_groups<bf16>(to.data, start, from, share);
}

/* Rounds to a dtype, as storing and loading would. */
template <int V> __device__ inline void round_row(float (&row)[V][ROW_WIDTH], int dtype)
{
    if (dtype == CUDA_F32)
        return;
#pragma unroll
    for (int v = 0; v < V; v++)
#pragma unroll
        for (int k = 0; k < ROW_WIDTH; k++)
            row[v][k] = dtype == CUDA_F16 ? load(store<f16>(row[v][k])) : load(store<bf16>(row[v][k]));
}

/* ---- Reductions ------------------------------------------------------------------------------------------------------- */

/* Over the threads of a row: a warp, or the block. The result is in all of them. */
template <typename T, typename Op> __device__ inline T reduce_row(T x, T none, int threads, Op op)
{
    return threads == WARP ? reduce_warp(x, op) : reduce_block(x, none, op);
}

/* Two sums, which wait for the other threads once. */
template <typename C> struct two_sums {
    C first, second;

    __device__ two_sums operator+(const two_sums &other) const
    {
        return two_sums{first + other.first, second + other.second};
    }
};

#endif
