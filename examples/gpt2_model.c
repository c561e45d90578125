/* GPT-2: a transformer decoder, as a module of modules. Names of parameters are Hugging Face's. */
#include "gpt2.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct {
    const char *name, *other;
    struct gpt2_config config;
} sizes[] = {
    {"124M", "gpt2", {12, 12, 768, 1024, 50257, 0}},
    {"350M", "gpt2-medium", {24, 16, 1024, 1024, 50257, 0}},
    {"774M", "gpt2-large", {36, 20, 1280, 1024, 50257, 0}},
    {"1.5B", "gpt2-xl", {48, 25, 1600, 1024, 50257, 0}},
};

const struct gpt2_config *gpt2_size(const char *name)
{
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        if (!strcmp(name, sizes[i].name) || !strcmp(name, sizes[i].other))
            return &sizes[i].config;
    return NULL;
}

/* A linear layer with normal weights, and biases of 0. */
static td_module *linear(int64_t inputs, int64_t outputs, double std)
{
    td_module *self = td_linear(inputs, outputs);
    if (self && !td_init_normal(td_param(self, 0), 0, std) &&
        !td_init_constant(td_param(self, 1), 0))
        return self;
    td_module_destroy(self);
    return NULL;
}

static td_module *embedding(int64_t count, int64_t width)
{
    td_module *self = td_embedding(count, width);
    if (self && !td_init_normal(td_param(self, 0), 0, 0.02))
        return self;
    td_module_destroy(self);
    return NULL;
}

/* The layers that add to the residual stream begin smaller, so that its variance does not grow with their number. */
static double residual_std(const struct gpt2_config *config)
{
    return 0.02 / sqrt(2 * (double)config->layers);
}

/* ---- Attention: x [N, L, E] -> [N, L, E] ------------------------------------------------------------ */

enum { C_ATTN, ATTN_C_PROJ, RESID_DROPOUT };

struct attention {
    int64_t heads;
    double dropout;
};

static td_tensor *attention_forward(td_module *self, td_tensor *const *inputs, int count)
{
    (void)count;
    const struct attention *attention = td_module_data(self);
    td_attention_options options = {
        .causal = true, .dropout = td_module_is_training(self) ? attention->dropout : 0};
    td_tensor *qkv[3]; /* each [N, heads, L, E / heads] */
    if (td_split_heads(td_forward(td_child(self, C_ATTN), inputs[0]), 3, attention->heads, qkv))
        return NULL;
    td_tensor *y = td_scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], &options);
    y = td_f_flatten(td_transpose(y, 1, 2), 2, 3);
    return td_forward(td_child(self, RESID_DROPOUT), td_forward(td_child(self, ATTN_C_PROJ), y));
}

static const td_module_ops attention_ops = {
    .name = "Attention", .data_size = sizeof(struct attention), .forward = attention_forward};

static td_module *attention_create(const struct gpt2_config *config)
{
    td_module *self = td_module_create(&attention_ops);
    td_module_add_child(self, "c_attn", linear(config->width, 3 * config->width, 0.02));
    td_module_add_child(self, "c_proj", linear(config->width, config->width, residual_std(config)));
    td_module_add_child(self, "resid_dropout", td_dropout(config->dropout));
    if (self)
        *(struct attention *)td_module_data(self) = (struct attention){.heads = config->heads,
                                                                       .dropout = config->dropout};
    return td_module_finish(self);
}

/* ---- MLP: x [N, L, E] -> [N, L, 4 E] -> [N, L, E] ----------------------------------------------------- */

/* A Sequential, which runs the first three as one where the device can. */
static td_module *mlp_create(const struct gpt2_config *config)
{
    td_module *self = td_sequential_of(NULL, 0);
    td_module_add_child(self, "c_fc", linear(config->width, 4 * config->width, 0.02));
    td_module_add_child(self, "act", td_gelu_tanh());
    td_module_add_child(self, "c_proj",
                        linear(4 * config->width, config->width, residual_std(config)));
    td_module_add_child(self, "dropout", td_dropout(config->dropout));
    return td_module_finish(self);
}

/* ---- A block: both, each behind a norm, added to the residual stream. Under autocast norms give what the linear layers
 * behind them want -------------------------------------------------------------------------------------------- */

enum { LN_1, ATTN, LN_2, MLP };

