/* Launches the kernels of reductions.cu. */
#include "cuda/reductions_args.h"

#include "cuda/cuda_kernels.h"
#include "cuda/cuda_launch.h"

#define ALL_DTYPES(F, name)                                                                        \
    F(name, F32, f32), F(name, F64, f64), F(name, F16, f16), F(name, BF16, bf16), F(name, I8, i8), \
        F(name, U8, u8), F(name, I16, i16), F(name, I32, i32), F(name, I64, i64),                  \
        F(name, U32, u32), F(name, U64, u64), F(name, BOOL, bool), F(name, COMPLEX64, complex64),  \
        F(name, COMPLEX128, complex128)
#define ENTRY(prefix, DTYPE, dtype)                                                                \
    [TD_##DTYPE] = {.name = prefix #dtype, .image = CUDA_IMAGE_reductions}

static struct cuda_kernel reductions[] = {ALL_DTYPES(ENTRY, "reduce_")};
static struct cuda_kernel sums[] = {ENTRY("reduce_sum_", F32, f32), ENTRY("reduce_sum_", F64, f64),
                                    ENTRY("reduce_sum_", F16, f16),
                                    ENTRY("reduce_sum_", BF16, bf16)};
static struct cuda_kernel truths[] = {ALL_DTYPES(ENTRY, "reduce_truth_")};
static struct cuda_kernel extremes[] = {ALL_DTYPES(ENTRY, "arg_reduce_")};

/* Threads that fill any device, and elements that pay for a thread: the results must not depend on the device. */
enum { ENOUGH = 1 << 18, LEAST_EACH = 16, FEW_EACH = 64, WARP = 32 };

/* ---- Dimensions -------------------------------------------------------------------------------------------------- */

static int64_t magnitude(int64_t stride)
{
    return stride < 0 ? -stride : stride;
}

/* Adds a dimension in the order of strides of x, the smallest first. */
static void add_dim(struct reduce_dims *dims, int64_t size, int64_t x_stride, int64_t out_stride)
{
    dims->count *= size;
    if (size == 1)
        return;
    int at = dims->ndim++;
    for (; at > 0 && magnitude(dims->x_stride[at - 1]) > magnitude(x_stride); at--) {
        dims->size[at] = dims->size[at - 1];
        dims->x_stride[at] = dims->x_stride[at - 1];
        dims->out_stride[at] = dims->out_stride[at - 1];
    }
    dims->size[at] = size;
    dims->x_stride[at] = x_stride;
    dims->out_stride[at] = out_stride;
}

static void merge(struct reduce_dims *dims)
{
    int kept = 0;
    for (int i = 1; i < dims->ndim; i++) {
        if (dims->x_stride[i] == dims->x_stride[kept] * dims->size[kept] &&
            dims->out_stride[i] == dims->out_stride[kept] * dims->size[kept]) {
            dims->size[kept] *= dims->size[i];
            continue;
        }
        kept++;
        dims->size[kept] = dims->size[i];
        dims->x_stride[kept] = dims->x_stride[i];
        dims->out_stride[kept] = dims->out_stride[i];
    }
    if (dims->ndim)
        dims->ndim = kept + 1;
}

static struct reduce_args args_of(td_tensor *out, const td_tensor *x, unsigned dims)
{
    struct reduce_args args = {.x = td_tensor_data(x),
                               .out = td_tensor_data(out),
                               .kept = {.count = 1},
                               .reduced = {.count = 1},
                               .splits = 1,
                               .dtype = (int32_t)td_tensor_dtype(x),
                               .out_dtype = (int32_t)td_tensor_dtype(out)};
    for (int d = 0; d < td_tensor_ndim(x); d++) {
        if (dims >> d & 1)
            add_dim(&args.reduced, td_tensor_size(x, d), td_tensor_stride(x, d), 0);
        else
            add_dim(&args.kept, td_tensor_size(x, d), td_tensor_stride(x, d),
                    td_tensor_stride(out, d));
    }
    merge(&args.kept);
    merge(&args.reduced);
    args.chunk = args.terms = args.reduced.count;
    return args;
}

/* ---- Threads -------------------------------------------------------------------------------------------------------- */

/* How many threads reduce one result, whose elements are `each` in number. */
static void choose_group(struct reduce_args *args, int64_t each)
{
    bool by_rows = !args->kept.ndim ||
                   (args->reduced.ndim &&
                    magnitude(args->reduced.x_stride[0]) < magnitude(args->kept.x_stride[0]));
    args->group = 1;
    if (by_rows && each >= REDUCE_THREADS * 4)
        args->group = REDUCE_THREADS;
    while (by_rows && args->group < WARP && args->group * 2 <= each)
        args->group *= 2;
}

static void choose_splits(struct reduce_args *args)
{
    int64_t threads = args->kept.count * args->group;
    int64_t most = args->reduced.count / ((int64_t)args->group * LEAST_EACH);
    int64_t splits = threads ? ENOUGH / threads : 1;
    splits = splits > most ? most : splits;
    /* Few elements take less time than a second kernel. */
    if (splits < 2 || args->reduced.count <= (int64_t)args->group * FEW_EACH)
        return;
    args->chunk = (args->reduced.count + splits - 1) / splits;
    args->chunk = (args->chunk + args->group - 1) / args->group * args->group;
    args->splits = (args->reduced.count + args->chunk - 1) / args->chunk;
}

static td_status launch(struct cuda_kernel *kernel, const struct reduce_args *args, td_tensor *out)
{
    int64_t groups = REDUCE_THREADS / args->group;
    int64_t blocks = (args->kept.count * args->splits + groups - 1) / groups;
    struct cuda_grid grid = {.blocks = {(unsigned)(blocks < INT32_MAX ? blocks : INT32_MAX)},
                             .threads = REDUCE_THREADS};
    return td__cuda_launch(kernel, out, grid, args);
}

/* ---- Slots ------------------------------------------------------------------------------------------------------------ */

static struct cuda_kernel *kernel_for(const struct reduce_args *args)
{
    bool is_float = args->dtype <= TD_BF16;
    if (args->kind == TD_REDUCE_KIND_ALL || args->kind == TD_REDUCE_KIND_ANY)
        return &truths[args->dtype];
    if (is_float && (args->kind == TD_REDUCE_KIND_SUM || args->kind == TD_REDUCE_KIND_MEAN))
        return &sums[args->dtype];
    return &reductions[args->dtype];
}

/* The dtype of totals. */
static td_dtype wide_dtype(const struct reduce_args *args)
{
    if (args->kind == TD_REDUCE_KIND_ALL || args->kind == TD_REDUCE_KIND_ANY)
        return TD_I64;
    switch (args->dtype) {
    case TD_F32:
    case TD_F16:
    case TD_BF16:
        return TD_F32;
    case TD_F64:
    case TD_U64:
    case TD_COMPLEX64:
    case TD_COMPLEX128:
        return (td_dtype)args->dtype;
    default:
        return TD_I64;
    }
}

/* The totals of the splits, as rows of a matrix. */
static td_status reduce_partials(const struct reduce_args *args, td_tensor *out)
{
    struct reduce_args rest = *args;
    rest.x = args->partials;
    rest.partials = NULL;
    rest.dtype = (int32_t)wide_dtype(args);
    rest.reduced = (struct reduce_dims){
        .count = args->splits, .ndim = 1, .size = {args->splits}, .x_stride = {1}};
    rest.splits = 1;
    rest.chunk = args->splits;
    if (args->kind == TD_REDUCE_KIND_SQUARES)
        rest.kind = TD_REDUCE_KIND_SUM;
    int64_t stride =
        args->splits; /* of one result after the other, in the order of the kept dimensions */
    for (int d = 0; d < rest.kept.ndim; d++) {
        rest.kept.x_stride[d] = stride;
        stride *= rest.kept.size[d];
    }
    choose_group(&rest, args->splits);
    return launch(&reductions[rest.dtype], &rest, out);
}

td_status td__cuda_reduce(td_reduce_kind kind, td_tensor *out, const td_tensor *x, unsigned dims)
{
    TD_SCOPE;
    struct reduce_args args = args_of(out, x, dims);
    args.kind = (int32_t)kind;
    td_status status;
    if (!args.kept.count)
        return TD_OK;
    if (td__cuda_sum(&args, out, &status))
        return status;
    choose_group(&args, args.reduced.count);
    choose_splits(&args);
    if (args.splits == 1)
        return launch(kernel_for(&args), &args, out);
    td_tensor *partials = td__cuda_workspace(out, (size_t)(args.kept.count * args.splits) *
                                                      td_dtype_size(wide_dtype(&args)));
    if (!partials)
        return TD_ERR_NOMEM;
    args.partials = td_tensor_data(partials);
    status = launch(kernel_for(&args), &args, out);
    return status ? status : reduce_partials(&args, out);
}

td_status td__cuda_arg_reduce(bool least, td_tensor *out, const td_tensor *x, int dim)
{
    struct reduce_args args = args_of(out, x, 1u << dim);
    if (args.dtype >= TD_COMPLEX64)
        return td__cuda_unsupported();
    args.least = least;
    if (!args.kept.count)
        return TD_OK;
    choose_group(&args, args.reduced.count);
    return launch(&extremes[args.dtype], &args, out);
}
