/* Elastic training: the same weights whoever dies. */
#include "runner.h"
#include "toy_device.h"
#include "ways.h"

#include "elastic/elastic_internal.h"

#include <tandem/tandem.h>

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SHAPE(...) TD_SHAPE(__VA_ARGS__)

enum { SLICES = 8, EACH = 3, IN = 17, WIDE = 40, OUT = 6, SAMPLES = 100, STEPS = 12 };

/* ---- What is trained --------------------------------------------------------------------------------------------- */

static float number(unsigned *state)
{
    *state = *state * 1664525u + 1013904223u;
    return (float)(*state >> 8) / (float)(1 << 24) - 0.5f;
}

static td_dataset *make_dataset(void)
{
    TD_SCOPE;
    unsigned state = 77;
    td_tensor *x = td_empty(SHAPE(SAMPLES, IN), TD_F32, NULL);
    td_tensor *y = td_empty(SHAPE(SAMPLES), TD_I64, NULL);
    CHECK(x && y);
    for (int i = 0; i < SAMPLES * IN; i++)
        ((float *)td_tensor_data(x))[i] = number(&state);
    for (int i = 0; i < SAMPLES; i++)
        ((int64_t *)td_tensor_data(y))[i] = i % OUT;
    return td_tensor_dataset(x, y);
}

static td_module *make_net(uint64_t seed)
{
    td_manual_seed(seed);
    return td_sequential(td_linear(IN, WIDE), td_batch_norm1d(WIDE), td_relu(), td_dropout(0.3),
                         td_linear(WIDE, WIDE), td_relu(), td_linear(WIDE, OUT), NULL);
}

static uint64_t digest(td_state *state, uint64_t hash)
{
    CHECK(state != NULL);
    for (int i = 0; i < td_state_count(state); i++) {
        TD_SCOPE;
        td_tensor *tensor = td_tensor_to(td_state_tensor(state, i), td_device_get("cpu"));
        hash = td__bit_hash(td_tensor_data(tensor), td_tensor_nbytes(tensor), hash);
    }
    td_state_destroy(state);
    return hash;
}

struct outcome {
    uint64_t weights;
    double loss;
    td_elastic_stats stats;
    td_status status;
    int ranks;
};

/* What a training differs in. */
struct plan {
    int64_t steps;
    uint64_t seed; /* of the initial weights */
    td_elastic_options options;
    td_elastic_slice_fn slice;
    const char *device; /* NULL: the host */
    bool twice;         /* in two calls */
};

static td_status pass(td_elastic_slice *slice, void *arg)
{
    const struct plan *plan = arg;
    td_device *device = td_device_get(plan->device ? plan->device : "cpu");
    td_tensor *loss = td_cross_entropy(
        td_forward(slice->model, td_tensor_to(slice->batch.input, device)),
        td_tensor_to(slice->batch.target, device));
    if (!loss)
        return td_last_status();
    slice->loss = td_item(loss);
    return td_backward(loss);
}

/* Trains on a group until `steps` are done. */
static struct outcome train(const struct plan *plan, td_group *group)
{
    td_dataset *dataset = make_dataset();
    td_module *net = make_net(plan->seed ? plan->seed : 5);
    if (plan->device)
        CHECK_OK(td_module_to(net, td_device_get(plan->device)));
    td_optimizer *adam = td_adam(net, &(td_adam_options){.lr = 0.01});
    td_schedule *cosine = td_cosine_schedule(adam, 30, 0.0001);
    td_elastic_options options = plan->options;
    options.training = (td_training){.model = net, .optimizer = adam, .schedule = cosine};
    options.group = group;
    options.dataset = dataset;
    options.slices = SLICES;
    options.slice_size = EACH;
    options.seed = 9;
    options.clip_norm = 0.7;
    options.bucket_cap_mb = 0.005;
    td_elastic *elastic = td_elastic_create(&options);
    CHECK(elastic != NULL);
    struct outcome outcome = {0};
    int64_t steps = plan->steps ? plan->steps : STEPS;
    td_elastic_slice_fn slice = plan->slice ? plan->slice : pass;
    if (plan->twice)
        CHECK_OK(td_elastic_run(elastic, steps / 2, slice, (void *)plan));
    outcome.status = td_elastic_run(elastic, steps, slice, (void *)plan);
    outcome.ranks = td_elastic_world(elastic);
    CHECK_OK(td_elastic_get_stats(elastic, &outcome.stats));
    outcome.loss = outcome.stats.loss;
    outcome.weights = digest(td_module_parameters(td_elastic_model(elastic)), 0);
    outcome.weights = digest(td_module_buffers(td_elastic_model(elastic)), outcome.weights);
    td_schedule_destroy(cosine);
    td_elastic_destroy(elastic);
    td_optimizer_destroy(adam);
    td_dataset_release(dataset);
    return outcome;
}

