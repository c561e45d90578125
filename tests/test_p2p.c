/* Messages, in shared memory and over sockets: each test runs both ways. */
#include "p2p_worlds.h"
#include "runner.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* ---- Sizes and memory ------------------------------------------------------------------------ */

/* Around what is sent whole (4 or 8 KiB here, 64 KiB over sockets), the ring (32 KiB), a piece (256
 * KiB). */
static const size_t sizes[] = {
    0,     1,      7,      48,     49,     4095,   4096,          4097,   8191,
    8192,  8193,   32511,  32512,  32767,  32768,  32769,         65535,  65536,
    65537, 131072, 262143, 262144, 262145, 524289, (1 << 20) + 3, 8 << 20};

static void exchange(size_t size, bool arena_out, bool arena_in)
{
    int rank = td_get_rank(NULL), other = 1 - rank;
    unsigned char *out = world_memory(size, arena_out), *in = world_memory(size + 1, arena_in);
    fill(out, size, (unsigned)rank);
    memset(in, 0xee, size + 1);
    if (rank == 0) {
        CHECK_OK(td_group_send(out, size, TD_U8, other, 3, NULL, NULL));
        CHECK_OK(td_group_recv(in, size, TD_U8, other, 3, NULL, NULL));
    } else {
        CHECK_OK(td_group_recv(in, size, TD_U8, other, 3, NULL, NULL));
        CHECK_OK(td_group_send(out, size, TD_U8, other, 3, NULL, NULL));
    }
    check_filled(in, size, (unsigned)other);
    CHECK_EQ(in[size], 0xee);
    world_free(out, arena_out);
    world_free(in, arena_in);
}

BOTH_WAYS(sizes, .ranks = 2, .deadline_s = 60)
{
    world_begin();
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int memory = 0; memory < 4; memory++)
            exchange(sizes[i], memory & 1, memory & 2);
    exchange(64 << 20, true, true);
    exchange(64 << 20, false, false);
    world_end();
}

/* ---- Matching -------------------------------------------------------------------------------- */

BOTH_WAYS(tags_out_of_order, .ranks = 2)
{
    world_begin();
    if (td_get_rank(NULL) == 0) {
        for (int i = 0; i < 100; i++)
            send_int(i, 1, i % 10);
        send_int(1000, 1, 77);
        CHECK_EQ(recv_int(1, 0), 5);
    } else {
        CHECK_EQ(recv_int(0, 77), 1000);
        for (int tag = 9; tag >= 0; tag--)
            for (int i = 0; i < 10; i++)
                CHECK_EQ(recv_int(0, tag), i * 10 + tag);
        send_int(5, 0, 0);
    }
    world_end();
}

BOTH_WAYS(any_source_and_tag, .ranks = 4)
{
    enum { EACH = 50 };
    world_begin();
    int rank = td_get_rank(NULL);
    if (rank > 0) {
        for (int i = 0; i < EACH; i++)
            send_int(rank * 1000 + i, 0, i);
        CHECK_EQ(recv_int(TD_ANY_SOURCE, TD_ANY_TAG), 4);
    } else {
        int next[4] = {0};
        for (int i = 0; i < 3 * EACH; i++) {
            int value = -1;
            td_work *work;
            CHECK_OK(td_group_recv(&value, 1, TD_I32, TD_ANY_SOURCE, TD_ANY_TAG, NULL, &work));
            CHECK_OK(td_work_wait(work, 0));
            int source = td_work_source(work);
            CHECK(source >= 1 && source <= 3);
            CHECK_EQ(td_work_received(work), sizeof value);
            CHECK_EQ(value, source * 1000 + next[source]++);
            td_work_release(work);
        }
        for (int i = 1; i < 4; i++)
            send_int(4, i, 9);
    }
    world_end();
}

/* A recv of one source that was posted before one of any source gets the message, and the other way
 * round. */
