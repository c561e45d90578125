/* What a sampler is made of, and what a loader does with one. */
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

    /* The epoch that is under way, where `order` is not NULL. */
    int64_t *order;
    int64_t size;
    td_sampler_position position;

    bool resumes; /* the next epoch to begin is that of `position`, and goes on from there */
    bool busy;    /* a loader is in the middle of the epoch */
};

/** Begins an epoch, unless one is under way. */
td_status td__sampler_begin(td_sampler *sampler);

/** Ends it. */
void td__sampler_end(td_sampler *sampler);

#endif
