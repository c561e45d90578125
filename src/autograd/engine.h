/* The engine of backward passes. */
#ifndef TD_AUTOGRAD_ENGINE_H
#define TD_AUTOGRAD_ENGINE_H

#include "autograd/graph.h"

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

/* ---- Graph traversal (walk.c) ---------------------------------------------------------------- */

struct td__walk_entry {
    struct td_node *node; /* the outputs keep it alive */
    int pending;          /* edges to it from other entries */
    bool needed;          /* for td_gradients(): leads to a captured input */
    bool written;         /* a leaf whose gradient was written directly (td__grad_target()) */
    td_tensor **grads;    /* accumulated, for each output; owned */
};

struct td__walk {
    struct td__walk_entry *entries;
    int count, capacity;
    int *index; /* by hash of the node: number of its entry plus 1, or 0 */
    int index_size;
};

/** Fills in an all-zero walk. Not recursive: the graph may be deep. */
td_status td__walk_from(struct td__walk *walk, td_tensor *const *outputs, int count);

/** The entry of a node, or NULL. */
struct td__walk_entry *td__walk_find(const struct td__walk *walk, const struct td_node *node);

void td__walk_free(struct td__walk *walk);

#endif
