/* Indexes of sharded checkpoints. The input is the text up to its checksum, which is added here, since a fuzzer does not find
 * it by itself.
 *
 * Whatever is in it, it is parsed or refused with its name. What is parsed is consistent, and the same again after it was
 * written and parsed once more. */
#include "fuzz.h"

#include "checkpoint/crc32c.h"
#include "checkpoint/sharded.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LONGEST = 1 << 16 };

static void check(bool condition)
{
    if (!condition)
        abort();
}

static void check_tensor(const struct td__index *index, const struct td__sharded_tensor *tensor)
{
    int64_t end = 0;
    check(td__index_get(index, tensor->name) == tensor);
    for (size_t i = 0; i < tensor->count; i++) {
        const struct td__shard_piece *piece = &tensor->pieces[i];
        uint64_t bytes = (uint64_t)piece->count * td_dtype_size(tensor->dtype);
        check(piece->first == end && piece->count > 0);
        check((size_t)piece->file < index->file_count);
        check(piece->offset + bytes <= index->sizes[piece->file]);
        check(piece->sum_count == td__sum_blocks(bytes));
        end += piece->count;
    }
    check(end == tensor->numel);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static char text[LONGEST + 64];
    struct td__index index, again;
    if (size > LONGEST)
        return 0;
    memcpy(text, data, size);
    int tail = snprintf(text + size, 64, ",\"crc32c\":\"%08x\"}\n", td__crc32c(0, text, size));
    if (td__index_parse("the index", text, size + (size_t)tail, &index)) {
        check(strstr(td_last_error(), "the index"));
        return 0;
    }
    for (size_t i = 0; i < index.count; i++)
        check_tensor(&index, index.tensors[i]);
    struct td__buffer written = {0};
    check(!td__index_write("fuzz", "the index", &index, &written));
    check(!td__index_parse("the index", (const char *)written.data, written.size, &again));
    check(again.count == index.count && again.ranks == index.ranks &&
          again.note_count == index.note_count);
    td__index_free(&again);
    td__index_free(&index);
    td__buffer_free(&written);
    return 0;
}
