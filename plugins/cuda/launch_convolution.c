/* Convolutions: by cuDNN where it is there (dnn_convolution.c), else by the kernels of convolution.cu. */
#include "cuda/dnn_convolution.h"

#include "cuda/cuda_kernels.h"
#include "cuda/launch_channels.h"

#define BY_DTYPE(name)                                                                             \
    {                                                                                              \
        [TD_F32] = {name "_f32", CUDA_IMAGE_convolution},                                          \
        [TD_F64] = {name "_f64", CUDA_IMAGE_convolution},                                          \
        [TD_F16] = {name "_f16", CUDA_IMAGE_convolution},                                          \
        [TD_BF16] = {name "_bf16", CUDA_IMAGE_convolution},                                        \
    }

enum { BLOCKS_PER_PROCESSOR = 16 };

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

static td_status run_blocks(struct cuda_kernel *kernels, const struct convolution_args *args,
                            td_tensor *to, int64_t blocks, unsigned threads)
{
    td_dtype dtype = td_tensor_dtype(to);
    if (dtype > TD_BF16)
        return td__cuda_unsupported();
    struct cuda_grid grid = {.blocks = {(unsigned)(blocks < INT32_MAX ? blocks : INT32_MAX)},
                             .threads = threads};
    return blocks ? td__cuda_launch(&kernels[dtype], to, grid, args) : TD_OK;
}

static td_status add_bias(struct convolution_args *args, td_tensor *out)
{
    static struct cuda_kernel kernels[] = BY_DTYPE("convolve_add_bias");
    args->space = td__cuda_channels((const td_tensor *[]){out}, 1, BLOCKS_PER_PROCESSOR);
    return run_blocks(kernels, args, out, args->filters * args->space.chunks,
                      CONVOLUTION_BIAS_THREADS);
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
    bool done;
    td_status status = td__dnn_convolve(DNN_Y_OF_X_W, &args, out, &done);
    if (status || (done && !bias))
        return status;
    return done ? add_bias(&args, out) : run(kernels, &args, out);
}

td_status td__cuda_conv2d_grad_input(td_tensor *grad_x, const td_tensor *grad_y, const td_tensor *w,
                                     const td_window *window)
{
    static struct cuda_kernel kernels[] = BY_DTYPE("convolve_grad_input");
    struct convolution_args args = args_of(grad_x, w, grad_y, window);
    args.y = td_tensor_data(grad_y);
    args.w = td_tensor_data(w);
    args.to = td_tensor_data(grad_x);
    bool done;
    td_status status = td__dnn_convolve(DNN_GRAD_X_OF_Y_W, &args, grad_x, &done);
    return status || done ? status : run(kernels, &args, grad_x);
}

static td_status sum_bias(struct convolution_args *args, td_tensor *grad_bias,
                          const td_tensor *grad_y)
{
    static struct cuda_kernel kernels[] = BY_DTYPE("convolve_grad_bias");
    args->to = td_tensor_data(grad_bias);
    args->space = td__cuda_channels((const td_tensor *[]){grad_y}, 1, 0);
    return run_blocks(kernels, args, grad_bias, args->filters, CONVOLUTION_SUM_THREADS);
}

td_status td__cuda_conv2d_grad_weight(td_tensor *grad_w, td_tensor *grad_bias,
                                      const td_tensor *grad_y, const td_tensor *x,
                                      const td_window *window, bool accumulate)
{
    static struct cuda_kernel kernels[] = BY_DTYPE("convolve_grad_weight");
    struct convolution_args args = args_of(x, grad_w, grad_y, window);
    args.x = td_tensor_data(x);
    args.y = td_tensor_data(grad_y);
    args.accumulate = accumulate;
    args.to = td_tensor_data(grad_w);
    bool done;
    td_status status = td__dnn_convolve(DNN_GRAD_W_OF_X_Y, &args, grad_w, &done);
    if (!status && !done)
        status = run_blocks(kernels, &args, grad_w, td_tensor_numel(grad_w), CONVOLUTION_THREADS);
    return status || !grad_bias ? status : sum_bias(&args, grad_bias, grad_y);
}
