/* Backward passes as objects: roots, gradients that other threads feed, sums in a fixed order, sinks,
 * failures, and every end that a pass can have. */
#include "host_data.h"
#include "runner.h"

#include "autograd/engine.h"
#include "base/fail.h"

#include <tandem/ops.h>

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define SHAPE(...) TD_SHAPE(__VA_ARGS__)

static td_tensor *leaf(double value, int64_t size)
{
    td_tensor *tensor = td_full(&size, 1, value, TD_F64, NULL);
    CHECK_OK(td_tensor_set_requires_grad(tensor, true));
    return tensor;
}

static td_tensor *constant(double value, int64_t size)
{
    return td_full(&size, 1, value, TD_F64, NULL);
}

static double first(const td_tensor *tensor)
{
    CHECK(tensor != NULL);
    return ((const double *)host_data(tensor))[0];
}

static struct td__pass *open_pass(void)
{
    struct td__pass *pass;
    CHECK_OK(td__pass_open(&(struct td__pass_options){0}, &pass));
    return pass;
}

static void expect(struct td__pass *pass, td_tensor *output, int count)
{
    CHECK_OK(td__pass_expect(pass, output->node, output->output_nr, count));
}

static td_status feed(struct td__pass *pass, td_tensor *output, int number, td_tensor *grad)
{
    return td__pass_feed(pass, output->node, output->output_nr, number, grad);
}

static void run_and_close(struct td__pass *pass)
{
    CHECK_OK(td__pass_run(pass, TD__NEVER));
    CHECK_OK(td__pass_close(pass));
}

/* ---- Operators of this test ------------------------------------------------------------------------ */

/* The identity, whose backward calls a function. */
struct callback {
    td_status (*fn)(void *arg);
    void *arg;
};

static td_status call_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
{
    const struct callback *callback = td_node_data(node);
    grad_x[0] = grad_y[0];
    return callback->fn(callback->arg);
}

static const td_function call_function = {.name = "call", .backward = call_backward};

static td_tensor *calling(td_tensor *x, td_status (*fn)(void *arg), void *arg)
{
    return td_record(&call_function, td_clone(td_detach(x)),
                     &(td_node_spec){.inputs = {x},
                                     .input_count = 1,
                                     .data = &(struct callback){fn, arg},
                                     .data_size = sizeof(struct callback)});
}

static td_status count_up(void *arg)
{
    ++*(int *)arg;
    return TD_OK;
}

static td_status refuse(void *arg)
{
    (void)arg;
    return td_fail(TD_ERR_INVALID, "this node always fails");
}

/* ---- Roots ----------------------------------------------------------------------------------------- */

TEST(the_graphs_of_all_roots_are_one_pass)
{
    TD_SCOPE;
    int calls = 0;
    td_tensor *w = leaf(3, 2), *shared = calling(td_mul(w, w), count_up, &calls);
    td_tensor *a = td_mul_scalar(shared, 2), *b = td_mul_scalar(shared, 5);
    struct td__pass *pass = open_pass();
    CHECK_OK(td__pass_seed(pass, a->node, a->output_nr, constant(1, 2)));
    expect(pass, b, 1);
    CHECK_OK(td__pass_start(pass));
    CHECK_OK(feed(pass, b, 0, constant(10, 2)));
    run_and_close(pass);
    CHECK_EQ(calls, 1);
    CHECK_EQ(first(td_tensor_grad(w)), (2 + 50) * 6);
}

TEST(a_root_inside_the_graph_of_another_waits_for_both)
{
    TD_SCOPE;
    td_tensor *w = leaf(3, 2), *inner = td_mul_scalar(w, 2), *outer = td_mul_scalar(inner, 5);
    struct td__pass *pass = open_pass();
    expect(pass, inner, 2);
    expect(pass, outer, 1);
    CHECK_OK(feed(pass, inner, 1, constant(100, 2))); /* before the start */
    CHECK_OK(td__pass_start(pass));
    CHECK_OK(feed(pass, outer, 0, constant(1, 2)));
    CHECK_OK(feed(pass, inner, 0, constant(10, 2)));
    run_and_close(pass);
    CHECK_EQ(first(td_tensor_grad(w)), (5 + 10 + 100) * 2);
}

