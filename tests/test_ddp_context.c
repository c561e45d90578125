/* td_ddp() in contexts of distributed autograd: the bits of td_ddp() alone, other workers in the pass, contexts in each
 * other's way, and passes that fail on one rank only. */
#include "runner.h"

#include <tandem/tandem.h>

#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

enum { BATCH = 12, WIDTH = 8, CLASSES = 4 };

/* ---- Workers ----------------------------------------------------------------------------------- */

static td_module *make_net(int seed)
{
    td_manual_seed((uint64_t)seed);
    return td_sequential(td_linear(WIDTH, 33), td_tanh(), td_linear(33, CLASSES), NULL);
}

static td_tensor *weight;  /* of a server */
static td_module *replica; /* of a server: in td_ddp(); for get_replica() */
static pthread_mutex_t replica_lock = PTHREAD_MUTEX_INITIALIZER;

static td_module *get_replica(void)
{
    pthread_mutex_lock(&replica_lock);
    td_module *found = replica;
    pthread_mutex_unlock(&replica_lock);
    CHECK(found);
    return found;
}

static void set_replica(td_module *module)
{
    CHECK(module);
    pthread_mutex_lock(&replica_lock);
    replica = module;
    pthread_mutex_unlock(&replica_lock);
}

static td_value *scale(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call, (void)count;
    return td_value_of(td_mul(td_value_tensor(args[0]), weight));
}

static td_value *run_replica(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call, (void)count;
    return td_value_of(td_forward(get_replica(), td_value_tensor(args[0])));
}

/* The gradient of the replica's first weight in a context. */
static td_value *replica_grad(td_rpc_call *call, td_value *const *args, int count)
{
    int64_t context;
    (void)call, (void)count;
    CHECK_OK(td_value_int(args[0], &context));
    td_tensor *grad = td_dist_autograd_grad((uint64_t)context,
                                            td_module_parameter(get_replica(), "module.0.weight"));
    return grad ? td_value_of(grad) : td_value_nil();
}

static td_status fail_backward(td_node *node, td_tensor *const *grad_outputs,
                               td_tensor **grad_inputs)
{
    (void)node, (void)grad_outputs, (void)grad_inputs;
    return td_fail(TD_ERR_INVALID, "this backward fails on purpose");
}

static td_status kill_backward(td_node *node, td_tensor *const *grad_outputs,
                               td_tensor **grad_inputs)
{
    (void)node, (void)grad_outputs, (void)grad_inputs;
    raise(SIGKILL);
    return TD_OK;
}

static const td_function failing = {.name = "failing", .backward = fail_backward};
static const td_function killing = {.name = "killing", .backward = kill_backward};

/* x, whose backward is the function's. */
static td_tensor *through(const td_function *function, td_tensor *x)
{
    return td_record(function, td_clone(td_detach(x)),
                     &(td_node_spec){.inputs = {x}, .input_count = 1});
}

static td_value *fails_later(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call, (void)count;
    return td_value_of(through(&failing, td_value_tensor(args[0])));
}

static td_value *dies_later(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call, (void)count;
    return td_value_of(through(&killing, td_value_tensor(args[0])));
}

static td_group *trainers; /* the first ranks */

static void begin(int trainer_count, int64_t timeout_ms)
{
    int ranks[8] = {0, 1, 2, 3, 4, 5, 6, 7};
    char name[16];
    CHECK_OK(td_init_process_group(NULL));
    CHECK_OK(td_new_group(ranks, trainer_count, NULL, &trainers));
    CHECK_OK(td_rpc_register("scale(x: tensor)", scale, NULL));
    CHECK_OK(td_rpc_register("run_replica(x: tensor)", run_replica, NULL));
    CHECK_OK(td_rpc_register("replica_grad(context: int)", replica_grad, NULL));
    CHECK_OK(td_rpc_register("fails_later(x: tensor)", fails_later, NULL));
    CHECK_OK(td_rpc_register("dies_later(x: tensor)", dies_later, NULL));
    weight = td_full(TD_SHAPE(1), 0.5, TD_F32, NULL);
    CHECK_OK(td_tensor_set_requires_grad(weight, true));
    snprintf(name, sizeof name, "w%d", td_test_rank());
    CHECK_OK(td_init_rpc(name, &(td_rpc_options){.timeout_ms = timeout_ms}));
}

