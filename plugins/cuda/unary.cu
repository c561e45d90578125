/* Kernels of operations on one operand, and of their gradients. Floats have a kernel for each operation, since some
 * need many registers; halves are computed in f32. The other dtypes have one kernel, which chooses by group. */
#include "cuda/each_element.h"

#include <tandem/kernels.h>

/* ---- Functions, by the type of the computation ------------------------------------------------------------------ */

#define SQRT_HALF 0.70710678118654752440
#define SQRT_2_BY_PI 0.79788456080286535588
#define TWO_BY_SQRT_PI 1.12837916709551257390
#define ONE_BY_SQRT_2_PI 0.39894228040143267794
#define GELU_CUBE 0.044715

/* e^(factor x^2), with what the rounding of the square has lost: an error of one unit in 100 would be 100 in the
 * result. */
__device__ inline float exp_square(float x, float factor)
{
    float square = x * x, lost = fmaf(x, x, -square), e = expf(factor * square);
    return fmaf(e, factor * lost, e);
}

/* Out of e^-|x|, which does not overflow; the divisor is between 1 and 2. */
__device__ inline float sigmoid(float x)
{
    float e = expf(-fabsf(x));
    return __fdividef(x < 0 ? e : 1.0f, 1 + e);
}

__device__ inline double sigmoid(double x)
{
    double e = exp(-fabs(x));
    return (x < 0 ? e : 1) / (1 + e);
}

/* The normal distribution at x; *gauss gets e^(-x^2 / 2), which is 0 beyond 15. The tail over it is a polynomial in
 * (a - 2.5) / (a + 2.5), the one of the host's kernels. */
__device__ inline float normal(float x, float *gauss)
{
    float a = fabsf(x);
    a = a > 15 ? 15 : a;
    *gauss = exp_square(a, -0.5f);
    float inverse = __fdividef(1.0f, a + 2.5f), u = (a - 2.5f) * inverse;
    float p = -1.577024170e-4f;
    p = fmaf(p, u, -3.116228900e-4f);
    p = fmaf(p, u, 6.844128281e-4f);
    p = fmaf(p, u, 2.523932776e-3f);
    p = fmaf(p, u, -1.600830111e-3f);
    p = fmaf(p, u, -1.638618550e-2f);
    p = fmaf(p, u, 9.235875756e-3f);
    p = fmaf(p, u, 1.319869788e-1f);
    p = fmaf(p, u, -4.336920123e-1f);
    p = fmaf(p, u, 7.066566599e-1f);
    float tail = p * inverse * *gauss;
    return x < 0 ? tail : 1 - tail;
}

__device__ inline double normal(double x, double *gauss)
{
    double a = x > 50 ? 50 : x < -50 ? -50 : x;
    *gauss = exp(-0.5 * a * a);
    return 0.5 * erfc(-x * SQRT_HALF);
}

__device__ inline double normal(double x)
{
    return 0.5 * erfc(-x * SQRT_HALF);
}

__device__ inline float normal(float x)
{
    float gauss;
    return normal(x, &gauss);
}

/* x, limited: beyond, the slopes below are 0 or 1, and infinity times 0 would be NaN. */
template <typename C> __device__ inline C limited(C x, C limit)
{
    return x > limit ? limit : x < -limit ? -limit : x;
}

template <typename C> __device__ inline C gelu_slope(C x)
{
    C gauss, at = normal(x, &gauss);
    return at + limited(x, (C)50) * gauss * (C)ONE_BY_SQRT_2_PI;
}

/* The approximation by tanh: (1 + tanh(t)) / 2 is sigmoid(2t). */
template <typename C> __device__ inline C gelu_tanh(C x)
{
    return x * sigmoid((C)(2 * SQRT_2_BY_PI) * (x + (C)GELU_CUBE * (x * x * x)));
}

