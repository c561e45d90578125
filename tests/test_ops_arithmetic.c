/* Arithmetic: values, broadcasting, dtypes, what is refused, and gradients by differences. */
#include "ops_values.h"
#include "host_data.h"

#include <math.h>
#include <stdio.h>

/* ---- Values ------------------------------------------------------------------------------------ */

TEST(two_tensors)
{
    {
        TD_SCOPE;
        td_tensor *a = MAKE(TD_F32, SHAPE(2, 3), 1, -2, 3, 4, 0.5, -6);
        td_tensor *b = MAKE(TD_F32, SHAPE(2, 3), 2, 2, -1, 0.5, 0.25, 3);
        CHECK_TENSOR(td_add(a, b), TD_F32, SHAPE(2, 3), 3, 0, 2, 4.5, 0.75, -3);
        CHECK_TENSOR(td_sub(a, b), TD_F32, SHAPE(2, 3), -1, -4, 4, 3.5, 0.25, -9);
        CHECK_TENSOR(td_mul(a, b), TD_F32, SHAPE(2, 3), 2, -4, -3, 2, 0.125, -18);
        CHECK_TENSOR(td_div(a, b), TD_F32, SHAPE(2, 3), 0.5, -1, -3, 8, 2, -2);
        CHECK_TENSOR(td_pow(a, b), TD_F32, SHAPE(2, 3), 1, 4, 1 / 3.0, 2, pow(0.5, 0.25), -216);
        CHECK_TENSOR(td_maximum(a, b), TD_F32, SHAPE(2, 3), 2, 2, 3, 4, 0.5, 3);
        CHECK_TENSOR(td_minimum(a, b), TD_F32, SHAPE(2, 3), 1, -2, -1, 0.5, 0.25, -6);
        CHECK_TENSOR(td_add_scaled(a, b, -2), TD_F32, SHAPE(2, 3), -3, -6, 5, 3, 0, -12);
    }
}

TEST(shapes_broadcast)
{
    {
        TD_SCOPE;
        td_tensor *column = MAKE(TD_F64, SHAPE(2, 1), 10, 20);
        td_tensor *row = MAKE(TD_F64, SHAPE(3), 1, 2, 3);
        td_tensor *number = MAKE(TD_F64, NO_DIMS, 0.5);
        CHECK_TENSOR(td_add(column, row), TD_F64, SHAPE(2, 3), 11, 12, 13, 21, 22, 23);
        CHECK_TENSOR(td_add_scaled(row, column, 2), TD_F64, SHAPE(2, 3), 21, 22, 23, 41, 42, 43);
        CHECK_TENSOR(td_mul(row, number), TD_F64, SHAPE(3), 0.5, 1, 1.5);
        CHECK_TENSOR(td_sub(number, number), TD_F64, NO_DIMS, 0);
        td_tensor *none = td_zeros(SHAPE(0, 3), TD_F64, NULL);
        CHECK_TENSOR(td_add(none, row), TD_F64, SHAPE(0, 3), 0);
        CHECK_TENSOR(td_mul_scalar(none, 2), TD_F64, SHAPE(0, 3), 0);
        CHECK_TENSOR(td_exp(none), TD_F64, SHAPE(0, 3), 0);
    }
}

TEST(with_numbers)
{
    {
        TD_SCOPE;
        td_tensor *a = MAKE(TD_F32, SHAPE(3), 1, -2, 4);
        CHECK_TENSOR(td_add_scalar(a, 2.5), TD_F32, SHAPE(3), 3.5, 0.5, 6.5);
        CHECK_TENSOR(td_sub_scalar(a, 2.5), TD_F32, SHAPE(3), -1.5, -4.5, 1.5);
        CHECK_TENSOR(td_mul_scalar(a, 2.5), TD_F32, SHAPE(3), 2.5, -5, 10);
        CHECK_TENSOR(td_div_scalar(a, 2), TD_F32, SHAPE(3), 0.5, -1, 2);
        CHECK_TENSOR(td_pow_scalar(a, 3), TD_F32, SHAPE(3), 1, -8, 64);
        CHECK_TENSOR(td_rsub_scalar(a, 3), TD_F32, SHAPE(3), 2, 5, -1);
        CHECK_TENSOR(td_rdiv_scalar(a, 8), TD_F32, SHAPE(3), 8, -4, 2);
        CHECK_TENSOR(td_clamp(a, -1, 2), TD_F32, SHAPE(3), 1, -1, 2);
        CHECK_TENSOR(td_clamp(MAKE(TD_F32, SHAPE(1), NAN), -1, 2), TD_F32, SHAPE(1), NAN);
    }
}