static void end(void)
{
    CHECK_OK(td_rpc_shutdown(NULL));
    td_tensor_release(weight);
    td_module_destroy(replica);
    td_group_destroy(trainers);
    CHECK_OK(td_destroy_process_group());
}

/* ---- Steps ------------------------------------------------------------------------------------- */

/* This rank's part of the batch of a step; rank -1: all of it. */
static void make_batch(int step, int rank, td_tensor **x, td_tensor **y)
{
    int size = rank < 0 ? 1 : td_get_world_size(trainers);
    td_generator *generator = td_generator_create((uint64_t)(1000 + step), NULL);
    td_tensor *all = td_empty(TD_SHAPE(BATCH, WIDTH), TD_F32, NULL);
    td_tensor *labels = td_empty(TD_SHAPE(BATCH), TD_I64, NULL);
    CHECK_OK(td_normal_(all, 0, 1, generator));
    CHECK_OK(td_random_range_(labels, 0, CLASSES, generator));
    td_generator_destroy(generator);
    *x = td_contiguous(td_narrow(all, 0, rank < 0 ? 0 : rank * BATCH / size, BATCH / size));
    *y = td_contiguous(td_narrow(labels, 0, rank < 0 ? 0 : rank * BATCH / size, BATCH / size));
}

static td_tensor *local_loss(td_module *model, int step, int rank)
{
    td_tensor *x, *y;
    make_batch(step, rank, &x, &y);
    return td_cross_entropy(td_forward(model, x), y);
}

/* The loss of a batch that goes through a function of another worker first. */
static td_tensor *remote_loss(td_module *model, int step, const char *to, const char *function)
{
    td_tensor *x, *y;
    make_batch(step, td_test_rank(), &x, &y);
    td_value *scaled = td_rpc_sync(to, function, TD_ARGS(x), NULL);
    CHECK(scaled);
    return td_cross_entropy(td_forward(model, td_value_tensor(scaled)), y);
}

/* As td_tensor_grad() of each parameter of `one`, bit by bit, are the gradients of `other` in the context. */
static void check_same_grads(td_module *one, td_module *other, uint64_t context)
{
    td_state *parameters = td_module_parameters(one), *others = td_module_parameters(other);
    for (int i = 0; i < td_state_count(parameters); i++) {
        TD_SCOPE;
        td_tensor *grad = td_tensor_grad(td_state_tensor(parameters, i));
        td_tensor *in_context = td_dist_autograd_grad(context, td_state_tensor(others, i));
        CHECK(!grad == !in_context);
        if (grad)
            CHECK_MEM(td_tensor_data(in_context), td_tensor_data(grad), td_tensor_nbytes(grad));
    }
    td_state_destroy(parameters);
    td_state_destroy(others);
}

/* The gradients of the context are those of one process with the whole batch of a step. */
static double tolerance = 1e-5;

static void check_average(td_module *model, int step, double factor, uint64_t context)
{
    TD_SCOPE;
    td_module *alone = make_net(1);
    td_tensor *x, *y;
    make_batch(step, -1, &x, &y);
    CHECK_OK(td_backward(td_cross_entropy(td_forward(alone, td_mul_scalar(x, factor)), y)));
    td_state *parameters = td_module_parameters(alone), *others = td_module_parameters(model);
    for (int i = 0; i < td_state_count(parameters); i++) {
        td_tensor *grad = td_tensor_grad(td_state_tensor(parameters, i));
        td_tensor *in_context = td_dist_autograd_grad(context, td_state_tensor(others, i));
        CHECK(in_context);
        const float *a = td_tensor_data(grad), *b = td_tensor_data(in_context);
        for (int64_t k = 0; k < td_tensor_numel(grad); k++)
            CHECK(fabs(a[k] - b[k]) < tolerance);
    }
    td_state_destroy(parameters);
    td_state_destroy(others);
    td_module_destroy(alone);
}

static void check_no_leaf_grads(td_module *model)
{
    td_state *parameters = td_module_parameters(model);
    for (int i = 0; i < td_state_count(parameters); i++)
        CHECK(!td_tensor_grad(td_state_tensor(parameters, i)));
    td_state_destroy(parameters);
}

