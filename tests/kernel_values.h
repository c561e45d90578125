/* What the tests of the kernels share: tensors of random numbers, element by element access, and
 * comparison with results in double. */
#ifndef TANDEM_TESTS_KERNEL_VALUES_H
#define TANDEM_TESTS_KERNEL_VALUES_H

#include "runner.h"

#include <tandem/ops.h>

#include "base/half.h"
#include "tensor/tensor_internal.h"

#include <math.h>
#include <string.h>

#define SHAPE(...) TD_SHAPE(__VA_ARGS__)
#define KERNELS (&td__cpu_kernels)

__attribute__((unused)) static const td_dtype floats[] = {TD_F32, TD_F64, TD_F16, TD_BF16};

/* ---- Tensors of random numbers ---------------------------------------------------------------- */

static uint64_t seed = 1;

/* Between -1 and 1, with few bits, so that halves hold it exactly. */
static inline double draw(void)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (double)((int64_t)(seed >> 33) % 129 - 64) / 64;
}

static inline int64_t below(int64_t limit)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (int64_t)((seed >> 33) % (uint64_t)limit);
}

/* The address of the element with this number, in the order of the indices. */
static inline void *place(const td_tensor *tensor, int64_t number)
{
    int64_t at = 0;
    for (int d = td_tensor_ndim(tensor); d-- > 0;) {
        at += number % td_tensor_size(tensor, d) * td_tensor_stride(tensor, d);
        number /= td_tensor_size(tensor, d);
    }
    return (char *)td_tensor_data(tensor) + at * (int64_t)td_dtype_size(td_tensor_dtype(tensor));
}

static inline double get(const td_tensor *tensor, int64_t number)
{
    const void *at = place(tensor, number);
    switch (td_tensor_dtype(tensor)) {
    case TD_F32:
        return *(const float *)at;
    case TD_F64:
        return *(const double *)at;
    case TD_F16:
        return td__f16_to_f32(*(const uint16_t *)at);
    case TD_BF16:
        return td__bf16_to_f32(*(const uint16_t *)at);
    default:
        return *(const int32_t *)at;
    }
}

static inline void set(td_tensor *tensor, int64_t number, double value)
{
    void *at = place(tensor, number);
    switch (td_tensor_dtype(tensor)) {
    case TD_F32:
        *(float *)at = (float)value;
        break;
    case TD_F64:
        *(double *)at = value;
        break;
    case TD_F16:
        *(uint16_t *)at = td__f32_to_f16((float)value);
        break;
    default:
        *(uint16_t *)at = td__f32_to_bf16((float)value);
    }
}

static inline td_tensor *filled(const int64_t *shape, int ndim, td_dtype dtype)
{
    td_tensor *tensor = td_empty(shape, ndim, dtype, NULL);
    CHECK(tensor);
    for (int64_t i = 0; i < td_tensor_numel(tensor); i++)
        set(tensor, i, draw());
    return tensor;
}

static inline double *doubles(int64_t count)
{
    double *values = calloc((size_t)count + 1, sizeof *values);
    CHECK(values);
    return values;
}

/* All elements in the order of the indices; the caller frees them. */
static inline double *values_of(const td_tensor *tensor)
{
    double *values = doubles(td_tensor_numel(tensor));
    for (int64_t i = 0; i < td_tensor_numel(tensor); i++)
        values[i] = get(tensor, i);
    return values;
}

/* How exact a result of the dtype is, for sums of numbers around 1. */
static inline double tolerance(td_dtype dtype)
{
    return dtype == TD_F64 ? 1e-13 : dtype == TD_F32 ? 2e-5 : dtype == TD_F16 ? 2e-3 : 1.6e-2;
}

static inline void check_close(const char *what, const td_tensor *got, const double *expected)
{
    double tolerated = tolerance(td_tensor_dtype(got));
    for (int64_t i = 0; i < td_tensor_numel(got); i++) {
        double value = get(got, i);
        if (!(fabs(value - expected[i]) <= tolerated * (1 + fabs(expected[i]))))
            FAIL("%s: element %lld of %s is %.9g, not %.9g", what, (long long)i,
                 td_dtype_name(td_tensor_dtype(got)), value, expected[i]);
    }
}

static inline void release_all(td_tensor **tensors, int count)
{
    for (int i = 0; i < count; i++)
        td_tensor_release(tensors[i]);
}

#define RELEASE(...)                                                                               \
    release_all((td_tensor *[]){__VA_ARGS__},                                                      \
                (int)(sizeof((td_tensor *[]){__VA_ARGS__}) / sizeof(td_tensor *)))

#endif
