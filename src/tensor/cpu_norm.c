/* Norms of lists of tensors, and the factor of gradient scaling. The norm is that of all elements as one vector, summed
 * in f64: threads sum blocks of each tensor, and the sums of the blocks are added in order. Built without contraction of
 * floating-point expressions. */
#include "tensor/cpu_kernels.h"

#include "base/fail.h"
#include "tensor/cpu_convert.h"
#include "tensor/cpu_each.h"
#include "tensor/parallel_for.h"
#include "tensor/vector.h"

#include <math.h>
#include <stdlib.h>

#include "tensor/real_f32.h"
#include "tensor/cpu_norm_loops.h"
#include "tensor/real_f64.h"
#include "tensor/cpu_norm_loops.h"

/* ---- The norm ----------------------------------------------------------------------------------- */

enum { BLOCK = 32768 };

/* The blocks of one tensor, and their sums. */
struct blocks {
    const void *data;
    int64_t count;
    bool wide; /* f64 */
    double power;
    double *sums;
};

/* The sum of squares or powers of some elements, or the greatest absolute value. */
static double measure_part(const void *data, int64_t count, bool wide, double power)
{
    if (isinf(power))
        return wide ? greatest_f64(data, count) : greatest_f32(data, count);
    if (power == 2)
        return wide ? sum_squares_f64(data, count) : sum_squares_f32(data, count);
    return wide ? sum_powers_f64(data, count, power) : sum_powers_f32(data, count, power);
}

static void measure_blocks(void *arg, int64_t begin, int64_t end)
{
    const struct blocks *blocks = arg;
    size_t size = blocks->wide ? sizeof(double) : sizeof(float);
    for (int64_t b = begin; b < end; b++) {
        int64_t left = blocks->count - b * BLOCK;
        blocks->sums[b] = measure_part((const char *)blocks->data + (size_t)(b * BLOCK) * size,
                                       left < BLOCK ? left : BLOCK, blocks->wide, blocks->power);
    }
}

/* The tensor itself where it is contiguous f32 or f64, and else a copy; one reference. */
static td_tensor *plain_of(td_tensor *tensor)
{
    bool half = td__is_half(tensor->layout.dtype);
    if (!half && td__layout_is_contiguous(&tensor->layout))
        return td_tensor_retain(tensor);
    td_tensor *copy = td__empty_like_as(tensor, half ? TD_F32 : tensor->layout.dtype);
    if (copy)
        td__cpu_copy(copy, tensor);
    return copy;
}

/* Adds the contribution of one tensor to *sum. */
static td_status measure(td_tensor *tensor, double power, double *sum)
{
    int64_t number = (tensor->layout.numel + BLOCK - 1) / BLOCK;
    td_tensor *plain = plain_of(tensor);
    double *sums = plain ? malloc((size_t)(number + 1) * sizeof *sums) : NULL;
    if (!sums) {
        td_tensor_release(plain);
        return td__fail_nomem("norm");
    }
    struct blocks blocks = {.data = td_tensor_data(plain),
                            .count = plain->layout.numel,
                            .wide = plain->layout.dtype == TD_F64,
                            .power = power,
                            .sums = sums};
    td__parallel_for(number, 1, measure_blocks, &blocks);
    for (int64_t b = 0; b < number; b++)
        *sum = !isinf(power) ? *sum + sums[b] : sums[b] > *sum || isnan(sums[b]) ? sums[b] : *sum;
    free(sums);
    td_tensor_release(plain);
    return TD_OK;
}

td_status td__cpu_norm(td_tensor *out, td_tensor *const *x, int count, double power)
{
    double sum = 0;
    for (int i = 0; i < count; i++)
        TD_TRY(measure(x[i], power, &sum));
    double norm = isinf(power) ? sum : power == 2 ? sqrt(sum) : pow(sum, 1 / power);
    if (out->layout.dtype == TD_F64)
        *(double *)td_tensor_data(out) = norm;
    else
        *(float *)td_tensor_data(out) = (float)norm;
    return TD_OK;
}

/* ---- Gradient scaling ----------------------------------------------------------------------------- */

struct unscaling {
    td_dtype dtype; /* of the computation */
    double factor;
    double limit; /* what is not below it is not finite in the tensor's dtype */
    atomic_bool *found;
};

static TD__VECTOR bool unscale_f32(float *to, const float *x, int64_t count, float factor,
                                   float limit)
{
    int infinite = 0;
    TD__INDEPENDENT
    for (int64_t i = 0; i < count; i++) {
        float product = x[i] * factor;
        to[i] = product;
        infinite |= !(__builtin_fabsf(product) < limit);
    }
    return infinite;
}

static TD__VECTOR bool unscale_f64(double *to, const double *x, int64_t count, double factor)
{
    int infinite = 0;
    TD__INDEPENDENT
    for (int64_t i = 0; i < count; i++) {
        double product = x[i] * factor;
        to[i] = product;
        infinite |= !(__builtin_fabs(product) < (double)INFINITY);
    }
    return infinite;
}

static void run_unscale(void *const arrays[], int64_t count, const void *arg)
{
    const struct unscaling *u = arg;
    bool infinite = u->dtype == TD_F64 ? unscale_f64(arrays[0], arrays[1], count, u->factor)
                                       : unscale_f32(arrays[0], arrays[1], count, (float)u->factor,
                                                     (float)u->limit);
    if (infinite)
        atomic_store_explicit(u->found, true, memory_order_relaxed);
}

td_status td__cpu_unscale(td_tensor *const *x, int count, double factor, td_tensor *found)
{
    atomic_bool infinite = false;
    for (int i = 0; i < count; i++) {
        td_dtype dtype = x[i]->layout.dtype;
        /* Half way between the greatest number and the next power of two is rounded to infinity. */
        double limit = dtype == TD_F16 ? 65520 : dtype == TD_BF16 ? 0x1.ffp127 : (double)INFINITY;
        struct unscaling unscaling = {td__compute_dtype(dtype), factor, limit, &infinite};
        td__each_tensors(x[i], x[i], NULL, NULL, run_unscale, &unscaling);
    }
    if (infinite)
        *(float *)td_tensor_data(found) = 1;
    return TD_OK;
}
