/* What the tests of elastic training with shards have in common; see elastic_shards.h. */
#include "elastic_shards.h"

#include "runner.h"

#include "elastic/elastic_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void same_on_all_sizes(const struct elastic_plan *given)
{
    struct elastic_outcome alone = train_alone(given);
    for (int size = 1; size <= td_test_size(); size++) {
        int ranks[8] = {0, 1, 2, 3, 4, 5, 6, 7};
        td_group *group;
        CHECK_OK(td_new_group(ranks, size, NULL, &group));
        if (td_test_rank() < size) {
            struct elastic_plan plan = *given;
            plan.twice = size % 2 == 0;
            plan.seed = td_test_rank() ? 31 : 5; /* the weights of the first rank count */
            struct elastic_outcome outcome = train(&plan, group);
            CHECK_OK(outcome.status);
            CHECK(outcome.weights == alone.weights && outcome.loss == alone.loss);
            CHECK(outcome.stats.steps == STEPS && outcome.stats.deaths == 0);
            CHECK(outcome.ranks == size && outcome.stats.joined == 0);
        }
        CHECK_OK(td_group_destroy(group));
    }
}

/* ---- Others come --------------------------------------------------------------------------------------------------- */

static int founders;
static bool newcomers_die;

/* The first rank waits in step 4 until it has seen a newcomer, and in each of the next ones until all are there. */
static td_status await_newcomers(const char *moment, td_elastic *elastic)
{
    bool waits = td_elastic_rank(elastic) == 0 && td__elastic_committed(elastic) >= 4 &&
                 td__elastic_committed(elastic) < STEPS - 2 && !strcmp(moment, "fetch");
    int64_t gone = newcomers_die ? elastic->stats.deaths : 0;
    if (waits && !elastic->options.group &&
        elastic->stats.joined + gone + founders < td_test_size())
        CHECK_SOON(atomic_load(&elastic->newcomers_wait));
    return die(moment, elastic);
}

static void take_place(int first)
{
    char size[8];
    snprintf(size, sizeof size, "%d", first);
    if (td_test_rank() >= first) {
        setenv("TANDEM_JOIN", "1", 1);
        unsetenv("RANK"), unsetenv("LOCAL_RANK"), unsetenv("WORLD_SIZE");
        unsetenv("LOCAL_WORLD_SIZE");
    } else {
        setenv("WORLD_SIZE", size, 1);
        setenv("LOCAL_WORLD_SIZE", size, 1);
    }
}

void join_training(const struct way *way, int first, const struct elastic_plan *given,
                   const struct death *who, int count, int left)
{
    bool joins = td_test_rank() >= first;
    take_way(way);
    founders = first;
    newcomers_die = count && who[0].rank >= first;
    take_place(first);
    CHECK_OK(td_init_process_group(NULL));
    struct elastic_outcome alone = joins ? (struct elastic_outcome){0} : train_alone(given);
    deaths = who;
    death_count = count;
    td__elastic_probe = await_newcomers;
    struct elastic_plan plan = *given;
    plan.seed = joins ? 31 : 5;
    struct elastic_outcome outcome = train(&plan, NULL);
    td__elastic_probe = NULL;
    CHECK_OK(outcome.status);
    if (joins) {
        CHECK(outcome.stats.steps < STEPS && outcome.stats.steps > 0);
        CHECK(outcome.stats.catch_up_ms > 0);
        alone = train_alone(given);
    }
    CHECK(outcome.weights == alone.weights && outcome.loss == alone.loss);
    CHECK_EQ(outcome.ranks, left);
    CHECK_OK(td_destroy_process_group());
}

/* ---- At random ----------------------------------------------------------------------------------------------------- */

void random_deaths(const struct way *way, const struct elastic_plan *given, bool checkpoints)
{
    char path[300];
    struct death who[3];
    const char *seed = getenv("TD_TEST_ELASTIC_SEED");
    int count = draw_deaths(seed ? (unsigned)atoi(seed) : 1, who);
    open_world(way, 0);
    struct elastic_plan plan = *given;
    snprintf(path, sizeof path, "%s/checkpoints", td_test_temp_dir());
    if (checkpoints) {
        plan.options.checkpoint = path;
        plan.options.checkpoint_every = 1;
    }
    if (survive_with_record(&plan, who, count).status)
        CHECK_CONTAINS(td_last_error(), "there is no checkpoint to go on from");
    else
        CHECK_OK(td_destroy_process_group());
}
