/* Joining and splitting, copies to other dtypes and devices, ranges, triangles, and the ownership of results. */
#include "ops_values.h"

#include <math.h>

static td_tensor *leaf(td_tensor *x)
{
    CHECK_OK(td_tensor_set_requires_grad(x, true));
    return x;
}

/* ---- Joining and splitting --------------------------------------------------------------------- */

TEST(joining)
{
    {
        TD_SCOPE;
        td_tensor *a = MAKE(TD_F32, SHAPE(1, 2), 1, 2), *b = MAKE(TD_F32, SHAPE(2, 2), 3, 4, 5, 6);
        td_tensor *both[] = {a, b}, *same[] = {a, a};
        CHECK_TENSOR(td_cat(both, 2, 0), TD_F32, SHAPE(3, 2), 1, 2, 3, 4, 5, 6);
        CHECK_TENSOR(td_cat((td_tensor *[]){b, td_transpose(b, 0, 1)}, 2, -1), TD_F32, SHAPE(2, 4),
                     3, 4, 3, 5, 5, 6, 4, 6);
        CHECK_TENSOR(td_cat(both, 1, 0), TD_F32, SHAPE(1, 2), 1, 2);
        CHECK_TENSOR(td_stack(same, 2, 0), TD_F32, SHAPE(2, 1, 2), 1, 2, 1, 2);
        CHECK_TENSOR(td_stack((td_tensor *[]){b, b}, 2, -1), TD_F32, SHAPE(2, 2, 2), 3, 3, 4, 4, 5,
                     5, 6, 6);
        td_tensor *number = MAKE(TD_I64, NO_DIMS, 5);
        CHECK_TENSOR(td_stack((td_tensor *[]){number, number}, 2, 0), TD_I64, SHAPE(2), 5, 5);
        td_tensor *none = td_zeros(SHAPE(0, 2), TD_F32, NULL);
        CHECK_TENSOR(td_cat((td_tensor *[]){none, a, none}, 3, 0), TD_F32, SHAPE(1, 2), 1, 2);
        CHECK_NULL(td_cat(both, 2, 1),
                   "td_cat: tensor 0 has the shape [1, 2], tensor 1 the shape [2, 2]");
        CHECK_NULL(td_stack(both, 2, 0),
                   "td_stack: tensor 0 has the shape [1, 2], tensor 1 the shape [2, 2]");
        CHECK_NULL(td_cat((td_tensor *[]){a, td_to_dtype(a, TD_F64)}, 2, 0),
                   "td_cat: the operands are f32 and f64");
        CHECK_NULL(td_cat((td_tensor *[]){number}, 1, 0), "td_cat: ");
        CHECK_NULL(td_cat(NULL, 2, 0), "td_cat: there must be at least one tensor");
        CHECK_NULL(td_stack(both, 0, 0), "td_stack: there must be at least one tensor, not 0");
        CHECK_NULL(td_stack(same, 2, 3),
                   "td_stack: tensors of shape [1, 2] cannot be stacked along dimension 3");
    }
}

struct join {
    int count, dim;
    bool stacked;
};

static td_tensor *run_join(td_tensor *const *x, const void *arg)
{
    const struct join *join = arg;
    return join->stacked ? td_stack(x, join->count, join->dim) : td_cat(x, join->count, join->dim);
}

TEST(gradients_of_joining)
{
    {
        TD_SCOPE;
        td_tensor *x[] = {
            gradcheck_random(SHAPE(2, 1, 3), -1, 1), gradcheck_random(SHAPE(2, 4, 3), -1, 1),
            gradcheck_random(SHAPE(2, 0, 3), -1, 1), gradcheck_random(SHAPE(2, 1, 3), -1, 1)};
        gradcheck("td_cat", run_join, &(struct join){4, 1, false}, x, 4);
        td_tensor *y[] = {x[0], x[3], x[0]};
        for (int dim = 0; dim < 4; dim++)
            gradcheck("td_stack", run_join, &(struct join){3, dim, true}, y, 3);
        gradcheck("td_cat", run_join, &(struct join){3, 2, false}, y, 3);

        /* More inputs than a spec has places for. */
        td_tensor *many[20], *w = leaf(MAKE(TD_F64, SHAPE(2), 1, 2));
        for (int i = 0; i < 20; i++)
            many[i] = td_mul_scalar(w, i);
        CHECK_OK(td_backward(td_sum(td_cat(many, 20, 0))));
        CHECK_TENSOR(td_tensor_grad(w), TD_F64, SHAPE(2), 190, 190);
    }
}

