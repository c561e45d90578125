/* The engine of backward passes. */
#ifndef TD_AUTOGRAD_ENGINE_H
#define TD_AUTOGRAD_ENGINE_H

#include "autograd/walk.h"

/* A gradient that td_gradients() returns instead of accumulating it in a leaf. */
struct td__capture {
    struct td_node *node;
    int output_nr;
    td_tensor *grad; /* the result, owned; NULL: none arrived */
};

/** Runs a pass from the outputs; each gradient has the shape of its output. With captures, only
 *  nodes that lead to them run, and leaves accumulate nothing. */
td_status td__run_backward(td_tensor *const *outputs, td_tensor *const *gradients, int count,
                           struct td__capture *captures, int capture_count, bool retain_graph);

#endif
