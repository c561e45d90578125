/* Functions of one number, for loops over arrays.
 *
 * Those of f32 have no branches, calls or tables, so that loops over them are vectorised. The polynomials
 * are minimax (Remez) over the reduced range, with a relative error below 2^-25; results are within about 2
 * ulp, over the whole range, down to subnormal results. Fused multiply-add is neither needed nor harmful.
 * The functions of f64 use the C library. */
#ifndef TD_TENSOR_CPU_MATH_H
#define TD_TENSOR_CPU_MATH_H

#include "base/half.h"

#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>

#define TD__MATH static inline __attribute__((always_inline))

#define TD__SQRT_HALF 0.70710678118654752440
#define TD__SQRT_2_BY_PI 0.79788456080286535588
#define TD__2_BY_SQRT_PI 1.12837916709551257390
#define TD__1_BY_SQRT_2_PI 0.39894228040143267794
#define TD__GELU_CUBE 0.044715

/* log(2) in two parts: a product of the first with a small integer is exact. */
#define TD__LN2_HIGH 0.693359375f
#define TD__LN2_LOW -2.12194440e-4f

/* Adding it rounds to an integer, in the low bits. */
#define TD__ROUNDER 12582912.0f /* 1.5 * 2^23 */

/* ---- Exponentials ------------------------------------------------------------------------------ */

/* 2^k for -126 to 127. */
TD__MATH float td__power_of_2(int32_t k)
{
    return td__f32_of_bits((uint32_t)(k + 127) << 23);
}

/* hi + lo = k log(2) + r with |r| at most log(2) / 2. Returns e^r - 1. */
TD__MATH float td__exp_reduced(float hi, float lo, int32_t *k)
{
    float shifted = hi * 1.44269504f + TD__ROUNDER;
    float n = shifted - TD__ROUNDER;
    *k = (int32_t)(td__bits_of_f32(shifted) - td__bits_of_f32(TD__ROUNDER));
    float r = ((hi - n * TD__LN2_HIGH) - n * TD__LN2_LOW) + lo;
    float q = 1.381314457e-3f;
    q = q * r + 8.369418731e-3f;
    q = q * r + 4.166845677e-2f;
    q = q * r + 1.666651479e-1f;
    q = q * r + 4.999999305e-1f;
    return r + r * r * q;
}

/* e^(hi + lo), where lo is small beside hi. The power of two is multiplied in two steps: each is
 * a normal number, and only the second one rounds, where the result is subnormal. */
TD__MATH float td__exp_parts(float hi, float lo)
{
    int32_t k;
    hi = hi > 89 ? 89 : hi;
    hi = hi < -104 ? -104 : hi;
    float e = 1 + td__exp_reduced(hi, lo, &k);
    int32_t half = k >> 1;
    return e * td__power_of_2(half) * td__power_of_2(k - half);
}

TD__MATH float td__exp_f32(float x)
{
    return td__exp_parts(x, 0);
}

/* e^(factor x^2), for a power of 2 as the factor. The square is split, since an error of one unit in
 * 100 would be 100 in the result: the upper 12 bits of x have an exact square. */
TD__MATH float td__exp_square_f32(float x, float factor)
{
    float high = td__f32_of_bits(td__bits_of_f32(x) & 0xfffff000);
    return td__exp_parts(factor * (high * high), factor * ((x - high) * (x + high)));
}

/* 1 / (1 + e^-x), out of e^-|x|, which does not overflow. */
TD__MATH float td__sigmoid_f32(float x)
{
    float e = td__exp_f32(-fabsf(x));
    return (x < 0 ? e : 1) / (1 + e);
}

/* (e^2x - 1) / (e^2x + 1); from 10 on it is 1. */
TD__MATH float td__tanh_f32(float x)
{
    int32_t k;
    float a = fabsf(x);
    a = a > 10 ? 10 : a;
    float r = td__exp_reduced(2 * a, 0, &k);
    float scale = td__power_of_2(k);
    float e = scale * r + (scale - 1);
    return copysignf(e / (e + 2), x);
}

