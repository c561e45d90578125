/* Autocast against PyTorch's torch.autocast("cpu"), recorded by reference/record_amp.py: the dtypes of results, results
 * and gradients roughly, and the losses of a training. And the dtypes on another kind of device, which is made up here. */
#include "runner.h"

#include "autograd/autocast.h"

#include <tandem/tandem.h>

#include <math.h>
#include <stdio.h>
#include <string.h>

/* The default of the host, which accelerators, with f16 as theirs, are given. */
static const td_autocast_options *to_bf16(void)
{
    static const td_autocast_options options = {.dtype = TD_BF16};
    return td_test_on_host() ? NULL : &options;
}

enum { NO_RESULT = -1, INPUTS = 4 };

/* The dtype of the result, and the sums of the absolute values of the result and of all gradients. */
struct recorded_result {
    int dtype;
    double sum, grads;
};

/* For operands of f32, of bf16, of bf16 and f32, and of f64. */
struct recorded_cast {
    const char *name;
    struct recorded_result results[INPUTS];
};

#include "reference/amp_vectors.h"

static const td_dtype first_dtypes[INPUTS] = {TD_F32, TD_BF16, TD_BF16, TD_F64};
static const td_dtype rest_dtypes[INPUTS] = {TD_F32, TD_BF16, TD_F32, TD_F64};

/* ---- The calls -------------------------------------------------------------------------------------- */

/* The operands: x and y of one shape, or an image and a kernel, or heads. */
struct operands {
    td_tensor *x, *y, *image, *kernel, *heads;
};

static td_tensor *between(double low, double high, const int64_t *shape, int ndim, td_dtype dtype)
{
    int64_t count = 1;
    for (int d = 0; d < ndim; d++)
        count *= shape[d];
    td_tensor *x = td_to_dtype(td_reshape(td_linspace(low, high, count, TD_F32, NULL), shape, ndim),
                               dtype);
    CHECK_OK(td_tensor_set_requires_grad(x, true));
    return x;
}

static struct operands make_operands(td_dtype first, td_dtype rest)
{
    return (struct operands){
        .x = between(0.1, 2, TD_SHAPE(4, 6), first),
        .y = between(1.5, 0.2, TD_SHAPE(4, 6), rest),
        .image = between(-1, 1, TD_SHAPE(2, 3, 8, 8), first),
        .kernel = between(-0.5, 0.5, TD_SHAPE(4, 3, 3, 3), rest),
        .heads = between(-1, 1, TD_SHAPE(1, 2, 5, 4), first),
    };
}

/* x on the device of `like`. */
static td_tensor *on_device_of(const td_tensor *like, td_tensor *x)
{
    return td_tensor_to(x, td_tensor_device(like));
}

static td_tensor *products(const char *name, struct operands in)
{
    if (!strcmp(name, "matmul"))
        return td_matmul(in.x, td_transpose(in.y, 0, 1));
    if (!strcmp(name, "bmm"))
        return td_bmm(td_reshape(in.x, TD_SHAPE(2, 2, 6)), td_reshape(in.y, TD_SHAPE(2, 6, 2)));
    if (!strcmp(name, "linear"))
        return td_f_linear(in.x, in.y, NULL);
    if (!strcmp(name, "conv2d"))
        return td_f_conv2d(in.image, in.kernel, NULL, NULL);
    if (!strcmp(name, "attention"))
        return td_scaled_dot_product_attention(in.heads, in.heads, in.heads, NULL);
    return NULL;
}

static td_tensor *functions(const char *name, td_tensor *x)
{
    static const struct {
        const char *name;
        td_tensor *(*call)(td_tensor *);
    } calls[] = {
        {"exp", td_exp},     {"ln", td_ln},         {"log1p", td_log1p},
        {"rsqrt", td_rsqrt}, {"square", td_square}, {"reciprocal", td_reciprocal},
        {"sum", td_sum},     {"mean", td_mean},     {"prod", td_prod},
        {"norm", td_norm},   {"relu", td_f_relu},   {"gelu", td_f_gelu},
        {"tanh", td_f_tanh},
    };
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++)
        if (!strcmp(name, calls[i].name))
            return calls[i].call(x);
    if (!strcmp(name, "rdiv_scalar"))
        return td_rdiv_scalar(x, 2);
    if (!strcmp(name, "pow_scalar"))
        return td_pow_scalar(x, 3);
    if (!strcmp(name, "sum_dims"))
        return td_sum_dims(x, TD_DIMS(1), false);
    if (!strcmp(name, "softmax"))
        return td_f_softmax(x, 1);
    if (!strcmp(name, "log_softmax"))
        return td_f_log_softmax(x, 1);
    if (!strcmp(name, "layer_norm"))
        return td_f_layer_norm(x, TD_SHAPE(6), NULL, NULL, 1e-5);
    return NULL;
}

