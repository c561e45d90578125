/* The linear layer, y = x w^T + b: x [..., I], w [O, I], b [O], y [..., O]. With the leading
 * dimensions merged to N:
 *
 *     grad_x [N, I] = grad_y w        grad_w [O, I] = grad_y^T x        grad_b [O] = sum of its rows
 *
 * The gradients of w and b are written into the leaves', also where autocast has cast them: the node has them as they were
 * given. */
#include "autograd/autocast.h"
#include "autograd/op_kernel.h"
#include "base/fail.h"

#include <string.h>

static int64_t rows_of(const struct td__layout *x)
{
    int64_t rows = 1;
    for (int d = 0; d < x->ndim - 1; d++)
        rows *= x->shape[d];
    return rows;
}

static td_status linear_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grads)
{
    const struct td__layout *of_y = &grad_y[0]->layout;
    const int64_t n = rows_of(of_y), outputs = of_y->shape[of_y->ndim - 1];
    td_tensor *grad = td__adopt(td__reshape(grad_y[0], (int64_t[]){n, outputs}, 2, NULL));
    if (!grad)
        return TD_ERR_NOMEM;
    const td_kernels *kernels = td__kernels_of(grad);
    if (td_node_needs(node, 0)) {
        td_tensor *w = td_node_saved(node, 1);
        TD_TRY(td__done(w));
        bool accumulate;
        grads[0] = td__grad_target_or_new(node, 0, &accumulate);
        if (!grads[0])
            return TD_ERR_NOMEM;
        struct td_tensor grad_x = td__view_as(grads[0], (int64_t[]){n, w->layout.shape[1]}, 2);
        TD_TRY(kernels->matmul(&grad_x, grad, w, 1, accumulate));
    }
    if (td_node_needs(node, 1))
        TD_TRY(td__weight_grad(node, 1, grad, td_node_saved(node, 0), &grads[1]));
    struct td__grad_buffer bias;
    TD_TRY(td__grad_buffer_open(&bias, node, 2));
    if (!bias.grad)
        return TD_OK;
    struct td_tensor sums = td__view_as(bias.into, (int64_t[]){1, outputs}, 2);
    TD_TRY(kernels->reduce(TD_REDUCE_KIND_SUM, &sums, grad, 1u << 0));
    return td__grad_buffer_close(&bias, &grads[2]);
}

static const td_function linear_function = {.name = "td_f_linear", .backward = linear_backward};

static td_status check(td_tensor *x, td_tensor *weight, td_tensor *bias)
{
    static const char call[] = "td_f_linear";
    TD_TRY(td__check_same(call, x, weight));
    TD_TRY(td__check_float(call, x));
    TD_TRY(td__check_dims(call, "weight", weight, 2, 2));
    const struct td__layout *of_x = &x->layout, *of_w = &weight->layout;
    if (of_x->ndim == 0 || of_x->shape[of_x->ndim - 1] != of_w->shape[1])
        return td_fail(TD_ERR_INVALID,
                       "%s: x has the shape %s, weight %s; the last size of x must be %lld", call,
                       td__shape_of(x), td__shape_of(weight), (long long)of_w->shape[1]);
    return td__check_optional(call, "bias", bias, x, of_w->shape, 1);
}

/* given: weight and bias before autocast. */
static td_tensor *linear(td_tensor *x, td_tensor *weight, td_tensor *bias,
                         td_tensor *const given[2])
{
    if (check(x, weight, bias))
        return NULL;
    td_tensor *in = td__scoped_contiguous(x), *w = td__scoped_contiguous(weight);
    td_tensor *b = td__scoped_contiguous(bias);
    if (!in || !w || (bias && !b))
        return NULL;
    int64_t shape[TD_MAX_DIMS];
    int ndim = x->layout.ndim;
    const int64_t n = rows_of(&x->layout), outputs = w->layout.shape[0];
    memcpy(shape, x->layout.shape, sizeof shape);
    shape[ndim - 1] = outputs;
    td_tensor *y = td__empty("td_f_linear", shape, ndim, x->layout.dtype, x->storage->device);
    if (!y)
        return NULL;
    struct td_tensor out = td__view_as(y, (int64_t[]){n, outputs}, 2);
    struct td_tensor rows = td__view_as(in, (int64_t[]){n, w->layout.shape[1]}, 2);
    y = td__kept(y, td__kernels_of(y)->linear(&out, &rows, w, b));
    return td__result(&linear_function, y,
                      &(td_node_spec){.inputs = {x, td__wide_input(given[0], weight),
                                                 td__wide_input(given[1], bias)},
                                      .input_count = 3,
                                      .saved = {td__saved_if(td__would_record(weight), in),
                                                td__saved_if(td__would_record(x), w)},
                                      .saved_count = 2});
}

td_tensor *td_f_linear(td_tensor *x, td_tensor *weight, td_tensor *bias)
{
    td_tensor *const given[] = {weight, bias};
    TD__AUTOCAST(TD__CAST_LINEAR, &x, &weight, &bias);
    td_tensor *y = NULL;
    if (!x || !weight)
        return td__null(__func__);
    {
        TD_SCOPE;
        y = td_scope_return(linear(x, weight, bias, given));
    }
    return y;
}
