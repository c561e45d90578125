/* Pipelines: several tensors between stages, evaluation, DDP beside the pipeline, memory; and what happens when a rank
 * fails. */
#include "runner.h"

#include "base/clock.h"

#include <tandem/tandem.h>

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WIDTH = 4 };

static td_tensor *mean_loss(const td_tensor_list *outputs, const td_tensor_list *targets, void *arg)
{
    (void)arg;
    return td_mse_loss(outputs->at[0], targets->at[0]);
}

static td_tensor *numbers(int samples, int seed)
{
    td_generator *generator = td_generator_create((uint64_t)seed, NULL);
    td_tensor *x = td_empty(TD_SHAPE(samples, WIDTH), TD_F32, NULL);
    CHECK_OK(td_normal_(x, 0, 1, generator));
    td_generator_destroy(generator);
    return x;
}

static td_module *linear(int seed)
{
    td_manual_seed((uint64_t)seed);
    return td_linear(WIDTH, WIDTH);
}

static td_pipeline *make(td_module *stage, int micro_batches)
{
    td_pipeline *pipeline = td_pipeline_create(
        &stage, 1, &(td_pipeline_options){.micro_batches = micro_batches, .loss = mean_loss});
    CHECK(pipeline != NULL);
    return pipeline;
}

static td_status step(td_pipeline *pipeline, int samples, double *loss)
{
    TD_SCOPE;
    return td_pipeline_step(pipeline, numbers(samples, 1), numbers(samples, 2), loss);
}

/* ---- Several tensors ------------------------------------------------------------------------------ */

/* Stage 0 returns a hidden state, a skip connection, and integers that need no gradient; stage 1 hands them on in another
 * order and by name; stage 2 uses all of them. */
static td_status several_forward(td_module *module, const td_tensor_list *inputs,
                                 td_tensor_list *results)
{
    int stage = *(int *)td_module_data(module);
    td_tensor *hidden = inputs->at[0], *skip = td_tensor_list_get(inputs, "skip"),
              *mask = td_tensor_list_get(inputs, "mask");
    if (stage == 0) {
        skip = hidden;
        mask = td_to_dtype(td_gt(hidden, td_zeros_like(hidden)), TD_I64);
    }
    hidden = td_forward(td_child(module, 0), hidden);
    if (stage == 2)
        return td_tensor_list_add(results, NULL,
                                  td_mul(td_add(hidden, skip), td_to_dtype(mask, TD_F32)));
    if (stage == 0)
        skip = td_mul(hidden, skip);
    CHECK_EQ(td_tensor_dtype(mask), TD_I64);
    CHECK_OK(td_tensor_list_add(results, NULL, hidden));
    CHECK_OK(td_tensor_list_add(results, stage ? "mask" : "skip", stage ? mask : skip));
    return td_tensor_list_add(results, stage ? "skip" : "mask", stage ? skip : mask);
}

static const td_module_ops several_ops = {
    .name = "Several", .data_size = sizeof(int), .forward_list = several_forward};

static td_module *make_several(int stage)
{
    td_module *module = td_module_create(&several_ops);
    *(int *)td_module_data(module) = stage;
    CHECK_OK(td_module_add_child(module, "linear", linear(stage)));
    return td_module_finish(module);
}

RANKS(several_tensors_between_stages, .ranks = 3)
{
    CHECK_OK(td_init_process_group(NULL));
    int rank = td_get_rank(NULL);
    td_pipeline *pipeline = make(make_several(rank), 2);
    td_module *alone[3] = {make_several(0), make_several(1), make_several(2)};
    double loss, expected = 0;
    CHECK_OK(step(pipeline, 6, &loss));
    TD_SCOPE;
    for (int i = 0; i < 2; i++) {
        td_tensor_list list = {.count = 1, .at = {td_narrow(numbers(6, 1), 0, 3 * i, 3)}};
        for (int s = 0; s < 3; s++)
            CHECK_OK(td_forward_list(alone[s], &list, &list));
        td_tensor *part = td_mse_loss(list.at[0], td_narrow(numbers(6, 2), 0, 3 * i, 3));
        part = td_mul_scalar(part, 0.5);
        CHECK_OK(td_backward(part));
        expected += td_item(part);
    }
    CHECK_MEM(&loss, &expected, sizeof loss);
    td_tensor *mine = td_module_parameter(alone[rank], "linear.weight");
    char name[32];
    snprintf(name, sizeof name, "%d.linear.weight", rank);
    td_tensor *grad = td_tensor_grad(td_module_parameter(td_pipeline_module(pipeline), name));
    CHECK_MEM(td_tensor_data(grad), td_tensor_data(td_tensor_grad(mine)), td_tensor_nbytes(grad));
    for (int s = 0; s < 3; s++)
        td_module_destroy(alone[s]);
    td_pipeline_destroy(pipeline);
    CHECK_OK(td_destroy_process_group());
}

