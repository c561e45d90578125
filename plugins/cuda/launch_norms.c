/* Launches the kernels of norms.cu. */
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

enum { WARP = 32, SHORT_ROW = 1024, MOST_SLICES = 128, LEAST_ROWS = 32 };

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

/* Threads of a row, and blocks for all rows. */
static int32_t group_of(int64_t size)
{
    return size <= SHORT_ROW ? WARP : NORM_THREADS;
}

static int64_t blocks_of(int64_t rows, int32_t group)
{
    int64_t each = NORM_THREADS / group;
    return (rows + each - 1) / each;
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

/* ---- Softmax ------------------------------------------------------------------------------------------------------- */

static td_status run_softmax(struct cuda_kernel *rows, struct cuda_kernel *columns, td_tensor *out,
                             const td_tensor *x, const td_tensor *grad_y, bool logarithm)
{
    struct softmax_args args = {
        .out = td_tensor_data(out),
        .x = td_tensor_data(x),
        .grad_y = data_of(grad_y),
        .outer = td_tensor_size(x, 0),
        .size = td_tensor_size(x, 1),
        .inner = td_tensor_size(x, 2),
        .logarithm = logarithm,
        .group = group_of(td_tensor_size(x, 1)),
    };
    if (!td_tensor_numel(x))
        return TD_OK;
    return args.inner == 1 ? launch(rows, out, blocks_of(args.outer, args.group), &args)
                           : launch_flat(columns, out, args.outer * args.inner, &args);
}

td_status td__cuda_softmax(td_tensor *out, const td_tensor *x, bool logarithm)
{
    static struct cuda_kernel rows[] = BY_DTYPE("softmax");
    static struct cuda_kernel columns[] = BY_DTYPE("softmax_columns");
    return run_softmax(rows, columns, out, x, NULL, logarithm);
}

td_status td__cuda_softmax_grad(td_tensor *grad_x, const td_tensor *grad_y, const td_tensor *y,
                                bool logarithm)
{
    static struct cuda_kernel rows[] = BY_DTYPE("softmax_grad");
    static struct cuda_kernel columns[] = BY_DTYPE("softmax_grad_columns");
    return run_softmax(rows, columns, grad_x, y, grad_y, logarithm);
}

/* ---- Layer norm ------------------------------------------------------------------------------------------------------ */

td_status td__cuda_layer_norm(td_tensor *out, td_tensor *mean, td_tensor *rstd, const td_tensor *x,
                              const td_tensor *weight, const td_tensor *bias, double eps)
{
    static struct cuda_kernel kernels[] = BY_DTYPE("layer_norm");
    struct layer_norm_args args = {
        .out = td_tensor_data(out),
        .x = td_tensor_data(x),
        .weight = vector_of(weight),
        .bias = vector_of(bias),
        .mean = data_of(mean),
        .rstd = data_of(rstd),
        .rows = td_tensor_size(x, 0),
        .size = td_tensor_size(x, 1),
        .eps = eps,
        .group = group_of(td_tensor_size(x, 1)),
    };
    return launch(kernels, out, blocks_of(args.rows, args.group), &args);
}

static td_status grad_columns(struct layer_norm_args *args, const td_tensor *x)
{
    static struct cuda_kernel columns[] = BY_DTYPE("layer_norm_columns");
    static struct cuda_kernel finish[] = BY_DTYPE("layer_norm_finish");
    int64_t slices = args->rows / LEAST_ROWS;
    slices = slices < 1 ? 1 : slices > MOST_SLICES ? MOST_SLICES : slices;
    args->each = (args->rows + slices - 1) / slices;
    args->slices = args->each ? (args->rows + args->each - 1) / args->each : 0;
    TD_SCOPE;
    td_tensor *partials = td__cuda_workspace(x, (size_t)(args->slices * 2 * args->size) *
                                                    sizeof(double));
    if (!partials)
        return TD_ERR_NOMEM;
    args->partials = td_tensor_data(partials);
    int64_t blocks = (args->size + NORM_COLUMNS - 1) / NORM_COLUMNS * args->slices;
    td_status status = launch(columns, x, blocks, args);
    return status ? status : launch_flat(finish, x, args->size, args);
}

td_status td__cuda_layer_norm_grad(td_tensor *grad_x, td_tensor *grad_weight, td_tensor *grad_bias,
                                   const td_tensor *grad_y, const td_tensor *x,
                                   const td_tensor *weight, const td_tensor *mean,
                                   const td_tensor *rstd)
{
    static struct cuda_kernel kernels[] = BY_DTYPE("layer_norm_grad");
    struct layer_norm_args args = {
        .out = data_of(grad_x),
        .x = td_tensor_data(x),
        .grad_y = td_tensor_data(grad_y),
        .weight = vector_of(weight),
        .grad_weight = vector_of(grad_weight),
        .grad_bias = vector_of(grad_bias),
        .mean = td_tensor_data(mean),
        .rstd = td_tensor_data(rstd),
        .rows = td_tensor_size(x, 0),
        .size = td_tensor_size(x, 1),
        .group = group_of(td_tensor_size(x, 1)),
    };
    td_status status = TD_OK;
    if (grad_x && args.size)
        status = launch(kernels, x, blocks_of(args.rows, args.group), &args);
    if (!status && (grad_weight || grad_bias))
        status = grad_columns(&args, x);
    return status;
}
