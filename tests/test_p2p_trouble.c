/* Messages that do not arrive: deadlines, buffers that are too small, ranks that leave or die. */
#include "base/clock.h"
#include "p2p_worlds.h"
#include "runner.h"

#include <signal.h>
#include <string.h>
#include <unistd.h>

enum { LARGE = 2 << 20 };

/* ---- Arguments ------------------------------------------------------------------------------- */

BOTH_WAYS(refusals, .ranks = 2)
{
    world_begin();
    int rank = td_get_rank(NULL), value = 0;
    CHECK_FAILS(td_group_send(&value, 1, TD_I32, rank, 0, NULL, NULL), TD_ERR_INVALID, "itself");
    CHECK_FAILS(td_group_recv(&value, 1, TD_I32, rank, 0, NULL, NULL), TD_ERR_INVALID, "itself");
    CHECK_FAILS(td_group_send(&value, 1, TD_I32, 2, 0, NULL, NULL), TD_ERR_INVALID, "2");
    CHECK_FAILS(td_group_send(&value, 1, TD_I32, 1 - rank, TD_ANY_TAG, NULL, NULL), TD_ERR_INVALID,
                "tag");
    world_end();
}

/* ---- Lengths --------------------------------------------------------------------------------- */

/* A message that is too long is lost, and hurts nothing else. */
BOTH_WAYS(too_long, .ranks = 2)
{
    static const size_t lengths[] = {100, 5000, 100000, LARGE};
    world_begin();
    unsigned char *data = td_alloc(LARGE);
    for (int posted_first = 0; posted_first < 2; posted_first++)
        for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
            size_t size = lengths[i];
            td_test_barrier();
            if (td_get_rank(NULL) == 0) {
                if (posted_first)
                    usleep(10000);
                CHECK_OK(td_group_send(data, size, TD_U8, 1, 4, NULL, NULL));
                send_int(9, 1, 4);
            } else {
                if (!posted_first)
                    usleep(10000);
                char part[64];
                memset(part, 1, sizeof part);
                CHECK_FAILS(td_group_recv(part, 50, TD_U8, 0, 4, NULL, NULL), TD_ERR_MISMATCH,
                            "up to 50 bytes from rank 0");
                CHECK_CONTAINS(td_last_error(), "tag 4");
                CHECK_CONTAINS(td_last_error(), "the message has ");
                CHECK_EQ(part[50], 1);
                CHECK_EQ(recv_int(0, 4), 9);
            }
        }
    td_free(data);
    world_end();
}

BOTH_WAYS(shorter, .ranks = 2)
{
    static const size_t lengths[] = {0, 1, 3000, 70000, LARGE - 1};
    world_begin();
    unsigned char *data = malloc(LARGE);
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        if (td_get_rank(NULL) == 0) {
            fill(data, lengths[i], 3);
            CHECK_OK(td_group_send(data, lengths[i], TD_U8, 1, 0, NULL, NULL));
            continue;
        }
        td_work *work;
        data[lengths[i]] = 77;
        CHECK_OK(td_group_recv(data, LARGE, TD_U8, 0, 0, NULL, &work));
        CHECK_OK(td_work_wait(work, 0));
        CHECK_EQ(td_work_received(work), lengths[i]);
        CHECK_EQ(td_work_source(work), 0);
        check_filled(data, lengths[i], 3);
        CHECK_EQ(data[lengths[i]], 77);
        td_work_release(work);
    }
    free(data);
    world_end();
}

/* ---- Deadlines ------------------------------------------------------------------------------- */

static td_group *short_group(int64_t timeout_ms)
{
    td_group *group;
    CHECK_OK(td_new_group(NULL, 0, &(td_group_options){.timeout_ms = timeout_ms, .name = "short"},
                          &group));
    return group;
}

BOTH_WAYS(recv_times_out, .ranks = 2)
{
    world_begin();
    td_group *group = short_group(150);
    int value = 0;
    int64_t start = td__now_ns();
    if (td_get_rank(NULL) == 0) {
        CHECK_FAILS(td_group_recv(&value, 1, TD_I32, 1, 42, group, NULL), TD_ERR_TIMEOUT,
                    "recv of up to 4 bytes from rank 1");
        CHECK_CONTAINS(td_last_error(), "tag 42");
        CHECK_CONTAINS(td_last_error(), "\"short\"");
        int64_t took = (td__now_ns() - start) / 1000000;
        CHECK(took >= 150);
        CHECK_PROMPT(start);
    }
    CHECK_OK(td_group_barrier(NULL, NULL));
    td_group_destroy(group);
    world_end();
}

/* Without a thread that waits, too. */
BOTH_WAYS(works_time_out_alone, .ranks = 2)
{
    world_begin();
    td_group *group = short_group(100);
    unsigned char *data = malloc(LARGE);
    if (td_get_rank(NULL) == 0) {
        td_work *recv, *send;
        CHECK_OK(td_group_recv(data, 8, TD_U8, TD_ANY_SOURCE, 1, group, &recv));
        CHECK_OK(td_group_send(data, LARGE, TD_U8, 1, 2, group, &send));
        td_work *works[2] = {recv, send};
        for (int i = 0; i < 2; i++) {
            CHECK_SOON(td_work_status(works[i]) != TD_OK);
            CHECK_FAILS(td_work_status(works[i]), TD_ERR_TIMEOUT,
                        i ? "send of 2097152 bytes to rank 1" : "from any rank");
            CHECK_CONTAINS(td_last_error(), i ? "tag 2" : "tag 1");
            td_work_release(works[i]);
        }
        memset(data, 0, LARGE);
    }
    CHECK_OK(td_group_barrier(NULL, NULL));
    free(data);
    td_group_destroy(group);
    world_end();
}

