/* How td_split_heads() cuts a projection, for operators that produce the gradients of its parts: where these are parts
 * of one tensor in turn, its backward need not copy them together. */
#ifndef TD_AUTOGRAD_HEADS_H
#define TD_AUTOGRAD_HEADS_H

#include "tensor/tensor_internal.h"

struct td__heads {
    int64_t batch, length, parts, heads, width; /* width: of one head */
};

/** Part `index` of whole [batch, length, parts * heads * width], as a view [batch, heads, length, width] that the caller
 *  owns; NULL without memory. */
td_tensor *td__heads_part(td_tensor *whole, const struct td__heads *split, int64_t index);

/** Whether x[0] … x[split->parts - 1] are the parts of one contiguous tensor, in this order; none is NULL then. */
bool td__heads_are_whole(td_tensor *const *x, const struct td__heads *split);

#endif
