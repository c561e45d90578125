/* Products of bf16 with AVX512_BF16: each step adds the products of two elements to an f32, twice as many
 * as with f32. The instruction adds the second product first, with one rounding each, takes subnormal
 * numbers as 0 and makes 0 of them: what gemm_pack.h and td__gemm() do with f32 where it is missing. */
#include <immintrin.h>

#define VECTOR_BYTES 64
#define MAX_ROWS 14

#define REAL float
#define REAL_BYTES 4
#define MULTIPLY_ADD(sum, a, b)                                                                    \
    ((sum) = (VECTOR)_mm512_dpbf16_ps((__m512)(sum), (__m512bh)_mm512_set1_ps(a), (__m512bh)(b)))
/* The same bits as td__f32_to_bf16(), since the sums are not subnormal. */
#define STORE_HALVES(to, first, second)                                                            \
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh((__m512)(second), (__m512)(first)))
#define LOOPS td__gemm_avx512_bf16
#define NAMED(name) name##_bf16
#include "tensor/gemm_loops.h"
