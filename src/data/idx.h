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

struct td__unpack;

struct td__idx {
    td_dtype dtype;
    int ndim; /* 1 … TD_MAX_DIMS */
    int64_t shape[TD_MAX_DIMS];
    size_t bytes;
    void *data; /* in the host's byte order, for free(); NULL without elements */
};

/** Reads a whole file. Sizes in it are compared with the file's before memory is allocated. */
td_status td__idx_read(struct td__unpack *unpack, struct td__idx *idx);

/* ---- Sequential reading of a file, which is gunzipped if it begins as a gzip file (unpack.c) - */

/** Opens a file. `path` must stay. */
td_status td__unpack_open(const char *path, struct td__unpack **unpack_out);

/** The same for a file in memory, which must stay; `path` is for errors. */
td_status td__unpack_memory(const char *path, const void *data, size_t size,
                            struct td__unpack **unpack_out);

void td__unpack_close(struct td__unpack *unpack);

/** Reads `size` bytes; TD_ERR_INVALID if there are fewer, with the offset and `what` in the
 *  error. */
td_status td__unpack_read(struct td__unpack *unpack, void *data, size_t size, const char *what);

/** TD_ERR_INVALID if there are more bytes. */
td_status td__unpack_end(struct td__unpack *unpack);

/** TD_ERR_INVALID if the file cannot hold the `size` more bytes that `what` needs; for gzip, by
 *  the best compression ratio. */
td_status td__unpack_expect(struct td__unpack *unpack, uint64_t size, const char *what);

/** The file's name and the offset of the next byte, for errors. Valid until the next call. */
const char *td__unpack_position(struct td__unpack *unpack);

#endif
