/* Elastic training of models that are sharded inside hosts, whole on each rank, or offloaded: the bits of one process. */
#include "elastic_shards.h"
#include "runner.h"

#include "elastic/elastic_internal.h"
#include "parallel/fsdp_internal.h"

#include <tandem/tandem.h>

#include <stdio.h>
#include <string.h>
#include <unistd.h>

static const struct elastic_plan
    hybrid = {.options.fsdp = &(td_fsdp_options){.strategy = TD_HYBRID_SHARD,
                                                 .min_parameters = 400}},
    pairs = {.options.fsdp = &(td_fsdp_options){.strategy = TD_HYBRID_SHARD,
                                                .shard_size = 2,
                                                .no_shared_memory = true,
                                                .min_parameters = 400}},
    whole = {.options.fsdp = &(td_fsdp_options){.strategy = TD_NO_SHARD, .min_parameters = 400}},
    offloaded = {
        .options.fsdp = &(td_fsdp_options){.offload.enabled = true, .min_parameters = 400}};

/* A unit or two on the host, and the others in files of the test's directory; the program's text does not stay. */
static struct elastic_plan in_files(void)
{
    static char directory[300];
    static td_fsdp_options options = {.min_parameters = 400};
    snprintf(directory, sizeof directory, "%s", td_test_temp_dir());
    options.offload = (td_fsdp_offload){
        .enabled = true, .host_bytes = 10000, .directory = directory};
    return (struct elastic_plan){.options.fsdp = &options};
}

static const struct way two_hosts = {.hosts = "aabbb"}, mixed_hosts = {.hosts = "ababa"},
                        three_hosts = {.hosts = "abcab"}, uneven_hosts = {.hosts = "aaab"};

/* ---- Nobody dies --------------------------------------------------------------------------------------------------- */

RANKS(undisturbed, .ranks = 5, .deadline_s = 60)
{
    CHECK_OK(td_init_process_group(NULL));
    same_on_all_sizes(&pairs);
    same_on_all_sizes(&whole);
    same_on_all_sizes(&offloaded);
    struct elastic_plan files = in_files();
    same_on_all_sizes(&files);
    CHECK_OK(td_destroy_process_group());
}

RANKS(undisturbed_on_hosts, .ranks = 5, .deadline_s = 60)
{
    open_world(&two_hosts, 0);
    same_on_all_sizes(&hybrid);
    same_on_all_sizes(&pairs);
    same_on_all_sizes(&whole);
    CHECK_OK(td_destroy_process_group());
}

RANKS(undisturbed_on_mixed_hosts, .ranks = 5, .deadline_s = 60)
{
    open_world(&mixed_hosts, 0);
    same_on_all_sizes(&hybrid);
    same_on_all_sizes(&pairs);
    CHECK_OK(td_destroy_process_group());
}

/* ---- Ranks die ----------------------------------------------------------------------------------------------------- */

DIES_IN(hybrid_dies_in_forward, 4, &two_hosts, hybrid, {2, "slice", 4, 0})
DIES_IN(hybrid_first_dies, 4, &two_hosts, hybrid, {0, "fetch", 0, 0})
DIES_IN(hybrid_dies_in_update, 4, &two_hosts, hybrid, {3, "commit", 3, 0})
DIES_IN(hybrid_dies_after_update, 4, &two_hosts, hybrid, {1, "updated", 5, 0})
DIES_IN(hybrid_becomes_even, 4, &two_hosts, hybrid, {1, "ready", 3, 0}, {2, "agreed", 6, 0})
DIES_IN(hybrid_becomes_even_at_once, 4, &two_hosts, hybrid, {0, "slice", 4, 0}, {3, "slice", 4, 0})
DIES_IN(hybrid_host_dies, 4, &two_hosts, hybrid, {2, "slice", 5, 0}, {3, "slice", 5, 0})
DIES_IN(hybrid_twins_die, 4, &two_hosts, hybrid, {0, "updated", 5, 0}, {2, "updated", 5, 0})
DIES_IN(hybrid_dies_while_dividing, 4, &two_hosts, hybrid, {3, "slice", 4, 0}, {1, "divided", 4, 0})
DIES_IN(hybrid_dies_in_shrink, 4, &two_hosts, hybrid, {2, "slice", 4, 0}, {0, "shrink", 4, 0})
DIES_IN(hybrid_all_but_one_die, 4, &two_hosts, hybrid, {0, "slice", 2, 0}, {3, "ready", 5, 0},
        {1, "updated", 8, 0})
DIES_IN(hybrid_of_five, 5, &two_hosts, hybrid, {4, "agreed", 4, 0}, {1, "ready", 7, 0})
DIES_IN(hybrid_on_mixed_hosts, 4, &mixed_hosts, hybrid, {1, "slice", 4, 0})
DIES_IN(pairs_die, 4, &shm, pairs, {0, "slice", 3, 0}, {3, "updated", 6, 0})
DIES_IN(twins_of_pairs_die, 4, &shm, pairs, {0, "commit", 3, 0}, {2, "commit", 3, 0})
DIES_IN(pairs_die_on_hosts, 5, &three_hosts, pairs, {4, "slice", 3, 0}, {1, "updated", 6, 0})
DIES_IN(whole_dies, 4, &shm, whole, {0, "slice", 4, 0}, {2, "updated", 6, 0})
DIES_IN(whole_dies_on_hosts, 4, &uneven_hosts, whole, {1, "commit", 4, 0}, {3, "ready", 6, 0})
DIES_IN(whole_all_but_one_die, 3, &tcp, whole, {0, "updated", 4, 0}, {1, "updated", 4, 0})
DIES_IN(offloaded_dies, 4, &shm, offloaded, {1, "slice", 4, 0}, {0, "updated", 6, 0})

