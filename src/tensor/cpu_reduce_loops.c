/* The loops of reductions.
 *
 * A row is reduced in 8 vectors of 32 bytes, columns by eight rows at a time, in a tree. Totals are f64 for all
 * floats, and a row is passed in stretches of bounded length. So the error of an f32 sum does not grow with the
 * number of elements, and the order of the additions depends on the shape only.
 *
 * The inline functions get the kind as a constant, so that each kind becomes a loop of its own. */
#include "tensor/cpu_reduce.h"
#include "tensor/vector.h"

#include <math.h>

#define ALWAYS static inline __attribute__((always_inline))

typedef td_reduce_kind kind;

/* Vectors of 32 bytes: GCC splits larger ones through memory where the processor has no registers for them. They need
 * no more alignment than their elements. */
typedef float f32x8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef double f64x4 __attribute__((vector_size(32), aligned(8), may_alias));

/* The neutral element. */
ALWAYS double neutral(kind k)
{
    switch (k) {
    case TD_REDUCE_KIND_PROD:
        return 1;
    case TD_REDUCE_KIND_MAX:
        return -INFINITY;
    case TD_REDUCE_KIND_MIN:
        return INFINITY;
    default:
        return 0;
    }
}

/* The kind that combines the totals of several stretches. */
ALWAYS kind joining(kind k)
{
    return k == TD_REDUCE_KIND_SQUARES ? TD_REDUCE_KIND_SUM : k;
}

/* A loop for each kind, out of inline functions that take it as a constant. */
#define FOR_EACH_KIND(k, call, name)                                                               \
    switch (k) {                                                                                   \
    case TD_REDUCE_KIND_PROD:                                                                          \
        call(, name, TD_REDUCE_KIND_PROD);                                                             \
        break;                                                                                     \
    case TD_REDUCE_KIND_MAX:                                                                           \
        call(extreme_, name, TD_REDUCE_KIND_MAX);                                                      \
        break;                                                                                     \
    case TD_REDUCE_KIND_MIN:                                                                           \
        call(extreme_, name, TD_REDUCE_KIND_MIN);                                                      \
        break;                                                                                     \
    case TD_REDUCE_KIND_SQUARES:                                                                       \
        call(, name, TD_REDUCE_KIND_SQUARES);                                                          \
        break;                                                                                     \
    default:                                                                                       \
        call(, name, TD_REDUCE_KIND_SUM);                                                              \
    }
#define CALL_ROW(prefix, name, k) prefix##row_of_##name(k, total, x, count)
#define CALL_COLUMNS(prefix, name, k) prefix##columns_of_##name(k, total, rows, n, count)

/* ---- Lanes become one number, by halves: sums and products ------------------------------------- */

ALWAYS f64x4 join_lanes(kind k, f64x4 a, f64x4 b)
{
    return k == TD_REDUCE_KIND_PROD ? a * b : a + b;
}

ALWAYS double fold_f64(kind k, f64x4 low, f64x4 high)
{
    f64x4 v = join_lanes(k, low, high);
    v = join_lanes(k, v, __builtin_shufflevector(v, v, 2, 3, 0, 1));
    v = join_lanes(k, v, __builtin_shufflevector(v, v, 1, 0, 3, 2));
    return v[0];
}

ALWAYS f64x4 widen_low(f32x8 v)
{
    return __builtin_convertvector(__builtin_shufflevector(v, v, 0, 1, 2, 3), f64x4);
}

ALWAYS f64x4 widen_high(f32x8 v)
{
    return __builtin_convertvector(__builtin_shufflevector(v, v, 4, 5, 6, 7), f64x4);
}

ALWAYS double fold_f32(kind k, f32x8 low, f32x8 high)
{
    return fold_f64(k, join_lanes(k, widen_low(low), widen_low(high)),
                    join_lanes(k, widen_high(low), widen_high(high)));
}

/* ---- Floats ------------------------------------------------------------------------------------
 *
 * T is the element, V a vector of LANES of them. NaN propagates. */

