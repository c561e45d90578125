/* relu(batch_norm(x) + residual), as the blocks of a convolutional network have it, by one kernel:
 *
 *     x, residual [N, C, …]  ->  y = relu(n + residual), n = batch_norm(x), or without a residual y = relu(n)
 *
 * In memory's terms the norm reads x twice and writes y; n and n + residual, which operators one by one write and read
 * again, exist in registers only. Backward computes the sign of n again from x; with a residual it reads y, and what it
 * writes for the residual is what the norm's gradient is then computed from. x, the statistics and, with a residual, y
 * are saved. Other devices compose it of the operators, and so are calls that are not plain. */
#include "autograd/autocast.h"
#include "autograd/op_kernel.h"
#include "base/fail.h"

#include <string.h>

static const char name[] = "td_batch_norm_relu";

/* The arguments. */
struct batch_norm_relu {
    td_tensor *x, *residual, *running_mean, *running_var, *weight, *bias;
    bool training;
    double momentum, eps;
};

struct batch_norm_relu_node {
    int64_t shape[3]; /* [N, C, S] */
    bool training, has_weight, has_residual;
};

enum { X, WEIGHT, BIAS, RESIDUAL, INPUTS }; /* of the node */
enum { SAVED_X, SAVED_WEIGHT, SAVED_STATISTICS, SAVED_Y, SAVED };
enum { STATISTICS = 4 }; /* rows */

/* A tensor as the kernel sees it, in `seen`; NULL for NULL. */
static td_tensor *as(const td_tensor *tensor, const int64_t shape[3], struct td_tensor *seen)
{
    if (!tensor)
        return NULL;
    *seen = td__view_as(tensor, shape, 3);
    return seen;
}

/* ---- Backward ------------------------------------------------------------------------------------------ */

static td_status take_saved(td_node *node, const struct batch_norm_relu_node *data,
                            td_tensor *saved[SAVED])
{
    const bool is_there[SAVED] = {true, data->has_weight, true, data->has_residual};
    for (int i = 0; i < SAVED; i++) {
        saved[i] = is_there[i] ? td_node_saved(node, i) : NULL;
        if (is_there[i])
            TD_TRY(td__done(saved[i]));
    }
    return TD_OK;
}

static td_status backward(td_node *node, td_tensor *const *grad_y, td_tensor **grads)
{
    const struct batch_norm_relu_node *data = td_node_data(node);
    td_tensor *saved[SAVED], *into[INPUTS];
    TD_TRY(take_saved(node, data, saved));
    td_tensor *grad = td__scoped_contiguous(grad_y[0]);
    if (!grad)
        return TD_ERR_NOMEM;
    struct td__grad_buffer buffers[INPUTS];
    for (int i = 0; i < INPUTS - !data->has_residual; i++) {
        TD_TRY(td__grad_buffer_open(&buffers[i], node, i));
        into[i] = buffers[i].into;
    }
    if (!data->has_residual)
        into[RESIDUAL] = NULL;
    else if (!into[RESIDUAL] && !(into[RESIDUAL] = td__fresh(name, data->shape, 3, grad)))
        return TD_ERR_NOMEM;
    struct td_tensor seen[5];
    TD_TRY(td__kernels_of(grad)->batch_norm_relu_grad(
        as(into[X], data->shape, &seen[0]), as(into[RESIDUAL], data->shape, &seen[1]), into[WEIGHT],
        into[BIAS], as(grad, data->shape, &seen[2]), as(saved[SAVED_X], data->shape, &seen[3]),
        as(saved[SAVED_Y], data->shape, &seen[4]), saved[SAVED_WEIGHT], saved[SAVED_STATISTICS],
        data->training));
    for (int i = 0; i < INPUTS - !data->has_residual; i++)
        TD_TRY(td__grad_buffer_close(&buffers[i], &grads[i]));
    return TD_OK;
}

static const td_function function = {.name = name, .backward = backward};

/* ---- One kernel ---------------------------------------------------------------------------------------- */

/* Whether it is [C], contiguous, and of the dtype of x, or f32 for a half under autocast, which casts such operands of a
 * batch norm. */
static bool fits_as_vector(const td_tensor *vector, const td_tensor *x)
{
    if (!vector)
        return true;
    td_dtype dtype = x->layout.dtype;
    bool is_cast = (dtype == TD_F16 || dtype == TD_BF16) && vector->layout.dtype == TD_F32 &&
                   td__autocast_dtype(x) != TD_F32;
    return vector->storage->device == x->storage->device && vector->layout.ndim == 1 &&
           vector->layout.shape[0] == x->layout.shape[1] && td_tensor_is_contiguous(vector) &&
           (vector->layout.dtype == dtype || is_cast);
}

