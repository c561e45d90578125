/* Storages: reference-counted memory of a device. One function pointer frees it, so that memory of malloc(), of
 * td_alloc() and of the user is handled alike. Memory that is lent has a lease, which takes it over when the
 * storage moves away from it or ends. */
#include "base/fail.h"
#include "tensor/deferred.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

struct td__storage *td__storage_of(td_device *device, void *data, size_t bytes,
                                   td_blob_free_fn free_fn, void *arg)
{
    struct td__storage *storage = malloc(sizeof *storage);
    if (!storage) {
        td__fail_nomem("tensor");
        return NULL;
    }
    *storage = (struct td__storage){
        .owners = 1,
        .device = device,
        .data = data,
        .bytes = bytes,
        .free_fn = free_fn,
        .arg = arg,
    };
    return storage;
}

/* ---- Memory -------------------------------------------------------------------------------------- */

enum { ALIGNMENT = 64 };

/* `bytes` is the size, for the statistics. */
static void free_private(void *data, void *bytes)
{
    td__count_host_memory(-(int64_t)(intptr_t)bytes);
    free(data);
}

static void free_shared(void *data, void *bytes)
{
    td__count_host_memory(-(int64_t)(intptr_t)bytes);
    td_free(data);
}

static void *alloc_host(size_t bytes, struct td__storage *storage)
{
    bool shared = bytes >= TD__STORAGE_SHARED_FROM;
    size_t rounded = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    void *memory = NULL;
    if (shared)
        memory = td_alloc(bytes);
    else if (rounded >= bytes && !(memory = aligned_alloc(ALIGNMENT, rounded)))
        td__fail_nomem("host memory");
    if (!memory)
        return NULL;
    td__count_host_memory((int64_t)bytes);
    storage->free_fn = shared ? free_shared : free_private;
    storage->arg = (void *)(intptr_t)bytes;
    return memory;
}

static void free_deferred(void *data, void *deferred)
{
    (void)data;
    td__deferred_destroy(deferred);
}

/* A storage on a meta device: a list of steps, without memory. */
static struct td__storage *without_memory(struct td__storage *storage)
{
    storage->arg = td__deferred_create(storage->device->target, storage->bytes);
    storage->free_fn = free_deferred;
    if (storage->arg)
        return storage;
    free(storage);
    return NULL;
}

static void *alloc_on(td_device *device, const char *call, struct td__storage *storage)
{
    if (device->is_host)
        return alloc_host(storage->bytes, storage);
    storage->free_fn = td__block_free;
    return td__block_alloc(device, call, storage->bytes, &storage->arg);
}

struct td__storage *td__storage_create(td_device *device, const char *call, size_t bytes)
{
    struct td__storage *storage = td__storage_of(device, NULL, bytes, NULL, NULL);
    if (!storage || bytes == 0)
        return storage;
    if (td__is_meta(device))
        return without_memory(storage);
    storage->data = alloc_on(device, call, storage);
    if (storage->data)
        return storage;
    free(storage);
    if (device->is_host)
        td_fail(TD_ERR_NOMEM, "%s: no memory for %zu bytes on %s: %s", call, bytes, device->name,
                td__error_text());
    return NULL;
}

struct td__storage *td__storage_create_pinned(td_device *device, size_t bytes)
{
    struct td__storage *storage = td__storage_of(td__host_device(), NULL, bytes, NULL, NULL);
    if (!storage || bytes == 0)
        return storage;
    storage->free_fn = td__pinned_free;
    storage->data = td__pinned_alloc(device, bytes, &storage->arg);
    if (storage->data)
        return storage;
    free(storage);
    return NULL;
}

struct td__place td__storage_place(const struct td__storage *storage, int64_t offset)
{
    return (struct td__place){
        .device = storage->device,
        .data = storage->data ? (char *)storage->data + offset : NULL,
        .block = storage->free_fn == td__block_free ? storage->arg : NULL,
        .pinned = storage->free_fn == td__pinned_free ? storage->arg : NULL,
    };
}

void td__storage_retain(struct td__storage *storage)
{
    atomic_fetch_add_explicit(&storage->owners, 1, memory_order_relaxed);
}

