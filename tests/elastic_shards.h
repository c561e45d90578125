/* What the tests of elastic training with shards have in common. */
#ifndef TANDEM_TESTS_ELASTIC_SHARDS_H
#define TANDEM_TESTS_ELASTIC_SHARDS_H

#include "elastic_training.h"
#include "ways.h"

/** Trains on groups of the first 1, 2, … ranks: the bits of one process with the whole model. */
void same_on_all_sizes(const struct elastic_plan *plan);

/** Ranks of the test from `first` on join the others, in a world that is made so, and some die. `left` are there at the end. */
void join_training(const struct way *way, int first, const struct elastic_plan *plan,
                   const struct death *who, int count, int left);

/** Ranks die at random moments, as the variable TD_TEST_ELASTIC_SEED has it. With `checkpoints` one is written after each step,
 *  since copies may be lost. */
void random_deaths(const struct way *way, const struct elastic_plan *plan, bool checkpoints);

/** A test in which some ranks die, and the others end with the bits of one process. */
#define DIES_IN(id, count, hosts_of, plan, ...)                                                    \
    RANKS(id, .ranks = count, .may_die = 0x1f, .deadline_s = 30)                                   \
    {                                                                                              \
        static const struct death who[] = {__VA_ARGS__};                                           \
        struct elastic_plan dies_in = plan;                                                        \
        open_world(hosts_of, 0);                                                                   \
        survive_with_record(&dies_in, who, sizeof who / sizeof *who);                              \
        CHECK_OK(td_destroy_process_group());                                                      \
    }

#endif
