/* Activations, softmax, dropout and normalisation: gradients by finite differences, values by other
 * operators, and what is refused. */
#include "ops_checks.h"
#include "host_data.h"

#include <tandem/amp.h>
#include <tandem/nn.h>

#include <math.h>

/* ---- Activations ------------------------------------------------------------------------------------ */

typedef td_tensor *(*activation)(td_tensor *x);

static td_tensor *activate(td_tensor *const *x, const void *arg)
{
    return (*(const activation *)arg)(x[0]);
}

static double normal_part(double x)
{
    return (1 + erf(x / sqrt(2))) / 2;
}

static double value_of(activation f, double x)
{
    if (f == td_f_relu)
        return x > 0 ? x : 0;
    if (f == td_f_gelu)
        return x * normal_part(x);
    if (f == td_f_gelu_tanh)
        return x / 2 * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    if (f == td_f_silu)
        return x / (1 + exp(-x));
    return f == td_f_tanh ? tanh(x) : 1 / (1 + exp(-x));
}

static const struct {
    const char *name;
    activation function;
} activations[] = {
    {"td_f_relu", td_f_relu}, {"td_f_gelu", td_f_gelu}, {"td_f_gelu_tanh", td_f_gelu_tanh},
    {"td_f_silu", td_f_silu}, {"td_f_tanh", td_f_tanh}, {"td_f_sigmoid", td_f_sigmoid},
};

TEST(activations)
{
    for (size_t i = 0; i < sizeof activations / sizeof activations[0]; i++) {
        TD_SCOPE;
        activation f = activations[i].function;
        td_tensor *x = td_sub_scalar(td_mul_scalar(td_arange(0, 12, 1, TD_F64, NULL), 0.7), 4);
        const double *in = host_data(x), *out = host_data(f(x));
        for (int k = 0; k < 12; k++)
            CHECK(fabs(out[k] - value_of(f, in[k])) < 1e-12);
        td_tensor *matrix = td_reshape(x, (int64_t[]){3, 4}, 2);
        gradcheck(activations[i].name, activate, &f, &matrix, 1);
        CHECK(!f(NULL));
        CHECK_EQ(td_tensor_numel(f(td_zeros(SHAPE(0, 3), TD_F32, NULL))), 0);
        CHECK_EQ(td_tensor_ndim(f(td_zeros(NULL, 0, TD_F32, NULL))), 0);
        if (f != td_f_relu)
            CHECK_NULL(f(td_zeros(SHAPE(2), TD_I64, NULL)), activations[i].name);
    }
}

/* The gradient overwrites that of the result only where nothing else refers to it. */
TEST(activations_leave_gradients_of_others_alone)
{
    {
        TD_SCOPE;
        td_tensor *x = random_of(SHAPE(4)), *grad = td_ones((int64_t[]){4}, 1, TD_F64, NULL);
        td_tensor_set_requires_grad(x, true);
        td_tensor *middle = td_mul_scalar(x, 2), *y = td_f_tanh(middle);
        CHECK_OK(td_tensor_retain_grad(y));
        CHECK_OK(td_tensor_retain_grad(middle));
        CHECK_OK(td_backward_from(&y, &grad, 1, NULL));
        CHECK(td_equal(grad, td_ones_like(grad)) && td_equal(td_tensor_grad(y), grad));
        td_tensor *slope = td_rsub_scalar(td_square(td_detach(y)), 1);
        check_near(td_tensor_grad(middle), slope, 1e-12);
        check_near(td_tensor_grad(x), td_mul_scalar(slope, 2), 1e-12);
    }
}

/* ---- Softmax ------------------------------------------------------------------------------------------ */

static td_tensor *softmax(td_tensor *const *x, const void *arg)
{
    return td_f_softmax(x[0], *(const int *)arg);
}

static td_tensor *log_softmax(td_tensor *const *x, const void *arg)
{
    return td_f_log_softmax(x[0], *(const int *)arg);
}

