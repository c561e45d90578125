/* The choice of an algorithm; see select.h, and the table in docs/algorithms.md.
 *
 * Short messages are a matter of rounds, long ones of bytes. One round costs about what it costs to
 * move BYTES_A_ROUND, on loopback as on a network of 10 Gbit/s: 15 us at 1 GB/s. */
#include "collective/select.h"

enum {
    BYTES_A_ROUND = 16 << 10,

    /* Doubling sends the vector log2(n) times in as many rounds, halving less than twice in twice as
     * many. */
    ALL_REDUCE_LONG = 32 << 10,

    /* The tree sends the vector from the root log2(n) times; scattering it first, twice. That needs
     * more than four ranks to be less, and a long vector to make up for the rounds. */
    BROADCAST_LONG = 512 << 10,
    BROADCAST_MANY = 5,

    REDUCE_LONG = 64 << 10,

    /* Halving copies all parts first; pairwise needs n - 1 rounds. */
    REDUCE_SCATTER_LONG = 256 << 10,

    /* Of each part: Bruck sends each one log2(n) / 2 times, and copies it twice. */
    ALL_TO_ALL_SHORT_PART = 512,

    /* All at once keeps every link busy, but has as many sockets to look after as there are ranks;
     * beyond this many it is one partner after another. */
    DIRECT_MOST = 64,

    /* Of all parts: in the tree they travel log2(n) / 2 times. */
    ROOTED_LONG = 64 << 10,

    ALL_GATHER_LONG = 64 << 10,
};

static bool is_power_of_two(int32_t size)
{
    return (size & (size - 1)) == 0;
}

static const char *all_gather(int32_t size, size_t bytes)
{
    if (is_power_of_two(size))
        return "doubling"; /* the fewest rounds and the fewest bytes, and nothing is copied */
    return bytes < ALL_GATHER_LONG + (size_t)size * BYTES_A_ROUND ? "bruck" : "ring";
}

static const char *all_to_all(int32_t size, size_t bytes)
{
    if (size > 4 && bytes / (size_t)size / (size_t)size < ALL_TO_ALL_SHORT_PART)
        return "bruck";
    return td__select_uneven(size);
}

const char *td__select_uneven(int32_t size)
{
    return size <= DIRECT_MOST ? "direct" : "pairwise";
}

const char *td__select(enum td__collective op, int32_t size, size_t bytes)
{
    switch (op) {
    case TD__BROADCAST:
        return size >= BROADCAST_MANY && bytes >= BROADCAST_LONG ? "scatter" : "tree";
    case TD__REDUCE:
        return size > 2 && bytes >= REDUCE_LONG ? "halving" : "tree";
    case TD__ALL_REDUCE:
        return bytes < ALL_REDUCE_LONG ? "doubling" : "halving";
    case TD__SCATTER:
    case TD__GATHER:
        return size > 2 && bytes < ROOTED_LONG ? "tree" : "direct";
    case TD__ALL_GATHER:
        return all_gather(size, bytes);
    case TD__REDUCE_SCATTER:
        return bytes < REDUCE_SCATTER_LONG ? "halving" : "pairwise";
    case TD__ALL_TO_ALL:
        return all_to_all(size, bytes);
    default:
        return "dissemination";
    }
}
