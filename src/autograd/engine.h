/* The backward pass: nodes run when all gradients that lead to them have arrived. */
#ifndef TD_AUTOGRAD_ENGINE_H
#define TD_AUTOGRAD_ENGINE_H

#include "autograd/walk.h"

/* A gradient that is wanted for itself: it is not added to a leaf's. */
struct td__capture {
    struct td_node *node;
    int slot;
    td_tensor *grad; /* the result: owned; NULL where none came */
};

/** Runs a pass from the outputs, whose gradients are given, each with the shape of its output. With
 *  captures, only what leads to them is computed, and leaves are left alone. */
td_status td__run_backward(td_tensor *const *outputs, td_tensor *const *gradients, int count,
                           struct td__capture *captures, int capture_count, bool retain_graph);

#endif