/* Memory of an accelerator that is not of its cache may be reused at once by its owner, which knows nothing of our
 * streams: the host waits for all of them. A failure of the device is reported by the next call that uses it. */
static void free_memory(const struct td__storage *storage)
{
    if (!storage->free_fn)
        return;
    if (!storage->device->is_host && !td__is_meta(storage->device) &&
        storage->free_fn != td__block_free) {
        struct td__error before;
        td__error_save(&before);
        if (td__wait_for_device("end of a tensor over memory of the program", storage->device))
            td__error_undo(&before);
    }
    storage->free_fn(storage->data, storage->arg);
}

/* ---- Leases ------------------------------------------------------------------------------------ */

struct td__lease {
    struct td__storage *storage; /* NULL once the storage has moved or ended */
    int count;
    void *data;
    td_blob_free_fn free_fn; /* of `data`, for the time after the storage */
    void *arg;
};

/* Guards all leases, and the `lease` of all storages. Leases are few, and storages many. */
static pthread_mutex_t leases = PTHREAD_MUTEX_INITIALIZER;

/* Of memory that belongs to another process or library: a write moves the storage to a copy, and frees `data`. */
static struct td__lease borrowed;

struct td__storage *td__storage_borrow(td_device *device, void *data, size_t bytes,
                                       td_blob_free_fn free_fn, void *arg)
{
    struct td__storage *storage = td__storage_of(device, data, bytes, free_fn, arg);
    if (storage)
        atomic_store_explicit(&storage->lease, &borrowed, memory_order_relaxed);
    return storage;
}

bool td__storage_is_borrowed(const struct td__storage *storage)
{
    return atomic_load_explicit(&storage->lease, memory_order_relaxed) == &borrowed;
}

void *td__storage_borrowed_arg(const struct td__storage *storage, td_blob_free_fn free_fn)
{
    void *arg = NULL;
    pthread_mutex_lock(&leases);
    if (td__storage_is_borrowed(storage) && storage->free_fn == free_fn)
        arg = storage->arg;
    pthread_mutex_unlock(&leases);
    return arg;
}

static struct td__lease *make_lease(struct td__storage *storage)
{
    struct td__lease *lease = malloc(sizeof *lease);
    if (!lease) {
        td__fail_nomem("tensor");
        return NULL;
    }
    *lease = (struct td__lease){.storage = storage,
                                .data = storage->data,
                                .free_fn = storage->free_fn,
                                .arg = storage->arg};
    atomic_store_explicit(&storage->lease, lease, memory_order_relaxed);
    return lease;
}

td_status td__storage_lend(struct td__storage *storage, struct td__lease **lease_out)
{
    if (storage->bytes > 0 && !storage->free_fn)
        return td_fail(TD_ERR_INVALID,
                       "tensor: %zu bytes of the program's own memory cannot be lent; lend a "
                       "td_clone() of the tensor",
                       storage->bytes);
    if (!storage->device->is_host)
        return td_fail(TD_ERR_INVALID,
                       "tensor: memory of %s cannot be lent; lend a copy on the host",
                       storage->device->name);
    pthread_mutex_lock(&leases);
    struct td__lease *lease = atomic_load_explicit(&storage->lease, memory_order_relaxed);
    bool is_foreign = atomic_load_explicit(&storage->foreign, memory_order_relaxed) > 0;
    if (lease == &borrowed || is_foreign) {
        pthread_mutex_unlock(&leases);
        return td_fail(TD_ERR_INVALID, "tensor: %s memory cannot be lent; lend a td_clone()",
                       is_foreign ? "exported or imported" : "borrowed");
    }
    if (!lease)
        lease = make_lease(storage);
    if (lease) {
        lease->count++;
        *lease_out = lease;
    }
    pthread_mutex_unlock(&leases);
    return lease ? TD_OK : TD_ERR_NOMEM;
}

void td__lease_retain(struct td__lease *lease)
{
    pthread_mutex_lock(&leases);
    lease->count++;
    pthread_mutex_unlock(&leases);
}

const void *td__lease_data(const struct td__lease *lease)
{
    return lease->data;
}