/* Nothing goes back to a stage without parameters that require grad. */
RANKS(frozen_stages, .ranks = 3)
{
    CHECK_OK(td_init_process_group(NULL));
    int rank = td_get_rank(NULL);
    td_module *stage = linear(rank);
    if (rank == 0)
        CHECK_OK(td_module_requires_grad_(stage, false));
    td_pipeline *pipeline = make(stage, 3);
    double loss;
    CHECK_OK(step(pipeline, 7, &loss));
    CHECK_EQ(td_tensor_grad(td_param(stage, 0)) != NULL, rank > 0);
    td_pipeline_destroy(pipeline);
    CHECK_OK(td_destroy_process_group());
}

/* ---- Evaluation ----------------------------------------------------------------------------------- */

RANKS(forward_alone, .ranks = 3)
{
    CHECK_OK(td_init_process_group(NULL));
    int rank = td_get_rank(NULL);
    td_pipeline *pipeline = make(linear(rank), 4);
    for (int samples = 4; samples < 40; samples += 7) {
        TD_SCOPE;
        td_tensor *x = numbers(samples, 5), *y = x;
        CHECK_OK(td_pipeline_forward(pipeline, rank ? NULL : x, &y));
        CHECK_EQ(y != NULL, rank == 2);
        if (!y)
            continue;
        CHECK(!td_tensor_requires_grad(y));
        td_tensor *expected = x;
        for (int s = 0; s < 3; s++) {
            td_module *stage = linear(s);
            expected = td_forward(stage, expected);
            td_module_destroy(stage);
        }
        CHECK(td_item(td_norm(td_sub(y, td_detach(expected)))) < 1e-5);
    }
    double loss;
    CHECK_OK(step(pipeline, 5, &loss));
    td_pipeline_destroy(pipeline);
    CHECK_OK(td_destroy_process_group());
}

/* ---- DDP beside it -------------------------------------------------------------------------------- */

/* Two pipelines of two ranks, {0, 1} and {2, 3}; each stage is averaged with that of the other pipeline. */
RANKS(two_pipelines_of_two_ranks, .ranks = 4, .deadline_s = 40)
{
    CHECK_OK(td_init_process_group(NULL));
    int rank = td_get_rank(NULL), stage = rank % 2, replica = rank / 2;
    td_group *pipes, *replicas;
    CHECK_OK(td_group_split(NULL, replica, stage, NULL, &pipes));
    CHECK_OK(td_group_split(NULL, stage, replica, NULL, &replicas));
    td_module *module = td_ddp(linear(stage + 10 * replica), &(td_ddp_options){.group = replicas});
    td_pipeline *pipeline = td_pipeline_create(
        &module, 1, &(td_pipeline_options){.group = pipes, .micro_batches = 4, .loss = mean_loss});
    CHECK(pipeline != NULL);
    td_module *alone[2] = {linear(0), linear(1)};
    for (int turn = 0; turn < 3; turn++) {
        TD_SCOPE;
        CHECK_OK(td_module_zero_grad(module));
        double loss;
        CHECK_OK(td_pipeline_step(pipeline, numbers(8, 20 + 2 * turn + replica),
                                  numbers(8, 40 + 2 * turn + replica), &loss));
        for (int s = 0; s < 2; s++)
            CHECK_OK(td_module_zero_grad(alone[s]));
        for (int r = 0; r < 2; r++) {
            td_tensor *y = td_forward(alone[1],
                                      td_forward(alone[0], numbers(8, 20 + 2 * turn + r)));
            CHECK_OK(
                td_backward(td_mul_scalar(td_mse_loss(y, numbers(8, 40 + 2 * turn + r)), 0.5)));
        }
        td_tensor *mine = td_tensor_grad(td_param(td_child(module, 0), 0));
        td_tensor *expected = td_tensor_grad(td_param(alone[stage], 0));
        CHECK(td_item(td_norm(td_sub(mine, expected))) < 1e-5 * td_item(td_norm(expected)));
        td_tensor *other = td_clone(mine);
        CHECK_OK(td_broadcast(other, stage, replicas, NULL));
        CHECK_MEM(td_tensor_data(other), td_tensor_data(mine), td_tensor_nbytes(mine));
    }
    td_ddp_stats stats;
    CHECK_OK(td_ddp_get_stats(module, &stats));
    CHECK_EQ(stats.passes, 3); /* once a step */
    for (int s = 0; s < 2; s++)
        td_module_destroy(alone[s]);
    td_pipeline_destroy(pipeline);
    CHECK_OK(td_group_destroy(pipes));
    CHECK_OK(td_group_destroy(replicas));
    CHECK_OK(td_destroy_process_group());
}

