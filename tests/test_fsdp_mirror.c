/* Ranks of a sharded model die, and others come: the weights have the bits of a run in which nothing happened. */
#include "runner.h"
#include "toy_device.h"
#include "ways.h"

#include "base/fail.h"
#include "parallel/fsdp_mirror.h"

#include <tandem/tandem.h>

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SLICES = 8, EACH = 3, IN = 17, WIDE = 45, OUT = 6, STEPS = 8 };

/* ---- Data, and the model ----------------------------------------------------------------------------------------- */

static td_tensor *data(int64_t step, int slice)
{
    td_tensor *tensor = td_empty(TD_SHAPE(EACH, IN), TD_F32, NULL);
    unsigned state = (unsigned)(step * 1009 + slice * 31 + 5);
    float *x = td_tensor_data(tensor);
    for (int i = 0; i < EACH * IN; i++) {
        state = state * 1664525u + 1013904223u;
        x[i] = (float)(state >> 8) / (float)(1 << 24) - 0.5f;
    }
    return tensor;
}

static td_module *make_net(uint64_t seed)
{
    td_manual_seed(seed);
    td_module *net = td_sequential(td_linear(IN, WIDE), td_relu(), td_batch_norm1d(WIDE),
                                   td_dropout(0.3), td_linear(WIDE, WIDE), td_relu(),
                                   td_linear(WIDE, WIDE), td_linear(WIDE, OUT), NULL);
    CHECK_OK(td_tensor_set_requires_grad(td_module_parameter(net, "6.weight"), false));
    return net;
}

static uint64_t add_state(uint64_t hash, td_state *state)
{
    CHECK(state != NULL);
    for (int i = 0; i < td_state_count(state); i++) {
        const unsigned char *bytes = td_tensor_data(td_state_tensor(state, i));
        for (size_t b = 0; b < td_tensor_nbytes(td_state_tensor(state, i)); b++)
            hash = (hash ^ bytes[b]) * UINT64_C(1099511628211);
    }
    td_state_destroy(state);
    return hash;
}

/* ---- A run ------------------------------------------------------------------------------------------------------- */

enum moment { NEVER, SLICE, UPDATE, COMMIT, COPY };

struct run {
    bool sgd;
    const td_fsdp_options *options; /* NULL: td_ddp() on one rank */
    enum moment moment;             /* when the victims die, in step DIES */
    int victims[2];
    int joins; /* the rank of the world that comes later; 0: none */
};

enum { DIES = 3, JOINS = 6 };

struct rank {
    td_module *model;
    td_optimizer *optimizer;
    td_group *group;
    struct td__mirror *mirror;
};

static void die_at(const struct run *run, enum moment moment, int64_t step)
{
    if (run->moment == moment && step == DIES &&
        (run->victims[0] == td_test_rank() || run->victims[1] == td_test_rank()))
        raise(SIGKILL);
}

static td_status pass(td_module *model, int64_t step, int slice)
{
    TD_SCOPE;
    td_tensor *y = td_forward(model, data(step, slice));
    return y ? td_backward(td_mean(td_mul(y, y))) : td_last_status();
}

static td_status all_slices(const struct rank *rank, const struct run *run, int64_t step)
{
    td_slices slices = td_slices_begin(rank->model, step);
    int computed = 0;
    while (td_slices_next(&slices)) {
        if (computed++)
            die_at(run, SLICE, step);
        TD_TRY(pass(rank->model, step, slices.slice));
    }
    return td_slices_status(&slices);
}

/* A step of this rank, after which its new state is on its way to the mirror. */
static td_status make_step(const struct rank *rank, const struct run *run, int64_t step)
{
    int32_t failed = 0;
    TD_TRY(all_slices(rank, run, step));
    TD_TRY(td_clip_grad_norm_(rank->model, 0.01, NULL, NULL));
    if (rank->mirror)
        TD_TRY(td__mirror_wait(rank->mirror));
    TD_TRY(td_group_all_reduce(&failed, &failed, 1, TD_I32, TD_MAX, rank->group, NULL));
    die_at(run, UPDATE, step);
    TD_TRY(td_optimizer_step(rank->optimizer));
    die_at(run, COMMIT, step);
    if (rank->mirror)
        TD_TRY(td__mirror_commit(rank->mirror, step + 1));
    die_at(run, COPY, step);
    return TD_OK;
}

