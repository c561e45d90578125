/* Kernels: reductions over any dimensions, with any strides.
 *
 * A group of threads reduces one result: a whole block where the elements of a result follow one another and are many, a
 * warp or a part of it where they are few, one thread where results follow one another, so that neighbouring threads
 * read neighbouring elements in each case. With few results the elements of each are split; the parts are reduced by a
 * second launch. All of this depends on the shape alone, and so do the bits of the result. */
#include "cuda/device_code.h"
#include "cuda/reductions_args.h"

/* As td_dtype and td_reduce_kind have them; kernels.h is not for C++ on the device. */
enum dtype_number { F32, F64, F16, BF16, I8, U8, I16, I32, I64, U32, U64, BOOL, COMPLEX64, COMPLEX128 };
enum reduce_kind { SUM, MEAN, PROD, MAX, MIN, ALL, ANY, SQUARES, ANY_KIND };

/* A bool is true for any byte but 0. */
struct truth {
    uint8_t byte;
};
template <> struct compute<truth> {
    typedef int64_t type;
};
template <> __device__ inline int64_t load<truth>(const truth &x)
{
    return x.byte != 0;
}

/* ---- Accumulators --------------------------------------------------------------------------------------------- */

template <typename R> struct complex_of {
    R real, imaginary;
};
typedef complex_of<float> c64;
typedef complex_of<double> c128;

template <typename T> struct accumulator {
    typedef int64_t type;
};
template <> struct accumulator<float> {
    typedef float type;
};
template <> struct accumulator<f16> {
    typedef float type;
};
template <> struct accumulator<bf16> {
    typedef float type;
};
template <> struct accumulator<double> {
    typedef double type;
};
template <> struct accumulator<uint64_t> {
    typedef uint64_t type;
};
template <> struct accumulator<c64> {
    typedef c64 type;
};
template <> struct accumulator<c128> {
    typedef c128 type;
};

template <typename A> __device__ inline bool is_nan(A x)
{
    return x != x;
}
template <typename R> __device__ inline bool is_true(complex_of<R> x)
{
    return x.real != 0 || x.imaginary != 0;
}
template <typename A> __device__ inline bool is_true(A x)
{
    return x != 0;
}

template <typename A> struct arithmetic {
    __device__ static A number(double x)
    {
        return (A)x;
    }
    __device__ static A add(A a, A b)
    {
        return a + b;
    }
    __device__ static A multiply(A a, A b)
    {
        return a * b;
    }
    __device__ static A greater(A a, A b)
    {
        return a > b || is_nan(a) ? a : b;
    }
    __device__ static A less(A a, A b)
    {
        return a < b || is_nan(a) ? a : b;
    }
};
template <> struct arithmetic<int64_t> { /* sums and products wrap around */
    __device__ static int64_t number(double x)
    {
        return (int64_t)x;
    }
    __device__ static int64_t add(int64_t a, int64_t b)
    {
        return (int64_t)((uint64_t)a + (uint64_t)b);
    }
    __device__ static int64_t multiply(int64_t a, int64_t b)
    {
        return (int64_t)((uint64_t)a * (uint64_t)b);
    }
    __device__ static int64_t greater(int64_t a, int64_t b)
    {
        return a > b ? a : b;
    }
    __device__ static int64_t less(int64_t a, int64_t b)
    {
        return a < b ? a : b;
    }
};
template <typename R> struct arithmetic<complex_of<R>> {
    typedef complex_of<R> A;
    __device__ static A number(double x)
    {
        return A{(R)x, 0};
    }
    __device__ static A add(A a, A b)
    {
        return A{a.real + b.real, a.imaginary + b.imaginary};
    }
    __device__ static A multiply(A a, A b)
    {
        return A{a.real * b.real - a.imaginary * b.imaginary, a.real * b.imaginary + a.imaginary * b.real};
    }
    __device__ static A greater(A a, A)
    {
        return a;
    }
    __device__ static A less(A a, A)
    {
        return a;
    }
};