/* ---- Memory --------------------------------------------------------------------------------------- */

static int live, most_live;

static void count_freed(void *data, void *arg)
{
    (void)arg;
    free(data);
    live--;
}

/* Saves a tensor for backward whose end is counted. */
static td_tensor *counted_forward(td_module *module, td_tensor *const *inputs, int count)
{
    (void)count;
    td_tensor *y = td_forward(td_child(module, 0), inputs[0]);
    float *ones = malloc(td_tensor_nbytes(y));
    CHECK(ones != NULL);
    for (int64_t i = 0; i < td_tensor_numel(y); i++)
        ones[i] = 1;
    live++;
    most_live = live > most_live ? live : most_live;
    return td_mul(y, td_from_blob(ones, td_tensor_shape(y), td_tensor_ndim(y), NULL, TD_F32, NULL,
                                  count_freed, NULL));
}

static const td_module_ops counted_ops = {.name = "Counted", .forward = counted_forward};

/* What a micro-batch stores is freed as soon as its backward pass has run. */
RANKS(stored_tensors_are_freed, .ranks = 3)
{
    CHECK_OK(td_init_process_group(NULL));
    int rank = td_get_rank(NULL);
    for (int kind = TD_PIPELINE_GPIPE; kind <= TD_PIPELINE_1F1B; kind++) {
        td_module *module = td_module_create(&counted_ops);
        CHECK_OK(td_module_add_child(module, "linear", linear(rank)));
        td_pipeline *pipeline = td_pipeline_create(
            &module, 1,
            &(td_pipeline_options){
                .schedule = (td_pipeline_schedule)kind, .micro_batches = 8, .loss = mean_loss});
        CHECK(pipeline != NULL);
        double loss;
        live = most_live = 0;
        CHECK_OK(step(pipeline, 16, &loss));
        CHECK_EQ(live, 0);
        CHECK_EQ(most_live, kind == TD_PIPELINE_GPIPE ? 8 : 3 - rank);
        TD_SCOPE;
        td_tensor *y;
        CHECK_OK(td_pipeline_forward(pipeline, numbers(16, 1), &y));
        CHECK_EQ(live, 0);
        td_pipeline_destroy(pipeline);
    }
    CHECK_OK(td_destroy_process_group());
}

/* ---- Failures ------------------------------------------------------------------------------------- */

/* A stage that does what it is told in its pass number `at`. */
struct trouble {
    enum { NO_TROUBLE, FAILS, CHANGES_SHAPE, DIES } kind;
    int at;
    int passes;
};

static td_tensor *trouble_forward(td_module *module, td_tensor *const *inputs, int count)
{
    (void)count;
    struct trouble *trouble = td_module_data(module);
    td_tensor *y = td_forward(td_child(module, 0), inputs[0]);
    if (trouble->passes++ != trouble->at)
        return y;
    if (trouble->kind == FAILS) {
        td_fail(TD_ERR_SYSTEM, "the disk is full");
        return NULL;
    }
    if (trouble->kind == CHANGES_SHAPE)
        return td_narrow(y, 1, 0, WIDTH - 1);
    if (trouble->kind == DIES)
        raise(SIGKILL);
    return y;
}

static const td_module_ops trouble_ops = {
    .name = "Trouble", .data_size = sizeof(struct trouble), .forward = trouble_forward};

