/* Launches the kernels of losses.cu. */
#include "cuda/losses_args.h"

#include "cuda/cuda_kernels.h"
#include "cuda/cuda_launch.h"

#define ENTRY(prefix, DTYPE, dtype)                                                                \
    [TD_##DTYPE] = {.name = prefix "_" #dtype, .image = CUDA_IMAGE_losses}
#define BY_DTYPE(name)                                                                             \
    {                                                                                              \
        ENTRY(name, F32, f32), ENTRY(name, F64, f64), ENTRY(name, F16, f16),                       \
            ENTRY(name, BF16, bf16)                                                                \
    }

static td_status launch(struct cuda_kernel *kernels, const td_tensor *tensor, int64_t blocks,
                        unsigned threads, const void *args)
{
    td_dtype dtype = td_tensor_dtype(tensor);
    if (dtype > TD_BF16)
        return td__cuda_unsupported();
    struct cuda_grid grid = {.blocks = {(unsigned)(blocks < INT32_MAX ? blocks : INT32_MAX)},
                             .threads = threads};
    return blocks ? td__cuda_launch(&kernels[dtype], tensor, grid, args) : TD_OK;
}

static td_status launch_flat(struct cuda_kernel *kernels, const td_tensor *tensor, int64_t count,
                             const void *args)
{
    struct cuda_grid grid = td__cuda_grid_for(tensor, count, 1);
    return launch(kernels, tensor, count ? grid.blocks[0] : 0, grid.threads, args);
}

/* ---- Classification ---------------------------------------------------------------------------------------------- */

/* The sizes are those of x, or of its gradient. */
static struct class_loss_args class_args(const td_tensor *x, const td_tensor *target,
                                         const td_tensor *weight, const td_tensor *factor,
                                         int64_t ignore_index)
{
    return (struct class_loss_args){
        .weight = weight ? td_tensor_data(weight) : NULL,
        .target = td_tensor_data(target),
        .factor = factor ? td_tensor_data(factor) : NULL,
        .n = td_tensor_size(x, 0),
        .classes = td_tensor_size(x, 1),
        .positions = td_tensor_size(x, 2),
        .ignore_index = ignore_index,
        .slot = CUDA_FAULT_NLL_LOSS,
        .fault = td__cuda_fault_of(x),
    };
}

td_status td__cuda_nll_loss(td_tensor *out, td_tensor *factor, const td_tensor *x,
                            const td_tensor *target, const td_tensor *weight, int64_t ignore_index)
{
    static struct cuda_kernel losses[] = BY_DTYPE("nll_loss");
    static struct cuda_kernel factors[] = BY_DTYPE("nll_factor");
    struct class_loss_args args = class_args(x, target, weight, factor, ignore_index);
    args.x = td_tensor_data(x);
    args.out = td_tensor_data(out);
    td_status status = launch_flat(losses, x, args.n * args.positions, &args);
    return status || !factor ? status : launch(factors, x, 1, FACTOR_THREADS, &args);
}

td_status td__cuda_nll_loss_grad(td_tensor *grad_x, const td_tensor *grad_y,
                                 const td_tensor *factor, const td_tensor *target,
                                 const td_tensor *weight, int64_t ignore_index)
{
    static struct cuda_kernel kernels[] = BY_DTYPE("nll_loss_grad");
    struct class_loss_args args = class_args(grad_x, target, weight, factor, ignore_index);
    args.grad_y = td_tensor_data(grad_y);
    args.grad_each = td_tensor_numel(grad_y) == args.n * args.positions;
    args.out = td_tensor_data(grad_x);
    return launch_flat(kernels, grad_x, td_tensor_numel(grad_x), &args);
}

/* ---- Pairs ----------------------------------------------------------------------------------------------------------- */

td_status td__cuda_pair_loss(td_pair_loss loss, td_tensor *out, const td_tensor *x,
                             const td_tensor *y, double scale)
{
    static struct cuda_kernel elements[] = BY_DTYPE("pair_loss");
    static struct cuda_kernel sums[] = BY_DTYPE("pair_loss_sum");
    static struct cuda_kernel finish[] = BY_DTYPE("pair_loss_finish");
    TD_SCOPE;
    struct pair_loss_args args = {
        .out = td_tensor_data(out),
        .x = td_tensor_data(x),
        .y = td_tensor_data(y),
        .count = td_tensor_numel(x),
        .scale = scale,
        .loss = (int32_t)loss,
    };
    if (td_tensor_numel(out) == args.count)
        return launch_flat(elements, x, args.count, &args);
    /* As many blocks as the size asks for, on any device: the order of the sum. */
    args.blocks = (args.count + LOSS_THREADS * 8 - 1) / (LOSS_THREADS * 8);
    args.blocks = args.blocks > LOSS_MOST_BLOCKS ? LOSS_MOST_BLOCKS : args.blocks;
    td_tensor *partials = td__cuda_workspace(x, (size_t)args.blocks * sizeof(double));
    if (!partials)
        return TD_ERR_NOMEM;
    args.partials = td_tensor_data(partials);
    td_status status = launch(sums, x, args.blocks, LOSS_THREADS, &args);
    return status ? status : launch(finish, x, 1, LOSS_THREADS, &args);
}

td_status td__cuda_pair_loss_grad(td_pair_loss loss, td_tensor *grad_x, const td_tensor *grad_y,
                                  const td_tensor *x, const td_tensor *y, double scale)
{
    static struct cuda_kernel kernels[] = BY_DTYPE("pair_loss_grad");
    struct pair_loss_args args = {
        .out = td_tensor_data(grad_x),
        .x = td_tensor_data(x),
        .y = td_tensor_data(y),
        .grad_y = td_tensor_data(grad_y),
        .count = td_tensor_numel(x),
        .scale = scale,
        .loss = (int32_t)loss,
        .grad_each = td_tensor_numel(grad_y) == td_tensor_numel(x),
    };
    return launch_flat(kernels, grad_x, args.count, &args);
}
