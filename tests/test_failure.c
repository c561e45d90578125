/* Deaths, delays and aborts; going on afterwards is in test_shrink.c. */
#include "runner.h"
#include "ways.h"

#include "base/clock.h"

#include <tandem/group.h>

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* ---- Deaths ---------------------------------------------------------------------------------- */

/* Each of the survivors makes another kind of call; all get the rank that died, and how it ended. */
static void die(const struct way *way, void (*end)(void), const char *how)
{
    float x[4] = {0}, all[16];
    td_group *others;
    int rank = td_test_rank();
    open_world(way, 0);
    CHECK_OK(td_new_group((int[]){0, 1, 3}, 3, NULL, &others));
    sum_on(NULL);
    td_test_barrier(); /* else a late rank finds it dead in this call already */
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
    /* The late rank may still find all data it needs; then a later call returns the error of the others. */
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

/* Only one of the waiting ranks warns, and the call goes on. */
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

/* Each rank waits in another way, for something that does not come. */
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

/* Rank 2 gives the group up while rank 0 copies into the memory of rank 1; once the call has
 * returned, the library does not write there any more. */
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
