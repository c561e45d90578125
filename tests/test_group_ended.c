/* Handles that outlive their world: every call on an ended group is TD_ERR_STATE, rank, size and names can still
 * be read, and complete works keep their status. Best run under AddressSanitizer. */
#include "runner.h"

#include <tandem/tandem.h>

#include <pthread.h>
#include <stdio.h>

#define CHECK_ENDED(call)                                                                          \
    CHECK_FAILS(call, TD_ERR_STATE, "has ended: td_destroy_process_group() was called")

/* ---- Every call ------------------------------------------------------------------------------ */

static void call_group_h(td_group *ended)
{
    int x[4] = {0}, y[4] = {0};
    size_t counts[4] = {1, 1, 1, 1};
    td_group *result = NULL;
    td_work *work = NULL, **ways[2] = {NULL, &work};
    for (int i = 0; i < 2; i++) {
        td_work **way = ways[i];
        CHECK_ENDED(td_group_send(x, 1, TD_I32, 0, 0, ended, way));
        CHECK_ENDED(td_group_recv(x, 1, TD_I32, 0, 0, ended, way));
        CHECK_ENDED(td_group_broadcast(x, 1, TD_I32, 0, ended, way));
        CHECK_ENDED(td_group_all_reduce(y, x, 1, TD_I32, TD_SUM, ended, way));
        CHECK_ENDED(td_group_reduce(y, x, 1, TD_I32, 0, TD_SUM, ended, way));
        CHECK_ENDED(td_group_scatter(y, x, 1, TD_I32, 0, ended, way));
        CHECK_ENDED(td_group_gather(y, x, 1, TD_I32, 0, ended, way));
        CHECK_ENDED(td_group_all_gather(y, x, 1, TD_I32, ended, way));
        CHECK_ENDED(td_group_reduce_scatter(y, x, 1, TD_I32, TD_SUM, ended, way));
        CHECK_ENDED(td_group_all_to_all(y, x, 1, TD_I32, ended, way));
        CHECK_ENDED(td_group_all_to_all_v(y, x, counts, counts, TD_I32, ended, way));
        CHECK_ENDED(td_group_barrier(ended, way));
    }
    CHECK(!work);
    int missing = 7, missing_count = 7;
    CHECK_ENDED(td_group_monitored_barrier(ended, 0, true, &missing, &missing_count));
    CHECK_EQ(missing_count, 0);
    CHECK_ENDED(td_group_split(ended, 0, 0, NULL, &result));
    CHECK_ENDED(td_group_shrink(ended, NULL, &result));
    CHECK_ENDED(td_group_grow(ended, NULL, &result));
    CHECK_ENDED(td_group_abort(ended));
    CHECK_ENDED(td_group_set_timeout(ended, 1000));
    td_group_options of_it = {.world = ended};
    CHECK_ENDED(td_new_group(NULL, 0, &of_it, &result));
    CHECK_ENDED(td_new_subgroups(1, &of_it, &result));
    CHECK_ENDED(td_new_subgroups_by_enumeration((int[]){0}, (int[]){1}, 1, &of_it, &result));
    CHECK(!result);
}

static void call_collectives_of_dist_h(td_group *ended, td_work **way)
{
    TD_SCOPE;
    td_tensor *t = td_zeros(TD_SHAPE(2), TD_F32, NULL), *u = td_zeros(TD_SHAPE(2), TD_F32, NULL);
    td_tensor *list[4] = {t, u, t, u};
    CHECK_ENDED(td_broadcast(t, 0, ended, way));
    CHECK_ENDED(td_all_reduce(t, TD_SUM, ended, way));
    CHECK_ENDED(td_reduce(t, 0, TD_SUM, ended, way));
    CHECK_ENDED(td_all_gather(list, 1, t, ended, way));
    CHECK_ENDED(td_all_gather_into_tensor(u, t, ended, way));
    CHECK_ENDED(td_gather(t, list, 1, 0, ended, way));
    CHECK_ENDED(td_scatter(t, list, 1, 0, ended, way));
    CHECK_ENDED(td_reduce_scatter(t, list, 1, TD_SUM, ended, way));
    CHECK_ENDED(td_reduce_scatter_tensor(t, u, TD_SUM, ended, way));
    CHECK_ENDED(td_all_to_all(list, 1, list, 1, ended, way));
    CHECK_ENDED(td_all_to_all_single(t, u, NULL, NULL, ended, way));
    CHECK_ENDED(td_barrier(ended, way));
    CHECK_ENDED(td_broadcast_coalesced(list, 2, 0, ended, way));
    CHECK_ENDED(td_all_reduce_coalesced(list, 2, TD_SUM, ended, way));
    CHECK_ENDED(td_all_gather_coalesced(list, 2, list, 2, ended, way));
    CHECK_ENDED(td_reduce_scatter_coalesced(list, 2, list, 2, TD_SUM, ended, way));
}

