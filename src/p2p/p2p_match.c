/* Matching: a message goes to the first recv that matches, a recv gets the first message that matches.
 *
 * Posted receives are in a list for each source, and one for any source; each has a number, so that the older
 * of two candidates wins. Unexpected messages are in two lists at once, that of their source and that of all. A
 * search is linear in the receives, or messages, of one source.
 *
 * Messages are ordered by their headers: a large one, which is copied later, is matched before all that the
 * same rank sent after it. */
#include "p2p/p2p_internal.h"
#include "p2p/p2p_link.h"

#include "base/fail.h"

#include <stdlib.h>
#include <string.h>

/* ---- Searching ------------------------------------------------------------------------------- */

static struct td__post *first_fitting(const struct td__post_list *list, int tag)
{
    struct td__post *post;
    TAILQ_FOREACH (post, list, entry)
        if (td__tag_fits(post->tag, tag))
            break;
    return post;
}

struct td__post *td__match_posted(struct td__p2p *p2p, int source, int tag)
{
    struct td__post *one = first_fitting(&p2p->peers[source].posted, tag);
    struct td__post *any = first_fitting(&p2p->any, tag);
    if (!one || !any)
        return one ? one : any;
    return one->order < any->order ? one : any;
}

struct td__p2p_arrival *td__match_arrival(struct td__p2p *p2p, int source, int tag)
{
    struct td__p2p_arrival *arrival;
    if (source == TD_ANY_SOURCE) {
        TAILQ_FOREACH (arrival, &p2p->arrivals, in_all)
            if (td__tag_fits(tag, arrival->envelope.tag))
                break;
    } else {
        TAILQ_FOREACH (arrival, &p2p->peers[source].arrivals, entry)
            if (td__tag_fits(tag, arrival->envelope.tag))
                break;
    }
    return arrival;
}

/* ---- Unexpected messages ---------------------------------------------------------- */

static void append_arrival(struct td__p2p *p2p, struct td__p2p_arrival *arrival)
{
    TAILQ_INSERT_TAIL(&p2p->peers[arrival->envelope.source].arrivals, arrival, entry);
    TAILQ_INSERT_TAIL(&p2p->arrivals, arrival, in_all);
}

void td__arrival_drop(struct td__p2p *p2p, struct td__p2p_arrival *arrival)
{
    TAILQ_REMOVE(&p2p->peers[arrival->envelope.source].arrivals, arrival, entry);
    TAILQ_REMOVE(&p2p->arrivals, arrival, in_all);
    free(arrival);
}

struct td__p2p_arrival *td__arrival_make(const struct td__envelope *envelope)
{
    size_t size = envelope->kind == TD__FRAME_EAGER ? envelope->size : 0;
    struct td__p2p_arrival *arrival = malloc(sizeof *arrival + size);
    if (arrival)
        arrival->envelope = *envelope;
    return arrival;
}

void td__arrival_complete(struct td__p2p *p2p, struct td__p2p_arrival *arrival)
{
    struct td__envelope *envelope = &arrival->envelope;
    struct td__post *post = td__match_posted(p2p, envelope->source, envelope->tag);
    if (!post) {
        append_arrival(p2p, arrival);
        return;
    }
    td__match(p2p, post, envelope, arrival->data);
    free(arrival);
}

/* ---- A message and its recv ------------------------------------------------------------------ */

bool td__take(struct td__p2p *p2p, struct td__post *post, const struct td__envelope *envelope)
{
    int wanted = post->tag;
    post->peer = envelope->source;
    post->tag = envelope->tag;
    post->message_size = envelope->size;
    post->id = envelope->id;
    if (envelope->size <= post->size)
        return true;
    td__post_finish(
        p2p, post,
        td_fail(TD_ERR_MISMATCH,
                "%s%s: the message has %llu bytes and is dropped; the buffer of a recv must "
                "hold the whole message",
                td__post_describe(p2p, post),
                wanted == TD_ANY_TAG ? " (of a recv with any tag)" : "",
                (unsigned long long)envelope->size));
    return false;
}

