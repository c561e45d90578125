/* Ranks in a crowded team, spread evenly over the processors.
 *
 * Every synchronisation takes a context switch for each rank that shares a processor, so three ranks on one
 * and one on the other are slower than two and two. The kernel evens that out, but for processes that
 * never sleep it may take it a tenth of a second. So a rank that waits moves itself: for a moment it
 * allows itself one processor only, and then everything that it had before. The kernel stays free to move
 * it again.
 *
 * Ranks go to the processors in turn, so that neighbours, who send each other messages, are on different
 * ones. They go there when they first wait, and again when their bells show that the ranks have become
 * uneven; but not while somebody else computes beside them: then the kernel knows better. */
#include "group/team.h"

#include <sched.h>

enum { LOOK_NS = 1000000, PAUSE_NS = 20000000 };

/* Whether no processor has two ranks more than another. */
static bool is_even(const struct td__team *team, const cpu_set_t *allowed)
{
    unsigned short ranks[CPU_SETSIZE] = {0};
    unsigned least = UINT32_MAX, most = 0;
    for (int i = 0; i < team->size; i++) {
        int at = td__bell_processor(&team->cells[i].bell) - 1;
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

void td__team_spread(struct td__team *team, int64_t now)
{
    cpu_set_t allowed, only;
    if (!team->fills_host || now < team->next_look)
        return;
    team->next_look = now + LOOK_NS;
    if (sched_getaffinity(0, sizeof allowed, &allowed) || CPU_COUNT(&allowed) < 2 ||
        (team->spread && is_even(team, &allowed)))
        return;
    team->spread = true;
    team->next_look = now + PAUSE_NS;
    int place = place_of(team->index, &allowed);
    if (sched_getcpu() == place)
        return;
    CPU_ZERO(&only);
    CPU_SET(place, &only);
    if (!sched_setaffinity(0, sizeof only, &only))
        sched_setaffinity(0, sizeof allowed, &allowed);
    td__bell_here(&team->cells[team->index].bell);
}
