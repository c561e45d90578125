/* Channels: a communicator's life, and the order of its calls.
 *
 *     NEW      rank 0 of the communicator makes the id and puts it into the group's store; the others look for it
 *     JOINING  ncclCommInitRankConfig() has returned, and connects the ranks in a thread of NCCL
 *     READY    calls are enqueued
 *     BUSY     NCCL connects further, for the last call: ncclInProgress; the next call waits
 *
 * A communicator for messages has two ranks, 0 sends and 1 receives: two ranks that exchange messages in both directions
 * have two. One for all messages of a group would need all its ranks to create it, and the messages of one rank would
 * wait for each other; with one for each pair, a send and a receive that the other rank calls in the other order would. */
#include "nccl_backend.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LEAVE_NS 1000000000LL

/* ---- Creating ------------------------------------------------------------------------------------- */

static bool is_message(const td_call *call)
{
    return call->kind == TD_OP_SEND || call->kind == TD_OP_RECV;
}

static struct nccl_channel *add_channel(struct nccl_group *group, int source, int target)
{
    const td_backend_context *context = group->context;
    struct nccl_channel *channel = calloc(1, sizeof *channel);
    if (!channel) {
        td_fail(TD_ERR_NOMEM, "backend nccl: out of memory");
        return NULL;
    }
    channel->group = group;
    channel->source = source;
    channel->target = target;
    channel->rank = source < 0 ? context->rank : context->rank == target;
    channel->size = source < 0 ? context->size : 2;
    nccl_list_init(&channel->queue);
    nccl_list_init(&channel->issued);
    if (source < 0)
        strcpy(channel->name, "all");
    else
        snprintf(channel->name, sizeof channel->name, "%d-%d", source, target);
    channel->next = group->channels;
    group->channels = channel;
    return channel;
}

struct nccl_channel *nccl_channel_of(struct nccl_group *group, const td_call *call)
{
    int source = -1, target = -1, rank = group->context->rank;
    if (is_message(call)) {
        source = call->kind == TD_OP_SEND ? rank : call->peer;
        target = call->kind == TD_OP_SEND ? call->peer : rank;
    }
    struct nccl_channel *channel = group->channels;
    while (channel && (channel->source != source || channel->target != target))
        channel = channel->next;
    return channel ? channel : add_channel(group, source, target);
}

/* ---- Errors ----------------------------------------------------------------------------------------- */

/* "all_reduce #3 on group "world"", or of a message "send to rank 2 on group "world"". */
static const char *describe(const struct nccl_channel *channel, const td_call *call, char text[160])
{
    const td_backend_context *context = channel->group->context;
    const char *kind = call ? td_op_kind_name(call->kind) : "communicator";
    if (channel->source < 0 && call)
        snprintf(text, 160, "%s #%llu on group \"%.80s\"", kind, (unsigned long long)call->sequence,
                 context->name);
    else if (channel->source < 0)
        snprintf(text, 160, "the communicator of group \"%.80s\"", context->name);
    else
        snprintf(text, 160, "%s from rank %d to rank %d on group \"%.80s\"",
                 call ? kind : "messages", context->global_ranks[channel->source],
                 context->global_ranks[channel->target], context->name);
    return text;
}

static td_status fail_result(const struct nccl_channel *channel, const td_call *call, int result)
{
    char what[160], text[600];
    if (result < 0)
        return td_last_status();
    bool refuses = result == NCCL_INVALID_USAGE && !call;
    return td_fail(result == NCCL_REMOTE_ERROR ? TD_ERR_PEER : TD_ERR_SYSTEM, "%s: %s: %s%s",
                   describe(channel, call, what), nccl.name,
                   nccl_result_text(result, channel->comm, text, sizeof text),
                   refuses ? "; NCCL takes one rank for each GPU: a group whose ranks share one "
                             "needs the backends \"cpu:native,cuda:native\""
                           : "");
}

/* ---- Enqueueing -------------------------------------------------------------------------------------- */

