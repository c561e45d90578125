/* Multi-head attention.
 *
 *     x [N, L, E] -> linear -> [N, L, 3 E] -> q, k, v [N, H, L, E / H] -> attention -> [N, H, L, E / H]
 *       -> [N, L, E] -> linear
 *
 * td_split_heads() gives views. The attention takes these as they are and gives its result the same
 * order of strides, so merging the heads is a view, too. */
#include "nn/module.h"

#include "base/fail.h"
#include "base/option_rules.h"
#include "tensor/tensor_internal.h"

#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

/* ---- Inputs ------------------------------------------------------------------------------------- */

/* [N, heads, L, width] to [N, L, heads * width]. */
static td_tensor *merge_heads(td_tensor *x)
{
    if (!x)
        return NULL;
    const int64_t *shape = x->layout.shape;
    int64_t merged[] = {shape[0], shape[2], shape[1] * shape[3]};
    return td_reshape(td_transpose(x, 1, 2), merged, 3);
}

int td__mask_last(const td_module *module, const td_tensor_list *inputs, td_tensor **ordered,
                  int most)
{
    td_tensor *mask = td_tensor_list_get(inputs, "mask");
    if (!td__takes(module, inputs->count, most))
        return 0;
    int count = 0;
    for (int i = 0; i < inputs->count; i++)
        if (!mask || !inputs->names[i] || strcmp(inputs->names[i], "mask") != 0)
            ordered[count++] = inputs->at[i];
    if (mask && count != 1 && count != 3) {
        td_fail(TD_ERR_INVALID,
                "td_forward: a %s got a mask and %d inputs; it takes x, or query, key and value",
                module->ops->name, count);
        return 0;
    }
    if (mask)
        ordered[count++] = mask;
    return count;
}

/* ---- The module --------------------------------------------------------------------------------- */

enum { IN_WEIGHT, IN_BIAS };
enum { OUT_PROJ };

struct multihead {
    int64_t width, heads;
    td_multihead_attention_options options;
};

/* The projection with block `index` of the three of in_proj_weight and in_proj_bias. */
static td_tensor *project(td_module *self, td_tensor *x, int64_t index)
{
    const struct multihead *multihead = self->data;
    int64_t width = multihead->width;
    td_tensor *weight = td_narrow(td_param(self, IN_WEIGHT), 0, index * width, width);
    td_tensor *bias = td_param(self, IN_BIAS); /* NULL: without one */
    if (bias)
        bias = td_narrow(bias, 0, index * width, width);
    return weight ? td_f_linear(x, weight, bias) : NULL;
}

/* q, k and v, split into heads. */
static td_status project_all(td_module *self, td_tensor *const *inputs, td_tensor **parts)
{
    const struct multihead *multihead = self->data;
    if (inputs[0] == inputs[1] && inputs[0] == inputs[2])
        return td_split_heads(
            td_f_linear(inputs[0], td_param(self, IN_WEIGHT), td_param(self, IN_BIAS)), 3,
            multihead->heads, parts);
    for (int i = 0; i < 3; i++)
        TD_TRY(td_split_heads(project(self, inputs[i], i), 1, multihead->heads, &parts[i]));
    return TD_OK;
}

/* Each of the inputs as [N, L, E]; NULL if its shape is wrong. */
static td_tensor *batch_first(const td_module *self, td_tensor *x)
{
    const struct multihead *multihead = self->data;
    if ((x->layout.ndim != 2 && x->layout.ndim != 3) ||
        x->layout.shape[x->layout.ndim - 1] != multihead->width) {
        td_fail(TD_ERR_INVALID, "td_forward: attention of width %lld got the shape %s; it takes %s",
                (long long)multihead->width, td__shape_of(x),
                !multihead->options.batch_first ? "[L, N, width] or [L, width]"
                                                : "[N, L, width] or [L, width]");
        return NULL;
    }
    if (x->layout.ndim == 2)
        return td_unsqueeze(x, 0);
    return !multihead->options.batch_first ? td_transpose(x, 0, 1) : x;
}

static td_tensor *attend(td_module *self, td_tensor *const *inputs, int count)
{
    const struct multihead *multihead = self->data;
    bool to_itself = count < 3;
    td_tensor *mask = count == 2 ? inputs[1] : count == 4 ? inputs[3] : NULL;
    td_tensor *given[3], *parts[3] = {0};
    for (int i = 0; i < 3; i++) {
        given[i] = to_itself && i ? given[0] : batch_first(self, inputs[to_itself ? 0 : i]);
        if (!given[i])
            return NULL;
    }
    if (project_all(self, given, parts))
        return NULL;
    td_attention_options options = {.mask = mask,
                                    .causal = multihead->options.causal,
                                    .dropout = self->training ? multihead->options.dropout : 0};
    td_tensor *y = td_forward(
        td_child(self, OUT_PROJ),
        merge_heads(td_scaled_dot_product_attention(parts[0], parts[1], parts[2], &options)));
    if (inputs[0]->layout.ndim == 2)
        return td_squeeze(y, 0);
    return !multihead->options.batch_first ? td_transpose(y, 0, 1) : y;
}

