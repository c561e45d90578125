/* Tensors in calls: lent on one host, copied otherwise; each side may change its own. */
#include "base/clock.h"
#include "rpc/rpc_agent.h"
#include "rpc_boxes.h"
#include "runner.h"
#include "tensor/tensor_internal.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { LARGE = 1 << 16 }; /* elements of a tensor that is lent */

static const td_rpc_call_options copied = {.copy = true};

static float at(td_tensor *tensor, int64_t index)
{
    return ((const float *)td_tensor_data(tensor))[index];
}

static bool is_borrowed(td_tensor *tensor)
{
    return td__storage_is_borrowed(tensor->storage);
}

static td_tensor *send_to(const char *to, td_tensor *tensor, const td_rpc_call_options *options)
{
    td_tensor *back = td_value_tensor(td_rpc_sync(to, "echo", TD_ARGS(tensor), options));
    CHECK(back);
    return back;
}

/* The worker's own tensor, of which it returns a sum, and in which it writes. */
static td_value *look(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call, (void)count;
    td_tensor *tensor = td_value_tensor(args[0]);
    return td_value_list(
        TD_VALUES(td_value_from_bool(is_borrowed(tensor)), td_value_from_float(at(tensor, 0))));
}

static td_value *scribble(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call, (void)count;
    td_tensor *tensor = td_value_tensor(args[0]), *row = td_narrow(tensor, 0, 0, 1);
    if (td_fill_(row, -1) || td_add_(tensor, td_full(TD_SHAPE(1), 1, TD_F32, NULL)))
        return NULL;
    return td_value_from_float(at(tensor, 0) + at(tensor, 1));
}

/* Of the worker's own memory. */
static td_value *make(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call, (void)count;
    return td_value_from_tensor(
        td_full(TD_SHAPE(2, LARGE), (double)boxes_int(args[0]), TD_F32, NULL));
}

static void begin(void)
{
    CHECK_OK(td_rpc_register("make(n: int)", make, NULL));
    CHECK_OK(td_rpc_register("look(x: tensor)", look, NULL));
    CHECK_OK(td_rpc_register("scribble(x: tensor)", scribble, NULL));
    boxes_begin();
}

static bool is_lent_to(const char *to, td_tensor *tensor, float first,
                       const td_rpc_call_options *options)
{
    bool borrowed;
    double value;
    td_value *seen = td_rpc_sync(to, "look", TD_ARGS(tensor), options);
    CHECK(seen);
    CHECK_OK(td_value_bool(td_value_at(seen, 0), &borrowed));
    CHECK_OK(td_value_float(td_value_at(seen, 1), &value));
    CHECK_EQ(value, first);
    return borrowed;
}

/* ---- Kinds of tensors -------------------------------------------------------------------------- */

static void exchange(td_tensor *tensor)
{
    TD_SCOPE;
    td_tensor *plain = td_contiguous(tensor);
    for (int copy = 0; copy < 2; copy++) {
        td_tensor *back = send_to("w1", tensor, copy ? &copied : NULL);
        CHECK_EQ(td_tensor_dtype(back), td_tensor_dtype(tensor));
        CHECK_EQ(td_tensor_ndim(back), td_tensor_ndim(tensor));
        for (int d = 0; d < td_tensor_ndim(tensor); d++)
            CHECK_EQ(td_tensor_shape(back)[d], td_tensor_shape(tensor)[d]);
        size_t size = (size_t)td_tensor_numel(tensor) * td_dtype_size(td_tensor_dtype(tensor));
        CHECK_MEM(td_tensor_data(td_contiguous(back)), td_tensor_data(plain), size);
    }
}