BOTH_WAYS(posted_in_order, .ranks = 2)
{
    world_begin();
    if (td_get_rank(NULL) == 0) {
        td_test_barrier();
        for (int i = 0; i < 4; i++)
            send_int(i, 1, i);
    } else {
        int got[4] = {-1, -1, -1, -1};
        td_work *works[4];
        int sources[4] = {0, TD_ANY_SOURCE, 0, TD_ANY_SOURCE};
        int tags[4] = {TD_ANY_TAG, 3, TD_ANY_TAG, TD_ANY_TAG};
        for (int i = 0; i < 4; i++)
            CHECK_OK(td_group_recv(&got[i], 1, TD_I32, sources[i], tags[i], NULL, &works[i]));
        td_test_barrier();
        CHECK_OK(td_work_wait_all(works, 4, 0));
        CHECK_EQ(got[0], 0);
        CHECK_EQ(got[1], 3);
        CHECK_EQ(got[2], 1);
        CHECK_EQ(got[3], 2);
        for (int i = 0; i < 4; i++)
            td_work_release(works[i]);
    }
    world_end();
}

/* Large messages keep their place among small ones of the same tag. */
BOTH_WAYS(large_and_small_in_order, .ranks = 2)
{
    enum { COUNT = 60, LARGE = 100000 };
    world_begin();
    unsigned char *data = td_alloc(LARGE * COUNT);
    td_work *works[COUNT];
    if (td_get_rank(NULL) == 0) {
        for (int i = 0; i < COUNT; i++) {
            size_t size = i % 3 ? 10 : LARGE;
            fill(data + i * LARGE, size, (unsigned)i);
            CHECK_OK(td_group_send(data + i * LARGE, size, TD_U8, 1, 0, NULL, &works[i]));
        }
        CHECK_OK(td_work_wait_all(works, COUNT, 0));
        for (int i = 0; i < COUNT; i++)
            td_work_release(works[i]);
    } else {
        usleep(20000); /* the first half comes before its recv */
        for (int i = 0; i < COUNT; i++) {
            td_work *work;
            CHECK_OK(td_group_recv(data, LARGE, TD_U8, 0, 0, NULL, &work));
            CHECK_OK(td_work_wait(work, 0));
            size_t size = i % 3 ? 10 : LARGE;
            CHECK_EQ(td_work_received(work), size);
            check_filled(data, size, (unsigned)i);
            td_work_release(work);
        }
    }
    td_free(data);
    world_end();
}

/* More large sends than there are descriptors, received from the last to the first. */
BOTH_WAYS(many_large_backwards, .ranks = 2)
{
    enum { COUNT = 300, SIZE = 70000 };
    world_begin();
    unsigned char *data = malloc((size_t)SIZE * COUNT);
    td_work *works[COUNT];
    int rank = td_get_rank(NULL);
    for (int i = 0; i < COUNT; i++)
        if (rank == 0) {
            fill(data + (size_t)i * SIZE, SIZE, (unsigned)i);
            CHECK_OK(td_group_send(data + (size_t)i * SIZE, SIZE, TD_U8, 1, i, NULL, &works[i]));
        }
    for (int i = COUNT - 1; i >= 0 && rank == 1; i--) {
        CHECK_OK(td_group_recv(data, SIZE, TD_U8, 0, i, NULL, NULL));
        check_filled(data, SIZE, (unsigned)i);
    }
    if (rank == 0)
        CHECK_OK(td_work_wait_all(works, COUNT, 0));
    for (int i = 0; i < COUNT && rank == 0; i++)
        td_work_release(works[i]);
    free(data);
    world_end();
}

BOTH_WAYS(many_unexpected, .ranks = 3, .deadline_s = 40)
{
    enum { COUNT = 5000 };
    world_begin();
    int rank = td_get_rank(NULL);
    if (rank) {
        for (int i = 0; i < COUNT; i++)
            send_int(rank * 100000 + i, 0, 1);
        send_int(rank, 0, 2);
    } else {
        CHECK_EQ(recv_int(1, 2), 1);
        CHECK_EQ(recv_int(2, 2), 2);
        for (int i = 0; i < COUNT; i++) {
            CHECK_EQ(recv_int(2, 1), 200000 + i);
            CHECK_EQ(recv_int(1, TD_ANY_TAG), 100000 + i);
        }
    }
    world_end();
}