/* A pass that works, and its averages. */
static void check_next_pass(td_module *model, int step)
{
    TD_SCOPE;
    TD_DIST_AUTOGRAD(context);
    td_tensor *loss = local_loss(model, step, td_test_rank());
    CHECK_OK(td_dist_backward(context, &loss, 1, NULL));
    check_average(model, step, 1, context);
}

/* ---- The same as td_ddp() alone ---------------------------------------------------------------- */

static td_value *references(td_module *module)
{
    td_state *parameters = td_module_parameters(module);
    td_value *items[16];
    int count = td_state_count(parameters);
    for (int i = 0; i < count; i++)
        items[i] = td_value_of(td_rref_create(td_value_of(td_state_tensor(parameters, i))));
    td_state_destroy(parameters);
    return td_value_list(items, count);
}

static void train_both(const td_ddp_options *options)
{
    begin(td_test_size(), 0);
    TD_SCOPE;
    td_module *plain = td_ddp(make_net(1), options), *model = td_ddp(make_net(1), options);
    CHECK(plain && model);
    td_optimizer *sgd = td_sgd(plain, &(td_sgd_options){.lr = 0.2, .momentum = 0.9});
    td_dist_optimizer *dist_sgd = td_dist_sgd(references(model),
                                              &(td_sgd_options){.lr = 0.2, .momentum = 0.9});
    CHECK(sgd && dist_sgd);
    for (int step = 0; step < 20; step++) {
        TD_SCOPE;
        CHECK_OK(td_optimizer_zero_grad(sgd));
        CHECK_OK(td_backward(local_loss(plain, step, td_test_rank())));
        TD_DIST_AUTOGRAD(context);
        td_tensor *loss = local_loss(model, step, td_test_rank());
        CHECK_OK(td_dist_backward(context, &loss, 1, NULL));
        check_same_grads(plain, model, context);
        check_no_leaf_grads(model);
        CHECK_OK(td_optimizer_step(sgd));
        CHECK_OK(td_dist_optimizer_step(dist_sgd, context));
    }
    td_ddp_stats stats;
    CHECK_OK(td_ddp_get_stats(model, &stats));
    CHECK_EQ(stats.passes, 20);
    td_dist_optimizer_destroy(dist_sgd);
    td_optimizer_destroy(sgd);
    td_module_destroy(plain);
    td_module_destroy(model);
    end();
}

RANKS(training_in_contexts_has_the_bits_of_ddp_alone, .ranks = 2)
{
    train_both(NULL);
}

RANKS(also_with_many_buckets_and_three_ranks, .ranks = 3)
{
    train_both(&(td_ddp_options){.bucket_cap_mb = 0.0001});
}

RANKS(also_with_unused_parameters_and_a_hook, .ranks = 2)
{
    train_both(&(td_ddp_options){.find_unused_parameters = true, .hook = td_hook_fp16()});
}

RANKS(also_with_a_static_graph, .ranks = 2)
{
    train_both(&(td_ddp_options){.static_graph = true});
}

/* A model of two branches, of which a forward uses one. */
static td_tensor *branch_loss(td_module *model, int branch, int step)
{
    td_tensor *x, *y, *flag = td_full(TD_SHAPE(1), branch, TD_F32, NULL);
    make_batch(step, td_test_rank(), &x, &y);
    return td_cross_entropy(td_forward_with(model, TD_TENSORS(x, flag)), y);
}

static td_tensor *branch_forward(td_module *module, td_tensor *const *inputs, int count)
{
    (void)count;
    return td_forward(td_child(module, td_item(inputs[1]) != 0), inputs[0]);
}

static td_module *make_branches(void)
{
    static const td_module_ops ops = {.name = "Branches", .forward = branch_forward};
    td_module *module = td_module_create(&ops);
    td_module_add_child(module, "left", make_net(1));
    td_module_add_child(module, "right", make_net(2));
    return td_ddp(td_module_finish(module), &(td_ddp_options){.find_unused_parameters = true});
}