void td__lease_return(struct td__lease *lease)
{
    pthread_mutex_lock(&leases);
    bool last = --lease->count == 0;
    bool orphaned = !lease->storage;
    if (last && !orphaned)
        atomic_store_explicit(&lease->storage->lease, NULL, memory_order_release);
    pthread_mutex_unlock(&leases);
    if (last && orphaned && lease->free_fn)
        lease->free_fn(lease->data, lease->arg); /* of the host: other memory is not lent */
    if (last)
        free(lease);
}

static td_status copy_storage(struct td__storage *to, struct td__storage *from, td__copy_fn *copy,
                              void *arg)
{
    struct td__place target = td__storage_place(to, 0), source = td__storage_place(from, 0);
    if (!copy)
        return td__copy_between("tensor", &target, &source, from->bytes, true);
    copy(arg, target.data, source.data, from->bytes);
    return TD_OK;
}

void td__storage_swap_memory(struct td__storage *storage, struct td__storage *other)
{
    struct td__storage former = {.data = storage->data,
                                 .bytes = storage->bytes,
                                 .free_fn = storage->free_fn,
                                 .arg = storage->arg};
    storage->data = other->data;
    storage->bytes = other->bytes;
    storage->free_fn = other->free_fn;
    storage->arg = other->arg;
    other->data = former.data;
    other->bytes = former.bytes;
    other->free_fn = former.free_fn;
    other->arg = former.arg;
}

td_status td__storage_unshare(struct td__storage *storage)
{
    if (storage->locked)
        return storage->locked->refuse(storage->locked, -1);
    return td__storage_unshare_by(storage, NULL, NULL);
}

td_status td__storage_unshare_by(struct td__storage *storage, td__copy_fn *copy_fn, void *arg)
{
    if (storage->bytes == 0)
        return TD_OK;
    struct td__storage *copy = td__storage_create(storage->device, "tensor", storage->bytes);
    if (!copy)
        return TD_ERR_NOMEM;
    /* The lock is held while copying: otherwise another thread could move the storage at the same time, and the last
     * lease free the memory that is copied here. */
    pthread_mutex_lock(&leases);
    struct td__lease *lease = atomic_load_explicit(&storage->lease, memory_order_relaxed);
    td_status status = lease ? copy_storage(copy, storage, copy_fn, arg) : TD_OK;
    if (lease && !status) {
        struct td__storage former = {
            .data = storage->data, .free_fn = storage->free_fn, .arg = storage->arg};
        storage->data = copy->data;
        storage->free_fn = copy->free_fn;
        storage->arg = copy->arg;
        copy->data = former.data; /* freed with it, if it was borrowed */
        copy->free_fn = lease == &borrowed ? former.free_fn : NULL;
        copy->arg = former.arg;
        lease->storage = NULL;
        atomic_store_explicit(&storage->lease, NULL, memory_order_release);
    }
    pthread_mutex_unlock(&leases);
    td__storage_release(copy);
    return status;
}

td_status td__storage_share(struct td__storage *storage)
{
    for (;;) {
        pthread_mutex_lock(&leases);
        bool is_lent = td__storage_is_lent(storage) && storage->bytes > 0;
        if (!is_lent)
            atomic_fetch_add_explicit(&storage->foreign, 1, memory_order_relaxed);
        pthread_mutex_unlock(&leases);
        if (!is_lent) {
            td__storage_retain(storage);
            return TD_OK;
        }
        TD_TRY(td__storage_unshare(storage));
    }
}

void td__storage_end_share(struct td__storage *storage)
{
    atomic_fetch_sub_explicit(&storage->foreign, 1, memory_order_relaxed);
    td__storage_release(storage);
}

void td__storage_release(struct td__storage *storage)
{
    if (atomic_fetch_sub_explicit(&storage->owners, 1, memory_order_acq_rel) > 1)
        return;
    struct td__lease *lease = NULL;
    if (td__storage_is_lent(storage)) {
        pthread_mutex_lock(&leases);
        lease = atomic_load_explicit(&storage->lease, memory_order_relaxed);
        if (lease == &borrowed)
            lease = NULL;
        if (lease)
            lease->storage = NULL;
        pthread_mutex_unlock(&leases);
    }
    if (!lease)
        free_memory(storage);
    free(storage);
}