/* ---- Both directions at once ----------------------------------------------------------------- */

static void batch(size_t size, int count, bool arena)
{
    int rank = td_get_rank(NULL), ranks = td_get_world_size(NULL);
    int total = 2 * count * (ranks - 1);
    td_work **works = calloc((size_t)total, sizeof *works);
    unsigned char **memory = calloc((size_t)total, sizeof *memory);
    int made = 0;
    for (int peer = 0; peer < ranks; peer++)
        for (int i = 0; i < count && peer != rank; i++) {
            unsigned char *out = memory[made] = world_memory(size, arena);
            fill(out, size, (unsigned)(rank * 100 + i));
            CHECK_OK(td_group_send(out, size, TD_U8, peer, i, NULL, &works[made++]));
            unsigned char *in = memory[made] = world_memory(size, arena);
            CHECK_OK(td_group_recv(in, size, TD_U8, peer, i, NULL, &works[made++]));
        }
    CHECK_OK(td_work_wait_all(works, total, 0));
    made = 0;
    for (int peer = 0; peer < ranks; peer++)
        for (int i = 0; i < count && peer != rank; i++, made += 2)
            check_filled(memory[made + 1], size, (unsigned)(peer * 100 + i));
    for (int i = 0; i < total; i++) {
        td_work_release(works[i]);
        world_free(memory[i], arena);
    }
    free(works);
    free(memory);
}

BOTH_WAYS(batches, .ranks = 3, .deadline_s = 60)
{
    world_begin();
    for (int arena = 0; arena < 2; arena++) {
        batch(100, 50, arena);
        batch(4000, 50, arena);
        batch(20000, 20, arena);
        batch((1 << 20) + 5, 5, arena);
    }
    world_end();
}

BOTH_WAYS(both_send_first, .ranks = 2, .deadline_s = 60)
{
    world_begin();
    batch(24 << 20, 2, true);
    batch(24 << 20, 2, false);
    world_end();
}

/* Two ranks that share memory, and two that do not: as on several hosts. */
RANKS(mixed, .ranks = 4, .deadline_s = 60)
{
    setenv("TANDEM_TRANSPORT", td_test_rank() < 2 ? "shm" : "tcp", 1);
    world_begin();
    int rank = td_get_rank(NULL);
    batch(100, 20, true);
    batch(100000, 5, false);
    batch((1 << 20) + 5, 3, true);
    for (int i = 0; i < 300; i++) {
        send_int(i, (rank + 1) % 4, 8);
        CHECK_EQ(recv_int(i % 2 ? TD_ANY_SOURCE : (rank + 3) % 4, 8), i);
    }
    world_end();
}

/* ---- Without a thread that waits ----------------------------------------------------------------- */

static atomic_int called;

static void count_call(td_work *work, td_status status, void *arg)
{
    (void)work;
    CHECK_EQ(status, TD_OK);
    atomic_fetch_add(&called, *(int *)arg);
}

/* Works complete, and their callbacks are called, while the program does something else. */
BOTH_WAYS(callbacks, .ranks = 2)
{
    enum { LARGE = 3 << 20 };
    world_begin();
    int rank = td_get_rank(NULL), one = 1, hundred = 100, small = rank;
    int got = -1;
    unsigned char *out = td_alloc(LARGE), *in = td_alloc(LARGE);
    td_work *works[4];
    fill(out, LARGE, (unsigned)rank);
    CHECK_OK(td_group_recv(in, LARGE, TD_U8, 1 - rank, 1, NULL, &works[0]));
    CHECK_OK(td_group_recv(&got, 1, TD_I32, 1 - rank, 2, NULL, &works[1]));
    CHECK_OK(td_work_on_complete(works[0], count_call, &hundred));
    CHECK_OK(td_work_on_complete(works[1], count_call, &one));
    CHECK_OK(td_group_send(out, LARGE, TD_U8, 1 - rank, 1, NULL, &works[2]));
    CHECK_OK(td_work_on_complete(works[2], count_call, &hundred));
    CHECK_OK(td_group_send(&small, 1, TD_I32, 1 - rank, 2, NULL, &works[3]));
    CHECK_OK(td_work_on_complete(works[3], count_call, &one));
    CHECK_SOON(atomic_load(&called) == 202);
    check_filled(in, LARGE, (unsigned)(1 - rank));
    CHECK_EQ(got, 1 - rank);
    for (int i = 0; i < 4; i++)
        td_work_release(works[i]);
    td_free(in);
    td_free(out);
    world_end();
}

