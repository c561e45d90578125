/* Memory of the toy accelerator: a memfd a device, mapped twice.
 *
 *     address ──► no rights    what alloc() returns, and td_tensor_data() shows
 *                   │ the same offset
 *     mapping ──► read, write  where the stream's threads compute
 *
 * Live blocks are in a list by offset, and a new one takes the first gap. Pinned memory is the host's, in a list too. */
#define _GNU_SOURCE
#include "toy_machine.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define ALIGNMENT 256

struct toy_block {
    struct toy_block *next;
    size_t offset, bytes;
    uint64_t number;
};

struct toy_pinned {
    struct toy_pinned *next;
    char *data;
    size_t bytes;
    uint64_t number;
};

static size_t rounded(size_t bytes)
{
    return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

td_status toy_memory_open(struct toy_device *device)
{
    size_t bytes = toy_machine.memory_bytes;
    int fd = memfd_create("toy", MFD_CLOEXEC);
    if (fd < 0)
        return td_fail(TD_ERR_SYSTEM, "%s: no memory file: %s", device->name, strerror(errno));
    if (ftruncate(fd, (off_t)bytes)) {
        td_fail(TD_ERR_SYSTEM, "%s: a memory of %zu bytes: %s", device->name, bytes,
                strerror(errno));
        goto close_file;
    }
    char *address = mmap(NULL, bytes, PROT_NONE, MAP_SHARED, fd, 0);
    if (address == MAP_FAILED) {
        td_fail(TD_ERR_SYSTEM, "%s: no addresses: %s", device->name, strerror(errno));
        goto close_file;
    }
    char *mapping = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapping == MAP_FAILED) {
        td_fail(TD_ERR_SYSTEM, "%s: no mapping: %s", device->name, strerror(errno));
        goto unmap_address;
    }
    device->memory = fd;
    device->bytes = bytes;
    device->address = address;
    device->mapping = mapping;
    return TD_OK;

unmap_address:
    munmap(address, bytes);
close_file:
    close(fd);
    return TD_ERR_SYSTEM;
}

void toy_memory_close(struct toy_device *device)
{
    if (!device->mapping)
        return;
    for (struct toy_block *block = device->blocks, *next; block; block = next) {
        next = block->next;
        free(block);
    }
    device->blocks = NULL;
    munmap(device->address, device->bytes);
    munmap(device->mapping, device->bytes);
    close(device->memory);
}

/* ---- Blocks ------------------------------------------------------------------------------------ */

/* Where the first gap of `bytes` bytes is: the pointer to the block behind it, and its offset. NULL: none is. */
static struct toy_block **find_gap(struct toy_device *device, size_t bytes, size_t *offset)
{
    *offset = 0;
    struct toy_block **behind = &device->blocks;
    for (; *behind; behind = &(*behind)->next) {
        if ((*behind)->offset - *offset >= bytes)
            return behind;
        *offset = (*behind)->offset + rounded((*behind)->bytes);
    }
    return device->bytes >= *offset && device->bytes - *offset >= bytes ? behind : NULL;
}

static td_status add_block(struct toy_device *device, size_t bytes, void **data)
{
    enum toy_when when;
    if (toy_is_requested(device, TOY_ALLOC, &when))
        return td_fail(TD_ERR_NOMEM, "%s: no %zu bytes, as toy_fail_alloc() requests", device->name,
                       bytes);
    size_t offset;
    struct toy_block **behind = find_gap(device, bytes, &offset);
    if (!behind)
        return td_fail(TD_ERR_NOMEM,
                       "%s: no %zu bytes in one piece are free; %zu of its %zu are in use",
                       device->name, bytes, (size_t)device->counts.allocated, device->bytes);
    struct toy_block *block = malloc(sizeof *block);
    if (!block)
        return td_fail(TD_ERR_NOMEM, "%s: out of host memory", device->name);
    *block = (struct toy_block){*behind, offset, bytes, ++toy_machine.numbers};
    *behind = block;
    memset(device->mapping + offset, TOY_FRESH, bytes);

    struct toy_counts *counts = &device->counts;
    counts->blocks++;
    counts->allocated += (int64_t)bytes;
    if (counts->allocated_peak < counts->allocated)
        counts->allocated_peak = counts->allocated;
    *data = device->address + offset;
    return TD_OK;
}

td_status toy_alloc(void *self, size_t bytes, void **data)
{
    struct toy_device *device = self;
    td_status status = toy_enter(device);
    if (status)
        return status;
    status = add_block(device, bytes, data);
    toy_unlock();
    return status;
}