static void exchange_all_kinds(void)
{
    for (int dtype = TD_F32; dtype <= TD_COMPLEX128; dtype++) {
        TD_SCOPE;
        static const int64_t rows[] = {0, 1, 3, 500};
        for (int i = 0; i < 4; i++) {
            td_tensor *x = td_zeros(TD_SHAPE(rows[i], 40), (td_dtype)dtype, NULL);
            unsigned char *bytes = td_tensor_data(x);
            size_t size = (size_t)td_tensor_numel(x) * td_dtype_size((td_dtype)dtype);
            for (size_t j = 0; j < size; j++)
                bytes[j] = (unsigned char)(dtype == TD_BOOL ? j % 2 : j * 7 + j / 256);
            exchange(x);
            exchange(td_transpose(x, 0, 1));
            if (rows[i] > 2)
                exchange(td_narrow(x, 0, 1, rows[i] - 2));
            exchange(td_narrow(x, 1, 3, 20));
        }
    }
    TD_SCOPE;
    exchange(td_full(TD_SHAPE(1), 3, TD_F32, NULL));
    float *own = malloc(sizeof *own * LARGE);
    for (int i = 0; i < LARGE; i++)
        own[i] = (float)i;
    exchange(td_from_blob(own, TD_SHAPE(LARGE), NULL, TD_F32, NULL, NULL, NULL));
    CHECK_SOON(!boxes_leases());
    free(own);
}

RANKS(all_kinds, .ranks = 2)
{
    begin();
    if (td_test_rank() == 0)
        exchange_all_kinds();
    boxes_end();
}

/* Several threads copy one tensor, and several tensors at once. */
RANKS(large_ones_by_value, .ranks = 2)
{
    enum { ELEMENTS = (10 << 20) / 4 + 77, CALLS = 4 };
    atomic_store(&td__rpc_copy_helpers, 3);
    begin();
    if (td_test_rank() == 0) {
        TD_SCOPE;
        td_tensor *x = td_zeros(TD_SHAPE(ELEMENTS), TD_I32, NULL);
        int32_t *numbers = td_tensor_data(x);
        for (int i = 0; i < ELEMENTS; i++)
            numbers[i] = i;
        exchange(x);
        td_future *futures[CALLS];
        for (int i = 0; i < CALLS; i++)
            futures[i] = td_rpc_async("w1", "echo", TD_ARGS(x), &copied);
        for (int i = 0; i < CALLS; i++) {
            td_tensor *back = td_value_tensor(td_future_wait(futures[i], 0));
            CHECK(back && !is_borrowed(back));
            CHECK_MEM(td_tensor_data(back), numbers, ELEMENTS * sizeof *numbers);
        }
    }
    boxes_end();
}

RANKS(all_kinds_over_tcp, .ranks = 2)
{
    setenv("TANDEM_TRANSPORT", "tcp", 1);
    begin();
    if (td_test_rank() == 0) {
        TD_SCOPE;
        exchange_all_kinds();
        td_tensor *x = td_full(TD_SHAPE(LARGE), 3, TD_F32, NULL);
        CHECK(!is_lent_to("w1", x, 3, NULL));
    }
    boxes_end();
}

/* ---- By reference ------------------------------------------------------------------------------ */

static long private_kib(void)
{
    long kib = -1;
    char line[128];
    FILE *file = fopen("/proc/self/status", "r");
    CHECK(file);
    while (fgets(line, sizeof line, file))
        if (!strncmp(line, "RssAnon:", 8))
            kib = strtol(line + 8, NULL, 10);
    fclose(file);
    return kib;
}

static td_value *anonymous(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call, (void)args, (void)count;
    return td_value_from_int(private_kib());
}

/* 64 MiB are lent many times over, and are in the receiver's memory only as what the sender maps. */
RANKS(large_ones_are_not_copied, .ranks = 2)
{
    CHECK_OK(td_rpc_register("anonymous()", anonymous, NULL));
    begin();
    if (td_test_rank() == 0) {
        TD_SCOPE;
        td_tensor *x = td_full(TD_SHAPE(16 << 20), 3, TD_F32, NULL);
        const void *before = td_tensor_data(x);
        int64_t own = private_kib(),
                others = boxes_int(td_rpc_sync("w1", "anonymous", TD_NO_ARGS, NULL));
        CHECK(td_rpc_sync("w1", "keep", TD_ARGS(x), NULL));
        CHECK_EQ(boxes_leases(), 1);
        for (int i = 0; i < 100; i++)
            CHECK(is_lent_to("w1", x, 3, NULL));
        CHECK(!is_lent_to("w1", td_narrow(x, 0, 0, LARGE), 3, &copied));
        CHECK(td_tensor_data(x) == before);
        CHECK(private_kib() < own + 16384);
        CHECK(boxes_int(td_rpc_sync("w1", "anonymous", TD_NO_ARGS, NULL)) < others + 16384);
        CHECK_SOON(boxes_leases() == 1);
        CHECK(td_rpc_sync("w1", "drop", TD_NO_ARGS, NULL));
        CHECK_SOON(boxes_leases() == 0);
        CHECK_OK(td_fill_(x, 4)); /* in place */
        CHECK(td_tensor_data(x) == before);
    }
    boxes_end();
}

