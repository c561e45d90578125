/* One safetensors file of a sharded checkpoint, in one pass: a piece of memory is read, verified and written at a time. */
#include "base/fail.h"
#include "checkpoint/sharded.h"

#include <stdlib.h>
#include <string.h>

struct merged {
    const struct td__sharded_tensor *tensor;
    const char *name;
};

/* Wide elements first; those of one width keep their order. */
static size_t select_tensors(const struct td__index *index, const char *prefix, struct merged *list)
{
    size_t used = 0, length = strlen(prefix);
    for (size_t width = 16; width > 0; width /= 2)
        for (size_t i = 0; i < index->count; i++) {
            const struct td__sharded_tensor *tensor = index->tensors[i];
            if (td_dtype_size(tensor->dtype) == width && !strncmp(tensor->name, prefix, length) &&
                tensor->name[length])
                list[used++] = (struct merged){tensor, tensor->name + length};
        }
    return used;
}

static td_status copy_tensor(struct td__shard_reader *reader,
                             const struct td__sharded_tensor *tensor,
                             struct td__stream_file *stream, void *room)
{
    int64_t width = (int64_t)td_dtype_size(tensor->dtype);
    for (size_t p = 0; p < tensor->count; p++) {
        /* Piece by piece, so that no block is read twice. */
        int64_t at = tensor->pieces[p].first, end = at + tensor->pieces[p].count;
        while (at < end) {
            int64_t part = end - at < TD__READ_CHUNK / width ? end - at : TD__READ_CHUNK / width;
            TD_TRY(td__shard_read(reader, tensor, at, part, room));
            TD_TRY(td__stream_put(stream, room, (size_t)(part * width)));
            at += part;
        }
    }
    return TD_OK;
}

static td_status copy_all(struct td__shard_reader *reader, const struct merged *list, size_t count,
                          struct td__stream_file *stream)
{
    void *room = malloc(TD__READ_CHUNK);
    td_status status = room ? TD_OK : td__fail_nomem(reader->call);
    for (size_t i = 0; i < count && !status; i++)
        status = copy_tensor(reader, list[i].tensor, stream, room);
    free(room);
    return status;
}

static td_status merge(struct td__shard_reader *reader, const struct merged *list, size_t count,
                       const char *path, struct td__file_entry *entries)
{
    const struct td__index *index = reader->index;
    for (size_t i = 0; i < count; i++) {
        const struct td__sharded_tensor *tensor = list[i].tensor;
        entries[i] = (struct td__file_entry){.name = list[i].name,
                                             .dtype = tensor->dtype,
                                             .ndim = tensor->ndim,
                                             .bytes = (uint64_t)tensor->numel *
                                                      td_dtype_size(tensor->dtype)};
        memcpy(entries[i].shape, tensor->shape, sizeof tensor->shape);
    }
    td_file_note *notes = calloc(index->note_count + 1, sizeof *notes);
    if (!notes)
        return td__fail_nomem(reader->call);
    for (size_t i = 0; i < index->note_count; i++)
        notes[i] = (td_file_note){index->notes[i].key, index->notes[i].value};
    struct td__stream_file stream;
    td_status status = td__stream_open(&stream, reader->call, path, entries, count, notes,
                                       (int)index->note_count);
    free(notes);
    TD_TRY(status);
    status = copy_all(reader, list, count, &stream);
    if (!status)
        return td__stream_commit(&stream);
    struct td__error error;
    td__error_save(&error);
    td__stream_drop(&stream);
    return td__error_restore(&error);
}

static td_status merge_index(const char *call, const char *directory, const struct td__index *index,
                             const char *path, const char *prefix)
{
    struct td__shard_reader reader;
    TD_TRY(td__shard_reader_begin(&reader, call, directory, index));
    struct merged *list = malloc((index->count + 1) * sizeof *list);
    struct td__file_entry *entries = malloc((index->count + 1) * sizeof *entries);
    td_status status = list && entries ? TD_OK : td__fail_nomem(call);
    size_t count = status ? 0 : select_tensors(index, prefix, list);
    if (!status && count == 0 && *prefix)
        status = td_fail(TD_ERR_INVALID, "%s: %s has no tensor whose name begins with \"%.200s\"",
                         call, directory, prefix);
    if (!status)
        status = merge(&reader, list, count, path, entries);
    free(list);
    free(entries);
    td__shard_reader_end(&reader);
    return status;
}

td_status td_merge_sharded(const char *directory, const char *path, const char *prefix)
{
    static const char call[] = "td_merge_sharded";
    struct td__index index;
    if (!path)
        return td_fail(TD_ERR_INVALID, "%s: the path is NULL", call);
    TD_TRY(td__index_open(call, directory, &index, NULL));
    td_status status = merge_index(call, directory, &index, path,
                                   prefix              ? prefix
                                   : index.is_training ? "model."
                                                       : "");
    td__index_free(&index);
    return status;
}