TEST(whole_numbers)
{
    {
        TD_SCOPE;
        td_tensor *a = MAKE(TD_I32, SHAPE(4), 7, -7, 5, 0);
        td_tensor *b = MAKE(TD_I32, SHAPE(4), 2, 2, 0, 3);
        CHECK_TENSOR(td_div(a, b), TD_I32, SHAPE(4), 3, -3, 0, 0);
        CHECK_TENSOR(td_mul_scalar(a, 3), TD_I32, SHAPE(4), 21, -21, 15, 0);
        CHECK_TENSOR(td_square(a), TD_I32, SHAPE(4), 49, 49, 25, 0);
        CHECK_TENSOR(td_abs(a), TD_I32, SHAPE(4), 7, 7, 5, 0);
        CHECK_TENSOR(td_sign(a), TD_I32, SHAPE(4), 1, -1, 1, 0);
        td_tensor *yes = MAKE(TD_BOOL, SHAPE(2), 1, 0), *all = td_ones(SHAPE(2), TD_BOOL, NULL);
        CHECK_TENSOR(td_add(yes, all), TD_BOOL, SHAPE(2), 1, 1);
        CHECK_TENSOR(td_mul(yes, all), TD_BOOL, SHAPE(2), 1, 0);
    }
}

TEST(functions)
{
    {
        TD_SCOPE;
        double v[] = {0.25, 1, 2.5};
        td_tensor *x = make_tensor(TD_F64, SHAPE(3), v);
        struct {
            td_tensor *(*fn)(td_tensor *);
            double (*right)(double);
        } list[] = {{td_exp, exp},   {td_ln, log},     {td_log1p, log1p}, {td_sqrt, sqrt},
                    {td_sin, sin},   {td_cos, cos},    {td_erf, erf},     {td_floor, floor},
                    {td_ceil, ceil}, {td_round, rint}, {td_abs, fabs}};
        for (size_t i = 0; i < sizeof list / sizeof list[0]; i++)
            CHECK_TENSOR(list[i].fn(x), TD_F64, SHAPE(3), list[i].right(v[0]), list[i].right(v[1]),
                         list[i].right(v[2]));
        CHECK_TENSOR(td_neg(x), TD_F64, SHAPE(3), -0.25, -1, -2.5);
        CHECK_TENSOR(td_square(x), TD_F64, SHAPE(3), 0.0625, 1, 6.25);
        CHECK_TENSOR(td_rsqrt(x), TD_F64, SHAPE(3), 2, 1, 1 / sqrt(2.5));
        CHECK_TENSOR(td_reciprocal(x), TD_F64, SHAPE(3), 4, 1, 0.4);
        td_tensor *half = MAKE(TD_F16, SHAPE(2), 1, 2), *brain = MAKE(TD_BF16, SHAPE(2), 1, 2);
        CHECK_TENSOR(td_exp(half), TD_F16, SHAPE(2), exp(1), exp(2));
        CHECK_TENSOR(td_ln(brain), TD_BF16, SHAPE(2), 0, log(2));
    }
}

/* ---- What is refused --------------------------------------------------------------------------- */

