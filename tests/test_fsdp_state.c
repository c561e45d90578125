/* States and checkpoints of sharded models: saved under one strategy and number of ranks, loaded under others, by DDP and by a
 * process alone; whole states without whole models; damage; and ranks that are killed while they save. */
#include "forks.h"
#include "runner.h"
#include "sharded_states.h"
#include "worlds.h"

#include <tandem/tandem.h>

#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { IN = 20, WIDE = 90, OUT = 4, BATCH = 5 };

static const char *temp_path(const char *name)
{
    static char path[4][512];
    static int next;
    char *text = path[next++ % 4];
    snprintf(text, sizeof path[0], "%s/%s", td_test_temp_dir(), name);
    return text;
}

/* ---- Trainings ----------------------------------------------------------------------------------------------- */

enum kind { FULL, GATHERED, GRAD_OP, WHOLE, HYBRID, DDP, PLAIN, KINDS };

static td_module *make_net(uint64_t seed)
{
    td_manual_seed(seed);
    return td_sequential(td_linear(IN, WIDE), td_layer_norm(WIDE), td_relu(),
                         td_sequential(td_linear(WIDE, WIDE), td_relu(), NULL),
                         td_linear(WIDE, OUT), NULL);
}

static td_module *wrap(enum kind kind, td_module *net, td_group *group)
{
    static const td_fsdp_strategy strategies[] = {TD_FULL_SHARD, TD_FULL_SHARD, TD_SHARD_GRAD_OP,
                                                  TD_NO_SHARD, TD_HYBRID_SHARD};
    if (kind == PLAIN)
        return net;
    if (kind == DDP)
        return td_ddp(net, &(td_ddp_options){.group = group});
    return td_fsdp(net, &(td_fsdp_options){.group = group,
                                           .strategy = strategies[kind],
                                           .min_parameters = 2000,
                                           .shard_size = kind == HYBRID ? 2 : 0,
                                           .no_shared_memory = kind == GATHERED});
}

static td_training make_training(enum kind kind, td_group *group, uint64_t seed)
{
    td_module *model = wrap(kind, make_net(seed), group);
    CHECK(model != NULL);
    td_optimizer *adam = td_adam(model, &(td_adam_options){.lr = 0.01});
    CHECK(adam != NULL);
    return (td_training){.model = model, .optimizer = adam, .any_size = true};
}

static void end_training(td_training *training)
{
    td_optimizer_destroy(training->optimizer);
    td_module_destroy(training->model);
}

static td_tensor *data(int64_t step, int rank)
{
    td_tensor *tensor = td_empty(TD_SHAPE(BATCH, IN), TD_F32, NULL);
    float *x = td_tensor_data(tensor);
    unsigned state = (unsigned)(step * 1009 + rank * 31 + 5);
    for (int i = 0; i < BATCH * IN; i++) {
        state = state * 1664525u + 1013904223u;
        x[i] = (float)(state >> 8) / (float)(1 << 24) - 0.5f;
    }
    return tensor;
}

static td_tensor *loss_of(td_module *model, int64_t step, int rank)
{
    td_tensor *y = td_forward(model, data(step, rank));
    return td_mean(td_mul(y, y));
}

static td_status try_step(td_training *training, int rank)
{
    TD_SCOPE;
    td_status status = td_optimizer_zero_grad(training->optimizer);
    td_tensor *loss = status ? NULL : loss_of(training->model, training->step, rank);
    status = loss ? td_backward(loss) : td_last_status();
    if (!status)
        status = td_optimizer_step(training->optimizer);
    training->step += !status;
    return status;
}

static void train(td_training *training, td_group *group, int steps)
{
    for (; steps > 0; steps--)
        CHECK_OK(try_step(training, td_get_rank(group)));
}

/* ---- Comparing whole states -------------------------------------------------------------------------------- */

/* Model and optimizer, whole, on rank 0 of the group. */
struct whole {
    td_state *model, *optimizer;
};

