/* Tensors of accelerators in remote calls: arguments, results, references, modules, gradients and optimizers, maps of
 * devices, and devices that a worker does not have. */
#include "runner.h"
#include "toy_device.h"

#include <tandem/tandem.h>

#include <stdio.h>
#include <string.h>

enum { LARGE = 5000 }; /* elements of a tensor that a host lends */

static td_device *cpu(void)
{
    return td_device_get("cpu");
}

static td_tensor *numbers(const int64_t *shape, int ndim, const char *device)
{
    static float data[2 * LARGE];
    for (int i = 0; i < 2 * LARGE; i++)
        data[i] = (float)((i * 37 + 11) % 64) / 32 - 1;
    td_tensor *tensor = td_from_array(data, shape, ndim, TD_F32, td_device_get(device));
    CHECK(tensor);
    return tensor;
}

static void check_same(td_tensor *a, td_tensor *b)
{
    if (!a || !b)
        FAIL("%s", td_last_error());
    a = td_contiguous(td_tensor_to(td_detach(a), cpu()));
    b = td_contiguous(td_tensor_to(td_detach(b), cpu()));
    CHECK_EQ(td_tensor_nbytes(a), td_tensor_nbytes(b));
    CHECK_MEM(td_tensor_data(a), td_tensor_data(b), td_tensor_nbytes(a));
}

static void check_on(td_tensor *tensor, const char *device)
{
    CHECK(tensor);
    CHECK_STR(td_device_name(td_tensor_device(tensor)), device);
}

/* ---- Functions --------------------------------------------------------------------------------- */

static td_value *echo(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call, (void)count;
    return args[0];
}

/* The name of the device. */
static td_value *where(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call, (void)count;
    return td_value_of(td_device_name(td_tensor_device(td_value_tensor(args[0]))));
}

static td_value *twice(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call, (void)count;
    return td_value_from_tensor(td_mul_scalar(td_value_tensor(args[0]), 2));
}

/* Ones on a device of the worker. */
static td_value *ones(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call, (void)count;
    return td_value_from_tensor(
        td_full(TD_SHAPE(3), 1, TD_F32, td_device_get(td_value_text(args[0]))));
}

static td_module *make_net(const char *device)
{
    td_manual_seed(7);
    td_module *net = td_sequential(td_linear(6, 5), td_relu(), td_linear(5, 4), NULL);
    CHECK(net);
    CHECK_OK(td_module_to(net, td_device_get(device)));
    return net;
}

static td_value *net(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call, (void)count;
    return td_value_from_module(make_net(td_value_text(args[0])));
}

/* Of a module that was sent: its device, and what it makes of an input. */
static td_value *use(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call, (void)count;
    td_module *module = td_value_module(args[0]);
    return td_value_list(TD_VALUES(
        td_value_of(td_device_name(td_tensor_device(td_module_parameter(module, "0.weight")))),
        td_value_from_tensor(td_forward(module, td_value_tensor(args[1])))));
}

static void begin_with(bool has_toy, const td_rpc_options *options)
{
    char name[16];
    if (has_toy)
        CHECK_OK(toy_register());
    CHECK_OK(td_rpc_register("echo(x)", echo, NULL));
    CHECK_OK(td_rpc_register("where(x: tensor)", where, NULL));
    CHECK_OK(td_rpc_register("twice(x: tensor)", twice, NULL));
    CHECK_OK(td_rpc_register("ones(device: text)", ones, NULL));
    CHECK_OK(td_rpc_register("net(device: text)", net, NULL));
    CHECK_OK(td_rpc_register("use(net: module, x: tensor)", use, NULL));
    snprintf(name, sizeof name, "w%d", td_test_rank());
    CHECK_OK(td_init_rpc(name, options));
}

static void begin(void)
{
    begin_with(true, NULL);
}

static void end(void)
{
    CHECK_OK(td_rpc_shutdown(NULL));
}

static td_tensor *call_with(const char *to, const char *function, td_tensor *tensor)
{
    td_value *result = td_rpc_sync(to, function, TD_ARGS(tensor), NULL);
    if (!result)
        FAIL("%s: %s", function, td_last_error());
    return td_value_tensor(result);
}

static const char *where_is(const char *to, td_tensor *tensor)
{
    td_value *name = td_rpc_sync(to, "where", TD_ARGS(tensor), NULL);
    if (!name)
        FAIL("where: %s", td_last_error());
    return td_value_text(name);
}

