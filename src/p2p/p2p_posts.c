/* Posts: their lists, their texts, and how they fail.
 *
 * A post ends once, by td__post_finish(), under the lock; its work is completed after the lock is released.
 * The thread that detects a failure writes its text here.
 *
 * The thread that makes progress checks deadlines when the earliest may have passed. */
#include "p2p/p2p_internal.h"
#include "p2p/p2p_link.h"

#include "base/fail.h"
#include "base/text.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CHECK_NS = 50000000, LEFT_NS = 50000000 };
enum { RETRY_NS = 20000000, GRACE_NS = 1000000000, ATTACH_MS = 1000, SUSPECT_MS = 800 };
enum { MOST_NAMED = 3 };

/* ---- Lists ----------------------------------------------------------------------------------- */

void td__post_move(struct td__post *post, struct td__post_list *list)
{
    if (post->list)
        TAILQ_REMOVE(post->list, post, entry);
    TAILQ_INSERT_TAIL(list, post, entry);
    post->list = list;
}

static void check_by(struct td__p2p *p2p, td__deadline when)
{
    p2p->next_check = td__deadline_earlier(p2p->next_check, when);
}

void td__post_begin(struct td__p2p *p2p, struct td__post *post)
{
    LIST_INSERT_HEAD(&p2p->all, post, in_all);
    p2p->next_deadline = td__deadline_earlier(p2p->next_deadline, post->deadline);
    check_by(p2p, p2p->checked + CHECK_NS); /* its peer may not be watched yet */
}

bool td__post_control(struct td__p2p *p2p, struct td__post_list *queue, enum td__frame_kind kind,
                      int peer, uint64_t id)
{
    struct td__post *post = calloc(1, sizeof *post);
    if (!post)
        return false;
    post->kind = kind;
    post->peer = peer;
    post->id = id;
    post->deadline = TD__NEVER;
    td__post_begin(p2p, post);
    td__post_move(post, queue);
    return true;
}

void td__post_send_data(struct td__p2p *p2p, struct td__post *post)
{
    post->kind = TD__FRAME_DATA;
    td__post_move(post, &p2p->peers[post->peer].queue);
    td__peer_flush(p2p, post->peer);
}

void td__post_finish(struct td__p2p *p2p, struct td__post *post, td_status status)
{
    if (post->link) {
        post->link->post = NULL; /* the rest of its payload is skipped */
        post->link->into = NULL;
        post->link = NULL;
    }
    if (post->stream)
        post->stream->post = NULL;
    td__post_move(post, &p2p->finished);
    LIST_REMOVE(post, in_all);
    post->status = status;
    bool waited = post->work || post->waited;
    post->why = status && waited ? strdup(td__error_text()) : NULL;
}

const char *td__post_describe(struct td__p2p *p2p, const struct td__post *post)
{
    static _Thread_local char text[320];
    char tag[32] = "any tag";
    if (post->tag != TD_ANY_TAG)
        snprintf(tag, sizeof tag, "tag %d", post->tag);
    const char *peer = "any rank";
    if (post->peer != TD_ANY_SOURCE)
        peer = td__p2p_describe(p2p, post->peer);
    bool send = td__is_send(post);
    snprintf(text, sizeof text, "rank %d: %s of %s%zu bytes %s %s, %s, on group \"%s\"",
             p2p->world_ranks[p2p->options.rank], send ? "send" : "recv", send ? "" : "up to ",
             post->size, send ? "to" : "from", peer, tag, p2p->name);
    return text;
}

/* ---- Ranks that are gone, and deadlines ------------------------------------------------------ */

td_status td__peer_refuse(struct td__p2p *p2p, const struct td__post *post)
{
    if (p2p->aborted)
        return td_fail(p2p->aborted_with, "%s: %s", td__post_describe(p2p, post), p2p->aborted);
    return td_fail(TD_ERR_PEER, "%s: that rank %s", td__post_describe(p2p, post),
                   p2p->peers[post->peer].exit_reason);
}

void td__peer_gone(struct td__p2p *p2p, int rank, const char *exit_reason)
{
    struct td__peer *peer = &p2p->peers[rank];
    if (peer->gone)
        return;
    peer->gone = true;
    enum td__presence presence = td__p2p_presence(p2p, rank);
    if (presence == TD__ENDED || presence == TD__CUT_OFF)
        p2p->lost = rank;
    peer->exit_reason = strdup(exit_reason);
    p2p->remaining--;
    p2p->last_gone = rank;
    for (int i = 0; i < 2; i++)
        if (peer->links[i])
            td__p2p_tcp_close(p2p, peer->links[i]);

    for (struct td__p2p_arrival *arrival = TAILQ_FIRST(&peer->arrivals), *next; arrival;
         arrival = next) {
        next = TAILQ_NEXT(arrival, entry);
        if (arrival->envelope.kind == TD__FRAME_REQUEST)
            td__arrival_drop(p2p, arrival);
    }
    td_status status;
    for (struct td__post *post = LIST_FIRST(&p2p->all), *next; post; post = next) {
        next = LIST_NEXT(post, in_all);
        if (post->list == &p2p->active || post->list == &p2p->copies || post->copying)
            continue; /* td__large_look() ends it, since all may have been copied */
        if (post->peer == rank)
            td__post_finish(p2p, post, td__peer_refuse(p2p, post));
        else if (post->peer == TD_ANY_SOURCE && (status = td__any_cannot_come(p2p, post)))
            td__post_finish(p2p, post, status);
    }
}

