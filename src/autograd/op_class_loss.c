/* Classification losses: nll_loss of log-probabilities, and cross_entropy of logits, which is
 * nll_loss of their log_softmax in one kernel. The logits are saved as they are, with two numbers of
 * each target, from which one kernel computes the gradient: no log_softmax is in memory.
 *
 *     x [N, C, …] as [N, C, S], target [N, …] as [N, S], losses [N, S]
 *     mean: the sum of the losses, divided by the sum of the weights of their classes
 *
 * Label smoothing by e is (1 - e) nll + e / C times the sum over all classes; it is composed of
 * other operators. */
#include "autograd/autocast.h"
#include "autograd/op_kernel.h"
#include "base/fail.h"
#include "base/option_rules.h"

#include <string.h>

enum { ALWAYS_IGNORED = -100 };

/* A call; its tensors belong to the scope. */
struct class_loss {
    const char *call;
    int64_t shape[3]; /* [N, C, S] */
    td_dtype dtype;   /* of the result: that of x, or f32 */
    td_tensor *target, *weight;
    int64_t ignore_index;
    td_reduction reduction;
};

/* For backward. */
struct loss_data {
    int64_t shape[3];
    int64_t ignore_index;
    bool has_weight, has_factor;
};

/* ---- Backward -------------------------------------------------------------------------------------- */

/* saved: target, weight, the factor of the mean, and for cross_entropy the logits and their statistics. */
static td_status class_backward(td_node *node, td_tensor *grad_y, bool of_logits,
                                td_tensor **grad_x)
{
    const struct loss_data *data = td_node_data(node);
    td_tensor *target = td_node_saved(node, 0);
    TD_TRY(td__done(target));
    td_tensor *weight = data->has_weight ? td_node_saved(node, 1) : NULL;
    if (data->has_weight)
        TD_TRY(td__done(weight));
    td_tensor *factor = data->has_factor ? td_node_saved(node, 2) : NULL;
    if (data->has_factor)
        TD_TRY(td__done(factor));
    td_tensor *logits = of_logits ? td_node_saved(node, 3) : NULL;
    td_tensor *statistics = of_logits ? td_node_saved(node, 4) : NULL;
    if (of_logits) {
        TD_TRY(td__done(logits));
        TD_TRY(td__done(statistics));
    }
    struct td__grad_buffer buffer;
    TD_TRY(td__grad_buffer_open(&buffer, node, 0));
    td_tensor *grad = td__scoped_contiguous(grad_y);
    if (!grad)
        return TD_ERR_NOMEM;
    const td_kernels *kernels = td__kernels_of(grad);
    struct td_tensor into = td__view_as(buffer.into, data->shape, 3);
    if (of_logits) {
        struct td_tensor x = td__view_as(logits, data->shape, 3);
        TD_TRY(kernels->cross_entropy_grad(&into, grad, factor, &x, statistics, target, weight,
                                           data->ignore_index));
    } else {
        TD_TRY(kernels->nll_loss_grad(&into, grad, factor, target, weight, data->ignore_index));
    }
    return td__grad_buffer_close(&buffer, grad_x);
}

static td_status nll_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
{
    return class_backward(node, grad_y[0], false, grad_x);
}

static td_status cross_entropy_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
{
    return class_backward(node, grad_y[0], true, grad_x);
}

static const td_function nll_function = {.name = "td_nll_loss", .backward = nll_backward};
static const td_function cross_entropy_function = {.name = "td_cross_entropy",
                                                   .backward = cross_entropy_backward};

/* ---- Checks ----------------------------------------------------------------------------------------- */

