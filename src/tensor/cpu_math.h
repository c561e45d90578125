/* Functions of one number. */
#ifndef TD_TENSOR_CPU_MATH_H
#define TD_TENSOR_CPU_MATH_H

#include <math.h>

#define TD__SQRT_HALF 0.70710678118654752440
#define TD__SQRT_2_BY_PI 0.79788456080286535588

static inline double td__sigmoid_f64(double x)
{
    double e = exp(-fabs(x));
    return (x < 0 ? e : 1) / (1 + e);
}

static inline double td__gelu_f64(double x)
{
    return 0.5 * x * erfc(-x * TD__SQRT_HALF);
}

static inline double td__gelu_tanh_f64(double x)
{
    double t = TD__SQRT_2_BY_PI * (x + 0.044715 * x * x * x);
    return x * td__sigmoid_f64(2 * t);
}

static inline double td__silu_f64(double x)
{
    return x * td__sigmoid_f64(x);
}

#define td__exp_f32 expf
#define td__log_f32 logf
#define td__log1p_f32 log1pf
#define td__sin_f32 sinf
#define td__cos_f32 cosf
#define td__tanh_f32 tanhf
#define td__sigmoid_f32 (float)td__sigmoid_f64
#define td__gelu_f32 (float)td__gelu_f64
#define td__gelu_tanh_f32 (float)td__gelu_tanh_f64
#define td__silu_f32 (float)td__silu_f64
#define td__erf_f32 erff

#endif
