/* The graph and the backward pass, with operators defined here where that shows more: order, accumulation, hooks,
 * what is refused, long graphs, threads, devices. */
#include "host_data.h"
#include "runner.h"

#include "autograd/graph.h"

#include <tandem/ops.h>

#include <pthread.h>
#include <string.h>

#define SHAPE(...) TD_SHAPE(__VA_ARGS__)

static td_tensor *leaf(double value, int64_t size)
{
    td_tensor *tensor = td_full(&size, 1, value, TD_F64, NULL);
    CHECK_OK(td_tensor_set_requires_grad(tensor, true));
    return tensor;
}

static double first(const td_tensor *tensor)
{
    CHECK(tensor != NULL);
    return ((const double *)host_data(tensor))[0];
}

/* ---- A user-defined operator --------------------------------------------------------------------- */

static td_status cube_backward(td_node *node, td_tensor *const *grad_outputs,
                               td_tensor **grad_inputs)
{
    td_tensor *x = td_node_saved(node, 0);
    const double *factor = td_node_data(node);
    grad_inputs[0] = td_mul(grad_outputs[0], td_mul_scalar(td_mul(x, x), 3 * *factor));
    return grad_inputs[0] ? TD_OK : td_last_status();
}

static const td_function cube_function = {.name = "cube", .backward = cube_backward};

static td_tensor *cube(td_tensor *x, double factor)
{
    td_tensor *y = NULL;
    {
        TD_NO_GRAD;
        y = td_mul_scalar(td_mul(td_mul(x, x), x), factor);
    }
    return td_record(&cube_function, y,
                     &(td_node_spec){.inputs = {x},
                                     .input_count = 1,
                                     .saved = {x},
                                     .saved_count = 1,
                                     .data = &factor,
                                     .data_size = sizeof factor});
}

TEST(a_user_defined_operator_has_a_gradient)
{
    {
        TD_SCOPE;
        td_tensor *x = leaf(2, 3);
        td_tensor *y = cube(x, 2);
        CHECK(td_tensor_requires_grad(y));
        CHECK(!td_tensor_is_leaf(y));
        CHECK(td_tensor_is_leaf(x));
        CHECK_OK(td_backward(td_sum(y)));
        CHECK_EQ(first(td_tensor_grad(x)), 24);
    }
}

TEST(nothing_is_recorded_without_need)
{
    {
        TD_SCOPE;
        td_tensor *plain = td_full(SHAPE(2), 1, TD_F64, NULL);
        CHECK(!td_tensor_requires_grad(cube(plain, 1)));
        td_tensor *x = leaf(2, 3);
        {
            TD_NO_GRAD;
            CHECK(!td_grad_enabled());
            CHECK(!td_tensor_requires_grad(cube(x, 1)));
        }
        CHECK(td_grad_enabled());
        CHECK(!td_tensor_requires_grad(cube(td_detach(x), 1)));
        CHECK_FAILS(td_backward(td_sum(cube(plain, 1))), TD_ERR_INVALID, "does not require grad");
    }
}

/* ---- Gradients of leaves --------------------------------------------------------------------------- */

TEST(gradients_add_up)
{
    {
        TD_SCOPE;
        td_tensor *x = leaf(3, 2);
        CHECK(td_tensor_grad(x) == NULL);
        for (int pass = 1; pass <= 3; pass++) {
            CHECK_OK(td_backward(td_sum(td_add(td_mul(x, x), x))));
            CHECK_EQ(first(td_tensor_grad(x)), 7 * pass);
        }
        CHECK_OK(td_tensor_zero_grad(x));
        CHECK_EQ(first(td_tensor_grad(x)), 0);
        CHECK_OK(td_tensor_zero_grad(x));
        CHECK_OK(td_backward(td_sum(td_add(td_mul(x, x), x))));
        CHECK_EQ(first(td_tensor_grad(x)), 7);
        CHECK_OK(td_tensor_set_grad(x, NULL));
        CHECK(td_tensor_grad(x) == NULL);
    }
}

