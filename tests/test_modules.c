/* Modules: putting them together, names, modes, states, clones, devices, text, user-defined modules, and what is
 * refused. */
#include "host_data.h"
#include "runner.h"

#include <tandem/nn.h>

#include <math.h>
#include <stdio.h>
#include <string.h>

static td_module *small(void)
{
    td_module *net = td_sequential(td_linear(3, 4), td_batch_norm1d(4), td_relu(), td_dropout(0.5),
                                   td_sequential(td_linear(4, 2), NULL), NULL);
    CHECK(net);
    return net;
}

static const float *data_of(td_module *module, const char *name)
{
    td_tensor *tensor = td_module_parameter(module, name);
    CHECK(tensor);
    return host_data(tensor);
}

/* ---- Putting together ---------------------------------------------------------------------------- */

TEST(sequential_names_its_parts)
{
    td_module *net = small();
    td_state *parameters = td_module_parameters(net), *buffers = td_module_buffers(net);
    const char *names[] = {"0.weight", "0.bias", "1.weight", "1.bias", "4.0.weight", "4.0.bias"};
    CHECK_EQ(td_state_count(parameters), 6);
    for (size_t i = 0; i < 6; i++) {
        CHECK_STR(td_state_name(parameters, i), names[i]);
        CHECK(td_tensor_requires_grad(td_state_tensor(parameters, i)));
    }
    CHECK_EQ(td_state_count(buffers), 3);
    CHECK_STR(td_state_name(buffers, 2), "1.num_batches_tracked");
    CHECK(!td_tensor_requires_grad(td_state_tensor(buffers, 0)));
    CHECK_EQ(td_module_parameter_count(net), 12 + 4 + 4 + 4 + 8 + 2);
    CHECK(td_module_parameter(net, "4.0.bias") == td_state_tensor(parameters, 5));
    CHECK(td_module_find(net, "4.0") == td_child(td_child(net, 4), 0));
    CHECK(td_module_find(net, "") == net);
    CHECK_EQ(td_child_count(net), 5);
    CHECK_STR(td_child_name(net, 4), "4");
    td_state_destroy(buffers);
    td_state_destroy(parameters);
    td_module_destroy(net);
    td_module_destroy(NULL);
}

TEST(missing_names)
{
    td_module *net = small();
    const char *wrong[] = {"5.weight",   "0.none",  "0",         "",
                           "0.weight.x", ".weight", "0..weight", "4."};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        CHECK(!td_module_parameter(net, wrong[i]));
        CHECK_CONTAINS(td_last_error(), wrong[i]);
    }
    CHECK(!td_module_parameter(net, NULL));
    CHECK(!td_module_parameter(net, "1.running_mean"));
    CHECK(!td_module_buffer(net, "1.weight"));
    CHECK(td_module_buffer(net, "1.running_mean"));
    CHECK(!td_module_find(net, "4.1"));
    CHECK(!td_module_find(net, "4."));
    CHECK(!td_module_find(net, NULL));
    CHECK(!td_child(net, 5) && !td_child(net, -1) && !td_child_name(net, 5));
    CHECK(!td_param(net, 0) && !td_buffer(net, 0));
    CHECK(!td_module_parameters(NULL) && !td_module_state(NULL) && !td_module_clone(NULL));
    CHECK(!td_module_parameter(NULL, "x") && !td_forward(NULL, NULL));
    td_module_destroy(net);
}

TEST(a_failed_child_fails_the_module)
{
    CHECK(!td_sequential(td_linear(3, 4), td_linear(-1, 2), td_relu(), NULL));
    CHECK_CONTAINS(td_last_error(), "in_features is -1");
    CHECK(!td_sequential(td_linear(3, 4), td_relu()));
    CHECK_CONTAINS(td_last_error(), "the last argument must be NULL");
    CHECK(!td_module_list(td_relu(), td_conv2d(1, 1, 0), NULL));
    CHECK(!td_transformer_encoder(NULL, 2, td_layer_norm(4)));
    CHECK(!td_transformer_encoder(td_relu(), 0, NULL));
    CHECK(!td_transformer_encoder_layer(10, 3));
    CHECK_CONTAINS(td_last_error(), "number of heads, 3");

    td_module *relu = td_relu();
    CHECK(!td_sequential(relu, relu, NULL));
    CHECK_CONTAINS(td_last_error(), "already");
    td_module *empty = td_sequential(NULL);
    CHECK(empty);
    {
        TD_SCOPE;
        td_tensor *x = td_ones((const int64_t[]){2}, 1, TD_F32, NULL);
        CHECK(td_equal(td_forward(empty, x), x));
    }
    td_module_destroy(empty);
}

