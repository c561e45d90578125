/* Norms of lists of tensors, and the factor of gradient scaling. The elements of a tensor are summed in f64 along the tree
 * of norm_tree.h, by threads, and the sums of the tensors are added in order. Built without contraction of floating-point
 * expressions. */
#include "tensor/cpu_kernels.h"

#include "base/fail.h"
#include "tensor/cpu_convert.h"
#include "tensor/cpu_each.h"
#include "tensor/norm_tree.h"
#include "tensor/parallel_for.h"
#include "tensor/vector.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- The sum of a block --------------------------------------------------------------------------- */

/* Four elements of a block each: enough sums for vectors of any size, and for the 32 threads of a warp with 8 each. */
enum { PARTS = 256 };

/* Between rows of elements: a compiler that exchanged the loops would read memory in an order that the processor does not
 * prefetch, and take three times as long. */
#define KEEP_ROWS_APART() __asm__ volatile("" ::: "memory")

TD__INLINE void add_halves(double *sums, int half)
{
    for (int k = 0; k < half; k++)
        sums[k] += sums[half + k];
}

/* By halves; each loop has a length that the compiler knows. */
TD__INLINE double add_parts(double sums[PARTS])
{
    add_halves(sums, PARTS / 2);
    add_halves(sums, PARTS / 4);
    add_halves(sums, PARTS / 8);
    add_halves(sums, PARTS / 16);
    add_halves(sums, PARTS / 32);
    add_halves(sums, PARTS / 64);
    add_halves(sums, PARTS / 128);
    return sums[0] + sums[1];
}

#include "tensor/real_f32.h"
#include "tensor/cpu_norm_loops.h"
#include "tensor/real_f64.h"
#include "tensor/cpu_norm_loops.h"

static double measure_half(const void *x, td_dtype dtype, int64_t count, double power)
{
    float wide[TD__NORM_BLOCK];
    td__convert_half(wide, x, dtype, count);
    return measure_block_f32(wide, count, power);
}

/* ---- The norm ----------------------------------------------------------------------------------- */

/* Blocks that a thread takes at once: a complete node of the tree, but for the last one. */
enum { UNIT = 32 };

/* The units of one tensor, and their sums. */
struct units {
    const char *data;
    int64_t count; /* of elements */
    td_dtype dtype;
    double power;
    double *sums;
};

static double measure_unit(const struct units *units, int64_t begin, int64_t end)
{
    size_t size = td_dtype_size(units->dtype);
    struct td__norm_tree tree = {.greatest = isinf(units->power)};
    for (int64_t b = begin; b < end; b++) {
        const void *x = units->data + (size_t)(b * TD__NORM_BLOCK) * size;
        int64_t left = units->count - b * TD__NORM_BLOCK;
        int64_t count = left < TD__NORM_BLOCK ? left : TD__NORM_BLOCK;
        double sum = units->dtype == TD_F32   ? measure_block_f32(x, count, units->power)
                     : units->dtype == TD_F64 ? measure_block_f64(x, count, units->power)
                                              : measure_half(x, units->dtype, count, units->power);
        td__norm_push(&tree, b, 1, sum);
    }
    return td__norm_result(&tree);
}

static void measure_units(void *arg, int64_t begin, int64_t end)
{
    const struct units *units = arg;
    int64_t blocks = (units->count + TD__NORM_BLOCK - 1) / TD__NORM_BLOCK;
    for (int64_t u = begin; u < end; u++) {
        int64_t left = blocks - u * UNIT;
        units->sums[u] = measure_unit(units, u * UNIT, u * UNIT + (left < UNIT ? left : UNIT));
    }
}

/* The sum of one tensor. */
static td_status measure(td_tensor *tensor, double power, double *sum)
{
    const int64_t size = (int64_t)UNIT * TD__NORM_BLOCK;
    int64_t number = tensor->layout.numel / size + (tensor->layout.numel % size != 0);
    td_tensor *plain = td__contiguous(tensor);
    double *sums = plain ? malloc((size_t)(number + 1) * sizeof *sums) : NULL;
    if (!sums) {
        td_tensor_release(plain);
        return td__fail_nomem("norm");
    }
    struct units units = {.data = td_tensor_data(plain),
                          .count = plain->layout.numel,
                          .dtype = plain->layout.dtype,
                          .power = power,
                          .sums = sums};
    td__parallel_for(number, 1, measure_units, &units);
    struct td__norm_tree tree = {.greatest = isinf(power)};
    for (int64_t u = 0; u < number; u++)
        td__norm_push(&tree, u, 1, sums[u]);
    *sum = td__norm_result(&tree);
    free(sums);
    td_tensor_release(plain);
    return TD_OK;
}

td_status td__cpu_power_sums(td_tensor *out, td_tensor *const *x, int count, double power)
{
    double *sums = td_tensor_data(out);
    for (int i = 0; i < count; i++)
        TD_TRY(measure(x[i], power, &sums[i]));
    return TD_OK;
}

td_status td__cpu_norm(td_tensor *out, td_tensor *const *x, int count, double power)
{
    double total = 0, sum;
    for (int i = 0; i < count; i++) {
        TD_TRY(measure(x[i], power, &sum));
        total = td__norm_join(total, sum, isinf(power));
    }
    double norm = td__norm_root(total, power);
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
