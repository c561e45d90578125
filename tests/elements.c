/* See elements.h. */
#include "elements.h"

#include "host_data.h"
#include "runner.h"

#include <tandem/ops.h>

#include <float.h>
#include <math.h>
#include <string.h>

const struct layout_case layout_cases[] = {
    {0, {0}, {"c", "c"}, 'c'},
    {1, {0}, {"c", "c"}, 'c'},
    {1, {1}, {"c", "c"}, 'c'},
    {1, {7}, {"c", "s"}, 'c'},
    {1, {2500}, {"c", "c"}, 'c'},
    {1, {2500}, {"s", "cb0"}, 's'},
    {1, {3000}, {"cb0", "cb0"}, 'c'},
    {2, {3, 0}, {"c", "c"}, 'c'},
    {2, {5, 3}, {"t", "c"}, 't'},
    {2, {40, 70}, {"t", "c"}, 'c'},
    {2, {40, 70}, {"c", "cb0"}, 'c'},
    {2, {40, 70}, {"cb1", "c"}, 't'},
    {2, {700, 3}, {"c", "cb0"}, 'c'},
    {2, {700, 3}, {"cb1", "cb0"}, 's'},
    {2, {3, 1500}, {"s", "cb1"}, 'c'},
    {3, {4, 5, 6}, {"s", "tb1"}, 'c'},
    {3, {2, 300, 9}, {"t", "t"}, 't'},
    {4, {2, 3, 4, 60}, {"tb1", "sb0b2"}, 's'},
    {8, {2, 1, 3, 2, 1, 2, 2, 3}, {"t", "cb3"}, 'c'},
    {8, {2, 2, 2, 2, 2, 2, 2, 2}, {"c", "sb1"}, 't'},
};
const int layout_cases_count = sizeof layout_cases / sizeof *layout_cases;

/* A tensor in the layout of this letter. */
static td_tensor *make(const int64_t *shape, int ndim, char letter, td_dtype dtype)
{
    int64_t sizes[TD_MAX_DIMS];
    memcpy(sizes, shape, sizeof sizes);
    int last = ndim - 1;
    if (ndim == 0 || letter == 'c')
        return td_zeros(sizes, ndim, dtype, NULL);
    if (letter == 't') {
        sizes[0] = shape[last];
        sizes[last] = shape[0];
        td_tensor *whole = td_zeros(sizes, ndim, dtype, NULL);
        td_tensor *view = td_transpose(whole, 0, -1);
        td_tensor_release(whole);
        return view;
    }
    sizes[last] = 3 * shape[last] + 1;
    sizes[0] += last > 0 ? 2 : 0;
    td_tensor *whole = td_zeros(sizes, ndim, dtype, NULL);
    td_tensor *some = td_slice(whole, -1, 1, INT64_MAX, 3);
    td_tensor *view = td_narrow(some, 0, last > 0 ? 1 : 0, shape[0]);
    td_tensor_release(whole);
    td_tensor_release(some);
    return view;
}

td_tensor *make_result(const struct layout_case *layout, td_dtype dtype)
{
    return make(layout->shape, layout->ndim, layout->result, dtype);
}

td_tensor *make_case(const struct layout_case *layout, int operand, td_dtype dtype, unsigned seed)
{
    const char *letters = layout->operands[operand];
    int64_t shape[TD_MAX_DIMS];
    memcpy(shape, layout->shape, sizeof shape);
    for (const char *at = letters + 1; *at; at += 2)
        shape[at[1] - '0'] = 1;
    td_tensor *tensor = make(shape, layout->ndim, letters[0], dtype);
    fill_numbers(tensor, seed);
    for (const char *at = letters + 1; *at; at += 2) {
        tensor->layout.numel *= layout->shape[at[1] - '0'];
        tensor->layout.shape[at[1] - '0'] = layout->shape[at[1] - '0'];
        tensor->layout.strides[at[1] - '0'] = 0;
    }
    return tensor;
}