TEST(sizes_are_checked)
{
    CHECK(!td_linear(3, -4));
    CHECK(!td_conv2d(3, -1, 3));
    CHECK(!td_conv2d_with(3, 4, 3, 3, &(td_conv2d_options){.groups = 2}));
    CHECK_CONTAINS(td_last_error(), "number of groups, 2");
    CHECK(!td_conv2d_with(3, 4, 3, 3, &(td_conv2d_options){.stride = {-1, 1}}));
    CHECK(!td_max_pool2d(0));
    CHECK(!td_max_pool2d_with(2, 2, &(td_pool2d_options){.padding = {2, 0}}));
    CHECK(!td_avg_pool2d(-1));
    CHECK(!td_adaptive_avg_pool2d(0, 1));
    CHECK(!td_adaptive_max_pool2d(1, -1));
    CHECK(!td_batch_norm2d(-1));
    CHECK(!td_batch_norm1d_with(2, &(td_batch_norm_options){.eps = -1}));
    CHECK(!td_layer_norm_with(NULL, 0, NULL));
    CHECK(!td_layer_norm(-2));
    CHECK(!td_dropout(1.5));
    CHECK(!td_dropout2d(NAN));
    CHECK(!td_embedding(-1, 2));
    CHECK(!td_embedding_with(3, 2, &(td_embedding_options){.padding = true, .padding_idx = 3}));
    CHECK_CONTAINS(td_last_error(), "padding_idx is 3");
    CHECK(!td_multihead_attention(0, 1));
    CHECK(!td_multihead_attention_with(4, 2, &(td_multihead_attention_options){.dropout = -1}));
    CHECK(!td_linear(INT64_MAX, INT64_MAX));
    CHECK(!td_linear(INT64_MAX / 8, 2));
    CHECK(!td_conv2d(INT64_MAX, INT64_MAX, 3));
    CHECK(!td_embedding(INT64_MAX, INT64_MAX));
    CHECK(!td_batch_norm1d(INT64_MAX));
    CHECK(!td_layer_norm(INT64_MAX));
    CHECK(!td_multihead_attention(INT64_MAX, 1));
    td_module *nothing = td_linear(0, 0);
    CHECK(nothing);
    td_module_destroy(nothing);
}

TEST(layers_without_parameters)
{
    td_module *modules[] = {td_relu(),     td_gelu(),     td_gelu_tanh(), td_silu(),
                            td_tanh(),     td_sigmoid(),  td_softmax(1),  td_log_softmax(-1),
                            td_dropout(0), td_identity(), td_flatten()};
    {
        TD_SCOPE;
        td_tensor *x = td_randn((const int64_t[]){3, 4}, 2, TD_F64, NULL);
        td_tensor *want[] = {td_f_relu(x),
                             td_f_gelu(x),
                             td_f_gelu_tanh(x),
                             td_f_silu(x),
                             td_f_tanh(x),
                             td_f_sigmoid(x),
                             td_f_softmax(x, 1),
                             td_f_log_softmax(x, 1),
                             x,
                             x,
                             x};
        for (size_t i = 0; i < sizeof modules / sizeof modules[0]; i++) {
            CHECK(td_equal(td_forward(modules[i], x), want[i]));
            CHECK(!td_forward(modules[i], NULL));
            CHECK(!td_forward_with(modules[i], (td_tensor *[]){x, x}, 2));
            CHECK_CONTAINS(td_last_error(), "1 input");
            td_module_destroy(modules[i]);
        }
        td_module *pool = td_adaptive_avg_pool2d(1, 2), *max = td_adaptive_max_pool2d(2, 2);
        td_tensor *pictures = td_randn((const int64_t[]){2, 3, 4, 4}, 4, TD_F32, NULL);
        CHECK(td_equal(td_forward(pool, pictures), td_f_adaptive_avg_pool2d(pictures, 1, 2)));
        CHECK(td_equal(td_forward(max, pictures), td_f_max_pool2d(pictures, 2, 2, NULL)));
        td_module_destroy(pool);
        td_module_destroy(max);
    }
}

