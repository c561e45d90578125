/* Launches the kernels of batch_norm.cu. */
#include "cuda/batch_norm_args.h"

#include "cuda/cuda_kernels.h"
#include "cuda/launch_channels.h"

#define BY_DTYPE(name)                                                                             \
    {                                                                                              \
        [TD_F32] = {name "_f32", CUDA_IMAGE_batch_norm},                                           \
        [TD_F64] = {name "_f64", CUDA_IMAGE_batch_norm},                                           \
        [TD_F16] = {name "_f16", CUDA_IMAGE_batch_norm},                                           \
        [TD_BF16] = {name "_bf16", CUDA_IMAGE_batch_norm},                                         \
    }

enum { BLOCKS_PER_PROCESSOR = 16 };

static struct channel_vector vector_of(const td_tensor *tensor)
{
    return tensor ? (struct channel_vector){.data = td_tensor_data(tensor),
                                            .dtype = (int32_t)td_tensor_dtype(tensor)}
                  : (struct channel_vector){0};
}

static void *data_of(const td_tensor *tensor)
{
    return tensor ? td_tensor_data(tensor) : NULL;
}

static td_status launch(struct cuda_kernel *kernels, const td_tensor *x,
                        const struct batch_norm_args *args)
{
    int64_t blocks = args->space.channels * args->space.chunks;
    struct cuda_grid grid = {.blocks = {(unsigned)(blocks < INT32_MAX ? blocks : INT32_MAX)},
                             .threads = BATCH_NORM_THREADS};
    return td__cuda_launch(&kernels[td_tensor_dtype(x)], x, grid, args);
}

/* Partial sums where they are wanted, and then the results. */
static td_status run(struct cuda_kernel *sums, struct cuda_kernel *results, const td_tensor *x,
                     struct batch_norm_args *args)
{
    TD_SCOPE;
    struct channel_space *space = &args->space;
    if (!space->channels)
        return TD_OK;
    if (!space->chunks) { /* no elements: all sums are 0 */
        space->chunks = 1;
        args->sums = 0;
    }
    if (args->sums) {
        size_t numbers = (size_t)(space->channels * space->chunks * 2);
        td_tensor *partials = td__cuda_workspace(x, numbers * sizeof(double));
        if (!partials)
            return TD_ERR_NOMEM;
        args->partials = td_tensor_data(partials);
        td_status status = launch(sums, x, args);
        if (status)
            return status;
    }
    return launch(results, x, args);
}

static struct cuda_kernel statistics_kernels[] = BY_DTYPE("batch_norm_statistics");
static struct cuda_kernel gradient_kernels[] = BY_DTYPE("batch_norm_gradient");

td_status td__cuda_batch_norm(td_tensor *out, td_tensor *mean, td_tensor *rstd, const td_tensor *x,
                              const td_tensor *weight, const td_tensor *bias,
                              td_tensor *running_mean, td_tensor *running_var, bool training,
                              double momentum, double eps)
{
    static struct cuda_kernel normalise[] = BY_DTYPE("batch_norm_normalise");
    if (td_tensor_dtype(x) > TD_BF16)
        return td__cuda_unsupported();
    struct batch_norm_args args = {
        .space = td__cuda_channels((const td_tensor *[]){x, out}, 2, BLOCKS_PER_PROCESSOR),
        .out = td_tensor_data(out),
        .x = td_tensor_data(x),
        .weight = vector_of(weight),
        .bias = vector_of(bias),
        .running_mean = vector_of(running_mean),
        .running_var = vector_of(running_var),
        .mean = data_of(mean),
        .rstd = data_of(rstd),
        .momentum = momentum,
        .eps = eps,
        .training = training,
        .sums = training,
    };
    return run(statistics_kernels, normalise, x, &args);
}

