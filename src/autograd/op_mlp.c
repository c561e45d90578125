/* The MLP of a transformer; see op_mlp.h. With the leading dimensions merged to N:
 *
 *     pre [N, H] = x w1^T + b1        h = gelu_tanh(pre)        y [N, O] = h w2^T + b2
 *
 *     grad_w2 [O, H] = grad_y^T h             grad_b2 = sum of the rows of grad_y
 *     grad_pre [N, H] = (grad_y w2) * gelu_tanh'(pre)
 *     grad_w1 [H, I] = grad_pre^T x           grad_b1 = sum of the rows of grad_pre        grad_x = grad_pre w1
 *
 * The composition saves the same tensors. grad_y w2 and grad_pre share memory here, and are not written twice. */
#include "autograd/op_mlp.h"

#include "autograd/autocast.h"
#include "autograd/op_kernel.h"
#include "base/fail.h"

#include <string.h>

enum { X, W1, B1, W2, B2, INPUTS }; /* of the node */
enum { SAVED_X, SAVED_W1, SAVED_PRE, SAVED_H, SAVED_W2, SAVED };

static const char call[] = "linear, gelu and linear";

static int64_t last_of(const td_tensor *x)
{
    return x->layout.shape[x->layout.ndim - 1];
}

static int64_t rows_of(const td_tensor *x)
{
    int64_t rows = 1;
    for (int d = 0; d < x->layout.ndim - 1; d++)
        rows *= x->layout.shape[d];
    return rows;
}

/* ---- Backward ------------------------------------------------------------------------------------------------ */

static td_status add_last_bias(td_node *node, td_tensor *grad, td_tensor **grads)
{
    struct td__grad_buffer bias;
    TD_TRY(td__grad_buffer_open(&bias, node, B2));
    if (!bias.grad)
        return TD_OK;
    struct td_tensor sums = td__view_as(bias.into, (int64_t[]){1, last_of(grad)}, 2);
    TD_TRY(td__kernels_of(grad)->reduce(TD_REDUCE_KIND_SUM, &sums, grad, 1u << 0));
    return td__grad_buffer_close(&bias, &grads[B2]);
}

/* grad_pre, and the gradient of the first bias with it. */
static td_status pass_gelu(td_node *node, td_tensor *grad, td_tensor **grad_pre, td_tensor **grads)
{
    td_tensor *w2 = td_node_saved(node, SAVED_W2), *pre = td_node_saved(node, SAVED_PRE);
    TD_TRY(td__done(w2));
    TD_TRY(td__done(pre));
    int64_t shape[] = {rows_of(grad), last_of(w2)};
    *grad_pre = td__fresh(call, shape, 2, grad);
    if (!*grad_pre)
        return TD_ERR_NOMEM;
    struct td__grad_buffer bias;
    TD_TRY(td__grad_buffer_open(&bias, node, B1));
    struct td_tensor sums, pre_rows = td__view_as(pre, shape, 2);
    if (bias.grad)
        sums = td__view_as(bias.into, (int64_t[]){1, shape[1]}, 2);
    TD_TRY(td__kernels_of(grad)->linear_gelu_grad(*grad_pre, bias.grad ? &sums : NULL, grad, w2,
                                                  &pre_rows));
    return bias.grad ? td__grad_buffer_close(&bias, &grads[B1]) : TD_OK;
}

static td_status add_x(td_node *node, const td_tensor *grad_pre, td_tensor **grads)
{
    if (!td_node_needs(node, X))
        return TD_OK;
    td_tensor *w1 = td_node_saved(node, SAVED_W1);
    TD_TRY(td__done(w1));
    bool accumulate;
    grads[X] = td__grad_target_or_new(node, X, &accumulate);
    if (!grads[X])
        return TD_ERR_NOMEM;
    struct td_tensor rows = td__view_as(grads[X], (int64_t[]){rows_of(grad_pre), last_of(w1)}, 2);
    return td__kernels_of(grad_pre)->matmul(&rows, grad_pre, w1, 1, accumulate);
}

static td_status mlp_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grads)
{
    td_tensor *dense = td__scoped_contiguous(grad_y[0]), *grad_pre;
    int64_t shape[] = {rows_of(grad_y[0]), last_of(grad_y[0])};
    td_tensor *grad = td__adopt(td__reshape(dense, shape, 2, NULL));
    if (!grad)
        return TD_ERR_NOMEM;
    if (td_node_needs(node, W2))
        TD_TRY(td__weight_grad(node, W2, grad, td_node_saved(node, SAVED_H), &grads[W2]));
    TD_TRY(add_last_bias(node, grad, grads));
    if (!td_node_needs(node, X) && !td_node_needs(node, W1) && !td_node_needs(node, B1))
        return TD_OK;
    TD_TRY(pass_gelu(node, grad, &grad_pre, grads));
    if (td_node_needs(node, W1))
        TD_TRY(td__weight_grad(node, W1, grad_pre, td_node_saved(node, SAVED_X), &grads[W1]));
    return add_x(node, grad_pre, grads);
}