/* ---- Running -------------------------------------------------------------------------------------- */

/* Without a scope, only the result is left, and it is the caller's. */
TEST(forward_leaves_only_its_result)
{
    td_module *net = small();
    td_tensor *x = td_ones((const int64_t[]){5, 3}, 2, TD_F32, NULL);
    td_tensor *y = td_forward(net, x);
    CHECK_EQ(td_tensor_size(y, 1), 2);
    td_tensor *sum = td_sum(y);
    CHECK_OK(td_backward(sum));
    CHECK(td_tensor_grad(td_module_parameter(net, "0.weight")));
    td_tensor_release(sum);
    td_tensor_release(y);
    td_module *same = td_identity();
    y = td_forward(same, x);
    CHECK(y == x);
    td_tensor_release(y);
    td_tensor_release(x);
    td_module_destroy(same);
    td_module_destroy(net);
}

TEST(modes_gradients_and_apply)
{
    td_module *net = small();
    CHECK(td_module_is_training(net) && td_module_is_training(td_module_find(net, "4.0")));
    td_module_eval(net);
    CHECK(!td_module_is_training(net) && !td_module_is_training(td_module_find(net, "4.0")));
    td_module_train(net, true);
    CHECK(td_module_is_training(td_module_find(net, "3")));
    td_module_train(NULL, true);
    CHECK(!td_module_is_training(NULL));

    {
        TD_SCOPE;
        td_tensor *x = td_ones((const int64_t[]){5, 3}, 2, TD_F32, NULL);
        CHECK_OK(td_backward(td_sum(td_forward(net, x))));
        td_tensor *grad = td_tensor_grad(td_module_parameter(net, "4.0.bias"));
        CHECK(((const float *)host_data(grad))[0] == 5);
        CHECK_OK(td_module_zero_grad(net));
        grad = td_tensor_grad(td_module_parameter(net, "4.0.bias"));
        CHECK(((const float *)host_data(grad))[0] == 0);
    }
    CHECK_OK(td_module_requires_grad_(td_module_find(net, "0"), false));
    CHECK(!td_tensor_requires_grad(td_module_parameter(net, "0.weight")));
    CHECK(td_tensor_requires_grad(td_module_parameter(net, "4.0.weight")));
    CHECK_EQ(td_module_zero_grad(NULL), TD_ERR_INVALID);
    td_module_destroy(net);
}

static td_status note(td_module *module, void *arg)
{
    char *names = arg;
    strcat(strcat(names, td_module_ops_of(module)->name), " ");
    return strcmp(td_module_ops_of(module)->name, "ReLU") == 0 && names[0] == '!' ? TD_ERR_STATE
                                                                                  : TD_OK;
}

TEST(apply_visits_children_first)
{
    td_module *net = small();
    char names[256] = "";
    CHECK_OK(td_module_apply(net, note, names));
    CHECK_STR(names, "Linear BatchNorm1d ReLU Dropout Linear Sequential Sequential ");
    strcpy(names, "!");
    CHECK_EQ(td_module_apply(net, note, names), TD_ERR_STATE);
    CHECK_STR(names, "!Linear BatchNorm1d ReLU ");
    td_module_destroy(net);
}

/* ---- States ---------------------------------------------------------------------------------------- */

