/* How long elastic training stands still when a rank does, and what it costs when none does.
 *
 *     bench_elastic kill | stop | loop  [--rounds N] [--ranks R]
 *     bench_elastic cost                [--ranks R] [--steps N] [--gpt2]
 *     bench_elastic join                [--ranks R] [--millions M]
 *
 * Each round starts R processes that train the network of the demo. In `kill` one gets SIGKILL, in `stop` SIGSTOP (heartbeat of
 * one second), in `loop` it computes without end (step timeout of one second). Printed is the time until the last of the others
 * has committed the next step of the smaller group: median, 99th percentile and slowest, and the median of a step.
 *
 * `cost` prints the time of a step, one line for each way of training: td_ddp() with the whole batch of a rank in one pass; in
 * passes of a slice, summed up without sync; in slices; and td_elastic; then td_fsdp() in slices, and td_elastic with shards, which
 * copies the state of each step beside the next one; of the demo's network, or of a GPT-2 of two layers with AdamW. `join` has a model of M million parameters with
 * Adam, whose last rank begins with other weights: it prints how long that one takes to get the state of the others. */
#include "../examples/gpt2.h"
#include "measure.h"

#include <tandem/tandem.h>

#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { SLICES = 8, SLICE = 32, MOST_RANKS = 8, MOST_ROUNDS = 1000, WARM_UP = 6 };

struct board {
    _Atomic int64_t step[MOST_RANKS]; /* committed */
    _Atomic int64_t
        smaller[MOST_RANKS]; /* when the first step of the smaller group was committed */
    _Atomic int64_t step_ns;
    _Atomic int loops; /* the rank that is to compute without end, from 1 on */
    atomic_bool ends;
    double ms, agreement_ms, catch_up_ms;
};

static struct board *board;
static int ranks = 4, rank, rounds = 100, steps = 100, millions = 100;
static const char *mode;
static bool gpt2;
static const struct gpt2_config gpt2_config = {
    .layers = 2, .heads = 4, .width = 64, .context = 32, .vocabulary = 256};
static td_elastic *elastic;

