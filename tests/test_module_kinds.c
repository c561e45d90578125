/* Modules that are sent: every kind arrives with the same text, state and results; kinds of a program's own; modules
 * that cannot be sent; and one worker that returns a module to another. */
#include "host_data.h"
#include "runner.h"

#include "module_samples.h"

#include <tandem/tandem.h>

#include <string.h>

/* ---- The same module --------------------------------------------------------------------------- */

static void check_same_tensor(const td_tensor *a, const td_tensor *b)
{
    CHECK(a && b);
    CHECK_EQ(td_tensor_dtype(a), td_tensor_dtype(b));
    CHECK_EQ(td_tensor_ndim(a), td_tensor_ndim(b));
    for (int d = 0; d < td_tensor_ndim(a); d++)
        CHECK_EQ(td_tensor_size(a, d), td_tensor_size(b, d));
    CHECK_MEM(host_data(a), host_data(b),
              (size_t)td_tensor_numel(a) * td_dtype_size(td_tensor_dtype(a)));
}

static void check_same_state(td_state *a, td_state *b)
{
    CHECK(a && b);
    CHECK_EQ(td_state_count(a), td_state_count(b));
    for (int i = 0; i < td_state_count(a); i++) {
        CHECK_STR(td_state_name(a, i), td_state_name(b, i));
        check_same_tensor(td_state_tensor(a, i), td_state_tensor(b, i));
        CHECK_EQ(td_tensor_requires_grad(td_state_tensor(a, i)),
                 td_tensor_requires_grad(td_state_tensor(b, i)));
    }
    td_state_destroy(a);
    td_state_destroy(b);
}

static void check_same(td_module *a, td_module *b)
{
    td_bytes one = td_module_text(a), two = td_module_text(b);
    CHECK_EQ(one.size, two.size);
    CHECK_MEM(one.data, two.data, one.size);
    td_bytes_free(&one);
    td_bytes_free(&two);
    check_same_state(td_module_state(a), td_module_state(b));
    check_same_state(td_module_parameters(a), td_module_parameters(b));
    check_same_state(td_module_buffers(a), td_module_buffers(b));
}

/* The same bits of the result, and of the gradients in train mode. */
static void check_same_forward(td_module *a, td_module *b, td_tensor *x)
{
    td_module *both[] = {a, b};
    td_tensor *y[2];
    TD_SCOPE;
    for (int i = 0; i < 2; i++) {
        td_manual_seed(5);
        y[i] = td_forward(both[i], x);
        CHECK(y[i]);
        if (td_tensor_requires_grad(y[i]))
            CHECK_OK(td_backward(td_sum(td_mul(y[i], y[i]))));
    }
    check_same_tensor(y[0], y[1]);
    td_state *parameters[] = {td_module_parameters(a), td_module_parameters(b)};
    for (int i = 0; i < td_state_count(parameters[0]); i++) {
        td_tensor *grad = td_tensor_grad(td_state_tensor(parameters[0], i));
        if (grad)
            check_same_tensor(grad, td_tensor_grad(td_state_tensor(parameters[1], i)));
    }
    td_state_destroy(parameters[0]);
    td_state_destroy(parameters[1]);
}

static void train(td_module *module, enum sample_input input)
{
    for (int step = 0; step < 3; step++) {
        TD_SCOPE;
        td_tensor *y = td_forward(module, sample_input(input));
        if (y && td_tensor_requires_grad(y))
            CHECK_OK(td_backward(td_sum(y)));
    }
    td_state *parameters = td_module_parameters(module);
    for (int i = 0; i < td_state_count(parameters); i++) {
        TD_NO_GRAD;
        CHECK_OK(td_mul_scalar_(td_state_tensor(parameters, i), 1.25));
        CHECK_OK(td_tensor_zero_grad(td_state_tensor(parameters, i)));
    }
    td_state_destroy(parameters);
}

