/* Between the ways to compute a matrix product. */
#ifndef PRODUCTS_H
#define PRODUCTS_H

#include "cuda/products_args.h"

#include <tandem/tensor.h>

/** Computes a product by cuBLASLt. *done: false where the library is not there, or does not take the strides. */
td_status td__lt_multiply(const struct product_args *args, td_tensor *out, bool *done);

#endif
