/* Waiting for another process (or thread) that writes to shared memory, and waking it.
 *
 *     waiter                                      whoever changes the condition
 *     struct td__waiting w;                       change it (an atomic store)
 *     td__waiting_begin(&w, bell, …);             td__bell_ring(bell);
 *     while (!condition)
 *         if (!td__waiting_step(&w)) … too late
 *     td__waiting_end(&w);
 *
 * A step spins, yields or sleeps. Sleeping is announced first, and the condition looked at once more
 * before it begins; ringing costs a load as long as nobody sleeps: not even a fence, since the one who
 * sleeps makes all processors pass one (membarrier). One waiter at a time has a bell.
 *
 * How long to do what: where there is a processor for everyone, the other side is at work and spinning
 * is the fastest; where there is not (`crowded`), it needs this processor, and gets it by a yield. A
 * yield that took long has met a third who computes: then only sleeping gives the processor back at
 * once when the bell rings. */
#ifndef TD_TRANSPORT_BELL_H
#define TD_TRANSPORT_BELL_H

#include "base/clock.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* In memory that both sides see; zero at first. */
struct td__bell {
    _Atomic uint32_t sleeping; /* the futex: 1 while the waiter sleeps or is about to */
};

struct td__waiting {
    struct td__bell *bell;
    td__deadline deadline;
    int64_t until;  /* when to stop yielding, once that has begun */
    unsigned spins; /* left */
    bool slept;     /* the last step has slept a whole slice, or was woken */
    bool announced; /* the next step sleeps */
    int64_t slice;  /* the longest sleep, so that the caller looks at other things in between */
    _Atomic uint32_t *sleepers; /* NULL, or a count of those who sleep, for those who ring many */
};

/** `crowded`: there are more ranks than processors. Sleeps of at most `slice_ns` at a time. */
void td__waiting_begin(struct td__waiting *waiting, struct td__bell *bell, bool crowded,
                       int64_t slice_ns, td__deadline deadline);

/** How often this thread has begun to wait: a call during which it did not was over within microseconds,
 *  unless there was much to do. */
extern _Thread_local unsigned td__waits;

/** One step of waiting; false when the deadline has passed. */
bool td__waiting_step(struct td__waiting *waiting);

void td__waiting_end(struct td__waiting *waiting);

void td__bell_wake(struct td__bell *bell);

/** True where whoever is about to sleep can have all processors pass a barrier: then those who ring need
 *  none of their own. Set before the first ring. */
extern bool td__bells_are_cheap;

/** Between a change and the look at who sleeps: the change is seen by others before that look. */
static inline void td__bell_fence(void)
{
#if defined(__SANITIZE_THREAD__)
    static _Atomic int word; /* the sanitizer does not know fences */
    atomic_fetch_add(&word, 1);
#else
    if (td__bells_are_cheap)
        atomic_signal_fence(memory_order_seq_cst);
    else
        atomic_thread_fence(memory_order_seq_cst);
#endif
}

/** Wakes the waiter where it sleeps. The change must be made before, with any memory order. */
static inline void td__bell_ring(struct td__bell *bell)
{
    td__bell_fence();
    if (atomic_load_explicit(&bell->sleeping, memory_order_relaxed))
        td__bell_wake(bell);
}

/** How many processors this process may run on. */
int td__processors(void);

#endif
