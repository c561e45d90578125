/* Launches the kernels of layer_norm.cu: of x, or of x + residual. */
#include "cuda/cuda_kernels.h"
#include "cuda/cuda_rows.h"
#include "cuda/layer_norm_args.h"

#define BY_COMPUTE(name)                                                                           \
    {                                                                                              \
        [TD_F32] = TD__CUDA_KERNEL(layer_norm, name "_f32"),                                       \
        [TD_F64] = TD__CUDA_KERNEL(layer_norm, name "_f64"),                                       \
    }

static struct cuda_kernel rows_forward[] = TD__CUDA_ROW_KERNELS(layer_norm, "layer_norm");
static struct cuda_kernel rows_backward[] = TD__CUDA_ROW_KERNELS(layer_norm, "layer_norm_grad");
static struct cuda_kernel any_forward[] = BY_COMPUTE("layer_norm_any");
static struct cuda_kernel any_backward[] = BY_COMPUTE("layer_norm_grad_any");
static struct cuda_kernel any_columns[] = BY_COMPUTE("layer_norm_columns");
static struct cuda_kernel finishes[] = BY_COMPUTE("layer_norm_finish");

/* Warps that share the rows backward: as many as an H100 or H200 holds at once. It is a number, since the results must not
 * depend on the device. The others are for rows that do not fit registers. */
enum { WARP = 32, MOST_WARPS = 1584, MOST_SLICES = 128, LEAST_ROWS = 32 };

/* Halves are computed in f32; f64 goes with nothing else. */
static bool has_dtypes(const td_tensor *const *tensors, int count, td_dtype *computed)
{
    bool wide = td_tensor_dtype(tensors[0]) == TD_F64;
    *computed = wide ? TD_F64 : TD_F32;
    for (int i = 0; i < count; i++)
        if (tensors[i] && (td_tensor_dtype(tensors[i]) > TD_BF16 ||
                           (td_tensor_dtype(tensors[i]) == TD_F64) != wide))
            return false;
    return true;
}

td_status td__cuda_add_layer_norm(td_tensor *out, td_tensor *sum, td_tensor *mean, td_tensor *rstd,
                                  const td_tensor *x, const td_tensor *residual,
                                  const td_tensor *weight, const td_tensor *bias, double eps)
{
    const td_tensor *all[] = {x, residual, sum, out, weight, bias};
    td_dtype computed;
    if (!has_dtypes(all, 6, &computed))
        return td__cuda_unsupported();
    struct cuda_rows rows = td__cuda_rows(td_tensor_size(x, 1), all, 6);
    struct layer_norm_args args = {
        .x = td__cuda_vector(x),
        .residual = td__cuda_vector(residual),
        .sum = td__cuda_vector(sum),
        .out = td__cuda_vector(out),
        .weight = td__cuda_vector(weight),
        .bias = td__cuda_vector(bias),
        .mean = td__cuda_vector(mean).data,
        .rstd = td__cuda_vector(rstd).data,
        .rows = td_tensor_size(x, 0),
        .size = td_tensor_size(x, 1),
        .eps = eps,
        .threads = rows.threads,
    };
    struct cuda_kernel *kernel = rows.variant >= 0 ? &rows_forward[rows.variant]
                                                   : &any_forward[computed];
    return td__cuda_launch_rows(kernel, x, &rows, (args.rows + rows.at_once - 1) / rows.at_once,
                                &args);
}

td_status td__cuda_layer_norm(td_tensor *out, td_tensor *mean, td_tensor *rstd, const td_tensor *x,
                              const td_tensor *weight, const td_tensor *bias, double eps)
{
    return td__cuda_add_layer_norm(out, NULL, mean, rstd, x, NULL, weight, bias, eps);
}

/* ---- Gradients -------------------------------------------------------------------------------------------------- */

/* Memory for the sums of slices, in the caller's scope. */
static td_status add_partials(struct layer_norm_args *args, const td_tensor *x, td_dtype computed)
{
    td_tensor *partials = td__cuda_workspace(x, (size_t)(args->slices * 2 * args->size) *
                                                    td_dtype_size(computed));
    if (!partials)
        return TD_ERR_NOMEM;
    args->partials = td_tensor_data(partials);
    return TD_OK;
}

