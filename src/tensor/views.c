/* Views: other layouts over the same storage. */
#include "base/fail.h"
#include "tensor/tensor_internal.h"

#include <inttypes.h>
#include <string.h>

/* A view of `tensor`, with the same history. */
static td_tensor *view_of(const td_tensor *tensor, int64_t offset, const struct td__layout *layout)
{
    td_tensor *view = td__tensor_over(tensor->storage, offset, layout);
    if (view)
        view->history = tensor->history;
    return view;
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
    return view_of(tensor, layout.numel ? offset : tensor->offset, &layout);
}

td_tensor *td__transpose(td_tensor *tensor, int a, int b)
{
    if (!tensor)
        return td__null("td_transpose");
    a = td__wrap_dim(tensor, "td_transpose", a);
    b = a < 0 ? -1 : td__wrap_dim(tensor, "td_transpose", b);
    if (b < 0)
        return NULL;
    struct td__layout layout = tensor->layout;
    layout.shape[a] = tensor->layout.shape[b];
    layout.shape[b] = tensor->layout.shape[a];
    layout.strides[a] = tensor->layout.strides[b];
    layout.strides[b] = tensor->layout.strides[a];
    return view_of(tensor, tensor->offset, &layout);
}

td_tensor *td__narrow(td_tensor *tensor, int dim, int64_t start, int64_t length)
{
    if (!tensor)
        return td__null("td_narrow");
    dim = td__find_dim(tensor, "td_narrow", dim);
    if (dim < 0)
        return NULL;
    int64_t size = tensor->layout.shape[dim];
    int64_t from = start < 0 ? start + size : start;
    if (from < 0 || from > size || length < 0 || length > size - from) {
        td_fail(TD_ERR_INVALID,
                "td_narrow: %" PRId64 " indices from %" PRId64
                " on are not inside dimension %d of a tensor of shape %s",
                length, start, dim, td__shape_text(tensor->layout.shape, tensor->layout.ndim));
        return NULL;
    }
    return part_of(tensor, dim, from, length, 1);
}