static void call_dist_h(td_group *ended)
{
    TD_SCOPE;
    td_work *work = NULL;
    call_collectives_of_dist_h(ended, NULL);
    call_collectives_of_dist_h(ended, &work);
    td_tensor *t = td_zeros(TD_SHAPE(2), TD_F32, NULL), *list[2] = {t, t};
    CHECK_ENDED(td_monitored_barrier(ended, 0, false, NULL, NULL));
    CHECK_ENDED(td_send(t, 0, 0, ended));
    CHECK_ENDED(td_recv(t, 0, 0, ended, NULL));
    CHECK_ENDED(td_isend(t, 0, 0, ended, &work));
    CHECK_ENDED(td_irecv(t, 0, 0, ended, &work));
    CHECK_ENDED(td_batch_isend_irecv(
        &(td_p2p_op){.kind = TD_P2P_ISEND, .tensor = t, .group = ended}, 1, &work));
    td_bytes objects[2] = {{0}};
    CHECK_ENDED(td_broadcast_object_list(objects, 1, 0, ended));
    CHECK_ENDED(td_all_gather_object(objects, 2, objects[0], ended));
    CHECK_ENDED(td_gather_object(objects[0], objects, 2, 0, ended));
    CHECK_ENDED(td_scatter_object_list(objects, objects, 2, 0, ended));
    CHECK_ENDED(td_send_object_list(objects, 1, 0, ended));
    CHECK_ENDED(td_recv_object_list(objects, 1, 0, ended, NULL));
    CHECK_ENDED(td_scatter_send(list, 1, t, ended));
    CHECK_ENDED(td_scatter_recv(t, 0, ended));
    CHECK_ENDED(td_gather_recv(list, 1, t, ended));
    CHECK_ENDED(td_gather_send(t, 0, ended));
    CHECK(!work);
}

RANKS(every_call_on_an_ended_group, .ranks = 2)
{
    td_group *made, *split, *other;
    int rank = td_test_rank(), ranks[2] = {-1, -1};
    CHECK_OK(td_init_process_group(NULL));
    CHECK_OK(td_new_group((int[]){1, 0}, 2, NULL, &made));
    CHECK_OK(td_group_split(NULL, 0, 0, &(td_group_options){.name = "parts"}, &split));
    CHECK_OK(td_new_group((int[]){1 - rank}, 1, NULL, &other)); /* this rank is not in it */
    CHECK_OK(td_group_barrier(made, NULL));
    CHECK_OK(td_group_barrier(made, NULL));
    CHECK_OK(td_destroy_process_group());
    for (int i = 0; i < 2; i++) {
        call_group_h(made);
        call_dist_h(split);
        CHECK_ENDED(td_group_barrier(other, NULL));
        /* What is only asked. */
        CHECK_EQ(td_get_rank(made), 1 - rank);
        CHECK_EQ(td_get_rank(split), rank);
        CHECK_EQ(td_get_rank(other), -1);
        CHECK_EQ(td_get_world_size(made), 2);
        CHECK_EQ(td_get_world_size(other), -1);
        CHECK_STR(td_group_name(made), "1,0");
        CHECK_STR(td_group_name(split), "parts");
        CHECK_STR(td_get_backend(made), "native");
        CHECK_EQ(td_get_group_rank(made, 0), 1);
        CHECK_EQ(td_get_global_rank(made, 0), 1);
        CHECK_EQ(td_group_sequence(made), 2);
        CHECK_OK(td_get_process_group_ranks(made, ranks));
        CHECK_EQ(ranks[0], 1);
        CHECK_EQ(ranks[1], 0);
        CHECK_FAILS(td_get_process_group_ranks(other, ranks), TD_ERR_STATE, "not in group");
        /* A new world does not bring them back. */
        if (i == 0)
            CHECK_OK(td_init_process_group(NULL));
    }
    CHECK_OK(td_group_barrier(NULL, NULL));
    CHECK_OK(td_group_destroy(made));
    CHECK_OK(td_destroy_process_group());
    CHECK_OK(td_group_destroy(other)); /* and `split` is left, which is not reported as a leak */
}

