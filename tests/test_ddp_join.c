/* Uneven inputs: ranks with different numbers of batches, against what one process computes from the
 * same batches. */
#include "runner.h"

#include <tandem/tandem.h>

#include <math.h>
#include <stdio.h>
#include <string.h>

#define SHAPE(...) TD_SHAPE(__VA_ARGS__)

enum { WIDTH = 6 };

static td_module *make_net(bool norm)
{
    td_manual_seed(5);
    return norm ? td_sequential(td_linear(WIDTH, 9), td_batch_norm1d(9), td_linear(9, 3), NULL)
                : td_sequential(td_linear(WIDTH, 9), td_tanh(), td_linear(9, 3), NULL);
}

static td_tensor *batch_of(int step, int rank)
{
    td_generator *generator = td_generator_create((uint64_t)(100 * step + rank), NULL);
    td_tensor *x = td_empty(SHAPE(4, WIDTH), TD_F32, NULL);
    CHECK_OK(td_normal_(x, 0, 1, generator));
    td_generator_destroy(generator);
    return x;
}

static td_tensor *loss_of(td_module *model, int step, int rank)
{
    return td_mean(td_square(td_forward(model, batch_of(step, rank))));
}

static bool same_bits(td_module *model)
{
    bool same = true;
    td_state *states[] = {td_module_parameters(model), td_module_buffers(model)};
    for (int s = 0; s < 2; s++) {
        for (int i = 0; i < td_state_count(states[s]); i++) {
            td_tensor *mine = td_state_tensor(states[s], i), *theirs = td_clone(mine);
            CHECK_OK(td_broadcast(theirs, 0, NULL, NULL));
            same = same &&
                   !memcmp(td_tensor_data(mine), td_tensor_data(theirs), td_tensor_nbytes(mine));
            td_tensor_release(theirs);
        }
        td_state_destroy(states[s]);
    }
    return same;
}

/* Rank r has batches(r) batches; the same model in one process adds up the gradients itself. */
static int batches(int rank, int size)
{
    return rank == 0 ? 2 : rank == size - 1 && size > 2 ? 0 : 3 + 2 * rank;
}

static void train_alone(td_module *alone, td_optimizer *sgd, int size, bool by_active)
{
    for (int step = 0;; step++) {
        int active = 0;
        for (int r = 0; r < size; r++)
            active += step < batches(r, size);
        if (!active)
            return;
        CHECK_OK(td_optimizer_zero_grad(sgd));
        for (int r = 0; r < size; r++)
            if (step < batches(r, size)) {
                TD_SCOPE;
                CHECK_OK(td_backward(
                    td_mul_scalar(loss_of(alone, step, r), 1.0 / (by_active ? active : size))));
            }
        CHECK_OK(td_optimizer_step(sgd));
    }
}

static void follow(const td_ddp_options *options, bool by_active, double tolerance)
{
    CHECK_OK(td_init_process_group(NULL));
    int rank = td_get_rank(NULL), size = td_get_world_size(NULL);
    td_module *alone = make_net(false), *model = td_ddp(make_net(false), options);
    CHECK(model != NULL);
    td_optimizer *alone_sgd = td_sgd(alone, &(td_sgd_options){.lr = 0.1});
    td_optimizer *sgd = td_sgd(model, &(td_sgd_options){.lr = 0.1});
    train_alone(alone, alone_sgd, size, by_active);
    CHECK_OK(td_ddp_join_begin(model, &(td_ddp_join_options){.divide_by_active = by_active}));
    CHECK_FAILS(td_ddp_join_begin(model, NULL), TD_ERR_STATE, "before");
    for (int step = 0; step < batches(rank, size); step++) {
        CHECK_OK(td_optimizer_zero_grad(sgd));
        {
            TD_SCOPE;
            CHECK_OK(td_backward(loss_of(model, step, rank)));
        }
        CHECK_OK(td_optimizer_step(sgd));
    }
    CHECK_OK(td_ddp_join_end(model));
    CHECK(same_bits(model));
    td_state *a = td_module_parameters(alone), *b = td_module_parameters(model);
    for (int i = 0; i < td_state_count(a); i++)
        CHECK(td_allclose(td_state_tensor(a, i), td_state_tensor(b, i), tolerance, tolerance));
    td_state_destroy(a);
    td_state_destroy(b);
    td_ddp_stats stats;
    CHECK_OK(td_ddp_get_stats(model, &stats));
    int most = 0;
    for (int r = 0; r < size; r++)
        most = batches(r, size) > most ? batches(r, size) : most;
    CHECK_EQ(stats.passes, most);
    CHECK(stats.rebuilt || options);

    /* Afterwards it is an ordinary model. */
    {
        TD_SCOPE;
        CHECK_OK(td_backward(loss_of(model, 0, rank)));
    }
    td_optimizer_destroy(sgd);
    td_optimizer_destroy(alone_sgd);
    td_module_destroy(model);
    td_module_destroy(alone);
    CHECK_OK(td_destroy_process_group());
}

