/* Arguments of the kernels in pooling.cu. */
#ifndef POOLING_ARGS_H
#define POOLING_ARGS_H

#include "cuda/cuda_args.h"

/** Images of `in` pixels, of which windows make `out` pixels. Index 0 is the height. */
struct pool_args {
    int64_t planes; /* images times channels */
    int64_t in[2], out[2];
    int32_t adaptive; /* without what follows */
    int32_t count_include_pad;
    int64_t kernel[2], stride[2], padding[2], dilation[2];
    const void *from; /* x, or grad_y */
    void *to;         /* out, or grad_x */
    int32_t *indices; /* may be NULL */
    int32_t *heads;   /* the gradient of maxima: the last output of each input pixel, */
    int32_t *links;   /* and of each output the one before; -1: none */
};

#endif
