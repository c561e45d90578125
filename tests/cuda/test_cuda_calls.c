/* How often the CUDA plug-in calls the driver, counted by the emulated one: each call costs the host time, in every operator. */
#include "runner.h"

#include <tandem/tandem.h>

#include <dlfcn.h>
#include <stdlib.h>

struct counts {
    long all, launches, context, attributes, graphs, made;
};

static void *driver_symbol(const char *name)
{
    void *driver = dlopen(getenv("TANDEM_CUDA_SO"), RTLD_NOW);
    return driver ? dlsym(driver, name) : NULL;
}

static struct counts counts_now(void)
{
    long (*calls)(const char *) = (long (*)(const char *))driver_symbol("emulated_calls");
    CHECK(calls);
    return (struct counts){calls(NULL),
                           calls("cuLaunchKernel"),
                           calls("cuCtxSetCurrent"),
                           calls("cuFuncSetAttribute"),
                           calls("cuGraphLaunch"),
                           calls("cuGraphInstantiateWithFlags")};
}

struct operands {
    td_tensor *x, *weight, *bias;
    td_module *net;
};

static td_status add(void *arg)
{
    struct operands *o = arg;
    TD_SCOPE;
    return td_add(o->x, o->weight) ? TD_OK : td_last_status();
}

static td_status relu(void *arg)
{
    struct operands *o = arg;
    TD_SCOPE;
    return td_f_relu(o->x) ? TD_OK : td_last_status();
}

static td_status linear(void *arg)
{
    struct operands *o = arg;
    TD_SCOPE;
    return td_f_linear(o->x, o->weight, o->bias) ? TD_OK : td_last_status();
}

static td_status attend(void *arg)
{
    struct operands *o = arg;
    TD_SCOPE;
    return td_scaled_dot_product_attention(o->x, o->x, o->x, NULL) ? TD_OK : td_last_status();
}

static td_status train(void *arg)
{
    struct operands *o = arg;
    TD_SCOPE;
    td_status status = td_module_zero_grad(o->net);
    return status ? status : td_backward(td_sum(td_forward(o->net, o->x)));
}

static struct counts between(struct counts before, struct counts after)
{
    return (struct counts){after.all - before.all,         after.launches - before.launches,
                           after.context - before.context, after.attributes - before.attributes,
                           after.graphs - before.graphs,   after.made - before.made};
}

/* What a call does when kernels are loaded and memory is cached. */
static struct counts counts_of(td_status (*call)(void *), struct operands *operands)
{
    CHECK_OK(call(operands));
    CHECK_OK(call(operands));
    struct counts before = counts_now();
    CHECK_OK(call(operands));
    return between(before, counts_now());
}

static struct operands make_operands(const char *device, int64_t size)
{
    CHECK_OK(td_set_device(td_device_get(device)));
    return (struct operands){.x = td_ones(TD_SHAPE(size, size), TD_F32, NULL),
                             .weight = td_ones(TD_SHAPE(size, size), TD_F32, NULL),
                             .bias = td_ones(TD_SHAPE(size), TD_F32, NULL)};
}

/* Of a device that launches as ever. */
static struct operands operands_on(const char *device, int64_t size)
{
    setenv("TANDEM_CUDA_RELAUNCH", "0", 1);
    return make_operands(device, size);
}

static struct operands operands_of(int64_t size)
{
    return operands_on("cuda:0", size);
}

TEST(an_operator_asks_for_the_context_and_launches)
{
    TD_SCOPE;
    struct operands o = operands_of(64);
    td_status (*const calls[])(void *) = {add, relu, linear};
    for (int i = 0; i < 3; i++) {
        struct counts counts = counts_of(calls[i], &o);
        CHECK_EQ(counts.launches, 1);
        CHECK_EQ(counts.context, 0);
        CHECK_EQ(counts.all, 2);
    }
}

TEST(a_large_product_asks_for_the_context_and_calls_the_library)
{
    TD_SCOPE;
    struct operands o = operands_of(136); /* above 2^21 multiplications */
    struct counts counts = counts_of(linear, &o);
    CHECK_EQ(counts.launches, 0);
    CHECK_EQ(counts.all, 1);
}

TEST(a_step_of_two_layers_has_no_needless_kernel)
{
    TD_SCOPE;
    struct operands o = operands_of(64);
    o.net = td_sequential(td_linear(64, 64), td_relu(), td_linear(64, 64), NULL);
    struct counts counts = counts_of(train, &o);
    /* 2 products, a relu and a sum; and back: the sum's 1, 3 products, 2 sums for biases, a relu. */
    CHECK_EQ(counts.launches, 11);
    CHECK_EQ(counts.all, 22);
    td_module_destroy(o.net);
}

TEST(a_context_that_another_library_chose_is_changed)
{
    TD_SCOPE;
    struct operands o = operands_of(64);
    int (*choose)(void *) = (int (*)(void *))driver_symbol("cuCtxSetCurrent");
    CHECK(choose);
    CHECK_OK(add(&o));
    CHECK(!choose(NULL));
    struct counts before = counts_now();
    CHECK_OK(add(&o));
    CHECK_EQ(counts_now().context - before.context, 1);
}

