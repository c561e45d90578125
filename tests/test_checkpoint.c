/* Checkpoints of training: resumed training beside uninterrupted training, bit for bit, what ranks
 * agree on, directories of numbered checkpoints, and writers that are killed. */
#include "runner.h"

#include <tandem/tandem.h>

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define SHAPE(...) TD_SHAPE(__VA_ARGS__)

enum { SAMPLES = 70, WIDTH = 8, CLASSES = 3, BATCH = 8, STEPS = 100, HALF = 50 };

static const char *temp_path(const char *name)
{
    static char path[4][512];
    static int next;
    char *text = path[next++ % 4];
    snprintf(text, sizeof path[0], "%s/%s", td_test_temp_dir(), name);
    return text;
}

/* ---- A training ----------------------------------------------------------------------------------- */

struct run {
    td_training training;
    td_dataset *dataset;
    td_loader *loader;
};

static td_dataset *make_dataset(void)
{
    td_generator *generator = td_generator_create(7, NULL);
    td_tensor *x = td_empty(SHAPE(SAMPLES, WIDTH), TD_F32, NULL),
              *y = td_empty(SHAPE(SAMPLES), TD_I64, NULL);
    CHECK_OK(td_normal_(x, 0, 1, generator));
    CHECK_OK(td_random_range_(y, 0, CLASSES, generator));
    td_dataset *dataset = td_tensor_dataset(x, y);
    td_tensor_release(x);
    td_tensor_release(y);
    td_generator_destroy(generator);
    return dataset;
}

/* All that a training is made of; other seeds give other weights, dropout and shuffles. */
static struct run make_run(uint64_t seed, bool adam, int workers)
{
    bool several = td_is_initialized() && td_get_world_size(NULL) > 1;
    struct run run = {.dataset = make_dataset()};
    td_manual_seed(seed + (uint64_t)td_test_rank());
    td_module *net = td_sequential(td_linear(WIDTH, 16), td_batch_norm1d(16), td_relu(),
                                   td_dropout(0.3), td_linear(16, CLASSES), NULL);
    run.training.model = several ? td_ddp(net, NULL) : net;
    CHECK(run.training.model != NULL);
    run.training.optimizer = adam ? td_adamw(run.training.model, &(td_adam_options){.lr = 0.01})
                                  : td_sgd(run.training.model,
                                           &(td_sgd_options){.lr = 0.1, .momentum = 0.9});
    run.training.schedule = td_warmup_schedule(run.training.optimizer, 0.1, 20,
                                               td_cosine_schedule(run.training.optimizer, 120, 0));
    run.training.sampler = several ? td_distributed_sampler(run.dataset, NULL)
                                   : td_random_sampler(run.dataset);
    run.loader = td_loader_create(run.dataset, &(td_loader_options){.batch_size = BATCH,
                                                                    .sampler = run.training.sampler,
                                                                    .workers = workers});
    CHECK(run.training.optimizer && run.training.schedule && run.training.sampler && run.loader);
    return run;
}

static void end_run(struct run *run)
{
    td_loader_destroy(run->loader);
    td_sampler_release(run->training.sampler);
    td_schedule_destroy(run->training.schedule);
    td_optimizer_destroy(run->training.optimizer);
    td_module_destroy(run->training.model);
    td_dataset_release(run->dataset);
}

static void train_until(struct run *run, int64_t step)
{
    td_training *training = &run->training;
    td_sampler_set_epoch(training->sampler, training->epoch);
    while (training->step < step) {
        td_batch batch;
        if (!td_loader_next(run->loader, &batch)) {
            CHECK_OK(td_loader_status(run->loader));
            td_sampler_set_epoch(training->sampler, ++training->epoch);
            continue;
        }
        {
            TD_SCOPE;
            CHECK_OK(td_optimizer_zero_grad(training->optimizer));
            td_tensor *loss = td_cross_entropy(td_forward(training->model, batch.input),
                                               batch.target);
            CHECK_OK(td_backward(loss));
            CHECK_OK(td_optimizer_step(training->optimizer));
            CHECK_OK(td_schedule_step(training->schedule));
        }
        training->step++;
    }
}