template <typename C> __device__ inline C gelu_tanh_slope(C x)
{
    C a = limited(x, (C)(sizeof(C) == 4 ? 30 : 50));
    C s = sigmoid((C)(2 * SQRT_2_BY_PI) * (a + (C)GELU_CUBE * (a * a * a)));
    return s + a * s * (1 - s) * ((C)(2 * SQRT_2_BY_PI) * (1 + (C)(3 * GELU_CUBE) * (a * a)));
}

template <typename C> __device__ inline C silu_slope(C x)
{
    C a = limited(x, (C)(sizeof(C) == 4 ? 200 : 1000)), s = sigmoid(a);
    return s * (1 + a * (1 - s));
}

__device__ inline float erf_slope(float x)
{
    return (float)TWO_BY_SQRT_PI * exp_square(limited(x, 15.0f), -1);
}

__device__ inline double erf_slope(double x)
{
    return TWO_BY_SQRT_PI * exp(-x * x);
}

/* ---- Floats: v is the operand; g is the incoming gradient, and s what was saved --------------------------------- */

/* unary.c has the same lists. */
#define EACH_FLOAT_OPERATION(F)                                                                    \
    F(neg, -v)                                                                                     \
    F(abs, fabs(v))                                                                                \
    F(sign, (C)((v > 0) - (v < 0)))                                                                \
    F(square, v *v)                                                                                \
    F(exp, exp(v))                                                                                 \
    F(log, log(v))                                                                                 \
    F(log1p, log1p(v))                                                                             \
    F(sqrt, sqrt(v))                                                                               \
    F(rsqrt, rsqrt(v))                                                                             \
    F(reciprocal, 1 / v)                                                                           \
    F(sin, sin(v))                                                                                 \
    F(cos, cos(v))                                                                                 \
    F(tanh, tanh(v))                                                                               \
    F(sigmoid, sigmoid(v))                                                                         \
    F(relu, v < 0 ? 0 : v)                                                                         \
    F(gelu, v *normal(v))                                                                          \
    F(gelu_tanh, gelu_tanh(v))                                                                     \
    F(silu, v *sigmoid(v))                                                                         \
    F(floor, floor(v))                                                                             \
    F(ceil, ceil(v))                                                                               \
    F(round, rint(v))                                                                              \
    F(erf, erf(v))

#define EACH_GRADIENT(F)                                                                           \
    F(abs, s > 0 ? g : s < 0 ? -g : g * 0)                                                         \
    F(square, g *(2 * s))                                                                          \
    F(exp, g *s)                                                                                   \
    F(log, g / s)                                                                                  \
    F(log1p, g / (s + 1))                                                                          \
    F(sqrt, g / (2 * s))                                                                           \
    F(rsqrt, g *(C)-0.5 * (s * s * s))                                                             \
    F(reciprocal, -g *(s * s))                                                                     \
    F(sin, g *cos(s))                                                                              \
    F(cos, -g *sin(s))                                                                             \
    F(tanh, g *(1 - s * s))                                                                        \
    F(sigmoid, g *((1 - s) * s))                                                                   \
    F(relu, s <= 0 ? 0 : g)                                                                        \
    F(gelu, g *gelu_slope(s))                                                                      \
    F(gelu_tanh, g *gelu_tanh_slope(s))                                                            \
    F(silu, g *silu_slope(s))                                                                      \
    F(erf, g *erf_slope(s))

