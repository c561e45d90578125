/* CUDA's device code on the host, for tests without a GPU: what device_code.h includes instead of CUDA's headers.
 *
 * The threads of a block run one after the other, or, where they wait for one another (TD_KERNEL_SYNC), as fibers of one
 * thread that change at __syncthreads() and at shuffles; emulated_cuda.c runs them. A race is not found here, but an
 * index out of range, a wrong formula, and a forgotten element are. */
#ifndef EMULATED_H
#define EMULATED_H

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <math.h>
#include <vector>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#undef __shared__
#define __shared__ static
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __constant__
#define __constant__ static const

extern "C" {
struct emulated_index {
    unsigned x, y, z;
};
extern struct emulated_index emulated_thread, emulated_block, emulated_block_size,
    emulated_grid_size;
struct emulated_kernel {
    void (*run)(const void *args);
    int synchronizes;
    size_t bytes;
};
void emulated_sync_block(void);
void emulated_sync_warp(void);
void *emulated_slot(unsigned lane); /* 16 bytes of a lane of this warp */
void *emulated_shared(void);
}

#define threadIdx emulated_thread
#define blockIdx emulated_block
#define blockDim emulated_block_size
#define gridDim emulated_grid_size

#define EMULATED_KERNEL(name, type, sync)                                                          \
    static void name##_body(const type &args);                                                     \
    static void name##_run(const void *args)                                                       \
    {                                                                                              \
        name##_body(*(const type *)args);                                                          \
    }                                                                                              \
    extern "C" __attribute__((visibility("default"))) const emulated_kernel name;                  \
    const emulated_kernel name = {name##_run, sync, sizeof(type)};                                 \
    static void name##_body(const type &args)
#define TD_KERNEL(name, type) EMULATED_KERNEL(name, type, 0)
#define TD_KERNEL_SYNC(name, type) EMULATED_KERNEL(name, type, 1)
#define TD_SHARED(type, name) type *name = (type *)emulated_shared()

/* ---- Threads that wait for one another ---------------------------------------------------------------------- */

static inline void __syncthreads(void)
{
    emulated_sync_block();
}

static inline void __syncwarp(unsigned = 0xffffffffu)
{
    emulated_sync_warp();
}

template <typename T> static inline T emulated_exchange(T value, unsigned from)
{
    static_assert(sizeof(T) <= 16, "a shuffle moves up to 16 bytes");
    memcpy(emulated_slot(threadIdx.x % 32), &value, sizeof value);
    emulated_sync_warp();
    memcpy(&value, emulated_slot(from % 32), sizeof value);
    emulated_sync_warp();
    return value;
}

template <typename T> static inline T __shfl_xor_sync(unsigned, T value, int mask, int = 32)
{
    return emulated_exchange(value, threadIdx.x % 32 ^ (unsigned)mask);
}

template <typename T> static inline T __shfl_sync(unsigned, T value, int lane, int width = 32)
{
    unsigned first = threadIdx.x % 32 / (unsigned)width * (unsigned)width;
    return emulated_exchange(value, first + (unsigned)lane % (unsigned)width);
}

template <typename T>
static inline T __shfl_down_sync(unsigned, T value, unsigned by, int width = 32)
{
    unsigned lane = threadIdx.x % 32,
             last = lane / (unsigned)width * (unsigned)width + (unsigned)width - 1;
    return emulated_exchange(value, lane + by <= last ? lane + by : lane);
}

template <typename T> static inline T __shfl_up_sync(unsigned, T value, unsigned by, int width = 32)
{
    unsigned lane = threadIdx.x % 32, first = lane / (unsigned)width * (unsigned)width;
    return emulated_exchange(value, lane >= first + by ? lane - by : lane);
}

static inline int __any_sync(unsigned, int predicate)
{
    for (int step = 1; step < 32; step *= 2)
        predicate |= __shfl_xor_sync(0xffffffffu, predicate, step);
    return predicate != 0;
}

/* ---- Tensor cores: a lane has a part of a matrix, as PTX lays it out ------------------------------------------ */

/* mma.m16n8k16: sum [16, 8] += a [16, 16] b [16, 8]. */
template <typename T>
static inline void emulated_multiply(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0,
                                     uint32_t b1)
{
    unsigned lane = threadIdx.x % 32;
    uint32_t b[2] = {b0, b1};
    T rows[2][16], columns[2][16], part[8];
    memcpy(emulated_slot(lane), a, sizeof a);
    emulated_sync_warp();
    for (unsigned i = 0; i < 4; i++) {
        memcpy(part, emulated_slot(lane / 4 * 4 + i), sizeof part);
        for (unsigned e = 0; e < 8; e++) /* words: rows 0 and 8, then columns 8 further */
            rows[e / 2 % 2][2 * i + e % 2 + e / 4 * 8] = part[e];
    }
    emulated_sync_warp();
    memcpy(emulated_slot(lane), b, sizeof b);
    emulated_sync_warp();
    for (unsigned i = 0; i < 8; i++) {
        memcpy(part, emulated_slot((lane % 4 * 2 + i / 4) * 4 + i % 4), sizeof b);
        for (unsigned e = 0; e < 4; e++)
            columns[i / 4][2 * (i % 4) + e % 2 + e / 2 * 8] = part[e];
    }
    emulated_sync_warp();
    for (unsigned i = 0; i < 4; i++)
        for (unsigned k = 0; k < 16; k++)
            sum[i] += (float)rows[i / 2][k] * (float)columns[i % 2][k];
}

/* ldmatrix.x4: lane i has the address of row i % 8 of matrix i / 8. */
template <bool transposed, typename T>
static inline void emulated_load_fragments(uint32_t (&to)[4], const T *row)
{
    unsigned lane = threadIdx.x % 32;
    T pair[2];
    if ((uintptr_t)row % 16)
        abort();
    memcpy(emulated_slot(lane), &row, sizeof row);
    emulated_sync_warp();
    for (unsigned i = 0; i < 4; i++) {
        for (unsigned e = 0; e < 2; e++) {
            unsigned y = transposed ? lane % 4 * 2 + e : lane / 4;
            unsigned x = transposed ? lane / 4 : lane % 4 * 2 + e;
            const T *from;
            memcpy(&from, emulated_slot(i * 8 + y), sizeof from);
            pair[e] = from[x];
        }
        memcpy(&to[i], pair, sizeof pair);
    }
    emulated_sync_warp();
}

/* cp.async: the copies are made when the thread waits for them, not before. */
struct emulated_copy {
    void *to;
    const void *from; /* NULL: zeros */
    size_t bytes;
};
inline std::vector<emulated_copy> emulated_copies[1024]; /* by thread */

static inline void emulated_copy_async(void *to, const void *from, size_t bytes)
{
    if ((uintptr_t)to % bytes || (uintptr_t)from % bytes)
        abort();
    emulated_copies[threadIdx.x].push_back({to, from, bytes});
}

static inline void emulated_end_copies(void)
{
    for (const emulated_copy &copy : emulated_copies[threadIdx.x])
        if (copy.from)
            memcpy(copy.to, copy.from, copy.bytes);
        else
            memset(copy.to, 0, copy.bytes);
    emulated_copies[threadIdx.x].clear();
}

/* ---- Functions of CUDA that C++ does not have ---------------------------------------------------------------- */

static inline float rsqrtf(float x)
{
    return 1.0f / sqrtf(x);
}
static inline float rsqrt(float x)
{
    return rsqrtf(x);
}
static inline double rsqrt(double x)
{
    return 1.0 / sqrt(x);
}
static inline float __fdividef(float a, float b)
{
    return a / b;
}
static inline void sincospif(float x, float *sine, float *cosine)
{
    *sine = (float)sin(M_PI * (double)x);
    *cosine = (float)cos(M_PI * (double)x);
}
static inline void sincospi(double x, double *sine, double *cosine)
{
    *sine = sin(M_PI * x);
    *cosine = cos(M_PI * x);
}
static inline uint32_t __umulhi(uint32_t a, uint32_t b)
{
    return (uint32_t)((uint64_t)a * b >> 32);
}
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b)
{
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
#define __fmaf_rn fmaf
#define __expf expf
#define __logf logf
static inline float __fadd_rn(float a, float b)
{
    return a + b;
}
static inline float __fmul_rn(float a, float b)
{
    return a * b;
}
static inline float __fdiv_rn(float a, float b)
{
    return a / b;
}
static inline float __fsqrt_rn(float a)
{
    return sqrtf(a);
}
static inline double __dadd_rn(double a, double b)
{
    return a + b;
}
static inline double __dmul_rn(double a, double b)
{
    return a * b;
}
static inline int __float_as_int(float x)
{
    int bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}
static inline float __int_as_float(int x)
{
    float value;
    memcpy(&value, &x, sizeof value);
    return value;
}
template <typename T> static inline T __ldg(const T *at)
{
    return *at;
}
static inline int atomicCAS_system(int *at, int expected, int value)
{
    __atomic_compare_exchange_n(at, &expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    return expected;
}
static inline int atomicExch(int *at, int value)
{
    return __atomic_exchange_n(at, value, __ATOMIC_SEQ_CST);
}
static inline int atomicAdd(int *at, int value)
{
    return __atomic_fetch_add(at, value, __ATOMIC_SEQ_CST);
}
static inline unsigned atomicAdd(unsigned *at, unsigned value)
{
    return __atomic_fetch_add(at, value, __ATOMIC_SEQ_CST);
}
static inline void __threadfence(void)
{
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
static inline void __threadfence_system(void)
{
    __threadfence();
}
template <typename T> static inline T min(T a, T b)
{
    return b < a ? b : a;
}
template <typename T> static inline T max(T a, T b)
{
    return a < b ? b : a;
}
using std::isfinite;
using std::isinf;
using std::isnan;

#endif
