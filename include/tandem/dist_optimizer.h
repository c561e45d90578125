/* Distributed optimizers: parameters on several workers, gradients of a context of distributed autograd.
 *
 *     td_value *list = td_rref_sync(net, "parameters", TD_NO_ARGS, NULL);       a list of references
 *     td_dist_optimizer *sgd = td_dist_sgd(list, &(td_sgd_options){.lr = 0.1});
 *     … td_dist_backward(context, &loss, 1, NULL);
 *     td_dist_optimizer_step(sgd, context);
 *     td_dist_optimizer_destroy(sgd);
 *
 * Each worker that owns some of the parameters has an optimizer of its own for them, which
 * td_dist_optimizer_step() runs on all workers at once. The steps on one worker run one after the other, also those of
 * several distributed optimizers. A step does not exclude forwards on the same worker that run at the same time (as in
 * PyTorch): these may see some parameters before the step and others after it.
 *
 * Threads. A distributed optimizer may be used by several threads at once, except for its end. */
#ifndef TANDEM_DIST_OPTIMIZER_H
#define TANDEM_DIST_OPTIMIZER_H

#include <tandem/dist_autograd.h>
#include <tandem/optim.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct td_dist_optimizer td_dist_optimizer;

/** Optimizers with the options of td_sgd(), td_adam() and td_adamw(). `parameters` is a list of references to tensors, on
 *  any workers. NULL on failure: the errors of those functions, with the name of the worker. */
TD_API td_dist_optimizer *td_dist_sgd(td_value *parameters, const td_sgd_options *options);
TD_API td_dist_optimizer *td_dist_adam(td_value *parameters, const td_adam_options *options);
TD_API td_dist_optimizer *td_dist_adamw(td_value *parameters, const td_adam_options *options);

/** Updates all parameters that have a gradient in the context; returns when all workers have done so. On failure, which
 *  names the worker, others may have updated theirs. */
TD_API td_status td_dist_optimizer_step(td_dist_optimizer *optimizer, uint64_t context);

/** Sets the learning rate on all workers. */
TD_API td_status td_dist_optimizer_set_lr(td_dist_optimizer *optimizer, double lr);

/** Frees it on all workers. NULL is fine. */
TD_API void td_dist_optimizer_destroy(td_dist_optimizer *optimizer);

#ifdef __cplusplus
}
#endif

#endif
