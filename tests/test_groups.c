/* Worlds and groups: making, translating ranks, using them in any order, leaving. */
#include "process_counts.h"
#include "runner.h"

#include "base/clock.h"

#include <tandem/group.h>
#include <tandem/rendezvous.h>

#include <stdio.h>
#include <string.h>

/* Checks that a group works: the sum over its ranks. */
static void use_group(td_group *group)
{
    int size = td_get_world_size(group), ranks[64];
    int64_t own = td_get_rank(NULL) + 1, sum = -1, expected = 0;
    CHECK(size >= 1);
    CHECK_OK(td_get_process_group_ranks(group, ranks));
    for (int i = 0; i < size; i++)
        expected += ranks[i] + 1;
    CHECK_OK(td_group_all_reduce(&sum, &own, 1, TD_I64, TD_SUM, group, NULL));
    CHECK_EQ(sum, expected);
}

/* ---- The world ------------------------------------------------------------------------------- */

TEST(world_of_one_needs_no_setup)
{
    for (int i = 0; i < 3; i++) {
        CHECK(!td_is_initialized());
        CHECK_EQ(td_get_rank(NULL), -1);
        CHECK_EQ(td_get_world_size(NULL), -1);
        CHECK_EQ(td_get_local_rank(), -1);
        CHECK_EQ(td_get_local_size(), -1);
        CHECK(!td_get_backend(NULL));
        CHECK_FAILS(td_destroy_process_group(), TD_ERR_STATE, "there is no world");
        CHECK_OK(td_init_process_group(NULL));
        CHECK(td_is_initialized());
        CHECK_EQ(td_get_rank(NULL), 0);
        CHECK_EQ(td_get_world_size(NULL), 1);
        CHECK_EQ(td_get_local_rank(), 0);
        CHECK_EQ(td_get_local_size(), 1);
        CHECK_STR(td_get_backend(NULL), "native");
        CHECK_STR(td_group_name(NULL), "world");
        use_group(NULL);
        td_group *group;
        CHECK_OK(td_new_group((int[]){0}, 1, NULL, &group));
        use_group(group);
        CHECK_OK(td_destroy_process_group());
    }
}

#define CHECK_INIT(status, part, ...)                                                              \
    do {                                                                                           \
        CHECK_FAILS(td_init_process_group(&(td_init_options){__VA_ARGS__}), status, part);         \
        CHECK(!td_is_initialized());                                                               \
    } while (0)

TEST(wrong_options_are_named)
{
    td_store *store;
    CHECK_OK(td_hash_store_open(&store));
    CHECK_INIT(TD_ERR_INVALID, "a store and an init method (env://) exclude each other",
               .store = store, .world_size = 1, .init_method = "env://");
    CHECK_INIT(TD_ERR_INVALID, "the world size is 0", .store = store);
    CHECK_INIT(TD_ERR_INVALID, "the world size is -2", .store = store, .world_size = -2);
    CHECK_INIT(TD_ERR_INVALID, "rank 2 of 2", .store = store, .world_size = 2, .rank = 2);
    CHECK_INIT(TD_ERR_INVALID, "rank -1 of 2", .store = store, .world_size = 2, .rank = -1);
    CHECK_INIT(TD_ERR_INVALID, "there is no backend \"carrier-pigeon\"",
               .backend = "carrier-pigeon");
    CHECK_INIT(TD_ERR_INVALID, "native",
               .backend = ""); /* the message lists those that there are */
    CHECK_INIT(TD_ERR_INVALID, "\"speed=11\" is not known", .backend_options = "speed=11");
    CHECK_INIT(TD_ERR_INVALID, "\"algorithm\"", .backend_options = "algorithm");
    CHECK_INIT(TD_ERR_INVALID, "\"transport=tape\"", .backend_options = "transport=tape");
    CHECK_INIT(TD_ERR_INVALID, "\"b=2\"", .backend_options = "transport=tcp b=2");
    CHECK_INIT(TD_ERR_INVALID, "algorithm=magic", .backend_options = "algorithm=magic");
    CHECK_INIT(TD_ERR_INVALID, "timeout_ms is -5 ms", .timeout_ms = -5);
    CHECK_INIT(TD_ERR_INVALID, "ftp", .init_method = "ftp://127.0.0.1:4");
    CHECK_INIT(TD_ERR_INVALID, "70000", .init_method = "tcp://127.0.0.1:70000?rank=0&world_size=1");
    CHECK_INIT(TD_ERR_INVALID, "world", .init_method = "tcp://127.0.0.1:29999", .world_size = -2);
    CHECK_INIT(TD_ERR_INVALID, "the rank is missing", .init_method = "tcp://127.0.0.1:29999",
               .world_size = -1, .rank = -1);
    CHECK_INIT(TD_ERR_INVALID, "the rank is missing", .init_method = "tcp://127.0.0.1:29999",
               .world_size = 2, .rank = -1);
    CHECK_INIT(TD_ERR_INVALID, "MASTER_ADDR", .init_method = "env://", .world_size = 1);
    setenv("TANDEM_TRANSPORT", "string and cups", 1);
    CHECK_INIT(TD_ERR_INVALID, "TANDEM_TRANSPORT is \"string and cups\"", .backend = NULL);
    unsetenv("TANDEM_TRANSPORT");

    CHECK_OK(td_init_process_group(&(td_init_options){.store = store, .world_size = 1}));
    CHECK_FAILS(td_init_process_group(NULL), TD_ERR_STATE, "there is a world already");
    CHECK(td_is_initialized());
    use_group(NULL);
    CHECK_OK(td_destroy_process_group());
    CHECK_OK(td_store_close(store));
}

