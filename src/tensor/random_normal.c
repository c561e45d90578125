/* Normal numbers from uniform ones: Box and Muller's formula, sixteen numbers at a time.
 *
 *     u[0 … 7]    ->  radius r = sqrt(-2 log(1 - u))      numbers[i]     = r cos(a) * std + mean
 *     u[8 … 15]   ->  angle  a = 2 pi u                   numbers[i + 8] = r sin(a) * std + mean
 *
 * For f32 the bits of the result are those of PyTorch's code for AVX2, so log, sin and cos are the
 * polynomials of the Cephes library, and where that code multiplies and adds in one rounding, so does
 * this. Each step is a loop over eight lanes in plain C; it is compiled once for processors with fused
 * multiply-add and once for others, where fmaf() is a slow call with the same bits. */
#include "tensor/random_internal.h"

#include <math.h>
#include <string.h>

enum { LANES = 8, GROUP = 16 };

#define INLINE static inline __attribute__((always_inline))
#define EACH_LANE for (int i = 0; i < LANES; i++)

INLINE uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

INLINE float float_of(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* The logarithm of x in (0, 1], which is split into e and x with x in [sqrt(1/2), sqrt(2)). */
INLINE float log_of(float x)
{
    uint32_t bits = bits_of(x);
    float e = (float)((int32_t)(bits >> 23) - 0x7f) + 1.0f;
    x = float_of((bits & 0x807fffffu) | 0x3f000000u);
    float again = x < 0.707106781186547524f ? x : 0.0f;
    e -= x < 0.707106781186547524f ? 1.0f : 0.0f;
    x = (x - 1.0f) + again;
    float z = x * x;
    float y = 7.0376836292e-2f;
    y = fmaf(y, x, -1.1514610310e-1f);
    y = fmaf(y, x, 1.1676998740e-1f);
    y = fmaf(y, x, -1.2420140846e-1f);
    y = fmaf(y, x, 1.4249322787e-1f);
    y = fmaf(y, x, -1.6668057665e-1f);
    y = fmaf(y, x, 2.0000714765e-1f);
    y = fmaf(y, x, -2.4999993993e-1f);
    y = fmaf(y, x, 3.3333331174e-1f);
    y = y * x;
    y = fmaf(y, z, e * -2.12194440e-4f);
    y = fmaf(-z, 0.5f, y);
    return fmaf(e, 0.693359375f, x + y);
}

/* Both for x in [0, 2 pi]: x less a multiple of pi/2, of which the octant j says what it is for. */
INLINE void sin_and_cos_of(float x, float *sin_out, float *cos_out)
{
    int32_t j = (int32_t)(x * 1.27323954473516f);
    j = (j + 1) & ~1;
    float y = (float)j;
    x = fmaf(y, -0.78515625f, x);
    x = fmaf(y, -2.4187564849853515625e-4f, x);
    x = fmaf(y, -3.77489497744594108e-8f, x);
    float z = x * x;

    float c = 2.443315711809948e-5f;
    c = fmaf(c, z, -1.388731625493765e-3f);
    c = fmaf(c, z, 4.166664568298827e-2f);
    c = c * z;
    c = fmaf(c, z, -(z * 0.5f));
    c = c + 1.0f;

    float s = -1.9515295891e-4f;
    s = fmaf(s, z, 8.3321608736e-3f);
    s = fmaf(s, z, -1.6666654611e-1f);
    s = s * z;
    s = fmaf(s, x, x);

    uint32_t sin_sign = ((uint32_t)j & 4u) << 29;
    uint32_t cos_sign = (~((uint32_t)j - 2u) & 4u) << 29;
    float sine = (j & 2) ? c : s, cosine = (j & 2) ? s : c;
    *sin_out = float_of(bits_of(sine) ^ sin_sign);
    *cos_out = float_of(bits_of(cosine) ^ cos_sign);
}

INLINE void group_of_f32(float *numbers, float mean, float std)
{
    float radius[LANES], sine[LANES], cosine[LANES];
    EACH_LANE radius[i] = sqrtf(-2.0f * log_of(1.0f - numbers[i]));
    EACH_LANE sin_and_cos_of((float)(2.0f * M_PI) * numbers[i + LANES], &sine[i], &cosine[i]);
    EACH_LANE numbers[i] = fmaf(radius[i] * cosine[i], std, mean);
    EACH_LANE numbers[i + LANES] = fmaf(radius[i] * sine[i], std, mean);
}

static void plain_f32(float *numbers, int64_t count, float mean, float std)
{
    for (int64_t i = 0; i < count; i += GROUP)
        group_of_f32(numbers + i, mean, std);
}

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) static void fused_f32(float *numbers, int64_t count, float mean,
                                                          float std)
{
    for (int64_t i = 0; i < count; i += GROUP)
        group_of_f32(numbers + i, mean, std);
}
#endif

void td__normal_from_uniform_f32(float *numbers, int64_t count, float mean, float std)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        fused_f32(numbers, count, mean, std);
        return;
    }
#endif
    plain_f32(numbers, count, mean, std);
}

void td__normal_from_uniform_f64(double *numbers, int64_t count, double mean, double std)
{
    for (int64_t i = 0; i < count; i += GROUP)
        for (int64_t j = i; j < i + LANES; j++) {
            double radius = sqrt(-2 * log(1 - numbers[j]));
            double angle = 2 * M_PI * numbers[j + LANES];
            numbers[j] = fma(radius * cos(angle), std, mean);
            numbers[j + LANES] = fma(radius * sin(angle), std, mean);
        }
}