RANKS(small_ones_are_copied, .ranks = 2)
{
    begin();
    if (td_test_rank() == 0) {
        TD_SCOPE;
        CHECK(!is_lent_to("w1", td_full(TD_SHAPE(1023), 3, TD_F32, NULL), 3, NULL));
        CHECK(is_lent_to("w1", td_full(TD_SHAPE(1024), 3, TD_F32, NULL), 3, NULL));
        CHECK(!is_lent_to("w0", td_full(TD_SHAPE(1024), 3, TD_F32, NULL), 3, NULL));
    }
    boxes_end();
}

/* ---- Writing ----------------------------------------------------------------------------------- */

static float kept_first(void)
{
    TD_SCOPE;
    td_tensor *kept = td_value_tensor(td_rpc_sync("w1", "kept", TD_NO_ARGS, &copied));
    CHECK(kept);
    return at(kept, 0);
}

static void write_while_lent(void)
{
    TD_SCOPE;
    td_tensor *x = td_full(TD_SHAPE(LARGE), 3, TD_F32, NULL), *view = td_narrow(x, 0, 0, LARGE / 2);
    const void *before = td_tensor_data(x);
    CHECK(td_rpc_sync("w1", "keep", TD_ARGS(x), NULL));
    CHECK_OK(td_add_(view, td_full(TD_SHAPE(1), 1, TD_F32, NULL)));
    CHECK(td_tensor_data(x) != before);
    CHECK_EQ(at(x, 0), 4);
    CHECK_EQ(at(view, 0), 4);
    CHECK_EQ(at(x, LARGE - 1), 3);
    CHECK_EQ(kept_first(), 3);

    /* A view is lent, and the whole is written. */
    CHECK(td_rpc_sync("w1", "keep", TD_ARGS(view), NULL));
    CHECK_OK(td_fill_(x, 9));
    CHECK_EQ(kept_first(), 4);
    CHECK_EQ(at(view, 0), 9);

    /* The receiver writes. */
    double sum;
    CHECK_OK(td_value_float(td_rpc_sync("w1", "scribble", TD_ARGS(x), NULL), &sum));
    CHECK_EQ(sum, 0 + 10);
    CHECK_EQ(at(x, 0), 9);

    /* The sender has released it. */
    td_tensor *gone = td_tensor_retain(td_full(TD_SHAPE(LARGE), 6, TD_F32, NULL));
    {
        TD_SCOPE;
        CHECK(td_rpc_sync("w1", "keep", TD_ARGS(gone), NULL));
    }
    td_tensor_release(gone);
    for (int i = 0; i < 8; i++) {
        TD_SCOPE;
        CHECK(td_full(TD_SHAPE(LARGE), 100 + i, TD_F32, NULL));
    }
    CHECK_EQ(kept_first(), 6);
    CHECK(td_rpc_sync("w1", "drop", TD_NO_ARGS, NULL));
}

static void step_while_lent(void)
{
    TD_SCOPE;
    td_tensor *w = td_full(TD_SHAPE(LARGE), 3, TD_F32, NULL);
    CHECK_OK(td_tensor_set_requires_grad(w, true));
    CHECK_OK(td_backward(td_sum(w)));
    CHECK(td_rpc_sync("w1", "keep", TD_ARGS(w), NULL));
    td_optimizer *sgd = td_sgd_of(&w, 1, &(td_sgd_options){.lr = 1});
    CHECK_OK(td_optimizer_step(sgd));
    td_optimizer_destroy(sgd);
    CHECK_EQ(at(w, 0), 2);
    CHECK_EQ(kept_first(), 3);
    CHECK(td_rpc_sync("w1", "drop", TD_NO_ARGS, NULL));
}

