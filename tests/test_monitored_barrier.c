/* The monitored barrier: missing ranks, other calls, aborts, late ranks. */
#include "runner.h"
#include "ways.h"

#include "base/clock.h"
#include "fault/group_state.h"
#include "group/process_group.h"

#include <tandem/group.h>

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static td_group *new_group(const char *name)
{
    td_group *group;
    CHECK_OK(td_new_group(NULL, 0, &(td_group_options){.timeout_ms = 60000, .name = name}, &group));
    return group;
}

/* The barrier fails, with these ranks as the missing ones. */
#define CHECK_MISSING(group, timeout_ms, all, expected, part, ...)                                 \
    do {                                                                                           \
        int list_[] = {__VA_ARGS__}, missing_[64], count_ = -1;                                    \
        CHECK_FAILS(td_group_monitored_barrier(group, timeout_ms, all, missing_, &count_),         \
                    expected, part);                                                               \
        CHECK_EQ(count_, (int)(sizeof list_ / sizeof *list_));                                     \
        for (int i_ = 0; i_ < count_; i_++)                                                        \
            CHECK_EQ(missing_[i_], list_[i_]);                                                     \
    } while (0)

/* ---- Missing ranks --------------------------------------------------------------------------- */

static void miss_some(const struct way *way)
{
    int rank = td_test_rank();
    open_world(way, 0);
    CHECK_OK(td_group_monitored_barrier(NULL, 0, false, NULL, NULL));
    if (rank < 2) {
        CHECK_MISSING(
            NULL, 1000, false, TD_ERR_TIMEOUT,
            "monitored_barrier #2 on group \"world\": rank 2 has not joined within 1000 ms; "
            "ranks 0, 1 have joined; rank 2 has called nothing on this group",
            2);
        CHECK_MISSING(NULL, 1000, true, TD_ERR_TIMEOUT,
                      "ranks 2, 3 have not joined within 1000 ms; ranks 0, 1 have joined; rank 2 ",
                      2, 3);
        CHECK_CONTAINS(td_last_error(), "; rank 3 has called nothing on this group");
    }
    td_test_barrier();
    CHECK_OK(td_group_barrier(NULL, NULL)); /* nothing is broken by it */
    CHECK_FAILS(td_group_monitored_barrier(NULL, -2, true, NULL, NULL), TD_ERR_INVALID, "-2 ms");
    CHECK_OK(td_destroy_process_group());
}

RANKS(barriers_that_name_the_missing, .ranks = 4)
{
    miss_some(&shm);
}

RANKS(barriers_that_name_the_missing_tcp, .ranks = 4)
{
    miss_some(&tcp);
}

RANKS(barriers_that_name_the_missing_hosts, .ranks = 4)
{
    miss_some(&mixed);
}

/* Rank 3 joins after rank 0 has timed out. It fails at once, and all are in step in the next barrier. */
static void come_late(const struct way *way)
{
    open_world(way, 0);
    CHECK_OK(td_group_barrier(NULL, NULL));
    if (td_test_rank() != 3)
        CHECK_MISSING(NULL, 500, true, TD_ERR_TIMEOUT, "rank 3 has not", 3);
    td_test_barrier();
    if (td_test_rank() == 3) {
        int64_t before = td__now_ns();
        CHECK_MISSING(NULL, 8000, true, TD_ERR_TIMEOUT,
                      "rank 3 has joined too late: rank 0 had stopped waiting for it", 3);
        CHECK_PROMPT(before);
    }
    int missing_count = -1;
    CHECK_OK(td_group_monitored_barrier(NULL, 8000, true, NULL, &missing_count));
    CHECK_EQ(missing_count, 0);
    CHECK_OK(td_destroy_process_group());
}

RANKS(late_at_a_monitored_barrier, .ranks = 4)
{
    come_late(&shm);
}

RANKS(late_at_a_monitored_barrier_tcp, .ranks = 4)
{
    come_late(&tcp);
}

RANKS(late_at_a_monitored_barrier_hosts, .ranks = 4)
{
    come_late(&mixed);
}

