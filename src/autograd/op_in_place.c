/* In-place operators. Each checks everything, changes the elements, and records the change: the
 * tensor becomes a result of what it was before.
 *
 *     x (node A)  --- x.mul_(b) --->  x (node mul_, whose inputs are A and that of b)
 *
 * The change increments the version of the storage, by which the backward of other nodes notices
 * that a tensor they saved is stale. An operator copies the old elements if its own backward needs
 * them; td_f_relu_() needs the new ones, as in PyTorch. */
#include "autograd/autocast.h"
#include "autograd/op_kernel.h"
#include "base/fail.h"

/* ---- Checks ---------------------------------------------------------------------------------------- */

static td_status check_target(const char *call, td_tensor *x)
{
    TD_TRY(td__check_in_place(x, call));
    if (td__layout_repeats(&x->layout))
        return td_fail(TD_ERR_INVALID,
                       "%s: elements of the tensor of shape %s share memory (it was expanded); "
                       "change a td_clone() of it",
                       call, td__shape_of(x));
    return TD_OK;
}

/* The second operand, expanded to the shape of x, and copied if it shares memory with x. */
struct operand {
    td_tensor *given;  /* the caller's */
    td_tensor *stable; /* `given`, or a copy if it shares memory with x; owned */
    td_tensor *view;   /* `stable` expanded to the shape of x; owned */
};

static void free_operand(struct operand *operand)
{
    td_tensor_release(operand->view);
    td_tensor_release(operand->stable);
}

static td_status prepare(const char *call, td_tensor *x, td_tensor *b, struct operand *operand)
{
    if (!x || !b)
        return td__fail_null(call);
    TD_TRY(check_target(call, x));
    TD_TRY(td__check_same(call, x, b));
    if (td_grad_enabled())
        TD_TRY(td__refresh_node(b, call));
    bool near = x->storage == b->storage;
    *operand = (struct operand){.given = b, .stable = near ? td__clone(b) : td_tensor_retain(b)};
    if (!operand->stable)
        return TD_ERR_NOMEM;
    operand->view = td__expand(call, operand->stable, x->layout.shape, x->layout.ndim);
    if (operand->view)
        return TD_OK;
    td_tensor_release(operand->stable);
    return TD_ERR_INVALID;
}

/* Changes x by an operation with b and records it. */
static td_status change(const td_function *function, td_binary op, td_tensor *x,
                        struct operand *b, td_node_spec *spec)
{
    td_status status = td__kernels_of(x)->binary(op, x, x, b->view);
    status = td__kernel_status(function->name, x, status);
    spec->inputs[0] = x;
    spec->inputs[1] = b->given;
    spec->input_count = 2;
    if (!status)
        status = td__record_in_place(function, x, spec);
    return status;
}

/* ---- Constants ------------------------------------------------------------------------------------- */

/* The result does not depend on what the tensor was before. */
static td_status fill_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
{
    (void)node;
    (void)grad_y;
    (void)grad_x;
    return TD_OK;
}

static td_status fill(const td_function *function, td_tensor *x, double value)
{
    if (!x)
        return td__fail_null(function->name);
    TD_TRY(check_target(function->name, x));
    TD_TRY(td__kernel_status(function->name, x, td__kernels_of(x)->fill(x, value)));
    return td__record_in_place(function, x, &(td_node_spec){.inputs = {x}, .input_count = 1});
}

td_status td_fill_(td_tensor *x, double value)
{
    static const td_function function = {.name = "td_fill_", .backward = fill_backward};
    return fill(&function, x, value);
}

td_status td_zero_(td_tensor *x)
{
    static const td_function function = {.name = "td_zero_", .backward = fill_backward};
    return fill(&function, x, 0);
}

/* ---- With another tensor --------------------------------------------------------------------------- */

/* x + alpha b; alpha is 1 or -1 for add and sub. */
static td_status add_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
{
    double alpha = *(const double *)td_node_data(node);
    grad_x[0] = grad_y[0];
    if (!td_node_needs(node, 1))
        return TD_OK;
    grad_x[1] = alpha == 1 ? grad_y[0] : td_mul_scalar(grad_y[0], alpha);
    return td__done(grad_x[1]);
}

static td_status add(const td_function *function, td_binary op, td_tensor *x, td_tensor *b)
{
    TD__AUTOCAST_IN_PLACE(x, &b);
    struct operand operand = {0};
    double alpha = op == TD_BINARY_ADD ? 1 : -1;
    TD_TRY(prepare(function->name, x, b, &operand));
    td_status status = change(function, op, x, &operand,
                              &(td_node_spec){.data = &alpha, .data_size = sizeof alpha});
    free_operand(&operand);
    return status;
}

td_status td_add_(td_tensor *x, td_tensor *b)
{
    static const td_function function = {.name = "td_add_", .backward = add_backward};
    return add(&function, TD_BINARY_ADD, x, b);
}

td_status td_sub_(td_tensor *x, td_tensor *b)
{
    static const td_function function = {.name = "td_sub_", .backward = add_backward};
    return add(&function, TD_BINARY_SUB, x, b);
}

td_status td_add_scaled_(td_tensor *x, td_tensor *b, double alpha)
{
    TD__AUTOCAST_IN_PLACE(x, &b);
    static const td_function function = {.name = "td_add_scaled_", .backward = add_backward};
    struct operand operand = {0};
    TD_TRY(prepare(function.name, x, b, &operand));
    td_status status = td__kernel_status(function.name, x,
                                         td__kernels_of(x)->add_scaled(x, x, operand.view, alpha));
    if (!status)
        status = td__record_in_place(
            &function, x,
            &(td_node_spec){
                .inputs = {x, b}, .input_count = 2, .data = &alpha, .data_size = sizeof alpha});
    free_operand(&operand);
    return status;
}