static void check_same_state(td_state *a, td_state *b)
{
    CHECK_EQ(td_state_count(a), td_state_count(b));
    for (int i = 0; i < td_state_count(a); i++) {
        CHECK_STR(td_state_name(a, i), td_state_name(b, i));
        td_tensor *x = td_state_tensor(a, i), *y = td_state_tensor(b, i);
        CHECK_EQ(td_tensor_nbytes(x), td_tensor_nbytes(y));
        if (memcmp(td_tensor_data(x), td_tensor_data(y), td_tensor_nbytes(x)))
            FAIL("%s differs", td_state_name(a, i));
    }
    td_state_destroy(a);
    td_state_destroy(b);
}

static void check_same_run(const struct run *a, const struct run *b)
{
    check_same_state(td_module_state(a->training.model), td_module_state(b->training.model));
    check_same_state(td_optimizer_state(a->training.optimizer),
                     td_optimizer_state(b->training.optimizer));
    CHECK_EQ(td_schedule_steps(a->training.schedule), td_schedule_steps(b->training.schedule));
    CHECK_EQ(a->training.epoch, b->training.epoch);
    CHECK_EQ(a->training.step, b->training.step);
}

static void resume(bool adam, int workers)
{
    unsigned char random[2][TD_GENERATOR_STATE_SIZE];
    struct run whole = make_run(1, adam, workers);
    train_until(&whole, HALF);
    CHECK_OK(td_training_save(temp_path("half"), &whole.training, NULL));
    train_until(&whole, STEPS);
    td_generator_get_state(NULL, random[0], sizeof random[0]);

    struct run second = make_run(100, adam, 0);
    train_until(&second, 3);
    td_loader_reset(second.loader);
    CHECK_OK(td_training_load(temp_path("half"), &second.training, NULL));
    CHECK_EQ(second.training.step, HALF);
    train_until(&second, STEPS);
    td_generator_get_state(NULL, random[1], sizeof random[1]);
    check_same_run(&whole, &second);
    CHECK_MEM(random[0], random[1], sizeof random[0]);
    CHECK(whole.training.epoch > 1);
    end_run(&whole);
    end_run(&second);
}

TEST(resumed_training_has_the_same_bits)
{
    resume(false, 0);
    resume(true, 2);
}

RANKS(resumed_training_of_2_has_the_same_bits, .ranks = 2, .deadline_s = 60)
{
    CHECK_OK(td_init_process_group(NULL));
    resume(false, 0);
    resume(true, 1);
    CHECK_OK(td_destroy_process_group());
}

/* At the end of an epoch, before the loader has said so, and before the first step. */
TEST(resumes_at_the_ends_of_epochs)
{
    int batches = (SAMPLES + BATCH - 1) / BATCH;
    for (int step = 0; step <= batches; step += batches) {
        struct run a = make_run(1, false, 0), b = make_run(2, false, 0);
        train_until(&a, step);
        CHECK_OK(td_training_save(temp_path("a"), &a.training, NULL));
        train_until(&a, step + 12);
        CHECK_OK(td_training_load(temp_path("a"), &b.training, NULL));
        train_until(&b, step + 12);
        check_same_run(&a, &b);
        end_run(&a);
        end_run(&b);
    }
}

/* A learning rate that the program has set by hand is the one that counts. */
TEST(learning_rates_set_by_hand_come_back)
{
    struct run a = make_run(1, false, 0), b = make_run(2, false, 0);
    CHECK_OK(td_optimizer_set_lr(a.training.optimizer, 0.0625));
    CHECK_OK(td_training_save(temp_path("a"), &a.training, NULL));
    CHECK_OK(td_training_load(temp_path("a"), &b.training, NULL));
    CHECK(td_optimizer_lr(b.training.optimizer) == 0.0625);
    end_run(&a);
    end_run(&b);
}

