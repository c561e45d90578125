/* The backend nccl when something goes wrong: ranks that die, leave, abort, or call something else, and NCCL itself. */
#include "nccl_world.h"

#include "base/clock.h"

#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <time.h>

static td_tensor *ones(int64_t count)
{
    return td_ones((int64_t[]){count}, 1, TD_F32, nccl_device());
}

static void sleep_ms(int milliseconds)
{
    nanosleep(&(struct timespec){milliseconds / 1000, milliseconds % 1000 * 1000000L}, NULL);
}

/* The communicator exists, and the device has run everything. */
static td_tensor *warm_up(void)
{
    td_tensor *x = ones(1000);
    CHECK_OK(td_all_reduce(x, TD_MAX, NULL, NULL));
    CHECK_OK(td_device_synchronize(nccl_device()));
    return x;
}

/* After a failure: the device has nothing left to run, and no communicator is left. */
static void end_broken(td_tensor *x)
{
    td_tensor_release(x);
    td_destroy_process_group();
    CHECK_OK(td_device_synchronize(nccl_device()));
    CHECK_SOON(nccl_fake_live() == 0);
}

/* ---- Ranks that end ---------------------------------------------------------------------------------- */

/* The survivors' all_reduce is enqueued, and waits on the device. */
RANKS(a_rank_is_killed, .ranks = 3, .may_die = 1 << 1, .deadline_s = 60)
{
    nccl_begin(600000);
    td_tensor *x = warm_up();
    td_group *rest;
    td_work *work;
    if (td_get_rank(NULL) == 1) {
        sleep_ms(100);
        raise(SIGKILL);
    }
    CHECK_OK(td_all_reduce(x, TD_SUM, NULL, &work));
    int64_t start = td__now_ns();
    CHECK_FAILS(td_work_synchronize(work, 0), TD_ERR_PEER, "rank 1");
    CHECK_CONTAINS(td_last_error(), "was killed by SIGKILL");
    CHECK_PROMPT(start);
    if (nccl_is_real()) /* a host without a GPU may be busy with other tests */
        CHECK(td__now_ns() - start < 1100000000); /* 100 ms of these before its end */
    CHECK_FAILS(td_work_wait(work, 0), TD_ERR_PEER, "rank 1");
    CHECK_FAILS(td_all_reduce(x, TD_SUM, NULL, NULL), TD_ERR_PEER, "rank 1");
    CHECK_FAILS(td_send(x, 2 - td_get_rank(NULL), 0, NULL), TD_ERR_PEER, "rank 1");
    td_work_release(work);

    CHECK_OK(td_group_shrink(NULL, NULL, &rest));
    CHECK_STR(td_get_backend(rest), nccl_backends());
    CHECK_OK(td_fill_(x, td_get_rank(rest) + 1));
    CHECK_OK(td_all_reduce(x, TD_SUM, rest, NULL));
    CHECK_EQ(nccl_item(x, 999), 3);
    CHECK_OK(td_group_destroy(rest));
    end_broken(x);
}

/* Three communicators wait on the device of each survivor. */
RANKS(a_rank_is_killed_beside_messages, .ranks = 3, .may_die = 1 << 1, .deadline_s = 60)
{
    nccl_begin(600000);
    int rank = td_get_rank(NULL);
    td_tensor *x = warm_up(), *y = ones(1000), *z = ones(1000);
    td_work *works[3];
    for (int r = 0; r < 3; r += 2) {
        if (rank == 1) {
            CHECK_OK(td_send(x, r, 0, NULL));
            CHECK_OK(td_recv(x, r, 0, NULL, NULL));
        } else if (rank == r) {
            CHECK_OK(td_recv(x, 1, 0, NULL, NULL));
            CHECK_OK(td_send(x, 1, 0, NULL));
        }
    }
    CHECK_OK(td_device_synchronize(nccl_device()));
    if (rank == 1) {
        sleep_ms(100);
        raise(SIGKILL);
    }
    CHECK_OK(td_irecv(y, 1, 0, NULL, &works[0]));
    CHECK_OK(td_isend(z, 1, 0, NULL, &works[1]));
    CHECK_OK(td_all_reduce(x, TD_SUM, NULL, &works[2]));
    int64_t start = td__now_ns();
    for (int i = 0; i < 3; i++)
        CHECK_FAILS(td_work_synchronize(works[i], 0), TD_ERR_PEER, "rank 1");
    CHECK_PROMPT(start);
    CHECK_OK(td_device_synchronize(nccl_device()));
    CHECK_PROMPT(start);
    for (int i = 0; i < 3; i++)
        td_work_release(works[i]);
    td_tensor_release(y);
    td_tensor_release(z);
    end_broken(x);
}

