/* Changes in place: values, gradients by differences, and that misuse is an error and never a wrong
 * number. */
#include "ops_values.h"

#include <math.h>
#include <string.h>

static td_tensor *leaf(td_tensor *x)
{
    CHECK_OK(td_tensor_set_requires_grad(x, true));
    return x;
}

/* ---- Values ------------------------------------------------------------------------------------ */

TEST(values)
{
    {
        TD_SCOPE;
        td_tensor *x = MAKE(TD_F32, SHAPE(2, 2), 1, 2, 3, 4), *row = MAKE(TD_F32, SHAPE(2), 10, 20);
        CHECK_OK(td_add_(x, row));
        CHECK_TENSOR(x, TD_F32, SHAPE(2, 2), 11, 22, 13, 24);
        CHECK_OK(td_sub_(x, row));
        CHECK_OK(td_mul_(x, row));
        CHECK_TENSOR(x, TD_F32, SHAPE(2, 2), 10, 40, 30, 80);
        CHECK_OK(td_div_(td_transpose(x, 0, 1), row));
        CHECK_TENSOR(x, TD_F32, SHAPE(2, 2), 1, 4, 1.5, 4);
        CHECK_OK(td_add_scaled_(x, row, -0.1));
        CHECK_TENSOR(x, TD_F32, SHAPE(2, 2), 0, 2, 0.5, 2);
        CHECK_OK(td_add_scalar_(td_select(x, 0, 0), -3));
        CHECK_TENSOR(x, TD_F32, SHAPE(2, 2), -3, -1, 0.5, 2);
        CHECK_OK(td_mul_scalar_(x, 2));
        CHECK_OK(td_f_relu_(td_select(x, 1, 0)));
        CHECK_TENSOR(x, TD_F32, SHAPE(2, 2), 0, -2, 1, 4);
        CHECK_OK(td_clamp_(x, -1, 3));
        CHECK_TENSOR(x, TD_F32, SHAPE(2, 2), 0, -1, 1, 3);
        CHECK_OK(td_fill_(td_slice(x, 1, 1, 2, 1), 7));
        CHECK_TENSOR(x, TD_F32, SHAPE(2, 2), 0, 7, 1, 7);
        CHECK_OK(td_zero_(x));
        CHECK_TENSOR(x, TD_F32, SHAPE(2, 2), 0, 0, 0, 0);
        td_tensor *none = td_zeros(SHAPE(0, 2), TD_F32, NULL), *number = MAKE(TD_I32, NO_DIMS, 5);
        CHECK_OK(td_add_(none, row));
        CHECK_OK(td_mul_(number, number));
        CHECK_TENSOR(number, TD_I32, NO_DIMS, 25);
    }
}

TEST(operands_in_the_same_memory)
{
    {
        TD_SCOPE;
        td_tensor *x = MAKE(TD_F32, SHAPE(2, 2), 1, 2, 3, 4);
        CHECK_OK(td_add_(x, td_transpose(x, 0, 1)));
        CHECK_TENSOR(x, TD_F32, SHAPE(2, 2), 2, 5, 5, 8);
        CHECK_OK(td_mul_(x, td_select(x, 0, 0)));
        CHECK_TENSOR(x, TD_F32, SHAPE(2, 2), 4, 25, 10, 40);
        CHECK_OK(td_sub_(x, x));
        CHECK_TENSOR(x, TD_F32, SHAPE(2, 2), 0, 0, 0, 0);
        td_tensor *y = td_arange(0, 5, 1, TD_F32, NULL);
        CHECK_OK(td_add_scaled_(td_narrow(y, 0, 1, 4), td_narrow(y, 0, 0, 4), 10));
        CHECK_TENSOR(y, TD_F32, SHAPE(5), 0, 1, 12, 23, 34);
    }
}

/* ---- What is refused --------------------------------------------------------------------------- */

