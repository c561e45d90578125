/* The autograd graph: a node for each recorded call, with an edge for each input to the node that
 * computed it.
 *
 *     w (leaf) <---\
 *                   mul <---- sum        an edge points to where a gradient goes next
 *     x (leaf) <---/
 *
 * A leaf that requires grad has a node of the function td__leaf_function, which accumulates its
 * gradient. A tensor holds its node and a node those of its inputs, so results keep the graph
 * alive. A node saves an alias of a tensor, never the tensor itself, so that a node that saves its
 * own output is no reference cycle. */
#ifndef TD_AUTOGRAD_GRAPH_H
#define TD_AUTOGRAD_GRAPH_H

#include "tensor/tensor_internal.h"

#include <tandem/autograd.h>

#include <pthread.h>

struct td__edge {
    struct td_node *node; /* retained; NULL: the input does not require grad */
    int output_nr;        /* which output of that node */
};

struct td__grad_place;

/* An observer of a leaf; see below. */
typedef td_status (*td__leaf_observer)(td_tensor *leaf, const struct td__grad_place *place,
                                       void *arg);

struct td__hook {
    struct td__hook *next;
    uint64_t id;
    td_grad_hook grad_hook; /* one of the three */
    td_accumulated_hook accumulated_hook;
    td__leaf_observer observer;
    void *arg;
};

/* One output of a node: the layout of its gradient, and its hooks. */
struct td__output {
    struct td__layout layout; /* of the tensor; shape and dtype count */
    td_device *device;
    struct td__hook *hooks;
    bool keep_grad;
    td_tensor *grad; /* of a leaf, and where keep_grad is set */
};

struct td__saved {
    td_tensor *alias;
    unsigned version; /* of the storage, when it was saved */
};

struct td_node {
    atomic_int owners;
    struct td_node *next_dying;
    const td_function *function;
    uint64_t sequence; /* later ones are larger; a leaf has 0 */

    int input_count, output_count, saved_count;
    struct td__edge *inputs;
    struct td__output *outputs;
    struct td__saved *saved;
    void *data;

    pthread_mutex_t lock; /* guards what follows, `saved`, and the outputs' hooks and gradients;
                           * innermost lock */
    bool saved_freed;     /* saved tensors were freed */
    struct td__region *region; /* owned; the part that an in-place operator changed through a view
                                * (view_base.h) */

    /* Of a leaf. */
    td_tensor *leaf;   /* not retained; NULL once the tensor is gone */
    bool grad_is_zero; /* the gradient counts as 0, whatever its elements are; it may be NULL */
    bool grad_is_busy; /* a backward pass is writing to it */
};

extern const td_function td__leaf_function;

void td__node_retain(struct td_node *node);
void td__node_release(struct td_node *node);

/** Frees the node's saved tensors: another backward pass through it is an error. */
void td__node_free_saved(struct td_node *node);

/** A node without edges, with the next sequence number; one reference. NULL without memory. */
struct td_node *td__node_create(const td_function *function, int inputs, int outputs, int saved,
                                size_t data_size);

/** A node of the spec; *node is NULL if nothing is to be recorded. */
td_status td__node_make(const td_function *function, int output_count, const td_node_spec *spec,
                        struct td_node **node);

/** Makes `tensor`, which has no node, an output of `node`. */
void td__node_attach(struct td_node *node, int output_nr, td_tensor *tensor);
void td__node_leave(td_tensor *tensor);

/** The gradient of an output has the layout of `tensor`, which stays as it is. */
/** TD_ERR_STATE for a shard of a parameter that is whole in passes of its unit only: td_fsdp(). Also where the shape of a
 *  tensor does not fit, which is then the reason. */
td_status td__check_whole(const td_tensor *tensor, const char *function);

void td__node_describe(struct td_node *node, int output_nr, const td_tensor *tensor);

/** The node of a leaf that requires grad; one reference. NULL without memory. */
struct td_node *td__leaf_node(td_tensor *tensor);

/* Leaves, for the engine (leaf.c). */

/** Where a pass delivers the gradients of leaves if not to the leaves themselves. */
struct td__grad_sink {
    /**
     * Gets the final gradient of a leaf, once a pass; NULL as a member: there is no sink. Both
     * tensors are borrowed; a gradient that is retained may be shared (td__grad_add() changes only
     * those that are not). Called by the thread in td__pass_run() and by workers of devices,
     * perhaps at once. A failure ends the pass.
     */
    td_status (*accumulate)(void *arg, td_tensor *leaf, td_tensor *grad);
    void *arg;
};

/** Accumulates `grad` (NULL: it was written already), and runs the accumulated hooks and observers. A
 *  leaf whose tensor is gone drops it. */
td_status td__leaf_accumulate(struct td_node *node, td_tensor *grad);
/** Gives `grad` to a sink. Accumulated hooks do not run: the leaf's own gradient is as it was. A sink
 *  that is a place for gradients runs the observers (td__leaf_observe()). */
td_status td__leaf_give(struct td_node *node, td_tensor *grad, const struct td__grad_sink *sink);
/** Its gradient, claimed for writing; NULL if that is not possible. td__leaf_unclaim()
 * afterwards. */
td_tensor *td__leaf_target(struct td_node *node, bool *accumulate);
void td__leaf_unclaim(struct td_node *node);

