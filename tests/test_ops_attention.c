/* Attention and embedding: gradients by finite differences, values by other operators, and what is
 * refused. */
#include "ops_checks.h"
#include "host_data.h"

#include <math.h>
#include <string.h>

/* ---- Attention -------------------------------------------------------------------------------------------- */

struct attention {
    bool causal, dropout;
    int64_t mask[4]; /* ended by -1 */
    bool bool_mask;
    double scale;
};

/* Hides about a third of the columns, the same ones each time; never the first of a row. */
static td_tensor *make_mask(const struct attention *attention)
{
    int ndim = 0;
    while (ndim < 4 && attention->mask[ndim] >= 0)
        ndim++;
    TD_SCOPE;
    td_tensor *mask = td_zeros(attention->mask, ndim, TD_F64, td_device_get("cpu"));
    double *elements = td_tensor_data(mask);
    int64_t columns = attention->mask[ndim - 1];
    for (int64_t i = 0; i < td_tensor_numel(mask); i++)
        if (i % columns && i * 5 % 3 == 0)
            elements[i] = -INFINITY;
        else if (!attention->bool_mask)
            elements[i] = (double)(i % 7) / 4;
    mask = td_tensor_to(mask, NULL);
    return td_scope_return(attention->bool_mask ? td_ge_scalar(mask, 0) : mask);
}

static td_tensor *attend(td_tensor *const *x, const void *arg)
{
    const struct attention *attention = arg;
    td_manual_seed(5);
    return td_scaled_dot_product_attention(
        x[0], x[1], x[2],
        &(td_attention_options){.causal = attention->causal,
                                .mask = attention->mask[0] ? make_mask(attention) : NULL,
                                .dropout = attention->dropout ? 0.3 : 0,
                                .scale = attention->scale});
}

static td_tensor *slow_attention(td_tensor *const *x, const struct attention *attention)
{
    double scale = attention->scale ? attention->scale : 1 / sqrt((double)td_tensor_size(x[0], -1));
    td_tensor *scores = td_mul_scalar(td_matmul(x[0], td_transpose(x[1], -1, -2)), scale);
    if (attention->mask[0]) {
        td_tensor *mask = make_mask(attention);
        if (attention->bool_mask)
            scores = td_masked_fill(scores, td_logical_not(mask), -INFINITY);
        else
            scores = td_add(scores, mask);
    }
    if (attention->causal) {
        td_tensor *seen = td_tril(td_ones_like(scores), 0);
        scores = td_masked_fill(scores, td_eq_scalar(seen, 0), -INFINITY);
    }
    return td_matmul(td_f_softmax(scores, -1), x[2]);
}

static const struct attention attentions[] = {
    {.mask = {0}},
    {.causal = true},
    {.mask = {3, 5, -1}},
    {.mask = {3, 5, -1}, .bool_mask = true},
    {.mask = {2, 1, 3, 5}, .bool_mask = true, .causal = true},
    {.mask = {5, -1}, .scale = 0.7},
};

TEST(attention)
{
    for (size_t i = 0; i < sizeof attentions / sizeof attentions[0]; i++) {
        TD_SCOPE;
        const struct attention *attention = &attentions[i];
        td_tensor *x[] = {random_of(SHAPE(2, 2, 3, 4)), random_of(SHAPE(2, 2, 5, 4)),
                          random_of(SHAPE(2, 2, 5, 3))};
        check_near(attend(x, attention), slow_attention(x, attention), 1e-10);
        gradcheck("attention", attend, attention, x, 3);
        struct attention dropping = *attention;
        dropping.dropout = true;
        gradcheck("attention with dropout", attend, &dropping, x, 3);
    }
}

TEST(attention_of_other_shapes)
{
    static const struct attention plain = {.mask = {0}}, causal = {.causal = true};
    {
        TD_SCOPE;
        /* Matrices; one batch; k and v that all of the batch share; sizes of 1. */
        td_tensor *x[] = {random_of(SHAPE(3, 4)), random_of(SHAPE(5, 4)), random_of(SHAPE(5, 2))};
        check_near(attend(x, &causal), slow_attention(x, &causal), 1e-10);
        gradcheck("attention", attend, &causal, x, 3);
        td_tensor *y[] = {random_of(SHAPE(2, 4, 4)), random_of(SHAPE(4, 4)),
                          random_of(SHAPE(1, 4, 2))};
        check_near(attend(y, &plain), slow_attention(y, &plain), 1e-10);
        gradcheck("attention", attend, &plain, y, 3);
        td_tensor *z[] = {random_of(SHAPE(1, 1, 1)), random_of(SHAPE(1, 1, 1)),
                          random_of(SHAPE(1, 1, 1))};
        gradcheck("attention", attend, &plain, z, 3);
        td_tensor *none = td_zeros(SHAPE(2, 0, 4), TD_F64, NULL);
        CHECK_EQ(td_tensor_numel(td_scaled_dot_product_attention(none, y[0], y[0], NULL)), 0);
        td_tensor *nothing = td_scaled_dot_product_attention(y[0], none, none, NULL);
        check_near(nothing, td_zeros_like(y[0]), 0);
    }
}

