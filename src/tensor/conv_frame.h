/* A part of a picture with zeros around it, so that a kernel never has to look where the picture ends. */
#ifndef TD_TENSOR_CONV_FRAME_H
#define TD_TENSOR_CONV_FRAME_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

struct td__conv_frame {
    int64_t channels, height, width; /* of the picture */
    int64_t left;          /* the picture's column that is the frame's first; may be negative */
    int64_t rows, columns; /* of the frame */
};

static inline int64_t td__conv_frame_size(const struct td__conv_frame *frame)
{
    return frame->channels * frame->rows * frame->columns;
}

/** Fills `to` [channels, rows, columns], whose first row is the picture's row `top`; of the frame's rows
 *  only the first `used`. Elements have `size` bytes. */
static inline void td__conv_frame_fill(const struct td__conv_frame *frame, int64_t top,
                                       int64_t used, size_t size, const char *picture, char *to)
{
    const int64_t skipped = frame->left > 0 ? frame->left : 0;
    const int64_t before = frame->left < 0 ? -frame->left : 0;
    int64_t count = frame->columns - before;
    if (count > frame->width - skipped)
        count = frame->width - skipped;
    if (count < 0)
        count = 0;
    const size_t row_bytes = (size_t)frame->columns * size, head = (size_t)before * size;
    const size_t body = (size_t)count * size;
    for (int64_t c = 0; c < frame->channels; c++) {
        char *row = to + (size_t)(c * frame->rows) * row_bytes;
        for (int64_t y = top; y < top + used; y++, row += row_bytes) {
            if (y < 0 || y >= frame->height || count == 0) {
                memset(row, 0, row_bytes);
                continue;
            }
            const char *from = picture +
                               (size_t)((c * frame->height + y) * frame->width + skipped) * size;
            memset(row, 0, head);
            memcpy(row + head, from, body);
            memset(row + head + body, 0, row_bytes - head - body);
        }
    }
}

#endif
