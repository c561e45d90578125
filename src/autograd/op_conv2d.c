/* Convolution: x [N, C, H, W], w [O, C / groups, kh, kw], b [O], y [N, O, H', W'].
 *
 * Backward has a kernel for the gradient of x, and one for those of w and b together, which writes
 * into the leaves' gradients. */
#include "autograd/autocast.h"
#include "autograd/op_kernel.h"
#include "base/fail.h"
#include "base/option_rules.h"

static const char call[] = "td_f_conv2d";

struct conv {
    td_window window;
    struct td__image image;    /* of x */
    int64_t outputs, sizes[2]; /* O, H', W' */
};

static struct td_tensor as_batch(const td_tensor *y, const struct conv *conv)
{
    const int64_t shape[] = {conv->image.shape[0], conv->outputs, conv->sizes[0], conv->sizes[1]};
    return td__view_as(y, shape, 4);
}

/* ---- Backward -------------------------------------------------------------------------------------- */

static td_status grad_of_input(td_node *node, const td_tensor *grad, const struct conv *conv,
                               td_tensor **grad_x)
{
    td_tensor *w = td_node_saved(node, 1);
    TD_TRY(td__done(w));
    struct td__grad_buffer buffer;
    TD_TRY(td__grad_buffer_open(&buffer, node, 0));
    struct td_tensor into = td__view_as(buffer.into, conv->image.shape, 4);
    TD_TRY(td__kernels_of(grad)->conv2d_grad_input(&into, grad, w, &conv->window));
    return td__grad_buffer_close(&buffer, grad_x);
}

/* The kernel accumulates into both gradients or overwrites both. If they differ, the bias's
 * gradient goes to a buffer of its own. */
static td_status grad_of_weight(td_node *node, const td_tensor *grad, const struct conv *conv,
                                td_tensor **grads)
{
    const td_kernels *kernels = td__kernels_of(grad);
    td_tensor *x = td_node_saved(node, 0);
    TD_TRY(td__done(x));
    struct td_tensor images = td__view_as(x, conv->image.shape, 4);
    bool accumulate, accumulate_bias = false;
    td_tensor *grad_w = td__grad_target_or_new(node, 1, &accumulate);
    if (!grad_w)
        return TD_ERR_NOMEM;
    td_tensor *grad_b = NULL, *into = NULL;
    if (td_node_needs(node, 2)) {
        grad_b = td__grad_target_or_new(node, 2, &accumulate_bias);
        into = grad_b;
        if (grad_b && accumulate_bias != accumulate) {
            into = td__adopt(td__empty_like(grad_b));
            if (into)
                TD_TRY(kernels->fill(into, 0));
        }
        if (!into)
            return TD_ERR_NOMEM;
    }
    TD_TRY(kernels->conv2d_grad_weight(grad_w, into, grad, &images, &conv->window, accumulate));
    if (into != grad_b)
        TD_TRY(accumulate_bias ? kernels->binary(TD_BINARY_ADD, grad_b, grad_b, into)
                               : kernels->copy(grad_b, into));
    grads[1] = grad_w;
    grads[2] = grad_b;
    return TD_OK;
}

static td_status grad_of_bias(td_node *node, const td_tensor *grad, td_tensor **grad_bias)
{
    struct td__grad_buffer buffer;
    TD_TRY(td__grad_buffer_open(&buffer, node, 2));
    struct td_tensor sums = td__view_as(buffer.into,
                                        (int64_t[]){1, buffer.into->layout.numel, 1, 1}, 4);
    TD_TRY(td__kernels_of(grad)->reduce(TD_REDUCE_KIND_SUM, &sums, grad, 1u << 0 | 1u << 2 | 1u << 3));
    return td__grad_buffer_close(&buffer, grad_bias);
}

