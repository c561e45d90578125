/* What the native backend does with memory of an accelerator: pieces overlap, messages match whatever memory each side
 * has, and failures between two pieces. No test depends on time: the toy accelerator stops before a given copy. */
#include "runner.h"
#include "staging/staging.h"
#include "toy_device.h"

#include <tandem/tandem.h>

#include <pthread.h>
#include <signal.h>
#include <string.h>

enum { PIECE = TD__STAGED_PIECE, PIECES = 5, ELEMENTS = PIECES * PIECE / 4 };

static td_device *toy(void)
{
    return td_device_get("toy:0");
}

static void begin_with(const char *backend)
{
    CHECK_OK(toy_register());
    toy_set_delay(20);
    CHECK_OK(td_init_process_group(&(td_init_options){.backend = backend, .timeout_ms = 60000}));
}

/* A tensor of all pieces, whose copies are complete. */
static td_tensor *full(double value, td_device *device)
{
    td_tensor *x = td_full(TD_SHAPE(ELEMENTS), value, TD_F32, device);
    CHECK(x);
    if (device == toy())
        CHECK_OK(td_device_synchronize(device));
    return x;
}

static void check_full(td_tensor *x, double value)
{
    TD_SCOPE;
    const float *data = td_tensor_data(td_tensor_to(x, td_device_get("cpu")));
    for (int i = 0; i < ELEMENTS; i++)
        if (data[i] != (float)value)
            FAIL("element %d is %g instead of %g", i, data[i], value);
}

static int64_t copied_out(void)
{
    return toy_counts(0).copied_out;
}

static int64_t copied_in(void)
{
    return toy_counts(0).copied_in;
}

/* ---- Overlap ---------------------------------------------------------------------------------------- */

/* Rank 1 does not join in before rank 0 has enqueued the copy of its second piece: the first one cannot have run. */
RANKS(pieces_overlap, .ranks = 2)
{
    begin_with(NULL);
    td_tensor *x = full(td_get_rank(NULL) + 1, toy());
    int64_t out = copied_out(), in = copied_in();
    td_work *work;
    if (td_get_rank(NULL) == 0) {
        CHECK_OK(td_all_reduce(x, TD_SUM, NULL, &work));
        CHECK_SOON(copied_out() - out == 2 * PIECE);
        td_test_barrier();
    } else {
        td_test_barrier();
        CHECK_EQ(copied_out() - out, 0);
        CHECK_OK(td_all_reduce(x, TD_SUM, NULL, &work));
    }
    CHECK_OK(td_work_wait(work, 0));
    CHECK_EQ(copied_out() - out, PIECES * PIECE);
    CHECK_EQ(copied_in() - in, PIECES * PIECE);
    td_work_release(work);
    check_full(x, 3);
    td_tensor_release(x);
    CHECK_OK(td_destroy_process_group());
}

/* On rank 0 no copy back can run, and yet both pieces do. */
RANKS(results_are_not_waited_for, .ranks = 2)
{
    begin_with(NULL);
    TD_SCOPE;
    td_tensor *x = td_full(TD_SHAPE(2 * PIECE / 4), td_get_rank(NULL) + 1, TD_F32, toy());
    CHECK_OK(td_device_synchronize(toy()));
    int64_t out = copied_out(), in = copied_in();
    td_work *work;
    if (td_get_rank(NULL) == 1) {
        td_test_barrier();
        CHECK_OK(td_all_reduce(x, TD_SUM, NULL, NULL));
    } else {
        CHECK_OK(td_all_reduce(x, TD_SUM, NULL, &work));
        CHECK_SOON(copied_out() - out == 2 * PIECE);
        CHECK_OK(td_device_synchronize(toy()));
        toy_limit_copies(0, 0);
        td_test_barrier();
        CHECK_OK(td_work_wait(work, 0));
        CHECK_EQ(copied_in() - in, 2 * PIECE);
        CHECK_FAILS(td_work_synchronize(work, TD_NOW), TD_ERR_TIMEOUT, "does not have the result");
        toy_limit_copies(0, -1);
        CHECK_OK(td_work_synchronize(work, 0));
        td_work_release(work);
    }
    CHECK_EQ(td_item(td_select(x, 0, 2 * PIECE / 4 - 1)), 3);
    CHECK_OK(td_destroy_process_group());
}

/* The first pieces of a message are on the other device before the last ones have left theirs. */
static void check_message_overlap(const char *backend)
{
    begin_with(backend);
    int rank = td_get_rank(NULL);
    td_tensor *x = full(rank, toy());
    int64_t in = copied_in();
    td_work *work;
    if (rank == 0) {
        toy_limit_copies(0, 2);
        CHECK_OK(td_isend(x, 1, 0, NULL, &work));
        td_test_barrier();
        toy_limit_copies(0, -1);
    } else {
        CHECK_OK(td_irecv(x, 0, 0, NULL, &work));
        CHECK_SOON(copied_in() - in >= PIECE);
        CHECK(!td_work_test(work));
        td_test_barrier();
    }
    CHECK_OK(td_work_wait(work, 0));
    CHECK_EQ(copied_in() - in, rank ? PIECES * PIECE : 0);
    td_work_release(work);
    check_full(x, 0);
    td_tensor_release(x);
    CHECK_OK(td_destroy_process_group());
}

