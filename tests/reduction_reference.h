/* The scalar reference of reductions: one element at a time, in code of its own, along the tree that
 * it spells out itself. */
#ifndef TANDEM_TESTS_REDUCTION_REFERENCE_H
#define TANDEM_TESTS_REDUCTION_REFERENCE_H

#include "reduce/reduction.h"

#include <string.h>

#define LENGTH(array) (sizeof(array) / sizeof *(array))

/** The instruction sets that there may be; td__kernels_use() says which there are. */
static const char *const instruction_sets[] = {"generic", "avx2", "avx512"};

static inline uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float of_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/** Another number each time; *state is not 0. */
static inline uint64_t next_random(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state * 0x2545f4914f6cdd1du;
}

float reference_from_f16(uint16_t half);
uint16_t reference_to_f16(float value);
float reference_from_bf16(uint16_t half);
uint16_t reference_to_bf16(float value);

/** What the reduction makes of one element of each of `n` sources, over `n` ranks. */
void reference_reduce(const struct td__reduction *r, const void *const *elements, int n,
                      void *result);

/** The sources of the left half of a tree's node over `n` of them, n > 1. */
int reference_left(int n);

#endif
