/* Streams and events, and all waits of the host. On the host they do nothing: its calls have run when they return. */
#include "device/device_internal.h"

#include "base/clock.h"
#include "base/fail.h"
#include "base/thread.h"

#include <stdlib.h>
#include <string.h>

/* ---- The current streams of a thread -------------------------------------------------------------- */

/* By the slot of the accelerator; NULL: the default one. A thread holds a reference to each. NULL until a thread sets a
 * stream. */
static _Thread_local td_stream **current;
static pthread_once_t key_once = PTHREAD_ONCE_INIT;
static pthread_key_t key;

static void drop_current(void *streams)
{
    for (int i = 0; i < TD__ACCELERATORS_MOST; i++)
        td_stream_release(((td_stream **)streams)[i]);
    free(streams);
    current = NULL;
}

static void make_key(void)
{
    pthread_key_create(&key, drop_current);
}

td_stream *td__stream_of(td_device *device)
{
    bool has_slot = current && !device->is_host && !td__is_meta(device);
    td_stream *stream = has_slot ? current[device->slot] : NULL;
    return stream ? stream : &device->stream;
}

td_stream *td_current_stream(td_device *device)
{
    device = td__use_device("td_current_stream", device);
    return device ? td__stream_of(device) : NULL;
}

td_stream *td_default_stream(td_device *device)
{
    device = td__use_device("td_default_stream", device);
    return device ? &device->stream : NULL;
}

static bool is_default(const td_stream *stream)
{
    return stream == &stream->device->stream;
}

td_status td_set_stream(td_stream *stream)
{
    if (!stream)
        return td__fail_null("td_set_stream");
    td_device *device = stream->device;
    if (device->is_host || td__is_meta(device) || stream == td__stream_of(device))
        return TD_OK;
    if (!current) {
        current = calloc(TD__ACCELERATORS_MOST, sizeof *current);
        if (!current)
            return td__fail_nomem("td_set_stream");
        pthread_once(&key_once, make_key);
        pthread_setspecific(key, current); /* drop_current() at the end of the thread */
    }
    td_stream *before = current[device->slot];
    current[device->slot] = is_default(stream) ? NULL : td_stream_retain(stream);
    td_stream_release(before);
    return TD_OK;
}

td_stream_scope td_stream_scope_begin(td_stream *stream)
{
    td_stream_scope scope = {NULL};
    if (!stream || stream->device->is_host)
        return scope;
    scope.before = td_stream_retain(td__stream_of(stream->device));
    td_set_stream(stream);
    return scope;
}

void td_stream_scope_end(td_stream_scope *scope)
{
    if (scope->before)
        td_set_stream(scope->before);
    td_stream_release(scope->before);
    scope->before = NULL;
}

/* ---- Streams ---------------------------------------------------------------------------------------- */

td_stream *td_stream_create(td_device *device, int priority)
{
    device = td__use_device("td_stream_create", device);
    td_stream *stream = device ? calloc(1, sizeof *stream) : NULL;
    if (!stream)
        return device ? td__fail_nomem("td_stream_create"), NULL : NULL;
    static _Atomic(uint64_t) last_id;
    stream->device = device;
    stream->id = atomic_fetch_add(&last_id, 1) + 1;
    atomic_init(&stream->owners, 1);
    if (!device->is_host &&
        td__ops_of(device)->stream_create(device->self, priority, &stream->self)) {
        free(stream);
        return NULL;
    }
    return stream;
}

td_stream *td_stream_retain(td_stream *stream)
{
    if (stream && !is_default(stream))
        atomic_fetch_add_explicit(&stream->owners, 1, memory_order_relaxed);
    return stream;
}

void td_stream_release(td_stream *stream)
{
    if (!stream || is_default(stream) ||
        atomic_fetch_sub_explicit(&stream->owners, 1, memory_order_acq_rel) > 1)
        return;
    td__memory_forget(stream);
    if (stream->self)
        td__ops_of(stream->device)->stream_destroy(stream->device->self, stream->self);
    free(stream);
}

td_device *td_stream_device(const td_stream *stream)
{
    return stream ? stream->device : NULL;
}

void *td_stream_self(td_stream *stream)
{
    return stream ? stream->self : NULL;
}

