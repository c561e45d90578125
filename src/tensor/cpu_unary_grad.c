/* The gradients of the operations on one operand: the incoming gradient g times the derivative, from the saved
 * tensor s, the operand or the result. */
#include "tensor/cpu_elementwise.h"

#include "base/fail.h"
#include "tensor/cpu_each.h"
#include "tensor/cpu_math.h"
#include "tensor/vector.h"

#include <math.h>

#define BLOCK 256

/* One case of a switch: out[i] from g = grad[i] and s = saved[i], of type T. */
#define CASE(op, T, expression)                                                                    \
    case op: {                                                                                     \
        T *o = out;                                                                                \
        const T *x = grad, *y = saved;                                                             \
        TD__INDEPENDENT                                                                            \
        for (int64_t i = 0; i < count; i++) {                                                      \
            T g = x[i], s = y[i];                                                                  \
            o[i] = (expression);                                                                   \
        }                                                                                          \
        break;                                                                                     \
    }

#define CASES_OF_ARITHMETIC(T)                                                                     \
    CASE(TD_UNARY_ABS, T, s > 0 ? g : s < 0 ? -g : g * 0)                                               \
    CASE(TD_UNARY_SQUARE, T, g *(2 * s))                                                                \
    CASE(TD_UNARY_EXP, T, g *s)                                                                         \
    CASE(TD_UNARY_LOG, T, g / s)                                                                        \
    CASE(TD_UNARY_LOG1P, T, g / (s + 1))                                                                \
    CASE(TD_UNARY_SQRT, T, g / (2 * s))                                                                 \
    CASE(TD_UNARY_RSQRT, T, g *(T)-0.5 * (s * s * s))                                                   \
    CASE(TD_UNARY_RECIPROCAL, T, -g *(s * s))                                                           \
    CASE(TD_UNARY_TANH, T, g *(1 - s * s))                                                              \
    CASE(TD_UNARY_SIGMOID, T, g *((1 - s) * s))                                                         \
    CASE(TD_UNARY_RELU, T, s <= 0 ? 0 : g)

/* NEG saves nothing. */
#define NEGATE(T)                                                                                  \
    do {                                                                                           \
        T *o = out;                                                                                \
        const T *x = grad;                                                                         \
        TD__INDEPENDENT                                                                            \
        for (int64_t i = 0; i < count; i++)                                                        \
            o[i] = -x[i];                                                                          \
    } while (0)

/* g cos(s), or -g sin(s): a cosine, shifted by another quarter. */
static void sin_gradient(float *out, const float *grad, const float *saved, int64_t count,
                         bool of_sine)
{
    for (int64_t at = 0; at < count; at += BLOCK) {
        float slope[BLOCK];
        int64_t n = count - at < BLOCK ? count - at : BLOCK;
        td__sin_quarters_array(slope, saved + at, n, of_sine ? 1 : 0);
        for (int64_t i = 0; i < n; i++)
            out[at + i] = of_sine ? grad[at + i] * slope[i] : -grad[at + i] * slope[i];
    }
}

static TD__VECTOR void grad_f32(td_unary op, void *out, const void *grad,
                                const void *saved, int64_t count)
{
    switch (op) {
    case TD_UNARY_NEG:
        NEGATE(float);
        break;
        CASES_OF_ARITHMETIC(float)
    case TD_UNARY_SIN:
    case TD_UNARY_COS:
        sin_gradient(out, grad, saved, count, op == TD_UNARY_SIN);
        break;
        CASE(TD_UNARY_GELU, float, g *td__gelu_slope_f32(s))
        CASE(TD_UNARY_GELU_TANH, float, g *td__gelu_tanh_slope_f32(s))
        CASE(TD_UNARY_SILU, float, g *td__silu_slope_f32(s))
        CASE(TD_UNARY_ERF, float, g *td__erf_slope_f32(s))
    default:
        break;
    }
}

static TD__VECTOR void grad_f64(td_unary op, void *out, const void *grad,
                                const void *saved, int64_t count)
{
    switch (op) {
    case TD_UNARY_NEG:
        NEGATE(double);
        break;
        CASES_OF_ARITHMETIC(double)
        CASE(TD_UNARY_SIN, double, g *cos(s))
        CASE(TD_UNARY_COS, double, -g *sin(s))
        CASE(TD_UNARY_GELU, double, g *td__gelu_slope_f64(s))
        CASE(TD_UNARY_GELU_TANH, double, g *td__gelu_tanh_slope_f64(s))
        CASE(TD_UNARY_SILU, double, g *td__silu_slope_f64(s))
        CASE(TD_UNARY_ERF, double, g *td__erf_slope_f64(s))
    default:
        break;
    }
}

struct gradient {
    td_unary op;
    bool is_f64;
};

static void run_gradient(void *const arrays[], int64_t count, const void *arg)
{
    const struct gradient *gradient = arg;
    const void *saved = gradient->op == TD_UNARY_NEG ? NULL : arrays[2];
    if (gradient->is_f64)
        grad_f64(gradient->op, arrays[0], arrays[1], saved, count);
    else
        grad_f32(gradient->op, arrays[0], arrays[1], saved, count);
}

static bool has_gradient(td_unary op)
{
    return op <= TD_UNARY_ERF && op != TD_UNARY_SIGN && op != TD_UNARY_FLOOR && op != TD_UNARY_CEIL && op != TD_UNARY_ROUND;
}

td_status td__cpu_unary_grad(td_unary op, td_tensor *grad_x, const td_tensor *grad_y,
                             const td_tensor *saved)
{
    td_dtype dtype = grad_x->layout.dtype;
    if (!has_gradient(op) || dtype > TD_BF16)
        return td_fail(TD_ERR_UNSUPPORTED, "%s: its gradient is not supported for %s",
                       td__unary_names[op], td_dtype_name(dtype));
    struct gradient gradient = {op, dtype == TD_F64};
    td__each_tensors(grad_x, grad_y, op == TD_UNARY_NEG ? NULL : saved, NULL, run_gradient, &gradient);
    return TD_OK;
}
