/* The instruction set of the vectorised loops: the best that the processor supports, unless TANDEM_SIMD names
 * another supported one. */
#ifndef TD_BASE_SIMD_H
#define TD_BASE_SIMD_H

#include <stdbool.h>

typedef enum td__simd_level {
    TD__SIMD_GENERIC, /* "generic": the compiler's baseline */
    TD__SIMD_AVX2,    /* "avx2": with FMA and F16C */
    TD__SIMD_AVX512,  /* "avx512": F, BW, DQ and VL */
} td__simd_level;

/** The level in use. Warns once if TANDEM_SIMD is unknown or not supported. */
td__simd_level td__simd(void);

/** Whether the processor supports `level`. */
bool td__simd_has(td__simd_level level);

/** Whether the level in use is AVX-512 with products of bf16 (AVX512_BF16). */
bool td__simd_has_bf16(void);

/** Switches to `level`, for tests. False if the processor does not support it. */
bool td__simd_use(td__simd_level level);

const char *td__simd_name(td__simd_level level);

#endif
