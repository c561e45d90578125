/* Distributed autograd and optimizers: gradients over several workers, contexts, failures, training. */
#include "rpc/grad_context.h"
#include "runner.h"

#include <tandem/tandem.h>

#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static td_tensor *weight; /* of each worker */

static float first(td_tensor *tensor)
{
    CHECK(tensor);
    return ((float *)td_tensor_data(tensor))[0];
}

/* ---- Functions ------------------------------------------------------------------------------- */

static td_value *mul(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call;
    (void)count;
    return td_value_from_tensor(td_mul(td_value_tensor(args[0]), weight));
}

/* Multiplies, and sends the product on to the next workers. */
static td_value *chain(td_rpc_call *call, td_value *const *args, int count)
{
    int64_t left;
    (void)count;
    CHECK_OK(td_value_int(args[1], &left));
    td_tensor *product = td_mul(td_value_tensor(args[0]), weight);
    if (left == 0)
        return td_value_from_tensor(product);
    (void)call;
    int next = (td_test_rank() + 1) % td_test_size();
    return td_rpc_sync(td_worker_name(next), "chain", TD_ARGS(product, left - 1), NULL);
}

static td_value *grad(td_rpc_call *call, td_value *const *args, int count)
{
    int64_t context;
    (void)call;
    (void)count;
    CHECK_OK(td_value_int(args[0], &context));
    td_tensor *found = td_dist_autograd_grad((uint64_t)context, weight);
    return found ? td_value_from_tensor(found) : td_value_nil();
}

static td_value *contexts(td_rpc_call *call, td_value *const *args, int count)
{
    (void)args;
    (void)count;
    pthread_mutex_lock(&call->agent->context_lock);
    int64_t size = (int64_t)call->agent->contexts.size;
    pthread_mutex_unlock(&call->agent->context_lock);
    return td_value_from_int(size);
}

static td_status fail_backward(td_node *node, td_tensor *const *grad_outputs,
                               td_tensor **grad_inputs)
{
    (void)node;
    (void)grad_outputs;
    (void)grad_inputs;
    return td_fail(TD_ERR_INVALID, "this backward fails on purpose");
}

static const td_function failing = {.name = "failing", .backward = fail_backward};

static td_value *fails_later(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call;
    (void)count;
    td_tensor *x = td_value_tensor(args[0]);
    td_tensor *y = td_clone(td_detach(x));
    return td_value_from_tensor(
        td_record(&failing, y, &(td_node_spec){.inputs = {x}, .input_count = 1}));
}

static td_status kill_backward(td_node *node, td_tensor *const *grad_outputs,
                               td_tensor **grad_inputs)
{
    (void)node;
    (void)grad_outputs;
    (void)grad_inputs;
    raise(SIGKILL);
    return TD_OK;
}

static const td_function killing = {.name = "killing", .backward = kill_backward};

static td_value *dies_later(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call;
    (void)count;
    td_tensor *x = td_value_tensor(args[0]);
    td_tensor *y = td_clone(td_detach(x));
    return td_value_from_tensor(
        td_record(&killing, y, &(td_node_spec){.inputs = {x}, .input_count = 1}));
}

/* The worker dies in its pass, after its own calls in the context. */
static td_value *dies_in_the_middle(td_rpc_call *call, td_value *const *args, int count)
{
    td_value *y = dies_later(call, args, count);
    return y ? td_rpc_sync("w2", "mul", TD_ARGS(td_value_tensor(y)), NULL) : NULL;
}

static void begin(void)
{
    char name[16];
    weight = td_full(TD_SHAPE(3), td_test_rank() + 2, TD_F32, NULL);
    CHECK_OK(td_tensor_set_requires_grad(weight, true));
    CHECK_OK(td_rpc_register("mul(x: tensor)", mul, NULL));
    CHECK_OK(td_rpc_register("chain(x: tensor, left: int)", chain, NULL));
    CHECK_OK(td_rpc_register("grad(context: int)", grad, NULL));
    CHECK_OK(td_rpc_register("contexts()", contexts, NULL));
    CHECK_OK(td_rpc_register("fails_later(x: tensor)", fails_later, NULL));
    CHECK_OK(td_rpc_register("dies_later(x: tensor)", dies_later, NULL));
    CHECK_OK(td_rpc_register("dies_in_the_middle(x: tensor)", dies_in_the_middle, NULL));
    snprintf(name, sizeof name, "w%d", td_test_rank());
    CHECK_OK(td_init_rpc(name, NULL));
}

