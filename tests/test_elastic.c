/* Elastic training: the same weights whoever dies. */
#include "elastic_training.h"
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
    struct elastic_outcome alone = train_alone(&(struct elastic_plan){0});
    for (int i = 0; i < 5; i++) {
        int ranks[8] = {0, 1, 2, 3, 4, 5, 6, 7};
        td_group *group;
        if (sizes[i] > td_test_size())
            continue;
        CHECK_OK(td_new_group(ranks, sizes[i], NULL, &group));
        if (td_test_rank() < sizes[i]) {
            int64_t committed = 0;
            struct elastic_plan plan = {
                .options = {.check_every = 3, .on_event = count_commits, .event_arg = &committed},
                .twice = i % 2};
            struct elastic_outcome outcome = train(&plan, group);
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

#define DIES(id, hosts_of, ...)                                                                    \
    RANKS(id, .ranks = 4, .may_die = 0xf, .deadline_s = 30)                                        \
    {                                                                                              \
        static const struct death who[] = {__VA_ARGS__};                                           \
        open_world(hosts_of, 0);                                                                   \
        survive_with_record(&(struct elastic_plan){0}, who, sizeof who / sizeof *who);             \
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
    struct elastic_outcome alone = train_alone(&(struct elastic_plan){0});
    char path[300];
    snprintf(path, sizeof path, "%s/record", td_test_temp_dir());
    td__elastic_probe = lose_result;
    struct elastic_outcome outcome = train(&(struct elastic_plan){.options.audit = path}, NULL);
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

static void go_on_without(const struct elastic_plan *plan)
{
    struct elastic_outcome alone = train_alone(plan);
    td_test_barrier();
    struct elastic_outcome outcome = train(plan, NULL);
    CHECK_OK(outcome.status);
    CHECK(outcome.weights == alone.weights && outcome.ranks == 3 && outcome.stats.deaths == 1);
    CHECK_OK(td_destroy_process_group());
}

RANKS(stopped, .ranks = 4, .may_die = 4, .deadline_s = 60)
{
    CHECK_OK(td_init_process_group(NULL));
    go_on_without(&(struct elastic_plan){.slice = stand_still, .options.heartbeat_ms = 500});
}

RANKS(endless_loop, .ranks = 4, .may_die = 4, .deadline_s = 60)
{
    CHECK_OK(td_init_process_group(NULL));
    go_on_without(&(struct elastic_plan){.slice = loop_for_ever, .options.step_timeout_ms = 700});
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
    struct elastic_plan plan = {.slice = loop_and_die, .options.step_timeout_ms = 700};
    struct elastic_outcome alone = train_alone(&(struct elastic_plan){0});
    td_test_barrier();
    struct elastic_outcome outcome = train(&plan, NULL);
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
    struct elastic_plan plan = {.slice = sleep_long, .options.step_timeout_ms = 700};
    struct elastic_outcome alone = train_alone(&(struct elastic_plan){0});
    td_test_barrier();
    struct elastic_outcome outcome = train(&plan, NULL);
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
    struct elastic_plan plan = {.steps = 30,
                                .options = {.straggler = policy, .on_event = count_reports}};
    struct elastic_outcome alone = train_alone(&plan);
    td_test_barrier();
    td__elastic_probe = set_pace;
    struct elastic_outcome outcome = train(&plan, NULL);
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
    struct elastic_outcome alone = train_alone(&(struct elastic_plan){.seed = 5});
    deaths = who;
    death_count = count;
    td_test_barrier();
    td__elastic_probe = die;
    struct elastic_outcome outcome = train(
        &(struct elastic_plan){.seed = 5 + (uint64_t)td_test_rank()}, NULL);
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
    struct elastic_outcome alone = joins ? (struct elastic_outcome){0}
                                         : train_alone(&(struct elastic_plan){0});
    deaths = who;
    death_count = count;
    td__elastic_probe = await_newcomer;
    struct elastic_outcome outcome = train(&(struct elastic_plan){.seed = joins ? 31 : 5}, NULL);
    td__elastic_probe = NULL;
    CHECK_OK(outcome.status);
    if (joins) {
        CHECK(outcome.stats.steps < STEPS && outcome.stats.steps > 0);
        alone = train_alone(&(struct elastic_plan){0});
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
    struct elastic_plan plan = {.seed = 5, .device = "toy:0", .options.check_every = 2};
    struct elastic_outcome alone = train_alone(&plan);
    deaths = who;
    death_count = 1;
    td_test_barrier();
    plan.seed = td_test_rank() == 2 ? 6 : 5;
    td__elastic_probe = die;
    struct elastic_outcome outcome = train(&plan, NULL);
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
    struct elastic_outcome alone = train_alone(&(struct elastic_plan){0});
    snprintf(path, sizeof path, "%s/checkpoints", td_test_temp_dir());
    setenv("TD_TEST_DIES", "1", 1);
    struct elastic_plan plan = {.slice = die_in_fifth,
                                .options = {.min_ranks = 2, .checkpoint = path}};
    struct elastic_outcome outcome = train(&plan, NULL);
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
    struct elastic_outcome outcome = train(&(struct elastic_plan){.options.need_majority = true},
                                           NULL);
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
    struct elastic_outcome alone = train_alone(&(struct elastic_plan){.steps = 6});
    snprintf(path, sizeof path, "%s/checkpoints", td_test_temp_dir());
    struct elastic_plan plan = {.slice = stop_in_fifth,
                                .options = {.checkpoint = path, .checkpoint_every = 4}};
    struct elastic_outcome outcome = train(&plan, NULL);
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
    struct elastic_outcome alone = train_alone(&(struct elastic_plan){0});
    struct elastic_outcome outcome = train(&(struct elastic_plan){.slice = fail_in_fifth}, NULL);
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
    int count = draw_deaths(seed, who);
    open_world(way, 0);
    char path[300];
    struct elastic_plan plan = {.options = {.checkpoint = path, .checkpoint_every = 2}};
    snprintf(path, sizeof path, "%s/checkpoints", td_test_temp_dir());
    CHECK_OK(survive_with_record(&plan, who, count).status);
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

TEST(many_deaths, .deadline_s = 60)
{
    die_at_random_many_times(4, 100);
}
