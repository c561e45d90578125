/* Waiting and waking; see wait_event.h. */
#include "peer/wait_event.h"

#include <linux/futex.h>
#include <linux/membarrier.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
    SPINS = 100,        /* about 5 µs: the other side may be about to signal */
    TURN_SPINS = 60,    /* about as long as a context switch: the next process has run */
    YIELD_NS = 1000000, /* how long to yield before sleeping */
};

bool td__wait_events_are_cheap;

/* Every process that signals must be registered, or its stores could still be in its store buffer. All processes that
 * use an event run this code. If the kernel refuses it to one of them (a seccomp filter), a signal may be missed, and
 * the waiter wakes after TD__LONGEST_SLEEP_NS. */
#if !defined(__SANITIZE_THREAD__)
static void register_process(void)
{
    td__wait_events_are_cheap = !syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED,
                                         0, 0);
}

__attribute__((constructor)) static void make_wait_events_cheap(void)
{
    register_process();
    pthread_atfork(NULL, NULL, register_process);
}
#endif

static void all_processors_pass_a_barrier(void)
{
    atomic_thread_fence(memory_order_seq_cst);
    if (td__wait_events_are_cheap)
        syscall(SYS_membarrier, MEMBARRIER_CMD_GLOBAL_EXPEDITED, 0, 0);
}

static long futex(_Atomic uint32_t *word, int op, uint32_t value, const struct timespec *timeout)
{
    return syscall(SYS_futex, word, op, value, timeout, NULL, 0);
}

_Thread_local unsigned td__waits;

void td__waiting_begin(struct td__waiting *waiting, struct td__wait_event *event,
                       unsigned oversubscribed, td__deadline deadline)
{
    td__waits++;
    td__wait_event_set_processor(event);
    *waiting = (struct td__waiting){.event = event,
                                    .deadline = deadline,
                                    .spins = oversubscribed ? 0 : SPINS,
                                    .turn = TURN_SPINS * oversubscribed,
                                    .wake_at = TD__NEVER,
                                    .longest_sleep = TD__LONGEST_SLEEP_NS};
}

void td__waiting_begin_asleep(struct td__waiting *waiting, struct td__wait_event *event,
                              td__deadline deadline)
{
    td__waiting_begin(waiting, event, 0, deadline);
    waiting->spins = 0;
    waiting->until = 1;
}

unsigned td__pauses_in(int64_t ns)
{
    enum { TRIES = 3, PAUSES = 64 };
    int64_t fastest = INT64_MAX;
    for (int i = 0; i < TRIES; i++) {
        int64_t start = td__now_ns();
        for (int k = 0; k < PAUSES; k++)
            td__pause_processor();
        int64_t took = td__now_ns() - start;
        fastest = took < fastest ? took : fastest;
    }
    int64_t pauses = fastest > 0 ? (ns * PAUSES + fastest / 2) / fastest : 1;
    return pauses > PAUSES ? PAUSES : (unsigned)pauses;
}

/* Meanwhile `processor` is negative: other processes see that this thread yields. */
static bool yield(struct td__wait_event *event, int64_t *now)
{
    atomic_store_explicit(&event->processor, -td__wait_event_processor(event),
                          memory_order_relaxed);
    bool soon = td__yield(now);
    td__wait_event_set_processor(event);
    return soon;
}

/* After this, the waiter sees a change, or the change is followed by a signal. */
static void announce(struct td__waiting *waiting)
{
    atomic_store_explicit(&waiting->event->sleeping, 1, memory_order_seq_cst);
    all_processors_pass_a_barrier();
}

/* False when the deadline has passed. */
static bool sleep_once(struct td__waiting *waiting, int64_t now)
{
    if (now >= waiting->deadline)
        return false;
    td__deadline end = td__deadline_earlier(
        td__deadline_earlier(waiting->deadline, waiting->wake_at), now + waiting->longest_sleep);
    if (end > now) {
        struct timespec timeout = td__timespec(end - now);
        futex(&waiting->event->sleeping, FUTEX_WAIT, 1, &timeout);
    }
    waiting->sleeps++;
    announce(waiting);
    return true;
}

bool td__waiting_step(struct td__waiting *waiting)
{
    if (waiting->elsewhere && !waiting->spun) {
        waiting->spins = waiting->turn;
        waiting->spun = true;
    }
    if (waiting->spins) {
        waiting->spins--;
        td__pause_processor();
        return true;
    }
    int64_t now = waiting->now ? waiting->now : td__now_ns();
    waiting->now = 0;
    if (waiting->announced)
        return sleep_once(waiting, now);
    if (now >= waiting->deadline)
        return false;
    if (!waiting->until)
        waiting->until = now + YIELD_NS;
    if (now < waiting->until) {
        if (!yield(waiting->event, &now))
            waiting->until = 1;
        waiting->now = now;
        waiting->spun = false;
        return true;
    }
    if (waiting->sleepers)
        atomic_fetch_add(waiting->sleepers, 1);
    announce(waiting);
    waiting->announced = true;
    return true;
}

void td__waiting_end(struct td__waiting *waiting)
{
    if (!waiting->announced)
        return;
    atomic_store_explicit(&waiting->event->sleeping, 0, memory_order_relaxed);
    if (waiting->sleepers)
        atomic_fetch_sub(waiting->sleepers, 1);
}

void td__wait_event_wake(struct td__wait_event *event)
{
    if (atomic_exchange_explicit(&event->sleeping, 0, memory_order_seq_cst))
        futex(&event->sleeping, FUTEX_WAKE, 1, NULL);
}

int td__processors(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set))
        return (int)sysconf(_SC_NPROCESSORS_ONLN);
    return CPU_COUNT(&set);
}