static void end(void)
{
    CHECK_OK(td_rpc_shutdown(NULL));
    td_tensor_release(weight);
}

/* The gradient of the weight of a worker; NAN if it has none. */
static double remote_grad(int rank, uint64_t context)
{
    TD_SCOPE;
    td_value *value = td_rpc_sync(td_worker_name(rank), "grad", TD_ARGS((int64_t)context), NULL);
    CHECK(value);
    return td_value_kind_of(value) == TD_VALUE_NIL ? NAN : first(td_value_tensor(value));
}

static int64_t remote_contexts(int rank)
{
    TD_SCOPE;
    int64_t count;
    CHECK_OK(td_value_int(td_rpc_sync(td_worker_name(rank), "contexts", TD_NO_ARGS, NULL), &count));
    return count;
}

/* Contexts end on other workers a moment later. */
static void check_no_contexts(void)
{
    for (int r = 0; r < td_test_size(); r++)
        CHECK_SOON(!remote_contexts(r));
}

/* ---- Gradients ------------------------------------------------------------------------------- */

static void over_a_chain(int hops)
{
    TD_SCOPE;
    td_tensor *x = td_full(TD_SHAPE(3), 1, TD_F32, NULL);
    CHECK_OK(td_tensor_set_requires_grad(x, true));
    TD_DIST_AUTOGRAD(context);
    CHECK(context);
    CHECK_EQ(td_dist_autograd_current(), context);
    td_value *y = td_rpc_sync("w1", "chain", TD_ARGS(td_mul(x, weight), hops - 1), NULL);
    CHECK(y);
    td_value *unused = td_rpc_sync("w1", "mul", TD_ARGS(x), NULL);
    CHECK(unused);
    td_tensor *loss = td_sum(td_value_tensor(y));
    CHECK_OK(td_dist_backward(context, &loss, 1, NULL));

    double product = 2, uses[8] = {1};
    for (int i = 1; i <= hops; i++) {
        product *= i % td_test_size() + 2;
        uses[i % td_test_size()]++;
    }
    CHECK_EQ(first(td_dist_autograd_grad(context, x)), (long long)product);
    CHECK_EQ(first(td_dist_autograd_grad(context, weight)), (long long)(uses[0] * product / 2));
    for (int r = 1; r < td_test_size() && r <= hops; r++)
        CHECK_EQ(remote_grad(r, context), (long long)(uses[r] * product / (r + 2)));
    CHECK(!td_tensor_grad(weight));
    CHECK(!td_tensor_grad(x));
}

RANKS(gradients_over_two_workers, .ranks = 2)
{
    begin();
    if (td_test_rank() == 0)
        for (int hops = 1; hops < 6; hops++)
            over_a_chain(hops);
    if (td_test_rank() == 0)
        check_no_contexts();
    end();
}

RANKS(gradients_over_four_workers, .ranks = 4)
{
    begin();
    if (td_test_rank() == 0) {
        for (int hops = 1; hops < 10; hops++)
            over_a_chain(hops);
        check_no_contexts();
    }
    end();
}

RANKS(gradients_over_tcp, .ranks = 3)
{
    setenv("TANDEM_TRANSPORT", "tcp", 1);
    begin();
    if (td_test_rank() == 0)
        over_a_chain(5);
    end();
}

RANKS(a_graph_that_is_kept_runs_twice, .ranks = 2)
{
    begin();
    if (td_test_rank() == 0) {
        TD_SCOPE;
        TD_DIST_AUTOGRAD(context);
        td_value *y = td_rpc_sync("w1", "mul", TD_ARGS(weight), NULL);
        td_tensor *loss = td_sum(td_value_tensor(y));
        CHECK_OK(td_dist_backward(context, &loss, 1, &(td_backward_options){.retain_graph = true}));
        CHECK_EQ(first(td_dist_autograd_grad(context, weight)), 3);
        CHECK_OK(td_dist_backward(context, &loss, 1, NULL));
        CHECK_EQ(first(td_dist_autograd_grad(context, weight)), 6);
        CHECK_EQ(remote_grad(1, context), 4);
        CHECK_EQ(td_dist_backward(context, &loss, 1, NULL), TD_ERR_STATE);
    }
    end();
}

