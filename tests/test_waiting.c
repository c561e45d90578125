/* Threads that wait sleep until they are woken: they do not wake from time to time to look for failures, and a
 * failure wakes all of them. */
#include "runner.h"
#include "ways.h"

#include "base/clock.h"

#include <tandem/group.h>

#include <signal.h>
#include <stdio.h>
#include <sys/resource.h>

/* ---- Sleeping --------------------------------------------------------------------------------
 *
 * Counts voluntary context switches, not time. A thread that looked around every 50 ms would have 30 of them in
 * LATE_NS. Over sockets, a rank that waits for long asks others for their calls, less and less often: each
 * query is a connection, and costs several. */

#define LATE_NS ((int64_t)1500000000)

enum { MOST_IN_MEMORY = 10, MOST_ON_LINKS = 60, MOST_IN_PROCESS = 120 };

static long switches(int who)
{
    struct rusage usage;
    CHECK_EQ(getrusage(who, &usage), 0);
    return usage.ru_nvcsw;
}

enum call { ALL_REDUCE, RECV, RECV_ANY, IRECV, NEW_GROUP };

static td_status wait_in(enum call call, td_group *group, float *x)
{
    td_work *work;
    td_status status;
    switch (call) {
    case RECV:
        return td_group_recv(x, 1, TD_F32, 0, 5, group, NULL);
    case RECV_ANY:
        return td_group_recv(x, 1, TD_F32, TD_ANY_SOURCE, 5, group, NULL);
    case IRECV:
        CHECK_OK(td_group_recv(x, 1, TD_F32, 0, 5, group, &work));
        status = td_work_wait(work, 0);
        td_work_release(work);
        return status;
    default:
        return td_group_all_reduce(x, x, 1, TD_F32, TD_SUM, group, NULL);
    }
}

/* Rank 0 is late; the others wait for it. */
static void come_late(enum call call, td_group *group, float *x)
{
    td__sleep_ns(LATE_NS);
    if (call == ALL_REDUCE || call == NEW_GROUP)
        CHECK_OK(td_group_all_reduce(x, x, 1, TD_F32, TD_SUM, group, NULL));
    for (int r = 1; r < td_test_size() && call != ALL_REDUCE && call != NEW_GROUP; r++)
        CHECK_OK(td_group_send(x, 1, TD_F32, r, 5, group, NULL));
}

static void wait_for_a_late_rank(const struct way *way)
{
    int most = way == &shm ? MOST_IN_MEMORY : MOST_ON_LINKS;
    open_world(way, 0);
    for (enum call call = ALL_REDUCE; call <= NEW_GROUP; call++) {
        float x = 1;
        td_group *group = NULL;
        if (call == NEW_GROUP) /* nothing is connected there yet */
            CHECK_OK(td_new_group(NULL, 0, NULL, &group));
        CHECK_OK(td_group_barrier(NULL, NULL));
        td_test_barrier();
        if (td_test_rank() == 0) {
            come_late(call, group, &x);
        } else {
            long before = switches(RUSAGE_THREAD), all_before = switches(RUSAGE_SELF);
            CHECK_OK(wait_in(call, group, &x));
            long thread = switches(RUSAGE_THREAD) - before;
            long process = switches(RUSAGE_SELF) - all_before;
            if (thread > most * td_test_slowness())
                FAIL("a thread that waited in call %d had %ld voluntary switches", call, thread);
            if (process > MOST_IN_PROCESS * td_test_slowness())
                FAIL("a process that waited in call %d had %ld voluntary switches", call, process);
        }
    }
    CHECK_OK(td_destroy_process_group());
}

RANKS(waiting_sleeps, .ranks = 3, .deadline_s = 40)
{
    wait_for_a_late_rank(&shm);
}

RANKS(waiting_sleeps_tcp, .ranks = 3, .deadline_s = 40)
{
    wait_for_a_late_rank(&tcp);
}

RANKS(waiting_sleeps_on_hosts, .ranks = 4, .deadline_s = 40)
{
    wait_for_a_late_rank(&mixed);
}

/* ---- Waking ----------------------------------------------------------------------------------
 *
 * Rank 3 ends while each of the others waits in another call, and sleeps. The timeouts are long, so that
 * CHECK_PROMPT() fails where a waiter is not woken. */

static void wake_all(const struct way *way, enum call calls[3])
{
    float x = 1;
    int rank = td_test_rank();
    open_world(way, 0);
    CHECK_OK(td_group_all_reduce(&x, &x, 1, TD_F32, TD_SUM, NULL, NULL));
    CHECK_OK(td_group_barrier(NULL, NULL));
    td_test_barrier();
    if (rank == 3) {
        td__sleep_ns(500000000);
        raise(SIGKILL);
    }
    int64_t before = td__now_ns();
    td_status status = calls[rank] == RECV ? td_group_recv(&x, 1, TD_F32, 3, 5, NULL, NULL)
                                           : wait_in(calls[rank], NULL, &x);
    CHECK_FAILS(status, TD_ERR_PEER, "rank 3");
    CHECK_CONTAINS(td_last_error(), "was killed by SIGKILL");
    CHECK_PROMPT(before);
    CHECK_OK(td_destroy_process_group());
}

static enum call same[3] = {ALL_REDUCE, ALL_REDUCE, ALL_REDUCE};
static enum call mixed_calls[3] = {RECV, RECV_ANY, ALL_REDUCE};

RANKS(a_death_wakes_a_collective, .ranks = 4, .may_die = 1 << 3)
{
    wake_all(&shm, same);
}

RANKS(a_death_wakes_a_collective_tcp, .ranks = 4, .may_die = 1 << 3)
{
    wake_all(&tcp, same);
}

RANKS(a_death_wakes_a_collective_on_hosts, .ranks = 4, .may_die = 1 << 3)
{
    wake_all(&mixed, same);
}

RANKS(a_death_wakes_messages, .ranks = 4, .may_die = 1 << 3)
{
    wake_all(&shm, mixed_calls);
}

RANKS(a_death_wakes_messages_tcp, .ranks = 4, .may_die = 1 << 3)
{
    wake_all(&tcp, mixed_calls);
}

RANKS(a_death_wakes_messages_on_hosts, .ranks = 4, .may_die = 1 << 3)
{
    wake_all(&mixed, mixed_calls);
}