TEST(states_save_and_load)
{
    td_module *a = small(), *b = small();
    td_state *state = td_module_state(a);
    CHECK_EQ(td_state_count(state), 9);
    CHECK_STR(td_state_name(state, 4),
              "1.running_mean"); /* after the parameters of the same module */
    CHECK(!td_tensor_requires_grad(td_state_get(state, "0.weight")));
    CHECK(td_tensor_data(td_state_get(state, "0.weight")) ==
          td_tensor_data(td_module_parameter(a, "0.weight")));
    CHECK(memcmp(data_of(a, "0.weight"), data_of(b, "0.weight"), 48) != 0);
    {
        TD_SCOPE;
        td_forward(a, td_randn((const int64_t[]){5, 3}, 2, TD_F32, NULL));
    }
    CHECK_OK(td_module_load_state(b, state, true));
    CHECK_MEM(data_of(a, "4.0.bias"), data_of(b, "4.0.bias"), 8);
    td_tensor *count = td_module_buffer(b, "1.num_batches_tracked");
    CHECK_EQ(*(const int64_t *)host_data(count), 1);
    CHECK(td_tensor_requires_grad(td_module_parameter(b, "0.weight")));
    CHECK_OK(td_module_load_state(a, state, true)); /* its own memory */
    td_state_destroy(state);
    td_module_destroy(b);
    td_module_destroy(a);
}

TEST(states_that_do_not_fit)
{
    td_module *net = small();
    td_state *own = td_module_state(net), *state = td_state_create(), *before = td_state_clone(own);
    {
        TD_SCOPE;
        for (int i = 0; i < td_state_count(own); i++) {
            const char *name = td_state_name(own, i);
            if (!strcmp(name, "0.bias") || !strcmp(name, "1.running_var"))
                continue;
            td_tensor *tensor = td_mul_scalar(td_state_tensor(own, i), 0);
            if (!strcmp(name, "4.0.weight"))
                tensor = td_transpose(tensor, 0, 1);
            CHECK_OK(td_state_add(state, name, tensor));
        }
        CHECK_OK(td_state_add_number(state, "9.weight", 1));
    }
    CHECK_FAILS(
        td_module_load_state(net, state, true), TD_ERR_INVALID,
        "missing: 0.bias, 1.running_var; unexpected: 9.weight; of another shape: 4.0.weight "
        "([4, 2], not [2, 4])");
    CHECK_FAILS(td_module_load_state(net, state, false), TD_ERR_INVALID,
                "Sequential; of another shape: 4.0.weight");
    CHECK_MEM(data_of(net, "0.weight"), host_data(td_state_get(before, "0.weight")), 48);
    CHECK_FAILS(td_module_load_state(net, NULL, true), TD_ERR_INVALID, "NULL");

    td_state *nothing = td_state_create();
    CHECK_FAILS(td_module_load_state(net, nothing, true), TD_ERR_INVALID, "and 3 more");
    CHECK_OK(td_module_load_state(net, nothing, false));
    CHECK_MEM(data_of(net, "0.weight"), host_data(td_state_get(before, "0.weight")), 48);
    td_state_destroy(nothing);
    td_state_destroy(before);
    td_state_destroy(state);
    td_state_destroy(own);
    td_module_destroy(net);
}

TEST(states_of_another_dtype_are_converted)
{
    td_module *net = td_linear(2, 1);
    td_state *state = td_state_create();
    {
        TD_SCOPE;
        CHECK_OK(
            td_state_add(state, "weight", td_full((const int64_t[]){1, 2}, 2, 0.5, TD_F64, NULL)));
        CHECK_OK(td_state_add(state, "bias", td_full((const int64_t[]){1}, 1, 3, TD_BF16, NULL)));
    }
    CHECK_OK(td_module_load_state(net, state, true));
    CHECK(data_of(net, "weight")[1] == 0.5f && data_of(net, "bias")[0] == 3);
    td_state_destroy(state);
    td_module_destroy(net);
}

/* ---- Clones, and other tensors ---------------------------------------------------------------------- */

TEST(clones_are_deep)
{
    td_module *net = small();
    CHECK_OK(td_module_requires_grad_(td_module_find(net, "0"), false));
    td_module_eval(net);
    td_module *clone = td_module_clone(net);
    CHECK(clone);
    CHECK_MEM(data_of(net, "0.weight"), data_of(clone, "0.weight"), 48);
    CHECK(td_tensor_data(td_module_parameter(net, "0.weight")) !=
          td_tensor_data(td_module_parameter(clone, "0.weight")));
    CHECK(!td_tensor_requires_grad(td_module_parameter(clone, "0.weight")));
    CHECK(td_tensor_requires_grad(td_module_parameter(clone, "4.0.weight")));
    CHECK(td_tensor_is_leaf(td_module_parameter(clone, "4.0.weight")));
    CHECK(!td_module_is_training(clone));
    {
        TD_SCOPE;
        td_tensor *x = td_randn((const int64_t[]){2, 3}, 2, TD_F32, NULL);
        td_tensor *y = td_forward(net, x);
        CHECK(td_equal(td_forward(clone, x), y));
        td_module_destroy(net);
        CHECK(td_equal(td_forward(clone, x), y));
    }
    td_module_destroy(clone);
}