TEST(a_gradient_that_is_held_stays_the_gradient)
{
    {
        TD_SCOPE;
        td_tensor *x = leaf(3, 2);
        CHECK_OK(td_backward(td_sum(td_mul(x, x))));
        td_tensor *held = td_tensor_retain(td_tensor_grad(x));
        CHECK_OK(td_tensor_zero_grad(x));
        CHECK_OK(td_backward(td_sum(td_mul(x, x))));
        CHECK(td_tensor_grad(x) == held);
        CHECK_EQ(first(held), 6);
        td_tensor_release(held);
        CHECK_OK(
            td_tensor_zero_grad(x)); /* not retained: a sum over two passes begins at 0 again */
        CHECK_OK(td_backward(td_sum(td_mul(x, x))));
        CHECK_OK(td_backward(td_sum(td_mul(x, x))));
        CHECK_EQ(first(td_tensor_grad(x)), 12);
    }
}

TEST(a_given_gradient_is_added_to_in_place)
{
    {
        TD_SCOPE;
        td_tensor *x = leaf(3, 2), *bucket = td_full(SHAPE(10), 1, TD_F64, NULL);
        CHECK_OK(td_tensor_set_grad(x, td_narrow(bucket, 0, 4, 2)));
        CHECK_OK(td_backward(td_sum(td_mul(x, x))));
        const double *data = host_data(bucket);
        CHECK_EQ(data[3], 1);
        CHECK_EQ(data[4], 7);
        CHECK_EQ(data[5], 7);
        CHECK_EQ(data[6], 1);
        CHECK_OK(td_tensor_zero_grad(x));
        CHECK_OK(td_backward(td_sum(td_mul(x, x))));
        data = host_data(bucket);
        CHECK_EQ(data[4], 6);
        CHECK_FAILS(td_tensor_set_grad(x, bucket), TD_ERR_INVALID, "[10]");
        CHECK_FAILS(td_tensor_set_grad(bucket, bucket), TD_ERR_INVALID, "its own gradient");
        CHECK_FAILS(td_tensor_set_grad(td_mul(x, x), x), TD_ERR_INVALID, "a result, not a leaf");
        td_tensor *whole = td_zeros(SHAPE(2), TD_I64, NULL);
        CHECK_FAILS(td_tensor_set_grad(whole, whole), TD_ERR_INVALID, "not of floating point");
    }
}

/* A gradient does not depend on whether another one is asked for, as in PyTorch. */
TEST(a_gradient_outlives_requires_grad)
{
    {
        TD_SCOPE;
        td_tensor *x = leaf(3, 2), *loss = td_sum(td_mul(x, x));
        CHECK_OK(td_backward_from(&loss, NULL, 1, &(td_backward_options){.retain_graph = true}));
        CHECK_OK(td_tensor_set_requires_grad(x, false));
        CHECK(!td_tensor_requires_grad(x));
        CHECK_EQ(first(td_tensor_grad(x)), 6);
        CHECK_OK(td_backward_from(&loss, NULL, 1, &(td_backward_options){.retain_graph = true}));
        CHECK_EQ(first(td_tensor_grad(x)), 6); /* nothing is added to it meanwhile */
        CHECK_OK(td_tensor_set_requires_grad(x, true));
        CHECK_OK(td_backward(loss));
        CHECK_EQ(first(td_tensor_grad(x)), 12);
        CHECK_OK(td_tensor_set_requires_grad(x, false));
        CHECK_OK(td_tensor_zero_grad(x));
        CHECK_EQ(first(td_tensor_grad(x)), 0);
        CHECK_OK(td_tensor_set_grad(x, NULL));
        CHECK(!td_tensor_grad(x));

        td_tensor *never = td_zeros(SHAPE(2), TD_F64, NULL);
        CHECK_OK(td_tensor_set_grad(never, td_ones(SHAPE(2), TD_F64, NULL)));
        CHECK(!td_tensor_requires_grad(never) && td_tensor_is_leaf(never));
        CHECK_EQ(first(td_tensor_grad(never)), 1);
    }
}

TEST(only_floats_can_require_grad)
{
    {
        TD_SCOPE;
        td_tensor *whole = td_zeros(SHAPE(2), TD_I64, NULL), *x = leaf(1, 2);
        CHECK_FAILS(td_tensor_set_requires_grad(whole, true), TD_ERR_INVALID, "i64");
        CHECK_FAILS(td_tensor_set_requires_grad(td_mul(x, x), false), TD_ERR_INVALID, "td_detach");
        CHECK_OK(td_tensor_set_requires_grad(x, false));
        CHECK(!td_tensor_requires_grad(td_mul(x, x)));
        CHECK_EQ(td_tensor_set_requires_grad(NULL, true), TD_ERR_INVALID);
        CHECK(!td_tensor_requires_grad(NULL));
    }
}

