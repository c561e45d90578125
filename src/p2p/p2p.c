/* Creating, posting and destroying; see p2p_internal.h.
 *
 * A small send on this host costs one lock, one copy into the ring and one load of the event; it is
 * complete at once. Everything else becomes a post. */
#include "p2p/p2p_internal.h"
#include "p2p/p2p_link.h"

#include "base/fail.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PARTING_MS = 1000 };

/* ---- Creating -------------------------------------------------------------------------------- */

static bool allocate(struct td__p2p *p2p)
{
    size_t size = (size_t)p2p->options.size;
    p2p->world_ranks = malloc(size * sizeof *p2p->world_ranks);
    p2p->locals = malloc(size * sizeof *p2p->locals);
    p2p->peers = calloc(size, sizeof *p2p->peers);
    p2p->name = strdup(p2p->options.name ? p2p->options.name : "");
    return p2p->world_ranks && p2p->locals && p2p->peers && p2p->name;
}

static void release(struct td__p2p *p2p)
{
    free(p2p->world_ranks);
    free(p2p->locals);
    free(p2p->peers);
    free(p2p->name);
    free(p2p);
}

/* A rank has ended or left, or there is something on a link. */
static void alert(void *arg)
{
    struct td__p2p *p2p = arg;
    pthread_mutex_lock(&p2p->lock);
    p2p->alerted = true;
    td__p2p_wake(p2p);
    pthread_mutex_unlock(&p2p->lock);
}

td_status td__p2p_create(const struct td__p2p_options *options, struct td__p2p **p2p_out)
{
    struct td__p2p *p2p = calloc(1, sizeof *p2p);
    if (!p2p)
        return td__fail_nomem("messages");
    p2p->options = *options;
    if (!allocate(p2p)) {
        release(p2p);
        return td__fail_nomem("messages");
    }
    memcpy(p2p->world_ranks, options->world_ranks,
           (size_t)options->size * sizeof *p2p->world_ranks);
    int host = td__endpoint_host(options->endpoint, options->world_ranks[options->rank]);
    for (int rank = 0; rank < options->size; rank++) {
        struct td__peer *peer = &p2p->peers[rank];
        peer->local = -1;
        TAILQ_INIT(&peer->posted);
        TAILQ_INIT(&peer->arrivals);
        TAILQ_INIT(&peer->queue);
        if (options->sockets_only ||
            td__endpoint_host(options->endpoint, options->world_ranks[rank]) != host)
            continue;
        if (rank == options->rank)
            p2p->local_index = p2p->local_size;
        peer->local = p2p->local_size;
        p2p->locals[p2p->local_size++] = rank;
    }
    struct td__post_list *lists[] = {&p2p->any,      &p2p->active, &p2p->announced,
                                     &p2p->expected, &p2p->copies, &p2p->finished};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++)
        TAILQ_INIT(lists[i]);
    TAILQ_INIT(&p2p->arrivals);
    p2p->remaining = options->size - 1;
    p2p->lost = -1;
    p2p->next_deadline = p2p->next_check = TD__NEVER;
    p2p->epoll = p2p->event = -1;
    p2p->oversubscribed = td__crowd(p2p->local_size);
    p2p->maybe_oversubscribed = options->size > td__processors();
    pthread_mutex_init(&p2p->lock, NULL);
    td__cond_init(&p2p->changed);
    td__cond_init(&p2p->thread_wake);
    *p2p_out = p2p;
    if (p2p->local_size < options->size)
        td__endpoint_listen(options->endpoint, options->key, TD__CHANNEL_MESSAGES,
                            td__p2p_tcp_accept, p2p);
    p2p->waiter = (struct td__endpoint_waiter){.wake = alert, .arg = p2p};
    td__endpoint_add_waiter(options->endpoint, &p2p->waiter);
    return TD_OK;
}

/* ---- Posting --------------------------------------------------------------------------------- */

