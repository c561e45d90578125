/* Launches the kernels of pooling.cu: for all planes at once, or, where they have too many pixels for indices of 32 bits, for
 * some at a time. */
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

enum { LARGE_WINDOW = 32 /* pixels of a warp's window */, WARP = 32 };

/* A kernel over the planes: which, what it reads and writes, and how many threads a plane has. */
struct pool_launch {
    struct cuda_kernel *kernels; /* by dtype */
    const td_tensor *from;
    td_tensor *to;
    const td_tensor *indices;
    int64_t count;   /* of results or groups, of a plane */
    int64_t threads; /* of each of them */
};

static bool fits(int64_t a, int64_t b)
{
    return !b || a <= INT32_MAX / b;
}

/* `in`: the tensor of images; `out`: that of the pixels that windows make of them. False: too large for the kernels. */
static bool make_args(const td_tensor *in, const td_tensor *out, const td_window *window,
                      struct pool_args *args)
{
    *args = (struct pool_args){.adaptive = !window || !window->kernel[0]};
    for (int d = 0; d < 2; d++) {
        int64_t size = td_tensor_size(in, 2 + d), made = td_tensor_size(out, 2 + d), reach = 0;
        args->in[d] = (int32_t)size;
        args->out[d] = (int32_t)made;
        args->by_in[d] = cuda_divisor_of(size < 1 ? 1 : size);
        args->by_out[d] = cuda_divisor_of(made < 1 ? 1 : made);
        if (args->adaptive) {
            reach = fits(size + 1, made + 1) ? 0 : INT32_MAX;
        } else {
            args->kernel[d] = (int32_t)window->kernel[d];
            args->stride[d] = (int32_t)window->stride[d];
            args->padding[d] = (int32_t)window->padding[d];
            args->dilation[d] = (int32_t)window->dilation[d];
            args->by_stride[d] = cuda_divisor_of(window->stride[d]);
            reach = fits(window->kernel[d], window->dilation[d]) && fits(made, window->stride[d])
                        ? window->kernel[d] * window->dilation[d] + 2 * window->padding[d] +
                              window->stride[d]
                        : INT32_MAX;
        }
        if (size + made + reach > INT32_MAX / 2)
            return false;
    }
    args->count_include_pad = window && window->count_include_pad;
    return fits(args->in[0], args->in[1]) && fits(args->out[0], args->out[1]);
}

static const char *advance(const void *data, int64_t elements, size_t size)
{
    return data ? (const char *)data + elements * (int64_t)size : NULL;
}

static td_status run(const struct pool_launch *launch, struct pool_args *args)
{
    td_dtype dtype = td_tensor_dtype(launch->to);
    int64_t planes = td_tensor_size(launch->to, 0) * td_tensor_size(launch->to, 1);
    if (dtype > TD_BF16)
        return td__cuda_unsupported();
    if (!td_tensor_numel(launch->to))
        return TD_OK;
    int64_t pixels = (int64_t)args->in[0] * args->in[1],
            made = (int64_t)args->out[0] * args->out[1];
    int64_t most = INT32_MAX / (pixels > made ? pixels : made);
    int64_t from_plane = td_tensor_numel(launch->from) / planes;
    int64_t to_plane = td_tensor_numel(launch->to) / planes;
    size_t size = td_dtype_size(dtype);
    void *indices = launch->indices ? td_tensor_data(launch->indices) : NULL;
    td_status status = TD_OK;
    for (int64_t first = 0; first < planes && !status; first += most) {
        int64_t some = planes - first < most ? planes - first : most;
        args->from = advance(td_tensor_data(launch->from), first * from_plane, size);
        args->to = (void *)advance(td_tensor_data(launch->to), first * to_plane, size);
        args->indices = (void *)advance(indices, first * made, sizeof(int32_t));
        args->count = (int32_t)(some * launch->count);
        struct cuda_grid grid = td__cuda_grid_for(launch->to, args->count * launch->threads, 1);
        status = td__cuda_launch(&launch->kernels[dtype], launch->to, grid, args);
    }
    return status;
}

