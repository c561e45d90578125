/* Shareable memory: an allocator over a memfd, and the other side's view of it.
 *
 *     this process    reserve |== block ==|== free ==|== block ==|-------- not grown yet --------|
 *                     base                                       size                      reserve
 *     memfd           0                                          size
 *     another one     view.base                                  view.size
 *
 * A pointer resolves to (arena, offset); another process that was passed the arena's fd finds the
 * same bytes at its view's base plus offset. The bookkeeping is outside the shared memory, so that
 * neither a stray write nor another process can damage it. The memfd never shrinks (it is sealed),
 * so that a view of it never faults. */
#ifndef TD_BASE_ARENA_H
#define TD_BASE_ARENA_H

#include <tandem/base.h>
#include <stddef.h>
#include <unistd.h>

struct td__arena;

/** Makes an arena that can grow to `reserve` bytes (rounded up to a page). Costs address space only. */
td_status td__arena_create(size_t reserve, struct td__arena **arena);

/** Unmaps all of it; pointers into it are gone. */
void td__arena_destroy(struct td__arena *arena);

/** The process's own arena behind td_alloc(), made on first use; NULL (with the last error set) when
 *  it cannot be made. */
struct td__arena *td__arena_default(void);

/** Allocates, aligned to 64; NULL (with the last error set) when the arena is full. */
void *td__arena_alloc(struct td__arena *arena, size_t size);

/** Gives back; false when `memory` is not the start of an allocated block. */
bool td__arena_free(struct td__arena *arena, void *memory);

/** The arena's memfd, to be passed to another process; it stays the arena's. */
int td__arena_fd(const struct td__arena *arena);

/** How many bytes the memfd has by now: a view of that size covers every block. */
size_t td__arena_size(struct td__arena *arena);

/** Which arena of this process `memory` points into, and where. False for other memory, such as
 *  malloc's, and for what was allocated before a fork() and cannot be shared from here. */
bool td__arena_resolve(const void *memory, struct td__arena **arena, size_t *offset);

/** Another process's arena, as seen from here. */
struct td__arena_view {
    int fd;
    unsigned number;
    char *base;
    size_t mapped; /* may be more than the arena has by now, so that growing needs no new mapping */
    size_t size;   /* what it had when last looked at */
    struct td__arena_mapping
        *former; /* smaller mappings, kept since their addresses may be in use */
};

/** Maps the memfd `fd` of another process's arena; takes the fd over on success. Where they have different
 *  numbers, from 1 to 255, the same offset in two views and in this process's own arena stands at addresses
 *  that the caches can tell apart: a loop may go over all of them at once. */
td_status td__arena_view_open(int fd, unsigned number, struct td__arena_view *view);

/** The address of `size` bytes at `offset`, mapping more where the arena has grown; NULL when they
 *  are not inside it (EINVAL), or cannot be mapped here (ENOMEM). Addresses taken before stay good. */
void *td__arena_view_at(struct td__arena_view *view, size_t offset, size_t size);

void td__arena_view_close(struct td__arena_view *view);

/* ---- Pages of memory: 4 KiB on x86-64, and 4, 16 or 64 KiB on aarch64 ------------------------ */

static inline size_t td__page_size(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

/** `size` up to the next whole page. */
static inline size_t td__whole_pages(size_t size)
{
    size_t page = td__page_size();
    return (size + page - 1) & ~(page - 1);
}

#endif
