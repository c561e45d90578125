/* f16 and bf16 through f32: a copy of each operand in f32, a result in f32 that is rounded at the end.
 *
 *     struct td__wide w = {0};
 *     const float *x = td__widen(&w, x_tensor);     the elements themselves where they are wide
 *     float *out = td__widen_out(&w, out_tensor, false);
 *     if (w.status == TD_OK) …
 *     return td__widen_end(&w);
 *
 * Copies are contiguous, whatever the strides of the tensor. After a failure the functions return
 * NULL and do nothing. */
#ifndef TD_TENSOR_WIDEN_H
#define TD_TENSOR_WIDEN_H

#include "tensor/aligned.h"
#include "tensor/tensor_internal.h"

#define TD__WIDE_MOST 10

struct td__wide {
    td_status status;
    int count;
    struct {
        struct td__aligned copy;
        td_tensor *result; /* NULL for an operand */
    } parts[TD__WIDE_MOST];
};

/** The compute type: f64 for f64, f32 for the other floats. */
static inline td_dtype td__wide_dtype(const td_tensor *tensor)
{
    return tensor->layout.dtype == TD_F64 ? TD_F64 : TD_F32;
}

/** The elements of an operand; NULL for NULL. */
const void *td__widen(struct td__wide *wide, const td_tensor *tensor);

/** Where the elements of a result go; with their present values if `keep`. NULL for NULL. */
void *td__widen_out(struct td__wide *wide, td_tensor *tensor, bool keep);

/** Rounds the results, unless something failed, and frees the copies. Returns the status. */
td_status td__widen_end(struct td__wide *wide);

#endif