/* Makes what a recv or a send with this rank needs. */
static td_status prepare(struct td__p2p *p2p, int peer)
{
    bool any = peer == TD_ANY_SOURCE;
    bool here = any ? p2p->local_size > 1 : p2p->peers[peer].local >= 0;
    bool elsewhere = any ? p2p->local_size < p2p->options.size : !here;
    if (here && !p2p->attached)
        p2p->attach_wanted = true;
    return elsewhere ? td__p2p_tcp_begin(p2p) : TD_OK;
}

static void fill_in(struct td__post *post, const td_call *call)
{
    bool send = call->kind == TD_OP_SEND;
    *post = (struct td__post){.kind = send ? TD__FRAME_EAGER : TD__FRAME_NONE,
                              .data = send ? (char *)call->input : call->output,
                              .size = call->count * td_dtype_size(call->dtype),
                              .peer = call->peer,
                              .tag = call->tag,
                              .timeout_ms = call->timeout_ms,
                              .deadline = td__deadline_in_ms(call->timeout_ms)};
}

static td_status start_send(struct td__p2p *p2p, struct td__post *post)
{
    struct td__peer *peer = &p2p->peers[post->peer];
    TD_TRY(prepare(p2p, post->peer));
    if (peer->gone)
        return td__peer_refuse(p2p, post);
    const char *exit_reason = td__p2p_exit_reason(p2p, post->peer);
    if (exit_reason) /* messages that it has sent may still be received */
        return td_fail(TD_ERR_PEER, "%s: that rank %s", td__post_describe(p2p, post), exit_reason);
    bool first = TAILQ_EMPTY(&peer->queue);
    td__post_move(post, &peer->queue);
    if (first)
        td__peer_flush(p2p, post->peer);
    return TD_OK;
}

static td_status start_recv(struct td__p2p *p2p, struct td__post *post)
{
    int source = post->peer;
    bool any = source == TD_ANY_SOURCE;
    TD_TRY(prepare(p2p, source));
    struct td__p2p_arrival *arrival;
    while ((arrival = td__match_arrival(p2p, source, post->tag))) {
        bool taken = td__match(p2p, post, &arrival->envelope, arrival->data);
        td__arrival_drop(p2p, arrival);
        if (taken)
            return TD_OK;
    }
    if (!any && p2p->peers[source].gone)
        return td__peer_refuse(p2p, post);
    if (any)
        TD_TRY(td__any_cannot_come(p2p, post));
    post->order = ++p2p->order;
    td__post_move(post, any ? &p2p->any : &p2p->peers[source].posted);
    return TD_OK;
}

/* Ranks may have ended or left since the last call. */
static void check_losses(struct td__p2p *p2p)
{
    unsigned losses = td__endpoint_losses(p2p->options.endpoint);
    if (p2p->attached && td__p2p_shm_departed(p2p))
        td__p2p_shm_read(p2p);
    if (losses == p2p->losses)
        return;
    p2p->losses = losses;
    td__p2p_check_peers(p2p, true);
}

/* On failure the post is in no list, and the caller's. */
static td_status start(struct td__p2p *p2p, struct td__post *post)
{
    td__post_begin(p2p, post);
    td_status status = td__is_send(post) ? start_send(p2p, post) : start_recv(p2p, post);
    if (status)
        LIST_REMOVE(post, in_all);
    return status;
}

/* A small message on this host, with nothing queued before it: no post is needed. The lock is released then. */
static bool send_at_once(struct td__p2p *p2p, const td_call *call)
{
    if (call->kind != TD_OP_SEND)
        return false;
    struct td__peer *peer = &p2p->peers[call->peer];
    size_t size = call->count * td_dtype_size(call->dtype);
    if (p2p->oversubscribed && p2p->attached)
        td__wait_event_set_processor(td__p2p_shm_own_event(p2p));
    bool sent = peer->local >= 0 && p2p->attached && !peer->gone && TAILQ_EMPTY(&peer->queue) &&
                td__p2p_presence(p2p, call->peer) == TD__PRESENT &&
                td__p2p_shm_is_small(p2p, call->input, size) &&
                td__p2p_shm_send_small(p2p, call->peer, call->tag, call->input, size);
    if (sent) {
        pthread_mutex_unlock(&p2p->lock);
        td__p2p_shm_signal(p2p, call->peer);
    }
    return sent;
}