/* Used by one rank: the average counts zero for the other; used by none: no gradient. */
RANKS(unused_parameters_in_a_context, .ranks = 2)
{
    begin(2, 0);
    TD_SCOPE;
    td_module *plain = make_branches(), *model = make_branches();
    CHECK(plain && model);
    for (int step = 0; step < 6; step++) {
        TD_SCOPE;
        int branch = step % 3 == 0 ? 0 : step % 3 == 1 ? 1 : td_test_rank();
        CHECK_OK(td_backward(branch_loss(plain, branch, step)));
        TD_DIST_AUTOGRAD(context);
        td_tensor *loss = branch_loss(model, branch, step);
        CHECK_OK(td_dist_backward(context, &loss, 1, NULL));
        check_same_grads(plain, model, context);
        td_state *parameters = td_module_parameters(
            plain); /* views: the next pass starts without */
        for (int i = 0; i < td_state_count(parameters); i++)
            CHECK_OK(td_tensor_set_grad(td_state_tensor(parameters, i), NULL));
        td_state_destroy(parameters);
    }
    td_module_destroy(plain);
    td_module_destroy(model);
    end();
}

RANKS(no_sync_accumulates_in_the_context, .ranks = 2)
{
    begin(2, 0);
    TD_SCOPE;
    td_module *model = td_ddp(make_net(1), NULL), *other = td_ddp(make_net(1), NULL);
    TD_DIST_AUTOGRAD(context);
    {
        TD_NO_SYNC(model);
        td_tensor *loss = local_loss(model, 0, td_test_rank());
        CHECK_OK(td_dist_backward(context, &loss, 1, NULL));
    }
    td_tensor *first = td_module_parameter(model, "module.0.weight");
    td_tensor *mine = td_clone(td_dist_autograd_grad(context, first)), *theirs = td_clone(mine);
    CHECK_OK(td_broadcast(theirs, 0, NULL, NULL));
    if (td_test_rank() == 1)
        CHECK(memcmp(td_tensor_data(mine), td_tensor_data(theirs), td_tensor_nbytes(mine)) != 0);
    td_tensor *loss = local_loss(model, 1, td_test_rank());
    CHECK_OK(td_dist_backward(context, &loss, 1, NULL));

    /* The average of the sum is the sum of the averages. */
    TD_DIST_AUTOGRAD(one);
    loss = local_loss(other, 0, td_test_rank());
    CHECK_OK(td_dist_backward(one, &loss, 1, NULL));
    td_tensor *a = td_dist_autograd_grad(one, td_module_parameter(other, "module.0.weight"));
    TD_DIST_AUTOGRAD(two);
    loss = local_loss(other, 1, td_test_rank());
    CHECK_OK(td_dist_backward(two, &loss, 1, NULL));
    td_tensor *b = td_dist_autograd_grad(two, td_module_parameter(other, "module.0.weight"));
    td_tensor *sum = td_dist_autograd_grad(context, first);
    for (int64_t i = 0; i < td_tensor_numel(sum); i++)
        CHECK(fabs(((float *)td_tensor_data(a))[i] + ((float *)td_tensor_data(b))[i] -
                   ((float *)td_tensor_data(sum))[i]) < 1e-5);
    td_module_destroy(model);
    td_module_destroy(other);
    end();
}

/* A pass of a context uses the buckets, of which the gradients of leaves may be views. */
RANKS(gradients_of_leaves_stay_as_they_are, .ranks = 2)
{
    begin(2, 0);
    TD_SCOPE;
    td_module *model = td_ddp(make_net(1), NULL), *same = td_ddp(make_net(1), NULL);
    for (int step = 0; step < 3; step++) { /* the second forward rebuilds the buckets */
        TD_SCOPE;
        CHECK_OK(td_module_zero_grad(model));
        CHECK_OK(td_backward(local_loss(model, step, td_test_rank())));
        td_state *parameters = td_module_parameters(model);
        td_state *former = td_state_create();
        for (int i = 0; i < td_state_count(parameters); i++)
            CHECK_OK(td_state_add(former, td_state_name(parameters, i),
                                  td_clone(td_tensor_grad(td_state_tensor(parameters, i)))));
        TD_DIST_AUTOGRAD(context);
        td_tensor *loss = local_loss(model, step + 10, td_test_rank());
        CHECK_OK(td_dist_backward(context, &loss, 1, NULL));
        for (int i = 0; i < td_state_count(parameters); i++) {
            td_tensor *grad = td_tensor_grad(td_state_tensor(parameters, i));
            CHECK_MEM(td_tensor_data(grad), td_tensor_data(td_state_tensor(former, i)),
                      td_tensor_nbytes(grad));
        }
        /* And the context's do not change with the next pass. */
        CHECK_OK(td_module_zero_grad(same));
        CHECK_OK(td_backward(local_loss(same, step + 10, td_test_rank())));
        CHECK_OK(td_backward(local_loss(model, step + 20, td_test_rank())));
        check_same_grads(same, model, context);
        td_state_destroy(parameters);
        td_state_destroy(former);
    }
    td_module_destroy(model);
    td_module_destroy(same);
    end();
}

