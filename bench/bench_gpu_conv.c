/* Trains a convolutional network on random pictures that are on the device, and prints lines of progress as
 * examples/gpt2 does; bench/peers/torch_gpu_conv.py does the same with PyTorch, and scripts/bench-gpu runs both.
 *
 *     bench_gpu_conv conv|resnet18 [--device cuda] [--bf16] [--batch N] [--side N] [--steps N] [--log N]
 *
 * conv is that of networks.h, for pictures of 28 × 28; resnet18 takes pictures of --side (224) × --side. */
#include "measure.h"
#include "networks.h"

#include <sys/resource.h>
#include <time.h>

enum { RESNET_CLASSES = 1000 };

/* ---- ResNet-18 ------------------------------------------------------------------------------------------ */

static td_module *conv_without_bias(int64_t in, int64_t out, int64_t kernel, int64_t stride)
{
    return td_conv2d_with(in, out, kernel, kernel,
                          &(td_conv2d_options){.stride = {stride, stride},
                                               .padding = {kernel / 2, kernel / 2},
                                               .no_bias = true});
}

enum { LAYERS, NORM, SHORTCUT };

/* relu(norm(layers(x)) + shortcut(x)) */
static td_tensor *residual_forward(td_module *self, td_tensor *const *inputs, int count)
{
    (void)count;
    return td_forward_add_relu(td_child(self, NORM), td_forward(td_child(self, LAYERS), inputs[0]),
                               td_forward(td_child(self, SHORTCUT), inputs[0]));
}

static const td_module_ops residual_ops = {.name = "BasicBlock", .forward = residual_forward};

static td_module *basic_block(int64_t in, int64_t out, int64_t stride)
{
    td_module *self = td_module_create(&residual_ops);
    td_module_add_child(self, "layers",
                        td_sequential(conv_without_bias(in, out, 3, stride), td_batch_norm2d(out),
                                      td_relu(), conv_without_bias(out, out, 3, 1), NULL));
    td_module_add_child(self, "norm", td_batch_norm2d(out));
    td_module_add_child(self, "shortcut",
                        in == out ? td_identity()
                                  : td_sequential(conv_without_bias(in, out, 1, stride),
                                                  td_batch_norm2d(out), NULL));
    return td_module_finish(self);
}

static td_module *resnet18(void)
{
    td_pool2d_options halved = {.stride = {2, 2}, .padding = {1, 1}};
    return td_sequential(
        conv_without_bias(3, 64, 7, 2), td_batch_norm2d(64), td_relu(),
        td_max_pool2d_with(3, 3, &halved), basic_block(64, 64, 1), basic_block(64, 64, 1),
        basic_block(64, 128, 2), basic_block(128, 128, 1), basic_block(128, 256, 2),
        basic_block(256, 256, 1), basic_block(256, 512, 2), basic_block(512, 512, 1),
        td_adaptive_avg_pool2d(1, 1), td_flatten(), td_linear(512, RESNET_CLASSES), NULL);
}

/* ---- Training --------------------------------------------------------------------------------------------- */

struct settings {
    const char *network, *device;
    int batch, side, steps, log;
    bool bf16;
};

struct training {
    td_device *device;
    td_module *network;
    td_optimizer *optimizer;
    td_tensor *pictures, *classes;
};

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static void set_up(struct training *training, const struct settings *settings)
{
    bool small = strcmp(settings->network, "conv") == 0;
    int64_t channels = small ? 1 : 3, side = small ? 28 : settings->side;
    training->device = td_device_get(settings->device);
    TD_DEVICE_SCOPE(training->device);
    td_manual_seed(1);
    training->network = small ? conv() : resnet18();
    training->pictures = td_randn(TD_SHAPE(settings->batch, channels, side, side), TD_F32, NULL);
    training->classes = td_randint(0, small ? 10 : RESNET_CLASSES, TD_SHAPE(settings->batch),
                                   TD_I64, NULL);
    training->optimizer = td_sgd(training->network, &(td_sgd_options){.lr = 0.01, .momentum = 0.9});
    if (!training->optimizer || !training->pictures || !training->classes)
        bench_die("%s", td_last_error());
}

static td_tensor *loss_of(struct training *training, bool bf16)
{
    TD_AUTOCAST(td_device_kind(training->device),
                &(td_autocast_options){.dtype = TD_BF16, .disabled = !bf16});
    return td_cross_entropy(td_forward(training->network, training->pictures), training->classes);
}

/* Makes a step. The loss is read, which waits for the device, only where a line is printed. */
static double step(struct training *training, bool bf16, bool read)
{
    TD_SCOPE;
    bench_check(td_optimizer_zero_grad(training->optimizer));
    td_tensor *loss = loss_of(training, bf16);
    bench_check(td_backward(loss));
    bench_check(td_optimizer_step(training->optimizer));
    return read ? td_item(loss) : 0;
}

static void train(struct training *training, const struct settings *settings)
{
    double line_time = now();
    for (int i = 1, since = 1; i <= settings->steps; i++, since++) {
        bool line = i == 1 || i % settings->log == 0 || i == settings->steps;
        double loss = step(training, settings->bf16, line);
        if (!line)
            continue;
        bench_check(td_device_synchronize(training->device));
        double seconds = (now() - line_time) / since;
        printf("step %5d/%d  loss %.6f  %8.0f pictures/s  %7.2f ms a step\n", i, settings->steps,
               loss, settings->batch / seconds, 1e3 * seconds);
        fflush(stdout);
        line_time = now();
        since = 0;
    }
}

static void print_memory(td_device *device)
{
    struct rusage usage;
    td_memory_stats stats = {0};
    getrusage(RUSAGE_SELF, &usage);
    bench_check(td_device_memory_stats(device, &stats));
    double mib = stats.reserved_peak ? (double)stats.reserved_peak / 1048576
                                     : (double)usage.ru_maxrss / 1024;
    printf("  peak memory          %10.1f MiB\n", mib);
}

static struct settings read_settings(int argc, char **argv)
{
    struct settings settings = {
        .device = "cuda", .batch = 64, .side = 224, .steps = 100, .log = 10};
    struct {
        const char *name;
        int *value;
    } numbers[] = {{"--batch", &settings.batch},
                   {"--side", &settings.side},
                   {"--steps", &settings.steps},
                   {"--log", &settings.log}};
    for (int i = 1; i < argc; i++) {
        int *number = NULL;
        for (size_t k = 0; k < sizeof numbers / sizeof numbers[0]; k++)
            if (strcmp(argv[i], numbers[k].name) == 0)
                number = numbers[k].value;
        if (number)
            *number = bench_number(argv[i], argv[i + 1], 1), i++;
        else if (strcmp(argv[i], "--bf16") == 0)
            settings.bf16 = true;
        else if (strcmp(argv[i], "--device") == 0 && argv[i + 1])
            settings.device = argv[++i];
        else if (strcmp(argv[i], "conv") == 0 || strcmp(argv[i], "resnet18") == 0)
            settings.network = argv[i];
        else
            bench_die("there is no option or network «%s»", argv[i]);
    }
    if (!settings.network)
        bench_die(
            "usage: bench_gpu_conv conv|resnet18 [--device cuda] [--bf16] [--batch N] [--side N] "
            "[--steps N] [--log N]");
    return settings;
}

int main(int argc, char **argv)
{
    struct settings settings = read_settings(argc, argv);
    struct training training = {0};
    set_up(&training, &settings);
    train(&training, &settings);
    print_memory(training.device);
    td_tensor_release(training.pictures);
    td_tensor_release(training.classes);
    td_optimizer_destroy(training.optimizer);
    td_module_destroy(training.network);
}