RANKS(initialising_again, .ranks = 3)
{
    static const char *const names[] = {"native", "tcp", "gloo", NULL};
    struct counts before = {0};
    for (int i = 0; i < 8; i++) {
        CHECK_OK(td_init_process_group(&(td_init_options){.backend = names[i % 4]}));
        CHECK_EQ(td_get_rank(NULL), td_test_rank());
        CHECK_EQ(td_get_local_rank(), td_test_rank());
        CHECK_EQ(td_get_local_size(), 3);
        use_group(NULL);
        CHECK_OK(td_destroy_process_group());
        CHECK_FAILS(td_group_barrier(NULL, NULL), TD_ERR_STATE, "there is no world");
        td_test_barrier();
        if (i == 3)
            before = counts_now();
    }
    struct counts after = counts_now();
    CHECK_EQ(after.descriptors, before.descriptors);
    CHECK_SOON(counts_now().threads <= before.threads); /* its entry goes after the join */
}

/* What is not given is taken from the environment, each by itself: as init_process_group() of PyTorch
 * has it, where -1 is the default of both. */
RANKS(rank_and_size_one_by_one, .ranks = 3)
{
    const td_init_options ways[] = {
        {.world_size = -1, .rank = -1},
        {.world_size = 3},
        {.world_size = 3, .rank = -1},
        {.rank = td_test_rank()},
        {.world_size = 3, .rank = td_test_rank()},
        {.init_method = "env://", .world_size = -1, .rank = -1},
        {.init_method = "env://", .world_size = 3},
    };
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        CHECK_OK(td_init_process_group(&ways[i]));
        CHECK_EQ(td_get_rank(NULL), td_test_rank());
        CHECK_EQ(td_get_world_size(NULL), 3);
        CHECK_OK(td_destroy_process_group());
    }
    td_world world;
    CHECK_OK(td_rendezvous(NULL, &(td_rendezvous_options){.world_size = -1, .rank = -1}, &world));
    CHECK_EQ(world.rank, td_test_rank());
    CHECK_OK(td_world_close(&world));
}

RANKS(the_same_store_again, .ranks = 3)
{
    td_world met;
    int64_t keys[2];
    CHECK_OK(td_rendezvous(NULL, NULL, &met));
    for (int i = 0; i < 6; i++) {
        CHECK_OK(td_init_process_group(&(td_init_options){
            .store = met.store,
            .world_size = 3,
            .rank = td_test_rank(),
            .group_name = i % 2 ? "odd" : NULL,
        }));
        CHECK_STR(td_group_name(NULL), i % 2 ? "odd" : "world");
        use_group(NULL);
        CHECK_OK(td_destroy_process_group());
        td_test_barrier();
        CHECK_OK(td_store_num_keys(met.store, &keys[i > 0]));
        td_test_barrier();
    }
    CHECK_EQ(keys[0], keys[1]);
    CHECK_OK(td_world_close(&met));
}

RANKS(a_rendezvous_by_file, .ranks = 3)
{
    char url[300];
    snprintf(url, sizeof url, "file://%s/meeting", td_test_temp_dir());
    for (int i = 0; i < 2; i++) {
        CHECK_OK(td_init_process_group(
            &(td_init_options){.init_method = url, .world_size = 3, .rank = td_test_rank()}));
        use_group(NULL);
        CHECK_OK(td_destroy_process_group());
    }
}

/* ---- Groups ---------------------------------------------------------------------------------- */

