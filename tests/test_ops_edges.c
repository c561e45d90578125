/* Operators of networks where sizes are 0, elements are halves, or there is no scope. */
#include "gradcheck.h"
#include "host_data.h"
#include "runner.h"

#include "tensor/tensor_internal.h"

#include <math.h>

enum { MOST_INPUTS = 4 };

/* An operator on inputs of any float dtype. */
struct op {
    const char *name;
    td_tensor *(*call)(td_tensor *const *x);
    int64_t shapes[MOST_INPUTS][4];
    int ndims[MOST_INPUTS];
    int inputs;
};

static td_tensor *matmul(td_tensor *const *x)
{
    return td_matmul(x[0], x[1]);
}

static td_tensor *linear(td_tensor *const *x)
{
    return td_f_linear(x[0], x[1], x[2]);
}

static td_tensor *conv2d(td_tensor *const *x)
{
    return td_f_conv2d(x[0], x[1], x[2], &(td_conv2d_options){.padding = {1, 1}});
}

static td_tensor *max_pool(td_tensor *const *x)
{
    return td_f_max_pool2d(x[0], 2, 2, NULL);
}

static td_tensor *avg_pool(td_tensor *const *x)
{
    return td_f_avg_pool2d(x[0], 2, 2, NULL);
}

static td_tensor *adaptive_avg(td_tensor *const *x)
{
    return td_f_adaptive_avg_pool2d(x[0], 2, 1);
}

static td_tensor *adaptive_max(td_tensor *const *x)
{
    return td_f_adaptive_max_pool2d(x[0], 2, 1);
}

static td_tensor *chain(td_tensor *const *x)
{
    td_tensor *y = td_f_gelu_tanh(td_f_gelu(td_f_relu(x[0])));
    return td_f_sigmoid(td_f_tanh(td_f_silu(y)));
}

static td_tensor *softmax(td_tensor *const *x)
{
    return td_f_log_softmax(td_f_softmax(x[0], 0), -1);
}

static td_tensor *dropout(td_tensor *const *x)
{
    td_manual_seed(1);
    return td_f_dropout2d(td_f_dropout(x[0], 0.2, true), 0.2, true);
}

static td_tensor *batch_norm(td_tensor *const *x)
{
    td_dtype dtype = td_tensor_dtype(x[0]);
    td_tensor *mean = td_zeros((int64_t[]){3}, 1, dtype, NULL);
    td_tensor *var = td_full((int64_t[]){3}, 1, 1, dtype, NULL);
    td_tensor *y = td_batch_norm(x[0], mean, var, x[1], x[2], true, 0.1, 1e-5);
    return td_batch_norm(y, mean, var, x[1], NULL, false, 0.1, 1e-5);
}

static td_tensor *layer_norm(td_tensor *const *x)
{
    return td_f_layer_norm(x[0], (int64_t[]){4}, 1, x[1], x[2], 1e-5);
}

static td_tensor *attention(td_tensor *const *x)
{
    td_tensor *seen = td_ones((int64_t[]){3, 3}, 2, TD_BOOL, NULL);
    td_tensor *y = td_scaled_dot_product_attention(
        x[0], x[1], x[2], &(td_attention_options){.mask = seen, .causal = true});
    td_manual_seed(1);
    return td_scaled_dot_product_attention(y, x[1], x[2],
                                           &(td_attention_options){.causal = true, .dropout = 0.2});
}

static td_tensor *embedding(td_tensor *const *x)
{
    td_tensor *indices = td_arange(0, 3, 1, TD_I64, NULL);
    return td_f_embedding(indices, x[0], 1);
}

static td_tensor *class_losses(td_tensor *const *x)
{
    td_tensor *target = td_arange(0, (double)td_tensor_size(x[0], 0), 1, TD_I64, NULL);
    td_tensor *smooth = td_cross_entropy_with(x[0], target,
                                              &(td_loss_options){.label_smoothing = 0.1});
    td_tensor *sharp = td_cross_entropy(x[0], target);
    return td_add(td_add(smooth, sharp), td_nll_loss(x[0], target));
}