TEST(every_kind_arrives_as_it_was_sent, .deadline_s = 60)
{
    td_manual_seed(1);
    for (int i = 0; i < sample_count; i++) {
        TD_SCOPE;
        const struct sample *sample = &samples[i];
        td_module *module = sample->make();
        CHECK(module);
        train(module, sample->input);
        td_module *copy = send_module(module);
        if (!copy)
            FAIL("%s: %s", sample->name, td_last_error());
        check_same(module, copy);
        td_tensor *x = sample_input(sample->input);
        for (int mode = 0; mode < 2 && strcmp(sample->name, "ModuleList") != 0; mode++) {
            td_module_train(module, mode == 0);
            td_module_train(copy, mode == 0);
            check_same_forward(module, copy, x);
            check_same(module, copy);
        }
        td_module *again = send_module(copy); /* in eval mode */
        CHECK(again);
        CHECK_EQ(td_module_is_training(again), td_module_is_training(copy));
        check_same(module, again);
        td_module_destroy(again);
        td_module_destroy(copy);
        td_module_destroy(module);
    }
}

TEST(modes_flags_and_dtypes_are_kept)
{
    td_module *net = td_sequential(td_linear(6, 4), td_dropout(0.5), td_linear(4, 2), NULL);
    td_module_eval(td_child(net, 1));
    CHECK_OK(td_module_requires_grad_(td_child(net, 0), false));
    CHECK_OK(td_module_to_dtype(td_child(net, 2), TD_F64));
    td_module *copy = send_module(net);
    CHECK(copy);
    check_same(net, copy);
    CHECK(td_module_is_training(copy) && !td_module_is_training(td_child(copy, 1)));
    CHECK(!td_tensor_requires_grad(td_module_parameter(copy, "0.weight")));
    CHECK(td_tensor_requires_grad(td_module_parameter(copy, "2.bias")));
    CHECK_EQ(td_tensor_dtype(td_module_parameter(copy, "2.bias")), TD_F64);
    td_module_destroy(copy);
    td_module_destroy(net);
}

TEST(shared_tensors_stay_shared)
{
    td_module *net = td_sequential(td_linear(4, 4), td_linear(4, 4), NULL);
    CHECK_OK(td_module_set_tensor(net, "1.weight", td_module_parameter(net, "0.weight")));
    td_module *copy = send_module(net);
    CHECK(copy);
    td_tensor *weight = td_module_parameter(copy, "0.weight");
    CHECK(weight != td_module_parameter(net, "0.weight"));
    CHECK(weight == td_module_parameter(copy, "1.weight"));
    CHECK_EQ(td_module_parameter_count(copy), td_module_parameter_count(net));
    {
        TD_NO_GRAD;
        CHECK_OK(td_fill_(weight, 3)); /* its own memory */
    }
    CHECK(*(const float *)host_data(td_module_parameter(net, "0.weight")) != 3);
    td_module_destroy(copy);
    td_module_destroy(net);
}

/* ---- Kinds of a program's own ------------------------------------------------------------------- */

static td_tensor *own_forward(td_module *self, td_tensor *const *inputs, int count)
{
    (void)self, (void)count;
    return inputs[0];
}

TEST(a_kind_is_registered_once)
{
    static const td_module_ops own = {.name = "Own", .forward = own_forward};
    static const td_module_ops other = {.name = "Own", .forward = own_forward};
    static const td_module_ops linear = {.name = "Linear", .forward = own_forward};
    static const td_module_ops data = {.name = "Data", .data_size = 8, .forward = own_forward};
    static const td_module_ops nameless = {.name = "", .forward = own_forward};
    static const td_module_ops newer = {.name = "Newer", .reserved = {(void *)1}};
    CHECK_OK(td_register_module(&own));
    CHECK_OK(td_register_module(&own));
    CHECK_FAILS(td_register_module(&other), TD_ERR_STATE, "\"Own\"");
    CHECK_FAILS(td_register_module(&linear), TD_ERR_STATE, "\"Linear\"");
    CHECK_FAILS(td_register_module(&data), TD_ERR_INVALID, "save_options and load_options");
    CHECK_FAILS(td_register_module(&nameless), TD_ERR_INVALID, "name");
    CHECK_FAILS(td_register_module(&newer), TD_ERR_INVALID, "reserved[0]");
    CHECK_FAILS(td_register_module(NULL), TD_ERR_INVALID, "NULL");
    CHECK(!td_module_create(&newer));

    td_module *impostor = td_module_create(&other); /* the name is that of another table */
    CHECK(!send_module(impostor));
    CHECK_CONTAINS(td_last_error(), "\"Own\"");
    td_module_destroy(impostor);
}

