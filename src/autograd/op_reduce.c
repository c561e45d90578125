/* Sums, means, products, variances and norms. The dimensions to reduce are a mask, bit d for
 * dimension d. Kernels keep these with size 1, and a view drops them without keepdim. The gradient
 * of a sum is an expanded view of the result's. */
#include "autograd/autocast.h"
#include "autograd/op.h"
#include "base/fail.h"

#include <string.h>

/* ---- Masks and shapes ------------------------------------------------------------------------------ */

td_status td__find_dims(const char *call, const td_tensor *x, const int *dims, int count,
                        unsigned *mask)
{
    *mask = 0;
    if (count < 0 || (count > 0 && !dims))
        return td_fail(TD_ERR_INVALID,
                       "%s: the list of %d dimensions is NULL or has a negative length", call,
                       count);
    for (int i = 0; i < count; i++) {
        int dim = td__wrap_dim(x, call, dims[i]);
        if (dim < 0)
            return TD_ERR_INVALID;
        if (*mask & 1u << dim)
            return td_fail(TD_ERR_INVALID, "%s: dimension %d is named twice", call, dim);
        *mask |= 1u << dim;
    }
    *mask &= td__all_dims(x); /* a tensor of no dimensions has none */
    return TD_OK;
}

struct td__reduced td__reduced_of(const td_tensor *x, unsigned mask)
{
    struct td__reduced reduction = {.ndim = x->layout.ndim, .count = 1};
    for (int d = 0; d < reduction.ndim; d++) {
        reduction.whole[d] = x->layout.shape[d];
        reduction.kept[d] = mask & 1u << d ? 1 : x->layout.shape[d];
        if (mask & 1u << d)
            reduction.count *= x->layout.shape[d];
    }
    return reduction;
}

td_tensor *td__drop_dims(td_tensor *x, unsigned mask)
{
    int64_t shape[TD_MAX_DIMS];
    int ndim = 0;
    if (!x)
        return NULL;
    for (int d = 0; d < x->layout.ndim; d++)
        if (!(mask & 1u << d))
            shape[ndim++] = x->layout.shape[d];
    td_tensor *dropped = td__reshape(x, shape, ndim, NULL);
    td_tensor_release(x);
    return dropped;
}

td_tensor *td__apply_reduce(const char *call, td_reduce_kind kind, td_tensor *x, unsigned mask,
                            td_dtype dtype)
{
    struct td__reduced reduction = td__reduced_of(x, mask);
    td_tensor *y = td__empty(call, reduction.kept, reduction.ndim, dtype, x->storage->device);
    if (!y)
        return NULL;
    td_status status = td__kernels_of(x)->reduce(kind, y, x, mask);
    return td__kept(y, td__kernel_status(call, x, status));
}

td_tensor *td__spread(td_tensor *grad_y, const struct td__reduced *reduction)
{
    td_tensor *kept = td__adopt(td__reshape(grad_y, reduction->kept, reduction->ndim, NULL));
    return td__adopt(td__expand("td_backward", kept, reduction->whole, reduction->ndim));
}

/* ---- Sums and means -------------------------------------------------------------------------------- */

static td_status sum_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
{
    grad_x[0] = td__spread(grad_y[0], td_node_data(node));
    return td__done(grad_x[0]);
}

static td_status mean_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
{
    const struct td__reduced *reduction = td_node_data(node);
    grad_x[0] = td__spread(td_div_scalar(grad_y[0], (double)reduction->count), reduction);
    return td__done(grad_x[0]);
}

/* Sums and products of bool and integers are i64, so that they do not overflow; u64 stays. */
static td_dtype dtype_of_sum(td_dtype dtype)
{
    bool is_whole = dtype == TD_BOOL || dtype == TD_I8 || dtype == TD_U8 || dtype == TD_I16 ||
                    dtype == TD_I32 || dtype == TD_U32;
    return is_whole ? TD_I64 : dtype;
}

