/* Which instruction set the loops over many elements use: the best that the processor has, unless the
 * environment variable TANDEM_SIMD names another one that it has too. */
#ifndef TD_BASE_SIMD_H
#define TD_BASE_SIMD_H

#include <stdbool.h>

typedef enum td__simd_level {
    TD__SIMD_GENERIC, /* "generic": what the compiler may use anyway */
    TD__SIMD_AVX2,    /* "avx2": with FMA and F16C */
    TD__SIMD_AVX512,  /* "avx512": F, BW, DQ and VL */
} td__simd_level;

/** The level in use. A name that is wrong, or of a level that the processor lacks, is warned of once. */
td__simd_level td__simd(void);

/** Whether the processor has that level. */
bool td__simd_has(td__simd_level level);

/** Whether the level in use is AVX-512 with products of bf16 (AVX512_BF16). */
bool td__simd_has_bf16(void);

/** Uses that level from now on, for tests. False where the processor lacks it. */
bool td__simd_use(td__simd_level level);

const char *td__simd_name(td__simd_level level);

#endif
