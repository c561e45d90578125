/* Elastic training whose gradients are reduced by NCCL: the bits of one process, whoever dies. */
#include "nccl_world.h"

#include "elastic_training.h"
#include "runner.h"

#include "elastic/elastic_internal.h"

#include <stdlib.h>

static void survive_in(const td_fsdp_options *fsdp, const struct death *who, int count, int left)
{
    nccl_begin(60000);
    struct elastic_plan plan = {.device = td_device_name(nccl_device()),
                                .options = {.check_every = 2, .fsdp = fsdp}};
    struct elastic_outcome alone = train_alone(&plan);
    deaths = who;
    death_count = count;
    td_test_barrier();
    td__elastic_probe = die;
    struct elastic_outcome outcome = train(&plan, NULL);
    td__elastic_probe = NULL;
    CHECK_OK(outcome.status);
    CHECK(outcome.weights == alone.weights && outcome.loss == alone.loss && outcome.ranks == left);
    nccl_end();
}

static void survive_on_device(const struct death *who, int count, int left)
{
    survive_in(NULL, who, count, left);
}

RANKS(elastic_undisturbed, .ranks = 3, .deadline_s = 120)
{
    survive_on_device(NULL, 0, 3);
}

RANKS(elastic_one_dies, .ranks = 4, .may_die = 2, .deadline_s = 120)
{
    static const struct death who[] = {{1, "slice", 3, 0}};
    survive_on_device(who, 1, 3);
}

RANKS(elastic_two_die, .ranks = 3, .may_die = 6, .deadline_s = 120)
{
    static const struct death who[] = {{1, "ready", 4, 0}, {2, "agreed", 6, 0}};
    survive_on_device(who, 2, 1);
}

/* ---- Shards ---------------------------------------------------------------------------------------------------------- */

static const td_fsdp_options full = {.min_parameters = 400},
                             hybrid = {.min_parameters = 400, .strategy = TD_HYBRID_SHARD},
                             offloaded = {.min_parameters = 400, .offload.enabled = true};

RANKS(elastic_sharded_undisturbed, .ranks = 3, .deadline_s = 120)
{
    survive_in(&full, NULL, 0, 3);
}

RANKS(elastic_sharded_one_dies, .ranks = 4, .may_die = 2, .deadline_s = 120)
{
    static const struct death who[] = {{1, "slice", 3, 0}};
    survive_in(&full, who, 1, 3);
}

RANKS(elastic_sharded_two_die, .ranks = 3, .may_die = 6, .deadline_s = 120)
{
    static const struct death who[] = {{1, "ready", 4, 0}, {2, "updated", 6, 0}};
    survive_in(&full, who, 2, 1);
}

/* Two ranks on each host; one of them dies, and then one of the other host. */
RANKS(elastic_hybrid_two_die, .ranks = 4, .may_die = 6, .deadline_s = 120)
{
    static const struct death who[] = {{2, "slice", 3, 0}, {1, "slice", 6, 0}};
    setenv("TANDEM_HOST_ID", td_test_rank() < 2 ? "a" : "b", 1);
    survive_in(&hybrid, who, 2, 2);
}

RANKS(elastic_offloaded_one_dies, .ranks = 3, .may_die = 1, .deadline_s = 120)
{
    static const struct death who[] = {{0, "updated", 4, 0}};
    survive_in(&offloaded, who, 1, 2);
}