TEST(softmax_of_every_dimension)
{
    for (int dim = -3; dim < 3; dim++) {
        TD_SCOPE;
        td_tensor *x = random_of(SHAPE(2, 3, 4));
        td_tensor *e = td_exp(x), *y = td_f_softmax(x, dim);
        check_near(y, td_div(e, td_sum_dims(e, &dim, 1, true)), 1e-12);
        check_near(td_f_log_softmax(x, dim), td_ln(y), 1e-12);
        gradcheck("td_f_softmax", softmax, &dim, &x, 1);
        gradcheck("td_f_log_softmax", log_softmax, &dim, &x, 1);
    }
    {
        TD_SCOPE;
        td_tensor *one = td_full(NULL, 0, 3, TD_F32, NULL);
        CHECK(td_item(td_f_softmax(one, 0)) == 1 && td_item(td_f_log_softmax(one, -1)) == 0);
        CHECK_NULL(td_f_softmax(one, 1), "td_f_softmax: there is no dimension 1");
        CHECK_NULL(td_f_log_softmax(td_zeros(SHAPE(2), TD_I32, NULL), 0), "td_f_log_softmax");
        CHECK(!td_f_softmax(NULL, 0));
        CHECK_EQ(td_tensor_numel(td_f_softmax(td_zeros(SHAPE(3, 0), TD_F32, NULL), 1)), 0);
        td_tensor *large = td_full((int64_t[]){2}, 1, 1e30, TD_F32, NULL);
        CHECK(((const float *)host_data(td_f_softmax(large, 0)))[0] == 0.5f);
    }
}

/* ---- Dropout ------------------------------------------------------------------------------------------ */

static td_tensor *dropout(td_tensor *const *x, const void *arg)
{
    td_manual_seed(3);
    return arg ? td_f_dropout2d(x[0], 0.4, true) : td_f_dropout(x[0], 0.4, true);
}

TEST(dropout_keeps_or_scales)
{
    {
        TD_SCOPE;
        td_tensor *x = td_ones((int64_t[]){4, 5, 3, 2}, 4, TD_F64, NULL);
        td_tensor *y = dropout(&x, NULL), *channels = dropout(&x, "2d");
        const double *each = host_data(y), *block = host_data(channels);
        int zeros = 0;
        for (int i = 0; i < 120; i++) {
            CHECK(each[i] == 0 || fabs(each[i] - 1 / 0.6) < 1e-12);
            CHECK(block[i] == block[i / 6 * 6]);
            CHECK(block[i] == 0 || fabs(block[i] - 1 / 0.6) < 1e-12);
            zeros += each[i] == 0;
        }
        CHECK(zeros > 20 && zeros < 80);
        gradcheck("td_f_dropout", dropout, NULL, &x, 1);
        gradcheck("td_f_dropout2d", dropout, "2d", &x, 1);
    }
}

TEST(dropout_that_does_nothing)
{
    {
        TD_SCOPE;
        td_tensor *x = random_of(SHAPE(3, 4));
        CHECK(td_f_dropout(x, 0.5, false) == x && td_f_dropout(x, 0, true) == x);
        CHECK(td_f_dropout2d(x, 0.5, false) == x);
        CHECK(td_equal(td_f_dropout(x, 1, true), td_zeros_like(x)));
        CHECK_EQ(td_tensor_numel(td_f_dropout(td_zeros(SHAPE(0), TD_F32, NULL), 0.5, true)), 0);
        CHECK_NULL(td_f_dropout(x, 1.5, true), "td_f_dropout: 1.5 is no probability");
        CHECK_NULL(td_f_dropout(x, NAN, true), "no probability");
        CHECK_NULL(td_f_dropout2d(td_zeros(SHAPE(3), TD_F32, NULL), 0.5, true),
                   "td_f_dropout2d: x");
        CHECK_NULL(td_f_dropout(td_zeros(SHAPE(3), TD_I64, NULL), 0.5, true), "i64");
        CHECK(!td_f_dropout(NULL, 0.5, true));
    }
}

/* ---- Normalisation -------------------------------------------------------------------------------------- */