/* The target has the shape of x without the dimension of the classes. */
static td_status find_shape(struct class_loss *loss, const td_tensor *x, const td_tensor *target)
{
    const struct td__layout *of_x = &x->layout, *of_target = &target->layout;
    int class_dim = of_x->ndim == 1 ? 0 : 1;
    bool fits = of_x->ndim > 0 && of_target->ndim == of_x->ndim - 1;
    for (int d = 0; fits && d < of_target->ndim; d++)
        fits = of_target->shape[d] == of_x->shape[d + (d >= class_dim)];
    if (!fits)
        return td_fail(TD_ERR_INVALID,
                       "%s: x has the shape %s, target %s; a target has the sizes of x without "
                       "the classes, which are the %s dimension",
                       loss->call, td__shape_of(x), td__shape_of(target),
                       class_dim ? "second" : "only");
    if (of_target->dtype != TD_I64)
        return td_fail(TD_ERR_INVALID, "%s: the target is %s, and x %s; classes are i64",
                       loss->call, td_dtype_name(of_target->dtype), td_dtype_name(of_x->dtype));
    if (target->storage->device != x->storage->device)
        return td_fail(TD_ERR_INVALID, "%s: x is on %s, the target on %s", loss->call,
                       x->storage->device->name, target->storage->device->name);
    loss->shape[0] = class_dim ? of_x->shape[0] : 1;
    loss->shape[1] = of_x->shape[class_dim];
    loss->shape[2] = 1;
    for (int d = class_dim + 1; d < of_x->ndim; d++)
        loss->shape[2] *= of_x->shape[d];
    return TD_OK;
}

/* -100 is always ignored, also beside another ignore_index, but the kernel takes one: maps -100 to
 * that. */
static td_tensor *merge_ignored(td_tensor *target, int64_t ignore_index)
{
    if (ignore_index == ALWAYS_IGNORED)
        return target;
    return td_masked_fill(target, td_eq_scalar(target, ALWAYS_IGNORED), (double)ignore_index);
}

/* The weight has the dtype of the result. */
static td_status prepare(struct class_loss *loss, const char *call, td_tensor *x, td_tensor *target,
                         const td_loss_options *options, td_dtype dtype)
{
    static const td_loss_options defaults;
    options = options ? options : &defaults;
    loss->call = call;
    loss->reduction = options->reduction;
    loss->ignore_index = options->ignore ? options->ignore_index : ALWAYS_IGNORED;
    TD_TRY(td__check_float(call, x));
    TD_TRY(find_shape(loss, x, target));
    loss->dtype = dtype;
    /* Not a copy of *x: that would read its count of owners while other threads change it. */
    struct td_tensor like = {.owners = 1, .storage = x->storage, .layout.dtype = dtype};
    TD_TRY(td__check_optional(call, "weight", options->weight, &like, &loss->shape[1], 1));
    if ((unsigned)options->reduction > TD_REDUCE_NONE)
        return td_fail(TD_ERR_INVALID, "%s: %d is not a reduction (see td_reduction)", call,
                       (int)options->reduction);
    loss->weight = td__scoped_contiguous(options->weight);
    if (options->weight && !loss->weight)
        return TD_ERR_NOMEM;
    loss->target = td__scoped_contiguous(target);
    loss->target = loss->target ? merge_ignored(loss->target, loss->ignore_index) : NULL;
    return loss->target ? TD_OK : TD_ERR_NOMEM;
}

/* ---- Forward --------------------------------------------------------------------------------------- */

/* The losses of x, raw: log-probabilities, or with `statistics` logits. *factor, in the scope, is that of their sum in the
 * mean, or NULL. */
static td_tensor *losses_of(const struct class_loss *loss, const td_tensor *x,
                            td_tensor *statistics, td_tensor **factor)
{
    td_device *device = x->storage->device;
    bool mean = loss->reduction == TD_REDUCE_MEAN;
    *factor = mean ? td__adopt(td__empty(loss->call, NULL, 0, TD_F64, device)) : NULL;
    td_tensor *y = td__empty_like_as(loss->target, loss->dtype);
    if (!y || (mean && !*factor))
        return td__kept(y, TD_ERR_NOMEM);
    struct td_tensor in = td__view_as(x, loss->shape, 3);
    const td_kernels *kernels = td__kernels_of(y);
    td_status status = statistics
                           ? kernels->cross_entropy(y, statistics, *factor, &in, loss->target,
                                                    loss->weight, loss->ignore_index)
                           : kernels->nll_loss(y, *factor, &in, loss->target, loss->weight,
                                               loss->ignore_index);
    return td__kept(y, td__kernel_status(loss->call, x, status));
}

