/* Matrix products with the compiler's baseline instruction set. */
#define VECTOR_BYTES 16
#define MAX_ROWS 6

#define REAL float
#define REAL_BYTES 4
#define LOOPS td__gemm_generic_f32
#define DIRECT td__direct_generic_f32
#define NAMED(name) name##_f32
#include "tensor/gemm_loops.h"

#define REAL double
#define REAL_BYTES 8
#define LOOPS td__gemm_generic_f64
#define DIRECT td__direct_generic_f64
#define NAMED(name) name##_f64
#include "tensor/gemm_loops.h"