RANKS(calls_without_a_context_record_nothing, .ranks = 2)
{
    begin();
    if (td_test_rank() == 0) {
        TD_SCOPE;
        td_value *y = td_rpc_sync("w1", "mul", TD_ARGS(weight), NULL);
        CHECK(y);
        CHECK(!td_tensor_requires_grad(td_value_tensor(y)));
        CHECK_EQ(td_dist_autograd_current(), 0);
        td_tensor *loss = td_sum(weight);
        CHECK_EQ(td_dist_backward(12345, &loss, 1, NULL), TD_ERR_INVALID);
        TD_DIST_AUTOGRAD(context);
        CHECK_EQ(td_dist_backward(context, NULL, 0, NULL), TD_ERR_INVALID);
        td_tensor *plain = td_full(TD_SHAPE(1), 1, TD_F32, NULL);
        CHECK_EQ(td_dist_backward(context, &plain, 1, NULL), TD_ERR_INVALID);
        CHECK_EQ(td_dist_backward(context, &weight, 1, NULL), TD_ERR_INVALID);
        CHECK_OK(td_dist_backward(context, &loss, 1, NULL));
        CHECK_EQ(first(td_dist_autograd_grad(context, weight)), 1);
    }
    end();
}

static void *many_contexts(void *arg)
{
    for (int i = 0; i < *(int *)arg; i++)
        over_a_chain(1 + i % 5);
    return NULL;
}

RANKS(several_contexts_at_once, .ranks = 3, .deadline_s = 60)
{
    begin();
    if (td_test_rank() == 0) {
        pthread_t threads[4];
        int rounds = 40;
        for (int i = 0; i < 4; i++)
            CHECK_EQ(pthread_create(&threads[i], NULL, many_contexts, &rounds), 0);
        for (int i = 0; i < 4; i++)
            pthread_join(threads[i], NULL);
        check_no_contexts();
    }
    end();
}

RANKS(a_call_that_outlives_its_context, .ranks = 2)
{
    begin();
    if (td_test_rank() == 0) {
        TD_SCOPE;
        td_future *late[20];
        for (int i = 0; i < 20; i++) {
            TD_DIST_AUTOGRAD(context);
            late[i] = td_rpc_async("w1", "mul", TD_ARGS(weight), NULL);
            CHECK(late[i]);
        }
        for (int i = 0; i < 20; i++)
            CHECK(td_future_wait(late[i], 0));
        check_no_contexts();
    }
    end();
}

/* ---- Failures -------------------------------------------------------------------------------- */

RANKS(a_backward_that_fails_elsewhere, .ranks = 3)
{
    begin();
    if (td_test_rank() == 0) {
        TD_SCOPE;
        {
            TD_DIST_AUTOGRAD(context);
            td_value *y = td_rpc_sync("w1", "mul", TD_ARGS(weight), NULL);
            td_value *z = td_rpc_sync("w2", "fails_later", TD_ARGS(td_value_tensor(y)), NULL);
            CHECK(z);
            td_tensor *loss = td_sum(td_value_tensor(z));
            CHECK_EQ(td_dist_backward(context, &loss, 1, NULL), TD_ERR_INVALID);
            CHECK(strstr(td_last_error(), "w2"));
            CHECK(strstr(td_last_error(), "fails on purpose"));
        }
        over_a_chain(4);
        check_no_contexts();
    }
    end();
}

