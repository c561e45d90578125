/* Layer norm of x + residual, as a block of a transformer has it:
 *
 *     x [..., D], residual [..., D]  ->  sum = x + residual   the residual stream, f32 with a bf16 residual
 *                                        y = layer_norm(sum)  in the dtype that the next product wants
 *
 * One kernel where the device has it: sum and y are written in one pass over x and residual, and backward the gradients
 * of both operands, each in its dtype, in one pass over those of sum and y. Other devices compose it of the operators.
 *
 * Without a residual the sum is x: a result of the node over the memory of x, so that what is added to the residual stream
 * behind the norm sends its gradient through the same pass, instead of a sum of two gradients at x. */
#include "autograd/autocast.h"
#include "autograd/op_kernel.h"
#include "base/fail.h"

static const char name[] = "td_add_layer_norm";

/* The arguments, and what follows from them. */
struct add_layer_norm {
    td_tensor *x, *residual, *weight, *bias;
    const int64_t *shape;
    int ndim;
    double eps;
    bool wants_sum;
    int64_t rows[2];       /* [R, D] */
    td_dtype summed, kept; /* the dtypes of sum and y */
};

/* ---- Checks ------------------------------------------------------------------------------------------ */

static td_status check_affine(const struct add_layer_norm *call, const char *what,
                              const td_tensor *tensor)
{
    if (!tensor)
        return TD_OK;
    td_dtype dtype = tensor->layout.dtype;
    if (dtype != call->summed && (dtype != TD_F32 || call->summed == TD_F64))
        return td_fail(TD_ERR_INVALID, "%s: %s is %s and the sum %s; it must be %s%s", name, what,
                       td_dtype_name(dtype), td_dtype_name(call->summed),
                       td_dtype_name(call->summed), call->summed == TD_F64 ? "" : " or f32");
    bool fits = tensor->layout.ndim == call->ndim;
    for (int d = 0; fits && d < call->ndim; d++)
        fits = tensor->layout.shape[d] == call->shape[d];
    if (!fits)
        TD_TRY(td__check_whole(tensor, name));
    if (!fits)
        return td_fail(TD_ERR_INVALID, "%s: %s has the shape %s; it must have %s", name, what,
                       td__shape_of(tensor), td__shape_text(call->shape, call->ndim));
    return TD_OK;
}

static td_status check_device(const td_tensor *x, const td_tensor *other)
{
    if (!other || other->storage->device == x->storage->device)
        return TD_OK;
    return td_fail(TD_ERR_INVALID, "%s: the operands are on %s and on %s; td_tensor_to() moves one",
                   name, x->storage->device->name, other->storage->device->name);
}

static td_status check(struct add_layer_norm *call)
{
    const td_tensor *x = call->x, *residual = call->residual;
    TD_TRY(td__layer_norm_rows(name, x, call->shape, call->ndim, call->rows));
    call->summed = x->layout.dtype;
    if (residual) {
        TD_TRY(td__check_float(name, residual));
        if (!td__same_shape(x, residual))
            return td_fail(TD_ERR_INVALID,
                           "%s: x has the shape %s and residual %s; they must be the same", name,
                           td__shape_of(x), td__shape_of(residual));
        td_dtype other = residual->layout.dtype;
        if (other != call->summed)
            call->summed = call->summed == TD_F64 || other == TD_F64 ? TD_F64 : TD_F32;
    }
    td_dtype lower = td__autocast_dtype(x);
    call->kept = lower == TD_F32 || call->summed == TD_F64 ? call->summed : lower;
    TD_TRY(check_device(x, residual));
    TD_TRY(check_device(x, call->weight));
    TD_TRY(check_device(x, call->bias));
    TD_TRY(check_affine(call, "weight", call->weight));
    return check_affine(call, "bias", call->bias);
}

/* ---- One kernel -------------------------------------------------------------------------------------- */

struct norm_node {
    int64_t rows[2];
    bool has_weight;
};

/* The gradients of x and residual: one tensor where they have one dtype. */
static td_status open_inputs(td_node *node, const td_tensor *sum, td_tensor *grads[2],
                             td_tensor *into[2])
{
    for (int i = 0; i < 2; i++) {
        grads[i] = into[i] = NULL;
        if (!td_node_needs(node, i))
            continue;
        td_dtype dtype = td__input_layout(node, i)->dtype;
        if (i == 1 && grads[0] && grads[0]->layout.dtype == dtype) {
            grads[1] = grads[0];
            continue;
        }
        grads[i] = into[i] = td__adopt(
            td__empty(name, sum->layout.shape, sum->layout.ndim, dtype, sum->storage->device));
        TD_TRY(td__done(grads[i]));
    }
    return TD_OK;
}

