/* Which of the logical slices of a batch a rank computes: neighbouring ones, as evenly as possible, or one in `size`. */
#ifndef TD_BASE_SLICE_RANGE_H
#define TD_BASE_SLICE_RANGE_H

#include <stdint.h>

struct td__slice_range {
    int first, count;
};

/** The slices of a rank; `size` is at most `total`. */
static inline struct td__slice_range td__slices_of(int total, int size, int rank)
{
    int first = (int)((int64_t)total * rank / size);
    return (struct td__slice_range){first, (int)((int64_t)total * (rank + 1) / size) - first};
}

/** How many slices a rank has if they are dealt out: rank, rank + size, rank + 2 * size, … below `total`. */
static inline int td__slices_apart(int total, int size, int rank)
{
    return rank < total ? (total - rank - 1) / size + 1 : 0;
}

#endif
