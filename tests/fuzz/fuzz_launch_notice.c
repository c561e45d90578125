/* What the launchers of several nodes exchange through the store: what a node has, and
 * what went wrong on one.
 *
 *     byte 0    bits 0 to 2: how many nodes there are, less one; bits 3 to 5: which of them reads
 *     then      for each node: control, length, that many bytes
 *
 *     control   even: the bytes are the introduction; odd: they are its fields, and it is written as a
 *               launcher does
 *     the rest  a notice */
#include "fuzz.h"

#include "launch/arrival.h"

#include <stdlib.h>
#include <string.h>

enum { MOST = 8 };

static void check(bool condition)
{
    if (!condition)
        abort();
}

static void take_text(struct td__reader *reader, char text[64])
{
    size_t left = (size_t)(reader->end - reader->at), length = left < 8 ? left : 8;
    memcpy(text, reader->at, length);
    reader->at += length;
    text[length] = 0;
}

static void write_introduction(const uint8_t *data, size_t size, struct td__buffer *buffer)
{
    char host[64], run_id[64], role[64];
    struct td__reader reader = td__reader_of(data, size);
    struct td__run_options options = {.local_addr = host, .run_id = run_id, .role = role};
    options.nnodes = td__reader_u8(&reader) % (MOST + 1);
    options.nproc = td__reader_u8(&reader);
    options.max_restarts = td__reader_u8(&reader);
    reader.at = reader.failed ? reader.end : reader.at;
    take_text(&reader, host);
    take_text(&reader, run_id);
    take_text(&reader, role);
    td__introduction_put(buffer, &options);
}

/* In memory of exactly its size, for the sanitizer. */
static td_bytes exact_copy(const void *data, size_t size)
{
    td_bytes bytes = {.data = malloc(size ? size : 1), .size = size};
    if (size)
        memcpy(bytes.data, data, size);
    return bytes;
}

static void read_introductions(const td_bytes *values, int count, int reader)
{
    struct td__run_options options = {.nnodes = count, .role = "default", .run_id = "1"};
    struct td__node_world world = {.node_rank = reader};
    td_status status = td__arrival_survey(values, &options, &world);
    if (status) {
        check(status == TD_ERR_MISMATCH && strlen(td_last_error()) > 0);
        return;
    }
    check(world.size >= 0 && world.rank >= 0 && world.rank <= world.size);
    check(world.role_size >= 0 && world.role_size <= world.size);
    check(world.role_rank >= 0 && world.role_rank <= world.rank);
}

/* What was written is read as it was. */
static void read_notice(const uint8_t *data, size_t size)
{
    struct td__notice notice, again;
    struct td__buffer buffer = {0};
    td_bytes value = exact_copy(data, size);
    if (td__notice_read(&value, &notice)) {
        check(strlen(notice.text) < sizeof notice.text);
        td__notice_put(&buffer, notice.node, notice.code, notice.text);
        td_bytes written = {.data = (char *)buffer.data, .size = buffer.size};
        check(td__notice_read(&written, &again));
        check(again.node == notice.node && again.code == notice.code);
        check(!strcmp(again.text, notice.text));
        td__buffer_free(&buffer);
    }
    free(value.data);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    td_bytes values[MOST];
    if (size < 1)
        return 0;
    int count = 1 + (data[0] & 7), reader = (data[0] >> 3 & 7) % count;
    size_t at = 1;
    for (int i = 0; i < count; i++) {
        struct td__buffer buffer = {0};
        uint8_t control = at < size ? data[at++] : 0;
        size_t length = at < size ? data[at++] : 0;
        length = length < size - at ? length : size - at;
        if (control & 1)
            write_introduction(data + at, length, &buffer);
        else
            td__buffer_put(&buffer, data + at, length);
        values[i] = exact_copy(buffer.data, buffer.size);
        td__buffer_free(&buffer);
        at += length;
    }
    read_introductions(values, count, reader);
    for (int i = 0; i < count; i++)
        free(values[i].data);
    read_notice(data + at, size - at);
    return 0;
}
