/* Sharded checkpoints of a training: parameters and the state of their optimizer, divided otherwise when they are loaded,
 * have the values of a training that is not divided; directories of numbered checkpoints. */
#include "runner.h"
#include "sharded_states.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { RANKS_MOST = 4, STEPS = 3 };

static const char *temp_path(const char *name)
{
    static char path[4][512];
    static int next;
    char *text = path[next++ % 4];
    snprintf(text, sizeof path[0], "%s/%s", td_test_temp_dir(), name);
    return text;
}

/* The shard that a rank has of a parameter; the last bias has fewer elements than there are ranks. */
static td_tensor *shard_of(td_tensor *whole, int rank, int ranks)
{
    TD_SCOPE;
    int64_t numel = td_tensor_numel(whole);
    int64_t begin = numel * rank / ranks, end = numel * (rank + 1) / ranks;
    td_shard mark = {.ndim = td_tensor_ndim(whole), .offset = begin};
    for (int d = 0; d < mark.ndim; d++)
        mark.shape[d] = td_tensor_size(whole, d);
    td_tensor *part = td_empty(TD_SHAPE(end - begin), TD_F32, NULL);
    if (end > begin)
        memcpy(td_tensor_data(part), (float *)td_tensor_data(whole) + begin,
               (size_t)(end - begin) * sizeof(float));
    CHECK_OK(td_tensor_set_shard(part, &mark));
    return td_tensor_retain(part);
}

/* A model whose parameters are divided among ranks, as FSDP does it; ranks of 0: not divided. */
static td_training make_training(int rank, int ranks, uint64_t seed)
{
    td_manual_seed(seed);
    td_module *net = td_sequential(td_linear(7, 9), td_relu(), td_linear(9, 2), NULL);
    td_state *all = td_module_parameters(net);
    for (int i = 0; i < td_state_count(all) && ranks; i++) {
        td_tensor *part = shard_of(td_state_tensor(all, i), rank, ranks);
        CHECK_OK(td_module_set_tensor(net, td_state_name(all, i), part));
        CHECK_OK(td_tensor_set_requires_grad(part, true));
        td_tensor_release(part);
    }
    td_state_destroy(all);
    td_training training = {.model = net,
                            .optimizer = td_adamw(net, &(td_adam_options){.lr = 0.01})};
    CHECK(training.optimizer != NULL);
    training.schedule = td_cosine_schedule(training.optimizer, 100, 0);
    return training;
}

static void end_training(td_training *training)
{
    td_schedule_destroy(training->schedule);
    td_optimizer_destroy(training->optimizer);
    td_module_destroy(training->model);
}

/* Steps whose gradients follow from the number of the element, and so not from the cuts. */
static void step(td_training *training, int count)
{
    td_state *all = td_module_parameters(training->model);
    for (; count > 0; count--) {
        for (int i = 0; i < td_state_count(all); i++) {
            TD_SCOPE;
            td_tensor *parameter = td_state_tensor(all, i);
            const td_shard *shard = td_tensor_shard(parameter);
            int64_t first = shard ? shard->offset : 0;
            td_tensor *grad = td_empty(td_tensor_shape(parameter), td_tensor_ndim(parameter),
                                       TD_F32, NULL);
            float *values = td_tensor_data(grad);
            for (int64_t k = 0; k < td_tensor_numel(grad); k++)
                values[k] = sinf((float)(first + k + 100 * i + training->step));
            CHECK_OK(td_tensor_set_grad(parameter, grad));
        }
        CHECK_OK(td_optimizer_step(training->optimizer));
        CHECK_OK(td_schedule_step(training->schedule));
        training->step++;
    }
    td_state_destroy(all);
}

/* Compares what a rank has with the whole. */
static void check_part(td_state *part, td_state *whole)
{
    CHECK_EQ(td_state_count(part), td_state_count(whole));
    for (int i = 0; i < td_state_count(part); i++) {
        td_tensor *x = td_state_tensor(part, i), *y = td_state_get(whole, td_state_name(part, i));
        CHECK(y != NULL);
        const td_shard *shard = td_tensor_shard(x);
        size_t offset = shard ? (size_t)shard->offset * td_dtype_size(td_tensor_dtype(x)) : 0;
        CHECK_MEM(td_tensor_data(x), (char *)td_tensor_data(y) + offset, td_tensor_nbytes(x));
    }
    td_state_destroy(part);
    td_state_destroy(whole);
}

static void check_training(td_training *training, td_training *whole)
{
    check_part(td_module_state(training->model), td_module_state(whole->model));
    check_part(td_optimizer_state(training->optimizer), td_optimizer_state(whole->optimizer));
    CHECK_EQ(training->step, whole->step);
    CHECK_EQ(td_schedule_steps(training->schedule), td_schedule_steps(whole->schedule));
}