RANKS(messages_overlap, .ranks = 2)
{
    check_message_overlap("native");
}

RANKS(messages_overlap_over_sockets, .ranks = 2)
{
    check_message_overlap("tcp");
}

/* ---- Messages between any two kinds of memory ----------------------------------------------------------- */

static void exchange(int from, int to)
{
    TD_SCOPE;
    td_device *devices[2] = {td_device_get("cpu"), toy()};
    int source = -1, rank = td_get_rank(NULL);
    td_tensor *x = full(rank ? -1 : 7, devices[rank ? to : from]);
    td_tensor *small = td_full(TD_SHAPE(3), 2, TD_F32, devices[from]);
    td_work *works[2];
    if (rank == 0) {
        CHECK_OK(td_isend(x, 1, 5, NULL, &works[0]));
        CHECK_OK(td_isend(small, 1, 5, NULL, &works[1]));
        CHECK_OK(td_work_wait_all(works, 2, 0));
        td_work_release(works[0]);
        td_work_release(works[1]);
        CHECK_OK(td_send(x, 1, 6, NULL));
    } else {
        CHECK_OK(td_recv(x, TD_ANY_SOURCE, TD_ANY_TAG, NULL, &source));
        CHECK_EQ(source, 0);
        check_full(x, 7);
        CHECK_OK(td_irecv(x, 0, 5, NULL, &works[0])); /* shorter than the tensor */
        CHECK_OK(td_work_wait(works[0], 0));
        CHECK_EQ(td_work_received(works[0]), 12);
        td_work_release(works[0]);
        CHECK_EQ(td_item(td_select(x, 0, 2)), 2);
        CHECK_EQ(td_item(td_select(x, 0, 3)), 7);
        CHECK_OK(td_recv(x, 0, 6, NULL, NULL));
        check_full(x, 7);
    }
}

static void exchange_all(const char *backend)
{
    begin_with(backend);
    for (int i = 0; i < 4; i++)
        exchange(i / 2, i % 2);
    CHECK_OK(td_destroy_process_group());
}

RANKS(messages_of_any_memory, .ranks = 2)
{
    exchange_all("native");
}

RANKS(messages_of_any_memory_over_sockets, .ranks = 2)
{
    exchange_all("tcp");
}

/* ---- Failures between two pieces ------------------------------------------------------------------------- */

/* The last rank stops after two pieces. */
static td_tensor *begin_and_stop(void)
{
    begin_with(NULL);
    td_tensor *x = full(1, toy());
    CHECK_OK(td_all_reduce(x, TD_SUM, NULL, NULL));
    CHECK_OK(td_device_synchronize(toy()));
    if (td_get_rank(NULL) == td_get_world_size(NULL) - 1)
        toy_limit_copies(0, 2 + 1); /* the copy back of the first piece may run before */
    return x;
}

/* What the failed call has enqueued does not write to the tensor after the caller does. */
static void check_order_after_failure(td_tensor *x)
{
    CHECK_OK(td_fill_(x, -5));
    CHECK_OK(td_device_synchronize(toy()));
    check_full(x, -5);
}

RANKS(a_rank_dies_between_pieces, .ranks = 3, .may_die = 1 << 2)
{
    td_tensor *x = begin_and_stop();
    td_work *work;
    int64_t out = copied_out(), pinned = toy_pinned_bytes();
    toy_set_delay(2000);
    CHECK_OK(td_all_reduce(x, TD_SUM, NULL, &work));
    CHECK_SOON(copied_out() - out >= 2 * PIECE);
    td_test_barrier();
    if (td_get_rank(NULL) == 0)
        td_test_kill(2, SIGKILL);
    CHECK_FAILS(td_work_wait(work, 0), TD_ERR_PEER, "rank 2");
    td_work_release(work);
    check_order_after_failure(x);
    CHECK_FAILS(td_all_reduce(x, TD_SUM, NULL, NULL), TD_ERR_PEER, "rank 2");
    CHECK_EQ(toy_pinned_bytes(), pinned);
    td_tensor_release(x);
    td_destroy_process_group();
}

static void *abort_group(void *arg)
{
    td_test_barrier();
    CHECK_OK(td_group_abort(arg));
    return NULL;
}