static td_module *make_trouble(struct trouble trouble)
{
    td_module *module = td_module_create(&trouble_ops);
    *(struct trouble *)td_module_data(module) = trouble;
    CHECK_OK(td_module_add_child(module, "linear", linear(1)));
    return td_module_finish(module);
}

/* Each rank in turn fails, at its first pass and at its last; all get its text, and the next step succeeds. */
static void fail_everywhere(void)
{
    CHECK_OK(td_init_process_group(NULL));
    int rank = td_get_rank(NULL), size = td_get_world_size(NULL);
    for (int victim = 0; victim < size; victim++)
        for (int at = 0; at < 6; at += 5) {
            struct trouble trouble = {.kind = rank == victim ? FAILS : NO_TROUBLE, .at = at};
            td_pipeline *pipeline = make(make_trouble(trouble), 6);
            char text[100];
            snprintf(text, sizeof text, "td_pipeline_step: rank %d: the disk is full", victim);
            double loss;
            int64_t since = td__now_ns();
            CHECK_FAILS(step(pipeline, 12, &loss), TD_ERR_SYSTEM, text);
            CHECK_PROMPT(since);
            CHECK_OK(step(pipeline, 12, &loss));
            td_pipeline_stats stats;
            CHECK_OK(td_pipeline_get_stats(pipeline, &stats));
            CHECK_EQ(stats.steps, 1);
            td_pipeline_destroy(pipeline);
        }
    CHECK_OK(td_destroy_process_group());
}

RANKS(a_failing_stage_fails_the_step_everywhere, .ranks = 3, .deadline_s = 40)
{
    fail_everywhere();
}
RANKS(a_failing_stage_over_sockets, .ranks = 3, .deadline_s = 40)
{
    setenv("TANDEM_TRANSPORT", "tcp", 1);
    fail_everywhere();
}

RANKS(a_changed_shape_names_both_ranks, .ranks = 3)
{
    CHECK_OK(td_init_process_group(NULL));
    struct trouble trouble = {.kind = td_get_rank(NULL) == 1 ? CHANGES_SHAPE : NO_TROUBLE, .at = 2};
    td_pipeline *pipeline = make(make_trouble(trouble), 4);
    double loss;
    CHECK_FAILS(step(pipeline, 8, &loss), TD_ERR_MISMATCH,
                "result 0 of stage 1 on rank 1 is f32 [2, 3] for micro-batch 2, rank 2 expects f32 "
                "[2, 4] as for the first one of this size");
    CHECK_OK(step(pipeline, 8, &loss));
    td_pipeline_destroy(pipeline);
    CHECK_OK(td_destroy_process_group());
}

/* In the first pass the next stage cannot use the shape: its own error is everybody's. */
RANKS(a_shape_that_the_next_stage_cannot_use, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    struct trouble trouble = {.kind = td_get_rank(NULL) == 0 ? CHANGES_SHAPE : NO_TROUBLE, .at = 0};
    td_pipeline *pipeline = make(make_trouble(trouble), 1);
    double loss;
    CHECK_FAILS(step(pipeline, 8, &loss), TD_ERR_INVALID, "td_pipeline_step: rank 1: ");
    td_pipeline_destroy(pipeline);
    CHECK_OK(td_destroy_process_group());
}

RANKS(a_dead_rank_is_named_everywhere, .ranks = 4, .may_die = 1 << 2)
{
    CHECK_OK(td_init_process_group(NULL));
    struct trouble trouble = {.kind = td_get_rank(NULL) == 2 ? DIES : NO_TROUBLE, .at = 4};
    td_pipeline *pipeline = make(make_trouble(trouble), 6);
    double loss;
    int64_t since = td__now_ns();
    CHECK_FAILS(step(pipeline, 12, &loss), TD_ERR_PEER, "rank 2");
    CHECK_CONTAINS(td_last_error(), "SIGKILL");
    CHECK_FAILS(step(pipeline, 12, &loss), TD_ERR_PEER, "rank 2");
    CHECK_PROMPT(since);
    td_pipeline_destroy(pipeline);
    td_destroy_process_group();
}

