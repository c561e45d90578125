/* Filling tensors with random numbers.
 *
 * A distribution (random_distributions.h) draws the next numbers into an array. fill() draws into the
 * tensor's memory if that is contiguous, and otherwise into a buffer that it then scatters. Which element
 * gets which number follows PyTorch's iteration: dimensions are sorted by their strides first, so that a
 * transposed tensor gets the numbers in the order of its memory. */
#include "base/fail.h"
#include "tensor/random_internal.h"
#include "tensor/random_distributions.h"
#include "tensor/tensor_internal.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- Where the numbers go -------------------------------------------------------------------- */

/* Whether dimension `a`, which runs faster, should be behind `b`: 1 yes, 0 does not matter, -1 no. */
static int should_swap(const struct td__layout *layout, int a, int b)
{
    int64_t stride_a = layout->strides[a], stride_b = layout->strides[b];
    if (stride_a == 0 || stride_b == 0)
        return 0;
    if (stride_a != stride_b)
        return stride_a < stride_b ? -1 : 1;
    return layout->shape[a] > layout->shape[b];
}

/* The layout with its dimensions in the order of iteration, the first one running fastest, and
 * joined where two are one run. */
static struct td__layout iteration_of(const struct td__layout *layout)
{
    int order[TD_MAX_DIMS];
    for (int d = 0; d < layout->ndim; d++)
        order[d] = layout->ndim - 1 - d;
    for (int d = 1; d < layout->ndim; d++)
        for (int at = d, before = d - 1; before >= 0; before--) {
            int swap = should_swap(layout, order[before], order[at]);
            if (swap < 0)
                break;
            if (swap > 0) {
                int other = order[before];
                order[before] = order[at];
                order[at] = other;
                at = before;
            }
        }

    struct td__layout joined = {.dtype = layout->dtype, .numel = layout->numel};
    for (int d = 0; d < layout->ndim; d++) {
        int64_t size = layout->shape[order[d]], stride = layout->strides[order[d]];
        int last = joined.ndim - 1;
        if (size == 1)
            continue;
        if (last >= 0 && joined.strides[last] * joined.shape[last] == stride) {
            joined.shape[last] *= size;
            continue;
        }
        joined.shape[joined.ndim] = size;
        joined.strides[joined.ndim++] = stride;
    }
    return joined;
}

/* The offset of element `index` in the order of iteration. */
static int64_t offset_of(const struct td__layout *iteration, int64_t index)
{
    int64_t offset = 0;
    for (int d = 0; d < iteration->ndim; d++) {
        offset += index % iteration->shape[d] * iteration->strides[d];
        index /= iteration->shape[d];
    }
    return offset;
}

static void scatter(const struct td__layout *iteration, char *data, int64_t first, const char *from,
                    int64_t count)
{
    size_t size = td_dtype_size(iteration->dtype);
    for (int64_t i = 0; i < count;) {
        int64_t run = iteration->shape[0] - (first + i) % iteration->shape[0];
        run = run < count - i ? run : count - i;
        char *to = data + offset_of(iteration, first + i) * (int64_t)size;
        for (int64_t k = 0; k < run; k++, i++, to += iteration->strides[0] * (int64_t)size)
            memcpy(to, from + (size_t)i * size, size);
    }
}

/* Fills the whole tensor, under the generator's lock. */
static void fill(td_tensor *tensor, const struct td__distribution *distribution,
                 td_generator *generator)
{
    _Alignas(64) char block[TD__RANDOM_BLOCK * sizeof(double)];
    struct td__layout iteration = iteration_of(&tensor->layout);
    size_t size = td_dtype_size(iteration.dtype);
    bool one_run = iteration.ndim == 0 || (iteration.ndim == 1 && iteration.strides[0] == 1);
    char *data = td_tensor_data(tensor);
    td__tensor_bump_version(tensor);
    generator = td__generator_lock(generator);
    for (int64_t at = 0; at < iteration.numel; at += TD__RANDOM_BLOCK) {
        int64_t count = iteration.numel - at < TD__RANDOM_BLOCK ? iteration.numel - at
                                                                : TD__RANDOM_BLOCK;
        distribution->draw(generator, distribution, one_run ? data + (size_t)at * size : block,
                           count);
        if (!one_run)
            scatter(&iteration, data, at, block, count);
    }
    td__generator_unlock(generator);
}

/* ---- Contiguous tensors ---------------------------------------------------------------------------- */

/* A contiguous tensor of 16 elements and more. If their number is not a multiple of 16, the last 16 are drawn
 * again. */
