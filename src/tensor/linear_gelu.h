/* The slots linear_gelu and linear_gelu_grad, composed of others of the same table. */
#ifndef TD_TENSOR_LINEAR_GELU_H
#define TD_TENSOR_LINEAR_GELU_H

#include "tensor/tensor_internal.h"

td_status td__linear_gelu_by(const td_kernels *kernels, td_tensor *out, td_tensor *pre,
                             const td_tensor *x, const td_tensor *w, const td_tensor *bias);
td_status td__linear_gelu_grad_by(const td_kernels *kernels, td_tensor *grad_pre,
                                  td_tensor *grad_bias, const td_tensor *grad_y, const td_tensor *w,
                                  const td_tensor *pre);

/** The host's. */
td_status td__cpu_linear_gelu(td_tensor *out, td_tensor *pre, const td_tensor *x,
                              const td_tensor *w, const td_tensor *bias);
td_status td__cpu_linear_gelu_grad(td_tensor *grad_pre, td_tensor *grad_bias,
                                   const td_tensor *grad_y, const td_tensor *w,
                                   const td_tensor *pre);

#endif
