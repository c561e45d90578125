/* Products: gradients by finite differences, values against plain loops, gradients that are written
 * where leaves keep them, and what is refused. */
#include "ops_checks.h"
#include "host_data.h"

#include <math.h>

/* ---- matmul ---------------------------------------------------------------------------------------- */

static td_tensor *matmul(td_tensor *const *x, const void *arg)
{
    (void)arg;
    return td_matmul(x[0], x[1]);
}

struct product {
    int64_t a[5], b[5], y[5]; /* ended by -1 */
};

static const struct product products[] = {
    {{3, -1}, {3, -1}, {-1}},
    {{1, -1}, {1, -1}, {-1}},
    {{4, 3, -1}, {3, -1}, {4, -1}},
    {{3, -1}, {3, 5, -1}, {5, -1}},
    {{4, 3, -1}, {3, 5, -1}, {4, 5, -1}},
    {{1, 1, -1}, {1, 1, -1}, {1, 1, -1}},
    {{2, 4, 3, -1}, {3, 5, -1}, {2, 4, 5, -1}},
    {{4, 3, -1}, {2, 3, 5, -1}, {2, 4, 5, -1}},
    {{2, 4, 3, -1}, {2, 3, 5, -1}, {2, 4, 5, -1}},
    {{2, 1, 4, 3, -1}, {3, 3, 2, -1}, {2, 3, 4, 2, -1}},
    {{1, 4, 3, -1}, {2, 3, 2, -1}, {2, 4, 2, -1}},
    {{3, -1}, {2, 3, 5, -1}, {2, 5, -1}},
    {{2, 2, 4, 3, -1}, {3, -1}, {2, 2, 4, -1}},
};

static int length_of(const int64_t *shape)
{
    int ndim = 0;
    while (shape[ndim] >= 0)
        ndim++;
    return ndim;
}

static void check_shape(const td_tensor *x, const int64_t *shape)
{
    CHECK(x);
    CHECK_EQ(td_tensor_ndim(x), length_of(shape));
    for (int d = 0; d < td_tensor_ndim(x); d++)
        CHECK_EQ(td_tensor_size(x, d), shape[d]);
}

/* By broadcasting: the sum over k of a[..., i, k, 1] b[..., 1, k, j]. */
static td_tensor *slow_matmul(td_tensor *a, td_tensor *b)
{
    td_tensor *x = td_tensor_ndim(a) == 1 ? td_unsqueeze(a, 0) : a;
    td_tensor *y = td_tensor_ndim(b) == 1 ? td_unsqueeze(b, 1) : b;
    return td_sum_dims(td_mul(td_unsqueeze(x, -1), td_unsqueeze(y, -3)), (int[]){-2}, 1, false);
}

TEST(matmul_of_all_kinds)
{
    for (size_t i = 0; i < sizeof products / sizeof products[0]; i++) {
        TD_SCOPE;
        const struct product *p = &products[i];
        td_tensor *a = random_of(p->a, length_of(p->a)), *b = random_of(p->b, length_of(p->b));
        td_tensor *y = td_matmul(a, b);
        check_shape(y, p->y);
        check_near(y, td_reshape(slow_matmul(a, b), p->y, length_of(p->y)), 1e-12);
        gradcheck("td_matmul", matmul, NULL, (td_tensor *[]){a, b}, 2);
    }
}

TEST(matmul_of_nothing)
{
    {
        TD_SCOPE;
        td_tensor *y = td_matmul(td_zeros(SHAPE(2, 0), TD_F32, NULL),
                                 td_zeros(SHAPE(0, 3), TD_F32, NULL));
        CHECK_EQ(td_tensor_numel(y), 6);
        for (int i = 0; i < 6; i++)
            CHECK(((const float *)host_data(y))[i] == 0);
        CHECK_EQ(td_tensor_numel(td_matmul(td_zeros(SHAPE(0, 4, 2), TD_F32, NULL),
                                           td_zeros(SHAPE(2, 3), TD_F32, NULL))),
                 0);
        td_tensor *a = random_of(SHAPE(0, 4, 2)), *b = random_of(SHAPE(2, 3));
        td_tensor *c = random_of(SHAPE(5, 4));
        td_tensor_set_requires_grad(a, true);
        td_tensor_set_requires_grad(b, true);
        td_tensor_set_requires_grad(c, true);
        CHECK_OK(td_backward(td_sum(td_matmul(c, td_matmul(a, b)))));
        CHECK(td_equal(td_tensor_grad(b), td_zeros_like(b)));
        CHECK(td_equal(td_tensor_grad(c), td_zeros_like(c)));
        CHECK_EQ(td_tensor_numel(td_tensor_grad(a)), 0);
    }
}