/* The result of this process alone. */
static struct outcome train_alone(const struct plan *plan)
{
    int self = td_get_rank(NULL);
    td_group *alone;
    td_status (*probe)(const char *, td_elastic *) = td__elastic_probe;
    td__elastic_probe = NULL;
    CHECK_OK(td_new_group(&self, 1, NULL, &alone));
    struct plan own = {.steps = plan->steps, .seed = plan->seed, .device = plan->device};
    struct outcome outcome = train(&own, alone);
    CHECK_OK(outcome.status);
    CHECK_OK(td_group_destroy(alone));
    td__elastic_probe = probe;
    return outcome;
}

/* ---- Nobody dies --------------------------------------------------------------------------------------------------- */

/* Each step is told once, in order. */
static void count_commits(const td_elastic_event *event, void *arg)
{
    int64_t *committed = arg;
    if (event->kind == TD_ELASTIC_COMMITTED)
        CHECK_EQ(event->step, ++*committed);
}

static void same_on_all_sizes(void)
{
    static const int sizes[] = {1, 2, 3, 5, 8};
    struct outcome alone = train_alone(&(struct plan){0});
    for (int i = 0; i < 5; i++) {
        int ranks[8] = {0, 1, 2, 3, 4, 5, 6, 7};
        td_group *group;
        if (sizes[i] > td_test_size())
            continue;
        CHECK_OK(td_new_group(ranks, sizes[i], NULL, &group));
        if (td_test_rank() < sizes[i]) {
            int64_t committed = 0;
            struct plan plan = {
                .options = {.check_every = 3, .on_event = count_commits, .event_arg = &committed},
                .twice = i % 2};
            struct outcome outcome = train(&plan, group);
            CHECK_OK(outcome.status);
            CHECK_EQ(committed, STEPS);
            CHECK(outcome.weights == alone.weights && outcome.loss == alone.loss);
            CHECK(outcome.stats.steps == STEPS && outcome.stats.deaths == 0);
        }
        CHECK_OK(td_group_destroy(group));
    }
}

RANKS(undisturbed, .ranks = 8, .deadline_s = 60)
{
    CHECK_OK(td_init_process_group(NULL));
    same_on_all_sizes();
    CHECK_OK(td_destroy_process_group());
}

RANKS(undisturbed_over_tcp, .ranks = 5, .deadline_s = 60)
{
    open_world(&tcp, 0);
    same_on_all_sizes();
    CHECK_OK(td_destroy_process_group());
}

/* ---- Ranks die -------------------------------------------------------------------------------------------------------- */

/* A rank that kills itself at a moment of a step, the first time that it is there, or at any time. */
struct death {
    int rank;
    const char *moment; /* NULL: `us` microseconds after the beginning of the step */
    int64_t step;
    int us;
};

static const struct death *deaths;
static int death_count;

static void *die_later(void *arg)
{
    usleep((useconds_t)(uintptr_t)arg);
    kill(getpid(), SIGKILL);
    return NULL;
}

static td_status die(const char *moment, td_elastic *elastic)
{
    for (int i = 0; i < death_count; i++) {
        const struct death *death = &deaths[i];
        if (death->rank != td_test_rank() || td_elastic_step(elastic) != death->step)
            continue;
        if (death->moment && !strcmp(moment, death->moment))
            kill(getpid(), SIGKILL);
        pthread_t thread;
        static bool armed;
        if (!death->moment && !armed && !strcmp(moment, "fetch")) {
            armed = true;
            CHECK(!pthread_create(&thread, NULL, die_later, (void *)(uintptr_t)death->us));
        }
    }
    return TD_OK;
}

/* Trains on all ranks, of which some die, and compares with this process alone. */
static struct outcome survive(const struct plan *plan, const struct death *who, int count)
{
    deaths = who;
    death_count = count;
    struct outcome alone = train_alone(plan);
    td_test_barrier();
    td__elastic_probe = die;
    struct outcome outcome = train(plan, NULL);
    td__elastic_probe = NULL;
    CHECK_OK(outcome.status);
    CHECK(outcome.weights == alone.weights && outcome.loss == alone.loss);
    return outcome;
}

/* The record has each slice of each step once, and the samples are those of the epoch. */
static void check_record(const char *path, int64_t steps)
{
    static char seen[1000][SLICES];
    FILE *file = fopen(path, "r");
    CHECK(file != NULL && steps < 1000);
    char line[400];
    int64_t lines = 0;
    memset(seen, 0, sizeof seen);
    while (fgets(line, sizeof line, file)) {
        long long step, epoch;
        int slice, rank, length, index[EACH];
        CHECK(sscanf(line, "step %lld slice %d rank %d epoch %lld:%n", &step, &slice, &rank, &epoch,
                     &length) == 4);
        CHECK(sscanf(line + length, "%d %d %d", &index[0], &index[1], &index[2]) == 3);
        CHECK(step >= 0 && step < steps && slice >= 0 && slice < SLICES && !seen[step][slice]);
        seen[step][slice] = 1;
        lines++;
        CHECK_EQ(epoch, step / 5);
    }
    CHECK_EQ(lines, steps * SLICES);
    fclose(file);
}