static td_tensor *losses(const char *name, struct operands in)
{
    td_tensor *target = on_device_of(
        in.x, td_from_array((int64_t[]){1, 2, 3, 0}, TD_SHAPE(4), TD_I64, NULL));
    td_tensor *ones = on_device_of(in.x, td_ones(TD_SHAPE(6), TD_F32, NULL));
    td_tensor *zeros = on_device_of(in.x, td_zeros(TD_SHAPE(6), TD_F32, NULL));
    if (!strcmp(name, "nll_loss"))
        return td_nll_loss(in.x, target);
    if (!strcmp(name, "cross_entropy"))
        return td_cross_entropy(in.x, target);
    if (!strcmp(name, "cross_entropy_smoothed"))
        return td_cross_entropy_with(in.x, target,
                                     &(td_loss_options){.label_smoothing = 0.1, .weight = ones});
    if (!strcmp(name, "mse_loss"))
        return td_mse_loss(in.x, in.y);
    if (!strcmp(name, "l1_loss"))
        return td_l1_loss(in.x, in.y);
    if (!strcmp(name, "bce_with_logits"))
        return td_bce_with_logits(in.x, in.y);
    if (!strcmp(name, "index_select"))
        return td_index_select(in.x, 0, target);
    if (!strcmp(name, "batch_norm"))
        return td_batch_norm(in.x, zeros, td_clone(ones), ones, td_clone(zeros), true, 0.1, 1e-5);
    return NULL;
}

static td_tensor *pairs(const char *name, td_tensor *x, td_tensor *y)
{
    static const struct {
        const char *name;
        td_tensor *(*call)(td_tensor *, td_tensor *);
    } calls[] = {
        {"pow", td_pow},         {"add", td_add},         {"sub", td_sub},
        {"mul", td_mul},         {"div", td_div},         {"eq", td_eq},
        {"maximum", td_maximum}, {"minimum", td_minimum}, {"ge", td_ge},
    };
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++)
        if (!strcmp(name, calls[i].name))
            return calls[i].call(x, y);
    if (!strcmp(name, "add_scaled"))
        return td_add_scaled(x, y, 0.5);
    if (!strcmp(name, "mul_by_number"))
        return td_mul(x, td_select(td_select(y, 0, 0), 0, 0));
    if (!strcmp(name, "where"))
        return td_where(
            on_device_of(x, td_to_dtype(td_ones(TD_SHAPE(4, 6), TD_F32, NULL), TD_BOOL)), x, y);
    if (!strcmp(name, "cat"))
        return td_cat(TD_TENSORS(x, y), 0);
    if (!strcmp(name, "stack"))
        return td_stack(TD_TENSORS(x, y), 0);
    td_tensor *changed = td_clone(x);
    if (!strcmp(name, "add_") && !td_add_(changed, y))
        return changed;
    if (!strcmp(name, "mul_") && !td_mul_(changed, y))
        return changed;
    return NULL;
}

static td_tensor *call(const char *name, struct operands in)
{
    if (!strcmp(name, "max_pool2d"))
        return td_f_max_pool2d(in.image, 2, 2, NULL);
    if (!strcmp(name, "avg_pool2d"))
        return td_f_avg_pool2d(in.image, 2, 2, NULL);
    td_tensor *result = products(name, in);
    result = result ? result : functions(name, in.x);
    result = result ? result : losses(name, in);
    return result ? result : pairs(name, in.x, in.y);
}

/* ---- On the CPU ------------------------------------------------------------------------------------- */

static double sum_of(td_tensor *x)
{
    return td_item(td_sum(td_abs(td_to_dtype(x, TD_F64))));
}

static double sum_of_grads(struct operands in)
{
    td_tensor *leaves[] = {in.x, in.y, in.image, in.kernel, in.heads};
    double sum = 0;
    for (int i = 0; i < 5; i++) {
        td_tensor *grad = td_tensor_grad(leaves[i]);
        if (!grad)
            continue;
        CHECK_EQ(td_tensor_dtype(grad), td_tensor_dtype(leaves[i]));
        sum += sum_of(grad);
    }
    return sum;
}

