/* How long a thread spins, how long it yields, and when it sleeps: the one policy for all waits.
 *
 *     spin     look at the condition again and again, with a pause of the processor in between
 *     yield    look, and give the processor away in between
 *     sleep    on a futex, on a condition variable or in poll(), until woken: the caller's part
 *
 *                                   a look costs     spins               then yields
 *     first looks of a small call   a cache line     TD__FIRST_LOOKS     no                 shm, p2p rings
 *     memory                        a cache line     100 looks, 5 µs     for 1 ms           peer/wait_event.c
 *     descriptors                   a system call    TD__SPIN_NS         to TD__YIELD_NS    td__backoff()
 *
 * Spinning is the fastest where the other side runs on a processor of its own. Where there are more ranks than
 * processors (`oversubscribed`) the other side may need this one: a waiter looks once, and yields at once.
 *
 * A yield returns within microseconds where only the two sides of an exchange run. Where an unrelated process
 * computes on the same processor, it costs a whole time slice (3 ms and more), while a sleeper that is woken
 * gets the processor at once. So a yield that took TD__YIELD_LIMIT_NS ends the yielding: for this wait, and
 * with a td__backoff that is kept, for TD__YIELD_REST_NS.
 *
 * A sleeper is woken by what it waits for, and by a failure (peer/endpoint.h, «Waiters»). Nothing is left to be
 * found by a sleeper that wakes from time to time; TD__LONGEST_SLEEP_NS is a safety net for signals that the
 * kernel made unreliable (peer/wait_event.c). */
#ifndef TD_BASE_WAIT_H
#define TD_BASE_WAIT_H

#include "base/clock.h"

#include <sched.h>
#include <stdbool.h>

enum {
    TD__FIRST_LOOKS = 40,
    TD__SPIN_NS = 20000,
    TD__YIELD_NS = 60000, /* from the first look in vain */
    TD__YIELD_LIMIT_NS = 500000,
    TD__YIELD_REST_NS = 50000000,
    TD__LONGEST_SLEEP_NS = 1000000000,
};

/** Between two looks: leaves the cache line to its writer for a moment. */
static inline void td__pause_processor(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/** How many first looks a wait begins with. */
static inline unsigned td__first_looks(bool oversubscribed)
{
    return oversubscribed ? 1 : TD__FIRST_LOOKS;
}

/** After a look in vain: pauses, or returns false when none of the `looks` is left. */
static inline bool td__look_again(unsigned *looks)
{
    if (!--*looks)
        return false;
    td__pause_processor();
    return true;
}

/** Yields once, at the time *now, which becomes the time after. False where an unrelated process got the
 *  processor. */
static inline bool td__yield(int64_t *now)
{
    int64_t before = *now;
    sched_yield();
    *now = td__now_ns();
    return *now - before <= TD__YIELD_LIMIT_NS;
}

/** The state of a thread that looks at descriptors; zero at first. */
struct td__backoff {
    int64_t begun;      /* the time of the first look in vain; 0: none yet */
    int64_t rest_until; /* no yields before */
};

/** After a look in vain: returns for the next look, or false when the caller should sleep. The caller sets
 *  `begun` to 0 when a look was not in vain. */
static inline bool td__backoff(struct td__backoff *backoff, bool oversubscribed)
{
    int64_t now = td__now_ns();
    if (!backoff->begun)
        backoff->begun = now;
    if (!oversubscribed && now < backoff->begun + TD__SPIN_NS)
        return true;
    if (now >= backoff->begun + TD__YIELD_NS || now < backoff->rest_until)
        return false;
    if (!td__yield(&now))
        backoff->rest_until = now + TD__YIELD_REST_NS;
    return true;
}

#endif