struct batch_norm {
    bool training, with_running;
    bool without_weight;
};

/* x, weight, bias; the running statistics are made anew each time. */
static td_tensor *batch_norm(td_tensor *const *x, const void *arg)
{
    const struct batch_norm *norm = arg;
    int64_t channels = td_tensor_size(x[0], 1);
    td_tensor *mean = norm->with_running ? td_full(&channels, 1, 0.3, TD_F64, NULL) : NULL;
    td_tensor *var = norm->with_running ? td_full(&channels, 1, 1.7, TD_F64, NULL) : NULL;
    return td_batch_norm(x[0], mean, var, norm->without_weight ? NULL : x[1],
                         norm->without_weight ? NULL : x[2], norm->training, 0.1, 1e-3);
}

TEST(batch_norm_of_all_shapes)
{
    static const int64_t shapes[][5] = {{4, 3}, {2, 3, 5}, {2, 3, 2, 3}, {1, 2, 2, 1, 2}};
    static const struct batch_norm norms[] = {{true, false, false},
                                              {true, true, false},
                                              {false, true, false},
                                              {true, true, true},
                                              {false, true, true}};
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 5; k++) {
            TD_SCOPE;
            td_tensor *x = random_of(shapes[i], i + 2);
            td_tensor *w = random_of(&shapes[i][1], 1), *b = random_of(&shapes[i][1], 1);
            td_tensor *inputs[] = {x, w, b};
            gradcheck("td_batch_norm", batch_norm, &norms[k], inputs,
                      norms[k].without_weight ? 1 : 3);
            if (!norms[k].training || norms[k].without_weight)
                continue;
            int dims[] = {0, 2, 3, 4};
            int64_t shape[] = {1, shapes[i][1], 1, 1, 1};
            td_tensor *mean = td_mean_dims(x, dims, i + 1, true);
            td_tensor *var = td_var_dims(x, dims, i + 1, 0, true);
            td_tensor *z = td_mul(td_sub(x, mean), td_rsqrt(td_add_scalar(var, 1e-3)));
            td_tensor *y = td_add(td_mul(z, td_reshape(w, shape, i + 2)),
                                  td_reshape(b, shape, i + 2));
            check_near(batch_norm(inputs, &norms[k]), y, 1e-10);
        }
}

TEST(batch_norm_moves_running_statistics)
{
    {
        TD_SCOPE;
        td_tensor *x = random_of(SHAPE(5, 2, 3));
        td_tensor *mean = td_full((int64_t[]){2}, 1, 0.5, TD_F64, NULL);
        /* Every second one of a larger tensor: the statistics need not be contiguous. */
        td_tensor *wide = td_full((int64_t[]){4}, 1, 2, TD_F64, NULL);
        td_tensor *var = td_slice(wide, 0, 0, 4, 2);
        CHECK(td_batch_norm(x, mean, var, NULL, NULL, true, 0.25, 1e-5));
        td_tensor *m = td_mean_dims(x, (int[]){0, 2}, 2, false);
        td_tensor *v = td_var_dims(x, (int[]){0, 2}, 2, 1, false);
        check_near(mean, td_add_scalar(td_mul_scalar(m, 0.25), 0.375), 1e-12);
        check_near(var, td_add_scalar(td_mul_scalar(v, 0.25), 1.5), 1e-12);
        CHECK(((const double *)host_data(wide))[1] == 2);
        td_tensor *before = td_clone(mean);
        CHECK(td_batch_norm(x, mean, var, NULL, NULL, false, 0.25, 1e-5));
        CHECK(td_equal(before, mean));
    }
}