#define FLOATS(name, T, V, LANES)                                                                      \
    ALWAYS T step_##name(kind k, T total, T x)                                                         \
    {                                                                                                  \
        T best;                                                                                        \
        switch (k) {                                                                                   \
        case TD_REDUCE_KIND_PROD:                                                                          \
            return total * x;                                                                          \
        case TD_REDUCE_KIND_MAX:                                                                           \
            best = x > total ? x : total;                                                              \
            return x != x ? x : best;                                                                  \
        case TD_REDUCE_KIND_MIN:                                                                           \
            best = x < total ? x : total;                                                              \
            return x != x ? x : best;                                                                  \
        case TD_REDUCE_KIND_SQUARES:                                                                       \
            return total + x * x;                                                                      \
        default:                                                                                       \
            return total + x;                                                                          \
        }                                                                                              \
    }                                                                                                  \
                                                                                                       \
    ALWAYS V vector_step_##name(kind k, V total, V x)                                                  \
    {                                                                                                  \
        return k == TD_REDUCE_KIND_PROD      ? total * x                                                   \
               : k == TD_REDUCE_KIND_SQUARES ? total + x * x                                               \
                                         : total + x;                                                  \
    }                                                                                                  \
                                                                                                       \
    /* Not every compiler can split a comparison of vectors. */                                        \
    ALWAYS void extreme_row_of_##name(kind k, double *total, const T *x, int64_t count)                \
    {                                                                                                  \
        T lanes[8 * LANES], rest = (T)neutral(k);                                                      \
        int64_t i = 0;                                                                                 \
        for (int lane = 0; lane < 8 * LANES; lane++)                                                   \
            lanes[lane] = rest;                                                                        \
        for (; i + 8 * LANES <= count; i += 8 * LANES)                                                 \
            for (int lane = 0; lane < 8 * LANES; lane++)                                               \
                lanes[lane] = step_##name(k, lanes[lane], x[i + lane]);                                \
        for (; i < count; i++)                                                                         \
            rest = step_##name(k, rest, x[i]);                                                         \
        if (count >= 8 * LANES)                                                                        \
            for (int lane = 0; lane < 8 * LANES; lane++)                                               \
                rest = step_##name(k, rest, lanes[lane]);                                              \
        *total = step_f64(k, *total, (double)rest);                                                    \
    }                                                                                                  \
                                                                                                       \
    ALWAYS void row_of_##name(kind k, double *total, const T *x, int64_t count)                        \
    {                                                                                                  \
        kind join = joining(k);                                                                        \
        T rest = (T)neutral(k);                                                                        \
        V t[8];                                                                                        \
        int64_t i = 0;                                                                                 \
        for (int v = 0; v < 8; v++)                                                                    \
            t[v] = (V){0} + rest;                                                                      \
        for (; i + 8 * LANES <= count; i += 8 * LANES)                                                 \
            for (int v = 0; v < 8; v++)                                                                \
                t[v] = vector_step_##name(k, t[v], *(const V *)(x + i + v * LANES));                   \
        for (; i + 2 * LANES <= count; i += 2 * LANES)                                                 \
            for (int v = 0; v < 2; v++)                                                                \
                t[v] = vector_step_##name(k, t[v], *(const V *)(x + i + v * LANES));                   \
        for (int v = 0; v < 2; v++)                                                                    \
            t[v] = vector_step_##name(join, vector_step_##name(join, t[v], t[v + 2]),                  \
                                      vector_step_##name(join, t[v + 4], t[v + 6]));                   \
        for (; i < count; i++)                                                                         \
            rest = step_##name(k, rest, x[i]);                                                         \
        double sum = rest;                                                                             \
        if (count >= 2 * LANES)                                                                        \
            sum = step_f64(join, sum, fold_##name(join, t[0], t[1]));                                  \
        *total = step_f64(join, *total, sum);                                                          \
    }                                                                                                  \
                                                                                                       \
    /* The best of eight rows, in the type itself: a comparison in two types is not vectorised. With \
     * fewer rows some are repeated. */ \
    ALWAYS void extreme_columns_of_##name(kind k, double *restrict total,                              \
                                          const void *const rows[], int n, int64_t count)              \
    {                                                                                                  \
        const T *x[TD__REDUCE_ROWS];                                                                   \
        for (int r = 0; r < TD__REDUCE_ROWS; r++)                                                      \
            x[r] = rows[r < n ? r : 0];                                                                \
        T best[TD__REDUCE_COLUMNS];                                                                    \
        for (int64_t i = 0; i < count; i++) {                                                          \
            T a = step_##name(k, x[0][i], x[1][i]), b = step_##name(k, x[2][i], x[3][i]);              \
            T c = step_##name(k, x[4][i], x[5][i]), d = step_##name(k, x[6][i], x[7][i]);              \
            best[i] = step_##name(k, step_##name(k, a, b), step_##name(k, c, d));                      \
        }                                                                                              \
        for (int64_t i = 0; i < count; i++)                                                            \
            total[i] = step_f64(k, total[i], (double)best[i]);                                         \
    }                                                                                                  \
                                                                                                       \
    ALWAYS void columns_of_##name(kind k, double *restrict total, const void *const rows[], int n,     \
                                  int64_t count)                                                       \
    {                                                                                                  \
        kind join = joining(k);                                                                        \
        T none = (T)neutral(k);                                                                        \
        if (n < TD__REDUCE_ROWS) {                                                                     \
            for (int r = 0; r < n; r++) {                                                              \
                const T *restrict x = rows[r];                                                         \
                for (int64_t i = 0; i < count; i++)                                                    \
                    total[i] = step_f64(join, total[i], (double)step_##name(k, none, x[i]));           \
            }                                                                                          \
            return;                                                                                    \
        }                                                                                              \
        const T *restrict x0 = rows[0], *restrict x1 = rows[1], *restrict x2 = rows[2];                \
        const T *restrict x3 = rows[3], *restrict x4 = rows[4], *restrict x5 = rows[5];                \
        const T *restrict x6 = rows[6], *restrict x7 = rows[7];                                        \
        for (int64_t i = 0; i < count; i++) {                                                          \
            T a = step_##name(k, step_##name(k, none, x0[i]), x1[i]);                                  \
            T b = step_##name(k, step_##name(k, none, x2[i]), x3[i]);                                  \
            T c = step_##name(k, step_##name(k, none, x4[i]), x5[i]);                                  \
            T d = step_##name(k, step_##name(k, none, x6[i]), x7[i]);                                  \
            T sum = step_##name(join, step_##name(join, a, b), step_##name(join, c, d));               \
            total[i] = step_f64(join, total[i], (double)sum);                                          \
        }                                                                                              \
    }                                                                                                  \
                                                                                                       \
    static TD__VECTOR void row_##name(kind k, void *total, const void *x, int64_t count)               \
    {                                                                                                  \
        FOR_EACH_KIND(k, CALL_ROW, name)                                                               \
    }                                                                                                  \
                                                                                                       \
    static TD__VECTOR void columns_##name(kind k, void *total, const void *const rows[], int n,        \
                                          int64_t count)                                               \
    {                                                                                                  \
        FOR_EACH_KIND(k, CALL_COLUMNS, name)                                                           \
    }

