/* Processes that join a running job: one and several, over and over, and deaths on the way. */
#include "forks.h"
#include "runner.h"
#include "ways.h"

#include "base/clock.h"
#include "store/store_ops.h"

#include <tandem/group.h>
#include <tandem/rendezvous.h>

#include <dirent.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static const struct way hosts = {.hosts = "abcdef"};

static td_store *open_store(void)
{
    td_store *store;
    CHECK_OK(td_rendezvous_store(NULL, 0, &store));
    return store;
}

static void await_newcomers(td_group *group, int wanted)
{
    int count = 0;
    CHECK_SOON(!td_group_waiting(group, &count) && count >= wanted);
    CHECK_EQ(count, wanted);
}

/* Members wait for `newcomers`; they must not look at the store before rank 0 has done so. */
static td_group *admit(td_group *group, int newcomers)
{
    td_group *grown;
    int members = td_get_world_size(group), rank = td_get_rank(group);
    if (rank == 0)
        await_newcomers(group, newcomers);
    CHECK_OK(td_group_admit(group, NULL, &grown));
    CHECK(grown);
    CHECK_EQ(td_get_world_size(grown), members + newcomers);
    CHECK_EQ(td_get_rank(grown), rank);
    CHECK_EQ((int)sum_on(grown), members + newcomers);
    return grown;
}

/* ---- Joining --------------------------------------------------------------------------------- */

/* Of the ranks of the test the first `members` have a world; the others join it. */
static void join_members(const struct way *way, int members)
{
    int rank = td_test_rank(), size = td_test_size();
    td_store *store = open_store();
    td_group *group, *grown;
    take_way(way);
    if (rank < members) {
        CHECK_OK(td_group_open(store, rank, members, NULL, &group));
        grown = group;
        CHECK_OK(td_group_admit(group, NULL, &grown));
        CHECK(!grown);
        td_test_barrier();
        grown = admit(group, size - members);
        CHECK_EQ((int)sum_on(group), members);
        CHECK_OK(td_group_destroy(group));
        CHECK_FAILS(td_group_grow(grown, NULL, &group), TD_ERR_STATE, "td_group_admit()");
    } else {
        td_test_barrier();
        CHECK_OK(td_group_join(store, NULL, &grown));
        CHECK_EQ(td_get_world_size(grown), size);
        CHECK(td_get_rank(grown) >= members);
        CHECK_EQ((int)sum_on(grown), size);
    }
    int ranks[8] = {0}, own = td_get_rank(grown);
    CHECK_OK(td_group_all_gather(ranks, &own, 1, TD_I32, grown, NULL));
    for (int i = 0; i < size; i++)
        CHECK_EQ(ranks[i], i);
    CHECK_CONTAINS(td_group_name(grown), "world@");
    CHECK_OK(td_group_barrier(grown, NULL));
    CHECK_OK(td_group_destroy(grown));
    CHECK_OK(td_store_close(store));
}

RANKS(one_joins, .ranks = 3)
{
    join_members(&shm, 2);
}

RANKS(one_joins_one, .ranks = 2)
{
    join_members(&shm, 1);
}

RANKS(three_join, .ranks = 5)
{
    join_members(&shm, 2);
}

RANKS(two_join_tcp, .ranks = 4)
{
    join_members(&tcp, 2);
}

RANKS(two_join_on_hosts, .ranks = 4)
{
    join_members(&mixed, 3);
}

RANKS(one_joins_on_another_host, .ranks = 3)
{
    join_members(&hosts, 2);
}

/* The world of td_init_process_group(): a rank dies, and a process that the launcher starts takes its place. */
RANKS(the_world_goes_on, .ranks = 4, .may_die = 1 << 0)
{
    int rank = td_test_rank();
    td_group *rest;
    if (rank == 3) { /* starts later */
        td_test_barrier();
        unsetenv("RANK");
        unsetenv("WORLD_SIZE");
        setenv("TANDEM_JOIN", "1", 1);
        CHECK_OK(td_init_process_group(NULL));
        CHECK_EQ(td_get_rank(NULL), 2);
        CHECK_EQ(td_get_local_rank(), 3);
        CHECK_EQ((int)sum_on(NULL), 3);
        CHECK_EQ((int)sum_on(NULL), 3);
    } else {
        setenv("WORLD_SIZE", "3", 1);
        CHECK_OK(td_init_process_group(NULL));
        sum_on(NULL);
        td_test_barrier();
        if (rank == 0)
            raise(SIGKILL);
        CHECK_FAILS(td_group_barrier(NULL, NULL), TD_ERR_PEER, "rank 0");
        CHECK_OK(td_group_shrink(NULL, NULL, &rest));
        admit(rest, 1);
        CHECK_EQ(td_get_rank(NULL), rank - 1);
        CHECK_EQ((int)sum_on(NULL), 3);
        CHECK_OK(td_group_destroy(rest));
    }
    CHECK_EQ(td_get_world_size(NULL), 3);
    CHECK_EQ(td_get_local_size(), 3);
    CHECK_OK(td_destroy_process_group());
}