static td_tensor *bmm(td_tensor *const *x, const void *arg)
{
    (void)arg;
    return td_bmm(x[0], x[1]);
}

TEST(bmm_is_matmul_of_batches)
{
    {
        TD_SCOPE;
        td_tensor *a = random_of(SHAPE(3, 2, 4)), *b = random_of(SHAPE(3, 4, 5));
        check_near(td_bmm(a, b), slow_matmul(a, b), 1e-12);
        gradcheck("td_bmm", bmm, NULL, (td_tensor *[]){a, b}, 2);
        CHECK_NULL(td_bmm(a, td_zeros(SHAPE(2, 4, 5), TD_F64, NULL)),
                   "td_bmm: the shapes [3, 2, 4] and");
        CHECK_NULL(td_bmm(a, td_zeros(SHAPE(4, 5), TD_F64, NULL)), "[B, M, K] and [B, K, N]");
        CHECK_NULL(td_bmm(a, td_zeros(SHAPE(3, 3, 5), TD_F64, NULL)), "[3, 2, 4] and [3, 3, 5]");
    }
}

TEST(products_refuse)
{
    {
        TD_SCOPE;
        td_tensor *a = td_zeros(SHAPE(2, 3), TD_F32, NULL);
        CHECK_NULL(td_matmul(a, td_zeros(SHAPE(4, 2), TD_F32, NULL)),
                   "td_matmul: the shapes [2, 3] and [4, 2] cannot be multiplied");
        CHECK_NULL(td_matmul(a, td_zeros(SHAPE(3, 2), TD_F64, NULL)), "f32 and f64");
        CHECK_NULL(
            td_matmul(td_zeros(SHAPE(2, 3), TD_I64, NULL), td_zeros(SHAPE(3, 2), TD_I64, NULL)),
            "i64");
        CHECK_NULL(td_matmul(td_zeros(NULL, 0, TD_F32, NULL), a), "without dimensions");
        CHECK_NULL(td_matmul(td_zeros(SHAPE(2, 2, 3), TD_F32, NULL),
                             td_zeros(SHAPE(4, 3, 2), TD_F32, NULL)),
                   "[2, 2, 3] and [4, 3, 2]");
        CHECK_NULL(td_matmul(td_zeros(SHAPE(2), TD_F32, NULL), td_zeros(SHAPE(3), TD_F32, NULL)),
                   "[2] and [3]");
        CHECK(!td_matmul(NULL, a) && !td_matmul(a, NULL) && !td_bmm(NULL, a));
    }
}

/* A leaf on both sides, and one that is used twice: its gradient is a sum. */
TEST(leaves_that_are_used_twice)
{
    {
        TD_SCOPE;
        td_tensor *w = random_of(SHAPE(3, 3)), *x = random_of(SHAPE(4, 3));
        td_tensor *other = td_clone(w);
        td_tensor_set_requires_grad(w, true);
        CHECK_OK(td_backward(td_sum(td_matmul(td_matmul(x, w), td_matmul(w, w)))));
        td_tensor *e = td_ones((int64_t[]){4, 3}, 2, TD_F64, NULL);
        td_tensor *square = td_matmul(other, other), *left = td_matmul(x, other);
        td_tensor *outer = td_matmul(td_transpose(left, 0, 1), e); /* gradient of w w */
        td_tensor *expected = td_matmul(td_transpose(x, 0, 1),
                                        td_matmul(e, td_transpose(square, 0, 1)));
        expected = td_add(expected, td_matmul(outer, td_transpose(other, 0, 1)));
        expected = td_add(expected, td_matmul(td_transpose(other, 0, 1), outer));
        check_near(td_tensor_grad(w), expected, 1e-12);
    }
}

/* ---- linear ---------------------------------------------------------------------------------------- */

