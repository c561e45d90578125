/* Arguments of the kernels in layer_norm.cu. */
#ifndef LAYER_NORM_ARGS_H
#define LAYER_NORM_ARGS_H

#include "cuda/norms_args.h"

/** Rows of `size`. Each vector has a dtype of its own; data NULL: there is none. */
struct layer_norm_args {
    struct norm_vector x;        /* backward: what was normalised */
    struct norm_vector residual; /* forward: added to x, into sum */
    struct norm_vector sum;
    struct norm_vector out;
    struct norm_vector weight, bias;
    struct norm_vector grad_y, grad_sum; /* backward: of the result, and of what was normalised by other ways */
    struct norm_vector grad_x, grad_residual;
    struct norm_vector grad_weight, grad_bias;
    void *mean, *rstd; /* of the dtype of the computation; may be NULL forward */
    int64_t rows, size;
    double eps;
    int32_t threads;      /* of a row: 32, or all of the block */
    void *partials;       /* [slices, 2, size]: of the gradients of weight and bias; NULL: not wanted */
    int64_t slices, each; /* rows that a row's threads take, or rows of a slice */
};

enum { LAYER_NORM_COLUMNS = 32, LAYER_NORM_FINISH_THREADS = 1024 };

#endif
