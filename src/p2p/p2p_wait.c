/* Waiting for something to happen, in rings or on links: from spinning to sleeping.
 *
 * With rings alone, wait_event.h does it. With links alone, a thread looks at them for a while and then sleeps
 * in epoll. With both, nothing wakes a sleeper for both kinds, so it sleeps on the links, but never
 * longer than a millisecond at a time, and looks at the rings in between. */
#include "p2p/p2p_internal.h"
#include "p2p/p2p_link.h"

#include <sched.h>

enum {
    SLICE_NS = 50000000, /* the longest sleep before looking at deadlines */
    MIXED_NS = 1000000,  /* the longest sleep on links, with rings to look at, too */
    PEEKS = 8,           /* at the rings, between two steps of waiting */
    SPIN_NS = 50000,     /* looking at links before sleeping */
};

void td__p2p_wake(struct td__p2p *p2p)
{
    if (p2p->attached)
        td__wait_event_signal(td__p2p_shm_own_event(p2p));
    if (p2p->epoll >= 0 && p2p->sleepers)
        td__p2p_tcp_wake(p2p);
}

void td__p2p_wait_reset(struct td__p2p_wait *wait)
{
    if (wait->begun)
        td__waiting_end(&wait->waiting);
    wait->begun = false;
    wait->slept = false;
    wait->spins_until = 0;
}

/* A pause of the processor takes longer than a message: looks several times before the next one. */
static bool peek_often(struct td__p2p *p2p)
{
    for (int i = 0; i < PEEKS; i++)
        if (td__p2p_shm_peek(p2p))
            return true;
    return false;
}

/* Rings and the event. */
static bool wait_on_event(struct td__p2p *p2p, struct td__p2p_wait *wait,
                          const atomic_bool *complete)
{
    struct td__waiting *waiting = &wait->waiting;
    if (!wait->begun) {
        td__waiting_begin(waiting, td__p2p_shm_own_event(p2p), p2p->oversubscribed, SLICE_NS,
                          wait->deadline);
        wait->begun = true;
        if (wait->drowsy) {
            waiting->spins = 0;
            waiting->until = 1;
        }
    }
    bool in_time;
    do {
        waiting->elsewhere = p2p->oversubscribed && !wait->drowsy && !waiting->spins &&
                             td__p2p_shm_elsewhere(p2p, wait->peer);
        in_time = td__waiting_step(waiting);
        wait->slept = waiting->announced;
    } while (in_time && !wait->slept && !td__is_set(complete) && !peek_often(p2p) &&
             !atomic_load_explicit(&p2p->watch, memory_order_relaxed));
    return in_time;
}

/* Links, and perhaps rings: those have to be looked at from time to time. */
static bool wait_on_links(struct td__p2p *p2p, struct td__p2p_wait *wait, bool rings)
{
    int64_t now = td__now_ns();
    if (now >= wait->deadline)
        return false;
    if (!wait->spins_until)
        wait->spins_until = wait->drowsy ? 1 : now + SPIN_NS;
    if (now < wait->spins_until) {
        if (p2p->maybe_oversubscribed)
            sched_yield();
        return true;
    }
    int64_t left = wait->deadline - now;
    int64_t most = rings ? MIXED_NS : SLICE_NS;
    td__p2p_tcp_sleep(p2p, left < most ? left : most);
    wait->slept = true;
    return true;
}

/* Waits a moment without the lock; false when it is too late. */
bool td__p2p_wait_step(struct td__p2p *p2p, struct td__p2p_wait *wait, const atomic_bool *complete)
{
    bool in_time;
    if (p2p->epoll < 0 && !p2p->attached) {
        /* Another thread is getting the shared memory. */
        p2p->waiters++;
        td__cond_wait(&p2p->changed, &p2p->lock,
                      td__deadline_earlier(wait->deadline, td__now_ns() + MIXED_NS));
        p2p->waiters--;
        wait->slept = true;
        return !td__deadline_passed(wait->deadline);
    }
    bool links = p2p->epoll >= 0, rings = p2p->attached; /* which others set, with the lock */
    p2p->sleepers++;
    pthread_mutex_unlock(&p2p->lock);
    if (links)
        in_time = wait_on_links(p2p, wait, rings);
    else
        in_time = wait_on_event(p2p, wait, complete);
    pthread_mutex_lock(&p2p->lock);
    p2p->sleepers--;
    return in_time;
}

void td__p2p_check_deadlines(struct td__p2p *p2p)
{
    int64_t now = td__now_ns();
    td__expire(p2p, now);
    if (now < p2p->next_pulse || !p2p->pending)
        return;
    p2p->next_pulse = now + SLICE_NS;
    td__p2p_check_peers(p2p, false);
}
