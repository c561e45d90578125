/* Files that may be gzipped. Blocks of the file go through zlib or directly to the caller; no
 * allocation depends on the content. A gzip file may have several members in sequence. */
#include "data/idx.h"
#include "base/fail.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

enum { BLOCK = 1 << 16 };

/* The best compression ratio of deflate. */
#define BEST_RATIO 1032

struct td__unpack {
    const char *path;
    int fd; /* -1: the file is in memory */
    const unsigned char *memory;
    uint64_t file_size;
    uint64_t file_at; /* offset of the file behind the block */
    uint64_t at;      /* how much the caller has read */
    bool packed, member_open;
    z_stream stream; /* its input is the block, also of a file that is not gzipped */
    unsigned char *block;
    char position[512]; /* for errors */
};

/* ---- The file ------------------------------------------------------------------------------- */

static td_status refill(struct td__unpack *unpack)
{
    z_stream *stream = &unpack->stream;
    ssize_t got;
    if (unpack->fd < 0) {
        uint64_t left = unpack->file_size - unpack->file_at;
        got = left < BLOCK ? (ssize_t)left : BLOCK;
        stream->next_in = (unsigned char *)(uintptr_t)(unpack->memory + unpack->file_at);
    } else {
        do
            got = read(unpack->fd, unpack->block, BLOCK);
        while (got < 0 && errno == EINTR);
        if (got < 0)
            return td_fail(TD_ERR_SYSTEM, "%s: cannot be read at offset %" PRIu64 ": %s",
                           unpack->path, unpack->file_at, td__errno_text(errno));
        stream->next_in = unpack->block;
    }
    stream->avail_in = (unsigned)got;
    unpack->file_at += (uint64_t)got;
    return TD_OK;
}

static td_status look_at_magic(struct td__unpack *unpack)
{
    TD_TRY(refill(unpack));
    z_stream *stream = &unpack->stream;
    if (stream->avail_in < 2 || stream->next_in[0] != 0x1f || stream->next_in[1] != 0x8b)
        return TD_OK;
    if (inflateInit2(stream, 16 + MAX_WBITS) != Z_OK)
        return td__fail_nomem(unpack->path);
    unpack->packed = true;
    unpack->member_open = true;
    return TD_OK;
}

static td_status create(const char *path, struct td__unpack **unpack_out)
{
    struct td__unpack *unpack = calloc(1, sizeof *unpack);
    if (!unpack)
        return td__fail_nomem(path);
    unpack->path = path;
    unpack->fd = -1;
    *unpack_out = unpack;
    return TD_OK;
}

td_status td__unpack_memory(const char *path, const void *data, size_t size,
                            struct td__unpack **unpack_out)
{
    struct td__unpack *unpack = NULL;
    TD_TRY(create(path, &unpack));
    unpack->memory = data;
    unpack->file_size = size;
    td_status status = look_at_magic(unpack);
    if (status)
        td__unpack_close(unpack);
    else
        *unpack_out = unpack;
    return status;
}

