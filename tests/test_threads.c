/* Results have the same bits for any number of threads. Each case is an expression over tensors that are large
 * enough to be shared, with sizes that are no multiples of a block; it is computed with one thread and then with
 * others, forwards and, where it has a gradient, backwards. */
#include "runner.h"

#include "tensor/tensor_internal.h"

#include <tandem/tandem.h>

#include <stdio.h>
#include <string.h>

enum { ROWS = 301, COLUMNS = 701, MOST_RESULTS = 64 };

#define SHAPE(...) TD_SHAPE(__VA_ARGS__)

static const int thread_counts[] = {1, 2, 3, 5};

/* ---- Inputs ------------------------------------------------------------------------------------- */

static td_tensor *made(td_tensor *tensor)
{
    if (!tensor)
        td_test_fail(__FILE__, __LINE__, "%s", td_last_error());
    return tensor;
}

/* Numbers between -2 and 2, as a leaf. */
static td_tensor *numbers(const int64_t *shape, int ndim, td_dtype dtype)
{
    td_tensor *x = made(td_empty(shape, ndim, TD_F32, NULL));
    float *data = td_tensor_data(x);
    uint32_t state = (uint32_t)td_tensor_numel(x);
    for (int64_t i = 0; i < td_tensor_numel(x); i++) {
        state = state * 1664525 + 1013904223;
        data[i] = (float)(state >> 8) / 0x1p22f - 2;
    }
    return made(td_clone(made(td_to_dtype(x, dtype))));
}

static td_tensor *matrix(td_dtype dtype)
{
    return numbers(SHAPE(ROWS, COLUMNS), dtype);
}

static td_tensor *leaf(td_tensor *x)
{
    CHECK_OK(td_tensor_set_requires_grad(x, true));
    return x;
}

static td_tensor *positive(td_tensor *x)
{
    return made(td_add_scalar(made(td_abs(x)), 0.125));
}

/* ---- Running a case ------------------------------------------------------------------------------- */

/* What a case leaves: its results, and the gradients of its leaves. */
struct results {
    td_tensor *tensors[MOST_RESULTS];
    int count;
};

static void keep(struct results *results, td_tensor *tensor)
{
    CHECK(results->count < MOST_RESULTS);
    results->tensors[results->count++] = td_contiguous(made(tensor));
}

/* Keeps y, and the gradients of the leaves for one that differs from element to element. */
static void keep_with_gradients(struct results *results, td_tensor *y, td_tensor *const *leaves,
                                int count)
{
    keep(results, y);
    td_tensor *gradients[MOST_RESULTS];
    td_tensor *ones = numbers(y->layout.shape, y->layout.ndim, y->layout.dtype);
    CHECK_OK(td_gradients(&y, &ones, 1, leaves, count, gradients, NULL));
    for (int i = 0; i < count; i++)
        keep(results, gradients[i]);
}

typedef void case_fn(struct results *results);

static void check_case(case_fn *run)
{
    {
        TD_SCOPE;
        struct results first = {0};
        for (size_t i = 0; i < sizeof thread_counts / sizeof *thread_counts; i++) {
            struct results results = {0};
            CHECK_OK(td_set_num_threads(thread_counts[i]));
            td_manual_seed(7);
            run(&results);
            if (i == 0)
                first = results;
            CHECK_EQ(results.count, first.count);
            for (int k = 0; k < first.count; k++) {
                size_t bytes = td_tensor_nbytes(first.tensors[k]);
                CHECK_EQ(td_tensor_nbytes(results.tensors[k]), bytes);
                if (memcmp(td_tensor_data(results.tensors[k]), td_tensor_data(first.tensors[k]),
                           bytes))
                    td_test_fail(__FILE__, __LINE__, "result %d differs with %d threads", k,
                                 thread_counts[i]);
            }
        }
    }
}

