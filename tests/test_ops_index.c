/* Indices, comparison and choosing, joining and splitting, copies, ranges and triangles. */
#include "ops_values.h"

#include <math.h>

static td_tensor *leaf(td_tensor *x)
{
    CHECK_OK(td_tensor_set_requires_grad(x, true));
    return x;
}

/* ---- Indices ----------------------------------------------------------------------------------- */

TEST(parts_by_index)
{
    {
        TD_SCOPE;
        td_tensor *x = td_reshape(td_arange(0, 6, 1, TD_F32, NULL), SHAPE(2, 3));
        td_tensor *at = MAKE(TD_I64, SHAPE(4), 2, 0, 2, 1);
        CHECK_TENSOR(td_index_select(x, 1, at), TD_F32, SHAPE(2, 4), 2, 0, 2, 1, 5, 3, 5, 4);
        CHECK_TENSOR(td_index_select(x, -2, td_slice(at, 0, 1, INT64_MAX, 2)), TD_F32, SHAPE(2, 3),
                     0, 1, 2, 3, 4, 5);
        CHECK_TENSOR(td_index_select(x, 0, td_zeros(SHAPE(0), TD_I64, NULL)), TD_F32, SHAPE(0, 3),
                     0);
        CHECK_TENSOR(td_take_along_dim(x, 1, MAKE(TD_I64, SHAPE(2, 2), 2, 0, 1, 1)), TD_F32,
                     SHAPE(2, 2), 2, 0, 4, 4);
        CHECK_TENSOR(td_take_along_dim(x, 0, MAKE(TD_I64, SHAPE(1, 3), 1, 0, 1)), TD_F32,
                     SHAPE(1, 3), 3, 1, 5);
        CHECK_TENSOR(td_one_hot(MAKE(TD_I64, SHAPE(2), 1, 0), 3), TD_I64, SHAPE(2, 3), 0, 1, 0, 1,
                     0, 0);
        CHECK_TENSOR(td_one_hot(MAKE(TD_I64, NO_DIMS, 2), 3), TD_I64, SHAPE(3), 0, 0, 1);
    }
}

TEST(wrong_indices_are_named,
     .host_only = "an index out of range is a later failure of an accelerator")
{
    {
        TD_SCOPE;
        td_tensor *x = td_zeros(SHAPE(2, 3), TD_F32, NULL), *i32 = td_zeros(SHAPE(2), TD_I32, NULL);
        td_tensor *at = MAKE(TD_I64, SHAPE(2), 0, 3), *below = MAKE(TD_I64, SHAPE(1), -1);
        CHECK_NULL(td_index_select(x, 1, at), "td_index_select: ");
        CHECK_CONTAINS(td_last_error(), "3");
        CHECK_NULL(td_index_select(x, 1, below), "-1");
        CHECK_NULL(td_index_select(x, 1, i32),
                   "td_index_select: the indices are i32; they must be i64");
        CHECK_NULL(td_index_select(x, 2, at), "td_index_select: ");
        CHECK_NULL(td_index_select(x, 0, td_zeros(SHAPE(1, 1), TD_I64, NULL)),
                   "td_index_select: the list of indices has the shape [1, 1]");
        CHECK_NULL(td_index_select(x, 0, td_tensor_to(at, td_device_get("cpu:1"))),
                   "on cpu:1 and the elements on");
        CHECK_NULL(td_take_along_dim(x, 0, at),
                   "td_take_along_dim: x has the shape [2, 3], the indices [2]");
        CHECK_NULL(td_take_along_dim(x, 1, td_zeros(SHAPE(3, 3), TD_I64, NULL)),
                   "[3, 3]; only dimension 1 may differ");
        CHECK_NULL(td_take_along_dim(x, 1, td_full(SHAPE(2, 1), 3, TD_I64, NULL)),
                   "td_take_along_dim: ");
        CHECK_NULL(td_one_hot(at, 3), "td_one_hot: ");
        CHECK_NULL(td_one_hot(at, 0), "td_one_hot: there must be at least one class");
        CHECK_NULL(td_one_hot(i32, 3), "td_one_hot: the indices are i32");
    }
}

