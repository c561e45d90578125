/* Calls that fail: each rank gets a sentence that names the culprit, and none waits for ever. */
#include "base/clock.h"
#include "mpi_cases.h"
#include "runner.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { LARGE = 4 << 20 };

static void works_on(td_group *group)
{
    int x = 1;
    CHECK_OK(td_group_all_reduce(&x, &x, 1, TD_I32, TD_SUM, group, NULL));
    CHECK_EQ(x, td_get_world_size(group));
}

/* Each kind of difference breaks a group of its own; the others go on. */
void mpi_case_mismatch(void)
{
    int rank = td_get_rank(NULL);
    float x[8] = {0}, y[64];
    mpi_begin(60000);
    int size = td_get_world_size(NULL);
    rank = td_get_rank(NULL);
    bool odd = rank == size - 1;
    for (int turn = 0; turn < 6; turn++) {
        td_group *group;
        td_status status = TD_OK;
        const char *part = NULL;
        CHECK_OK(td_new_group(NULL, 0, NULL, &group));
        switch (turn) {
        case 0:
            status = td_group_all_reduce(x, x, odd ? 3 : 4, TD_F32, TD_SUM, group, NULL);
            part = "with 4 f32";
            break;
        case 1:
            status = td_group_all_reduce(x, x, 4, odd ? TD_I32 : TD_F32, TD_SUM, group, NULL);
            part = "4 i32";
            break;
        case 2:
            status = td_group_all_reduce(x, x, 4, TD_F32, odd ? TD_MAX : TD_SUM, group, NULL);
            part = "max";
            break;
        case 3:
            status = odd ? td_group_barrier(group, NULL)
                         : td_group_all_gather(y, x, 4, TD_F32, group, NULL);
            part = "called barrier";
            break;
        case 4:
            status = td_group_broadcast(x, 4, TD_F32, odd ? 1 : 0, group, NULL);
            part = "root 1";
            break;
        default: {
            size_t in[16], out[16];
            for (int r = 0; r < 16; r++)
                in[r] = out[r] = 2;
            if (odd)
                out[0] = 1;
            status = td_group_all_to_all_v(y, y + 32, out, in, TD_F32, group, NULL);
            part = "expects 1";
        }
        }
        CHECK_FAILS(status, TD_ERR_MISMATCH, part);
        CHECK_CONTAINS(td_last_error(), "rank 0");
        char name[32];
        snprintf(name, sizeof name, "rank %d", size - 1);
        CHECK_CONTAINS(td_last_error(), name);
        CHECK_FAILS(td_group_barrier(group, NULL), TD_ERR_MISMATCH, "rank");
        td_group_destroy(group);
        works_on(NULL);
    }
    mpi_end();
}

/* A rank that does not call, and one that has left. */
void mpi_case_late(void)
{
    mpi_begin(60000);
    int rank = td_get_rank(NULL), size = td_get_world_size(NULL);
    td_group *late, *left;
    CHECK_OK(td_new_group(NULL, 0, NULL, &late));
    CHECK_OK(td_new_group(NULL, 0, NULL, &left));
    works_on(late);
    works_on(left);
    int64_t start = td__now_ns();
    if (rank) {
        CHECK_OK(td_set_call_timeout(300));
        CHECK_FAILS(td_barrier(late, NULL), TD_ERR_TIMEOUT, "rank 0");
        CHECK_OK(td_set_call_timeout(0));
        CHECK_FAILS(td_barrier(left, NULL), TD_ERR_PEER, "rank 0 has left");
    } else {
        CHECK_OK(td_group_destroy(left));
    }
    CHECK_PROMPT(start);
    works_on(NULL);
    td_group_destroy(late);
    if (rank)
        td_group_destroy(left);
    CHECK(size > 1);
    mpi_end();
}

void mpi_case_abort(void)
{
    mpi_begin(60000);
    int rank = td_get_rank(NULL);
    td_group *group, *rest;
    CHECK_OK(td_new_group(NULL, 0, NULL, &group));
    works_on(group);
    if (rank == 0) {
        usleep(100000);
        CHECK_OK(td_group_abort(group));
    } else {
        int value;
        td_work *work;
        CHECK_OK(td_group_recv(&value, 1, TD_I32, 0, 1, group, &work));
        CHECK_FAILS(td_barrier(group, NULL), TD_ERR_ABORTED, "aborted by rank 0");
        CHECK_FAILS(td_work_wait(work, 0), TD_ERR_ABORTED, "aborted by rank 0");
        td_work_release(work);
    }
    td_group_destroy(group);
    works_on(NULL);
    CHECK_OK(td_new_group(NULL, 0, NULL, &group));
    works_on(group);
    works_on(NULL); /* no rank is in the other group any more */
    CHECK_OK(td_group_shrink(group, NULL, &rest));
    works_on(rest);
    CHECK_OK(td_group_destroy(rest));
    td_group_destroy(group);
    works_on(NULL);
    mpi_end();
}

/* The launcher must let the others live. */
static void end_after_loss(td_status seen, int64_t start)
{
    int rank = td_get_rank(NULL);
    double seconds = (double)(td__now_ns() - start) / 1e9;
    printf("survivor %d: status %d after %.2f s: %s\n", rank, (int)seen, seconds, td_last_error());
    CHECK_EQ(seen, TD_ERR_PEER);
    CHECK_CONTAINS(td_last_error(), "rank 1");
    CHECK_CONTAINS(td_last_error(), "SIGKILL");
}

/* The others wait for the dead rank in a meeting, and in a message. */
void mpi_case_dead(void)
{
    mpi_begin(60000);
    int rank = td_get_rank(NULL), value;
    td_group *rest;
    td_work *work;
    works_on(NULL);
    if (rank == 1) {
        usleep(200000);
        raise(SIGKILL);
    }
    int64_t start = td__now_ns();
    CHECK_OK(td_group_recv(&value, 1, TD_I32, 1, 1, NULL, &work));
    end_after_loss(td_barrier(NULL, NULL), start);
    CHECK_FAILS(td_work_wait(work, 0), TD_ERR_PEER, "rank 1");
    td_work_release(work);
    CHECK_OK(td_group_shrink(NULL, NULL, &rest)); /* no call of MPI was abandoned */
    works_on(rest);
    CHECK_OK(td_group_destroy(rest));
    td_destroy_process_group();
    printf("survivor %d: done\n", rank);
}

/* The rank dies while the others are in MPI. */
void mpi_case_dead_inside(void)
{
    mpi_begin(60000);
    int rank = td_get_rank(NULL);
    float *x = td_alloc(LARGE * sizeof *x);
    td_status status = TD_OK;
    memset(x, 0, LARGE * sizeof *x);
    works_on(NULL);
    int64_t start = td__now_ns();
    if (rank == 1)
        alarm(1); /* which kills it */
    while (!status)
        status = td_group_all_reduce(x, x, LARGE, TD_F32, TD_SUM, NULL, NULL);
    CHECK_EQ(status, TD_ERR_PEER);
    CHECK_CONTAINS(td_last_error(), "rank 1");
    printf("survivor %d: status %d after %.2f s: %s\n", rank, (int)status,
           (double)(td__now_ns() - start) / 1e9, td_last_error());
    td_group *rest;
    status = td_group_shrink(NULL, &(td_group_options){.backend = "native"}, &rest);
    CHECK_OK(status);
    works_on(rest);
    td_group_destroy(rest);
    td_destroy_process_group();
    printf("survivor %d: done\n", rank);
}
