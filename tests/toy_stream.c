/* Streams of the toy accelerator: a thread each, with a queue of jobs that it runs in order, and late.
 *
 * A job stays at the head of its queue until it has run, and has a ticket that grows with each job of the device. So
 * all that was enqueued before some moment has run when no head has a ticket from before it. */
#define _GNU_SOURCE
#include "toy_machine.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct toy_stream {
    struct toy_stream *next;
    struct toy_device *device;
    pthread_t thread;
    struct toy_job *first, **end;
    uint64_t random;
    bool is_destroyed; /* the thread ends when the queue is empty */
    bool has_ended;    /* and has released the lock for the last time */
};

/* ---- Jobs ---------------------------------------------------------------------------------------- */

struct toy_job *toy_job_create(enum toy_work work, const char *name, td_status (*run)(void *),
                               const void *payload, size_t size)
{
    struct toy_job *job = malloc(sizeof *job + size);
    if (!job) {
        td_fail(TD_ERR_NOMEM, "toy: %s: out of host memory", name);
        return NULL;
    }
    *job = (struct toy_job){.work = work, .name = name, .run = run};
    memcpy(job->payload, payload, size);
    return job;
}

static void drop(struct toy_job *job)
{
    if (job->drop)
        job->drop(job->payload);
    free(job);
}

/* Runs a job, without the lock at the beginning and at the end. Events pass on a device that has failed, too, or
 * another device could wait for them for ever. */
static void run(struct toy_device *device, struct toy_job *job)
{
    toy_lock();
    if (job->fails)
        toy_note_failure(device, job->name, TD_ERR_SYSTEM, "it failed on the device, as requested");
    bool skips = device->failure && job->work != TOY_EVENT;
    toy_unlock();
    td_status status = skips ? TD_OK : job->run(job->payload);
    if (status) {
        toy_lock();
        toy_note_failure(device, job->name, status, td_last_error());
        toy_unlock();
    } else if (!skips && job->work == TOY_KERNEL) {
        toy_count_run(device, job->name);
    }
}

/* ---- Threads ------------------------------------------------------------------------------------- */

/* Sleeps for a random time up to that of toy_set_delay(); with the lock before and after. */
static void be_late(struct toy_stream *stream)
{
    int64_t delay_us = toy_machine.delay_us;
    if (delay_us <= 0)
        return;
    stream->random = stream->random * 6364136223846793005u + 1442695040888963407u;
    int64_t delay_ns = (int64_t)(stream->random >> 33) % (delay_us * 1000 + 1);
    toy_unlock();
    nanosleep(&(struct timespec){delay_ns / 1000000000, delay_ns % 1000000000}, NULL);
    toy_lock();
}

/* Whether the stream may not start its first job, or has none. */
static bool is_waiting(const struct toy_stream *stream)
{
    const struct toy_device *device = stream->device;
    const struct toy_job *job = stream->first;
    bool limited = device->copies_limited && device->copies_left == 0;
    return device->held || (job ? job->work == TOY_COPY && limited : !stream->is_destroyed);
}

static void *run_stream(void *arg)
{
    struct toy_stream *stream = arg;
    toy_lock();
    for (;;) {
        while (is_waiting(stream))
            toy_wait();
        struct toy_job *job = stream->first;
        if (!job)
            break;
        stream->device->copies_left -= job->work == TOY_COPY && stream->device->copies_limited;
        be_late(stream);
        toy_unlock();
        run(stream->device, job);
        toy_lock();
        stream->first = job->next;
        if (!stream->first)
            stream->end = &stream->first;
        drop(job);
        toy_changed();
    }
    stream->has_ended = true;
    toy_changed();
    toy_unlock();
    return NULL;
}

/* Signals are for the program's threads; faults stay with the thread that has one. */
static int start_thread(struct toy_stream *stream)
{
    sigset_t all, before;
    sigfillset(&all);
    sigdelset(&all, SIGSEGV);
    sigdelset(&all, SIGBUS);
    sigdelset(&all, SIGFPE);
    sigdelset(&all, SIGILL);
    sigdelset(&all, SIGABRT);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&stream->thread, NULL, run_stream, stream);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

/* Frees destroyed streams whose threads have ended. */
static void reap(struct toy_device *device)
{
    for (struct toy_stream **at = &device->streams; *at;) {
        struct toy_stream *stream = *at;
        if (!stream->has_ended) {
            at = &stream->next;
            continue;
        }
        *at = stream->next;
        pthread_join(stream->thread, NULL);
        free(stream);
    }
}