TEST(batch_norm_refuses)
{
    {
        TD_SCOPE;
        td_tensor *x = td_zeros(SHAPE(4, 3), TD_F32, NULL),
                  *three = td_zeros(SHAPE(3), TD_F32, NULL);
        td_tensor *two = td_zeros(SHAPE(2), TD_F32, NULL);
        CHECK_NULL(td_batch_norm(x, NULL, NULL, two, NULL, true, 0.1, 1e-5),
                   "td_batch_norm: weight has the shape [2]; it must have [3]");
        CHECK_NULL(td_batch_norm(x, two, three, NULL, NULL, true, 0.1, 1e-5), "running_mean");
        CHECK_NULL(td_batch_norm(x, NULL, NULL, NULL, NULL, false, 0.1, 1e-5),
                   "running_mean and running_var are NULL");
        CHECK_NULL(td_batch_norm(td_zeros(SHAPE(1, 3), TD_F32, NULL), NULL, NULL, NULL, NULL, true,
                                 0.1, 1e-5),
                   "[1, 3], one value a channel");
        CHECK_NULL(td_batch_norm(td_zeros(SHAPE(3), TD_F32, NULL), NULL, NULL, NULL, NULL, true,
                                 0.1, 1e-5),
                   "x has the shape [3]");
        CHECK(!td_batch_norm(NULL, NULL, NULL, NULL, NULL, true, 0.1, 1e-5));
    }
}

/* Without training the gradient must not see statistics that have moved on since. */
TEST(batch_norm_keeps_what_it_used)
{
    {
        TD_SCOPE;
        td_tensor *x = random_of(SHAPE(3, 2)), *w = random_of(SHAPE(2));
        td_tensor *mean = random_of(SHAPE(2)), *var = td_ones((int64_t[]){2}, 1, TD_F64, NULL);
        td_tensor_set_requires_grad(x, true);
        td_tensor *y = td_sum(td_batch_norm(x, mean, var, w, NULL, false, 0.1, 0));
        CHECK_OK(td_fill_(var, 100));
        CHECK_OK(td_backward(y));
        check_near(td_tensor_grad(x), td_expand(w, (int64_t[]){3, 2}, 2), 1e-12);
    }
}

static td_tensor *layer_norm(td_tensor *const *x, const void *arg)
{
    int dims = *(const int *)arg, without_weight = dims < 0;
    dims = abs(dims);
    const struct td__layout *of_x = &x[0]->layout;
    return td_f_layer_norm(x[0], of_x->shape + of_x->ndim - dims, dims,
                           without_weight ? NULL : x[1], without_weight ? NULL : x[2], 1e-3);
}

TEST(layer_norm_over_the_last_dimensions)
{
    for (int dims = -3; dims <= 3; dims++) {
        TD_SCOPE;
        static const int64_t shape[] = {2, 3, 4};
        int count = abs(dims);
        if (count == 0)
            continue;
        td_tensor *x = random_of(shape, 3);
        td_tensor *inputs[] = {x, random_of(shape + 3 - count, count),
                               random_of(shape + 3 - count, count)};
        gradcheck("td_f_layer_norm", layer_norm, &dims, inputs, dims < 0 ? 1 : 3);
        int last[] = {-1, -2, -3};
        td_tensor *mean = td_mean_dims(x, last, count, true);
        td_tensor *var = td_var_dims(x, last, count, 0, true);
        td_tensor *y = td_div(td_sub(x, mean), td_sqrt(td_add_scalar(var, 1e-3)));
        if (dims > 0)
            y = td_add(td_mul(y, inputs[1]), inputs[2]);
        check_near(layer_norm(inputs, &dims), y, 1e-10);
    }
    {
        TD_SCOPE;
        td_tensor *x = td_zeros(SHAPE(2, 3), TD_F32, NULL);
        CHECK_NULL(td_f_layer_norm(x, (int64_t[]){4}, 1, NULL, NULL, 1e-5),
                   "td_f_layer_norm: x has the shape [2, 3]; its last sizes must be [4]");
        CHECK_NULL(td_f_layer_norm(x, (int64_t[]){1, 2, 3}, 3, NULL, NULL, 1e-5), "[1, 2, 3]");
        CHECK_NULL(
            td_f_layer_norm(x, (int64_t[]){3}, 1, td_zeros(SHAPE(2), TD_F32, NULL), NULL, 1e-5),
            "weight has the shape [2]");
        CHECK_NULL(td_f_layer_norm(x, NULL, 0, NULL, NULL, 1e-5), "dimensions, not 0");
        CHECK(!td_f_layer_norm(NULL, (int64_t[]){3}, 1, NULL, NULL, 1e-5));
        CHECK_EQ(td_tensor_numel(td_f_layer_norm(td_zeros(SHAPE(0, 3), TD_F32, NULL),
                                                 (int64_t[]){3}, 1, NULL, NULL, 1e-5)),
                 0);
    }
}