/* It dies before the communicator is there. */
RANKS(a_rank_never_joins, .ranks = 3, .may_die = 1 << 2, .deadline_s = 60)
{
    nccl_begin(600000);
    td_tensor *x = ones(10);
    td_work *work;
    if (td_get_rank(NULL) == 2) {
        sleep_ms(200);
        raise(SIGKILL);
    }
    CHECK_OK(td_all_reduce(x, TD_SUM, NULL, &work));
    CHECK_FAILS(td_work_wait(work, 0), TD_ERR_PEER, "rank 2");
    td_work_release(work);
    end_broken(x);
}

/* It is late, but the others wait for it. */
RANKS(a_rank_is_late, .ranks = 2, .deadline_s = 60)
{
    nccl_begin(600000);
    td_tensor *x = warm_up();
    if (td_get_rank(NULL) == 1)
        sleep_ms(2500); /* longer than the watchdog waits before it compares */
    CHECK_OK(td_all_reduce(x, TD_SUM, NULL, NULL));
    CHECK_EQ(nccl_item(x, 0), 2);
    td_tensor_release(x);
    nccl_end();
}

/* So is the device of one. */
RANKS(a_device_is_late, .ranks = 2, .deadline_s = 60)
{
    nccl_needs_fake();
    nccl_begin(600000);
    td_tensor *x = warm_up();
    td_work *work;
    if (td_get_rank(NULL) == 0)
        toy_hold(0, true);
    CHECK_OK(td_all_reduce(x, TD_SUM, NULL, &work));
    if (td_get_rank(NULL) == 0) {
        CHECK_FAILS(td_work_synchronize(work, 50), TD_ERR_TIMEOUT, "does not have the result");
        sleep_ms(2500);
        toy_hold(0, false);
    }
    CHECK_OK(td_work_synchronize(work, 0));
    CHECK_EQ(nccl_item(x, 0), 2);
    td_work_release(work);
    td_tensor_release(x);
    nccl_end();
}

RANKS(a_rank_has_left, .ranks = 2, .deadline_s = 60)
{
    nccl_begin(600000);
    td_tensor *x = warm_up();
    if (td_get_rank(NULL) == 1) {
        td_tensor_release(x);
        nccl_end();
        return;
    }
    td_work *work;
    CHECK_OK(td_all_reduce(x, TD_SUM, NULL, &work));
    CHECK_FAILS(td_work_synchronize(work, 0), TD_ERR_PEER, "has left");
    CHECK_CONTAINS(td_last_error(), "all_reduce #2 on group \"world\": rank 1");
    td_work_release(work);
    end_broken(x);
}

/* What was enqueued is carried out before a rank leaves. */
RANKS(leaving_waits_for_the_device, .ranks = 2, .deadline_s = 60)
{
    nccl_needs_fake();
    nccl_begin(600000);
    td_tensor *x = warm_up();
    toy_set_delay(20000);
    CHECK_OK(td_all_reduce(x, TD_SUM, NULL, NULL));
    CHECK_OK(td_all_reduce(x, TD_SUM, NULL, NULL));
    nccl_end();
    CHECK_EQ(nccl_item(x, 0), 4);
    td_tensor_release(x);
}

/* ---- Aborting and timeouts ------------------------------------------------------------------------------ */

RANKS(an_aborted_group, .ranks = 2, .deadline_s = 60)
{
    nccl_begin(600000);
    td_tensor *x = warm_up();
    td_work *work;
    if (td_get_rank(NULL) == 0) {
        CHECK_OK(td_all_reduce(x, TD_SUM, NULL, &work));
        CHECK_FAILS(td_work_synchronize(work, 60000), TD_ERR_ABORTED, "aborted by rank 1");
        td_work_release(work);
    } else {
        sleep_ms(100);
        CHECK_OK(td_group_abort(NULL));
    }
    CHECK_FAILS(td_all_reduce(x, TD_SUM, NULL, NULL), TD_ERR_ABORTED, "aborted by rank 1");
    CHECK_FAILS(td_send(x, 1 - td_get_rank(NULL), 0, NULL), TD_ERR_ABORTED, "aborted by rank 1");
    end_broken(x);
}

RANKS(ranks_that_do_not_connect, .ranks = 2, .deadline_s = 60)
{
    nccl_begin(60000);
    td_tensor *x = ones(10);
    if (td_get_rank(NULL) == 0) {
        CHECK_OK(td_set_call_timeout(300));
        CHECK_FAILS(td_send(x, 1, 0, NULL), TD_ERR_TIMEOUT,
                    "rank 1 has not called the other side within 300 ms");
        CHECK_FAILS(td_all_reduce(x, TD_SUM, NULL, NULL), TD_ERR_TIMEOUT,
                    "all_reduce #1 on group \"world\"");
        CHECK_CONTAINS(
            td_last_error(),
            "the ranks have not connected within 300 ms; rank 0 has joined; rank 1 has called nothing");
    }
    td_test_barrier();
    end_broken(x);
}

