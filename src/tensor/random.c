/* Filling tensors with random numbers, and making them: checks, and the choice of the generator. The kernels of the
 * tensor's device draw; random_fill.c has the host's. */
#include "base/fail.h"
#include "tensor/random_distributions.h"
#include "tensor/tensor_internal.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

/* ---- Checks ---------------------------------------------------------------------------------- */

static bool is_float(td_dtype dtype)
{
    return dtype == TD_F32 || dtype == TD_F64 || dtype == TD_F16 || dtype == TD_BF16;
}

static td_status check_dtype(const char *call, td_dtype dtype, bool floats_only)
{
    if (is_float(dtype) || td_dtype_size(dtype) == 0) /* td_empty() rejects an invalid dtype */
        return TD_OK;
    if (floats_only)
        return td_fail(
            TD_ERR_INVALID,
            "%s: the dtype is %s; it must be a floating-point one: f32, f64, f16 or bf16", call,
            td_dtype_name(dtype));
    if (dtype == TD_COMPLEX64 || dtype == TD_COMPLEX128)
        return td_fail(TD_ERR_INVALID, "%s: there are no random numbers of dtype %s", call,
                       td_dtype_name(dtype));
    return TD_OK;
}

/* Also finds the generator of the tensor's device, for NULL. */
static td_status check_tensor(const char *call, const td_tensor *tensor, bool floats_only,
                              td_generator **generator)
{
    if (!tensor)
        return td__fail_null(call);
    TD_TRY(check_dtype(call, tensor->layout.dtype, floats_only));
    if (td__layout_repeats(&tensor->layout))
        return td_fail(TD_ERR_INVALID,
                       "%s: elements of the tensor share memory, its strides are %s; fill a "
                       "td_clone() of it",
                       call, td__shape_text(tensor->layout.strides, tensor->layout.ndim));
    *generator = td__generator_for(call, tensor->storage->device, *generator);
    return *generator ? td__prepare_write(tensor) : td__error_status();
}

/* The integers that a dtype holds, each exactly. The largest one of u64 is not needed. */
static void bounds_of(td_dtype dtype, int64_t *least, int64_t *most)
{
    bool is_signed = dtype == TD_I8 || dtype == TD_I16 || dtype == TD_I32 || dtype == TD_I64;
    int bits = (int)td_dtype_size(dtype) * 8;
    if (is_float(dtype)) {
        *most = INT64_C(1) << td__float_digits(dtype);
        *least = -*most;
    } else if (dtype == TD_BOOL) {
        *least = 0;
        *most = 1;
    } else if (is_signed) {
        *most = (int64_t)(UINT64_MAX >> (65 - bits));
        *least = -*most - 1;
    } else {
        *least = 0;
        *most = bits == 64 ? INT64_MAX : (int64_t)(UINT64_MAX >> (64 - bits));
    }
}

static td_status check_range(const char *call, td_dtype dtype, int64_t from, int64_t to)
{
    int64_t least, most;
    bounds_of(dtype, &least, &most);
    if (from >= to)
        return td_fail(TD_ERR_INVALID,
                       "%s: from %" PRId64 " to %" PRId64 " there is no integer: the first number "
                       "must be below the second one",
                       call, from, to);
    if (from < least || to - 1 > most)
        return td_fail(TD_ERR_INVALID,
                       "%s: %s holds the integers from %" PRId64 " to %" PRId64
                       ", which do not include %" PRId64 " to %" PRId64,
                       call, td_dtype_name(dtype), least, most, from, to - 1);
    return TD_OK;
}

/* ---- Public: filling ------------------------------------------------------------------------- */

double td__as_dtype(td_dtype dtype, double x)
{
    if (dtype == TD_F64)
        return x;
    if (dtype == TD_F32)
        return (float)x;
    return dtype == TD_F16 ? td_f16_to_f32(td_f32_to_f16((float)x))
                           : td_bf16_to_f32(td_f32_to_bf16((float)x));
}

/* After a kernel. */
static td_status changed(td_tensor *tensor, td_status status)
{
    if (!status)
        td__tensor_bump_version(tensor);
    return status;
}

td_status td_uniform_(td_tensor *tensor, double from, double to, td_generator *generator)
{
    TD_TRY(check_tensor("td_uniform_", tensor, true, &generator));
    td_dtype dtype = tensor->layout.dtype;
    double low = td__as_dtype(dtype, from);
    double range = td__as_dtype(dtype, td__as_dtype(dtype, to) - low);
    if (!(from <= to) || !isfinite(low) || !isfinite(range))
        return td_fail(TD_ERR_INVALID,
                       "td_uniform_: from %g to %g is not a range of %s: both must be finite, the "
                       "first one not above the second one, and their difference finite",
                       from, to, td_dtype_name(dtype));
    return changed(tensor, td__kernels_of(tensor)->uniform(tensor, from, to, generator));
}

td_status td_normal_(td_tensor *tensor, double mean, double std, td_generator *generator)
{
    TD_TRY(check_tensor("td_normal_", tensor, true, &generator));
    if (!(std >= 0))
        return td_fail(TD_ERR_INVALID,
                       "td_normal_: the standard deviation is %g; it must be 0 or above", std);
    return changed(tensor, td__kernels_of(tensor)->normal(tensor, mean, std, generator));
}