TEST(shared_tensors_stay_shared)
{
    td_module *net = td_sequential(td_linear(3, 3), td_linear(3, 3), NULL);
    CHECK_OK(td_module_set_tensor(net, "1.weight", td_module_parameter(net, "0.weight")));
    CHECK_FAILS(td_module_set_tensor(net, "1.none", td_module_parameter(net, "0.weight")),
                TD_ERR_INVALID, "1.none");
    CHECK_EQ(td_module_set_tensor(net, "1.weight", NULL), TD_ERR_INVALID);
    td_state *parameters = td_module_parameters(net), *state = td_module_state(net);
    CHECK_EQ(td_state_count(parameters), 3);
    CHECK_EQ(td_state_count(state), 4);
    CHECK_EQ(td_module_parameter_count(net), 15);
    td_module *clone = td_module_clone(net);
    CHECK(td_module_parameter(clone, "1.weight") == td_module_parameter(clone, "0.weight"));
    CHECK(td_module_parameter(clone, "1.weight") != td_module_parameter(net, "0.weight"));
    CHECK_OK(td_module_to_dtype(clone, TD_F64));
    CHECK(td_module_parameter(clone, "1.weight") == td_module_parameter(clone, "0.weight"));
    CHECK_OK(td_module_load_state(clone, state, true));
    td_state_destroy(state);
    td_state_destroy(parameters);
    td_module_destroy(clone);
    td_module_destroy(net);
}

static td_tensor *doubled(td_tensor *tensor, void *arg)
{
    (*(int *)arg)++;
    return td_tensor_dtype(tensor) == TD_F32 ? td_mul_scalar(tensor, 2) : td_clone(tensor);
}

static td_tensor *no_tensor(td_tensor *tensor, void *arg)
{
    (void)tensor, (void)arg;
    return NULL;
}

/* A replica: gradients through it reach the tensors that it was made of. */
TEST(clones_with_results_of_the_tensors)
{
    td_module *net = td_sequential(td_linear(2, 1), td_batch_norm1d(1), NULL);
    td_module_eval(net);
    int calls = 0;
    td_module *replica = td_module_clone_with(net, doubled, &calls);
    CHECK_EQ(calls, 7);
    CHECK(!td_tensor_is_leaf(td_module_parameter(replica, "0.weight")));
    CHECK(data_of(replica, "0.bias")[0] == 2 * data_of(net, "0.bias")[0]);
    {
        TD_SCOPE;
        td_tensor *x = td_ones((const int64_t[]){4, 2}, 2, TD_F32, NULL);
        CHECK_OK(td_backward(td_sum(td_forward(replica, x))));
        CHECK(td_tensor_grad(td_module_parameter(net, "0.weight")));
    }
    td_module_destroy(replica);
    CHECK(!td_module_clone_with(net, no_tensor, NULL));
    CHECK(!td_module_clone_with(net, NULL, NULL));
    td_module_destroy(net);
}

