/* The inner loops of reductions, in plain C that compilers vectorise. Each source file that includes this is
 * compiled for one instruction set, and names it with KERNELS_NAME and KERNELS_SYMBOL.
 *
 * All give the same bits: additions are not reordered, a multiplication and an addition are not fused
 * (-ffp-contract=off), and what IEEE 754 leaves open is defined here: the sign of min(0, -0), and which NaN an
 * operation returns. Processors return the first operand's, and compilers choose which operand is first. */
#include "reduce/reduce_kernels.h"

#include "base/half.h"

#include <math.h>

#if defined(__F16C__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

/* A loop over whole cache lines, so that its vectors have no remainder. Its iterations are independent: `out`
 * below is one of the sources, or does not overlap them. */
#if defined(__clang__)
#define EACH _Pragma("clang loop vectorize(assume_safety)") for (size_t i = 0; i < whole; i++)
#else
#define EACH _Pragma("GCC ivdep") for (size_t i = 0; i < whole; i++)
#endif

/* Defines td__fold_fn `name` on elements of `type`: get(x) converts an element to a value, op(x, y) combines
 * two values, and put(x) converts the result to an element. */
#define FOLD(name, type, get, op, put)                                                             \
    static void name(void *to, void *const *from, int n, size_t bytes)                             \
    {                                                                                              \
        const size_t count = bytes / sizeof(type), whole = count & -(64 / sizeof(type));           \
        type *out = to, *a = from[0], *b = from[1], *c = NULL, *d = NULL;                          \
        type *e = NULL, *f = NULL, *g = NULL, *h = NULL;                                           \
        if (n == 2) {                                                                              \
            if (out)                                                                               \
                EACH out[i] = put(TWO(get, op));                                                   \
            else                                                                                   \
                EACH a[i] = b[i] = put(TWO(get, op));                                              \
        } else if (n == 4) {                                                                       \
            c = from[2], d = from[3];                                                              \
            if (out)                                                                               \
                EACH out[i] = put(FOUR(get, op));                                                  \
            else                                                                                   \
                EACH a[i] = b[i] = c[i] = d[i] = put(FOUR(get, op));                               \
        } else {                                                                                   \
            c = from[2], d = from[3], e = from[4], f = from[5], g = from[6], h = from[7];          \
            if (out)                                                                               \
                EACH out[i] = put(EIGHT(get, op));                                                 \
            else                                                                                   \
                EACH a[i] = b[i] = c[i] = d[i] = e[i] = f[i] = g[i] = h[i] = put(EIGHT(get, op));  \
        }                                                                                          \
        for (size_t i = whole; i < count; i++) {                                                   \
            type element = put(n == 2 ? TWO(get, op) : n == 4 ? FOUR(get, op) : EIGHT(get, op));   \
            if (out)                                                                               \
                out[i] = element;                                                                  \
            for (int k = 0; !out && k < n; k++)                                                    \
                ((type *)from[k])[i] = element;                                                    \
        }                                                                                          \
    }

#define PAIR(get, op, x, y) op(get((x)[i]), get((y)[i]))
#define TWO(get, op) PAIR(get, op, a, b)
#define FOUR(get, op) op(TWO(get, op), PAIR(get, op, c, d))
#define EIGHT(get, op) op(FOUR(get, op), op(PAIR(get, op, e, f), PAIR(get, op, g, h)))
#define AS_IS(value) (value)

/* Defines the operation `name` on a and b. */
#define OPERATION(name, type, result)                                                              \
    INLINE type name(type a, type b)                                                               \
    {                                                                                              \
        return (type)(result);                                                                     \
    }

/* ---- f32, f64 --------------------------------------------------------------------------------
 *
 * A NaN propagates to the final result: it is enough to canonicalise that one, to the NaN without sign or
 * payload.
 *
 * least() and greatest() use masks. least() is the OR of the operands that are not greater than the other: one
 * of two different numbers; 0 | -0, which is -0; both if one is NaN, which is NaN. greatest() is the AND of the
 * operands that are not less: 0 & -0 is 0; if one is NaN neither counts, and all bits are set: NaN. */

