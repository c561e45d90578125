/* The training of the tests of elastic training; see elastic_training.h. */
#include "elastic_training.h"

#include "runner.h"

#include "elastic/elastic_internal.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- What is trained --------------------------------------------------------------------------------------------- */

float number(unsigned *state)
{
    *state = *state * 1664525u + 1013904223u;
    return (float)(*state >> 8) / (float)(1 << 24) - 0.5f;
}

td_dataset *make_dataset(void)
{
    TD_SCOPE;
    unsigned state = 77;
    td_tensor *x = td_empty(TD_SHAPE(SAMPLES, IN), TD_F32, NULL);
    td_tensor *y = td_empty(TD_SHAPE(SAMPLES), TD_I64, NULL);
    CHECK(x && y);
    for (int i = 0; i < SAMPLES * IN; i++)
        ((float *)td_tensor_data(x))[i] = number(&state);
    for (int i = 0; i < SAMPLES; i++)
        ((int64_t *)td_tensor_data(y))[i] = i % OUT;
    return td_tensor_dataset(x, y);
}

td_module *make_net(uint64_t seed)
{
    td_manual_seed(seed);
    return td_sequential(td_linear(IN, WIDE), td_batch_norm1d(WIDE), td_relu(), td_dropout(0.3),
                         td_linear(WIDE, WIDE), td_relu(), td_linear(WIDE, OUT), NULL);
}

uint64_t digest(td_state *state, uint64_t hash)
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

td_status pass(td_elastic_slice *slice, void *arg)
{
    const struct elastic_plan *plan = arg;
    td_device *device = td_device_get(plan->device ? plan->device : "cpu");
    td_tensor *loss = td_cross_entropy(
        td_forward(slice->model, td_tensor_to(slice->batch.input, device)),
        td_tensor_to(slice->batch.target, device));
    if (!loss)
        return td_last_status();
    slice->loss = td_item(loss);
    return td_backward(loss);
}

static uint64_t digest_model(td_module *model)
{
    bool sharded = td_is_fsdp(model);
    if (sharded)
        CHECK_OK(td_fsdp_gather_begin(model, false));
    uint64_t hash = digest(td_module_parameters(model), 0);
    if (sharded)
        CHECK_OK(td_fsdp_gather_end(model));
    return digest(td_module_buffers(model), hash);
}

struct elastic_outcome train(const struct elastic_plan *plan, td_group *group)
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
    if (!elastic)
        FAIL("%s", td_last_error());
    struct elastic_outcome outcome = {0};
    int64_t steps = plan->steps ? plan->steps : STEPS;
    td_elastic_slice_fn slice = plan->slice ? plan->slice : pass;
    if (plan->twice)
        CHECK_OK(td_elastic_run(elastic, steps / 2, slice, (void *)plan));
    outcome.status = td_elastic_run(elastic, steps, slice, (void *)plan);
    if (!outcome.status && options.fsdp) /* the first rank has written the last step's record */
        CHECK_OK(td_group_barrier(td_elastic_group(elastic), NULL));
    outcome.ranks = td_elastic_world(elastic);
    CHECK_OK(td_elastic_get_stats(elastic, &outcome.stats));
    outcome.loss = outcome.stats.loss;
    if (!outcome.status || !options.fsdp)
        outcome.weights = digest_model(td_elastic_model(elastic));
    td_schedule_destroy(cosine);
    td_elastic_destroy(elastic);
    td_optimizer_destroy(adam);
    td_dataset_release(dataset);
    return outcome;
}

struct elastic_outcome train_alone(const struct elastic_plan *plan)
{
    int self = td_get_rank(NULL);
    td_group *alone;
    td_status (*probe)(const char *, td_elastic *) = td__elastic_probe;
    td__elastic_probe = NULL;
    CHECK_OK(td_new_group(&self, 1, NULL, &alone));
    struct elastic_plan own = {.steps = plan->steps, .seed = plan->seed, .device = plan->device};
    struct elastic_outcome outcome = train(&own, alone);
    CHECK_OK(outcome.status);
    CHECK_OK(td_group_destroy(alone));
    td__elastic_probe = probe;
    return outcome;
}
/* ---- Ranks die ---------------------------------------------------------------------------------------------------- */

const struct death *deaths;
int death_count;

static atomic_bool trained; /* what follows is not the training's: whole weights are gathered */

static void *die_later(void *arg)
{
    usleep((useconds_t)(uintptr_t)arg);
    if (!atomic_load(&trained))
        kill(getpid(), SIGKILL);
    return NULL;
}

td_status die(const char *moment, td_elastic *elastic)
{
    if (!strcmp(moment, "updated") && td__elastic_committed(elastic) == STEPS)
        atomic_store(&trained, true);
    for (int i = 0; i < death_count; i++) {
        const struct death *death = &deaths[i];
        int64_t committed = td__elastic_committed(elastic);
        bool now = death->step < 0 ? committed > 0 : committed == death->step;
        if (death->rank != td_test_rank() || !now)
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

struct elastic_outcome survive(const struct elastic_plan *plan, const struct death *who, int count)
{
    deaths = who;
    death_count = count;
    struct elastic_outcome alone = train_alone(plan);
    td_test_barrier();
    td__elastic_probe = die;
    struct elastic_outcome outcome = train(plan, NULL);
    td__elastic_probe = NULL;
    if (outcome.status && plan->options.checkpoint)
        return outcome;
    CHECK_OK(outcome.status);
    CHECK(outcome.weights == alone.weights && outcome.loss == alone.loss);
    return outcome;
}

void check_record(const char *path, int64_t steps)
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

struct elastic_outcome survive_with_record(const struct elastic_plan *plan, const struct death *who,
                                           int count)
{
    char path[300];
    struct elastic_plan recorded = *plan;
    snprintf(path, sizeof path, "%s/record", td_test_temp_dir());
    recorded.options.audit = path;
    struct elastic_outcome outcome = survive(&recorded, who, count);
    if (!outcome.status)
        check_record(path, STEPS);
    return outcome;
}

int draw_deaths(unsigned seed, struct death who[3])
{
    unsigned state = seed * 7919 + 13;
    int count = 1 + (int)((number(&state) + 0.5f) * 3);
    for (int i = 0; i < count; i++)
        who[i] = (struct death){.rank = (int)((number(&state) + 0.5f) * 4),
                                .step = (int64_t)((number(&state) + 0.5f) * STEPS),
                                .us = (int)((number(&state) + 0.5f) * 3000)};
    if (count == 3) /* one is left */
        for (int i = 0; i < 3; i++)
            who[i].rank = (who[0].rank + i) % 4;
    return count;
}

void die_at_random_many_times(int rounds, int seed)
{
    rounds = td_test_is_long() ? 100 : rounds;
    for (int round = 1; round <= rounds; round++) {
        char text[16];
        snprintf(text, sizeof text, "%d", seed + round);
        setenv("TD_TEST_ELASTIC_SEED", text, 1);
        struct td_test_child child = td_test_exec(
            (const char *[]){td_test_program(), "dies_at_random*", NULL});
        if (child.status)
            FAIL("TD_TEST_ELASTIC_SEED=%s: %s", text, child.output);
        free(child.output);
    }
}