static void survive_with_record(const struct death *who, int count)
{
    char path[300];
    snprintf(path, sizeof path, "%s/record", td_test_temp_dir());
    survive(&(struct plan){.options.audit = path}, who, count);
    check_record(path, STEPS);
}

#define DIES(id, hosts_of, ...)                                                                    \
    RANKS(id, .ranks = 4, .may_die = 0xf, .deadline_s = 30)                                        \
    {                                                                                              \
        static const struct death who[] = {__VA_ARGS__};                                           \
        open_world(hosts_of, 0);                                                                   \
        survive_with_record(who, sizeof who / sizeof *who);                                        \
        CHECK_OK(td_destroy_process_group());                                                      \
    }

static const struct way two_hosts = {.hosts = "aabb"};

DIES(dies_in_forward, &shm, {2, "slice", 4, 0})
DIES(dies_before_reading, &shm, {0, "fetch", 0, 0})
DIES(dies_before_agreement, &shm, {1, "ready", 5, 0})
DIES(dies_after_agreement, &shm, {0, "agreed", 6, 0})
DIES(dies_in_commit, &shm, {3, "commit", 3, 0})
DIES(dies_after_commit, &shm, {0, "committed", 7, 0})
DIES(two_die, &shm, {0, "slice", 4, 0}, {3, "slice", 4, 0})
DIES(two_die_one_after_another, &shm, {1, "ready", 4, 0}, {0, "agreed", 5, 0})
DIES(all_but_one_die, &shm, {0, "slice", 4, 0}, {1, "ready", 4, 0}, {3, "ready", 4, 0})
DIES(dies_in_shrink, &shm, {2, "slice", 4, 0}, {0, "shrink", 4, 0})
DIES(dies_after_shrink, &shm, {2, "slice", 4, 0}, {1, "shrunk", 4, 0}, {0, "shrink", 4, 0})
DIES(dies_in_last_step, &shm, {1, "agreed", STEPS - 1, 0}, {2, "committed", STEPS, 0})
DIES(dies_over_tcp, &tcp, {0, "slice", 4, 0}, {2, "agreed", 6, 0})
DIES(dies_on_hosts, &two_hosts, {0, "ready", 4, 0}, {2, "slice", 6, 0})
DIES(host_dies, &two_hosts, {2, "slice", 5, 0}, {3, "slice", 5, 0})

/* A rank does not get the result of the agreement that others get: it rolls forward. */
static td_status lose_result(const char *moment, td_elastic *elastic)
{
    static bool lost;
    if (td_test_rank() != 1 || lost || strcmp(moment, "agreed") || td_elastic_step(elastic) != 4)
        return TD_OK;
    lost = true;
    return td_fail(TD_ERR_PEER, "the test has lost the result");
}

RANKS(rolls_forward, .ranks = 3)
{
    CHECK_OK(td_init_process_group(NULL));
    struct outcome alone = train_alone(&(struct plan){0});
    char path[300];
    snprintf(path, sizeof path, "%s/record", td_test_temp_dir());
    td__elastic_probe = lose_result;
    struct outcome outcome = train(&(struct plan){.options.audit = path}, NULL);
    td__elastic_probe = NULL;
    CHECK_OK(outcome.status);
    CHECK(outcome.weights == alone.weights && outcome.loss == alone.loss);
    CHECK(outcome.stats.rolled_forward == (td_test_rank() == 1) && outcome.stats.deaths == 0);
    CHECK(outcome.stats.recoveries == 1 && outcome.ranks == 3);
    td_test_barrier();
    check_record(path, STEPS);
    CHECK_OK(td_destroy_process_group());
}

/* ---- Ranks that stand still, and do not die --------------------------------------------------------------------------- */

static td_status stand_still(td_elastic_slice *slice, void *arg)
{
    static bool once;
    if (td_test_rank() == 2 && slice->step == 4 && !once) {
        once = true;
        kill(getpid(), SIGSTOP);
    }
    return pass(slice, arg);
}

static td_status loop_for_ever(td_elastic_slice *slice, void *arg)
{
    while (td_test_rank() == 2 && slice->step == 4)
        usleep(1000);
    return pass(slice, arg);
}

