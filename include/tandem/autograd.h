/* Gradients: what was computed is recorded while it runs, and td_backward() walks the record back.
 *
 *     td_tensor_set_requires_grad(w, true);
 *     TD_SCOPE;
 *     td_tensor *loss = td_mse_loss(td_matmul(x, w), y);
 *     td_backward(loss);                                   adds to td_tensor_grad(w)
 *
 * A tensor of floating-point elements that requires grad is a leaf of the record. A result
 * of leaves, or of their results, requires grad, too, and remembers the operator and what that needs
 * to go back. The record lives as long as a result that came of it.
 *
 * Threads. Grad mode belongs to the thread. Several threads may run backward passes at the same
 * time, also through the same leaves; each adds its share. */
#ifndef TANDEM_AUTOGRAD_H
#define TANDEM_AUTOGRAD_H

#include <tandem/tensor.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Leaves and their gradients --------------------------------------------------------------- */

/** Makes a tensor a leaf that requires grad, or (false) one that does not; a gradient that it has
 *  stays. TD_ERR_INVALID for elements that are not floating-point, and for a result of others
 *  (td_detach() it). */
TD_API td_status td_tensor_set_requires_grad(td_tensor *tensor, bool requires_grad);

/** Whether it requires grad, as a leaf or as a result; false for NULL. */
TD_API bool td_tensor_requires_grad(const td_tensor *tensor);

/** Whether it is no recorded result of others. */
TD_API bool td_tensor_is_leaf(const td_tensor *tensor);

/** The gradient that backward passes have summed up; NULL where there is none yet. It belongs to the
 * tensor: retain it to keep it. */
TD_API td_tensor *td_tensor_grad(const td_tensor *tensor);

/** Replaces the gradient of a leaf by `grad` (same shape, dtype and device), which is retained, not
 * copied: later passes add to its elements in place. NULL removes it. A leaf that does not require its
 * gradient may be given one too: optimizers use it. */
TD_API td_status td_tensor_set_grad(td_tensor *tensor, td_tensor *grad);

/** Sets the gradient to 0, if there is one. It costs nothing: the next pass overwrites it. Its memory is
 *  free until then, unless somebody else has retained it, or sees it through a view. */
TD_API td_status td_tensor_zero_grad(td_tensor *tensor);

/** Keeps the gradient of a result too, which is otherwise gone once it was used. */
TD_API td_status td_tensor_retain_grad(td_tensor *tensor);

/** The same elements, in the same memory, without a record. */
TD_API td_tensor *td_detach(td_tensor *tensor);

/* ---- Grad mode --------------------------------------------------------------------------------- */

/** Turns recording on or off for this thread, and returns what it was. It is on at first. */
TD_API bool td_set_grad_enabled(bool enabled);
TD_API bool td_grad_enabled(void);

/** Turns recording off from here to the end of the block, a declaration as TD_SCOPE is:
 *
 *     {
 *         TD_NO_GRAD;
 *         accuracy = td_item(td_mean(td_to_dtype(td_eq(td_argmax(y, 1, false), target), TD_F32)));
 *     }
 */
#define TD_NO_GRAD TD_NO_GRAD_NAMED(TD_UNIQUE(td_no_grad_))
#define TD_NO_GRAD_NAMED(name)                                                                     \
    td_no_grad name __attribute__((cleanup(td_no_grad_end), unused)) = td_no_grad_begin()

/** One begun block; its members are the library's. */
typedef struct td_no_grad {
    bool before;
    bool open;
} td_no_grad;
/** What TD_NO_GRAD calls at its beginning and at its end. A second end is fine. */
TD_API td_no_grad td_no_grad_begin(void);
TD_API void td_no_grad_end(td_no_grad *no_grad);

/* ---- Backward ---------------------------------------------------------------------------------- */

/**
 * Adds the gradient of `loss`, which has one element, to all leaves that it came from, and lets go
 * of what was saved on the way: a second pass is an error.
 *
 * Errors: TD_ERR_INVALID for NULL (the last error stays that of the expression that failed), for
 * more than one element, and where no leaf is behind it; TD_ERR_STATE where what is needed was
 * changed in place since, or was let go by an earlier pass (the message names the operator).
 */
TD_API td_status td_backward(td_tensor *loss);

typedef struct td_backward_options {
    bool retain_graph; /* keep what was saved, for another pass */
    void *reserved[4];
} td_backward_options;

/** The same from `count` results at once; gradients[i] has the shape of outputs[i], and may be NULL
 *  for one with one element (1). `gradients` may be NULL as a whole. */
TD_API td_status td_backward_from(td_tensor *const *outputs, td_tensor *const *gradients, int count,
                                  const td_backward_options *options);

