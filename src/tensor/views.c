/* Views: other layouts over the same storage. */
#include "base/fail.h"
#include "tensor/tensor.h"

#include <inttypes.h>
#include <string.h>

/* The number of a dimension that may be negative, or -1 and the last error. */
static int find_dim(const td_tensor *tensor, const char *call, int dim)
{
    int ndim = tensor->layout.ndim;
    if (dim >= -ndim && dim < ndim)
        return dim < 0 ? dim + ndim : dim;
    td__fail(TD_ERR_INVALID, "%s: there is no dimension %d in a tensor of shape %s", call, dim,
             td__shape_text(tensor->layout.shape, ndim));
    return -1;
}

/* A view with another size of one dimension, which begins at `start` and has a step. */
static td_tensor *part_of(td_tensor *tensor, int dim, int64_t start, int64_t size, int64_t step)
{
    struct td__layout layout = tensor->layout;
    int64_t offset = tensor->offset + (size ? start * layout.strides[dim] : 0);
    layout.shape[dim] = size;
    if (size > 1)
        layout.strides[dim] *= step;
    layout.numel = 1;
    for (int d = 0; d < layout.ndim; d++)
        layout.numel *= layout.shape[d];
    return td__tensor_over(tensor->storage, layout.numel ? offset : tensor->offset, &layout);
}

td_tensor *td_transpose(td_tensor *tensor, int a, int b)
{
    if (!tensor)
        return NULL;
    a = find_dim(tensor, "td_transpose", a);
    b = a < 0 ? -1 : find_dim(tensor, "td_transpose", b);
    if (b < 0)
        return NULL;
    struct td__layout layout = tensor->layout;
    layout.shape[a] = tensor->layout.shape[b];
    layout.shape[b] = tensor->layout.shape[a];
    layout.strides[a] = tensor->layout.strides[b];
    layout.strides[b] = tensor->layout.strides[a];
    return td__tensor_over(tensor->storage, tensor->offset, &layout);
}

td_tensor *td_narrow(td_tensor *tensor, int dim, int64_t start, int64_t length)
{
    if (!tensor)
        return NULL;
    dim = find_dim(tensor, "td_narrow", dim);
    if (dim < 0)
        return NULL;
    int64_t size = tensor->layout.shape[dim];
    int64_t from = start < 0 ? start + size : start;
    if (from < 0 || from > size || length < 0 || length > size - from) {
        td__fail(TD_ERR_INVALID,
                 "td_narrow: %" PRId64 " indices from %" PRId64
                 " on are not inside dimension %d of a tensor of shape %s",
                 length, start, dim, td__shape_text(tensor->layout.shape, tensor->layout.ndim));
        return NULL;
    }
    return part_of(tensor, dim, from, length, 1);
}

td_tensor *td_select(td_tensor *tensor, int dim, int64_t index)
{
    if (!tensor)
        return NULL;
    dim = find_dim(tensor, "td_select", dim);
    if (dim < 0)
        return NULL;
    struct td__layout layout = tensor->layout;
    int64_t size = layout.shape[dim];
    int64_t at = index < 0 ? index + size : index;
    if (at < 0 || at >= size) {
        td__fail(TD_ERR_INVALID,
                 "td_select: there is no index %" PRId64 " in dimension %d of a tensor of shape %s",
                 index, dim, td__shape_text(layout.shape, layout.ndim));
        return NULL;
    }
    int64_t offset = tensor->offset + (layout.numel ? at * layout.strides[dim] : 0);
    layout.ndim--;
    layout.numel = 1;
    for (int d = 0; d < layout.ndim; d++) {
        if (d >= dim) {
            layout.shape[d] = layout.shape[d + 1];
            layout.strides[d] = layout.strides[d + 1];
        }
        layout.numel *= layout.shape[d];
    }
    return td__tensor_over(tensor->storage, offset, &layout);
}

/* An index of Python's slices: negative from the end, then cut off to 0 … size. */
static int64_t clamp_index(int64_t index, int64_t size)
{
    if (index < 0)
        index += size;
    return index < 0 ? 0 : index > size ? size : index;
}

