/* See module_samples.h. */
#include "module_samples.h"

#include "runner.h"

#include <tandem/tandem.h>

#include <stddef.h>

/* ---- A net of one's own ---------------------------------------------------------------------- */

enum { CONV1, CONV2, DROP, FC1, FC2 };

struct sample_net {
    int64_t flat;
};

static td_tensor *net_forward(td_module *net, td_tensor *const *inputs, int count)
{
    const struct sample_net *data = td_module_data(net);
    (void)count;
    td_tensor *x = td_forward(td_child(net, CONV1), inputs[0]);
    x = td_f_relu(td_f_max_pool2d(x, 2, 2, NULL));
    x = td_forward(td_child(net, DROP), td_forward(td_child(net, CONV2), x));
    x = td_f_relu(td_f_max_pool2d(x, 2, 2, NULL));
    x = td_reshape(x, TD_SHAPE(-1, data->flat));
    x = td_f_relu(td_forward(td_child(net, FC1), x));
    return td_f_log_softmax(td_forward(td_child(net, FC2), x), 1);
}

static td_status net_save(const td_module *net, td_state *options)
{
    const struct sample_net *data = td_module_data(net);
    return td_state_add_integer(options, "flat", data->flat);
}

static td_status net_load(td_module *net, const td_state *options)
{
    struct sample_net *data = td_module_data(net);
    td_status status = td_state_get_integer(options, "flat", &data->flat);
    if (!status && data->flat < 1)
        status = TD_ERR_INVALID;
    return status;
}

static const td_module_ops net_ops = {
    .name = "SampleNet",
    .data_size = sizeof(struct sample_net),
    .forward = net_forward,
    .save_options = net_save,
    .load_options = net_load,
};

td_module *make_sample_net(void)
{
    CHECK_OK(td_register_module(&net_ops));
    td_module *net = td_module_create(&net_ops);
    td_module_add_child(net, "conv1", td_conv2d(1, 10, 5));
    td_module_add_child(net, "conv2", td_conv2d(10, 20, 5));
    td_module_add_child(net, "conv2_drop", td_dropout2d(0.5));
    td_module_add_child(net, "fc1", td_linear(320, 50));
    td_module_add_child(net, "fc2", td_linear(50, 10));
    if (net)
        *(struct sample_net *)td_module_data(net) = (struct sample_net){.flat = 320};
    return td_module_finish(net);
}

/* ---- A kind of one's own with tensors, which checks nothing ------------------------------------- */

static td_tensor *scale_forward(td_module *self, td_tensor *const *inputs, int count)
{
    (void)count;
    return td_mul(td_add(inputs[0], td_buffer(self, 1)), td_param(self, 0));
}

static td_module *make_scale(void)
{
    static const td_module_ops ops = {.name = "SampleScale", .forward = scale_forward};
    CHECK_OK(td_register_module(&ops));
    TD_SCOPE;
    td_module *module = td_module_create(&ops);
    td_module_add_parameter(module, "scale", td_randn(TD_SHAPE(6), TD_F32, NULL));
    td_module_add_buffer(module, "steps", td_full(NULL, 0, 7, TD_I64, NULL), true);
    td_module_add_buffer(module, "shift", td_randn(TD_SHAPE(6), TD_F32, NULL), false); /* not saved */
    return td_module_finish(module);
}

/* ---- Samples --------------------------------------------------------------------------------- */

static td_module *make_linear(void)
{
    return td_linear(6, 3);
}

static td_module *make_linear_without_bias(void)
{
    return td_linear_with(6, 3, &(td_linear_options){.no_bias = true});
}

static td_module *make_embedding(void)
{
    return td_embedding_with(7, 4, &(td_embedding_options){.padding = true, .padding_idx = 2});
}

static td_module *make_conv(void)
{
    return td_conv2d_with(
        3, 6, 3, 2,
        &(td_conv2d_options){
            .stride = {2, 1}, .padding = {1, 2}, .dilation = {1, 2}, .groups = 3, .no_bias = true});
}

