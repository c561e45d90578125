/* Deaths, delays, aborts, and going on afterwards. */
#include "runner.h"
#include "ways.h"

#include "base/clock.h"

#include <tandem/group.h>

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

static float sum_on(td_group *group)
{
    float value = 1;
    CHECK_OK(td_group_all_reduce(&value, &value, 1, TD_F32, TD_SUM, group, NULL));
    return value;
}

/* ---- Deaths ---------------------------------------------------------------------------------- */

/* Each of the survivors makes another kind of call; all learn who it was, and how it ended. */
static void die(const struct way *way, void (*end)(void), const char *how)
{
    float x[4] = {0}, all[16];
    td_group *others;
    int rank = td_test_rank();
    open_world(way, 0);
    CHECK_OK(td_new_group((int[]){0, 1, 3}, 3, NULL, &others));
    sum_on(NULL);
    td_test_barrier(); /* else who is late finds it dead in this call already */
    if (rank == 2)
        end();
    int64_t before = td__now_ns();
    td_status status;
    switch (rank) {
    case 0:
        status = td_group_recv(x, 4, TD_F32, 2, 7, NULL, NULL);
        break;
    case 1:
        status = td_group_recv(x, 4, TD_F32, TD_ANY_SOURCE, 7, NULL, NULL);
        break;
    default:
        status = td_group_all_gather(all, x, 4, TD_F32, NULL, NULL);
    }
    CHECK_FAILS(status, TD_ERR_PEER, "rank 2");
    CHECK_CONTAINS(td_last_error(), how);
    /* Later calls too, and whether they need the dead one or not. */
    CHECK_FAILS(td_group_broadcast(x, 4, TD_F32, rank, NULL, NULL), TD_ERR_PEER, "rank 2");
    CHECK_SOON(td_group_send(x, 4, TD_F32, 2, 0, NULL, NULL) == TD_ERR_PEER);
    CHECK_CONTAINS(td_last_error(), "rank 2");
    CHECK_PROMPT(before);
    CHECK_EQ((int)sum_on(others), 3);
    CHECK_OK(td_destroy_process_group());
}

static void be_killed(void)
{
    raise(SIGKILL);
}

static void exit_badly(void)
{
    _exit(3);
}

static void exit_in_passing(void)
{
    exit(0);
}

RANKS(killed, .ranks = 4, .may_die = 1 << 2)
{
    die(&shm, be_killed, "was killed by SIGKILL");
}

RANKS(killed_tcp, .ranks = 4, .may_die = 1 << 2)
{
    die(&tcp, be_killed, "was killed by SIGKILL");
}

RANKS(killed_on_another_host, .ranks = 4, .may_die = 1 << 2)
{
    die(&mixed, be_killed, "");
}

RANKS(exits, .ranks = 4, .may_die = 1 << 2)
{
    die(&shm, exit_badly, "exited with code 3 without leaving the group");
}

RANKS(exits_without_leaving, .ranks = 4, .may_die = 1 << 2)
{
    die(&tcp, exit_in_passing, "exited with code 0 without leaving the group");
}

/* ---- Delays ---------------------------------------------------------------------------------- */

static void be_late(const struct way *way)
{
    int rank = td_test_rank();
    float x = 0;
    td_work *work;
    open_world(way, 0);
    sum_on(NULL);
    CHECK_OK(td_group_barrier(NULL, NULL));
    if (rank == 1) {
        td_test_barrier();
        CHECK_OK(td_group_barrier(NULL, NULL));
    } else {
        CHECK_OK(td_group_barrier(NULL, &work));
        CHECK_FAILS(td_work_wait(work, 300), TD_ERR_TIMEOUT, "not complete after 300 ms");
        CHECK_CONTAINS(td_last_error(), "ranks 0, 2 have joined; rank 1 finished barrier #2");
        CHECK_CONTAINS(td_last_error(), "and is in no call");
        td_test_barrier();
        CHECK_OK(td_work_wait(work, 0));
        td_work_release(work);
    }
    /* A message: what the other one does instead. */
    if (rank == 0) {
        CHECK_OK(td_set_call_timeout(300));
        CHECK_FAILS(td_group_recv(&x, 1, TD_F32, 1, 9, NULL, NULL), TD_ERR_TIMEOUT,
                    "rank 1 is in ");
        CHECK_OK(td_set_call_timeout(0));
    }
    CHECK_OK(td_group_barrier(NULL, NULL));
    /* A collective. */
    if (rank != 1) {
        CHECK_OK(td_set_call_timeout(300));
        CHECK_FAILS(td_group_all_reduce(&x, &x, 1, TD_F32, TD_SUM, NULL, NULL), TD_ERR_TIMEOUT,
                    "ranks 0, 2 have joined; rank 1 finished barrier #4");
    }
    td_test_barrier();
    /* The late one may still find all it needs; then it is told how it was when the others gave up. */
    td_status status = TD_OK;
    for (int i = 0; i < 3 && !status; i++)
        status = td_group_all_reduce(&x, &x, 1, TD_F32, TD_SUM, NULL, NULL);
    CHECK_FAILS(status, TD_ERR_TIMEOUT, "ranks 0, 2 have joined; rank 1 finished barrier #4");
    td_test_barrier();
    CHECK_OK(td_destroy_process_group());
}