/* Both results enter, the sum with another factor; the sum alone; or the norm of x alone. */
static td_tensor *add_layer_norm(td_tensor *const *x, const void *arg)
{
    int mode = *(const int *)arg;
    td_tensor *sum = NULL, *y;
    if (mode == 2)
        return td_add_layer_norm(x[0], NULL, SHAPE(4), x[1], x[2], 1e-3, NULL);
    if (mode == 3) {
        y = td_add_layer_norm(x[0], NULL, SHAPE(4), x[1], x[2], 1e-3, &sum);
        return td_add(y, td_mul(sum, sum));
    }
    if (mode == 4) { /* the sum alone */
        td_add_layer_norm(x[0], NULL, SHAPE(4), NULL, NULL, 1e-3, &sum);
        return td_mul(sum, sum);
    }
    y = td_add_layer_norm(x[0], x[1], SHAPE(4), mode ? NULL : x[2], mode ? NULL : x[3], 1e-3, &sum);
    return mode ? td_mul_scalar(sum, 3) : td_add(y, td_mul_scalar(sum, 3));
}

TEST(add_layer_norm_is_the_norm_of_the_sum)
{
    TD_SCOPE;
    td_tensor *inputs[] = {random_of(SHAPE(2, 3, 4)), random_of(SHAPE(2, 3, 4)),
                           random_of(SHAPE(4)), random_of(SHAPE(4))};
    gradcheck("td_add_layer_norm", add_layer_norm, &(int){0}, inputs, 4);
    gradcheck("td_add_layer_norm: sum", add_layer_norm, &(int){1}, inputs, 2);
    gradcheck("td_add_layer_norm: no residual", add_layer_norm, &(int){2}, inputs + 1, 3);
    gradcheck("td_add_layer_norm: x as the sum", add_layer_norm, &(int){3}, inputs + 1, 3);
    gradcheck("td_add_layer_norm: only x as the sum", add_layer_norm, &(int){4}, inputs + 1, 1);
    td_tensor *sum,
        *y = td_add_layer_norm(inputs[0], inputs[1], SHAPE(4), inputs[2], inputs[3], 1e-3, &sum);
    check_near(sum, td_add(inputs[0], inputs[1]), 0);
    check_near(y, td_f_layer_norm(sum, SHAPE(4), inputs[2], inputs[3], 1e-3), 1e-12);
    CHECK(td_add_layer_norm(inputs[0], NULL, SHAPE(4), NULL, NULL, 1e-3, &sum) != NULL);
    CHECK(sum == inputs[0]);
}

TEST(add_layer_norm_of_x_hands_x_out_without_a_copy)
{
    TD_SCOPE;
    td_tensor *leaf = random_of(SHAPE(3, 4)), *sum;
    td_tensor_set_requires_grad(leaf, true);
    td_tensor *x = td_transpose(td_mul_scalar(leaf, 2), 0, 1);
    td_tensor *y = td_add_layer_norm(x, NULL, SHAPE(3), NULL, NULL, 1e-3, &sum);
    CHECK(td_tensor_data(sum) == td_tensor_data(x) && td_tensor_requires_grad(sum));
    CHECK_EQ(td_tensor_stride(sum, 0), td_tensor_stride(x, 0));
    CHECK_OK(td_backward(td_sum(td_add(td_mul(y, y), td_mul(sum, x)))));
    td_tensor *grad = td_tensor_grad(leaf), *other = td_clone(td_detach(leaf));
    td_tensor_set_requires_grad(other, true);
    x = td_transpose(td_mul_scalar(other, 2), 0, 1);
    y = td_f_layer_norm(x, SHAPE(3), NULL, NULL, 1e-3);
    CHECK_OK(td_backward(td_sum(td_add(td_mul(y, y), td_mul(x, x)))));
    check_near(grad, td_tensor_grad(other), 1e-12);
    TD_NO_GRAD;
    CHECK(td_add_layer_norm(x, NULL, SHAPE(3), NULL, NULL, 1e-3, &sum) != NULL);
    CHECK(sum == x);
}

