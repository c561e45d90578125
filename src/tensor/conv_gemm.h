/* Convolutions by products of columns (conv.h): for any sizes. */
#ifndef TD_TENSOR_CONV_GEMM_H
#define TD_TENSOR_CONV_GEMM_H

#include "tensor/conv.h"

/* conv->x is not used; the pictures are contiguous. Fail with TD_ERR_NOMEM only. */
td_status td__conv_gemm(const struct td__conv *conv, td_dtype dtype, const void *x, const void *w,
                        const void *bias, void *out);
td_status td__conv_gemm_grad_input(const struct td__conv *conv, td_dtype dtype, const void *grad_y,
                                   const void *w, void *grad_x);
/** Adds to grad_w. */
td_status td__conv_gemm_grad_weight(const struct td__conv *conv, td_dtype dtype, const void *grad_y,
                                    const void *x, void *grad_w);

#endif
