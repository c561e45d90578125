/* The cache of an accelerator's memory.
 *
 * Memory is taken from the device in segments, which are cut into blocks. A block belongs to the stream on which it was
 * allocated: freed, it serves the next allocation of that stream at once, since the stream runs in order. A block that
 * was used on other streams, too, is kept aside until events on those have passed. Free neighbours are joined; when
 * memory is short, segments that are free as a whole go back to the device.
 *
 * Free blocks are in bins by size, four to a power of two; a bitmap says which bins have some. */
#include "device/device_internal.h"

#include "base/fail.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)

enum {
    ROUNDING = 512,
    BINS = 256,
    SCANNED = 16, /* blocks of a bin that are compared for the best fit */
};

/* Streams other than its own on which a block was used. */
struct use {
    struct use *next;
    td_event *event;   /* recorded at the latest use */
    td_device *device; /* of the stream, and its id: the stream itself may end before */
    uint64_t id;
};

struct td__block {
    td_device *device;
    char *data;
    size_t bytes;
    bool is_free;
    struct pool *pool;
    _Atomic(td_stream *) stream;      /* that of the pool, to be read without the lock */
    struct td__block *before, *after; /* neighbours in the segment */
    struct td__block *next,
        **link; /* in a bin, in the list of those in use, or of those kept aside */
    struct use *uses;
    int graphs;         /* how many graphs use it, besides that of its pool */
    uint64_t captured;  /* the latest capture that has used it */
    bool is_released;   /* in use only by graphs */
    const char *holder; /* of a block in use */
};

struct td__held_block {
    struct td__held_block *next;
    struct td__block *block;
};

/* The free blocks of one stream. */
struct pool {
    struct pool *next;
    td_stream *stream; /* not retained: td__memory_forget() ends the pool with the stream */
    uint64_t filled[BINS / 64];
    struct td__block *bins[BINS];
};

struct td__device_memory {
    pthread_mutex_t lock; /* outside of those of streams and events */
    struct pool *pools;
    struct td__block *in_use;
    struct td__block *aside; /* freed, and waiting for their uses */
    struct td__block *held;  /* freed, and used by graphs */
    td_memory_stats stats;
};

static pthread_mutex_t create_lock = PTHREAD_MUTEX_INITIALIZER;
static _Thread_local const char *label;

const char *td__set_memory_label(const char *holder)
{
    const char *before = label;
    label = holder;
    return before;
}