static td_state *gather(td_state *state, td_group *group)
{
    td_state *full = NULL;
    CHECK_OK(td_gather_state(state, group, &full));
    td_state_destroy(state);
    return full;
}

static struct whole whole_of(const td_training *training, enum kind kind, td_group *group)
{
    td_state *model = td_module_state(training->model);
    td_state *optimizer = td_optimizer_state(training->optimizer);
    if (kind != PLAIN)
        return (struct whole){gather(model, group), gather(optimizer, group)};
    struct whole whole = {td_state_clone(model), td_state_clone(optimizer)};
    td_state_destroy(model);
    td_state_destroy(optimizer);
    return whole;
}

static const char *bare(const char *name)
{
    return strncmp(name, "module.", 7) ? name : name + 7;
}

static void compare(const td_state *a, const td_state *b)
{
    CHECK_EQ(td_state_count(a), td_state_count(b));
    for (int i = 0; i < td_state_count(a); i++) {
        td_tensor *x = td_state_tensor(a, i), *y = td_state_tensor(b, i);
        CHECK_STR(bare(td_state_name(a, i)), bare(td_state_name(b, i)));
        CHECK_EQ(td_tensor_ndim(x), td_tensor_ndim(y));
        CHECK_EQ(td_tensor_nbytes(x), td_tensor_nbytes(y));
        CHECK_MEM(td_tensor_data(x), td_tensor_data(y), td_tensor_nbytes(x));
    }
}

/* On rank 0, which has both; frees them. */
static void same(struct whole a, struct whole b)
{
    if (a.model && b.model) {
        compare(a.model, b.model);
        compare(a.optimizer, b.optimizer);
    }
    td_state_destroy(a.model);
    td_state_destroy(a.optimizer);
    td_state_destroy(b.model);
    td_state_destroy(b.optimizer);
}

/* ---- From one strategy and number of ranks to another ------------------------------------------------------ */

/* What follows a load goes on as DDP does that loads the same; with as many ranks, as without the interruption. */
static void resume(enum kind from, int savers, enum kind to, int loaders)
{
    td_group *first = first_ranks(savers), *second = first_ranks(loaders);
    int rank = td_test_rank();
    td_training before = {0};
    struct whole saved = {0}, later = {0};
    if (rank < savers) {
        before = make_training(from, first, 1);
        train(&before, first, 3);
        CHECK_OK(td_training_save_sharded(temp_path("a"), &before, first, NULL));
        saved = whole_of(&before, from, first);
        train(&before, first, 3);
        later = whole_of(&before, from, first);
        end_training(&before);
    }
    CHECK_OK(td_barrier(NULL, NULL));
    if (rank < loaders) {
        td_training after = make_training(to, second, 2);
        CHECK_OK(td_training_load_sharded(temp_path("a"), &after, second));
        CHECK_EQ(after.step, 3);
        same(saved, whole_of(&after, to, second));
        td_training ddp = make_training(loaders > 1 ? DDP : PLAIN, second, 3);
        CHECK_OK(td_training_load_sharded(temp_path("a"), &ddp, second));
        train(&after, second, 3);
        train(&ddp, second, 3);
        struct whole end = whole_of(&after, to, second);
        struct whole reference = whole_of(&ddp, loaders > 1 ? DDP : PLAIN, second);
        bool exact = to != HYBRID && from != HYBRID; /* which adds in another order */
        if (exact && savers == loaders && rank == 0) {
            compare(end.model, later.model);
            compare(end.optimizer, later.optimizer);
        }
        if (to == HYBRID && loaders > 2) {
            same(end, (struct whole){0});
            same(reference, (struct whole){0});
        } else {
            same(end, reference);
        }
        end_training(&after);
        end_training(&ddp);
    } else {
        same(saved, (struct whole){0});
    }
    td_state_destroy(later.model);
    td_state_destroy(later.optimizer);
    CHECK_OK(td_barrier(NULL, NULL));
    CHECK_OK(td_group_destroy(first));
    CHECK_OK(td_group_destroy(second));
}