/* Rank 0 joins after the others have timed out. They name it long before a verdict would be overdue, and
 * it names them: no rank gets TD_OK. */
static void join_first_too_late(const struct way *way)
{
    open_world(way, 60000);
    CHECK_OK(td_group_barrier(NULL, NULL));
    int64_t before = td__now_ns();
    if (td_test_rank()) {
        CHECK_MISSING(NULL, 100, true, TD_ERR_TIMEOUT,
                      "rank 0, which collects the others, has not joined within 2100 ms", 0);
        CHECK(td__now_ns() - before < 9000000000ll * td_test_slowness());
    }
    td_test_barrier();
    before = td__now_ns();
    if (td_test_rank() == 0)
        CHECK_MISSING(
            NULL, 60000, true, TD_ERR_TIMEOUT,
            "\"world\": ranks 1, 2 have timed out before rank 0 answered; rank 0 has joined", 1, 2);
    CHECK_PROMPT(before);
    CHECK_OK(td_group_monitored_barrier(NULL, 0, true, NULL, NULL));
    CHECK_OK(td_group_barrier(NULL, NULL));
    CHECK_OK(td_destroy_process_group());
}

RANKS(rank_0_late_at_a_monitored_barrier, .ranks = 3)
{
    join_first_too_late(&shm);
}

RANKS(rank_0_late_at_a_monitored_barrier_tcp, .ranks = 3)
{
    join_first_too_late(&tcp);
}

/* Rank 1 times out while rank 0, which has joined late, still waits for rank 2; rank 3 waits longer, and gets rank 0's
 * verdict. */
static void time_out_while_rank_0_waits(const struct way *way)
{
    int rank = td_test_rank();
    open_world(way, 60000);
    CHECK_OK(td_group_barrier(NULL, NULL));
    if (rank == 1)
        CHECK_MISSING(NULL, TD_NOW, true, TD_ERR_TIMEOUT, "has not joined yet", 0);
    td_test_barrier();
    if (rank == 0 || rank == 3)
        CHECK_MISSING(NULL, 1000, true, TD_ERR_TIMEOUT,
                      "rank 2 has not joined within 1000 ms; rank 1 has timed out before rank 0 "
                      "answered; ranks 0, 3 have joined",
                      1, 2);
    td_test_barrier();
    if (rank == 2)
        CHECK_MISSING(NULL, 0, false, TD_ERR_TIMEOUT, "has joined too late", 2);
    CHECK_OK(td_group_monitored_barrier(NULL, 0, true, NULL, NULL));
    CHECK_OK(td_destroy_process_group());
}

RANKS(timed_out_while_rank_0_waits, .ranks = 4)
{
    time_out_while_rank_0_waits(&shm);
}

RANKS(timed_out_while_rank_0_waits_tcp, .ranks = 4)
{
    time_out_while_rank_0_waits(&tcp);
}

/* The group is not made on rank 0 when the others time out. */
RANKS(timed_out_before_rank_0_made_the_group, .ranks = 3)
{
    open_world(&shm, 0);
    td_group *group = NULL;
    if (td_test_rank()) {
        group = new_group("unmade");
        CHECK_MISSING(group, 200, true, TD_ERR_TIMEOUT,
                      "rank 0, which collects the others, has not joined within 200 ms", 0);
    }
    td_test_barrier();
    if (!group) {
        group = new_group("unmade");
        CHECK_MISSING(group, 200, true, TD_ERR_TIMEOUT,
                      "ranks 1, 2 have timed out before rank 0 answered", 1, 2);
    }
    CHECK_OK(td_group_monitored_barrier(group, 0, true, NULL, NULL));
    CHECK_OK(td_destroy_process_group());
    CHECK_OK(td_group_destroy(group));
}

static bool is_stopped(int pid)
{
    char path[64], line[512] = "";
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *file = fopen(path, "r");
    CHECK(file && fgets(line, sizeof line, file));
    fclose(file);
    return strstr(line, ") T ");
}

