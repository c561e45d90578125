/* Kernels: indices. Sums go in the order of the indices: a thread adds all that belongs to one element. */
#include "cuda/device_code.h"
#include "cuda/indices_args.h"

/* ---- Elements ------------------------------------------------------------------------------------------------------ */

struct __align__(16) bytes16 {
    uint64_t halves[2];
};

template <typename R> struct complex_of {
    R real, imaginary;
};
template <typename R> __device__ inline complex_of<R> operator+(complex_of<R> a, complex_of<R> b)
{
    return complex_of<R>{a.real + b.real, a.imaginary + b.imaginary};
}

/* A bool: a sum is «or». */
struct truth {
    uint8_t byte;
};
__device__ inline truth operator+(truth a, truth b)
{
    return truth{(uint8_t)(a.byte || b.byte)};
}

/* ---- Reading at indices ------------------------------------------------------------------------------------------------ */

__device__ inline bool is_valid(const index_args &args, int64_t position, int64_t index)
{
    if (index >= 0 && index < args.limit)
        return true;
    report_index(args.fault, args.kernel, position, index, args.limit);
    return false;
}

/* index_select and gather: a thread for each element. The lines of index_select's index have strides of 0. */
template <typename T> __device__ void select(const index_args &args)
{
    for (int64_t i = first_element(); i < args.lines.count * args.length; i += element_step()) {
        int64_t line = i / args.length, at = i % args.length, offset[3];
        find_offsets(args.lines, line, offset);
        int64_t position = offset[2] + at * args.index_step, index = args.index[position];
        if (is_valid(args, position, index))
            ((T *)args.out)[offset[0] + at * args.out_step] = ((const T *)args.x)[offset[1] + index * args.x_step];
    }
}

/* The same with neighbouring threads in neighbouring lines. */
template <typename T> __device__ void select_across(const index_args &args)
{
    for (int64_t i = first_element(); i < args.lines.count * args.length; i += element_step()) {
        int64_t line = i % args.lines.count, at = i / args.lines.count, offset[3];
        find_offsets(args.lines, line, offset);
        int64_t position = offset[2] + at * args.index_step, index = args.index[position];
        if (is_valid(args, position, index))
            ((T *)args.out)[offset[0] + at * args.out_step] = ((const T *)args.x)[offset[1] + index * args.x_step];
    }
}

/* ---- Adding at indices -------------------------------------------------------------------------------------------------- */

/* scatter_add, and index_add of few indices: a thread for each line. */
template <typename T> __device__ void add_lines(const index_args &args)
{
    typedef typename compute<T>::type C;
    for (int64_t line = first_element(); line < args.lines.count; line += element_step()) {
        int64_t offset[3];
        find_offsets(args.lines, line, offset);
        for (int64_t at = 0; at < args.length; at++) {
            int64_t position = offset[2] + at * args.index_step, index = args.index[position];
            if (!is_valid(args, position, index))
                continue;
            T *to = (T *)args.out + offset[0] + index * args.out_step;
            C sum = load(*to) + load(((const T *)args.x)[offset[1] + at * args.x_step]);
            *to = store<T>(sum);
        }
    }
}

/* index_add of sorted indices: a block for each position where an index begins; its threads share the lines. */
template <typename T> __device__ void add_sorted(const index_args &args)
{
    typedef typename compute<T>::type C;
    for (int64_t start = blockIdx.x; start < args.length; start += gridDim.x) {
        int64_t first = args.order[start], index = args.index[first * args.index_step];
        if (start && args.index[args.order[start - 1] * args.index_step] == index)
            continue;
        if (index < 0 || index >= args.limit) {
            if (!threadIdx.x)
                report_index(args.fault, args.kernel, first, index, args.limit);
            continue;
        }
        int64_t end = start + 1;
        while (end < args.length && args.index[args.order[end] * args.index_step] == index)
            end++;
        for (int64_t line = threadIdx.x; line < args.lines.count; line += blockDim.x) {
            int64_t offset[3];
            find_offsets(args.lines, line, offset);
            T *to = (T *)args.out + offset[0] + index * args.out_step;
            C sum = load(*to);
#pragma unroll 8
            for (int64_t at = start; at < end; at++)
                sum = sum + load(((const T *)args.x)[offset[1] + args.order[at] * args.x_step]);
            *to = store<T>(sum);
        }
    }
}

/* ---- The sort -------------------------------------------------------------------------------------------------------------
 *
 * By 4 bits at a time, from the lowest: each thread has 16 positions that follow one another, each block 4096. The first
 * kernel counts the digits of each tile, the second makes sums of the counts, in the order of digits, then of tiles, the
 * third writes each position where its digit's sum says. Indices that are out of range sort behind all others. */

