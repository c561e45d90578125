/* Reductions: values, what stays of the shape, dtypes, what is refused, and gradients by differences. */
#include "ops_values.h"

#include <math.h>

static td_tensor *leaf(td_tensor *x)
{
    CHECK_OK(td_tensor_set_requires_grad(x, true));
    return x;
}

/* ---- Values ------------------------------------------------------------------------------------ */

TEST(of_all_elements)
{
    {
        TD_SCOPE;
        td_tensor *x = MAKE(TD_F32, SHAPE(2, 3), 1, -2, 3, 4, 0.5, -6);
        CHECK_TENSOR(td_sum(x), TD_F32, NO_DIMS, 0.5);
        CHECK_TENSOR(td_mean(x), TD_F32, NO_DIMS, 0.5 / 6);
        CHECK_TENSOR(td_prod(x), TD_F32, NO_DIMS, 72);
        CHECK_TENSOR(td_max(x), TD_F32, NO_DIMS, 4);
        CHECK_TENSOR(td_min(td_transpose(x, 0, 1)), TD_F32, NO_DIMS, -6);
        CHECK_TENSOR(td_norm(x), TD_F32, NO_DIMS, sqrt(1 + 4 + 9 + 16 + 0.25 + 36));
        CHECK_TENSOR(td_all(x), TD_BOOL, NO_DIMS, 1);
        CHECK_TENSOR(td_all(td_gt_scalar(x, 0)), TD_BOOL, NO_DIMS, 0);
        CHECK_TENSOR(td_any(td_gt_scalar(x, 3)), TD_BOOL, NO_DIMS, 1);
        CHECK_TENSOR(td_any(td_gt_scalar(x, 5)), TD_BOOL, NO_DIMS, 0);
        CHECK_TENSOR(td_sum(td_sum(x)), TD_F32, NO_DIMS, 0.5);
        CHECK_TENSOR(td_max(MAKE(TD_F32, SHAPE(2), 1, NAN)), TD_F32, NO_DIMS, NAN);
    }
}

TEST(of_nothing)
{
    {
        TD_SCOPE;
        td_tensor *none = td_zeros(SHAPE(2, 0), TD_F64, NULL);
        CHECK_TENSOR(td_sum(none), TD_F64, NO_DIMS, 0);
        CHECK_TENSOR(td_prod(none), TD_F64, NO_DIMS, 1);
        CHECK_TENSOR(td_mean(none), TD_F64, NO_DIMS, NAN);
        CHECK_TENSOR(td_norm(none), TD_F64, NO_DIMS, 0);
        CHECK_TENSOR(td_all(none), TD_BOOL, NO_DIMS, 1);
        CHECK_TENSOR(td_any(none), TD_BOOL, NO_DIMS, 0);
        CHECK_TENSOR(td_sum_dims(none, (int[]){1}, 1, false), TD_F64, SHAPE(2), 0, 0);
        CHECK_TENSOR(td_sum_dims(none, (int[]){0}, 1, false), TD_F64, SHAPE(0), 0);
        CHECK_TENSOR(td_max_dim(none, 0, false, NULL), TD_F64, SHAPE(0), 0);
        CHECK_NULL(td_max(none), "td_max: a tensor of shape [2, 0] has no elements");
        CHECK_NULL(td_min(none), "td_min: a tensor of shape [2, 0] has no elements");
        CHECK_NULL(td_max_dim(none, 1, false, NULL),
                   "td_max_dim: dimension 1 of a tensor of shape [2, 0]");
        CHECK_NULL(td_argmin(none, -1, false),
                   "td_argmin: dimension 1 of a tensor of shape [2, 0]");
    }
}

