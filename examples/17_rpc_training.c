/* Training a model on another worker: node A makes the model on node B, trains it with its own data, and fetches it.
 *
 *     $ tdrun --standalone --nproc-per-node=2 ./17_rpc_training
 *     node A: loss 0.… to 0.2…
 *     node A: the model of node B, Linear(in_features=2, out_features=1, bias=False), has the weight [0.1…, 0.2…]
 *
 * Or in two terminals, with RANK=0 and RANK=1:
 *
 *     $ RANK=0 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=29500 ./17_rpc_training */
#include <tandem/tandem.h>

#include <stdio.h>
#include <stdlib.h>

static void check(bool good)
{
    if (good)
        return;
    fprintf(stderr, "17_rpc_training: %s\n", td_last_error());
    exit(1);
}

/* ---- The class Net, whose objects live on node B ---------------------------------------------- */

static void *net_create(td_rpc_call *call, td_value *const *args, int count)
{
    int64_t inputs, outputs;
    (void)call;
    (void)count;
    if (td_value_int(args[0], &inputs) || td_value_int(args[1], &outputs))
        return NULL;
    td_manual_seed(3);
    return td_linear_with(inputs, outputs, &(td_linear_options){.no_bias = true});
}

static void net_destroy(void *net)
{
    td_module_destroy(net);
}

static td_value *net_forward(td_rpc_call *call, td_value *const *args, int count)
{
    (void)count;
    return td_value_from_tensor(td_forward(td_rpc_call_self(call), td_value_tensor(args[0])));
}

/* References to the parameters: they stay on node B. */
static td_value *net_get_param_rrefs(td_rpc_call *call, td_value *const *args, int count)
{
    (void)args;
    (void)count;
    td_tensor *weight = td_module_parameter(td_rpc_call_self(call), "weight");
    return TD_ARGS(td_rref_create(td_value_of(weight)));
}

/* The model itself, by value. */
static td_value *net_get_model(td_rpc_call *call, td_value *const *args, int count)
{
    (void)args;
    (void)count;
    return td_value_of(td_module_clone(td_rpc_call_self(call)));
}

static const td_rpc_method net_methods[] = {{"forward(x: tensor)", net_forward},
                                            {"get_param_rrefs()", net_get_param_rrefs},
                                            {"get_model()", net_get_model},
                                            {0}};

/* ---- Node A ------------------------------------------------------------------------------------ */

static void run_node_a(void)
{
    enum {
        BATCH = 2,
        BATCHES = 4,
        EPOCHS = 25
    }; /* 8 samples, all (1, 2); 1 is the target of half of them, and 0 */
    TD_SCOPE;
    td_rref *net = td_remote("node_B", "Net", TD_NO_ARGS, NULL);
    check(net);
    td_value *parameters = td_rref_sync(net, "get_param_rrefs", TD_NO_ARGS, NULL);
    td_dist_optimizer *sgd = td_dist_sgd(parameters, &(td_sgd_options){.lr = 0.05});
    check(sgd);

    double first = 0, last = 0; /* the mean losses of the first and the last epoch */
    for (int step = 0; step < EPOCHS * BATCHES; step++) {
        TD_SCOPE;
        double target = step % BATCHES < BATCHES / 2;
        td_tensor *x = td_from_array((float[]){1, 2, 1, 2}, TD_SHAPE(BATCH, 2), TD_F32, NULL);
        td_tensor *y = td_full(TD_SHAPE(BATCH, 1), target, TD_F32, NULL);

        TD_DIST_AUTOGRAD(context);
        td_value *predicted = td_rref_sync(net, "forward", TD_ARGS(x), NULL);
        check(predicted);
        td_tensor *loss = td_mse_loss(td_value_tensor(predicted), y);
        check(!td_dist_backward(context, &loss, 1, NULL));
        check(!td_dist_optimizer_step(sgd, context));
        first += step < BATCHES ? td_item(loss) / BATCHES : 0;
        last += step >= (EPOCHS - 1) * BATCHES ? td_item(loss) / BATCHES : 0;
    }
    printf("node A: loss %.2f to %.2f\n", first, last);

    td_value *model = td_rref_sync(net, "get_model", TD_NO_ARGS, NULL);
    check(model);
    td_module *here = td_value_module(model);
    td_bytes text = td_module_text(here);
    const float *weight = td_tensor_data(td_module_parameter(here, "weight"));
    printf("node A: the model of node B, %s, has the weight [%.3f, %.3f]\n", text.data, weight[0],
           weight[1]);
    td_bytes_free(&text);
    td_dist_optimizer_destroy(sgd);
}

int main(void)
{
    td_world world; /* the rank decides which node this is, also under srun and mpirun */
    check(!td_rendezvous(NULL, NULL, &world));
    bool is_a = world.rank == 0;
    check(!td_rpc_register_class(
        &(td_rpc_class){.signature = "Net(input_dim: int = 2, output_dim: int = 1)",
                        .create = net_create,
                        .destroy = net_destroy,
                        .methods = net_methods}));
    td_rpc_options options = {
        .rank = world.rank, .world_size = world.world_size, .store = world.store};
    check(!td_init_rpc(is_a ? "node_A" : "node_B", &options));
    if (is_a)
        run_node_a();
    check(!td_rpc_shutdown(NULL)); /* node B serves calls until all have come here */
    check(!td_world_close(&world));
    return 0;
}