td_status td__cuda_batch_norm_grad(td_tensor *grad_x, td_tensor *grad_weight, td_tensor *grad_bias,
                                   const td_tensor *grad_y, const td_tensor *x,
                                   const td_tensor *weight, const td_tensor *mean,
                                   const td_tensor *rstd, bool training)
{
    static struct cuda_kernel sums[] = BY_DTYPE("batch_norm_sums");
    if (td_tensor_dtype(x) > TD_BF16)
        return td__cuda_unsupported();
    struct batch_norm_args args = {
        .space = td__cuda_channels((const td_tensor *[]){x, grad_y, grad_x}, 3,
                                   BLOCKS_PER_PROCESSOR),
        .out = data_of(grad_x),
        .x = td_tensor_data(x),
        .grad_y = td_tensor_data(grad_y),
        .weight = vector_of(weight),
        .grad_weight = vector_of(grad_weight),
        .grad_bias = vector_of(grad_bias),
        .mean = td_tensor_data(mean),
        .rstd = td_tensor_data(rstd),
        .training = training,
        .sums = training || grad_weight || grad_bias,
    };
    return run(sums, gradient_kernels, x, &args);
}

/* ---- And a ReLU ----------------------------------------------------------------------------------------------------- */

/* A row of the statistics, which are of the dtype of the computation. */
static void *row_of(const td_tensor *statistics, int row)
{
    size_t bytes = (size_t)td_tensor_shape(statistics)[1] *
                   td_dtype_size(td_tensor_dtype(statistics));
    return (char *)td_tensor_data(statistics) + (size_t)row * bytes;
}

static void set_statistics(struct batch_norm_args *args, const td_tensor *statistics)
{
    args->mean = row_of(statistics, 0);
    args->rstd = row_of(statistics, 1);
    args->factor = row_of(statistics, 2);
    args->shift = row_of(statistics, 3);
}

td_status td__cuda_batch_norm_relu(td_tensor *out, td_tensor *statistics, const td_tensor *x,
                                   const td_tensor *residual, const td_tensor *weight,
                                   const td_tensor *bias, td_tensor *running_mean,
                                   td_tensor *running_var, bool training, double momentum,
                                   double eps)
{
    static struct cuda_kernel relu[] = BY_DTYPE("batch_norm_normalise_relu");
    static struct cuda_kernel add_relu[] = BY_DTYPE("batch_norm_normalise_add_relu");
    if (td_tensor_dtype(x) > TD_BF16)
        return td__cuda_unsupported();
    struct batch_norm_args args = {
        .space = td__cuda_channels((const td_tensor *[]){x, out, residual}, 3,
                                   BLOCKS_PER_PROCESSOR),
        .out = td_tensor_data(out),
        .x = td_tensor_data(x),
        .residual = data_of(residual),
        .weight = vector_of(weight),
        .bias = vector_of(bias),
        .running_mean = vector_of(running_mean),
        .running_var = vector_of(running_var),
        .momentum = momentum,
        .eps = eps,
        .training = training,
        .sums = training,
    };
    set_statistics(&args, statistics);
    return run(statistics_kernels, residual ? add_relu : relu, x, &args);
}

td_status td__cuda_batch_norm_relu_grad(td_tensor *grad_x, td_tensor *grad_residual,
                                        td_tensor *grad_weight, td_tensor *grad_bias,
                                        const td_tensor *grad_y, const td_tensor *x,
                                        const td_tensor *out, const td_tensor *weight,
                                        const td_tensor *statistics, bool training)
{
    static struct cuda_kernel sums[] = BY_DTYPE("batch_norm_sums_relu");
    static struct cuda_kernel sums_add[] = BY_DTYPE("batch_norm_sums_add_relu");
    static struct cuda_kernel gradient[] = BY_DTYPE("batch_norm_gradient_relu");
    if (td_tensor_dtype(x) > TD_BF16)
        return td__cuda_unsupported();
    struct batch_norm_args args = {
        .space = td__cuda_channels((const td_tensor *[]){x, grad_y, out, grad_x, grad_residual}, 5,
                                   BLOCKS_PER_PROCESSOR),
        .out = data_of(grad_x),
        .x = td_tensor_data(x),
        .grad_y = td_tensor_data(grad_y),
        .result = data_of(out),
        .grad_residual = data_of(grad_residual),
        .weight = vector_of(weight),
        .grad_weight = vector_of(grad_weight),
        .grad_bias = vector_of(grad_bias),
        .training = training,
        .sums = training || grad_weight || grad_bias || grad_residual,
    };
    set_statistics(&args, statistics);
    return grad_residual ? run(sums_add, gradient_kernels, x, &args)
                         : run(sums, gradient, x, &args);
}
