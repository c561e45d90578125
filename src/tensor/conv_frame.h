/* A frame: a part of an image with zeros around it, so that a kernel needs no bounds checks. */
#ifndef TD_TENSOR_CONV_FRAME_H
#define TD_TENSOR_CONV_FRAME_H

#include "tensor/vector.h"

#include <stddef.h>
#include <stdint.h>
#include <string.h>

struct td__conv_frame {
    int64_t channels, height, width; /* of the image */
    int64_t left;          /* the image's column that is the frame's first; may be negative */
    int64_t rows, columns; /* of the frame */
    int64_t plane;         /* elements from one channel to the next */
};

/** Chooses the distance of channels: an odd number of cache lines, so that the same pixel of all channels does
 *  not map to the same few cache sets. */
static inline void td__conv_frame_space(struct td__conv_frame *frame)
{
    frame->plane = ((frame->rows * frame->columns + 15) / 16 | 1) * 16;
}

static inline int64_t td__conv_frame_size(const struct td__conv_frame *frame)
{
    return frame->channels * frame->plane;
}

/** Zeroes new memory for a frame. */
static inline void td__conv_frame_clear(const struct td__conv_frame *frame, size_t size, void *to)
{
    memset(to, 0, (size_t)td__conv_frame_size(frame) * size);
}

typedef char td__conv_bytes64 __attribute__((vector_size(64), aligned(1), may_alias));
typedef char td__conv_bytes32 __attribute__((vector_size(32), aligned(1), may_alias));

/** Copies rows of `bytes` bytes, inline, since a call of memcpy() takes longer than most rows; the last
 *  piece of a row overlaps the one before. Prefetches the rows `ahead` bytes further, which are copied next:
 *  they are often in another page, which the processor does not prefetch by itself. */
TD__VECTOR static void td__conv_frame_copy(char *to, size_t to_row, const char *from,
                                           size_t from_row, int64_t rows, size_t bytes,
                                           size_t ahead)
{
    for (int64_t y = 0; y < rows; y++, to += to_row, from += from_row) {
        for (size_t i = 0; i < bytes; i += 64)
            __builtin_prefetch(from + ahead + i);
        if (bytes >= 64) {
            for (size_t i = 0; i + 64 < bytes; i += 64) {
                *(td__conv_bytes64 *)(to + i) = *(const td__conv_bytes64 *)(from + i);
                __asm__ volatile("" ::: "memory"); /* otherwise compilers call memcpy() */
            }
            *(td__conv_bytes64 *)(to + bytes - 64) = *(const td__conv_bytes64 *)(from + bytes - 64);
        } else if (bytes >= 32) {
            *(td__conv_bytes32 *)to = *(const td__conv_bytes32 *)from;
            *(td__conv_bytes32 *)(to + bytes - 32) = *(const td__conv_bytes32 *)(from + bytes - 32);
        } else {
            for (size_t i = 0; i < bytes; i += 4)
                memcpy(to + i, from + i, 4);
        }
    }
}

/** Fills the first `used` rows of `to` [channels, plane], whose first row is the image's row `top`. Elements
 *  have `size` bytes. The columns left and right of the image must be zeros already. */
static inline void td__conv_frame_fill(const struct td__conv_frame *frame, int64_t top,
                                       int64_t used, size_t size, const char *image, char *to)
{
    const int64_t skipped = frame->left > 0 ? frame->left : 0;
    const int64_t before = frame->left < 0 ? -frame->left : 0;
    int64_t count = frame->columns - before;
    if (count > frame->width - skipped)
        count = frame->width - skipped;
    if (count <= 0)
        return;
    const size_t row_bytes = (size_t)frame->columns * size, bytes = (size_t)count * size;
    const int64_t begin = top < 0 ? 0 : top;
    const int64_t end = top + used < frame->height ? top + used : frame->height;
    for (int64_t c = 0; c < frame->channels; c++) {
        char *row = to + (size_t)(c * frame->plane + before) * size;
        for (int64_t y = top; y < top + used; y++)
            if (y < 0 || y >= frame->height)
                memset(row + (size_t)(y - top) * row_bytes, 0, bytes);
        if (begin < end)
            td__conv_frame_copy(
                row + (size_t)(begin - top) * row_bytes, row_bytes,
                image + (size_t)((c * frame->height + begin) * frame->width + skipped) * size,
                (size_t)frame->width * size, end - begin, bytes,
                c + 1 < frame->channels ? (size_t)(frame->height * frame->width) * size : 0);
    }
}

#endif
