/* Arguments of the kernels in products.cu. */
#ifndef PRODUCTS_ARGS_H
#define PRODUCTS_ARGS_H

#include "cuda/cuda_args.h"

/** out = alpha * a b (+ out) (+ bias), for each matrix of the batch. Strides are in elements. */
struct product_args {
    const void *a, *b, *bias; /* bias: [n] or NULL */
    void *out;
    int64_t m, n, k;
    int64_t a_row, a_column, b_row, b_column, out_row; /* columns of out follow one another */
    int64_t batches;
    int32_t batch_dims;
    int32_t accumulate;
    int64_t size[CUDA_MAX_DIMS];      /* of the dimensions of the batch, the fastest first */
    int64_t stride[3][CUDA_MAX_DIMS]; /* out, a, b */
    double alpha;
};

/** to[r][c] = from[r][c], of 2 bytes each, and 0 where `from` ends before `to`. Rows are `…_ld` elements apart. */
struct padded_args {
    const void *from;
    void *to;
    int64_t from_rows, from_columns, from_ld;
    int64_t rows, columns, to_ld;
};

enum { PADDED_THREADS = 256, PADDED_EACH = 8 };

enum { PRODUCT_TILE = 64, PRODUCT_DEPTH = 16, PRODUCT_THREADS = 256 };

/* Of small products; they are summed in one go, so their inner dimension has at most SMALL_MOST_K elements. */
enum { SMALL_TILE = 32, SMALL_DEPTH = 64, SMALL_THREADS = 256, SMALL_MOST_K = 256 };

#endif
