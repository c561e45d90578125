/* Layers against PyTorch: initial values bit for bit, results and gradients within a few roundings.
 * What was recorded, and how, is in tests/reference/record_modules.py. */
#include "host_data.h"
#include "runner.h"

#include <tandem/nn.h>

#include <math.h>
#include <string.h>
#include <zlib.h>

#ifdef __GLIBC__
#include <gnu/libc-version.h>
#endif

struct recorded_tensor {
    const char *module, *name;
    int64_t numel;
    uint32_t checksum;
    uint32_t first[3];
};

struct recorded_result {
    const char *name;
    const double *values, *grad_norms;
    size_t count, grad_count;
};

struct recorded_trunc_normal {
    td_dtype dtype;
    int count;
    double mean, std, low, high;
    uint32_t checksum;
};

#include "reference/module_vectors.h"

enum { WIDTH = 16, HEADS = 4 };

/* ---- The modules, as the script has them --------------------------------------------------------- */

static td_module *conv2d(void)
{
    return td_conv2d_with(
        3, 4, 3, 5, &(td_conv2d_options){.stride = {2, 1}, .padding = {1, 2}, .dilation = {1, 2}});
}

static td_module *attention(void)
{
    return td_multihead_attention_with(WIDTH, HEADS,
                                       &(td_multihead_attention_options){.batch_first = true});
}

static td_module *encoder_layer(void)
{
    return td_transformer_encoder_layer_with(
        WIDTH, HEADS,
        &(td_transformer_options){.batch_first = true, .feedforward = 24, .dropout = TD_ZERO});
}

static td_module *encoder_layer_norm_first(void)
{
    return td_transformer_encoder_layer_with(WIDTH, HEADS,
                                             &(td_transformer_options){.batch_first = true,
                                                                       .feedforward = 24,
                                                                       .dropout = TD_ZERO,
                                                                       .norm_first = true,
                                                                       .gelu = true,
                                                                       .causal = true});
}

static td_module *encoder(void)
{
    return td_transformer_encoder(encoder_layer(), 2, td_layer_norm(WIDTH));
}

static const td_module_ops seeds_ops = {.name = "Net"};

static td_module *seeds(void)
{
    td_module *net = td_module_create(&seeds_ops);
    td_module_add_child(net, "conv1", td_conv2d(1, 10, 5));
    td_module_add_child(net, "conv2", td_conv2d(10, 20, 5));
    td_module_add_child(net, "conv2_drop", td_dropout2d(0.5));
    td_module_add_child(net, "fc1", td_linear(320, 50));
    td_module_add_child(net, "fc2", td_linear(50, 10));
    return td_module_finish(net);
}

static td_module *lenet(void)
{
    return td_sequential(td_conv2d_with(1, 6, 5, 5, &(td_conv2d_options){.padding = {2, 2}}),
                         td_batch_norm2d(6), td_relu(), td_max_pool2d(2), td_conv2d(6, 16, 5),
                         td_batch_norm2d(16), td_relu(), td_avg_pool2d(2), td_flatten(),
                         td_linear(400, 120), td_tanh(), td_dropout(0.25), td_linear(120, 10),
                         td_log_softmax(1), NULL);
}

static td_module *mlp(void)
{
    return td_sequential(td_flatten(), td_linear(784, 1024), td_relu(), td_linear(1024, 1024),
                         td_relu(), td_linear(1024, 10), NULL);
}