RANKS(arguments_that_are_wrong_on_one_rank, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    int rank = td_get_rank(NULL);
    double loss;
    td_pipeline *pipeline = make(linear(rank), 4);
    TD_SCOPE;
    td_tensor *x = numbers(8, 1), *y = numbers(8, 2), *results;
    CHECK_FAILS(td_pipeline_step(pipeline, NULL, y, &loss), TD_ERR_INVALID,
                "td_pipeline_step: rank 0: the first rank needs an input");
    CHECK_FAILS(td_pipeline_step(pipeline, x, NULL, &loss), TD_ERR_INVALID,
                "rank 1: the last rank needs a target");
    CHECK_FAILS(step(pipeline, 3, &loss), TD_ERR_INVALID, "3 samples for 4 micro-batches");
    CHECK_FAILS(td_pipeline_step(pipeline, x, numbers(7, 2), &loss), TD_ERR_INVALID,
                "rank 1: the input has 8 samples on the first rank, the target 7");
    CHECK_FAILS(rank ? td_pipeline_step(pipeline, x, y, &loss)
                     : td_pipeline_forward(pipeline, x, &results),
                TD_ERR_MISMATCH, "rank 0 called td_pipeline_forward, rank 1 td_pipeline_step");
    CHECK_OK(td_pipeline_step(pipeline, x, y, &loss));
    CHECK_FAILS(td_pipeline_step(NULL, x, y, &loss), TD_ERR_INVALID, "td_pipeline_step");
    td_pipeline_destroy(pipeline);
    CHECK_OK(td_destroy_process_group());
}

/* ---- Traces ------------------------------------------------------------------------------------- */

/* Every pass is there once; none begins before what it needs has ended; and the critical path is no longer than the step. */
static void check_trace(const td_pipeline_trace *trace, int ranks, int micro_batches)
{
    CHECK_EQ(trace->count, 2 * ranks * micro_batches);
    int64_t busy = 0, *ends = calloc((size_t)trace->count, sizeof *ends);
    for (int i = 0; i < trace->count; i++) {
        const td_pipeline_pass *pass = &trace->passes[i];
        CHECK(pass->rank == i / (2 * micro_batches) && pass->stage == pass->rank);
        CHECK(pass->start_ns <= pass->end_ns && pass->micro_batch < micro_batches);
        CHECK(i % (2 * micro_batches) == 0 || pass->start_ns >= pass[-1].end_ns);
        busy += pass->end_ns - pass->start_ns;
        int64_t *end =
            &ends[(pass->backward * ranks + pass->stage) * micro_batches + pass->micro_batch];
        CHECK_EQ(*end, 0);
        *end = pass->end_ns;
    }
    for (int i = 0; i < trace->count; i++) {
        const td_pipeline_pass *pass = &trace->passes[i];
        int before = pass->stage + (pass->backward ? 1 : -1);
        if (before >= 0 && before < ranks)
            CHECK(pass->start_ns >=
                  ends[(pass->backward * ranks + before) * micro_batches + pass->micro_batch]);
    }
    free(ends);
    CHECK_EQ(trace->busy_ns, busy);
    CHECK(trace->needed_ns >= busy / ranks && trace->needed_ns <= trace->total_ns);
}

RANKS(a_trace_of_all_passes, .ranks = 3)
{
    CHECK_OK(td_init_process_group(NULL));
    td_pipeline *pipeline = make(linear(1), 4);
    td_pipeline_trace trace;
    double loss;
    CHECK_FAILS(td_pipeline_get_trace(pipeline, &trace), TD_ERR_STATE, "no td_pipeline_step() yet");
    for (int s = 0; s < 3; s++) {
        CHECK_OK(step(pipeline, 8, &loss));
        CHECK_OK(td_pipeline_get_trace(pipeline, &trace));
        check_trace(&trace, 3, 4);
        td_pipeline_stats stats;
        CHECK_OK(td_pipeline_get_stats(pipeline, &stats));
        CHECK(fabs(stats.bubble - (1 - (double)trace.busy_ns / (double)(3 * trace.total_ns))) <
              1e-9);
        td_pipeline_trace_free(&trace);
    }
    CHECK_FAILS(step(pipeline, 2, &loss), TD_ERR_INVALID, "2 samples for 4 micro-batches");
    CHECK_FAILS(td_pipeline_get_trace(pipeline, &trace), TD_ERR_STATE, "step() failed");
    td_pipeline_destroy(pipeline);
    CHECK_OK(td_destroy_process_group());
}