/* Where only the sum was used: its gradient is that of both. */
static td_status pass_sum(td_node *node, td_tensor *grad_sum, td_tensor **grads)
{
    for (int i = 0; i < 2; i++) {
        if (!td_node_needs(node, i))
            continue;
        grads[i] = td_to_dtype(grad_sum, td__input_layout(node, i)->dtype);
        TD_TRY(td__done(grads[i]));
    }
    return TD_OK;
}

/* A tensor as the kernel sees it, in `seen`; NULL for NULL. */
static td_tensor *as(td_tensor *tensor, const int64_t *shape, int ndim, struct td_tensor *seen)
{
    if (!tensor)
        return NULL;
    *seen = td__view_as(tensor, shape, ndim);
    return seen;
}

/* Inputs x, residual, weight, bias; outputs y, sum; saved what was normalised, weight, mean, rstd. */
static td_status backward(td_node *node, td_tensor *const *grad_outputs, td_tensor **grads)
{
    const struct norm_node *data = td_node_data(node);
    const int64_t *rows = data->rows;
    td_tensor *given_sum = node->output_count > 1 ? grad_outputs[1] : NULL;
    if (!grad_outputs[0])
        return pass_sum(node, given_sum, grads);
    td_tensor *sum = td_node_saved(node, 0);
    TD_TRY(td__done(sum));
    td_tensor *weight = data->has_weight ? td_node_saved(node, 1) : NULL;
    if (data->has_weight)
        TD_TRY(td__done(weight));
    td_tensor *mean = td_node_saved(node, 2), *rstd = td_node_saved(node, 3);
    TD_TRY(td__done(mean));
    TD_TRY(td__done(rstd));
    td_tensor *grad_y = td__scoped_contiguous(grad_outputs[0]);
    td_tensor *grad_sum = td__scoped_contiguous(given_sum);
    td_tensor *into[2];
    struct td__grad_buffer buffers[2];
    if (!grad_y || (given_sum && !grad_sum))
        return TD_ERR_NOMEM;
    TD_TRY(open_inputs(node, sum, grads, into));
    for (int i = 0; i < 2; i++)
        TD_TRY(td__grad_buffer_open(&buffers[i], node, 2 + i));
    struct td_tensor seen[8];
    TD_TRY(td__kernels_of(sum)->add_layer_norm_grad(
        as(into[0], rows, 2, &seen[0]), as(into[1], rows, 2, &seen[1]),
        as(buffers[0].into, &rows[1], 1, &seen[2]), as(buffers[1].into, &rows[1], 1, &seen[3]),
        as(grad_y, rows, 2, &seen[4]), as(grad_sum, rows, 2, &seen[5]), as(sum, rows, 2, &seen[6]),
        as(weight, &rows[1], 1, &seen[7]), mean, rstd));
    TD_TRY(td__grad_buffer_close(&buffers[0], &grads[2]));
    return td__grad_buffer_close(&buffers[1], &grads[3]);
}

static const td_function function = {.name = name, .backward = backward};

/* The results of the kernel, and what backward needs; all belong to the scope. */
struct results {
    td_tensor *in, *residual, *weight, *bias; /* contiguous */
    td_tensor *y, *sum, *mean, *rstd;
};