template <typename A> __device__ inline A least_of(void);
template <> __device__ inline float least_of<float>(void)
{
    return -INFINITY;
}
template <> __device__ inline double least_of<double>(void)
{
    return -(double)INFINITY;
}
template <> __device__ inline int64_t least_of<int64_t>(void)
{
    return INT64_MIN;
}
template <> __device__ inline uint64_t least_of<uint64_t>(void)
{
    return 0;
}
template <> __device__ inline c64 least_of<c64>(void)
{
    return c64{0, 0};
}
template <> __device__ inline c128 least_of<c128>(void)
{
    return c128{0, 0};
}
template <typename A> __device__ inline A greatest_of(void)
{
    return -least_of<A>();
}
template <> __device__ inline int64_t greatest_of<int64_t>(void)
{
    return INT64_MAX;
}
template <> __device__ inline uint64_t greatest_of<uint64_t>(void)
{
    return UINT64_MAX;
}
template <> __device__ inline c64 greatest_of<c64>(void)
{
    return c64{0, 0};
}
template <> __device__ inline c128 greatest_of<c128>(void)
{
    return c128{0, 0};
}

template <typename A> __device__ inline A neutral(int kind)
{
    typedef arithmetic<A> N;
    return kind == PROD || kind == ALL ? N::number(1)
           : kind == MAX               ? least_of<A>()
           : kind == MIN               ? greatest_of<A>()
                                       : N::number(0);
}

/* Of two totals; also of a total and an element, after first(). */
template <typename A> __device__ inline A combine(int kind, A a, A b)
{
    typedef arithmetic<A> N;
    switch (kind) {
    case PROD:
        return N::multiply(a, b);
    case MAX:
        return N::greater(a, b);
    case MIN:
        return N::less(a, b);
    case ALL:
        return N::number(is_true(a) && is_true(b));
    case ANY:
        return N::number(is_true(a) || is_true(b));
    default:
        return N::add(a, b);
    }
}

template <typename T, typename A> __device__ inline A first(int kind, const T &x)
{
    A value = (A)load(x);
    return kind == SQUARES ? arithmetic<A>::multiply(value, value) : value;
}

/* ---- Where elements are ---------------------------------------------------------------------------------------- */

__device__ inline int64_t offset_of(const reduce_dims &dims, const int64_t *strides, int64_t i)
{
    if (dims.ndim == 1)
        return i * strides[0];
    int64_t offset = 0;
    if (dims.count <= INT32_MAX) {
        uint32_t rest = (uint32_t)i;
        for (int d = 0; d < dims.ndim; d++) {
            uint32_t size = (uint32_t)dims.size[d], next = rest / size;
            offset += (int64_t)(rest - next * size) * strides[d];
            rest = next;
        }
        return offset;
    }
    for (int d = 0; d < dims.ndim; d++) {
        offset += i % dims.size[d] * strides[d];
        i /= dims.size[d];
    }
    return offset;
}

/* ---- Groups of threads ------------------------------------------------------------------------------------------- */

template <typename A> struct by_kind {
    int kind;
    __device__ A operator()(A a, A b) const
    {
        return combine(kind, a, b);
    }
};

/* Reduces over the threads of a group; all threads of the block call it. The result is in the group's first thread. */
template <typename A, typename Op> __device__ inline A reduce_group(A x, A none, int group, Op op)
{
    if (group > WARP)
        return reduce_block(x, none, op);
    for (int step = group / 2; step; step /= 2) {
        x = op(x, shuffle_down(x, step));
    }
    return x;
}

/* ---- The result ----------------------------------------------------------------------------------------------------- */

template <typename A> __device__ inline void write(void *out, int dtype, int64_t at, A value)
{
    switch (dtype) {
    case F32:
        ((float *)out)[at] = (float)value;
        break;
    case F64:
        ((double *)out)[at] = (double)value;
        break;
    case F16:
        ((f16 *)out)[at] = store<f16>((float)value);
        break;
    case BF16:
        ((bf16 *)out)[at] = store<bf16>((float)value);
        break;
    case I8:
    case U8:
        ((uint8_t *)out)[at] = (uint8_t)value;
        break;
    case BOOL:
        ((uint8_t *)out)[at] = is_true(value);
        break;
    case I16:
        ((uint16_t *)out)[at] = (uint16_t)value;
        break;
    case I32:
    case U32:
        ((uint32_t *)out)[at] = (uint32_t)value;
        break;
    default:
        ((uint64_t *)out)[at] = (uint64_t)value;
    }
}
template <typename R> __device__ inline void write(void *out, int dtype, int64_t at, complex_of<R> value)
{
    if (dtype == BOOL)
        ((uint8_t *)out)[at] = is_true(value);
    else
        ((complex_of<R> *)out)[at] = value;
}