TEST(a_root_may_get_no_gradient)
{
    TD_SCOPE;
    int calls = 0;
    td_tensor *w = leaf(3, 2), *x = leaf(3, 2), *y = leaf(1, 2);
    td_tensor *none = calling(td_mul_scalar(w, 2), count_up, &calls);
    td_tensor *null = calling(td_mul_scalar(w, 2), count_up, &calls);
    td_tensor *some = td_mul_scalar(td_mul(w, x), 5);
    struct td__pass *pass = open_pass();
    expect(pass, none, 0);
    expect(pass, null, 1);
    expect(pass, some, 2);
    expect(pass, y, 1); /* a leaf */
    CHECK_OK(td__pass_start(pass));
    CHECK_OK(feed(pass, null, 0, NULL));
    CHECK_OK(feed(pass, some, 0, NULL));
    CHECK_OK(feed(pass, some, 1, constant(1, 2)));
    CHECK_OK(feed(pass, y, 0, constant(7, 2)));
    run_and_close(pass);
    CHECK_EQ(calls, 0);
    CHECK_EQ(first(td_tensor_grad(w)), 15);
    CHECK_EQ(first(td_tensor_grad(x)), 15);
    CHECK_EQ(first(td_tensor_grad(y)), 7);
}

TEST(an_output_that_is_expected_twice_gets_both_counts)
{
    TD_SCOPE;
    td_tensor *w = leaf(3, 2), *y = td_mul_scalar(w, 2);
    struct td__pass *pass = open_pass();
    expect(pass, y, 1);
    expect(pass, y, 2);
    CHECK_OK(td__pass_start(pass));
    for (int i = 0; i < 3; i++)
        CHECK_OK(feed(pass, y, i, constant(1 << i, 2)));
    CHECK_FAILS(feed(pass, y, 3, constant(1, 2)), TD_ERR_INVALID, "expects 3 gradients");
    run_and_close(pass);
    CHECK_EQ(first(td_tensor_grad(w)), 14);
}

TEST(a_pass_keeps_its_graph_alive)
{
    td_tensor *w = leaf(3, 2);
    struct td__pass *pass = open_pass();
    td_node *node = NULL;
    {
        TD_SCOPE;
        td_tensor *y = td_mul_scalar(td_mul(w, w), 2);
        node = y->node;
        expect(pass, y, 1);
    }
    td_tensor *grad = constant(1, 2);
    CHECK_OK(td__pass_start(pass));
    CHECK_OK(td__pass_feed(pass, node, 0, 0, grad));
    td_tensor_release(grad);
    run_and_close(pass);
    CHECK_EQ(first(td_tensor_grad(w)), 12);
    td_tensor_release(w);
}

TEST(the_nodes_of_a_function_can_be_listed)
{
    TD_SCOPE;
    int calls = 0;
    td_tensor *w = leaf(3, 2);
    td_tensor *used = calling(w, count_up, &calls), *also = calling(used, count_up, &calls);
    td_tensor *unused = calling(w, count_up, &calls);
    td_tensor *y = td_mul(td_mul_scalar(also, 2), used);
    struct td__pass *pass = open_pass();
    expect(pass, y, 1);
    int cursor = 0, found = 0;
    for (td_node *node; (node = td__pass_next_node(pass, &call_function, &cursor)); found++)
        CHECK(node == used->node || node == also->node);
    CHECK_EQ(found, 2);
    CHECK(td__pass_contains(pass, used->node) && td__pass_contains(pass, w->node));
    CHECK(!td__pass_contains(pass, unused->node));
    CHECK_OK(td__pass_close(pass)); /* never started */
    CHECK_EQ(calls, 0);
    CHECK(td_tensor_grad(w) == NULL);
    CHECK_OK(td_backward(td_sum(y))); /* the graph is as it was */
}

/* ---- Feeding from other threads ----------------------------------------------------------------------- */

