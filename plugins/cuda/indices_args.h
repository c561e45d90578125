/* Arguments of the kernels in indices.cu. */
#ifndef INDICES_ARGS_H
#define INDICES_ARGS_H

#include "cuda/cuda_args.h"

/** Lines of three tensors along one dimension: `lines` are the other dimensions. Strides are in elements. */
struct index_args {
    void *out;
    const void *x; /* or src */
    const int64_t *index;
    struct cuda_space lines;              /* of out, x, index */
    int64_t length;                       /* of the index's lines */
    int64_t limit;                        /* of the dimension that is indexed */
    int64_t out_step, x_step, index_step; /* along the dimension */
    struct cuda_fault *fault;
    int32_t kernel; /* enum cuda_fault_kernel */
    /* index_add with sorted indices: */
    const int32_t *order; /* positions of src, sorted by index, and among equal ones by position */
};

/** A pass of the sort of positions by 4 bits of their indices, stable. */
struct sort_args {
    const int64_t *index;
    const int32_t *from; /* positions; NULL: 0, 1, 2 … */
    int32_t *to;
    int32_t *counts; /* [16, tiles] */
    int64_t count, limit, tiles;
    int32_t shift;
};

enum { SORT_DIGITS = 16, SORT_THREADS = 256, SORT_EACH = 16, SORT_TILE = SORT_THREADS * SORT_EACH };

#endif
