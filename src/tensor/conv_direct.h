/* Convolutions by products that read the pictures where they lie (direct.h): for channels that fill
 * vectors. conv.h has the sizes. */
#ifndef TD_TENSOR_CONV_DIRECT_H
#define TD_TENSOR_CONV_DIRECT_H

#include "tensor/conv.h"

/** Whether a product whose vectors are of `channels` channels, and sums have `steps` steps, is worth
 *  it. It depends on no instruction set, so that all of them give the same results. */
bool td__conv_fits_direct(int64_t channels, int64_t steps);

/* conv->x is not used; the pictures are contiguous. Fail with TD_ERR_NOMEM only. */
td_status td__conv_direct(const struct td__conv *conv, td_dtype dtype, const void *x, const void *w,
                          const void *bias, void *out);
td_status td__conv_direct_grad_input(const struct td__conv *conv, td_dtype dtype,
                                     const void *grad_y, const void *w, void *grad_x);
/** Adds to grad_w. */
td_status td__conv_direct_grad_weight(const struct td__conv *conv, td_dtype dtype,
                                      const void *grad_y, const void *x, void *grad_w);

#endif
