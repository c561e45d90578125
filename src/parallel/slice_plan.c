/* Which rank computes which slices, and in which parts of the tree they are. */
#include "parallel/slices.h"

#include "base/fail.h"
#include "collective/tree.h"

#include <tandem/parallel.h>

td_status td__slices_check(const char *call, int total, int size)
{
    if (total < 1 || total > TD__MAX_SLICES || (total & (total - 1)))
        return td_fail(TD_ERR_INVALID,
                       "%s: the number of slices is %d; it is a power of two, up to %d", call,
                       total, TD__MAX_SLICES);
    if (size > total)
        return td_fail(TD_ERR_INVALID,
                       "%s: %d slices are too few for %d ranks; each rank computes one at least",
                       call, total, size);
    return TD_OK;
}

int td__slice_parts(struct td__slice_range range, struct td__slice_range parts[TD__MAX_PARTS])
{
    int count = 0;
    while (range.count > 0) {
        int size = range.first ? range.first & -range.first : TD__MAX_SLICES;
        while (size > range.count)
            size /= 2;
        parts[count++] = (struct td__slice_range){range.first, size};
        range.first += size;
        range.count -= size;
    }
    return count;
}

/* The rank whose slices are exactly this node; -1: there is none. */
static int owner(struct td__slice_range node, int total, int size)
{
    int rank = (int)((int64_t)node.first * size / total);
    for (int r = rank; r < size && r <= rank + 1; r++) {
        struct td__slice_range range = td__slices_of(total, size, r);
        if (range.first == node.first && range.count == node.count)
            return r;
    }
    return -1;
}

/* Whether the sum of `node` is that of the ranks low … low + count - 1 along their tree, `half` being the left half. */
static bool agrees(struct td__slice_range node, int total, int size, int low, int count)
{
    int rank = owner(node, total, size);
    if (rank >= 0 || count == 1)
        return rank == low && count == 1;
    if (node.count == 1)
        return false;
    int left = 1 << td__log2(count - 1); /* the left half of a node is full */
    struct td__slice_range halves[2] = {{node.first, node.count / 2},
                                        {node.first + node.count / 2, node.count / 2}};
    return agrees(halves[0], total, size, low, left) &&
           agrees(halves[1], total, size, low + left, count - left);
}

bool td__slices_are_ranks(int total, int size)
{
    return agrees((struct td__slice_range){0, total}, total, size, 0, size);
}

td_status td_slice_range(int slices, td_group *group, int *first, int *count)
{
    int rank = td_get_rank(group), size = td_get_world_size(group);
    if (!first || !count)
        return td_fail(TD_ERR_INVALID, "td_slice_range: %s is NULL", first ? "count" : "first");
    if (size < 1)
        return td_fail(TD_ERR_STATE,
                       "td_slice_range: there is no process group, or this rank is not in it");
    TD_TRY(td__slices_check("td_slice_range", slices, size));
    struct td__slice_range range = td__slices_of(slices, size, rank);
    *first = range.first;
    *count = range.count;
    return TD_OK;
}
