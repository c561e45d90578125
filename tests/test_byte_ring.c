/* The ring of bytes of a link: what is written in any pieces is read as it was, also if the bytes look like the words by
 * which chunks are published. */
#include "runner.h"

#include "rpc/byte_ring.h"

#include <string.h>
#include <unistd.h>

enum { MOST = 3000 };

static void open_pair(struct td__byte_ring_pair *one, struct td__byte_ring_pair *other)
{
    int fd;
    CHECK_OK(td__byte_ring_create(one, &fd));
    CHECK_OK(td__byte_ring_map(other, fd));
    close(fd);
}

static void close_pair(struct td__byte_ring_pair *one, struct td__byte_ring_pair *other)
{
    td__byte_ring_unmap(one);
    td__byte_ring_unmap(other);
}

static uint32_t next_random(uint32_t *state)
{
    return *state = *state * 1664525 + 1013904223;
}

/* The byte at a position of the ring. Its words look like the ends of chunks that begin there in the next lap. */
static uint8_t byte_at(uint64_t at)
{
    uint64_t end = at / 8 * 8 + TD__BYTE_RING_SIZE + 1000;
    return (uint8_t)(end >> at % 8 * 8);
}

/* Reads up to `most` bytes, and checks them; how many there were. */
static size_t read_some(struct td__byte_ring *ring, uint64_t *count, size_t most)
{
    const char *bytes;
    size_t size = td__byte_ring_peek(ring, &bytes);
    CHECK_EQ(size > 0, td__byte_ring_has_bytes(ring));
    size = size < most ? size : most;
    for (size_t i = 0; i < size; i++)
        CHECK_EQ((uint8_t)bytes[i], byte_at(ring->own + i));
    if (size)
        td__byte_ring_consume(ring, size);
    *count += size;
    return size;
}

/* Many laps, with pieces and chunks of all sizes; the reader is behind by up to the whole ring. */
TEST(byte_ring_any_pieces)
{
    struct td__byte_ring_pair writer, reader;
    uint64_t written = 0, published = 0, read = 0;
    uint32_t random = 1;
    char piece[MOST];
    open_pair(&writer, &reader);
    while (written < 40 * (uint64_t)TD__BYTE_RING_SIZE) {
        size_t size = 1 + next_random(&random) % MOST;
        uint64_t at = writer.out.own + (writer.out.own == writer.out.start ? sizeof at : 0);
        for (size_t i = 0; i < size; i++)
            piece[i] = (char)byte_at(at + i);
        size_t done = td__byte_ring_write(&writer.out, piece, size);
        CHECK(done <= size);
        written += done;
        if (done < size || next_random(&random) >> 30) {
            td__byte_ring_publish(&writer.out);
            published = written;
        }
        bool full = done < size && !td__byte_ring_await_room(&writer.out);
        CHECK_EQ(td__byte_ring_has_room(&writer.out), done == size);
        while (read < published && (full || next_random(&random) >> 30 == 1))
            CHECK(read_some(&reader.in, &read, 1 + next_random(&random) % (2 * MOST)));
        if (read == published)
            CHECK_EQ(read_some(&reader.in, &read, MOST), 0);
        CHECK_EQ(td__byte_ring_release(&reader.in), done < size);
    }
    close_pair(&writer, &reader);
}

/* Bytes are not read before they are published, and those of several writes are published together. */
TEST(byte_ring_publishes_together)
{
    struct td__byte_ring_pair writer, reader;
    const char *bytes;
    open_pair(&writer, &reader);
    CHECK_EQ(td__byte_ring_write(&writer.out, "one", 3), 3);
    CHECK_EQ(td__byte_ring_write(&writer.out, "two", 3), 3);
    CHECK(!td__byte_ring_has_bytes(&reader.in));
    td__byte_ring_publish(&writer.out);
    td__byte_ring_publish(&writer.out); /* nothing more */
    CHECK_EQ(td__byte_ring_peek(&reader.in, &bytes), 6);
    CHECK(!memcmp(bytes, "onetwo", 6));
    td__byte_ring_consume(&reader.in, 6);
    CHECK(!td__byte_ring_has_bytes(&reader.in));
    CHECK_EQ(td__byte_ring_write(&reader.out, "back", 4), 4);
    td__byte_ring_publish(&reader.out);
    CHECK_EQ(td__byte_ring_peek(&writer.in, &bytes), 4);
    CHECK(!memcmp(bytes, "back", 4));
    close_pair(&writer, &reader);
}

/* What the other process has written there is not trusted. */
TEST(byte_ring_counts_that_do_not_fit)
{
    struct td__byte_ring_pair writer, reader;
    const char *bytes;
    open_pair(&writer, &reader);
    const uint64_t ends[] = {1, 8, TD__BYTE_RING_SIZE + 1, UINT64_MAX};
    for (size_t i = 0; i < sizeof ends / sizeof ends[0]; i++) {
        atomic_store(td__byte_ring_word(&writer.out, 0), ends[i]);
        CHECK(!td__byte_ring_has_bytes(&reader.in));
        CHECK_EQ(td__byte_ring_peek(&reader.in, &bytes), 0);
    }
    atomic_store(&reader.in.shared->head, 12345678);
    char large[TD__BYTE_RING_SIZE] = {0};
    CHECK_EQ(td__byte_ring_write(&writer.out, large, sizeof large), SIZE_MAX);
    close_pair(&writer, &reader);
}