static void go_on_without(const struct plan *plan)
{
    struct outcome alone = train_alone(plan);
    td_test_barrier();
    struct outcome outcome = train(plan, NULL);
    CHECK_OK(outcome.status);
    CHECK(outcome.weights == alone.weights && outcome.ranks == 3 && outcome.stats.deaths == 1);
    CHECK_OK(td_destroy_process_group());
}

RANKS(stopped, .ranks = 4, .may_die = 4, .deadline_s = 60)
{
    CHECK_OK(td_init_process_group(NULL));
    go_on_without(&(struct plan){.slice = stand_still, .options.heartbeat_ms = 500});
}

RANKS(endless_loop, .ranks = 4, .may_die = 4, .deadline_s = 60)
{
    CHECK_OK(td_init_process_group(NULL));
    go_on_without(&(struct plan){.slice = loop_for_ever, .options.step_timeout_ms = 700});
}

/* One dies while another one is in an endless loop: the others wait for that one in td_group_shrink(). */
static td_status loop_and_die(td_elastic_slice *slice, void *arg)
{
    if (td_test_rank() == 1 && slice->step == 4)
        kill(getpid(), SIGKILL);
    return loop_for_ever(slice, arg);
}

RANKS(endless_loop_in_shrink, .ranks = 4, .may_die = 6, .deadline_s = 60)
{
    CHECK_OK(td_init_process_group(NULL));
    struct plan plan = {.slice = loop_and_die, .options.step_timeout_ms = 700};
    struct outcome alone = train_alone(&(struct plan){0});
    td_test_barrier();
    struct outcome outcome = train(&plan, NULL);
    CHECK_OK(outcome.status);
    CHECK(outcome.weights == alone.weights && outcome.ranks == 2);
    CHECK_OK(td_destroy_process_group());
}

/* Over TCP an excluded process is not killed: when it goes on, it learns that the others have gone on without it. */
static td_status sleep_long(td_elastic_slice *slice, void *arg)
{
    static bool once;
    if (td_test_rank() == 2 && slice->step == 4 && !once) {
        once = true;
        usleep(2500000);
    }
    return pass(slice, arg);
}

RANKS(returned_zombie, .ranks = 4, .deadline_s = 60)
{
    open_world(&tcp, 0);
    struct plan plan = {.slice = sleep_long, .options.step_timeout_ms = 700};
    struct outcome alone = train_alone(&(struct plan){0});
    td_test_barrier();
    struct outcome outcome = train(&plan, NULL);
    if (td_test_rank() == 2) {
        CHECK_EQ(outcome.status, TD_ERR_STATE);
        CHECK_CONTAINS(td_last_error(), "excluded");
        CHECK_CONTAINS(td_last_error(), "is late");
        CHECK(!td_is_initialized());
        return;
    }
    CHECK_OK(outcome.status);
    CHECK(outcome.weights == alone.weights && outcome.ranks == 3);
    CHECK_OK(td_destroy_process_group());
}

/* ---- Other bits --------------------------------------------------------------------------------------------------------- */

/* A bit of a weight of rank 1 is another one from step 5 on. */
static td_status flip(const char *moment, td_elastic *elastic)
{
    static bool flipped;
    if (td_test_rank() != 1 || flipped || strcmp(moment, "committed") ||
        td_elastic_step(elastic) != 5)
        return TD_OK;
    flipped = true;
    td_tensor *weight = td_module_parameter(td_elastic_model(elastic), "module.4.weight");
    CHECK(weight != NULL);
    ((uint32_t *)td_tensor_data(weight))[77] ^= 1u << 11;
    return TD_OK;
}

static void notice_flip(td_elastic_policy policy)
{
    struct plan plan = {.options.check_every = 1, .options.mismatch = policy};
    struct outcome alone = train_alone(&(struct plan){0});
    bool two = td_test_size() == 2;
    td_test_barrier();
    td__elastic_probe = flip;
    struct outcome outcome = train(&plan, NULL);
    td__elastic_probe = NULL;
    if (policy == TD_ELASTIC_REPORT || td_test_rank() == 1 || two) {
        CHECK_EQ(outcome.status, TD_ERR_MISMATCH);
        CHECK_CONTAINS(td_last_error(), "after step 5");
        CHECK_CONTAINS(td_last_error(),
                       two ? "ranks 0, 1 have different weights" : "rank 1 has other weights");
        CHECK(!td_is_initialized());
        return;
    }
    CHECK_OK(outcome.status);
    CHECK(outcome.weights == alone.weights && outcome.ranks == 2);
    CHECK_OK(td_destroy_process_group());
}

RANKS(flip_of_two, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    notice_flip(TD_ELASTIC_EXCLUDE);
}

RANKS(flip_of_three, .ranks = 3)
{
    CHECK_OK(td_init_process_group(NULL));
    notice_flip(TD_ELASTIC_REPORT);
}

