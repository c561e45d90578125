/* A backend outside the library: the toy backend passes the suite of the tensor calls, leaves no keys, and its
 * errors have texts. */
#include "dist_suite.h"
#include "runner.h"
#include "toy_backend.h"

#include <tandem/dist.h>

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

static td_status init_toy(const char *backend, const char *options)
{
    CHECK_OK(toy_backend_register());
    return td_init_process_group(
        &(td_init_options){.backend = backend, .backend_options = options, .timeout_ms = 30000});
}

RANKS(toy_passes_the_suite, .ranks = 3, .deadline_s = 100)
{
    CHECK_OK(init_toy("toy", NULL));
    CHECK_STR(td_get_backend(NULL), "toy");
    dist_suite_run();
    CHECK_OK(td_destroy_process_group());
}

RANKS(a_slot_that_is_not_there, .ranks = 2)
{
    CHECK_OK(init_toy("toy-partial", NULL));
    const struct variant v = {PLAIN, false, 2, 3};
    td_tensor *a = make_tensor(&v, 2, 3, 0), *b = make_tensor(&v, 2, 3, 0);
    CHECK_FAILS(td_all_to_all_single(a, b, NULL, NULL, NULL, NULL), TD_ERR_UNSUPPORTED,
                "backend \"toy-partial\" of group \"world\" has no all_to_all; backend \"");
    td_work *work = NULL;
    CHECK_FAILS(td_all_to_all_single(a, b, NULL, NULL, NULL, &work), TD_ERR_UNSUPPORTED, "has it");
    CHECK(!work);
    CHECK_OK(td_all_reduce(a, TD_SUM, NULL, NULL));
    check_tensor(a, 0, 2);
    td_tensor_release(a);
    td_tensor_release(b);
    CHECK_OK(td_destroy_process_group());
}

RANKS(a_backend_that_refuses, .ranks = 2)
{
    CHECK_FAILS(init_toy("toy", "refuse=1"), TD_ERR_UNSUPPORTED, "toy: asked to refuse group");
    CHECK(!td_is_initialized());
    CHECK_OK(td_init_process_group(&(td_init_options){.backend = "toy", .group_name = "second"}));
    CHECK_OK(td_barrier(NULL, NULL));
    CHECK_OK(td_destroy_process_group());
}

TEST(names)
{
    CHECK_OK(toy_backend_register());
    CHECK_FAILS(toy_backend_register(), TD_ERR_STATE, "toy");
    toy_backend_unregister();
    CHECK(td_init_process_group(&(td_init_options){.backend = "toy"}));
    CHECK_CONTAINS(td_last_error(), "toy");
    CHECK_OK(toy_backend_register());
    CHECK_OK(td_init_process_group(&(td_init_options){.backend = "toy"}));
    CHECK_OK(td_destroy_process_group());
}

/* A backend with the optional slots, which does nothing but count how often each is used. */
struct slots {
    atomic_int messages, asked_who_left, asked_for_host;
    td_op_kind message;
    int64_t verify_ms;
};

static td_status slots_create(const td_backend_context *context, void *arg, void **self)
{
    (void)context;
    *self = arg;
    return TD_OK;
}

static void slots_destroy(void *self)
{
    (void)self;
}

static td_status slots_barrier(void *self, const td_call *call)
{
    (void)self;
    (void)call;
    return TD_OK;
}

static td_status slots_post(void *self, const td_call *call, td_work *work)
{
    (void)self;
    (void)call;
    (void)work;
    return td_fail(TD_ERR_UNSUPPORTED, "slots: post");
}

static td_status slots_run_message(void *self, const td_call *call)
{
    struct slots *slots = self;
    slots->messages++;
    slots->message = call->kind;
    return call->timeout_ms > 0 ? TD_OK : TD_ERR_INVALID;
}

static td_status slots_verify(void *self, int64_t timeout_ms)
{
    ((struct slots *)self)->verify_ms = timeout_ms;
    return td_fail(TD_ERR_MISMATCH, "slots: the ranks differ");
}

