/* What operators need that hand whole tensors to one kernel: the shapes that it wants, and places
 * for the gradients that it writes.
 *
 * Such an operator works in a scope of its own: contiguous copies and the like are given to it by
 * td__adopt(), the result leaves it by td_scope_return(), and no failure has anything to undo. */
#ifndef TD_AUTOGRAD_OP_KERNEL_H
#define TD_AUTOGRAD_OP_KERNEL_H

#include "autograd/op.h"

/** A contiguous tensor in another shape of as many elements, for a kernel: it owns nothing, and lasts
 *  as long as `x` does. */
struct td_tensor td__view_as(const td_tensor *x, const int64_t *shape, int ndim);

/** The tensor with its elements in order, copied only where they are not; it belongs to the scope.
 *  NULL for NULL. */
td_tensor *td__scoped_contiguous(td_tensor *x);

/** A contiguous tensor of this shape, of the dtype and on the device of `like`; of the scope. */
td_tensor *td__fresh(const char *call, const int64_t *shape, int ndim, const td_tensor *like);

/** Fails where a tensor that may be NULL has another dtype or device than x, or another shape than
 *  the one named: "td_f_linear: bias has the shape [3], weight [10, 784]; …" is for the caller. */
td_status td__check_optional(const char *call, const char *what, const td_tensor *tensor,
                             const td_tensor *x, const int64_t *shape, int ndim);

/** The tensor, if its gradient would be recorded, and NULL otherwise: for what is saved. */
static inline td_tensor *td__saved_if(bool needed, td_tensor *tensor)
{
    return needed ? tensor : NULL;
}

/** Whether the gradient of `x` would be recorded now. */
static inline bool td__asks(td_tensor *x)
{
    return x && td_would_record(&x, 1);
}

/* ---- Backward ------------------------------------------------------------------------------------ */

/** What an input that needs a gradient looks like. */
const struct td__layout *td__input_layout(const td_node *node, int index);

/** Where a kernel may write the gradient of an input: the leaf's own (td__grad_target()), or a new
 *  tensor of the scope. With *accumulate it is to be added to. NULL without memory. */
td_tensor *td__grad_place(td_node *node, int index, bool *accumulate);

/** The same for kernels that cannot add. */
struct td__grad_place {
    td_tensor *grad; /* the gradient; NULL where none is asked for */
    td_tensor *into; /* what the kernel is to write: the gradient, or a tensor beside it */
};
td_status td__place_open(struct td__grad_place *place, td_node *node, int index);
/** After the kernel: makes the gradient complete, and hands it to *grad_input. */
td_status td__place_close(struct td__grad_place *place, td_tensor **grad_input);

/** A tensor for a gradient of the shape of grad_y: grad_y itself where nobody else can see it and its
 *  elements are in order, a new one of the scope otherwise. NULL without memory. */
td_tensor *td__reuse(td_tensor *grad_y);

#endif
