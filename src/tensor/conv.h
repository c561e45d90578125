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

#endif
