/* Groups from creation to destruction: ranks that leave early, hundreds of groups, ranks that are threads, and
 * that nothing is left behind. */
#include "process_counts.h"
#include "runner.h"
#include "ways.h"

#include "base/clock.h"

#include <tandem/group.h>

#include <pthread.h>
#include <stdio.h>
#include <string.h>

/* ---- Leaving early --------------------------------------------------------------------------- */

/* The first rank, which has what the others need to begin, gives its part and goes. */
static void leave_early(const char *transport, const char *hosts)
{
    open_world(&(struct way){transport, hosts}, 0);
    int rank = td_test_rank(), last = td_test_size() - 1;
    td_group *given, *taken, *unused;
    int64_t value = rank == 0 ? 42 : -1, sum = -1, one = rank;
    CHECK_OK(td_new_group(NULL, 0, NULL, &given));
    CHECK_OK(td_new_group(NULL, 0, NULL, &taken));
    CHECK_OK(td_new_group(NULL, 0, NULL, &unused)); /* which is never used */
    if (rank)
        td__sleep_ns(300000000);
    CHECK_OK(td_group_broadcast(&value, 1, TD_I64, 0, given, NULL));
    if (rank == 0)
        td_group_destroy(given);
    CHECK_OK(td_group_reduce(&sum, &one, 1, TD_I64, last, TD_SUM, taken, NULL));
    CHECK_EQ(value, 42);
    if (rank == last)
        CHECK_EQ(sum, last * (last + 1) / 2);
    int64_t before = td__now_ns();
    CHECK_OK(td_destroy_process_group());
    CHECK_PROMPT(before);
}

RANKS(leaving_early, .ranks = 3)
{
    leave_early(NULL, NULL);
}

RANKS(leaving_early_tcp, .ranks = 4)
{
    leave_early("tcp", NULL);
}

RANKS(leaving_early_hosts, .ranks = 4)
{
    leave_early(NULL, "0011");
}

/* What was sent before leaving arrives, however slow the others are to look. */
static void leave_after(size_t count, const char *transport)
{
    open_world(&(struct way){transport, NULL}, 0);
    unsigned char *data = malloc(count);
    memset(data, td_test_rank() == 0 ? 7 : 0, count);
    CHECK_OK(td_group_barrier(NULL, NULL));
    if (td_test_rank() == 0)
        td__sleep_ns(700000000); /* the others sleep, and their state shows it */
    CHECK_OK(td_group_broadcast(data, count, TD_U8, 0, NULL, NULL));
    for (size_t i = 0; i < count; i++)
        CHECK_EQ(data[i], 7);
    free(data);
    CHECK_OK(td_destroy_process_group());
}

RANKS(leaving_after_a_broadcast, .ranks = 2)
{
    leave_after(100, NULL);
}

RANKS(leaving_after_a_broadcast_tcp, .ranks = 2)
{
    leave_after(200000, "tcp");
}

RANKS(leaving_after_a_large_broadcast_tcp, .ranks = 2)
{
    leave_after(20000000, "tcp");
}

/* ---- Many groups ----------------------------------------------------------------------------- */

static void check_sum(td_group *group, int ranks)
{
    int64_t one = 1, sum = 0;
    CHECK_OK(td_group_all_reduce(&sum, &one, 1, TD_I64, TD_SUM, group, NULL));
    CHECK_EQ(sum, ranks);
}

static void make_hundreds(const char *transport, int at_once)
{
    enum { MOST = 200 };
    td_group *groups[MOST];
    open_world(&(struct way){transport, NULL}, 0);
    check_sum(NULL, 3);
    struct counts before = {0};
    for (int round = 0; round < 4; round++) {
        for (int i = 0; i < at_once; i++)
            CHECK_OK(td_new_group(NULL, 0, NULL, &groups[i]));
        for (int i = 0; i < at_once; i++)
            check_sum(groups[i * 7 % at_once], 3);
        for (int i = 0; i < at_once; i++)
            td_group_destroy(groups[i]);
        CHECK_OK(td_group_barrier(NULL, NULL));
        if (round == 0)
            before = counts_now();
    }
    struct counts after = counts_now();
    CHECK_SOON(counts_now().threads <= before.threads); /* its entry goes after the join */
    /* What was not fetched by all when its group was destroyed stays for a while. */
    CHECK_SOON(counts_now().descriptors <= before.descriptors + 2);
    if (after.heap > before.heap + 100000)
        FAIL("%zu bytes, %zu before", after.heap, before.heap);
    CHECK_OK(td_destroy_process_group());
}

