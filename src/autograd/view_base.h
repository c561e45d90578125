/* A tensor and its views share what is known about gradients of their memory.
 *
 *     x = a * 2            x is the base: node mul
 *     v = x[0], u = x[1]   views: nodes select, of mul
 *     v.mul_(b)            the base is now the result of mul_, with the region x[0]; inputs mul and b
 *     x, u, v              are out of date; each gets its new node when it is used next:
 *                          x is the result of mul_ itself, u and v are views of that result
 *
 * A change through a view is a node of the whole base that remembers the region which the view covers.
 * In backward the gradient of the region goes through the function of the change, and comes back to its
 * place; outside of the region the gradient is left alone.
 *
 * The base is an object of its own, and holds no tensor: a view keeps the record of its base, not the
 * base. It is made with the first view that is taken while grad mode is on. A view that was taken under
 * TD_NO_GRAD, and a td_detach(), are bases of their own over the same memory: when one of them is
 * changed, and that is recorded, the others cannot follow, and using them is an error. */
#ifndef TD_AUTOGRAD_VIEW_BASE_H
#define TD_AUTOGRAD_VIEW_BASE_H

#include "autograd/graph.h"

/** A part of a base: `part` begins `start` elements behind the first one of `whole`. */
struct td__region {
    struct td__layout whole, part;
    int64_t start;
};

/** How a view ends, as td__result() for others: `view` is a raw view of `of`, the input of the
 *  spec, and from then on changes with it. */
td_tensor *td__view_result(const td_function *function, td_tensor *view, td_tensor *of,
                           const td_node_spec *spec);

/** The tensor is no longer one of the views of its base. */
void td__view_base_leave(td_tensor *tensor);

/** `leaf` begins or ceases to be a leaf that asks for its gradient: its views know. */
void td__view_base_set_leaf(td_tensor *leaf);

/** The backward of a node that has a region, as td_function has it. */
td_status td__region_backward(struct td_node *node, td_tensor *grad_output,
                              td_tensor **grad_inputs);

#endif
