/* Operators against PyTorch: results and gradients that it gave for the same inputs, recorded by
 * reference/record_ops.py. */
#include "host_data.h"
#include "runner.h"
#include "view_programs.h"

#include <tandem/ops.h>

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { MOST_TENSORS = 12 };

struct recorded_tensor {
    int start; /* in recorded_numbers */
    int ndim;
    int64_t shape[4];
    bool is_index; /* i64 */
};

/* Inputs, the gradient of the result, the result, and the gradients of inputs that are no indices. */
struct recorded_op {
    const char *name;
    int inputs, tensors;
    struct recorded_tensor tensor[MOST_TENSORS];
};

#include "reference/ops_vectors.h"

/* ---- The calls ------------------------------------------------------------------------------------------ */

static td_tensor *conv2d_options(td_tensor *const *x)
{
    return td_f_conv2d(
        x[0], x[1], x[2],
        &(td_conv2d_options){.stride = {2, 1}, .padding = {1, 2}, .dilation = {1, 2}, .groups = 2});
}

static td_tensor *max_pool2d_options(td_tensor *const *x)
{
    return td_f_max_pool2d(
        x[0], 3, 2, &(td_pool2d_options){.stride = {2, 1}, .padding = {1, 1}, .dilation = {1, 2}});
}

static td_tensor *avg_pool2d_with(td_tensor *x, bool exclude_padding)
{
    return td_f_avg_pool2d(x, 3, 3,
                           &(td_pool2d_options){.stride = {2, 2},
                                                .padding = {1, 1},
                                                .exclude_padding = exclude_padding});
}

static td_tensor *products(const char *name, td_tensor *const *x)
{
    if (!strcmp(name, "matmul"))
        return td_matmul(x[0], x[1]);
    if (!strcmp(name, "linear"))
        return td_f_linear(x[0], x[1], x[2]);
    if (!strcmp(name, "conv2d"))
        return td_f_conv2d(x[0], x[1], x[2], NULL);
    if (!strcmp(name, "conv2d_options"))
        return conv2d_options(x);
    if (!strcmp(name, "max_pool2d"))
        return td_f_max_pool2d(x[0], 2, 2, NULL);
    if (!strcmp(name, "max_pool2d_options"))
        return max_pool2d_options(x);
    if (!strcmp(name, "avg_pool2d"))
        return td_f_avg_pool2d(x[0], 2, 2, NULL);
    if (!strcmp(name, "avg_pool2d_options"))
        return avg_pool2d_with(x[0], true);
    if (!strcmp(name, "avg_pool2d_padding"))
        return avg_pool2d_with(x[0], false);
    if (!strcmp(name, "adaptive_avg_pool2d"))
        return td_f_adaptive_avg_pool2d(x[0], 3, 2);
    return !strcmp(name, "adaptive_max_pool2d") ? td_f_adaptive_max_pool2d(x[0], 3, 2) : NULL;
}

static td_tensor *activations(const char *name, td_tensor *const *x)
{
    static const struct {
        const char *name;
        td_tensor *(*function)(td_tensor *x);
    } plain[] = {{"relu", td_f_relu}, {"gelu", td_f_gelu}, {"gelu_tanh", td_f_gelu_tanh},
                 {"silu", td_f_silu}, {"tanh", td_f_tanh}, {"sigmoid", td_f_sigmoid}};
    for (size_t i = 0; i < sizeof plain / sizeof plain[0]; i++)
        if (!strcmp(name, plain[i].name))
            return plain[i].function(x[0]);
    if (!strncmp(name, "softmax_", 8))
        return td_f_softmax(x[0], !strcmp(name, "softmax_1") ? 1 : -1);
    if (!strncmp(name, "log_softmax_", 12))
        return td_f_log_softmax(x[0], !strcmp(name, "log_softmax_1") ? 1 : -1);
    if (!strcmp(name, "dropout"))
        return td_f_dropout(x[0], 0.3, true);
    return !strcmp(name, "dropout2d") ? td_f_dropout2d(x[0], 0.5, true) : NULL;
}

static td_tensor *norms(const char *name, td_tensor *const *x)
{
    td_tensor *mean = td_full((int64_t[]){3}, 1, 0.25, TD_F32, NULL);
    td_tensor *var = td_full((int64_t[]){3}, 1, 1.5, TD_F32, NULL);
    if (!strcmp(name, "batch_norm"))
        return td_batch_norm(x[0], mean, var, x[1], x[2], true, 0.1, 1e-5);
    if (!strcmp(name, "batch_norm_eval"))
        return td_batch_norm(x[0], mean, var, x[1], x[2], false, 0.1, 1e-5);
    if (!strncmp(name, "running_", 8)) {
        CHECK(td_batch_norm(x[0], mean, var, NULL, NULL, true, 0.2, 1e-5));
        return td_add(!strcmp(name, "running_mean") ? mean : var, td_mul_scalar(td_sum(x[0]), 0));
    }
    if (!strcmp(name, "layer_norm_1"))
        return td_f_layer_norm(x[0], (int64_t[]){17}, 1, x[1], x[2], 1e-5);
    if (!strcmp(name, "layer_norm_2"))
        return td_f_layer_norm(x[0], (int64_t[]){3, 5}, 2, x[1], x[2], 1e-5);
    return NULL;
}

