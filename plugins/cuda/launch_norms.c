/* Launches the kernels of norms.cu: batch norm. */
#include "cuda/norms_args.h"

#include "cuda/cuda_kernels.h"
#include "cuda/cuda_launch.h"

#define ENTRY(prefix, DTYPE, dtype)                                                                \
    [TD_##DTYPE] = {.name = prefix "_" #dtype, .image = CUDA_IMAGE_norms}
#define BY_DTYPE(name)                                                                             \
    {                                                                                              \
        ENTRY(name, F32, f32), ENTRY(name, F64, f64), ENTRY(name, F16, f16),                       \
            ENTRY(name, BF16, bf16)                                                                \
    }

enum { CHUNK = 8192 };

/* Launches a kernel of a table with `blocks` blocks. */
static td_status launch(struct cuda_kernel *kernels, const td_tensor *tensor, int64_t blocks,
                        const void *args)
{
    td_dtype dtype = td_tensor_dtype(tensor);
    if (dtype > TD_BF16)
        return td__cuda_unsupported();
    struct cuda_grid grid = {.blocks = {(unsigned)(blocks < INT32_MAX ? blocks : INT32_MAX)},
                             .threads = NORM_THREADS};
    return blocks ? td__cuda_launch(&kernels[dtype], tensor, grid, args) : TD_OK;
}

/* With a thread for each of `count` elements. */
static td_status launch_flat(struct cuda_kernel *kernels, const td_tensor *tensor, int64_t count,
                             const void *args)
{
    td_dtype dtype = td_tensor_dtype(tensor);
    if (dtype > TD_BF16)
        return td__cuda_unsupported();
    return count
               ? td__cuda_launch(&kernels[dtype], tensor, td__cuda_grid_for(tensor, count, 1), args)
               : TD_OK;
}

static struct norm_vector vector_of(const td_tensor *tensor)
{
    return tensor ? (struct norm_vector){.data = td_tensor_data(tensor),
                                         .dtype = (int32_t)td_tensor_dtype(tensor)}
                  : (struct norm_vector){0};
}

static void *data_of(const td_tensor *tensor)
{
    return tensor ? td_tensor_data(tensor) : NULL;
}

/* ---- Batch norm ------------------------------------------------------------------------------------------------------- */

static struct batch_norm_args batch_args(const td_tensor *x, const td_tensor *weight,
                                         const td_tensor *mean, const td_tensor *rstd,
                                         bool training)
{
    struct batch_norm_args args = {
        .x = td_tensor_data(x),
        .weight = vector_of(weight),
        .mean = data_of(mean),
        .rstd = data_of(rstd),
        .images = td_tensor_size(x, 0),
        .channels = td_tensor_size(x, 1),
        .pixels = td_tensor_size(x, 2),
        .training = training,
        .each = CHUNK,
    };
    args.chunks = (args.images * args.pixels + CHUNK - 1) / CHUNK;
    return args;
}

/* Memory for sums of chunks and for coefficients, in the caller's scope. */
static td_status add_workspace(struct batch_norm_args *args, const td_tensor *x)
{
    int64_t doubles = args->channels * (2 * args->chunks + 4);
    td_tensor *workspace = td__cuda_workspace(x, (size_t)doubles * sizeof(double));
    if (!workspace)
        return TD_ERR_NOMEM;
    args->factors = td_tensor_data(workspace);
    args->partials = args->factors + 4 * args->channels;
    return TD_OK;
}

td_status td__cuda_batch_norm(td_tensor *out, td_tensor *mean, td_tensor *rstd, const td_tensor *x,
                              const td_tensor *weight, const td_tensor *bias,
                              td_tensor *running_mean, td_tensor *running_var, bool training,
                              double momentum, double eps)
{
    static struct cuda_kernel chunks[] = BY_DTYPE("batch_norm_chunk");
    static struct cuda_kernel statistics[] = BY_DTYPE("batch_norm_statistics");
    static struct cuda_kernel apply[] = BY_DTYPE("batch_norm_apply");
    TD_SCOPE;
    struct batch_norm_args args = batch_args(x, weight, mean, rstd, training);
    args.out = td_tensor_data(out);
    args.bias = vector_of(bias);
    args.running_mean = vector_of(running_mean);
    args.running_var = vector_of(running_var);
    args.momentum = momentum;
    args.eps = eps;
    td_status status = add_workspace(&args, x);
    if (!status && training)
        status = launch(chunks, x, args.channels * args.chunks, &args);
    if (!status)
        status = launch_flat(statistics, x, args.channels, &args);
    return status ? status : launch_flat(apply, x, td_tensor_numel(x), &args);
}

td_status td__cuda_batch_norm_grad(td_tensor *grad_x, td_tensor *grad_weight, td_tensor *grad_bias,
                                   const td_tensor *grad_y, const td_tensor *x,
                                   const td_tensor *weight, const td_tensor *mean,
                                   const td_tensor *rstd, bool training)
{
    static struct cuda_kernel chunks[] = BY_DTYPE("batch_norm_grad_chunk");
    static struct cuda_kernel statistics[] = BY_DTYPE("batch_norm_grad_statistics");
    static struct cuda_kernel apply[] = BY_DTYPE("batch_norm_grad_apply");
    TD_SCOPE;
    struct batch_norm_args args = batch_args(x, weight, mean, rstd, training);
    args.out = data_of(grad_x);
    args.grad_y = td_tensor_data(grad_y);
    args.grad_weight = vector_of(grad_weight);
    args.grad_bias = vector_of(grad_bias);
    td_status status = add_workspace(&args, x);
    if (!status && !training && !grad_weight && !grad_bias)
        args.chunks = 0; /* no sums are needed */
    if (!status)
        status = launch(chunks, x, args.channels * args.chunks, &args);
    if (!status)
        status = launch_flat(statistics, x, args.channels, &args);
    return status || !grad_x ? status : launch_flat(apply, x, td_tensor_numel(x), &args);
}
