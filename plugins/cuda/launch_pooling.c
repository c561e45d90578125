/* Launches the kernels of pooling.cu. */
#include "cuda/pooling_args.h"

#include "cuda/cuda_kernels.h"
#include "cuda/cuda_launch.h"

#define BY_DTYPE(name)                                                                             \
    {                                                                                              \
        [TD_F32] = {name "_f32", CUDA_IMAGE_pooling},                                              \
        [TD_F64] = {name "_f64", CUDA_IMAGE_pooling},                                              \
        [TD_F16] = {name "_f16", CUDA_IMAGE_pooling},                                              \
        [TD_BF16] = {name "_bf16", CUDA_IMAGE_pooling},                                            \
    }

/* `in`: the tensor of images; `out`: that of the pixels that windows make of them. */
static struct pool_args args_of(const td_tensor *in, const td_tensor *out, const td_window *window)
{
    struct pool_args args = {
        .planes = td_tensor_size(in, 0) * td_tensor_size(in, 1),
        .in = {td_tensor_size(in, 2), td_tensor_size(in, 3)},
        .out = {td_tensor_size(out, 2), td_tensor_size(out, 3)},
        .adaptive = !window,
    };
    for (int d = 0; d < 2 && window; d++) {
        args.kernel[d] = window->kernel[d];
        args.stride[d] = window->stride[d];
        args.padding[d] = window->padding[d];
        args.dilation[d] = window->dilation[d];
    }
    args.count_include_pad = window && window->count_include_pad;
    return args;
}

/* Runs a kernel of a table with a thread for each element of `to`. */
static td_status run(struct cuda_kernel *kernels, const struct pool_args *args, td_tensor *to)
{
    td_dtype dtype = td_tensor_dtype(to);
    if (dtype > TD_BF16)
        return td__cuda_unsupported();
    int64_t count = td_tensor_numel(to);
    return count ? td__cuda_launch(&kernels[dtype], to, td__cuda_grid_for(to, count, 1), args)
                 : TD_OK;
}

static td_status find_max(td_tensor *out, td_tensor *indices, const td_tensor *x,
                          const td_window *window)
{
    static struct cuda_kernel kernels[] = BY_DTYPE("pool_max");
    struct pool_args args = args_of(x, out, window);
    if (args.in[0] * args.in[1] > INT32_MAX)
        return td__cuda_unsupported(); /* indices are i32 */
    args.from = td_tensor_data(x);
    args.to = td_tensor_data(out);
    args.indices = indices ? td_tensor_data(indices) : NULL;
    return run(kernels, &args, out);
}

td_status td__cuda_max_pool2d(td_tensor *out, td_tensor *indices, const td_tensor *x,
                              const td_window *window)
{
    return find_max(out, indices, x, window);
}

td_status td__cuda_adaptive_max_pool2d(td_tensor *out, td_tensor *indices, const td_tensor *x)
{
    return find_max(out, indices, x, NULL);
}

td_status td__cuda_max_pool2d_grad(td_tensor *grad_x, const td_tensor *grad_y,
                                   const td_tensor *indices)
{
    static struct cuda_kernel link = {.name = "pool_link", .image = CUDA_IMAGE_pooling};
    static struct cuda_kernel kernels[] = BY_DTYPE("pool_max_grad");
    TD_SCOPE;
    struct pool_args args = args_of(grad_x, grad_y, NULL);
    int64_t inputs = td_tensor_numel(grad_x), outputs = td_tensor_numel(grad_y);
    td_tensor *lists = td__cuda_workspace(grad_x, (size_t)(inputs + outputs) * sizeof(int32_t));
    if (!lists)
        return TD_ERR_NOMEM;
    args.heads = td_tensor_data(lists);
    args.links = args.heads + inputs;
    args.indices = td_tensor_data(indices);
    args.from = td_tensor_data(grad_y);
    args.to = td_tensor_data(grad_x);
    td_status status = td__cuda_enter(td__cuda_device_of(grad_x));
    if (!status && inputs)
        status = td__cuda_check(td__cuda.cuMemsetD8Async((CUdeviceptr)args.heads, 0xff,
                                                         (size_t)inputs * sizeof(int32_t),
                                                         td__cuda_stream_of(grad_x)),
                                "cuda: filling memory");
    if (!status && outputs)
        status = td__cuda_launch(&link, grad_x, td__cuda_grid_for(grad_x, outputs, 1), &args);
    return status ? status : run(kernels, &args, grad_x);
}

static td_status average(td_tensor *out, const td_tensor *x, const td_window *window)
{
    static struct cuda_kernel kernels[] = BY_DTYPE("pool_average");
    struct pool_args args = args_of(x, out, window);
    args.from = td_tensor_data(x);
    args.to = td_tensor_data(out);
    return run(kernels, &args, out);
}

static td_status average_grad(td_tensor *grad_x, const td_tensor *grad_y, const td_window *window)
{
    static struct cuda_kernel kernels[] = BY_DTYPE("pool_average_grad");
    struct pool_args args = args_of(grad_x, grad_y, window);
    args.from = td_tensor_data(grad_y);
    args.to = td_tensor_data(grad_x);
    return run(kernels, &args, grad_x);
}

td_status td__cuda_avg_pool2d(td_tensor *out, const td_tensor *x, const td_window *window)
{
    return average(out, x, window);
}

td_status td__cuda_avg_pool2d_grad(td_tensor *grad_x, const td_tensor *grad_y,
                                   const td_window *window)
{
    return average_grad(grad_x, grad_y, window);
}

td_status td__cuda_adaptive_avg_pool2d(td_tensor *out, const td_tensor *x)
{
    return average(out, x, NULL);
}

td_status td__cuda_adaptive_avg_pool2d_grad(td_tensor *grad_x, const td_tensor *grad_y)
{
    return average_grad(grad_x, grad_y, NULL);
}