static td_tensor *run_split(td_tensor *const *x, const void *arg)
{
    (void)arg;
    td_tensor **parts;
    int count;
    CHECK_OK(td_split(x[0], 2, 1, &parts, &count));
    CHECK_EQ(count, 3);
    td_tensor *result = td_cat((td_tensor *[]){td_square(parts[2]), td_exp(parts[0])}, 2, 1);
    td_free_list(parts);
    return result;
}

TEST(splitting)
{
    td_tensor **parts = NULL;
    int count = -1;
    {
        TD_SCOPE;
        td_tensor *x = td_reshape(td_arange(0, 10, 1, TD_F64, NULL), SHAPE(2, 5));
        CHECK_OK(td_split(x, 2, 1, &parts, &count));
        CHECK_EQ(count, 3);
        CHECK_TENSOR(parts[0], TD_F64, SHAPE(2, 2), 0, 1, 5, 6);
        CHECK_TENSOR(parts[2], TD_F64, SHAPE(2, 1), 4, 9);
        CHECK(td_tensor_data(parts[0]) == td_tensor_data(x));
        td_free_list(parts);
        CHECK_OK(td_split(x, INT64_MAX, -2, &parts, &count));
        CHECK_EQ(count, 1);
        td_free_list(parts);
        CHECK_OK(td_split(td_zeros(SHAPE(0), TD_F32, NULL), 3, 0, &parts, &count));
        CHECK_EQ(count, 1);
        CHECK_TENSOR(parts[0], TD_F32, SHAPE(0), 0);
        td_free_list(parts);
        td_free_list(NULL);
        CHECK_FAILS(td_split(x, 0, 1, &parts, &count), TD_ERR_INVALID,
                    "cannot be split into parts of 0");
        CHECK_FAILS(td_split(x, 1, 2, &parts, &count), TD_ERR_INVALID, "td_split");
        CHECK_FAILS(td_split(x, 1, 0, NULL, &count), TD_ERR_INVALID,
                    "td_split: parts or count is NULL");
        CHECK_EQ(td_split(NULL, 1, 0, &parts, &count), TD_ERR_INVALID);
        td_tensor *r = gradcheck_random(SHAPE(2, 5), -1, 1);
        gradcheck("td_split", run_split, NULL, &r, 1);
    }
}

/* ---- Copies ------------------------------------------------------------------------------------ */

static td_tensor *run_casts(td_tensor *const *x, const void *arg)
{
    (void)arg;
    return td_tensor_to(td_square(td_tensor_to(x[0], td_device_get("cpu:1"))), NULL);
}