TEST(modules_move)
{
    td_module *net = td_sequential(td_linear(2, 2), td_batch_norm1d(2), NULL);
    {
        TD_SCOPE;
        td_tensor *x = td_randn((const int64_t[]){4, 2}, 2, TD_F32, NULL);
        CHECK_OK(td_backward(td_sum(td_forward(net, x))));
        float before = data_of(net, "0.weight")[3];
        CHECK_OK(td_module_to_dtype(net, TD_F64));
        td_tensor *weight = td_module_parameter(net, "0.weight");
        CHECK_EQ(td_tensor_dtype(weight), TD_F64);
        CHECK(((const double *)host_data(weight))[3] == (double)before);
        CHECK(td_tensor_requires_grad(weight) && td_tensor_is_leaf(weight));
        CHECK_EQ(td_tensor_dtype(td_tensor_grad(weight)), TD_F64);
        CHECK_EQ(td_tensor_dtype(td_module_buffer(net, "1.num_batches_tracked")), TD_I64);
        CHECK_EQ(td_tensor_dtype(td_module_buffer(net, "1.running_mean")), TD_F64);
        CHECK(td_forward(net, td_to_dtype(x, TD_F64)));

        CHECK_OK(td_module_to(net, td_device_get("cpu:1")));
        weight = td_module_parameter(net, "0.weight");
        CHECK_STR(td_device_name(td_tensor_device(weight)), "cpu:1");
        CHECK_STR(td_device_name(td_tensor_device(td_tensor_grad(weight))), "cpu:1");
        CHECK_STR(td_device_name(td_tensor_device(td_module_buffer(net, "1.num_batches_tracked"))),
                  "cpu:1");
        CHECK_OK(td_module_to(net, td_device_get("cpu:1")));
        CHECK(td_module_parameter(net, "0.weight") == weight);
        td_tensor *there = td_tensor_to(td_to_dtype(x, TD_F64), td_device_get("cpu:1"));
        CHECK_STR(td_device_name(td_tensor_device(td_forward(net, there))), "cpu:1");
    }
    CHECK_FAILS(td_module_to(net, td_device_get("nowhere")), TD_ERR_INVALID, "nowhere");
    CHECK_FAILS(td_module_to_dtype(net, TD_I32), TD_ERR_INVALID, "i32");
    CHECK_EQ(td_module_to(NULL, td_device_get("cpu")), TD_ERR_INVALID);
    td_module_destroy(net);
}

/* ---- Text ------------------------------------------------------------------------------------------- */

static void check_text(td_module *module, const char *text)
{
    td_bytes bytes = td_module_text(module);
    CHECK_STR(bytes.data, text);
    CHECK_EQ(bytes.size, strlen(text));
    td_bytes_free(&bytes);
    td_module_destroy(module);
}

TEST(text_is_that_of_pytorch)
{
    check_text(td_sequential(td_linear(3, 4), td_sequential(td_relu(), td_gelu(), NULL), NULL),
               "Sequential(\n"
               "  (0): Linear(in_features=3, out_features=4, bias=True)\n"
               "  (1): Sequential(\n"
               "    (0): ReLU()\n"
               "    (1): GELU(approximate='none')\n"
               "  )\n"
               ")");
    check_text(td_conv2d(1, 10, 5), "Conv2d(1, 10, kernel_size=(5, 5), stride=(1, 1))");
    check_text(
        td_conv2d_with(4, 6, 3, 5,
                       &(td_conv2d_options){
                           .padding = {1, 2}, .dilation = {2, 1}, .groups = 2, .no_bias = true}),
        "Conv2d(4, 6, kernel_size=(3, 5), stride=(1, 1), padding=(1, 2), dilation=(2, 1), groups=2, "
        "bias=False)");
    check_text(td_max_pool2d(2),
               "MaxPool2d(kernel_size=2, stride=2, padding=0, dilation=1, ceil_mode=False)");
    check_text(td_avg_pool2d_with(2, 3, NULL),
               "AvgPool2d(kernel_size=(2, 3), stride=(2, 3), padding=0)");
    check_text(td_adaptive_avg_pool2d(1, 2), "AdaptiveAvgPool2d(output_size=(1, 2))");
    check_text(td_batch_norm2d(3), "BatchNorm2d(3, eps=1e-05, momentum=0.1, affine=True, "
                                   "track_running_stats=True)");
    check_text(td_layer_norm(8), "LayerNorm((8,), eps=1e-05, elementwise_affine=True)");
    check_text(td_layer_norm_with((const int64_t[]){2, 3}, 2, NULL),
               "LayerNorm((2, 3), eps=1e-05, elementwise_affine=True)");
    check_text(td_dropout(0.25), "Dropout(p=0.25, inplace=False)");
    check_text(td_embedding_with(5, 2, &(td_embedding_options){.padding = true}),
               "Embedding(5, 2, padding_idx=0)");
    check_text(td_log_softmax(-1), "LogSoftmax(dim=-1)");
    check_text(td_flatten(), "Flatten(start_dim=1, end_dim=-1)");
    check_text(td_sequential(NULL), "Sequential()");
    check_text(NULL, "NULL");
    td_module *relu = td_relu();
    FILE *file = tmpfile();
    CHECK(file);
    CHECK_OK(td_module_print(relu, file));
    CHECK_EQ(ftell(file), 7);
    fclose(file);
    CHECK_FAILS(td_module_print(relu, NULL), TD_ERR_SYSTEM, "written");
    td_module_destroy(relu);
}