/* Each allocation calls this: without the lock, once the memory is there. */
static struct td__device_memory *memory_of(td_device *device)
{
    struct td__device_memory *memory = __atomic_load_n(&device->memory, __ATOMIC_ACQUIRE);
    if (memory)
        return memory;
    pthread_mutex_lock(&create_lock);
    memory = device->memory;
    if (!memory && (memory = calloc(1, sizeof *memory))) {
        pthread_mutex_init(&memory->lock, NULL);
        __atomic_store_n(&device->memory, memory, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&create_lock);
    return memory;
}

/* ---- Bins ----------------------------------------------------------------------------------------- */

/* The bin of a size: the blocks of a bin are smaller than those of the next. */
static int bin_of(size_t bytes)
{
    size_t units = bytes / ROUNDING; /* above 0 */
    int power = 63 - __builtin_clzll(units);
    int quarter = power < 2 ? 0 : (int)(units >> (power - 2)) & 3;
    return power * 4 + quarter;
}

static void link_block(struct td__block **list, struct td__block *block)
{
    block->next = *list;
    block->link = list;
    if (*list)
        (*list)->link = &block->next;
    *list = block;
}

static void unlink_block(struct td__block *block)
{
    *block->link = block->next;
    if (block->next)
        block->next->link = block->link;
}

static void put_in_bin(struct td__block *block)
{
    int bin = bin_of(block->bytes);
    block->is_free = true;
    link_block(&block->pool->bins[bin], block);
    block->pool->filled[bin / 64] |= UINT64_C(1) << bin % 64;
}

static void take_from_bin(struct td__block *block)
{
    int bin = bin_of(block->bytes);
    block->is_free = false;
    unlink_block(block);
    if (!block->pool->bins[bin])
        block->pool->filled[bin / 64] &= ~(UINT64_C(1) << bin % 64);
}

/* The first bin from `bin` on that has blocks; BINS if there is none. */
static int next_bin(const struct pool *pool, int bin)
{
    for (; bin < BINS; bin = (bin / 64 + 1) * 64) {
        uint64_t left = pool->filled[bin / 64] >> bin % 64;
        if (left)
            return bin + __builtin_ctzll(left);
    }
    return BINS;
}

static struct td__block *find_free(struct pool *pool, size_t bytes)
{
    struct td__block *best = NULL;
    int bin = bin_of(bytes), looked = 0;
    for (struct td__block *b = pool->bins[bin]; b && looked < SCANNED; b = b->next, looked++)
        if (b->bytes >= bytes && (!best || b->bytes < best->bytes))
            best = b;
    if (best)
        return best;
    bin = bin + 1 < BINS ? next_bin(pool, bin + 1) : BINS;
    return bin < BINS ? pool->bins[bin] : NULL;
}

static struct pool *pool_of(struct td__device_memory *memory, td_stream *stream)
{
    struct pool *pool = memory->pools;
    while (pool && pool->stream != stream)
        pool = pool->next;
    if (pool)
        return pool;
    pool = calloc(1, sizeof *pool);
    if (!pool)
        return NULL;
    pool->stream = stream;
    pool->next = memory->pools;
    return memory->pools = pool;
}

/* ---- Segments -------------------------------------------------------------------------------------- */

/* Small tensors share segments; large ones get what they need. */
static size_t segment_bytes(size_t bytes)
{
    if (bytes <= MIB)
        return 2 * MIB;
    if (bytes < 10 * MIB)
        return 20 * MIB;
    return (bytes + 2 * MIB - 1) / (2 * MIB) * (2 * MIB);
}

static struct td__block *new_segment(td_device *device, struct pool *pool, size_t bytes)
{
    struct td__device_memory *memory = device->memory;
    struct td__block *block = calloc(1, sizeof *block);
    void *data = NULL;
    if (!block || td__ops_of(device)->alloc(device->self, bytes, &data)) {
        free(block);
        return NULL;
    }
    *block = (struct td__block){
        .device = device, .data = data, .bytes = bytes, .pool = pool, .stream = pool->stream};
    put_in_bin(block);
    memory->stats.reserved += (int64_t)bytes;
    memory->stats.taken++;
    if (memory->stats.reserved > memory->stats.reserved_peak)
        memory->stats.reserved_peak = memory->stats.reserved;
    return block;
}

/* Cuts the end off a block that is not in a bin, if it is worth it. */
static void split(struct td__block *block, size_t bytes)
{
    size_t rest = block->bytes - bytes;
    bool small = block->bytes <= 2 * MIB;
    if (rest < (small ? (size_t)ROUNDING : MIB))
        return;
    struct td__block *end = calloc(1, sizeof *end);
    if (!end)
        return; /* the block stays longer than needed */
    *end = (struct td__block){.device = block->device,
                              .data = block->data + bytes,
                              .bytes = rest,
                              .pool = block->pool,
                              .stream = block->pool->stream,
                              .before = block,
                              .after = block->after};
    if (end->after)
        end->after->before = end;
    block->after = end;
    block->bytes = bytes;
    put_in_bin(end);
}

/* Joins a free block with its free successor. Neither is in a bin. */
static void absorb(struct td__block *block, struct td__block *after)
{
    block->bytes += after->bytes;
    block->after = after->after;
    if (block->after)
        block->after->before = block;
    free(after);
}

static void return_to_pool(struct td__block *block)
{
    struct td__block *before = block->before, *after = block->after;
    if (after && after->is_free) {
        take_from_bin(after);
        absorb(block, after);
    }
    if (before && before->is_free) {
        take_from_bin(before);
        absorb(before, block);
        block = before;
    }
    put_in_bin(block);
}

/* Gives all segments that are free as a whole back to the device, which has finished with them. */
static void flush(struct td__device_memory *memory, td_device *device)
{
    for (struct pool *pool = memory->pools; pool; pool = pool->next) {
        if (pool->stream->is_graph)
            continue; /* its next launch uses it */
        for (int bin = next_bin(pool, 0); bin < BINS; bin = next_bin(pool, bin + 1)) {
            struct td__block *next;
            for (struct td__block *block = pool->bins[bin]; block; block = next) {
                next = block->next;
                if (block->before || block->after)
                    continue;
                take_from_bin(block);
                td__ops_of(device)->free(device->self, block->data);
                memory->stats.reserved -= (int64_t)block->bytes;
                free(block);
            }
        }
    }
}

/* ---- Uses on other streams --------------------------------------------------------------------------- */

static void free_use(struct use *use)
{
    td__event_give_back(use->event);
    free(use);
}

/* Drops the uses that have passed; with `wait`, all. True when none is left. */
static bool have_passed(struct td__block *block, bool wait)
{
    for (struct use **at = &block->uses; *at;) {
        struct use *use = *at;
        if (wait)
            td__wait_for_event("freeing memory",
                               use->event); /* a device that failed uses it no more */
        else if (!td_event_is_done(use->event)) {
            at = &use->next;
            continue;
        }
        *at = use->next;
        free_use(use);
    }
    return !block->uses;
}

static void collect(struct td__device_memory *memory, bool wait)
{
    struct td__block *next;
    for (struct td__block *block = memory->aside; block; block = next) {
        next = block->next;
        if (!have_passed(block, wait))
            continue;
        unlink_block(block);
        return_to_pool(block);
    }
}

static void move_to_pool(struct td__block *block, struct pool *pool)
{
    block->pool = pool;
    atomic_store_explicit(&block->stream, pool->stream, memory_order_relaxed);
}

/* The blocks of a list that belong to `pool` go to `heir`. */
static void hand_over(struct td__block *list, struct pool *pool, struct pool *heir)
{
    for (struct td__block *block = list; block; block = block->next)
        if (block->pool == pool)
            move_to_pool(block, heir);
}

void td__memory_forget(td_stream *stream)
{
    td_device *device = stream->device;
    struct td__device_memory *memory = device->is_host ? NULL : memory_of(device);
    if (!memory)
        return;
    pthread_mutex_lock(&memory->lock);
    struct pool **at = &memory->pools;
    while (*at && (*at)->stream != stream)
        at = &(*at)->next;
    struct pool *pool = *at, *heir = pool ? pool_of(memory, &device->stream) : NULL;
    if (heir) {
        if (td_stream_wait_stream(&device->stream, stream))
            td__wait_for_stream("ending a stream", stream);
        hand_over(memory->in_use, pool, heir);
        hand_over(memory->aside, pool, heir);
        hand_over(memory->held, pool, heir);
        for (int bin = next_bin(pool, 0); bin < BINS; bin = next_bin(pool, bin)) {
            struct td__block *block = pool->bins[bin];
            take_from_bin(block);
            move_to_pool(block, heir);
            put_in_bin(block);
        }
        for (at = &memory->pools; *at != pool;)
            at = &(*at)->next;
        *at = pool->next;
        free(pool);
    }
    pthread_mutex_unlock(&memory->lock);
}

/* A block of the graph's own pool is not reused in the capture once another stream has used it. */
static td_status hold_for_graph(struct td__block *block, td_graph *graph, uint64_t capture)
{
    if (block->captured == capture)
        return TD_OK;
    struct td__held_block *held = malloc(sizeof *held);
    if (!held)
        return TD_ERR_NOMEM;
    struct td__held_block **list = td__graph_held(graph);
    *held = (struct td__held_block){.next = *list, .block = block};
    *list = held;
    block->captured = capture;
    block->graphs++;
    return TD_OK;
}

/* Without its uses that have passed. */
static void put_aside(struct td__device_memory *memory, struct td__block *block)
{
    if (have_passed(block, false))
        return_to_pool(block);
    else
        link_block(&memory->aside, block);
}

void td__blocks_let_go(struct td__held_block *held, td_stream *stream)
{
    for (struct td__held_block *next; held; held = next) {
        struct td__block *block = held->block;
        struct td__device_memory *memory = block->device->memory;
        if (stream)
            td__block_use(block, stream);
        pthread_mutex_lock(&memory->lock);
        if (--block->graphs == 0 && block->is_released) {
            block->is_released = false;
            unlink_block(block);
            put_aside(memory, block);
        }
        pthread_mutex_unlock(&memory->lock);
        next = held->next;
        free(held);
    }
}

void td__block_use(void *arg, td_stream *stream)
{
    struct td__block *block = arg;
    if (!block || atomic_load_explicit(&block->stream, memory_order_relaxed) == stream)
        return;
    struct td__device_memory *memory = block->device->memory;
    pthread_mutex_lock(&memory->lock);
    if (td__is_captured(stream)) {
        if (hold_for_graph(block, stream->device->capturing, stream->capture))
            block->graphs++; /* for ever: the memory must not be reused too early */
        pthread_mutex_unlock(&memory->lock);
        return;
    }
    struct use *use = block->uses;
    while (use && (use->device != stream->device || use->id != stream->id))
        use = use->next;
    if (!use && (use = calloc(1, sizeof *use))) {
        use->device = stream->device;
        use->id = stream->id;
        use->event = td__event_take(stream->device);
        use->next = block->uses;
        block->uses = use;
    }
    /* Without an event the host waits instead: the memory must not be reused too early. */
    if (!use || !use->event || td_event_record(use->event, stream))
        td__wait_for_stream("using memory on another stream", stream);
    pthread_mutex_unlock(&memory->lock);
}

/* ---- Allocation ----------------------------------------------------------------------------------------- */

static const char *size_text(int64_t bytes, char text[32])
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB"};
    int unit = 0;
    double size = (double)bytes;
    for (; size >= 1024 && unit < 3; unit++)
        size /= 1024;
    snprintf(text, 32, unit ? "%.1f %s" : "%.0f %s", size, units[unit]);
    return text;
}

