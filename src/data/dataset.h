/* The representation of a dataset. */
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

#endif