struct bounce {
    int left;
    int value;
    int peer;
    atomic_bool done;
};

static void bounce_back(td_work *work, td_status status, void *arg);

static void bounce_on(struct bounce *bounce)
{
    td_work *work;
    CHECK_OK(td_group_recv(&bounce->value, 1, TD_I32, bounce->peer, 5, NULL, &work));
    CHECK_OK(td_work_on_complete(work, bounce_back, bounce));
    td_work_release(work);
}

static void bounce_back(td_work *work, td_status status, void *arg)
{
    struct bounce *bounce = arg;
    (void)work;
    CHECK_EQ(status, TD_OK);
    if (--bounce->left == 0) {
        atomic_store(&bounce->done, true);
        return;
    }
    td_work *send;
    CHECK_OK(td_group_send(&bounce->value, 1, TD_I32, bounce->peer, 5, NULL, &send));
    td_work_release(send);
    bounce_on(bounce);
}

/* A callback may post. Each hop is taken by the threads of the two ranks, or by the one that calls td_work_test(). */
BOTH_WAYS(callbacks_that_post, .ranks = 2)
{
    world_begin();
    struct bounce bounce = {.left = 50, .value = 7, .peer = 1 - td_get_rank(NULL)};
    bounce_on(&bounce);
    if (td_get_rank(NULL) == 0)
        send_int(7, 1, 5);
    if (td_get_rank(NULL) == 1) { /* whose last one ended there */
        CHECK_SOON(atomic_load(&bounce.done));
        send_int(7, 0, 5);
    }
    CHECK_SOON(atomic_load(&bounce.done));
    world_end();
}

BOTH_WAYS(test_moves_things, .ranks = 2)
{
    world_begin();
    int rank = td_get_rank(NULL), got = 0;
    td_work *work;
    for (int i = 0; i < 200; i++) {
        CHECK_OK(td_group_recv(&got, 1, TD_I32, 1 - rank, 0, NULL, &work));
        send_int(i, 1 - rank, 0);
        while (!td_work_test(work))
            usleep(10);
        CHECK_EQ(got, i);
        td_work_release(work);
    }
    world_end();
}

/* ---- Threads --------------------------------------------------------------------------------- */

enum { THREADS = 4, ROUNDS = 200 };

static void *talk(void *arg)
{
    int tag = (int)(intptr_t)arg, peer = 1 - td_get_rank(NULL);
    unsigned char *data = td_alloc(40000);
    for (int i = 0; i < ROUNDS; i++) {
        size_t size = i % 5 ? 100 : 40000;
        fill(data, size, (unsigned)(tag + i));
        if (td_get_rank(NULL) == 0)
            CHECK_OK(td_group_send(data, size, TD_U8, peer, tag, NULL, NULL));
        memset(data, 0, size);
        CHECK_OK(td_group_recv(data, size, TD_U8, peer, tag, NULL, NULL));
        check_filled(data, size, (unsigned)(tag + i));
        if (td_get_rank(NULL) == 1)
            CHECK_OK(td_group_send(data, size, TD_U8, peer, tag, NULL, NULL));
    }
    td_free(data);
    return NULL;
}

BOTH_WAYS(threads, .ranks = 2, .deadline_s = 60)
{
    world_begin();
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, talk, (void *)(intptr_t)i), 0);
    for (int i = 0; i < THREADS; i++)
        CHECK_EQ(pthread_join(threads[i], NULL), 0);
    world_end();
}
