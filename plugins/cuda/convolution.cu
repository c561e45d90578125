/* Kernels: convolutions of any shape, one result a thread, or a block for the gradient of a weight. cuDNN computes those
 * that it is there for. */
#include "cuda/channels.h"
#include "cuda/convolution_args.h"

/* Sums in blocks of this many terms, so that rounding does not grow with the number of terms. */
enum { CHUNK = 64 };

template <typename C> struct sum_of {
    C total = 0, part = 0;
    int terms = 0;
    __device__ void add(C x)
    {
        part += x;
        if (++terms == CHUNK) {
            total += part;
            part = 0;
            terms = 0;
        }
    }
    __device__ C value(void) const
    {
        return total + part;
    }
};

template <typename T> __device__ void forward(const convolution_args &args)
{
    typedef typename compute<T>::type C;
    int64_t pixels = args.out[0] * args.out[1], count = args.images * args.filters * pixels;
    int64_t depth = args.channels / args.groups, each = args.filters / args.groups;
    for (int64_t i = first_element(); i < count; i += element_step()) {
        int64_t pixel = i % pixels, filter = i / pixels % args.filters, image = i / pixels / args.filters;
        int64_t y = pixel / args.out[1] * args.stride[0] - args.padding[0];
        int64_t x = pixel % args.out[1] * args.stride[1] - args.padding[1];
        const T *w = (const T *)args.w + filter * depth * args.kernel[0] * args.kernel[1];
        const T *in = (const T *)args.x +
                      (image * args.channels + filter / each * depth) * args.in[0] * args.in[1];
        sum_of<C> sum;
        for (int64_t c = 0; c < depth; c++, in += args.in[0] * args.in[1])
            for (int64_t ky = 0; ky < args.kernel[0]; ky++)
                for (int64_t kx = 0; kx < args.kernel[1]; kx++, w++) {
                    int64_t row = y + ky * args.dilation[0], column = x + kx * args.dilation[1];
                    if (row >= 0 && row < args.in[0] && column >= 0 && column < args.in[1])
                        sum.add(load(in[row * args.in[1] + column]) * load(*w));
                }
        C value = sum.value();
        if (args.bias)
            value += load(((const T *)args.bias)[filter]);
        ((T *)args.to)[i] = store<T>(value);
    }
}

template <typename T> __device__ void grad_input(const convolution_args &args)
{
    typedef typename compute<T>::type C;
    int64_t pixels = args.in[0] * args.in[1], outputs = args.out[0] * args.out[1];
    int64_t depth = args.channels / args.groups, each = args.filters / args.groups;
    int64_t size = args.kernel[0] * args.kernel[1], count = args.images * args.channels * pixels;
    for (int64_t i = first_element(); i < count; i += element_step()) {
        int64_t pixel = i % pixels, channel = i / pixels % args.channels, image = i / pixels / args.channels;
        int64_t first = channel / depth * each;
        const T *grad_y = (const T *)args.y + (image * args.filters + first) * outputs;
        const T *w = (const T *)args.w + (first * depth + channel % depth) * size;
        sum_of<C> sum;
        for (int64_t f = 0; f < each; f++, grad_y += outputs, w += depth * size)
            for (int64_t ky = 0; ky < args.kernel[0]; ky++) {
                int64_t y = pixel / args.in[1] + args.padding[0] - ky * args.dilation[0];
                if (y < 0 || y % args.stride[0] || y / args.stride[0] >= args.out[0])
                    continue;
                for (int64_t kx = 0; kx < args.kernel[1]; kx++) {
                    int64_t x = pixel % args.in[1] + args.padding[1] - kx * args.dilation[1];
                    if (x >= 0 && x % args.stride[1] == 0 && x / args.stride[1] < args.out[1])
                        sum.add(load(grad_y[y / args.stride[0] * args.out[1] + x / args.stride[1]]) *
                                load(w[ky * args.kernel[1] + kx]));
                }
            }
        ((T *)args.to)[i] = store<T>(sum.value());
    }
}