RANKS(a_worker_that_dies_in_the_backward_pass, .ranks = 3, .may_die = 1 << 2)
{
    begin();
    if (td_test_rank() == 0) {
        TD_SCOPE;
        TD_DIST_AUTOGRAD(context);
        td_value *y = td_rpc_sync("w1", "mul", TD_ARGS(weight), NULL);
        td_value *z = td_rpc_sync("w2", "dies_later", TD_ARGS(td_value_tensor(y)), NULL);
        CHECK(z);
        td_tensor *loss = td_sum(td_value_tensor(z));
        CHECK_EQ(td_dist_backward(context, &loss, 1, NULL), TD_ERR_PEER);
        CHECK(strstr(td_last_error(), "w2"));
        td_dist_autograd_end(&context);
        TD_DIST_AUTOGRAD(next);
        y = td_rpc_sync("w1", "mul", TD_ARGS(weight), NULL);
        CHECK(y);
        loss = td_sum(td_value_tensor(y));
        CHECK_OK(td_dist_backward(next, &loss, 1, NULL));
        CHECK_EQ(remote_grad(1, next), 6 / 3);
    }
    end();
}

/* The context of the last worker ends as soon as it notices, since its calls came from the dead one; the error names
 * that one all the same, whoever notices first. */
RANKS(a_worker_in_the_middle_dies, .ranks = 3, .may_die = 1 << 1)
{
    begin();
    if (td_test_rank() == 0) {
        TD_SCOPE;
        td_tensor *x = td_full(TD_SHAPE(3), 1, TD_F32, NULL);
        CHECK_OK(td_tensor_set_requires_grad(x, true));
        TD_DIST_AUTOGRAD(context);
        td_value *y = td_rpc_sync("w1", "dies_in_the_middle", TD_ARGS(x), NULL);
        CHECK(y);
        td_tensor *loss = td_sum(td_value_tensor(y));
        CHECK_EQ(td_dist_backward(context, &loss, 1, NULL), TD_ERR_PEER);
        CHECK(strstr(td_last_error(), "\"w1\""));
        CHECK(strstr(td_last_error(), "was killed by SIGKILL"));
    }
    end();
}

/* ---- Training: the same bits as in one process -------------------------------------------------- */

enum { STEPS = 30, LAYERS = 3 };

static const int64_t widths[LAYERS + 1] = {8, 16, 16, 4};

static td_module *make_layer(int layer)
{
    td_manual_seed((uint64_t)(100 + layer));
    return td_sequential(td_linear(widths[layer], widths[layer + 1]),
                         layer + 1 < LAYERS ? td_tanh() : td_identity(), NULL);
}

static td_value *make_stage(td_rpc_call *call, td_value *const *args, int count)
{
    int64_t layer;
    (void)call;
    (void)count;
    return td_value_int(args[0], &layer) ? NULL : td_value_from_module(make_layer((int)layer));
}

static td_tensor *batch(int step, int64_t width)
{
    td_manual_seed((uint64_t)(1000 + step));
    return td_randn(TD_SHAPE(6, width), TD_F32, NULL);
}

static td_optimizer *local_optimizer(bool adam, td_tensor *const *parameters, int count)
{
    return adam ? td_adam_of(parameters, count, &(td_adam_options){.lr = 0.01})
                : td_sgd_of(parameters, count, &(td_sgd_options){.lr = 0.1, .momentum = 0.9});
}

/* Trains in this process, and returns the final losses. */
static void train_alone(bool adam, float losses[STEPS])
{
    td_module *layers[LAYERS];
    td_tensor *parameters[2 * LAYERS];
    int count = 0;
    for (int l = 0; l < LAYERS; l++) {
        layers[l] = make_layer(l);
        td_state *own = td_module_parameters(layers[l]);
        for (int i = 0; i < td_state_count(own); i++)
            parameters[count++] = td_state_tensor(own, i);
        td_state_destroy(own);
    }
    td_optimizer *optimizer = local_optimizer(adam, parameters, count);
    for (int step = 0; step < STEPS; step++) {
        TD_SCOPE;
        td_tensor *x = batch(step, widths[0]);
        for (int l = 0; l < LAYERS; l++)
            x = td_forward(layers[l], x);
        td_tensor *loss = td_mse_loss(x, batch(step + 500, widths[LAYERS]));
        CHECK_OK(td_optimizer_zero_grad(optimizer));
        CHECK_OK(td_backward(loss));
        CHECK_OK(td_optimizer_step(optimizer));
        losses[step] = first(loss);
    }
    td_optimizer_destroy(optimizer);
    for (int l = 0; l < LAYERS; l++)
        td_module_destroy(layers[l]);
}

