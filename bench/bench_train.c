/* Trains a network on random data, and prints the steps a second, the peak memory of the process, and the
 * time from its start to the end of its first step.
 *
 *     bench_train NETWORK [--seconds S] [--started NS] [--table]
 *
 * NETWORK is mlp, conv or transformer; bench/peers/torch_train.py has the same ones. --started is the time
 * of CLOCK_MONOTONIC at which this process was started. The rate is that of the median step, so that
 * preemption counts little. */
#include "measure.h"
#include "networks.h"

#include <tandem/tandem.h>
#include <time.h>

enum { WARM_UP = 5, MOST_STEPS = 1 << 20 };
enum { VOCABULARY = 256, WIDTH = 256, HEADS = 4, FEED_FORWARD = 1024, LAYERS = 4, SEQUENCE = 128 };

struct training {
    const char *name;
    td_module *network;
    td_tensor *input, *target;
    td_optimizer *optimizer;
    int64_t busy;         /* processor time of all steps that are measured */
    int64_t ready, first; /* when the first step began, and when it was done */
    double loss;
};

static int64_t read_clock(clockid_t clock)
{
    struct timespec time;
    clock_gettime(clock, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static int64_t now_ns(void)
{
    return read_clock(CLOCK_MONOTONIC);
}

static td_module *transformer_layer(void)
{
    return td_transformer_encoder_layer_with(
        WIDTH, HEADS,
        &(td_transformer_options){
            .batch_first = true, .feedforward = FEED_FORWARD, .dropout = TD_ZERO, .causal = true});
}

enum { TOKENS, POSITIONS, BLOCKS, HEAD }; /* the children of the transformer */

static td_tensor *transformer_forward(td_module *module, td_tensor *const *inputs, int count)
{
    (void)count;
    td_tensor *positions = td_arange(0, SEQUENCE, 1, TD_I64, NULL);
    td_tensor *x = td_add(td_forward(td_child(module, TOKENS), inputs[0]),
                          td_forward(td_child(module, POSITIONS), positions));
    x = td_forward(td_child(module, BLOCKS), x);
    return td_f_flatten(td_forward(td_child(module, HEAD), x), 0, 1);
}

static const td_module_ops transformer_ops = {.name = "Transformer",
                                              .forward = transformer_forward};

static td_module *transformer(void)
{
    td_module *layers[LAYERS], *network = td_module_create(&transformer_ops);
    td_module_add_child(network, "tokens", td_embedding(VOCABULARY, WIDTH));
    td_module_add_child(network, "positions", td_embedding(SEQUENCE, WIDTH));
    for (int i = 0; i < LAYERS; i++)
        layers[i] = transformer_layer();
    td_module_add_child(network, "layers", td_sequential_of(layers, LAYERS));
    td_module_add_child(network, "head", td_linear(WIDTH, VOCABULARY));
    return td_module_finish(network);
}

static void make_images(struct training *training)
{
    training->input = td_randn(TD_SHAPE(64, 1, 28, 28), TD_F32, NULL);
    training->target = td_randint(0, 10, TD_SHAPE(64), TD_I64, NULL);
}

static void make_text(struct training *training)
{
    td_tensor *text = td_randint(0, VOCABULARY, TD_SHAPE(8, SEQUENCE + 1), TD_I64, NULL);
    {
        TD_SCOPE;
        training->input = td_tensor_retain(td_clone(td_narrow(text, 1, 0, SEQUENCE)));
        td_tensor *next = td_clone(td_narrow(text, 1, 1, SEQUENCE));
        training->target = td_tensor_retain(td_f_flatten(next, 0, 1));
    }
    td_tensor_release(text);
}

static void make(struct training *training)
{
    td_manual_seed(1);
    if (strcmp(training->name, "mlp") == 0)
        training->network = mlp();
    else if (strcmp(training->name, "conv") == 0)
        training->network = conv();
    else if (strcmp(training->name, "transformer") == 0)
        training->network = transformer();
    else
        bench_die("there is no network «%s»: mlp, conv or transformer", training->name);
    if (strcmp(training->name, "transformer") == 0)
        make_text(training);
    else
        make_images(training);
    training->optimizer = td_sgd(training->network, &(td_sgd_options){.lr = 0.01, .momentum = 0.5});
    if (!training->optimizer || !training->input || !training->target)
        bench_die("%s", td_last_error());
}

static void step(struct training *training)
{
    {
        TD_SCOPE;
        bench_check(td_optimizer_zero_grad(training->optimizer));
        td_tensor *loss = td_cross_entropy(td_forward(training->network, training->input),
                                           training->target);
        bench_check(td_backward(loss));
        bench_check(td_optimizer_step(training->optimizer));
        training->loss = td_item(loss);
    }
}

static double peak_mib(void)
{
    FILE *file = fopen("/proc/self/status", "r");
    char line[256];
    long kib = 0;
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "VmHWM: %ld", &kib) == 1)
            break;
    if (file)
        fclose(file);
    return (double)kib / 1024;
}