/* How much a call holds. */
struct holding {
    const char *holder;
    int64_t bytes;
    int count;
};

enum { MOST_HOLDERS = 64 };

static int more_bytes(const void *a, const void *b)
{
    int64_t x = ((const struct holding *)a)->bytes, y = ((const struct holding *)b)->bytes;
    return (x < y) - (x > y);
}

/* Fills in who holds how much, the greatest first; the last entry may be "others". Returns the number of entries. */
static int list_holders(const struct td__device_memory *memory,
                        struct holding holdings[MOST_HOLDERS])
{
    int count = 0;
    for (const struct td__block *block = memory->in_use; block; block = block->next) {
        int i = 0;
        while (i < count && strcmp(holdings[i].holder, block->holder) && i < MOST_HOLDERS - 1)
            i++;
        if (i == count)
            holdings[count++] = (struct holding){.holder = i == MOST_HOLDERS - 1 ? "others"
                                                                                 : block->holder};
        holdings[i].bytes += (int64_t)block->bytes;
        holdings[i].count++;
    }
    qsort(holdings, (size_t)count, sizeof *holdings, more_bytes);
    return count;
}

/* At most `lines` holders, each as "td_linear 4.0 MiB in 2 tensors". */
static size_t holders_text(const struct td__device_memory *memory, int lines, const char *between,
                           char *text, size_t size)
{
    struct holding holdings[MOST_HOLDERS];
    int count = list_holders(memory, holdings);
    size_t length = 0;
    text[0] = 0;
    for (int i = 0; i < count && i < lines && length + 80 < size; i++) {
        char bytes[32];
        length += (size_t)snprintf(text + length, size - length, "%s%s %s in %d %s",
                                   i ? between : "", holdings[i].holder,
                                   size_text(holdings[i].bytes, bytes), holdings[i].count,
                                   holdings[i].count == 1 ? "tensor" : "tensors");
    }
    return length;
}