static td_module *make(const char *name)
{
    if (!strcmp(name, "linear"))
        return td_linear(7, 5);
    if (!strcmp(name, "linear_no_bias"))
        return td_linear_with(40, 3, &(td_linear_options){.no_bias = true});
    if (!strcmp(name, "conv2d"))
        return conv2d();
    if (!strcmp(name, "conv2d_groups"))
        return td_conv2d_with(4, 6, 3, 3, &(td_conv2d_options){.groups = 2, .no_bias = true});
    if (!strcmp(name, "embedding"))
        return td_embedding(11, 6);
    if (!strcmp(name, "embedding_small"))
        return td_embedding(2, 3);
    if (!strcmp(name, "embedding_padding"))
        return td_embedding_with(9, 4, &(td_embedding_options){.padding = true, .padding_idx = -2});
    if (!strncmp(name, "batch_norm_cumulative", 21))
        return td_batch_norm1d_with(3, &(td_batch_norm_options){.cumulative = true, .eps = 1e-3});
    if (!strcmp(name, "batch_norm"))
        return td_batch_norm2d(3);
    if (!strcmp(name, "layer_norm"))
        return td_layer_norm_with((const int64_t[]){2, 3}, 2, NULL);
    if (!strcmp(name, "attention_no_bias"))
        return td_multihead_attention_with(8, 2,
                                           &(td_multihead_attention_options){.no_bias = true});
    if (!strcmp(name, "attention_dropout"))
        return td_multihead_attention_with(
            WIDTH, HEADS, &(td_multihead_attention_options){.batch_first = true, .dropout = 0.3});
    if (!strcmp(name, "attention_sequence_first"))
        return td_multihead_attention(WIDTH, HEADS); /* as PyTorch: [L, N, E] by default */
    if (!strcmp(name, "attention_causal"))
        return td_multihead_attention_with(
            WIDTH, HEADS, &(td_multihead_attention_options){.batch_first = true, .causal = true});
    if (!strncmp(name, "attention", 9))
        return attention();
    if (!strcmp(name, "encoder_layer"))
        return encoder_layer();
    if (!strcmp(name, "encoder_layer_norm_first"))
        return encoder_layer_norm_first();
    if (!strcmp(name, "encoder_layer_dropout"))
        return td_transformer_encoder_layer_with(
            WIDTH, HEADS, &(td_transformer_options){.batch_first = true, .feedforward = 24});
    if (!strcmp(name, "encoder"))
        return encoder();
    if (!strcmp(name, "seeds"))
        return seeds();
    if (!strcmp(name, "toy"))
        return td_sequential(td_linear(10, 10), td_relu(), td_linear(10, 5), NULL);
    if (!strcmp(name, "mlp"))
        return mlp();
    if (!strcmp(name, "lenet"))
        return lenet();
    FAIL("no module %s", name);
}

/* ---- Initial values ------------------------------------------------------------------------------ */

static uint32_t checksum(td_tensor *tensor)
{
    CHECK(td_tensor_is_contiguous(tensor));
    return (uint32_t)crc32(0, host_data(tensor), (unsigned)td_tensor_nbytes(tensor));
}

static void check_tensor(const struct recorded_tensor *recorded, td_tensor *tensor)
{
    CHECK_EQ(td_tensor_numel(tensor), recorded->numel);
    if (td_tensor_dtype(tensor) == TD_F32)
        CHECK_MEM(host_data(tensor), recorded->first,
                  (size_t)(recorded->numel < 3 ? recorded->numel : 3) * 4);
    if (checksum(tensor) != recorded->checksum)
        FAIL("%s of %s has other elements", recorded->name, recorded->module);
}

TEST(initial_values_are_those_of_pytorch, .host_only = "only the host draws the numbers of PyTorch")
{
    size_t count = sizeof recorded_tensors / sizeof recorded_tensors[0], at = 0;
    while (at < count) {
        const char *name = recorded_tensors[at].module;
        td_manual_seed(1);
        td_module *module = make(name);
        CHECK(module);
        td_state *state = td_module_state(module);
        size_t index = 0;
        for (; strcmp(recorded_tensors[at].name, "next") != 0; at++, index++) {
            CHECK_STR(td_state_name(state, index), recorded_tensors[at].name);
            check_tensor(&recorded_tensors[at], td_state_tensor(state, index));
        }
        CHECK_EQ(td_state_count(state), index);
        td_tensor *next = td_rand((const int64_t[]){1}, 1, TD_F32, NULL);
        CHECK_EQ(checksum(next), recorded_tensors[at++].checksum);
        td_tensor_release(next);
        td_state_destroy(state);
        td_module_destroy(module);
    }
}

