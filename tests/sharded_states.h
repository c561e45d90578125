/* States for the tests of sharded checkpoints: tensors whose bytes follow from their number, cut into shards at places that
 * follow from a seed. */
#ifndef TANDEM_TESTS_SHARDED_STATES_H
#define TANDEM_TESTS_SHARDED_STATES_H

#include <tandem/tandem.h>

struct cut_plan {
    unsigned seed; /* of the cuts */
    int ranks;
    bool whole; /* no shards */
    int value;  /* other ones have other bytes */
    bool big;   /* tensors of several blocks, too */
};

/** The state of a rank. With `fill`, the bytes are the right ones, else other ones. */
td_state *sharded_state(const struct cut_plan *plan, int rank, bool fill);

/** Fails unless all bytes are those of value `value`; `untouched`: as without `fill`. */
void check_sharded_state(const td_state *state, int value);
void check_untouched_state(const td_state *state);

/** How many bytes a state has. */
size_t state_bytes(const td_state *state);

/** Ranks 0 to count-1 of the world, in a group; NULL on others, and for all ranks. */
td_group *first_ranks(int count);

#endif
