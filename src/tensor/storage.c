/* Storages: counted memory. How the memory goes back is one function pointer, so that malloc's
 * memory, td_alloc()'s and a user's are the same to everybody else. */
#include "base/fail.h"
#include "tensor/tensor.h"

#include <stdlib.h>

#define ALIGNMENT 64

static void free_private(void *data, void *arg)
{
    (void)arg;
    free(data);
}

static void free_shared(void *data, void *arg)
{
    (void)arg;
    td_free(data);
}

struct td__storage *td__storage_of(void *data, size_t bytes, td_blob_free_fn free_fn, void *arg)
{
    struct td__storage *storage = malloc(sizeof *storage);
    if (!storage) {
        td__fail_nomem("tensor");
        return NULL;
    }
    *storage = (struct td__storage){
        .owners = 1, .data = data, .bytes = bytes, .free_fn = free_fn, .arg = arg};
    return storage;
}

struct td__storage *td__storage_create(size_t bytes)
{
    if (bytes == 0)
        return td__storage_of(NULL, 0, NULL, NULL);

    bool shared = bytes >= TD__STORAGE_SHARED_FROM;
    size_t rounded = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    void *data = shared ? td_alloc(bytes) : aligned_alloc(ALIGNMENT, rounded);
    if (!data) {
        td__fail(TD_ERR_NOMEM, "tensor: no memory for %zu bytes", bytes);
        return NULL;
    }
    struct td__storage *storage = td__storage_of(data, bytes, shared ? free_shared : free_private,
                                                 NULL);
    if (!storage)
        (shared ? free_shared : free_private)(data, NULL);
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