#define SAME_BITS(name)                                                                            \
    static void name##_case(struct results *results);                                              \
    TEST(name, .deadline_s = 60)                                                                   \
    {                                                                                              \
        check_case(name##_case);                                                                   \
    }                                                                                              \
    static void name##_case(struct results *results)

/* ---- Elements ------------------------------------------------------------------------------------ */

/* Shows the difference between two paths that round differently: the loop's body and its end, for example. */
static void keep_unary(struct results *results, td_dtype dtype)
{
    td_tensor *x = matrix(dtype), *grad = matrix(dtype);
    for (int op = TD_UNARY_NEG; op <= TD_UNARY_ERF; op++) {
        td_tensor *y = made(td_empty_like(x)), *gx = made(td_empty_like(x));
        CHECK_OK(td__cpu_kernels.unary((td_unary)op, y, x));
        keep(results, y);
        if (!td__cpu_kernels.unary_grad((td_unary)op, gx, grad, x))
            keep(results, gx);
    }
}

SAME_BITS(unary_f32)
{
    keep_unary(results, TD_F32);
}

SAME_BITS(unary_f64)
{
    keep_unary(results, TD_F64);
}

SAME_BITS(unary_bf16)
{
    keep_unary(results, TD_BF16);
}

static void keep_binary(struct results *results, td_dtype dtype, bool powers)
{
    td_tensor *x = matrix(dtype);
    td_tensor *operands[] = {
        matrix(dtype), numbers(SHAPE(COLUMNS), dtype), numbers(SHAPE(ROWS, 1), dtype),
        made(td_transpose(numbers(SHAPE(COLUMNS, ROWS), dtype), 0, 1)),
        made(td_narrow(numbers(SHAPE(ROWS, 2 * COLUMNS), dtype), 1, 3, COLUMNS))};
    for (int i = 0; i < 5; i++) {
        td_tensor *y = operands[i];
        keep(results, td_add(x, y));
        keep(results, td_sub(y, x));
        keep(results, td_mul(x, y));
        keep(results, td_div(x, y));
        keep(results, td_maximum(x, y));
        keep(results, td_lt(x, y));
        keep(results, td_add_scaled(x, y, 0.75));
        if (powers)
            keep(results, td_pow(positive(x), y));
    }
    keep(results, td_mul_scalar(x, 0.3));
    keep(results, td_clamp(x, -0.5, 0.5));
    keep(results, td_where(td_gt_scalar(x, 0), x, operands[3]));
}

SAME_BITS(binary_f32)
{
    keep_binary(results, TD_F32, true);
}

SAME_BITS(binary_f64)
{
    keep_binary(results, TD_F64, true);
}

SAME_BITS(binary_f16)
{
    keep_binary(results, TD_F16, true);
}

SAME_BITS(powers_of_numbers)
{
    static const double exponents[] = {-2, -1, -0.5, 0, 0.5, 1, 2, 3, 2.5, 7};
    td_tensor *x = matrix(TD_F32);
    for (size_t i = 0; i < sizeof exponents / sizeof *exponents; i++)
        keep(results, td_pow_scalar(x, exponents[i]));
}

SAME_BITS(short_rows_and_many_dimensions)
{
    td_tensor *x = numbers(SHAPE(33, 7, 41, 31), TD_F32);
    keep(results, td_add(x, numbers(SHAPE(7, 1, 31), TD_F32)));
    keep(results, td_mul(x, numbers(SHAPE(33, 1, 41, 1), TD_F32)));
    keep(results, td_exp(td_transpose(x, 0, 3)));
}

SAME_BITS(copies_fills_and_casts)
{
    static const td_dtype dtypes[] = {TD_F64, TD_F16, TD_BF16, TD_I32, TD_I8, TD_BOOL};
    td_tensor *x = matrix(TD_F32);
    for (int i = 0; i < 6; i++)
        keep(results, td_to_dtype(td_transpose(x, 0, 1), dtypes[i]));
    keep(results, td_contiguous(td_transpose(x, 0, 1)));
    keep(results, td_contiguous(td_transpose(numbers(SHAPE(9, 201, 15, 11), TD_F32), 1, 3)));
    keep(results, td_contiguous(td_narrow(x, 1, 5, 600)));
    keep(results, td_clone(x));
    td_tensor *parts[] = {x, x};
    keep(results, td_cat(parts, 2, 1));
    td_tensor *full = made(td_empty(SHAPE(ROWS, COLUMNS), TD_BF16, NULL));
    CHECK_OK(td_fill_(full, 0.3));
    keep(results, full);
}

SAME_BITS(operands_in_place)
{
    td_tensor *x = matrix(TD_F32);
    CHECK_OK(td_mul_(x, numbers(SHAPE(ROWS, 1), TD_F32)));
    CHECK_OK(td_add_(x, x));
    CHECK_OK(td_f_relu_(x));
    keep(results, x);
}

/* ---- Reductions ---------------------------------------------------------------------------------- */

static void keep_reductions(struct results *results, td_tensor *x)
{
    static const int dims[][2] = {{0, 1}, {1, 2}, {0, 2}};
    td_tensor *some[] = {made(td_sum(x)), made(td_mean(x)), made(td_max(x)), made(td_norm(x))};
    for (int i = 0; i < 4; i++)
        keep(results, some[i]);
    for (int d = 0; d < 3; d++) {
        keep(results, td_sum_dims(x, &d, 1, false));
        keep(results, td_sum_dims(x, dims[d], 2, false));
        keep(results, td_var_dims(x, &d, 1, 1, false));
        td_tensor *indices;
        keep(results, td_max_dim(x, d, false, &indices));
        keep(results, indices);
        keep(results, td_argmin(x, d, false));
    }
}

SAME_BITS(reductions_f32)
{
    keep_reductions(results, numbers(SHAPE(61, 67, 71), TD_F32));
    keep(results, td_sum(numbers(SHAPE(1000003), TD_F32)));
    keep(results, td_prod(numbers(SHAPE(200003), TD_F32)));
}

SAME_BITS(reductions_of_columns)
{
    keep_reductions(results, numbers(SHAPE(9001, 13, 3), TD_F32));
}

SAME_BITS(reductions_f64_transposed)
{
    keep_reductions(results, td_transpose(numbers(SHAPE(61, 67, 71), TD_F64), 0, 2));
}

SAME_BITS(reductions_bf16)
{
    keep_reductions(results, numbers(SHAPE(61, 67, 71), TD_BF16));
}

SAME_BITS(reductions_of_integers_and_truth)
{
    td_tensor *x = numbers(SHAPE(61, 67, 71), TD_I32);
    keep(results, td_sum(x));
    keep(results, td_max(x));
    keep(results, td_all(x));
    keep(results, td_any(x));
    keep(results, td_sum(td_gt_scalar(x, 0)));
}

/* ---- Networks ------------------------------------------------------------------------------------ */

static void keep_softmax(struct results *results, td_dtype dtype)
{
    for (int dim = 0; dim < 3; dim++) {
        td_tensor *x = leaf(numbers(SHAPE(61, 67, 71), dtype));
        keep_with_gradients(results, td_f_softmax(x, dim), &x, 1);
        keep_with_gradients(results, td_f_log_softmax(x, dim), &x, 1);
    }
}

SAME_BITS(softmax_f32)
{
    keep_softmax(results, TD_F32);
}

SAME_BITS(softmax_f16)
{
    keep_softmax(results, TD_F16);
}

SAME_BITS(layer_norm)
{
    static const td_dtype dtypes[] = {TD_F32, TD_F64, TD_BF16};
    for (int i = 0; i < 3; i++) {
        td_tensor *x[] = {leaf(matrix(dtypes[i])), leaf(numbers(SHAPE(COLUMNS), dtypes[i])),
                          leaf(numbers(SHAPE(COLUMNS), dtypes[i]))};
        keep_with_gradients(results, td_f_layer_norm(x[0], SHAPE(COLUMNS), x[1], x[2], 1e-5), x, 3);
    }
}

static void keep_batch_norm(struct results *results, td_tensor *x, int64_t channels)
{
    td_tensor *mean = made(td_zeros(SHAPE(channels), TD_F32, NULL));
    td_tensor *variance = made(td_ones(SHAPE(channels), TD_F32, NULL));
    td_tensor *inputs[] = {leaf(x), leaf(numbers(SHAPE(channels), TD_F32)),
                           leaf(numbers(SHAPE(channels), TD_F32))};
    keep_with_gradients(results,
                        td_batch_norm(x, mean, variance, inputs[1], inputs[2], true, 0.1, 1e-5),
                        inputs, 3);
    keep(results, mean);
    keep(results, variance);
    keep(results, td_batch_norm(x, mean, variance, inputs[1], inputs[2], false, 0.1, 1e-5));
}

SAME_BITS(batch_norm)
{
    keep_batch_norm(results, numbers(SHAPE(13, 17, 31, 37), TD_F32), 17);
    keep_batch_norm(results, numbers(SHAPE(ROWS, COLUMNS), TD_F32), COLUMNS);
    keep_batch_norm(results, numbers(SHAPE(ROWS, 301, 3), TD_F32), 301);
}

static td_tensor *classes(int64_t count, int64_t classes)
{
    td_tensor *target = made(td_empty(SHAPE(count), TD_I64, NULL));
    for (int64_t i = 0; i < count; i++)
        ((int64_t *)td_tensor_data(target))[i] = i * 31 % classes;
    return target;
}

SAME_BITS(losses)
{
    td_tensor *x = leaf(matrix(TD_F32)), *y = matrix(TD_F32), *target = classes(ROWS, COLUMNS);
    keep_with_gradients(results, td_cross_entropy(x, target), &x, 1);
    keep_with_gradients(results, td_nll_loss(x, target), &x, 1);
    keep_with_gradients(results, td_mse_loss(x, y), &x, 1);
    keep_with_gradients(results, td_l1_loss(x, y), &x, 1);
    keep_with_gradients(results, td_bce_with_logits(x, y), &x, 1);
    td_loss_options each = {.reduction = TD_REDUCE_NONE};
    keep_with_gradients(results, td_mse_loss_with(x, y, &each), &x, 1);
}

SAME_BITS(dropout)
{
    td_tensor *x = leaf(matrix(TD_F32)), *pictures = leaf(numbers(SHAPE(13, 17, 31, 37), TD_F32));
    keep_with_gradients(results, td_f_dropout(x, 0.3, true), &x, 1);
    keep_with_gradients(results, td_f_dropout2d(pictures, 0.3, true), &pictures, 1);
}

SAME_BITS(indices)
{
    td_tensor *x = leaf(matrix(TD_F32)), *rows = classes(1000, ROWS);
    keep_with_gradients(results, td_index_select(x, 0, rows), &x, 1);
    keep_with_gradients(results, td_index_select(x, 1, rows), &x, 1);
    keep_with_gradients(results, td_f_embedding(rows, x, -1), &x, 1);
    td_tensor *index = made(td_argmax(numbers(SHAPE(ROWS, COLUMNS, 3), TD_F32), 2, false));
    keep_with_gradients(results, td_take_along_dim(x, 1, index), &x, 1);
}

SAME_BITS(convolution_and_pooling)
{
    td_tensor *x[] = {leaf(numbers(SHAPE(3, 16, 37, 41), TD_F32)),
                      leaf(numbers(SHAPE(32, 16, 3, 3), TD_F32)), leaf(numbers(SHAPE(32), TD_F32))};
    keep_with_gradients(
        results, td_f_conv2d(x[0], x[1], x[2], &(td_conv2d_options){.padding = {1, 1}}), x, 3);
    keep_with_gradients(results, td_f_max_pool2d(x[0], 2, 2, NULL), x, 1);
    keep_with_gradients(results, td_f_avg_pool2d(x[0], 3, 2, NULL), x, 1);
    keep_with_gradients(results, td_f_adaptive_avg_pool2d(x[0], 5, 7), x, 1);
}

/* ---- Optimizers ---------------------------------------------------------------------------------- */

static void keep_steps(struct results *results, td_optimizer *optimizer, td_tensor *const *x)
{
    CHECK(optimizer);
    double norm;
    for (int step = 0; step < 3; step++) {
        for (int i = 0; i < 2; i++)
            CHECK_OK(td_tensor_set_grad(
                x[i], numbers(x[i]->layout.shape, x[i]->layout.ndim, x[i]->layout.dtype)));
        CHECK_OK(td_clip_grad_norm_of_(x, 2, 1, NULL, &norm));
        CHECK_OK(td_optimizer_step(optimizer));
    }
    keep(results, td_full(SHAPE(1), norm, TD_F64, NULL));
    keep(results, td_clone(x[0]));
    keep(results, td_clone(x[1]));
    td_optimizer_destroy(optimizer);
}

SAME_BITS(optimizers)
{
    for (int i = 0; i < 3; i++) {
        td_tensor *x[] = {leaf(matrix(TD_F32)), leaf(matrix(i == 1 ? TD_F64 : TD_BF16))};
        keep_steps(results,
                   i == 0   ? td_sgd_of(x, 2, &(td_sgd_options){.lr = 0.1, .momentum = 0.9})
                   : i == 1 ? td_adam_of(x, 2, &(td_adam_options){.amsgrad = true})
                            : td_adamw_of(x, 2, NULL),
                   x);
    }
}
