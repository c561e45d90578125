/* Matrix products with AVX2 and FMA: 12 of 16 registers are sums. */
#define VECTOR_BYTES 32
#define MAX_ROWS 6

#define REAL float
#define REAL_BYTES 4
#define LOOPS td__gemm_avx2_f32
#define DIRECT td__direct_avx2_f32
#define NAMED(name) name##_f32
#include "tensor/gemm_loops.h"

#define REAL double
#define REAL_BYTES 8
#define LOOPS td__gemm_avx2_f64
#define DIRECT td__direct_avx2_f64
#define NAMED(name) name##_f64
#include "tensor/gemm_loops.h"