TEST(gradients_of_results_can_be_kept)
{
    {
        TD_SCOPE;
        td_tensor *x = leaf(3, 2), *y = td_mul(x, x), *z = td_mul(y, y);
        CHECK_OK(td_tensor_retain_grad(y));
        CHECK_OK(td_backward(td_sum(z)));
        CHECK_EQ(first(td_tensor_grad(y)), 18);
        CHECK(td_tensor_grad(z) == NULL);
        CHECK_FAILS(td_tensor_retain_grad(td_zeros(SHAPE(1), TD_F64, NULL)), TD_ERR_INVALID,
                    "does not require grad");
    }
}

TEST(gradients_for_chosen_inputs_leave_the_leaves_alone)
{
    {
        TD_SCOPE;
        td_tensor *x = leaf(3, 2), *w = leaf(5, 2), *other = leaf(1, 2), *results[4];
        td_tensor *y = td_mul(x, w), *loss = td_sum(td_mul(y, y));
        td_tensor *inputs[] = {w, y, other, w};
        CHECK_OK(td_gradients(&loss, NULL, 1, inputs, 4, results, NULL));
        CHECK_EQ(first(results[0]), 2 * 15 * 3);
        CHECK_EQ(first(results[1]), 30);
        CHECK(results[2] == NULL);
        CHECK_EQ(first(results[3]), 90);
        CHECK(!td_tensor_grad(x) && !td_tensor_grad(w));
        td_tensor *plain = td_zeros(SHAPE(1), TD_F64, NULL);
        CHECK_FAILS(td_gradients(&loss, NULL, 1, &plain, 1, results, NULL), TD_ERR_INVALID,
                    "input 0");
    }
}

TEST(several_outputs_with_their_gradients)
{
    {
        TD_SCOPE;
        td_tensor *x = leaf(3, 2);
        td_tensor *outputs[] = {td_mul(x, x), td_sum(x)};
        td_tensor *gradients[] = {td_full(SHAPE(2), 10, TD_F64, NULL), NULL};
        CHECK_OK(td_backward_from(outputs, gradients, 2, NULL));
        CHECK_EQ(first(td_tensor_grad(x)), 61);
        td_tensor *wide = td_mul(x, x), *wrong = td_zeros(SHAPE(3), TD_F64, NULL);
        CHECK_FAILS(td_backward(wide), TD_ERR_INVALID, "[2]");
        CHECK_FAILS(td_backward_from(&wide, &wrong, 1, NULL), TD_ERR_INVALID, "[3]");
        td_tensor *none = NULL;
        CHECK_EQ(td_backward(none), TD_ERR_INVALID);
    }
}

/* ---- Twice, and in place ---------------------------------------------------------------------------- */

TEST(a_second_pass_needs_the_graph)
{
    {
        TD_SCOPE;
        td_tensor *x = leaf(3, 2), *loss = td_sum(td_mul(x, x));
        CHECK_OK(td_backward_from(&loss, NULL, 1, &(td_backward_options){.retain_graph = true}));
        CHECK_OK(td_backward(loss));
        CHECK_EQ(first(td_tensor_grad(x)), 12);
        CHECK_FAILS(td_backward(loss), TD_ERR_STATE, "retain_graph");
        CHECK_CONTAINS(td_last_error(), "td_mul");
    }
}

TEST(what_backward_needs_must_not_change)
{
    {
        TD_SCOPE;
        td_tensor *x = leaf(3, 2), *y = td_mul_scalar(x, 2), *loss = td_sum(td_mul(y, y));
        {
            TD_NO_GRAD;
            CHECK_OK(td_add_scalar_(y, 1));
        }
        CHECK_FAILS(td_backward(loss), TD_ERR_STATE, "changed in place");
        CHECK_CONTAINS(td_last_error(), "td_mul");
        CHECK_FAILS(td_add_scalar_(x, 1), TD_ERR_STATE, "TD_NO_GRAD");
        {
            TD_NO_GRAD;
            CHECK_OK(td_add_scalar_(x, 1));
        }
    }
}

