/* Sums and maxima of a line of numbers, in vector lanes: lane i has the elements i, i + LANES, …, and the
 * lanes are added by halves at the end. Compilers may not do that by themselves, since it reorders the
 * additions. It is fast, and the error grows like n / LANES rather than like n.
 *
 * Included by real_f32.h and real_f64.h, once each in a source file. */

#ifndef LANES
#define LANES ((int64_t)(64 / sizeof(REAL)))
#define LANES_ADD(a, b) ((a) + (b))
#endif

typedef REAL NAME(lanes) __attribute__((vector_size(64)));

TD__INLINE NAME(lanes) NAME(load)(const REAL *x)
{
    NAME(lanes) v;
    memcpy(&v, x, sizeof v);
    return v;
}

TD__INLINE NAME(lanes) NAME(greater)(NAME(lanes) a, NAME(lanes) b)
{
    __typeof__(a > b) is = a > b;
    return (NAME(lanes))((is & (__typeof__(is))a) | (~is & (__typeof__(is))b));
}

TD__INLINE REAL NAME(fold_sum)(NAME(lanes) v)
{
    FOLD(v, LANES_ADD);
    return v[0];
}

TD__INLINE REAL NAME(sum)(const REAL *x, int64_t n)
{
    NAME(lanes) a = {0}, b = {0};
    int64_t i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES) {
        a += NAME(load)(x + i);
        b += NAME(load)(x + i + LANES);
    }
    if (i + LANES <= n) {
        a += NAME(load)(x + i);
        i += LANES;
    }
    REAL rest = 0;
    for (; i < n; i++)
        rest += x[i];
    return n < LANES ? rest : NAME(fold_sum)(a + b) + rest;
}

/* The sum of a[i] b[i]. */
TD__INLINE REAL NAME(dot)(const REAL *a, const REAL *b, int64_t n)
{
    NAME(lanes) s = {0}, t = {0};
    int64_t i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES) {
        s += NAME(load)(a + i) * NAME(load)(b + i);
        t += NAME(load)(a + i + LANES) * NAME(load)(b + i + LANES);
    }
    if (i + LANES <= n) {
        s += NAME(load)(a + i) * NAME(load)(b + i);
        i += LANES;
    }
    REAL rest = 0;
    for (; i < n; i++)
        rest += a[i] * b[i];
    return n < LANES ? rest : NAME(fold_sum)(s + t) + rest;
}

/* The maximum; -infinity without elements. NaN may be ignored. */
TD__INLINE REAL NAME(max)(const REAL *x, int64_t n)
{
    REAL most = -INFINITY;
    int64_t i = 0;
    if (n >= LANES) {
        NAME(lanes) m = NAME(load)(x);
        for (i = LANES; i + LANES <= n; i += LANES)
            m = NAME(greater)(NAME(load)(x + i), m);
        FOLD(m, NAME(greater));
        most = m[0];
    }
    for (; i < n; i++)
        most = x[i] > most ? x[i] : most;
    return most;
}

/* The sum of x[i] - from and that of its square. */
TD__INLINE void NAME(moments)(const REAL *x, int64_t n, REAL from, REAL *first, REAL *second)
{
    NAME(lanes) s = {0}, t = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        NAME(lanes) d = NAME(load)(x + i) - from;
        s += d;
        t += d * d;
    }
    REAL s_rest = 0, t_rest = 0;
    for (; i < n; i++) {
        s_rest += x[i] - from;
        t_rest += (x[i] - from) * (x[i] - from);
    }
    *first = NAME(fold_sum)(s) + s_rest;
    *second = NAME(fold_sum)(t) + t_rest;
}

/* The sum of a[i] (b[i] - from). */
TD__INLINE REAL NAME(shifted_dot)(const REAL *a, const REAL *b, REAL from, int64_t n)
{
    NAME(lanes) s = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        s += NAME(load)(a + i) * (NAME(load)(b + i) - from);
    REAL rest = 0;
    for (; i < n; i++)
        rest += a[i] * (b[i] - from);
    return NAME(fold_sum)(s) + rest;
}
