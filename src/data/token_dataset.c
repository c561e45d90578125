/* The tokens of a file, in pieces of equal length. Each sample is one pread(), so that a file may be
 * larger than memory and threads need no lock.
 *
 *     piece i     tokens  i * length … i * length + length
 *     input       all but the last one            target      all but the first one
 *
 * A text is a file of tokens of one byte.
 */
#include "base/fail.h"
#include "base/option_rules.h"
#include "data/dataset.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct tokens {
    int fd;
    int bytes; /* of a token */
    int64_t offset, length, count;
    char path[];
};

static int64_t size_of(void *self)
{
    return ((struct tokens *)self)->count;
}

static void describe(void *self, td_sample_spec *input, td_sample_spec *target)
{
    struct tokens *tokens = self;
    *input = (td_sample_spec){.dtype = TD_I64, .ndim = 1, .shape = {tokens->length}};
    *target = *input;
}

/* Reads exactly `size` bytes from an offset on. */
static td_status read_at(struct tokens *tokens, void *memory, size_t size, int64_t offset)
{
    for (size_t done = 0; done < size;) {
        ssize_t got = pread(tokens->fd, (char *)memory + done, size - done,
                            (off_t)(offset + (int64_t)done));
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return td_fail(TD_ERR_SYSTEM, "%s: cannot be read at offset %" PRId64 ": %s",
                           tokens->path, offset + (int64_t)done, td__errno_text(errno));
        if (got == 0)
            return td_fail(TD_ERR_INVALID,
                           "%s: ends at offset %" PRId64 "; it was longer when it was opened",
                           tokens->path, offset + (int64_t)done);
        done += (size_t)got;
    }
    return TD_OK;
}

/* A little-endian number. */
static inline int64_t number_at(const unsigned char *at, int bytes)
{
    uint32_t number = at[0];
    for (int i = 1; i < bytes; i++)
        number |= (uint32_t)at[i] << 8 * i;
    return number;
}

/* The tokens are read to the end of the target's memory and widened from its front: number i
 * overwrites bytes 8i to 8i + 7, and the token after it is at (8 - bytes) * length + bytes * (i + 1), which is
 * not below 8 (i + 1). */
static td_status read_sample(void *self, int64_t index, void *input, void *target)
{
    struct tokens *tokens = self;
    int64_t *in = input, *out = target, length = tokens->length, bytes = tokens->bytes;
    unsigned char first[sizeof(uint32_t)], *rest = (unsigned char *)target + (8 - bytes) * length;
    int64_t at = tokens->offset + index * length * bytes;
    TD_TRY(read_at(tokens, first, (size_t)bytes, at));
    TD_TRY(read_at(tokens, rest, (size_t)(length * bytes), at + bytes));
    in[0] = number_at(first, tokens->bytes);
    for (int64_t i = 0; i < length; i++) {
        out[i] = number_at(rest + i * bytes, tokens->bytes);
        if (i + 1 < length)
            in[i + 1] = out[i];
    }
    return TD_OK;
}

static void destroy(void *self)
{
    struct tokens *tokens = self;
    close(tokens->fd);
    free(tokens);
}

static const td_dataset_ops tokens_ops = {
    .size = size_of, .describe = describe, .read = read_sample, .destroy = destroy};

/* Opens a regular file, and counts its sequences. */
static td_status open_file(const char *call, struct tokens *tokens)
{
    struct stat status;
    /* O_NONBLOCK: a FIFO must not block here; it is rejected below. */
    tokens->fd = open(tokens->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (tokens->fd < 0)
        return td_fail(TD_ERR_SYSTEM, "%s: %s cannot be opened: %s", call, tokens->path,
                       td__errno_text(errno));
    if (fstat(tokens->fd, &status))
        return td_fail(TD_ERR_SYSTEM, "%s: %s: %s", call, tokens->path, td__errno_text(errno));
    if (!S_ISREG(status.st_mode))
        return td_fail(TD_ERR_INVALID, "%s: %s is not a regular file", call, tokens->path);
    int64_t size = (int64_t)status.st_size - tokens->offset;
    int64_t all = size > 0 ? size / tokens->bytes : 0;
    tokens->count = all ? (all - 1) / tokens->length : 0;
    if (tokens->count == 0)
        return td_fail(
            TD_ERR_INVALID,
            "%s: %s has %" PRId64 " %s; one sequence of %" PRId64 " needs one more than that", call,
            tokens->path, all, tokens->bytes == 1 ? "bytes" : "tokens", tokens->length);
    return TD_OK;
}

static td_dataset *dataset_of(const char *call, const char *path, int64_t length,
                              const td_token_options *options)
{
    if (!path || length < 1 || length > INT64_MAX / 16) {
        td_fail(TD_ERR_INVALID, "%s: %s; a sequence of %" PRId64 " tokens was asked for", call,
                path ? path : "the path is NULL", length);
        return NULL;
    }
    struct tokens *tokens = malloc(sizeof *tokens + strlen(path) + 1);
    if (!tokens) {
        td__fail_nomem(call);
        return NULL;
    }
    *tokens = (struct tokens){
        .fd = -1, .bytes = options->bytes, .offset = options->offset, .length = length};
    strcpy(tokens->path, path);
    td_dataset *dataset = open_file(call, tokens) ? NULL : td_dataset_create(&tokens_ops, tokens);
    if (dataset)
        return dataset;
    if (tokens->fd >= 0)
        close(tokens->fd);
    free(tokens);
    return NULL;
}

td_dataset *td_text_dataset(const char *path, int64_t length)
{
    return dataset_of(__func__, path, length, &(td_token_options){.bytes = 1});
}

td_dataset *td_token_dataset(const char *path, int64_t length, const td_token_options *options)
{
    td_token_options given = options ? *options : (td_token_options){0};
    if (td__check_reserved(__func__, given.reserved))
        return NULL;
    given.bytes = given.bytes ? given.bytes : 2;
    if ((given.bytes != 1 && given.bytes != 2 && given.bytes != 4) || given.offset < 0) {
        td_fail(TD_ERR_INVALID,
                "%s: tokens of %d bytes from offset %" PRId64
                " on; a token has 1, 2 or 4 bytes, and the offset is not negative",
                __func__, given.bytes, given.offset);
        return NULL;
    }
    return dataset_of(__func__, path, length, &given);
}
