/* Matching: a message goes to the first recv that fits, a recv gets the first message that fits.
 *
 * Receives wait in a list for each source, and one for any source; each has a number, so that the
 * older of two candidates wins. Messages that nobody waits for are kept in two lists at once, that of
 * their source and that of all. A search is linear in the receives, or messages, of one source.
 *
 * A message's place in the order is that of its header: what is large, and is copied later, has been
 * matched before whatever the same rank sent after it. */
#include "group/messages_inside.h"
#include "group/messages_link.h"

#include "base/fail.h"

#include <stdlib.h>
#include <string.h>

/* ---- Searching ------------------------------------------------------------------------------- */

static struct td__post *first_fitting(const struct td__post_list *list, int tag)
{
    struct td__post *post = list->first;
    while (post && !td__tag_fits(post->tag, tag))
        post = post->next;
    return post;
}

struct td__post *td__match_posted(struct td__messages *messages, int source, int tag)
{
    struct td__post *one = first_fitting(&messages->peers[source].posted, tag);
    struct td__post *any = first_fitting(&messages->any, tag);
    if (!one || !any)
        return one ? one : any;
    return one->order < any->order ? one : any;
}

struct td__arrival *td__match_arrival(struct td__messages *messages, int source, int tag)
{
    struct td__arrival *arrival;
    if (source == TD_ANY_SOURCE) {
        arrival = messages->arrivals.first;
        while (arrival && !td__tag_fits(tag, arrival->envelope.tag))
            arrival = arrival->all_next;
    } else {
        arrival = messages->peers[source].arrivals.first;
        while (arrival && !td__tag_fits(tag, arrival->envelope.tag))
            arrival = arrival->next;
    }
    return arrival;
}

/* ---- Messages that nobody waits for ---------------------------------------------------------- */

static void append_arrival(struct td__messages *messages, struct td__arrival *arrival)
{
    struct td__arrival_list *list = &messages->peers[arrival->envelope.source].arrivals;
    arrival->next = NULL;
    arrival->before = list->last;
    if (list->last)
        list->last->next = arrival;
    else
        list->first = arrival;
    list->last = arrival;

    list = &messages->arrivals;
    arrival->all_next = NULL;
    arrival->all_before = list->last;
    if (list->last)
        list->last->all_next = arrival;
    else
        list->first = arrival;
    list->last = arrival;
}

void td__arrival_remove(struct td__messages *messages, struct td__arrival *arrival)
{
    struct td__arrival_list *list = &messages->peers[arrival->envelope.source].arrivals;
    *(arrival->before ? &arrival->before->next : &list->first) = arrival->next;
    *(arrival->next ? &arrival->next->before : &list->last) = arrival->before;

    list = &messages->arrivals;
    *(arrival->all_before ? &arrival->all_before->all_next : &list->first) = arrival->all_next;
    *(arrival->all_next ? &arrival->all_next->all_before : &list->last) = arrival->all_before;
}

struct td__arrival *td__arrival_make(const struct td__envelope *envelope)
{
    size_t size = envelope->kind == TD__MESSAGE_EAGER ? envelope->size : 0;
    struct td__arrival *arrival = malloc(sizeof *arrival + size);
    if (arrival)
        arrival->envelope = *envelope;
    return arrival;
}

void td__arrival_came(struct td__messages *messages, struct td__arrival *arrival)
{
    struct td__envelope *envelope = &arrival->envelope;
    struct td__post *post = td__match_posted(messages, envelope->source, envelope->tag);
    if (!post) {
        append_arrival(messages, arrival);
        return;
    }
    td__deliver(messages, post, envelope, arrival->data);
    free(arrival);
}

bool td__arrival_keep(struct td__messages *messages, const struct td__envelope *envelope,
                      const void *data)
{
    struct td__arrival *arrival = td__arrival_make(envelope);
    if (!arrival)
        return false;
    if (envelope->kind == TD__MESSAGE_EAGER)
        memcpy(arrival->data, data, envelope->size);
    append_arrival(messages, arrival);
    return true;
}

/* ---- A message and its recv ------------------------------------------------------------------ */

