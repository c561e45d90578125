/* Recursive doubling, for any number of ranks, along the tree of tree.h: few rounds, for short
 * vectors. At each level every rank of a node gets the data of the other half:
 *
 *     full node         rank i <-> rank i + 2^k
 *     incomplete node   rank i on the left receives from rank i mod |right| on the right, rank i on the
 *                       right from rank i on the left
 *
 * After ceil(log2(n)) rounds every rank has all data. */
#include "collective/builders.h"
#include "collective/tree.h"

/* The ranks of the other half that this one sends to: *first, *first + *step, … below *end. */
static void receivers(const struct td__tree_node *node, int32_t *first, int32_t *step, int32_t *end)
{
    int32_t right = node->low + node->left_size;
    if (node->is_left) {
        *first = right + node->index;
        *step = node->left_size;
        *end = right + node->right_size;
    } else {
        *first = node->low + node->index;
        *step = node->right_size;
        *end = right;
    }
}

static int32_t sender(const struct td__tree_node *node)
{
    return node->is_left ? node->low + node->left_size + node->index % node->right_size
                         : node->low + node->index;
}

void td__allreduce_doubling(const struct td__plan *plan, struct td__schedule *schedule)
{
    schedule->scratch_blocks = 1;
    for (int level = 0; level < td__tree_levels(plan->size); level++) {
        struct td__tree_node node = td__tree_node(plan->rank, plan->size, level);
        if (node.right_size) {
            int32_t peer, step, end;
            receivers(&node, &peer, &step, &end);
            for (; peer < end; peer += step)
                td__send(schedule, peer, TD__DATA, 0, 1);
            td__recv(schedule, sender(&node), TD__SCRATCH, 0, 1);
            td__reduce(schedule, TD__DATA, 0, TD__SCRATCH, 0, 1);
        }
        td__end_round(schedule);
    }
}

void td__allgather_doubling(const struct td__plan *plan, struct td__schedule *schedule)
{
    schedule->blocks = plan->size;
    for (int level = 0; level < td__tree_levels(plan->size); level++) {
        struct td__tree_node node = td__tree_node(plan->rank, plan->size, level);
        if (node.right_size) {
            int32_t right = node.low + node.left_size, peer, step, end;
            int32_t mine = node.is_left ? node.low : right;
            int32_t theirs = node.is_left ? right : node.low;
            receivers(&node, &peer, &step, &end);
            for (; peer < end; peer += step)
                td__send(schedule, peer, TD__DATA, mine,
                         node.is_left ? node.left_size : node.right_size);
            td__recv(schedule, sender(&node), TD__DATA, theirs,
                     node.is_left ? node.right_size : node.left_size);
        }
        td__end_round(schedule);
    }
}

/* In round k rank r sends to rank r + 2^k and receives from rank r - 2^k: after the last round it has received,
 * directly or through others, from every rank. */
void td__barrier_dissemination(const struct td__plan *plan, struct td__schedule *schedule)
{
    schedule->blocks = 0;
    for (int32_t distance = 1; distance < plan->size; distance *= 2) {
        td__send(schedule, (plan->rank + distance) % plan->size, TD__DATA, 0, 0);
        td__recv(schedule, (plan->rank - distance + plan->size) % plan->size, TD__DATA, 0, 0);
        td__end_round(schedule);
    }
}
