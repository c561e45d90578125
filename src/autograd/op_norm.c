/* Normalisation: z = (x - mean) / sqrt(variance + eps), y = z w + b.
 *
 *     batch norm   x [N, C, …] as [N, C, S], one mean a channel
 *     layer norm   x [..., D] as [R, D], one mean a row, D the last dimensions together
 *
 * x and the statistics are saved, y is not. The gradients of w and b are written into the
 * leaves'. */
#include "autograd/autocast.h"
#include "autograd/op_kernel.h"
#include "base/fail.h"

#include <string.h>

/* Statistics of f16 and bf16 are f32. */
static td_tensor *new_statistics(const char *call, int64_t count, const td_tensor *x)
{
    td_dtype dtype = x->layout.dtype == TD_F64 ? TD_F64 : TD_F32;
    return td__adopt(td__empty(call, &count, 1, dtype, x->storage->device));
}

/* The buffer as a vector of `count` elements for the kernel, or NULL. */
static struct td_tensor *vector_of(struct td__grad_buffer *buffer, int64_t count,
                                   struct td_tensor *seen)
{
    if (!buffer->into)
        return NULL;
    *seen = td__view_as(buffer->into, &count, 1);
    return seen;
}

struct norm {
    int64_t shape[3]; /* [N, C, S] or [R, D] */
    bool training;
    bool has_weight;
};

/* Inputs x, weight, bias; saved x, weight, mean, rstd. One of the two norms, as `is_batch` says. */
static td_status norm_backward(td_node *node, bool is_batch, td_tensor *grad_y, td_tensor **grads)
{
    const struct norm *norm = td_node_data(node);
    const int64_t width = norm->shape[1]; /* C, or D */
    td_tensor *in = td_node_saved(node, 0);
    TD_TRY(td__done(in));
    td_tensor *saved_weight = norm->has_weight ? td_node_saved(node, 1) : NULL;
    if (norm->has_weight)
        TD_TRY(td__done(saved_weight));
    td_tensor *mean = td_node_saved(node, 2), *rstd = td_node_saved(node, 3);
    TD_TRY(td__done(mean));
    TD_TRY(td__done(rstd));
    td_tensor *contiguous = td__scoped_contiguous(grad_y);
    if (!contiguous)
        return TD_ERR_NOMEM;
    struct td__grad_buffer buffers[3];
    for (int i = 0; i < 3; i++)
        TD_TRY(td__grad_buffer_open(&buffers[i], node, i));

    int ndim = is_batch ? 3 : 2;
    struct td_tensor x = td__view_as(in, norm->shape, ndim);
    struct td_tensor grad = td__view_as(contiguous, norm->shape, ndim);
    struct td_tensor grad_x, grad_weight, grad_bias, weight;
    if (buffers[0].into)
        grad_x = td__view_as(buffers[0].into, norm->shape, ndim);
    if (saved_weight)
        weight = td__view_as(saved_weight, &width, 1);
    td_tensor *into_x = buffers[0].into ? &grad_x : NULL;
    td_tensor *into_weight = vector_of(&buffers[1], width, &grad_weight);
    td_tensor *into_bias = vector_of(&buffers[2], width, &grad_bias);
    td_tensor *with = saved_weight ? &weight : NULL;
    const td_kernels *kernels = td__kernels_of(in);
    TD_TRY(is_batch ? kernels->batch_norm_grad(into_x, into_weight, into_bias, &grad, &x, with,
                                               mean, rstd, norm->training)
                    : kernels->layer_norm_grad(into_x, into_weight, into_bias, &grad, &x, with,
                                               mean, rstd));
    for (int i = 0; i < 3; i++)
        TD_TRY(td__grad_buffer_close(&buffers[i], &grads[i]));
    return TD_OK;
}

static td_status batch_norm_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grads)
{
    return norm_backward(node, true, grad_y[0], grads);
}

static td_status layer_norm_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grads)
{
    return norm_backward(node, false, grad_y[0], grads);
}

/* The recorded result of a norm. `in` and `weight` are contiguous. */
static td_tensor *recorded(const td_function *function, td_tensor *y, struct norm *norm,
                           td_tensor *const *inputs, td_tensor *in, td_tensor *weight,
                           td_tensor *mean, td_tensor *rstd)
{
    norm->has_weight = weight != NULL;
    return td__result(function, y,
                      &(td_node_spec){.inputs = {inputs[0], inputs[1], inputs[2]},
                                      .input_count = 3,
                                      .saved = {in, weight, mean, rstd},
                                      .saved_count = 4,
                                      .data = norm,
                                      .data_size = sizeof *norm});
}

