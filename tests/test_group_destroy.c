/* A group is destroyed while other threads are in calls on it: td_group_destroy() waits for them. */
#include "runner.h"
#include "ways.h"

#include "base/clock.h"
#include "group/process_group.h"

#include <tandem/dist.h>
#include <tandem/group.h>
#include <tandem/ops.h>

#include <pthread.h>
#include <stdlib.h>

enum { LARGE = 8 << 20, TIMEOUT_MS = 60000 };

struct call {
    td_status (*make)(struct call *call);   /* by a thread of rank 0 */
    td_status (*answer)(struct call *call); /* by rank 1, when rank 0 destroys the group */
    unsigned collectives;                   /* that it makes at once; 0: it is none */
    bool prepares;                          /* a receive is posted before */
    td_group *group;                        /* NULL: the world */
    float received;
    td_work *posted;
    atomic_bool done;
};

static int other(void)
{
    return 1 - td_test_rank();
}

static td_status send_one(struct call *call)
{
    float x = 3;
    return td_group_send(&x, 1, TD_F32, other(), 5, call->group, NULL);
}

static td_status receive_one(struct call *call)
{
    float x = 0;
    td_status status = td_group_recv(&x, 1, TD_F32, other(), 5, call->group, NULL);
    CHECK_EQ((int)x, status ? 0 : 3);
    return status;
}

static td_status receive_any(struct call *call)
{
    float x = 0;
    return td_group_recv(&x, 1, TD_F32, TD_ANY_SOURCE, 5, call->group, NULL);
}

static td_status wait_for_message(struct call *call)
{
    td_status status = td_work_wait(call->posted, 0);
    td_work_release(call->posted);
    CHECK_EQ((int)call->received, status ? 0 : 3);
    return status;
}

static td_status send_much(struct call *call)
{
    char *bytes = calloc(LARGE, 1);
    td_status status = td_group_send(bytes, LARGE, TD_U8, other(), 6, call->group, NULL);
    free(bytes);
    return status;
}

static td_status receive_much(struct call *call)
{
    char *bytes = malloc(LARGE);
    td_status status = td_group_recv(bytes, LARGE, TD_U8, other(), 6, call->group, NULL);
    free(bytes);
    return status;
}

static td_status sum_up(struct call *call)
{
    float x = 1;
    td_status status = td_group_all_reduce(&x, &x, 1, TD_F32, TD_SUM, call->group, NULL);
    CHECK_EQ((int)x, status ? 1 : 2);
    return status;
}

static td_status sum_up_much(struct call *call)
{
    float *x = calloc(LARGE / sizeof *x, sizeof *x);
    td_status status = td_group_all_reduce(x, x, LARGE / sizeof *x, TD_F32, TD_SUM, call->group,
                                           NULL);
    free(x);
    return status;
}

/* The second one is queued behind the first. */
static td_status sum_up_later(struct call *call)
{
    float x = 1, y = 1;
    td_work *work;
    CHECK_OK(td_group_all_reduce(&x, &x, 1, TD_F32, TD_SUM, call->group, &work));
    td_status status = td_group_all_reduce(&y, &y, 1, TD_F32, TD_SUM, call->group, NULL);
    td_status first = td_work_wait(work, 0);
    td_work_release(work);
    return status ? status : first;
}

static td_status meet(struct call *call)
{
    return td_group_barrier(call->group, NULL);
}

static td_status meet_monitored(struct call *call)
{
    return td_group_monitored_barrier(call->group, TIMEOUT_MS, true, NULL, NULL);
}

static td_status split(struct call *call)
{
    td_group *part = NULL;
    td_status status = td_group_split(call->group, 1, 0, NULL, &part);
    if (call->group)
        td_group_destroy(part);
    return status;
}

static td_status shrink(struct call *call)
{
    td_group *rest = NULL;
    td_status status = td_group_shrink(call->group, NULL, &rest);
    if (call->group)
        td_group_destroy(rest);
    return status;
}

/* ---- Calls that are made of several operations ------------------------------------------------- */

static td_bytes object_of(int rank)
{
    static char words[2][8] = {"zero", "one"};
    return (td_bytes){words[rank], 5 - (size_t)rank};
}

