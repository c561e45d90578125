/* TransformerEncoderLayer and TransformerEncoder.
 *
 *     norm last:   x = norm1(x + attention(x));   x = norm2(x + feed_forward(x))
 *     norm first:  x = x + attention(norm1(x));   x = x + feed_forward(norm2(x))
 *
 * with dropout after the attention, after the activation, and after the feed-forward part. */
#include "nn/module.h"

#include "base/fail.h"
#include "base/option_rules.h"

#include <stddef.h>
#include <stdio.h>

enum { SELF_ATTN, LINEAR1, DROPOUT, LINEAR2, NORM1, NORM2, DROPOUT1, DROPOUT2 };

struct block {
    bool gelu, norm_first;
};

static td_tensor *attend(td_module *self, td_tensor *x, td_tensor *mask)
{
    td_tensor *inputs[] = {x, mask};
    td_tensor *y = td_forward_with(td_child(self, SELF_ATTN), inputs, mask ? 2 : 1);
    return td_forward(td_child(self, DROPOUT1), y);
}

/* In-place if x is not shared: it is the largest activation of the block. */
static td_tensor *relu_of(td_tensor *x)
{
    bool is_ours = x && atomic_load(&x->owners) == 1 && atomic_load(&x->storage->owners) == 1;
    if (!is_ours)
        return td_f_relu(x);
    return td_f_relu_(x) ? NULL : x;
}

static td_tensor *feed_forward(td_module *self, td_tensor *x)
{
    const struct block *block = self->data;
    td_tensor *y = td_forward(td_child(self, LINEAR1), x);
    y = td_forward(td_child(self, DROPOUT), block->gelu ? td_f_gelu(y) : relu_of(y));
    return td_forward(td_child(self, DROPOUT2), td_forward(td_child(self, LINEAR2), y));
}

static td_tensor *run_block(td_module *self, td_tensor *x, td_tensor *mask)
{
    const struct block *block = self->data;
    td_module *norm1 = td_child(self, NORM1), *norm2 = td_child(self, NORM2);
    if (block->norm_first) {
        x = td_add(x, attend(self, td_forward(norm1, x), mask));
        return td_add(x, feed_forward(self, td_forward(norm2, x)));
    }
    x = td_forward(norm1, td_add(x, attend(self, x, mask)));
    return td_forward(norm2, td_add(x, feed_forward(self, x)));
}

static td_status block_forward(td_module *self, const td_tensor_list *inputs,
                               td_tensor_list *results)
{
    td_tensor *ordered[2] = {0};
    if (!td__mask_last(self, inputs, ordered, 2))
        return TD_ERR_INVALID;
    return td_tensor_list_add(results, NULL, run_block(self, ordered[0], ordered[1]));
}

static const struct td__kind_option block_options[] = {
    {"gelu", TD__OPTION_BOOL, offsetof(struct block, gelu), 0, 0},
    {"norm_first", TD__OPTION_BOOL, offsetof(struct block, norm_first), 0, 0},
};
enum { BLOCK_OPTIONS = sizeof block_options / sizeof block_options[0] };

static td_status block_save(const td_module *self, td_state *options)
{
    return td__options_save(self, options, block_options, BLOCK_OPTIONS);
}

static td_status block_load(td_module *self, const td_state *options)
{
    static const char *const names[] = {"self_attn", "linear1", "dropout",  "linear2",
                                        "norm1",     "norm2",   "dropout1", "dropout2"};
    TD_TRY(td__options_load(self, options, block_options, BLOCK_OPTIONS));
    return td__check_children(self, names, (int)(sizeof names / sizeof names[0]), 0);
}

static const td_module_ops block_ops = {.name = "TransformerEncoderLayer",
                                        .data_size = sizeof(struct block),
                                        .forward_list = block_forward,
                                        .save_options = block_save,
                                        .load_options = block_load};

td_module *td_transformer_encoder_layer_with(int64_t width, int64_t heads,
                                             const td_transformer_options *options)
{
    if (options && td__check_reserved(__func__, options->reserved))
        return NULL;
    td_transformer_options given = options ? *options : (td_transformer_options){0};
    double p = td__option(given.dropout, 0.1);
    int64_t inner = given.feedforward ? given.feedforward : 2048;
    td_layer_norm_options norm = {.eps = given.eps};
    td_module *self = td_module_create(&block_ops);
    if (!self)
        return NULL;
    *(struct block *)self->data = (struct block){.gelu = given.gelu,
                                                 .norm_first = given.norm_first};
    td_module_add_child(self, "self_attn",
                        td_multihead_attention_with(
                            width, heads,
                            &(td_multihead_attention_options){.dropout = p,
                                                              .causal = given.causal,
                                                              .batch_first = given.batch_first}));
    if (!self->failure) { /* the sizes are right, then */
        td_module_add_child(self, "linear1", td_linear(width, inner));
        td_module_add_child(self, "dropout", td_dropout(p));
        td_module_add_child(self, "linear2", td_linear(inner, width));
        td_module_add_child(self, "norm1", td_layer_norm_with(&width, 1, &norm));
        td_module_add_child(self, "norm2", td_layer_norm_with(&width, 1, &norm));
        td_module_add_child(self, "dropout1", td_dropout(p));
        td_module_add_child(self, "dropout2", td_dropout(p));
    }
    return td_module_finish(self);
}

td_module *td_transformer_encoder_layer(int64_t width, int64_t heads)
{
    return td_transformer_encoder_layer_with(width, heads, NULL);
}

/* ---- Several ------------------------------------------------------------------------------------ */

enum { LAYERS, NORM };

static td_status encoder_forward(td_module *self, const td_tensor_list *inputs,
                                 td_tensor_list *results)
{
    td_tensor *x[2];
    int count = td__mask_last(self, inputs, x, 2);
    if (!count)
        return TD_ERR_INVALID;
    td_module *layers = td_child(self, LAYERS), *norm = td_child(self, NORM);
    for (int i = 0; i < td_child_count(layers) && x[0]; i++)
        x[0] = td_forward_with(td_child(layers, i), x, count);
    return td_tensor_list_add(results, NULL, norm ? td_forward(norm, x[0]) : x[0]);
}

static td_status encoder_load(td_module *self, const td_state *options)
{
    TD_TRY(td__options_load(self, options, NULL, 0));
    return td__check_children(self, (const char *const[]){"layers", "norm"}, 2, 1);
}

static const td_module_ops encoder_ops = {
    .name = "TransformerEncoder", .forward_list = encoder_forward, .load_options = encoder_load};

const td_module_ops *const td__transformer_kinds[] = {&block_ops, &encoder_ops, NULL};

td_module *td_transformer_encoder(td_module *layer, int count, td_module *norm)
{
    td_module *layers = NULL, *self = NULL;
    if (!layer || td__check_size("td_transformer_encoder", "the number of layers", count, 1))
        goto destroy;
    layers = td_module_list_of(NULL, 0);
    for (int i = 1; i < count; i++) {
        char name[16];
        snprintf(name, sizeof name, "%d", i - 1);
        td_module_add_child(layers, name, td_module_clone(layer));
    }
    char last[16];
    snprintf(last, sizeof last, "%d", count - 1);
    td_module_add_child(layers, last, layer);
    layer = NULL;
    layers = td_module_finish(layers);
    self = layers ? td_module_create(&encoder_ops) : NULL;
    if (!self)
        goto destroy;
    td_module_add_child(self, "layers", layers);
    if (norm)
        td_module_add_child(self, "norm", norm);
    return td_module_finish(self);

destroy:
    td__modules_destroy((td_module *[]){layer, layers, norm}, 3);
    return NULL;
}