static void fail_short(td_device *device, const char *call, size_t bytes)
{
    struct td__device_memory *memory = device->memory;
    char asked[32], used[32], cached[32], total_text[32], holders[1024];
    size_t available, total = 0;
    if (td__ops_of(device)->memory_info)
        td__ops_of(device)->memory_info(device->self, &available, &total);
    holders_text(memory, 6, ", ", holders, sizeof holders);
    td_fail(TD_ERR_NOMEM,
            "%s: %s has no memory for %s%s%s; tensors hold %s, %s more is cached in pieces; the "
            "largest holders: %s",
            call, device->name, size_text((int64_t)bytes, asked), total ? " of its " : "",
            total ? size_text((int64_t)total, total_text) : "",
            size_text(memory->stats.allocated, used),
            size_text(memory->stats.reserved - memory->stats.allocated, cached),
            holders[0] ? holders : "none");
}

/* A free block of at least `bytes`; NULL, with the last error set, without memory. */
static struct td__block *find_block(td_device *device, td_stream *stream, const char *call,
                                    size_t bytes)
{
    struct td__device_memory *memory = device->memory;
    td_stream *owner = td__pool_stream(stream);
    struct pool *pool = pool_of(memory, owner);
    if (!pool) {
        td__fail_nomem(call);
        return NULL;
    }
    if (memory->aside)
        collect(memory, false);
    /* What is free in a graph's pool is so in the order of its own stream, and not of those that have joined it. */
    struct td__block *block = owner == stream ? find_free(pool, bytes) : NULL;
    if (block)
        return block;
    struct td__error before;
    td__error_save(&before);
    size_t segment = owner == stream ? segment_bytes(bytes) : bytes;
    block = new_segment(device, pool, segment);
    if (!block && segment > bytes)
        block = new_segment(device, pool, bytes);
    if (block) {
        td__error_undo(&before); /* of the first attempt */
        return block;
    }
    if (!atomic_load(&device->capture)) { /* else nothing may wait for the device */
        memory->stats.flushes++;
        td__wait_for_device("looking for memory", device);
        collect(memory, true);
        block = find_free(pool, bytes);
        if (!block) {
            flush(memory, device);
            block = new_segment(device, pool, bytes);
        }
    }
    if (block) {
        td__error_undo(&before);
    } else {
        memory->stats.failures++;
        fail_short(device, call, bytes);
    }
    return block;
}

