/* The loops that change parameters, for f32 and f64; see update_loops.h. Built without contraction
 * of floating-point expressions: fma() is called where PyTorch rounds once. */
#include "optim/update.h"

#include "tensor/vector.h"

#include <math.h>
#include <stddef.h>

#define REAL float
#define NAME(x) x##_f32
#define FMA __builtin_fmaf
#define SQRT __builtin_sqrtf
#include "optim/update_loops.h"
#undef REAL
#undef NAME
#undef FMA
#undef SQRT

#define REAL double
#define NAME(x) x##_f64
#define FMA __builtin_fma
#define SQRT __builtin_sqrt
#include "optim/update_loops.h"
