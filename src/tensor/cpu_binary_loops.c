/* The loops of binary operations, one for each operation and type. GT and GE are LT and LE with their operands
 * exchanged by the caller.
 *
 * Addition, multiplication and other operations that do not depend on the sign use the unsigned type for both
 * kinds of integers, where they wrap around. */
#include "tensor/cpu_elementwise.h"
#include "tensor/cpu_each.h"
#include "tensor/cpu_math.h"
#include "tensor/vector.h"

#include <math.h>

/* One case of a switch: out[i], of type R, from p = a[i] and q = b[i], of type T. */
#define CASE(op, T, R, expression)                                                                 \
    case op: {                                                                                     \
        R *o = out;                                                                                \
        const T *x = a, *y = b;                                                                    \
        TD__INDEPENDENT                                                                            \
        for (int64_t i = 0; i < count; i++) {                                                      \
            T p = x[i], q = y[i];                                                                  \
            o[i] = (R)(expression);                                                                \
        }                                                                                          \
        break;                                                                                     \
    }

#define CASES_OF_TRUTH(T)                                                                          \
    CASE(TD_BINARY_EQ, T, uint8_t, p == q)                                                               \
    CASE(TD_BINARY_NE, T, uint8_t, p != q)                                                               \
    CASE(TD_BINARY_AND, T, uint8_t, (p != 0) & (q != 0))                                                 \
    CASE(TD_BINARY_OR, T, uint8_t, (p != 0) | (q != 0))                                                  \
    CASE(TD_BINARY_XOR, T, uint8_t, (p != 0) ^ (q != 0))

/* ---- Floats ------------------------------------------------------------------------------------
 *
 * The functions get their steps as constants, so that a scalar operand stays in a register. */

#define FLOAT_CASE(op, T, R, expression)                                                           \
    case op: {                                                                                     \
        R *o = out;                                                                                \
        const T *x = a, *y = b, x0 = *x, y0 = *y;                                                  \
        TD__INDEPENDENT                                                                            \
        for (int64_t i = 0; i < count; i++) {                                                      \
            T p = a_step ? x[i] : x0, q = b_step ? y[i] : y0;                                      \
            o[i] = (R)(expression);                                                                \
        }                                                                                          \
        break;                                                                                     \
    }

/* Each row by a function with constant steps. If both are 0, a row repeats one element. */
#define EACH_ROW(loop, size)                                                                       \
    do {                                                                                           \
        char *out = pairs->out;                                                                    \
        const char *a = pairs->a, *b = pairs->b;                                                   \
        int64_t count = pairs->count;                                                              \
        for (int64_t r = 0; r < pairs->rows; r++) {                                                \
            if (pairs->a_step && pairs->b_step)                                                    \
                loop(op, out, a, true, b, true, count);                                            \
            else if (pairs->a_step)                                                                \
                loop(op, out, a, true, b, false, count);                                           \
            else if (pairs->b_step)                                                                \
                loop(op, out, a, false, b, true, count);                                           \
            else                                                                                   \
                for (int64_t i = 0; i < count; i++)                                                \
                    loop(op, out + i * (size), a, false, b, false, 1);                             \
            out += pairs->out_row;                                                                 \
            a += pairs->a_row;                                                                     \
            b += pairs->b_row;                                                                     \
        }                                                                                          \
    } while (0)

/* With an exponent that is constant in the loop, compilers split off loops for the special cases, and do not
 * vectorise. */
#define POWERS(T, power)                                                                           \
    do {                                                                                           \
        T *o = (T *)(void *)pairs->out;                                                            \
        const T *p = (const T *)(const void *)pairs->a, *q = (const T *)(const void *)pairs->b;    \
        TD__INDEPENDENT                                                                            \
        for (int64_t i = 0; i < pairs->count; i++)                                                 \
            o[i] = power(p[i], q[i]);                                                              \
    } while (0)