RANKS(other_strategies, .ranks = 2, .deadline_s = 60)
{
    CHECK_OK(td_init_process_group(NULL));
    for (enum kind from = FULL; from <= DDP; from++)
        for (enum kind to = FULL; to <= DDP; to++)
            if (from == FULL || to == FULL)
                resume(from, 2, to, 2);
    CHECK_OK(td_destroy_process_group());
}

RANKS(other_numbers_of_ranks, .ranks = 4, .deadline_s = 90)
{
    CHECK_OK(td_init_process_group(NULL));
    static const struct {
        enum kind from;
        int savers;
        enum kind to;
        int loaders;
    } ways[] = {
        {FULL, 4, GRAD_OP, 3},   {FULL, 3, FULL, 4},      {FULL, 2, DDP, 4},
        {FULL, 4, PLAIN, 1},     {PLAIN, 1, FULL, 3},     {DDP, 3, GATHERED, 2},
        {HYBRID, 4, FULL, 3},    {GRAD_OP, 3, HYBRID, 4}, {WHOLE, 2, FULL, 4},
        {GATHERED, 4, WHOLE, 3},
    };
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++)
        resume(ways[i].from, ways[i].savers, ways[i].to, ways[i].loaders);
    CHECK_OK(td_destroy_process_group());
}

/* ---- Whole states -------------------------------------------------------------------------------------------- */

static void names_are_those_without(const td_state *state)
{
    td_module *net = make_net(1);
    td_state *plain = td_module_state(net);
    CHECK_EQ(td_state_count(state), td_state_count(plain));
    for (int i = 0; i < td_state_count(state); i++)
        CHECK_STR(td_state_name(state, i), td_state_name(plain, i));
    td_state_destroy(plain);
    td_module_destroy(net);
}

RANKS(a_full_file, .ranks = 3)
{
    CHECK_OK(td_init_process_group(NULL));
    td_training training = make_training(FULL, NULL, 1);
    train(&training, NULL, 3);
    td_state *state = td_module_state(training.model);
    names_are_those_without(state);
    CHECK_FAILS(td_save_module(temp_path("b"), training.model), TD_ERR_INVALID, "is a shard");
    CHECK_OK(td_save_full(temp_path("full"), state, NULL));
    td_state_destroy(state);
    CHECK_OK(td_barrier(NULL, NULL));
    struct whole expected = whole_of(&training, FULL, NULL);
    for (enum kind kind = FULL; kind < KINDS; kind++) { /* each rank reads the file */
        if (kind == HYBRID)
            continue; /* not with 3 ranks */
        td_training other = make_training(kind, NULL, 2);
        CHECK_OK(td_load_module(temp_path("full"), other.model, NULL));
        struct whole loaded = whole_of(&other, kind, NULL);
        if (td_test_rank() == 0)
            compare(loaded.model, expected.model);
        same(loaded, (struct whole){0});
        end_training(&other);
    }
    same(expected, (struct whole){0});
    end_training(&training);
    CHECK_OK(td_destroy_process_group());
}

RANKS(whole_states_fit_shards, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    td_training training = make_training(FULL, NULL, 1), other = make_training(FULL, NULL, 2);
    td_module *net = make_net(7);
    td_state *state = td_module_state(net), *shards = td_module_state(training.model);
    CHECK_OK(td_module_load_state(training.model, state, true));
    td_state *full = gather(td_module_state(training.model), NULL);
    if (full)
        compare(full, state);
    td_state_destroy(full);
    CHECK_OK(td_module_load_state(other.model, shards, true)); /* the same shards */
    full = gather(td_module_state(other.model), NULL);
    if (full)
        compare(full, state);
    td_state_destroy(full);
    /* a shard is no whole of another shape, and no other shard of the same size */
    CHECK_FAILS(td_module_load_state(net, shards, true), TD_ERR_INVALID, "0.weight (");
    td_tensor *part = td_state_get(shards, "3.0.weight");
    td_shard shard = *td_tensor_shard(part);
    shard.offset += shard.offset ? -1 : 1;
    CHECK_OK(td_tensor_set_shard(part, &shard));
    CHECK_FAILS(td_module_load_state(other.model, shards, true), TD_ERR_INVALID,
                "3.0.weight (another shard)");
    td_state_destroy(shards);
    td_state_destroy(state);
    td_module_destroy(net);
    end_training(&training);
    end_training(&other);
    CHECK_OK(td_destroy_process_group());
}

