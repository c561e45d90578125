/* The toy accelerator by its table of functions: streams, events, failures on request, and its end. */
#define _GNU_SOURCE
#include "toy_checks.h"

#include <dirent.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdio.h>
#include <unistd.h>

/* ---- Streams and events ------------------------------------------------------------------------------------ */

TEST(streams_run_in_order)
{
    struct toys toys = begin();
    unsigned char *data = allocate(&toys, 0, 64);
    for (int i = 0; i < 200; i++)
        fill(&toys, 0, data, i, 64);
    check_bytes(&toys, 0, data, 199, 64);
}

TEST(streams_run_without_each_other)
{
    struct toys toys = begin();
    void *a = allocate(&toys, 0, 100), *b = allocate(&toys, 1, 100);
    fill(&toys, 0, a, 1, 100);
    CHECK_OK(toys.ops->synchronize(toys.device[0]));
    toy_hold(0, true);
    fill(&toys, 0, a, 2, 100);
    /* The event that is missing here would have made this copy wait. */
    CHECK_OK(toys.ops->copy_from(toys.device[1], toys.stream[1], b, toys.device[0], a, 100));
    check_bytes(&toys, 1, b, 1, 100);
    toy_hold(0, false);
}

TEST(events_order_streams_of_two_devices)
{
    struct toys toys = begin();
    void *a = allocate(&toys, 0, 100), *b = allocate(&toys, 1, 100), *c = allocate(&toys, 0, 100);
    void *event = create_event(&toys, 0, false);
    toy_hold(0, true);
    fill(&toys, 0, a, 2, 100);
    CHECK_OK(toys.ops->event_record(toys.device[0], event, toys.stream[0]));
    CHECK_OK(toys.ops->event_wait(toys.device[1], toys.stream[1], event));
    CHECK_OK(toys.ops->copy_from(toys.device[1], toys.stream[1], b, toys.device[0], a, 100));
    bool done = true;
    CHECK_OK(toys.ops->event_query(toys.device[0], event, &done));
    CHECK(!done);
    CHECK(!is_done(&toys, 1));

    /* The wait is for that point, whatever becomes of the event. */
    fill(&toys, 0, c, 3, 100);
    CHECK_OK(toys.ops->event_record(toys.device[0], event, toys.stream[0]));
    toys.ops->event_destroy(toys.device[0], event);
    toy_hold(0, false);
    CHECK_EQ(toy_counts(0).events, 0);
    check_bytes(&toys, 1, b, 2, 100);
    check_bytes(&toys, 0, c, 3, 100);
}

TEST(events_pass)
{
    struct toys toys = begin();
    const td_device_ops *ops = toys.ops;
    void *device = toys.device[0];
    void *start = create_event(&toys, 0, true), *end = create_event(&toys, 0, true);
    void *plain = create_event(&toys, 0, false);
    bool done = false;
    CHECK_OK(ops->event_query(device, start, &done));
    CHECK(done); /* not recorded */
    CHECK_OK(ops->event_synchronize(device, start));

    void *data = allocate(&toys, 0, 10);
    CHECK_OK(ops->event_record(device, start, toys.stream[0]));
    for (int i = 0; i < 20; i++)
        fill(&toys, 0, data, i, 10);
    CHECK_OK(ops->event_record(device, end, toys.stream[0]));
    CHECK_OK(ops->event_record(device, plain, toys.stream[0]));
    CHECK_OK(ops->event_synchronize(device, plain));
    double milliseconds = -1;
    CHECK_OK(ops->event_elapsed(device, start, end, &milliseconds));
    CHECK(milliseconds > 0);
    CHECK_FAILS(ops->event_elapsed(device, start, plain, &milliseconds), TD_ERR_STATE, "timing");
    toy_hold(0, true);
    CHECK_OK(ops->event_record(device, end, toys.stream[0]));
    CHECK_FAILS(ops->event_elapsed(device, start, end, &milliseconds), TD_ERR_STATE, "passed");
    toy_hold(0, false);
    CHECK_EQ(toy_counts(0).waits, 2);
    CHECK_EQ(toy_counts(0).events, 3);
}

