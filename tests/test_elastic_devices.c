/* Elastic training of models that are sharded on an accelerator: the bits of replicas on one, whoever dies. It is the toy
 * accelerator, or that of the variable TD_TEST_ELASTIC_DEVICE, such as cuda:0, which all ranks share; what they send goes by
 * way of the host then. */
#include "elastic_shards.h"
#include "runner.h"
#include "toy_device.h"

#include "elastic/elastic_internal.h"

#include <tandem/tandem.h>

#include <malloc.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

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

/* ---- Copies of the last step are under way ------------------------------------------------------------------------- */

/* Trains a model of which each rank has a part, and whose copies take long; `probe` may be NULL. Returns how many ranks are left. */
static int train_wide(const char *device, td_elastic_slice_fn slice,
                      td_status (*probe)(const char *, td_elastic *), td_status expected)
{
    struct elastic_plan plan = {.device = device};
    td_dataset *dataset = make_dataset();
    td_manual_seed(5);
    td_module *net = td_sequential(td_linear(IN, 4000), td_relu(), td_linear(4000, OUT), NULL);
    CHECK(net && dataset);
    CHECK_OK(td_module_to(net, td_device_get(plan.device)));
    td_optimizer *adam = td_adam(net, &(td_adam_options){.lr = 0.01});
    td_elastic *elastic = td_elastic_create(
        &(td_elastic_options){.training = {.model = net, .optimizer = adam},
                              .fsdp = &full,
                              .dataset = dataset,
                              .slices = SLICES,
                              .slice_size = EACH});
    CHECK(elastic);
    td__elastic_probe = probe;
    CHECK_EQ(td_elastic_run(elastic, 8, slice, &plan), expected);
    td__elastic_probe = NULL;
    int left = expected ? 0 : td_elastic_world(elastic);
    td_elastic_destroy(elastic);
    td_optimizer_destroy(adam);
    td_dataset_release(dataset);
    return left;
}

static td_status fail_in_step_two(td_elastic_slice *slice, void *plan)
{
    return slice->step == 2 ? td_fail(TD_ERR_INVALID, "a failure of the program")
                            : pass(slice, plan);
}

/* What the thread of the copies uses is there until it has ended: freed memory has other bytes. */
static const char *begin_late(void)
{
    mallopt(M_PERTURB, 0x55);
    open_world(&shm, 0);
    return prepare(2000);
}

RANKS(slice_fails_while_copies_run, .ranks = 1, .deadline_s = 60)
{
    train_wide(begin_late(), fail_in_step_two, NULL, TD_ERR_INVALID);
}

static td_status leave(const char *moment, td_elastic *elastic)
{
    if (!strcmp(moment, "agreed") && td__elastic_committed(elastic) == 1)
        atomic_store(&elastic->leaves, true);
    return TD_OK;
}

RANKS(leaves_while_copies_run, .ranks = 1, .deadline_s = 60)
{
    train_wide(begin_late(), pass, leave, TD_OK);
    CHECK_OK(td_destroy_process_group());
}

/* The copies of a rank have not ended when the group is aborted. Those of the others have, and wait for them. */
static td_status abort_while_copies_run(const char *moment, td_elastic *elastic)
{
    static bool held, met;
    if (!held && !strcmp(moment, "updated") && td__elastic_committed(elastic) == 4) {
        held = true;
        toy_limit_copies(0, td_test_rank() == 2 ? 0 : -1);
    }
    if (!held || met || strcmp(moment, "fetch"))
        return TD_OK;
    met = true;
    td_test_barrier();
    if (td_test_rank() == 2) {
        CHECK_OK(td_group_abort(elastic->all));
        toy_limit_copies(0, -1);
    }
    return TD_OK;
}

RANKS(aborted_while_others_exchange, .ranks = 4, .deadline_s = 60)
{
    open_world(&two_hosts, 0);
    CHECK_EQ(train_wide(prepare(0), pass, abort_while_copies_run, TD_OK), 4);
    CHECK_OK(td_destroy_process_group());
}

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
