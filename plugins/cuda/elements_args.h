/* Arguments of the kernels over elements: elements.cu, unary.cu, binary.cu. */
#ifndef ELEMENTS_ARGS_H
#define ELEMENTS_ARGS_H

#include "cuda/cuda_args.h"

/* The numbers of td_dtype, for kernels that choose by them; launch_elements.c asserts that they are the same. */
enum cuda_dtype {
    CUDA_F32,
    CUDA_F64,
    CUDA_F16,
    CUDA_BF16,
    CUDA_I8,
    CUDA_U8,
    CUDA_I16,
    CUDA_I32,
    CUDA_I64,
    CUDA_U32,
    CUDA_U64,
    CUDA_BOOL,
    CUDA_COMPLEX64,
    CUDA_COMPLEX128,
    CUDA_DTYPES
};

/* How many elements a thread takes at once, by the size of the largest type: 16 bytes of it. Small integers are
 * computed as 32 bits each, so more than 4 of them gain nothing. */
#define CUDA_WIDTH(bytes) ((bytes) >= 16 ? 1 : 16 / (bytes))
#define CUDA_INTEGER_WIDTH(bytes) ((bytes) <= 4 ? 4 : 2)

struct fill_args {
    struct cuda_each each;
    void *out;
    uint64_t value[2]; /* an element */
};

/* Copies, conversions, clamp, and operations on one operand. */
struct map_args {
    struct cuda_each each; /* out, x */
    void *out;
    const void *x;
    int32_t op;          /* td_unary; for conversions the dtype of x */
    double low, high;    /* clamp: of floats */
    int64_t least, most; /* … and of integers; the bits of unsigned ones */
};

/* A transposed copy, in tiles: out[batch][i][j] = x[batch][j][i], neighbours of out along j, and of x along i. */
enum { TRANSPOSE_TILE = 32, TRANSPOSE_ROWS = 8 };

struct transpose_args {
    struct cuda_space batch; /* out, x: all other dimensions */
    void *out;
    const void *x;
    int64_t rows, columns;        /* i, j */
    int64_t out_stride, x_stride; /* of i in out, of j in x */
    int64_t row_tiles, column_tiles;
};

/* Two operands; NULL is the scalar. The gradients of one operand: a is grad_y, b what was saved. */
struct pair_args {
    struct cuda_each each; /* out, a, b */
    void *out;
    const void *a, *b;
    int32_t op;         /* td_binary */
    uint64_t scalar[2]; /* an element */
    double alpha;       /* add_scaled */
    int64_t whole_alpha;
};

struct where_args {
    struct cuda_each each; /* out, condition, a, b */
    void *out;
    const void *condition, *a, *b;
};

#endif