static const td_function mlp_function = {.name = call, .backward = mlp_backward};

/* ---- Forward -------------------------------------------------------------------------------------------------- */

bool td__mlp_fits(const td_tensor *x, const td_tensor *w1, const td_tensor *b1, const td_tensor *w2,
                  const td_tensor *b2)
{
    const td_tensor *const all[] = {x, w1, b1, w2, b2};
    td_device *device = x->storage->device;
    const td_kernels *own = device->is_host ? NULL : &device->kind->kernels;
    if (!own || !own->linear_gelu || !own->linear_gelu_grad)
        return false;
    for (int i = 0; i < INPUTS; i++) {
        if (!all[i] || all[i]->storage->device != device)
            return false;
        td_dtype dtype = all[i]->layout.dtype;
        bool is_cast = td__autocast_on && (dtype == TD_F32 || dtype == TD_F16 || dtype == TD_BF16);
        if (dtype > TD_BF16 || (dtype != x->layout.dtype && !is_cast))
            return false;
    }
    return x->layout.ndim >= 1 && w1->layout.ndim == 2 && w2->layout.ndim == 2 &&
           b1->layout.ndim == 1 && b2->layout.ndim == 1 && last_of(x) == last_of(w1) &&
           last_of(w2) == w1->layout.shape[0] && last_of(b1) == w1->layout.shape[0] &&
           last_of(b2) == w2->layout.shape[0];
}

/* given: the inputs before autocast. The gradient of b1 comes from a kernel that has one dtype. */
static td_tensor *mlp(td_tensor *const inputs[INPUTS], td_tensor *const given[INPUTS])
{
    td_tensor *in[INPUTS];
    for (int i = 0; i < INPUTS; i++) {
        in[i] = td__check_same(call, inputs[0], inputs[i]) ? NULL
                                                           : td__scoped_contiguous(inputs[i]);
        if (!in[i])
            return NULL;
    }
    const td_tensor *x = in[X];
    int64_t shape[TD_MAX_DIMS], n = rows_of(x), hidden = in[W1]->layout.shape[0];
    memcpy(shape, x->layout.shape, sizeof shape);
    shape[x->layout.ndim - 1] = in[W2]->layout.shape[0];
    td_tensor *pre = td__fresh(call, (int64_t[]){n, hidden}, 2, x);
    td_tensor *h = pre ? td__fresh(call, (int64_t[]){n, hidden}, 2, x) : NULL;
    td_tensor *y = h ? td__empty(call, shape, x->layout.ndim, x->layout.dtype, x->storage->device)
                     : NULL;
    if (!y)
        return NULL;
    struct td_tensor rows = td__view_as(x, (int64_t[]){n, last_of(x)}, 2);
    struct td_tensor out = td__view_as(y, (int64_t[]){n, last_of(y)}, 2);
    const td_kernels *kernels = td__kernels_of(y);
    td_status status = kernels->linear_gelu(h, pre, &rows, in[W1], in[B1]);
    y = td__kept(y, status ? status : kernels->linear(&out, h, in[W2], in[B2]));
    bool first = td__would_record(inputs[X]) || td__would_record(inputs[W1]) ||
                 td__would_record(inputs[B1]);
    return td__result(
        &mlp_function, y,
        &(td_node_spec){.inputs = {inputs[X], td__wide_input(given[W1], inputs[W1]), inputs[B1],
                                   td__wide_input(given[W2], inputs[W2]),
                                   td__wide_input(given[B2], inputs[B2])},
                        .input_count = INPUTS,
                        .saved = {[SAVED_X] = td__saved_if(td__would_record(inputs[W1]), in[X]),
                                  [SAVED_W1] = td__saved_if(td__would_record(inputs[X]), in[W1]),
                                  [SAVED_PRE] = td__saved_if(first, pre),
                                  [SAVED_H] = td__saved_if(td__would_record(inputs[W2]), h),
                                  [SAVED_W2] = td__saved_if(first, in[W2])},
                        .saved_count = SAVED});
}

td_tensor *td__f_mlp(td_tensor *x, td_tensor *w1, td_tensor *b1, td_tensor *w2, td_tensor *b2)
{
    td_tensor *const given[] = {x, w1, b1, w2, b2};
    TD__AUTOCAST(TD__CAST_LINEAR, &x, &w1, &b1, &w2, &b2);
    td_tensor *y = NULL;
    if (!x || !w1 || !b1 || !w2 || !b2)
        return td__null(__func__);
    {
        TD_SCOPE;
        y = td_scope_return(mlp((td_tensor *const[]){x, w1, b1, w2, b2}, given));
    }
    return y;
}