static void fill_normal_groups(td_tensor *tensor, const struct td__distribution *distribution,
                               td_generator *generator)
{
    char *data = td_tensor_data(tensor);
    size_t size = td_dtype_size(distribution->dtype);
    td__tensor_bump_version(tensor);
    int64_t whole = tensor->layout.numel / TD__NORMAL_GROUP * TD__NORMAL_GROUP,
            rest = tensor->layout.numel - whole;
    generator = td__generator_lock(generator);
    for (int64_t at = 0; at < whole; at += TD__RANDOM_BLOCK)
        td__draw_normal_groups(generator, distribution, data + (size_t)at * size,
                               whole - at < TD__RANDOM_BLOCK ? whole - at : TD__RANDOM_BLOCK);
    if (rest) {
        uint32_t unused[2 * TD__NORMAL_GROUP];
        td__mt19937_fill(&generator->engine, unused,
                         distribution->dtype == TD_F64 ? 2 * rest : rest);
        td__draw_normal_groups(generator, distribution,
                               data + (size_t)(whole + rest - TD__NORMAL_GROUP) * size,
                               TD__NORMAL_GROUP);
    }
    td__generator_unlock(generator);
}

void td__dropout_mask(td_generator *generator, unsigned char *mask, int64_t n, double p)
{
    if (p <= 0 || p >= 1) {
        if (n > 0)
            memset(mask, p <= 0, (size_t)n);
        return;
    }
    struct td__distribution distribution = {.dtype = TD_BOOL, .p = 1 - p};
    generator = td__generator_lock(generator);
    for (int64_t at = 0; at < n; at += TD__RANDOM_BLOCK)
        td__draw_bernoulli(generator, &distribution, mask + at,
                           n - at < TD__RANDOM_BLOCK ? n - at : TD__RANDOM_BLOCK);
    td__generator_unlock(generator);
}

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

