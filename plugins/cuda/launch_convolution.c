/* Convolutions: by cuDNN where it is there (dnn_convolution.c), else by the kernels of convolution.cu. */
#include "cuda/convolution_args.h"

#include "cuda/cuda_kernels.h"
#include "cuda/cuda_launch.h"

#define BY_DTYPE(name)                                                                             \
    {                                                                                              \
        [TD_F32] = {name "_f32", CUDA_IMAGE_convolution},                                          \
        [TD_F64] = {name "_f64", CUDA_IMAGE_convolution},                                          \
        [TD_F16] = {name "_f16", CUDA_IMAGE_convolution},                                          \
        [TD_BF16] = {name "_bf16", CUDA_IMAGE_convolution},                                        \
    }

static struct convolution_args args_of(const td_tensor *x, const td_tensor *w, const td_tensor *y,
                                       const td_window *window)
{
    struct convolution_args args = {
        .images = td_tensor_size(x, 0),
        .channels = td_tensor_size(x, 1),
        .filters = td_tensor_size(w, 0),
        .groups = window->groups,
    };
    for (int d = 0; d < 2; d++) {
        args.in[d] = td_tensor_size(x, 2 + d);
        args.out[d] = td_tensor_size(y, 2 + d);
        args.kernel[d] = window->kernel[d];
        args.stride[d] = window->stride[d];
        args.padding[d] = window->padding[d];
        args.dilation[d] = window->dilation[d];
    }
    return args;
}

/* A thread for each element of the result. */
static td_status run(struct cuda_kernel *kernels, const struct convolution_args *args,
                     td_tensor *to)
{
    td_dtype dtype = td_tensor_dtype(to);
    if (dtype > TD_BF16)
        return td__cuda_unsupported();
    int64_t count = td_tensor_numel(to);
    return count ? td__cuda_launch(&kernels[dtype], to, td__cuda_grid_for(to, count, 1), args)
                 : TD_OK;
}

/* A block for each. */
static td_status run_blocks(struct cuda_kernel *kernels, const struct convolution_args *args,
                            td_tensor *to)
{
    td_dtype dtype = td_tensor_dtype(to);
    if (dtype > TD_BF16)
        return td__cuda_unsupported();
    int64_t count = td_tensor_numel(to);
    struct cuda_grid grid = {.blocks = {(unsigned)(count < INT32_MAX ? count : INT32_MAX)},
                             .threads = CONVOLUTION_THREADS};
    return count ? td__cuda_launch(&kernels[dtype], to, grid, args) : TD_OK;
}

td_status td__cuda_conv2d(td_tensor *out, const td_tensor *x, const td_tensor *w,
                          const td_tensor *bias, const td_window *window)
{
    static struct cuda_kernel kernels[] = BY_DTYPE("convolve");
    struct convolution_args args = args_of(x, w, out, window);
    args.x = td_tensor_data(x);
    args.w = td_tensor_data(w);
    args.bias = bias ? td_tensor_data(bias) : NULL;
    args.to = td_tensor_data(out);
    return run(kernels, &args, out);
}

td_status td__cuda_conv2d_grad_input(td_tensor *grad_x, const td_tensor *grad_y, const td_tensor *w,
                                     const td_window *window)
{
    static struct cuda_kernel kernels[] = BY_DTYPE("convolve_grad_input");
    struct convolution_args args = args_of(grad_x, w, grad_y, window);
    args.y = td_tensor_data(grad_y);
    args.w = td_tensor_data(w);
    args.to = td_tensor_data(grad_x);
    return run(kernels, &args, grad_x);
}

td_status td__cuda_conv2d_grad_weight(td_tensor *grad_w, td_tensor *grad_bias,
                                      const td_tensor *grad_y, const td_tensor *x,
                                      const td_window *window, bool accumulate)
{
    static struct cuda_kernel weights[] = BY_DTYPE("convolve_grad_weight");
    static struct cuda_kernel biases[] = BY_DTYPE("convolve_grad_bias");
    struct convolution_args args = args_of(x, grad_w, grad_y, window);
    args.x = td_tensor_data(x);
    args.y = td_tensor_data(grad_y);
    args.accumulate = accumulate;
    args.to = td_tensor_data(grad_w);
    td_status status = run_blocks(weights, &args, grad_w);
    if (status || !grad_bias)
        return status;
    args.to = td_tensor_data(grad_bias);
    return run_blocks(biases, &args, grad_bias);
}