/* A rank that has ended may be the one whose message is waited for. */
td_status td__any_cannot_come(struct td__p2p *p2p, const struct td__post *post)
{
    bool died = p2p->lost >= 0;
    int named = died ? p2p->lost : p2p->last_gone;
    if (p2p->aborted)
        return td__peer_refuse(p2p, post);
    if (!died && p2p->remaining)
        return TD_OK;
    return td_fail(TD_ERR_PEER, "%s: %s%s%s %s", td__post_describe(p2p, post),
                   died ? "" : "no other rank is left; the last one, ",
                   td__p2p_describe(p2p, named), died ? "" : ",", p2p->peers[named].exit_reason);
}

/* A link that a rank opened before it left may still be in the handshake. */
static bool may_still_connect(struct td__p2p *p2p, struct td__peer *peer)
{
    if (!peer->left_end)
        peer->left_end = td__now_ns() + LEFT_NS;
    check_by(p2p, peer->left_end);
    return !td__deadline_passed(peer->left_end);
}

/* Messages that it sent before can still be received. */
static void drop_peer(struct td__p2p *p2p, int rank, enum td__presence presence)
{
    struct td__peer *peer = &p2p->peers[rank];
    const char *known = td__p2p_exit_reason(p2p, rank);
    char exit_reason[384];
    snprintf(exit_reason, sizeof exit_reason, "%s", known ? known : "has ended");
    if (peer->local >= 0 && !p2p->attached)
        p2p->attach_wanted = true; /* its ring may have messages */
    else if (peer->local >= 0 && p2p->attached)
        td__ring_lose(p2p, rank, exit_reason);
    else if (peer->local < 0 && peer->links[1] && presence != TD__CUT_OFF)
        return; /* the end of the link comes after its last message */
    else if (peer->local < 0 && presence == TD__LEFT && may_still_connect(p2p, peer))
        return;
    else
        td__peer_gone(p2p, rank, exit_reason);
}

void td__peer_lost(struct td__p2p *p2p, int rank, bool bye, const char *exit_reason)
{
    const char *known = td__p2p_exit_reason(p2p, rank);
    if (!bye)
        p2p->lost = rank;
    td__peer_gone(p2p, rank, !bye && known ? known : exit_reason);
}

/* Peers whose links have ended, and whose presence is known by now, or will not be. */
static void end_unexplained(struct td__p2p *p2p)
{
    bool unexplained = false;
    for (int r = 0; r < p2p->options.size; r++) {
        struct td__peer *peer = &p2p->peers[r];
        if (!peer->unexplained || peer->gone)
            continue;
        if (td__deadline_passed(peer->explain_by) || td__p2p_presence(p2p, r) != TD__PRESENT) {
            td__peer_lost(p2p, r, false, peer->unexplained);
            continue;
        }
        unexplained = true;
        check_by(p2p, peer->explain_by);
    }
    p2p->unexplained = unexplained;
}

/* A rank that has not mapped the shared memory when its owner ends cannot map it any more, unless the owner
 * handed it over; one that has just got it may need a moment. */
static bool cannot_attach(struct td__p2p *p2p, int rank)
{
    int local = p2p->peers[rank].local, owner = local < 0 ? -1 : p2p->locals[0];
    const struct td__p2p_options *options = &p2p->options;
    if (local <= 0 || !p2p->attached || owner == options->rank || !options->has_memory ||
        options->has_memory(options->shared_arg, p2p->world_ranks[rank]))
        return false;
    enum td__presence presence = td__p2p_presence(p2p, owner);
    if (presence == TD__PRESENT || presence == TD__LEFT)
        return false;
    if (!p2p->attach_by)
        p2p->attach_by = td__deadline_in_ms(ATTACH_MS);
    check_by(p2p, p2p->attach_by);
    return td__deadline_passed(p2p->attach_by);
}

