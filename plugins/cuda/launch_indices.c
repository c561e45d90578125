/* Launches the kernels of indices.cu. */
#include "cuda/indices_args.h"

#include "cuda/cuda_kernels.h"
#include "cuda/cuda_launch.h"

#define BY_SIZE(prefix)                                                                            \
    {                                                                                              \
        [1] = {.name = prefix "_1", .image = CUDA_IMAGE_indices},                                  \
        [2] = {.name = prefix "_2", .image = CUDA_IMAGE_indices},                                  \
        [4] = {.name = prefix "_4", .image = CUDA_IMAGE_indices},                                  \
        [8] = {.name = prefix "_8", .image = CUDA_IMAGE_indices},                                  \
        [16] = {.name = prefix "_16", .image = CUDA_IMAGE_indices},                                \
    }
#define ENTRY(prefix, DTYPE, dtype)                                                                \
    [TD_##DTYPE] = {.name = prefix #dtype, .image = CUDA_IMAGE_indices}
#define BY_DTYPE(name)                                                                             \
    {                                                                                              \
        ENTRY(name, F32, f32), ENTRY(name, F64, f64), ENTRY(name, F16, f16),                       \
            ENTRY(name, BF16, bf16), ENTRY(name, I8, i8), ENTRY(name, U8, i8),                     \
            ENTRY(name, I16, i16), ENTRY(name, I32, i32), ENTRY(name, I64, i64),                   \
            ENTRY(name, U32, i32), ENTRY(name, U64, i64), ENTRY(name, BOOL, bool),                 \
            ENTRY(name, COMPLEX64, complex64), ENTRY(name, COMPLEX128, complex128)                 \
    }

/* From so many indices on they are sorted. */
enum { MANY = 512, FEW_LINES = 1 << 16, WIDE_BLOCK = 256 };

/* The lines of three tensors along `dim`. `index` has the dimensions of the others, or only this one. */
static struct index_args args_of(const td_tensor *out, const td_tensor *x, int dim,
                                 const td_tensor *index, int64_t limit, int kernel)
{
    bool whole = td_tensor_ndim(index) == td_tensor_ndim(out) && td_tensor_ndim(out) > 1;
    struct index_args args = {
        .out = td_tensor_data(out),
        .x = td_tensor_data(x),
        .index = td_tensor_data(index),
        .lines = {.count = 1},
        .length = td_tensor_ndim(index) ? td_tensor_size(index, whole ? dim : 0) : 1,
        .limit = limit,
        .out_step = td_tensor_ndim(out) ? td_tensor_stride(out, dim) : 0,
        .x_step = td_tensor_ndim(x) ? td_tensor_stride(x, dim) : 0,
        .index_step = td_tensor_ndim(index) ? td_tensor_stride(index, whole ? dim : 0) : 0,
        .fault = td__cuda_fault_of(out),
        .kernel = kernel,
    };
    const td_tensor *shape = whole ? index : out; /* gather's x may be larger than what is read */
    for (int d = td_tensor_ndim(out) - 1; d >= 0; d--) {
        int64_t size = d == dim ? 1 : td_tensor_size(shape, d);
        args.lines.count *= size;
        if (size == 1)
            continue;
        int at = args.lines.ndim++;
        args.lines.size[at] = size;
        args.lines.stride[0][at] = td_tensor_stride(out, d);
        args.lines.stride[1][at] = td_tensor_stride(x, d);
        args.lines.stride[2][at] = whole ? td_tensor_stride(index, d) : 0;
    }
    return args;
}

static td_status read_at(const struct index_args *args, td_tensor *out)
{
    static struct cuda_kernel along[] = BY_SIZE("select");
    static struct cuda_kernel across[] = BY_SIZE("select_across");
    int64_t count = args->lines.count * args->length;
    if (!count)
        return TD_OK;
    bool is_row = args->lines.ndim && args->lines.stride[0][0] == 1 && args->out_step != 1;
    struct cuda_kernel *kernels = is_row ? across : along;
    return td__cuda_launch(&kernels[td_dtype_size(td_tensor_dtype(out))], out,
                           td__cuda_grid_for(out, count, 1), args);
}

td_status td__cuda_index_select(td_tensor *out, const td_tensor *x, int dim, const td_tensor *index)
{
    struct index_args args = args_of(out, x, dim, index, td_tensor_size(x, dim),
                                     CUDA_FAULT_INDEX_SELECT);
    return read_at(&args, out);
}

td_status td__cuda_gather(td_tensor *out, const td_tensor *x, int dim, const td_tensor *index)
{
    struct index_args args = args_of(
        out, x, dim, index, td_tensor_ndim(x) ? td_tensor_size(x, dim) : 1, CUDA_FAULT_GATHER);
    return read_at(&args, out);
}

/* ---- Adding ---------------------------------------------------------------------------------------------------------- */

static td_status add_lines(const struct index_args *args, td_tensor *out)
{
    static struct cuda_kernel kernels[] = BY_DTYPE("add_lines_");
    if (!args->lines.count || !args->length)
        return TD_OK;
    return td__cuda_launch(&kernels[td_tensor_dtype(out)], out,
                           td__cuda_grid_for(out, args->lines.count, 1), args);
}

/* One pass of the sort, by the digit at args->shift. */
static td_status sort_pass(const struct sort_args *args, td_tensor *out)
{
    static struct cuda_kernel count = {.name = "sort_count", .image = CUDA_IMAGE_indices};
    static struct cuda_kernel sums = {.name = "sort_sums", .image = CUDA_IMAGE_indices};
    static struct cuda_kernel move = {.name = "sort_move", .image = CUDA_IMAGE_indices};
    struct cuda_grid tiles = {.blocks = {(unsigned)args->tiles}, .threads = SORT_THREADS};
    struct cuda_grid one = {.blocks = {1}, .threads = SORT_THREADS};
    td_status status = td__cuda_launch(&count, out, tiles, args);
    if (!status)
        status = td__cuda_launch(&sums, out, one, args);
    return status ? status : td__cuda_launch(&move, out, tiles, args);
}

/* Sorts the positions of the indices; *order is in the caller's scope. */
static td_status sort(const struct index_args *args, td_tensor *out, const int32_t **order)
{
    int64_t n = args->length, tiles = (n + SORT_TILE - 1) / SORT_TILE;
    td_tensor *memory = td__cuda_workspace(out,
                                           (size_t)(2 * n + SORT_DIGITS * tiles) * sizeof(int32_t));
    if (!memory)
        return TD_ERR_NOMEM;
    int32_t *lists[2] = {td_tensor_data(memory), (int32_t *)td_tensor_data(memory) + n};
    struct sort_args pass = {.index = args->index,
                             .counts = lists[1] + n,
                             .count = n,
                             .limit = args->limit,
                             .tiles = tiles};
    int turn = 0;
    for (; !pass.shift || args->limit >> pass.shift; pass.shift += 4, turn ^= 1) {
        pass.to = lists[turn];
        td_status status = sort_pass(&pass, out);
        if (status)
            return status;
        pass.from = lists[turn];
    }
    *order = pass.from;
    return TD_OK;
}

td_status td__cuda_index_add(td_tensor *out, int dim, const td_tensor *index, const td_tensor *src)
{
    static struct cuda_kernel kernels[] = BY_DTYPE("add_sorted_");
    TD_SCOPE;
    struct index_args args = args_of(out, src, dim, index, td_tensor_size(out, dim),
                                     CUDA_FAULT_INDEX_ADD);
    bool sorted = args.length >= MANY && args.length <= INT32_MAX / 4 &&
                  args.lines.count < FEW_LINES && args.index_step == 1;
    if (!sorted)
        return add_lines(&args, out);
    td_status status = sort(&args, out, &args.order);
    if (status || !args.lines.count)
        return status;
    struct cuda_grid grid = {.blocks = {(unsigned)args.length},
                             .threads = args.lines.count >= WIDE_BLOCK ? WIDE_BLOCK : 32};
    return td__cuda_launch(&kernels[td_tensor_dtype(out)], out, grid, &args);
}

td_status td__cuda_scatter_add(td_tensor *out, int dim, const td_tensor *index,
                               const td_tensor *src)
{
    struct index_args args = args_of(out, src, dim, index,
                                     td_tensor_ndim(out) ? td_tensor_size(out, dim) : 1,
                                     CUDA_FAULT_SCATTER_ADD);
    return add_lines(&args, out);
}
