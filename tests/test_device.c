/* Devices: names, the current device, streams and events, memory; on the host and on the toy accelerator. */
#include "runner.h"
#include "toy_device.h"

#include <tandem/kernels.h>
#include <tandem/tandem.h>

#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

static td_device *toy(int index)
{
    CHECK_OK(toy_register());
    toy_set_delay(50);
    return td_device_get(index ? "toy:1" : "toy:0");
}

/* ---- Names ------------------------------------------------------------------------------------------ */

TEST(a_device_has_one_handle)
{
    CHECK(td_device_get("cpu") == td_device_get("cpu"));
    CHECK(td_device_get("cpu:1") == td_device_get("cpu:1"));
    CHECK(td_device_get("cpu") != td_device_get("cpu:0"));
    CHECK_STR(td_device_name(td_device_get("cpu:7")), "cpu:7");
    CHECK_STR(td_device_kind(td_device_get("cpu:7")), "cpu");
    CHECK_EQ(td_device_index(td_device_get("cpu:7")), 7);
    CHECK_EQ(td_device_index(td_device_get("cpu")), -1);
    CHECK(td_device_get(NULL) == td_device_get("cpu"));
    CHECK_STR(td_device_name(NULL), "cpu");
}

TEST(what_is_not_there_is_named_by_its_first_use)
{
    static const char *const names[] = {"tpu", "tpu:3", "cpu:64", "cpu:x", "cpu:-1", "cpu:01",
                                        "",    ":",     "cpu:",   "a b",   "1cpu",   "cpu:1 "};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        CHECK(!td_device_exists(names[i]));
        td_device *device = td_device_get(names[i]);
        CHECK(device != NULL && device != td_device_get("cpu"));
        CHECK(td_zeros(TD_SHAPE(2), TD_F32, device) == NULL);
        CHECK_EQ(td_last_status(), TD_ERR_INVALID);
        CHECK_CONTAINS(td_last_error(), "td_zeros: ");
        CHECK_CONTAINS(td_last_error(), names[i]);
    }
    CHECK_FAILS(td_set_device(td_device_get("tpu:3")), TD_ERR_INVALID, "there is no device tpu:3");
    CHECK_EQ(td_device_count("tpu"), 0);
    CHECK_EQ(td_device_count(NULL), 0);
    CHECK_EQ(td_device_count("cpu"), 64);
    char longest[200];
    memset(longest, 'x', sizeof longest - 1);
    longest[sizeof longest - 1] = 0;
    CHECK(td_zeros(TD_SHAPE(2), TD_F32, td_device_get(longest)) == NULL);
    for (int i = 0; i < 1000; i++) { /* names that are none do not fill the memory */
        char name[32];
        snprintf(name, sizeof name, "-%d", i);
        CHECK(td_device_get(name) != NULL);
    }
}

TEST(counting_opens_nothing)
{
    CHECK_OK(toy_register());
    CHECK_EQ(td_device_count("toy"), 2);
    CHECK(td_device_exists("toy") && td_device_exists("toy:1") && !td_device_exists("toy:2"));
    CHECK_EQ(toy_counts(0).streams, 0);
    CHECK(td_zeros(TD_SHAPE(2), TD_F32, td_device_get("toy:2")) == NULL);
    CHECK_CONTAINS(td_last_error(), "there are 2 of the kind toy");
}

/* ---- The current device -------------------------------------------------------------------------------- */

static void *current_of_a_thread(void *arg)
{
    (void)arg;
    CHECK(td_current_device() == td_device_get("cpu"));
    return NULL;
}

TEST(the_current_device_belongs_to_the_thread)
{
    td_device *first = toy(0), *second = toy(1);
    TD_SCOPE;
    CHECK(td_current_device() == td_device_get("cpu"));
    CHECK(td_device_get("toy") == first);
    CHECK_OK(td_set_device(second));
    CHECK(td_device_get("toy") == second);
    CHECK(td_tensor_device(td_zeros(TD_SHAPE(3), TD_F32, NULL)) == second);
    pthread_t thread;
    CHECK_EQ(pthread_create(&thread, NULL, current_of_a_thread, NULL), 0);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    {
        TD_DEVICE_SCOPE(first);
        CHECK(td_tensor_device(td_randn(TD_SHAPE(3), TD_F32, NULL)) == first);
        td_module *net = td_linear(2, 3);
        CHECK(td_tensor_device(td_module_parameter(net, "weight")) == first);
        td_module_destroy(net);
    }
    CHECK(td_current_device() == second);
    CHECK_OK(td_set_device(td_device_get("cpu")));
    CHECK(td_device_get("toy") == second);
}