TEST(add_layer_norm_has_the_dtype_of_autocast)
{
    TD_SCOPE;
    td_tensor *x = td_to_dtype(random_of(SHAPE(3, 8)), TD_F32);
    td_tensor *half = td_to_dtype(random_of(SHAPE(3, 8)), TD_BF16);
    td_tensor *w = td_to_dtype(random_of(SHAPE(8)), TD_F32);
    td_tensor_set_requires_grad(x, true);
    td_tensor_set_requires_grad(half, true);
    td_tensor *sum, *y, *plain = td_add_layer_norm(x, half, SHAPE(8), w, NULL, 1e-5, &sum);
    CHECK_EQ(td_tensor_dtype(plain), TD_F32);
    CHECK_EQ(td_tensor_dtype(sum), TD_F32);
    {
        TD_AUTOCAST(td_device_kind(td_tensor_device(x)), &(td_autocast_options){.dtype = TD_BF16});
        y = td_add_layer_norm(x, half, SHAPE(8), w, NULL, 1e-5, &sum);
    }
    CHECK_EQ(td_tensor_dtype(y), TD_BF16);
    CHECK_EQ(td_tensor_dtype(sum), TD_F32);
    check_near(td_to_dtype(y, TD_F32), td_to_dtype(td_to_dtype(plain, TD_BF16), TD_F32), 0);
    CHECK_OK(td_backward(td_sum(td_mul(td_to_dtype(y, TD_F32), sum))));
    CHECK_EQ(td_tensor_dtype(td_tensor_grad(x)), TD_F32);
    CHECK_EQ(td_tensor_dtype(td_tensor_grad(half)), TD_BF16);
    check_near(td_to_dtype(td_tensor_grad(half), TD_F32),
               td_to_dtype(td_to_dtype(td_tensor_grad(x), TD_BF16), TD_F32), 0);
}

TEST(add_layer_norm_refuses_what_does_not_fit)
{
    TD_SCOPE;
    td_tensor *x = td_zeros(SHAPE(2, 3), TD_F32, NULL);
    CHECK(!td_add_layer_norm(NULL, x, SHAPE(3), NULL, NULL, 1e-5, NULL));
    CHECK_NULL(td_add_layer_norm(x, NULL, SHAPE(4), NULL, NULL, 1e-5, NULL),
               "td_add_layer_norm: x has the shape [2, 3]; its last sizes must be [4]");
    CHECK_NULL(
        td_add_layer_norm(x, td_zeros(SHAPE(3), TD_F32, NULL), SHAPE(3), NULL, NULL, 1e-5, NULL),
        "x has the shape [2, 3] and residual [3]");
    CHECK_NULL(
        td_add_layer_norm(x, NULL, SHAPE(3), td_zeros(SHAPE(3), TD_F64, NULL), NULL, 1e-5, NULL),
        "weight is f64 and the sum f32; it must be f32");
    CHECK_NULL(
        td_add_layer_norm(x, NULL, SHAPE(3), NULL, td_zeros(SHAPE(2), TD_F32, NULL), 1e-5, NULL),
        "bias has the shape [2]; it must have [3]");
    td_module *linear = td_linear(3, 3);
    CHECK_NULL(td_forward_add(linear, x, NULL, NULL), "it must be of td_layer_norm()");
    td_module_destroy(linear);
    td_module *norm = td_layer_norm(3);
    CHECK(td_forward_add(norm, x, x, NULL) != NULL);
    td_module_destroy(norm);
}
