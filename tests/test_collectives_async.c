/* Asynchronous collectives: many in flight on one group, waited for in any order or not at all, between
 * blocking ones, with callbacks, on several groups and from several threads. */
#include "collective_cases.h"

#include "reduction_reference.h"
#include "runner.h"

#include "base/clock.h"

#include <pthread.h>
#include <stdatomic.h>

enum { FLIGHTS = 40 };

static const struct setup here;

static struct collective_case any_case(const struct scene *scene, uint64_t *state)
{
    uint64_t random = next_random(state);
    return (struct collective_case){
        .kind = (td_op_kind)(random % (TD_OP_BARRIER + 1)),
        .dtype = random >> 40 & 1 ? TD_F32 : TD_I64,
        .op = TD_SUM,
        .count = random >> 8 & 7 ? random >> 16 & 0x3ff : random >> 16 & 0x7fff,
        .root = (int)((random >> 44) % (uint64_t)scene->size),
        .in_place = random >> 48 & 1,
        .memory = (enum memory)((random >> 50) % MEMORIES),
    };
}

static void run_batch(struct scene *scene, uint64_t *state)
{
    struct flight *flights[FLIGHTS];
    int order[FLIGHTS];
    for (int i = 0; i < FLIGHTS; i++) {
        struct collective_case what = any_case(scene, state);
        flights[i] = case_start(scene, &what, next_random(state) % 5 != 0);
        order[i] = i;
    }
    /* Another order on each rank. */
    uint64_t own = *state + (uint64_t)scene->rank;
    for (int i = FLIGHTS - 1; i > 0; i--) {
        int k = (int)(next_random(&own) % (uint64_t)(i + 1)), kept = order[i];
        order[i] = order[k];
        order[k] = kept;
    }
    for (int i = 0; i < FLIGHTS; i++)
        flight_finish(flights[order[i]]);
}

static void run_batches(const struct setup *setup)
{
    struct scene scene = scene_open(setup);
    uint64_t state = 5;
    for (int i = 0; i < 10; i++)
        run_batch(&scene, &state);
    scene_close(&scene);
}

RANKS(many_in_flight_1, .ranks = 1)
{
    run_batches(&here);
}

RANKS(many_in_flight_2, .ranks = 2)
{
    run_batches(&here);
}

RANKS(many_in_flight_5, .ranks = 5, .deadline_s = 60)
{
    run_batches(&here);
}

RANKS(many_in_flight_tcp, .ranks = 4, .deadline_s = 60)
{
    run_batches(&(struct setup){.transport = "tcp"});
}

RANKS(many_in_flight_hosts, .ranks = 5, .deadline_s = 60)
{
    run_batches(&(struct setup){.hosts = "00101"});
}

/* ---- Works ----------------------------------------------------------------------------------- */

RANKS(works_are_released_without_waiting, .ranks = 3)
{
    struct scene scene = scene_open(&here);
    float values[100], *results = td_alloc(sizeof(float) * 100 * 50);
    for (int i = 0; i < 100; i++)
        values[i] = (float)(scene.rank + 1);
    for (int i = 0; i < 50; i++) {
        td_work *work;
        CHECK_OK(td_group_all_reduce(results + 100 * i, values, 100, TD_F32, TD_SUM, NULL, &work));
        td_work_release(work);
    }
    /* A blocking call runs after all of them. */
    CHECK_OK(td_group_barrier(NULL, NULL));
    for (int i = 0; i < 100 * 50; i++)
        CHECK_EQ(results[i], 6);
    /* Destroying waits for what was started. */
    for (int i = 0; i < 20; i++) {
        td_work *work;
        CHECK_OK(td_group_all_reduce(results + 100 * i, values, 100, TD_F32, TD_MAX, NULL, &work));
        td_work_release(work);
    }
    scene_close(&scene);
    for (int i = 0; i < 100 * 20; i++)
        CHECK_EQ(results[i], 3);
    td_free(results);
}

static void count_call(td_work *work, td_status status, void *arg)
{
    CHECK_EQ(status, TD_OK);
    CHECK(td_work_test(work));
    CHECK_EQ(td_work_status(work), TD_OK);
    CHECK_EQ(td_work_source(work), -1);
    CHECK_EQ(td_work_received(work), 0);
    atomic_fetch_add((atomic_int *)arg, 1);
}