static td_tensor *linear(td_tensor *const *x, const void *arg)
{
    return td_f_linear(x[0], x[1], arg ? NULL : x[2]);
}

TEST(linear_layers)
{
    static const int64_t shapes[][4] = {{4, -1}, {3, 4, -1}, {2, 3, 4, -1}, {1, 4, -1}};
    for (int i = 0; i < 4; i++) {
        TD_SCOPE;
        td_tensor *x = random_of(shapes[i], length_of(shapes[i]));
        td_tensor *w = random_of(SHAPE(5, 4)), *b = random_of(SHAPE(5));
        td_tensor *expected = td_matmul(x, td_transpose(w, 0, 1));
        check_near(td_f_linear(x, w, NULL), expected, 1e-12);
        check_near(td_f_linear(x, w, b), td_add(expected, b), 1e-12);
        gradcheck("td_f_linear", linear, NULL, (td_tensor *[]){x, w, b}, 3);
        gradcheck("td_f_linear", linear, "without bias", (td_tensor *[]){x, w}, 2);
    }
}

/* The gradients of two passes add up where the leaf keeps them, and a zeroed one starts afresh. */
TEST(linear_writes_to_the_gradient_of_a_leaf)
{
    {
        TD_SCOPE;
        td_tensor *x = random_of(SHAPE(6, 4)), *w = random_of(SHAPE(5, 4)),
                  *b = random_of(SHAPE(5));
        td_tensor_set_requires_grad(w, true);
        td_tensor_set_requires_grad(b, true);
        CHECK_OK(td_backward(td_sum(td_f_linear(x, w, b))));
        td_tensor *grad_w = td_tensor_grad(w), *grad_b = td_tensor_grad(b);
        td_tensor *once = td_clone(grad_w), *once_b = td_clone(grad_b);
        check_near(once_b, td_full((int64_t[]){5}, 1, 6, TD_F64, NULL), 0);
        CHECK_OK(td_backward(td_sum(td_f_linear(x, w, b))));
        CHECK(td_tensor_grad(w) == grad_w && td_tensor_grad(b) == grad_b);
        check_near(grad_w, td_mul_scalar(once, 2), 1e-12);
        check_near(grad_b, td_mul_scalar(once_b, 2), 1e-12);
        td_tensor_zero_grad(w);
        td_tensor_zero_grad(b);
        CHECK_OK(td_backward(td_sum(td_f_linear(x, w, b))));
        CHECK(td_equal(td_tensor_grad(w), once) && td_equal(td_tensor_grad(b), once_b));
    }
}

TEST(linear_refuses)
{
    {
        TD_SCOPE;
        td_tensor *x = td_zeros(SHAPE(64, 100), TD_F32, NULL),
                  *w = td_zeros(SHAPE(10, 784), TD_F32, NULL);
        CHECK_NULL(td_f_linear(x, w, NULL), "td_f_linear: x has the shape [64, 100], weight "
                                            "[10, 784]; the last size of x must be 784");
        CHECK_NULL(td_f_linear(td_zeros(NULL, 0, TD_F32, NULL), w, NULL), "[10, 784]");
        td_tensor *good = td_zeros(SHAPE(2, 784), TD_F32, NULL);
        CHECK_NULL(td_f_linear(good, w, td_zeros(SHAPE(11), TD_F32, NULL)),
                   "bias has the shape [11]");
        CHECK_NULL(td_f_linear(good, w, td_zeros(SHAPE(10), TD_F64, NULL)), "f32 and f64");
        CHECK_NULL(td_f_linear(good, td_zeros(SHAPE(784), TD_F32, NULL), NULL),
                   "weight has the shape");
        CHECK(!td_f_linear(NULL, w, NULL) && !td_f_linear(x, NULL, NULL));
        CHECK_EQ(td_tensor_numel(td_f_linear(td_zeros(SHAPE(0, 784), TD_F32, NULL), w, NULL)), 0);
    }
}

/* What was saved may not change before backward. */
TEST(linear_notices_a_change_in_place)
{
    {
        TD_SCOPE;
        td_tensor *x = random_of(SHAPE(2, 4)), *w = random_of(SHAPE(3, 4));
        td_tensor_set_requires_grad(w, true);
        td_tensor *y = td_sum(td_f_linear(x, w, NULL));
        CHECK_OK(td_add_scalar_(x, 1));
        CHECK_EQ(td_backward(y), TD_ERR_STATE);
        CHECK_CONTAINS(td_last_error(), "td_f_linear");
    }
}

