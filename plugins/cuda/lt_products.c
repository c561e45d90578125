/* Matrix products by cuBLASLt. lt_shapes.c describes them to it, lt_algorithms.c finds the algorithm. */
#include "cuda/lt_products.h"
#include "cuda/cuda_launch.h"

enum { MOST_LOOPS = 64 };

cublasStatus_t td__lt_run(const struct lt_shape *shape, const struct lt_product *product,
                          const struct product_args *args, const cublasLtMatmulAlgo_t *algorithm,
                          void *out, void *workspace, size_t workspace_size, CUstream stream)
{
    bool is_f64 = shape->dtype == TD_F64;
    float alpha = (float)args->alpha, beta = args->accumulate ? 1 : 0;
    double alpha_f64 = args->alpha, beta_f64 = args->accumulate ? 1 : 0;
    return td__lt.multiply(td__lt.handle, (cublasLtMatmulDesc_t)product->operation,
                           is_f64 ? (void *)&alpha_f64 : (void *)&alpha, args->b,
                           (cublasLtMatrixLayout_t)&product->layouts->left, args->a,
                           (cublasLtMatrixLayout_t)&product->layouts->right,
                           is_f64 ? (void *)&beta_f64 : (void *)&beta, out,
                           (cublasLtMatrixLayout_t)&product->layouts->out, out,
                           (cublasLtMatrixLayout_t)&product->layouts->out, algorithm, workspace,
                           workspace_size, (cudaStream_t)stream);
}

static td_status run(const struct lt_algorithm *algorithm, const struct lt_product *product,
                     const struct product_args *args, td_tensor *out)
{
    TD_SCOPE;
    td_tensor *workspace = algorithm->workspace ? td__cuda_workspace(out, algorithm->workspace)
                                                : NULL;
    if (algorithm->workspace && !workspace)
        return TD_ERR_NOMEM;
    cublasStatus_t status = td__lt_run(&algorithm->shape, product, args, &algorithm->algorithm,
                                       args->out, workspace ? td_tensor_data(workspace) : NULL,
                                       algorithm->workspace, td__cuda_stream_of(out));
    return status ? td_fail(TD_ERR_SYSTEM,
                            "%s: cuBLASLt fails with status %d at a product of [%lld, %lld] and "
                            "[%lld, %lld]",
                            td__cuda_device_of(out)->name, (int)status, (long long)args->m,
                            (long long)args->k, (long long)args->k, (long long)args->n)
                  : TD_OK;
}

/* One product, or one batch of products with even strides. */
static td_status multiply(const struct product_args *args, const struct lt_extra *extra,
                          td_tensor *out, bool *done)
{
    struct lt_shape shape;
    cublasLtMatmulDescOpaque_t operation;
    *done = false;
    bool is_wide = extra && extra->kind == LT_F32;
    if (!td__lt_describe(args, extra, is_wide ? extra->halves : td_tensor_dtype(out), &shape))
        return TD_OK;
    shape.device = td__cuda_device_of(out)->device;
    const struct lt_algorithm *algorithm = td__lt_find(&shape, args, extra, out);
    if (!algorithm || !algorithm->found)
        return TD_OK;
    struct lt_product product = {&algorithm->operation, &algorithm->layouts};
    if (td__lt_has_addresses(args, extra)) {
        if (!td__lt_set_operation(&shape, args, extra, &operation))
            return TD_OK;
        product.operation = &operation;
    }
    *done = true;
    return run(algorithm, &product, args, out);
}

td_status td__lt_multiply(const struct product_args *args, const struct lt_extra *extra,
                          td_tensor *out, bool *done)
{
    *done = false;
    td_status status = td__cuda_enter(td__cuda_device_of(out));
    if (status)
        return status;
    int64_t loops = 1;
    for (int d = 1; d < args->batch_dims; d++)
        loops *= args->size[d];
    if (!td__lt_open() || !args->k || loops > MOST_LOOPS)
        return TD_OK;
    size_t size = td_dtype_size(td_tensor_dtype(out));
    for (int64_t i = 0; i < loops; i++) {
        struct product_args one = *args;
        int64_t rest = i, offset[3] = {0};
        for (int d = 1; d < args->batch_dims; rest /= args->size[d++])
            for (int t = 0; t < 3; t++)
                offset[t] += rest % args->size[d] * args->stride[t][d];
        one.out = (char *)args->out + offset[0] * (int64_t)size;
        one.a = (const char *)args->a + offset[1] * (int64_t)size;
        one.b = (const char *)args->b + offset[2] * (int64_t)size;
        one.batch_dims = args->batch_dims ? 1 : 0;
        status = multiply(&one, extra, out, done);
        if (status || !*done) /* the same shape: all of them are done, or none */
            return status;
    }
    return TD_OK;
}