/* ---- Works ----------------------------------------------------------------------------------- */

static void count_call(td_work *work, td_status status, void *arg)
{
    (void)work;
    *(td_status *)arg = status;
}

static void check_work(td_work *work, td_status status, const char *part)
{
    td_status seen = (td_status)99;
    CHECK(td_work_test(work));
    CHECK_EQ(td_work_status(work), status);
    CHECK_EQ(td_work_wait(work, 0), status);
    CHECK_EQ(td_work_wait(work, TD_NOW), status);
    CHECK_EQ(td_work_wait(work, 100), status);
    CHECK_EQ(td_work_wait_all(&work, 1, 0), status);
    if (status)
        CHECK_CONTAINS(td_last_error(), part);
    CHECK_OK(td_work_on_complete(work, count_call, &seen));
    CHECK_EQ(seen, status);
    td_work_release(work);
}

static void leave_works(td_group *group, bool end_group)
{
    int other = 1 - td_test_rank(), sum = -1, one = 1, in = -1, never = -1;
    td_work *reduced, *received, *unanswered, *summed;
    TD_SCOPE;
    td_tensor *t = td_transpose(td_ones(TD_SHAPE(2, 3), TD_F32, NULL), 0,
                                1); /* is packed, and unpacked */
    CHECK_OK(td_group_all_reduce(&sum, &one, 1, TD_I32, TD_SUM, group, &reduced));
    CHECK_OK(td_all_reduce(t, TD_SUM, group, &summed));
    CHECK_OK(td_group_recv(&in, 1, TD_I32, other, 3, group, &received));
    CHECK_OK(td_group_recv(&never, 1, TD_I32, other, 4, group, &unanswered));
    CHECK_OK(td_group_send(&one, 1, TD_I32, other, 3, group, NULL));
    CHECK_OK(td_work_wait(received, 0));
    if (end_group)
        CHECK_OK(td_group_destroy(group));
    else
        CHECK_OK(td_destroy_process_group());
    CHECK_EQ(sum, 2);
    CHECK_EQ(in, 1);
    CHECK_EQ(td_work_source(received), other);
    CHECK_EQ(td_work_received(received), sizeof in);
    CHECK_EQ(td_work_source(unanswered), -1);
    check_work(reduced, TD_OK, NULL);
    check_work(summed, TD_OK, NULL);
    check_work(received, TD_OK, NULL);
    /* The other rank may have left before. */
    CHECK(td_work_test(unanswered));
    td_status status = td_work_status(unanswered);
    CHECK(status == TD_ERR_STATE || status == TD_ERR_PEER);
    check_work(unanswered, status, "group");
    CHECK_EQ(((float *)td_tensor_data(t))[0], 2);
}

RANKS(works_outlive_their_group, .ranks = 2)
{
    td_group *group;
    CHECK_OK(td_init_process_group(NULL));
    CHECK_OK(td_new_group(NULL, 0, NULL, &group));
    leave_works(group, true);
    CHECK_OK(td_destroy_process_group());
}

RANKS(works_outlive_their_world, .ranks = 2)
{
    td_group *group;
    CHECK_OK(td_init_process_group(NULL));
    leave_works(NULL, false);
    CHECK_OK(td_init_process_group(NULL));
    CHECK_OK(td_new_group(NULL, 0, NULL, &group));
    leave_works(group, false);
    CHECK_OK(td_group_destroy(group));
}