TEST(what_cannot_be_changed_is_named)
{
    {
        TD_SCOPE;
        td_tensor *x = td_ones(SHAPE(2), TD_F32, NULL), *wide = td_ones(SHAPE(3, 2), TD_F32, NULL);
        td_tensor *expanded = td_expand(x, SHAPE(3, 2));
        CHECK_FAILS(td_add_(x, wide), TD_ERR_INVALID,
                    "td_add_: a tensor of shape [3, 2] does not expand to the shape [2]");
        CHECK_FAILS(td_mul_(x, td_ones(SHAPE(2), TD_F64, NULL)), TD_ERR_INVALID,
                    "td_mul_: the operands are f32 and f64");
        CHECK_FAILS(td_div_(x, td_tensor_to(x, td_device_get("cpu:0"))), TD_ERR_INVALID,
                    "and on cpu:0; td_tensor_to() moves one");
        CHECK_FAILS(td_add_(expanded, x), TD_ERR_INVALID,
                    "td_add_: elements of the tensor of shape [3, 2] share memory");
        CHECK_FAILS(td_zero_(expanded), TD_ERR_INVALID, "td_zero_: elements of the tensor");
        CHECK_FAILS(td_f_relu_(expanded), TD_ERR_INVALID, "td_f_relu_: elements of the tensor");
        CHECK_FAILS(td_clamp_(expanded, 0, 1), TD_ERR_INVALID, "td_clamp_: elements of the tensor");
        CHECK_FAILS(td_add_scalar_(expanded, 1), TD_ERR_INVALID,
                    "td_add_scalar_: elements of the tensor");
        CHECK_FAILS(td_fill_(td_zeros(SHAPE(1), TD_U8, NULL), 256), TD_ERR_INVALID, "td_fill_: ");
        CHECK_FAILS(td_sub_(td_zeros(SHAPE(1), TD_BOOL, NULL), td_zeros(SHAPE(1), TD_BOOL, NULL)),
                    TD_ERR_INVALID, "td_sub_: it is not defined for bool");
        CHECK_FAILS(td_f_relu_(td_zeros(SHAPE(1), TD_BOOL, NULL)), TD_ERR_INVALID,
                    "td_f_relu_: it is not defined for bool");
        CHECK_FAILS(td_clamp_(x, NAN, 1), TD_ERR_INVALID, "td_clamp_: ");
        CHECK_EQ(td_add_(NULL, x), TD_ERR_INVALID);
        CHECK_EQ(td_add_(x, NULL), TD_ERR_INVALID);
        CHECK_EQ(td_zero_(NULL), TD_ERR_INVALID);
        CHECK_EQ(td_mul_scalar_(NULL, 1), TD_ERR_INVALID);
        CHECK_EQ(td_f_relu_(NULL), TD_ERR_INVALID);
        CHECK_EQ(td_clamp_(NULL, 0, 1), TD_ERR_INVALID);
        CHECK_TENSOR(x, TD_F32, SHAPE(2), 1, 1);
    }
}

TEST(leaves_do_not_change_while_recording)
{
    {
        TD_SCOPE;
        td_tensor *w = leaf(MAKE(TD_F32, SHAPE(2), 1, 2)), *b = td_ones(SHAPE(2), TD_F32, NULL);
        CHECK_FAILS(td_add_(w, b), TD_ERR_STATE, "td_add_: a leaf of shape [2]");
        CHECK_FAILS(td_mul_(w, b), TD_ERR_STATE, "td_mul_: a leaf");
        CHECK_FAILS(td_zero_(w), TD_ERR_STATE, "td_zero_: a leaf");
        CHECK_FAILS(td_f_relu_(w), TD_ERR_STATE, "td_f_relu_: a leaf");
        CHECK_FAILS(td_clamp_(w, 0, 1), TD_ERR_STATE, "td_clamp_: a leaf");
        CHECK_FAILS(td_add_scaled_(w, b, 2), TD_ERR_STATE, "td_add_scaled_: a leaf");
        CHECK_FAILS(td_mul_scalar_(w, 2), TD_ERR_STATE, "td_mul_scalar_: a leaf");
        td_tensor *part = td_narrow(w, 0, 0, 1);
        CHECK_FAILS(td_add_scalar_(part, 1), TD_ERR_STATE,
                    "td_add_scalar_: the tensor of shape [1] is a view of a leaf");
        CHECK_FAILS(td_tensor_copy(part, td_narrow(b, 0, 0, 1)), TD_ERR_STATE,
                    "is a view of a leaf");
        CHECK_TENSOR(w, TD_F32, SHAPE(2), 1, 2);
        {
            TD_NO_GRAD;
            CHECK_OK(td_add_scaled_(w, b, -0.5));
        }
        CHECK_TENSOR(w, TD_F32, SHAPE(2), 0.5, 1.5);
        CHECK(td_tensor_is_leaf(w) && td_tensor_requires_grad(w));
        CHECK_OK(td_backward(td_sum(td_square(w))));
        CHECK_TENSOR(td_tensor_grad(w), TD_F32, SHAPE(2), 1, 3);
    }
}

TEST(what_backward_needs_must_not_change)
{
    {
        TD_SCOPE;
        td_tensor *w = leaf(MAKE(TD_F64, SHAPE(2), 1, 2)), *c = td_ones(SHAPE(2), TD_F64, NULL);
        td_tensor *y = td_mul(w, c);
        CHECK_OK(td_add_scalar_(c, 1));
        CHECK_FAILS(td_backward(td_sum(y)), TD_ERR_STATE, "td_mul saved for backward was changed");

        y = td_exp(w); /* needs its own result */
        CHECK_OK(td_mul_scalar_(y, 2));
        CHECK_FAILS(td_backward(td_sum(y)), TD_ERR_STATE, "td_exp saved for backward");

        y = td_mul_scalar(w, 3); /* needs nothing of it */
        CHECK_OK(td_mul_scalar_(y, 2));
        CHECK_OK(td_backward(td_sum(y)));
        CHECK_TENSOR(td_tensor_grad(w), TD_F64, SHAPE(2), 6, 6);

        /* Also through a view, and under TD_NO_GRAD. */
        y = td_square(td_mul_scalar(w, 1));
        td_tensor *z = td_mul_scalar(w, 1), *s = td_square(z);
        {
            TD_NO_GRAD;
            CHECK_OK(td_zero_(td_narrow(z, 0, 0, 1)));
        }
        CHECK_FAILS(td_backward(td_sum(td_add(y, s))), TD_ERR_STATE,
                    "td_square saved for backward");
    }
}