/* The same with layer l on worker l % size. */
static void train_split(bool adam, float losses[STEPS])
{
    TD_SCOPE;
    td_rref *layers[LAYERS];
    td_value *all = td_value_list(NULL, 0);
    for (int l = 0; l < LAYERS; l++) {
        layers[l] = td_remote(td_worker_name(l % td_test_size()), "make_stage", TD_ARGS(l), NULL);
        td_value *own = td_rref_sync(layers[l], "parameters", TD_NO_ARGS, NULL);
        CHECK(own);
        td_value *joined[16];
        int count = 0;
        for (int64_t i = 0; i < td_value_count(all); i++)
            joined[count++] = td_value_at(all, i);
        for (int64_t i = 0; i < td_value_count(own); i++)
            joined[count++] = td_value_at(own, i);
        all = td_value_list(joined, count);
    }
    td_dist_optimizer *optimizer = adam ? td_dist_adam(all, &(td_adam_options){.lr = 0.01})
                                        : td_dist_sgd(
                                              all, &(td_sgd_options){.lr = 0.1, .momentum = 0.9});
    CHECK(optimizer);
    for (int step = 0; step < STEPS; step++) {
        TD_SCOPE;
        TD_DIST_AUTOGRAD(context);
        td_tensor *x = batch(step, widths[0]);
        for (int l = 0; l < LAYERS; l++) {
            td_value *y = td_rref_sync(layers[l], "forward", TD_ARGS(x), NULL);
            CHECK(y);
            x = td_value_tensor(y);
        }
        td_tensor *loss = td_mse_loss(x, batch(step + 500, widths[LAYERS]));
        CHECK_OK(td_dist_backward(context, &loss, 1, NULL));
        CHECK_OK(td_dist_optimizer_step(optimizer, context));
        losses[step] = first(loss);
    }
    td_dist_optimizer_destroy(optimizer);
}

static void same_bits(void)
{
    CHECK_OK(td_rpc_register("make_stage(layer: int)", make_stage, NULL));
    begin();
    if (td_test_rank() == 0)
        for (int adam = 0; adam < 2; adam++) {
            float alone[STEPS], split[STEPS];
            train_alone(adam, alone);
            train_split(adam, split);
            CHECK(alone[STEPS - 1] < alone[0]);
            CHECK(!memcmp(alone, split, sizeof alone));
        }
    end();
}

RANKS(split_over_two_workers_trains_to_the_same_bits, .ranks = 2, .deadline_s = 60)
{
    same_bits();
}

RANKS(split_over_three_workers_trains_to_the_same_bits, .ranks = 3, .deadline_s = 60)
{
    same_bits();
}

RANKS(optimizers_report_what_does_not_fit, .ranks = 2)
{
    CHECK_OK(td_rpc_register("make_stage(layer: int)", make_stage, NULL));
    begin();
    if (td_test_rank() == 0) {
        TD_SCOPE;
        td_rref *layer = td_remote("w1", "make_stage", TD_ARGS(0), NULL);
        td_value *parameters = td_rref_sync(layer, "parameters", TD_NO_ARGS, NULL);
        CHECK(!td_dist_sgd(parameters, &(td_sgd_options){.lr = -1}));
        CHECK(strstr(td_last_error(), "w1"));
        CHECK(!td_dist_sgd(td_value_of(1), &(td_sgd_options){.lr = 1}));
        CHECK(!td_dist_sgd(TD_ARGS(1, 2), &(td_sgd_options){.lr = 1}));
        CHECK(!td_dist_adam(TD_ARGS(layer), NULL)); /* a module is no tensor */
        td_dist_optimizer *adamw = td_dist_adamw(parameters, NULL);
        CHECK(adamw);
        CHECK_OK(td_dist_optimizer_set_lr(adamw, 0.5));
        CHECK(td_dist_optimizer_set_lr(adamw, -1));
        CHECK_OK(td_dist_optimizer_step(adamw, 999)); /* a context without gradients */
        td_dist_optimizer_destroy(adamw);
    }
    end();
}
