/* Many worlds in one process: what each of them costs, and that they do not disturb each other. */
#include "process_counts.h"
#include "runner.h"
#include "thread_sanitizer.h"

#include "base/clock.h"

#include <tandem/group.h>

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>

enum {
    WORLDS = 10,
    TIMES = 1000,
    FIRST_THREADS = 2 + UNDER_TSAN, /* with one of the sanitizer's own */
};

static void check_sum(td_group *group, int expected)
{
    int64_t sum = td_get_rank(group);
    CHECK_OK(td_group_all_reduce(&sum, &sum, 1, TD_I64, TD_SUM, group, NULL));
    CHECK_EQ(sum, expected);
}

static td_group *open_named(td_store *store, const char *name, int rank, int size,
                            const char *backend)
{
    td_group *group;
    td_group_options options = {.name = name, .backend = backend};
    CHECK_OK(td_group_open(store, rank, size, &options, &group));
    return group;
}

static td_store *open_store(void)
{
    char path[300];
    td_store *store;
    snprintf(path, sizeof path, "%s/store", td_test_temp_dir());
    CHECK_OK(td_file_store_open(path, &store));
    return store;
}

/* ---- What a world costs ---------------------------------------------------------------------- */

/* Without the heap: under ThreadSanitizer mallinfo() fails on other threads than the first. */
static struct counts count(void)
{
    return (struct counts){.descriptors = count_entries("/proc/self/fd"),
                           .threads = count_entries("/proc/self/task")};
}

/* Connections that were only needed to open the world may close a moment later. */
static void check_cost(struct counts before, int threads, int descriptors)
{
    td__deadline end = td__deadline_in_ms(5000 * td_test_slowness());
    for (;;) {
        struct counts now = count();
        if (now.threads <= before.threads + threads &&
            now.descriptors <= before.descriptors + descriptors)
            return;
        if (td__deadline_passed(end))
            FAIL("%d threads and %d descriptors more, instead of %d and %d",
                 now.threads - before.threads, now.descriptors - before.descriptors, threads,
                 descriptors);
        td__sleep_ns(1000000);
    }
}

/* Opens worlds of two ranks: the first one costs FIRST_THREADS threads and `first` descriptors, each other one
 * `further` descriptors. */
static void open_worlds(td_store *store, const char *transport, int first, int further,
                        td_group *worlds[WORLDS])
{
    for (int i = 0; i < WORLDS; i++) {
        char name[32];
        snprintf(name, sizeof name, "world %d", i);
        struct counts before = count();
        worlds[i] = open_named(store, name, td_test_rank(), 2, transport);
        if (!transport)
            check_sum(worlds[i], 1);
        td_test_barrier();
        check_cost(before, i ? 0 : FIRST_THREADS, i ? further : first);
        td_test_barrier();
    }
}

static void close_worlds(td_store *store, td_group *const worlds[WORLDS])
{
    for (int i = 0; i < WORLDS; i++)
        CHECK_OK(td_group_destroy(worlds[i]));
    CHECK_OK(td_store_close(store));
}

/* A world of two neighbours: the control memory of its group, and nothing else, stays open. A worker thread is
 * started by the first call that does not wait. */
RANKS(a_further_world_costs_no_thread, .ranks = 2)
{
    td_group *worlds[WORLDS];
    td_store *store = open_store();
    open_worlds(store, NULL, 9, 1, worlds);
    td_work *work;
    int64_t sum = 1;
    struct counts before = count();
    CHECK_OK(td_group_all_reduce(&sum, &sum, 1, TD_I64, TD_SUM, worlds[0], &work));
    CHECK_OK(td_work_wait(work, 0));
    td_work_release(work);
    CHECK(count().threads > before.threads);
    close_worlds(store, worlds);
}

/* A lifeline to the other rank, and one from it. */
RANKS(a_further_world_costs_no_thread_tcp, .ranks = 2)
{
    td_group *worlds[WORLDS];
    td_store *store = open_store();
    open_worlds(store, "tcp", 10, 2, worlds);
    close_worlds(store, worlds);
}

TEST(a_world_of_one_rank_costs_nothing)
{
    td_store *store;
    CHECK_OK(td_hash_store_open(&store));
    struct counts before = count();
    td_group *group = open_named(store, "alone", 0, 1, NULL);
    check_sum(group, 0);
    struct counts after = count();
    CHECK_EQ(after.threads, before.threads);
    CHECK_EQ(after.descriptors, before.descriptors);
    CHECK_OK(td_group_destroy(group));
    CHECK_OK(td_store_close(store));
}