TEST(along_dimensions)
{
    {
        TD_SCOPE;
        td_tensor *x = td_reshape(td_arange(0, 12, 1, TD_F64, NULL), SHAPE(2, 3, 2));
        CHECK_TENSOR(td_sum_dims(x, (int[]){0}, 1, false), TD_F64, SHAPE(3, 2), 6, 8, 10, 12, 14,
                     16);
        CHECK_TENSOR(td_sum_dims(x, (int[]){-1}, 1, true), TD_F64, SHAPE(2, 3, 1), 1, 5, 9, 13, 17,
                     21);
        CHECK_TENSOR(td_sum_dims(x, (int[]){2, 0}, 2, false), TD_F64, SHAPE(3), 14, 22, 30);
        CHECK_TENSOR(td_mean_dims(x, (int[]){1}, 1, false), TD_F64, SHAPE(2, 2), 2, 3, 8, 9);
        CHECK_TENSOR(td_sum_dims(x, (int[]){0, 1, 2}, 3, true), TD_F64, SHAPE(1, 1, 1), 66);
        CHECK_TENSOR(td_sum_dims(td_select(x, 0, 0), NULL, 0, false), TD_F64, SHAPE(3, 2), 0, 1, 2,
                     3, 4, 5);
        CHECK_TENSOR(td_var_dims(x, (int[]){1}, 1, 1, false), TD_F64, SHAPE(2, 2), 4, 4, 4, 4);
        CHECK_TENSOR(td_var_dims(x, (int[]){1}, 1, 0, true), TD_F64, SHAPE(2, 1, 2), 8 / 3.0,
                     8 / 3.0, 8 / 3.0, 8 / 3.0);
        td_tensor *one = MAKE(TD_F64, SHAPE(1, 2), 3, 5);
        CHECK_TENSOR(td_var_dims(one, (int[]){0}, 1, 1, false), TD_F64, SHAPE(2), NAN, NAN);
        CHECK_NULL(td_sum_dims(x, (int[]){0, -3}, 2, false),
                   "td_sum_dims: dimension 0 is named twice");
        CHECK_NULL(td_mean_dims(x, (int[]){3}, 1, false), "td_mean_dims: ");
        CHECK_NULL(td_var_dims(x, NULL, 2, 1, false),
                   "td_var_dims: the list of 2 dimensions is NULL");
    }
}

TEST(extremes_and_their_indices)
{
    {
        TD_SCOPE;
        td_tensor *x = MAKE(TD_F32, SHAPE(2, 3), 3, 7, 7, -1, NAN, 9), *at = NULL;
        CHECK_TENSOR(td_max_dim(x, 1, false, &at), TD_F32, SHAPE(2), 7, NAN);
        CHECK_TENSOR(at, TD_I64, SHAPE(2), 1, 1);
        CHECK_TENSOR(td_min_dim(x, 0, true, &at), TD_F32, SHAPE(1, 3), -1, NAN, 7);
        CHECK_TENSOR(at, TD_I64, SHAPE(1, 3), 1, 1, 0);
        CHECK_TENSOR(td_argmax(x, -1, true), TD_I64, SHAPE(2, 1), 1, 1);
        CHECK_TENSOR(td_argmin(td_transpose(x, 0, 1), 1, false), TD_I64, SHAPE(3), 1, 1, 0);
        td_tensor *whole = MAKE(TD_I32, SHAPE(3), 5, 9, 9);
        CHECK_TENSOR(td_max_dim(whole, 0, false, NULL), TD_I32, NO_DIMS, 9);
        CHECK_TENSOR(td_argmax(whole, 0, false), TD_I64, NO_DIMS, 1);
    }
}

TEST(whole_numbers_add_up_in_i64)
{
    {
        TD_SCOPE;
        td_tensor *bytes = td_full(SHAPE(300), 200, TD_U8, NULL),
                  *flags = td_ones(SHAPE(1000), TD_BOOL, NULL);
        CHECK_TENSOR(td_sum(bytes), TD_I64, NO_DIMS, 60000);
        CHECK_TENSOR(td_sum(flags), TD_I64, NO_DIMS, 1000);
        CHECK_TENSOR(td_sum_dims(td_reshape(flags, SHAPE(2, 500)), (int[]){1}, 1, false), TD_I64,
                     SHAPE(2), 500, 500);
        CHECK_TENSOR(td_prod(MAKE(TD_I8, SHAPE(3), 100, -100, 3)), TD_I64, NO_DIMS, -30000);
        CHECK_TENSOR(td_sum(MAKE(TD_U32, SHAPE(2), 4294967295.0, 1)), TD_I64, NO_DIMS,
                     4294967296.0);
        CHECK_TENSOR(td_sum(MAKE(TD_U64, SHAPE(2), 3, 4)), TD_U64, NO_DIMS, 7);
        CHECK_TENSOR(td_max(bytes), TD_U8, NO_DIMS, 200);
        CHECK_NULL(td_mean(bytes), "td_mean: it is not defined for u8");
        CHECK_NULL(td_norm(bytes), "td_norm: it needs floating-point elements, not u8");
        CHECK_NULL(td_var_dims(bytes, (int[]){0}, 1, 0, false),
                   "td_var_dims: it needs floating-point");
        CHECK_NULL(td_max(td_zeros(SHAPE(2), TD_COMPLEX64, NULL)),
                   "td_max: it is not defined for complex64");
    }
}

TEST(halves_do_not_run_over)
{
    {
        TD_SCOPE;
        td_tensor *x = td_full(SHAPE(64), 300, TD_F16, NULL);
        CHECK_TENSOR(td_norm(x), TD_F16, NO_DIMS, 2400);
        CHECK_TENSOR(td_mean(x), TD_F16, NO_DIMS, 300);
        CHECK_TENSOR(td_var_dims(MAKE(TD_F16, SHAPE(2), 500, -500), (int[]){0}, 1, 0, false),
                     TD_F16, NO_DIMS, INFINITY);
        CHECK_TENSOR(
            td_var_dims(MAKE(TD_F16, SHAPE(4), 100, -100, 100, -100), (int[]){0}, 1, 0, false),
            TD_F16, NO_DIMS, 10000);
    }
}