/* ---- User-defined modules ---------------------------------------------------------------------------- */

struct scale {
    double factor;
    int *alive; /* how many of them there are */
};

static td_tensor *scale_forward(td_module *self, td_tensor *const *inputs, int count)
{
    const struct scale *scale = td_module_data(self);
    td_tensor *sum = inputs[0];
    for (int i = 1; i < count; i++)
        sum = td_add(sum, inputs[i]);
    sum = td_add(td_mul(sum, td_param(self, 0)), td_buffer(self, 0));
    return td_mul_scalar(sum, scale->factor);
}

static void scale_free(void *data)
{
    struct scale *scale = data;
    if (scale->alive)
        --*scale->alive;
}

static td_status scale_clone(void *data, const void *from)
{
    (void)from;
    struct scale *scale = data;
    if (scale->factor < 0)
        return TD_ERR_STATE;
    ++*scale->alive;
    return TD_OK;
}

static const td_module_ops scale_ops = {.name = "Scale",
                                        .data_size = sizeof(struct scale),
                                        .forward = scale_forward,
                                        .free_data = scale_free,
                                        .clone_data = scale_clone};

static td_module *scale_create(double factor, int *alive)
{
    td_module *self = td_module_create(&scale_ops);
    *(struct scale *)td_module_data(self) = (struct scale){.factor = factor, .alive = alive};
    ++*alive;
    {
        TD_SCOPE;
        CHECK_OK(td_module_add_parameter(self, "weight", td_full(NULL, 0, 3, TD_F32, NULL)));
        CHECK_OK(td_module_add_buffer(self, "shift", td_full(NULL, 0, 1, TD_F32, NULL), false));
    }
    return td_module_finish(self);
}

TEST(own_modules)
{
    int alive = 0;
    td_module *self = scale_create(2, &alive);
    {
        TD_SCOPE;
        td_tensor *x = td_ones((const int64_t[]){2}, 1, TD_F32, NULL);
        CHECK(td_item(td_sum(td_forward_with(self, (td_tensor *[]){x, x, x}, 3))) == 40);
        CHECK(!td_forward_with(self, (td_tensor *[]){x, NULL, x}, 3));
        CHECK(!td_forward_with(self, &x, 0));
        CHECK_CONTAINS(td_last_error(), "at least one input");
    }
    td_state *state = td_module_state(self), *buffers = td_module_buffers(self);
    CHECK_EQ(td_state_count(state), 1); /* the buffer is not saved */
    CHECK_EQ(td_state_count(buffers), 1);
    td_module *clone = td_module_clone(self);
    CHECK_EQ(alive, 2);
    CHECK(((struct scale *)td_module_data(clone))->factor == 2);
    td_module_destroy(clone);
    CHECK_EQ(alive, 1);
    ((struct scale *)td_module_data(self))->factor = -1;
    CHECK(!td_module_clone(self));
    CHECK_EQ(alive, 1);
    td_module_destroy(self);
    CHECK_EQ(alive, 0);
    td_state_destroy(buffers);
    td_state_destroy(state);
}

static const td_module_ops bare_ops = {.name = "Bare"};
static const td_module_ops owner_ops = {
    .name = "Owner", .data_size = sizeof(struct scale), .free_data = scale_free};

