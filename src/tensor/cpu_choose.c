/* Kernels that choose between elements: where and clamp. */
#include "tensor/cpu_elementwise.h"

#include "base/fail.h"
#include "tensor/cpu_each.h"
#include "tensor/vector.h"

#include <math.h>
#include <string.h>

#define CHOOSE(T)                                                                                  \
    do {                                                                                           \
        T *o = out;                                                                                \
        const T *x = a, *y = b;                                                                    \
        TD__INDEPENDENT                                                                            \
        for (int64_t i = 0; i < count; i++)                                                        \
            o[i] = condition[i] ? x[i] : y[i];                                                     \
    } while (0)

static TD__VECTOR void choose(const uint8_t *condition, void *out, const void *a, const void *b,
                              int64_t count, size_t size)
{
    switch (size) {
    case 1:
        CHOOSE(uint8_t);
        break;
    case 2:
        CHOOSE(uint16_t);
        break;
    case 4:
        CHOOSE(uint32_t);
        break;
    case 8:
        CHOOSE(uint64_t);
        break;
    default:
        for (int64_t i = 0; i < count; i++)
            memmove((char *)out + 16 * i, (const char *)(condition[i] ? a : b) + 16 * i, 16);
    }
}

static void run_where(void *const arrays[], int64_t count, const void *arg)
{
    choose(arrays[1], arrays[0], arrays[2], arrays[3], count, *(const size_t *)arg);
}

td_status td__cpu_where(td_tensor *out, const td_tensor *condition, const td_tensor *a,
                        const td_tensor *b)
{
    struct td__each_array arrays[] = {td__each_array(out), td__each_array(condition),
                                      td__each_array(a), td__each_array(b)};
    size_t size = td_dtype_size(out->layout.dtype);
    td__each_run(&out->layout, arrays, 4, true, run_where, &size);
    return TD_OK;
}

struct bounds {
    td_dtype dtype;
    double low, high;
};

/* NaN fails both comparisons and stays. */
#define CLAMP(T, least, greatest)                                                                  \
    do {                                                                                           \
        T *o = out;                                                                                \
        const T *x = a;                                                                            \
        T low = (least), high = (greatest);                                                        \
        TD__INDEPENDENT                                                                            \
        for (int64_t i = 0; i < count; i++) {                                                      \
            T value = x[i] < low ? low : x[i];                                                     \
            o[i] = value > high ? high : value;                                                    \
        }                                                                                          \
    } while (0)

/* The bounds of an integer are rounded inwards, and clamped to the range of its type. */
#define CLAMP_INTEGER(T, least, greatest)                                                          \
    CLAMP(T,                                                                                       \
          bounds->low <= (double)(least)      ? (least)                                            \
          : bounds->low >= (double)(greatest) ? (greatest)                                         \
                                              : (T)ceil(bounds->low),                              \
          bounds->high >= (double)(greatest) ? (greatest)                                          \
          : bounds->high <= (double)(least)  ? (least)                                             \
                                             : (T)floor(bounds->high))

static TD__VECTOR void clamp(const struct bounds *bounds, void *out, const void *a, int64_t count)
{
    switch (bounds->dtype) {
    case TD_F32:
        CLAMP(float, (float)bounds->low, (float)bounds->high);
        break;
    case TD_F64:
        CLAMP(double, bounds->low, bounds->high);
        break;
    case TD_I8:
        CLAMP_INTEGER(int8_t, INT8_MIN, INT8_MAX);
        break;
    case TD_U8:
        CLAMP_INTEGER(uint8_t, 0, UINT8_MAX);
        break;
    case TD_I16:
        CLAMP_INTEGER(int16_t, INT16_MIN, INT16_MAX);
        break;
    case TD_I32:
        CLAMP_INTEGER(int32_t, INT32_MIN, INT32_MAX);
        break;
    case TD_U32:
        CLAMP_INTEGER(uint32_t, 0, UINT32_MAX);
        break;
    case TD_I64:
        CLAMP_INTEGER(int64_t, INT64_MIN, INT64_MAX);
        break;
    default:
        CLAMP_INTEGER(uint64_t, 0, UINT64_MAX);
    }
}

static void run_clamp(void *const arrays[], int64_t count, const void *arg)
{
    clamp(arg, arrays[0], arrays[1], count);
}

td_status td__cpu_clamp(td_tensor *out, const td_tensor *x, double low, double high)
{
    td_dtype dtype = x->layout.dtype;
    if (dtype >= TD_BOOL)
        return td_fail(TD_ERR_UNSUPPORTED, "clamp: not supported for %s", td_dtype_name(dtype));
    if (isnan(low) || isnan(high))
        return td_fail(TD_ERR_INVALID, "clamp: a bound is NaN");
    struct bounds bounds = {td__compute_dtype(dtype), low, high};
    td__each_tensors(out, x, NULL, NULL, run_clamp, &bounds);
    return TD_OK;
}
