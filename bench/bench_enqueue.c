/* Measures what an operator costs the host on a device: it enqueues small ones without waiting.
 *
 *     bench_enqueue [--device NAME] [--count N]
 *
 * The median of 20 rounds of N operators (100: a queue of a device is not full before), in microseconds an operator;
 * "mlp" is a forward and backward pass of two layers, 11 kernels, and "graph" the same as one launch. On CUDA what the driver
 * alone takes comes first: "launch" is a kernel that does nothing, "args" one with as many bytes of arguments as an addition
 * has, "handle" the same by a CUkernel; "get" and "set" read and set the context. An operator is one "get" and one "args".
 * Without the time of a driver, with that of the tests:
 *
 *     EMULATED_CUDA_NULL=1 TANDEM_CUDA_SO=build/release/tests/cuda/emulated_cuda.so TANDEM_CUBLASLT_SO=none \
 *         bench_enqueue --device cuda
 *
 * valgrind --tool=callgrind counts the instructions of that, the same ones each time. */
#include "bare_launches.h"
#include "measure.h"

#include <tandem/tandem.h>

#include <time.h>

enum { ROUNDS = 20, SIZE = 64 };

struct operands {
    td_device *device;
    td_tensor *a, *b, *weight, *bias;
    td_module *net;
    td_graph *graph;
};

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

static td_status add(void *arg)
{
    struct operands *o = arg;
    td_tensor *y = td_add(o->a, o->b);
    td_tensor_release(y);
    return y ? TD_OK : td_last_status();
}

static td_status relu(void *arg)
{
    struct operands *o = arg;
    td_tensor *y = td_f_relu(o->a);
    td_tensor_release(y);
    return y ? TD_OK : td_last_status();
}

static td_status linear(void *arg)
{
    struct operands *o = arg;
    td_tensor *y = td_f_linear(o->a, o->weight, o->bias);
    td_tensor_release(y);
    return y ? TD_OK : td_last_status();
}

static td_status mlp(void *arg)
{
    struct operands *o = arg;
    TD_SCOPE;
    td_status status = td_module_zero_grad(o->net);
    return status ? status : td_backward(td_sum(td_forward(o->net, o->a)));
}

static td_status graph(void *arg)
{
    struct operands *o = arg;
    return o->graph ? td_graph_launch(o->graph) : td_graph_capture(o->device, mlp, o, &o->graph);
}

static void measure(const char *name, td_status (*call)(void *), void *arg, td_device *device,
                    int count)
{
    int64_t times[ROUNDS];
    for (int i = 0; i < 3; i++)
        bench_check(call(arg));
    for (int round = 0; round < ROUNDS; round++) {
        bench_check(td_device_synchronize(device));
        int64_t start = now_ns();
        for (int i = 0; i < count; i++)
            bench_check(call(arg));
        times[round] = now_ns() - start;
    }
    bench_sort(times, ROUNDS);
    printf("%-8s %8.2f us\n", name, (double)bench_at(times, ROUNDS, 0.5) / count / 1e3);
}

static void measure_driver(td_device *device, int count)
{
    const char *why;
    struct bare_driver *driver = bare_open(&why);
    if (!driver) {
        printf("%-8s skipped: %s\n", "launch", why);
        return;
    }
    measure("launch", bare_launch, driver, device, count);
    measure("args", bare_launch_args, driver, device, count);
    measure("handle", bare_launch_handle, driver, device, count);
    measure("get", bare_get_context, driver, device, count);
    measure("set", bare_set_context, driver, device, count);
}

int main(int argc, char **argv)
{
    const char *name = "cpu";
    int count = 100;
    for (int i = 1; i < argc; i += 2) {
        if (!strcmp(argv[i], "--device") && i + 1 < argc)
            name = argv[i + 1];
        else if (!strcmp(argv[i], "--count"))
            count = bench_number(argv[i], argv[i + 1], 1);
        else
            bench_die("usage: bench_enqueue [--device NAME] [--count N]");
    }
    struct operands o = {.device = td_device_get(name)};
    bench_check(td_set_device(o.device));
    o.a = td_ones(TD_SHAPE(SIZE, SIZE), TD_F32, NULL);
    o.b = td_ones(TD_SHAPE(SIZE, SIZE), TD_F32, NULL);
    o.weight = td_ones(TD_SHAPE(SIZE, SIZE), TD_F32, NULL);
    o.bias = td_ones(TD_SHAPE(SIZE), TD_F32, NULL);
    o.net = td_sequential(td_linear(SIZE, SIZE), td_relu(), td_linear(SIZE, SIZE), NULL);
    if (!o.a || !o.b || !o.weight || !o.bias || !o.net)
        bench_die("%s", td_last_error());
    if (!strncmp(td_device_name(o.device), "cuda", 4))
        measure_driver(o.device, count);
    measure("add", add, &o, o.device, count);
    measure("relu", relu, &o, o.device, count);
    measure("linear", linear, &o, o.device, count);
    measure("mlp", mlp, &o, o.device, count);
    measure("graph", graph, &o, o.device, count);
    td_graph_destroy(o.graph);
    td_module_destroy(o.net);
    td_tensor_release(o.a);
    td_tensor_release(o.b);
    td_tensor_release(o.weight);
    td_tensor_release(o.bias);
    return 0;
}