static void check_object(td_bytes *object, int rank, td_status status)
{
    if (!status)
        CHECK_STR(object->data, object_of(rank).data);
    td_bytes_free(object);
}

static td_status broadcast_object(struct call *call)
{
    td_bytes object = {0};
    if (td_test_rank() == 1)
        object = object_of(1);
    td_status status = td_broadcast_object_list(&object, 1, 1, call->group);
    if (td_test_rank() == 0)
        check_object(&object, 1, status);
    return status;
}

static td_status all_gather_objects(struct call *call)
{
    td_bytes objects[2] = {{0}};
    td_status status = td_all_gather_object(objects, 2, object_of(td_test_rank()), call->group);
    for (int r = 0; r < 2; r++)
        check_object(&objects[r], r, status);
    return status;
}

static td_status gather_objects(struct call *call)
{
    td_bytes objects[2] = {{0}};
    bool root = td_test_rank() == 0;
    td_status status = td_gather_object(object_of(td_test_rank()), root ? objects : NULL,
                                        root ? 2 : 0, 0, call->group);
    for (int r = 0; r < 2 && root; r++)
        check_object(&objects[r], r, status);
    return status;
}

static td_status scatter_objects(struct call *call)
{
    td_bytes objects[2] = {object_of(0), object_of(1)}, object = {0};
    bool root = td_test_rank() == 1;
    td_status status = td_scatter_object_list(&object, root ? objects : NULL, root ? 2 : 0, 1,
                                              call->group);
    check_object(&object, td_test_rank(), status);
    return status;
}

static td_status send_object(struct call *call)
{
    td_bytes objects[] = {object_of(0), {calloc(LARGE, 1), LARGE}};
    td_status status = td_send_object_list(objects, 2, other(), call->group);
    td_bytes_free(&objects[1]);
    return status;
}

static td_status receive_object(struct call *call)
{
    td_bytes objects[2] = {{0}};
    int source = -1;
    td_status status = td_recv_object_list(objects, 2, TD_ANY_SOURCE, call->group, &source);
    if (!status)
        CHECK(objects[1].size == LARGE && source == other());
    check_object(&objects[0], 0, status);
    td_bytes_free(&objects[1]);
    return status;
}

/* One operation for each dtype. */
static td_status sum_up_coalesced(struct call *call)
{
    td_tensor *tensors[] = {td_ones((int64_t[]){3}, 1, TD_F32, NULL), td_ones((int64_t[]){2}, 1, TD_I64, NULL)};
    td_status status = td_all_reduce_coalesced(tensors, 2, TD_SUM, call->group, NULL);
    if (!status)
        CHECK(((float *)td_tensor_data(tensors[0]))[0] == 2 &&
              ((int64_t *)td_tensor_data(tensors[1]))[1] == 2);
    td_tensor_release(tensors[0]);
    td_tensor_release(tensors[1]);
    return status;
}

static const struct call calls[] = {
    {.make = receive_one, .answer = send_one},
    {.make = receive_any, .answer = send_one},
    {.make = wait_for_message, .answer = send_one, .prepares = true},
    {.make = send_much, .answer = receive_much},
    {.make = sum_up, .answer = sum_up, .collectives = 1},
    {.make = sum_up_much, .answer = sum_up_much, .collectives = 1},
    {.make = sum_up_later, .answer = sum_up_later, .collectives = 2},
    {.make = meet, .answer = meet, .collectives = 1},
    {.make = meet_monitored, .answer = meet_monitored},
    {.make = split, .answer = split},
    {.make = shrink, .answer = shrink},
    /* The group is in use also between their operations, which a count of collectives would not show. */
    {.make = broadcast_object, .answer = broadcast_object},
    {.make = all_gather_objects, .answer = all_gather_objects},
    {.make = gather_objects, .answer = gather_objects},
    {.make = scatter_objects, .answer = scatter_objects},
    {.make = send_object, .answer = receive_object},
    {.make = receive_object, .answer = send_object},
    {.make = sum_up_coalesced, .answer = sum_up_coalesced},
};

static void *make_call(void *arg)
{
    struct call *call = arg;
    CHECK_OK(call->make(call));
    atomic_store(&call->done, true);
    return NULL;
}