RANKS(writes_while_lent, .ranks = 2)
{
    begin();
    if (td_test_rank() == 0) {
        write_while_lent();
        step_while_lent();
    }
    boxes_end();
}

/* ---- The end of a lease ------------------------------------------------------------------------ */

RANKS(the_last_view_ends_the_lease, .ranks = 2)
{
    begin();
    if (td_test_rank() == 0) {
        td_tensor *got, *view, *part;
        {
            TD_SCOPE;
            got = td_tensor_retain(td_value_tensor(td_rpc_sync("w1", "make", TD_ARGS(5), NULL)));
            CHECK(got && is_borrowed(got));
            view = td_tensor_retain(td_narrow(got, 0, 1, 1));
            part = td_tensor_retain(td_reshape(view, TD_SHAPE(LARGE)));
        }
        TD_SCOPE;
        td_tensor_release(got);
        td_tensor_release(view);
        CHECK(is_borrowed(part));
        CHECK_EQ(at(part, 7), 5);
        td_tensor_release(part);
    }
    boxes_end();
}

RANKS(the_receiver_dies, .ranks = 2, .may_die = 1 << 1)
{
    begin();
    td_test_barrier();
    if (td_test_rank() == 1)
        for (;;)
            pause();
    TD_SCOPE;
    td_tensor *x = td_full(TD_SHAPE(LARGE), 3, TD_F32, NULL);
    const void *before = td_tensor_data(x);
    CHECK(td_rpc_sync("w1", "keep", TD_ARGS(x), NULL));
    CHECK_EQ(boxes_leases(), 1);
    td_test_kill(1, SIGKILL);
    CHECK_SOON(!boxes_leases());
    CHECK_OK(td_fill_(x, 4));
    CHECK(td_tensor_data(x) == before);
    CHECK_FAILS(td_rpc_sync("w1", "keep", TD_ARGS(x), NULL) ? TD_OK : td_last_status(), TD_ERR_PEER,
                "w1");
    CHECK_EQ(boxes_leases(), 0);
    CHECK_OK(td_rpc_shutdown(NULL));
}

RANKS(the_lender_dies, .ranks = 2, .may_die = 1 << 1)
{
    begin();
    td_test_barrier();
    if (td_test_rank() == 1)
        for (;;)
            pause();
    TD_SCOPE;
    td_tensor *got = td_value_tensor(td_rpc_sync("w1", "make", TD_ARGS(3), NULL));
    CHECK(got && is_borrowed(got));
    td_test_kill(1, SIGKILL);
    CHECK(!td_rpc_sync("w1", "sleep", TD_ARGS(60000, 1), NULL));
    CHECK_EQ(at(got, LARGE - 1), 3);
    CHECK_OK(td_rpc_shutdown(NULL));
    CHECK(!is_borrowed(got));
    CHECK_EQ(at(got, LARGE - 1), 3);
}

/* What was borrowed stays after the shutdown of both; and the next worker of the process has nothing of it. */
RANKS(after_the_shutdown, .ranks = 2)
{
    td_tensor *got[3] = {NULL};
    begin();
    TD_SCOPE;
    const char *other = boxes_name(1 - td_test_rank());
    td_tensor *x = td_full(TD_SHAPE(LARGE), 3 + td_test_rank(), TD_F32, NULL);
    const void *before = td_tensor_data(x);
    CHECK(td_rpc_sync(other, "keep", TD_ARGS(x), NULL));
    td_test_barrier();
    for (int i = 0; i < 3; i++) {
        TD_SCOPE;
        got[i] = td_tensor_retain(
            td_value_tensor(td_rpc_sync(other, "make", TD_ARGS(3 + td_test_rank()), NULL)));
    }
    CHECK_OK(td_rpc_shutdown(NULL));
    CHECK(td_tensor_data(x) == before);
    CHECK_OK(td_fill_(x, 50));
    CHECK(td_tensor_data(x) == before); /* no longer lent */
    td_test_barrier();
    for (int i = 0; i < 3; i++) {
        CHECK(!is_borrowed(got[i]));
        CHECK_EQ(at(got[i], LARGE - 1), 3 + td_test_rank());
        CHECK_OK(td_fill_(got[i], 1));
    }
    boxes_begin();
    CHECK(td_rpc_sync(boxes_name(td_test_rank()), "drop", TD_NO_ARGS, NULL));
    td_tensor_release(got[0]);
    td_tensor_release(got[1]);
    boxes_end();
    td_tensor_release(got[2]);
}

