/* Convolutions as matrix products; conv.h has the picture.
 *
 *     out    [O, pixels] = w   [O, taps]   columns   [taps, pixels]
 *     grad_x             = w^T [taps, O]   grad_y    [O, pixels],     added up to a picture
 *     grad_w [O, taps]  += grad_y [O, pixels] columns^T [pixels, taps]
 *
 * group by group. The weights are packed once for all pictures. What grad_x is added up from is made
 * in pieces of some channels and some rows, PIECE elements at most where the kernel allows it. */
#include "base/fail.h"
#include "tensor/conv.h"
#include "tensor/conv_direct.h"
#include "tensor/cpu_products.h"
#include "tensor/widen.h"

#include <stdlib.h>
#include <string.h>

#define PIECE (128 * 1024)

/* `count` elements further. */
static void *after(td_dtype dtype, const void *data, int64_t count)
{
    return data ? (char *)data + count * (int64_t)td_dtype_size(dtype) : NULL;
}

static struct td__conv conv_of(const struct td__layout *x, const struct td__layout *out,
                               const struct td__window *window)
{
    int64_t groups = window->groups > 0 ? window->groups : 1;
    struct td__conv conv = {
        .window = *window,
        .pictures = x->shape[0],
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
    conv.x_picture = groups * conv.channels * conv.height * conv.width;
    conv.out_picture = groups * conv.out_channels * conv.pixels;
    conv.padded_height = conv.height + 2 * window->padding[0];
    conv.padded_width = conv.width + 2 * window->padding[1];
    return conv;
}

/* Room for a picture with its padding, unless that would be too large. */
static td_status make_room(struct td__conv *conv, td_dtype dtype)
{
    if (conv->padded_height > TD__CONV_ROOM || conv->padded_width > TD__CONV_ROOM ||
        conv->padded_height * conv->padded_width > TD__CONV_ROOM ||
        td__conv_room(conv) > TD__CONV_ROOM)
        return TD_OK;
    size_t count = (size_t)td__conv_room(conv) + TD__CONV_BEYOND;
    conv->room = calloc(count, td_dtype_size(dtype));
    return conv->room ? TD_OK : td__fail_nomem("conv2d");
}

/* The next group: its part of x, and a room that is not filled. */
static void enter_group(struct td__conv *conv, td_dtype dtype, const void *x, int64_t group)
{
    conv->x = after(dtype, x, group * conv->channels * conv->height * conv->width);
    conv->held = -1;
}

/* Where a kernel has one place, and moves by one: pictures are columns as they are. */
static bool is_plain(const struct td__conv *conv)
{
    const struct td__window *w = &conv->window;
    for (int d = 0; d < 2; d++)
        if (w->kernel[d] != 1 || w->stride[d] != 1 || w->padding[d] != 0)
            return false;
    return true;
}

/* Elements of a convolution, all of one dtype. */
struct parts {
    td_dtype dtype;
    const void *x, *w, *bias;
    void *out;
};

static td_status forward(struct td__conv *conv, const struct parts *parts)
{
    const td_dtype dtype = parts->dtype;
    if (conv->pictures > 0 && conv->pixels > 0 &&
        td__conv_fits_direct(conv->out_channels, conv->taps))
        return td__conv_direct(conv, dtype, parts->x, parts->w, parts->bias, parts->out);
    const bool plain = is_plain(conv);
    td_status status = plain || conv->pictures == 0 ? TD_OK : make_room(conv, dtype);
    for (int64_t g = 0; g < conv->groups && conv->pictures > 0 && status == TD_OK; g++) {
        enter_group(conv, dtype, parts->x, g);
        struct td__gemm gemm = {
            .m = conv->out_channels,
            .n = conv->pixels,
            .k = conv->taps,
            .a = after(dtype, parts->w, g * conv->out_channels * conv->taps),
            .a_row = conv->taps,
            .a_col = 1,
            .b = plain ? conv->x : conv,
            .b_row = conv->pixels,
            .b_col = 1,
            .b_item = conv->x_picture,
            .c = after(dtype, parts->out, g * conv->out_channels * conv->pixels),
            .c_row = conv->pixels,
            .row_bias = after(dtype, parts->bias, g * conv->out_channels),
            .batch = conv->pictures,
            .c_item = conv->out_picture,
            .alpha = 1,
        };
        if (!plain)
            gemm.pack_b = dtype == TD_F32 ? td__conv_columns_f32 : td__conv_columns_f64;
        status = td__gemm(dtype, &gemm);
    }
    free(conv->room);
    conv->room = NULL;
    return status;
}

td_status td__cpu_conv2d(td_tensor *out, const td_tensor *x, const td_tensor *w,
                         const td_tensor *bias, const struct td__window *window)
{
    struct td__conv conv = conv_of(&x->layout, &out->layout, window);
    struct td__wide wide = {0};
    struct parts parts = {
        .dtype = td__wide_dtype(out),
        .x = td__widen(&wide, x),
        .w = td__widen(&wide, w),
        .bias = td__widen(&wide, bias),
        .out = td__widen_out(&wide, out, false),
    };
    if (wide.status == TD_OK)
        wide.status = forward(&conv, &parts);
    return td__widen_end(&wide);
}

/* ---- The gradient of the input ---------------------------------------------------------------- */

/* One product of the batch, whose columns are added to their picture when it is there. */
struct spread {
    struct td__gemm gemm;
    struct td__conv conv;
    struct td__conv_piece piece;
    td_dtype dtype;
    void *grad_x; /* the group's channels of the first picture */
};

static void spread_item(const struct spread *spread, int64_t item)
{
    void *x = after(spread->dtype, spread->grad_x, item * spread->conv.x_picture);
    if (spread->dtype == TD_F32)
        td__conv_add_f32(&spread->conv, &spread->piece, spread->gemm.c, x);
    else
        td__conv_add_f64(&spread->conv, &spread->piece, spread->gemm.c, x);
}

static void item_done(const struct td__gemm *gemm, int64_t item)
{
    spread_item(gemm->done_arg, item);
}

/* All pictures, for some channels and rows. */
static td_status spread_piece(struct spread *spread)
{
    const struct td__conv *conv = &spread->conv;
    struct td__gemm gemm = spread->gemm;
    gemm.done_arg = spread;
    if (td__gemm_keeps_a(gemm.m, gemm.k)) {
        gemm.batch = conv->pictures;
        gemm.item_done = item_done;
        return td__gemm(spread->dtype, &gemm);
    }
    for (int64_t i = 0; i < conv->pictures; i++) {
        TD_TRY(td__gemm(spread->dtype, &gemm));
        spread_item(spread, i);
        gemm.b = after(spread->dtype, gemm.b, gemm.b_item);
    }
    return TD_OK;
}

/* All pieces of a group. `columns` has memory for one. */
static td_status spread_group(struct spread *spread, const struct td__conv_piece *most,
                              const void *weights, const void *grad_y, void *columns)
{
    struct td__conv *conv = &spread->conv;
    const int64_t kernel = conv->window.kernel[0] * conv->window.kernel[1];
    for (int64_t c0 = 0; c0 < conv->channels; c0 += most->channels)
        for (int64_t y0 = 0; y0 < conv->out_height; y0 += most->rows) {
            struct td__conv_piece piece = {.c0 = c0, .y0 = y0};
            piece.channels = conv->channels - c0 < most->channels ? conv->channels - c0
                                                                  : most->channels;
            piece.rows = conv->out_height - y0 < most->rows ? conv->out_height - y0 : most->rows;
            spread->piece = piece;
            spread->gemm = (struct td__gemm){
                .m = piece.channels * kernel,
                .n = piece.rows * conv->out_width,
                .k = conv->out_channels,
                .a = after(spread->dtype, weights, c0 * kernel),
                .a_row = 1,
                .a_col = conv->taps,
                .b = after(spread->dtype, grad_y, y0 * conv->out_width),
                .b_row = conv->pixels,
                .b_col = 1,
                .b_item = conv->out_picture,
                .c = columns,
                .c_row = piece.rows * conv->out_width,
                .alpha = 1,
            };
            TD_TRY(spread_piece(spread));
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

td_status td__cpu_conv2d_grad_input(td_tensor *grad_x, const td_tensor *grad_y, const td_tensor *w,
                                    const struct td__window *window)
{
    struct spread spread = {.conv = conv_of(&grad_x->layout, &grad_y->layout, window),
                            .dtype = td__wide_dtype(grad_x)};
    struct td__conv *conv = &spread.conv;
    const td_dtype dtype = spread.dtype;
    struct td__wide wide = {0};
    const void *weights = td__widen(&wide, w), *gradients = td__widen(&wide, grad_y);
    void *pictures = td__widen_out(&wide, grad_x, false), *columns = NULL;
    if (wide.status || grad_x->layout.numel == 0)
        goto end;

    if (conv->pixels > 0 &&
        td__conv_fits_direct(conv->channels,
                             conv->out_channels * window->kernel[0] * window->kernel[1])) {
        wide.status = td__conv_direct_grad_input(conv, dtype, gradients, weights, pictures);
        goto end;
    }
    memset(pictures, 0, (size_t)grad_x->layout.numel * td_dtype_size(dtype));
    struct td__conv_piece most = largest_piece(conv);
    size_t bytes = (size_t)(most.channels * window->kernel[0] * window->kernel[1] * most.rows *
                            conv->out_width) *
                   td_dtype_size(dtype);
    columns = malloc(bytes ? bytes : 1);
    if (!columns) {
        wide.status = td__fail(TD_ERR_NOMEM, "conv2d: no memory for %zu bytes to work in", bytes);
        goto end;
    }
    for (int64_t g = 0; g < conv->groups && wide.status == TD_OK; g++) {
        spread.grad_x = after(dtype, pictures, g * conv->channels * conv->height * conv->width);
        wide.status = spread_group(
            &spread, &most, after(dtype, weights, g * conv->out_channels * conv->taps),
            after(dtype, gradients, g * conv->out_channels * conv->pixels), columns);
    }
end:
    free(columns);
    return td__widen_end(&wide);
}

/* ---- The gradients of the weights and the bias ------------------------------------------------ */

static void add_bias_f32(const struct td__conv *conv, const float *grad_y, float *grad_bias)
{
    for (int64_t o = 0; o < conv->groups * conv->out_channels; o++) {
        double sum = 0;
        for (int64_t i = 0; i < conv->pictures; i++) {
            const float *from = grad_y + i * conv->out_picture + o * conv->pixels;
            float part[16] = {0};
            int64_t p = 0;
            for (; p + 16 <= conv->pixels; p += 16)
                for (int j = 0; j < 16; j++)
                    part[j] += from[p + j];
            for (; p < conv->pixels; p++)
                part[p % 16] += from[p];
            for (int j = 0; j < 16; j++)
                sum += part[j];
        }
        grad_bias[o] += (float)sum;
    }
}

static void add_bias_f64(const struct td__conv *conv, const double *grad_y, double *grad_bias)
{
    for (int64_t i = 0; i < conv->pictures; i++)
        for (int64_t o = 0; o < conv->groups * conv->out_channels; o++) {
            const double *from = grad_y + i * conv->out_picture + o * conv->pixels;
            double sum = 0;
            for (int64_t p = 0; p < conv->pixels; p++)
                sum += from[p];
            grad_bias[o] += sum;
        }
}

/* Picture by picture: grad_w += grad_y columns^T. */
static td_status weight_gradient(struct td__conv *conv, td_dtype dtype, const void *x,
                                 const void *grad_y, void *grad_w)
{
    const bool plain = is_plain(conv);
    td_status status = plain || conv->pictures == 0 ? TD_OK : make_room(conv, dtype);
    const int64_t pictures = conv->pictures;
    for (int64_t i = 0; i < pictures * conv->groups && status == TD_OK; i++) {
        const int64_t g = i / pictures, picture = i % pictures;
        enter_group(conv, dtype, x, g);
        conv->x = after(dtype, conv->x, picture * conv->x_picture);
        conv->pictures = pictures - picture;
        struct td__gemm gemm = {
            .m = conv->out_channels,
            .n = conv->taps,
            .k = conv->pixels,
            .a = after(dtype, grad_y,
                       picture * conv->out_picture + g * conv->out_channels * conv->pixels),
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
    free(conv->room);
    return status;
}

td_status td__cpu_conv2d_grad_weight(td_tensor *grad_w, td_tensor *grad_bias,
                                     const td_tensor *grad_y, const td_tensor *x,
                                     const struct td__window *window, bool accumulate)
{
    const td_dtype dtype = td__wide_dtype(grad_w);
    struct td__conv conv = conv_of(&x->layout, &grad_y->layout, window);
    struct td__wide wide = {0};
    const void *pictures = td__widen(&wide, x), *gradients = td__widen(&wide, grad_y);
    void *weights = td__widen_out(&wide, grad_w, accumulate);
    void *biases = td__widen_out(&wide, grad_bias, accumulate);
    if (wide.status)
        return td__widen_end(&wide);

    const size_t size = td_dtype_size(dtype);
    if (!accumulate && grad_w->layout.numel)
        memset(weights, 0, (size_t)grad_w->layout.numel * size);
    if (!accumulate && biases)
        memset(biases, 0, (size_t)grad_bias->layout.numel * size);
    if (biases && dtype == TD_F32)
        add_bias_f32(&conv, gradients, biases);
    else if (biases)
        add_bias_f64(&conv, gradients, biases);

    if (conv.pictures > 0 && conv.pixels > 0 && conv.taps > 0 &&
        td__conv_fits_direct(conv.out_channels, conv.pixels))
        wide.status = td__conv_direct_grad_weight(&conv, dtype, gradients, pictures, weights);
    else
        wide.status = weight_gradient(&conv, dtype, pictures, gradients, weights);
    return td__widen_end(&wide);
}