/* The state of `former` goes to a group. */
static td_status reshard(struct rank *rank, td_group *group, int64_t *step)
{
    struct td__mirror *former = rank->mirror;
    TD_TRY(td__fsdp_reshard(rank->model, rank->optimizer, group, former, step));
    CHECK_OK(td__mirror_create(rank->model, rank->optimizer, &rank->mirror));
    CHECK_OK(td__mirror_commit(rank->mirror, *step));
    CHECK_OK(td__mirror_wait(rank->mirror));
    CHECK_OK(td_group_barrier(group, NULL));
    td__mirror_free(former);
    if (rank->group)
        CHECK_OK(td_group_destroy(rank->group));
    rank->group = group;
    return TD_OK;
}

static td_status recover(struct rank *rank, int64_t *step)
{
    td_group *rest = NULL;
    CHECK_OK(td_group_shrink(rank->group, NULL, &rest));
    td_status status = reshard(rank, rest, step);
    if (status)
        td_group_destroy(rest);
    return status;
}

static void welcome(struct rank *rank, int64_t *step)
{
    td_group *all = NULL;
    CHECK_OK(td_group_shrink(NULL, NULL, &all));
    CHECK_OK(reshard(rank, all, step));
}

static void open_rank(struct rank *rank, const struct run *run, uint64_t seed, td_group *group)
{
    td_ddp_options whole = {.group = group, .slices = SLICES, .find_unused_parameters = true};
    td_fsdp_options sharded = run->options ? *run->options : (td_fsdp_options){0};
    sharded.group = group;
    sharded.slices = SLICES;
    *rank = (struct rank){.group = group};
    rank->model = run->options ? td_fsdp(make_net(seed), &sharded) : td_ddp(make_net(seed), &whole);
    CHECK(rank->model != NULL);
    rank->optimizer = run->sgd ? td_sgd(rank->model, &(td_sgd_options){.lr = 0.5, .momentum = 0.9})
                               : td_adam(rank->model, &(td_adam_options){.lr = 0.01});
    CHECK(rank->optimizer != NULL);
}

static uint64_t close_rank(struct rank *rank)
{
    uint64_t hash = UINT64_C(1469598103934665603);
    bool sharded = td_is_fsdp(rank->model);
    if (sharded)
        CHECK_OK(td_fsdp_gather_begin(rank->model, false));
    hash = add_state(hash, td_module_parameters(rank->model));
    if (sharded)
        CHECK_OK(td_fsdp_gather_end(rank->model));
    if (td_get_rank(rank->group) == 0) /* it has the buffers of slice 0 in any case */
        hash = add_state(hash, td_module_buffers(rank->model));
    CHECK_OK(td_group_broadcast(&hash, 1, TD_U64, td_get_global_rank(rank->group, 0), rank->group,
                                NULL));
    td__mirror_free(rank->mirror);
    td_optimizer_destroy(rank->optimizer);
    td_module_destroy(rank->model);
    CHECK_OK(td_group_destroy(rank->group));
    return hash;
}

/* The newcomer comes when the others are there. */
static void await_others(void)
{
    char path[512];
    snprintf(path, sizeof path, "%s/ready", td_test_temp_dir());
    while (access(path, F_OK))
        usleep(2000);
}

static void call_newcomer(void)
{
    char path[512];
    snprintf(path, sizeof path, "%s/ready", td_test_temp_dir());
    FILE *file = fopen(path, "w");
    CHECK(file && !fclose(file));
}