/* Named, with options that the newcomer takes from the members; another name does not meet. */
RANKS(a_name, .ranks = 2)
{
    td_store *store = open_store();
    td_group *group, *grown;
    if (td_test_rank() == 0) {
        CHECK_OK(td_group_open(store, 0, 1,
                               &(td_group_options){.name = "training", .backend = "tcp"}, &group));
        grown = admit(group, 1);
        CHECK_OK(td_group_destroy(group));
    } else {
        CHECK_FAILS(td_group_join(store, &(td_group_options){.timeout_ms = 30}, &grown),
                    TD_ERR_TIMEOUT, "not admitted within 30 ms");
        CHECK_OK(td_group_join(store, &(td_group_options){.name = "training"}, &grown));
        CHECK_EQ((int)sum_on(grown), 2);
    }
    CHECK_STR(td_group_name(grown), "training");
    CHECK_STR(td_get_backend(grown), "tcp");
    CHECK_OK(td_group_destroy(grown));
    CHECK_OK(td_store_close(store));
}

TEST(joining_arguments)
{
    td_store *store;
    td_group *group;
    int count;
    CHECK_OK(td_hash_store_open(&store));
    CHECK_FAILS(td_group_join(NULL, NULL, &group), TD_ERR_INVALID, "the store is NULL");
    CHECK_FAILS(td_group_join(store, NULL, NULL), TD_ERR_INVALID, "the result is NULL");
    CHECK_FAILS(td_group_join(store, &(td_group_options){.timeout_ms = TD_NOW}, &group),
                TD_ERR_INVALID, "TD_NOW");
    CHECK_FAILS(td_group_admit(NULL, NULL, &group), TD_ERR_STATE, "td_group_admit");
    CHECK_FAILS(td_group_waiting(NULL, &count), TD_ERR_STATE, "td_group_waiting");
    CHECK_OK(td_group_open(store, 0, 1, NULL, &group));
    CHECK_FAILS(td_group_admit(group, NULL, NULL), TD_ERR_INVALID, "the result is NULL");
    CHECK_FAILS(td_group_waiting(group, NULL), TD_ERR_INVALID, "the result is NULL");
    CHECK_OK(td_group_destroy(group));
    CHECK_OK(td_store_close(store));
}

/* ---- Over and over --------------------------------------------------------------------------- */

static int count_entries(const char *path)
{
    DIR *directory = opendir(path);
    int count = 0;
    CHECK(directory);
    while (readdir(directory))
        count++;
    closedir(directory);
    return count;
}

/* Those in use: an arena that malloc() reserves for a thread counts once it is used. */
static long resident_pages(void)
{
    long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    CHECK(file && fscanf(file, "%*d %ld", &pages) == 1);
    fclose(file);
    return pages;
}

/* One of the ranks leaves in each cycle, and joins again; the others shrink and admit it. */
RANKS(shrunk_and_admitted_again_and_again, .ranks = 3, .deadline_s = 60)
{
    enum { CYCLES = 200, WARM = 50 };
    int fds = 0, threads = 0, rank = td_test_rank(), size = td_test_size();
    long pages = 0;
    td_store *store = open_store();
    td_group *world, *rest, *grown;
    CHECK_OK(td_group_open(store, rank, size, NULL, &world));
    for (int i = 0; i < CYCLES; i++) {
        bool leaves = td_get_rank(world) == i % size;
        CHECK_EQ((int)sum_on(world), size);
        td_test_barrier(); /* a shrink ends what others are still in */
        if (leaves) {
            CHECK_OK(td_group_destroy(world));
            CHECK_OK(td_group_join(store, NULL, &world));
        } else {
            CHECK_OK(td_group_shrink(world, NULL, &rest));
            while (td_get_world_size(rest) == size) { /* it had not left yet */
                td_group *larger = rest;
                CHECK(td_group_barrier(rest, NULL));
                CHECK_OK(td_group_shrink(larger, NULL, &rest));
            }
            if (td_get_rank(rest) == 0)
                await_newcomers(rest, 1);
            CHECK_OK(td_group_admit(rest, NULL, &grown));
            CHECK(grown);
            CHECK_OK(td_group_destroy(world));
            world = grown;
        }
        CHECK_EQ((int)sum_on(world), size);
        if (i == WARM || i == CYCLES - 1) {
            td_test_barrier(); /* what others close late */
            td__sleep_ns(20000000);
        }
        if (i == WARM) {
            fds = count_entries("/proc/self/fd");
            threads = count_entries("/proc/self/task");
            pages = resident_pages();
        }
        if (i == WARM || i == CYCLES - 1)
            td_test_barrier();
    }
    CHECK(count_entries("/proc/self/fd") <= fds + 4);
    CHECK(count_entries("/proc/self/task") <= threads);
    if (td_test_slowness() == 1) /* a sanitizer keeps what was freed */
        CHECK(resident_pages() <= pages + 256);
    CHECK_OK(td_group_destroy(world));
    CHECK_OK(td_store_close(store));
}
