/* Recursive halving and doubling, for any number of ranks, along the tree of tree.h.
 *
 * In the reduce phase, at level k, two ranks that differ in bit k hold the same interval of the vector, each
 * reduced over its own half of the node. They exchange halves of the interval, and each continues with one of
 * them:
 *
 *     level 0   rank 0 [========]    rank 1 [========]        exchange halves
 *     level 1   rank 0 [====]        rank 1     [====]        … with ranks 2 and 3, halves of those
 *     level 2   rank 0 [==]          rank 1     [==]          …
 *
 * So rank i holds interval reverse(i) in the end. If the right half of a node has fewer ranks than the left, its
 * first 2^j ranks hold longer intervals; each sends its interval in pieces to the ranks on the left that hold
 * those pieces, and the right half is idle until the gather phase, which runs the levels in reverse. Each rank
 * sends at most the whole vector in each phase; (n-1)/n of it if n is a power of two. */
#include "collective/builders.h"
#include "collective/tree.h"

int32_t td__interval_start(int32_t interval, int32_t intervals, int32_t blocks)
{
    return (int32_t)((int64_t)interval * blocks / intervals);
}

/* An interval, as a range of blocks. */
struct cut {
    enum td__schedule_buffer buffer;
    int32_t blocks;
    int32_t first, count;
};

/* Sets the range of the rank with `index` in a full half of 2^level ranks. */
static void select_held(struct cut *cut, int32_t index, int level)
{
    int32_t interval = td__reverse_bits(index, level), all = (int32_t)1 << level;
    cut->first = td__interval_start(interval, all, cut->blocks);
    cut->count = td__interval_start(interval + 1, all, cut->blocks) - cut->first;
}

typedef void (*exchange_fn)(struct td__schedule *schedule, int32_t peer, struct cut mine,
                            struct cut theirs);
typedef void (*step_fn)(struct td__schedule *schedule, int32_t peer,
                        enum td__schedule_buffer buffer, int32_t block, int32_t count);

/* One level of either phase. In an incomplete node the right half uses `on_right` and the left half `on_left`: send
 * and receive in the reduce phase, receive and send in the gather phase. */
static void level_steps(const struct td__plan *plan, struct td__schedule *schedule, struct cut cut,
                        int level, exchange_fn exchange, step_fn on_right, step_fn on_left)
{
    struct td__tree_node node = td__tree_node(plan->rank, plan->size, level);
    if (node.right_size == node.left_size) {
        struct cut mine = cut, theirs = cut;
        int32_t other = node.index + node.left_size;
        select_held(&mine, node.is_left ? node.index : other, level + 1);
        select_held(&theirs, node.is_left ? other : node.index, level + 1);
        exchange(schedule, plan->rank ^ node.left_size, mine, theirs);
    } else if (node.right_size) {
        int32_t owners = (int32_t)1 << td__log2(node.right_size);
        int32_t right = node.low + node.left_size;
        if (node.is_left) {
            select_held(&cut, node.index, level);
            on_left(schedule, right + node.index % owners, cut.buffer, cut.first, cut.count);
        } else if (node.index < owners) {
            for (int32_t left = node.index; left < node.left_size; left += owners) {
                select_held(&cut, left, level);
                on_right(schedule, node.low + left, cut.buffer, cut.first, cut.count);
            }
        }
    }
    td__end_round(schedule);
}

static void exchange_reduce(struct td__schedule *schedule, int32_t peer, struct cut mine,
                            struct cut theirs)
{
    td__send(schedule, peer, theirs.buffer, theirs.first, theirs.count);
    td__recv_reduce(schedule, peer, mine.buffer, mine.first, mine.count);
}

static void exchange_gather(struct td__schedule *schedule, int32_t peer, struct cut mine,
                            struct cut theirs)
{
    td__send(schedule, peer, mine.buffer, mine.first, mine.count);
    td__recv(schedule, peer, theirs.buffer, theirs.first, theirs.count);
}

void td__halving_reduce(const struct td__plan *plan, struct td__schedule *schedule,
                        enum td__schedule_buffer buffer, int32_t blocks)
{
    struct cut cut = {.buffer = buffer, .blocks = blocks};
    for (int level = 0; level < td__tree_levels(plan->size); level++)
        level_steps(plan, schedule, cut, level, exchange_reduce, td__send, td__recv_reduce);
}

void td__halving_gather(const struct td__plan *plan, struct td__schedule *schedule,
                        enum td__schedule_buffer buffer, int32_t blocks)
{
    struct cut cut = {.buffer = buffer, .blocks = blocks};
    for (int level = td__tree_levels(plan->size) - 1; level >= 0; level--)
        level_steps(plan, schedule, cut, level, exchange_gather, td__recv, td__send);
}

void td__allreduce_halving(const struct td__plan *plan, struct td__schedule *schedule)
{
    schedule->blocks = (int32_t)1 << td__log2(plan->size);
    td__halving_reduce(plan, schedule, TD__DATA, schedule->blocks);
    td__halving_gather(plan, schedule, TD__DATA, schedule->blocks);
}

/* Halving, then each rank that holds an interval sends it to the root. */
void td__reduce_halving(const struct td__plan *plan, struct td__schedule *schedule)
{
    int levels = td__log2(plan->size);
    int32_t owners = (int32_t)1 << levels;
    schedule->blocks = owners;
    td__halving_reduce(plan, schedule, TD__DATA, owners);
    if (plan->rank != plan->root && plan->rank < owners)
        td__send(schedule, plan->root, TD__DATA, td__reverse_bits(plan->rank, levels), 1);
    if (plan->rank == plan->root)
        for (int32_t owner = 0; owner < owners; owner++)
            if (owner != plan->root)
                td__recv(schedule, owner, TD__DATA, td__reverse_bits(owner, levels), 1);
    td__end_round(schedule);
}

/* The block at each position of the scratch copy, so that rank r < 2^k ends with block r in front of
 * its interval; the blocks of the other ranks follow it, and are sent on in the end. */
static int32_t block_at(int32_t position, int32_t size, int levels)
{
    int32_t owners = (int32_t)1 << levels;
    int32_t interval = (int32_t)(((int64_t)(position + 1) * owners - 1) / size);
    int32_t start = td__interval_start(interval, owners, size);
    if (position == start)
        return td__reverse_bits(interval, levels);
    int32_t behind_before = start - interval; /* in the intervals before this one */
    return owners + behind_before + position - start - 1;
}

void td__reduce_scatter_halving(const struct td__plan *plan, struct td__schedule *schedule)
{
    int32_t size = plan->size, rank = plan->rank;
    int levels = td__log2(size);
    schedule->blocks = size;
    for (int32_t position = 0; position < size; position++) {
        int32_t block = block_at(position, size, levels);
        td__scratch_block(schedule, block);
        td__copy(schedule, TD__SCRATCH, position, TD__INPUT, block, 1);
    }
    td__end_round(schedule);
    td__halving_reduce(plan, schedule, TD__SCRATCH, size);
    for (int32_t position = 0; position < size; position++) {
        int32_t block = block_at(position, size, levels);
        int32_t owner = block; /* of the interval: the rank whose block is in front */
        for (int32_t front = position; owner >= (int32_t)1 << levels; front--)
            owner = block_at(front - 1, size, levels);
        if (owner == rank && block != rank)
            td__send(schedule, block, TD__SCRATCH, position, 1);
        else if (owner != rank && block == rank)
            td__recv(schedule, owner, TD__DATA, 0, 1);
        else if (block == rank)
            td__copy(schedule, TD__DATA, 0, TD__SCRATCH, position, 1);
    }
    td__end_round(schedule);
}