TEST(destroyed_streams_run_what_is_enqueued)
{
    struct toys toys = begin();
    void *data = allocate(&toys, 0, 100);
    void *streams[8];
    void *event = create_event(&toys, 0, false);
    toy_hold(0, true);
    for (int i = 0; i < 8; i++) {
        CHECK_OK(toys.ops->stream_create(toys.device[0], 0, &streams[i]));
        if (i > 0)
            CHECK_OK(toys.ops->event_wait(toys.device[0], streams[i], event));
        CHECK_OK(toys.ops->fill(toys.device[0], streams[i], data, (unsigned char)i, 100));
        CHECK_OK(toys.ops->event_record(toys.device[0], event, streams[i]));
        toys.ops->stream_destroy(toys.device[0], streams[i]);
    }
    toy_hold(0, false);
    CHECK_OK(toys.ops->synchronize(toys.device[0])); /* theirs, too */
    check_bytes(&toys, 0, data, 7, 100);
    CHECK_EQ(toy_counts(0).streams, 1);
}

/* Four threads with a stream each pass a number on from buffer to buffer, round after round. On the device only events
 * order them: each waits for its predecessor's, and the first for the last one's of the round before. */
#define RELAY 4
#define ROUNDS 50

struct relay {
    const struct toys *toys;
    void *buffers[RELAY], *events[RELAY];
    sem_t recorded[RELAY];
};

struct relay_thread {
    struct relay *relay;
    int index;
};

static void relay_round(const struct relay *relay, int index, void *stream, int round)
{
    const td_device_ops *ops = relay->toys->ops;
    void *device = relay->toys->device[index % 2], *other = relay->toys->device[(index + 1) % 2];
    int before = (index + RELAY - 1) % RELAY;
    CHECK_OK(ops->event_wait(device, stream, relay->events[before]));
    if (index == 0)
        CHECK_OK(ops->fill(device, stream, relay->buffers[0], (unsigned char)round, 64));
    else
        CHECK_OK(ops->copy_from(device, stream, relay->buffers[index], other,
                                relay->buffers[before], 64));
    unsigned char host[64];
    if (index == RELAY - 1)
        CHECK_OK(ops->copy_out(device, stream, host, relay->buffers[index], 64, false));
    CHECK_OK(ops->event_record(device, relay->events[index], stream));
    if (index == RELAY - 1) {
        CHECK_OK(ops->event_synchronize(device, relay->events[index]));
        CHECK_EQ(host[13], round);
    }
}

static void *run_relay(void *arg)
{
    const struct relay_thread *thread = arg;
    struct relay *relay = thread->relay;
    int index = thread->index;
    void *stream = NULL, *device = relay->toys->device[index % 2];
    CHECK_OK(relay->toys->ops->stream_create(device, 0, &stream));
    for (int round = 0; round < ROUNDS; round++) {
        while (sem_wait(&relay->recorded[(index + RELAY - 1) % RELAY])) {
        }
        relay_round(relay, index, stream, round);
        sem_post(&relay->recorded[index]);
    }
    relay->toys->ops->stream_destroy(device, stream);
    return NULL;
}

TEST(threads_use_streams_and_events_at_once)
{
    toy_set_seed(42);
    struct toys toys = begin();
    struct relay relay = {.toys = &toys};
    for (int i = 0; i < RELAY; i++) {
        relay.buffers[i] = allocate(&toys, i % 2, 64);
        relay.events[i] = create_event(&toys, i % 2, false);
        sem_init(&relay.recorded[i], 0, i == RELAY - 1); /* the first thread begins */
    }
    pthread_t threads[RELAY];
    struct relay_thread arguments[RELAY];
    for (int i = 0; i < RELAY; i++) {
        arguments[i] = (struct relay_thread){&relay, i};
        CHECK_EQ(pthread_create(&threads[i], NULL, run_relay, &arguments[i]), 0);
    }
    for (int i = 0; i < RELAY; i++)
        pthread_join(threads[i], NULL);
    for (int i = 0; i < RELAY; i++)
        sem_destroy(&relay.recorded[i]);
    CHECK_EQ(toy_counts(0).streams, 1);
    CHECK_EQ(toy_counts(1).streams, 1);
}