static td_status open_file(struct td__unpack *unpack)
{
    struct stat about;
    /* O_NONBLOCK: a FIFO must not block here; it is rejected below. */
    unpack->fd = open(unpack->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (unpack->fd < 0 || fstat(unpack->fd, &about))
        return td_fail(TD_ERR_SYSTEM, "%s: cannot be opened: %s", unpack->path,
                       td__errno_text(errno));
    if (!S_ISREG(about.st_mode))
        return td_fail(TD_ERR_INVALID, "%s: is not a regular file", unpack->path);
    unpack->file_size = (uint64_t)about.st_size;
    unpack->block = malloc(BLOCK);
    if (!unpack->block)
        return td__fail_nomem(unpack->path);
    return look_at_magic(unpack);
}

td_status td__unpack_open(const char *path, struct td__unpack **unpack_out)
{
    struct td__unpack *unpack = NULL;
    TD_TRY(create(path, &unpack));
    td_status status = open_file(unpack);
    if (status)
        td__unpack_close(unpack);
    else
        *unpack_out = unpack;
    return status;
}

void td__unpack_close(struct td__unpack *unpack)
{
    if (unpack->packed)
        inflateEnd(&unpack->stream);
    if (unpack->fd >= 0)
        close(unpack->fd);
    free(unpack->block);
    free(unpack);
}

/* ---- Content --------------------------------------------------------------------------------- */

const char *td__unpack_position(struct td__unpack *unpack)
{
    snprintf(unpack->position, sizeof unpack->position, "%.400s, offset %" PRIu64 "%s",
             unpack->path, unpack->at, unpack->packed ? " of what is unpacked" : "");
    return unpack->position;
}

static td_status corrupt(const struct td__unpack *unpack)
{
    return td_fail(TD_ERR_INVALID,
                   "%s: the compressed data is corrupt at offset %" PRIu64 " of the file: %s",
                   unpack->path, unpack->file_at - unpack->stream.avail_in,
                   unpack->stream.msg ? unpack->stream.msg : "it ends in its header");
}

/* After a member: another one, or the end of the file. */
static td_status next_member(struct td__unpack *unpack, bool *is_end)
{
    z_stream *stream = &unpack->stream;
    if (stream->avail_in == 0)
        TD_TRY(refill(unpack));
    *is_end = stream->avail_in == 0;
    if (*is_end)
        return TD_OK;
    if (stream->next_in[0] != 0x1f)
        return td_fail(TD_ERR_INVALID,
                       "%s: the data after the gzip member at offset %" PRIu64
                       " of the file is not gzip",
                       unpack->path, unpack->file_at - stream->avail_in);
    inflateReset(stream);
    unpack->member_open = true;
    return TD_OK;
}

/* Reads up to `size` bytes, at most 1 GiB; fewer only at the end. */
static td_status inflate_some(struct td__unpack *unpack, void *data, size_t size, size_t *got)
{
    z_stream *stream = &unpack->stream;
    stream->next_out = data;
    stream->avail_out = (unsigned)size;
    bool is_end = false;
    while (stream->avail_out && !is_end) {
        if (!unpack->member_open) {
            TD_TRY(next_member(unpack, &is_end));
            continue;
        }
        if (stream->avail_in == 0) {
            TD_TRY(refill(unpack));
            if (stream->avail_in == 0)
                return td_fail(TD_ERR_INVALID,
                               "%s: the compressed data ends too early, at offset %" PRIu64
                               " of the file",
                               unpack->path, unpack->file_at);
        }
        int result = inflate(stream, Z_NO_FLUSH);
        if (result == Z_STREAM_END)
            unpack->member_open = false;
        else if (result == Z_MEM_ERROR)
            return td__fail_nomem(unpack->path);
        else if (result != Z_OK && result != Z_BUF_ERROR)
            return corrupt(unpack);
    }
    *got = size - stream->avail_out;
    return TD_OK;
}

static td_status copy_some(struct td__unpack *unpack, void *data, size_t size, size_t *got)
{
    z_stream *stream = &unpack->stream;
    size_t done = 0;
    while (done < size) {
        if (stream->avail_in == 0)
            TD_TRY(refill(unpack));
        if (stream->avail_in == 0)
            break;
        size_t here = stream->avail_in < size - done ? stream->avail_in : size - done;
        memcpy((char *)data + done, stream->next_in, here);
        stream->next_in += here;
        stream->avail_in -= (unsigned)here;
        done += here;
    }
    *got = done;
    return TD_OK;
}

static td_status read_some(struct td__unpack *unpack, void *data, size_t size, size_t *got)
{
    return (unpack->packed ? inflate_some : copy_some)(unpack, data, size, got);
}

td_status td__unpack_read(struct td__unpack *unpack, void *data, size_t size, const char *what)
{
    for (size_t done = 0; done < size;) {
        size_t got, here = size - done < (1u << 30) ? size - done : 1u << 30;
        TD_TRY(read_some(unpack, (char *)data + done, here, &got));
        done += got;
        unpack->at += got;
        if (got < here)
            return td_fail(TD_ERR_INVALID, "%s: the file ends here, %zu bytes of %s are missing",
                           td__unpack_position(unpack), size - done, what);
    }
    return TD_OK;
}

td_status td__unpack_end(struct td__unpack *unpack)
{
    char more;
    size_t got;
    TD_TRY(read_some(unpack, &more, 1, &got));
    return got == 0 ? TD_OK
                    : td_fail(TD_ERR_INVALID, "%s: the file should end here, but goes on",
                              td__unpack_position(unpack));
}

td_status td__unpack_expect(struct td__unpack *unpack, uint64_t size, const char *what)
{
    if (!unpack->packed) {
        uint64_t left = unpack->file_size > unpack->at ? unpack->file_size - unpack->at : 0;
        return left >= size
                   ? TD_OK
                   : td_fail(TD_ERR_INVALID,
                             "%s: %s needs %" PRIu64 " bytes, the file has %" PRIu64 " more",
                             td__unpack_position(unpack), what, size, left);
    }
    uint64_t most = unpack->file_size > UINT64_MAX / BEST_RATIO ? UINT64_MAX
                                                                : unpack->file_size * BEST_RATIO;
    return most >= size ? TD_OK
                        : td_fail(TD_ERR_INVALID,
                                  "%s: %s needs %" PRIu64 " bytes, a gzip file of %" PRIu64
                                  " bytes cannot hold more than %" PRIu64,
                                  td__unpack_position(unpack), what, size, unpack->file_size, most);
}
