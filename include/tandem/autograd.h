/* Automatic differentiation: operators record a graph while they run, and td_backward() traverses
 * it.
 *
 *     td_tensor_set_requires_grad(w, true);
 *     TD_SCOPE;
 *     td_tensor *loss = td_mse_loss(td_matmul(x, w), y);
 *     td_backward(loss);                                   accumulates td_tensor_grad(w)
 *
 * A floating-point tensor that requires grad is a leaf of the graph. A result of tensors that
 * require grad requires grad, too, and has a node with its operator and the saved tensors of that.
 * The graph lives as long as a result in it.
 *
 * Threads. Grad mode belongs to the thread. Several threads may run backward passes at once, also
 * through the same leaves; each accumulates its gradients. */
#ifndef TANDEM_AUTOGRAD_H
#define TANDEM_AUTOGRAD_H

#include <tandem/tensor.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Leaves and their gradients --------------------------------------------------------------- */

/** Makes a tensor a leaf that requires grad, or (false) one that does not; its gradient stays.
 *  TD_ERR_INVALID for dtypes that are not floating-point, and for a tensor that is no leaf
 *  (td_detach() it). */
TD_API td_status td_tensor_set_requires_grad(td_tensor *tensor, bool requires_grad);

/** Whether it requires grad, as a leaf or as a result; false for NULL. */
TD_API bool td_tensor_requires_grad(const td_tensor *tensor);

/** Whether it is a leaf: no result of a recorded operator. */
TD_API bool td_tensor_is_leaf(const td_tensor *tensor);

/** The accumulated gradient; NULL if there is none. It belongs to the tensor: retain it to keep
 * it. */
TD_API td_tensor *td_tensor_grad(const td_tensor *tensor);

/** Replaces the gradient of a leaf by `grad` (same shape, dtype and device), which is retained, not
 * copied: later passes accumulate into it in place. NULL removes it. A leaf that does not require
 * grad may have one, too: optimizers use it. */
TD_API td_status td_tensor_set_grad(td_tensor *tensor, td_tensor *grad);

/** Sets the gradient to 0, if there is one, at no cost: the next pass overwrites it. Its memory is
 *  freed until then unless it is shared (retained, or a view). */
TD_API td_status td_tensor_zero_grad(td_tensor *tensor);

/** Keeps the gradient of a tensor that is no leaf, which is otherwise freed once it was used. */
TD_API td_status td_tensor_retain_grad(td_tensor *tensor);

/** The same elements in the same memory, without the graph. */
TD_API td_tensor *td_detach(td_tensor *tensor);

/* ---- Grad mode --------------------------------------------------------------------------------- */

/** Sets grad mode (recording) of this thread, and returns what it was. It is on at first. */
TD_API bool td_set_grad_enabled(bool enabled);
TD_API bool td_grad_enabled(void);

/** Turns grad mode off to the end of the block; a declaration, like TD_SCOPE:
 *
 *     {
 *         TD_NO_GRAD;
 *         accuracy = td_item(td_mean(td_to_dtype(td_eq(td_argmax(y, 1, false), target), TD_F32)));
 *     }
 */
#define TD_NO_GRAD TD_NO_GRAD_NAMED(TD_UNIQUE(td_no_grad_))
#define TD_NO_GRAD_NAMED(name)                                                                     \
    td_no_grad name __attribute__((cleanup(td_no_grad_end), unused)) = td_no_grad_begin()

/** State of TD_NO_GRAD; its members are private. */
typedef struct td_no_grad {
    bool before;
    bool open;
} td_no_grad;
/** What TD_NO_GRAD calls at its beginning and at its end. A second end is fine. */
TD_API td_no_grad td_no_grad_begin(void);
TD_API void td_no_grad_end(td_no_grad *no_grad);

/* ---- Backward ---------------------------------------------------------------------------------- */

/**
 * Accumulates the gradients of `loss`, which has one element, in all leaves of its graph, and frees
 * the saved tensors: a second pass is an error.
 *
 * Errors: TD_ERR_INVALID for NULL (the last error stays that of the expression that failed), for
 * more than one element, and if it does not require grad; TD_ERR_STATE if a saved tensor was
 * changed in place since, or freed by an earlier pass (the error names the operator).
 */
TD_API td_status td_backward(td_tensor *loss);

typedef struct td_backward_options {
    bool retain_graph; /* keep the saved tensors, for another pass */
    void *reserved[4];
} td_backward_options;

/** The same from `count` results at once; gradients[i] has the shape of outputs[i], and may be NULL
 *  for one with one element (1). `gradients` may be NULL as a whole. */
TD_API td_status td_backward_from(td_tensor *const *outputs, td_tensor *const *gradients, int count,
                                  const td_backward_options *options);

/** The gradients of `outputs` with respect to `inputs` (leaves or not), without accumulating in
 *  leaves. results[i] is NULL if inputs[i] was not used. */
TD_API td_status td_gradients(td_tensor *const *outputs, td_tensor *const *gradients,
                              int output_count, td_tensor *const *inputs, int input_count,
                              td_tensor **results, const td_backward_options *options);