static int64_t plane_of(const td_tensor *tensor)
{
    return td_tensor_size(tensor, 2) * td_tensor_size(tensor, 3);
}

static bool is_square(const struct pool_args *args, int size)
{
    return !args->adaptive && args->kernel[0] == size && args->kernel[1] == size &&
           args->dilation[0] == 1 && args->dilation[1] == 1;
}

static td_status find_max(td_tensor *out, td_tensor *indices, const td_tensor *x,
                          const td_window *window)
{
    static struct cuda_kernel any[] = BY_DTYPE("pool_max");
    static struct cuda_kernel squares_of_2[] = BY_DTYPE("pool_max_2");
    static struct cuda_kernel squares_of_3[] = BY_DTYPE("pool_max_3");
    struct pool_args args;
    if (!make_args(x, out, window, &args))
        return td__cuda_unsupported();
    struct pool_launch launch = {
        .kernels = is_square(&args, 2)   ? squares_of_2
                   : is_square(&args, 3) ? squares_of_3
                                         : any,
        .from = x,
        .to = out,
        .indices = indices,
        .count = plane_of(out),
        .threads = 1,
    };
    return run(&launch, &args);
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
                                   const td_tensor *indices, const td_window *window)
{
    static struct cuda_kernel single[] = BY_DTYPE("pool_max_grad");
    static struct cuda_kernel groups[] = BY_DTYPE("pool_max_grad_group");
    struct pool_args args;
    if (!make_args(grad_x, grad_y, window, &args))
        return td__cuda_unsupported();
    size_t size = td_dtype_size(td_tensor_dtype(grad_x));
    int group = size == sizeof(double) ? POOL_GROUP_F64 : POOL_GROUP;
    bool grouped = args.in[1] % group == 0 &&
                   (uintptr_t)td_tensor_data(grad_x) % ((size_t)group * size) == 0;
    int64_t row = args.in[1] / (grouped ? group : 1);
    args.by_row = cuda_divisor_of(row < 1 ? 1 : row);
    struct pool_launch launch = {
        .kernels = grouped ? groups : single,
        .from = grad_y,
        .to = grad_x,
        .indices = indices,
        .count = args.in[0] * row,
        .threads = 1,
    };
    return run(&launch, &args);
}

/* The pixels of the largest window. */
static int64_t window_size(const struct pool_args *args)
{
    int64_t size = 1;
    for (int d = 0; d < 2; d++)
        size *= args->adaptive ? (args->out[d] ? args->in[d] / args->out[d] : 0) : args->kernel[d];
    return size;
}

static td_status average(td_tensor *out, const td_tensor *x, const td_window *window)
{
    static struct cuda_kernel threads[] = BY_DTYPE("pool_average");
    static struct cuda_kernel warps[] = BY_DTYPE("pool_average_large");
    struct pool_args args;
    if (!make_args(x, out, window, &args))
        return td__cuda_unsupported();
    bool large = window_size(&args) >= LARGE_WINDOW;
    struct pool_launch launch = {
        .kernels = large ? warps : threads,
        .from = x,
        .to = out,
        .count = plane_of(out),
        .threads = large ? WARP : 1,
    };
    return run(&launch, &args);
}

static td_status average_grad(td_tensor *grad_x, const td_tensor *grad_y, const td_window *window)
{
    static struct cuda_kernel kernels[] = BY_DTYPE("pool_average_grad");
    struct pool_args args;
    if (!make_args(grad_x, grad_y, window, &args))
        return td__cuda_unsupported();
    struct pool_launch launch = {
        .kernels = kernels,
        .from = grad_y,
        .to = grad_x,
        .count = plane_of(grad_x),
        .threads = 1,
    };
    return run(&launch, &args);
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
