/* Staged messages; see staging.h.
 *
 *     send    copy piece 0 --> post --copy piece 1--> supply … --> complete
 *     recv    post --piece 0 has arrived--> copy it … --> complete
 *
 * The host's memory of a message is as long as the message, which travels as one: neither its other side nor matching
 * knows about the pieces. The copies of a send are enqueued at once; a thread waits for each of them, and lets the
 * engine of the messages send so far (struct td__p2p_stream). Those of a recv are enqueued by whichever thread gets the
 * payload.
 *
 * The caller has a work of the device's call; that of the host's is work->staged from the moment it is posted. */
#include "staging/staging.h"

#include "base/fail.h"
#include "base/thread.h"
#include "device/device_internal.h"
#include "p2p/p2p.h"

#include <stdlib.h>

enum { PIECES_MOST = 32 };

struct td__staged_message {
    STAILQ_ENTRY(td__staged_message) link;
    struct td__p2p_stream pieces;
    td_work *work;      /* the caller's */
    atomic_int holders; /* the host's work and, of a send, the thread: the last one completes it */
    td_call call;       /* on host memory */
    td_device *device;
    td_stream *stream;
    char *data; /* of the device */
    size_t bytes, piece;
    char *host;
    void *pinned;
    td_event *copied[PIECES_MOST]; /* of a send */
    size_t returned;               /* of a recv: bytes whose copies are enqueued */
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
        .data = sends ? (char *)call->input : call->output,
        .bytes = call->count * td_dtype_size(call->dtype),
    };
    size_t most = message->bytes / PIECES_MOST + 1;
    message->piece = (most + TD__STAGED_PIECE - 1) / TD__STAGED_PIECE * TD__STAGED_PIECE;
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
    for (int i = 0; i < PIECES_MOST; i++)
        td__event_give_back(message->copied[i]);
}

/* Where piece `number` ends. The first piece may be the only one, and empty. */
static size_t piece_end(const struct td__staged_message *message, int number)
{
    size_t end = message->piece * ((size_t)number + 1);
    return end < message->bytes ? end : message->bytes;
}

static bool has_piece(const struct td__staged_message *message, int number)
{
    return number == 0 || message->piece * (size_t)number < message->bytes;
}

static td_status copy_from_device(struct td__staged_message *message)
{
    td_device *device = message->device;
    size_t at = 0;
    for (int i = 0; has_piece(message, i); i++) {
        size_t end = piece_end(message, i);
        message->copied[i] = td__event_take(device);
        if (!message->copied[i])
            return td__error_status();
        if (end > at)
            TD_TRY(td__ops_of(device)->copy_out(device->self, message->stream->self,
                                                message->host + at, message->data + at, end - at,
                                                true));
        TD_TRY(td_event_record(message->copied[i], message->stream));
        at = end;
    }
    return TD_OK;
}

/* What of the first `bytes` is not enqueued yet. */
static td_status copy_to_device(struct td__staged_message *message, size_t bytes)
{
    td_device *device = message->device;
    size_t at = message->returned;
    if (bytes <= at)
        return TD_OK;
    TD_TRY(td__ops_of(device)->copy_in(device->self, message->stream->self, message->data + at,
                                       message->host + at, bytes - at, true));
    message->returned = bytes;
    return TD_OK;
}

/* A piece whose copy fails is copied once more at the end, where the failure is reported. */
static void on_arrival(struct td__p2p_stream *pieces, size_t bytes)
{
    struct td__staged_message *message = TD__CONTAINER(pieces, struct td__staged_message, pieces);
    struct td__error error;
    if (bytes - message->returned < message->piece)
        return;
    td__error_save(&error);
    if (copy_to_device(message, bytes))
        td__error_undo(&error);
}

/* ---- Messages with a work ------------------------------------------------------------------------------ */

/* One that was not posted. */
static void fail_message(struct td__staged_message *message, td_status status)
{
    td_work *work = message->work;
    drop_message(message);
    free(message);
    td_work_complete(work, status, -1, 0);
}