static void note_enqueued(struct nccl_channel *channel, const struct nccl_call *pending)
{
    const td_call *call = pending->call;
    if (channel->stream != call->stream) {
        td_stream_retain(call->stream);
        td_stream_release(channel->stream);
        channel->stream = call->stream;
    }
    channel->timeout_ms = call->timeout_ms;
    channel->sequence = call->sequence;
    if (call->kind == TD_OP_ALL_REDUCE || call->kind == TD_OP_ALL_GATHER ||
        call->kind == TD_OP_REDUCE_SCATTER || call->kind == TD_OP_ALL_TO_ALL)
        channel->meeting = call->sequence;
    if (is_message(call))
        channel->log[channel->enqueued % NCCL_LOGGED] = (struct nccl_logged){
            .tag = call->tag, .bytes = call->count * td_dtype_size(call->dtype)};
    channel->enqueued++;
}

/* NCCL has enqueued them, or has failed to. */
static void end_issued(struct nccl_channel *channel, td_status status, struct nccl_list *done)
{
    struct nccl_call *pending;
    while ((pending = nccl_list_take(&channel->issued))) {
        if (pending->has_op && channel->comm)
            nccl.ncclRedOpDestroy(pending->op, channel->comm);
        if (!status) {
            note_enqueued(channel, pending);
            td_work_end(pending->work);
        }
        pending->status = status;
        nccl_list_add(done, pending);
    }
}

/* What is enqueued next: one call, or the messages of one batch. Messages of several threads may depend on one another by
 * way of the other direction; together each would wait for what any of them waits for. */
static void take_next(struct nccl_channel *channel)
{
    uint64_t batch = channel->queue.first->batch_number;
    do {
        struct nccl_call *pending = nccl_list_take(&channel->queue);
        nccl_list_add(&channel->issued, pending);
        td_work_begin(pending->work);
    } while (batch && channel->queue.first && channel->queue.first->batch_number == batch);
}

static td_status issue(struct nccl_channel *channel)
{
    const td_call *last = channel->queue.first->call;
    int result = nccl.ncclGroupStart(), one = NCCL_OK;
    if (result != NCCL_OK)
        return fail_result(channel, last, result);
    take_next(channel);
    for (struct nccl_call *pending = channel->issued.first; pending && one == NCCL_OK;
         pending = pending->next) {
        one = nccl_run_call(channel, pending);
        last = pending->call;
    }
    result = nccl.ncclGroupEnd();
    if (one != NCCL_OK)
        result = one;
    if (result != NCCL_OK && result != NCCL_IN_PROGRESS)
        return fail_result(channel, last, result);
    if (result == NCCL_IN_PROGRESS)
        channel->state = NCCL_BUSY;
    return TD_OK;
}

void nccl_channel_pump(struct nccl_channel *channel, struct nccl_list *done)
{
    struct nccl_group *group = channel->group;
    while (channel->state == NCCL_READY && channel->comm && channel->queue.first &&
           !channel->queue.first->batch && !atomic_load(&group->failed)) {
        td_status status = issue(channel);
        if (status)
            nccl_note_failure(group, status);
        if (status || channel->state != NCCL_BUSY)
            end_issued(channel, status, done);
    }
}

void nccl_channel_fail(struct nccl_channel *channel, td_status status, struct nccl_list *done)
{
    struct nccl_call *pending;
    end_issued(channel, status, done);
    while ((pending = nccl_list_take(&channel->queue))) {
        pending->status = status;
        nccl_list_add(done, pending);
    }
}

/* The text of a call that is over without success. */
static td_status set_reason(const struct nccl_group *group, const struct nccl_call *pending)
{
    const td_call *call = pending->call;
    const td_backend_context *context = group->context;
    td_status failure = nccl_failure(group);
    if (failure)
        return failure;
    if (pending->status == TD_ERR_TIMEOUT)
        return td_fail(TD_ERR_TIMEOUT,
                       "%s on group \"%s\": rank %d has not called the other side within %lld ms",
                       td_op_kind_name(call->kind), context->name,
                       context->global_ranks[call->peer], (long long)call->timeout_ms);
    return td_fail(pending->status, "%s: group \"%s\" was destroyed", td_op_kind_name(call->kind),
                   context->name);
}