/* The times of all steps in `seconds`, sorted; *count of them. */
static int64_t *measure(struct training *training, double seconds, size_t *count)
{
    int64_t *times = malloc(MOST_STEPS * sizeof *times);
    if (!times)
        bench_die("out of memory");
    int64_t end = now_ns() + (int64_t)(seconds * 1e9);
    *count = 0;
    training->busy = -read_clock(CLOCK_PROCESS_CPUTIME_ID);
    do {
        int64_t begin = now_ns();
        step(training);
        times[(*count)++] = now_ns() - begin;
    } while (*count < MOST_STEPS && now_ns() < end);
    training->busy += read_clock(CLOCK_PROCESS_CPUTIME_ID);
    bench_sort(times, *count);
    return times;
}

struct settings {
    double seconds;
    int64_t started;
    bool table;
};

static void print_row(const struct training *training, const struct settings *settings,
                      const int64_t *times, size_t count)
{
    double rate = 1e9 / (double)bench_at(times, count, 0.5);
    double cpu_ms = (double)training->busy / (double)count / 1e6;
    double ready_ms = (double)(training->ready - settings->started) / 1e6;
    double first_ms = (double)(training->first - settings->started) / 1e6;
    if (settings->table) {
        printf("%-12s %10.1f steps/s %10.1f MiB", training->name, rate, peak_mib());
        if (settings->started)
            printf(" %10.1f ms to the first step", first_ms);
        printf("\n");
        return;
    }
    printf("{\"peer\": \"tandem\", \"what\": \"%s\", \"batch\": %lld, \"steps\": %zu, "
           "\"steps_per_s\": %.4f, \"cpu_ms\": %.4f, \"peak_mib\": %.2f, \"loss\": %.6f",
           training->name, (long long)td_tensor_size(training->input, 0), count, rate, cpu_ms,
           peak_mib(), training->loss);
    if (settings->started)
        printf(", \"ready_ms\": %.3f, \"first_step_ms\": %.3f", ready_ms, first_ms);
    printf("}\n");
}

static struct settings read_settings(struct training *training, int argc, char **argv)
{
    struct settings settings = {.seconds = 1};
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (strcmp(argv[i], "--table") == 0)
            settings.table = true;
        else if (strcmp(argv[i], "--seconds") == 0 && value && (settings.seconds = atof(value)) > 0)
            i++;
        else if (strcmp(argv[i], "--started") == 0 && value && (settings.started = atoll(value)))
            i++;
        else if (argv[i][0] != '-' && !training->name)
            training->name = argv[i];
        else
            training->name = NULL, i = argc;
    }
    if (!training->name)
        bench_die("usage: bench_train mlp|conv|transformer [--seconds S] [--started NS] [--table]");
    return settings;
}

int main(int argc, char **argv)
{
    struct training training = {0};
    struct settings settings = read_settings(&training, argc, argv);
    make(&training);
    training.ready = now_ns();
    step(&training);
    training.first = now_ns();
    for (int i = 0; i < WARM_UP; i++)
        step(&training);
    size_t count;
    int64_t *times = measure(&training, settings.seconds, &count);
    print_row(&training, &settings, times, count);
    free(times);
    td_tensor_release(training.input);
    td_tensor_release(training.target);
    td_optimizer_destroy(training.optimizer);
    td_module_destroy(training.network);
}
