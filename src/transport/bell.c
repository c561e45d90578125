/* Waiting and waking; see bell.h. */
#include "transport/bell.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
    SPINS = 100,             /* about 5 µs: what the other side takes where it is at work */
    YIELD_NS = 1000000,      /* how long to yield before sleeping */
    YIELD_LIMIT_NS = 500000, /* a yield that took longer was given to a third */
};

static inline void pause_processor(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static long futex(_Atomic uint32_t *word, int op, uint32_t value, const struct timespec *timeout)
{
    return syscall(SYS_futex, word, op, value, timeout, NULL, 0);
}

void td__waiting_begin(struct td__waiting *waiting, struct td__bell *bell, bool crowded,
                       int64_t slice_ns, td__deadline deadline)
{
    *waiting = (struct td__waiting){
        .bell = bell, .deadline = deadline, .spins = crowded ? 0 : SPINS, .slice = slice_ns};
}

static bool sleep_a_slice(struct td__waiting *waiting, int64_t now)
{
    int64_t left = waiting->slice;
    if (waiting->deadline != TD__NEVER && waiting->deadline - now < left)
        left = waiting->deadline - now;
    if (left <= 0)
        return false;
    struct timespec timeout = td__timespec(left);
    futex(&waiting->bell->sleeping, FUTEX_WAIT, 1, &timeout);
    waiting->slept = true;
    atomic_store_explicit(&waiting->bell->sleeping, 1, memory_order_seq_cst);
    return true;
}

bool td__waiting_step(struct td__waiting *waiting)
{
    if (waiting->spins) {
        waiting->spins--;
        pause_processor();
        return true;
    }
    int64_t now = td__now_ns();
    if (waiting->announced)
        return sleep_a_slice(waiting, now);
    if (now >= waiting->deadline)
        return false;
    if (!waiting->until)
        waiting->until = now + YIELD_NS;
    if (now < waiting->until) {
        sched_yield();
        if (td__now_ns() - now > YIELD_LIMIT_NS)
            waiting->until = 1;
        return true;
    }
    if (waiting->sleepers)
        atomic_fetch_add(waiting->sleepers, 1);
    atomic_store_explicit(&waiting->bell->sleeping, 1, memory_order_seq_cst);
    waiting->announced = true;
    return true;
}

void td__waiting_end(struct td__waiting *waiting)
{
    if (!waiting->announced)
        return;
    atomic_store_explicit(&waiting->bell->sleeping, 0, memory_order_relaxed);
    if (waiting->sleepers)
        atomic_fetch_sub(waiting->sleepers, 1);
}

void td__bell_wake(struct td__bell *bell)
{
    if (atomic_exchange_explicit(&bell->sleeping, 0, memory_order_seq_cst))
        futex(&bell->sleeping, FUTEX_WAKE, 1, NULL);
}

int td__processors(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set))
        return (int)sysconf(_SC_NPROCESSORS_ONLN);
    return CPU_COUNT(&set);
}