enum { BRANCHES = 6, EACH = 3, FEEDS = BRANCHES * EACH, FEEDERS = 3 };

/* Branches that meet twice: at the sum of a result, and at a weight. */
struct net {
    td_tensor *w, *x, *outputs[BRANCHES];
    td_tensor *grads[FEEDS];
    int order[FEEDS];
    struct td__pass *pass;
    atomic_int next;
};

static td_tensor *random_values(uint64_t *state, int64_t rows, int64_t columns)
{
    float data[16];
    CHECK(rows * columns <= 16);
    for (int64_t i = 0; i < rows * columns; i++) {
        *state = *state * UINT64_C(6364136223846793005) + 1442695040888963407;
        data[i] = (float)(int32_t)(*state >> 32) * 1e-9f;
    }
    return td_from_array(data, (int64_t[]){rows, columns}, 2, TD_F32, NULL);
}

static void make_net(struct net *net, const char *device)
{
    uint64_t state = 7;
    *net = (struct net){0};
    net->w = random_values(&state, 4, 4);
    net->x = random_values(&state, 4, 4);
    CHECK_OK(td_tensor_set_requires_grad(net->w, true));
    CHECK_OK(td_tensor_set_requires_grad(net->x, true));
    td_tensor *shared = td_mul(net->x, net->x);
    for (int i = 0; i < BRANCHES; i++) {
        td_tensor *in = i % 2 && device
                            ? td_tensor_to(td_tensor_to(shared, td_device_get(device)), NULL)
                            : shared;
        net->outputs[i] = td_mul_scalar(td_matmul(in, net->w), i + 0.3);
    }
    for (int i = 0; i < FEEDS; i++) {
        net->grads[i] = random_values(&state, 4, 4);
        net->order[i] = i;
    }
}

static void shuffle(int *order, int count, unsigned *seed)
{
    for (int i = count - 1; i > 0; i--) {
        int other = rand_r(seed) % (i + 1), former = order[i];
        order[i] = order[other];
        order[other] = former;
    }
}

static void *feed_net(void *arg)
{
    struct net *net = arg;
    int at;
    while ((at = atomic_fetch_add(&net->next, 1)) < FEEDS) {
        int number = net->order[at];
        CHECK_OK(feed(net->pass, net->outputs[number / EACH], number % EACH, net->grads[number]));
    }
    return NULL;
}

/* Runs a pass with the gradients in net->order, fed by threads while it runs or (0) one by one, each
 * after what was ready has run. */
static void run_net(struct net *net, int feeders)
{
    pthread_t threads[FEEDERS];
    CHECK_OK(td__pass_open(&(struct td__pass_options){.retain_graph = true}, &net->pass));
    for (int i = 0; i < BRANCHES; i++)
        expect(net->pass, net->outputs[i], EACH);
    CHECK_OK(td__pass_start(net->pass));
    net->next = 0;
    for (int i = 0; i < feeders; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, feed_net, net), 0);
    if (!feeders)
        feed_net(net);
    CHECK_OK(td__pass_run(net->pass, TD__NEVER));
    for (int i = 0; i < feeders; i++)
        pthread_join(threads[i], NULL);
    CHECK_OK(td__pass_close(net->pass));
}

static void check_bits(const char *device)
{
    TD_SCOPE;
    struct net net;
    float w[16], x[16];
    unsigned seed = 3;
    make_net(&net, device);
    for (int round = 0; round < 200; round++) {
        TD_SCOPE;
        CHECK_OK(td_tensor_set_grad(net.w, NULL));
        CHECK_OK(td_tensor_set_grad(net.x, NULL));
        shuffle(net.order, FEEDS, &seed);
        run_net(&net, round % (FEEDERS + 1));
        if (round == 0) {
            memcpy(w, host_data(td_tensor_grad(net.w)), sizeof w);
            memcpy(x, host_data(td_tensor_grad(net.x)), sizeof x);
        }
        CHECK(!memcmp(w, host_data(td_tensor_grad(net.w)), sizeof w));
        CHECK(!memcmp(x, host_data(td_tensor_grad(net.x)), sizeof x));
    }
}