RANKS(flip_is_excluded, .ranks = 3)
{
    CHECK_OK(td_init_process_group(NULL));
    notice_flip(TD_ELASTIC_EXCLUDE);
}

/* ---- A slow rank ---------------------------------------------------------------------------------------------------------- */

static int reports;

static void count_reports(const td_elastic_event *event, void *arg)
{
    (void)arg;
    if (event->kind != TD_ELASTIC_STRAGGLER)
        return;
    reports++;
    CHECK_EQ(event->rank, 1);
    CHECK_CONTAINS(event->text, "rank 1 takes 50.0 ms for a slice, the median of all ranks is 1.0");
}

static td_status set_pace(const char *moment, td_elastic *elastic)
{
    if (!strcmp(moment, "ready"))
        elastic->slice_ns = td_test_rank() == 1 ? 50000000 : 1000000;
    return TD_OK;
}

static void notice_straggler(td_elastic_policy policy)
{
    CHECK_OK(td_init_process_group(NULL));
    struct plan plan = {.steps = 30, .options = {.straggler = policy, .on_event = count_reports}};
    struct outcome alone = train_alone(&plan);
    td_test_barrier();
    td__elastic_probe = set_pace;
    struct outcome outcome = train(&plan, NULL);
    td__elastic_probe = NULL;
    CHECK_EQ(reports, 1);
    if (policy == TD_ELASTIC_EXCLUDE && td_test_rank() == 1) {
        CHECK_EQ(outcome.status, TD_ERR_MISMATCH);
        CHECK_CONTAINS(td_last_error(), "the others go on without it");
        return;
    }
    CHECK_OK(outcome.status);
    CHECK(outcome.weights == alone.weights);
    CHECK_EQ(outcome.ranks, policy == TD_ELASTIC_EXCLUDE ? 2 : 3);
    CHECK_OK(td_destroy_process_group());
}

RANKS(straggler, .ranks = 3)
{
    notice_straggler(TD_ELASTIC_REPORT);
}

RANKS(straggler_is_excluded, .ranks = 3)
{
    notice_straggler(TD_ELASTIC_EXCLUDE);
}

/* ---- Ranks with another state ---------------------------------------------------------------------------------------------- */

/* Ranks whose programs have drawn other weights get those of the first one, while that one computes the first step. */
static void catch_up(const struct way *way, const struct death *who, int count)
{
    open_world(way, 0);
    struct outcome alone = train_alone(&(struct plan){.seed = 5});
    deaths = who;
    death_count = count;
    td_test_barrier();
    td__elastic_probe = die;
    struct outcome outcome = train(&(struct plan){.seed = 5 + (uint64_t)td_test_rank()}, NULL);
    td__elastic_probe = NULL;
    CHECK_OK(outcome.status);
    CHECK(outcome.weights == alone.weights && outcome.loss == alone.loss);
    CHECK_EQ(outcome.ranks, td_test_size() - count);
    CHECK_OK(td_destroy_process_group());
}

RANKS(catch_up, .ranks = 4)
{
    catch_up(&shm, NULL, 0);
}

RANKS(catch_up_over_tcp, .ranks = 3)
{
    catch_up(&tcp, NULL, 0);
}

RANKS(dies_while_catching_up, .ranks = 4, .may_die = 6)
{
    static const struct death who[] = {{2, "caught", 0, 0}, {1, "ready", 0, 0}};
    catch_up(&shm, who, 2);
}

/* ---- Processes that join a running job --------------------------------------------------------------------------------- */

/* The first rank waits in step 4 until it has seen the newcomer. */
static td_status await_newcomer(const char *moment, td_elastic *elastic)
{
    static bool awaited;
    if (td_elastic_rank(elastic) == 0 && td_elastic_step(elastic) == 4 && !awaited &&
        td_elastic_world(elastic) < 4 && !strcmp(moment, "fetch")) {
        awaited = true;
        CHECK_SOON(atomic_load(&elastic->newcomers_wait));
    }
    return die(moment, elastic);
}

/* Rank 3 of the test joins the others. */
static void join(const struct way *way, const struct death *who, int count, int left)
{
    bool joins = td_test_rank() == 3;
    take_way(way);
    if (joins) {
        setenv("TANDEM_JOIN", "1", 1);
        unsetenv("RANK"), unsetenv("LOCAL_RANK"), unsetenv("WORLD_SIZE");
        unsetenv("LOCAL_WORLD_SIZE");
    } else {
        setenv("WORLD_SIZE", "3", 1);
        setenv("LOCAL_WORLD_SIZE", "3", 1);
    }
    CHECK_OK(td_init_process_group(NULL));
    struct outcome alone = joins ? (struct outcome){0} : train_alone(&(struct plan){0});
    deaths = who;
    death_count = count;
    td__elastic_probe = await_newcomer;
    struct outcome outcome = train(&(struct plan){.seed = joins ? 31 : 5}, NULL);
    td__elastic_probe = NULL;
    CHECK_OK(outcome.status);
    if (joins) {
        CHECK(outcome.stats.steps < STEPS && outcome.stats.steps > 0);
        alone = train_alone(&(struct plan){0});
    }
    CHECK(outcome.weights == alone.weights && outcome.loss == alone.loss);
    CHECK_EQ(outcome.ranks, left);
    CHECK_OK(td_destroy_process_group());
}