/* ---- Failures on request ------------------------------------------------------------------------------------ */

TEST(copies_fail_at_their_launch_on_request)
{
    struct toys toys = begin();
    void *data = allocate(&toys, 0, 100);
    toy_fail_copy(0, 2, TOY_AT_LAUNCH);
    fill(&toys, 0, data, 1, 100);
    CHECK_FAILS(toys.ops->fill(toys.device[0], toys.stream[0], data, 2, 100), TD_ERR_SYSTEM,
                "toy:0: fill could not be launched");
    check_bytes(&toys, 0, data, 1, 100);
    toy_fail_copy(0, 1, TOY_AT_LAUNCH);
    toy_fail_copy(0, 0, TOY_AT_LAUNCH);
    check_bytes(&toys, 0, data, 1, 100);
}

TEST(a_late_failure_is_that_of_the_device)
{
    struct toys toys = begin();
    const td_device_ops *ops = toys.ops;
    void *device = toys.device[0], *stream = toys.stream[0];
    void *data = allocate(&toys, 0, 100), *other = allocate(&toys, 1, 100), *none = NULL;
    void *event = create_event(&toys, 0, false), *second = NULL;
    CHECK_OK(ops->stream_create(device, 0, &second));
    fill(&toys, 0, data, 1, 100);
    CHECK_OK(ops->synchronize(device));

    toy_hold(0, true);
    toy_fail_copy(0, 2, TOY_LATER);
    fill(&toys, 0, data, 2, 100);
    fill(&toys, 0, data, 3, 100); /* fails */
    fill(&toys, 0, data, 4, 100); /* has no effect */
    CHECK_OK(ops->event_record(device, event, stream));
    CHECK_OK(ops->event_wait(toys.device[1], toys.stream[1], event));
    toy_hold(0, false);

    const char *sentence = "toy:0: fill: it failed on the device";
    bool done;
    size_t bytes;
    double milliseconds;
    CHECK_FAILS(ops->stream_synchronize(device, stream), TD_ERR_SYSTEM, sentence);
    CHECK_FAILS(ops->synchronize(device), TD_ERR_SYSTEM, sentence);
    CHECK_FAILS(ops->stream_query(device, stream, &done), TD_ERR_SYSTEM, sentence);
    CHECK_FAILS(ops->stream_create(device, 0, &none), TD_ERR_SYSTEM, sentence);
    CHECK_FAILS(ops->event_create(device, false, &none), TD_ERR_SYSTEM, sentence);
    CHECK_FAILS(ops->event_record(device, event, stream), TD_ERR_SYSTEM, sentence);
    CHECK_FAILS(ops->event_wait(device, stream, event), TD_ERR_SYSTEM, sentence);
    CHECK_FAILS(ops->event_synchronize(device, event), TD_ERR_SYSTEM, sentence);
    CHECK_FAILS(ops->event_query(device, event, &done), TD_ERR_SYSTEM, sentence);
    CHECK_FAILS(ops->event_elapsed(device, event, event, &milliseconds), TD_ERR_SYSTEM, sentence);
    CHECK_FAILS(ops->alloc(device, 1, &none), TD_ERR_SYSTEM, sentence);
    CHECK_FAILS(ops->alloc_pinned(device, 1, &none), TD_ERR_SYSTEM, sentence);
    CHECK_FAILS(ops->memory_info(device, &bytes, &bytes), TD_ERR_SYSTEM, sentence);
    CHECK_FAILS(ops->fill(device, second, data, 5, 100), TD_ERR_SYSTEM, sentence);
    CHECK_FAILS(ops->copy(device, stream, data, data, 0), TD_ERR_SYSTEM, sentence);
    CHECK_FAILS(ops->copy_in(device, stream, data, "", 1, false), TD_ERR_SYSTEM, sentence);
    CHECK_FAILS(ops->copy_out(device, stream, &done, data, 1, false), TD_ERR_SYSTEM, sentence);

    /* The other device goes on, behind the event too. */
    fill(&toys, 1, other, 6, 100);
    check_bytes(&toys, 1, other, 6, 100);

    toy_clear_failure(0);
    check_bytes(&toys, 0, data, 2, 100);
    toys.ops->event_destroy(device, event);
}

