/* The table of the kernels of accelerators: what its two files share. */
#ifndef TD_TENSOR_WRAPPED_KERNELS_H
#define TD_TENSOR_WRAPPED_KERNELS_H

#include "tensor/fallback.h"

/* The device of the operands; all are on the same one. */
static inline td_device *td__operands_device(const td_tensor **const *at, int count)
{
    for (int i = 0; i < count; i++)
        if (*at[i])
            return (*at[i])->storage->device;
    return td__host_device();
}

#define AT(variable) ((const td_tensor **)&(variable))
#define OPERANDS(...) ((const td_tensor **[]){__VA_ARGS__})

/* wrapped_fused.c */
td_status td__wrapped_binary_mixed(td_binary op, td_tensor *out, const td_tensor *a,
                                   const td_tensor *b);
td_status td__wrapped_add_layer_norm(td_tensor *out, td_tensor *sum, td_tensor *mean,
                                     td_tensor *rstd, const td_tensor *x, const td_tensor *residual,
                                     const td_tensor *weight, const td_tensor *bias, double eps);
td_status td__wrapped_add_layer_norm_grad(td_tensor *grad_x, td_tensor *grad_residual,
                                          td_tensor *grad_weight, td_tensor *grad_bias,
                                          const td_tensor *grad_y, const td_tensor *grad_sum,
                                          const td_tensor *sum, const td_tensor *weight,
                                          const td_tensor *mean, const td_tensor *rstd);
td_status td__wrapped_batch_norm_relu(td_tensor *out, td_tensor *statistics, const td_tensor *x,
                                      const td_tensor *residual, const td_tensor *weight,
                                      const td_tensor *bias, td_tensor *running_mean,
                                      td_tensor *running_var, bool training, double momentum,
                                      double eps);
td_status td__wrapped_batch_norm_relu_grad(td_tensor *grad_x, td_tensor *grad_residual,
                                           td_tensor *grad_weight, td_tensor *grad_bias,
                                           const td_tensor *grad_y, const td_tensor *x,
                                           const td_tensor *out, const td_tensor *weight,
                                           const td_tensor *statistics, bool training);
td_status td__wrapped_linear_gelu(td_tensor *out, td_tensor *pre, const td_tensor *x,
                                  const td_tensor *w, const td_tensor *bias);
td_status td__wrapped_linear_gelu_grad(td_tensor *grad_pre, td_tensor *grad_bias,
                                       const td_tensor *grad_y, const td_tensor *w,
                                       const td_tensor *pre);
td_status td__wrapped_matmul_f32(td_tensor *out, const td_tensor *a, const td_tensor *b,
                                 double alpha, bool accumulate);

#endif
