/* OpenBLAS, where it is installed and worth it. It is opened at the first product that wants it, so
 * that programs that only communicate do not pay for its memory and its threads. */
#ifndef TD_TENSOR_BLAS_H
#define TD_TENSOR_BLAS_H

#include "tensor/gemm.h"

/** Computes the product with OpenBLAS, on td_get_num_threads() threads. False, with nothing done,
 *  where there is none, or where it cannot: strides that it does not know, a packed B. */
bool td__blas_gemm(td_dtype dtype, const struct td__gemm *gemm);

#endif