TEST(every_constructor_takes_a_device)
{
    td_device *device = toy(0);
    TD_SCOPE;
    float numbers[] = {1, 2, 3, 4};
    td_tensor *made[] = {
        td_empty(TD_SHAPE(4), TD_F32, device),
        td_zeros(TD_SHAPE(4), TD_F32, device),
        td_full(TD_SHAPE(4), 7, TD_F32, device),
        td_ones(TD_SHAPE(4), TD_F32, device),
        td_from_array(numbers, TD_SHAPE(4), TD_F32, device),
        td_arange(0, 4, 1, TD_F32, device),
        td_linspace(0, 3, 4, TD_F32, device),
        td_rand(TD_SHAPE(4), TD_F32, device),
        td_randn(TD_SHAPE(4), TD_F32, device),
        td_randint(0, 9, TD_SHAPE(4), TD_I64, device),
        td_randperm(4, TD_I64, device),
    };
    for (size_t i = 0; i < sizeof made / sizeof *made; i++)
        CHECK(made[i] && td_tensor_device(made[i]) == device);
    CHECK_EQ(td_item(td_sum(made[1])), 0);
    CHECK_EQ(td_item(td_sum(made[2])), 28);
    CHECK_EQ(td_item(td_sum(made[3])), 4);
    CHECK_EQ(td_item(td_sum(made[4])), 10);
    CHECK_EQ(td_item(td_sum(made[5])), 6);
    CHECK_EQ(td_item(td_sum(made[6])), 6);
    CHECK_EQ(td_item(td_sum(made[10])), 6);
    td_tensor *view = td_from_blob(td_tensor_data(made[4]), TD_SHAPE(2), NULL, TD_F32, device, NULL,
                                   NULL);
    CHECK_EQ(td_item(td_sum(view)), 3);
}

/* ---- Streams and events ------------------------------------------------------------------------------------ */

TEST(streams_of_the_host_do_nothing)
{
    td_stream *stream = td_stream_create(NULL, 0);
    td_event *event = td_event_create(NULL, &(td_event_options){.timing = true});
    td_event *end = td_event_create(NULL, &(td_event_options){.timing = true});
    double ms = -1;
    CHECK(stream && event && end);
    CHECK_OK(td_set_stream(stream));
    CHECK(td_current_stream(NULL) == td_default_stream(NULL));
    CHECK_OK(td_event_record(event, stream));
    CHECK_OK(td_event_record(end, NULL));
    CHECK(td_event_is_done(event) && td_stream_is_done(stream));
    CHECK_OK(td_event_synchronize(event));
    CHECK_OK(td_stream_synchronize(stream));
    CHECK_OK(td_stream_wait_event(stream, event));
    CHECK_OK(td_event_elapsed_ms(event, end, &ms));
    CHECK(ms >= 0);
    CHECK_EQ(td_device_waits(td_device_get("cpu")), 0);
    td_event_destroy(event);
    td_event_destroy(end);
    td_stream_release(stream);
}

TEST(an_event_orders_two_streams)
{
    td_device *device = toy(0);
    td_stream *side = td_stream_create(device, 0);
    td_event *event = td_event_create(device, NULL);
    CHECK(side && event);
    for (int round = 0; round < 50; round++) {
        TD_SCOPE;
        td_tensor *x = td_full(TD_SHAPE(1000), round, TD_F32, device);
        td_tensor *y = td_add_scalar(x, 1);
        CHECK_OK(td_event_record(event, NULL));
        td_tensor *z;
        {
            TD_STREAM_SCOPE(side);
            CHECK(td_current_stream(device) == side);
            CHECK_OK(td_stream_wait_event(NULL, event));
            z = td_mul_scalar(y, 2);
        }
        CHECK_OK(td_stream_wait_stream(td_current_stream(device), side));
        CHECK_EQ(td_item(td_sum(z)), 2000 * (round + 1));
    }
    CHECK(td_event_is_done(event));
    td_event_destroy(event);
    td_stream_release(side);
}