RANKS(callbacks_run_once, .ranks = 3)
{
    struct scene scene = scene_open(&here);
    atomic_int called = 0;
    for (int i = 0; i < 200; i++) {
        struct flight *flight = case_start(
            &scene, &(struct collective_case){.kind = TD_OP_ALL_REDUCE, .count = (size_t)i * 20},
            true);
        td_work *work = flight_work(flight);
        if (i % 3 == 0)
            CHECK_OK(td_work_wait(work, 0));
        CHECK_OK(td_work_on_complete(work, count_call, &called));
        if (i % 2) {
            CHECK(td_work_retain(work) == work);
            CHECK_OK(td_work_wait(work, 0));
            CHECK_OK(td_work_wait(work, 0)); /* again */
            td_work_release(work);
        }
        flight_finish(flight);
    }
    CHECK_SOON(atomic_load(&called) == 200);
    scene_close(&scene);
    CHECK_EQ(called, 200);
}

RANKS(waiting_for_a_work_may_end_early, .ranks = 2)
{
    struct scene scene = scene_open(&here);
    td_work *work;
    if (scene.rank == 1)
        td_test_barrier();
    CHECK_OK(td_group_barrier(NULL, &work));
    if (scene.rank == 0) {
        CHECK(!td_work_test(work));
        CHECK_EQ(td_work_status(work), TD_OK); /* under way */
        CHECK_FAILS(td_work_wait(work, 50), TD_ERR_TIMEOUT, "barrier on group \"world\"");
        CHECK_FAILS(td_work_wait_all(&work, 1, 20), TD_ERR_TIMEOUT, "barrier");
        td_test_barrier();
    }
    CHECK_OK(td_work_wait(work, 0));
    CHECK(td_work_test(work));
    td_work_release(work);
    CHECK_OK(td_group_barrier(NULL, NULL)); /* nothing is broken */
    scene_close(&scene);
}

RANKS(works_can_be_waited_for_together, .ranks = 3)
{
    struct scene scene = scene_open(&here);
    td_work *works[11] = {NULL};
    int64_t own[10], sums[10];
    for (int i = 0; i < 10; i++) {
        own[i] = i * (scene.rank + 1);
        CHECK_OK(td_group_all_reduce(&sums[i], &own[i], 1, TD_I64, TD_SUM, NULL, &works[i]));
    }
    CHECK_OK(td_work_wait_all(works, 11, 0)); /* the last one is NULL */
    for (int i = 0; i < 10; i++) {
        CHECK_EQ(sums[i], i * 6);
        td_work_release(works[i]);
    }
    CHECK_OK(td_work_wait_all(NULL, 0, 0));
    CHECK_FAILS(td_work_wait_all(NULL, 1, 0), TD_ERR_INVALID, "td_work_wait_all");
    CHECK_FAILS(td_work_wait(NULL, 0), TD_ERR_INVALID, "NULL");
    CHECK_FAILS(td_work_status(NULL), TD_ERR_INVALID, "NULL");
    CHECK_FAILS(td_work_on_complete(NULL, count_call, NULL), TD_ERR_INVALID, "NULL");
    CHECK(td_work_test(NULL));
    td_work_release(NULL);
    CHECK(!td_work_retain(NULL));
    scene_close(&scene);
}

struct chain {
    td_group *group;
    int64_t value;
    int left; /* calls that the callbacks are to start */
    atomic_bool done;
};

/* A callback may start the next call. */
static void start_next(td_work *work, td_status status, void *arg)
{
    struct chain *chain = arg;
    (void)work;
    CHECK_EQ(status, TD_OK);
    if (!chain->left--) {
        atomic_store(&chain->done, true);
        return;
    }
    td_work *next;
    CHECK_OK(
        td_group_all_reduce(&chain->value, &chain->value, 1, TD_I64, TD_SUM, chain->group, &next));
    CHECK_OK(td_work_on_complete(next, start_next, chain));
    td_work_release(next);
}

RANKS(callbacks_start_the_next_call, .ranks = 2)
{
    struct scene scene = scene_open(&here);
    struct chain chain = {.value = 1, .left = 40};
    td_work *first;
    CHECK_OK(td_group_barrier(NULL, &first));
    CHECK_OK(td_work_on_complete(first, start_next, &chain));
    td_work_release(first);
    CHECK_SOON(atomic_load(&chain.done));
    CHECK_EQ(chain.value, (int64_t)1 << 40);
    scene_close(&scene);
}

