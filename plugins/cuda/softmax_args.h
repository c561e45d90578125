/* Arguments of the kernels in softmax.cu. */
#ifndef SOFTMAX_ARGS_H
#define SOFTMAX_ARGS_H

#include "cuda/norms_args.h"

/** softmax: [outer, size, inner], over the dimension in the middle. All of one dtype. */
struct softmax_args {
    struct norm_vector out; /* or grad_x */
    struct norm_vector x;   /* or y */
    struct norm_vector grad_y;
    int64_t outer, size, inner;
    int32_t logarithm;
    int32_t threads; /* of a row: 32, or all of the block */
};

#endif
