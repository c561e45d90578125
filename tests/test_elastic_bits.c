/* Elastic training finds ranks with other bits: those that TANDEM_FLIP has flipped. */
#include "elastic_training.h"
#include "runner.h"
#include "toy_device.h"
#include "ways.h"

#include "elastic/elastic_internal.h"

#include <tandem/tandem.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char told[300]; /* by the first event TD_ELASTIC_DIFFERS */
static int differ;     /* how many there were, and of which ranks */
static unsigned who_differs;

static void note(const td_elastic_event *event, void *arg)
{
    (void)arg;
    if (event->kind != TD_ELASTIC_DIFFERS)
        return;
    differ++;
    who_differs |= 1u << event->rank;
    snprintf(told, sizeof told, "%s", event->text);
}

/* All ranks train, and some die. The variable is set when each has computed alone what is to come out. */
static struct elastic_outcome train_with(struct elastic_plan plan, const char *flip,
                                         struct elastic_outcome *alone)
{
    *alone = train_alone(&(struct elastic_plan){.device = plan.device, .steps = plan.steps});
    plan.options.on_event = note;
    td_test_barrier();
    setenv("TANDEM_FLIP", flip, 1);
    td__elastic_probe = die;
    struct elastic_outcome outcome = train(&plan, NULL);
    td__elastic_probe = NULL;
    unsetenv("TANDEM_FLIP");
    return outcome;
}

/* Rank 1 differs in step 5: with three ranks it is known to be that one, with two it is not. */
static void expect_named(struct elastic_outcome outcome, struct elastic_outcome alone, int ranks,
                         const char *what, td_elastic_policy policy)
{
    char text[200];
    snprintf(text, sizeof text,
             ranks == 2 ? "after step 5 the ranks 0, 1 have different %s, and no majority"
                        : "after step 5 rank 1 has other %s than the other ranks",
             what);
    CHECK_CONTAINS(told, text);
    CHECK_EQ(differ, ranks == 2 ? 2 : 1);
    CHECK_EQ(who_differs, ranks == 2 ? 3 : 2);
    if (policy == TD_ELASTIC_EXCLUDE && ranks > 2 && td_test_rank() != 1) {
        CHECK_OK(outcome.status);
        CHECK(outcome.weights == alone.weights && outcome.loss == alone.loss);
        CHECK_EQ(outcome.ranks, ranks - 1);
        CHECK_OK(td_destroy_process_group());
        return;
    }
    CHECK_EQ(outcome.status, TD_ERR_MISMATCH);
    CHECK_CONTAINS(td_last_error(), text);
    CHECK(!td_is_initialized());
}

static void find_flip(const struct way *way, const char *what, const char *flip,
                      td_elastic_policy policy)
{
    struct elastic_outcome alone;
    open_world(way, 0);
    struct elastic_plan plan = {.options.mismatch = policy};
    struct elastic_outcome outcome = train_with(plan, flip, &alone);
    expect_named(outcome, alone, td_test_size(), what, policy);
}