/* Rank 0 is stopped while the others time out, so that it cannot take note of it. */
static void stop_rank_0(const struct way *way)
{
    int rank = td_test_rank(), pid = getpid();
    open_world(way, 60000);
    CHECK_OK(td_group_monitored_barrier(NULL, 0, true, NULL, NULL));
    CHECK_OK(td_group_broadcast(&pid, 1, TD_I32, 0, NULL, NULL));
    if (rank == 0) {
        raise(SIGSTOP);
        CHECK_MISSING(NULL, 0, true, TD_ERR_TIMEOUT,
                      "ranks 1, 2 have timed out before rank 0 answered", 1, 2);
    } else {
        CHECK_SOON(is_stopped(pid));
        CHECK_MISSING(NULL, TD_NOW, true, TD_ERR_TIMEOUT, "has not joined yet", 0);
        if (rank == 1)
            CHECK_OK(td_group_send(&pid, 1, TD_I32, 2, 0, NULL, NULL));
        else
            CHECK_OK(td_group_recv(&pid, 1, TD_I32, 1, 0, NULL, NULL));
        if (rank == 2)
            td_test_kill(0, SIGCONT);
    }
    CHECK_OK(td_group_monitored_barrier(NULL, 0, true, NULL, NULL));
    CHECK_OK(td_destroy_process_group());
}

RANKS(timed_out_while_rank_0_was_stopped, .ranks = 3)
{
    stop_rank_0(&shm);
}

RANKS(timed_out_while_rank_0_was_stopped_tcp, .ranks = 3)
{
    stop_rank_0(&tcp);
}

/* The native backend, which stops rank 0 before it sends the first verdict, and holds the other ranks after they have
 * sent their arrival until rank 0 is stopped. */
static td_backend_ops stopping;
static td_status (*native_run_message)(void *self, const td_call *call);
static int pid_to_stop; /* of rank 0; 0: not now */

static td_status stop_before_verdict(void *self, const td_call *call)
{
    bool send = call->kind == TD_OP_SEND && pid_to_stop;
    if (send && call->tag == TD__TAG_VERDICT) {
        pid_to_stop = 0;
        raise(SIGSTOP);
    }
    td_status status = native_run_message(self, call);
    if (send && call->tag == TD__TAG_ARRIVAL)
        CHECK_SOON(is_stopped(pid_to_stop));
    return status;
}

static td_group *group_that_stops(void)
{
    struct td__backend_found found;
    td_group *group;
    CHECK_OK(td__backend_find("native", &found));
    stopping = *found.ops;
    native_run_message = stopping.run_message;
    stopping.run_message = stop_before_verdict;
    CHECK_OK(td_register_backend("stopping", &stopping, found.arg));
    CHECK_OK(td_new_group(NULL, 0, &(td_group_options){.backend = "stopping"}, &group));
    return group;
}

/* Rank 0 is stopped when it has found no rank that has timed out, and before its verdict; the others time out then. */
static void stop_rank_0_at_the_verdict(const struct way *way)
{
    int rank = td_test_rank(), pid = getpid();
    open_world(way, 60000);
    td_group *group = group_that_stops();
    CHECK_OK(td_group_monitored_barrier(group, 0, true, NULL, NULL));
    CHECK_OK(td_group_broadcast(&pid, 1, TD_I32, 0, group, NULL));
    pid_to_stop = pid;
    if (rank == 0) {
        CHECK_MISSING(group, 0, true, TD_ERR_TIMEOUT,
                      "ranks 1, 2 have timed out before rank 0 answered", 1, 2);
    } else {
        CHECK_MISSING(group, TD_NOW, true, TD_ERR_TIMEOUT, "has not joined yet", 0);
        if (rank == 1)
            CHECK_OK(td_group_send(&pid, 1, TD_I32, 2, 0, NULL, NULL));
        else
            CHECK_OK(td_group_recv(&pid, 1, TD_I32, 1, 0, NULL, NULL));
        if (rank == 2)
            td_test_kill(0, SIGCONT);
    }
    pid_to_stop = 0;
    CHECK_OK(td_group_monitored_barrier(group, 0, true, NULL, NULL));
    CHECK_OK(td_destroy_process_group());
    CHECK_OK(td_group_destroy(group));
}