TEST(what_does_not_fit_is_named)
{
    {
        TD_SCOPE;
        td_tensor *a = td_zeros(SHAPE(2, 3), TD_F32, NULL), *b = td_zeros(SHAPE(4), TD_F32, NULL);
        CHECK_NULL(td_add(a, b), "td_add: the shapes [2, 3] and [4] do not broadcast");
        CHECK_NULL(td_add_scaled(a, b, 2), "td_add_scaled: the shapes [2, 3] and [4]");
        CHECK_NULL(td_mul(a, td_zeros(SHAPE(3), TD_F64, NULL)),
                   "td_mul: the operands are f32 and f64");
        CHECK_NULL(td_sub(a, td_tensor_to(a, td_device_get("cpu:1"))),
                   "and on cpu:1; td_tensor_to() moves one");
        td_tensor *flags = td_zeros(SHAPE(2), TD_BOOL, NULL),
                  *ints = td_zeros(SHAPE(2), TD_I32, NULL);
        CHECK_NULL(td_sub(flags, flags), "td_sub: it is not defined for bool");
        CHECK_NULL(td_neg(flags), "td_neg: it is not defined for bool");
        CHECK_NULL(td_add_scaled(flags, flags, 1), "td_add_scaled: it is not defined for bool");
        CHECK_NULL(td_exp(ints), "td_exp: it is not defined for i32");
        CHECK_NULL(td_pow(flags, flags), "td_pow: it is not defined for bool");
        CHECK_NULL(td_pow_scalar(ints, -1), "td_pow_scalar: i32 to the power of -1");
        CHECK_NULL(td_pow_scalar(td_zeros(SHAPE(1), TD_U8, NULL), -2),
                   "td_pow_scalar: u8 to the power");
        CHECK_NULL(td_clamp(flags, 0, 1), "td_clamp: it is not defined for bool");
        CHECK_NULL(td_clamp(a, NAN, 1), "td_clamp: ");
        CHECK_NULL(td_add_scalar(td_zeros(SHAPE(1), TD_U8, NULL), 300), "td_add_scalar: ");
        CHECK_CONTAINS(td_last_error(), "300 is not in the range of u8");
    }
}

TEST(null_is_handed_on)
{
    {
        TD_SCOPE;
        td_tensor *a = td_zeros(SHAPE(2), TD_F32, NULL);
        CHECK(!td_add(a, td_zeros(SHAPE(3), TD_F32, NULL)));
        char before[400];
        snprintf(before, sizeof before, "%s", td_last_error());
        CHECK(!td_add(a, td_zeros(SHAPE(3), TD_F32, NULL))); /* once more: the error was not read */
        td_tensor *(*two[])(td_tensor *, td_tensor *) = {
            td_add,         td_sub, td_mul, td_div, td_pow,         td_maximum,
            td_minimum,     td_eq,  td_ne,  td_lt,  td_logical_and, td_logical_or,
            td_logical_xor, td_le,  td_gt,  td_ge};
        td_tensor *(*one[])(td_tensor *) = {
            td_neg,        td_abs,       td_square,     td_exp,   td_ln,         td_log1p,
            td_sqrt,       td_rsqrt,     td_reciprocal, td_sin,   td_cos,        td_erf,
            td_sign,       td_floor,     td_ceil,       td_round, td_sum,        td_mean,
            td_prod,       td_max,       td_min,        td_norm,  td_all,        td_any,
            td_zeros_like, td_ones_like, td_empty_like, td_isnan, td_logical_not};
        for (size_t i = 0; i < sizeof two / sizeof two[0]; i++)
            CHECK(!two[i](a, NULL) && !two[i](NULL, a) && !two[i](NULL, NULL));
        for (size_t i = 0; i < sizeof one / sizeof one[0]; i++)
            CHECK(!one[i](NULL));
        CHECK(!td_add_scalar(NULL, 1) && !td_pow_scalar(NULL, 1) && !td_eq_scalar(NULL, 1));
        CHECK(!td_add_scaled(NULL, a, 1) && !td_clamp(NULL, 0, 1) && !td_where(NULL, a, a));
        CHECK(!td_masked_fill(NULL, a, 0) && !td_to_dtype(NULL, TD_F64) &&
              !td_tensor_to(NULL, td_device_get("cpu")));
        CHECK(!td_sum_dims(NULL, NULL, 0, false) && !td_max_dim(NULL, 0, false, NULL));
        CHECK(!td_index_select(NULL, 0, a) && !td_take_along_dim(a, 0, NULL) &&
              !td_one_hot(NULL, 2));
        CHECK(!td_tril(NULL, 0) && !td_cat((td_tensor *[]){a, NULL}, 2, 0) && isnan(td_item(NULL)));
        CHECK(!td_equal(NULL, NULL) && !td_allclose(a, NULL, 1, 1));
        CHECK_STR(td_last_error(), before);
    }
}