/* Answers a request: in the ring to the sender, or on the link that it has opened. */
static bool answer(struct td__p2p *p2p, enum td__frame_kind kind,
                   const struct td__envelope *envelope)
{
    struct td__peer *peer = &p2p->peers[envelope->source];
    struct td__p2p_link *link = peer->local < 0 ? peer->links[1] : NULL;
    if (peer->gone || (peer->local < 0 && !link))
        return true; /* posts that wait for it have failed */
    if (!td__post_control(p2p, link ? &link->own : &peer->queue, kind, envelope->source,
                          envelope->id))
        return false;
    if (link)
        td__p2p_tcp_flush(p2p, link);
    else
        td__peer_flush(p2p, envelope->source);
    return true;
}

bool td__match(struct td__p2p *p2p, struct td__post *post, const struct td__envelope *envelope,
               const void *data)
{
    bool eager = envelope->kind == TD__FRAME_EAGER;
    if (envelope->kind == TD__FRAME_LARGE)
        return td__large_claim(p2p, post, envelope);
    if (!td__take(p2p, post, envelope)) {
        if (!eager)
            answer(p2p, TD__FRAME_DROP, envelope);
        return true;
    }
    if (eager) {
        if (envelope->size)
            memcpy(post->data, data, envelope->size);
        td__post_finish(p2p, post, TD_OK);
        return true;
    }
    /* First into the list: the DATA can come as soon as the GO is written. */
    td__post_move(post, &p2p->expected);
    if (!answer(p2p, TD__FRAME_GO, envelope))
        td__post_finish(p2p, post, td__fail_nomem(td__post_describe(p2p, post)));
    return true;
}

static struct td__post *find_by_id(const struct td__post_list *list, int source, uint64_t id)
{
    struct td__post *post;
    TAILQ_FOREACH (post, list, entry)
        if (post->peer == source && post->id == id)
            break;
    return post;
}

struct td__post *td__find_expected(struct td__p2p *p2p, int source, uint64_t id)
{
    return find_by_id(&p2p->expected, source, id);
}

static void give_up(struct td__p2p *p2p, const struct td__envelope *envelope)
{
    struct td__p2p_arrival *arrival;
    TAILQ_FOREACH (arrival, &p2p->peers[envelope->source].arrivals, entry)
        if (arrival->envelope.kind == TD__FRAME_REQUEST && arrival->envelope.id == envelope->id) {
            td__arrival_drop(p2p, arrival);
            return;
        }
    struct td__post *post = td__find_expected(p2p, envelope->source, envelope->id);
    if (post)
        td__post_suspect(p2p, post, "the sender cancelled the message");
}

/* A message: for a recv that is posted, or kept for a later one. */
static bool take_message(struct td__p2p *p2p, const struct td__envelope *envelope, const void *data)
{
    struct td__post *post = td__match_posted(p2p, envelope->source, envelope->tag);
    if (post) {
        td__match(p2p, post, envelope, data);
        return true;
    }
    struct td__p2p_arrival *arrival = td__arrival_make(envelope);
    if (!arrival)
        return false;
    if (envelope->kind == TD__FRAME_EAGER)
        memcpy(arrival->data, data, envelope->size);
    append_arrival(p2p, arrival);
    return true;
}

bool td__take_frame(struct td__p2p *p2p, const struct td__envelope *envelope, const void *data)
{
    struct td__post *post;
    switch (envelope->kind) {
    case TD__FRAME_EAGER:
    case TD__FRAME_REQUEST:
    case TD__FRAME_LARGE:
        return take_message(p2p, envelope, data);
    case TD__FRAME_GO:
    case TD__FRAME_DROP:
        post = find_by_id(&p2p->announced, envelope->source, envelope->id);
        if (post && envelope->kind == TD__FRAME_DROP)
            td__post_finish(p2p, post, TD_OK);
        else if (post) /* else it was cancelled meanwhile */
            td__post_send_data(p2p, post);
        return true;
    case TD__FRAME_CANCEL:
        give_up(p2p, envelope);
        return true;
    default:
        return false;
    }
}