/* ---- Gradients --------------------------------------------------------------------------------- */

typedef td_tensor *(*unary_fn)(td_tensor *);

static td_tensor *run_unary(td_tensor *const *x, const void *fn)
{
    return (*(const unary_fn *)fn)(x[0]);
}

TEST(gradients_of_all)
{
    unary_fn smooth[] = {td_sum, td_mean, td_prod, td_norm}, distinct[] = {td_max, td_min};
    {
        TD_SCOPE;
        td_tensor *inputs[] = {gradcheck_random(SHAPE(2, 3, 2), 0.5, 2),
                               gradcheck_random(NULL, 0, 0.5, 2),
                               gradcheck_random(SHAPE(1), 0.5, 2)};
        for (int i = 0; i < 3; i++) {
            for (int k = 0; k < 4; k++)
                gradcheck("a reduction", run_unary, &smooth[k], &inputs[i], 1);
            for (int k = 0; k < 2; k++)
                gradcheck_distinct("an extreme", run_unary, &distinct[k], &inputs[i], 1);
        }
        td_tensor *none = gradcheck_random(SHAPE(0, 2), 0, 1);
        for (int k = 0; k < 4; k++)
            gradcheck("a reduction of nothing", run_unary, &smooth[k], &none, 1);
    }
}

struct along {
    int which;
    int dims[3];
    int count;
    bool keepdim;
};

static td_tensor *run_along(td_tensor *const *x, const void *arg)
{
    const struct along *a = arg;
    td_tensor *at;
    switch (a->which) {
    case 0:
        return td_sum_dims(x[0], a->dims, a->count, a->keepdim);
    case 1:
        return td_mean_dims(x[0], a->dims, a->count, a->keepdim);
    case 2:
        return td_var_dims(x[0], a->dims, a->count, 1, a->keepdim);
    case 3:
        return td_var_dims(x[0], a->dims, a->count, 0, a->keepdim);
    case 4:
        return td_max_dim(x[0], a->dims[0], a->keepdim, &at);
    default:
        return td_min_dim(x[0], a->dims[0], a->keepdim, NULL);
    }
}

TEST(gradients_along_dimensions)
{
    struct along list[] = {{0, {0}, 1, false},
                           {0, {-1, 1}, 2, true},
                           {0, {2, 0, 1}, 3, false},
                           {0, {0}, 0, false},
                           {0, {1}, 1, true}};
    {
        TD_SCOPE;
        td_tensor *x = gradcheck_random(SHAPE(3, 2, 4), -2, 2);
        for (size_t i = 0; i < sizeof list / sizeof list[0]; i++)
            for (int which = 0; which < 6; which++) {
                struct along along = list[i];
                along.which = which;
                if (which == 2 && along.count == 0)
                    continue; /* a divisor of 0 */
                if (which < 4)
                    gradcheck("along", run_along, &along, &x, 1);
                else
                    gradcheck_distinct("along", run_along, &along, &x, 1);
            }
    }
}

TEST(gradients_of_special_elements)
{
    {
        TD_SCOPE;
        td_tensor *x = leaf(MAKE(TD_F64, SHAPE(4), 1, 3, 3, 0));
        CHECK_OK(td_backward(td_max(x)));
        CHECK_TENSOR(td_tensor_grad(x), TD_F64, SHAPE(4), 0, 0.5, 0.5, 0);
        td_tensor *n = leaf(MAKE(TD_F64, SHAPE(3), NAN, 3, NAN));
        CHECK_OK(td_backward(td_min(n)));
        CHECK_TENSOR(td_tensor_grad(n), TD_F64, SHAPE(3), 0.5, 0, 0.5);
        td_tensor *one = leaf(MAKE(TD_F64, SHAPE(3), 2, 0, 4)),
                  *two = leaf(MAKE(TD_F64, SHAPE(3), 0, 0, 4));
        CHECK_OK(td_backward(td_prod(one)));
        CHECK_TENSOR(td_tensor_grad(one), TD_F64, SHAPE(3), 0, 8, 0);
        CHECK_OK(td_backward(td_prod(two)));
        CHECK_TENSOR(td_tensor_grad(two), TD_F64, SHAPE(3), 0, 0, 0);
        td_tensor *zero = leaf(MAKE(TD_F64, SHAPE(2), 0, 0));
        CHECK_OK(td_backward(td_norm(zero)));
        CHECK_TENSOR(td_tensor_grad(zero), TD_F64, SHAPE(2), 0, 0);
        td_tensor *half = leaf(MAKE(TD_F16, SHAPE(2), 1, 3));
        CHECK_OK(td_backward(td_var_dims(half, (int[]){0}, 1, 0, false)));
        CHECK_TENSOR(td_tensor_grad(half), TD_F16, SHAPE(2), -1, 1);
        CHECK(!td_tensor_requires_grad(td_argmax(x, 0, false)));
        CHECK(!td_tensor_requires_grad(td_all(x)));
    }
}