/* ---- Arguments and results ----------------------------------------------------------------------- */

static void exchange(const char *to)
{
    static const char *devices[] = {"toy:0", "toy:1"};
    for (int i = 0; i < 2; i++) {
        TD_SCOPE;
        td_tensor *all[] = {numbers(TD_SHAPE(3), devices[i]), numbers(TD_SHAPE(0, 4), devices[i]),
                            numbers(TD_SHAPE(2, LARGE), devices[i]),
                            td_transpose(numbers(TD_SHAPE(50, 60), devices[i]), 0, 1)};
        for (int k = 0; k < 4; k++) {
            CHECK_STR(where_is(to, all[k]), devices[i]);
            td_tensor *back = call_with(to, "echo", all[k]);
            check_on(back, devices[i]);
            check_same(all[k], back);
            check_same(td_mul_scalar(all[k], 2), call_with(to, "twice", all[k]));
        }
        CHECK_OK(td_fill_(call_with(to, "echo", all[2]), 5)); /* its own memory */
        check_same(all[2], numbers(TD_SHAPE(2, LARGE), devices[i]));
    }
}

static void exchange_all(const char *backend)
{
    begin_with(true, &(td_rpc_options){
                         .rank = td_test_rank(), .world_size = td_test_size(), .backend = backend});
    if (td_test_rank() == 0) {
        exchange("w1");
        exchange("w0");
        TD_SCOPE; /* several devices in one value */
        td_value *list = td_rpc_sync(
            "w1", "echo",
            TD_ARGS(TD_ARGS(numbers(TD_SHAPE(3), "cpu"), numbers(TD_SHAPE(3), "toy:1"),
                            numbers(TD_SHAPE(LARGE), "toy:0"))),
            &(td_rpc_call_options){.copy = true});
        CHECK(list);
        check_on(td_value_tensor(td_value_at(list, 0)), "cpu");
        check_on(td_value_tensor(td_value_at(list, 1)), "toy:1");
        check_on(td_value_tensor(td_value_at(list, 2)), "toy:0");
        check_same(td_value_tensor(td_value_at(list, 2)), numbers(TD_SHAPE(LARGE), "cpu"));
    }
    end();
}

RANKS(arguments_and_results, .ranks = 2)
{
    exchange_all("native");
}

RANKS(arguments_and_results_tcp, .ranks = 2)
{
    exchange_all("tcp");
}

/* A tensor is sent as it is at the call, which waits for the device and counts that. */
RANKS(sent_as_it_is_at_the_call, .ranks = 2)
{
    begin();
    toy_set_delay(2000);
    for (int round = 0; td_test_rank() == 0 && round < 10; round++) {
        TD_SCOPE;
        td_tensor *x = td_mul_scalar(numbers(TD_SHAPE(LARGE), "toy:0"), 4);
        td_tensor *expected = td_mul_scalar(numbers(TD_SHAPE(LARGE), "cpu"), 4);
        int64_t waits = td_device_waits(td_device_get("toy:0"));
        td_future *future = td_rpc_async("w1", "echo", TD_ARGS(x), NULL);
        CHECK(future);
        CHECK(td_device_waits(td_device_get("toy:0")) > waits);
        CHECK_OK(td_fill_(x, -7));
        td_value *value = td_future_wait(future, 0);
        CHECK(value);
        check_same(td_value_tensor(value), expected);
    }
    end();
}

/* What has arrived is complete for all streams, and its memory is not used again while one of them reads it. */
RANKS(results_on_other_streams, .ranks = 2)
{
    begin();
    toy_set_delay(1000);
    if (td_test_rank() == 0) {
        td_stream *side = td_stream_create(td_device_get("toy:0"), 0);
        CHECK(side);
        TD_STREAM_SCOPE(side);
        for (int round = 0; round < 10; round++) {
            TD_SCOPE;
            td_tensor *x = numbers(TD_SHAPE(LARGE), "toy:0"), *product;
            {
                TD_SCOPE;
                product = td_tensor_retain(td_mul_scalar(call_with("w1", "twice", x), 3));
                CHECK(call_with("w1", "echo", product));
            }
            check_same(product, td_mul_scalar(numbers(TD_SHAPE(LARGE), "cpu"), 6));
            td_tensor_release(product);
        }
        td_stream_release(side);
    }
    end();
}

