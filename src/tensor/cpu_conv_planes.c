/* Convolutions with few channels in a group; see conv.h.
 *
 * The channels of a group are copied into a frame with zeros around them. An output plane is then a sum,
 * over kernel positions and channels (taps), of the frame shifted by an offset. With a stride, the frame has
 * every s-th column of a row first, then the columns after those, and so on, so that output pixels still
 * meet adjacent columns.
 *
 * The gradient of the input is the same sum with the weights of swap_weights(), over a frame of the output's
 * gradient whose pixels are `stride` apart. The gradient of a weight is the dot product of two planes, the
 * output's gradient and the shifted frame, summed over the images. */
#include "base/fail.h"
#include "tensor/aligned.h"
#include "tensor/conv.h"
#include "tensor/parallel_for.h"
#include "tensor/vector.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum {
    FEW = 8,                /* channels of a group */
    BEYOND = 64,            /* elements that may be read after a frame */
    PLANE_WORK = 64 * 1024, /* multiplications that pay for a thread */
};

/* What one plane is made of. */
struct plane {
    int64_t height, width;
    int64_t padded_width; /* of the rows of grad_y for the gradient of weights */
    int64_t row;          /* elements of the frame from one row of the plane to the next */
    int64_t taps;
    const int64_t *offsets; /* [taps] in the frame */

    /* A kernel of 3 or 5 rows, whose rows meet rows of the frame that follow each other, is taken column
     * by column; otherwise kernel_height is 0. */
    int kernel_height;
    int64_t columns;         /* of the kernel, in all channels */
    int64_t *column_offsets; /* [columns] of the first row that it meets */
    int64_t *column_weights; /* [columns] where the weight of that is */
    int64_t weight_row;      /* from there to the next row's */
};

/* How the channels of a group are copied into a frame. */
struct plane_frame {
    int64_t channels, height, width; /* of the source */
    int64_t rows, row;               /* of the frame of a channel; elements of a row */
    int64_t top, left;               /* where the first pixel goes */
    int64_t down, right;             /* from one pixel to the next */
    int64_t phases, part;            /* parts of a row, and their elements */
};

#define REAL float
#define INTEGER int32_t
#define LANES 16
#define NAMED(name) name##_f32
#include "tensor/conv_planes_loops.h"

#define REAL double
#define INTEGER int64_t
#define LANES 8
#define NAMED(name) name##_f64
#include "tensor/conv_planes_loops.h"

struct planes_job {
    const struct td__conv *conv;
    td_dtype dtype;
    struct plane plane;
    struct plane_frame frame;
    const void *source, *w, *bias, *grad_y;
    void *result;
    int64_t source_group, result_planes; /* channels of a group */
    atomic_int failed;
};

bool td__conv_fits_planes(const struct td__conv *conv)
{
    return conv->groups > 1 && conv->channels <= FEW && conv->out_channels <= FEW;
}

static void *after(td_dtype dtype, const void *data, int64_t count)
{
    return (char *)data + count * (int64_t)td_dtype_size(dtype);
}

static size_t frame_bytes(const struct planes_job *job)
{
    const struct plane_frame *f = &job->frame;
    return (size_t)(f->channels * f->rows * f->row + BEYOND) * td_dtype_size(job->dtype);
}

static void fill_frame(const struct planes_job *job, const void *source, void *frame)
{
    (job->dtype == TD_F32 ? fill_frame_f32 : fill_frame_f64)(&job->frame, source, frame);
}

/* `count` indices, of `images` images of a group each. */
static td_status run_planes(struct planes_job *job, int64_t count, int64_t images, td__range_fn *fn)
{
    const double each = (double)job->plane.taps * (double)job->plane.width *
                        (double)job->plane.height * (double)job->result_planes * (double)images;
    td__parallel_for(count, each >= PLANE_WORK ? 1 : (int64_t)(PLANE_WORK / (each + 1)) + 1, fn,
                     job);
    return job->failed ? td__fail_nomem("conv2d") : TD_OK;
}

/* Decides whether taps are taken column by column, and fills their two tables, in `columns`. */
static void set_columns(struct planes_job *job, int64_t *columns)
{
    struct plane *plane = &job->plane;
    const td_window *window = &job->conv->window;
    const int64_t height = window->kernel[0], width = window->kernel[1];
    if (height != 3 && height != 5)
        return;
    const int64_t down = plane->offsets[width] - plane->offsets[0];
    if (down != plane->row && down != -plane->row)
        return;
    const int64_t first = down > 0 ? 0 : height - 1;
    plane->kernel_height = (int)height;
    plane->columns = plane->taps / height;
    plane->column_offsets = columns;
    plane->column_weights = columns + plane->columns;
    plane->weight_row = down > 0 ? width : -width;
    for (int64_t t = 0; t < plane->columns; t++) {
        const int64_t tap = (t / width * height + first) * width + t % width;
        plane->column_offsets[t] = plane->offsets[tap];
        plane->column_weights[t] = tap;
    }
}

