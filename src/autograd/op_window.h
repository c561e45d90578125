/* Sliding windows over images, for convolutions and pooling. */
#ifndef TD_AUTOGRAD_OP_WINDOW_H
#define TD_AUTOGRAD_OP_WINDOW_H

#include "autograd/op_kernel.h"

/** The sizes of x [N, C, H, W]; those of [C, H, W] with an N of 1. */
struct td__image {
    int64_t shape[4];
    bool single; /* [C, H, W]: no N */
};

/** Fails if x is neither. */
td_status td__image_of(const char *call, const td_tensor *x, struct td__image *image);

/** The shape with `channels`, `height` and `width` in place of C, H and W; without N if x has
 *  none. Returns the number of dimensions. */
int td__image_shape(const struct td__image *image, int64_t channels, int64_t height, int64_t width,
                    int64_t *shape);

/** Checks a window (a stride or dilation of 0 was replaced before), and sets sizes[] to the
 *  output's height and width, at least 1 each. */
td_status td__window_sizes(const char *call, const struct td__window *window,
                           const struct td__image *image, int64_t *sizes);

/** The value, or `otherwise` if it is 0. */
static inline int64_t td__or(int64_t value, int64_t otherwise)
{
    return value ? value : otherwise;
}

#endif
