/* Activations, and softmax.
 *
 * Each saves its input or its output, whichever its gradient is computed from, and reuses the
 * memory of the output's gradient if that is not shared. */
#include "autograd/autocast.h"
#include "autograd/op_kernel.h"
#include "base/fail.h"

/* ---- Element by element ----------------------------------------------------------------------------- */

static td_status unary_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
{
    const td_unary *op = td_node_data(node);
    td_tensor *saved = td_node_saved(node, 0);
    TD_TRY(td__done(saved));
    grad_x[0] = td__reuse(grad_y[0]);
    if (!grad_x[0])
        return TD_ERR_NOMEM;
    return td__kernels_of(saved)->unary_grad(*op, grad_x[0], grad_y[0], saved);
}

enum saves { SAVES_X, SAVES_Y };

static td_tensor *activated(const td_function *function, td_unary op, td_tensor *x,
                            enum saves saves)
{
    td_tensor *y = td__apply_unary(function->name, op, x);
    return td__result(function, y,
                      &(td_node_spec){.inputs = {x},
                                      .input_count = 1,
                                      .saved = {saves == SAVES_Y ? y : x},
                                      .saved_count = 1,
                                      .data = &op,
                                      .data_size = sizeof op});
}

td_tensor *td_f_relu(td_tensor *x)
{
    static const td_function function = {.name = "td_f_relu", .backward = unary_backward};
    return activated(&function, TD_UNARY_RELU, x, SAVES_Y);
}

td_tensor *td_f_gelu(td_tensor *x)
{
    static const td_function function = {.name = "td_f_gelu", .backward = unary_backward};
    return activated(&function, TD_UNARY_GELU, x, SAVES_X);
}

td_tensor *td_f_gelu_tanh(td_tensor *x)
{
    static const td_function function = {.name = "td_f_gelu_tanh", .backward = unary_backward};
    return activated(&function, TD_UNARY_GELU_TANH, x, SAVES_X);
}

td_tensor *td_f_silu(td_tensor *x)
{
    static const td_function function = {.name = "td_f_silu", .backward = unary_backward};
    return activated(&function, TD_UNARY_SILU, x, SAVES_X);
}

td_tensor *td_f_tanh(td_tensor *x)
{
    static const td_function function = {.name = "td_f_tanh", .backward = unary_backward};
    return activated(&function, TD_UNARY_TANH, x, SAVES_Y);
}

td_tensor *td_f_sigmoid(td_tensor *x)
{
    static const td_function function = {.name = "td_f_sigmoid", .backward = unary_backward};
    return activated(&function, TD_UNARY_SIGMOID, x, SAVES_Y);
}

/* ---- Softmax ------------------------------------------------------------------------------------------ */

/* x as [A, D, B], with D the dimension that is summed over. */
struct columns {
    int64_t shape[3];
};

static struct columns columns_of(const td_tensor *x, int dim)
{
    struct columns columns = {{1, 1, 1}};
    for (int d = 0; d < x->layout.ndim; d++)
        columns.shape[(d >= dim) + (d > dim)] *= x->layout.shape[d];
    return columns;
}

static td_status softmax_backward(td_node *node, td_tensor *grad_y, bool logarithm,
                                  td_tensor **grad_x)
{
    const struct columns *columns = td_node_data(node);
    td_tensor *saved = td_node_saved(node, 0);
    TD_TRY(td__done(saved));
    grad_x[0] = td__reuse(grad_y);
    td_tensor *grad = td__scoped_contiguous(grad_y);
    if (!grad || !grad_x[0])
        return TD_ERR_NOMEM;
    struct td_tensor y = td__view_as(saved, columns->shape, 3);
    struct td_tensor from = td__view_as(grad, columns->shape, 3);
    struct td_tensor into = td__view_as(grad_x[0], columns->shape, 3);
    return td__kernels_of(saved)->softmax_grad(&into, &from, &y, logarithm);
}

static td_status plain_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
{
    return softmax_backward(node, grad_y[0], false, grad_x);
}

static td_status logarithm_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
{
    return softmax_backward(node, grad_y[0], true, grad_x);
}

static const td_function softmax_function = {.name = "td_f_softmax", .backward = plain_backward};
static const td_function log_softmax_function = {.name = "td_f_log_softmax",
                                                 .backward = logarithm_backward};

static td_tensor *softmax(const td_function *function, td_tensor *x, int dim)
{
    if (!x)
        return td__null(function->name);
    if (td__check_float(function->name, x))
        return NULL;
    dim = td__wrap_dim(x, function->name, dim);
    if (dim < 0)
        return NULL;
    struct columns columns = columns_of(x, dim);
    td_tensor *in = td__contiguous(x), *y = in ? td__empty_like(x) : NULL;
    if (y) {
        struct td_tensor from = td__view_as(in, columns.shape, 3);
        struct td_tensor out = td__view_as(y, columns.shape, 3);
        y = td__kept(y, td__kernels_of(x)->softmax(&out, &from, function == &log_softmax_function));
    }
    td_tensor_release(in);
    return td__result(function, y,
                      &(td_node_spec){.inputs = {x},
                                      .input_count = 1,
                                      .saved = {y},
                                      .saved_count = 1,
                                      .data = &columns,
                                      .data_size = sizeof columns});
}

td_tensor *td_f_softmax(td_tensor *x, int dim)
{
    TD__AUTOCAST(TD__CAST_SOFTMAX, &x);
    return softmax(&softmax_function, x, dim);
}

td_tensor *td_f_log_softmax(td_tensor *x, int dim)
{
    TD__AUTOCAST(TD__CAST_LOG_SOFTMAX, &x);
    return softmax(&log_softmax_function, x, dim);
}