/* ---- What keeps a group ---------------------------------------------------------------------- */

static td_module *small_net(void)
{
    return td_sequential(td_linear(4, 4), td_linear(4, 2), NULL);
}

/* One step of training, which must fail. */
static void check_step_fails(td_module *model)
{
    TD_SCOPE;
    td_tensor *x = td_ones(TD_SHAPE(3, 4), TD_F32, NULL), *y = td_forward(model, x);
    td_status status = y ? td_backward(td_sum(y)) : td_last_status();
    CHECK_EQ(status, TD_ERR_STATE);
    CHECK_CONTAINS(td_last_error(), "has ended");
}

RANKS(objects_that_keep_an_ended_group, .ranks = 2)
{
    TD_SCOPE;
    td_group *group;
    char path[600];
    float gradient[4] = {0};
    CHECK_OK(td_init_process_group(NULL));
    CHECK_OK(td_new_group(NULL, 0, NULL, &group));
    td_module *plain = small_net();
    td_module *ddp = td_ddp(small_net(), &(td_ddp_options){.group = group});
    td_module *norm = td_sync_batch_norm(4, NULL, group);
    td_reducer *reducer = td_reducer_create(
        &(td_reducer_buffer){.data = gradient, .count = 4, .dtype = TD_F32}, 1,
        &(td_reducer_options){.group = group});
    td_periodic_averager *averager = td_periodic_averager_create(
        plain, &(td_periodic_averager_options){.group = group, .period = 1});
    CHECK(plain && ddp && norm && reducer && averager);
    snprintf(path, sizeof path, "%s/model", td_test_temp_dir());
    td_training training = {.model = plain};
    CHECK_OK(td_training_save(path, &training, group));
    CHECK_OK(td_group_barrier(group, NULL));
    CHECK_OK(td_destroy_process_group());

    check_step_fails(ddp);
    check_step_fails(norm);
    td_status status = td_reducer_ready(reducer, 0);
    CHECK_ENDED(status ? status : td_reducer_wait(reducer));
    CHECK_ENDED(td_periodic_averager_step(averager));
    CHECK_ENDED(td_training_save(path, &training, group));
    CHECK_ENDED(td_training_load(path, &training, group));
    bool loaded;
    CHECK_ENDED(td_training_save_numbered(td_test_temp_dir(), &training, 2, group));
    CHECK_ENDED(td_training_load_latest(td_test_temp_dir(), &training, group, &loaded));
    CHECK(!td_ddp(small_net(), &(td_ddp_options){.group = group}));
    CHECK_EQ(td_last_status(), TD_ERR_STATE);
    CHECK(!td_reducer_create(&(td_reducer_buffer){.data = gradient, .count = 4, .dtype = TD_F32}, 1,
                             &(td_reducer_options){.group = group}));
    CHECK_EQ(td_last_status(), TD_ERR_STATE);

    td_periodic_averager_destroy(averager);
    td_reducer_destroy(reducer);
    td_module_destroy(norm);
    td_module_destroy(ddp);
    td_module_destroy(plain);
    CHECK_OK(td_group_destroy(group));
}

/* ---- From many threads ------------------------------------------------------------------------ */

static void *destroy_handles(void *arg)
{
    td_group **groups = arg;
    for (int i = 0; i < 50; i++) {
        CHECK_ENDED(td_group_barrier(groups[i], NULL));
        CHECK_OK(td_group_destroy(groups[i]));
    }
    return NULL;
}

TEST(ended_handles_are_destroyed_by_several_threads)
{
    td_group *groups[200];
    pthread_t threads[4];
    CHECK_OK(td_init_process_group(NULL));
    for (int i = 0; i < 200; i++)
        CHECK_OK(td_new_group(NULL, 0, NULL, &groups[i]));
    CHECK_OK(td_destroy_process_group());
    for (int i = 0; i < 4; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, destroy_handles, &groups[50 * i]), 0);
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
}
