/* A ring of bytes in shared memory; see byte_ring.h. */
#include "rpc/byte_ring.h"

#include "base/arena.h"
#include "base/fail.h"
#include "peer/wait_event.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { LINE = 64 };

/* The memfd: a page with the two td__byte_ring_shared, and the data of both directions. */
static size_t memfd_size(void)
{
    return td__page_size() + 2 * (size_t)TD__BYTE_RING_SIZE;
}

static bool map_at(char *at, size_t size, int fd, size_t offset)
{
    return mmap(at, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, (off_t)offset) !=
           MAP_FAILED;
}

/* In memory: the page, and each direction twice. */
static td_status map(struct td__byte_ring_pair *pair, int fd, int side)
{
    size_t page = td__page_size(), ring = TD__BYTE_RING_SIZE, size = page + 4 * ring;
    char *memory = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    bool mapped = memory != MAP_FAILED && map_at(memory, page, fd, 0);
    for (size_t i = 0; mapped && i < 4; i++)
        mapped = map_at(memory + page + i * ring, ring, fd, page + i / 2 * ring);
    if (!mapped) {
        int error = errno;
        if (memory != MAP_FAILED)
            munmap(memory, size);
        return td_fail(TD_ERR_SYSTEM, "the shared memory of a link: mmap: %s",
                       td__errno_text(error));
    }
    struct td__byte_ring_shared *shared = (struct td__byte_ring_shared *)memory;
    struct td__byte_ring rings[2] = {{.shared = &shared[0], .data = memory + page},
                                     {.shared = &shared[1], .data = memory + page + 2 * ring}};
    *pair = (struct td__byte_ring_pair){
        .out = rings[side], .in = rings[!side], .memory = memory, .size = size};
    return TD_OK;
}

td_status td__byte_ring_create(struct td__byte_ring_pair *pair, int *fd_out)
{
    int fd = memfd_create("tandem-rpc", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0 || ftruncate(fd, (off_t)memfd_size()) ||
        fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)) {
        int error = errno;
        if (fd >= 0)
            close(fd);
        return td_fail(TD_ERR_SYSTEM, "the shared memory of a link: memfd_create: %s",
                       td__errno_text(error));
    }
    td_status status = map(pair, fd, 0);
    if (status)
        close(fd);
    else
        *fd_out = fd;
    return status;
}

td_status td__byte_ring_map(struct td__byte_ring_pair *pair, int fd)
{
    struct stat info;
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || !(seals & F_SEAL_SHRINK) || fstat(fd, &info) ||
        (size_t)info.st_size != memfd_size())
        return td_fail(TD_ERR_INVALID, "the shared memory of a link is not valid");
    return map(pair, fd, 1);
}

void td__byte_ring_unmap(struct td__byte_ring_pair *pair)
{
    if (pair->memory)
        munmap(pair->memory, pair->size);
    pair->memory = NULL;
}

static uint64_t next_line(uint64_t position)
{
    return (position + LINE - 1) & ~(uint64_t)(LINE - 1);
}

/* The room for bytes of the chunk that is not published. Two lines stay free: the first word of the next chunk is not a
 * byte that the reader has not read. */
static size_t room(const struct td__byte_ring *ring)
{
    uint64_t at = ring->own == ring->start ? ring->start + sizeof(uint64_t) : ring->own;
    uint64_t limit = ring->head + TD__BYTE_RING_SIZE - 2 * LINE;
    if (ring->own - ring->head > TD__BYTE_RING_SIZE)
        return SIZE_MAX;
    return at < limit ? (size_t)(limit - at) : 0;
}

size_t td__byte_ring_write(struct td__byte_ring *ring, const void *data, size_t size)
{
    size_t left = room(ring);
    if (left < size) {
        ring->head = atomic_load_explicit(&ring->shared->head, memory_order_acquire);
        left = room(ring);
    }
    if (left == SIZE_MAX)
        return SIZE_MAX;
    size = size < left ? size : left;
    if (!size)
        return 0;
    if (ring->own == ring->start)
        ring->own += sizeof(uint64_t);
    memcpy(ring->data + ring->own % TD__BYTE_RING_SIZE, data, size);
    ring->own += size;
    return size;
}

void td__byte_ring_publish(struct td__byte_ring *ring)
{
    uint64_t start = ring->start, end = ring->own, next = next_line(end);
    if (start == end)
        return;
    /* Bytes of an earlier chunk that look like an end. */
    _Atomic uint64_t *word = td__byte_ring_word(ring, next);
    if (td__byte_ring_is_end(next, atomic_load_explicit(word, memory_order_relaxed)))
        atomic_store_explicit(word, 0, memory_order_relaxed);
    atomic_store_explicit(td__byte_ring_word(ring, start), end, memory_order_release);
    ring->own = ring->start = next;
}

void td__byte_ring_claim(const struct td__byte_ring *ring)
{
    const char *next = ring->data + ring->own % TD__BYTE_RING_SIZE;
    td__claim_line(next + LINE);
    td__claim_line(next + 2 * LINE);
}

/* The reader checks `full` after it has moved the head. */
bool td__byte_ring_await_room(struct td__byte_ring *ring)
{
    atomic_store(&ring->shared->full, 1);
    ring->head = atomic_load(&ring->shared->head);
    return room(ring) > 0;
}

size_t td__byte_ring_peek(struct td__byte_ring *ring, const char **data)
{
    if (ring->own == ring->end) {
        uint64_t end = atomic_load_explicit(td__byte_ring_word(ring, ring->own),
                                            memory_order_acquire);
        if (!td__byte_ring_is_end(ring->own, end))
            return 0;
        ring->end = end;
        ring->own += sizeof end;
    }
    *data = ring->data + ring->own % TD__BYTE_RING_SIZE;
    return (size_t)(ring->end - ring->own);
}

void td__byte_ring_consume(struct td__byte_ring *ring, size_t size)
{
    ring->own += size;
    if (ring->own == ring->end)
        ring->own = ring->end = next_line(ring->end);
}

bool td__byte_ring_release(struct td__byte_ring *ring)
{
    atomic_store(&ring->shared->head, ring->own);
    if (!atomic_load_explicit(&ring->shared->full, memory_order_relaxed))
        return false;
    return atomic_exchange(&ring->shared->full, 0);
}