void nccl_complete(struct nccl_group *group, struct nccl_list *done)
{
    struct nccl_call *pending;
    while ((pending = nccl_list_take(done))) {
        const td_call *call = pending->call;
        bool received = call->kind == TD_OP_RECV && !pending->status;
        size_t bytes = received ? call->count * td_dtype_size(call->dtype) : 0;
        td_status status = pending->status ? set_reason(group, pending) : TD_OK;
        td_work_complete(pending->work, status, received ? call->peer : -1, bytes);
        free(pending);
    }
}

/* ---- Steps of the worker ----------------------------------------------------------------------------- */

/* *id of the communicator; false: it is not there yet. */
static td_status find_id(struct nccl_channel *channel, struct nccl_id *id, bool *found)
{
    td_store *store = channel->group->context->store;
    char key[48];
    const char *keys[1] = {key};
    snprintf(key, sizeof key, "id/%s", channel->name);
    *found = true;
    if (channel->rank == 0) {
        int result = nccl.ncclGetUniqueId(id);
        return result == NCCL_OK ? td_store_set(store, key, id, sizeof *id)
                                 : fail_result(channel, NULL, result);
    }
    td_bytes value = {0};
    td_status status = td_store_check(store, keys, 1, found);
    if (status || !*found)
        return status;
    status = td_store_get(store, key, 0, &value);
    if (!status && value.size != sizeof *id)
        status = td_fail(TD_ERR_MISMATCH, "backend nccl: the id of \"%s\" has %zu bytes",
                         channel->name, value.size);
    if (!status)
        memcpy(id, value.data, sizeof *id);
    td_bytes_free(&value);
    return status;
}

/* Without the lock: only the worker changes a channel that is not ready. */
static td_status join(struct nccl_channel *channel, td_stream *stream)
{
    struct nccl_config config = {
        .size = sizeof config, .magic = NCCL_CONFIG_MAGIC, .version = NCCL_CONFIG_VERSION};
    struct nccl_id id = {{0}};
    struct nccl_comm *comm = NULL;
    bool found;
    td_status status = find_id(channel, &id, &found);
    if (status || !found)
        return status;
    nccl_use_device_of(nccl_stream(channel->group, stream));
    int result = nccl.ncclCommInitRankConfig(&comm, channel->size, id, channel->rank, &config);
    if (result != NCCL_OK && result != NCCL_IN_PROGRESS)
        return fail_result(channel, NULL, result);
    pthread_mutex_lock(&channel->group->lock);
    channel->comm = comm;
    channel->state = NCCL_JOINING;
    pthread_mutex_unlock(&channel->group->lock);
    return TD_OK;
}

/* With the lock: looks at a communicator that NCCL works on. */
static td_status poll_comm(struct nccl_channel *channel, struct nccl_list *done)
{
    int state = NCCL_OK, result = nccl.ncclCommGetAsyncError(channel->comm, &state);
    const td_call *call = channel->issued.first ? channel->issued.first->call : NULL;
    if (result == NCCL_OK)
        result = state;
    if (result == NCCL_IN_PROGRESS)
        return TD_OK;
    td_status status = result == NCCL_OK ? TD_OK : fail_result(channel, call, result);
    if (!status)
        channel->state = NCCL_READY;
    end_issued(channel, status, done);
    return status;
}

/* Messages that could not be enqueued in time are over; others stay. */
static void drop_late(struct nccl_channel *channel, int64_t now, struct nccl_list *done)
{
    struct nccl_list rest;
    struct nccl_call *pending;
    nccl_list_init(&rest);
    while ((pending = nccl_list_take(&channel->queue))) {
        bool is_late = now >= pending->deadline_ns;
        if (is_late)
            pending->status = TD_ERR_TIMEOUT;
        nccl_list_add(is_late ? done : &rest, pending);
    }
    while ((pending = nccl_list_take(&rest)))
        nccl_list_add(&channel->queue, pending);
}

