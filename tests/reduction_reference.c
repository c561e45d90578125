/* The scalar reference of reductions; see reduction_reference.h. */
#include "reduction_reference.h"

#include <math.h>

/* ---- Halves, by the book --------------------------------------------------------------------- */

/* The nearest whole number, of two the even one: the additions round. */
static double to_even(double value)
{
    return value + 0x1p52 - 0x1p52;
}

float reference_from_f16(uint16_t half)
{
    int exponent = half >> 10 & 31, fraction = half & 1023;
    if (exponent == 31 && fraction)
        return of_bits((uint32_t)(half & 0x8000) << 16 | 0x7fc00000 | (uint32_t)fraction << 13);
    double magnitude = exponent == 31  ? INFINITY
                       : exponent == 0 ? ldexp(fraction, -24)
                                       : ldexp(1024 + fraction, exponent - 25);
    return (float)(half & 0x8000 ? -magnitude : magnitude);
}

uint16_t reference_to_f16(float value)
{
    uint16_t sign = signbit(value) ? 0x8000 : 0;
    double magnitude = fabs((double)value);
    if (isnan(value))
        return sign | 0x7e00 | (bits_of(value) >> 13 & 0x1ff);
    if (magnitude >= 65520)
        return sign | 0x7c00;
    if (magnitude < ldexp(1, -14))
        return sign | (uint16_t)to_even(ldexp(magnitude, 24));
    int exponent;
    frexp(magnitude, &exponent); /* magnitude is in [2^(exponent-1), 2^exponent) */
    int fraction = (int)to_even(ldexp(magnitude, 11 - exponent)); /* 1024 … 2048 */
    return sign | (uint16_t)(((exponent + 13) << 10) + fraction);
}

float reference_from_bf16(uint16_t half)
{
    return of_bits((uint32_t)half << 16);
}

uint16_t reference_to_bf16(float value)
{
    uint16_t down = (uint16_t)(bits_of(value) >> 16);
    if (isnan(value))
        return down | 0x40;
    if (isinf(value))
        return down;
    uint16_t up = down + 1; /* away from zero; infinity stands where the next power would */
    double low = fabs((double)of_bits((uint32_t)down << 16)), at = fabs((double)value);
    double high = (up & 0x7fff) == 0x7f80 ? ldexp(1, 128)
                                          : fabs((double)of_bits((uint32_t)up << 16));
    if (at - low != high - at)
        return at - low < high - at ? down : up;
    return down & 1 ? up : down;
}

/* ---- Accumulators ---------------------------------------------------------------------------- */

/* An accumulator of any type. */
union cell {
    float f32[2];
    double f64[2];
    uint16_t half;
    uint64_t integer; /* sign-extended where the dtype has a sign */
};

#define REFERENCE_REAL(name, real)                                                                 \
    static real name(td_reduce_op op, real a, real b)                                              \
    {                                                                                              \
        real result;                                                                               \
        switch (op) {                                                                              \
        case TD_PRODUCT:                                                                           \
            result = a * b;                                                                        \
            break;                                                                                 \
        case TD_MIN:                                                                               \
            result = a < b || (a == b && signbit(a)) ? a : b;                                      \
            break;                                                                                 \
        case TD_MAX:                                                                               \
            result = a > b || (a == b && !signbit(a)) ? a : b;                                     \
            break;                                                                                 \
        default:                                                                                   \
            result = a + b;                                                                        \
        }                                                                                          \
        return isnan(a) || isnan(b) || isnan(result) ? (real)NAN : result;                         \
    }

REFERENCE_REAL(reference_f32, float)
REFERENCE_REAL(reference_f64, double)

static bool is_unsigned(td_dtype dtype)
{
    return dtype == TD_U8 || dtype == TD_U32 || dtype == TD_U64;
}

/* The low bytes of `value` as a number of `dtype`. */
static uint64_t wrapped(td_dtype dtype, uint64_t value)
{
    int shift = 64 - 8 * (int)td_dtype_size(dtype);
    return is_unsigned(dtype) ? value << shift >> shift
                              : (uint64_t)((int64_t)(value << shift) >> shift);
}

static uint64_t reference_integer(td_dtype dtype, td_reduce_op op, uint64_t a, uint64_t b)
{
    bool less = is_unsigned(dtype) ? a < b : (int64_t)a < (int64_t)b;
    switch (op) {
    case TD_PRODUCT:
        return wrapped(dtype, a * b);
    case TD_MIN:
        return less ? a : b;
    case TD_MAX:
        return less ? b : a;
    case TD_BAND:
        return a & b;
    case TD_BOR:
        return a | b;
    case TD_BXOR:
        return a ^ b;
    default:
        return wrapped(dtype, a + b);
    }
}

static uint64_t reference_bool(td_reduce_op op, uint64_t a, uint64_t b)
{
    if (op == TD_BXOR)
        return a != b;
    return op == TD_SUM || op == TD_MAX || op == TD_BOR ? a || b : a && b;
}