__device__ inline int digit_at(const sort_args &args, int64_t i, int32_t *position)
{
    *position = args.from ? args.from[i] : (int32_t)i;
    int64_t index = args.index[*position];
    if (index < 0 || index >= args.limit)
        index = args.limit;
    return (int)(index >> args.shift & (SORT_DIGITS - 1));
}

/* The digits of a thread's positions, counted: counts[digit][thread]. */
__device__ inline void count_digits(const sort_args &args, uint16_t (*counts)[SORT_THREADS])
{
    int64_t first = (int64_t)blockIdx.x * SORT_TILE + threadIdx.x * SORT_EACH;
    for (int d = 0; d < SORT_DIGITS; d++)
        counts[d][threadIdx.x] = 0;
    for (int k = 0; k < SORT_EACH && first + k < args.count; k++) {
        int32_t position;
        counts[digit_at(args, first + k, &position)][threadIdx.x]++;
    }
    __syncthreads();
}

TD_KERNEL_SYNC(sort_count, struct sort_args)
{
    __shared__ uint16_t counts[SORT_DIGITS][SORT_THREADS];
    count_digits(args, counts);
    if (threadIdx.x < SORT_DIGITS) {
        int32_t sum = 0;
        for (int t = 0; t < SORT_THREADS; t++)
            sum += counts[threadIdx.x][t];
        args.counts[threadIdx.x * args.tiles + blockIdx.x] = sum;
    }
}

/* Exclusive sums of all counts, by one block. */
TD_KERNEL_SYNC(sort_sums, struct sort_args)
{
    __shared__ int32_t sums[SORT_THREADS];
    int64_t count = SORT_DIGITS * args.tiles, each = (count + SORT_THREADS - 1) / SORT_THREADS;
    int64_t begin = threadIdx.x * each, end = begin + each < count ? begin + each : count;
    int32_t sum = 0;
    for (int64_t i = begin; i < end; i++)
        sum += args.counts[i];
    sums[threadIdx.x] = sum;
    __syncthreads();
    sum = 0;
    for (int t = 0; t < (int)threadIdx.x; t++)
        sum += sums[t];
    for (int64_t i = begin; i < end; i++) {
        int32_t next = args.counts[i];
        args.counts[i] = sum;
        sum += next;
    }
}

TD_KERNEL_SYNC(sort_move, struct sort_args)
{
    __shared__ uint16_t counts[SORT_DIGITS][SORT_THREADS];
    count_digits(args, counts);
    if (threadIdx.x < SORT_DIGITS) { /* where each thread's positions of a digit begin in the tile */
        uint16_t sum = 0;
        for (int t = 0; t < SORT_THREADS; t++) {
            uint16_t next = counts[threadIdx.x][t];
            counts[threadIdx.x][t] = sum;
            sum = (uint16_t)(sum + next);
        }
    }
    __syncthreads();
    int64_t first = (int64_t)blockIdx.x * SORT_TILE + threadIdx.x * SORT_EACH;
    for (int k = 0; k < SORT_EACH && first + k < args.count; k++) {
        int32_t position;
        int digit = digit_at(args, first + k, &position);
        args.to[args.counts[digit * args.tiles + blockIdx.x] + counts[digit][threadIdx.x]++] = position;
    }
}

/* ---- Kernels ----------------------------------------------------------------------------------------------------------------- */

#define SELECT_KERNELS(size, T)                                                                    \
    TD_KERNEL(select_##size, struct index_args)                                                    \
    {                                                                                              \
        select<T>(args);                                                                           \
    }                                                                                              \
    TD_KERNEL(select_across_##size, struct index_args)                                             \
    {                                                                                              \
        select_across<T>(args);                                                                    \
    }

SELECT_KERNELS(1, uint8_t)
SELECT_KERNELS(2, uint16_t)
SELECT_KERNELS(4, uint32_t)
SELECT_KERNELS(8, uint64_t)
SELECT_KERNELS(16, bytes16)

#define ADD_KERNELS(name, T)                                                                       \
    TD_KERNEL(add_lines_##name, struct index_args)                                                 \
    {                                                                                              \
        add_lines<T>(args);                                                                        \
    }                                                                                              \
    TD_KERNEL(add_sorted_##name, struct index_args)                                                \
    {                                                                                              \
        add_sorted<T>(args);                                                                       \
    }

ADD_KERNELS(f32, float)
ADD_KERNELS(f64, double)
ADD_KERNELS(f16, f16)
ADD_KERNELS(bf16, bf16)
ADD_KERNELS(i8, uint8_t) /* sums of integers wrap around, signed or not */
ADD_KERNELS(i16, uint16_t)
ADD_KERNELS(i32, uint32_t)
ADD_KERNELS(i64, uint64_t)
ADD_KERNELS(bool, truth)
ADD_KERNELS(complex64, complex_of<float>)
ADD_KERNELS(complex128, complex_of<double>)
