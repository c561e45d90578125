/* Indexing. Backward accumulates gradients in the order of the indices, so results are
 * deterministic. */
#include "autograd/op.h"
#include "base/fail.h"

#include <inttypes.h>
#include <string.h>

struct indexed {
    int64_t shape[TD_MAX_DIMS]; /* of the tensor that was indexed */
    int ndim;
    int dim;
};

static struct indexed indexed_of(const td_tensor *x, int dim)
{
    struct indexed indexed = {.ndim = x->layout.ndim, .dim = dim};
    memcpy(indexed.shape, x->layout.shape, sizeof indexed.shape);
    return indexed;
}

static td_status check_index(const char *call, const td_tensor *x, const td_tensor *index)
{
    if (index->layout.dtype != TD_I64)
        return td_fail(TD_ERR_INVALID, "%s: the indices are %s; they must be i64", call,
                       td_dtype_name(index->layout.dtype));
    if (index->storage->device != x->storage->device)
        return td_fail(TD_ERR_INVALID,
                       "%s: the indices are on %s and the elements on %s; td_tensor_to() moves "
                       "one",
                       call, index->storage->device->name, x->storage->device->name);
    return TD_OK;
}

td_status td__check_indices(const char *call, const char *what, const td_tensor *indices,
                            int64_t size)
{
    const int64_t *data = td_tensor_data(indices);
    if (!td__on_host(indices))
        return td__error_status(); /* the kernel's own sentence */
    for (int64_t i = 0; i < indices->layout.numel; i++)
        if (data[i] < 0 || data[i] >= size)
            return td_fail(TD_ERR_INVALID,
                           "%s: the %s at %s is %" PRId64 "; it must be 0 to %" PRId64, call, what,
                           td__index_text(&indices->layout, i), data[i], size - 1);
    return TD_OK;
}

static td_tensor *indexed_result(const td_function *function, td_tensor *y, td_tensor *x,
                                 td_tensor *index, int dim)
{
    struct indexed indexed = indexed_of(x, dim);
    return td__result(function, y,
                      &(td_node_spec){.inputs = {x},
                                      .input_count = 1,
                                      .saved = {index},
                                      .saved_count = 1,
                                      .data = &indexed,
                                      .data_size = sizeof indexed});
}

/* ---- Whole parts ----------------------------------------------------------------------------------- */

static td_status index_select_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
{
    const struct indexed *indexed = td_node_data(node);
    td_tensor *index = td_node_saved(node, 0);
    if (!index)
        return td__done(index);
    grad_x[0] = td__adopt(td__zeros("td_backward", indexed->shape, indexed->ndim, grad_y[0]));
    if (!grad_x[0])
        return TD_ERR_NOMEM;
    return td__kernels_of(grad_x[0])->index_add(grad_x[0], indexed->dim, index, grad_y[0]);
}

td_tensor *td_index_select(td_tensor *x, int dim, td_tensor *indices)
{
    static const td_function function = {.name = "td_index_select",
                                         .backward = index_select_backward};
    if (!x || !indices)
        return td__null(__func__);
    if (check_index(function.name, x, indices) ||
        td__check_dims(function.name, "the list of indices", indices, 0, 1))
        return NULL;
    dim = td__wrap_dim(x, function.name, dim);
    if (dim >= 0 && x->layout.ndim == 0 && indices->layout.numel != 1) {
        td_fail(TD_ERR_INVALID, "%s: a tensor of no dimensions takes one index, not %" PRId64,
                function.name, indices->layout.numel);
        return NULL;
    }
    td_tensor *list = dim < 0 ? NULL : td__reshape(indices, (int64_t[]){-1}, 1, NULL);
    if (!list)
        return NULL;
    int64_t shape[TD_MAX_DIMS];
    memcpy(shape, x->layout.shape, sizeof shape);
    if (x->layout.ndim > 0)
        shape[dim] = list->layout.numel;
    td_tensor *y = td__empty(function.name, shape, x->layout.ndim, x->layout.dtype,
                             x->storage->device);
    if (y)
        y = td__kept(y, td__kernel_status(function.name, x,
                                          td__kernels_of(x)->index_select(y, x, dim, list)));
    y = indexed_result(&function, y, x, list, dim);
    td_tensor_release(list);
    return y;
}