TEST(the_bits_do_not_depend_on_the_order_of_arrival, .deadline_s = 60)
{
    check_bits(NULL);
}

TEST(nor_on_the_timing_of_devices, .deadline_s = 60)
{
    check_bits("cpu:1");
}

/* The order is that of a local pass. (Not compared: the gradient of w, which products of a local pass accumulate
 * in place, with their own rounding.) */
TEST(fed_branches_are_summed_like_local_ones)
{
    TD_SCOPE;
    struct net net;
    float x[16];
    make_net(&net, NULL);
    CHECK_OK(td_backward_from(net.outputs, net.grads, BRANCHES,
                              &(td_backward_options){.retain_graph = true}));
    memcpy(x, host_data(td_tensor_grad(net.x)), sizeof x);
    CHECK_OK(td_tensor_set_grad(net.x, NULL));
    struct td__pass *pass = open_pass();
    for (int i = 0; i < BRANCHES; i++)
        expect(pass, net.outputs[i], 1);
    CHECK_OK(td__pass_start(pass));
    for (int i = 0; i < BRANCHES; i++)
        CHECK_OK(feed(pass, net.outputs[i], 0, net.grads[i]));
    run_and_close(pass);
    CHECK(!memcmp(x, host_data(td_tensor_grad(net.x)), sizeof x));
}

struct feed_other {
    struct td__pass *pass;
    td_tensor *output, *grad;
};

static td_status feed_other(void *arg)
{
    struct feed_other *other = arg;
    return feed(other->pass, other->output, 0, other->grad);
}

TEST(a_node_may_feed_another)
{
    TD_SCOPE;
    struct feed_other other;
    td_tensor *w = leaf(3, 2), *x = leaf(3, 2);
    td_tensor *y = calling(w, feed_other, &other);
    other.output = td_mul_scalar(x, 4);
    other.grad = constant(2, 2);
    other.pass = open_pass();
    CHECK_OK(td__pass_seed(other.pass, y->node, 0, constant(1, 2)));
    expect(other.pass, other.output, 1);
    CHECK_OK(td__pass_start(other.pass));
    run_and_close(other.pass);
    CHECK_EQ(first(td_tensor_grad(x)), 8);
    CHECK_EQ(first(td_tensor_grad(w)), 1);
}

TEST(a_pass_of_100000_nodes_can_be_fed_at_both_ends)
{
    td_tensor *x = leaf(1, 1), *y = td_tensor_retain(x), *middle = NULL;
    for (int i = 0; i < 100000; i++) {
        td_tensor *next = td_add_scalar(y, 1);
        td_tensor_release(y);
        y = next;
        if (i == 50000)
            middle = td_tensor_retain(y);
    }
    td_tensor *one = constant(1, 1);
    struct td__pass *pass = open_pass();
    expect(pass, middle, 1);
    expect(pass, y, 1);
    CHECK_OK(td__pass_start(pass));
    CHECK_OK(feed(pass, y, 0, one));
    CHECK_OK(feed(pass, middle, 0, one));
    td_tensor_release(middle);
    td_tensor_release(y); /* the pass now frees the whole graph */
    run_and_close(pass);
    CHECK_EQ(first(td_tensor_grad(x)), 2);
    td_tensor_release(one);
    td_tensor_release(x);
}

/* ---- Options -------------------------------------------------------------------------------------- */

TEST(a_retained_graph_can_be_run_again)
{
    TD_SCOPE;
    td_tensor *w = leaf(3, 2), *y = td_mul(w, w);
    for (int i = 0; i < 3; i++) {
        struct td__pass *pass;
        CHECK_OK(td__pass_open(&(struct td__pass_options){.retain_graph = i == 0}, &pass));
        expect(pass, y, 1);
        CHECK_OK(td__pass_start(pass));
        CHECK_OK(feed(pass, y, 0, constant(1, 2)));
        if (i < 2)
            CHECK_OK(td__pass_run(pass, TD__NEVER));
        else
            CHECK_FAILS(td__pass_run(pass, TD__NEVER), TD_ERR_STATE, "retain_graph");
        CHECK_EQ(td__pass_close(pass), i < 2 ? TD_OK : TD_ERR_STATE);
    }
    CHECK_EQ(first(td_tensor_grad(w)), 12);
}