RANKS(timed_out_while_rank_0_was_stopped_at_the_verdict, .ranks = 3)
{
    stop_rank_0_at_the_verdict(&shm);
}

RANKS(timed_out_while_rank_0_was_stopped_at_the_verdict_tcp, .ranks = 3)
{
    stop_rank_0_at_the_verdict(&tcp);
}

/* Ranks time out while rank 0 joins and settles the outcome: whichever it is, all ranks get the same one. */
static void race(const struct way *way)
{
    enum { ROUNDS = 100 };
    int rank = td_test_rank();
    open_world(way, 60000);
    for (int i = 0; i < ROUNDS; i++) {
        CHECK_OK(td_group_barrier(NULL, NULL));
        if (rank == i % 2)
            td__sleep_ns(i * 20000);
        td_status status = td_group_monitored_barrier(NULL, rank ? TD_NOW : 60000, true, NULL,
                                                      NULL);
        CHECK(!status || status == TD_ERR_TIMEOUT);
        int failed = status != TD_OK;
        CHECK_OK(td_group_all_reduce(&failed, &failed, 1, TD_I32, TD_SUM, NULL, NULL));
        CHECK_EQ(failed, status ? td_test_size() : 0);
    }
    CHECK_OK(td_destroy_process_group());
}

RANKS(timed_out_at_the_moment_of_the_verdict, .ranks = 3)
{
    race(&shm);
}

RANKS(timed_out_at_the_moment_of_the_verdict_tcp, .ranks = 3)
{
    race(&tcp);
}

/* With TD_NOW no rank waits for another one to join. */
static void do_not_wait(const struct way *way)
{
    int rank = td_test_rank();
    open_world(way, 0);
    td_group *first = new_group("first"), *last = new_group("last");
    CHECK_OK(td_group_barrier(first, NULL));
    CHECK_OK(td_group_barrier(last, NULL));
    int64_t before = td__now_ns();
    if (rank == 0)
        CHECK_MISSING(first, TD_NOW, true, TD_ERR_TIMEOUT, "ranks 1, 2 have not joined within 0 ms",
                      1, 2);
    else
        CHECK_MISSING(last, TD_NOW, true, TD_ERR_TIMEOUT,
                      "rank 0, which collects the others, has not joined yet", 0);
    CHECK_PROMPT(before);
    td_test_barrier();
    if (rank)
        CHECK_MISSING(first, TD_NOW, true, TD_ERR_TIMEOUT, "has joined too late", rank);
    CHECK_OK(td_group_monitored_barrier(first, 0, true, NULL, NULL));
    CHECK_OK(td_destroy_process_group());
    CHECK_OK(td_group_destroy(first));
    CHECK_OK(td_group_destroy(last));
}

RANKS(monitored_barriers_that_do_not_wait, .ranks = 3)
{
    do_not_wait(&shm);
}

RANKS(monitored_barriers_that_do_not_wait_tcp, .ranks = 3)
{
    do_not_wait(&tcp);
}

/* No rank waits for the timeout, and the sentence does not name it. */
static void die(const struct way *way, const char *how)
{
    char part[64];
    open_world(way, 0);
    CHECK_OK(td_group_monitored_barrier(NULL, 0, true, NULL, NULL));
    td_test_barrier();
    if (td_test_rank() == 2)
        raise(SIGKILL);
    int64_t before = td__now_ns();
    CHECK_MISSING(NULL, 60000, true, TD_ERR_PEER,
                  "monitored_barrier #2 on group \"world\": rank 2 (on ", 2);
    snprintf(part, sizeof part, "%s; ranks 0, 1", how);
    CHECK_CONTAINS(td_last_error(), part);
    CHECK_CONTAINS(td_last_error(), "have joined");
    CHECK(!strstr(td_last_error(), "within"));
    CHECK_MISSING(NULL, 60000, false, TD_ERR_PEER, "rank 2 (on ", 2);
    CHECK_PROMPT(before);
    CHECK_OK(td_destroy_process_group());
}

