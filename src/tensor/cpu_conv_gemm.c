/* Convolutions as matrix products; conv.h defines the columns.
 *
 *     out    [O, pixels] = w   [O, taps]   columns   [taps, pixels]
 *     grad_x             = w^T [taps, O]   grad_y    [O, pixels],     then col2im
 *     grad_w [O, taps]  += grad_y [O, pixels] columns^T [pixels, taps]
 *
 * group by group. Threads share the images. A thread packs the weights once for its images. The columns of
 * grad_x are computed in pieces of some channels and some rows, PIECE elements at most if the kernel allows it.
 * grad_w is summed in PARTS parts of the images, for any number of threads, which are added in order. */
#include "tensor/conv.h"

#include "base/fail.h"
#include "tensor/parallel_for.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum {
    PIECE = 128 * 1024,
    PARTS = 8,
    PART_ELEMENTS = 1024 * 1024, /* of all parts together, at most */
    ENOUGH = 1 << 20,            /* multiplications that pay for a thread */
};

/* What the threads share. */
struct conv_job {
    const struct td__conv *conv;
    td_dtype dtype;
    const void *x, *w, *bias, *grad_y;
    void *result;
    int64_t parts;
    atomic_int failed;
};

/* `count` elements further. */
static void *after(td_dtype dtype, const void *data, int64_t count)
{
    return data ? (char *)data + count * (int64_t)td_dtype_size(dtype) : NULL;
}

/* How many images are worth a thread. */
static int64_t grain_of(const struct td__conv *conv)
{
    double each = (double)conv->groups * (double)conv->out_channels * (double)conv->taps *
                  (double)conv->pixels;
    return each >= ENOUGH ? 1 : each < 1 ? ENOUGH : (int64_t)(ENOUGH / each);
}

static td_status run_job(struct conv_job *job, td__range_fn *fn)
{
    td__parallel_for(job->conv->images, grain_of(job->conv), fn, job);
    return job->failed ? td__fail_nomem("conv2d") : TD_OK;
}

/* Allocates an image with its padding, unless that is too large. */
static td_status alloc_padded(struct td__conv *conv, td_dtype dtype)
{
    if (conv->padded_height > TD__CONV_PADDED_MAX || conv->padded_width > TD__CONV_PADDED_MAX ||
        conv->padded_height * conv->padded_width > TD__CONV_PADDED_MAX ||
        td__conv_padded_size(conv) > TD__CONV_PADDED_MAX)
        return TD_OK;
    size_t count = (size_t)td__conv_padded_size(conv) + TD__CONV_BEYOND;
    conv->padded = calloc(count, td_dtype_size(dtype));
    return conv->padded ? TD_OK : td__fail_nomem("conv2d");
}

/* Moves to the next group: its part of x, and `padded` not filled. */
static void enter_group(struct td__conv *conv, td_dtype dtype, const void *x, int64_t group)
{
    conv->x = after(dtype, x, group * conv->channels * conv->height * conv->width);
    conv->padded_item = -1;
}

/* A 1 x 1 kernel with stride 1: images are the columns. */
static bool is_plain(const struct td__conv *conv)
{
    const td_window *w = &conv->window;
    for (int d = 0; d < 2; d++)
        if (w->kernel[d] != 1 || w->stride[d] != 1 || w->padding[d] != 0)
            return false;
    return true;
}

/* ---- Forward ----------------------------------------------------------------------------------- */

static td_status forward(struct td__conv *conv, const struct conv_job *job, const void *x,
                         void *out)
{
    const td_dtype dtype = job->dtype;
    const bool plain = is_plain(conv);
    td_status status = plain ? TD_OK : alloc_padded(conv, dtype);
    for (int64_t g = 0; g < conv->groups && status == TD_OK; g++) {
        enter_group(conv, dtype, x, g);
        struct td__gemm gemm = {
            .m = conv->out_channels,
            .n = conv->pixels,
            .k = conv->taps,
            .a = after(dtype, job->w, g * conv->out_channels * conv->taps),
            .a_row = conv->taps,
            .a_col = 1,
            .b = plain ? conv->x : conv,
            .b_row = conv->pixels,
            .b_col = 1,
            .b_item = conv->x_image,
            .c = after(dtype, out, g * conv->out_channels * conv->pixels),
            .c_row = conv->pixels,
            .row_bias = after(dtype, job->bias, g * conv->out_channels),
            .batch = conv->images,
            .c_item = conv->out_image,
            .alpha = 1,
        };
        if (!plain)
            gemm.pack_b = dtype == TD_F32 ? td__conv_columns_f32 : td__conv_columns_f64;
        status = td__gemm(dtype, &gemm);
    }
    free(conv->padded);
    return status;
}

static void forward_some(void *arg, int64_t begin, int64_t end)
{
    struct conv_job *job = arg;
    struct td__conv conv = *job->conv;
    conv.images = end - begin;
    if (forward(&conv, job, after(job->dtype, job->x, begin * conv.x_image),
                after(job->dtype, job->result, begin * conv.out_image)))
        job->failed = 1;
}

