/* Batch norm and layer norm. */
#include "nn/module.h"

#include "base/fail.h"
#include "base/option_rules.h"

#include <float.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

static const char *truth(bool value)
{
    return value ? "True" : "False";
}

static td_status check_eps(const char *call, double eps)
{
    if (eps >= 0)
        return TD_OK;
    return td_fail(TD_ERR_INVALID, "%s: eps is %g; it must not be negative", call, eps);
}

/* ---- Batch norm --------------------------------------------------------------------------------- */

enum { RUNNING_MEAN, RUNNING_VAR, BATCHES };

struct batch_norm {
    int64_t features;
    td_batch_norm_options options;
    int least_dims, most_dims; /* of the input */
};

/* Increments num_batches_tracked, and sets *momentum. */
static td_status count_batch(td_module *self, double *momentum)
{
    const struct batch_norm *norm = self->data;
    td_tensor *batches = td_buffer(self, BATCHES);
    *momentum = norm->options.momentum;
    if (!self->training || !batches)
        return TD_OK;
    TD_TRY(td_add_scalar_(batches, 1));
    if (norm->options.cumulative) {
        double count = td_item(batches);
        *momentum = count > 0 ? 1 / count : 1;
    }
    return TD_OK;
}

static td_status check_batch(const td_module *self, const td_tensor *x)
{
    const struct batch_norm *norm = self->data;
    if (x->layout.ndim >= norm->least_dims && x->layout.ndim <= norm->most_dims &&
        x->layout.shape[1] == norm->features)
        return TD_OK;
    return td_fail(TD_ERR_INVALID,
                   "td_forward: a %s of %lld features got the shape %s; it takes %s, with the "
                   "features as the second size",
                   self->ops->name, (long long)norm->features, td__shape_of(x),
                   norm->least_dims == norm->most_dims ? "four dimensions"
                                                       : "two or three dimensions");
}

static bool uses_batch(const td_module *self)
{
    const struct batch_norm *norm = self->data;
    return self->training || norm->options.no_running_stats;
}

static td_tensor *batch_norm_forward(td_module *self, td_tensor *const *inputs, int count)
{
    const struct batch_norm *norm = self->data;
    double momentum = 0;
    if (!td__takes(self, count, 1) || check_batch(self, inputs[0]) || count_batch(self, &momentum))
        return NULL;
    return td_batch_norm(inputs[0], td_buffer(self, RUNNING_MEAN), td_buffer(self, RUNNING_VAR),
                         td_param(self, 0), td_param(self, 1), uses_batch(self), momentum,
                         norm->options.eps);
}

static int batch_norm_describe(const td_module *self, char *text, size_t size)
{
    const struct batch_norm *norm = self->data;
    char momentum[32] = "None";
    if (!norm->options.cumulative)
        snprintf(momentum, sizeof momentum, "%g", norm->options.momentum);
    return snprintf(text, size, "%lld, eps=%g, momentum=%s, affine=%s, track_running_stats=%s",
                    (long long)norm->features, norm->options.eps, momentum,
                    truth(!norm->options.no_affine), truth(!norm->options.no_running_stats));
}

static const struct td__kind_option batch_norm_options[] = {
    {"features", TD__OPTION_INT64, offsetof(struct batch_norm, features), 0, 0x1p53},
    {"eps", TD__OPTION_DOUBLE, offsetof(struct batch_norm, options.eps), 0, DBL_MAX},
    {"momentum", TD__OPTION_DOUBLE, offsetof(struct batch_norm, options.momentum), -DBL_MAX,
     DBL_MAX},
    {"cumulative", TD__OPTION_BOOL, offsetof(struct batch_norm, options.cumulative), 0, 0},
    {"no_affine", TD__OPTION_BOOL, offsetof(struct batch_norm, options.no_affine), 0, 0},
    {"no_running_stats", TD__OPTION_BOOL, offsetof(struct batch_norm, options.no_running_stats), 0,
     0},
};
enum { BATCH_NORM_OPTIONS = sizeof batch_norm_options / sizeof batch_norm_options[0] };

static td_status batch_norm_save(const td_module *self, td_state *options)
{
    return td__options_save(self, options, batch_norm_options, BATCH_NORM_OPTIONS);
}

static td_status load_batch_norm(td_module *self, const td_state *options, bool flat)
{
    struct batch_norm *norm = self->data;
    TD_TRY(td__options_load(self, options, batch_norm_options, BATCH_NORM_OPTIONS));
    norm->least_dims = flat ? 2 : 4;
    norm->most_dims = flat ? 3 : 4;
    const int64_t *shape = &norm->features;
    TD_TRY(td__check_parameters(
        self,
        (const struct td__kind_tensor[]){{"weight", shape, 1, false}, {"bias", shape, 1, false}},
        norm->options.no_affine ? 0 : 2));
    return td__check_buffers(
        self,
        (const struct td__kind_tensor[]){{"running_mean", shape, 1, false},
                                         {"running_var", shape, 1, false},
                                         {"num_batches_tracked", NULL, 0, true}},
        norm->options.no_running_stats ? 0 : 3);
}

