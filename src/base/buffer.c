/* Byte buffers; see buffer.h. */
#include "base/buffer.h"

#include "base/fail.h"

#include <stdlib.h>
#include <string.h>

td_status td_bytes_copy(const void *data, size_t size, td_bytes *bytes)
{
    if (!bytes || (!data && size))
        return td_fail(TD_ERR_INVALID, "td_bytes_copy: the %s is NULL", bytes ? "data" : "output");
    char *copy = size < SIZE_MAX ? malloc(size + 1) : NULL;
    if (!copy)
        return td__fail_nomem("td_bytes_copy");
    if (size)
        memcpy(copy, data, size);
    copy[size] = '\0';
    *bytes = (td_bytes){.data = copy, .size = size};
    return TD_OK;
}

void td_bytes_free(td_bytes *bytes)
{
    if (!bytes)
        return;
    free(bytes->data);
    *bytes = (td_bytes){0};
}

void td__buffer_free(struct td__buffer *buffer)
{
    if (!buffer->borrowed)
        free(buffer->data);
    *buffer = (struct td__buffer){0};
}

bool td__buffer_reserve(struct td__buffer *buffer, size_t more)
{
    if (buffer->failed || more > SIZE_MAX / 2 - buffer->size) {
        buffer->failed = true;
        return false;
    }
    size_t needed = buffer->size + more;
    if (needed <= buffer->capacity)
        return true;
    size_t capacity = buffer->capacity ? buffer->capacity * 2 : 64;
    if (capacity < needed)
        capacity = needed;
    uint8_t *data = realloc(buffer->borrowed ? NULL : buffer->data, capacity);
    if (!data) {
        buffer->failed = true;
        return false;
    }
    if (buffer->borrowed)
        memcpy(data, buffer->data, buffer->size);
    buffer->borrowed = false;
    buffer->data = data;
    buffer->capacity = capacity;
    return true;
}

void td__buffer_put(struct td__buffer *buffer, const void *data, size_t size)
{
    if (!size || !td__buffer_reserve(buffer, size))
        return;
    memcpy(buffer->data + buffer->size, data, size);
    buffer->size += size;
}

void td__buffer_put_u8(struct td__buffer *buffer, uint8_t value)
{
    td__buffer_put(buffer, &value, 1);
}

void td__buffer_put_u32(struct td__buffer *buffer, uint32_t value)
{
    uint8_t bytes[4];
    td__store_u32(bytes, value);
    td__buffer_put(buffer, bytes, sizeof bytes);
}

void td__buffer_put_u64(struct td__buffer *buffer, uint64_t value)
{
    td__buffer_put_u32(buffer, (uint32_t)value);
    td__buffer_put_u32(buffer, (uint32_t)(value >> 32));
}

void td__buffer_put_string(struct td__buffer *buffer, const void *data, size_t size)
{
    td__buffer_put_u32(buffer, (uint32_t)size);
    td__buffer_put(buffer, data, size);
}

void td__buffer_consume(struct td__buffer *buffer, size_t size)
{
    buffer->size -= size;
    if (size && buffer->size)
        memmove(buffer->data, buffer->data + size, buffer->size);
}

static const uint8_t *take(struct td__reader *reader, size_t size)
{
    if (reader->failed || (size_t)(reader->end - reader->at) < size) {
        reader->failed = true;
        return NULL;
    }
    const uint8_t *data = reader->at;
    reader->at += size;
    return data;
}

uint8_t td__reader_u8(struct td__reader *reader)
{
    const uint8_t *data = take(reader, 1);
    return data ? *data : 0;
}

uint32_t td__reader_u32(struct td__reader *reader)
{
    const uint8_t *data = take(reader, 4);
    return data ? td__load_u32(data) : 0;
}

uint64_t td__reader_u64(struct td__reader *reader)
{
    const uint8_t *data = take(reader, 8);
    return data ? td__load_u32(data) | (uint64_t)td__load_u32(data + 4) << 32 : 0;
}

struct td__span td__reader_string(struct td__reader *reader, size_t limit)
{
    size_t size = td__reader_u32(reader);
    if (size > limit)
        reader->failed = true;
    const uint8_t *data = take(reader, size);
    return data ? (struct td__span){(const char *)data, size} : (struct td__span){"", 0};
}

bool td__reader_done(const struct td__reader *reader)
{
    return !reader->failed && reader->at == reader->end;
}