/* ---- Other workers in the pass ------------------------------------------------------------------ */

RANKS(trainers_share_a_server, .ranks = 3)
{
    begin(2, 0);
    if (td_test_rank() < 2) {
        TD_SCOPE;
        td_module *model = td_ddp(make_net(1), &(td_ddp_options){.group = trainers});
        CHECK(model);
        for (int step = 0; step < 10; step++) {
            TD_SCOPE;
            TD_DIST_AUTOGRAD(context);
            td_tensor *loss = remote_loss(model, step, "w2", "scale");
            CHECK_OK(td_dist_backward(context, &loss, 1, NULL));
            check_average(model, step, 0.5, context);
        }
        td_module_destroy(model);
    }
    end();
}

/* The replicas are on the workers w0 and w1, and two clients call one each. */
RANKS(replicas_behind_remote_calls, .ranks = 4)
{
    begin(2, 0);
    TD_SCOPE;
    int rank = td_test_rank();
    if (rank < 2)
        set_replica(td_ddp(make_net(1), &(td_ddp_options){.group = trainers}));
    CHECK_OK(td_group_barrier(NULL, NULL));
    for (int step = 0; rank >= 2 && step < 10; step++) {
        TD_SCOPE;
        TD_DIST_AUTOGRAD(context);
        td_tensor *x, *y;
        make_batch(step, -1, &x, &y);
        x = td_contiguous(td_narrow(x, 0, (rank - 2) * BATCH / 2, BATCH / 2));
        y = td_contiguous(td_narrow(y, 0, (rank - 2) * BATCH / 2, BATCH / 2));
        td_value *out = td_rpc_sync(td_worker_name(rank - 2), "run_replica", TD_ARGS(x), NULL);
        CHECK(out);
        td_tensor *loss = td_cross_entropy(td_value_tensor(out), y);
        CHECK_OK(td_dist_backward(context, &loss, 1, NULL));
        td_value *grad = td_rpc_sync(td_worker_name(rank - 2), "replica_grad",
                                     TD_ARGS((int64_t)context), NULL);
        td_module *alone = make_net(1);
        make_batch(step, -1, &x, &y);
        CHECK_OK(td_backward(td_cross_entropy(td_forward(alone, x), y)));
        const float *a = td_tensor_data(td_tensor_grad(td_module_parameter(alone, "0.weight")));
        const float *b = td_tensor_data(td_value_tensor(grad));
        for (int i = 0; i < WIDTH * 33; i++)
            CHECK(fabs(a[i] - b[i]) < 1e-5);
        td_module_destroy(alone);
    }
    CHECK_OK(td_group_barrier(NULL, NULL));
    end();
}

/* Only one replica is called: an error within the timeout, and no gradient that is not an average. */
RANKS(a_replica_that_is_called_alone_times_out, .ranks = 3)
{
    begin(2, 1000);
    TD_SCOPE;
    if (td_test_rank() < 2)
        set_replica(td_ddp(make_net(1), &(td_ddp_options){.group = trainers}));
    CHECK_OK(td_group_barrier(NULL, NULL));
    if (td_test_rank() == 2) {
        TD_DIST_AUTOGRAD(context);
        td_tensor *x, *y;
        make_batch(0, -1, &x, &y);
        td_value *out = td_rpc_sync("w0", "run_replica", TD_ARGS(x), NULL);
        CHECK(out);
        td_tensor *loss = td_cross_entropy(td_value_tensor(out), y);
        CHECK_FAILS(td_dist_backward(context, &loss, 1, NULL), TD_ERR_TIMEOUT, "w0");
    }
    CHECK_OK(td_group_barrier(NULL, NULL));
    end();
}

/* ---- Contexts in each other's way ---------------------------------------------------------------- */