/* ---- Gradients --------------------------------------------------------------------------------- */

typedef td_tensor *(*binary_fn)(td_tensor *, td_tensor *);
typedef td_tensor *(*scalar_fn)(td_tensor *, double);

static td_tensor *run_binary(td_tensor *const *x, const void *fn)
{
    return (*(const binary_fn *)fn)(x[0], x[1]);
}

static void check_binary(const char *name, binary_fn fn, double low, double high)
{
    {
        TD_SCOPE;
        td_tensor *a = gradcheck_random(SHAPE(2, 3), low, high);
        td_tensor *shapes[] = {
            gradcheck_random(SHAPE(2, 3), low, high), gradcheck_random(SHAPE(3), low, high),
            gradcheck_random(SHAPE(2, 1), low, high), gradcheck_random(SHAPE(4, 1, 3), low, high),
            gradcheck_random(NULL, 0, low, high),     gradcheck_random(SHAPE(0, 1, 1), low, high)};
        for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
            gradcheck(name, run_binary, &fn, (td_tensor *[]){a, shapes[i]}, 2);
            gradcheck(name, run_binary, &fn, (td_tensor *[]){shapes[i], a}, 2);
        }
    }
}

TEST(gradients_of_two)
{
    check_binary("td_add", td_add, -2, 2);
    check_binary("td_sub", td_sub, -2, 2);
    check_binary("td_mul", td_mul, -2, 2);
    check_binary("td_div", td_div, 0.5, 2);
    check_binary("td_pow", td_pow, 0.5, 2);
    check_binary("td_maximum", td_maximum, -2, 2);
    check_binary("td_minimum", td_minimum, -2, 2);
}

static td_tensor *run_scaled(td_tensor *const *x, const void *arg)
{
    (void)arg;
    return td_add_scaled(x[0], x[1], -1.5);
}

struct scalar {
    scalar_fn fn;
    double number;
};

static td_tensor *run_scalar(td_tensor *const *x, const void *arg)
{
    const struct scalar *scalar = arg;
    return scalar->fn(x[0], scalar->number);
}

TEST(gradients_with_numbers)
{
    struct scalar list[] = {{td_add_scalar, 2},   {td_sub_scalar, 2},    {td_mul_scalar, -1.5},
                            {td_div_scalar, 4},   {td_pow_scalar, 3},    {td_pow_scalar, 0},
                            {td_pow_scalar, 1},   {td_pow_scalar, -2.5}, {td_rsub_scalar, 2},
                            {td_rdiv_scalar, 1.5}};
    {
        TD_SCOPE;
        td_tensor *x = gradcheck_random(SHAPE(3, 2), 0.5, 2),
                  *b = gradcheck_random(SHAPE(2), -1, 1);
        for (size_t i = 0; i < sizeof list / sizeof list[0]; i++)
            gradcheck("a number", run_scalar, &list[i], &x, 1);
        gradcheck("td_add_scaled", run_scaled, NULL, (td_tensor *[]){x, b}, 2);
    }
}

static td_tensor *leaf(td_tensor *x)
{
    CHECK_OK(td_tensor_set_requires_grad(x, true));
    return x;
}

