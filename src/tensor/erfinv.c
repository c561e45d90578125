/* The inverse of erf(): the rational approximations of matlab's erfinv (one for the middle, one for the tails),
 * refined by two Newton steps.
 *
 * The polynomials are evaluated with one rounding for each multiplication and addition (FMA), whether
 * the processor has an instruction for that or not; nothing else is fused (src/CMakeLists.txt). */
#include "tensor/erfinv.h"

#include <math.h>

#define DEFINE_ERFINV(NAME, REAL, FMA, SQRT, LOG, ERF, EXP, COPYSIGN)                              \
    static REAL NAME##_middle(REAL y)                                                              \
    {                                                                                              \
        REAL z = y * y;                                                                            \
        REAL over = FMA((REAL)-0.140543331, z, (REAL)0.914624893);                                 \
        over = FMA(over, z, (REAL)-1.645349621);                                                   \
        over = FMA(over, z, (REAL)0.886226899);                                                    \
        REAL under = FMA((REAL)0.012229801, z, (REAL)-0.329097515);                                \
        under = FMA(under, z, (REAL)1.442710462);                                                  \
        under = FMA(under, z, (REAL)-2.118377725);                                                 \
        return y * over / FMA(under, z, (REAL)1);                                                  \
    }                                                                                              \
                                                                                                   \
    static REAL NAME##_tail(REAL y, REAL size)                                                     \
    {                                                                                              \
        REAL z = SQRT(-LOG((1 - size) / 2));                                                       \
        REAL over = FMA((REAL)1.641345311, z, (REAL)3.429567803);                                  \
        over = FMA(over, z, (REAL)-1.624906493);                                                   \
        over = FMA(over, z, (REAL)-1.970840454);                                                   \
        REAL under = FMA((REAL)1.637067800, z, (REAL)3.543889200);                                 \
        return COPYSIGN(over, y) / FMA(under, z, (REAL)1);                                         \
    }                                                                                              \
                                                                                                   \
    REAL NAME(REAL y)                                                                              \
    {                                                                                              \
        REAL size = COPYSIGN(y, 1), slope = 2 / (REAL)1.7724538509055160273; /* 2 / sqrt(pi) */    \
        if (!(size < 1))                                                                           \
            return size == 1 ? COPYSIGN((REAL)INFINITY, y) : (REAL)NAN;                            \
        REAL x = size <= (REAL)0.7 ? NAME##_middle(y) : NAME##_tail(y, size);                      \
        for (int i = 0; i < 2; i++)                                                                \
            x = x - (ERF(x) - y) / (slope * EXP(-x * x));                                          \
        return x;                                                                                  \
    }

DEFINE_ERFINV(td__erfinv_f32, float, fmaf, sqrtf, logf, erff, expf, copysignf)
DEFINE_ERFINV(td__erfinv_f64, double, fma, sqrt, log, erf, exp, copysign)
