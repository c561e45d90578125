/* Ranks that are excluded: stopped, in an endless loop, by each other, while others shrink, and what they get when they
 * come back. */
#include "runner.h"
#include "ways.h"

#include "base/clock.h"
#include "os/process.h"

#include <tandem/group.h>
#include <tandem/rendezvous.h>

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static const struct way hosts = {.hosts = "abcd"};

static int pids[8];

static void begin(const struct way *way)
{
    int pid = (int)getpid();
    open_world(way, 0);
    CHECK_OK(td_group_all_gather(pids, &pid, 1, TD_I32, NULL, NULL));
    td_test_barrier();
}

static bool is_stopped(int rank)
{
    char state = td__process_state(pids[rank]);
    return state == 'T';
}

static bool has_ended(int rank)
{
    char state = td__process_state(pids[rank]);
    return !state || state == 'Z' || state == 'X';
}

/* Stopped, or, where another rank was faster, excluded and killed. */
static bool is_out(int rank)
{
    return is_stopped(rank) || has_ended(rank);
}

static _Noreturn void compute_without_end(void)
{
    for (volatile int i = 0;; i++)
        ;
}

/* The others go on; they learn who was excluded, by whom and why. */
static td_group *go_on(int members)
{
    td_group *rest;
    CHECK_OK(td_group_shrink(NULL, NULL, &rest));
    CHECK_EQ(td_get_world_size(rest), members);
    CHECK_EQ((int)sum_on(rest), members);
    return rest;
}

/* Each of the others is in another call. */
static void fail_to_call(int lost, const char *why)
{
    float x[4] = {0}, all[16];
    td_status status;
    int64_t before = td__now_ns();
    switch (td_test_rank() % 3) {
    case 0:
        status = td_group_recv(x, 4, TD_F32, lost, 7, NULL, NULL);
        break;
    case 1:
        status = td_group_all_gather(all, x, 4, TD_F32, NULL, NULL);
        break;
    default:
        status = td_group_recv(x, 4, TD_F32, TD_ANY_SOURCE, 7, NULL, NULL);
    }
    CHECK_EQ(status, TD_ERR_PEER);
    CHECK_CONTAINS(td_last_error(), why);
    CHECK_EQ(td_group_barrier(NULL, NULL), TD_ERR_PEER);
    CHECK_PROMPT(before);
}

/* ---- On one host ----------------------------------------------------------------------------- */

/* Rank 2 is stopped, or computes; rank 0 excludes it, and its process is gone when the others go on. */
static void exclude_here(bool stopped)
{
    static const char why[] = "was excluded by rank 0: it does not go on";
    int rank = td_test_rank();
    begin(&shm);
    if (rank == 2 && stopped)
        raise(SIGSTOP);
    if (rank == 2)
        compute_without_end();
    if (rank == 0) {
        if (stopped)
            CHECK_SOON(is_stopped(2));
        CHECK_OK(td_group_exclude(NULL, 2, "it does not go on"));
        CHECK_OK(td_group_exclude(NULL, 2, "once more"));
        CHECK_FAILS(td_group_barrier(NULL, NULL), TD_ERR_PEER, why);
    } else {
        fail_to_call(2, why);
    }
    td_group *rest = go_on(3);
    CHECK(has_ended(2));
    CHECK_OK(td_group_destroy(rest));
    CHECK_OK(td_destroy_process_group());
}

RANKS(a_stopped_rank, .ranks = 4, .may_die = 1 << 2)
{
    exclude_here(true);
}

RANKS(a_rank_in_an_endless_loop, .ranks = 4, .may_die = 1 << 2)
{
    exclude_here(false);
}

RANKS(one_of_two, .ranks = 2, .may_die = 1 << 0)
{
    begin(&shm);
    if (td_test_rank() == 0)
        compute_without_end();
    CHECK_OK(td_group_exclude(NULL, 0, NULL));
    CHECK_FAILS(td_group_barrier(NULL, NULL), TD_ERR_PEER, "was excluded by rank 1: it has given");
    go_on(1);
    CHECK(has_ended(0));
    CHECK_OK(td_destroy_process_group());
}

/* ---- On other hosts -------------------------------------------------------------------------- */