static td_status init(const char *name, td_tensor *t)
{
    if (!strcmp(name, "xavier_uniform"))
        return td_init_xavier_uniform(t, 1.5);
    if (!strcmp(name, "xavier_normal"))
        return td_init_xavier_normal(t, 1);
    if (!strcmp(name, "kaiming_uniform"))
        return td_init_kaiming_uniform(t, NULL);
    if (!strcmp(name, "kaiming_uniform_out"))
        return td_init_kaiming_uniform(t, &(td_kaiming_options){.a = 0.2, .fan_out = true});
    if (!strcmp(name, "kaiming_normal"))
        return td_init_kaiming_normal(t, &(td_kaiming_options){.nonlinearity = TD_RELU});
    if (!strcmp(name, "kaiming_normal_tanh"))
        return td_init_kaiming_normal(t, &(td_kaiming_options){.nonlinearity = TD_TANH});
    if (!strcmp(name, "uniform"))
        return td_init_uniform(t, -0.3, 0.7);
    if (!strcmp(name, "normal"))
        return td_init_normal(t, 0.5, 0.1);
    FAIL("no initial values %s", name);
}

TEST(init_functions_are_those_of_pytorch, .host_only = "only the host draws the numbers of PyTorch")
{
    for (size_t i = 0; i < sizeof recorded_inits / sizeof recorded_inits[0]; i++) {
        td_manual_seed(1);
        td_tensor *tensor = td_empty((const int64_t[]){5, 4, 3}, 3, TD_F32, NULL);
        CHECK_OK(td_tensor_set_requires_grad(tensor, true));
        CHECK_OK(init(recorded_inits[i].module, tensor));
        check_tensor(&recorded_inits[i], tensor);
        td_tensor_release(tensor);
    }
    td_manual_seed(1);
    td_tensor *tensor = td_empty((const int64_t[]){40}, 1, TD_F32, NULL);
    CHECK_OK(td_init_trunc_normal(tensor, 0.1, 0.5, -0.6, 1.2));
    for (int i = 0; i < 40; i++)
        CHECK(fabs(((const float *)host_data(tensor))[i] - recorded_trunc_normal[i]) < 1e-6);
    td_tensor_release(tensor);
}

TEST(trunc_normal_has_the_bits_of_pytorch,
     .host_only = "only the host draws the numbers of PyTorch")
{
#if defined(__GLIBC__) && defined(__x86_64__)
    if (strcmp(gnu_get_libc_version(), recorded_libc) != 0)
        td_test_skip("the numbers were recorded with the C library %s", recorded_libc);
    for (size_t i = 0; i < sizeof recorded_trunc_normals / sizeof recorded_trunc_normals[0]; i++) {
        const struct recorded_trunc_normal *normal = &recorded_trunc_normals[i];
        td_manual_seed(1);
        td_tensor *tensor = td_empty((const int64_t[]){normal->count}, 1, normal->dtype, NULL);
        CHECK_OK(
            td_init_trunc_normal(tensor, normal->mean, normal->std, normal->low, normal->high));
        if (checksum(tensor) != normal->checksum)
            FAIL("case %zu, %d numbers of %s, has other bits", i, normal->count,
                 td_dtype_name(normal->dtype));
        td_tensor_release(tensor);
    }
#else
    td_test_skip("the numbers were recorded with another C library, or on another processor");
#endif
}

TEST(init_functions_refuse)
{
    td_tensor *vector = td_zeros((const int64_t[]){3}, 1, TD_F32, NULL);
    td_tensor *integers = td_zeros((const int64_t[]){3, 3}, 2, TD_I32, NULL);
    td_tensor *none = td_zeros((const int64_t[]){3, 0}, 2, TD_F32, NULL);
    CHECK_FAILS(td_init_xavier_uniform(vector, 1), TD_ERR_INVALID, "[3]");
    CHECK_FAILS(td_init_xavier_normal(vector, 1), TD_ERR_INVALID, "[3]");
    CHECK_FAILS(td_init_kaiming_uniform(vector, NULL), TD_ERR_INVALID, "[3]");
    CHECK_FAILS(td_init_kaiming_normal(vector, NULL), TD_ERR_INVALID, "[3]");
    CHECK_FAILS(td_init_xavier_uniform(integers, 1), TD_ERR_INVALID, "i32");
    CHECK_FAILS(td_init_trunc_normal(vector, 0, 0, -1, 1), TD_ERR_INVALID, "deviation");
    CHECK_FAILS(td_init_trunc_normal(vector, 0, 1, 1, -1), TD_ERR_INVALID, "order");
    CHECK_OK(td_init_kaiming_uniform(none, NULL));
    CHECK_OK(td_init_xavier_normal(none, 1));
    CHECK_OK(td_init_constant(integers, 7));
    CHECK_EQ(((const int32_t *)host_data(integers))[8], 7);
    CHECK_EQ(td_init_xavier_uniform(NULL, 1), TD_ERR_INVALID);
    CHECK(fabs(td_init_gain(TD_LEAKY_RELU, 0.01) - sqrt(2 / 1.0001)) < 1e-15);
    CHECK(td_init_gain(TD_SELU, 0) == 0.75 && td_init_gain(TD_LINEAR, 0) == 1);
    td_tensor_release(none);
    td_tensor_release(integers);
    td_tensor_release(vector);
}