static void check_result(const char *name, int which, const struct recorded_result *expected)
{
    TD_SCOPE;
    struct operands in = make_operands(first_dtypes[which], rest_dtypes[which]);
    td_tensor *result;
    {
        TD_AUTOCAST(td_device_kind(NULL), to_bf16());
        result = call(name, in);
    }
    if (!result || (int)td_tensor_dtype(result) != expected->dtype)
        td_test_fail(__FILE__, __LINE__, "%s of inputs %d is %s, in PyTorch %s (%s)", name, which,
                     result ? td_dtype_name(td_tensor_dtype(result)) : "NULL",
                     td_dtype_name((td_dtype)expected->dtype), td_last_error());
    /* Halves are rounded at other places, by 1/256 each. */
    bool is_rough = which < 3;
    double near = is_rough ? 0.04 : 1e-6, sum = sum_of(result);
    if (!(fabs(sum - expected->sum) <= near * (1 + fabs(expected->sum))))
        td_test_fail(__FILE__, __LINE__, "%s of inputs %d sums to %g, in PyTorch to %g", name,
                     which, sum, expected->sum);
    if (!td_tensor_requires_grad(result))
        return;
    td_tensor *slopes = td_reshape(td_cos(td_linspace(0, 40, result->layout.numel, TD_F32, NULL)),
                                   result->layout.shape, result->layout.ndim);
    slopes = td_to_dtype(slopes, result->layout.dtype);
    CHECK_OK(td_backward_from(&result, &slopes, 1, NULL));
    double grads = sum_of_grads(in);
    if (!(fabs(grads - expected->grads) <= near * (1 + fabs(expected->grads))))
        td_test_fail(__FILE__, __LINE__,
                     "the gradients of %s of inputs %d sum to %g, in PyTorch to %g", name, which,
                     grads, expected->grads);
}

TEST(dtypes_are_those_of_pytorch, .host_only = "the rules are those of torch.autocast(\"cpu\")")
{
    const int count = (int)(sizeof recorded_casts / sizeof recorded_casts[0]);
    CHECK(count > 40);
    for (int i = 0; i < count; i++)
        for (int which = 0; which < INPUTS; which++)
            if (recorded_casts[i].results[which].dtype != NO_RESULT)
                check_result(recorded_casts[i].name, which, &recorded_casts[i].results[which]);
}

/* ---- On another kind -------------------------------------------------------------------------------- */

static struct td__device_kind other_kind;
static td_device other_device;

static td_tensor *move(td_tensor *x)
{
    struct td__storage there = {.device = &other_device};
    td_tensor *moved = on_device_of(&(td_tensor){.storage = &there}, td_detach(x));
    CHECK_OK(td_tensor_set_requires_grad(moved, true));
    return moved;
}

static td_dtype dtype_on_other_kind(const char *name, td_dtype first, td_dtype rest)
{
    td_dtype dtype;
    TD_SCOPE;
    struct operands in = make_operands(first, rest);
    in = (struct operands){move(in.x), move(in.y), move(in.image), move(in.kernel), move(in.heads)};
    td_autocast scope;
    CHECK_OK(td__autocast_begin(&other_kind, TD_F16, false, &scope));
    td_tensor *result = call(name, in);
    if (!result)
        td_test_fail(__FILE__, __LINE__, "%s: %s", name, td_last_error());
    dtype = td_tensor_dtype(result);
    td_autocast_end(&scope);
    if (td_tensor_requires_grad(result))
        CHECK_OK(td_backward(td_sum(result)));
    sum_of_grads(in);
    return dtype;
}