static void *recv_for_ever(void *arg)
{
    float x;
    *(td_status *)arg = td_group_recv(&x, 1, TD_F32, 0, 3, NULL, NULL);
    return NULL;
}

/* The excluded rank comes back: its calls fail, those under way too, and it cannot exclude the others. */
static void come_back(void)
{
    pthread_t thread;
    td_status received = TD_OK;
    td_group *rest;
    CHECK(!pthread_create(&thread, NULL, recv_for_ever, &received));
    td__sleep_ns(20000000);
    raise(SIGSTOP);
    CHECK(!pthread_join(thread, NULL));
    CHECK(received == TD_ERR_PEER || received == TD_ERR_STATE);
    CHECK(td_group_barrier(NULL, NULL));
    CHECK_FAILS(td_group_shrink(NULL, NULL, &rest), TD_ERR_STATE,
                "this rank, 2, was excluded by rank 1: it does not go on");
    CHECK_FAILS(td_group_exclude(NULL, 0, "it is silent"), TD_ERR_STATE, "was excluded by rank 1");
}

static void exclude_elsewhere(const struct way *way)
{
    static const char why[] = "was excluded by rank 1: it does not go on";
    int rank = td_test_rank();
    begin(way);
    if (rank == 2) {
        come_back();
        CHECK_OK(td_destroy_process_group());
        return;
    }
    CHECK_SOON(is_stopped(2));
    if (rank == 1) {
        CHECK_OK(td_group_exclude(NULL, 2, "it does not go on"));
        CHECK_FAILS(td_group_barrier(NULL, NULL), TD_ERR_PEER, why);
    } else {
        fail_to_call(2, why);
    }
    td_group *rest = go_on(3);
    if (rank == 0)
        td_test_kill(2, SIGCONT);
    for (int i = 0; i < 100; i++)
        CHECK_EQ((int)sum_on(rest), 3);
    CHECK_OK(td_destroy_process_group());
}

RANKS(a_stopped_rank_tcp, .ranks = 4)
{
    exclude_elsewhere(&tcp);
}

RANKS(a_stopped_rank_on_another_host, .ranks = 4)
{
    exclude_elsewhere(&hosts);
}

/* Two hosts of two ranks: rank 2 is ended by rank 3, which learns it from rank 0. */
RANKS(a_stopped_rank_with_another_on_its_host, .ranks = 4, .may_die = 1 << 2)
{
    begin(&mixed);
    if (td_test_rank() == 2)
        raise(SIGSTOP);
    if (td_test_rank() == 0) {
        CHECK_SOON(is_stopped(2));
        CHECK_OK(td_group_exclude(NULL, 2, "it does not go on"));
    } else {
        fail_to_call(2, "was excluded by rank 0: it does not go on");
    }
    td_group *rest = go_on(3);
    if (td_test_rank() == 3)
        CHECK(has_ended(2));
    CHECK_OK(td_group_destroy(rest));
    CHECK_OK(td_destroy_process_group());
}

/* A program that computes is told, although it makes no call. */
RANKS(a_computing_rank_tcp, .ranks = 3)
{
    begin(&tcp);
    if (td_test_rank() == 2) {
        td_group *rest;
        td_test_barrier();
        int64_t before = td__now_ns();
        CHECK(td_group_barrier(NULL, NULL));
        CHECK_CONTAINS(td_last_error(), "was excluded by rank 0: its numbers are wrong");
        CHECK_FAILS(td_group_shrink(NULL, NULL, &rest), TD_ERR_STATE, "by rank 0: its numbers");
        CHECK_PROMPT(before);
    } else {
        if (td_test_rank() == 0)
            CHECK_OK(td_group_exclude(NULL, 2, "its numbers are wrong"));
        CHECK_FAILS(td_group_barrier(NULL, NULL), TD_ERR_PEER, "its numbers are wrong");
        go_on(2);
        td_test_barrier();
    }
    CHECK_OK(td_destroy_process_group());
}

/* ---- Together with shrinking ----------------------------------------------------------------- */

/* The others wait in td_group_shrink() for the rank that is stopped when it is excluded; the one that excludes it need not
 * be the first. */
