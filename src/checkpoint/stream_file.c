/* A safetensors file that is written in one pass, with its checksum, without its tensors in memory. */
#include "base/fail.h"
#include "checkpoint/sharded.h"

#include <openssl/evp.h>
#include <stdio.h>

enum { CHUNK = 1 << 18, ALIGN = 8 };

static td_status no_digest(const char *call)
{
    return td_fail(TD_ERR_SYSTEM, "%s: the checksum cannot be computed", call);
}

td_status td__stream_put(struct td__stream_file *stream, const void *data, size_t size)
{
    const char *at = data;
    while (size > 0) {
        size_t part = size < CHUNK ? size : CHUNK;
        if (!EVP_DigestUpdate(stream->digest, at, part))
            return no_digest(stream->file.call);
        TD_TRY(td__atomic_file_write(&stream->file, at, part));
        at += part;
        size -= part;
    }
    return TD_OK;
}

void td__stream_drop(struct td__stream_file *stream)
{
    EVP_MD_CTX_free(stream->digest);
    td__atomic_file_drop(&stream->file);
}

static td_status begin(struct td__stream_file *stream, const struct td__buffer *text)
{
    stream->digest = EVP_MD_CTX_new();
    if (!stream->digest)
        return td__fail_nomem(stream->file.call);
    if (!EVP_DigestInit_ex(stream->digest, EVP_sha256(), NULL))
        return no_digest(stream->file.call);
    return td__stream_put(stream, text->data, text->size);
}

td_status td__stream_open(struct td__stream_file *stream, const char *call, const char *path,
                          const struct td__file_entry *entries, size_t count,
                          const td_file_note *notes, int note_count)
{
    struct td__buffer text = {0};
    *stream = (struct td__stream_file){0};
    td_status status = td__entries_text(call, path, entries, count, notes, note_count, ALIGN, &text,
                                        &stream->digest_at);
    if (!status)
        status = td__atomic_file_open(&stream->file, call, path);
    if (!status && (status = begin(stream, &text)))
        td__stream_drop(stream);
    td__buffer_free(&text);
    return status;
}

td_status td__stream_commit(struct td__stream_file *stream)
{
    uint8_t digest[EVP_MAX_MD_SIZE];
    char digits[TD__DIGEST_DIGITS + 1];
    td_status status = EVP_DigestFinal_ex(stream->digest, digest, NULL)
                           ? TD_OK
                           : no_digest(stream->file.call);
    for (int i = 0; i < TD__DIGEST_DIGITS / 2 && !status; i++)
        snprintf(digits + 2 * i, 3, "%02x", digest[i]);
    if (!status)
        status = td__atomic_file_rewrite(&stream->file, stream->digest_at, digits,
                                         TD__DIGEST_DIGITS);
    if (status) {
        td__stream_drop(stream);
        return status;
    }
    EVP_MD_CTX_free(stream->digest);
    return td__atomic_file_commit(&stream->file);
}
