/* Shareable memory; arena.h has the diagram.
 *
 * A list of blocks in address order covers the grown part without gaps. Free blocks are also in a bin
 * for their size (powers of two); two neighbours are never both free. Freed pages stay resident, because
 * the first touch of a page costs far more than anything else here; only what exceeds both KEEP_FREE and
 * the bytes in use is returned to the kernel, or, by td__arena_trim(), all of it. */
#include "base/arena.h"

#include "base/fail.h"
#include "base/file_limit.h"
#include "base/map.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysinfo.h>
#include <unistd.h>

enum { GRANULE = 512, BINS = 48, COLOURS = 256 };

#define KEEP_FREE ((size_t)256 << 20)
#define GROWTH ((size_t)16 << 20)
#define SPAN                                                                                       \
    ((size_t)1 << 28) /* address bits that a cache's way predictor hashes, see map_apart() */
#define VIEW_AT_LEAST ((size_t)1 << 30) /* address space for a view; costs nothing */
#define RESERVE_AT_LEAST ((size_t)1 << 40)

struct block {
    struct td__map_node node; /* by offset; in the map only while allocated */
    size_t offset;
    size_t size;
    struct block *before, *after;         /* neighbours in address order */
    struct block *bin_before, *bin_after; /* while free */
    bool free;
};

struct td__arena {
    struct td__arena *next; /* in the registry */
    int fd;
    char *base;
    size_t reserve;
    size_t size;     /* grown so far */
    size_t in_use;   /* bytes in allocated blocks */
    size_t resident; /* bytes in free blocks that may have pages */
    bool inherited;  /* from before a fork: a private copy that is not allocated from */
    struct block *last;
    struct block *bins[BINS];
    struct td__map blocks;
    pthread_mutex_t lock;
};

/* Protects the list of arenas and the default one. Taken before an arena's lock. */
static pthread_mutex_t registry_lock = PTHREAD_MUTEX_INITIALIZER;
static struct td__arena *registry;
static struct td__arena *default_arena;

static size_t round_up(size_t size, size_t unit)
{
    return (size + unit - 1) / unit * unit;
}

/* The bin of a block of `size`: all blocks in a higher bin are at least as large as any here. */
static int bin_of(size_t size)
{
    int bin = 63 - __builtin_clzll(size / GRANULE);
    return bin < BINS ? bin : BINS - 1;
}

static void bin_insert(struct td__arena *arena, struct block *block)
{
    struct block **head = &arena->bins[bin_of(block->size)];
    block->free = true;
    block->bin_before = NULL;
    block->bin_after = *head;
    if (*head)
        (*head)->bin_before = block;
    *head = block;
}

static void bin_remove(struct td__arena *arena, struct block *block)
{
    if (block->bin_before)
        block->bin_before->bin_after = block->bin_after;
    else
        arena->bins[bin_of(block->size)] = block->bin_after;
    if (block->bin_after)
        block->bin_after->bin_before = block->bin_before;
    block->free = false;
}

/* Best fit, and of equal blocks the lowest address, among at least the first MOST blocks of a bin: large
 * blocks stay free for large tensors. */
static struct block *find_free(struct td__arena *arena, size_t size)
{
    enum { MOST = 256 };
    struct block *best = NULL;
    for (int bin = bin_of(size); bin < BINS && !best; bin++) {
        int seen = 0;
        for (struct block *block = arena->bins[bin]; block; block = block->bin_after) {
            if (block->size >= size &&
                (!best || block->size < best->size ||
                 (block->size == best->size && block->offset < best->offset)))
                best = block;
            if (++seen >= MOST && best)
                break;
        }
    }
    return best;
}

/* Unlinks `block` from the address order and frees it: its bytes were merged into its neighbour. */
static void unlink_block(struct td__arena *arena, struct block *block)
{
    if (block->before)
        block->before->after = block->after;
    if (block->after)
        block->after->before = block->before;
    else
        arena->last = block->before;
    free(block);
}

