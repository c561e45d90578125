/* Between the ways to compute a matrix product. */
#ifndef PRODUCTS_H
#define PRODUCTS_H

#include "cuda/products_args.h"

#include <tandem/tensor.h>

/** What cuBLASLt computes besides the product. */
struct lt_extra {
    enum {
        LT_GELU = 1,  /* aux = the product with its bias; out = gelu_tanh of it */
        LT_GELU_GRAD, /* out = the product * the derivative of gelu_tanh at aux; bias, where not NULL: the sums of its columns */
        LT_F32,       /* nothing: a and b are of the dtype `halves`, and out is f32 */
    } kind;
    void *aux; /* [m, n], rows follow one another */
    void *grad_bias;
    td_dtype halves;
};

/** Computes a product in the way that suits it. */
td_status td__cuda_multiply(const struct product_args *args, td_tensor *out);

/** out [N, O] = x [N, I] w^T [O, I] + bias. */
struct product_args td__cuda_linear_args(td_tensor *out, const td_tensor *x, const td_tensor *w,
                                         const td_tensor *bias);

/** Computes a product by cuBLASLt. *done: false where the library is not there, or does not take the strides; nothing
 *  was enqueued then. `extra` may be NULL; otherwise there is no batch. */
td_status td__lt_multiply(const struct product_args *args, const struct lt_extra *extra,
                          td_tensor *out, bool *done);

/** Computes a product by `multiply`, of copies whose rows are aligned, where that is faster (padded_products.c). *done: false
 *  where it is not. */
td_status td__cuda_multiply_padded(const struct product_args *args, td_tensor *out,
                                   td_status (*multiply)(const struct product_args *, td_tensor *),
                                   bool *done);

#endif
