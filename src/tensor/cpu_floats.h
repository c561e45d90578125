/* The elements of contiguous tensors of floats as numbers to compute with: f64 as they are, f32 as
 * they are, halves as a copy in f32 that is there for the length of one kernel. So a kernel has
 * loops for two types only:
 *
 *     struct td__floats f = td__floats_begin(x);
 *     const void *from = td__floats_in(&f, x);
 *     void *to = td__floats_out(&f, out);
 *     if (f.status == TD_OK)
 *         loops(to, from);
 *     return td__floats_end(&f);
 *
 * NULL for a tensor gives NULL. */
#ifndef TD_TENSOR_CPU_FLOATS_H
#define TD_TENSOR_CPU_FLOATS_H

#include "tensor/tensor.h"

#define TD__FLOATS_MOST 10

struct td__floats {
    td_status status; /* the first failure */
    td_dtype dtype;   /* what is computed with: TD_F32 or TD_F64 */
    int copies;
    struct {
        void *data;
        td_tensor *out; /* where it goes to in the end, or NULL */
    } copy[TD__FLOATS_MOST];
};

/** Starts for kernels that compute in the precision of `x`, which is not NULL. Where it is no float
 *  the status is TD_ERR_UNSUPPORTED, and the others below do nothing. */
struct td__floats td__floats_begin(const td_tensor *x);

const void *td__floats_in(struct td__floats *floats, const td_tensor *tensor);

/** What is written there arrives in the tensor at the end. */
void *td__floats_out(struct td__floats *floats, td_tensor *tensor);

/** The same for one that is read first. */
void *td__floats_inout(struct td__floats *floats, td_tensor *tensor);

/** Memory of the kernel's own, `count` numbers, not initialised. NULL without memory. */
void *td__floats_scratch(struct td__floats *floats, int64_t count);

/** Writes the results where they belong, unless something has failed, and returns the status. */
td_status td__floats_end(struct td__floats *floats);

#endif
