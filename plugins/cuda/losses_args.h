/* Arguments of the kernels in losses.cu. */
#ifndef LOSSES_ARGS_H
#define LOSSES_ARGS_H

#include "cuda/cuda_args.h"

/** x [n, classes, positions], targets [n, positions]. */
struct class_loss_args {
    void *out;          /* the losses, or the gradient of x */
    const void *x;      /* logarithms of probabilities */
    const void *weight; /* [classes], or NULL */
    const void *grad_y;
    const int64_t *target;
    double *factor; /* may be NULL */
    int64_t n, classes, positions, ignore_index;
    int32_t grad_each; /* grad_y has one number a target, not one for all */
    struct cuda_fault *fault;
};

struct pair_loss_args {
    void *out;
    const void *x, *y, *grad_y;
    int64_t count;
    double scale;
    int32_t loss;      /* td_pair_loss */
    int32_t grad_each; /* grad_y has one number an element, not one for all */
    double *partials;  /* of a sum: one a block */
    int64_t blocks;
};

enum { LOSS_THREADS = 256, LOSS_MOST_BLOCKS = 1024, FACTOR_THREADS = 1024 };

#endif