TEST(what_another_stream_uses_is_not_reused)
{
    td_device *device = toy(0);
    td_stream *side = td_stream_create(device, 0);
    for (int round = 0; round < 30; round++) {
        TD_SCOPE;
        td_tensor *sum;
        {
            td_tensor *x = td_tensor_retain(td_full(TD_SHAPE(5000), 1, TD_F32, device));
            CHECK_OK(td_stream_wait_stream(side, td_current_stream(device)));
            {
                TD_STREAM_SCOPE(side);
                sum = td_sum(x); /* late */
            }
            td_tensor_release(x);
        }
        for (int i = 0; i < 3; i++) /* would get the same memory */
            CHECK(td_full(TD_SHAPE(5000), 9, TD_F32, device));
        CHECK_OK(td_stream_wait_stream(td_current_stream(device), side));
        CHECK_EQ(td_item(sum), 5000);
    }
    td_stream_release(side);
}

TEST(a_stream_may_end_with_memory_in_use)
{
    td_device *device = toy(0);
    for (int round = 0; round < 40; round++) {
        TD_SCOPE;
        td_stream *side = td_stream_create(device, 0);
        td_tensor *x;
        {
            TD_STREAM_SCOPE(side);
            x = td_full(TD_SHAPE(100000), round, TD_F32, device);
        }
        td_stream_release(side);
        CHECK_EQ(td_item(td_mean(x)), round);
    }
    td_memory_stats stats;
    CHECK_OK(td_device_memory_stats(device, &stats));
    CHECK(stats.reserved < 30 << 20); /* the memory of ended streams is used again */
}

TEST(two_devices)
{
    td_device *first = toy(0), *second = toy(1);
    TD_SCOPE;
    td_tensor *x = td_arange(0, 1000, 1, TD_F32, first);
    for (int round = 0; round < 20; round++) {
        td_tensor *y = td_mul_scalar(td_tensor_to(td_add_scalar(x, 1), second), 2);
        td_tensor *back = td_tensor_to(y, first);
        CHECK_EQ(td_item(td_sum(back)), 2 * 500500.0);
        td_tensor *odd = td_tensor_to(td_slice(x, 0, 1, 1000, 2), second); /* strides */
        CHECK_EQ(td_item(td_sum(odd)), 250000);
    }
    CHECK(td_add(x, td_tensor_to(x, second)) == NULL);
    CHECK_CONTAINS(td_last_error(), "on toy:0 and on toy:1");
}

/* ---- Memory ---------------------------------------------------------------------------------------------------- */

TEST(freed_memory_is_used_again)
{
    td_device *device = toy(0);
    td_memory_stats before, after;
    for (int round = 0; round < 2; round++) {
        CHECK_OK(td_device_memory_stats(device, &before));
        for (int i = 0; i < 100; i++) {
            TD_SCOPE;
            CHECK(td_zeros(TD_SHAPE(1 + i * 37), TD_F32, device));
        }
    }
    CHECK_OK(td_device_memory_stats(device, &after));
    CHECK_EQ(after.taken, before.taken);
    CHECK_EQ(after.allocations, before.allocations + 100);
    CHECK_EQ(after.allocated, 0);
    CHECK_EQ(after.tensors, 0);
    CHECK(after.allocated_peak > 0 && after.reserved >= after.allocated_peak);
    CHECK_OK(td_device_empty_cache(device));
    CHECK_OK(td_device_memory_stats(device, &after));
    CHECK_EQ(after.reserved, 0);
    CHECK_EQ(toy_counts(0).blocks, 0);
    CHECK_OK(td_device_reset_peak(device));
    CHECK_OK(td_device_memory_stats(device, &after));
    CHECK_EQ(after.allocated_peak, 0);
}

