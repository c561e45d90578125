/* Reading parts of tensors from the files of a sharded checkpoint. Blocks that are needed as a whole are read directly to
 * their place, many at once; of the others, at the ends of a part that was cut elsewhere, all bytes are read for their
 * checksum. */
#include "base/fail.h"
#include "checkpoint/crc32c.h"
#include "checkpoint/sharded.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { OPEN_MOST = 64 };

static atomic_uint_fast64_t bytes_read;

uint64_t td__shard_bytes_read(void)
{
    return atomic_load(&bytes_read);
}

td_status td__shard_reader_begin(struct td__shard_reader *reader, const char *call,
                                 const char *directory, const struct td__index *index)
{
    *reader = (struct td__shard_reader){.call = call, .directory = directory, .index = index};
    reader->fds = malloc((index->file_count + 1) * sizeof reader->fds[0]);
    reader->block = malloc(TD__SUM_BLOCK);
    for (size_t i = 0; reader->fds && i < index->file_count; i++)
        reader->fds[i] = -1;
    if (reader->fds && reader->block)
        return TD_OK;
    td__shard_reader_end(reader);
    return td__fail_nomem(call);
}

static void close_all(struct td__shard_reader *reader)
{
    for (size_t i = 0; reader->open > 0 && i < reader->index->file_count; i++)
        if (reader->fds[i] >= 0) {
            close(reader->fds[i]);
            reader->fds[i] = -1;
            reader->open--;
        }
}

void td__shard_reader_end(struct td__shard_reader *reader)
{
    if (reader->fds)
        close_all(reader);
    free(reader->fds);
    free(reader->block);
    *reader = (struct td__shard_reader){0};
}

/* What of which piece of which tensor is read. */
struct piece_read {
    struct td__shard_reader *reader;
    const struct td__sharded_tensor *tensor;
    const struct td__shard_piece *piece;
    uint64_t bytes; /* of the piece */
    char file[TD__SHARD_NAME];
};

static td_status open_file(struct piece_read *read)
{
    struct td__shard_reader *reader = read->reader;
    struct stat there;
    char *path = NULL;
    int number = read->piece->file;
    td__shard_name(read->file, number);
    if (reader->fds[number] >= 0)
        return TD_OK;
    if (reader->open >= OPEN_MOST)
        close_all(reader);
    if (asprintf(&path, "%s/%s", reader->directory, read->file) < 0)
        return td__fail_nomem(reader->call);
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK), error = errno;
    free(path);
    errno = error;
    if (fd < 0 || fstat(fd, &there)) {
        td_status status = td_fail(TD_ERR_SYSTEM, "%s: %s/%s cannot be read for \"%.200s\": %s",
                                   reader->call, reader->directory, read->file, read->tensor->name,
                                   td__errno_text(errno));
        if (fd >= 0)
            close(fd);
        return status;
    }
    uint64_t size = (uint64_t)there.st_size, expected = reader->index->sizes[number];
    if (!S_ISREG(there.st_mode) || size != expected) {
        close(fd);
        return td_fail(TD_ERR_INVALID,
                       "%s: %s/%s is damaged: it has %" PRIu64 " bytes, and %" PRIu64
                       " when it was written",
                       reader->call, reader->directory, read->file, size, expected);
    }
    reader->fds[number] = fd;
    reader->open++;
    return TD_OK;
}

static td_status get(const struct piece_read *read, uint64_t at, void *data, size_t size)
{
    const struct td__shard_reader *reader = read->reader;
    char *to = data;
    atomic_fetch_add(&bytes_read, size);
    while (size > 0) {
        ssize_t taken = pread(reader->fds[read->piece->file], to, size,
                              (off_t)(read->piece->offset + at));
        if (taken < 0 && errno == EINTR)
            continue;
        if (taken <= 0)
            return td_fail(taken < 0 ? TD_ERR_SYSTEM : TD_ERR_INVALID,
                           "%s: %s/%s cannot be read for \"%.200s\": %s", reader->call,
                           reader->directory, read->file, read->tensor->name,
                           taken < 0 ? td__errno_text(errno) : "another process has cut it off");
        to += taken;
        at += (uint64_t)taken;
        size -= (size_t)taken;
    }
    return TD_OK;
}

static td_status verify(const struct piece_read *read, uint64_t block, const void *data,
                        size_t size)
{
    uint32_t sum = td__crc32c(0, data, size), expected = read->piece->sums[block];
    if (sum == expected)
        return TD_OK;
    const struct td__shard_reader *reader = read->reader;
    return td_fail(TD_ERR_INVALID,
                   "%s: %s/%s is damaged: the checksum of %zu bytes from %" PRIu64
                   " on, of \"%.200s\", is %08x, and it was %08x when they were written",
                   reader->call, reader->directory, read->file, size,
                   read->piece->offset + block * TD__SUM_BLOCK, read->tensor->name, sum, expected);
}

/* The end of block number `block`, in the piece. */
static uint64_t block_end(const struct piece_read *read, uint64_t block)
{
    uint64_t end = (block + 1) * TD__SUM_BLOCK;
    return end < read->bytes ? end : read->bytes;
}

/* Reads the bytes from `begin` up to `end` of a piece. */
static td_status read_range(const struct piece_read *read, uint64_t begin, uint64_t end, char *to)
{
    while (begin < end) {
        uint64_t block = begin / TD__SUM_BLOCK, start = block * TD__SUM_BLOCK, used;
        uint64_t last = end == read->bytes ? end : end / TD__SUM_BLOCK * TD__SUM_BLOCK;
        if (begin != start || last <= start) {
            uint64_t stop = block_end(read, block);
            TD_TRY(get(read, start, read->reader->block, (size_t)(stop - start)));
            TD_TRY(verify(read, block, read->reader->block, (size_t)(stop - start)));
            used = (stop < end ? stop : end) - begin;
            memcpy(to, read->reader->block + (begin - start), (size_t)used);
        } else {
            used = last - start < TD__READ_CHUNK ? last - start : TD__READ_CHUNK;
            TD_TRY(get(read, start, to, (size_t)used));
            for (uint64_t at = 0; at < used; at += TD__SUM_BLOCK, block++)
                TD_TRY(verify(read, block, to + at, (size_t)(block_end(read, block) - start - at)));
        }
        begin += used;
        to += used;
    }
    return TD_OK;
}

td_status td__shard_read(struct td__shard_reader *reader, const struct td__sharded_tensor *tensor,
                         int64_t first, int64_t count, void *data)
{
    int64_t width = (int64_t)td_dtype_size(tensor->dtype), end = first + count;
    for (size_t i = 0; i < tensor->count; i++) {
        const struct td__shard_piece *piece = &tensor->pieces[i];
        int64_t from = piece->first > first ? piece->first : first;
        int64_t until = piece->first + piece->count < end ? piece->first + piece->count : end;
        if (from >= until)
            continue;
        struct piece_read read = {.reader = reader,
                                  .tensor = tensor,
                                  .piece = piece,
                                  .bytes = (uint64_t)(piece->count * width)};
        TD_TRY(open_file(&read));
        TD_TRY(read_range(&read, (uint64_t)((from - piece->first) * width),
                          (uint64_t)((until - piece->first) * width),
                          (char *)data + (from - first) * width));
    }
    return TD_OK;
}
