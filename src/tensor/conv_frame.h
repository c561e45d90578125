/* A part of a picture with zeros around it, so that a kernel never has to look where the picture ends. */
#ifndef TD_TENSOR_CONV_FRAME_H
#define TD_TENSOR_CONV_FRAME_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

struct td__conv_frame {
    int64_t channels, height, width; /* of the picture */
    int64_t left;          /* the picture's column that is the frame's first, or less than 0 */
    int64_t rows, columns; /* of the frame */
    int64_t plane;         /* elements from one channel to the next */
};

/** Chooses the distance of channels: an odd number of cache lines, so that the same pixel of all channels
 *  does not fall into the same few sets of the cache. */
static inline void td__conv_frame_space(struct td__conv_frame *frame)
{
    frame->plane = ((frame->rows * frame->columns + 15) / 16 | 1) * 16;
}

static inline int64_t td__conv_frame_size(const struct td__conv_frame *frame)
{
    return frame->channels * frame->plane;
}

/** Makes zeros of new memory for a frame. */
static inline void td__conv_frame_clear(const struct td__conv_frame *frame, size_t size, void *to)
{
    memset(to, 0, (size_t)td__conv_frame_size(frame) * size);
}

/** Fills `to` [channels, plane], whose first row is the picture's row `top`; of the frame's rows
 *  only the first `used`. Elements have `size` bytes. Left and right of the picture there are zeros
 *  already, as that is so for all parts of it. */
static inline void td__conv_frame_fill(const struct td__conv_frame *frame, int64_t top,
                                       int64_t used, size_t size, const char *picture, char *to)
{
    const int64_t skipped = frame->left > 0 ? frame->left : 0;
    const int64_t before = frame->left < 0 ? -frame->left : 0;
    int64_t count = frame->columns - before;
    if (count > frame->width - skipped)
        count = frame->width - skipped;
    if (count <= 0)
        return;
    const size_t row_bytes = (size_t)frame->columns * size, bytes = (size_t)count * size;
    const size_t whole = bytes / 32 * 32;
    for (int64_t c = 0; c < frame->channels; c++) {
        char *row = to + (size_t)(c * frame->plane + before) * size;
        for (int64_t y = top; y < top + used; y++, row += row_bytes) {
            if (y < 0 || y >= frame->height) {
                memset(row, 0, bytes);
                continue;
            }
            const char *from = picture +
                               (size_t)((c * frame->height + y) * frame->width + skipped) * size;
            /* A call would take longer than most rows. The last piece overlaps the one before. */
            for (size_t i = 0; i < whole; i += 32)
                memcpy(row + i, from + i, 32);
            if (whole > 0)
                memcpy(row + bytes - 32, from + bytes - 32, 32);
            else
                for (size_t i = 0; i < bytes; i += 4)
                    memcpy(row + i, from + i, 4);
        }
    }
}

#endif
