/* Who moves messages forward: the threads that wait, and where nobody waits, a thread of our own.
 *
 * Whoever holds the lock may look at the rings and links (td__messages_pump()); whoever waits does so
 * again and again. Jobs that take long (opening a link, getting the shared memory, copying a large
 * message) are done by whoever comes first, without the lock.
 *
 * Only one thread at a time, the owner, may sleep until something happens, since a bell wakes one. The
 * others that wait are told by a condition variable, when a work is complete or the owner has gone.
 *
 * Our own thread starts with the first post that is not done at once. It must not get into the way of
 * a program that waits for itself, so it naps before it takes over, and longer each time it found
 * somebody at work; the nap also spares a post the system call to wake it. A thread of the program
 * that comes to wait deposes it at once, without waiting for it. When it wakes, it may have taken a
 * wake-up that was meant for its successor: it passes that on. It rests when nothing is posted. */
#include "group/messages_inside.h"
#include "group/messages_link.h"

#include "base/fail.h"

#include <stdlib.h>

enum {
    NAP_NS = 1000000,      /* of our thread, before it takes over */
    LONG_NAP_NS = 8000000, /* the same where the program was seen at work */
};

/* ---- Moving forward -------------------------------------------------------------------------- */

void td__peer_flush(struct td__messages *messages, int rank)
{
    struct td__peer *peer = &messages->peers[rank];
    bool here = peer->local >= 0;
    struct td__post *post;
    if (!here || messages->attached)
        while ((post = peer->queue.first))
            if (!(here ? td__shm_write(messages, rank, post) : td__tcp_write(messages, rank, post)))
                break;
    bool stalled = here && messages->attached && peer->queue.first;
    messages->stalled += stalled - peer->stalled;
    peer->stalled = stalled;
}

/* True when something could be written. */
static bool flush_locals(struct td__messages *messages)
{
    bool happened = false;
    for (int i = 0; i < messages->local_size; i++) {
        struct td__peer *peer = &messages->peers[messages->locals[i]];
        uint64_t before = peer->writes.total;
        if (peer->queue.first)
            td__peer_flush(messages, messages->locals[i]);
        happened |= peer->writes.total != before;
    }
    return happened;
}

static bool has_job(const struct td__messages *messages)
{
    return (messages->attach_wanted && !messages->attaching) || messages->connects_wanted ||
           messages->copies.first;
}

static void set_watch(struct td__messages *messages)
{
    atomic_store_explicit(&messages->watch,
                          messages->active.first || messages->stalled || has_job(messages),
                          memory_order_relaxed);
}

bool td__messages_pump(struct td__messages *messages)
{
    bool happened = false;
    if (messages->attached)
        happened |= td__shm_read(messages);
    if (messages->epoll >= 0)
        happened |= td__tcp_look(messages);
    if (messages->active.first)
        happened |= td__large_look(messages);
    if (messages->stalled)
        happened |= flush_locals(messages);
    set_watch(messages);
    return happened || messages->finished;
}

/* The posts that ended, in order. */
static struct td__post *take_finished(struct td__messages *messages)
{
    struct td__post *list = NULL;
    while (messages->finished) { /* the last one is first in that list */
        struct td__post *post = messages->finished;
        messages->finished = post->next;
        post->next = list;
        list = post;
    }
    return list;
}

static void tell(struct td__post *list)
{
    while (list) {
        struct td__post *post = list;
        list = post->next;
        if (post->waited) {
            atomic_store_explicit(post->waited, true, memory_order_release);
            continue; /* it is the waiting thread's, and perhaps no more */
        }
        bool received = post->kind == TD__MESSAGE_NONE && !post->status;
        if (post->status)
            td__fail(post->status, "%s", post->why ? post->why : "out of memory");
        if (post->work)
            td_work_complete(post->work, post->status, received ? post->peer : -1,
                             received ? post->message_size : 0);
        free(post->why);
        free(post);
    }
}

