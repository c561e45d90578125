/* The ranks of a host, spread evenly over the processors.
 *
 * Every synchronisation takes a context switch for each rank that shares a processor, so three ranks on one
 * and one on the other are slower than two and two, and two ranks on one processor, with another one free,
 * are fifty times as slow. The kernel evens that out, but for processes that never sleep it may take it a
 * tenth of a second. So a rank that waits moves itself: for a moment it allows itself other processors
 * only, and then everything that it had before. The kernel stays free to move it again.
 *
 * In a oversubscribed comm ranks go to the processors in turn, so that neighbours, who send each other messages,
 * are on different ones. They go there when they first wait, and again when their wait events show that the ranks
 * have become uneven. Where there is a processor for everyone, a rank only leaves one that it shares with
 * a lower one. Nobody moves while somebody else computes beside the ranks: then the kernel knows better. */
#include "shm/shm_comm.h"

#include <sched.h>

enum { LOOK_NS = 1000000, PAUSE_NS = 20000000 };

/* Whether no processor has two ranks more than another. */
static bool is_even(const struct td__shm_comm *comm, const cpu_set_t *allowed)
{
    unsigned short ranks[CPU_SETSIZE] = {0};
    unsigned least = UINT32_MAX, most = 0;
    for (int i = 0; i < comm->size; i++) {
        int at = td__wait_event_processor(&comm->cells[i].event) - 1;
        if (at < 0 || at >= CPU_SETSIZE || !CPU_ISSET(at, allowed))
            return true; /* as far as can be known */
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

static int place_of(int index, const cpu_set_t *allowed)
{
    int place = 0;
    for (int left = index % CPU_COUNT(allowed); left >= CPU_ISSET(place, allowed); place++)
        left -= CPU_ISSET(place, allowed);
    return place;
}

/* A oversubscribed comm: the one processor to which this rank is to go. */
static bool find_turn(struct td__shm_comm *comm, const cpu_set_t *allowed, cpu_set_t *target)
{
    if (CPU_COUNT(allowed) < 2 || (comm->spread && is_even(comm, allowed)))
        return false;
    comm->spread = true;
    int place = place_of(comm->index, allowed);
    CPU_ZERO(target);
    CPU_SET(place, target);
    return sched_getcpu() != place;
}

/* Enough processors: those that no rank is on, where a lower one is here. */
static bool find_free(const struct td__shm_comm *comm, const cpu_set_t *allowed, cpu_set_t *target)
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
    if (!comm->fills_host || now < comm->next_look)
        return;
    comm->next_look = now + LOOK_NS;
    if (sched_getaffinity(0, sizeof allowed, &allowed) ||
        !(comm->oversubscribed ? find_turn(comm, &allowed, &target)
                               : find_free(comm, &allowed, &target)))
        return;
    comm->next_look = now + PAUSE_NS;
    if (!sched_setaffinity(0, sizeof target, &target))
        sched_setaffinity(0, sizeof allowed, &allowed);
    td__wait_event_set_processor(&comm->cells[comm->index].event);
}