void *td__block_alloc(td_device *device, const char *call, size_t bytes, void **arg)
{
    struct td__device_memory *memory = memory_of(device);
    size_t rounded = (bytes + ROUNDING - 1) / ROUNDING * ROUNDING;
    if (!memory || rounded < bytes) {
        td__fail_nomem(call);
        return NULL;
    }
    pthread_mutex_lock(&memory->lock);
    struct td__block *block = find_block(device, td__stream_of(device), call, rounded);
    if (block) {
        take_from_bin(block);
        split(block, rounded);
        block->holder = label ? label : call;
        link_block(&memory->in_use, block);
        memory->stats.allocations++;
        memory->stats.tensors++;
        memory->stats.allocated += (int64_t)block->bytes;
        if (memory->stats.allocated > memory->stats.allocated_peak)
            memory->stats.allocated_peak = memory->stats.allocated;
    }
    pthread_mutex_unlock(&memory->lock);
    if (!block)
        return NULL;
    *arg = block;
    return block->data;
}

void td__block_free(void *data, void *arg)
{
    (void)data;
    struct td__block *block = arg;
    struct td__device_memory *memory = block->device->memory;
    pthread_mutex_lock(&memory->lock);
    memory->stats.tensors--;
    memory->stats.allocated -= (int64_t)block->bytes;
    unlink_block(block);
    block->is_released = block->graphs > 0;
    if (block->is_released)
        link_block(&memory->held, block);
    else
        put_aside(memory, block);
    pthread_mutex_unlock(&memory->lock);
}

