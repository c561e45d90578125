/* Encoding and decoding: a growing byte buffer, and a reader with bounds checks. Integers are little-endian;
 * a string is a u32 length and its bytes. */
#ifndef TD_BASE_BUFFER_H
#define TD_BASE_BUFFER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Growing can run out of memory. The failure is sticky, so that a writer checks once, at the end: `failed` is
 * then true and the contents are incomplete. */
struct td__buffer {
    uint8_t *data;
    size_t size;
    size_t capacity;
    bool failed;
    bool
        borrowed; /* `data` is the caller's memory: it is used as long as it suffices, and not freed */
};

void td__buffer_free(struct td__buffer *buffer);

/** Reserves `more` bytes after the end; false without memory. */
bool td__buffer_reserve(struct td__buffer *buffer, size_t more);

void td__buffer_put(struct td__buffer *buffer, const void *data, size_t size);
void td__buffer_put_u8(struct td__buffer *buffer, uint8_t value);
void td__buffer_put_u32(struct td__buffer *buffer, uint32_t value);
void td__buffer_put_u64(struct td__buffer *buffer, uint64_t value);
void td__buffer_put_string(struct td__buffer *buffer, const void *data, size_t size);

/** Removes `size` bytes from the front. */
void td__buffer_consume(struct td__buffer *buffer, size_t size);

/* Reading past the end sets `failed` and returns zeros, so that a reader, too, checks once. */
struct td__reader {
    const uint8_t *at;
    const uint8_t *end;
    bool failed;
};

struct td__span {
    const char *data;
    size_t size;
};

static inline struct td__reader td__reader_of(const void *data, size_t size)
{
    return (struct td__reader){.at = data, .end = (const uint8_t *)data + size};
}

uint8_t td__reader_u8(struct td__reader *reader);
uint32_t td__reader_u32(struct td__reader *reader);
uint64_t td__reader_u64(struct td__reader *reader);

/** A string of at most `limit` bytes, in place. */
struct td__span td__reader_string(struct td__reader *reader, size_t limit);

/** True when every read succeeded and no bytes are left. */
bool td__reader_done(const struct td__reader *reader);

static inline uint32_t td__load_u32(const void *from)
{
    const uint8_t *b = from;
    return (uint32_t)b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24;
}

static inline void td__store_u32(void *to, uint32_t value)
{
    uint8_t *b = to;
    b[0] = (uint8_t)value;
    b[1] = (uint8_t)(value >> 8);
    b[2] = (uint8_t)(value >> 16);
    b[3] = (uint8_t)(value >> 24);
}

static inline uint64_t td__load_u64(const void *from)
{
    return td__load_u32(from) | (uint64_t)td__load_u32((const uint8_t *)from + 4) << 32;
}

static inline void td__store_u64(void *to, uint64_t value)
{
    td__store_u32(to, (uint32_t)value);
    td__store_u32((uint8_t *)to + 4, (uint32_t)(value >> 32));
}

#endif
