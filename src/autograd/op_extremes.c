/* max, min, argmax, argmin, all and any. */
#include "autograd/op.h"
#include "base/fail.h"

/* ---- Of all elements ------------------------------------------------------------------------------- */

/* Distributes the gradient evenly over all elements that have the value (NaN: that are NaN). */
static td_status extreme_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
{
    td_tensor *x = td_node_saved(node, 0), *y = td_node_saved(node, 1);
    td_tensor *has_it = td_logical_or(td_eq(x, y), td_logical_and(td_isnan(x), td_isnan(y)));
    td_tensor *share = td_div(grad_y[0], td_to_dtype(td_sum(has_it), td_tensor_dtype(grad_y[0])));
    grad_x[0] = td_where(has_it, share, td_zeros_like(share));
    return td__done(grad_x[0]);
}

static td_tensor *extreme(const td_function *function, td_reduce_kind kind, td_tensor *x)
{
    if (!x)
        return td__null(function->name);
    if (x->layout.numel == 0) {
        td_fail(TD_ERR_INVALID, "%s: a tensor of shape %s has no elements", function->name,
                td__shape_of(x));
        return NULL;
    }
    td_tensor *y = td__drop_dims(
        td__apply_reduce(function->name, kind, x, td__all_dims(x), x->layout.dtype),
        td__all_dims(x));
    return td__result(
        function, y,
        &(td_node_spec){.inputs = {x}, .input_count = 1, .saved = {x, y}, .saved_count = 2});
}

td_tensor *td_max(td_tensor *x)
{
    static const td_function function = {.name = "td_max", .backward = extreme_backward};
    return extreme(&function, TD_REDUCE_KIND_MAX, x);
}

td_tensor *td_min(td_tensor *x)
{
    static const td_function function = {.name = "td_min", .backward = extreme_backward};
    return extreme(&function, TD_REDUCE_KIND_MIN, x);
}

/* ---- Along one dimension --------------------------------------------------------------------------- */

/* Their indices, raw, with size 1 in the dimension. Makes *dim positive. */
static td_tensor *indices_of(const char *call, bool least, td_tensor *x, int *dim)
{
    if (!x)
        return td__null(call);
    *dim = td__wrap_dim(x, call, *dim);
    if (*dim < 0)
        return NULL;
    if (x->layout.ndim > 0 && x->layout.shape[*dim] == 0) {
        td_fail(TD_ERR_INVALID, "%s: dimension %d of a tensor of shape %s has no elements", call,
                *dim, td__shape_of(x));
        return NULL;
    }
    struct td__reduced reduction = td__reduced_of(x, 1u << *dim);
    td_tensor *index = td__empty(call, reduction.kept, reduction.ndim, TD_I64, x->storage->device);
    if (!index)
        return NULL;
    td_status status = td__kernels_of(x)->arg_reduce(least, index, x, *dim);
    return td__kept(index, td__kernel_status(call, x, status));
}

td_tensor *td_argmax(td_tensor *x, int dim, bool keepdim)
{
    td_tensor *index = indices_of("td_argmax", false, x, &dim);
    return td__adopt(keepdim || !index ? index : td__drop_dims(index, 1u << dim));
}

td_tensor *td_argmin(td_tensor *x, int dim, bool keepdim)
{
    td_tensor *index = indices_of("td_argmin", true, x, &dim);
    return td__adopt(keepdim || !index ? index : td__drop_dims(index, 1u << dim));
}

struct extreme_dim {
    struct td__reduced reduction;
    int dim;
};

/* Zeros, with the gradient at the indices. */
static td_status extreme_dim_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
{
    const struct extreme_dim *data = td_node_data(node);
    const struct td__reduced *reduction = &data->reduction;
    td_tensor *index = td_node_saved(node, 0), *g = grad_y[0];
    if (!index)
        return td__done(index);
    g = td_reshape(g, reduction->kept, reduction->ndim);
    td_tensor *whole = td__adopt(
        td__zeros("td_backward", reduction->whole, reduction->ndim, grad_y[0]));
    if (!g || !whole)
        return TD_ERR_NOMEM;
    grad_x[0] = whole;
    return td__kernels_of(whole)->scatter_add(whole, data->dim, index, g);
}

/* The values at the indices, raw, with size 1 in the dimension. */
static td_tensor *values_at(const char *call, td_tensor *x, int dim, const td_tensor *index)
{
    td_tensor *y = td__empty_like_as(index, x->layout.dtype);
    if (!y)
        return NULL;
    return td__kept(y, td__kernel_status(call, x, td__kernels_of(x)->gather(y, x, dim, index)));
}

static td_tensor *extreme_along(const td_function *function, bool least, td_tensor *x, int dim,
                                bool keepdim, td_tensor **indices)
{
    td_tensor *index = indices_of(function->name, least, x, &dim);
    if (!index)
        return NULL;
    struct extreme_dim data = {td__reduced_of(x, 1u << dim), dim};
    td_tensor *y = values_at(function->name, x, dim, index);
    y = td__result(function, keepdim ? y : td__drop_dims(y, 1u << dim),
                   &(td_node_spec){.inputs = {x},
                                   .input_count = 1,
                                   .saved = {index},
                                   .saved_count = 1,
                                   .data = &data,
                                   .data_size = sizeof data});
    if (!y || !indices) {
        td_tensor_release(index);
        return y;
    }
    index = td__adopt(keepdim ? index : td__drop_dims(index, 1u << dim));
    if (index)
        *indices = index;
    return index ? y : NULL;
}

td_tensor *td_max_dim(td_tensor *x, int dim, bool keepdim, td_tensor **indices)
{
    static const td_function function = {.name = "td_max_dim", .backward = extreme_dim_backward};
    return extreme_along(&function, false, x, dim, keepdim, indices);
}

td_tensor *td_min_dim(td_tensor *x, int dim, bool keepdim, td_tensor **indices)
{
    static const td_function function = {.name = "td_min_dim", .backward = extreme_dim_backward};
    return extreme_along(&function, true, x, dim, keepdim, indices);
}

/* ---- Truth ----------------------------------------------------------------------------------------- */

static td_tensor *truth(const char *call, td_reduce_kind kind, td_tensor *x)
{
    if (!x)
        return td__null(call);
    return td__adopt(
        td__drop_dims(td__apply_reduce(call, kind, x, td__all_dims(x), TD_BOOL), td__all_dims(x)));
}

td_tensor *td_all(td_tensor *x)
{
    return truth("td_all", TD_REDUCE_KIND_ALL, x);
}

td_tensor *td_any(td_tensor *x)
{
    return truth("td_any", TD_REDUCE_KIND_ANY, x);
}