/* The lender leaves at once and lives on: what it allocates then is not what the other one reads. */
RANKS(the_lender_leaves, .ranks = 2)
{
    begin();
    td_test_barrier();
    if (td_test_rank() == 0) {
        {
            TD_SCOPE;
            td_tensor *x = td_full(TD_SHAPE(LARGE), 3, TD_F32, NULL);
            CHECK(td_rpc_sync("w1", "keep", TD_ARGS(x), NULL));
            CHECK_OK(td_rpc_shutdown(&(td_rpc_shutdown_options){.now = true}));
            CHECK_CONTAINS(boxes_warnings(), "others read 1 of its tensors: their 262144 bytes");
            td_log_set_sink(NULL, NULL);
            CHECK_OK(td_fill_(x, 4));
        }
        TD_SCOPE;
        for (int i = 0; i < 8; i++)
            CHECK(td_full(TD_SHAPE(LARGE), 100 + i, TD_F32, NULL));
        td_test_barrier();
        td_test_barrier();
        return;
    }
    TD_SCOPE;
    td_test_barrier();
    td_tensor *kept = td_value_tensor(td_rpc_sync("w1", "kept", TD_NO_ARGS, NULL));
    for (int i = 0; i < LARGE; i++)
        CHECK_EQ(at(kept, i), 3);
    CHECK(td_rpc_sync("w1", "drop", TD_NO_ARGS, NULL));
    td_test_barrier();
    CHECK_OK(td_rpc_shutdown(&(td_rpc_shutdown_options){.now = true}));
}

static void *release_slowly(void *arg)
{
    td_tensor **got = arg;
    for (int i = 0; i < 200; i++)
        td_tensor_release(got[i]);
    return NULL;
}

/* Tensors are released while the worker shuts down, at once or in order. */
RANKS(released_during_the_shutdown, .ranks = 2)
{
    static td_tensor *got[200];
    begin();
    for (int now = 0; now < 2; now++) {
        TD_SCOPE;
        const char *other = boxes_name(1 - td_test_rank());
        for (int i = 0; i < 200; i++) {
            TD_SCOPE;
            td_value *made = td_rpc_sync(other, "make", TD_ARGS(3), NULL);
            got[i] = td_tensor_retain(td_value_tensor(made));
        }
        td_test_barrier();
        pthread_t thread;
        CHECK_EQ(pthread_create(&thread, NULL, release_slowly, got), 0);
        CHECK_OK(td_rpc_shutdown(&(td_rpc_shutdown_options){.now = now}));
        CHECK_EQ(pthread_join(thread, NULL), 0);
        td_test_barrier();
        if (!now)
            boxes_begin();
    }
}

/* ---- Passing on -------------------------------------------------------------------------------- */

RANKS(passed_to_a_third, .ranks = 3)
{
    begin();
    if (td_test_rank() == 0) {
        TD_SCOPE;
        td_tensor *x = td_full(TD_SHAPE(LARGE), 3, TD_F32, NULL);
        td_tensor *one = send_to("w1", x, NULL);
        CHECK(is_borrowed(one));
        td_tensor *two = send_to("w2", one, NULL); /* what w1 lends */
        CHECK(is_borrowed(two));
        CHECK(is_lent_to("w1", two, 3, NULL));
        CHECK_OK(td_fill_(one, 4));
        CHECK_OK(td_fill_(x, 5));
        CHECK_EQ(at(two, 0), 3);
        CHECK_EQ(at(one, 0), 4);
        /* The same tensor twice in a message. */
        td_value *both = td_rpc_sync("w1", "echo", TD_ARGS(TD_ARGS(x, x)), NULL);
        CHECK_OK(td_fill_(td_value_tensor(td_value_at(both, 0)), 8));
        CHECK_EQ(at(td_value_tensor(td_value_at(both, 1)), 0), 5);
    }
    boxes_end();
}