static void check_abort(bool blocking)
{
    td_tensor *x = begin_and_stop();
    pthread_t thread;
    int64_t out = copied_out(), pinned = toy_pinned_bytes();
    toy_set_delay(2000);
    if (td_get_rank(NULL) == 0) {
        CHECK_EQ(pthread_create(&thread, NULL, abort_group, NULL), 0);
        td_work *work;
        td_status status = TD_OK;
        if (blocking) {
            status = td_all_reduce(x, TD_SUM, NULL, NULL);
        } else {
            CHECK_OK(td_all_reduce(x, TD_SUM, NULL, &work));
            status = td_work_wait(work, 0);
            td_work_release(work);
        }
        CHECK_FAILS(status, TD_ERR_ABORTED, "aborted");
        pthread_join(thread, NULL);
    } else {
        td_work *work;
        CHECK_OK(td_all_reduce(x, TD_SUM, NULL, &work));
        CHECK_SOON(copied_out() - out >= 2 * PIECE);
        td_test_barrier();
        toy_limit_copies(0, -1); /* the host waits for its device, whatever happens */
        CHECK_FAILS(td_work_wait(work, 0), TD_ERR_ABORTED, "aborted");
        td_work_release(work);
    }
    check_order_after_failure(x);
    CHECK_FAILS(td_all_reduce(x, TD_SUM, NULL, NULL), TD_ERR_ABORTED, "aborted");
    CHECK_EQ(toy_pinned_bytes(), pinned);
    td_tensor_release(x);
    td_destroy_process_group();
}

RANKS(an_abort_between_pieces, .ranks = 2)
{
    check_abort(true);
}

RANKS(an_abort_of_a_work_between_pieces, .ranks = 2)
{
    check_abort(false);
}

/* The receiver has a part of the message. */
static void check_failing_send(const char *backend, bool dies)
{
    begin_with(backend);
    td_tensor *x = full(1, toy());
    int64_t in = copied_in();
    td_work *work;
    if (td_get_rank(NULL) == 0) {
        toy_limit_copies(0, 2);
        toy_fail_copy(0, 4, TOY_LATER);
        CHECK_OK(td_isend(x, 1, 0, NULL, &work));
        td_test_barrier();
        if (dies)
            raise(SIGKILL);
        toy_limit_copies(0, -1);
        td_status status = td_work_wait(work, 0);
        CHECK(status == TD_ERR_SYSTEM || status == TD_ERR_PEER);
        CHECK_CONTAINS(td_last_error(), "device");
        td_work_release(work);
        toy_clear_failure(0);
    } else {
        CHECK_OK(td_irecv(x, 0, 0, NULL, &work));
        CHECK_SOON(copied_in() - in >= PIECE);
        td_test_barrier();
        CHECK_FAILS(td_work_wait(work, 0), TD_ERR_PEER, "rank 0");
        td_work_release(work);
        check_order_after_failure(x);
    }
    td_tensor_release(x);
    td_destroy_process_group();
}

RANKS(a_sender_that_dies_between_pieces, .ranks = 2, .may_die = 1)
{
    check_failing_send("native", true);
}

RANKS(a_device_that_fails_between_pieces, .ranks = 2)
{
    check_failing_send("native", false);
}

RANKS(a_device_that_fails_between_pieces_over_sockets, .ranks = 2)
{
    check_failing_send("tcp", false);
}

/* Sends that are posted, half copied and not copied at all; the receiver never comes. */
RANKS(an_abort_of_messages, .ranks = 2)
{
    begin_with(NULL);
    if (td_get_rank(NULL) == 0) {
        td_tensor *x = full(1, toy());
        td_work *works[3];
        toy_limit_copies(0, 7);
        for (int i = 0; i < 3; i++)
            CHECK_OK(td_isend(x, 1, i, NULL, &works[i]));
        CHECK_OK(td_group_abort(NULL));
        toy_limit_copies(0, -1);
        for (int i = 0; i < 3; i++) {
            CHECK_FAILS(td_work_wait(works[i], 0), TD_ERR_ABORTED, "aborted");
            td_work_release(works[i]);
        }
        td_tensor_release(x);
    }
    td_test_barrier();
    td_destroy_process_group();
}

/* Works that are not complete when the group is destroyed. */
RANKS(messages_of_a_destroyed_group, .ranks = 2)
{
    begin_with(NULL);
    td_group *group;
    td_work *work;
    CHECK_OK(td_new_group(NULL, 0, NULL, &group));
    td_tensor *x = full(1, toy());
    if (td_get_rank(NULL) == 0)
        CHECK_OK(td_isend(x, 1, 0, group, &work));
    else
        CHECK_OK(td_irecv(x, 0, 1, group, &work)); /* another tag */
    CHECK_OK(td_group_destroy(group));
    td_status status = td_work_wait(work, 0);
    CHECK(status == TD_ERR_STATE || status == TD_ERR_PEER);
    td_work_release(work);
    td_tensor_release(x);
    CHECK_OK(td_destroy_process_group());
}