struct pick {
    int which, dim;
};

static td_tensor *run_pick(td_tensor *const *x, const void *arg)
{
    const struct pick *pick = arg;
    return pick->which ? td_take_along_dim(x[0], pick->dim, x[1])
                       : td_index_select(x[0], pick->dim, x[1]);
}

TEST(gradients_of_indices)
{
    {
        TD_SCOPE;
        td_tensor *x = gradcheck_random(SHAPE(2, 3, 2), -1, 1);
        td_tensor *at = MAKE(TD_I64, SHAPE(4), 1, 0, 1, 1);
        td_tensor *along = MAKE(TD_I64, SHAPE(2, 1, 2), 2, 0, 2, 1);
        for (int dim = 0; dim < 3; dim++)
            gradcheck("td_index_select", run_pick, &(struct pick){0, dim}, (td_tensor *[]){x, at},
                      2);
        gradcheck("td_take_along_dim", run_pick, &(struct pick){1, 1}, (td_tensor *[]){x, along},
                  2);
        td_tensor *twice = MAKE(TD_I64, SHAPE(2, 3, 3), 0, 0, 1, 1, 1, 1, 0, 1, 0, 0, 0, 1, 1, 1, 1,
                                0, 1, 0);
        gradcheck("td_take_along_dim", run_pick, &(struct pick){1, 2}, (td_tensor *[]){x, twice},
                  2);

        td_tensor *y = td_index_select(leaf(x), 0, at);
        CHECK_OK(td_zero_(at));
        CHECK_FAILS(td_backward(td_sum(y)), TD_ERR_STATE, "td_index_select");
    }
}

/* ---- Comparison and choosing ------------------------------------------------------------------- */

TEST(comparison)
{
    {
        TD_SCOPE;
        td_tensor *a = MAKE(TD_F32, SHAPE(4), 1, 2, 3, NAN),
                  *b = MAKE(TD_F32, SHAPE(4), 2, 2, 1, NAN);
        CHECK_TENSOR(td_eq(a, b), TD_BOOL, SHAPE(4), 0, 1, 0, 0);
        CHECK_TENSOR(td_ne(a, b), TD_BOOL, SHAPE(4), 1, 0, 1, 1);
        CHECK_TENSOR(td_lt(a, b), TD_BOOL, SHAPE(4), 1, 0, 0, 0);
        CHECK_TENSOR(td_le(a, b), TD_BOOL, SHAPE(4), 1, 1, 0, 0);
        CHECK_TENSOR(td_gt(a, b), TD_BOOL, SHAPE(4), 0, 0, 1, 0);
        CHECK_TENSOR(td_ge(a, b), TD_BOOL, SHAPE(4), 0, 1, 1, 0);
        CHECK_TENSOR(td_eq_scalar(a, 2), TD_BOOL, SHAPE(4), 0, 1, 0, 0);
        CHECK_TENSOR(td_ne_scalar(a, 2), TD_BOOL, SHAPE(4), 1, 0, 1, 1);
        CHECK_TENSOR(td_lt_scalar(a, 2), TD_BOOL, SHAPE(4), 1, 0, 0, 0);
        CHECK_TENSOR(td_le_scalar(a, 2), TD_BOOL, SHAPE(4), 1, 1, 0, 0);
        CHECK_TENSOR(td_gt_scalar(a, 2), TD_BOOL, SHAPE(4), 0, 0, 1, 0);
        CHECK_TENSOR(td_ge_scalar(a, 2), TD_BOOL, SHAPE(4), 0, 1, 1, 0);
        CHECK_TENSOR(td_isnan(a), TD_BOOL, SHAPE(4), 0, 0, 0, 1);
        td_tensor *p = MAKE(TD_BOOL, SHAPE(4), 0, 0, 1, 1),
                  *q = MAKE(TD_I32, SHAPE(4), 0, 7, 0, -1);
        td_tensor *r = td_to_dtype(q, TD_BOOL);
        CHECK_TENSOR(td_logical_and(p, r), TD_BOOL, SHAPE(4), 0, 0, 0, 1);
        CHECK_TENSOR(td_logical_or(p, r), TD_BOOL, SHAPE(4), 0, 1, 1, 1);
        CHECK_TENSOR(td_logical_xor(p, r), TD_BOOL, SHAPE(4), 0, 1, 1, 0);
        CHECK_TENSOR(td_logical_not(q), TD_BOOL, SHAPE(4), 1, 0, 1, 0);
        CHECK_NULL(td_lt(a, p), "td_lt: the operands are f32 and bool");
        CHECK_NULL(td_ge(a, td_zeros(SHAPE(3), TD_F32, NULL)), "td_ge: the shapes [4] and [3]");
        CHECK_NULL(td_lt_scalar(td_zeros(SHAPE(1), TD_COMPLEX64, NULL), 0),
                   "td_lt_scalar: it is not defined for complex64");
    }
}

