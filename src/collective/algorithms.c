/* The table of all algorithms, with the bound on what a rank sends. */
#include "collective/builders.h"
#include "collective/tree.h"

static int64_t nothing(int32_t size, int32_t blocks)
{
    (void)size;
    (void)blocks;
    return 0;
}

/* All blocks but the rank's own. */
static int64_t all_but_one(int32_t size, int32_t blocks)
{
    (void)size;
    return blocks ? blocks - 1 : 0;
}

static int64_t one_block(int32_t size, int32_t blocks)
{
    (void)blocks;
    return size > 1;
}

static int64_t twice_all_but_one(int32_t size, int32_t blocks)
{
    return 2 * all_but_one(size, blocks);
}

/* With a power of two all blocks but the rank's own interval in each phase; else up to all of them, since the left
 * half of an incomplete node also sends to the right half in the gather phase. */
static int64_t halving_both_phases(int32_t size, int32_t blocks)
{
    bool power = (size & (size - 1)) == 0;
    return power ? twice_all_but_one(size, blocks) : 2 * (int64_t)blocks;
}

/* The reduce phase, and the interval to the root. */
static int64_t halving_and_interval(int32_t size, int32_t blocks)
{
    return size == 1 ? 0 : (int64_t)blocks + 1;
}

static int64_t whole(int32_t size, int32_t blocks)
{
    return size > 1 ? blocks : 0;
}

static int64_t whole_to_each(int32_t size, int32_t blocks)
{
    return (int64_t)(size - 1) * blocks;
}

static int64_t whole_each_level(int32_t size, int32_t blocks)
{
    return (int64_t)td__tree_levels(size) * blocks;
}

/* A rank of a smaller right half sends to several on the left. */
static int64_t doubling(int32_t size, int32_t blocks)
{
    bool power = (size & (size - 1)) == 0;
    return power ? whole_each_level(size, blocks) : (int64_t)size * blocks;
}

static int64_t gather_doubling(int32_t size, int32_t blocks)
{
    return all_but_one(size, blocks) + ((size & (size - 1)) ? size : 0);
}

static int64_t scatter_and_gather(int32_t size, int32_t blocks)
{
    return all_but_one(size, blocks) + gather_doubling(size, blocks);
}

/* Half of the blocks a round. */
static int64_t bruck_all_to_all(int32_t size, int32_t blocks)
{
    return (int64_t)td__tree_levels(size) * ((blocks + 1) / 2);
}

const struct td__algorithm td__algorithms[] = {
    {"tree", TD_OP_BROADCAST, td__broadcast_tree, false, false, whole_each_level},
    {"direct", TD_OP_BROADCAST, td__broadcast_direct, false, false, whole_to_each},
    {"chain", TD_OP_BROADCAST, td__broadcast_chain, false, false, whole},
    {"scatter", TD_OP_BROADCAST, td__broadcast_scatter, false, false, scatter_and_gather},
    {"tree", TD_OP_REDUCE, td__reduce_tree, false, true, whole_each_level},
    {"halving", TD_OP_REDUCE, td__reduce_halving, false, true, halving_and_interval},
    {"doubling", TD_OP_ALL_REDUCE, td__allreduce_doubling, false, true, doubling},
    {"halving", TD_OP_ALL_REDUCE, td__allreduce_halving, false, true, halving_both_phases},
    {"ring", TD_OP_ALL_REDUCE, td__allreduce_ring, true, false, twice_all_but_one},
    {"tree", TD_OP_SCATTER, td__scatter_tree, false, false, all_but_one},
    {"direct", TD_OP_SCATTER, td__scatter_direct, false, false, all_but_one},
    {"tree", TD_OP_GATHER, td__gather_tree, false, false, all_but_one},
    {"direct", TD_OP_GATHER, td__gather_direct, false, false, one_block},
    {"doubling", TD_OP_ALL_GATHER, td__allgather_doubling, false, false, gather_doubling},
    {"bruck", TD_OP_ALL_GATHER, td__allgather_bruck, true, false, all_but_one},
    {"ring", TD_OP_ALL_GATHER, td__allgather_ring, true, false, all_but_one},
    {"halving", TD_OP_REDUCE_SCATTER, td__reduce_scatter_halving, false, true,
     halving_and_interval},
    {"pairwise", TD_OP_REDUCE_SCATTER, td__reduce_scatter_pairwise, true, true, all_but_one},
    {"ring", TD_OP_REDUCE_SCATTER, td__reduce_scatter_ring, true, false, all_but_one},
    {"bruck", TD_OP_ALL_TO_ALL, td__alltoall_bruck, true, false, bruck_all_to_all},
    {"pairwise", TD_OP_ALL_TO_ALL, td__alltoall_pairwise, true, false, all_but_one},
    {"direct", TD_OP_ALL_TO_ALL, td__alltoall_direct, true, false, all_but_one},
    {"dissemination", TD_OP_BARRIER, td__barrier_dissemination, true, false, nothing},
    {0},
};
