/* Arguments of the kernels in norms.cu. */
#ifndef NORMS_ARGS_H
#define NORMS_ARGS_H

#include "cuda/cuda_args.h"

/** A vector of any float dtype; data NULL: there is none. */
struct norm_vector {
    void *data;
    int32_t dtype; /* td_dtype */
};

/** softmax: [outer, size, inner], over the dimension in the middle. */
struct softmax_args {
    void *out;     /* or grad_x */
    const void *x; /* or y */
    const void *grad_y;
    int64_t outer, size, inner;
    int32_t logarithm;
    int32_t group; /* threads of a row: 32, or all of the block */
};

/** layer_norm: rows of `size`. */
struct layer_norm_args {
    void *out; /* or grad_x; NULL: not wanted */
    const void *x, *grad_y;
    struct norm_vector weight, bias;
    struct norm_vector grad_weight, grad_bias;
    void *mean, *rstd; /* of the dtype of the computation; may be NULL forward */
    int64_t rows, size;
    double eps;
    int32_t group;
    void *partials;       /* [slices, 2, size]: of the gradients of weight and bias */
    int64_t slices, each; /* rows of a slice */
};

enum { NORM_THREADS = 256, NORM_COLUMNS = 32 };

#endif