/* ---- Batch norm -------------------------------------------------------------------------------------- */

static const td_function batch_norm_function = {.name = "td_batch_norm",
                                                .backward = batch_norm_backward};

/* The arguments of td_batch_norm(). */
struct batch_norm {
    td_tensor *x, *running_mean, *running_var, *weight, *bias;
    bool training;
    double momentum, eps;
};

static td_status check_batch_norm(const struct batch_norm *call, struct norm *norm)
{
    const char *name = batch_norm_function.name;
    const td_tensor *x = call->x;
    TD_TRY(td__check_float(name, x));
    TD_TRY(td__check_dims(name, "x", x, 2, TD_MAX_DIMS));
    const struct td__layout *of_x = &x->layout;
    *norm = (struct norm){.training = call->training};
    memcpy(norm->shape, (int64_t[]){of_x->shape[0], of_x->shape[1], 1}, sizeof norm->shape);
    for (int d = 2; d < of_x->ndim; d++)
        norm->shape[2] *= of_x->shape[d];
    const int64_t *channels = &norm->shape[1];
    TD_TRY(td__check_optional(name, "weight", call->weight, x, channels, 1));
    TD_TRY(td__check_optional(name, "bias", call->bias, x, channels, 1));
    TD_TRY(td__check_optional(name, "running_mean", call->running_mean, x, channels, 1));
    TD_TRY(td__check_optional(name, "running_var", call->running_var, x, channels, 1));
    if (!call->training && (!call->running_mean || !call->running_var))
        return td_fail(TD_ERR_INVALID,
                       "%s: running_mean and running_var are NULL; evaluation "
                       "needs them",
                       name);
    if (call->training && norm->shape[0] * norm->shape[2] == 1)
        return td_fail(TD_ERR_INVALID,
                       "%s: x has the shape %s, one value a channel; training needs more than one",
                       name, td__shape_of(x));
    if (!call->training)
        return TD_OK;
    TD_TRY(td__prepare_write(call->running_mean));
    return td__prepare_write(call->running_var);
}

/* In evaluation the statistics are the running ones. They are copied for backward, since they may
 * change before it runs. */
static td_status keep_running(const struct batch_norm *call, td_tensor *mean, td_tensor *rstd)
{
    const td_kernels *kernels = td__kernels_of(mean);
    TD_TRY(kernels->copy(mean, call->running_mean));
    TD_TRY(kernels->copy(rstd, call->running_var));
    TD_TRY(kernels->binary_scalar(TD_BINARY_ADD, rstd, rstd, call->eps, false));
    return kernels->unary(TD_UNARY_RSQRT, rstd, rstd);
}

/* The kernel updates the running statistics, which must be contiguous: others are copied, and
 * copied back. */
static td_status copy_back(td_tensor *running, td_tensor *contiguous)
{
    if (!running)
        return TD_OK;
    if (running != contiguous)
        TD_TRY(td__kernels_of(running)->copy(running, contiguous));
    td__tensor_bump_version(running);
    return TD_OK;
}

static td_tensor *batch_norm(const struct batch_norm *call)
{
    const char *name = batch_norm_function.name;
    struct norm norm;
    td_tensor *x = call->x, *inputs[] = {call->x, call->weight, call->bias};
    if (check_batch_norm(call, &norm))
        return NULL;
    bool records = td_would_record(inputs, 3);
    td_tensor *in = td__scoped_contiguous(x);
    td_tensor *weight = td__scoped_contiguous(call->weight),
              *bias = td__scoped_contiguous(call->bias);
    td_tensor *running_mean = td__scoped_contiguous(call->running_mean);
    td_tensor *running_var = td__scoped_contiguous(call->running_var);
    td_tensor *mean = new_statistics(name, norm.shape[1], x);
    td_tensor *rstd = mean ? new_statistics(name, norm.shape[1], x) : NULL;
    td_tensor *y = rstd && in ? td__empty_like(x) : NULL;
    if (!y || (call->weight && !weight) || (call->bias && !bias) ||
        (call->running_mean && !running_mean) || (call->running_var && !running_var)) {
        td_tensor_release(y);
        return NULL;
    }
    struct td_tensor from = td__view_as(in, norm.shape, 3), out = td__view_as(y, norm.shape, 3);
    td_status status = td__kernels_of(x)->batch_norm(&out, mean, rstd, &from, weight, bias,
                                                     running_mean, running_var, call->training,
                                                     call->momentum, call->eps);
    if (!status && call->training)
        status = copy_back(call->running_mean, running_mean);
    if (!status && call->training)
        status = copy_back(call->running_var, running_var);
    if (!status && !call->training && records)
        status = keep_running(call, mean, rstd);
    y = td__kept(y, status);
    return recorded(&batch_norm_function, y, &norm, inputs, in, weight, mean, rstd);
}