#define FLOATING(prefix, real, word, bits_of, of_bits)                                             \
    INLINE real prefix##_quiet(real value)                                                         \
    {                                                                                              \
        return value == value ? value : (real)NAN;                                                 \
    }                                                                                              \
    OPERATION(prefix##_add, real, a + b)                                                           \
    OPERATION(prefix##_multiply, real, (a * b))                                                    \
    INLINE real prefix##_least(real a, real b)                                                     \
    {                                                                                              \
        word greater_a = -(word)(a > b), greater_b = -(word)(b > a);                               \
        return of_bits((bits_of(a) & ~greater_a) | (bits_of(b) & ~greater_b));                     \
    }                                                                                              \
    INLINE real prefix##_greatest(real a, real b)                                                  \
    {                                                                                              \
        word less_a = -(word) !(a >= b), less_b = -(word) !(b >= a);                               \
        return of_bits((bits_of(a) | less_a) & (bits_of(b) | less_b));                             \
    }                                                                                              \
    FOLD(prefix##_sum, real, AS_IS, prefix##_add, prefix##_quiet)                                  \
    FOLD(prefix##_product, real, AS_IS, prefix##_multiply, prefix##_quiet)                         \
    FOLD(prefix##_min, real, AS_IS, prefix##_least, prefix##_quiet)                                \
    FOLD(prefix##_max, real, AS_IS, prefix##_greatest, prefix##_quiet)                             \
    static void prefix##_scale(real *values, double factor, size_t count)                          \
    {                                                                                              \
        for (size_t i = 0; i < count; i++)                                                         \
            values[i] = prefix##_quiet(values[i] * (real)factor);                                  \
    }                                                                                              \
    static void prefix##_divide(real *values, int divisor, size_t count)                           \
    {                                                                                              \
        for (size_t i = 0; i < count; i++)                                                         \
            values[i] = prefix##_quiet(values[i] / (real)divisor);                                 \
    }

INLINE double f64_of_bits(uint64_t bits)
{
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE uint64_t bits_of_f64(double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

FLOATING(f32, float, uint32_t, td__bits_of_f32, td__f32_of_bits)
FLOATING(f64, double, uint64_t, bits_of_f64, f64_of_bits)

/* Averages over the n of FOLD. 1/2, 1/4 and 1/8 are exact, so the product is rounded as the quotient. */
#define F32_OVER_N(value) f32_quiet((value) * (float)(1.0 / n))
#define F64_OVER_N(value) f64_quiet((value) * (1.0 / n))

FOLD(f32_average, float, AS_IS, f32_add, F32_OVER_N)
FOLD(f64_average, double, AS_IS, f64_add, F64_OVER_N)

/* ---- Complex numbers -------------------------------------------------------------------------
 *
 * A sum is that of the parts. A product is (a + bi)(c + di) = (ac - bd) + (ad + bc)i, without the special
 * treatment of infinities of C's Annex G.
 *
 * With FMA instructions gcc 12 fuses the multiplications and additions of a vector of products in spite of
 * -ffp-contract=off. There the products are computed one by one. */
#if (defined(__FMA__) || defined(__AVX512F__)) && !defined(__clang__)
#define ROUNDED(value) __asm__("" : "+x"(value))
#else
#define ROUNDED(value) (void)(value)
#endif

#define COMPLEX(prefix, real, real_quiet)                                                          \
    struct prefix {                                                                                \
        real re, im;                                                                               \
    };                                                                                             \
    INLINE struct prefix prefix##_multiply(struct prefix a, struct prefix b)                       \
    {                                                                                              \
        real re = a.im * b.im, im = a.im * b.re;                                                   \
        ROUNDED(re);                                                                               \
        ROUNDED(im);                                                                               \
        return (struct prefix){a.re * b.re - re, a.re * b.im + im};                                \
    }                                                                                              \
    INLINE struct prefix prefix##_quiet(struct prefix a)                                           \
    {                                                                                              \
        return (struct prefix){real_quiet(a.re), real_quiet(a.im)};                                \
    }                                                                                              \
    FOLD(prefix##_product, struct prefix, AS_IS, prefix##_multiply, prefix##_quiet)

COMPLEX(complex64, float, f32_quiet)
COMPLEX(complex128, double, f64_quiet)

/* ---- Integers --------------------------------------------------------------------------------
 *
 * Sums and products wrap around, and have the same bits with and without a sign. */

#define WRAPPING(prefix, type)                                                                     \
    OPERATION(prefix##_add, type, a + b)                                                           \
    OPERATION(prefix##_multiply, type, 1u * a * b)                                                 \
    FOLD(prefix##_sum, type, AS_IS, prefix##_add, AS_IS)                                           \
    FOLD(prefix##_product, type, AS_IS, prefix##_multiply, AS_IS)

#define ORDERED(prefix, type)                                                                      \
    OPERATION(prefix##_least, type, a < b ? a : b)                                                 \
    OPERATION(prefix##_greatest, type, a > b ? a : b)                                              \
    FOLD(prefix##_min, type, AS_IS, prefix##_least, AS_IS)                                         \
    FOLD(prefix##_max, type, AS_IS, prefix##_greatest, AS_IS)

WRAPPING(u8, uint8_t)
WRAPPING(u16, uint16_t)
WRAPPING(u32, uint32_t)
WRAPPING(u64, uint64_t)

ORDERED(i8, int8_t)
ORDERED(u8, uint8_t)
ORDERED(i16, int16_t)
ORDERED(i32, int32_t)
ORDERED(i64, int64_t)
ORDERED(u32, uint32_t)
ORDERED(u64, uint64_t)

/* ---- f16, bf16 -------------------------------------------------------------------------------
 *
 * Sums and products are computed in f32. Numbers compare as their bits do as integers, once the bits below a
 * negative sign are inverted. NaN is what exceeds infinity, without the sign. */

INLINE int16_t half_order(int16_t half)
{
    return (int16_t)(half ^ (half >> 15 & 0x7fff)); /* its own inverse */
}

#define HALF(prefix, infinity, nan)                                                                \
    INLINE int16_t prefix##_quiet(int16_t value, int16_t a, int16_t b)                             \
    {                                                                                              \
        return i16_greatest(a & 0x7fff, b & 0x7fff) > (infinity) ? (nan) : value;                  \
    }                                                                                              \
    OPERATION(prefix##_least, int16_t,                                                             \
              prefix##_quiet(half_order(i16_least(half_order(a), half_order(b))), a, b))           \
    OPERATION(prefix##_greatest, int16_t,                                                          \
              prefix##_quiet(half_order(i16_greatest(half_order(a), half_order(b))), a, b))        \
    FOLD(prefix##_min, int16_t, AS_IS, prefix##_least, AS_IS)                                      \
    FOLD(prefix##_max, int16_t, AS_IS, prefix##_greatest, AS_IS)

HALF(f16, 0x7c00, 0x7e00)
HALF(bf16, 0x7f80, 0x7fc0)

/* From elements to elements, with the rounding. Not for f16: compilers do not vectorise with the processors'
 * conversions. */
INLINE uint16_t bf16_round(float value)
{
    return value == value ? td__round_to_bf16(value) : 0x7fc0;
}

FOLD(bf16_sum_elements, uint16_t, td__bf16_to_f32, f32_add, bf16_round)

/* ---- Bits, and bool -------------------------------------------------------------------------- */

OPERATION(bits_and, uint8_t, (a & b))
OPERATION(bits_or, uint8_t, a | b)
OPERATION(bits_xor, uint8_t, a ^ b)

FOLD(band, uint8_t, AS_IS, bits_and, AS_IS)
FOLD(bor, uint8_t, AS_IS, bits_or, AS_IS)
FOLD(bxor, uint8_t, AS_IS, bits_xor, AS_IS)

static void normalise_bool(uint8_t *values, size_t count)
{
    for (size_t i = 0; i < count; i++)
        values[i] = values[i] != 0;
}

/* ---- Conversions ----------------------------------------------------------------------------- */

static void f16_to_f32(float *restrict to, const uint16_t *from, size_t count)
{
    size_t i = 0;
#if defined(__AVX512F__)
    for (; i + 16 <= count; i += 16)
        _mm512_storeu_ps(to + i, _mm512_cvtph_ps(_mm256_loadu_si256((const void *)(from + i))));
#elif defined(__F16C__)
    for (; i + 8 <= count; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const void *)(from + i))));
#endif
    for (; i < count; i++)
        to[i] = td__f16_to_f32(from[i]);
}

static void f32_to_f16(uint16_t *restrict to, const float *from, size_t count)
{
    size_t i = 0;
#if defined(__AVX512F__)
    for (; i + 16 <= count; i += 16)
        _mm256_storeu_si256((void *)(to + i),
                            _mm512_cvtps_ph(_mm512_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
    for (; i + 8 <= count; i += 8)
        _mm_storeu_si128((void *)(to + i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#endif
    for (; i < count; i++)
        to[i] = td__f32_to_f16(from[i]);
}

static void bf16_to_f32(float *restrict to, const uint16_t *from, size_t count)
{
    for (size_t i = 0; i < count; i++)
        to[i] = td__bf16_to_f32(from[i]);
}

static void f32_to_bf16(uint16_t *restrict to, const float *from, size_t count)
{
    for (size_t i = 0; i < count; i++)
        to[i] = td__f32_to_bf16(from[i]);
}

/* ---- The table ------------------------------------------------------------------------------- */

#define SUMS(sum) [TD_SUM] = sum, [TD_AVG] = sum, [TD_PREMUL_SUM] = sum
#define BITS [TD_BAND] = band, [TD_BOR] = bor, [TD_BXOR] = bxor

const struct td__reduce_kernels KERNELS_SYMBOL = {
    .name = KERNELS_NAME,
    .fold =
        {
            [TD_F32] =
                {SUMS(f32_sum), [TD_PRODUCT] = f32_product, [TD_MIN] = f32_min, [TD_MAX] = f32_max},
            [TD_F64] =
                {SUMS(f64_sum), [TD_PRODUCT] = f64_product, [TD_MIN] = f64_min, [TD_MAX] = f64_max},
            [TD_F16] =
                {SUMS(f32_sum), [TD_PRODUCT] = f32_product, [TD_MIN] = f16_min, [TD_MAX] = f16_max},
            [TD_BF16] = {SUMS(f32_sum), [TD_PRODUCT] = f32_product, [TD_MIN] = bf16_min,
                         [TD_MAX] = bf16_max},
            [TD_I8] = {u8_sum, u8_product, i8_min, i8_max, BITS},
            [TD_U8] = {u8_sum, u8_product, u8_min, u8_max, BITS},
            [TD_I16] = {u16_sum, u16_product, i16_min, i16_max, BITS},
            [TD_I32] = {u32_sum, u32_product, i32_min, i32_max, BITS},
            [TD_I64] = {u64_sum, u64_product, i64_min, i64_max, BITS},
            [TD_U32] = {u32_sum, u32_product, u32_min, u32_max, BITS},
            [TD_U64] = {u64_sum, u64_product, u64_min, u64_max, BITS},
            [TD_BOOL] = {bor, band, band, bor, BITS},
            [TD_COMPLEX64] = {SUMS(f32_sum), [TD_PRODUCT] = complex64_product},
            [TD_COMPLEX128] = {SUMS(f64_sum), [TD_PRODUCT] = complex128_product},
        },
    .bf16_sum_elements = bf16_sum_elements,
    .f32_average = f32_average,
    .f64_average = f64_average,
    .f16_to_f32 = f16_to_f32,
    .f32_to_f16 = f32_to_f16,
    .bf16_to_f32 = bf16_to_f32,
    .f32_to_bf16 = f32_to_bf16,
    .scale_f32 = f32_scale,
    .scale_f64 = f64_scale,
    .divide_f32 = f32_divide,
    .divide_f64 = f64_divide,
    .normalise_bool = normalise_bool,
};
