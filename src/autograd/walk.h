/* All nodes that some outputs depend on, each once, with the number of edges to it. */
#ifndef TD_AUTOGRAD_WALK_H
#define TD_AUTOGRAD_WALK_H

#include "autograd/graph.h"

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