RANKS(hundreds_of_groups, .ranks = 3, .deadline_s = 60)
{
    make_hundreds(NULL, 199);
}

RANKS(hundreds_of_groups_tcp, .ranks = 3, .deadline_s = 60)
{
    make_hundreds("tcp", 99);
}

/* ---- Nothing grows --------------------------------------------------------------------------- */

static void work_for_long(const char *transport, int times)
{
    open_world(&(struct way){transport, NULL}, 0);
    float *x = td_alloc(sizeof(float) * 8192);
    memset(x, 0, sizeof(float) * 8192);
    struct counts before = {0};
    for (int i = 0; i < times; i++) {
        td_work *work = NULL;
        size_t count = i % 1000 ? 1 + (size_t)i % 16 : 8192;
        CHECK_OK(td_group_all_reduce(x, x, count, TD_F32, TD_MAX, NULL, i % 4 ? NULL : &work));
        if (work && i % 8)
            CHECK_OK(td_work_wait(work, 0));
        td_work_release(work);
        if (i == times / 4) {
            CHECK_OK(td_group_barrier(NULL, NULL));
            before = counts_now();
        }
    }
    CHECK_OK(td_group_barrier(NULL, NULL));
    struct counts after = counts_now();
    /* Less where the other rank has left already; two more where a thread sleeps over TCP for the first time. */
    CHECK(after.descriptors <= before.descriptors + 2);
    CHECK_SOON(counts_now().threads <= before.threads); /* its entry goes after the join */
    if (td_test_slowness() == 1 &&
        (after.heap > before.heap + 20000 || after.resident > before.resident + 1000000))
        FAIL("memory: %zu bytes after %zu, resident %zu after %zu", after.heap, before.heap,
             after.resident, before.resident);
    td_free(x);
    CHECK_OK(td_destroy_process_group());
}

RANKS(memory_does_not_grow, .ranks = 2, .deadline_s = 60)
{
    work_for_long(NULL, 200000 / td_test_slowness());
}

RANKS(memory_does_not_grow_tcp, .ranks = 2, .deadline_s = 60)
{
    work_for_long("tcp", 20000);
}

/* ---- Ranks that are threads ------------------------------------------------------------------ */

enum { SEATS = 4 };

struct seat {
    pthread_t thread;
    td_store *store;
    const td_group_options *options;
    int rank;
};

static void *take_seat(void *arg)
{
    const struct seat *seat = arg;
    td_group *group, *half;
    CHECK_OK(td_group_open(seat->store, seat->rank, SEATS, seat->options, &group));
    CHECK_EQ(td_get_rank(group), seat->rank);
    CHECK_EQ(td_get_world_size(group), SEATS);
    CHECK_OK(td_group_split(group, seat->rank % 2, 0, NULL, &half));
    for (int i = 0; i < 40; i++) {
        size_t count = i % 8 ? 10 : 20000;
        float *x = i % 2 ? td_alloc(count * sizeof *x) : malloc(count * sizeof *x);
        td_group *used = i % 4 == 3 ? half : group;
        td_work *work = NULL;
        for (size_t k = 0; k < count; k++)
            x[k] = (float)seat->rank;
        CHECK_OK(td_group_all_reduce(x, x, count, TD_F32, TD_SUM, used, i % 3 ? NULL : &work));
        if (work)
            CHECK_OK(td_work_wait(work, 0));
        td_work_release(work);
        for (size_t k = 0; k < count; k++)
            CHECK_EQ(x[k], used == group ? 6 : seat->rank % 2 ? 4 : 2);
        if (i % 2)
            td_free(x);
        else
            free(x);
    }
    if (seat->rank < 2)
        td_group_destroy(half);
    td_group_destroy(group); /* and what was made of it */
    return NULL;
}