void td__messages_settle(struct td__messages *messages)
{
    struct td__post *list = take_finished(messages);
    if (!list)
        return;
    pthread_mutex_unlock(&messages->lock);
    tell(list);
    pthread_mutex_lock(&messages->lock);
    if (messages->waiters)
        pthread_cond_broadcast(&messages->changed);
    if (messages->sleepers)
        td__messages_nudge(messages);
}

static void attach(struct td__messages *messages, td__deadline deadline)
{
    deadline = td__deadline_earlier(deadline, messages->next_deadline);
    messages->attaching = true;
    void *memory;
    pthread_mutex_unlock(&messages->lock);
    td_status status = messages->options.shared(messages->options.shared_arg, deadline, &memory);
    pthread_mutex_lock(&messages->lock);
    messages->attaching = false;
    if (status == TD_ERR_TIMEOUT) {
        td__expire(messages, td__now_ns());
        messages->attach_wanted = messages->pending > 0;
        return;
    }
    messages->attach_wanted = false;
    if (!status) {
        td__shm_begin(messages, memory);
        flush_locals(messages);
        return;
    }
    for (struct td__post *post = messages->all, *next; post; post = next) {
        next = post->all_next;
        if (post->peer == TD_ANY_SOURCE || messages->peers[post->peer].local >= 0)
            td__post_finish(messages, post, status);
    }
}

/* One job, without the lock in between; false where there is none. */
static bool do_job(struct td__messages *messages, td__deadline deadline)
{
    if (messages->attach_wanted && !messages->attaching) {
        attach(messages, deadline);
        return true;
    }
    if (messages->connects_wanted && td__tcp_connect(messages))
        return true;
    return td__large_copy(messages);
}

/* ---- Threads of the program ------------------------------------------------------------------ */

static bool wait_for_owner(struct td__messages *messages, td__deadline deadline)
{
    messages->waiters++;
    bool in_time = td__cond_wait(&messages->changed, &messages->lock, deadline);
    messages->waiters--;
    return in_time;
}

/* Where nothing else has ended, what was waited for: nobody else has to be told of it, so this thread
 * needs the lock no more. */
static struct td__post *take_only(struct td__messages *messages, const atomic_bool *complete)
{
    struct td__post *post = messages->finished;
    if (!post || post->next || !complete)
        return NULL;
    if (post->waited != complete && (!post->work || &post->work->complete != complete))
        return NULL;
    messages->finished = NULL;
    return post;
}

/* Returns a post that is left to be told. */
static struct td__post *wait_for(struct td__messages *messages, const atomic_bool *complete,
                                 int peer, td__deadline deadline)
{
    struct td__vigil vigil = {.deadline = deadline, .peer = peer};
    struct td__post *last = NULL;
    bool in_time = true;
    bool owner = false;
    for (;;) {
        if (vigil.slept)
            td__messages_look_at_clock(messages);
        bool happened = do_job(messages, deadline);
        happened |= td__messages_pump(messages);
        if ((last = take_only(messages, complete)))
            break;
        td__messages_settle(messages);
        if (td__is_set(complete) || !in_time)
            break;
        if (happened) {
            td__vigil_reset(&vigil);
            continue;
        }
        if (!owner && messages->owner == TD__OWNER_PROGRAM) {
            in_time = wait_for_owner(messages, deadline);
            continue;
        }
        if (!owner) {
            bool depose = messages->owner == TD__OWNER_THREAD;
            messages->owner = TD__OWNER_PROGRAM;
            owner = true;
            if (depose)
                td__messages_nudge(messages);
        }
        in_time = td__vigil_keep(messages, &vigil, complete);
    }
    if (owner) {
        td__vigil_reset(&vigil);
        messages->owner = TD__OWNER_NOBODY;
        if (messages->waiters)
            pthread_cond_broadcast(&messages->changed);
    }
    return last;
}

