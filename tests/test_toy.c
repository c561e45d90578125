/* The toy accelerator itself, by its table of functions: it must catch what it is there to catch. Here its memory and
 * copies; test_toy_streams.c has the rest. */
#define _GNU_SOURCE
#include "toy_checks.h"

#include <signal.h>
#include <sys/wait.h>

/* Runs fn in a fork, which must abort with a sentence. */
static void check_dies(void (*fn)(void *), const char *sentence)
{
    struct td_test_child child = td_test_fork(fn, NULL);
    CHECK_CONTAINS(child.output, sentence);
    CHECK(child.status != 0);
    free(child.output);
}

/* ---- Memory ------------------------------------------------------------------------------------------------ */

static void read_device_memory(void *data)
{
    signal(SIGSEGV, SIG_DFL); /* sanitizers have a handler */
    volatile const char *byte = data;
    exit(*byte == 0 ? 2 : 3);
}

TEST(memory_is_not_the_hosts)
{
    struct toys toys = begin();
    void *data = allocate(&toys, 0, 100);
    struct td_test_child child = td_test_fork(read_device_memory, data);
    CHECK(WIFSIGNALED(child.status));
    CHECK_EQ(WTERMSIG(child.status), SIGSEGV);
    free(child.output);
    toys.ops->free(toys.device[0], data);
}

TEST(memory_is_limited)
{
    toy_set_memory(1 << 20);
    struct toys toys = begin();
    void *small = allocate(&toys, 0, 1);
    CHECK_EQ((uintptr_t)small % 256, 0);
    void *middle = allocate(&toys, 0, 300), *data = NULL;
    CHECK_EQ((char *)middle - (char *)small, 256);
    CHECK_FAILS(toys.ops->alloc(toys.device[0], 1 << 20, &data), TD_ERR_NOMEM, "1048576 bytes");
    CHECK_FAILS(toys.ops->alloc(toys.device[0], SIZE_MAX, &data), TD_ERR_NOMEM, "toy:0");
    void *rest = allocate(&toys, 0, (1 << 20) - 768);
    CHECK_FAILS(toys.ops->alloc(toys.device[0], 1, &data), TD_ERR_NOMEM, "toy:0");
    void *other = allocate(&toys, 1, 1 << 20); /* a memory of its own */

    toys.ops->free(toys.device[0], middle);
    CHECK_FAILS(toys.ops->alloc(toys.device[0], 513, &data), TD_ERR_NOMEM, "in one piece");
    CHECK(allocate(&toys, 0, 512) == middle);
    size_t available, total;
    CHECK_OK(toys.ops->memory_info(toys.device[0], &available, &total));
    CHECK_EQ(total, 1 << 20);
    CHECK_EQ(available, 255);
    toys.ops->free(toys.device[0], small);
    toys.ops->free(toys.device[0], rest);
    toys.ops->free(toys.device[1], other);

    struct toy_counts counts = toy_counts(0);
    CHECK_EQ(counts.blocks, 1);
    CHECK_EQ(counts.allocated, 512);
    CHECK_EQ(counts.allocated_peak, (1 << 20) - 255);
}

TEST(memory_is_poisoned)
{
    struct toys toys = begin();
    char *block = allocate(&toys, 0, 1000);
    check_bytes(&toys, 0, block, TOY_FRESH, 1000);
    fill(&toys, 0, block, 7, 1000);
    check_bytes(&toys, 0, block, 7, 1000);
    toys.ops->free(toys.device[0], block);
    CHECK(allocate(&toys, 0, 500) == block);
    check_bytes(&toys, 0, block, TOY_FRESH, 500);

    unsigned char *pinned = allocate_pinned(&toys, 100);
    CHECK_EQ(pinned[99], TOY_FRESH);
    CHECK_EQ(toy_pinned_bytes(), 100);
    toys.ops->free_pinned(toys.device[1], pinned); /* of the kind, not of the device */
    CHECK_EQ(toy_pinned_bytes(), 0);
}

TEST(allocations_fail_on_request)
{
    struct toys toys = begin();
    toy_fail_alloc(0, 2);
    void *data = allocate(&toys, 0, 10);
    void *none = NULL, *other = allocate(&toys, 1, 10);
    CHECK_FAILS(toys.ops->alloc(toys.device[0], 10, &none), TD_ERR_NOMEM, "toy_fail_alloc()");
    CHECK(!none);
    void *next = allocate(&toys, 0, 10);
    toys.ops->free(toys.device[0], data);
    toys.ops->free(toys.device[0], next);
    toys.ops->free(toys.device[1], other);
}

/* ---- What dies --------------------------------------------------------------------------------------------- */

static void fill_past_the_end(void *arg)
{
    (void)arg;
    struct toys toys = begin();
    fill(&toys, 0, (char *)allocate(&toys, 0, 100) + 1, 0, 100);
}

static void fill_freed_memory(void *arg)
{
    (void)arg;
    struct toys toys = begin();
    void *data = allocate(&toys, 0, 100);
    toys.ops->free(toys.device[0], data);
    fill(&toys, 0, data, 0, 100);
}

static void free_before_a_fill(void *arg)
{
    (void)arg;
    struct toys toys = begin();
    void *data = allocate(&toys, 0, 100);
    toy_hold(0, true);
    fill(&toys, 0, data, 0, 100);
    toys.ops->free(toys.device[0], data);
    CHECK(allocate(&toys, 0, 100) == data); /* the address is valid, and another block's */
    toy_hold(0, false);
    toys.ops->synchronize(toys.device[0]);
}