/* ---- Forward, and the gradient of the input --------------------------------------------------- */

/* All planes of some groups of images. Weights of a plane are [taps]. */
static void make_planes(void *arg, int64_t begin, int64_t end)
{
    struct planes_job *job = arg;
    const struct td__conv *conv = job->conv;
    const struct plane *plane = &job->plane;
    struct td__aligned frame = td__aligned_alloc(frame_bytes(job));
    if (!frame.data) {
        job->failed = 1;
        return;
    }
    memset(frame.data, 0, frame_bytes(job));
    for (int64_t item = begin; item < end; item++) {
        const int64_t group = item % conv->groups;
        fill_frame(job, after(job->dtype, job->source, item * job->source_group), frame.data);
        for (int64_t i = 0; i < job->result_planes; i++) {
            const int64_t channel = group * job->result_planes + i;
            const void *w = after(job->dtype, job->w, channel * plane->taps);
            void *out = after(job->dtype, job->result,
                              (item * job->result_planes + i) * plane->height * plane->width);
            if (job->dtype == TD_F32)
                make_plane_f32(plane, frame.data, w,
                               job->bias ? ((const float *)job->bias)[channel] : 0, out);
            else
                make_plane_f64(plane, frame.data, w,
                               job->bias ? ((const double *)job->bias)[channel] : 0, out);
        }
    }
    td__aligned_free(&frame);
}

/* The frame of the input, for the output and the gradient of the weights. */
static struct planes_job input_job(const struct td__conv *conv, td_dtype dtype, const void *x)
{
    const td_window *window = &conv->window;
    const int64_t stride = window->stride[1];
    const int64_t part = (conv->padded_width + stride - 1) / stride;
    return (struct planes_job){
        .conv = conv,
        .dtype = dtype,
        .plane = {.height = conv->out_height,
                  .width = conv->out_width,
                  .row = window->stride[0] * part * stride,
                  .taps = conv->taps},
        .frame = {.channels = conv->channels,
                  .height = conv->height,
                  .width = conv->width,
                  .rows = conv->padded_height,
                  .row = part * stride,
                  .top = window->padding[0],
                  .left = window->padding[1],
                  .down = 1,
                  .right = 1,
                  .phases = stride,
                  .part = part},
        .source = x,
        .source_group = conv->channels * conv->height * conv->width,
        .result_planes = conv->out_channels,
    };
}

/* Allocates them with the tables of set_columns() after them. */
static int64_t *input_offsets(const struct planes_job *job)
{
    const struct td__conv *conv = job->conv;
    const td_window *window = &conv->window;
    int64_t *offsets = malloc((size_t)(3 * conv->taps) * sizeof *offsets);
    for (int64_t t = 0; t < conv->taps && offsets; t++) {
        const int64_t x = t % window->kernel[1] * window->dilation[1], rest = t / window->kernel[1];
        const int64_t y = rest % window->kernel[0] * window->dilation[0];
        offsets[t] = (rest / window->kernel[0] * job->frame.rows + y) * job->frame.row +
                     x % job->frame.phases * job->frame.part + x / job->frame.phases;
    }
    return offsets;
}

td_status td__conv_planes(const struct td__conv *conv, td_dtype dtype, const void *x, const void *w,
                          const void *bias, void *out)
{
    struct planes_job job = input_job(conv, dtype, x);
    job.w = w;
    job.bias = bias;
    job.result = out;
    int64_t *offsets = input_offsets(&job);
    if (!offsets)
        return td__fail_nomem("conv2d");
    job.plane.offsets = offsets;
    set_columns(&job, offsets + conv->taps);
    td_status status = run_planes(&job, conv->images * conv->groups, 1, make_planes);
    free(offsets);
    return status;
}

/* Weights [groups, C, O, kernel] of w [groups, O, C, kernel]. */
static void swap_weights(const struct td__conv *conv, td_dtype dtype, const void *w, void *to)
{
    const int64_t kernel = conv->window.kernel[0] * conv->window.kernel[1];
    const size_t bytes = (size_t)kernel * td_dtype_size(dtype);
    for (int64_t g = 0; g < conv->groups; g++)
        for (int64_t o = 0; o < conv->out_channels; o++)
            for (int64_t c = 0; c < conv->channels; c++)
                memcpy(
                    after(dtype, to, ((g * conv->channels + c) * conv->out_channels + o) * kernel),
                    after(dtype, w, ((g * conv->out_channels + o) * conv->channels + c) * kernel),
                    bytes);
}