void td__messages_progress(struct td__messages *messages, td_work *work, int64_t timeout_ms)
{
    const atomic_bool *complete = work ? &work->complete : NULL;
    if (td__is_set(complete))
        return;
    struct td__post *last = NULL;
    pthread_mutex_lock(&messages->lock);
    if (timeout_ms > 0) {
        last = wait_for(messages, complete, work ? work->call.peer : TD_ANY_SOURCE,
                        td__deadline_in_ms(timeout_ms));
    } else {
        td__large_copy(messages); /* the other jobs can take long: they are left to our thread */
        td__messages_pump(messages);
        td__messages_settle(messages);
    }
    pthread_mutex_unlock(&messages->lock);
    tell(last);
}

void td__messages_wait(struct td__messages *messages, const atomic_bool *complete, int peer)
{
    struct td__post *last = wait_for(messages, complete, peer, TD__NEVER);
    pthread_mutex_unlock(&messages->lock);
    tell(last);
}

/* ---- Our own thread -------------------------------------------------------------------------- */

static void serve(struct td__messages *messages)
{
    struct td__vigil vigil = {.deadline = TD__NEVER, .peer = TD_ANY_SOURCE, .drowsy = true};
    messages->owner = TD__OWNER_THREAD;
    while (messages->owner == TD__OWNER_THREAD && messages->pending && !messages->stopping) {
        if (vigil.slept)
            td__messages_look_at_clock(messages);
        bool happened = do_job(messages, TD__NEVER);
        happened |= td__messages_pump(messages);
        td__messages_settle(messages);
        if (happened)
            td__vigil_reset(&vigil);
        else if (messages->owner == TD__OWNER_THREAD)
            td__vigil_keep(messages, &vigil, NULL);
    }
    if (messages->owner == TD__OWNER_THREAD) {
        td__vigil_reset(&vigil);
        messages->owner = TD__OWNER_NOBODY;
        if (messages->waiters)
            pthread_cond_broadcast(&messages->changed);
    } else if (vigil.begun) {
        td__bell_wake(td__shm_own_bell(messages));
    }
}

static void *run(void *arg)
{
    struct td__messages *messages = arg;
    uint64_t seen = 0;
    int64_t nap = NAP_NS;
    pthread_mutex_lock(&messages->lock);
    while (!messages->stopping) {
        if (messages->finished)
            td__messages_settle(messages);
        if (!messages->pending && messages->posts == seen) {
            messages->thread_rests = true;
            pthread_cond_wait(&messages->thread_wake, &messages->lock);
            messages->thread_rests = false;
            nap = NAP_NS;
            continue;
        }
        seen = messages->posts;
        td__cond_wait(&messages->thread_wake, &messages->lock, td__now_ns() + nap);
        if (messages->owner != TD__OWNER_NOBODY || messages->waiters || !messages->pending) {
            nap = nap < LONG_NAP_NS ? nap * 2 : nap;
        } else {
            serve(messages);
            nap = NAP_NS;
        }
    }
    pthread_mutex_unlock(&messages->lock);
    return NULL;
}

void td__messages_attend(struct td__messages *messages)
{
    messages->posts++;
    set_watch(messages);
    if (messages->thread_rests)
        pthread_cond_signal(&messages->thread_wake);
    else if (!messages->thread_runs && !messages->stopping)
        messages->thread_runs = !td__thread_start(&messages->thread, "td-messages", run, messages);
    if (messages->sleepers && has_job(messages))
        td__messages_nudge(messages);
}

void td__messages_stop(struct td__messages *messages)
{
    pthread_mutex_lock(&messages->lock);
    bool runs = messages->thread_runs;
    messages->stopping = true;
    messages->thread_runs = false;
    pthread_cond_signal(&messages->thread_wake);
    td__messages_nudge(messages);
    pthread_mutex_unlock(&messages->lock);
    if (runs)
        pthread_join(messages->thread, NULL);
}
