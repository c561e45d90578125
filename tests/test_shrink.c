/* Going on after a death: groups that shrink, and that grow again. */
#include "runner.h"
#include "ways.h"

#include "base/clock.h"

#include <tandem/group.h>

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

/* ---- Shrinking ------------------------------------------------------------------------------- */

static td_group *shrink_after(int dying)
{
    int rank = td_test_rank(), size = td_test_size();
    td_group *rest;
    sum_on(NULL);
    td_test_barrier();
    if (rank == dying)
        raise(SIGKILL);
    float value = 1;
    td_status status = TD_OK;
    for (int i = 0; i < 2 && !status; i++)
        status = td_group_all_reduce(&value, &value, 1, TD_F32, TD_SUM, NULL, NULL);
    CHECK_EQ(status, TD_ERR_PEER);
    CHECK_OK(td_group_shrink(NULL, NULL, &rest));
    CHECK_EQ(td_get_world_size(rest), size - 1);
    CHECK_EQ(td_get_rank(rest), rank - (rank > dying));
    CHECK_EQ(td_get_global_rank(rest, td_get_rank(rest)), rank);
    return rest;
}

static void shrink(const struct way *way, int dying)
{
    open_world(way, 0);
    td_group *rest = shrink_after(dying);
    int n = td_test_size() - 1;
    float *x = td_alloc(1 << 20);
    for (int i = 0; i < 1 << 18; i++)
        x[i] = 1;
    for (int i = 0; i < 3; i++) {
        CHECK_EQ((int)sum_on(rest), n);
        CHECK_OK(td_group_all_reduce(x, x, 1 << 18, TD_F32, TD_AVG, rest, NULL));
    }
    for (int i = 0; i < 1 << 18; i++)
        CHECK(x[i] == 1);
    CHECK_FAILS(td_group_barrier(NULL, NULL), td_group_barrier(NULL, NULL), "rank");
    td_free(x);
    td_group_destroy(rest);
    CHECK_OK(td_destroy_process_group());
}

RANKS(shrunk, .ranks = 4, .may_die = 1 << 2)
{
    shrink(&shm, 2);
}

RANKS(shrunk_without_the_first, .ranks = 4, .may_die = 1 << 0)
{
    shrink(&shm, 0);
}

RANKS(shrunk_tcp, .ranks = 4, .may_die = 1 << 3)
{
    shrink(&tcp, 3);
}

RANKS(shrunk_tcp_without_the_first, .ranks = 3, .may_die = 1 << 0)
{
    shrink(&tcp, 0);
}

RANKS(shrunk_on_hosts, .ranks = 6, .may_die = 1 << 2)
{
    shrink(&mixed, 2);
}

RANKS(shrunk_to_one, .ranks = 2, .may_die = 1 << 0)
{
    shrink(&shm, 0);
}

/* The others are not done with the group when rank 1 begins to shrink it. `dying`: -1: no rank. */
static void shrink_meanwhile(const struct way *way, int dying)
{
    int rank = td_test_rank(), size = td_test_size();
    td_group *group, *rest;
    float x = 0;
    open_world(way, 0);
    CHECK_OK(td_new_group(NULL, 0, NULL, &group));
    sum_on(group);
    td_test_barrier();
    if (rank == dying)
        raise(SIGKILL);
    td_status status = TD_OK;
    if (rank == 0)
        status = td_group_recv(&x, 1, TD_F32, 2, 7, group, NULL);
    else if (rank > 1)
        status = td_group_barrier(group, NULL);
    else
        td__sleep_ns(300000000);
    if (rank != 1) {
        CHECK_EQ(status, TD_ERR_PEER);
        CHECK_CONTAINS(td_last_error(), dying == 3 ? "rank 3 " : " has called td_group_shrink()");
    }
    if (rank == 0 && dying == 3)
        CHECK_CONTAINS(td_last_error(), "was killed by SIGKILL; rank ");
    CHECK_OK(td_group_shrink(group, NULL, &rest));
    CHECK_FAILS(td_group_barrier(group, NULL), TD_ERR_PEER, "rank");
    CHECK_FAILS(td_group_send(&x, 1, TD_F32, rank ? 0 : 1, 1, group, NULL), TD_ERR_PEER, "shrink");
    CHECK_EQ((int)sum_on(rest), size - (dying >= 0));
    CHECK_OK(td_destroy_process_group());
}

RANKS(shrunk_meanwhile, .ranks = 3)
{
    shrink_meanwhile(&shm, -1);
}

RANKS(shrunk_meanwhile_tcp, .ranks = 3)
{
    shrink_meanwhile(&tcp, -1);
}

