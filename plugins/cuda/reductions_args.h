/* Arguments of the kernels in reductions.cu. */
#ifndef REDUCTIONS_ARGS_H
#define REDUCTIONS_ARGS_H

#include "cuda/cuda_args.h"

/** Dimensions of x that are kept, or reduced; the fastest first. */
struct reduce_dims {
    int64_t count; /* of elements */
    int32_t ndim;
    int64_t size[CUDA_MAX_DIMS];
    int64_t x_stride[CUDA_MAX_DIMS], out_stride[CUDA_MAX_DIMS];
};

/** `group` threads reduce one result, or one part of it. */
struct reduce_args {
    const void *x;
    void *out;
    void *partials; /* [results, splits]: where the elements of a result are split; else NULL */
    struct reduce_dims kept, reduced;
    int64_t splits, chunk; /* elements of a split */
    int32_t group;         /* a power of two up to 32, or all threads of the block */
    int32_t kind;          /* td_reduce_kind */
    int32_t dtype, out_dtype;
    int32_t least; /* arg_reduce: the least element, not the greatest */
    int32_t whole; /* x are the partials: no conversion any more */
    int64_t terms; /* of a mean */
};

enum { REDUCE_THREADS = 256 };

#endif