RANKS(joins, .ranks = 4, .deadline_s = 60)
{
    join(&shm, NULL, 0, 4);
}

RANKS(joins_over_tcp, .ranks = 4, .deadline_s = 60)
{
    join(&tcp, NULL, 0, 4);
}

RANKS(replaces, .ranks = 4, .may_die = 2, .deadline_s = 60)
{
    static const struct death who[] = {{1, "slice", 2, 0}};
    join(&shm, who, 1, 3);
}

RANKS(newcomer_dies, .ranks = 4, .may_die = 8, .deadline_s = 60)
{
    static const struct death who[] = {{3, "caught", 5, 0}};
    join(&shm, who, 1, 3);
}

RANKS(member_dies_for_newcomer, .ranks = 4, .may_die = 1, .deadline_s = 60)
{
    static const struct death who[] = {{0, "slice", 5, 0}};
    join(&shm, who, 1, 3);
}

/* ---- On an accelerator -------------------------------------------------------------------------------------------------- */

/* One has other weights and gets those of the others, and another one dies. */
RANKS(on_device, .ranks = 4, .may_die = 2, .deadline_s = 60)
{
    static const struct death who[] = {{1, "slice", 3, 0}};
    CHECK_OK(toy_register());
    toy_set_delay(10);
    CHECK_OK(td_init_process_group(NULL));
    struct plan plan = {.seed = 5, .device = "toy:0", .options.check_every = 2};
    struct outcome alone = train_alone(&plan);
    deaths = who;
    death_count = 1;
    td_test_barrier();
    plan.seed = td_test_rank() == 2 ? 6 : 5;
    td__elastic_probe = die;
    struct outcome outcome = train(&plan, NULL);
    td__elastic_probe = NULL;
    CHECK_OK(outcome.status);
    CHECK(outcome.weights == alone.weights && outcome.loss == alone.loss && outcome.ranks == 3);
    CHECK_OK(td_destroy_process_group());
}

/* ---- What cannot go on, and what is to end ------------------------------------------------------------------------------ */

static td_status die_in_fifth(td_elastic_slice *slice, void *arg)
{
    if (td_test_rank() == 1 && slice->step == 5 && getenv("TD_TEST_DIES"))
        kill(getpid(), SIGKILL);
    return pass(slice, arg);
}

/* The survivor of two writes a checkpoint, from which it goes on alone. */
RANKS(too_few, .ranks = 2, .may_die = 2)
{
    char path[300];
    CHECK_OK(td_init_process_group(NULL));
    struct outcome alone = train_alone(&(struct plan){0});
    snprintf(path, sizeof path, "%s/checkpoints", td_test_temp_dir());
    setenv("TD_TEST_DIES", "1", 1);
    struct plan plan = {.slice = die_in_fifth, .options = {.min_ranks = 2, .checkpoint = path}};
    struct outcome outcome = train(&plan, NULL);
    CHECK_EQ(outcome.status, TD_ERR_PEER);
    CHECK_CONTAINS(td_last_error(), "1 of 2 ranks are left after step 5, and the training needs 2");
    CHECK(!td_is_initialized());
    unsetenv("RANK"), unsetenv("WORLD_SIZE"), unsetenv("TANDEM_AGENT_STORE");
    unsetenv("MASTER_ADDR"), unsetenv("MASTER_PORT");
    CHECK_OK(td_init_process_group(NULL));
    plan.options.min_ranks = 0;
    outcome = train(&plan, NULL);
    CHECK_OK(outcome.status);
    CHECK(outcome.stats.steps == STEPS - 5 && outcome.weights == alone.weights);
    CHECK_OK(td_destroy_process_group());
}

RANKS(no_majority, .ranks = 4, .may_die = 3)
{
    static const struct death who[] = {{0, "slice", 4, 0}, {1, "slice", 4, 0}};
    CHECK_OK(td_init_process_group(NULL));
    deaths = who;
    death_count = 2;
    td__elastic_probe = die;
    struct outcome outcome = train(&(struct plan){.options.need_majority = true}, NULL);
    if (outcome.status) { /* where both have died before the survivors shrank the group */
        CHECK_EQ(outcome.status, TD_ERR_PEER);
        CHECK_CONTAINS(td_last_error(), "no majority");
        return;
    }
    CHECK_EQ(outcome.ranks, 2);
    CHECK_OK(td_destroy_process_group());
}

