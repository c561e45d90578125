/* Operations on one operand.
 *
 * The functions of f32 are polynomials of cpu_math.h, which are vectorised; those of f64 are the C
 * library's. The halves are computed in f32. */
#include "tensor/cpu_elementwise.h"

#include "base/fail.h"
#include "tensor/cpu_each.h"
#include "tensor/cpu_math.h"
#include "tensor/vector.h"

#include <math.h>
#include <string.h>

#define BLOCK 256

const char *const td__unary_names[] = {
    [TD_UNARY_NEG] = "neg",         [TD_UNARY_ABS] = "abs",
    [TD_UNARY_SIGN] = "sign",       [TD_UNARY_SQUARE] = "square",
    [TD_UNARY_EXP] = "exp",         [TD_UNARY_LOG] = "log",
    [TD_UNARY_LOG1P] = "log1p",     [TD_UNARY_SQRT] = "sqrt",
    [TD_UNARY_RSQRT] = "rsqrt",     [TD_UNARY_RECIPROCAL] = "reciprocal",
    [TD_UNARY_SIN] = "sin",         [TD_UNARY_COS] = "cos",
    [TD_UNARY_TANH] = "tanh",       [TD_UNARY_SIGMOID] = "sigmoid",
    [TD_UNARY_RELU] = "relu",       [TD_UNARY_GELU] = "gelu",
    [TD_UNARY_GELU_TANH] = "gelu",  [TD_UNARY_SILU] = "silu",
    [TD_UNARY_FLOOR] = "floor",     [TD_UNARY_CEIL] = "ceil",
    [TD_UNARY_ROUND] = "round",     [TD_UNARY_ERF] = "erf",
    [TD_UNARY_NOT] = "logical_not", [TD_UNARY_ISNAN] = "isnan",
};

static bool has_unary(td_unary op, td_dtype dtype)
{
    bool is_complex = dtype >= TD_COMPLEX64;
    switch (op) {
    case TD_UNARY_NEG:
    case TD_UNARY_SQUARE:
        return dtype != TD_BOOL;
    case TD_UNARY_ABS:
    case TD_UNARY_SIGN:
    case TD_UNARY_RELU:
        return dtype != TD_BOOL && !is_complex;
    case TD_UNARY_NOT:
    case TD_UNARY_ISNAN:
        return true;
    default:
        return dtype <= TD_BF16;
    }
}

/* One case of a switch: out[i], of type R, from v = x[i], of type T. */
#define CASE(op, T, R, expression)                                                                 \
    case op: {                                                                                     \
        R *o = out;                                                                                \
        const T *a = x;                                                                            \
        TD__INDEPENDENT                                                                            \
        for (int64_t i = 0; i < count; i++) {                                                      \
            T v = a[i];                                                                            \
            o[i] = (R)(expression);                                                                \
        }                                                                                          \
        break;                                                                                     \
    }

/* ---- Floats ------------------------------------------------------------------------------------ */

#define CASES_OF_ARITHMETIC(T)                                                                     \
    CASE(TD_UNARY_NEG, T, T, -v)                                                                        \
    CASE(TD_UNARY_SIGN, T, T, (T)(v > 0) - (T)(v < 0))                                                  \
    CASE(TD_UNARY_SQUARE, T, T, v *v)                                                                   \
    CASE(TD_UNARY_RECIPROCAL, T, T, 1 / v)                                                              \
    CASE(TD_UNARY_RELU, T, T, v < 0 ? 0 : v)                                                            \
    CASE(TD_UNARY_NOT, T, uint8_t, v == 0)                                                              \
    CASE(TD_UNARY_ISNAN, T, uint8_t, v != v)

/* Numbers beyond TD__SIN_LIMIT are rare: the C library recomputes them. */
static void sin_far(float *out, const float *x, int64_t count, uint32_t quarters)
{
    for (int64_t i = 0; i < count; i++)
        if (!(fabsf(x[i]) <= TD__SIN_LIMIT))
            out[i] = quarters ? cosf(x[i]) : sinf(x[i]);
}

