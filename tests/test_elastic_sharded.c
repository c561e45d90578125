/* Elastic training of sharded models: the weights of td_ddp() on one rank, whoever dies. */
#include "elastic_shards.h"
#include "runner.h"
#include "ways.h"

#include "elastic/elastic_internal.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const td_fsdp_options shared = {.min_parameters = 400};
static const td_fsdp_options apart = {.min_parameters = 400, .no_shared_memory = true};
static const td_fsdp_options kept = {.min_parameters = 400, .strategy = TD_SHARD_GRAD_OP};
static const struct way two_hosts = {.hosts = "aabb"}, three_hosts = {.hosts = "abc"};

/* ---- Nobody dies --------------------------------------------------------------------------------------------------- */

RANKS(undisturbed, .ranks = 4, .deadline_s = 60)
{
    CHECK_OK(td_init_process_group(NULL));
    same_on_all_sizes(&(struct elastic_plan){.options.fsdp = &shared});
    same_on_all_sizes(&(struct elastic_plan){.options.fsdp = &kept});
    CHECK_OK(td_destroy_process_group());
}

RANKS(undisturbed_over_tcp, .ranks = 4, .deadline_s = 60)
{
    open_world(&tcp, 0);
    same_on_all_sizes(&(struct elastic_plan){.options.fsdp = &apart});
    CHECK_OK(td_destroy_process_group());
}

/* ---- Ranks die ----------------------------------------------------------------------------------------------------- */

#define DIES(id, count, hosts_of, how, ...)                                                        \
    DIES_IN(id, count, hosts_of, ((struct elastic_plan){.options.fsdp = how}), __VA_ARGS__)

DIES(dies_in_forward, 4, &shm, &shared, {2, "slice", 4, 0})
DIES(dies_in_first_step, 4, &shm, &kept, {0, "fetch", 0, 0})
DIES(dies_before_agreement, 4, &shm, &shared, {1, "ready", 5, 0})
DIES(dies_after_agreement, 4, &shm, &kept, {0, "agreed", 6, 0})
DIES(dies_in_update, 4, &shm, &shared, {3, "commit", 3, 0})
DIES(dies_after_update, 4, &shm, &shared, {0, "updated", 7, 0})
DIES(first_dies_with_initial_weights, 3, &shm, &shared, {0, "divided", 0, 0})
DIES(other_dies_in_first_division, 3, &shm, &shared, {1, "divided", 0, 0})
DIES(two_die, 4, &shm, &shared, {0, "slice", 4, 0}, {3, "slice", 4, 0})
DIES(two_die_one_after_another, 4, &shm, &shared, {1, "ready", 4, 0}, {0, "agreed", 5, 0})
DIES(all_but_one_die, 4, &shm, &shared, {0, "slice", 4, 0}, {1, "ready", 4, 0}, {3, "ready", 4, 0})
DIES(dies_in_shrink, 4, &shm, &shared, {2, "slice", 4, 0}, {0, "shrink", 4, 0})
DIES(dies_while_dividing, 4, &shm, &shared, {2, "slice", 4, 0}, {1, "divided", 4, 0})
DIES(dies_in_last_step, 3, &shm, &shared, {1, "agreed", STEPS - 1, 0}, {2, "updated", STEPS, 0})
DIES(one_of_two, 2, &shm, &shared, {0, "updated", 5, 0})
DIES(dies_over_tcp, 4, &tcp, &apart, {0, "slice", 4, 0}, {2, "agreed", 6, 0})
DIES(dies_on_hosts, 4, &two_hosts, &apart, {0, "ready", 4, 0}, {2, "slice", 6, 0})
DIES(host_dies, 4, &two_hosts, &apart, {2, "slice", 5, 0}, {3, "slice", 5, 0})

/* A rank does not get the result of the agreement that others get: all go back to the state before it. */
static td_status lose_result(const char *moment, td_elastic *elastic)
{
    static bool lost;
    if (td_test_rank() != 1 || lost || strcmp(moment, "agreed") ||
        td__elastic_committed(elastic) != 4)
        return TD_OK;
    lost = true;
    return td_fail(TD_ERR_PEER, "the test has lost the result");
}

RANKS(goes_back, .ranks = 3)
{
    CHECK_OK(td_init_process_group(NULL));
    struct elastic_outcome alone = train_alone(&(struct elastic_plan){0});
    char path[300];
    snprintf(path, sizeof path, "%s/record", td_test_temp_dir());
    td__elastic_probe = lose_result;
    struct elastic_outcome outcome = train(
        &(struct elastic_plan){.options = {.fsdp = &shared, .audit = path}}, NULL);
    td__elastic_probe = NULL;
    CHECK_OK(outcome.status);
    CHECK(outcome.weights == alone.weights && outcome.loss == alone.loss);
    CHECK(outcome.stats.deaths == 0 && outcome.stats.recoveries == 1 && outcome.ranks == 3);
    CHECK_EQ(outcome.stats.steps, STEPS); /* each is told once */
    td_test_barrier();
    check_record(path, STEPS);
    CHECK_OK(td_destroy_process_group());
}