TEST(loads_into_a_model_on_another_device)
{
    struct run a = make_run(1, false, 0);
    train_until(&a, 5);
    CHECK_OK(td_training_save(temp_path("a"), &a.training, NULL));
    td_module *net = td_sequential(td_linear(WIDTH, 16), td_batch_norm1d(16), td_relu(),
                                   td_dropout(0.3), td_linear(16, CLASSES), NULL);
    CHECK_OK(td_module_to(net, td_device_get("cpu:1")));
    td_optimizer *sgd = td_sgd(net, &(td_sgd_options){.lr = 1, .momentum = 0.5});
    td_training b = {.model = net, .optimizer = sgd};
    CHECK_OK(td_training_load(temp_path("a"), &b, NULL));
    check_same_state(td_module_state(a.training.model), td_module_state(net));
    check_same_state(td_optimizer_state(a.training.optimizer), td_optimizer_state(sgd));
    CHECK_STR(td_device_name(td_tensor_device(td_module_parameter(net, "0.weight"))), "cpu:1");
    td_optimizer_destroy(sgd);
    td_module_destroy(net);
    end_run(&a);
}

/* ---- Refusals ------------------------------------------------------------------------------------- */

TEST(what_does_not_fit_changes_nothing)
{
    struct run a = make_run(1, false, 0), b = make_run(2, false, 0), before = make_run(2, false, 0);
    train_until(&a, 5);
    CHECK_OK(td_training_save(temp_path("a"), &a.training, NULL));
    unsigned char random[2][TD_GENERATOR_STATE_SIZE];

    /* The model fits, the optimizer does not: both stay. */
    td_optimizer *adam = td_adam(b.training.model, NULL), *sgd = b.training.optimizer;
    td_generator_get_state(NULL, random[0], sizeof random[0]);
    b.training.optimizer = adam;
    CHECK_FAILS(td_training_load(temp_path("a"), &b.training, NULL), TD_ERR_INVALID,
                "td_training_load: td_optimizer_load_state");
    b.training.optimizer = sgd;
    check_same_run(&b, &before);

    /* All fits, but a loader is in the middle of an epoch. */
    td_batch batch;
    CHECK(td_loader_next(b.loader, &batch));
    td_generator_get_state(NULL, random[0], sizeof random[0]);
    CHECK_FAILS(td_training_load(temp_path("a"), &b.training, NULL), TD_ERR_STATE,
                "td_loader_reset");
    check_same_run(&b, &before);
    td_generator_get_state(NULL, random[1], sizeof random[1]);
    CHECK_MEM(random[0], random[1], sizeof random[0]);
    td_optimizer_destroy(adam);
    end_run(&a);
    end_run(&b);
    end_run(&before);
}

TEST(parts_that_are_missing_are_named)
{
    struct run a = make_run(1, false, 0);
    td_training only = {.model = a.training.model, .step = 3};
    CHECK_OK(td_training_save(temp_path("only"), &only, NULL));
    CHECK_FAILS(td_training_load(temp_path("only"), &a.training, NULL), TD_ERR_INVALID,
                "without its optimizer");
    td_training back = {.model = a.training.model};
    CHECK_OK(td_training_load(temp_path("only"), &back, NULL));
    CHECK_EQ(back.step, 3);
    CHECK_OK(td_save_module(temp_path("net"), a.training.model));
    CHECK_FAILS(td_training_load(temp_path("net"), &back, NULL), TD_ERR_INVALID,
                "no checkpoint of a training");
    CHECK_FAILS(td_training_load(temp_path("none"), &back, NULL), TD_ERR_SYSTEM, "No such file");
    CHECK_FAILS(td_training_load(NULL, &back, NULL), TD_ERR_INVALID, "path");
    CHECK_FAILS(td_training_load(temp_path("only"), NULL, NULL), TD_ERR_INVALID, "NULL");
    CHECK_FAILS(td_training_save(NULL, &back, NULL), TD_ERR_INVALID, "path");
    CHECK_FAILS(td_training_save(temp_path("x"), NULL, NULL), TD_ERR_INVALID, "NULL");
    CHECK_FAILS(td_training_save_numbered(temp_path("d"), &back, -1, NULL), TD_ERR_INVALID, "keep");
    back.step = -1;
    CHECK_FAILS(td_training_save_numbered(temp_path("d"), &back, 1, NULL), TD_ERR_INVALID, "step");
    CHECK_FAILS(td_training_save_numbered(NULL, &back, 1, NULL), TD_ERR_INVALID, "directory");
    CHECK_EQ(td_test_count_files(td_test_temp_dir()), 2);
    end_run(&a);
}

