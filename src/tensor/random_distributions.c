/* Distributions: numbers from words of a generator, drawn in blocks.
 *
 * Compilers vectorise the loops. PyTorch's loops use fused multiply-add; so do these, in a version for
 * processors with FMA, and in a slow one, with the same bits, for others. */
#include "tensor/random_distributions.h"

#include <float.h>
#include <math.h>

/* ---- Uniform numbers ------------------------------------------------------------------------- */

static inline __attribute__((always_inline)) void uniform_f32(const uint32_t *words, float *out,
                                                              int64_t count, uint32_t mask,
                                                              float from, float range)
{
    float unit = 1.0f / (float)(mask + 1);
    for (int64_t i = 0; i < count; i++)
        out[i] = fmaf((float)(int32_t)(words[i] & mask) * unit, range, from);
}

/* An element takes two words, the higher one first. */
static inline uint64_t join(const uint32_t *words, int64_t i)
{
    return (uint64_t)words[2 * i] << 32 | words[2 * i + 1];
}

static inline double unit_of(uint64_t number)
{
    return (double)(int64_t)(number & ((UINT64_C(1) << 53) - 1)) * 0x1p-53;
}

static inline __attribute__((always_inline)) void
uniform_f64(const uint32_t *words, double *out, int64_t count, double from, double range)
{
    for (int64_t i = 0; i < count; i++)
        out[i] = fma(unit_of(join(words, i)), range, from);
}

#if defined(__x86_64__)
#define FUSED __attribute__((target("avx2,fma")))
static bool can_fuse(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
#else
#define FUSED
static bool can_fuse(void)
{
    return true;
}
#endif

FUSED static void uniform_f32_fused(const uint32_t *words, float *out, int64_t count, uint32_t mask,
                                    float from, float range)
{
    uniform_f32(words, out, count, mask, from, range);
}

FUSED static void uniform_f64_fused(const uint32_t *words, double *out, int64_t count, double from,
                                    double range)
{
    uniform_f64(words, out, count, from, range);
}

static void draw_f32(td_generator *generator, float *out, int64_t count, uint32_t mask, float from,
                     float range)
{
    uint32_t words[TD__RANDOM_BLOCK];
    td__mt19937_fill(&generator->engine, words, count);
    if (can_fuse())
        uniform_f32_fused(words, out, count, mask, from, range);
    else
        uniform_f32(words, out, count, mask, from, range);
}

static void draw_f64(td_generator *generator, double *out, int64_t count, double from, double range)
{
    uint32_t words[2 * TD__RANDOM_BLOCK];
    td__mt19937_fill(&generator->engine, words, 2 * count);
    if (can_fuse())
        uniform_f64_fused(words, out, count, from, range);
    else
        uniform_f64(words, out, count, from, range);
}

uint16_t td__to_half(td_dtype dtype, float x)
{
    return dtype == TD_F16 ? td_f32_to_f16(x) : td_f32_to_bf16(x);
}

int td__float_digits(td_dtype dtype)
{
    return dtype == TD_F32   ? FLT_MANT_DIG
           : dtype == TD_F64 ? DBL_MANT_DIG
           : dtype == TD_F16 ? 11
                             : 8;
}

void td__draw_uniform(td_generator *generator, const struct td__distribution *distribution,
                      void *out, int64_t count)
{
    if (distribution->dtype == TD_F64) {
        draw_f64(generator, out, count, distribution->from, distribution->range);
        return;
    }
    /* As many bits as the dtype holds: rounding more of them could give `to` itself. */
    uint32_t mask = (UINT32_C(1) << td__float_digits(distribution->dtype)) - 1;
    float numbers[TD__RANDOM_BLOCK];
    float *to = distribution->dtype == TD_F32 ? out : numbers;
    draw_f32(generator, to, count, mask, (float)distribution->from, (float)distribution->range);
    if (distribution->dtype != TD_F32)
        for (int64_t i = 0; i < count; i++)
            ((uint16_t *)out)[i] = td__to_half(distribution->dtype, numbers[i]);
}

/* ---- Normal numbers -------------------------------------------------------------------------- */

/* One at a time; computed as a pair in f64, of which the generator keeps the second one for the next call. */
static double one_normal(td_generator *generator)
{
    if (generator->has_normal) {
        generator->has_normal = false;
        return generator->normal;
    }
    double u[2];
    draw_f64(generator, u, 2, 0, 1);
    double radius = sqrt(-2.0 * log(1.0 - u[1])), angle = 2.0 * M_PI * u[0];
    generator->normal = radius * sin(angle);
    generator->has_normal = true;
    return radius * cos(angle);
}

void td__draw_normal(td_generator *generator, const struct td__distribution *distribution,
                     void *out, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        double x = fma(one_normal(generator), distribution->range, distribution->from);
        if (distribution->dtype == TD_F64)
            ((double *)out)[i] = x;
        else if (distribution->dtype == TD_F32)
            ((float *)out)[i] = (float)x;
        else
            ((uint16_t *)out)[i] = td__to_half(distribution->dtype, (float)x);
    }
}

