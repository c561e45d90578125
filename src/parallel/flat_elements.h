/* Single elements of contiguous f32 and f64 tensors in the host's memory, as doubles. */
#ifndef TD_PARALLEL_FLAT_ELEMENTS_H
#define TD_PARALLEL_FLAT_ELEMENTS_H

#include "tensor/tensor_internal.h"

static inline double td__get(const td_tensor *x, int64_t at)
{
    const void *data = td_tensor_data(x);
    return x->layout.dtype == TD_F64 ? ((const double *)data)[at] : ((const float *)data)[at];
}

static inline void td__set(td_tensor *x, int64_t at, double value)
{
    void *data = td_tensor_data(x);
    if (x->layout.dtype == TD_F64)
        ((double *)data)[at] = value;
    else
        ((float *)data)[at] = (float)value;
}

#endif
