/* Waiting for a frame in a ring or on a link: spinning, yielding, sleeping (base/wait.h).
 *
 * With rings alone, a thread waits on its event in shared memory (wait_event.h). With links alone, it spins and
 * yields, and then sleeps in epoll. With both it spins and yields on both, and then sleeps on the event; the
 * endpoint's thread signals it when a link is ready (td__endpoint_wake_on()).
 *
 * A sleeper is woken by frames, by failures, and by posts of other threads that have an earlier deadline. */
#include "p2p/p2p_internal.h"
#include "p2p/p2p_link.h"

enum { PEEKS = 8 }; /* at the rings, between two steps of waiting */

void td__p2p_wake(struct td__p2p *p2p)
{
    if (p2p->attached)
        td__wait_event_signal(td__p2p_shm_own_event(p2p));
    if (p2p->epoll >= 0 && p2p->sleepers)
        td__p2p_tcp_wake(p2p);
    if (p2p->unattached)
        pthread_cond_broadcast(&p2p->changed);
}

static td__deadline next_look(const struct td__p2p *p2p)
{
    return td__deadline_earlier(p2p->next_deadline, p2p->next_check);
}

void td__p2p_wake_for_post(struct td__p2p *p2p)
{
    if (p2p->sleepers && next_look(p2p) < p2p->asleep_until)
        td__p2p_wake(p2p);
}

void td__p2p_wait_reset(struct td__p2p_wait *wait)
{
    if (wait->begun)
        td__waiting_end(&wait->waiting);
    wait->begun = false;
    wait->slept = false;
    wait->backoff.begun = 0;
}

/* A pause of the processor takes longer than a message: polls several times before the next one. */
static bool peek_often(struct td__p2p *p2p)
{
    for (int i = 0; i < PEEKS; i++)
        if (td__p2p_shm_peek(p2p))
            return true;
    return false;
}

/* Rings, and perhaps links. */
static bool wait_on_event(struct td__p2p *p2p, struct td__p2p_wait *wait,
                          const atomic_bool *complete, bool links)
{
    struct td__waiting *waiting = &wait->waiting;
    struct td__wait_event *event = td__p2p_shm_own_event(p2p);
    if (!wait->begun && (wait->at_once || links))
        td__waiting_begin_asleep(waiting, event, wait->deadline);
    else if (!wait->begun)
        td__waiting_begin(waiting, event, p2p->oversubscribed, wait->deadline);
    wait->begun = true;
    waiting->wake_at = wait->until;
    if (links && waiting->announced)
        td__endpoint_wake_on(p2p->options.endpoint, p2p->epoll);
    bool in_time;
    do {
        waiting->elsewhere = p2p->oversubscribed && !wait->at_once && !waiting->spins &&
                             td__p2p_shm_elsewhere(p2p, wait->peer);
        in_time = td__waiting_step(waiting);
        wait->slept = waiting->announced;
    } while (in_time && !wait->slept && !td__is_set(complete) && !peek_often(p2p) &&
             !atomic_load_explicit(&p2p->watch, memory_order_relaxed));
    return in_time;
}

static bool sleep_on_links(struct td__p2p *p2p, struct td__p2p_wait *wait)
{
    int64_t now = td__now_ns();
    if (now >= wait->deadline)
        return false;
    td__deadline end = td__deadline_earlier(td__deadline_earlier(wait->deadline, wait->until),
                                            now + TD__LONGEST_SLEEP_NS);
    td__p2p_tcp_sleep(p2p, end > now ? end - now : 0);
    wait->slept = true;
    return true;
}

/* Without the lock, `links` or rings or both; false when the deadline has passed. */
static bool wait_once(struct td__p2p *p2p, struct td__p2p_wait *wait, const atomic_bool *complete,
                      bool links, bool rings)
{
    if (links && !wait->at_once && !wait->slept &&
        td__backoff(&wait->backoff, p2p->maybe_oversubscribed))
        return !td__deadline_passed(wait->deadline);
    return rings ? wait_on_event(p2p, wait, complete, links) : sleep_on_links(p2p, wait);
}

bool td__p2p_wait_step(struct td__p2p *p2p, struct td__p2p_wait *wait, const atomic_bool *complete)
{
    wait->until = p2p->asleep_until = next_look(p2p);
    if (p2p->epoll < 0 && !p2p->attached) {
        /* Another thread is getting the shared memory, and signals when it has it. */
        p2p->sleepers++;
        p2p->unattached++;
        td__cond_wait(&p2p->changed, &p2p->lock, td__deadline_earlier(wait->deadline, wait->until));
        p2p->unattached--;
        p2p->sleepers--;
        wait->slept = true;
        return !td__deadline_passed(wait->deadline);
    }
    bool links = p2p->epoll >= 0, rings = p2p->attached; /* which others set, with the lock */
    p2p->sleepers++;
    pthread_mutex_unlock(&p2p->lock);
    bool in_time = wait_once(p2p, wait, complete, links, rings);
    pthread_mutex_lock(&p2p->lock);
    p2p->sleepers--;
    return in_time;
}

void td__p2p_check_deadlines(struct td__p2p *p2p)
{
    int64_t now = td__now_ns();
    td__expire(p2p, now);
    if (!LIST_EMPTY(&p2p->all) && (p2p->alerted || now >= p2p->next_check))
        td__p2p_check_peers(p2p, false);
}