/* A multiple of 16 of them. */
void td__draw_normal_groups(td_generator *generator, const struct td__distribution *distribution,
                            void *out, int64_t count)
{
    if (distribution->dtype == TD_F64) {
        draw_f64(generator, out, count, 0, 1);
        td__normal_from_uniform_f64(out, count, distribution->from, distribution->range);
        return;
    }
    float numbers[TD__RANDOM_BLOCK];
    float *to = distribution->dtype == TD_F32 ? out : numbers;
    draw_f32(generator, to, count, (UINT32_C(1) << FLT_MANT_DIG) - 1, 0, 1);
    td__normal_from_uniform_f32(to, count, (float)distribution->from, (float)distribution->range);
    if (distribution->dtype != TD_F32)
        for (int64_t i = 0; i < count; i++)
            ((uint16_t *)out)[i] = td__to_half(distribution->dtype, numbers[i]);
}

/* ---- Integers, and ones or zeros ------------------------------------------------------------- */

void td__put_integer(void *out, td_dtype dtype, int64_t i, uint64_t value)
{
    switch (dtype) {
    case TD_F32:
        ((float *)out)[i] = (float)(int64_t)value;
        break;
    case TD_F64:
        ((double *)out)[i] = (double)(int64_t)value;
        break;
    case TD_F16:
    case TD_BF16:
        ((uint16_t *)out)[i] = td__to_half(dtype, (float)(int64_t)value);
        break;
    case TD_I16:
        ((uint16_t *)out)[i] = (uint16_t)value;
        break;
    case TD_I32:
    case TD_U32:
        ((uint32_t *)out)[i] = (uint32_t)value;
        break;
    case TD_I64:
    case TD_U64:
        ((uint64_t *)out)[i] = value;
        break;
    default: /* i8, u8, bool */
        ((uint8_t *)out)[i] = (uint8_t)value;
    }
}

void td__draw_integers(td_generator *generator, const struct td__distribution *distribution,
                       void *out, int64_t count)
{
    uint32_t words[2 * TD__RANDOM_BLOCK];
    td__mt19937_fill(&generator->engine, words, distribution->wide ? 2 * count : count);
    for (int64_t i = 0; i < count; i++) {
        uint64_t number = distribution->wide ? join(words, i) : words[i];
        td__put_integer(out, distribution->dtype, i,
                        (distribution->modulus ? number % distribution->modulus : number) +
                            distribution->base);
    }
}

void td__draw_bernoulli(td_generator *generator, const struct td__distribution *distribution,
                        void *out, int64_t count)
{
    uint32_t words[2 * TD__RANDOM_BLOCK];
    td__mt19937_fill(&generator->engine, words, 2 * count);
    for (int64_t i = 0; i < count; i++)
        td__put_integer(out, distribution->dtype, i, unit_of(join(words, i)) < distribution->p);
}