#define UNARY_OF(op, T, name, expression)                                                          \
    TD_KERNEL(unary_##op##_##name, struct map_args)                                                \
    {                                                                                              \
        map_elements<T, T, CUDA_WIDTH(sizeof(T))>(args, [](T x) {                                  \
            typedef compute<T>::type C;                                                            \
            C v = load(x);                                                                         \
            return store<T>((C)(expression));                                                      \
        });                                                                                        \
    }
#define UNARY(op, expression)                                                                      \
    UNARY_OF(op, float, f32, expression)                                                           \
    UNARY_OF(op, double, f64, expression)                                                          \
    UNARY_OF(op, f16, f16, expression)                                                             \
    UNARY_OF(op, bf16, bf16, expression)
EACH_FLOAT_OPERATION(UNARY)

#define GRADIENT_OF(op, T, name, expression)                                                       \
    TD_KERNEL(unary_grad_##op##_##name, struct pair_args)                                          \
    {                                                                                              \
        map_groups<T, T, CUDA_WIDTH(sizeof(T))>(args, [](auto &out, auto &a, auto &b) {            \
            each_of(out, a, b, [](T p, T q) {                                                      \
                typedef compute<T>::type C;                                                        \
                C g = load(p), s = load(q);                                                        \
                return store<T>((C)(expression));                                                  \
            });                                                                                    \
        });                                                                                        \
    }
#define GRADIENT(op, expression)                                                                   \
    GRADIENT_OF(op, float, f32, expression)                                                        \
    GRADIENT_OF(op, double, f64, expression)                                                       \
    GRADIENT_OF(op, f16, f16, expression)                                                          \
    GRADIENT_OF(op, bf16, bf16, expression)
EACH_GRADIENT(GRADIENT)

/* ---- Integers and complex numbers ------------------------------------------------------------------------------- */

template <typename T> __device__ inline T integer_unary(int op, T v)
{
    typedef typename wrapping<T>::type U;
    bool negative = (T)-1 < 0 && v < (T)1 && v != 0; /* v < 0 is a warning for unsigned types */
    switch (op) {
    case TD_UNARY_NEG:
        return (T)(0 - (U)v);
    case TD_UNARY_ABS:
        return negative ? (T)(0 - (U)v) : v;
    case TD_UNARY_SIGN:
        return (T)((v != 0) - 2 * negative);
    case TD_UNARY_SQUARE:
        return (T)((U)v * (U)v);
    default: /* RELU */
        return negative ? 0 : v;
    }
}

template <typename T> __device__ inline complex_of<T> complex_unary(int op, complex_of<T> v)
{
    if (op == TD_UNARY_NEG)
        return {-v.re, -v.im};
    return {v.re * v.re - v.im * v.im, 2 * v.re * v.im};
}

#define INTEGER(name, T)                                                                           \
    TD_KERNEL(unary_##name, struct map_args)                                                       \
    {                                                                                              \
        map_elements<T, T, CUDA_INTEGER_WIDTH(sizeof(T))>(                                         \
            args, [&](T v) { return integer_unary(args.op, v); });                                 \
    }
EACH_INTEGER(INTEGER)

#define COMPLEX(name, T)                                                                           \
    TD_KERNEL(unary_##name, struct map_args)                                                       \
    {                                                                                              \
        map_elements<T, T, CUDA_WIDTH(sizeof(T))>(args,                                            \
                                                  [&](T v) { return complex_unary(args.op, v); }); \
    }
EACH_COMPLEX(COMPLEX)

/* ---- Questions, whose result is bool: NOT and ISNAN ---------------------------------------------------------------- */

template <typename T> __device__ inline bool is_zero(T v)
{
    return load(v) == 0;
}
__device__ inline bool is_zero(truth v)
{
    return v.byte == 0;
}
template <typename T> __device__ inline bool is_zero(complex_of<T> v)
{
    return v.re == 0 && v.im == 0;
}

template <typename T> __device__ inline bool is_nan(T v)
{
    return load(v) != load(v);
}
__device__ inline bool is_nan(truth)
{
    return false;
}
template <typename T> __device__ inline bool is_nan(complex_of<T> v)
{
    return v.re != v.re || v.im != v.im;
}

#define QUESTION(name, T)                                                                          \
    TD_KERNEL(question_##name, struct map_args)                                                    \
    {                                                                                              \
        map_elements<uint8_t, T, CUDA_WIDTH(sizeof(T))>(args, [&](T v) {                           \
            return (uint8_t)(args.op == TD_UNARY_NOT ? is_zero(v) : is_nan(v));                    \
        });                                                                                        \
    }
EACH_DTYPE(QUESTION)