/* The other rank answers when the group is being destroyed. */
static void *let_it_answer(void *arg)
{
    td_group *group = arg;
    CHECK_SOON(atomic_load(&group->closing));
    td__group_unuse(group);
    td_test_barrier();
    return NULL;
}

static void destroy_in(const struct call *made, bool whole_world, const struct way *way)
{
    struct call call = *made;
    pthread_t caller, teller;
    open_world(way, TIMEOUT_MS);
    if (!whole_world)
        CHECK_OK(td_new_group(NULL, 0, NULL, &call.group));
    td_group *group = whole_world ? td__world() : call.group;
    if (td_test_rank() == 0) {
        if (call.prepares)
            CHECK_OK(td_group_recv(&call.received, 1, TD_F32, 1, 5, call.group, &call.posted));
        CHECK_EQ(pthread_create(&caller, NULL, make_call, &call), 0);
        CHECK_SOON(call.collectives ? atomic_load(&group->pending) == call.collectives
                                    : atomic_load(&group->users) > 0);
        td__group_use(group); /* the teller's */
        CHECK_EQ(pthread_create(&teller, NULL, let_it_answer, group), 0);
        if (whole_world)
            CHECK_OK(td_destroy_process_group());
        else
            td_group_destroy(call.group);
        pthread_join(caller, NULL);
        pthread_join(teller, NULL);
        CHECK(atomic_load(&call.done));
    } else {
        td_test_barrier();
        CHECK_OK(call.answer(&call));
        if (!whole_world)
            td_group_destroy(call.group);
    }
    if (td_is_initialized())
        CHECK_OK(td_destroy_process_group());
    td_test_barrier();
}

static void destroy_in_each(bool whole_world, const struct way *way)
{
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++)
        destroy_in(&calls[i], whole_world, way);
}

RANKS(destroying_a_group_in_use, .ranks = 2, .deadline_s = 60)
{
    destroy_in_each(false, &shm);
}

RANKS(destroying_a_group_in_use_tcp, .ranks = 2, .deadline_s = 60)
{
    destroy_in_each(false, &tcp);
}

RANKS(destroying_the_world_in_use, .ranks = 2, .deadline_s = 60)
{
    destroy_in_each(true, &shm);
}

RANKS(destroying_the_world_in_use_tcp, .ranks = 2, .deadline_s = 60)
{
    destroy_in_each(true, &tcp);
}

/* ---- Calls that do not end by themselves ----------------------------------------------------- */

static void *receive_in_vain(void *arg)
{
    struct call *call = arg;
    float x;
    CHECK_FAILS(td_group_recv(&x, 1, TD_F32, 1, 5, call->group, NULL), TD_ERR_ABORTED, "aborted");
    atomic_store(&call->done, true);
    return NULL;
}

static void *give_up(void *arg)
{
    td_group *group = arg;
    CHECK_SOON(atomic_load(&group->closing));
    CHECK_OK(td_group_abort(group));
    td__group_unuse(group);
    return NULL;
}

/* An abort ends them, and the wait with them. */
RANKS(aborting_what_is_destroyed, .ranks = 2)
{
    struct call call = {0};
    pthread_t caller, aborter;
    open_world(&shm, TIMEOUT_MS);
    CHECK_OK(td_new_group(NULL, 0, NULL, &call.group));
    td_group *group = call.group;
    if (td_test_rank() == 0) {
        CHECK_EQ(pthread_create(&caller, NULL, receive_in_vain, &call), 0);
        CHECK_SOON(atomic_load(&group->users) > 0);
        td__group_use(group); /* the aborter's */
        CHECK_EQ(pthread_create(&aborter, NULL, give_up, group), 0);
        td_group_destroy(group);
        CHECK(atomic_load(&call.done));
        pthread_join(caller, NULL);
        pthread_join(aborter, NULL);
    }
    td_test_barrier();
    CHECK_OK(td_destroy_process_group());
}

/* A work that no thread waits for ends with the group; a thread that begins to wait at that moment gets an error. */
static void *wait_late(void *arg)
{
    td_work *work = arg;
    td_status status = td_work_wait(work, 0);
    CHECK(status == TD_ERR_STATE || status == TD_ERR_PEER); /* the other rank may be faster */
    return NULL;
}

