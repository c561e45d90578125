/* Included before a file of loops (…_loops.h), to define them for f32. */
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

#define REAL float
#define NAME(name) name##_f32
#define REAL_EXP td__exp_f32
#define REAL_LOG td__log_f32
#define REAL_LOG1P td__log1p_f32
#define REAL_SQRT sqrtf
#define REAL_FABS fabsf

/* One number out of 16 lanes, by halves: op(a, b) of two vectors, then of numbers. */
#define FOLD(v, op)                                                                                \
    do {                                                                                           \
        v = op(v, __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, \
                                          7));                                                     \
        v = op(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10,  \
                                          11));                                                    \
        v = op(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12,  \
                                          13));                                                    \
        v = op(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15,  \
                                          14));                                                    \
    } while (0)

#include "tensor/lanes_loops.h"