bool td_stream_is_done(td_stream *stream)
{
    bool done = true;
    if (stream && td__is_captured(stream))
        return false;
    if (stream && !stream->device->is_host &&
        td__ops_of(stream->device)->stream_query(stream->device->self, stream->self, &done))
        return true; /* a stream that has failed runs nothing more */
    return done;
}

/* ---- Events ------------------------------------------------------------------------------------------- */

struct td_event {
    td_device *device;
    void *self; /* NULL on the host */
    bool timing;
    atomic_bool recorded;
    _Atomic(uint64_t) capture; /* in which it was recorded; 0: in none */
    _Atomic(int64_t) time_ns;  /* on the host */
    td_event *next;            /* in the list of those that are kept */
};

td_event *td_event_create(td_device *device, const td_event_options *options)
{
    device = td__use_device("td_event_create", device);
    td_event *event = device ? calloc(1, sizeof *event) : NULL;
    if (!event)
        return device ? td__fail_nomem("td_event_create"), NULL : NULL;
    event->device = device;
    event->timing = options && options->timing;
    if (!device->is_host &&
        td__ops_of(device)->event_create(device->self, event->timing, &event->self)) {
        free(event);
        return NULL;
    }
    return event;
}

void td_event_destroy(td_event *event)
{
    if (!event)
        return;
    if (event->self)
        td__ops_of(event->device)->event_destroy(event->device->self, event->self);
    free(event);
}

/* Events without timing that wait for their next use, of all devices. */
static pthread_mutex_t kept_lock = PTHREAD_MUTEX_INITIALIZER; /* innermost */
static td_event *kept;

td_event *td__event_take(td_device *device)
{
    pthread_mutex_lock(&kept_lock);
    td_event **at = &kept;
    while (*at && (*at)->device != device)
        at = &(*at)->next;
    td_event *event = *at;
    if (event)
        *at = event->next;
    pthread_mutex_unlock(&kept_lock);
    if (event)
        atomic_store(&event->recorded, false);
    return event ? event : td_event_create(device, NULL);
}

void td__event_give_back(td_event *event)
{
    if (!event)
        return;
    pthread_mutex_lock(&kept_lock);
    event->next = kept;
    kept = event;
    pthread_mutex_unlock(&kept_lock);
}

td_status td_event_record(td_event *event, td_stream *stream)
{
    if (!event)
        return td__fail_null("td_event_record");
    if (!stream)
        stream = td__stream_of(event->device);
    if (stream->device != event->device)
        return td_fail(TD_ERR_INVALID,
                       "td_event_record: the event is of %s, the stream of %s; an event records "
                       "streams of its own device",
                       event->device->name, stream->device->name);
    if (event->device->is_host)
        atomic_store(&event->time_ns, td__now_ns());
    else
        TD_TRY(td__ops_of(event->device)
                   ->event_record(event->device->self, event->self, stream->self));
    atomic_store(&event->capture,
                 td__is_captured(stream) ? atomic_load(&stream->device->capture) : 0);
    atomic_store(&event->recorded, true);
    return TD_OK;
}

/* Whether it was recorded in the capture that is under way. */
static bool is_captured(td_event *event)
{
    uint64_t capture = atomic_load(&event->capture);
    return capture && capture == atomic_load(&event->device->capture);
}

/* One that was recorded in an earlier capture is a point of no stream. */
static bool has_passed(td_event *event)
{
    return event->device->is_host || !atomic_load(&event->recorded) ||
           (atomic_load(&event->capture) && !is_captured(event));
}

bool td_event_is_done(td_event *event)
{
    bool done = true;
    if (event && is_captured(event))
        return false;
    if (event && !has_passed(event) &&
        td__ops_of(event->device)->event_query(event->device->self, event->self, &done))
        return true;
    return done;
}

/* A stream that waits for a captured one of its device becomes a part of the capture. */
static td_status join_capture(td_stream *stream, td_event *event)
{
    if (td__is_captured(stream))
        return td__fail_captured("td_stream_wait_event", "waits for what is not in the capture",
                                 stream->device);
    if (!is_captured(event))
        return TD_OK;
    if (stream->device != event->device)
        return td__fail_captured("td_stream_wait_event", "makes another device wait",
                                 event->device);
    return td__graph_join(event->device->capturing, stream);
}