/* The digest after all steps; of the survivors. */
static uint64_t train(struct rank *rank, const struct run *run, int64_t step)
{
    bool joined = !run->joins || td_test_rank() == run->joins;
    while (step < STEPS) {
        if (step >= JOINS && !joined) {
            call_newcomer();
            welcome(rank, &step);
            joined = true;
        }
        if (!make_step(rank, run, step)) {
            step++;
            continue;
        }
        CHECK(rank->mirror != NULL);
        CHECK_OK(recover(rank, &step));
        CHECK(step <= DIES + 1);
    }
    return close_rank(rank);
}

/* A run of one rank, that of the world's rank 0: the bits that are expected. */
static uint64_t undisturbed(const struct run *run)
{
    struct run alone = {.sgd = run->sgd};
    struct rank rank;
    uint64_t result = 0;
    td_group *group = NULL;
    CHECK_OK(td_new_group((int[]){0}, 1, NULL, &group));
    if (td_test_rank() == 0) {
        open_rank(&rank, &alone, 23, group);
        result = train(&rank, &alone, 0);
    } else {
        CHECK_OK(td_group_destroy(group));
    }
    CHECK_OK(td_group_broadcast(&result, 1, TD_U64, 0, NULL, NULL));
    return result;
}

static void come_late(const struct run *run, uint64_t expected, td_group *self)
{
    struct rank rank;
    int64_t step = -1;
    open_rank(&rank, run, 99, self); /* other weights */
    await_others();
    welcome(&rank, &step);
    CHECK(step >= JOINS && step < STEPS);
    CHECK(train(&rank, run, step) == expected);
}

static void run_all(const struct run *run)
{
    int ranks[8], size = 0;
    uint64_t expected = undisturbed(run);
    for (int r = 0; r < td_test_size(); r++)
        if (!run->joins || r != run->joins)
            ranks[size++] = r;
    td_group *group = NULL, *self = NULL;
    CHECK_OK(td_new_group(ranks, size, NULL, &group));
    if (run->joins)
        CHECK_OK(td_new_group(&run->joins, 1, NULL, &self));
    if (run->joins && td_test_rank() == run->joins) {
        CHECK_OK(td_group_destroy(group));
        come_late(run, expected, self);
        return;
    }
    CHECK_OK(td_group_destroy(self));
    struct rank rank;
    open_rank(&rank, run, 23, group);
    CHECK_OK(td__mirror_create(rank.model, rank.optimizer, &rank.mirror));
    CHECK_OK(td__mirror_commit(rank.mirror, 0));
    uint64_t result = train(&rank, run, 0);
    if (result != expected)
        fprintf(stderr, "other bits than undisturbed\n");
    CHECK(result == expected);
}

static const td_fsdp_options shared = {.min_parameters = 400};
static const td_fsdp_options apart = {.min_parameters = 400, .no_shared_memory = true};
static const td_fsdp_options kept = {
    .min_parameters = 400, .no_shared_memory = true, .strategy = TD_SHARD_GRAD_OP};

static const struct way two_hosts = {.hosts = "aabb"}, three_hosts = {.hosts = "abc"},
                        uneven_hosts = {.hosts = "aaab"};

#define DEATH(id, count, dead, way, ...)                                                           \
    RANKS(id, .ranks = count, .may_die = dead, .deadline_s = 60)                                   \
    {                                                                                              \
        open_world(way, 0);                                                                        \
        run_all(&(struct run){__VA_ARGS__});                                                       \
        td_destroy_process_group();                                                                \
    }