/* ---- References, futures and modules --------------------------------------------------------------- */

static td_value *add_one(td_future *done, void *arg)
{
    (void)arg;
    td_value *value = td_future_wait(done, 0);
    return value ? td_value_from_tensor(td_add_scalar(td_value_tensor(value), 1)) : NULL;
}

RANKS(references_and_futures, .ranks = 2)
{
    begin();
    if (td_test_rank() == 0) {
        TD_SCOPE;
        td_rref *rref = td_remote("w1", "ones", TD_ARGS("toy:1"), NULL);
        td_value *here = td_rref_to_here(rref, 0);
        if (!here)
            FAIL("%s", td_last_error());
        check_on(td_value_tensor(here), "toy:1");
        check_same(td_value_tensor(here), td_full(TD_SHAPE(3), 1, TD_F32, cpu()));
        td_rref *own = td_rref_create(td_value_from_tensor(numbers(TD_SHAPE(3), "toy:0")));
        check_on(td_value_tensor(td_rref_to_here(own, 0)), "toy:0");
        td_rref *back = td_value_rref(td_rpc_sync("w1", "echo", TD_ARGS(own), NULL));
        check_same(td_value_tensor(td_rref_to_here(back, 0)), numbers(TD_SHAPE(3), "cpu"));

        td_future *future = td_rpc_async("w1", "ones", TD_ARGS("toy:0"), NULL);
        td_value *two = td_future_wait(td_future_then(future, add_one, NULL), 0);
        CHECK(two);
        check_on(td_value_tensor(two), "toy:0");
        check_same(td_value_tensor(two), td_full(TD_SHAPE(3), 2, TD_F32, cpu()));
    }
    end();
}

RANKS(modules_as_values, .ranks = 2)
{
    begin();
    if (td_test_rank() == 0) {
        TD_SCOPE;
        td_module *here = make_net("cpu");
        td_tensor *x = numbers(TD_SHAPE(8, 6), "cpu");
        td_value *module = td_value_from_module(make_net("toy:1"));
        td_value *seen = td_rpc_sync("w1", "use", TD_ARGS(module, numbers(TD_SHAPE(8, 6), "toy:1")),
                                     NULL);
        if (!seen)
            FAIL("%s", td_last_error());
        CHECK_STR(td_value_text(td_value_at(seen, 0)), "toy:1");
        check_same(td_value_tensor(td_value_at(seen, 1)), td_forward(here, x));

        td_value *fetched = td_rpc_sync("w1", "net", TD_ARGS("toy:0"), NULL);
        CHECK(fetched);
        td_tensor *weight = td_module_parameter(td_value_module(fetched), "0.weight");
        check_on(weight, "toy:0");
        CHECK(td_tensor_requires_grad(weight));
        check_same(weight, td_module_parameter(here, "0.weight"));
        td_module_destroy(here);
    }
    end();
}

/* ---- Gradients ------------------------------------------------------------------------------------- */

/* Two steps of SGD over a remote module on `there` and a layer on `here`: the outputs after them. */
static td_tensor *train(const char *here, const char *there)
{
    TD_SCOPE;
    td_module *remote = td_remote_module("w1", "net", TD_ARGS(there), NULL);
    if (!remote)
        FAIL("%s", td_last_error());
    td_manual_seed(8);
    td_module *model = td_sequential(td_linear(6, 6), remote, NULL);
    CHECK_OK(td_module_to(td_child(model, 0), td_device_get(here)));
    td_dist_optimizer *sgd = td_dist_sgd(td_remote_parameters(model), &(td_sgd_options){.lr = 0.1});
    if (!sgd)
        FAIL("%s", td_last_error());
    td_tensor *x = numbers(TD_SHAPE(8, 6), here), *target = numbers(TD_SHAPE(8, 4), here);
    for (int step = 0; step < 2; step++) {
        TD_SCOPE;
        TD_DIST_AUTOGRAD(context);
        td_tensor *y = td_forward(model, x);
        if (!y)
            FAIL("%s", td_last_error());
        check_on(y, here);
        td_tensor *loss = td_mse_loss(y, target);
        if (td_dist_backward(context, &loss, 1, NULL))
            FAIL("%s", td_last_error());
        check_on(td_dist_autograd_grad(context, td_module_parameter(td_child(model, 0), "weight")),
                 here);
        if (td_dist_optimizer_step(sgd, context))
            FAIL("%s", td_last_error());
    }
    td_tensor *y = td_forward(model, x);
    CHECK(y);
    td_dist_optimizer_destroy(sgd);
    td_module_destroy(model);
    return td_scope_return(y);
}