/* Extends the memfd by `*more` bytes, or by `least` if that fails; 0, or an errno. */
static int extend(struct td__arena *arena, size_t least, size_t *more)
{
    for (;; *more = least) {
        int error = ENOMEM;
        if (*more <= arena->reserve - arena->size)
            error = td__file_truncate(arena->fd, (off_t)(arena->size + *more)) ? errno : 0;
        if (!error || *more == least)
            return error;
    }
}

/* Grows the memfd so that it ends with a free block of `size`, and returns that block; NULL with an
 * errno. */
static struct block *grow(struct td__arena *arena, size_t size, int *error)
{
    struct block *last = arena->last && arena->last->free ? arena->last : NULL;
    size_t missing = td__whole_pages(size - (last ? last->size : 0));
    size_t more = missing > GROWTH ? missing : GROWTH;
    struct block *block = last ? last : calloc(1, sizeof *block);
    *error = block ? extend(arena, missing, &more) : ENOMEM;
    if (!*error && mmap(arena->base + arena->size, more, PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_FIXED, arena->fd, (off_t)arena->size) == MAP_FAILED)
        *error = errno;
    if (*error) {
        if (!last)
            free(block);
        return NULL;
    }
    if (last) {
        bin_remove(arena, last);
        last->size += more;
    } else {
        block->offset = arena->size;
        block->size = more;
        block->before = arena->last;
        if (arena->last)
            arena->last->after = block;
        arena->last = block;
    }
    arena->size += more;
    bin_insert(arena, block);
    return block;
}

/* Takes the first `size` bytes of a free block for an allocation. */
static bool split_block(struct td__arena *arena, struct block *block, size_t size)
{
    struct block *rest = NULL;
    if (block->size > size) {
        rest = calloc(1, sizeof *rest);
        if (!rest)
            return false;
    }
    block->node.key = (const char *)&block->offset;
    block->node.key_size = sizeof block->offset;
    if (!td__map_insert(&arena->blocks, &block->node)) {
        free(rest);
        return false;
    }
    bin_remove(arena, block);
    if (rest) {
        *rest = (struct block){.offset = block->offset + size, .size = block->size - size};
        rest->before = block;
        rest->after = block->after;
        if (rest->after)
            rest->after->before = rest;
        else
            arena->last = rest;
        block->after = rest;
        block->size = size;
        bin_insert(arena, rest);
    }
    arena->in_use += size;
    arena->resident -= arena->resident < size ? arena->resident : size;
    return true;
}

void *td__arena_alloc(struct td__arena *arena, size_t size)
{
    if (!size || size > arena->reserve) {
        td_fail(size ? TD_ERR_NOMEM : TD_ERR_INVALID,
                "shareable memory: %zu bytes requested; it must be 1 to %zu", size, arena->reserve);
        return NULL;
    }
    size_t wanted = round_up(size, GRANULE);
    pthread_mutex_lock(&arena->lock);
    struct block *block = find_free(arena, wanted);
    int error = ENOMEM;
    if (!block)
        block = grow(arena, wanted, &error);
    void *memory = block && split_block(arena, block, wanted) ? arena->base + block->offset : NULL;
    if (!memory && error == EFBIG)
        td_fail(
            TD_ERR_NOMEM,
            "shareable memory: no room for %zu more bytes (%zu in use); it counts as a file: %s",
            size, arena->in_use, td__errno_text(error));
    else if (!memory)
        td_fail(TD_ERR_NOMEM, "shareable memory: no room for %zu more bytes (%zu in use)", size,
                arena->in_use);
    pthread_mutex_unlock(&arena->lock);
    return memory;
}

static struct block *merge_with_free_neighbours(struct td__arena *arena, struct block *block)
{
    struct block *before = block->before, *after = block->after;
    if (after && after->free) {
        bin_remove(arena, after);
        block->size += after->size;
        unlink_block(arena, after);
    }
    if (before && before->free) {
        bin_remove(arena, before);
        before->size += block->size;
        unlink_block(arena, block);
        block = before;
    }
    return block;
}

