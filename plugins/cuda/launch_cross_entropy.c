/* Launches the kernels of cross_entropy.cu. */
#include "cuda/cuda_kernels.h"
#include "cuda/cuda_launch.h"
#include "cuda/losses_args.h"

#define ENTRY(image_, prefix, DTYPE, dtype)                                                        \
    [TD_##DTYPE] = {.name = prefix "_" #dtype, .image = CUDA_IMAGE_##image_}
#define BY_DTYPE(image, name)                                                                      \
    {                                                                                              \
        ENTRY(image, name, F32, f32), ENTRY(image, name, F64, f64), ENTRY(image, name, F16, f16),  \
            ENTRY(image, name, BF16, bf16)                                                         \
    }

static td_status launch(struct cuda_kernel *kernels, const td_tensor *x, int64_t blocks,
                        unsigned threads, const void *args)
{
    td_dtype dtype = td_tensor_dtype(x);
    if (dtype > TD_BF16)
        return td__cuda_unsupported();
    struct cuda_grid grid = {.blocks = {(unsigned)(blocks < INT32_MAX ? blocks : INT32_MAX)},
                             .threads = threads};
    return blocks ? td__cuda_launch(&kernels[dtype], x, grid, args) : TD_OK;
}

static td_status launch_flat(struct cuda_kernel *kernels, const td_tensor *x, int64_t count,
                             const void *args)
{
    struct cuda_grid grid = td__cuda_grid_for(x, count, 1);
    return launch(kernels, x, count ? grid.blocks[0] : 0, grid.threads, args);
}

/* `loss` are the losses, or their gradients. */
static struct class_loss_args logits_args(const td_tensor *x, const td_tensor *loss,
                                          const td_tensor *statistics, const td_tensor *target,
                                          const td_tensor *weight, const td_tensor *factor,
                                          int64_t ignore_index)
{
    return (struct class_loss_args){
        .x = td_tensor_data(x),
        .statistics = td_tensor_data(statistics),
        .target = td_tensor_data(target),
        .weight = weight ? td_tensor_data(weight) : NULL,
        .factor = factor ? td_tensor_data(factor) : NULL,
        .n = td_tensor_size(x, 0),
        .classes = td_tensor_size(x, 1),
        .positions = td_tensor_size(x, 2),
        .ignore_index = ignore_index,
        .wide = td_tensor_dtype(loss) != td_tensor_dtype(x),
        .slot = CUDA_FAULT_CROSS_ENTROPY,
        .fault = td__cuda_fault_of(x),
    };
}

/* Threads of a row, by its bytes: each loads ROW_VECTORS times 16 of them at once. On any device the same: the order of the
 * sum. */
static int32_t row_threads(const td_tensor *x)
{
    int64_t bytes = td_tensor_size(x, 1) * (int64_t)td_dtype_size(td_tensor_dtype(x));
    int64_t threads = (bytes / (ROW_VECTORS * 16) + 31) / 32 * 32;
    return (int32_t)(threads < 32 ? 32 : threads > ROW_THREADS ? ROW_THREADS : threads);
}

td_status td__cuda_cross_entropy(td_tensor *out, td_tensor *statistics, td_tensor *factor,
                                 const td_tensor *x, const td_tensor *target,
                                 const td_tensor *weight, int64_t ignore_index)
{
    static struct cuda_kernel rows[] = BY_DTYPE(cross_entropy, "cross_entropy_rows");
    static struct cuda_kernel columns[] = BY_DTYPE(cross_entropy, "cross_entropy_columns");
    static struct cuda_kernel factors[] = BY_DTYPE(losses, "nll_factor");
    struct class_loss_args args = logits_args(x, out, statistics, target, weight, factor,
                                              ignore_index);
    args.out = td_tensor_data(out);
    args.group = row_threads(x);
    int64_t together = args.group == 32 ? WARP_ROWS : 1;
    td_status status = args.positions == 1
                           ? launch(rows, x, (args.n + together - 1) / together,
                                    (unsigned)(args.group * together), &args)
                           : launch_flat(columns, x, args.n * args.positions, &args);
    return status || !factor ? status : launch(factors, x, 1, FACTOR_THREADS, &args);
}

td_status td__cuda_cross_entropy_grad(td_tensor *grad_x, const td_tensor *grad_y,
                                      const td_tensor *factor, const td_tensor *x,
                                      const td_tensor *statistics, const td_tensor *target,
                                      const td_tensor *weight, int64_t ignore_index)
{
    static struct cuda_kernel rows[] = BY_DTYPE(cross_entropy, "cross_entropy_grad_rows");
    static struct cuda_kernel kernels[] = BY_DTYPE(cross_entropy, "cross_entropy_grad");
    struct class_loss_args args = logits_args(x, grad_y, statistics, target, weight, factor,
                                              ignore_index);
    args.grad_y = td_tensor_data(grad_y);
    args.grad_each = td_tensor_numel(grad_y) == args.n * args.positions;
    args.out = td_tensor_data(grad_x);
    if (args.positions == 1 && args.classes >= LOSS_THREADS)
        return launch(rows, x, args.n, (unsigned)row_threads(x), &args);
    return launch_flat(kernels, x, td_tensor_numel(x), &args);
}
