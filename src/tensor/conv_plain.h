/* Convolutions whose kernel has one place, and moves by one: plain products, with vectors of pixels. conv.h
 * has the sizes. */
#ifndef TD_TENSOR_CONV_PLAIN_H
#define TD_TENSOR_CONV_PLAIN_H

#include "tensor/conv.h"

/** Whether it is one, and has enough pixels to fill vectors. */
bool td__conv_fits_plain(const struct td__conv *conv);

/* conv->x is not used; the pictures are contiguous. Fail with TD_ERR_NOMEM only. */
td_status td__conv_plain(const struct td__conv *conv, td_dtype dtype, const void *x, const void *w,
                         const void *bias, void *out);
td_status td__conv_plain_grad_input(const struct td__conv *conv, td_dtype dtype, const void *grad_y,
                                    const void *w, void *grad_x);

#endif