static char *place(const td_tensor *tensor, int64_t number)
{
    int64_t at = 0;
    for (int d = td_tensor_ndim(tensor); d-- > 0;) {
        at += number % td_tensor_size(tensor, d) * td_tensor_stride(tensor, d);
        number /= td_tensor_size(tensor, d);
    }
    return (char *)td_tensor_data(tensor) + at * (int64_t)td_dtype_size(td_tensor_dtype(tensor));
}

double element(const td_tensor *tensor, int64_t number)
{
    const void *at = td__on_host(tensor)
                         ? place(tensor, number)
                         : (const char *)host_data(tensor) +
                               number * (int64_t)td_dtype_size(td_tensor_dtype(tensor));
    switch (td_tensor_dtype(tensor)) {
    case TD_F32:
    case TD_COMPLEX64:
        return *(float *)at;
    case TD_F16:
        return td_f16_to_f32(*(uint16_t *)at);
    case TD_BF16:
        return td_bf16_to_f32(*(uint16_t *)at);
    case TD_I8:
        return *(int8_t *)at;
    case TD_U8:
        return *(uint8_t *)at;
    case TD_BOOL:
        return *(uint8_t *)at != 0;
    case TD_I16:
        return *(int16_t *)at;
    case TD_I32:
        return *(int32_t *)at;
    case TD_I64:
        return (double)*(int64_t *)at;
    case TD_U32:
        return *(uint32_t *)at;
    case TD_U64:
        return (double)*(uint64_t *)at;
    default:
        return *(double *)at;
    }
}

void set_element(td_tensor *tensor, int64_t number, double value)
{
    if (td_tensor_numel(tensor) == 0)
        return;
    td_dtype dtype = td_tensor_dtype(tensor);
    {
        TD_SCOPE;
        td_tensor *one = td_full(NULL, 0, value, dtype, td_device_get("cpu"));
        CHECK(one);
        memcpy(place(tensor, number), td_tensor_data(one), td_dtype_size(dtype));
    }
}

void fill_numbers(td_tensor *tensor, unsigned seed)
{
    td_dtype dtype = td_tensor_dtype(tensor);
    uint64_t state = seed * UINT64_C(0x9e3779b97f4a7c15) + 1;
    for (int64_t i = 0; i < td_tensor_numel(tensor); i++) {
        state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        int number = (int)(state >> 40) % 10;
        bool is_float = dtype <= TD_BF16 || dtype >= TD_COMPLEX64;
        bool is_signed = is_float || (dtype != TD_U8 && dtype != TD_U32 && dtype != TD_U64);
        double value = number + 1;
        if (is_signed && state >> 63)
            value = -value;
        set_element(tensor, i, is_float ? value * 0.375 : dtype == TD_BOOL ? number % 2 : value);
    }
}

static double unit_of(td_dtype dtype)
{
    switch (dtype) {
    case TD_F32:
    case TD_COMPLEX64:
        return FLT_EPSILON;
    case TD_F16:
        return 0x1p-10;
    case TD_BF16:
        return 0x1p-7;
    default:
        return DBL_EPSILON;
    }
}

/* Wraps a whole number around into the range of an integer dtype. */
static double wrapped(double value, td_dtype dtype)
{
    if (dtype <= TD_BF16 || dtype >= TD_BOOL)
        return value;
    double range = ldexp(1, 8 * (int)td_dtype_size(dtype));
    bool is_signed = dtype != TD_U8 && dtype != TD_U32 && dtype != TD_U64;
    double least = is_signed ? -range / 2 : 0;
    if (value >= least && value < least + range)
        return value;
    double rest = value - range * floor(value / range);
    return is_signed && rest >= range / 2 ? rest - range : rest;
}

void check_units(double value, double right, double units, const td_tensor *tensor, int64_t number)
{
    td_dtype dtype = td_tensor_dtype(tensor);
    right = wrapped(right, dtype);
    double allowed = units * unit_of(dtype) * fabs(right);
    bool same = (isnan(value) && isnan(right)) || value == right || fabs(value - right) <= allowed;
    if (!same)
        FAIL("element %lld of a tensor of %s is %.17g, and should be %.17g", (long long)number,
             td_dtype_name(dtype), value, right);
}

void check_close(double value, double right, const td_tensor *tensor, int64_t number)
{
    check_units(value, right, 3, tensor, number);
}
