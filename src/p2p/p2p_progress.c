/* The progress engine: the threads of the program that wait, and where none waits, a thread of its own.
 *
 * A thread that holds the lock may read and write the rings and links (td__p2p_pump()); a thread that waits
 * does so again and again. Jobs that take long (opening a link, getting the shared memory, copying a large
 * message) are done without the lock, by the first thread that finds them.
 *
 * Only one thread at a time, the owner, sleeps until a frame comes, since an event wakes one. Other threads
 * that wait sleep on a condition variable, until a work is complete or there is no owner any more.
 *
 * The engine's thread starts with the first post that is not done at once. It must not compete with a program
 * that waits itself, so it sleeps for a moment before it becomes the owner, and longer each time it finds a
 * thread of the program waiting; this also spares a post the system call to wake it. A thread of the program
 * that begins to wait becomes the owner at once, without waiting for it. The engine's thread may then have
 * taken a wake-up that was meant for the new owner, and passes it on. It sleeps while nothing is posted. */
#include "p2p/p2p_internal.h"
#include "p2p/p2p_link.h"

#include "base/fail.h"

#include <stdlib.h>

enum {
    NAP_NS = 1000000,      /* of the engine's thread, before it becomes the owner */
    LONG_NAP_NS = 8000000, /* the same where a thread of the program waits */
};

/* ---- Reading and writing -------------------------------------------------------------------------- */

void td__peer_flush(struct td__p2p *p2p, int rank)
{
    struct td__peer *peer = &p2p->peers[rank];
    bool here = peer->local >= 0;
    struct td__post *post;
    if (!here || p2p->attached)
        while ((post = TAILQ_FIRST(&peer->queue)))
            if (!(here ? td__p2p_shm_write(p2p, rank, post) : td__p2p_tcp_write(p2p, rank, post)))
                break;
    bool stalled = here && p2p->attached && !TAILQ_EMPTY(&peer->queue);
    p2p->stalled += stalled - peer->stalled;
    peer->stalled = stalled;
}

/* True when something could be written. */
static bool flush_locals(struct td__p2p *p2p)
{
    bool happened = false;
    for (int i = 0; i < p2p->local_size; i++) {
        struct td__peer *peer = &p2p->peers[p2p->locals[i]];
        uint64_t before = peer->writes.total;
        if (!TAILQ_EMPTY(&peer->queue))
            td__peer_flush(p2p, p2p->locals[i]);
        happened |= peer->writes.total != before;
    }
    return happened;
}

static bool has_job(const struct td__p2p *p2p)
{
    return (p2p->attach_wanted && !p2p->attaching) || p2p->connects_wanted ||
           !TAILQ_EMPTY(&p2p->copies);
}

static void set_watch(struct td__p2p *p2p)
{
    atomic_store_explicit(&p2p->watch, !TAILQ_EMPTY(&p2p->active) || p2p->stalled || has_job(p2p),
                          memory_order_relaxed);
}

bool td__p2p_pump(struct td__p2p *p2p)
{
    bool happened = false;
    if (p2p->attached)
        happened |= td__p2p_shm_read(p2p);
    if (p2p->epoll >= 0)
        happened |= td__p2p_tcp_look(p2p);
    if (!TAILQ_EMPTY(&p2p->active))
        happened |= td__large_look(p2p);
    if (p2p->stalled)
        happened |= flush_locals(p2p);
    set_watch(p2p);
    return happened || !TAILQ_EMPTY(&p2p->finished);
}

static void complete_post(struct td__post *post)
{
    if (post->waited) { /* the waiting thread owns it, and may free it at once */
        atomic_store_explicit(post->waited, true, memory_order_release);
        return;
    }
    bool received = !td__is_send(post) && !post->status;
    if (post->status)
        td_fail(post->status, "%s", post->why ? post->why : "out of memory");
    if (post->work)
        td_work_complete(post->work, post->status, received ? post->peer : -1,
                         received ? post->message_size : 0);
    free(post->why);
    free(post);
}

void td__p2p_settle(struct td__p2p *p2p)
{
    struct td__post_list list = TAILQ_HEAD_INITIALIZER(list);
    if (TAILQ_EMPTY(&p2p->finished))
        return;
    TAILQ_CONCAT(&list, &p2p->finished, entry);
    pthread_mutex_unlock(&p2p->lock);
    for (struct td__post *post; (post = TAILQ_FIRST(&list));) {
        TAILQ_REMOVE(&list, post, entry);
        complete_post(post);
    }
    pthread_mutex_lock(&p2p->lock);
    if (p2p->waiters)
        pthread_cond_broadcast(&p2p->changed);
    if (p2p->sleepers)
        td__p2p_wake(p2p);
}