/* Heads that were cut out of [N, L, heads, E]: the result is laid out likewise. */
TEST(attention_puts_heads_where_they_were)
{
    {
        TD_SCOPE;
        td_tensor *packed = random_of(SHAPE(2, 5, 3, 4));
        td_tensor *heads = td_transpose(packed, 1, 2), *x[] = {heads, heads, heads};
        td_tensor *y = td_scaled_dot_product_attention(heads, heads, heads, NULL);
        static const struct attention plain = {.mask = {0}};
        check_near(y, slow_attention(x, &plain), 1e-10);
        CHECK(td_tensor_is_contiguous(td_transpose(y, 1, 2)));
    }
}

/* More dimensions before the heads than the kernel has: they are one, or looped over where a broadcast is between them. */
TEST(attention_of_many_dimensions)
{
    static const struct attention plain = {.mask = {0}}, causal = {.causal = true};
    static const int64_t shapes[][3][5] = {
        {{2, 3, 2, 4, 3}, {2, 3, 2, 5, 3}, {2, 3, 2, 5, 2}},
        {{2, 3, 2, 4, 3}, {1, 3, 2, 5, 3}, {2, 1, 2, 5, 2}},
        {{2, 1, 2, 4, 3}, {1, 3, 1, 5, 3}, {2, 3, 2, 5, 2}},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        TD_SCOPE;
        td_tensor *x[3];
        for (int t = 0; t < 3; t++)
            x[t] = random_of(shapes[i][t], 5);
        check_near(attend(x, &plain), slow_attention(x, &plain), 1e-10);
        gradcheck("attention of five dimensions", attend, &causal, x, 3);
        td_tensor *turned[] = {td_transpose(x[0], 0, 1), td_transpose(x[1], 0, 1),
                               td_transpose(x[2], 0, 1)};
        check_near(attend(turned, &causal), td_transpose(attend(x, &causal), 0, 1), 1e-10);
    }
}

/* A row that sees nothing is 0, in both ways of computing it, and so are its gradients. */
TEST(attention_of_a_row_that_sees_nothing)
{
    for (int way = 0; way < 2; way++) {
        TD_SCOPE;
        td_tensor *x[] = {random_of(SHAPE(2, 3)), random_of(SHAPE(4, 3)), random_of(SHAPE(4, 3))};
        for (int i = 0; i < 3; i++)
            td_tensor_set_requires_grad(x[i], true);
        td_tensor *mask = td_zeros(SHAPE(2, 4), TD_BOOL, NULL);
        CHECK_OK(td_fill_(td_select(mask, 0, 1), 1));
        td_tensor *y = td_scaled_dot_product_attention(
            x[0], x[1], x[2], &(td_attention_options){.mask = mask, .dropout = way ? 1e-9 : 0});
        check_near(td_select(y, 0, 0), td_zeros((int64_t[]){3}, 1, TD_F64, NULL), 0);
        CHECK(!td_equal(td_select(y, 0, 1), td_zeros((int64_t[]){3}, 1, TD_F64, NULL)));
        CHECK_OK(td_backward(td_sum(y)));
        check_near(td_select(td_tensor_grad(x[0]), 0, 0), td_zeros((int64_t[]){3}, 1, TD_F64, NULL),
                   0);
        for (int i = 0; i < 3; i++)
            CHECK(td_item(td_any(td_isnan(td_tensor_grad(x[i])))) == 0);
    }
}

static td_tensor *attend_with_mask(td_tensor *const *x, const void *arg)
{
    (void)arg;
    return td_scaled_dot_product_attention(x[0], x[1], x[2],
                                           &(td_attention_options){.mask = x[3], .causal = true});
}

TEST(attention_with_a_mask_that_is_learned)
{
    {
        TD_SCOPE;
        td_tensor *x[] = {random_of(SHAPE(2, 3, 4)), random_of(SHAPE(2, 3, 4)),
                          random_of(SHAPE(2, 3, 4)), random_of(SHAPE(3, 3))};
        gradcheck("attention with a mask", attend_with_mask, NULL, x, 4);
    }
}

