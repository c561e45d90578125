/* Dropout of elements, or of whole channels, with the random numbers of PyTorch on the host. The mask is saved,
 * one bool a draw. */
#include "autograd/op_kernel.h"
#include "base/fail.h"

struct dropout {
    double p;
    int64_t block; /* elements that one draw decides on */
};

static td_status dropout_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
{
    const struct dropout *dropout = td_node_data(node);
    td_tensor *keep = td_node_saved(node, 0);
    TD_TRY(td__done(keep));
    td_tensor *grad = td__scoped_contiguous(grad_y[0]);
    grad_x[0] = grad ? td__adopt(td__empty_like(grad)) : NULL;
    if (!grad_x[0])
        return TD_ERR_NOMEM;
    return td__kernels_of(grad)->dropout_grad(grad_x[0], grad, keep, dropout->p, dropout->block);
}

static const td_function dropout_function = {.name = "td_f_dropout", .backward = dropout_backward};
static const td_function dropout2d_function = {.name = "td_f_dropout2d",
                                               .backward = dropout_backward};

static td_tensor *dropped(const td_function *function, td_tensor *x, struct dropout dropout)
{
    int64_t draws = x->layout.numel / dropout.block;
    td_tensor *in = td__scoped_contiguous(x);
    td_tensor *keep = td__adopt(td__empty(function->name, &draws, 1, TD_BOOL, x->storage->device));
    td_generator *generator = td_default_generator(x->storage->device);
    td_tensor *y = in && keep && generator ? td__empty_like(x) : NULL;
    if (!y)
        return NULL;
    y = td__kept(y, td__kernels_of(x)->dropout(y, keep, in, dropout.p, dropout.block, generator));
    return td__result(function, y,
                      &(td_node_spec){.inputs = {x},
                                      .input_count = 1,
                                      .saved = {keep},
                                      .saved_count = 1,
                                      .data = &dropout,
                                      .data_size = sizeof dropout});
}

/* `dims`: one draw for each index of that many leading dimensions; -1: of all. */
static td_tensor *maybe_dropped(const td_function *function, td_tensor *x, double p, bool training,
                                int dims)
{
    if (!x)
        return td__null(function->name);
    if (td__check_float(function->name, x))
        return NULL;
    if (!(p >= 0 && p <= 1)) {
        td_fail(TD_ERR_INVALID, "%s: %g is no probability; it must be 0 to 1", function->name, p);
        return NULL;
    }
    if (dims >= 0 && td__check_dims(function->name, "x", x, dims, TD_MAX_DIMS))
        return NULL;
    if (!training || p == 0 || x->layout.numel == 0)
        return td__adopt(td_tensor_retain(x));
    struct dropout dropout = {.p = p, .block = 1};
    for (int d = dims; dims >= 0 && d < x->layout.ndim; d++)
        dropout.block *= x->layout.shape[d];
    td_tensor *y = NULL;
    {
        TD_SCOPE;
        y = td_scope_return(dropped(function, x, dropout));
    }
    return y;
}

td_tensor *td_f_dropout(td_tensor *x, double p, bool training)
{
    return maybe_dropped(&dropout_function, x, p, training, -1);
}

td_tensor *td_f_dropout2d(td_tensor *x, double p, bool training)
{
    return maybe_dropped(&dropout2d_function, x, p, training, 2);
}
