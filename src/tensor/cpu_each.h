/* One loop over the elements of several tensors of one shape.
 *
 * A kernel is a function over plain arrays. The loop passes it the longest arrays possible: the tensors' own
 * memory where it is contiguous, and otherwise blocks in small buffers, into which strided, repeated and
 * half-precision elements are copied. So a kernel needs one loop for each type, and no strides. */
#ifndef TD_TENSOR_CPU_EACH_H
#define TD_TENSOR_CPU_EACH_H

#include "tensor/tensor_internal.h"
#include "tensor/vector.h"

/* The result and up to three operands. */
#define TD__EACH_ARRAYS 4

/** Computes `count` elements of arrays[0] from those of the others, all contiguous. arrays[0] may be one of
 *  them. */
typedef void (*td__each_fn)(void *const arrays[], int64_t count, const void *arg);

struct td__each_array {
    char *data;
    td_dtype dtype;
    const int64_t *strides; /* in elements; NULL: one element for all */
};

/** The array of a tensor. */
struct td__each_array td__each_array(const td_tensor *tensor);

/** An element for all indices. */
struct td__each_array td__each_scalar(const void *element, td_dtype dtype);

/** Whether a dtype is f16 or bf16, which kernels get as f32. */
static inline bool td__is_half(td_dtype dtype)
{
    return dtype == TD_F16 || dtype == TD_BF16;
}

/** The dtype in which kernels compute. */
static inline td_dtype td__compute_dtype(td_dtype dtype)
{
    return td__is_half(dtype) ? TD_F32 : dtype;
}

/** Runs `fn` over all elements: arrays[0] is the result, of the shape `shape`, and `arrays[1]` to
 *  `arrays[count - 1]` are operands. `fn` gets f16 and bf16 as f32, or with `raw` unconverted. For many
 *  elements several threads call `fn` at the same time. */
void td__each_run(const struct td__layout *shape, const struct td__each_array *arrays, int count,
                  bool raw, td__each_fn fn, const void *arg);

/** Rows of a result and of two operands. A step is 1, or 0 for an operand that is one element for a whole
 *  row; `out` may be an operand with a step of 1. */
struct td__pairs {
    char *out;
    const char *a, *b;
    int64_t a_step, b_step;
    int64_t count; /* of elements in a row */
    int64_t rows;
    int64_t out_row, a_row, b_row; /* from one row to the next, in bytes */
};

typedef void (*td__each_pair_fn)(const struct td__pairs *pairs, const void *arg);

/** td__each_run() for two operands that are often broadcast. */
void td__each_pair(const struct td__layout *shape, const struct td__each_array arrays[3], bool raw,
                   td__each_pair_fn fn, const void *arg);

/** td__each_run() for tensors; NULL ones at the end are left out. */
void td__each_tensors(td_tensor *out, const td_tensor *a, const td_tensor *b, const td_tensor *c,
                      td__each_fn fn, const void *arg);

/** Copies `count` elements of `size` bytes each (1, 2, 4, 8 or 16); the steps are in bytes. */
void td__copy_steps(void *to, int64_t to_step, const void *from, int64_t from_step, int64_t count,
                    size_t size);

#endif
