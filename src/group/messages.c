/* Creating, posting and destroying; messages_inside.h has the picture.
 *
 * A small send on this host costs one lock, one copy into the ring and a look at the bell; it is
 * complete at once. Everything else becomes a post. */
#include "group/messages_inside.h"
#include "group/messages_link.h"

#include "base/fail.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PARTING_MS = 1000 };

/* ---- Creating -------------------------------------------------------------------------------- */

static bool allocate(struct td__messages *messages)
{
    size_t size = (size_t)messages->options.size;
    messages->world_ranks = malloc(size * sizeof *messages->world_ranks);
    messages->locals = malloc(size * sizeof *messages->locals);
    messages->peers = calloc(size, sizeof *messages->peers);
    messages->slots = calloc(TD__LARGE_SLOTS, sizeof *messages->slots);
    messages->name = strdup(messages->options.name ? messages->options.name : "");
    return messages->world_ranks && messages->locals && messages->peers && messages->slots &&
           messages->name;
}

static void release(struct td__messages *messages)
{
    free(messages->world_ranks);
    free(messages->locals);
    free(messages->peers);
    free(messages->slots);
    free(messages->name);
    free(messages);
}

td_status td__messages_create(const struct td__messages_options *options,
                              struct td__messages **messages_out)
{
    struct td__messages *messages = calloc(1, sizeof *messages);
    if (!messages)
        return td__fail_nomem("messages");
    messages->options = *options;
    if (!allocate(messages)) {
        release(messages);
        return td__fail_nomem("messages");
    }
    memcpy(messages->world_ranks, options->world_ranks,
           (size_t)options->size * sizeof *messages->world_ranks);
    int host = td__endpoint_host(options->endpoint, options->world_ranks[options->rank]);
    for (int rank = 0; rank < options->size; rank++) {
        struct td__peer *peer = &messages->peers[rank];
        peer->local = -1;
        if (options->sockets_only ||
            td__endpoint_host(options->endpoint, options->world_ranks[rank]) != host)
            continue;
        if (rank == options->rank)
            messages->local_index = messages->local_size;
        peer->local = messages->local_size;
        messages->locals[messages->local_size++] = rank;
    }
    messages->remaining = options->size - 1;
    messages->lost = -1;
    messages->next_deadline = TD__NEVER;
    messages->epoll = messages->event = -1;
    messages->crowded = td__crowd(messages->local_size);
    messages->maybe_crowded = options->size > td__processors();
    pthread_mutex_init(&messages->lock, NULL);
    td__cond_init(&messages->changed);
    td__cond_init(&messages->thread_wake);
    *messages_out = messages;
    if (messages->local_size < options->size)
        td__endpoint_listen(options->endpoint, options->key, TD__CHANNEL_MESSAGES, td__tcp_accept,
                            messages);
    return TD_OK;
}

/* ---- Posting --------------------------------------------------------------------------------- */

static bool is_here(const struct td__messages *messages, int peer)
{
    return messages->peers[peer].local >= 0;
}

/* What a recv or a send with this rank needs first. */
static td_status prepare(struct td__messages *messages, int peer)
{
    bool any = peer == TD_ANY_SOURCE;
    if (!messages->attached && (any ? messages->local_size > 1 : is_here(messages, peer)))
        messages->attach_wanted = true;
    if (messages->epoll < 0 &&
        (any ? messages->local_size < messages->options.size : !is_here(messages, peer)))
        return td__tcp_begin(messages);
    return TD_OK;
}

static void fill_in(struct td__post *post, const td_call *call)
{
    bool send = call->kind == TD_OP_SEND;
    *post = (struct td__post){.kind = send ? TD__MESSAGE_EAGER : TD__MESSAGE_NONE,
                              .data = send ? (char *)call->input : call->output,
                              .size = call->count * td_dtype_size(call->dtype),
                              .peer = call->peer,
                              .tag = call->tag,
                              .timeout_ms = call->timeout_ms,
                              .deadline = td__deadline_in_ms(call->timeout_ms)};
}

static td_status start_send(struct td__messages *messages, struct td__post *post)
{
    struct td__peer *peer = &messages->peers[post->peer];
    TD_TRY(prepare(messages, post->peer));
    if (peer->gone)
        return td__peer_refuse(messages, post->peer, post);
    const char *farewell = td__endpoint_farewell(messages->options.endpoint,
                                                 messages->world_ranks[post->peer]);
    if (farewell) /* though what it has sent may still be received */
        return td__fail(TD_ERR_PEER, "%s: that rank %s", td__post_describe(messages, post),
                        farewell);
    bool first = !peer->queue.first;
    td__post_append(&peer->queue, post);
    if (first)
        td__peer_flush(messages, post->peer);
    return TD_OK;
}

