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
    } kind;
    void *aux; /* [m, n], rows follow one another */
    void *grad_bias;
};

/** Computes a product by cuBLASLt. *done: false where the library is not there, or does not take the strides; nothing
 *  was enqueued then. `extra` may be NULL; otherwise there is no batch. */
td_status td__lt_multiply(const struct product_args *args, const struct lt_extra *extra,
                          td_tensor *out, bool *done);

#endif