TD__VECTOR void td__sin_quarters_array(float *out, const float *x, int64_t count, uint32_t quarters)
{
    for (int64_t at = 0; at < count; at += BLOCK) {
        float result[BLOCK];
        int64_t n = count - at < BLOCK ? count - at : BLOCK;
        int far = 0;
        for (int64_t i = 0; i < n; i++) {
            result[i] = td__sin_quarters_f32(x[at + i], quarters);
            far |= !(fabsf(x[at + i]) <= TD__SIN_LIMIT);
        }
        if (far)
            sin_far(result, x + at, n, quarters);
        memcpy(out + at, result, (size_t)n * sizeof *out);
    }
}

static TD__VECTOR void unary_f32(td_unary op, void *out, const void *x, int64_t count)
{
    switch (op) {
        CASES_OF_ARITHMETIC(float)
        CASE(TD_UNARY_ABS, float, float, fabsf(v))
        CASE(TD_UNARY_SQRT, float, float, sqrtf(v))
        CASE(TD_UNARY_RSQRT, float, float, 1 / sqrtf(v))
        CASE(TD_UNARY_EXP, float, float, td__exp_f32(v))
        CASE(TD_UNARY_LOG, float, float, td__log_f32(v))
        CASE(TD_UNARY_LOG1P, float, float, td__log1p_f32(v))
    case TD_UNARY_SIN:
        td__sin_quarters_array(out, x, count, 0);
        break;
    case TD_UNARY_COS:
        td__sin_quarters_array(out, x, count, 1);
        break;
        CASE(TD_UNARY_TANH, float, float, td__tanh_f32(v))
        CASE(TD_UNARY_SIGMOID, float, float, td__sigmoid_f32(v))
        CASE(TD_UNARY_GELU, float, float, td__gelu_f32(v))
        CASE(TD_UNARY_GELU_TANH, float, float, td__gelu_tanh_f32(v))
        CASE(TD_UNARY_SILU, float, float, td__silu_f32(v))
        CASE(TD_UNARY_ERF, float, float, td__erf_f32(v))
        CASE(TD_UNARY_FLOOR, float, float, floorf(v))
        CASE(TD_UNARY_CEIL, float, float, ceilf(v))
        CASE(TD_UNARY_ROUND, float, float, rintf(v))
    }
}

static TD__VECTOR void unary_f64(td_unary op, void *out, const void *x, int64_t count)
{
    switch (op) {
        CASES_OF_ARITHMETIC(double)
        CASE(TD_UNARY_ABS, double, double, fabs(v))
        CASE(TD_UNARY_SQRT, double, double, sqrt(v))
        CASE(TD_UNARY_RSQRT, double, double, 1 / sqrt(v))
        CASE(TD_UNARY_EXP, double, double, exp(v))
        CASE(TD_UNARY_LOG, double, double, log(v))
        CASE(TD_UNARY_LOG1P, double, double, log1p(v))
        CASE(TD_UNARY_SIN, double, double, sin(v))
        CASE(TD_UNARY_COS, double, double, cos(v))
        CASE(TD_UNARY_TANH, double, double, tanh(v))
        CASE(TD_UNARY_SIGMOID, double, double, td__sigmoid_f64(v))
        CASE(TD_UNARY_GELU, double, double, td__gelu_f64(v))
        CASE(TD_UNARY_GELU_TANH, double, double, td__gelu_tanh_f64(v))
        CASE(TD_UNARY_SILU, double, double, td__silu_f64(v))
        CASE(TD_UNARY_ERF, double, double, erf(v))
        CASE(TD_UNARY_FLOOR, double, double, floor(v))
        CASE(TD_UNARY_CEIL, double, double, ceil(v))
        CASE(TD_UNARY_ROUND, double, double, rint(v))
    }
}

/* ---- Integers, bool and complex numbers -------------------------------------------------------- */