RANKS(training_has_the_numbers_of_the_host, .ranks = 2)
{
    begin();
    if (td_test_rank() == 0) {
        TD_SCOPE;
        td_tensor *expected = train("cpu", "cpu");
        check_same(train("toy:0", "toy:0"), expected);
        check_same(train("toy:1", "toy:1"), expected);
    }
    end();
}

/* toy:0 here is toy:1 there, also for gradients; and w1 has no device of w0's that is not mapped. */
RANKS(training_over_mapped_devices, .ranks = 2)
{
    static const td_rpc_device_map maps[] = {{"w1", "toy:0", "toy:1"}, {0}};
    begin_with(true, &(td_rpc_options){.rank = td_test_rank(),
                                       .world_size = 2,
                                       .device_maps = td_test_rank() ? NULL : maps});
    if (td_test_rank() == 0) {
        TD_SCOPE;
        check_same(train("toy:0", "toy:1"), train("cpu", "cpu"));
    }
    end();
}

/* The other worker has no accelerator: it computes on its host, and gradients come back to the device. */
RANKS(training_with_a_worker_without_devices, .ranks = 2)
{
    static const td_rpc_device_map maps[] = {{NULL, "toy:0", "cpu"}, {0}};
    bool first = td_test_rank() == 0;
    begin_with(first, &(td_rpc_options){.rank = td_test_rank(),
                                        .world_size = 2,
                                        .device_maps = first ? maps : NULL});
    if (first) {
        TD_SCOPE;
        TD_DIST_AUTOGRAD(context);
        td_tensor *x = numbers(TD_SHAPE(LARGE), "toy:0");
        CHECK_OK(td_tensor_set_requires_grad(x, true));
        td_tensor *y = call_with("w1", "twice", x);
        check_on(y, "cpu"); /* the host's stay there */
        td_tensor *loss = td_sum(y);
        CHECK_OK(td_dist_backward(context, &loss, 1, NULL));
        td_tensor *grad = td_dist_autograd_grad(context, x);
        check_on(grad, "toy:0");
        check_same(grad, td_full(TD_SHAPE(LARGE), 2, TD_F32, cpu()));
    }
    end();
}

/* ---- Maps ------------------------------------------------------------------------------------------ */

/* Both workers cross their devices: the maps of the caller count, once. */
RANKS(maps_of_both_workers, .ranks = 2)
{
    static const td_rpc_device_map maps[] = {
        {"w1", "toy:0", "toy:1"}, {"w1", "toy:1", "toy:0"}, {NULL, "toy:0", "toy:1"}, {0}};
    begin_with(true,
               &(td_rpc_options){.rank = td_test_rank(), .world_size = 2, .device_maps = maps});
    TD_SCOPE;
    if (td_test_rank() == 0) {
        CHECK_STR(where_is("w1", numbers(TD_SHAPE(3), "toy:0")), "toy:1");
        CHECK_STR(where_is("w1", numbers(TD_SHAPE(3), "toy:1")), "toy:0");
        CHECK_STR(where_is("w1", numbers(TD_SHAPE(3), "cpu")), "cpu");
        check_on(call_with("w1", "echo", numbers(TD_SHAPE(3), "toy:0")), "toy:0");
        check_on(call_with("w1", "echo", numbers(TD_SHAPE(3), "toy:1")), "toy:1");
        td_rref *rref = td_remote("w1", "ones", TD_ARGS("toy:1"), NULL);
        check_on(td_value_tensor(td_rref_to_here(rref, 0)), "toy:0");
    } else {
        CHECK_STR(where_is("w0", numbers(TD_SHAPE(3), "toy:0")), "toy:1"); /* of all */
        CHECK_STR(where_is("w0", numbers(TD_SHAPE(3), "toy:1")), "toy:1");
        check_on(call_with("w0", "echo", numbers(TD_SHAPE(3), "toy:0")), "toy:0");
    }
    end();
}