td_tensor *td_slice(td_tensor *tensor, int dim, int64_t start, int64_t end, int64_t step)
{
    if (!tensor)
        return NULL;
    dim = find_dim(tensor, "td_slice", dim);
    if (dim < 0)
        return NULL;
    if (step < 1) {
        td__fail(TD_ERR_INVALID, "td_slice: the step is %" PRId64 "; it must be above 0", step);
        return NULL;
    }
    int64_t size = tensor->layout.shape[dim];
    start = clamp_index(start, size);
    end = clamp_index(end, size);
    int64_t length = end > start ? (end - start - 1) / step + 1 : 0;
    return part_of(tensor, dim, start, length, step);
}

/* ---- Reshape --------------------------------------------------------------------------------- */

/* Copies the shape to `full`, with the number that is left for a -1. */
static td_status fill_in_shape(const td_tensor *tensor, const int64_t *shape, int ndim,
                               int64_t *full)
{
    int open = -1;
    int64_t known = 1;
    if (ndim < 0 || ndim > TD_MAX_DIMS || (ndim > 0 && !shape))
        return td__fail(TD_ERR_INVALID, "td_reshape: a shape has 0 to %d sizes, not %d%s",
                        TD_MAX_DIMS, ndim, shape ? "" : ", and is not NULL");
    for (int d = 0; d < ndim; d++) {
        full[d] = shape[d];
        if (shape[d] == -1 && open < 0)
            open = d;
        else if (shape[d] < 0)
            return td__fail(TD_ERR_INVALID,
                            "td_reshape: only one size of %s may be -1, others not negative",
                            td__shape_text(shape, ndim));
        else if (__builtin_mul_overflow(known, shape[d], &known))
            known = INT64_MAX; /* more than any tensor has, unless a 0 follows */
    }
    int64_t numel = tensor->layout.numel;
    if (open >= 0 && known > 0 && numel % known == 0)
        full[open] = numel / known;
    else if (open >= 0 || known != numel)
        return td__fail(TD_ERR_INVALID,
                        "td_reshape: a tensor of shape %s has %" PRId64
                        " elements, which do not fit the shape %s",
                        td__shape_text(tensor->layout.shape, tensor->layout.ndim), numel,
                        td__shape_text(shape, ndim));
    return TD_OK;
}

/* Finds strides for the new shape over the same memory; false where there are none.
 *
 * From the last dimension on, the old dimensions fall into blocks in which the elements stand at
 * even distances. Each block must be divided among new dimensions without a rest. */
static bool strides_for(const struct td__layout *old, struct td__layout *new)
{
    int n = new->ndim - 1;
    int64_t block = 1, distance = 0;
    bool open = false; /* whether a block was begun */
    for (int d = old->ndim - 1; d >= 0; d--) {
        if (old->shape[d] == 1)
            continue;
        if (!open) {
            distance = old->strides[d];
            block = 1;
            open = true;
        }
        block *= old->shape[d];
        int up = d - 1;
        while (up >= 0 && old->shape[up] == 1)
            up--;
        if (up >= 0 && old->strides[up] == block * distance)
            continue;
        for (int64_t left = block, stride = distance; left > 1; n--) {
            if (n < 0 || left % new->shape[n])
                return false;
            new->strides[n] = stride;
            stride *= new->shape[n];
            left /= new->shape[n];
        }
        open = false;
    }
    for (; n >= 0; n--)
        new->strides[n] = 1; /* sizes of 1 */
    return true;
}

td_tensor *td_reshape(td_tensor *tensor, const int64_t *shape, int ndim)
{
    if (!tensor)
        return NULL;
    int64_t full[TD_MAX_DIMS];
    struct td__layout layout;
    if (fill_in_shape(tensor, shape, ndim, full) ||
        td__layout_init(&layout, "td_reshape", full, ndim, NULL, tensor->layout.dtype))
        return NULL;
    if (td__layout_is_contiguous(&tensor->layout) || strides_for(&tensor->layout, &layout))
        return td__tensor_over(tensor->storage, tensor->offset, &layout);

    td_tensor *copy = td_clone(tensor);
    if (!copy)
        return NULL;
    td_tensor *reshaped = td_reshape(copy, full, ndim);
    td_tensor_release(copy);
    return reshaped;
}