static td_status batch_norm1d_load(td_module *self, const td_state *options)
{
    return load_batch_norm(self, options, true);
}

static td_status batch_norm2d_load(td_module *self, const td_state *options)
{
    return load_batch_norm(self, options, false);
}

static const td_module_ops batch_norm1d_ops = {.name = "BatchNorm1d",
                                               .data_size = sizeof(struct batch_norm),
                                               .forward = batch_norm_forward,
                                               .describe = batch_norm_describe,
                                               .save_options = batch_norm_save,
                                               .load_options = batch_norm1d_load};
static const td_module_ops batch_norm2d_ops = {.name = "BatchNorm2d",
                                               .data_size = sizeof(struct batch_norm),
                                               .forward = batch_norm_forward,
                                               .describe = batch_norm_describe,
                                               .save_options = batch_norm_save,
                                               .load_options = batch_norm2d_load};

static td_module *make_batch_norm(const td_module_ops *ops, const char *call, int64_t features,
                                  const td_batch_norm_options *options)
{
    bool flat = ops == &batch_norm1d_ops;
    struct batch_norm norm = {
        .features = features, .least_dims = flat ? 2 : 4, .most_dims = flat ? 3 : 4};
    if (options)
        norm.options = *options;
    norm.options.eps = td__option(norm.options.eps, 1e-5);
    norm.options.momentum = td__option(norm.options.momentum, 0.1);
    if (td__check_size(call, "the number of features", features, 0) ||
        check_eps(call, norm.options.eps))
        return NULL;
    td_module *self = td_module_create(ops);
    if (!self)
        return NULL;
    *(struct batch_norm *)self->data = norm;
    if (!norm.options.no_affine) {
        td__module_filled_parameter(self, "weight", &features, 1, 1);
        td__module_filled_parameter(self, "bias", &features, 1, 0);
    }
    if (!norm.options.no_running_stats) {
        td__module_new_buffer(self, "running_mean", &features, 1, TD_F32, 0);
        td__module_new_buffer(self, "running_var", &features, 1, TD_F32, 1);
        td__module_new_buffer(self, "num_batches_tracked", NULL, 0, TD_I64, 0);
    }
    return td_module_finish(self);
}

td_module *td_batch_norm1d_with(int64_t features, const td_batch_norm_options *options)
{
    if (options && td__check_reserved(__func__, options->reserved))
        return NULL;
    return make_batch_norm(&batch_norm1d_ops, "td_batch_norm1d", features, options);
}

td_module *td_batch_norm1d(int64_t features)
{
    return td_batch_norm1d_with(features, NULL);
}

td_module *td_batch_norm2d_with(int64_t features, const td_batch_norm_options *options)
{
    if (options && td__check_reserved(__func__, options->reserved))
        return NULL;
    return make_batch_norm(&batch_norm2d_ops, "td_batch_norm2d", features, options);
}

td_module *td_batch_norm2d(int64_t features)
{
    return td_batch_norm2d_with(features, NULL);
}

bool td__is_batch_norm(const td_module *module)
{
    return (module->ops == &batch_norm1d_ops || module->ops == &batch_norm2d_ops) &&
           !module->failure;
}

td_tensor *td_forward_add_relu(td_module *norm, td_tensor *x, td_tensor *residual)
{
    double momentum = 0;
    if (!norm || !x || !td__is_batch_norm(norm) || td__module_is_hooked(norm)) {
        td_tensor *y = td_forward(norm, x);
        return td_f_relu(residual ? td_add(y, residual) : y);
    }
    if (check_batch(norm, x) || count_batch(norm, &momentum))
        return NULL;
    const struct batch_norm *of = norm->data;
    return td_batch_norm_relu(x, residual, td_buffer(norm, RUNNING_MEAN),
                              td_buffer(norm, RUNNING_VAR), td_param(norm, 0), td_param(norm, 1),
                              uses_batch(norm), momentum, of->options.eps);
}

const td_batch_norm_options *td__batch_norm_options_of(const td_module *module, int64_t *features)
{
    if (!td__is_batch_norm(module))
        return NULL;
    const struct batch_norm *norm = module->data;
    *features = norm->features;
    return &norm->options;
}

/* ---- Layer norm --------------------------------------------------------------------------------- */

struct layer_norm {
    int64_t shape[TD_MAX_DIMS];
    int ndim;
    td_layer_norm_options options;
};

static td_tensor *layer_norm_forward(td_module *self, td_tensor *const *inputs, int count)
{
    const struct layer_norm *norm = self->data;
    return td__takes(self, count, 1)
               ? td_f_layer_norm(inputs[0], norm->shape, norm->ndim, td_param(self, 0),
                                 td_param(self, 1), norm->options.eps)
               : NULL;
}

