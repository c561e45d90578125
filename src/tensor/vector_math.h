/* Functions of f32 without branches, so that a loop over one becomes vector code in a function that
 * is marked TD__VECTOR. */
#ifndef TD_TENSOR_VECTOR_MATH_H
#define TD_TENSOR_VECTOR_MATH_H

#include "base/half.h"

/** For small functions that are to be compiled along with the TD__VECTOR function that calls them. */
#define TD__INLINE static inline __attribute__((always_inline))

/** In front of a loop in which no step reads what another one has written, though its operands may be
 *  the same memory. */
#ifdef __clang__
#define TD__APART _Pragma("clang loop vectorize(assume_safety)")
#else
#define TD__APART _Pragma("GCC ivdep")
#endif

/** 2^n for n from -126 to 127. */
TD__INLINE float td__exp2_int(int32_t n)
{
    return td__f32_of_bits((uint32_t)(n + 127) << 23);
}

/** e^x within 1 ulp, with infinity, subnormal results, 0 and NaN where they belong.
 *
 * x = n ln 2 + r with |r| <= ln 2 / 2, so e^x = 2^n e^r; e^r = 1 + r + r^2 q(r), where q of degree 4
 * is good to 1e-8. 2^n may be too large or small for an f32, so its halves are multiplied one after
 * the other, of which only the last can round. */
TD__INLINE float td__exp_f32(float x)
{
    /* Beyond these the result is infinite or 0. NaN passes. */
    x = x > 89.0f ? 89.0f : x;
    x = x < -104.5f ? -104.5f : x;
    const float magic =
        0x1.8p23f; /* adding it rounds to an integer, which stands in the low bits */
    float shifted = x * 0x1.715476p0f + magic;
    int32_t n = (int32_t)(td__bits_of_f32(shifted) - td__bits_of_f32(magic));
    n = n > 200 ? 200 : n < -200 ? -200 : n; /* only NaN is out there */
    float whole = shifted - magic;
    /* ln 2 in two parts, the first one short enough for exact products. */
    float r = x - whole * 0x1.62e4p-1f - whole * 0x1.7f7d1cp-20f;
    float q = 0x1.6d110ap-10f;
    q = q * r + 0x1.120b6ep-7f;
    q = q * r + 0x1.55551ap-5f;
    q = q * r + 0x1.5554dcp-3f;
    q = q * r + 0.5f;
    float power = 1.0f + (r + r * r * q);
    int32_t half = n >> 1;
    return power * td__exp2_int(half) * td__exp2_int(n - half);
}

#endif
