/* What the files of the convolution share: its sizes, and pictures as matrices.
 *
 * In one group of one picture a convolution is a product: out [O, pixels] = w [O, taps] columns
 * [taps, pixels]. A tap is an input channel and a place in the kernel; the column of an output pixel
 * has what lies under the kernel there, 0 outside the picture. This matrix is never made as a whole:
 * the product asks for parts of it.
 *
 * They are taken out of a picture whose padding exists, so that nothing has to be compared with its
 * borders, and that may be read a little beyond its end: of a copy in `room`, or of x itself where
 * that has no padding and something follows. Pictures that are too large for that (TD__CONV_ROOM)
 * are used as they are, more slowly. */
#ifndef TD_TENSOR_CONV_H
#define TD_TENSOR_CONV_H

#include "tensor/gemm.h"
#include "tensor/kernels.h"

/** How many elements a copy may have, and how far it may be read beyond its end. */
#define TD__CONV_ROOM (1024 * 1024)
#define TD__CONV_BEYOND 64

struct td__conv {
    struct td__window window;
    int64_t pictures;
    int64_t channels, height, width;             /* of x; channels of one group */
    int64_t out_channels, out_height, out_width; /* out_channels of one group */
    int64_t groups;
    int64_t taps, pixels;           /* of one group; of one output channel */
    int64_t x_picture, out_picture; /* elements of a picture, all channels */
    const void *x;                  /* the first picture, at the channels of the group */

    int64_t padded_height, padded_width;
    void *room;   /* zeros, or one picture with its padding; NULL: too large */
    int64_t held; /* which picture; -1: none */
};

/** Elements of the room, without what is beyond. */
static inline int64_t td__conv_room(const struct td__conv *conv)
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

/** The way back: adds columns [taps of `channels` channels from c0 on, pixels of output rows y0 …]
 *  to the picture `x` of the group. */
struct td__conv_piece {
    int64_t c0, channels;
    int64_t y0, rows;
};
void td__conv_add_f32(const struct td__conv *conv, const struct td__conv_piece *piece,
                      const float *columns, float *x);
void td__conv_add_f64(const struct td__conv *conv, const struct td__conv_piece *piece,
                      const double *columns, double *x);

/* The four ways to make a convolution. conv->x is not used; the pictures are contiguous. They fail with
 * TD_ERR_NOMEM only. */

/* Convolutions whose groups have few channels, as depthwise ones: one plane of the output at a time, with
 * vectors of pixels. */

/** Whether it is worth it. It depends on no instruction set, so that all of them give the same results. */
bool td__conv_fits_planes(const struct td__conv *conv);

td_status td__conv_planes(const struct td__conv *conv, td_dtype dtype, const void *x, const void *w,
                          const void *bias, void *out);
td_status td__conv_planes_grad_input(const struct td__conv *conv, td_dtype dtype,
                                     const void *grad_y, const void *w, void *grad_x);
/** Adds to grad_w. */
td_status td__conv_planes_grad_weight(const struct td__conv *conv, td_dtype dtype,
                                      const void *grad_y, const void *x, void *grad_w);

/* Convolutions whose kernel has one place, and moves by one: plain products, with vectors of pixels. */

/** Whether it is one, and has enough pixels to fill vectors. */
bool td__conv_fits_plain(const struct td__conv *conv);

td_status td__conv_plain(const struct td__conv *conv, td_dtype dtype, const void *x, const void *w,
                         const void *bias, void *out);
td_status td__conv_plain_grad_input(const struct td__conv *conv, td_dtype dtype, const void *grad_y,
                                    const void *w, void *grad_x);

/* Convolutions by products that read the pictures where they lie (direct.h): for channels that fill
 * vectors. */

/** Whether a product whose vectors are of `channels` channels, and sums have `steps` steps, is worth
 *  it. It depends on no instruction set, so that all of them give the same results. */
bool td__conv_fits_direct(int64_t channels, int64_t steps);

td_status td__conv_direct(const struct td__conv *conv, td_dtype dtype, const void *x, const void *w,
                          const void *bias, void *out);
td_status td__conv_direct_grad_input(const struct td__conv *conv, td_dtype dtype,
                                     const void *grad_y, const void *w, void *grad_x);
/** Adds to grad_w. */
td_status td__conv_direct_grad_weight(const struct td__conv *conv, td_dtype dtype,
                                      const void *grad_y, const void *x, void *grad_w);

/* Convolutions by products of columns: for any sizes. */

td_status td__conv_gemm(const struct td__conv *conv, td_dtype dtype, const void *x, const void *w,
                        const void *bias, void *out);
td_status td__conv_gemm_grad_input(const struct td__conv *conv, td_dtype dtype, const void *grad_y,
                                   const void *w, void *grad_x);
/** Adds to grad_w. */
td_status td__conv_gemm_grad_weight(const struct td__conv *conv, td_dtype dtype, const void *grad_y,
                                    const void *x, void *grad_w);

#endif
