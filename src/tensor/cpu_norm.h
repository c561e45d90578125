/* The kernels "Normalisation" of kernels.h for the processor. */
#ifndef TD_TENSOR_CPU_NORM_H
#define TD_TENSOR_CPU_NORM_H

#include "tensor/tensor_internal.h"

td_status td__cpu_batch_norm(td_tensor *out, td_tensor *mean, td_tensor *rstd, const td_tensor *x,
                             const td_tensor *weight, const td_tensor *bias,
                             td_tensor *running_mean, td_tensor *running_var, bool training,
                             double momentum, double eps);
td_status td__cpu_batch_norm_grad(td_tensor *grad_x, td_tensor *grad_weight, td_tensor *grad_bias,
                                  const td_tensor *grad_y, const td_tensor *x,
                                  const td_tensor *weight, const td_tensor *mean,
                                  const td_tensor *rstd, bool training);
td_status td__cpu_layer_norm(td_tensor *out, td_tensor *mean, td_tensor *rstd, const td_tensor *x,
                             const td_tensor *weight, const td_tensor *bias, double eps);
td_status td__cpu_layer_norm_grad(td_tensor *grad_x, td_tensor *grad_weight, td_tensor *grad_bias,
                                  const td_tensor *grad_y, const td_tensor *x,
                                  const td_tensor *weight, const td_tensor *mean,
                                  const td_tensor *rstd);

#endif