TEST(large_shared_memory_is_asked_for_once)
{
    TD_SCOPE;
    struct operands o = operands_of(64);
    o.x = td_ones(TD_SHAPE(1, 1, 64, 128), TD_BF16, NULL);
    struct counts before = counts_now();
    CHECK_OK(attend(&o));
    CHECK_EQ(counts_now().attributes - before.attributes, 1);
    CHECK_EQ(counts_of(attend, &o).all, 2);
}

TEST(each_gpu_has_functions_of_its_own)
{
    TD_SCOPE;
    struct operands first = operands_on("cuda:0", 64), second = operands_on("cuda:1", 64);
    CHECK_OK(add(&first));
    CHECK_OK(add(&second));
    struct counts before = counts_now();
    CHECK_OK(add(&first));
    CHECK_OK(add(&second));
    struct counts after = counts_now();
    CHECK_EQ(after.launches - before.launches, 2);
    CHECK_EQ(after.context - before.context, 2); /* to the first one, and back */
    CHECK_EQ(after.all - before.all, 6);
    first.x = td_ones(TD_SHAPE(1, 1, 64, 128), TD_BF16, td_device_get("cuda:0"));
    second.x = td_ones(TD_SHAPE(1, 1, 64, 128), TD_BF16, td_device_get("cuda:1"));
    CHECK_OK(attend(&first));
    CHECK_OK(attend(&second));
    CHECK_OK(td_set_device(td_device_get("cuda:0")));
}

/* ---- Launches by graphs -------------------------------------------------------------------------------------------- */

enum { OFTEN = 16, MOST = 128 };

/* Adds `count` times on tensors of `size` elements, other ones each time, and returns the calls of the last time. */
static struct counts add_often(int64_t size, int count)
{
    struct counts last = {0};
    for (int i = 0; i < count; i++) {
        TD_SCOPE;
        td_tensor *x = td_full(&size, 1, i, TD_F32, NULL),
                  *y = td_full(&size, 1, size, TD_F32, NULL);
        CHECK(x && y);
        struct counts before = counts_now();
        td_tensor *sum = td_add(x, y);
        last = between(before, counts_now());
        CHECK(td_item(td_narrow(sum, 0, size - 1, 1)) == (double)(i + size));
    }
    return last;
}

TEST(an_operator_that_is_repeated_is_launched_by_a_graph)
{
    CHECK_OK(td_set_device(td_device_get("cuda:0")));
    struct counts counts = add_often(100, OFTEN - 1);
    CHECK_EQ(counts.launches, 1);
    CHECK_EQ(counts.all, 2);
    counts = add_often(100, 1);
    CHECK_EQ(counts.made, 1);
    counts = add_often(100, 3);
    CHECK_EQ(counts.launches, 0);
    CHECK_EQ(counts.graphs, 1);
    CHECK_EQ(counts.all, 3);                    /* the context, the argument and the launch */
    CHECK_EQ(add_often(100000, 1).launches, 1); /* another grid is another launch */
}

TEST(graphs_of_launches_are_limited)
{
    CHECK_OK(td_set_device(td_device_get("cuda:0")));
    struct counts before = counts_now();
    for (int64_t size = 1; size < 2 * MOST; size++)
        add_often(size * 2048, OFTEN + 2);
    CHECK_EQ(counts_now().made - before.made, MOST);
    CHECK_EQ(add_often(2 * MOST * 2048, OFTEN + 2).launches, 1);
}

static td_status add_twice(void *arg)
{
    return add(arg) ? td_last_status() : add(arg);
}

TEST(graphs_of_launches_are_not_captured)
{
    TD_SCOPE;
    struct operands o = make_operands("cuda:0", 64);
    td_graph *graph = NULL;
    for (int i = 0; i < 4 * OFTEN; i++)
        CHECK_OK(add(&o));
    struct counts before = counts_now();
    CHECK_OK(td_graph_capture(td_device_get("cuda:0"), add_twice, &o, &graph));
    struct counts found = between(before, counts_now());
    CHECK_EQ(found.launches, 2);
    CHECK_EQ(found.graphs, 1); /* the captured one, which runs */
    CHECK_EQ(counts_of(add, &o).graphs, 1);
    td_graph_destroy(graph);
}

/* Whatever of it fails, the kernel is launched as ever. */
static void launch_in_spite_of(const char *function)
{
    CHECK_OK(td_set_device(td_device_get("cuda:0")));
    CHECK_EQ(add_often(100, OFTEN - 1).launches, 1);
    setenv("EMULATED_CUDA_FAIL", function, 1);
    CHECK_EQ(add_often(100, 5).launches, 1);
    unsetenv("EMULATED_CUDA_FAIL");
}

TEST(a_launch_whose_graph_cannot_be_created)
{
    launch_in_spite_of("cuGraphCreate");
}

TEST(a_launch_whose_graph_cannot_be_made)
{
    launch_in_spite_of("cuGraphAddKernelNode_v2:1");
}

TEST(a_launch_whose_graph_is_not_ready)
{
    launch_in_spite_of("cuGraphInstantiate");
}

TEST(a_launch_whose_argument_cannot_be_replaced)
{
    launch_in_spite_of("cuGraphExecKernelNodeSetParams_v2:1");
}

TEST(launches_without_graphs)
{
    setenv("TANDEM_CUDA_RELAUNCH", "0", 1);
    CHECK_OK(td_set_device(td_device_get("cuda:0")));
    CHECK_EQ(add_often(100, OFTEN + 2).launches, 1);
}
