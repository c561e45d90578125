/* Contexts of distributed autograd leave nothing behind, however they end, and their workers. */
#include "process_counts.h"
#include "runner.h"

#include "base/clock.h"
#include "peer/endpoint_internal.h"
#include "rpc/grad_context.h"
#include "rpc/lease.h"

#include <tandem/tandem.h>

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

enum { ELEMENTS = 4096, CONTEXTS = 1000, MORE_BYTES = 2 << 20 };

/* ---- Functions ------------------------------------------------------------------------------- */

static td_value *square(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call, (void)count;
    td_tensor *x = td_value_tensor(args[0]);
    return td_value_of(td_mul(x, x));
}

/* The same, after it was passed on to the next worker; after a while. */
static td_value *square_there(td_rpc_call *call, td_value *const *args, int count)
{
    int64_t us = 0;
    (void)call, (void)count;
    td_value_int(args[2], &us);
    td__sleep_ns(us * 1000);
    return td_rpc_sync(td_value_text(args[0]), "square", TD_ARGS(args[1]), NULL);
}

static td_status fail_backward(td_node *node, td_tensor *const *grad_outputs,
                               td_tensor **grad_inputs)
{
    (void)node, (void)grad_outputs, (void)grad_inputs;
    return td_fail(TD_ERR_INVALID, "this backward fails on purpose");
}

static td_value *fails_later(td_rpc_call *call, td_value *const *args, int count)
{
    static const td_function failing = {.name = "failing", .backward = fail_backward};
    (void)call, (void)count;
    td_tensor *x = td_value_tensor(args[0]);
    return td_value_of(td_record(&failing, td_clone(td_detach(x)),
                                 &(td_node_spec){.inputs = {x}, .input_count = 1}));
}

static atomic_bool in_backward, go_on;

static td_status wait_backward(td_node *node, td_tensor *const *grad_outputs,
                               td_tensor **grad_inputs)
{
    (void)node;
    atomic_store(&in_backward, true);
    CHECK_SOON(atomic_load(&go_on));
    grad_inputs[0] = grad_outputs[0];
    return TD_OK;
}

static td_value *waits_later(td_rpc_call *call, td_value *const *args, int count)
{
    static const td_function waiting = {.name = "waiting", .backward = wait_backward};
    (void)call, (void)count;
    td_tensor *x = td_value_tensor(args[0]);
    return td_value_of(td_record(&waiting, td_clone(td_detach(x)),
                                 &(td_node_spec){.inputs = {x}, .input_count = 1}));
}

static int count_contexts(void)
{
    struct td__rpc_agent *agent = td__agent_hold();
    pthread_mutex_lock(&agent->context_lock);
    int count = (int)agent->contexts.size;
    pthread_mutex_unlock(&agent->context_lock);
    td__agent_leave(agent);
    return count;
}

/* The contexts, the tensors that are lent, and the references on this worker. */
static int count_left(void)
{
    struct td__rpc_agent *agent = td__agent_hold();
    int left = td__rpc_lease_count(agent) + count_contexts();
    pthread_mutex_lock(&agent->rref_lock);
    left += (int)agent->rref_entries.size + (int)agent->rref_children.size;
    pthread_mutex_unlock(&agent->rref_lock);
    td__agent_leave(agent);
    return left;
}

/* ---- Contexts -------------------------------------------------------------------------------- */

static void check_gradient(uint64_t context, td_tensor *x)
{
    td_tensor *grad = td_dist_autograd_grad(context, x);
    CHECK(grad);
    CHECK_EQ(((float *)td_tensor_data(grad))[ELEMENTS - 1], 6);
}

/* A whole pass, over two workers or three. */
static void finish_context(uint64_t context, td_tensor *x, bool there)
{
    td_value *y = there ? td_rpc_sync("w1", "square_there", TD_ARGS("w2", x, 0), NULL)
                        : td_rpc_sync("w1", "square", TD_ARGS(x), NULL);
    CHECK(y);
    td_tensor *loss = td_sum(td_value_tensor(y));
    CHECK_OK(td_dist_backward(context, &loss, 1, NULL));
    check_gradient(context, x);
}