/* Returns the pages of a free block; false when there are none, or it fails. */
static bool drop_pages(const struct td__arena *arena, const struct block *block)
{
    size_t first = td__whole_pages(block->offset);
    size_t end = (block->offset + block->size) & ~(td__page_size() - 1);
    return end > first && !fallocate(arena->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                                     (off_t)first, (off_t)(end - first));
}

void td__arena_trim(struct td__arena *arena)
{
    pthread_mutex_lock(&arena->lock);
    for (struct block *block = arena->last; block; block = block->before)
        if (block->free)
            drop_pages(arena, block);
    arena->resident = 0;
    pthread_mutex_unlock(&arena->lock);
}

bool td__arena_free(struct td__arena *arena, void *memory)
{
    size_t offset = (size_t)((char *)memory - arena->base);
    pthread_mutex_lock(&arena->lock);
    struct td__map_node *node = td__map_find(&arena->blocks, (const char *)&offset, sizeof offset);
    if (node) {
        struct block *block = TD__CONTAINER(node, struct block, node);
        td__map_remove(&arena->blocks, node);
        arena->in_use -= block->size;
        arena->resident += block->size;
        block = merge_with_free_neighbours(arena, block);
        if (arena->resident > KEEP_FREE && arena->resident > arena->in_use &&
            drop_pages(arena, block))
            arena->resident -= arena->resident < block->size ? arena->resident : block->size;
        bin_insert(arena, block);
    }
    pthread_mutex_unlock(&arena->lock);
    return node != NULL;
}

