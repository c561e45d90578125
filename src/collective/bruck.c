/* Bruck's algorithms: ceil(log2(n)) rounds for any n, at the price of copies before and after.
 *
 * all_gather: rank r keeps the blocks of ranks r, r+1, r+2 … in this order in scratch. In the round
 * of distance d it has d of them, sends them to rank r-d and gets the next d from rank r+d.
 *
 * all_to_all: rank r sends block i of scratch to rank r+i, in up to log2(n) hops. In the round of distance d rank
 * r sends all its blocks whose number has bit d to rank r+d. */
#include "collective/builders.h"

void td__allgather_bruck(const struct td__plan *plan, struct td__schedule *schedule)
{
    int32_t n = plan->size, r = plan->rank;
    schedule->blocks = n;
    for (int32_t i = 0; i < n; i++)
        td__scratch_block(schedule, (r + i) % n);
    td__copy(schedule, TD__SCRATCH, 0, TD__DATA, r, 1);
    td__end_round(schedule);
    for (int32_t distance = 1; distance < n; distance *= 2) {
        int32_t count = n - distance < distance ? n - distance : distance;
        td__send(schedule, (r - distance + n) % n, TD__SCRATCH, 0, count);
        td__recv(schedule, (r + distance) % n, TD__SCRATCH, distance, count);
        td__end_round(schedule);
    }
    td__copy(schedule, TD__DATA, r, TD__SCRATCH, 0, n - r);
    if (r)
        td__copy(schedule, TD__DATA, 0, TD__SCRATCH, n - r, r);
    td__end_round(schedule);
}

void td__alltoall_bruck(const struct td__plan *plan, struct td__schedule *schedule)
{
    int32_t n = plan->size, r = plan->rank;
    schedule->blocks = n;
    schedule->scratch_blocks = 2 * n; /* the second half receives what the first still sends */
    for (int32_t i = 0; i < n; i++)
        td__copy(schedule, TD__SCRATCH, i, TD__INPUT, (r + i) % n, 1);
    td__end_round(schedule);
    for (int32_t distance = 1; distance < n; distance *= 2) {
        for (int32_t i = 0; i < n; i++) {
            if (!(i & distance))
                continue;
            td__send(schedule, (r + distance) % n, TD__SCRATCH, i, 1);
            td__recv(schedule, (r - distance + n) % n, TD__SCRATCH, n + i, 1);
        }
        for (int32_t i = 0; i < n; i++)
            if (i & distance)
                td__copy(schedule, TD__SCRATCH, i, TD__SCRATCH, n + i, 1);
        td__end_round(schedule);
    }
    for (int32_t i = 0; i < n; i++)
        td__copy(schedule, TD__DATA, (r - i + n) % n, TD__SCRATCH, i, 1);
    td__end_round(schedule);
}