void td__p2p_check_peers(struct td__p2p *p2p, bool all)
{
    p2p->alerted = false;
    p2p->checked = td__now_ns();
    p2p->next_check = TD__NEVER;
    if (p2p->unexplained)
        end_unexplained(p2p);
    const struct td__post *post;
    LIST_FOREACH (post, &p2p->all, in_all)
        if (post->peer == TD_ANY_SOURCE)
            all = true;
        else
            p2p->peers[post->peer].awaited = true;
    for (int r = 0; r < p2p->options.size; r++) {
        struct td__peer *peer = &p2p->peers[r];
        bool awaited = peer->awaited || all;
        peer->awaited = false;
        if (!awaited || r == p2p->options.rank || peer->gone)
            continue;
        td__endpoint_watch(p2p->options.endpoint, p2p->world_ranks[r]);
        enum td__presence presence = td__p2p_presence(p2p, r);
        if (presence != TD__PRESENT)
            drop_peer(p2p, r, presence);
        else if (cannot_attach(p2p, r))
            td__peer_gone(
                p2p, r,
                "cannot share memory with this rank: the rank that made the memory has ended, and "
                "this one did not get it in time");
    }
}

void td__post_suspect(struct td__p2p *p2p, struct td__post *post, const char *why)
{
    if (p2p->peers[post->peer].gone) { /* then why is known already */
        td__post_finish(p2p, post, td__peer_refuse(p2p, post));
        return;
    }
    post->suspect = why;
    post->id = 0;
    post->deadline = td__deadline_earlier(post->deadline, td__deadline_in_ms(SUSPECT_MS));
    p2p->next_deadline = td__deadline_earlier(p2p->next_deadline, post->deadline);
    td__post_move(post, &p2p->expected);
}

/* A send that was announced to the receiver is cancelled there, too. One of which a part is written cannot be. */
void td__post_cancel_send(struct td__p2p *p2p, struct td__post *post, td_status status)
{
    struct td__peer *peer = &p2p->peers[post->peer];
    bool known = post->list == &p2p->announced || post->kind == TD__FRAME_DATA;
    struct td__p2p_link *link = peer->local < 0 ? peer->links[0] : NULL;
    if (link && TAILQ_FIRST(link->queue) == post && link->written) {
        td__peer_gone(p2p, post->peer,
                      status == TD_ERR_TIMEOUT
                          ? "is disconnected, since a send to it was not complete at its deadline"
                          : "is disconnected, since the device with a message to it has failed");
        return;
    }
    int rank = post->peer;
    uint64_t id = post->id;
    td__post_finish(p2p, post, status);
    if (known && td__post_control(p2p, &peer->queue, TD__FRAME_CANCEL, rank, id))
        td__peer_flush(p2p, rank);
}

/* Ranks that are gone may be the reason: those that ended come before those that left. */
td_status td__post_fail_suspected(struct td__p2p *p2p, const struct td__post *post)
{
    char gone[512] = "";
    int named = 0;
    for (int died = 1; died >= 0; died--)
        for (int r = 0; r < p2p->options.size && named < MOST_NAMED; r++) {
            enum td__presence presence = td__p2p_presence(p2p, r);
            if (presence == TD__PRESENT ||
                (presence == TD__ENDED || presence == TD__CUT_OFF) != (died == 1))
                continue;
            named++;
            td__text_add(gone, sizeof gone, "; %s %s", td__p2p_describe(p2p, r),
                         td__p2p_exit_reason(p2p, r));
        }
    return td_fail(TD_ERR_PEER, "%s: %s%s", td__post_describe(p2p, post), post->suspect, gone);
}

void td__expire(struct td__p2p *p2p, int64_t now)
{
    if (now < p2p->next_deadline)
        return;
    /* Ending one can end others, which may be the next in the list: begin again after each. */
    td__deadline next_deadline;
    struct td__post *post;
again:
    next_deadline = TD__NEVER;
    LIST_FOREACH (post, &p2p->all, in_all) {
        if (post->deadline > now) {
            next_deadline = td__deadline_earlier(next_deadline, post->deadline);
            continue;
        }
        enum td__cancel_mode how = now - post->deadline > GRACE_NS ? TD__AT_ONCE : TD__IF_IDLE;
        if (post->copying || (post->descriptor && !td__large_cancel(p2p, post, how))) {
            next_deadline = td__deadline_earlier(next_deadline, now + RETRY_NS);
            continue;
        }
        if (post->suspect)
            td__post_finish(p2p, post, td__post_fail_suspected(p2p, post));
        else if (post->peer != TD_ANY_SOURCE && p2p->peers[post->peer].gone)
            td__post_finish(p2p, post, td__peer_refuse(p2p, post));
        else if (!td__is_send(post))
            td__post_finish(p2p, post,
                            td_fail(TD_ERR_TIMEOUT, "%s: not done within %lld ms; %s",
                                    td__post_describe(p2p, post), (long long)post->timeout_ms,
                                    post->message_size || post->id
                                        ? "only a part of the message has arrived"
                                        : "no such message has arrived"));
        else
            td__post_cancel_send(
                p2p, post,
                td_fail(TD_ERR_TIMEOUT, "%s: not done within %lld ms; %s",
                        td__post_describe(p2p, post), (long long)post->timeout_ms,
                        post->list == &p2p->peers[post->peer].queue
                            ? "there was no room for it in the ring or on the link"
                            : "that rank has posted no recv for it, or makes no progress"));
        goto again;
    }
    p2p->next_deadline = next_deadline;
}