TEST(indices_belong_to_the_graph)
{
    {
        TD_SCOPE;
        td_tensor *x = leaf(MAKE(TD_F64, SHAPE(2, 2), 1, 3, 5, 2)), *at = NULL;
        td_tensor *y = td_max_dim(x, 1, false, &at);
        CHECK_OK(td_zero_(at));
        CHECK_FAILS(td_backward(td_sum(y)), TD_ERR_STATE, "td_max_dim");
    }
}

/* ---- Tensors of no dimensions ---------------------------------------------------------------------- */

/* A result of each function that takes dimension 0 or -1 of a number. */
static td_tensor *of_a_number(td_tensor *const *x, const void *arg)
{
    const int dim = *(const int *)arg;
    td_tensor *index = td_zeros(NULL, 0, TD_I64, NULL);
    td_tensor *parts[] = {
        td_sum_dims(x[0], &dim, 1, false),
        td_sum_dims(x[0], &dim, 1, true),
        td_mean_dims(x[0], &dim, 1, false),
        td_var_dims(x[0], &dim, 1, 0, false),
        td_max_dim(x[0], dim, false, NULL),
        td_min_dim(x[0], dim, true, NULL),
        td_f_softmax(x[0], dim),
        td_f_log_softmax(x[0], dim),
        td_squeeze(x[0], dim),
        td_transpose(x[0], dim, 0),
        td_select(td_unsqueeze(x[0], dim), 0, 0),
        td_select(td_f_flatten(x[0], 0, dim), 0, 0),
        td_index_select(x[0], dim, index),
        td_index_select(x[0], dim, td_zeros((int64_t[]){1}, 1, TD_I64, NULL)),
        td_take_along_dim(x[0], dim, index),
    };
    int count = sizeof parts / sizeof parts[0];
    for (int i = 0; i < count; i++)
        if (!parts[i] || td_tensor_ndim(parts[i]) != 0)
            FAIL("part %d of dimension %d: %s", i, dim, td_last_error());
    return td_stack(parts, count, dim);
}

TEST(numbers_count_as_one_dimension)
{
    {
        TD_SCOPE;
        td_tensor *x = MAKE(TD_F64, NO_DIMS, 3), *index = NULL;
        for (int dim = -1; dim <= 0; dim++) {
            CHECK_TENSOR(of_a_number(&x, &dim), TD_F64, SHAPE(15), 3, 3, 3, 0, 3, 3, 1, 0, 3, 3, 3,
                         3, 3, 3, 3);
            gradcheck("of a number", of_a_number, &dim, &x, 1);
            CHECK_TENSOR(td_argmax(x, dim, true), TD_I64, NO_DIMS, 0);
            CHECK_TENSOR(td_argmin(x, dim, false), TD_I64, NO_DIMS, 0);
            CHECK(td_max_dim(x, dim, false, &index));
            CHECK_TENSOR(index, TD_I64, NO_DIMS, 0);
        }
        CHECK_NULL(td_sum_dims(x, (int[]){1}, 1, false), "td_sum_dims: there is no dimension 1");
        CHECK_NULL(td_sum_dims(x, (int[]){0, -1}, 2, false), "dimension 0 is named twice");
        CHECK_NULL(td_max_dim(x, -2, false, NULL), "td_max_dim: there is no dimension -2");
        CHECK_NULL(td_argmax(x, 1, false), "td_argmax: there is no dimension 1");
        CHECK_NULL(td_f_softmax(x, 1), "td_f_softmax: there is no dimension 1");
        CHECK_NULL(td_f_flatten(x, 0, 1), "td_f_flatten: there is no dimension 1");
        CHECK_NULL(td_squeeze(x, 1), "td_squeeze: there is no dimension 1");
        CHECK_NULL(td_transpose(x, 0, 1), "td_transpose: there is no dimension 1");
        CHECK_NULL(td_index_select(x, 0, td_zeros(SHAPE(2), TD_I64, NULL)), "takes one index");
        /* These need a dimension, in PyTorch too. */
        CHECK_NULL(td_select(x, 0, 0), "td_select: ");
        CHECK_NULL(td_narrow(x, 0, 0, 1), "td_narrow: ");
        CHECK_NULL(td_slice(x, 0, 0, 1, 1), "td_slice: ");
    }
}