static void unpin_before_a_copy(void *arg)
{
    (void)arg;
    struct toys toys = begin();
    void *data = allocate(&toys, 0, 100), *pinned = allocate_pinned(&toys, 100);
    toy_hold(0, true);
    CHECK_OK(toys.ops->copy_in(toys.device[0], toys.stream[0], data, pinned, 100, true));
    toys.ops->free_pinned(toys.device[0], pinned);
    toy_hold(0, false);
    toys.ops->synchronize(toys.device[0]);
}

static void copy_from_memory_that_is_not_pinned(void *arg)
{
    (void)arg;
    struct toys toys = begin();
    char host[100] = "";
    toys.ops->copy_in(toys.device[0], toys.stream[0], allocate(&toys, 0, 100), host, 100, true);
}

static void copy_overlapping_memory(void *arg)
{
    (void)arg;
    struct toys toys = begin();
    char *data = allocate(&toys, 0, 100);
    toys.ops->copy(toys.device[0], toys.stream[0], data, data + 10, 50);
}

static void use_a_stream_of_the_other_device(void *arg)
{
    (void)arg;
    struct toys toys = begin();
    toys.ops->fill(toys.device[0], toys.stream[1], allocate(&toys, 0, 100), 0, 100);
}

static void use_a_destroyed_stream(void *arg)
{
    (void)arg;
    struct toys toys = begin();
    toys.ops->stream_destroy(toys.device[0], toys.stream[0]);
    fill(&toys, 0, allocate(&toys, 0, 100), 0, 100);
}

static void free_twice(void *arg)
{
    (void)arg;
    struct toys toys = begin();
    void *data = allocate(&toys, 0, 100);
    toys.ops->free(toys.device[0], data);
    toys.ops->free(toys.device[0], data);
}

TEST(wrong_addresses_and_handles_abort)
{
    check_dies(fill_past_the_end, "toy:0: fill: 100 bytes at");
    check_dies(fill_freed_memory, "are not in a live block of this device");
    check_dies(free_before_a_fill, "were freed before the stream has run it");
    check_dies(unpin_before_a_copy, "copy_in: 100 bytes at");
    check_dies(copy_from_memory_that_is_not_pinned, "are not in a live block of pinned memory");
    check_dies(copy_overlapping_memory, "overlap");
    check_dies(use_a_stream_of_the_other_device, "is not a stream of this device");
    check_dies(use_a_destroyed_stream, "is not a stream of this device");
    check_dies(free_twice, "is not the beginning of a live block");
}

/* ---- Copies ------------------------------------------------------------------------------------------------ */

TEST(copies_read_pinned_memory_late)
{
    struct toys toys = begin();
    void *plain = allocate(&toys, 0, 100), *late = allocate(&toys, 0, 100);
    char host[100];
    char *pinned = allocate_pinned(&toys, 100);
    memset(host, 1, 100);
    memset(pinned, 1, 100);

    toy_hold(0, true);
    CHECK_OK(toys.ops->copy_in(toys.device[0], toys.stream[0], plain, host, 100, false));
    CHECK_OK(toys.ops->copy_in(toys.device[0], toys.stream[0], late, pinned, 100, true));
    memset(host, 2, 100);
    memset(pinned, 2, 100); /* too early */
    toy_hold(0, false);
    check_bytes(&toys, 0, plain, 1, 100);
    check_bytes(&toys, 0, late, 2, 100);
    CHECK_EQ(toy_counts(0).copied_in, 200);
    CHECK_EQ(toy_counts(0).copied_out, 200);
}

TEST(copies_write_host_memory_late)
{
    struct toys toys = begin();
    void *data = allocate(&toys, 0, 100);
    fill(&toys, 0, data, 3, 100);
    unsigned char host[100] = "";
    unsigned char *pinned = allocate_pinned(&toys, 100);
    memset(pinned, 0, 100);
    toy_hold(0, true);
    CHECK_OK(toys.ops->copy_out(toys.device[0], toys.stream[0], host, data, 100, false));
    CHECK_OK(toys.ops->copy_out(toys.device[0], toys.stream[0], pinned, data, 100, true));
    CHECK_EQ(host[50], TOY_FRESH);
    CHECK_EQ(pinned[50], TOY_FRESH);
    CHECK(!is_done(&toys, 0));
    toy_hold(0, false);
    CHECK_OK(toys.ops->synchronize(toys.device[0]));
    CHECK(is_done(&toys, 0));
    CHECK_EQ(host[50], 3);
    CHECK_EQ(pinned[50], 3);
}

TEST(copies_inside_and_between_devices)
{
    struct toys toys = begin();
    char *a = allocate(&toys, 0, 100), *b = allocate(&toys, 1, 100);
    fill(&toys, 0, a, 1, 50);
    fill(&toys, 0, a + 50, 2, 50);
    CHECK_OK(toys.ops->copy(toys.device[0], toys.stream[0], a, a + 50, 10));
    check_bytes(&toys, 0, a, 2, 10);
    check_bytes(&toys, 0, a + 10, 1, 40);
    CHECK_OK(toys.ops->copy_from(toys.device[1], toys.stream[1], b, toys.device[0], a, 100));
    check_bytes(&toys, 1, b + 10, 1, 40);
    check_bytes(&toys, 1, b + 50, 2, 50);
    CHECK_OK(toys.ops->copy(toys.device[0], toys.stream[0], a, a, 0));
    CHECK_OK(toys.ops->copy_in(toys.device[0], toys.stream[0], NULL, NULL, 0, false));
    CHECK_OK(toys.ops->synchronize(toys.device[0]));
}