/* PyTorch's lists for CUDA. */
TEST(other_kinds_have_the_policies_of_cuda)
{
    static const char *const lower[] = {"matmul", "bmm", "linear", "conv2d", "attention"};
    static const char *const wide[] = {
        "exp",           "ln",
        "log1p",         "rsqrt",
        "reciprocal",    "square",
        "pow",           "sum",
        "rdiv_scalar",   "pow_scalar",
        "sum_dims",      "prod",
        "norm",          "softmax",
        "log_softmax",   "layer_norm",
        "nll_loss",      "mse_loss",
        "cross_entropy", "cross_entropy_smoothed",
        "l1_loss",       "bce_with_logits",
    };
    static const char *const as_given[] = {"mean",    "relu",       "gelu",  "tanh",
                                           "maximum", "max_pool2d", "stack", "batch_norm"};
    other_device = *td__host_device();
    other_kind = *other_device.kind;
    snprintf(other_kind.name, sizeof other_kind.name, "other");
    other_device.kind = &other_kind;
    snprintf(other_device.name, sizeof other_device.name, "other");
    for (size_t i = 0; i < sizeof lower / sizeof lower[0]; i++)
        CHECK_EQ(dtype_on_other_kind(lower[i], TD_F32, TD_F32), TD_F16);
    for (size_t i = 0; i < sizeof wide / sizeof wide[0]; i++) {
        CHECK_EQ(dtype_on_other_kind(wide[i], TD_F16, TD_F16), TD_F32);
        CHECK_EQ(dtype_on_other_kind(wide[i], TD_F32, TD_F32), TD_F32);
    }
    for (size_t i = 0; i < sizeof as_given / sizeof as_given[0]; i++)
        CHECK_EQ(dtype_on_other_kind(as_given[i], TD_F16, TD_F16), TD_F16);
    CHECK_EQ(dtype_on_other_kind("add", TD_F16, TD_F32), TD_F32);
    CHECK_EQ(dtype_on_other_kind("cat", TD_F16, TD_BF16), TD_F32);
}

/* The policies in the row of docs/amp.md that names an operator. */
static void read_row(const char *name, char *on_cpu, char *on_others)
{
    char line[1024], quoted[64];
    snprintf(quoted, sizeof quoted, "`%s`", name);
    FILE *page = fopen(TD_AMP_PAGE, "r");
    CHECK(page);
    while (fgets(line, sizeof line, page) && !(line[0] == '|' && strstr(line, quoted)))
        line[0] = 0;
    fclose(page);
    if (!strstr(line, quoted))
        td_test_fail(__FILE__, __LINE__, "%s has no row in docs/amp.md", name);
    *on_cpu = *on_others = 0;
    sscanf(line, "|%*[^|]| %15[a-z0-9]", on_cpu);
    sscanf(line, "|%*[^|]|%*[^|]| %15[a-z0-9]", on_others);
}

TEST(the_page_has_the_table)
{
    static const char *const words[] = {
        [TD__CAST_NONE] = "",     [TD__CAST_LOWER] = "lower",    [TD__CAST_F32] = "f32",
        [TD__CAST_READ] = "read", [TD__CAST_PROMOTE] = "widest", [TD__CAST_KEEP] = "keep"};
    for (int op = 0; op < TD__CAST_COUNT; op++) {
        char names[256], on_cpu[16], on_others[16], *rest = names;
        snprintf(names, sizeof names, "%s", td__cast_rules[op].operators);
        for (const char *name; (name = strtok_r(rest, ", ", &rest));) {
            read_row(name, on_cpu, on_others);
            CHECK_STR(on_cpu, words[td__cast_rules[op].on_cpu]);
            CHECK_STR(on_others, words[td__cast_rules[op].on_others]);
        }
    }
}

/* A scope of one kind leaves the others as they are. */
/* The loss of logits in 16 bits, and their gradient, are those of casts to f32, bit for bit. */
/* The same bits; on accelerators, which may have another exponential for halves, nearly so. */
static bool same_values(td_tensor *a, td_tensor *b, double tolerance)
{
    if (!strcmp(td_device_kind(NULL), "cpu"))
        return td_item(td_all(td_eq(a, b))) == 1;
    return td_allclose(td_to_dtype(a, TD_F32), td_to_dtype(b, TD_F32), tolerance, 1e-6);
}

TEST(cross_entropy_reads_halves)
{
    static const td_dtype halves[] = {TD_F16, TD_BF16};
    static const td_reduction reductions[] = {TD_REDUCE_MEAN, TD_REDUCE_NONE};
    for (int i = 0; i < 4; i++) {
        TD_SCOPE;
        td_tensor *x = td_to_dtype(td_randn(TD_SHAPE(5, 37), TD_F32, NULL), halves[i / 2]);
        td_tensor *same = td_clone(x), *weight = td_rand(TD_SHAPE(37), TD_F32, NULL), *loss;
        td_tensor *target = on_device_of(
            x, td_from_array((int64_t[]){36, 0, -100, 7, 7}, TD_SHAPE(5), TD_I64, NULL));
        td_loss_options options = {.reduction = reductions[i % 2], .weight = weight};
        CHECK_OK(td_tensor_set_requires_grad(x, true));
        CHECK_OK(td_tensor_set_requires_grad(same, true));
        {
            TD_AUTOCAST(td_device_kind(NULL), to_bf16());
            loss = td_cross_entropy_with(x, target, &options);
        }
        td_tensor *expected = td_cross_entropy_with(td_to_dtype(same, TD_F32), target, &options);
        CHECK_EQ(td_tensor_dtype(loss), TD_F32);
        CHECK(same_values(loss, expected, 1e-6));
        CHECK_OK(td_backward(td_sum(loss)));
        CHECK_OK(td_backward(td_sum(expected)));
        CHECK_EQ(td_tensor_dtype(td_tensor_grad(x)), halves[i / 2]);
        CHECK(same_values(td_tensor_grad(x), td_tensor_grad(same), 1e-2));
    }
}

