/* Products as cuBLASLt describes them.
 *
 * It computes in columns, so a product of rows, out = a b, is given to it as out^T = b^T a^T, without a copy: the rows of
 * a matrix are the columns of its transpose. So b is its left operand, and a the right one. */
#include "cuda/lt_products.h"

#include <string.h>

enum { MOST_ALIGNED = 256 };

/* How one operand lies in memory, as a matrix whose columns are the rows of `outer` by `inner` elements. */
static bool find_layout(int64_t outer, int64_t inner, int64_t outer_stride, int64_t inner_stride,
                        int64_t *ld, int32_t *transposed)
{
    if (inner_stride == 1 || inner == 1) {
        *ld = outer == 1 ? inner : outer_stride;
        *transposed = 0;
        if (*ld >= inner)
            return true;
    }
    if (outer_stride == 1 || outer == 1) {
        *ld = inner == 1 ? outer : inner_stride;
        *transposed = 1;
        return *ld >= outer;
    }
    return false;
}

static int32_t alignment(const void *data)
{
    uintptr_t bits = (uintptr_t)data | MOST_ALIGNED;
    return (int32_t)(bits & -bits);
}

static const void *bias_of(const struct product_args *args, const struct lt_extra *extra)
{
    return extra && extra->kind == LT_GELU_GRAD ? extra->grad_bias : args->bias;
}

static cublasLtEpilogue_t epilogue_of(const void *bias, const struct lt_extra *extra)
{
    if (!extra || extra->kind == LT_F32)
        return bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
    if (extra->kind == LT_GELU)
        return bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
    return bias ? CUBLASLT_EPILOGUE_DGELU_BGRAD : CUBLASLT_EPILOGUE_DGELU;
}

bool td__lt_describe(const struct product_args *args, const struct lt_extra *extra, td_dtype dtype,
                     struct lt_shape *shape)
{
    const void *bias = bias_of(args, extra);
    memset(shape, 0, sizeof *shape);
    shape->m = args->m;
    shape->n = args->n;
    shape->k = args->k;
    shape->dtype = (int32_t)dtype;
    shape->epilogue = (int32_t)epilogue_of(bias, extra);
    shape->accumulate = args->accumulate;
    shape->batches = args->batch_dims ? args->size[0] : 1;
    if (args->batch_dims) {
        shape->out_batch = args->stride[0][0];
        shape->right_batch = args->stride[1][0];
        shape->left_batch = args->stride[2][0];
    }
    shape->left_alignment = alignment(args->b);
    shape->right_alignment = alignment(args->a);
    shape->out_alignment = alignment(args->out);
    shape->bias_alignment = alignment(bias);
    shape->aux_alignment = alignment(extra ? extra->aux : NULL);
    shape->out_ld = args->m == 1 ? args->n : args->out_row;
    shape->aux_ld = extra && extra->aux ? args->n : 0;
    shape->is_wide = extra && extra->kind == LT_F32;
    return shape->out_ld >= args->n && shape->left_batch >= 0 && shape->right_batch >= 0 &&
           find_layout(args->k, args->n, args->b_row, args->b_column, &shape->left_ld,
                       &shape->left_transposed) &&
           find_layout(args->m, args->k, args->a_row, args->a_column, &shape->right_ld,
                       &shape->right_transposed);
}

static cudaDataType_t data_type(int32_t dtype)
{
    return dtype == TD_F64   ? CUDA_R_64F
           : dtype == TD_F16 ? CUDA_R_16F
           : dtype == TD_F32 ? CUDA_R_32F
                             : CUDA_R_16BF;
}

static bool set_layout(cublasLtMatrixLayoutOpaque_t *layout, int32_t dtype, int64_t rows,
                       int64_t columns, int64_t ld, int64_t batches, int64_t stride)
{
    int32_t number = (int32_t)batches;
    if (td__lt.init_layout(layout, sizeof *layout, data_type(dtype), (uint64_t)rows,
                           (uint64_t)columns, ld))
        return false;
    return batches == 1 || (!td__lt.set_layout(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &number,
                                               sizeof number) &&
                            !td__lt.set_layout(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                                               &stride, sizeof stride));
}

bool td__lt_has_addresses(const struct product_args *args, const struct lt_extra *extra)
{
    return bias_of(args, extra) || (extra && extra->aux);
}

bool td__lt_set_operation(const struct lt_shape *shape, const struct product_args *args,
                          const struct lt_extra *extra, cublasLtMatmulDescOpaque_t *operation)
{
    const void *bias = bias_of(args, extra), *aux = extra ? extra->aux : NULL;
    bool is_f64 = shape->dtype == TD_F64;
    cublasOperation_t transposed = CUBLAS_OP_T;
    cublasLtEpilogue_t epilogue = (cublasLtEpilogue_t)shape->epilogue;
    const struct {
        bool wanted;
        cublasLtMatmulDescAttributes_t attribute;
        const void *value;
        size_t size;
    } settings[] = {
        {shape->left_transposed, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed},
        {shape->right_transposed, CUBLASLT_MATMUL_DESC_TRANSB, &transposed, sizeof transposed},
        {epilogue != CUBLASLT_EPILOGUE_DEFAULT, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue,
         sizeof epilogue},
        {bias, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof bias},
        {aux, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &aux, sizeof aux},
        {aux, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &shape->aux_ld, sizeof shape->aux_ld},
    };
    bool failed = td__lt.init_product(operation, sizeof *operation,
                                      is_f64 ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F,
                                      is_f64 ? CUDA_R_64F : CUDA_R_32F);
    for (size_t i = 0; i < sizeof settings / sizeof settings[0] && !failed; i++)
        failed = settings[i].wanted && td__lt.set_product(operation, settings[i].attribute,
                                                          settings[i].value, settings[i].size);
    return !failed;
}

bool td__lt_set_layouts(const struct lt_shape *shape, struct lt_layouts *layouts)
{
    int64_t m = shape->m, n = shape->n, k = shape->k;
    return set_layout(&layouts->left, shape->dtype, shape->left_transposed ? k : n,
                      shape->left_transposed ? n : k, shape->left_ld, shape->batches,
                      shape->left_batch) &&
           set_layout(&layouts->right, shape->dtype, shape->right_transposed ? m : k,
                      shape->right_transposed ? k : m, shape->right_ld, shape->batches,
                      shape->right_batch) &&
           set_layout(&layouts->out, shape->is_wide ? TD_F32 : shape->dtype, n, m, shape->out_ld,
                      shape->batches, shape->out_batch);
}