static void fail_context(uint64_t context, td_tensor *x)
{
    td_value *y = td_rpc_sync("w2", "fails_later", TD_ARGS(x), NULL);
    CHECK(y);
    y = td_rpc_sync("w1", "square", TD_ARGS(td_value_tensor(y)), NULL);
    CHECK(y);
    td_tensor *loss = td_sum(td_value_tensor(y));
    CHECK_FAILS(td_dist_backward(context, &loss, 1, NULL), TD_ERR_INVALID, "on purpose");
}

/* Ends with the block of the caller, at some moment of the call. */
static td_future *leave_context(td_tensor *x, int number)
{
    td_future *pending = td_rpc_async("w1", "square_there", TD_ARGS("w2", x, number % 7 * 100),
                                      NULL);
    CHECK(pending);
    td__sleep_ns(number % 5 * 100000);
    return td_future_retain(pending);
}

static void use_context(int number)
{
    TD_SCOPE;
    td_future *pending = NULL;
    td_tensor *x = td_full(TD_SHAPE(ELEMENTS), 3, TD_F32, NULL);
    CHECK_OK(td_tensor_set_requires_grad(x, true));
    {
        TD_DIST_AUTOGRAD(context);
        CHECK(context);
        if (number % 4 == 1)
            fail_context(context, x);
        else if (number % 4 == 2)
            pending = leave_context(x, number);
        else
            finish_context(context, x, number % 4 == 3);
    }
    if (pending) /* the call goes on without it */
        CHECK(td_future_wait(pending, 0));
    td_future_release(pending);
}

static void begin(void)
{
    char name[16];
    CHECK_OK(td_rpc_register("square(x: tensor)", square, NULL));
    CHECK_OK(td_rpc_register("square_there(to: text, x: tensor, us: int)", square_there, NULL));
    CHECK_OK(td_rpc_register("fails_later(x: tensor)", fails_later, NULL));
    CHECK_OK(td_rpc_register("waits_later(x: tensor)", waits_later, NULL));
    snprintf(name, sizeof name, "w%d", td_test_rank());
    CHECK_OK(td_init_rpc(name, &(td_rpc_options){.timeout_ms = 120000}));
}

RANKS(a_thousand_contexts, .ranks = 3, .deadline_s = 60)
{
    begin();
    size_t before = 0;
    for (int round = 0; round < 2; round++) { /* the first one fills the caches */
        for (int i = 0; td_test_rank() == 0 && i < CONTEXTS; i++)
            use_context(i);
        td_test_barrier();
        CHECK_SOON(!count_left());
        td_test_barrier();
        if (round == 0)
            before = counts_now().resident;
        else if (td_test_slowness() == 1)
            CHECK(counts_now().resident < before + MORE_BYTES);
    }
    CHECK_OK(td_rpc_shutdown(NULL));
}

/* ---- Ends of workers --------------------------------------------------------------------------- */

static td_tensor *make_leaf(void)
{
    td_tensor *x = td_full(TD_SHAPE(ELEMENTS), 3, TD_F32, NULL);
    CHECK_OK(td_tensor_set_requires_grad(x, true));
    return x;
}

/* "w1" has passed the context on to "w2", and dies: nobody else would end it there. */
RANKS(a_worker_between_dies, .ranks = 3, .may_die = 1 << 1)
{
    TD_SCOPE;
    begin();
    TD_DIST_AUTOGRAD(context);
    if (td_test_rank() == 0)
        CHECK(td_rpc_sync("w1", "square_there", TD_ARGS("w2", make_leaf(), 0), NULL));
    td_test_barrier();
    if (td_test_rank() == 1)
        raise(SIGKILL);
    if (td_test_rank() == 2)
        CHECK_SOON(count_contexts() == 1); /* its own */
    CHECK_OK(td_rpc_shutdown(NULL));
}