RANKS(waiting_for_a_work_of_a_group_that_ends, .ranks = 2)
{
    for (int i = 0; i < 50; i++) {
        td_group *group;
        td_work *work;
        pthread_t waiter;
        float x;
        if (i == 0)
            open_world(&shm, TIMEOUT_MS);
        CHECK_OK(td_new_group(NULL, 0, NULL, &group));
        CHECK_OK(td_group_recv(&x, 1, TD_F32, 1 - td_test_rank(), 5, group, &work));
        td__group_use(group); /* the waiter begins while the group is being destroyed */
        atomic_store(&group->closing, true);
        CHECK_EQ(pthread_create(&waiter, NULL, wait_late, work), 0);
        td__sleep_ns(i * 20000);
        td__group_unuse(group);
        td_group_destroy(group);
        pthread_join(waiter, NULL);
        td_work_release(work);
        td_test_barrier();
    }
    CHECK_OK(td_destroy_process_group());
}

/* ---- A batch of messages ---------------------------------------------------------------------
 *
 * The batch stops at its second message, after the checks, while another thread destroys its groups or the world. */

enum { BATCH = 8, DESTROY_MS = 30 };

static const td_backend_ops *native;
static atomic_bool stopped, go_on, destroyed;

static td_status stop_and_post(void *self, const td_call *call, td_work *work)
{
    atomic_store(&stopped, true);
    while (!atomic_load(&go_on))
        td__sleep_ns(100000);
    return native->post(self, call, work);
}

struct batch {
    td_p2p_op ops[BATCH];
    td_work *works[BATCH];
    td_group *groups[2];
    bool whole_world;
};

static void *start_batch(void *arg)
{
    struct batch *batch = arg;
    CHECK_OK(td_batch_isend_irecv(batch->ops, BATCH, batch->works));
    return NULL;
}

static void *destroy_groups(void *arg)
{
    struct batch *batch = arg;
    if (batch->whole_world)
        CHECK_OK(td_destroy_process_group());
    td_group_destroy(batch->groups[0]);
    atomic_store(&destroyed, true);
    td_group_destroy(batch->groups[1]);
    return NULL;
}

static void destroy_in_batch(struct batch *batch)
{
    pthread_t starter, destroyer;
    td_backend_ops stops = *batch->groups[1]->host.ops;
    native = batch->groups[1]->host.ops;
    stops.post = stop_and_post;
    batch->groups[1]->host.ops = &stops;
    atomic_store(&stopped, false);
    atomic_store(&go_on, false);
    atomic_store(&destroyed, false);
    CHECK_EQ(pthread_create(&starter, NULL, start_batch, batch), 0);
    CHECK_SOON(atomic_load(&stopped));
    CHECK_EQ(pthread_create(&destroyer, NULL, destroy_groups, batch), 0);
    td__sleep_ns(DESTROY_MS * (int64_t)1000000);
    CHECK(!atomic_load(&destroyed));
    atomic_store(&go_on, true);
    pthread_join(starter, NULL);
    pthread_join(destroyer, NULL);
    for (int i = 0; i < BATCH; i++) {
        CHECK_FAILS(td_work_wait(batch->works[i], 0), TD_ERR_STATE, "");
        td_work_release(batch->works[i]);
    }
}

RANKS(destroying_the_groups_of_a_batch, .ranks = 2)
{
    for (int round = 0; round < 4; round++) {
        struct batch batch = {.whole_world = round % 2};
        td_tensor *tensor = td_zeros(TD_SHAPE(1), TD_F32, NULL);
        open_world(&shm, TIMEOUT_MS);
        for (int i = 0; i < 2; i++)
            CHECK_OK(td_new_group(NULL, 0, NULL, &batch.groups[i]));
        for (int i = 0; i < BATCH; i++) /* receives that no send answers */
            batch.ops[i] = (td_p2p_op){.kind = TD_P2P_IRECV,
                                       .tensor = tensor,
                                       .peer = 1,
                                       .tag = i,
                                       .group = batch.groups[i % 2]};
        if (td_test_rank() == 0)
            destroy_in_batch(&batch);
        td_test_barrier();
        if (td_is_initialized())
            CHECK_OK(td_destroy_process_group());
        td_tensor_release(tensor);
        td_test_barrier();
    }
}
