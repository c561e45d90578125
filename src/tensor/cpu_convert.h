/* Elements of one dtype from those of another, in arrays without gaps. */
#ifndef TD_TENSOR_CPU_CONVERT_H
#define TD_TENSOR_CPU_CONVERT_H

#include "tensor/tensor_internal.h"

/** f16 or bf16 to f32, and back. */
void td__convert_half(float *to, const void *from, td_dtype dtype, int64_t count);
void td__convert_to_half(void *to, td_dtype dtype, const float *from, int64_t count);

/** Any dtype to any other, as the slot `copy` of kernels.h says. */
void td__convert(void *to, td_dtype to_dtype, const void *from, td_dtype from_dtype, int64_t count);

/** One element of `value`, as td_full() makes it; false where the dtype cannot hold it. */
bool td__element_of(void *element, td_dtype dtype, double value);

td_status td__cpu_fill(td_tensor *out, double value);
td_status td__cpu_copy(td_tensor *out, const td_tensor *x);

#endif
