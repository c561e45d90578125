/* Waiting for something to happen, in rings or on links: from spinning to sleeping.
 *
 * With rings alone, bell.h does it. With links alone, a thread looks at them for a while and then sleeps
 * in epoll. With both, nothing wakes a sleeper for both kinds, so it sleeps on the links, but never
 * longer than a millisecond at a time, and looks at the rings in between. */
#include "group/messages_inside.h"
#include "group/messages_link.h"

#include <sched.h>

enum {
    SLICE_NS = 50000000, /* the longest sleep before looking at deadlines */
    MIXED_NS = 1000000,  /* the longest sleep on links, with rings to look at, too */
    PEEKS = 8,           /* at the rings, between two steps of waiting */
    SPIN_NS = 50000,     /* looking at links before sleeping */
};

void td__messages_nudge(struct td__messages *messages)
{
    if (messages->attached)
        td__bell_ring(td__shm_own_bell(messages));
    if (messages->epoll >= 0 && messages->sleepers)
        td__tcp_nudge(messages);
}

void td__vigil_reset(struct td__vigil *vigil)
{
    if (vigil->begun)
        td__waiting_end(&vigil->waiting);
    vigil->begun = false;
    vigil->slept = false;
    vigil->spins_until = 0;
}

/* A pause of the processor takes longer than a message: looks several times before the next one. */
static bool peek_often(struct td__messages *messages)
{
    for (int i = 0; i < PEEKS; i++)
        if (td__shm_peek(messages))
            return true;
    return false;
}

/* Rings and the bell. */
static bool wait_on_bell(struct td__messages *messages, struct td__vigil *vigil,
                         const atomic_bool *complete)
{
    struct td__waiting *waiting = &vigil->waiting;
    if (!vigil->begun) {
        td__waiting_begin(waiting, td__shm_own_bell(messages), messages->crowded, SLICE_NS,
                          vigil->deadline);
        vigil->begun = true;
        if (vigil->drowsy) {
            waiting->spins = 0;
            waiting->until = 1;
        }
    }
    bool in_time;
    do {
        waiting->elsewhere = messages->crowded && !vigil->drowsy && !waiting->spins &&
                             td__shm_elsewhere(messages, vigil->peer);
        in_time = td__waiting_step(waiting);
        vigil->slept = waiting->announced;
    } while (in_time && !vigil->slept && !td__is_set(complete) && !peek_often(messages) &&
             !atomic_load_explicit(&messages->watch, memory_order_relaxed));
    return in_time;
}

/* Links, and perhaps rings: those have to be looked at from time to time. */
static bool wait_on_links(struct td__messages *messages, struct td__vigil *vigil, bool rings)
{
    int64_t now = td__now_ns();
    if (now >= vigil->deadline)
        return false;
    if (!vigil->spins_until)
        vigil->spins_until = vigil->drowsy ? 1 : now + SPIN_NS;
    if (now < vigil->spins_until) {
        if (messages->maybe_crowded)
            sched_yield();
        return true;
    }
    int64_t left = vigil->deadline - now;
    int64_t most = rings ? MIXED_NS : SLICE_NS;
    td__tcp_sleep(messages, left < most ? left : most);
    vigil->slept = true;
    return true;
}

/* Waits a moment without the lock; false when it is too late. */
bool td__vigil_keep(struct td__messages *messages, struct td__vigil *vigil,
                    const atomic_bool *complete)
{
    bool in_time;
    if (messages->epoll < 0 && !messages->attached) {
        /* Another thread is getting the shared memory. */
        messages->waiters++;
        td__cond_wait(&messages->changed, &messages->lock,
                      td__deadline_earlier(vigil->deadline, td__now_ns() + MIXED_NS));
        messages->waiters--;
        vigil->slept = true;
        return !td__deadline_passed(vigil->deadline);
    }
    bool links = messages->epoll >= 0,
         rings = messages->attached; /* which others set, with the lock */
    messages->sleepers++;
    pthread_mutex_unlock(&messages->lock);
    if (links)
        in_time = wait_on_links(messages, vigil, rings);
    else
        in_time = wait_on_bell(messages, vigil, complete);
    pthread_mutex_lock(&messages->lock);
    messages->sleepers--;
    return in_time;
}

void td__messages_look_at_clock(struct td__messages *messages)
{
    int64_t now = td__now_ns();
    td__expire(messages, now);
    if (now < messages->next_pulse || !messages->pending)
        return;
    messages->next_pulse = now + SLICE_NS;
    td__messages_feel_pulse(messages, false);
}