/* A block for each weight; its threads share the images and pixels. */
template <typename T> __device__ void grad_weight(const convolution_args &args)
{
    typedef typename compute<T>::type C;
    int64_t depth = args.channels / args.groups, each = args.filters / args.groups;
    int64_t size = args.kernel[0] * args.kernel[1], outputs = args.out[0] * args.out[1];
    for (int64_t i = blockIdx.x; i < args.filters * depth * size; i += gridDim.x) {
        int64_t kx = i % args.kernel[1], ky = i / args.kernel[1] % args.kernel[0];
        int64_t c = i / size % depth, filter = i / size / depth;
        int64_t channel = filter / each * depth + c;
        sum_of<C> sum;
        for (int64_t k = threadIdx.x; k < args.images * outputs; k += blockDim.x) {
            int64_t image = k / outputs, pixel = k % outputs;
            int64_t y = pixel / args.out[1] * args.stride[0] - args.padding[0] + ky * args.dilation[0];
            int64_t x = pixel % args.out[1] * args.stride[1] - args.padding[1] + kx * args.dilation[1];
            if (y < 0 || y >= args.in[0] || x < 0 || x >= args.in[1])
                continue;
            const T *in = (const T *)args.x + (image * args.channels + channel) * args.in[0] * args.in[1];
            sum.add(load(in[y * args.in[1] + x]) *
                    load(((const T *)args.y)[(image * args.filters + filter) * outputs + pixel]));
        }
        C value = reduce_block(sum.value(), C(0), plus_op());
        T *to = (T *)args.to + i;
        if (!threadIdx.x)
            *to = store<T>(args.accumulate ? value + load(*to) : value);
    }
}

/* Adds the bias to what cuDNN has computed. A block has a chunk of a filter's pixels. */
template <typename T, int N> __device__ void add_bias(const convolution_args &args, int64_t job)
{
    typedef typename compute<T>::type C;
    int64_t filter = job / args.space.chunks, chunk = job % args.space.chunks;
    C bias = load(((const T *)args.bias)[filter]);
    for_chunk(args.space, filter, chunk, [&](const int64_t(&at)[CHANNEL_LOADS], int loads) {
        T y[CHANNEL_LOADS][N];
#pragma unroll
        for (int k = 0; k < CHANNEL_LOADS; k++)
            if (k < loads)
                read_group(y[k], args.to, at[k], false);
#pragma unroll
        for (int k = 0; k < CHANNEL_LOADS; k++)
            if (k < loads) {
                for (int e = 0; e < N; e++)
                    y[k][e] = store<T>(load(y[k][e]) + bias);
                write_group(args.to, at[k], y[k]);
            }
    });
}

/* The gradient of a bias: the sum of the gradients of its filter's pixels, by a block. */
template <typename T, int N> __device__ void grad_bias(const convolution_args &args, int64_t filter)
{
    typedef typename compute<T>::type C;
    sum_of<C> sum;
    for_chunk(args.space, filter, 0, [&](const int64_t(&at)[CHANNEL_LOADS], int loads) {
        T grad[CHANNEL_LOADS][N];
#pragma unroll
        for (int k = 0; k < CHANNEL_LOADS; k++)
            if (k < loads)
                read_group(grad[k], args.y, at[k], false);
#pragma unroll
        for (int k = 0; k < CHANNEL_LOADS; k++)
            for (int e = 0; e < N && k < loads; e++)
                sum.add(load(grad[k][e]));
    });
    C value = reduce_block(sum.value(), C(0), plus_op());
    T *to = (T *)args.to + filter;
    if (!threadIdx.x)
        *to = store<T>(args.accumulate ? value + load(*to) : value);
}

#define CONVOLUTION_KERNELS(name, T)                                                               \
    TD_KERNEL(convolve_##name, struct convolution_args)                                            \
    {                                                                                              \
        forward<T>(args);                                                                          \
    }                                                                                              \
    TD_KERNEL(convolve_grad_input_##name, struct convolution_args)                                 \
    {                                                                                              \
        grad_input<T>(args);                                                                       \
    }                                                                                              \
    TD_KERNEL_SYNC(convolve_grad_weight_##name, struct convolution_args)                           \
    {                                                                                              \
        grad_weight<T>(args);                                                                      \
    }                                                                                              \
    TD_KERNEL(convolve_add_bias_##name, struct convolution_args)                                   \
    {                                                                                              \
        with_width<16 / sizeof(T)>(args.space, [&](auto n) {                                       \
            for (int64_t job = blockIdx.x; job < args.filters * args.space.chunks; job += gridDim.x) \
                add_bias<T, n.value>(args, job);                                                   \
        });                                                                                        \
    }                                                                                              \
    TD_KERNEL_SYNC(convolve_grad_bias_##name, struct convolution_args)                             \
    {                                                                                              \
        with_width<16 / sizeof(T)>(args.space, [&](auto n) {                                       \
            for (int64_t filter = blockIdx.x; filter < args.filters; filter += gridDim.x)          \
                grad_bias<T, n.value>(args, filter);                                               \
        });                                                                                        \
    }

CONVOLUTION_KERNELS(f32, float)
CONVOLUTION_KERNELS(f64, double)
CONVOLUTION_KERNELS(f16, f16)
CONVOLUTION_KERNELS(bf16, bf16)
