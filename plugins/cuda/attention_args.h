/* Arguments of the kernels in attention.cu. */
#ifndef ATTENTION_ARGS_H
#define ATTENTION_ARGS_H

#include "cuda/cuda_args.h"

/** A tensor [batches, rows, width] whose last dimension is contiguous. */
struct attention_rows {
    void *data; /* NULL: this result is not wanted */
    int64_t batch, row;
};

struct attention_args {
    int64_t batches, queries, keys, width, value_width;
    struct attention_rows q, k, v, y; /* y: the result */
    const void *mask;                 /* NULL: none */
    int64_t mask_batch, mask_row, mask_column;
    void *lse; /* [batches, queries] of the dtype of the computation; NULL: not wanted */
    struct attention_rows grad_y, grad_q, grad_k, grad_v;
    void *delta; /* [batches, queries]: the sum over grad_y * y */
    double scale;
    int32_t causal;
};

enum { ATTENTION_WARPS = 4 }; /* of a block, each with a row */

#endif