TEST(dtypes_and_devices)
{
    {
        TD_SCOPE;
        td_tensor *x = MAKE(TD_F64, SHAPE(2, 2), 1.5, -2.5, 0, 300);
        CHECK(td_to_dtype(x, TD_F64) == x && td_tensor_to(x, td_current_device()) == x &&
              td_tensor_to(x, NULL) == x);
        CHECK_TENSOR(td_to_dtype(x, TD_I32), TD_I32, SHAPE(2, 2), 1, -2, 0, 300);
        CHECK_TENSOR(td_to_dtype(td_transpose(x, 0, 1), TD_F16), TD_F16, SHAPE(2, 2), 1.5, 0, -2.5,
                     300);
        CHECK_TENSOR(td_to_dtype(x, TD_BOOL), TD_BOOL, SHAPE(2, 2), 1, 1, 0, 1);
        CHECK_NULL(td_to_dtype(x, (td_dtype)99), "td_to_dtype: ");
        CHECK_NULL(td_tensor_to(x, td_device_get("gpu:0")), "td_tensor_to: ");
        td_tensor *there = td_tensor_to(td_transpose(x, 0, 1), td_device_get("cpu:1"));
        CHECK_STR(td_device_name(td_tensor_device(there)), "cpu:1");
        CHECK_TENSOR(there, TD_F64, SHAPE(2, 2), 1.5, 0, -2.5, 300);
        CHECK_STR(td_device_name(td_tensor_device(td_add(there, there))), "cpu:1");
        CHECK_STR(td_device_name(td_tensor_device(td_tril(there, 0))), "cpu:1");
        CHECK_STR(td_device_name(td_tensor_device(td_ones_like(there))), "cpu:1");
        td_tensor *r = gradcheck_random(SHAPE(2, 3), -1, 1);
        gradcheck("td_tensor_to", run_casts, NULL, &r, 1);
        td_tensor *w = leaf(MAKE(TD_F32, SHAPE(2), 1, 2));
        CHECK_OK(td_backward(td_sum(td_square(td_to_dtype(w, TD_F64)))));
        CHECK_TENSOR(td_tensor_grad(w), TD_F32, SHAPE(2), 2, 4);
        CHECK(!td_tensor_requires_grad(td_to_dtype(w, TD_I64)));
    }
}

TEST(items)
{
    {
        TD_SCOPE;
        CHECK(td_item(MAKE(TD_F32, NO_DIMS, 0.5)) == 0.5);
        CHECK(td_item(MAKE(TD_F64, SHAPE(1, 1), 0.1)) == 0.1);
        CHECK(td_item(MAKE(TD_I64, SHAPE(1), -5)) == -5);
        CHECK(td_item(MAKE(TD_BOOL, SHAPE(1), 1)) == 1);
        CHECK(td_item(MAKE(TD_BF16, SHAPE(1), 2)) == 2);
        CHECK(td_item(MAKE(TD_COMPLEX64, SHAPE(1), 3)) == 3);
        td_tensor *x = MAKE(TD_F32, SHAPE(2, 2), 1, 2, 3, 4);
        CHECK(td_item(td_select(td_select(x, 0, 1), 0, 0)) == 3);
        CHECK(td_item(td_tensor_to(td_sum(x), td_device_get("cpu:0"))) == 10);
        CHECK(isnan(td_item(x)));
        CHECK_CONTAINS(td_last_error(),
                       "td_item: a tensor of shape [2, 2] has 4 elements, not one");
        CHECK(isnan(td_item(td_zeros(SHAPE(0), TD_F32, NULL))));
    }
}

/* ---- Ranges and triangles ---------------------------------------------------------------------- */

