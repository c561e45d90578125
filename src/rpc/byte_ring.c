/* A ring of bytes in shared memory; see byte_ring.h. */
#include "rpc/byte_ring.h"

#include "base/arena.h"
#include "base/fail.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

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

/* The room, with the newest count only if `size` does not fit without it. */
static size_t room(struct td__byte_ring *ring, size_t size)
{
    if (ring->own + size > ring->other + TD__BYTE_RING_SIZE)
        ring->other = atomic_load_explicit(&ring->shared->head, memory_order_acquire);
    uint64_t used = ring->own - ring->other;
    return used <= TD__BYTE_RING_SIZE ? (size_t)(TD__BYTE_RING_SIZE - used) : SIZE_MAX;
}

size_t td__byte_ring_write(struct td__byte_ring *ring, const void *data, size_t size)
{
    size_t left = room(ring, size);
    if (left == SIZE_MAX)
        return SIZE_MAX;
    size = size < left ? size : left;
    if (size)
        memcpy(ring->data + ring->own % TD__BYTE_RING_SIZE, data, size);
    ring->own += size;
    /* The reader has the lines of the next message in its cache. */
    const char *next = ring->data + ring->own % TD__BYTE_RING_SIZE;
    __builtin_prefetch(next + 64, 1);
    __builtin_prefetch(next + 128, 1);
    return size;
}

/* The reader checks `full` after it has moved the head. */
bool td__byte_ring_await_room(struct td__byte_ring *ring)
{
    atomic_store(&ring->shared->full, 1);
    ring->other = atomic_load(&ring->shared->head);
    return ring->own - ring->other < TD__BYTE_RING_SIZE;
}

bool td__byte_ring_consume(struct td__byte_ring *ring, size_t size)
{
    ring->own += size;
    atomic_store(&ring->shared->head, ring->own);
    if (!atomic_load_explicit(&ring->shared->full, memory_order_relaxed))
        return false;
    return atomic_exchange(&ring->shared->full, 0);
}