RANKS(a_message_that_nothing_sends, .ranks = 2)
{
    nccl_begin(60000);
    td_tensor *x = ones(10);
    td_work *work = NULL;
    if (td_get_rank(NULL) == 0)
        CHECK_OK(td_irecv(x, 1, 0, NULL, &work));
    nccl_end();
    if (work)
        CHECK_FAILS(td_work_wait(work, 0), TD_ERR_STATE, "was destroyed");
    td_work_release(work);
    td_tensor_release(x);
}

/* ---- Different calls ------------------------------------------------------------------------------------- */

RANKS(different_calls_wait, .ranks = 3, .deadline_s = 60)
{
    nccl_begin(600000);
    td_tensor *x = warm_up();
    td_work *work;
    if (td_get_rank(NULL) == 2)
        CHECK_OK(td_broadcast(x, 0, NULL, &work));
    else
        CHECK_OK(td_all_reduce(x, TD_SUM, NULL, &work));
    CHECK_FAILS(td_work_synchronize(work, 0), TD_ERR_MISMATCH, "#2");
    CHECK_CONTAINS(td_last_error(), "called broadcast #2");
    CHECK_CONTAINS(td_last_error(), "called all_reduce #2");
    td_work_release(work);
    end_broken(x);
}

/* NCCL does not notice; a wrong result is not passed over in silence. */
RANKS(different_sizes_end, .ranks = 2, .deadline_s = 60)
{
    nccl_needs_fake();
    nccl_begin(600000);
    td_tensor *x = ones(100 + td_get_rank(NULL));
    td_work *work;
    CHECK_OK(td_all_reduce(x, TD_SUM, NULL, &work));
    CHECK_OK(td_work_synchronize(work, 0));
    td_work_release(work);
    td_tensor_release(x);
    CHECK_FAILS(td_destroy_process_group(), TD_ERR_MISMATCH, "100 f32");
    CHECK_CONTAINS(td_last_error(), "101 f32");
}

RANKS(different_tags, .ranks = 2, .deadline_s = 60)
{
    nccl_begin(600000);
    td_tensor *x = ones(4);
    if (td_get_rank(NULL) == 0)
        CHECK_OK(td_send(x, 1, 7, NULL));
    else
        CHECK_OK(td_recv(x, 0, 8, NULL, NULL));
    CHECK_OK(td_device_synchronize(nccl_device()));
    td_tensor_release(x);
    if (td_get_rank(NULL) == 0)
        nccl_end();
    td_test_barrier();
    if (td_get_rank(NULL) == 1)
        CHECK_FAILS(td_destroy_process_group(), TD_ERR_MISMATCH,
                    "message 1 from rank 0 to rank 1 on group \"world\": rank 0 sent 16 bytes with "
                    "tag 7, rank 1 received 16 bytes with tag 8");
}

RANKS(messages_of_different_sizes, .ranks = 2, .deadline_s = 60)
{
    nccl_needs_fake();
    nccl_begin(600000);
    td_tensor *x = ones(td_get_rank(NULL) ? 8 : 4);
    td_work *work;
    if (td_get_rank(NULL) == 0) {
        CHECK_OK(td_isend(x, 1, 0, NULL, &work));
        CHECK_SOON(td_work_wait(work, 0) == TD_ERR_MISMATCH); /* it has sent all it had */
    } else {
        CHECK_OK(td_irecv(x, 0, 0, NULL, &work)); /* waits for more */
        CHECK_FAILS(td_work_synchronize(work, 0), TD_ERR_MISMATCH,
                    "rank 0 sent 16 bytes with tag 0");
    }
    CHECK_CONTAINS(td_last_error(), "rank 1 received 32 bytes with tag 0");
    td_work_release(work);
    end_broken(x);
}

/* ---- Errors of NCCL ------------------------------------------------------------------------------------------ */

RANKS(an_error_that_comes_later, .ranks = 2, .deadline_s = 60)
{
    nccl_needs_fake();
    nccl_begin(600000);
    td_tensor *x = warm_up();
    td_work *work;
    if (td_get_rank(NULL) == 0) {
        CHECK_OK(td_all_reduce(x, TD_SUM, NULL, &work)); /* waits for rank 1 */
        nccl_fake_fail(2);
        CHECK_FAILS(td_work_synchronize(work, 0), TD_ERR_SYSTEM, "group \"world\": NCCL 2.28.9 (");
        CHECK_CONTAINS(
            td_last_error(),
            "fake_nccl.so) reports: unhandled system error (2): the fake library has failed");
        td_work_release(work);
        CHECK_FAILS(td_all_reduce(x, TD_SUM, NULL, NULL), TD_ERR_SYSTEM,
                    "reports: unhandled system error");
    }
    td_test_barrier();
    nccl_fake_fail(0);
    end_broken(x);
}