static td_status stop_in_fifth(td_elastic_slice *slice, void *arg)
{
    if (td_test_rank() == 2 && slice->step == 5)
        raise(SIGUSR1);
    return pass(slice, arg);
}

/* One rank gets a signal: all end after the same step, and a checkpoint is there. */
RANKS(stops_on_signal, .ranks = 3)
{
    char path[300];
    CHECK_OK(td_init_process_group(NULL));
    CHECK_OK(td_stop_on_signals(NULL, 0));
    struct outcome alone = train_alone(&(struct plan){.steps = 6});
    snprintf(path, sizeof path, "%s/checkpoints", td_test_temp_dir());
    struct plan plan = {.slice = stop_in_fifth,
                        .options = {.checkpoint = path, .checkpoint_every = 4}};
    struct outcome outcome = train(&plan, NULL);
    CHECK_OK(outcome.status);
    CHECK(outcome.stats.steps == 6 && outcome.weights == alone.weights);
    td_test_barrier();
    snprintf(path, sizeof path, "%s/checkpoints/step-000000000006.safetensors", td_test_temp_dir());
    CHECK(!access(path, R_OK));
    CHECK_OK(td_destroy_process_group());
}

/* A failure of one rank's own function ends that rank, and the others go on. */
static td_status fail_in_fifth(td_elastic_slice *slice, void *arg)
{
    if (td_test_rank() == 0 && slice->step == 5)
        return td_fail(TD_ERR_NOMEM, "the test has no memory");
    return pass(slice, arg);
}

RANKS(own_failure, .ranks = 3)
{
    CHECK_OK(td_init_process_group(NULL));
    struct outcome alone = train_alone(&(struct plan){0});
    struct outcome outcome = train(&(struct plan){.slice = fail_in_fifth}, NULL);
    if (td_test_rank() == 0) {
        CHECK_EQ(outcome.status, TD_ERR_NOMEM);
        CHECK_CONTAINS(td_last_error(), "the test has no memory");
        CHECK(!td_is_initialized());
        return;
    }
    CHECK_OK(outcome.status);
    CHECK(outcome.ranks == 2 && outcome.weights == alone.weights);
    CHECK_OK(td_destroy_process_group());
}

/* ---- Options ------------------------------------------------------------------------------------------------------------- */

static void refuse(td_elastic_options options, td_status status, const char *text)
{
    CHECK(!td_elastic_create(&options));
    CHECK_EQ(td_last_status(), status);
    CHECK_CONTAINS(td_last_error(), text);
}

TEST(options)
{
    td_dataset *dataset = make_dataset();
    refuse((td_elastic_options){.training.model = make_net(1)}, TD_ERR_INVALID, "neither");
    refuse((td_elastic_options){.slices = 3}, TD_ERR_INVALID, "either training.model");
    td_module *keeper = make_net(1);
    td_optimizer *sgd = td_sgd(keeper, &(td_sgd_options){.lr = 0.1});
#define WITH(...)                                                                                  \
    (td_elastic_options){.training = {.model = make_net(1), .optimizer = sgd}, __VA_ARGS__}
    refuse(WITH(.slices = 6), TD_ERR_INVALID, "power of two");
    refuse(WITH(.dataset = dataset), TD_ERR_INVALID, "one sample at least");
    refuse(WITH(.checkpoint_every = 3), TD_ERR_INVALID, "`checkpoint` is not");
    refuse(WITH(.min_ranks = -1), TD_ERR_INVALID, "must not be negative");
    refuse(WITH(.slices = 2), TD_ERR_STATE, "no process group");
    CHECK_OK(td_init_process_group(NULL));
    refuse(WITH(.audit = "/nonexistent/record"), TD_ERR_SYSTEM, "/nonexistent/record");
    td_elastic *elastic = td_elastic_create(&WITH(.slices = 2));
    CHECK(elastic != NULL);
    CHECK(td_elastic_step(elastic) == 0 && td_elastic_world(elastic) == 1);
    CHECK(td_elastic_rank(elastic) == 0 && !td_elastic_stopped(elastic));
    CHECK(td_elastic_group(elastic) && td_elastic_model(elastic));
    td_elastic_check(elastic);
    CHECK_FAILS(td_elastic_run(elastic, 1, NULL, NULL), TD_ERR_INVALID, "NULL");
    td_elastic_destroy(elastic);
    td_optimizer_destroy(sgd);
    td_module_destroy(keeper);
    td_dataset_release(dataset);
    CHECK_OK(td_destroy_process_group());
}

/* ---- Plain memory -------------------------------------------------------------------------------------------------------- */