static uint16_t reference_half(td_dtype dtype, td_reduce_op op, uint16_t a, uint16_t b)
{
    bool f16 = dtype == TD_F16;
    float result = f16 ? reference_f32(op, reference_from_f16(a), reference_from_f16(b))
                       : reference_f32(op, reference_from_bf16(a), reference_from_bf16(b));
    return f16 ? reference_to_f16(result) : reference_to_bf16(result);
}

static union cell reference_combine(const struct td__reduction *r, union cell a, union cell b)
{
    td_reduce_op op = r->op;
    switch (r->dtype) {
    case TD_F16:
    case TD_BF16:
        if (op == TD_MIN || op == TD_MAX)
            return (union cell){.half = reference_half(r->dtype, op, a.half, b.half)};
        return (union cell){.f32 = {reference_f32(op, a.f32[0], b.f32[0])}};
    case TD_F32:
        return (union cell){.f32 = {reference_f32(op, a.f32[0], b.f32[0])}};
    case TD_F64:
        return (union cell){.f64 = {reference_f64(op, a.f64[0], b.f64[0])}};
    case TD_COMPLEX64:
        if (op != TD_PRODUCT)
            return (union cell){.f32 = {reference_f32(op, a.f32[0], b.f32[0]),
                                        reference_f32(op, a.f32[1], b.f32[1])}};
        return (union cell){
            .f32 = {reference_f32(TD_SUM, a.f32[0] * b.f32[0], -(a.f32[1] * b.f32[1])),
                    reference_f32(TD_SUM, a.f32[0] * b.f32[1], a.f32[1] * b.f32[0])}};
    case TD_COMPLEX128:
        if (op != TD_PRODUCT)
            return (union cell){.f64 = {reference_f64(op, a.f64[0], b.f64[0]),
                                        reference_f64(op, a.f64[1], b.f64[1])}};
        return (union cell){
            .f64 = {reference_f64(TD_SUM, a.f64[0] * b.f64[0], -(a.f64[1] * b.f64[1])),
                    reference_f64(TD_SUM, a.f64[0] * b.f64[1], a.f64[1] * b.f64[0])}};
    case TD_BOOL:
        return (union cell){.integer = reference_bool(op, a.integer, b.integer)};
    default:
        return (union cell){.integer = reference_integer(r->dtype, op, a.integer, b.integer)};
    }
}

static bool is_widened(const struct td__reduction *r)
{
    return (r->dtype == TD_F16 || r->dtype == TD_BF16) && r->op != TD_MIN && r->op != TD_MAX;
}

static bool is_double(td_dtype dtype)
{
    return dtype == TD_F64 || dtype == TD_COMPLEX128;
}

static union cell reference_load(const struct td__reduction *r, const void *element)
{
    union cell cell = {.integer = 0};
    memcpy(&cell, element, td_dtype_size(r->dtype));
    if (is_widened(r)) {
        uint16_t half = cell.half;
        cell.f32[0] = r->dtype == TD_F16 ? reference_from_f16(half) : reference_from_bf16(half);
    } else if (r->dtype == TD_BOOL) {
        cell.integer = cell.integer != 0;
    } else if (r->dtype >= TD_I8 && r->dtype <= TD_U64) {
        cell.integer = wrapped(r->dtype, cell.integer);
    }
    for (int i = 0; r->op == TD_PREMUL_SUM && i < 2; i++) {
        if (is_double(r->dtype))
            cell.f64[i] = reference_f64(TD_PRODUCT, cell.f64[i], r->factor);
        else
            cell.f32[i] = reference_f32(TD_PRODUCT, cell.f32[i], (float)r->factor);
    }
    return cell;
}

static void reference_store(const struct td__reduction *r, void *element, union cell cell, int size)
{
    for (int i = 0; r->op == TD_AVG && i < 2; i++) {
        if (is_double(r->dtype))
            cell.f64[i] = isnan(cell.f64[i]) ? (double)NAN : cell.f64[i] / size;
        else
            cell.f32[i] = isnan(cell.f32[i]) ? NAN : cell.f32[i] / (float)size;
    }
    if (is_widened(r)) {
        float value = cell.f32[0];
        cell.half = r->dtype == TD_F16 ? reference_to_f16(value) : reference_to_bf16(value);
    }
    memcpy(element, &cell, td_dtype_size(r->dtype));
}

int reference_left(int n)
{
    int left = 1;
    while (2 * left < n)
        left *= 2;
    return left;
}

/* The value of the tree's node over `n` cells. */
static union cell reference_tree(const struct td__reduction *r, const union cell *cells, int n)
{
    if (n == 1)
        return cells[0];
    int left = reference_left(n);
    return reference_combine(r, reference_tree(r, cells, left),
                             reference_tree(r, cells + left, n - left));
}

void reference_reduce(const struct td__reduction *r, const void *const *elements, int n,
                      void *result)
{
    union cell cells[64];
    for (int i = 0; i < n; i++)
        cells[i] = reference_load(r, elements[i]);
    reference_store(r, result, reference_tree(r, cells, n), n);
}
