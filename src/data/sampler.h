/* The representation of a sampler, and what a loader calls. */
#ifndef TD_DATA_SAMPLER_H
#define TD_DATA_SAMPLER_H

#include <tandem/data.h>

#include <stdatomic.h>

struct td_sampler {
    atomic_int owners;
    const td_sampler_ops *ops;
    void *self;
    td_status status;
    int64_t epoch; /* the next one to begin */

    /* The current epoch, if `order` is not NULL. */
    int64_t *order;
    int64_t size;
    td_sampler_position position;

    bool resumes; /* the next epoch resumes at `position` */
    bool busy;    /* a loader is in the middle of the epoch */
};

/** Begins an epoch, unless one has begun. */
td_status td__sampler_begin(td_sampler *sampler);

/** Ends it. */
void td__sampler_end(td_sampler *sampler);

#endif