static int layer_norm_describe(const td_module *self, char *text, size_t size)
{
    const struct layer_norm *norm = self->data;
    char shape[160];
    snprintf(shape, sizeof shape, "%s", td__shape_text(norm->shape, norm->ndim));
    shape[strlen(shape) - 1] = 0; /* as a tuple: (3, 4), and (4,) for one of one size */
    return snprintf(text, size, "(%s%s), eps=%g, elementwise_affine=%s", shape + 1,
                    norm->ndim == 1 ? "," : "", norm->options.eps, truth(!norm->options.no_affine));
}

#define SIZE(d)                                                                                    \
    {                                                                                              \
        "size" #d, TD__OPTION_INT64, offsetof(struct layer_norm, shape[d]), 0, 0x1p53              \
    }

static const struct td__kind_option layer_norm_options[] = {
    {"ndim", TD__OPTION_INT, offsetof(struct layer_norm, ndim), 1, TD_MAX_DIMS},
    SIZE(0),
    SIZE(1),
    SIZE(2),
    SIZE(3),
    SIZE(4),
    SIZE(5),
    SIZE(6),
    SIZE(7),
    {"eps", TD__OPTION_DOUBLE, offsetof(struct layer_norm, options.eps), 0, DBL_MAX},
    {"no_affine", TD__OPTION_BOOL, offsetof(struct layer_norm, options.no_affine), 0, 0},
};
enum { LAYER_NORM_OPTIONS = sizeof layer_norm_options / sizeof layer_norm_options[0] };
_Static_assert(LAYER_NORM_OPTIONS == TD_MAX_DIMS + 3, "a size for each dimension");

static td_status layer_norm_save(const td_module *self, td_state *options)
{
    return td__options_save(self, options, layer_norm_options, LAYER_NORM_OPTIONS);
}

static td_status layer_norm_load(td_module *self, const td_state *options)
{
    const struct layer_norm *norm = self->data;
    TD_TRY(td__options_load(self, options, layer_norm_options, LAYER_NORM_OPTIONS));
    return td__check_parameters(
        self,
        (const struct td__kind_tensor[]){{"weight", norm->shape, norm->ndim, false},
                                         {"bias", norm->shape, norm->ndim, false}},
        norm->options.no_affine ? 0 : 2);
}

static const td_module_ops layer_norm_ops = {.name = "LayerNorm",
                                             .data_size = sizeof(struct layer_norm),
                                             .forward = layer_norm_forward,
                                             .describe = layer_norm_describe,
                                             .save_options = layer_norm_save,
                                             .load_options = layer_norm_load};

const td_module_ops *const td__norm_kinds[] = {&batch_norm1d_ops, &batch_norm2d_ops,
                                               &layer_norm_ops, NULL};

td_module *td_layer_norm_with(const int64_t *shape, int ndim, const td_layer_norm_options *options)
{
    if (options && td__check_reserved(__func__, options->reserved))
        return NULL;
    const char *call = "td_layer_norm";
    struct layer_norm norm = {.ndim = ndim};
    if (options)
        norm.options = *options;
    norm.options.eps = td__option(norm.options.eps, 1e-5);
    if (!shape || ndim < 1 || ndim > TD_MAX_DIMS) {
        td_fail(TD_ERR_INVALID, "%s: got %d sizes; there must be 1 to %d", call, ndim, TD_MAX_DIMS);
        return NULL;
    }
    for (int d = 0; d < ndim; d++) {
        if (td__check_size(call, "a size", shape[d], 0))
            return NULL;
        norm.shape[d] = shape[d];
    }
    if (check_eps(call, norm.options.eps))
        return NULL;
    td_module *self = td_module_create(&layer_norm_ops);
    if (!self)
        return NULL;
    *(struct layer_norm *)self->data = norm;
    if (!norm.options.no_affine) {
        td__module_filled_parameter(self, "weight", shape, ndim, 1);
        td__module_filled_parameter(self, "bias", shape, ndim, 0);
    }
    return td_module_finish(self);
}

td_tensor *td_forward_add(td_module *norm, td_tensor *x, td_tensor *residual, td_tensor **sum)
{
    if (!norm || norm->ops != &layer_norm_ops) {
        td_fail(TD_ERR_INVALID, "td_forward_add: the module is %s; it must be of td_layer_norm()",
                norm ? norm->ops->name : "NULL");
        return NULL;
    }
    const struct layer_norm *options = norm->data;
    return td_add_layer_norm(x, residual, options->shape, options->ndim, td_param(norm, 0),
                             td_param(norm, 1), options->options.eps, sum);
}

td_module *td_layer_norm(int64_t features)
{
    return td_layer_norm_with(&features, 1, NULL);
}