static td_status run_kernel(const struct add_layer_norm *call, bool records, struct results *r)
{
    const struct td__layout *of_x = &call->x->layout;
    td_device *device = call->x->storage->device;
    td_dtype statistics = call->summed == TD_F64 ? TD_F64 : TD_F32;
    const int64_t *rows = call->rows;
    *r = (struct results){.in = td__scoped_contiguous(call->x),
                          .residual = td__scoped_contiguous(call->residual),
                          .weight = td__scoped_contiguous(call->weight),
                          .bias = td__scoped_contiguous(call->bias)};
    r->y = td__adopt(td__empty(name, of_x->shape, of_x->ndim, call->kept, device));
    if (call->residual)
        r->sum = td__adopt(td__empty(name, of_x->shape, of_x->ndim, call->summed, device));
    if (records) {
        r->mean = td__adopt(td__empty(name, rows, 1, statistics, device));
        r->rstd = td__adopt(td__empty(name, rows, 1, statistics, device));
    }
    if (!r->in || !r->y || (call->residual && (!r->residual || !r->sum)) ||
        (call->weight && !r->weight) || (call->bias && !r->bias) ||
        (records && (!r->mean || !r->rstd)))
        return td__done(NULL);
    struct td_tensor seen[6];
    return td__kernels_of(call->x)->add_layer_norm(
        as(r->y, rows, 2, &seen[0]), as(r->sum, rows, 2, &seen[1]), r->mean, r->rstd,
        as(r->in, rows, 2, &seen[2]), as(r->residual, rows, 2, &seen[3]),
        as(r->weight, &rows[1], 1, &seen[4]), as(r->bias, &rows[1], 1, &seen[5]), call->eps);
}

/* TD_ERR_UNSUPPORTED where the device has no such kernel. */
static td_status fused(const struct add_layer_norm *call, td_tensor *results[2])
{
    td_tensor *inputs[] = {call->x, call->residual, call->weight, call->bias};
    struct results r;
    if (!td__kernels_of(call->x)->add_layer_norm)
        return TD_ERR_UNSUPPORTED;
    bool records = td_would_record(inputs, 4);
    TD_TRY(run_kernel(call, records, &r));
    struct norm_node data = {.rows = {call->rows[0], call->rows[1]}, .has_weight = call->weight};
    bool is_alias = records && call->wants_sum && !call->residual;
    results[0] = r.y;
    results[1] = is_alias ? td__adopt(td__alias(call->x)) : r.sum ? r.sum : call->x;
    TD_TRY(td__done(results[1]));
    return td_record_all(&function, results, r.sum || is_alias ? 2 : 1,
                         &(td_node_spec){.inputs = {inputs[0], inputs[1], inputs[2], inputs[3]},
                                         .input_count = 4,
                                         .saved = {r.sum ? r.sum : r.in, r.weight, r.mean, r.rstd},
                                         .saved_count = 4,
                                         .data = &data,
                                         .data_size = sizeof data});
}

/* ---- Of operators ------------------------------------------------------------------------------------ */

static td_tensor *cast(td_tensor *x, td_dtype dtype)
{
    return x ? td_to_dtype(x, dtype) : NULL;
}

static td_status composed(const struct add_layer_norm *call, td_tensor *results[2])
{
    bool wide = (call->weight && call->weight->layout.dtype != call->summed) ||
                (call->bias && call->bias->layout.dtype != call->summed) ||
                call->kept != call->summed;
    td_dtype computed = wide ? TD_F32 : call->summed;
    td_tensor *sum = call->x;
    if (call->residual)
        sum = td_add(cast(call->x, call->summed), cast(call->residual, call->summed));
    TD_TRY(td__done(sum));
    td_tensor *y = td_f_layer_norm(cast(sum, computed), call->shape, call->ndim,
                                   cast(call->weight, computed), cast(call->bias, computed),
                                   call->eps);
    results[0] = cast(y, call->kept);
    results[1] = sum;
    return td__done(results[0]);
}

td_tensor *td_add_layer_norm(td_tensor *x, td_tensor *residual, const int64_t *shape, int ndim,
                             td_tensor *weight, td_tensor *bias, double eps, td_tensor **sum)
{
    if (!x)
        return td__null(__func__);
    struct add_layer_norm call = {.x = x,
                                  .residual = residual,
                                  .weight = weight,
                                  .bias = bias,
                                  .shape = shape,
                                  .ndim = ndim,
                                  .eps = eps,
                                  .wants_sum = sum};
    td_tensor *results[2] = {NULL, NULL};
    if (check(&call))
        return NULL;
    struct td__autocast_state before = td__autocast_switch(NULL); /* the dtypes are known now */
    td_status status;
    {
        TD_SCOPE;
        status = fused(&call, results);
        if (status == TD_ERR_UNSUPPORTED)
            status = composed(&call, results);
        if (!status) {
            td_scope_return(results[0]);
            if (results[1] != x)
                td_scope_return(results[1]);
        }
    }
    td__autocast_resume(&before);
    if (status)
        return NULL;
    if (sum)
        *sum = results[1];
    return results[0];
}
