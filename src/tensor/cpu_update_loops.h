/* The loops of cpu_update.c for one type of elements. Included once for f32 and once for f64 with
 *     REAL        the type
 *     NAME(x)     x with the type's suffix
 *     FMA, SQRT   of the type
 * The flags of the inner functions are constants where they are called, so that each combination is
 * a loop without branches. */

static inline __attribute__((always_inline)) void
NAME(sgd_loop)(REAL *restrict parameter, const REAL *restrict grad, REAL *restrict buffer,
               int64_t count, const td_sgd_update *step, bool decay, bool momentum, bool first)
{
    const REAL rate = (REAL)-step->lr, factor = (REAL)step->momentum;
    const REAL share = (REAL)(1 - step->dampening), weight_decay = (REAL)step->weight_decay;
    const REAL sign = step->maximize ? -1 : 1;
    const bool nesterov = step->nesterov;
    for (int64_t i = 0; i < count; i++) {
        REAL change = sign * grad[i];
        if (decay)
            change = FMA(parameter[i], weight_decay, change);
        if (momentum) {
            REAL average = first ? change : FMA(change, share, buffer[i] * factor);
            buffer[i] = average;
            change = nesterov ? FMA(average, factor, change) : average;
        }
        parameter[i] = FMA(change, rate, parameter[i]);
    }
}

TD__VECTOR static void NAME(sgd)(REAL *parameter, const REAL *grad, REAL *buffer, int64_t count,
                                 const td_sgd_update *step)
{
    bool decay = step->weight_decay != 0;
    if (!buffer && !decay)
        NAME(sgd_loop)(parameter, grad, NULL, count, step, false, false, false);
    else if (!buffer)
        NAME(sgd_loop)(parameter, grad, NULL, count, step, true, false, false);
    else if (step->first)
        NAME(sgd_loop)(parameter, grad, buffer, count, step, decay, true, true);
    else if (decay)
        NAME(sgd_loop)(parameter, grad, buffer, count, step, true, true, false);
    else
        NAME(sgd_loop)(parameter, grad, buffer, count, step, false, true, false);
}

static inline __attribute__((always_inline)) void
NAME(adam_loop)(REAL *restrict parameter, const REAL *restrict grad, REAL *restrict mean,
                REAL *restrict square, REAL *restrict greatest, int64_t count,
                const td_adam_update *step, bool decay, bool keep_greatest)
{
    const REAL beta1 = (REAL)step->beta1, rest1 = (REAL)(1 - step->beta1);
    const REAL beta2 = (REAL)step->beta2, rest2 = (REAL)(1 - step->beta2);
    const REAL weight_decay = (REAL)step->weight_decay, shrink = (REAL)step->shrink;
    const REAL eps = (REAL)step->eps, correction = (REAL)step->root_correction;
    const REAL size = (REAL)-step->size;
    const REAL sign = step->maximize ? -1 : 1;
    for (int64_t i = 0; i < count; i++) {
        REAL at = parameter[i] * shrink;
        REAL change = sign * grad[i];
        if (decay)
            change = FMA(at, weight_decay, change);
        REAL average = FMA(change, rest1, mean[i] * beta1);
        REAL spread = FMA(rest2 * change, change, square[i] * beta2);
        mean[i] = average;
        square[i] = spread;
        if (keep_greatest) {
            /* A NaN stays, whichever of the two it is. */
            REAL before = greatest[i];
            spread = before > spread || before != before ? before : spread;
            greatest[i] = spread;
        }
        parameter[i] = at + size * average / (SQRT(spread) / correction + eps);
    }
}

TD__VECTOR static void NAME(adam)(REAL *parameter, const REAL *grad, REAL *mean, REAL *square,
                                  REAL *greatest, int64_t count, const td_adam_update *step)
{
    bool decay = step->weight_decay != 0;
    if (greatest)
        NAME(adam_loop)(parameter, grad, mean, square, greatest, count, step, decay, true);
    else if (decay)
        NAME(adam_loop)(parameter, grad, mean, square, NULL, count, step, true, false);
    else
        NAME(adam_loop)(parameter, grad, mean, square, NULL, count, step, false, false);
}