/* ---- Others come --------------------------------------------------------------------------------------------------- */

RANKS(grows, .ranks = 4, .deadline_s = 60)
{
    join_training(&shm, 2, &(struct elastic_plan){.options.fsdp = &shared}, NULL, 0, 4);
}

RANKS(grows_over_tcp, .ranks = 4, .deadline_s = 60)
{
    join_training(&tcp, 2, &(struct elastic_plan){.options.fsdp = &apart}, NULL, 0, 4);
}

RANKS(replaces, .ranks = 4, .may_die = 2, .deadline_s = 60)
{
    static const struct death who[] = {{1, "slice", 2, 0}};
    join_training(&shm, 3, &(struct elastic_plan){.options.fsdp = &shared}, who, 1, 3);
}

RANKS(newcomer_dies, .ranks = 4, .may_die = 8, .deadline_s = 60)
{
    static const struct death who[] = {{3, "divided", 0, 0}};
    join_training(&shm, 3, &(struct elastic_plan){.options.fsdp = &shared}, who, 1, 3);
}

RANKS(member_dies_for_newcomer, .ranks = 4, .may_die = 1, .deadline_s = 60)
{
    static const struct death who[] = {{0, "divided", -1, 0}};
    join_training(&shm, 3, &(struct elastic_plan){.options.fsdp = &shared}, who, 1, 3);
}

/* ---- What cannot be restored --------------------------------------------------------------------------------------- */

/* Three hosts: a rank and the one that has its copies die. */
static struct elastic_outcome lose_two(const char *checkpoint)
{
    static const struct death who[] = {{1, "slice", 6, 0}, {2, "slice", 6, 0}};
    open_world(&three_hosts, 0);
    struct elastic_outcome alone = train_alone(&(struct elastic_plan){0});
    deaths = who;
    death_count = 2;
    td_test_barrier();
    td__elastic_probe = die;
    struct elastic_plan plan = {.options = {.fsdp = &apart, .checkpoint = checkpoint}};
    plan.options.checkpoint_every = checkpoint ? 4 : 0;
    struct elastic_outcome outcome = train(&plan, NULL);
    td__elastic_probe = NULL;
    CHECK(outcome.status || (outcome.weights == alone.weights && outcome.loss == alone.loss));
    return outcome;
}

RANKS(copies_are_lost, .ranks = 3, .may_die = 6, .deadline_s = 60)
{
    CHECK_EQ(lose_two(NULL).status, TD_ERR_PEER);
    CHECK_CONTAINS(td_last_error(), "has a whole copy of the shards that rank 1 of the former");
    CHECK_CONTAINS(td_last_error(), "there is no checkpoint to go on from");
    CHECK(!td_is_initialized());
}

RANKS(goes_on_from_checkpoint, .ranks = 3, .may_die = 6, .deadline_s = 60)
{
    char path[300];
    snprintf(path, sizeof path, "%s/checkpoints", td_test_temp_dir());
    struct elastic_outcome outcome = lose_two(path);
    CHECK_OK(outcome.status);
    CHECK_EQ(outcome.ranks, 1);
    CHECK_OK(td_destroy_process_group());
}

/* Too few ranks are left: a checkpoint, from which fewer go on. */
RANKS(too_few, .ranks = 3, .may_die = 4)
{
    char path[300];
    static const struct death who[] = {{2, "slice", 5, 0}};
    CHECK_OK(td_init_process_group(NULL));
    struct elastic_outcome alone = train_alone(&(struct elastic_plan){0});
    snprintf(path, sizeof path, "%s/checkpoints", td_test_temp_dir());
    struct elastic_plan plan = {.options = {.fsdp = &shared, .min_ranks = 3, .checkpoint = path}};
    deaths = who;
    death_count = 1;
    td_test_barrier();
    td__elastic_probe = die;
    struct elastic_outcome outcome = train(&plan, NULL);
    td__elastic_probe = NULL;
    CHECK_EQ(outcome.status, TD_ERR_PEER);
    CHECK_CONTAINS(td_last_error(), "2 of 3 ranks are left after step 5");
    if (td_test_rank() == 1)
        return;
    unsetenv("RANK"), unsetenv("WORLD_SIZE"), unsetenv("TANDEM_AGENT_STORE");
    unsetenv("MASTER_ADDR"), unsetenv("MASTER_PORT");
    CHECK_OK(td_init_process_group(NULL));
    plan.options.min_ranks = 0;
    outcome = train(&plan, NULL);
    CHECK_OK(outcome.status);
    CHECK(outcome.stats.steps == STEPS - 5 && outcome.weights == alone.weights);
    CHECK_OK(td_destroy_process_group());
}