/* ---- Results and gradients ----------------------------------------------------------------------- */

#define RANDN(...)                                                                                 \
    host_randn((const int64_t[]){__VA_ARGS__}, sizeof((int64_t[]){__VA_ARGS__}) / 8, TD_F32)

/* What the script does with the module. */
static td_tensor *run(const char *name, td_module *module)
{
    if (!strcmp(name, "attention_cross")) {
        td_tensor *q = RANDN(2, 3, WIDTH), *k = RANDN(2, 5, WIDTH);
        return td_forward_with(module, (td_tensor *[]){q, k, RANDN(2, 5, WIDTH)}, 3);
    }
    if (!strcmp(name, "encoder")) {
        td_tensor *x = RANDN(2, 5, WIDTH);
        td_tensor *seen = td_tril(td_ones((const int64_t[]){5, 5}, 2, TD_F32, NULL), 0);
        return td_forward_with(module, (td_tensor *[]){x, td_gt_scalar(seen, 0)}, 2);
    }
    if (!strcmp(name, "batch_norm"))
        return td_forward(module, td_add_scalar(td_mul_scalar(RANDN(4, 3, 2, 2), 2), 1));
    if (!strcmp(name, "batch_norm_cumulative")) {
        td_forward(module, RANDN(6, 3));
        td_forward(module, RANDN(6, 3));
        return td_forward(module, RANDN(6, 3));
    }
    if (!strcmp(name, "lenet"))
        return td_forward(module, RANDN(3, 1, 28, 28));
    return td_forward(module, RANDN(2, 5, WIDTH));
}

static void check_grads(const struct recorded_result *recorded, td_module *module)
{
    td_state *parameters = td_module_parameters(module);
    CHECK_EQ(td_state_count(parameters), recorded->grad_count);
    for (size_t i = 0; i < recorded->grad_count; i++) {
        double expected = recorded->grad_norms[i];
        double norm = td_item(td_norm(td_tensor_grad(td_state_tensor(parameters, i))));
        /* Behind a norm, a bias of what goes in has no gradient but roundings. */
        if (fabs(norm - expected) > 1e-5 * fmax(expected, 1))
            FAIL("%s: the gradient of %s has the norm %g, not %g", recorded->name,
                 td_state_name(parameters, i), norm, expected);
    }
    td_state_destroy(parameters);
}

TEST(results_are_those_of_pytorch)
{
    for (size_t i = 0; i < sizeof recorded_results / sizeof recorded_results[0]; i++) {
        const struct recorded_result *recorded = &recorded_results[i];
        bool draws = strstr(recorded->name, "dropout") || !strcmp(recorded->name, "lenet");
        if (draws && !td_test_on_host())
            continue; /* only the host draws the numbers of PyTorch */
        td_manual_seed(1);
        td_module *module = NULL;
        {
            TD_DEVICE_SCOPE(td_device_get("cpu"));
            module = make(recorded->name);
        }
        CHECK_OK(td_module_to(module, NULL));
        {
            TD_SCOPE;
            td_tensor *y = run(recorded->name, module);
            CHECK(y);
            CHECK_EQ(td_tensor_numel(y), recorded->count);
            td_tensor *factors = host_randn(td_tensor_shape(y), td_tensor_ndim(y), TD_F32);
            const float *values = host_data(y);
            for (size_t v = 0; v < recorded->count; v++)
                if (fabs(values[v] - recorded->values[v]) > 2e-6 * fmax(1, fabs(values[v])))
                    FAIL("%s: element %zu is %.9g, not %.9g", recorded->name, v, values[v],
                         recorded->values[v]);
            CHECK_OK(td_backward(td_sum(td_mul(y, factors))));
            check_grads(recorded, module);
        }
        td_module_destroy(module);
    }
}

