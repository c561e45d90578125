/* For operators that pass whole tensors to one kernel: views in the kernel's shapes, and buffers
 * for the gradients that it writes.
 *
 * Such an operator works in a scope of its own: td__adopt() gives it contiguous copies and the
 * like, td_scope_return() returns the result, and a failure has nothing to undo. */
#ifndef TD_AUTOGRAD_OP_KERNEL_H
#define TD_AUTOGRAD_OP_KERNEL_H

#include "autograd/op.h"

/** A contiguous tensor in another shape of as many elements, for a kernel. It owns nothing, and is
 *  valid as long as `x`. */
struct td_tensor td__view_as(const td_tensor *x, const int64_t *shape, int ndim);

/** x itself if it is contiguous, otherwise a contiguous copy in the scope. NULL for NULL. */
td_tensor *td__scoped_contiguous(td_tensor *x);

/** A contiguous tensor of this shape, of the dtype and on the device of `like`, in the scope. */
td_tensor *td__fresh(const char *call, const int64_t *shape, int ndim, const td_tensor *like);

/** Fails if `tensor` is not NULL and has another dtype or device than x, or another shape than
 *  this. */
td_status td__check_optional(const char *call, const char *what, const td_tensor *tensor,
                             const td_tensor *x, const int64_t *shape, int ndim);

/** Sets rows[] to the sizes of x [R, D], where D are the last `ndim` dimensions; fails if they do not have this shape. */
td_status td__layer_norm_rows(const char *call, const td_tensor *x, const int64_t *shape, int ndim,
                              int64_t rows[2]);

/** `tensor` if it is needed, NULL otherwise: for `saved`. */
static inline td_tensor *td__saved_if(bool needed, td_tensor *tensor)
{
    return needed ? tensor : NULL;
}

/** Whether an operator on `x` would be recorded now. */
static inline bool td__would_record(td_tensor *x)
{
    return x && td_would_record(&x, 1);
}

/* ---- Backward ------------------------------------------------------------------------------------ */

/** The layout of an input that requires grad. */
const struct td__layout *td__input_layout(const td_node *node, int index);

/** The tensor into which a kernel writes the gradient of an input: the leaf's (td__grad_target()),
 *  or a new one of the scope. With *accumulate the kernel adds to it. NULL without memory. */
td_tensor *td__grad_target_or_new(td_node *node, int index, bool *accumulate);

/** The same for kernels that cannot accumulate. */
struct td__grad_buffer {
    td_tensor *grad; /* the gradient; NULL: not needed */
    td_tensor *into; /* where the kernel writes: `grad`, or a temporary tensor */
};
td_status td__grad_buffer_open(struct td__grad_buffer *buffer, td_node *node, int index);
/** After the kernel: adds `into` to `grad` if they differ, and sets *grad_input. */
td_status td__grad_buffer_close(struct td__grad_buffer *buffer, td_tensor **grad_input);

/** The gradient of the weight of a linear layer, input `index`: grad^T x, of grad [N, O] and x [N, I]. A weight that autocast
 *  has cast is an input as it was before, and its f32 gradient is not rounded to the dtype of the product where the device
 *  can do so. */
td_status td__weight_grad(td_node *node, int index, td_tensor *grad, const td_tensor *x,
                          td_tensor **grad_weight);

/** `given`, the operand of a linear layer before autocast has cast it, as an input of the node: where it is f32, it itself, so
 *  that its gradient is; otherwise the cast. */
static inline td_tensor *td__wide_input(td_tensor *given, td_tensor *cast)
{
    return given && given->layout.dtype == TD_F32 ? given : cast;
}

/** A tensor for a gradient of the shape of grad_y: grad_y itself if it is contiguous and not
 *  shared, otherwise a new one of the scope. NULL without memory. */
td_tensor *td__reuse(td_tensor *grad_y);

/* ---- Sliding windows over images, for convolutions and pooling (op_window.c) ----------------- */

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
td_status td__window_sizes(const char *call, const td_window *window, const struct td__image *image,
                           int64_t *sizes);

/** The value, or `otherwise` if it is 0. */
static inline int64_t td__or(int64_t value, int64_t otherwise)
{
    return value ? value : otherwise;
}

#endif