static td_tensor *attentions(const char *name, td_tensor *const *x)
{
    td_attention_options options = {0};
    if (!strcmp(name, "embedding"))
        return td_f_embedding(x[0], x[1], -1);
    if (!strcmp(name, "embedding_padding"))
        return td_f_embedding(x[0], x[1], 2);
    if (strncmp(name, "attention", 9) != 0)
        return NULL;
    options.causal = !strcmp(name, "attention_causal") || !strcmp(name, "attention_dropout");
    options.mask = !strcmp(name, "attention_mask") ? x[3] : NULL;
    options.dropout = !strcmp(name, "attention_dropout") ? 0.25 : 0;
    return td_scaled_dot_product_attention(x[0], x[1], x[2], &options);
}

static td_tensor *losses(const char *name, td_tensor *const *x)
{
    td_loss_options options = {.ignore = true, .ignore_index = 3};
    if (!strcmp(name, "cross_entropy"))
        return td_cross_entropy(x[0], x[1]);
    if (!strcmp(name, "cross_entropy_smooth"))
        return td_cross_entropy_with(x[0], x[1], &(td_loss_options){.label_smoothing = 0.2});
    options.reduction = strstr(name, "_mean")  ? TD_REDUCE_MEAN
                        : strstr(name, "_sum") ? TD_REDUCE_SUM
                                               : TD_REDUCE_NONE;
    if (!strncmp(name, "mse_", 4) || !strncmp(name, "l1_", 3) || !strncmp(name, "bce_", 4)) {
        options.ignore = false;
        return name[0] == 'm'   ? td_mse_loss_with(x[0], x[1], &options)
               : name[0] == 'l' ? td_l1_loss_with(x[0], x[1], &options)
                                : td_bce_with_logits_with(x[0], x[1], &options);
    }
    options.weight = td_from_array(recorded_weight, TD_SHAPE(5), TD_F32, NULL);
    if (!strncmp(name, "nll_", 4))
        return td_nll_loss_with(x[0], x[1], &options);
    if (!strncmp(name, "smooth_", 7))
        options.label_smoothing = 0.1;
    else if (strncmp(name, "cross_entropy_", 14) != 0)
        return NULL;
    return td_cross_entropy_with(x[0], x[1], &options);
}

static td_tensor *call(const char *name, td_tensor *const *x)
{
    static td_tensor *(*const groups[])(const char *, td_tensor *const *) = {
        products, activations, norms, attentions, losses};
    td_tensor *y = NULL;
    td_manual_seed(77);
    if (!strncmp(name, "view_", 5))
        y = view_program(name, x[0], x[1]);
    for (size_t i = 0; i < sizeof groups / sizeof groups[0] && !y; i++)
        y = groups[i](name, x);
    if (!y)
        td_test_fail(__FILE__, __LINE__, "%s gave nothing: %s", name, td_last_error());
    return y;
}

/* ---- Comparing ------------------------------------------------------------------------------------------ */

static td_tensor *make(const struct recorded_tensor *recorded)
{
    TD_SCOPE;
    td_tensor *tensor = td_from_array(recorded_numbers + recorded->start, recorded->shape,
                                      recorded->ndim, TD_F32, NULL);
    CHECK(tensor);
    return td_scope_return(td_to_dtype(tensor, recorded->is_index ? TD_I64 : TD_F32));
}

/* Within a few roundings of the largest number of the tensor. */
static void compare(const char *name, const char *what, td_tensor *got,
                    const struct recorded_tensor *recorded)
{
    CHECK_EQ(td_tensor_ndim(got), recorded->ndim);
    for (int d = 0; d < recorded->ndim; d++)
        CHECK_EQ(td_tensor_size(got, d), recorded->shape[d]);
    const float *x = host_data(got), *y = recorded_numbers + recorded->start;
    double most = 0;
    for (int64_t i = 0; i < td_tensor_numel(got); i++)
        most = fmax(most, fabs((double)y[i]));
    for (int64_t i = 0; i < td_tensor_numel(got); i++)
        if (!(fabs((double)x[i] - (double)y[i]) <= 2e-6 * most + 1e-9))
            td_test_fail(__FILE__, __LINE__, "%s of %s: element %lld is %.9g, PyTorch's %.9g", what,
                         name, (long long)i, (double)x[i], (double)y[i]);
}

static void check_op(const struct recorded_op *op)
{
    td_tensor *inputs[MOST_TENSORS];
    for (int i = 0; i < op->inputs; i++) {
        inputs[i] = make(&op->tensor[i]);
        if (!op->tensor[i].is_index)
            CHECK_OK(td_tensor_set_requires_grad(inputs[i], true));
    }
    td_tensor *y = call(op->name, inputs), *grad = make(&op->tensor[op->inputs]);
    compare(op->name, "the result", y, &op->tensor[op->inputs + 1]);
    CHECK_OK(td_backward_from(&y, &grad, 1, NULL));
    int next = op->inputs + 2;
    for (int i = 0; i < op->inputs; i++) {
        char what[32];
        if (op->tensor[i].is_index)
            continue;
        snprintf(what, sizeof what, "gradient %d", i);
        CHECK(td_tensor_grad(inputs[i]));
        compare(op->name, what, td_tensor_grad(inputs[i]), &op->tensor[next++]);
    }
    CHECK_EQ(next, op->tensors);
}

TEST(operators_agree_with_pytorch)
{
    for (size_t i = 0; i < sizeof recorded_ops / sizeof recorded_ops[0]; i++) {
        if (strstr(recorded_ops[i].name, "dropout") && !td_test_on_host())
            continue; /* only the host draws PyTorch's numbers */
        TD_SCOPE;
        check_op(&recorded_ops[i]);
    }
}