bool td__take(struct td__messages *messages, struct td__post *post,
              const struct td__envelope *envelope)
{
    int asked = post->tag;
    post->peer = envelope->source;
    post->tag = envelope->tag;
    post->message_size = envelope->size;
    post->id = envelope->id;
    if (envelope->size <= post->size)
        return true;
    td__post_finish(messages, post,
                    td__fail(TD_ERR_MISMATCH,
                             "%s%s: the message has %llu bytes; it is lost, and a recv must have "
                             "room for the whole message",
                             td__post_describe(messages, post),
                             asked == TD_ANY_TAG ? " (asked for any)" : "",
                             (unsigned long long)envelope->size));
    return false;
}

void td__deliver(struct td__messages *messages, struct td__post *post,
                 const struct td__envelope *envelope, const void *data)
{
    if (!td__take(messages, post, envelope))
        return;
    if (envelope->size)
        memcpy(post->data, data, envelope->size);
    td__post_finish(messages, post, TD_OK);
}

/* Answers a request: in the ring to the sender, or on the link that it has opened. */
static bool answer(struct td__messages *messages, enum td__message_kind kind,
                   const struct td__envelope *envelope)
{
    struct td__peer *peer = &messages->peers[envelope->source];
    struct td__link *link = peer->local < 0 ? peer->links[1] : NULL;
    if (peer->gone || (peer->local < 0 && !link))
        return true; /* whoever waits has been told */
    if (!td__post_control(messages, link ? &link->own : &peer->queue, kind, envelope->source,
                          envelope->id))
        return false;
    if (link)
        td__tcp_flush(messages, link);
    else
        td__peer_flush(messages, envelope->source);
    return true;
}

bool td__begin_large(struct td__messages *messages, struct td__post *post,
                     const struct td__envelope *envelope)
{
    if (envelope->kind == TD__MESSAGE_LARGE)
        return td__large_claim(messages, post, envelope);
    if (!td__take(messages, post, envelope)) {
        answer(messages, TD__MESSAGE_DROP, envelope);
        return true;
    }
    /* First into the list: the answer can come as soon as the question is written. */
    td__post_remove(post);
    td__post_append(&messages->expected, post);
    if (!answer(messages, TD__MESSAGE_GO, envelope))
        td__post_finish(messages, post, td__fail_nomem(td__post_describe(messages, post)));
    return true;
}

struct td__post *td__find_expected(struct td__messages *messages, int source, uint64_t id)
{
    struct td__post *post = messages->expected.first;
    while (post && (post->peer != source || post->id != id))
        post = post->next;
    return post;
}

static void give_up(struct td__messages *messages, const struct td__envelope *envelope)
{
    struct td__arrival *arrival = messages->peers[envelope->source].arrivals.first;
    while (arrival &&
           (arrival->envelope.kind != TD__MESSAGE_REQUEST || arrival->envelope.id != envelope->id))
        arrival = arrival->next;
    if (arrival) {
        td__arrival_remove(messages, arrival);
        free(arrival);
        return;
    }
    struct td__post *post = td__find_expected(messages, envelope->source, envelope->id);
    if (post)
        td__post_mistrust(messages, post, "the sender gave up before the message was here");
}

bool td__header_came(struct td__messages *messages, const struct td__envelope *envelope)
{
    int source = envelope->source;
    struct td__post *post;
    switch (envelope->kind) {
    case TD__MESSAGE_REQUEST:
    case TD__MESSAGE_LARGE:
        post = td__match_posted(messages, source, envelope->tag);
        if (!post)
            return td__arrival_keep(messages, envelope, NULL);
        td__begin_large(messages, post, envelope);
        return true;
    case TD__MESSAGE_GO:
    case TD__MESSAGE_DROP:
        post = messages->announced.first;
        while (post && (post->peer != source || post->id != envelope->id))
            post = post->next;
        if (!post)
            return true; /* given up meanwhile */
        if (envelope->kind == TD__MESSAGE_DROP) {
            td__post_finish(messages, post, TD_OK);
            return true;
        }
        post->kind = TD__MESSAGE_DATA;
        td__post_remove(post);
        td__post_append(&messages->peers[source].queue, post);
        td__peer_flush(messages, source);
        return true;
    case TD__MESSAGE_CANCEL:
        give_up(messages, envelope);
        return true;
    default:
        return false;
    }
}
