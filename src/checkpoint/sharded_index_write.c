/* The text of an index, and of the headers of files whose tensors are not in memory. */
#include "base/fail.h"
#include "checkpoint/crc32c.h"
#include "checkpoint/json.h"
#include "checkpoint/sharded.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

__attribute__((format(printf, 2, 3))) static void put(struct td__buffer *text, const char *format,
                                                      ...)
{
    char line[160];
    va_list list;
    va_start(list, format);
    int length = vsnprintf(line, sizeof line, format, list);
    va_end(list);
    td__buffer_put(text, line, (size_t)length);
}

static td_status put_name(const char *call, const char *path, const char *name,
                          struct td__buffer *text)
{
    if (td__json_put(text, name))
        return TD_OK;
    return td_fail(TD_ERR_INVALID, "%s: %s: the name \"%.200s\" is not UTF-8", call, path, name);
}

static td_status put_note(const char *call, const char *path, const char *key, const char *value,
                          struct td__buffer *text)
{
    bool good = key && value && td__json_put(text, key);
    put(text, ":");
    if (good && td__json_put(text, value))
        return TD_OK;
    return td_fail(TD_ERR_INVALID, "%s: %s: a note has a key or a value that is NULL or not UTF-8",
                   call, path);
}

static void put_shape(struct td__buffer *text, const int64_t *shape, int ndim)
{
    put(text, "\"shape\":[");
    for (int d = 0; d < ndim; d++)
        put(text, "%s%" PRId64, d ? "," : "", shape[d]);
    put(text, "]");
}

/* ---- The index ---------------------------------------------------------------------------------------- */

static void put_piece(struct td__buffer *text, const struct td__shard_piece *piece)
{
    put(text, "[%d,%" PRId64 ",%" PRId64 ",%" PRIu64 ",\"", piece->file, piece->first, piece->count,
        piece->offset);
    for (size_t i = 0; i < piece->sum_count; i++)
        put(text, "%08" PRIx32, piece->sums[i]);
    put(text, "\"]");
}

static td_status put_tensor(const char *call, const char *path,
                            const struct td__sharded_tensor *tensor, struct td__buffer *text)
{
    TD_TRY(put_name(call, path, tensor->name, text));
    put(text, ":{\"dtype\":\"%s\",", td__file_dtype(tensor->dtype));
    put_shape(text, tensor->shape, tensor->ndim);
    put(text, ",\"pieces\":[");
    for (size_t i = 0; i < tensor->count; i++) {
        put(text, "%s", i ? "," : "");
        put_piece(text, &tensor->pieces[i]);
    }
    put(text, "]}");
    return TD_OK;
}

td_status td__index_write(const char *call, const char *path, const struct td__index *index,
                          struct td__buffer *text)
{
    put(text, "{\"tandem.sharded\":%d,\"ranks\":%d,\"kind\":\"%s\",\n\"notes\":{",
        TD__SHARDED_VERSION, index->ranks, index->is_training ? "training" : "tensors");
    for (size_t i = 0; i < index->note_count; i++) {
        put(text, "%s", i ? "," : "");
        TD_TRY(put_note(call, path, index->notes[i].key, index->notes[i].value, text));
    }
    put(text, "},\n\"files\":[");
    for (size_t i = 0; i < index->file_count; i++) {
        char name[TD__SHARD_NAME];
        td__shard_name(name, (int)i);
        put(text, "%s{\"name\":\"%s\",\"size\":%" PRIu64 "}", i ? "," : "", name, index->sizes[i]);
    }
    put(text, "],\n\"tensors\":{");
    for (size_t i = 0; i < index->count; i++) {
        put(text, "%s\n", i ? "," : "");
        TD_TRY(put_tensor(call, path, index->tensors[i], text));
    }
    put(text, "}");
    if (!text->failed)
        put(text, ",\"crc32c\":\"%08" PRIx32 "\"}\n", td__crc32c(0, text->data, text->size));
    if (text->failed)
        return td__fail_nomem(call);
    if (text->size > TD__INDEX_LONGEST)
        return td_fail(TD_ERR_INVALID, "%s: %s: an index of %zu bytes is longer than %d", call,
                       path, text->size, TD__INDEX_LONGEST);
    return TD_OK;
}

/* ---- Headers ------------------------------------------------------------------------------------------- */

static td_status put_entry(const char *call, const char *path, const struct td__file_entry *entry,
                           uint64_t begin, struct td__buffer *text)
{
    TD_TRY(put_name(call, path, entry->name, text));
    put(text, ":{\"dtype\":\"%s\",", td__file_dtype(entry->dtype));
    put_shape(text, entry->shape, entry->ndim);
    put(text, ",\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}", begin, begin + entry->bytes);
    return TD_OK;
}

td_status td__entries_text(const char *call, const char *path, const struct td__file_entry *entries,
                           size_t count, const td_file_note *notes, int note_count, size_t align,
                           struct td__buffer *text, size_t *digest_at)
{
    uint64_t begin = 0;
    td__buffer_put_u64(text, 0);
    put(text, "{\"__metadata__\":{");
    if (digest_at) {
        put(text, "\"tandem.version\":\"%d\",\"tandem.sha256\":\"", TD__FILE_VERSION);
        *digest_at = text->size;
        put(text, "%0*d\"", TD__DIGEST_DIGITS, 0);
    }
    for (int i = 0; i < note_count; i++) {
        put(text, "%s", i || digest_at ? "," : "");
        TD_TRY(put_note(call, path, notes[i].key, notes[i].value, text));
    }
    put(text, "}");
    for (size_t i = 0; i < count; i++) {
        put(text, ",");
        TD_TRY(put_entry(call, path, &entries[i], begin, text));
        begin += entries[i].bytes;
    }
    put(text, "}");
    while (text->size % align && !text->failed)
        put(text, " ");
    if (text->failed)
        return td__fail_nomem(call);
    uint64_t length = text->size - TD__HEADER_AT;
    if (length > TD__HEADER_LONGEST)
        return td_fail(TD_ERR_INVALID,
                       "%s: %s: a header of %" PRIu64 " bytes is longer than %d, the most in this "
                       "format",
                       call, path, length, TD__HEADER_LONGEST);
    td__store_u32(text->data, (uint32_t)length);
    return TD_OK;
}
