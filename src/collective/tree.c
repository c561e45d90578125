/* The reduction tree; see tree.h. */
#include "collective/tree.h"

int td__log2(int32_t value)
{
    return 31 - __builtin_clz((unsigned)value);
}

int td__tree_levels(int32_t size)
{
    return size == 1 ? 0 : td__log2(size - 1) + 1;
}

struct td__tree_node td__tree_node(int32_t rank, int32_t size, int level)
{
    int32_t half = (int32_t)1 << level;
    int32_t low = rank & ~(2 * half - 1);
    int32_t right = size - low - half;
    bool is_left = rank < low + half;
    return (struct td__tree_node){.low = low,
                                  .left_size = half,
                                  .right_size = right < 0      ? 0
                                                : right < half ? right
                                                               : half,
                                  .is_left = is_left,
                                  .index = is_left ? rank - low : rank - low - half};
}

int32_t td__reverse_bits(int32_t value, int bits)
{
    int32_t reversed = 0;
    for (int i = 0; i < bits; i++)
        reversed |= (value >> i & 1) << (bits - 1 - i);
    return reversed;
}

int32_t td__tree_holder(int32_t low, int32_t half_size, int32_t root)
{
    return root >= low && root < low + half_size ? root : low;
}