td_status td__conv_planes_grad_input(const struct td__conv *conv, td_dtype dtype,
                                     const void *grad_y, const void *w, void *grad_x)
{
    const td_window *window = &conv->window;
    const int64_t kernel = window->kernel[0] * window->kernel[1];
    const int64_t reach[2] = {(window->kernel[0] - 1) * window->dilation[0],
                              (window->kernel[1] - 1) * window->dilation[1]};
    /* Through kernel position (i, j) pixel (y, x) of the input meets (y + padding - i * dilation …) of the
     * output's pixels, which are `stride` apart. */
    struct planes_job job = {
        .conv = conv,
        .dtype = dtype,
        .plane = {.height = conv->height,
                  .width = conv->width,
                  .row = conv->padded_width + reach[1],
                  .taps = conv->out_channels * kernel},
        .frame = {.channels = conv->out_channels,
                  .height = conv->out_height,
                  .width = conv->out_width,
                  .rows = conv->padded_height + reach[0],
                  .row = conv->padded_width + reach[1],
                  .top = reach[0],
                  .left = reach[1],
                  .down = window->stride[0],
                  .right = window->stride[1],
                  .phases = 1},
        .source = grad_y,
        .source_group = conv->out_channels * conv->pixels,
        .result_planes = conv->channels,
        .result = grad_x,
    };
    int64_t *offsets = malloc((size_t)(3 * job.plane.taps) * sizeof *offsets);
    void *weights = malloc((size_t)(conv->groups * conv->channels * job.plane.taps) *
                           td_dtype_size(dtype));
    td_status status = offsets && weights ? TD_OK : td__fail_nomem("conv2d");
    for (int64_t t = 0; t < job.plane.taps && status == TD_OK; t++) {
        const int64_t x = t % window->kernel[1] * window->dilation[1], rest = t / window->kernel[1];
        const int64_t y = rest % window->kernel[0] * window->dilation[0];
        offsets[t] = (rest / window->kernel[0] * job.frame.rows + window->padding[0] + reach[0] -
                      y) *
                         job.frame.row +
                     window->padding[1] + reach[1] - x;
    }
    if (status == TD_OK) {
        swap_weights(conv, dtype, w, weights);
        job.w = weights;
        job.plane.offsets = offsets;
        set_columns(&job, offsets + job.plane.taps);
        status = run_planes(&job, conv->images * conv->groups, 1, make_planes);
    }
    free(offsets);
    free(weights);
    return status;
}

/* ---- The gradient of the weights -------------------------------------------------------------- */

/* A plane whose rows may be read beyond their end: a copy padded with zeros, if the rows do not fill
 * vectors. */
static const void *padded_plane(const struct planes_job *job, const void *from, void *copy)
{
    if (job->plane.padded_width == job->plane.width)
        return from;
    const size_t size = td_dtype_size(job->dtype), bytes = (size_t)job->plane.width * size;
    for (int64_t y = 0; y < job->plane.height; y++)
        memcpy((char *)copy + (size_t)(y * job->plane.padded_width) * size,
               (const char *)from + (size_t)y * bytes, bytes);
    return copy;
}

/* Some groups, over all images. */
static void dot_planes(void *arg, int64_t begin, int64_t end)
{
    struct planes_job *job = arg;
    const struct td__conv *conv = job->conv;
    const size_t plane_bytes = (size_t)(job->plane.height * job->plane.padded_width) *
                               td_dtype_size(job->dtype);
    struct td__aligned frame = td__aligned_alloc(frame_bytes(job));
    struct td__aligned plane = td__aligned_alloc(plane_bytes);
    const bool ok = frame.data && plane.data;
    if (ok) {
        memset(frame.data, 0, frame_bytes(job));
        memset(plane.data, 0, plane_bytes);
    } else {
        job->failed = 1;
    }
    for (int64_t group = begin; group < end && ok; group++)
        for (int64_t i = 0; i < conv->images; i++) {
            const int64_t item = i * conv->groups + group;
            fill_frame(job, after(job->dtype, job->source, item * job->source_group), frame.data);
            for (int64_t o = 0; o < conv->out_channels; o++) {
                const void *grad_y = padded_plane(
                    job,
                    after(job->dtype, job->grad_y, (item * conv->out_channels + o) * conv->pixels),
                    plane.data);
                (job->dtype == TD_F32 ? dot_plane_f32 : dot_plane_f64)(
                    &job->plane, frame.data, grad_y,
                    after(job->dtype, job->result, (group * conv->out_channels + o) * conv->taps));
            }
        }
    td__aligned_free(&frame);
    td__aligned_free(&plane);
}

td_status td__conv_planes_grad_weight(const struct td__conv *conv, td_dtype dtype,
                                      const void *grad_y, const void *x, void *grad_w)
{
    struct planes_job job = input_job(conv, dtype, x);
    job.plane.padded_width = (conv->out_width + 15) / 16 * 16;
    job.grad_y = grad_y;
    job.result = grad_w;
    int64_t *offsets = input_offsets(&job);
    if (!offsets)
        return td__fail_nomem("conv2d");
    job.plane.offsets = offsets;
    td_status status = run_planes(&job, conv->groups, conv->images, dot_planes);
    free(offsets);
    return status;
}