/* U is the unsigned type in which a sum and a product wrap around; `negative` says whether v is. */
#define INTEGER_LOOP(T, U, negative)                                                               \
    static TD__VECTOR void unary_##T(td_unary op, void *out, const void *x,               \
                                     int64_t count)                                                \
    {                                                                                              \
        switch (op) {                                                                              \
            CASE(TD_UNARY_NEG, T, T, 0 - (U)v)                                                          \
            CASE(TD_UNARY_ABS, T, T, negative ? (T)(0 - (U)v) : v)                                      \
            CASE(TD_UNARY_SIGN, T, T, (v != 0) - 2 * negative)                                          \
            CASE(TD_UNARY_SQUARE, T, T, (U)v *(U)v)                                                     \
            CASE(TD_UNARY_RELU, T, T, negative ? 0 : v)                                                 \
            CASE(TD_UNARY_NOT, T, uint8_t, v == 0)                                                      \
            CASE(TD_UNARY_ISNAN, T, uint8_t, v != v)                                                    \
        default:                                                                                   \
            break;                                                                                 \
        }                                                                                          \
    }

INTEGER_LOOP(int8_t, uint32_t, (v < 0))
INTEGER_LOOP(int16_t, uint32_t, (v < 0))
INTEGER_LOOP(int32_t, uint32_t, (v < 0))
INTEGER_LOOP(int64_t, uint64_t, (v < 0))
INTEGER_LOOP(uint8_t, uint32_t, false)
INTEGER_LOOP(uint32_t, uint32_t, false)
INTEGER_LOOP(uint64_t, uint64_t, false)

#define COMPLEX_LOOP(T, name)                                                                      \
    static void name(td_unary op, void *out, const void *x, int64_t count)                \
    {                                                                                              \
        const T *a = x;                                                                            \
        T *o = out;                                                                                \
        uint8_t *truth = out;                                                                      \
        for (int64_t i = 0; i < count; i++) {                                                      \
            T re = a[2 * i], im = a[2 * i + 1];                                                    \
            if (op == TD_UNARY_NOT) {                                                                   \
                truth[i] = re == 0 && im == 0;                                                     \
            } else if (op == TD_UNARY_ISNAN) {                                                          \
                truth[i] = re != re || im != im;                                                   \
            } else {                                                                               \
                o[2 * i] = op == TD_UNARY_NEG ? -re : re * re - im * im;                                \
                o[2 * i + 1] = op == TD_UNARY_NEG ? -im : 2 * re * im;                                  \
            }                                                                                      \
        }                                                                                          \
    }

COMPLEX_LOOP(float, unary_complex64)
COMPLEX_LOOP(double, unary_complex128)

/* ---- The kernel -------------------------------------------------------------------------------- */

struct unary {
    td_unary op;
    void (*loop)(td_unary op, void *out, const void *x, int64_t count);
};

static void run_unary(void *const arrays[], int64_t count, const void *arg)
{
    const struct unary *unary = arg;
    unary->loop(unary->op, arrays[0], arrays[1], count);
}

td_status td__cpu_unary(td_unary op, td_tensor *out, const td_tensor *x)
{
    td_dtype dtype = x->layout.dtype;
    if (!has_unary(op, dtype))
        return td_fail(TD_ERR_UNSUPPORTED, "%s: not supported for %s", td__unary_names[op],
                       td_dtype_name(dtype));
    struct unary unary = {.op = op};
    switch (td__compute_dtype(dtype)) {
    case TD_F64:
        unary.loop = unary_f64;
        break;
    case TD_I8:
        unary.loop = unary_int8_t;
        break;
    case TD_U8:
    case TD_BOOL:
        unary.loop = unary_uint8_t;
        break;
    case TD_I16:
        unary.loop = unary_int16_t;
        break;
    case TD_I32:
        unary.loop = unary_int32_t;
        break;
    case TD_I64:
        unary.loop = unary_int64_t;
        break;
    case TD_U32:
        unary.loop = unary_uint32_t;
        break;
    case TD_U64:
        unary.loop = unary_uint64_t;
        break;
    case TD_COMPLEX64:
        unary.loop = unary_complex64;
        break;
    case TD_COMPLEX128:
        unary.loop = unary_complex128;
        break;
    default:
        unary.loop = unary_f32;
    }
    td__each_tensors(out, x, NULL, NULL, run_unary, &unary);
    return TD_OK;
}