#define FLOATS(name, T, power)                                                                     \
    TD__INLINE void loop_##name(td_binary op, void *out, const void *a, bool a_step,      \
                                const void *b, bool b_step, int64_t count)                         \
    {                                                                                              \
        switch (op) {                                                                              \
            FLOAT_CASE(TD_BINARY_ADD, T, T, p + q)                                                       \
            FLOAT_CASE(TD_BINARY_SUB, T, T, p - q)                                                       \
            FLOAT_CASE(TD_BINARY_MUL, T, T, p *q)                                                        \
            FLOAT_CASE(TD_BINARY_DIV, T, T, p / q)                                                       \
            FLOAT_CASE(TD_BINARY_MAXIMUM, T, T, p != p ? p : p > q ? p : q)                              \
            FLOAT_CASE(TD_BINARY_MINIMUM, T, T, p != p ? p : p < q ? p : q)                              \
            FLOAT_CASE(TD_BINARY_LT, T, uint8_t, p < q)                                                  \
            FLOAT_CASE(TD_BINARY_LE, T, uint8_t, p <= q)                                                 \
            FLOAT_CASE(TD_BINARY_EQ, T, uint8_t, p == q)                                                 \
            FLOAT_CASE(TD_BINARY_NE, T, uint8_t, p != q)                                                 \
            FLOAT_CASE(TD_BINARY_AND, T, uint8_t, (p != 0) & (q != 0))                                   \
            FLOAT_CASE(TD_BINARY_OR, T, uint8_t, (p != 0) | (q != 0))                                    \
            FLOAT_CASE(TD_BINARY_XOR, T, uint8_t, (p != 0) ^ (q != 0))                                   \
        default:                                                                                   \
            break;                                                                                 \
        }                                                                                          \
    }                                                                                              \
                                                                                                   \
    TD__VECTOR static void powers_##name(const struct td__pairs *pairs)                            \
    {                                                                                              \
        POWERS(T, power);                                                                          \
    }                                                                                              \
                                                                                                   \
    TD__VECTOR_256 static void rows_##name(td_binary op, const struct td__pairs *pairs)   \
    {                                                                                              \
        EACH_ROW(loop_##name, size_of_result(op, sizeof(T)));                                      \
    }                                                                                              \
                                                                                                   \
    void td__binary_##name(td_binary op, const struct td__pairs *pairs)                   \
    {                                                                                              \
        if (op == TD_BINARY_POW)                                                                         \
            powers_##name(pairs);                                                                  \
        else                                                                                       \
            rows_##name(op, pairs);                                                                \
    }

/* Comparisons give bytes. */
static int64_t size_of_result(td_binary op, size_t size)
{
    return op >= TD_BINARY_EQ && op <= TD_BINARY_XOR ? 1 : (int64_t)size;
}

FLOATS(f32, float, td__pow_f32)
FLOATS(f64, double, pow)

#define BF16_CASE(op, expression)                                                                  \
    case op:                                                                                       \
        TD__INDEPENDENT                                                                            \
        for (int64_t i = 0; i < count; i++) {                                                      \
            float p = a_step ? td__bf16_to_f32(a[i]) : a0,                                         \
                  q = b_step ? td__bf16_to_f32(b[i]) : b0;                                         \
            out[i] = td__f32_to_bf16(expression);                                                  \
        }                                                                                          \
        break;

TD__INLINE void loop_bf16(td_binary op, void *to, const void *from_a, bool a_step,
                          const void *from_b, bool b_step, int64_t count)
{
    uint16_t *out = to;
    const uint16_t *a = from_a, *b = from_b;
    float a0 = td__bf16_to_f32(*a), b0 = td__bf16_to_f32(*b);
    switch (op) {
        BF16_CASE(TD_BINARY_ADD, p + q)
        BF16_CASE(TD_BINARY_SUB, p - q)
        BF16_CASE(TD_BINARY_MUL, p * q)
        BF16_CASE(TD_BINARY_DIV, p / q)
    default:
        break;
    }
}

TD__VECTOR void td__binary_bf16(td_binary op, const struct td__pairs *pairs)
{
    EACH_ROW(loop_bf16, 2);
}

/* ---- Complex numbers ---------------------------------------------------------------------------
 *
 * The real part comes first. A division is scaled by the larger part of the divisor, so that no intermediate
 * overflows. */

#define COMPLEX(T)                                                                                 \
    struct T##_pair {                                                                              \
        T re, im;                                                                                  \
    };                                                                                             \
    static inline struct T##_pair T##_times(struct T##_pair p, struct T##_pair q)                  \
    {                                                                                              \
        return (struct T##_pair){p.re * q.re - p.im * q.im, p.re * q.im + p.im * q.re};            \
    }                                                                                              \
    static inline struct T##_pair T##_over(struct T##_pair p, struct T##_pair q)                   \
    {                                                                                              \
        T re = q.re < 0 ? -q.re : q.re, im = q.im < 0 ? -q.im : q.im;                              \
        bool swapped = re < im;                                                                    \
        T large = swapped ? q.im : q.re, small = swapped ? q.re : q.im;                            \
        T ratio = large == 0 ? 0 : small / large;                                                  \
        T scale = 1 / (large + small * ratio);                                                     \
        if (swapped)                                                                               \
            return (struct T##_pair){(p.re * ratio + p.im) * scale,                                \
                                     (p.im * ratio - p.re) * scale};                               \
        return (struct T##_pair){(p.re + p.im * ratio) * scale, (p.im - p.re * ratio) * scale};    \
    }

COMPLEX(float)
COMPLEX(double)

#define PAIR(T, first, second) ((struct T##_pair){first, second})
#define IS_TRUE(p) ((p).re != 0 || (p).im != 0)

#define CASES_OF_COMPLEX(T, P)                                                                     \
    CASE(TD_BINARY_ADD, P, P, PAIR(T, p.re + q.re, p.im + q.im))                                         \
    CASE(TD_BINARY_SUB, P, P, PAIR(T, p.re - q.re, p.im - q.im))                                         \
    CASE(TD_BINARY_MUL, P, P, T##_times(p, q))                                                           \
    CASE(TD_BINARY_DIV, P, P, T##_over(p, q))                                                            \
    CASE(TD_BINARY_EQ, P, uint8_t, p.re == q.re && p.im == q.im)                                         \
    CASE(TD_BINARY_NE, P, uint8_t, p.re != q.re || p.im != q.im)                                         \
    CASE(TD_BINARY_AND, P, uint8_t, IS_TRUE(p) && IS_TRUE(q))                                            \
    CASE(TD_BINARY_OR, P, uint8_t, IS_TRUE(p) || IS_TRUE(q))                                             \
    CASE(TD_BINARY_XOR, P, uint8_t, IS_TRUE(p) != IS_TRUE(q))

static TD__VECTOR void binary_complex64(td_binary op, void *out, const void *a,
                                        const void *b, int64_t count)
{
    switch (op) {
        CASES_OF_COMPLEX(float, struct float_pair)
    default:
        break;
    }
}

static TD__VECTOR void binary_complex128(td_binary op, void *out, const void *a,
                                         const void *b, int64_t count)
{
    switch (op) {
        CASES_OF_COMPLEX(double, struct double_pair)
    default:
        break;
    }
}

void td__binary_complex(td_binary op, td_dtype dtype, void *out, const void *a,
                        const void *b, int64_t count)
{
    if (dtype == TD_COMPLEX64)
        binary_complex64(op, out, a, b, count);
    else
        binary_complex128(op, out, a, b, count);
}

/* ---- Integers ---------------------------------------------------------------------------------- */

/* 0 for a division by 0. The minimum over -1 is itself, as negation wraps around. */
#define QUOTIENT(T, U) (q == 0 ? 0 : q == (T)-1 ? (T)(0 - (U)p) : (T)(p / q))

#define CASES_OF_ORDER(T)                                                                          \
    CASE(TD_BINARY_MAXIMUM, T, T, p > q ? p : q)                                                         \
    CASE(TD_BINARY_MINIMUM, T, T, p < q ? p : q)                                                         \
    CASE(TD_BINARY_LT, T, uint8_t, p < q)                                                                \
    CASE(TD_BINARY_LE, T, uint8_t, p <= q)

/* W is an unsigned type, in which arithmetic wraps around. */
#define UNSIGNED_LOOP(T, W)                                                                        \
    static TD__VECTOR void binary_##T(td_binary op, void *out, const void *a,             \
                                      const void *b, int64_t count)                                \
    {                                                                                              \
        switch (op) {                                                                              \
            CASE(TD_BINARY_ADD, T, T, (W)p + (W)q)                                                       \
            CASE(TD_BINARY_SUB, T, T, (W)p - (W)q)                                                       \
            CASE(TD_BINARY_MUL, T, T, (W)p *(W)q)                                                        \
            CASE(TD_BINARY_DIV, T, T, q == 0 ? 0 : p / q)                                                \
            CASES_OF_ORDER(T)                                                                      \
            CASES_OF_TRUTH(T)                                                                      \
        default:                                                                                   \
            break;                                                                                 \
        }                                                                                          \
    }

#define SIGNED_LOOP(T, U)                                                                          \
    static TD__VECTOR void binary_##T(td_binary op, void *out, const void *a,             \
                                      const void *b, int64_t count)                                \
    {                                                                                              \
        switch (op) {                                                                              \
            CASE(TD_BINARY_DIV, T, T, QUOTIENT(T, U))                                                    \
            CASES_OF_ORDER(T)                                                                      \
        default:                                                                                   \
            break;                                                                                 \
        }                                                                                          \
    }

UNSIGNED_LOOP(uint8_t, uint32_t)
UNSIGNED_LOOP(uint16_t, uint32_t)
UNSIGNED_LOOP(uint32_t, uint32_t)
UNSIGNED_LOOP(uint64_t, uint64_t)
SIGNED_LOOP(int8_t, uint32_t)
SIGNED_LOOP(int16_t, uint32_t)
SIGNED_LOOP(int32_t, uint32_t)
SIGNED_LOOP(int64_t, uint64_t)

/* Wraps around; narrower integers truncate the result. With a negative exponent 1 and -1 give 1 or -1, all
 * others, also 0, give 0. */
static uint64_t power(uint64_t base, uint64_t exponent)
{
    uint64_t result = 1;
    for (; exponent; exponent >>= 1, base *= base)
        if (exponent & 1)
            result *= base;
    return result;
}

static int64_t signed_power(int64_t base, int64_t exponent)
{
    if (exponent >= 0)
        return (int64_t)power((uint64_t)base, (uint64_t)exponent);
    return base == 1 || base == -1 ? (exponent % 2 ? base : 1) : 0;
}

#define INTEGER_POWERS(T, power)                                                                   \
    do {                                                                                           \
        T *o = out;                                                                                \
        const T *p = a, *q = b;                                                                    \
        for (int64_t i = 0; i < count; i++)                                                        \
            o[i] = (T)power(p[i], q[i]);                                                           \
    } while (0)

static void integer_powers(td_dtype dtype, void *out, const void *a, const void *b, int64_t count)
{
    switch (dtype) {
    case TD_I8:
        INTEGER_POWERS(int8_t, signed_power);
        break;
    case TD_I16:
        INTEGER_POWERS(int16_t, signed_power);
        break;
    case TD_I32:
        INTEGER_POWERS(int32_t, signed_power);
        break;
    case TD_I64:
        INTEGER_POWERS(int64_t, signed_power);
        break;
    case TD_U8:
        INTEGER_POWERS(uint8_t, power);
        break;
    case TD_U32:
        INTEGER_POWERS(uint32_t, power);
        break;
    default:
        INTEGER_POWERS(uint64_t, power);
    }
}

typedef void loop_fn(td_binary op, void *out, const void *a, const void *b, int64_t count);

static loop_fn *loop_of(td_dtype dtype, bool looks_at_sign)
{
    switch (dtype) {
    case TD_I8:
        return looks_at_sign ? binary_int8_t : binary_uint8_t;
    case TD_I16:
        return looks_at_sign ? binary_int16_t : binary_uint16_t;
    case TD_I32:
        return looks_at_sign ? binary_int32_t : binary_uint32_t;
    case TD_I64:
        return looks_at_sign ? binary_int64_t : binary_uint64_t;
    case TD_U8:
        return binary_uint8_t;
    case TD_U32:
        return binary_uint32_t;
    default:
        return binary_uint64_t;
    }
}

void td__binary_integer(td_binary op, td_dtype dtype, void *out, const void *a,
                        const void *b, int64_t count)
{
    if (op == TD_BINARY_POW) {
        integer_powers(dtype, out, a, b, count);
        return;
    }
    bool looks_at_sign = op == TD_BINARY_DIV || op == TD_BINARY_MAXIMUM || op == TD_BINARY_MINIMUM || op == TD_BINARY_LT ||
                         op == TD_BINARY_LE;
    loop_of(dtype, looks_at_sign)(op, out, a, b, count);
}

/* ---- Bool -------------------------------------------------------------------------------------- */

#define TRUE_P (p != 0)
#define TRUE_Q (q != 0)

TD__VECTOR void td__binary_bool(td_binary op, void *out, const void *a, const void *b,
                                int64_t count)
{
    switch (op) {
    case TD_BINARY_ADD:
    case TD_BINARY_MAXIMUM:
        CASE(TD_BINARY_OR, uint8_t, uint8_t, TRUE_P | TRUE_Q)
    case TD_BINARY_MUL:
    case TD_BINARY_MINIMUM:
        CASE(TD_BINARY_AND, uint8_t, uint8_t, TRUE_P & TRUE_Q)
    case TD_BINARY_NE:
        CASE(TD_BINARY_XOR, uint8_t, uint8_t, TRUE_P ^ TRUE_Q)
        CASE(TD_BINARY_EQ, uint8_t, uint8_t, TRUE_P == TRUE_Q)
        CASE(TD_BINARY_LT, uint8_t, uint8_t, TRUE_P < TRUE_Q)
        CASE(TD_BINARY_LE, uint8_t, uint8_t, TRUE_P <= TRUE_Q)
    default:
        break;
    }
}