static td_status start_recv(struct td__messages *messages, struct td__post *post)
{
    int source = post->peer;
    bool any = source == TD_ANY_SOURCE;
    TD_TRY(prepare(messages, source));
    struct td__arrival *arrival;
    while ((arrival = td__match_arrival(messages, source, post->tag))) {
        bool taken = true;
        td__arrival_remove(messages, arrival);
        if (arrival->envelope.kind == TD__MESSAGE_EAGER)
            td__deliver(messages, post, &arrival->envelope, arrival->data);
        else
            taken = td__begin_large(messages, post, &arrival->envelope);
        free(arrival);
        if (taken)
            return TD_OK;
    }
    if (!any && messages->peers[source].gone)
        return td__peer_refuse(messages, source, post);
    if (any)
        TD_TRY(td__any_is_hopeless(messages, post));
    post->order = ++messages->order;
    td__post_append(any ? &messages->any : &messages->peers[source].posted, post);
    return TD_OK;
}

/* Ranks have died or left since the last look. */
static void look_for_losses(struct td__messages *messages)
{
    unsigned losses = td__endpoint_losses(messages->options.endpoint);
    if (messages->attached && td__shm_departed(messages))
        td__shm_read(messages);
    if (losses == messages->losses)
        return;
    messages->losses = losses;
    td__messages_feel_pulse(messages, true);
}

/* On failure the post is in no list, and the caller's. */
static td_status start(struct td__messages *messages, struct td__post *post)
{
    td__post_begin(messages, post);
    td_status status = post->kind == TD__MESSAGE_NONE ? start_recv(messages, post)
                                                      : start_send(messages, post);
    if (status)
        td__post_abandon(messages, post);
    return status;
}

/* A small message on this host, with nothing queued before it: no post is needed. */
static bool send_at_once(struct td__messages *messages, const td_call *call)
{
    struct td__peer *peer = &messages->peers[call->peer];
    size_t size = call->count * td_dtype_size(call->dtype);
    if (messages->crowded && messages->attached)
        td__bell_here(td__shm_own_bell(messages));
    return peer->local >= 0 && messages->attached && !peer->gone && !peer->queue.first &&
           td__endpoint_presence(messages->options.endpoint, messages->world_ranks[call->peer]) ==
               TD__PRESENT &&
           td__shm_is_small(messages, call->input, size) &&
           td__shm_send_small(messages, call->peer, call->tag, call->input, size);
}

/* A small message that is there already, or comes within a moment, with nothing else to be moved. */
static bool recv_at_once(struct td__messages *messages, const td_call *call, size_t *size)
{
    if (call->peer == TD_ANY_SOURCE || messages->pending || !messages->attached)
        return false;
    const struct td__peer *peer = &messages->peers[call->peer];
    return peer->local >= 0 && !peer->gone && !peer->arrivals.first &&
           td__shm_recv_small(messages, call->peer, call->tag, call->output,
                              call->count * td_dtype_size(call->dtype), size);
}

static td_status check(const struct td__messages *messages, const td_call *call)
{
    bool send = call->kind == TD_OP_SEND;
    const char *name = send ? "send" : "recv";
    if (!send && call->kind != TD_OP_RECV)
        return td__fail(TD_ERR_INVALID, "messages: neither a send nor a recv");
    if (call->peer == messages->options.rank)
        return td__fail(TD_ERR_INVALID, "%s: a rank cannot exchange messages with itself", name);
    if (call->peer < (send ? 0 : TD_ANY_SOURCE) || call->peer >= messages->options.size)
        return td__fail(TD_ERR_INVALID, "%s: group \"%s\" has %d ranks, and no rank %d", name,
                        messages->name, messages->options.size, call->peer);
    if (send && call->tag == TD_ANY_TAG)
        return td__fail(TD_ERR_INVALID, "send: a message needs a tag of its own, not TD_ANY_TAG");
    return TD_OK;
}

td_status td__messages_post(struct td__messages *messages, const td_call *call, td_work *work)
{
    TD_TRY(check(messages, call));
    pthread_mutex_lock(&messages->lock);
    look_for_losses(messages);
    if (call->kind == TD_OP_SEND && send_at_once(messages, call)) {
        pthread_mutex_unlock(&messages->lock);
        td__shm_ring(messages, call->peer);
        td_work_complete(work, TD_OK, -1, 0);
        return TD_OK;
    }
    td_status status;
    struct td__post *post = malloc(sizeof *post);
    if (!post) {
        status = td__fail_nomem("message");
        goto unlock;
    }
    fill_in(post, call);
    post->work = work;
    status = start(messages, post);
    if (status)
        free(post);
    if (messages->pending)
        td__messages_attend(messages);
    td__messages_settle(messages);
unlock:
    pthread_mutex_unlock(&messages->lock);
    return status;
}