TEST(ranges)
{
    {
        TD_SCOPE;
        CHECK_TENSOR(td_arange(0, 5, 1, TD_I64, NULL), TD_I64, SHAPE(5), 0, 1, 2, 3, 4);
        CHECK_TENSOR(td_arange(1, 2, 0.25, TD_F32, NULL), TD_F32, SHAPE(4), 1, 1.25, 1.5, 1.75);
        CHECK_TENSOR(td_arange(3, 0, -1.5, TD_F64, NULL), TD_F64, SHAPE(2), 3, 1.5);
        CHECK_TENSOR(td_arange(2, 2, 1, TD_F64, NULL), TD_F64, SHAPE(0), 0);
        CHECK_TENSOR(td_linspace(0, 1, 5, TD_F64, NULL), TD_F64, SHAPE(5), 0, 0.25, 0.5, 0.75, 1);
        CHECK_TENSOR(td_linspace(3, 1, 3, TD_F32, NULL), TD_F32, SHAPE(3), 3, 2, 1);
        CHECK_TENSOR(td_linspace(3, 9, 1, TD_F32, NULL), TD_F32, SHAPE(1), 3);
        CHECK_TENSOR(td_linspace(3, 9, 0, TD_F32, NULL), TD_F32, SHAPE(0), 0);
        CHECK_TENSOR(td_ones(SHAPE(2), TD_U8, NULL), TD_U8, SHAPE(2), 1, 1);
        td_tensor *x = MAKE(TD_I32, SHAPE(1, 2), 4, 5);
        CHECK_TENSOR(td_zeros_like(x), TD_I32, SHAPE(1, 2), 0, 0);
        CHECK_TENSOR(td_ones_like(x), TD_I32, SHAPE(1, 2), 1, 1);
        CHECK_EQ(td_tensor_size(td_empty_like(x), 1), 2);
        CHECK_NULL(td_arange(0, 5, 0, TD_F32, NULL),
                   "td_arange: a step of 0 does not lead from 0 to 5");
        CHECK_NULL(td_arange(0, 5, -1, TD_F32, NULL), "td_arange: a step of -1");
        CHECK_NULL(td_arange(0, NAN, 1, TD_F32, NULL), "td_arange: from 0 to nan is no range");
        CHECK_NULL(td_arange(0, 1e30, 1, TD_F32, NULL), "td_arange: ");
        CHECK_NULL(td_arange(0, 300, 1, TD_U8, NULL), "td_arange: ");
        CHECK_CONTAINS(td_last_error(), "not in the range of u8");
        CHECK_NULL(td_arange(0, 2, 1, TD_BOOL, NULL), "td_arange: it is not defined for bool");
        CHECK_NULL(td_linspace(0, 1, -1, TD_F32, NULL), "td_linspace: there cannot be -1 numbers");
    }
}

static td_tensor *run_triangle(td_tensor *const *x, const void *arg)
{
    int64_t diagonal = *(const int *)arg;
    return td_add(td_tril(x[0], diagonal), td_mul_scalar(td_triu(x[0], diagonal + 2), 3));
}

TEST(triangles)
{
    {
        TD_SCOPE;
        td_tensor *x = MAKE(TD_F32, SHAPE(2, 3), 1, 2, 3, 4, 5, 6);
        CHECK_TENSOR(td_tril(x, 0), TD_F32, SHAPE(2, 3), 1, 0, 0, 4, 5, 0);
        CHECK_TENSOR(td_tril(x, -1), TD_F32, SHAPE(2, 3), 0, 0, 0, 4, 0, 0);
        CHECK_TENSOR(td_triu(x, 1), TD_F32, SHAPE(2, 3), 0, 2, 3, 0, 0, 6);
        CHECK_TENSOR(td_triu(x, INT64_MIN), TD_F32, SHAPE(2, 3), 1, 2, 3, 4, 5, 6);
        CHECK_TENSOR(td_tril(x, INT64_MIN), TD_F32, SHAPE(2, 3), 0, 0, 0, 0, 0, 0);
        CHECK_TENSOR(td_tril(x, INT64_MAX), TD_F32, SHAPE(2, 3), 1, 2, 3, 4, 5, 6);
        CHECK_TENSOR(td_triu(x, INT64_MAX), TD_F32, SHAPE(2, 3), 0, 0, 0, 0, 0, 0);
        CHECK_TENSOR(td_tril(td_zeros(SHAPE(0, 3), TD_F32, NULL), 0), TD_F32, SHAPE(0, 3), 0);
        td_tensor *nan = MAKE(TD_F32, SHAPE(1, 2), 1, NAN);
        CHECK_TENSOR(td_tril(nan, 0), TD_F32, SHAPE(1, 2), 1, 0);
        CHECK_NULL(td_tril(td_zeros(SHAPE(3), TD_F32, NULL), 0), "td_tril: x has the shape [3]");
        td_tensor *r = gradcheck_random(SHAPE(2, 3, 4), -1, 1);
        for (int diagonal = -2; diagonal < 3; diagonal++)
            gradcheck("triangles", run_triangle, &diagonal, &r, 1);
    }
}

