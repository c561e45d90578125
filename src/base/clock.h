/* Monotonic time and deadlines. A deadline is an absolute time, so that several waits can share it. */
#ifndef TD_BASE_CLOCK_H
#define TD_BASE_CLOCK_H

#include <limits.h>
#include <stdbool.h>
#include <stdint.h>
#include <time.h>

typedef int64_t td__deadline; /* nanoseconds of CLOCK_MONOTONIC */

#define TD__NEVER INT64_MAX

static inline int64_t td__now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/** The wall clock, in nanoseconds. */
static inline int64_t td__wall_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static inline td__deadline td__deadline_in_ms(int64_t ms)
{
    int64_t now = td__now_ns();
    return ms > (INT64_MAX - now) / 1000000 ? TD__NEVER : now + ms * 1000000;
}

static inline bool td__deadline_passed(td__deadline deadline)
{
    return deadline != TD__NEVER && td__now_ns() >= deadline;
}

static inline td__deadline td__deadline_earlier(td__deadline a, td__deadline b)
{
    return a < b ? a : b;
}

/** Milliseconds left, rounded up, for poll(): 0 when it has passed, -1 for TD__NEVER. */
static inline int td__deadline_poll_ms(td__deadline deadline)
{
    if (deadline == TD__NEVER)
        return -1;
    int64_t left = deadline - td__now_ns();
    if (left <= 0)
        return 0;
    int64_t ms = (left + 999999) / 1000000;
    return ms > INT_MAX ? INT_MAX : (int)ms;
}

static inline struct timespec td__timespec(int64_t ns)
{
    return (struct timespec){.tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000};
}

static inline void td__sleep_ns(int64_t ns)
{
    struct timespec pause = td__timespec(ns);
    nanosleep(&pause, NULL);
}

/** Exponential backoff: sleeps for *pause nanoseconds, not past the deadline, and doubles it up to `longest`.
 *  False, at once, when the deadline has passed. */
static inline bool td__pause_longer(int64_t *pause, int64_t longest, td__deadline deadline)
{
    int64_t left = deadline - td__now_ns();
    if (left <= 0)
        return false;
    td__sleep_ns(*pause < left ? *pause : left);
    *pause = 2 * *pause < longest ? 2 * *pause : longest;
    return true;
}

#endif