TEST(comparison_as_a_whole)
{
    {
        TD_SCOPE;
        td_tensor *a = MAKE(TD_F32, SHAPE(3), 1, 2, INFINITY),
                  *b = MAKE(TD_F32, SHAPE(3), 1, 2.001, INFINITY);
        CHECK(td_equal(a, a) && td_equal(a, td_clone(a)) && !td_equal(a, b));
        CHECK(!td_equal(a, td_reshape(a, SHAPE(1, 3))) && !td_equal(a, td_to_dtype(a, TD_F64)));
        CHECK(td_equal(td_zeros(SHAPE(0, 2), TD_F32, NULL), td_zeros(SHAPE(0, 2), TD_F32, NULL)));
        CHECK(td_allclose(a, b, 1e-3, 0) && td_allclose(a, b, 0, 0.0011) &&
              !td_allclose(a, b, 1e-4, 0));
        td_tensor *infinite = MAKE(TD_F32, SHAPE(1), INFINITY), *one = MAKE(TD_F32, SHAPE(1), 1);
        CHECK(!td_allclose(one, infinite, 1, 1) && !td_allclose(td_neg(infinite), infinite, 1, 1));
        td_tensor *nan = MAKE(TD_F32, SHAPE(1), NAN);
        CHECK(!td_equal(nan, nan) && !td_allclose(nan, nan, 1, 1));
        CHECK(td_allclose(MAKE(TD_U8, SHAPE(1), 0), MAKE(TD_U8, SHAPE(1), 255), 1, 0));
        CHECK(!td_allclose(a, td_tensor_to(a, td_device_get("cpu:1")), 1, 1));
        CHECK_CONTAINS(td_last_error(), "and on cpu:1");
    }
}

static td_tensor *run_where(td_tensor *const *x, const void *arg)
{
    (void)arg;
    return td_where(x[0], x[1], x[2]);
}

static td_tensor *run_masked_fill(td_tensor *const *x, const void *arg)
{
    (void)arg;
    return td_masked_fill(x[0], x[1], 7);
}

