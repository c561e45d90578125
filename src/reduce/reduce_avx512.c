/* The loops of reductions for x86-64 with AVX-512; src/CMakeLists.txt has the flags. */
#define KERNELS_NAME "avx512"
#define KERNELS_SYMBOL td__kernels_avx512
#include "reduce/reduce_loops.h"