RANKS(dead_at_a_monitored_barrier, .ranks = 3, .may_die = 1 << 2)
{
    die(&shm, " was killed by SIGKILL");
}

RANKS(dead_at_a_monitored_barrier_tcp, .ranks = 3, .may_die = 1 << 2)
{
    die(&tcp, " was killed by SIGKILL");
}

RANKS(dead_at_a_monitored_barrier_hosts, .ranks = 4, .may_die = 1 << 2)
{
    die(&mixed, "");
}

/* One rank is dead and another one late: both are named, each with the reason. */
RANKS(dead_and_late_at_a_monitored_barrier, .ranks = 4, .may_die = 1 << 1)
{
    open_world(&tcp, 0);
    CHECK_OK(td_group_monitored_barrier(NULL, 0, true, NULL, NULL));
    td_test_barrier();
    if (td_test_rank() == 1)
        raise(SIGKILL);
    if (td_test_rank() == 3) {
        CHECK_FAILS(td_group_recv(&(float){0}, 1, TD_F32, 1, 9, NULL, NULL), TD_ERR_PEER, "rank 1");
        td__sleep_ns(2000000000);
    } else {
        CHECK_MISSING(
            NULL, 1000, true, TD_ERR_PEER,
            " was killed by SIGKILL; rank 3 has not joined within 1000 ms; ranks 0, 2 have "
            "joined; rank 3 ",
            1, 3);
        CHECK_CONTAINS(td_last_error(), "\"world\": rank 1 (on ");
    }
    CHECK_OK(td_destroy_process_group());
}

RANKS(queried_by_a_rank_that_died, .ranks = 3, .may_die = 1 << 0)
{
    open_world(&shm, 0);
    CHECK_OK(td_group_barrier(NULL, NULL));
    td_test_barrier();
    if (td_test_rank() == 0)
        raise(SIGKILL);
    int64_t before = td__now_ns();
    CHECK_MISSING(NULL, 8000, true, TD_ERR_PEER, "was killed by SIGKILL", 0);
    CHECK_PROMPT(before);
    CHECK_OK(td_destroy_process_group());
}

/* ---- Other calls ----------------------------------------------------------------------------- */

/* All ranks but `odd` are in the barrier; `odd` is in a collective; -1: only rank 1 is in the barrier. */
static void call_another(int odd, bool barrier)
{
    int rank = td_test_rank();
    float x[4] = {0};
    char name[32];
    snprintf(name, sizeof name, "odd %d %d", odd, barrier);
    td_group *group = new_group(name);
    CHECK_OK(td_group_barrier(group, NULL));
    CHECK_OK(td_group_monitored_barrier(group, 0, false, NULL, NULL));
    int64_t before = td__now_ns();
    td_status status;
    if (odd < 0 ? rank == 1 : rank != odd)
        status = td_group_monitored_barrier(group, 0, true, NULL, NULL);
    else if (barrier)
        status = td_group_barrier(group, NULL);
    else
        status = td_group_all_reduce(x, x, 4, TD_F32, TD_SUM, group, NULL);
    /* A rank that has been told already may have made its next call, which fails. */
    CHECK_FAILS(status, TD_ERR_MISMATCH, "on group \"odd ");
    CHECK_CONTAINS(td_last_error(), "called monitored_barrier, rank ");
    CHECK_CONTAINS(td_last_error(),
                   barrier || strstr(td_last_error(), "call #3") ? "called barrier" : "called all_reduce");
    CHECK_PROMPT(before);
    CHECK_FAILS(td_group_barrier(group, NULL), TD_ERR_MISMATCH, "called monitored_barrier");
    CHECK_FAILS(td_group_monitored_barrier(group, 0, true, NULL, NULL), TD_ERR_MISMATCH, "called");
    CHECK_OK(td_group_barrier(NULL, NULL)); /* other groups are as good as before */
    td_group_destroy(group);
}

