/* Transposes, for copies between layouts. */
#ifndef TD_TENSOR_CPU_TRANSPOSE_H
#define TD_TENSOR_CPU_TRANSPOSE_H

#include <stddef.h>
#include <stdint.h>

/**
 * to[a][b] = from[b][a] for `rows` times `columns` elements of `element` bytes (2, 4 or 8): the rows of
 * `to` are `to_pitch` bytes apart, and so are `columns` rows of `from` by `from_pitch`.
 */
void td__transpose_plane(char *to, int64_t to_pitch, const char *from, int64_t from_pitch,
                         int64_t rows, int64_t columns, size_t element);

#endif