td_status td_stream_wait_event(td_stream *stream, td_event *event)
{
    if (!event)
        return td__fail_null("td_stream_wait_event");
    if (!stream)
        stream = td__stream_of(event->device);
    if (has_passed(event))
        return TD_OK;
    if (is_captured(event) != td__is_captured(stream) || stream->device != event->device)
        TD_TRY(join_capture(stream, event));
    if (stream->device->kind != event->device->kind)
        return td__wait_for_event("td_stream_wait_event", event);
    return td__ops_of(stream->device)->event_wait(stream->device->self, stream->self, event->self);
}

td_status td_stream_wait_stream(td_stream *stream, td_stream *other)
{
    if (!stream || !other)
        return td__fail_null("td_stream_wait_stream");
    if (stream == other || other->device->is_host)
        return TD_OK;
    td_event *event = td__event_take(other->device);
    if (!event)
        return td__error_status();
    td_status status = td_event_record(event, other);
    if (!status)
        status = td_stream_wait_event(stream, event);
    td__event_give_back(event);
    return status;
}

td_status td_event_elapsed_ms(td_event *start, td_event *end, double *milliseconds)
{
    if (!start || !end || !milliseconds)
        return td__fail_null("td_event_elapsed_ms");
    if (start->device != end->device || !start->timing || !end->timing ||
        !atomic_load(&start->recorded) || !atomic_load(&end->recorded) ||
        atomic_load(&start->capture) || atomic_load(&end->capture))
        return td_fail(TD_ERR_INVALID,
                       "td_event_elapsed_ms: it needs two recorded events of one device that were "
                       "created with timing");
    const td_device_ops *ops = start->device->is_host ? NULL : td__ops_of(start->device);
    if (ops && !ops->event_elapsed)
        return td_fail(TD_ERR_UNSUPPORTED, "td_event_elapsed_ms: %s does not measure times",
                       start->device->name);
    if (ops)
        return ops->event_elapsed(start->device->self, start->self, end->self, milliseconds);
    *milliseconds = (double)(atomic_load(&end->time_ns) - atomic_load(&start->time_ns)) / 1e6;
    return TD_OK;
}

/* ---- Waits of the host ----------------------------------------------------------------------------------- */

static void count_wait(const char *call, td_device *device)
{
    atomic_fetch_add_explicit(&device->waits, 1, memory_order_relaxed);
    td_log(TD_LOG_DEBUG, "%s waits for %s", call, device->name);
}

td_status td__wait_for_stream(const char *call, td_stream *stream)
{
    td_device *device = stream->device;
    if (device->is_host)
        return TD_OK;
    if (td__is_captured(stream))
        return td__fail_captured(call, "waits for the device", device);
    count_wait(call, device);
    return td__ops_of(device)->stream_synchronize(device->self, stream->self);
}

td_status td__wait_for_event(const char *call, td_event *event)
{
    if (has_passed(event))
        return TD_OK;
    if (is_captured(event))
        return td__fail_captured(call, "waits for the device", event->device);
    count_wait(call, event->device);
    return td__ops_of(event->device)->event_synchronize(event->device->self, event->self);
}

td_status td__wait_for_device(const char *call, td_device *device)
{
    if (device->is_host)
        return TD_OK;
    if (atomic_load(&device->capture))
        return td__fail_captured(call, "waits for the device", device);
    count_wait(call, device);
    return td__ops_of(device)->synchronize(device->self);
}

td_status td_stream_synchronize(td_stream *stream)
{
    return stream ? td__wait_for_stream("td_stream_synchronize", stream)
                  : td__fail_null("td_stream_synchronize");
}

td_status td_event_synchronize(td_event *event)
{
    return event ? td__wait_for_event("td_event_synchronize", event)
                 : td__fail_null("td_event_synchronize");
}

td_status td_device_synchronize(td_device *device)
{
    device = td__use_device("td_device_synchronize", device);
    if (!device)
        return td__error_status();
    if (device->index >= 0)
        TD_TRY(td__worker_drain(device));
    return td__wait_for_device("td_device_synchronize", device);
}