static void exclude_while_shrinking(const struct way *way, int by)
{
    td_group *rest;
    begin(way);
    if (td_test_rank() == 2) {
        raise(SIGSTOP);
        CHECK_FAILS(td_group_shrink(NULL, NULL, &rest), TD_ERR_STATE, "was excluded by rank");
        CHECK_OK(td_destroy_process_group());
        return;
    }
    CHECK_SOON(is_out(2));
    if (td_test_rank() == by) {
        td__sleep_ns(100000000);
        CHECK_OK(td_group_exclude(NULL, 2, "it does not shrink"));
    }
    rest = go_on(3);
    if (td_test_rank() == by)
        td_test_kill(2, SIGCONT);
    CHECK_EQ((int)sum_on(rest), 3);
    CHECK_OK(td_destroy_process_group());
}

RANKS(while_others_shrink, .ranks = 4, .may_die = 1 << 2)
{
    exclude_while_shrinking(&shm, 0);
}

RANKS(while_others_shrink_tcp, .ranks = 4)
{
    exclude_while_shrinking(&tcp, 3);
}

static void *exclude_two(void *arg)
{
    (void)arg;
    td__sleep_ns(50000000);
    CHECK_OK(td_group_exclude(NULL, 2, "it does not shrink"));
    return NULL;
}

/* Another thread of a rank that shrinks already; and that of a leader that is stopped. */
RANKS(by_another_thread, .ranks = 4, .may_die = 1 << 0 | 1 << 2)
{
    pthread_t thread;
    begin(&shm);
    if (td_test_rank() == 0 || td_test_rank() == 2)
        raise(SIGSTOP);
    CHECK_SOON(is_out(0) && is_out(2));
    if (td_test_rank() == 3) {
        CHECK(!pthread_create(&thread, NULL, exclude_two, NULL));
        CHECK_OK(td_group_exclude(NULL, 0, "it leads nobody"));
    }
    td_group *rest = go_on(2);
    CHECK(has_ended(0) && has_ended(2));
    if (td_test_rank() == 3)
        CHECK(!pthread_join(thread, NULL));
    CHECK_EQ((int)sum_on(rest), 2);
    CHECK_OK(td_destroy_process_group());
}

/* The rank that excludes another one is killed meanwhile. Whatever it has told the others, these agree. */
static void die_while_excluding(const struct way *way, int64_t after_ns)
{
    td_group *rest;
    float value = 1;
    begin(way);
    if (td_test_rank() == 3)
        raise(SIGSTOP);
    CHECK_SOON(is_out(3));
    if (td_test_rank() == 0) {
        pid_t own = getpid();
        if (!fork()) {
            td__sleep_ns(after_ns);
            kill(own, SIGKILL);
            _exit(0);
        }
        CHECK_OK(td_group_exclude(NULL, 3, "it is stopped"));
        for (;;)
            pause();
    }
    CHECK(td_group_all_reduce(&value, &value, 1, TD_F32, TD_SUM, NULL, NULL));
    td_status status = td_group_shrink(NULL, &(td_group_options){.timeout_ms = 300}, &rest);
    if (status == TD_ERR_TIMEOUT) { /* nobody was told: rank 3 is still to be excluded */
        if (td_test_rank() == 1)
            CHECK_OK(td_group_exclude(NULL, 3, "it is still stopped"));
        CHECK_OK(td_group_shrink(NULL, NULL, &rest));
    } else {
        CHECK_OK(status);
    }
    if (td_get_world_size(rest) == 3) /* rank 0 was there still */
        CHECK_OK(td_group_shrink(rest, NULL, &rest));
    CHECK_EQ(td_get_world_size(rest), 2);
    CHECK_EQ((int)sum_on(rest), 2);
    if (td_test_rank() == 1)
        td_test_kill(3, SIGKILL);
    CHECK_OK(td_destroy_process_group());
}

#define DIES_WHILE_EXCLUDING(name, way, after_us)                                                  \
    RANKS(name, .ranks = 4, .may_die = 1 << 0 | 1 << 3)                                            \
    {                                                                                              \
        die_while_excluding(way, (after_us)*1000ll);                                               \
    }

DIES_WHILE_EXCLUDING(excluding_and_dying_at_once, &shm, 0)
DIES_WHILE_EXCLUDING(excluding_and_dying, &shm, 700)
DIES_WHILE_EXCLUDING(excluding_and_dying_later, &shm, 3000)
DIES_WHILE_EXCLUDING(excluding_and_dying_tcp, &tcp, 1500)

