/* Meta devices: tensors with a shape and without memory.
 *
 * Each device has one, its target being the device itself: it is what initial values are recorded for (tensor/deferred.h).
 * It has no streams that do anything, so that code for accelerators runs, and what moves bytes fails. */
#include "device/device_internal.h"

#include "base/fail.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static td_status fail_memory(void)
{
    return td_fail(TD_ERR_STATE, "a meta device has no memory");
}

td_status td__fail_meta(const char *call, const td_device *device)
{
    return td_fail(TD_ERR_STATE,
                   "%s: a tensor on the device %s has no memory yet; td_module_materialize() or "
                   "td_fsdp() gives the tensors of a module theirs, td_tensor_to() that of one",
                   call, device->name);
}

/* ---- The functions of the device ----------------------------------------------------------------------------- */

static td_status stream_create(void *self, int priority, void **stream)
{
    (void)self, (void)priority;
    *stream = NULL;
    return TD_OK;
}

static void drop(void *self, void *object)
{
    (void)self, (void)object;
}

static td_status wait(void *self, void *object)
{
    (void)self, (void)object;
    return TD_OK;
}

static td_status query(void *self, void *object, bool *done)
{
    (void)self, (void)object;
    *done = true;
    return TD_OK;
}

static td_status event_create(void *self, bool timing, void **event)
{
    (void)self, (void)timing;
    *event = NULL;
    return TD_OK;
}

static td_status event_record(void *self, void *event, void *stream)
{
    (void)self, (void)event, (void)stream;
    return TD_OK;
}

static td_status event_elapsed(void *self, void *start, void *end, double *milliseconds)
{
    (void)self, (void)start, (void)end;
    *milliseconds = 0;
    return TD_OK;
}

static td_status synchronize(void *self)
{
    (void)self;
    return TD_OK;
}

static td_status alloc(void *self, size_t bytes, void **data)
{
    (void)self, (void)bytes, (void)data;
    return fail_memory();
}

static td_status copy_in(void *self, void *stream, void *data, const void *host, size_t bytes,
                         bool pinned)
{
    (void)self, (void)stream, (void)data, (void)host, (void)bytes, (void)pinned;
    return fail_memory();
}

static td_status copy_out(void *self, void *stream, void *host, const void *data, size_t bytes,
                          bool pinned)
{
    (void)self, (void)stream, (void)host, (void)data, (void)bytes, (void)pinned;
    return fail_memory();
}

static td_status copy(void *self, void *stream, void *to, const void *from, size_t bytes)
{
    (void)self, (void)stream, (void)to, (void)from, (void)bytes;
    return fail_memory();
}

static td_status fill(void *self, void *stream, void *data, unsigned char value, size_t bytes)
{
    (void)self, (void)stream, (void)data, (void)value, (void)bytes;
    return fail_memory();
}

static struct td__device_kind kind = {
    .name = "meta",
    .ops = {.version = TD_DEVICE_OPS_VERSION,
            .size = sizeof(td_device_ops),
            .kind = "meta",
            .alloc = alloc,
            .free = drop,
            .stream_create = stream_create,
            .stream_destroy = drop,
            .stream_synchronize = wait,
            .stream_query = query,
            .event_create = event_create,
            .event_destroy = drop,
            .event_record = event_record,
            .event_wait = event_record,
            .event_synchronize = wait,
            .event_query = query,
            .event_elapsed = event_elapsed,
            .synchronize = synchronize,
            .copy_in = copy_in,
            .copy_out = copy_out,
            .copy = copy,
            .fill = fill},
};

/* ---- One for each device --------------------------------------------------------------------------------------- */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static td_device *make(td_device *target)
{
    td_device *meta = calloc(1, sizeof *meta);
    if (!meta)
        return NULL;
    if (!strcmp(target->name, "cpu"))
        snprintf(meta->name, sizeof meta->name, "meta");
    else
        snprintf(meta->name, sizeof meta->name, "meta:%.26s", target->name);
    snprintf(meta->kind_name, sizeof meta->kind_name, "meta");
    kind.kernels = td__meta_kernels;
    meta->index = -1;
    meta->kernels = &td__wrapped_kernels;
    meta->kind = &kind;
    meta->stream.device = meta;
    meta->target = target;
    atomic_store(&meta->is_open, true);
    return meta;
}

td_device *td_device_meta(td_device *device)
{
    device = device ? device : td_current_device();
    if (device->is_malformed || td__is_meta(device))
        return device;
    td_device *meta = atomic_load_explicit(&device->meta, memory_order_acquire);
    if (meta)
        return meta;
    pthread_mutex_lock(&lock);
    meta = atomic_load(&device->meta);
    if (!meta && (meta = make(device)))
        atomic_store_explicit(&device->meta, meta, memory_order_release);
    pthread_mutex_unlock(&lock);
    return meta ? meta : td_device_get("?"); /* without memory: no name of a device */
}

bool td_device_is_meta(const td_device *device)
{
    return td__is_meta(device ? device : td_current_device());
}

td_device *td__meta_of_name(const char *name)
{
    if (!strcmp(name, "meta"))
        return td_device_meta(td__host_device());
    if (strncmp(name, "meta:", strlen("meta:")) || !strncmp(name, "meta:meta", strlen("meta:meta")))
        return NULL;
    td_device *target = td_device_get(name + strlen("meta:"));
    return target->is_malformed ? NULL : td_device_meta(target);
}