/* ---- Ranks ---------------------------------------------------------------------------------------- */

RANKS(all_ranks_get_the_same_message, .ranks = 3)
{
    CHECK_OK(td_init_process_group(NULL));
    struct run a = make_run(1, false, 0), before = make_run(1, false, 0);
    const char *path = temp_path("missing/a");
    CHECK_FAILS(td_training_save(path, &a.training, NULL), TD_ERR_SYSTEM, path);
    CHECK_FAILS(td_training_load(path, &a.training, NULL), TD_ERR_SYSTEM, path);
    CHECK_FAILS(td_training_save(temp_path("a"), td_test_rank() == 1 ? NULL : &a.training, NULL),
                TD_ERR_INVALID, "rank 1: td_training_save: the training is NULL");

    train_until(&a, 5);
    CHECK_OK(td_training_save(temp_path("a"), &a.training, NULL));
    train_until(&a, 7);
    td_loader_reset(a.loader);
    struct run b = make_run(1, false, 0);
    td_module *other = td_linear(2, 2), *mine = b.training.model;
    if (td_test_rank() == 2)
        b.training.model = other;
    CHECK_FAILS(td_training_load(temp_path("a"), &b.training, NULL), TD_ERR_INVALID,
                "rank 2: td_training_load: td_module_load_state");
    b.training.model = mine;
    check_same_run(&b, &before);
    td_module_destroy(other);
    end_run(&b);
    end_run(&a);
    end_run(&before);
    CHECK_OK(td_destroy_process_group());
}

/* Only rank 0 of the group needs the file, and each rank gets its own random numbers back. */
RANKS(groups_and_sizes, .ranks = 3)
{
    CHECK_OK(td_init_process_group(NULL));
    int rank = td_test_rank();
    td_group *pair = NULL;
    CHECK_OK(td_new_group((int[]){2, 1}, 2, NULL, &pair));
    if (rank > 0) {
        td_dataset *dataset = make_dataset();
        td_sampler *sampler = td_distributed_sampler(dataset,
                                                     &(td_sampler_options){.num_replicas = 2});
        td_training training = {.sampler = sampler, .step = 4};
        int64_t index;
        td_sampler_set_epoch(sampler, 6);
        for (int i = 0; i < 3 + rank; i++)
            CHECK(td_sampler_next(sampler, &index));
        td_manual_seed(10 + (uint64_t)rank);
        const char *path = td_get_rank(pair) == 0 ? temp_path("pair") : "/nowhere";
        CHECK_OK(td_training_save(path, &training, pair));
        td_tensor *a = td_rand(SHAPE(9), TD_F32, NULL), *b = NULL;
        td_manual_seed(99);
        CHECK(td_sampler_next(sampler, &index));
        CHECK_OK(td_training_load(path, &training, pair));
        b = td_rand(SHAPE(9), TD_F32, NULL);
        td_sampler_position position;
        td_sampler_get_position(sampler, &position);
        CHECK_EQ(position.taken, 3 + rank);
        td_sampler_release(sampler);
        td_dataset_release(dataset);
        CHECK_MEM(td_tensor_data(a), td_tensor_data(b), td_tensor_nbytes(a));
        td_tensor_release(a);
        td_tensor_release(b);
    }
    td_test_barrier();

    /* With another number of ranks the epoch begins anew, and generators are unchanged. */
    td_dataset *dataset = make_dataset();
    td_sampler *sampler = td_distributed_sampler(dataset, NULL);
    td_training all = {.sampler = sampler, .step = 1};
    CHECK_FAILS(td_training_load(temp_path("pair"), &all, NULL), TD_ERR_MISMATCH, "2 ranks");
    CHECK_EQ(all.step, 1);
    all.any_size = true;
    td_manual_seed(5);
    td_tensor *a = td_rand(SHAPE(9), TD_F32, NULL);
    td_manual_seed(5);
    CHECK_OK(td_training_load(temp_path("pair"), &all, NULL));
    td_tensor *b = td_rand(SHAPE(9), TD_F32, NULL);
    CHECK_MEM(td_tensor_data(a), td_tensor_data(b), td_tensor_nbytes(a));
    CHECK_EQ(all.step, 4);
    td_sampler_position position;
    td_sampler_get_position(sampler, &position);
    CHECK(position.epoch == 6 && position.taken == 0 && !position.begun);
    td_tensor_release(a);
    td_tensor_release(b);
    td_sampler_release(sampler);
    td_dataset_release(dataset);
    td_group_destroy(pair);
    CHECK_OK(td_destroy_process_group());
}