/* ---- Hooks ------------------------------------------------------------------------------------- */

/** Gets the gradient of a tensor once a pass has computed it: returns a replacement (same shape),
 *  or NULL to keep it. A failure is set in *status, and ends the pass. */
typedef td_tensor *(*td_grad_hook)(td_tensor *grad, void *arg, td_status *status);

/** Called after a pass has accumulated the gradient of the leaf `tensor`, once a pass. */
typedef td_status (*td_accumulated_hook)(td_tensor *tensor, void *arg);

/** Adds a hook to a tensor that requires grad; *id, where not NULL, is for removing it. They
 *  run in the order in which they were added, on the thread that computes the gradient. */
TD_API td_status td_tensor_add_grad_hook(td_tensor *tensor, td_grad_hook hook, void *arg,
                                         uint64_t *id);
TD_API td_status td_tensor_add_accumulated_hook(td_tensor *tensor, td_accumulated_hook hook,
                                                void *arg, uint64_t *id);

/** TD_ERR_INVALID if there is no such hook. */
TD_API td_status td_tensor_remove_hook(td_tensor *tensor, uint64_t id);

/* ---- Custom operators ---------------------------------------------------------------------------
 *
 *     static td_status double_backward(td_node *node, td_tensor *const *grad_outputs,
 *                                      td_tensor **grad_inputs)
 *     {
 *         grad_inputs[0] = td_mul_scalar(grad_outputs[0], 2);
 *         return grad_inputs[0] ? TD_OK : TD_ERR_NOMEM;
 *     }
 *     static const td_function double_function = {.name = "double", .backward = double_backward};
 *
 *     td_tensor *twice(td_tensor *x)
 *     {
 *         bool before = td_set_grad_enabled(false);
 *         td_tensor *y = td_mul_scalar(x, 2);
 *         td_set_grad_enabled(before);
 *         return td_record(&double_function, y, &(td_node_spec){.inputs = {x}, .input_count = 1});
 *     } */

/** A node of the graph: one recorded call of an operator. */
typedef struct td_node td_node;

typedef struct td_function {
    const char *name; /* for errors */
    /**
     * Computes the gradients of the inputs from those of the outputs. grad_outputs[i] is NULL if
     * that output has none: it counts as 0. grad_inputs[i] are NULL at first, and may stay NULL (no
     * gradient). All results belong to a scope around this call, and grad mode is off. A gradient
     * with a shape to which the input broadcasts is summed to the input's shape. Those for which
     * td_node_needs() is false are ignored. Called by any thread. A failure ends the pass.
     */
    td_status (*backward)(td_node *node, td_tensor *const *grad_outputs, td_tensor **grad_inputs);
    /** Frees what the data own, not the data themselves; NULL: nothing to free. */
    void (*free_data)(void *data);
    void *reserved[4];
} td_function;

enum { TD_NODE_MAX_TENSORS = 8 };

/** Inputs and saved tensors of a node. Tensors may be NULL. */
typedef struct td_node_spec {
    td_tensor *inputs[TD_NODE_MAX_TENSORS];
    int input_count;
    td_tensor *saved[TD_NODE_MAX_TENSORS]; /* inputs, outputs, or others: for td_node_saved() */
    int saved_count;
    const void *data; /* copied */
    size_t data_size;
    td_tensor *const *more_inputs; /* instead of inputs, if there are more than
                                      TD_NODE_MAX_TENSORS */
    void *reserved[4];
} td_node_spec;

/** Makes `output` the result of a node with these inputs, if one of them requires grad and grad
 *  mode is on. `output` must be new: no leaf that requires grad, and no result of a node. Returns
 *  it, or NULL on failure and for NULL; its ownership does not change. */
TD_API td_tensor *td_record(const td_function *function, td_tensor *output,
                            const td_node_spec *spec);

/** The same for an operator of several outputs. */
TD_API td_status td_record_all(const td_function *function, td_tensor *const *outputs,
                               int output_count, const td_node_spec *spec);

/** Whether td_record() would record: grad mode is on, and one of the inputs requires grad. */
TD_API bool td_would_record(td_tensor *const *inputs, int count);

/* For backward: */

/** A saved tensor. NULL if NULL was saved, and (with the last error set, TD_ERR_STATE) if it was
 *  changed in place since, or freed. */
TD_API td_tensor *td_node_saved(td_node *node, int index);

/** The copy of the spec's data. */
TD_API const void *td_node_data(const td_node *node);

/** Whether the gradient of input `index` is needed. */
TD_API bool td_node_needs(const td_node *node, int index);

/* ---- Checkpointing ------------------------------------------------------------------------------ */

/** A part of a model as a function of its inputs. */
typedef td_tensor *(*td_segment)(td_tensor *const *inputs, int count, void *arg);

/**
 * Runs segment(inputs, count, arg) without saving its intermediate tensors: backward runs it again,
 * with the same random numbers. `arg` must stay until then. At least one input or tensor that the
 * segment uses should require grad.
 */
TD_API td_tensor *td_checkpoint(td_segment segment, void *arg, td_tensor *const *inputs, int count);

#ifdef __cplusplus
}
#endif

#endif
