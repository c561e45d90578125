/* Kernels of operations on two operands. Floats have a kernel for each operation; the other dtypes, and questions, whose
 * result is bool, have one, which chooses by group. */
#include "cuda/each_element.h"

#include <tandem/kernels.h>

/* ---- Floats ------------------------------------------------------------------------------------------------------ */

/* binary.c has the same list. */
#define EACH_OPERATION(F)                                                                          \
    F(add, p + q)                                                                                  \
    F(sub, p - q)                                                                                  \
    F(mul, p *q)                                                                                   \
    F(div, p / q)                                                                                  \
    F(maximum, p != p ? p : p > q ? p : q)                                                         \
    F(minimum, p != p ? p : p < q ? p : q)

#define BINARY_OF(op, T, name, expression)                                                         \
    TD_KERNEL(binary_##op##_##name, struct pair_args)                                              \
    {                                                                                              \
        map_groups<T, T, CUDA_WIDTH(sizeof(T))>(args, [](auto &out, auto &a, auto &b) {            \
            each_of(out, a, b, [](T first, T second) {                                             \
                compute<T>::type p = load(first), q = load(second);                                \
                return store<T>(expression);                                                       \
            });                                                                                    \
        });                                                                                        \
    }
#define BINARY(op, expression)                                                                     \
    BINARY_OF(op, float, f32, expression)                                                          \
    BINARY_OF(op, double, f64, expression)                                                         \
    BINARY_OF(op, f16, f16, expression)                                                            \
    BINARY_OF(op, bf16, bf16, expression)
EACH_OPERATION(BINARY)

/* With a number as the exponent, 3 and -2 are products, as on the host; binary.c has the other simple ones. */
#define POW(name, T)                                                                               \
    TD_KERNEL(binary_pow_##name, struct pair_args)                                                 \
    {                                                                                              \
        map_groups<T, T, CUDA_WIDTH(sizeof(T))>(args, [&](auto &out, auto &a, auto &b) {           \
            each_of(out, a, b, [&](T first, T second) {                                            \
                compute<T>::type p = load(first), q = load(second);                                \
                if (!args.b && q == 3)                                                             \
                    return store<T>(p * p * p);                                                    \
                if (!args.b && q == -2)                                                            \
                    return store<T>(1 / (p * p));                                                  \
                return store<T>(pow(p, q));                                                        \
            });                                                                                    \
        });                                                                                        \
    }
EACH_FLOAT(POW)

/* ---- f32 with halves, of which a is f32; `op`: the halves come first ------------------------------------------------ */

#define MIXED_OF(op, name, H, expression)                                                          \
    TD_KERNEL(mixed_##op##_##name, struct pair_args)                                               \
    {                                                                                              \
        for_each_group<CUDA_WIDTH(sizeof(float)), 3>(args.each, [&](auto n, const int64_t(&at)[3]) { \
            float a[n.value], out[n.value];                                                        \
            H b[n.value];                                                                          \
            read_group(a, args.a, at[1], args.each.repeated & 2);                                  \
            read_group(b, args.b, at[2], args.each.repeated & 4);                                  \
            for (int k = 0; k < n.value; k++) {                                                    \
                float p = a[k], q = load(b[k]);                                                    \
                out[k] = expression;                                                               \
            }                                                                                      \
            write_group(args.out, at[0], out);                                                     \
        });                                                                                        \
    }
#define MIXED(op, expression)                                                                      \
    MIXED_OF(op, f16, f16, expression)                                                             \
    MIXED_OF(op, bf16, bf16, expression)
MIXED(add, p + q)
MIXED(sub, args.op ? q - p : p - q)
MIXED(mul, p *q)

/* ---- Integers: sums and products wrap around ------------------------------------------------------------------------ */

template <typename T> struct has_sign {
    static constexpr bool value = (T)-1 < (T)1;
};

/* 0 for a division by 0. The minimum over -1 is itself, as negation wraps around. */
template <typename T> __device__ inline T quotient(T p, T q)
{
    typedef typename wrapping<T>::type U;
    if (q == 0)
        return 0;
    if (has_sign<T>::value && q == (T)-1)
        return (T)(0 - (U)p);
    return (T)(p / q);
}

/* With a negative exponent 1 and -1 give 1 or -1, all others, also 0, give 0. */
template <typename T> __device__ inline T power(T base, T exponent)
{
    if (has_sign<T>::value && exponent < (T)1 && exponent != 0)
        return base == 1 || base == (T)-1 ? (exponent & 1 ? base : (T)1) : (T)0;
    uint64_t result = 1, factor = (uint64_t)base;
    for (uint64_t rest = (uint64_t)exponent; rest; rest >>= 1, factor *= factor)
        if (rest & 1)
            result *= factor;
    return (T)result;
}

#define EACH(expression) each_of(out, a, b, [](T p, T q) { return (T)(expression); })

template <typename T> __device__ void binary_integer(const pair_args &args)
{
    typedef typename wrapping<T>::type U;
    map_groups<T, T, CUDA_INTEGER_WIDTH(sizeof(T))>(args, [&](auto &out, auto &a, auto &b) {
        switch (args.op) {
        case TD_BINARY_ADD:
            EACH((U)p + (U)q);
            break;
        case TD_BINARY_SUB:
            EACH((U)p - (U)q);
            break;
        case TD_BINARY_MUL:
            EACH((U)p * (U)q);
            break;
        case TD_BINARY_DIV:
            EACH(quotient(p, q));
            break;
        case TD_BINARY_POW:
            EACH(power(p, q));
            break;
        case TD_BINARY_MAXIMUM:
            EACH(p > q ? p : q);
            break;
        default:
            EACH(p < q ? p : q);
        }
    });
}

#define INTEGER(name, T)                                                                           \
    TD_KERNEL(binary_##name, struct pair_args)                                                     \
    {                                                                                              \
        binary_integer<T>(args);                                                                   \
    }
EACH_INTEGER(INTEGER)

TD_KERNEL(binary_bool, struct pair_args)
{
    bool either = args.op == TD_BINARY_ADD || args.op == TD_BINARY_MAXIMUM;
    map_groups<uint8_t, uint8_t, CUDA_WIDTH(1)>(args, [&](auto &out, auto &a, auto &b) {
        each_of(out, a, b, [&](uint8_t p, uint8_t q) {
            return (uint8_t)(either ? p != 0 || q != 0 : p != 0 && q != 0);
        });
    });
}

/* ---- Complex numbers ------------------------------------------------------------------------------------------------- */

/* Scaled by the larger part of the divisor, so that no intermediate overflows. */
template <typename T> __device__ inline complex_of<T> over(complex_of<T> p, complex_of<T> q)
{
    T re = q.re < 0 ? -q.re : q.re, im = q.im < 0 ? -q.im : q.im;
    bool swapped = re < im;
    T large = swapped ? q.im : q.re, small = swapped ? q.re : q.im;
    T ratio = large == 0 ? 0 : small / large;
    T scale = 1 / (large + small * ratio);
    if (swapped)
        return {(p.re * ratio + p.im) * scale, (p.im * ratio - p.re) * scale};
    return {(p.re + p.im * ratio) * scale, (p.im - p.re * ratio) * scale};
}

template <typename C> __device__ void binary_complex(const pair_args &args)
{
    typedef C T;
    map_groups<T, T, CUDA_WIDTH(sizeof(T))>(args, [&](auto &out, auto &a, auto &b) {
        switch (args.op) {
        case TD_BINARY_ADD:
            EACH((T{p.re + q.re, p.im + q.im}));
            break;
        case TD_BINARY_SUB:
            EACH((T{p.re - q.re, p.im - q.im}));
            break;
        case TD_BINARY_MUL:
            EACH((T{p.re * q.re - p.im * q.im, p.re * q.im + p.im * q.re}));
            break;
        default:
            EACH(over(p, q));
        }
    });
}

#define COMPLEX(name, T)                                                                           \
    TD_KERNEL(binary_##name, struct pair_args)                                                     \
    {                                                                                              \
        binary_complex<T>(args);                                                                   \
    }
EACH_COMPLEX(COMPLEX)

/* ---- Questions ------------------------------------------------------------------------------------------------------- */

template <typename T> __device__ inline bool is_true(T v)
{
    return v != 0;
}
template <typename T> __device__ inline bool is_true(complex_of<T> v)
{
    return v.re != 0 || v.im != 0;
}

template <typename T> __device__ inline bool are_equal(T p, T q)
{
    return p == q;
}
template <typename T> __device__ inline bool are_equal(complex_of<T> p, complex_of<T> q)
{
    return p.re == q.re && p.im == q.im;
}

/* Complex numbers have no order, and are never asked for it. */
template <typename T> __device__ inline bool is_less(T p, T q, bool or_equal)
{
    return or_equal ? p <= q : p < q;
}
template <typename T> __device__ inline bool is_less(complex_of<T>, complex_of<T>, bool)
{
    return false;
}

template <typename T> __device__ inline bool answer(int op, T p, T q)
{
    switch (op) {
    case TD_BINARY_EQ:
        return are_equal(p, q);
    case TD_BINARY_NE:
        return !are_equal(p, q);
    case TD_BINARY_LT:
    case TD_BINARY_LE:
        return is_less(p, q, op == TD_BINARY_LE);
    case TD_BINARY_GT:
    case TD_BINARY_GE:
        return is_less(q, p, op == TD_BINARY_GE);
    case TD_BINARY_AND:
        return is_true(p) && is_true(q);
    case TD_BINARY_OR:
        return is_true(p) || is_true(q);
    default:
        return is_true(p) != is_true(q);
    }
}

/* What is compared: halves as f32, and bools as 0 or 1. */
template <typename T> __device__ inline typename compute<T>::type compared(T x)
{
    return load(x);
}
__device__ inline uint8_t compared(truth x)
{
    return x.byte != 0;
}

#define QUESTION(name, T)                                                                          \
    TD_KERNEL(compare_##name, struct pair_args)                                                    \
    {                                                                                              \
        map_groups<uint8_t, T, CUDA_WIDTH(sizeof(T))>(args, [&](auto &out, auto &a, auto &b) {     \
            each_of(out, a, b,                                                                     \
                    [&](T p, T q) { return (uint8_t)answer(args.op, compared(p), compared(q)); }); \
        });                                                                                        \
    }
EACH_DTYPE(QUESTION)