static td_tensor *block_forward(td_module *self, td_tensor *const *inputs, int count)
{
    (void)count;
    td_tensor *x = inputs[0];
    td_tensor *normed = td_forward_add(td_child(self, LN_1), x, NULL, &x);
    td_tensor *attention = td_forward(td_child(self, ATTN), normed);
    normed = attention ? td_forward_add(td_child(self, LN_2), x, attention, &x) : NULL;
    return td_add(x, td_forward(td_child(self, MLP), normed));
}

static const td_module_ops block_ops = {.name = "Block", .forward = block_forward};

static td_module *block_create(const struct gpt2_config *config)
{
    td_module *self = td_module_create(&block_ops);
    td_module_add_child(self, "ln_1", td_layer_norm(config->width));
    td_module_add_child(self, "attn", attention_create(config));
    td_module_add_child(self, "ln_2", td_layer_norm(config->width));
    td_module_add_child(self, "mlp", mlp_create(config));
    return td_module_finish(self);
}

/* ---- GPT-2: tokens [N, L] -> logits [N, L, vocabulary], or the loss ------------------------------------- */

enum { WTE, WPE, DROP, H, LN_F };

static td_tensor *gpt2_forward(td_module *self, td_tensor *const *inputs, int count)
{
    td_tensor *words = td_param(td_child(self, WTE), 0);
    td_tensor *positions = td_param(td_child(self, WPE), 0);
    int64_t length = td_tensor_size(inputs[0], 1);
    if (length > td_tensor_size(positions, 0)) {
        td_fail(TD_ERR_INVALID, "gpt2: a sequence of %lld tokens; the context has %lld",
                (long long)length, (long long)td_tensor_size(positions, 0));
        return NULL;
    }
    td_tensor *x = td_add(td_forward(td_child(self, WTE), inputs[0]),
                          td_narrow(positions, 0, 0, length));
    x = td_forward(td_child(self, H), td_forward(td_child(self, DROP), x));
    x = td_forward_add(td_child(self, LN_F), x, NULL, NULL);
    td_tensor *logits = td_f_linear(x, words, NULL); /* the head shares the weights of wte */
    if (count == 1)
        return logits;
    return td_cross_entropy(td_f_flatten(logits, 0, 1), td_f_flatten(inputs[1], 0, 1));
}

static const td_module_ops gpt2_ops = {.name = "GPT2", .forward = gpt2_forward};

static td_module *blocks_create(const struct gpt2_config *config)
{
    td_module *blocks = td_sequential_of(NULL, 0);
    for (int64_t i = 0; i < config->layers; i++) {
        char name[24];
        snprintf(name, sizeof name, "%lld", (long long)i);
        td_module_add_child(blocks, name, block_create(config));
    }
    return td_module_finish(blocks);
}

td_module *gpt2_create(const struct gpt2_config *config)
{
    if (config->heads < 1 || config->width % config->heads) {
        td_fail(TD_ERR_INVALID, "gpt2: the width, %lld, must be a multiple of the heads, %lld",
                (long long)config->width, (long long)config->heads);
        return NULL;
    }
    td_module *self = td_module_create(&gpt2_ops);
    td_module_add_child(self, "wte", embedding(config->vocabulary, config->width));
    td_module_add_child(self, "wpe", embedding(config->context, config->width));
    td_module_add_child(self, "drop", td_dropout(config->dropout));
    td_module_add_child(self, "h", blocks_create(config));
    td_module_add_child(self, "ln_f", td_layer_norm(config->width));
    return td_module_finish(self);
}

/* Two for each weight and token in the forward pass, four in the backward pass; and the products with the keys and
 * values of all positions, counted without the mask, as is usual. The table of positions multiplies nothing. */
double gpt2_flops_per_token(td_module *gpt2, const struct gpt2_config *config)
{
    double weights = (double)(td_module_parameter_count(gpt2) - config->context * config->width);
    double attention = (double)(config->layers * config->width * config->context);
    return 6 * weights + 12 * attention;
}

