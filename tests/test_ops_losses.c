/* Losses: gradients by finite differences, values by other operators, and what is refused. */
#include "ops_checks.h"
#include "host_data.h"

#include <math.h>
#include <string.h>

typedef td_tensor *(*loss_fn)(td_tensor *x, td_tensor *target, const td_loss_options *options);

/* ---- Classes -------------------------------------------------------------------------------------------- */

struct classes {
    loss_fn loss;
    td_reduction reduction;
    bool weighted;
    int64_t ignored; /* -100: as it is without options */
    double smoothing;
};

static td_tensor *weights_of(int64_t classes)
{
    double weights[64];
    CHECK(classes <= 64);
    for (int64_t i = 0; i < classes; i++)
        weights[i] = 0.5 + 0.3 * (double)i;
    return td_from_array(weights, &classes, 1, TD_F64, NULL);
}

/* inputs: x, target. */
static td_tensor *class_loss(td_tensor *const *inputs, const void *arg)
{
    const struct classes *classes = arg;
    int dim = td_tensor_ndim(inputs[0]) == 1 ? 0 : 1;
    return classes->loss(
        inputs[0], inputs[1],
        &(td_loss_options){
            .reduction = classes->reduction,
            .weight = classes->weighted ? weights_of(td_tensor_size(inputs[0], dim)) : NULL,
            .ignore = classes->ignored != -100,
            .ignore_index = classes->ignored,
            .label_smoothing = classes->smoothing,
        });
}

/* The loss by its definition, from logarithms [N, C, S] and targets [N, S]. Returns the losses in
 * `each`, and the mean, the sum or 0. */
static double slow_loss(const struct classes *classes, const double *logs, const int64_t *targets,
                        const int64_t *shape, double *each)
{
    double sum = 0, total = 0;
    for (int64_t n = 0; n < shape[0]; n++)
        for (int64_t s = 0; s < shape[2]; s++) {
            int64_t t = targets[n * shape[2] + s];
            double *loss = &each[n * shape[2] + s], all = 0;
            *loss = 0;
            if (t == -100 || t == classes->ignored)
                continue;
            for (int64_t c = 0; c < shape[1]; c++) {
                double weight = classes->weighted ? 0.5 + 0.3 * (double)c : 1;
                double value = -weight * logs[(n * shape[1] + c) * shape[2] + s];
                all += value;
                if (c == t) {
                    *loss = (1 - classes->smoothing) * value;
                    total += weight;
                }
            }
            *loss += classes->smoothing / (double)shape[1] * all;
            sum += *loss;
        }
    return classes->reduction == TD_REDUCE_MEAN ? sum / total : sum;
}

static td_tensor *targets_of(const int64_t *shape, int ndim, int64_t classes)
{
    TD_SCOPE;
    td_tensor *target = td_empty(shape, ndim, TD_I64, td_device_get("cpu"));
    for (int64_t i = 0; i < td_tensor_numel(target); i++)
        ((int64_t *)td_tensor_data(target))[i] = i * 5 % classes;
    return td_scope_return(td_tensor_to(target, NULL));
}

static void check_class_loss(const struct classes *classes, const int64_t *shape, int ndim)
{
    td_tensor *x = gradcheck_random(shape, ndim, -2, 2);
    int64_t of_target[4], sizes[3] = {1, shape[ndim > 1], 1};
    int count = 0;
    for (int d = 0; d < ndim; d++)
        if (d != (ndim > 1))
            of_target[count++] = shape[d];
    sizes[0] = ndim > 1 ? shape[0] : 1;
    for (int d = 2; d < ndim; d++)
        sizes[2] *= shape[d];
    td_tensor *target = targets_of(of_target, count, sizes[1]);
    if (td_tensor_numel(target) > 2)
        CHECK_OK(td_fill_(td_narrow(td_f_flatten(target, 0, -1), 0, 1, 1), -100));
    td_tensor *inputs[] = {x, target}, *y = class_loss(inputs, classes);
    CHECK(y);
    td_tensor *logs = classes->loss == td_nll_loss_with ? x : td_f_log_softmax(x, ndim > 1);
    double each[64], value = slow_loss(classes, host_data(logs), host_data(target), sizes, each);
    if (classes->reduction == TD_REDUCE_NONE) {
        CHECK_EQ(td_tensor_ndim(y), count);
        for (int64_t i = 0; i < td_tensor_numel(y); i++)
            CHECK(fabs(((const double *)host_data(y))[i] - each[i]) < 1e-12);
    } else {
        CHECK_EQ(td_tensor_ndim(y), 0);
        CHECK(fabs(td_item(y) - value) < 1e-12);
    }
    gradcheck("a loss of classes", class_loss, classes, inputs, 2);
}