/* ---- Attention ----------------------------------------------------------------------------------- */

TEST(masks_of_attention_agree)
{
    td_module *plain = attention();
    td_module *causal = td_multihead_attention_with(
        WIDTH, HEADS, &(td_multihead_attention_options){.batch_first = true, .causal = true});
    td_state *state = td_module_state(plain);
    CHECK_OK(td_module_load_state(causal, state, true));
    {
        TD_SCOPE;
        td_tensor *x = RANDN(2, 6, WIDTH);
        td_tensor *ones = td_ones((const int64_t[]){6, 6}, 2, TD_F32, NULL);
        td_tensor *seen = td_gt_scalar(td_tril(ones, 0), 0);
        td_tensor *added = td_masked_fill(td_zeros_like(ones), td_logical_not(seen), -INFINITY);
        td_tensor *want = td_forward(causal, x);
        CHECK(td_allclose(td_forward_with(plain, (td_tensor *[]){x, seen}, 2), want, 1e-5, 1e-6));
        CHECK(td_allclose(td_forward_with(plain, (td_tensor *[]){x, added}, 2), want, 1e-5, 1e-6));
        CHECK(td_allclose(td_forward_with(plain, (td_tensor *[]){x, x, x, seen}, 4), want, 1e-5,
                          1e-6));
        CHECK(!td_allclose(td_forward(plain, x), want, 1e-5, 1e-6));
        /* Three different tensors with the same elements go another way to the same result. */
        CHECK(td_allclose(td_forward_with(plain, (td_tensor *[]){x, td_clone(x), td_clone(x)}, 3),
                          td_forward(plain, x), 1e-5, 1e-6));
        /* Without a batch. */
        td_tensor *one = td_forward(causal, td_select(x, 0, 1));
        CHECK_EQ(td_tensor_ndim(one), 2);
        CHECK(td_allclose(one, td_select(want, 0, 1), 1e-5, 1e-6));
    }
    td_state_destroy(state);
    td_module_destroy(causal);
    td_module_destroy(plain);
}

TEST(attention_of_a_constant_key_gets_its_gradient)
{
    /* Only the value's part of the weight, and the output's, matter where all scores are equal. */
    td_module *module = attention();
    {
        TD_SCOPE;
        td_tensor *x = td_ones((const int64_t[]){1, 3, WIDTH}, 3, TD_F32, NULL);
        CHECK_OK(td_backward(td_sum(td_forward(module, x))));
        td_tensor *grad = td_tensor_grad(td_param(module, 0));
        CHECK(td_item(td_max(td_abs(td_narrow(grad, 0, 0, 2 * WIDTH)))) < 1e-6);
        CHECK(td_item(td_max(td_abs(td_narrow(grad, 0, 2 * WIDTH, WIDTH)))) > 1e-3);
    }
    td_module_destroy(module);
}

TEST(batch_norm_counts_and_evaluates)
{
    td_module *norm = td_batch_norm1d(2);
    {
        TD_SCOPE;
        td_tensor *x = RANDN(8, 2);
        td_forward(norm, x);
        td_forward(norm, x);
        CHECK_EQ(*(const int64_t *)host_data(td_module_buffer(norm, "num_batches_tracked")), 2);
        td_module_eval(norm);
        td_tensor *y = td_forward(norm, x);
        CHECK_EQ(*(const int64_t *)host_data(td_module_buffer(norm, "num_batches_tracked")), 2);
        td_tensor *mean = td_module_buffer(norm, "running_mean");
        td_tensor *var = td_module_buffer(norm, "running_var");
        td_tensor *want = td_mul(td_sub(x, mean), td_rsqrt(td_add_scalar(var, 1e-5)));
        CHECK(td_allclose(y, want, 1e-5, 1e-6));
        CHECK_EQ(td_tensor_ndim(td_forward(norm, RANDN(4, 2, 5))), 3);
        CHECK(!td_forward(norm, RANDN(4, 3)));
        CHECK_CONTAINS(td_last_error(), "2 features got the shape [4, 3]");
        CHECK(!td_forward(norm, RANDN(4, 2, 3, 3)));
    }
    td_module_destroy(norm);
}
