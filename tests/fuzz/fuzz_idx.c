/* IDX files, gzipped or not.
 *
 *     byte 0   bit 0   what follows is the file, as it is
 *              bit 1   … is packed first, as one member or, with bit 2, as two: with right checksums the
 *                      reader gets to see what a damaged packed file seldom has
 *              else    … is a script: a byte with the type, one with the number of dimensions, their sizes
 *                      (a byte each), and the elements, of which a well-formed file is made
 *
 * Whatever is in a file, it is read whole or refused with its name; what is read from a packed file is
 * the same as from the plain one. */
#include "fuzz.h"

#include "data/idx.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <zlib.h>

enum { LONGEST = 1 << 16 };

static void check(bool condition)
{
    if (!condition)
        abort();
}

static td_status read_file(const void *data, size_t size, struct td__idx *idx)
{
    struct td__unpack *unpack = NULL;
    td_status status = td__unpack_memory("fuzz", data, size, &unpack);
    if (!status) {
        status = td__idx_read(unpack, idx);
        td__unpack_close(unpack);
    }
    if (status)
        check(status == TD_ERR_INVALID && strstr(td_last_error(), "fuzz"));
    return status;
}

/* What was read keeps what the format promises. */
static void check_idx(const struct td__idx *idx)
{
    size_t bytes = td_dtype_size(idx->dtype), sum = 0;
    check(idx->ndim >= 1 && idx->ndim <= TD_MAX_DIMS);
    for (int d = 0; d < idx->ndim; d++)
        bytes *= (size_t)idx->shape[d];
    check(bytes == idx->bytes && (bytes == 0) == (idx->data == NULL));
    for (size_t i = 0; i < bytes; i++)
        sum += ((unsigned char *)idx->data)[i];
    check(sum <= 255 * bytes);
}

/* One member, appended to `packed`. */
static size_t pack(const uint8_t *data, size_t size, uint8_t *packed, size_t room)
{
    static z_stream stream;
    static bool ready;
    if (!ready)
        check(deflateInit2(&stream, 1, Z_DEFLATED, 16 + 9, 1, Z_DEFAULT_STRATEGY) == Z_OK);
    ready = true;
    check(deflateReset(&stream) == Z_OK);
    stream.next_in = (uint8_t *)(uintptr_t)data;
    stream.avail_in = (unsigned)size;
    stream.next_out = packed;
    stream.avail_out = (unsigned)room;
    check(deflate(&stream, Z_FINISH) == Z_STREAM_END);
    return room - stream.avail_out;
}

static void compare_packed(const uint8_t *data, size_t size, bool in_two)
{
    static uint8_t packed[2 * LONGEST];
    size_t first = in_two ? size / 3 : size;
    size_t used = pack(data, first, packed, sizeof packed);
    if (in_two)
        used += pack(data + first, size - first, packed + used, sizeof packed - used);
    struct td__idx plain, other;
    bool packed_twice = size >= 2 && data[0] == 0x1f && data[1] == 0x8b;
    td_status expected = packed_twice ? TD_ERR_INVALID : read_file(data, size, &plain);
    td_status status = read_file(packed, used, &other);
    check(!status == !expected);
    if (status)
        return;
    check(plain.dtype == other.dtype && plain.ndim == other.ndim && plain.bytes == other.bytes);
    check(!memcmp(plain.shape, other.shape, (size_t)plain.ndim * sizeof plain.shape[0]));
    check(!plain.bytes || !memcmp(plain.data, other.data, plain.bytes));
    free(plain.data);
    free(other.data);
}

/* Makes a file that can be read, from a script; returns its bytes, 0 where it would be too long. */
static size_t forge(const uint8_t *script, size_t size, uint8_t *file)
{
    static const uint8_t types[] = {8, 9, 11, 12, 13, 14}, widths[] = {1, 1, 2, 4, 4, 8};
    if (size < 2)
        return 0;
    int type = script[0] % 6, ndim = 1 + script[1] % TD_MAX_DIMS;
    size_t at = 4, bytes = widths[type];
    if (size < 2 + (size_t)ndim)
        return 0;
    memcpy(file, (uint8_t[]){0, 0, types[type], (uint8_t)ndim}, 4);
    for (int d = 0; d < ndim; d++, at += 4) {
        memcpy(file + at, (uint8_t[]){0, 0, 0, script[2 + d]}, 4);
        bytes *= script[2 + d];
        if (bytes > LONGEST / 2)
            return 0;
    }
    size_t left = size - 2 - (size_t)ndim;
    for (size_t i = 0; i < bytes; i++)
        file[at + i] = left ? script[2 + (size_t)ndim + i % left] : (uint8_t)i;
    return at + bytes;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static uint8_t file[LONGEST];
    struct td__idx idx;
    if (size < 1 || size > LONGEST / 2)
        return 0;
    uint8_t mode = *data++;
    size--;
    if (mode & 1) {
        if (!read_file(data, size, &idx)) {
            check_idx(&idx);
            free(idx.data);
        }
        return 0;
    }
    if (mode & 2) {
        compare_packed(data, size, mode & 4);
        return 0;
    }
    size_t used = forge(data, size, file);
    if (used == 0)
        return 0;
    check(!read_file(file, used, &idx));
    check_idx(&idx);
    free(idx.data);
    compare_packed(file, used, mode & 4);
    check(read_file(file, used - 1, &idx) == TD_ERR_INVALID);
    return 0;
}