td_optimizer *gpt2_adamw(td_module *gpt2, double lr, double weight_decay)
{
    td_state *all = td_module_parameters(gpt2);
    int count = td_state_count(all), matrices = 0, vectors = 0;
    td_tensor **lists = calloc(2 * (size_t)count + 1, sizeof(td_tensor *));
    for (int i = 0; lists && i < count; i++) {
        td_tensor *parameter = td_state_tensor(all, i);
        const td_shard *shard = td_tensor_shard(parameter);
        if ((shard ? shard->ndim : td_tensor_ndim(parameter)) > 1)
            lists[matrices++] = parameter;
        else
            lists[count + vectors++] = parameter;
    }
    td_adam_options options = {
        .lr = lr, .beta2 = 0.95, .weight_decay = weight_decay > 0 ? weight_decay : TD_ZERO};
    td_optimizer *adamw = lists ? td_adamw_of(lists, matrices, &options) : NULL;
    if (adamw && td_optimizer_add_group(adamw, lists + count, vectors,
                                        &(td_parameter_group){.weight_decay = TD_ZERO})) {
        td_optimizer_destroy(adamw);
        adamw = NULL;
    }
    free(lists);
    td_state_destroy(all);
    return adamw;
}

/* ---- Files of Hugging Face's ------------------------------------------------------------------------------
 *
 * Their linear layers ("Conv1D") have weights [in, out], ours [out, in]. Some files have "transformer." before each
 * name, the constant masks of the attention, and the head beside wte.weight, which is the same. */

static bool ends_with(const char *text, const char *end)
{
    size_t length = strlen(text), size = strlen(end);
    return length >= size && !strcmp(text + length - size, end);
}

static bool is_transposed(const char *name)
{
    return ends_with(name, ".c_attn.weight") || ends_with(name, ".c_proj.weight") ||
           ends_with(name, ".c_fc.weight");
}

/* Adds all tensors of `from`, converted from one layout to the other. */
static td_status convert(td_state *to, const td_state *from)
{
    for (int i = 0; i < td_state_count(from); i++) {
        const char *prefix = "transformer.", *name = td_state_name(from, i);
        if (!strncmp(name, prefix, strlen(prefix)))
            name += strlen(prefix);
        if (ends_with(name, ".attn.bias") || ends_with(name, ".attn.masked_bias") ||
            !strcmp(name, "lm_head.weight"))
            continue;
        TD_SCOPE;
        td_tensor *tensor = td_state_tensor(from, i);
        td_status status = td_state_add(to, name,
                                        is_transposed(name) ? td_transpose(tensor, 0, 1) : tensor);
        if (status)
            return status;
    }
    return TD_OK;
}

td_state *gpt2_read_weights(const char *path)
{
    td_state *file = td_load_safetensors(path, &(td_map_location){.device = td_device_get("cpu")});
    td_state *weights = file ? td_state_create() : NULL;
    if (weights && convert(weights, file)) {
        td_state_destroy(weights);
        weights = NULL;
    }
    td_state_destroy(file);
    return weights;
}

td_status gpt2_save_weights(const char *path, td_module *gpt2)
{
    td_state *state = td_module_state(gpt2), *file = td_state_create();
    td_status status = state && file ? convert(file, state) : TD_ERR_NOMEM;
    if (!status)
        status = td_save_safetensors(path, file, &(td_file_note){"format", "pt"}, 1);
    td_state_destroy(file);
    td_state_destroy(state);
    return status;
}

td_status gpt2_config_of(const td_state *weights, struct gpt2_config *config)
{
    td_tensor *wte = td_state_get(weights, "wte.weight"),
              *wpe = td_state_get(weights, "wpe.weight");
    int64_t layers = 0;
    for (char name[48];; layers++) {
        snprintf(name, sizeof name, "h.%lld.ln_1.weight", (long long)layers);
        if (!td_state_get(weights, name))
            break;
    }
    if (td_tensor_ndim(wte) != 2 || td_tensor_ndim(wpe) != 2 || !layers)
        return td_fail(TD_ERR_INVALID,
                       "there is no GPT-2 in the file: wte.weight and wpe.weight of "
                       "two dimensions, and h.0.ln_1.weight were expected");
    int64_t width = td_tensor_size(wte, 1);
    *config = (struct gpt2_config){.layers = layers,
                                   .heads = width > 64 ? width / 64 : 1,
                                   .width = width,
                                   .context = td_tensor_size(wpe, 0),
                                   .vocabulary = td_tensor_size(wte, 0)};
    return TD_OK;
}
