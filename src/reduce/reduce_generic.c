/* The loops of reductions for any processor; src/CMakeLists.txt has the flags. */
#define KERNELS_NAME "generic"
#define KERNELS_SYMBOL td__kernels_generic
#include "reduce/reduce_loops.h"