/* ---- Logarithms -------------------------------------------------------------------------------- */

/* x = 2^e (1 + f), with 1 + f between the roots of 1/2 and 2. */
TD__MATH float td__log_f32(float x)
{
    bool tiny = x < FLT_MIN;
    uint32_t bits = td__bits_of_f32(tiny ? x * 0x1p23f : x) - 0x3f3504f3; /* the root of 1/2 */
    float e = (float)((int32_t)bits >> 23) - (tiny ? 23.0f : 0.0f);
    float f = td__f32_of_bits((bits & 0x7fffff) + 0x3f3504f3) - 1;
    float p = -7.634505626e-2f;
    p = p * f + 1.276157581e-1f;
    p = p * f + -1.316017783e-1f;
    p = p * f + 1.420175783e-1f;
    p = p * f + -1.662335787e-1f;
    p = p * f + 2.000122691e-1f;
    p = p * f + -2.500082102e-1f;
    p = p * f + 3.333333171e-1f;
    float square = f * f;
    float rest = (square * f * p + e * TD__LN2_LOW) - 0.5f * square;
    float result = (f + rest) + e * TD__LN2_HIGH;
    result = x == 0 ? -INFINITY : result;
    result = x < 0 ? NAN : result;
    return x < INFINITY ? result : x;
}

/* log(1 + x), and what the rounding of 1 + x has lost. */
TD__MATH float td__log1p_f32(float x)
{
    float u = 1 + x;
    float lost = (x - (u - 1)) / u;
    float result = td__log_f32(u);
    return u > 0 && u < INFINITY ? result + lost : result;
}

/* ---- The normal distribution ------------------------------------------------------------------- */

/* The upper tail of the normal distribution for x >= 0, divided by e^(-x^2 / 2). A polynomial in
 * (x - 2.5) / (x + 2.5), which maps the range into -1 to 1. */
TD__MATH float td__tail_f32(float x)
{
    float inverse = 1 / (x + 2.5f);
    float u = (x - 2.5f) * inverse;
    float p = -1.577024170e-4f;
    p = p * u + -3.116228900e-4f;
    p = p * u + 6.844128281e-4f;
    p = p * u + 2.523932776e-3f;
    p = p * u + -1.600830111e-3f;
    p = p * u + -1.638618550e-2f;
    p = p * u + 9.235875756e-3f;
    p = p * u + 1.319869788e-1f;
    p = p * u + -4.336920123e-1f;
    p = p * u + 7.066566599e-1f;
    return p * inverse;
}

/* The normal CDF at x; *gauss gets e^(-x^2 / 2), which is 0 beyond 15. Its power of two is added to the
 * exponent plus 64, so that only the last product may be subnormal; the value for a NaN does not matter, as
 * the tail is NaN, too. */
TD__MATH float td__normal_f32(float x, float *gauss)
{
    float a = fabsf(x);
    a = a > 15 ? 15 : a;
    float high = td__f32_of_bits(td__bits_of_f32(a) & 0xfffff000); /* as in td__exp_square_f32() */
    int32_t k;
    float e = 1 + td__exp_reduced(-0.5f * (high * high), -0.5f * ((a - high) * (a + high)), &k);
    *gauss = td__f32_of_bits(td__bits_of_f32(e) + ((uint32_t)(k + 64) << 23)) * 0x1p-64f;
    float tail = td__tail_f32(a) * *gauss;
    return x < 0 ? tail : 1 - tail;
}

TD__MATH float td__gelu_f32(float x)
{
    float gauss;
    return x * td__normal_f32(x, &gauss);
}

TD__MATH float td__gelu_slope_f32(float x)
{
    float gauss;
    float normal = td__normal_f32(x, &gauss);
    float a = x > 15 ? 15 : x < -15 ? -15 : x; /* beyond, gauss is 0 */
    return normal + a * gauss * (float)TD__1_BY_SQRT_2_PI;
}