static void call_others(const struct way *way)
{
    open_world(way, 0);
    for (int odd = -1; odd < 4; odd += odd == 1 ? 2 : 1) {
        call_another(odd, false);
        call_another(odd, true);
    }
    CHECK_OK(td_destroy_process_group());
}

RANKS(a_monitored_barrier_and_another_call, .ranks = 4)
{
    call_others(&shm);
}

RANKS(a_monitored_barrier_and_another_call_tcp, .ranks = 4)
{
    call_others(&tcp);
}

RANKS(a_monitored_barrier_and_another_call_hosts, .ranks = 4)
{
    call_others(&mixed);
}

/* Nothing was called on the group before, so that its memory is not there yet, and one has not made it. */
RANKS(a_monitored_barrier_and_another_first_call, .ranks = 4)
{
    float x = 0;
    open_world(&mixed, 0);
    td_group *group = NULL;
    if (td_test_rank() != 1) {
        group = new_group("fresh");
        td_status status = td_test_rank() == 3
                               ? td_group_all_reduce(&x, &x, 1, TD_F32, TD_SUM, group, NULL)
                               : td_group_monitored_barrier(group, 0, true, NULL, NULL);
        CHECK_FAILS(status, TD_ERR_MISMATCH, "rank 0 called monitored_barrier, rank 3 called all");
    }
    CHECK_OK(td_group_barrier(NULL, NULL));
    if (!group)
        group = new_group("fresh");
    CHECK_FAILS(td_group_barrier(group, NULL), TD_ERR_MISMATCH, "rank 3 called all_reduce");
    CHECK_OK(td_destroy_process_group());
}

/* A rank that only is late, in a collective of all before the barrier, has called nothing else. */
RANKS(a_collective_before_a_monitored_barrier, .ranks = 3)
{
    float x = 0;
    td_work *work;
    open_world(&shm, 0);
    for (int i = 0; i < 3; i++) {
        CHECK_OK(td_group_all_reduce(&x, &x, 1, TD_F32, TD_SUM, NULL, &work));
        if (td_test_rank() == 2)
            td__sleep_ns(400000000);
        CHECK_OK(td_group_monitored_barrier(NULL, 0, true, NULL, NULL));
        CHECK_OK(td_work_wait(work, 0));
        td_work_release(work);
    }
    CHECK_OK(td_destroy_process_group());
}

/* ---- Aborts ---------------------------------------------------------------------------------- */

/* Rank 3 never joins; `by` aborts the group. */
static void abort_it(const struct way *way, int by)
{
    int rank = td_test_rank();
    open_world(way, 0);
    td_group *group = new_group("aborted");
    CHECK_OK(td_group_barrier(group, NULL));
    if (rank == by) {
        td__sleep_ns(300000000);
        CHECK_OK(td_group_abort(group));
    }
    int64_t before = td__now_ns();
    if (rank != 3)
        CHECK_FAILS(td_group_monitored_barrier(group, 0, true, NULL, NULL), TD_ERR_ABORTED,
                    "was aborted by");
    CHECK_PROMPT(before);
    CHECK_OK(td_group_barrier(NULL, NULL));
    CHECK_FAILS(td_group_monitored_barrier(group, 0, true, NULL, NULL), TD_ERR_ABORTED,
                "was aborted by");
    CHECK_PROMPT(before);
    CHECK_OK(td_destroy_process_group());
}

RANKS(aborted_in_a_monitored_barrier, .ranks = 4)
{
    abort_it(&shm, 1);
}

RANKS(aborted_in_a_monitored_barrier_by_the_last, .ranks = 4)
{
    abort_it(&shm, 3);
}

RANKS(aborted_in_a_monitored_barrier_tcp, .ranks = 4)
{
    abort_it(&tcp, 1);
}

RANKS(aborted_in_a_monitored_barrier_hosts, .ranks = 4)
{
    abort_it(&mixed, 3);
}
