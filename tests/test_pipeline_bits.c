/* Pipelines over several ranks: the same bits as one process that accumulates the same micro-batches, for every
 * schedule. test_pipeline.c has the rest. */
#include "runner.h"

#include <tandem/tandem.h>

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { CLASSES = 3, STEPS = 3 };

static int width = 6;

/* ---- The model, and one process ------------------------------------------------------------------ */

/* Stage `number` of `count`, the same on every rank: its values depend on its number only. */
static td_module *make_stage(int number, int count)
{
    td_manual_seed((uint64_t)(100 + number));
    td_module *linear = td_linear(width, number == count - 1 ? CLASSES : width);
    return number == count - 1 ? linear : td_sequential(linear, td_tanh(), NULL);
}

static td_tensor *mean_loss(const td_tensor_list *outputs, const td_tensor_list *targets, void *arg)
{
    (void)arg;
    return td_cross_entropy(outputs->at[0], targets->at[0]);
}

static void make_batch(int step, int samples, td_tensor **x, td_tensor **y)
{
    td_generator *generator = td_generator_create((uint64_t)(1000 + step), NULL);
    *x = td_empty(TD_SHAPE(samples, width), TD_F32, NULL);
    *y = td_empty(TD_SHAPE(samples), TD_I64, NULL);
    CHECK_OK(td_normal_(*x, 0, 1, generator));
    CHECK_OK(td_random_range_(*y, 0, CLASSES, generator));
    td_generator_destroy(generator);
}

/* All stages in this process; parts of the batch one after another. */
static double step_alone(td_module *const *stages, int count, int step, int samples,
                         int micro_batches)
{
    TD_SCOPE;
    td_tensor *x, *y;
    make_batch(step, samples, &x, &y);
    double sum = 0;
    for (int i = 0, at = 0; i < micro_batches; i++) {
        int size = samples / micro_batches + (i < samples % micro_batches);
        td_tensor *h = td_narrow(x, 0, at, size);
        for (int s = 0; s < count; s++)
            h = td_forward(stages[s], h);
        td_tensor *loss = td_cross_entropy(h, td_narrow(y, 0, at, size));
        if (micro_batches > 1)
            loss = td_mul_scalar(loss, (double)size / samples);
        CHECK_OK(td_backward(loss));
        sum += td_item(loss);
        at += size;
    }
    return sum;
}

static void check_same(td_module *mine, td_module *alone)
{
    td_state *a = td_module_parameters(mine), *b = td_module_parameters(alone);
    CHECK_EQ(td_state_count(a), td_state_count(b));
    for (int i = 0; i < td_state_count(a); i++) {
        td_tensor *x = td_state_tensor(a, i), *y = td_state_tensor(b, i);
        CHECK_MEM(td_tensor_data(x), td_tensor_data(y), td_tensor_nbytes(x));
        CHECK(td_tensor_grad(x) && td_tensor_grad(y));
        CHECK_MEM(td_tensor_data(td_tensor_grad(x)), td_tensor_data(td_tensor_grad(y)),
                  td_tensor_nbytes(x));
    }
    td_state_destroy(a);
    td_state_destroy(b);
}

/* ---- Training ------------------------------------------------------------------------------------ */

enum { STAGES_MAX = 16 };

static td_pipeline *make_pipeline(int chunks, const td_pipeline_options *options)
{
    int rank = td_get_rank(options->group), size = td_get_world_size(options->group);
    td_module *stages[STAGES_MAX];
    for (int c = 0; c < chunks; c++)
        stages[c] = make_stage(c * size + rank, chunks * size);
    td_pipeline *pipeline = td_pipeline_create(stages, chunks, options);
    CHECK(pipeline != NULL);
    return pipeline;
}

/* Trains a few steps, beside one process, and compares loss, parameters and gradients bit for bit. */
static void follow_one_process(td_pipeline_schedule schedule, int chunks, int micro_batches,
                               int samples, int ahead)
{
    int rank = td_get_rank(NULL), size = td_get_world_size(NULL), count = chunks * size;
    td_pipeline *pipeline = make_pipeline(chunks,
                                          &(td_pipeline_options){.schedule = schedule,
                                                                 .micro_batches = micro_batches,
                                                                 .loss = mean_loss,
                                                                 .ahead = ahead});
    td_optimizer *sgd = td_sgd(td_pipeline_module(pipeline),
                               &(td_sgd_options){.lr = 0.3, .momentum = 0.9});
    td_module *alone[STAGES_MAX];
    td_optimizer *alone_sgd[STAGES_MAX];
    for (int s = 0; s < count; s++) {
        alone[s] = make_stage(s, count);
        alone_sgd[s] = td_sgd(alone[s], &(td_sgd_options){.lr = 0.3, .momentum = 0.9});
    }
    for (int step = 0; step < STEPS; step++) {
        TD_SCOPE;
        for (int s = 0; s < count; s++)
            CHECK_OK(td_optimizer_zero_grad(alone_sgd[s]));
        double expected = step_alone(alone, count, step, samples, micro_batches), loss = -1;
        td_tensor *x, *y;
        make_batch(step, samples, &x, &y);
        CHECK_OK(td_optimizer_zero_grad(sgd));
        CHECK_OK(
            td_pipeline_step(pipeline, rank == 0 ? x : NULL, rank == size - 1 ? y : NULL, &loss));
        CHECK_OK(td_optimizer_step(sgd));
        for (int s = 0; s < count; s++)
            CHECK_OK(td_optimizer_step(alone_sgd[s]));
        CHECK_MEM(&loss, &expected, sizeof loss);
        for (int c = 0; c < chunks; c++)
            check_same(td_child(td_pipeline_module(pipeline), c), alone[c * size + rank]);
    }
    td_pipeline_stats stats;
    CHECK_OK(td_pipeline_get_stats(pipeline, &stats));
    CHECK_EQ(stats.steps, STEPS);
    CHECK(stats.bubble > 0 && stats.bubble < 1 && stats.busy_ns > 0);
    CHECK(fabs(stats.theory - (size - 1.0) / (chunks * micro_batches + size - 1.0)) < 1e-12);
    int bound = schedule == TD_PIPELINE_GPIPE ? micro_batches : size - rank;
    bound += ahead < size - rank - 1 ? ahead : size - rank - 1;
    if (chunks == 1)
        CHECK_EQ(stats.peak_stored, bound < micro_batches ? bound : micro_batches);
    td_optimizer_destroy(sgd);
    td_pipeline_destroy(pipeline);
    for (int s = 0; s < count; s++) {
        td_optimizer_destroy(alone_sgd[s]);
        td_module_destroy(alone[s]);
    }
}