static int slots_has_left(void *self, int rank)
{
    ((struct slots *)self)->asked_who_left++;
    return rank < 2 ? 0 : -1;
}

static bool slots_fills_host(void *self)
{
    ((struct slots *)self)->asked_for_host++;
    return true;
}

RANKS(optional_slots, .ranks = 2)
{
    static td_backend_ops ops = {
        .create = slots_create,
        .destroy = slots_destroy,
        .barrier = slots_barrier,
        .post = slots_post,
        .run_message = slots_run_message,
        .verify = slots_verify,
        .has_left = slots_has_left,
        .fills_host = slots_fills_host,
    };
    struct slots slots = {0};
    ops.reserved[1] = &slots;
    CHECK_FAILS(td_register_backend("slots", &ops, &slots), TD_ERR_INVALID, "reserved[1]");
    ops.reserved[1] = NULL;
    CHECK_OK(td_register_backend("slots", &ops, &slots));
    CHECK_OK(td_init_process_group(&(td_init_options){.backend = "slots"}));
    CHECK(slots.asked_who_left > 0);

    int32_t data = 0;
    int other = 1 - td_get_rank(NULL);
    CHECK_OK(td_group_send(&data, 1, TD_I32, other, 0, NULL, NULL));
    CHECK(slots.messages == 1 && slots.message == TD_OP_SEND);
    td_work *work = NULL;
    CHECK_FAILS(td_group_send(&data, 1, TD_I32, other, 0, NULL, &work), TD_ERR_UNSUPPORTED,
                "slots: post");

    CHECK_OK(td_group_barrier(NULL, &work));
    CHECK_OK(td_work_wait(work, 0));
    td_work_release(work);
    CHECK(slots.asked_for_host == 1);

    CHECK_FAILS(td_destroy_process_group(), TD_ERR_MISMATCH, "slots: the ranks differ");
    CHECK(slots.verify_ms > 0);
}

static td_status fail_to_create(const td_backend_context *context, void *arg, void **self)
{
    (void)context, (void)arg, (void)self;
    return TD_ERR_SYSTEM;
}

static td_status fail_to_meet(void *self, const td_call *call)
{
    (void)self, (void)call;
    return TD_ERR_SYSTEM;
}

TEST(failures_without_a_sentence)
{
    static const td_backend_ops silent = {.create = slots_create,
                                          .destroy = slots_destroy,
                                          .barrier = fail_to_meet},
                                none = {.create = fail_to_create, .destroy = slots_destroy};
    struct slots slots = {0};
    CHECK_OK(td_register_backend("silent", &silent, &slots));
    CHECK_OK(td_register_backend("none", &none, &slots));
    td_fail(TD_ERR_PEER, "an old failure"); /* which is not the reason */
    CHECK_FAILS(td_init_process_group(&(td_init_options){.backend = "none"}), TD_ERR_SYSTEM,
                "create() of backend \"none\" failed with TD_ERR_SYSTEM, and gave no reason");
    CHECK_OK(td_init_process_group(&(td_init_options){.backend = "silent"}));
    td_fail(TD_ERR_PEER, "an old failure");
    CHECK_FAILS(
        td_group_barrier(NULL, NULL), TD_ERR_SYSTEM,
        "barrier #1 on group \"world\": backend \"silent\" failed with TD_ERR_SYSTEM, and gave "
        "no reason");
    CHECK_OK(td_destroy_process_group());
    CHECK_OK(td_register_backend("silent", NULL, NULL));
    CHECK_OK(td_register_backend("none", NULL, NULL));
}

RANKS(ranks_that_disagree, .ranks = 2)
{
    CHECK_OK(init_toy("toy", NULL));
    int32_t data[4] = {0};
    size_t count = td_get_rank(NULL) ? 4 : 3;
    CHECK_FAILS(td_group_all_reduce(data, data, count, TD_I32, TD_SUM, NULL, NULL), TD_ERR_MISMATCH,
                "rank 0 called");
    CHECK_FAILS(td_barrier(NULL, NULL), TD_ERR_MISMATCH, "3 i32");
    CHECK_OK(td_destroy_process_group());
}

