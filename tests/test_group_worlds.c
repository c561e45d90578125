/* Worlds that are objects: several in a process, over stores of their own, without td_init_process_group();
 * groups in each of them, made by their members alone; names that are unique. */
#include "forks.h"
#include "process_counts.h"
#include "runner.h"

#include <tandem/group.h>

#include <pthread.h>
#include <stdio.h>
#include <string.h>

enum { WORLDS = 3, SIZE = 4, NAME = 64, GROUPS = 5 };

/* One rank of one world, which is a thread. */
struct seat {
    pthread_t thread;
    td_store *store;
    int world, rank;
    char names[GROUPS][NAME]; /* of its groups: the world, and those made of it */
};

static void check_sum(td_group *group)
{
    int ranks[SIZE], size = td_get_world_size(group);
    CHECK_OK(td_get_process_group_ranks(group, ranks));
    int64_t own = ranks[td_get_rank(group)] + 1, sum = 0, expected = 0;
    for (int i = 0; i < size; i++)
        expected += ranks[i] + 1;
    for (int i = 0; i < 20; i++) {
        CHECK_OK(td_group_all_reduce(&sum, &own, 1, TD_I64, TD_SUM, group, NULL));
        CHECK_EQ(sum, expected);
    }
}

/* The name is the same on all ranks of the group. */
static void check_name(td_group *group, char name[NAME])
{
    char all[SIZE][NAME];
    snprintf(name, NAME, "%s", td_group_name(group));
    for (size_t i = strlen(name); i < NAME; i++)
        name[i] = 0;
    CHECK_OK(td_group_all_gather(all, name, NAME, TD_U8, group, NULL));
    for (int i = 0; i < td_get_world_size(group); i++)
        CHECK_STR(all[i], name);
}

static void *take_seat(void *arg)
{
    struct seat *seat = arg;
    int half = seat->rank / 2;
    td_group *groups[GROUPS];
    CHECK_OK(td_group_open(seat->store, seat->rank, SIZE, NULL, &groups[0]));
    td_group_options in_world = {.world = groups[0]};
    CHECK_OK(td_new_group(NULL, 0, &in_world, &groups[1]));
    CHECK_OK(td_new_subgroups(2, &in_world, &groups[2]));
    in_world.world = groups[2]; /* any group of that world will do */
    CHECK_OK(td_new_group((int[]){2 * half + 1, 2 * half}, 2, &in_world, &groups[3]));
    CHECK_OK(td_new_subgroups_by_enumeration((int[]){0, 2, 1, 3}, (int[]){2, 2}, 2, &in_world,
                                             &groups[4]));
    for (int i = 0; i < GROUPS; i++) {
        check_sum(groups[i]);
        check_name(groups[i], seat->names[i]);
    }
    /* In any order: each world, and each rank in it, has another one. */
    for (int i = 0; i < GROUPS; i++) {
        int next = (i * 2 + seat->world + seat->rank) % GROUPS;
        CHECK_OK(td_group_destroy(groups[next]));
    }
    return NULL;
}

static void run_seats(struct seat *seats, int count)
{
    for (int i = 0; i < count; i++)
        CHECK_EQ(pthread_create(&seats[i].thread, NULL, take_seat, &seats[i]), 0);
    for (int i = 0; i < count; i++)
        pthread_join(seats[i].thread, NULL);
}

/* All groups of one rank, in all its worlds. */
static void check_different(const struct seat *seats, int count, int stride)
{
    for (int a = 0; a < count * GROUPS; a++)
        for (int b = 0; b < a; b++)
            CHECK(strcmp(seats[a / GROUPS * stride].names[a % GROUPS],
                         seats[b / GROUPS * stride].names[b % GROUPS]) != 0);
}

TEST(several_worlds_of_threads)
{
    struct seat seats[WORLDS * SIZE] = {0};
    td_store *stores[WORLDS];
    struct counts before = {0};
    for (int w = 0; w < WORLDS; w++)
        CHECK_OK(td_hash_store_open(&stores[w]));
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < WORLDS * SIZE; i++)
            seats[i] = (struct seat){
                .store = stores[i / SIZE], .world = i / SIZE, .rank = i % SIZE};
        run_seats(seats, WORLDS * SIZE);
        for (int r = 0; r < SIZE; r++)
            check_different(&seats[r], WORLDS, SIZE);
        if (round == 0)
            before = counts_now();
    }
    CHECK_EQ(counts_now().descriptors, before.descriptors);
    CHECK_SOON(counts_now().threads <= before.threads);
    CHECK(!td_is_initialized());
    for (int w = 0; w < WORLDS; w++)
        CHECK_OK(td_store_close(stores[w]));
}