static void follow_with_all_schedules(void)
{
    CHECK_OK(td_init_process_group(NULL));
    follow_one_process(TD_PIPELINE_GPIPE, 1, 4, 16, 0);
    follow_one_process(TD_PIPELINE_1F1B, 1, 5, 12, 0); /* of 3 and 2 samples */
    follow_one_process(TD_PIPELINE_1F1B, 1, 6, 13, 1);
    follow_one_process(TD_PIPELINE_DEFAULT, 1, 5, 10, 9);
    follow_one_process(TD_PIPELINE_DEFAULT, 1, 1, 3, 0);
    follow_one_process(TD_PIPELINE_INTERLEAVED, 2, 6, 13, 0);
    follow_one_process(TD_PIPELINE_DEFAULT, 3, 4, 8, 0);
    CHECK_OK(td_destroy_process_group());
}

RANKS(one_rank_follows, .ranks = 1)
{
    follow_with_all_schedules();
}
RANKS(two_ranks_follow_one_process, .ranks = 2)
{
    follow_with_all_schedules();
}
RANKS(three_ranks_follow_one_process, .ranks = 3)
{
    follow_with_all_schedules();
}
RANKS(four_ranks_follow_one_process, .ranks = 4, .deadline_s = 40)
{
    follow_with_all_schedules();
}
RANKS(over_sockets, .ranks = 3, .deadline_s = 40)
{
    setenv("TANDEM_TRANSPORT", "tcp", 1);
    follow_with_all_schedules();
}

/* Messages that are not copied into a ring. */
RANKS(large_tensors, .ranks = 2, .deadline_s = 40)
{
    CHECK_OK(td_init_process_group(NULL));
    width = 300;
    follow_one_process(TD_PIPELINE_1F1B, 1, 4, 402, 1);
    follow_one_process(TD_PIPELINE_INTERLEAVED, 2, 4, 402, 0);
    CHECK_OK(td_destroy_process_group());
}

TEST(without_a_world_all_stages_are_here)
{
    td_module *stages[2] = {make_stage(0, 2), make_stage(1, 2)};
    td_pipeline *pipeline = td_pipeline_create(
        stages, 2, &(td_pipeline_options){.micro_batches = 2, .loss = mean_loss});
    CHECK(pipeline != NULL);
    TD_SCOPE;
    td_tensor *x, *y;
    double loss;
    make_batch(0, 4, &x, &y);
    CHECK_OK(td_pipeline_step(pipeline, x, y, &loss));
    td_module *alone[2] = {make_stage(0, 2), make_stage(1, 2)};
    double expected = step_alone(alone, 2, 0, 4, 2);
    CHECK_MEM(&loss, &expected, sizeof loss);
    for (int s = 0; s < 2; s++) {
        check_same(td_child(td_pipeline_module(pipeline), s), alone[s]);
        td_module_destroy(alone[s]);
    }
    CHECK(td_module_parameter(td_pipeline_module(pipeline), "1.weight") != NULL);
    td_pipeline_destroy(pipeline);
}

/* ---- The whole batch ----------------------------------------------------------------------------- */

/* The gradient is that of the mean over the whole batch, although the parts have different sizes. */
RANKS(gradients_are_those_of_the_whole_batch, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    int rank = td_get_rank(NULL);
    td_pipeline *pipeline = make_pipeline(
        1, &(td_pipeline_options){.micro_batches = 4, .loss = mean_loss});
    td_module *alone[2] = {make_stage(0, 2), make_stage(1, 2)};
    double loss, expected = step_alone(alone, 2, 0, 11, 1);
    TD_SCOPE;
    td_tensor *x, *y;
    make_batch(0, 11, &x, &y);
    CHECK_OK(td_pipeline_step(pipeline, rank ? NULL : x, rank ? y : NULL, &loss));
    CHECK(fabs(loss - expected) < 1e-6);
    td_state *mine = td_module_parameters(td_pipeline_module(pipeline));
    td_state *whole = td_module_parameters(alone[rank]);
    for (int i = 0; i < td_state_count(mine); i++) {
        td_tensor *difference = td_sub(td_tensor_grad(td_state_tensor(mine, i)),
                                       td_tensor_grad(td_state_tensor(whole, i)));
        CHECK(td_item(td_norm(difference)) <
              1e-5 * td_item(td_norm(td_tensor_grad(td_state_tensor(whole, i)))));
    }
    td_state_destroy(mine);
    td_state_destroy(whole);
    for (int s = 0; s < 2; s++)
        td_module_destroy(alone[s]);
    td_pipeline_destroy(pipeline);
    CHECK_OK(td_destroy_process_group());
}
