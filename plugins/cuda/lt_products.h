/* Inside the products by cuBLASLt: a product as it gets it, and the algorithm that computes it. */
#ifndef LT_PRODUCTS_H
#define LT_PRODUCTS_H

#include "cuda/cuda_device.h"
#include "cuda/lt_library.h"
#include "cuda/products.h"

/** A product, and what its algorithm depends on. Without padding, since it is compared as bytes, also on disk. */
struct lt_shape {
    int64_t m, n, k;
    int64_t left_ld, right_ld, out_ld, aux_ld;
    int64_t batches, left_batch, right_batch, out_batch;
    int32_t dtype, left_transposed, right_transposed, epilogue, accumulate;
    int32_t left_alignment, right_alignment, out_alignment, bias_alignment, aux_alignment;
    int32_t device, is_wide; /* out is f32, and `dtype` that of the operands */
};

/** The descriptions for cuBLASLt: all of a shape, and those of a call, whose operation has addresses of its own. */
struct lt_layouts {
    cublasLtMatrixLayoutOpaque_t left, right, out;
};

struct lt_product {
    const cublasLtMatmulDescOpaque_t *operation;
    const struct lt_layouts *layouts;
};

struct lt_algorithm {
    struct lt_shape shape;
    struct lt_algorithm *next;
    bool found;
    cublasLtMatmulAlgo_t algorithm;
    size_t workspace;
    cublasLtMatmulDescOpaque_t operation; /* where it has no addresses */
    struct lt_layouts layouts;
};

/** lt_shapes.c: false where cuBLASLt does not take the strides. `extra` may be NULL. */
bool td__lt_describe(const struct product_args *args, const struct lt_extra *extra, td_dtype dtype,
                     struct lt_shape *shape);
bool td__lt_set_layouts(const struct lt_shape *shape, struct lt_layouts *layouts);
bool td__lt_set_operation(const struct lt_shape *shape, const struct product_args *args,
                          const struct lt_extra *extra, cublasLtMatmulDescOpaque_t *operation);
/** Whether the operation of a product has addresses, and so is another one in each call. */
bool td__lt_has_addresses(const struct product_args *args, const struct lt_extra *extra);

/** lt_products.c: enqueues it. `out` and `workspace` are where the results and the workspace are; all else is in `args`. */
cublasStatus_t td__lt_run(const struct lt_shape *shape, const struct lt_product *product,
                          const struct product_args *args, const cublasLtMatmulAlgo_t *algorithm,
                          void *out, void *workspace, size_t workspace_size, CUstream stream);

/** lt_algorithms.c: the algorithm for a shape, asked, measured or read from disk once, and kept; NULL without memory. `out`
 *  is on the device, whose current stream it is measured on. */
const struct lt_algorithm *td__lt_find(const struct lt_shape *shape,
                                       const struct product_args *args,
                                       const struct lt_extra *extra, const td_tensor *out);

/** lt_measure.c: the index of the fastest of `count` candidates, each run a few times; 0 where it cannot be measured. */
int td__lt_measure(const struct lt_shape *shape, const struct lt_product *product,
                   const struct product_args *args,
                   const cublasLtMatmulHeuristicResult_t *candidates, int count,
                   const td_tensor *out);

#endif
