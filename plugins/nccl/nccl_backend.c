/* The plug-in "nccl", and the slots of its backend. nccl_backend.h has the picture. */
#include "nccl_backend.h"

#include <tandem/plugin.h>

#include <stdlib.h>
#include <string.h>

#define FIRST_PAUSE_NS 20000L
#define LAST_PAUSE_NS 1000000L

/* ---- Life ------------------------------------------------------------------------------------------ */

static td_status create(const td_backend_context *context, void *arg, void **self)
{
    (void)arg;
    struct nccl_group *group = calloc(1, sizeof *group);
    if (!group)
        return td_fail(TD_ERR_NOMEM, "backend nccl: out of memory");
    group->context = context;
    pthread_mutex_init(&group->lock, NULL);
    pthread_mutex_init(&group->wake_lock, NULL);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&group->wake, &monotonic);
    pthread_condattr_destroy(&monotonic);
    *self = group;
    return TD_OK;
}

static void destroy(void *self)
{
    struct nccl_group *group = self;
    struct nccl_list done;
    nccl_list_init(&done);
    nccl_worker_stop(group);
    for (struct nccl_channel *channel = group->channels; channel; channel = channel->next)
        nccl_channel_fail(channel, TD_ERR_STATE, &done);
    nccl_complete(group, &done);
    nccl_channels_free(group);
    pthread_cond_destroy(&group->wake);
    pthread_mutex_destroy(&group->wake_lock);
    pthread_mutex_destroy(&group->lock);
    free(group);
}

static void abort_group(void *self)
{
    nccl_note_failure(self, td_last_status());
}

/* ---- Calls ------------------------------------------------------------------------------------------- */

static struct nccl_batch *own_batch(const struct nccl_group *group)
{
    struct nccl_batch *batch = group->batches;
    while (batch && !pthread_equal(batch->thread, pthread_self()))
        batch = batch->next;
    return batch;
}

static td_status check_device(struct nccl_group *group, const td_call *call)
{
    if (!group->device)
        group->device = call->device;
    if (group->device == call->device)
        return TD_OK;
    return td_fail(TD_ERR_INVALID,
                   "%s: the tensor is on %s, but group \"%s\" has its communicator on %s; a group "
                   "uses one device, and another device needs a group of its own",
                   td_op_kind_name(call->kind), td_device_name(call->device), group->context->name,
                   td_device_name(group->device));
}

/* With the lock. */
static td_status enqueue(struct nccl_group *group, struct nccl_call *pending,
                         struct nccl_list *done, bool *waits)
{
    td_status status = check_device(group, pending->call);
    if (!status)
        status = nccl_worker_start(group);
    struct nccl_channel *channel = status ? NULL : nccl_channel_of(group, pending->call);
    if (!channel)
        return td_last_status();
    pending->batch = pending->call->kind >= TD_OP_SEND ? own_batch(group) : NULL;
    pending->batch_number = pending->batch ? pending->batch->number : 0;
    nccl_list_add(&channel->queue, pending);
    nccl_channel_pump(channel, done);
    *waits = (channel->queue.first && !pending->batch) || channel->issued.first;
    return TD_OK;
}

/* The worker looks at what the device runs, and at what could not be enqueued. */
static void call_worker(struct nccl_group *group, bool waits)
{
    if (waits || (!atomic_load_explicit(&group->watching, memory_order_relaxed) &&
                  !atomic_exchange(&group->watching, true)))
        nccl_worker_wake(group);
}

static td_status submit(void *self, const td_call *call, td_work *work)
{
    struct nccl_group *group = self;
    struct nccl_list done;
    bool waits = false;
    td_status status = nccl_failure(group);
    if (!status)
        status = nccl_check_call(group, call);
    if (status)
        return status;
    struct nccl_call *pending = calloc(1, sizeof *pending);
    if (!pending)
        return td_fail(TD_ERR_NOMEM, "backend nccl: out of memory");
    pending->call = call;
    pending->work = work;
    pending->deadline_ns = nccl_now_ns() + call->timeout_ms * 1000000;
    nccl_list_init(&done);
    pthread_mutex_lock(&group->lock);
    if (group->cleaned)
        status = nccl_failure(group); /* nothing would complete it */
    else
        status = enqueue(group, pending, &done, &waits);
    pthread_mutex_unlock(&group->lock);
    if (status) {
        free(pending);
        return status;
    }
    nccl_complete(group, &done);
    call_worker(group, waits);
    return TD_OK;
}

