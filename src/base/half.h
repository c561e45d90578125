/* f16 and bf16 from and to f32, one number at a time and without branches, so that compilers vectorise loops
 * over them. The results equal those of the processors' instructions: a signalling NaN becomes a quiet one,
 * except from bf16 to f32, which only moves bits. */
#ifndef TD_BASE_HALF_H
#define TD_BASE_HALF_H

#include <stdint.h>
#include <string.h>

static inline float td__f32_of_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t td__bits_of_f32(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float td__bf16_to_f32(uint16_t half)
{
    return td__f32_of_bits((uint32_t)half << 16);
}

/* For every value but NaN. */
static inline uint16_t td__round_to_bf16(float value)
{
    uint32_t bits = td__bits_of_f32(value);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline uint16_t td__f32_to_bf16(float value)
{
    uint16_t nan = (uint16_t)(td__bits_of_f32(value) >> 16 | 0x40);
    return value == value ? td__round_to_bf16(value) : nan;
}

/* An f16 has 5 bits of exponent with a bias of 15, and 10 of fraction; an f32 has 8, 127 and 23. So
 * the fraction moves up by 13 bits, and the exponent goes up by 112. */
static inline float td__f16_to_f32(uint16_t half)
{
    int32_t magnitude = half & 0x7fff;
    uint32_t sign = (uint32_t)(half & 0x8000) << 16;
    uint32_t shifted = (uint32_t)magnitude << 13;
    uint32_t infinite = shifted | 0x7f800000 | (magnitude > 0x7c00 ? 0x400000 : 0);
    /* A subnormal f16 counts units of 2^-24, which is exact in an f32. */
    uint32_t subnormal = td__bits_of_f32((float)magnitude * 0x1p-24f);

    uint32_t bits = magnitude < 0x400 ? subnormal : shifted + (112u << 23);
    return td__f32_of_bits(sign | (magnitude >= 0x7c00 ? infinite : bits));
}

static inline uint16_t td__f32_to_f16(float value)
{
    uint32_t bits = td__bits_of_f32(value);
    uint32_t sign = bits >> 16 & 0x8000;
    int32_t magnitude = (int32_t)(bits & 0x7fffffff);
    /* From 65520 on the carry of the rounding makes the exponent that of infinity. */
    int32_t normal = (magnitude - (112 << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
    /* One unit in the last place of numbers around 0.5 is 2^-24, the unit of a subnormal f16: the
     * addition rounds to it. */
    float unit = td__f32_of_bits((uint32_t)magnitude) + 0.5f;
    int32_t subnormal = (int32_t)td__bits_of_f32(unit) - 0x3f000000;
    int32_t nan = 0x7e00 | (magnitude >> 13 & 0x3ff);

    int32_t half = magnitude < 0x38800000 ? subnormal : normal; /* 2^-14, the least normal f16 */
    half = magnitude >= 0x47800000 ? 0x7c00 : half;             /* 2^16 */
    half = magnitude > 0x7f800000 ? nan : half;
    return (uint16_t)(sign | (uint32_t)half);
}

#endif
