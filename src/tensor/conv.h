/* What the files of the convolution share: its sizes, and pictures as matrices.
 *
 * In one group of one picture a convolution is a product: out [O, pixels] = w [O, taps] columns
 * [taps, pixels]. A tap is an input channel and a place in the kernel; the column of an output pixel
 * has what lies under the kernel there, 0 outside the picture. This matrix is never made as a whole:
 * the product asks for parts of it. */
#ifndef TD_TENSOR_CONV_H
#define TD_TENSOR_CONV_H

#include "tensor/gemm.h"
#include "tensor/kernels.h"

struct td__conv {
    struct td__window window;
    int64_t pictures;
    int64_t channels, height, width;             /* of x; channels of one group */
    int64_t out_channels, out_height, out_width; /* out_channels of one group */
    int64_t groups;
    int64_t taps, pixels;           /* of one group; of one output channel */
    int64_t x_picture, out_picture; /* elements of a picture, all channels */
    const void *x;                  /* the first picture, at the channels of the group */
};

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

#endif