TEST(attention_refuses)
{
    {
        TD_SCOPE;
        td_tensor *q = td_zeros(SHAPE(2, 3, 4), TD_F32, NULL),
                  *k = td_zeros(SHAPE(2, 5, 4), TD_F32, NULL);
        CHECK_NULL(
            td_scaled_dot_product_attention(q, td_zeros(SHAPE(2, 5, 3), TD_F32, NULL), k, NULL),
            "q has the shape [2, 3, 4], k [2, 5, 3], v [2, 5, 4]");
        CHECK_NULL(
            td_scaled_dot_product_attention(q, k, td_zeros(SHAPE(2, 4, 4), TD_F32, NULL), NULL),
            "v [2, 4, 4]");
        CHECK_NULL(
            td_scaled_dot_product_attention(q, k, td_zeros(SHAPE(3, 5, 4), TD_F32, NULL), NULL),
            "v [3, 5, 4]");
        CHECK_NULL(
            td_scaled_dot_product_attention(q, td_zeros(SHAPE(2, 5, 4), TD_F64, NULL), k, NULL),
            "f32 and f64");
        CHECK_NULL(
            td_scaled_dot_product_attention(
                q, k, k, &(td_attention_options){.mask = td_zeros(SHAPE(2, 5), TD_F32, NULL)}),
            "the mask has the shape [2, 5]");
        CHECK_NULL(
            td_scaled_dot_product_attention(
                q, k, k, &(td_attention_options){.mask = td_zeros(SHAPE(3, 5), TD_I64, NULL)}),
            "the mask i64");
        CHECK_NULL(td_scaled_dot_product_attention(q, k, k, &(td_attention_options){.dropout = 2}),
                   "dropout is 2");
        CHECK(!td_scaled_dot_product_attention(NULL, k, k, NULL));
    }
}

static td_tensor *attend_to_parts(td_tensor *const *x, const void *arg)
{
    td_tensor *parts[3];
    if (td_split_heads(x[0], 3, 2, parts))
        return NULL;
    td_tensor *y = td_scaled_dot_product_attention(parts[0], parts[1], parts[2],
                                                   &(td_attention_options){.causal = true});
    return *(const bool *)arg ? td_add(y, parts[1])
                              : y; /* a part with two gradients is a tensor by itself */
}

/* The gradients of the parts of a projection are the parts of its gradient, which is not copied together. */
TEST(attention_to_parts_of_a_projection)
{
    static const int64_t shapes[][3] = {{2, 3, 12}, {1, 4, 12}, {3, 1, 6}};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        for (int more = 0; more < 2; more++) {
            TD_SCOPE;
            gradcheck("attention to parts", attend_to_parts, &(bool){more},
                      (td_tensor *[]){gradcheck_random(shapes[i], 3, -1, 1)}, 1);
        }
    {
        TD_SCOPE;
        td_tensor *x = gradcheck_random(SHAPE(2, 3, 12), -1, 1), *parts[3];
        td_tensor_set_requires_grad(x, true);
        td_tensor *y = td_mul_scalar(x, 2);
        CHECK_OK(td_tensor_retain_grad(y));
        CHECK_OK(td_split_heads(y, 3, 2, parts));
        for (int i = 0; i < 3; i++)
            CHECK_OK(td_tensor_retain_grad(parts[i]));
        CHECK_OK(td_backward(
            td_sum(td_scaled_dot_product_attention(parts[0], parts[1], parts[2], NULL))));
        char *whole = td_tensor_data(td_tensor_grad(y));
        for (int i = 0; i < 3; i++)
            CHECK((char *)td_tensor_data(td_tensor_grad(parts[i])) ==
                  whole + 4 * i * sizeof(double));
    }
}

/* ---- Heads ------------------------------------------------------------------------------------------------ */

/* The parts whose bits are set in *arg, one behind the other. */
static td_tensor *split_and_join(td_tensor *const *x, const void *arg)
{
    td_tensor *parts[3], *used[3];
    int count = 0;
    if (td_split_heads(x[0], 3, 2, parts))
        return NULL;
    for (int i = 0; i < 3; i++)
        if (*(const int *)arg & 1 << i)
            used[count++] = td_mul_scalar(parts[i], i + 1);
    return td_cat(used, count, 3);
}

TEST(split_heads)
{
    {
        TD_SCOPE;
        for (int used = 1; used < 8; used++)
            gradcheck("td_split_heads", split_and_join, &used,
                      (td_tensor *[]){gradcheck_random(SHAPE(2, 3, 12), -1, 1)}, 1);
        td_tensor *x = td_arange(0, 2 * 3 * 12, 1, TD_F32, NULL), *parts[3];
        x = td_reshape(x, TD_SHAPE(2, 3, 12));
        CHECK_OK(td_split_heads(x, 3, 2, parts));
        for (int i = 0; i < 3; i++) {
            td_tensor *slow = td_reshape(td_narrow(x, 2, 4 * i, 4), TD_SHAPE(2, 3, 2, 2));
            CHECK(td_equal(parts[i], td_transpose(slow, 1, 2)));
        }
        CHECK_FAILS(td_split_heads(x, 5, 2, parts), TD_ERR_INVALID, "5 parts of 2 heads");
        CHECK_FAILS(td_split_heads(x, 3, 3, parts), TD_ERR_INVALID, "3 parts of 3 heads");
        CHECK_FAILS(td_split_heads(td_select(x, 0, 0), 3, 2, parts), TD_ERR_INVALID, "[3, 12]");
        CHECK_FAILS(td_split_heads(x, 3, 2, NULL), TD_ERR_INVALID, "td_split_heads");
        CHECK_FAILS(td_split_heads(NULL, 3, 2, parts), TD_ERR_INVALID, "");
    }
    td_tensor *x = td_zeros(SHAPE(1, 2, 4), TD_F32, NULL),
              *part; /* without a scope it is the caller's */
    CHECK_OK(td_split_heads(x, 1, 2, &part));
    td_tensor_release(x);
    CHECK_EQ(td_tensor_size(part, 1), 2);
    td_tensor_release(part);
}

