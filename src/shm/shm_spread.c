/* Spreads the ranks of a host evenly over the processors.
 *
 * Every synchronisation takes a context switch for each rank that shares a processor. So three ranks on one
 * processor and one on another are slower than two and two, and two ranks on one processor, with another one
 * free, are fifty times as slow. The kernel balances that, but for processes that never sleep it may take a tenth
 * of a second. So a waiting rank moves itself: it sets its affinity mask to other processors, and then back to
 * the former mask. The kernel stays free to move it again.
 *
 * In an oversubscribed comm ranks are assigned to the processors round-robin, so that ranks r and r + 1, which
 * often exchange messages, are on different ones. A rank moves to its processor when it first waits, and again
 * when the wait events show that the ranks are spread unevenly. If there are enough processors, a rank moves only
 * away from one that it shares with a lower rank. No rank moves while an unrelated process computes on its
 * processor (td__waiting_yields()): the kernel balances that load, too. */
#include "shm/shm_comm.h"

#include <sched.h>

enum { CHECK_NS = 1000000, MOVE_INTERVAL_NS = 20000000 };

/* Whether the number of ranks per processor differs by one at most; also true if it is not known. */
static bool is_even(const struct td__shm_comm *comm, const cpu_set_t *allowed)
{
    unsigned short ranks[CPU_SETSIZE] = {0};
    unsigned least = UINT32_MAX, most = 0;
    for (int i = 0; i < comm->size; i++) {
        int at = td__wait_event_processor(&comm->cells[i].event) - 1;
        if (at < 0 || at >= CPU_SETSIZE || !CPU_ISSET(at, allowed))
            return true;
        ranks[at]++;
    }
    for (int p = 0; p < CPU_SETSIZE; p++) {
        if (!CPU_ISSET(p, allowed))
            continue;
        least = ranks[p] < least ? ranks[p] : least;
        most = ranks[p] > most ? ranks[p] : most;
    }
    return most <= least + 1;
}

/* Round-robin. */
static int assigned_processor(int index, const cpu_set_t *allowed)
{
    int processor = 0;
    for (int left = index % CPU_COUNT(allowed); left >= CPU_ISSET(processor, allowed); processor++)
        left -= CPU_ISSET(processor, allowed);
    return processor;
}

/* In an oversubscribed comm: sets *target to this rank's processor. False if it need not move. */
static bool pick_assigned(struct td__shm_comm *comm, const cpu_set_t *allowed, cpu_set_t *target)
{
    if (CPU_COUNT(allowed) < 2 || (comm->spread && is_even(comm, allowed)))
        return false;
    comm->spread = true;
    int processor = assigned_processor(comm->index, allowed);
    CPU_ZERO(target);
    CPU_SET(processor, target);
    return sched_getcpu() != processor;
}

/* With enough processors: sets *target to the free ones. False if no lower rank is on this processor. */
static bool pick_free(const struct td__shm_comm *comm, const cpu_set_t *allowed, cpu_set_t *target)
{
    int here = sched_getcpu();
    bool shared = false;
    *target = *allowed;
    for (int i = 0; i < comm->size; i++) {
        int at = td__wait_event_processor(&comm->cells[i].event) - 1;
        if (at >= 0 && at < CPU_SETSIZE)
            CPU_CLR(at, target);
        shared = shared || (i < comm->index && at == here);
    }
    return shared && CPU_COUNT(target);
}

void td__shm_spread(struct td__shm_comm *comm, int64_t now)
{
    cpu_set_t allowed, target;
    if (!comm->fills_host || now < comm->next_check)
        return;
    comm->next_check = now + CHECK_NS;
    if (sched_getaffinity(0, sizeof allowed, &allowed) ||
        !(comm->oversubscribed ? pick_assigned(comm, &allowed, &target)
                               : pick_free(comm, &allowed, &target)))
        return;
    comm->next_check = now + MOVE_INTERVAL_NS;
    if (!sched_setaffinity(0, sizeof target, &target))
        sched_setaffinity(0, sizeof allowed, &allowed);
    td__wait_event_set_processor(&comm->cells[comm->index].event);
}
