/* Deaths while newcomers are admitted: of a newcomer at each stage, and of members. And how long recovery takes. */
#include "forks.h"
#include "runner.h"
#include "ways.h"

#include "base/clock.h"
#include "store/store_ops.h"

#include <tandem/group.h>
#include <tandem/rendezvous.h>

#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

static td_store *open_store(void)
{
    td_store *store;
    CHECK_OK(td_rendezvous_store(NULL, 0, &store));
    return store;
}

static td_status sum_of_ones(td_group *group, int *sum)
{
    float x = 1;
    td_status status = td_group_all_reduce(&x, &x, 1, TD_F32, TD_SUM, group, NULL);
    *sum = (int)x;
    return status;
}

/* ---- A store that ends its process before its nth request ------------------------------------- */

static const struct td__store_ops *real;
static int requests_left;

static void count_request(void)
{
    if (requests_left-- == 0)
        kill(getpid(), SIGKILL);
}

static td_status counted_set(td_store *store, const struct td__span *keys,
                             const struct td__span *values, size_t count, td__deadline deadline)
{
    count_request();
    return real->set(store, keys, values, count, deadline);
}

static td_status counted_append(td_store *store, struct td__span key, struct td__span value,
                                td__deadline deadline)
{
    count_request();
    return real->append(store, key, value, deadline);
}

static td_status counted_get(td_store *store, const struct td__span *keys, size_t count,
                             td__deadline deadline, td_bytes *values)
{
    count_request();
    return real->get(store, keys, count, deadline, values);
}

static td_status counted_check(td_store *store, const struct td__span *keys, size_t count,
                               td__deadline deadline, bool *all_exist)
{
    count_request();
    return real->check(store, keys, count, deadline, all_exist);
}

static td_status counted_delete(td_store *store, struct td__span key, td__deadline deadline,
                                bool *deleted)
{
    count_request();
    return real->delete_key(store, key, deadline, deleted);
}

static td_store *open_deadly_store(int requests)
{
    static struct td__store_ops ops;
    td_store *store = open_store();
    real = store->ops;
    ops = *real;
    ops.set = counted_set;
    ops.append = counted_append;
    ops.get = counted_get;
    ops.check = counted_check;
    ops.delete_key = counted_delete;
    requests_left = requests;
    store->ops = &ops;
    return store;
}

/* ---- Newcomers that die ---------------------------------------------------------------------- */

enum { STAGES = 14, MEMBERS = 2 };

struct stages {
    const struct way *way;
    atomic_bool *done;
    int rank;
    int stage;
};

/* Admits whoever asks, and shrinks when one dies, until the parent says that it is over. */
static void be_member(void *arg)
{
    const struct stages *stages = arg;
    td_store *store = open_store();
    td_group *world, *group, *grown;
    int sum, over, admitted = 0;
    take_way(stages->way);
    CHECK_OK(td_group_open(store, stages->rank, MEMBERS, NULL, &world));
    for (group = world;;) {
        td_status status = td_group_admit(group, NULL, &grown);
        if (!status && grown) {
            CHECK_OK(td_group_destroy(world));
            world = group = grown;
            admitted++;
        }
        while (sum_of_ones(group, &sum))
            CHECK_OK(td_group_shrink(group, NULL, &group));
        CHECK_EQ(sum, td_get_world_size(group));
        if (sum != MEMBERS)
            continue;
        over = atomic_load(stages->done);
        if (td_group_broadcast(&over, 1, TD_I32, td_get_global_rank(group, 0), group, NULL) || over)
            break;
        td__sleep_ns(1000000);
    }
    CHECK(admitted > 0);
    CHECK_OK(td_group_destroy(world));
    CHECK_OK(td_store_close(store));
}

static void be_newcomer(void *arg)
{
    const struct stages *stages = arg;
    td_group *world;
    td_store *store = open_deadly_store(stages->stage);
    take_way(stages->way);
    CHECK_OK(td_group_join(store, NULL, &world));
    kill(getpid(), SIGKILL); /* it is in: a death like others */
}

