#include "kernel_numbers.h"

#include <math.h>
#include <stdarg.h>

static uint64_t state = 88172645463325252u;

static uint64_t any_bits(void)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

double any_number(void)
{
    return (double)(int64_t)any_bits() * 0x1p-63;
}

int64_t any_integer(int64_t below)
{
    return (int64_t)(any_bits() % (uint64_t)below);
}

td_dtype statistics_of(td_dtype dtype)
{
    return dtype == TD_F64 ? TD_F64 : TD_F32;
}

td_tensor *any_tensor(const int64_t *shape, int ndim, td_dtype dtype, double size)
{
    td_tensor *tensor = td_empty(shape, ndim, dtype, NULL);
    CHECK(tensor);
    for (int64_t i = 0; i < td_tensor_numel(tensor); i++)
        put_number(tensor, i, any_number() * size);
    return tensor;
}

double number_at(const td_tensor *tensor, int64_t i)
{
    void *data = td_tensor_data(tensor);
    switch (td_tensor_dtype(tensor)) {
    case TD_F32:
        return (double)((float *)data)[i];
    case TD_F64:
        return ((double *)data)[i];
    case TD_F16:
        return (double)td_f16_to_f32(((uint16_t *)data)[i]);
    case TD_BF16:
        return (double)td_bf16_to_f32(((uint16_t *)data)[i]);
    default:
        FAIL("no float");
    }
}

void put_number(td_tensor *tensor, int64_t i, double value)
{
    void *data = td_tensor_data(tensor);
    switch (td_tensor_dtype(tensor)) {
    case TD_F32:
        ((float *)data)[i] = (float)value;
        break;
    case TD_F64:
        ((double *)data)[i] = value;
        break;
    case TD_F16:
        ((uint16_t *)data)[i] = td_f32_to_f16((float)value);
        break;
    case TD_BF16:
        ((uint16_t *)data)[i] = td_f32_to_bf16((float)value);
        break;
    default:
        FAIL("no float");
    }
}

double *numbers_of(const td_tensor *tensor)
{
    int64_t n = td_tensor_numel(tensor);
    double *numbers = malloc((size_t)n * sizeof *numbers + 1);
    CHECK(numbers);
    for (int64_t i = 0; i < n; i++)
        numbers[i] = number_at(tensor, i);
    return numbers;
}

static double unit_of(td_dtype dtype)
{
    switch (dtype) {
    case TD_F64:
        return 0x1p-52;
    case TD_F32:
        return 0x1p-23;
    case TD_F16:
        return 0x1p-10;
    default:
        return 0x1p-7;
    }
}

void check_sized(const char *what, const td_tensor *tensor, const double *expected, double factor,
                 double size)
{
    double most = size;
    int64_t n = td_tensor_numel(tensor);
    for (int64_t i = 0; i < n; i++)
        if (isfinite(expected[i]) && fabs(expected[i]) > most)
            most = fabs(expected[i]);
    double bound = factor * unit_of(td_tensor_dtype(tensor)) * most;
    for (int64_t i = 0; i < n; i++) {
        double got = number_at(tensor, i);
        bool same = isfinite(expected[i])
                        ? fabs(got - expected[i]) <= bound
                        : got == expected[i] || (isnan(got) && isnan(expected[i]));
        if (!same)
            FAIL("%s, %s: element %lld is %.17g, expected %.17g (up to %g)", what,
                 td_dtype_name(td_tensor_dtype(tensor)), (long long)i, got, expected[i], bound);
    }
}

void check_numbers(const char *what, const td_tensor *tensor, const double *expected, double factor)
{
    check_sized(what, tensor, expected, factor, 1e-3);
}

void check_slopes(const char *what, td_tensor *x, const td_tensor *grad,
                  double (*loss)(const void *arg), const void *arg)
{
    const double step = 1e-6;
    for (int64_t i = 0; i < td_tensor_numel(x); i++) {
        double old = number_at(x, i);
        put_number(x, i, old + step);
        double above = loss(arg);
        put_number(x, i, old - step);
        double below = loss(arg);
        put_number(x, i, old);
        double slope = (above - below) / (2 * step), got = number_at(grad, i);
        if (!(fabs(slope - got) <= 1e-7 * fmax(1, fabs(slope))))
            FAIL("%s: the slope along element %lld is %.12g, the gradient %.12g", what,
                 (long long)i, slope, got);
    }
}

double sum_of_products(const td_tensor *a, const td_tensor *b)
{
    double sum = 0;
    for (int64_t i = 0; i < td_tensor_numel(a); i++)
        sum += number_at(a, i) * number_at(b, i);
    return sum;
}

void release_all(td_tensor *first, ...)
{
    va_list list;
    va_start(list, first);
    for (td_tensor *tensor = first; tensor; tensor = va_arg(list, td_tensor *))
        td_tensor_release(tensor);
    va_end(list);
}