TEST(short_memory_says_who_holds_it)
{
    toy_set_memory(8 << 20);
    td_device *device = toy(1);
    TD_SCOPE;
    td_tensor *big = td_zeros(TD_SHAPE(1 << 20), TD_F32, device);
    td_tensor *more = td_ones(TD_SHAPE(400000), TD_F32, device);
    CHECK(big && more);
    CHECK(td_zeros(TD_SHAPE(1 << 20), TD_F32, device) == NULL);
    CHECK_EQ(td_last_status(), TD_ERR_NOMEM);
    CHECK_CONTAINS(td_last_error(), "td_zeros: toy:1 has no memory for 4.0 MiB of its 8.0 MiB");
    CHECK_CONTAINS(td_last_error(), "td_zeros 4.0 MiB in 1 tensor");
    CHECK_CONTAINS(td_last_error(), "td_ones 1.5 MiB in 1 tensor");
    td_bytes text = td_device_memory_text(device);
    CHECK_CONTAINS(text.data, "td_zeros 4.0 MiB in 1 tensor\ntd_ones");
    td_bytes_free(&text);
    td_memory_stats stats;
    CHECK_OK(td_device_memory_stats(device, &stats));
    CHECK(stats.failures == 1 && stats.flushes == 1 && stats.total == 8 << 20);
    CHECK_EQ(td_item(td_sum(more)), 400000); /* nothing was lost */
}

TEST(memory_is_given_back_when_it_is_short)
{
    toy_set_memory(8 << 20);
    td_device *device = toy(1);
    for (int i = 0; i < 4; i++) { /* each size alone fits, the caches of all do not */
        TD_SCOPE;
        td_tensor *x = td_full(TD_SHAPE(1000000 + i * 300000), i, TD_F32, device);
        CHECK(x != NULL);
        CHECK_EQ(td_item(td_mean(x)), i);
    }
}

/* ---- Copies ------------------------------------------------------------------------------------------------------ */

TEST(pinned_memory_is_copied_while_the_host_goes_on)
{
    td_device *device = toy(0);
    TD_SCOPE;
    td_tensor *x = td_tensor_pin(td_arange(0, 4096, 1, TD_F32, NULL), device);
    CHECK(x && td_tensor_is_pinned(x) && !td_tensor_is_pinned(td_clone(x)));
    int64_t waits = td_device_waits(device);
    td_tensor *there = td_tensor_to_async(x, device);
    td_tensor *back = td_tensor_to_async(td_mul_scalar(there, 3), td_device_get("cpu"));
    CHECK(back && td_tensor_is_pinned(back));
    CHECK_EQ(td_device_waits(device), waits);
    CHECK_OK(td_stream_synchronize(td_current_stream(device)));
    CHECK_EQ(td_device_waits(device), waits + 1);
    CHECK_EQ(td_item(td_sum(back)), 3 * 4096.0 * 4095 / 2);
    for (int i = 0; i < 20;
         i++) { /* buffers that are given back at once are not overwritten before they are read */
        TD_SCOPE;
        td_tensor *once = td_tensor_pin(td_full(TD_SHAPE(4096), i, TD_F32, NULL), device);
        td_tensor *y = td_tensor_retain(td_tensor_to_async(once, device));
        td_tensor_retain(once);
        td_tensor_release(once);
        CHECK_EQ(td_item(td_mean(y)), i);
        td_tensor_release(y);
    }
}

TEST(waits_are_counted)
{
    td_device *device = toy(0);
    TD_SCOPE;
    td_tensor *x = td_ones(TD_SHAPE(10, 10), TD_F32, device);
    int64_t before = td_device_waits(device);
    td_tensor *y = td_f_relu(td_matmul(td_add(x, x), td_transpose(x, 0, 1)));
    td_tensor *z = td_tensor_to(td_cat(TD_TENSORS(y, x), 0), toy(1));
    CHECK(z != NULL);
    CHECK_EQ(td_device_waits(device), before);
    CHECK_EQ(td_item(td_sum(y)), 2000);
    CHECK_EQ(td_device_waits(device), before + 1);
    td_bytes text = td_tensor_text(td_narrow(td_narrow(y, 0, 0, 1), 1, 0, 2));
    CHECK_STR(text.data, "tensor([[20., 20.]], device='toy:0')");
    td_bytes_free(&text);
    CHECK_EQ(td_device_waits(device), before + 2);
    CHECK(td_equal(y, y));
    CHECK_EQ(td_device_waits(device), before + 3);
}