td_status td__conv_gemm(const struct td__conv *conv, td_dtype dtype, const void *x, const void *w,
                        const void *bias, void *out)
{
    struct conv_job job = {
        .conv = conv, .dtype = dtype, .x = x, .w = w, .bias = bias, .result = out};
    return run_job(&job, forward_some);
}

/* ---- The gradient of the input ---------------------------------------------------------------- */

/* One product of the batch, and the image that its columns are added to. */
struct col2im {
    struct td__gemm gemm;
    struct td__conv conv;
    struct td__conv_piece piece;
    td_dtype dtype;
    void *grad_x; /* the group's channels of the first image */
    void *columns;
};

static void col2im_item(const struct col2im *col2im, int64_t item)
{
    void *x = after(col2im->dtype, col2im->grad_x, item * col2im->conv.x_image);
    if (col2im->dtype == TD_F32)
        td__conv_add_f32(&col2im->conv, &col2im->piece, col2im->gemm.c, x);
    else
        td__conv_add_f64(&col2im->conv, &col2im->piece, col2im->gemm.c, x);
}

static void item_done(const struct td__gemm *gemm, int64_t item)
{
    col2im_item(gemm->done_arg, item);
}

/* All images, for some channels and rows. */
static td_status col2im_piece(struct col2im *col2im)
{
    const struct td__conv *conv = &col2im->conv;
    struct td__gemm gemm = col2im->gemm;
    gemm.done_arg = col2im;
    if (td__gemm_keeps_a(gemm.m, gemm.k)) {
        gemm.batch = conv->images;
        gemm.item_done = item_done;
        return td__gemm(col2im->dtype, &gemm);
    }
    for (int64_t i = 0; i < conv->images; i++) {
        TD_TRY(td__gemm(col2im->dtype, &gemm));
        col2im_item(col2im, i);
        gemm.b = after(col2im->dtype, gemm.b, gemm.b_item);
    }
    return TD_OK;
}

/* All pieces of a group. */
static td_status col2im_group(struct col2im *col2im, const struct td__conv_piece *most,
                              const void *weights, const void *grad_y)
{
    struct td__conv *conv = &col2im->conv;
    const int64_t kernel = conv->window.kernel[0] * conv->window.kernel[1];
    for (int64_t c0 = 0; c0 < conv->channels; c0 += most->channels)
        for (int64_t y0 = 0; y0 < conv->out_height; y0 += most->rows) {
            struct td__conv_piece piece = {.c0 = c0, .y0 = y0};
            piece.channels = conv->channels - c0 < most->channels ? conv->channels - c0
                                                                  : most->channels;
            piece.rows = conv->out_height - y0 < most->rows ? conv->out_height - y0 : most->rows;
            col2im->piece = piece;
            col2im->gemm = (struct td__gemm){
                .m = piece.channels * kernel,
                .n = piece.rows * conv->out_width,
                .k = conv->out_channels,
                .a = after(col2im->dtype, weights, c0 * kernel),
                .a_row = 1,
                .a_col = conv->taps,
                .b = after(col2im->dtype, grad_y, y0 * conv->out_width),
                .b_row = conv->pixels,
                .b_col = 1,
                .b_item = conv->out_image,
                .c = col2im->columns,
                .c_row = piece.rows * conv->out_width,
                .alpha = 1,
            };
            TD_TRY(col2im_piece(col2im));
        }
    return TD_OK;
}

/* How large a piece may be: as many rows as fit with one channel, then as many channels. */
static struct td__conv_piece largest_piece(const struct td__conv *conv)
{
    int64_t kernel = conv->window.kernel[0] * conv->window.kernel[1];
    int64_t row = kernel * conv->out_width;
    struct td__conv_piece piece = {.rows = row > 0 && row < PIECE ? PIECE / row : 1};
    if (piece.rows > conv->out_height)
        piece.rows = conv->out_height;
    int64_t channel = piece.rows * row;
    piece.channels = channel > 0 && channel < PIECE ? PIECE / channel : 1;
    int64_t kept = TD__GEMM_KEPT / (kernel * (conv->out_channels > 0 ? conv->out_channels : 1));
    if (piece.channels > kept && kept > 0)
        piece.channels = kept;
    if (piece.channels > conv->channels)
        piece.channels = conv->channels;
    return piece;
}

