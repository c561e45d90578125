/* Copies of large tensors by several threads.
 *
 * One thread does not use the bandwidth of the memory. So threads of the agent that have nothing to do copy pieces, too:
 *
 *     to     |== done ==|== done ==|== a helper's ==|== this thread's ==|-- next --|------|
 *
 * Each takes the next piece until none is left. So the copy never waits for a thread that is not there yet, only for
 * pieces that were begun; a helper that comes late finds none. */
#include "base/copy.h"
#include "base/wait.h"
#include "peer/wait_event.h"
#include "rpc/rpc_agent.h"

#include <stdlib.h>

enum {
    PIECE = 512 * 1024,
    LEAST = 4 * 1024 * 1024, /* bytes that are worth waking a thread for */
    MOST_HELPERS = 2,        /* most of the bandwidth that a few cores have */
    MORE_HELPERS =
        4,          /* on a large host: its memory has more channels, one core no more bandwidth */
    LARGE_HOST = 8, /* processors that the workers leave free */
};

struct copy {
    atomic_int users;
    char *to;
    const char *from;
    size_t bytes;
    bool nontemporal;
    atomic_size_t next, done;
};

atomic_int td__rpc_copy_helpers = -1;

static void release(struct copy *copy)
{
    if (atomic_fetch_sub(&copy->users, 1) == 1)
        free(copy);
}

static void copy_pieces(struct copy *copy)
{
    size_t at;
    while ((at = atomic_fetch_add(&copy->next, PIECE)) < copy->bytes) {
        size_t left = copy->bytes - at, size = left < PIECE ? left : PIECE;
        td__copy_bytes(copy->to + at, copy->from + at, size, copy->nontemporal);
        atomic_fetch_add(&copy->done, size);
    }
}

static void help(void *arg)
{
    struct copy *copy = arg;
    copy_pieces(copy);
    release(copy);
}

static void run_help(struct td_rpc_call *task)
{
    if (atomic_load(&task->agent->queued))
        td__io_wake(task->agent); /* the next helper */
    task->continuation(task->self);
    free(task);
}

static bool add_helper(struct td__rpc_agent *agent, struct copy *copy)
{
    struct td_rpc_call *task = calloc(1, sizeof *task);
    if (!task)
        return false;
    *task = (struct td_rpc_call){
        .agent = agent, .fd = -1, .task = run_help, .continuation = help, .self = copy};
    atomic_fetch_add(&copy->users, 1);
    td__io_run(agent, task);
    return true;
}

/* A share of the processors that the workers of this host leave free. */
static int count_helpers(struct td__rpc_agent *agent, size_t bytes)
{
    int wanted = atomic_load_explicit(&td__rpc_copy_helpers, memory_order_relaxed);
    if (bytes < LEAST || wanted >= 0)
        return bytes < LEAST ? 0 : wanted;
    int near = atomic_load_explicit(&agent->near, memory_order_relaxed);
    int left = td__processors() - near, most = left >= LARGE_HOST ? MORE_HELPERS : MOST_HELPERS;
    int helpers = near > 0 ? left / near : 0;
    return helpers < most ? helpers : most;
}

/* Ordinary stores read the target first, and move what the caches had of other data to memory. That pays only if the copy
 * stays in the caches until it is read: the third level is shared by all processors of the chip, of which a virtual
 * machine may have few. */
static bool exceeds_caches(size_t bytes)
{
    size_t share = td__cache_bytes(3) / 4, own = 8 * td__cache_bytes(2);
    return bytes > (share < own ? share : own);
}

void td__rpc_copy(void *arg, void *to, const void *from, size_t bytes)
{
    struct td__rpc_agent *agent = arg;
    int helpers = count_helpers(agent, bytes);
    bool nontemporal = exceeds_caches(bytes);
    struct copy *copy = helpers > 0 ? malloc(sizeof *copy) : NULL;
    if (!copy) {
        td__copy_bytes(to, from, bytes, nontemporal);
        return;
    }
    *copy = (struct copy){
        .users = 1, .to = to, .from = from, .bytes = bytes, .nontemporal = nontemporal};
    for (int i = 0; i < helpers && add_helper(agent, copy); i++)
        continue;
    td__io_wake(agent);
    copy_pieces(copy);
    while (atomic_load(&copy->done) < bytes)
        sched_yield(); /* a helper has a piece of some microseconds */
    release(copy);
}
