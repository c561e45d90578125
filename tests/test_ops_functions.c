/* Gradients of the functions of one tensor. */
#include "ops_values.h"

#include <math.h>

typedef td_tensor *(*unary_fn)(td_tensor *);

static td_tensor *run_unary(td_tensor *const *x, const void *fn)
{
    return (*(const unary_fn *)fn)(x[0]);
}

static td_tensor *run_clamp(td_tensor *const *x, const void *arg)
{
    (void)arg;
    return td_clamp(x[0], -0.7, 0.9);
}

TEST(gradients_of_functions)
{
    unary_fn anywhere[] = {td_neg, td_abs, td_square, td_exp, td_sin, td_cos, td_erf};
    unary_fn positive[] = {td_ln, td_log1p, td_sqrt, td_rsqrt, td_reciprocal};
    {
        TD_SCOPE;
        td_tensor *x = gradcheck_random(SHAPE(2, 5), -2, 2),
                  *p = gradcheck_random(SHAPE(2, 5), 0.3, 2);
        td_tensor *number = gradcheck_random(NULL, 0, 0.3, 2);
        for (size_t i = 0; i < sizeof anywhere / sizeof anywhere[0]; i++)
            gradcheck("a function", run_unary, &anywhere[i], &x, 1);
        for (size_t i = 0; i < sizeof positive / sizeof positive[0]; i++) {
            gradcheck("a function", run_unary, &positive[i], &p, 1);
            gradcheck("a function", run_unary, &positive[i], &number, 1);
        }
        gradcheck("td_clamp", run_clamp, NULL, &x, 1);
    }
}

static td_tensor *leaf(td_tensor *x)
{
    CHECK_OK(td_tensor_set_requires_grad(x, true));
    return x;
}

TEST(gradients_of_halves)
{
    {
        TD_SCOPE;
        td_tensor *x = leaf(MAKE(TD_F16, SHAPE(2), 1, 2)), *y = leaf(MAKE(TD_BF16, SHAPE(2), 1, 2));
        CHECK_OK(td_backward(td_sum(td_mul(td_exp(x), x))));
        CHECK_TENSOR(td_tensor_grad(x), TD_F16, SHAPE(2), 2 * exp(1), 3 * exp(2));
        CHECK_OK(td_backward(td_sum(td_div_scalar(td_square(y), 2))));
        CHECK_TENSOR(td_tensor_grad(y), TD_BF16, SHAPE(2), 1, 2);
    }
}