enum { NUMBERS = 1031 };

struct memory {
    float weights[NUMBERS], moments[NUMBERS], gradients[NUMBERS];
};

static td_status compute_memory(td_elastic_slice *slice, void *arg)
{
    struct memory *memory = arg;
    unsigned state = (unsigned)slice->seed;
    for (int i = 0; i < NUMBERS; i++)
        memory->gradients[i] = number(&state) + 0.1f * memory->weights[i];
    slice->loss = memory->weights[0];
    return TD_OK;
}

static td_status update_memory(int64_t step, void *arg)
{
    struct memory *memory = arg;
    (void)step;
    for (int i = 0; i < NUMBERS; i++) {
        memory->moments[i] = 0.9f * memory->moments[i] + memory->gradients[i];
        memory->weights[i] -= 0.1f * memory->moments[i];
    }
    return TD_OK;
}

static void train_memory(struct memory *memory, td_group *group, int64_t steps)
{
    td_reducer_buffer gradients[] = {{memory->gradients, NUMBERS, TD_F32, {0}}};
    td_reducer_buffer state[] = {{memory->weights, NUMBERS, TD_F32, {0}},
                                 {memory->moments, NUMBERS, TD_F32, {0}}};
    td_elastic_memory what = {
        .gradients = gradients, .gradient_count = 1, .state = state, .state_count = 2};
    td_elastic *elastic = td_elastic_create(&(td_elastic_options){.memory = &what,
                                                                  .update = update_memory,
                                                                  .update_arg = memory,
                                                                  .slices = SLICES,
                                                                  .group = group,
                                                                  .check_every = 2});
    CHECK(elastic != NULL);
    CHECK_OK(td_elastic_run(elastic, steps, compute_memory, memory));
    td_elastic_destroy(elastic);
}

RANKS(plain_memory, .ranks = 4, .may_die = 2)
{
    static struct memory alone, memory;
    static const struct death who[] = {{1, "slice", 3, 0}};
    CHECK_OK(td_init_process_group(NULL));
    int self = td_get_rank(NULL);
    td_group *group;
    CHECK_OK(td_new_group(&self, 1, NULL, &group));
    train_memory(&alone, group, STEPS);
    CHECK_OK(td_group_destroy(group));
    memory.weights[5] = self == 3 ? 1 : 0; /* gets the state of the others */
    deaths = who;
    death_count = 1;
    td_test_barrier();
    td__elastic_probe = die;
    train_memory(&memory, NULL, STEPS);
    CHECK_MEM(memory.weights, alone.weights, sizeof alone.weights);
    CHECK_MEM(memory.moments, alone.moments, sizeof alone.moments);
    CHECK_OK(td_destroy_process_group());
}

/* Kills at random moments: what is long runs more of them. */
static void random_deaths(const struct way *way, unsigned seed)
{
    struct death who[3];
    unsigned state = seed * 7919 + 13;
    int count = 1 + (int)((number(&state) + 0.5f) * 3);
    for (int i = 0; i < count; i++)
        who[i] = (struct death){.rank = (int)((number(&state) + 0.5f) * 4),
                                .step = (int64_t)((number(&state) + 0.5f) * STEPS),
                                .us = (int)((number(&state) + 0.5f) * 3000)};
    if (count == 3) /* one is left */
        for (int i = 0; i < 3; i++)
            who[i].rank = (who[0].rank + i) % 4;
    open_world(way, 0);
    survive_with_record(who, count);
    CHECK_OK(td_destroy_process_group());
}

RANKS(dies_at_random, .ranks = 4, .may_die = 0xf, .deadline_s = 30)
{
    const char *seed = getenv("TD_TEST_ELASTIC_SEED");
    random_deaths(&shm, seed ? (unsigned)atoi(seed) : 1);
}

RANKS(dies_at_random_over_tcp, .ranks = 4, .may_die = 0xf, .deadline_s = 30)
{
    const char *seed = getenv("TD_TEST_ELASTIC_SEED");
    random_deaths(&tcp, seed ? (unsigned)atoi(seed) : 2);
}

/* These two over and over, with other deaths each time; a failure names the number of its deaths. */
TEST(many_deaths, .deadline_s = 60)
{
    int rounds = td_test_is_long() ? 100 : 4;
    for (int round = 1; round <= rounds; round++) {
        char seed[16];
        snprintf(seed, sizeof seed, "%d", 100 + round);
        setenv("TD_TEST_ELASTIC_SEED", seed, 1);
        struct td_test_child child = td_test_exec(
            (const char *[]){td_test_program(), "dies_at_random*", NULL});
        if (child.status)
            FAIL("TD_TEST_ELASTIC_SEED=%s: %s", seed, child.output);
        free(child.output);
    }
}
