/* Arithmetic with two tensors, or a tensor and a number. Gradients have the shape of the result:
 * the engine sums it over broadcast dimensions. An operand is saved only if the gradient of the
 * other one needs it. */
#include "autograd/autocast.h"
#include "autograd/op_kernel.h"
#include "base/fail.h"

/* ---- Two tensors --------------------------------------------------------------------------------- */

/* Saves a for the gradient of b, and b for that of a. `y` is raw. */
static td_tensor *recorded(const td_function *function, td_tensor *y, td_tensor *a, td_tensor *b,
                           bool saves)
{
    td_node_spec spec = {.inputs = {a, b}, .input_count = 2};
    if (saves) {
        spec.saved[0] = td_tensor_requires_grad(b) ? a : NULL;
        spec.saved[1] = td_tensor_requires_grad(a) ? b : NULL;
        spec.saved_count = 2;
    }
    return td__result(function, y, &spec);
}

static td_tensor *binary(const td_function *function, td_binary op, td_tensor *a, td_tensor *b,
                         bool saves)
{
    return recorded(function, td__apply_binary(function->name, op, a, b), a, b, saves);
}

/* ---- f32 with halves under autocast: without a cast, where the device can do that -------------------- */

static bool is_half(const td_tensor *x)
{
    return x->layout.dtype == TD_F16 || x->layout.dtype == TD_BF16;
}

/* Operands of one shape, so that gradients are rounded where the cast's gradient would be. */
static bool is_mixed(const td_tensor *a, const td_tensor *b)
{
    return td__autocast_on && a && b && td__same_shape(a, b) && a->layout.ndim > 0 &&
           a->storage->device == b->storage->device && td__kernels_of(a)->binary_mixed &&
           td__autocast_dtype(a) != TD_F32 &&
           ((a->layout.dtype == TD_F32 && is_half(b)) || (is_half(a) && b->layout.dtype == TD_F32));
}

/* Raw; NULL also where the device cannot do it: then the caller casts. */
static td_tensor *apply_mixed(td_binary op, td_tensor *a, td_tensor *b)
{
    td_tensor *y = td__empty_like_as(a, TD_F32);
    return y ? td__kept(y, td__kernels_of(a)->binary_mixed(op, y, a, b)) : NULL;
}

/* As binary(); NULL, where the device cannot do it, without an error. */
static td_tensor *mixed(const td_function *function, td_binary op, td_tensor *a, td_tensor *b,
                        bool saves)
{
    td_tensor *y = is_mixed(a, b) ? apply_mixed(op, a, b) : NULL;
    return y ? recorded(function, y, a, b, saves) : NULL;
}

/* A gradient in the dtype of its input. */
static td_status give(td_node *node, int index, td_tensor *grad, td_tensor **grad_x)
{
    if (!td_node_needs(node, index))
        return TD_OK;
    td_dtype dtype = td__input_layout(node, index)->dtype;
    grad_x[index] = grad && grad->layout.dtype != dtype ? td_to_dtype(grad, dtype) : grad;
    return td__done(grad_x[index]);
}

/* A product in backward. */
static td_tensor *product(td_tensor *grad, td_tensor *other)
{
    if (!other || grad->layout.dtype == other->layout.dtype)
        return td_mul(grad, other);
    td_tensor *y = apply_mixed(TD_BINARY_MUL, grad, other);
    return y ? td__adopt(y) : td_mul(grad, td_to_dtype(other, grad->layout.dtype));
}

/* ---- The operators ------------------------------------------------------------------------------- */

static td_status add_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
{
    TD_TRY(give(node, 0, grad_y[0], grad_x));
    return give(node, 1, grad_y[0], grad_x);
}

td_tensor *td_add(td_tensor *a, td_tensor *b)
{
    static const td_function function = {.name = "td_add", .backward = add_backward};
    td_tensor *y = mixed(&function, TD_BINARY_ADD, a, b, false);
    if (y)
        return y;
    TD__AUTOCAST_2(td_add, TD__CAST_BINARY, a, b);
    return binary(&function, TD_BINARY_ADD, a, b, false);
}