RANKS(one_context_at_a_time, .ranks = 2)
{
    begin(2, 0);
    TD_SCOPE;
    td_module *model = td_ddp(make_net(1), NULL);
    TD_DIST_AUTOGRAD(first);
    td_tensor *first_loss = local_loss(model, 0, td_test_rank());
    TD_DIST_AUTOGRAD(second);
    td_tensor *second_loss = local_loss(model, 1, td_test_rank());
    CHECK_FAILS(td_dist_backward(first, &first_loss, 1, NULL), TD_ERR_STATE, "another context");
    CHECK_OK(td_dist_backward(second, &second_loss, 1, NULL));
    check_average(model, 1, 1, second);

    /* A second pass after one forward would not be averaged, and neither one whose forward was elsewhere. */
    second_loss = local_loss(model, 2, td_test_rank());
    CHECK_OK(
        td_dist_backward(second, &second_loss, 1, &(td_backward_options){.retain_graph = true}));
    CHECK_FAILS(td_dist_backward(second, &second_loss, 1, NULL), TD_ERR_STATE,
                "a backward pass since");
    td_dist_autograd_end(&second);
    td_dist_autograd_end(&first);
    td_tensor *outside = local_loss(model, 3, td_test_rank());
    TD_DIST_AUTOGRAD(third);
    CHECK_FAILS(td_dist_backward(third, &outside, 1, NULL), TD_ERR_STATE, "outside of it");
    td_dist_autograd_end(&third);
    check_next_pass(model, 4);
    td_module_destroy(model);
    end();
}

/* Ranks with fewer batches shadow the passes of contexts. */
RANKS(uneven_inputs_in_contexts, .ranks = 2)
{
    begin(2, 0);
    TD_SCOPE;
    td_module *model = td_ddp(make_net(1), NULL);
    CHECK_OK(td_ddp_join_begin(model, NULL));
    for (int step = 0; step < (td_test_rank() ? 2 : 5); step++) {
        TD_SCOPE;
        TD_DIST_AUTOGRAD(context);
        td_tensor *loss = local_loss(model, step, td_test_rank());
        CHECK_OK(td_dist_backward(context, &loss, 1, NULL));
        if (step < 2)
            check_average(model, step, 1, context);
    }
    CHECK_OK(td_ddp_join_end(model));
    check_next_pass(model, 9);
    td_module_destroy(model);
    end();
}

/* ---- Failures -------------------------------------------------------------------------------------- */

/* The pass of rank 0 fails in the middle, on the server: both ranks get an error, and the next pass works. */
static void fail_on_one_rank(const td_ddp_options *options)
{
    begin(2, 0);
    if (td_test_rank() < 2) {
        TD_SCOPE;
        td_ddp_options with_group = options ? *options : (td_ddp_options){0};
        with_group.group = trainers;
        td_module *model = td_ddp(make_net(1), &with_group);
        for (int step = 0; step < 3; step++) {
            TD_SCOPE;
            TD_DIST_AUTOGRAD(context);
            td_tensor *x, *y;
            make_batch(step, td_test_rank(), &x, &y);
            td_tensor *out = td_forward(model, x);
            bool fails = td_test_rank() == 0;
            td_value *after = td_rpc_sync("w2", fails ? "fails_later" : "scale", TD_ARGS(out),
                                          NULL);
            CHECK(after);
            td_tensor *loss = td_sum(td_value_tensor(after));
            td_status status = td_dist_backward(context, &loss, 1, NULL);
            CHECK_EQ(status, fails ? TD_ERR_INVALID : TD_ERR_ABORTED);
            CHECK_CONTAINS(td_last_error(), fails ? "on purpose" : "rank 0");
            td_dist_autograd_end(&context);
            check_next_pass(model, step);
        }
        td_module_destroy(model);
    }
    end();
}

RANKS(a_pass_that_fails_on_one_rank_fails_on_all, .ranks = 3)
{
    fail_on_one_rank(NULL);
}

RANKS(also_with_a_hook_and_many_buckets, .ranks = 3)
{
    tolerance = 1e-2;
    fail_on_one_rank(&(td_ddp_options){
        .hook = td_hook_bf16(), .bucket_cap_mb = 0.0001, .find_unused_parameters = true});
}

