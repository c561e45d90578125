/* Posts: their lists, their words, and how they end otherwise than well.
 *
 * A post ends once, by td__post_finish(), under the lock; whoever waits is told when the lock is free.
 * A failure's sentence is made here, by the thread that notices, and carried over.
 *
 * Deadlines are looked at by whoever makes progress, when the earliest may have passed. */
#include "group/messages_inside.h"
#include "group/messages_link.h"
#include "group/messages_shared.h"

#include "base/fail.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { RETRY_NS = 20000000, GRACE_NS = 1000000000, LOCKOUT_MS = 1000, MISTRUST_MS = 800 };
enum { MOST_NAMED = 3 };

/* ---- Lists ----------------------------------------------------------------------------------- */

void td__post_append(struct td__post_list *list, struct td__post *post)
{
    post->list = list;
    post->next = NULL;
    post->before = list->last;
    if (list->last)
        list->last->next = post;
    else
        list->first = post;
    list->last = post;
}

void td__post_remove(struct td__post *post)
{
    struct td__post_list *list = post->list;
    if (!list)
        return;
    if (post->before)
        post->before->next = post->next;
    else
        list->first = post->next;
    if (post->next)
        post->next->before = post->before;
    else
        list->last = post->before;
    post->list = NULL;
}

void td__post_begin(struct td__messages *messages, struct td__post *post)
{
    post->all_before = NULL;
    post->all_next = messages->all;
    if (messages->all)
        messages->all->all_before = post;
    messages->all = post;
    messages->pending++;
    if (post->deadline < messages->next_deadline)
        messages->next_deadline = post->deadline;
}

static void leave_all(struct td__messages *messages, struct td__post *post)
{
    if (post->all_before)
        post->all_before->all_next = post->all_next;
    else
        messages->all = post->all_next;
    if (post->all_next)
        post->all_next->all_before = post->all_before;
    messages->pending--;
}

void td__post_abandon(struct td__messages *messages, struct td__post *post)
{
    leave_all(messages, post);
}

bool td__post_control(struct td__messages *messages, struct td__post_list *queue,
                      enum td__message_kind kind, int peer, uint64_t id)
{
    struct td__post *post = calloc(1, sizeof *post);
    if (!post)
        return false;
    post->kind = kind;
    post->peer = peer;
    post->id = id;
    post->deadline = TD__NEVER;
    td__post_begin(messages, post);
    td__post_append(queue, post);
    return true;
}

void td__post_finish(struct td__messages *messages, struct td__post *post, td_status status)
{
    if (post->link) {
        post->link->post = NULL; /* the rest of its payload is read past */
        post->link->into = NULL;
        post->link = NULL;
    }
    td__post_remove(post);
    leave_all(messages, post);
    post->status = status;
    bool told = post->work || post->waited;
    post->why = status && told ? strdup(td_last_error()) : NULL;
    post->next = messages->finished;
    messages->finished = post;
}

const char *td__post_describe(struct td__messages *messages, const struct td__post *post)
{
    static _Thread_local char text[400];
    char tag[32] = "any tag";
    if (post->tag != TD_ANY_TAG)
        snprintf(tag, sizeof tag, "tag %d", post->tag);
    const char *peer = "any rank";
    if (post->peer != TD_ANY_SOURCE)
        peer = td__endpoint_describe(messages->options.endpoint, messages->world_ranks[post->peer]);
    bool send = post->kind != TD__MESSAGE_NONE;
    snprintf(text, sizeof text, "rank %d: %s of %s%zu bytes %s %s, %s, on group \"%s\"",
             messages->world_ranks[messages->options.rank], send ? "send" : "recv",
             send ? "" : "up to ", post->size, send ? "to" : "from", peer, tag, messages->name);
    return text;
}

/* ---- Ranks that are gone, and deadlines ------------------------------------------------------ */

td_status td__peer_refuse(struct td__messages *messages, int peer, const struct td__post *post)
{
    if (messages->aborted)
        return td__fail(messages->aborted_with, "%s: %s", td__post_describe(messages, post),
                        messages->aborted);
    return td__fail(TD_ERR_PEER, "%s: that rank %s", td__post_describe(messages, post),
                    messages->peers[peer].farewell);
}

