/* Views and copies. The gradient of a view is copied into zeros of the whole shape, or is the
 * inverse view of the result's gradient. */
#include "autograd/op.h"
#include "autograd/view_base.h"
#include "base/fail.h"

#include <stdlib.h>
#include <string.h>

/* ---- The whole tensor in another shape or order --------------------------------------------------- */

struct shape {
    int64_t sizes[TD_MAX_DIMS];
    int ndim;
};

static struct shape shape_of(const td_tensor *x)
{
    struct shape shape = {.ndim = x->layout.ndim};
    memcpy(shape.sizes, x->layout.shape, sizeof shape.sizes);
    return shape;
}

static td_status reshape_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
{
    const struct shape *shape = td_node_data(node);
    grad_x[0] = td_reshape(grad_y[0], shape->sizes, shape->ndim);
    return td__done(grad_x[0]);
}

static td_tensor *reshaped(const char *name, td_tensor *x, td_tensor *y, bool viewed)
{
    static const td_function functions[] = {
        {.name = "td_reshape", .backward = reshape_backward},
        {.name = "td_unsqueeze", .backward = reshape_backward},
        {.name = "td_squeeze", .backward = reshape_backward},
    };
    const td_function *function = functions;
    while (strcmp(function->name, name) != 0)
        function++;
    if (!y)
        return NULL;
    struct shape shape = shape_of(x);
    td_node_spec spec = {
        .inputs = {x}, .input_count = 1, .data = &shape, .data_size = sizeof shape};
    return viewed ? td__view_result(function, y, x, &spec) : td__result(function, y, &spec);
}

td_tensor *td_reshape(td_tensor *tensor, const int64_t *shape, int ndim)
{
    bool viewed = false;
    td_tensor *y = td__reshape(tensor, shape, ndim, &viewed);
    return reshaped("td_reshape", tensor, y, viewed);
}

td_tensor *td_unsqueeze(td_tensor *tensor, int dim)
{
    return reshaped("td_unsqueeze", tensor, td__unsqueeze(tensor, dim), true);
}

td_tensor *td_squeeze(td_tensor *tensor, int dim)
{
    return reshaped("td_squeeze", tensor, td__squeeze(tensor, dim), true);
}

td_tensor *td_f_flatten(td_tensor *tensor, int first, int last)
{
    if (!tensor)
        return td__null(__func__);
    first = td__wrap_dim(tensor, "td_f_flatten", first);
    last = first < 0 ? -1 : td__wrap_dim(tensor, "td_f_flatten", last);
    if (last < 0)
        return NULL;
    if (tensor->layout.ndim == 0)
        return td_reshape(tensor, (int64_t[]){1}, 1);
    if (last < first) {
        td_fail(TD_ERR_INVALID, "td_f_flatten: the first dimension, %d, is behind the last, %d",
                first, last);
        return NULL;
    }
    int64_t shape[TD_MAX_DIMS];
    int ndim = 0;
    for (int d = 0; d < tensor->layout.ndim; d++) {
        if (d > first && d <= last)
            shape[ndim - 1] *= tensor->layout.shape[d];
        else
            shape[ndim++] = tensor->layout.shape[d];
    }
    return td_reshape(tensor, shape, ndim);
}

static td_status permute_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
{
    const int *dims = td_node_data(node);
    int back[TD_MAX_DIMS], ndim = grad_y[0]->layout.ndim;
    for (int d = 0; d < ndim; d++)
        back[dims[d]] = d;
    grad_x[0] = td_permute(grad_y[0], back, ndim);
    return td__done(grad_x[0]);
}

static const td_function transpose_function = {.name = "td_transpose",
                                               .backward = permute_backward};
static const td_function permute_function = {.name = "td_permute", .backward = permute_backward};

td_tensor *td_permute(td_tensor *tensor, const int *dims, int ndim)
{
    td_tensor *y = td__permute(tensor, dims, ndim);
    if (!y)
        return NULL;
    int order[TD_MAX_DIMS] = {0};
    for (int d = 0; d < ndim; d++)
        order[d] = dims[d] < 0 ? dims[d] + ndim : dims[d];
    return td__view_result(
        &permute_function, y, tensor,
        &(td_node_spec){
            .inputs = {tensor}, .input_count = 1, .data = order, .data_size = sizeof order});
}

td_tensor *td_transpose(td_tensor *tensor, int a, int b)
{
    td_tensor *y = td__transpose(tensor, a, b);
    if (!y)
        return NULL;
    int order[TD_MAX_DIMS];
    for (int d = 0; d < TD_MAX_DIMS; d++)
        order[d] = d;
    a = td__wrap_dim(tensor, "td_transpose", a);
    b = td__wrap_dim(tensor, "td_transpose", b);
    order[a] = b;
    order[b] = a;
    return td__view_result(
        &transpose_function, y, tensor,
        &(td_node_spec){
            .inputs = {tensor}, .input_count = 1, .data = order, .data_size = sizeof order});
}