static int64_t status_kib(const char *field)
{
    char line[256];
    long long kib = -1;
    FILE *file = fopen("/proc/self/status", "r");
    CHECK(file != NULL);
    while (kib < 0 && fgets(line, sizeof line, file))
        if (!strncmp(line, field, strlen(field)))
            sscanf(line + strlen(field), ": %lld", &kib);
    fclose(file);
    return kib;
}

/* 32 MiB of parameters: what a rank needs beside its shards to stream them is a small part of that. */
RANKS(no_rank_has_the_whole_model, .ranks = 4, .deadline_s = 60)
{
    CHECK_OK(td_init_process_group(NULL));
    td_module *model = td_fsdp(td_sequential(td_linear(2048, 2048), td_linear(2048, 2048), NULL),
                               &(td_fsdp_options){.min_parameters = 1});
    CHECK(model != NULL);
    td_state *state = td_module_state(model), *full = NULL;
    td_memory_stats before, after;
    td_device *host = td_device_get("cpu");
    for (int way = 0; way < 2; way++) {
        int fd = open("/proc/self/clear_refs", O_WRONLY | O_CLOEXEC);
        bool resets = fd >= 0 && write(fd, "5", 1) == 1; /* VmHWM begins anew */
        if (fd >= 0)
            close(fd);
        CHECK_OK(td_device_memory_stats(host, &before));
        CHECK_OK(td_device_reset_peak(host));
        int64_t resident = status_kib("VmRSS");
        CHECK_OK(way ? td_gather_state(state, NULL, &full)
                     : td_save_full(temp_path("full"), state, NULL));
        CHECK_OK(td_device_memory_stats(host, &after));
        bool has = way && td_test_rank() == 0;
        CHECK(has == (full != NULL));
        CHECK(after.allocated_peak - before.allocated < (has ? 40 : 4) << 20);
        if (resets && td_test_slowness() == 1 && !has) /* sanitizers have memory of their own */
            CHECK(status_kib("VmHWM") - resident <
                  14 << 10); /* shards of 8 MiB may be mapped anew */
    }
    td_state_destroy(full);
    td_state_destroy(state);
    td_module_destroy(model);
    CHECK_OK(td_destroy_process_group());
}

/* ---- Trouble ------------------------------------------------------------------------------------------------- */

static void limit_files(rlim_t bytes)
{
    struct rlimit limit;
    CHECK_EQ(getrlimit(RLIMIT_FSIZE, &limit), 0);
    limit.rlim_cur = bytes;
    CHECK_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
}

RANKS(a_full_disk, .ranks = 3)
{
    CHECK_OK(td_init_process_group(NULL));
    td_training training = make_training(FULL, NULL, 1);
    train(&training, NULL, 2);
    bool loaded;
    CHECK_OK(td_training_save_sharded_numbered(temp_path("run"), &training, 2, NULL, NULL));
    struct whole saved = whole_of(&training, FULL, NULL);
    train(&training, NULL, 1);
    if (td_test_rank() == 2)
        limit_files(9000);
    td_status status = td_training_save_sharded_numbered(temp_path("run"), &training, 2, NULL,
                                                         NULL);
    limit_files(RLIM_INFINITY);
    CHECK_EQ(status, TD_ERR_SYSTEM);
    CHECK_CONTAINS(td_last_error(), "rank 2: ");
    CHECK_CONTAINS(td_last_error(), "shard-00002.safetensors cannot be written, at \"");
    CHECK_EQ(td_test_count_files(temp_path("run")), 1);
    td_test_barrier();
    CHECK_OK(td_training_load_latest(temp_path("run"), &training, NULL, &loaded));
    CHECK(loaded && training.step == 2);
    same(saved, whole_of(&training, FULL, NULL));
    end_training(&training);
    CHECK_OK(td_destroy_process_group());
}

