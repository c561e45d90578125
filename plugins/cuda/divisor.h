/* Division by a number that stays the same: the host finds a multiplier, and kernels multiply instead of dividing, which takes
 * some instructions instead of dozens. */
#ifndef CUDA_DIVISOR_H
#define CUDA_DIVISOR_H

#include <stdint.h>

struct cuda_divisor {
    uint32_t divisor, multiplier, shift;
};

/** For dividends below 2^31; `divisor` is from 1 to 2^31 - 1. */
static inline struct cuda_divisor cuda_divisor_of(int64_t divisor)
{
    uint32_t shift = 0;
    while ((1ull << shift) < (uint64_t)divisor)
        shift++;
    /* With l = ceil(log2 d) and m = floor(2^32 (2^l - d) / d) + 1: n / d = (n + floor(m n / 2^32)) >> l. */
    uint64_t multiplier = ((1ull << 32) * ((1ull << shift) - (uint64_t)divisor)) /
                          (uint64_t)divisor;
    struct cuda_divisor made = {(uint32_t)divisor, (uint32_t)multiplier + 1, shift};
    return made;
}

#ifdef __cplusplus
__device__ inline uint32_t divide(uint32_t n, const cuda_divisor &by)
{
    return (__umulhi(n, by.multiplier) + n) >> by.shift;
}

/* n / by, and the rest. */
__device__ inline uint32_t divide(uint32_t n, const cuda_divisor &by, uint32_t &rest)
{
    uint32_t quotient = divide(n, by);
    rest = n - quotient * by.divisor;
    return quotient;
}
#endif

#endif