void td__peer_gone(struct td__messages *messages, int rank, const char *farewell)
{
    struct td__peer *peer = &messages->peers[rank];
    if (peer->gone)
        return;
    peer->gone = true;
    enum td__presence presence = td__endpoint_presence(messages->options.endpoint,
                                                       messages->world_ranks[rank]);
    if (presence == TD__ENDED || presence == TD__CUT_OFF)
        messages->lost = rank;
    peer->farewell = strdup(farewell);
    messages->remaining--;
    messages->last_gone = rank;
    for (int i = 0; i < 2; i++)
        if (peer->links[i])
            td__tcp_close(messages, peer->links[i]);

    for (struct td__arrival *arrival = peer->arrivals.first, *next; arrival; arrival = next) {
        next = arrival->next;
        if (arrival->envelope.kind == TD__MESSAGE_REQUEST) {
            td__arrival_remove(messages, arrival);
            free(arrival);
        }
    }
    for (struct td__post *post = messages->all, *next; post; post = next) {
        next = post->all_next;
        if (post->list == &messages->active || post->list == &messages->copies || post->copying)
            continue; /* td__large_look() sees to it, since all may have been copied */
        if (post->peer == rank)
            td__post_finish(messages, post, td__peer_refuse(messages, rank, post));
        else if (post->peer == TD_ANY_SOURCE && td__any_is_hopeless(messages, post))
            td__post_finish(messages, post, td__any_is_hopeless(messages, post));
    }
}

/* Who has died may be the one whose message is waited for. */
td_status td__any_is_hopeless(struct td__messages *messages, const struct td__post *post)
{
    bool died = messages->lost >= 0;
    int named = died ? messages->lost : messages->last_gone;
    if (messages->aborted)
        return td__peer_refuse(messages, messages->options.rank ? 0 : 1, post);
    if (!died && messages->remaining)
        return TD_OK;
    return td__fail(TD_ERR_PEER, "%s: %s%s%s %s", td__post_describe(messages, post),
                    died ? "" : "no other rank is left; the last one, ",
                    td__endpoint_describe(messages->options.endpoint, messages->world_ranks[named]),
                    died ? "" : ",", messages->peers[named].farewell);
}

/* What had come from it before can still be received. */
static void part_with(struct td__messages *messages, int rank, enum td__presence presence)
{
    struct td__peer *peer = &messages->peers[rank];
    const char *known = td__endpoint_farewell(messages->options.endpoint,
                                              messages->world_ranks[rank]);
    char farewell[128];
    snprintf(farewell, sizeof farewell, "%s", known ? known : "has ended");
    if (peer->local >= 0 && !messages->attached)
        messages->attach_wanted = true; /* what it has sent stands there */
    else if (peer->local >= 0 && messages->attached)
        td__ring_lose(messages, rank, farewell);
    else if (peer->local < 0 && peer->links[1] && presence != TD__CUT_OFF)
        return; /* its end comes behind its last message */
    else
        td__peer_gone(messages, rank, farewell);
}

void td__peer_lost(struct td__messages *messages, int rank, bool bye, const char *farewell)
{
    const char *known = td__endpoint_farewell(messages->options.endpoint,
                                              messages->world_ranks[rank]);
    if (!bye)
        messages->lost = rank;
    td__peer_gone(messages, rank, !bye && known ? known : farewell);
}

/* Those whose links have ended, and of whom more is known by now, or never will be. */
static void end_doubts(struct td__messages *messages)
{
    bool doubts = false;
    for (int r = 0; r < messages->options.size; r++) {
        struct td__peer *peer = &messages->peers[r];
        if (!peer->doubt || peer->gone)
            continue;
        if (td__deadline_passed(peer->doubt_end) ||
            td__endpoint_presence(messages->options.endpoint, messages->world_ranks[r]) !=
                TD__PRESENT)
            td__peer_lost(messages, r, false, peer->doubt);
        else
            doubts = true;
    }
    messages->doubts = doubts;
}

/* Who has not mapped the shared memory when its owner dies never will, unless it was left to him before;
 * one that had just got it may need a moment. */
static bool is_locked_out(struct td__messages *messages, int rank)
{
    int local = messages->peers[rank].local, owner = local < 0 ? -1 : messages->locals[0];
    const struct td__messages_options *options = &messages->options;
    if (local <= 0 || !messages->attached || owner == options->rank || !options->has_memory ||
        options->has_memory(options->shared_arg, messages->world_ranks[rank]))
        return false;
    enum td__presence presence = td__endpoint_presence(options->endpoint,
                                                       messages->world_ranks[owner]);
    if (presence == TD__PRESENT || presence == TD__LEFT)
        return false;
    if (!messages->lockout_at)
        messages->lockout_at = td__deadline_in_ms(LOCKOUT_MS);
    return td__deadline_passed(messages->lockout_at);
}

void td__messages_feel_pulse(struct td__messages *messages, bool all)
{
    struct td__endpoint *endpoint = messages->options.endpoint;
    if (messages->doubts)
        end_doubts(messages);
    for (const struct td__post *post = messages->all; post; post = post->all_next)
        if (post->peer == TD_ANY_SOURCE)
            all = true;
        else
            messages->peers[post->peer].awaited = true;
    for (int r = 0; r < messages->options.size; r++) {
        struct td__peer *peer = &messages->peers[r];
        bool awaited = peer->awaited || all;
        peer->awaited = false;
        if (!awaited || r == messages->options.rank || peer->gone)
            continue;
        td__endpoint_watch(endpoint, messages->world_ranks[r]);
        enum td__presence presence = td__endpoint_presence(endpoint, messages->world_ranks[r]);
        if (presence != TD__PRESENT)
            part_with(messages, r, presence);
        else if (is_locked_out(messages, r))
            td__peer_gone(
                messages, r,
                "cannot share memory with this one: who had it is gone, and it did not get "
                "it in time");
    }
}