RANKS(groups_of_some_ranks, .ranks = 5)
{
    int rank = td_test_rank();
    CHECK_OK(td_init_process_group(NULL));
    td_group *backwards, *same, *again, *pair, *one, *all;
    CHECK_OK(td_new_group((int[]){4, 1, 3}, 3, NULL, &backwards));
    CHECK_OK(td_new_group((int[]){1, 3, 4}, 3, NULL, &same)); /* another order, another group */
    CHECK_OK(td_new_group((int[]){1, 3, 4}, 3, &(td_group_options){.name = "mine"}, &again));
    CHECK_OK(td_new_group(NULL, 0, NULL, &all));
    if (rank == 0 || rank == 2) /* only its members need to call it */
        CHECK_OK(td_new_group((int[]){2, 0}, 2, NULL, &pair));
    CHECK_OK(td_new_group(&rank, 1, NULL, &one));
    use_group(all);
    use_group(one);
    CHECK_EQ(td_get_world_size(one), 1);
    bool inside = rank == 1 || rank >= 3;
    CHECK_EQ(td_get_rank(backwards), rank == 4 ? 0 : rank == 1 ? 1 : rank == 3 ? 2 : -1);
    CHECK_EQ(td_get_world_size(backwards), inside ? 3 : -1);
    CHECK_EQ(td_get_group_rank(backwards, 3), 2);
    CHECK_EQ(td_get_group_rank(backwards, 0), -1);
    CHECK_EQ(td_get_group_rank(backwards, 17), -1);
    CHECK_EQ(td_get_group_rank(backwards, -1), -1);
    CHECK_EQ(td_get_global_rank(backwards, 0), 4);
    CHECK_EQ(td_get_global_rank(backwards, 3), -1);
    CHECK_EQ(td_get_global_rank(backwards, -1), -1);
    CHECK_EQ(td_get_group_rank(NULL, 4), 4);
    CHECK_STR(td_group_name(again), "mine");
    if (inside) {
        int order[3], first = rank, gathered[3];
        CHECK_OK(td_get_process_group_ranks(backwards, order));
        CHECK_OK(td_group_all_gather(gathered, &rank, 1, TD_I32, backwards, NULL));
        CHECK_MEM(order, gathered, sizeof order);
        CHECK_EQ(order[0], 4);
        /* Roots are ranks of the world. */
        CHECK_OK(td_group_broadcast(&first, 1, TD_I32, 3, backwards, NULL));
        CHECK_EQ(first, 3);
        /* The three groups do not know of each other's calls. */
        td_work *works[2];
        CHECK_OK(td_group_barrier(rank == 1 ? same : again, &works[0]));
        CHECK_OK(td_group_barrier(rank == 1 ? again : same, &works[1]));
        use_group(backwards);
        CHECK_OK(td_work_wait_all(works, 2, 0));
        td_work_release(works[0]);
        td_work_release(works[1]);
    } else {
        use_group(pair);
        CHECK_FAILS(td_group_barrier(backwards, NULL), TD_ERR_STATE, "is not in group \"4,1,3\"");
        CHECK_FAILS(td_group_set_timeout(backwards, 1), TD_ERR_STATE, "is not in group");
        td_group_destroy(pair);
    }
    td_group_destroy(rank % 2 ? same : backwards); /* in any order */
    td_group_destroy(rank % 2 ? backwards : same);
    td_group_destroy(NULL);
    td_group_destroy(one);
    use_group(all);
    CHECK_OK(td_destroy_process_group()); /* the others with it */
}