void toy_free(void *self, void *data)
{
    struct toy_device *device = self;
    toy_lock();
    if (device->is_open) {
        struct toy_block **at = &device->blocks;
        while (*at && device->address + (*at)->offset != data)
            at = &(*at)->next;
        struct toy_block *block = *at;
        if (!block)
            toy_die("%s: free of %p, which is not the beginning of a live block", device->name,
                    data);
        *at = block->next;
        memset(device->mapping + block->offset, TOY_FREED, block->bytes);
        device->counts.blocks--;
        device->counts.allocated -= (int64_t)block->bytes;
        free(block);
    }
    toy_unlock();
}

td_status toy_memory_info(void *self, size_t *available, size_t *total)
{
    struct toy_device *device = self;
    td_status status = toy_enter(device);
    if (status)
        return status;
    *total = device->bytes;
    *available = device->bytes - (size_t)device->counts.allocated;
    toy_unlock();
    return TD_OK;
}

/* ---- Pinned memory ----------------------------------------------------------------------------- */

td_status toy_alloc_pinned(void *self, size_t bytes, void **data)
{
    struct toy_device *device = self;
    struct toy_pinned *pinned = malloc(sizeof *pinned);
    char *memory = aligned_alloc(ALIGNMENT, rounded(bytes));
    td_status status = TD_ERR_NOMEM;
    if (!pinned || !memory)
        td_fail(status, "%s: no %zu bytes of pinned memory", device->name, bytes);
    else
        status = toy_enter(device);
    if (status) {
        free(memory);
        free(pinned);
        return status;
    }
    memset(memory, TOY_FRESH, bytes);
    *pinned = (struct toy_pinned){toy_machine.pinned, memory, bytes, ++toy_machine.numbers};
    toy_machine.pinned = pinned;
    toy_unlock();
    *data = memory;
    return TD_OK;
}

static void unpin(struct toy_pinned **at)
{
    struct toy_pinned *pinned = *at;
    *at = pinned->next;
    memset(pinned->data, TOY_FREED, pinned->bytes);
    free(pinned->data);
    free(pinned);
}

void toy_free_pinned(void *self, void *data)
{
    struct toy_device *device = self;
    toy_lock();
    if (device->is_open) {
        struct toy_pinned **at = &toy_machine.pinned;
        while (*at && (*at)->data != data)
            at = &(*at)->next;
        if (!*at)
            toy_die("%s: free_pinned of %p, which is not pinned", device->name, data);
        unpin(at);
    }
    toy_unlock();
}

void toy_pinned_close(void)
{
    while (toy_machine.pinned)
        unpin(&toy_machine.pinned);
}

int64_t toy_pinned_bytes(void)
{
    int64_t bytes = 0;
    toy_lock();
    for (struct toy_pinned *pinned = toy_machine.pinned; pinned; pinned = pinned->next)
        bytes += (int64_t)pinned->bytes;
    toy_unlock();
    return bytes;
}

/* ---- What is enqueued ----------------------------------------------------------------------------- */

/* The number of the block, of the device or of pinned memory, that has all of the span; 0: none has. */
static uint64_t block_of(const struct toy_span *span)
{
    const char *data = span->data;
    if (span->device) {
        for (struct toy_block *block = span->device->blocks; block; block = block->next) {
            const char *first = span->device->address + block->offset;
            if (data >= first && data + span->bytes <= first + block->bytes)
                return block->number;
        }
    } else {
        for (struct toy_pinned *pinned = toy_machine.pinned; pinned; pinned = pinned->next)
            if (data >= pinned->data && data + span->bytes <= pinned->data + pinned->bytes)
                return pinned->number;
    }
    return 0;
}

static struct toy_span make_span(struct toy_device *device, const void *data, size_t bytes,
                                 const char *user)
{
    struct toy_span span = {.device = device, .data = (void *)data, .bytes = bytes};
    if (!bytes)
        return span;
    toy_lock();
    span.number = block_of(&span);
    if (!span.number)
        toy_die("%s: %s: %zu bytes at %p are not in a live block of %s",
                device ? device->name : "toy", user, bytes, data,
                device ? "this device" : "pinned memory");
    toy_unlock();
    return span;
}

struct toy_span toy_span_on(struct toy_device *device, const void *data, size_t bytes,
                            const char *user)
{
    return make_span(device, data, bytes, user);
}

struct toy_span toy_span_pinned(const void *data, size_t bytes, const char *user)
{
    return make_span(NULL, data, bytes, user);
}

void *toy_span_reach(const struct toy_span *span, const char *user)
{
    if (!span->number)
        return span->data;
    toy_lock();
    if (block_of(span) != span->number)
        toy_die("%s: %s: %zu bytes at %p were freed before the stream has run it",
                span->device ? span->device->name : "toy", user, span->bytes, span->data);
    toy_unlock();
    if (!span->device)
        return span->data;
    return span->device->mapping + ((char *)span->data - span->device->address);
}