static td_status check_tensor(const char *call, const td_tensor *tensor, bool floats_only)
{
    if (!tensor)
        return td__fail_null(call);
    TD_TRY(check_dtype(call, tensor->layout.dtype, floats_only));
    if (!td__on_host(tensor))
        return td_fail(TD_ERR_UNSUPPORTED,
                       "%s: the tensor is on %s; fill one on cpu and move it with td_tensor_to()",
                       call, tensor->storage->device->name);
    if (td__layout_repeats(&tensor->layout))
        return td_fail(TD_ERR_INVALID,
                       "%s: elements of the tensor share memory, its strides are %s; fill a "
                       "td_clone() of it",
                       call, td__shape_text(tensor->layout.strides, tensor->layout.ndim));
    return td__prepare_write(tensor);
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

/* Rounded as the dtype holds it. */
static double as_dtype(td_dtype dtype, double x)
{
    if (dtype == TD_F64)
        return x;
    if (dtype == TD_F32)
        return (float)x;
    return dtype == TD_F16 ? td_f16_to_f32(td_f32_to_f16((float)x))
                           : td_bf16_to_f32(td_f32_to_bf16((float)x));
}

td_status td_uniform_(td_tensor *tensor, double from, double to, td_generator *generator)
{
    TD_TRY(check_tensor("td_uniform_", tensor, true));
    td_dtype dtype = tensor->layout.dtype;
    double low = as_dtype(dtype, from);
    double range = as_dtype(dtype, as_dtype(dtype, to) - low);
    if (!(from <= to) || !isfinite(low) || !isfinite(range))
        return td_fail(TD_ERR_INVALID,
                       "td_uniform_: from %g to %g is not a range of %s: both must be finite, the "
                       "first one not above the second one, and their difference finite",
                       from, to, td_dtype_name(dtype));
    struct td__distribution distribution = {
        .draw = td__draw_uniform, .dtype = dtype, .from = low, .range = range};
    fill(tensor, &distribution, generator);
    return TD_OK;
}

td_status td_normal_(td_tensor *tensor, double mean, double std, td_generator *generator)
{
    TD_TRY(check_tensor("td_normal_", tensor, true));
    if (!(std >= 0))
        return td_fail(TD_ERR_INVALID,
                       "td_normal_: the standard deviation is %g; it must be 0 or above", std);
    struct td__distribution distribution = {
        .draw = td__draw_normal, .dtype = tensor->layout.dtype, .from = mean, .range = std};
    if (tensor->layout.numel >= TD__NORMAL_GROUP && td__layout_is_contiguous(&tensor->layout))
        fill_normal_groups(tensor, &distribution, generator);
    else
        fill(tensor, &distribution, generator);
    return TD_OK;
}

td_status td_bernoulli_(td_tensor *tensor, double p, td_generator *generator)
{
    TD_TRY(check_tensor("td_bernoulli_", tensor, false));
    if (!(p >= 0 && p <= 1))
        return td_fail(TD_ERR_INVALID,
                       "td_bernoulli_: the probability is %g; it must be from 0 to 1", p);
    struct td__distribution distribution = {
        .draw = td__draw_bernoulli, .dtype = tensor->layout.dtype, .p = p};
    fill(tensor, &distribution, generator);
    return TD_OK;
}

td_status td_random_(td_tensor *tensor, td_generator *generator)
{
    TD_TRY(check_tensor("td_random_", tensor, false));
    td_dtype dtype = tensor->layout.dtype;
    int64_t least, most;
    bounds_of(dtype, &least, &most);
    struct td__distribution distribution = {
        .draw = td__draw_integers, .dtype = dtype, .modulus = (uint64_t)most + 1};
    distribution.wide = dtype == TD_I64 || dtype == TD_U64 || dtype == TD_F64;
    if (dtype == TD_U64)
        distribution.modulus = 0;
    fill(tensor, &distribution, generator);
    return TD_OK;
}

td_status td_random_range_(td_tensor *tensor, int64_t from, int64_t to, td_generator *generator)
{
    TD_TRY(check_tensor("td_random_range_", tensor, false));
    TD_TRY(check_range("td_random_range_", tensor->layout.dtype, from, to));
    uint64_t range = (uint64_t)to - (uint64_t)from;
    struct td__distribution distribution = {.draw = td__draw_integers,
                                            .dtype = tensor->layout.dtype,
                                            .modulus = range,
                                            .base = (uint64_t)from,
                                            .wide = range >= UINT64_C(1) << 32};
    fill(tensor, &distribution, generator);
    return TD_OK;
}

/* ---- Public: making -------------------------------------------------------------------------- */

/* All arguments are checked before the tensor is created, so that filling it cannot fail. */

td_tensor *td_rand(const int64_t *shape, int ndim, td_dtype dtype, td_device *device)
{
    if (check_dtype("td_rand", dtype, true))
        return NULL;
    td_tensor *tensor = td_empty(shape, ndim, dtype, device);
    return tensor && td_uniform_(tensor, 0, 1, NULL) == TD_OK ? tensor : NULL;
}

td_tensor *td_randn(const int64_t *shape, int ndim, td_dtype dtype, td_device *device)
{
    if (check_dtype("td_randn", dtype, true))
        return NULL;
    td_tensor *tensor = td_empty(shape, ndim, dtype, device);
    return tensor && td_normal_(tensor, 0, 1, NULL) == TD_OK ? tensor : NULL;
}

td_tensor *td_randint(int64_t low, int64_t high, const int64_t *shape, int ndim, td_dtype dtype,
                      td_device *device)
{
    if (check_dtype("td_randint", dtype, false))
        return NULL;
    if (td_dtype_size(dtype) && check_range("td_randint", dtype, low, high))
        return NULL;
    td_tensor *tensor = td_empty(shape, ndim, dtype, device);
    return tensor && td_random_range_(tensor, low, high, NULL) == TD_OK ? tensor : NULL;
}

/* A tensor of the scope, made on the host, as one on another device. */
static td_tensor *on_device(td_tensor *tensor, td_device *device)
{
    device = td__use_device("td_randperm", device);
    if (!device || device == tensor->storage->device)
        return device ? tensor : NULL;
    td_tensor *there = td__empty("td_randperm", tensor->layout.shape, 1, tensor->layout.dtype,
                                 device);
    if (there && td__transfer("td_randperm", there, tensor, false)) {
        td_tensor_release(there);
        return NULL;
    }
    return td__adopt(there);
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
    int64_t *aside = NULL;
    if (dtype != TD_I64) {
        aside = (uint64_t)n < SIZE_MAX / sizeof *aside ? malloc((size_t)(n + 1) * sizeof *aside)
                                                       : NULL;
        if (!aside) {
            td__fail_nomem("td_randperm");
            return NULL;
        }
    }
    td_tensor *tensor = td_empty(&n, 1, dtype, td__host_device());
    if (tensor) {
        int64_t *numbers = aside ? aside : td_tensor_data(tensor);
        td__generator_permutation(generator, numbers, n);
        for (int64_t i = 0; aside && i < n; i++)
            td__put_integer(td_tensor_data(tensor), dtype, i, (uint64_t)aside[i]);
    }
    free(aside);
    return tensor ? on_device(tensor, device) : NULL;
}

td_tensor *td_randperm(int64_t n, td_dtype dtype, td_device *device)
{
    return td_randperm_with(n, dtype, device, NULL);
}