RANKS(wrong_lists_are_refused, .ranks = 3)
{
    td_group *group = (td_group *)&group, *unchanged = group;
    CHECK_FAILS(td_new_group((int[]){0}, 1, NULL, &group), TD_ERR_STATE, "there is no world");
    CHECK_OK(td_init_process_group(NULL));
    CHECK_FAILS(td_new_group((int[]){0, 3}, 2, NULL, &group), TD_ERR_INVALID,
                "rank 3 is out of range; ranks are 0 to 2");
    CHECK_FAILS(td_new_group((int[]){0, -1}, 2, NULL, &group), TD_ERR_INVALID, "rank -1");
    CHECK_FAILS(td_new_group((int[]){0, 1, 0}, 3, NULL, &group), TD_ERR_INVALID,
                "rank 0 is in the list twice");
    CHECK_FAILS(td_new_group((int[]){0}, 0, NULL, &group), TD_ERR_INVALID, "0 ranks");
    CHECK_FAILS(td_new_group((int[]){0}, -4, NULL, &group), TD_ERR_INVALID, "-4 ranks");
    CHECK_FAILS(td_new_group((int[]){0}, 1, NULL, NULL), TD_ERR_INVALID, "NULL");
    CHECK_FAILS(td_new_group(NULL, 0, &(td_group_options){.timeout_ms = -2}, &group),
                TD_ERR_INVALID, "-2 ms");
    CHECK_FAILS(td_new_group(NULL, 0, &(td_group_options){.backend = "no"}, &group), TD_ERR_INVALID,
                "no backend \"no\"");
    CHECK_FAILS(td_new_group(NULL, 0, &(td_group_options){.backend_options = "no"}, &group),
                TD_ERR_INVALID, "\"no\"");
    CHECK_FAILS(td_new_subgroups(2, NULL, &group), TD_ERR_INVALID,
                "a world of 3 cannot be cut into groups of 2");
    CHECK_FAILS(td_new_subgroups(0, NULL, &group), TD_ERR_INVALID, "groups of 0");
    CHECK_FAILS(td_new_subgroups_by_enumeration((int[]){0, 1, 0}, (int[]){2, 1}, 2, NULL, &group),
                TD_ERR_INVALID, "rank 0 is in the list twice");
    CHECK_FAILS(td_new_subgroups_by_enumeration((int[]){0, 1}, (int[]){2, 0}, 2, NULL, &group),
                TD_ERR_INVALID, "0 ranks");
    CHECK_FAILS(td_new_subgroups_by_enumeration((int[]){0, 1}, (int[]){2, 2}, 2, NULL, &group),
                TD_ERR_INVALID, "more ranks");
    CHECK_FAILS(td_new_subgroups_by_enumeration(NULL, (int[]){2, 2}, 2, NULL, &group),
                TD_ERR_INVALID, "needs");
    CHECK_FAILS(td_group_split(NULL, 0, 0, NULL, NULL), TD_ERR_INVALID, "NULL");
    CHECK_FAILS(td_group_set_timeout(NULL, -2), TD_ERR_INVALID, "-2 ms");
    CHECK_FAILS(td_set_call_timeout(-2), TD_ERR_INVALID, "-2 ms");
    CHECK_FAILS(td_get_process_group_ranks(NULL, NULL), TD_ERR_INVALID, "NULL");
    CHECK(group == unchanged);
    /* Refused lists are not counted: the next group is the same on all ranks. */
    if (td_test_rank() == 1)
        CHECK_FAILS(td_new_group(NULL, 0, &(td_group_options){.backend_options = "x"}, &group),
                    TD_ERR_INVALID, "\"x\"");
    CHECK_OK(td_new_group(NULL, 0, NULL, &group));
    use_group(group);
    CHECK_OK(td_destroy_process_group());
}

RANKS(cutting_the_world, .ranks = 6)
{
    int rank = td_test_rank(), ranks[6];
    td_group *thirds, *listed, *split, *inner;
    CHECK_OK(td_init_process_group(NULL));
    CHECK_OK(td_new_subgroups(2, NULL, &thirds));
    CHECK_EQ(td_get_world_size(thirds), 2);
    CHECK_EQ(td_get_global_rank(thirds, 0), rank / 2 * 2);
    use_group(thirds);

    CHECK_OK(td_new_subgroups_by_enumeration((int[]){5, 0, 3, 1}, (int[]){3, 1}, 2, NULL, &listed));
    if (rank == 2 || rank == 4) {
        CHECK(!listed);
    } else {
        CHECK_EQ(td_get_world_size(listed), rank == 1 ? 1 : 3);
        CHECK_EQ(td_get_global_rank(listed, 0), rank == 1 ? 1 : 5);
        use_group(listed);
    }

    /* By colour, the highest rank first; keys of any sign. */
    CHECK_OK(td_group_split(NULL, rank % 2 ? 7 : INT32_MAX, rank == 5 ? INT32_MIN : -rank, NULL,
                            &split));
    CHECK_EQ(td_get_world_size(split), 3);
    CHECK_OK(td_get_process_group_ranks(split, ranks));
    CHECK_EQ(ranks[0], 4 + rank % 2);
    CHECK_EQ(ranks[2], rank % 2);
    use_group(split);

    /* A group of a group; equal keys are ordered as the parent is; one takes no part. */
    CHECK_OK(td_group_split(split, rank == 4 ? -1 : 0, 3, NULL, &inner));
    if (rank == 4) {
        CHECK(!inner);
    } else {
        CHECK_EQ(td_get_world_size(inner), rank % 2 ? 3 : 2);
        CHECK_OK(td_get_process_group_ranks(inner, ranks));
        CHECK_EQ(ranks[0], rank % 2 ? 5 : 2);
        use_group(inner);
    }
    CHECK_OK(td_destroy_process_group());
}

RANKS(subgroups_have_their_own_options, .ranks = 3)
{
    td_group *slow, *tcp;
    CHECK_OK(td_init_process_group(NULL));
    CHECK_OK(td_new_group(NULL, 0, &(td_group_options){.timeout_ms = 200}, &slow));
    CHECK_OK(td_new_group(NULL, 0, &(td_group_options){.backend = "tcp", .name = "wire"}, &tcp));
    CHECK_STR(td_get_backend(tcp), "tcp");
    use_group(tcp);
    if (td_test_rank() == 0)
        CHECK_FAILS(td_group_barrier(slow, NULL), TD_ERR_TIMEOUT, "ranks 1, 2 have not called it");
    use_group(NULL);
    CHECK_OK(td_destroy_process_group());
}