/* What does not fit is computed, or refused, by the operators. */
static bool fits(const struct batch_norm_relu *call)
{
    const td_tensor *x = call->x, *residual = call->residual;
    td_device *device = x->storage->device;
    const td_kernels *own = device->is_host ? NULL : &device->kind->kernels;
    if (!own || !own->batch_norm_relu || !own->batch_norm_relu_grad)
        return false;
    if (x->layout.dtype > TD_BF16 || x->layout.ndim < 2 || td_tensor_numel(x) < 1)
        return false;
    if (call->training ? td_tensor_numel(x) == x->layout.shape[1]
                       : !call->running_mean || !call->running_var)
        return false;
    if (residual && (residual->layout.dtype != x->layout.dtype || !td__same_shape(residual, x) ||
                     residual->storage->device != device))
        return false;
    return fits_as_vector(call->weight, x) && fits_as_vector(call->bias, x) &&
           fits_as_vector(call->running_mean, x) && fits_as_vector(call->running_var, x);
}

static td_status move_running(const struct batch_norm_relu *call, bool moved)
{
    td_tensor *running[] = {call->running_mean, call->running_var};
    for (int i = 0; i < 2 && call->training; i++) {
        if (moved && running[i])
            td__tensor_bump_version(running[i]);
        else if (!moved)
            TD_TRY(td__prepare_write(running[i]));
    }
    return TD_OK;
}

/* TD_ERR_UNSUPPORTED where the kernel does not know the dtype. */
static td_status fused(const struct batch_norm_relu *call, td_tensor **result)
{
    td_tensor *inputs[] = {call->x, call->weight, call->bias, call->residual};
    const struct td__layout *of_x = &call->x->layout;
    struct batch_norm_relu_node data = {.shape = {of_x->shape[0], of_x->shape[1], 1},
                                        .training = call->training,
                                        .has_weight = call->weight,
                                        .has_residual = call->residual};
    for (int d = 2; d < of_x->ndim; d++)
        data.shape[2] *= of_x->shape[d];
    int64_t rows[] = {STATISTICS, of_x->shape[1]};
    td_dtype dtype = of_x->dtype == TD_F64 ? TD_F64 : TD_F32;
    td_tensor *in = td__scoped_contiguous(call->x);
    td_tensor *residual = td__scoped_contiguous(call->residual);
    td_tensor *statistics = td__adopt(td__empty(name, rows, 2, dtype, call->x->storage->device));
    td_tensor *y = in && statistics && (residual || !call->residual) ? td__empty_like(call->x)
                                                                     : NULL;
    TD_TRY(td__done(y));
    struct td_tensor seen[3];
    td_status status = move_running(call, false);
    if (!status)
        status = td__kernels_of(in)->batch_norm_relu(
            as(y, data.shape, &seen[0]), statistics, as(in, data.shape, &seen[1]),
            as(residual, data.shape, &seen[2]), call->weight, call->bias, call->running_mean,
            call->running_var, call->training, call->momentum, call->eps);
    if (!status)
        status = move_running(call, true);
    y = td__kept(y, status);
    *result = td__result(&function, y,
                         &(td_node_spec){.inputs = {inputs[0], inputs[1], inputs[2], inputs[3]},
                                         .input_count = INPUTS - !call->residual,
                                         .saved = {[SAVED_X] = in,
                                                   [SAVED_WEIGHT] = call->weight,
                                                   [SAVED_STATISTICS] = statistics,
                                                   [SAVED_Y] = call->residual ? y : NULL},
                                         .saved_count = SAVED,
                                         .data = &data,
                                         .data_size = sizeof data});
    return status ? status : td__done(*result);
}

/* ---- Of operators -------------------------------------------------------------------------------------- */

static td_tensor *composed(const struct batch_norm_relu *call)
{
    td_tensor *y = td_batch_norm(call->x, call->running_mean, call->running_var, call->weight,
                                 call->bias, call->training, call->momentum, call->eps);
    return td_f_relu(call->residual ? td_add(y, call->residual) : y);
}

td_tensor *td_batch_norm_relu(td_tensor *x, td_tensor *residual, td_tensor *running_mean,
                              td_tensor *running_var, td_tensor *weight, td_tensor *bias,
                              bool training, double momentum, double eps)
{
    if (!x)
        return td__null(__func__);
    const struct batch_norm_relu call = {.x = x,
                                         .residual = residual,
                                         .running_mean = running_mean,
                                         .running_var = running_var,
                                         .weight = weight,
                                         .bias = bias,
                                         .training = training,
                                         .momentum = momentum,
                                         .eps = eps};
    td_tensor *y = NULL;
    {
        TD_SCOPE;
        td_status status = fits(&call) ? fused(&call, &y) : TD_ERR_UNSUPPORTED;
        y = td_scope_return(status == TD_ERR_UNSUPPORTED ? composed(&call) : y);
    }
    return y;
}