DEATH(nobody_dies, 3, 0, &shm, .options = &shared)
DEATH(dies_in_slice, 4, 1 << 2, &shm, .options = &shared, .moment = SLICE, .victims = {2, 2})
DEATH(dies_in_update, 4, 1 << 0, &shm, .options = &shared, .moment = UPDATE, .victims = {0, 0})
DEATH(dies_before_commit, 4, 1 << 3, &shm, .options = &shared, .moment = COMMIT, .victims = {3, 3})
DEATH(dies_in_copy, 4, 1 << 1, &shm, .options = &shared, .moment = COPY, .victims = {1, 1})
DEATH(two_die, 4, 0x6, &shm, .options = &shared, .sgd = true, .moment = UPDATE, .victims = {1, 2})
DEATH(all_but_one_die, 3, 0x6, &shm, .options = &apart, .moment = SLICE, .victims = {1, 2})
DEATH(dies_without_shared_memory, 4, 1 << 2, &shm, .options = &kept, .moment = COMMIT,
      .victims = {2, 2})
DEATH(dies_over_tcp, 4, 1 << 2, &tcp, .options = &apart, .moment = UPDATE, .victims = {2, 2})
DEATH(dies_on_hosts, 4, 1 << 1, &two_hosts, .options = &apart, .moment = COPY, .victims = {1, 1})
DEATH(host_dies, 4, 0xc, &two_hosts, .options = &apart, .moment = UPDATE, .victims = {2, 3})
DEATH(lone_host_dies, 4, 1 << 3, &uneven_hosts, .options = &kept, .sgd = true, .moment = SLICE,
      .victims = {3, 3})
DEATH(joins, 4, 1 << 1, &shm, .options = &shared, .moment = UPDATE, .victims = {1, 1}, .joins = 3)
DEATH(joins_on_hosts, 4, 1 << 1, &two_hosts, .options = &apart, .sgd = true, .moment = SLICE,
      .victims = {1, 1}, .joins = 3)
DEATH(joins_one, 3, 1 << 1, &shm, .options = &shared, .moment = COMMIT, .victims = {1, 1},
      .joins = 2)

/* ---- What cannot be had ------------------------------------------------------------------------------------------ */

/* A rank and the one that keeps its shards. */
RANKS(both_die, .ranks = 3, .may_die = 0x6, .deadline_s = 60)
{
    open_world(&three_hosts, 0);
    const struct run run = {.options = &apart, .moment = UPDATE, .victims = {1, 2}};
    struct rank rank;
    int64_t step = 0;
    td_group *group = NULL;
    CHECK_OK(td_new_group(NULL, 0, NULL, &group));
    open_rank(&rank, &run, 23, group);
    CHECK_OK(td__mirror_create(rank.model, rank.optimizer, &rank.mirror));
    CHECK_OK(td__mirror_commit(rank.mirror, 0));
    while (!make_step(&rank, &run, step))
        step++;
    if (td_test_rank() == 2)
        raise(SIGKILL); /* the death of the other one was there before its own moment */
    CHECK_FAILS(recover(&rank, &step), TD_ERR_PEER,
                "the shards that rank 1 of the former group had");
    td__mirror_free(rank.mirror);
    td_optimizer_destroy(rank.optimizer);
    td_module_destroy(rank.model);
    td_group_destroy(rank.group);
    td_destroy_process_group();
}

RANKS(errors, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    const struct run run = {.options = &shared};
    struct rank rank;
    td_group *group = NULL;
    CHECK_OK(td_new_group(NULL, 0, NULL, &group));
    open_rank(&rank, &run, 23, group);
    td_tensor *first = td_module_parameter(rank.model, "0.weight");
    td_optimizer *other = td_sgd_of(&first, 1, &(td_sgd_options){.lr = 1});
    CHECK_FAILS(td__mirror_create(rank.model, other, &rank.mirror), TD_ERR_INVALID,
                "does not have the parameter \"2.weight\"");
    td_optimizer_destroy(other);
    close_rank(&rank);
    CHECK_OK(td_destroy_process_group());
}