/* The server is killed in the middle of the passes of both trainers. */
RANKS(a_server_that_dies_in_mid_pass, .ranks = 3, .may_die = 1 << 2)
{
    begin(2, 0);
    if (td_test_rank() < 2) {
        TD_SCOPE;
        td_module *model = td_ddp(make_net(1), &(td_ddp_options){.group = trainers});
        {
            TD_DIST_AUTOGRAD(context);
            td_tensor *x, *y;
            make_batch(0, td_test_rank(), &x, &y);
            td_value *after = td_rpc_sync("w2", "dies_later", TD_ARGS(td_forward(model, x)), NULL);
            CHECK(after);
            CHECK_OK(td_group_barrier(trainers, NULL)); /* both are in the pass when it dies */
            td_tensor *loss = td_sum(td_value_tensor(after));
            td_status status = td_dist_backward(context, &loss, 1, NULL);
            CHECK(status == TD_ERR_PEER || status == TD_ERR_ABORTED);
        }
        for (int step = 0; step < 3; step++)
            check_next_pass(model, step);
        td_module_destroy(model);
    }
    CHECK_OK(td_rpc_shutdown(NULL));
}

/* A rank of the group is killed in its own pass: the other gets an error that names it. */
RANKS(a_rank_that_dies_in_mid_pass, .ranks = 2, .may_die = 1 << 1)
{
    begin(2, 0);
    TD_SCOPE;
    td_module *model = td_ddp(make_net(1), NULL);
    TD_DIST_AUTOGRAD(context);
    td_tensor *x, *y;
    make_batch(0, td_test_rank(), &x, &y);
    CHECK_OK(td_tensor_set_requires_grad(x, true));
    td_tensor *out = td_forward(model, td_test_rank() ? through(&killing, x) : x);
    td_tensor *loss = td_cross_entropy(td_test_rank() ? through(&killing, out) : out, y);
    CHECK_FAILS(td_dist_backward(context, &loss, 1, NULL), TD_ERR_PEER, "rank 1");
    td_dist_autograd_end(&context);
    TD_DIST_AUTOGRAD(next);
    td_status status = TD_OK; /* the group is broken */
    loss = local_loss(model, 1, td_test_rank());
    status = loss ? td_dist_backward(next, &loss, 1, NULL) : td_last_status();
    CHECK_EQ(status, TD_ERR_PEER);
    td_dist_autograd_end(&next);
    td_module_destroy(model);
    CHECK_OK(td_rpc_shutdown(NULL));
}

/* The server dies before the pass of rank 0 has come to its parameters. */
RANKS(a_pass_that_never_starts_fails_on_all, .ranks = 3, .may_die = 1 << 2)
{
    begin(2, 0);
    if (td_test_rank() < 2) {
        TD_SCOPE;
        td_module *model = td_ddp(make_net(1), &(td_ddp_options){.group = trainers});
        {
            TD_DIST_AUTOGRAD(context);
            td_tensor *out = local_loss(model, 0, td_test_rank());
            td_value *after = NULL;
            if (td_test_rank() == 0)
                CHECK(after = td_rpc_sync("w2", "scale", TD_ARGS(out), NULL));
            CHECK_OK(td_group_barrier(trainers, NULL));
            if (td_test_rank() == 0) /* so that asking it to expect gradients fails */
                td_test_kill(2, SIGKILL);
            td_tensor *loss = after ? td_sum(td_value_tensor(after)) : out;
            td_status status = td_dist_backward(context, &loss, 1, NULL);
            CHECK_EQ(status, td_test_rank() ? TD_ERR_ABORTED : TD_ERR_PEER);
            CHECK_CONTAINS(td_last_error(), td_test_rank() ? "rank 0" : "w2");
        }
        check_next_pass(model, 5);
        td_module_destroy(model);
    }
    CHECK_OK(td_rpc_shutdown(NULL));
}

/* Rank 0 ends its context without a backward pass. */
RANKS(a_context_that_ends_early, .ranks = 2)
{
    begin(2, 0);
    TD_SCOPE;
    td_module *model = td_ddp(make_net(1), NULL);
    for (int step = 0; step < 3; step++) {
        {
            TD_SCOPE;
            TD_DIST_AUTOGRAD(context);
            td_tensor *loss = local_loss(model, step, td_test_rank());
            if (td_test_rank() == 1)
                CHECK_FAILS(td_dist_backward(context, &loss, 1, NULL), TD_ERR_ABORTED, "rank 0");
        }
        check_next_pass(model, step);
    }
    td_module_destroy(model);
    end();
}
