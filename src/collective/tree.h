/* The one tree along which every ordered algorithm reduces, whatever the size of the vector:
 *
 *     level 2                 0..5                     six ranks
 *     level 1        0..3            4..5
 *     level 0     0..1   2..3     4..5
 *                0  1   2  3     4  5
 *
 * At level k the ranks that agree in all but their k+1 lowest bits form a node. Its left half is always full; the
 * right one may have fewer ranks, or none; then the node has the value of the left half. The value of a node is
 * value(left) op value(right). All operations are commutative, so either side may compute it, and all algorithms
 * that combine the same two values get the same bits. */
#ifndef TD_COLLECTIVE_TREE_H
#define TD_COLLECTIVE_TREE_H

#include <stdbool.h>
#include <stdint.h>

struct td__tree_node {
    int32_t low;        /* the first rank of the left half */
    int32_t left_size;  /* 2^level */
    int32_t right_size; /* 0 … left_size */
    bool is_left;       /* the rank in question is in the left half */
    int32_t index;      /* in its half */
};

/** The number of levels for `size` ranks: 0 for one, else the logarithm rounded up. */
int td__tree_levels(int32_t size);

/** The node of `rank` at `level`. */
struct td__tree_node td__tree_node(int32_t rank, int32_t size, int level);

/** The largest k with 2^k <= value, for value >= 1. */
int td__log2(int32_t value);

/** The lowest `bits` bits of `value` in reverse order. */
int32_t td__reverse_bits(int32_t value, int bits);

/** The rank that holds the value of the half that begins at `low`: the root if it is in that half, otherwise the
 *  first rank. */
int32_t td__tree_holder(int32_t low, int32_t half_size, int32_t root);

#endif