static void attach(struct td__p2p *p2p, td__deadline deadline)
{
    deadline = td__deadline_earlier(deadline, p2p->next_deadline);
    p2p->attaching = true;
    void *memory;
    pthread_mutex_unlock(&p2p->lock);
    td_status status = p2p->options.shared(p2p->options.shared_arg, deadline, &memory);
    pthread_mutex_lock(&p2p->lock);
    p2p->attaching = false;
    if (p2p->unattached)
        pthread_cond_broadcast(&p2p->changed);
    if (status == TD_ERR_TIMEOUT) {
        td__expire(p2p, td__now_ns());
        p2p->attach_wanted = !LIST_EMPTY(&p2p->all);
        return;
    }
    p2p->attach_wanted = false;
    if (!status) {
        p2p->alerted = true; /* for frames of ranks that have ended or left since */
        td__p2p_shm_begin(p2p, memory);
        flush_locals(p2p);
        return;
    }
    for (struct td__post *post = LIST_FIRST(&p2p->all), *next; post; post = next) {
        next = LIST_NEXT(post, in_all);
        if (post->peer == TD_ANY_SOURCE || p2p->peers[post->peer].local >= 0)
            td__post_finish(p2p, post, status);
    }
}

/* One job, without the lock in between; false where there is none. */
static bool do_job(struct td__p2p *p2p, td__deadline deadline)
{
    if (p2p->attach_wanted && !p2p->attaching) {
        attach(p2p, deadline);
        return true;
    }
    if (p2p->connects_wanted && td__p2p_tcp_connect(p2p))
        return true;
    return td__large_copy(p2p);
}

/* ---- Threads of the program ------------------------------------------------------------------ */

static bool wait_for_owner(struct td__p2p *p2p, td__deadline deadline)
{
    p2p->waiters++;
    bool in_time = td__cond_wait(&p2p->changed, &p2p->lock, deadline);
    p2p->waiters--;
    return in_time;
}

/* The post that was waited for, where it is the only one that has ended: no other thread waits for it, so the
 * caller completes it without the lock. */
static struct td__post *take_only(struct td__p2p *p2p, const atomic_bool *complete)
{
    struct td__post *post = TAILQ_FIRST(&p2p->finished);
    if (!post || TAILQ_NEXT(post, entry) || !complete ||
        (post->waited != complete && post->complete != complete))
        return NULL;
    TAILQ_REMOVE(&p2p->finished, post, entry);
    return post;
}

/* One turn of a thread that makes progress: true when something happened. */
static bool take_turn(struct td__p2p *p2p, const struct td__p2p_wait *wait)
{
    if (wait->slept || p2p->alerted)
        td__p2p_check_deadlines(p2p);
    bool happened = do_job(p2p, wait->deadline);
    return td__p2p_pump(p2p) || happened;
}

static void stop_owning(struct td__p2p *p2p, struct td__p2p_wait *wait)
{
    td__p2p_wait_reset(wait);
    p2p->owner = TD__OWNER_NONE;
    if (p2p->waiters)
        pthread_cond_broadcast(&p2p->changed);
}

/* Returns a post that is left to be completed, or NULL. */
static struct td__post *wait_for(struct td__p2p *p2p, const atomic_bool *complete, int peer,
                                 td__deadline deadline)
{
    struct td__p2p_wait wait = {.deadline = deadline, .peer = peer};
    struct td__post *last = NULL;
    bool in_time = true;
    bool owner = false;
    for (;;) {
        bool happened = take_turn(p2p, &wait);
        if ((last = take_only(p2p, complete)))
            break;
        td__p2p_settle(p2p);
        if (td__is_set(complete) || !in_time)
            break;
        if (happened) {
            td__p2p_wait_reset(&wait);
            continue;
        }
        if (!owner && p2p->owner == TD__OWNER_PROGRAM) {
            td__p2p_wake_for_post(p2p);
            in_time = wait_for_owner(p2p, deadline);
            continue;
        }
        if (!owner) {
            bool depose = p2p->owner == TD__OWNER_THREAD;
            p2p->owner = TD__OWNER_PROGRAM;
            p2p->turns++;
            owner = true;
            if (depose)
                td__p2p_wake(p2p);
        }
        in_time = td__p2p_wait_step(p2p, &wait, complete);
    }
    if (owner) {
        stop_owning(p2p, &wait);
        if (p2p->thread_naps_long && !LIST_EMPTY(&p2p->all))
            pthread_cond_signal(&p2p->thread_wake);
    }
    return last;
}

