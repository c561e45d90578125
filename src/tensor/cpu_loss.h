/* The kernels "Losses" of kernels.h for the processor. */
#ifndef TD_TENSOR_CPU_LOSS_H
#define TD_TENSOR_CPU_LOSS_H

#include "tensor/kernels.h"

td_status td__cpu_nll_loss(td_tensor *out, double *total, const td_tensor *x,
                           const td_tensor *target, const td_tensor *weight, int64_t ignore_index);
td_status td__cpu_nll_loss_grad(td_tensor *grad_x, const td_tensor *grad_y, double scale,
                                const td_tensor *target, const td_tensor *weight,
                                int64_t ignore_index);
td_status td__cpu_cross_entropy_grad(td_tensor *grad_x, const td_tensor *grad_y, double scale,
                                     const td_tensor *log_softmax, const td_tensor *target,
                                     const td_tensor *weight, int64_t ignore_index);
td_status td__cpu_pair_loss(enum td__pair_loss loss, td_tensor *out, const td_tensor *x,
                            const td_tensor *y, double scale);
td_status td__cpu_pair_loss_grad(enum td__pair_loss loss, td_tensor *grad_x,
                                 const td_tensor *grad_y, const td_tensor *x, const td_tensor *y,
                                 double scale);

#endif
