/* The kernels "Indices" of kernels.h for the processor. */
#ifndef TD_TENSOR_CPU_INDEX_H
#define TD_TENSOR_CPU_INDEX_H

#include "tensor/tensor_internal.h"

td_status td__cpu_index_select(td_tensor *out, const td_tensor *x, int dim, const td_tensor *index);
td_status td__cpu_index_add(td_tensor *out, int dim, const td_tensor *index, const td_tensor *src);
td_status td__cpu_gather(td_tensor *out, const td_tensor *x, int dim, const td_tensor *index);
td_status td__cpu_scatter_add(td_tensor *out, int dim, const td_tensor *index,
                              const td_tensor *src);

#endif
