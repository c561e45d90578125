/* The bytes of a text, in pieces of equal length. Each sample is one pread(), so that a text may be
 * larger than memory and threads need no lock.
 *
 *     piece i     bytes  i * length … i * length + length
 *     input       all but the last one            target      all but the first one
 */
#include "base/fail.h"
#include "data/dataset.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct text {
    int fd;
    int64_t length, count;
    char path[];
};

static int64_t size_of(void *self)
{
    return ((struct text *)self)->count;
}

static void describe(void *self, td_sample_spec *input, td_sample_spec *target)
{
    struct text *text = self;
    *input = (td_sample_spec){.dtype = TD_I64, .ndim = 1, .shape = {text->length}};
    *target = *input;
}

/* The bytes are read to the end of the target's memory and widened from its front: number i
 * overwrites bytes 8i to 8i + 7, and its byte is at 7 * length + i, which is not below 8i. */
static td_status read_sample(void *self, int64_t index, void *input, void *target)
{
    struct text *text = self;
    int64_t *in = input, *out = target, length = text->length;
    unsigned char first, *bytes = (unsigned char *)target + 7 * length;
    off_t at = (off_t)(index * length);
    ssize_t got = pread(text->fd, &first, 1, at);
    int64_t done = 0;
    while (got > 0 && done < length) {
        got = pread(text->fd, bytes + done, (size_t)(length - done), at + 1 + done);
        if (got < 0 && errno == EINTR)
            got = 1;
        else if (got > 0)
            done += got;
    }
    if (got < 0)
        return td_fail(TD_ERR_SYSTEM, "%s: cannot be read at offset %" PRId64 ": %s", text->path,
                       (int64_t)at + 1 + done, td__errno_text(errno));
    if (got == 0)
        return td_fail(TD_ERR_INVALID,
                       "%s: ends at offset %" PRId64 "; it was longer when it was opened",
                       text->path, (int64_t)at + (done ? 1 + done : 0));
    in[0] = first;
    for (int64_t i = 0; i < length; i++) {
        int64_t number = bytes[i];
        out[i] = number;
        if (i + 1 < length)
            in[i + 1] = number;
    }
    return TD_OK;
}

static void destroy(void *self)
{
    struct text *text = self;
    close(text->fd);
    free(text);
}

static const td_dataset_ops text_ops = {
    .size = size_of, .describe = describe, .read = read_sample, .destroy = destroy};

/* The size of a regular file. */
static td_status size_of_file(int fd, const char *path, int64_t *size)
{
    struct stat status;
    if (fstat(fd, &status))
        return td_fail(TD_ERR_SYSTEM, "td_text_dataset: %s: %s", path, td__errno_text(errno));
    if (!S_ISREG(status.st_mode))
        return td_fail(TD_ERR_INVALID, "td_text_dataset: %s is not a regular file", path);
    *size = status.st_size;
    return TD_OK;
}

td_dataset *td_text_dataset(const char *path, int64_t length)
{
    if (!path || length < 1 || length > INT64_MAX / 16) {
        td_fail(TD_ERR_INVALID,
                "td_text_dataset: %s; a sequence of %" PRId64 " bytes was asked for",
                path ? path : "the path is NULL", length);
        return NULL;
    }
    struct text *text = malloc(sizeof *text + strlen(path) + 1);
    if (!text) {
        td__fail_nomem("td_text_dataset");
        return NULL;
    }
    strcpy(text->path, path);
    text->length = length;
    /* O_NONBLOCK: a FIFO must not block here; it is rejected below. */
    text->fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (text->fd < 0) {
        td_fail(TD_ERR_SYSTEM, "td_text_dataset: %s cannot be opened: %s", path,
                td__errno_text(errno));
        goto free_text;
    }
    int64_t size = 0;
    if (size_of_file(text->fd, path, &size))
        goto close_file;
    text->count = size ? (size - 1) / length : 0;
    if (text->count == 0) {
        td_fail(TD_ERR_INVALID,
                "td_text_dataset: %s has %" PRId64 " bytes; one sequence of %" PRId64
                " needs one more than that",
                path, size, length);
        goto close_file;
    }
    td_dataset *dataset = td_dataset_create(&text_ops, text);
    if (dataset)
        return dataset;

close_file:
    close(text->fd);
free_text:
    free(text);
    return NULL;
}