struct backward {
    uint64_t context;
    td_tensor *loss;
    const char *named;
};

static void *run_backward(void *arg)
{
    struct backward *backward = arg;
    CHECK_FAILS(td_dist_backward(backward->context, &backward->loss, 1, NULL), TD_ERR_PEER,
                backward->named);
    return NULL;
}

/* "w2" leaves at once while its part of a backward pass waits for the gradients of "w1". */
RANKS(a_worker_leaves_in_a_backward_pass, .ranks = 3)
{
    TD_SCOPE;
    begin();
    TD_DIST_AUTOGRAD(context);
    struct backward backward = {.context = context, .named = "\"w2\""};
    pthread_t thread;
    if (td_test_rank() == 0) {
        td_value *y = td_rpc_sync("w2", "square", TD_ARGS(make_leaf()), NULL);
        td_value *z = y ? td_rpc_sync("w1", "waits_later", TD_ARGS(y), NULL) : NULL;
        CHECK(z);
        backward.loss = td_sum(td_value_tensor(z));
        CHECK_EQ(pthread_create(&thread, NULL, run_backward, &backward), 0);
    } else if (td_test_rank() == 1) {
        CHECK_SOON(atomic_load(&in_backward));
    }
    td_test_barrier();
    if (td_test_rank() == 2) {
        int64_t since = td__now_ns();
        CHECK_OK(td_rpc_shutdown(&(td_rpc_shutdown_options){.now = true}));
        CHECK_PROMPT(since);
    } else if (td_test_rank() == 0) {
        pthread_join(thread, NULL);
    }
    td_test_barrier();
    atomic_store(&go_on, true);
    if (td_test_rank() != 2)
        CHECK_OK(td_rpc_shutdown(NULL));
}

static _Atomic(struct td__incoming *) held_back;

static bool hold_backward(struct td__rpc_agent *agent, struct td__incoming *incoming)
{
    (void)agent;
    struct td__reader body = td__incoming_body(incoming);
    struct td__span function = td__reader_string(&body, 4096);
    bool holds = function.size == strlen("td.backward") &&
                 !memcmp(function.data, "td.backward", function.size);
    if (holds)
        atomic_store(&held_back, incoming);
    return holds;
}

/* "w2" learns that "w1" leaves, from which its calls came, and ends the context before its pass begins. */
static void end_before_the_pass(void)
{
    CHECK_SOON(atomic_load(&held_back));
    struct td__rpc_agent *agent = td__agent_hold();
    td__presence_settle(agent->endpoint, 1, TD__LEFT, 0);
    CHECK_SOON(count_contexts() == 1); /* its own */
    td__serve_now(agent, atomic_load(&held_back));
    td__agent_leave(agent);
}

/* The worker that runs the pass hears from "w2" that the context has ended before it knows that "w1" has left: the error
 * names "w1" all the same. */
RANKS(a_worker_between_leaves, .ranks = 3)
{
    TD_SCOPE;
    begin();
    TD_DIST_AUTOGRAD(context);
    struct backward backward = {.context = context, .named = "\"w1\""};
    pthread_t thread;
    if (td_test_rank() == 2)
        atomic_store(&td__serve_delay, hold_backward);
    td_test_barrier();
    if (td_test_rank() == 0) {
        td_value *y = td_rpc_sync("w1", "square_there", TD_ARGS("w2", make_leaf(), 0), NULL);
        CHECK(y);
        backward.loss = td_sum(td_value_tensor(y));
        CHECK_EQ(pthread_create(&thread, NULL, run_backward, &backward), 0);
    } else if (td_test_rank() == 2) {
        end_before_the_pass();
    }
    td_test_barrier();
    if (td_test_rank() == 0)
        pthread_join(thread, NULL);
    CHECK_OK(td_rpc_shutdown(&(td_rpc_shutdown_options){.now = td_test_rank() == 1}));
}