td_status td__arena_create(size_t reserve, struct td__arena **arena_out)
{
    struct td__arena *arena = calloc(1, sizeof *arena);
    if (!arena)
        return td__fail_nomem("shareable memory");
    td_status status = TD_OK;
    arena->reserve = td__whole_pages(reserve);
    arena->fd = memfd_create("tandem", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (arena->fd < 0 || fcntl(arena->fd, F_ADD_SEALS, F_SEAL_SHRINK)) {
        status = td_fail(TD_ERR_SYSTEM, "shareable memory: memfd_create: %s",
                         td__errno_text(errno));
        goto close_fd;
    }
    arena->base = mmap(NULL, arena->reserve, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                       -1, 0);
    if (arena->base == MAP_FAILED) {
        status = td_fail(TD_ERR_NOMEM, "shareable memory: no %zu bytes of address space (%s)",
                         arena->reserve, td__errno_text(errno));
        goto close_fd;
    }
    pthread_mutex_init(&arena->lock, NULL);
    pthread_mutex_lock(&registry_lock);
    arena->next = registry;
    registry = arena;
    pthread_mutex_unlock(&registry_lock);
    *arena_out = arena;
    return TD_OK;

close_fd:
    if (arena->fd >= 0)
        close(arena->fd);
    free(arena);
    return status;
}

void td__arena_destroy(struct td__arena *arena)
{
    pthread_mutex_lock(&registry_lock);
    struct td__arena **link = &registry;
    while (*link != arena)
        link = &(*link)->next;
    *link = arena->next;
    pthread_mutex_unlock(&registry_lock);

    munmap(arena->base, arena->reserve);
    if (arena->fd >= 0)
        close(arena->fd);
    for (struct block *block = arena->last, *before; block; block = before) {
        before = block->before;
        free(block);
    }
    td__map_free(&arena->blocks);
    pthread_mutex_destroy(&arena->lock);
    free(arena);
}

/* Twice the machine's memory, so that fragmentation never runs into the end, and much at least: a virtual machine may get
 * more while it runs. Less where the process may not have that much address space. */
struct td__arena *td__arena_default(void)
{
    pthread_mutex_lock(&registry_lock);
    struct td__arena *arena = default_arena;
    pthread_mutex_unlock(&registry_lock);
    if (arena)
        return arena;

    struct sysinfo info;
    size_t reserve = RESERVE_AT_LEAST;
    if (!sysinfo(&info) && (size_t)info.totalram * info.mem_unit * 2 > reserve)
        reserve = (size_t)info.totalram * info.mem_unit * 2;
    while (td__arena_create(reserve, &arena) == TD_ERR_NOMEM && reserve > GROWTH)
        reserve /= 2;
    if (!arena)
        return NULL;

    pthread_mutex_lock(&registry_lock);
    struct td__arena *winner = default_arena ? default_arena : (default_arena = arena);
    pthread_mutex_unlock(&registry_lock);
    if (winner != arena)
        td__arena_destroy(arena); /* another thread created it first */
    return winner;
}

int td__arena_fd(const struct td__arena *arena)
{
    return arena->fd;
}

size_t td__arena_size(struct td__arena *arena)
{
    pthread_mutex_lock(&arena->lock);
    size_t size = arena->size;
    pthread_mutex_unlock(&arena->lock);
    return size;
}

static struct td__arena *arena_at(const void *memory)
{
    pthread_mutex_lock(&registry_lock);
    struct td__arena *arena = registry;
    while (arena && (size_t)((const char *)memory - arena->base) >= arena->reserve)
        arena = arena->next;
    pthread_mutex_unlock(&registry_lock);
    return arena;
}

bool td__arena_resolve(const void *memory, struct td__arena **arena, size_t *offset)
{
    struct td__arena *found = arena_at(memory);
    if (!found || found->inherited)
        return false;
    *arena = found;
    *offset = (size_t)((const char *)memory - found->base);
    return true;
}

void *td_alloc(size_t size)
{
    struct td__arena *arena = td__arena_default();
    return arena ? td__arena_alloc(arena, size) : NULL;
}

void td_free(void *memory)
{
    if (!memory)
        return;
    struct td__arena *arena = arena_at(memory);
    if (arena && arena->inherited)
        return; /* a forked child's private copy is freed at exit */
    if (!arena || !td__arena_free(arena, memory))
        td_log(TD_LOG_ERROR, "td_free: %p was not allocated by td_alloc, or was freed already",
               memory);
}

/* ---- fork() ----------------------------------------------------------------------------------
 *
 * With the inherited MAP_SHARED mapping a child would write into its parent's tensors, and both would
 * allocate the same blocks. So the child remaps it MAP_PRIVATE, and creates an arena of its own. */

static void before_fork(void)
{
    pthread_mutex_lock(&registry_lock);
    for (struct td__arena *arena = registry; arena; arena = arena->next)
        pthread_mutex_lock(&arena->lock);
}

static void after_fork_in_parent(void)
{
    for (struct td__arena *arena = registry; arena; arena = arena->next)
        pthread_mutex_unlock(&arena->lock);
    pthread_mutex_unlock(&registry_lock);
}

static void after_fork_in_child(void)
{
    for (struct td__arena *arena = registry; arena; arena = arena->next) {
        if (!arena->inherited) {
            /* If the private mapping fails there is none: a fault is better than writing to the parent. */
            if (arena->size && mmap(arena->base, arena->size, PROT_READ | PROT_WRITE,
                                    MAP_PRIVATE | MAP_FIXED, arena->fd, 0) == MAP_FAILED)
                munmap(arena->base, arena->size);
            close(arena->fd);
            arena->fd = -1;
            arena->inherited = true;
        }
        pthread_mutex_unlock(&arena->lock);
    }
    default_arena = NULL;
    pthread_mutex_unlock(&registry_lock);
}

__attribute__((constructor)) static void watch_forks(void)
{
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

/* ---- Views of another process's arena -------------------------------------------------------- */

td_status td__arena_view_open(int fd, unsigned number, struct td__arena_view *view)
{
    int seals = fcntl(fd, F_GET_SEALS);
    struct stat status;
    if (seals < 0 || !(seals & F_SEAL_SHRINK) || fstat(fd, &status))
        return td_fail(TD_ERR_INVALID, "shareable memory: the passed fd is not a sealed memfd");
    *view = (struct td__arena_view){.fd = fd, .number = number};
    return TD_OK;
}

struct td__arena_mapping {
    struct td__arena_mapping *next;
    char *base;
    size_t size;
};

/* Ranks tend to have the same buffer at the same offset, and the distances between mappings are round
 * numbers. The L1 cache of AMD processors, which predicts the way from a hash of the address bits 12 to 27,
 * then aliases such lines, and a loop that writes to several ranks' buffers in turn takes up to seven times
 * as long. So view n begins n pages after the process's own arena, modulo SPAN: the bits 12 to 19 (with
 * pages of 4 KiB) differ at every offset.
 *
 * MAP_FAILED without enough address space. */
static void *map_apart(const struct td__arena_view *view, size_t size)
{
    const struct td__arena *own = td__arena_default();
    uintptr_t wanted = (own ? (uintptr_t)own->base : 0) + view->number % COLOURS * td__page_size();
    char *reserved = mmap(NULL, size + SPAN, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                          -1, 0);
    if (reserved == MAP_FAILED)
        return MAP_FAILED;
    size_t before = (wanted - (uintptr_t)reserved) % SPAN;
    void *base = mmap(reserved + before, size, PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_NORESERVE | MAP_FIXED, view->fd, 0);
    if (base == MAP_FAILED) {
        munmap(reserved, size + SPAN);
        return MAP_FAILED;
    }
    if (before)
        munmap(reserved, before);
    munmap(reserved + before + size, SPAN - before);
    return base;
}

/* Maps at least `size` bytes from the start; the former mapping is kept. */
static bool map_view(struct td__arena_view *view, size_t size)
{
    struct td__arena_mapping *former = view->base ? malloc(sizeof *former) : NULL;
    if (view->base && !former)
        return false;
    size_t ahead = VIEW_AT_LEAST;
    while (ahead < size)
        ahead *= 2;
    void *base = map_apart(view, ahead);
    if (base == MAP_FAILED) { /* address space is limited */
        ahead = td__whole_pages(size);
        base = mmap(NULL, ahead, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, view->fd, 0);
    }
    if (base == MAP_FAILED) {
        free(former);
        return false;
    }
    if (former) {
        *former = (struct td__arena_mapping){view->former, view->base, view->mapped};
        view->former = former;
    }
    view->base = base;
    view->mapped = ahead;
    return true;
}

void *td__arena_view_at(struct td__arena_view *view, size_t offset, size_t size)
{
    size_t end;
    errno = EINVAL;
    if (__builtin_add_overflow(offset, size, &end))
        return NULL;
    if (end > view->size || !view->base) {
        struct stat status;
        if (fstat(view->fd, &status) || end > (size_t)status.st_size)
            return NULL;
        if ((size_t)status.st_size > view->mapped && !map_view(view, (size_t)status.st_size))
            return NULL;
        view->size = (size_t)status.st_size;
    }
    return view->base + offset;
}

void td__arena_view_drop_pages(const struct td__arena_view *view)
{
    if (view->base)
        madvise(view->base, view->mapped, MADV_DONTNEED);
    for (struct td__arena_mapping *former = view->former; former; former = former->next)
        madvise(former->base, former->size, MADV_DONTNEED);
}

void td__arena_view_close(struct td__arena_view *view)
{
    if (view->base)
        munmap(view->base, view->mapped);
    for (struct td__arena_mapping *former = view->former, *next; former; former = next) {
        next = former->next;
        munmap(former->base, former->size);
        free(former);
    }
    close(view->fd);
    *view = (struct td__arena_view){.fd = -1};
}

#if defined(__SANITIZE_THREAD__)
static atomic_uint view_accesses;

void td__view_access_begin(void)
{
    (void)atomic_load_explicit(&view_accesses, memory_order_acquire);
}

void td__view_access_end(void)
{
    atomic_fetch_add_explicit(&view_accesses, 1, memory_order_release);
}
#endif