/* A process is a rank of each world, and a thread of it opens and uses one. */
static void be_rank_of_all(int rank, void *arg)
{
    const char *directory = arg;
    struct seat seats[WORLDS] = {0};
    td_store *stores[WORLDS];
    for (int w = 0; w < WORLDS; w++) {
        char path[600];
        snprintf(path, sizeof path, "%s/world%d", directory, w);
        CHECK_OK(td_file_store_open(path, &stores[w]));
        seats[w] = (struct seat){.store = stores[w], .world = w, .rank = rank};
    }
    run_seats(seats, WORLDS);
    check_different(seats, WORLDS, 1);
    for (int w = 0; w < WORLDS; w++)
        CHECK_OK(td_store_close(stores[w]));
}

TEST(several_worlds_of_processes, .deadline_s = 40)
{
    fork_ranks(SIZE, be_rank_of_all, (void *)td_test_temp_dir());
}

/* ---- Beside the world of the process --------------------------------------------------------- */

RANKS(an_opened_world_beside_the_world, .ranks = 3)
{
    td_store *store;
    td_group *own, *pair, *same;
    int rank = td_test_rank(), value = rank;
    CHECK_OK(td_init_process_group(NULL));
    CHECK_OK(td_tcp_store_open(getenv("MASTER_ADDR"), atoi(getenv("MASTER_PORT")), NULL, &store));
    CHECK_OK(td_group_open(store, 2 - rank, 3, &(td_group_options){.name = "reversed"}, &own));
    CHECK_STR(td_group_name(own), "reversed");
    CHECK_EQ(td_get_rank(own), 2 - rank);
    /* Rank 0 of that world is rank 2 of the process's. */
    CHECK_OK(td_new_group((int[]){0, 1}, 2, &(td_group_options){.world = own}, &pair));
    CHECK_EQ(td_get_rank(pair), rank == 0 ? -1 : 2 - rank);
    CHECK_OK(td_new_group((int[]){0, 1}, 2, NULL, &same));
    CHECK(strcmp(td_group_name(pair), td_group_name(same)) != 0);
    CHECK_STR(td_group_name(same), "0,1");
    if (rank > 0) {
        CHECK_OK(td_group_broadcast(&value, 1, TD_I32, 0, pair, NULL));
        CHECK_EQ(value, 2);
    } else {
        CHECK_FAILS(td_group_barrier(pair, NULL), TD_ERR_STATE, "rank 2 is not in group \"0,1@");
    }
    /* A world is named by any of its groups, also by one that this rank is not in. */
    td_group *all;
    CHECK_OK(td_new_group(NULL, 0, &(td_group_options){.world = pair}, &all));
    CHECK_EQ(td_get_rank(all), 2 - rank);
    CHECK_OK(td_group_barrier(all, NULL));
    CHECK_OK(td_destroy_process_group());
    CHECK_OK(td_group_barrier(own, NULL)); /* which goes on */
    CHECK_FAILS(td_group_barrier(same, NULL), TD_ERR_STATE, "has ended");
    CHECK_OK(td_group_destroy(same));
    CHECK_OK(td_group_destroy(own));
    CHECK_FAILS(td_group_barrier(all, NULL), TD_ERR_STATE,
                "has ended: td_group_destroy() was called for its world");
    CHECK_OK(td_group_destroy(all));
    CHECK_OK(td_group_destroy(pair));
    CHECK_OK(td_store_close(store));
}

