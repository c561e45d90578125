/* Trains a network with DistributedDataParallel and without, in turns, and prints the steps a second of
 * both, and the ratio of the step times.
 *
 *     bench_ddp NETWORK [--ranks N] [--seconds S] [--table]
 *
 * NETWORK is mlp or conv; bench/peers/torch_ddp.py has the same ones. All ranks train at the same time, one
 * thread each, also without communication: so the ranks compete for memory and processors alike in both
 * turns. A turn is ten steps, from a barrier until all ranks have ended; the time of a step is a tenth of
 * the median turn. */
#include "measure.h"
#include "networks.h"

#include <tandem/tandem.h>

#include <time.h>

enum { WARM_UP = 10, TURN = 10, MOST_TURNS = 1 << 15 };

struct settings {
    const char *network;
    int ranks;
    double seconds;
    bool table;
};

/* A network in training, and the times of its turns. */
struct training {
    td_module *model;
    td_optimizer *optimizer;
    int64_t *times;
    size_t count;
};

static int64_t now_ns(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static void make(struct training *training, const char *network, bool ddp)
{
    td_manual_seed(1);
    td_module *module = strcmp(network, "mlp") == 0 ? mlp() : conv();
    training->model = ddp ? td_ddp(module, NULL) : module;
    training->optimizer = td_sgd(training->model, &(td_sgd_options){.lr = 0.01, .momentum = 0.5});
    training->times = malloc(MOST_TURNS * sizeof *training->times);
    if (!training->optimizer || !training->times)
        bench_die("%s", td_last_error());
}

static void step(struct training *training, td_tensor *input, td_tensor *target)
{
    {
        TD_SCOPE;
        bench_check(td_optimizer_zero_grad(training->optimizer));
        bench_check(td_backward(td_cross_entropy(td_forward(training->model, input), target)));
        bench_check(td_optimizer_step(training->optimizer));
    }
}

static void turn(struct training *training, td_tensor *input, td_tensor *target)
{
    bench_check(td_barrier(NULL, NULL));
    int64_t begin = now_ns();
    for (int s = 0; s < TURN; s++)
        step(training, input, target);
    bench_check(td_barrier(NULL, NULL));
    training->times[training->count++] = now_ns() - begin;
}

/* Turns of both, until the first rank's time is over. */
static void train_in_turns(struct training *both, double seconds)
{
    td_tensor *input = td_randn(TD_SHAPE(64, 1, 28, 28), TD_F32, NULL);
    td_tensor *target = td_randint(0, 10, TD_SHAPE(64), TD_I64, NULL);
    for (int i = 0; i < 2; i++)
        for (int s = 0; s < WARM_UP; s++)
            step(&both[i], input, target);
    int64_t end = now_ns() + (int64_t)(seconds * 1e9);
    for (int32_t more = 1; more;) {
        for (int i = 0; i < 2; i++)
            turn(&both[i], input, target);
        more = now_ns() < end && both[0].count < MOST_TURNS;
        bench_check(td_group_broadcast(&more, 1, TD_I32, 0, NULL, NULL));
    }
    td_tensor_release(input);
    td_tensor_release(target);
}

/* Of a step of the median turn, in nanoseconds. */
static double median(struct training *training)
{
    bench_sort(training->times, training->count);
    return (double)bench_at(training->times, training->count, 0.5) / TURN;
}

static void print_row(const struct settings *settings, double alone, double ddp,
                      const td_ddp_stats *stats, size_t steps)
{
    double hidden = stats->communication_ns > stats->exposed_ns
                        ? 1 - (double)stats->exposed_ns / (double)stats->communication_ns
                        : 0;
    double bytes = (double)stats->bytes / (double)stats->passes;
    if (settings->table) {
        printf("%-8s %8.1f steps/s with DDP %8.1f without: %.3f times as long; %.0f bytes a step\n",
               settings->network, 1e9 / ddp, 1e9 / alone, ddp / alone, bytes);
        return;
    }
    printf("{\"peer\": \"tandem\", \"what\": \"%s\", \"ranks\": %d, \"steps\": %zu, "
           "\"steps_per_s\": %.4f, \"alone_per_s\": %.4f, \"overhead\": %.4f, \"bytes\": %.0f, "
           "\"hidden\": %.3f}\n",
           settings->network, settings->ranks, steps, 1e9 / ddp, 1e9 / alone, ddp / alone, bytes,
           hidden);
}

static td_status run(int rank, void *arg)
{
    const struct settings *settings = arg;
    bench_check(td_set_num_threads(1));
    bench_check(td_init_process_group(NULL));
    struct training both[2] = {0};
    make(&both[0], settings->network, false);
    make(&both[1], settings->network, true);
    train_in_turns(both, settings->seconds);
    double alone = median(&both[0]), ddp = median(&both[1]);
    td_ddp_stats stats;
    bench_check(td_ddp_get_stats(both[1].model, &stats));
    if (rank == 0) {
        print_row(settings, alone, ddp, &stats, both[1].count * TURN);
        fflush(stdout);
    }
    for (int i = 0; i < 2; i++) {
        td_optimizer_destroy(both[i].optimizer);
        td_module_destroy(both[i].model);
        free(both[i].times);
    }
    return td_destroy_process_group();
}

static struct settings read_settings(int argc, char **argv)
{
    struct settings settings = {.ranks = 2, .seconds = 2};
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (strcmp(argv[i], "--table") == 0)
            settings.table = true;
        else if (strcmp(argv[i], "--seconds") == 0 && value && (settings.seconds = atof(value)) > 0)
            i++;
        else if (strcmp(argv[i], "--ranks") == 0)
            settings.ranks = bench_number(argv[i++], value, 1);
        else if (strcmp(argv[i], "mlp") == 0 || strcmp(argv[i], "conv") == 0)
            settings.network = argv[i];
        else
            settings.network = NULL, i = argc;
    }
    if (!settings.network)
        bench_die("usage: bench_ddp mlp|conv [--ranks N] [--seconds S] [--table]");
    return settings;
}

int main(int argc, char **argv)
{
    struct settings settings = read_settings(argc, argv);
    bench_check(td_spawn(run, &settings, settings.ranks, NULL));
}
