/* Steps of an optimizer in the backward pass (td_optimizer_in_backward()). Who has a final gradient calls
 * td__in_backward_step(): an observer of the leaf, or the wrapper of a module that reduces gradients first. */
#ifndef TD_PARALLEL_IN_BACKWARD_H
#define TD_PARALLEL_IN_BACKWARD_H

#include <tandem/parallel.h>

struct td__in_backward;

/** Steps the parameters of the optimizer with these indices that have a gradient, and frees the gradients. By any thread
 *  of a pass. An error has the name of a parameter. */
td_status td__in_backward_step(struct td__in_backward *all, const int *indices, int count);

/** The wrapper that steps a parameter is gone. */
void td__in_backward_forget(struct td__in_backward *all, int index);

#endif