static td_status launch_finish(const struct layer_norm_args *args, const td_tensor *x,
                               td_dtype computed)
{
    int64_t blocks = (2 * args->size + LAYER_NORM_COLUMNS - 1) / LAYER_NORM_COLUMNS;
    struct cuda_rows rows = {.block = LAYER_NORM_FINISH_THREADS};
    return td__cuda_launch_rows(&finishes[computed], x, &rows, blocks, args);
}

/* All gradients in one pass over the rows. */
static td_status grad_in_registers(struct layer_norm_args *args, const struct cuda_rows *rows,
                                   const td_tensor *x, bool columns)
{
    int64_t warps = rows->block / WARP, blocks = MOST_WARPS / warps;
    args->each = (args->rows + blocks * rows->at_once - 1) / (blocks * rows->at_once);
    args->slices = args->rows ? (args->rows + args->each * rows->at_once - 1) /
                                    (args->each * rows->at_once)
                              : 0;
    td_status status = columns ? add_partials(args, x, TD_F32) : TD_OK;
    if (!status)
        status = td__cuda_launch_rows(&rows_backward[rows->variant], x, rows, args->slices, args);
    return status || !columns ? status : launch_finish(args, x, TD_F32);
}

/* In two passes. */
static td_status grad_of_any(struct layer_norm_args *args, const struct cuda_rows *rows,
                             const td_tensor *x, bool columns, td_dtype computed)
{
    td_status status = TD_OK;
    if ((args->grad_x.data || args->grad_residual.data) && args->size)
        status = td__cuda_launch_rows(&any_backward[computed], x, rows,
                                      (args->rows + rows->at_once - 1) / rows->at_once, args);
    if (status || !columns)
        return status;
    int64_t slices = args->rows / LEAST_ROWS;
    slices = slices < 1 ? 1 : slices > MOST_SLICES ? MOST_SLICES : slices;
    args->each = (args->rows + slices - 1) / slices;
    args->slices = args->each ? (args->rows + args->each - 1) / args->each : 0;
    status = add_partials(args, x, computed);
    int64_t blocks = (args->size + LAYER_NORM_COLUMNS - 1) / LAYER_NORM_COLUMNS * args->slices;
    if (!status)
        status = td__cuda_launch_rows(&any_columns[computed], x,
                                      &(struct cuda_rows){.block = NORM_THREADS}, blocks, args);
    return status ? status : launch_finish(args, x, computed);
}

td_status td__cuda_add_layer_norm_grad(td_tensor *grad_x, td_tensor *grad_residual,
                                       td_tensor *grad_weight, td_tensor *grad_bias,
                                       const td_tensor *grad_y, const td_tensor *grad_sum,
                                       const td_tensor *sum, const td_tensor *weight,
                                       const td_tensor *mean, const td_tensor *rstd)
{
    TD_SCOPE;
    const td_tensor *all[] = {sum,    grad_y,        grad_sum,    grad_x,
                              weight, grad_residual, grad_weight, grad_bias};
    td_dtype computed;
    if (!has_dtypes(all, 8, &computed))
        return td__cuda_unsupported();
    struct cuda_rows rows = td__cuda_rows(td_tensor_size(sum, 1), all, 6);
    struct layer_norm_args args = {
        .x = td__cuda_vector(sum),
        .weight = td__cuda_vector(weight),
        .grad_y = td__cuda_vector(grad_y),
        .grad_sum = td__cuda_vector(grad_sum),
        .grad_x = td__cuda_vector(grad_x),
        .grad_residual = td__cuda_vector(grad_residual),
        .grad_weight = td__cuda_vector(grad_weight),
        .grad_bias = td__cuda_vector(grad_bias),
        .mean = td_tensor_data(mean),
        .rstd = td_tensor_data(rstd),
        .rows = td_tensor_size(sum, 0),
        .size = td_tensor_size(sum, 1),
        .threads = rows.threads,
    };
    bool columns = grad_weight || grad_bias;
    return rows.variant >= 0 ? grad_in_registers(&args, &rows, sum, columns)
                             : grad_of_any(&args, &rows, sum, columns, computed);
}

td_status td__cuda_layer_norm_grad(td_tensor *grad_x, td_tensor *grad_weight, td_tensor *grad_bias,
                                   const td_tensor *grad_y, const td_tensor *x,
                                   const td_tensor *weight, const td_tensor *mean,
                                   const td_tensor *rstd)
{
    return td__cuda_add_layer_norm_grad(grad_x, NULL, grad_weight, grad_bias, grad_y, NULL, x,
                                        weight, mean, rstd);
}
