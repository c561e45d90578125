/* How often the CUDA plug-in calls the driver, counted by the emulated one: each call costs the host time, in every operator. */
#include "runner.h"

#include <tandem/tandem.h>

#include <dlfcn.h>
#include <stdlib.h>

struct counts {
    long all, launches, context, attributes;
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
    return (struct counts){calls(NULL), calls("cuLaunchKernel"), calls("cuCtxSetCurrent"),
                           calls("cuFuncSetAttribute")};
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

/* What a call does when kernels are loaded and memory is cached. */
static struct counts counts_of(td_status (*call)(void *), struct operands *operands)
{
    CHECK_OK(call(operands));
    CHECK_OK(call(operands));
    struct counts before = counts_now();
    CHECK_OK(call(operands));
    struct counts after = counts_now();
    return (struct counts){after.all - before.all, after.launches - before.launches,
                           after.context - before.context, after.attributes - before.attributes};
}

static struct operands operands_on(const char *device, int64_t size)
{
    CHECK_OK(td_set_device(td_device_get(device)));
    return (struct operands){.x = td_ones(TD_SHAPE(size, size), TD_F32, NULL),
                             .weight = td_ones(TD_SHAPE(size, size), TD_F32, NULL),
                             .bias = td_ones(TD_SHAPE(size), TD_F32, NULL)};
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
