/* Matrix products: by cuBLASLt where it is there and takes the strides (lt_products.c), else by the kernels of
 * products.cu. */
#include "cuda/cuda_kernels.h"
#include "cuda/cuda_launch.h"
#include "cuda/products.h"

/* The dimensions of the batch, from the last one; those that belong together in all three are merged. */
static void add_batch(struct product_args *args, const td_tensor *const tensors[3])
{
    args->batches = 1;
    for (int d = td_tensor_ndim(tensors[0]) - 3; d >= 0; d--) {
        int64_t size = td_tensor_size(tensors[0], d);
        int last = args->batch_dims - 1;
        args->batches *= size;
        if (size == 1)
            continue;
        bool follows = last >= 0;
        for (int t = 0; t < 3 && follows; t++)
            follows = td_tensor_stride(tensors[t], d) == args->stride[t][last] * args->size[last];
        if (follows) {
            args->size[last] *= size;
            continue;
        }
        args->size[++last] = size;
        for (int t = 0; t < 3; t++)
            args->stride[t][last] = td_tensor_stride(tensors[t], d);
        args->batch_dims = last + 1;
    }
}

static td_status multiply_as_it_is(const struct product_args *args, td_tensor *out)
{
    static struct cuda_kernel kernels[] = {
        [TD_F32] = {"multiply_f32", CUDA_IMAGE_products},
        [TD_F64] = {"multiply_f64", CUDA_IMAGE_products},
        [TD_F16] = {"multiply_f16", CUDA_IMAGE_products},
        [TD_BF16] = {"multiply_bf16", CUDA_IMAGE_products},
    };
    enum { MOST = 65535 };
    td_dtype dtype = td_tensor_dtype(out);
    bool done;
    td_status status = td__lt_multiply(args, NULL, out, &done);
    if (status || done)
        return status;
    int64_t tiles = (args->m + PRODUCT_TILE - 1) / PRODUCT_TILE *
                    ((args->n + PRODUCT_TILE - 1) / PRODUCT_TILE);
    if (tiles > INT32_MAX)
        return td__cuda_unsupported();
    struct cuda_grid grid = {
        .blocks = {(unsigned)tiles, 1, (unsigned)(args->batches < MOST ? args->batches : MOST)},
        .threads = PRODUCT_THREADS};
    return td__cuda_launch(&kernels[dtype], out, grid, args);
}

static td_status multiply(const struct product_args *args, td_tensor *out)
{
    if (td_tensor_dtype(out) > TD_BF16)
        return td__cuda_unsupported();
    if (!args->m || !args->n || !args->batches || (!args->k && args->accumulate && !args->bias))
        return TD_OK;
    bool done;
    td_status status = td__cuda_multiply_padded(args, out, multiply_as_it_is, &done);
    return status || done ? status : multiply_as_it_is(args, out);
}

static struct product_args matmul_args(td_tensor *out, const td_tensor *a, const td_tensor *b,
                                       double alpha, bool accumulate)
{
    int row = td_tensor_ndim(out) - 2, column = row + 1;
    struct product_args args = {
        .a = td_tensor_data(a),
        .b = td_tensor_data(b),
        .out = td_tensor_data(out),
        .m = td_tensor_size(out, row),
        .n = td_tensor_size(out, column),
        .k = td_tensor_size(a, column),
        .a_row = td_tensor_stride(a, row),
        .a_column = td_tensor_stride(a, column),
        .b_row = td_tensor_stride(b, row),
        .b_column = td_tensor_stride(b, column),
        .out_row = td_tensor_stride(out, row),
        .accumulate = accumulate,
        .alpha = alpha,
    };
    add_batch(&args, (const td_tensor *const[]){out, a, b});
    return args;
}

td_status td__cuda_matmul(td_tensor *out, const td_tensor *a, const td_tensor *b, double alpha,
                          bool accumulate)
{
    struct product_args args = matmul_args(out, a, b, alpha, accumulate);
    return multiply(&args, out);
}

/* Whether the rows of a matrix in memory, which go along either dimension, begin at multiples of 16 bytes. */
static bool has_aligned_rows(const void *data, int64_t row, int64_t column, size_t element)
{
    enum { ALIGNMENT = 16 };
    int64_t ld = column == 1 ? row : column;
    return (row == 1 || column == 1) && (uintptr_t)data % ALIGNMENT == 0 &&
           (size_t)ld * element % ALIGNMENT == 0;
}