/* A unit of a call before has its own ranks. */
RANKS(units_of_two_calls, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    td_module *inner = td_fsdp(td_linear(IN, WIDE), &(td_fsdp_options){.slices = SLICES});
    td_module *model = td_fsdp(td_sequential(inner, td_linear(WIDE, OUT), NULL),
                               &(td_fsdp_options){.slices = SLICES});
    td_optimizer *sgd = td_sgd(model, &(td_sgd_options){.lr = 0.1});
    struct td__mirror *mirror = NULL;
    CHECK_FAILS(td__mirror_create(model, sgd, &mirror), TD_ERR_UNSUPPORTED,
                "the unit \"0\" was made by a call of td_fsdp() for an inner module");
    td_optimizer_destroy(sgd);
    td_module_destroy(model);
    CHECK_OK(td_destroy_process_group());
}

/* ---- What is mirrored where ---------------------------------------------------------------------------------------- */

/* How many elements all ranks mirror, and how many copies of others and their own they can read. */
struct mirrored {
    int64_t elements, copies;
};

static struct mirrored count_mirrored(const td_fsdp_options *options)
{
    const struct run run = {.options = options};
    struct rank rank;
    struct mirrored count = {0};
    td_group *group = NULL;
    CHECK_OK(td_new_group(NULL, 0, NULL, &group));
    open_rank(&rank, &run, 23, group);
    CHECK_OK(td__mirror_create(rank.model, rank.optimizer, &rank.mirror));
    const struct td__mirror_layout *layout = td__mirror_layout(rank.mirror);
    for (int f = 0; f < layout->flat_count; f++) {
        int64_t first;
        count.elements += td__mirror_range(layout, td__mirror_rank(rank.mirror), f, &first);
    }
    CHECK_OK(td__mirror_commit(rank.mirror, 0));
    CHECK_OK(td__mirror_wait(rank.mirror));
    td_test_barrier();
    for (int r = 0; r < layout->size; r++)
        count.copies += td__mirror_step(rank.mirror, r, 0) + td__mirror_step(rank.mirror, r, 1);
    td_test_barrier();
    close_rank(&rank);
    CHECK_OK(td_group_all_reduce(&count, &count, 2, TD_I64, TD_SUM, NULL, NULL));
    return count;
}

/* The copies of the ranks of a host are divided, where they have the same. Where each of two hosts has all, no messages bring
 * anything. */
static void count_all(int hosts)
{
    static const td_fsdp_options whole = {.min_parameters = 400, .strategy = TD_NO_SHARD},
                                 hybrid = {.min_parameters = 400, .strategy = TD_HYBRID_SHARD},
                                 pairs = {.min_parameters = 400,
                                          .strategy = TD_HYBRID_SHARD,
                                          .shard_size = 2};
    const td_fsdp_options *const replicated[] = {&whole, &hybrid, &pairs};
    struct mirrored once = count_mirrored(&apart);
    CHECK_EQ(once.copies, hosts == 1 ? 16 : 12);
    for (int i = 0; i < 3; i++) {
        struct mirrored count = count_mirrored(replicated[i]);
        CHECK_EQ(count.elements, hosts * once.elements);
        CHECK_EQ(count.copies, hosts == 1 ? 16 : 8);
    }
}

RANKS(elements_on_one_host, .ranks = 4)
{
    CHECK_OK(td_init_process_group(NULL));
    count_all(1);
    CHECK_OK(td_destroy_process_group());
}

RANKS(elements_on_two_hosts, .ranks = 4)
{
    open_world(&two_hosts, 0);
    count_all(2);
    CHECK_OK(td_destroy_process_group());
}

/* ---- On an accelerator --------------------------------------------------------------------------------------------- */

enum { BIG = 1500 }; /* a matrix of 9 MB: several stages */

static td_module *make_on_toy(int width)
{
    CHECK_OK(toy_register());
    td_manual_seed(3);
    td_module *net = td_sequential(td_linear(width, width), td_batch_norm1d(width), NULL);
    CHECK_OK(td_module_to(net, td_device_get("toy:0")));
    td_module *model = td_fsdp(net, &(td_fsdp_options){.slices = 1});
    CHECK(model != NULL);
    return model;
}