td_tensor *td_batch_norm(td_tensor *x, td_tensor *running_mean, td_tensor *running_var,
                         td_tensor *weight, td_tensor *bias, bool training, double momentum,
                         double eps)
{
    td_tensor *y = NULL, *running = running_mean;
    TD__AUTOCAST(TD__CAST_BATCH_NORM, &x, &weight, &bias, &running);
    if (!x)
        return td__null(__func__);
    const struct batch_norm call = {x,    running_mean, running_var, weight,
                                    bias, training,     momentum,    eps};
    {
        TD_SCOPE;
        y = td_scope_return(TD__AUTOCAST_RESULT(batch_norm(&call)));
    }
    return y;
}

/* ---- Layer norm -------------------------------------------------------------------------------------- */

static const td_function layer_norm_function = {.name = "td_f_layer_norm",
                                                .backward = layer_norm_backward};

td_status td__layer_norm_rows(const char *name, const td_tensor *x, const int64_t *shape, int ndim,
                              int64_t rows[2])
{
    const struct td__layout *of_x = &x->layout;
    TD_TRY(td__check_float(name, x));
    if (ndim < 1 || ndim > TD_MAX_DIMS || !shape)
        return td_fail(TD_ERR_INVALID, "%s: it normalises 1 to %d dimensions, not %d", name,
                       TD_MAX_DIMS, ndim);
    bool fits = of_x->ndim >= ndim;
    rows[0] = rows[1] = 1;
    for (int d = 0; fits && d < of_x->ndim; d++) {
        int at = d - (of_x->ndim - ndim);
        fits = at < 0 || shape[at] == of_x->shape[d];
        rows[at >= 0] *= of_x->shape[d];
    }
    if (!fits)
        return td_fail(TD_ERR_INVALID, "%s: x has the shape %s; its last sizes must be %s", name,
                       td__shape_of(x), td__shape_text(shape, ndim));
    return TD_OK;
}

static td_tensor *layer_norm(td_tensor *x, const int64_t *shape, int ndim, td_tensor *weight,
                             td_tensor *bias, double eps)
{
    const char *name = layer_norm_function.name;
    struct norm norm = {.shape = {1, 1, 1}};
    td_tensor *inputs[] = {x, weight, bias};
    if (td__layer_norm_rows(name, x, shape, ndim, norm.shape) ||
        td__check_optional(name, "weight", weight, x, shape, ndim) ||
        td__check_optional(name, "bias", bias, x, shape, ndim))
        return NULL;
    bool records = td_would_record(inputs, 3);
    td_tensor *in = td__scoped_contiguous(x), *w = td__scoped_contiguous(weight),
              *b = td__scoped_contiguous(bias);
    td_tensor *mean = records ? new_statistics(name, norm.shape[0], x) : NULL;
    td_tensor *rstd = records ? new_statistics(name, norm.shape[0], x) : NULL;
    if (!in || (weight && !w) || (bias && !b) || (records && (!mean || !rstd)))
        return NULL;
    td_tensor *y = td__empty_like(x);
    if (!y)
        return NULL;
    struct td_tensor from = td__view_as(in, norm.shape, 2), out = td__view_as(y, norm.shape, 2);
    struct td_tensor flat_w, flat_b;
    if (w)
        flat_w = td__view_as(w, &norm.shape[1], 1);
    if (b)
        flat_b = td__view_as(b, &norm.shape[1], 1);
    y = td__kept(y, td__kernels_of(x)->layer_norm(&out, mean, rstd, &from, w ? &flat_w : NULL,
                                                  b ? &flat_b : NULL, eps));
    return recorded(&layer_norm_function, y, &norm, inputs, in, w, mean, rstd);
}

td_tensor *td_f_layer_norm(td_tensor *x, const int64_t *shape, int ndim, td_tensor *weight,
                           td_tensor *bias, double eps)
{
    TD__AUTOCAST(TD__CAST_LAYER_NORM, &x, &weight, &bias);
    td_tensor *y = NULL;
    if (!x)
        return td__null(__func__);
    {
        TD_SCOPE;
        y = td_scope_return(TD__AUTOCAST_RESULT(layer_norm(x, shape, ndim, weight, bias, eps)));
    }
    return y;
}