static td_status conv2d_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grads)
{
    const struct conv *conv = td_node_data(node);
    td_tensor *contiguous = td__scoped_contiguous(grad_y[0]);
    if (!contiguous)
        return TD_ERR_NOMEM;
    struct td_tensor grad = as_batch(contiguous, conv);
    if (td_node_needs(node, 0))
        TD_TRY(grad_of_input(node, &grad, conv, &grads[0]));
    if (td_node_needs(node, 1))
        return grad_of_weight(node, &grad, conv, grads);
    return td_node_needs(node, 2) ? grad_of_bias(node, &grad, &grads[2]) : TD_OK;
}

static const td_function conv2d_function = {.name = call, .backward = conv2d_backward};

/* ---- Forward --------------------------------------------------------------------------------------- */

static td_status prepare(const td_tensor *x, const td_tensor *weight, const td_tensor *bias,
                         const td_conv2d_options *options, struct conv *conv)
{
    static const td_conv2d_options defaults;
    options = options ? options : &defaults;
    TD_TRY(td__check_same(call, x, weight));
    TD_TRY(td__image_of(call, x, &conv->image));
    TD_TRY(td__check_dims(call, "weight", weight, 4, 4));
    const int64_t *w = weight->layout.shape;
    int64_t groups = td__or(options->groups, 1), channels = conv->image.shape[1];
    if (groups < 1 || w[0] % groups != 0 || channels % groups != 0 || channels / groups != w[1])
        return td_fail(TD_ERR_INVALID,
                       "%s: x has the shape %s, weight %s with %lld groups; x must have groups "
                       "times %lld channels, and the groups must divide %lld",
                       call, td__shape_of(x), td__shape_of(weight), (long long)groups,
                       (long long)w[1], (long long)w[0]);
    TD_TRY(td__check_optional(call, "bias", bias, x, w, 1));
    conv->outputs = w[0];
    conv->window = (td_window){.groups = groups};
    for (int i = 0; i < 2; i++) {
        conv->window.kernel[i] = w[2 + i];
        conv->window.stride[i] = td__or(options->stride[i], 1);
        conv->window.padding[i] = options->padding[i];
        conv->window.dilation[i] = td__or(options->dilation[i], 1);
    }
    return td__window_sizes(call, &conv->window, &conv->image, conv->sizes);
}

static td_tensor *conv2d(td_tensor *x, td_tensor *weight, td_tensor *bias,
                         const td_conv2d_options *options)
{
    struct conv conv;
    if (prepare(x, weight, bias, options, &conv))
        return NULL;
    td_tensor *in = td__scoped_contiguous(x), *w = td__scoped_contiguous(weight),
              *b = td__scoped_contiguous(bias);
    if (!in || !w || (bias && !b))
        return NULL;
    int64_t shape[4];
    int ndim = td__image_shape(&conv.image, conv.outputs, conv.sizes[0], conv.sizes[1], shape);
    td_tensor *y = td__empty(call, shape, ndim, x->layout.dtype, x->storage->device);
    if (!y)
        return NULL;
    struct td_tensor out = as_batch(y, &conv);
    struct td_tensor images = td__view_as(in, conv.image.shape, 4);
    y = td__kept(y, td__kernels_of(y)->conv2d(&out, &images, w, b, &conv.window));
    return td__result(&conv2d_function, y,
                      &(td_node_spec){.inputs = {x, weight, bias},
                                      .input_count = 3,
                                      .saved = {td__saved_if(td__would_record(weight), in),
                                                td__saved_if(td__would_record(x), w)},
                                      .saved_count = 2,
                                      .data = &conv,
                                      .data_size = sizeof conv});
}

td_tensor *td_f_conv2d(td_tensor *x, td_tensor *weight, td_tensor *bias,
                       const td_conv2d_options *options)
{
    TD__AUTOCAST(TD__CAST_CONV2D, &x, &weight, &bias);
    if (options && td__check_reserved(__func__, options->reserved))
        return NULL;
    td_tensor *y = NULL;
    if (!x || !weight)
        return td__null(__func__);
    {
        TD_SCOPE;
        y = td_scope_return(conv2d(x, weight, bias, options));
    }
    return y;
}