/* The sum of the losses times factor, raw. Releases `losses`. */
static td_tensor *sum_of(td_tensor *losses, const td_tensor *factor)
{
    td_tensor *sum = td__empty("td_nll_loss", NULL, 0, losses->layout.dtype,
                               losses->storage->device);
    if (sum) {
        const td_kernels *kernels = td__kernels_of(losses);
        int64_t count = losses->layout.numel;
        struct td_tensor row = td__view_as(losses, &count, 1);
        struct td_tensor out = td__view_as(sum, (int64_t[]){1}, 1);
        sum = td__kept(sum, kernels->reduce(TD_REDUCE_KIND_SUM, &out, &row, 1));
        if (sum && factor)
            sum = td__kept(sum, kernels->scale(&sum, 1, factor));
    }
    td_tensor_release(losses);
    return sum;
}

/* The recorded result, from the elements of x: x itself, or a contiguous copy. */
static td_tensor *class_loss(const td_function *function, const struct class_loss *loss,
                             td_tensor *x, td_tensor *values, td_tensor *statistics)
{
    td_tensor *factor, *y = losses_of(loss, values, statistics, &factor);
    struct loss_data data = {.ignore_index = loss->ignore_index,
                             .has_weight = loss->weight != NULL,
                             .has_factor = factor != NULL};
    memcpy(data.shape, loss->shape, sizeof data.shape);
    if (y && loss->reduction != TD_REDUCE_NONE)
        y = sum_of(y, factor);
    return td__result(
        function, y,
        &(td_node_spec){.inputs = {x},
                        .input_count = 1,
                        .saved = {loss->target, loss->weight, factor, values, statistics},
                        .saved_count = statistics ? 5 : 3,
                        .data = &data,
                        .data_size = sizeof data});
}

static td_tensor *nll_loss(td_tensor *x, td_tensor *target, const td_loss_options *options)
{
    struct class_loss loss;
    if (prepare(&loss, "td_nll_loss", x, target, options, x->layout.dtype))
        return NULL;
    if (options && options->label_smoothing != 0) {
        td_fail(TD_ERR_INVALID, "td_nll_loss: label_smoothing is an option of "
                                "td_cross_entropy_with() only");
        return NULL;
    }
    td_tensor *logs = td__scoped_contiguous(x);
    return logs ? class_loss(&nll_function, &loss, x, logs, NULL) : NULL;
}

/* The sum over the classes of -weight x, and 0 for ignored targets: [N, …]. */
static td_tensor *smooth_losses(const struct class_loss *loss, td_tensor *logs)
{
    td_tensor *x = td_reshape(logs, loss->shape, 3);
    if (loss->weight)
        x = td_mul(x, td_reshape(loss->weight, (int64_t[]){1, loss->shape[1], 1}, 3));
    td_tensor *sums = td_neg(td_sum_dims(x, (int[]){1}, 1, false));
    td_tensor *in_shape = sums ? td_reshape(sums, loss->target->layout.shape,
                                            loss->target->layout.ndim)
                               : NULL;
    td_tensor *ignored = td_eq_scalar(loss->target, (double)loss->ignore_index);
    return td_masked_fill(in_shape, ignored, 0);
}