RANKS(shrunk_meanwhile_on_hosts, .ranks = 4)
{
    shrink_meanwhile(&mixed, -1);
}

RANKS(shrunk_meanwhile_after_a_death, .ranks = 4, .may_die = 1 << 3)
{
    shrink_meanwhile(&shm, 3);
}

RANKS(shrunk_meanwhile_after_a_death_tcp, .ranks = 4, .may_die = 1 << 3)
{
    shrink_meanwhile(&tcp, 3);
}

RANKS(shrunk_meanwhile_after_a_death_on_hosts, .ranks = 4, .may_die = 1 << 3)
{
    shrink_meanwhile(&mixed, 3);
}

/* Another one dies at any moment of the agreement; the leader, too. */
static void shrink_with_more_deaths(const struct way *way, int second, int64_t after_ns)
{
    int rank = td_test_rank(), size = td_test_size();
    td_group *rest, *last;
    open_world(way, 0);
    sum_on(NULL);
    td_test_barrier();
    if (rank == size - 1)
        raise(SIGKILL);
    float value = 1;
    td_status status = TD_OK;
    for (int i = 0; i < 2 && !status; i++)
        status = td_group_all_reduce(&value, &value, 1, TD_F32, TD_SUM, NULL, NULL);
    CHECK(status);
    if (rank == second) {
        pid_t parent = getpid();
        if (!fork()) { /* strikes in the middle */
            td__sleep_ns(after_ns);
            kill(parent, SIGKILL);
            _exit(0);
        }
    }
    CHECK_OK(td_group_shrink(NULL, NULL, &rest));
    status = TD_OK;
    for (int i = 0; i < 200 && !status; i++) {
        value = 1;
        status = td_group_all_reduce(&value, &value, 1, TD_F32, TD_SUM, rest, NULL);
        CHECK(status || (int)value == td_get_world_size(rest));
        td__sleep_ns(1000000);
    }
    last = rest;
    if (status)
        CHECK_OK(td_group_shrink(rest, NULL, &last));
    CHECK_EQ(td_get_world_size(last), size - 2);
    CHECK_EQ((int)sum_on(last), size - 2);
    CHECK_OK(td_destroy_process_group());
}

#define MORE_DEATHS(name, way, second, after_us)                                                   \
    RANKS(name, .ranks = 5, .may_die = 1 << 4 | 1 << (second))                                     \
    {                                                                                              \
        shrink_with_more_deaths(way, second, (after_us)*1000ll);                                   \
    }

MORE_DEATHS(leader_dies_at_once, &shm, 0, 0)
MORE_DEATHS(leader_dies_soon, &shm, 0, 1000)
MORE_DEATHS(leader_dies_later, &shm, 0, 4000)
MORE_DEATHS(another_dies_soon, &shm, 2, 1000)
MORE_DEATHS(leader_dies_tcp, &tcp, 0, 2000)
MORE_DEATHS(another_dies_tcp, &tcp, 3, 3000)

/* A survivor that does not come is named; when it comes, the next attempt goes well. */
static void do_not_shrink(int absent, const char *leader_says)
{
    td_group *rest;
    int size = td_test_size();
    open_world(&shm, 0);
    td_test_barrier(); /* the ranks that call it do so at the same time */
    if (td_test_rank() < size - absent)
        CHECK_FAILS(td_group_shrink(NULL, &(td_group_options){.timeout_ms = 2000}, &rest),
                    TD_ERR_TIMEOUT,
                    td_test_rank() ? "rank 0, which counts the survivors, has not finished within "
                                     "2000 ms: it, or another rank that is alive, has not called "
                                     "td_group_shrink()"
                                   : leader_says);
    td_test_barrier();
    CHECK_OK(td_group_shrink(NULL, NULL, &rest));
    CHECK_EQ(td_get_world_size(rest), size);
    CHECK_EQ((int)sum_on(rest), size);
    CHECK_OK(td_destroy_process_group());
}

RANKS(a_survivor_that_does_not_shrink, .ranks = 3)
{
    do_not_shrink(1, "rank 2 is alive, but has not called td_group_shrink() within 2000 ms");
}

RANKS(survivors_that_do_not_shrink, .ranks = 4)
{
    do_not_shrink(2, "ranks 2, 3 are alive, but have not called td_group_shrink() within 2000 ms");
}