static td_tensor *pair_losses(td_tensor *const *x)
{
    return td_add(td_add(td_mse_loss(x[0], x[1]), td_l1_loss(x[0], x[1])),
                  td_bce_with_logits(x[0], x[1]));
}

static const struct op ops[] = {
    {"matmul", matmul, {{2, 3, 4}, {4, 5}}, {3, 2}, 2},
    {"linear", linear, {{3, 4}, {5, 4}, {5}}, {2, 2, 1}, 3},
    {"conv2d", conv2d, {{2, 2, 4, 4}, {3, 2, 3, 3}, {3}}, {4, 4, 1}, 3},
    {"max_pool", max_pool, {{2, 3, 4, 4}}, {4}, 1},
    {"avg_pool", avg_pool, {{2, 3, 4, 4}}, {4}, 1},
    {"adaptive_avg", adaptive_avg, {{2, 3, 4, 4}}, {4}, 1},
    {"adaptive_max", adaptive_max, {{2, 3, 4, 4}}, {4}, 1},
    {"activations", chain, {{3, 4}}, {2}, 1},
    {"softmax", softmax, {{3, 4}}, {2}, 1},
    {"dropout", dropout, {{3, 4, 2}}, {3}, 1},
    {"batch_norm", batch_norm, {{4, 3, 2}, {3}, {3}}, {3, 1, 1}, 3},
    {"layer_norm", layer_norm, {{3, 4}, {4}, {4}}, {2, 1, 1}, 3},
    {"attention", attention, {{2, 3, 4}, {2, 3, 4}, {2, 3, 4}}, {3, 3, 3}, 3},
    {"embedding", embedding, {{4, 5}}, {2}, 1},
    {"class_losses", class_losses, {{3, 4}}, {2}, 1},
    {"pair_losses", pair_losses, {{3, 4}, {3, 4}}, {2, 2}, 2},
};
#define OPS (sizeof ops / sizeof ops[0])

/* Runs the operator in `dtype` on the inputs (f64), and back from its sum. Returns the result; the
 * gradients go to grads. All in f64. */
static td_tensor *run(const struct op *op, td_tensor *const *inputs, td_dtype dtype,
                      td_tensor **grads)
{
    td_tensor *x[MOST_INPUTS];
    for (int i = 0; i < op->inputs; i++) {
        x[i] = td_clone(td_to_dtype(inputs[i], dtype));
        CHECK_OK(td_tensor_set_requires_grad(x[i], true));
    }
    td_tensor *y = op->call(x);
    if (!y)
        FAIL("%s of %s: %s", op->name, td_dtype_name(dtype), td_last_error());
    CHECK_EQ(td_tensor_dtype(y), dtype);
    CHECK_OK(td_backward(td_sum(td_square(y))));
    for (int i = 0; i < op->inputs; i++)
        grads[i] = td_to_dtype(td_tensor_grad(x[i]), TD_F64);
    return td_to_dtype(td_detach(y), TD_F64);
}

static void compare(const struct op *op, td_dtype dtype, td_tensor *got, td_tensor *expected)
{
    static const double precision[] = {[TD_F32] = 1e-5, [TD_F16] = 2e-2, [TD_BF16] = 2e-1};
    double most = td_item(td_max(td_abs(expected)));
    double far = td_item(td_max(td_abs(td_sub(got, expected))));
    if (!(far <= precision[dtype] * (most + 1)))
        FAIL("%s of %s differs by %g, and the largest number is %g", op->name, td_dtype_name(dtype),
             far, most);
}