td_status td_bernoulli_(td_tensor *tensor, double p, td_generator *generator)
{
    TD_TRY(check_tensor("td_bernoulli_", tensor, false, &generator));
    if (!(p >= 0 && p <= 1))
        return td_fail(TD_ERR_INVALID,
                       "td_bernoulli_: the probability is %g; it must be from 0 to 1", p);
    return changed(tensor, td__kernels_of(tensor)->bernoulli(tensor, p, generator));
}

td_status td_random_(td_tensor *tensor, td_generator *generator)
{
    TD_TRY(check_tensor("td_random_", tensor, false, &generator));
    td_dtype dtype = tensor->layout.dtype;
    int64_t least, most;
    bounds_of(dtype, &least, &most);
    uint64_t range = dtype == TD_U64 ? 0 : (uint64_t)most + 1;
    return changed(tensor, td__kernels_of(tensor)->random_range(tensor, 0, range, generator));
}

td_status td_random_range_(td_tensor *tensor, int64_t from, int64_t to, td_generator *generator)
{
    TD_TRY(check_tensor("td_random_range_", tensor, false, &generator));
    TD_TRY(check_range("td_random_range_", tensor->layout.dtype, from, to));
    uint64_t range = (uint64_t)to - (uint64_t)from;
    return changed(tensor, td__kernels_of(tensor)->random_range(tensor, from, range, generator));
}

/* ---- Public: making -------------------------------------------------------------------------- */

/* A tensor that is not adopted yet, on a device that may be NULL. */
static td_tensor *new_tensor(const char *call, const int64_t *shape, int ndim, td_dtype dtype,
                             td_device *device)
{
    device = td__use_device(call, device);
    return device ? td__empty(call, shape, ndim, dtype, device) : NULL;
}

/* Hands a tensor out, or releases it if it could not be filled. */
static td_tensor *made(td_tensor *tensor, td_status status)
{
    if (!status)
        return td__adopt(tensor);
    td_tensor_release(tensor);
    return NULL;
}

td_tensor *td_rand(const int64_t *shape, int ndim, td_dtype dtype, td_device *device)
{
    if (check_dtype("td_rand", dtype, true))
        return NULL;
    td_tensor *tensor = new_tensor("td_rand", shape, ndim, dtype, device);
    return tensor ? made(tensor, td_uniform_(tensor, 0, 1, NULL)) : NULL;
}

td_tensor *td_randn(const int64_t *shape, int ndim, td_dtype dtype, td_device *device)
{
    if (check_dtype("td_randn", dtype, true))
        return NULL;
    td_tensor *tensor = new_tensor("td_randn", shape, ndim, dtype, device);
    return tensor ? made(tensor, td_normal_(tensor, 0, 1, NULL)) : NULL;
}

td_tensor *td_randint(int64_t low, int64_t high, const int64_t *shape, int ndim, td_dtype dtype,
                      td_device *device)
{
    if (check_dtype("td_randint", dtype, false))
        return NULL;
    if (td_dtype_size(dtype) && check_range("td_randint", dtype, low, high))
        return NULL;
    td_tensor *tensor = new_tensor("td_randint", shape, ndim, dtype, device);
    return tensor ? made(tensor, td_random_range_(tensor, low, high, NULL)) : NULL;
}

/* A permutation as a tensor of the host; one reference. */
static td_tensor *host_permutation(int64_t n, td_dtype dtype, td_generator *generator)
{
    td_tensor *tensor = td__empty("td_randperm", &n, 1, dtype, td__host_device());
    int64_t *numbers = tensor && dtype == TD_I64 ? td_tensor_data(tensor) : NULL;
    int64_t *aside = NULL;
    if (tensor && dtype != TD_I64) {
        bool fits = (uint64_t)n < SIZE_MAX / sizeof *aside;
        numbers = aside = fits ? malloc((size_t)(n + 1) * sizeof *aside) : NULL;
        if (!aside) {
            td_tensor_release(tensor);
            return td__fail_nomem("td_randperm"), NULL;
        }
    }
    if (tensor)
        td__generator_permutation(generator, numbers, n);
    for (int64_t i = 0; aside && i < n; i++)
        td__put_integer(td_tensor_data(tensor), dtype, i, (uint64_t)aside[i]);
    free(aside);
    return tensor;
}

td_tensor *td_randperm_with(int64_t n, td_dtype dtype, td_device *device, td_generator *generator)
{
    if (check_dtype("td_randperm", dtype, false))
        return NULL;
    if (n < 0) {
        td_fail(TD_ERR_INVALID, "td_randperm: n is %" PRId64 "; it must not be negative", n);
        return NULL;
    }
    if (n > 0 && td_dtype_size(dtype) && check_range("td_randperm", dtype, 0, n))
        return NULL;
    device = td__use_device("td_randperm", device);
    if (!device)
        return NULL;
    bool of_host = !generator || !generator->counts;
    generator = td__generator_for("td_randperm", of_host ? td__host_device() : device, generator);
    td_tensor *tensor = generator ? host_permutation(n, dtype, generator) : NULL;
    if (!tensor || device == td__host_device())
        return td__adopt(tensor);
    td_tensor *there = td__empty("td_randperm", &n, 1, dtype, device);
    td_status status = there ? td__transfer("td_randperm", there, tensor, false)
                             : td__error_status();
    td_tensor_release(tensor);
    return made(there, status);
}

td_tensor *td_randperm(int64_t n, td_dtype dtype, td_device *device)
{
    return td_randperm_with(n, dtype, device, NULL);
}
