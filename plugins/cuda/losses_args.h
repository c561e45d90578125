/* Arguments of the kernels in losses.cu and cross_entropy.cu. */
#ifndef LOSSES_ARGS_H
#define LOSSES_ARGS_H

#include "cuda/cuda_args.h"

/** x [n, classes, positions], targets [n, positions]. */
struct class_loss_args {
    void *out;          /* the losses, or the gradient of x */
    const void *x;      /* logarithms of probabilities, or logits */
    const void *weight; /* [classes], or NULL */
    const void *grad_y;
    void *statistics; /* of the cross entropy: two numbers a target, in the computation's type */
    const int64_t *target;
    double *factor; /* may be NULL */
    int64_t n, classes, positions, ignore_index;
    int32_t grad_each; /* grad_y has one number a target, not one for all */
    int32_t wide;      /* x is a half; the losses, grad_y and weight are f32 */
    int32_t group;     /* threads of a row: a warp, or the block */
    int32_t slot;      /* enum cuda_fault_kernel */
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

enum {
    LOSS_THREADS = 256,
    LOSS_MOST_BLOCKS = 1024,
    FACTOR_THREADS = 1024,
    ROW_VECTORS = 4,   /* of 16 bytes of a row of logits that a thread loads before it computes */
    ROW_THREADS = 256, /* of a row at most: other rows hide where one begins and ends */
    WARP_ROWS = 4      /* of a block whose rows have a warp each */
};

#endif