RANKS(plain_and_wrapped_models_read_the_same_checkpoints, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    td_module *plain = td_linear(3, 2), *wrapped = td_ddp(td_linear(3, 2), NULL);
    td_training a = {.model = wrapped, .step = 1}, b = {.model = plain};
    CHECK_OK(td_training_save(temp_path("wrapped"), &a, NULL));
    CHECK_OK(td_training_load(temp_path("wrapped"), &b, NULL));
    CHECK_MEM(td_tensor_data(td_module_parameter(plain, "weight")),
              td_tensor_data(td_module_parameter(wrapped, "module.weight")), 24);
    CHECK_OK(td_init_constant(td_module_parameter(plain, "weight"), 5));
    CHECK_OK(td_training_save(temp_path("plain"), &b, NULL));
    CHECK_OK(td_training_load(temp_path("plain"), &a, NULL));
    CHECK(((float *)td_tensor_data(td_module_parameter(wrapped, "module.weight")))[5] == 5);
    td_module_destroy(plain);
    td_module_destroy(wrapped);
    CHECK_OK(td_destroy_process_group());
}

/* ---- Directories ---------------------------------------------------------------------------------- */

static void ignore_log(td_log_level level, const char *line, void *arg)
{
    if (level == TD_LOG_WARN)
        snprintf(arg, 512, "%s", line);
}

TEST(the_last_ones_are_kept)
{
    const char *directory = temp_path("run");
    td_training training = {.model = td_linear(3, 2)};
    bool loaded = true;
    CHECK_OK(td_training_load_latest(directory, &training, NULL, &loaded));
    CHECK(!loaded);
    CHECK_FAILS(td_training_load_latest(directory, &training, NULL, NULL), TD_ERR_SYSTEM,
                "no checkpoint");
    for (training.step = 8; training.step <= 12; training.step++) {
        CHECK_OK(
            td_init_constant(td_module_parameter(training.model, "bias"), (double)training.step));
        CHECK_OK(td_training_save_numbered(directory, &training, 3, NULL));
    }
    CHECK_EQ(td_test_count_files(directory), 3);
    CHECK(!access(temp_path("run/step-000000000010.safetensors"), R_OK));
    CHECK_OK(td_training_load_latest(directory, &training, NULL, &loaded));
    CHECK(loaded);
    CHECK_EQ(training.step, 12);
    CHECK(((float *)td_tensor_data(td_module_parameter(training.model, "bias")))[1] == 12);

    /* One with a lower number than the others is not removed by its own call. */
    training.step = 3;
    CHECK_OK(td_training_save_numbered(directory, &training, 1, NULL));
    CHECK_EQ(td_test_count_files(directory), 1);
    CHECK_OK(td_training_load_latest(directory, &training, NULL, NULL));
    CHECK_EQ(training.step, 3);
    training.step = INT64_MAX;
    CHECK_OK(td_training_save_numbered(directory, &training, 0, NULL));
    training.step = 0;
    CHECK_OK(td_training_load_latest(directory, &training, NULL, NULL));
    CHECK_EQ(training.step, INT64_MAX);
    td_module_destroy(training.model);
}