/* A collective that is late breaks the group, and so does what NCCL has begun. */
static td_status check_deadlines(struct nccl_channel *channel, struct nccl_list *done)
{
    int64_t now = nccl_now_ns();
    char what[160];
    const struct nccl_call *first = channel->issued.first;
    if (!first && channel->source < 0)
        first = channel->queue.first;
    if (channel->source >= 0)
        drop_late(channel, now, done);
    if (first && now >= first->deadline_ns)
        return td_fail(TD_ERR_TIMEOUT, "%s: the ranks have not connected within %lld ms",
                       describe(channel, first->call, what), (long long)first->call->timeout_ms);
    return TD_OK;
}

bool nccl_channel_step(struct nccl_channel *channel, struct nccl_list *done)
{
    struct nccl_group *group = channel->group;
    td_status status = TD_OK;
    pthread_mutex_lock(&group->lock);
    const struct nccl_call *first = channel->queue.first;
    bool is_new = channel->state == NCCL_NEW && first;
    td_stream *stream = is_new ? td_stream_retain(first->call->stream) : NULL;
    if (channel->state == NCCL_JOINING || channel->state == NCCL_BUSY) {
        bool joined = channel->state == NCCL_JOINING;
        status = poll_comm(channel, done);
        joined = joined && channel->state == NCCL_READY;
        if (joined && channel->rank == 0) {
            char key[48]; /* all have read it */
            snprintf(key, sizeof key, "id/%s", channel->name);
            td_store_delete_key(group->context->store, key, NULL);
        }
    }
    if (!status && channel->state != NCCL_READY)
        status = check_deadlines(channel, done);
    if (status)
        nccl_note_failure(group, status);
    else
        nccl_channel_pump(channel, done);
    bool waits = channel->state == NCCL_JOINING || channel->state == NCCL_BUSY ||
                 (channel->state == NCCL_NEW && channel->queue.first);
    pthread_mutex_unlock(&group->lock);
    if (is_new && !status && (status = join(channel, stream)))
        nccl_note_failure(group, status);
    td_stream_release(stream);
    return waits;
}

/* ---- Leaving ------------------------------------------------------------------------------------------ */

/* Whether NCCL is through with a communicator, well or not. */
static bool has_ended(struct nccl_comm *comm, bool *well)
{
    int state = NCCL_OK, result = nccl.ncclCommGetAsyncError(comm, &state);
    *well = result == NCCL_OK && state == NCCL_OK;
    return *well || state != NCCL_IN_PROGRESS;
}

static void free_channel(struct nccl_channel *channel, int64_t end_ns)
{
    bool well = false;
    while (channel->comm && !has_ended(channel->comm, &well) && nccl_now_ns() < end_ns)
        nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
    if (channel->comm)
        well ? nccl.ncclCommDestroy(channel->comm) : nccl.ncclCommAbort(channel->comm);
    td_event_destroy(channel->watch.event);
    td_stream_release(channel->stream);
    free(channel);
}

/* ncclCommFinalize() flushes what was enqueued, also for ranks that are still behind, and may wait for these. */
void nccl_channels_free(struct nccl_group *group)
{
    struct nccl_channel *channel = group->channels, *next;
    int64_t end_ns = nccl_now_ns() + LEAVE_NS;
    for (; channel; channel = channel->next) {
        bool is_open = channel->comm && channel->state == NCCL_READY;
        int result = is_open ? nccl.ncclCommFinalize(channel->comm) : NCCL_OK;
        if (channel->comm && (!is_open || (result != NCCL_OK && result != NCCL_IN_PROGRESS))) {
            nccl.ncclCommAbort(channel->comm);
            channel->comm = NULL;
        }
    }
    for (channel = group->channels; channel; channel = next) {
        next = channel->next;
        free_channel(channel, end_ns);
    }
    group->channels = NULL;
}