static uint64_t hash_parameters(td_module *model)
{
    TD_SCOPE;
    td_state *host = td_state_create(), *parameters = td_module_parameters(model);
    for (int i = 0; i < td_state_count(parameters); i++)
        CHECK_OK(td_state_add(host, td_state_name(parameters, i),
                              td_tensor_to(td_state_tensor(parameters, i), td_device_get("cpu"))));
    td_state_destroy(parameters);
    return add_state(1, host);
}

/* The mirror's copy goes back into the model. */
static void go_back(td_module *model, td_optimizer *sgd, struct td__mirror *mirror)
{
    int64_t step = -1;
    CHECK_OK(td__fsdp_reshard(model, sgd, NULL, mirror, &step));
    CHECK_EQ(step, 7);
}

/* While the device does nothing, a commit returns; the copy is what there is when the device has come to it, and the buffers are
 * those of that moment, though the next pass changes them. */
TEST(copy_waits_for_the_device)
{
    CHECK_OK(td_init_process_group(NULL));
    td_module *model = make_on_toy(BIG);
    td_optimizer *sgd = td_sgd(model, &(td_sgd_options){.lr = 0.1});
    struct td__mirror *mirror = NULL;
    CHECK_OK(td__mirror_create(model, sgd, &mirror));
    td_tensor *weight = td_module_parameter(model, "0.weight");
    td_state *buffers = td_module_buffers(model);
    td_tensor *mean = td_state_tensor(buffers, 0);
    toy_hold(0, true);
    {
        TD_NO_GRAD;
        CHECK_OK(td_fill_(weight, 5));
        CHECK_OK(td_fill_(mean, 6));
    }
    CHECK_OK(td__mirror_commit(mirror, 7));
    {
        TD_NO_GRAD;
        CHECK_OK(td_fill_(mean, 8));
    }
    CHECK(!td__mirror_step(mirror, 0, 0) && !td__mirror_step(mirror, 0, 1));
    toy_hold(0, false);
    CHECK_OK(td__mirror_wait(mirror));
    CHECK_EQ(td__mirror_step(mirror, 0, 0) + td__mirror_step(mirror, 0, 1), 8);
    uint64_t before = hash_parameters(model);
    {
        TD_NO_GRAD;
        CHECK_OK(td_fill_(weight, 1));
    }
    CHECK(hash_parameters(model) != before);
    go_back(model, sgd, mirror);
    CHECK(hash_parameters(model) == before);
    {
        TD_SCOPE;
        CHECK_EQ(td_item(td_select(mean, 0, 3)), 6);
    }
    td_state_destroy(buffers);
    td__mirror_free(mirror);
    td_optimizer_destroy(sgd);
    td_module_destroy(model);
    CHECK_OK(td_destroy_process_group());
}

/* While a copy is under way the device computes the next pass. */
TEST(copy_runs_beside_the_next_pass)
{
    CHECK_OK(td_init_process_group(NULL));
    td_device *toy = NULL;
    td_module *model = make_on_toy(40);
    td_module_eval(model);
    td_optimizer *sgd = td_sgd(model, &(td_sgd_options){.lr = 0.1});
    struct td__mirror *mirror = NULL;
    CHECK_OK(td__mirror_create(model, sgd, &mirror));
    CHECK((toy = td_device_get("toy:0")) != NULL);
    {
        TD_SCOPE;
        TD_NO_GRAD;
        td_tensor *x = td_ones(TD_SHAPE(3, 40), TD_F32, toy);
        CHECK(x && td_forward(model, x));
        CHECK_OK(td_device_synchronize(toy));
        td_state *buffers = td_module_buffers(model);
        toy_limit_copies(0, td_state_count(buffers)); /* those to the snapshots */
        td_state_destroy(buffers);
        int64_t kernels = toy_counts(0).kernels;
        CHECK_OK(td__mirror_commit(mirror, 7));
        CHECK(td_forward(model, x));
        CHECK_OK(td_stream_synchronize(td_current_stream(toy)));
        CHECK(toy_counts(0).kernels > kernels);
        CHECK(!td__mirror_step(mirror, 0, 0) && !td__mirror_step(mirror, 0, 1));
        toy_limit_copies(0, -1);
    }
    CHECK_OK(td__mirror_wait(mirror));
    go_back(model, sgd, mirror);
    td__mirror_free(mirror);
    td_optimizer_destroy(sgd);
    td_module_destroy(model);
    CHECK_OK(td_destroy_process_group());
}

