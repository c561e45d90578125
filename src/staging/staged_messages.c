/* Staged messages; see staging.h.
 *
 *     send    copy from the device --the thread waits--> post --> complete
 *     recv    post --complete--> copy to the device --> complete
 *
 * The caller has a work of the device's call; that of the host's is work->staged from the moment it is posted. */
#include "staging/staging.h"

#include "base/fail.h"
#include "base/thread.h"
#include "device/device_internal.h"

#include <stdlib.h>

struct td__staged_message {
    STAILQ_ENTRY(td__staged_message) link;
    td_work *work; /* the caller's */
    td_call call;  /* on host memory */
    td_device *device;
    td_stream *stream;
    void *data; /* of the device */
    size_t bytes;
    void *host, *pinned;
    td_event *copied; /* of a send */
};

void td__staged_messages_init(struct td__staged_messages *all)
{
    pthread_mutex_init(&all->lock, NULL);
    td__cond_init(&all->changed);
    STAILQ_INIT(&all->sends);
}

/* ---- One message ------------------------------------------------------------------------------------- */

static td_status take_message(const td_call *call, struct td__staged_message *message)
{
    bool sends = call->kind == TD_OP_SEND;
    *message = (struct td__staged_message){
        .call = *call,
        .device = call->device,
        .stream = call->stream,
        .data = sends ? (void *)call->input : call->output,
        .bytes = call->count * td_dtype_size(call->dtype),
    };
    message->host = td__pinned_alloc(call->device, message->bytes ? message->bytes : 1,
                                     &message->pinned);
    if (!message->host)
        return td__error_status();
    message->call.device = NULL;
    message->call.stream = NULL;
    message->call.input = sends ? message->host : NULL;
    message->call.output = sends ? NULL : message->host;
    return TD_OK;
}

static void drop_message(struct td__staged_message *message)
{
    if (message->host) {
        td__pinned_use(message->pinned, message->stream);
        td__pinned_free(message->host, message->pinned);
    }
    td__event_give_back(message->copied);
}

static td_status copy_from_device(struct td__staged_message *message)
{
    td_device *device = message->device;
    message->copied = td__event_take(device);
    if (!message->copied)
        return td__error_status();
    if (message->bytes)
        TD_TRY(td__ops_of(device)->copy_out(device->self, message->stream->self, message->host,
                                            message->data, message->bytes, true));
    return td_event_record(message->copied, message->stream);
}

static td_status copy_to_device(const struct td__staged_message *message, size_t received)
{
    td_device *device = message->device;
    if (!received)
        return TD_OK;
    return td__ops_of(device)->copy_in(device->self, message->stream->self, message->data,
                                       message->host, received, true);
}

td_status td__staged_run(struct td__staged_messages *all, const td_call *call)
{
    struct td__staged_message message;
    int source;
    size_t received = 0;
    bool sends = call->kind == TD_OP_SEND;
    td_status status = take_message(call, &message);
    if (!status && sends) {
        td__staged_flush(all);
        status = copy_from_device(&message);
        if (!status)
            status = td__wait_for_event("td_send", message.copied);
    }
    if (!status)
        status = all->run(all->arg, &message.call, &source, &received);
    if (!status && !sends)
        status = copy_to_device(&message, received);
    drop_message(&message);
    return status;
}

/* ---- Messages with a work ------------------------------------------------------------------------------ */

static void complete(struct td__staged_message *message, td_status status, int source,
                     size_t received)
{
    td_work *work = message->work;
    drop_message(message);
    free(message);
    td_work_complete(work, status, source, received);
}

static void on_complete(td_work *host_work, td_status status, void *arg)
{
    struct td__staged_message *message = arg;
    size_t received = td_work_received(host_work);
    if (status)
        td_work_status(host_work); /* the reason */
    else if (message->call.kind == TD_OP_RECV)
        status = copy_to_device(message, received);
    complete(message, status, td__group_index(host_work->group, td_work_source(host_work)),
             received);
}

/* Posts the message on host memory. Takes it over, unless it fails. */
static td_status start(struct td__staged_messages *all, struct td__staged_message *message)
{
    td_work *host_work = td__work_create(all->group, &message->call);
    if (!host_work)
        return td__error_status();
    td_status status = all->post(all->arg, &host_work->operation.call, host_work);
    if (status) {
        host_work->owners = 1;
        td_work_release(host_work);
        return status;
    }
    td_work *work = td_work_retain(message->work);
    td__work_set_staged(work, host_work);
    td_work_on_complete(host_work, on_complete, message); /* has room for one callback */
    td_work_release(work);
    return TD_OK;
}

static void send_next(struct td__staged_messages *all, struct td__staged_message *message)
{
    td_status status = td__wait_for_event("td_isend", message->copied);
    if (!status)
        status = start(all, message);
    pthread_mutex_lock(&all->lock);
    atomic_fetch_sub(&all->unposted, 1);
    pthread_cond_broadcast(&all->changed);
    pthread_mutex_unlock(&all->lock);
    if (status)
        complete(message, status, -1, 0);
}

static void *run_sends(void *arg)
{
    struct td__staged_messages *all = arg;
    pthread_mutex_lock(&all->lock);
    for (;;) {
        struct td__staged_message *message = STAILQ_FIRST(&all->sends);
        if (!message && all->stopping)
            break;
        if (!message) {
            td__cond_wait(&all->changed, &all->lock, TD__NEVER);
            continue;
        }
        STAILQ_REMOVE_HEAD(&all->sends, link);
        pthread_mutex_unlock(&all->lock);
        send_next(all, message);
        pthread_mutex_lock(&all->lock);
    }
    pthread_mutex_unlock(&all->lock);
    return NULL;
}

static td_status queue_send(struct td__staged_messages *all, struct td__staged_message *message)
{
    td_status status = copy_from_device(message);
    if (status)
        return status;
    pthread_mutex_lock(&all->lock);
    int error = all->working ? 0 : td__thread_start(&all->thread, "td-staging", run_sends, all);
    if (error) {
        status = td_fail(TD_ERR_SYSTEM, "group \"%s\": no thread for messages on devices (%s)",
                         all->group->name, td__errno_text(error));
    } else {
        all->working = true;
        atomic_fetch_add(&all->unposted, 1);
        STAILQ_INSERT_TAIL(&all->sends, message, link);
        pthread_cond_broadcast(&all->changed);
    }
    pthread_mutex_unlock(&all->lock);
    return status;
}

td_status td__staged_post(struct td__staged_messages *all, const td_call *call, td_work *work)
{
    struct td__staged_message *message = malloc(sizeof *message);
    if (!message)
        return td__fail_nomem("message");
    td_status status = take_message(call, message);
    message->work = work;
    if (!status)
        status = call->kind == TD_OP_SEND ? queue_send(all, message) : start(all, message);
    if (status) {
        drop_message(message);
        free(message);
    }
    return status;
}

void td__staged_flush(struct td__staged_messages *all)
{
    if (!atomic_load(&all->unposted))
        return;
    pthread_mutex_lock(&all->lock);
    while (atomic_load(&all->unposted))
        td__cond_wait(&all->changed, &all->lock, TD__NEVER);
    pthread_mutex_unlock(&all->lock);
}

void td__staged_messages_end(struct td__staged_messages *all)
{
    pthread_mutex_lock(&all->lock);
    all->stopping = true;
    bool working = all->working;
    pthread_cond_broadcast(&all->changed);
    pthread_mutex_unlock(&all->lock);
    if (working)
        pthread_join(all->thread, NULL);
    pthread_cond_destroy(&all->changed);
    pthread_mutex_destroy(&all->lock);
}