/* ---- conv2d ---------------------------------------------------------------------------------------- */

static td_tensor *conv2d(td_tensor *const *x, const void *arg)
{
    return td_f_conv2d(x[0], x[1], x[2], arg);
}

static td_tensor *conv2d_without_bias(td_tensor *const *x, const void *arg)
{
    return td_f_conv2d(x[0], x[1], NULL, arg);
}

struct conv {
    int64_t x[4], w[4];
    td_conv2d_options options;
};

static const struct conv convs[] = {
    {{2, 1, 5, 6}, {3, 1, 3, 2}, {.groups = 1}},
    {{1, 2, 4, 4}, {2, 2, 1, 1}, {.groups = 1}},
    {{2, 4, 5, 5}, {6, 2, 3, 3}, {.groups = 2, .padding = {1, 1}}},
    {{1, 3, 6, 7}, {3, 1, 2, 3}, {.groups = 3, .stride = {2, 1}, .padding = {0, 2}}},
    {{2, 2, 7, 6}, {2, 2, 2, 2}, {.dilation = {2, 3}, .stride = {2, 2}, .padding = {1, 0}}},
    {{1, 1, 1, 1}, {1, 1, 1, 1}, {.groups = 1}},
    {{1, 2, 3, 3}, {2, 2, 3, 3}, {.padding = {2, 2}}},
};

static double at4(const double *x, const int64_t *shape, int64_t n, int64_t c, int64_t h, int64_t w)
{
    if (h < 0 || h >= shape[2] || w < 0 || w >= shape[3])
        return 0;
    return x[((n * shape[1] + c) * shape[2] + h) * shape[3] + w];
}

/* One element of the result, by the definition. */
static double conv_at(const struct conv *conv, const double *x, const double *w, int64_t n,
                      int64_t o, int64_t i, int64_t j)
{
    const td_conv2d_options *options = &conv->options;
    int64_t groups = options->groups ? options->groups : 1, group = o / (conv->w[0] / groups);
    int64_t step[2], far[2];
    for (int d = 0; d < 2; d++) {
        step[d] = options->stride[d] ? options->stride[d] : 1;
        far[d] = options->dilation[d] ? options->dilation[d] : 1;
    }
    double sum = 0;
    for (int64_t c = 0; c < conv->w[1]; c++)
        for (int64_t a = 0; a < conv->w[2]; a++)
            for (int64_t b = 0; b < conv->w[3]; b++)
                sum += at4(x, conv->x, n, group * conv->w[1] + c,
                           i * step[0] + a * far[0] - options->padding[0],
                           j * step[1] + b * far[1] - options->padding[1]) *
                       at4(w, conv->w, o, c, a, b);
    return sum;
}

TEST(convolutions)
{
    for (size_t i = 0; i < sizeof convs / sizeof convs[0]; i++) {
        TD_SCOPE;
        const struct conv *conv = &convs[i];
        td_tensor *x = random_of(conv->x, 4), *w = random_of(conv->w, 4);
        td_tensor *b = random_of(conv->w, 1);
        td_tensor *y = td_f_conv2d(x, w, b, &conv->options);
        CHECK(y);
        const int64_t *shape = y->layout.shape;
        const double *in = host_data(x), *weight = host_data(w);
        const double *out = host_data(y), *bias = host_data(b);
        for (int64_t n = 0; n < shape[0]; n++)
            for (int64_t o = 0; o < shape[1]; o++)
                for (int64_t h = 0; h < shape[2]; h++)
                    for (int64_t k = 0; k < shape[3]; k++)
                        CHECK(fabs(at4(out, shape, n, o, h, k) - bias[o] -
                                   conv_at(conv, in, weight, n, o, h, k)) < 1e-12);
        gradcheck("td_f_conv2d", conv2d, &conv->options, (td_tensor *[]){x, w, b}, 3);
        gradcheck("td_f_conv2d", conv2d_without_bias, &conv->options, (td_tensor *[]){x, w}, 2);
        td_tensor *single = td_select(x, 0, 0);
        check_near(td_f_conv2d(single, w, b, &conv->options), td_select(y, 0, 0), 1e-12);
        gradcheck("td_f_conv2d", conv2d, &conv->options, (td_tensor *[]){single, w, b}, 3);
    }
}