struct opener {
    pthread_t thread;
    td_store *store;
    int rank;
};

static void *open_and_close(void *arg)
{
    struct opener *opener = arg;
    int times = TIMES / td_test_slowness();
    struct counts early = {0};
    td_group *kept = open_named(opener->store, "kept", opener->rank, 2, NULL);
    for (int i = 0; i < times; i++) {
        td_group *group = open_named(opener->store, "again", opener->rank, 2, i % 2 ? "tcp" : NULL);
        if (i % 50 == 0) {
            check_sum(group, 1);
            check_sum(kept, 1);
        }
        CHECK_OK(td_group_destroy(group));
        if (i == 9 || i == times - 1) { /* where the two are alone with the other world */
            CHECK_OK(td_group_barrier(kept, NULL));
            if (i == 9)
                early = count();
            else if (opener->rank == 0)
                check_cost(early, 0, 0);
            CHECK_OK(td_group_barrier(kept, NULL));
        }
    }
    CHECK_OK(td_group_destroy(kept));
    return NULL;
}

/* Both as the only worlds of the process, and beside one that stays. */
TEST(worlds_leave_nothing_behind, .deadline_s = 100)
{
    struct opener openers[2];
    td_store *store;
    CHECK_OK(td_hash_store_open(&store));
    td_free(td_alloc(1)); /* its arena stays */
    struct counts before = {0};
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < 2; i++) {
            openers[i] = (struct opener){.store = store, .rank = i};
            CHECK_EQ(pthread_create(&openers[i].thread, NULL, open_and_close, &openers[i]), 0);
        }
        for (int i = 0; i < 2; i++)
            pthread_join(openers[i].thread, NULL);
        if (round == 0)
            before = count();
    }
    CHECK_EQ(count().descriptors, before.descriptors);
    CHECK_SOON(count().threads <= before.threads); /* its entry goes after the join */
    CHECK_OK(td_store_close(store));
}

/* ---- One world and another ------------------------------------------------------------------- */

/* Rank 1 leaves one world, and works on in the other. */
static void leave_one_world(const char *backend)
{
    int rank = td_test_rank(), value = 0;
    td_store *store = open_store();
    td_group *left = open_named(store, "left", rank, 3, backend);
    td_group *kept = open_named(store, "kept", rank, 3, backend);
    check_sum(left, 3);
    check_sum(kept, 3);
    if (rank == 1)
        CHECK_OK(td_group_destroy(left));
    check_sum(kept, 3);
    if (rank != 1) {
        CHECK_FAILS(td_group_recv(&value, 1, TD_I32, 1, 7, left, NULL), TD_ERR_PEER, "left");
        CHECK_FAILS(td_group_send(&value, 1, TD_I32, 1, 7, left, NULL), TD_ERR_PEER, "left");
        CHECK_FAILS(td_group_barrier(left, NULL), TD_ERR_PEER, "rank 1");
    }
    check_sum(kept, 3);
    if (rank != 1)
        td_group_destroy(left);
    check_sum(kept, 3);
    CHECK_OK(td_group_destroy(kept));
    CHECK_OK(td_store_close(store));
}

RANKS(leaving_one_world_of_two, .ranks = 3)
{
    leave_one_world(NULL);
}

RANKS(leaving_one_world_of_two_tcp, .ranks = 3)
{
    leave_one_world("tcp");
}

static void die_in_all_worlds(const char *backend)
{
    enum { SOME = 3 };
    td_group *worlds[SOME];
    td_store *store = open_store();
    for (int i = 0; i < SOME; i++) {
        char name[32];
        snprintf(name, sizeof name, "world %d", i);
        worlds[i] = open_named(store, name, td_test_rank(), 3, backend);
        check_sum(worlds[i], 3);
    }
    td_test_barrier();
    if (td_test_rank() == 2)
        raise(SIGKILL);
    for (int i = 0; i < SOME; i++) {
        CHECK_FAILS(td_group_barrier(worlds[i], NULL), TD_ERR_PEER, "rank 2");
        CHECK_CONTAINS(td_last_error(), "SIGKILL");
    }
    for (int i = 0; i < SOME; i++)
        td_group_destroy(worlds[i]);
    CHECK_OK(td_store_close(store));
}

RANKS(a_death_ends_all_its_worlds, .ranks = 3, .may_die = 1 << 2)
{
    die_in_all_worlds(NULL);
}

RANKS(a_death_ends_all_its_worlds_tcp, .ranks = 3, .may_die = 1 << 2)
{
    die_in_all_worlds("tcp");
}
