/* Launches the kernels of flash_attention.cu and flash_attention_grad.cu. */
#include "cuda/flash_attention_args.h"

#include "cuda/cuda_kernels.h"
#include "cuda/cuda_launch.h"

/* Kernels are compiled for widths of 32, 64, 96 and 128, for f16 and for bf16. */
enum { WIDTHS = 4, WIDTH_STEP = 32, MOST_WIDTH = WIDTHS * WIDTH_STEP, MOST_ROWS = 1 << 30 };

#define BY_WIDTH(image, name)                                                                      \
    {                                                                                              \
        TD__CUDA_KERNEL(image, name "_32"), TD__CUDA_KERNEL(image, name "_64"),                    \
            TD__CUDA_KERNEL(image, name "_96"), TD__CUDA_KERNEL(image, name "_128")                \
    }

static int width_of(const struct attention_args *args)
{
    int64_t width = args->width > args->value_width ? args->width : args->value_width;
    return (int)(width + WIDTH_STEP - 1) / WIDTH_STEP * WIDTH_STEP;
}

/* Whether each row is there, or not wanted, and begins at a multiple of 16 bytes. */
static bool aligned(const struct attention_args *args, const struct attention_rows *rows,
                    int64_t count)
{
    return (uintptr_t)rows->data % 16 == 0 && (count <= 1 || rows->row % 8 == 0) &&
           (args->heads <= 1 || rows->head % 8 == 0) &&
           (args->items <= args->heads || rows->batch % 8 == 0);
}

bool td__cuda_flash_applies(const struct attention_args *args, const td_tensor *q)
{
    td_dtype dtype = td_tensor_dtype(q);
    int64_t widths = args->width | args->value_width, l = args->queries, s = args->keys;
    if ((dtype != TD_F16 && dtype != TD_BF16) || args->mask || !(args->scale > 0) || !widths ||
        widths % 8 || args->width > MOST_WIDTH || args->value_width > MOST_WIDTH || l > MOST_ROWS ||
        s > MOST_ROWS || args->items * (l / FLASH_QUERIES + s / 64 + 1) > INT32_MAX)
        return false;
    int width = width_of(args), most = td__cuda_device_of(q)->shared_memory;
    return FLASH_SHARED(width, FLASH_QUERIES, FLASH_KEYS) <= most &&
           FLASH_SHARED(width, 2 * FLASH_QUERIES, FLASH_GRAD_KEYS(width)) <= most &&
           FLASH_SHARED(width, 2 * FLASH_OWN_KEYS(width), FLASH_GRAD_QUERIES) <= most &&
           aligned(args, &args->q, l) && aligned(args, &args->k, s) && aligned(args, &args->v, s) &&
           aligned(args, &args->y, l) && aligned(args, &args->grad_y, l) &&
           aligned(args, &args->grad_q, l) && aligned(args, &args->grad_k, s) &&
           aligned(args, &args->grad_v, s);
}

/* Launches the kernel for this dtype and width, with a block for `height` of `rows`. */
static td_status run(struct cuda_kernel kernels[2][WIDTHS], const struct attention_args *args,
                     const td_tensor *q, int64_t rows, int64_t height, int shared)
{
    int64_t blocks = (rows + height - 1) / height * args->items;
    if (!blocks)
        return TD_OK;
    struct cuda_kernel *kernel =
        &kernels[td_tensor_dtype(q) == TD_BF16][width_of(args) / WIDTH_STEP - 1];
    struct cuda_grid grid = {
        .blocks = {(unsigned)blocks}, .threads = FLASH_THREADS, .shared = (size_t)shared};
    return td__cuda_launch(kernel, q, grid, args);
}

td_status td__cuda_flash(const struct attention_args *args, const td_tensor *q)
{
    static struct cuda_kernel kernels[2][WIDTHS] = {BY_WIDTH(flash_attention, "flash_f16"),
                                                    BY_WIDTH(flash_attention, "flash_bf16")};
    return run(kernels, args, q, args->queries, FLASH_QUERIES,
               FLASH_SHARED(width_of(args), FLASH_QUERIES, FLASH_KEYS));
}

static td_status run_delta(const struct attention_args *args, const td_tensor *q)
{
    static struct cuda_kernel kernels[] = {
        TD__CUDA_KERNEL(flash_attention_grad, "flash_delta_f16"),
        TD__CUDA_KERNEL(flash_attention_grad, "flash_delta_bf16")};
    int64_t rows = args->items * args->queries, each = FLASH_THREADS / 16;
    int64_t blocks = (rows + each - 1) / each;
    if (!rows)
        return TD_OK;
    struct cuda_grid grid = {.blocks = {(unsigned)(blocks < INT32_MAX ? blocks : INT32_MAX)},
                             .threads = FLASH_THREADS};
    return td__cuda_launch(&kernels[td_tensor_dtype(q) == TD_BF16], q, grid, args);
}

td_status td__cuda_flash_grad(const struct attention_args *args, const td_tensor *q)
{
    static struct cuda_kernel queries[2][WIDTHS] = {
        BY_WIDTH(flash_attention_grad, "flash_queries_f16"),
        BY_WIDTH(flash_attention_grad, "flash_queries_bf16")};
    static struct cuda_kernel keys[2][WIDTHS] = {BY_WIDTH(flash_attention_grad, "flash_keys_f16"),
                                                 BY_WIDTH(flash_attention_grad, "flash_keys_bf16")};
    int width = width_of(args), own = FLASH_OWN_KEYS(width);
    td_status status = run_delta(args, q);
    if (!status && args->grad_q.data)
        status = run(queries, args, q, args->queries, FLASH_QUERIES,
                     FLASH_SHARED(width, 2 * FLASH_QUERIES, FLASH_GRAD_KEYS(width)));
    if (!status && (args->grad_k.data || args->grad_v.data))
        status = run(keys, args, q, args->keys, own,
                     FLASH_SHARED(width, 2 * own, FLASH_GRAD_QUERIES));
    return status;
}