RANKS(one_rank_joins_itself, .ranks = 1)
{
    follow(NULL, false, 1e-5);
}

RANKS(two_ranks_of_different_length, .ranks = 2)
{
    follow(NULL, false, 1e-5);
}

RANKS(three_ranks_one_without_input, .ranks = 3)
{
    follow(NULL, false, 1e-5);
}

RANKS(four_ranks_divide_by_those_left, .ranks = 4, .deadline_s = 40)
{
    follow(NULL, true, 1e-5);
}

RANKS(joining_with_many_buckets, .ranks = 3)
{
    follow(&(td_ddp_options){.bucket_cap_mb = 0.0001}, true, 1e-5);
}

RANKS(joining_while_looking_for_unused, .ranks = 3)
{
    follow(&(td_ddp_options){.find_unused_parameters = true}, false, 1e-5);
}

RANKS(joining_with_a_hook, .ranks = 2)
{
    follow(&(td_ddp_options){.hook = td_hook_fp16()}, true, 2e-3);
}

/* Of full rank, so that the products are the matrices. */
RANKS(joining_with_powersgd, .ranks = 3)
{
    td_powersgd *powersgd = td_powersgd_create(
        &(td_powersgd_options){.rank = 9, .start_step = -1, .min_compression_rate = 0.01});
    CHECK(powersgd != NULL);
    follow(&(td_ddp_options){.hook = td_powersgd_hook(powersgd)}, true, 1e-4);
    td_powersgd_destroy(powersgd);
}

/* Buffers come from a rank that still has input, and from the last one at the end. */
RANKS(buffers_follow_the_active_ranks, .ranks = 3)
{
    CHECK_OK(td_init_process_group(NULL));
    int rank = td_get_rank(NULL);
    td_module *model = td_ddp(make_net(true), NULL);
    CHECK_OK(td_ddp_join_begin(model, NULL));
    for (int step = 0; step < 2 * rank + 1; step++) {
        TD_SCOPE;
        CHECK_OK(td_backward(loss_of(model, step, rank)));
    }
    CHECK_OK(td_ddp_join_end(model));
    CHECK(same_bits(model));
    CHECK_EQ(td_item(td_module_buffer(model, "module.1.num_batches_tracked")), 5);
    td_module_destroy(model);
    CHECK_OK(td_destroy_process_group());
}

/* The only pass was shadowed: what it leaves to do is done by all in the next one. */
RANKS(one_pass_of_one_rank, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    int rank = td_get_rank(NULL);
    td_module *model = td_ddp(make_net(true), NULL);
    for (int turn = 0; turn < 3; turn++) {
        CHECK_OK(td_ddp_join_begin(model, NULL));
        if (rank == 1 && turn < 2) {
            TD_SCOPE;
            CHECK_OK(td_backward(loss_of(model, turn, rank)));
        }
        CHECK_OK(td_ddp_join_end(model));
        CHECK(same_bits(model));
        if (turn != 1)
            continue;
        {
            TD_SCOPE;
            CHECK_OK(td_backward(loss_of(model, turn, rank)));
        }
    }
    td_ddp_stats stats;
    CHECK_OK(td_ddp_get_stats(model, &stats));
    CHECK_EQ(stats.passes, 3);
    CHECK(stats.rebuilt);
    td_module_destroy(model);

    model = td_ddp(make_net(false), NULL);
    CHECK_OK(td_ddp_join_begin(model, NULL));
    if (rank == 1) {
        TD_SCOPE;
        CHECK_OK(td_backward(loss_of(model, 0, rank)));
    }
    CHECK_OK(td_ddp_join_end(model));
    {
        TD_SCOPE;
        CHECK_OK(td_backward(loss_of(model, 0, rank)));
    }
    td_module_destroy(model);
    CHECK_OK(td_destroy_process_group());
}

