/* Elastic training of models that are sharded on an accelerator: the bits of replicas on one, whoever dies. It is the toy
 * accelerator, or that of the variable TD_TEST_ELASTIC_DEVICE, such as cuda:0, which all ranks share; what they send goes by
 * way of the host then. */
#include "elastic_shards.h"
#include "runner.h"
#include "toy_device.h"

#include "elastic/elastic_internal.h"

#include <tandem/tandem.h>

#include <stdlib.h>

static const td_fsdp_options full = {.min_parameters = 400},
                             kept = {.strategy = TD_SHARD_GRAD_OP, .min_parameters = 400},
                             hybrid = {.strategy = TD_HYBRID_SHARD, .min_parameters = 400},
                             whole = {.strategy = TD_NO_SHARD, .min_parameters = 400},
                             offloaded = {.offload.enabled = true, .min_parameters = 400},
                             /* Some units are on the device, and the others on the host. */
    tiers = {.offload = {.enabled = true, .device_bytes = 9000}, .min_parameters = 400};

static const struct way two_hosts = {.hosts = "aabb"};

/* Makes the device; each kernel, copy and event of the toy is late by so many microseconds at most. */
static const char *prepare(int late_us)
{
    const char *name = getenv("TD_TEST_ELASTIC_DEVICE");
    if (name) {
        setenv("TANDEM_PLUGIN_PATH", TD_TEST_BUILD_DIR "/lib/tandem/plugins", 0);
        setenv("TANDEM_NCCL_SO", "none", 0);
        return name;
    }
    CHECK_OK(toy_register());
    toy_set_delay(late_us);
    return "toy:0";
}

static struct elastic_plan plan_of(const td_fsdp_options *options, int late_us)
{
    return (struct elastic_plan){.device = prepare(late_us), .options.fsdp = options};
}

/* ---- Nobody dies --------------------------------------------------------------------------------------------------- */

static void same_on_all(const struct way *way, const td_fsdp_options *options)
{
    struct elastic_plan plan = plan_of(options, 0);
    open_world(way, 0);
    same_on_all_sizes(&plan);
    CHECK_OK(td_destroy_process_group());
}

RANKS(undisturbed, .ranks = 5, .deadline_s = 60)
{
    same_on_all(&shm, &full);
}

RANKS(undisturbed_hybrid, .ranks = 4, .deadline_s = 60)
{
    same_on_all(&two_hosts, &hybrid);
}

RANKS(undisturbed_in_tiers, .ranks = 3, .deadline_s = 60)
{
    same_on_all(&shm, &tiers);
}

/* ---- Ranks die ----------------------------------------------------------------------------------------------------- */

#define LATE(id, count, hosts_of, how, us, ...)                                                    \
    DIES_IN(id, count, hosts_of, plan_of(how, us), __VA_ARGS__)
#define DIES(id, count, hosts_of, how, ...) LATE(id, count, hosts_of, how, 0, __VA_ARGS__)

/* For devices that are emulated, and slow. */
RANKS(dies_in_few_steps, .ranks = 2, .may_die = 1, .deadline_s = 120)
{
    static const struct death who[] = {{0, "slice", 1, 0}};
    struct elastic_plan plan = plan_of(&full, 0);
    plan.steps = 2;
    open_world(&shm, 0);
    CHECK_EQ(survive(&plan, who, 1).ranks, 1);
    CHECK_OK(td_destroy_process_group());
}

LATE(die_on_late_device, 3, &shm, &kept, 10, {1, "updated", 3, 0}, {0, "commit", 5, 0})
DIES(dies_in_forward, 4, &shm, &full, {2, "slice", 4, 0})
DIES(dies_after_agreement, 3, &shm, &kept, {0, "agreed", 6, 0})
DIES(first_dies_with_initial_weights, 3, &shm, &full, {0, "divided", 0, 0})
DIES(two_die_in_update, 4, &shm, &kept, {1, "updated", 4, 0}, {2, "commit", 4, 0})
DIES(dies_while_dividing, 4, &shm, &full, {2, "slice", 4, 0}, {1, "divided", 4, 0})
DIES(all_but_one_die, 3, &shm, &full, {0, "slice", 4, 0}, {1, "ready", 4, 0})
DIES(dies_over_tcp, 3, &tcp, &full, {0, "slice", 4, 0})
DIES(host_dies, 4, &two_hosts, &full, {2, "slice", 5, 0}, {3, "slice", 5, 0})
DIES(hybrid_dies, 4, &two_hosts, &hybrid, {1, "slice", 3, 0}, {2, "updated", 6, 0})
DIES(whole_dies, 3, &shm, &whole, {1, "updated", 4, 0})
DIES(offloaded_dies, 4, &shm, &offloaded, {1, "slice", 3, 0}, {2, "updated", 6, 0})
DIES(tiers_die, 3, &shm, &tiers, {0, "ready", 4, 0})

/* ---- Others come --------------------------------------------------------------------------------------------------- */

RANKS(grows, .ranks = 4, .deadline_s = 60)
{
    struct elastic_plan plan = plan_of(&full, 0);
    join_training(&shm, 2, &plan, NULL, 0, 4);
}

/* ---- At random ----------------------------------------------------------------------------------------------------- */

RANKS(dies_at_random, .ranks = 4, .may_die = 0xf, .deadline_s = 30)
{
    struct elastic_plan plan = plan_of(&full, 0);
    random_deaths(&shm, &plan, false);
}

RANKS(dies_at_random_on_hosts, .ranks = 4, .may_die = 0xf, .deadline_s = 30)
{
    struct elastic_plan plan = plan_of(&hybrid, 0);
    random_deaths(&two_hosts, &plan, true);
}

TEST(many_deaths, .deadline_s = 60)
{
    die_at_random_many_times(0, 300);
}
