/* Rooted operations: binomial trees along the tree of tree.h, and direct sends from or to the root.
 *
 * In each half of a node one rank holds its value: the root if it is in that half, else the first rank. Towards
 * the root, the holder of the half without the root sends to the other holder; away from the root it receives
 * from it. The tree is the same for every root:
 *
 *     root 2 of 6, towards the root:    1 -> 0   3 -> 2   5 -> 4;    0 -> 2;    4 -> 2          */
#include "collective/builders.h"
#include "collective/tree.h"

enum direction { TO_ROOT, FROM_ROOT };

/* What two holders exchange: the vector, the vector to be reduced, or the blocks of the far half. */
enum load { WHOLE, WHOLE_REDUCED, BLOCKS };

static void level_steps(const struct td__plan *plan, struct td__schedule *schedule, int level,
                        enum direction direction, enum load load)
{
    struct td__tree_node node = td__tree_node(plan->rank, plan->size, level);
    int32_t right = node.low + node.left_size;
    int32_t left_holder = td__tree_holder(node.low, node.left_size, plan->root);
    int32_t right_holder = td__tree_holder(right, node.right_size, plan->root);
    bool root_right = plan->root >= right && plan->root < right + node.right_size;
    int32_t near = root_right ? right_holder : left_holder;
    int32_t far = root_right ? left_holder : right_holder;
    if (node.right_size && (plan->rank == near || plan->rank == far)) {
        /* With BLOCKS: those of the far half. */
        int32_t block = load == BLOCKS && !root_right ? right : load == BLOCKS ? node.low : 0;
        int32_t count = load != BLOCKS ? schedule->blocks
                        : root_right   ? node.left_size
                                       : node.right_size;
        bool sends = (plan->rank == far) == (direction == TO_ROOT);
        int32_t peer = plan->rank == near ? far : near;
        if (sends)
            td__send(schedule, peer, TD__DATA, block, count);
        else if (load == WHOLE_REDUCED)
            td__recv_reduce(schedule, peer, TD__DATA, block, count);
        else
            td__recv(schedule, peer, TD__DATA, block, count);
    }
    td__end_round(schedule);
}

static void to_root(const struct td__plan *plan, struct td__schedule *schedule, enum load load)
{
    for (int level = 0; level < td__tree_levels(plan->size); level++)
        level_steps(plan, schedule, level, TO_ROOT, load);
}

static void from_root(const struct td__plan *plan, struct td__schedule *schedule, enum load load)
{
    for (int level = td__tree_levels(plan->size) - 1; level >= 0; level--)
        level_steps(plan, schedule, level, FROM_ROOT, load);
}

void td__broadcast_tree(const struct td__plan *plan, struct td__schedule *schedule)
{
    from_root(plan, schedule, WHOLE);
}

void td__reduce_tree(const struct td__plan *plan, struct td__schedule *schedule)
{
    to_root(plan, schedule, WHOLE_REDUCED);
}

void td__gather_tree(const struct td__plan *plan, struct td__schedule *schedule)
{
    schedule->blocks = plan->size;
    to_root(plan, schedule, BLOCKS);
}

void td__scatter_tree(const struct td__plan *plan, struct td__schedule *schedule)
{
    schedule->blocks = plan->size;
    from_root(plan, schedule, BLOCKS);
}

/* For long vectors: a scatter, then an all_gather. The root sends (n-1)/n of the vector in each, instead of the
 * whole vector log2(n) times. */
void td__broadcast_scatter(const struct td__plan *plan, struct td__schedule *schedule)
{
    td__scatter_tree(plan, schedule);
    td__allgather_doubling(plan, schedule);
}

void td__broadcast_direct(const struct td__plan *plan, struct td__schedule *schedule)
{
    if (plan->rank != plan->root)
        td__recv(schedule, plan->root, TD__DATA, 0, schedule->blocks);
    else
        for (int32_t rank = 0; rank < plan->size; rank++)
            if (rank != plan->root)
                td__send(schedule, rank, TD__DATA, 0, schedule->blocks);
    td__end_round(schedule);
}

void td__gather_direct(const struct td__plan *plan, struct td__schedule *schedule)
{
    schedule->blocks = plan->size;
    if (plan->rank != plan->root)
        td__send(schedule, plan->root, TD__DATA, plan->rank, 1);
    else
        for (int32_t rank = 0; rank < plan->size; rank++)
            if (rank != plan->root)
                td__recv(schedule, rank, TD__DATA, rank, 1);
    td__end_round(schedule);
}

void td__scatter_direct(const struct td__plan *plan, struct td__schedule *schedule)
{
    schedule->blocks = plan->size;
    if (plan->rank != plan->root)
        td__recv(schedule, plan->root, TD__DATA, plan->rank, 1);
    else
        for (int32_t rank = 0; rank < plan->size; rank++)
            if (rank != plan->root)
                td__send(schedule, rank, TD__DATA, rank, 1);
    td__end_round(schedule);
}