/* The engine sums the gradient over the expanded dimensions. */
static td_status expand_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
{
    (void)node;
    grad_x[0] = grad_y[0];
    return TD_OK;
}

static const td_function expand_function = {.name = "td_expand", .backward = expand_backward};

td_tensor *td_expand(td_tensor *tensor, const int64_t *shape, int ndim)
{
    return td__view_result(&expand_function, td__expand("td_expand", tensor, shape, ndim), tensor,
                           &(td_node_spec){.inputs = {tensor}, .input_count = 1});
}

/* ---- A part of the tensor -------------------------------------------------------------------------- */

/* Every step-th index from `start` on, `count` of them; a select drops the dimension. */
struct part {
    struct shape whole;
    int dim;
    int64_t start, count, step;
    bool selected;
};

/* Zeros, with the gradient copied into the part. */
static td_status part_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
{
    const struct part *part = td_node_data(node);
    td_tensor *grad = grad_y[0];
    td_tensor *whole = td__adopt(td__empty("td_backward", part->whole.sizes, part->whole.ndim,
                                           grad->layout.dtype, grad->storage->device));
    if (!whole)
        return TD_ERR_NOMEM;
    TD_TRY(td__kernels_of(whole)->fill(whole, 0));
    td_tensor *place = td__adopt(part->selected ? td__select_index(whole, part->dim, part->start)
                                                : td__slice(whole, part->dim, part->start,
                                                            part->start + part->count * part->step,
                                                            part->step));
    if (!place)
        return TD_ERR_NOMEM;
    grad_x[0] = whole;
    return td__kernels_of(whole)->copy(place, grad);
}

static td_tensor *part_of(const td_function *function, td_tensor *x, td_tensor *y, struct part part)
{
    if (!y)
        return td__null(function->name);
    part.whole = shape_of(x);
    part.dim = part.dim < 0 ? part.dim + part.whole.ndim : part.dim;
    int64_t size = part.whole.sizes[part.dim];
    if (part.start < 0)
        part.start = part.start + size < 0 ? 0 : part.start + size;
    part.start = part.start > size ? size : part.start;
    part.count = part.selected ? 1 : y->layout.shape[part.dim];
    return td__view_result(
        function, y, x,
        &(td_node_spec){.inputs = {x}, .input_count = 1, .data = &part, .data_size = sizeof part});
}

static const td_function narrow_function = {.name = "td_narrow", .backward = part_backward};
static const td_function select_function = {.name = "td_select", .backward = part_backward};
static const td_function slice_function = {.name = "td_slice", .backward = part_backward};

td_tensor *td_narrow(td_tensor *tensor, int dim, int64_t start, int64_t length)
{
    return part_of(&narrow_function, tensor, td__narrow(tensor, dim, start, length),
                   (struct part){.dim = dim, .start = start, .step = 1});
}

td_tensor *td_select(td_tensor *tensor, int dim, int64_t index)
{
    return part_of(&select_function, tensor, td__select_index(tensor, dim, index),
                   (struct part){.dim = dim, .start = index, .step = 1, .selected = true});
}

td_tensor *td_slice(td_tensor *tensor, int dim, int64_t start, int64_t end, int64_t step)
{
    return part_of(&slice_function, tensor, td__slice(tensor, dim, start, end, step),
                   (struct part){.dim = dim, .start = start, .step = step});
}

/* ---- Copies ----------------------------------------------------------------------------------------- */

static td_status clone_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
{
    (void)node;
    grad_x[0] = grad_y[0];
    return TD_OK;
}

static const td_function clone_function = {.name = "td_clone", .backward = clone_backward};

td_tensor *td_clone(td_tensor *tensor)
{
    return td__result(&clone_function, td__clone(tensor),
                      &(td_node_spec){.inputs = {tensor}, .input_count = 1});
}

td_tensor *td_contiguous(td_tensor *tensor)
{
    return td_tensor_is_contiguous(tensor) ? td__adopt(td_tensor_retain(tensor)) : td_clone(tensor);
}

/* The result does not depend on the old dst: only src gets a gradient. */
static td_status copy_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
{
    td_device *const *source = td_node_data(node);
    grad_x[1] = td_tensor_to(grad_y[0], *source);
    return td__done(grad_x[1]);
}

static const td_function copy_function = {.name = "td_tensor_copy", .backward = copy_backward};

static td_status copy_elements(td_tensor *dst, td_tensor *src, bool async)
{
    if (dst)
        TD_TRY(td__check_in_place(dst, "td_tensor_copy"));
    TD_TRY(td__tensor_copy_as(dst, src, async));
    td_device *source = src->storage->device;
    return td__record_in_place(
        &copy_function, dst,
        &(td_node_spec){
            .inputs = {dst, src}, .input_count = 2, .data = &source, .data_size = sizeof source});
}

td_status td_tensor_copy(td_tensor *dst, td_tensor *src)
{
    return copy_elements(dst, src, false);
}

td_status td_tensor_copy_async(td_tensor *dst, td_tensor *src)
{
    return copy_elements(dst, src, true);
}
