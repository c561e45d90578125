/* Two linear layers with a GELU between them, as one node: the MLP of a transformer. Modules use it where the kernels of a
 * device compute the GELU together with the products beside it. */
#ifndef TD_AUTOGRAD_OP_MLP_H
#define TD_AUTOGRAD_OP_MLP_H

#include "autograd/op.h"

/** gelu_tanh(x w1^T + b1) w2^T + b2: x [..., I], w1 [H, I], b1 [H], w2 [O, H], b2 [O]. Where it is computed by one slot, it
 *  differs from td_f_linear() and td_f_gelu_tanh() by roundings. NULL on failure. */
td_tensor *td__f_mlp(td_tensor *x, td_tensor *w1, td_tensor *b1, td_tensor *w2, td_tensor *b2);

/** Whether it is worth while: all are on an accelerator that has slots for it, and the shapes fit. */
bool td__mlp_fits(const td_tensor *x, const td_tensor *w1, const td_tensor *b1, const td_tensor *w2,
                  const td_tensor *b2);

#endif
