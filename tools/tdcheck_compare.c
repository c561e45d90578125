/* Tolerances. A result of a floating-point dtype may differ from the host's by
 *
 *     units * epsilon * magnitude
 *
 * where epsilon is the distance from 1 to the next number of the dtype, and magnitude is what was added up on the way:
 * that of the element itself for elementwise functions, of the greatest element where all of a row enter each (softmax,
 * norms), and for sums and products the same operator over absolute values, in f64. So a device may add in any order,
 * but not with fewer bits. Halves are computed in f32 and rounded once: both sides may be on different sides of the
 * point where rounding changes, which is 1 unit. */
#include "tdcheck.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* Of a dtype: the distance from 1 to the next number, and the least number above 0. */
struct precision {
    double epsilon, least;
};

static struct precision precision_of(td_dtype dtype)
{
    switch (dtype) {
    case TD_F64:
    case TD_COMPLEX128:
        return (struct precision){0x1p-52, 0x1p-1074};
    case TD_F16:
        return (struct precision){0x1p-10, 0x1p-24};
    case TD_BF16:
        return (struct precision){0x1p-7, 0x1p-133};
    default:
        return (struct precision){0x1p-23, 0x1p-149};
    }
}

static bool is_float(td_dtype dtype)
{
    return BIT(dtype) & (FLOATS | COMPLEX);
}

/* The numbers of a tensor as f64; a complex element is two. Belongs to the scope. */
static td_tensor *widen(td_tensor *tensor, int64_t *count)
{
    td_dtype dtype = td_tensor_dtype(tensor);
    bool is_complex = BIT(dtype) & COMPLEX;
    *count = td_tensor_numel(tensor) * (is_complex ? 2 : 1);
    return td_to_dtype(tensor, is_complex ? TD_COMPLEX128 : TD_F64);
}

static double greatest(const double *x, int64_t count)
{
    double most = 0;
    for (int64_t i = 0; i < count; i++)
        if (isfinite(x[i]))
            most = fmax(most, fabs(x[i]));
    return most;
}

static void note(struct check_difference *difference, int64_t at, double a, double b)
{
    if (difference->at >= 0)
        return;
    difference->at = at;
    snprintf(difference->text, sizeof difference->text,
             "element %lld is %.9g on the host and %.9g on the device", (long long)at, a, b);
}

static struct check_difference compare_bits(td_tensor *expected, td_tensor *found)
{
    struct check_difference difference = {.at = -1};
    size_t size = td_dtype_size(td_tensor_dtype(expected));
    td_tensor *a = td_contiguous(expected), *b = td_contiguous(found);
    for (int64_t i = 0; i < td_tensor_numel(a) && difference.at < 0; i++) {
        const unsigned char *x = (unsigned char *)td_tensor_data(a) + (size_t)i * size;
        const unsigned char *y = (unsigned char *)td_tensor_data(b) + (size_t)i * size;
        if (memcmp(x, y, size) == 0)
            continue;
        char bits[2][40];
        for (size_t at = 0; at < size; at++) {
            snprintf(bits[0] + 2 * at, 3, "%02x", x[size - 1 - at]);
            snprintf(bits[1] + 2 * at, 3, "%02x", y[size - 1 - at]);
        }
        difference.at = i;
        difference.worst = INFINITY;
        snprintf(difference.text, sizeof difference.text,
                 "element %lld is 0x%s on the host and 0x%s on the device", (long long)i, bits[0],
                 bits[1]);
    }
    return difference;
}

static bool same_shape(td_tensor *a, td_tensor *b)
{
    if (td_tensor_dtype(a) != td_tensor_dtype(b) || td_tensor_ndim(a) != td_tensor_ndim(b))
        return false;
    for (int d = 0; d < td_tensor_ndim(a); d++)
        if (td_tensor_size(a, d) != td_tensor_size(b, d))
            return false;
    return true;
}

struct check_difference check_compare(td_tensor *expected, td_tensor *found, td_tensor *magnitude,
                                      enum check_measure measure, double units)
{
    TD_SCOPE;
    TD_NO_GRAD;
    struct check_difference difference = {.at = -1};
    td_dtype dtype = td_tensor_dtype(expected);
    if (!same_shape(expected, found)) {
        difference.worst = INFINITY;
        difference.at = 0;
        snprintf(difference.text, sizeof difference.text, "shapes or dtypes differ");
        return difference;
    }
    if (measure == MEASURE_BITS || !is_float(dtype))
        return compare_bits(expected, found);
    int64_t count, same;
    bool is_complex = BIT(dtype) & COMPLEX;
    td_tensor *wide_a = td_contiguous(widen(expected, &count));
    td_tensor *wide_b = td_contiguous(widen(found, &same));
    td_tensor *wide_m = magnitude ? td_contiguous(magnitude) : NULL;
    const double *a = td_tensor_data(wide_a), *b = td_tensor_data(wide_b);
    const double *m = wide_m && td_tensor_numel(wide_m) == count ? td_tensor_data(wide_m) : NULL;
    double floor_of_all = measure == MEASURE_LARGEST ? greatest(a, count) : 0;
    double unit = measure == MEASURE_EQUAL ? 0 : units * precision_of(dtype).epsilon;
    for (int64_t i = 0; i < count; i++) {
        if (a[i] == b[i] || (isnan(a[i]) && isnan(b[i])))
            continue;
        double scale = fmax(fabs(a[i]), floor_of_all);
        if (is_complex && isfinite(a[i ^ 1])) /* one part may be what is left of two that cancel */
            scale = fmax(scale, fabs(a[i ^ 1]));
        if (m && isfinite(m[i]))
            scale = fmax(scale, fabs(m[i]));
        double allowed = unit > 0 ? fmax(unit * scale, units * precision_of(dtype).least) : 0;
        double part = allowed > 0 ? fabs(a[i] - b[i]) / allowed : INFINITY;
        if (!(part <= 1)) {
            part = isnan(part) ? INFINITY : part;
            note(&difference, i, a[i], b[i]);
        }
        difference.worst = fmax(difference.worst, part);
    }
    return difference;
}
