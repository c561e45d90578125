/* The kernels "Attention" of kernels.h for the processor. */
#ifndef TD_TENSOR_CPU_ATTENTION_H
#define TD_TENSOR_CPU_ATTENTION_H

#include "tensor/tensor_internal.h"

td_status td__cpu_attention(td_tensor *out, td_tensor *lse, const td_tensor *q, const td_tensor *k,
                            const td_tensor *v, const td_tensor *mask, bool causal, double scale);
td_status td__cpu_attention_grad(td_tensor *grad_q, td_tensor *grad_k, td_tensor *grad_v,
                                 const td_tensor *grad_y, const td_tensor *q, const td_tensor *k,
                                 const td_tensor *v, const td_tensor *y, const td_tensor *lse,
                                 const td_tensor *mask, bool causal, double scale);

#endif
