/* A tensor and its views share a base, which has the node of the whole tensor.
 *
 *     x = a * 2            x is the base: node mul
 *     v = x[0], u = x[1]   views: nodes select, of mul
 *     v.mul_(b)            the base is now the result of mul_, with the region x[0]; inputs mul and b
 *     x, u, v              are out of date; each gets its new node when it is used next:
 *                          x is the result of mul_ itself, u and v are views of that result
 *
 * An in-place change of a view is a node of the whole base, with the region that the view covers.
 * Backward applies the function's backward to the gradient of the region, and leaves the rest of
 * the gradient as it is.
 *
 * The base is an object of its own and holds no tensor: a view keeps the graph of its base alive,
 * not the base tensor. The first view that is taken in grad mode creates it. Views taken under
 * TD_NO_GRAD, and td_detach(), have bases of their own over the same memory: after a recorded
 * change through one base, using a tensor of another one is an error. */
#ifndef TD_AUTOGRAD_VIEW_BASE_H
#define TD_AUTOGRAD_VIEW_BASE_H

#include "autograd/graph.h"

/** A part of a base; `start` is its offset in elements from the first element of `whole`. */
struct td__region {
    struct td__layout whole, part;
    int64_t start;
};

/** td__result() for views: `view` is a raw view of `of`, the input of the spec, and follows its
 *  in-place changes. */
td_tensor *td__view_result(const td_function *function, td_tensor *view, td_tensor *of,
                           const td_node_spec *spec);

/** Detaches the tensor from its base. */
void td__view_base_leave(td_tensor *tensor);

/** Updates the base after `leaf` has begun or ceased to require grad. */
void td__view_base_set_leaf(td_tensor *leaf);

/** The backward of a node that has a region, as td_function has it. */
td_status td__region_backward(struct td_node *node, td_tensor *grad_output,
                              td_tensor **grad_inputs);

#endif
