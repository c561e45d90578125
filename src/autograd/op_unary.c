/* Elementwise functions. Each saves its input, its output or neither; the kernel unary_grad
 * computes the gradient. */
#include "autograd/autocast.h"
#include "autograd/op.h"
#include "base/fail.h"

enum saves { NOTHING, OPERAND, RESULT };

/* The td_function is the first member, so that backward finds the rest from the node's function. */
struct unary {
    td_function function;
    td_unary op;
    enum saves saves;
};

static td_status unary_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
{
    const struct unary *unary = (const struct unary *)node->function;
    td_tensor *saved = unary->saves == NOTHING ? NULL : td_node_saved(node, 0);
    if (!saved && unary->saves != NOTHING)
        return td__done(saved);
    grad_x[0] = td__adopt(td__empty_like(grad_y[0]));
    if (!grad_x[0])
        return TD_ERR_NOMEM;
    return td__kernels_of(grad_x[0])->unary_grad(unary->op, grad_x[0], grad_y[0], saved);
}

static td_tensor *apply(const struct unary *unary, td_tensor *x)
{
    td_tensor *y = td__apply_unary(unary->function.name, unary->op, x);
    return td__result(&unary->function, y,
                      &(td_node_spec){.inputs = {x},
                                      .input_count = 1,
                                      .saved = {unary->saves == RESULT ? y : x},
                                      .saved_count = unary->saves != NOTHING});
}

td_tensor *td_neg(td_tensor *x)
{
    static const struct unary neg = {
        {.name = "td_neg", .backward = unary_backward}, TD_UNARY_NEG, NOTHING};
    return apply(&neg, x);
}

td_tensor *td_abs(td_tensor *x)
{
    static const struct unary abs = {
        {.name = "td_abs", .backward = unary_backward}, TD_UNARY_ABS, OPERAND};
    return apply(&abs, x);
}

td_tensor *td_square(td_tensor *x)
{
    TD__AUTOCAST_1(td_square, TD__CAST_SQUARE, x);
    static const struct unary square = {
        {.name = "td_square", .backward = unary_backward}, TD_UNARY_SQUARE, OPERAND};
    return apply(&square, x);
}

td_tensor *td_exp(td_tensor *x)
{
    TD__AUTOCAST_1(td_exp, TD__CAST_EXP, x);
    static const struct unary exp = {
        {.name = "td_exp", .backward = unary_backward}, TD_UNARY_EXP, RESULT};
    return apply(&exp, x);
}

td_tensor *td_ln(td_tensor *x)
{
    TD__AUTOCAST_1(td_ln, TD__CAST_LN, x);
    static const struct unary ln = {
        {.name = "td_ln", .backward = unary_backward}, TD_UNARY_LOG, OPERAND};
    return apply(&ln, x);
}

td_tensor *td_log1p(td_tensor *x)
{
    TD__AUTOCAST_1(td_log1p, TD__CAST_LOG1P, x);
    static const struct unary log1p = {
        {.name = "td_log1p", .backward = unary_backward}, TD_UNARY_LOG1P, OPERAND};
    return apply(&log1p, x);
}

td_tensor *td_sqrt(td_tensor *x)
{
    static const struct unary sqrt = {
        {.name = "td_sqrt", .backward = unary_backward}, TD_UNARY_SQRT, RESULT};
    return apply(&sqrt, x);
}

td_tensor *td_rsqrt(td_tensor *x)
{
    TD__AUTOCAST_1(td_rsqrt, TD__CAST_RSQRT, x);
    static const struct unary rsqrt = {
        {.name = "td_rsqrt", .backward = unary_backward}, TD_UNARY_RSQRT, RESULT};
    return apply(&rsqrt, x);
}

td_tensor *td_reciprocal(td_tensor *x)
{
    TD__AUTOCAST_1(td_reciprocal, TD__CAST_RECIPROCAL, x);
    static const struct unary reciprocal = {
        {.name = "td_reciprocal", .backward = unary_backward}, TD_UNARY_RECIPROCAL, RESULT};
    return apply(&reciprocal, x);
}

td_tensor *td_sin(td_tensor *x)
{
    static const struct unary sin = {
        {.name = "td_sin", .backward = unary_backward}, TD_UNARY_SIN, OPERAND};
    return apply(&sin, x);
}

td_tensor *td_cos(td_tensor *x)
{
    static const struct unary cos = {
        {.name = "td_cos", .backward = unary_backward}, TD_UNARY_COS, OPERAND};
    return apply(&cos, x);
}

td_tensor *td_erf(td_tensor *x)
{
    static const struct unary erf = {
        {.name = "td_erf", .backward = unary_backward}, TD_UNARY_ERF, OPERAND};
    return apply(&erf, x);
}

/* ---- Without a gradient ---------------------------------------------------------------------------- */

td_tensor *td_sign(td_tensor *x)
{
    return td__adopt(td__apply_unary("td_sign", TD_UNARY_SIGN, x));
}

td_tensor *td_floor(td_tensor *x)
{
    return td__adopt(td__apply_unary("td_floor", TD_UNARY_FLOOR, x));
}

td_tensor *td_ceil(td_tensor *x)
{
    return td__adopt(td__apply_unary("td_ceil", TD_UNARY_CEIL, x));
}

td_tensor *td_round(td_tensor *x)
{
    return td__adopt(td__apply_unary("td_round", TD_UNARY_ROUND, x));
}

/* ---- Clamp ----------------------------------------------------------------------------------------- */

td_tensor *td__clamp_keeps(td_tensor *x, const double *bounds)
{
    return td_logical_and(td_ge_scalar(x, bounds[0]), td_le_scalar(x, bounds[1]));
}

static td_status clamp_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
{
    td_tensor *keeps = td__clamp_keeps(td_node_saved(node, 0), td_node_data(node));
    grad_x[0] = td_masked_fill(grad_y[0], td_logical_not(keeps), 0);
    return td__done(grad_x[0]);
}

td_tensor *td_clamp(td_tensor *x, double low, double high)
{
    static const td_function function = {.name = "td_clamp", .backward = clamp_backward};
    double bounds[] = {low, high};
    td_tensor *y = td__empty_like(x);
    if (y)
        y = td__kept(y, td__kernel_status(function.name, x,
                                          td__kernels_of(x)->clamp(y, x, bounds[0], bounds[1])));
    return td__result(&function, y,
                      &(td_node_spec){.inputs = {x},
                                      .input_count = 1,
                                      .saved = {x},
                                      .saved_count = 1,
                                      .data = bounds,
                                      .data_size = sizeof bounds});
}
