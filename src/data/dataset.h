/* The representation of datasets and samplers. */
#ifndef TD_DATA_DATASET_H
#define TD_DATA_DATASET_H

#include <tandem/data.h>

#include <stdatomic.h>

struct td_dataset {
    atomic_int owners;
    const td_dataset_ops *ops;
    void *self;
    int64_t size;
    td_sample_spec input, target;
    size_t input_bytes, target_bytes; /* of a sample */
};

/* ---- Samplers -------------------------------------------------------------------------------- */

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

/** Whether it gives a rank the samples of its slices. */
bool td__sampler_has_slices(const td_sampler *sampler);

/** Ends the epoch. */
void td__sampler_end(td_sampler *sampler);

#endif
