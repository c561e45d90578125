/* Matrix products: small ones by kernels of products.cu; the others by cuBLASLt where it is there and takes the strides
 * (lt_products.c), else by products.cu, too. */
#include "cuda/cuda_kernels.h"
#include "cuda/cuda_launch.h"
#include "cuda/products.h"

#include <stdlib.h>

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

/* Launches a kernel a block of which computes `tile` by `tile` elements. */
static td_status launch_tiles(struct cuda_kernel *kernel, const struct product_args *args, int tile,
                              unsigned threads, td_tensor *out)
{
    enum { MOST = 65535 };
    int64_t tiles = (args->m + tile - 1) / tile * ((args->n + tile - 1) / tile);
    if (tiles > INT32_MAX)
        return td__cuda_unsupported();
    struct cuda_grid grid = {
        .blocks = {(unsigned)tiles, 1, (unsigned)(args->batches < MOST ? args->batches : MOST)},
        .threads = threads};
    return td__cuda_launch(kernel, out, grid, args);
}

/* Whether a product is so small that it is over in a few microseconds, whatever computes it: then a launch of our own costs
 * the host a third of a call of cuBLASLt. A block takes about 1 us for 64 steps of k, so 4 us at most; 2^21 multiplications
 * are 8 blocks of 256 steps, or 512 of 4, which the device runs at once. TANDEM_CUDA_SMALL_PRODUCTS is another bound; 0: none
 * is small. */
static bool is_small(const struct product_args *args)
{
    static _Atomic(int64_t) bound = -1;
    int64_t least = atomic_load_explicit(&bound, memory_order_relaxed);
    if (least < 0) {
        const char *text = getenv("TANDEM_CUDA_SMALL_PRODUCTS");
        least = text && *text ? strtoll(text, NULL, 10) : 1 << 21;
        least = least < 0 ? 0 : least;
        atomic_store_explicit(&bound, least, memory_order_relaxed);
    }
    return args->k <= SMALL_MOST_K &&
           (double)args->m * (double)args->n * (double)args->k * (double)args->batches <
               (double)least;
}

static td_status multiply_small(const struct product_args *args, td_tensor *out)
{
    static struct cuda_kernel kernels[] = {
        [TD_F32] = TD__CUDA_KERNEL(products, "multiply_small_f32"),
        [TD_F64] = TD__CUDA_KERNEL(products, "multiply_small_f64"),
        [TD_F16] = TD__CUDA_KERNEL(products, "multiply_small_f16"),
        [TD_BF16] = TD__CUDA_KERNEL(products, "multiply_small_bf16"),
    };
    return launch_tiles(&kernels[td_tensor_dtype(out)], args, SMALL_TILE, SMALL_THREADS, out);
}

static td_status multiply_as_it_is(const struct product_args *args, td_tensor *out)
{
    static struct cuda_kernel kernels[] = {
        [TD_F32] = {"multiply_f32", CUDA_IMAGE_products},
        [TD_F64] = {"multiply_f64", CUDA_IMAGE_products},
        [TD_F16] = {"multiply_f16", CUDA_IMAGE_products},
        [TD_BF16] = {"multiply_bf16", CUDA_IMAGE_products},
    };
    bool done;
    td_status status = td__lt_multiply(args, NULL, out, &done);
    if (status || done)
        return status;
    return launch_tiles(&kernels[td_tensor_dtype(out)], args, PRODUCT_TILE, PRODUCT_THREADS, out);
}

td_status td__cuda_multiply(const struct product_args *args, td_tensor *out)
{
    if (td_tensor_dtype(out) > TD_BF16)
        return td__cuda_unsupported();
    if (!args->m || !args->n || !args->batches || (!args->k && args->accumulate && !args->bias))
        return TD_OK;
    if (is_small(args))
        return multiply_small(args, out);
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
    return td__cuda_multiply(&args, out);
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
struct product_args td__cuda_linear_args(td_tensor *out, const td_tensor *x, const td_tensor *w,
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
    struct product_args args = td__cuda_linear_args(out, x, w, bias);
    return td__cuda_multiply(&args, out);
}
