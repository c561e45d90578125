/* Windows that move over pictures; see op_window.h. */
#include "autograd/op_window.h"

#include "base/fail.h"

#include <string.h>

td_status td__picture_of(const char *call, const td_tensor *x, struct td__picture *picture)
{
    TD_TRY(td__check_float(call, x));
    TD_TRY(td__check_dims(call, "x", x, 3, 4));
    picture->single = x->layout.ndim == 3;
    picture->shape[0] = 1;
    memcpy(picture->shape + picture->single, x->layout.shape,
           (size_t)x->layout.ndim * sizeof picture->shape[0]);
    return TD_OK;
}

int td__picture_shape(const struct td__picture *picture, int64_t channels, int64_t height,
                      int64_t width, int64_t *shape)
{
    const int64_t full[4] = {picture->shape[0], channels, height, width};
    int ndim = picture->single ? 3 : 4;
    memcpy(shape, full + picture->single, (size_t)ndim * sizeof shape[0]);
    return ndim;
}

td_status td__window_sizes(const char *call, const struct td__window *window,
                           const struct td__picture *picture, int64_t *sizes)
{
    static const char *const names[2] = {"height", "width"};
    for (int i = 0; i < 2; i++) {
        int64_t kernel = window->kernel[i], stride = window->stride[i];
        int64_t padding = window->padding[i], dilation = window->dilation[i];
        /* The upper limit keeps the sums below from overflowing. */
        if (kernel < 1 || stride < 1 || dilation < 1 || padding < 0 || kernel > INT32_MAX ||
            stride > INT32_MAX || dilation > INT32_MAX || padding > INT32_MAX)
            return td_fail(TD_ERR_INVALID,
                           "%s: kernel %lld, stride %lld, padding %lld, dilation %lld of the %s; "
                           "only the padding may be 0, and none negative or above 2^31 - 1",
                           call, (long long)kernel, (long long)stride, (long long)padding,
                           (long long)dilation, names[i]);
        int64_t size = picture->shape[2 + i], reach = dilation * (kernel - 1) + 1;
        if (size + 2 * padding < reach)
            return td_fail(
                TD_ERR_INVALID,
                "%s: a kernel of %s %lld (with its dilation) does not fit into a "
                "picture of %lld with a padding of %lld, x has the shape %s",
                call, names[i], (long long)reach, (long long)size, (long long)padding,
                td__shape_text(picture->shape + picture->single, picture->single ? 3 : 4));
        sizes[i] = (size + 2 * padding - reach) / stride + 1;
    }
    return TD_OK;
}
