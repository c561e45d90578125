/* Trains a convolutional network on Fashion-MNIST with DistributedDataParallel:
 *
 *     tdrun --standalone --nproc-per-node=2 fashion_mnist [--epochs 5] [--hook fp16] [--out DIR]
 *
 * It shows a progress bar, the accuracy on the test images after each epoch, and at the end the cost of the
 * training. The loss of each step, and a plot of it, go to the directory --out. */
#include "loss_curve.h"

#include <tandem/tandem.h>

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

struct settings {
    int epochs, batch;
    double lr;
    const char *hook, *out;
};

struct run {
    struct settings settings;
    td_module *model;
    td_powersgd *powersgd; /* NULL with another hook */
    td_optimizer *optimizer;
    td_schedule *schedule;
    td_loader *train, *test;
    td_sampler *sampler;
    float *losses;
    int64_t steps;
    double seconds; /* of training alone */
};

static int fail(const char *what)
{
    fprintf(stderr, "fashion_mnist: %s: %s\n", what, td_last_error());
    return 1;
}

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static bool is_first(void)
{
    return td_get_rank(NULL) == 0;
}

static td_module *make_net(void)
{
    td_conv2d_options same = {.padding = {1, 1}};
    return td_sequential(td_conv2d_with(1, 16, 3, 3, &same), td_relu(), td_max_pool2d(2),
                         td_conv2d_with(16, 32, 3, 3, &same), td_relu(), td_max_pool2d(2),
                         td_flatten(), td_linear(32 * 7 * 7, 128), td_relu(), td_dropout(0.2),
                         td_linear(128, 10), NULL);
}

/* ---- Training ------------------------------------------------------------------------------------- */

static td_status train_step(struct run *run, const td_batch *batch, double *loss_value)
{
    td_status status = TD_OK;
    {
        TD_SCOPE;
        td_optimizer_zero_grad(run->optimizer);
        td_tensor *loss = td_cross_entropy(td_forward(run->model, batch->input), batch->target);
        status = td_backward(loss);
        if (!status)
            status = td_optimizer_step(run->optimizer);
        *loss_value = status ? 0 : td_item(loss);
    }
    return status ? status : td_schedule_step(run->schedule);
}

static td_status train_epoch(struct run *run, int epoch)
{
    char label[32];
    snprintf(label, sizeof label, "epoch %d/%d", epoch + 1, run->settings.epochs);
    td_progress *bar = td_progress_begin(
        &(td_progress_options){.total = td_loader_batches(run->train), .label = label});
    double start = now(), mean = 0;
    td_status status = TD_OK;
    td_module_train(run->model, true);
    td_sampler_set_epoch(run->sampler, epoch);
    for (td_batch batch; !status && td_loader_next(run->train, &batch);) {
        double loss = 0;
        status = train_step(run, &batch, &loss);
        mean = mean ? 0.98 * mean + 0.02 * loss : loss;
        run->losses[run->steps++] = (float)loss;
        td_progress_step(bar, 1, mean);
    }
    run->seconds += now() - start;
    td_progress_end(bar);
    return status ? status : td_loader_status(run->train);
}

/* The accuracy on the test images, over all ranks. */
static td_status test(struct run *run, double *accuracy)
{
    double counts[2] = {0, 0}; /* right, all */
    td_module_eval(run->model);
    for (td_batch batch; td_loader_next(run->test, &batch);) {
        TD_SCOPE;
        TD_NO_GRAD;
        td_tensor *guess = td_argmax(td_forward(run->model, batch.input), 1, false);
        td_tensor *right = td_sum(td_to_dtype(td_eq(guess, batch.target), TD_F64));
        counts[0] += td_item(right);
        counts[1] += (double)batch.size;
    }
    td_status status = td_loader_status(run->test);
    if (!status)
        status = td_group_all_reduce(counts, counts, 2, TD_F64, TD_SUM, NULL, NULL);
    *accuracy = 100 * counts[0] / counts[1];
    return status;
}

/* ---- Results --------------------------------------------------------------------------------------- */

static void print_costs(const struct run *run, double accuracy)
{
    td_ddp_stats stats;
    struct rusage usage;
    int ranks = td_get_world_size(NULL);
    td_ddp_get_stats(run->model, &stats);
    getrusage(RUSAGE_SELF, &usage);
    double samples = (double)run->steps * run->settings.batch * ranks;
    double all = (double)stats.communication_ns / 1e9, seen = (double)stats.exposed_ns / 1e9;
    double hidden = all > seen ? 100 * (all - seen) / all : 0;
    printf("\n");
    printf("  processes                    %8d\n", ranks);
    printf("  test accuracy                %7.2f %%\n", accuracy);
    printf("  training time                %7.1f s\n", run->seconds);
    printf("  samples a second             %8.0f\n", samples / run->seconds);
    printf("  gradients sent a step        %7.2f MB in %d bucket%s (%s)\n",
           (double)stats.bytes / (double)stats.passes / 1e6, stats.buckets,
           stats.buckets == 1 ? "" : "s", run->settings.hook ? run->settings.hook : "all_reduce");
    printf("  time in communication        %7.1f %% of training, %.0f %% of it hidden%s\n",
           100 * all / run->seconds, hidden,
           hidden < 1 && ranks >= sysconf(_SC_NPROCESSORS_ONLN) ? " (no processor is free for it)"
                                                                : "");
    printf("  waiting for communication    %7.1f %% of training\n", 100 * seen / run->seconds);
    printf("  peak memory of a process     %7.1f MB\n", (double)usage.ru_maxrss / 1024);
    if (run->settings.out)
        printf("  loss curve                   %s/loss.svg\n", run->settings.out);
}