static td_status sub_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
{
    TD_TRY(give(node, 0, grad_y[0], grad_x));
    return td_node_needs(node, 1) ? give(node, 1, td_neg(grad_y[0]), grad_x) : TD_OK;
}

td_tensor *td_sub(td_tensor *a, td_tensor *b)
{
    static const td_function function = {.name = "td_sub", .backward = sub_backward};
    td_tensor *y = mixed(&function, TD_BINARY_SUB, a, b, false);
    if (y)
        return y;
    TD__AUTOCAST_2(td_sub, TD__CAST_BINARY, a, b);
    return binary(&function, TD_BINARY_SUB, a, b, false);
}

static td_status add_scaled_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
{
    const double *alpha = td_node_data(node);
    grad_x[0] = grad_y[0];
    if (!td_node_needs(node, 1))
        return TD_OK;
    grad_x[1] = td_mul_scalar(grad_y[0], *alpha);
    return td__done(grad_x[1]);
}

td_tensor *td_add_scaled(td_tensor *a, td_tensor *b, double alpha)
{
    TD__AUTOCAST(TD__CAST_BINARY, &a, &b);
    static const td_function function = {.name = "td_add_scaled", .backward = add_scaled_backward};
    struct td__pair pair;
    if (!a || !b)
        return td__null(__func__);
    if (td__pair_init(&pair, function.name, a, b))
        return NULL;
    td_tensor *y = td__empty(function.name, pair.shape, pair.ndim, a->layout.dtype,
                             a->storage->device);
    if (y)
        y = td__kept(y, td__kernel_status(function.name, a,
                                          td__kernels_of(a)->add_scaled(y, pair.a, pair.b, alpha)));
    td__pair_free(&pair);
    return td__result(
        &function, y,
        &(td_node_spec){
            .inputs = {a, b}, .input_count = 2, .data = &alpha, .data_size = sizeof alpha});
}

static td_status mul_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
{
    for (int i = 0; i < 2; i++) {
        if (!td_node_needs(node, i))
            continue;
        TD_TRY(give(node, i, product(grad_y[0], td_node_saved(node, 1 - i)), grad_x));
    }
    return TD_OK;
}

td_tensor *td_mul(td_tensor *a, td_tensor *b)
{
    static const td_function function = {.name = "td_mul", .backward = mul_backward};
    td_tensor *y = mixed(&function, TD_BINARY_MUL, a, b, true);
    if (y)
        return y;
    TD__AUTOCAST_2(td_mul, TD__CAST_BINARY, a, b);
    return binary(&function, TD_BINARY_MUL, a, b, true);
}

/* g / b, and -g (a / b) / b. */
static td_status div_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
{
    td_tensor *b = td_node_saved(node, 1);
    if (td_node_needs(node, 0)) {
        grad_x[0] = td_div(grad_y[0], b);
        TD_TRY(td__done(grad_x[0]));
    }
    if (!td_node_needs(node, 1))
        return TD_OK;
    td_tensor *slope = td_div(td_div(td_node_saved(node, 0), b), b);
    grad_x[1] = td_neg(td_mul(grad_y[0], slope));
    return td__done(grad_x[1]);
}

td_tensor *td_div(td_tensor *a, td_tensor *b)
{
    TD__AUTOCAST_2(td_div, TD__CAST_BINARY, a, b);
    static const td_function function = {.name = "td_div", .backward = div_backward};
    return td__result(&function, td__apply_binary(function.name, TD_BINARY_DIV, a, b),
                      &(td_node_spec){.inputs = {a, b},
                                      .input_count = 2,
                                      .saved = {td_tensor_requires_grad(b) ? a : NULL, b},
                                      .saved_count = 2});
}

/* g b a^(b-1), which is 0 for b = 0, also where a is 0. */
static td_tensor *pow_grad_base(td_tensor *g, td_tensor *a, td_tensor *b)
{
    td_tensor *slope = td_mul(b, td_pow(a, td_sub_scalar(b, 1)));
    return td_masked_fill(td_mul(g, slope), td_eq_scalar(b, 0), 0);
}