/* The gradient of a part has the shape of the whole, which has no memory before. */
TEST(out_of_memory_is_reported_as_such)
{
    {
        TD_SCOPE;
        td_tensor *x = leaf(3, 1), *whole = td_expand(x, SHAPE(1LL << 45));
        td_tensor *loss = td_sum(td_narrow(whole, 0, 5, 2));
        CHECK_EQ(first(loss), 6);
        CHECK_FAILS(td_backward(loss), TD_ERR_NOMEM, td_test_on_host() ? "bytes" : "has no memory");
        CHECK_EQ(td_last_status(), TD_ERR_NOMEM);
    }
}

TEST(a_change_in_place_is_followed)
{
    {
        TD_SCOPE;
        td_tensor *x = leaf(3, 2), *y = td_mul_scalar(x, 2);
        CHECK_OK(td_mul_scalar_(y, 5));
        CHECK_OK(td_backward(td_sum(y)));
        CHECK_EQ(first(td_tensor_grad(x)), 10);

        /* Through a view: the tensor behind it knows. */
        td_tensor *z = td_mul_scalar(x, 2), *part = td_narrow(z, 0, 0, 1);
        CHECK_OK(td_mul_scalar_(part, 5));
        CHECK_OK(td_tensor_zero_grad(x));
        CHECK_OK(td_backward(td_sum(z)));
        CHECK_EQ(first(td_tensor_grad(x)), 10);
        CHECK_EQ(first(td_narrow(td_tensor_grad(x), 0, 1, 1)), 2);
    }
}

/* ---- Hooks ---------------------------------------------------------------------------------------------- */

static td_tensor *times_ten(td_tensor *grad, void *arg, td_status *status)
{
    (void)status;
    ++*(int *)arg;
    return td_mul_scalar(grad, 10);
}

static td_tensor *refuse(td_tensor *grad, void *arg, td_status *status)
{
    (void)grad, (void)arg;
    *status = TD_ERR_STATE;
    return NULL;
}

struct seen {
    td_tensor *tensors[8];
    int count;
};

static td_status note(td_tensor *tensor, void *arg)
{
    struct seen *seen = arg;
    seen->tensors[seen->count++] = tensor;
    return TD_OK;
}

TEST(hooks_see_the_whole_gradient_once)
{
    {
        TD_SCOPE;
        int calls = 0;
        uint64_t id, kept;
        td_tensor *x = leaf(3, 2), *y = td_mul_scalar(x, 2);
        CHECK_OK(td_tensor_add_grad_hook(y, times_ten, &calls, NULL));
        CHECK_OK(td_tensor_add_grad_hook(x, times_ten, &calls, &id));
        CHECK_OK(td_backward(td_sum(td_add(td_mul(y, y), y))));
        CHECK_EQ(calls, 2);
        CHECK_EQ(first(td_tensor_grad(x)), (2 * 6 + 1) * 10 * 2 * 10);
        CHECK_OK(td_tensor_remove_hook(x, id));
        CHECK_FAILS(td_tensor_remove_hook(x, id), TD_ERR_INVALID, "no hook");

        struct seen seen = {.count = 0};
        CHECK_OK(td_tensor_add_accumulated_hook(x, note, &seen, &kept));
        CHECK_OK(td_backward(td_sum(td_mul(td_mul(x, x), x))));
        CHECK_EQ(seen.count, 1);
        CHECK(seen.tensors[0] == x);
        CHECK_FAILS(td_tensor_add_accumulated_hook(y, note, &seen, NULL), TD_ERR_INVALID, "leaf");
        CHECK_OK(td_tensor_add_grad_hook(x, refuse, NULL, NULL));
        CHECK_EQ(td_backward(td_sum(td_mul(x, x))), TD_ERR_STATE);
    }
}

/* Later parameters are final first, each as soon as it can be. */
TEST(leaves_are_final_in_the_reverse_order_of_use)
{
    {
        TD_SCOPE;
        struct seen seen = {.count = 0};
        td_tensor *w[4], *x = td_full(SHAPE(2), 1, TD_F64, NULL);
        for (int i = 0; i < 4; i++) {
            w[i] = leaf(i + 1, 2);
            CHECK_OK(td_tensor_add_accumulated_hook(w[i], note, &seen, NULL));
            x = td_mul(x, w[i]);
        }
        CHECK_OK(td_backward(td_sum(x)));
        CHECK_EQ(seen.count, 4);
        for (int i = 0; i < 4; i++)
            CHECK(seen.tensors[i] == w[3 - i]);
    }
}