/* Leaves whose memory is exchanged, as td_fsdp() does. No backward pass may be writing to the gradient. */

/** The leaf gets other memory and another layout of the same device, and so does its next gradient. Views that were taken
 *  of it before keep the former memory. */
void td__leaf_set_memory(td_tensor *leaf, struct td__storage *storage, int64_t offset,
                         const struct td__layout *layout);

/** Replaces the gradient, which may have another shape than the leaf for now; NULL: none. With `zero` it counts as 0, and
 *  the next pass overwrites it; one without memory gets it when it is read. */
void td__leaf_place_grad(td_tensor *leaf, td_tensor *grad, bool zero);

/** Whether the leaf has a gradient that counts as 0. */
bool td__leaf_grad_is_zero(const td_tensor *leaf);

/** Whether the leaf has a gradient that does not count as 0. */
bool td__leaf_has_grad(const td_tensor *leaf);

/* Observers of leaves, as td_ddp() has them. Unlike an accumulated hook, an observer also serves passes whose
 * gradients are accumulated elsewhere: in a context of distributed autograd. It is called when a pass has accumulated
 * the final gradient of a leaf: in `place`, which is borrowed to the end of the pass, or (NULL) in the leaf. A failure
 * ends the pass. */

struct td__grad_place {
    uint64_t context;   /* its number */
    int64_t deadline;   /* of the pass, a td__deadline */
    int64_t timeout_ms; /* of calls that outlive the pass */
    /** The gradient of a leaf, with one reference; NULL if there is none. */
    td_tensor *(*get)(void *arg, td_tensor *leaf);
    /** Copies `grad` over the gradient of a leaf. */
    td_status (*replace)(void *arg, td_tensor *leaf, td_tensor *grad);
    void *arg;
};

/** Adds an observer to a leaf, for td_tensor_remove_hook(). */
td_status td__leaf_add_observer(td_tensor *tensor, td__leaf_observer observer, void *arg,
                                uint64_t *id);
/** Runs the observers of a leaf whose gradient a place has accumulated. */
td_status td__leaf_observe(td_tensor *leaf, const struct td__grad_place *place);

/** Called when a pass of a context has failed, and when a context has ended; set by td_ddp(). Never waits. */
extern void (*_Atomic td__on_context_lost)(uint64_t context, int64_t timeout_ms);

/** The number of the context of distributed autograd in which this thread records; 0: none. */
extern _Thread_local uint64_t td__current_context;

/** Runs the grad hooks of an output, which may replace the gradient. */
td_status td__run_grad_hooks(struct td_node *node, int output_nr, td_tensor **grad);

/** td_record() for a raw output, which then belongs to the thread's scope: the last step of an
 *  operator. NULL for NULL. */
td_tensor *td__result(const td_function *function, td_tensor *output, const td_node_spec *spec);

static inline bool td__node_is_leaf(const struct td_node *node)
{
    return node->function == &td__leaf_function;
}

/** Whether the tensor's node includes all recorded in-place changes of its memory. */
static inline bool td__node_is_current(const td_tensor *tensor)
{
    return atomic_load_explicit(&tensor->history, memory_order_acquire) ==
           atomic_load_explicit(&tensor->storage->history, memory_order_relaxed);
}

/** Updates the tensor's node after a recorded in-place change through another view of the same
 *  base. TD_ERR_STATE if the change went through a tensor that shares the memory but not the
 *  base. */
td_status td__refresh_node(td_tensor *tensor, const char *name);

/** The same for queries: if it fails, the node stays as it was. */
void td__try_refresh_node(const td_tensor *tensor);

/** Records an in-place operator: `tensor` becomes the output of the spec, whose inputs may contain
 *  the tensor as it was before. Call it after the change; it also increments the version of the
 *  storage. Checks nothing: see td__check_in_place(). */
td_status td__record_in_place(const td_function *function, td_tensor *tensor,
                              const td_node_spec *spec);

/** Fails if `tensor` must not be changed in place now: a leaf that requires grad, while grad mode
 * is on. Prepares it for the change otherwise (td__prepare_write()). */
td_status td__check_in_place(td_tensor *tensor, const char *name);

/**
 * For the backward of an operator: the gradient tensor of the leaf that is input `index`,
 * contiguous, to be written directly; NULL if that is not possible. With *accumulate add to its
 * elements, otherwise overwrite them. Then set grad_inputs[index] to this tensor.
 */
td_tensor *td__grad_target(td_node *node, int index, bool *accumulate);

/** Runs fn(arg) when the outermost backward pass of this thread has run all nodes without a
 *  failure. If fn fails, the pass does. After a failure before it, dropped(arg) runs instead, unless it
 *  is NULL; the last error is the reason. TD_ERR_STATE outside of a pass. */
td_status td__at_end_of_backward(td_status (*fn)(void *arg), void (*dropped)(void *arg), void *arg);

/** Calls visit(leaf's tensor, arg) for each leaf behind the outputs, once. */
td_status td__visit_leaves(td_tensor *const *outputs, int count,
                           void (*visit)(td_tensor *leaf, void *arg), void *arg);

/** x summed over broadcast dimensions to the target's shape; x itself (retained) if it has that
 *  shape. Raw: one reference, records nothing. */
td_tensor *td__sum_to(td_tensor *x, const struct td__layout *target);

#endif