DIES_IN(with_files_dies, 4, &shm, in_files(), {1, "slice", 4, 0}, {0, "updated", 6, 0})
DIES_IN(with_files_host_dies, 4, &uneven_hosts, in_files(), {3, "slice", 4, 0})

/* A call on the group of a host fails before that of all ranks: what follows is the same. */
static td_status break_shards(const char *moment, td_elastic *elastic)
{
    static bool done;
    if (td_test_rank() != 1 || done || strcmp(moment, "fetch") ||
        td__elastic_committed(elastic) != 4)
        return TD_OK;
    done = true;
    CHECK_OK(td_group_abort(td__fsdp_of(td_elastic_model(elastic))->units[0]->ranks->shards));
    return TD_OK;
}

RANKS(shards_of_a_host_are_aborted, .ranks = 4)
{
    open_world(&two_hosts, 0);
    struct elastic_outcome alone = train_alone(&hybrid);
    td__elastic_probe = break_shards;
    struct elastic_outcome outcome = train(&hybrid, NULL);
    td__elastic_probe = NULL;
    CHECK_OK(outcome.status);
    CHECK(outcome.weights == alone.weights && outcome.loss == alone.loss);
    CHECK(outcome.stats.recoveries > 0 && outcome.ranks == 4);
    CHECK_OK(td_destroy_process_group());
}

/* A rank of a host is in an endless loop, and the other one waits for it: that one is not taken for late. */
static td_status loop_for_ever(td_elastic_slice *slice, void *arg)
{
    while (td_test_rank() == 2 && slice->step == 4)
        usleep(1000);
    return pass(slice, arg);
}

RANKS(endless_loop_on_a_host, .ranks = 4, .may_die = 4, .deadline_s = 60)
{
    open_world(&two_hosts, 0);
    struct elastic_outcome alone = train_alone(&hybrid);
    struct elastic_plan plan = hybrid;
    plan.slice = loop_for_ever;
    plan.options.step_timeout_ms = 700;
    td_test_barrier();
    struct elastic_outcome outcome = train(&plan, NULL);
    if (td_test_rank() == 2)
        return; /* the others have gone on without it, and here it learns that */
    CHECK_OK(outcome.status);
    CHECK(outcome.weights == alone.weights && outcome.ranks == 3 && outcome.stats.deaths == 1);
    CHECK_OK(td_destroy_process_group());
}

/* ---- How it is divided --------------------------------------------------------------------------------------------- */

static int sizes[STEPS + 1]; /* how many ranks had one copy of the model, by step */

static td_status note_sizes(const char *moment, td_elastic *elastic)
{
    if (!strcmp(moment, "ready"))
        sizes[td__elastic_committed(elastic)] =
            td__fsdp_of(td_elastic_model(elastic))->units[0]->ranks->size;
    return die(moment, elastic);
}

/* A host has one rank less, and then the other one, too: two shards, three, and then one on each host. */
RANKS(divisions_of_hybrid, .ranks = 4, .may_die = 0x6)
{
    static const struct death who[] = {{1, "slice", 3, 0}, {2, "slice", 6, 0}};
    open_world(&two_hosts, 0);
    struct elastic_outcome alone = train_alone(&hybrid);
    deaths = who;
    death_count = 2;
    td_test_barrier();
    td__elastic_probe = note_sizes;
    struct elastic_outcome outcome = train(&hybrid, NULL);
    td__elastic_probe = NULL;
    CHECK_OK(outcome.status);
    CHECK(outcome.weights == alone.weights && outcome.loss == alone.loss);
    CHECK(sizes[1] == 2 && sizes[4] == 3 && sizes[8] == 1);
    CHECK_OK(td_destroy_process_group());
}

/* ---- Others come --------------------------------------------------------------------------------------------------- */

RANKS(hybrid_grows, .ranks = 4, .deadline_s = 60)
{
    join_training(&two_hosts, 2, &hybrid, NULL, 0, 4);
}

RANKS(hybrid_replaces, .ranks = 4, .may_die = 2, .deadline_s = 60)
{
    static const struct death who[] = {{1, "slice", 2, 0}};
    join_training(&two_hosts, 3, &hybrid, who, 1, 3);
}

RANKS(whole_newcomer_dies, .ranks = 4, .may_die = 8, .deadline_s = 60)
{
    static const struct death who[] = {{3, "divided", 0, 0}};
    join_training(&shm, 3, &whole, who, 1, 3);
}

/* ---- At random ----------------------------------------------------------------------------------------------------- */

RANKS(dies_at_random, .ranks = 4, .may_die = 0xf, .deadline_s = 30)
{
    random_deaths(&two_hosts, &hybrid, true);
}

RANKS(dies_at_random_in_pairs, .ranks = 4, .may_die = 0xf, .deadline_s = 30)
{
    random_deaths(&shm, &pairs, false);
}

RANKS(dies_at_random_whole, .ranks = 4, .may_die = 0xf, .deadline_s = 30)
{
    random_deaths(&shm, &whole, false);
}

TEST(many_deaths, .deadline_s = 60)
{
    die_at_random_many_times(2, 300);
}