/* g a^b ln a, which is 0 for a = 0 and b >= 0. */
static td_tensor *pow_grad_exponent(td_tensor *g, td_tensor *a, td_tensor *b, td_tensor *y)
{
    td_tensor *flat = td_logical_and(td_eq_scalar(a, 0), td_ge_scalar(b, 0));
    return td_masked_fill(td_mul(g, td_mul(y, td_ln(a))), flat, 0);
}

static td_status pow_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
{
    td_tensor *a = td_node_saved(node, 0), *b = td_node_saved(node, 1);
    if (td_node_needs(node, 0)) {
        grad_x[0] = pow_grad_base(grad_y[0], a, b);
        TD_TRY(td__done(grad_x[0]));
    }
    if (!td_node_needs(node, 1))
        return TD_OK;
    grad_x[1] = pow_grad_exponent(grad_y[0], a, b, td_node_saved(node, 2));
    return td__done(grad_x[1]);
}

td_tensor *td_pow(td_tensor *a, td_tensor *b)
{
    TD__AUTOCAST_2(td_pow, TD__CAST_POW, a, b);
    static const td_function function = {.name = "td_pow", .backward = pow_backward};
    td_tensor *y = td__apply_binary(function.name, TD_BINARY_POW, a, b);
    return td__result(&function, y,
                      &(td_node_spec){.inputs = {a, b},
                                      .input_count = 2,
                                      .saved = {a, b, td_tensor_requires_grad(b) ? y : NULL},
                                      .saved_count = 3});
}

/* Half of the gradient where both are equal, none where the other one was chosen. */
static td_status choose_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x,
                                 td_tensor *(*loses)(td_tensor *, td_tensor *))
{
    td_tensor *a = td_node_saved(node, 0), *b = td_node_saved(node, 1);
    td_tensor *shared = td_where(td_eq(a, b), td_mul_scalar(grad_y[0], 0.5), grad_y[0]);
    for (int i = 0; i < 2; i++) {
        if (!td_node_needs(node, i))
            continue;
        grad_x[i] = td_masked_fill(shared, i == 0 ? loses(a, b) : loses(b, a), 0);
        TD_TRY(td__done(grad_x[i]));
    }
    return TD_OK;
}

static td_tensor *choose(const td_function *function, td_binary op, td_tensor *a, td_tensor *b)
{
    return td__result(
        function, td__apply_binary(function->name, op, a, b),
        &(td_node_spec){.inputs = {a, b}, .input_count = 2, .saved = {a, b}, .saved_count = 2});
}

static td_status maximum_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
{
    return choose_backward(node, grad_y, grad_x, td_lt);
}

td_tensor *td_maximum(td_tensor *a, td_tensor *b)
{
    TD__AUTOCAST_2(td_maximum, TD__CAST_BINARY, a, b);
    static const td_function function = {.name = "td_maximum", .backward = maximum_backward};
    return choose(&function, TD_BINARY_MAXIMUM, a, b);
}

static td_status minimum_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
{
    return choose_backward(node, grad_y, grad_x, td_gt);
}

td_tensor *td_minimum(td_tensor *a, td_tensor *b)
{
    TD__AUTOCAST_2(td_minimum, TD__CAST_BINARY, a, b);
    static const td_function function = {.name = "td_minimum", .backward = minimum_backward};
    return choose(&function, TD_BINARY_MINIMUM, a, b);
}

/* ---- A tensor and a number ------------------------------------------------------------------------- */

static td_tensor *with_scalar(const td_function *function, td_binary op, td_tensor *a, double b,
                              bool reversed, bool saves)
{
    return td__result(function, td__apply_scalar(function->name, op, a, b, reversed),
                      &(td_node_spec){.inputs = {a},
                                      .input_count = 1,
                                      .saved = {a},
                                      .saved_count = saves,
                                      .data = &b,
                                      .data_size = sizeof b});
}