static void release_message(struct td__staged_message *message)
{
    if (atomic_fetch_sub(&message->holders, 1) != 1)
        return;
    td_work *work = message->work, *host_work = atomic_load(&work->staged);
    td_status status = td_work_status(host_work);
    size_t received = td_work_received(host_work);
    if (!status && message->call.kind == TD_OP_RECV)
        status = copy_to_device(message, received);
    drop_message(message);
    free(message);
    td_work_complete(work, status, td__group_index(work->group, td_work_source(host_work)),
                     received);
}

static void on_complete(td_work *host_work, td_status status, void *arg)
{
    (void)host_work, (void)status;
    release_message(arg);
}

/* Posts the message on host memory, which then holds it, unless it fails. */
static td_status start(struct td__staged_messages *all, struct td__staged_message *message)
{
    td_work *host_work = td__work_create(all->group, &message->call);
    if (!host_work)
        return td__error_status();
    bool in_pieces = message->bytes > message->piece;
    message->pieces.arrived = on_arrival;
    message->pieces.ready = piece_end(message, 0);
    td_status status = td__p2p_post(all->p2p, &host_work->operation.call, host_work,
                                    &host_work->complete, in_pieces ? &message->pieces : NULL);
    if (status) {
        host_work->owners = 1;
        td_work_release(host_work);
        return status;
    }
    td_work *work = td_work_retain(message->work);
    td__work_set_staged(work, host_work);
    td__work_set_callback(host_work, on_complete, message); /* has room for one callback */
    td_work_release(work);
    return TD_OK;
}

/* The copies of the rest, after the first piece is posted. */
static void supply(struct td__staged_messages *all, struct td__staged_message *message)
{
    td_status status = TD_OK;
    for (int i = 1; has_piece(message, i) && !status; i++) {
        status = td__wait_for_event("td_isend", message->copied[i]);
        if (!status)
            td__p2p_supply(all->p2p, &message->pieces, piece_end(message, i));
    }
    if (status)
        td__p2p_fail_stream(all->p2p, &message->pieces, status);
}

static void send_next(struct td__staged_messages *all, struct td__staged_message *message)
{
    td_status status = td__wait_for_event("td_isend", message->copied[0]);
    if (!status)
        status = start(all, message);
    pthread_mutex_lock(&all->lock);
    atomic_fetch_sub(&all->unposted, 1);
    pthread_cond_broadcast(&all->changed);
    pthread_mutex_unlock(&all->lock);
    if (status) {
        fail_message(message, status);
        return;
    }
    supply(all, message);
    release_message(message);
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
    bool sends = call->kind == TD_OP_SEND;
    message->work = work;
    atomic_store(&message->holders, sends ? 2 : 1);
    if (!status)
        status = sends ? queue_send(all, message) : start(all, message);
    if (status) {
        drop_message(message);
        free(message);
    }
    return status;
}

/* ---- Messages without one ------------------------------------------------------------------------------ */

/* Of one piece: nothing else runs meanwhile, so the thread of the caller does all of it. */
static td_status run_whole(struct td__staged_messages *all, struct td__staged_message *message)
{
    bool sends = message->call.kind == TD_OP_SEND;
    size_t received = 0;
    if (sends) {
        td__staged_flush(all);
        TD_TRY(copy_from_device(message));
        TD_TRY(td__wait_for_event("td_send", message->copied[0]));
    }
    TD_TRY(td__p2p_run(all->p2p, &message->call, NULL, &received));
    return sends ? TD_OK : copy_to_device(message, received);
}

static td_status run_in_pieces(struct td__staged_messages *all, const td_call *call)
{
    td_work *work = td__work_create(all->group, call);
    if (!work)
        return td__error_status();
    td_status status = td__staged_post(all, &work->operation.call, work);
    if (status) {
        work->owners = 1;
    } else {
        td__work_finish(work);
        status = td_work_status(work);
    }
    td_work_release(work);
    return status;
}

td_status td__staged_run(struct td__staged_messages *all, const td_call *call)
{
    if (call->count * td_dtype_size(call->dtype) > TD__STAGED_PIECE)
        return run_in_pieces(all, call);
    struct td__staged_message message;
    td_status status = take_message(call, &message);
    if (!status)
        status = run_whole(all, &message);
    drop_message(&message);
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
