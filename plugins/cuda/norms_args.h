/* Arguments of the kernels in norms.cu; and what softmax.cu and layer_norm.cu have in common with them. */
#ifndef NORMS_ARGS_H
#define NORMS_ARGS_H

#include "cuda/cuda_args.h"

/** A vector of any float dtype; data NULL: there is none. */
struct norm_vector {
    void *data;
    int32_t dtype; /* td_dtype */
};

/** batch_norm: x [images, channels, pixels]. */
struct batch_norm_args {
    void *out; /* or grad_x; NULL: not wanted */
    const void *x, *grad_y;
    struct norm_vector weight, bias, running_mean, running_var, grad_weight, grad_bias;
    void *mean, *rstd; /* of the dtype of the computation */
    int64_t images, channels, pixels;
    int64_t chunks, each; /* of a channel, and elements of one */
    double *partials;     /* [channels, chunks, 2] */
    double *factors;      /* [channels, 4]: coefficients of the last step */
    double momentum, eps;
    int32_t training;
};

/** A row that stays in registers: the threads that share it have groups of ROW_WIDTH neighbours, up to ROW_GROUPS each,
 *  and are at most ROW_THREADS. A kernel stands for each even number of groups. */
enum { NORM_THREADS = 256, ROW_WIDTH = 4, ROW_GROUPS = 8, ROW_THREADS = 256 };

#endif
