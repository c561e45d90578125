/* Pairwise exchange: in round t rank r sends to rank r+t and receives from rank r-t, so that every
 * link is used once and no rank receives from two at a time (pairwise); or all in one round (direct). */
#include "collective/builders.h"
#include "collective/tree.h"

void td__alltoall_pairwise(const struct td__plan *plan, struct td__schedule *schedule)
{
    int32_t n = plan->size, r = plan->rank;
    schedule->blocks = n;
    td__copy(schedule, TD__DATA, r, TD__INPUT, r, 1);
    td__end_round(schedule);
    for (int32_t t = 1; t < n; t++) {
        int32_t to = (r + t) % n, from = (r - t + n) % n;
        td__send(schedule, to, TD__INPUT, to, 1);
        td__recv(schedule, from, TD__DATA, from, 1);
        td__end_round(schedule);
    }
}

void td__alltoall_direct(const struct td__plan *plan, struct td__schedule *schedule)
{
    int32_t n = plan->size, r = plan->rank;
    schedule->blocks = n;
    for (int32_t t = 1; t < n; t++) {
        int32_t to = (r + t) % n, from = (r - t + n) % n;
        td__send(schedule, to, TD__INPUT, to, 1);
        td__recv(schedule, from, TD__DATA, from, 1);
    }
    td__copy(schedule, TD__DATA, r, TD__INPUT, r, 1);
    td__end_round(schedule);
}

/* Two ranks: what arrives is reduced into this rank's own values at once, and needs no scratch. */
static void reduce_scatter_of_two(int32_t rank, struct td__schedule *schedule)
{
    int32_t other = 1 - rank;
    td__copy(schedule, TD__DATA, 0, TD__INPUT, rank, 1);
    td__end_round(schedule);
    td__send(schedule, other, TD__INPUT, other, 1);
    td__recv_reduce(schedule, other, TD__DATA, 0, 1);
    td__end_round(schedule);
}

/* Every rank receives the other ranks' values of its block, one in each round, and reduces them along the tree in
 * the end. It sends (n-1)/n of the vector and needs n blocks of scratch; for any n, in the tree's order. */
void td__reduce_scatter_pairwise(const struct td__plan *plan, struct td__schedule *schedule)
{
    int32_t n = plan->size, r = plan->rank;
    schedule->blocks = n;
    if (n == 2) {
        reduce_scatter_of_two(r, schedule);
        return;
    }
    for (int32_t i = 0; i < n; i++)
        td__scratch_block(schedule, r);
    for (int32_t t = 1; t < n; t++) {
        int32_t to = (r + t) % n, from = (r - t + n) % n;
        td__send(schedule, to, TD__INPUT, to, 1);
        td__recv(schedule, from, TD__SCRATCH, from, 1);
        td__end_round(schedule);
    }
    td__copy(schedule, TD__SCRATCH, r, TD__INPUT, r, 1);
    for (int level = 0; level < td__tree_levels(n); level++)
        for (int32_t low = 0; low + (1 << level) < n; low += 2 << level)
            td__reduce(schedule, TD__SCRATCH, low, TD__SCRATCH, low + (1 << level), 1);
    td__copy(schedule, TD__DATA, 0, TD__SCRATCH, 0, 1);
    td__end_round(schedule);
}