/* Passes without synchronisation, and forwards without grad, are shadowed as such. */
RANKS(other_kinds_of_forward_are_shadowed, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    int rank = td_get_rank(NULL);
    td_module *model = td_ddp(make_net(true), NULL);
    CHECK_OK(td_ddp_join_begin(model, NULL));
    for (int step = 0; step < 1 + 3 * rank; step++) {
        {
            TD_NO_SYNC(model);
            TD_SCOPE;
            CHECK_OK(td_backward(loss_of(model, step, rank)));
        }
        {
            TD_SCOPE;
            TD_NO_GRAD;
            CHECK(loss_of(model, step, rank) != NULL);
        }
        {
            TD_SCOPE;
            CHECK_OK(td_backward(loss_of(model, step, rank)));
        }
    }
    CHECK_OK(td_ddp_join_end(model));
    CHECK(same_bits(model));
    td_ddp_stats stats;
    CHECK_OK(td_ddp_get_stats(model, &stats));
    CHECK_EQ(stats.passes, 4);
    td_module_destroy(model);
    CHECK_OK(td_destroy_process_group());
}

RANKS(the_first_rank_without_input_fails_all, .ranks = 3)
{
    CHECK_OK(td_init_process_group(NULL));
    int rank = td_get_rank(NULL);
    td_module *model = td_ddp(make_net(false), NULL);
    td_ddp_join_options options = {.throw_on_early_termination = true};
    CHECK_OK(td_ddp_join_begin(model, &options));
    for (int step = 0; step < 2; step++) {
        TD_SCOPE;
        CHECK_OK(td_backward(loss_of(model, step, rank)));
    }
    if (rank != 1) {
        TD_SCOPE;
        CHECK(loss_of(model, 2, rank) == NULL);
    }
    CHECK_FAILS(td_ddp_join_end(model), TD_ERR_STATE, "rank 1 ran out of input after 2 forwards");
    CHECK_FAILS(td_ddp_join_end(model), TD_ERR_STATE, "was not called");

    /* Together to the end: nothing to complain of. */
    CHECK_OK(td_ddp_join_begin(model, &options));
    {
        TD_SCOPE;
        CHECK_OK(td_backward(loss_of(model, 3, rank)));
    }
    CHECK_OK(td_ddp_join_end(model));
    CHECK(same_bits(model));

    options.divide_by_active = rank == 2;
    CHECK_OK(td_ddp_join_begin(model, &options));
    CHECK_FAILS(td_ddp_join_end(model), TD_ERR_MISMATCH, "rank 0 and rank 2");
    td_module_destroy(model);
    CHECK_OK(td_destroy_process_group());
}

RANKS(different_forwards_are_reported, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    int rank = td_get_rank(NULL);
    td_module *model = td_ddp(make_net(false), NULL);
    CHECK_OK(td_ddp_join_begin(model, NULL));
    td_ddp_set_sync(model, rank == 0);
    {
        TD_SCOPE;
        CHECK(loss_of(model, 0, rank) == NULL);
    }
    CHECK_CONTAINS(td_last_error(), "rank 0 and rank 1");
    CHECK_FAILS(td_ddp_join_end(model), TD_ERR_MISMATCH, "rank 0 and rank 1");
    CHECK_FAILS(td_ddp_join_begin(NULL, NULL), TD_ERR_INVALID, "NULL");
    td_module_destroy(model);
    CHECK_OK(td_destroy_process_group());
}