/* What is sent back is over the memory that was lent; and a write to either does not change the other. */
RANKS(sent_back_to_the_lender, .ranks = 2)
{
    begin();
    if (td_test_rank() == 0) {
        TD_SCOPE;
        td_tensor *x = td_full(TD_SHAPE(2, LARGE), 3, TD_F32, NULL);
        CHECK_OK(td_fill_(td_narrow(x, 0, 1, 1), 4));
        float *before = td_tensor_data(x);
        td_tensor *back = send_to("w1", x, NULL), *again = send_to("w1", back, NULL);
        td_tensor *part = send_to("w1", td_narrow(x, 0, 1, 1), NULL);
        CHECK(td_tensor_data(back) == before && td_tensor_data(again) == before);
        CHECK(td_tensor_data(part) == before + LARGE);
        CHECK(td_tensor_data(send_to("w1", x, &copied)) != before);
        CHECK_SOON(!boxes_leases());
        CHECK_OK(td_fill_(back, 8));
        CHECK_EQ(at(x, 0), 3);
        CHECK_OK(td_fill_(x, 9));
        CHECK(td_tensor_data(x) != before && td_tensor_data(again) == before);
        CHECK_EQ(at(again, 0), 3);
        CHECK_EQ(at(part, 0), 4);
        CHECK_EQ(at(back, 0), 8);
        /* What the other one has kept a part of, and changed. */
        CHECK(td_rpc_sync("w1", "keep", TD_ARGS(x), NULL));
        td_tensor *kept = td_value_tensor(td_rpc_sync("w1", "kept", TD_NO_ARGS, NULL));
        CHECK(td_tensor_data(kept) == td_tensor_data(x));
        CHECK(td_rpc_sync("w1", "drop", TD_NO_ARGS, NULL));
        CHECK_SOON(!boxes_leases());
        CHECK_EQ(at(kept, 0), 9);
        td_tensor *elsewhere = send_to("w0", kept, NULL);
        CHECK_EQ(at(elsewhere, 0), 9);
    }
    boxes_end();
}

RANKS(a_thousand_in_a_call, .ranks = 2)
{
    begin();
    if (td_test_rank() == 0) {
        TD_SCOPE;
        td_value *list[1000];
        for (int i = 0; i < 1000; i++)
            list[i] = td_value_from_tensor(td_full(TD_SHAPE(i % 2 ? 2000 : 7), i, TD_F32, NULL));
        td_value *back = td_rpc_sync("w1", "echo", TD_ARGS(td_value_list(list, 1000)), NULL);
        CHECK_EQ(td_value_count(back), 1000);
        for (int i = 0; i < 1000; i++) {
            CHECK_EQ(at(td_value_tensor(td_value_at(back, i)), 6), i);
            CHECK_EQ(is_borrowed(td_value_tensor(td_value_at(back, i))), i % 2);
        }
    }
    boxes_end();
}

/* What is borrowed is sent back to its lender, and released with the message. */
RANKS(copies_of_what_is_borrowed, .ranks = 2)
{
    begin();
    TD_SCOPE;
    const char *other = boxes_name(1 - td_test_rank());
    for (int i = 0; i < 20; i++) {
        TD_SCOPE;
        td_value *made = td_rpc_sync(other, "make", TD_ARGS(3), NULL);
        td_tensor *got = td_tensor_retain(td_value_tensor(made));
        td_future *future = td_rpc_async(other, "look", TD_ARGS(got), i % 2 ? &copied : NULL);
        td_tensor_release(got);
        CHECK(td_future_wait(future, 0));
    }
    boxes_end();
}