struct context {
    pthread_mutex_t lock;
    td_tensor *leaves[4], *grads[4];
    int calls;
};

static td_status accumulate(void *arg, td_tensor *leaf, td_tensor *grad)
{
    struct context *context = arg;
    pthread_mutex_lock(&context->lock);
    context->calls++;
    td_status status = TD_ERR_INVALID;
    for (int i = 0; i < 4; i++)
        if (context->leaves[i] == leaf)
            status = td__grad_add(&context->grads[i], grad);
    pthread_mutex_unlock(&context->lock);
    return status;
}

static td_status count_hook(td_tensor *tensor, void *arg)
{
    (void)tensor;
    return count_up(arg);
}

static td_tensor *hook_doubles(td_tensor *grad, void *arg, td_status *status)
{
    (void)arg;
    (void)status;
    return td_mul_scalar(grad, 2);
}

static struct td__pass *open_with_sink(struct context *context)
{
    struct td__pass *pass;
    pthread_mutex_init(&context->lock, NULL);
    CHECK_OK(td__pass_open(&(struct td__pass_options){.sink = {accumulate, context}}, &pass));
    return pass;
}

TEST(a_sink_gets_the_gradients_instead_of_the_leaves)
{
    TD_SCOPE;
    int hooks = 0;
    td_tensor *w = td_full(SHAPE(3, 3), 2, TD_F64, NULL), *b = leaf(1, 3), *x = leaf(4, 3);
    CHECK_OK(td_tensor_set_requires_grad(w, true));
    CHECK_OK(td_tensor_set_grad(x, constant(100, 3)));
    CHECK_OK(td_tensor_add_accumulated_hook(w, count_hook, &hooks, NULL));
    CHECK_OK(td_tensor_add_grad_hook(b, hook_doubles, NULL, NULL));
    struct context context = {.leaves = {w, b, x}};
    for (int i = 1; i <= 2; i++) {
        td_tensor *y = td_add(td_matmul(td_reshape(x, SHAPE(1, 3)), w), b);
        struct td__pass *pass = open_with_sink(&context);
        CHECK_OK(td__pass_seed(pass, y->node, 0, td_full(SHAPE(1, 3), 1, TD_F64, NULL)));
        CHECK_OK(td__pass_start(pass));
        run_and_close(pass);
        CHECK_EQ(context.calls, 3 * i);
        CHECK_EQ(first(context.grads[0]), 4 * i);
        CHECK_EQ(first(context.grads[1]), 2 * i);
        CHECK_EQ(first(context.grads[2]), 6 * i);
    }
    CHECK(td_tensor_grad(w) == NULL && td_tensor_grad(b) == NULL);
    CHECK_EQ(first(td_tensor_grad(x)), 100);
    CHECK_EQ(hooks, 0);
    for (int i = 0; i < 4; i++)
        td_tensor_release(context.grads[i]);
}

static td_tensor *segment(td_tensor *const *inputs, int count, void *arg)
{
    (void)count;
    return td_mul(td_mul(inputs[0], inputs[0]), arg);
}

TEST(the_parameters_of_a_checkpointed_segment_reach_the_sink)
{
    TD_SCOPE;
    td_tensor *w = leaf(3, 2), *x = leaf(5, 2);
    td_tensor *y = td_checkpoint(segment, w, (td_tensor *[]){td_mul_scalar(x, 2)}, 1);
    struct context context = {.leaves = {w, x}};
    struct td__pass *pass = open_with_sink(&context);
    expect(pass, y, 1);
    CHECK_OK(td__pass_start(pass));
    CHECK_OK(feed(pass, y, 0, constant(1, 2)));
    run_and_close(pass);
    CHECK_EQ(first(context.grads[0]), 100);
    CHECK_EQ(first(context.grads[1]), 2 * 10 * 3 * 2);
    CHECK(td_tensor_grad(w) == NULL && td_tensor_grad(x) == NULL);
    td_tensor_release(context.grads[0]);
    td_tensor_release(context.grads[1]);
}

