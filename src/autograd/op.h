/* Helpers of operators. An operator looks like this:
 *
 *     static td_status square_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
 *     {
 *         td_tensor *x = td_node_saved(node, 0);
 *         grad_x[0] = td_mul_scalar(td_mul(grad_y[0], x), 2);
 *         return td__done(grad_x[0]);
 *     }
 *     static const td_function square_function = {.name = "td_square", .backward = square_backward};
 *
 *     td_tensor *td_square(td_tensor *x)
 *     {
 *         td_tensor *y = td__apply_unary(TD_UNARY_SQUARE, x);            raw: one reference, not recorded
 *         return td__result(&square_function, y,
 *                           &(td_node_spec){.inputs = {x}, .input_count = 1,
 *                                        .saved = {x}, .saved_count = 1});
 *     }
 *
 * Backward runs in a scope with grad mode off: it may call public functions, and td__adopt() gives
 * raw results to the scope. */
#ifndef TD_AUTOGRAD_OP_H
#define TD_AUTOGRAD_OP_H

#include "autograd/graph.h"

#include <tandem/ops.h>

/** TD_OK for a tensor; for NULL the status of the last error. */
td_status td__done(const td_tensor *tensor);

/** Fails if dtypes or devices differ: "td_add: the operands are f32 and f64; …". */
td_status td__check_same(const char *call, const td_tensor *a, const td_tensor *b);

/** Fails if the dtype is not a floating-point one. */
td_status td__check_float(const char *call, const td_tensor *x);

/** Fails if the number of dimensions is out of range: "x has the shape …". */
td_status td__check_dims(const char *call, const char *what, const td_tensor *x, int least,
                         int most);

/** The shape that both broadcast to; returns its number of dimensions, or -1 with an error that
 *  names both. */
int td__broadcast(const char *call, const td_tensor *a, const td_tensor *b, int64_t *shape);

/** A raw result and the operands expanded to its shape, for a kernel. */
struct td__pair {
    td_tensor *a, *b; /* views, owned by the pair */
    int64_t shape[TD_MAX_DIMS];
    int ndim;
};
td_status td__pair_init(struct td__pair *pair, const char *call, td_tensor *a, td_tensor *b);
void td__pair_free(struct td__pair *pair);

/** Returns `tensor` if status is TD_OK; otherwise releases it and returns NULL. For
 *      return td__kept(out, kernels->unary(TD_UNARY_EXP, out, x)); */
td_tensor *td__kept(td_tensor *tensor, td_status status);

/** Passes a kernel's status on, with the name of the call instead of the kernel's in the error. A
 *  dtype that the kernel lacks becomes TD_ERR_INVALID, and the error names it. */
td_status td__kernel_status(const char *call, const td_tensor *x, td_status status);

/** Raw result of one kernel: checks, allocates, computes. NULL for NULL, and on failure. */
td_tensor *td__apply_unary(const char *call, td_unary op, td_tensor *x);
td_tensor *td__apply_binary(const char *call, td_binary op, td_tensor *a, td_tensor *b);
td_tensor *td__apply_scalar(const char *call, td_binary op, td_tensor *a, double b,
                            bool reversed);

/** A number as a raw tensor of no dimensions, of the dtype and on the device of `like`. */
td_tensor *td__number(const char *call, double value, const td_tensor *like);

/** Raw zeros of a shape, of the dtype and on the device of `like`. */
td_tensor *td__zeros(const char *call, const int64_t *shape, int ndim, const td_tensor *like);

/** condition ? a : b, raw; all three broadcast. */
td_tensor *td__apply_where(const char *call, td_tensor *condition, td_tensor *a, td_tensor *b);

/** Fails for the first index (of a contiguous tensor) that is not in 0 … size - 1: "<call>: the
 *  <what> at [1, 2] is 7; it must be 0 to 4". */
td_status td__check_indices(const char *call, const char *what, const td_tensor *indices,
                            int64_t size);

/** A bool tensor: which elements the two bounds of a clamp leave unchanged. */
td_tensor *td__clamp_keeps(td_tensor *x, const double *bounds);

/* ---- Reductions (op_reduce.c) ---------------------------------------------------------------- */

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
td_tensor *td__apply_reduce(const char *call, td_reduce_kind kind, td_tensor *x,
                            unsigned mask, td_dtype dtype);

/** x without the dimensions of the mask, which have size 1. Takes over the reference. */
td_tensor *td__drop_dims(td_tensor *x, unsigned mask);

/** For backward: the result's gradient expanded to the shape of the operand. */
td_tensor *td__spread(td_tensor *grad_y, const struct td__reduced *reduction);

#endif
