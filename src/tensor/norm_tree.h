/* The order in which norms are summed (the slots power_sums and norm of kernels.h): a binary tree over the blocks of a
 * tensor that depends on their number alone.
 *
 *     blocks     0   1   2   3   4   5   6          a node of 2^k blocks begins at a multiple of 2^k;
 *                 \ /     \ /     \ /   |           what is left at the end is added from the right
 *                  01      23      45   6
 *                    \    /          \ /
 *                     0123           456
 *                         \         /
 *                           0123456
 *
 * So any range of blocks is a few complete nodes, and whoever has those of all ranges gets the same bits as one who has
 * all blocks. */
#ifndef TD_TENSOR_NORM_TREE_H
#define TD_TENSOR_NORM_TREE_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>

/** Elements of a block; their sum is in cpu_norm_loops.h. */
#define TD__NORM_BLOCK 1024

enum { TD__NORM_LEVELS = 64 };

/** Nodes of decreasing sizes, which are combined as soon as a neighbour of the same size comes. */
struct td__norm_tree {
    bool greatest; /* the greatest number instead of the sum */
    int count;
    int64_t begins[TD__NORM_LEVELS], sizes[TD__NORM_LEVELS];
    double values[TD__NORM_LEVELS];
};

/** The sum of two nodes, or the greatest of both, where NaN is greater than all numbers. */
static inline double td__norm_join(double a, double b, bool greatest)
{
    if (!greatest)
        return a + b;
    return a > b || isnan(a) ? a : b;
}

/** Adds the node of `size` blocks, a power of two, from block `begin` on, a multiple of it; in the order of the blocks. */
static inline void td__norm_push(struct td__norm_tree *tree, int64_t begin, int64_t size,
                                 double value)
{
    int last = tree->count;
    while (last > 0 && tree->sizes[last - 1] == size && tree->begins[last - 1] % (2 * size) == 0) {
        last--;
        value = td__norm_join(tree->values[last], value, tree->greatest);
        begin = tree->begins[last];
        size *= 2;
    }
    tree->begins[last] = begin;
    tree->sizes[last] = size;
    tree->values[last] = value;
    tree->count = last + 1;
}

/** The root, of all blocks from block 0, or another multiple of the number of blocks, on. */
static inline double td__norm_result(const struct td__norm_tree *tree)
{
    int last = tree->count - 1;
    double value = last < 0 ? 0 : tree->values[last];
    while (--last >= 0)
        value = td__norm_join(tree->values[last], value, tree->greatest);
    return value;
}

/** The size of the first complete node of the blocks `begin` to `end` - 1. */
static inline int64_t td__norm_node(int64_t begin, int64_t end)
{
    int64_t size = 1;
    while (begin % (2 * size) == 0 && 2 * size <= end - begin)
        size *= 2;
    return size;
}

/** The norm of what has this sum. A NaN is always the same one, so that its bits do not depend on the order either. */
static inline double td__norm_root(double sum, double power)
{
    if (isnan(sum))
        return (double)NAN;
    return isinf(power) || power == 1 ? sum : power == 2 ? sqrt(sum) : pow(sum, 1 / power);
}

#endif
