/* Convolutions whose groups have few channels, as depthwise ones: one plane of the output at a time, with
 * vectors of pixels. conv.h has the sizes. */
#ifndef TD_TENSOR_CONV_PLANES_H
#define TD_TENSOR_CONV_PLANES_H

#include "tensor/conv.h"

/** Whether it is worth it. It depends on no instruction set, so that all of them give the same results. */
bool td__conv_fits_planes(const struct td__conv *conv);

/* conv->x is not used; the pictures are contiguous. Fail with TD_ERR_NOMEM only. */
td_status td__conv_planes(const struct td__conv *conv, td_dtype dtype, const void *x, const void *w,
                          const void *bias, void *out);
td_status td__conv_planes_grad_input(const struct td__conv *conv, td_dtype dtype,
                                     const void *grad_y, const void *w, void *grad_x);
/** Adds to grad_w. */
td_status td__conv_planes_grad_weight(const struct td__conv *conv, td_dtype dtype,
                                      const void *grad_y, const void *x, void *grad_w);

#endif