/* A send that was given up is not received any more, and the next one is. */
BOTH_WAYS(cancelled_send, .ranks = 2)
{
    world_begin();
    unsigned char *data = td_alloc(LARGE);
    if (td_get_rank(NULL) == 0) {
        CHECK_OK(td_set_call_timeout(100));
        CHECK_FAILS(td_group_send(data, LARGE, TD_U8, 1, 2, NULL, NULL), TD_ERR_TIMEOUT, "send of");
        CHECK_OK(td_set_call_timeout(0));
    }
    td_test_barrier();
    td_free(data);
    int rank = td_get_rank(NULL);
    td_status broken = rank ? TD_OK : td_group_send(&rank, 1, TD_I32, 1, 2, NULL, NULL);
    if (rank == 1) {
        CHECK_OK(td_set_call_timeout(3000));
        int value = -1;
        /* The group may be of no more use on the other side. */
        if (td_group_recv(&value, 1, TD_I32, 0, 2, NULL, NULL) == TD_OK)
            CHECK_EQ(value, 0);
    }
    (void)broken;
    td_test_barrier();
    td_destroy_process_group();
}

/* ---- Leaving and dying ----------------------------------------------------------------------- */

/* What was sent before a rank left can be received; then the others are told. */
BOTH_WAYS(a_rank_leaves, .ranks = 2)
{
    world_begin();
    td_group *group = short_group(60000);
    if (td_get_rank(NULL) == 0) {
        for (int i = 0; i < 3; i++)
            CHECK_OK(td_group_send(&i, 1, TD_I32, 1, i, group, NULL));
        td_group_destroy(group);
        td_test_barrier();
    } else {
        td_test_barrier();
        int value = -1;
        for (int i = 2; i >= 0; i--) {
            CHECK_OK(td_group_recv(&value, 1, TD_I32, 0, i, group, NULL));
            CHECK_EQ(value, i);
        }
        CHECK_FAILS(td_group_recv(&value, 1, TD_I32, 0, 0, group, NULL), TD_ERR_PEER,
                    "has left the group");
        td_group_destroy(group);
    }
    world_end();
}

BOTH_WAYS(a_rank_leaves_while_another_waits, .ranks = 3)
{
    world_begin();
    td_group *group = short_group(60000);
    int rank = td_get_rank(NULL), value = -1;
    if (rank == 0) {
        CHECK_OK(td_group_send(&rank, 1, TD_I32, 1, 0, group, NULL));
        usleep(50000);
    } else if (rank == 1) {
        CHECK_OK(td_group_recv(&value, 1, TD_I32, 0, 0, group, NULL));
        int64_t start = td__now_ns();
        CHECK_FAILS(td_group_recv(&value, 1, TD_I32, 0, 1, group, NULL), TD_ERR_PEER,
                    "has left the group");
        CHECK_PROMPT(start);
    }
    td_group_destroy(group);
    world_end();
}

/* A large send without a receive does not hold its group up for longer than a second. */
BOTH_WAYS(leaving_with_a_large_send, .ranks = 2)
{
    world_begin();
    td_group *group = short_group(60000);
    unsigned char *data = malloc(LARGE);
    if (td_get_rank(NULL) == 0) {
        td_work *work;
        CHECK_OK(td_group_send(data, LARGE, TD_U8, 1, 0, group, &work));
        td_work_on_complete(work, NULL, NULL);
        int64_t start = td__now_ns();
        td_group_destroy(group);
        CHECK((td__now_ns() - start) / 1000000 < 25000);
        CHECK(td_work_test(work));
        td_work_release(work);
        td_test_barrier();
    } else {
        td_test_barrier();
        td_group_destroy(group);
    }
    free(data);
    world_end();
}

static void die_while_others_wait(int posted)
{
    world_begin();
    int rank = td_get_rank(NULL), value = -1;
    unsigned char *data = td_alloc(LARGE);
    if (rank == 1) {
        send_int(1, 0, 1);
        CHECK_EQ(recv_int(0, 2), 2);
        kill(getpid(), SIGKILL);
    }
    CHECK_EQ(recv_int(1, 1), 1);
    send_int(2, 1, 2);
    int64_t start = td__now_ns();
    td_status status = posted ? td_group_send(data, LARGE, TD_U8, 1, 3, NULL, NULL)
                              : td_group_recv(&value, 1, TD_I32, 1, 3, NULL, NULL);
    CHECK_EQ(status, TD_ERR_PEER);
    CHECK_CONTAINS(td_last_error(), "rank 1");
    CHECK_PROMPT(start);
    td_free(data);
    td_destroy_process_group();
}

BOTH_WAYS(death_while_receiving, .ranks = 2, .may_die = 2)
{
    die_while_others_wait(0);
}

BOTH_WAYS(death_while_sending, .ranks = 2, .may_die = 2)
{
    die_while_others_wait(1);
}
