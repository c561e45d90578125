/* Matrix products with AVX-512: 28 of 32 registers are sums. */
#define VECTOR_BYTES 64
#define MAX_ROWS 14

#define REAL float
#define REAL_BYTES 4
#define LOOPS td__gemm_avx512_f32
#define DIRECT td__direct_avx512_f32
#define NAMED(name) name##_f32
#include "tensor/gemm_loops.h"

#define REAL double
#define REAL_BYTES 8
#define LOOPS td__gemm_avx512_f64
#define DIRECT td__direct_avx512_f64
#define NAMED(name) name##_f64
#include "tensor/gemm_loops.h"
