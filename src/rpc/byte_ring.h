/* A ring of bytes in shared memory, with one writer and one reader: one direction of a link between two processes.
 *
 * The data are mapped twice, one mapping behind the other, so that any bytes in the ring are contiguous in memory:
 *
 *     data        |0 1 2 3 4 5 6 7|0 1 2 3 4 5 6 7|
 *                         ^head         ^tail
 *
 * Head and tail count all bytes ever read and written. The writer publishes bytes by its tail, the reader frees them
 * by its head. Neither trusts the other: a count that does not fit ends the link. */
#ifndef TD_RPC_BYTE_RING_H
#define TD_RPC_BYTE_RING_H

#include <tandem/base.h>

#include <stdatomic.h>

enum { TD__BYTE_RING_SIZE = 128 * 1024 }; /* a multiple of all page sizes */

/** In shared memory; zero at first. */
struct td__byte_ring_shared {
    _Alignas(64) _Atomic uint64_t tail; /* the writer's */
    _Alignas(64) _Atomic uint64_t head; /* the reader's */
    _Atomic uint32_t full;              /* set by the writer: it waits for room */
};

/** One end, in the process's own memory. */
struct td__byte_ring {
    struct td__byte_ring_shared *shared;
    char *data;
    uint64_t own;   /* of the writer: tail; of the reader: head */
    uint64_t other; /* the other one, as last seen */
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
static inline void td__byte_ring_publish(struct td__byte_ring *ring)
{
    atomic_store_explicit(&ring->shared->tail, ring->own, memory_order_release);
}

/** Sets `full`, and returns whether there is room meanwhile. */
bool td__byte_ring_await_room(struct td__byte_ring *ring);

/** Whether the reader has made room since then. */
static inline bool td__byte_ring_has_room(const struct td__byte_ring *ring)
{
    return !atomic_load(&ring->shared->full);
}

/** How many bytes can be read at *data; SIZE_MAX if the writer's count is not valid. */
static inline size_t td__byte_ring_peek(struct td__byte_ring *ring, const char **data)
{
    if (ring->own == ring->other)
        ring->other = atomic_load_explicit(&ring->shared->tail, memory_order_acquire);
    *data = ring->data + ring->own % TD__BYTE_RING_SIZE;
    uint64_t size = ring->other - ring->own;
    return size <= TD__BYTE_RING_SIZE ? (size_t)size : SIZE_MAX;
}

/** The same, with the newest count. */
static inline size_t td__byte_ring_peek_all(struct td__byte_ring *ring, const char **data)
{
    ring->other = atomic_load_explicit(&ring->shared->tail, memory_order_acquire);
    return td__byte_ring_peek(ring, data);
}

/** Whether there is something to read. */
static inline bool td__byte_ring_has_bytes(const struct td__byte_ring *ring)
{
    return atomic_load_explicit(&ring->shared->tail, memory_order_relaxed) != ring->own;
}

/** Frees `size` bytes that were read. True if the writer waits for room, and is to be woken. */
bool td__byte_ring_consume(struct td__byte_ring *ring, size_t size);

#endif