/* Destroying a group waits also for what callbacks start meanwhile. */
RANKS(callbacks_start_calls_while_the_group_is_destroyed, .ranks = 2)
{
    struct scene scene = scene_open(&here);
    for (int i = 0; i < 50; i++) {
        struct chain chain = {.value = 1, .left = 20};
        td_work *first;
        CHECK_OK(td_new_group(NULL, 0, NULL, &chain.group));
        CHECK_OK(td_group_barrier(chain.group, &first));
        CHECK_OK(td_work_on_complete(first, start_next, &chain));
        td_work_release(first);
        td_group_destroy(chain.group);
        CHECK(atomic_load(&chain.done));
        CHECK_EQ(chain.value, 1 << 20);
    }
    scene_close(&scene);
}

/* A call makes progress also where its caller neither waits for it nor tests it. */
RANKS(works_complete_without_waiting, .ranks = 2)
{
    struct scene scene = scene_open(&here);
    for (int i = 0; i < 5; i++) {
        int64_t value = 1;
        td_work *work;
        CHECK_OK(td_group_all_reduce(&value, &value, 1, TD_I64, TD_SUM, NULL, &work));
        if (scene.rank == i % 2)
            CHECK_OK(td_work_wait(work, 0));
        td_test_barrier(); /* passed by the other rank only once this one's wait is over */
        CHECK_OK(td_work_wait(work, 0));
        CHECK_EQ(value, 2);
        td_work_release(work);
    }
    scene_close(&scene);
}

/* A thread that waits for a late call carries out those before it, in their order. */
RANKS(waiting_for_the_last_completes_all, .ranks = 2)
{
    struct scene scene = scene_open(&here);
    enum { CALLS = 30 };
    int64_t value = 1;
    td_work *works[CALLS];
    for (int i = 0; i < CALLS; i++)
        CHECK_OK(td_group_all_reduce(&value, &value, 1, TD_I64, TD_SUM, NULL, &works[i]));
    CHECK_OK(td_work_wait(works[CALLS - 1], 0));
    for (int i = 0; i < CALLS; i++) {
        CHECK(td_work_test(works[i]));
        td_work_release(works[i]);
    }
    CHECK_EQ(value, (int64_t)1 << CALLS);
    scene_close(&scene);
}

/* ---- Threads --------------------------------------------------------------------------------- */

enum { THREADS = 4 };

struct thread {
    struct scene scene;
    uint64_t state;
};

static void *use_group(void *arg)
{
    struct thread *thread = arg;
    for (int i = 0; i < 60; i++) {
        struct collective_case what = any_case(&thread->scene, &thread->state);
        run_case(&thread->scene, &what);
        if (i % 20 == 19)
            run_batch(&thread->scene, &thread->state);
    }
    return NULL;
}

/* Groups that overlap, each used by a thread of its own, blocking and not. */
static void use_groups_at_once(const struct setup *setup)
{
    struct scene world = scene_open(setup);
    struct thread threads[THREADS];
    pthread_t ids[THREADS];
    bool started[THREADS] = {false};
    for (int t = 0; t < THREADS; t++) {
        int ranks[8], count = 0;
        td_group *group;
        for (int r = 0; r < world.size; r++)
            if (t % 2 == 0 || r != t % world.size)
                ranks[count++] = r;
        CHECK_OK(td_new_group(ranks, count, NULL, &group));
        threads[t] = (struct thread){.scene = scene_of(&world, group), .state = (uint64_t)t + 1};
        started[t] = threads[t].scene.rank >= 0;
        if (started[t])
            CHECK_EQ(pthread_create(&ids[t], NULL, use_group, &threads[t]), 0);
    }
    for (int t = 0; t < THREADS; t++)
        if (started[t])
            pthread_join(ids[t], NULL);
    for (int t = 0; t < THREADS; t += 2)
        td_group_destroy(threads[t].scene.group);
    scene_close(&world); /* the others with it */
}

static void *wait_for_work(void *arg)
{
    CHECK_OK(td_work_wait(arg, 0));
    td_work_release(arg);
    return NULL;
}

