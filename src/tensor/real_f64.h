/* Included before a file of loops (…_loops.h), to define them for f64. */
#undef REAL
#undef NAME
#undef REAL_EXP
#undef REAL_LOG
#undef REAL_LOG1P
#undef REAL_SQRT
#undef REAL_FABS
#undef FOLD

#include "tensor/cpu_math.h"
#include "tensor/vector.h"

#include <string.h>

#define REAL double
#define NAME(name) name##_f64
#define REAL_EXP exp
#define REAL_LOG log
#define REAL_LOG1P log1p
#define REAL_SQRT sqrt
#define REAL_FABS fabs

/* One number out of 8 lanes, as for f32. */
#define FOLD(v, op)                                                                                \
    do {                                                                                           \
        v = op(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3));                          \
        v = op(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5));                          \
        v = op(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6));                          \
    } while (0)

#include "tensor/lanes_loops.h"