/* ---- Single elements along a dimension ------------------------------------------------------------- */

static td_status take_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
{
    const struct indexed *indexed = td_node_data(node);
    td_tensor *index = td_node_saved(node, 0);
    if (!index)
        return td__done(index);
    grad_x[0] = td__adopt(td__zeros("td_backward", indexed->shape, indexed->ndim, grad_y[0]));
    if (!grad_x[0])
        return TD_ERR_NOMEM;
    return td__kernels_of(grad_x[0])->scatter_add(grad_x[0], indexed->dim, index, grad_y[0]);
}

static td_status check_take(const char *call, const td_tensor *x, const td_tensor *index, int dim)
{
    bool fits = x->layout.ndim == index->layout.ndim;
    for (int d = 0; fits && d < x->layout.ndim; d++)
        fits = d == dim || x->layout.shape[d] == index->layout.shape[d];
    if (fits)
        return TD_OK;
    return td_fail(TD_ERR_INVALID,
                   "%s: x has the shape %s, the indices %s; only dimension %d may differ", call,
                   td__shape_of(x), td__shape_of(index), dim);
}

td_tensor *td_take_along_dim(td_tensor *x, int dim, td_tensor *index)
{
    static const td_function function = {.name = "td_take_along_dim", .backward = take_backward};
    if (!x || !index)
        return td__null(__func__);
    if (check_index(function.name, x, index))
        return NULL;
    dim = td__wrap_dim(x, function.name, dim);
    if (dim < 0 || check_take(function.name, x, index, dim))
        return NULL;
    td_tensor *y = td__empty_like_as(index, x->layout.dtype);
    if (y)
        y = td__kept(
            y, td__kernel_status(function.name, x, td__kernels_of(x)->gather(y, x, dim, index)));
    return indexed_result(&function, y, x, index, dim);
}

/* ---- One of several -------------------------------------------------------------------------------- */

/* Adds a one at each index. */
static td_status put_ones(const char *call, td_tensor *y, td_tensor *indices)
{
    td_tensor *index = td__unsqueeze(indices, -1);
    td_tensor *one = index ? td__number(call, 1, y) : NULL;
    td_tensor *ones = one ? td__expand(call, one, index->layout.shape, index->layout.ndim) : NULL;
    td_status status = TD_ERR_NOMEM;
    if (ones)
        status = td__kernels_of(y)->scatter_add(y, y->layout.ndim - 1, index, ones);
    td_tensor_release(ones);
    td_tensor_release(one);
    td_tensor_release(index);
    return status;
}

td_tensor *td_one_hot(td_tensor *indices, int64_t classes)
{
    const char *call = "td_one_hot";
    int64_t shape[TD_MAX_DIMS];
    if (!indices)
        return td__null(__func__);
    if (check_index(call, indices, indices) ||
        td__check_dims(call, "the tensor of classes", indices, 0, TD_MAX_DIMS - 1))
        return NULL;
    if (classes < 1) {
        td_fail(TD_ERR_INVALID, "%s: there must be at least one class, not %" PRId64, call,
                classes);
        return NULL;
    }
    int ndim = indices->layout.ndim;
    memcpy(shape, indices->layout.shape, sizeof shape);
    shape[ndim] = classes;
    td_tensor *list = td__contiguous(indices);
    td_tensor *y = list ? td__zeros(call, shape, ndim + 1, indices) : NULL;
    if (y) {
        td_status status = put_ones(call, y, list);
        if (status == TD_ERR_INVALID) /* the kernel got them with one more dimension */
            td__check_indices(call, "class", list, classes);
        y = td__kept(y, status);
    }
    td_tensor_release(list);
    return td__adopt(y);
}