/* ---- Gradients --------------------------------------------------------------------------------- */

/* A copy of the first input, which is then changed by the second, and used. */
static td_tensor *changed(td_tensor *const *x, const void *which)
{
    td_tensor *y = td_mul_scalar(x[0], 1.5);
    td_status status = TD_OK;
    switch (*(const int *)which) {
    case 0:
        status = td_add_(y, x[1]);
        break;
    case 1:
        status = td_sub_(y, x[1]);
        break;
    case 2:
        status = td_mul_(y, x[1]);
        break;
    case 3:
        status = td_div_(y, x[1]);
        break;
    case 4:
        status = td_add_scaled_(y, x[1], -2.5);
        break;
    case 5:
        status = td_tensor_copy(y, td_mul(x[0], x[1]));
        break;
    case 6: /* twice, and a result of the second operand */
        status = td_mul_(y, td_square(x[1]));
        if (!status)
            status = td_div_(y, td_exp(x[1]));
        break;
    default: /* changed by what it was itself */
        status = td_mul_(y, y);
        if (!status)
            status = td_add_(y, x[1]);
    }
    return status ? NULL : td_sin(y);
}

TEST(gradients_with_another)
{
    {
        TD_SCOPE;
        td_tensor *x = gradcheck_random(SHAPE(2, 3), 0.5, 2);
        td_tensor *b[] = {gradcheck_random(SHAPE(2, 3), 0.5, 2), gradcheck_random(SHAPE(3), 0.5, 2),
                          gradcheck_random(SHAPE(2, 1), 0.5, 2), gradcheck_random(NULL, 0, 0.5, 2)};
        for (int which = 0; which < 8; which++)
            for (int i = 0; i < 4; i++)
                gradcheck("in place", changed, &which, (td_tensor *[]){x, b[i]}, 2);
    }
}

static td_tensor *changed_alone(td_tensor *const *x, const void *which)
{
    td_tensor *y = td_mul_scalar(x[0], 1.5);
    td_status status = TD_OK;
    switch (*(const int *)which) {
    case 0:
        status = td_add_scalar_(y, 3);
        break;
    case 1:
        status = td_mul_scalar_(y, -3);
        break;
    case 2:
        status = td_f_relu_(y);
        break;
    case 3:
        status = td_clamp_(y, -0.8, 0.7);
        break;
    case 4:
        status = td_div_(y, y);
        break;
    case 5:
        status = td_sub_(y, y);
        break;
    case 6:
        status = td_zero_(y);
        if (!status)
            status = td_add_(y, x[0]);
        break;
    default: /* of a view: what it was and what it is are both used */
        y = td_narrow(td_transpose(y, 0, 1), 0, 0, 2);
        status = td_mul_(y, td_narrow(td_transpose(x[0], 0, 1), 0, 1, 2));
    }
    return status ? NULL : td_cos(y);
}

TEST(gradients_alone)
{
    {
        TD_SCOPE;
        td_tensor *x = gradcheck_random(SHAPE(2, 3), -1, 1);
        for (int which = 0; which < 8; which++)
            gradcheck("in place", changed_alone, &which, &x, 1);
    }
}

/* A tensor without a gradient becomes a result by what is put into it. */
TEST(constants_become_results)
{
    {
        TD_SCOPE;
        td_tensor *w = leaf(MAKE(TD_F64, SHAPE(2), 1, 2)),
                  *y = td_full(SHAPE(3, 2), 10, TD_F64, NULL);
        CHECK_OK(td_mul_(y, w));
        CHECK(td_tensor_requires_grad(y) && !td_tensor_is_leaf(y));
        CHECK_OK(td_add_(y, w));
        CHECK_OK(td_backward(td_sum(y)));
        CHECK_TENSOR(td_tensor_grad(w), TD_F64, SHAPE(2), 33, 33);
        y = td_mul_scalar(w, 2);
        CHECK_OK(td_fill_(y, 5));
        CHECK_OK(td_backward(td_sum(td_add(y, w))));
        CHECK_TENSOR(td_tensor_grad(w), TD_F64, SHAPE(2), 34, 34);
    }
}