TEST(a_failing_sink_ends_the_pass)
{
    TD_SCOPE;
    td_tensor *w = leaf(3, 2), *y = td_mul_scalar(w, 2);
    struct context context = {0}; /* knows no leaf */
    struct td__pass *pass = open_with_sink(&context);
    CHECK_OK(td__pass_seed(pass, y->node, 0, constant(1, 2)));
    CHECK_OK(td__pass_start(pass));
    CHECK_EQ(td__pass_run(pass, TD__NEVER), TD_ERR_INVALID);
    CHECK_EQ(td__pass_close(pass), TD_ERR_INVALID);
}

static td_status at_end(void *arg)
{
    return td__at_end_of_backward(count_up, NULL, arg);
}

static td_status run_inner(void *arg)
{
    TD_SCOPE;
    bool before = td_set_grad_enabled(true);
    td_tensor *y = calling(leaf(1, 2), at_end, arg);
    td_set_grad_enabled(before);
    struct td__pass *pass = open_pass();
    expect(pass, y, 1);
    CHECK_OK(td__pass_start(pass));
    CHECK_OK(feed(pass, y, 0, constant(1, 2)));
    run_and_close(pass);
    CHECK_EQ(*(int *)arg, 0); /* the outer pass still runs */
    return TD_OK;
}

TEST(an_inner_pass_leaves_its_end_to_the_outer_one)
{
    TD_SCOPE;
    int ended = 0;
    td_tensor *y = calling(leaf(3, 2), run_inner, &ended);
    struct td__pass *pass = open_pass();
    expect(pass, y, 1);
    CHECK_OK(td__pass_start(pass));
    CHECK_OK(feed(pass, y, 0, constant(1, 2)));
    CHECK_OK(td__pass_run(pass, TD__NEVER));
    CHECK_EQ(ended, 1);
    CHECK_OK(td__pass_run(pass, TD__NEVER)); /* nothing is left */
    CHECK_OK(td__pass_close(pass));
    CHECK_EQ(ended, 1);
}

/* ---- Devices -------------------------------------------------------------------------------------- */

static td_status check_worker(void *arg)
{
    CHECK(td__device_is_here(arg));
    return TD_OK;
}

TEST(each_node_of_a_device_runs_on_its_worker)
{
    TD_SCOPE;
    td_device *device = td_device_get("cpu:1");
    td_tensor *w = td_tensor_to(constant(3, 2), td_device_get("cpu:1"));
    CHECK_OK(td_tensor_set_requires_grad(w, true));
    td_tensor *y = w;
    for (int i = 0; i < 10; i++)
        y = calling(y, check_worker, device);
    CHECK_OK(td_backward(td_sum(td_tensor_to(y, td_device_get("cpu")))));
    struct td__pass *pass = open_pass();
    y = calling(calling(w, check_worker, device), check_worker, device);
    expect(pass, y, 1);
    CHECK_OK(td__pass_start(pass));
    CHECK_OK(feed(pass, y, 0, td_tensor_to(constant(1, 2), td_device_get("cpu:1"))));
    run_and_close(pass);
    CHECK_EQ(first(td_tensor_to(td_tensor_grad(w), td_device_get("cpu"))), 2);
}

/* ---- Failures ------------------------------------------------------------------------------------- */

