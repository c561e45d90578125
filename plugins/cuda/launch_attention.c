/* Launches the kernels of attention.cu. */
#include "cuda/attention_args.h"

#include "cuda/cuda_kernels.h"
#include "cuda/cuda_launch.h"

#define BY_DTYPE(name)                                                                             \
    {                                                                                              \
        [TD_F32] = {name "_f32", CUDA_IMAGE_attention},                                            \
        [TD_F64] = {name "_f64", CUDA_IMAGE_attention},                                            \
        [TD_F16] = {name "_f16", CUDA_IMAGE_attention},                                            \
        [TD_BF16] = {name "_bf16", CUDA_IMAGE_attention},                                          \
    }

static struct attention_rows rows_of(const td_tensor *tensor)
{
    return tensor ? (struct attention_rows){.data = td_tensor_data(tensor),
                                            .batch = td_tensor_stride(tensor, 0),
                                            .head = td_tensor_stride(tensor, 1),
                                            .row = td_tensor_stride(tensor, 2)}
                  : (struct attention_rows){0};
}

static struct attention_args args_of(const td_tensor *q, const td_tensor *k, const td_tensor *v,
                                     const td_tensor *y, const td_tensor *lse,
                                     const td_tensor *mask, bool causal, double scale)
{
    return (struct attention_args){
        .items = td_tensor_size(q, 0) * td_tensor_size(q, 1),
        .heads = td_tensor_size(q, 1),
        .queries = td_tensor_size(q, 2),
        .keys = td_tensor_size(k, 2),
        .width = td_tensor_size(q, 3),
        .value_width = td_tensor_size(v, 3),
        .q = rows_of(q),
        .k = rows_of(k),
        .v = rows_of(v),
        .y = rows_of(y),
        .mask = mask ? td_tensor_data(mask) : NULL,
        .mask_batch = mask ? td_tensor_stride(mask, 0) : 0,
        .mask_head = mask ? td_tensor_stride(mask, 1) : 0,
        .mask_row = mask ? td_tensor_stride(mask, 2) : 0,
        .mask_column = mask ? td_tensor_stride(mask, 3) : 0,
        .lse = lse ? td_tensor_data(lse) : NULL,
        .scale = scale,
        .causal = causal,
    };
}

/* Launches a kernel with a warp for each of `rows`, which need `elements` of shared memory each. */
static td_status run(struct cuda_kernel *kernels, const struct attention_args *args,
                     const td_tensor *tensor, int64_t rows, int64_t elements)
{
    td_dtype dtype = td_tensor_dtype(tensor);
    if (dtype > TD_BF16)
        return td__cuda_unsupported();
    if (!rows)
        return TD_OK;
    const struct cuda_device *device = td__cuda_device_of(tensor);
    int64_t bytes = elements * (dtype == TD_F64 ? 8 : 4);
    int64_t warps = bytes * ATTENTION_WARPS <= device->shared_memory ? ATTENTION_WARPS : 1;
    if (bytes > device->shared_memory)
        return td__cuda_unsupported();
    int64_t blocks = (rows + warps - 1) / warps;
    struct cuda_grid grid = {.blocks = {(unsigned)(blocks < INT32_MAX ? blocks : INT32_MAX)},
                             .threads = (unsigned)warps * 32,
                             .shared = (size_t)(bytes * warps)};
    return td__cuda_launch(&kernels[dtype], tensor, grid, args);
}

td_status td__cuda_attention(td_tensor *out, td_tensor *lse, const td_tensor *q, const td_tensor *k,
                             const td_tensor *v, const td_tensor *mask, bool causal, double scale)
{
    static struct cuda_kernel kernels[] = BY_DTYPE("attend");
    struct attention_args args = args_of(q, k, v, out, lse, mask, causal, scale);
    if (td__cuda_flash_applies(&args, q))
        return td__cuda_flash(&args, q);
    return run(kernels, &args, out, args.items * args.queries, args.width + args.value_width);
}

td_status td__cuda_attention_grad(td_tensor *grad_q, td_tensor *grad_k, td_tensor *grad_v,
                                  const td_tensor *grad_y, const td_tensor *q, const td_tensor *k,
                                  const td_tensor *v, const td_tensor *y, const td_tensor *lse,
                                  const td_tensor *mask, bool causal, double scale)
{
    static struct cuda_kernel prepare[] = BY_DTYPE("attend_prepare");
    static struct cuda_kernel queries[] = BY_DTYPE("attend_grad_query");
    static struct cuda_kernel keys[] = BY_DTYPE("attend_grad_key");
    TD_SCOPE;
    struct attention_args args = args_of(q, k, v, y, lse, mask, causal, scale);
    int64_t rows = args.items * args.queries, widths = args.width + args.value_width;
    td_tensor *delta = td__cuda_workspace(q, (size_t)rows * sizeof(double));
    if (!delta)
        return TD_ERR_NOMEM;
    args.grad_y = rows_of(grad_y);
    args.grad_q = rows_of(grad_q);
    args.grad_k = rows_of(grad_k);
    args.grad_v = rows_of(grad_v);
    args.delta = td_tensor_data(delta);
    if (td__cuda_flash_applies(&args, q))
        return td__cuda_flash_grad(&args, q);
    td_status status = run(prepare, &args, q, rows, 0);
    if (!status && grad_q)
        status = run(queries, &args, q, rows, args.width + widths);
    if (!status && (grad_k || grad_v))
        status = run(keys, &args, q, args.items * args.keys, 2 * widths);
    return status;
}
