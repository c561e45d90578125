/* Arguments of the kernels in attention.cu. */
#ifndef ATTENTION_ARGS_H
#define ATTENTION_ARGS_H

#include "cuda/cuda_args.h"

/** A tensor [batches, heads, rows, width] whose last dimension is contiguous. */
struct attention_rows {
    void *data; /* NULL: this result is not wanted */
    int64_t batch, head, row;
};

/* An item is a head of a batch: item / heads, item % heads. */
struct attention_args {
    int64_t items, heads, queries, keys, width, value_width;
    struct attention_rows q, k, v, y; /* y: the result */
    const void *mask;                 /* NULL: none */
    int64_t mask_batch, mask_head, mask_row, mask_column;
    void *lse; /* [items, queries] of the dtype of the computation; NULL: not wanted */
    struct attention_rows grad_y, grad_q, grad_k, grad_v;
    void *delta; /* [items, queries]: the sum over grad_y * y */
    double scale;
    int32_t causal;
};

enum { ATTENTION_WARPS = 4 }; /* of a block, each with a row */

#endif
