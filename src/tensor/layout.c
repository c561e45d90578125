/* Layouts: shape and strides, their limits, and the memory that they cover.
 *
 * All sizes are checked once, in td__layout_init(), by a bound that holds for every view as well: the
 * product of all sizes that are not 0, in bytes, and the extent in bytes fit an int64_t. A shape such as
 * [2^40, 0, 2^40] is rejected, although it has no elements, so that no later product of some of its sizes
 * can overflow. */
#include "base/option_rules.h"
#include "tensor/tensor_internal.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

const char *td__shape_text(const int64_t *shape, int ndim)
{
    static _Thread_local char texts[2][TD_MAX_DIMS * 22 + 3];
    static _Thread_local int which;
    which = !which;
    char *text = texts[which];
    size_t at = 0;
    text[at++] = '[';
    for (int d = 0; d < ndim; d++)
        at += (size_t)sprintf(text + at, "%s%" PRId64, d ? ", " : "", shape[d]);
    strcpy(text + at, "]");
    return text;
}

const char *td__index_text(const struct td__layout *layout, int64_t number)
{
    int64_t index[TD_MAX_DIMS];
    for (int d = layout->ndim; d-- > 0; number /= layout->shape[d])
        index[d] = number % layout->shape[d];
    return td__shape_text(index, layout->ndim);
}

/* The number of elements, and in *bytes their bytes, counting sizes of 0 as 1. */
static bool count_elements(const struct td__layout *layout, int64_t *bytes)
{
    *bytes = (int64_t)td_dtype_size(layout->dtype);
    for (int d = 0; d < layout->ndim; d++)
        if (layout->shape[d] && __builtin_mul_overflow(*bytes, layout->shape[d], bytes))
            return false;
    return true;
}

static bool extent_fits(const struct td__layout *layout)
{
    int64_t last = 0;
    for (int d = 0; d < layout->ndim; d++) {
        int64_t span;
        int64_t steps = layout->shape[d] > 1 ? layout->shape[d] - 1 : 0;
        if (__builtin_mul_overflow(steps, layout->strides[d], &span) ||
            __builtin_add_overflow(last, span, &last))
            return false;
    }
    int64_t bytes;
    return !__builtin_add_overflow(last, 1, &last) &&
           !__builtin_mul_overflow(last, (int64_t)td_dtype_size(layout->dtype), &bytes);
}

void td__layout_set_contiguous(struct td__layout *layout)
{
    int64_t stride = 1;
    for (int d = layout->ndim; d-- > 0;) {
        layout->strides[d] = stride;
        stride *= layout->shape[d] > 1 ? layout->shape[d] : 1;
    }
}

static td_status check_numbers(const char *call, const int64_t *shape, int ndim,
                               const int64_t *strides, td_dtype dtype)
{
    TD_TRY(td__check_dtype(call, dtype));
    if (ndim < 0 || ndim > TD_MAX_DIMS)
        return td_fail(TD_ERR_INVALID, "%s: a tensor has 0 to %d dimensions, not %d", call,
                       TD_MAX_DIMS, ndim);
    if (ndim > 0 && !shape)
        return td_fail(TD_ERR_INVALID, "%s: shape is NULL for %d dimensions", call, ndim);
    for (int d = 0; d < ndim; d++) {
        if (shape[d] < 0)
            return td_fail(TD_ERR_INVALID, "%s: the size of dimension %d is negative in %s", call,
                           d, td__shape_text(shape, ndim));
        if (strides && strides[d] < 0)
            return td_fail(TD_ERR_INVALID, "%s: the stride of dimension %d is negative in %s", call,
                           d, td__shape_text(strides, ndim));
    }
    return TD_OK;
}

td_status td__layout_init(struct td__layout *layout, const char *call, const int64_t *shape,
                          int ndim, const int64_t *strides, td_dtype dtype)
{
    TD_TRY(check_numbers(call, shape, ndim, strides, dtype));

    struct td__layout made = {.dtype = dtype, .ndim = ndim, .numel = 1};
    for (int d = 0; d < ndim; d++) {
        made.shape[d] = shape[d];
        made.strides[d] = strides ? strides[d] : 0;
    }
    int64_t bytes;
    if (!count_elements(&made, &bytes) || !extent_fits(&made))
        return td_fail(TD_ERR_INVALID, "%s: a tensor of shape %s and dtype %s is too large", call,
                       td__shape_text(shape, ndim), td_dtype_name(dtype));
    for (int d = 0; d < ndim; d++)
        made.numel *= shape[d];
    if (!strides)
        td__layout_set_contiguous(&made);
    *layout = made;
    return TD_OK;
}

bool td__layout_is_contiguous(const struct td__layout *layout)
{
    int64_t stride = 1;
    for (int d = layout->ndim; d-- > 0;) {
        if (layout->shape[d] == 0)
            return true;
        if (layout->shape[d] == 1)
            continue;
        if (layout->strides[d] != stride)
            return layout->numel == 0;
        stride *= layout->shape[d];
    }
    return true;
}

size_t td__layout_extent(const struct td__layout *layout)
{
    if (layout->numel == 0)
        return 0;
    int64_t last = 0;
    for (int d = 0; d < layout->ndim; d++)
        last += (layout->shape[d] - 1) * layout->strides[d];
    return (size_t)(last + 1) * td_dtype_size(layout->dtype);
}

bool td__layout_repeats(const struct td__layout *layout)
{
    for (int d = 0; d < layout->ndim; d++)
        if (layout->shape[d] > 1 && layout->strides[d] == 0)
            return layout->numel > 0;
    return false;
}