/* ---- Embedding -------------------------------------------------------------------------------------------- */

static td_tensor *embed(td_tensor *const *x, const void *arg)
{
    return td_f_embedding(x[0], x[1], arg ? *(const int64_t *)arg : -1);
}

static td_tensor *indices_of(const int64_t *shape, int ndim, const int64_t *values)
{
    return td_from_array(values, shape, ndim, TD_I64, NULL);
}

TEST(embedding)
{
    {
        TD_SCOPE;
        td_tensor *weight = random_of(SHAPE(5, 3));
        td_tensor *indices = indices_of(SHAPE(2, 3), (int64_t[]){4, 0, 4, 1, 2, 4});
        td_tensor *inputs[] = {indices, weight};
        td_tensor *y = embed(inputs, NULL);
        CHECK_EQ(td_tensor_ndim(y), 3);
        for (int i = 0; i < 6; i++)
            CHECK_MEM((const double *)host_data(y) + 3 * i,
                      (const double *)host_data(weight) + 3 * ((int64_t[]){4, 0, 4, 1, 2, 4})[i],
                      3 * sizeof(double));
        gradcheck("td_f_embedding", embed, NULL, inputs, 2);
        td_tensor *scalar[] = {indices_of(NULL, 0, (int64_t[]){3}), weight};
        gradcheck("td_f_embedding", embed, NULL, scalar, 2);
        CHECK_EQ(td_tensor_numel(td_f_embedding(td_zeros(SHAPE(0, 2), TD_I64, NULL), weight, -1)),
                 0);
    }
}

/* The row of the padding keeps its gradient, whether others are added to or overwritten. */
TEST(embedding_with_padding)
{
    {
        TD_SCOPE;
        td_tensor *weight = random_of(SHAPE(4, 2));
        td_tensor *indices = indices_of(SHAPE(3), (int64_t[]){1, 2, 1});
        td_tensor_set_requires_grad(weight, true);
        static const double expected[2][8] = {{0, 0, 0, 0, 1, 1, 0, 0}, {0, 0, 2, 2, 2, 2, 0, 0}};
        CHECK_OK(td_backward(td_sum(td_f_embedding(indices, weight, 1))));
        CHECK_MEM(host_data(td_tensor_grad(weight)), expected[0], sizeof expected[0]);
        CHECK_OK(td_backward(td_sum(td_f_embedding(indices, weight, -1))));
        CHECK_OK(td_tensor_zero_grad(weight));
        CHECK_OK(td_backward(td_sum(td_f_embedding(indices, weight, -1))));
        CHECK_OK(td_backward(td_sum(td_f_embedding(indices, weight, 1))));
        CHECK_MEM(host_data(td_tensor_grad(weight)), expected[1], sizeof expected[1]);
    }
}

TEST(embedding_refuses, .host_only = "an index out of range is a later failure of an accelerator")
{
    {
        TD_SCOPE;
        td_tensor *weight = td_zeros(SHAPE(4, 2), TD_F32, NULL);
        CHECK_NULL(td_f_embedding(td_zeros(SHAPE(3), TD_I32, NULL), weight, -1),
                   "the indices are i32");
        CHECK_NULL(td_f_embedding(td_full((int64_t[]){3}, 1, 4, TD_I64, NULL), weight, -1), "4");
        CHECK_NULL(td_f_embedding(td_full((int64_t[]){3}, 1, -1, TD_I64, NULL), weight, -1), "-1");
        CHECK_NULL(
            td_f_embedding(td_zeros(SHAPE(3), TD_I64, NULL), td_zeros(SHAPE(4), TD_F32, NULL), -1),
            "weight has the shape [4]");
        CHECK_NULL(td_f_embedding(td_zeros(SHAPE(3), TD_I64, NULL), weight, 4), "padding_idx is 4");
        CHECK(!td_f_embedding(NULL, weight, -1) && !td_f_embedding(weight, NULL, -1));
    }
}