/* One after another; each does a request more than the one before. */
static void die_at_each_stage(const struct way *way)
{
    struct stages stages = {.way = way, .done = fork_shared(sizeof(atomic_bool))};
    pid_t members[MEMBERS];
    for (stages.rank = 0; stages.rank < MEMBERS; stages.rank++)
        members[stages.rank] = fork_start(be_member, &stages);
    for (stages.stage = 0; stages.stage < STAGES; stages.stage++) {
        int status;
        pid_t newcomer = fork();
        CHECK(newcomer >= 0);
        if (!newcomer) {
            be_newcomer(&stages);
            _exit(0);
        }
        CHECK(waitpid(newcomer, &status, 0) == newcomer);
        CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    }
    atomic_store(stages.done, true);
    for (int r = 0; r < MEMBERS; r++)
        fork_join(members[r]);
}

RANKS(a_newcomer_dies_at_each_stage, .ranks = 1, .deadline_s = 60)
{
    die_at_each_stage(&shm);
}

RANKS(a_newcomer_dies_at_each_stage_tcp, .ranks = 1, .deadline_s = 60)
{
    die_at_each_stage(&tcp);
}

/* ---- Members that die ------------------------------------------------------------------------ */

static void strike(int64_t after_ns)
{
    pid_t own = getpid();
    if (!fork()) {
        td__sleep_ns(after_ns);
        kill(own, SIGKILL);
        _exit(0);
    }
}

/* Until the three that are left of four members, and the newcomer, are together. */
static void come_together(td_group *group, bool member)
{
    td_group *grown;
    for (int sum = 0; sum != 4;) {
        td_status status = sum_of_ones(group, &sum);
        if (!status && sum == 3 && member) { /* the newcomer is not in, or asks again */
            status = td_group_admit(group, NULL, &grown);
            if (!status && grown)
                group = grown;
        }
        if (status) {
            sum = 0;
            CHECK_OK(td_group_shrink(group, NULL, &group));
        }
        td__sleep_ns(1000000);
    }
}

static void die_while_admitting(const struct way *way, int victim, int64_t after_ns)
{
    int rank = td_test_rank();
    td_store *store = open_store();
    td_group *group, *grown;
    take_way(way);
    if (rank < 4) {
        int count = 0;
        CHECK_OK(td_group_open(store, rank, 4, NULL, &group));
        CHECK_SOON(!td_group_waiting(group, &count) && count == 1);
        CHECK_OK(td_group_barrier(group, NULL));
        if (rank == victim)
            strike(after_ns);
        td_status status = td_group_admit(group, NULL, &grown);
        if (!status && grown)
            group = grown;
        while (rank == victim)
            pause();
    } else {
        CHECK_OK(td_group_join(store, NULL, &group));
    }
    come_together(group, rank < 4);
}

#define DIES_WHILE_ADMITTING(name, way, victim, after_us)                                          \
    RANKS(name, .ranks = 5, .may_die = 1 << (victim), .deadline_s = 40)                            \
    {                                                                                              \
        die_while_admitting(way, victim, (after_us)*1000ll);                                       \
    }

DIES_WHILE_ADMITTING(the_first_dies_at_once, &shm, 0, 0)
DIES_WHILE_ADMITTING(the_first_dies_soon, &shm, 0, 1500)
DIES_WHILE_ADMITTING(the_first_dies_later, &shm, 0, 4000)
DIES_WHILE_ADMITTING(another_dies_soon, &shm, 2, 1500)
DIES_WHILE_ADMITTING(another_dies_later, &shm, 2, 4000)
DIES_WHILE_ADMITTING(the_first_dies_tcp, &tcp, 0, 3000)
DIES_WHILE_ADMITTING(another_dies_tcp, &tcp, 1, 3000)

/* Two at once, and all but one. */
static void die_together(const struct way *way, int survivors)
{
    td_group *rest;
    int sum;
    open_world(way, 0);
    sum_on(NULL);
    td_test_barrier();
    if (td_test_rank() >= survivors)
        raise(SIGKILL);
    while (!sum_of_ones(NULL, &sum))
        ;
    CHECK_OK(td_group_shrink(NULL, NULL, &rest));
    while (td_get_world_size(rest) > survivors || sum_of_ones(rest, &sum))
        CHECK_OK(td_group_shrink(rest, NULL, &rest));
    CHECK_EQ(td_get_world_size(rest), survivors);
    CHECK_OK(td_destroy_process_group());
}

RANKS(two_at_once, .ranks = 4, .may_die = 0xc)
{
    die_together(&shm, 2);
}

RANKS(all_but_one, .ranks = 4, .may_die = 0xe)
{
    die_together(&shm, 1);
}

RANKS(all_but_one_tcp, .ranks = 4, .may_die = 0xe)
{
    die_together(&tcp, 1);
}

