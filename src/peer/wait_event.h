/* Waiting for another process (or thread) that writes to shared memory, and waking it.
 *
 *     waiter                                      the side that changes the condition
 *     struct td__waiting w;                       change it (an atomic store)
 *     td__waiting_begin(&w, event, …);            td__wait_event_signal(event);
 *     while (!condition)
 *         if (!td__waiting_step(&w)) … timed out
 *     td__waiting_end(&w);
 *
 * A step spins, yields or sleeps (base/wait.h). The waiter announces that it will sleep, and checks the
 * condition once more before it does; a signal after the announcement ends the sleep, or prevents it. A signal
 * costs one load as long as no waiter sleeps, and not even a fence: the waiter makes all processors pass one
 * (membarrier). An event has one waiter at a time.
 *
 * On an oversubscribed host the other side may need this processor, and gets it by a yield. But if it last ran on
 * another processor, a yield would only give this one to another waiter, and return two context switches later; so
 * the waiter spins for a moment between two yields. */
#ifndef TD_PEER_WAIT_EVENT_H
#define TD_PEER_WAIT_EVENT_H

#include "base/wait.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* In memory that both sides see; zero at first. */
struct td__wait_event {
    _Atomic uint32_t sleeping; /* the futex: 1 while the waiter sleeps or is about to */
    _Atomic int processor; /* on which its owner last ran, plus one; 0: not known; negative while
                                  it yields */
};

struct td__waiting {
    struct td__wait_event *event;
    td__deadline deadline;
    int64_t until;   /* when to stop yielding, once that has begun */
    int64_t now;     /* the time after the last yield; 0: not known */
    unsigned spins;  /* left */
    unsigned turn;   /* spins between two yields, if `elsewhere` */
    bool elsewhere;  /* set by the caller: no process that it waits for needs this processor */
    bool spun;       /* since the last yield */
    unsigned sleeps; /* how many steps have slept */
    bool announced;  /* the next step sleeps: the caller checks for failures before */
    td__deadline
        wake_at; /* set by the caller: when to return from sleep at the latest; TD__NEVER at first */
    int64_t longest_sleep; /* TD__LONGEST_SLEEP_NS, or a test's */
    _Atomic uint32_t
        *sleepers; /* NULL, or a count of sleeping waiters, for a caller that signals many events */
};

/** `oversubscribed`: with how many other processes each process shares a processor; 0: each has its own. */
void td__waiting_begin(struct td__waiting *waiting, struct td__wait_event *event,
                       unsigned oversubscribed, td__deadline deadline);

/** Without spinning and yielding: the first step announces, the second one sleeps. */
void td__waiting_begin_asleep(struct td__waiting *waiting, struct td__wait_event *event,
                              td__deadline deadline);

/** How often this thread has begun to wait. A call during which it does not change took only the time of its own
 *  work. */
extern _Thread_local unsigned td__waits;

/** One step of waiting; false when the deadline has passed. */
bool td__waiting_step(struct td__waiting *waiting);

/** Whether the last step has yielded, and not to an unrelated process. */
static inline bool td__waiting_yields(const struct td__waiting *waiting)
{
    return waiting->now && waiting->until > 1;
}

void td__waiting_end(struct td__waiting *waiting);

void td__wait_event_wake(struct td__wait_event *event);

/** True if a waiter can make all processors pass a barrier: then a signal needs no fence. Set before the first
 *  signal. */
extern bool td__wait_events_are_cheap;

/** Between a change and the check for a sleeping waiter: orders the two for all processors. */
static inline void td__wait_event_fence(void)
{
#if defined(__SANITIZE_THREAD__)
    static _Atomic int word; /* the sanitizer does not know fences */
    atomic_fetch_add(&word, 1);
#else
    if (td__wait_events_are_cheap)
        atomic_signal_fence(memory_order_seq_cst);
    else
        atomic_thread_fence(memory_order_seq_cst);
#endif
}

/** Wakes the waiter if it sleeps. The change must be made before, with any memory order. */
static inline void td__wait_event_signal(struct td__wait_event *event)
{
    td__wait_event_fence();
    if (atomic_load_explicit(&event->sleeping, memory_order_relaxed))
        td__wait_event_wake(event);
}

/** How many td__pause_processor() take about `ns`, 64 at most; measured, since processors differ by a factor of ten. */
unsigned td__pauses_in(int64_t ns);

/** Prefetches a cache line that will be written soon, exclusively for this processor. */
static inline void td__claim_line(const void *line)
{
#if defined(__x86_64__)
    __asm__ volatile("prefetchw %0" : : "m"(*(const char *)line));
#else
    __builtin_prefetch(line, 1);
#endif
}

/** Records on which processor the owner of the event runs, for the processes that wait for it. */
static inline void td__wait_event_set_processor(struct td__wait_event *event)
{
    int here = sched_getcpu() + 1;
    if (atomic_load_explicit(&event->processor, memory_order_relaxed) != here)
        atomic_store_explicit(&event->processor, here, memory_order_relaxed);
}

/** The processor on which the owner of an event last ran, plus one. */
static inline int td__wait_event_processor(const struct td__wait_event *event)
{
    int at = atomic_load_explicit(&event->processor, memory_order_relaxed);
    return at < 0 ? -at : at;
}

/** Whether the owner of an event is in a yield. */
static inline bool td__wait_event_is_idle(const struct td__wait_event *event)
{
    return atomic_load_explicit(&event->processor, memory_order_relaxed) < 0;
}

/** How many processors this process may run on. */
int td__processors(void);

/** With how many other ranks each of `ranks` on this host shares a processor. */
static inline unsigned td__crowd(int ranks)
{
    return (unsigned)((ranks - 1) / td__processors());
}

#endif