static void check_refused(const td_rpc_device_map *maps, const char *part)
{
    CHECK_EQ(td_init_rpc("w", &(td_rpc_options){.world_size = 1, .device_maps = maps}),
             TD_ERR_INVALID);
    CHECK_CONTAINS(td_last_error(), "device_maps");
    CHECK_CONTAINS(td_last_error(), part);
}

TEST(maps_that_are_refused)
{
    check_refused((td_rpc_device_map[]){{"", "toy:0", "toy:1"}, {0}}, "characters");
    check_refused((td_rpc_device_map[]){{"w1", "toy:0", NULL}, {0}}, "no name");
    check_refused((td_rpc_device_map[]){{"w1", NULL, "toy:0"}, {0}}, "no name");
    check_refused((td_rpc_device_map[]){{NULL, "toy:x", "toy:0"}, {0}}, "toy:x");
    check_refused((td_rpc_device_map[]){{NULL, "cpu", "toy:0"}, {0}}, "host");
    check_refused((td_rpc_device_map[]){{"b", "toy:0", "toy:1"}, {"b", "toy:0", "toy:2"}, {0}},
                  "toy:0 to toy:2 for \"b\"");
    check_refused((td_rpc_device_map[]){{NULL, "toy:0", "toy:1"}, {NULL, "toy:1", "toy:1"}, {0}},
                  "toy:1 to toy:1 for all workers");
}

/* ---- Devices that are not there -------------------------------------------------------------------- */

static void check_missing(td_tensor *tensor, const char *device)
{
    CHECK(!td_rpc_sync("w1", "echo", TD_ARGS(tensor), NULL));
    CHECK_EQ(td_last_status(), TD_ERR_INVALID);
    CHECK_CONTAINS(td_last_error(), device);
    CHECK_CONTAINS(td_last_error(), "worker \"w1\" does not have");
    CHECK_CONTAINS(td_last_error(), "device_maps");
}

RANKS(a_device_that_the_worker_does_not_have, .ranks = 2)
{
    static const td_rpc_device_map maps[] = {{NULL, "toy:1", "toy:9"}, {0}};
    bool first = td_test_rank() == 0;
    begin_with(first, &(td_rpc_options){.rank = td_test_rank(),
                                        .world_size = 2,
                                        .device_maps = first ? maps : NULL});
    for (int round = 0; first && round < 3; round++) {
        TD_SCOPE;
        check_missing(numbers(TD_SHAPE(3), "toy:0"), "toy:0");
        check_missing(numbers(TD_SHAPE(LARGE), "toy:1"), "toy:9"); /* as the map says */
        check_same(call_with("w1", "twice", numbers(TD_SHAPE(LARGE), "cpu")),
                   td_mul_scalar(numbers(TD_SHAPE(LARGE), "cpu"), 2));
    }
    end();
}

RANKS(a_device_that_the_caller_does_not_have, .ranks = 2)
{
    bool first = td_test_rank() == 0;
    begin_with(!first, NULL);
    if (first) {
        TD_SCOPE;
        CHECK(!td_rpc_sync("w1", "ones", TD_ARGS("toy:1"), NULL));
        CHECK_EQ(td_last_status(), TD_ERR_INVALID);
        CHECK_CONTAINS(td_last_error(), "toy:1");
        CHECK_CONTAINS(td_last_error(), "worker \"w0\" does not have");
        CHECK_CONTAINS(td_last_error(), "device_maps");
        CHECK(td_rpc_sync("w1", "ones", TD_ARGS("cpu"), NULL));
    }
    end();
}

/* A failure of the device in the copy is the call's, at either end. */
RANKS(a_device_that_fails, .ranks = 2)
{
    begin();
    if (td_test_rank() == 0) {
        TD_SCOPE;
        td_tensor *x = numbers(TD_SHAPE(3), "toy:0");
        CHECK_OK(td_device_synchronize(td_device_get("toy:0")));
        toy_fail_copy(0, 1, TOY_AT_LAUNCH);
        CHECK(!td_rpc_sync("w1", "echo", TD_ARGS(x), NULL));
        toy_fail_copy(0, 2, TOY_AT_LAUNCH); /* of the result */
        CHECK(!td_rpc_sync("w1", "echo", TD_ARGS(x), NULL));
        CHECK_CONTAINS(td_last_error(), "w1");
        check_same(call_with("w1", "echo", x), x);
    }
    end();
}