TEST(damaged_ones_are_passed_over)
{
    char warning[512] = "";
    const char *directory = temp_path("run");
    td_training training = {.model = td_linear(3, 2)};
    for (training.step = 1; training.step <= 2; training.step++)
        CHECK_OK(td_training_save_numbered(directory, &training, 0, NULL));
    const char *newest = temp_path("run/step-000000000002.safetensors");
    CHECK(!truncate(newest, 700));
    td_log_set_sink(ignore_log, warning);
    CHECK_OK(td_training_load_latest(directory, &training, NULL, NULL));
    CHECK_EQ(training.step, 1);
    CHECK_CONTAINS(warning, newest);

    /* A dtype that Tandem's files cannot have is a damaged file, too. */
    static char file[1 << 14];
    training.step = 2;
    CHECK_OK(td_training_save_numbered(directory, &training, 0, NULL));
    FILE *stream = fopen(newest, "r+b");
    size_t size = fread(file, 1, sizeof file, stream);
    char *dtype = memmem(file, size, "\"F32\"", 5);
    CHECK(dtype != NULL);
    CHECK(!fseek(stream, dtype - file + 3, SEEK_SET) && fputc('3', stream) == '3');
    fclose(stream);
    CHECK_OK(td_training_load_latest(directory, &training, NULL, NULL));
    CHECK_EQ(training.step, 1);
    CHECK_CONTAINS(warning, "F33");
    CHECK(!truncate(temp_path("run/step-000000000001.safetensors"), 0));
    CHECK_FAILS(td_training_load_latest(directory, &training, NULL, NULL), TD_ERR_INVALID, newest);
    td_log_set_sink(NULL, NULL);
    td_module_destroy(training.model);
}

TEST(stale_temporary_files_are_removed_and_open_ones_are_not)
{
    td_training training = {0};
    CHECK(!mkdir(temp_path("run"), 0700));
    const char *dead = temp_path("run/.tandem-0123456789abcdef.tmp"),
               *alive = temp_path("run/.tandem-fedcba9876543210.tmp");
    close(open(dead, O_CREAT | O_WRONLY, 0600));
    close(open(temp_path("run/.tandem-mine.tmp"), O_CREAT | O_WRONLY, 0600));
    alive = strdup(alive);
    dead = strdup(temp_path("run/.tandem-0123456789abcdef.tmp"));
    int fd = open(alive, O_CREAT | O_WRONLY, 0600);
    CHECK(fd >= 0 && !flock(fd, LOCK_EX));
    bool loaded = true;
    CHECK_OK(td_training_load_latest(temp_path("run"), &training, NULL, &loaded));
    CHECK(!loaded && access(dead, F_OK) && !access(alive, F_OK));
    CHECK_EQ(td_test_count_files(temp_path("run")), 2);
    close(fd);
    CHECK_OK(td_training_load_latest(temp_path("run"), &training, NULL, &loaded));
    CHECK_EQ(td_test_count_files(temp_path("run")), 1);
    free((char *)alive);
    free((char *)dead);
}

/* ---- Writers that are killed ---------------------------------------------------------------------- */

/* Writes checkpoints from `from` on until it is killed; *done is the last step that was reported. The weights are
 * all equal to the step; there are enough of them that most kills happen while they are written. */
static void write_forever(const char *directory, int64_t from, _Atomic int64_t *done)
{
    td_training training = {.model = td_linear(1000, 1000)};
    CHECK(training.model != NULL);
    for (training.step = from;; training.step++) {
        td_init_constant(td_module_parameter(training.model, "weight"), (double)training.step);
        if (td_training_save_numbered(directory, &training, 2, NULL))
            _exit(1);
        atomic_store(done, training.step);
    }
}

static void sleep_random(td_generator *generator)
{
    td_tensor *x = td_empty(NULL, 0, TD_I64, NULL);
    CHECK_OK(td_random_range_(x, 0, 30000, generator));
    int64_t us = *(int64_t *)td_tensor_data(x);
    td_tensor_release(x);
    nanosleep(&(struct timespec){.tv_nsec = us * 1000}, NULL);
}

