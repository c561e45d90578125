/* Events of the toy accelerator. Each recording is a point of its own, which its job in the stream marks as passed; a
 * job of another stream that waits for it holds it, so that the event can be recorded again or destroyed meanwhile. */
#define _GNU_SOURCE
#include "toy_machine.h"

#include <stdlib.h>
#include <time.h>

struct toy_point {
    int holders; /* the event, and jobs */
    bool has_passed;
    int64_t passed_ns;
};

struct toy_event {
    struct toy_event *next;
    bool timing;
    struct toy_point *point; /* NULL: not recorded */
};

static void release(struct toy_point *point)
{
    if (point && --point->holders == 0)
        free(point);
}

/* ---- Jobs ------------------------------------------------------------------------------------------ */

static td_status pass(void *payload)
{
    struct toy_point *point = *(struct toy_point **)payload;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    toy_lock();
    point->passed_ns = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    point->has_passed = true;
    toy_changed();
    toy_unlock();
    return TD_OK;
}

static td_status wait_for(void *payload)
{
    struct toy_point *point = *(struct toy_point **)payload;
    toy_lock();
    while (!point->has_passed)
        toy_wait();
    toy_unlock();
    return TD_OK;
}

static void drop_point(void *payload)
{
    release(*(struct toy_point **)payload);
}

static struct toy_job *create_job(const char *name, td_status (*run)(void *),
                                  struct toy_point *point)
{
    struct toy_job *job = toy_job_create(TOY_EVENT, name, run, &point, sizeof point);
    if (job)
        job->drop = drop_point;
    return job;
}

/* ---- Slots of td_device_ops -------------------------------------------------------------------------- */

/* Finds an event, of any device of the kind. */
static struct toy_event *find(void *handle)
{
    for (int i = 0; i < TOY_DEVICES; i++)
        for (struct toy_event *event = toy_machine.devices[i].events; event; event = event->next)
            if (event == handle)
                return event;
    toy_die("toy: %p is not an event", handle);
}

td_status toy_event_create(void *self, bool timing, void **out)
{
    struct toy_device *device = self;
    struct toy_event *event = calloc(1, sizeof *event);
    if (!event)
        return td_fail(TD_ERR_NOMEM, "%s: out of host memory for an event", device->name);
    td_status status = toy_enter(device);
    if (status) {
        free(event);
        return status;
    }
    event->timing = timing;
    event->next = device->events;
    device->events = event;
    device->counts.events++;
    toy_unlock();
    *out = event;
    return TD_OK;
}

static void destroy(struct toy_device *device, struct toy_event **at)
{
    struct toy_event *event = *at;
    *at = event->next;
    device->counts.events--;
    release(event->point);
    free(event);
}

void toy_event_destroy(void *self, void *handle)
{
    struct toy_device *device = self;
    toy_lock();
    if (device->is_open) {
        struct toy_event **at = &device->events;
        while (*at && *at != handle)
            at = &(*at)->next;
        if (!*at)
            toy_die("%s: %p is not an event of this device", device->name, handle);
        destroy(device, at);
    }
    toy_unlock();
}

void toy_events_close(struct toy_device *device)
{
    while (device->events)
        destroy(device, &device->events);
}

td_status toy_event_record(void *self, void *handle, void *stream)
{
    struct toy_device *device = self;
    struct toy_point *point = calloc(1, sizeof *point);
    if (!point)
        return td_fail(TD_ERR_NOMEM, "%s: out of host memory to record an event", device->name);
    td_status status = TD_ERR_NOMEM;
    struct toy_job *job = create_job("event_record", pass, point);
    if (!job || (status = toy_enter(device))) {
        free(job);
        free(point);
        return status;
    }
    point->holders = 2; /* the event, and the job */
    struct toy_event *event = find(handle);
    release(event->point);
    event->point = point;
    toy_push(device, stream, job);
    toy_unlock();
    return TD_OK;
}

td_status toy_event_wait(void *self, void *stream, void *handle)
{
    struct toy_device *device = self;
    td_status status = toy_enter(device);
    if (status)
        return status;
    struct toy_point *point = find(handle)->point;
    if (point) {
        struct toy_job *job = create_job("event_wait", wait_for, point);
        if (job) {
            point->holders++;
            toy_push(device, stream, job);
        } else {
            status = TD_ERR_NOMEM;
        }
    }
    toy_unlock();
    return status;
}

td_status toy_event_synchronize(void *self, void *handle)
{
    struct toy_device *device = self;
    toy_lock();
    device->counts.waits++;
    if (device->is_open) {
        struct toy_point *point = find(handle)->point;
        if (point) {
            point->holders++;
            while (!point->has_passed)
                toy_wait();
            release(point);
        }
    }
    td_status status = toy_failure(device);
    toy_unlock();
    return status;
}

td_status toy_event_query(void *self, void *handle, bool *done)
{
    td_status status = toy_enter(self);
    if (status)
        return status;
    struct toy_point *point = find(handle)->point;
    *done = !point || point->has_passed;
    toy_unlock();
    return TD_OK;
}

td_status toy_event_elapsed(void *self, void *start, void *end, double *milliseconds)
{
    struct toy_device *device = self;
    td_status status = toy_enter(device);
    if (status)
        return status;
    struct toy_event *first = find(start), *last = find(end);
    if (!first->timing || !last->timing || !first->point || !last->point ||
        !first->point->has_passed || !last->point->has_passed)
        status = td_fail(TD_ERR_STATE,
                         "%s: event_elapsed: both events need timing, and must have passed",
                         device->name);
    else
        *milliseconds = (double)(last->point->passed_ns - first->point->passed_ns) / 1e6;
    toy_unlock();
    return status;
}