/* A copy that fails is no copy, and the next one may be one. */
TEST(copy_from_device_fails)
{
    CHECK_OK(td_init_process_group(NULL));
    td_module *model = make_on_toy(40);
    td_optimizer *sgd = td_sgd(model, &(td_sgd_options){.lr = 0.1});
    struct td__mirror *mirror = NULL;
    CHECK_OK(td__mirror_create(model, sgd, &mirror));
    td_state *buffers = td_module_buffers(model);
    CHECK_OK(td_device_synchronize(td_device_get("toy:0")));
    for (enum toy_when when = TOY_AT_LAUNCH; when <= TOY_LATER; when++) {
        toy_fail_copy(0, 1 + td_state_count(buffers), when); /* after those of the buffers */
        CHECK_OK(td__mirror_commit(mirror, 3));
        CHECK(td__mirror_wait(mirror) != TD_OK);
        toy_clear_failure(0);
        CHECK(!td__mirror_step(mirror, 0, 0) && !td__mirror_step(mirror, 0, 1));
    }
    CHECK_OK(td__mirror_commit(mirror, 7));
    CHECK_OK(td__mirror_wait(mirror));
    go_back(model, sgd, mirror);
    td_state_destroy(buffers);
    td__mirror_free(mirror);
    td_optimizer_destroy(sgd);
    td_module_destroy(model);
    CHECK_OK(td_destroy_process_group());
}

/* ---- Times ------------------------------------------------------------------------------------------------------ */

/* Copies are made in the background, and counted. */
RANKS(times, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    enum { WIDTH = 64 };
    td_manual_seed(1);
    td_module *net = td_sequential(td_linear(WIDTH, WIDTH), td_linear(WIDTH, WIDTH),
                                   td_linear(WIDTH, WIDTH), td_linear(WIDTH, WIDTH),
                                   td_linear(WIDTH, WIDTH), td_linear(WIDTH, WIDTH),
                                   td_linear(WIDTH, WIDTH), td_linear(WIDTH, WIDTH), NULL);
    td_module *model = td_fsdp(net, &(td_fsdp_options){.min_parameters = 1000, .slices = 4});
    td_optimizer *adam = td_adam(model, &(td_adam_options){.lr = 0.001});
    struct td__mirror *mirror = NULL;
    CHECK_OK(td__mirror_create(model, adam, &mirror));
    for (int step = 0; step < 3; step++) {
        td_slices slices = td_slices_begin(model, step);
        while (td_slices_next(&slices)) {
            TD_SCOPE;
            td_tensor *y = td_forward(model, td_ones(TD_SHAPE(64, WIDTH), TD_F32, NULL));
            CHECK_OK(td_backward(td_mean(td_mul(y, y))));
        }
        CHECK_OK(td_slices_status(&slices));
        CHECK_OK(td__mirror_wait(mirror));
        CHECK_OK(td_optimizer_step(adam));
        CHECK_OK(td__mirror_commit(mirror, step + 1));
    }
    CHECK_OK(td__mirror_wait(mirror));
    int64_t copy_ns, wait_ns;
    td__mirror_times(mirror, &copy_ns, &wait_ns);
    CHECK(copy_ns > 0 && wait_ns >= 0);
    td__mirror_free(mirror);
    td_optimizer_destroy(adam);
    td_module_destroy(model);
    CHECK_OK(td_destroy_process_group());
}