static int count_half_written(const char *directory)
{
    int count = 0;
    DIR *stream = opendir(directory);
    for (struct dirent *entry; stream && (entry = readdir(stream));)
        count += !strncmp(entry->d_name, ".tandem-", 8);
    if (stream)
        closedir(stream);
    return count;
}

static void check_newest(const char *directory, td_module *model, int64_t reported, int64_t *step)
{
    td_training training = {.model = model};
    bool loaded = false;
    CHECK_OK(td_training_load_latest(directory, &training, NULL, &loaded));
    CHECK(loaded || reported < 0);
    if (!loaded)
        return;
    if (training.step < reported)
        FAIL("step %lld was reported, %lld is there", (long long)reported,
             (long long)training.step);
    const float *weight = td_tensor_data(td_module_parameter(model, "weight"));
    for (int i = 0; i < 1000 * 1000; i++)
        CHECK(weight[i] == (float)training.step);
    CHECK_EQ(count_half_written(directory), 0); /* they were removed */
    *step = training.step;
}

static void count_warnings(td_log_level level, const char *line, void *arg)
{
    (void)line;
    if (level <= TD_LOG_WARN)
        ++*(int *)arg;
}

TEST(killed_writers_leave_a_whole_checkpoint, .deadline_s = 120)
{
    const char *wanted = getenv("TD_TEST_KILLS");
    int kills = wanted ? atoi(wanted) : 20, warnings = 0, half_written = 0;
    char directory[512];
    snprintf(directory, sizeof directory, "%s", temp_path("run"));
    _Atomic int64_t *done = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1,
                                 0);
    CHECK(done != MAP_FAILED);
    atomic_store(done, -1);
    td_module *model = td_linear(1000, 1000);
    td_generator *generator = td_generator_create((uint64_t)getpid(), NULL);
    td_log_set_sink(count_warnings, &warnings);
    int64_t step = 0;
    for (int i = 0; i < kills; i++) {
        pid_t writer = fork();
        CHECK(writer >= 0);
        if (writer == 0) {
            write_forever(directory, step + 1, done);
            _exit(0);
        }
        int64_t before = atomic_load(done);
        if (i % 4) /* most are killed while they write, some before */
            CHECK_SOON(atomic_load(done) > before);
        sleep_random(generator);
        CHECK(!kill(writer, SIGKILL));
        int status;
        CHECK_EQ(waitpid(writer, &status, 0), writer);
        CHECK(WIFSIGNALED(status));
        half_written += count_half_written(directory);
        check_newest(directory, model, atomic_load(done), &step);
    }
    td_log_set_sink(NULL, NULL);
    printf("%d kills, %d files left half written, %lld checkpoints\n", kills, half_written,
           (long long)step);
    CHECK_EQ(warnings, 0);
    CHECK(step >= kills / 2);
    td_generator_destroy(generator);
    td_module_destroy(model);
}

/* ---- The example ---------------------------------------------------------------------------------- */

static char *run_example(const char *directory)
{
    struct td_test_child child = td_test_exec(
        (const char *const[]){TD_TEST_BUILD_DIR "/bin/tdrun", "--standalone", "--nproc-per-node=2",
                              TD_TEST_BUILD_DIR "/examples/12_checkpoint", directory, NULL});
    if (child.status)
        FAIL("%s", child.output);
    return child.output;
}

TEST(the_example_goes_on, .deadline_s = 40)
{
    char *first = run_example(td_test_temp_dir()), *second = run_example(td_test_temp_dir());
    for (int rank = 0; rank < 2; rank++) {
        char line[64];
        snprintf(line, sizeof line, "rank %d: begins at step 0", rank);
        CHECK_CONTAINS(first, line);
        snprintf(line, sizeof line, "rank %d: goes on at step 10", rank);
        CHECK_CONTAINS(second, line);
        snprintf(line, sizeof line, "rank %d: step 20, loss", rank);
        CHECK_CONTAINS(second, line);
    }
    CHECK_EQ(td_test_count_files(temp_path("checkpoints")), 2);
    CHECK_EQ(td_test_count_files(td_test_temp_dir()), 1);
    free(first);
    free(second);
}