TD__MATH float td__erf_f32(float x)
{
    float a = fabsf(x);
    float s = a * a;
    float p = 7.853861925e-5f;
    p = p * s + -8.010193752e-4f;
    p = p * s + 5.188327694e-3f;
    p = p * s + -2.685381194e-2f;
    p = p * s + 1.128358515e-1f;
    p = p * s + -3.761262582e-1f;
    p = p * s + 1.128379166f;
    float b = a > 10 ? 10 : a;
    float far = 1 - 2 * (td__tail_f32(b * 1.41421356f) * td__exp_square_f32(b, -1));
    return copysignf(a < 0.9f ? a * p : far, x);
}

/* The approximation by tanh: (1 + tanh(t)) / 2 is sigmoid(2t). */
TD__MATH float td__gelu_tanh_f32(float x)
{
    float t = (float)(2 * TD__SQRT_2_BY_PI) * (x + (float)TD__GELU_CUBE * (x * x * x));
    return x * td__sigmoid_f32(t);
}

TD__MATH float td__gelu_tanh_slope_f32(float x)
{
    float a = x > 30 ? 30 : x < -30 ? -30 : x; /* beyond, it is 1 or 0 */
    float t = (float)(2 * TD__SQRT_2_BY_PI) * (a + (float)TD__GELU_CUBE * (a * a * a));
    float slope = (float)(2 * TD__SQRT_2_BY_PI) * (1 + (float)(3 * TD__GELU_CUBE) * (a * a));
    float s = td__sigmoid_f32(t);
    return s + a * s * (1 - s) * slope;
}

TD__MATH float td__silu_f32(float x)
{
    return x * td__sigmoid_f32(x);
}

TD__MATH float td__silu_slope_f32(float x)
{
    float a = x > 200 ? 200 : x < -200 ? -200 : x;
    float s = td__sigmoid_f32(a);
    return s * (1 + a * (1 - s));
}

TD__MATH float td__erf_slope_f32(float x)
{
    float a = fabsf(x);
    return (float)TD__2_BY_SQRT_PI * td__exp_square_f32(a > 15 ? 15 : a, -1);
}

/* ---- Sine and cosine --------------------------------------------------------------------------- */

/* The greatest |x| of td__sin_quarters_f32(). */
#define TD__SIN_LIMIT 0x1p20f

/* sin(x + quarters * pi / 2), computed in f64: x = k pi/2 + r, where the upper part of pi/2 has so
 * few bits that its product with k is exact. */
TD__MATH float td__sin_quarters_f32(float x, uint32_t quarters)
{
    const double rounder = 6755399441055744.0; /* 1.5 * 2^52 */
    double shifted = x * 0.63661977236758134308 + rounder;
    double n = shifted - rounder;
    uint64_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    uint32_t k = (uint32_t)bits + quarters;
    double r = (x - n * 1.57079632673412561417) - n * 6.07710050650619224932e-11;
    double s = r * r;
    double sine = -1.0 / 39916800;
    sine = sine * s + 1.0 / 362880;
    sine = sine * s - 1.0 / 5040;
    sine = sine * s + 1.0 / 120;
    sine = sine * s - 1.0 / 6;
    sine = r + r * s * sine;
    double cosine = -1.0 / 3628800;
    cosine = cosine * s + 1.0 / 40320;
    cosine = cosine * s - 1.0 / 720;
    cosine = cosine * s + 1.0 / 24;
    cosine = cosine * s - 0.5;
    cosine = 1 + s * cosine;
    double value = k & 1 ? cosine : sine;
    return (float)(k & 2 ? -value : value);
}

/* ---- Powers ------------------------------------------------------------------------------------ */

/* log2(a) for a > 0, with an error below 2^-37 of it. a = 2^e m with m between the roots of 1/2 and 2, and
 * log2(m) is a series in (m - 1) / (m + 1). */
