/* Waiting a moment without sleeping, where others may need the processor.
 *
 * A yield returns within microseconds where only the two sides of an exchange run. Where another
 * process computes on the same processor it costs a whole time slice (3 ms and more), while a sleeper that is
 * woken takes the processor at once. So a yield that took YIELD_LIMIT ends spinning for REST. */
#ifndef TD_BASE_SPIN_H
#define TD_BASE_SPIN_H

#include "base/clock.h"

#include <sched.h>

struct td__spin {
    int64_t rest_until; /* no spinning before */
};

enum { TD__SPIN_YIELD_LIMIT_NS = 1000000, TD__SPIN_REST_NS = 50000000 };

/** Gives the processor away for a moment; false when the caller should sleep instead, because `end`
 *  has passed or the processor is wanted by others. */
static inline bool td__spin_until(struct td__spin *spin, int64_t end)
{
    int64_t before = td__now_ns();
    if (before >= end || before < spin->rest_until)
        return false;
    sched_yield();
    int64_t after = td__now_ns();
    if (after - before > TD__SPIN_YIELD_LIMIT_NS)
        spin->rest_until = after + TD__SPIN_REST_NS;
    return true;
}

#endif
