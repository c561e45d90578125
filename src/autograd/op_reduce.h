/* Helpers of reductions. */
#ifndef TD_AUTOGRAD_OP_REDUCE_H
#define TD_AUTOGRAD_OP_REDUCE_H

#include "autograd/op.h"

/** The shapes of a reduction, for its node. */
struct td__reduced {
    int64_t whole[TD_MAX_DIMS]; /* of the operand */
    int64_t kept[TD_MAX_DIMS];  /* 1 for reduced dimensions */
    int ndim;
    int64_t count; /* how many elements become one */
};

struct td__reduced td__reduced_of(const td_tensor *x, unsigned mask);

/** The mask of all dimensions. */
static inline unsigned td__all_dims(const td_tensor *x)
{
    return (1u << x->layout.ndim) - 1;
}

/** The mask of these dimensions. */
td_status td__find_dims(const char *call, const td_tensor *x, const int *dims, int count,
                        unsigned *mask);

/** The raw result of a kernel; the reduced dimensions have size 1. */
td_tensor *td__apply_reduce(const char *call, enum td__reduce_kind kind, td_tensor *x,
                            unsigned mask, td_dtype dtype);

/** x without the dimensions of the mask, which have size 1. Takes over the reference. */
td_tensor *td__drop_dims(td_tensor *x, unsigned mask);

/** For backward: the result's gradient expanded to the shape of the operand. */
td_tensor *td__spread(td_tensor *grad_y, const struct td__reduced *reduction);

#endif
