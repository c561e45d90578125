/* Times td_scaled_dot_product_attention() and its gradients on a device.
 *
 *     bench_attention [--device cuda] [--batch N] [--heads H] [--length L] [--keys S] [--width D] [--bf16 | --f16] [--causal]
 *                     [--ms MS]
 *
 * q, k and v are the heads of one projection [N, L, 3 H D], as in a transformer, unless --keys is another length. Forward
 * is the call with gradients wanted, backward is td_backward() from a gradient of y to that of the projection. Each is
 * enqueued in samples of about 20 ms, which end when the device is done. TFLOP/s count the products that are needed: two
 * forward, five backward, and half of them where attention is causal. */
#include "measure.h"

#include <tandem/tandem.h>

#include <time.h>

struct settings {
    const char *device;
    int batch, heads, length, keys, width, ms;
    td_dtype dtype;
    bool causal;
};

static td_device *device;
static td_tensor *projection, *q, *k, *v, *grad_y;

static double now_ms(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e3 + (double)time.tv_nsec / 1e6;
}

static td_tensor *numbers_of(const int64_t *shape, int ndim, td_dtype dtype)
{
    td_tensor *x = td_randn(shape, ndim, TD_F32, NULL), *y = td_to_dtype(x, dtype);
    if (!y)
        bench_die("%s", td_last_error());
    td_tensor_release(x);
    return y;
}

/* [N, H, length, D], with the heads of a position side by side. */
static td_tensor *operand(const struct settings *settings, int length)
{
    td_tensor *x = numbers_of(TD_SHAPE(settings->batch, length, settings->heads, settings->width),
                              settings->dtype);
    td_tensor *heads = td_transpose(x, 1, 2);
    td_tensor_release(x);
    return heads;
}

/* The leaves: one projection, or q, k and v. */
static void set_up(const struct settings *settings)
{
    device = td_device_get(settings->device);
    if (!device)
        bench_die("%s", td_last_error());
    TD_DEVICE_SCOPE(device);
    td_manual_seed(1);
    grad_y = operand(settings, settings->length);
    if (settings->keys == settings->length) {
        projection = numbers_of(
            TD_SHAPE(settings->batch, settings->length, 3 * settings->heads * settings->width),
            settings->dtype);
        bench_check(td_tensor_set_requires_grad(projection, true));
        return;
    }
    q = operand(settings, settings->length);
    k = operand(settings, settings->keys);
    v = operand(settings, settings->keys);
    td_tensor *all[] = {q, k, v};
    for (int i = 0; i < 3; i++)
        bench_check(td_tensor_set_requires_grad(all[i], true));
}

static td_tensor *forward(const struct settings *settings)
{
    td_tensor *x[] = {q, k, v};
    if (projection)
        bench_check(td_split_heads(projection, 3, settings->heads, x));
    td_tensor *y = td_scaled_dot_product_attention(
        x[0], x[1], x[2], &(td_attention_options){.causal = settings->causal});
    if (!y)
        bench_die("%s", td_last_error());
    return y;
}

static void zero_grads(void)
{
    td_tensor *all[] = {projection, q, k, v};
    for (int i = 0; i < 4; i++)
        if (all[i])
            bench_check(td_tensor_set_grad(all[i], NULL));
}

enum pass { FORWARD, BACKWARD, PASSES };

/* Milliseconds of `calls` calls of each pass. All results of the forward pass exist before backward begins, so that
 * neither waits for the other. */
static void sample(const struct settings *settings, int calls, td_tensor **results, double *ms)
{
    TD_SCOPE;
    bench_check(td_device_synchronize(device));
    double start = now_ms();
    for (int i = 0; i < calls; i++)
        results[i] = forward(settings);
    bench_check(td_device_synchronize(device));
    ms[FORWARD] = now_ms() - start;
    start = now_ms();
    for (int i = 0; i < calls; i++) {
        zero_grads();
        bench_check(td_backward_from(&results[i], &grad_y, 1, NULL));
    }
    bench_check(td_device_synchronize(device));
    ms[BACKWARD] = now_ms() - start;
}

enum { MOST_CALLS = 16, MOST_SAMPLES = 1024 };

static void measure(const struct settings *settings)
{
    static int64_t samples[PASSES][MOST_SAMPLES]; /* nanoseconds of a call */
    static const char *const names[] = {"forward", "backward"};
    td_tensor *results[MOST_CALLS];
    double ms[PASSES];
    size_t count = 0;
    for (int i = 0; i < 2; i++) /* kernels are loaded, memory is reserved */
        sample(settings, 1, results, ms);
    double once = ms[FORWARD] + ms[BACKWARD];
    int calls = once > 20 ? 1 : once < 20.0 / MOST_CALLS ? MOST_CALLS : (int)(20 / once);
    for (double end = now_ms() + settings->ms;
         count < 3 || (count < MOST_SAMPLES && now_ms() < end); count++) {
        sample(settings, calls, results, ms);
        for (int pass = 0; pass < PASSES; pass++)
            samples[pass][count] = (int64_t)(ms[pass] / calls * 1e6);
    }
    double product = 2.0 * settings->batch * settings->heads * settings->length * settings->keys *
                     settings->width / (settings->causal ? 2 : 1);
    for (int pass = 0; pass < PASSES; pass++) {
        bench_sort(samples[pass], count);
        double median = (double)bench_at(samples[pass], count, 0.5);
        double least = (double)bench_at(samples[pass], count, 0);
        printf("%-9s %10.4f ms  least %10.4f ms  %8.3f TFLOP/s\n", names[pass], median / 1e6,
               least / 1e6, product * (pass == FORWARD ? 2 : 5) / median / 1e3);
    }
}

static struct settings read_settings(int argc, char **argv)
{
    struct settings settings = {.device = "cpu",
                                .batch = 4,
                                .heads = 12,
                                .length = 1024,
                                .width = 64,
                                .ms = 1000,
                                .dtype = TD_F32};
    struct {
        const char *name;
        int *value;
    } numbers[] = {{"--batch", &settings.batch},   {"--heads", &settings.heads},
                   {"--length", &settings.length}, {"--keys", &settings.keys},
                   {"--width", &settings.width},   {"--ms", &settings.ms}};
    for (int i = 1; i < argc; i++) {
        int *number = NULL;
        for (size_t n = 0; n < sizeof numbers / sizeof numbers[0]; n++)
            if (strcmp(argv[i], numbers[n].name) == 0)
                number = numbers[n].value;
        if (number)
            *number = bench_number(argv[i], argv[i + 1], 1), i++;
        else if (strcmp(argv[i], "--bf16") == 0)
            settings.dtype = TD_BF16;
        else if (strcmp(argv[i], "--f16") == 0)
            settings.dtype = TD_F16;
        else if (strcmp(argv[i], "--causal") == 0)
            settings.causal = true;
        else if (strcmp(argv[i], "--device") == 0 && argv[i + 1])
            settings.device = argv[++i];
        else
            bench_die("there is no option «%s»; usage: bench_attention [--device cuda] [--batch N] "
                      "[--heads H] [--length L] [--keys S] [--width D] [--bf16 | --f16] [--causal] "
                      "[--ms MS]",
                      argv[i]);
    }
    settings.keys = settings.keys ? settings.keys : settings.length;
    return settings;
}

int main(int argc, char **argv)
{
    struct settings settings = read_settings(argc, argv);
    set_up(&settings);
    measure(&settings);
    td_tensor *all[] = {projection, q, k, v, grad_y};
    for (int i = 0; i < 5; i++)
        td_tensor_release(all[i]);
}