TEST(a_scope_is_of_one_kind)
{
    TD_SCOPE;
    other_kind = *td__host_device()->kind;
    td_autocast scope;
    CHECK_OK(td__autocast_begin(&other_kind, TD_F16, false, &scope));
    td_tensor *x = td_ones(TD_SHAPE(2, 2), TD_F32, NULL);
    CHECK_EQ(td_tensor_dtype(td_matmul(x, x)), TD_F32);
    CHECK_EQ(td_autocast_dtype(td_device_kind(NULL)), TD_F32);
    {
        TD_AUTOCAST(td_device_kind(NULL), to_bf16());
        CHECK_EQ(td_tensor_dtype(td_matmul(x, x)), TD_BF16);
    }
    CHECK_EQ(td_tensor_dtype(td_matmul(x, x)), TD_F32);
    td_autocast_end(&scope);
}

/* ---- A training ------------------------------------------------------------------------------------- */

enum { CONV, NORM, FC1, FC2, FC3 };

static td_tensor *net_forward(td_module *net, td_tensor *const *inputs, int count)
{
    CHECK_EQ(count, 1);
    td_tensor *x = td_forward(td_child(net, CONV), inputs[0]);
    CHECK_EQ(td_tensor_dtype(x), TD_BF16);
    x = td_f_relu(td_forward(td_child(net, NORM), x));
    CHECK_EQ(td_tensor_dtype(x), TD_BF16);
    x = td_forward(td_child(net, FC1), td_f_flatten(x, 1, -1));
    td_tensor *y = td_to_dtype(td_forward(td_child(net, FC2), td_f_gelu(x)), TD_F32);
    return td_forward(td_child(net, FC3), td_add(x, td_f_softmax(y, 1)));
}

TEST(a_training_follows_pytorch, .host_only = "the rules are those of torch.autocast(\"cpu\")")
{
    static const td_module_ops ops = {.name = "Net", .forward = net_forward};
    td_manual_seed(11);
    td_module *net = td_module_create(&ops);
    td_module_add_child(net, "conv", td_conv2d(1, 4, 3));
    td_module_add_child(net, "norm", td_batch_norm2d(4));
    td_module_add_child(net, "fc1", td_linear(4 * 6 * 6, 16));
    td_module_add_child(net, "fc2", td_linear(16, 16));
    td_module_add_child(net, "fc3", td_linear(16, 4));
    net = td_module_finish(net);
    CHECK(net);
    td_tensor *x = td_randn(TD_SHAPE(16, 1, 8, 8), TD_F32, NULL);
    td_tensor *labels = td_from_array((int64_t[]){0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3},
                                      TD_SHAPE(16), TD_I64, NULL);
    td_optimizer *sgd = td_sgd(net, &(td_sgd_options){.lr = 0.05, .momentum = 0.9});
    for (int step = 0; step < (int)(sizeof recorded_losses / sizeof recorded_losses[0]); step++) {
        TD_SCOPE;
        td_tensor *loss;
        CHECK_OK(td_optimizer_zero_grad(sgd));
        {
            TD_AUTOCAST(td_device_kind(NULL), to_bf16());
            loss = td_cross_entropy(td_forward(net, x), labels);
        }
        CHECK(loss);
        CHECK_EQ(td_tensor_dtype(loss), TD_F32);
        CHECK_OK(td_backward(loss));
        CHECK_OK(td_optimizer_step(sgd));
        if (!(fabs(td_item(loss) - recorded_losses[step]) < 0.03))
            td_test_fail(__FILE__, __LINE__, "the loss of step %d is %g, in PyTorch %g", step,
                         td_item(loss), recorded_losses[step]);
    }
    td_optimizer_destroy(sgd);
    td_tensor_release(x);
    td_tensor_release(labels);
    td_module_destroy(net);
}
