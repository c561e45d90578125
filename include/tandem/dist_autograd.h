/* Distributed autograd: a backward pass through remote calls (rpc.h).
 *
 *     TD_DIST_AUTOGRAD(context);                                    to the end of the block
 *     td_value *y = td_rref_sync(net, "forward", TD_ARGS(x), NULL);
 *     td_tensor *loss = td_mse_loss(td_value_tensor(y), target);
 *     td_dist_backward(context, &loss, 1, NULL);
 *     td_dist_optimizer_step(optimizer, context);                   dist_optimizer.h
 *
 * In a context, the calls of this thread, and the calls that the functions make which serve them, record the tensors
 * that require grad and cross from one worker to another. td_dist_backward() follows them back, on all workers that take
 * part, and accumulates the gradients of leaves in the context, on the worker of each leaf: never in td_tensor_grad(). A
 * result that takes no part in the loss does no harm.
 *
 * Parameters in td_ddp() (parallel.h) are averaged over its group in the pass, and the averages are in the context.
 *
 * A context is a number, the same on all workers. It is freed on all of them when its block ends, also after a failure,
 * and when the worker that began it ends.
 *
 * Threads. The context of a thread is that of its innermost TD_DIST_AUTOGRAD. Several contexts may be used at once;
 * backward passes of one context run one after the other. */
#ifndef TANDEM_DIST_AUTOGRAD_H
#define TANDEM_DIST_AUTOGRAD_H

#include <tandem/autograd.h>
#include <tandem/rpc.h>

#ifdef __cplusplus
extern "C" {
#endif

/** Begins a context to the end of the block, whose number is `name`; 0 on failure. A declaration. */
#define TD_DIST_AUTOGRAD(name)                                                                     \
    uint64_t name __attribute__((cleanup(td_dist_autograd_end), unused)) = td_dist_autograd_begin()

/** What TD_DIST_AUTOGRAD calls at its beginning and at its end, which sets *context to 0. 0 on failure: this process is
 *  no worker (TD_ERR_STATE). */
TD_API uint64_t td_dist_autograd_begin(void);
TD_API void td_dist_autograd_end(uint64_t *context);

/** The context of this thread; in a function, that of the call that it serves. 0: none. */
TD_API uint64_t td_dist_autograd_current(void);

/**
 * Accumulates the gradients of `count` roots, each with one element, in the context, on all workers that take part.
 * Returns when all have finished.
 *
 * Errors: TD_ERR_INVALID (no such context here; a root that does not require grad, or has more elements), TD_ERR_STATE (a
 * backward pass of this context is running; a graph that was freed by an earlier pass), TD_ERR_PEER (names the worker that
 * has ended), TD_ERR_ABORTED (td_ddp(): the pass has failed on another rank of the group, which is named), and those of
 * the operators, with the name of the worker. The gradients of the context are then incomplete.
 */
TD_API td_status td_dist_backward(uint64_t context, td_tensor *const *roots, int count,
                                  const td_backward_options *options);

/** The gradient of a leaf of this worker in a context, which belongs to the innermost scope or to the caller; NULL if
 *  there is none (no error), and if there is no such context here. */
TD_API td_tensor *td_dist_autograd_grad(uint64_t context, td_tensor *leaf);

#ifdef __cplusplus
}
#endif

#endif