static td_status multihead_forward(td_module *self, const td_tensor_list *inputs,
                                   td_tensor_list *results)
{
    td_tensor *ordered[4];
    int count = td__mask_last(self, inputs, ordered, 4);
    return count ? td_tensor_list_add(results, NULL, attend(self, ordered, count)) : TD_ERR_INVALID;
}

static const struct td__kind_option multihead_options[] = {
    {"width", TD__OPTION_INT64, offsetof(struct multihead, width), 1, 0x1p53},
    {"heads", TD__OPTION_INT64, offsetof(struct multihead, heads), 1, 0x1p53},
    {"dropout", TD__OPTION_DOUBLE, offsetof(struct multihead, options.dropout), 0, 1},
    {"no_bias", TD__OPTION_BOOL, offsetof(struct multihead, options.no_bias), 0, 0},
    {"causal", TD__OPTION_BOOL, offsetof(struct multihead, options.causal), 0, 0},
    {"batch_first", TD__OPTION_BOOL, offsetof(struct multihead, options.batch_first), 0, 0},
};
enum { MULTIHEAD_OPTIONS = sizeof multihead_options / sizeof multihead_options[0] };

static td_status multihead_save(const td_module *self, td_state *options)
{
    return td__options_save(self, options, multihead_options, MULTIHEAD_OPTIONS);
}

static td_status check_heads(const char *call, const struct multihead *multihead)
{
    if (multihead->width % multihead->heads == 0 && multihead->width <= INT64_MAX / 3)
        return TD_OK;
    return td_fail(TD_ERR_INVALID,
                   "%s: the width, %lld, must be a multiple of the number of heads, %lld", call,
                   (long long)multihead->width, (long long)multihead->heads);
}

static td_status multihead_load(td_module *self, const td_state *options)
{
    const struct multihead *multihead = self->data;
    TD_TRY(td__options_load(self, options, multihead_options, MULTIHEAD_OPTIONS));
    TD_TRY(check_heads(self->ops->name, multihead));
    int64_t shape[] = {3 * multihead->width, multihead->width};
    TD_TRY(td__check_parameters(
        self,
        (const struct td__kind_tensor[]){[IN_WEIGHT] = {"in_proj_weight", shape, 2, false},
                                         [IN_BIAS] = {"in_proj_bias", shape, 1, false}},
        multihead->options.no_bias ? 1 : 2));
    return td__check_children(self, (const char *const[]){[OUT_PROJ] = "out_proj"}, 1, 0);
}

static const td_module_ops multihead_ops = {.name = "MultiheadAttention",
                                            .data_size = sizeof(struct multihead),
                                            .forward_list = multihead_forward,
                                            .save_options = multihead_save,
                                            .load_options = multihead_load};

const td_module_ops *const td__attention_kinds[] = {&multihead_ops, NULL};

/* In PyTorch's order: out_proj draws its numbers first, and its bias is then set to 0. */
static td_status init_multihead(td_module *self)
{
    TD_TRY(td_init_xavier_uniform(td_param(self, IN_WEIGHT), 1));
    if (!td_param(self, IN_BIAS))
        return TD_OK;
    TD_TRY(td_init_constant(td_param(self, IN_BIAS), 0));
    return td_init_constant(td_param(td_child(self, OUT_PROJ), 1), 0);
}

td_module *td_multihead_attention_with(int64_t width, int64_t heads,
                                       const td_multihead_attention_options *options)
{
    if (options && td__check_reserved(__func__, options->reserved))
        return NULL;
    const char *call = "td_multihead_attention";
    struct multihead multihead = {.width = width, .heads = heads};
    if (options)
        multihead.options = *options;
    if (td__check_size(call, "the width", width, 1) || td__check_size(call, "heads", heads, 1) ||
        td__check_probability(call, multihead.options.dropout))
        return NULL;
    if (check_heads(call, &multihead))
        return NULL;
    td_module *self = td_module_create(&multihead_ops);
    int64_t shape[] = {3 * width, width};
    bool bias = !multihead.options.no_bias;
    td_module_new_parameter(self, "in_proj_weight", shape, 2, TD_F32);
    if (bias)
        td_module_new_parameter(self, "in_proj_bias", shape, 1, TD_F32);
    td_module_add_child(self, "out_proj",
                        td_linear_with(width, width, &(td_linear_options){.no_bias = !bias}));
    if (self && !self->failure) {
        *(struct multihead *)self->data = multihead;
        td__module_set_failure(self, init_multihead(self));
    }
    return td_module_finish(self);
}

td_module *td_multihead_attention(int64_t width, int64_t heads)
{
    return td_multihead_attention_with(width, heads, NULL);
}
