/* How long a thread spins, how long it yields, and when it sleeps: the one policy for all waits.
 *
 *     spin     poll the condition in a loop, with a pause of the processor in between
 *     yield    poll the condition, and yield the processor in between
 *     sleep    on a futex, on a condition variable or in poll(), until woken; the caller does that
 *
 *                                   a poll costs     spins               then yields
 *     first polls of a small call   a cache line     TD__FIRST_POLLS     no                 shm, p2p rings
 *     memory                        a cache line     100 polls, 5 µs     for 1 ms           peer/wait_event.c
 *     descriptors                   a system call    TD__SPIN_NS         to TD__YIELD_NS    td__backoff()
 *
 * Spinning is fastest if the other side runs on a processor of its own. If there are more ranks than processors
 * (`oversubscribed`), the other side may need this one: a waiter polls once, and yields at once.
 *
 * A yield returns within microseconds if only the two sides of an exchange run. If an unrelated process computes on
 * the same processor, a yield costs a whole time slice (3 ms and more), while a woken sleeper gets the processor at
 * once. So a yield that took TD__YIELD_LIMIT_NS ends the yielding: for this wait, and with a td__backoff that is
 * kept, for TD__YIELD_REST_NS.
 *
 * A sleeper is woken by the event that it waits for, and by a failure (peer/endpoint.h, «Waiters»). No condition
 * depends on periodic wake-ups; TD__LONGEST_SLEEP_NS is a safety net for signals that the kernel made unreliable
 * (peer/wait_event.c). */
#ifndef TD_BASE_WAIT_H
#define TD_BASE_WAIT_H

#include "base/clock.h"

#include <sched.h>
#include <stdbool.h>

enum {
    TD__FIRST_POLLS = 40,
    TD__SPIN_NS = 20000,
    TD__YIELD_NS = 60000, /* from the first unsuccessful poll */
    TD__YIELD_LIMIT_NS = 500000,
    TD__YIELD_REST_NS = 50000000,
    TD__LONGEST_SLEEP_NS = 1000000000,
};

/** Between two polls: leaves the cache line to its writer for a moment. */
static inline void td__pause_processor(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/** With how many polls a wait begins. */
static inline unsigned td__first_polls(bool oversubscribed)
{
    return oversubscribed ? 1 : TD__FIRST_POLLS;
}

/** After an unsuccessful poll: pauses, or returns false if none of the `polls` is left. */
static inline bool td__poll_again(unsigned *polls)
{
    if (!--*polls)
        return false;
    td__pause_processor();
    return true;
}

/** Yields once at the time *now, and sets it to the time after. False if an unrelated process got the processor. */
static inline bool td__yield(int64_t *now)
{
    int64_t before = *now;
    sched_yield();
    *now = td__now_ns();
    return *now - before <= TD__YIELD_LIMIT_NS;
}

/** The state of a thread that polls descriptors. Zero-initialized. */
struct td__backoff {
    int64_t begun;      /* the time of the first unsuccessful poll; 0: none yet */
    int64_t rest_until; /* no yields before that time */
    int64_t yield_ns;   /* how long it yields; 0: TD__YIELD_NS */
};

/** After an unsuccessful poll: returns true for the next poll, or false if the caller should sleep. The caller sets
 *  `begun` to 0 after a successful poll. */
static inline bool td__backoff(struct td__backoff *backoff, bool oversubscribed)
{
    int64_t now = td__now_ns();
    if (!backoff->begun)
        backoff->begun = now;
    if (!oversubscribed && now < backoff->begun + TD__SPIN_NS)
        return true;
    if (now >= backoff->begun + (backoff->yield_ns ? backoff->yield_ns : TD__YIELD_NS) ||
        now < backoff->rest_until)
        return false;
    if (!td__yield(&now))
        backoff->rest_until = now + TD__YIELD_REST_NS;
    return true;
}

#endif
