/* Launches the kernels of sums.cu. */
#include "cuda/cuda_kernels.h"
#include "cuda/cuda_launch.h"
#include "cuda/elements_args.h"
#include "cuda/reductions_args.h"
#include "cuda/sums_args.h"

#define FLOATS(name)                                                                               \
    {                                                                                              \
        [TD_F32] = TD__CUDA_KERNEL(sums, name "_f32"),                                             \
        [TD_F64] = TD__CUDA_KERNEL(sums, name "_f64"),                                             \
        [TD_F16] = TD__CUDA_KERNEL(sums, name "_f16"),                                             \
        [TD_BF16] = TD__CUDA_KERNEL(sums, name "_bf16"),                                           \
    }

static struct cuda_kernel columns_of[] = FLOATS("sum_columns"), rows_of[] = FLOATS("sum_rows");
static struct cuda_kernel columns_finish[] = {
    [TD_F32] = TD__CUDA_KERNEL(sums, "sum_columns_finish_f32"),
    [TD_F64] = TD__CUDA_KERNEL(sums, "sum_columns_finish_f64")};
static struct cuda_kernel rows_finish[] = {[TD_F32] = TD__CUDA_KERNEL(sums, "sum_rows_finish_f32"),
                                           [TD_F64] = TD__CUDA_KERNEL(sums, "sum_rows_finish_f64")};

/* Blocks that fill any device, rows and groups that pay for a slice, and elements that pay for a second launch: results
 * must not depend on the device. */
enum {
    WARP = 32,
    ENOUGH_BLOCKS = 1056,
    LEAST_ROWS = 32,
    LEAST_GROUPS = 8,
    LEAST_ELEMENTS = 1 << 16
};

static td_dtype computed_in(int32_t dtype)
{
    return dtype == TD_F64 ? TD_F64 : TD_F32;
}

static bool is_sum(const struct reduce_args *args)
{
    return args->dtype <= TD_BF16 &&
           (args->kind == TD_REDUCE_KIND_SUM || args->kind == TD_REDUCE_KIND_MEAN ||
            args->kind == TD_REDUCE_KIND_SQUARES);
}

static bool is_aligned(const struct reduce_args *args, int width)
{
    return (uintptr_t)args->x % ((size_t)width * td_dtype_size((td_dtype)args->dtype)) == 0;
}

/* Whether it is the sum of columns: results are neighbours, and there are enough for a warp. */
static bool is_by_columns(const struct reduce_args *args, int width)
{
    return args->kept.ndim == 1 && args->kept.x_stride[0] == 1 && args->reduced.ndim == 1 &&
           args->kept.count % width == 0 && args->kept.count >= (int64_t)WARP * width / 2 &&
           args->reduced.x_stride[0] > 0 && args->reduced.x_stride[0] % width == 0 &&
           args->kept.count * args->reduced.count >= LEAST_ELEMENTS;
}

/* Whether it is the sum of rows: the terms of a result are neighbours. */
static bool is_by_rows(const struct reduce_args *args, int width)
{
    bool one = args->kept.count == 1;
    return args->reduced.ndim == 1 && args->reduced.x_stride[0] == 1 &&
           args->reduced.count >= (int64_t)WARP * width &&
           (one || (args->kept.ndim == 1 && args->kept.x_stride[0] > 0 &&
                    args->kept.x_stride[0] % width == 0));
}

static struct cuda_grid grid_of(int64_t blocks, unsigned threads)
{
    return (struct cuda_grid){.blocks = {(unsigned)blocks}, .threads = threads};
}

static int64_t over(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

/* Memory for the sums of slices, in the caller's scope. */
static td_status add_partials(struct sums_args *sums, int64_t count, td_dtype computed,
                              const td_tensor *out)
{
    td_tensor *partials = td__cuda_workspace(out, (size_t)count * td_dtype_size(computed));
    if (!partials)
        return TD_ERR_NOMEM;
    sums->partials = td_tensor_data(partials);
    return TD_OK;
}

static td_status run_columns(const struct reduce_args *args, struct sums_args *sums, td_tensor *out,
                             int width)
{
    sums->rows = args->reduced.count;
    sums->columns = args->kept.count;
    sums->pitch = args->reduced.x_stride[0];
    int64_t tiles = over(sums->columns, (int64_t)WARP * width), slices = ENOUGH_BLOCKS / tiles;
    slices = slices > sums->rows / LEAST_ROWS ? sums->rows / LEAST_ROWS : slices;
    sums->each = over(sums->rows, slices < 1 ? 1 : slices);
    sums->slices = over(sums->rows, sums->each);
    td_dtype computed = computed_in(args->dtype);
    td_status status = add_partials(sums, sums->slices * sums->columns, computed, out);
    if (!status)
        status = td__cuda_launch(&columns_of[args->dtype], out,
                                 grid_of(tiles * sums->slices, SUMS_THREADS), sums);
    return status ? status
                  : td__cuda_launch(&columns_finish[computed], out,
                                    grid_of(over(sums->columns, WARP), SUMS_FINISH_THREADS), sums);
}

static td_status run_rows(const struct reduce_args *args, struct sums_args *sums, td_tensor *out,
                          int width)
{
    sums->rows = args->kept.count;
    sums->columns = args->reduced.count;
    sums->pitch = args->kept.ndim ? args->kept.x_stride[0] : 0;
    int64_t groups = sums->columns / width;
    sums->threads = groups >= SUMS_THREADS * 4 ? SUMS_THREADS : WARP;
    int64_t at_once = SUMS_THREADS / sums->threads, slices = ENOUGH_BLOCKS * at_once / sums->rows;
    int64_t most = groups / ((int64_t)sums->threads * LEAST_GROUPS);
    slices = slices > most ? most : slices;
    sums->each = over(groups, slices < 1 ? 1 : slices);
    sums->slices = over(groups, sums->each);
    td_dtype computed = computed_in(args->dtype);
    td_status status = TD_OK;
    if (sums->slices > 1)
        status = add_partials(sums, sums->slices * sums->rows, computed, out);
    if (!status)
        status = td__cuda_launch(&rows_of[args->dtype], out,
                                 grid_of(over(sums->rows * sums->slices, at_once), SUMS_THREADS),
                                 sums);
    if (status || sums->slices == 1)
        return status;
    sums->threads = sums->slices >= SUMS_THREADS ? SUMS_THREADS : WARP;
    int64_t blocks = over(sums->rows, SUMS_THREADS / sums->threads);
    return td__cuda_launch(&rows_finish[computed], out, grid_of(blocks, SUMS_THREADS), sums);
}

bool td__cuda_sum(const struct reduce_args *args, td_tensor *out, td_status *status)
{
    int width = CUDA_WIDTH((int)td_dtype_size((td_dtype)args->dtype));
    bool by_rows = is_by_rows(args, width), by_columns = is_by_columns(args, width);
    if (!is_sum(args) || !is_aligned(args, width) || (!by_rows && !by_columns))
        return false;
    struct sums_args sums = {.x = args->x,
                             .squares = args->kind == TD_REDUCE_KIND_SQUARES,
                             .out = args->out,
                             .out_stride = args->kept.ndim ? args->kept.out_stride[0] : 0,
                             .out_dtype = args->out_dtype,
                             .divisor = args->kind == TD_REDUCE_KIND_MEAN ? args->terms : 1};
    *status = by_rows ? run_rows(args, &sums, out, width) : run_columns(args, &sums, out, width);
    return true;
}