RANKS(late, .ranks = 3)
{
    be_late(&shm);
}

RANKS(late_tcp, .ranks = 3)
{
    be_late(&tcp);
}

RANKS(late_on_another_host, .ranks = 3)
{
    be_late(&mixed);
}

RANKS(stopped, .ranks = 3, .may_die = 1 << 1)
{
    open_world(&shm, 0);
    sum_on(NULL);
    td_test_barrier();
    if (td_test_rank() == 1) {
        raise(SIGSTOP);
    } else {
        CHECK_OK(td_set_call_timeout(500));
        CHECK_FAILS(td_group_barrier(NULL, NULL), TD_ERR_TIMEOUT,
                    td_test_rank() ? "rank 1 " : "rank 1 is stopped");
    }
    if (td_test_rank() == 0)
        td_test_kill(1, SIGKILL);
    CHECK_OK(td_destroy_process_group());
}

static char warnings[4096];
static pthread_mutex_t warnings_lock = PTHREAD_MUTEX_INITIALIZER;

static void keep_warning(td_log_level level, const char *line, void *arg)
{
    (void)arg;
    pthread_mutex_lock(&warnings_lock);
    size_t length = strlen(warnings);
    if (level == TD_LOG_WARN)
        snprintf(warnings + length, sizeof warnings - length, "%s\n", line);
    pthread_mutex_unlock(&warnings_lock);
}

static bool was_warned(const char *part)
{
    pthread_mutex_lock(&warnings_lock);
    bool found = strstr(warnings, part);
    pthread_mutex_unlock(&warnings_lock);
    return found;
}

/* Only one of those who wait says so, and it goes on. */
RANKS(warning_of_what_takes_long, .ranks = 3)
{
    setenv("TANDEM_STALL_WARN", "1", 1);
    td_log_set_sink(keep_warning, NULL);
    open_world(&shm, 0);
    if (td_test_rank() == 2) {
        td__sleep_ns(2500000000ll);
        CHECK(!warnings[0]);
    }
    CHECK_OK(td_group_barrier(NULL, NULL));
    if (td_test_rank() == 0) {
        CHECK(was_warned(
            "barrier #1 on group \"world\" is not done after 1 s; ranks 0, 1 have joined; "
            "rank 2 has called nothing on this group, and is in no call"));
        CHECK(!was_warned("after 4 s"));
    } else if (td_test_rank() == 1) {
        CHECK(!warnings[0]);
    }
    CHECK_OK(td_destroy_process_group());
    td_log_set_sink(NULL, NULL);
}

TEST(variables_that_make_no_sense)
{
    setenv("TANDEM_STALL_WARN", "soon", 1);
    CHECK_FAILS(td_init_process_group(NULL), TD_ERR_INVALID, "TANDEM_STALL_WARN is \"soon\"");
    unsetenv("TANDEM_STALL_WARN");
    setenv("TANDEM_HEARTBEAT", "0", 1);
    CHECK_FAILS(td_init_process_group(NULL), TD_ERR_INVALID, "TANDEM_HEARTBEAT is \"0\"");
}

/* ---- Aborts ---------------------------------------------------------------------------------- */