/* ---- Options --------------------------------------------------------------------------------------------------------- */

static void refuse(td_elastic_options options, td_status status, const char *text)
{
    CHECK(!td_elastic_create(&options));
    CHECK_EQ(td_last_status(), status);
    CHECK_CONTAINS(td_last_error(), text);
}

static td_status no_update(int64_t step, void *arg)
{
    (void)step, (void)arg;
    return TD_OK;
}

TEST(options)
{
    CHECK_OK(td_init_process_group(NULL));
    td_module *keeper = make_net(1);
    td_optimizer *sgd = td_sgd(keeper, &(td_sgd_options){.lr = 0.1});
#define WITH(...)                                                                                  \
    (td_elastic_options)                                                                           \
    {                                                                                              \
        .training = {.model = make_net(1), .optimizer = sgd}, .fsdp = &(td_fsdp_options)           \
        {                                                                                          \
            __VA_ARGS__                                                                            \
        }                                                                                          \
    }
    refuse(WITH(.slices = 4), TD_ERR_INVALID, "fsdp.slices");
    refuse(WITH(.strategy = (td_fsdp_strategy)7), TD_ERR_INVALID, "there is no strategy 7");
    refuse(WITH(.min_parameters = 400), TD_ERR_INVALID, "does not have the parameter");
    td_elastic_options options = WITH(0);
    options.training.optimizer = NULL;
    options.update = no_update;
    refuse(options, TD_ERR_INVALID, "needs an optimizer");
    td_elastic_memory memory = {0};
    refuse((td_elastic_options){.memory = &memory, .fsdp = &shared}, TD_ERR_INVALID,
           "`fsdp` is for a module");
    td_optimizer_destroy(sgd);
    td_module_destroy(keeper);
    CHECK_OK(td_destroy_process_group());
}

/* ---- Between two calls ----------------------------------------------------------------------------------------------- */

/* A rank dies after the training: the next call makes the model whole again for the others. */
RANKS(dies_after_training, .ranks = 3, .may_die = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    struct elastic_outcome alone = train_alone(&(struct elastic_plan){0});
    struct elastic_plan plan = {.options.fsdp = &shared};
    td_module *net = make_net(5);
    td_optimizer *adam = td_adam(net, &(td_adam_options){.lr = 0.01});
    td_dataset *dataset = make_dataset();
    td_elastic *elastic = td_elastic_create(
        &(td_elastic_options){.training = {.model = net, .optimizer = adam},
                              .fsdp = &shared,
                              .dataset = dataset,
                              .slices = SLICES,
                              .slice_size = EACH});
    CHECK(elastic != NULL && alone.weights);
    CHECK_OK(td_elastic_run(elastic, 3, pass, &plan));
    if (td_test_rank() == 1)
        raise(SIGKILL);
    td_status status;
    while (!(status = td_group_barrier(td_elastic_group(elastic), NULL))) {
    }
    CHECK(status == TD_ERR_PEER || status == TD_ERR_ABORTED); /* the other one has noticed it first */
    CHECK_OK(td_elastic_run(elastic, 3, pass, &plan));
    CHECK_EQ(td_elastic_world(elastic), 2);
    CHECK_OK(td_fsdp_gather_begin(td_elastic_model(elastic), false));
    CHECK_OK(td_fsdp_gather_end(td_elastic_model(elastic)));
    td_elastic_destroy(elastic);
    td_optimizer_destroy(adam);
    td_dataset_release(dataset);
    CHECK_OK(td_destroy_process_group());
}

/* ---- At random ----------------------------------------------------------------------------------------------------- */

RANKS(dies_at_random, .ranks = 4, .may_die = 0xf, .deadline_s = 30)
{
    random_deaths(&shm, &(struct elastic_plan){.options.fsdp = &shared}, false);
}

RANKS(dies_at_random_kept, .ranks = 4, .may_die = 0xf, .deadline_s = 30)
{
    random_deaths(&shm, &(struct elastic_plan){.options.fsdp = &kept}, false);
}

RANKS(dies_at_random_over_tcp, .ranks = 4, .may_die = 0xf, .deadline_s = 30)
{
    random_deaths(&tcp, &(struct elastic_plan){.options.fsdp = &apart}, true);
}

TEST(many_deaths, .deadline_s = 60)
{
    die_at_random_many_times(3, 300);
}