/* ---- Its threads, and its end ------------------------------------------------------------------------------- */

/* Calls check(directory) for each thread but the first; returns their number. */
static int each_thread(void (*check)(const char *directory))
{
    DIR *tasks = opendir("/proc/self/task");
    CHECK(tasks);
    int count = 0;
    for (struct dirent *entry; (entry = readdir(tasks));) {
        if (entry->d_name[0] == '.' || atoi(entry->d_name) == getpid())
            continue;
        char path[300];
        snprintf(path, sizeof path, "/proc/self/task/%s", entry->d_name);
        check(path);
        count++;
    }
    closedir(tasks);
    return count;
}

static int blocking_threads;

static void check_blocked(const char *directory)
{
    char path[320], line[256];
    snprintf(path, sizeof path, "%s/status", directory);
    FILE *file = fopen(path, "r");
    if (!file)
        return; /* it has ended */
    unsigned long long blocked = 0;
    while (fgets(line, sizeof line, file))
        sscanf(line, "SigBlk: %llx", &blocked);
    fclose(file);
    if (blocked & 1ull << (SIGTERM - 1) && blocked & 1ull << (SIGINT - 1))
        blocking_threads++;
}

TEST(threads_block_signals)
{
    begin();
    each_thread(check_blocked);
    CHECK(blocking_threads >= TOY_DEVICES);
}

static void ignore(const char *directory)
{
    (void)directory;
}

TEST(reset_ends_everything)
{
    begin();
    toy_reset();
    int before = each_thread(ignore); /* with those that a sanitizer has started */
    struct toys toys = begin();
    const td_device_ops *ops = toys.ops;
    void *data = allocate(&toys, 0, 100), *pinned = allocate_pinned(&toys, 100), *none;
    void *event = create_event(&toys, 0, false);
    toy_hold(0, true);
    fill(&toys, 0, data, 1, 100);
    CHECK_OK(ops->event_record(toys.device[0], event, toys.stream[0]));
    CHECK_OK(ops->event_wait(toys.device[1], toys.stream[1], event));
    toy_set_delay(0);
    toy_reset();
    CHECK_SOON(each_thread(ignore) == before);
    CHECK_EQ(toy_pinned_bytes(), 0);
    CHECK_EQ(toy_counts(0).blocks, 0);

    /* Handles that are left do no harm, as when the library gives them back at exit. */
    CHECK_FAILS(ops->alloc(toys.device[0], 1, &none), TD_ERR_STATE, "toy:0 is not open");
    CHECK_FAILS(ops->fill(toys.device[0], toys.stream[0], data, 1, 1), TD_ERR_STATE, "toy:0");
    CHECK_FAILS(ops->synchronize(toys.device[0]), TD_ERR_STATE, "toy:0");
    CHECK_FAILS(ops->stream_synchronize(toys.device[0], toys.stream[0]), TD_ERR_STATE, "toy:0");
    CHECK_FAILS(ops->event_synchronize(toys.device[0], event), TD_ERR_STATE, "toy:0");
    ops->free(toys.device[0], data);
    ops->free_pinned(toys.device[0], pinned);
    ops->event_destroy(toys.device[0], event);
    ops->stream_destroy(toys.device[0], toys.stream[0]);

    toys = begin();
    data = allocate(&toys, 1, 100);
    fill(&toys, 1, data, 1, 100);
    check_bytes(&toys, 1, data, 1, 100);
}

TEST(the_kind_is_described)
{
    char text[100];
    CHECK_OK(toy_ops()->describe(NULL, text, sizeof text));
    CHECK_CONTAINS(text, "2 devices of 64 MiB");
    CHECK_EQ(toy_ops()->count(NULL), 2);
    void *none = NULL;
    CHECK_FAILS(toy_ops()->open(NULL, 2, &none), TD_ERR_INVALID, "toy:2 does not exist");
    CHECK(toy_ops()->breaks_fork);
}