/* A small message that is there already, or comes within a moment, with nothing else posted. */
static bool recv_at_once(struct td__p2p *p2p, const td_call *call, size_t *size)
{
    if (call->peer == TD_ANY_SOURCE || !LIST_EMPTY(&p2p->all) || !p2p->attached)
        return false;
    const struct td__peer *peer = &p2p->peers[call->peer];
    return peer->local >= 0 && !peer->gone && TAILQ_EMPTY(&peer->arrivals) &&
           td__p2p_shm_recv_small(p2p, call->peer, call->tag, call->output,
                                  call->count * td_dtype_size(call->dtype), size);
}

/* Into what is under way: the ring or the link that waits for it, or the descriptor. */
void td__p2p_supply(struct td__p2p *p2p, struct td__p2p_stream *stream, size_t bytes)
{
    pthread_mutex_lock(&p2p->lock);
    stream->ready = bytes;
    struct td__post *post = stream->post;
    if (post && post->descriptor)
        td__large_supply(p2p, post);
    else if (post && post->list == &p2p->peers[post->peer].queue)
        td__peer_flush(p2p, post->peer);
    td__p2p_settle(p2p);
    pthread_mutex_unlock(&p2p->lock);
}

void td__p2p_fail_stream(struct td__p2p *p2p, struct td__p2p_stream *stream, td_status status)
{
    pthread_mutex_lock(&p2p->lock);
    struct td__post *post = stream->post;
    if (post && post->descriptor) {
        td__large_cancel(p2p, post, TD__AT_ONCE);
        td__post_finish(p2p, post, status);
    } else if (post) {
        td__post_cancel_send(p2p, post, status);
    }
    td__p2p_settle(p2p);
    pthread_mutex_unlock(&p2p->lock);
}

static td_status check(const struct td__p2p *p2p, const td_call *call)
{
    bool send = call->kind == TD_OP_SEND;
    const char *name = send ? "send" : "recv";
    if (!send && call->kind != TD_OP_RECV)
        return td_fail(TD_ERR_INVALID, "point-to-point: the call is neither a send nor a recv");
    if (call->peer == p2p->options.rank)
        return td_fail(TD_ERR_INVALID, "%s: a rank cannot exchange messages with itself", name);
    if (call->peer < (send ? 0 : TD_ANY_SOURCE) || call->peer >= p2p->options.size)
        return td_fail(TD_ERR_INVALID, "%s: group \"%s\" has %d ranks, and no rank %d", name,
                       p2p->name, p2p->options.size, call->peer);
    if (send && call->tag == TD_ANY_TAG)
        return td_fail(TD_ERR_INVALID, "send: TD_ANY_TAG is for receives only; pass a tag");
    return TD_OK;
}