void td__post_mistrust(struct td__messages *messages, struct td__post *post, const char *why)
{
    if (messages->peers[post->peer].gone) { /* then why is known already */
        td__post_finish(messages, post, td__peer_refuse(messages, post->peer, post));
        return;
    }
    post->mistrust = why;
    post->id = 0;
    post->deadline = td__deadline_earlier(post->deadline, td__deadline_in_ms(MISTRUST_MS));
    messages->next_deadline = td__deadline_earlier(messages->next_deadline, post->deadline);
    td__post_remove(post);
    td__post_append(&messages->expected, post);
}

/* A send that the other side knows of has to be taken back there, too. */
static void cancel_send(struct td__messages *messages, struct td__post *post)
{
    struct td__peer *peer = &messages->peers[post->peer];
    bool known = post->list == &messages->announced || post->kind == TD__MESSAGE_DATA;
    struct td__link *link = peer->local < 0 ? peer->links[0] : NULL;
    if (link && link->queue->first == post && link->written) {
        td__peer_gone(messages, post->peer,
                      "is cut off, since a message to it was not through at its deadline");
        return;
    }
    int rank = post->peer;
    uint64_t id = post->id;
    td_status status = td__fail(TD_ERR_TIMEOUT, "%s: not done within %lld ms; %s",
                                td__post_describe(messages, post), (long long)post->timeout_ms,
                                post->list == &messages->peers[rank].queue
                                    ? "it could not be handed over"
                                    : "no recv for it was posted, or that rank makes no progress");
    td__post_finish(messages, post, status);
    if (known && td__post_control(messages, &peer->queue, TD__MESSAGE_CANCEL, rank, id))
        td__peer_flush(messages, rank);
}

/* Members that are gone may be the reason: those that died before those that left. */
td_status td__post_fail_mistrusted(struct td__messages *messages, const struct td__post *post)
{
    const struct td__endpoint *endpoint = messages->options.endpoint;
    char gone[512] = "";
    size_t length = 0;
    int named = 0;
    for (int died = 1; died >= 0; died--)
        for (int r = 0; r < messages->options.size && named < MOST_NAMED; r++) {
            int rank = messages->world_ranks[r];
            enum td__presence presence = td__endpoint_presence(endpoint, rank);
            if (presence == TD__PRESENT ||
                (presence == TD__ENDED || presence == TD__CUT_OFF) != (died == 1))
                continue;
            named++;
            length += (size_t)snprintf(gone + length, sizeof gone - length, "; %s %s",
                                       td__endpoint_describe(endpoint, rank),
                                       td__endpoint_farewell(endpoint, rank));
            length = length < sizeof gone ? length : sizeof gone - 1;
        }
    return td__fail(TD_ERR_PEER, "%s: %s%s", td__post_describe(messages, post), post->mistrust,
                    gone);
}

void td__expire(struct td__messages *messages, int64_t now)
{
    if (now < messages->next_deadline)
        return;
    /* Ending one can end others, which may be the next in the list: begin again after each. */
    td__deadline next_deadline;
    struct td__post *post;
again:
    next_deadline = TD__NEVER;
    for (post = messages->all; post; post = post->all_next) {
        if (post->deadline > now) {
            next_deadline = td__deadline_earlier(next_deadline, post->deadline);
            continue;
        }
        if (post->descriptor || post->copying) {
            if (post->copying ||
                !td__large_cancel(messages, post,
                                  now - post->deadline > GRACE_NS ? TD__AT_ONCE : TD__IF_IDLE)) {
                next_deadline = td__deadline_earlier(next_deadline, now + RETRY_NS);
                continue;
            }
        }
        if (post->mistrust)
            td__post_finish(messages, post, td__post_fail_mistrusted(messages, post));
        else if (post->peer != TD_ANY_SOURCE && messages->peers[post->peer].gone)
            td__post_finish(messages, post, td__peer_refuse(messages, post->peer, post));
        else if (post->kind == TD__MESSAGE_NONE)
            td__post_finish(messages, post,
                            td__fail(TD_ERR_TIMEOUT, "%s: not done within %lld ms; %s",
                                     td__post_describe(messages, post), (long long)post->timeout_ms,
                                     post->message_size || post->id ? "the message is not complete"
                                                                    : "no such message has come"));
        else
            cancel_send(messages, post);
        goto again;
    }
    messages->next_deadline = next_deadline;
}
