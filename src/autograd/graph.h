/* The record of what was computed: nodes, one for each recorded call, with edges from each of its
 * inputs to the node that made that input.
 *
 *     w (leaf) <---\
 *                   mul <---- sum        an edge points to where a gradient goes next
 *     x (leaf) <---/
 *
 * A leaf that asks for its gradient has a node too, of the function td__leaf_function, which adds
 * what arrives to the leaf's gradient. A tensor holds its node, a node holds those of its inputs: so
 * the record is kept by its results. What a node saved is an alias of the tensor, never the tensor
 * itself, so that a node that saved its own output does not keep itself alive. */
#ifndef TD_AUTOGRAD_GRAPH_H
#define TD_AUTOGRAD_GRAPH_H

#include "tensor/kernels.h"

#include <tandem/autograd.h>

#include <pthread.h>

struct td__edge {
    struct td_node *node; /* retained; NULL where no gradient is asked for */
    int slot;             /* which output of that node */
};

struct td__hook {
    struct td__hook *next;
    uint64_t id;
    td_grad_hook grad_hook; /* one of the two */
    td_accumulated_hook accumulated_hook;
    void *arg;
};

/* One output of a node: what its gradient must look like, and who wants to see it. */
struct td__output {
    struct td__layout layout; /* of the tensor; shape and dtype count */
    struct td__device *device;
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

    pthread_mutex_t lock; /* what follows, saved, and the outputs' hooks and gradients. Innermost */
    bool let_go;          /* saved tensors are gone */
    struct td__region *region; /* owned; of a change through a view (view_base.h): which part */

    /* Of a leaf. */
    td_tensor *leaf;  /* not retained; NULL once the tensor is gone */
    bool grad_is_old; /* the gradient stands for 0, whatever its elements; NULL stands for it too */
    bool grad_is_busy; /* a backward pass is writing to it */
};

extern const td_function td__leaf_function;

void td__node_retain(struct td_node *node);
void td__node_release(struct td_node *node);

/** Releases what the node saved: another backward pass through it is an error. */
void td__node_let_go(struct td_node *node);

/** A node without edges, with its place in the order of the record; one reference. NULL without
 *  memory. */
struct td_node *td__node_create(const td_function *function, int inputs, int outputs, int saved,
                                size_t data_size);

/** A node of the spec; NULL in *node where nothing needs to be recorded. */
td_status td__node_make(const td_function *function, int output_count, const td_node_spec *spec,
                        struct td_node **node);

/** Makes `tensor`, which has no node, the output `slot` of a node; the tensor lets go of its node. */
void td__node_attach(struct td_node *node, int slot, td_tensor *tensor);
void td__node_leave(td_tensor *tensor);

/** The node of a leaf that asks for its gradient; one reference. NULL without memory. */
struct td_node *td__leaf_node(td_tensor *tensor);

/* What the engine does with a leaf (leaf.c). */

/** Adds to its gradient (not where NULL: it was written already), and runs the hooks behind that. */
td_status td__leaf_accumulate(struct td_node *node, td_tensor *grad);
/** Its gradient, for writing; NULL where that is not possible. td__leaf_unclaim() afterwards. */
td_tensor *td__leaf_target(struct td_node *node, bool *accumulate);
void td__leaf_unclaim(struct td_node *node);

/** Lets the hooks of an output see its gradient, and replace it. */
td_status td__run_grad_hooks(struct td_node *node, int slot, td_tensor **grad);

/** How an operator ends: td_record() for a raw output, which then goes to the thread's scope. NULL
 *  for NULL. */
td_tensor *td__result(const td_function *function, td_tensor *output, const td_node_spec *spec);

static inline bool td__node_is_leaf(const struct td_node *node)
{
    return node->function == &td__leaf_function;
}

/** Whether the tensor's node takes all recorded changes of its memory into account. */
static inline bool td__node_is_current(const td_tensor *tensor)
{
    return atomic_load_explicit(&tensor->history, memory_order_acquire) ==
           atomic_load_explicit(&tensor->storage->history, memory_order_relaxed);
}

/** Brings the tensor's node up to date where its memory was changed, and that was recorded, through
 *  another view of the same base. Fails (TD_ERR_STATE) where it was changed through a tensor that has
 *  nothing but the memory in common with this one. */
td_status td__refresh_node(td_tensor *tensor, const char *name);

/** The same for who only asks: where that fails, the node stays what it was. */
void td__try_refresh_node(const td_tensor *tensor);

/** Records a change in place: from now on `tensor` is the result of the spec (whose inputs may
 *  contain the tensor as it was before). Call it after the change; it counts the change of the
 *  memory too. Checks nothing: see td__check_in_place(). */
td_status td__record_in_place(const td_function *function, td_tensor *tensor,
                              const td_node_spec *spec);

/** Whether `tensor` may be changed in place now: not a leaf while recording. */
td_status td__check_in_place(td_tensor *tensor, const char *name);

/**
 * For the backward of an operator: where the gradient of input `index` may be written at once, the
 * leaf's own gradient, of the right shape and contiguous. NULL where it may not. With *accumulate
 * the value is to be added to the elements, otherwise they are to be overwritten. When it is
 * written, grad_inputs[index] = this tensor tells so.
 */
td_tensor *td__grad_target(td_node *node, int index, bool *accumulate);

/** Runs fn(arg) when the outermost backward pass that this thread is in has run all nodes and not
 *  failed; a failure of fn is that of the pass. TD_ERR_STATE outside of one. */
td_status td__at_end_of_backward(td_status (*fn)(void *arg), void *arg);

/** Calls visit(leaf's tensor, arg) for each leaf behind the outputs, once. */
td_status td__visit_leaves(td_tensor *const *outputs, int count,
                           void (*visit)(td_tensor *leaf, void *arg), void *arg);

/** x summed up over what broadcasting repeated, to the given shape; x itself (retained) where it has
 *  that shape already. Raw: one reference, records nothing. */
td_tensor *td__sum_to(td_tensor *x, const struct td__layout *target);

#endif
