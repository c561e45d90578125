/* The loops of reductions for x86-64 with AVX2 and F16C; src/CMakeLists.txt has the flags. */
#define KERNELS_NAME "avx2"
#define KERNELS_SYMBOL td__kernels_avx2
#include "reduce/reduce_loops.h"
