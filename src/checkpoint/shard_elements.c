/* The bytes of parts of tensors: in chunks, by way of the host, or all at once in a snapshot. */
#include "base/fail.h"
#include "checkpoint/sharded.h"

#include <pthread.h>
#include <string.h>
#include <sys/mman.h>

td_status td__elements_begin(struct td__elements *elements, const char *call,
                             const struct td__shard_part *part)
{
    *elements = (struct td__elements){.call = call, .left = td__part_bytes(part)};
    if (elements->left == 0)
        return TD_OK;
    elements->is_host = true;
    if (part->data) {
        elements->at = (struct td__place){.device = td__host_device(), .data = (void *)part->data};
        return TD_OK;
    }
    elements->whole = td__contiguous(part->tensor);
    if (!elements->whole)
        return td__error_status();
    elements->at = td__place_of(elements->whole);
    elements->is_host = td__on_host(elements->whole);
    elements->is_bool = part->dtype == TD_BOOL;
    if (elements->is_host && !elements->is_bool)
        return TD_OK;
    elements->room = td__pinned_alloc(elements->at.device, TD__SHARD_CHUNK, &elements->pinned);
    return elements->room ? TD_OK : td__error_status();
}

td_status td__elements_next(struct td__elements *elements, const void **data, size_t *size)
{
    size_t part = elements->left < TD__SHARD_CHUNK ? (size_t)elements->left : TD__SHARD_CHUNK;
    *size = part;
    *data = elements->room ? elements->room : elements->at.data;
    if (part == 0)
        return TD_OK;
    if (elements->room) {
        struct td__place host = {
            .device = td__host_device(), .data = elements->room, .pinned = elements->pinned};
        if (elements->is_host)
            memcpy(elements->room, elements->at.data, part);
        else
            TD_TRY(td__copy_between(elements->call, &host, &elements->at, part, false));
    }
    /* The file has only 0 and 1; in memory any byte but 0 is true. */
    for (size_t i = 0; elements->is_bool && i < part; i++)
        ((uint8_t *)elements->room)[i] = ((uint8_t *)elements->room)[i] != 0;
    elements->at.data = (char *)elements->at.data + part;
    elements->left -= part;
    return TD_OK;
}

void td__elements_end(struct td__elements *elements)
{
    if (elements->room)
        td__pinned_free(elements->room, elements->pinned);
    td_tensor_release(elements->whole);
    *elements = (struct td__elements){0};
}

/* ---- Snapshots ----------------------------------------------------------------------------------------- */

static td_status copy_part(const char *call, const struct td__shard_part *part, char *to)
{
    struct td__elements elements;
    const void *data = NULL;
    size_t size = 1;
    td_status status = td__elements_begin(&elements, call, part);
    while (!status && size > 0) {
        status = td__elements_next(&elements, &data, &size);
        if (!status && size > 0)
            memcpy(to, data, size);
        to += status ? 0 : size;
    }
    td__elements_end(&elements);
    return status;
}

/* The memory of the latest snapshot is kept for the next one, which then costs a copy and no page faults. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct td__snapshot kept;

void td__snapshot_free(struct td__snapshot *snapshot)
{
    struct td__snapshot former = *snapshot;
    *snapshot = (struct td__snapshot){0};
    if (!former.data)
        return;
    pthread_mutex_lock(&lock);
    struct td__snapshot other = kept;
    kept = former;
    pthread_mutex_unlock(&lock);
    if (other.data)
        munmap(other.data, other.size);
}

static td_status allocate(const char *call, size_t size, struct td__snapshot *snapshot)
{
    pthread_mutex_lock(&lock);
    *snapshot = kept;
    kept = (struct td__snapshot){0};
    pthread_mutex_unlock(&lock);
    if (snapshot->data && snapshot->size >= size && snapshot->size / 2 <= size)
        return TD_OK;
    if (snapshot->data)
        munmap(snapshot->data, snapshot->size);
    *snapshot = (struct td__snapshot){0};
    void *data = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED)
        return td_fail(TD_ERR_NOMEM, "%s: no memory for a snapshot of %zu bytes", call, size);
    *snapshot = (struct td__snapshot){.data = data, .size = size};
    return TD_OK;
}

td_status td__snapshot_take(const char *call, struct td__shard_part *parts, int count,
                            struct td__snapshot *snapshot)
{
    size_t size = 1;
    for (int i = 0; i < count; i++)
        size += (td__part_bytes(&parts[i]) + 63) / 64 * 64;
    TD_TRY(allocate(call, size, snapshot));
    char *to = snapshot->data;
    for (int i = 0; i < count; i++) {
        TD_TRY(copy_part(call, &parts[i], to));
        parts[i].data = to;
        to += (td__part_bytes(&parts[i]) + 63) / 64 * 64;
    }
    return TD_OK;
}
