/* Arguments of the kernels in pooling.cu. */
#ifndef POOLING_ARGS_H
#define POOLING_ARGS_H

#include "cuda/cuda_args.h"
#include "cuda/divisor.h"

/** Images of `in` pixels, of which windows make `out` pixels. Index 0 is the height. There are fewer than 2^31 pixels on each
 *  side: the host launches a kernel for some of the planes at a time. */
struct pool_args {
    int32_t count; /* of results, or of their groups */
    int32_t in[2], out[2];
    int32_t adaptive; /* without what follows */
    int32_t count_include_pad;
    int32_t kernel[2], stride[2], padding[2], dilation[2];
    struct cuda_divisor by_in[2], by_out[2], by_stride[2];
    struct cuda_divisor by_row; /* groups of a row of in[1] */
    const void *from;           /* x, or grad_y */
    void *to;                   /* out, or grad_x */
    int32_t *indices;           /* may be NULL */
};

/* Neighbours that a thread computes at once in the gradient of maxima, where rows are aligned; 2 of f64. */
enum { POOL_GROUP = 4, POOL_GROUP_F64 = 2 };

#endif