FLOATS(f64, double, f64x4, 4)
FLOATS(f32, float, f32x8, 8)

const struct td__reducer td__reducer_f64 = {TD_F64, TD_F64, row_f64, columns_f64};
const struct td__reducer td__reducer_f32 = {TD_F32, TD_F64, row_f32, columns_f32};

/* ---- Integers: they wrap around ---------------------------------------------------------------- */

ALWAYS int64_t step_i64(kind k, int64_t total, int64_t x)
{
    switch (k) {
    case TD_REDUCE_KIND_PROD:
        return (int64_t)((uint64_t)total * (uint64_t)x);
    case TD_REDUCE_KIND_MAX:
        return x > total ? x : total;
    case TD_REDUCE_KIND_MIN:
        return x < total ? x : total;
    default:
        return (int64_t)((uint64_t)total + (uint64_t)x);
    }
}

ALWAYS void row_of_i64(kind k, int64_t *total, const int64_t *x, int64_t count)
{
    int64_t sum = *total;
    for (int64_t i = 0; i < count; i++)
        sum = step_i64(k, sum, x[i]);
    *total = sum;
}

ALWAYS void columns_of_i64(kind k, int64_t *restrict total, const void *const rows[], int n,
                           int64_t count)
{
    for (int r = 0; r < n; r++) {
        const int64_t *restrict x = rows[r];
        for (int64_t i = 0; i < count; i++)
            total[i] = step_i64(k, total[i], x[i]);
    }
}

#define extreme_row_of_i64 row_of_i64
#define extreme_columns_of_i64 columns_of_i64

static TD__VECTOR void row_i64(kind k, void *total, const void *x, int64_t count)
{
    FOR_EACH_KIND(k, CALL_ROW, i64)
}

static TD__VECTOR void columns_i64(kind k, void *total, const void *const rows[], int n,
                                   int64_t count)
{
    FOR_EACH_KIND(k, CALL_COLUMNS, i64)
}

const struct td__reducer td__reducer_i64 = {TD_I64, TD_I64, row_i64, columns_i64};

/* ---- Complex numbers: sum and product ---------------------------------------------------------- */

static void step_complex(kind k, double *total, const double *x)
{
    double re = total[0], im = total[1];
    total[0] = k == TD_REDUCE_KIND_PROD ? re * x[0] - im * x[1] : re + x[0];
    total[1] = k == TD_REDUCE_KIND_PROD ? re * x[1] + im * x[0] : im + x[1];
}

static void row_complex(kind k, void *total, const void *x, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        step_complex(k, total, (const double *)x + 2 * i);
}

static void columns_complex(kind k, void *total, const void *const rows[], int n, int64_t count)
{
    for (int r = 0; r < n; r++)
        for (int64_t i = 0; i < count; i++)
            step_complex(k, (double *)total + 2 * i, (const double *)rows[r] + 2 * i);
}

const struct td__reducer td__reducer_complex128 = {TD_COMPLEX128, TD_COMPLEX128, row_complex,
                                                   columns_complex};