#define FINDS(id, count, hosts, policy)                                                            \
    RANKS(id##_parameter, .ranks = count)                                                          \
    {                                                                                              \
        find_flip(hosts, "weights", "parameter:1:5", policy);                                      \
    }                                                                                              \
    RANKS(id##_gradient, .ranks = count)                                                           \
    {                                                                                              \
        find_flip(hosts, "reduced gradients", "gradient:1:5", policy);                             \
    }

FINDS(two, 2, &shm, TD_ELASTIC_REPORT)
FINDS(two_cannot_exclude, 2, &shm, TD_ELASTIC_EXCLUDE)
FINDS(three, 3, &shm, TD_ELASTIC_REPORT)
FINDS(three_exclude, 3, &shm, TD_ELASTIC_EXCLUDE)
FINDS(four, 4, &shm, TD_ELASTIC_REPORT)
FINDS(four_exclude, 4, &shm, TD_ELASTIC_EXCLUDE)
FINDS(three_exclude_over_tcp, 3, &tcp, TD_ELASTIC_EXCLUDE)
FINDS(four_exclude_on_hosts, 4, &mixed, TD_ELASTIC_EXCLUDE)

/* Any bit: the first one, and the last one of the parameters and of the gradients. */
enum { BITS = 32 * (IN * WIDE + WIDE + 2 * WIDE + WIDE * WIDE + WIDE + WIDE * OUT + OUT) };

RANKS(first_bit, .ranks = 3)
{
    find_flip(&shm, "weights", "parameter:1:5:0", TD_ELASTIC_EXCLUDE);
}

RANKS(last_bit, .ranks = 3)
{
    char flip[60];
    snprintf(flip, sizeof flip, "parameter:1:5:%d", BITS - 1);
    find_flip(&shm, "weights", flip, TD_ELASTIC_EXCLUDE);
}

RANKS(bit_too_many, .ranks = 2)
{
    struct elastic_outcome alone;
    char flip[60], text[100];
    snprintf(flip, sizeof flip, "parameter:1:5:%d", BITS);
    snprintf(text, sizeof text, "names bit %d, and there are %d", BITS, BITS);
    open_world(&shm, 0);
    struct elastic_outcome outcome = train_with((struct elastic_plan){0}, flip, &alone);
    if (td_test_rank() == 1) {
        CHECK_EQ(outcome.status, TD_ERR_INVALID);
        CHECK_CONTAINS(td_last_error(), text);
        return;
    }
    CHECK_OK(outcome.status);
    CHECK(outcome.weights == alone.weights && outcome.ranks == 1);
    CHECK_OK(td_destroy_process_group());
}

/* A rank dies, and then the bit is flipped: the rank keeps its number. Of three that are left it is known, of two it is not. */
static void flip_after_shrink(const char *what, const char *flip, const struct death *who)
{
    struct elastic_outcome alone;
    open_world(&shm, 0);
    deaths = who;
    death_count = 1;
    struct elastic_plan plan = {.options.mismatch = TD_ELASTIC_EXCLUDE};
    struct elastic_outcome outcome = train_with(plan, flip, &alone);
    int left = td_test_size() - 1;
    char text[200];
    snprintf(text, sizeof text,
             left == 2 ? "after step 7 the ranks 1, 2 have different %s, and no majority"
                       : "after step 7 rank 2 has other %s than the other ranks",
             what);
    CHECK_CONTAINS(told, text);
    CHECK_EQ(who_differs, left == 2 ? 6 : 4);
    if (left == 2 || td_test_rank() == 2) {
        CHECK_EQ(outcome.status, TD_ERR_MISMATCH);
        return;
    }
    CHECK_OK(outcome.status);
    CHECK(outcome.weights == alone.weights && outcome.loss == alone.loss && outcome.ranks == 2);
    CHECK_OK(td_destroy_process_group());
}

static const struct death first_dies[] = {{0, "slice", 4, 0}};

RANKS(shrunk_to_three_parameter, .ranks = 4, .may_die = 1)
{
    flip_after_shrink("weights", "parameter:2:7", first_dies);
}

RANKS(shrunk_to_three_gradient, .ranks = 4, .may_die = 1)
{
    flip_after_shrink("reduced gradients", "gradient:2:7", first_dies);
}

RANKS(shrunk_to_two_parameter, .ranks = 3, .may_die = 1)
{
    flip_after_shrink("weights", "parameter:2:7", first_dies);
}

RANKS(shrunk_to_two_gradient, .ranks = 3, .may_die = 1)
{
    flip_after_shrink("reduced gradients", "gradient:2:7", first_dies);
}

static void find_on_device(const char *what, const char *flip)
{
    struct elastic_outcome alone;
    CHECK_OK(toy_register());
    toy_set_delay(10);
    open_world(&shm, 0);
    struct elastic_plan plan = {.device = "toy:0", .options.mismatch = TD_ELASTIC_EXCLUDE};
    struct elastic_outcome outcome = train_with(plan, flip, &alone);
    expect_named(outcome, alone, 3, what, TD_ELASTIC_EXCLUDE);
}

RANKS(on_device_parameter, .ranks = 3)
{
    find_on_device("weights", "parameter:1:5");
}

RANKS(on_device_gradient, .ranks = 3)
{
    find_on_device("reduced gradients", "gradient:1:5");
}

/* ---- More than what is compared in a step ---------------------------------------------------------------------------- */

enum { NUMBERS = 200000, WINDOWS = (NUMBERS * 4 + (1 << 18) - 1) >> 18 }; /* 4 steps */

static float weights[NUMBERS], gradients[NUMBERS];

static td_status compute(td_elastic_slice *slice, void *arg)
{
    (void)arg;
    for (int i = 0; i < NUMBERS; i++)
        gradients[i] = (float)(slice->seed % 1000 + (uint64_t)i % 7);
    return TD_OK;
}

static td_status update(int64_t step, void *arg)
{
    (void)step, (void)arg;
    for (int i = 0; i < NUMBERS; i++)
        weights[i] -= 0.001f * gradients[i];
    return TD_OK;
}

/* What is flipped outside of the part that step 3 compares is found when its turn comes: it stays in the weights. With
 * check_every all of them are compared. */
static void find_later(const char *flip, int64_t check_every, const char *text)
{
    td_reducer_buffer g[] = {{gradients, NUMBERS, TD_F32, {0}}};
    td_reducer_buffer w[] = {{weights, NUMBERS, TD_F32, {0}}};
    open_world(&shm, 0);
    setenv("TANDEM_FLIP", flip, 1);
    td_elastic *elastic = td_elastic_create(&(td_elastic_options){
        .memory = &(
            td_elastic_memory){.gradients = g, .gradient_count = 1, .state = w, .state_count = 1},
        .update = update,
        .slices = 4,
        .check_every = check_every,
        .on_event = note});
    CHECK(elastic != NULL);
    CHECK_EQ(td_elastic_run(elastic, 20, compute, NULL), TD_ERR_MISMATCH);
    CHECK_CONTAINS(td_last_error(), text);
    CHECK_EQ(who_differs, 2);
    td_elastic_destroy(elastic);
}

/* In step 3 that is the fourth part; the first one, with bit 100, is compared in step 4. */
RANKS(large_parameter, .ranks = 3)
{
    find_later("parameter:1:3:100", 0, "after step 4 rank 1 has other weights");
}

RANKS(large_gradient, .ranks = 3)
{
    find_later("gradient:1:3:100", 0, "after step 4 rank 1 has other weights");
}

RANKS(large_parameter_at_once, .ranks = 3)
{
    find_later("parameter:1:3:100", 1, "after step 3 rank 1 has other weights");
}

/* ---- What is asked for ------------------------------------------------------------------------------------------------ */

static void refuse(const char *flip, const td_fsdp_options *fsdp, td_status status,
                   const char *text)
{
    td_module *net = make_net(1);
    td_optimizer *sgd = td_sgd(net, &(td_sgd_options){.lr = 0.1});
    setenv("TANDEM_FLIP", flip, 1);
    CHECK(!td_elastic_create(&(td_elastic_options){
        .training = {.model = net, .optimizer = sgd}, .fsdp = fsdp, .slices = 2}));
    CHECK_EQ(td_last_status(), status);
    CHECK_CONTAINS(td_last_error(), text);
    td_optimizer_destroy(sgd);
}

TEST(not_a_flip)
{
    static const char *const wrong[] = {
        "parameter",
        "parameter:1",
        "parameter:1:",
        "parameter:-1:3",
        "weights:1:3",
        "gradient:1:3:",
        "gradient:1:3:x",
        "gradient:1:3:4:5",
        "gradient::3",
        "gradients:1:3",
        "gradient:1:3 ",
        ":1:3",
        "parameter:x:3",
        "1:3",
        "parameter:1:3:-1",
        "gradient:1:3:99999999999999999999",
        "parameter:9999999999:3",
    };
    CHECK_OK(td_init_process_group(NULL));
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        refuse(wrong[i], NULL, TD_ERR_INVALID, "it is parameter:RANK:STEP or gradient:RANK:STEP");
    refuse("gradient:0:3", &(td_fsdp_options){0}, TD_ERR_UNSUPPORTED, "TANDEM_FLIP is set");
    CHECK_OK(td_destroy_process_group());
}