TEST(losses_of_classes)
{
    static const loss_fn losses[] = {td_nll_loss_with, td_cross_entropy_with};
    static const int64_t shapes[][4] = {{5}, {4, 3}, {2, 3, 4}, {2, 3, 2, 2}, {3, 1}};
    static const int ndims[] = {1, 2, 3, 4, 2};
    for (int loss = 0; loss < 2; loss++)
        for (int reduction = 0; reduction < 3; reduction++)
            for (int options = 0; options < 8; options++)
                for (int shape = 0; shape < 5; shape++) {
                    TD_SCOPE;
                    struct classes classes = {losses[loss], (td_reduction)reduction, options & 1,
                                              options & 2 ? 2 : -100, options & 4 ? 0.1 : 0};
                    if (classes.smoothing > 0 && loss == 0)
                        continue;
                    check_class_loss(&classes, shapes[shape], ndims[shape]);
                }
}

TEST(class_losses_without_options)
{
    {
        TD_SCOPE;
        td_tensor *x = gradcheck_random(SHAPE(4, 3), -1, 1);
        td_tensor *target = targets_of(SHAPE(4), 3);
        CHECK(td_item(td_cross_entropy(x, target)) ==
              td_item(td_cross_entropy_with(x, target, &(td_loss_options){0})));
        td_tensor *logs = td_f_log_softmax(x, 1);
        CHECK(fabs(td_item(td_nll_loss(logs, target)) - td_item(td_cross_entropy(x, target))) <
              1e-12);
        CHECK(isnan(td_item(td_nll_loss(logs, td_full((int64_t[]){4}, 1, -100, TD_I64, NULL)))));
        CHECK(isnan(td_item(td_cross_entropy(td_zeros(SHAPE(0, 3), TD_F32, NULL),
                                             td_zeros(SHAPE(0), TD_I64, NULL)))));
    }
}

TEST(class_losses_refuse, .host_only = "an index out of range is a later failure of an accelerator")
{
    {
        TD_SCOPE;
        td_tensor *x = td_zeros(SHAPE(4, 3), TD_F32, NULL),
                  *target = td_zeros(SHAPE(4), TD_I64, NULL);
        CHECK_NULL(td_nll_loss(x, td_zeros(SHAPE(5), TD_I64, NULL)),
                   "td_nll_loss: x has the shape [4, 3], target [5]");
        CHECK_NULL(td_cross_entropy(x, td_zeros(SHAPE(4, 3), TD_I64, NULL)),
                   "td_cross_entropy: x has");
        CHECK_NULL(td_cross_entropy(x, td_zeros(SHAPE(4), TD_I32, NULL)), "the target is i32");
        CHECK_NULL(td_cross_entropy(td_zeros(SHAPE(4, 3), TD_I64, NULL), target), "floating-point");
        CHECK_NULL(td_nll_loss(td_zeros(NULL, 0, TD_F32, NULL), target), "[4]");
        CHECK_NULL(td_nll_loss(x, td_full((int64_t[]){4}, 1, 3, TD_I64, NULL)), "3 classes");
        CHECK_NULL(td_cross_entropy(x, td_full((int64_t[]){4}, 1, -1, TD_I64, NULL)), "is -1");
        CHECK_NULL(td_cross_entropy_with(x, target, &(td_loss_options){.label_smoothing = 1.5}),
                   "1.5");
        CHECK_NULL(td_nll_loss_with(x, target, &(td_loss_options){.label_smoothing = 0.5}),
                   "td_cross_entropy_with");
        CHECK_NULL(td_nll_loss_with(x, target,
                                    &(td_loss_options){.weight = td_zeros(SHAPE(4), TD_F32, NULL)}),
                   "weight has the shape [4]; it must have [3]");
        CHECK_NULL(td_nll_loss_with(x, target,
                                    &(td_loss_options){.weight = td_zeros(SHAPE(3), TD_F64, NULL)}),
                   "f32 and f64");
        CHECK_NULL(td_nll_loss_with(x, target, &(td_loss_options){.reduction = (td_reduction)7}),
                   "7 is not a reduction");
        CHECK(!td_nll_loss(NULL, target) && !td_cross_entropy(x, NULL));
    }
}

