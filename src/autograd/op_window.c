/* Sliding windows; see op_kernel.h. */
#include "autograd/op_kernel.h"

#include "base/fail.h"

#include <string.h>

td_status td__image_of(const char *call, const td_tensor *x, struct td__image *image)
{
    TD_TRY(td__check_float(call, x));
    TD_TRY(td__check_dims(call, "x", x, 3, 4));
    image->single = x->layout.ndim == 3;
    image->shape[0] = 1;
    memcpy(image->shape + image->single, x->layout.shape,
           (size_t)x->layout.ndim * sizeof image->shape[0]);
    return TD_OK;
}

int td__image_shape(const struct td__image *image, int64_t channels, int64_t height, int64_t width,
                    int64_t *shape)
{
    const int64_t full[4] = {image->shape[0], channels, height, width};
    int ndim = image->single ? 3 : 4;
    memcpy(shape, full + image->single, (size_t)ndim * sizeof shape[0]);
    return ndim;
}

td_status td__window_sizes(const char *call, const td_window *window,
                           const struct td__image *image, int64_t *sizes)
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
                           "the padding must be at least 0, the others at least 1, and none "
                           "above 2^31 - 1",
                           call, (long long)kernel, (long long)stride, (long long)padding,
                           (long long)dilation, names[i]);
        int64_t size = image->shape[2 + i], reach = dilation * (kernel - 1) + 1;
        if (size + 2 * padding < reach)
            return td_fail(TD_ERR_INVALID,
                           "%s: a kernel of %s %lld (with its dilation) does not fit into an "
                           "image of %lld with a padding of %lld, x has the shape %s",
                           call, names[i], (long long)reach, (long long)size, (long long)padding,
                           td__shape_text(image->shape + image->single, image->single ? 3 : 4));
        sizes[i] = (size + 2 * padding - reach) / stride + 1;
    }
    return TD_OK;
}
