/* Selecting an algorithm; see td__select() in schedule.h, and the table in docs/algorithms.md.
 *
 * The time of a short vector depends on the number of rounds, that of a long one on the bytes. The sizes at which
 * two algorithms take the same time were measured over loopback TCP with 2 to 8 ranks. There a round costs about
 * as much as sending 16 KiB, as it does on a network of 10 Gbit/s (15 us at 1.2 GB/s). */
#include "collective/schedule.h"
#include "collective/tree.h"

enum {
    /* Doubling sends the vector log2(n) times in as many rounds; halving less than twice, in twice as
     * many. Both take the same time at this size for 2 to 6 ranks. */
    ALL_REDUCE_LONG = 64 << 10,

    /* Two ranks send the same bytes either way, in one round or in two. Halving reduces half as much on each. */
    ALL_REDUCE_LONG_FOR_TWO = 512 << 10,

    /* Below this the root sends to each of a few ranks itself: a send costs less than a round of the tree. */
    BROADCAST_SHORT = 64 << 10,
    BROADCAST_FEW = 8,

    /* The chain sends the vector once, but takes many rounds; from here on it is faster than a tree of
     * two levels, too. */
    CHAIN_LONG = 4 << 20,

    /* Along the tree the root sends, or receives, the vector log2(n) times; otherwise it is twice at
     * most, but in more rounds that all ranks take part in, and with more bytes in sum. */
    ROOTED_LONG_A_LEVEL = 512 << 10,

    /* Halving copies all parts first; pairwise needs n - 1 rounds, which two ranks have either way. */
    REDUCE_SCATTER_LONG = 256 << 10,
    REDUCE_SCATTER_LONG_A_RANK = 16 << 10,

    /* From here on the ring is faster: it sends what it has just received, from the cache. Where doubling needs
     * only log2(n) rounds, the parts must be long enough to make up for n - 1 rounds. */
    ALL_GATHER_LONG = 512 << 10,
    ALL_GATHER_LONG_PART = 64 << 10,

    /* Parts count as even up to this ratio of the largest to the average. */
    UNEVEN_LARGEST = 2,

    /* Of one part: Bruck sends each one log2(n) / 2 times, and copies it as often. */
    ALL_TO_ALL_SHORT_PART = 2 << 10,
    ALL_TO_ALL_FEW = 4,

    /* Of one part: all partners at once would have more data in flight than the caches hold. */
    ALL_TO_ALL_LONG_PART = 512 << 10,

    /* Up to here one rank can send to, or receive from, all others in the time of a few rounds. */
    FEW = 16,

    /* All partners at once keep every link busy, but each needs a socket and polling; beyond this many partners,
     * one after another. */
    DIRECT_MOST = 64,
};

static bool is_power_of_two(int32_t size)
{
    return (size & (size - 1)) == 0;
}

/* Whether an algorithm with more rounds pays because the root sends or receives less. */
static bool is_long_for_the_root(int32_t size, size_t bytes)
{
    int levels = td__tree_levels(size);
    return levels > 2 && bytes >= (size_t)levels * ROOTED_LONG_A_LEVEL / (size_t)(levels - 2);
}

static const char *broadcast(int32_t size, size_t bytes)
{
    if (size <= BROADCAST_FEW && bytes < BROADCAST_SHORT)
        return "direct";
    bool is_long = is_long_for_the_root(size, bytes);
    if (size > 2 && size <= FEW && (is_long || bytes >= CHAIN_LONG))
        return "chain";
    return is_long ? "scatter" : "tree";
}

static const char *reduce_scatter(int32_t size, size_t bytes)
{
    size_t limit = REDUCE_SCATTER_LONG + (size_t)size * REDUCE_SCATTER_LONG_A_RANK;
    return size > 2 && bytes < limit ? "halving" : "pairwise";
}

static const char *all_gather(int32_t size, size_t bytes)
{
    bool long_parts = bytes >= (size_t)size * ALL_GATHER_LONG_PART;
    if (is_power_of_two(size))
        return size > 2 && bytes >= ALL_GATHER_LONG && long_parts ? "ring" : "doubling";
    if (size <= FEW && bytes < ALL_GATHER_LONG)
        return "doubling";
    return bytes < ALL_GATHER_LONG ? "bruck" : "ring";
}

static const char *exchange(int32_t size)
{
    return size <= DIRECT_MOST ? "direct" : "pairwise";
}

static const char *all_to_all(int32_t size, size_t bytes)
{
    size_t part = bytes / (size_t)size / (size_t)size;
    if (size > ALL_TO_ALL_FEW && part < ALL_TO_ALL_SHORT_PART)
        return "bruck";
    return size > ALL_TO_ALL_FEW && part >= ALL_TO_ALL_LONG_PART ? "pairwise" : exchange(size);
}

/* In the tree parts are sent log2(n) / 2 times, but no rank has more than log2(n) sends and receives. */
static const char *gather_or_scatter(int32_t size, size_t bytes)
{
    return size > FEW && bytes < ROOTED_LONG_A_LEVEL ? "tree" : "direct";
}

/* If one rank has most of the data, an all_gather is much like a broadcast, for which doubling is a tree and the
 * ring a chain; and a reduce_scatter is like a reduce: with pairwise that rank would receive its part from all
 * others, with halving it is reduced along the tree. */
const char *td__select_uneven(td_op_kind op, int32_t size, size_t bytes, size_t largest)
{
    if (op == TD_OP_ALL_TO_ALL)
        return exchange(size);
    if (largest <= UNEVEN_LARGEST * (bytes / (size_t)size))
        return td__select(op, size, bytes);
    if (op == TD_OP_REDUCE_SCATTER)
        return size > 2 ? "halving" : "pairwise";
    return is_long_for_the_root(size, bytes) || bytes >= CHAIN_LONG ? "ring" : "doubling";
}

const char *td__select(td_op_kind op, int32_t size, size_t bytes)
{
    switch (op) {
    case TD_OP_BROADCAST:
        return broadcast(size, bytes);
    case TD_OP_REDUCE:
        return is_long_for_the_root(size, bytes) ? "halving" : "tree";
    case TD_OP_ALL_REDUCE:
        return bytes < (size_t)(size == 2 ? ALL_REDUCE_LONG_FOR_TWO : ALL_REDUCE_LONG) ? "doubling"
                                                                                       : "halving";
    case TD_OP_SCATTER:
    case TD_OP_GATHER:
        return gather_or_scatter(size, bytes);
    case TD_OP_ALL_GATHER:
        return all_gather(size, bytes);
    case TD_OP_REDUCE_SCATTER:
        return reduce_scatter(size, bytes);
    case TD_OP_ALL_TO_ALL:
        return all_to_all(size, bytes);
    default:
        return "dissemination";
    }
}