/* ---- Each other ------------------------------------------------------------------------------ */

/* Ranks 0 and 1 exclude each other: at least one of them is out, and the others go on together. */
static void exclude_each_other(const struct way *way)
{
    td_group *rest;
    int rank = td_test_rank();
    begin(way);
    if (rank < 2)
        td_group_exclude(NULL, 1 - rank, "it is the other one");
    else
        CHECK_FAILS(td_group_barrier(NULL, NULL), TD_ERR_PEER, "was excluded by rank");
    td_status status = td_group_shrink(NULL, NULL, &rest);
    while (!status && td_group_barrier(rest, NULL)) {
        td_group *former = rest;
        status = td_group_shrink(former, NULL, &rest);
    }
    if (rank >= 2)
        CHECK_OK(status);
    if (status) {
        CHECK_EQ(status, TD_ERR_STATE);
        CHECK_CONTAINS(td_last_error(), "was excluded by rank");
    } else {
        int size = td_get_world_size(rest);
        CHECK(size >= (rank < 2 ? 1 : 2) && size <= td_test_size() - 1);
        CHECK_EQ((int)sum_on(rest), size);
    }
    CHECK_OK(td_destroy_process_group());
}

RANKS(each_other, .ranks = 4, .may_die = 3)
{
    exclude_each_other(&shm);
}

RANKS(each_other_tcp, .ranks = 4)
{
    exclude_each_other(&tcp);
}

/* ---- Silence --------------------------------------------------------------------------------- */

static int64_t silence_of(int rank)
{
    int64_t silence = -1;
    CHECK_OK(td_group_silence(NULL, rank, &silence));
    return silence;
}

/* Rank 2 computes, is stopped, and goes on. */
static void be_silent(const struct way *way)
{
    td_group *pair;
    begin(way);
    CHECK_OK(td_new_group((int[]){0, 1}, 2, NULL, &pair));
    CHECK_EQ(silence_of(td_test_rank()), 0);
    td_test_barrier();
    if (td_test_rank() == 2) {
        for (int64_t until = td__now_ns() + 100000000; td__now_ns() < until;)
            ;
        td_test_barrier();
    } else {
        CHECK_SOON(silence_of(2) == 0); /* a busy machine may answer late now and then */
        td_test_barrier();
        if (td_test_rank() == 0)
            td_test_kill(2, SIGSTOP);
        CHECK_SOON(silence_of(2) >= 300);
        CHECK(is_stopped(2));
        CHECK_SOON(silence_of(1 - td_test_rank()) == 0);
        sum_on(pair);
        if (td_test_rank() == 0)
            td_test_kill(2, SIGCONT);
        CHECK_SOON(silence_of(2) < 300);
    }
    CHECK_EQ((int)sum_on(NULL), 3);
    CHECK_OK(td_destroy_process_group());
}

RANKS(silent, .ranks = 3)
{
    be_silent(&shm);
}

RANKS(silent_on_another_host, .ranks = 3)
{
    be_silent(&hosts);
}

/* With a heartbeat of a second a stopped rank is found within 1.3 s, by a caller that asks every 50 ms. */
static void find_silent_in_time(const struct way *way)
{
    setenv("TANDEM_HEARTBEAT", "1", 1);
    begin(way);
    if (td_test_rank() == 1) {
        raise(SIGSTOP);
        return;
    }
    silence_of(1);
    CHECK_SOON(is_stopped(1));
    int64_t stopped = td__now_ns();
    while (silence_of(1) < 1000)
        td__sleep_ns(50000000);
    int64_t found = td__now_ns() - stopped;
    printf("found after %.2f s\n", (double)found / 1e9);
    CHECK(found > 500000000); /* this process may have been late to see the stop */
    CHECK_OK(td_group_exclude(NULL, 1, "it is silent"));
    go_on(1);
    td_test_kill(1, SIGKILL);
    CHECK_OK(td_destroy_process_group());
}

RANKS(found_silent, .ranks = 2, .may_die = 2)
{
    find_silent_in_time(&shm);
}

RANKS(found_silent_on_another_host, .ranks = 2, .may_die = 2)
{
    find_silent_in_time(&hosts);
}