static td_status add_text_option(const td_module *module, td_state *options)
{
    TD_SCOPE;
    (void)module;
    return td_state_add(options, "weights", td_zeros(TD_SHAPE(2), TD_F32, NULL));
}

static td_status save_nothing(const td_module *module, td_state *options)
{
    (void)module, (void)options;
    return TD_OK;
}

static td_status refuse_options(td_module *module, const td_state *options)
{
    (void)module, (void)options;
    return TD_ERR_INVALID;
}

TEST(modules_that_cannot_be_sent)
{
    static const td_module_ops unknown = {.name = "Unknown", .forward = own_forward};
    static const td_module_ops odd = {
        .name = "Odd", .save_options = add_text_option, .load_options = refuse_options};
    td_module *net = td_sequential(td_relu(), td_module_create(&unknown), NULL);
    CHECK(!send_module(net));
    CHECK_CONTAINS(td_last_error(), "\"Unknown\" cannot be sent: td_register_module()");
    td_module_destroy(net);

    CHECK_OK(td_register_module(&odd));
    net = td_module_create(&odd);
    CHECK(!send_module(net));
    CHECK_CONTAINS(td_last_error(), "\"weights\", which is not a number");
    td_module_destroy(net);

    static const td_module_ops silent = {
        .name = "Silent", .save_options = save_nothing, .load_options = refuse_options};
    CHECK_OK(td_register_module(&silent));
    net = td_module_create(&silent);
    CHECK(!send_module(net));
    CHECK_CONTAINS(td_last_error(), "load_options of a Silent has failed");
    CHECK_EQ(td_last_status(), TD_ERR_INVALID);
    td_module_destroy(net);

    net = td_data_parallel(td_linear(2, 2), &(td_data_parallel_options){.device_count = 2});
    CHECK(net && !send_module(net));
    CHECK_CONTAINS(td_last_error(), "a DataParallel module cannot be sent");
    td_module_destroy(net);

    net = td_relu();
    for (int depth = 1; depth < 64; depth++)
        net = td_sequential(net, NULL);
    td_module *copy = send_module(net);
    CHECK(copy);
    td_module_destroy(copy);
    net = td_sequential(net, NULL);
    CHECK(!send_module(net));
    CHECK_CONTAINS(td_last_error(), "nested 64 deep");
    td_module_destroy(net);
}

RANKS(wrappers_of_a_group_cannot_be_sent, .ranks = 1)
{
    CHECK_OK(td_init_process_group(NULL));
    td_module *ddp = td_ddp(td_linear(2, 2), NULL);
    CHECK(ddp && !send_module(ddp));
    CHECK_CONTAINS(td_last_error(), "a DistributedDataParallel module cannot be sent");
    td_module *inside = send_module(td_module_find(ddp, "module"));
    CHECK(inside);
    td_module_destroy(inside);
    td_module_destroy(ddp);
    td_module *norm = td_sync_batch_norm(3, NULL, NULL);
    CHECK(norm && !send_module(norm));
    CHECK_CONTAINS(td_last_error(), "a SyncBatchNorm module cannot be sent");
    td_module_destroy(norm);
    CHECK_OK(td_destroy_process_group());
}

/* ---- From worker to worker ---------------------------------------------------------------------- */

/* An object with a module, which get_model() returns. */
static void *holder_create(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call, (void)args, (void)count;
    td_manual_seed(77);
    return td_sequential(td_linear_with(2, 1, &(td_linear_options){.no_bias = true}),
                         td_batch_norm1d(1), NULL);
}

static void holder_destroy(void *object)
{
    td_module_destroy(object);
}