static td_status same_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
{
    (void)node;
    grad_x[0] = grad_y[0];
    return TD_OK;
}

td_tensor *td_add_scalar(td_tensor *a, double b)
{
    static const td_function function = {.name = "td_add_scalar", .backward = same_backward};
    return with_scalar(&function, TD_BINARY_ADD, a, b, false, false);
}

td_tensor *td_sub_scalar(td_tensor *a, double b)
{
    static const td_function function = {.name = "td_sub_scalar", .backward = same_backward};
    return with_scalar(&function, TD_BINARY_SUB, a, b, false, false);
}

static td_status rsub_scalar_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
{
    (void)node;
    grad_x[0] = td_neg(grad_y[0]);
    return td__done(grad_x[0]);
}

td_tensor *td_rsub_scalar(td_tensor *a, double b)
{
    static const td_function function = {.name = "td_rsub_scalar",
                                         .backward = rsub_scalar_backward};
    return with_scalar(&function, TD_BINARY_SUB, a, b, true, false);
}

static td_status mul_scalar_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
{
    grad_x[0] = td_mul_scalar(grad_y[0], *(const double *)td_node_data(node));
    return td__done(grad_x[0]);
}

td_tensor *td_mul_scalar(td_tensor *a, double b)
{
    static const td_function function = {.name = "td_mul_scalar", .backward = mul_scalar_backward};
    return with_scalar(&function, TD_BINARY_MUL, a, b, false, false);
}

static td_status div_scalar_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
{
    grad_x[0] = td_div_scalar(grad_y[0], *(const double *)td_node_data(node));
    return td__done(grad_x[0]);
}

td_tensor *td_div_scalar(td_tensor *a, double b)
{
    static const td_function function = {.name = "td_div_scalar", .backward = div_scalar_backward};
    return with_scalar(&function, TD_BINARY_DIV, a, b, false, false);
}

/* -g b / a^2. */
static td_status rdiv_scalar_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
{
    td_tensor *slope = td_rdiv_scalar(td_square(td_node_saved(node, 0)),
                                      -*(const double *)td_node_data(node));
    grad_x[0] = td_mul(grad_y[0], slope);
    return td__done(grad_x[0]);
}

td_tensor *td_rdiv_scalar(td_tensor *a, double b)
{
    TD__AUTOCAST(TD__CAST_RDIV_SCALAR, &a);
    static const td_function function = {.name = "td_rdiv_scalar",
                                         .backward = rdiv_scalar_backward};
    return with_scalar(&function, TD_BINARY_DIV, a, b, true, true);
}

static bool is_integer(td_dtype dtype)
{
    return dtype == TD_I8 || dtype == TD_I16 || dtype == TD_I32 || dtype == TD_I64 ||
           dtype == TD_U8 || dtype == TD_U32 || dtype == TD_U64;
}

/* g b a^(b-1), which is 0 for b = 0, also where a is 0. */
static td_status pow_scalar_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
{
    double b = *(const double *)td_node_data(node);
    td_tensor *a = td_node_saved(node, 0);
    grad_x[0] = b == 0 ? td_zeros_like(a)
                       : td_mul(grad_y[0], td_mul_scalar(td_pow_scalar(a, b - 1), b));
    return td__done(grad_x[0]);
}

td_tensor *td_pow_scalar(td_tensor *a, double b)
{
    TD__AUTOCAST(TD__CAST_POW_SCALAR, &a);
    static const td_function function = {.name = "td_pow_scalar", .backward = pow_scalar_backward};
    if (a && b <= -1 && is_integer(a->layout.dtype)) {
        td_fail(TD_ERR_INVALID,
                "td_pow_scalar: %s to the power of %g is no integer; convert to a floating-point "
                "dtype with td_to_dtype() first",
                td_dtype_name(a->layout.dtype), b);
        return NULL;
    }
    return with_scalar(&function, TD_BINARY_POW, a, b, false, true);
}
