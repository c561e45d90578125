/* Linear layers and embeddings. */
#include "nn/module.h"

#include "base/fail.h"
#include "base/option_rules.h"

#include <math.h>
#include <stddef.h>
#include <stdio.h>

td_status td__init_affine(td_tensor *weight, td_tensor *bias)
{
    TD_TRY(td_init_kaiming_uniform(weight, &(td_kaiming_options){.a = sqrt(5)}));
    if (!bias)
        return TD_OK;
    double fan_in = 1;
    for (int d = 1; d < weight->layout.ndim; d++)
        fan_in *= (double)weight->layout.shape[d];
    double limit = fan_in > 0 ? 1 / sqrt(fan_in) : 0;
    return td_init_uniform(bias, -limit, limit);
}

/* ---- Linear ------------------------------------------------------------------------------------- */

static td_tensor *linear_forward(td_module *self, td_tensor *const *inputs, int count)
{
    return td__takes(self, count, 1) ? td_f_linear(inputs[0], td_param(self, 0), td_param(self, 1))
                                     : NULL;
}

static int linear_describe(const td_module *self, char *text, size_t size)
{
    const td_tensor *weight = td_param(self, 0);
    return snprintf(text, size, "in_features=%lld, out_features=%lld, bias=%s",
                    (long long)td_tensor_size(weight, 1), (long long)td_tensor_size(weight, 0),
                    td_param(self, 1) ? "True" : "False");
}

/* There are no options besides the shape of the weight. */
static td_status linear_load(td_module *self, const td_state *options)
{
    const td_tensor *weight = td_param(self, 0);
    int64_t shape[2] = {0};
    for (int d = 0; d < 2 && weight && weight->layout.ndim == 2; d++)
        shape[d] = weight->layout.shape[d];
    TD_TRY(td__options_load(self, options, NULL, 0));
    return td__check_parameters(
        self,
        (const struct td__kind_tensor[]){{"weight", shape, 2, false}, {"bias", shape, 1, false}},
        self->parameters.count == 1 ? 1 : 2);
}

static const td_module_ops linear_ops = {.name = "Linear",
                                         .forward = linear_forward,
                                         .describe = linear_describe,
                                         .load_options = linear_load};

bool td__is_linear(const td_module *module)
{
    return module->ops == &linear_ops && module->parameters.count == 2 && !module->failure;
}

td_module *td_linear_with(int64_t in_features, int64_t out_features,
                          const td_linear_options *options)
{
    if (options && td__check_reserved(__func__, options->reserved))
        return NULL;
    const char *call = "td_linear";
    bool bias = !options || !options->no_bias;
    if (td__check_size(call, "in_features", in_features, 0) ||
        td__check_size(call, "out_features", out_features, 0))
        return NULL;
    td_module *self = td_module_create(&linear_ops);
    int64_t shape[] = {out_features, in_features};
    td_module_new_parameter(self, "weight", shape, 2, TD_F32);
    if (bias)
        td_module_new_parameter(self, "bias", shape, 1, TD_F32);
    if (self && !self->failure)
        td__module_set_failure(self, td__init_affine(td_param(self, 0), td_param(self, 1)));
    return td_module_finish(self);
}

td_module *td_linear(int64_t in_features, int64_t out_features)
{
    return td_linear_with(in_features, out_features, NULL);
}

/* ---- Embedding ---------------------------------------------------------------------------------- */

struct embedding {
    int64_t padding_idx; /* -1: none */
};

static td_tensor *embedding_forward(td_module *self, td_tensor *const *inputs, int count)
{
    const struct embedding *embedding = self->data;
    return td__takes(self, count, 1)
               ? td_f_embedding(inputs[0], td_param(self, 0), embedding->padding_idx)
               : NULL;
}

static int embedding_describe(const td_module *self, char *text, size_t size)
{
    const struct embedding *embedding = self->data;
    const td_tensor *weight = td_param(self, 0);
    long long count = td_tensor_size(weight, 0), width = td_tensor_size(weight, 1);
    if (embedding->padding_idx < 0)
        return snprintf(text, size, "%lld, %lld", count, width);
    return snprintf(text, size, "%lld, %lld, padding_idx=%lld", count, width,
                    (long long)embedding->padding_idx);
}

static const struct td__kind_option embedding_options[] = {
    {"padding_idx", TD__OPTION_INT64, offsetof(struct embedding, padding_idx), -1, 0x1p53}};
enum { EMBEDDING_OPTIONS = sizeof embedding_options / sizeof embedding_options[0] };

static td_status embedding_save(const td_module *self, td_state *options)
{
    return td__options_save(self, options, embedding_options, EMBEDDING_OPTIONS);
}

static td_status embedding_load(td_module *self, const td_state *options)
{
    const struct embedding *embedding = self->data;
    const td_tensor *weight = td_param(self, 0);
    int64_t shape[2] = {0};
    for (int d = 0; d < 2 && weight && weight->layout.ndim == 2; d++)
        shape[d] = weight->layout.shape[d];
    TD_TRY(td__options_load(self, options, embedding_options, EMBEDDING_OPTIONS));
    TD_TRY(td__check_parameters(self, &(struct td__kind_tensor){"weight", shape, 2, false}, 1));
    if (embedding->padding_idx < shape[0])
        return TD_OK;
    return td_fail(TD_ERR_INVALID, "padding_idx of a received %s is %lld, and there are %lld rows",
                   self->ops->name, (long long)embedding->padding_idx, (long long)shape[0]);
}

static const td_module_ops embedding_ops = {.name = "Embedding",
                                            .data_size = sizeof(struct embedding),
                                            .forward = embedding_forward,
                                            .describe = embedding_describe,
                                            .save_options = embedding_save,
                                            .load_options = embedding_load};

const td_module_ops *const td__linear_kinds[] = {&linear_ops, &embedding_ops, NULL};

/* Normal numbers, and zeros in the row of the padding. */
static td_status init_embedding(td_tensor *weight, int64_t padding_idx)
{
    TD_TRY(td_init_normal(weight, 0, 1));
    if (padding_idx < 0)
        return TD_OK;
    td_tensor *row = td__select_index(weight, 0, padding_idx);
    td_status status = row ? td_init_constant(row, 0) : TD_ERR_NOMEM;
    td_tensor_release(row);
    return status;
}

td_module *td_embedding_with(int64_t count, int64_t width, const td_embedding_options *options)
{
    if (options && td__check_reserved(__func__, options->reserved))
        return NULL;
    const char *call = "td_embedding";
    int64_t padding = options && options->padding ? options->padding_idx : -1;
    if (td__check_size(call, "the number of rows", count, 0) ||
        td__check_size(call, "their width", width, 0))
        return NULL;
    if (options && options->padding && padding < 0)
        padding += count;
    if (options && options->padding && (padding < 0 || padding >= count)) {
        td_fail(TD_ERR_INVALID, "%s: padding_idx is %lld, and there are %lld rows", call,
                (long long)options->padding_idx, (long long)count);
        return NULL;
    }
    td_module *self = td_module_create(&embedding_ops);
    td_tensor *weight = td_module_new_parameter(self, "weight", (const int64_t[]){count, width}, 2,
                                                TD_F32);
    if (weight) {
        *(struct embedding *)self->data = (struct embedding){.padding_idx = padding};
        td__module_set_failure(self, init_embedding(weight, padding));
    }
    return td_module_finish(self);
}

td_module *td_embedding(int64_t count, int64_t width)
{
    return td_embedding_with(count, width, NULL);
}