static td_status count_up(void *arg)
{
    ++*(int *)arg;
    return TD_OK;
}

static td_status ask_for_the_end(td_tensor *tensor, void *arg)
{
    (void)tensor;
    CHECK_EQ(*(int *)arg, 0);
    return td__at_end_of_backward(count_up, NULL, arg);
}

TEST(the_end_of_a_pass_can_be_waited_for)
{
    {
        TD_SCOPE;
        int ended = 0;
        td_tensor *x = leaf(3, 2), *w = leaf(3, 2);
        CHECK_OK(td_tensor_add_accumulated_hook(x, ask_for_the_end, &ended, NULL));
        CHECK_OK(td_tensor_add_accumulated_hook(w, ask_for_the_end, &ended, NULL));
        CHECK_OK(td_backward(td_sum(td_mul(x, w))));
        CHECK_EQ(ended, 2);
        CHECK_FAILS(td__at_end_of_backward(count_up, NULL, &ended), TD_ERR_STATE,
                    "no backward pass");
    }
}

/* ---- Long graphs, threads, devices ------------------------------------------------------------------------- */

TEST(a_graph_of_100000_nodes_needs_no_deep_stack)
{
    td_tensor *x = leaf(1, 1), *y = td_tensor_retain(x);
    for (int i = 0; i < 100000; i++) {
        td_tensor *next = td_add_scalar(y, 1);
        td_tensor_release(y);
        y = next;
    }
    td_tensor *again = td_add_scalar(y, 1);
    CHECK_OK(td_backward(y));
    CHECK_EQ(first(td_tensor_grad(x)), 1);
    td_tensor_release(y);
    td_tensor_release(again); /* this one frees the whole graph */
    td_tensor_release(x);
}

static void *pass_repeatedly(void *arg)
{
    td_tensor *x = arg;
    for (int i = 0; i < 200; i++) {
        TD_SCOPE;
        CHECK_OK(td_backward(td_sum(td_mul_scalar(td_mul(x, x), 0.5))));
    }
    return NULL;
}

TEST(threads_share_leaves)
{
    td_tensor *x = leaf(1, 1000);
    pthread_t threads[4];
    for (int i = 0; i < 4; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, pass_repeatedly, x), 0);
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    const double *grad = host_data(td_tensor_grad(x));
    for (int i = 0; i < 1000; i++)
        CHECK_EQ(grad[i], 800);
    td_tensor_release(x);
}

struct where {
    pthread_t thread;
};

static td_tensor *note_thread(td_tensor *grad, void *arg, td_status *status)
{
    (void)grad, (void)status;
    ((struct where *)arg)->thread = pthread_self();
    return NULL;
}

TEST(each_device_computes_its_own_gradients)
{
    {
        TD_SCOPE;
        struct where on_0, on_1, on_host;
        td_tensor *x = leaf(3, 2);
        td_tensor *a = td_mul(td_tensor_to(x, td_device_get("cpu:0")),
                              td_tensor_to(x, td_device_get("cpu:0")));
        td_tensor *b = td_mul_scalar(td_tensor_to(x, td_device_get("cpu:1")), 4);
        CHECK_STR(td_device_name(td_tensor_device(a)), "cpu:0");
        CHECK(td_add(a, b) == NULL);
        CHECK_CONTAINS(td_last_error(), "cpu:0");
        CHECK_CONTAINS(td_last_error(), "cpu:1");
        td_tensor *sum = td_add(td_tensor_to(a, td_device_get("cpu")),
                                td_tensor_to(b, td_device_get("cpu")));
        CHECK_OK(td_tensor_add_grad_hook(a, note_thread, &on_0, NULL));
        CHECK_OK(td_tensor_add_grad_hook(b, note_thread, &on_1, NULL));
        CHECK_OK(td_tensor_add_grad_hook(sum, note_thread, &on_host, NULL));
        CHECK_OK(td_backward(td_sum(sum)));
        CHECK_EQ(first(td_tensor_grad(x)), 10);
        CHECK(pthread_equal(on_host.thread, pthread_self()));
        CHECK(!pthread_equal(on_0.thread, on_host.thread));
        CHECK(!pthread_equal(on_1.thread, on_host.thread));
        CHECK(!pthread_equal(on_1.thread, on_0.thread));
    }
}