/* ---- The table ----------------------------------------------------------------------------------------------------- */

TEST(tables_of_other_versions_are_refused)
{
    CHECK_OK(toy_register());
    td_device_ops ops = *toy_ops();
    ops.kind = "next";
    ops.version = TD_DEVICE_OPS_VERSION + 1;
    CHECK_FAILS(td_register_device(&ops, NULL), TD_ERR_MISMATCH, "too new");
    ops.version = 0;
    CHECK_FAILS(td_register_device(&ops, NULL), TD_ERR_MISMATCH, "too old");
    ops.version = TD_DEVICE_OPS_VERSION;
    const uint32_t short_sizes[] = {0, 1, offsetof(td_device_ops, fill),
                                    offsetof(td_device_ops, kernels) + 4};
    for (size_t i = 0; i < sizeof short_sizes / sizeof *short_sizes; i++) {
        ops.size = short_sizes[i];
        CHECK_FAILS(td_register_device(&ops, NULL), TD_ERR_INVALID, "set `size` to");
        CHECK_CONTAINS(td_last_error(), "next");
    }
    ops.size = sizeof ops;
    td_kernels kernels = *ops.kernels;
    kernels.version = TD_KERNELS_VERSION + 1;
    ops.kernels = &kernels;
    CHECK_FAILS(td_register_device(&ops, NULL), TD_ERR_MISMATCH, "kernels, which is too new");
    ops.kernels = toy_ops()->kernels;
    ops.kind = "toy";
    CHECK_FAILS(td_register_device(&ops, NULL), TD_ERR_STATE, "registered already");
    ops.kind = "no/name";
    CHECK_FAILS(td_register_device(&ops, NULL), TD_ERR_INVALID, "letters");
    ops.kind = "next";
    ops.copy_in = NULL;
    CHECK_FAILS(td_register_device(&ops, NULL), TD_ERR_INVALID, "lacks a function");
    ops.copy_in = toy_ops()->copy_in;
    ops.graph_destroy = ops.event_destroy;
    CHECK_FAILS(td_register_device(&ops, NULL), TD_ERR_INVALID, "only some of capture_begin");
    CHECK_FAILS(td_register_device(NULL, NULL), TD_ERR_INVALID, "a kind is");
}

/* ---- Memory of the program ---------------------------------------------------------------------------- */

struct lent {
    td_stream *stream;
    int frees;
    bool done; /* when it was freed */
};

static void give_back(void *data, void *arg)
{
    (void)data;
    struct lent *lent = arg;
    lent->frees++;
    lent->done = td_stream_is_done(lent->stream);
}

/* The owner may reuse the memory at once, so that free_fn comes after what is enqueued on any stream. */
TEST(memory_of_the_program_is_given_back_when_no_stream_uses_it)
{
    td_device *device = toy(0);
    TD_SCOPE;
    struct lent lent = {.stream = td_stream_create(device, 0)};
    td_tensor *memory = td_zeros(TD_SHAPE(1000), TD_F32, device);
    CHECK_OK(td_device_synchronize(device));
    toy_hold(0, true);
    {
        TD_SCOPE;
        td_tensor *view = td_from_blob(td_tensor_data(memory), TD_SHAPE(1000), NULL, TD_F32, device,
                                       give_back, &lent);
        TD_STREAM_SCOPE(lent.stream);
        for (int i = 0; i < 10; i++)
            CHECK_OK(td_add_scalar_(view, 1));
        CHECK(!td_stream_is_done(lent.stream));
        toy_set_delay(5000);
        toy_hold(0, false);
    }
    CHECK_EQ(lent.frees, 1);
    CHECK(lent.done);
    toy_set_delay(0);
    CHECK_EQ(td_item(td_sum(memory)), 10000);
    td_stream_release(lent.stream);
}
