/* Elastic training whose gradients are reduced by NCCL: the bits of one process, whoever dies. */
#include "nccl_world.h"

#include "elastic_training.h"
#include "runner.h"

#include "elastic/elastic_internal.h"

static void survive_on_device(const struct death *who, int count, int left)
{
    nccl_begin(60000);
    struct elastic_plan plan = {.device = td_device_name(nccl_device()), .options.check_every = 2};
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