static td_status count_call(td_tensor *tensor, void *arg)
{
    (void)tensor;
    ++*(int *)arg;
    return TD_OK;
}

/* The worker begins with a pass while it is still being started. */
TEST(on_a_worker_each_node_runs_once_a_pass)
{
    enum { LEAVES = 40, PASSES = 300 };
    {
        TD_SCOPE;
        td_tensor *leaves[LEAVES],
            *x = td_tensor_to(td_full(SHAPE(1, 1), 1, TD_F64, NULL), td_device_get("cpu:1"));
        int calls = 0;
        for (int i = 0; i < LEAVES; i++) {
            leaves[i] = td_tensor_to(td_full(SHAPE(1, 1), i, TD_F64, NULL), td_device_get("cpu:1"));
            CHECK_OK(td_tensor_set_requires_grad(leaves[i], true));
            CHECK_OK(td_tensor_add_accumulated_hook(leaves[i], count_call, &calls, NULL));
        }
        for (int pass = 1; pass <= PASSES; pass++) {
            TD_SCOPE;
            td_tensor *sums[LEAVES];
            for (int i = 0; i < LEAVES; i++)
                sums[i] = td_f_linear(x, leaves[i], NULL);
            CHECK_OK(td_backward_from(sums, NULL, LEAVES, NULL));
            CHECK_EQ(calls, pass * LEAVES);
        }
        for (int i = 0; i < LEAVES; i++)
            CHECK_EQ(first(td_tensor_grad(leaves[i])), PASSES);
    }
}

static void add_one(void *arg)
{
    ++*(int *)arg;
}

TEST(devices_run_what_they_are_given_in_order)
{
    int count = 0;
    for (int i = 0; i < 1000; i++)
        CHECK_OK(td_device_submit(td_device_get("cpu:3"), add_one, &count));
    CHECK_OK(td_device_synchronize(td_device_get("cpu:3")));
    CHECK_EQ(count, 1000);
    CHECK_OK(td_device_submit(td_device_get("cpu"), add_one, &count));
    CHECK_EQ(count, 1001);
    CHECK(td_device_exists("cpu:7") && td_device_exists("cpu"));
    CHECK(!td_device_exists("none:0") && !td_device_exists("cpu:") && !td_device_exists("cpu:x"));
    CHECK_FAILS(td_device_submit(td_device_get("none:0"), add_one, &count), TD_ERR_INVALID,
                "none:0");
    CHECK_EQ(td_device_count("none"), 0);
    CHECK(td_device_count("cpu") > 1);
}

/* ---- Checkpointing ------------------------------------------------------------------------------------------ */

struct segment {
    td_tensor *w;
    int runs;
};

static td_tensor *run_segment(td_tensor *const *inputs, int count, void *arg)
{
    struct segment *segment = arg;
    segment->runs++;
    CHECK_EQ(count, 1);
    return td_f_dropout(td_mul(td_mul(inputs[0], segment->w), inputs[0]), 0.5, true);
}

TEST(a_checkpoint_runs_twice_and_gives_the_same_gradients)
{
    double expected_w = 0, expected_x = 0;
    for (int turn = 0; turn < 2; turn++) {
        TD_SCOPE;
        td_manual_seed(7);
        struct segment segment = {.w = leaf(5, 64)};
        td_tensor *x = leaf(3, 64), *y = td_mul_scalar(x, 1);
        td_tensor *z = turn ? td_checkpoint(run_segment, &segment, &y, 1)
                            : run_segment(&y, 1, &segment);
        double next = td_item(td_rand(NULL, 0, TD_F64, NULL));
        CHECK_OK(td_backward(td_sum(z)));
        CHECK_EQ(segment.runs, turn + 1);
        double w = td_item(td_sum(td_tensor_grad(segment.w)));
        double gx = td_item(td_sum(td_tensor_grad(x)));
        CHECK(turn == 0 || (w == expected_w && gx == expected_x));
        CHECK(w > 0 && gx > 0 && next >= 0);
        expected_w = w;
        expected_x = gx;
    }
}