td_tensor *td__select_index(td_tensor *tensor, int dim, int64_t index)
{
    if (!tensor)
        return td__null("td_select");
    dim = td__find_dim(tensor, "td_select", dim);
    if (dim < 0)
        return NULL;
    struct td__layout layout = tensor->layout;
    int64_t size = layout.shape[dim];
    int64_t at = index < 0 ? index + size : index;
    if (at < 0 || at >= size) {
        td_fail(TD_ERR_INVALID,
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
    return view_of(tensor, offset, &layout);
}

/* An index of Python's slices: negative from the end, then clamped to 0 … size. */
static int64_t clamp_index(int64_t index, int64_t size)
{
    if (index < 0)
        index += size;
    return index < 0 ? 0 : index > size ? size : index;
}

td_tensor *td__slice(td_tensor *tensor, int dim, int64_t start, int64_t end, int64_t step)
{
    if (!tensor)
        return td__null("td_slice");
    dim = td__find_dim(tensor, "td_slice", dim);
    if (dim < 0)
        return NULL;
    if (step < 1) {
        td_fail(TD_ERR_INVALID, "td_slice: the step is %" PRId64 "; it must be above 0", step);
        return NULL;
    }
    int64_t size = tensor->layout.shape[dim];
    start = clamp_index(start, size);
    end = clamp_index(end, size);
    int64_t length = end > start ? (end - start - 1) / step + 1 : 0;
    return part_of(tensor, dim, start, length, step);
}

/* ---- Reshape --------------------------------------------------------------------------------- */

/* Copies the shape to `full`, and computes the size for a -1. */
static td_status fill_in_shape(const td_tensor *tensor, const int64_t *shape, int ndim,
                               int64_t *full)
{
    int open = -1;
    int64_t known = 1;
    if (ndim < 0 || ndim > TD_MAX_DIMS || (ndim > 0 && !shape))
        return td_fail(TD_ERR_INVALID, "td_reshape: a shape has 0 to %d sizes, not %d%s",
                       TD_MAX_DIMS, ndim, shape ? "" : ", and is not NULL");
    for (int d = 0; d < ndim; d++) {
        full[d] = shape[d];
        if (shape[d] == -1 && open < 0)
            open = d;
        else if (shape[d] < 0)
            return td_fail(TD_ERR_INVALID,
                           "td_reshape: only one size of %s may be -1, others not negative",
                           td__shape_text(shape, ndim));
        else if (__builtin_mul_overflow(known, shape[d], &known))
            known = INT64_MAX; /* more than any tensor has, unless a 0 follows */
    }
    int64_t numel = tensor->layout.numel;
    if (open >= 0 && known > 0 && numel % known == 0)
        full[open] = numel / known;
    else if (open >= 0 || known != numel)
        return td_fail(TD_ERR_INVALID,
                       "td_reshape: a tensor of shape %s has %" PRId64
                       " elements, which do not fit the shape %s",
                       td__shape_text(tensor->layout.shape, tensor->layout.ndim), numel,
                       td__shape_text(shape, ndim));
    return TD_OK;
}

/* Finds strides for the new shape over the same memory; false where there are none.
 *
 * From the last dimension on, the old dimensions are grouped into blocks with equal distances between
 * elements. Each block must be divided among new dimensions without a remainder. */
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

td_tensor *td__reshape(td_tensor *tensor, const int64_t *shape, int ndim, bool *viewed)
{
    if (!tensor)
        return td__null("td_reshape");
    int64_t full[TD_MAX_DIMS];
    struct td__layout layout;
    if (fill_in_shape(tensor, shape, ndim, full) ||
        td__layout_init(&layout, "td_reshape", full, ndim, NULL, tensor->layout.dtype))
        return NULL;
    bool fits = td__layout_is_contiguous(&tensor->layout) || strides_for(&tensor->layout, &layout);
    if (viewed)
        *viewed = fits;
    if (fits)
        return view_of(tensor, tensor->offset, &layout);

    td_tensor *copy = td__clone(tensor);
    if (!copy)
        return NULL;
    td_tensor *reshaped = td__reshape(copy, full, ndim, NULL);
    td_tensor_release(copy);
    return reshaped;
}

/* ---- Other orders and numbers of dimensions ---------------------------------------------------- */

td_tensor *td__permute(td_tensor *tensor, const int *dims, int ndim)
{
    if (!tensor)
        return td__null("td_permute");
    struct td__layout layout = tensor->layout;
    unsigned seen = 0;
    if (ndim != layout.ndim || (ndim > 0 && !dims)) {
        td_fail(
            TD_ERR_INVALID,
            "td_permute: %d dimensions for a tensor of shape %s; name each of its dimensions once",
            ndim, td__shape_of(tensor));
        return NULL;
    }
    for (int d = 0; d < ndim; d++) {
        int from = td__find_dim(tensor, "td_permute", dims[d]);
        if (from < 0)
            return NULL;
        if (seen & 1u << from) {
            td_fail(TD_ERR_INVALID, "td_permute: dimension %d is named twice", from);
            return NULL;
        }
        seen |= 1u << from;
        layout.shape[d] = tensor->layout.shape[from];
        layout.strides[d] = tensor->layout.strides[from];
    }
    return view_of(tensor, tensor->offset, &layout);
}

td_tensor *td__expand(const char *call, td_tensor *tensor, const int64_t *shape, int ndim)
{
    if (!tensor)
        return td__null(call);
    struct td__layout layout;
    int64_t full[TD_MAX_DIMS];
    int more = ndim - tensor->layout.ndim;
    bool fits = more >= 0 && ndim <= TD_MAX_DIMS && (ndim == 0 || shape);
    for (int d = 0; fits && d < ndim; d++) {
        int64_t old = d < more ? 1 : tensor->layout.shape[d - more];
        full[d] = shape[d] == -1 && d >= more ? old : shape[d];
        fits = full[d] == old || (old == 1 && full[d] >= 0);
    }
    if (!fits) {
        td_fail(TD_ERR_INVALID, "%s: a tensor of shape %s does not expand to the shape %s", call,
                td__shape_of(tensor),
                shape && ndim <= TD_MAX_DIMS ? td__shape_text(shape, ndim) : "that was given");
        return NULL;
    }
    if (td__layout_init(&layout, call, full, ndim, NULL, tensor->layout.dtype))
        return NULL;
    for (int d = 0; d < ndim; d++) {
        bool repeated = d < more || tensor->layout.shape[d - more] != full[d];
        layout.strides[d] = repeated ? 0 : tensor->layout.strides[d - more];
    }
    return view_of(tensor, tensor->offset, &layout);
}

td_tensor *td__unsqueeze(td_tensor *tensor, int dim)
{
    if (!tensor)
        return td__null("td_unsqueeze");
    struct td__layout layout = tensor->layout;
    int ndim = layout.ndim;
    int at = dim < 0 ? dim + ndim + 1 : dim;
    if (at < 0 || at > ndim || ndim == TD_MAX_DIMS) {
        td_fail(TD_ERR_INVALID, "td_unsqueeze: a tensor of shape %s gets no dimension at %d",
                td__shape_of(tensor), dim);
        return NULL;
    }
    for (int d = ndim; d > at; d--) {
        layout.shape[d] = layout.shape[d - 1];
        layout.strides[d] = layout.strides[d - 1];
    }
    layout.strides[at] = at < ndim ? layout.shape[at] * layout.strides[at] : 1;
    layout.shape[at] = 1;
    layout.ndim++;
    return view_of(tensor, tensor->offset, &layout);
}

td_tensor *td__squeeze(td_tensor *tensor, int dim)
{
    if (!tensor)
        return td__null("td_squeeze");
    dim = td__wrap_dim(tensor, "td_squeeze", dim);
    if (dim < 0)
        return NULL;
    struct td__layout layout = tensor->layout;
    if (layout.ndim > 0 && layout.shape[dim] == 1) {
        for (int d = dim; d + 1 < layout.ndim; d++) {
            layout.shape[d] = layout.shape[d + 1];
            layout.strides[d] = layout.strides[d + 1];
        }
        layout.ndim--;
    }
    return view_of(tensor, tensor->offset, &layout);
}
