/* A chain from the root: the vector is cut into pieces; each rank forwards a piece while it receives the next one.
 * Every rank but the last sends the vector once.
 *
 *     round 0    root -0-> a
 *     round 1    root -1-> a -0-> b
 *     round 2    root -2-> a -1-> b -0-> c
 *
 * The last rank of n has the last of p pieces after p + n - 2 rounds, so this takes as long as sending the
 * vector 1 + (n - 2) / p times. A piece is still in the cache when it is forwarded. */
#include "collective/builders.h"

enum { PIECES = 32 };

void td__broadcast_chain(const struct td__plan *plan, struct td__schedule *schedule)
{
    int32_t n = plan->size, position = (plan->rank - plan->root + n) % n;
    int32_t previous = (plan->rank + n - 1) % n, next = (plan->rank + 1) % n;
    schedule->blocks = PIECES;
    for (int32_t piece = 0; piece <= PIECES; piece++) {
        schedule->rounds = position + piece - 1; /* receives this piece, sends the previous one */
        if (position > 0 && piece < PIECES)
            td__recv(schedule, previous, TD__DATA, piece, 1);
        if (position < n - 1 && piece > 0)
            td__send(schedule, next, TD__DATA, piece - 1, 1);
    }
    schedule->rounds = n > 1 ? PIECES + n - 2 : 0;
}