TEST(halves_and_f32_agree_with_f64)
{
    static const td_dtype dtypes[] = {TD_F32, TD_F16, TD_BF16};
    for (size_t i = 0; i < OPS; i++)
        for (int k = 0; k < 3; k++) {
            TD_SCOPE;
            const struct op *op = &ops[i];
            td_tensor *x[MOST_INPUTS], *grads[MOST_INPUTS], *exact[MOST_INPUTS];
            for (int n = 0; n < op->inputs; n++) /* what all dtypes hold exactly */
                x[n] = td_div_scalar(td_round(gradcheck_random(op->shapes[n], op->ndims[n], 1, 64)),
                                     64);
            td_tensor *expected = run(op, x, TD_F64, exact);
            td_tensor *y = run(op, x, dtypes[k], grads);
            compare(op, dtypes[k], y, expected);
            for (int n = 0; n < op->inputs; n++)
                compare(op, dtypes[k], grads[n], exact[n]);
        }
}

/* The same with the size of any one dimension 0: it works, or it is refused in a sentence. */
TEST(sizes_of_zero)
{
    for (size_t i = 0; i < OPS; i++)
        for (int input = 0; input < ops[i].inputs; input++)
            for (int d = 0; d < ops[i].ndims[input]; d++) {
                if (ops[i].call == class_losses && d == 1 && !td_test_on_host())
                    continue; /* targets among no classes are a later failure of an accelerator */
                TD_SCOPE;
                td_tensor *x[MOST_INPUTS];
                for (int n = 0; n < ops[i].inputs; n++) {
                    int64_t shape[4];
                    for (int e = 0; e < 4; e++) {
                        shape[e] = ops[i].shapes[n][e];
                        /* The same dimension of inputs that have the same shape. */
                        if (e == d && ops[i].ndims[n] == ops[i].ndims[input])
                            shape[e] = 0;
                    }
                    x[n] = gradcheck_random(shape, ops[i].ndims[n], -1, 1);
                    CHECK_OK(td_tensor_set_requires_grad(x[n], true));
                }
                td_tensor *y = ops[i].call(x);
                if (y)
                    CHECK_OK(td_backward(td_sum(y)));
                else
                    CHECK(td_last_error()[0]);
            }
}

TEST(products_over_nothing)
{
    {
        TD_SCOPE;
        td_tensor *x = td_zeros((int64_t[]){3, 0}, 2, TD_F32, NULL);
        td_tensor *w = td_zeros((int64_t[]){2, 0}, 2, TD_F32, NULL);
        td_tensor *b = td_full((int64_t[]){2}, 1, 1.5, TD_F32, NULL), *leaves[] = {x, w, b};
        for (int i = 0; i < 3; i++)
            CHECK_OK(td_tensor_set_requires_grad(leaves[i], true));
        td_tensor *y = td_f_linear(x, w, b);
        for (int i = 0; i < 6; i++)
            CHECK(((const float *)host_data(y))[i] == 1.5f);
        CHECK_OK(td_backward(td_sum(y)));
        CHECK(((const float *)host_data(td_tensor_grad(b)))[0] == 3);
    }
}

/* Without a scope a result is the caller's, and the only thing that is left. */
TEST(results_without_a_scope)
{
    for (size_t i = 0; i < OPS; i++) {
        td_tensor *x[MOST_INPUTS], *y = NULL;
        for (int n = 0; n < ops[i].inputs; n++)
            x[n] = gradcheck_random(ops[i].shapes[n], ops[i].ndims[n], 0.1, 0.9);
        if (ops[i].call == matmul || ops[i].call == linear || ops[i].call == conv2d ||
            ops[i].call == max_pool || ops[i].call == layer_norm) {
            y = ops[i].call(x);
            CHECK(y);
            CHECK_EQ(atomic_load(&y->owners), 1);
            CHECK_EQ(atomic_load(&y->storage->owners), 1);
            td_tensor_release(y);
        }
        for (int n = 0; n < ops[i].inputs; n++) {
            CHECK_EQ(atomic_load(&x[n]->owners), 1);
            CHECK_EQ(atomic_load(&x[n]->storage->owners), 1);
            td_tensor_release(x[n]);
        }
    }
}