TEST(a_checkpoint_reaches_parameters_behind_inputs_without_grad)
{
    {
        TD_SCOPE;
        struct segment segment = {.w = leaf(5, 8)};
        td_tensor *x = td_full(SHAPE(8), 3, TD_F64, NULL);
        td_tensor *z = td_checkpoint(run_segment, &segment, &x, 1);
        CHECK_OK(td_backward(td_sum(z)));
        CHECK(td_tensor_grad(segment.w) != NULL);
        td_tensor *changed = td_full(SHAPE(8), 3, TD_F64, NULL);
        z = td_checkpoint(run_segment, &segment, &changed, 1);
        CHECK_OK(td_fill_(changed, 1));
        CHECK_FAILS(td_backward(td_sum(z)), TD_ERR_STATE, "td_checkpoint");
        CHECK(td_checkpoint(NULL, NULL, NULL, 0) == NULL);
    }
}

/* ---- Scopes ------------------------------------------------------------------------------------------------ */

static td_tensor *inner_result(td_tensor *x)
{
    td_tensor *result = NULL;
    {
        TD_SCOPE;
        result = td_scope_return(td_add(td_mul(x, x), x));
    }
    return result;
}

TEST(scopes_can_be_nested)
{
    td_tensor *x = td_full(SHAPE(2), 3, TD_F64, NULL);
    {
        TD_SCOPE;
        td_tensor *outer = td_mul(x, x);
        {
            TD_SCOPE;
            {
                TD_NO_GRAD;
                TD_NO_GRAD;
                CHECK(!td_grad_enabled());
            }
            td_tensor *inner = td_scope_return(td_mul(outer, x));
            CHECK_EQ(atomic_load(&inner->owners), 2);
            outer = inner;
        }
        CHECK_EQ(atomic_load(&outer->owners), 1);
        CHECK_EQ(first(outer), 27);
    }
    td_tensor_release(x);
}

TEST(scopes_release_what_was_made_in_them)
{
    td_tensor *kept = NULL, *x = td_full(SHAPE(2), 3, TD_F64, NULL);
    td_tensor *outside = inner_result(x); /* without a scope around it: the caller's */
    CHECK_EQ(first(outside), 12);
    CHECK_EQ(atomic_load(&outside->owners), 1);
    td_tensor_release(outside);
    {
        TD_SCOPE;
        td_tensor *returned = inner_result(x);
        CHECK_EQ(atomic_load(&returned->owners), 1);
        kept = td_tensor_retain(td_mul(returned, x));
        CHECK_EQ(atomic_load(&kept->owners), 2);
    }
    CHECK_EQ(atomic_load(&kept->owners), 1);
    CHECK_EQ(first(kept), 36);
    td_tensor_release(kept);
    td_tensor_release(x);
}

static td_tensor *leave_by_return(td_tensor *x)
{
    TD_SCOPE;
    td_tensor *y = td_mul(x, x);
    if (first(y) > 0)
        return td_scope_return(td_add(y, x));
    return NULL;
}

TEST(a_scope_ends_with_its_block_and_break_reaches_the_loop_around_it)
{
    td_tensor *x = td_full(SHAPE(2), 3, TD_F64, NULL), *seen[5];
    int turns = 0, skipped = 0;
    for (int i = 0; i < 5; i++) {
        TD_SCOPE;
        seen[i] = td_tensor_retain(td_mul(x, x));
        turns++;
        if (i == 1) {
            skipped++;
            continue;
        }
        if (i == 3)
            break;
    }
    CHECK_EQ(turns, 4); /* break has left the loop, not only the scope */
    CHECK_EQ(skipped, 1);
    for (int i = 0; i < turns; i++) {
        CHECK_EQ(atomic_load(&seen[i]->owners), 1);
        td_tensor_release(seen[i]);
    }
    td_tensor *returned = leave_by_return(x);
    CHECK_EQ(atomic_load(&returned->owners), 1);
    CHECK_EQ(first(returned), 12);
    td_tensor_release(returned);

    CHECK(td_grad_enabled());
    for (int i = 0; i < 5; i++) {
        TD_NO_GRAD;
        CHECK(!td_grad_enabled());
        if (i == 2)
            break;
        turns++;
    }
    CHECK_EQ(turns, 6);
    CHECK(td_grad_enabled());
    td_tensor_release(x);
}