/* The weights are needed for the gradient, so they may not change before it. */
TEST(class_losses_notice_a_change_in_place)
{
    {
        TD_SCOPE;
        td_tensor *x = gradcheck_random(SHAPE(4, 3), -1, 1);
        td_tensor *target = targets_of(SHAPE(4), 3), *weight = weights_of(3);
        td_tensor_set_requires_grad(x, true);
        td_tensor *y = td_cross_entropy_with(x, target, &(td_loss_options){.weight = weight});
        CHECK_OK(td_fill_(weight, 1));
        CHECK_EQ(td_backward(y), TD_ERR_STATE);
        CHECK_CONTAINS(td_last_error(), "td_cross_entropy");
        CHECK(!td_tensor_grad(x));
    }
}

/* ---- Pairs ---------------------------------------------------------------------------------------------- */

struct pair {
    loss_fn loss;
    td_reduction reduction;
};

static td_tensor *pair_loss(td_tensor *const *inputs, const void *arg)
{
    const struct pair *pair = arg;
    return pair->loss(inputs[0], inputs[1], &(td_loss_options){.reduction = pair->reduction});
}

static td_tensor *slow_pair(loss_fn loss, td_tensor *x, td_tensor *y)
{
    if (loss == td_mse_loss_with)
        return td_square(td_sub(x, y));
    if (loss == td_l1_loss_with)
        return td_abs(td_sub(x, y));
    td_tensor *p = td_f_sigmoid(x);
    td_tensor *one = td_mul(y, td_ln(p)),
              *other = td_mul(td_rsub_scalar(y, 1), td_ln(td_rsub_scalar(p, 1)));
    return td_neg(td_add(one, other));
}

TEST(losses_of_pairs)
{
    static const loss_fn losses[] = {td_mse_loss_with, td_l1_loss_with, td_bce_with_logits_with};
    for (int loss = 0; loss < 3; loss++)
        for (int reduction = 0; reduction < 3; reduction++) {
            TD_SCOPE;
            struct pair pair = {losses[loss], (td_reduction)reduction};
            td_tensor *x = gradcheck_random(SHAPE(2, 3, 2), -3, -0.1);
            td_tensor *inputs[] = {x, gradcheck_random(SHAPE(2, 3, 2), 0.1, 0.9)};
            td_tensor *each = slow_pair(losses[loss], x, inputs[1]);
            td_tensor *expected = reduction == TD_REDUCE_MEAN  ? td_mean(each)
                                  : reduction == TD_REDUCE_SUM ? td_sum(each)
                                                               : each;
            td_tensor *y = pair_loss(inputs, &pair);
            CHECK_EQ(td_tensor_ndim(y), td_tensor_ndim(expected));
            CHECK(td_allclose(y, expected, 0, 1e-12));
            gradcheck("a loss of pairs", pair_loss, &pair, inputs, 2);
        }
    {
        TD_SCOPE;
        td_tensor *x = gradcheck_random(SHAPE(3), -1, 1), *y = gradcheck_random(SHAPE(3), 0, 1);
        CHECK(td_item(td_mse_loss(x, y)) == td_item(td_mse_loss_with(x, y, NULL)));
        CHECK(td_item(td_l1_loss(x, y)) == td_item(td_l1_loss_with(x, y, NULL)));
        CHECK(td_item(td_bce_with_logits(x, y)) == td_item(td_bce_with_logits_with(x, y, NULL)));
        td_tensor *none = td_zeros(SHAPE(0), TD_F32, NULL);
        CHECK(isnan(td_item(td_mse_loss(none, none))));
    }
}

TEST(pair_losses_refuse)
{
    {
        TD_SCOPE;
        td_tensor *x = td_zeros(SHAPE(4, 3), TD_F32, NULL);
        CHECK_NULL(td_mse_loss(x, td_zeros(SHAPE(3), TD_F32, NULL)),
                   "td_mse_loss: x has the shape [4, 3], target [3]");
        CHECK_NULL(td_l1_loss(x, td_zeros(SHAPE(4, 3), TD_F64, NULL)),
                   "td_l1_loss: the operands are f32");
        CHECK_NULL(
            td_bce_with_logits(td_zeros(SHAPE(2), TD_I64, NULL), td_zeros(SHAPE(2), TD_I64, NULL)),
            "i64");
        CHECK_NULL(td_mse_loss_with(x, x, &(td_loss_options){.weight = x}),
                   "options of nll_loss and cross_entropy");
        CHECK_NULL(td_mse_loss_with(x, x, &(td_loss_options){.reduction = (td_reduction)-1}),
                   "-1 is not a reduction");
        CHECK(!td_mse_loss(NULL, x) && !td_l1_loss(x, NULL) && !td_bce_with_logits(NULL, NULL));
    }
}
