/* The kernels of «Products» and «Pooling» in kernels.h, on the processor. */
#ifndef TD_TENSOR_CPU_PRODUCTS_H
#define TD_TENSOR_CPU_PRODUCTS_H

#include "tensor/kernels.h"

td_status td__cpu_matmul(td_tensor *out, const td_tensor *a, const td_tensor *b, double alpha,
                         bool accumulate);
td_status td__cpu_linear(td_tensor *out, const td_tensor *x, const td_tensor *w,
                         const td_tensor *bias);
td_status td__cpu_conv2d(td_tensor *out, const td_tensor *x, const td_tensor *w,
                         const td_tensor *bias, const struct td__window *window);
td_status td__cpu_conv2d_grad_input(td_tensor *grad_x, const td_tensor *grad_y, const td_tensor *w,
                                    const struct td__window *window);
td_status td__cpu_conv2d_grad_weight(td_tensor *grad_w, td_tensor *grad_bias,
                                     const td_tensor *grad_y, const td_tensor *x,
                                     const struct td__window *window, bool accumulate);

td_status td__cpu_max_pool2d(td_tensor *out, td_tensor *indices, const td_tensor *x,
                             const struct td__window *window);
td_status td__cpu_max_pool2d_grad(td_tensor *grad_x, const td_tensor *grad_y,
                                  const td_tensor *indices);
td_status td__cpu_adaptive_max_pool2d(td_tensor *out, td_tensor *indices, const td_tensor *x);
td_status td__cpu_avg_pool2d(td_tensor *out, const td_tensor *x, const struct td__window *window);
td_status td__cpu_avg_pool2d_grad(td_tensor *grad_x, const td_tensor *grad_y,
                                  const struct td__window *window);
td_status td__cpu_adaptive_avg_pool2d(td_tensor *out, const td_tensor *x);
td_status td__cpu_adaptive_avg_pool2d_grad(td_tensor *grad_x, const td_tensor *grad_y);

#endif