/* Everybody waits in another way, and for nobody who will come. */
static void abort_all(const struct way *way)
{
    int rank = td_test_rank();
    float x = 0;
    td_group *group;
    td_work *work;
    open_world(way, 0);
    CHECK_OK(td_new_group(NULL, 0, NULL, &group));
    sum_on(group);
    td_status status = TD_OK;
    switch (rank) {
    case 0:
        status = td_group_barrier(group, NULL);
        break;
    case 1:
        status = td_group_recv(&x, 1, TD_F32, 3, 1, group, NULL);
        break;
    case 2:
        CHECK_OK(td_group_recv(&x, 1, TD_F32, TD_ANY_SOURCE, 1, group, &work));
        status = td_work_wait(work, 0);
        td_work_release(work);
        break;
    default:
        td__sleep_ns(300000000);
        CHECK_OK(td_group_abort(group));
        status = td_group_barrier(group, NULL);
    }
    CHECK_FAILS(status, TD_ERR_ABORTED, "was aborted by rank 3");
    CHECK_FAILS(td_group_barrier(group, NULL), TD_ERR_ABORTED, "was aborted by rank 3");
    CHECK_FAILS(td_group_send(&x, 1, TD_F32, (rank + 1) % 4, 1, group, NULL), TD_ERR_ABORTED,
                "was aborted by rank 3");
    CHECK_EQ((int)sum_on(NULL), 4); /* others are as good as before */
    td_group_destroy(group);
    CHECK_OK(td_destroy_process_group());
}

RANKS(aborted, .ranks = 4)
{
    abort_all(&shm);
}

RANKS(aborted_tcp, .ranks = 4)
{
    abort_all(&tcp);
}

RANKS(aborted_on_hosts, .ranks = 4)
{
    abort_all(&mixed);
}

/* The first rank has the memory of the group, and never makes it. */
RANKS(aborted_before_it_is_made, .ranks = 3)
{
    td_group *group;
    open_world(&shm, 0);
    if (td_test_rank()) {
        CHECK_OK(td_new_group(NULL, 0, NULL, &group));
        if (td_test_rank() == 2) {
            td__sleep_ns(200000000);
            CHECK_OK(td_group_abort(group));
        }
        CHECK_FAILS(td_group_barrier(group, NULL), TD_ERR_ABORTED, "was aborted by rank 2");
    }
    CHECK_OK(td_group_barrier(NULL, NULL));
    if (!td_test_rank()) {
        CHECK_OK(td_new_group(NULL, 0, NULL, &group));
        CHECK_FAILS(td_group_barrier(group, NULL), TD_ERR_ABORTED, "was aborted by rank 2");
    }
    CHECK_OK(td_destroy_process_group());
}

/* Rank 2 gives the group up while rank 0 copies into the memory of rank 1; that is the program's again
 * once the call is back, and nobody else's. */
static void abort_messages(const struct way *way, bool shareable)
{
    enum { ROUNDS = 30, SIZE = 8 << 20 };
    int rank = td_test_rank(), failed = 0;
    open_world(way, 0);
    char *data = shareable ? td_alloc(SIZE) : malloc(SIZE);
    for (int i = 0; i < ROUNDS; i++) {
        td_group *group;
        CHECK_OK(td_new_group(NULL, 0, NULL, &group));
        memset(data, rank, SIZE);
        sum_on(group);
        td_test_barrier();
        td_status status = TD_OK;
        switch (rank) {
        case 0:
            status = td_group_send(data, SIZE, TD_U8, 1, 1, group, NULL);
            break;
        case 1:
            status = td_group_recv(data, SIZE, TD_U8, 0, 1, group, NULL);
            break;
        default:
            td__sleep_ns(i * 100000);
            CHECK_OK(td_group_abort(group));
        }
        if (status)
            CHECK_FAILS(status, TD_ERR_ABORTED, "was aborted by rank 2");
        failed += status != TD_OK;
        if (rank == 1)
            memset(data, 77, SIZE);
        sum_on(NULL); /* by then the others are back, too */
        for (int k = 0; k < SIZE && rank == 1; k++)
            if (data[k] != 77)
                FAIL("round %d, after \"%s\": byte %d was written later", i,
                     status ? td_last_error() : "success", k);
        td_group_destroy(group);
    }
    if (rank < 2)
        printf("%d of %d failed\n", failed, ROUNDS);
    shareable ? td_free(data) : free(data);
    CHECK_OK(td_destroy_process_group());
}

RANKS(aborted_within_a_message, .ranks = 3)
{
    abort_messages(&shm, false);
}

RANKS(aborted_within_a_shareable_message, .ranks = 3)
{
    abort_messages(&shm, true);
}

RANKS(aborted_within_a_message_tcp, .ranks = 3)
{
    abort_messages(&tcp, false);
}

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

/* The others are not done with the group when rank 1 begins to shrink it. `dying`: -1 for nobody. */
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
    td_test_barrier(); /* those who call it do so at the same time */
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
                "rank 1 has not come back within 300 ms");
    CHECK_EQ((int)sum_on(rest), 2);
    CHECK_OK(td_destroy_process_group());
}