static td_tensor *smoothed(const struct class_loss *loss, td_tensor *x, double smoothing)
{
    td_tensor *wide = td_to_dtype(x, loss->dtype), *factor = NULL;
    td_tensor *logs = wide ? td_f_log_softmax(wide, x->layout.ndim == 1 ? 0 : 1) : NULL;
    td_tensor *values = logs ? td__scoped_contiguous(logs) : NULL;
    td_tensor *measured = values ? td__adopt(losses_of(loss, values, NULL, &factor)) : NULL;
    if (!measured)
        return NULL;
    struct class_loss each = *loss;
    each.reduction = TD_REDUCE_NONE;
    td_tensor *sharp = class_loss(&nll_function, &each, logs, values, NULL);
    td_tensor *smooth = smooth_losses(loss, logs);
    td_tensor *both = td_add_scaled(td_mul_scalar(sharp, 1 - smoothing), smooth,
                                    smoothing / (double)loss->shape[1]);
    if (loss->reduction == TD_REDUCE_NONE)
        return both;
    td_tensor *sum = td_sum(both);
    return factor ? td_mul(sum, td_to_dtype(factor, loss->dtype)) : sum;
}

/* The statistics of the kernel: two numbers a target, in the dtype of the computation. */
static td_tensor *new_statistics(const struct class_loss *loss, const td_tensor *x)
{
    int64_t shape[3] = {loss->shape[0], loss->shape[2], 2};
    td_dtype dtype = x->layout.dtype == TD_F64 ? TD_F64 : TD_F32;
    return td__adopt(td__empty(loss->call, shape, 3, dtype, x->storage->device));
}

static td_tensor *cross_entropy(td_tensor *x, td_tensor *target, const td_loss_options *options,
                                td_dtype dtype)
{
    static const char call[] = "td_cross_entropy";
    struct class_loss loss;
    if (prepare(&loss, call, x, target, options, dtype))
        return NULL;
    double smoothing = options ? options->label_smoothing : 0;
    if (!(smoothing >= 0 && smoothing <= 1)) {
        td_fail(TD_ERR_INVALID, "%s: label_smoothing is %g; it must be 0 to 1", call, smoothing);
        return NULL;
    }
    if (smoothing > 0)
        return smoothed(&loss, x, smoothing);
    td_tensor *values = td__scoped_contiguous(x);
    td_tensor *statistics = values ? new_statistics(&loss, x) : NULL;
    return statistics ? class_loss(&cross_entropy_function, &loss, x, values, statistics) : NULL;
}

td_tensor *td_nll_loss_with(td_tensor *x, td_tensor *target, const td_loss_options *options)
{
    if (options && td__check_reserved(__func__, options->reserved))
        return NULL;
    td_loss_options given = options ? *options : (td_loss_options){0};
    TD__AUTOCAST(TD__CAST_NLL_LOSS, &x, &given.weight);
    td_tensor *y = NULL;
    if (!x || !target)
        return td__null(__func__);
    {
        TD_SCOPE;
        y = td_scope_return(nll_loss(x, target, &given));
    }
    return y;
}

td_tensor *td_nll_loss(td_tensor *x, td_tensor *target)
{
    return td_nll_loss_with(x, target, NULL);
}

td_tensor *td_cross_entropy_with(td_tensor *x, td_tensor *target, const td_loss_options *options)
{
    if (options && td__check_reserved(__func__, options->reserved))
        return NULL;
    td_loss_options given = options ? *options : (td_loss_options){0};
    TD__AUTOCAST(TD__CAST_CROSS_ENTROPY, &x, &given.weight);
    td_tensor *y = NULL;
    if (!x || !target)
        return td__null(__func__);
    bool half = x->layout.dtype == TD_F16 || x->layout.dtype == TD_BF16;
    td_dtype dtype = half && td__frame.entered ? TD_F32 : x->layout.dtype;
    {
        TD_SCOPE;
        y = td_scope_return(cross_entropy(x, target, &given, dtype));
    }
    return y;
}

td_tensor *td_cross_entropy(td_tensor *x, td_tensor *target)
{
    return td_cross_entropy_with(x, target, NULL);
}
