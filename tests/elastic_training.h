/* What the tests of elastic training train, and ranks that die meanwhile. */
#ifndef TANDEM_TESTS_ELASTIC_TRAINING_H
#define TANDEM_TESTS_ELASTIC_TRAINING_H

#include <tandem/tandem.h>

enum { SLICES = 8, EACH = 3, IN = 17, WIDE = 40, OUT = 6, SAMPLES = 100, STEPS = 12 };

/* ---- What is trained ---------------------------------------------------------------------------------------------- */

/** The next number of a sequence, from -0.5 to 0.5. */
float number(unsigned *state);
td_dataset *make_dataset(void);
td_module *make_net(uint64_t seed);
/** A hash of a state, which it destroys. */
uint64_t digest(td_state *state, uint64_t hash);

struct elastic_outcome {
    uint64_t weights;
    double loss;
    td_elastic_stats stats;
    td_status status;
    int ranks;
};

/* What a training differs in. */
struct elastic_plan {
    int64_t steps;
    uint64_t seed; /* of the initial weights */
    td_elastic_options options;
    td_elastic_slice_fn slice;
    const char *device; /* NULL: the host */
    bool twice;         /* in two calls */
};

td_status pass(td_elastic_slice *slice, void *plan);
/** Trains on a group until `steps` are done. */
struct elastic_outcome train(const struct elastic_plan *plan, td_group *group);
/** The result of this process alone, which has the whole model. */
struct elastic_outcome train_alone(const struct elastic_plan *plan);

/* ---- Ranks die ---------------------------------------------------------------------------------------------------- */

/* A rank that kills itself at a moment of a step, the first time that it is there, or at any time. */
struct death {
    int rank;
    const char *moment; /* NULL: `us` microseconds after the beginning of the step */
    int64_t step;       /* -1: any but the first */
    int us;
};

extern const struct death *deaths;
extern int death_count;

/** A probe, by which those of `deaths` die. */
td_status die(const char *moment, td_elastic *elastic);
/** Trains on all ranks, of which some die, and compares with this process alone. With a checkpoint it may fail, before
 *  there is one. */
struct elastic_outcome survive(const struct elastic_plan *plan, const struct death *who, int count);
/** The record has each slice of each step once, and the samples are those of the epoch. */
void check_record(const char *path, int64_t steps);
/** survive() with a record, where that succeeds. */
struct elastic_outcome survive_with_record(const struct elastic_plan *plan, const struct death *who,
                                           int count);
/** 1 to 3 of 4 ranks, at random moments. Returns how many. */
int draw_deaths(unsigned seed, struct death who[3]);
/** The tests dies_at_random* of this program, `rounds` times or many (--long), with the seeds after `seed`; a failure names
 *  its own. */
void die_at_random_many_times(int rounds, int seed);

#endif