TEST(what_was_not_expected_is_refused)
{
    TD_SCOPE;
    td_tensor *w = leaf(3, 2), *y = td_mul_scalar(w, 2), *other = td_mul_scalar(w, 2);
    td_tensor *one = constant(1, 2);
    struct td__pass *pass = open_pass();
    CHECK_FAILS(td__pass_expect(pass, y->node, 1, 1), TD_ERR_INVALID, "has 1 outputs");
    CHECK_FAILS(td__pass_expect(pass, y->node, 0, -1), TD_ERR_INVALID, "-1 gradients");
    CHECK_EQ(td__pass_expect(pass, NULL, 0, 1), TD_ERR_INVALID);
    CHECK_FAILS(td__pass_seed(pass, y->node, 0, constant(1, 3)), TD_ERR_INVALID, "[3]");
    CHECK_FAILS(td__pass_run(pass, TD__NEVER), TD_ERR_STATE, "not been started");
    CHECK_FAILS(feed(pass, y, 0, one), TD_ERR_INVALID, "expects 0 gradients");
    expect(pass, y, 2);
    CHECK_OK(td__pass_start(pass));
    CHECK_FAILS(td__pass_start(pass), TD_ERR_STATE, "started already");
    CHECK_FAILS(td__pass_expect(pass, other->node, 0, 1), TD_ERR_STATE, "before");
    CHECK_FAILS(feed(pass, other, 0, one), TD_ERR_INVALID, "expects 0 gradients");
    CHECK_FAILS(feed(pass, w, 0, one), TD_ERR_INVALID, "for output 0 of leaf");
    CHECK_FAILS(feed(pass, y, 2, one), TD_ERR_INVALID, "with the number 2");
    CHECK_FAILS(feed(pass, y, -1, one), TD_ERR_INVALID, "with the number -1");
    CHECK_FAILS(feed(pass, y, 0, constant(1, 3)), TD_ERR_INVALID, "f64 [3] on ");
    CHECK_FAILS(feed(pass, y, 0, td_full(SHAPE(2), 1, TD_F32, NULL)), TD_ERR_INVALID,
                "f32 [2] on ");
    CHECK_OK(feed(pass, y, 0, one));
    CHECK_FAILS(feed(pass, y, 0, one), TD_ERR_INVALID, "fed twice");
    CHECK_OK(feed(pass, y, 1, one));
    CHECK_OK(td__pass_run(pass, TD__NEVER));
    CHECK_FAILS(feed(pass, y, 1, one), TD_ERR_INVALID, "fed twice");
    CHECK_OK(td__pass_close(pass));
    CHECK_EQ(first(td_tensor_grad(w)), 4);
}

TEST(a_gradient_that_does_not_come_is_a_timeout)
{
    TD_SCOPE;
    int calls = 0;
    td_tensor *w = leaf(3, 2), *y = calling(w, count_up, &calls), *z = td_mul_scalar(w, 2);
    struct td__pass *pass = open_pass();
    expect(pass, y, 2);
    expect(pass, z, 1);
    CHECK_OK(td__pass_start(pass));
    CHECK_OK(feed(pass, y, 0, constant(1, 2)));
    CHECK_OK(feed(pass, z, 0, constant(1, 2)));
    CHECK_FAILS(td__pass_run(pass, td__deadline_in_ms(20)), TD_ERR_TIMEOUT,
                "1 expected gradients did not arrive in time; the first is for output 0 of call");
    CHECK_OK(feed(pass, y, 1, constant(1, 2))); /* ignored */
    CHECK_FAILS(td__pass_close(pass), TD_ERR_TIMEOUT, "did not arrive");
    CHECK_EQ(calls, 0);
}

static void *fail_pass(void *arg)
{
    td__pass_fail(arg, td_fail(TD_ERR_PEER, "rank 3 has died"));
    td__pass_fail(arg, td_fail(TD_ERR_INVALID, "a later failure"));
    return NULL;
}

TEST(another_thread_can_end_a_pass_that_sleeps)
{
    TD_SCOPE;
    td_tensor *y = td_mul_scalar(leaf(3, 2), 2);
    struct td__pass *pass = open_pass();
    pthread_t thread;
    expect(pass, y, 1);
    CHECK_OK(td__pass_start(pass));
    CHECK_EQ(pthread_create(&thread, NULL, fail_pass, pass), 0);
    CHECK_FAILS(td__pass_run(pass, TD__NEVER), TD_ERR_PEER, "rank 3 has died");
    pthread_join(thread, NULL);
    CHECK_OK(feed(pass, y, 0, constant(1, 2)));
    CHECK_OK(feed(pass, y, 0, constant(1, 2))); /* after a failure nothing is checked */
    CHECK_FAILS(td__pass_close(pass), TD_ERR_PEER, "rank 3 has died");
}