TEST(options_that_make_no_sense)
{
    td_store *store;
    td_group *first, *second, *group;
    int x = 0;
    CHECK_OK(td_hash_store_open(&store));
    CHECK_OK(td_group_open(store, 0, 1, &(td_group_options){.name = "first"}, &first));
    CHECK_OK(td_group_open(store, 0, 1, &(td_group_options){.name = "second"}, &second));
    td_group_options other = {.world = second}, own = {.world = first}, late = {.timeout_ms = -1},
                     set = {.reserved[2] = &x};
    CHECK_FAILS(td_group_open(store, 0, 1, &own, &group), TD_ERR_INVALID,
                "td_group_open: options.world is group \"first\", but this call opens a world");
    CHECK_FAILS(td_group_split(first, 0, 0, &other, &group), TD_ERR_INVALID,
                "options.world is group \"second\", which belongs to another world");
    CHECK_FAILS(td_group_shrink(first, &other, &group), TD_ERR_INVALID, "another world");
    CHECK_FAILS(td_group_grow(first, &other, &group), TD_ERR_INVALID, "another world");
    CHECK_OK(td_group_split(first, 0, 0, &own, &group));
    CHECK_FAILS(td_new_group(NULL, 0, NULL, &group), TD_ERR_STATE, "there is no world yet");
    CHECK_FAILS(td_group_open(store, 0, 1, &late, &group), TD_ERR_INVALID, "TD_NOW");
    CHECK_FAILS(td_group_split(first, 0, 0, &late, &group), TD_ERR_INVALID, "TD_NOW");
    CHECK_FAILS(td_group_shrink(first, &late, &group), TD_ERR_INVALID, "TD_NOW");
    CHECK_FAILS(td_group_grow(first, &late, &group), TD_ERR_INVALID, "TD_NOW");
    CHECK_FAILS(td_group_set_timeout(first, TD_NOW), TD_ERR_INVALID, "TD_NOW");
    CHECK_FAILS(td_group_set_timeout(first, -2), TD_ERR_INVALID, "-2 ms");
    CHECK_FAILS(td_set_call_timeout(TD_NOW), TD_ERR_INVALID, "TD_NOW");
    CHECK_FAILS(td_init_process_group(&(td_init_options){.timeout_ms = TD_NOW}), TD_ERR_INVALID,
                "TD_NOW");
    CHECK_FAILS(td_init_process_group(&(td_init_options){.reserved[0] = &x}), TD_ERR_INVALID,
                "reserved[0]");
    CHECK_FAILS(td_group_open(store, 0, 1, &set, &group), TD_ERR_INVALID, "reserved[2]");
    CHECK_FAILS(td_group_split(first, 0, 0, &set, &group), TD_ERR_INVALID, "reserved[2]");
    CHECK_FAILS(td_group_shrink(first, &set, &group), TD_ERR_INVALID, "reserved[2]");
    CHECK_FAILS(td_group_grow(first, &set, &group), TD_ERR_INVALID, "reserved[2]");
    set.world = first;
    CHECK_FAILS(td_new_group(NULL, 0, &set, &group), TD_ERR_INVALID, "reserved[2]");
    CHECK_OK(td_group_destroy(second));
    CHECK_OK(td_group_destroy(first));
    CHECK_OK(td_store_close(store));
}

/* ---- Names ----------------------------------------------------------------------------------- */

RANKS(unnamed_groups_have_names_of_their_own, .ranks = 4)
{
    enum { MADE = 10 };
    td_group *groups[MADE];
    char names[MADE][NAME];
    int rank = td_test_rank();
    CHECK_OK(td_init_process_group(NULL));
    CHECK_OK(td_new_group(NULL, 0, NULL, &groups[0]));
    CHECK_OK(td_new_group(NULL, 0, NULL, &groups[1]));
    CHECK_OK(td_new_group((int[]){3, 2, 1, 0}, 4, NULL, &groups[2]));
    CHECK_OK(td_new_subgroups(2, NULL, &groups[3]));
    CHECK_OK(td_new_subgroups(2, NULL, &groups[4]));
    CHECK_OK(td_group_split(NULL, rank / 2, 0, NULL, &groups[5]));
    CHECK_OK(td_group_split(groups[0], 0, 0, NULL, &groups[6]));
    /* Two groups that the caller calls the same. */
    td_group *same[2];
    for (int i = 0; i < 2; i++) {
        CHECK_OK(td_new_group(NULL, 0, &(td_group_options){.name = "mine"}, &same[i]));
        CHECK_OK(td_group_shrink(same[i], NULL, &groups[7 + i]));
    }
    CHECK_OK(td_group_shrink(groups[1], NULL, &groups[9]));
    for (int i = 0; i < MADE; i++)
        check_name(groups[i == 1 ? 0 : i], names[i]); /* the shrink has aborted that one */
    snprintf(names[1], NAME, "%s", td_group_name(groups[1]));
    for (int a = 0; a < MADE; a++) {
        CHECK(strcmp(names[a], "world") != 0);
        for (int b = 0; b < a; b++)
            CHECK(strcmp(names[a], names[b]) != 0);
    }
    CHECK_STR(names[9], "0-3#2 shrink 1");
    CHECK_OK(td_destroy_process_group());
    for (int i = 0; i < MADE; i++)
        CHECK_OK(td_group_destroy(groups[i]));
    CHECK_OK(td_group_destroy(same[0]));
    CHECK_OK(td_group_destroy(same[1]));
}

/* The names of an unnamed world, and of its groups, also after its end. */
TEST(names_of_an_opened_world)
{
    td_store *store;
    td_group *world, *first, *second;
    CHECK_OK(td_hash_store_open(&store));
    CHECK_OK(td_group_open(store, 0, 1, NULL, &world));
    CHECK_CONTAINS(td_group_name(world), "world@");
    CHECK_OK(td_new_group(NULL, 0, &(td_group_options){.world = world}, &first));
    CHECK_OK(td_new_group(NULL, 0, &(td_group_options){.world = world}, &second));
    CHECK(strcmp(td_group_name(first), td_group_name(second)) != 0);
    CHECK_OK(td_group_destroy(world));
    CHECK_OK(td_store_close(store));
    CHECK_CONTAINS(td_group_name(first), "0@");
    CHECK_OK(td_group_destroy(first));
    CHECK_OK(td_group_destroy(second));
}