static td_tensor *reduced(const td_function *function, td_reduce_kind kind, td_tensor *x,
                          unsigned mask, bool keepdim)
{
    td_dtype dtype = kind == TD_REDUCE_KIND_SUM ? dtype_of_sum(x->layout.dtype) : x->layout.dtype;
    td_tensor *y = td__apply_reduce(function->name, kind, x, mask, dtype);
    struct td__reduced reduction = td__reduced_of(x, mask);
    return td__result(
        function, keepdim ? y : td__drop_dims(y, mask),
        &(td_node_spec){
            .inputs = {x}, .input_count = 1, .data = &reduction, .data_size = sizeof reduction});
}

td_tensor *td_sum(td_tensor *x)
{
    TD__AUTOCAST_1(td_sum, TD__CAST_SUM, x);
    static const td_function function = {.name = "td_sum", .backward = sum_backward};
    return x ? reduced(&function, TD_REDUCE_KIND_SUM, x, td__all_dims(x), false) : NULL;
}

td_tensor *td_mean(td_tensor *x)
{
    static const td_function function = {.name = "td_mean", .backward = mean_backward};
    return x ? reduced(&function, TD_REDUCE_KIND_MEAN, x, td__all_dims(x), false) : NULL;
}

td_tensor *td_sum_dims(td_tensor *x, const int *dims, int count, bool keepdim)
{
    TD__AUTOCAST(TD__CAST_SUM, &x);
    static const td_function function = {.name = "td_sum_dims", .backward = sum_backward};
    unsigned mask;
    if (!x)
        return td__null(__func__);
    if (td__find_dims(function.name, x, dims, count, &mask))
        return NULL;
    return reduced(&function, TD_REDUCE_KIND_SUM, x, mask, keepdim);
}

td_tensor *td_mean_dims(td_tensor *x, const int *dims, int count, bool keepdim)
{
    static const td_function function = {.name = "td_mean_dims", .backward = mean_backward};
    unsigned mask;
    if (!x)
        return td__null(__func__);
    if (td__find_dims(function.name, x, dims, count, &mask))
        return NULL;
    return reduced(&function, TD_REDUCE_KIND_MEAN, x, mask, keepdim);
}

/* ---- The product ----------------------------------------------------------------------------------- */

/* The product of all other elements: y / x, but for zeros. With one zero, its own is the product of
 * the rest and that of all others is 0; with several, all are 0. */
static td_tensor *product_of_others(td_tensor *x, td_tensor *y)
{
    td_tensor *zero = td_eq_scalar(x, 0), *count = td_sum(zero);
    if (count && !td__on_host(count)) { /* all three cases, so that the host need not wait */
        td_tensor *rest = td_prod(td_masked_fill(x, zero, 1));
        td_tensor *only = td_logical_and(zero, td_eq_scalar(count, 1));
        td_tensor *with_zeros = td_where(only, rest, td_zeros_like(x));
        return td_where(td_eq_scalar(count, 0), td_div(y, x), with_zeros);
    }
    double zeros = td_item(count);
    if (zeros == 0)
        return td_div(y, x);
    td_tensor *none = td_zeros_like(x);
    return zeros == 1 ? td_where(zero, td_prod(td_masked_fill(x, zero, 1)), none) : none;
}

static td_status prod_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
{
    td_tensor *x = td_node_saved(node, 0), *y = td_node_saved(node, 1);
    if (!x || !y)
        return td__done(NULL);
    grad_x[0] = td_mul(grad_y[0], product_of_others(x, y));
    return td__done(grad_x[0]);
}

td_tensor *td_prod(td_tensor *x)
{
    TD__AUTOCAST_1(td_prod, TD__CAST_PROD, x);
    static const td_function function = {.name = "td_prod", .backward = prod_backward};
    if (!x)
        return td__null(__func__);
    td_tensor *y = td__drop_dims(td__apply_reduce(function.name, TD_REDUCE_KIND_PROD, x,
                                                  td__all_dims(x), dtype_of_sum(x->layout.dtype)),
                                 td__all_dims(x));
    return td__result(
        &function, y,
        &(td_node_spec){.inputs = {x}, .input_count = 1, .saved = {x, y}, .saved_count = 2});
}

/* ---- Variance and norm ----------------------------------------------------------------------------- */

/* f16 and bf16 are computed in f32 and rounded once. */
static td_dtype wide_dtype(td_dtype dtype)
{
    return dtype == TD_F16 || dtype == TD_BF16 ? TD_F32 : dtype;
}