static void spread_some(void *arg, int64_t begin, int64_t end)
{
    struct conv_job *job = arg;
    const td_dtype dtype = job->dtype;
    struct col2im col2im = {.conv = *job->conv, .dtype = dtype};
    struct td__conv *conv = &col2im.conv;
    conv->images = end - begin;
    const struct td__conv_piece most = largest_piece(conv);
    const int64_t kernel = conv->window.kernel[0] * conv->window.kernel[1];
    const size_t bytes = (size_t)(most.channels * kernel * most.rows * conv->out_width) *
                         td_dtype_size(dtype);
    col2im.columns = malloc(bytes ? bytes : 1);
    td_status status = col2im.columns ? TD_OK : TD_ERR_NOMEM;
    void *images = after(dtype, job->result, begin * conv->x_image);
    const void *gradients = after(dtype, job->grad_y, begin * conv->out_image);
    memset(images, 0, (size_t)(conv->images * conv->x_image) * td_dtype_size(dtype));
    for (int64_t g = 0; g < conv->groups && status == TD_OK; g++) {
        col2im.grad_x = after(dtype, images, g * conv->channels * conv->height * conv->width);
        status = col2im_group(&col2im, &most,
                              after(dtype, job->w, g * conv->out_channels * conv->taps),
                              after(dtype, gradients, g * conv->out_channels * conv->pixels));
    }
    free(col2im.columns);
    if (status)
        job->failed = 1;
}

td_status td__conv_gemm_grad_input(const struct td__conv *conv, td_dtype dtype, const void *grad_y,
                                   const void *w, void *grad_x)
{
    struct conv_job job = {
        .conv = conv, .dtype = dtype, .w = w, .grad_y = grad_y, .result = grad_x};
    return run_job(&job, spread_some);
}

/* ---- The gradient of the weights --------------------------------------------------------------- */

/* Image by image: grad_w += grad_y columns^T. */
static td_status add_weights(struct td__conv *conv, td_dtype dtype, const void *x,
                             const void *grad_y, void *grad_w)
{
    const bool plain = is_plain(conv);
    td_status status = plain ? TD_OK : alloc_padded(conv, dtype);
    const int64_t images = conv->images;
    for (int64_t i = 0; i < images * conv->groups && status == TD_OK; i++) {
        const int64_t g = i / images, image = i % images;
        enter_group(conv, dtype, x, g);
        conv->x = after(dtype, conv->x, image * conv->x_image);
        conv->images = images - image;
        struct td__gemm gemm = {
            .m = conv->out_channels,
            .n = conv->taps,
            .k = conv->pixels,
            .a = after(dtype, grad_y,
                       image * conv->out_image + g * conv->out_channels * conv->pixels),
            .a_row = conv->pixels,
            .a_col = 1,
            .b = plain ? conv->x : conv,
            .b_row = 1,
            .b_col = conv->pixels,
            .c = after(dtype, grad_w, g * conv->out_channels * conv->taps),
            .c_row = conv->taps,
            .alpha = 1,
            .accumulate = true,
        };
        if (!plain)
            gemm.pack_b = dtype == TD_F32 ? td__conv_rows_f32 : td__conv_rows_f64;
        status = td__gemm(dtype, &gemm);
    }
    free(conv->padded);
    return status;
}

/* Parts of the images, each into weights of its own. */
static void add_parts(void *arg, int64_t begin, int64_t end)
{
    struct conv_job *job = arg;
    const struct td__conv *whole = job->conv;
    const int64_t weights = whole->groups * whole->out_channels * whole->taps;
    for (int64_t i = begin; i < end; i++) {
        struct td__conv conv = *whole;
        const int64_t first = whole->images * i / job->parts;
        conv.images = whole->images * (i + 1) / job->parts - first;
        if (conv.images > 0 &&
            add_weights(&conv, job->dtype, after(job->dtype, job->x, first * conv.x_image),
                        after(job->dtype, job->grad_y, first * conv.out_image),
                        after(job->dtype, job->result, i * weights)))
            job->failed = 1;
    }
}

static void add_all(td_dtype dtype, const void *from, int64_t count, void *to)
{
    for (int64_t i = 0; i < count; i++) {
        if (dtype == TD_F32)
            ((float *)to)[i] += ((const float *)from)[i];
        else
            ((double *)to)[i] += ((const double *)from)[i];
    }
}

td_status td__conv_gemm_grad_weight(const struct td__conv *conv, td_dtype dtype, const void *grad_y,
                                    const void *x, void *grad_w)
{
    const int64_t weights = conv->groups * conv->out_channels * conv->taps;
    struct conv_job job = {
        .conv = conv, .dtype = dtype, .x = x, .grad_y = grad_y, .result = grad_w, .parts = 1};
    if (weights == 0 || conv->images == 0)
        return TD_OK;
    if (PARTS * weights > PART_ELEMENTS || conv->images == 1) {
        add_parts(&job, 0, 1);
        return job.failed ? td__fail_nomem("conv2d") : TD_OK;
    }
    job.parts = PARTS;
    job.result = calloc((size_t)(PARTS * weights), td_dtype_size(dtype));
    if (!job.result)
        return td__fail_nomem("conv2d");
    td__parallel_for(PARTS, (grain_of(conv) * PARTS - 1) / conv->images + 1, add_parts, &job);
    for (int64_t i = 0; i < PARTS; i++)
        add_all(dtype, after(dtype, job.result, i * weights), weights, grad_w);
    free(job.result);
    return job.failed ? td__fail_nomem("conv2d") : TD_OK;
}