/* ---- The public calls -------------------------------------------------------------------------------------- */

td_status td_device_memory_stats(td_device *device, td_memory_stats *stats)
{
    device = td__use_device("td_device_memory_stats", device);
    if (!device)
        return td__error_status();
    if (!stats)
        return td__fail_null("td_device_memory_stats");
    *stats = (td_memory_stats){0};
    if (device->is_host)
        return td__host_memory_stats(stats);
    struct td__device_memory *memory = memory_of(device);
    if (!memory)
        return td__fail_nomem("td_device_memory_stats");
    pthread_mutex_lock(&memory->lock);
    *stats = memory->stats;
    pthread_mutex_unlock(&memory->lock);
    stats->pinned = td__pinned_bytes(device->kind);
    size_t available, total;
    const td_device_ops *ops = td__ops_of(device);
    if (ops->memory_info && !ops->memory_info(device->self, &available, &total)) {
        stats->available = (int64_t)available;
        stats->total = (int64_t)total;
    }
    return TD_OK;
}

/* The memory of the device of an argument, with *device the device itself. NULL on the host, and, with *status set, where
 * there is no such device. */
static struct td__device_memory *memory_for(const char *call, td_device **device, td_status *status)
{
    *device = td__use_device(call, *device);
    *status = *device ? TD_OK : td__error_status();
    return *device && !(*device)->is_host ? memory_of(*device) : NULL;
}

td_status td_device_reset_peak(td_device *device)
{
    td_status status;
    struct td__device_memory *memory = memory_for("td_device_reset_peak", &device, &status);
    if (!memory)
        return status || !device->is_host ? status : td__host_memory_reset_peak();
    pthread_mutex_lock(&memory->lock);
    memory->stats.allocated_peak = memory->stats.allocated;
    memory->stats.reserved_peak = memory->stats.reserved;
    pthread_mutex_unlock(&memory->lock);
    return TD_OK;
}

td_status td_device_empty_cache(td_device *device)
{
    td_status status;
    struct td__device_memory *memory = memory_for("td_device_empty_cache", &device, &status);
    if (!memory)
        return status || !device->is_host ? status : td__host_memory_trim();
    pthread_mutex_lock(&memory->lock);
    status = td__wait_for_device("td_device_empty_cache", device);
    if (!atomic_load(&device->capture)) {
        collect(memory, true);
        flush(memory, device);
    }
    pthread_mutex_unlock(&memory->lock);
    return status;
}

td_bytes td_device_memory_text(td_device *device)
{
    td_bytes text = {0};
    enum { SIZE = MOST_HOLDERS * 100 };
    device = td__use_device("td_device_memory_text", device);
    char *lines = device ? malloc(SIZE) : NULL;
    if (!lines)
        return text;
    lines[0] = 0;
    struct td__device_memory *memory = device->is_host ? NULL : memory_of(device);
    if (memory) {
        pthread_mutex_lock(&memory->lock);
        holders_text(memory, MOST_HOLDERS, "\n", lines, SIZE);
        pthread_mutex_unlock(&memory->lock);
    }
    text.data = lines;
    text.size = strlen(lines);
    return text;
}