RANKS(missing_and_oversized_messages, .ranks = 2)
{
    CHECK_OK(init_toy("toy", NULL));
    int32_t data[4] = {1, 2, 3, 4};
    if (td_get_rank(NULL) == 0) {
        CHECK_OK(td_group_send(data, 4, TD_I32, 1, 3, NULL, NULL));
    } else {
        CHECK_FAILS(td_group_recv(data, 3, TD_I32, 0, 3, NULL, NULL), TD_ERR_MISMATCH,
                    "rank 0 sent 16 bytes, the buffer has 12");
        CHECK_OK(td_set_call_timeout(200));
        CHECK_FAILS(td_group_recv(data, 3, TD_I32, 0, 3, NULL, NULL), TD_ERR_TIMEOUT,
                    "no message with tag 3 came in 200 ms");
    }
    CHECK_OK(td_destroy_process_group());
}

/* A receive that no thread waits for, and that no rank answers, is complete when its world has ended. */
RANKS(works_outlive_a_world_of_the_toy, .ranks = 2)
{
    int data = 0;
    td_work *work;
    CHECK_OK(toy_backend_register());
    CHECK_OK(td_init_process_group(&(td_init_options){.backend = "toy"}));
    CHECK_OK(td_group_recv(&data, 1, TD_I32, 1 - td_test_rank(), 3, NULL, &work));
    CHECK_FAILS(td_work_wait(work, TD_NOW), TD_ERR_TIMEOUT, "is not complete yet");
    CHECK_OK(td_group_barrier(NULL, NULL));
    CHECK_OK(td_destroy_process_group());
    CHECK(td_work_test(work));
    CHECK_FAILS(td_work_wait(work, 0), TD_ERR_STATE, "was destroyed");
    td_work_release(work);
}

/* ---- Threads that share a store -------------------------------------------------------------- */

#define THREADS 3

struct member {
    td_store *store;
    int rank;
};

static void *be_a_member(void *arg)
{
    const struct member *member = arg;
    td_group *group;
    td_group_options options = {.backend = "toy", .timeout_ms = 10000};
    CHECK_OK(td_group_open(member->store, member->rank, THREADS, &options, &group));
    double value = member->rank + 1;
    CHECK_OK(td_group_all_reduce(&value, &value, 1, TD_F64, TD_AVG, group, NULL));
    CHECK(value == 2);
    td_reduce_op op;
    CHECK_OK(td_reduce_op_create_premul_sum(member->rank, &op));
    CHECK_OK(td_group_all_reduce(&value, &value, 1, TD_F64, op, group, NULL));
    CHECK(value == 6);
    td_reduce_op_destroy(op);

    /* Letters that are not read. */
    int next = (member->rank + 1) % THREADS;
    for (int i = 0; i < 3; i++)
        CHECK_OK(td_group_send(&value, 1, TD_F64, next, i, group, NULL));
    CHECK_OK(td_group_recv(&value, 1, TD_F64, TD_ANY_SOURCE, 1, group, NULL));
    CHECK_OK(td_group_barrier(group, NULL));
    td_group_destroy(group);
    return NULL;
}

TEST(no_key_is_left_behind)
{
    td_store *store;
    int64_t keys;
    CHECK_OK(toy_backend_register());
    CHECK_OK(td_hash_store_open(&store));
    pthread_t threads[THREADS];
    struct member members[THREADS];
    for (int r = 0; r < THREADS; r++) {
        members[r] = (struct member){store, r};
        CHECK_EQ(pthread_create(&threads[r], NULL, be_a_member, &members[r]), 0);
    }
    for (int r = 0; r < THREADS; r++)
        pthread_join(threads[r], NULL);
    CHECK_OK(td_store_num_keys(store, &keys));
    CHECK_EQ(keys, 0);
    CHECK_OK(td_store_close(store));
}
