/* Storages: reference-counted memory of a device. One function pointer frees it, so that memory of malloc(), of
 * td_alloc() and of the user is handled alike. */
#include "base/fail.h"
#include "tensor/tensor_internal.h"

#include <stdlib.h>

struct td__storage *td__storage_of(void *data, size_t bytes, td_blob_free_fn free_fn, void *arg)
{
    struct td__storage *storage = malloc(sizeof *storage);
    if (!storage) {
        td__fail_nomem("tensor");
        return NULL;
    }
    *storage = (struct td__storage){
        .owners = 1,
        .device = td__host_device(),
        .data = data,
        .bytes = bytes,
        .free_fn = free_fn,
        .arg = arg,
    };
    return storage;
}

struct td__storage *td__storage_create(struct td__device *device, size_t bytes)
{
    struct td__storage *storage = td__storage_of(NULL, bytes, NULL, NULL);
    if (!storage)
        return NULL;
    storage->device = device;
    if (bytes == 0)
        return storage;
    storage->data = device->kind->alloc(device, bytes, &storage->free_fn);
    if (!storage->data) {
        free(storage);
        td_fail(TD_ERR_NOMEM, "tensor: no memory for %zu bytes on %s: %s", bytes, device->name,
                td_last_error());
        return NULL;
    }
    return storage;
}

void td__storage_retain(struct td__storage *storage)
{
    atomic_fetch_add_explicit(&storage->owners, 1, memory_order_relaxed);
}

void td__storage_release(struct td__storage *storage)
{
    if (atomic_fetch_sub_explicit(&storage->owners, 1, memory_order_acq_rel) > 1)
        return;
    if (storage->free_fn)
        storage->free_fn(storage->data, storage->arg);
    free(storage);
}
