/* Convolutions: the sizes, the kernels of kernels.h, and the gradient of the bias.
 *
 * The choice of the algorithm depends on the sizes and, see below, on whether the weights are finite, never on
 * the processor or the number of threads: planes for few channels in a group (cpu_conv_planes.c), plain products
 * for 1 x 1 kernels (cpu_conv_plain.c), products that read the images in place for enough channels
 * (cpu_conv_direct.c), otherwise im2col (cpu_conv_gemm.c).
 *
 * An output pixel adds 0 for the padding under each weight, which is NaN if the weight is infinite. A gradient of
 * the input adds nothing there. im2col does both. Direct products leave out rows of padding, and frames put zeros
 * around a gradient: that makes no difference as long as the weights are finite, so others go to im2col. */
#include "base/fail.h"
#include "tensor/conv.h"
#include "tensor/cpu_kernels.h"
#include "tensor/parallel_for.h"
#include "tensor/vector.h"
#include "tensor/widen.h"

#include <string.h>

static struct td__conv conv_of(const struct td__layout *x, const struct td__layout *out,
                               const td_window *window)
{
    int64_t groups = window->groups > 0 ? window->groups : 1;
    struct td__conv conv = {
        .window = *window,
        .images = x->shape[0],
        .channels = x->shape[1] / groups,
        .height = x->shape[2],
        .width = x->shape[3],
        .out_channels = out->shape[1] / groups,
        .out_height = out->shape[2],
        .out_width = out->shape[3],
        .groups = groups,
    };
    conv.taps = conv.channels * window->kernel[0] * window->kernel[1];
    conv.pixels = conv.out_height * conv.out_width;
    conv.x_image = groups * conv.channels * conv.height * conv.width;
    conv.out_image = groups * conv.out_channels * conv.pixels;
    conv.padded_height = conv.height + 2 * window->padding[0];
    conv.padded_width = conv.width + 2 * window->padding[1];
    return conv;
}

#define ALL_FINITE(T, BITS, EXPONENT)                                                              \
    do {                                                                                           \
        const T *of = numbers;                                                                     \
        BITS others = 0;                                                                           \
        for (int64_t i = 0; i < count; i++) {                                                      \
            BITS bits;                                                                             \
            memcpy(&bits, &of[i], sizeof bits);                                                    \
            others |= (bits & EXPONENT) == EXPONENT;                                               \
        }                                                                                          \
        return !others;                                                                            \
    } while (0)

TD__VECTOR static bool are_finite(td_dtype dtype, const void *numbers, int64_t count)
{
    if (dtype == TD_F32)
        ALL_FINITE(float, uint32_t, UINT32_C(0x7f800000));
    ALL_FINITE(double, uint64_t, UINT64_C(0x7ff0000000000000));
}

td_status td__cpu_conv2d(td_tensor *out, const td_tensor *x, const td_tensor *w,
                         const td_tensor *bias, const td_window *window)
{
    const struct td__conv conv = conv_of(&x->layout, &out->layout, window);
    struct td__wide wide = {0};
    const void *images = td__widen(&wide, x), *weights = td__widen(&wide, w);
    const void *biases = td__widen(&wide, bias);
    void *results = td__widen_out(&wide, out, false);
    if (wide.status || out->layout.numel == 0)
        return td__widen_end(&wide);
    const td_dtype dtype = td__wide_dtype(out);
    const bool direct = td__conv_fits_direct(conv.out_channels, conv.taps) &&
                        are_finite(dtype, weights, w->layout.numel);
    wide.status = (td__conv_fits_planes(&conv)  ? td__conv_planes
                   : td__conv_fits_plain(&conv) ? td__conv_plain
                   : direct                     ? td__conv_direct
                            : td__conv_gemm)(&conv, dtype, images, weights, biases, results);
    return td__widen_end(&wide);
}

td_status td__cpu_conv2d_grad_input(td_tensor *grad_x, const td_tensor *grad_y, const td_tensor *w,
                                    const td_window *window)
{
    const struct td__conv conv = conv_of(&grad_x->layout, &grad_y->layout, window);
    struct td__wide wide = {0};
    const void *weights = td__widen(&wide, w), *gradients = td__widen(&wide, grad_y);
    void *images = td__widen_out(&wide, grad_x, false);
    if (wide.status || grad_x->layout.numel == 0)
        return td__widen_end(&wide);
    const int64_t steps = conv.out_channels * window->kernel[0] * window->kernel[1];
    const td_dtype dtype = td__wide_dtype(grad_x);
    const bool frames = conv.pixels > 0 && are_finite(dtype, weights, w->layout.numel);
    wide.status = (td__conv_fits_plain(&conv) && conv.pixels > 0 ? td__conv_plain_grad_input
                   : !frames                                     ? td__conv_gemm_grad_input
                   : td__conv_fits_planes(&conv)                 ? td__conv_planes_grad_input
                   : td__conv_fits_direct(conv.channels, steps)
                       ? td__conv_direct_grad_input
                       : td__conv_gemm_grad_input)(&conv, dtype, gradients, weights, images);
    return td__widen_end(&wide);
}