template <typename A> __device__ inline A divide(A value, int64_t terms)
{
    return value / (A)terms;
}
template <typename R> __device__ inline complex_of<R> divide(complex_of<R> value, int64_t terms)
{
    return complex_of<R>{value.real / (R)terms, value.imaginary / (R)terms};
}

/* ---- The loop --------------------------------------------------------------------------------------------------------- */

enum { CHAIN = 64 }; /* terms that are added one after the other */

/* One thread's part: every `step`-th element from `begin` on, below `end`. */
template <typename T, typename A>
__device__ inline A reduce_part(const reduce_args &args, const T *x, int64_t begin, int64_t end, int64_t step, int kind)
{
    A total = neutral<A>(kind);
    for (int64_t start = begin; start < end; start += CHAIN * step) {
        A part = neutral<A>(kind);
        int64_t stop = start + CHAIN * step < end ? start + CHAIN * step : end;
#pragma unroll 4
        for (int64_t i = start; i < stop; i += step)
            part = combine(kind, part, first<T, A>(kind, x[offset_of(args.reduced, args.reduced.x_stride, i)]));
        total = combine(kind, total, part);
    }
    return total;
}

template <typename T, typename A, int fixed> __device__ void reduce(const reduce_args &args)
{
    int kind = fixed == ANY_KIND ? args.kind : fixed;
    int groups = blockDim.x / args.group, member = threadIdx.x % args.group;
    by_kind<A> op = {kind};
    int64_t jobs = args.kept.count * args.splits;
    for (int64_t base = (int64_t)blockIdx.x * groups; base < jobs; base += (int64_t)gridDim.x * groups) {
        int64_t job = base + threadIdx.x / args.group;
        A total = neutral<A>(kind);
        /* Neighbouring groups have neighbouring results. */
        int64_t result = job % args.kept.count, split = job / args.kept.count;
        if (job < jobs) {
            const T *x = (const T *)args.x + offset_of(args.kept, args.kept.x_stride, result);
            int64_t begin = split * args.chunk, end = begin + args.chunk;
            total = reduce_part<T, A>(args, x, begin + member, end < args.reduced.count ? end : args.reduced.count,
                                             args.group, kind);
        }
        total = reduce_group(total, neutral<A>(kind), args.group, op);
        if (job >= jobs || member)
            continue;
        if (args.partials) {
            ((A *)args.partials)[result * args.splits + split] = total;
            continue;
        }
        if (args.kind == MEAN)
            total = divide(total, args.terms);
        write(args.out, args.out_dtype, offset_of(args.kept, args.kept.out_stride, result), total);
    }
}

/* all and any: elements count as 0 or 1. */
template <typename T> __device__ inline int64_t load_truth(const T &x)
{
    return is_true(load(x));
}

template <typename T> __device__ void reduce_truth(const reduce_args &args)
{
    int groups = blockDim.x / args.group, member = threadIdx.x % args.group;
    by_kind<int64_t> op = {args.kind};
    int64_t jobs = args.kept.count * args.splits, none = neutral<int64_t>(args.kind);
    for (int64_t base = (int64_t)blockIdx.x * groups; base < jobs; base += (int64_t)gridDim.x * groups) {
        int64_t job = base + threadIdx.x / args.group, result = job % args.kept.count, split = job / args.kept.count;
        int64_t total = none;
        if (job < jobs) {
            const T *x = (const T *)args.x + offset_of(args.kept, args.kept.x_stride, result);
            int64_t end = (split + 1) * args.chunk < args.reduced.count ? (split + 1) * args.chunk : args.reduced.count;
            for (int64_t i = split * args.chunk + member; i < end; i += args.group)
                total = op(total, load_truth(x[offset_of(args.reduced, args.reduced.x_stride, i)]));
        }
        total = reduce_group(total, none, args.group, op);
        if (job >= jobs || member)
            continue;
        if (args.partials)
            ((int64_t *)args.partials)[result * args.splits + split] = total;
        else
            write(args.out, args.out_dtype, offset_of(args.kept, args.kept.out_stride, result), total);
    }
}

