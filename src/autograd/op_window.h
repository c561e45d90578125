/* Windows that move over pictures: what convolutions and pooling have in common. */
#ifndef TD_AUTOGRAD_OP_WINDOW_H
#define TD_AUTOGRAD_OP_WINDOW_H

#include "autograd/op_kernel.h"

/** The sizes of x [N, C, H, W]; those of [C, H, W] with an N of 1. */
struct td__picture {
    int64_t shape[4];
    bool single; /* there is no N */
};

/** Fails where x is neither. */
td_status td__picture_of(const char *call, const td_tensor *x, struct td__picture *picture);

/** The shape with `channels`, `height` and `width` in place of C, H and W; without N where there was
 *  none. Returns the number of dimensions. */
int td__picture_shape(const struct td__picture *picture, int64_t channels, int64_t height,
                      int64_t width, int64_t *shape);

/** Checks a window (a stride or dilation of 0 was replaced before), and sets sizes[0] and sizes[1] to
 *  how many places it has over the picture's height and width, at least 1 each. */
td_status td__window_sizes(const char *call, const struct td__window *window,
                           const struct td__picture *picture, int64_t *sizes);

/** What the user may leave 0. */
static inline int64_t td__or(int64_t value, int64_t otherwise)
{
    return value ? value : otherwise;
}

#endif
