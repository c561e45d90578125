/* Reading IDX files; see idx.h. */
#include "data/idx.h"
#include "base/fail.h"
#include "tensor/tensor_internal.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

static bool dtype_of(unsigned char type, td_dtype *dtype)
{
    switch (type) {
    case 8:
        *dtype = TD_U8;
        return true;
    case 9:
        *dtype = TD_I8;
        return true;
    case 11:
        *dtype = TD_I16;
        return true;
    case 12:
        *dtype = TD_I32;
        return true;
    case 13:
        *dtype = TD_F32;
        return true;
    case 14:
        *dtype = TD_F64;
        return true;
    default:
        return false;
    }
}

static td_status read_magic(struct td__unpack *unpack, struct td__idx *idx)
{
    unsigned char magic[4];
    TD_TRY(td__unpack_read(unpack, magic, sizeof magic, "the magic number of an IDX file"));
    if (magic[0] || magic[1] || !dtype_of(magic[2], &idx->dtype))
        return td_fail(
            TD_ERR_INVALID,
            "%s: the file begins with %02x %02x %02x %02x; an IDX file begins with two zeros, a "
            "type (8, 9, 11, 12, 13 or 14) and the number of dimensions",
            td__unpack_position(unpack), magic[0], magic[1], magic[2], magic[3]);
    if (magic[3] < 1 || magic[3] > TD_MAX_DIMS)
        return td_fail(TD_ERR_INVALID, "%s: the array has %d dimensions; 1 to %d are possible",
                       td__unpack_position(unpack), magic[3], TD_MAX_DIMS);
    idx->ndim = magic[3];
    return TD_OK;
}

static td_status read_sizes(struct td__unpack *unpack, struct td__idx *idx)
{
    unsigned char sizes[4 * TD_MAX_DIMS];
    TD_TRY(td__unpack_read(unpack, sizes, 4 * (size_t)idx->ndim, "the sizes of the dimensions"));
    for (int d = 0; d < idx->ndim; d++) {
        const unsigned char *at = sizes + 4 * d;
        idx->shape[d] = (int64_t)at[0] << 24 | at[1] << 16 | at[2] << 8 | at[3];
    }
    struct td__layout layout;
    if (td__layout_init(&layout, "the sizes before it", idx->shape, idx->ndim, NULL, idx->dtype)) {
        char reason[512];
        strncpy(reason, td__error_text(), sizeof reason - 1);
        reason[sizeof reason - 1] = '\0';
        return td_fail(TD_ERR_INVALID, "%s: %s", td__unpack_position(unpack), reason);
    }
    idx->bytes = (size_t)layout.numel * td_dtype_size(idx->dtype);
    char what[128];
    strcpy(what, "an array of shape ");
    strncat(what, td__shape_text(idx->shape, idx->ndim), 90);
    return td__unpack_expect(unpack, idx->bytes, what);
}

/* From big-endian to the host's byte order. */
static void turn_bytes(struct td__idx *idx)
{
    size_t size = td_dtype_size(idx->dtype);
    if (__BYTE_ORDER__ == __ORDER_BIG_ENDIAN__ || size == 1 || !idx->data)
        return;
    unsigned char *at = idx->data, *end = at + idx->bytes;
    for (; at < end; at += size)
        for (size_t i = 0; i < size / 2; i++) {
            unsigned char byte = at[i];
            at[i] = at[size - 1 - i];
            at[size - 1 - i] = byte;
        }
}

td_status td__idx_read(struct td__unpack *unpack, struct td__idx *idx)
{
    struct td__idx read = {0};
    TD_TRY(read_magic(unpack, &read));
    TD_TRY(read_sizes(unpack, &read));
    if (read.bytes) {
        read.data = malloc(read.bytes);
        if (!read.data)
            return td_fail(TD_ERR_NOMEM, "%s: no memory for %zu bytes", td__unpack_position(unpack),
                           read.bytes);
    }
    td_status status = td__unpack_read(unpack, read.data, read.bytes, "the elements");
    if (!status)
        status = td__unpack_end(unpack);
    if (status) {
        free(read.data);
        return status;
    }
    turn_bytes(&read);
    *idx = read;
    return TD_OK;
}