/* By cuBLASLt only, and where it is fast: others round the product, which may be padded, to the halves' dtype. */
td_status td__cuda_matmul_f32(td_tensor *out, const td_tensor *a, const td_tensor *b, double alpha,
                              bool accumulate)
{
    struct product_args args = matmul_args(out, a, b, alpha, accumulate);
    struct lt_extra extra = {.kind = LT_F32, .halves = td_tensor_dtype(a)};
    size_t half = td_dtype_size(extra.halves);
    bool done = false;
    td_status status = TD_OK;
    if (args.m && args.n && !args.batch_dims &&
        has_aligned_rows(args.a, args.a_row, args.a_column, half) &&
        has_aligned_rows(args.b, args.b_row, args.b_column, half) &&
        has_aligned_rows(args.out, args.out_row, 1, sizeof(float)))
        status = td__lt_multiply(&args, &extra, out, &done);
    return status || done ? status : td__cuda_unsupported();
}

/* out [N, O] = x [N, I] w^T [O, I] + bias. */
static struct product_args linear_args(td_tensor *out, const td_tensor *x, const td_tensor *w,
                                       const td_tensor *bias)
{
    int64_t inner = td_tensor_size(x, 1), outer = td_tensor_size(w, 0);
    return (struct product_args){
        .a = td_tensor_data(x),
        .b = td_tensor_data(w),
        .bias = bias ? td_tensor_data(bias) : NULL,
        .out = td_tensor_data(out),
        .m = td_tensor_size(x, 0),
        .n = outer,
        .k = inner,
        .a_row = inner,
        .a_column = 1,
        .b_row = 1,
        .b_column = inner,
        .out_row = outer,
        .batches = 1,
        .alpha = 1,
    };
}

td_status td__cuda_linear(td_tensor *out, const td_tensor *x, const td_tensor *w,
                          const td_tensor *bias)
{
    struct product_args args = linear_args(out, x, w, bias);
    return multiply(&args, out);
}

/* ---- Linear layers with a GELU between them -------------------------------------------------------------------------- */

/* Whether cuBLASLt may compute it: what it writes beside the product must lie as it asks for. */
static bool takes_epilogue(const td_tensor *out)
{
    enum { GROUP = 8 };
    td_dtype dtype = td_tensor_dtype(out);
    return (dtype == TD_F16 || dtype == TD_BF16) && td_tensor_size(out, 1) % GROUP == 0 &&
           td_tensor_size(out, 0);
}

td_status td__cuda_linear_gelu(td_tensor *out, td_tensor *pre, const td_tensor *x,
                               const td_tensor *w, const td_tensor *bias)
{
    struct product_args args = linear_args(out, x, w, bias);
    struct lt_extra extra = {.kind = LT_GELU, .aux = td_tensor_data(pre)};
    bool done = false;
    td_status status = takes_epilogue(out) ? td__lt_multiply(&args, &extra, out, &done) : TD_OK;
    if (status || done)
        return status;
    status = td__cuda_linear(pre, x, w, bias);
    return status ? status : td__cuda_unary(TD_UNARY_GELU_TANH, out, pre);
}

td_status td__cuda_linear_gelu_grad(td_tensor *grad_pre, td_tensor *grad_bias,
                                    const td_tensor *grad_y, const td_tensor *w,
                                    const td_tensor *pre)
{
    int64_t inner = td_tensor_size(grad_y, 1), outer = td_tensor_size(grad_pre, 1);
    struct product_args args = {
        .a = td_tensor_data(grad_y),
        .b = td_tensor_data(w),
        .out = td_tensor_data(grad_pre),
        .m = td_tensor_size(grad_pre, 0),
        .n = outer,
        .k = inner,
        .a_row = inner,
        .a_column = 1,
        .b_row = outer,
        .b_column = 1,
        .out_row = outer,
        .batches = 1,
        .alpha = 1,
    };
    struct lt_extra extra = {.kind = LT_GELU_GRAD,
                             .aux = td_tensor_data(pre),
                             .grad_bias = grad_bias ? td_tensor_data(grad_bias) : NULL};
    bool done = false;
    td_status status = takes_epilogue(grad_pre) ? td__lt_multiply(&args, &extra, grad_pre, &done)
                                                : TD_OK;
    if (status || done)
        return status;
    status = multiply(&args, grad_pre);
    if (!status)
        status = td__cuda_unary_grad(TD_UNARY_GELU_TANH, grad_pre, grad_pre, pre);
    return status || !grad_bias ? status
                                : td__cuda_reduce(TD_REDUCE_KIND_SUM, grad_bias, grad_pre, 1u << 0);
}
