/* Arguments of the kernels in batch_norm.cu. */
#ifndef BATCH_NORM_ARGS_H
#define BATCH_NORM_ARGS_H

#include "cuda/channels_args.h"

/** A number for each channel, of any float dtype; data NULL: there is none. */
struct channel_vector {
    void *data;
    int32_t dtype; /* td_dtype */
};

/** batch_norm, and relu(batch_norm(x) + residual): x [images, channels, pixels]. */
struct batch_norm_args {
    struct channel_space space;
    void *out; /* or grad_x; NULL: not wanted */
    const void *x, *grad_y;
    const void *residual, *result; /* of the forward pass */
    void *grad_residual;           /* grad_y where the result is above 0 */
    struct channel_vector weight, bias, running_mean, running_var, grad_weight, grad_bias;
    void *mean, *rstd;    /* of the dtype of the computation … */
    void *factor, *shift; /* … and so these: what was normalised is (x - mean) factor + shift; NULL: not wanted */
    double *partials;  /* [channels, chunks, 2] */
    double momentum, eps;
    int32_t training;
    int32_t sums; /* there are partial sums */
};

enum { BATCH_NORM_THREADS = 256 };

#endif