td_status td__messages_run(struct td__messages *messages, const td_call *call, int *source,
                           size_t *received)
{
    TD_TRY(check(messages, call));
    pthread_mutex_lock(&messages->lock);
    look_for_losses(messages);
    if (call->kind == TD_OP_SEND && send_at_once(messages, call)) {
        pthread_mutex_unlock(&messages->lock);
        td__shm_ring(messages, call->peer);
        return TD_OK;
    }
    size_t size;
    if (call->kind == TD_OP_RECV && recv_at_once(messages, call, &size)) {
        pthread_mutex_unlock(&messages->lock);
        if (source)
            *source = call->peer;
        if (received)
            *received = size;
        return TD_OK;
    }
    struct td__post post;
    atomic_bool complete = false;
    fill_in(&post, call);
    post.waited = &complete;
    td_status status = start(messages, &post);
    if (status) {
        pthread_mutex_unlock(&messages->lock);
        return status;
    }
    td__messages_wait(messages, &complete, call->peer);
    if (post.status) {
        status = td__fail(post.status, "%s", post.why ? post.why : "out of memory");
        free(post.why);
        return status;
    }
    if (source)
        *source = post.peer;
    if (received)
        *received = post.message_size;
    return TD_OK;
}

/* Who waits, or our own thread, tells the works: this may be any thread. */
void td__messages_abort(struct td__messages *messages, td_status status)
{
    char why[512];
    snprintf(why, sizeof why, "%s", td_last_error());
    pthread_mutex_lock(&messages->lock);
    if (!messages->aborted) {
        messages->aborted = strdup(why);
        messages->aborted_with = status;
        for (int r = 0; r < messages->options.size; r++)
            if (r != messages->options.rank)
                td__peer_gone(messages, r, why);
        td__messages_nudge(messages);
        pthread_cond_broadcast(&messages->changed);
        pthread_cond_signal(&messages->thread_wake);
    }
    pthread_mutex_unlock(&messages->lock);
}

/* ---- Destroying ------------------------------------------------------------------------------
 *
 * Receives end at once. Sends that the other side has not got yet are given a second: small ones to
 * get into the ring or onto the link, large ones to be received. What has been handed over by then
 * can be received afterwards; the rest fails here, and the others never see it. */

static void end_post(struct td__messages *messages, struct td__post *post, enum td__insistence how)
{
    if (post->descriptor && !td__large_cancel(messages, post, how))
        return;
    td_status status = td__fail(TD_ERR_STATE, "%s: the group was destroyed before it was done",
                                td__post_describe(messages, post));
    if (post->kind != TD__MESSAGE_NONE && post->work && !messages->aborted)
        td_log(TD_LOG_WARN, "%s", td_last_error());
    td__post_finish(messages, post, status);
}

static void end_receives(struct td__messages *messages)
{
    for (struct td__post *post = messages->all, *next; post; post = next) {
        next = post->all_next;
        if (post->kind == TD__MESSAGE_NONE)
            end_post(messages, post, TD__SOON);
    }
}

static void part(struct td__messages *messages)
{
    td__deadline deadline = td__deadline_in_ms(PARTING_MS);
    pthread_mutex_lock(&messages->lock);
    end_receives(messages);
    td__messages_settle(messages);
    while (messages->pending && !td__deadline_passed(deadline)) {
        pthread_mutex_unlock(&messages->lock);
        td__messages_progress(messages, NULL, 1);
        pthread_mutex_lock(&messages->lock);
        end_receives(messages);
    }
    while (messages->all)
        end_post(messages, messages->all, TD__AT_ONCE);
    td__messages_settle(messages);
    pthread_mutex_unlock(&messages->lock);
}

void td__messages_destroy(struct td__messages *messages)
{
    if (!messages)
        return;
    td__messages_stop(messages);
    part(messages);
    if (messages->local_size < messages->options.size)
        td__endpoint_listen(messages->options.endpoint, messages->options.key, TD__CHANNEL_MESSAGES,
                            NULL, NULL);
    td__tcp_leave(messages, td__deadline_in_ms(PARTING_MS));
    if (messages->attached)
        td__shm_leave(messages);
    while (messages->arrivals.first) {
        struct td__arrival *arrival = messages->arrivals.first;
        td__arrival_remove(messages, arrival);
        free(arrival);
    }
    free(messages->aborted);
    for (int i = 0; i < messages->options.size; i++)
        free(messages->peers[i].farewell);
    pthread_cond_destroy(&messages->thread_wake);
    pthread_cond_destroy(&messages->changed);
    pthread_mutex_destroy(&messages->lock);
    release(messages);
}
