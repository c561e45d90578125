/* Host memory that accelerators copy from and to while the host goes on. Freed memory is kept for the next use, in sizes
 * that are powers of two; what a copy may still be using is not given out before an event of it has passed. */
#include "device/device_internal.h"

#include "base/fail.h"

#include <pthread.h>
#include <stdlib.h>

enum { SMALLEST = 12, SIZES = 64 };

struct pinned {
    struct pinned *next;
    td_device *device, *copied_by;
    void *data;
    int size;        /* the power of two */
    uint64_t stream; /* id of the stream of the latest copy */
    td_event *event; /* of the latest copy; NULL: none */
};

static pthread_mutex_t lock =
    PTHREAD_MUTEX_INITIALIZER; /* outside of those of streams and events */
static struct pinned *kept[TD__KINDS_MOST][SIZES];
static atomic_llong bytes_of[TD__KINDS_MOST];

int64_t td__pinned_bytes(const struct td__device_kind *kind)
{
    return atomic_load(&bytes_of[kind->slot]);
}

static td_status alloc_raw(td_device *device, size_t bytes, void **data)
{
    if (!device->is_host && td__ops_of(device)->alloc_pinned)
        return td__ops_of(device)->alloc_pinned(device->self, bytes, data);
    *data = aligned_alloc((size_t)1 << SMALLEST, bytes);
    return *data ? TD_OK : td__fail_nomem("pinned memory");
}

/* One that is kept, and that no copy uses. */
static struct pinned *take_kept(td_device *device, int size)
{
    pthread_mutex_lock(&lock);
    struct pinned **at = &kept[device->kind->slot][size];
    while (*at && (*at)->event && !td_event_is_done((*at)->event))
        at = &(*at)->next;
    struct pinned *found = *at;
    if (found)
        *at = found->next;
    pthread_mutex_unlock(&lock);
    return found;
}

void *td__pinned_alloc(td_device *device, size_t bytes, void **arg)
{
    int size = SMALLEST;
    while (size < SIZES - 1 && (size_t)1 << size < bytes)
        size++;
    struct pinned *pinned = size < SIZES - 1 ? take_kept(device, size) : NULL;
    if (!pinned) {
        pinned = size < SIZES - 1 ? calloc(1, sizeof *pinned) : NULL;
        if (!pinned || alloc_raw(device, (size_t)1 << size, &pinned->data)) {
            free(pinned);
            td_fail(TD_ERR_NOMEM, "there is no pinned host memory for %zu bytes", bytes);
            return NULL;
        }
        pinned->device = device;
        pinned->size = size;
        atomic_fetch_add(&bytes_of[device->kind->slot], (int64_t)1 << size);
    }
    td__event_give_back(pinned->event);
    pinned->event = NULL;
    *arg = pinned;
    return pinned->data;
}

void td__pinned_free(void *data, void *arg)
{
    (void)data;
    struct pinned *pinned = arg;
    pthread_mutex_lock(&lock);
    pinned->next = kept[pinned->device->kind->slot][pinned->size];
    kept[pinned->device->kind->slot][pinned->size] = pinned;
    pthread_mutex_unlock(&lock);
}

void td__pinned_use(void *arg, td_stream *stream)
{
    struct pinned *pinned = arg;
    pthread_mutex_lock(&lock);
    if (pinned->event && (pinned->stream != stream->id || pinned->copied_by != stream->device)) {
        td__wait_for_event("pinned memory on another stream", pinned->event);
        td__event_give_back(pinned->event);
        pinned->event = NULL;
    }
    if (!pinned->event)
        pinned->event = td__event_take(stream->device);
    pinned->stream = stream->id;
    pinned->copied_by = stream->device;
    if (!pinned->event || td_event_record(pinned->event, stream))
        td__wait_for_stream("pinned memory", stream);
    pthread_mutex_unlock(&lock);
}