void toy_streams_close(struct toy_device *device)
{
    for (struct toy_stream *stream = device->streams; stream; stream = stream->next)
        stream->is_destroyed = true;
    toy_changed();
    while (reap(device), device->streams)
        toy_wait();
    device->counts.streams = 0;
}

/* ---- Slots of td_device_ops ------------------------------------------------------------------------ */

/* Finds a stream that was not destroyed. */
static struct toy_stream *find(struct toy_device *device, void *handle)
{
    struct toy_stream *stream = device->streams;
    while (stream && (stream != handle || stream->is_destroyed))
        stream = stream->next;
    if (!stream)
        toy_die("%s: %p is not a stream of this device", device->name, handle);
    return stream;
}

td_status toy_stream_create(void *self, int priority, void **out)
{
    (void)priority; /* all run as late as they like */
    struct toy_device *device = self;
    struct toy_stream *stream = calloc(1, sizeof *stream);
    if (!stream)
        return td_fail(TD_ERR_NOMEM, "%s: out of host memory for a stream", device->name);
    td_status status = toy_enter(device);
    if (status)
        goto free_stream;
    reap(device);
    stream->device = device;
    stream->end = &stream->first;
    stream->random = toy_machine.seed + ++toy_machine.numbers;
    int error = start_thread(stream);
    if (error) {
        toy_unlock();
        status = td_fail(TD_ERR_SYSTEM, "%s: a thread for a stream: %s", device->name,
                         strerror(error));
        goto free_stream;
    }
    stream->next = device->streams;
    device->streams = stream;
    device->counts.streams++;
    toy_unlock();
    *out = stream;
    return TD_OK;

free_stream:
    free(stream);
    return status;
}

void toy_stream_destroy(void *self, void *stream)
{
    struct toy_device *device = self;
    toy_lock();
    if (device->is_open) {
        find(device, stream)->is_destroyed = true;
        device->counts.streams--;
        toy_changed();
    }
    toy_unlock();
}

/* Whether the stream has something to run from before the ticket. */
static bool is_behind(const struct toy_stream *stream, uint64_t ticket)
{
    return stream->first && stream->first->ticket <= ticket;
}

td_status toy_stream_synchronize(void *self, void *handle)
{
    struct toy_device *device = self;
    toy_lock();
    device->counts.waits++;
    if (device->is_open) {
        const struct toy_stream *stream = find(device, handle);
        for (uint64_t ticket = device->tickets; is_behind(stream, ticket);)
            toy_wait();
    }
    td_status status = toy_failure(device);
    toy_unlock();
    return status;
}

static bool any_is_behind(const struct toy_device *device, uint64_t ticket)
{
    for (struct toy_stream *stream = device->streams; stream; stream = stream->next)
        if (is_behind(stream, ticket))
            return true;
    return false;
}

void toy_drain(struct toy_device *device)
{
    for (uint64_t ticket = device->tickets; any_is_behind(device, ticket);)
        toy_wait();
}

td_status toy_synchronize(void *self)
{
    struct toy_device *device = self;
    toy_lock();
    device->counts.waits++;
    toy_drain(device);
    td_status status = toy_failure(device);
    toy_unlock();
    return status;
}

td_status toy_stream_query(void *self, void *stream, bool *done)
{
    struct toy_device *device = self;
    td_status status = toy_enter(device);
    if (status)
        return status;
    *done = !find(device, stream)->first;
    toy_unlock();
    return TD_OK;
}

/* ---- Enqueueing -------------------------------------------------------------------------------------- */

/* Fails where a test has requested this; marks the job where it is to fail later. */
static td_status check_request(struct toy_device *device, struct toy_job *job)
{
    enum toy_when when;
    if (!toy_is_requested(device, job->work, &when))
        return TD_OK;
    if (when == TOY_AT_LAUNCH)
        return td_fail(TD_ERR_SYSTEM, "%s: %s could not be launched, as requested", device->name,
                       job->name);
    job->fails = true;
    return TD_OK;
}

void toy_push(struct toy_device *device, void *handle, struct toy_job *job)
{
    struct toy_stream *stream = find(device, handle);
    job->ticket = ++device->tickets;
    *stream->end = job;
    stream->end = &job->next;
    toy_changed();
}

td_status toy_enqueue(struct toy_device *device, void *stream, struct toy_job *job)
{
    td_status status = toy_enter(device);
    if (!status) {
        status = check_request(device, job);
        if (!status)
            toy_push(device, stream, job);
        toy_unlock();
    }
    if (status)
        drop(job);
    return status;
}
