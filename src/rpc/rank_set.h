/* A set of ranks, of which a worker may know a few among many. */
#ifndef TD_RPC_RANK_SET_H
#define TD_RPC_RANK_SET_H

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

struct td__rank_set {
    int *at; /* in increasing order */
    int count, capacity;
};

/** The index of the first rank that is not below `rank`. */
static inline int td__rank_set_find(const struct td__rank_set *set, int rank)
{
    int low = 0, high = set->count;
    while (low < high) {
        int middle = low + (high - low) / 2;
        if (set->at[middle] < rank)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/** False: no memory. */
static inline bool td__rank_set_add(struct td__rank_set *set, int rank)
{
    int at = td__rank_set_find(set, rank);
    if (at < set->count && set->at[at] == rank)
        return true;
    if (set->count == set->capacity) {
        int capacity = set->capacity ? 2 * set->capacity : 8;
        int *more = realloc(set->at, sizeof *more * (size_t)capacity);
        if (!more)
            return false;
        set->at = more;
        set->capacity = capacity;
    }
    memmove(set->at + at + 1, set->at + at, sizeof *set->at * (size_t)(set->count - at));
    set->at[at] = rank;
    set->count++;
    return true;
}

/** Whether it was there. */
static inline bool td__rank_set_remove(struct td__rank_set *set, int rank)
{
    int at = td__rank_set_find(set, rank);
    if (at == set->count || set->at[at] != rank)
        return false;
    set->count--;
    memmove(set->at + at, set->at + at + 1, sizeof *set->at * (size_t)(set->count - at));
    return true;
}

static inline void td__rank_set_free(struct td__rank_set *set)
{
    free(set->at);
    *set = (struct td__rank_set){0};
}

#endif