/* ---- Ownership of results ----------------------------------------------------------------------- */

/* Without a scope every result is the caller's, and nothing is left over; the sanitizer counts. */
TEST(results_without_a_scope)
{
    td_tensor *x = td_ones(SHAPE(2, 3), TD_F32, NULL), *at = NULL, **parts;
    int count;
    CHECK_OK(td_tensor_set_requires_grad(x, true));
    td_tensor *results[] = {td_add(x, x),
                            td_mul_scalar(x, 2),
                            td_exp(x),
                            td_clamp(x, 0, 1),
                            td_var_dims(x, (int[]){1}, 1, 0, false),
                            td_norm(x),
                            td_max_dim(x, 1, false, &at),
                            td_max(x),
                            td_tril(x, 0),
                            td_to_dtype(x, TD_F32),
                            td_to_dtype(x, TD_F64),
                            td_tensor_to(x, td_device_get("cpu:1")),
                            td_stack((td_tensor *[]){x, x}, 2, 0),
                            td_arange(0, 3, 1, TD_I64, NULL),
                            td_linspace(0, 1, 3, TD_F32, NULL)};
    for (size_t i = 0; i < sizeof results / sizeof results[0]; i++) {
        CHECK(results[i]);
        td_tensor_release(results[i]);
    }
    td_tensor_release(at);
    CHECK_OK(td_split(x, 1, 0, &parts, &count));
    for (int i = 0; i < count; i++)
        td_tensor_release(parts[i]);
    td_free_list(parts);
    CHECK(td_equal(x, x) && td_allclose(x, x, 0, 0));
    td_tensor *loss = td_sum(x);
    CHECK_OK(td_backward(loss));
    td_tensor_release(loss);
    td_tensor_release(x);
}

/* An empty tensor of one dimension fits everywhere, as in PyTorch. */
TEST(cat_leaves_empty_lists_out)
{
    {
        TD_SCOPE;
        td_tensor *e = td_zeros(SHAPE(0), TD_F64, NULL), *w = td_ones(SHAPE(2, 3), TD_F64, NULL);
        CHECK_OK(td_tensor_set_requires_grad(e, true));
        CHECK_OK(td_tensor_set_requires_grad(w, true));
        td_tensor *first = td_cat((td_tensor *[]){e, w}, 2, 1);
        CHECK_TENSOR(first, TD_F64, SHAPE(2, 3), 1, 1, 1, 1, 1, 1);
        td_tensor *between = td_cat((td_tensor *[]){w, e, w}, 3, -1);
        CHECK_EQ(td_tensor_size(between, 1), 6);
        CHECK_OK(td_backward(td_sum(between)));
        CHECK_TENSOR(td_tensor_grad(w), TD_F64, SHAPE(2, 3), 2, 2, 2, 2, 2, 2);
        CHECK(td_tensor_grad(e) && td_tensor_ndim(td_tensor_grad(e)) == 1);
        CHECK_EQ(td_tensor_numel(td_tensor_grad(e)), 0);
        td_tensor *none = td_cat((td_tensor *[]){e, e}, 2, 0);
        CHECK(td_tensor_ndim(none) == 1 && td_tensor_numel(none) == 0);
        CHECK_NULL(td_cat((td_tensor *[]){td_zeros(SHAPE(0, 2), TD_F64, NULL), w}, 2, 0),
                   "td_cat: tensor 0 has the shape [0, 2], tensor 1 the shape [2, 3]");
        CHECK_NULL(td_cat((td_tensor *[]){e, w}, 2, 2), "td_cat: there is no dimension 2");
        CHECK_NULL(td_stack((td_tensor *[]){e, w}, 2, 0), "td_stack: ");
        CHECK_NULL(td_cat((td_tensor *[]){td_sum(w), w}, 2, 0), "td_cat: ");
    }
}