/* ---- How long it takes ----------------------------------------------------------------------- */

enum { RANKS_HERE = 4, MOST_ROUNDS = 100 };

struct times {
    atomic_int ready;                                           /* ranks that are in this round */
    atomic_int pids[RANKS_HERE];                                /* of the world, by rank */
    _Atomic int64_t killed;                                     /* when */
    _Atomic int64_t shrunk[MOST_ROUNDS], admitted[MOST_ROUNDS]; /* the last one of the round */
    atomic_int round;
};

static void note_last(_Atomic int64_t *last, int64_t from)
{
    int64_t now = td__now_ns() - from, before = atomic_load(last);
    while (now > before && !atomic_compare_exchange_weak(last, &before, now))
        ;
}

struct life {
    struct times *times;
    int rank; /* -1: a newcomer */
};

static void live(void *arg)
{
    const struct life *life = arg;
    struct times *times = life->times;
    td_store *store = open_store();
    td_group *world, *rest, *grown;
    int sum;
    if (life->rank >= 0)
        CHECK_OK(td_group_open(store, life->rank, RANKS_HERE, NULL, &world));
    else
        CHECK_OK(td_group_join(store, NULL, &world));
    for (;;) {
        CHECK_OK(sum_of_ones(world, &sum));
        CHECK_EQ(sum, RANKS_HERE);
        atomic_store(&times->pids[td_get_rank(world)], (int)getpid());
        atomic_fetch_add(&times->ready, 1);
        while (!sum_of_ones(world, &sum))
            ;
        int round = atomic_load(&times->round);
        CHECK_OK(td_group_shrink(world, NULL, &rest));
        note_last(&times->shrunk[round], atomic_load(&times->killed));
        do
            CHECK_OK(td_group_admit(rest, NULL, &grown));
        while (!grown);
        note_last(&times->admitted[round], atomic_load(&times->killed));
        CHECK_OK(td_group_destroy(world));
        world = grown;
    }
}

static int compare(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return x < y ? -1 : x > y;
}

static void print_times(const char *what, const _Atomic int64_t *values, int count)
{
    int64_t sorted[MOST_ROUNDS];
    for (int i = 0; i < count; i++)
        sorted[i] = atomic_load(&values[i]);
    qsort(sorted, (size_t)count, sizeof *sorted, compare);
    printf("%s: median %.2f ms, 90%% %.2f ms, slowest %.2f ms (%d rounds)\n", what,
           (double)sorted[count / 2] / 1e6, (double)sorted[count * 9 / 10] / 1e6,
           (double)sorted[count - 1] / 1e6, count);
}

/* One of four ranks is killed while the others are in an all_reduce; a process that waits already takes its place. The
 * times of the last rank, from the kill. With --long they are printed. */
RANKS(recovery_times, .ranks = 1, .deadline_s = 60)
{
    struct life life = {.times = fork_shared(sizeof *life.times)};
    struct times *times = life.times;
    int rounds = td_test_is_long() ? MOST_ROUNDS : 3;
    for (life.rank = 0; life.rank < RANKS_HERE; life.rank++)
        fork_start(live, &life);
    life.rank = -1;
    for (int round = 0; round < rounds; round++) {
        CHECK_SOON(atomic_load(&times->ready) == RANKS_HERE);
        atomic_store(&times->ready, 0);
        atomic_store(&times->round, round);
        fork_start(live, &life);
        td__sleep_ns(100000000); /* until it waits; the members try again otherwise */
        int pid = atomic_load(&times->pids[round % RANKS_HERE]);
        atomic_store(&times->killed, td__now_ns());
        fork_kill(pid, SIGKILL);
    }
    CHECK_SOON(atomic_load(&times->ready) == RANKS_HERE);
    for (int r = 0; r < RANKS_HERE; r++)
        kill(atomic_load(&times->pids[r]), SIGSTOP);
    for (int r = 0; r < RANKS_HERE; r++)
        fork_kill(atomic_load(&times->pids[r]), SIGKILL);
    for (int i = 0; i < rounds; i++)
        CHECK(times->shrunk[i] > 0 && times->admitted[i] > 0);
    if (td_test_is_long()) {
        print_times("SIGKILL to the last td_group_shrink()", times->shrunk, rounds);
        print_times("SIGKILL to the last td_group_admit()", times->admitted, rounds);
    }
}