static void change_byte(const char *path, off_t at)
{
    uint8_t byte;
    int fd = open(path, O_RDWR | O_CLOEXEC);
    CHECK(fd >= 0);
    CHECK_EQ(pread(fd, &byte, 1, at), 1);
    byte ^= 0x40;
    CHECK_EQ(pwrite(fd, &byte, 1, at), 1);
    close(fd);
}

RANKS(damaged_and_missing_shards, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    td_training training = make_training(FULL, NULL, 1), other = make_training(GRAD_OP, NULL, 2);
    train(&training, NULL, 2);
    train(&other, NULL, 1);
    CHECK_OK(td_training_save_sharded(temp_path("a"), &training, NULL, NULL));
    char shard[512];
    snprintf(shard, sizeof shard, "%s", temp_path("a/shard-00001.safetensors"));
    struct stat there;
    CHECK_EQ(stat(shard, &there), 0);
    for (int way = 0; way < 2; way++) {
        struct whole before = whole_of(&other, GRAD_OP, NULL);
        td_test_barrier();
        if (td_test_rank() == 0 && way == 0)
            change_byte(shard, there.st_size - 5000);
        if (td_test_rank() == 0 && way == 1)
            CHECK_EQ(unlink(shard), 0);
        td_test_barrier();
        td_status status = td_training_load_sharded(temp_path("a"), &other, NULL);
        CHECK_EQ(status, way ? TD_ERR_SYSTEM : TD_ERR_INVALID);
        CHECK_CONTAINS(td_last_error(), "shard-00001.safetensors");
        CHECK_CONTAINS(td_last_error(), way ? "rank 1 has saved its part of \"" : "rank ");
        CHECK_CONTAINS(td_last_error(),
                       way ? ".weight\" and others" : "is damaged: the checksum of");
        CHECK_EQ(other.step, 1);
        same(before, whole_of(&other, GRAD_OP, NULL)); /* nothing was changed */
    }
    train(&other, NULL, 1);
    end_training(&training);
    end_training(&other);
    CHECK_OK(td_destroy_process_group());
}

/* ---- Ranks that are killed ----------------------------------------------------------------------------------- */

enum { WRITERS = 3, READERS = 2, MOST_STEPS = 1 << 16 };

struct shared {
    _Atomic int64_t done; /* the last step that was reported as saved; -1: none */
    _Atomic int64_t found;
    _Atomic uint32_t losses[MOST_STEPS]; /* the bits of the loss after each step */
};

struct writing {
    struct init_url init;
    char directory[512];
    struct shared *shared;
    int rank;
    bool async;
    bool at_start; /* one may die before it has met the others, which then wait for it */
};

/* The loss for numbers that no rank trains with; of whole parameters, and so the same for any number of ranks. */
static td_status measure(td_module *model, uint32_t *bits)
{
    TD_SCOPE;
    TD_NO_GRAD;
    td_tensor *loss = loss_of(model, -1, 77);
    if (!loss)
        return td_last_status();
    memcpy(bits, td_tensor_data(loss), sizeof *bits);
    return TD_OK;
}

/* Trains and saves until another rank is dead. */
static void write_forever(void *arg)
{
    struct writing *writing = arg;
    struct shared *shared = writing->shared;
    td_init_options options = {.init_method = writing->init.url,
                               .world_size = WRITERS,
                               .rank = writing->rank,
                               .timeout_ms = writing->at_start ? 2000 : 0};
    if (td_init_process_group(&options))
        _exit(0);
    td_module *model = wrap(FULL, make_net(1), NULL);
    td_optimizer *adam = model ? td_adam(model, &(td_adam_options){.lr = 0.001}) : NULL;
    td_training training = {.model = model, .optimizer = adam, .any_size = true};
    bool loaded;
    if (!adam || td_training_load_latest(writing->directory, &training, NULL, &loaded))
        _exit(0);
    while (!try_step(&training, writing->rank)) {
        td_async_save *save = NULL;
        uint32_t bits;
        if (training.step >= MOST_STEPS || measure(model, &bits))
            _exit(0);
        atomic_store(&shared->losses[training.step], bits);
        if (td_training_save_sharded_numbered(writing->directory, &training, 2, NULL,
                                              writing->async ? &save : NULL) ||
            (save && td_async_save_wait(save, 0)))
            _exit(0);
        td_async_save_release(save);
        if (writing->rank == 0)
            atomic_store(&shared->done, training.step);
    }
    _exit(0);
}