struct variance {
    struct td__reduced reduction;
    unsigned mask;
    double divisor;
};

/* x - mean, with the dimensions of x, in the wide dtype; in the scope. */
static td_tensor *deviations(td_tensor *x, unsigned mask)
{
    x = td_to_dtype(x, wide_dtype(x->layout.dtype));
    if (!x)
        return NULL;
    td_tensor *mean = td__adopt(
        td__apply_reduce("td_var_dims", TD_REDUCE_KIND_MEAN, x, mask, x->layout.dtype));
    return td_sub(x, mean);
}

/* 2 / divisor * (x - mean) * g; the gradient through the mean cancels out. */
static td_status var_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
{
    const struct variance *variance = td_node_data(node);
    td_tensor *x = td_node_saved(node, 0);
    if (!x)
        return td__done(x);
    td_tensor *slopes = td_mul_scalar(deviations(x, variance->mask), 2 / variance->divisor);
    td_tensor *g = td__spread(grad_y[0], &variance->reduction);
    g = g && slopes ? td_to_dtype(g, slopes->layout.dtype) : NULL;
    grad_x[0] = td_to_dtype(td_mul(g, slopes), x->layout.dtype);
    return td__done(grad_x[0]);
}

static td_tensor *var(td_tensor *x, const struct variance *variance, bool keepdim)
{
    td_tensor *y = NULL;
    {
        TD_SCOPE;
        TD_NO_GRAD;
        td_tensor *apart = deviations(x, variance->mask);
        td_tensor *squares = apart
                                 ? td__adopt(td__apply_reduce("td_var_dims", TD_REDUCE_KIND_SQUARES,
                                                              apart, variance->mask,
                                                              apart->layout.dtype))
                                 : NULL;
        y = td_to_dtype(td_div_scalar(squares, variance->divisor), x->layout.dtype);
        td_tensor_retain(y);
    }
    return keepdim ? y : td__drop_dims(y, variance->mask);
}

td_tensor *td_var_dims(td_tensor *x, const int *dims, int count, int correction, bool keepdim)
{
    static const td_function function = {.name = "td_var_dims", .backward = var_backward};
    struct variance variance;
    memset(&variance, 0, sizeof variance);
    if (!x)
        return td__null(__func__);
    if (td__check_float(function.name, x) ||
        td__find_dims(function.name, x, dims, count, &variance.mask))
        return NULL;
    variance.reduction = td__reduced_of(x, variance.mask);
    double left = (double)variance.reduction.count - correction;
    variance.divisor = left > 0 ? left : 0; /* then infinite, or NaN for 0 / 0 */
    return td__result(&function, var(x, &variance, keepdim),
                      &(td_node_spec){.inputs = {x},
                                      .input_count = 1,
                                      .saved = {x},
                                      .saved_count = 1,
                                      .data = &variance,
                                      .data_size = sizeof variance});
}

/* g x / y; 0 where the norm is 0. */
static td_status norm_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
{
    td_tensor *x = td_node_saved(node, 0), *y = td_node_saved(node, 1);
    grad_x[0] = td_masked_fill(td_mul(x, td_div(grad_y[0], y)), td_eq_scalar(y, 0), 0);
    return td__done(grad_x[0]);
}

td_tensor *td_norm(td_tensor *x)
{
    TD__AUTOCAST_1(td_norm, TD__CAST_NORM, x);
    static const td_function function = {.name = "td_norm", .backward = norm_backward};
    if (!x)
        return td__null(__func__);
    if (td__check_float(function.name, x))
        return NULL;
    td_tensor *y = NULL;
    {
        TD_SCOPE;
        TD_NO_GRAD;
        td_tensor *squares = td__adopt(td__apply_reduce(function.name, TD_REDUCE_KIND_SQUARES, x,
                                                        td__all_dims(x),
                                                        wide_dtype(x->layout.dtype)));
        y = td_tensor_retain(td_to_dtype(td_sqrt(squares), x->layout.dtype));
    }
    y = td__drop_dims(y, td__all_dims(x));
    return td__result(
        &function, y,
        &(td_node_spec){.inputs = {x}, .input_count = 1, .saved = {x, y}, .saved_count = 2});
}
