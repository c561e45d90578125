/* Rings: each rank exchanges data with its two neighbours only, and sends the minimum.
 *
 *     all_reduce of 3 ranks, blocks a b c; capitals are complete
 *
 *     rank 0   a  b  c        a        b        c+ca           first the sums go around the ring …
 *     rank 1   a  b  c   ->   a+       b        c        ->  …
 *     rank 2   a  b  c        a        b+       c              … then the results
 *
 * In round t of the first half rank r sends block r-t to rank r+1 and reduces block r-t-1, which
 * comes from rank r-1, into its own; after n-1 rounds it has block r+1 complete. The second half
 * forwards the complete blocks. Each rank sends 2(n-1)/n of the vector, the
 * minimum. The order of a sum begins at another rank for every block: the same on all ranks, but
 * not that of tree.h. */
#include "collective/builders.h"

static int32_t wrap(int32_t value, int32_t size)
{
    return (value % size + size) % size;
}

/* n-1 rounds that forward complete blocks; rank r begins with block r + lead. */
static void forward_blocks(const struct td__plan *plan, struct td__schedule *schedule, int32_t lead)
{
    int32_t n = plan->size, r = plan->rank;
    for (int32_t t = 0; t < n - 1; t++) {
        td__send(schedule, wrap(r + 1, n), TD__DATA, wrap(r + lead - t, n), 1);
        td__recv(schedule, wrap(r - 1, n), TD__DATA, wrap(r + lead - t - 1, n), 1);
        td__end_round(schedule);
    }
}

void td__allreduce_ring(const struct td__plan *plan, struct td__schedule *schedule)
{
    int32_t n = plan->size, r = plan->rank;
    schedule->blocks = n;
    for (int32_t t = 0; t < n - 1; t++) {
        td__send(schedule, wrap(r + 1, n), TD__DATA, wrap(r - t, n), 1);
        td__recv_reduce(schedule, wrap(r - 1, n), TD__DATA, wrap(r - t - 1, n), 1);
        td__end_round(schedule);
    }
    forward_blocks(plan, schedule, 1);
}

void td__allgather_ring(const struct td__plan *plan, struct td__schedule *schedule)
{
    schedule->blocks = plan->size;
    forward_blocks(plan, schedule, 0);
}

/* The first half alone, shifted by one rank, so that rank r ends with block r. Partial sums are kept in scratch,
 * each block in its own. */
void td__reduce_scatter_ring(const struct td__plan *plan, struct td__schedule *schedule)
{
    int32_t n = plan->size, r = plan->rank;
    schedule->blocks = n;
    for (int32_t i = 0; i < n; i++)
        td__scratch_block(schedule, i);
    for (int32_t t = 0; t < n - 1; t++) {
        int32_t mine = wrap(r - t - 2, n);
        td__send(schedule, wrap(r + 1, n), t == 0 ? TD__INPUT : TD__SCRATCH, wrap(r - t - 1, n), 1);
        td__recv(schedule, wrap(r - 1, n), TD__SCRATCH, mine, 1);
        td__reduce(schedule, TD__SCRATCH, mine, TD__INPUT, mine, 1);
        td__end_round(schedule);
    }
    td__copy(schedule, TD__DATA, 0, n == 1 ? TD__INPUT : TD__SCRATCH, r, 1);
    td__end_round(schedule);
}
