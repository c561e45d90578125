/* The drawing of memory_curve.c. */
#ifndef TANDEM_EXAMPLES_MEMORY_DRAWING_H
#define TANDEM_EXAMPLES_MEMORY_DRAWING_H

#include <tandem/base.h>

#include <stdint.h>

/** Bytes of a rank that are there during the whole step, and the most in all. */
struct memory_levels {
    double parameters, state, gradients, peak;
};

/** Bytes that come and go. `part` is an enum memory_part. */
struct memory_sample {
    float ms, whole, activations, part;
};

struct memory_run {
    char name[64]; /* "ddp", "full_shard" */
    int ranks;
    int64_t count; /* samples of each rank */
    struct memory_sample *samples;
    struct memory_levels *levels; /* of each rank */
};

void memory_run_free(struct memory_run *run);

/** Writes directory/memory-<name>.csv, and directory/memory.svg of all such files there. */
td_status memory_drawing_write(const char *directory, const struct memory_run *run);

#endif
