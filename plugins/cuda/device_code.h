/* For CUDA sources: types, indices and reductions that kernels share.
 *
 * A kernel is defined with TD_KERNEL(name, struct type) { … args.member … }: one argument, whose struct stands in a header that the launching
 * C file includes as well. TD_KERNEL_SYNC is one whose threads wait for one another (__syncthreads(), shuffles). The tests compile the same
 * sources for the host (tests/cuda/emulated.h), so only what that header offers is used: no inline assembly outside of
 * #ifdef __CUDA_ARCH__, no atomics on floats. */
#ifndef CUDA_DEVICE_CODE_H
#define CUDA_DEVICE_CODE_H

#include "cuda/cuda_args.h"

#ifndef TD_EMULATED /* tests/cuda/emulated.h stands in front then */
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define TD_KERNEL(name, type) extern "C" __global__ void name(const __grid_constant__ type args)
#define TD_KERNEL_SYNC(name, type) TD_KERNEL(name, type)
/* The dynamic shared memory of a block, as an array. */
#define TD_SHARED(type, name)                                                                      \
    extern __shared__ __align__(16) unsigned char td_shared_memory[];                              \
    type *name = (type *)td_shared_memory
#endif

typedef __half f16;
typedef __nv_bfloat16 bf16;

/* ---- Numbers: what a dtype is computed in, and conversions ------------------------------------------------ */

template <typename T> struct compute {
    typedef T type;
};
template <> struct compute<f16> {
    typedef float type;
};
template <> struct compute<bf16> {
    typedef float type;
};

template <typename T> __device__ inline typename compute<T>::type load(const T &x)
{
    return x;
}
template <> __device__ inline float load<f16>(const f16 &x)
{
    return __half2float(x);
}
template <> __device__ inline float load<bf16>(const bf16 &x)
{
    return __bfloat162float(x);
}

template <typename T> __device__ inline T store(typename compute<T>::type x)
{
    return x;
}
template <> __device__ inline f16 store<f16>(float x)
{
    return __float2half_rn(x);
}
template <> __device__ inline bf16 store<bf16>(float x)
{
    return __float2bfloat16_rn(x);
}

/* ---- Indices ---------------------------------------------------------------------------------------------- */

/* The first element of this thread, and how far it goes on, in a loop over all elements. */
__device__ inline int64_t first_element(void)
{
    return (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
}

__device__ inline int64_t element_step(void)
{
    return (int64_t)gridDim.x * blockDim.x;
}

/* The last dimension takes the rest, without a division. */
template <int operands, typename Index>
__device__ inline void add_offsets(const cuda_space &space, Index i, int64_t (&offset)[operands])
{
    int last = space.ndim - 1;
    for (int d = 0; d < last; d++) {
        Index size = (Index)space.size[d], next = i / size, at = i - next * size;
        for (int t = 0; t < operands; t++)
            offset[t] += at * space.stride[t][d];
        i = next;
    }
    for (int t = 0; t < operands && last >= 0; t++)
        offset[t] += i * space.stride[t][last];
}

/* The offsets of element i in the operands of a space. */
template <int operands>
__device__ inline void find_offsets(const cuda_space &space, int64_t i, int64_t (&offset)[operands])
{
    if (space.plain) {
        for (int t = 0; t < operands; t++)
            offset[t] = i;
        return;
    }
    for (int t = 0; t < operands; t++)
        offset[t] = 0;
    if (space.count <= INT32_MAX)
        add_offsets<operands, uint32_t>(space, (uint32_t)i, offset);
    else
        add_offsets<operands, int64_t>(space, i, offset);
}

/* ---- Reductions in a block: the same order each time -------------------------------------------------------- */

enum { WARP = 32, MOST_WARPS = 32 };

/* What the lane `by` above has; anything in the last lanes. For types of any size. */
template <typename T> __device__ inline T shuffle_down(T x, int by)
{
    static_assert(sizeof(T) % sizeof(int) == 0, "whole words");
    int words[sizeof(T) / sizeof(int)];
    memcpy(words, &x, sizeof x);
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++)
        words[i] = __shfl_down_sync(0xffffffffu, words[i], (unsigned)by);
    memcpy(&x, words, sizeof x);
    return x;
}

template <typename T> __device__ inline T shuffle_xor(T x, int mask)
{
    static_assert(sizeof(T) % sizeof(int) == 0, "whole words");
    int words[sizeof(T) / sizeof(int)];
    memcpy(words, &x, sizeof x);
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++)
        words[i] = __shfl_xor_sync(0xffffffffu, words[i], mask);
    memcpy(&x, words, sizeof x);
    return x;
}

template <typename T, typename Op> __device__ inline T reduce_warp(T x, Op op)
{
    for (int step = WARP / 2; step; step /= 2)
        x = op(x, shuffle_xor(x, step));
    return x;
}

/* The reduction of all threads of the block, in all of them. `neutral` stands for missing warps. All threads call it. */
template <typename T, typename Op> __device__ inline T reduce_block(T x, T neutral, Op op)
{
    __shared__ T parts[MOST_WARPS];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP,
        warps = (blockDim.x + WARP - 1) / WARP;
    x = reduce_warp(x, op);
    __syncthreads(); /* an earlier reduction has been read */
    if (!lane)
        parts[warp] = x;
    __syncthreads();
    x = lane < warps ? parts[lane] : neutral;
    return reduce_warp(x, op);
}

struct plus_op {
    template <typename T> __device__ T operator()(T a, T b) const
    {
        return a + b;
    }
};

/* ---- Faults ------------------------------------------------------------------------------------------------ */

/* Reports an index that is out of range; the first one stays. */
__device__ inline void report_index(cuda_fault *fault, int kernel, int64_t position, int64_t index,
                                    int64_t limit)
{
    if (atomicCAS_system(&fault->code, 0, -1))
        return;
    fault->kernel = kernel;
    fault->position = position;
    fault->index = index;
    fault->limit = limit;
    __threadfence_system();
    *(volatile int32_t *)&fault->code = 1;
}

#endif
