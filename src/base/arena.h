/* Shareable memory: an allocator over a memfd, and another process's view of it.
 *
 *     this process    reserve |== block ==|== free ==|== block ==|-------- not grown yet --------|
 *                     base                                       size                      reserve
 *     memfd           0                                          size
 *     another one     view.base                                  view.size
 *
 * A pointer resolves to (arena, offset); a process that received the arena's fd has the same bytes at its
 * view's base plus offset. The metadata is outside the shared memory, so that neither a stray write nor
 * another process can damage it. The memfd is sealed against shrinking, so that a view never faults. */
#ifndef TD_BASE_ARENA_H
#define TD_BASE_ARENA_H

#include <tandem/base.h>
#include <stddef.h>
#include <unistd.h>

struct td__arena;

/** Creates an arena that can grow to `reserve` bytes (rounded up to a page). Costs address space only. */
td_status td__arena_create(size_t reserve, struct td__arena **arena);

/** Unmaps all of it; pointers into it become invalid. */
void td__arena_destroy(struct td__arena *arena);

/** The process's own arena, behind td_alloc(), created on first use; NULL (with the last error set) when
 *  that fails. */
struct td__arena *td__arena_default(void);

/** Allocates, aligned to 64; NULL (with the last error set) when the arena is full. */
void *td__arena_alloc(struct td__arena *arena, size_t size);

/** Frees a block; false when `memory` is not the start of an allocated block. */
bool td__arena_free(struct td__arena *arena, void *memory);

/** Returns the pages of all free blocks to the kernel. */
void td__arena_trim(struct td__arena *arena);

/** The arena's memfd, to pass to another process; the arena keeps owning it. */
int td__arena_fd(const struct td__arena *arena);

/** The current size of the memfd: a view of that size covers every block. */
size_t td__arena_size(struct td__arena *arena);

/** The arena of this process that `memory` points into, and the offset. False for other memory, such as
 *  malloc's, and for memory allocated before a fork(), which this process cannot share. */
bool td__arena_resolve(const void *memory, struct td__arena **arena, size_t *offset);

/** Another process's arena, as seen from here. */
struct td__arena_view {
    int fd;
    unsigned number;
    char *base;
    size_t mapped; /* may exceed the arena's size, so that growing needs no new mapping */
    size_t size;   /* of the memfd, when last read */
    struct td__arena_mapping
        *former; /* smaller mappings, kept since their addresses may be in use */
};

/** Maps the memfd `fd` of another process's arena; owns the fd on success. With different numbers, from 1 to
 *  255, the addresses of the same offset in two views and in this process's own arena do not alias in the L1
 *  cache: a loop may access all of them at once. */
td_status td__arena_view_open(int fd, unsigned number, struct td__arena_view *view);

/** The address of `size` bytes at `offset`; maps more where the arena has grown. NULL when they are outside
 *  the arena (EINVAL), or cannot be mapped (ENOMEM). Addresses returned before stay valid. */
void *td__arena_view_at(struct td__arena_view *view, size_t offset, size_t size);

/** Its pages do not count as this process's any more, until they are accessed again. */
void td__arena_view_drop_pages(const struct td__arena_view *view);

void td__arena_view_close(struct td__arena_view *view);

/** Enclose accesses to the memory of views; they do nothing but for ThreadSanitizer. The owner of a buffer may pass it
 *  to one call, and when that is complete, to another: two threads of this process, each in one of the calls, then
 *  access the buffer in an order that only the owner's process establishes, and ThreadSanitizer sees only this one. */
#if defined(__SANITIZE_THREAD__)
void td__view_access_begin(void);
void td__view_access_end(void);
#else
static inline void td__view_access_begin(void)
{
}
static inline void td__view_access_end(void)
{
}
#endif

/* ---- Pages of memory: 4 KiB on x86-64, and 4, 16 or 64 KiB on aarch64 ------------------------ */

static inline size_t td__page_size(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

/** `size` rounded up to whole pages. */
static inline size_t td__whole_pages(size_t size)
{
    size_t page = td__page_size();
    return (size + page - 1) & ~(page - 1);
}

#endif