static td_status batch_begin(void *self)
{
    struct nccl_group *group = self;
    struct nccl_batch *batch = calloc(1, sizeof *batch);
    if (!batch)
        return td_fail(TD_ERR_NOMEM, "backend nccl: out of memory");
    batch->thread = pthread_self();
    pthread_mutex_lock(&group->lock);
    batch->number = ++group->batches_begun;
    batch->next = group->batches;
    group->batches = batch;
    pthread_mutex_unlock(&group->lock);
    return TD_OK;
}

/* What the batch has held back is enqueued: one group call of NCCL for each channel. */
static td_status batch_end(void *self)
{
    struct nccl_group *group = self;
    struct nccl_list done;
    bool waits = false;
    nccl_list_init(&done);
    pthread_mutex_lock(&group->lock);
    struct nccl_batch *batch = own_batch(group), **at = &group->batches;
    while (*at && *at != batch)
        at = &(*at)->next;
    if (batch)
        *at = batch->next;
    for (struct nccl_channel *channel = group->channels; batch && channel;
         channel = channel->next) {
        for (struct nccl_call *pending = channel->queue.first; pending; pending = pending->next)
            pending->batch = pending->batch == batch ? NULL : pending->batch;
        nccl_channel_pump(channel, &done);
        waits = waits || channel->queue.first || channel->issued.first;
    }
    pthread_mutex_unlock(&group->lock);
    free(batch);
    nccl_complete(group, &done);
    call_worker(group, waits);
    return TD_OK;
}

/* ---- Leaving ----------------------------------------------------------------------------------------- */

/* Waits until the device has run what was enqueued: a rank that leaves ends its communicators. The failure detector
 * still aborts the group where a rank dies meanwhile. */
static void await_device(struct nccl_group *group, struct nccl_channel *channel)
{
    long pause = FIRST_PAUSE_NS;
    pthread_mutex_lock(&group->lock);
    int64_t end = nccl_now_ns() + channel->timeout_ms * 1000000;
    td_stream *stream = channel->stream ? td_stream_retain(channel->stream) : NULL;
    pthread_mutex_unlock(&group->lock);
    while (stream && !td_stream_is_done(stream) && !atomic_load(&group->failed) &&
           nccl_now_ns() < end) {
        nanosleep(&(struct timespec){.tv_nsec = pause}, NULL);
        pause = pause < LAST_PAUSE_NS ? pause * 2 : pause;
    }
    td_stream_release(stream);
}

/* The group layer compares the collectives. */
static td_status verify(void *self, int64_t timeout_ms)
{
    struct nccl_group *group = self;
    td_status status = TD_OK;
    (void)timeout_ms;
    for (struct nccl_channel *channel = group->channels; channel; channel = channel->next)
        await_device(group, channel);
    for (struct nccl_channel *channel = group->channels; channel && !status;
         channel = channel->next)
        if (channel->source >= 0 && !atomic_load(&group->failed))
            status = nccl_compare_messages(channel);
    if (!status && (status = nccl_failure(group)) != TD_ERR_MISMATCH)
        status = TD_OK; /* others have been reported, or concern no call */
    return status;
}

/* ---- The plug-in ---------------------------------------------------------------------------------------- */

static const char *devices[2] = {"cuda"};

static const td_backend_ops ops = {
    .create = create,
    .destroy = destroy,
    .submit = submit,
    .batch_begin = batch_begin,
    .batch_end = batch_end,
    .abort = abort_group,
    .verify = verify,
    .has_uneven = true,
    .enqueues_later = true,
    .devices = devices,
};

/* TANDEM_NCCL_KIND is for tests, with a library that is not NCCL. */
static td_status init(void)
{
    td_status status = nccl_library_load();
    const char *kind = secure_getenv("TANDEM_NCCL_KIND");
    if (status)
        return status;
    if (kind && *kind && !(devices[0] = strdup(kind)))
        return td_fail(TD_ERR_NOMEM, "backend nccl: out of memory");
    return td_register_backend("nccl", &ops, NULL);
}

TD_PLUGIN("nccl", "1.0", init)
