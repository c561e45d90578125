/* What the files of the convolution share: its sizes, and im2col.
 *
 * For one group of one image a convolution is a product: out [O, pixels] = w [O, taps] columns [taps,
 * pixels]. A tap is an input channel and a kernel position; the column of an output pixel has the input
 * under the kernel there, 0 outside the image. This matrix never exists as a whole: the product packs parts
 * of it.
 *
 * The parts are copied from an image with its padding, which needs no bounds checks and may be read a little
 * beyond its end: from a copy in `padded`, or from x itself without padding, if memory follows. Larger
 * images (TD__CONV_PADDED_MAX) are used as they are, more slowly. */
#ifndef TD_TENSOR_CONV_H
#define TD_TENSOR_CONV_H

#include "tensor/gemm.h"
#include "tensor/tensor_internal.h"

/** How many elements a copy may have, and how far it may be read beyond its end. */
#define TD__CONV_PADDED_MAX (1024 * 1024)
#define TD__CONV_BEYOND 64

struct td__conv {
    td_window window;
    int64_t images;
    int64_t channels, height, width;             /* of x; channels of one group */
    int64_t out_channels, out_height, out_width; /* out_channels of one group */
    int64_t groups;
    int64_t taps, pixels;       /* of one group; of one output channel */
    int64_t x_image, out_image; /* elements of an image, all channels */
    const void *x;              /* the first image, at the channels of the group */

    int64_t padded_height, padded_width;
    void *padded;        /* one image with its padding; NULL: too large */
    int64_t padded_item; /* the number of that image; -1: none */
};

/** Elements of `padded`, without TD__CONV_BEYOND. */
static inline int64_t td__conv_padded_size(const struct td__conv *conv)
{
    return conv->channels * conv->padded_height * conv->padded_width;
}

/* Parts of `columns` and of its transpose for td__gemm(); gemm->b is a struct td__conv. */
void td__conv_columns_f32(const struct td__gemm *gemm, const struct td__gemm_part *part,
                          int64_t width, void *packed);
void td__conv_columns_f64(const struct td__gemm *gemm, const struct td__gemm_part *part,
                          int64_t width, void *packed);
void td__conv_rows_f32(const struct td__gemm *gemm, const struct td__gemm_part *part, int64_t width,
                       void *packed);
void td__conv_rows_f64(const struct td__gemm *gemm, const struct td__gemm_part *part, int64_t width,
                       void *packed);

/** col2im: adds columns [taps of `channels` channels from c0 on, pixels of output rows y0 …] to the image
 *  `x` of the group. */
struct td__conv_piece {
    int64_t c0, channels;
    int64_t y0, rows;
};
void td__conv_add_f32(const struct td__conv *conv, const struct td__conv_piece *piece,
                      const float *columns, float *x);
void td__conv_add_f64(const struct td__conv *conv, const struct td__conv_piece *piece,
                      const double *columns, double *x);

/* The four algorithms of a convolution. conv->x is not used; the images are contiguous. They fail with
 * TD_ERR_NOMEM only. */

/* For few channels in a group, as in depthwise convolutions: one output plane at a time, with vectors of
 * pixels. */

/** Whether it pays. Independent of the instruction set, so that all give the same results. */
bool td__conv_fits_planes(const struct td__conv *conv);

td_status td__conv_planes(const struct td__conv *conv, td_dtype dtype, const void *x, const void *w,
                          const void *bias, void *out);
td_status td__conv_planes_grad_input(const struct td__conv *conv, td_dtype dtype,
                                     const void *grad_y, const void *w, void *grad_x);
/** Adds to grad_w. */
td_status td__conv_planes_grad_weight(const struct td__conv *conv, td_dtype dtype,
                                      const void *grad_y, const void *x, void *grad_w);

/* For 1 x 1 kernels with stride 1: plain products, with vectors of pixels. */

/** Whether the kernel is 1 x 1, and there are enough pixels to fill vectors. */
bool td__conv_fits_plain(const struct td__conv *conv);

td_status td__conv_plain(const struct td__conv *conv, td_dtype dtype, const void *x, const void *w,
                         const void *bias, void *out);
td_status td__conv_plain_grad_input(const struct td__conv *conv, td_dtype dtype, const void *grad_y,
                                    const void *w, void *grad_x);

/* Products that read the images in place (direct.h): for channels that fill vectors, and finite weights. */

/** Whether a product with vectors of `channels` channels and sums of `steps` steps pays. Independent of the
 *  instruction set, so that all give the same results. */
bool td__conv_fits_direct(int64_t channels, int64_t steps);

td_status td__conv_direct(const struct td__conv *conv, td_dtype dtype, const void *x, const void *w,
                          const void *bias, void *out);
td_status td__conv_direct_grad_input(const struct td__conv *conv, td_dtype dtype,
                                     const void *grad_y, const void *w, void *grad_x);
/** Adds to grad_w. */
td_status td__conv_direct_grad_weight(const struct td__conv *conv, td_dtype dtype,
                                      const void *grad_y, const void *x, void *grad_w);

/* Products with columns (im2col): for any sizes. */

td_status td__conv_gemm(const struct td__conv *conv, td_dtype dtype, const void *x, const void *w,
                        const void *bias, void *out);
td_status td__conv_gemm_grad_input(const struct td__conv *conv, td_dtype dtype, const void *grad_y,
                                   const void *w, void *grad_x);
/** Adds to grad_w. */
td_status td__conv_gemm_grad_weight(const struct td__conv *conv, td_dtype dtype, const void *grad_y,
                                    const void *x, void *grad_w);

#endif
