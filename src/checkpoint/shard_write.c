/* Writing the file of a rank: the header, and the parts in the order of the plan. The checksums are computed chunk by chunk,
 * while the bytes are in the cache. Writeback begins as soon as some chunks are written, so that the disk works while the
 * rest is computed, and fsync() finds little left. */
#include "base/fail.h"
#include "base/file_limit.h"
#include "checkpoint/crc32c.h"
#include "checkpoint/sharded.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { ALIGN = 4096, FLUSH = 8 << 20 };

struct output {
    const char *call, *path;
    int rank, fd;
    char file[TD__SHARD_NAME];
    uint64_t at, flushed;
    struct td__buffer *report;
};

static td_status refuse(const struct output *output, const char *name)
{
    return td_fail(TD_ERR_SYSTEM, "%s: %s/%s cannot be written%s%.200s%s: %s", output->call,
                   output->path, output->file, name ? ", at \"" : "", name ? name : "",
                   name ? "\"" : "", td__errno_text(errno));
}

static td_status put(struct output *output, const char *name, const void *data, size_t size)
{
    errno = td__file_write_all(output->fd, data, size);
    if (errno)
        return refuse(output, name);
    output->at += size;
    if (output->at - output->flushed >= FLUSH) {
        sync_file_range(output->fd, (off_t)output->flushed, (off_t)(output->at - output->flushed),
                        SYNC_FILE_RANGE_WRITE);
        output->flushed = output->at;
    }
    return TD_OK;
}

static td_status write_part(struct output *output, const struct td__shard_part *part)
{
    struct td__elements elements;
    const void *data = NULL;
    size_t size = 1;
    td__buffer_put_u64(output->report, output->at);
    td_status status = td__elements_begin(&elements, output->call, part);
    while (!status && size > 0) {
        status = td__elements_next(&elements, &data, &size);
        for (size_t done = 0; !status && done < size; done += TD__SUM_BLOCK) {
            size_t block = size - done < TD__SUM_BLOCK ? size - done : TD__SUM_BLOCK;
            td__buffer_put_u32(output->report, td__crc32c(0, (const char *)data + done, block));
        }
        if (!status)
            status = put(output, part->name, data, size);
    }
    td__elements_end(&elements);
    return status;
}

static td_status write_header(struct output *output, const struct td__shard_part *parts, int count)
{
    char number[32];
    struct td__buffer text = {0};
    struct td__file_entry *entries = calloc((size_t)count + 1, sizeof *entries);
    td_status status = entries ? TD_OK : td__fail_nomem(output->call);
    for (int i = 0; i < count && !status; i++) {
        entries[i] = (struct td__file_entry){.name = parts[i].name,
                                             .dtype = parts[i].dtype,
                                             .ndim = 1,
                                             .shape = {parts[i].count},
                                             .bytes = td__part_bytes(&parts[i])};
        if (!parts[i].is_whole)
            continue;
        entries[i].ndim = parts[i].ndim;
        for (int d = 0; d < parts[i].ndim; d++)
            entries[i].shape[d] = parts[i].shape[d];
    }
    snprintf(number, sizeof number, "%d", output->rank);
    td_file_note note = {.key = "tandem.shard", .value = number};
    if (!status)
        status = td__entries_text(output->call, output->path, entries, (size_t)count, &note, 1,
                                  ALIGN, &text, NULL);
    if (!status)
        status = put(output, NULL, text.data, text.size);
    td__buffer_free(&text);
    free(entries);
    return status;
}

static td_status write_all(struct output *output, const struct td__shard_part *parts, int count)
{
    TD_TRY(write_header(output, parts, count));
    for (int i = 0; i < count; i++)
        TD_TRY(write_part(output, &parts[i]));
    return fsync(output->fd) ? refuse(output, NULL) : TD_OK;
}

td_status td__shard_write(const char *call, const char *directory, const char *path, int rank,
                          const struct td__shard_part *parts, int count, struct td__buffer *report)
{
    struct output output = {.call = call, .path = path, .rank = rank, .report = report};
    char *file = NULL;
    td__shard_name(output.file, rank);
    if (asprintf(&file, "%s/%s", directory, output.file) < 0)
        return td__fail_nomem(call);
    output.fd = open(file, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    int error = errno;
    free(file);
    errno = error;
    if (output.fd < 0)
        return refuse(&output, NULL);
    size_t size_at = report->size;
    td__buffer_put_u64(report, 0);
    td_status status = write_all(&output, parts, count);
    close(output.fd);
    if (!status && report->failed)
        status = td__fail_nomem(call);
    if (!status)
        td__store_u64(report->data + size_at, output.at);
    return status;
}