static td_module *make_max_pool(void)
{
    return td_max_pool2d_with(
        3, 2, &(td_pool2d_options){.stride = {2, 1}, .padding = {1, 0}, .dilation = {1, 2}});
}

static td_module *make_avg_pool(void)
{
    return td_avg_pool2d_with(3, 2,
                              &(td_pool2d_options){.padding = {1, 1}, .exclude_padding = true});
}

static td_module *make_adaptive_avg(void)
{
    return td_adaptive_avg_pool2d(3, 2);
}

static td_module *make_adaptive_max(void)
{
    return td_adaptive_max_pool2d(2, 3);
}

static td_module *make_batch_norm1d(void)
{
    return td_batch_norm1d_with(6, &(td_batch_norm_options){.eps = 1e-3, .cumulative = true});
}

static td_module *make_batch_norm2d(void)
{
    return td_batch_norm2d_with(3, &(td_batch_norm_options){.momentum = 0.3});
}

static td_module *make_batch_norm_plain(void)
{
    return td_batch_norm2d_with(
        3, &(td_batch_norm_options){.no_affine = true, .no_running_stats = true});
}

static td_module *make_layer_norm(void)
{
    return td_layer_norm_with((const int64_t[]){8, 8}, 2, &(td_layer_norm_options){.eps = 1e-3});
}

static td_module *make_layer_norm_plain(void)
{
    return td_layer_norm_with((const int64_t[]){6}, 1, &(td_layer_norm_options){.no_affine = true});
}

static td_module *make_softmax(void)
{
    return td_softmax(-1);
}

static td_module *make_log_softmax(void)
{
    return td_log_softmax(1);
}

static td_module *make_dropout(void)
{
    return td_dropout(0.4);
}

static td_module *make_dropout2d(void)
{
    return td_dropout2d(0.5);
}

static td_module *make_flatten(void)
{
    return td_flatten_with(2, 3);
}

static td_module *make_attention(void)
{
    return td_multihead_attention_with(
        8, 2,
        &(td_multihead_attention_options){.dropout = 0.25, .causal = true, .batch_first = true});
}

static td_module *make_attention_without_bias(void)
{
    return td_multihead_attention_with(8, 4, &(td_multihead_attention_options){.no_bias = true});
}

static td_module *make_encoder_layer(void)
{
    return td_transformer_encoder_layer_with(
        8, 2,
        &(td_transformer_options){
            .feedforward = 12, .gelu = true, .norm_first = true, .eps = 1e-4});
}

static td_module *make_encoder(void)
{
    return td_transformer_encoder(
        td_transformer_encoder_layer_with(8, 2, &(td_transformer_options){.feedforward = 12}), 2,
        td_layer_norm(8));
}

static td_module *make_encoder_without_norm(void)
{
    return td_transformer_encoder(make_encoder_layer(), 1, NULL);
}

static td_module *make_mlp(void)
{
    return td_sequential(td_linear(6, 5), td_batch_norm1d(5), td_sequential(td_relu(), NULL),
                         td_dropout(0.2), td_linear(5, 4), NULL);
}

static td_module *make_list(void)
{
    return td_module_list(td_linear(6, 3), td_tanh(), NULL);
}