/* The newest one loads, has the loss that was seen then, and is not older than what was reported. */
static void check_newest(td_training *training, const struct writing *writing)
{
    int64_t reported = atomic_load(&writing->shared->done);
    bool loaded = false;
    uint32_t bits = 0;
    training->any_size = true;
    CHECK_OK(td_training_load_latest(writing->directory, training, NULL, &loaded));
    CHECK(loaded || reported < 0);
    if (!loaded)
        return;
    if (training->step < reported)
        FAIL("step %lld was reported, %lld is there", (long long)reported,
             (long long)training->step);
    CHECK_OK(measure(training->model, &bits));
    CHECK_EQ(bits, atomic_load(&writing->shared->losses[training->step]));
    atomic_store(&writing->shared->found, training->step);
}

static void read_newest(int rank, void *arg)
{
    struct writing *writing = arg;
    td_init_options options = {
        .init_method = writing->init.url, .world_size = READERS, .rank = rank};
    CHECK_OK(td_init_process_group(&options));
    td_training training = make_training(GRAD_OP, NULL, 5);
    check_newest(&training, writing);
    CHECK_OK(try_step(&training, rank)); /* and training goes on */
    end_training(&training);
    CHECK_OK(td_destroy_process_group());
}

static void remove_url(const struct init_url *init)
{
    unlink(init->url + strlen("file://"));
}

static void kill_round(struct writing *writing, unsigned *seed)
{
    pid_t pids[WRITERS];
    struct writing each[WRITERS];
    int64_t before = atomic_load(&writing->shared->done);
    writing->init = file_init_url();
    writing->async = rand_r(seed) % 2;
    writing->at_start = rand_r(seed) % 8 == 0;
    for (int r = 0; r < WRITERS; r++) {
        each[r] = *writing;
        each[r].rank = r;
        pids[r] = fork_start(write_forever, &each[r]);
    }
    CHECK_SOON(writing->at_start || atomic_load(&writing->shared->done) > before);
    nanosleep(&(struct timespec){.tv_nsec = rand_r(seed) % 60000 * 1000}, NULL);
    int first = rand_r(seed) % WRITERS;
    fork_kill(pids[first], SIGKILL);
    for (int r = 0; r < WRITERS; r++)
        if (r != first)
            fork_join(pids[r]); /* it ends by itself */
    remove_url(&writing->init);
    writing->init = file_init_url();
    fork_ranks(READERS, read_newest, writing);
    remove_url(&writing->init);
    td_training alone = {.model = make_net(9)};
    check_newest(&alone, writing);
    td_module_destroy(alone.model);
}

/* TD_TEST_KILLS=100 for the long version. */
TEST(killed_while_saving, .deadline_s = 3600)
{
    const char *wanted = getenv("TD_TEST_KILLS");
    unsigned seed = (unsigned)getpid();
    struct writing writing = {.shared = fork_shared(sizeof *writing.shared)};
    snprintf(writing.directory, sizeof writing.directory, "%s", temp_path("run"));
    atomic_store(&writing.shared->done, -1);
    atomic_store(&writing.shared->found, -1);
    for (int left = wanted ? atoi(wanted) : 8; left > 0; left--) {
        kill_round(&writing, &seed);
        int64_t found = atomic_load(&writing.shared->found);
        if (found > atomic_load(&writing.shared->done))
            atomic_store(&writing.shared->done, found);
    }
    CHECK(atomic_load(&writing.shared->found) > 0);
}