/* ---- The gradients of the weights and the bias ------------------------------------------------ */

struct bias_job {
    const struct td__conv *conv;
    const void *grad_y;
    void *grad_bias;
};

/* Channels `begin` to `end` - 1. */
TD__VECTOR static void add_bias_f32(void *arg, int64_t begin, int64_t end)
{
    const struct bias_job *job = arg;
    const int64_t pixels = job->conv->pixels;
    for (int64_t o = begin; o < end; o++) {
        double sum = 0;
        for (int64_t i = 0; i < job->conv->images; i++) {
            const float *from = (const float *)job->grad_y + i * job->conv->out_image + o * pixels;
            float part[32] = {0};
            int64_t p = 0;
            for (; p + 32 <= pixels; p += 32)
                for (int j = 0; j < 32; j++)
                    part[j] += from[p + j];
            for (; p < pixels; p++)
                part[p % 32] += from[p];
            for (int j = 0; j < 16; j++)
                part[j] += part[j + 16];
            for (int j = 0; j < 16; j++)
                sum += part[j];
        }
        ((float *)job->grad_bias)[o] += (float)sum;
    }
}

static void add_bias_f64(void *arg, int64_t begin, int64_t end)
{
    const struct bias_job *job = arg;
    const int64_t pixels = job->conv->pixels;
    for (int64_t o = begin; o < end; o++)
        for (int64_t i = 0; i < job->conv->images; i++) {
            const double *from = (const double *)job->grad_y + i * job->conv->out_image +
                                 o * pixels;
            double sum = 0;
            for (int64_t p = 0; p < pixels; p++)
                sum += from[p];
            ((double *)job->grad_bias)[o] += sum;
        }
}

static void add_bias(const struct td__conv *conv, td_dtype dtype, const void *grad_y,
                     void *grad_bias)
{
    struct bias_job job = {.conv = conv, .grad_y = grad_y, .grad_bias = grad_bias};
    const int64_t each = conv->images * conv->pixels;
    td__parallel_for(conv->groups * conv->out_channels,
                     each < TD__GRAIN ? TD__GRAIN / (each + 1) + 1 : 1,
                     dtype == TD_F32 ? add_bias_f32 : add_bias_f64, &job);
}

/* im2col would have to transpose the columns, except for 1 x 1 kernels: so even half-full vectors of channels
 * are faster. */
static bool weight_fits_direct(const struct td__conv *conv)
{
    return !td__conv_fits_plain(conv) && conv->pixels >= 48 &&
           conv->out_channels * 2 >= (conv->out_channels + 15) / 16 * 16;
}

td_status td__cpu_conv2d_grad_weight(td_tensor *grad_w, td_tensor *grad_bias,
                                     const td_tensor *grad_y, const td_tensor *x,
                                     const td_window *window, bool accumulate)
{
    const td_dtype dtype = td__wide_dtype(grad_w);
    const struct td__conv conv = conv_of(&x->layout, &grad_y->layout, window);
    struct td__wide wide = {0};
    const void *images = td__widen(&wide, x), *gradients = td__widen(&wide, grad_y);
    void *weights = td__widen_out(&wide, grad_w, accumulate);
    void *biases = td__widen_out(&wide, grad_bias, accumulate);
    if (wide.status)
        return td__widen_end(&wide);

    const size_t size = td_dtype_size(dtype);
    if (!accumulate && grad_w->layout.numel)
        memset(weights, 0, (size_t)grad_w->layout.numel * size);
    if (!accumulate && biases)
        memset(biases, 0, (size_t)grad_bias->layout.numel * size);
    if (biases)
        add_bias(&conv, dtype, gradients, biases);
    if (grad_y->layout.numel == 0 || grad_w->layout.numel == 0)
        return td__widen_end(&wide);
    wide.status = (td__conv_fits_planes(&conv) ? td__conv_planes_grad_weight
                   : weight_fits_direct(&conv)
                       ? td__conv_direct_grad_weight
                       : td__conv_gemm_grad_weight)(&conv, dtype, gradients, images, weights);
    return td__widen_end(&wide);
}
