/* The kernels "Dropout" of kernels.h for the processor. */
#ifndef TD_TENSOR_CPU_DROPOUT_H
#define TD_TENSOR_CPU_DROPOUT_H

#include "tensor/kernels.h"

td_status td__cpu_dropout(td_tensor *out, td_tensor *keep, const td_tensor *x, double p,
                          int64_t block, td_generator *generator);
td_status td__cpu_dropout_grad(td_tensor *grad_x, const td_tensor *grad_y, const td_tensor *keep,
                               double p, int64_t block);

#endif
