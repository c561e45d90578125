/* IDX files, the format of MNIST: an array of numbers.
 *
 *     0   two zero bytes
 *     2   the type: 8 u8, 9 i8, 11 i16, 12 i32, 13 f32, 14 f64
 *     3   the number of dimensions
 *     4   the sizes, four bytes each
 *         the elements, the last dimension running fastest; all numbers big-endian
 */
#ifndef TD_DATA_IDX_H
#define TD_DATA_IDX_H

#include <tandem/tensor.h>

#include "data/unpack.h"

struct td__idx {
    td_dtype dtype;
    int ndim; /* 1 … TD_MAX_DIMS */
    int64_t shape[TD_MAX_DIMS];
    size_t bytes;
    void *data; /* in the host's byte order, for free(); NULL without elements */
};

/** Reads a whole file. Sizes in it are compared with the file's before memory is allocated. */
td_status td__idx_read(struct td__unpack *unpack, struct td__idx *idx);

#endif
