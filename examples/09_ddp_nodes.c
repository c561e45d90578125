/* DistributedDataParallel on several nodes without a launcher: on each node one program starts that node's
 * processes. The global rank is unique in the job; the local rank selects the device of its node.
 *
 *     node0$ export NODES=2 MASTER_ADDR=10.0.0.1 MASTER_PORT=12355 TANDEM_SECRET=…
 *     node0$ NODE_RANK=0 ./09_ddp_nodes
 *     node1$ NODE_RANK=1 ./09_ddp_nodes                      with the same exports
 *
 * TANDEM_SECRET is a text that only the job knows; on one host it may be left out. With tdrun (example 10)
 * the program needs none of this. */
#include <tandem/tandem.h>

#include <stdio.h>
#include <stdlib.h>

enum { PER_NODE = 2, SAMPLES = 80, WIDTH = 10, STEPS = 20 };

struct job {
    int nodes, node_rank;
    char url[300], secret[300];
};

static td_status set_up(const struct job *job, int global_rank)
{
    /* Otherwise td_spawn() gives its processes a random secret, which the other nodes do not have. */
    setenv("TANDEM_SECRET", job->secret, 1);
    return td_init_process_group(&(td_init_options){
        .init_method = job->url, .rank = global_rank, .world_size = job->nodes * PER_NODE});
}

static td_status train_step(td_module *model, td_optimizer *sgd, td_device *device, double *value)
{
    td_status status = TD_OK;
    {
        TD_SCOPE;
        td_tensor *x = td_tensor_to(td_randn(TD_SHAPE(SAMPLES, WIDTH), TD_F32, NULL), device);
        td_optimizer_zero_grad(sgd);
        td_tensor *loss = td_mse_loss(td_forward(model, x), x); /* learns the identity */
        status = td_backward(loss);
        if (!status)
            status = td_optimizer_step(sgd);
        *value = td_item(loss);
    }
    return status;
}

static td_status process(int local_rank, void *arg)
{
    const struct job *job = arg;
    int global_rank = job->node_rank * PER_NODE + local_rank;
    td_status status = set_up(job, global_rank);
    if (status)
        return status;
    char name[16];
    snprintf(name, sizeof name, "cpu:%d", local_rank);
    td_device *device = td_device_get(name);
    td_manual_seed((uint64_t)global_rank); /* different data on each rank */
    td_module *net = td_linear(WIDTH, WIDTH);
    td_module_to(net, device);
    td_module *model = td_ddp(net, NULL);
    td_optimizer *sgd = td_sgd(model, &(td_sgd_options){.lr = 2});
    double first = 0, last = 0;
    status = sgd ? train_step(model, sgd, device, &first) : TD_ERR_INVALID;
    for (int step = 1; step < STEPS && !status; step++)
        status = train_step(model, sgd, device, &last);
    if (!status) {
        TD_SCOPE;
        printf("node %d, local rank %d on %s, global rank %d of %d: loss %.4f to %.4f, "
               "weights %.9g\n",
               job->node_rank, local_rank, name, global_rank, td_get_world_size(NULL), first, last,
               td_item(td_norm(td_module_parameter(model, "module.weight"))));
    }
    td_optimizer_destroy(sgd);
    td_module_destroy(model);
    return status ? status : td_destroy_process_group();
}

static const char *variable(const char *name, const char *otherwise)
{
    return getenv(name) ? getenv(name) : otherwise;
}

int main(void)
{
    struct job job = {.nodes = atoi(variable("NODES", "1")),
                      .node_rank = atoi(variable("NODE_RANK", "0"))};
    snprintf(job.url, sizeof job.url, "tcp://%s:%s", variable("MASTER_ADDR", "127.0.0.1"),
             variable("MASTER_PORT", "12355"));
    snprintf(job.secret, sizeof job.secret, "%s", variable("TANDEM_SECRET", ""));
    if (td_spawn(process, &job, PER_NODE, NULL)) {
        fprintf(stderr, "09_ddp_nodes: %s\n", td_last_error());
        return 1;
    }
    return 0;
}
