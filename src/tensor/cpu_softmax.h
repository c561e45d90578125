/* The kernels "Softmax" of kernels.h for the processor. */
#ifndef TD_TENSOR_CPU_SOFTMAX_H
#define TD_TENSOR_CPU_SOFTMAX_H

#include "tensor/tensor_internal.h"

td_status td__cpu_softmax(td_tensor *out, const td_tensor *x, bool logarithm);
td_status td__cpu_softmax_grad(td_tensor *grad_x, const td_tensor *grad_y, const td_tensor *y,
                               bool logarithm);

#endif