void td__p2p_wait(struct td__p2p *p2p, const atomic_bool *complete, int peer, td__deadline deadline)
{
    struct td__post *last = wait_for(p2p, complete, peer, deadline);
    pthread_mutex_unlock(&p2p->lock);
    if (last)
        complete_post(last);
}

void td__p2p_progress(struct td__p2p *p2p, const atomic_bool *complete, int peer,
                      int64_t timeout_ms)
{
    if (td__is_set(complete))
        return;
    pthread_mutex_lock(&p2p->lock);
    if (timeout_ms > 0) {
        td__p2p_wait(p2p, complete, peer, td__deadline_in_ms(timeout_ms));
        return;
    }
    td__large_copy(p2p); /* the other jobs can take long: the engine's thread does them */
    td__p2p_pump(p2p);
    td__p2p_settle(p2p);
    td__p2p_wake_for_post(p2p);
    pthread_mutex_unlock(&p2p->lock);
}

/* ---- The engine's thread -------------------------------------------------------------------------- */

static void serve(struct td__p2p *p2p)
{
    struct td__p2p_wait wait = {.deadline = TD__NEVER, .peer = TD_ANY_SOURCE, .at_once = true};
    p2p->owner = TD__OWNER_THREAD;
    while (p2p->owner == TD__OWNER_THREAD && !LIST_EMPTY(&p2p->all) && !p2p->stopping) {
        bool happened = take_turn(p2p, &wait);
        td__p2p_settle(p2p);
        if (happened)
            td__p2p_wait_reset(&wait);
        else if (p2p->owner == TD__OWNER_THREAD)
            td__p2p_wait_step(p2p, &wait, NULL);
    }
    if (p2p->owner == TD__OWNER_THREAD) {
        stop_owning(p2p, &wait);
    } else if (wait.begun) {
        td__wait_event_wake(td__p2p_shm_own_event(p2p));
    }
}

static void *run(void *arg)
{
    struct td__p2p *p2p = arg;
    uint64_t seen = 0, turn = 0;
    int64_t nap = NAP_NS;
    pthread_mutex_lock(&p2p->lock);
    while (!p2p->stopping) {
        td__p2p_settle(p2p);
        if (LIST_EMPTY(&p2p->all) && p2p->posts == seen) {
            p2p->thread_rests = true;
            pthread_cond_wait(&p2p->thread_wake, &p2p->lock);
            p2p->thread_rests = false;
            nap = NAP_NS;
            continue;
        }
        seen = p2p->posts;
        p2p->thread_naps_long = nap > LONG_NAP_NS;
        td__cond_wait(&p2p->thread_wake, &p2p->lock, td__now_ns() + nap);
        p2p->thread_naps_long = false;
        if (p2p->owner != TD__OWNER_NONE || p2p->waiters || LIST_EMPTY(&p2p->all)) {
            /* Longer than LONG_NAP_NS only while one thread of the program keeps waiting. */
            int64_t longest = turn == p2p->turns ? TD__LONGEST_SLEEP_NS : LONG_NAP_NS;
            nap = nap * 2 < longest ? nap * 2 : longest;
            turn = p2p->turns;
        } else {
            serve(p2p);
            nap = NAP_NS;
        }
    }
    pthread_mutex_unlock(&p2p->lock);
    return NULL;
}

void td__p2p_attend(struct td__p2p *p2p)
{
    p2p->posts++;
    set_watch(p2p);
    if (p2p->thread_rests)
        pthread_cond_signal(&p2p->thread_wake);
    else if (!p2p->thread_runs && !p2p->stopping)
        p2p->thread_runs = !td__thread_start(&p2p->thread, "td-messages", run, p2p);
    if (p2p->sleepers && has_job(p2p))
        td__p2p_wake(p2p);
    td__p2p_wake_for_post(p2p);
}

void td__p2p_stop(struct td__p2p *p2p)
{
    pthread_mutex_lock(&p2p->lock);
    bool runs = p2p->thread_runs;
    p2p->stopping = true;
    p2p->thread_runs = false;
    pthread_cond_signal(&p2p->thread_wake);
    td__p2p_wake(p2p);
    pthread_mutex_unlock(&p2p->lock);
    if (runs)
        pthread_join(p2p->thread, NULL);
}