static void run_threads(const td_group_options *options)
{
    struct seat seats[SEATS];
    td_store *store;
    struct counts before = {0};
    CHECK_OK(td_hash_store_open(&store));
    td_free(td_alloc(1)); /* its arena stays */
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < SEATS; i++) {
            seats[i] = (struct seat){.store = store, .options = options, .rank = i};
            CHECK_EQ(pthread_create(&seats[i].thread, NULL, take_seat, &seats[i]), 0);
        }
        for (int i = 0; i < SEATS; i++)
            pthread_join(seats[i].thread, NULL);
        if (round == 0)
            before = counts_now();
    }
    struct counts after = counts_now();
    CHECK_EQ(after.descriptors, before.descriptors);
    CHECK_SOON(counts_now().threads <= before.threads); /* its entry goes after the join */
    CHECK_OK(td_store_close(store));
}

/* Rank 0 has the memory of a group that rank 1 has not looked at yet, and leaves: neither does it wait for
 * that, nor is what it has sent on the group lost. */
RANKS(leaving_before_calls_were_compared, .ranks = 2, .deadline_s = 30)
{
    td_group *used, *unused;
    int value = 0;
    CHECK_OK(td_init_process_group(NULL));
    CHECK_OK(td_new_group(NULL, 0, NULL, &used));
    CHECK_OK(td_new_group(NULL, 0, NULL, &unused));
    if (td_test_rank() == 0) {
        value = 42;
        CHECK_OK(td_group_send(&value, 1, TD_I32, 1, 7, used, NULL));
    } else {
        CHECK_FAILS(td_group_recv(&value, 1, TD_I32, 0, 7, NULL, NULL), TD_ERR_PEER, "left");
        CHECK_OK(td_group_recv(&value, 1, TD_I32, 0, 7, used, NULL));
        CHECK_EQ(value, 42);
        CHECK_FAILS(td_group_recv(&value, 1, TD_I32, 0, 7, used, NULL), TD_ERR_PEER, "left");
        CHECK_FAILS(td_group_send(&value, 1, TD_I32, 0, 7, used, NULL), TD_ERR_PEER, "left");
        CHECK_FAILS(td_group_barrier(unused, NULL), TD_ERR_PEER, "left");
    }
    CHECK_OK(td_destroy_process_group());
}

TEST(ranks_that_are_threads)
{
    run_threads(NULL);
}

TEST(ranks_that_are_threads_tcp)
{
    run_threads(&(td_group_options){.backend = "tcp"});
}

TEST(opening_with_wrong_arguments)
{
    td_store *store;
    td_group *group;
    CHECK_OK(td_hash_store_open(&store));
    CHECK_FAILS(td_group_open(NULL, 0, 1, NULL, &group), TD_ERR_INVALID, "the store is NULL");
    CHECK_FAILS(td_group_open(store, 0, 1, NULL, NULL), TD_ERR_INVALID, "the result is NULL");
    CHECK_FAILS(td_group_open(store, 1, 1, NULL, &group), TD_ERR_INVALID, "rank 1 of 1");
    CHECK_FAILS(td_group_open(store, 0, 0, NULL, &group), TD_ERR_INVALID, "rank 0 of 0");
    CHECK_FAILS(td_group_open(store, 0, 1, &(td_group_options){.timeout_ms = -2}, &group),
                TD_ERR_INVALID, "-2 ms");
    CHECK_FAILS(td_group_open(store, 0, 1, &(td_group_options){.backend = "x"}, &group),
                TD_ERR_INVALID, "no backend \"x\"");
    CHECK_FAILS(td_group_open(store, 0, 2, &(td_group_options){.timeout_ms = 100}, &group),
                TD_ERR_TIMEOUT, "1");
    CHECK_OK(td_store_close(store));
}
