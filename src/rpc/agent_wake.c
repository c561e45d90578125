/* How an agent that sleeps is woken.
 *
 * A worker writes to a ring, and reads `awake`; an agent sets `awake` to 0, and reads the ring. One of them must see what
 * the other wrote. The first does so for every message, where a fence would wait until the written lines have come from
 * the other processor's cache. So the second, which does it seldom, makes all processors pass a fence (membarrier(2)).
 * Where the kernel does not, both sides have a fence. */
#include "rpc/rpc_agent.h"

#include <linux/membarrier.h>
#include <sys/syscall.h>
#include <unistd.h>

static void fence(void)
{
#if defined(__SANITIZE_THREAD__)
    static _Atomic int word; /* the sanitizer does not know fences */
    atomic_fetch_add(&word, 1);
#else
    atomic_thread_fence(memory_order_seq_cst);
#endif
}

static bool barrier_command(int command)
{
#if defined(__SANITIZE_THREAD__)
    (void)command;
    return false;
#else
    return !syscall(SYS_membarrier, command, 0, 0);
#endif
}

void td__io_register_barriers(struct td__rpc_agent *agent)
{
    agent->ordered = barrier_command(MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED);
    atomic_store(&agent->control->barriers, agent->ordered);
}

/* Between a write to a ring and a read of the other worker's `awake`. */
static void fence_after_write(const struct td__rpc_link *link)
{
    if (link->agent->ordered &&
        atomic_load_explicit(&link->control->barriers, memory_order_relaxed))
        atomic_signal_fence(memory_order_seq_cst);
    else
        fence();
}

bool td__io_fence_before_sleep(const struct td__rpc_agent *agent)
{
    fence();
    return !agent->ordered || barrier_command(MEMBARRIER_CMD_GLOBAL_EXPEDITED);
}

_Thread_local bool td__io_rang;

/* An eventfd, not a byte on the link's socket: that takes the kernel half as long again. */
static void wake(struct td__rpc_link *link)
{
    uint64_t one = 1;
    if (atomic_load_explicit(&link->control->awake, memory_order_relaxed) ||
        atomic_exchange(&link->control->rung, (uint32_t)sched_getcpu() + 1))
        return;
    td__io_rang = write(link->event, &one, sizeof one) > 0; /* else it is readable already */
}

void td__io_ring(struct td__rpc_link *link)
{
    fence_after_write(link);
    wake(link);
}

void td__io_ring_early(struct td__rpc_link *link)
{
    if (link->local)
        wake(link);
}