TD__MATH double td__log2_wide(float a)
{
    bool tiny = a < FLT_MIN;
    uint32_t bits = td__bits_of_f32(tiny ? a * 0x1p23f : a) - 0x3f3504f3; /* the root of 1/2 */
    double e = (double)((int32_t)bits >> 23) - (tiny ? 23.0 : 0.0);
    double m = (double)td__f32_of_bits((bits & 0x7fffff) + 0x3f3504f3);
    double s = (m - 1) / (m + 1), z = s * s;
    double p = 0.34074899851046075537;
    p = p * z + 0.4116717450541198871;
    p = p * z + 0.57708360033656872942;
    p = p * z + 0.96179667326631388402;
    p = p * z + 2.88539008179014177;
    return e + s * p;
}

/* 2^t, for what an f32 can hold of it. */
TD__MATH float td__exp2_wide(double t)
{
    const double rounder = 6755399441055744.0; /* 1.5 * 2^52 */
    t = t > 160 ? 160 : t;
    t = t < -160 ? -160 : t;
    double shifted = t + rounder;
    double r = t - (shifted - rounder);
    uint64_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + 1023) << 52; /* 2 to the power of the integer in the low bits */
    double scale;
    memcpy(&scale, &bits, sizeof scale);
    double p = 0.000015252722782730728242;
    p = p * r + 0.00015461329854014107158;
    p = p * r + 0.0013333669441788745858;
    p = p * r + 0.0096180570371836008519;
    p = p * r + 0.055504107276035218774;
    p = p * r + 0.24022650920050262799;
    p = p * r + 0.69314718058156798245;
    p = p * r + 1; /* no error near 0 */
    return (float)(p * scale);
}

/* x^y as in C, within 0.51 ulp: 2^(y log2 |x|) in f64, and then the special cases. */
TD__MATH float td__pow_f32(float x, float y)
{
    float a = fabsf(x);
    float power = td__exp2_wide((double)y * td__log2_wide(a));
    power = a == 0 ? (y > 0 ? 0.0f : INFINITY) : power;
    power = a == INFINITY ? (y > 0 ? INFINITY : 0.0f) : power;
    power = a == 1 ? 1.0f : power;
    bool whole = rintf(y) == y, odd = whole & (2 * rintf(0.5f * y) != y);
    power = odd ? copysignf(power, x) : power;
    power = ((x < 0) & !whole & (a < INFINITY)) ? NAN : power;
    power = ((x != x) | (y != y)) ? x + y : power;
    return ((y == 0) | (x == 1)) ? 1.0f : power;
}

/* ---- f64 --------------------------------------------------------------------------------------- */

static inline double td__sigmoid_f64(double x)
{
    double e = exp(-fabs(x));
    return (x < 0 ? e : 1) / (1 + e);
}

static inline double td__normal_f64(double x)
{
    return 0.5 * erfc(-x * TD__SQRT_HALF);
}

static inline double td__gelu_f64(double x)
{
    return x * td__normal_f64(x);
}

static inline double td__gelu_slope_f64(double x)
{
    double a = x > 50 ? 50 : x < -50 ? -50 : x;
    return td__normal_f64(x) + a * exp(-0.5 * a * a) * TD__1_BY_SQRT_2_PI;
}

static inline double td__gelu_tanh_f64(double x)
{
    return x * td__sigmoid_f64(2 * TD__SQRT_2_BY_PI * (x + TD__GELU_CUBE * x * x * x));
}

static inline double td__gelu_tanh_slope_f64(double x)
{
    double a = x > 50 ? 50 : x < -50 ? -50 : x;
    double s = td__sigmoid_f64(2 * TD__SQRT_2_BY_PI * (a + TD__GELU_CUBE * a * a * a));
    return s + a * s * (1 - s) * 2 * TD__SQRT_2_BY_PI * (1 + 3 * TD__GELU_CUBE * a * a);
}

static inline double td__silu_f64(double x)
{
    return x * td__sigmoid_f64(x);
}

static inline double td__silu_slope_f64(double x)
{
    double a = x > 1000 ? 1000 : x < -1000 ? -1000 : x;
    double s = td__sigmoid_f64(a);
    return s * (1 + a * (1 - s));
}

static inline double td__erf_slope_f64(double x)
{
    return TD__2_BY_SQRT_PI * exp(-x * x);
}

#endif
