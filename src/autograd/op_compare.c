/* Comparisons, which are not recorded, and td_where() and its kin. */
#include "autograd/autocast.h"
#include "autograd/op.h"
#include "base/fail.h"

#include <math.h>

/* ---- Element by element -------------------------------------------------------------------------- */

td_tensor *td_eq(td_tensor *a, td_tensor *b)
{
    TD__AUTOCAST_2(td_eq, TD__CAST_COMPARE, a, b);
    return td__adopt(td__apply_binary("td_eq", TD_BINARY_EQ, a, b));
}

td_tensor *td_ne(td_tensor *a, td_tensor *b)
{
    TD__AUTOCAST_2(td_ne, TD__CAST_COMPARE, a, b);
    return td__adopt(td__apply_binary("td_ne", TD_BINARY_NE, a, b));
}

td_tensor *td_lt(td_tensor *a, td_tensor *b)
{
    TD__AUTOCAST_2(td_lt, TD__CAST_COMPARE, a, b);
    return td__adopt(td__apply_binary("td_lt", TD_BINARY_LT, a, b));
}

td_tensor *td_le(td_tensor *a, td_tensor *b)
{
    TD__AUTOCAST_2(td_le, TD__CAST_COMPARE, a, b);
    return td__adopt(td__apply_binary("td_le", TD_BINARY_LE, a, b));
}

td_tensor *td_gt(td_tensor *a, td_tensor *b)
{
    TD__AUTOCAST_2(td_gt, TD__CAST_COMPARE, a, b);
    return td__adopt(td__apply_binary("td_gt", TD_BINARY_GT, a, b));
}

td_tensor *td_ge(td_tensor *a, td_tensor *b)
{
    TD__AUTOCAST_2(td_ge, TD__CAST_COMPARE, a, b);
    return td__adopt(td__apply_binary("td_ge", TD_BINARY_GE, a, b));
}

td_tensor *td_eq_scalar(td_tensor *a, double b)
{
    return td__adopt(td__apply_scalar("td_eq_scalar", TD_BINARY_EQ, a, b, false));
}

td_tensor *td_ne_scalar(td_tensor *a, double b)
{
    return td__adopt(td__apply_scalar("td_ne_scalar", TD_BINARY_NE, a, b, false));
}

td_tensor *td_lt_scalar(td_tensor *a, double b)
{
    return td__adopt(td__apply_scalar("td_lt_scalar", TD_BINARY_LT, a, b, false));
}

td_tensor *td_le_scalar(td_tensor *a, double b)
{
    return td__adopt(td__apply_scalar("td_le_scalar", TD_BINARY_LE, a, b, false));
}

td_tensor *td_gt_scalar(td_tensor *a, double b)
{
    return td__adopt(td__apply_scalar("td_gt_scalar", TD_BINARY_GT, a, b, false));
}

td_tensor *td_ge_scalar(td_tensor *a, double b)
{
    return td__adopt(td__apply_scalar("td_ge_scalar", TD_BINARY_GE, a, b, false));
}

td_tensor *td_logical_and(td_tensor *a, td_tensor *b)
{
    return td__adopt(td__apply_binary("td_logical_and", TD_BINARY_AND, a, b));
}

td_tensor *td_logical_or(td_tensor *a, td_tensor *b)
{
    return td__adopt(td__apply_binary("td_logical_or", TD_BINARY_OR, a, b));
}

td_tensor *td_logical_xor(td_tensor *a, td_tensor *b)
{
    return td__adopt(td__apply_binary("td_logical_xor", TD_BINARY_XOR, a, b));
}

td_tensor *td_logical_not(td_tensor *a)
{
    return td__adopt(td__apply_unary("td_logical_not", TD_UNARY_NOT, a));
}

td_tensor *td_isnan(td_tensor *a)
{
    return td__adopt(td__apply_unary("td_isnan", TD_UNARY_ISNAN, a));
}

/* ---- As a whole ------------------------------------------------------------------------------------ */

bool td_equal(td_tensor *a, td_tensor *b)
{
    if (!a || !b || !td__same_shape(a, b) || a->layout.dtype != b->layout.dtype)
        return false;
    bool equal = false;
    {
        TD_SCOPE;
        TD_NO_GRAD;
        equal = td_item(td_all(td__adopt(td__apply_binary("td_equal", TD_BINARY_EQ, a, b)))) == 1;
    }
    return equal;
}

/* In f64. Infinities of the same sign are close, an infinity and a finite number are not. */
static bool all_close(td_tensor *a, td_tensor *b, double rtol, double atol)
{
    a = td_to_dtype(a, TD_F64);
    b = td_to_dtype(b, TD_F64);
    td_tensor *allowed = td_add_scalar(td_mul_scalar(td_abs(b), rtol), atol);
    td_tensor *error = td_abs(td_sub(a, b));
    td_tensor *close = td_logical_and(td_le(error, allowed), td_lt_scalar(error, INFINITY));
    return td_item(td_all(td_logical_or(close, td_eq(a, b)))) == 1;
}