TEST(failures_are_kept_until_finish)
{
    td_tensor *tensor = td_zeros((const int64_t[]){2}, 1, TD_F32, NULL);
    td_tensor *integers = td_zeros((const int64_t[]){2}, 1, TD_I64, NULL);
    td_module *self = td_module_create(&bare_ops);
    CHECK_OK(td_module_add_parameter(self, "a", tensor));
    CHECK_FAILS(td_module_add_parameter(self, "a", tensor), TD_ERR_INVALID, "\"a\" already");
    CHECK_FAILS(td_module_add_buffer(self, "a", integers, true), TD_ERR_INVALID, "\"a\" already");
    CHECK_FAILS(td_module_add_child(self, "x.y", td_relu()), TD_ERR_INVALID, "x.y");
    CHECK_FAILS(td_module_add_buffer(self, "", tensor, true), TD_ERR_INVALID, "empty");
    CHECK_FAILS(td_module_add_parameter(self, "i", integers), TD_ERR_INVALID, "i64");
    CHECK_EQ(td_module_add_child(self, "b", NULL), TD_ERR_INVALID);
    CHECK_OK(td_module_add_buffer(self, "c", integers, true));
    CHECK(!td_forward(self, tensor));
    CHECK(!td_module_finish(self));
    CHECK_CONTAINS(td_last_error(), "\"a\" already"); /* the first of them */

    CHECK_FAILS(td_module_create(NULL) ? TD_OK : TD_ERR_INVALID, TD_ERR_INVALID, "NULL");
    CHECK(!td_module_finish(NULL));
    CHECK_EQ(td_module_add_child(NULL, "a", td_relu()), TD_ERR_INVALID);
    CHECK(!td_module_new_parameter(NULL, "a", NULL, 0, TD_F32));

    self = td_module_create(&bare_ops);
    CHECK(!td_forward(self, tensor));
    CHECK_CONTAINS(td_last_error(), "no forward");
    CHECK(!td_module_new_parameter(self, "w", (const int64_t[]){-1}, 1, TD_F32));
    td_module *outer = td_module_create(&bare_ops);
    CHECK_FAILS(td_module_add_child(outer, "inner", self), TD_ERR_INVALID, "-1");
    td_module_destroy(outer);

    self = td_module_create(&owner_ops);
    CHECK(!td_module_clone(self));
    CHECK_CONTAINS(td_last_error(), "Owner");
    td_module_destroy(self);
    td_tensor_release(integers);
    td_tensor_release(tensor);
}

TEST(children_are_replaced)
{
    td_module *net = small();
    CHECK_OK(td_module_replace_child(net, 1, td_identity()));
    CHECK_STR(td_module_ops_of(td_module_find(net, "1"))->name, "Identity");
    CHECK_FAILS(td_module_replace_child(net, 9, td_identity()), TD_ERR_INVALID, "9");
    CHECK_FAILS(td_module_replace_child(net, 0, td_child(net, 1)), TD_ERR_INVALID, "already");
    CHECK_FAILS(td_module_replace_child(td_child(net, 4), 0, net), TD_ERR_INVALID, "already");
    CHECK_FAILS(td_module_add_child(td_child(net, 4), "loop", net), TD_ERR_INVALID, "already");
    CHECK_EQ(td_module_replace_child(net, 0, NULL), TD_ERR_INVALID);
    td_module_destroy(td_child(net, 0)); /* refused, with a line in the log */
    CHECK_EQ(td_module_parameter_count(net), 12 + 4 + 8 + 2);
    td_module_destroy(net);
}

/* The example overfits its one batch. */
TEST(the_example_runs, .deadline_s = 40)
{
    struct td_test_child child = td_test_exec(
        (const char *[]){TD_TEST_BUILD_DIR "/examples/own_module", NULL});
    if (child.status)
        FAIL("it ended with %d: %s", child.status, child.output);
    CHECK_CONTAINS(child.output, "(fc2): Linear(in_features=50, out_features=10, bias=True)");
    double first = 0, last = 0;
    CHECK_EQ(sscanf(child.output, "step 0 loss %lf", &first), 1);
    const char *end = strstr(child.output, "step  45");
    CHECK(end);
    CHECK_EQ(sscanf(end, "step 45 loss %lf", &last), 1);
    CHECK(first > 2 && last < 1);
    free(child.output);
}