TEST(choosing)
{
    {
        TD_SCOPE;
        td_tensor *c = MAKE(TD_BOOL, SHAPE(2, 1), 1, 0), *row = MAKE(TD_I32, SHAPE(3), 1, 2, 3);
        td_tensor *number = MAKE(TD_I32, NO_DIMS, 9);
        CHECK_TENSOR(td_where(c, row, number), TD_I32, SHAPE(2, 3), 1, 2, 3, 9, 9, 9);
        CHECK_TENSOR(td_masked_fill(row, MAKE(TD_BOOL, SHAPE(1), 1), -1), TD_I32, SHAPE(3), -1, -1,
                     -1);
        CHECK_NULL(td_where(row, row, row), "td_where: the condition is i32; it must be bool");
        CHECK_NULL(td_where(c, row, td_zeros(SHAPE(2), TD_I32, NULL)),
                   "td_where: the shapes [3] and [2]");
        CHECK_NULL(td_where(td_zeros(SHAPE(2), TD_BOOL, NULL), row, row),
                   "td_where: the shapes [2] and [3]");
        CHECK_NULL(td_where(c, row, td_zeros(SHAPE(3), TD_F32, NULL)),
                   "td_where: the operands are i32 and f32");
        CHECK_NULL(td_where(td_tensor_to(c, td_device_get("cpu:0")), row, row),
                   "td_where: the condition is on cpu:0");
        CHECK_NULL(td_masked_fill(row, c, 0),
                   "td_masked_fill: a tensor of shape [2, 1] does not expand");
        CHECK_NULL(td_masked_fill(row, row, 0), "td_masked_fill: the mask is i32");
        CHECK_NULL(td_masked_fill(td_zeros(SHAPE(2, 1), TD_U8, NULL), c, -1),
                   "not in the range of u8");

        td_tensor *x = gradcheck_random(SHAPE(2, 3), -1, 1), *y = gradcheck_random(SHAPE(3), -1, 1);
        gradcheck("td_where", run_where, NULL, (td_tensor *[]){c, x, y}, 3);
        gradcheck("td_where", run_where, NULL, (td_tensor *[]){c, y, x}, 3);
        gradcheck("td_where", run_where, NULL, (td_tensor *[]){c, y, y}, 3);
        gradcheck("td_masked_fill", run_masked_fill, NULL, (td_tensor *[]){x, c}, 2);
    }
}

/* Places are those of the tensor that was given, and the name is that of the function that was called. */
TEST(indices_out_of_range_are_named_where_they_are,
     .host_only = "an index out of range is a later failure of an accelerator")
{
    {
        TD_SCOPE;
        td_tensor *table = td_zeros(SHAPE(4, 2), TD_F32, NULL);
        td_tensor *list = MAKE(TD_I64, SHAPE(3), 0, 4, 1),
                  *pairs = MAKE(TD_I64, SHAPE(2, 2), 0, 1, 7, 2);
        CHECK_NULL(td_f_embedding(list, table, -1), "td_f_embedding: the index at [1] is 4");
        CHECK_NULL(td_f_embedding(pairs, table, -1), "td_f_embedding: the index at [1, 0] is 7");
        CHECK_NULL(td_f_embedding(td_transpose(pairs, 0, 1), table, -1), "at [0, 1] is 7");
        CHECK_NULL(td_index_select(table, 0, list), "td_index_select: the index at [1] is 4");
        CHECK_NULL(td_take_along_dim(td_zeros(SHAPE(4, 2), TD_F32, NULL), 0, pairs),
                   "td_take_along_dim: the index at [1, 0] is 7, but dimension 0 has 4");
        CHECK_NULL(td_one_hot(list, 4), "td_one_hot: the class at [1] is 4; it must be 0 to 3");
        CHECK_NULL(td_one_hot(pairs, 4), "td_one_hot: the class at [1, 0] is 7");
        td_tensor *x = td_zeros(SHAPE(3, 4), TD_F32, NULL),
                  *image = td_zeros(SHAPE(2, 4, 2), TD_F32, NULL);
        CHECK_NULL(td_nll_loss(x, list), "td_nll_loss: the target at [1] is 4, but there are 4");
        CHECK_NULL(td_cross_entropy(x, list), "td_cross_entropy: the target at [1] is 4");
        CHECK_NULL(td_cross_entropy(image, pairs), "td_cross_entropy: the target at [1, 0] is 7");
        CHECK_NULL(td_cross_entropy(td_zeros(SHAPE(4), TD_F32, NULL), MAKE(TD_I64, NO_DIMS, 9)),
                   "td_cross_entropy: the target at [] is 9");
        CHECK_NULL(td_clamp(x, NAN, 1), "td_clamp: a bound is NaN");
        CHECK_FAILS(td_fill_(td_zeros(SHAPE(1), TD_U8, NULL), 256), TD_ERR_INVALID,
                    "td_fill_: 256 is not in the range of u8");
    }
}
