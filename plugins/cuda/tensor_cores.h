/* Operations of a warp on fragments of matrices, and copies to shared memory that run beside the computation. T is f16 or
 * bf16. A fragment is a lane's part of a matrix, two elements a word, as PTX lays it out for mma.m16n8k16. */
#ifndef TENSOR_CORES_H
#define TENSOR_CORES_H

#include "cuda/device_code.h"

template <typename T> __device__ inline uint32_t pack(float low, float high);
template <> __device__ inline uint32_t pack<f16>(float low, float high)
{
    __half2 both = __floats2half2_rn(low, high);
    uint32_t word;
    memcpy(&word, &both, sizeof word);
    return word;
}
template <> __device__ inline uint32_t pack<bf16>(float low, float high)
{
    __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    uint32_t word;
    memcpy(&word, &both, sizeof word);
    return word;
}

#ifdef TD_EMULATED

template <typename T>
static inline void multiply(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    emulated_multiply<T>(sum, a, b0, b1);
}

template <bool transposed, typename T>
static inline void load_fragments(uint32_t (&to)[4], const T *row)
{
    emulated_load_fragments<transposed>(to, row);
}

static inline float power_of_2(float x)
{
    return exp2f(x);
}

template <int bytes> static inline void copy_async(void *to, const void *from, bool inside)
{
    emulated_copy_async(to, inside ? from : NULL, bytes);
}

static inline void end_copies(void)
{
    emulated_end_copies();
}

#else

/* sum [16, 8] += a [16, 16] b [16, 8] */
template <typename T>
__device__ inline void multiply(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

#ifdef __CUDA_ARCH__
#define TD_MULTIPLY(name)                                                                          \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." name "." name ".f32 "                             \
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                          \
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])                                   \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
#else
#define TD_MULTIPLY(name)
#endif

template <>
__device__ inline void multiply<f16>(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0,
                                     uint32_t b1)
{
    TD_MULTIPLY("f16");
}
template <>
__device__ inline void multiply<bf16>(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0,
                                      uint32_t b1)
{
    TD_MULTIPLY("bf16");
}
#undef TD_MULTIPLY

/* Four matrices [8, 8] of shared memory: lane i has the address of row i % 8 of matrix i / 8. */
template <bool transposed, typename T>
__device__ inline void load_fragments(uint32_t (&to)[4], const T *row)
{
#ifdef __CUDA_ARCH__
    uint32_t address = (uint32_t)__cvta_generic_to_shared(row);
    if (transposed)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                     : "r"(address)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                     : "r"(address)
                     : "memory");
#endif
}

__device__ inline float power_of_2(float x)
{
#ifdef __CUDA_ARCH__
    asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(x));
#endif
    return x;
}

/* Copies 4 or 16 bytes to shared memory, or zeros if they are not `inside`: then `from` is not read. They are there
 * after end_copies(). */
template <int bytes> __device__ inline void copy_async(void *to, const void *from, bool inside)
{
#ifdef __CUDA_ARCH__
    uint32_t address = (uint32_t)__cvta_generic_to_shared(to);
    if (bytes == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                     :
                     : "r"(address), "l"(from), "r"(inside ? 16 : 0)
                     : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                     :
                     : "r"(address), "l"(from), "r"(inside ? 4 : 0)
                     : "memory");
#endif
}

/* Waits for the copies of this thread. */
__device__ inline void end_copies(void)
{
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.wait_all;" : : : "memory");
#endif
}

#endif
#endif