static td_value *holder_get_model(td_rpc_call *call, td_value *const *args, int count)
{
    (void)args, (void)count;
    return td_value_from_module(td_module_clone(td_child(td_rpc_call_self(call), 0)));
}

static td_value *make_large(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call, (void)args, (void)count;
    td_manual_seed(78);
    return td_value_from_module(td_sequential(td_linear(16, 4096), td_batch_norm1d(4096), NULL));
}

static td_value *make_unregistered(td_rpc_call *call, td_value *const *args, int count)
{
    static const td_module_ops only_here = {.name = "OnlyHere", .forward = own_forward};
    (void)call, (void)args, (void)count;
    CHECK_OK(td_register_module(&only_here));
    return td_value_from_module(td_module_create(&only_here));
}

static td_value *weigh(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call, (void)count;
    return td_value_from_int(td_module_parameter_count(td_value_module(args[0])));
}

static void use_remote_modules(void)
{
    TD_SCOPE;
    td_rref *holder = td_remote("b", "Holder", TD_NO_ARGS, NULL);
    td_module *fc = td_value_module(td_rref_sync(holder, "get_model", TD_NO_ARGS, NULL));
    CHECK(fc);
    td_module *expected = holder_create(NULL, NULL, 0);
    check_same(td_child(expected, 0), fc);
    check_same_forward(td_child(expected, 0), fc, td_randn(TD_SHAPE(8, 2), TD_F32, NULL));
    td_module_destroy(expected);

    /* Tensors that the owner lends: train mode changes the buffers, and an optimizer the parameters, here only. */
    for (int round = 0; round < 2; round++) {
        td_module *large = td_value_module(td_rpc_sync("b", "make_large", TD_NO_ARGS, NULL));
        CHECK(large);
        td_manual_seed(78);
        expected = td_sequential(td_linear(16, 4096), td_batch_norm1d(4096), NULL);
        check_same(expected, large);
        td_tensor *x = td_randn(TD_SHAPE(8, 16), TD_F32, NULL);
        check_same_forward(expected, large, x);
        check_same(expected, large);
        td_optimizer *one = td_sgd(expected, &(td_sgd_options){.lr = 0.1}),
                     *two = td_sgd(large, &(td_sgd_options){.lr = 0.1});
        CHECK_OK(td_optimizer_step(one));
        CHECK_OK(td_optimizer_step(two));
        check_same(expected, large);
        td_optimizer_destroy(one);
        td_optimizer_destroy(two);
        td_module_destroy(expected);
    }

    int64_t count = 0;
    td_value *number = td_rpc_sync("b", "weigh", TD_ARGS(td_linear(3, 2)), NULL); /* and to it */
    CHECK_OK(td_value_int(number, &count));
    CHECK_EQ(count, 8);
    CHECK(!td_rpc_sync("b", "make_unregistered", TD_NO_ARGS, NULL));
    CHECK_CONTAINS(td_last_error(), "\"OnlyHere\"");
    CHECK(td_rpc_sync("b", "make_large", TD_NO_ARGS, NULL)); /* the connection goes on */
}

RANKS(a_worker_returns_a_module, .host_only = "the other worker draws its numbers on the host",
      .ranks = 2, .deadline_s = 60)
{
    static const td_rpc_method methods[] = {{"get_model()", holder_get_model}, {0}};
    CHECK_OK(td_rpc_register_class(&(td_rpc_class){.signature = "Holder()",
                                                   .create = holder_create,
                                                   .destroy = holder_destroy,
                                                   .methods = methods}));
    CHECK_OK(td_rpc_register("make_large()", make_large, NULL));
    CHECK_OK(td_rpc_register("make_unregistered()", make_unregistered, NULL));
    CHECK_OK(td_rpc_register("weigh(net: module)", weigh, NULL));
    CHECK_OK(td_init_rpc(td_test_rank() ? "b" : "a", NULL));
    if (td_test_rank() == 0)
        use_remote_modules();
    CHECK_OK(td_rpc_shutdown(NULL));
}