static void resume(int from, int to, bool divided)
{
    td_group *savers = first_ranks(from), *loaders = first_ranks(to);
    int rank = td_test_rank();
    const char *path = temp_path("training");
    if (rank < from) {
        td_training training = make_training(rank, from, 1);
        step(&training, STEPS);
        CHECK_OK(td_training_save_sharded(path, &training, savers, NULL));
        end_training(&training);
    }
    CHECK_OK(td_barrier(NULL, NULL));
    if (rank < to) {
        td_training training = make_training(rank, divided ? to : 0, 2), whole;
        training.any_size = true;
        whole = make_training(0, 0, 1);
        step(&whole, STEPS);
        CHECK_OK(td_training_load_sharded(path, &training, loaders));
        check_training(&training, &whole);
        step(&training, STEPS);
        step(&whole, STEPS);
        check_training(&training, &whole);
        end_training(&training);
        end_training(&whole);
    }
    CHECK_OK(td_barrier(NULL, NULL));
    CHECK_OK(td_group_destroy(savers));
    CHECK_OK(td_group_destroy(loaders));
}

RANKS(training_goes_on_in_other_shards, .ranks = RANKS_MOST, .deadline_s = 60)
{
    CHECK_OK(td_init_process_group(NULL));
    for (int from = 1; from <= RANKS_MOST; from++)
        for (int to = 1; to <= RANKS_MOST; to++) {
            resume(from, to, true);
            resume(from, to, false);
        }
    CHECK_OK(td_destroy_process_group());
}

RANKS(generators_are_each_rank_s_own, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    unsigned char before[TD_GENERATOR_STATE_SIZE], after[TD_GENERATOR_STATE_SIZE];
    td_training training = make_training(td_test_rank(), 2, 1);
    td_manual_seed(100 + (uint64_t)td_test_rank());
    CHECK_OK(td_generator_get_state(NULL, before, sizeof before));
    CHECK_OK(td_training_save_sharded(temp_path("g"), &training, NULL, NULL));
    td_manual_seed(7);
    CHECK_OK(td_training_load_sharded(temp_path("g"), &training, NULL));
    CHECK_OK(td_generator_get_state(NULL, after, sizeof after));
    CHECK_MEM(before, after, sizeof before);
    /* A checkpoint of one file would lose the shards of the other ranks. */
    CHECK_FAILS(td_training_save(temp_path("file"), &training, NULL), TD_ERR_INVALID, "is a shard");
    CHECK_FAILS(td_save_module(temp_path("file"), training.model), TD_ERR_INVALID, "is a shard");
    end_training(&training);
    CHECK_OK(td_destroy_process_group());
}

RANKS(numbered, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    bool loaded = true;
    const char *run = temp_path("run");
    td_training training = make_training(td_test_rank(), 2, 1);
    CHECK_OK(td_training_load_latest(run, &training, NULL, &loaded));
    CHECK(!loaded);
    td_async_save *save = NULL;
    for (int i = 0; i < 5; i++) {
        step(&training, 1);
        td_async_save_release(save);
        CHECK_OK(td_training_save_sharded_numbered(run, &training, 3, NULL, &save));
    }
    CHECK_OK(td_async_save_wait(save, 0));
    td_async_save_release(save);
    CHECK_EQ(td_test_count_files(run), 3);
    CHECK_OK(td_training_load_latest(run, &training, NULL, &loaded));
    CHECK(loaded);
    CHECK_EQ(training.step, 5);
    CHECK_OK(td_barrier(NULL, NULL));
    if (td_test_rank() == 0)
        CHECK_EQ(unlink(temp_path("run/step-000000000005.sharded/shard-00001.safetensors")), 0);
    CHECK_OK(td_barrier(NULL, NULL));
    td_log_set_level(TD_LOG_ERROR);
    CHECK_OK(td_training_load_latest(run, &training, NULL, &loaded)); /* the one before */
    CHECK(loaded);
    CHECK_EQ(training.step, 4);
    if (td_test_rank() == 0) {
        CHECK_OK(td_merge_sharded(temp_path("run/step-000000000004.sharded"),
                                  temp_path("net.safetensors"), NULL));
        td_state *net = td_load_safetensors(temp_path("net.safetensors"), NULL);
        CHECK(td_state_get(net, "0.weight") && td_state_count(net) == 4);
        td_state_destroy(net);
    }
    end_training(&training);
    CHECK_OK(td_destroy_process_group());
}