static int64_t now_ns(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

/* ---- What is trained -------------------------------------------------------------------------------------- */

static td_module *make_net(void)
{
    td_manual_seed(1);
    if (gpt2)
        return gpt2_create(&gpt2_config);
    return td_sequential(td_conv2d(1, 10, 5), td_max_pool2d(2), td_relu(), td_conv2d(10, 20, 5),
                         td_max_pool2d(2), td_relu(), td_flatten(), td_linear(320, 50), td_relu(),
                         td_dropout(0.3), td_linear(50, 10), td_log_softmax(1), NULL);
}

static td_optimizer *make_optimizer(td_module *net)
{
    return gpt2 ? gpt2_adamw(net, 1e-3, 0.1)
                : td_sgd(net, &(td_sgd_options){.lr = 0.02, .momentum = 0.9});
}

static td_dataset *make_tokens(void)
{
    TD_SCOPE;
    td_tensor *x = td_randint(0, 256, TD_SHAPE(4096, 32), TD_I64, NULL);
    td_tensor *y = td_randint(0, 256, TD_SHAPE(4096, 32), TD_I64, NULL);
    return td_tensor_dataset(x, y);
}

static td_tensor *loss_of(td_module *net, td_tensor *x, td_tensor *y)
{
    td_tensor *out = td_forward(net, x);
    return gpt2 ? td_cross_entropy(td_reshape(out, TD_SHAPE(-1, 256)), td_reshape(y, TD_SHAPE(-1)))
                : td_nll_loss(out, y);
}

static td_dataset *make_data(void)
{
    TD_SCOPE;
    td_manual_seed(2);
    if (gpt2)
        return make_tokens();
    td_tensor *x = td_randn(TD_SHAPE(4096, 1, 28, 28), TD_F32, NULL);
    td_tensor *y = td_zeros(TD_SHAPE(4096), TD_I64, NULL);
    for (int i = 0; y && i < 4096; i++)
        ((int64_t *)td_tensor_data(y))[i] = i % 10;
    return td_tensor_dataset(x, y);
}

static td_status slice_of_net(td_elastic_slice *slice, void *arg)
{
    (void)arg;
    while (atomic_load(&board->loops) == rank + 1) {
    }
    td_tensor *loss = loss_of(slice->model, slice->batch.input, slice->batch.target);
    slice->loss = td_item(loss);
    return td_backward(loss);
}

static void tell(const td_elastic_event *event, void *arg)
{
    int64_t none = 0;
    (void)arg;
    if (event->kind != TD_ELASTIC_COMMITTED)
        return;
    atomic_store(&board->step[rank], event->step);
    if (event->ranks < ranks)
        atomic_compare_exchange_strong(&board->smaller[rank], &none, now_ns());
    if (atomic_load(&board->ends))
        raise(SIGUSR1);
}

/* ---- A rank stands still -------------------------------------------------------------------------------------- */

static void init(const char *url)
{
    bench_check(td_init_process_group(
        &(td_init_options){.init_method = url, .rank = rank, .world_size = ranks}));
}

static void train_until_told(const char *url)
{
    init(url);
    bench_check(td_stop_on_signals(NULL, 0));
    td_dataset *data = make_data();
    td_module *net = make_net();
    td_optimizer *sgd = td_sgd(net, &(td_sgd_options){.lr = 0.02, .momentum = 0.9});
    elastic = td_elastic_create(&(td_elastic_options){
        .training = {.model = net, .optimizer = sgd},
        .dataset = data,
        .slices = SLICES,
        .slice_size = SLICE,
        .heartbeat_ms = 1000,
        .step_timeout_ms = !strcmp(mode, "loop") ? 1000 : 0,
        .on_event = tell,
    });
    bench_check(elastic ? TD_OK : td_last_status());
    bench_check(td_elastic_run(elastic, 1 << 20, slice_of_net, NULL));
    td_elastic_stats stats;
    td_elastic_get_stats(elastic, &stats);
    atomic_store(&board->step_ns, (int64_t)(stats.step_ms * 1e6));
    td_elastic_destroy(elastic);
    td_optimizer_destroy(sgd);
    td_dataset_release(data);
    td_destroy_process_group();
}

/* ---- What it costs ------------------------------------------------------------------------------------------- */

enum way { WHOLE, PASSES, IN_SLICES, ELASTIC, SHARDED, ELASTIC_SHARDED, WAYS };

static const char *const way_names[] = {"td_ddp(), one pass of the batch",
                                        "td_ddp(), passes of a slice",
                                        "td_ddp() with slices",
                                        "td_elastic",
                                        "td_fsdp() with slices",
                                        "td_elastic with shards"};

static bool has_slices(enum way way)
{
    return way == IN_SLICES || way == SHARDED;
}

static td_module *wrap(enum way way, td_module *net)
{
    return way == SHARDED ? td_fsdp(net, &(td_fsdp_options){.slices = SLICES})
                          : td_ddp(net, &(td_ddp_options){.slices = way == IN_SLICES ? SLICES : 0});
}

static td_status pass(td_module *model, td_tensor *x, td_tensor *y)
{
    TD_SCOPE;
    td_tensor *loss = loss_of(model, x, y);
    td_item(loss);
    return td_backward(loss);
}

/* The loop that a program without td_elastic has. */
static double time_loop(enum way way, td_dataset *data)
{
    int share = SLICES / ranks;
    td_module *model = wrap(way, make_net());
    td_optimizer *sgd = make_optimizer(model);
    td_sampler *sampler = td_distributed_sampler(
        data, &(td_sampler_options){.slices = SLICES,
                                    .slice_size = SLICE,
                                    .slices_apart = way == SHARDED,
                                    .drop_last = true});
    td_loader *loader = td_loader_create(
        data, &(td_loader_options){.batch_size = way == WHOLE ? share * SLICE : SLICE,
                                   .sampler = sampler});
    int64_t *times = calloc((size_t)steps, sizeof *times);
    if (!model || !sgd || !loader || !times)
        bench_die("%s", td_last_error());
    for (int step = -WARM_UP; step < steps; step++) {
        int64_t begin = now_ns();
        td_slices slices = {0};
        td_batch b;
        if (has_slices(way))
            slices = td_slices_begin(model, step + WARM_UP);
        else
            bench_check(td_optimizer_zero_grad(sgd));
        for (int k = 0; k < (way == WHOLE ? 1 : share); k++) {
            if (has_slices(way) && !td_slices_next(&slices))
                bench_die("%s", td_last_error());
            if (way == PASSES)
                td_ddp_set_sync(model, k == share - 1);
            if (!td_loader_next(loader, &b) && !td_loader_next(loader, &b))
                bench_die("%s", td_last_error());
            bench_check(pass(model, b.input, b.target));
        }
        if (has_slices(way) && td_slices_next(&slices))
            bench_die("a slice too many");
        bench_check(td_optimizer_step(sgd));
        if (step >= 0)
            times[step] = now_ns() - begin;
    }
    bench_sort(times, (size_t)steps);
    double ms = (double)bench_at(times, (size_t)steps, 0.5) / 1e6;
    free(times);
    td_loader_destroy(loader);
    td_sampler_release(sampler);
    td_optimizer_destroy(sgd);
    td_module_destroy(model);
    return ms;
}

static int64_t *commit_times, commit_count, commit_last;

static void note_commit(const td_elastic_event *event, void *arg)
{
    (void)arg;
    if (event->kind != TD_ELASTIC_COMMITTED)
        return;
    int64_t now = now_ns();
    if (event->step > WARM_UP && commit_count < steps)
        commit_times[commit_count++] = now - commit_last;
    commit_last = now;
}

static double time_elastic(td_dataset *data, const td_fsdp_options *fsdp)
{
    td_elastic_stats stats;
    td_module *net = make_net();
    td_optimizer *sgd = make_optimizer(net);
    commit_times = calloc((size_t)steps, sizeof *commit_times);
    commit_count = 0;
    td_elastic *training = td_elastic_create(
        &(td_elastic_options){.training = {.model = net, .optimizer = sgd},
                              .fsdp = fsdp,
                              .dataset = data,
                              .slices = SLICES,
                              .slice_size = SLICE,
                              .drop_last = true,
                              .check_every = 50,
                              .on_event = note_commit});
    bench_check(training ? TD_OK : td_last_status());
    bench_check(td_elastic_run(training, steps + WARM_UP, slice_of_net, NULL));
    bench_check(td_elastic_get_stats(training, &stats));
    if (!fsdp)
        board->agreement_ms = stats.agreement_ms;
    td_elastic_destroy(training);
    td_optimizer_destroy(sgd);
    bench_sort(commit_times, (size_t)commit_count);
    double ms = (double)bench_at(commit_times, (size_t)commit_count, 0.5) / 1e6;
    free(commit_times);
    return ms;
}

static double time_way(enum way way, td_dataset *data)
{
    if (way == ELASTIC_SHARDED)
        return time_elastic(data, &(td_fsdp_options){.strategy = TD_FULL_SHARD});
    return way == ELASTIC ? time_elastic(data, NULL) : time_loop(way, data);
}

/* In turns, so that what else the machine does meets all ways alike. */
static void measure_cost(const char *url)
{
    enum { TURNS = 5 };
    int64_t us[WAYS][TURNS];
    init(url);
    td_dataset *data = make_data();
    for (int turn = 0; turn < TURNS; turn++)
        for (int way = 0; way < WAYS; way++)
            us[way][turn] = (int64_t)(1e3 * time_way((enum way)way, data));
    td_dataset_release(data);
    bench_check(td_destroy_process_group());
    double usual = 0;
    for (int way = 0; way < WAYS && rank == 0; way++) {
        bench_sort(us[way], TURNS);
        double ms = (double)bench_at(us[way], TURNS, 0.5) / 1e3;
        usual = way == PASSES || way == SHARDED ? ms : usual;
        printf("%-32s  %7.3f ms a step", way_names[way], ms);
        printf(usual > 0 ? "  %+5.1f %%\n" : "\n", 100 * (ms / usual - 1));
    }
    if (rank == 0)
        printf("agreement with hashes, and waiting for the slowest rank in it: %.3f ms\n",
               board->agreement_ms);
}

/* ---- The state for a newcomer ---------------------------------------------------------------------------------- */

static td_status slice_of_large(td_elastic_slice *slice, void *arg)
{
    (void)arg;
    TD_SCOPE;
    td_tensor *x = td_randn(TD_SHAPE(1, 1000), TD_F32, NULL);
    return td_backward(td_mean(td_forward(slice->model, x)));
}

static td_module *large_net(void)
{
    td_module *net = td_sequential(td_linear(1000, 1000), NULL);
    for (int m = 1; m < millions && net; m++)
        td_module_add_child(net, (char[]){(char)('a' + m / 26 % 26), (char)('a' + m % 26), 0},
                            td_linear(1000, 1000));
    return td_module_finish(net);
}

static void measure_join(const char *url)
{
    init(url);
    td_manual_seed(rank == ranks - 1 ? 2 : 1);
    td_module *net = large_net();
    td_optimizer *adam = td_adam(net, NULL);
    bench_check(adam ? TD_OK : td_last_status());
    td_elastic *training = td_elastic_create(
        &(td_elastic_options){.training = {.model = net, .optimizer = adam}, .slices = 4});
    bench_check(training ? TD_OK : td_last_status());
    bench_check(td_elastic_run(training, 3, slice_of_large, NULL));
    td_elastic_stats stats;
    bench_check(td_elastic_get_stats(training, &stats));
    if (rank == ranks - 1)
        printf(
            "%d million parameters: the state and the outcome of a step after %.0f ms; a step takes "
            "%.0f ms\n",
            millions, stats.catch_up_ms, stats.step_ms);
    td_elastic_destroy(training);
    td_optimizer_destroy(adam);
    bench_check(td_destroy_process_group());
}

/* ---- The processes --------------------------------------------------------------------------------------------- */

static void start(pid_t *pids, void (*run)(const char *url), const char *url)
{
    fflush(stdout);
    for (int r = 0; r < ranks; r++) {
        pids[r] = fork();
        if (pids[r] < 0)
            bench_die("fork: %s", strerror(errno));
        if (pids[r] == 0) {
            rank = r;
            run(url);
            fflush(stdout);
            _exit(0);
        }
    }
}

static void pause_ms(int ms)
{
    usleep((useconds_t)ms * 1000);
}

static bool all_have(int64_t step)
{
    for (int r = 0; r < ranks; r++)
        if (atomic_load(&board->step[r]) < step)
            return false;
    return true;
}

/* Nanoseconds from the moment in which the victim stands still to the next commit of the last of the others. */
static int64_t one_round(int round, const char *url)
{
    pid_t pids[MOST_RANKS];
    memset(board, 0, sizeof *board);
    start(pids, train_until_told, url);
    while (!all_have(WARM_UP))
        pause_ms(1);
    int victim = round % ranks;
    pause_ms(round * 7 % 20);
    int64_t begin = now_ns(), end = 0;
    if (!strcmp(mode, "loop"))
        atomic_store(&board->loops, victim + 1);
    else
        kill(pids[victim], !strcmp(mode, "stop") ? SIGSTOP : SIGKILL);
    for (int r = 0; r < ranks; r++) {
        while (r != victim && !atomic_load(&board->smaller[r]))
            pause_ms(1);
        int64_t at = atomic_load(&board->smaller[r]);
        end = r != victim && at > end ? at : end;
    }
    atomic_store(&board->ends, true);
    kill(pids[victim], SIGKILL);
    for (int r = 0; r < ranks; r++)
        waitpid(pids[r], NULL, 0);
    return end - begin;
}

static void measure_losses(const char *folder)
{
    char url[300];
    int64_t times[MOST_ROUNDS], in_step[MOST_ROUNDS];
    for (int round = 0; round < rounds; round++) {
        snprintf(url, sizeof url, "file://%s/store%d", folder, round);
        times[round] = one_round(round, url);
        in_step[round] = atomic_load(&board->step_ns);
        unlink(url + strlen("file://"));
    }
    bench_sort(times, (size_t)rounds);
    bench_sort(in_step, (size_t)rounds);
    printf(
        "%s: %d rounds of %d ranks: median %.1f ms, 99th percentile %.1f ms, slowest %.1f ms; a step "
        "takes %.1f ms\n",
        mode, rounds, ranks, (double)bench_at(times, (size_t)rounds, 0.5) / 1e6,
        (double)bench_at(times, (size_t)rounds, 0.99) / 1e6, (double)times[rounds - 1] / 1e6,
        (double)bench_at(in_step, (size_t)rounds, 0.5) / 1e6);
}

static void measure_together(void (*run)(const char *url), const char *folder)
{
    char url[300];
    pid_t pids[MOST_RANKS];
    snprintf(url, sizeof url, "file://%s/store", folder);
    start(pids, run, url);
    for (int r = 0; r < ranks; r++)
        waitpid(pids[r], NULL, 0);
    unlink(url + strlen("file://"));
}

int main(int argc, char **argv)
{
    char folder[] = "/tmp/bench_elasticXXXXXX";
    mode = argc > 1 ? argv[1] : "";
    for (int i = 2; i < argc; i += 2) {
        const char *value = argv[i + 1];
        if (!strcmp(argv[i], "--gpt2"))
            gpt2 = i-- > 0;
        else if (!strcmp(argv[i], "--rounds"))
            rounds = bench_number(argv[i], value, 1);
        else if (!strcmp(argv[i], "--ranks"))
            ranks = bench_number(argv[i], value, 1);
        else if (!strcmp(argv[i], "--steps"))
            steps = bench_number(argv[i], value, 1);
        else if (!strcmp(argv[i], "--millions"))
            millions = bench_number(argv[i], value, 1);
        else
            bench_die("unknown option %s", argv[i]);
    }
    if (rounds > MOST_ROUNDS || ranks > MOST_RANKS || SLICES % ranks || millions > 600)
        bench_die("at most %d rounds and 600 million parameters; 1, 2, 4 or 8 ranks", MOST_ROUNDS);
    setenv("OMP_NUM_THREADS", "1", 0);
    board = mmap(NULL, sizeof *board, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (board == MAP_FAILED || !mkdtemp(folder))
        bench_die("%s", strerror(errno));
    if (!strcmp(mode, "kill") || !strcmp(mode, "stop") || !strcmp(mode, "loop"))
        measure_losses(folder);
    else if (!strcmp(mode, "cost"))
        measure_together(measure_cost, folder);
    else if (!strcmp(mode, "join"))
        measure_together(measure_join, folder);
    else
        bench_die(
            "usage: bench_elastic kill|stop|loop|cost|join [--rounds N] [--ranks R] [--steps N] "
            "[--millions M]");
    rmdir(folder);
    return 0;
}
