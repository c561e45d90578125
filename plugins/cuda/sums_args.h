/* Arguments of the kernels in sums.cu. */
#ifndef SUMS_ARGS_H
#define SUMS_ARGS_H

#include "cuda/cuda_args.h"

/** Sums of the rows of a matrix whose elements are neighbours in a row, or of its columns. */
struct sums_args {
    const void *x;
    int64_t rows, columns, pitch; /* from a row to the next, in elements */
    void *partials;               /* [slices, columns], or [rows, slices]: of the dtype of the computation. NULL: one
                                   * slice, and the result is written */
    int64_t slices, each;         /* rows of a slice, or groups of neighbours of a slice of a row */
    int32_t threads;              /* of a row: 32, or all of the block */
    int32_t squares;              /* sums of squares */
    void *out;                    /* for the last step */
    int64_t out_stride;
    int32_t out_dtype; /* td_dtype */
    int64_t divisor;   /* of a mean; else 1 */
};

enum { SUMS_THREADS = 256, SUMS_FINISH_THREADS = 1024 };

#endif
