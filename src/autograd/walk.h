/* All nodes behind some results, each once, with the number of edges that lead to it. */
#ifndef TD_AUTOGRAD_WALK_H
#define TD_AUTOGRAD_WALK_H

#include "autograd/graph.h"

struct td__walk_entry {
    struct td_node *node; /* kept by the results */
    int pending;          /* edges to it from other entries */
    bool needed;          /* for td_gradients(): an input that is asked for is here, or behind it */
    bool written;         /* a leaf: a gradient was written into its own (td__grad_target()) */
    td_tensor **grads;    /* what arrived, for each output; owned */
};

struct td__walk {
    struct td__walk_entry *entries;
    int count, capacity;
    int *index; /* by hash of the node: number of its entry plus 1, or 0 */
    int index_size;
};

/** Fills in an all-zero walk. It needs no recursion: the record may be long. */
td_status td__walk_from(struct td__walk *walk, td_tensor *const *outputs, int count);

/** The entry of a node, or NULL. */
struct td__walk_entry *td__walk_find(const struct td__walk *walk, const struct td_node *node);

void td__walk_free(struct td__walk *walk);

#endif