/* The kernel treats both alike; the leaves may not be: one has a gradient already, the other none. */
TEST(convolution_adds_to_one_gradient_and_sets_the_other)
{
    for (int which = 0; which < 3; which++) {
        TD_SCOPE;
        td_tensor *x = random_of(SHAPE(2, 1, 4, 4)), *w = random_of(SHAPE(2, 1, 2, 2));
        td_tensor *b = random_of(SHAPE(2));
        td_tensor_set_requires_grad(w, true);
        td_tensor_set_requires_grad(b, true);
        CHECK_OK(td_backward(td_sum(td_f_conv2d(x, w, b, NULL))));
        td_tensor *once_w = td_clone(td_tensor_grad(w)), *once_b = td_clone(td_tensor_grad(b));
        if (which == 0)
            td_tensor_zero_grad(w);
        if (which == 1)
            td_tensor_zero_grad(b);
        CHECK_OK(td_backward(td_sum(td_f_conv2d(x, w, b, NULL))));
        check_near(td_tensor_grad(w), td_mul_scalar(once_w, which == 0 ? 1 : 2), 1e-12);
        check_near(td_tensor_grad(b), td_mul_scalar(once_b, which == 1 ? 1 : 2), 1e-12);
    }
}

TEST(convolution_refuses)
{
    {
        TD_SCOPE;
        td_tensor *x = td_zeros(SHAPE(2, 3, 8, 8), TD_F32, NULL);
        td_tensor *w = td_zeros(SHAPE(4, 3, 3, 3), TD_F32, NULL);
        CHECK_NULL(td_f_conv2d(x, td_zeros(SHAPE(4, 2, 3, 3), TD_F32, NULL), NULL, NULL),
                   "td_f_conv2d: x has the shape [2, 3, 8, 8], weight [4, 2, 3, 3]");
        CHECK_NULL(td_f_conv2d(x, w, NULL, &(td_conv2d_options){.groups = 3}), "3 groups");
        CHECK_NULL(td_f_conv2d(x, w, NULL, &(td_conv2d_options){.groups = -1}), "-1 groups");
        CHECK_NULL(td_f_conv2d(x, w, NULL, &(td_conv2d_options){.stride = {-1, 1}}), "stride -1");
        CHECK_NULL(td_f_conv2d(x, w, NULL, &(td_conv2d_options){.padding = {0, -2}}), "padding -2");
        CHECK_NULL(td_f_conv2d(x, w, NULL, &(td_conv2d_options){.padding = {INT64_MAX, 0}}),
                   "2^31");
        CHECK_NULL(td_f_conv2d(td_zeros(SHAPE(2, 3, 2, 8), TD_F32, NULL), w, NULL, NULL),
                   "does not fit into an image of 2");
        CHECK_NULL(td_f_conv2d(x, w, td_zeros(SHAPE(3), TD_F32, NULL), NULL),
                   "bias has the shape [3]");
        CHECK_NULL(td_f_conv2d(x, td_zeros(SHAPE(4, 3, 3, 3), TD_F64, NULL), NULL, NULL),
                   "f32 and f64");
        CHECK_NULL(td_f_conv2d(td_zeros(SHAPE(8, 8), TD_F32, NULL), w, NULL, NULL),
                   "3 to 4 dimensions");
        CHECK_NULL(td_f_conv2d(x, td_zeros(SHAPE(4, 3, 3), TD_F32, NULL), NULL, NULL),
                   "4 dimensions");
        CHECK_NULL(td_f_conv2d(x, td_zeros(SHAPE(4, 3, 0, 3), TD_F32, NULL), NULL, NULL),
                   "kernel 0");
        CHECK(!td_f_conv2d(NULL, w, NULL, NULL) && !td_f_conv2d(x, NULL, NULL, NULL));
        CHECK_EQ(
            td_tensor_numel(td_f_conv2d(td_zeros(SHAPE(0, 3, 8, 8), TD_F32, NULL), w, NULL, NULL)),
            0);
    }
}
