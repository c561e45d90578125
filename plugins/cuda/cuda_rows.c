/* How the threads of a GPU share rows; see cuda_rows.h. */
#include "cuda/cuda_rows.h"

enum { WARP = 32, WARP_BLOCK = 128, SHORT_ROW = 1024 };

static bool is_aligned(const td_tensor *tensor)
{
    size_t bytes = ROW_WIDTH * td_dtype_size(td_tensor_dtype(tensor));
    return td_tensor_dtype(tensor) != TD_F64 && (uintptr_t)td_tensor_data(tensor) % bytes == 0;
}

struct cuda_rows td__cuda_rows(int64_t size, const td_tensor *const *tensors, int count)
{
    struct cuda_rows rows = {
        .threads = size <= SHORT_ROW ? WARP : NORM_THREADS, .variant = -1, .block = NORM_THREADS};
    int64_t groups = size / ROW_WIDTH;
    bool fits = size && size % ROW_WIDTH == 0 && groups <= ROW_THREADS * ROW_GROUPS;
    for (int i = 0; i < count && fits; i++)
        fits = !tensors[i] || is_aligned(tensors[i]);
    if (fits) {
        rows.threads = WARP;
        while (groups > rows.threads * ROW_GROUPS)
            rows.threads *= 2;
        rows.variant = (int)((groups + rows.threads - 1) / rows.threads - 1) / 2;
        rows.block = rows.threads > WARP ? (unsigned)rows.threads : WARP_BLOCK;
    }
    rows.at_once = rows.block / (unsigned)rows.threads;
    return rows;
}

td_status td__cuda_launch_rows(struct cuda_kernel *kernel, const td_tensor *tensor,
                               const struct cuda_rows *rows, int64_t blocks, const void *args)
{
    struct cuda_grid grid = {.blocks = {(unsigned)(blocks < INT32_MAX ? blocks : INT32_MAX)},
                             .threads = rows->block};
    return blocks ? td__cuda_launch(kernel, tensor, grid, args) : TD_OK;
}

struct norm_vector td__cuda_vector(const td_tensor *tensor)
{
    return tensor ? (struct norm_vector){.data = td_tensor_data(tensor),
                                         .dtype = (int32_t)td_tensor_dtype(tensor)}
                  : (struct norm_vector){0};
}
