/* The toy accelerator as a kind of device: its table of functions, and what opens and closes its devices. */
#include "toy_machine.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct toy_machine toy_machine = {
    .lock = PTHREAD_MUTEX_INITIALIZER,
    .changed = PTHREAD_COND_INITIALIZER,
    .devices = {{.name = "toy:0"}, {.name = "toy:1"}},
};

/* ---- The lock -------------------------------------------------------------------------------------------- */

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pid_t owner; /* a fork of the process has no threads of streams to end */

static void close_at_exit(void)
{
    if (getpid() == owner)
        toy_reset();
}

static void begin(void)
{
    owner = getpid();
    toy_control_reset();
    atexit(close_at_exit);
}

void toy_lock(void)
{
    pthread_once(&once, begin);
    pthread_mutex_lock(&toy_machine.lock);
}

void toy_unlock(void)
{
    pthread_mutex_unlock(&toy_machine.lock);
}

void toy_wait(void)
{
    pthread_cond_wait(&toy_machine.changed, &toy_machine.lock);
}

void toy_changed(void)
{
    pthread_cond_broadcast(&toy_machine.changed);
}

td_status toy_enter(struct toy_device *device)
{
    toy_lock();
    td_status status = toy_failure(device);
    if (status)
        toy_unlock();
    return status;
}

void toy_die(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
    abort();
}

/* ---- Opening and closing ------------------------------------------------------------------------------------ */

static td_status describe(void *arg, char *text, size_t size)
{
    (void)arg;
    toy_lock();
    snprintf(text, size,
             "an accelerator for tests: %d devices of %zu MiB, streams up to %d us late",
             TOY_DEVICES, toy_machine.memory_bytes >> 20, toy_machine.delay_us);
    toy_unlock();
    return TD_OK;
}

static int count(void *arg)
{
    (void)arg;
    return TOY_DEVICES;
}

static td_status open_device(void *arg, int index, void **self)
{
    (void)arg;
    if (index < 0 || index >= TOY_DEVICES)
        return td_fail(TD_ERR_INVALID, "toy:%d does not exist: there are %d devices", index,
                       TOY_DEVICES);
    struct toy_device *device = &toy_machine.devices[index];
    toy_lock();
    td_status status = device->is_open ? TD_OK : toy_memory_open(device);
    if (!status) {
        device->is_open = true;
        *self = device;
    }
    toy_unlock();
    return status;
}

void toy_reset(void)
{
    toy_lock();
    for (int i = 0; i < TOY_DEVICES;
         i++) { /* first all: streams may wait for those of another device */
        toy_machine.devices[i].is_open = false;
        toy_machine.devices[i].held = false;
        toy_machine.devices[i].copies_limited = false;
    }
    for (int i = 0; i < TOY_DEVICES; i++)
        toy_streams_close(&toy_machine.devices[i]);
    for (int i = 0; i < TOY_DEVICES; i++) {
        struct toy_device *device = &toy_machine.devices[i];
        toy_events_close(device);
        toy_memory_close(device);
        struct toy_device closed = {.tickets = device->tickets};
        memcpy(closed.name, device->name, sizeof closed.name);
        *device = closed;
    }
    toy_pinned_close();
    toy_control_reset();
    toy_unlock();
}

/* ---- The table ---------------------------------------------------------------------------------------------- */

static const td_device_ops ops = {
    .version = TD_DEVICE_OPS_VERSION,
    .size = sizeof ops,
    .kind = "toy",
    .describe = describe,
    .count = count,
    .open = open_device,

    .alloc = toy_alloc,
    .free = toy_free,
    .memory_info = toy_memory_info,
    .alloc_pinned = toy_alloc_pinned,
    .free_pinned = toy_free_pinned,

    .stream_create = toy_stream_create,
    .stream_destroy = toy_stream_destroy,
    .stream_synchronize = toy_stream_synchronize,
    .stream_query = toy_stream_query,
    .event_create = toy_event_create,
    .event_destroy = toy_event_destroy,
    .event_record = toy_event_record,
    .event_wait = toy_event_wait,
    .event_synchronize = toy_event_synchronize,
    .event_query = toy_event_query,
    .event_elapsed = toy_event_elapsed,
    .synchronize = toy_synchronize,

    .copy_in = toy_copy_in,
    .copy_out = toy_copy_out,
    .copy = toy_copy_inside,
    .copy_from = toy_copy_from,
    .fill = toy_fill_bytes,

    .kernels = &toy_kernels,
    .breaks_fork = true,
};

const td_device_ops *toy_ops(void)
{
    return &ops;
}

static td_status registered;

static void register_once(void)
{
    registered = td_register_device(&ops, NULL);
}

td_status toy_register(void)
{
    static pthread_once_t registering = PTHREAD_ONCE_INIT;
    pthread_once(&registering, register_once);
    return registered;
}
