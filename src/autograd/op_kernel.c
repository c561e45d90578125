/* Views and gradient buffers for kernels; see op_kernel.h. */
#include "autograd/op_kernel.h"

#include "base/fail.h"

#include <string.h>

struct td_tensor td__view_as(const td_tensor *x, const int64_t *shape, int ndim)
{
    struct td_tensor seen = {.owners = 1, .storage = x->storage, .offset = x->offset};
    seen.layout.dtype = x->layout.dtype;
    seen.layout.ndim = ndim;
    seen.layout.numel = x->layout.numel;
    memcpy(seen.layout.shape, shape, (size_t)ndim * sizeof shape[0]);
    td__layout_set_contiguous(&seen.layout);
    return seen;
}

td_tensor *td__scoped_contiguous(td_tensor *x)
{
    return td__adopt(td__contiguous(x));
}

td_tensor *td__fresh(const char *call, const int64_t *shape, int ndim, const td_tensor *like)
{
    return td__adopt(td__empty(call, shape, ndim, like->layout.dtype, like->storage->device));
}

td_status td__check_optional(const char *call, const char *what, const td_tensor *tensor,
                             const td_tensor *x, const int64_t *shape, int ndim)
{
    if (!tensor)
        return TD_OK;
    TD_TRY(td__check_same(call, x, tensor));
    bool fits = tensor->layout.ndim == ndim;
    for (int d = 0; fits && d < ndim; d++)
        fits = tensor->layout.shape[d] == shape[d];
    if (fits)
        return TD_OK;
    TD_TRY(td__check_whole(tensor, call));
    return td_fail(TD_ERR_INVALID, "%s: %s has the shape %s; it must have %s", call, what,
                   td__shape_of(tensor), td__shape_text(shape, ndim));
}

/* ---- Backward ------------------------------------------------------------------------------------ */

static const struct td__output *input_of(const td_node *node, int index)
{
    const struct td__edge *edge = &node->inputs[index];
    return &edge->node->outputs[edge->output_nr];
}

const struct td__layout *td__input_layout(const td_node *node, int index)
{
    return &input_of(node, index)->layout;
}

static td_tensor *new_gradient(const td_node *node, int index)
{
    const struct td__output *input = input_of(node, index);
    return td__adopt(td__empty("td_backward", input->layout.shape, input->layout.ndim,
                               input->layout.dtype, input->device));
}

td_tensor *td__grad_target_or_new(td_node *node, int index, bool *accumulate)
{
    td_tensor *target = td__grad_target(node, index, accumulate);
    if (target)
        return target;
    *accumulate = false;
    return new_gradient(node, index);
}

td_status td__grad_buffer_open(struct td__grad_buffer *buffer, td_node *node, int index)
{
    *buffer = (struct td__grad_buffer){0};
    if (!td_node_needs(node, index))
        return TD_OK;
    bool accumulate = false;
    buffer->grad = td__grad_target_or_new(node, index, &accumulate);
    buffer->into = buffer->grad && accumulate ? new_gradient(node, index) : buffer->grad;
    return buffer->into ? TD_OK : TD_ERR_NOMEM;
}

td_status td__grad_buffer_close(struct td__grad_buffer *buffer, td_tensor **grad_input)
{
    if (buffer->into != buffer->grad)
        TD_TRY(td__kernels_of(buffer->grad)
                   ->binary(TD_BINARY_ADD, buffer->grad, buffer->grad, buffer->into));
    *grad_input = buffer->grad;
    return TD_OK;
}

/* Into f32, where the device has no such product: rounded to the dtype of the operands before. */
static td_status add_rounded(td_tensor *into, td_tensor *a, td_tensor *b, bool accumulate)
{
    const td_kernels *kernels = td__kernels_of(into);
    td_tensor *rounded = td__fresh("td_backward", into->layout.shape, 2, a);
    if (!rounded)
        return TD_ERR_NOMEM;
    TD_TRY(kernels->matmul(rounded, a, b, 1, false));
    if (!accumulate)
        return kernels->copy(into, rounded);
    td_tensor *wide = td_to_dtype(rounded, into->layout.dtype);
    TD_TRY(td__done(wide));
    return kernels->binary(TD_BINARY_ADD, into, into, wide);
}

td_status td__weight_grad(td_node *node, int index, td_tensor *grad, const td_tensor *x,
                          td_tensor **grad_weight)
{
    TD_TRY(td__done(x));
    bool accumulate;
    td_tensor *transposed = td__adopt(td__transpose(grad, 0, 1));
    td_tensor *into = transposed ? td__grad_target_or_new(node, index, &accumulate) : NULL;
    if (!into)
        return TD_ERR_NOMEM;
    *grad_weight = into;
    const td_kernels *kernels = td__kernels_of(grad);
    int64_t n = grad->layout.shape[0];
    struct td_tensor rows = td__view_as(x, (int64_t[]){n, into->layout.shape[1]}, 2);
    if (into->layout.dtype == grad->layout.dtype)
        return kernels->matmul(into, transposed, &rows, 1, accumulate);
    td_status status = TD_ERR_UNSUPPORTED;
    if (kernels->matmul_f32)
        status = kernels->matmul_f32(into, transposed, &rows, 1, accumulate);
    return status == TD_ERR_UNSUPPORTED ? add_rounded(into, transposed, &rows, accumulate) : status;
}

td_tensor *td__reuse(td_tensor *grad_y)
{
    bool is_ours = td__is_unshared(grad_y) && td__layout_is_contiguous(&grad_y->layout);
    return is_ours ? grad_y : td__adopt(td__empty_like(grad_y));
}