TEST(shrinking_alone)
{
    td_group *rest;
    CHECK_FAILS(td_group_shrink(NULL, NULL, &rest), TD_ERR_STATE, "td_group_shrink");
    CHECK_FAILS(td_group_abort(NULL), TD_ERR_STATE, "td_group_abort");
    CHECK_FAILS(td_group_grow(NULL, NULL, &rest), TD_ERR_STATE, "td_group_grow");
    CHECK_OK(td_init_process_group(NULL));
    CHECK_FAILS(td_group_shrink(NULL, NULL, NULL), TD_ERR_INVALID, "the result is NULL");
    CHECK_FAILS(td_group_shrink(NULL, &(td_group_options){.timeout_ms = -2}, &rest), TD_ERR_INVALID,
                "-2 ms");
    CHECK_OK(td_group_shrink(NULL, NULL, &rest));
    CHECK_EQ((int)sum_on(rest), 1);
    CHECK_OK(td_destroy_process_group());
}

/* ---- Growing --------------------------------------------------------------------------------- */

/* A world that has grown has a name of its own, the same on all ranks, those that have come back included. */
static void check_grown_name(void)
{
    char name[64] = "", all[8][64];
    snprintf(name, sizeof name, "%s", td_group_name(NULL));
    CHECK_CONTAINS(name, "world@");
    CHECK_OK(td_group_all_gather(all, name, sizeof name, TD_U8, NULL, NULL));
    for (int r = 0; r < td_get_world_size(NULL); r++)
        CHECK_STR(all[r], name);
}

static void live_through(const struct way *way, int dying, int times, int *turn)
{
    int n = td_test_size(), rank = td_test_rank();
    td_group *grown = NULL;
    open_world(way, 0);
    while (*turn < times) {
        int victim = (dying + *turn) % n;
        ++*turn;
        CHECK_EQ((int)sum_on(NULL), n);
        float value = 1;
        for (int r = 0; r < n && rank == victim; r++) /* not before all are through */
            if (r != rank)
                CHECK_OK(td_group_recv(&value, 1, TD_F32, r, 0, NULL, NULL));
        if (rank == victim)
            raise(SIGKILL);
        CHECK_OK(td_group_send(&value, 1, TD_F32, victim, 0, NULL, NULL));
        td_group *rest, *former = grown;
        td_status status = TD_OK;
        for (int k = 0; k < 2 && !status; k++)
            status = td_group_all_reduce(&value, &value, 1, TD_F32, TD_SUM, NULL, NULL);
        CHECK(status);
        CHECK_OK(td_group_shrink(NULL, NULL, &rest));
        CHECK_EQ(td_get_world_size(rest), n - 1);
        CHECK_OK(td_group_grow(rest, NULL, &grown));
        CHECK_EQ((int)sum_on(rest), n - 1); /* still there */
        CHECK_EQ(td_get_world_size(grown), n);
        CHECK_OK(td_group_destroy(rest));
        CHECK_OK(td_group_destroy(former)); /* a world no more, but the caller's */
    }
    check_grown_name();
    for (int i = 0; i < 3; i++)
        CHECK_EQ((int)sum_on(NULL), n);
    CHECK_EQ(td_get_rank(NULL), rank);
    CHECK_OK(td_destroy_process_group());
    if (grown)
        CHECK_FAILS(td_group_barrier(grown, NULL), TD_ERR_STATE, "has ended");
    CHECK_OK(td_group_destroy(grown));
}

/* As a launcher would, starts the rank again when it has been killed; how far it had come is in memory
 * that it shares with its successor. */
static void grow(const struct way *way, int dying, int times)
{
    int status;
    int *turn = mmap(NULL, sizeof *turn, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(turn != MAP_FAILED);
    do {
        pid_t pid = fork();
        if (!pid) {
            live_through(way, dying, times, turn);
            exit(0);
        }
        CHECK(waitpid(pid, &status, 0) == pid);
    } while (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    CHECK_EQ(status, 0);
}

RANKS(grown, .ranks = 3)
{
    grow(&shm, 1, 1);
}

RANKS(grown_with_a_new_first, .ranks = 3)
{
    grow(&shm, 0, 1);
}

RANKS(grown_tcp, .ranks = 3)
{
    grow(&tcp, 2, 1);
}

RANKS(grown_on_hosts, .ranks = 4)
{
    grow(&mixed, 1, 1);
}

/* Each dies once, the one after the other. */
RANKS(grown_again_and_again, .ranks = 3)
{
    grow(&shm, 0, 3);
}

RANKS(a_rank_that_does_not_come_back, .ranks = 3, .may_die = 1 << 1)
{
    td_group *grown;
    open_world(&shm, 0);
    td_group *rest = shrink_after(1);
    CHECK_FAILS(td_group_grow(rest, &(td_group_options){.timeout_ms = 300}, &grown), TD_ERR_TIMEOUT,
                "rank 1 has not rejoined within 300 ms");
    CHECK_EQ((int)sum_on(rest), 2);
    CHECK_OK(td_destroy_process_group());
}
