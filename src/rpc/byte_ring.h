/* A ring of bytes in shared memory, with one writer and one reader: one direction of a link between two processes.
 *
 * The data are mapped twice, one mapping behind the other, so that any bytes in the ring are contiguous in memory.
 * Positions count all bytes of the ring that were ever used. The bytes are in chunks, each of which begins with a cache
 * line of its own:
 *
 *     data    |end|bytes …  padding|end|bytes …|end| …
 *              ^own (reader)        ^           ^start (writer)
 *
 * The writer publishes a chunk by its first word, the position at which its bytes end. Before that, the word is any that
 * is not the end of a chunk there. So the reader polls the line in which the bytes arrive, and a small message takes one
 * line from cache to cache; a count of published bytes would be another one. The reader frees chunks by its head, which
 * the writer reads when it has no room left. Neither trusts the other: an end that does not fit is none, a head that does
 * not fit ends the link. */
#ifndef TD_RPC_BYTE_RING_H
#define TD_RPC_BYTE_RING_H

#include <tandem/base.h>

#include <stdatomic.h>

enum { TD__BYTE_RING_SIZE = 128 * 1024 }; /* a multiple of all page sizes */

/** In shared memory; zero at first. */
struct td__byte_ring_shared {
    _Alignas(64) _Atomic uint64_t head; /* the reader's */
    _Atomic uint32_t full;              /* set by the writer: it waits for room */
};

/** One end, in the process's own memory. */
struct td__byte_ring {
    struct td__byte_ring_shared *shared;
    char *data;
    uint64_t own; /* where it writes or reads next */
    union {
        uint64_t head; /* of the writer: the reader's, as last seen */
        uint64_t end;  /* of the reader: of the chunk that it reads; `own` if there is none */
    };
    uint64_t start; /* of the writer: of the chunk that is not published */
};

/** The rings of both directions. Of the two processes one creates them, and is side 0; the other one maps its memfd. */
struct td__byte_ring_pair {
    struct td__byte_ring in, out;
    void *memory;
    size_t size;
};

/** Creates a pair, and its memfd, which the caller closes. */
td_status td__byte_ring_create(struct td__byte_ring_pair *pair, int *fd);

/** Maps the pair of another process; the caller closes the memfd. */
td_status td__byte_ring_map(struct td__byte_ring_pair *pair, int fd);

void td__byte_ring_unmap(struct td__byte_ring_pair *pair);

/** Writes as many bytes as there is room for, without publishing them; SIZE_MAX if the reader's count is not valid. */
size_t td__byte_ring_write(struct td__byte_ring *ring, const void *data, size_t size);

/** Publishes what was written. */
void td__byte_ring_publish(struct td__byte_ring *ring);

/** Where more is written soon: takes the lines behind the one that is written next, which the reader polls, out of its
 *  cache, while the writer makes the next message. Else the first write to them would wait for that. A reader that waits
 *  for each message would only have to fetch them back. */
void td__byte_ring_claim(const struct td__byte_ring *ring);

/** Sets `full`, and returns whether there is room meanwhile. */
bool td__byte_ring_await_room(struct td__byte_ring *ring);

/** Whether the reader has made room since then. */
static inline bool td__byte_ring_has_room(const struct td__byte_ring *ring)
{
    return !atomic_load(&ring->shared->full);
}

/** The word of a chunk that begins at a position. */
static inline _Atomic uint64_t *td__byte_ring_word(const struct td__byte_ring *ring,
                                                   uint64_t position)
{
    return (_Atomic uint64_t *)(ring->data + position % TD__BYTE_RING_SIZE);
}

/** Whether a chunk that begins at a position can end there. */
static inline bool td__byte_ring_is_end(uint64_t position, uint64_t end)
{
    return end - position - sizeof end - 1 < TD__BYTE_RING_SIZE - sizeof end;
}

/** Whether there is something to read. */
static inline bool td__byte_ring_has_bytes(const struct td__byte_ring *ring)
{
    return ring->own != ring->end ||
           td__byte_ring_is_end(ring->own, atomic_load_explicit(td__byte_ring_word(ring, ring->own),
                                                                memory_order_relaxed));
}

/** How many bytes can be read at *data; 0: none. */
size_t td__byte_ring_peek(struct td__byte_ring *ring, const char **data);

/** Fetches lines while the reader handles the `size` bytes that it has peeked at: theirs, all at once, and some behind their
 *  chunk, the more `chunks` the reader has found before without a pause: the writer is ahead of it, and has most likely
 *  written them. A line that is not written yet would have to go back to the writer's cache. */
static inline void td__byte_ring_prefetch(const struct td__byte_ring *ring, const char *bytes,
                                          size_t size, unsigned chunks)
{
    enum { LINE = 64, MOST = 16, AHEAD = 8 };
    for (size_t at = LINE; at < size && at < MOST * LINE; at += LINE)
        __builtin_prefetch(bytes + at, 0);
    const char *next = ring->data + (ring->end + LINE - 1) % TD__BYTE_RING_SIZE;
    unsigned ahead = chunks / 2 < AHEAD ? chunks / 2 : AHEAD;
    if (!chunks)
        return;
    __builtin_prefetch(next + ahead * LINE, 0);
    __builtin_prefetch(next + (ahead + 1) * LINE, 0);
}

/** `size` bytes were read. */
void td__byte_ring_consume(struct td__byte_ring *ring, size_t size);

/** Frees what was read. True if the writer waits for room, and is to be woken. */
bool td__byte_ring_release(struct td__byte_ring *ring);

#endif
