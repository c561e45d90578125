/* Elementwise losses: mse, l1, and binary cross entropy of logits. The kernel reduces while it
 * computes; the losses of single elements are not stored. */
#include "autograd/autocast.h"
#include "autograd/op_kernel.h"
#include "base/fail.h"
#include "base/option_rules.h"

struct loss_data {
    td_pair_loss loss;
    double scale;
};

/* The gradient of the target: for mse and l1 the negative of that of x, for the cross entropy -x.
 * `grad` has the shape of x, or one element. */
static td_status grad_of_target(const struct loss_data *data, td_tensor *into, td_tensor *grad,
                                td_tensor *x, td_tensor *target)
{
    const td_kernels *kernels = td__kernels_of(x);
    if (data->loss != TD_PAIR_LOSS_BCE_LOGITS)
        return kernels->pair_loss_grad(data->loss, into, grad, x, target, -data->scale);
    td_tensor *each = td__adopt(td__expand("td_backward", grad, x->layout.shape, x->layout.ndim));
    if (!each)
        return TD_ERR_NOMEM;
    TD_TRY(kernels->binary(TD_BINARY_MUL, into, x, each));
    return kernels->binary_scalar(TD_BINARY_MUL, into, into, -data->scale, false);
}

static td_status pair_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grads)
{
    const struct loss_data *data = td_node_data(node);
    td_tensor *x = td_node_saved(node, 0);
    TD_TRY(td__done(x));
    td_tensor *target = td_node_saved(node, 1);
    TD_TRY(td__done(target));
    td_tensor *grad = td__scoped_contiguous(grad_y[0]);
    struct td__grad_buffer buffers[2];
    if (!grad)
        return TD_ERR_NOMEM;
    for (int i = 0; i < 2; i++) {
        TD_TRY(td__grad_buffer_open(&buffers[i], node, i));
        if (!buffers[i].into)
            continue;
        TD_TRY(i == 0 ? td__kernels_of(x)->pair_loss_grad(data->loss, buffers[0].into, grad, x,
                                                          target, data->scale)
                      : grad_of_target(data, buffers[1].into, grad, x, target));
        TD_TRY(td__grad_buffer_close(&buffers[i], &grads[i]));
    }
    return TD_OK;
}

static const td_function functions[] = {
    [TD_PAIR_LOSS_MSE] = {.name = "td_mse_loss", .backward = pair_backward},
    [TD_PAIR_LOSS_L1] = {.name = "td_l1_loss", .backward = pair_backward},
    [TD_PAIR_LOSS_BCE_LOGITS] = {.name = "td_bce_with_logits", .backward = pair_backward},
};

static const enum td__cast_op cast_ops[] = {
    [TD_PAIR_LOSS_MSE] = TD__CAST_MSE_LOSS,
    [TD_PAIR_LOSS_L1] = TD__CAST_L1_LOSS,
    [TD_PAIR_LOSS_BCE_LOGITS] = TD__CAST_BCE_WITH_LOGITS,
};

static td_status check(const char *call, const td_tensor *x, const td_tensor *target,
                       const td_loss_options *options)
{
    TD_TRY(td__check_same(call, x, target));
    TD_TRY(td__check_float(call, x));
    if (!td__same_shape(x, target))
        return td_fail(TD_ERR_INVALID, "%s: x has the shape %s, target %s; both must have the same",
                       call, td__shape_of(x), td__shape_of(target));
    if (options->weight || options->label_smoothing != 0 || options->ignore)
        return td_fail(TD_ERR_INVALID,
                       "%s: weight, ignore_index and label_smoothing are options of nll_loss and "
                       "cross_entropy only",
                       call);
    if ((unsigned)options->reduction > TD_REDUCE_NONE)
        return td_fail(TD_ERR_INVALID, "%s: %d is not a reduction (see td_reduction)", call,
                       (int)options->reduction);
    return TD_OK;
}

static td_tensor *pair_loss(td_pair_loss loss, td_tensor *x, td_tensor *target,
                            const td_loss_options *options)
{
    static const td_loss_options defaults;
    const td_function *function = &functions[loss];
    options = options ? options : &defaults;
    if (check(function->name, x, target, options))
        return NULL;
    td_tensor *in = td__scoped_contiguous(x), *wanted = td__scoped_contiguous(target);
    if (!in || !wanted)
        return NULL;
    bool is_each = options->reduction == TD_REDUCE_NONE;
    struct loss_data data = {
        loss, options->reduction == TD_REDUCE_MEAN ? 1.0 / (double)x->layout.numel : 1.0};
    td_tensor *y = is_each
                       ? td__empty_like(x)
                       : td__empty(function->name, NULL, 0, x->layout.dtype, x->storage->device);
    if (!y)
        return NULL;
    y = td__kept(y, td__kernels_of(x)->pair_loss(loss, y, in, wanted, data.scale));
    return td__result(function, y,
                      &(td_node_spec){.inputs = {x, target},
                                      .input_count = 2,
                                      .saved = {in, wanted},
                                      .saved_count = 2,
                                      .data = &data,
                                      .data_size = sizeof data});
}

static td_tensor *in_scope(td_pair_loss loss, td_tensor *x, td_tensor *target,
                           const td_loss_options *options)
{
    TD__AUTOCAST(cast_ops[loss], &x, &target);
    td_tensor *y = NULL;
    if (!x || !target)
        return td__null(functions[loss].name);
    {
        TD_SCOPE;
        y = td_scope_return(pair_loss(loss, x, target, options));
    }
    return y;
}

td_tensor *td_mse_loss_with(td_tensor *x, td_tensor *target, const td_loss_options *options)
{
    if (options && td__check_reserved(__func__, options->reserved))
        return NULL;
    return in_scope(TD_PAIR_LOSS_MSE, x, target, options);
}

td_tensor *td_mse_loss(td_tensor *x, td_tensor *target)
{
    return td_mse_loss_with(x, target, NULL);
}

td_tensor *td_l1_loss_with(td_tensor *x, td_tensor *target, const td_loss_options *options)
{
    if (options && td__check_reserved(__func__, options->reserved))
        return NULL;
    return in_scope(TD_PAIR_LOSS_L1, x, target, options);
}

td_tensor *td_l1_loss(td_tensor *x, td_tensor *target)
{
    return td_l1_loss_with(x, target, NULL);
}

td_tensor *td_bce_with_logits_with(td_tensor *x, td_tensor *target, const td_loss_options *options)
{
    if (options && td__check_reserved(__func__, options->reserved))
        return NULL;
    return in_scope(TD_PAIR_LOSS_BCE_LOGITS, x, target, options);
}

td_tensor *td_bce_with_logits(td_tensor *x, td_tensor *target)
{
    return td_bce_with_logits_with(x, target, NULL);
}