/* ---- Order -----------------------------------------------------------------------------------------------------
 *
 * On rank 0 the second collective waits for a message which rank 1 sends when it has the result of the first one. It is called
 * while NCCL has not enqueued the first one, which must not wait for the message, too. */

static void receive_between(td_tensor *x, td_tensor *y, td_work *works[2])
{
    td_work *message;
    td_stream *stream = td_stream_create(nccl_device(), 0);
    CHECK(stream);
    CHECK_OK(td_irecv(y, 1, 0, NULL, &message));
    {
        TD_STREAM_SCOPE(stream);
        CHECK_OK(td_work_wait(message, 0));
    }
    CHECK_OK(td_all_reduce(x, TD_MAX, NULL, &works[0]));
    {
        TD_STREAM_SCOPE(stream);
        CHECK_OK(td_all_reduce(y, TD_MAX, NULL, &works[1]));
    }
    td_work_release(message);
    td_stream_release(stream);
}

static void send_between(td_tensor *x, td_tensor *y, td_work *works[2])
{
    CHECK_OK(td_all_reduce(x, TD_MAX, NULL, &works[0]));
    CHECK_OK(td_work_wait(works[0], 0));
    CHECK_OK(td_send(y, 0, 0, NULL));
    CHECK_OK(td_all_reduce(y, TD_MAX, NULL, &works[1]));
}

RANKS(a_later_call_does_not_delay_an_earlier_one, .ranks = 2, .deadline_s = 60)
{
    setenv("FAKE_NCCL_SLOW", "50", 0);
    nccl_begin(600000);
    td_tensor *x = warm_up(), *y = ones(100);
    for (int i = 0; i < 5; i++) {
        td_work *works[2];
        (td_get_rank(NULL) == 0 ? receive_between : send_between)(x, y, works);
        CHECK_OK(td_work_wait_all(works, 2, 0));
        td_work_release(works[0]);
        td_work_release(works[1]);
        CHECK_EQ(nccl_sum(x), 1000);
        CHECK_EQ(nccl_sum(y), 100);
    }
    td_tensor_release(x);
    td_tensor_release(y);
    nccl_end();
}

/* ---- Threads --------------------------------------------------------------------------------------------------- */

/* Has a stream of its own: on the default stream, which all threads share, a message would wait for the collectives
 * that another thread has called before it, and collectives for messages, and the ranks may do so in different orders. */
static void *exchange(void *arg)
{
    td_stream *stream = td_stream_create(nccl_device(), 0);
    CHECK(stream);
    TD_STREAM_SCOPE(stream);
    int peer = 1 - td_get_rank(NULL);
    td_tensor *x = ones(100), *y = ones(100);
    (void)arg;
    for (int i = 0; i < 30; i++) {
        td_p2p_op ops[2] = {{.kind = TD_P2P_ISEND, .tensor = x, .peer = peer},
                            {.kind = TD_P2P_IRECV, .tensor = y, .peer = peer}};
        td_work *works[2];
        CHECK_OK(td_batch_isend_irecv(ops, 2, works));
        CHECK_OK(td_work_wait_all(works, 2, 0));
        td_work_release(works[0]);
        td_work_release(works[1]);
    }
    CHECK_EQ(nccl_sum(y), 100);
    td_tensor_release(x);
    td_tensor_release(y);
    td_stream_release(stream);
    return NULL;
}

/* Messages of two threads beside the collectives of this one, until all have ended. */
static void talk_beside_collectives(td_tensor *x)
{
    pthread_t threads[2];
    for (int i = 0; i < 2; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, exchange, NULL), 0);
    for (int i = 0; i < 60; i++)
        CHECK_OK(td_all_reduce(x, TD_MAX, NULL, NULL));
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    CHECK_EQ(nccl_sum(x), 1000);
}

/* The random pauses of the fake mix the calls of the threads, on each rank otherwise. */
RANKS(messages_beside_collectives, .ranks = 2, .deadline_s = 60)
{
    setenv("FAKE_NCCL_JITTER", "200", 0);
    nccl_begin(600000);
    td_tensor *x = warm_up();
    talk_beside_collectives(x);
    td_tensor_release(x);
    nccl_end();
}

/* All communicators are there, and all kernels are loaded, before the threads begin: nothing is left that waits on the
 * host for the device. */
RANKS(connected_messages_beside_collectives, .ranks = 2, .deadline_s = 60)
{
    setenv("FAKE_NCCL_JITTER", "200", 0);
    nccl_begin(600000);
    td_tensor *x = warm_up();
    exchange(NULL);
    CHECK_EQ(nccl_sum(x), 1000);
    CHECK_OK(td_device_synchronize(nccl_device()));
    td_test_barrier();
    talk_beside_collectives(x);
    td_tensor_release(x);
    nccl_end();
}