/* The first thread that waits carries them out; each is carried out once. */
RANKS(threads_wait_for_works_of_one_group, .ranks = 2)
{
    struct scene scene = scene_open(&here);
    enum { WAITERS = 6 };
    for (int round = 0; round < 20; round++) {
        td_work *works[WAITERS];
        pthread_t ids[WAITERS];
        int64_t values[WAITERS];
        td_group *group;
        CHECK_OK(td_new_group(NULL, 0, NULL, &group));
        for (int i = 0; i < WAITERS; i++) {
            values[i] = i;
            CHECK_OK(
                td_group_all_reduce(&values[i], &values[i], 1, TD_I64, TD_SUM, group, &works[i]));
            td_work_retain(works[i]);
        }
        for (int i = 0; i < WAITERS; i++)
            CHECK_EQ(pthread_create(&ids[i], NULL, wait_for_work, works[i]), 0);
        for (int i = 0; i < WAITERS; i++)
            CHECK_OK(td_work_wait(works[i], 0));
        for (int i = 0; i < WAITERS; i++)
            pthread_join(ids[i], NULL);
        for (int i = 0; i < WAITERS; i++) {
            CHECK_EQ(values[i], 2 * i);
            td_work_release(works[i]);
        }
        td_group_destroy(group);
    }
    scene_close(&scene);
}

RANKS(groups_at_once, .ranks = 3, .deadline_s = 60)
{
    use_groups_at_once(&here);
}

RANKS(groups_at_once_tcp, .ranks = 3, .deadline_s = 60)
{
    use_groups_at_once(&(struct setup){.transport = "tcp"});
}

RANKS(groups_at_once_hosts, .ranks = 4, .deadline_s = 60)
{
    use_groups_at_once(&(struct setup){.hosts = "0110"});
}

/* ---- Memory that another rank passes from one group to another -------------------------------- */

enum { MOVED = 100000, MOVES = 3, HEAD_START_MS = 20 };

struct mover {
    td_group *group;
    bool message; /* a message from rank 1, or an all_reduce */
    int delay_ms;
    float *data;
};

static void move(const struct mover *mover)
{
    if (!mover->message)
        CHECK_OK(td_group_all_reduce(mover->data, mover->data, MOVED, TD_F32, TD_SUM, mover->group,
                                     NULL));
    else if (td_test_rank() == 0)
        CHECK_OK(td_group_recv(mover->data, MOVED, TD_F32, 1, 0, mover->group, NULL));
    else if (td_test_rank() == 1)
        CHECK_OK(td_group_send(mover->data, MOVED, TD_F32, 0, 0, mover->group, NULL));
}

static void *move_later(void *arg)
{
    const struct mover *mover = arg;
    td__sleep_ns((int64_t)mover->delay_ms * 1000000);
    move(mover);
    return NULL;
}

/* Rank 1 uses one buffer in both groups, one after the other. Rank 0 accesses it from two threads, which only rank 1
 * orders: the second call waits for rank 1 before the first one is made. ThreadSanitizer must see that order. */
static void pass_between_groups(const struct setup *setup, bool first_is_message,
                                bool second_is_message)
{
    struct scene scene = scene_open(setup);
    struct mover movers[2] = {{.message = first_is_message, .delay_ms = HEAD_START_MS},
                              {.message = second_is_message}};
    float *shared = td_alloc(MOVED * sizeof *shared);
    for (int k = 0; k < 2; k++) {
        CHECK_OK(td_new_group(NULL, 0, NULL, &movers[k].group));
        movers[k].data = scene.rank == 1 ? shared : td_alloc(MOVED * sizeof *shared);
        for (int i = 0; i < MOVED; i++)
            movers[k].data[i] = 0;
        move(&movers[k]); /* the memory is mapped now */
    }
    for (int round = 0; round < MOVES; round++) {
        pthread_t ids[2];
        td_test_barrier();
        for (int k = 0; k < 2 && scene.rank == 0; k++)
            CHECK_EQ(pthread_create(&ids[k], NULL, move_later, &movers[k]), 0);
        for (int k = 0; k < 2 && scene.rank == 0; k++)
            pthread_join(ids[k], NULL);
        for (int k = 0; k < 2 && scene.rank != 0; k++)
            move(&movers[k]);
    }
    for (int k = 0; k < 2; k++)
        if (movers[k].data != shared)
            td_free(movers[k].data);
    td_free(shared);
    scene_close(&scene);
}

RANKS(a_buffer_passes_between_groups, .ranks = 2)
{
    pass_between_groups(&here, false, false);
}

RANKS(a_buffer_passes_between_groups_hosts, .ranks = 3)
{
    pass_between_groups(&(struct setup){.hosts = "001"}, false, false);
}

RANKS(a_buffer_passes_from_a_message_to_a_group, .ranks = 2)
{
    pass_between_groups(&here, true, false);
}

RANKS(a_buffer_passes_from_a_group_to_a_message, .ranks = 2)
{
    pass_between_groups(&here, false, true);
}