td_status td__p2p_post(struct td__p2p *p2p, const td_call *call, td_work *work,
                       const atomic_bool *complete, struct td__p2p_stream *stream)
{
    TD_TRY(check(p2p, call));
    pthread_mutex_lock(&p2p->lock);
    check_losses(p2p);
    if (send_at_once(p2p, call)) {
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
    post->complete = complete;
    post->stream = stream;
    if (stream)
        stream->post = post;
    status = start(p2p, post);
    if (status) {
        if (stream)
            stream->post = NULL;
        free(post);
    }
    if (!LIST_EMPTY(&p2p->all))
        td__p2p_attend(p2p);
    td__p2p_settle(p2p);
unlock:
    pthread_mutex_unlock(&p2p->lock);
    return status;
}

td_status td__p2p_run(struct td__p2p *p2p, const td_call *call, int *source, size_t *received)
{
    TD_TRY(check(p2p, call));
    pthread_mutex_lock(&p2p->lock);
    check_losses(p2p);
    if (send_at_once(p2p, call))
        return TD_OK;
    size_t size;
    if (call->kind == TD_OP_RECV && recv_at_once(p2p, call, &size)) {
        pthread_mutex_unlock(&p2p->lock);
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
    td_status status = start(p2p, &post);
    if (status) {
        pthread_mutex_unlock(&p2p->lock);
        return status;
    }
    td__p2p_wait(p2p, &complete, call->peer, TD__NEVER);
    if (post.status) {
        status = td_fail(post.status, "%s", post.why ? post.why : "out of memory");
        free(post.why);
        return status;
    }
    if (source)
        *source = post.peer;
    if (received)
        *received = post.message_size;
    return TD_OK;
}

/* A thread that waits, or the engine's thread, completes the works: this may be any thread. */
void td__p2p_abort(struct td__p2p *p2p, td_status status)
{
    struct td__error error;
    td__error_save(&error);
    pthread_mutex_lock(&p2p->lock);
    if (!p2p->aborted) {
        p2p->aborted = strdup(error.text);
        p2p->aborted_with = status;
        for (int r = 0; r < p2p->options.size; r++)
            if (r != p2p->options.rank)
                td__peer_gone(p2p, r, error.text);
        td__p2p_wake(p2p);
        pthread_cond_broadcast(&p2p->changed);
        pthread_cond_signal(&p2p->thread_wake);
    }
    pthread_mutex_unlock(&p2p->lock);
}

/* ---- Destroying ------------------------------------------------------------------------------
 *
 * Receives end at once. Sends that are not complete get a second: small ones to be written into the ring or
 * to the link, large ones to be received. What has been written by then can be received afterwards; the rest
 * fails here, and other ranks never see it. */

static void end_post(struct td__p2p *p2p, struct td__post *post, enum td__cancel_mode how)
{
    if (post->descriptor && !td__large_cancel(p2p, post, how))
        return;
    td_status status = td_fail(TD_ERR_STATE, "%s: the group was destroyed before it was done",
                               td__post_describe(p2p, post));
    if (td__is_send(post) && post->work && !p2p->aborted)
        td_log(TD_LOG_WARN, "%s", td__error_text());
    td__post_finish(p2p, post, status);
}

static void end_receives(struct td__p2p *p2p)
{
    for (struct td__post *post = LIST_FIRST(&p2p->all), *next; post; post = next) {
        next = LIST_NEXT(post, in_all);
        if (!td__is_send(post))
            end_post(p2p, post, TD__SOON);
    }
}

static void finish_posts(struct td__p2p *p2p)
{
    td__deadline deadline = td__deadline_in_ms(PARTING_MS);
    pthread_mutex_lock(&p2p->lock);
    end_receives(p2p);
    td__p2p_settle(p2p);
    while (!LIST_EMPTY(&p2p->all) && !td__deadline_passed(deadline)) {
        pthread_mutex_unlock(&p2p->lock);
        td__p2p_progress(p2p, NULL, TD_ANY_SOURCE, 1);
        pthread_mutex_lock(&p2p->lock);
        end_receives(p2p);
    }
    while (!LIST_EMPTY(&p2p->all))
        end_post(p2p, LIST_FIRST(&p2p->all), TD__AT_ONCE);
    td__p2p_settle(p2p);
    pthread_mutex_unlock(&p2p->lock);
}

void td__p2p_destroy(struct td__p2p *p2p)
{
    if (!p2p)
        return;
    td__p2p_stop(p2p);
    finish_posts(p2p);
    td__endpoint_remove_waiter(p2p->options.endpoint, &p2p->waiter);
    if (p2p->local_size < p2p->options.size)
        td__endpoint_listen(p2p->options.endpoint, p2p->options.key, TD__CHANNEL_MESSAGES, NULL,
                            NULL);
    td__p2p_tcp_leave(p2p, td__deadline_in_ms(PARTING_MS));
    if (p2p->attached)
        td__p2p_shm_leave(p2p);
    while (!TAILQ_EMPTY(&p2p->arrivals))
        td__arrival_drop(p2p, TAILQ_FIRST(&p2p->arrivals));
    free(p2p->aborted);
    for (int i = 0; i < p2p->options.size; i++)
        free(p2p->peers[i].exit_reason);
    pthread_cond_destroy(&p2p->thread_wake);
    pthread_cond_destroy(&p2p->changed);
    pthread_mutex_destroy(&p2p->lock);
    release(p2p);
}