/* For a product or a quotient: saves a copy of the old x if the gradient of b needs it, so that x
 * may be changed again. */
static td_status change_and_save(const td_function *function, td_binary op, td_tensor *x,
                                 td_tensor *b)
{
    TD__AUTOCAST_IN_PLACE(x, &b);
    struct operand operand = {0};
    TD_TRY(prepare(function->name, x, b, &operand));
    td_tensor *before = NULL;
    td_status status = TD_OK;
    if (td_would_record(&b, 1)) {
        before = td__clone(x);
        status = before ? TD_OK : TD_ERR_NOMEM;
    }
    td_tensor *stable = td_tensor_requires_grad(x) || op == TD_BINARY_DIV ? operand.stable : NULL;
    if (!status)
        status = change(function, op, x, &operand,
                        &(td_node_spec){.saved = {before, stable}, .saved_count = 2});
    td_tensor_release(before);
    free_operand(&operand);
    return status;
}

/* g b, and g times the old x. */
static td_status mul_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
{
    for (int i = 0; i < 2; i++) {
        if (!td_node_needs(node, i))
            continue;
        grad_x[i] = td_mul(grad_y[0], td_node_saved(node, 1 - i));
        TD_TRY(td__done(grad_x[i]));
    }
    return TD_OK;
}

td_status td_mul_(td_tensor *x, td_tensor *b)
{
    static const td_function function = {.name = "td_mul_", .backward = mul_backward};
    return change_and_save(&function, TD_BINARY_MUL, x, b);
}

/* g / b, and -g / b times the old x, over b. */
static td_status div_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
{
    td_tensor *b = td_node_saved(node, 1);
    td_tensor *over = td_div(grad_y[0], b);
    TD_TRY(td__done(over));
    grad_x[0] = over;
    if (!td_node_needs(node, 1))
        return TD_OK;
    grad_x[1] = td_neg(td_mul(over, td_div(td_node_saved(node, 0), b)));
    return td__done(grad_x[1]);
}

td_status td_div_(td_tensor *x, td_tensor *b)
{
    static const td_function function = {.name = "td_div_", .backward = div_backward};
    return change_and_save(&function, TD_BINARY_DIV, x, b);
}

/* ---- With numbers ---------------------------------------------------------------------------------- */

static td_status change_by(const td_function *function, td_binary op, td_tensor *x,
                           double b)
{
    if (!x)
        return td__fail_null(function->name);
    TD_TRY(check_target(function->name, x));
    td_status status = td__kernels_of(x)->binary_scalar(op, x, x, b, false);
    TD_TRY(td__kernel_status(function->name, x, status));
    return td__record_in_place(
        function, x,
        &(td_node_spec){.inputs = {x}, .input_count = 1, .data = &b, .data_size = sizeof b});
}

static td_status add_scalar_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
{
    (void)node;
    grad_x[0] = grad_y[0];
    return TD_OK;
}

td_status td_add_scalar_(td_tensor *x, double b)
{
    static const td_function function = {.name = "td_add_scalar_", .backward = add_scalar_backward};
    return change_by(&function, TD_BINARY_ADD, x, b);
}

static td_status mul_scalar_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
{
    grad_x[0] = td_mul_scalar(grad_y[0], *(const double *)td_node_data(node));
    return td__done(grad_x[0]);
}

td_status td_mul_scalar_(td_tensor *x, double b)
{
    static const td_function function = {.name = "td_mul_scalar_", .backward = mul_scalar_backward};
    return change_by(&function, TD_BINARY_MUL, x, b);
}

/* ---- Functions ------------------------------------------------------------------------------------- */

static td_status relu_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
{
    td_tensor *y = td_node_saved(node, 0);
    if (!y)
        return td__done(y);
    grad_x[0] = td__reuse(grad_y[0]);
    if (!grad_x[0])
        return TD_ERR_NOMEM;
    return td__kernels_of(y)->unary_grad(TD_UNARY_RELU, grad_x[0], grad_y[0], y);
}

td_status td_f_relu_(td_tensor *x)
{
    static const td_function function = {.name = "td_f_relu_", .backward = relu_backward};
    if (!x)
        return td__fail_null(__func__);
    TD_TRY(check_target(function.name, x));
    TD_TRY(td__kernel_status(function.name, x, td__kernels_of(x)->unary(TD_UNARY_RELU, x, x)));
    return td__record_in_place(
        &function, x,
        &(td_node_spec){.inputs = {x}, .input_count = 1, .saved = {x}, .saved_count = 1});
}

static td_status clamp_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
{
    grad_x[0] = td_masked_fill(grad_y[0], td_logical_not(td_node_saved(node, 0)), 0);
    return td__done(grad_x[0]);
}

td_status td_clamp_(td_tensor *x, double low, double high)
{
    static const td_function function = {.name = "td_clamp_", .backward = clamp_backward};
    double bounds[] = {low, high};
    if (!x)
        return td__fail_null(__func__);
    TD_TRY(check_target(function.name, x));
    td_tensor *keeps = NULL;
    if (td_would_record(&x, 1)) {
        {
            TD_SCOPE;
            keeps = td_tensor_retain(td__clamp_keeps(x, bounds));
        }
        TD_TRY(td__done(keeps));
    }
    td_status status = td__kernels_of(x)->clamp(x, x, low, high);
    status = td__kernel_status(function.name, x, status);
    if (!status)
        status = td__record_in_place(
            &function, x,
            &(td_node_spec){.inputs = {x}, .input_count = 1, .saved = {keeps}, .saved_count = 1});
    td_tensor_release(keeps);
    return status;
}