/* ---- Setting up -------------------------------------------------------------------------------------- */

static int read_settings(int argc, char **argv, struct settings *settings)
{
    *settings = (struct settings){.epochs = 5, .batch = 64, .lr = 0.002};
    for (int i = 1; i < argc; i += 2) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (value && !strcmp(argv[i], "--epochs") && atoi(value) > 0)
            settings->epochs = atoi(value);
        else if (value && !strcmp(argv[i], "--batch") && atoi(value) > 0)
            settings->batch = atoi(value);
        else if (value && !strcmp(argv[i], "--lr") && atof(value) > 0)
            settings->lr = atof(value);
        else if (value && !strcmp(argv[i], "--hook") &&
                 (!strcmp(value, "fp16") || !strcmp(value, "bf16") || !strcmp(value, "powersgd") ||
                  !strcmp(value, "none")))
            settings->hook = strcmp(value, "none") ? value : NULL;
        else if (value && !strcmp(argv[i], "--out"))
            settings->out = value;
        else {
            fprintf(stderr, "usage: fashion_mnist [--epochs N] [--batch N] [--lr X] "
                            "[--hook fp16|bf16|powersgd|none] [--out DIR]\n");
            return 2;
        }
    }
    return 0;
}

static td_status set_up_data(struct run *run)
{
    td_dataset *train = td_fashion_mnist(TD_TRAIN, NULL), *test = td_fashion_mnist(TD_TEST, NULL);
    td_sampler *shares = td_distributed_sampler(test, &(td_sampler_options){.no_shuffle = true});
    run->sampler = td_distributed_sampler(train, NULL);
    run->train = td_loader_create(train, &(td_loader_options){.batch_size = run->settings.batch,
                                                              .sampler = run->sampler,
                                                              .drop_last = true});
    run->test = td_loader_create(test, &(td_loader_options){.batch_size = 500, .sampler = shares});
    td_sampler_release(shares);
    td_dataset_release(train);
    td_dataset_release(test);
    return run->train && run->test ? TD_OK : TD_ERR_INVALID;
}

/* The compression of the gradients. */
static td_comm_hook choose_hook(struct run *run)
{
    const char *name = run->settings.hook;
    if (name && !strcmp(name, "fp16"))
        return td_hook_fp16();
    if (name && !strcmp(name, "bf16"))
        return td_hook_bf16();
    if (!name)
        return td_hook_all_reduce();
    run->powersgd = td_powersgd_create(&(td_powersgd_options){.rank = 4, .start_step = 50});
    return td_powersgd_hook(run->powersgd);
}

static td_status set_up_model(struct run *run)
{
    td_comm_hook hook = choose_hook(run);
    if (run->settings.hook && !strcmp(run->settings.hook, "powersgd") && !run->powersgd)
        return TD_ERR_NOMEM;
    td_manual_seed(1);
    run->model = td_ddp(make_net(), &(td_ddp_options){.hook = hook});
    int64_t steps = td_loader_batches(run->train) * run->settings.epochs;
    run->optimizer = td_adam(run->model, &(td_adam_options){.lr = run->settings.lr});
    run->schedule = td_cosine_schedule(run->optimizer, steps, 0);
    run->losses = calloc((size_t)steps + 1, sizeof *run->losses);
    return run->schedule && run->losses ? TD_OK : TD_ERR_INVALID;
}

static int train(struct run *run)
{
    double accuracy = 0;
    for (int epoch = 0; epoch < run->settings.epochs; epoch++) {
        if (train_epoch(run, epoch) || test(run, &accuracy))
            return fail("training");
        if (is_first()) {
            printf("epoch %d: test accuracy %.2f %%\n", epoch + 1, accuracy);
            fflush(stdout);
        }
    }
    if (!is_first())
        return 0;
    print_costs(run, accuracy);
    if (!run->settings.out)
        return 0;
    return loss_curve_write(run->settings.out, "Fashion-MNIST: loss of rank 0", run->losses,
                            run->steps, 1);
}

int main(int argc, char **argv)
{
    struct run run = {0};
    int code = read_settings(argc, argv, &run.settings);
    if (code)
        return code;
    if (run.settings.out && mkdir(run.settings.out, 0777) && errno != EEXIST) {
        fprintf(stderr, "fashion_mnist: %s: %s\n", run.settings.out, strerror(errno));
        return 1;
    }
    if (td_init_process_group(NULL))
        return fail("starting");
    code = set_up_data(&run)    ? fail("the data")
           : set_up_model(&run) ? fail("the model")
                                : train(&run);
    td_schedule_destroy(run.schedule);
    td_optimizer_destroy(run.optimizer);
    td_module_destroy(run.model);
    td_powersgd_destroy(run.powersgd);
    td_loader_destroy(run.train);
    td_loader_destroy(run.test);
    td_sampler_release(run.sampler);
    free(run.losses);
    td_destroy_process_group();
    return code;
}