static td_status fail_meanwhile(void *arg)
{
    pthread_t thread;
    CHECK_EQ(pthread_create(&thread, NULL, fail_pass, *(struct td__pass **)arg), 0);
    pthread_join(thread, NULL);
    return TD_OK;
}

static void end_while_a_node_runs(const char *device)
{
    TD_SCOPE;
    int calls = 0;
    struct td__pass *pass = open_pass();
    td_tensor *w = td_tensor_to(constant(3, 2), td_device_get(device));
    CHECK_OK(td_tensor_set_requires_grad(w, true));
    td_tensor *below = calling(w, count_up, &calls), *y = calling(below, fail_meanwhile, &pass);
    expect(pass, y, 1);
    CHECK_OK(td__pass_start(pass));
    CHECK_OK(feed(pass, y, 0, td_tensor_to(constant(1, 2), td_device_get(device))));
    CHECK_FAILS(td__pass_run(pass, TD__NEVER), TD_ERR_PEER, "rank 3 has died");
    CHECK_EQ(td__pass_close(pass), TD_ERR_PEER);
    CHECK_EQ(calls, 0);
    CHECK(td_tensor_grad(w) == NULL);
}

TEST(a_failure_while_a_node_runs_lets_it_end)
{
    end_while_a_node_runs("cpu");
    end_while_a_node_runs("cpu:1");
}

TEST(a_failing_node_ends_the_pass_before_all_gradients_are_there)
{
    TD_SCOPE;
    td_tensor *w = leaf(3, 2), *bad = calling(w, refuse, NULL), *late = td_mul_scalar(w, 2);
    struct td__pass *pass = open_pass();
    expect(pass, bad, 1);
    expect(pass, late, 1);
    CHECK_OK(td__pass_start(pass));
    CHECK_OK(feed(pass, bad, 0, constant(1, 2)));
    CHECK_FAILS(td__pass_run(pass, TD__NEVER), TD_ERR_INVALID, "always fails");
    CHECK_FAILS(td__pass_close(pass), TD_ERR_INVALID, "always fails");
}

TEST(a_pass_can_be_closed_in_any_state)
{
    TD_SCOPE;
    int calls = 0;
    td_tensor *w = leaf(3, 2), *y = calling(w, count_up, &calls), *one = constant(1, 2);
    CHECK_OK(td__pass_close(NULL));
    CHECK_OK(td__pass_close(open_pass()));

    struct td__pass *pass = open_pass(); /* without roots */
    CHECK_OK(td__pass_start(pass));
    run_and_close(pass);

    pass = open_pass(); /* fed, not started */
    expect(pass, y, 2);
    CHECK_OK(feed(pass, y, 0, one));
    CHECK_OK(td__pass_close(pass));

    pass = open_pass(); /* failed, not started */
    expect(pass, y, 1);
    fail_pass(pass);
    CHECK_FAILS(td__pass_expect(pass, y->node, 0, 1), TD_ERR_PEER, "rank 3");
    CHECK_FAILS(td__pass_start(pass), TD_ERR_PEER, "rank 3");
    CHECK_FAILS(td__pass_run(pass, TD__NEVER), TD_ERR_PEER, "rank 3");
    CHECK_EQ(td__pass_close(pass), TD_ERR_PEER);

    pass = open_pass(); /* started and waiting */
    expect(pass, y, 2);
    CHECK_OK(td__pass_start(pass));
    CHECK_OK(feed(pass, y, 0, one));
    CHECK_FAILS(td__pass_close(pass), TD_ERR_STATE, "1 expected gradients had not arrived");

    pass = open_pass(); /* ready, not run */
    CHECK_OK(td__pass_seed(pass, y->node, 0, one));
    CHECK_OK(td__pass_start(pass));
    CHECK_FAILS(td__pass_close(pass), TD_ERR_STATE, "closed before it had run");
    CHECK_EQ(calls, 0);
}