TEST(gradients_at_the_edges)
{
    {
        TD_SCOPE;
        td_tensor *a = leaf(MAKE(TD_F64, SHAPE(3), 1, 2, NAN)),
                  *b = leaf(MAKE(TD_F64, SHAPE(3), 1, 3, 1));
        CHECK_OK(td_backward(td_sum(td_maximum(a, b))));
        CHECK_TENSOR(td_tensor_grad(a), TD_F64, SHAPE(3), 0.5, 0, 1);
        CHECK_TENSOR(td_tensor_grad(b), TD_F64, SHAPE(3), 0.5, 1, 1);

        td_tensor *x = leaf(MAKE(TD_F64, SHAPE(4), 0, 0, 0, 2)),
                  *e = leaf(MAKE(TD_F64, SHAPE(4), 0, 2, 1, 0));
        CHECK_OK(td_backward(td_sum(td_pow(x, e))));
        CHECK_TENSOR(td_tensor_grad(x), TD_F64, SHAPE(4), 0, 0, 1, 0);
        CHECK_TENSOR(td_tensor_grad(e), TD_F64, SHAPE(4), 0, 0, 0, log(2));

        td_tensor *c = leaf(MAKE(TD_F64, SHAPE(4), -1, 1, 2, NAN));
        CHECK_OK(td_backward(td_sum(td_clamp(c, -1, 1))));
        CHECK_TENSOR(td_tensor_grad(c), TD_F64, SHAPE(4), 1, 1, 0, 0);

        td_tensor *n = leaf(MAKE(TD_F64, SHAPE(2), 1.5, -1.5));
        CHECK(!td_tensor_requires_grad(td_round(n)) && !td_tensor_requires_grad(td_sign(n)));
        CHECK(!td_tensor_requires_grad(td_gt_scalar(n, 0)));
        {
            TD_NO_GRAD;
            CHECK(!td_tensor_requires_grad(td_mul(n, n)));
        }
        CHECK_OK(td_backward(td_sum(td_mul(n, n))));
        CHECK_TENSOR(td_tensor_grad(n), TD_F64, SHAPE(2), 3, -3);
    }
}

/* As PyTorch computes them: wrapping around, and with a negative exponent 0, 1 or -1. */
TEST(powers_of_integers)
{
    {
        TD_SCOPE;
        td_tensor *a = MAKE(TD_I64, SHAPE(10), 2, -2, 3, 0, 1, -1, -1, 0, 7, 10);
        td_tensor *b = MAKE(TD_I64, SHAPE(10), 10, 3, -1, -1, -5, -4, -3, 0, 30, -2);
        td_tensor *y = td_pow(a, b);
        CHECK_EQ(((const int64_t *)host_data(y))[8], 1576789505350337489);
        CHECK_TENSOR(td_pow(td_to_dtype(a, TD_I32), td_to_dtype(b, TD_I32)), TD_I32, SHAPE(10),
                     1024, -8, 0, 0, 1, 1, -1, 1, 1878557649, 0);
        CHECK_TENSOR(td_pow(td_to_dtype(a, TD_I16), td_to_dtype(b, TD_I16)), TD_I16, SHAPE(10),
                     1024, -8, 0, 0, 1, 1, -1, 1, -31791, 0);
        CHECK_TENSOR(td_pow(td_to_dtype(a, TD_I8), td_to_dtype(b, TD_I8)), TD_I8, SHAPE(10), 0, -8,
                     0, 0, 1, 1, -1, 1, -47, 0);
        CHECK_TENSOR(td_pow(MAKE(TD_U8, SHAPE(3), 2, 3, 255), MAKE(TD_U8, SHAPE(3), 7, 6, 2)),
                     TD_U8, SHAPE(3), 128, 217, 1);
        CHECK_TENSOR(td_pow_scalar(a, 3), TD_I64, SHAPE(10), 8, -8, 27, 0, 1, -1, -1, 0, 343, 1000);
        CHECK_TENSOR(td_pow_scalar(a, 0), TD_I64, SHAPE(10), 1, 1, 1, 1, 1, 1, 1, 1, 1, 1);
        CHECK_TENSOR(td_pow(td_narrow(a, 0, 0, 3), MAKE(TD_I64, NO_DIMS, 2)), TD_I64, SHAPE(3), 4,
                     4, 9);
    }
}