/* ---- The index of the greatest or least element -------------------------------------------------------------------------- */

template <typename A> struct candidate {
    A value;
    int64_t index; /* -1: none */
};

template <typename A> struct better {
    bool least;
    __device__ candidate<A> operator()(candidate<A> a, candidate<A> b) const
    {
        if (a.index < 0 || b.index < 0)
            return a.index < 0 ? b : a;
        bool same = a.value == b.value || (is_nan(a.value) && is_nan(b.value));
        if (same)
            return a.index < b.index ? a : b;
        if (is_nan(a.value) || is_nan(b.value))
            return is_nan(a.value) ? a : b;
        return (a.value > b.value) != least ? a : b;
    }
};

template <typename T, typename A> __device__ void find_extreme(const reduce_args &args)
{
    int groups = blockDim.x / args.group, member = threadIdx.x % args.group;
    better<A> op = {args.least != 0};
    for (int64_t base = (int64_t)blockIdx.x * groups; base < args.kept.count; base += (int64_t)gridDim.x * groups) {
        int64_t result = base + threadIdx.x / args.group;
        candidate<A> found = {A(0), -1};
        if (result < args.kept.count) {
            const T *x = (const T *)args.x + offset_of(args.kept, args.kept.x_stride, result);
            for (int64_t i = member; i < args.reduced.count; i += args.group)
                found = op(found, candidate<A>{(A)load(x[offset_of(args.reduced, args.reduced.x_stride, i)]), i});
        }
        found = reduce_group(found, candidate<A>{A(0), -1}, args.group, op);
        if (result < args.kept.count && !member)
            ((int64_t *)args.out)[offset_of(args.kept, args.kept.out_stride, result)] = found.index;
    }
}

/* ---- Kernels ------------------------------------------------------------------------------------------------------------ */

#define REDUCE_KERNELS(name, T)                                                                    \
    TD_KERNEL_SYNC(reduce_##name, struct reduce_args)                                              \
    {                                                                                              \
        reduce<T, accumulator<T>::type, ANY_KIND>(args);                                           \
    }                                                                                              \
    TD_KERNEL_SYNC(reduce_truth_##name, struct reduce_args)                                        \
    {                                                                                              \
        reduce_truth<T>(args);                                                                     \
    }

#define SUM_KERNEL(name, T)                                                                        \
    TD_KERNEL_SYNC(reduce_sum_##name, struct reduce_args)                                          \
    {                                                                                              \
        reduce<T, accumulator<T>::type, SUM>(args);                                                \
    }

#define EXTREME_KERNEL(name, T)                                                                    \
    TD_KERNEL_SYNC(arg_reduce_##name, struct reduce_args)                                          \
    {                                                                                              \
        find_extreme<T, accumulator<T>::type>(args);                                               \
    }

#define NUMBER_KERNELS(name, T) REDUCE_KERNELS(name, T) EXTREME_KERNEL(name, T)

NUMBER_KERNELS(f32, float)
NUMBER_KERNELS(f64, double)
NUMBER_KERNELS(f16, f16)
NUMBER_KERNELS(bf16, bf16)
NUMBER_KERNELS(i8, int8_t)
NUMBER_KERNELS(u8, uint8_t)
NUMBER_KERNELS(i16, int16_t)
NUMBER_KERNELS(i32, int32_t)
NUMBER_KERNELS(i64, int64_t)
NUMBER_KERNELS(u32, uint32_t)
NUMBER_KERNELS(u64, uint64_t)
NUMBER_KERNELS(bool, truth)
REDUCE_KERNELS(complex64, c64)
REDUCE_KERNELS(complex128, c128)
SUM_KERNEL(f32, float)
SUM_KERNEL(f64, double)
SUM_KERNEL(f16, f16)
SUM_KERNEL(bf16, bf16)
