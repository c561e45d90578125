/* Arguments of the kernels in updates.cu. Those over lists of tensors have as many entries as the 4096 bytes hold that a
 * kernel's arguments may have; longer lists are several launches. A block takes a chunk of one tensor. */
#ifndef UPDATES_ARGS_H
#define UPDATES_ARGS_H

#include "cuda/cuda_args.h"

enum {
    UPDATE_CHUNK = 4096, /* elements a block takes in a step of an optimizer */
    LIST_CHUNK = 16384,  /* … in the others */
    SGD_ENTRIES = 96,
    ADAM_ENTRIES = 68,
    LIST_ENTRIES = 150
};

/* Copies the fault's code to `stopped`, for kernels that do nothing where an earlier one has failed: all of them see the
 * same, and none reads the host's memory. */
struct stopped_args {
    const struct cuda_fault *fault;
    int32_t *stopped;
};

struct sgd_entry {
    void *parameter;
    const void *grad;
    void *buffer; /* NULL: no momentum */
    int64_t count;
    int32_t first_block;
    int32_t aligned; /* all of them, to 16 bytes */
};

struct sgd_args {
    const int32_t *stopped;
    const double *numbers; /* in a graph: those of td_sgd_update, instead of the first four here */
    double rate, momentum, share, weight_decay, sign;
    int32_t nesterov, first;
    int32_t entries;
    struct sgd_entry entry[SGD_ENTRIES];
};

struct adam_entry {
    void *parameter;
    const void *grad;
    void *mean, *square, *greatest; /* the last one may be NULL */
    int64_t count;
    int32_t first_block;
    int32_t aligned;
};

struct adam_args {
    const int32_t *stopped;
    const double *numbers; /* in a graph: those of td_adam_update */
    double beta1, rest1, beta2, rest2, eps, weight_decay, shrink, size, root_correction, sign;
    int32_t entries;
    struct adam_entry entry[ADAM_ENTRIES];
};

/* Scale and unscale, and the sums of power_sums_args.h. */
struct list_entry {
    void *x;
    int64_t count;
    int32_t first_block;
    int16_t dtype; /* td_dtype: a float */
    int16_t aligned;
};

struct list_args {
    const void *multiple; /* scale: the factor, f32 or f64 */
    double factor;        /* unscale */
    float *found;         /* … */
    int32_t wide;         /* `multiple` is f64 */
    int32_t entries;
    struct list_entry entry[LIST_ENTRIES];
};

/* The same for a tensor that is not contiguous. */
struct strided_args {
    struct cuda_space space;
    struct list_args list; /* with one entry */
};

#endif