const struct sample samples[] = {
    {"Linear", make_linear, ROWS},
    {"Linear without bias", make_linear_without_bias, ROWS},
    {"Embedding", make_embedding, TOKENS},
    {"Conv2d", make_conv, IMAGE},
    {"MaxPool2d", make_max_pool, IMAGE},
    {"AvgPool2d", make_avg_pool, IMAGE},
    {"AdaptiveAvgPool2d", make_adaptive_avg, IMAGE},
    {"AdaptiveMaxPool2d", make_adaptive_max, IMAGE},
    {"BatchNorm1d", make_batch_norm1d, ROWS},
    {"BatchNorm2d", make_batch_norm2d, IMAGE},
    {"BatchNorm2d without tensors", make_batch_norm_plain, IMAGE},
    {"LayerNorm", make_layer_norm, IMAGE},
    {"LayerNorm without tensors", make_layer_norm_plain, ROWS},
    {"ReLU", td_relu, ROWS},
    {"GELU", td_gelu, ROWS},
    {"GELU by tanh", td_gelu_tanh, ROWS},
    {"SiLU", td_silu, ROWS},
    {"Tanh", td_tanh, ROWS},
    {"Sigmoid", td_sigmoid, ROWS},
    {"Softmax", make_softmax, ROWS},
    {"LogSoftmax", make_log_softmax, ROWS},
    {"Dropout", make_dropout, ROWS},
    {"Dropout2d", make_dropout2d, IMAGE},
    {"Flatten", make_flatten, IMAGE},
    {"Identity", td_identity, ROWS},
    {"MultiheadAttention", make_attention, SEQUENCE},
    {"MultiheadAttention without bias", make_attention_without_bias, SEQUENCE},
    {"TransformerEncoderLayer", make_encoder_layer, SEQUENCE},
    {"TransformerEncoder", make_encoder, SEQUENCE},
    {"TransformerEncoder without norm", make_encoder_without_norm, SEQUENCE},
    {"Sequential", make_mlp, ROWS},
    {"ModuleList", make_list, ROWS}, /* which has no forward */
    {"SampleNet", make_sample_net, DIGITS},
    {"SampleScale", make_scale, ROWS},
};
const int sample_count = (int)(sizeof samples / sizeof samples[0]);

td_tensor *sample_input(enum sample_input input)
{
    switch (input) {
    case IMAGE:
        return td_randn(TD_SHAPE(2, 3, 8, 8), TD_F32, NULL);
    case DIGITS:
        return td_randn(TD_SHAPE(2, 1, 28, 28), TD_F32, NULL);
    case ROWS:
        return td_randn(TD_SHAPE(4, 6), TD_F32, NULL);
    case TOKENS:
        return td_randint(0, 7, TD_SHAPE(2, 3), TD_I64, NULL);
    default:
        return td_randn(TD_SHAPE(5, 2, 8), TD_F32, NULL);
    }
}

/* ---- Sending --------------------------------------------------------------------------------- */

enum { MAX_TENSORS = 256 };

struct message {
    td_tensor *tensors[MAX_TENSORS];
    uint32_t count;
};

static td_status put_tensor(void *arg, td_tensor *tensor, uint32_t *number)
{
    struct message *message = arg;
    CHECK(message->count < MAX_TENSORS);
    CHECK(!td_tensor_requires_grad(tensor)); /* its graph is not sent */
    *number = message->count;
    TD_SCOPE;
    message->tensors[message->count++] = td_tensor_retain(td_clone(tensor));
    return TD_OK;
}

static td_tensor *get_tensor(void *arg, uint32_t number)
{
    struct message *message = arg;
    CHECK(number < message->count);
    return td_tensor_retain(message->tensors[number]);
}

static const td__codec_fns fns = {.put_tensor = put_tensor, .get_tensor = get_tensor};

static td_value *send(const td_value *value)
{
    struct td__buffer bytes = {0};
    struct message message = {0};
    td_value *received = NULL;
    if (!td__encode(value, &fns, &message, &bytes))
        received = td__decode(bytes.data, bytes.size, &fns, &message);
    td__buffer_free(&bytes);
    for (uint32_t i = 0; i < message.count; i++)
        td_tensor_release(message.tensors[i]);
    return received;
}

td_module *send_module(td_module *module)
{
    TD_SCOPE;
    td_value value = {.kind = TD_VALUE_MODULE, .module = module};
    td_value *received = send(&value);
    if (!received)
        return NULL;
    td_module *copy = td_value_module(received);
    CHECK(copy && received->owners == 1);
    free(received); /* without the module */
    return copy;
}

td_module *send_packed(const td_value *packed)
{
    TD_SCOPE;
    td_value *received = send(packed);
    td_module *module = received ? td__module_unpack(received) : NULL;
    td_value_release(received);
    return module;
}