TEST(a_trace_is_drawn_to_scale)
{
    td_pipeline_pass passes[] = {
        {.rank = 0, .stage = 0, .end_ns = 30},
        {.rank = 0, .stage = 0, .backward = true, .start_ns = 100, .end_ns = 200},
        {.rank = 1, .stage = 1, .start_ns = 30, .end_ns = 40},
        {.rank = 1, .stage = 1, .backward = true, .start_ns = 40, .end_ns = 100},
    };
    td_pipeline_trace trace = {
        .passes = passes, .count = 4, .ranks = 2, .chunks = 1, .micro_batches = 1};
    td_bytes text = td_pipeline_trace_text(&trace, 20);
    CHECK_STR(text.data, "rank 0  F0-.......B0--------\n"
                         "rank 1  ...FB0----..........\n");
    td_bytes_free(&text);
    CHECK_EQ(td_pipeline_trace_text(&trace, 0).size, 0);
}

/* ---- Pipelines that differ ---------------------------------------------------------------------- */

RANKS(pipelines_that_differ, .ranks = 3)
{
    CHECK_OK(td_init_process_group(NULL));
    int rank = td_get_rank(NULL);
    td_module *stages[2] = {linear(1), linear(2)};
    CHECK(!td_pipeline_create(stages, 2, &(td_pipeline_options){.micro_batches = 4 + rank / 2}));
    CHECK_CONTAINS(td_last_error(), "rank 0 has 2 modules, schedule interleaved, 4 micro-batches; "
                                    "rank 2 has 2, interleaved, 5; all ranks must pass the same");
    CHECK_EQ(td_last_status(), TD_ERR_MISMATCH);
    td_module *ahead = linear(1);
    CHECK(!td_pipeline_create(&ahead, 1, &(td_pipeline_options){.ahead = rank == 1}));
    CHECK_CONTAINS(td_last_error(), "3 micro-batches; rank 1 has 1, 1F1B, 3, 1 ahead; all ranks");
    ahead = linear(1);
    CHECK(!td_pipeline_create(&ahead, 1,
                              &(td_pipeline_options){.ahead = 1, .schedule = TD_PIPELINE_GPIPE}));
    CHECK_CONTAINS(td_last_error(), "1 forward passes ahead with the schedule GPipe");
    td_module *one = rank == 1 ? NULL : linear(1);
    CHECK(!td_pipeline_create(&one, 1, NULL));
    CHECK_CONTAINS(td_last_error(), "td_pipeline_create: rank 1: ");
    stages[0] = linear(1), stages[1] = linear(2);
    CHECK(!td_pipeline_create(stages, 2, &(td_pipeline_options){.schedule = TD_PIPELINE_GPIPE}));
    CHECK_CONTAINS(td_last_error(), "the schedule GPipe takes one module a rank, not 2");
    CHECK_OK(td_destroy_process_group());
}

/* A loss function that fails, returns too much, or nothing at all. */
static td_tensor *bad_loss(const td_tensor_list *outputs, const td_tensor_list *targets, void *arg)
{
    (void)targets;
    int *kind = arg;
    return *kind == 0 ? outputs->at[0] : *kind == 1 ? NULL : td_sum(outputs->at[0]);
}

RANKS(losses, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    int rank = td_get_rank(NULL), kind = 0;
    double loss;
    td_module *stage = linear(rank);
    td_pipeline *pipeline = td_pipeline_create(
        &stage, 1, &(td_pipeline_options){.loss = bad_loss, .loss_arg = &kind, .sum_loss = true});
    CHECK(pipeline != NULL);
    CHECK_FAILS(step(pipeline, 4, &loss), TD_ERR_INVALID,
                "rank 1: the loss function returned 8 elements instead of 1");
    kind = 1;
    CHECK_FAILS(step(pipeline, 4, &loss), TD_ERR_INVALID, "the loss function returned NULL");
    kind = 2;
    CHECK_OK(step(pipeline, 4, &loss));
    TD_SCOPE;
    td_module *first = linear(0), *second = linear(1);
    double expected = td_item(td_sum(td_forward(second, td_forward(first, numbers(4, 1)))));
    CHECK(fabs(loss - expected) < 1e-5);
    td_module_destroy(first);
    td_module_destroy(second);
    td_pipeline_destroy(pipeline);
    CHECK_OK(td_destroy_process_group());
}