/** The gradients of `outputs` for `inputs` (leaves or results) alone, without touching what
 *  td_tensor_grad() has. results[i] is NULL where inputs[i] played no part. */
TD_API td_status td_gradients(td_tensor *const *outputs, td_tensor *const *gradients,
                              int output_count, td_tensor *const *inputs, int input_count,
                              td_tensor **results, const td_backward_options *options);

/* ---- Hooks ------------------------------------------------------------------------------------- */

/** Sees the gradient of a tensor once a pass has summed it up: returns another to take its place
 *  (same shape), or NULL to leave it. A failure is reported by *status, and ends the pass. */
typedef td_tensor *(*td_grad_hook)(td_tensor *grad, void *arg, td_status *status);

/** Called after a pass has added its gradient to that of the leaf `tensor`, once a pass. */
typedef td_status (*td_accumulated_hook)(td_tensor *tensor, void *arg);

/** Adds a hook to a tensor that requires grad; *id, where not NULL, is for removing it. They
 *  run in the order in which they were added, on the thread that computes the gradient. */
TD_API td_status td_tensor_add_grad_hook(td_tensor *tensor, td_grad_hook hook, void *arg,
                                         uint64_t *id);
TD_API td_status td_tensor_add_accumulated_hook(td_tensor *tensor, td_accumulated_hook hook,
                                                void *arg, uint64_t *id);

/** TD_ERR_INVALID where there is no such hook. */
TD_API td_status td_tensor_remove_hook(td_tensor *tensor, uint64_t id);

/* ---- Operators of one's own ---------------------------------------------------------------------
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

/** One recorded call of an operator. */
typedef struct td_node td_node;

typedef struct td_function {
    const char *name; /* for messages */
    /**
     * The gradients of the inputs from those of the outputs. grad_outputs[i] is NULL where none came
     * for that output: it counts as 0. grad_inputs[i] are NULL at first, may stay so (no gradient),
     * and belong to the scope that this runs in, as do all results made here; nothing is recorded.
     * One that has a shape to which the input broadcasts is summed up to the input's. Those that
     * td_node_needs() denies are not used. May run on any thread. A failure ends the pass.
     */
    td_status (*backward)(td_node *node, td_tensor *const *grad_outputs, td_tensor **grad_inputs);
    /** Frees what the data hold, not the data themselves; NULL where there is nothing to free. */
    void (*free_data)(void *data);
    void *reserved[4];
} td_function;

enum { TD_NODE_MAX_TENSORS = 8 };

/** What backward will need. Tensors that are NULL are allowed. */
typedef struct td_node_spec {
    td_tensor *inputs[TD_NODE_MAX_TENSORS];
    int input_count;
    td_tensor *saved[TD_NODE_MAX_TENSORS]; /* inputs, outputs, or others: for td_node_saved() */
    int saved_count;
    const void *data; /* copied */
    size_t data_size;
    td_tensor *const *more_inputs; /* where there are more than TD_NODE_MAX_TENSORS: instead of inputs */
    void *reserved[4];
} td_node_spec;

/** Makes `output` the recorded result of the inputs, if one of them requires grad and grad
 *  mode is on. `output` must be fresh: no leaf, and no result of something recorded. Returns it, or
 *  NULL where that fails; it belongs to whom it did before. A NULL output gives NULL. */
TD_API td_tensor *td_record(const td_function *function, td_tensor *output,
                            const td_node_spec *spec);

/** The same for an operator of several outputs. Their references stay with the caller. */
TD_API td_status td_record_all(const td_function *function, td_tensor *const *outputs,
                               int output_count, const td_node_spec *spec);

/** Whether any of the inputs requires grad while grad mode is on, so that td_record() would
 *  record. */
TD_API bool td_would_record(td_tensor *const *inputs, int count);

/* For backward: */

/** What was saved. NULL where NULL was saved, and (with the last error set, status TD_ERR_STATE)
 *  where it was changed in place since, or let go. */
TD_API td_tensor *td_node_saved(td_node *node, int index);

/** The copy of the spec's data. */
TD_API const void *td_node_data(const td_node *node);

/** Whether the gradient of input `index` is asked for. */
TD_API bool td_node_needs(const td_node *node, int index);

/* ---- Checkpointing ------------------------------------------------------------------------------ */

/** A part of a model as a function: it returns a result of the inputs. */
typedef td_tensor *(*td_segment)(td_tensor *const *inputs, int count, void *arg);

/**
 * Runs segment(inputs, count, arg) and keeps nothing of it but its result: backward runs it a second
 * time to have what it needs, with the same random numbers. `arg` must stay until then. At least one
 * input or tensor that the segment uses should require grad.
 */
TD_API td_tensor *td_checkpoint(td_segment segment, void *arg, td_tensor *const *inputs, int count);

#ifdef __cplusplus
}
#endif

#endif
