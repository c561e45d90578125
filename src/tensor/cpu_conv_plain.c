/* Convolutions with a 1 x 1 kernel; see conv.h.
 *
 *     out    [O, pixels] = w   [O, C]  x      [C, pixels]
 *     grad_x [C, pixels] = w^T [C, O]  grad_y [O, pixels]     group by group, image by image
 *
 * Threads share the images, and pack the weights once for several; with fewer images than threads, they
 * share the product of each. */
#include "base/fail.h"
#include "tensor/conv.h"
#include "tensor/parallel_for.h"

#include <stdatomic.h>

enum { ENOUGH = 1 << 18 }; /* multiplications that pay for a thread */

/* What the threads share. */
struct plain_job {
    const struct td__conv *conv;
    td_dtype dtype;
    struct td__gemm gemm; /* of the first group of the first image */
    int64_t a_group;      /* elements from the weights of a group to those of the next */
    atomic_int failed;
};

bool td__conv_fits_plain(const struct td__conv *conv)
{
    const td_window *w = &conv->window;
    for (int d = 0; d < 2; d++)
        if (w->kernel[d] != 1 || w->stride[d] != 1 || w->padding[d] != 0)
            return false;
    return conv->pixels * 4 >= (conv->pixels + 15) / 16 * 16 * 3;
}

static void *after(td_dtype dtype, const void *data, int64_t count)
{
    return data ? (char *)data + count * (int64_t)td_dtype_size(dtype) : NULL;
}

/* Images `begin` to `end` - 1. */
static void multiply_some(void *arg, int64_t begin, int64_t end)
{
    struct plain_job *job = arg;
    const td_dtype dtype = job->dtype;
    for (int64_t g = 0; g < job->conv->groups; g++) {
        struct td__gemm gemm = job->gemm;
        gemm.batch = end - begin;
        gemm.a = after(dtype, gemm.a, g * job->a_group);
        gemm.b = after(dtype, gemm.b, begin * gemm.b_item + g * gemm.k * gemm.n);
        gemm.c = after(dtype, gemm.c, begin * gemm.c_item + g * gemm.m * gemm.n);
        gemm.row_bias = after(dtype, gemm.row_bias, g * gemm.m);
        if (td__gemm(dtype, &gemm))
            job->failed = 1;
    }
}

static td_status run_job(struct plain_job *job)
{
    const struct td__conv *conv = job->conv;
    const double each = (double)conv->groups * (double)job->gemm.m * (double)job->gemm.n *
                        (double)job->gemm.k;
    const int64_t images = conv->images;
    if (images < td_get_num_threads())
        for (int64_t i = 0; i < images; i++)
            multiply_some(job, i, i + 1);
    else
        td__parallel_for(images, each >= ENOUGH ? 1 : (int64_t)(ENOUGH / (each + 1)) + 1,
                         multiply_some, job);
    return job->failed ? td__fail_nomem("conv2d") : TD_OK;
}

td_status td__conv_plain(const struct td__conv *conv, td_dtype dtype, const void *x, const void *w,
                         const void *bias, void *out)
{
    struct plain_job job = {
        .conv = conv,
        .dtype = dtype,
        .gemm = {.m = conv->out_channels,
                 .n = conv->pixels,
                 .k = conv->channels,
                 .a = w,
                 .a_row = conv->channels,
                 .a_col = 1,
                 .b = x,
                 .b_row = conv->pixels,
                 .b_col = 1,
                 .b_item = conv->x_image,
                 .c = out,
                 .c_row = conv->pixels,
                 .c_item = conv->out_image,
                 .row_bias = bias,
                 .alpha = 1},
        .a_group = conv->out_channels * conv->channels,
    };
    return run_job(&job);
}

td_status td__conv_plain_grad_input(const struct td__conv *conv, td_dtype dtype, const void *grad_y,
                                    const void *w, void *grad_x)
{
    struct plain_job job = {
        .conv = conv,
        .dtype = dtype,
        .gemm = {.m = conv->channels,
                 .n = conv->pixels,
                 .k = conv->out_channels,
                 .a = w,
                 .a_row = 1,
                 .a_col = conv->channels,
                 .b = grad_y,
                 .b_row = conv->pixels,
                 .b_col = 1,
                 .b_item = conv->out_image,
                 .c = grad_x,
                 .c_row = conv->pixels,
                 .c_item = conv->x_image,
                 .alpha = 1},
        .a_group = conv->out_channels * conv->channels,
    };
    return run_job(&job);
}