/* ---- After the world has ended --------------------------------------------------------------- */

/* The others have left the world when the excluded rank comes back: it does not take that for the end of the job. */
RANKS(coming_back_too_late, .ranks = 3)
{
    td_store *store;
    td_group *world, *rest, *next;
    int rank = td_test_rank();
    take_way(&tcp);
    CHECK_OK(td_rendezvous_store(NULL, 0, &store));
    CHECK_OK(td_group_open(store, rank, 3, NULL, &world));
    pids[rank] = (int)getpid();
    CHECK_OK(td_group_all_gather(pids, &pids[rank], 1, TD_I32, world, NULL));
    if (rank == 2) {
        raise(SIGSTOP);
        CHECK_FAILS(td_group_shrink(world, NULL, &rest), TD_ERR_STATE,
                    "this rank, 2, was excluded by rank 0: it is stopped");
        CHECK_FAILS(td_group_admit(world, NULL, &rest), TD_ERR_STATE, "was excluded by rank 0");
        CHECK_FAILS(td_group_join(store, NULL, &rest), TD_ERR_STATE, "this process was excluded");
        CHECK_OK(td_group_destroy(world));
    } else {
        CHECK_SOON(is_stopped(2));
        CHECK_OK(td_group_open(store, rank, 2, &(td_group_options){.name = "next"}, &next));
        if (rank == 0)
            CHECK_OK(td_group_exclude(world, 2, "it is stopped"));
        CHECK_OK(td_group_shrink(world, NULL, &rest));
        CHECK_OK(td_group_destroy(world));
        CHECK_EQ((int)sum_on(next), 2);
        if (rank == 0)
            td_test_kill(2, SIGCONT);
        CHECK_SOON(td__process_state(pids[2]) != 'T');
        CHECK_SOON(has_ended(2)); /* its requests need an endpoint that refuses it */
        CHECK_OK(td_group_destroy(next));
    }
    CHECK_OK(td_store_close(store));
}

/* ---- Arguments ------------------------------------------------------------------------------- */

TEST(excluding_alone)
{
    CHECK_FAILS(td_group_exclude(NULL, 0, ""), TD_ERR_STATE, "td_group_exclude");
    CHECK_OK(td_init_process_group(NULL));
    CHECK_FAILS(td_group_exclude(NULL, 0, ""), TD_ERR_INVALID, "rank 0 is this rank");
    CHECK_FAILS(td_group_exclude(NULL, 1, ""), TD_ERR_INVALID, "rank 1 is out of range");
    CHECK_FAILS(td_group_exclude(NULL, -1, ""), TD_ERR_INVALID, "rank -1 is out of range");
    CHECK_OK(td_destroy_process_group());
}

RANKS(excluding_one_that_has_left, .ranks = 2)
{
    begin(&shm);
    if (td_test_rank() == 0) {
        CHECK_SOON(td_group_barrier(NULL, NULL) == TD_ERR_PEER);
        CHECK_FAILS(td_group_exclude(NULL, 1, "late"), TD_ERR_PEER, "has left");
    }
    CHECK_OK(td_destroy_process_group());
}

/* Ranks that are threads of one process cannot be ended one by one. */
static void *be_a_thread(void *arg)
{
    td_group *group, *rest;
    CHECK_OK(td_group_open(arg, 1, 2, NULL, &group));
    CHECK_OK(td_group_shrink(group, NULL, &rest));
    CHECK_OK(td_group_destroy(group));
    return NULL;
}

TEST(excluding_a_thread)
{
    pthread_t thread;
    td_store *store;
    td_group *group, *rest;
    CHECK_OK(td_hash_store_open(&store));
    CHECK(!pthread_create(&thread, NULL, be_a_thread, store));
    CHECK_OK(td_group_open(store, 0, 2, NULL, &group));
    CHECK_FAILS(td_group_exclude(group, 1, "it is a thread"), TD_ERR_UNSUPPORTED,
                "both are in the same process");
    CHECK_OK(td_group_shrink(group, NULL, &rest));
    CHECK_OK(td_group_destroy(rest));
    CHECK(!pthread_join(thread, NULL));
    CHECK_OK(td_group_destroy(group));
    td_store_close(store);
}