bool td_allclose(td_tensor *a, td_tensor *b, double rtol, double atol)
{
    if (!a || !b || !td__same_shape(a, b) || a->layout.dtype != b->layout.dtype)
        return false;
    if (a->layout.dtype >= TD_COMPLEX64) {
        td_fail(TD_ERR_INVALID, "td_allclose: it is not defined for %s",
                td_dtype_name(a->layout.dtype));
        return false;
    }
    bool close = false;
    {
        TD_SCOPE;
        TD_NO_GRAD;
        close = all_close(a, b, rtol, atol);
    }
    return close;
}

/* ---- Choosing -------------------------------------------------------------------------------------- */

/* The condition must be bool, on the device of the others. */
static td_status check_condition(const char *call, const char *what, const td_tensor *condition,
                                 const td_tensor *x)
{
    if (condition->layout.dtype != TD_BOOL)
        return td_fail(TD_ERR_INVALID, "%s: the %s is %s; it must be bool", call, what,
                       td_dtype_name(condition->layout.dtype));
    if (condition->storage->device != x->storage->device)
        return td_fail(TD_ERR_INVALID,
                       "%s: the %s is on %s and the elements on %s; td_tensor_to() moves one", call,
                       what, condition->storage->device->name, x->storage->device->name);
    return TD_OK;
}

td_tensor *td__apply_where(const char *call, td_tensor *condition, td_tensor *a, td_tensor *b)
{
    struct td__pair pair;
    int64_t shape[TD_MAX_DIMS];
    td_tensor *views[3] = {0}, *out = NULL;
    if (!condition || !a || !b)
        return td__null(call);
    if (check_condition(call, "condition", condition, a) || td__pair_init(&pair, call, a, b))
        return NULL;
    int ndim = td__broadcast(call, condition, pair.a, shape);
    if (ndim < 0)
        goto free_pair;
    views[0] = td__expand(call, condition, shape, ndim);
    views[1] = td__expand(call, pair.a, shape, ndim);
    views[2] = td__expand(call, pair.b, shape, ndim);
    if (views[0] && views[1] && views[2])
        out = td__empty(call, shape, ndim, a->layout.dtype, a->storage->device);
    if (out)
        out = td__kept(
            out, td__kernel_status(call, a,
                                   td__kernels_of(a)->where(out, views[0], views[1], views[2])));
    for (int i = 0; i < 3; i++)
        td_tensor_release(views[i]);
free_pair:
    td__pair_free(&pair);
    return out;
}

static td_status where_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
{
    td_tensor *condition = td_node_saved(node, 0);
    td_tensor *zero = td__adopt(td__number("td_backward", 0, grad_y[0]));
    if (td_node_needs(node, 0)) {
        grad_x[0] = td_where(condition, grad_y[0], zero);
        TD_TRY(td__done(grad_x[0]));
    }
    if (!td_node_needs(node, 1))
        return TD_OK;
    grad_x[1] = td_where(condition, zero, grad_y[0]);
    return td__done(grad_x[1]);
}

td_tensor *td_where(td_tensor *condition, td_tensor *a, td_tensor *b)
{
    TD__AUTOCAST(TD__CAST_WHERE, &a, &b);
    static const td_function function = {.name = "td_where", .backward = where_backward};
    return td__result(
        &function, td__apply_where(function.name, condition, a, b),
        &(td_node_spec){
            .inputs = {a, b}, .input_count = 2, .saved = {condition}, .saved_count = 1});
}

static td_status masked_fill_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
{
    grad_x[0] = td_masked_fill(grad_y[0], td_node_saved(node, 0), 0);
    return td__done(grad_x[0]);
}

td_tensor *td_masked_fill(td_tensor *x, td_tensor *mask, double value)
{
    static const td_function function = {.name = "td_masked_fill",
                                         .backward = masked_fill_backward};
    if (!x || !mask)
        return td__null(__func__);
    if (check_condition(function.name, "mask", mask, x))
        return NULL;
    td_tensor *wide = td__expand(function.name, mask, x->layout.shape, x->layout.ndim);
    td_tensor *number = wide ? td__number(function.name, value, x) : NULL;
    td_tensor *y = number ? td__apply_where(function.name, wide, number, x) : NULL;
    td_tensor_release(number);
    td_tensor_release(wide);
    return td__result(
        &function, y,
        &(td_node_spec){.inputs = {x}, .input_count = 1, .saved = {mask}, .saved_count = 1});
}
